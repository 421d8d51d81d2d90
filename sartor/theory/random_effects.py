"""Predict the error of every client's model at each λ, before training.

The clients' best models are modelled as draws around a common centre, w_i* = c + u_i, with variance
τ² in every coordinate, and the fits as ŵ_i = w_i* + noise with variance v_ij. Losses are quadratic
with curvature h_ij, so the models of one-stage FedProx are averages of the fits, and their errors
have a closed form in each coordinate, if all matrices are diagonal. They are nearly so in the
eigenvectors of the mean curvature, where everything here is meant to be taken (``frame``): in the
features themselves, strong correlations would be lost, and the answer would change with a rotation.

w̃_i = (1 − a_i) ŵ_i + a_i Σ_k b_k ŵ_k, with a_i = λ_i/(h_i + λ_i), b_k ∝ p_k h_k λ_k/(h_k + λ_k),
E(w̃_i − w_i*)² = Σ_k m_ik² v_k + τ² Σ_k (m_ik − δ_ik)², m_ik = (1 − a_i) δ_ik + a_i b_k.

λ = 0 is every client alone, λ = ∞ the minimiser of Σ p_i L_i. For equal clients the λ of smallest
error is φ/(nτ²), with φ = 1 if the model is true (v = φ/(nh)). This is the rule ``shrinkage`` with
ρ²/μ replaced by tr(H⁻¹G). A client sends H_i, and then its fit, its v and its h, three vectors of
the model's size. The method is ours; the papers leave the estimation of R open.

| symbol | here | meaning |
|---|---|---|
| τ² | tau2 | variance of the clients' best models, in each coordinate |
| R² | p τ² (1 − 1/m) | the resulting heterogeneity, for equal weights |
| v_ij | variance | of the fits; (..., clients, p) |
| h_ij | curvature | likewise, of H_i; v_ij = φ_i/(n_i h_ij) if the model is true |
| s_i | share | tr(H_i V_i)/Σ_j h_ij v_ij: by what the diagonals alone overstate the noise |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Frame(NamedTuple):
    """The eigenvectors of the mean curvature, and what is seen in them."""

    axes: Tensor  # (..., p, p) the eigenvectors, in columns
    w: Tensor  # (..., clients, p) the fits
    variance: Tensor  # (..., clients, p) v_ij
    curvature: Tensor  # (..., clients, p) h_ij
    share: Tensor  # (..., clients) s_i


def frame(w: Tensor, covariance: Tensor, hessian: Tensor, weights: Tensor) -> Frame:
    """Turn fits (..., clients, p), their covariances and curvatures to common eigenvectors.

    These are those of Σ p_i H_i, with the weights p_i (..., clients). Variances and curvatures are
    kept above 1e-9 of the federation's largest, as they are divided by.
    """
    axes = torch.linalg.eigh((weights[..., None, None] * hessian).sum(-3)).eigenvectors
    turn = axes[..., None, :, :]

    def diagonal(matrix: Tensor) -> Tensor:
        found = ((matrix @ turn) * turn).sum(-2)
        return torch.maximum(found, 1e-9 * found.flatten(-2).amax(-1)[..., None, None] + 1e-300)

    variance, curvature = diagonal(covariance), diagonal(hessian)
    own = (hessian * covariance).sum((-2, -1))
    share = own / (curvature * variance).sum(-1)
    return Frame(axes, w @ axes, variance, curvature, share)


class Effects(NamedTuple):
    """An estimate of τ²."""

    tau2: Tensor  # (...) the posterior mean, which an expected error that is linear in τ² needs
    likeliest: Tensor  # (...) the value of largest restricted likelihood; may be 0
    own: Tensor  # (..., clients) τ_i², which lets the distance of a client differ from the others'
    grid: Tensor  # (..., values) the values of τ² that were tried; the first is 0
    weight: Tensor  # (..., values) their posterior weights, of sum 1


def effects(w: Tensor, variance: Tensor, *, values: int = 81, spread: float = 1.0) -> Effects:
    """Estimate τ² from fits and their variances, by restricted likelihood over all coordinates.

    Coordinates with little noise have more weight, which makes the estimate much less noisy than R̂²
    if the clients are alike; correlations between coordinates are not used. The prior is flat in
    log τ² on a grid of ``values`` from 1e-4 of the noise to the largest squared distance, plus 0;
    ``spread`` is the prior standard deviation of log τ_i² around it. Fits and their variances v_ij,
    which are positive, are (..., clients, p).
    """
    noise = variance.flatten(-2).median(-1).values
    gaps2 = (w - w.mean(-2, keepdim=True)).square()
    low = 1e-4 * noise
    high = 10.0 * (gaps2.flatten(-2).amax(-1) + noise)
    steps = torch.linspace(0.0, 1.0, values - 1, dtype=w.dtype)
    grid = low[..., None] * (high / low)[..., None] ** steps
    grid = torch.cat((torch.zeros_like(grid[..., :1]), grid), -1)
    total = variance[..., None] + grid[..., None, None, :]
    precision = 1.0 / total
    whole = precision.sum(-3, keepdim=True)
    centre = (precision * w[..., None]).sum(-3, keepdim=True) / whole
    each = -0.5 * (total.log() + precision * (w[..., None] - centre).square()).sum(-2)
    joint = each.sum(-2) - 0.5 * whole.log().sum((-3, -2))
    weight = torch.softmax(joint, -1)
    tau2 = (weight * grid).sum(-1)
    near = (grid[..., 1:].log() - tau2.clamp(min=1e-300).log()[..., None]) / spread
    own = torch.softmax(each[..., 1:] - 0.5 * near.square()[..., None, :], -1)
    return Effects(
        tau2=tau2,
        likeliest=grid.gather(-1, joint.argmax(-1, keepdim=True))[..., 0],
        own=(own * grid[..., None, 1:]).sum(-1),
        grid=grid,
        weight=weight,
    )


class Risks(NamedTuple):
    """The parts of the clients' expected squared errors, noise + τ² · apart."""

    noise: Tensor  # (..., pulls, clients, p) due to the samples
    apart: Tensor  # (..., pulls, clients, p) due to the clients' differences, per unit of τ²

    def total(self, tau2: Tensor, by: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """Return expected squared errors (..., pulls, clients), for τ² or for τ_i² (..., clients).

        Weights of the coordinates, (..., clients, p), may be given; h/2 gives excess losses. Then
        ``share``, s_i, corrects the part of the noise, so that training alone has its own,
        tr(H_i V_i)/2, exactly.
        """
        per_client = tau2.ndim == self.noise.ndim - 2
        wide = tau2[..., None, :, None] if per_client else tau2[..., None, None, None]
        noise = self.noise if share is None else self.noise * share[..., None, :, None]
        found = noise + wide * self.apart
        return (found if by is None else found * by[..., None, :, :]).sum(-1)


def risks(pulls: Tensor, variance: Tensor, curvature: Tensor, weights: Tensor) -> Risks:
    """Return the expected errors of all clients at every λ, for weights p_i (..., clients).

    ``pulls`` are (pulls,) values of λ from 0 to ∞, or (..., pulls, clients) values of λ_i.
    """
    lam = pulls[:, None, None] if pulls.ndim == 1 else pulls[..., None]
    v, h = variance[..., None, :, :], curvature[..., None, :, :]
    share = weights[..., None, :, None]
    own = 1.0 / (1.0 + h / lam)  # a_i
    force = share / (1.0 / h + 1.0 / lam)
    force = torch.where(force.sum(-2, keepdim=True) > 0, force, share.expand_as(force))
    given = force / force.sum(-2, keepdim=True)  # b_k
    shared = (given.square() * v).sum(-2, keepdim=True)
    many = given.square().sum(-2, keepdim=True)
    kept = 1.0 - own
    noise = kept.square() * v + 2.0 * kept * own * given * v + own.square() * shared
    apart = own.square() * (1.0 - 2.0 * given + many)
    return Risks(noise, apart)


def best_pull(pulls: Tensor, error: Tensor) -> Tensor:
    """Return the λ of smallest error: (...) for errors (..., pulls)."""
    return pulls[error.argmin(-1)]


def default_pulls(curvature: Tensor, number: int = 121) -> Tensor:
    """Return 0, λ from 1e-5 of the smallest curvature to 1e4 of the largest, and ∞.

    >>> len(default_pulls(torch.ones(3, 2), 20))
    20
    """
    low, high = 1e-5 * float(curvature.min()), 1e4 * float(curvature.max())
    inner = torch.logspace(math.log10(low), math.log10(high), number - 2, dtype=torch.float64)
    ends = torch.tensor([0.0, math.inf], dtype=torch.float64)
    return torch.cat((ends[:1], inner, ends[1:]))
