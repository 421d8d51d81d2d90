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
        """Return the scores of models: (..., P) -> (..., n, c)."""

    def slope(self, errors: Tensor) -> Tensor:
        """Return ΣJᵀe: (R, n, c) -> (R, P)."""

    def curvature(self, bend: Tensor) -> Tensor:
        """Return ΣJᵀΛJ: (R, n, c, c) -> (R, P, P)."""

    def reach(self, covariance: Tensor) -> Tensor:
        """Return G = J C Jᵀ of each sample: (R, P, P) -> (R, n, c, c)."""


def curves(task: Task, like: Tree, batch: Batch, rows: Tensor) -> tuple[Curves, Tensor]:
    """Look at models on the samples of a client, and return their scores (R, n, c) too.

    Args:
        task: the network.
        like: a tree of the shapes of the parameters.
        batch: n samples.
        rows: (R, P); R is 1 unless the network is linear in what is trained.
    """
    if task.linear_layer is None:
        model = tree.shaped(rows[0].to(tree.leaves(like)[0].dtype), like)
        scores, jacobian = task.jacobian(model, batch)
        return _OfNetwork(task, like, batch, jacobian.double()), scores.double()[None]
    x, layer = task.inputs(like, batch, len(rows)).double(), task.linear_layer[1]
    if layer.bias is not None:
        x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    view = _OfLinear(x, layer.out_features, layer.bias is not None)
    return view, view.scores(rows)


class _OfLinear(NamedTuple):
    """A linear layer: J = I ⊗ xᵀ, output by output, where x begins with the constant."""

    x: Tensor  # (n, d)
    outputs: int
    bias: bool

    def flat(self) -> Tensor:
        """Return where the parameters of ``tree.flat``, all biases first, are in (c, d)."""
        place = torch.arange(self.outputs * self.x.shape[1], device=self.x.device)
        shaped = place.reshape(self.outputs, -1)
        parts = [shaped[:, 0], shaped[:, 1:].flatten()] if self.bias else [place]
        return torch.cat(parts)

    def wide(self) -> Tensor:
        """Return the inverse of ``flat``."""
        c, d = self.outputs, self.x.shape[1]
        place = torch.arange(c * d, device=self.x.device)
        if not self.bias:
            return place
        return torch.cat([place[:c, None], place[c:].reshape(c, -1)], 1).flatten()

    def scores(self, rows: Tensor) -> Tensor:
        weights = rows.index_select(-1, self.wide()).reshape(*rows.shape[:-1], self.outputs, -1)
        return self.x @ weights.mT

    def slope(self, errors: Tensor) -> Tensor:
        return (errors.mT @ self.x).flatten(-2).index_select(-1, self.flat())

    def curvature(self, bend: Tensor) -> Tensor:
        r, n, c, _ = bend.shape
        d = self.x.shape[1]
        half = bend[..., None] * self.x[:, None, None, :]
        found = half.reshape(r, n, -1).mT @ self.x  # (r, c c d, d)
        found = found.reshape(r, c, c, d, d).transpose(2, 3).reshape(r, c * d, c * d)
        order = self.flat()
        return found.index_select(-1, order).index_select(-2, order)

    def reach(self, covariance: Tensor) -> Tensor:
        r, c, d = len(covariance), self.outputs, self.x.shape[1]
        order = self.wide()
        wide = covariance.index_select(-1, order).index_select(-2, order)
        shaped = wide.reshape(r, c, d, c, d).transpose(1, 2).reshape(r, d, -1)
        half = (self.x @ shaped).reshape(r, -1, c, c, d)
        return (half * self.x[:, None, None, :]).sum(-1)


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
            return found.flatten(1).double()

        # A loop, not a map: engines know the layers of a network that are mapped over clients.
        found = torch.stack([one(row) for row in rows.reshape(-1, rows.shape[-1]).unbind(0)])
        return found.reshape(*rows.shape[:-1], *found.shape[1:])

    def slope(self, errors: Tensor) -> Tensor:
        return torch.einsum("rna,nap->rp", errors, self.jacobian)

    def curvature(self, bend: Tensor) -> Tensor:
        half = torch.einsum("rnab,nbp->rnap", bend, self.jacobian).flatten(1, 2)
        return self.jacobian.flatten(0, 1).mT @ half

    def reach(self, covariance: Tensor) -> Tensor:
        return torch.einsum("nap,rpq,nbq->rnab", self.jacobian, covariance, self.jacobian)


def derivatives(kind: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of each sample's loss by its scores (..., n, c)."""
    if kind == "regression":
        errors = scores - y.reshape(scores.shape[-2:]).to(scores.dtype)
        return errors, torch.diag_embed(torch.ones_like(errors))
    if kind == "multilabel":
        p, labels = torch.sigmoid(scores), scores.shape[-1]
        return (p - y.to(p.dtype)) / labels, torch.diag_embed(p * (1.0 - p) / labels)
    p = torch.softmax(scores, -1)
    truth = torch.nn.functional.one_hot(y, scores.shape[-1]).to(p.dtype)
    return p - truth, torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def left_out(scores: Tensor, errors: Tensor, bend: Tensor, reach: Tensor, kind: str) -> Tensor:
    """Return scores of models that did not see the sample, one Newton step from those that did.

    f + G (I − ΛG)⁻¹ e (Rad and Maleki, 2020); on a linear regression exact.

    Args:
        scores: (..., c) f.
        errors: (..., c) e, the loss's first derivative by the scores.
        bend: (..., c, c) Λ.
        reach: (..., c, c) G.
        kind: of the task: of two classes only the difference of scores counts.
    """
    reach_now = (1.0 - 1e-9) * reach  # a sample that alone determines the model has ΛG = 1
    if scores.shape[-1] == 1:
        shift = errors / (1.0 - bend[..., 0] * reach_now[..., 0])
    elif scores.shape[-1] == 2 and kind == "classification":
        sign = torch.stack([torch.ones_like(errors[..., 0]), -torch.ones_like(errors[..., 0])], -1)
        across = (sign[..., None] * reach_now * sign[..., None, :]).sum((-2, -1))
        shift = errors / (1.0 - bend[..., 0, 0] * across)[..., None]  # Λ = p(1 − p) sign signᵀ
    else:
        # G = RRᵀ, so that (I − ΛG)⁻¹ = I + ΛR (I − RᵀΛR)⁻¹ Rᵀ with a symmetric inverse
        eye = torch.eye(reach.shape[-1], dtype=reach.dtype, device=reach.device)
        root = torch.linalg.cholesky_ex(reach_now + 1e-12 * eye)[0]
        factor = torch.linalg.cholesky_ex(eye - root.mT @ bend @ root)[0]
        error = errors[..., None]
        shift = (error + bend @ root @ solve(factor, root.mT @ error))[..., 0]
    return scores + (reach @ shift[..., None])[..., 0]


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve (factor · factorᵀ) x = right; torch.cholesky_solve cannot be recorded on a GPU."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)
