"""Evidence: the pull of FedProx, learned from the clients, with nothing to choose.

Our own method. The λ of FedProx is the precision of a Gaussian prior on the clients' models; here
the prior's mean and spread are learned by the marginal likelihood of all data ("evidence";
MacKay, "Bayesian Interpolation", Neural Computation 1992).

| symbol | here | meaning |
|---|---|---|
| w̄, S | common["centres"], server["width"] | the mean of the prior; its own prior N(0, S) |
| T = diag(τ²) | common["spread"] | how far clients' models are from w̄, coordinate by coordinate |
| R | ``roots`` | T = R Rᵀ |
| σ² | common["noise"] | the noise of a regression; 1 for classification |
| C | common["covariance"] | of w̄ given all data |
| w_i = w̄ + R v | work["away"] is v | argmin L_i(w)/σ² + ½ ‖v‖², L_i summed over samples |
| A_i | ``curvature`` | of L_i/σ² (Gauss-Newton; exact for linear models) |
| B_i | I + Rᵀ A_i R | so H_i⁻¹ = (A_i + T⁻¹)⁻¹ = R B_i⁻¹ Rᵀ, which holds for T = 0 too |
| K_i | A_i − A_i H_i⁻¹ A_i | what client i says of w̄ |
| γ_i | 1 − Var(w_i − w̄)/τ² | how much the samples determine; 0 to 1 |
| ν | pool | clients that a layer's τ² counts for in that of a coordinate |

A round: clients solve for w_i by Newton steps with a line search (no learning rate), and send
sums: K_i, the slope, (w_i − w̄)², γ_i and a few numbers. The server takes a Newton step of w̄ and
MacKay's step τ² = Σ(w_i − w̄)²/Σγ_i; for w̄'s own width S alike. In FedProx's terms
λ_i = σ²/(n_i τ²): τ = 0 is one model for all, τ → ∞ every client alone.

`groups`: one τ for all (``scalar``), one for each tensor (``layer``, so that intercepts run free),
one for each coordinate (``diag``), or a matrix T (``full``). With few clients a τ² of each
coordinate is learned from few numbers and too extreme; so it counts ν clients more with the τ² of
its tensor. ν = 0 is plain ``diag``. The ends have one variance to learn: ``sharing="one"`` is one
model with its ridge (T = 0), ``"alone"`` every client for itself (w̄ = 0, one τ for each tensor).

`multiples`: where classes can be separated the learned T and S are too small, as the Laplace
approximation takes the curvature as given. So a linear model is solved under multiples of the
learned prior at once, each with its own w̄ and C, and the models are averaged with the weights
exp(−Σ losses of samples left out − log10² of the multipliers/(2 · 0.7²)). The loss is convex in a
linear model, so the average is no worse than the models in the mean.

Linear models, and networks of at most 1,024 parameters: A_i is held as a matrix. A newcomer solves
once under the learned prior; the fewer its samples, the nearer it is to w̄.

What is shown: the log evidence (Laplace; of the prior that has the most), and the loss of samples
that were left out, one at a time, approximately (one Newton step from the model that saw them; Rad
and Maleki, 2020). Both are of the messages before, so one round late.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import refuse
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
from sartor.methods.parts import priors
from sartor.methods.parts.curves import Curves, curves, derivatives, left_out, losses, solve
from sartor.methods.parts.priors import Groups, Sharing, Update
from sartor.methods.parts.roots import half_log_det, root_of, times, whitened

MOST_PARAMETERS = 1024
"""Of a model: each client forms a matrix of this size squared."""
MOST_FULL = 64
"""Of a model with ``groups="full"``."""
LINE = (1.0, 0.5, 0.2, 0.05, 0.0)
"""Lengths of a Newton step that are tried, in this order; the last stays where it is."""

SUMS = (
    *("curvature", "slope", "squares", "sure", "evidence"),
    *("residual", "left_out", "mixed", "count"),
)
"""What a client sends; the server uses their sums alone. With ``groups="full"`` also "outer"."""


class Point(NamedTuple):
    """A client's K models, with the derivatives of its loss, in double precision."""

    view: Curves
    rows: Tensor  # (K, P) w_i
    scores: Tensor  # (K, c, n)
    errors: Tensor  # (K, c, n): e/σ², by the scores
    bend: Tensor  # (K, c, c, n): Λ/σ²
    slope: Tensor  # (K, P): g
    curvature: Tensor  # (K, P, P): A


def evidence(
    task: Task,
    local: Local,
    *,
    groups: Groups = "diag",
    sharing: Sharing = "learned",
    multiples: bool | Literal["auto"] = "auto",
    update: Update = "mackay",
    learn: bool = True,
    newton_steps: int = 6,
    posterior: bool = False,
) -> Method:
    """Build the method: one prior for all clients, learned by the evidence.

    Args:
        task: the model and its loss: classification, regression or multi-label.
        local: not used; the models are solved for. Schedules of its rate are refused.
        groups: which coordinates share a spread; see the module's docstring.
        sharing: learned, or one of its ends with its ridge learned: "one" model, or all "alone".
        multiples: whether models are averaged over multiples of the learned prior; "auto" does so
            for linear models, for which it is made.
        update: MacKay's step of the variances, or the slower one of EM.
        learn: whether spread, width and noise are learned; False keeps those given (σ² = 1),
            which is FedProx with λ_i = 1/(n_i τ²).
        newton_steps: steps of a solve; linear regression takes one.
        posterior: whether a client's model comes with the covariance of its parameters, by which
            ``Result.predict(..., uncertainty=True)`` answers.
    """
    linear = task.linear_layer is not None
    _refuse(task, groups, sharing, multiples, learn)
    local.without_rate("evidence")  # refuses schedules of a rate that there is not
    regression, full = task.kind == "regression", groups == "full"
    averages = linear and learn if multiples == "auto" else multiples
    grid = priors.multiples_of(sharing, task.num_trained) if averages else priors.JUST_THIS
    base = grid.index((1.0, 1.0))  # the prior that is learned; the others follow it
    shapes = {k: task.module.get_parameter(k).detach().to("meta") for k in task.leaf_names}

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        like = tree.flat(params)
        size, k = len(like), len(grid)
        start = tree.zeros_like(params) if sharing == "alone" else params

        def alike(name: str) -> Tensor:
            return ctx.hyper.get(name, torch.zeros_like(like[0])).expand(like.shape).clone()

        spread = alike("spread")
        return {
            "params": tree.map(torch.clone, start),
            "centres": tree.flat(start).expand(k, -1).clone(),
            "spread": torch.diag(spread) if full else tree.shaped(spread, params),
            "width": tree.shaped(alike("width"), params),
            "covariance": like.new_zeros(k, size, size),
            "weights": torch.nn.functional.one_hot(torch.tensor(base), k).to(like),
            **{name: like.new_zeros(()) for name in ("log_evidence", "left_out")},
            "noise": like.new_ones(()),
        }

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        spread = server["spread"] if full else tree.flat(server["spread"])
        same = ("centres", "covariance", "noise", "weights")
        return {"spread": spread, **{name: server[name] for name in same}}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        away = torch.zeros_like(ctx.common["centres"])
        return {"params": averaged(ctx.common["centres"], ctx), "away": away}

    def averaged(rows: Tensor, ctx: ClientContext) -> Tree:
        """Return the mean of models by the weights of their priors."""
        kind = ctx.common["weights"].dtype
        return tree.shaped(ctx.common["weights"] @ rows.to(kind), shapes)

    def roots(ctx: ClientContext) -> Tensor:
        """Return R of each prior: (K, P), or (K, P, P)."""
        root = root_of(ctx.common["spread"].double())
        return torch.stack([math.sqrt(a) * root for a, _ in grid])

    def look(v: Tensor, root: Tensor, work: Tree, batch: Batch, ctx: ClientContext) -> Point:
        """Derive the loss at w̄ + R v."""
        noise = ctx.common["noise"].double()
        rows = ctx.common["centres"].double() + times(root, v)
        view, scores = curves(task, work["params"], batch, rows)
        errors, bend = derivatives(task.kind, scores, batch.y)
        weight = batch.mask.double() / noise
        errors, bend = errors * weight, bend * weight
        return Point(view, rows, scores, errors, bend, view.slope(errors), view.curvature(bend))

    def lost(scores: Tensor, batch: Batch) -> Tensor:
        """Return summed losses: (..., c, n) -> (...)."""
        return (losses(task.kind, scores, batch.y) * batch.mask).sum(-1)

    def newton(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Take one Newton step in v, under each prior."""
        root, v, noise = roots(ctx), work["away"].double(), ctx.common["noise"].double()
        at = look(v, root, work, batch, ctx)
        factor = torch.linalg.cholesky_ex(whitened(root, at.curvature))[0]
        pull = times(root, at.slope, turned=True) + v
        step = solve(factor, pull[..., None])[..., 0]  # Alg., client: B v_new = B v − (Rᵀg + v)
        if linear and regression:
            return {**work, "away": (v - step).to(work["away"].dtype)}
        tried = torch.stack([v - length * step for length in LINE])
        scores = at.view.scores(ctx.common["centres"].double() + times(root, tried))
        cost = lost(scores, batch) / noise + 0.5 * tried.square().sum(-1)
        # The first that is no worse. A little slack, so that rounding does not decide at the end.
        fits = cost <= cost[-1] + 1e-9 * (1.0 + cost[-1].abs())
        chosen = fits & (fits.cumsum(0) == 1)
        away = torch.where(chosen[..., None], tried, 0.0).sum(0)
        return {**work, "away": away.to(work["away"].dtype)}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        rows = ctx.common["centres"].double() + times(roots(ctx), work["away"].double())
        return {**work, "params": averaged(rows, ctx)}

    def measure(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Sum what the server needs, at the solutions."""
        root, v, noise = roots(ctx), work["away"].double(), ctx.common["noise"].double()
        at = look(v, root, work, batch, ctx)
        a = at.curvature
        factor = torch.linalg.cholesky_ex(whitened(root, a))[0]
        square = root.mT if full else torch.diag_embed(root)
        half = torch.linalg.solve_triangular(factor, square, upper=False)
        h_inv = half.mT @ half
        move = h_inv @ a  # I − H⁻¹T⁻¹, by which w_i − w̄ follows w̄
        stay = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - move
        covariance = ctx.common["covariance"].double()
        own = h_inv + stay @ covariance @ stay.mT  # Cov(w_i)
        apart = h_inv[base] + move[base] @ covariance[base] @ move[base].mT  # Cov(w_i − w̄)
        gap = times(root, v)[base]
        spread = ctx.common["spread"].double()
        spread = torch.diagonal(spread) if full else spread
        sure = 1.0 - torch.diagonal(apart) / torch.where(spread > 0, spread, 1.0)
        count, outputs = batch.mask.double().sum(), at.scores.shape[-2]
        loss = lost(at.scores, batch) / noise
        if regression:
            loss = loss + 0.5 * count * outputs * torch.log(2.0 * math.pi * noise)
        pull = times(root, at.slope, turned=True) + v
        push = times(root, solve(factor, pull[..., None])[..., 0])[..., None]
        fit = (at.errors[base] * noise).square().sum() + noise * (a[base] * own[base]).sum()
        unseen = left_out(at.scores, at.errors, at.bend, at.view.reach(own), task.kind)
        mixed = torch.einsum("k,kcn->cn", ctx.common["weights"].double(), unseen)
        found = {
            "curvature": a - a @ move,
            "slope": at.slope - (a @ push)[..., 0],
            "squares": gap.square(),
            "sure": torch.where(spread > 0, sure.clamp(0.0, 1.0), 0.0),
            # log p(D_i | w̄, T), Laplace
            "evidence": -loss - 0.5 * v.square().sum(-1) - half_log_det(factor),
            "residual": fit / outputs,
            "left_out": lost(unseen, batch),
            "mixed": lost(mixed, batch),
            "count": count,
        }
        if full:
            found["outer"] = gap[:, None] * gap + apart
        kind = work["away"].dtype
        work = {**work, "sums": {name: value.to(kind) for name, value in found.items()}}
        if posterior:  # of the mean model: within each prior, and between priors
            weights = ctx.common["weights"].double()[:, None]
            off = at.rows - (weights * at.rows).sum(0)
            whole = (weights[..., None] * own).sum(0) + (weights * off).mT @ off
            work["posterior"] = whole.to(kind)
        return work

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        like = work["away"]
        row, square = torch.zeros_like(like[0]), like[..., None] * torch.zeros_like(like[0])
        sums = {name: torch.zeros_like(row.sum()) for name in ("residual", "mixed", "count")}
        each = {name: torch.zeros_like(like.sum(-1)) for name in ("evidence", "left_out")}
        sums |= {**each, "squares": row, "sure": row, "slope": torch.zeros_like(like)}
        sums |= {"curvature": torch.zeros_like(square)}
        sums |= {"outer": torch.zeros_like(square[0])} if full else {}
        work = {**work, "sums": sums}
        return {**work, "posterior": torch.zeros_like(square[0])} if posterior else work

    def with_posterior(work: Tree, ctx: ClientContext) -> Tree:
        return {**work["params"], "posterior": work["posterior"], "noise": ctx.common["noise"]}

    def plain(model: Tree, x: Tensor) -> Tensor:
        return task.logits({name: model[name] for name in task.leaf_names}, x)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {}, work["sums"]

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        present = ctx.present.double()
        share = ctx.sizes.shape[0] / present.sum().clamp(min=1.0)
        sums = weighted_sum(tree.map(torch.Tensor.double, uploads), present * share)
        centres, width = server["centres"].double(), tree.flat(server["width"]).double()
        noise, count = server["noise"].double(), sums["count"].clamp(min=1.0)
        log_evidence, step = sums["evidence"], torch.zeros_like(centres)
        covariance = torch.zeros_like(sums["curvature"])
        if sharing != "alone":
            widths = torch.stack([b * width for _, b in grid])
            factor = torch.linalg.cholesky_ex(sums["curvature"] + torch.diag_embed(1.0 / widths))[0]
            slope = sums["slope"] + centres / widths
            step = solve(factor, slope[..., None])[..., 0]
            eye = torch.eye(centres.shape[1], dtype=centres.dtype, device=centres.device)
            # Contiguous, as it is after a checkpoint: products by another order round otherwise.
            covariance = solve(factor, eye.expand_as(factor)).contiguous()
            far = centres.square() / widths + widths.log()
            log_evidence = log_evidence - 0.5 * far.sum(-1) - half_log_det(factor)
            if not regression:
                # The quadratic is not trusted where scores would move by more than 2.
                moved = (4.0 * (slope * step).sum(-1) / count).clamp(min=0.0).sqrt()
                step = step * (2.0 / moved.clamp(min=2.0))[:, None]
        if regression and learn:
            noise = sums["residual"] / count
        centres = centres - step  # Alg., server: w̄ ← w̄ − (ΣK_i + S⁻¹)⁻¹ (slope + S⁻¹w̄)
        targets = count * (task.linear_layer[1].out_features if task.linear_layer else 1)
        weights = priors.weights_of(sums["left_out"], targets, grid, regression)
        spread, width = learned(server, sums, covariance, centres, noise, ctx)
        new = {
            "params": tree.shaped(weights @ centres, server["params"]),
            "centres": centres,
            "spread": spread if full else tree.shaped(spread, server["params"]),
            "width": tree.shaped(width, server["params"]),
            "covariance": covariance,
            "weights": weights,
            "noise": noise,
            "log_evidence": log_evidence.max(),
            "left_out": sums["mixed"] / count,
        }
        some = present.sum() > 0
        return tree.map(lambda value, old: torch.where(some, value.to(old), old), new, server)

    def learned(
        server: Tree,
        sums: Tree,
        covariance: Tensor,
        centres: Tensor,
        noise: Tensor,
        ctx: ServerContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the next T and S."""
        like, width = server["params"], tree.flat(server["width"]).double()
        spread = (server["spread"] if full else tree.flat(server["spread"])).double()
        if not learn:
            return spread, width
        # The first round measures σ², in whose units the given spread and width are.
        first, clients = ctx.round == 0, ctx.sizes.shape[0]
        unit = torch.where(first, noise, torch.ones_like(noise))
        spread, width = spread * unit, width * unit
        if sharing != "one":
            diagonal = torch.diagonal(spread) if full else spread
            top, below = priors.quotient(sums["squares"], sums["sure"], diagonal, clients, update)
            kind: Groups = "layer" if sharing == "alone" else groups
            pool = ctx.hyper["pool"].double() if "pool" in ctx.hyper else 0.0
            new = priors.grouped(top, below, like, kind, pool, 1e-6 * clients)
            # Multiples of nothing are nothing, so there τ² is at least the noise of one sample.
            least = 1.0 / ctx.sizes.sum().clamp(min=1).double() if averages else priors.LEAST
            least = priors.LEAST if sharing == "alone" else least
            if full:
                new = new.clamp(min=priors.LEAST * noise)
                new = (sums["outer"] + pool * torch.diag(new)) / (clients + pool)
            else:
                new = priors.bounded(new, spread, noise, least)
            spread = torch.where(first, spread, new)
        if sharing != "alone":
            known = 1.0 - torch.diagonal(covariance[base]) / width
            squares = centres[base].square()
            top, below = priors.quotient(squares, known.clamp(0.0, 1.0), width, 1, update)
            new = priors.grouped(top, below, like, "layer", 0.0, 0.01)
            width = torch.where(first, width, priors.bounded(new, width, noise, 1e-3, 1e3))
        return spread, width

    def shown(server: Tree, ctx: ServerContext) -> Tree:
        names = ("log_evidence", "left_out", "noise", "spread", "weights")
        return {name: server[name] for name in names}

    steps = 1 if linear and regression else newton_steps
    solving = Phase("solve", newton, leave=leave, batch=None, steps=steps, shuffle=False)
    measuring = Phase("measure", measure, enter=enter, batch=None, steps=1, shuffle=False)
    centre = Use(adapt=(solving,), centre=lambda server, ctx: server["params"])
    use = replace(centre, adapt=(solving, measuring), model=with_posterior, predict=plain)
    hyper = {}
    if sharing != "one":
        note = "τ² at first, in units of σ²; 0 is one model for all, for good"
        hyper["spread"] = Hyper(0.1, 0.0, note=note)
    if sharing != "alone":
        note = "S, alike: how far the mean is from zero"
        hyper["width"] = Hyper(1.0, 0.0, open_low=True, note=note)
    if learn and sharing == "learned" and groups in ("diag", "full"):
        note = "clients that a layer's τ² counts for in that of a coordinate; 0 learns each alone"
        hyper["pool"] = Hyper(2.0, 0.0, note=note, server=True)
    return Method(
        name="evidence",
        hyper=hyper,
        init_server=init_server,
        begin=begin,
        phases=(solving, measuring),
        finish=finish,
        aggregate=aggregate,
        broadcast=broadcast,
        use=use if posterior else centre,
        wire=Wire(
            private=lambda leaf: leaf in task.leaf_names,
            averaged=(*SUMS, "outer") if full else SUMS,
        ),
        show=Show(server=shown),
    )


def _refuse(
    task: Task, groups: Groups, sharing: Sharing, multiples: bool | Literal["auto"], learn: bool
) -> None:
    """Raise an error for what the method cannot do."""
    size = task.num_trained
    faults = []
    if task.kind not in ("classification", "regression", "multilabel"):
        faults.append(
            f"evidence serves classification, regression and multi-label tasks, not {task.kind!r}; "
            "use fedprox."
        )
    if size > MOST_PARAMETERS:
        faults.append(
            f"evidence forms a matrix of all parameters, so it takes at most {MOST_PARAMETERS} of "
            f"them; this model has {size:,}. Use a linear model, train the head alone "
            '(sartor.models.pretrained(net, train=["fc"])), or use fedprox.'
        )
    if groups == "full" and size > MOST_FULL:
        faults.append(
            f'groups="full" learns a matrix of at most {MOST_FULL} parameters squared; this model '
            f'has {size:,}. Use groups="diag".'
        )
    if groups != "diag" and sharing != "learned":
        faults.append(f"groups has no effect with sharing={sharing!r}; leave it out.")
    if multiples is True and not learn:
        faults.append("There are multiples of a learned prior only; leave out learn=False.")
    if task.linear_layer is None and (multiples is True or sharing == "alone"):
        what = "multiples=True" if multiples is True else 'sharing="alone"'
        faults.append(
            f"{what} is for linear models: a single nn.Linear that is trained; leave it out."
        )
    refuse(faults)
