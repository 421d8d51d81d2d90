"""Estimate the error of R̂²: the variance of a quadratic form of fits, and the jackknife.

R̂² is Σ_jk ŵ_jᵀM_jkŵ_k minus the mean of its noise; for R1 and R2 the blocks are those of
diag(p) − ppᵀ, times I.

| symbol | here | meaning |
|---|---|---|
| V_k, t_k | covariance, noise | Cov(ŵ_k) and its trace |
| g_k | (inside) | Σ_j M_kj w_j*, half the gradient by ŵ_k; for R1 p_k(w_k* − w̄*) |
| ĝ_kᵀV̂_kĝ_k | linear | (..., clients), g at the fits |
| D_jk | noise2 | (..., clients, clients) tr(V_j M_jk V_k M_kj) |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def variance(
    radius2: Tensor, linear: Tensor, noise2: Tensor, slope: Tensor, more: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return floor and growth of the variance of a quadratic form Σ_jk ŵ_jᵀM_jkŵ_k of normal fits.

    It is 2Σ D_jk + 4Σ g_kᵀV_kg_k, with g_k = Σ_j M_kj w_j* and D_jk = tr(V_jM_jkV_kM_kj). The
    second part is 0 at R = 0 and proportional to R² in any given direction. At the fits g_k has the
    covariance Σ_j M_kjV_jM_jk, which adds Σ D_jk to Σ g_kᵀV_kg_k. If R̂² is small compared with its
    noise, the direction is unknown too, and ``slope``, Σ g_kᵀV_kg_k per unit of R², replaces the
    estimate from the fits. ``more`` is further variance at R = 0.
    """
    quadratic = noise2.sum((-1, -2))
    floor = 2.0 * quadratic + more
    known, scale = (linear.sum(-1) - quadratic).clamp(min=0.0), floor.sqrt()
    reach = (radius2.clamp(min=0.0) + scale).clamp(min=1e-300)
    return floor, 4.0 * (known + slope * scale) / reach


def round_slope(weights: Tensor, noise: Tensor, w: Tensor) -> Tensor:
    """Return Σ p_i² t_i/d, what a unit of R² adds to Σ p_i² u_iᵀV_iu_i if every V_i ∝ I."""
    return (weights.square() * noise).sum(-1) / w.shape[-1]


def form2(weights: Tensor) -> Tensor:
    """Return the squares of the entries of diag(p) − ppᵀ."""
    outer = weights[..., :, None] * weights[..., None, :]
    return (torch.diag_embed(weights) - outer).square()


def block_products(a: Tensor, weights: Tensor, covariance: Tensor) -> Tensor:
    """Return tr(V_j M_jk V_k M_jkᵀ) for all pairs of clients, M as in ``from_global``."""
    eye, found = torch.eye(a.shape[-1], dtype=a.dtype), []
    p = weights[..., None, None]
    for j in range(weights.shape[-1]):
        own, mine = a[..., j : j + 1, :, :], p[..., j : j + 1, :, :]
        block = own.mT @ a - mine * a - p * own.mT
        block[..., j, :, :] += mine[..., 0, :, :] * eye
        found.append(trace(covariance[..., j : j + 1, :, :] @ block @ covariance @ block.mT))
    return torch.stack(found, -2)


def leave_one_out(estimate: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """Return the jackknife standard error of ``estimate(weights)`` over clients.

    √((m−1)/m Σ_k (θ_(k) − θ̄)²), θ_(k) with the weight of client k set to 0 and the rest of sum 1.
    """
    m = weights.shape[-1]
    found = []
    for k in range(m):
        kept = weights.clone()
        kept[..., k] = 0.0
        found.append(estimate(kept / kept.sum(-1, keepdim=True)))
    values = torch.stack(found)
    return ((m - 1) / m * (values - values.mean(0)).square().sum(0)).sqrt()


def student(level: float, degrees: int) -> float:
    """Return t with P(|T| ≤ t) = level for Student's distribution with ν degrees of freedom.

    T = √ν tan θ, where θ has a density proportional to cos^(ν−1) θ.

    >>> round(student(0.95, 9), 3)
    2.262
    """
    angle = torch.linspace(0.0, math.pi / 2.0, 20001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angle.cos() ** (degrees - 1), angle)
    found = angle[1:][torch.searchsorted(mass, level * mass[-1])]
    return math.sqrt(degrees) * math.tan(float(found))


def trace(matrix: Tensor) -> Tensor:
    """Return the trace over the last two axes."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
