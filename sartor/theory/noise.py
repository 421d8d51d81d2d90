"""Estimate the sampling error of a client's fit, V_i = Cov(ŵ_i), from its own samples.

V_i = H_i⁻¹ G_i H_i⁻¹ / n_i, with H_i = ∇²L_i(ŵ_i), ridge included, and G_i the covariance of one
sample's gradient, from the samples (the sandwich) or from the model.

A client computes all of this from its own data. For linear models without ridge G_i is
Σ_j g_ij g_ijᵀ/(1 − h_ij)/n_i with the leverages h_ij = x_ijᵀ(X_iᵀX_i)⁻¹x_ij (MacKinnon and White,
J. Econometrics 29, 1985, HC2): V_i is then unbiased if the model is true, and right to first order
in 1/n_i if the noise depends on the features or the truth is not linear, where σ̂²(X_iᵀX_i)⁻¹ is
wrong for any n_i. Elsewhere the sandwich is Σ_j g_ij g_ijᵀ/(n_i − p_i). For labels V_i is right to
first order, and ``calibration`` corrects the next order by fits to simulated labels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor.theory.exact_fits import factor
from sartor.theory.linear_models import Clients, gradients, hessians, look
from sartor.theory.sampling_error import trace

Middle = Literal["model", "sandwich"]

_FREE = 1e-6
"""The least share of a residual that a fit leaves: below, a sample is met exactly."""


class Noise(NamedTuple):
    """The sampling error of every client's fit.

    For labels ``doubt`` is only what the random labels of ``calibration`` add: the rest is a
    function of ŵ_i that rises with its distance from the others, from which t̂_i is subtracted, so
    it widens no error.
    """

    covariance: Tensor  # (..., clients, p, p) V̂_i
    doubt: Tensor  # (..., clients) Var(t̂_i)/t_i²
    complexity: Tensor  # (..., clients) tr(H_i⁻¹ G_i): p if the model is true and there is no ridge
    gradient2: Tensor  # (..., clients) ρ̂_i² = tr G_i, the mean squared gradient of one sample
    used: Tensor  # (..., clients) p_i = tr H_i⁻¹(H_i − ν), parameters that the samples determine
    curvature: Tensor  # (..., clients, p) 1/(H_i⁻¹)_jj, how strongly a coordinate resists a pull
    smallest: Tensor  # (..., clients) μ_i, the smallest eigenvalue of H_i
    largest: Tensor  # (..., clients) Λ_max(H_i) at the fit
    stretch: Tensor  # (..., clients) what the bias of fits adds to ‖ŵ_i − w̄‖², by ``calibration``
    hessian: Tensor  # (..., clients, p, p) H_i

    @property
    def each(self) -> Tensor:
        """(..., clients, p) the variance of every coordinate of a fit."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def total(self) -> Tensor:
        """(..., clients) t̂_i = tr V̂_i, the mean squared error of a fit."""
        return self.each.sum(-1)

    def scaled(self, factor: Tensor) -> Noise:
        """Return the same with every V̂_i multiplied by a factor of its client."""
        covariance = self.covariance * factor[..., None, None]
        return self._replace(covariance=covariance, complexity=self.complexity * factor)


def noise_of(clients: Clients, w: Tensor, middle: Middle | None = None) -> Noise:
    """Estimate the covariance of converged fits w, (..., clients, p).

    ``middle`` is the source of G_i. "model" is G_i = φ_i (H_i − ν) with φ_i the residual variance
    of a linear model and 1 for labels. "sandwich" uses the gradients of the samples, and also holds
    for data that do not follow the model. The default is the model for labels without ridge, which
    ``calibration`` supposes, and the sandwich for linear models and with ridge.
    """
    point = look(clients, w)
    curve = hessians(clients, point)
    n = clients.sizes
    eigenvalues = torch.linalg.eigvalsh(curve)
    inverse = torch.cholesky_inverse(factor(curve))
    data = curve - clients.ridge * torch.eye(clients.num_params, dtype=w.dtype)
    used = trace(inverse @ data)
    free = (n - used).clamp(min=1.0)
    linear = clients.family == "linear"
    if (middle or ("sandwich" if clients.ridge or linear else "model")) == "sandwich":
        each = gradients(clients, w)
        if linear and not clients.ridge:
            leverage = ((clients.x @ inverse) * clients.x).sum(-1) / n[..., None]
            each = each * (1.0 - leverage).clamp(min=_FREE).rsqrt()[..., None]
            inner = each.mT @ each / n[..., None, None]
        else:
            inner = each.mT @ each / free[..., None, None]
        parts = (each @ inverse).square().sum(-1)
        doubt = n * parts.square().sum(-1) / parts.sum(-1).square()
        doubt = (doubt - 1.0).clamp(min=0.0) / free
    elif linear:
        inner = data * (point.scores.square().sum((-1, -2)) / free)[..., None, None]
        doubt = 2.0 / free
    else:
        inner = data
        doubt = torch.zeros_like(free)
    return Noise(
        covariance=inverse @ inner @ inverse / n[..., None, None],
        doubt=doubt,
        complexity=trace(inverse @ inner),
        gradient2=trace(inner),
        used=used,
        curvature=1.0 / inverse.diagonal(dim1=-2, dim2=-1),
        smallest=eigenvalues[..., 0],
        largest=eigenvalues[..., -1],
        stretch=torch.zeros_like(free),
        hessian=curve,
    )
