"""APFL: each client uses a mixture of a model of its own and the global one, and may learn its α.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020 (arXiv 2003.13461).

| symbol | here | meaning |
|---|---|---|
| w | server["params"] | the global model: FedAvg's, whatever the rest does |
| v_i | client["personal"] | the client's own model, kept between rounds, never sent |
| α_i | client["mix"]["share"] | the share of v_i in what the client uses |
| v̄_i | model | α_i v_i + (1 − α_i) w: a mixture of parameters |
| η | local_lr | the step of w and of v_i |
| α_i⁰ | share_start | 0.5 in the authors' code; 0.25 to 0.75 are studied |
| – | share_lr | the step of α_i; η in the paper |
| – | share_decay | a pull of α_i to 0; 0.02 in the authors' code |

A local step on one batch ξ: w_i ← w_i − η∇f_i(w_i; ξ) and v_i ← v_i − η α_i ∇f_i(v̄_i; ξ), both
gradients at the old point. α_i ← clip(α_i − share_lr ⟨v_i − w, ∇f_i(v̄_i; ξ)⟩), to [0, 1]: once a
round, on its first batch and before the other steps (`mixing="round"`), or in every step and from
the old point ("step"), or never ("fixed", the default of the authors' code).

Differs from the paper: the server averages by numbers of samples (`rule="uniform"` is the paper's);
momentum and weight decay, where local training has them, serve w_i and v_i, each with a buffer of
its own, and never α_i. Differs from the authors' code, which mixes the two networks' outputs, steps
w_i before v_i, and takes another gradient for α_i.

A newcomer takes the global model for its own, α_i⁰ for its share (so that it begins with the global
model), and trains on from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg, with_kept


def apfl(
    task: Task,
    local: Local,
    *,
    mixing: Literal["fixed", "round", "step"] = "round",
    rule: Literal["normalized", "uniform"] = "normalized",
) -> Method:
    """Build APFL: min over v_i and α_i of f_i(α_i v_i + (1 − α_i) w), with w the model of FedAvg.

    Args:
        task: the network and its loss.
        local: local training of w and v_i, which see the same batches.
        mixing: when α_i moves: never, once a round, or in every step; the first is free, the others
            cost a gradient each time.
        rule: how the server averages: by numbers of samples, or evenly.
    """
    base = with_kept(fedavg(task, local, rule=rule), "personal", "mix")

    def mixture(work: Tree) -> Tree:
        share = work["mix"]["share"]
        return tree.map(  # v̄_i = α_i v_i + (1 − α_i) w
            lambda v, w: share * v + (1.0 - share) * w, work["personal"], work["params"]
        )

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        mix = {"share": ctx.hyper["share_start"]}
        start = local.start(params=params, personal=params)
        return {"personal": params, "mix": mix, **start}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return f(w) + f(v̄), where w in v̄ is given: w is FedAvg's."""
        # Alg., local step: the slope in v_i is α_i ∇f_i(v̄_i; ξ), by the chain rule.
        held = {**work, "params": tree.map(torch.detach, work["params"])}
        return task.loss(work["params"], batch) + task.loss(mixture(held), batch)

    def of_share(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        # Alg., step of α_i: the slope is ⟨v_i − w, ∇f_i(v̄_i; ξ)⟩.
        decay = 0.5 * ctx.hyper["share_decay"] * work["mix"]["share"].square()
        return task.loss(mixture(work), batch) + decay

    def clipped(work: Tree, ctx: ClientContext) -> Tree:
        return {**work, "mix": {"share": work["mix"]["share"].clamp(0.0, 1.0)}}

    train = descend(task, local, objective, over=("params", "personal"))
    plain = replace(local.plain, steps=1)
    turn = descend(task, plain, of_share, name="mix", over=("mix",), lr="share_lr", after=clipped)

    def both(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        return {**train.step(work, batch, ctx), "mix": turn.step(work, batch, ctx)["mix"]}

    note = "the first share of the own model; 0 fixed is FedAvg, 1 is local"
    hyper = {**base.hyper, "share_start": Hyper(0.5, 0.0, 1.0, note=note)}
    phases = [replace(train, step=both) if mixing == "step" else train]
    if mixing == "round":
        # This phase has no momentum of its own and must leave that of training in place.
        phases.insert(0, replace(turn, stream="train", leave=lambda work, ctx: work))
    if mixing != "fixed":
        hyper["share_lr"] = Hyper(local.lr, 0.0, note="the step of the share; 0 leaves it fixed")
        hyper["share_decay"] = Hyper(0.0, 0.0, note="the pull of the share to the global model")
    return changed(
        base,
        name="apfl",
        hyper=hyper,
        init_client=init_client,
        phases=tuple(phases),
        model=lambda work, ctx: mixture(work),
        private=lambda leaf: leaf in ("personal", "mix"),
    )
