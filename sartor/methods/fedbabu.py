"""FedBABU: only the body is trained and averaged, under one random head; then clients fine-tune.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
2022 (arXiv 2106.06042).

| symbol | here | meaning |
|---|---|---|
| θ_f | server["params"] | the body, averaged by numbers of samples |
| θ_h⁰ | server["head"], client["private"] | the head as it was drawn, the same for all |
| τ | ft_epochs, ft_steps | how long a client fine-tunes its copy before it is used; 5 epochs |
| η_ft | ft_lr | the step of fine-tuning; 0.001 in the authors' code, momentum 0.9 |
| η | local_lr | the step of the body; 0.1 there (batch 50, momentum 0.9) |
| β | relax | over-relaxation of the average; 1 is plain, as in the paper |

The head takes part in the forward pass and never moves, by gradient or by weight decay. The model
without fine-tuning is the global one (the point "global"); fine-tuned copies never come back.
Differs from the authors' code: the average is by samples (there plain, with equal clients:
`rule="uniform"`), and the rate stays as it is unless `lr_schedule` changes it (there it is divided
by ten at a half and at three quarters of the rounds). θ_h⁰ follows from the seed that all share, so
it is not counted as traffic.

A newcomer receives the body, sets the head θ_h⁰ on it, and fine-tunes that model on its own data,
exactly as the clients that trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Method, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.parts.partial import Average, partly_shared, train_part


def fedbabu(
    task: Task,
    local: Local,
    *,
    ft_epochs: int = 5,
    ft_steps: int | None = None,
    ft_part: Literal["all", "body", "head"] = "all",
    rule: Average = "normalized",
) -> Method:
    """Build FedBABU: min over θ_f of Σ p_i L_i(θ_f, θ_h⁰), then fine-tuning on each client.

    Args:
        task: the network and its loss.
        local: local training of the body; fine-tuning has its batches, momentum and decay.
        ft_epochs: epochs of fine-tuning; 0 leaves it out.
        ft_steps: steps of fine-tuning; replaces epochs.
        ft_part: what is fine-tuned: the whole model, or one part of it.
        rule: how the server averages; see ``fedavg``.
    """
    refuse(below(0, "0 leaves fine-tuning out.", ft_epochs=ft_epochs, ft_steps=ft_steps))
    base = partly_shared(task, local, task.is_body, name="fedbabu", rule=rule, by_head=True)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {**base.init_server(params, ctx), "head": tree.select(params, task.is_head)}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        return {**server, **base.aggregate(server, uploads, ctx)}

    federated = changed(
        base,
        init_server=init_server,
        phases=(train_part(task, local, task.is_body),),  # Alg., client: the head never moves
        aggregate=aggregate,
        centre=lambda server, ctx: {**server["params"], **server["head"]},
    )
    if not (ft_epochs if ft_steps is None else ft_steps):
        return federated
    tuning = replace(local, epochs=ft_epochs or 1, steps=ft_steps, keep_optimiser=False)
    part = {"all": None, "body": task.is_body, "head": task.is_head}[ft_part]
    return changed(
        federated,
        hyper={**base.hyper, "ft_lr": Hyper(local.lr, 0.0, note="the step size of fine-tuning")},
        # Alg., after the last round: each client fine-tunes a copy.
        adapt=(descend(task, tuning, name="fine-tune", lr="ft_lr", train=part),),
    )
