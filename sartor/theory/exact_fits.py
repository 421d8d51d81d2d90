"""Fit convex models exactly: every client alone, one model for all, and FedProx in between.

Every fit is a Newton iteration in float64 to a stated gradient norm, for all clients of
`linear_models.py`, and all axes before them, at once.

| symbol | here | meaning |
|---|---|---|
| L_i, H_i | ``look``, ``hessians`` | mean loss of client i and its Hessian, ridge included |
| p_i | weights | (..., clients), of sum 1 |
| λ, λ_i | pull > 0 | of the coupled problem Σ p_i [L_i(w_i) + (λ_i/2)‖w_g − w_i‖²]; broadcast |
| | start | (..., clients, p) first models; zeros if None |
| | tolerance | the gradient norm at which a fit counts as converged |
| | max_steps | Newton steps at most |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.theory.linear_models import Clients, Point, basis, hessians, look, predict

State = TypeVar("State")

FAR = 1e6
"""The norm of a model at which a fit stops, because there is no minimiser."""


class Fits(NamedTuple):
    """Models and how well they are converged.

    A client is separable if its classes are, perfectly, so that no minimiser exists; never with
    ridge or Firth's penalty, where one always exists.
    """

    w: Tensor  # (..., clients, p) models; for ``fit_pooled`` (..., p)
    gradient: Tensor  # the largest gradient norm that is left, (..., clients) or (...)
    converged: Tensor  # the gradient norm is at most the tolerance, and a minimiser exists
    separable: Tensor


def fit_each(
    clients: Clients,
    *,
    bias_reduced: bool = False,
    start: Tensor | None = None,
    tolerance: float = 1e-9,
    max_steps: int = 60,
) -> Fits:
    """Fit every client alone: argmin L_i.

    ``bias_reduced`` adds Firth's penalty −log det(n_i H_i)/(2n_i) to logistic regression, which
    removes the first-order bias of the fit and has a minimiser for separable data too.
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
        if 2 * int(active.sum()) < len(active):  # continue with those that have not converged
            index, part, w = index[active], part.take(active), w[active]
            value, slope, curve, active = (t[active] for t in (value, slope, curve, active))
        if not len(index):
            break
        step = _solve(curve, slope) * active[..., None]
        look_on = partial(_each, part, bias_reduced=bias_reduced)
        found[index], (value, slope, curve) = _descend(look_on, w, step, value)
    left[index] = slope.norm(dim=-1)
    fitted = (left <= tolerance) & ~separable
    return Fits(*(t.reshape(*lanes, *t.shape[1:]) for t in (found, left, fitted, separable)))


def _each(clients: Clients, w: Tensor, bias_reduced: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the objective of every client, its gradient and a curvature for Newton steps."""
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
    """Fit one model for all: argmin Σ p_i L_i, the limit λ → ∞ of ``fit_coupled``."""
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
        step = _solve(curve, slope) * active[..., None]
        w, (value, slope, curve) = _descend(whole, w, step, value)
    norm = slope.norm(dim=-1)
    return Fits(w, norm, norm <= tolerance, torch.zeros_like(norm, dtype=torch.bool))


class Coupled(NamedTuple):
    """The minimiser of Σ p_i [L_i(w_i) + (λ_i/2)‖w_g − w_i‖²]."""

    own: Tensor  # (..., clients, p) the clients' models w̃_i
    centre: Tensor  # (..., p) the global model w̃_g
    converged: Tensor  # (...) the largest gradient norm is at most the tolerance


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
    A_i = H_i + λ_i, and then w_i = A_i⁻¹ (H_i w_i − ∇L_i + λ_i w_g). ``tolerance`` is for gradient
    norms, times 1 + 1e-6 λ_i.
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


def _separates(clients: Clients, w: Tensor) -> Tensor:
    """Return for every client whether its model gives every sample its class."""
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

    A small number is added to the diagonal, at first of the size of rounding errors and a thousand
    times more if that is not enough, so that singular systems can be solved too.
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
    """Move by −step, or by a half, a quarter, … of it where the value would rise otherwise."""
    share = torch.ones_like(value)
    axes = (1,) * (w.ndim - value.ndim)
    for _ in range(30):
        new = w - share.reshape(*share.shape, *axes) * step
        found = whole(new)
        worse = ~(found[0] <= value + 1e-10 * (1.0 + value.abs()))  # by more than rounding
        if not bool(worse.any()):
            break
        share = torch.where(worse, share / 2.0, share)
    return new, found
