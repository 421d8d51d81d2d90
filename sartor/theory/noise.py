"""How far a client's fit lies from its best model by chance: V_i = Cov(ŵ_i), from its own samples.

| symbol | here | meaning |
|---|---|---|
| H_i | ``hessians`` | ∇²L_i(ŵ_i), ridge included |
| G_i | (inside) | Cov of one sample's gradient: Σ_j g_ij g_ijᵀ/(n_i − p_i), or by the model |
| V_i | covariance | H_i⁻¹ G_i H_i⁻¹ / n_i |
| t_i | ``total`` | tr V_i, the mean squared error of the fit |
| Var(t̂_i)/t_i² | doubt | how well t_i is known itself |
| ρ_i² | gradient2 | tr G_i, the mean squared gradient of one sample |
| p_i | used | parameters that the samples determine: tr H_i⁻¹(H_i − ν), which is p without ridge |

Everything here is computed by a client from its own data. For linear models V_i = σ̂² (X_iᵀX_i)⁻¹ is
unbiased; for the others V_i is right to first order in 1/n_i, and ``calibrated`` mends the next
order: it draws labels from the client's own fit, fits them again, and multiplies by what the same
formula missed there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor import rng
from sartor.theory.linear_models import (
    Clients,
    basis,
    factor,
    fit_each,
    gradients,
    hessians,
    look,
    predict,
)

Middle = Literal["model", "sandwich"]

ENOUGH = 1e-5
"""The gradient norm at which a fit to drawn labels is near enough; its noise is far larger."""


class Noise(NamedTuple):
    """The chance error of every client's fit.

    Attributes:
        covariance: (..., clients, p, p) V̂_i.
        doubt: (..., clients) Var(t̂_i)/t_i²: 2/(n_i − p_i) for linear models. For labels only what
            the drawings of ``calibrated`` add: the rest is a function of ŵ_i that rises with its
            distance from the others, of which t̂_i is subtracted, so that it widens no error.
        complexity: (..., clients) tr(H_i⁻¹ G_i): p where the model is true and there is no ridge.
        gradient2: (..., clients) ρ̂_i².
        used: (..., clients) the effective number of parameters.
        curvature: (..., clients, p) 1/(H_i⁻¹)_jj, what a coordinate's fit resists a pull with.
        smallest: (..., clients) μ_i, the smallest eigenvalue of H_i.
        largest: (..., clients) Λ_max(H_i) at the fit.
    """

    covariance: Tensor
    doubt: Tensor
    complexity: Tensor
    gradient2: Tensor
    used: Tensor
    curvature: Tensor
    smallest: Tensor
    largest: Tensor

    @property
    def each(self) -> Tensor:
        """(..., clients, p) the variance of every coordinate of a fit."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def total(self) -> Tensor:
        """(..., clients) t̂_i = tr V̂_i."""
        return self.each.sum(-1)

    def scaled(self, factor: Tensor) -> Noise:
        """Return the same with every V̂_i multiplied by a factor of its client."""
        return self._replace(
            covariance=self.covariance * factor[..., None, None],
            complexity=self.complexity * factor,
        )


def noise_of(clients: Clients, w: Tensor, middle: Middle | None = None) -> Noise:
    """Estimate the covariance of converged fits.

    Args:
        clients: the samples that were fitted.
        w: (..., clients, p) the fits.
        middle: where G_i comes from: the "model", G_i = φ_i (H_i − ν) with φ_i the residual
            variance of a linear model and 1 for labels, or the gradients of the samples
            ("sandwich"), which holds for labels that the family does not describe, too. The
            default is the model, but the sandwich with ridge.
    """
    point = look(clients, w)
    curve = hessians(clients, point)
    n = clients.sizes
    eigenvalues = torch.linalg.eigvalsh(curve)
    inverse = torch.cholesky_inverse(factor(curve))
    data = curve - clients.ridge * torch.eye(clients.num_params, dtype=w.dtype)
    used = _trace(inverse @ data)
    free = (n - used).clamp(min=1.0)
    if (middle or ("sandwich" if clients.ridge else "model")) == "sandwich":
        each = gradients(clients, w)
        inner = each.mT @ each / free[..., None, None]
        parts = (each @ inverse).square().sum(-1)
        doubt = n * parts.square().sum(-1) / parts.sum(-1).square()
        doubt = (doubt - 1.0).clamp(min=0.0) / free
    elif clients.family == "linear":
        inner = data * (point.scores.square().sum((-1, -2)) / free)[..., None, None]
        doubt = 2.0 / free
    else:
        inner = data
        doubt = torch.zeros_like(free)
    return Noise(
        covariance=inverse @ inner @ inverse / n[..., None, None],
        doubt=doubt,
        complexity=_trace(inverse @ inner),
        gradient2=_trace(inner),
        used=used,
        curvature=1.0 / inverse.diagonal(dim1=-2, dim2=-1),
        smallest=eigenvalues[..., 0],
        largest=eigenvalues[..., -1],
    )


def calibrated(
    clients: Clients,
    w: Tensor,
    noise: Noise,
    *,
    middle: Middle | None = None,
    bias_reduced: bool,
    draws: int = 20,
    seed: int = 0,
) -> Noise:
    """Multiply V̂_i by (variance of fits to drawn labels)/(what ``noise_of`` says of those fits).

    The labels are drawn from the client's own fit, ``draws`` times, by keyed random numbers. It
    assumes that the family describes the labels; linear models need no calibration.

    Args:
        clients: the samples that were fitted.
        w: (..., clients, p) the fits.
        noise: of these fits, from ``noise_of``.
        middle: as it was there.
        bias_reduced: whether the fits were; those to drawn labels are made alike.
        draws: the number of drawings.
        seed: of the drawings.
    """
    if clients.family == "linear" or draws < 2:
        return noise
    fits, totals = [], []
    for draw in range(draws):
        other = replace(clients, y=draw_labels(clients, w, rng.fold(rng.key(seed), "labels", draw)))
        again = fit_each(
            other, bias_reduced=bias_reduced, start=w, tolerance=ENOUGH, max_steps=30
        ).w
        fits.append(again)
        totals.append(noise_of(other, again, middle).total)
    said, spread = torch.stack(totals).mean(0), torch.stack(fits).var(0).sum(-1)
    doubt = 2.0 * noise.covariance.square().sum((-1, -2)) / noise.total.square() / (draws - 1)
    return noise.scaled(spread / said)._replace(doubt=noise.doubt + doubt)


def draw_labels(clients: Clients, w: Tensor, key: Tensor) -> Tensor:
    """Draw a label for every sample from a logistic or softmax model.

    Sample j of client i has the random number (key, i, j), whatever else is drawn: neither padding
    nor federations beside this one change a label.
    """
    scores = predict(clients, w)
    num_clients, num_samples = clients.y.shape[-2:]
    keys = rng.fold(key.expand(num_clients, 2), torch.arange(num_clients))
    words = rng.words_at(keys[:, None, :], torch.arange((num_samples + 3) // 4))
    chance = (words.flatten(1)[:, :num_samples].to(torch.float64) + 0.5) * 2.0**-32
    if clients.family == "logistic":
        return (chance < torch.sigmoid(scores[..., 0])).to(clients.y.dtype)
    shares = torch.softmax(scores @ basis(clients.num_classes).T, -1).cumsum(-1)
    drawn = (shares < chance[..., None]).sum(-1).clamp(max=clients.num_classes - 1)
    return drawn.to(clients.y.dtype)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
