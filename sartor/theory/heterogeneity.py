"""How far the clients' best models lie from one another, estimated from their fits.

R² = Σ p_i ‖w_i* − w̄*‖² cannot be read off the fits ŵ_i themselves: their own noise adds to every
distance. Fits on two halves of a client's samples have independent noise, which vanishes from the
product of their deviations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SplitHalf(NamedTuple):
    """What two fits per client say.

    Attributes:
        radius2: (clients,) R̂² of every client's group; may be negative.
        noise: (clients,) t̂_i, the estimated E‖ŵ_i − w_i*‖² of a fit on all samples of client i.
    """

    radius2: Tensor
    noise: Tensor


def split_half(first: Tensor, second: Tensor, weights: Tensor, group: Tensor) -> SplitHalf:
    """Estimate heterogeneity and noise from fits on two disjoint halves of every client's data.

    R̂² = Σ p_i ⟨a_i − ā, b_i − b̄⟩ and t̂_i = ‖a_i − b_i‖²/4, with p normalised inside each group.
    Valid for strongly convex, converged fits; not for networks, whose weights are not identified.

    Args:
        first: (clients, d) the fits a_i.
        second: (clients, d) the fits b_i.
        weights: (clients,) p_i.
        group: (clients,) labels; one group if all are equal.
    """
    share = shares(weights, group)
    deviations = (first - share @ first) * (second - share @ second)
    noise = (first - second).square().sum(1) / 4.0
    return SplitHalf(share @ deviations.sum(1), noise)


def shares(weights: Tensor, group: Tensor) -> Tensor:
    """Return (clients, clients): row i holds the weights inside the group of i, with sum 1."""
    inside = weights * (group[:, None] == group[None, :])
    return inside / inside.sum(1, keepdim=True)


def federate(found: SplitHalf, group: Tensor) -> Tensor:
    """Say for every client whether its group's one model beats its members' own ones.

    R̂² < (1 − 1/m) · mean t̂_i over the m members: the crossover of the two mean-square errors for
    clients of equal size and noise. A group of one has nothing to gain.
    """
    even = shares(torch.ones_like(found.noise), group)
    size = (group[:, None] == group[None, :]).sum(1)
    return (found.radius2 < (1.0 - 1.0 / size) * (even @ found.noise)) & (size > 1)


# ---- from full fits ------------------------------------------------------------------------------


class Heterogeneity(NamedTuple):
    """What the fits say of R² = Σ p_i ‖w_i* − w̄*‖².

    Attributes:
        radius2: (...) R̂², the sign kept: it is unbiased, and below 0 by chance where R is small.
        standard_error: (...) of R̂² for these clients: the noise of their samples alone.
        jackknife: (...) of R̂² for clients like these: leaving out one client at a time.
        distances2: (..., clients) d̂_i², unbiased for ‖w_i* − w̄*‖²; the largest of them is biased
            upwards.
        noise: (..., clients) t̂_i.
    """

    radius2: Tensor
    standard_error: Tensor
    jackknife: Tensor
    distances2: Tensor
    noise: Tensor

    def interval(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Return R̂² ∓ z standard errors for these clients."""
        return self.radius2 - z * self.standard_error, self.radius2 + z * self.standard_error


def from_fits(w: Tensor, weights: Tensor, covariance: Tensor) -> Heterogeneity:
    """Estimate R² from one fit per client and its covariance (R1).

    R̂² = Σ p_i ‖ŵ_i − w̄‖² − Σ p_i(1 − p_i) t̂_i and
    d̂_i² = ‖ŵ_i − w̄‖² − (1 − 2p_i) t̂_i − Σ p_j² t̂_j, with w̄ = Σ p_i ŵ_i and t̂_i = tr V̂_i.

    A client sends ŵ_i and t̂_i, |θ| + 1 numbers, once; for the standard error it receives w̄ and
    sends the number (ŵ_i − w̄)ᵀV̂_i(ŵ_i − w̄).

    Args:
        w: (..., clients, p) converged fits ŵ_i.
        weights: (..., clients) p_i, of sum 1.
        covariance: (..., clients, p, p) V̂_i.
    """
    noise = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    gaps = w - (weights[..., None] * w).sum(-2, keepdim=True)

    def radius(p: Tensor) -> Tensor:
        centre = (p[..., None] * gaps).sum(-2, keepdim=True)
        apart = (gaps - centre).square().sum(-1)
        return (p * apart - p * (1.0 - p) * noise).sum(-1)

    shared = (weights.square() * noise).sum(-1, keepdim=True)
    distances2 = gaps.square().sum(-1) - (1.0 - 2.0 * weights) * noise - shared
    return Heterogeneity(
        radius2=radius(weights),
        standard_error=_sampling_error(gaps, weights, covariance),
        jackknife=leave_one_out(radius, weights),
        distances2=distances2,
        noise=noise,
    )


def from_halves(first: Tensor, second: Tensor, weights: Tensor) -> Heterogeneity:
    """Estimate R² from fits on two disjoint halves of every client's samples (R2), no Hessians.

    R̂² = Σ p_i ⟨a_i − ā, b_i − b̄⟩: the noise of the halves is independent and drops out. A client
    sends 2|θ| numbers, once. The standard error takes V_i as isotropic, t̂_i = ‖a_i − b_i‖²/4.

    Args:
        first: (..., clients, p) the fits a_i.
        second: (..., clients, p) the fits b_i.
        weights: (..., clients) p_i, of sum 1.
    """
    noise = (first - second).square().sum(-1) / 4.0

    def parts(p: Tensor) -> Tensor:
        left = first - (p[..., None] * first).sum(-2, keepdim=True)
        right = second - (p[..., None] * second).sum(-2, keepdim=True)
        return (left * right).sum(-1)

    dim = first.shape[-1]
    middle = (first + second) / 2.0
    gaps = middle - (weights[..., None] * middle).sum(-2, keepdim=True)
    round_noise = torch.eye(dim, dtype=first.dtype) * (noise / dim)[..., None, None]
    return Heterogeneity(
        radius2=(weights * parts(weights)).sum(-1),
        standard_error=_sampling_error(gaps, weights, round_noise),
        jackknife=leave_one_out(lambda p: (p * parts(p)).sum(-1), weights),
        distances2=parts(weights),
        noise=noise,
    )


def from_global(
    w: Tensor, pooled: Tensor, weights: Tensor, covariance: Tensor, curvature: Tensor
) -> Heterogeneity:
    """Estimate Σ p_i ‖w_i* − w_GT*‖² from the local fits and the global fit (R3).

    R̂² = Σ p_i ‖ŵ_i − w_GT‖² − Σ p_i [t̂_i − 2 tr(A_i V̂_i)] − Σ tr(A_i V̂_i A_iᵀ), with
    A_i = p_i H̄⁻¹ H_i and H̄ = Σ p_j H_j. It is at least R², and equal where all H_i agree.

    Args:
        w: (..., clients, p) converged fits ŵ_i.
        pooled: (..., p) the global fit w_GT.
        weights: (..., clients) p_i, of sum 1.
        covariance: (..., clients, p, p) V̂_i.
        curvature: (..., clients, p, p) H_i.
    """
    noise = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)

    def blend(p: Tensor) -> tuple[Tensor, Tensor]:
        """Return every A_i, and the global fit that the quadratic approximation has."""
        pulled = p[..., None, None] * curvature
        a = torch.linalg.solve(pulled.sum(-3, keepdim=True).expand_as(pulled), pulled)
        return a, (a @ w[..., None]).sum(-3)[..., 0]

    offset = pooled - blend(weights)[1]

    def parts(p: Tensor) -> tuple[Tensor, Tensor]:
        a, centre = blend(p)
        apart = (w - (centre + offset)[..., None, :]).square().sum(-1)
        both = _trace(a @ covariance)
        return apart - noise + 2.0 * both, _trace(a @ covariance @ a.mT).sum(-1)

    def radius(p: Tensor) -> Tensor:
        own, shared = parts(p)
        return (p * own).sum(-1) - shared

    own, shared = parts(weights)
    return Heterogeneity(
        radius2=radius(weights),
        standard_error=_sampling_error(w - pooled[..., None, :], weights, covariance),
        jackknife=leave_one_out(radius, weights),
        distances2=own - shared[..., None],
        noise=noise,
    )


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


def crossover(found: Heterogeneity, weights: Tensor) -> Tensor:
    """Return R̂² − Σ p_i(1 − p_i) t̂_i / Σ p_i(1 − p_i) · (1 − 1/m): one model for all wins below 0.

    For clients of equal size and noise it is R̂² − (1 − 1/m) t̂, and its sign is the exact crossover
    of the two mean squared errors.
    """
    m = weights.shape[-1]
    spread = weights * (1.0 - weights)
    mean = (spread * found.noise).sum(-1) / spread.sum(-1)
    return found.radius2 - (1.0 - 1.0 / m) * mean


def _sampling_error(gaps: Tensor, weights: Tensor, covariance: Tensor) -> Tensor:
    """Return √(4Σp_i² u_iᵀV_iu_i + 2Σ_ij c_ij² tr(V_iV_j)), the noise of the estimates u_i removed.

    c is the matrix diag(p) − ppᵀ of the quadratic form.
    """
    form = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
    products = torch.einsum("...iab,...jab->...ij", covariance, covariance)
    own = products.diagonal(dim1=-2, dim2=-1)
    linear = (gaps[..., None, :] @ covariance @ gaps[..., None])[..., 0, 0]
    linear = (weights.square() * (linear - (1.0 - 2.0 * weights) * own)).sum(-1)
    quadratic = (form.square() * products).sum((-1, -2))
    return (4.0 * linear.clamp(min=0.0) + 2.0 * quadratic).sqrt()


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
