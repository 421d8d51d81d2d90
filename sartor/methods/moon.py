"""MOON: FedAvg that pulls a client's features to the global model's, away from its own last ones.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021 (arXiv 2103.16257), Algorithm 1.

| symbol | here | meaning |
|---|---|---|
| w^t | server["params"] | the global model |
| w_i^{t-1} | client["previous"] | the body of the client's last local model |
| z, z_glob, z_prev | features | of the model in training, the received one and the last one |
| μ | contrast_strength | the weight of the contrastive loss; 0 is FedAvg; tuned from 0.001 to 10 |
| τ | temperature | of the contrastive loss; 0.5 in the paper |
| η | local_lr | the step; 0.01 there, momentum 0.9, decay 1e-5, batch 64, 10 epochs |

ℓ_con = −log [e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})], with z_glob and
z_prev constants. A client that takes part for the first time has no last model, and no such loss.
Features are what the head receives: the paper's projection (two layers, 256 outputs, under the
classifier) is the end of the body of a network that has it. The paper scores the global model (the
point "global"); the personal model here is that after local training. Default μ = 1 (the authors'
parser; 5 in their CIFAR-10 runs).

A newcomer receives the global model and trains it on its own data; as it has no last model, that
is plain local training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Rule, fedavg, with_kept


def moon(task: Task, local: Local, *, rule: Rule = "normalized") -> Method:
    """Build MOON: FedAvg with the local objective L_i(w) + μ ℓ_con(w; w^t, w_i^{t-1}).

    Args:
        task: the network and its loss; its head must be linear.
        local: local training.
        rule: how the server averages; see ``fedavg``.
    """
    base = with_kept(fedavg(task, local, rule=rule), "previous", "has_previous")

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        never = tree.leaves(params)[0].new_zeros(())  # a factor of the contrastive loss
        previous = tree.select(params, task.is_body)
        return {**base.init_client(params, ctx), "previous": previous, "has_previous": never}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        features = task.represent(work["params"], batch)
        losses = task.criterion(task.classify(work["params"], features), batch.y)
        apart = contrast(features, work["towards"], work["away"], ctx.hyper["temperature"])
        weight = ctx.hyper["contrast_strength"] * work["has_previous"]
        # Alg. 1, client: ℓ = ℓ_sup + μ ℓ_con
        return task.mean(losses, batch) + weight * task.mean(apart, batch)

    train = descend(task, local, objective)

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        # Outside the objective: two passes without a gradient, and counted as such.
        towards = task.represent(ctx.common["params"], batch)
        away = task.represent(work["previous"], batch)
        new = train.step({**work, "towards": towards, "away": away}, batch, ctx)
        return {k: v for k, v in new.items() if k not in ("towards", "away")}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, upload = base.finish(client, work, ctx)
        last = tree.select(work["params"], task.is_body)
        yes = torch.ones_like(work["has_previous"])
        return {**kept, "previous": last, "has_previous": yes}, upload

    return changed(
        base,
        name="moon",
        hyper={
            **base.hyper,
            "contrast_strength": Hyper(1.0, 0.0, note="the contrastive loss; 0 is FedAvg"),
            "temperature": Hyper(0.5, 0.0, open_low=True, note="of the contrastive loss"),
        },
        init_client=init_client,
        phases=(replace(train, step=step),),
        finish=finish,
        headline="post",
    )


def contrast(features: Tensor, towards: Tensor, away: Tensor, temperature: Tensor) -> Tensor:
    """Return ℓ_con of each sample: −log σ((cos(z, z_glob) − cos(z, z_prev))/τ)."""
    unit = _unit(features)
    gap = (unit * (_unit(towards) - _unit(away))).sum(-1)
    return torch.logaddexp(torch.zeros_like(gap), -gap / temperature)


def _unit(features: Tensor) -> Tensor:
    """Return vectors of length 1, and zero where there is none."""
    square = features.square().sum(-1, keepdim=True)
    some = square > 0
    return torch.where(some, features / torch.where(some, square, 1.0).sqrt(), 0.0 * features)
