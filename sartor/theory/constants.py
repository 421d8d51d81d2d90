"""Compute the constants of the theorems from the clients' samples.

The loss of client i is the mean L_i = (1/n_i) Σ_j ℓ(w, z_ij) + (ν/2)‖w‖². Both papers speak of "the
Gram matrix XᵀX" where their formulas need XᵀX/n_i: with the former L is n_i times too large, and
the step η = 1/(L + λ) n_i times too small. Here the factor 1/n_i is always included.

| symbol | here | meaning |
|---|---|---|
| L_i | smoothness | largest curvature of L_i anywhere: b Λ_max(X_iᵀX_i/n_i) + ν |
| (β) | sample_smoothness | of every single ℓ(·, z_ij): b max_j ‖x_ij‖² + ν |
| b | ``bend(family)`` | largest second derivative by the scores: 1, 1/4 or 1/2 |
| μ_i | strong_convexity | Λ_min of ∇²L_i at ŵ_i, or a lower bound on the ball ‖w‖ ≤ B |
| ρ_i² | noise2 | Σ_j ‖∇ℓ(ŵ_i, z_ij)‖²/(n_i − d), or its value under the model |
| D, ‖ℓ‖∞ | diameter, loss_bound | 2B, and the largest loss of a client's samples on the ball |
| κ | condition | L/μ |

The theorems need one number for all clients: the largest L_i, ρ_i and ‖ℓ‖∞, the smallest μ_i. The
strong convexity of every single sample's loss, which one paper assumes, is ν, so 0 without ridge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.theory.linear_models import Clients, Family
from sartor.theory.noise import Noise

_BEND: dict[Family, float] = {"linear": 1.0, "logistic": 0.25, "softmax": 0.5}


@dataclass(frozen=True)
class Constants:
    """The constants of each client, (..., clients); the properties are for all clients together.

    ``loss_bound`` and ``diameter`` are infinite without a ball ‖w‖ ≤ B.
    """

    smoothness: Tensor
    sample_smoothness: Tensor
    strong_convexity: Tensor
    noise2: Tensor
    loss_bound: Tensor
    diameter: float

    @property
    def largest_smoothness(self) -> Tensor:
        """L = max L_i, (...): for step sizes and rounds."""
        return self.smoothness.amax(-1)

    @property
    def largest_sample_smoothness(self) -> Tensor:
        """β, (...): for the statistical theorems, which need the loss of every sample smooth."""
        return self.sample_smoothness.amax(-1)

    @property
    def smallest_strong_convexity(self) -> Tensor:
        """μ = min μ_i, (...)."""
        return self.strong_convexity.amin(-1)

    @property
    def condition(self) -> Tensor:
        """κ = L/μ, (...); infinite if the loss of some client is flat."""
        return self.largest_smoothness / self.smallest_strong_convexity.clamp(min=0.0)

    @property
    def noise(self) -> Tensor:
        """ρ = max ρ_i, (...)."""
        return self.noise2.amax(-1).sqrt()

    @property
    def largest_loss(self) -> Tensor:
        """‖ℓ‖∞, (...)."""
        return self.loss_bound.amax(-1)

    def local_lr(self, prox_strength: float | Tensor = 0.0) -> Tensor:
        """Return η = 1/(L + λ), the step of a client's gradient descent, (...)."""
        return 1.0 / (self.largest_smoothness + prox_strength)


def bend(family: Family) -> float:
    """Return the largest second derivative of a loss by the scores of its sample.

    >>> bend("logistic")
    0.25
    """
    return _BEND[family]


def constants_of(clients: Clients, noise: Noise, *, radius: float | None = None) -> Constants:
    """Compute all constants from the clients' samples and the noise of their fits.

    ``radius`` is B of the ball ‖w‖ ≤ B on which μ, D and ‖ℓ‖∞ hold. Without it μ_i is the value at
    the fit, and D and ‖ℓ‖∞ are infinite.
    """
    if radius is not None and not 0.0 < radius < math.inf:
        raise ConfigError(f"radius must be > 0 and finite, got {radius}; or leave it out.")
    x = clients.x * clients.mask[..., None]
    gram = torch.linalg.eigvalsh(x.mT @ x / clients.sizes[..., None, None])
    longest = x.norm(dim=-1).amax(-1)
    most = bend(clients.family)
    if radius is None:
        convexity = noise.smallest
        losses = torch.full_like(longest, math.inf)
    else:
        reach = radius * longest
        least = gram[..., 0].clamp(min=0.0) * _least_bend(clients, reach)
        convexity = least + clients.ridge
        losses = _largest_loss(clients, reach) + 0.5 * clients.ridge * radius**2
    return Constants(
        smoothness=most * gram[..., -1] + clients.ridge,
        sample_smoothness=most * longest.square() + clients.ridge,
        strong_convexity=convexity,
        noise2=noise.gradient2,
        loss_bound=losses,
        diameter=math.inf if radius is None else 2.0 * radius,
    )


def logistic_noise_bound(num_features: float, largest_feature: float) -> float:
    """Return c_X² d/4, a bound on the ρ² of logistic regression with |x_k| ≤ c_X.

    It holds if the labels follow the model: E‖∇ℓ(w*, z)‖² = E[q(1 − q)‖x‖²] with q(1 − q) ≤ 1/4.

    >>> logistic_noise_bound(5, 2.0)
    5.0
    """
    return largest_feature**2 * num_features / 4.0


def _least_bend(clients: Clients, reach: Tensor) -> Tensor:
    """Return a lower bound of a loss's second derivative by the scores, at scores ‖xᵀw‖ ≤ reach.

    Logistic: (e^{b/2} + e^{−b/2})⁻², its value at the end. Softmax: the Hessian diag(q) − qqᵀ is at
    least min_c q_c on the vectors of sum 0, and scores of norm b give q_c ≥ 1/(1 + (C−1)e^{√2 b}).
    """
    if clients.family == "linear":
        return torch.ones_like(reach)
    if clients.family == "logistic":
        return (torch.exp(reach / 2.0) + torch.exp(-reach / 2.0)).square().reciprocal()
    return (1.0 + (clients.num_classes - 1.0) * torch.exp(math.sqrt(2.0) * reach)).reciprocal()


def _largest_loss(clients: Clients, reach: Tensor) -> Tensor:
    """Return ln(1 + e^b), ln(1 + (C−1)e^{√2 b}) or ½(max|y| + b)², for scores of norm <= b."""
    if clients.family == "linear":
        return 0.5 * ((clients.y * clients.mask).abs().amax(-1) + reach).square()
    if clients.family == "logistic":
        return torch.nn.functional.softplus(reach)
    logit = math.log(clients.num_classes - 1.0) + math.sqrt(2.0) * reach
    return torch.nn.functional.softplus(logit)
