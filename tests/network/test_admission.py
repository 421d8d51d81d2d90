"""What the server accepts: a bad answer is refused with its reason and costs only itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.network.admission import Admission
from sartor.network.messages import pack, unpack
from sartor.network.transport import Loopback
from tests.laws import Case
from tests.network.test_loopback import SIZES, clients_of, coordinator, found, replayed
from tests.toys import assert_same, federation, outcome, run

Change = Callable[[dict[str, Any], dict[str, Any]], bytes]


def _leaf(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def tamper(body: dict[str, Any], meta: dict[str, Any]) -> bytes:
        name = next(iter(body["upload"]))
        return pack({"upload": {**body["upload"], name: change(body["upload"][name])}}, meta)

    return tamper


def _nan(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.view(-1)[0] = torch.nan
    return leaf


BAD: dict[str, tuple[Change, str]] = {
    "nan": (_leaf(_nan), "not finite"),
    "infinite": (_leaf(lambda leaf: leaf + torch.inf), "not finite"),
    "shape": (_leaf(lambda leaf: leaf[None]), "has the shape"),
    "type": (_leaf(lambda leaf: leaf.float()), "has the type"),
    "large": (_leaf(lambda leaf: leaf * 1e9), "above the bound"),
    "names": (
        lambda body, meta: pack({"upload": {**body["upload"], "more": torch.ones(1)}}, meta),
        "not expected",
    ),
    "nothing": (lambda body, meta: pack({}, meta), "are missing"),
    "cut short": (lambda body, meta: pack(body, meta)[:-8], "cannot be read"),
    "no header": (lambda body, meta: b"\xff" * 100, "cut short"),
    "empty": (lambda body, meta: b"", "cannot be read"),
    "huge": (lambda body, meta: pack({"x": torch.zeros(1 << 21)}, meta), "the limit is"),
    "earlier": (lambda body, meta: pack(body, {**meta, "serial": 1}), "too late"),
    "other server": (lambda body, meta: pack(body, {**meta, "server": "x"}), "too late"),
    "costs": (lambda body, meta: pack(body, {**meta, "costs": [-5, 0]}), "sensible"),
    "scores": (lambda body, meta: pack(body, {**meta, "scores": {}}), "scores"),
}


CASE = Case("fedapa", hyper={"mix_lr": 0.5})


@pytest.fixture(scope="module")
def without_c1() -> dict[str, np.ndarray]:
    """Return how a run of three rounds ends in which the second client is never there."""
    there = [{"there": [0, 2, 3]}] * 3
    return outcome(replayed(CASE, federation(sizes=SIZES), there, participation="all"))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_refused_and_costs_only_itself(
    kind: str, without_c1: dict[str, np.ndarray]
) -> None:
    """The run ends as one in which that client was never there, and says why."""
    case, fed = CASE, federation(sizes=SIZES)
    clients = clients_of(case, fed)
    change, why = BAD[kind]

    def bad(message: bytes) -> bytes:
        answer = clients["c1"].answer(message)
        if unpack(message)[1]["kind"] != "work":
            return answer
        return change(*unpack(answer))

    answers = {name: client.answer for name, client in clients.items()}
    everybody = Participation.parse("all")
    sim = coordinator(
        case,
        fed,
        Loopback({**answers, "c1": bad}),
        participation=everybody,
        admission=Admission(max_norm=1e6),
    )
    run(sim.simulation)
    assert [event["client"] for event in sim.dispatcher.events] == ["c1"] * 3
    assert all(why in event["why"] for event in sim.dispatcher.events), sim.dispatcher.events[0][
        "why"
    ]
    assert [event["round"] for event in sim.dispatcher.events] == [0, 1, 2]
    assert [note["there"] for note in sim.dispatcher.attended] == [[0, 2, 3]] * 3
    assert_same(found(sim, clients), without_c1, atol=1e-10)


def test_the_norm_counts_all_leaves() -> None:
    rule = Admission(max_norm=5.0)
    wanted = {"a": {"x": torch.zeros(1)}, "b": torch.zeros(1)}
    good = {"a/x": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    taken = rule.upload(good, wanted, {}, set())
    assert {name: leaf.item() for name, leaf in tree.items(taken)} == {"a/x": 3.0, "b": 4.0}
    with pytest.raises(Exception, match="above the bound"):
        rule.upload({**good, "b": torch.tensor([4.1])}, wanted, {}, set())


def test_rows_must_be_as_many_as_their_marks() -> None:
    """A sparse leaf that brings other rows than it marks is refused."""
    wanted = {"means": torch.zeros(3, 2), "held": torch.zeros(3, dtype=torch.bool)}
    held = torch.tensor([True, False, True])
    rule, marks = Admission(), {"means": "held"}
    whole = rule.upload({"means": torch.ones(2, 2), "held": held}, wanted, marks, set())
    assert whole["means"].tolist() == [[1, 1], [0, 0], [1, 1]]
    for rows in (torch.ones(3, 2), torch.ones(2, 3), torch.tensor(1.0)):
        with pytest.raises(Exception, match=r"rows|shape"):
            rule.upload({"means": rows, "held": held}, wanted, marks, set())


def test_bytes_of_messages_survive_the_way() -> None:
    body = {"a": {"b/c": torch.arange(3)}, "e": {}, "h": torch.ones(2, 2)}
    data = pack(body, {"n": [1, 2]}, lambda name: name != "h")
    back, meta = unpack(data)
    assert meta == {"n": [1, 2]}
    assert back["e"] == {}
    assert back["a"]["b/c"].tolist() == [0, 1, 2]
    assert np.array_equal(back["h"].numpy(), np.zeros((2, 2)))
    assert b"pickle" not in data
