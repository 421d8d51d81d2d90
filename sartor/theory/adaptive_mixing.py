"""Bound how much one round of FedAPA lowers a client's loss, and the steps that guarantee it.

Sun, Sun, Pan, Fu, Guo, "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation",
IJCAI 2025 (arXiv 2502.07456), Theorem 1 and Corollary 1: one client, plain SGD, E local steps.

| symbol | here | meaning |
|---|---|---|
| F_{tE+½} | loss | the loss of θ̄_i, just after the download of round t = 0, 1, ... |
| S | gradient_sum | Σ of the E squared gradient norms of the round's local steps |
| α, E | local_lr, num_steps | the local step, and how many |
| L_1, L_2 | smoothness > 0, lipschitz | of the gradient, and of the loss |
| σ² | noise | the variance of the gradients |
| η | mix_lr | the step on the mixing matrix A |
| Max | radius | the largest ‖θ_j‖ (and ‖θ̄_j‖) seen so far |
| M | num_clients | the columns of Θ |

Differs from the paper: its proof bounds the spectral norm of Θ twice by the norm of its largest
column, which is too small by up to √M, and it ignores the clipping and normalising of A.
``round_bound`` has three forms: the printed one, one with the missing factor M, and one for rows of
A on the simplex, where θ̄_i and θ_i both lie in the ball of radius Max.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Form = Literal["printed", "safe", "simplex"]


@dataclass(frozen=True)
class Problem:
    """The constants of a client's loss and its round; the symbols are those of the module."""

    smoothness: float
    lipschitz: float
    radius: float
    num_steps: int
    noise: float = 0.0
    num_clients: int = 1

    def drift(self, mix_lr: float, round_index: int, form: Form = "printed") -> float:
        """Bound how much the next download may raise the loss.

        `printed` is 2 L_2 η (t+1) Max³ (valid if Θ has one column), `safe` is M times that, and
        `simplex` is 2 L_2 Max, which does not depend on η.

        >>> Problem(1.0, 1.0, 2.0, 1, num_clients=3).drift(0.1, 0, "safe")
        4.800000000000001
        """
        if form == "simplex":
            return 2.0 * self.lipschitz * self.radius
        factor = self.num_clients if form == "safe" else 1
        return 2.0 * factor * self.lipschitz * mix_lr * (round_index + 1) * self.radius**3


def round_bound(
    loss: float,
    gradient_sum: float,
    local_lr: float,
    mix_lr: float,
    round_index: int,
    problem: Problem,
    form: Form = "printed",
) -> float:
    """Return Theorem 1's bound on the loss just after the next download.

    F_{(t+1)E+½} ≤ F_{tE+½} − (α − L_1 α²/2) S + L_1 E α² σ²/2 + drift, with the drift
    2 L_2 η (t+1) Max³ as printed; see ``Problem.drift``.

    >>> round_bound(1.0, 4.0, 0.5, 0.0, 0, Problem(1.0, 1.0, 1.0, 2))
    -0.5
    """
    big, alpha = problem.smoothness, local_lr
    fall = (alpha - big * alpha**2 / 2.0) * gradient_sum
    spread = big * problem.num_steps * alpha**2 * problem.noise / 2.0
    return loss - fall + spread + problem.drift(mix_lr, round_index, form)


def local_lr_range(
    gradient_sum: float, mix_lr: float, round_index: int, problem: Problem, form: Form = "printed"
) -> tuple[float, float]:
    """Return Corollary 1's open interval of α in which the loss is guaranteed to fall.

    4K/(S + √D) < α < 4K/(S − √D) with K = drift/2 (as printed L_2 η (t+1) Max³) and
    D = S² − 4 L_1 K (S + E σ²): between the roots of (L_1/2)(S + E σ²) α² − S α + 2K = 0.
    (nan, nan) if there is no such α, which is the case unless η is below ``mix_lr_limit``.

    >>> low, high = local_lr_range(4.0, 0.1, 0, Problem(1.0, 1.0, 1.0, 2, noise=0.5))
    >>> f"{low:.6f} {high:.6f}"
    '0.051669 1.548331'
    """
    half = problem.drift(mix_lr, round_index, form) / 2.0
    total = gradient_sum + problem.num_steps * problem.noise
    square = gradient_sum**2 - 4.0 * problem.smoothness * half * total
    if square <= 0.0:
        return math.nan, math.nan
    # The upper root is written as (S + √D)/(L_1 (S + Eσ²)), because 4K/(S − √D) is 0/0 at η = 0.
    root = math.sqrt(square)
    return 4.0 * half / (gradient_sum + root), (gradient_sum + root) / (problem.smoothness * total)


def mix_lr_limit(gradient_sum: float, round_index: int, problem: Problem) -> float:
    """Return Corollary 1's limit on η, S²/(4 L_1 L_2 (t+1) Max³ (S + E σ²)).

    It falls as 1/(t+1), so a constant η exceeds it eventually.

    >>> round(mix_lr_limit(4.0, 0, Problem(1.0, 1.0, 1.0, 2, noise=0.5)), 6)
    0.8
    """
    total = gradient_sum + problem.num_steps * problem.noise
    unit = problem.drift(1.0, round_index) / 2.0
    return gradient_sum**2 / (4.0 * problem.smoothness * unit * total)
