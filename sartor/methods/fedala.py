"""FedALA: FedAvg whose clients learn, element by element, how much of the global model to take.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning", AAAI 2023 (arXiv 2212.01197). A competitor of Sun et al. 2025.

| symbol | here | meaning |
|---|---|---|
| Θ | server["params"] | the global model: FedAvg's average |
| Θ_i | client["top"] | the client's last trained model, of which only the top layers matter |
| W_i | client["mix"] | the share of Θ in every element of the top layers, in [0, 1]; kept |
| Θ̂_i | work["params"] | Θ below, Θ_i + (Θ − Θ_i)⊙W_i on top: where local training starts |
| η | mix_lr | the step on W; 1 |
| p | layers | how many top layers are mixed; 1 |
| s | share | the share of the training data that W is learnt on; 0.8 |
| threshold, window | calm, window | the first time, W is learnt until the last losses are calm |

In a round the client takes gradient steps on W, one pass over its sample, and clips W to [0, 1]
("mix"). The first time ("mix-start", on the batches of the same stream) it passes on until more
than `window` losses (of the last batch of each pass) are there and the standard deviation of the
last `window` is below `calm`, but at most `start_passes` times: 0.1 in the authors' code, 0.01 in
its manual, where small values may never end. Layers count modules that own parameters, not tensors;
0 is FedAvg. The model is scored after W is learnt and before local training ("pre"), as the authors
do; "post" is after local training.

Differs from the authors' code: the sample is a random subset, not a slice of the stored order, and
all samples where local training has full batches; a client that has not trained yet takes Θ itself;
by default only participants learn W (`ala_for="all"` lets absent clients take their mixture of the
new global model in every round, as that code does). W is that client's own, whichever worker serves
it.

A newcomer takes the global model as it is, trains on it, and has its own W from its second round
on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, Phase, changed
from sartor.core.mixing import clip
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg, with_kept


def fedala(
    task: Task,
    local: Local,
    *,
    layers: int = 1,
    share: float = 0.8,
    calm: float = 0.1,
    window: int = 10,
    start_passes: int = 100,
    ala_for: Literal["participants", "all"] = "participants",
) -> Method:
    """Build FedALA: min Σ p_i L_i(Θ_i), each Θ_i trained from a learnt mixture.

    Args:
        task: the network and its loss.
        local: local training; W is learnt on batches of the same size, by plain steps.
        layers: top layers that are mixed; the rest is taken from the global model.
        share: the share of the training data that W is learnt on, drawn anew in every round.
        calm: the standard deviation of losses below which the first learning ends.
        window: the number of losses it looks at.
        start_passes: the most passes of the first learning.
        ala_for: which clients mix the global model into their own in a round.
    """
    faults = below(0, "0 is FedAvg.", layers=layers)
    if not 0 < share <= 1:
        faults.append(f"share must be > 0 and <= 1, got {share:g}; 0.8 is the paper's.")
    faults += below(0, "0 takes all start_passes.", calm=calm)
    faults += below(2, "the paper's is 10.", window=window)
    refuse([*faults, *below(1, "100 is the default.", start_passes=start_passes)])
    top = _top_layers(task, layers)
    plain_fedavg = replace(fedavg(task, local), name="fedala")
    if not top:
        return plain_fedavg
    base = with_kept(plain_fedavg, "mix", "started")
    (train,) = base.phases

    def own(params: Tree) -> Tree:
        return tree.select(params, lambda leaf: leaf in top)

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        no = torch.zeros_like(ctx.index, dtype=torch.bool)
        mine = {"top": own(params), "mix": tree.map(torch.ones_like, own(params))}
        return {**base.init_client(params, ctx), **mine, "trained": no, "started": no.clone()}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        given = own(ctx.common["params"])
        mine = tree.where(client["trained"], client["top"], given)
        return {**base.begin(client, ctx), "top": mine}

    def blend(work: Tree, ctx: ClientContext) -> Tree:
        """Return Θ̂_i; Θ itself to the bit where W is 1, Θ_i where it is 0."""
        # Alg., adaptive local aggregation: Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i in the top layers.
        given = ctx.common["params"]
        mixed = tree.map(torch.lerp, work["top"], own(given), work["mix"])
        return {**given, **mixed}

    def differs(work: Tree, ctx: ClientContext) -> Tensor:
        """Say whether there is anything to mix."""
        given = own(ctx.common["params"])
        apart = tree.map(lambda a, b: (a != b).any(), work["top"], given)
        return torch.stack(tree.leaves(apart)).any()

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        return task.loss(blend(work, ctx), batch)

    def watched(work: Tree, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tree]:
        loss = objective(work, batch, ctx)
        moved = torch.cat((work["losses"][1:], loss.reshape(1)))
        losses = torch.where(batch.last, moved, work["losses"])
        return loss, {"losses": losses, "passes": work["passes"] + batch.last}

    plain = replace(local.plain, steps=None, drop_last=False)

    def learn(name: str, passes: int) -> Phase:
        first = name == "mix-start"
        phase = descend(
            task,
            replace(plain, epochs=passes),
            watched if first else objective,
            name=name,
            over=("mix",),
            lr="mix_lr",
            aux=first,
            # Alg., step on W_i: clip(W_i − η ∇L ⊙ (Θ − Θ_i), 0, 1).
            after=lambda work, ctx: {**work, "mix": tree.map(clip, work["mix"])},
        )
        sampled = 1.0 if local.batch is None else share
        # Plain steps leave the momentum of training alone.
        return replace(
            phase, stream="mix", share=sampled, shuffle=False, leave=lambda work, ctx: work
        )

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        losses = tree.leaves(work["top"])[0].new_zeros(window)
        return {**work, "losses": losses, "passes": torch.zeros_like(ctx.index)}

    def stop(work: Tree, ctx: ClientContext) -> Tensor:
        return (work["passes"] > window) & (work["losses"].std(correction=0) < calm)

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        rest = {k: v for k, v in work.items() if k not in ("losses", "passes")}
        started = work["started"] | (work["passes"] > 0)
        return {**rest, "params": blend(work, ctx), "started": started}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, upload = base.finish(client, work, ctx)
        trained = torch.ones_like(client["trained"])
        return {**kept, "top": own(work["params"]), "trained": trained}, upload

    mixing = (
        replace(learn("mix", 1), when=lambda work, ctx: work["started"] & differs(work, ctx)),
        replace(
            learn("mix-start", start_passes),
            enter=enter,
            leave=leave,
            stop=stop,
            when=lambda work, ctx: ~work["started"] & differs(work, ctx),
        ),
    )
    phases: tuple[Phase, ...] = (*mixing, train)
    if ala_for == "all":
        phases = (*mixing, replace(train, when=lambda work, ctx: ctx.reports))
    note = "the step on the mixing weights; 0 is FedAvg"
    return changed(
        base,
        hyper={**base.hyper, "mix_lr": Hyper(1.0, 0.0, note=note)},
        init_client=init_client,
        begin=begin,
        phases=phases,
        adapt=mixing,
        finish=finish,
        who="everyone_trains" if ala_for == "all" else "cohort",
        private=lambda leaf: leaf in ("mix", "top"),
    )


def _top_layers(task: Task, layers: int) -> frozenset[str]:
    """Return the leaves of the last layers, where the head is the last of all."""
    leaves = sorted(task.leaf_names, key=task.is_head)  # stable: the order of the network
    owners = list(dict.fromkeys(leaf.rpartition(".")[0] for leaf in leaves))
    chosen = owners[max(len(owners) - layers, 0) :]
    return frozenset(leaf for leaf in leaves if leaf.rpartition(".")[0] in chosen)
