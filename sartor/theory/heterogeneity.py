"""Estimate from the fits how far apart the clients' best models are.

R² = Σ p_i ‖w_i* − w̄*‖² cannot be computed from the fits ŵ_i directly, because their noise adds to
every distance. The noise can be subtracted (R1, R3) or avoided: fits on two halves of a client's
samples have independent noise, which cancels in the product of their deviations (R2). All
estimators are ours; the papers leave the estimation of R open.

| symbol | here | meaning |
|---|---|---|
| ŵ_i; a_i, b_i | w; first, second | (..., clients, p) fits on all samples of i; on its two halves |
| V_i, t_i | covariance, noise | (..., clients, p, p) Cov(ŵ_i), and its trace E‖ŵ_i − w_i*‖² |
| p_i | weights | (..., clients), of sum 1 |
| w_GT, H_i | pooled, curvature | (..., p) the global fit; (..., clients, p, p) ∇²L_i at ŵ_i |
| s_ik | share | the weights that client i sees: p_k/Σp inside its group, 0 outside |

They hold for converged fits of identified, strongly convex models with n_i clearly above d. They do
not hold for networks, whose weights are not identified, or for separable classes. With ridge they
estimate the heterogeneity of the ridge targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sartor.theory import sampling_error
from sartor.theory.sampling_error import block_products, form2, leave_one_out, trace, variance


class SplitHalf(NamedTuple):
    """The heterogeneity of groups of clients, from two fits per client; (clients,) each."""

    radius2: Tensor  # R̂² of every client's group; may be negative
    noise: Tensor  # t̂_i, the estimated E‖ŵ_i − w_i*‖² of a fit on all samples of client i


class Heterogeneity(NamedTuple):
    """An estimate of R² = Σ p_i ‖w_i* − w̄*‖²."""

    radius2: Tensor  # (...) R̂², unbiased, so it may be negative by chance if R is small
    floor: Tensor  # (...) Var(R̂²) for these clients if their best models were the same
    growth: Tensor  # (...) what each unit of R² adds to that variance
    jackknife: Tensor  # (...) standard error of R̂² for clients like these, leaving each out once
    distances2: Tensor  # (..., clients) d̂_i², unbiased for ‖w_i* − w̄*‖²; the largest is too large
    noise: Tensor  # (..., clients) t̂_i
    subtracted: Tensor  # (...) Σ p_i(1 − p_i) t̂_i, what noise adds to the spread of the fits

    @property
    def standard_error(self) -> Tensor:
        """(...) of R̂² for these clients, due to the noise of their samples alone."""
        return (self.floor + self.growth * self.radius2.clamp(min=0.0)).sqrt()

    def interval(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Return the ends of {r : (R̂² − r)² ≤ z² (floor + growth · r)}, for these clients.

        This is a score interval: it uses the error at r, not at R̂². R̂² ∓ z standard errors would be
        too wide near R = 0 and miss on one side elsewhere, because R̂² and its standard error rise
        and fall together.
        """
        wide = z * z * self.growth / 2.0
        half = (z * z * (self.floor + self.growth * self.radius2) + wide.square()).clamp(min=0.0)
        return self.radius2 + wide - half.sqrt(), self.radius2 + wide + half.sqrt()

    def interval_anew(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return an interval by the jackknife, for new clients from the same population.

        It is for the mean of R² over federations of as many clients like these. The spread of the
        fits, Q = R̂² + subtracted, is positive and skewed to the right, so the interval is
        Q exp(∓ t · jackknife/Q) − subtracted, with t of Student's distribution with m − 1 degrees
        of freedom.
        """
        spread = torch.maximum(self.radius2 + self.subtracted, 0.5 * self.subtracted)
        far = (
            sampling_error.student(level, self.noise.shape[-1] - 1) * self.jackknife / spread
        ).exp()
        return spread / far - self.subtracted, spread * far - self.subtracted


def shares(weights: Tensor, group: Tensor) -> Tensor:
    """Return (clients, clients): row i has the weights inside the group of client i, of sum 1."""
    inside = weights * (group[:, None] == group[None, :])
    return inside / inside.sum(1, keepdim=True)


def split_half(first: Tensor, second: Tensor, share: Tensor) -> SplitHalf:
    """Estimate the heterogeneity of every client's group, and the noise (R2).

    R̂_i² = Σ_k s_ik ⟨a_k − ā_k, b_k − b̄_k⟩ and t̂_i = ‖a_i − b_i‖²/4, with the means of the groups
    and s from ``shares``.
    """
    return SplitHalf(share @ _products(first, second, share), _half_noise(first, second))


def crossover(found: SplitHalf | Heterogeneity, weights: Tensor) -> Tensor:
    """Return R̂² − Σ p_i(1 − p_i) t̂_i; if it is negative, the mean of the fits beats the fits.

    Their mean squared errors Σ p_i E‖· − w_i*‖² are R² + Σ p_i² t_i and Σ p_i t_i, so the sign is
    the exact crossover, for any weights and noise. For equal weights it is at R² =
    (1 − 1/m) · mean t̂_i. With the ``shares`` of groups as weights, the value is 0 for a client
    that is alone in its group.
    """
    return found.radius2 - (weights * (1.0 - weights) * found.noise).sum(-1)


def from_fits(
    w: Tensor,
    weights: Tensor,
    covariance: Tensor,
    doubt: Tensor | None = None,
    stretch: Tensor | None = None,
) -> Heterogeneity:
    """Estimate R² from one fit per client and its covariance (R1).

    R̂² = Σ p_i ‖ŵ_i − w̄‖² − Σ p_i(1 − p_i) t̂_i and
    d̂_i² = ‖ŵ_i − w̄‖² − (1 − 2p_i) t̂_i − Σ p_j² t̂_j, with w̄ = Σ p_i ŵ_i and t̂_i = tr V̂_i. What
    the bias of the fits adds to a client's squared distance is subtracted as well.

    A client sends ŵ_i and t̂_i, |θ| + 1 numbers, once; the standard error also needs V̂_i. ``doubt``
    and ``stretch``, (..., clients), are those of ``Noise``; 0 if None.
    """
    noise = trace(covariance)
    gaps = w - _mean(weights, w)
    longer = torch.zeros_like(noise) if stretch is None else stretch

    def radius(p: Tensor) -> Tensor:
        apart = (gaps - _mean(p, gaps)).square().sum(-1) - longer
        return (p * apart - p * (1.0 - p) * noise).sum(-1)

    shared = (weights.square() * noise).sum(-1, keepdim=True)
    form = weights * (1.0 - weights)
    products = torch.einsum("...iab,...jab->...ij", covariance, covariance)
    pulled = weights[..., None] * gaps
    linear = (pulled[..., None, :] @ covariance @ pulled[..., None])[..., 0, 0]
    more = 0.0 if doubt is None else (form.square() * noise.square() * doubt).sum(-1)
    distances2 = gaps.square().sum(-1) - longer - (1.0 - 2.0 * weights) * noise - shared
    return _estimate(w, weights, radius, distances2, noise, linear, form2(weights) * products, more)


def from_halves(first: Tensor, second: Tensor, weights: Tensor) -> Heterogeneity:
    """Estimate R² from fits on two disjoint halves of every client's samples (R2), no Hessians.

    R̂² = Σ p_i ⟨a_i − ā, b_i − b̄⟩: the noise of the halves is independent and cancels. A client
    sends 2|θ| numbers, once. For the standard error, δ_i = (a_i − b_i)/2 is a draw from N(0, V_i),
    independent of (a_i + b_i)/2, so that (δ_iᵀδ_j)² estimates tr(V_iV_j), and ‖δ_i‖⁴/(d + 2)
    estimates tr(V_i²), exactly if V_i is a multiple of I.
    """

    def parts(p: Tensor) -> Tensor:
        return _products(first, second, p[..., None, :])

    def radius(p: Tensor) -> Tensor:
        return (p * parts(p)).sum(-1)

    middle, apart = (first + second) / 2.0, (first - second) / 2.0
    pulled = weights[..., None] * (middle - _mean(weights, middle))
    products = (apart @ apart.mT).square()
    rounder = torch.eye(first.shape[-2], dtype=first.dtype) / (first.shape[-1] + 2.0)
    products = products * torch.where(rounder > 0, rounder, 1.0)
    noise2 = form2(weights) * products
    linear = (pulled * apart).sum(-1).square()
    noise, more = _half_noise(first, second), 2.0 * noise2.sum((-1, -2))
    return _estimate(first, weights, radius, parts(weights), noise, linear, noise2, more)


def from_global(
    w: Tensor, pooled: Tensor, weights: Tensor, covariance: Tensor, curvature: Tensor
) -> Heterogeneity:
    """Estimate Σ p_i ‖w_i* − w_GT*‖² from the local fits and the global fit (R3).

    R̂² = Σ p_i ‖ŵ_i − w_GT‖² − Σ p_i [t̂_i − 2 tr(A_i V̂_i)] − Σ tr(A_i V̂_i A_iᵀ), with
    A_i = p_i H̄⁻¹ H_i and H̄ = Σ p_j H_j. It is at least R², and equal if all H_i agree. The
    quadratic form of the fits has the blocks M_jk = p_j δ_jk − p_j A_k − p_k A_jᵀ + A_jᵀA_k.
    """
    noise = trace(covariance)

    def blend(p: Tensor) -> tuple[Tensor, Tensor]:
        """Return every A_i, and the global fit of the quadratic approximation."""
        pulled = p[..., None, None] * curvature
        a = torch.linalg.solve(pulled.sum(-3, keepdim=True), pulled)
        return a, (a @ w[..., None]).sum(-3)[..., 0]

    a, centre = blend(weights)
    offset = pooled - centre

    def parts(p: Tensor) -> tuple[Tensor, Tensor]:
        a, centre = blend(p)
        apart = (w - (centre + offset)[..., None, :]).square().sum(-1)
        both = trace(a @ covariance)
        return apart - noise + 2.0 * both, trace(a @ covariance @ a.mT).sum(-1)

    def radius(p: Tensor) -> Tensor:
        own, shared = parts(p)
        return (p * own).sum(-1) - shared

    gaps = w - pooled[..., None, :]
    p = weights[..., None]
    pulled = p * gaps - (a.mT @ (p * gaps).sum(-2)[..., None, :, None])[..., 0]
    linear = (pulled[..., None, :] @ covariance @ pulled[..., None])[..., 0, 0]
    own, shared = parts(weights)
    noise2 = block_products(a, weights, covariance)
    return _estimate(w, weights, radius, own - shared[..., None], noise, linear, noise2)


# ---- helpers -------------------------------------------------------------------------------------


def _estimate(
    w: Tensor,
    weights: Tensor,
    radius: Callable[[Tensor], Tensor],
    distances2: Tensor,
    noise: Tensor,
    linear: Tensor,
    noise2: Tensor,
    more: Tensor | float = 0.0,
) -> Heterogeneity:
    """Return ``radius(weights)``, its errors by ``variance`` and by the jackknife, and the rest."""
    radius2 = radius(weights)
    slope = sampling_error.round_slope(weights, noise, w)
    floor, growth = variance(radius2, linear, noise2, slope, more)
    jackknife = leave_one_out(radius, weights)
    subtracted = (weights * (1.0 - weights) * noise).sum(-1)
    return Heterogeneity(radius2, floor, growth, jackknife, distances2, noise, subtracted)


def _mean(weights: Tensor, w: Tensor) -> Tensor:
    return (weights[..., None] * w).sum(-2, keepdim=True)


def _products(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return ⟨a_i − Σ_k s_ik a_k, b_i − Σ_k s_ik b_k⟩; one row of ``share`` serves all clients."""
    return ((first - share @ first) * (second - share @ second)).sum(-1)


def _half_noise(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).square().sum(-1) / 4.0
