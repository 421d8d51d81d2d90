"""Compute the excess risk, its bounds for LocalTrain and FedAvg, and its lower bounds.

Chen, Zheng, Long, Su, "Minimax Estimation for Personalized Federated Learning", JMLR 24(262), 2023
(arXiv 2103.01901): Theorems 4, 6 and 8, Corollary 9, Eq. (18) and (19). Two-stage FedProx' bounds
are in ``two_stage_risk``.

| symbol | here | meaning |
|---|---|---|
| ŵ_i, w_i* | models, targets | (..., d) the models, and the best ones |
| IER_i, AER_p | excess_risk, average_excess_risk | E[ℓ(ŵ_i, Z) − ℓ(w_i*, Z)], and Σ p_i IER_i |
| β, μ | smoothness, strong_convexity | of the losses |
| B = ‖ℓ‖∞ | loss_bound | the largest loss |
| σ² | noise, squared | the largest mean squared gradient of one sample at w_i* |
| R | heterogeneity | R² bounds Σ p_i‖w_i* − w_g*‖² (average) or every ‖w_i* − w_g*‖² (individual) |
| p_i, n_i, N, m | weights, sizes (clients,), Σ n_i, their number | |
| E_OPT | objective_error | the objective at the output minus its minimum |

The paper states orders. The constants that its proofs give are used here: 32 for Theorem 4, 32 and
4 for (9), 8βσ²/μ² and 8β³/μ² + β for (10). The other bounds are orders: their shape is meaningful,
their value is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sartor.theory.quantities import Number, sums, tensors

# ---- the metrics ---------------------------------------------------------------------------------


def excess_risk(models: Tensor, targets: Tensor, covariance: Tensor | None = None) -> Tensor:
    """Return IER_i in closed form, ½ (ŵ − w*)ᵀ Σ (ŵ − w*).

    Linear regression with loss ½(y − xᵀw)², y = xᵀw* + noise and Σ = E[xxᵀ], (..., d, d); without
    Σ, mean estimation with loss ½‖w − z‖².

    >>> float(excess_risk(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])))
    12.5
    """
    step = (models - targets).double()
    bent = step if covariance is None else (covariance.double() @ step[..., None])[..., 0]
    return 0.5 * (step * bent).sum(-1)


class Sampled(NamedTuple):
    """An excess risk from a fresh sample, possibly slightly negative, and its standard error."""

    value: Tensor
    error: Tensor


def sampled_excess_risk(losses: Tensor, target_losses: Tensor) -> Sampled:
    """Estimate IER_i from the losses of ŵ_i and of w_i* on the same fresh samples.

    Both are (..., samples). On real data, where the best known model stands in for w_i*, this is an
    empirical gap, not an excess risk.

    >>> sampled_excess_risk(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])).value
    tensor(1., dtype=torch.float64)
    """
    gap = (losses - target_losses).double()
    return Sampled(gap.mean(-1), gap.std(-1) / gap.shape[-1] ** 0.5)


def average_excess_risk(risks: Tensor | Sampled, weights: Tensor) -> Sampled:
    """Return AER_p = Σ p_i IER_i, with the standard error √(Σ p_i² e_i²).

    The risks (..., clients) are exact (then the error is 0) or sampled independently. p_i = 1/m
    weights clients equally, n_i/N samples.
    """
    p = weights.double()
    value, error = risks if isinstance(risks, Sampled) else (risks, torch.zeros_like(risks))
    return Sampled((value * p).sum(-1), (error * p).square().sum(-1).sqrt())


def excess_risk_range(
    models: Tensor, targets: Tensor, smoothness: Number, strong_convexity: Number
) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bound of IER, (μ/2)‖ŵ − w*‖² and (β/2)‖ŵ − w*‖²."""
    far = (models - targets).double().square().sum(-1)
    beta, mu = tensors(smoothness, strong_convexity)
    return mu / 2.0 * far, beta / 2.0 * far


# ---- LocalTrain and FedAvg -----------------------------------------------------------------------


def local_risk(
    num_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    constant: float = 32.0,
) -> Tensor:
    """Return Theorem 4's bound C β B/(μ n_i) on E IER_i(LocalTrain), for n_i >= 4β/μ."""
    n, beta, mu, top = tensors(num_samples, smoothness, strong_convexity, loss_bound)
    return constant * beta * top / (mu * n)


def fedavg_average_risk(
    heterogeneity: Number,
    weights: Tensor,
    sizes: Tensor,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    constants: tuple[float, float] = (32.0, 4.0),
) -> Tensor:
    """Return (9), C (β B/μ) Σ p_i²/n_i + C′ β R², on E AER_p(FedAvg), for n_i >= 4β p_i/μ.

    It is smallest for p_i = n_i/N, where the sum is 1/N: (11).
    """
    r, beta, mu, top = tensors(heterogeneity, smoothness, strong_convexity, loss_bound)
    pooled = sums(weights, sizes).pooled
    return constants[0] * beta * top / mu * pooled + constants[1] * beta * r.square()


def fedavg_individual_risk(
    heterogeneity: Number,
    weights: Tensor,
    sizes: Tensor,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number,
) -> Tensor:
    """Return (10), (8βσ²/μ²) Σ p_j²/n_j + (8β³/μ² + β) R², on E IER_i(FedAvg) of every client."""
    r, beta, mu, sigma = tensors(heterogeneity, smoothness, strong_convexity, noise)
    error = (sigma / mu).square() * sums(weights, sizes).pooled + (beta / mu * r).square()
    return 8.0 * beta * error + beta * r.square()


# ---- the better of the two, and lower bounds -----------------------------------------------------


def oracle_threshold(
    num_clients: Number, total_samples: Number, strong_convexity: Number, loss_bound: Number
) -> Tensor:
    """Return (B/μ) m/N, the R² up to which FedAvg is better than LocalTrain.

    >>> float(oracle_threshold(10, 2000, 0.1, 1.0))
    0.05
    """
    m, total, mu, top = tensors(num_clients, total_samples, strong_convexity, loss_bound)
    return top / mu * m / total


def dichotomous_average_risk(
    heterogeneity: Number,
    weights: Tensor,
    sizes: Tensor,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
) -> Tensor:
    """Return (18), β (B m/(μN) ∧ R²) + (β B/μ) Σ p_i²/n_i, for AER_p of the better of the two."""
    r, beta, mu, top = tensors(heterogeneity, smoothness, strong_convexity, loss_bound)
    limit = oracle_threshold(len(sizes), torch.as_tensor(sizes).sum(), mu, top)
    return beta * torch.minimum(limit, r.square()) + beta * top / mu * sums(weights, sizes).pooled


def dichotomous_individual_risk(
    heterogeneity: Number,
    num_samples: Number,
    weights: Tensor,
    sizes: Tensor,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    noise: Number,
) -> Tensor:
    """Return (19), (β³/μ²)(B/(μ n_i) ∧ R²) + (βσ²/μ²) Σ p_j²/n_j, for clients of similar sizes."""
    r, n, beta, mu = tensors(heterogeneity, num_samples, smoothness, strong_convexity)
    top, sigma = tensors(loss_bound, noise)
    bias = torch.minimum(top / (mu * n), r.square())
    spread = sigma.square() * sums(weights, sizes).pooled
    return beta / mu.square() * (beta.square() * bias + spread)


def error_floor(
    heterogeneity: Number, num_samples: Number, total_samples: Number, num_features: Number
) -> Tensor:
    """Return Theorem 8's order d/n ∧ R² + d/N, a lower bound on the squared error of any method.

    It is for logistic regression with d features, clients of similar sizes and p_i = n_i/N. Use
    n = N/m for the average over clients and n = n_i for one of them.
    """
    r, n, total, d = tensors(heterogeneity, num_samples, total_samples, num_features)
    return torch.minimum(d / n, r.square()) + d / total


def risk_floor(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
) -> Tensor:
    """Return Corollary 9's order μ (β/n ∧ R² + β/N), below AER (n = N/m) and IER_i (n = n_i)."""
    (mu,) = tensors(strong_convexity)
    return mu * error_floor(heterogeneity, num_samples, total_samples, smoothness)


def average_risk_by_stability(
    weights: Tensor,
    stability: Tensor,
    prox_strength: Number,
    spread2: Number,
    objective_error: Number = 0.0,
) -> Tensor:
    """Return (21) of Proposition 10, E AER_p <= E_OPT + 2 Σ p_i γ_i + (λ/2) Σ p_i‖w_g* − w_i*‖².

    γ_i (..., clients) is ``stability.fedprox_bound``, E_OPT ``two_stage.objective_error``, and the
    sum over squared distances ``spread2``, at most R². Eq. (24) omits p_s before the penalty; the
    proposition is right.
    """
    lam, spread, gap = tensors(prox_strength, spread2, objective_error)
    return gap + 2.0 * (stability * weights).sum(-1) + lam / 2.0 * spread


def individual_risk_by_stability(
    weight: Number,
    stability: Number,
    prox_strength: Number,
    distance2: Number,
    objective_error: Number = 0.0,
) -> Tensor:
    """Return (22) of Proposition 10, E IER_i <= E_OPT/p_i + 2γ_i + (λ/2) E‖ŵ_g − w_i*‖²."""
    p, gamma, lam, far, gap = tensors(weight, stability, prox_strength, distance2, objective_error)
    return gap / p + 2.0 * gamma + lam / 2.0 * far
