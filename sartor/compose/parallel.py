"""Methods in parallel on the same clients, and the two changes that may be needed before that.

``in_parallel`` runs several records as one; ``on_share`` lets a record train on a part of every
client's samples, as if there were no others; ``kept_after_training`` turns a record whose models
are used after local training ("post") into one that keeps them and uses them as they are ("pre").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sartor.compose.fields import moved_phase, viewed
from sartor.core import tree, wire
from sartor.core.errors import ConfigError
from sartor.core.method import (
    ClientContext,
    Method,
    Newcomer,
    Phase,
    Schedule,
    ServerContext,
    Use,
    Wire,
    changed,
    check_private,
    has_own_messages,
    newcomer_state,
)
from sartor.core.tree import Tree


def in_parallel(name: str, **parts: Method) -> Method:
    """Run several methods at once on the same clients, each as if it were alone.

    Every tree has one slot per method. If some of them train all clients and others a cohort, all
    clients train, and those outside the cohort leave the phases of the latter out. If one of them
    serves clients in turn, so does the whole: the others must give the same results that way.

    Args:
        name: the name of the whole.
        parts: the methods, by slot. Hyper-parameters of one name are one.
    """
    for m in parts.values():
        _refuse_first_rounds(m)
    reports = {k: m.schedule.who == "everyone" for k, m in parts.items()}
    cohort_trains = {k: m.schedule.who == "cohort" for k, m in parts.items()}
    everyone = all(reports.values())
    wide = not everyone and not all(cohort_trains.values())
    sampled = {k: wide and cohort_trains[k] for k in parts}

    def view(ctx: ClientContext, slot: str) -> ClientContext:
        used = torch.ones_like(ctx.reports) if wide and reports[slot] else ctx.reports
        return ctx._replace(
            common=ctx.common.get(slot, {}), own=ctx.own.get(slot, {}), reports=used
        )

    def seen(server_ctx: ServerContext, slot: str) -> ServerContext:
        if wide and reports[slot]:
            return server_ctx._replace(present=torch.ones_like(server_ctx.present))
        return server_ctx

    def heard(server: Tree, server_ctx: ServerContext, slot: str) -> ServerContext:
        """Mark only those clients as present whose upload of this slot is sent."""
        there, m = seen(server_ctx, slot), parts[slot]
        who = None if m.wire.connected is None else m.wire.connected(server[slot], there)
        if who is None or isinstance(who, dict):
            return there
        return there._replace(present=there.present & (who[1] if who.dim() == 2 else who))

    def on_slot(phase: Phase, slot: str) -> Phase:
        found = moved_phase(phase, lambda ctx: view(ctx, slot), slot)
        before = found.when

        def when(work: Tree, ctx: ClientContext) -> Tensor:
            return ctx.reports if before is None else ctx.reports & before(work, ctx)

        return replace(
            found,
            name=f"{slot}: {phase.name}",
            stream=phase.stream or phase.name,
            when=when if sampled[slot] else before,
        )

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept, sent = {}, {}
        for slot, m in parts.items():
            new, sent[slot] = m.finish(client[slot], work[slot], view(ctx, slot))
            check_private(m, sent[slot])
            kept[slot] = tree.where(ctx.reports, new, client[slot]) if sampled[slot] else new
        return kept, sent

    def newcomer_message(server: Tree, server_ctx: ServerContext) -> Tree:
        asked = {k: m.newcomer.message for k, m in parts.items()}
        return {k: fn(server[k], server_ctx) if fn else {} for k, fn in asked.items()}

    def newcomer(params: Tree, ctx: ClientContext, server: Tree, server_ctx: ServerContext) -> Tree:
        return {k: newcomer_state(m, params, ctx, server[k], server_ctx) for k, m in parts.items()}

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        return {
            k: m.aggregate(server[k], uploads[k], heard(server, server_ctx, k))
            for k, m in parts.items()
        }

    def connected(server: Tree, server_ctx: ServerContext) -> Tree:
        """Mark per slot the clients that receive and those that upload: (2, slots), or deeper."""
        found: Tree = {}
        for slot, m in parts.items():
            inside = seen(server_ctx, slot)
            up = inside.present
            found[slot] = both = torch.stack((up if sampled[slot] else torch.ones_like(up), up))
            if m.wire.connected is not None:
                who = m.wire.connected(server[slot], inside)
                found[slot] = tree.map(lambda some, both=both: both & some, who)
        return found

    def stage(records: dict[str, Method | None]) -> Method | None:
        """Combine the same extra round of several methods; the others do nothing in it."""
        if not any(records.values()):
            return None
        return in_parallel(name, **{k: r or _idle(parts[k]) for k, r in records.items()})

    def first_round(method: Method) -> Method | None:
        # A record for the round before training may carry the method's round after it along.
        before = method.schedule.before
        return None if before is None else changed(before, after=None)

    def on_client(of: Callable[[Method], Callable[..., Tree]]) -> Callable[..., Tree]:
        return lambda state, ctx: {k: of(m)(state[k], view(ctx, k)) for k, m in parts.items()}

    answered = all(m.newcomer.message or not has_own_messages(m) for m in parts.values())
    in_part = wide or any(m.wire.connected for m in parts.values())
    return Method(
        name=name,
        hyper={k: v for m in parts.values() for k, v in m.hyper.items()},
        init_server=lambda params, ctx: {k: m.init_server(params, ctx) for k, m in parts.items()},
        init_client=lambda params, ctx: {k: m.init_client(params, ctx) for k, m in parts.items()},
        broadcast=lambda server, ctx: {k: m.broadcast(server[k], ctx) for k, m in parts.items()},
        address=lambda server, i, ctx: {k: m.address(server[k], i, ctx) for k, m in parts.items()},
        begin=on_client(lambda m: m.begin),
        phases=tuple(on_slot(p, k) for k, m in parts.items() for p in m.phases),
        finish=finish,
        aggregate=aggregate,
        use=Use(
            model=on_client(lambda m: m.use.model),
            adapt=tuple(on_slot(p, k) for k, m in parts.items() for p in m.use.adapt),
        ),
        schedule=Schedule(
            who="everyone" if everyone else "everyone_trains" if wide else "cohort",
            in_turn=any(m.schedule.in_turn for m in parts.values()),
            before=stage({k: first_round(m) for k, m in parts.items()}),
            after=stage({k: m.schedule.after for k, m in parts.items()}),
        ),
        wire=Wire(
            private=lambda leaf: all(m.wire.private(leaf) for m in parts.values()),
            connected=connected if in_part else None,
            sparse={
                leaf: marks
                for k, m in parts.items()
                for leaf, marks in wire.moved(
                    m.wire.sparse, {w: f"{w}/{k}" for w in wire.MESSAGES}
                ).items()
            },
        ),
        newcomer=Newcomer(message=newcomer_message if answered else None, state=newcomer),
    )


def _refuse_first_rounds(method: Method) -> None:
    if method.schedule.first is not None:
        raise ConfigError(
            f"{method.name} begins with rounds of another method, which cannot run in parallel "
            "with others; leave its warm-up out."
        )


def _idle(method: Method) -> Method:
    """Return the method in a round in which it does and sends nothing."""
    return Method(
        name=method.name,
        hyper=method.hyper,
        init_server=method.init_server,
        init_client=method.init_client,
        begin=lambda client, ctx: {},
        finish=lambda client, work, ctx: (client, {}),
        aggregate=lambda server, uploads, ctx: server,
        schedule=Schedule(who="everyone"),
    )


def on_share(method: Method, share: float) -> Method:
    """Let a method train on the first ``share`` of every client's samples, as if it had no others.

    Samples are taken in the random order of ``Phase.part``. Numbers of samples, the clients' and
    the server's, are those of the share. ``ctx.mask`` still has room for all samples.

    Args:
        method: any method.
        share: between 0 and 1; a client with samples keeps at least one.
    """

    def count(sizes: Tensor) -> Tensor:
        part = torch.floor(share * sizes.double() + 1e-9).to(sizes.dtype)
        return torch.minimum(part.clamp(min=min(1, math.ceil(share))), sizes)

    def cut(phase: Phase) -> Phase:
        first, end = phase.part
        return replace(phase, part=(share * first, share * end)) if phase.data == "train" else phase

    return viewed(
        method,
        lambda ctx: ctx._replace(num_samples=count(ctx.num_samples)),
        lambda server_ctx: server_ctx._replace(sizes=count(server_ctx.sizes)),
        cut,
    )


def kept_after_training(method: Method) -> Method:
    """Keep every client's model after its last local training, and use that one.

    A client that has not trained yet uses the model it would train. Fine-tuning of the model before
    local training (``adapt``) is left out: that one is not used.

    Args:
        method: a method whose headline is "post" and whose models are parameters of the network.
    """
    if method.use.predict is not None:
        raise ConfigError(
            f"{method.name} uses its models after local training, and they are more than "
            "parameters of the network, so they cannot be kept beside others; leave do_no_harm out."
        )
    _refuse_first_rounds(method)
    look = method.show.client

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        inner = method.init_client(params, ctx)
        return {"inner": inner, "used": params, "trained": ctx.num_samples < 0}

    def join(params: Tree, ctx: ClientContext, server: Tree, server_ctx: ServerContext) -> Tree:
        inner = newcomer_state(method, params, ctx, server, server_ctx)
        return {**init_client(params, ctx), "inner": inner}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {**client, "inner": method.begin(client["inner"], ctx)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        inner, sent = method.finish(client["inner"], work["inner"], ctx)
        used = method.use.model(work["inner"], ctx)
        trained = torch.ones_like(client["trained"])
        return {"inner": inner, "used": used, "trained": trained}, sent

    def model(work: Tree, ctx: ClientContext) -> Tree:
        return tree.where(work["trained"], work["used"], method.use.model(work["inner"], ctx))

    def rest(record: Method | None) -> Method | None:
        """Let the method's own extra rounds leave the kept models alone."""
        if record is None:
            return None

        def closing(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
            inner, sent = record.finish(client["inner"], work["inner"], ctx)
            return {**client, "inner": inner}, sent

        return changed(
            record,
            begin=lambda client, ctx: {**client, "inner": record.begin(client["inner"], ctx)},
            phases=tuple(moved_phase(p, slot="inner") for p in record.phases),
            finish=closing,
            after=rest(record.schedule.after),
        )

    return changed(
        method,
        init_client=init_client,
        state=join,
        begin=begin,
        phases=tuple(
            replace(moved_phase(p, slot="inner"), stream=p.stream or p.name) for p in method.phases
        ),
        adapt=(),
        finish=finish,
        model=model,
        client=None if look is None else lambda client, ctx: look(client["inner"], ctx),
        headline="pre",
        before=rest(method.schedule.before),
        after=rest(method.schedule.after),
    )
