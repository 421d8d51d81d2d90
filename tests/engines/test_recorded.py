"""The CUDA engine without a GPU: recording a step means to take it again when it is replayed.

Buffers, widths, joined ReLUs and shared leaves are the engine's own; the kernels are those of
``launched``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sartor.core.local import Local
from sartor.core.task import Task, metered
from sartor.engines.cuda import graphs as graphed
from sartor.engines.cuda.graphs import Graphed, _schedule, _shared_buffer
from sartor.engines.cuda.recording import Function, clone, flattened, once, read_by, repeats
from sartor.engines.plan import build_plan
from sartor.engines.vectorised import Vectorised, over_lanes
from sartor.methods import build
from tests.engines.test_lane_layers import launched  # noqa: F401
from tests.toys import assert_same, federation, outcome, run, simulation


class _Again:
    """Stands in for a graph."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class _Function(Function):
    @staticmethod
    def _record(call: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        found = call()

        def again() -> None:
            pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(call()), strict=True)
            for old, leaf in pairs:
                if isinstance(old, Tensor):
                    assert repeats(old) == repeats(leaf)
                    once(old).copy_(once(leaf).clone())

        return _Again(again), found


class _Recorded(Graphed):
    """Records on the CPU."""

    def __init__(self, arena: Any, chunk: int | None = None) -> None:
        super().__init__(arena, chunk)
        self.workers = 1

    def _plain(self, fn: Any, *args: Any) -> Any:
        return over_lanes(fn)(*args)

    def clients(self, fn: Any, *args: Any) -> Any:
        return self._often(fn, self._plain, fn, *args)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make recording possible; returns the width of every recorded step."""
    found: list[int] = []

    def capture(self: Any, width: int) -> Any:
        with metered() as calls:
            self.counter.zero_()
            self._advance(width)
        self.engine.calls[self.phase.name] = calls()
        self.counter.zero_()
        found.append(width)
        return _Again(lambda: self._advance(width))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphed, "_WORTH_IT", 2)
    monkeypatch.setattr(graphed, "Function", _Function)
    monkeypatch.setattr(graphed._Captured, "_capture", capture)
    return found


class _Net(nn.Module):
    """A convolution, a pooling and two dense layers with ReLUs."""

    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(1, 3, 3), nn.Parameter(torch.zeros(()))
        self.hidden, self.fc = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        logits: Tensor = self.fc(F.relu(self.hidden(x.flatten(1)))) + self.gate
        return logits


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "pfedme"])
def test_recorded_steps_give_the_same_numbers(recorded: list[int], name: str) -> None:
    task = Task(_Net(), head="fc")
    method = build(name, task, Local(epochs=2, batch=3, lr=0.1), {})
    fed = federation(0, shape=(1, 6, 6))
    plain = run(simulation(method, task, [fed], engine=Vectorised, rounds=4))
    other = simulation(method, task, [fed], engine=_Recorded, rounds=4)
    other.context.queued = True
    assert_same(outcome(run(other)), outcome(plain), 1e-9)
    assert recorded


def test_widths_do_not_depend_on_who_was_drawn() -> None:
    """Else a resumed run would be rounded otherwise than one that was not stopped."""
    task = Task(_Net(), head="fc")
    method = build("fedavg", task, Local(epochs=2, batch=3, lr=0.1), {})
    sim = simulation(method, task, [federation(0, sizes=(4, 9, 30, 2, 17, 8), shape=(1, 6, 6))])
    arena, phase = sim.context.arena, method.phases[0]
    found = set()
    for cohort in ([0, 1, 2], [3, 4, 5], [2, 4, 1]):
        ids = np.array([cohort])
        steps = sim.context.known_steps(phase, ids, np.ones_like(ids, dtype=bool), 0)
        keys = np.zeros((*ids.shape, 2), dtype=np.int64)
        found.add(tuple(_schedule(phase, arena, build_plan(phase, arena, ids, keys, steps))))
    assert len(found) == 1
    # All six in the order of their size: 30, 17, 9, 8, 4, 2 samples, so 20, 12, 6, 6, 4, 2 steps;
    # three lanes stand for the first, third and fifth.
    (schedule,) = found
    assert schedule == (3,) * 4 + (2,) * 2 + (1,) * 14


def test_what_repeats_itself_is_held_once() -> None:
    base = torch.arange(6.0).reshape(1, 2, 1, 3)
    wide = base.expand(4, 2, 5, 3)
    assert once(wide).shape == base.shape
    assert repeats(wide) == (True, False, True, False)
    copy = clone(wide)
    assert torch.equal(copy, wide)
    assert repeats(copy) == repeats(wide)
    assert copy.untyped_storage().nbytes() == base.numel() * 4
    base[0, 0, 0, 0] = 7.0
    assert copy[0, 0, 0, 0] == 0.0
    buffer = _shared_buffer(wide)
    assert buffer.shape == wide.shape
    once(buffer).copy_(once(wide))
    assert torch.equal(buffer, wide)
    plain = torch.ones(2, 3)
    assert once(plain) is plain


@pytest.mark.usefixtures("launched", "recorded")
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(("name", "shared"), [("fedavg", True), ("local", False)])
def test_a_model_that_all_clients_share_is_scored_as_one(
    name: str, shared: bool, seeds: int
) -> None:
    """Its weights have no axis of clients in a step of the test; those of clients have one."""
    task = Task(_Net(), head="fc")
    method = build(name, task, Local(epochs=1, batch=3, lr=0.1), {})
    feds = [federation(seed, shape=(1, 6, 6)) for seed in range(seeds)]
    plain = run(simulation(method, task, feds, engine=Vectorised, rounds=2))
    other = run(simulation(method, task, feds, engine=_Recorded, rounds=2))
    assert_same(outcome(other), outcome(plain), 1e-9)
    steps = other.context.engine._captured.values()  # type: ignore[attr-defined]
    found = [step for step in steps if step.phase.name == "score test"]
    assert found
    as_one = [step for step in found if step.dims.own is None]  # before local training
    assert bool(as_one) == shared
    assert all(step.ctx.own["fc.weight"].shape == (seeds, 3, 6) for step in as_one)


def _called(fn: Any, *args: Any) -> tuple[set[int], _Function, list[Any]]:
    given: list[Any] = []
    form = flattened(args, given)
    found = _Function.of(fn, form, given, None)
    assert isinstance(found, _Function)
    return read_by(fn, form, given), found, given


def test_a_recorded_function_copies_what_it_reads() -> None:
    """What is only handed on is neither copied nor held, also under vmap; a view counts as read."""

    def fn(state: Any, scale: Tensor) -> Any:
        seen = {"kept": state["kept"], "sum": state["sum"] * scale, "first": state["seen"][0]}
        return seen, (scale.reshape(1), 3)

    mapped = torch.func.vmap(lambda s, r: fn(s, r)[0])
    state = {name: torch.randn(4, 3, 2) for name in ("kept", "sum", "seen")}
    reads, function, given = _called(mapped, state, torch.randn(4))
    assert {id(given[k]) for k in reads} == {id(state["sum"]), id(state["seen"]), id(given[-1])}
    new = [torch.randn_like(x) for x in given]
    kept = next(k for k, x in enumerate(given) if x is state["kept"])
    found = function(new)
    assert found["kept"] is new[kept]
    again = mapped({name: new[k] for k, name in enumerate(state)}, new[-1])
    assert all(torch.equal(found[name], again[name]) for name in again)
    alone = _called(fn, {name: x[0] for name, x in state.items()}, torch.tensor(2.0))[1]
    assert alone([x[0] for x in new[:3]] + [new[-1][0]])[1][1] == 3


def test_a_view_that_was_another_argument_when_it_was_recorded() -> None:
    """What looks as if it were handed on, and is a part of what is given, follows later calls."""
    both = torch.arange(6.0).reshape(2, 3)
    _, function, _ = _called(lambda a, b: (a[0], b + 1), both, both[0])
    first, second = function([torch.full((2, 3), 7.0), torch.zeros(3)])
    assert torch.equal(first, torch.full((3,), 7.0))
    assert torch.equal(second, torch.ones(3))


def test_a_function_that_changes_its_argument_is_not_recorded() -> None:
    """It continues as it is; what it changes of its own is no matter."""
    given = torch.arange(3.0)
    assert _Function.of(lambda a: a.add_(1), *_flat(given), None) is None
    assert _Function.of(lambda a: torch.add(a, 1, out=a), *_flat(given), None) is None
    assert torch.equal(given, torch.arange(3.0))
    found = _Function.of(lambda a: a.clone().add_(1), *_flat(given), None)
    assert found is not None
    assert torch.equal(found([torch.zeros(3)]), torch.ones(3))


def _flat(*args: Any) -> tuple[Any, list[Any]]:
    given: list[Any] = []
    return flattened(args, given), given


def test_two_arguments_that_were_one_when_it_was_recorded() -> None:
    """A function that hands on its first argument does so when the two differ later."""
    both = torch.arange(3.0)
    _, function, _ = _called(lambda a, b: (a, b), both, both)
    assert not function.works
    first, second = function([torch.zeros(3), torch.ones(3)])
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(second, torch.ones(3))
