"""FedGH: clients keep their extractors; the server trains one head on their class means.

Yi, Wang, Liu, Shi, Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header",
ACM MM 2023 (arXiv 2303.13137).

| symbol | here | meaning |
|---|---|---|
| φ_i | client["body"] | the client's extractor; never sent |
| θ | server["head"] | the head; it replaces the local one at the start of a round |
| r_{i,c} | upload["means"] | the client's mean feature of class c, after local training |
| η_s | server_lr | the server's step; 0.01 in the paper |
| b_s | server_batch | pairs (r_{i,c}, c) in a step of the server; 1 in the paper |
| η | local_lr | the step of local training; 0.01 with momentum 0.9 in the paper |

Each round the server passes once through the pairs of the clients that report, in an order drawn
anew, and steps along the mean loss of b_s pairs: every pair has weight 1, however many samples it
stands for. A newcomer joins the initial extractor with the current head, and trains both. Only
means that exist are uploaded: C_i·D numbers for a client with C_i classes, and a bit per class.

Differs from the paper: r_{i,c} is the mean over samples (the authors average the means of
mini-batches), gradients are clipped only where local training says so (`clip_norm=50` is theirs),
and θ starts as the head of the common initial model. b_s is by default the batch of local training,
and η_s is larger for it: there are fewer steps. The authors' code steps along with the client's
parameters and so never moves the head; ours moves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core import rng, tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, Method, ServerContext, changed
from sartor.core.task import Task, grad
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train
from sartor.methods.parts.partial import check_whole_head
from sartor.methods.parts.prototypes import class_means, class_sums


def fedgh(
    task: Task, local: Local, *, server_batch: int | None = None, server_epochs: int = 1
) -> Method:
    """Build FedGH: min over φ_i of L_i(φ_i, θ), and over θ of Σ loss(θ(r_{i,c}), c).

    Args:
        task: the network and its loss; its head is linear.
        local: local training of the whole network.
        server_batch: pairs in a step of the server; as many as local training has samples in a
            step if None.
        server_epochs: passes through the pairs a round.
    """
    refuse(below(1, "the paper's is 1.", server_batch=server_batch, server_epochs=server_epochs))
    check_whole_head("fedgh", task)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        _ = task.num_classes  # says what is wrong with a network without a linear head
        return {"head": tree.select(params, task.is_head)}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"body": tree.select(params, task.is_body), **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": {**client["body"], **ctx.common["head"]}, **local.kept(client)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        body = tree.select(work["params"], task.is_body)
        means = class_means(work["sums"], work["counts"])  # Alg., client: r_{i,c}
        sent = {"means": means, "held": work["counts"] > 0}
        return {"body": body, **local.kept(work)}, sent

    def order(held: Tensor, epoch: int, ctx: ServerContext) -> Tensor:
        """Shuffle the pairs (slots · classes,), those that exist before those that do not."""
        key = rng.fold(ctx.key, "pairs", epoch)
        classes = torch.arange(held.shape[1], device=held.device)
        words = rng.fold(key, ctx.cohort[:, None], classes[None, :])[..., 0]
        late = (~held).to(words.dtype) << 32
        return torch.sort((words + late).reshape(-1), dim=0, stable=True).indices

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        held = uploads["held"] & ctx.present[:, None]
        means = torch.where(held[..., None], uploads["means"], 0.0)
        label = torch.arange(held.shape[1], device=held.device).expand(held.shape)
        head, rate = server["head"], ctx.hyper["server_lr"]
        size = server_batch or local.batch or held.numel()
        for epoch in range(server_epochs):
            pick = order(held, epoch, ctx)
            x, y, mask = (
                part.index_select(0, pick).split(size)
                for part in (means.flatten(0, 1), label.reshape(-1), held.reshape(-1))
            )
            for pairs in zip(x, y, mask, strict=True):
                head = descended(head, Batch(*pairs, rows=pick, last=held.any()), rate)
        return {"head": head}

    def descended(head: Tree, batch: Batch, rate: Tensor) -> Tree:
        # Alg., server: θ ← θ − η_s ∇ mean loss(θ(r_{i,c}), c)
        def loss(at: Tree) -> Tensor:
            return task.mean(task.criterion(task.classify(at, batch.x), batch.y), batch)

        return tree.map(lambda w, g: w - rate * g, head, grad(loss)(head))

    base = local_train(task, local, participation="sampled")
    note = "the server's step on the head; 0 leaves it as it is"
    return changed(
        base,
        name="fedgh",
        hyper={**base.hyper, "server_lr": Hyper(0.3, 0.0, note=note, server=True)},
        init_server=init_server,
        init_client=init_client,
        broadcast=lambda server, ctx: server,
        begin=begin,
        phases=(*base.phases, class_sums(task, "class means")),
        finish=finish,
        aggregate=aggregate,
        private=lambda leaf: leaf in task.leaf_names,
        sparse={"upload/means": "upload/held"},
    )
