"""Evidence: the pull of FedProx, learned from the clients, with nothing to choose.

Our own method. The λ of FedProx is the precision of a Gaussian prior on the clients' models; here
the prior's mean and spread are learned by the marginal likelihood of all data ("evidence";
MacKay, "Bayesian Interpolation", Neural Computation 1992).

| symbol | here | meaning |
|---|---|---|
| w̄, S | server["params"], server["width"] | the mean of the prior; its own prior N(0, S) |
| T = diag(τ²) | server["spread"] | how far clients' models are from w̄, coordinate by coordinate |
| σ² | server["noise"] | the noise of a regression; 1 for classification |
| C | server["covariance"] | of w̄ given all data |
| w_i | work["params"] | argmin L_i(w)/σ² + ½ (w − w̄)ᵀT⁻¹(w − w̄), L_i summed over samples |
| J, Λ | | the scores' derivative by w, the loss's second derivative by the scores |
| A_i | ΣJᵀΛJ/σ² | the curvature of L_i (Gauss-Newton; exact for linear models) |
| B_i | I + T^½ A_i T^½ | so H_i⁻¹ = (A_i + T⁻¹)⁻¹ = T^½ B_i⁻¹ T^½, which holds for T = 0 too |
| K_i | A_i − A_i H_i⁻¹ A_i | what client i says of w̄ |
| γ_i | 1 − Var(w_i − w̄)/τ² | how much the samples determine; 0 to 1 |
| ν | pool | clients that a layer's τ² counts for in that of a coordinate |

A round: clients solve for w_i by Newton steps with a line search (no learning rate), and send
sums: K_i, the slope, (w_i − w̄)², γ_i and four numbers. The server takes a Newton step of w̄ and
MacKay's step τ² = Σ(w_i − w̄)²/Σγ_i; for w̄'s own width S alike. In FedProx's terms
λ_i = σ²/(n_i τ²): τ = 0 is one model for all, τ → ∞ every client alone.

`groups`: one τ for all (``scalar``), one for each tensor (``layer``, so that intercepts run free),
one for each coordinate (``diag``). With few clients a τ² of each coordinate is learned from few
numbers and too extreme; so it counts ν clients more with the τ² of its tensor. ν = 0 is plain
``diag``. Linear models, and networks of at most 1,024 parameters: A_i is held as a matrix.

A newcomer solves once under the learned prior; the fewer its samples, the nearer it is to w̄.

What is shown: the log evidence (Laplace), and the loss of samples that were left out, one at a
time, approximately (one Newton step from the model that saw them; Rad and Maleki, 2020). Both are
of the messages before, so one round late.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Phase,
    ServerContext,
    Show,
    Use,
    Wire,
    weighted_sum,
)
from sartor.core.task import Task
from sartor.core.tree import Tree

MOST_PARAMETERS = 1024
"""Of a model: each client forms a matrix of this size squared."""
LINE = (1.0, 0.5, 0.2, 0.05, 0.0)
"""Lengths of a Newton step that are tried, in this order; the last stays where it is."""
CHANGE, LEAST, MOST = 30.0, 1e-10, 1e4
"""The most by which a variance changes in a round, and its bounds in units of σ²."""

SUMS = (
    *("curvature", "slope", "squares", "sure"),
    *("evidence", "residual", "left_out", "count"),
)
"""What a client sends; the server uses their sums alone."""

Groups = Literal["scalar", "layer", "diag"]


class Slopes(NamedTuple):
    """The derivatives of a client's loss at a model, in double precision."""

    errors: Tensor  # (n, c): by the scores
    slope: Tensor  # (P,): g = ΣJᵀe/σ²
    curvature: Tensor  # (P, P): A
    jacobian: Tensor  # (n, c, P): J
    bend: Tensor  # (n, c, c): Λ/σ²


def evidence(
    task: Task,
    local: Local,
    *,
    groups: Groups = "diag",
    learn: bool = True,
    newton_steps: int = 6,
) -> Method:
    """Build the method: one prior for all clients, learned by the evidence.

    Args:
        task: the model and its loss: classification, regression or multi-label.
        local: not used; the models are solved for. Schedules of its rate are refused.
        groups: which coordinates share a spread; see the module's docstring.
        learn: whether spread, width and noise are learned; False keeps those given (σ² = 1),
            which is FedProx with λ_i = 1/(n_i τ²).
        newton_steps: steps of a solve; linear regression needs one.
    """
    if task.kind not in ("classification", "regression", "multilabel"):
        raise ConfigError(
            f"evidence serves classification, regression and multi-label tasks, not {task.kind!r}; "
            "use fedprox."
        )
    if task.num_trained > MOST_PARAMETERS:
        raise ConfigError(
            f"evidence forms a matrix of all parameters, so it takes at most {MOST_PARAMETERS} of "
            f"them; this model has {task.num_trained:,}. Use a linear model, train the head alone "
            '(sartor.models.pretrained(net, train=["fc"])), or use fedprox.'
        )
    local.without_rate("evidence")  # refuses schedules of a rate that there is not
    regression = task.kind == "regression"

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        like = tree.flat(params)
        one = like.new_ones(())
        return {
            "params": params,
            "spread": tree.map(lambda w: ctx.hyper["spread"].expand(w.shape).clone(), params),
            "width": tree.map(lambda w: ctx.hyper["width"].expand(w.shape).clone(), params),
            "covariance": like.new_zeros(len(like), len(like)),
            "noise": one,
            "log_evidence": torch.zeros_like(one),
            "left_out": torch.zeros_like(one),
        }

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        return {k: server[k] for k in ("params", "spread", "covariance", "noise")}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": ctx.common["params"]}  # v = T^-½ (w − w̄) = 0

    def slopes(params: Tree, batch: Batch, ctx: ClientContext) -> Slopes:
        scores, jacobian = task.jacobian(params, batch)
        errors, bend = _derivatives(task.kind, scores.double(), batch.y)
        mask = batch.mask.double() / ctx.common["noise"].double()
        errors, jacobian = errors * batch.mask[:, None], jacobian.double()
        bend = bend * mask[:, None, None]
        half = torch.einsum("nab,nbp->nap", bend, jacobian).flatten(0, 1)
        slope = torch.einsum("na,nap->p", errors, jacobian) / ctx.common["noise"].double()
        return Slopes(errors, slope, jacobian.flatten(0, 1).T @ half, jacobian, bend)

    def objective(params: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return L_i(w)/σ²; the prior's part is added in whitened coordinates."""
        losses = task.losses(params, batch).double() * batch.mask
        return losses.sum() / ctx.common["noise"].double()

    def newton(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Take one Newton step in v, w = w̄ + T^½ v."""
        centre, root, v = whitened(work, ctx)
        at = slopes(work["params"], batch, ctx)
        factor = torch.linalg.cholesky_ex(_b(root, at.curvature))[0]
        pull = (root * at.slope + v)[:, None]  # Alg., client: B v_new = B v − (T^½ g + v)
        step = _solve(factor, pull)[:, 0]
        tried = [v - length * step for length in (LINE[:1] if regression else LINE)]
        models = [placed(centre + root * one, work["params"]) for one in tried]
        cost = [
            objective(m, batch, ctx) + 0.5 * (v @ v) for m, v in zip(models, tried, strict=True)
        ]
        # The first that is no worse. A little slack, so that rounding does not decide at the end.
        last = cost[-1] + 1e-9 * (1.0 + cost[-1].abs())
        fits = torch.stack(cost) <= last
        chosen = fits & (fits.cumsum(0) == 1)

        def pick(*leaves: Tensor) -> Tensor:
            keep = chosen.reshape((-1,) + (1,) * leaves[0].dim())
            return torch.where(keep, torch.stack(leaves), 0.0).sum(0)

        return {**work, "params": tree.map(pick, *models)}

    def measure(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Sum what the server needs, at the solution."""
        _, root, v = whitened(work, ctx)
        at = slopes(work["params"], batch, ctx)
        pull = root * at.slope + v
        a, noise = at.curvature, ctx.common["noise"].double()
        factor = torch.linalg.cholesky_ex(_b(root, a))[0]
        eye = torch.eye(len(root), dtype=a.dtype, device=a.device)
        h_inv = root[:, None] * _solve(factor, eye) * root
        move = h_inv @ a  # I − H⁻¹T⁻¹, by which w_i − w̄ follows w̄
        stay = eye - move
        covariance = ctx.common["covariance"].double()
        apart = h_inv + move @ covariance @ move.T  # Cov(w_i − w̄)
        own = h_inv + stay @ covariance @ stay.T  # Cov(w_i)
        spread = root.square()
        sure = 1.0 - torch.diagonal(apart) / torch.where(spread > 0, spread, 1.0)
        sure = torch.where(spread > 0, sure.clamp(0.0, 1.0), 0.0)
        count = batch.mask.double().sum()
        loss = objective(work["params"], batch, ctx)
        if regression:
            loss = loss + 0.5 * count * at.errors.shape[1] * torch.log(2.0 * math.pi * noise)
        found = {
            "curvature": a - a @ move,
            "slope": at.slope - a @ (root * _solve(factor, pull[:, None])[:, 0]),
            "squares": (root * v).square(),
            "sure": sure,
            # log p(D_i | w̄, T), Laplace
            "evidence": -loss - 0.5 * (v @ v) - torch.diagonal(factor).log().sum(),
            "residual": (at.errors.square().sum() + noise * (a * own).sum()) / at.errors.shape[1],
            "left_out": left_out(work["params"], at, own, batch, noise),
            "count": count,
        }
        kind = tree.leaves(work["params"])[0].dtype
        return {**work, "sums": {name: value.to(kind) for name, value in found.items()}}

    def left_out(params: Tree, at: Slopes, own: Tensor, batch: Batch, noise: Tensor) -> Tensor:
        """Sum the losses of samples under models that did not see them: f + G(I − ΛG)⁻¹e/σ²."""
        reach = torch.einsum("nap,pq,nbq->nab", at.jacobian, own, at.jacobian)  # G
        # G = RRᵀ, so that (I − ΛG)⁻¹ = I + ΛR (I − RᵀΛR)⁻¹ Rᵀ with a symmetric inverse
        eye = torch.eye(reach.shape[1], dtype=reach.dtype, device=reach.device)
        root = torch.linalg.cholesky_ex(reach + 1e-12 * eye)[0]
        factor = torch.linalg.cholesky_ex(eye - root.mT @ at.bend @ root)[0]
        error = at.errors[..., None] / noise
        shift = error + at.bend @ root @ _solve(factor, root.mT @ error)
        moved = task.logits(params, batch.x).double() + (reach @ shift)[..., 0]
        return (task.criterion(moved, batch.y) * batch.mask).sum()

    def whitened(work: Tree, ctx: ClientContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return w̄, T^½ and v."""
        centre = tree.flat(ctx.common["params"]).double()
        root = tree.flat(ctx.common["spread"]).double().sqrt()
        return centre, root, _divide(tree.flat(work["params"]).double() - centre, root)

    def placed(row: Tensor, like: Tree) -> Tree:
        return tree.shaped(row.to(tree.leaves(like)[0].dtype), like)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {}, work["sums"]

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        like = tree.flat(work["params"])
        zero = like.new_zeros(())
        names = ("evidence", "residual", "left_out", "count")
        sums = {name: torch.zeros_like(like) for name in ("slope", "squares", "sure")}
        square = like[:, None] * torch.zeros_like(like)
        return {**work, "sums": {**sums, "curvature": square, **dict.fromkeys(names, zero)}}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        present = ctx.present.double()
        share = ctx.sizes.shape[0] / present.sum().clamp(min=1.0)
        sums = weighted_sum(tree.map(torch.Tensor.double, uploads), present * share)
        centre = tree.flat(server["params"]).double()
        width, spread = (tree.flat(server[k]).double() for k in ("width", "spread"))
        precision = sums["curvature"] + torch.diag(1.0 / width)
        factor = torch.linalg.cholesky_ex(precision)[0]
        slope = sums["slope"] + centre / width
        step = _solve(factor, slope[:, None])[:, 0]
        if not regression:
            # The quadratic is not trusted where scores would move by more than 2.
            moved = (4.0 * (slope @ step) / sums["count"].clamp(min=1.0)).clamp(min=0.0).sqrt()
            step = step * (2.0 / moved.clamp(min=2.0))
        covariance = _solve(
            factor, torch.eye(len(centre), dtype=centre.dtype, device=centre.device)
        )
        log_evidence = sums["evidence"] - 0.5 * (
            (centre.square() / width).sum()
            + width.log().sum()
            + 2.0 * torch.diagonal(factor).log().sum()
        )
        noise = server["noise"].double()
        if regression and learn:
            noise = sums["residual"] / sums["count"].clamp(min=1.0)
        centre = centre - step  # Alg., server: w̄ ← w̄ − (ΣK_i + S⁻¹)⁻¹ (slope + S⁻¹w̄)
        if learn:
            # The first round measures σ², in whose units the given spread and width are.
            unit = torch.where(ctx.round == 0, noise, torch.ones_like(noise))
            spread, width = spread * unit, width * unit
            learned = learn_spread(sums, spread, server["params"], ctx)
            spread = torch.where(ctx.round == 0, spread, _bounded(learned, spread, noise))
            known = 1.0 - torch.diagonal(covariance) / width
            learned = _layerwise(centre.square(), server["params"]) / _layerwise(
                known.clamp(0.0, 1.0), server["params"]
            ).clamp(min=0.01)
            width = torch.where(ctx.round == 0, width, _bounded(learned, width, noise, 1e-3, 1e3))
        new = {
            "params": placed(centre, server["params"]),
            "spread": placed(spread, server["params"]),
            "width": placed(width, server["params"]),
            "covariance": covariance.to(server["covariance"].dtype),
            "noise": noise.to(server["noise"].dtype),
            "log_evidence": log_evidence.to(server["noise"].dtype),
            "left_out": (sums["left_out"] / sums["count"].clamp(min=1.0)).to(server["noise"].dtype),
        }
        some = present.sum() > 0
        return tree.map(lambda value, old: torch.where(some, value, old), new, server)

    def learn_spread(sums: Tree, spread: Tensor, like: Tree, ctx: ServerContext) -> Tensor:
        """Return MacKay's τ² = Σ(w_i − w̄)²/Σγ_i over each group."""
        squares, sure = sums["squares"], sums["sure"]
        least = 1e-6 * ctx.sizes.shape[0]
        # Alg., server: τ² = Σ(w_i − w̄)²/Σγ_i over the group
        if groups == "scalar":
            return (squares.sum() / sure.sum().clamp(min=least)).expand(spread.shape)
        tensor = _layerwise(squares, like) / _layerwise(sure, like).clamp(min=least)
        if groups == "layer":
            return tensor
        pool = ctx.hyper["pool"].double()
        return (squares + pool * tensor) / (sure + pool).clamp(min=least)

    def shown(server: Tree, ctx: ServerContext) -> Tree:
        return {name: server[name] for name in ("log_evidence", "left_out", "noise", "spread")}

    solve = Phase("solve", newton, batch=None, steps=newton_steps, shuffle=False)
    note = "τ² at first, in units of σ²; 0 is one model for all, for good"
    hyper = {
        "spread": Hyper(0.1, 0.0, note=note),
        "width": Hyper(1.0, 0.0, open_low=True, note="S, alike: how far the mean is from zero"),
    }
    if learn and groups == "diag":
        note = "clients that a layer's τ² counts for in that of a coordinate; 0 learns each alone"
        hyper["pool"] = Hyper(2.0, 0.0, note=note, server=True)
    return Method(
        name="evidence",
        hyper=hyper,
        init_server=init_server,
        begin=begin,
        phases=(solve, Phase("measure", measure, enter=enter, batch=None, steps=1, shuffle=False)),
        finish=finish,
        aggregate=aggregate,
        broadcast=broadcast,
        use=Use(adapt=(solve,), centre=lambda server, ctx: server["params"]),
        wire=Wire(
            private=lambda leaf: leaf in task.leaf_names,
            averaged=SUMS,
        ),
        show=Show(server=shown),
    )


def _derivatives(kind: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of each sample's loss by its scores."""
    if kind == "regression":
        errors = scores - y.reshape(scores.shape).to(scores.dtype)
        return errors, torch.eye(scores.shape[1], dtype=scores.dtype, device=scores.device).expand(
            len(scores), -1, -1
        )
    if kind == "multilabel":
        p, labels = torch.sigmoid(scores), scores.shape[1]
        return (p - y.to(p.dtype)) / labels, torch.diag_embed(p * (1.0 - p) / labels)
    p = torch.softmax(scores, -1)
    truth = torch.nn.functional.one_hot(y, scores.shape[1]).to(p.dtype)
    return p - truth, torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def _b(root: Tensor, curvature: Tensor) -> Tensor:
    """Return B = I + T^½ A T^½."""
    eye = torch.eye(len(root), dtype=root.dtype, device=root.device)
    return eye + root[:, None] * curvature * root


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve (factor · factorᵀ) x = right; torch.cholesky_solve cannot be recorded on a GPU."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _divide(value: Tensor, by: Tensor) -> Tensor:
    """Return value/by, and 0 where ``by`` is: there w_i is w̄."""
    return torch.where(by > 0, value / torch.where(by > 0, by, 1.0), 0.0)


def _layerwise(row: Tensor, like: Tree) -> Tensor:
    """Replace every number by the sum over its tensor."""
    sizes = [leaf.numel() for leaf in tree.leaves(like)]
    return torch.cat([part.sum().expand(part.shape) for part in row.split(sizes)])


def _bounded(
    new: Tensor, old: Tensor, unit: Tensor, least: float = LEAST, most: float = MOST
) -> Tensor:
    """Keep a variance near its last value and within its bounds."""
    near = torch.minimum(torch.maximum(new, old / CHANGE), old * CHANGE)
    return torch.minimum(torch.maximum(near, least * unit), most * unit)
