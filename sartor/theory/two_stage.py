"""Compute how long two-stage FedProx must run for its guarantees, and its step sizes.

Chen, Zheng, Long, Su, JMLR 24(262), 2023 (arXiv 2103.01901): Theorems 11 and 12, Eq. (26), (27),
Lemma 15 with Eq. (38). The paper does not give the constants C, which depend on μ, β, D and the
largest loss only; they are arguments with default 1. Lemmas 14, 15, 18 and Proposition 16, which
have no such constant, bound how far the models are from the minimisers. The statistical part of
both theorems, and the symbols, are in ``two_stage_risk``.

Differs from the paper: Proposition 16 prints t + 1 for T + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from sartor.theory.quantities import check_clients


class Schedule(NamedTuple):
    """Sufficient numbers of rounds of stage I, T, and of local steps of stage II, K_T."""

    num_rounds: int
    num_final_steps: int


def local_rate(step: int, prox_strength: float, strong_convexity: float) -> float:
    """Return the local step η_{t,k} = 1/((μ+λ)(k+1)) of Eq. (26), (27); k restarts in every call.

    >>> [round(local_rate(k, 2.0, 1.0), 4) for k in range(3)]
    [0.3333, 0.1667, 0.1111]
    """
    return 1.0 / ((strong_convexity + prox_strength) * (step + 1))


def server_rate(round_index: int, prox_strength: float, strong_convexity: float) -> float:
    """Return the server's step η_t = 2(μ+λ)/(λμ(t+1)) of Eq. (26), for λ > 0.

    λη_0 = 2(μ+λ)/μ ≥ 2, so the first step overshoots the average of the models by design.

    >>> [server_rate(t, 2.0, 1.0) for t in range(3)]
    [3.0, 1.5, 1.0]
    """
    lam, mu = prox_strength, strong_convexity
    return 2.0 * (mu + lam) / (lam * mu * (round_index + 1))


def sufficient_local_steps(round_index: int, prox_strength: float, constant: float = 1.0) -> int:
    """Return the smallest K_t ≥ 1 with K_t + 1 ≥ C_1 max(λ², 1) t, Eq. (26).

    >>> [sufficient_local_steps(t, 2.0) for t in (0, 1, 5)]
    [1, 3, 19]
    """
    return _at_least(constant * max(prox_strength**2, 1.0) * round_index - 1.0)


def explicit_local_steps(
    round_index: int,
    prox_strength: float,
    *,
    smoothness: float,
    strong_convexity: float,
    diameter: float,
    loss_bound: float,
) -> int:
    """Return the smallest K_t ≥ 1 that satisfies Eq. (38), which has no unknown constant.

    K_t + 1 ≥ (4t + 20) λ²β²D² / (μ² min(β²D², 2λB, λ²D²)), for λ > 0.

    >>> explicit_local_steps(
    ...     0, 1.0, smoothness=1.0, strong_convexity=1.0, diameter=1.0, loss_bound=1.0
    ... )
    19
    """
    lam, mu = prox_strength, strong_convexity
    reach = (smoothness * diameter) ** 2
    least = envelope_gradient2(lam, smoothness, diameter, loss_bound)
    return _at_least((4 * round_index + 20) * lam**2 * reach / (mu**2 * least) - 1.0)


def sufficient_schedule(
    prox_strength: float,
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    error: Literal["average", "individual"] = "average",
    rounds_constant: float = 1.0,
    final_constant: float = 1.0,
) -> Schedule:
    """Return T and K_T of Theorem 11 (average excess risk) or Theorem 12 (every client's own).

    With a = λ max(λ, 1) and h = 1/Σ (p_i/n_i):
    Theorem 11: T ≥ C_2 a m‖p‖² max(h, a n_max²), K_T ≥ C_3 (λ+1)² max(h, λ² max_i (p_i n_i)²);
    Theorem 12: T ≥ C_2 a max_i n_i max(1/p_i, a n_i),
    K_T ≥ C_3 (λ+1)² max_i n_i max(1/p_i, λ² p_i² n_i).

    They are the smallest whole numbers that satisfy the bounds, at least 1 each. p_i is 1/m if
    None; C_2 and C_3 are ``rounds_constant`` and ``final_constant``.

    >>> sufficient_schedule(0.1, [100] * 5)
    Schedule(num_rounds=100, num_final_steps=121)
    """
    lam, m = prox_strength, len(sizes)
    p = [1.0 / m] * m if weights is None else list(weights)
    check_clients(p, sizes)
    pull = lam * max(lam, 1.0)
    pairs = list(zip(p, sizes, strict=True))
    if error == "average":
        mean = 1.0 / sum(q / n for q, n in pairs)
        rounds = pull * m * sum(q * q for q in p) * max(mean, pull * max(sizes) ** 2)
        final = max(mean, lam**2 * max((q * n) ** 2 for q, n in pairs))
    else:
        rounds = pull * max(n * max(1.0 / q, pull * n) for q, n in pairs)
        final = max(n * max(1.0 / q, lam**2 * q**2 * n) for q, n in pairs)
    return Schedule(
        _at_least(rounds_constant * rounds), _at_least(final_constant * (lam + 1.0) ** 2 * final)
    )


# ---- distance from the minimisers ----------------------------------------------------------------


def envelope_gradient2(
    prox_strength: float, smoothness: float, diameter: float, loss_bound: float
) -> float:
    """Return Lemma 18's bound on ‖∇F_i(w)‖² over W, min(β²D², 2λB, λ²D²).

    The first needs a minimiser of L_i inside W.

    >>> envelope_gradient2(0.5, 2.0, 2.0, 9.0)
    1.0
    """
    lam = prox_strength
    return min((smoothness * diameter) ** 2, 2.0 * lam * loss_bound, (lam * diameter) ** 2)


def inner_error2(
    num_steps: int, smoothness: float, strong_convexity: float, diameter: float
) -> float:
    """Return Lemma 14's bound 8β²D²/(μ²(k+1)) on E‖w_{t,k} − prox_i(w_g,t)‖² after k steps.

    >>> inner_error2(7, 2.0, 1.0, 1.0)
    4.0
    """
    return 8.0 * (smoothness * diameter / strong_convexity) ** 2 / (num_steps + 1)


def outer_error2(
    round_index: int,
    prox_strength: float,
    weights: Sequence[float],
    *,
    smoothness: float,
    strong_convexity: float,
    diameter: float,
    loss_bound: float,
) -> float:
    """Return Lemma 15's bound on E‖w_g,t − w̃_g‖², where every K_τ satisfies Eq. (38).

    12 (λ+μ)² m‖p‖² min(β²D², 2λB, λ²D²)/(λ²μ²(t+1)).

    >>> outer_error2(
    ...     5, 1.0, [0.5, 0.5], smoothness=1.0, strong_convexity=1.0, diameter=1.0, loss_bound=1.0
    ... )
    8.0
    """
    lam, mu = prox_strength, strong_convexity
    least = envelope_gradient2(lam, smoothness, diameter, loss_bound)
    balance = len(weights) * sum(p * p for p in weights)
    return 12.0 * ((lam + mu) / (lam * mu)) ** 2 * balance * least / (round_index + 1)


def objective_error(
    num_rounds: int,
    num_final_steps: int,
    prox_strength: float,
    weights: Sequence[float],
    *,
    smoothness: float,
    strong_convexity: float,
    diameter: float,
    loss_bound: float,
) -> float:
    """Return Proposition 16's bound on E_OPT, the objective at the output minus its minimum.

    (β+λ)/2 times Lemma 14's bound at K_T steps, and λ/2 times Lemma 15's after T rounds:
    4(β+λ)β²D²/(μ²(K_T+1)) + 6(λ+μ)² m‖p‖² min(β²D², 2λB, λ²D²)/(λμ²(T+1)).
    """
    loss = {"smoothness": smoothness, "strong_convexity": strong_convexity, "diameter": diameter}
    inner = inner_error2(num_final_steps, **loss)
    outer = outer_error2(num_rounds, prox_strength, weights, **loss, loss_bound=loss_bound)
    return (smoothness + prox_strength) / 2.0 * inner + prox_strength / 2.0 * outer


def _at_least(bound: float) -> int:
    """Return the smallest whole number ≥ 1 that is not below the bound, up to rounding."""
    return max(1, math.ceil(bound - 1e-9 * abs(bound)))
