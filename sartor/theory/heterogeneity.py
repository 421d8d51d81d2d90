"""How far the clients' best models lie from one another, estimated from their fits.

R² = Σ p_i ‖w_i* − w̄*‖² cannot be read off the fits ŵ_i themselves: their own noise adds to every
distance. It can be subtracted (R1, R3), or avoided: fits on two halves of a client's samples have
independent noise, which vanishes from the product of their deviations (R2). All estimators are ours;
the papers leave the estimation of R open.

| symbol | here | meaning |
|---|---|---|
| ŵ_i; a_i, b_i | w; first, second | fits on all samples of client i; on its two halves |
| V_i, t_i | covariance, noise | Cov(ŵ_i), and its trace E‖ŵ_i − w_i*‖² |
| p_i | weights | of sum 1 |
| s_ik | share | the weights that client i sees: p_k/Σp inside its group, 0 outside |

They hold for converged fits of identified, strongly convex models with n_i clearly above d; not for
networks, whose weights are not identified, nor for separable classes. With ridge they speak of the
ridge targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SplitHalf(NamedTuple):
    """What two fits per client say of the groups that the clients form.

    Attributes:
        radius2: (clients,) R̂² of every client's group; may be negative.
        noise: (clients,) t̂_i, the estimated E‖ŵ_i − w_i*‖² of a fit on all samples of client i.
    """

    radius2: Tensor
    noise: Tensor


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


def shares(weights: Tensor, group: Tensor) -> Tensor:
    """Return (clients, clients): row i holds the weights inside the group of i, with sum 1."""
    inside = weights * (group[:, None] == group[None, :])
    return inside / inside.sum(1, keepdim=True)


def split_half(first: Tensor, second: Tensor, share: Tensor) -> SplitHalf:
    """Estimate the heterogeneity of every client's group, and the noise (R2).

    R̂_i² = Σ_k s_ik ⟨a_k − ā_k, b_k − b̄_k⟩ and t̂_i = ‖a_i − b_i‖²/4, with the means of the groups.

    Args:
        first: (clients, d) the fits a_i.
        second: (clients, d) the fits b_i.
        share: (clients, clients) from ``shares``.
    """
    return SplitHalf(share @ _products(first, second, share), _half_noise(first, second))


def crossover(found: SplitHalf | Heterogeneity, weights: Tensor) -> Tensor:
    """Return R̂² − Σ p_i(1 − p_i) t̂_i: below 0 the mean of the fits beats the fits themselves.

    Their mean squared errors Σ p_i E‖· − w_i*‖² are R² + Σ p_i² t_i and Σ p_i t_i, so the sign is
    the exact crossover, for any weights and noise. For equal weights the limit is
    (1 − 1/m) · mean t̂_i. A client alone in its group has 0, and nothing to gain.

    Args:
        found: from any of the estimators here.
        weights: (..., clients) p_i, or the ``shares`` of groups.
    """
    return found.radius2 - (weights * (1.0 - weights) * found.noise).sum(-1)


def from_fits(
    w: Tensor, weights: Tensor, covariance: Tensor, doubt: Tensor | None = None
) -> Heterogeneity:
    """Estimate R² from one fit per client and its covariance (R1).

    R̂² = Σ p_i ‖ŵ_i − w̄‖² − Σ p_i(1 − p_i) t̂_i and
    d̂_i² = ‖ŵ_i − w̄‖² − (1 − 2p_i) t̂_i − Σ p_j² t̂_j, with w̄ = Σ p_i ŵ_i and t̂_i = tr V̂_i.

    A client sends ŵ_i and t̂_i, |θ| + 1 numbers, once; for the standard error V̂_i as well.

    Args:
        w: (..., clients, p) converged fits ŵ_i.
        weights: (..., clients) p_i, of sum 1.
        covariance: (..., clients, p, p) V̂_i.
        doubt: (..., clients) Var(t̂_i)/t_i², ``Noise.doubt``; 0 if None.
    """
    noise = _trace(covariance)
    gaps = w - _mean(weights, w)

    def radius(p: Tensor) -> Tensor:
        apart = (gaps - _mean(p, gaps)).square().sum(-1)
        return (p * apart - p * (1.0 - p) * noise).sum(-1)

    shared = (weights.square() * noise).sum(-1, keepdim=True)
    form = weights * (1.0 - weights)
    products = torch.einsum("...iab,...jab->...ij", covariance, covariance)
    pulled = weights[..., None] * gaps
    linear = (pulled[..., None, :] @ covariance @ pulled[..., None])[..., 0, 0]
    more = 0.0 if doubt is None else (form.square() * noise.square() * doubt).sum(-1)
    return Heterogeneity(
        radius2=radius(weights),
        standard_error=_sampling_error(linear, _form2(weights) * products, more),
        jackknife=leave_one_out(radius, weights),
        distances2=gaps.square().sum(-1) - (1.0 - 2.0 * weights) * noise - shared,
        noise=noise,
    )


def from_halves(first: Tensor, second: Tensor, weights: Tensor) -> Heterogeneity:
    """Estimate R² from fits on two disjoint halves of every client's samples (R2), no Hessians.

    R̂² = Σ p_i ⟨a_i − ā, b_i − b̄⟩: the noise of the halves is independent and drops out. A client
    sends 2|θ| numbers, once. For the standard error δ_i = (a_i − b_i)/2 is a draw of N(0, V_i) that
    is independent of (a_i + b_i)/2, so that (δ_iᵀδ_j)² stands for tr(V_iV_j), and ‖δ_i‖⁴/(d + 2) for
    tr(V_i²), which is exact where V_i is round.

    Args:
        first: (..., clients, p) the fits a_i.
        second: (..., clients, p) the fits b_i.
        weights: (..., clients) p_i, of sum 1.
    """

    def parts(p: Tensor) -> Tensor:
        return _products(first, second, p[..., None, :])

    middle, apart = (first + second) / 2.0, (first - second) / 2.0
    pulled = weights[..., None] * (middle - _mean(weights, middle))
    products = (apart @ apart.mT).square()
    rounder = torch.eye(first.shape[-2], dtype=first.dtype) / (first.shape[-1] + 2.0)
    products = products * torch.where(rounder > 0, rounder, 1.0)
    noise2 = _form2(weights) * products
    linear = (pulled * apart).sum(-1).square()
    return Heterogeneity(
        radius2=(weights * parts(weights)).sum(-1),
        standard_error=_sampling_error(linear, noise2, 2.0 * noise2.sum((-1, -2))),
        jackknife=leave_one_out(lambda p: (p * parts(p)).sum(-1), weights),
        distances2=parts(weights),
        noise=_half_noise(first, second),
    )


def from_global(
    w: Tensor, pooled: Tensor, weights: Tensor, covariance: Tensor, curvature: Tensor
) -> Heterogeneity:
    """Estimate Σ p_i ‖w_i* − w_GT*‖² from the local fits and the global fit (R3).

    R̂² = Σ p_i ‖ŵ_i − w_GT‖² − Σ p_i [t̂_i − 2 tr(A_i V̂_i)] − Σ tr(A_i V̂_i A_iᵀ), with
    A_i = p_i H̄⁻¹ H_i and H̄ = Σ p_j H_j. It is at least R², and equal where all H_i agree. The
    quadratic form of the fits has the blocks M_jk = p_j δ_jk − p_j A_k − p_k A_jᵀ + A_jᵀA_k.

    Args:
        w: (..., clients, p) converged fits ŵ_i.
        pooled: (..., p) the global fit w_GT.
        weights: (..., clients) p_i, of sum 1.
        covariance: (..., clients, p, p) V̂_i.
        curvature: (..., clients, p, p) H_i.
    """
    noise = _trace(covariance)

    def blend(p: Tensor) -> tuple[Tensor, Tensor]:
        """Return every A_i, and the global fit that the quadratic approximation has."""
        pulled = p[..., None, None] * curvature
        a = torch.linalg.solve(pulled.sum(-3, keepdim=True), pulled)
        return a, (a @ w[..., None]).sum(-3)[..., 0]

    a, centre = blend(weights)
    offset = pooled - centre

    def parts(p: Tensor) -> tuple[Tensor, Tensor]:
        a, centre = blend(p)
        apart = (w - (centre + offset)[..., None, :]).square().sum(-1)
        both = _trace(a @ covariance)
        return apart - noise + 2.0 * both, _trace(a @ covariance @ a.mT).sum(-1)

    def radius(p: Tensor) -> Tensor:
        own, shared = parts(p)
        return (p * own).sum(-1) - shared

    gaps = w - pooled[..., None, :]
    p = weights[..., None]
    pulled = p * gaps - (a.mT @ (p * gaps).sum(-2)[..., None, :, None])[..., 0]
    linear = (pulled[..., None, :] @ covariance @ pulled[..., None])[..., 0, 0]
    own, shared = parts(weights)
    return Heterogeneity(
        radius2=radius(weights),
        standard_error=_sampling_error(linear, _blocks2(a, weights, covariance)),
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


# ---- helpers -------------------------------------------------------------------------------------


def _mean(weights: Tensor, w: Tensor) -> Tensor:
    return (weights[..., None] * w).sum(-2, keepdim=True)


def _products(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return ⟨a_i − Σ_k s_ik a_k, b_i − Σ_k s_ik b_k⟩; one row of ``share`` serves all clients."""
    return ((first - share @ first) * (second - share @ second)).sum(-1)


def _half_noise(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).square().sum(-1) / 4.0


def _form2(weights: Tensor) -> Tensor:
    """Return the squares of the entries of diag(p) − ppᵀ."""
    outer = weights[..., :, None] * weights[..., None, :]
    return (torch.diag_embed(weights) - outer).square()


def _blocks2(a: Tensor, weights: Tensor, covariance: Tensor) -> Tensor:
    """Return tr(V_j M_jk V_k M_jkᵀ) for all pairs of clients, M as in ``from_global``."""
    eye, found = torch.eye(a.shape[-1], dtype=a.dtype), []
    p = weights[..., None, None]
    for j in range(weights.shape[-1]):
        own, mine = a[..., j : j + 1, :, :], p[..., j : j + 1, :, :]
        block = own.mT @ a - mine * a - p * own.mT
        block[..., j, :, :] += mine[..., 0, :, :] * eye
        found.append(_trace(covariance[..., j : j + 1, :, :] @ block @ covariance @ block.mT))
    return torch.stack(found, -2)


def _sampling_error(linear: Tensor, noise2: Tensor, more: Tensor | float = 0.0) -> Tensor:
    """Return the standard error of a quadratic form Σ_jk ŵ_jᵀM_jkŵ_k of independent normal fits.

    Its variance is 4Σ g_kᵀV_kg_k + 2Σ D_jk, with g_k = Σ_j M_kj w_j* and D_jk = tr(V_jM_jkV_kM_kj).
    At the fits g_k has the covariance Σ_j M_kjV_jM_jk, which adds Σ D_jk to Σ g_kᵀV_kg_k.

    Args:
        linear: (..., clients) ĝ_kᵀV̂_kĝ_k.
        noise2: (..., clients, clients) D_jk.
        more: (...) further variance.
    """
    quadratic = noise2.sum((-1, -2))
    return (4.0 * (linear.sum(-1) - quadratic).clamp(min=0.0) + 2.0 * quadratic + more).sqrt()


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
