"""DBE: FedAvg whose features get a private shift, while their mean is pulled to a common one.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023 (arXiv 2311.14975).

| symbol | here | meaning |
|---|---|---|
| θ | server["params"] | the global model: an extractor f and a linear head h |
| r_i | client["memory"] | the client's shift of the features (PRBM), from 0; never sent |
| m̄ | work["mean"] | the running mean of the features, from 0 in every round |
| g | server["mean"] | the consensus mean, fixed before round 0 |
| κ | mean_strength | the pull of m̄ to g; 50 in the authors' script, tuned per network there |
| μ | mean_rate | the weight of the newest batch in m̄; 1 in the authors' script |
| η | local_lr | the step of θ and of r_i; 0.005 (batch 10, one epoch) in the paper |

A client minimises the loss of h(f(x) + r_i) plus κ · mean_k ½ (m̄_k − g_k)². Before round 0 all
clients train the initial model once, without r and pull; they send m̄ and forget the rest. As h is
linear, h(z + r) is h(z) with the bias b + W r: the personal model is a network with that bias.
A newcomer takes θ and g with r = 0, and learns its r when it trains.

Differs from the paper: the pull has the ½ of the authors' code, so that κ means the same; g rides
along with θ in every round (the paper sends it once); r takes plain steps also where θ has momentum
(the paper has none), but weight decay, where it is asked for, acts on r too. κ is 5 by default:
each of D features is pulled by κ/D, and our usual networks have fewer than the authors'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, Objective, descend
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    ServerContext,
    changed,
    client_weights,
    weighted_mean,
)
from sartor.core.task import Task
from sartor.core.tree import Tree, zeros_like
from sartor.methods.fedavg import fedavg, with_kept
from sartor.methods.parts.partial import check_whole_head
from sartor.methods.parts.prototypes import class_sums


def dbe(
    task: Task,
    local: Local,
    *,
    memory: bool = True,
    init_mean: Literal["running", "full"] = "running",
) -> Method:
    """Build FedAvg with the domain bias eliminator: min Σ p_i [L_i(h(f + r_i)) + κ MR(m̄_i, g)].

    Args:
        task: the network and its loss; its head is linear and has a bias.
        local: local training of the whole network and the shift, by Adam too if it says so; the
            paper's shift takes plain steps.
        memory: whether r_i is trained; without it, and with κ = 0, this is FedAvg.
        init_mean: what clients send for g: the running mean at the end of their training (the
            paper's), or the mean feature of all their samples after it ("full").
    """
    check_whole_head("dbe", task)
    if task.head is not None and f"{task.head}.bias" not in task.leaf_names:
        raise ConfigError(
            f"dbe puts every client's shift into the bias of the head, but {task.head!r} has none; "
            "build it with bias=True."
        )
    base = with_kept(fedavg(task, local), "memory")
    over = ("params", "memory") if memory else ("params",)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {"params": params, "mean": _zeros(params)}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        new = {"params": params, "memory": {"shift": _zeros(params)}}
        return {"memory": new["memory"], **local.start(**{entry: new[entry] for entry in over})}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {**base.begin(client, ctx), "mean": _zeros(ctx.common["params"])}

    def _zeros(params: Tree) -> Tensor:
        return next(iter(params.values())).new_zeros(task.feature_dim)

    def objective(pulled: bool) -> Objective:
        """Return the loss with r_i, and with the pull or, before round 0, without."""

        def loss(work: Tree, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tree]:
            params, mu = work["params"], ctx.hyper["mean_rate"]
            z = task.represent(params, batch)
            real = batch.mask.to(z.dtype)
            newest = real @ z / real.sum().clamp(min=1.0)
            # Alg., running mean: m̄ ← (1 − μ) m̄ + μ · newest, which alone has a gradient.
            mean = (1.0 - mu) * work["mean"] + mu * newest
            scores = task.classify(params, z + work["memory"]["shift"])  # h(f(x) + r_i)
            fit = task.mean(task.criterion(scores, batch.y), batch)
            if pulled:
                gap = (mean - ctx.common["mean"]).square().mean()  # Alg., the term κ · MR(m̄_i, g)
                fit = fit + ctx.hyper["mean_strength"] * 0.5 * gap
            return fit, {"mean": mean}

        return loss

    def still(work: Tree, ctx: ClientContext) -> Tree:
        """Forget the momentum of the shift, which takes plain steps."""
        velocity = work["velocity"]
        return {**work, "velocity": {**velocity, "memory": zeros_like(velocity["memory"])}}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        return {**base.aggregate(server, uploads, ctx), "mean": server["mean"]}

    def model(work: Tree, ctx: ClientContext) -> Tree:
        params, shift = work["params"], work["memory"]["shift"]
        weight, bias = (params[f"{task.head}.{leaf}"] for leaf in ("weight", "bias"))
        return {**params, f"{task.head}.bias": bias + weight @ shift}

    def send_mean(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        if init_mean == "running":
            return client, {"mean": work["mean"]}
        return client, {"mean": work["sums"].sum(0) / work["counts"].sum().clamp(min=1.0)}

    def agree(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        # Alg., before round 0: g = Σ_i (n_i/N) m̄_i, and never again.
        weights = client_weights(ctx)[ctx.cohort] * ctx.present
        return {**server, **weighted_mean(uploads, weights, {"mean": server["mean"]})}

    once = replace(local, keep_optimiser=False)
    first = [descend(task, once, objective(False), name="first training", aux=True)]
    if init_mean == "full":
        first.append(class_sums(task, "first mean"))
    after = still if memory and local.momentum else None
    train = descend(task, local, objective(True), over=over, aux=True, after=after)
    hyper = dict(base.hyper)
    note = "the pull of the mean feature to the common one; 0 leaves it out"
    hyper["mean_strength"] = Hyper(5.0, 0.0, note=note)
    note = "the weight of the newest batch in the running mean"
    hyper["mean_rate"] = Hyper(1.0, 0.0, 1.0, True, note=note)
    record = changed(
        base,
        name="dbe",
        hyper=hyper,
        init_server=init_server,
        init_client=init_client,
        broadcast=lambda server, ctx: server,
        begin=begin,
        phases=(train,),
        aggregate=aggregate,
        model=model,
        private=lambda leaf: leaf == "shift",
    )
    start = changed(
        record, phases=tuple(first), finish=send_mean, aggregate=agree, averaged=("mean",)
    )
    return changed(record, before=start)
