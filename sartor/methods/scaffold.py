"""SCAFFOLD: FedAvg whose local steps are corrected for the drift of clients towards their own data.

One model for all.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020 (arXiv 1910.06378), Algorithm 1.

| symbol | here | meaning |
|---|---|---|
| x | server["params"] | the global model |
| c | server["control"] | the mean of the clients' controls |
| c_i | client["control"] | the client's control: its gradient when it last trained; starts at 0 |
| y_i | work["params"] | the local model |
| K | work["count"] | the steps really made in the round |
| η_l | local_lr | the step of y_i |
| η_g | server_lr | the server's step; 1 in the paper |

A local step is y ← y − η_l(∇f_i(y) − c_i + c). Then c_i⁺ = c_i − c + (x − y)/(K η_l) (option II of
the paper, `control="steps"`), or ∇f_i(x) on all samples (option I, "gradient", one more pass). The
server: x ← x + η_g mean_S(y_i − x) and c ← c + (1/m) Σ_S (c_i⁺ − c_i), with m the number of ALL
clients. With `weights="samples"` n_i takes the place of 1 in both.

Differs from the paper: y_i travels in place of y_i − x, which is as long. The paper has neither
momentum nor decay. With them, option II is what it stands for, the mean gradient of the local
steps: with buffers v and momentum μ it is ((1 − μ)(x − y)/η_l + μ(v_K − v_0))/K, and the decay
belongs to the gradient. Clipping, where it is asked for, acts on the corrected gradient.

A newcomer uses the global model as it is; where it trains, its control starts at 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Phase,
    ServerContext,
    changed,
    client_weights,
    weighted_sum,
)
from sartor.core.task import Task, grad
from sartor.core.tree import Tree
from sartor.methods.fedavg import Weights, averaged


def scaffold(
    task: Task,
    local: Local,
    *,
    control: Literal["steps", "gradient"] = "steps",
    weights: Weights = "uniform",
) -> Method:
    """Build SCAFFOLD: min_x Σ p_i f_i(x).

    Args:
        task: the network and its loss.
        local: local training.
        control: how a client renews its control: from the steps it made (option II), or by a pass
            over its samples at the received model (option I).
        weights: how the server weighs clients: evenly (the paper's), or by numbers of samples.
    """
    local.only_sgd("scaffold", "corrects the gradients of SGD by controls of the same size")
    base = averaged(task, local, weights)
    by_steps = control == "steps"

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {"params": params, "control": tree.zeros_like(params)}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {**base.init_client(params, ctx), "control": tree.zeros_like(params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        count = tree.leaves(client["control"])[0].new_zeros(())
        own = {"control": client["control"], "renewed": client["control"], "count": count}
        return {**base.begin(client, ctx), **own}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return f_i(y) + ⟨c − c_i, y⟩, whose gradient is the corrected one."""
        correction = tree.sub(ctx.common["control"], work["control"])
        # Alg. 1, local step: y ← y − η_l(∇f_i(y) − c_i + c)
        return task.loss(work["params"], batch) + tree.dot(correction, work["params"])

    train = descend(task, local, objective)

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        work = train.enter(work, ctx)
        return {**work, "before": work["velocity"]} if local.momentum else work

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        return {**train.step(work, batch, ctx), "count": work["count"] + 1.0}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        """Renew the control by option II."""
        rate = local.rate(ctx)
        total = tree.map(lambda x, y: (x - y) / rate, ctx.common["params"], work["params"])
        if local.momentum:
            mu, change = ctx.hyper["momentum"], tree.sub(work["velocity"], work["before"])
            total = tree.map(lambda d, v: (1.0 - mu) * d + mu * v, total, change["params"])
        num = work["count"].clamp(min=1.0)
        renewed = tree.map(  # Alg. 1, option II: c_i − c + (x − y)/(K η_l)
            lambda own, c, d: torch.where(work["count"] > 0, own - c + d / num, own),
            work["control"],
            ctx.common["control"],
            total,
        )
        return {**train.leave(work, ctx), "renewed": renewed}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, upload = base.finish(client, work, ctx)
        change = tree.sub(work["renewed"], client["control"])
        return {**kept, "control": work["renewed"]}, {**upload, "change": change}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        hyper = {**ctx.hyper, "relax": ctx.hyper["server_lr"]}
        moved = base.aggregate(server, uploads, ctx._replace(hyper=hyper))
        # Alg. 1, server: c ← c + (1/m) Σ_S (c_i⁺ − c_i), where m counts all clients.
        share = client_weights(ctx, weights)[ctx.cohort] * ctx.present
        change = weighted_sum(uploads["change"], share)
        return {**moved, "control": tree.add(server["control"], change)}

    note = "the step of local training; controls are divided by it"
    rate = {"local_lr": Hyper(local.lr, 0.0, open_low=True, note=note)} if by_steps else {}
    phases: tuple[Phase, ...] = (_full_gradient(task, local), train)
    if by_steps:
        phases = (replace(train, enter=enter, step=step, leave=leave),)
    return changed(
        base,
        name="scaffold",
        hyper={
            **local.hyper,
            **rate,
            "server_lr": Hyper(1.0, 0.0, note="1 is plain averaging", server=True),
        },
        init_server=init_server,
        init_client=init_client,
        broadcast=lambda server, ctx: server,
        begin=begin,
        phases=phases,
        finish=finish,
        aggregate=aggregate,
        private=lambda leaf: leaf in ("control", "renewed"),
        averaged=("params", "change"),
    )


def _full_gradient(task: Task, local: Local) -> Phase:
    """Build the pass that renews the control by option I: ∇f_i(x), with the decay of training."""

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        return {**work, "renewed": tree.zeros_like(work["params"])}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        # Two integers would be divided in single precision.
        like = tree.leaves(work["params"])[0]
        share = batch.mask.sum().to(like.dtype) / ctx.num_samples
        slope = grad(lambda params: share * task.loss(params, batch))(work["params"])
        return {**work, "renewed": tree.add(work["renewed"], slope)}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        if not local.weight_decay:
            return work
        decay = ctx.hyper["weight_decay"]
        found = tree.map(lambda g, p: g + decay * p, work["renewed"], work["params"])
        return {**work, "renewed": found}

    return Phase("control", step, enter, leave, batch=64, shuffle=False)
