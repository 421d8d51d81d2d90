"""Roots R of covariances T = R Rᵀ: (P,) for variances, (P, P) for a matrix; K priors in front."""

from __future__ import annotations

import torch
from torch import Tensor


def times(root: Tensor, v: Tensor, turned: bool = False) -> Tensor:
    """Return R v (or Rᵀ v) of each prior, (..., K, P)."""
    if root.dim() == 2:
        return root * v
    return ((root.mT if turned else root) @ v[..., None])[..., 0]


def whitened(root: Tensor, curvature: Tensor) -> Tensor:
    """Return B = I + Rᵀ A R."""
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    if root.dim() == 2:
        return eye + root[..., None] * curvature * root[:, None]
    return eye + root.mT @ curvature @ root


def root_of(spread: Tensor) -> Tensor:
    """Return R with T = R Rᵀ: (P,) of variances, (P, P) of a matrix."""
    if spread.dim() == 1:
        return spread.sqrt()
    least = 1e-12 * torch.diagonal(spread).mean() + 1e-30  # so that T = 0 has a root
    eye = torch.eye(len(spread), dtype=spread.dtype, device=spread.device)
    return torch.linalg.cholesky_ex(spread + least * eye)[0]


def half_log_det(factor: Tensor) -> Tensor:
    """Return ½ log det of the matrices that have these Cholesky factors."""
    return torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
