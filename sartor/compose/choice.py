"""The best of several methods, by their scores on held-out samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sartor.compose.judging import Score, beyond_noise, criterion_of, paired_sums, ranked_sums
from sartor.compose.parallel import in_parallel
from sartor.core import tree, wire
from sartor.core.errors import ConfigError
from sartor.core.method import Batch, ClientContext, Method, Phase, ServerContext, changed
from sartor.core.mixing import at
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.theory.heterogeneity import shares

Scope = Literal["system", "client"]
SelectOn = Literal["holdout", "validation", "test"]


def best_of(
    name: str,
    task: Task,
    *,
    scope: Scope = "system",
    select_on: SelectOn = "holdout",
    score: Score = "error",
    held_out: tuple[float, float] = (0.8, 1.0),
    margin: str | None = None,
    announce: bool = True,
    instead: dict[str, Method] | None = None,
    **parts: Method,
) -> Method:
    """Train several methods in parallel and use the one with the lowest held-out score.

    After the last round every client scores all of them; ties go to the first. The server's table
    ``choice`` (clients,) holds the number of the method in use, ``group`` (clients,) the group that
    decides together (one of all clients, unless a method that is built on this record changes it),
    and ``errors`` (clients, methods) the scores. A choice other than 0 that is made before training
    is final.

    Args:
        name: the name of the whole.
        task: the network and its loss.
        scope: one choice for all clients of a group, by Σ p_i · score_i with p_i = n_i/N, or each
            client for itself (then nothing is sent for it).
        select_on: the samples that decide: a part of the training data, which the methods must
            then leave out; the federation's validation data; or its test data, which is optimistic.
        score: what is judged by; see ``sartor.compose.judging``.
        held_out: from where to where in the training data, for ``select_on="holdout"``.
        margin: for ``scope="client"``: the hyper-parameter that says by how many standard errors a
            score must lie below that of the first method, see :func:`beyond_noise`; None takes the
            lowest.
        announce: whether each client's entry of ``choice`` is sent with every message to it.
        instead: for some of the parts a method that trains beside them, is not scored, and whose
            model is used where that part is chosen; such as the same on all samples.
        parts: the methods. What each client uses is one set of parameters if all of their models
            are; otherwise all models and the number of the one in use.
    """
    if margin is not None and scope != "client":
        raise ConfigError(f"A margin is each client's own: it needs scope='client', got {scope!r}.")
    if margin is None and score not in ("error", "loss"):
        raise ConfigError(f"The lowest score is that of losses or errors, got score={score!r}.")
    criterion = criterion_of(task, score)
    others = {f"{slot}_used": m for slot, m in (instead or {}).items()}
    trained = {**parts, **others}
    whole = in_parallel(name, **trained)
    used = {k: f"{k}_used" if f"{k}_used" in others else k for k in parts}
    plain = all(m.use.predict is None for m in trained.values())

    def init_server(params: Tree, server_ctx: ServerContext) -> Tree:
        zero = torch.zeros_like(server_ctx.sizes)
        errors = tree.leaves(params)[0].new_zeros((server_ctx.sizes.shape[0], len(parts)))
        start = {"choice": zero, "group": zero, "errors": errors}
        return {**whole.init_server(params, server_ctx), **start}

    def undecided(params: Tree, ctx: ClientContext) -> Tree:
        """Return the entries of a client's state that hold its choice, before it is made."""
        number = torch.zeros_like(ctx.index)
        if margin is None:
            return {"choice": number}
        zero = tree.leaves(params)[0].new_zeros(len(parts))
        return {"choice": number, "held_out": {"loss": zero, "error": zero, "count": zero[0]}}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {**whole.init_client(params, ctx), **undecided(params, ctx)}

    def join(params: Tree, ctx: ClientContext, server: Tree, server_ctx: ServerContext) -> Tree:
        assert whole.newcomer.state is not None  # `in_parallel` gives one
        return {**whole.newcomer.state(params, ctx, server, server_ctx), **undecided(params, ctx)}

    def address(server: Tree, index: Tensor, server_ctx: ServerContext) -> Tree:
        message = whole.address(server, index, server_ctx)
        return {**message, "choice": at(server["choice"], index)} if announce else message

    def newcomer_message(server: Tree, server_ctx: ServerContext) -> Tree:
        """Choose for a newcomer what most clients use."""
        numbers = torch.arange(len(parts), device=server["choice"].device)
        votes = (server["choice"][:, None] == numbers).sum(0)
        message = whole.newcomer.message(server, server_ctx) if whole.newcomer.message else {}
        return {**message, "choice": votes.argmax()} if announce else message

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        choice = client["choice"] if scope == "client" else ctx.own["choice"]
        return {**whole.begin(client, ctx), "choice": choice}

    def model(work: Tree, ctx: ClientContext) -> Tree:
        found = whole.use.model(work, ctx)
        models = [found[slot] for slot in used.values()]
        if not plain:
            return {"choice": work["choice"], "models": dict(zip(parts, models, strict=True))}
        return tree.map(lambda *leaves: at(torch.stack(leaves), work["choice"]), *models)

    def predict(model: Tree, x: Tensor) -> Tensor:
        scores = [
            (trained[slot].use.predict or task.logits)(model["models"][k], x)
            for k, slot in used.items()
        ]
        return at(torch.stack(scores), model["choice"])

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, sent = whole.finish(client, work, ctx)
        return {**kept, **{k: v for k, v in client.items() if k not in trained}}, sent

    def look(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        found = whole.use.model(work, ctx)
        if margin is not None:
            rows = [
                task.losses(found[k], batch, m.use.predict, criterion) for k, m in parts.items()
            ]
            if score == "auroc":
                return {**work, "sums": ranked_sums(torch.stack(rows), batch.y, batch.mask)}
            return {**work, "sums": work["sums"] + paired_sums(torch.stack(rows), batch.mask)}
        judged = [
            task.judge(found[k], batch, m.use.predict)[score == "error"] for k, m in parts.items()
        ]
        return {**work, "sums": work["sums"] + torch.stack([*judged, batch.mask.sum()])}

    def report(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        if margin is not None:
            choice, held_out = beyond_noise(work["sums"], ctx.hyper[margin])
            like = client["held_out"]["count"]
            rounded = tree.map(lambda leaf: leaf.to(like.dtype), held_out)
            return {**client, "choice": choice, "held_out": rounded}, {}
        choice = work["sums"][:-1].argmin()
        return {**client, "choice": choice}, {} if scope == "client" else {"sums": work["sums"]}

    def decide(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        if scope == "client":
            return server
        sums = torch.zeros_like(uploads["sums"]).index_copy(0, server_ctx.cohort, uploads["sums"])
        count = sums[:, -1:]
        errors = sums[:, :-1] / count.clamp(min=1.0)
        weights = server_ctx.sizes.to(errors.dtype) * (count[:, 0] > 0) + 1e-30
        best = (shares(weights, server["group"]) @ errors).argmin(1)
        choice = torch.where(server["choice"] > 0, server["choice"], best)
        return {**server, "errors": errors, "choice": choice}

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        zero = tree.leaves(whole.use.model(work, ctx))[0].reshape(-1)[0] * 0.0
        if margin is not None:
            nothing = torch.zeros_like(zero, dtype=torch.float64)
            return {**work, "sums": nothing.expand(4, len(parts))}
        return {**work, "sums": torch.stack([zero] * (len(parts) + 1))}

    def inspect_client(client: Tree, ctx: ClientContext) -> Tree:
        held_out = client.get("held_out", {})
        return {"choice": client["choice"], **{f"held_out_{k}": v for k, v in held_out.items()}}

    scored = Phase(
        name="compare",
        step=look,
        enter=enter,
        data={"validation": "val", "test": "test"}.get(select_on, "train"),
        part=held_out if select_on == "holdout" else (0.0, 1.0),
        batch=None if score == "auroc" else 64,
        shuffle=False,
    )
    method = changed(
        whole,
        init_server=init_server,
        init_client=init_client,
        state=join,
        address=address,
        message=newcomer_message if whole.newcomer.message is not None else None,
        begin=begin,
        finish=finish,
        aggregate=lambda server, uploads, ctx: {**server, **whole.aggregate(server, uploads, ctx)},
        model=model,
        predict=None if plain else predict,
        server=lambda server, server_ctx: {k: server[k] for k in ("choice", "group", "errors")},
        client=inspect_client if scope == "client" else None,
        names=tuple(parts),
    )
    last = changed(
        method,
        phases=(*whole.use.adapt, scored),
        adapt=(),
        finish=report,
        aggregate=decide,
        connected=None,
        sparse=wire.messages_of(whole.wire.sparse),
        in_turn=False,
        before=None,
        after=None,
        stage="evaluate" if whole.use.adapt else "",
    )
    return changed(
        method,
        before=_with_rest(whole.schedule.before, tuple(trained)),
        after=_with_rest(whole.schedule.after, tuple(trained), last),
    )


def _with_rest(
    record: Method | None, slots: tuple[str, ...], follow: Method | None = None
) -> Method | None:
    """Let an extra round of the methods leave all other entries of the trees as they are."""
    if record is None:
        return follow

    def rest(state: Tree) -> Tree:
        return {k: v for k, v in state.items() if k not in slots}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, sent = record.finish(client, work, ctx)
        return {**rest(client), **kept}, sent

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        return {**rest(server), **record.aggregate(server, uploads, server_ctx)}

    return changed(
        record,
        finish=finish,
        aggregate=aggregate,
        after=_with_rest(record.schedule.after, slots, follow),
    )
