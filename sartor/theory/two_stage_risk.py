"""Bound the excess risk of two-stage FedProx, and choose its pull λ.

Chen, Zheng, Long, Su, JMLR 24(262), 2023 (arXiv 2103.01901): Theorems 11 and 12 with the λ of their
proofs, Eq. (25) and (28) to (30). Rounds and steps are in ``two_stage``, the metrics in
``excess_risk``. All bounds are orders, without constants.

| symbol | here | meaning |
|---|---|---|
| β, μ | smoothness, strong_convexity | of the losses |
| B = ‖ℓ‖∞, D | loss_bound, diameter | the largest loss, and the size of the domain W |
| σ² | noise, squared | the largest mean squared gradient of one sample at w_i* |
| R | heterogeneity | R² bounds Σ p_i‖w_i* − w_g*‖² (average) or every ‖w_i* − w_g*‖² (individual) |
| p_i, n_i, N, m | weights, sizes (clients,), Σ n_i, their number | |
| s_1, s_2 | ``quantities.sums`` | Σ p_i/n_i and Σ p_i²/n_i |
| C_p | imbalance | at least p_max s_1/s_2, (25), which is taken if it is None |

Differs from the paper: for 1/(mN) <~ R² <~ m/N (30) is of order R√(m/N), not m/N; the proof of
Theorem 12 has λ for c_A in "λ ≍ μD²"; with that c_A the diameter cancels from its λ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.theory.quantities import Number, sums, tensors


def average_switches(weights: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of R at which Theorem 11's rule for λ changes, s_2/√s_1 and √s_1."""
    found = sums(weights, sizes)
    return found.pooled / found.local.sqrt(), found.local.sqrt()


def average_prox_strength(
    heterogeneity: Number,
    weights: Tensor,
    sizes: Tensor,
    strong_convexity: Number,
    imbalance: Number | None = None,
) -> Tensor:
    """Return λ of Theorem 11's proof, for the average excess risk.

    μ s_1/(16R²) for R >= √s_1, μ√s_1/(16 C_p R) for s_2/√s_1 <= R < √s_1, and μ s_1/(16 C_p s_2)
    below. Never above μ/(16 p_max).
    """
    found = sums(weights, sizes)
    r, mu, c = tensors(
        heterogeneity, strong_convexity, found.imbalance if imbalance is None else imbalance
    )
    low, high = average_switches(weights, sizes)
    alike = torch.where(r < low, found.local / found.pooled, found.local.sqrt() / r) / c
    return mu / 16.0 * torch.where(r >= high, found.local / r.square(), alike)


def average_risk(
    heterogeneity: Number,
    weights: Tensor,
    sizes: Tensor,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    imbalance: Number | None = None,
) -> Tensor:
    """Return (28), (μ/(1 ∧ C_p) + (1 ∨ C_p) β B/μ) [R√s_1 ∧ s_1 + s_2]: the order of AER_p.

    For p_i = n_i/N and C_p = 1 it is (30), (μ + βB/μ)(m/N ∧ R√(m/N) + 1/N).
    """
    found = sums(weights, sizes)
    r, beta, mu = tensors(heterogeneity, smoothness, strong_convexity)
    top, c = tensors(loss_bound, found.imbalance if imbalance is None else imbalance)
    factor = mu / c.clamp(max=1.0) + c.clamp(min=1.0) * beta * top / mu
    return factor * (torch.minimum(r * found.local.sqrt(), found.local) + found.pooled)


def individual_prox_strength(
    heterogeneity: Number,
    num_clients: Number,
    total_samples: Number,
    strong_convexity: Number,
    largest_weight: Number | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Return λ of Theorem 12's proof, for every client's own excess risk.

    c_A m/(D²N) for R >= √(m/N), else c_B √(m/(R²N + 1)), but never above μ/(16 p_max). p_max is 1/m
    if None; ``scales`` are c_A/(μD²) and c_B/μ, which the paper leaves open.
    """
    r, m, total, mu = tensors(heterogeneity, num_clients, total_samples, strong_convexity)
    (p,) = tensors(1.0 / m if largest_weight is None else largest_weight)
    alike = scales[1] * (m / (r.square() * total + 1.0)).sqrt()
    found = torch.where(r >= (m / total).sqrt(), scales[0] * m / total, alike)
    return mu * torch.minimum(found, 1.0 / (16.0 * p))


def individual_risk(
    heterogeneity: Number,
    num_samples: Number,
    num_clients: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    noise: Number,
    diameter: Number,
) -> Tensor:
    """Return (29), the order of IER_i for clients of similar sizes and weights.

    [(μ + 1/μ)(βB + (σ²β² + β² + σ²)/μ²) + μD²] (R/√n_i ∧ 1/n_i + √m/N).
    """
    r, n, m, total = tensors(heterogeneity, num_samples, num_clients, total_samples)
    beta, mu, top, sigma, wide = tensors(smoothness, strong_convexity, loss_bound, noise, diameter)
    mixed = (sigma * beta).square() + beta.square() + sigma.square()
    factor = (mu + 1.0 / mu) * (beta * top + mixed / mu.square()) + mu * wide.square()
    return factor * (torch.minimum(r / n.sqrt(), 1.0 / n) + m.sqrt() / total)
