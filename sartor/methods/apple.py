"""APPLE: each client learns how much of every client's published core enters its own model.

Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI
2022 (arXiv 2110.08394).

| symbol | here | meaning |
|---|---|---|
| w_j^C | server["cores"] | the core models: a table over clients, which the server only forwards |
| p_i | start + work["relation"]["shift"] | the directed relations of client i; never sent |
| w_i^P | Σ_j p_ij w_j^C | the personal model, which is trained and scored; never sent |
| p_0 | common["share"] | n_j/n, towards which p_i is pulled at first |
| η_1 | local_lr | the step of the own core; 0.01 in the authors' runs |
| η_2 | relation_lr | the step of p_i; 0.001, with momentum 0.9, in the authors' runs |
| μ | pull | the strength of the pull; 0.1 in the authors' runs |
| L | pull_rounds | the rounds with a pull: 0.1 of all in the authors' runs, 16 of 160; 5 here |
| K | budget | cores that a client downloads a round; all if None |
| b | choice_base, choice_growth | max(1.5, rK/M): cores are drawn with probability ∝ b^|p_ij| |
| λ(r) | fade | cosine (cos(πr/L) + 1)/2 or exponential 0.001^(r/L) for r < L, then 0 |

p_i is on no simplex and never normalised. A step moves the own core by −η_1 p_ii g and every p_ij
by −η_2(⟨g, w_j^C⟩ + λ(r) μ (p_ij − p_0j)), both from one gradient g = ∇ℓ(w_i^P).

Differs from the authors' code: its penalty has no ½ (halve their μ), and its cores start as unequal
networks (`start_cores="own"`: here every leaf of the common start in an order of its own).
`lr_decay` and a schedule fade both rates, as in the authors' code. As p_ii is near 1/M, a core
hardly moves: `core_rate="times_clients"` (the default) steps with M·η_1, as a public
re-implementation does; "plain" is the paper's, slower and safer: M times the step also enters all
other clients' models, which may diverge over many rounds of unlike clients. Weight decay of local
training pulls a core to 0 and p_i to where it began.

With a budget K a client keeps its own core and a copy of every other, asks for K of them with its
upload, and gets them in its next round; copies that were not renewed still enter w_i^P. First it
asks for those it never got (in a random order), then without replacement with probability
∝ b^|p_ij| (the authors' code never marks a core as got, and so draws evenly for ever). Its copies
begin at the common start, or with `start_cores="own"` at a download of all cores before round 0.
The room for them is max_clients models a client. K = M − 1 gives the numbers without a budget.

A newcomer has no core among the others yet: it mixes theirs by p_0, and training teaches it p_i.
With a budget there is no rule for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import rng, tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, ServerContext, changed, client_weights
from sartor.core.mixing import at, combine, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train
from sartor.methods.parts.starts import shuffled

Shape = Literal["exponential", "cosine"]


def apple(
    task: Task,
    local: Local,
    *,
    start: Literal["samples", "uniform", "self"] = "samples",
    start_cores: Literal["common", "own"] = "common",
    core_rate: Literal["times_clients", "plain"] = "times_clients",
    shape: Shape = "exponential",
    budget: int | None = None,
    choice_base: float = 1.5,
    choice_growth: float = 1.0,
    max_clients: int = 256,
) -> Method:
    """Build APPLE: min over (w_i^C, p_i) of L_i(Σ_j p_ij w_j^C) + λ(r)(μ/2)‖p_i − p_0‖².

    Args:
        task: the network and its loss.
        local: local training of the own core and the relations together.
        start: where p_i begins: at n_j/n, at 1/M, or with the own core alone.
        start_cores: one start for all cores, or another one for every client.
        core_rate: whether the own core's step is multiplied by the number of clients (and, with
            momentum μ, by 1 − μ).
        shape: how the pull to p_0 fades.
        budget: the other cores that a client downloads a round; None is all, its own included.
        choice_base: the least base b of the draw of downloads; 1 draws evenly.
        choice_growth: how fast the base grows: b = max(choice_base, choice_growth·r·K/M).
        max_clients: room for relations (with a budget, for copies of cores) that every client
            keeps; at least the number of clients.
    """
    if budget is not None and budget < 1:
        raise ConfigError(f"budget must be >= 1 core a round, got {budget}; None sends all cores.")
    if not (choice_base > 0 and choice_growth >= 0):
        raise ConfigError(
            "choice_base must be > 0 and choice_growth >= 0, got "
            f"{choice_base:g} and {choice_growth:g}; the authors' are 1.5 and 1."
        )
    limited = budget is not None

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        num = ctx.sizes.shape[0]
        if num > max_clients:
            raise ConfigError(
                f"apple keeps relations to max_clients={max_clients} clients, but there are {num}; "
                f"set max_clients={num}."
            )
        cores = repeated(params, num)
        server = {"cores": _own_starts(cores, ctx) if start_cores == "own" else cores}
        if budget is None:
            return server
        luck = rng.uniform(rng.fold(ctx.key, "downloads"), (num, num), torch.float64)
        luck = luck - 2.0 * torch.eye(num, dtype=luck.dtype, device=luck.device)
        return {**server, "wish": luck.topk(min(budget, num - 1)).indices}

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        share = {"share": client_weights(ctx)}
        return share if limited else {"cores": server["cores"], **share}

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        ids = at(server["wish"], index)
        return {"ids": ids, "cores": tree.map(lambda t: t.index_select(0, ids), server["cores"])}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        relation = {"shift": tree.leaves(params)[0].new_zeros(max_clients)}
        client = {"relation": relation, **local.start(core=params, relation=relation)}
        if not limited:
            return client
        copies, got = repeated(params, max_clients), relation["shift"] > 0
        return {**client, "core": params, "copies": copies, "got": got}

    def is_own(ctx: ClientContext) -> Tensor:
        """Mark the client's own entry, (clients,); none for a client outside the table."""
        return torch.arange(len(ctx.common["share"]), device=ctx.index.device) == ctx.index

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        if limited:
            ids, new = ctx.own["ids"], ctx.own["cores"]
            copies = tree.map(lambda old, row: old.index_copy(0, ids, row), client["copies"], new)
            got = client["got"].index_fill(0, ids, True)
            return {**client, "copies": copies, "got": got}
        cores = ctx.common["cores"]
        mine = ctx.index.clamp(max=len(ctx.common["share"]) - 1)
        core = tree.map(lambda leaf: at(leaf, mine), cores)
        return {"core": core, "relation": client["relation"], **local.kept(client)}

    def relations(work: Tree, ctx: ClientContext) -> Tensor:
        """Return p_i, (clients,)."""
        share = ctx.common["share"]
        first = {
            "samples": share,
            "uniform": torch.ones_like(share) / len(share),
            "self": is_own(ctx).to(share.dtype),
        }[start]
        return first + work["relation"]["shift"][: len(share)]

    def model(work: Tree, ctx: ClientContext) -> Tree:
        p, own = relations(work, ctx), is_own(ctx)
        # Alg., personal model: w_i^P = Σ_j p_ij w_j^C. The table stays in the common message and
        # enters as a product, so that no client needs a copy of it.
        cores = tree.narrow(work["copies"], 0, 0, len(p)) if limited else ctx.common["cores"]
        others = combine(torch.where(own, 0.0, p), cores)
        weight = torch.where(own, p, 0.0).sum()
        return tree.map(lambda rest, core: rest + weight * core, others, work["core"])

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        away = (relations(work, ctx) - ctx.common["share"]).square().sum()
        strength = ctx.hyper["pull"] * fade(ctx.round, ctx.hyper["pull_rounds"], shape)
        # Alg., objective of client i: L_i(w_i^P) + λ(r)(μ/2)‖p_i − p_0‖²
        return task.loss(model(work, ctx), batch) + 0.5 * strength * away

    local.only_sgd("apple", "has rates of SGD for cores and relations")
    names = {"core": "core_lr", "relation": "relation_lr"}
    train = descend(task, local, objective, over=("core", "relation"), lr=names)

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        rate = local.rate(ctx)
        if core_rate == "times_clients":
            rate = rate * len(ctx.common["share"])
            if local.momentum:  # which lengthens steps by 1/(1 − μ)
                rate = rate * (1.0 - ctx.hyper["momentum"])
        rates = {"core_lr": rate, "relation_lr": ctx.hyper["relation_lr"] * local.fade(ctx)}
        return train.step(work, batch, ctx._replace(hyper={**ctx.hyper, **rates}))

    def choose(work: Tree, ctx: ClientContext) -> Tensor:
        """Draw the cores to download next, (K,): those never got first, then ∝ b^|p_ij|."""
        p, num = relations(work, ctx).abs().double(), len(ctx.common["share"])
        share = len(ctx.own["ids"]) / num
        base = (choice_growth * share * (ctx.round + 1).double()).clamp(min=choice_base)
        # The K largest of ln(weight) + Gumbel noise are a draw without replacement.
        luck = rng.uniform(rng.fold(ctx.key, "downloads"), (num,), torch.float64)
        noise = -torch.log(-torch.log(luck))
        score = torch.where(work["got"][:num], p * base.log() + noise, noise + 1e9)
        return torch.where(is_own(ctx), -torch.inf, score).topk(len(ctx.own["ids"])).indices

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        if limited:
            return {k: work[k] for k in client}, {"core": work["core"], "wish": choose(work, ctx)}
        return {"relation": work["relation"], **local.kept(work)}, {"core": work["core"]}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        # Alg., server: it stores and forwards, and averages nothing.
        cores = put_rows(server["cores"], ctx.cohort, uploads["core"], ctx.present)
        if not limited:
            return {"cores": cores}
        wish = {"wish": put_rows(server["wish"], ctx.cohort, uploads["wish"], ctx.present)}
        return {"cores": cores, **wish}

    method = changed(
        local_train(task, local, participation="sampled"),
        name="apple",
        hyper={
            **local.hyper,
            "relation_lr": Hyper(
                0.01 * (1.0 - local.momentum), 0.0, note="the step of the relations; 0 keeps them"
            ),
            "pull": Hyper(0.1, 0.0, note="the early pull of the relations to n_j/n"),
            "pull_rounds": Hyper(5.0, 0.0, note="the rounds with a pull; 0 leaves it out"),
        },
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        begin=begin,
        phases=(replace(train, step=step),),
        finish=finish,
        aggregate=aggregate,
        model=model,
        headline="post",
        private=lambda leaf: leaf in ("relation", "shift", "copies", "got"),
    )
    if not limited:
        return method
    if start_cores == "common":
        return changed(method, address=address)

    def take_all(client: Tree, ctx: ClientContext) -> Tree:
        cores, num = ctx.common["cores"], len(ctx.common["share"])
        copies = tree.map(lambda old, t: torch.cat((t, old[num:])), client["copies"], cores)
        core = tree.map(lambda leaf: at(leaf, ctx.index), cores)
        got = client["got"] | (torch.arange(max_clients, device=ctx.index.device) < num)
        return {**client, "copies": copies, "core": core, "got": got}

    first = changed(
        method,
        broadcast=lambda server, ctx: {"cores": server["cores"], "share": client_weights(ctx)},
        begin=take_all,
        phases=(),
        finish=lambda client, work, ctx: (work, {}),
        aggregate=lambda server, uploads, ctx: server,
    )
    return changed(method, address=address, before=first)


def fade(round_index: Tensor, length: Tensor, shape: Shape) -> Tensor:
    """Return λ(r): 1 in round 0, falling to 0 from round ``length`` on.

    >>> fade(torch.tensor(5), torch.tensor(10.0), "cosine")
    tensor(0.5000)
    """
    part = round_index / length.clamp(min=1e-12)
    falling = 0.5 * (torch.cos(math.pi * part) + 1.0) if shape == "cosine" else 1e-3**part
    return torch.where(round_index < length, falling, torch.zeros_like(falling))


def _own_starts(cores: Tree, ctx: ServerContext) -> Tree:
    """Put the entries of every leaf of every core into an order of its own."""
    num = ctx.sizes.shape[0]
    keys = rng.fold(ctx.key, "cores")[None].expand(num, 2)
    keys = rng.fold(keys, torch.arange(num, device=keys.device))

    def one(core: Tree, key: Tensor) -> Tree:
        return {name: shuffled(leaf, rng.fold(key, name)) for name, leaf in core.items()}

    return torch.func.vmap(one, chunk_size=1)(cores, keys)
