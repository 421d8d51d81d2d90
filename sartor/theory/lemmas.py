"""Compare both sides of inequalities that every minimiser of FedProx' objective satisfies.

The objective is Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²].

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Lemmas 1, 4 and
5, Eq. (20) and (21), in the later version, and Eq. (3) of the first one. Every function takes
models and gradients and returns an ``Inequality``.

| symbol | here | meaning |
|---|---|---|
| w̃_g, w̃_i | global_model (d,), models (clients, d) | the exact minimiser; w̃_g = Σ p_i w̃_i |
| w_i*, w_g* | targets (clients, d), target (d,) | the true models and their mean Σ p_i w_i* |
| w_GT | pooled_model (d,) | the one model that minimises Σ p_i L_i |
| ∇L_i(·) | gradients (clients, d) | of the averaged losses, at the model that the claim names |
| p_i, n_i | weights, sizes (clients,) | of sum 1; samples |
| R, ρ | heterogeneity, noise | the largest ‖w_i* − w_g*‖; size of one sample's gradient at w_i* |
| L, μ, κ | smoothness, strong_convexity, L/μ | of the clients' averaged losses L_i |
| λ | prox_strength | the pull |

Differs from the paper: (20) holds without its factor 2, (21) and Lemma 5 with 1/μ for 2/μ, by
strong monotonicity of the gradients; `sharp` selects these.
"""

from __future__ import annotations

from torch import Tensor

from sartor.theory.quantities import Inequality, Number, sums, tensors
from sartor.theory.statistical import Version


def lemma_4(
    global_model: Tensor,
    models: Tensor,
    gradients: Tensor,
    prox_strength: float,
    strong_convexity: float,
    sharp: bool = False,
) -> Inequality:
    """Compare both sides of (20), ‖w̃_g − w̃_i‖ <= 2‖∇L_i(w̃_g)‖/(μ+λ), for every client."""
    factor = 1.0 if sharp else 2.0
    right = factor * gradients.norm(dim=-1) / (strong_convexity + prox_strength)
    return Inequality((global_model - models).norm(dim=-1), right)


def lemma_1_global(
    global_model: Tensor,
    pooled_model: Tensor,
    gradients: Tensor,
    weights: Tensor,
    prox_strength: float,
    smoothness: float,
    strong_convexity: float,
) -> Inequality:
    """Compare both sides of (4), ‖w̃_g − w_GT‖² <= (4(1+κ)/(μ(μ+λ))) Σ p_i‖∇L_i(w̃_g)‖²."""
    mu = strong_convexity
    factor = 4.0 * (1.0 + smoothness / mu) / (mu * (mu + prox_strength))
    right = factor * (weights * gradients.square().sum(-1)).sum()
    return Inequality((global_model - pooled_model).square().sum(), right)


def lemma_1_local(
    models: Tensor,
    targets: Tensor,
    gradients: Tensor,
    weights: Tensor,
    heterogeneity: Number,
    prox_strength: float,
    strong_convexity: float,
    version: Version = "v2",
) -> Inequality:
    """Compare both sides of v2's (5), or of v1's sharper (3).

    Σ p_i (μ‖w̃_i − w_i*‖² + ⟨∇L_i(w_i*), w̃_i − w_i*⟩) <= (λ/2) R², in v1
    (λ/2)(R² − Σ p_i‖w̃_i − w̃_g‖²). The proof of v2 has μ/2; it holds with μ, since the objective
    rises from its minimum by μ/2 Σ p_i‖w̃_i − w_i*‖² at least. Σ p_i‖w_i* − w_g*‖² may replace R².
    """
    step = models - targets
    inside = strong_convexity * step.square().sum(-1) + (gradients * step).sum(-1)
    room = tensors(heterogeneity)[0].square()
    if version == "v1":
        centre = weights @ models
        room = room - (weights * (models - centre).square().sum(-1)).sum()
    return Inequality((weights * inside).sum(), prox_strength / 2.0 * room)


def lemma_5(
    pooled_models: Tensor,
    target: Tensor,
    weights: Tensor,
    sizes: Tensor,
    heterogeneity: float,
    smoothness: float,
    strong_convexity: float,
    noise: float,
    sharp: bool = False,
) -> Inequality:
    """Compare both sides of Lemma 5, E‖w_GT − w_g*‖ <= (2/μ)(ρ√(Σ p_i²/n_i) + LR).

    ``pooled_models`` (draws, d) are w_GT of independent draws of the data; their mean estimates E.
    """
    left = (pooled_models - target).norm(dim=-1).mean()
    spread = noise * sums(weights, sizes).pooled.sqrt() + smoothness * heterogeneity
    return Inequality(left, (1.0 if sharp else 2.0) * spread / strong_convexity)


def pooled_error(
    pooled_model: Tensor,
    target: Tensor,
    gradients: Tensor,
    weights: Tensor,
    strong_convexity: float,
    sharp: bool = False,
) -> Inequality:
    """Compare both sides of (21), ‖w_GT − w_g*‖ <= (2/μ)‖Σ p_i ∇L_i(w_g*)‖; sharp with 1/μ."""
    right = (1.0 if sharp else 2.0) * (weights @ gradients).norm() / strong_convexity
    return Inequality((pooled_model - target).norm(), right)
