"""FedAvg: clients take a few steps from the common model and the server averages them.

One model for all.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017. Step-size form: Chen et al. (arXiv 2103.01901), Algorithm 1 and Eq. (8). Over-relaxation
("AM"): pFedBreD (Shi et al., NeurIPS 2023), Algorithm 1 line 12.

| symbol | here | meaning |
|---|---|---|
| w_t | server["params"] | the global model |
| p_i | weights | a client's weight: n_i/N, 1/m, or given |
| η_l | local_lr | the step of local training |
| η_t | server_lr | the server's step (rules `chen`, `p_weighted`) |
| β | relax | over-relaxation of the new average (rules `normalized`, `uniform`); 1 is plain |

Rules: `normalized` Σ_S n_i w_i / Σ_S n_i; `uniform` the plain mean over S; `chen`
w − (m η_t/(N|S|)) Σ_S n_i (w − w_i); `p_weighted` the same with given p_i in place of n_i/N. With
all clients present and η_t = β = 1 they agree for equal n_i. `chen` is unbiased over draws, but its
weights do not sum to 1 in one draw.

A newcomer receives the global model; fine-tuning makes it one of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from sartor.compose import fine_tuned
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import (
    ClientContext,
    Method,
    ServerContext,
    Use,
    Wire,
    changed,
    weighted_mean,
    weighted_sum,
)
from sartor.core.method import client_weights as shares
from sartor.core.task import Task
from sartor.core.tree import Tree

Rule = Literal["normalized", "uniform", "chen", "p_weighted"]
Weights = Literal["uniform", "samples"]
"""How methods whose paper averages in one way name it: evenly, or by numbers of samples."""


def fedavg(
    task: Task,
    local: Local,
    *,
    rule: Rule = "normalized",
    client_weights: tuple[float, ...] | None = None,
) -> Method:
    """Build FedAvg: min_w Σ p_i L_i(w).

    Args:
        task: the network and its loss.
        local: local training.
        rule: how the server averages; see the module's docstring.
        client_weights: p_i for the rule `p_weighted`, one per client, with sum 1; equal weights if
            None.
    """
    if client_weights is not None and rule != "p_weighted":
        raise ConfigError(
            f"client_weights have no effect with rule={rule!r}; use rule='p_weighted', or leave "
            "them out."
        )
    given = () if client_weights is None else tuple(client_weights)
    if any(not p >= 0 for p in given):
        raise ConfigError(f"client_weights must be >= 0, got {min(given):g}; 0 leaves one out.")
    if given and abs(sum(given) - 1.0) > 1e-3:
        raise ConfigError(
            f"client_weights must have sum 1, got a sum of {sum(given):g}; divide them by it "
            "(the length of the server's step is server_lr)."
        )
    averages = rule in ("normalized", "uniform")

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {"params": params}

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        return {"params": server["params"]}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return local.start(params=params)

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": ctx.common["params"], **local.kept(client)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return local.kept(work), {"params": work["params"]}

    def weights(ctx: ServerContext) -> Tensor:
        """Return p_i of the cohort, zero for the absent."""
        p = shares(ctx, "samples" if rule in ("normalized", "chen") else "uniform")
        if client_weights is not None:
            if len(client_weights) != p.shape[0]:
                raise ConfigError(
                    f"client_weights has {len(client_weights)} values, but there are "
                    f"{p.shape[0]} clients; give one per client."
                )
            p = p.new_tensor(client_weights)
        return p[ctx.cohort] * ctx.present

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        old, p = server["params"], weights(ctx)
        if averages:
            new = weighted_mean(uploads["params"], p, old)
            beta = ctx.hyper["relax"]
            # Alg. 1 line 12 of pFedBreD: (1 − β) w_t + β · mean. With β = 1 it is the mean itself,
            # to the bit.
            return {"params": tree.map(lambda w, n: n + (beta - 1.0) * (n - w), old, new)}
        # Alg. 1 of Chen et al., server step, with the weights p_i of Eq. (8).
        num = ctx.present.sum().clamp(min=1)
        step = ctx.hyper["server_lr"] * ctx.sizes.shape[0] / num * p
        drift = tree.map(lambda w, w_i: w - w_i, old, uploads["params"])
        return {"params": tree.sub(old, weighted_sum(drift, step))}

    own = (
        {"relax": Hyper(1.0, 0.0, note="1 is plain averaging, 2 is the AM trick", server=True)}
        if averages
        else {"server_lr": Hyper(1.0, 0.0, note="1 is plain averaging", server=True)}
    )
    return Method(
        name="fedavg",
        hyper={**local.hyper, **own},
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        begin=begin,
        phases=(descend(task, local),),
        finish=finish,
        aggregate=aggregate,
        use=Use(centre=lambda server, ctx: server["params"]),
        wire=Wire(averaged=("params",)),
    )


def with_kept(base: Method, *entries: str) -> Method:
    """Return a record whose clients keep some more entries from round to round.

    ``begin`` takes them from the client's state into ``work``, and ``finish`` puts them back; what
    they are at first is up to ``init_client`` of the method that is built on this record.
    """

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {**base.begin(client, ctx), **{k: client[k] for k in entries}}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, upload = base.finish(client, work, ctx)
        return {**kept, **{k: work[k] for k in entries}}, upload

    return changed(base, begin=begin, finish=finish)


def averaged(task: Task, local: Local, weights: Weights) -> Method:
    """Return FedAvg for methods that build on it: its server averages evenly, or by samples."""
    return fedavg(task, local, rule="normalized" if weights == "samples" else "uniform")


def fedavg_ft(
    task: Task,
    local: Local,
    *,
    rule: Rule = "normalized",
    client_weights: tuple[float, ...] | None = None,
    ft_epochs: int | None = None,
    ft_steps: int | None = None,
    ft_pull: bool = False,
) -> Method:
    """Build FedAvg followed by local fine-tuning.

    Each client's copy of the global model trains on before it is used.

    Args:
        task: the network and its loss.
        local: local training; fine-tuning uses the same batches, momentum and decay.
        rule: see ``fedavg``.
        client_weights: see ``fedavg``.
        ft_epochs: epochs of fine-tuning; those of local training if None, none at all (plain
            FedAvg) if 0.
        ft_steps: steps of fine-tuning; replaces epochs.
        ft_pull: whether fine-tuning is pulled back to the global model, with strength
            ``ft_prox_strength``.
    """
    base = replace(fedavg(task, local, rule=rule, client_weights=client_weights), name="fedavg-ft")
    return fine_tuned(base, task, local, epochs=ft_epochs, steps=ft_steps, pull=ft_pull)
