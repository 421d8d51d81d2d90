"""Messages of which only some rows travel: what arrives, what it costs, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.compose import within_groups
from sartor.compose.parallel import in_parallel
from sartor.core import tree, wire
from sartor.core.errors import ContractError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.methods import build
from sartor.training.onboarding import newcomer_record
from tests.toys import assert_same, federation, net_task, outcome, run, simulation

SGD = Local(epochs=1, batch=4, lr=0.2)
MARKS = {"deep/rows": "counts", "model": "sent"}


def stack() -> dict[str, Any]:
    """Make six messages, (2 runs, 3 slots): rows by counts, a leaf by one mark, and the rest."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (2, 3, 9), generator=draw).float()
    return {
        "deep": {"rows": torch.randn(2, 3, 9, 4, generator=draw)},
        "counts": counts,
        "model": torch.randn(2, 3, 5, 2, generator=draw).double(),
        "sent": torch.tensor([[True, False, True], [False, True, False]]),
        "rest": torch.ones(2, 3, 7),
    }


def test_rows_without_a_mark_arrive_as_zeros() -> None:
    """Marked rows arrive as they are, the others as zeros whatever they hold; the rest stays."""
    sent = stack()
    rows, there = sent["deep"]["rows"], sent["counts"] > 0
    rows[~there] = torch.nan
    found = wire.received(sent, MARKS)
    assert torch.equal(found["deep"]["rows"][there], rows[there])
    assert not found["deep"]["rows"][~there].any()
    assert torch.equal(found["model"][sent["sent"]], sent["model"][sent["sent"]])
    assert not found["model"][~sent["sent"]].any()
    for name in ("counts", "sent", "rest"):
        assert found[name] is sent[name]
    assert rows.isnan().any()  # the sender's own tree is as it was


def test_the_payload_is_counted_per_message() -> None:
    """Rows 4·4 and counts 4 a class held, a leaf 80 or nothing, 28 for the rest, 2 + 1 of marks."""
    sent = stack()
    held = (sent["counts"] > 0).sum(-1).numpy()
    assert len(np.unique(held)) > 1
    wanted = held * (4 * 4 + 4) + sent["sent"].numpy() * 80 + 28 + 2 + 1
    found = wire.num_bytes(sent, MARKS, 2)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(wire.num_bytes(wire.received(sent, MARKS), MARKS, 2), wanted)


def test_marks_that_are_shared_are_sent_once() -> None:
    """Two tables with one set of boolean marks: their rows, and one bit a class."""
    held = torch.tensor([[True] * 3 + [False] * 6])
    sent = {"a": torch.ones(1, 9, 5), "b": torch.ones(1, 9, 2), "held": held}
    assert wire.num_bytes(sent, {"a": "held", "b": "held"}, 1).tolist() == [4 * 3 * 7 + 2]


def test_whole_messages_cost_what_they_hold() -> None:
    """Without marks the payload is that of the tree; an empty message is free."""
    sent = stack()
    size = tree.num_bytes(sent, 2)
    np.testing.assert_array_equal(wire.num_bytes(sent, {}, 2), np.full((2, 3), size))
    assert wire.num_bytes({}, {}, 2) == 0
    assert wire.received(sent, {}) is sent


def test_no_rows_are_no_bytes() -> None:
    """A table of no rows has no marks to send."""
    sent = {"table": torch.ones(2, 3, 0, 4), "marks": torch.ones(2, 3, 0).bool()}
    assert not wire.num_bytes(sent, {"table": "marks"}, 2).any()


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        ({"upload/a": "common/b"}, "two leaves of one message"),
        ({"message/a": "message/b"}, "common, own, upload"),
        ({"upload/a": "upload/b", "upload/b": "upload/c"}, "sent whole"),
    ],
)
def test_declarations_that_cannot_be_are_refused(sparse: dict[str, str], words: str) -> None:
    """Marks travel with their rows."""
    with pytest.raises(ContractError, match=words):
        wire.marks_of(sparse, "upload")


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        ({"upload/means": "upload/hold"}, r"no such leaf; it has \['held', 'means'\]"),
        ({"upload/held": "upload/means"}, "give one mark per row"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(sparse: dict[str, str], words: str) -> None:
    """A misspelt name would book the wrong bytes in silence."""
    task = net_task()
    method = changed(build("fedgh", task, SGD, {}), sparse=sparse)
    with pytest.raises(ContractError, match=words):
        simulation(method, task, [federation()]).step()


def leaking(task: Any, direction: str) -> Any:
    """Make FedGH that hides numbers in rows that do not travel, and reads them where they end."""
    base = build("fedgh", task, SGD, {})

    def finish(client: Any, work: Any, ctx: Any) -> Any:
        kept, upload = base.finish(client, work, ctx)
        hidden = torch.where(upload["held"][:, None], upload["means"], 1.0 + ctx.index)
        return kept, {**upload, "means": hidden}

    def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
        absent = torch.where(uploads["held"][..., None], 0.0, uploads["means"])
        heard = absent.sum() if direction == "upload" else server["heard"]
        return {**base.aggregate(server, uploads, ctx), "heard": heard}

    def secret(server: Any) -> Any:
        none = torch.zeros_like(server["heard"], dtype=torch.bool)
        return {"secret": server["heard"] + 5.0, "none": none}

    def begin(client: Any, ctx: Any) -> Any:
        work = base.begin(client, ctx)
        message = ctx.common if direction == "common" else ctx.own
        return {**work, "params": tree.scale(work["params"], 1.0 + message["secret"])}

    changes = {
        "upload": {"finish": finish},
        "common": {"broadcast": lambda s, h: {"head": s["head"], **secret(s)}, "begin": begin},
        "own": {"address": lambda s, i, h: secret(s), "begin": begin},
    }
    plain = changed(
        base,
        init_server=lambda params, ctx: {
            **base.init_server(params, ctx),
            "heard": params["fc.bias"].sum() * 0.0,
        },
        broadcast=lambda server, ctx: {"head": server["head"]},
        aggregate=aggregate,
    )
    return replace(plain, **changes[direction])


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("direction", ["upload", "common", "own"])
def test_nothing_leaks_through_a_row_that_does_not_travel(direction: str, engine: str) -> None:
    """A method that writes into such rows and reads them elsewhere finds zeros."""
    task = net_task()
    method = leaking(task, direction)
    sparse = {f"{direction}/secret": f"{direction}/none"}
    if direction == "upload":
        sparse = {"upload/means": "upload/held"}

    def loss(declared: dict[str, str]) -> dict[str, np.ndarray]:
        other = changed(method, sparse=declared)
        return outcome(run(simulation(other, task, [federation()], engine=engine, rounds=2)))

    plain, open_, closed = (
        outcome(run(simulation(build("fedgh", task, SGD, {}), task, [federation()], rounds=2))),
        loss({}),
        loss(sparse),
    )
    if direction == "upload":
        assert open_["server/heard"] > 1.0
        assert closed["server/heard"] == 0.0
    else:
        assert np.abs(open_["post/test/loss"] - plain["post/test/loss"]).max() > 1e-3
    for point in ("pre", "post"):
        name = f"{point}/test/loss"
        np.testing.assert_allclose(closed[name], plain[name], rtol=0, atol=1e-12)


def test_a_client_without_messages_is_not_present_for_the_server() -> None:
    """The upload of a client that is not connected is not used, even by a trusting method."""
    task = net_task()
    base = build("fedavg", task, SGD, {})
    some = changed(base, connected=lambda server, ctx: ctx.cohort < 2)
    few = changed(
        base,
        aggregate=lambda server, uploads, ctx: base.aggregate(
            server, uploads, ctx._replace(present=ctx.present & (ctx.cohort < 2))
        ),
    )
    found, wanted, all_ = (
        outcome(run(simulation(m, task, [federation()], participation="all")))
        for m in (some, few, base)
    )
    for name in ("server/params/fc.bias", "pre/test/loss"):
        np.testing.assert_array_equal(found[name], wanted[name])
        assert np.abs(found[name] - all_[name]).max() > 1e-6


# ---- methods made of methods ---------------------------------------------------------------------


def test_side_by_side_sends_what_the_parts_send() -> None:
    """Bytes of the parts, each with its own marks."""
    task, feds = net_task(), [federation()]
    parts = {k: build(k, task, SGD, {}) for k in ("fedproto", "fedgh")}
    both = in_parallel("both", **parts)
    both = changed(both, model=lambda work, ctx: work["fedgh"]["params"])
    ledger = run(simulation(both, task, feds)).ledger()
    alone = [run(simulation(m, task, feds)).ledger() for m in parts.values()]
    for way in ("bytes_down", "bytes_up"):
        wanted = sum(getattr(series, way) for series in alone)
        np.testing.assert_array_equal(getattr(ledger, way), wanted)


def test_one_group_of_everybody_sends_what_the_method_sends() -> None:
    """Inside groups the common message is the client's own; its marks go with it."""
    task = net_task()
    plain = build("fedproto", task, SGD, {})
    grouped = within_groups(plain)
    assert grouped.wire.sparse["own/prototypes"] == "own/seen"
    found, wanted = (
        outcome(run(simulation(m, task, [federation()], participation="all")))
        for m in (grouped, plain)
    )
    shared = {k for k in wanted if not k.startswith("server")}
    assert_same({k: found[k] for k in shared}, {k: wanted[k] for k in shared}, atol=1e-12)


@pytest.mark.parametrize("name", ["fedproto", "fedpac", "pfedla"])
def test_newcomers_upload_nothing_and_read_the_same_messages(name: str) -> None:
    """The marks of messages stay, those of uploads go."""
    task = net_task()
    options = {"retained": 1} if name == "pfedla" else {}
    sim = run(simulation(build(name, task, SGD, options), task, [federation()], rounds=1))
    record = newcomer_record(sim)
    assert record.wire.sparse
    assert not wire.marks_of(record.wire.sparse, "upload")
    ledger = run(simulation(record, task, [federation(3)], rounds=1)).ledger()
    assert ledger.bytes_up.sum() == 0 < ledger.bytes_down.sum()
