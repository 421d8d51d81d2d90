"""Every combinator forwards every field of a record, or says which it changes and why.

The law runs on a record in which no field has its default and every function leaves a mark. A
field of the result that does not reach the mark of the same field, or does not equal it, must be
in the list of what the combinator changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sartor.compose.choice import best_of
from sartor.compose.fields import KINDS, get
from sartor.compose.fine_tuning import fine_tuned
from sartor.compose.groups import within_groups
from sartor.compose.parallel import in_parallel, kept_after_training, on_share
from sartor.compose.robust import robust
from sartor.compose.stacking import stacked
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import (
    SMALL,
    Batch,
    ClientContext,
    FirstRounds,
    Method,
    Phase,
    ServerContext,
    changed,
)
from sartor.methods import METHODS, build
from sartor.training.onboarding import as_newcomer
from tests.toys import net_task

TASK = net_task()
SGD = Local(batch=4, lr=0.1)
FIELDS = [
    inner.name
    for outer in fields(Method)
    for inner in (fields(outer.default) if is_dataclass(outer.default) else (outer,))
]
"""The fields of the record and of its small values, each by its own name."""

PHASE_FUNCTIONS = ("step", "enter", "leave", "steps", "when", "stop")


# ---- a record that leaves marks ------------------------------------------------------------------


@dataclass
class Marks:
    """The functions of the marked record that were called, by name."""

    seen: set[str] = field(default_factory=set)

    def during(self, call: Callable[[], Any]) -> tuple[Any, set[str]]:
        self.seen = set()
        return call(), self.seen


def marked(marks: Marks, prefix: str = "", extra: bool = True) -> Method:
    """Make a record without a default: every function leaves ``prefix`` and its name."""

    def mark(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            marks.seen.add(prefix + name)
            return value(*args)

        return called

    def phase(name: str) -> Phase:
        same = lambda work, *rest: {**work}  # noqa: E731
        return Phase(
            name,
            mark(f"{name}.step", same),
            mark(f"{name}.enter", same),
            mark(f"{name}.leave", same),
            steps=mark(f"{name}.steps", lambda ctx: torch.ones_like(ctx.index)),
            when=mark(f"{name}.when", lambda work, ctx: ctx.index >= 0),
            stop=mark(f"{name}.stop", lambda work, ctx: ctx.index < 0),
            stream=f"{name}-stream",
        )

    def begin(client: Any, ctx: ClientContext) -> Any:
        read = ctx.common["params"]["fc.bias"].sum() + ctx.own.get("mine", torch.zeros(()))
        return {"params": tree.map(lambda w: w + 0.0 * read, client["params"])}

    method = Method(
        name=f"{prefix}marked",
        hyper={"local_lr": Hyper(0.1), "own": Hyper(0.3)},
        init_server=mark("init_server", lambda params, ctx: {"params": params}),
        init_client=mark("init_client", lambda params, ctx: {"params": params}),
        broadcast=mark("broadcast", lambda server, ctx: {"params": server["params"]}),
        address=mark("address", lambda server, i, ctx: {"mine": torch.ones(())}),
        begin=mark("begin", begin),
        phases=(phase("phases"),),
        finish=mark("finish", lambda c, work, ctx: ({**c}, {"params": work["params"]})),
        aggregate=mark(
            "aggregate",
            lambda s, uploads, ctx: {"params": tree.map(lambda u: u.mean(0), uploads["params"])},
        ),
    )
    method = changed(
        method,
        model=mark("model", lambda work, ctx: work["params"]),
        predict=mark("predict", lambda model, x: TASK.logits(model, x)),
        adapt=(phase("adapt"),),
        centre=mark("centre", lambda server, ctx: server["params"]),
        headline="post",
        who="everyone_trains",
        in_turn=True,
        stage="evaluate",
        private=lambda leaf: leaf == "secret",
        sparse={"common/params": "common/sent", "upload/params": "upload/sent"},
        averaged=("params",),
        connected=mark("connected", lambda server, ctx: ctx.present),
        message=mark("message", lambda server, ctx: {"mine": torch.zeros(())}),
        state=mark("state", lambda params, ctx, server, sctx: {"params": params}),
        server=mark("server", lambda server, ctx: {"shown": server["params"]["fc.bias"]}),
        client=mark("client", lambda client, ctx: {"shown": client["params"]["fc.bias"]}),
        names=("one", "two"),
    )
    if not extra:
        return method
    handover = changed(marked(marks, "handover/", extra=False), first=None)
    return changed(
        method,
        before=marked(marks, "before/", extra=False),
        after=marked(marks, "after/", extra=False),
        first=FirstRounds(2, marked(marks, "first/", extra=False), handover),
    )


def test_the_marked_record_has_no_default() -> None:
    """A new field must be marked here, or the laws below would not see it."""
    plain = Method(
        "plain",
        {},
        *(lambda *args: {} for _ in range(4)),
    )
    one = marked(Marks())
    same = [name for name in FIELDS if get(one, name) == get(plain, name)]
    assert same == []


def test_every_field_has_a_kind() -> None:
    """A combinator that goes over all fields knows what to do with each."""
    assert sorted(KINDS) == sorted(FIELDS)


# ---- the size of the record ----------------------------------------------------------------------


def test_the_record_has_at_most_sixteen_fields() -> None:
    """Ten that every method needs, and small values."""
    own = [f.name for f in fields(Method)]
    assert len(own) <= 16
    assert set(SMALL.values()) < set(own)


def test_a_field_that_few_methods_need_is_in_a_small_value() -> None:
    """Outside of the small values, at least two methods differ from the default."""
    records = [entry.factory(TASK, SGD) for entry in METHODS.values()]
    for one in fields(Method):
        if one.name not in SMALL.values():
            values = [getattr(record, one.name) for record in records]
            users = [v for v in values if v is not one.default and v != one.default]
            assert len(users) >= 2, one.name


STACK = ("lr", "rounds", "weight", "sharpness")
"""The hyper-parameters that a stack gives each of its parts."""

# ---- reaching every field of a result ------------------------------------------------------------


def contexts() -> tuple[ClientContext, ServerContext]:
    """Return what clients and server read: two clients with some samples."""
    names = ["local_lr", "own", "ft_lr", "harm_margin", "relax"]
    names += [f"{slot}_{what}" for slot in ("part", "other") for what in STACK]
    hyper = {name: torch.tensor(0.1) for name in names}
    key, zero = torch.zeros(2, dtype=torch.int64), torch.tensor(0)
    ids, yes = torch.arange(2), torch.ones(2, dtype=torch.bool)
    mask = torch.ones(6, dtype=torch.bool)
    client = ClientContext(hyper, {}, {}, key, zero, zero, zero, torch.tensor(6), mask, yes[0])
    return client, ServerContext(hyper, key, zero, torch.tensor([6, 8]), ids, yes)


def reached(record: Method, marks: Marks, trees: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """Call every function of a record in the order of a round; say which marks each left."""
    ctx, server_ctx = contexts()
    params = TASK.init(0)
    found: dict[str, Any] = {}

    def call(name: str, *args: Any) -> Any:
        fn = get(record, name)
        if fn is None:
            found[name] = set()
            return None
        value, found[name] = marks.during(lambda: fn(*args))
        return value

    server = call("init_server", params, server_ctx)
    client = call("init_client", params, ctx)
    if trees is not None:
        server, client = trees
    common = call("broadcast", server, server_ctx)
    own = call("address", server, torch.tensor(0), server_ctx)
    ctx = ctx._replace(common=common, own=own)
    work = call("begin", client, ctx)
    x = torch.zeros(4, 4)
    batch = Batch(x, torch.arange(4) % 2, torch.ones(4).bool(), torch.arange(4), torch.tensor(True))

    def go_through(phases: tuple[Phase, ...], work: Any) -> tuple[Any, set[str]]:
        every: set[str] = set()
        for phase in phases:
            if phase.name.endswith(("fine-tune", "compare")):
                continue  # added by the combinator, and not of the record
            for name in PHASE_FUNCTIONS:
                fn = getattr(phase, name)
                args = {"step": (work, batch, ctx), "steps": (ctx,)}.get(name, (work, ctx))
                if callable(fn):
                    value, seen = marks.during(partial(fn, *args))
                    every |= seen
                    work = value if name in ("step", "enter", "leave") else work
        return work, every

    work, found["phases"] = go_through(record.phases, work)
    _, upload = call("finish", client, work, ctx)
    call("aggregate", server, tree.stack([upload, upload]), server_ctx)
    if trees is not None:
        return found  # in an extra round nothing is scored
    work, found["adapt"] = go_through(record.use.adapt, work)
    call("predict", call("model", work, ctx), x)
    for name in ("centre", "connected", "message", "server"):
        call(name, server, server_ctx)
    call("client", client, ctx)
    call("state", params, ctx, server, server_ctx)
    found["trees"] = (server, client)
    return found


def gaps(record: Method, given: Method, marks: Marks, changes: Container[str]) -> list[str]:
    """Name the fields that are neither forwarded nor in the list of changes."""
    found = reached(record, marks)
    missing = []
    for name, kind in KINDS.items():
        if name in changes:
            continue
        if kind == "value":
            ok = get(record, name) == get(given, name) or name in found.get(name, ())
        elif kind == "phases":
            ok = found[name] == {f"{name}.{one}" for one in PHASE_FUNCTIONS}
        elif kind == "record":
            ok = extra_rounds(record, name, marks, found["trees"], changes)
        else:
            ok = name in found[name]
        if not ok:
            missing.append(name)
    return missing


def extra_rounds(
    record: Method, name: str, marks: Marks, trees: tuple[Any, Any], changes: Container[str]
) -> bool:
    """Say whether the extra rounds of a result go through those of the marked record."""
    given = get(record, name)
    if given is None:
        return False
    pairs = {name: given}
    if isinstance(given, FirstRounds):
        pairs = {"first": given.method, "handover": given.handover}
    for prefix, inner in pairs.items():
        found = reached(inner, marks, trees)
        for one in ("begin", "finish", "aggregate"):
            if one not in changes and f"{prefix}/{one}" not in found[one]:
                return False
    return True


# ---- the law -------------------------------------------------------------------------------------

ONE_SLOT = "each part has a slot of its own, and"
IN_SLOTS = {
    "name": "that of the whole",
    "hyper": f"{ONE_SLOT} hyper-parameters of all parts are put together",
    "predict": f"{ONE_SLOT} whoever builds on it chooses among their models",
    "headline": "all models are used before local training; kept_after_training comes first",
    "stage": "the round after training is that of all parts",
    "private": "leaves are checked for each part by itself, in finish",
    "sparse": "leaves have the name of the slot in front",
    "averaged": f"{ONE_SLOT} none of the branches is an average of the whole",
    "centre": f"{ONE_SLOT} there is no global model of the whole",
    "server": "what is shown is up to whoever builds on it",
    "client": "what is shown is up to whoever builds on it",
    "names": "what is chosen is up to whoever builds on it",
}
CHOSEN = {
    **{k: v for k, v in IN_SLOTS.items() if k != "predict"},
    "server": "shows the choice",
    "client": "shows the choice",
    "names": "names the parts",
}


@dataclass(frozen=True)
class Combinator:
    """A combinator, what it changes and why, and which fields it refuses."""

    make: Callable[[Method], Method]
    changes: dict[str, str]
    refuses: tuple[str, ...] = ()


def beside(method: Method) -> Method:
    return in_parallel("whole", part=method, other=build("local", TASK, SGD, {}))


COMBINATORS = {
    "fine_tuned": Combinator(
        lambda m: fine_tuned(m, TASK, SGD, steps=1),
        {
            "hyper": "the rate of fine-tuning is added",
            "headline": "the model before local training is fine-tuned and used",
        },
    ),
    "within_groups": Combinator(
        within_groups,
        {
            "broadcast": "the message of the group is the client's own; address sends it",
            "centre": "there is one per group",
            "sparse": "the common message is the client's own",
        },
        refuses=("address", "connected", "message", "state", "server", "before", "after", "first"),
    ),
    "in_parallel": Combinator(beside, IN_SLOTS, refuses=("first",)),
    "on_share": Combinator(lambda m: on_share(m, 0.5), {}),
    "kept_after_training": Combinator(
        kept_after_training,
        {
            "adapt": "the model before local training is not used",
            "headline": "the kept model is used before the next local training",
        },
        refuses=("predict", "first"),
    ),
    "best_of": Combinator(
        lambda m: best_of("whole", TASK, part=m, other=build("local", TASK, SGD, {})),
        CHOSEN,
        refuses=("first",),
    ),
    "do_no_harm": Combinator(
        lambda m: build(lambda task, local: m, TASK, SGD, {"do_no_harm": True}),
        {
            **{k: v for k, v in CHOSEN.items() if k not in ("name", "server")},
            "adapt": "the model before local training is not used",
        },
        refuses=("predict", "first"),
    ),
    "stacked": Combinator(
        lambda m: stacked("whole", TASK, part=m, other=build("local", TASK, SGD, {})),
        {
            **{k: v for k, v in IN_SLOTS.items() if k != "predict"},
            "adapt": "the model before local training is not used",
        },
        refuses=("predict", "first"),
    ),
    "robust": Combinator(lambda m: robust(m, "median"), {}),
    "as_newcomer": Combinator(
        lambda m: as_newcomer(m, 2, 3, aggregate=lambda server, uploads, ctx: server),
        {
            "aggregate": "the server only answers",
            "centre": "no server of newcomers is scored",
            "server": "no server of newcomers is shown",
            "state": "made by whoever knows the trained server",
            "connected": "newcomers upload nothing",
            "sparse": "there are no uploads",
            "who": "all newcomers train",
            "in_turn": "the server only answers",
            "before": "the round before training is over",
            "first": "the first rounds are over",
        },
    ),
}


@pytest.mark.parametrize("name", list(COMBINATORS))
def test_a_combinator_forwards_every_field(name: str) -> None:
    """What is not forwarded is in the list, with its reason; and what is in the list differs."""
    combinator, marks = COMBINATORS[name], Marks()
    given = without(marked(marks), combinator.refuses)
    result = combinator.make(given)
    skipped = {*combinator.changes, *combinator.refuses}
    assert gaps(result, given, marks, skipped) == []
    idle = set(combinator.changes) - set(gaps(result, given, marks, set(combinator.refuses)))
    assert idle == set(), "these are forwarded: take them off the list"


def without(method: Method, names: tuple[str, ...]) -> Method:
    """Give some fields of a record their defaults."""
    plain = Method("", {}, *(lambda *args: {} for _ in range(4)))
    return changed(method, **{name: get(plain, name) for name in names})


@pytest.mark.parametrize(
    ("name", "refused"),
    [(name, one) for name, c in COMBINATORS.items() for one in c.refuses],
)
def test_what_a_combinator_cannot_forward_it_refuses(name: str, refused: str) -> None:
    """An error names the method; nothing is dropped without a word."""
    combinator = COMBINATORS[name]
    others = tuple(one for one in combinator.refuses if one != refused)
    given = without(marked(Marks()), others)
    with pytest.raises(ConfigError, match="marked"):
        combinator.make(given)


def test_the_law_sees_a_dropped_field() -> None:
    """Each field of the record, dropped by hand, is noticed."""
    for name in FIELDS:
        marks = Marks()
        given = marked(marks)
        if name in ("begin", "finish", "aggregate", "init_server"):
            continue  # have no default to fall back to
        try:
            found = gaps(without(given, (name,)), given, marks, ())
        except KeyError:
            found = [name]  # a round does not even run without it
        assert name in found


def test_phases_keep_all_their_functions() -> None:
    """A phase that is moved to another context keeps its data, its stream and its six functions."""
    marks = Marks()
    (before,) = marked(marks).phases
    (after,) = on_share(marked(marks), 0.5).phases
    for one in fields(Phase):
        if one.name not in (*PHASE_FUNCTIONS, "part"):
            assert getattr(after, one.name) == getattr(before, one.name), one.name
    assert replace(after, part=before.part).part == (0.0, 1.0)


def test_sentinels_are_tensors() -> None:
    """The marked record runs by itself: all of its functions are reached under their own names."""
    marks = Marks()
    given = marked(marks)
    assert gaps(given, given, marks, ()) == []
    assert isinstance(TASK.init(0)["fc.bias"], Tensor)
