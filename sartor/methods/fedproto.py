"""FedProto: clients keep their models and share the mean feature of every class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022 (arXiv 2105.00243).

| symbol | here | meaning |
|---|---|---|
| θ_i | client["params"] | the client's own model, kept between rounds; never sent |
| P_{i,c}, n_{i,c} | upload | the client's mean feature of class c, and its number of samples |
| P̄_c | server["prototypes"] | the global prototypes; ``seen`` marks the classes that have one |
| λ | proto_strength | the pull of features to P̄; 1 (MNIST, FEMNIST), 0.1 (CIFAR-10) in the paper |
| η | local_lr | the step of local training; 0.01 with momentum 0.5 in the paper |

A client minimises the mean loss plus λ/(bD) Σ_l ‖f(x_l) − P̄_{y_l}‖² over a batch of b samples; a
sample whose class has no prototype counts in b alone. Answers are nearest prototypes. As
2 P̄_c·z − ‖P̄_c‖² is −‖z − P̄_c‖² up to a number that all classes share, the model that is used is
an ordinary network: the client's extractor and a head made of prototypes. A class without one is
never answered; before any exist, the client's head answers. A newcomer trains the initial model
towards the prototypes it receives, and answers with those. Only prototypes that exist travel, with
their counts: (C_i + C)·D + C_i numbers and 2⌈C/8⌉ bytes of marks, C_i being the client's classes.

Differs from the paper: its pull is a distance between class means, and its printed average has
weights that sum to 1/|N_c|; ours are those of the authors' code (plain means; `average="count"`
weighs by n_{i,c}). A class that no client has keeps its prototype (`absent="drop"` is the authors'
way), prototypes come from a pass after training (`prototypes="running"`: from the last epoch, while
the model moves, as in the authors' code), and all clients begin with one model (`start="own"`: with
shuffled copies of its leaves).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import rng, tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train
from sartor.methods.parts.partial import check_whole_head
from sartor.methods.parts.prototypes import class_means, class_sums, members
from sartor.methods.parts.starts import shuffled

_GAP = 10.0  # how far a class without prototype is scored below the average of the others


def fedproto(
    task: Task,
    local: Local,
    *,
    answer: Literal["nearest", "nearest_own", "head"] = "nearest",
    average: Literal["uniform", "count"] = "uniform",
    prototypes: Literal["after", "running"] = "after",
    absent: Literal["keep", "drop"] = "keep",
    start: Literal["common", "own"] = "common",
) -> Method:
    """Build FedProto: min over θ_i of L_i(θ_i) + λ mean_l ‖f(x_l) − P̄_{y_l}‖²/D on each client.

    Args:
        task: the network and its loss; its head is linear and has a bias.
        local: local training of the whole network.
        answer: by the nearest prototype, by the nearest one of a class that the client had in its
            last training, or by the client's own head.
        average: clients that have a class count alike, or by their samples of it.
        prototypes: taken by a pass after training, or from the features of its last epoch.
        absent: what becomes of a prototype in a round in which no client has the class.
        start: one initial model for all, or one of the same values in an order of its own.
    """
    check_whole_head("fedproto", task)
    if task.head is not None and f"{task.head}.bias" not in task.leaf_names:
        raise ConfigError(
            f"fedproto makes a head of the prototypes, but {task.head!r} has no bias for it; build "
            "it with bias=True."
        )

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        like = next(iter(params.values()))
        empty = like.new_zeros((task.num_classes, task.feature_dim))
        return {"prototypes": empty, "seen": like.new_zeros(task.num_classes).bool()}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        if start == "own":
            params = {k: shuffled(v, rng.fold(ctx.key, k)) for k, v in params.items()}
        held = next(iter(params.values())).new_ones(task.num_classes).bool()
        return {"params": params, "held": held, **local.start(params=params)}

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        work = {**sums.enter(work, ctx), "ended": torch.zeros_like(ctx.reports)}
        return train.enter(work, ctx)

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tree]:
        z = task.represent(work["params"], batch)
        fit = task.mean(task.criterion(task.classify(work["params"], z), batch.y), batch)
        gap = (z - ctx.common["prototypes"].index_select(0, batch.y)).square().mean(-1)
        gap = gap * ctx.common["seen"].index_select(0, batch.y)
        # Alg., client: L_i + λ mean_l ‖f(x_l) − P̄_{y_l}‖²/D
        loss = fit + ctx.hyper["proto_strength"] * task.mean(gap, batch)
        if prototypes == "after":
            return loss, {}
        member, again = members(task, batch, z.dtype), ~work["ended"]
        return loss, {
            "sums": work["sums"] * again + member.mT @ z,
            "counts": work["counts"] * again + member.sum(0),
            "ended": batch.last,
        }

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        counts = work["counts"]
        kept = {"params": work["params"], "held": counts > 0, **local.kept(work)}
        return kept, {"prototypes": class_means(work["sums"], counts), "counts": counts}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        counts = torch.where(ctx.present[:, None], uploads["counts"], 0.0)
        weights = counts if average == "count" else (counts > 0).to(counts.dtype)
        brought = torch.where(weights[..., None] > 0, uploads["prototypes"], 0.0)
        # Alg., server: P̄_c is the mean of P_{i,c} over the clients that have the class.
        total, seen = weights.sum(0), (counts > 0).any(0)
        new, old = (weights[..., None] * brought).sum(0), server["prototypes"]
        if absent == "drop":
            found = {"prototypes": class_means(new, total), "seen": seen}
            return tree.where(ctx.present.any(), found, server)
        return {"prototypes": class_means(new, total, old), "seen": server["seen"] | seen}

    def model(work: Tree, ctx: ClientContext) -> Tree:
        params, seen = work["params"], ctx.common["seen"]
        if answer == "head":
            return params
        if answer == "nearest_own":
            seen = seen & (work["counts"] > 0 if "counts" in work else work["held"])
        head = nearest(ctx.common["prototypes"], seen)
        some = seen.any()
        new = {f"{task.head}.{k}": v for k, v in head.items()}
        return {k: torch.where(some, new[k], v) if k in new else v for k, v in params.items()}

    train, sums = descend(task, local, objective, aux=True), class_sums(task, "prototypes")
    phases = (train, sums) if prototypes == "after" else (replace(train, enter=enter),)
    note = "the pull of features to the prototypes; 0 is local training"
    return changed(
        local_train(task, local, participation="sampled"),
        name="fedproto",
        hyper={**local.hyper, "proto_strength": Hyper(1.0, 0.0, note=note)},
        init_server=init_server,
        init_client=init_client,
        broadcast=lambda server, ctx: server,
        phases=phases,
        finish=finish,
        aggregate=aggregate,
        model=model,
        private=lambda leaf: leaf in task.leaf_names,
        sparse={"common/prototypes": "common/seen", "upload/prototypes": "upload/counts"},
    )


def nearest(prototypes: Tensor, usable: Tensor) -> dict[str, Tensor]:
    """Make the linear head whose largest score is that of the nearest usable prototype.

    The others stand ten below the average of the usable ones, and so below the largest.
    """
    weight, bias = 2.0 * prototypes, -prototypes.square().sum(-1)
    share = usable.to(bias.dtype) / usable.sum().clamp(min=1)
    return {
        "weight": torch.where(usable[:, None], weight, share @ weight),
        "bias": torch.where(usable, bias, share @ bias - _GAP),
    }
