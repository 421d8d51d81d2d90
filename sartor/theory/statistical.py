"""Bound how close the minimisers of Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²] are to the true models.

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Theorem 1 in
the first version (``v1``) and in a later one (``v2``). Its lemmas are in ``lemmas``, its rates in
``tables``.

| symbol | here | meaning |
|---|---|---|
| w̃_g, w̃_i | | the exact minimiser; w̃_g = Σ p_i w̃_i |
| w_i*, w_g* | | the true models and their mean Σ p_i w_i* |
| R | heterogeneity | the largest ‖w_i* − w_g*‖ |
| ρ | noise | root of the mean squared gradient of one sample at its client's true model |
| n, N | num_samples, total_samples | a client's samples, and all |
| L, μ, κ | smoothness, strong_convexity, L/μ | of the clients' losses |
| λ | prox_strength | the pull |

Unequal clients: (34), (55) and (56) are the formulas for equal clients with n = 1/Σ(p_i/n_i) and
N = 1/Σ(p_i²/n_i), from ``quantities.sums``; they concern the global model only.

Differs from the paper: C_4 of v1 prints ∧ for ∨; a_2 of v2 drops κ² from the step before it; (55)
and (56) have N where Lemma 5 gives 1/Σ(p_i²/n_i), which is smaller unless p_i = n_i/N. The
constants are too large for useful bounds: use them for rates only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor.theory import coupling
from sartor.theory.quantities import Form, Number, tensors

Version = Literal["v1", "v2"]

# ---- Theorem 1 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """C_1 to C_4 of Theorem 1, and which version of it; the rates differ too."""

    version: Version
    global_pooled: Tensor  # C_1
    global_spread: Tensor  # C_2
    local_pooled: Tensor  # C_3
    local_spread: Tensor  # C_4


def constants(
    smoothness: Number,
    strong_convexity: Number,
    noise: Number,
    version: Version = "v2",
    form: Form = "corrected",
) -> Constants:
    """Return C_1 to C_4 of Theorem 1.

    v1: ρ²/μ², ((1+√(1+2μ))ρ/(2μ))² ∨ 2ρ/μ, 8ρ²/μ², and the larger of the two ``v1_terms`` (as
    printed the smaller; then it covers one regime only). v1 does not need L.
    v2: 32ρ²/μ², ((1+√3)ρ/μ)² ∨ 32κ², 192ρ²/μ², (ρ(1+√(4C_2+5))/μ)² ∨ 198κ².

    >>> float(constants(1.0, 0.1, 2.0).global_spread)
    3200.0
    """
    big, mu, rho = tensors(smoothness, strong_convexity, noise)
    ratio2, kappa2 = (rho / mu).square(), (big / mu).square()
    if version == "v1":
        spread = _v1_spread(mu, rho)
        either = torch.minimum if form == "printed" else torch.maximum
        return Constants("v1", ratio2, spread, 8.0 * ratio2, either(*v1_terms(mu, rho)))
    spread = torch.maximum((1.0 + math.sqrt(3.0)) ** 2 * ratio2, 32.0 * kappa2)
    root = rho * (1.0 + (4.0 * spread + 5.0).sqrt()) / mu
    local = torch.maximum(root.square(), 198.0 * kappa2)
    return Constants("v2", 32.0 * ratio2, spread, 192.0 * ratio2, local)


def v1_terms(strong_convexity: Number, noise: Number) -> tuple[Tensor, Tensor]:
    """Return the two arguments of v1's C_4, (ρ(1+√(1+4μ(C_2+1)))/(2μ))² and 8C_2 + 2ρ/μ.

    The first is for clients that differ, the second for clients that are alike.

    >>> [round(float(x), 2) for x in v1_terms(0.1, 2.0)]
    [20464.66, 3552.71]
    """
    mu, rho = tensors(strong_convexity, noise)
    spread = _v1_spread(mu, rho)
    apart = rho * (1.0 + (1.0 + 4.0 * mu * (spread + 1.0)).sqrt()) / (2.0 * mu)
    return apart.square(), 8.0 * spread + 2.0 * rho / mu


def _v1_spread(mu: Tensor, rho: Tensor) -> Tensor:
    root = (1.0 + (1.0 + 2.0 * mu).sqrt()) * rho / (2.0 * mu)
    return torch.maximum(root.square(), 2.0 * rho / mu)


def global_bound(
    heterogeneity: Number, num_samples: Number, total_samples: Number, constants: Constants
) -> Tensor:
    """Bound E‖w̃_g − w_g*‖²: C_1/N + C_2 (1/n ∧ R/√n) in v1, C_1/N + C_2 (1/n ∧ R²) in v2."""
    spread = _spread(heterogeneity, num_samples, constants.version)
    return constants.global_pooled / tensors(total_samples)[0] + constants.global_spread * spread


def local_bound(
    heterogeneity: Number, num_samples: Number, total_samples: Number, constants: Constants
) -> Tensor:
    """Bound E‖w̃_i − w_i*‖² for every client, of equal sizes.

    v1: C_3/N + C_4 (1/n ∧ R/√n) + 16 (ρ²/(μ²n) ∧ R²); v2: C_3/N + C_4 (1/n ∧ R²).
    """
    r, n, total = tensors(heterogeneity, num_samples, total_samples)
    spread = _spread(r, n, constants.version)
    found = constants.local_pooled / total + constants.local_spread * spread
    if constants.version == "v1":
        found = found + 16.0 * torch.minimum(constants.global_pooled / n, r.square())
    return found


def bounds_by_case(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number,
) -> tuple[Tensor, Tensor]:
    """Return v2's bounds (55) on the global and (76) on the local error, before they are joined.

    R > 1/√n: ((1+√3)ρ/μ)²/n and (ρ(1+√(4C_2+5))/μ)²/n; else 32(ρ²/(μ²N) + κ²R²) and
    192ρ²/(μ²N) + 198κ²R². Never above ``global_bound`` and ``local_bound``.
    """
    r, n, total = tensors(heterogeneity, num_samples, total_samples)
    big, mu, rho = tensors(smoothness, strong_convexity, noise)
    ratio2, bias = (rho / mu).square(), (big * r / mu).square()
    spread = constants(smoothness, strong_convexity, noise).global_spread
    apart = (rho * (1.0 + (4.0 * spread + 5.0).sqrt()) / mu).square() / n
    alike = r <= 1.0 / n.sqrt()
    shared = (1.0 + math.sqrt(3.0)) ** 2 * ratio2 / n
    return (
        torch.where(alike, 32.0 * (ratio2 / total + bias), shared),
        torch.where(alike, 192.0 * ratio2 / total + 198.0 * bias, apart),
    )


def _spread(heterogeneity: Number, num_samples: Number, version: Version) -> Tensor:
    r, n = tensors(heterogeneity, num_samples)
    return torch.minimum(1.0 / n, r / n.sqrt() if version == "v1" else r.square())


# ---- Theorem 1's condition on λ ------------------------------------------------------------------


class Range(NamedTuple):
    """The λ that a theorem allows: low <= λ <= high."""

    low: Tensor
    high: Tensor

    def admits(self, prox_strength: Number) -> Tensor:
        """Return for each value whether λ is allowed."""
        (lam,) = tensors(prox_strength)
        return (self.low <= lam) & (lam <= self.high)


def prox_range(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number = 2.0,
    version: Version = "v2",
    condition: Literal["(82)", "(81)", "printed (81)"] = "(82)",
) -> Range:
    """Return the λ for which Theorem 1 holds.

    v1: the one value ``coupling.v1``. v2, R <= 1/√n: from (82), or from max(a_1, a_2) of (81) with
    the corrected or the printed a_2, upwards; R > 1/√n: from 0 to ρ²/(nμR²), so that choosing the
    better of one model for all and separate models satisfies it too.

    >>> [float(x) for x in prox_range(0.5, 200, 2000, 1.0, 0.1)]
    [0.0, 0.8]
    """
    r, n = tensors(heterogeneity, num_samples)
    if version == "v1":
        only = coupling.v1(heterogeneity, num_samples, noise)
        return Range(only, only)
    given = (heterogeneity, num_samples, total_samples, smoothness, strong_convexity, noise)
    bound = coupling.v2(*given)
    low = bound
    if condition != "(82)":
        form: Form = "printed" if condition.startswith("printed") else "corrected"
        low = torch.maximum(global_floor(*given), local_floor(*given, form=form)).clamp(min=0.0)
    alike = (r <= 1.0 / n.sqrt()).expand(bound.shape)
    return Range(
        torch.where(alike, low, torch.zeros_like(bound)),
        torch.where(alike, torch.full_like(bound, math.inf), bound),
    )


def global_floor(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number = 2.0,
) -> Tensor:
    """Return a_1 of (81), the least λ for v2's global bound where clients are alike.

    (8κ/μ) {8L² ∨ (2L²R² + ρ²/n)/(4ρ²/(μ²N) + 4κ²R²)} − μ.
    """
    r, n, total, rho = tensors(heterogeneity, num_samples, total_samples, noise)
    big, mu = tensors(smoothness, strong_convexity)
    bias, var = (big * r).square(), rho.square()
    share = (2.0 * bias + var / n) / (4.0 * (var / total + bias) / mu.square())
    return 8.0 * big / mu.square() * torch.maximum(8.0 * big.square(), share) - mu


def local_floor(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number = 2.0,
    form: Form = "corrected",
) -> Tensor:
    """Return a_2 of (81), the least λ for v2's local bound where clients are alike.

    From (72): √(12 (128κ²ρ²/N + (128κ²+4)L²R² + 2ρ²/n)/(96ρ²/(μ²N) + 99κ²R²)) − μ. As printed, κ²
    is lost: √(8 (64ρ²/N + 66L²R² + ρ²/n)/(32ρ²/(μ²N) + 33κ²R²)) − μ.
    """
    r, n, total, rho = tensors(heterogeneity, num_samples, total_samples, noise)
    big, mu = tensors(smoothness, strong_convexity)
    bias, var = (big * r).square(), rho.square()
    kappa2 = torch.ones_like(mu) if form == "printed" else (big / mu).square()
    top = 128.0 * kappa2 * var / total + (128.0 * kappa2 + 4.0) * bias + 2.0 * var / n
    return (12.0 * top / (96.0 * var / total + 99.0 * bias)).sqrt() * mu - mu
