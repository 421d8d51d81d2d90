"""Fit Firth's logistic regression to many sets of labels of the same features at once.

argmax Σ_j log p(y_j | x_jᵀw) + ½ log det H(w), H = Σ_j c_j x_jx_jᵀ with c_j = p_j(1 − p_j): the fit
whose first-order bias is 0. Its gradient is Σ_j [y_j − p_j + h_j(½ − p_j)] x_j with the leverages
h_j = c_j x_jᵀH⁻¹x_j. All sets of labels of a client share the products x_jx_jᵀ, so that one Newton
step for all of them is a few matrix products, many times faster than separate fits.

| symbol | here | meaning |
|---|---|---|
| w | start, ``Refits.w`` | one model for each set of labels |
| x_jx_jᵀ | products | upper triangle, D = d(d + 1)/2 numbers |
| H | (inside) | of the sum of a client's losses, not of their mean |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 12
"""The most Newton steps; what has not converged by then is left to a slower and safer fit."""

NEAR = 1e-3
"""The length of a Newton step, relative to the noise of the fit, at which the fit stops."""

TINY = 1e-100
"""A matrix whose Cholesky factor has a smaller diagonal entry counts as singular."""

CACHE = 400_000
"""The numbers in a block of clients, chosen so that it fits into the processor cache."""


class Refits(NamedTuple):
    """Fits to many sets of labels."""

    w: Tensor  # (clients, sets, d) the fits
    total: Tensor  # (clients, sets) tr H⁻¹, their variance according to the model
    arrived: Tensor  # (clients, sets) whether the last step was short enough


def refit(x: Tensor, y: Tensor, start: Tensor) -> Refits:
    """Fit every set of labels y, (clients, samples, sets), of every client.

    Features x are (clients, samples, d), 0 for padding; first models are (clients, sets, d).
    """
    size = max(1, CACHE // (y.shape[1] * (y.shape[2] + x.shape[2] ** 2)))
    blocks = zip(x.split(size), y.split(size), start.split(size), strict=True)
    parts = [_refit(*block) for block in blocks]
    return Refits(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _refit(x: Tensor, y: Tensor, w: Tensor) -> Refits:
    rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1])
    products = x[..., rows] * x[..., columns]
    twice = torch.where(rows == columns, 1.0, 2.0).to(x.dtype)
    lost = torch.zeros(w.shape[:-1], dtype=torch.bool)
    for _ in range(STEPS):
        chance = torch.sigmoid(x @ w.mT)
        curvature = chance * (1.0 - chance)
        inverse, singular = _inverse(curvature.mT @ products, rows, columns)
        leverage = curvature * (products @ (inverse[..., rows, columns] * twice).mT)
        slope = x.mT @ (y - chance + leverage * (0.5 - chance))
        lost = lost | singular
        step = (inverse @ slope.mT[..., None])[..., 0] * ~lost[..., None]
        w = w + step
        total = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
        arrived = step.square().sum(-1) <= NEAR**2 * total
        if bool((arrived | lost).all()):
            break
    return Refits(w, total, arrived & ~lost)


def _inverse(upper: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Invert symmetric matrices given by their upper triangles; return I for those that fail."""
    d = int(rows[-1]) + 1
    whole = upper.new_empty((*upper.shape[:-1], d, d))
    whole[..., rows, columns] = upper
    whole[..., columns, rows] = upper
    root, failed = torch.linalg.cholesky_ex(whole)
    singular = (failed > 0) | ~(root.diagonal(dim1=-2, dim2=-1).amin(-1) > TINY)
    if bool(singular.any()):
        root = torch.where(singular[..., None, None], torch.eye(d, dtype=root.dtype), root)
    return torch.cholesky_inverse(root), singular
