"""Lanes side by side: each takes its own steps on its own samples, whatever the others do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.core import rng
from sartor.core.method import Batch, ClientContext, Phase, ServerContext
from sartor.core.task import Task
from sartor.engines import vectorised
from sartor.engines.parts import Arena, Split
from sartor.engines.plan import build_plan, num_steps
from sartor.engines.sequential import Sequential
from sartor.engines.vectorised import STOP_EVERY, Vectorised, over_lanes
from tests.toys import Net

CPU = torch.device("cpu")


class World(NamedTuple):
    """Clients whose samples are known numbers, and where they work."""

    arena: Arena
    ctx: ClientContext
    cohort: np.ndarray
    keys: np.ndarray


def world(sizes: list[list[int]]) -> World:
    """Give client i of run r the samples 1000 r + 100 i + 1, + 2, ... ."""
    runs, slots = len(sizes), len(sizes[0])
    lists = [[1000.0 * r + 100 * i + j + 1 for j in range(n)] for r, i, n in _lanes(sizes)]
    flat = [x for own in lists for x in own]
    start = np.cumsum([0, *(len(own) for own in lists)])[:-1].reshape(runs, slots)
    split = Split(torch.arange(len(flat)), start, np.asarray(sizes), max(map(max, sizes)))
    x = torch.tensor(flat, dtype=torch.float64)[:, None]
    arena = Arena(x, torch.zeros(len(flat)), {"train": split}, runs, slots, CPU)
    lane = torch.arange(runs * slots).reshape(runs, slots)
    cohort = np.tile(np.arange(slots), (runs, 1))
    key = rng.fold_host(rng.key(5).numpy()[None, None, :], lane.numpy(), "train")
    ctx = ClientContext(
        hyper={"rate": 1.0 + lane.double()},
        common={"shift": torch.arange(runs).double() + 0.25},
        own={"bias": 10.0 * lane.double()[..., None].expand(runs, slots, 2)},
        key=torch.from_numpy(key),
        round=torch.full((runs,), 4),
        rate_round=torch.full((runs,), 4),
        index=torch.from_numpy(cohort),
        num_samples=torch.from_numpy(split.size),
        mask=torch.arange(split.capacity) < torch.from_numpy(split.size)[..., None],
        reports=lane % 2 == 0,
    )
    return World(arena, ctx, cohort, key)


def _lanes(sizes: list[list[int]]) -> list[tuple[int, int, int]]:
    return [(r, i, n) for r, row in enumerate(sizes) for i, n in enumerate(row)]


def plan_of(there: World, phase: Phase, steps: np.ndarray | None = None) -> Any:
    split = there.arena.splits["train"]
    wanted = num_steps(phase, split.size) if steps is None else steps
    return build_plan(phase, there.arena, there.cohort, there.keys, wanted)


def add_up(work: Any, batch: Any, ctx: ClientContext) -> Any:
    """Add the real samples of a batch to w, and note everything that a client can see."""
    batches = batch if isinstance(batch, tuple) and not isinstance(batch, Batch) else (batch,)
    total = sum((b.x[..., 0] * b.mask).sum() for b in batches)
    held = sum(b.mask.sum() for b in batches)
    seen = ctx.hyper["rate"] + ctx.common["shift"] + ctx.own["bias"].sum() + ctx.round
    seen = seen + ctx.index + ctx.num_samples + ctx.mask.sum() + 0.5 * ctx.reports
    drawn = ctx.key.sum() if ctx.key.numel() else 0
    return {
        "w": work["w"] + total,
        "held": work["held"] + held,
        "count": work["count"] + 1,
        "seen": work["seen"] + seen,
        "drawn": work["drawn"] + drawn,
    }


def nothing(there: World) -> Any:
    shape = there.cohort.shape
    whole = torch.zeros(shape, dtype=torch.int64)
    real = torch.zeros(shape, dtype=torch.float64)
    return {"w": real, "held": whole, "count": whole, "seen": real, "drawn": whole}


SHAPES = {
    "one lane": [[5]],
    "one run": [[9, 5, 5, 2]],
    "equal clients": [[5, 5, 5]],
    "runs of one client": [[7], [3], [5]],
    "as many runs as clients": [[9, 4], [3, 5]],
    "longest lanes not first": [[1, 6, 3], [2, 2, 8]],
    "somebody without samples": [[4, 0, 3], [0, 5, 0]],
}


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_lane_takes_its_own_steps_on_its_own_samples(shape: str, draws: int) -> None:
    """Sums over two passes are twice the sums of the samples; a lane that is done stays."""
    sizes = SHAPES[shape]
    there = world(sizes)
    phase = Phase("sum", add_up, epochs=2, batch=2, draws=draws, random=True)
    plan = plan_of(there, phase)
    work, taken = Vectorised(there.arena).phase(phase, nothing(there), there.ctx, plan)
    assert taken.tolist() == plan.steps.tolist()
    for r, i, n in _lanes(sizes):
        lane, steps = r * len(sizes[0]) + i, 2 * -(-n // 2)
        own = sum(1000.0 * r + 100 * i + j + 1 for j in range(n))
        # rate, shift, two biases, round, index, samples, their mask, reports
        seen = 1.0 + lane + r + 0.25 + 20 * lane + 4 + i + n + n + 0.5 * (lane % 2 == 0)
        assert work["w"][r, i] == 2 * draws * own
        assert work["held"][r, i] == 2 * draws * n
        assert work["count"][r, i] == steps == plan.steps[r, i]
        assert work["seen"][r, i] == steps * seen
        assert work["drawn"][r, i] == plan.keys[r, i, :steps].sum()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_pass_in_order_is_repeated_batch_by_batch(shape: str) -> None:
    """Weighing step s by s shows which batch came when; a plan that repeats itself is short."""
    there = world(SHAPES[shape])

    def weigh(work: Any, batch: Any, ctx: ClientContext) -> Any:
        count = work["count"] + 1
        return {"w": work["w"] + count * (batch.x[..., 0] * batch.mask).sum(), "count": count}

    phase = Phase("weigh", weigh, epochs=3, batch=3, shuffle=False)
    plan = plan_of(there, phase)
    assert (plan.table.shape[2] < plan.num_steps) == (shape in ("one lane", "equal clients"))
    start = {k: v for k, v in nothing(there).items() if k in ("w", "count")}
    work, _ = Vectorised(there.arena).phase(phase, start, there.ctx, plan)
    for r, i, n in _lanes(SHAPES[shape]):
        samples = [1000.0 * r + 100 * i + j + 1 for j in range(n)]
        batches = 3 * [samples[k : k + 3] for k in range(0, n, 3)]
        assert work["w"][r, i] == sum((s + 1) * sum(b) for s, b in enumerate(batches))


def test_a_padded_sample_changes_neither_loss_nor_gradient() -> None:
    """A client of two samples in a batch of five trains on the mean over two."""
    there = world([[2, 5]])
    task = Task(Net(inputs=1), head="fc")
    params = {k: v.double().requires_grad_() for k, v in task.init(0).items()}
    phase = Phase("look", lambda work, batch, ctx: work, batch=None, shuffle=False)
    plan = plan_of(there, phase)
    batch = plan.batches(there.arena, plan.table[0, 0, 0])
    assert batch.mask.tolist() == [True, True, False, False, False]
    real = Batch(*(leaf[:2] if leaf.dim() else leaf for leaf in batch))
    wild = batch._replace(x=torch.where(batch.mask[:, None], batch.x, 1e6))
    y = torch.tensor([0, 2, 1, 1, 1])

    def slope(batch: Batch) -> tuple[Tensor, ...]:
        loss = task.loss(params, batch)
        return loss, *torch.autograd.grad(loss, list(params.values()))

    for padded in (batch, wild):
        pairs = zip(slope(padded._replace(y=y)), slope(real._replace(y=y[:2])), strict=True)
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


# ---- phases that stop ----------------------------------------------------------------------------


def stopping(limits: list[list[int]], calls: list[int], **kind: Any) -> Phase:
    """Stop a lane when it has taken as many steps as its limit says."""
    table = torch.tensor(limits)

    def step(work: Any, batch: Any, ctx: ClientContext) -> Any:
        calls[0] += 1
        return {"count": work["count"] + 1}

    def stop(work: Any, ctx: ClientContext) -> Tensor:
        return work["count"] >= table.reshape(-1)[(ctx.hyper["rate"] - 1.0).long()]

    return Phase("stopping", step, stop=stop, batch=1, **kind)


@pytest.mark.parametrize(
    ("steps", "limits", "called"),
    [
        # All are done after 5: the host asks after STOP_EVERY = 8 steps, for the first time.
        ([[30, 30, 30]], [[5, 2, 4]], 8),
        ([[30, 30, 30]], [[8, 8, 8]], 8),
        # One needs nine: it is asked about again after 16.
        ([[30, 30, 30]], [[5, 9, 4]], 16),
        ([[30, 30], [30, 30]], [[1, 2], [3, 17]], 24),
        # Those that nobody stops are done with their last step, those that are stopped before it.
        ([[30, 8, 8]], [[3, 99, 99]], 8),
        ([[30, 9, 8]], [[3, 99, 99]], 16),
        ([[9, 8, 2]], [[99, 99, 99]], 9),
        # In no order: a short lane ahead of a long one.
        ([[2, 12, 7], [11, 1, 12]], [[99, 10, 3], [6, 1, 9]], 12),
        # Alone: it stops at once.
        ([[30]], [[5]], 5),
        ([[4]], [[5]], 4),
    ],
)
def test_a_lane_that_is_done_does_not_move(
    steps: list[list[int]], limits: list[list[int]], called: int
) -> None:
    """Each takes the smaller of its steps and its limit; the host ends the loop when all did."""
    assert STOP_EVERY == 8
    there, calls = world([[n + 1 for n in row] for row in steps]), [0]
    phase = stopping(limits, calls)
    plan = plan_of(there, phase, np.asarray(steps))
    engine = Vectorised(there.arena)
    work = {"count": torch.zeros(there.cohort.shape, dtype=torch.int64)}
    work, taken = engine.phase(phase, work, there.ctx, plan)
    wanted = np.minimum(steps, limits).tolist()
    assert work["count"].tolist() == wanted
    assert taken.tolist() == wanted
    assert calls[0] == called


def test_entering_and_leaving_surround_the_steps() -> None:
    """(0 + 7 + steps) · 2, for those without steps too."""
    there = world([[3, 0], [1, 2]])
    phase = Phase(
        "around",
        lambda work, batch, ctx: {"w": work["w"] + 1},
        enter=lambda work, ctx: {"w": work["w"] + 7},
        leave=lambda work, ctx: {"w": 2 * work["w"]},
        batch=1,
    )
    plan = plan_of(there, phase)
    zero = {"w": torch.zeros(2, 2)}
    work, _ = Vectorised(there.arena).phase(phase, zero, there.ctx, plan)
    assert work["w"].tolist() == [[20.0, 14.0], [16.0, 18.0]]


# ---- functions of clients and servers ------------------------------------------------------------


@pytest.mark.parametrize("shape", list(SHAPES))
def test_functions_see_one_client_and_one_run(shape: str) -> None:
    """Clients, messages and servers come out with their axes, as from a loop over all."""
    there = world(SHAPES[shape])
    fast, slow = Vectorised(there.arena), Sequential(there.arena)
    tensor = torch.arange(float(there.cohort.size)).reshape(there.cohort.shape)

    def client(work: Any, other: Any, ctx: ClientContext) -> Any:
        assert ctx.index.dim() == work["a"].dim() == 0
        return {"b": work["a"] * 2 + ctx.common["shift"] + other["c"]}, {"i": ctx.index}

    arguments: Any = ({"a": tensor}, {"c": tensor + 1}, there.ctx)
    found, wanted = (e.clients(client, *arguments) for e in (fast, slow))
    assert torch.equal(found[0]["b"], wanted[0]["b"])
    assert torch.equal(found[1]["i"], wanted[1]["i"])
    assert found[0]["b"].shape == there.cohort.shape

    def message(server: Any, index: Tensor, server_ctx: Any) -> Any:
        return {"to": server["s"] * 10 + index + server_ctx.round}

    runs = torch.arange(float(len(SHAPES[shape])))
    cohort = torch.from_numpy(there.cohort)
    server_ctx = ServerContext({}, there.ctx.key[:, 0], runs + 3, cohort, cohort, cohort >= 0)
    arguments = ({"s": runs}, cohort, server_ctx)
    found, wanted = (e.addresses(message, *arguments) for e in (fast, slow))
    assert torch.equal(found["to"], wanted["to"])
    assert torch.equal(found["to"], (11 * runs + 3)[:, None] + cohort)
    total = fast.runs(lambda server, work: {"t": server["s"] + work["a"].sum()}, *_both(tensor))
    assert torch.equal(total["t"], runs + tensor.sum(1))


def _both(tensor: Tensor) -> tuple[Any, Any]:
    return {"s": torch.arange(float(len(tensor)))}, {"a": tensor}


def test_a_function_that_is_used_often_is_traced_and_stays_the_same() -> None:
    """After fifty uses its operations are known: Python is not asked again."""
    there, asked = world([[2, 3]]), []
    engine = Vectorised(there.arena)

    def client(work: Any, ctx: ClientContext) -> Any:
        asked.append(1)
        return {"a": work["a"] * ctx.hyper["rate"]}

    work = {"a": torch.tensor([[5.0, 7.0]], dtype=torch.float64)}
    engine.traces.worth_it = 50
    for _ in range(50):
        engine.clients(client, work, there.ctx)
    engine.traces.prepare()
    before = len(asked)
    assert engine.clients(client, work, there.ctx)["a"].tolist() == [[5.0, 14.0]]
    assert len(asked) == before


def test_what_surrounds_a_mapped_function_is_entered_once_for_all_lanes() -> None:
    """The context is open while the function runs, and closed afterwards."""
    there, reported = world([[1, 2, 3]]), []

    @contextmanager
    def around() -> Any:
        reported.append("in")
        yield
        reported.append("out")

    def client(work: Any, ctx: ClientContext) -> Any:
        reported.append("work")
        return work

    over_lanes(client, around)({"a": torch.zeros(1, 3)}, there.ctx)
    assert reported == ["in", "work", "out"]


# ---- blocks, counts, and how many lanes at once --------------------------------------------------


class Reported:
    """Traces that say what they are set to, and note when they are asked."""

    def __init__(self, answers: Callable[[], bool], done: list[int]) -> None:
        self.answers, self.done = answers, done
        self.asked: list[int] = []

    made = 0

    def prepare(self) -> bool:
        self.asked.append(len(self.done))
        return self.answers()


@pytest.mark.parametrize(
    ("blocks", "workers", "learning", "asked"),
    [
        (40, 2, True, [0, 2, 6, 14]),  # waves of 2, 4, 8, and 26 are not more than twice 16
        (40, 1, True, [0, 1, 3, 7, 15]),
        (40, 2, False, [0, 2]),  # the first wave learns in any case
        (4, 2, True, [0]),
        (5, 2, True, [0, 2]),
        (1, 2, True, [0]),
        (0, 2, True, []),
    ],
)
def test_waves_double_as_long_as_there_is_something_to_learn(
    blocks: int, workers: int, learning: bool, asked: list[int]
) -> None:
    """Blocks come back in order; the last wave is all that is left once it is short enough."""
    engine: Any = Vectorised(world([[1]]).arena)
    done: list[int] = []
    engine.workers = workers
    engine.traces = reported = Reported(lambda: learning, done)

    def work(block: int) -> int:
        done.append(block)
        return 10 * block

    assert engine.blocks(work, list(range(blocks))) == [10 * b for b in range(blocks)]
    assert sorted(done) == list(range(blocks))
    assert reported.asked == asked


def test_blocks_share_the_workers_and_one_alone_stays_here() -> None:
    """Several blocks run in threads of one core each; one block, or one worker, needs none."""
    engine = Vectorised(world([[1]]).arena)
    here = threading.current_thread()

    def where(block: int) -> tuple[threading.Thread, int]:
        return threading.current_thread(), torch.get_num_threads()

    engine.workers = 1
    assert {thread for thread, _ in engine.blocks(where, [0, 1, 2])} == {here}
    engine.workers = 3
    assert [thread for thread, _ in engine.blocks(where, [0])] == [here]
    for thread, cores in engine.blocks(where, [0, 1]):
        assert thread.name.startswith("sartor-block")
        assert cores == 1


@pytest.mark.parametrize("sizes", [[[3]], [[3, 2]]])
def test_losses_of_a_step_are_counted_and_a_trace_forgets_none(sizes: list[list[int]]) -> None:
    """Two losses without a gradient and none with; what a later trace does not say is kept."""
    there = world(sizes)
    task = Task(Net(inputs=1), head="fc")
    params = {k: v.double() for k, v in task.init(0).items()}

    def step(work: Any, batch: Batch, ctx: ClientContext) -> Any:
        batch = batch._replace(y=torch.zeros_like(batch.rows))
        return {"w": work["w"] + task.loss(params, batch) + task.loss(params, batch)}

    phase = Phase("twice", step, batch=2)
    engine = Vectorised(there.arena)
    zero = {"w": torch.zeros(there.cohort.shape, dtype=torch.float64)}
    engine.traces.worth_it = 1
    for _ in range(3):
        engine.phase(phase, zero, there.ctx, plan_of(there, phase))
        engine.traces.prepare()
        assert engine.calls == {"twice": (2, 0)}
    assert engine.traces.made


def test_one_lane_has_operations_of_its_own_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward pass of a lane that is computed alone is surrounded by them."""
    entered = []

    @contextmanager
    def operations() -> Any:
        entered.append(1)
        yield

    monkeypatch.setattr(vectorised, "CoreOperations", operations)
    there = world([[3]])
    task = Task(Net(inputs=1), head="fc")
    params = {k: v.double() for k, v in task.init(0).items()}

    def step(work: Any, batch: Batch, ctx: ClientContext) -> Any:
        return {"w": work["w"] + task.logits(params, batch.x).sum()}

    phase = Phase("look", step, batch=1)
    zero = {"w": torch.zeros(1, 1, dtype=torch.float64)}
    Vectorised(there.arena).phase(phase, zero, there.ctx, plan_of(there, phase))
    assert len(entered) == 3


def test_threads_for_blocks_keep_one_core_whatever_is_set_elsewhere() -> None:
    """Also if the process sets another number between a thread's start and its first operation.

    Convolutions are rounded otherwise on two cores, so blocks would depend on what ran before.
    """
    threads, before = 7, torch.get_num_threads()  # a pool that no other test has
    begun = threading.Barrier(threads)
    pool = vectorised._pool(threads)
    list(pool.map(lambda _: begun.wait(), range(threads)))
    torch.set_num_threads(2)
    try:

        def cores(_: int) -> int:
            begun.wait()
            torch.ones(200, 200) @ torch.ones(200, 200)
            return torch.get_num_threads()

        assert list(pool.map(cores, range(threads))) == [1] * threads
    finally:
        torch.set_num_threads(before)


def test_lanes_at_once_are_those_given_or_measured_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes 256 until it has measured; another device takes as many as there are."""
    freed = []
    monkeypatch.setattr(vectorised, "keep_freed_memory", lambda: freed.append(1))
    arena = world([[1]]).arena
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    elsewhere = Vectorised(replace(arena, device=torch.device("cuda")))
    assert (elsewhere.workers, freed) == (1, [])
    here = Vectorised(arena)
    assert (here.workers, freed) == (5, [1])
    assert Vectorised(arena, 7).chunk(()) == 7
    assert here.chunk(()) == 256
    assert elsewhere.chunk(()) == Sequential(arena).chunk(()) >= 10**9
    costs = {2: 2.0, 8: 4.0}  # five cores: blocks of two
    elsewhere.tune(costs.__getitem__, 8, "cuda")
    assert elsewhere.lanes is None
    here.tune(costs.__getitem__, 8, "two is fastest")
    assert here.chunk(()) == 2
    here.tune({2: 9.0}.__getitem__, 8, "another, but it was measured already")
    assert here.chunk(()) == 2


def test_the_limit_of_memory_only_falls() -> None:
    """256 lanes, then 100 at most, then 50; a larger limit later frees nothing."""
    engine, few = Vectorised(world([[1]]).arena), Vectorised(world([[1]]).arena, 7)
    for limit, wanted in ((100, 100), (50, 50), (80, 50)):
        engine.spare(limit)
        few.spare(limit)
        assert (engine.chunk(()), few.chunk(())) == (wanted, 7)
