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
| L | pull_rounds | the rounds with a pull: 0.1 of all in the authors' runs, 16 of 160 |
| λ(r) | fade | cosine (cos(πr/L) + 1)/2 or exponential 0.001^(r/L) for r < L, then 0 |

p_i is on no simplex and never normalised. A step moves the own core by −η_1 p_ii g and every p_ij
by −η_2(⟨g, w_j^C⟩ + λ(r) μ (p_ij − p_0j)), both from one gradient g = ∇ℓ(w_i^P).

Differs from the authors' code: its penalty has no ½ (halve their μ), and its cores start as
unequal networks (`start_cores="own"`: here every leaf of the common start in an order of its own).
As p_ii is near 1/M, a core hardly moves: `core_rate="times_clients"` (the default) steps with
M·η_1, as a public re-implementation does; "plain" is the paper's. Weight decay of local training
pulls a core to 0 and p_i to where it began. There is no download budget: everybody gets all cores.

A newcomer has no core among the others yet: it mixes theirs by p_0, and training teaches it p_i.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor import rng, tree
from sartor.errors import ConfigError
from sartor.hyper import Hyper
from sartor.local import Local, descend
from sartor.method import Batch, Hub, Method, Site, client_weights
from sartor.mixing import at, combine, put_rows
from sartor.task import Task
from sartor.tree import Tree

Shape = Literal["exponential", "cosine"]


def apple(
    task: Task,
    local: Local,
    *,
    start: Literal["samples", "uniform", "self"] = "samples",
    start_cores: Literal["common", "own"] = "common",
    core_rate: Literal["times_clients", "plain"] = "times_clients",
    shape: Shape = "exponential",
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
        max_clients: room for relations that every client keeps; at least the number of clients.
    """

    def init_server(params: Tree, hub: Hub) -> Tree:
        num = hub.sizes.shape[0]
        if num > max_clients:
            raise ConfigError(
                f"apple keeps relations to max_clients={max_clients} clients, but there are {num}; "
                f"set max_clients={num}."
            )
        cores = tree.map(lambda leaf: leaf.expand(num, *leaf.shape).clone(), params)
        return {"cores": _shuffled(cores, hub) if start_cores == "own" else cores}

    def broadcast(server: Tree, hub: Hub) -> Tree:
        return {"cores": server["cores"], "share": client_weights(hub)}

    def init_client(params: Tree, site: Site) -> Tree:
        relation = {"shift": tree.leaves(params)[0].new_zeros(max_clients)}
        return {"relation": relation, **local.start(core=params, relation=relation)}

    def is_own(site: Site) -> Tensor:
        """Mark the client's own entry, (clients,); none for a client outside the table."""
        return torch.arange(len(site.common["share"]), device=site.index.device) == site.index

    def begin(client: Tree, site: Site) -> Tree:
        cores = site.common["cores"]
        mine = site.index.clamp(max=len(site.common["share"]) - 1)
        core = tree.map(lambda leaf: at(leaf, mine), cores)
        return {"core": core, "relation": client["relation"], **local.kept(client)}

    def relations(work: Tree, site: Site) -> Tensor:
        """Return p_i, (clients,)."""
        share: Tensor = site.common["share"]
        first = {
            "samples": share,
            "uniform": torch.ones_like(share) / len(share),
            "self": is_own(site).to(share.dtype),
        }[start]
        return first + work["relation"]["shift"][: len(share)]

    def model(work: Tree, site: Site) -> Tree:
        p, own = relations(work, site), is_own(site)
        # The table stays in the common letter and enters as a product: no copy for every client.
        others = combine(torch.where(own, 0.0, p), site.common["cores"])
        weight = torch.where(own, p, 0.0).sum()
        return tree.map(lambda rest, core: rest + weight * core, others, work["core"])

    def objective(work: Tree, batch: Batch, site: Site) -> Tensor:
        away = (relations(work, site) - site.common["share"]).square().sum()
        strength = site.hyper["pull"] * fade(site.round, site.hyper["pull_rounds"], shape)
        return task.loss(model(work, site), batch) + 0.5 * strength * away

    rates = {"core": "core_lr", "relation": "relation_lr"}
    train = descend(objective, local, over=("core", "relation"), lr=rates)

    def step(work: Tree, batch: Batch, site: Site) -> Tree:
        rate = local.rate(site)
        if core_rate == "times_clients":
            rate = rate * len(site.common["share"])
            if local.momentum:
                rate = rate * (
                    1.0 - site.hyper["momentum"]
                )  # momentum lengthens steps by 1/(1 − μ)
        rates = {"core_lr": rate, "relation_lr": site.hyper["relation_lr"] * local.fade(site)}
        return train.step(work, batch, site._replace(hyper={**site.hyper, **rates}))

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        return {"relation": work["relation"], **local.kept(work)}, {"core": work["core"]}

    def aggregate(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        return {"cores": put_rows(server["cores"], hub.cohort, uploads["core"], hub.present)}

    return Method(
        name="apple",
        hyper={
            **local.hyper,
            "relation_lr": Hyper(
                0.01 * (1.0 - local.momentum), 0.0, note="the step of the relations; 0 keeps them"
            ),
            "pull": Hyper(0.1, 0.0, note="the early pull of the relations to n_j/n"),
            "pull_rounds": Hyper(5.0, 0.0, note="the rounds until the pull is gone"),
        },
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        begin=begin,
        phases=(replace(train, step=step),),
        finish=finish,
        aggregate=aggregate,
        model=model,
        private=lambda leaf: leaf in ("relation", "shift"),
        headline="post",
    )


def fade(round_index: Tensor, length: Tensor, shape: Shape) -> Tensor:
    """Return λ(r): 1 in round 0, falling to 0 from round ``length`` on.

    >>> fade(torch.tensor(5), torch.tensor(10.0), "cosine")
    tensor(0.5000)
    """
    part = round_index / length.clamp(min=1e-12)
    falling = 0.5 * (torch.cos(math.pi * part) + 1.0) if shape == "cosine" else 1e-3**part
    return torch.where(round_index < length, falling, torch.zeros_like(falling))


def _shuffled(cores: Tree, hub: Hub) -> Tree:
    """Put the entries of every leaf of every core into an order of its own."""
    num = hub.sizes.shape[0]
    keys = rng.fold(hub.key, "cores")[None].expand(num, 2)
    keys = rng.fold(keys, torch.arange(num, device=keys.device))

    def one(core: Tree, key: Tensor) -> Tree:
        return {
            name: leaf.reshape(-1)
            .index_select(0, rng.permutation(rng.fold(key, name), leaf.numel()))
            .reshape(leaf.shape)
            for name, leaf in core.items()
        }

    shuffled: Tree = torch.func.vmap(one, chunk_size=1)(cores, keys)
    return shuffled
