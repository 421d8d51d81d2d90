"""What a strategy costs: steps, rounds, bytes and gradients until optimisation no longer matters.

Full gradients, as in the theory: K local steps of η a round, and a server step γ. The rounds that
Theorem 2 guarantees are an upper bound that is rarely near; the prediction is the linear rate at
the solution, (1 − γs)² a round of the squared error with s = Σ p_i λμ_i/(λ+μ_i) from the clients'
own curvatures, which is an upper bound too wherever losses are steeper on the way than at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from sartor.theory import proximal

Strategy = Literal["local", "global", "personalised"]


@dataclass(frozen=True)
class CostPlan:
    """The steps of a strategy and its predicted cost.

    Attributes:
        strategy: "local", "global" or "personalised".
        prox_strength: λ; 0 or ∞ for the first two.
        local_lr: η.
        server_lr: γ; 0 where nothing is sent, and where the server averages.
        num_local_steps: K, full-gradient steps a round.
        rounds: predicted rounds until the squared distance to the solution is ``accuracy``.
        guaranteed_rounds: by Theorem 2, or the rate of gradient descent.
        start: the squared distance at the start.
        accuracy: ε, the squared distance to reach.
        bytes_total: both ways, all clients, all rounds; with a pull the number of local steps goes
            along in every round.
        gradients: gradient evaluations of single samples, all clients.
        rate: what a round leaves of the squared error, predicted.
        guaranteed_rate: by Theorem 2, at most.
    """

    strategy: Strategy
    prox_strength: float
    local_lr: float
    server_lr: float
    num_local_steps: int
    rounds: int
    guaranteed_rounds: int
    start: float
    accuracy: float
    bytes_total: int
    gradients: int
    rate: float
    guaranteed_rate: float

    def left(self, rounds: int) -> float:
        """Return the squared distance to the solution that is predicted after some rounds."""
        return self.start * self.rate**rounds

    def within(self, rounds: int) -> CostPlan:
        """Return the plan with at most some rounds, and the accuracy that is predicted then."""
        if self.rounds <= rounds:
            return self
        share = rounds / self.rounds
        return replace(
            self,
            rounds=rounds,
            accuracy=self.left(rounds),
            bytes_total=int(self.bytes_total * share),
            gradients=int(self.gradients * share),
        )


def make_plan(
    prox_strength: float,
    *,
    smoothness: float,
    curvatures: Tensor,
    weights: Tensor,
    sizes: Tensor,
    num_params: int,
    start: float,
    accuracy: float,
    bytes_per_number: int = 4,
) -> CostPlan:
    """Choose the steps for one λ and predict their cost.

    Args:
        prox_strength: λ, from 0 (every client alone) to ∞ (one model for all).
        smoothness: L of every client's loss.
        curvatures: (clients,) μ_i > 0, the smallest eigenvalue of every client's Hessian.
        weights: (clients,) p_i.
        sizes: (clients,) n_i.
        num_params: |θ|.
        start: squared distance of the initial model from the solution.
        accuracy: ε.
        bytes_per_number: of a number on the wire.
    """
    lam, big = prox_strength, smoothness
    small = min(float(curvatures.min()), big)
    need = max(start / accuracy, 1.0 + 1e-12)
    total = float(sizes.sum())
    traffic = round_bytes(lam, num_params, len(sizes), bytes_per_number)
    if lam == 0.0 or math.isinf(lam):
        alone = lam == 0.0
        mean = small if alone else min(float((weights * curvatures).sum()), big)
        rate, worst = (1.0 - mean / big) ** 2, (1.0 - small / big) ** 2
        rounds = _rounds(need, rate)
        return CostPlan(
            strategy="local" if alone else "global",
            prox_strength=lam,
            local_lr=1.0 / big,
            server_lr=0.0,
            num_local_steps=1,
            rounds=rounds,
            guaranteed_rounds=_rounds(need, worst),
            start=start,
            accuracy=accuracy,
            bytes_total=rounds * traffic,
            gradients=int(rounds * total),
            rate=rate,
            guaranteed_rate=worst,
        )
    steps = proximal.corollary1(lam, big, small)
    gamma, inner = steps["server_lr"], int(steps["num_local_steps"])
    envelope = float((weights * lam * curvatures / (lam + curvatures)).sum())
    rate = (1.0 - gamma * envelope) ** 2
    rounds = _rounds(need, rate)
    return CostPlan(
        strategy="personalised",
        prox_strength=lam,
        local_lr=steps["local_lr"],
        server_lr=gamma,
        num_local_steps=inner,
        rounds=rounds,
        guaranteed_rounds=proximal.num_rounds(accuracy, accuracy * need, steps["rate"]),
        start=start,
        accuracy=accuracy,
        bytes_total=rounds * traffic,
        gradients=int(rounds * inner * total),
        rate=rate,
        guaranteed_rate=steps["rate"],
    )


def round_bytes(
    prox_strength: float, num_params: int, num_clients: int, bytes_per_number: int = 4
) -> int:
    """Return what a round sends, both ways, all clients: 0 alone, models, and K with a pull.

    >>> round_bytes(0.0, 10, 3), round_bytes(math.inf, 10, 3), round_bytes(0.5, 10, 3)
    (0, 240, 252)
    """
    if prox_strength == 0.0:
        return 0
    numbers = 2 * num_params + (0 if math.isinf(prox_strength) else 1)
    return numbers * bytes_per_number * num_clients


def _rounds(need: float, rate: float) -> int:
    return 1 if rate <= 0.0 else max(1, math.ceil(math.log(need) / -math.log(rate)))
