"""Bound how fast one-stage FedProx and L2GD minimise Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²].

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Lemma 2,
Theorem 2, Corollary 1 and Table 2; Hanzely, Richtárik, "Federated Learning of a Mixture of Global
and Local Models" (arXiv 2002.05516) for L2GD.

| symbol | here | meaning |
|---|---|---|
| λ | prox_strength | the pull between the clients' models and the global one |
| L, μ, κ | smoothness, strong_convexity, L/μ | of the clients' losses |
| η, γ, K | local_lr, server_lr, num_local_steps | FedProx' steps |
| r | rate | the share of the squared error that is left after a round, at most |
| c_1 | error_weight | the weight of the clients' errors in the quantity that contracts |
| p | average_probability | how often L2GD averages |

Differs from the paper: its proof also needs (109), γ(2 + 1/(1 − γL_g))μ_g/2 ≤ 1, which
``satisfies`` checks; Corollary 1's steps always satisfy it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sartor.core.errors import ConfigError

Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Envelope:
    """Lemma 2: the constants of the Moreau envelope F and of the clients' objectives h_i."""

    pull: float  # λ/μ; also L_w λ/μ_g, as (12) has it
    smoothness: float  # L_g = λL/(λ+L), of F
    strong_convexity: float  # μ_g = λμ/(λ+μ), of F
    condition: float  # κ_g = L_g/μ_g = κ(λ+μ)/(λ+L), 1 at λ = 0; rounds are κ_g times a logarithm
    local_smoothness: float  # L_l = L + λ, of h_i
    local_strong_convexity: float  # μ_l = μ + λ, of h_i
    follow: float  # L_w = λ/(λ+μ), the most that a client's minimiser moves when w_g moves by one

    def inner(self, num_local_steps: int, local_lr: float) -> float:
        """Return (1 − ημ_l)^K, the most that K local steps leave of a client's squared error."""
        left: float = (1.0 - local_lr * self.local_strong_convexity) ** num_local_steps
        return left


def envelope(prox_strength: float, smoothness: float, strong_convexity: float) -> Envelope:
    """Return the constants of Lemma 2 for one λ >= 0 and 0 < μ <= L.

    >>> envelope(2.0, 4.0, 1.0).condition
    2.0
    """
    lam, big, small = prox_strength, smoothness, strong_convexity
    return Envelope(
        pull=lam / small,
        smoothness=lam * big / (lam + big),
        strong_convexity=lam * small / (lam + small),
        condition=big / small * (lam + small) / (lam + big),
        local_smoothness=lam + big,
        local_strong_convexity=lam + small,
        follow=lam / (lam + small),
    )


def check_strong_convexity(strong_convexity: float | None, smoothness: float | None) -> None:
    """Refuse a μ that is missing, not positive, or larger than L."""
    small = strong_convexity or 0.0
    if not 0 < small <= (smoothness or small):
        raise ConfigError(
            f"FedProx' theory needs 0 < strong_convexity <= smoothness, got {strong_convexity} and "
            f"{smoothness}; give strong_convexity=μ of the loss, or add a ridge term "
            "(weight_decay) to make a convex loss strongly convex."
        )


# ---- Theorem 2 and Corollary 1 -------------------------------------------------------------------


def satisfies(num_local_steps: int, local_lr: float, server_lr: float, env: Envelope) -> bool:
    """Return whether the steps satisfy Theorem 2: η <= 1/L_l, γ < 1/L_g, (12) and (109)."""
    slack = 1.0 - server_lr * env.smoothness
    if local_lr * env.local_smoothness > 1.0 + 1e-12 or slack <= 0.0:
        return False
    inner = (2.0 + 64.0 * env.pull**2) * env.inner(num_local_steps, local_lr)
    outer = server_lr * (2.0 + 1.0 / slack) * env.strong_convexity / 2.0  # (109)
    return inner <= slack**4 * (1.0 + 1e-9) and outer <= 1.0 + 1e-12


def rate(server_lr: float, env: Envelope) -> float:
    """Return r = 1 − γμ_g/2 − (γμ_g)²/2 of Theorem 2, the factor of a round's contraction.

    It holds in every round for ‖w_g,t − w̃_g‖² + c_1 · mean_i ‖w_t,K − prox_i(w_g,t)‖² of (103),
    where w_t,K are the clients' models after training from w_g,t, and hence bounds ‖w_i − w̃_i‖².
    """
    step = server_lr * env.strong_convexity
    return 1.0 - step / 2.0 - step**2 / 2.0


def error_weight(num_local_steps: int, local_lr: float, server_lr: float, env: Envelope) -> float:
    """Return c_1 of (103), with the free numbers of the proof as in (105) and (111)."""
    lam, gamma = env.follow * env.local_strong_convexity, server_lr
    slack = 1.0 - gamma * env.smoothness  # ζ
    split = env.strong_convexity / 2.0 * (1.0 - gamma * env.strong_convexity)  # ε_g
    inner = env.inner(num_local_steps, local_lr)
    q = (2.0 + 4.0 * (env.follow * gamma * lam) ** 2) * inner
    gain = (gamma / split + gamma**2 * (2.0 + 1.0 / slack)) * lam**2
    return 2.0 / (rate(gamma, env) - q) * gain


def num_rounds(accuracy: float, start: float, rate: float) -> int:
    """Return ⌈ln(start/accuracy)/(−ln r)⌉, the rounds until a squared error is small enough.

    >>> num_rounds(1e-6, 1.0, 0.5)
    20
    """
    return max(0, math.ceil(math.log(start / accuracy) / -math.log(rate)))


def local_steps(prox_strength: Tensor, smoothness: float, strong_convexity: float) -> Tensor:
    """Return the smallest K of condition (12) at Corollary 1's steps, for each λ.

    ⌈ln(16(2 + 64λ²/μ²)) / ln((λ+L)/(L−μ))⌉, and 1 where L = μ.
    """
    lam = prox_strength.double()
    if smoothness == strong_convexity:
        return torch.ones_like(lam, dtype=torch.int64)
    need = torch.log(16.0 * (2.0 + 64.0 * lam.square() / strong_convexity**2))
    fall = torch.log((lam + smoothness) / (smoothness - strong_convexity))
    return torch.ceil(need / fall - 1e-12).clamp(min=1).to(torch.int64)


def local_steps_bound(prox_strength: float, smoothness: float, strong_convexity: float) -> int:
    """Return the looser K of (118), ⌈2 + ((λ+L)/(λ+μ)) ln(1056κ²)⌉.

    >>> local_steps_bound(0.5, 1.0, 0.1)
    31
    """
    lam, big, small = prox_strength, smoothness, strong_convexity
    return math.ceil(2.0 + (lam + big) / (lam + small) * math.log(1056.0 * (big / small) ** 2))


def server_lr(prox_strength: Number, smoothness: float, safety: float = 2.0) -> Number:
    """Return γ = 1/(s L_g) = (λ+L)/(s λL): s = 2 in Corollary 1, 1 in the experiments."""
    return (prox_strength + smoothness) / (safety * smoothness * prox_strength)


def corollary1(
    prox_strength: float, smoothness: float, strong_convexity: float
) -> dict[str, float]:
    """Return Corollary 1's numbers for one λ > 0, by name.

    The names are local_lr, server_lr, num_local_steps, num_local_steps_bound (118), and rate (the
    one of Theorem 2, for a round).

    >>> corollary1(2.0, 4.0, 1.0)["num_local_steps"]
    13
    """
    lam, big, small = prox_strength, smoothness, strong_convexity
    gamma = server_lr(lam, big)
    return {
        "local_lr": 1.0 / (lam + big),
        "server_lr": gamma,
        "num_local_steps": int(local_steps(torch.tensor(lam, dtype=torch.float64), big, small)),
        "num_local_steps_bound": local_steps_bound(lam, big, small),
        "rate": rate(gamma, envelope(lam, big, small)),
    }


# ---- L2GD ----------------------------------------------------------------------------------------


def average_probability(prox_strength: Number, smoothness: float) -> Number:
    """Return p* = λ/(λ+L), L2GD's best probability for iterations and for exchanges.

    >>> average_probability(2.0, 4.0) == 1 / 3
    True
    """
    return prox_strength / (prox_strength + smoothness)


def l2gd_lr(prox_strength: Number, smoothness: float) -> Number:
    """Return η = α/m = 1/(2(λ+L)): the largest step of L2GD's theorem, at p*."""
    return 1.0 / (2.0 * (prox_strength + smoothness))


def l2gd_limit(prox_strength: float, smoothness: float, average_probability: float) -> float:
    """Return the largest η = α/m for any 0 < p < 1: 1/(2 max{L/(1−p), λ/p})."""
    p = average_probability
    return 0.5 / max(smoothness / (1.0 - p), prox_strength / p)


def l2gd_exchanges(prox_strength: float, smoothness: float, strong_convexity: float) -> float:
    """Return 2λκ/(λ+L): L2GD's exchanges at p*, in units of ln(1/ε) (Table 2).

    One-stage FedProx needs ``envelope(...).condition`` in the same units; the two are equal at
    λ = μ. L2GD takes 1 + L/λ gradients per exchange, FedProx (λ+L)/(λ+μ) times a logarithm.
    """
    p = average_probability(prox_strength, smoothness)
    return 2.0 * p * smoothness / strong_convexity
