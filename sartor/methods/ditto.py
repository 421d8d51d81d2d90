"""Ditto: FedAvg, and beside it one personal model per client that is pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021 (arXiv 2012.04221), Algorithm 1. Used as a competitor by Yu et al. 2024 and Shi et al. 2023.

| symbol | here | meaning |
|---|---|---|
| w_t | server["params"] | the global model: FedAvg's, whatever λ is |
| v_k | client["personal"]["params"] | the personal model, kept between rounds, never sent |
| λ, λ_k | prox_strength | the pull of v_k to the received w_t; one number, or one per client |
| η_g | local_lr | the step of w |
| η_l | personal_lr | the step of v |
| r, s | Local, personal_epochs, personal_steps | how long w and v train in a round |
| {λ} | choices | candidates among which each client chooses on its validation data |

The paper's runs: λ = 1, or chosen from {0.1, 1, 2}; r = s = 2 steps of batch 16, both rates 0.05;
10 clients drawn in proportion to n_k and averaged evenly (`rule="uniform"`).

Both branches read the stream "train", so step j of v and step j of w see the same batch, as in the
authors' code; w is then FedAvg's to the bit for every λ, and v_k at λ = 0 is LocalTrain's to the
bit. Differs from the paper: momentum and weight decay, where local training has them, serve both
branches, each with an optimiser of its own; the paper has neither.

A newcomer begins its personal model at the global one, and trains it with the pull.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sartor.compose.fields import moved_phase
from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Batch, ClientContext, Method, Phase, changed
from sartor.core.mixing import at
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Rule, fedavg, with_kept


def ditto(
    task: Task,
    local: Local,
    *,
    rule: Rule = "normalized",
    client_weights: tuple[float, ...] | None = None,
    personal_epochs: int | None = None,
    personal_steps: int | None = None,
    choices: tuple[float, ...] = (),
) -> Method:
    """Build Ditto: min_v F_k(v) + (λ/2)‖v − w*‖² on each client, with w* the solution of FedAvg.

    Args:
        task: the network and its loss.
        local: local training of the global branch, and of the personal one where nothing else is
            said.
        rule: how the server averages; see ``fedavg``.
        client_weights: see ``fedavg``.
        personal_epochs: passes of the personal branch; those of ``local`` if None.
        personal_steps: steps of the personal branch; replaces epochs.
        choices: values of λ; in every round a client trains one copy of v_k with each, and keeps
            the copy of smallest validation loss (the first where there are no validation samples).
            Takes the place of ``prox_strength``.
    """
    own = _personal_training(local, personal_epochs, personal_steps, choices)
    rounds = fedavg(task, local, rule=rule, client_weights=client_weights)
    base = with_kept(rounds, "personal")
    tries = tuple(f"try{j}" for j in range(len(choices)))

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        personal = {"params": params, **own.start(params=params)}  # v_k = w_0
        return {**base.init_client(params, ctx), "personal": personal}

    def objective(personal: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return h_k(v; w_t) = F_k(v) + (λ/2)‖v − w_t‖²; candidates are added up."""
        w_t = ctx.common["params"]
        pulls: dict[str, Any] = dict(zip(tries, choices, strict=True))
        # Alg. 1, client: v_k ← v_k − η_l(∇F_k(v_k) + λ(v_k − w_t)) is a step down h_k.
        first, *others = (
            task.loss(personal[v], batch) + half_square(lam, personal[v], w_t)
            for v, lam in (pulls or {"params": ctx.hyper["prox_strength"]}).items()
        )
        return sum(others, start=first)

    train_personal = descend(
        task, own, objective, name="personal", over=tries or ("params",), lr="personal_lr"
    )

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        """Start every candidate from v_k."""
        return train_personal.enter({**work, **dict.fromkeys(tries, work["params"])}, ctx)

    branch = [replace(train_personal, stream="train", enter=enter)]
    note = "the step size of the personal model"
    hyper = {**base.hyper, "personal_lr": Hyper(local.lr, 0.0, note=note)}
    if choices:
        branch.append(_choose(task, tries))
    else:
        note = "the pull to the global model; 0 trains the personal model alone"
        hyper["prox_strength"] = Hyper(1.0, 0.0, note=note)
    return changed(
        base,
        name="ditto",
        hyper=hyper,
        init_client=init_client,
        phases=(*(moved_phase(p, slot="personal") for p in branch), *base.phases),
        model=lambda work, ctx: work["personal"]["params"],
        private=lambda leaf: leaf == "personal",
    )


def _personal_training(
    local: Local, epochs: int | None, steps: int | None, choices: tuple[float, ...]
) -> Local:
    """Return the local training of the personal branch."""
    advice = "leave it out to train as long as the global branch."
    faults = below(1, advice, personal_epochs=epochs, personal_steps=steps)
    faults += [
        f"choices must be >= 0, got {lam:g}; 0 trains the personal model alone."
        for lam in choices
        if not lam >= 0
    ]
    if choices and local.keeps:
        faults.append(
            "choices and keep_optimiser do not go together: a choice among models has no one "
            "momentum to keep; set keep_optimiser=False."
        )
    refuse(faults)
    return replace(
        local, epochs=epochs or local.epochs, steps=steps or (None if epochs else local.steps)
    )


def _choose(task: Task, tries: tuple[str, ...]) -> Phase:
    """Keep the candidate of smallest validation loss."""

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        first = tree.leaves(work["params"])[0]
        return {**work, "losses": first.new_zeros(len(tries))}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        sums = [torch.where(batch.mask, task.losses(work[v], batch), 0.0).sum() for v in tries]
        return {**work, "losses": work["losses"] + torch.stack(sums)}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        best = work["losses"].argmin()
        table = tree.stack([work[v] for v in tries])
        return {"params": tree.map(lambda leaf: at(leaf, best), table)}

    return Phase("choose", step, enter, leave, data="val", batch=64, shuffle=False)
