"""The best of several methods, by their scores on held-out samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor import tree, wire
from sartor.compose import side_by_side
from sartor.method import Batch, Hub, Method, Phase, Site
from sartor.mixing import at
from sartor.task import Task
from sartor.theory.heterogeneity import shares
from sartor.tree import Tree

Scope = Literal["system", "client"]
SelectOn = Literal["holdout", "validation", "test"]
Score = Literal["error", "loss"]


def best_of(
    name: str,
    task: Task,
    *,
    scope: Scope = "system",
    select_on: SelectOn = "holdout",
    score: Score = "error",
    held_out: tuple[float, float] = (0.8, 1.0),
    batch: int | None = 64,
    **parts: Method,
) -> Method:
    """Train several methods side by side and use the one with the lowest held-out score.

    After the last round every client scores all of them; ties go to the first. The server's table
    ``choice`` (clients,) holds the number of the method in use, ``group`` (clients,) who decides
    together (everybody, unless whoever builds on this record says otherwise), and ``errors``
    (clients, methods) the scores. A choice other than 0 that is made before training stands.

    Args:
        name: the name of the whole.
        task: the network and its loss.
        scope: one choice for all clients of a group, by Σ p_i · score_i with p_i = n_i/N, or each
            client for itself (then nothing is sent for it).
        select_on: the samples that decide: a part of the training data, which the methods must
            then leave out; the federation's validation data; or its test data, which is optimistic.
        score: the share of wrong answers, or the mean loss.
        held_out: from where to where in the training data, for ``select_on="holdout"``.
        batch: samples a step of scoring.
        parts: the methods, whose models must be parameters of the same network.
    """
    whole = side_by_side(name, **parts)

    def init_server(params: Tree, hub: Hub) -> Tree:
        zero = torch.zeros_like(hub.sizes)
        errors = tree.leaves(params)[0].new_zeros((hub.sizes.shape[0], len(parts)))
        start = {"choice": zero, "group": zero, "errors": errors}
        return {**whole.init_server(params, hub), **start}

    def init_client(params: Tree, site: Site) -> Tree:
        return {**whole.init_client(params, site), "choice": torch.zeros_like(site.index)}

    def address(server: Tree, index: Tensor, hub: Hub) -> Tree:
        return {**whole.address(server, index, hub), "choice": at(server["choice"], index)}

    def greet(server: Tree, hub: Hub) -> Tree:
        """Choose for a newcomer what most clients use."""
        numbers = torch.arange(len(parts), device=server["choice"].device)
        votes = (server["choice"][:, None] == numbers).sum(0)
        return {**(whole.greet(server, hub) if whole.greet else {}), "choice": votes.argmax()}

    def begin(client: Tree, site: Site) -> Tree:
        choice = client["choice"] if scope == "client" else site.own["choice"]
        return {**whole.begin(client, site), "choice": choice}

    def model(work: Tree, site: Site) -> Tree:
        found = whole.model(work, site)
        models = [found[slot] for slot in parts]
        return tree.map(lambda *leaves: at(torch.stack(leaves), work["choice"]), *models)

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        kept, sent = whole.finish(client, work, site)
        return {**kept, "choice": client["choice"]}, sent

    def look(work: Tree, batch: Batch, site: Site) -> Tree:
        found = whole.model(work, site)
        judged = [task.judge(found[slot], batch)[score == "error"] for slot in parts]
        return {**work, "sums": work["sums"] + torch.stack([*judged, batch.mask.sum()])}

    def report(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        choice = work["sums"][:-1].argmin()
        return {**client, "choice": choice}, {} if scope == "client" else {"sums": work["sums"]}

    def decide(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        if scope == "client":
            return server
        sums = torch.zeros_like(uploads["sums"]).index_copy(0, hub.cohort, uploads["sums"])
        count = sums[:, -1:]
        errors = sums[:, :-1] / count.clamp(min=1.0)
        weights = hub.sizes.to(errors.dtype) * (count[:, 0] > 0) + 1e-30
        best = (shares(weights, server["group"]) @ errors).argmin(1)
        choice = torch.where(server["choice"] > 0, server["choice"], best)
        return {**server, "errors": errors, "choice": choice}

    def enter(work: Tree, site: Site) -> Tree:
        zero = tree.leaves(whole.model(work, site))[0].reshape(-1)[0] * 0.0
        return {**work, "sums": torch.stack([zero] * (len(parts) + 1))}

    scored = Phase(
        name="compare",
        step=look,
        enter=enter,
        data={"validation": "val", "test": "test"}.get(select_on, "train"),
        part=held_out if select_on == "holdout" else (0.0, 1.0),
        batch=batch,
        shuffle=False,
    )
    method = replace(
        whole,
        init_server=init_server,
        init_client=init_client,
        address=address,
        greet=greet if whole.greet is not None else None,
        begin=begin,
        finish=finish,
        aggregate=lambda server, uploads, hub: {**server, **whole.aggregate(server, uploads, hub)},
        model=model,
        inspect=lambda server, hub: {k: server[k] for k in ("choice", "group", "errors")},
    )
    last = replace(
        method,
        phases=(scored,),
        finish=report,
        aggregate=decide,
        connected=None,
        sparse=wire.letters_of(whole.sparse),
    )
    return replace(method, epilogue=last)
