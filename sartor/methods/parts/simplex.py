"""Quadratic programmes over the simplex: many small ones at once, solved exactly, with a proof.

min αᵀPα subject to α ≥ 0, Σα = 1, for positive semidefinite P. With τ the multiplier of the sum,
x = α/τ solves the complementarity problem x ≥ 0, Px − 1 ≥ 0, xᵀ(Px − 1) = 0. Its support is found
by block principal pivoting: all wrong signs change sides at once, and where that does not help, one
at a time by the largest index, which always ends (Júdice and Pires, "A block principal pivoting
algorithm for large-scale strictly monotone linear complementarity problems", 1994; Murty, 1974).
A handful of pivots is usual; the number is fixed, so that nothing branches on data and everything
works under ``vmap``.

The proof of an answer is its gap αᵀPα − min_j (Pα)_j: no point of the simplex is better than α by
more than twice that. An answer without a small gap is replaced by the fallback, so that a broken
programme is never an exception.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-13  # holds up a singular P; the refinement in `_solve` takes its effect away
_SMALL = 1e-10  # how wrong a sign may be before it counts
_PATIENCE = 3  # block exchanges without progress before single ones


def minimise(matrix: Tensor, allowed: Tensor, own: Tensor, pivots: int = 60) -> Tensor:
    """Minimise αᵀPα over the simplex of the allowed entries, for many P at once.

    Where α = e_own is as good as the best, it is the answer; and so it is where there is no
    certified answer, as for numbers that are not finite. α is (..., m), in float64.

    Args:
        matrix: P, (..., m, m), symmetric positive semidefinite.
        allowed: (..., m), false for entries that must stay zero.
        own: (...), the entry that is the fallback.
        pivots: how many exchanges of the support to take; a dozen is usual for m up to 100.
    """
    num = matrix.shape[-1]
    p = matrix.to(torch.float64)
    alone = (torch.arange(num, device=p.device) == own[..., None]).to(p.dtype)
    pair = allowed[..., :, None] & allowed[..., None, :]
    p = torch.where(pair, 0.5 * (p + p.mT), 0.0)
    finite = p.isfinite().all(-1).all(-1)
    p = torch.where(finite[..., None, None], p, 0.0)  # a tie, and so oneself
    size = p.diagonal(dim1=-2, dim2=-1)
    largest = size.amax(-1)
    p = p / torch.where(largest > 0, largest, 1.0)[..., None, None]
    x = _complementary(p, allowed, pivots)
    x = torch.where(x.isfinite(), x, 0.0).clamp(min=0.0)
    x = x / x.amax(-1, keepdim=True).clamp(min=1e-300)
    alpha = x / x.sum(-1, keepdim=True).clamp(min=1e-300)
    at_home = (p.diagonal(dim1=-2, dim2=-1) * alone).sum(-1)
    proven = (x.sum(-1) > 0) & (gap(p, alpha, allowed) <= 1e-9 * at_home + 1e-14)
    better = (at_home > 1e-16) & (_value(p, alpha) < (1.0 - 1e-13) * at_home)
    return torch.where((proven & better)[..., None], alpha, alone)


def gap(matrix: Tensor, alpha: Tensor, allowed: Tensor) -> Tensor:
    """Return αᵀPα − min_j (Pα)_j over the allowed j, (...): zero at the minimum and only there."""
    slope = _times(matrix, alpha)
    return _value(matrix, alpha) - torch.where(allowed, slope, torch.inf).amin(-1)


def _complementary(p: Tensor, allowed: Tensor, pivots: int) -> Tensor:
    """Solve x ≥ 0, Px − 1 ≥ 0, xᵀ(Px − 1) = 0 on the allowed entries by principal pivoting."""
    size = p.diagonal(dim1=-2, dim2=-1)
    root = torch.where(size > 1e-24, size, 1.0).sqrt()  # scaled to a unit diagonal: D⁻½ P D⁻½
    unit = p / (root[..., :, None] * root[..., None, :])
    wanted = 1.0 / root
    num = p.shape[-1]
    places = torch.arange(num, device=p.device)
    inside = torch.zeros_like(allowed) & allowed
    fewest = torch.full_like(allowed.sum(-1), num + 1)
    patience = torch.full_like(fewest, _PATIENCE)
    x = torch.zeros_like(wanted)
    for _ in range(pivots):
        short = _times(unit, x) - wanted < -_SMALL * wanted
        below = x < -_SMALL * x.abs().amax(-1, keepdim=True)
        wrong = torch.where(inside, below, short & allowed)
        count = wrong.sum(-1)
        patience = torch.where(count < fewest, _PATIENCE, patience - 1)
        fewest = torch.minimum(count, fewest)
        one = wrong & (places == torch.where(wrong, places, -1).amax(-1, keepdim=True))
        inside = inside ^ torch.where((patience >= 0)[..., None], wrong, one)
        x = _solve(unit, wanted, inside)
    return x / root


def _solve(p: Tensor, wanted: Tensor, inside: Tensor) -> Tensor:
    """Solve P x = wanted on the inside entries; zero elsewhere."""
    pair = inside[..., :, None] & inside[..., None, :]
    p = torch.where(pair, p, 0.0)
    wanted = torch.where(inside, wanted, 0.0)
    prop = torch.where(inside, _RIDGE, torch.ones_like(wanted))
    factor, _ = torch.linalg.cholesky_ex(p + torch.diag_embed(prop))

    def solved(right: Tensor) -> Tensor:
        # Two triangular solves, as `cholesky_solve`, which a CUDA graph cannot record.
        half = torch.linalg.solve_triangular(factor, right[..., None], upper=False)
        return torch.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]

    x = solved(wanted)
    for _ in range(2):
        x = x + solved(wanted - _times(p, x))
    return x


def _times(p: Tensor, x: Tensor) -> Tensor:
    return (p @ x[..., None])[..., 0]


def _value(p: Tensor, x: Tensor) -> Tensor:
    return (x * _times(p, x)).sum(-1)
