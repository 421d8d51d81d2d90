"""Evaluate linear, logistic and softmax regression on the samples of many clients at once.

Clients are lanes: their samples are padded to one length and stacked, and any number of further
leading axes (repetitions, settings) come before the axis of clients. These are the convex models of
the theory; `exact_fits.py` finds their minimisers.

| symbol | here | meaning |
|---|---|---|
| w_i | (..., clients, p) | a client's model, flat; p = d · outputs |
| L_i | ``Point.loss`` | mean loss of client i, ridge term (ν/2)‖w‖² included |
| H_i | ``hessians`` | ∇²L_i, (..., clients, p, p) |

Softmax scores are x V Qᵀ with the columns of Q an orthonormal basis of the vectors of sum 0, so
that a model is unique, and distances are those of the usual weights with class means removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Family = Literal["linear", "logistic", "softmax"]


@dataclass(frozen=True)
class Clients:
    """The samples of all clients, padded, with the family of models for them."""

    x: Tensor  # (..., clients, samples, d) features, float64
    y: Tensor  # (..., clients, samples) targets, 0/1, or class numbers
    mask: Tensor  # (..., clients, samples) which samples are real
    family: Family  # "linear" (½(y − xᵀw)²), "logistic" or "softmax"
    num_classes: int = 2  # for softmax
    ridge: float = 0.0  # ν of (ν/2)‖w‖², part of every client's loss

    @property
    def sizes(self) -> Tensor:
        """n_i, (..., clients) float64."""
        return self.mask.sum(-1).to(self.x.dtype)

    @property
    def outputs(self) -> int:
        """The number of scores per sample: 1, or classes − 1."""
        return self.num_classes - 1 if self.family == "softmax" else 1

    @property
    def num_params(self) -> int:
        """p, the length of a flat model."""
        return self.x.shape[-1] * self.outputs

    def take(self, index: Tensor | slice) -> Clients:
        """Return some entries of the first axis."""
        return replace(self, x=self.x[index], y=self.y[index], mask=self.mask[index])

    def where(self, keep: Tensor) -> Clients:
        """Return the same clients with only some of their samples."""
        return replace(self, mask=self.mask & keep)


class Point(NamedTuple):
    """Losses and derivatives at given models, per client."""

    loss: Tensor  # (..., clients) mean losses, ridge included
    slope: Tensor  # (..., clients, p) their gradients
    scores: Tensor  # (..., clients, samples, outputs) gradients by the scores, 0 for padding
    curvature: Tensor  # (..., clients, samples, outputs, outputs) second derivatives, 0 for padding


def basis(num_classes: int) -> Tensor:
    """Return Q, (classes, classes − 1), an orthonormal basis of the vectors of sum 0.

    >>> q = basis(4)
    >>> bool(torch.allclose(q.T @ q, torch.eye(3, dtype=torch.float64)))
    True
    """
    rows = torch.arange(1, num_classes, dtype=torch.float64)
    scale = (rows * (rows + 1.0)).rsqrt()
    lower = torch.ones(num_classes, num_classes - 1, dtype=torch.float64).triu()
    return lower * scale - torch.diag_embed(rows * scale, -1)[:, : num_classes - 1]


def flat_weights(clients: Clients, w: Tensor) -> Tensor:
    """Return softmax weights (..., d, classes) of flat models; (..., d, 1) for the others."""
    shaped = w.reshape(*w.shape[:-1], -1, clients.outputs)
    return shaped @ basis(clients.num_classes).T if clients.family == "softmax" else shaped


def predict(clients: Clients, w: Tensor) -> Tensor:
    """Return the scores of every sample: (..., clients, samples, outputs)."""
    return clients.x @ w.reshape(*w.shape[:-1], -1, clients.outputs)


def sample_losses(clients: Clients, w: Tensor) -> Tensor:
    """Return the loss of every sample, without ridge; 0 for padding."""
    return losses_of(clients, predict(clients, w)) * clients.mask


def look(clients: Clients, w: Tensor) -> Point:
    """Return losses, gradients and curvatures of all clients at their models."""
    scores = predict(clients, w)
    real = clients.mask.to(scores.dtype)
    if clients.family == "linear":
        residual = scores - clients.y[..., None]
        curvature = torch.ones_like(scores)[..., None]
    elif clients.family == "logistic":
        chance = torch.sigmoid(scores)
        residual = chance - clients.y[..., None]
        curvature = (chance * (1.0 - chance))[..., None]
    else:
        q = basis(clients.num_classes)
        chance = torch.softmax(scores @ q.T, -1)
        residual = (chance - F.one_hot(clients.y.long(), clients.num_classes)) @ q
        pulled = chance @ q
        curvature = (q.T * chance[..., None, :]) @ q - pulled[..., None] * pulled[..., None, :]
    residual = residual * real[..., None]
    curvature = curvature * real[..., None, None]
    n = clients.sizes
    loss = (losses_of(clients, scores) * real).sum(-1) / n
    slope = (clients.x.mT @ residual).flatten(-2) / n[..., None]
    if clients.ridge:
        loss = loss + 0.5 * clients.ridge * w.square().sum(-1)
        slope = slope + clients.ridge * w
    return Point(loss, slope, residual, curvature)


def hessians(clients: Clients, point: Point) -> Tensor:
    """Return ∇²L_i of all clients, ridge included: (..., clients, p, p)."""
    x, n = clients.x, clients.sizes[..., None, None]
    if clients.outputs == 1:
        found = (x * point.curvature[..., 0]).mT @ x / n
    else:
        found = _kron_sum(x, point.curvature) / n
    if clients.ridge:
        found = found + clients.ridge * torch.eye(clients.num_params, dtype=found.dtype)
    return found


def _kron_sum(x: Tensor, curvature: Tensor) -> Tensor:
    """Return Σ_j x_j x_jᵀ ⊗ c_j, (..., p, p), by matrix products, one for a pair of outputs."""
    outputs, d = curvature.shape[-1], x.shape[-1]
    found = x.new_empty((*curvature.shape[:-3], d, outputs, d, outputs))
    for a in range(outputs):
        for b in range(a + 1):
            found[..., a, :, b] = (x * curvature[..., a, b, None]).mT @ x
            found[..., b, :, a] = found[..., a, :, b]
    return found.reshape(*curvature.shape[:-3], d * outputs, d * outputs)


def gradients(clients: Clients, w: Tensor) -> Tensor:
    """Return ∇ℓ(w_i, z_ij) of every sample, ridge included: (..., clients, samples, p)."""
    point = look(clients, w)
    each = (clients.x[..., None] * point.scores[..., None, :]).flatten(-2)
    return each + clients.ridge * w[..., None, :] * clients.mask[..., None]


def losses_of(clients: Clients, scores: Tensor) -> Tensor:
    """Return the loss of every sample at given scores, padding included."""
    if clients.family == "linear":
        return 0.5 * (scores[..., 0] - clients.y).square()
    if clients.family == "logistic":
        return F.softplus(scores[..., 0]) - clients.y * scores[..., 0]
    logits = scores @ basis(clients.num_classes).T
    wanted = clients.y.long()[..., None].expand(*logits.shape[:-1], 1)
    return torch.logsumexp(logits, -1) - logits.gather(-1, wanted)[..., 0]
