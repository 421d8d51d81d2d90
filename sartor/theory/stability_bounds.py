"""How much one record of one client can change that client's model: bounds, and what follows.

Chen, Zheng, Long, Su, JMLR 24(262), 2023 (arXiv 2103.01901), Definition 5, Propositions 10 and 21,
Lemmas 24 and 26. An algorithm has federated stability γ_i if replacing one record of client i
changes the loss of ŵ_i, on any record, by γ_i at most.

| symbol | here | meaning |
|---|---|---|
| β, μ | smoothness, strong_convexity | of the losses |
| B = ‖ℓ‖∞ | loss_bound | the largest loss |
| n_i, p_i | num_samples, weight | samples and weight of client i |
| λ | prox_strength | the pull of two-stage FedProx |
| s | shift | ‖ŵ_i(S) − ŵ_i(S′)‖ |

Differs from the paper: Lemma 24 prints 1 + β/(n_i(μ+λ)) for 1 + 16β/(n_i(μ+λ)); its 160 is right.
Eq. (24) forgets p_s before the penalty; Proposition 10 is right. LocalTrain's bound is FedAvg's for
one client alone (ours; the paper states its order).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.theory.quantities import Number, tensors


def local_stability(
    num_samples: Number, smoothness: Number, strong_convexity: Number, loss_bound: Number
) -> Tensor:
    """Return LocalTrain's γ_i = 32 β B/(μ n_i), for n_i >= 4β/μ.

    >>> float(local_stability(160, 1.0, 0.1, 0.5))
    1.0
    """
    return fedavg_stability(num_samples, 1.0, smoothness, strong_convexity, loss_bound)


def fedavg_stability(
    num_samples: Number,
    weight: Number,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
) -> Tensor:
    """Return FedAvg's γ_i = 32 β B p_i/(μ n_i), for n_i >= 4β p_i/μ."""
    n, p, beta, mu, top = tensors(num_samples, weight, smoothness, strong_convexity, loss_bound)
    return 32.0 * beta * top * p / (mu * n)


def fedprox_stability(
    num_samples: Number,
    prox_strength: Number,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    error: Number = 0.0,
) -> Tensor:
    """Return two-stage FedProx' γ_i = 160 β B/(n_i (μ+λ)) + Err_i, under ``fedprox_conditions``.

    Err_i is what unfinished training adds; 0 for exact minimisers.
    """
    n, lam, beta = tensors(num_samples, prox_strength, smoothness)
    mu, top, more = tensors(strong_convexity, loss_bound, error)
    return 160.0 * beta * top / (n * (mu + lam)) + more


def fedprox_conditions(
    num_samples: Number,
    weight: Number,
    prox_strength: Number,
    smoothness: Number,
    strong_convexity: Number,
) -> Tensor:
    """Say, client by client, whether n_i >= 4β/μ and p_i λ <= μ/16, (48)."""
    n, p, lam = tensors(num_samples, weight, prox_strength)
    beta, mu = tensors(smoothness, strong_convexity)
    return (n >= 4.0 * beta / mu) & (p * lam <= mu / 16.0)


def loss_shift(shift: Number, smoothness: Number, loss_bound: Number) -> Tensor:
    """Return Lemma 26's bound √(2βB) s + (β/2) s² on the change of any loss.

    >>> float(loss_shift(0.5, 2.0, 1.0))
    1.25
    """
    s, beta, top = tensors(shift, smoothness, loss_bound)
    return (2.0 * beta * top).sqrt() * s + beta / 2.0 * s.square()


def model_shift(
    gradient_change: Tensor, hessian: Tensor, num_samples: Number, prox_strength: Number = 0.0
) -> Tensor:
    """Return the first-order shift s ≈ ‖(H_i + λI)⁻¹ (∇ℓ(z) − ∇ℓ(z′))‖/n_i (ours).

    For LocalTrain (λ = 0), and for FedProx with the global model held still. Exact on quadratics.

    Args:
        gradient_change: (..., d) ∇ℓ(ŵ_i, z) − ∇ℓ(ŵ_i, z′).
        hessian: (..., d, d) H_i = ∇²L_i(ŵ_i).
        num_samples: n_i.
        prox_strength: λ.
    """
    n, lam = tensors(num_samples, prox_strength)
    eye = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    bent = hessian + lam[..., None, None] * eye
    return torch.linalg.solve(bent, gradient_change).norm(dim=-1) / n


def mean_shift(
    distance: Number, num_samples: Number, weight: Number, prox_strength: Number
) -> Tensor:
    """Return the exact s for the loss ½‖w − z‖², (‖z − z′‖/n_i)(1 + λ p_i)/(1 + λ).

    λ = 0 is LocalTrain, 1/n_i; λ = ∞ is FedAvg, p_i/n_i.

    >>> [round(float(mean_shift(1.0, 10, 0.2, lam)), 6) for lam in (0.0, 4.0, float("inf"))]
    [0.1, 0.036, 0.02]
    """
    far, n, p, lam = tensors(distance, num_samples, weight, prox_strength)
    share = 1.0 / (1.0 + lam)  # of the client's own mean; the rest moves with the global model
    return far / n * (share + (1.0 - share) * p)


def average_risk_bound(
    weights: Tensor,
    stability: Tensor,
    prox_strength: Number,
    spread2: Number,
    objective_error: Number = 0.0,
) -> Tensor:
    """Return (21) of Proposition 10, E AER_p <= E_OPT + 2 Σ p_i γ_i + (λ/2) Σ p_i‖w_g* − w_i*‖².

    Args:
        weights: (clients,) p_i.
        stability: (..., clients) γ_i.
        prox_strength: λ.
        spread2: Σ p_i‖w_g* − w_i*‖², at most R².
        objective_error: E_OPT, ``two_stage.objective_error``.
    """
    lam, spread, gap = tensors(prox_strength, spread2, objective_error)
    return gap + 2.0 * (stability * weights).sum(-1) + lam / 2.0 * spread


def individual_risk_bound(
    weight: Number,
    stability: Number,
    prox_strength: Number,
    distance2: Number,
    objective_error: Number = 0.0,
) -> Tensor:
    """Return (22) of Proposition 10, E IER_i <= E_OPT/p_i + 2γ_i + (λ/2) E‖ŵ_g − w_i*‖²."""
    p, gamma, lam, far, gap = tensors(weight, stability, prox_strength, distance2, objective_error)
    return gap / p + 2.0 * gamma + lam / 2.0 * far
