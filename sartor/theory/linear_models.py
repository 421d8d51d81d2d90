"""Linear, logistic and softmax regression, fitted exactly for many clients at once.

Clients are lanes: their samples are padded to one length and stacked, and any number of further
leading axes (repetitions, settings) goes before the axis of clients. The models are the convex ones
that the theory speaks of; every fit is a Newton iteration in float64 to a stated gradient norm.

| symbol | here | meaning |
|---|---|---|
| w_i | (..., clients, p) | a client's model, flat; p = d · outputs |
| L_i | ``losses`` | mean loss of client i, ridge term (ν/2)‖w‖² included |
| H_i | ``hessians`` | ∇²L_i, (..., clients, p, p) |
| λ, λ_i | pull | of the coupled problem Σ p_i [L_i(w_i) + (λ_i/2)‖w_g − w_i‖²] |

Softmax scores are x V Qᵀ with the columns of Q an orthonormal basis of the vectors of sum 0, so
that a model is unique, and distances are those of the usual weights with class means removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.errors import ConfigError

Family = Literal["linear", "logistic", "softmax"]
State = TypeVar("State")

FAR = 1e6
"""The length of a model at which a fit is given up: there is no minimiser."""


@dataclass(frozen=True)
class Clients:
    """The samples of all clients, padded, with the family of models for them.

    Attributes:
        x: (..., clients, samples, d) features, float64.
        y: (..., clients, samples) targets, 0/1, or class numbers.
        mask: (..., clients, samples) which samples are real.
        family: "linear" (½(y − xᵀw)²), "logistic" or "softmax".
        num_classes: for softmax.
        ridge: ν of (ν/2)‖w‖², part of every client's loss.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    family: Family
    num_classes: int = 2
    ridge: float = 0.0

    @property
    def sizes(self) -> Tensor:
        """n_i, (..., clients) float64."""
        return self.mask.sum(-1).to(self.x.dtype)

    @property
    def outputs(self) -> int:
        """Scores a sample needs: 1, or classes − 1."""
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
    """What a family says at given models, per client.

    Attributes:
        loss: (..., clients) mean losses, ridge included.
        slope: (..., clients, p) their gradients.
        scores: (..., clients, samples, outputs) residual gradients by the scores, 0 for padding.
        curvature: (..., clients, samples, outputs, outputs) second derivatives, 0 for padding.
    """

    loss: Tensor
    slope: Tensor
    scores: Tensor
    curvature: Tensor


class Fits(NamedTuple):
    """Models and how well they are converged.

    Attributes:
        w: (..., clients, p) models; for ``fit_pooled`` (..., p).
        gradient: the largest gradient norm that is left, (..., clients) or (...).
        converged: the gradient norm is at most the tolerance, and a minimiser exists.
        separable: (..., clients) the classes of a client can be told apart without an error, so
            that no minimiser exists; False with ridge or Firth's penalty, where one always does.
    """

    w: Tensor
    gradient: Tensor
    converged: Tensor
    separable: Tensor


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
    return _losses(clients, predict(clients, w)) * clients.mask


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
    loss = (_losses(clients, scores) * real).sum(-1) / n
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


def fit_each(
    clients: Clients,
    *,
    bias_reduced: bool = False,
    start: Tensor | None = None,
    tolerance: float = 1e-9,
    max_steps: int = 60,
) -> Fits:
    """Fit every client alone: argmin L_i.

    Args:
        clients: the samples.
        bias_reduced: for logistic regression, add Firth's penalty −log det(n_i H_i)/(2n_i), which
            removes the first-order bias of the fit and exists for separable data too.
        start: (..., clients, p) first models; zeros if None.
        tolerance: the gradient norm at which a fit counts as converged.
        max_steps: Newton steps at most.
    """
    if bias_reduced and (clients.family != "logistic" or clients.ridge):
        raise ConfigError(
            "bias_reduced is for logistic regression without ridge; leave it out for "
            f"{clients.family} with ridge={clients.ridge:g}."
        )
    lanes, p = clients.mask.shape[:-1], clients.num_params
    shape = (*clients.mask.shape, clients.x.shape[-1])
    part = replace(
        clients,
        x=clients.x.expand(shape).flatten(0, -3),
        y=clients.y.expand(shape[:-1]).flatten(0, -2),
        mask=clients.mask.flatten(0, -2),
    )
    found = clients.x.new_zeros((*lanes, p)) if start is None else start.expand(*lanes, p).clone()
    found, left = found.reshape(-1, p), clients.x.new_zeros(math.prod(lanes))
    separable, index = left > 0, torch.arange(len(left))
    exists = bias_reduced or clients.ridge > 0 or clients.family == "linear"
    value, slope, curve = _each(part, found, bias_reduced)
    for _ in range(max_steps):
        w, left[index] = found[index], slope.norm(dim=-1)
        if not exists:
            separable[index] = separable[index] | _separates(part, w)
        active = (left[index] > tolerance) & ~separable[index] & (w.norm(dim=-1) < FAR)
        if 2 * int(active.sum()) < len(active):  # go on with those that have not arrived
            index, part, w = index[active], part.take(active), w[active]
            value, slope, curve, active = (
                value[active],
                slope[active],
                curve[active],
                active[active],
            )
        if not len(index):
            break
        step = _solve(curve, slope) * active[..., None]
        look_on = partial(_each, part, bias_reduced=bias_reduced)
        found[index], (value, slope, curve) = _descend(look_on, w, step, value)
    left[index] = slope.norm(dim=-1)
    fitted = (left <= tolerance) & ~separable
    return Fits(*(t.reshape(*lanes, *t.shape[1:]) for t in (found, left, fitted, separable)))


def _each(clients: Clients, w: Tensor, bias_reduced: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what every client minimises alone, its gradient and a curvature for Newton steps."""
    point = look(clients, w)
    curve = hessians(clients, point)
    if not bias_reduced:
        return point.loss, point.slope, curve
    n = clients.sizes
    total = curve * n[..., None, None]
    root = factor(total)
    leverage = ((clients.x @ torch.cholesky_inverse(root)) * clients.x).sum(-1)
    leverage = leverage * point.curvature[..., 0, 0]
    chance = torch.sigmoid(predict(clients, w))[..., 0]
    push = leverage * (0.5 - chance) * clients.mask
    slope = point.slope - (clients.x.mT @ push[..., None])[..., 0] / n[..., None]
    return point.loss - root.diagonal(dim1=-2, dim2=-1).log().sum(-1) / n, slope, curve


def fit_pooled(
    clients: Clients, weights: Tensor, *, tolerance: float = 1e-9, max_steps: int = 60
) -> Fits:
    """Fit one model for all: argmin Σ p_i L_i, the limit λ → ∞ of ``fit_coupled``.

    Args:
        clients: the samples.
        weights: (..., clients) p_i, of sum 1.
        tolerance: the gradient norm at which the fit counts as converged.
        max_steps: Newton steps at most.
    """
    lanes = clients.mask.shape[:-1]
    w = clients.x.new_zeros((*lanes[:-1], clients.num_params))

    def whole(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        point = look(clients, at[..., None, :].expand(*lanes, -1))
        curve = hessians(clients, point)
        return (
            (weights * point.loss).sum(-1),
            (weights[..., None] * point.slope).sum(-2),
            (weights[..., None, None] * curve).sum(-3),
        )

    value, slope, curve = whole(w)
    for _ in range(max_steps):
        active = slope.norm(dim=-1) > tolerance
        if not bool(active.any()):
            break
        w, (value, slope, curve) = _descend(
            whole, w, _solve(curve, slope) * active[..., None], value
        )
    norm = slope.norm(dim=-1)
    return Fits(w, norm, norm <= tolerance, torch.zeros_like(norm, dtype=torch.bool))


class Coupled(NamedTuple):
    """The minimiser of Σ p_i [L_i(w_i) + (λ_i/2)‖w_g − w_i‖²].

    Attributes:
        own: (..., clients, p) the clients' models w̃_i.
        centre: (..., p) the global model w̃_g.
        converged: (...) the largest gradient norm is at most the tolerance.
    """

    own: Tensor
    centre: Tensor
    converged: Tensor


def fit_coupled(
    clients: Clients,
    weights: Tensor,
    pull: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-9,
    max_steps: int = 60,
) -> Coupled:
    """Solve one-stage FedProx' objective exactly, by Newton steps on all its models at once.

    A step solves for w_g first: Σ p_i λ_i A_i⁻¹ H_i w_g = Σ p_i λ_i A_i⁻¹ (H_i w_i − ∇L_i), with
    A_i = H_i + λ_i, and then w_i = A_i⁻¹ (H_i w_i − ∇L_i + λ_i w_g).

    Args:
        clients: the samples.
        weights: (..., clients) p_i, of sum 1.
        pull: λ > 0, broadcast to (..., clients).
        start: (..., clients, p) first models; zeros if None.
        tolerance: the gradient norm at which the fit counts as converged, times 1 + 1e-6 λ_i.
        max_steps: Newton steps at most.
    """
    lanes = clients.mask.shape[:-1]
    lam = pull.to(clients.x.dtype).expand(lanes)[..., None]
    p = weights.expand(lanes)[..., None]
    w = clients.x.new_zeros((*lanes, clients.num_params)) if start is None else start
    eye = torch.eye(clients.num_params, dtype=w.dtype)
    enough = tolerance * (1.0 + 1e-6 * lam[..., 0])  # λ magnifies the rounding of w_i − w_g

    def middle(own: Tensor) -> Tensor:
        return (p * lam * own).sum(-2) / (p * lam).sum(-2)

    def whole(own: Tensor) -> tuple[Tensor, Tensor, tuple[Point, Tensor]]:
        point = look(clients, own)
        gap = own - middle(own)[..., None, :]
        value = (p[..., 0] * (point.loss + 0.5 * lam[..., 0] * gap.square().sum(-1))).sum(-1)
        return value, point.slope + lam * gap, (point, hessians(clients, point))

    value, slope, (point, curve) = whole(w)
    for _ in range(max_steps):
        active = (slope.norm(dim=-1) > enough).any(-1)
        if not bool(active.any()):
            break
        right = (curve @ w[..., None])[..., 0] - point.slope
        root = factor(curve + lam[..., None] * eye)
        pulled = torch.cholesky_solve(torch.cat((curve, right[..., None]), -1), root)
        mean = (p[..., None] * lam[..., None] * pulled).sum(-3)
        centre = _solve(mean[..., :-1], mean[..., -1])
        target = torch.cholesky_solve((right + lam * centre[..., None, :])[..., None], root)
        step = (w - target[..., 0]) * active[..., None, None]
        w, (value, slope, (point, curve)) = _descend(whole, w, step, value)
    return Coupled(w, middle(w), (slope.norm(dim=-1) <= enough).all(-1))


# ---- helpers -------------------------------------------------------------------------------------


def _losses(clients: Clients, scores: Tensor) -> Tensor:
    if clients.family == "linear":
        return 0.5 * (scores[..., 0] - clients.y).square()
    if clients.family == "logistic":
        return F.softplus(scores[..., 0]) - clients.y * scores[..., 0]
    logits = scores @ basis(clients.num_classes).T
    wanted = clients.y.long()[..., None].expand(*logits.shape[:-1], 1)
    return torch.logsumexp(logits, -1) - logits.gather(-1, wanted)[..., 0]


def _separates(clients: Clients, w: Tensor) -> Tensor:
    """Say for every client whether its model is right about every sample, with a margin."""
    if clients.family == "linear":
        return torch.zeros(w.shape[:-1], dtype=torch.bool)
    scores = predict(clients, w)
    if clients.family == "logistic":
        right = (scores[..., 0] * (2.0 * clients.y - 1.0)) > 0.0
    else:
        logits = scores @ basis(clients.num_classes).T
        wanted = clients.y.long()[..., None].expand(*logits.shape[:-1], 1)
        others = logits.scatter(-1, wanted, -math.inf).amax(-1)
        right = logits.gather(-1, wanted)[..., 0] > others
    return (right | ~clients.mask).all(-1)


def factor(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of positive semidefinite matrices.

    A trifle is added to the diagonal, of the size of rounding at first, a thousand times more where
    that is not enough, so that singular systems can be solved too.
    """
    size = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    share = torch.full_like(size, 1e-12)
    for _ in range(4):
        root, failed = torch.linalg.cholesky_ex(matrix + (share * size + 1e-300) * eye)
        if not bool(failed.any()):
            break
        share = torch.where(failed[..., None, None] > 0, 1e3 * share, share)
    return root


def _solve(curve: Tensor, slope: Tensor) -> Tensor:
    return torch.cholesky_solve(slope[..., None], factor(curve))[..., 0]


def _descend(
    whole: Callable[[Tensor], tuple[Tensor, Tensor, State]], w: Tensor, step: Tensor, value: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, State]]:
    """Go by −step, or by a half, a quarter, … of it where the value would rise otherwise.

    A rise that rounding could explain is none.
    """
    share = torch.ones_like(value)
    axes = (1,) * (w.ndim - value.ndim)
    for _ in range(30):
        new = w - share.reshape(*share.shape, *axes) * step
        found = whole(new)
        worse = ~(found[0] <= value + 1e-10 * (1.0 + value.abs()))
        if not bool(worse.any()):
            break
        share = torch.where(worse, share / 2.0, share)
    return new, found
