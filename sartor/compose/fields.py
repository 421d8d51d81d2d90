"""The fields of a method record by what they take, so that a combinator goes over all of them.

A combinator that listed the fields by hand would silently drop a new one. ``viewed`` visits every
field by its kind; a law checks that each field has one, and that every combinator forwards what it
does not change.

| kind | what it is |
|---|---|
| client | a function whose last argument is a client context |
| server | a function whose last argument is a server context |
| newcomer | ``Newcomer.state``, which takes both contexts |
| phases | a tuple of phases |
| record | a record, or the first rounds with two of them |
| value | anything else: handed on as it is |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sartor.core.method import (
    SMALL,
    ClientContext,
    FirstRounds,
    Method,
    Phase,
    ServerContext,
    changed,
    has_own_messages,
    newcomer_state,
)
from sartor.core.tree import Tree

KINDS: dict[str, str] = {
    **dict.fromkeys(("init_client", "begin", "finish", "model", "client"), "client"),
    **dict.fromkeys(("init_server", "broadcast", "address", "aggregate"), "server"),
    **dict.fromkeys(("centre", "connected", "message", "server"), "server"),
    "state": "newcomer",
    **dict.fromkeys(("phases", "adapt"), "phases"),
    **dict.fromkeys(("first", "before", "after"), "record"),
    **dict.fromkeys(("name", "hyper", "predict", "headline", "who", "in_turn", "stage"), "value"),
    **dict.fromkeys(("private", "sparse", "averaged", "names"), "value"),
}
"""The kind of every field of the record and of its small values."""


def get(method: Method, field: str) -> Any:
    """Return a field of the record or of one of its small values, by its own name."""
    return getattr(getattr(method, SMALL[field]) if field in SMALL else method, field)


def viewed(
    method: Method,
    client: Callable[[ClientContext], ClientContext],
    server: Callable[[ServerContext], ServerContext],
    phase: Callable[[Phase], Phase] = lambda phase: phase,
) -> Method:
    """Let a method see other contexts, in its extra rounds too, and change its phases."""

    def seen(fn: Any, view: Callable[[Any], Any]) -> Any:
        return lambda *args: fn(*args[:-1], view(args[-1]))

    def again(given: Any) -> Any:
        if isinstance(given, FirstRounds):
            return replace(given, method=again(given.method), handover=again(given.handover))
        return viewed(given, client, server, phase)

    wraps: dict[str, Callable[[Any], Any]] = {
        "client": lambda fn: seen(fn, client),
        "server": lambda fn: seen(fn, server),
        "phases": lambda phases: tuple(phase(moved_phase(one, client)) for one in phases),
        "record": again,
    }
    changes = {
        field: wraps[kind](value)
        for field, kind in KINDS.items()
        if kind in wraps and (value := get(method, field)) is not None
    }
    if not has_own_messages(method):
        del changes["address"]  # a record without own messages stays one

    def state(params: Tree, ctx: ClientContext, trained: Tree, server_ctx: ServerContext) -> Tree:
        return newcomer_state(method, params, client(ctx), trained, server(server_ctx))

    return changed(method, **changes, state=state)


def with_phases(method: Method, change: Callable[[Phase], Phase]) -> Method:
    """Change every phase of a method, those of its extra rounds too."""

    def again(given: Any) -> Any:
        if isinstance(given, FirstRounds):
            return replace(given, method=again(given.method), handover=again(given.handover))
        return with_phases(given, change)

    wraps = {"phases": lambda phases: tuple(change(one) for one in phases), "record": again}
    changes = {
        field: wraps[kind](value)
        for field, kind in KINDS.items()
        if kind in wraps and (value := get(method, field)) is not None
    }
    return changed(method, **changes)


def moved_phase(
    phase: Phase,
    view: Callable[[ClientContext], ClientContext] = lambda ctx: ctx,
    slot: str | None = None,
) -> Phase:
    """Let a phase see another client context, and work on one slot of the tree if one is named."""

    def of(work: Tree) -> Tree:
        return work if slot is None else work[slot]

    def put(work: Tree, new: Tree) -> Tree:
        return new if slot is None else {**work, slot: new}

    def edge(fn: Callable[[Tree, ClientContext], Tree]) -> Callable[[Tree, ClientContext], Tree]:
        return lambda work, ctx: put(work, fn(of(work), view(ctx)))

    def step(work: Tree, batch: Any, ctx: ClientContext) -> Tree:
        return put(work, phase.step(of(work), batch, view(ctx)))

    steps, when, stop = phase.steps, phase.when, phase.stop
    return replace(
        phase,
        step=step,
        enter=edge(phase.enter),
        leave=edge(phase.leave),
        steps=(lambda ctx: steps(view(ctx))) if callable(steps) else steps,
        when=(lambda work, ctx: when(of(work), view(ctx))) if when else None,
        stop=(lambda work, ctx: stop(of(work), view(ctx))) if stop else None,
    )
