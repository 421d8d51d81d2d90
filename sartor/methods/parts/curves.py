"""Scores of models with their first and second derivatives, for exact Newton steps.

A row of parameters is a model, flat in the order of ``tree.flat``; several of them are solved at
once on the samples of one client. A linear layer needs no more than its inputs; the Jacobian of any
other network is formed, for one model at a time.

| symbol | here | meaning |
|---|---|---|
| J | | the scores' derivative by the parameters |
| Λ | bend | the loss's second derivative by the scores |
| A | ``curvature`` | ΣJᵀΛJ (Gauss-Newton; exact for linear models) |
| G | ``reach`` | J C Jᵀ: how far the scores of a sample reach under a covariance C |

Samples are the last axis, (R, c, n): operations over few scores are then over long rows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.method import Batch
from sartor.core.task import Task
from sartor.core.tree import Tree


class Curves(Protocol):
    """The samples of a client as R models see them, in double precision."""

    def scores(self, rows: Tensor) -> Tensor:
        """Return the scores of models: (..., P) -> (..., c, n)."""

    def slope(self, errors: Tensor) -> Tensor:
        """Return ΣJᵀe: (R, c, n) -> (R, P)."""

    def curvature(self, bend: Tensor) -> Tensor:
        """Return ΣJᵀΛJ: (R, c, c, n) -> (R, P, P)."""

    def reach(self, covariance: Tensor) -> Tensor:
        """Return G = J C Jᵀ of each sample: (R, P, P) -> (R, c, c, n)."""


def curves(task: Task, like: Tree, batch: Batch, rows: Tensor) -> tuple[Curves, Tensor]:
    """Look at models on the samples of a client, and return their scores (R, c, n) too.

    Args:
        task: the network.
        like: a tree of the shapes of the parameters.
        batch: n samples.
        rows: (R, P); R is 1 unless the network is linear in what is trained.
    """
    if task.linear_layer is None:
        model = tree.shaped(rows[0].to(tree.leaves(like)[0].dtype), like)
        scores, jacobian = task.jacobian(model, batch)
        return _OfNetwork(task, like, batch, jacobian.double()), scores.double().mT[None]
    x, layer = task.inputs(like, batch, len(rows)).double(), task.linear_layer[1]
    if layer.bias is not None:
        x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    view = _OfLinear(x, x.mT.contiguous(), layer.out_features, layer.bias is not None)
    return view, view.scores(rows)


class _OfLinear(NamedTuple):
    """A linear layer: J = I ⊗ xᵀ, output by output, where x begins with the constant.

    Every product over samples is one of two matrices, for all models at once.
    """

    x: Tensor  # (n, d)
    turned: Tensor  # (d, n)
    outputs: int
    bias: bool

    def flat(self, wide: Tensor) -> Tensor:
        """Bring (..., c, d) into the order of ``tree.flat``: (..., P), all biases first."""
        if not self.bias:
            return wide.flatten(-2)
        return torch.cat([wide[..., 0], wide[..., 1:].flatten(-2)], -1)

    def wide(self, flat: Tensor) -> Tensor:
        """Undo ``flat``."""
        c = self.outputs
        if not self.bias:
            return flat.reshape(*flat.shape[:-1], c, -1)
        weights = flat[..., c:].reshape(*flat.shape[:-1], c, -1)
        return torch.cat([flat[..., :c, None], weights], -1)

    def scores(self, rows: Tensor) -> Tensor:
        weights = self.wide(rows).reshape(-1, self.x.shape[1])
        return (weights @ self.turned).reshape(*rows.shape[:-1], self.outputs, -1)

    def slope(self, errors: Tensor) -> Tensor:
        return self.flat((errors.flatten(0, 1) @ self.x).reshape(len(errors), self.outputs, -1))

    def curvature(self, bend: Tensor) -> Tensor:
        r, c, _, n = bend.shape
        d = self.x.shape[1]
        # Λ is symmetric, so one of (a, b) and (b, a) is enough.
        pairs = [(a, b) for a in range(c) for b in range(a + 1)]
        some = torch.stack([bend[:, a, b] for a, b in pairs], 1)
        found = (some[:, :, None] * self.turned).reshape(-1, n) @ self.x
        each = found.reshape(r, len(pairs), d, d).unbind(1)
        row = [torch.stack([each[_pair(a, b)] for b in range(c)], 2) for a in range(c)]
        whole = torch.stack(row, 1)  # (r, c, d, c, d)
        return self.flat(self.flat(whole).movedim(-1, 1))

    def reach(self, covariance: Tensor) -> Tensor:
        r, c, d = len(covariance), self.outputs, self.x.shape[1]
        whole = self.wide(self.wide(covariance).movedim(1, -1))  # (r, c, d, c, d)
        shaped = whole.transpose(2, 3).reshape(-1, d)
        return ((shaped @ self.turned).reshape(r, c, c, d, -1) * self.turned).sum(-2)


def _pair(a: int, b: int) -> int:
    """Return where the pair of two outputs is in the lower triangle, row by row."""
    return max(a, b) * (max(a, b) + 1) // 2 + min(a, b)


class _OfNetwork(NamedTuple):
    """Any network: its Jacobian (n, c, P) at one model."""

    task: Task
    like: Tree
    batch: Batch
    jacobian: Tensor

    def scores(self, rows: Tensor) -> Tensor:
        kind = tree.leaves(self.like)[0].dtype

        def one(row: Tensor) -> Tensor:
            model = tree.shaped(row.to(kind), self.like)
            # Counted as a pass over the batch: its "losses" are the scores.
            found = self.task.losses(model, self.batch, None, lambda scores, y: scores)
            return found.flatten(1).double().mT

        # A loop, not a map: engines know the layers of a network that are mapped over clients.
        found = torch.stack([one(row) for row in rows.reshape(-1, rows.shape[-1]).unbind(0)])
        return found.reshape(*rows.shape[:-1], *found.shape[1:])

    def slope(self, errors: Tensor) -> Tensor:
        return torch.einsum("ran,nap->rp", errors, self.jacobian)

    def curvature(self, bend: Tensor) -> Tensor:
        half = torch.einsum("rabn,nbp->rnap", bend, self.jacobian).flatten(1, 2)
        return self.jacobian.flatten(0, 1).mT @ half

    def reach(self, covariance: Tensor) -> Tensor:
        return torch.einsum("nap,rpq,nbq->rabn", self.jacobian, covariance, self.jacobian)


def losses(kind: str, scores: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample: (..., c, n) -> (..., n); those of `core/task.py`."""
    target = _target(kind, scores, y)
    if kind == "regression":
        return 0.5 * (scores - target).square().sum(-2)
    if kind == "multilabel":
        return (torch.nn.functional.softplus(scores) - target * scores).mean(-2)
    return torch.logsumexp(scores, -2) - (target * scores).sum(-2)


def derivatives(kind: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of each sample's loss by its scores (..., c, n)."""
    target, c = _target(kind, scores, y), scores.shape[-2]
    eye = torch.eye(c, dtype=scores.dtype, device=scores.device)[..., None]
    if kind == "regression":
        errors = scores - target
        return errors, eye * torch.ones_like(errors)[..., None, :]
    if kind == "multilabel":
        p = torch.sigmoid(scores)
        return (p - target) / c, eye * (p * (1.0 - p) / c)[..., None, :]
    p = torch.softmax(scores, -2)
    return p - target, eye * p[..., None, :] - p[..., :, None, :] * p[..., None, :, :]


def _target(kind: str, scores: Tensor, y: Tensor) -> Tensor:
    """Return targets, labels or a one for the class, (c, n)."""
    if kind == "classification":
        classes = torch.arange(scores.shape[-2], device=y.device)
        return (classes[:, None] == y).to(scores.dtype)
    return y.reshape(scores.shape[-1], -1).mT.to(scores.dtype)


def left_out(scores: Tensor, errors: Tensor, bend: Tensor, reach: Tensor, kind: str) -> Tensor:
    """Return scores of models that did not see the sample, one Newton step from those that did.

    f + G (I − ΛG)⁻¹ e (Rad and Maleki, 2020); on a linear regression exact.

    Args:
        scores: (..., c, n) f.
        errors: (..., c, n) e, the loss's first derivative by the scores.
        bend: (..., c, c, n) Λ.
        reach: (..., c, c, n) G.
        kind: of the task: of two classes only the difference of scores counts.
    """
    near = (1.0 - 1e-9) * reach  # a sample that alone determines the model has ΛG = 1
    if scores.shape[-2] == 1:
        shift = errors / (1.0 - bend[..., 0, :] * near[..., 0, :])
    elif scores.shape[-2] == 2 and kind == "classification":
        # Λ = p(1 − p) (1, −1)ᵀ(1, −1), and e is a multiple of (1, −1)
        across = near[..., 0, 0, :] - near[..., 0, 1, :] - near[..., 1, 0, :] + near[..., 1, 1, :]
        shift = errors / (1.0 - bend[..., 0, 0, :] * across)[..., None, :]
    else:
        bend, near = bend.movedim(-1, -3), near.movedim(-1, -3)
        error = errors.mT[..., None]
        # G = RRᵀ, so that (I − ΛG)⁻¹ = I + ΛR (I − RᵀΛR)⁻¹ Rᵀ with a symmetric inverse
        eye = torch.eye(bend.shape[-1], dtype=bend.dtype, device=bend.device)
        root = torch.linalg.cholesky_ex(near + 1e-12 * eye)[0]
        inner = root.mT @ bend @ root
        # Before the prior is learned G may be larger still, and a factor that does not exist is
        # NaN on a GPU and a number without meaning on a CPU. The trace is above any eigenvalue.
        failed = torch.linalg.cholesky_ex(eye - inner)[1] > 0
        trace = torch.diagonal(inner, dim1=-2, dim2=-1).sum(-1)
        share = torch.where(failed, (1.0 - 1e-9) / trace, 1.0)[..., None, None]
        factor = torch.linalg.cholesky_ex(eye - share * inner)[0]
        shift = (error + bend @ root @ solve(factor, root.mT @ error))[..., 0].mT
    return scores + (reach * shift[..., None, :, :]).sum(-2)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve (factor · factorᵀ) x = right; torch.cholesky_solve cannot be recorded on a GPU."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)
