"""Compare methods for Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²] in errors, gradients and exchanges.

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Tables 1 and 2
and Corollary 1. The bounds with constants are in ``statistical``, the step sizes in ``proximal``.

| symbol | here | meaning |
|---|---|---|
| R | heterogeneity | the largest distance of a client's true model from their mean |
| n, m | num_samples, num_clients | samples of every client, clients |
| D, B | diameter, loss_bound | the size of the domain, the largest loss |
| λ; L, μ, κ | prox_strength; smoothness, strong_convexity, L/μ | the pull; of the losses |
| ε | accuracy | the squared error to reach |

Differs from the paper: Table 1 of the later version prints R² ∧ 1/(mn) for R² ∨ 1/(mn), and 1/√(mn)
for Chen's 1/(√m n); it cites the two-stage method as "Algorithm 3", which is Algorithm 2, and Table
2 as Table 5.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sartor.core.errors import ConfigError, did_you_mean
from sartor.theory.proximal import corollary1, envelope, l2gd_exchanges, num_rounds
from sartor.theory.quantities import Form, Number, tensors

# ---- Table 1 -------------------------------------------------------------------------------------

SOURCES = ("chen", "v1", "v2", "lower")


def statistical_rate(
    source: str,
    heterogeneity: Number,
    num_samples: Number,
    num_clients: Number,
    *,
    diameter: Number = 1.0,
    loss_bound: Number = 1.0,
    form: Form = "corrected",
) -> Tensor:
    """Return a row of Table 1, the rate of E‖w̃_i − w_i*‖² without constants.

    | source | R > 1/√n | R <= 1/√n |
    |---|---|---|
    | chen | (D² + B)/n | B (R/√n ∨ 1/(√m n)) |
    | v1 | 1/n | R/√n ∨ 1/(mn) |
    | v2, lower | 1/n | R² ∨ 1/(mn) |

    The paper prints the second column as two, with a switch at R = 1/(m√n). That is right for v1
    only: Chen's rate and R² meet 1/(√m n) and 1/(mn) at R = 1/√(mn). `printed` is the table of v2:
    R² ∧ 1/(mn) between the switches, and 1/√(mn) for Chen below. The ``source`` "lower" is the
    lower bound of Chen et al.; D and B are for "chen".

    >>> float(statistical_rate("v2", 0.01, 100, 4)), float(statistical_rate("v1", 0.01, 100, 4))
    (0.0025, 0.0025)
    """
    if source not in SOURCES:
        raise ConfigError(f"Table 1 has no row {source!r}{did_you_mean(source, SOURCES)}")
    r, n, m, wide, top = tensors(heterogeneity, num_samples, num_clients, diameter, loss_bound)
    pooled, apart, scale = 1.0 / (m * n), 1.0 / n, torch.ones_like(top)
    middle = r.square() if source in ("v2", "lower") else r / n.sqrt()
    if source == "chen":
        scale, apart = top, (wide.square() + top) / n
        pooled = (m * n).rsqrt() if form == "printed" else 1.0 / (m.sqrt() * n)
    if form == "printed":
        if source in ("v2", "lower"):
            middle = torch.minimum(middle, pooled)
        alike = torch.where(r > 1.0 / (m * n.sqrt()), middle, pooled)
    else:
        alike = torch.maximum(middle, pooled)
    return torch.where(r > 1.0 / n.sqrt(), apart, scale * alike)


# ---- Table 2 -------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """A row of Table 2, without constants and, in the gradients, without logarithms."""

    method: str  # the method's name here
    convexity: str  # "convex" or "strongly convex", what its theorem assumes of the losses
    bounded_domain: bool  # whether its theorem needs one
    gradients: float  # of a client in a round; nan if they depend on how inexactly it solves
    exchanges: float  # rounds until the squared error is ε


def table_2(
    accuracy: float,
    prox_strength: float,
    smoothness: float,
    strong_convexity: float,
    *,
    num_clients: int = 1,
    num_local_steps: int = 1,
    inexactness: float = 1.0,
    gap: float = 1.0,
) -> dict[str, Cost]:
    """Return Table 2 as numbers, by method, for λ > 0.

    m and ``num_local_steps`` (R) are for pFedMe. For the FedProx of Li et al. are ``inexactness``
    (ρ), how precisely its clients solve their problems, and ``gap`` (Δ), the objective at the start
    minus its minimum.

    >>> table_2(math.exp(-1), 0.5, 1.0, 0.1)["fedprox"].exchanges
    4.0
    """
    lam, log = prox_strength, math.log(1.0 / accuracy)
    strong, open_end = "strongly convex", math.nan
    condition = envelope(lam, smoothness, strong_convexity).condition
    exchanges = l2gd_exchanges(lam, smoothness, strong_convexity)
    ratio = (lam + smoothness) / (lam + strong_convexity)
    rows = (
        Cost("fedprox_li", "convex", False, open_end, gap / (inexactness * accuracy)),
        Cost("pfedme", strong, False, open_end, 1.0 / (num_clients * num_local_steps * accuracy)),
        Cost("ditto", strong, False, 1.0, 1.0 / accuracy),
        Cost("l2gd", strong, False, 1.0 + smoothness / lam, exchanges * log),
        Cost("fedprox_two_stage", strong, True, lam / accuracy, max(lam, 1.0) / accuracy),
        Cost("fedprox", strong, False, ratio, condition * log),
    )
    return {row.method: row for row in rows}


class Work(NamedTuple):
    """What one-stage FedProx needs for an accuracy, at Corollary 1's steps."""

    num_rounds: int  # rounds of communication, O(κ_g ln(1/ε))
    num_local_steps: int  # K, gradients of a client in a round
    num_gradients: int  # K times the rounds, Õ(κ ln(1/ε)), independent of λ up to logarithms


def work(
    accuracy: float, start: float, prox_strength: float, smoothness: float, strong_convexity: float
) -> Work:
    """Return the rounds, local steps and gradients that bring a squared error from Δ_0 to ε.

    ⌈ln(Δ_0/ε)/(−ln r)⌉ rounds of K = ⌈ln(16(2 + 64λ²/μ²))/ln((λ+L)/(L−μ))⌉ steps.

    >>> work(1e-6, 1.0, 2.0, 4.0, 1.0)
    Work(num_rounds=82, num_local_steps=13, num_gradients=1066)
    """
    found = corollary1(prox_strength, smoothness, strong_convexity)
    rounds, steps = num_rounds(accuracy, start, found["rate"]), int(found["num_local_steps"])
    return Work(rounds, steps, rounds * steps)
