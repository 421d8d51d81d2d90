"""L2GD: a coin decides whether all clients take a local gradient step or a step to their average.

Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models" (arXiv 2002.05516),
Algorithm 1. It minimises (1/m) Σ [f_i(x_i) + (λ/2)‖x_i − x̄‖²], FedProx' objective with the global
model minimised out.

| symbol | here | meaning |
|---|---|---|
| x_i | client["params"] | the client's model, kept between rounds |
| x̄ | server["params"] | the average of the clients' models at the last exchange |
| α | m · local_lr | the paper's step; local_lr = α/m does not change with the number of clients |
| λ | prox_strength | the pull towards the average |
| p | average_probability | how often the coin says "average" (a one) |
| L | smoothness | of f_i, for preset `paper` |
| – | server["ones"], server["zeros"] | how long the two runs of the coming round are |

A zero: x_i ← x_i − (local_lr/(1−p)) ∇f_i(x_i). A one: x_i ← x_i + c (x̄ − x_i), c = local_lr λ/p;
c is capped at 1, full averaging. Ones leave x̄ as it is, so only a one after a zero costs an
exchange: a round here is one exchange, a run of ones (in closed form) and the run of zeros after
it. Models before local training are those after the ones. In the very first round there may be no
ones. Rates: preset `paper` takes p = λ/(λ+L) and local_lr = 1/(2(λ+L)), so that c = 1/2; `free`
takes both as given, stable for local_lr <= 1/(2 max{L/(1−p), λ/p}).

Differs from the paper: a run of zeros longer than `longest_run` continues in the next round without
ones in between, so that the coin stays fair; only models are exchanged once more than needed.
With p = 0 every round is `longest_run` local steps. The lengths of the runs travel with x̄ (16
bytes; the paper's clients share the coin's seed). `gradient="batch"` takes the mini-batches of
local training, and `participation="sampled"` lets only the sampled clients move, towards the mean
of those sampled last: heuristics of ours. Unlike public code, the first coin is as fair as the
others, and a run of ones exchanges models once.

A newcomer starts at the average and takes its gradient steps; it does not move the average.
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
from sartor.core.method import ClientContext, Method, ServerContext, changed, weighted_mean
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg
from sartor.theory import proximal

ENDLESS = 2.0**53
"""How long a run is that never ends: p = 0."""


def l2gd(
    task: Task,
    local: Local,
    *,
    preset: Literal["free", "paper"] = "free",
    gradient: Literal["full", "batch"] = "full",
    participation: Literal["all", "sampled"] = "all",
    longest_run: int = 100,
    smoothness: float | None = None,
) -> Method:
    """Build L2GD: min (1/m) Σ [f_i(x_i) + (λ/2)‖x_i − x̄‖²].

    Args:
        task: the network and its loss.
        local: local training; the coin replaces its number of steps.
        preset: where p and the step come from; see the module's docstring.
        gradient: the gradients of all samples (the paper's), or of local training's mini-batches.
        participation: all clients in every round (the paper's), whatever the participation rule,
            or only the sampled ones.
        longest_run: the most local steps of a round.
        smoothness: L, for preset `paper`.
    """
    local.only_sgd("l2gd", "is a gradient method whose steps and averages follow a coin")
    if local.momentum:
        raise ConfigError(
            f"L2GD has no momentum, got momentum={local.momentum:g}: an average would not touch "
            "it; leave momentum out."
        )
    if longest_run < 1:
        raise ConfigError(
            f"longest_run must be >= 1 local step a round, got {longest_run}; 100 is the default."
        )
    if preset == "paper" and not (smoothness and smoothness > 0):
        raise ConfigError(
            f"preset='paper' needs smoothness=L > 0 of the loss, got {smoothness}; give it, or "
            "take preset='free'."
        )
    big = smoothness or 0.0

    def probability(hyper: Tree) -> Tensor:
        """Return p."""
        if preset == "free":
            return hyper["average_probability"]
        return proximal.average_probability(hyper["prox_strength"], big)

    def rates(ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """Return η = α/m and p."""
        derived = preset == "paper"
        eta = proximal.l2gd_lr(ctx.hyper["prox_strength"], big) if derived else local.rate(ctx)
        return eta, probability(ctx.hyper)

    def runs(ctx: ServerContext, least: int) -> tuple[Tensor, Tensor]:
        """Draw the lengths of a run of ones, at least so many, and of the zeros after it."""
        p = probability(ctx.hyper).double()
        luck = rng.uniform(rng.fold(ctx.key, "coins"), (2,), torch.float64).log().abs()
        # A run continues with probability p, or 1 − p, at each flip: the inverse of P(run > k).
        fall = torch.stack((p.log(), torch.log1p(-p))).abs()
        first = torch.stack((torch.full_like(p, least), torch.ones_like(p)))
        ones, zeros = (first + torch.floor(luck / fall)).clamp(max=ENDLESS).long().unbind(0)
        return ones, zeros

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        ones, zeros = runs(ctx, 0)
        return {"params": params, "ones": ones, "zeros": zeros}

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        return {**server, "zeros": server["zeros"].clamp(max=longest_run)}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"params": params}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        eta, p = rates(ctx)
        some = torch.where(p > 0, p, torch.ones_like(p))
        c = (eta * ctx.hyper["prox_strength"] / some).clamp(max=1.0)
        # Alg. 1, ξ = 1: x_i ← x_i + c(x̄ − x_i); each one leaves 1 − c of the distance.
        way = 1.0 - (1.0 - c) ** ctx.common["ones"]
        mean = ctx.common["params"]
        return {"params": tree.map(lambda x, m: torch.lerp(x, m, way), client["params"], mean)}

    def step_size(work: Tree, ctx: ClientContext) -> Tensor:
        eta, p = rates(ctx)
        return eta / (1.0 - p)  # Alg. 1, ξ = 0: the step on f_i

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return work, {"params": work["params"]}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        equal = ctx.present.to(tree.leaves(server["params"])[0].dtype)
        left = server["zeros"] - longest_run
        ones, zeros = runs(ctx, 1)
        return {
            "params": weighted_mean(uploads["params"], equal, server["params"]),
            "ones": torch.where(left > 0, torch.zeros_like(ones), ones),
            "zeros": torch.where(left > 0, left, zeros),
        }

    hyper = {
        **(local.hyper if preset == "free" else local.without_rate("l2gd with preset='paper'")),
        "prox_strength": Hyper(0.3, 0.0, note="0 never averages"),
    }
    if preset == "free":
        note = "0 is pure local training, and at 1 no client would train"
        hyper["average_probability"] = Hyper(0.1, 0.0, 0.999, note=note)
    # One coin and one coefficient for all clients: else the average would move in a run of ones.
    own = ("weight_decay", "clip_norm")
    hyper = {k: replace(v, server=v.server or k not in own) for k, v in hyper.items()}
    work_plan = replace(local, batch=None) if gradient == "full" else local
    return changed(
        fedavg(task, local),
        name="l2gd",
        hyper=hyper,
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        begin=begin,
        phases=(descend(task, work_plan, lr=step_size, steps=lambda ctx: ctx.common["zeros"]),),
        finish=finish,
        aggregate=aggregate,
        who="everyone" if participation == "all" else "cohort",
    )
