"""FedFomo: each client moves to the mixture of a few others' models that lowers its own loss most.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model
Optimization", ICLR 2021 (arXiv 2012.08565). A competitor of Shi et al. 2023 (Table 8).

| symbol | here | meaning |
|---|---|---|
| θ_i | client["params"], server["models"] | the client's model, and all clients' last uploads |
| θ_i^ref | client["reference"] | its model at the start of its previous local training |
| K | picks | the models that a client compares, its own included; 5 or 10 in the authors' runs |
| w̃_ij | work["raw"] | (L_i(θ_i^ref) − L_i(θ_j)) / ‖θ_j − θ_i^ref‖, own model first |
| P | server["affinity"] | how much model j helped client i: row i adds up w̃_i |
| ε_0 | explore_start | how often a pick is random in round 0 (`explore`); authors' runs: 0.3 |
| – | explore_decay | what ε loses a round, 0.05: ε_t = max(ε_0 − 0.05 t, 0) |

A round: the server sends client i the K − 1 others with the largest P_ij among those that uploaded
in the last round; the client takes losses on its validation samples, sets w_ij = max(w̃_ij, 0) / Σ
and θ_i ← Σ_j w_ij θ_j; that is the new reference, from which it trains. Before round 1 there is
no client to pick, so round 0 is local training. The point "pre" is θ_i after mixing, "post" after
training.

Differs from the authors' code: distances are Euclidean plus 1e-5 as in public re-implementations
(`distance="l1"` is the code's default, "squared" what it calls l2); if no model helps, the client
keeps its model (`fallback="reference"` goes back, as the code does); P adds the raw w̃ as in the
paper (`affinity="normalised"` divides by |Σ w̃|, as the code does); picks are not explored unless
`explore`. The validation samples are a fixed part of every client's training samples, which it
never trains on. Ties between picks are broken at random.

A newcomer receives the models that have helped the others most, and mixes them by its own losses.
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
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Phase,
    ServerContext,
    changed,
    weighted_sum,
)
from sartor.core.mixing import at, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train

Distance = Literal["l2", "l1", "squared"]


def fedfomo(
    task: Task,
    local: Local,
    *,
    picks: int = 5,
    explore: bool = False,
    available: Literal["last_round", "ever"] = "last_round",
    select_on: Literal["holdout", "validation"] = "holdout",
    val_share: float = 0.2,
    distance: Distance = "l2",
    fallback: Literal["current", "reference"] = "current",
    affinity: Literal["raw", "normalised"] = "raw",
) -> Method:
    """Build FedFomo: first-order steps on every client's validation loss, then local training.

    Args:
        task: the network and its loss.
        local: local training, on what is left of the client's training samples.
        picks: K, the client's own model and K − 1 others; fewer if there are not so many.
        explore: whether some picks are random, less often from round to round.
        available: which uploads may be picked: those of the last round, or all clients' last ones.
        select_on: the validation samples: a part of the training samples, or the federation's own.
        val_share: how large that part is.
        distance: how far a model is from the reference.
        fallback: what a client takes if no model helps it: the model it has, or its reference.
        affinity: what P adds up: w̃ as it is, or divided by |Σ w̃|.
    """
    if picks < 1 or not 0 < val_share < 1:
        raise ConfigError(
            f"fedfomo needs picks >= 1 and 0 < val_share < 1, got picks={picks} and "
            f"val_share={val_share:g}; picks=5 and val_share=0.2 are the authors'."
        )

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        num = ctx.sizes.shape[0]
        models = repeated(params, num)
        like = tree.leaves(params)[0]
        start = 0.1 * torch.eye(num, dtype=like.dtype, device=like.device)
        return {"models": models, "affinity": start, "there": torch.zeros_like(ctx.sizes) > 0}

    def choose(
        scores: Tensor, there: Tensor, key: Tensor, ctx: ServerContext
    ) -> tuple[Tensor, Tensor]:
        """Pick one after the other: ids, and whether there was a client left to pick."""
        num = len(scores)
        order = rng.permutation(rng.fold(key, "ties"), num)  # the first of equals is a random one
        left, scores = there.index_select(0, order), scores.index_select(0, order)
        slots = torch.arange(num, device=key.device)
        ids, found = [slots[:0]], [left[:0]]
        for k in range(min(picks, num) - 1):
            best = torch.where(left, scores, -torch.inf).argmax()
            if explore:
                luck = rng.uniform(rng.fold(key, k), (num + 1,), scores.dtype)
                anyone = torch.where(left, luck[:num], -1.0).argmax()
                best = torch.where(luck[num] < exploration(ctx), anyone, best)
            ids.append(order.index_select(0, best[None]))
            found.append(left.index_select(0, best[None]))
            left = left & (slots != best)
        return torch.cat(ids), torch.cat(found)

    def choose_for(server: Tree, index: Tensor, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        row = at(server["affinity"], index)
        others = torch.arange(len(row), device=row.device) != index
        return choose(row, server["there"] & others, rng.fold(ctx.key, "picks", index), ctx)

    def message(server: Tree, ids: Tensor, found: Tensor) -> Tree:
        rows = tree.map(lambda leaf: leaf.index_select(0, ids), server["models"])
        return {"models": rows, "found": found}

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        return message(server, *choose_for(server, index, ctx))

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        helped = server["affinity"].sum(0) - server["affinity"].diagonal()
        # The stream keeps its first name: another one would give newcomers other models.
        return message(server, *choose(helped, server["there"], rng.fold(ctx.key, "greet"), ctx))

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"params": params, "reference": params, **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        raw = tree.leaves(client["params"])[0].new_zeros(1 + len(ctx.own["found"]))
        return {**client, "raw": raw}

    def rivals(work: Tree, ctx: ClientContext) -> Tree:
        """Return the models that are compared with the reference, the client's own first."""
        rest = ctx.own["models"]
        return tree.map(lambda own, more: torch.cat((own[None], more)), work["params"], rest)

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        return {**work, "sums": work["raw"].new_zeros(2 + len(work["raw"]))}

    def compare(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        table = rivals(work, ctx)
        rows = [tree.map(lambda leaf, k=k: leaf[k], table) for k in range(len(work["raw"]))]
        losses = [(task.losses(m, batch) * batch.mask).sum() for m in (work["reference"], *rows)]
        return {**work, "sums": work["sums"] + torch.stack([batch.mask.sum(), *losses])}

    def mix(work: Tree, ctx: ClientContext) -> Tree:
        sums, table, old = work["sums"], rivals(work, ctx), work["reference"]
        gain = (sums[1] - sums[2:]) / sums[0].clamp(min=1.0)
        raw = gain / _distances(table, old, distance)  # Alg., client: w̃_ij
        found = torch.cat((raw.new_ones(1, dtype=torch.bool), ctx.own["found"]))
        raw = torch.where(found & raw.isfinite(), raw, 0.0)  # a model that diverged helps no client
        total = raw.clamp(min=0.0).sum()
        weights = raw.clamp(min=0.0) / torch.where(total > 0, total, 1.0)
        alone = work["params"] if fallback == "current" else old
        # Alg., client: θ_i ← Σ_j w_ij θ_j with w_ij = max(w̃_ij, 0) / Σ
        new = tree.where(total > 0, weighted_sum(table, weights), alone)
        kept = {k: v for k, v in work.items() if k != "sums"}
        return {**kept, "params": new, "reference": new, "raw": raw}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {k: work[k] for k in client}, {"params": work["params"], "raw": work["raw"]}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        raw = uploads["raw"]
        if affinity == "normalised":
            raw = raw / raw.sum(1, keepdim=True).abs().clamp(min=1e-9)
        # The picks of this round follow from the same key, so that no client has to report them.
        picked, _ = torch.func.vmap(lambda i: choose_for(server, i, ctx))(ctx.cohort)
        ids = torch.cat((ctx.cohort[:, None], picked), 1)
        # Alg., server: P_i ← P_i + w̃_i
        rows = server["affinity"].index_select(0, ctx.cohort).scatter_add(1, ids, raw)
        tables = {"models": server["models"], "affinity": server["affinity"]}
        new = {"models": uploads["params"], "affinity": rows}
        came = torch.zeros_like(server["there"]).index_copy(0, ctx.cohort, ctx.present)
        came = came | server["there"] if available == "ever" else came
        return {**put_rows(tables, ctx.cohort, new, ctx.present), "there": came}

    end = 1.0 if select_on == "validation" else 1.0 - val_share
    take = Phase("mix", compare, enter, mix, batch=64, shuffle=False)
    take = replace(take, data="val") if end == 1.0 else replace(take, part=(end, 1.0))
    hyper = dict(local.hyper)
    if explore:
        note = "how often a pick is random in round 0"
        hyper["explore_start"] = Hyper(0.3, 0.0, 1.0, note=note, server=True)
        hyper["explore_decay"] = Hyper(0.05, 0.0, note="what it loses a round", server=True)
    return changed(
        local_train(task, local, participation="sampled"),
        name="fedfomo",
        hyper=hyper,
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        phases=(take, replace(descend(task, local), part=(0.0, end))),
        finish=finish,
        aggregate=aggregate,
        adapt=(take,),
        headline="post",
        sparse={f"own/models/{k}": "own/found" for k in task.leaf_names},
        private=lambda leaf: leaf == "reference",
        message=newcomer_message,
        server=lambda server, ctx: {"affinity": server["affinity"]},
    )


def exploration(ctx: ServerContext) -> Tensor:
    """Return ε_t, the chance of a random pick in this round: max(ε_0 − decay · t, 0)."""
    return (ctx.hyper["explore_start"] - ctx.round * ctx.hyper["explore_decay"]).clamp(min=0.0)


def _distances(table: Tree, reference: Tree, kind: Distance) -> Tensor:
    """Return how far every row of a table is from the reference, (rows,), plus 1e-5."""
    away = tree.map(lambda rows, ref: (rows - ref).reshape(len(rows), -1), table, reference)
    size = torch.abs if kind == "l1" else torch.square
    total = torch.stack([size(leaf).sum(1) for leaf in tree.leaves(away)]).sum(0)
    return (total.sqrt() if kind == "l2" else total) + 1e-5
