"""Blocks in processes: the same numbers as in threads, and nothing left, whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import DivergedError
from sartor.core.local import Local
from sartor.engines import vectorised
from sartor.engines.cpu import forks as forked
from sartor.engines.cpu.forks import why_not, work_in_processes
from sartor.engines.cpu.tuning import Pace
from sartor.engines.parts import Costs, Tally
from sartor.engines.vectorised import Vectorised
from sartor.methods import build
from tests.toys import federation, net_task, outcome, run, simulation

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No child, no open file, no changed number of threads."""
    threads, files = torch.get_num_threads(), len(os.listdir("/proc/self/fd"))
    torch.set_num_threads(3)
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 3
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def slow(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Leave the other process the time to take a block, too."""

    def slowly(block: Any) -> Any:
        time.sleep(0.02)
        return work(block)

    return slowly


# ---- what comes back -----------------------------------------------------------------------------


def test_results_come_in_order_from_several_processes() -> None:
    """All children take part, and so does this process."""
    found = work_in_processes(slow(lambda block: (10 * block, os.getpid())), range(12), 3)
    assert [value for value, _ in found.results] == [10 * block for block in range(12)]
    processes = {process for _, process in found.results}
    assert len(processes) == 3
    assert os.getpid() in processes
    assert found.is_sound


def test_more_blocks_than_a_pipe_holds_are_all_done_once() -> None:
    """Several blocks go with a token then."""
    found = work_in_processes(lambda block: block, range(5000), 2)
    assert found.results == list(range(5000))


VALUES: list[Any] = [
    *(torch.tensor([1, 0, 3]).to(kind) for kind in (torch.float16, torch.bfloat16, torch.bool)),
    torch.arange(6.0).reshape(2, 3).T,
    torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1),
    torch.ones(1, 3).expand(4, 3),
    torch.arange(10.0)[2:7:2],
    torch.tensor(float("nan")),
    torch.zeros(0, 3),
    torch.zeros(3, requires_grad=True),
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.zeros((0, 2)),
    np.array([True, False]),
]


def test_every_kind_of_value_comes_back_as_it_was() -> None:
    """Bits, shapes and types; the order of axes in memory; and whatever stands around numbers."""
    here = os.getpid()

    def work(block: int) -> Any:
        return os.getpid() != here, VALUES

    results = work_in_processes(slow(work), range(4), 2).results
    away = next(values for is_away, values in results if is_away)
    for found, sent in zip(away, VALUES, strict=True):
        assert type(found) is type(sent.detach() if isinstance(sent, torch.Tensor) else sent)
        assert found.dtype == sent.dtype
        if isinstance(sent, torch.Tensor):
            assert torch.equal(found.nan_to_num(7.0), sent.detach().nan_to_num(7.0))
            assert found.stride() == sent.clone().stride()
        else:
            assert np.array_equal(found, sent)

    def around(block: int) -> Any:
        costs = Costs(np.arange(2), np.arange(3))
        return os.getpid() != here, {"b": (1, 2.5, None), "a": [True, "x", 1e-300]}, costs

    results = work_in_processes(slow(around), range(4), 2).results
    _, tree, costs = next(result for result in results if result[0])
    assert tree == {"b": (1, 2.5, None), "a": [True, "x", 1e-300]}
    assert list(tree) == ["b", "a"]
    assert costs.backward.tolist() == [0, 1]
    assert costs.forward.tolist() == [0, 1, 2]


def test_what_blocks_put_is_put_here() -> None:
    """By each process once."""
    tallies = [Tally(np.zeros((1, 8)), np.zeros((1, 8))) for _ in range(2)]

    def work(block: int) -> None:
        run, client = np.array([0]), np.array([block])
        tallies[block % 2].put(run, client, np.array([block + 1.0]), np.array([os.getpid()]))

    work_in_processes(slow(work), range(8), 2, tallies)
    numbers = np.arange(1.0, 9.0)
    assert tallies[0].correct[0].tolist() == np.where(numbers % 2, numbers, 0).tolist()
    assert tallies[1].correct[0].tolist() == np.where(numbers % 2, 0, numbers).tolist()
    assert len({p for tally in tallies for p in tally.loss[0] if p}) == 2


# ---- what may go wrong ---------------------------------------------------------------------------


def test_an_error_of_a_child_is_met_here_as_it_is() -> None:
    """With its class and what it carries; nobody goes on with other blocks for long."""
    begun: list[int] = []

    def work(block: int) -> int:
        time.sleep(0.01)
        begun.append(block)
        if block == 3:
            raise DivergedError("Loss became NaN", run=1, round=2, client="c")
        return block

    with pytest.raises(DivergedError, match="Loss became NaN") as caught:
        work_in_processes(work, range(40), 2)
    assert (caught.value.run, caught.value.client) == (1, "c")
    assert len(begun) < 10


@pytest.mark.parametrize("trouble", ["error", "killed", "strange"])
def test_what_a_child_cannot_do_is_done_here(trouble: str) -> None:
    """An error, a kill by the system, a result that cannot be handed over: only there."""
    here = os.getpid()

    def work(block: int) -> Any:
        time.sleep(0.02)
        if os.getpid() == here:
            return block
        if trouble == "error":
            raise MemoryError
        if trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return object()

    found = work_in_processes(work, range(6), 2)
    assert found.results == list(range(6))
    assert not found.is_sound


def test_without_processes_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be are there already."""

    def never() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", never)
    found = work_in_processes(lambda block: block, range(3), 2)
    assert found.results == [0, 1, 2]
    assert not found.is_sound


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_here_ends_the_children(error: type[BaseException]) -> None:
    """At once, whatever they are doing; the fixture looks for what is left."""
    here, began = os.getpid(), time.perf_counter()

    def work(block: int) -> None:
        if os.getpid() != here:
            time.sleep(30)
        time.sleep(0.05)
        raise error

    with pytest.raises(error):
        work_in_processes(work, range(4), 2)
    assert time.perf_counter() - began < 10


def test_children_do_not_hear_ctrl_c() -> None:
    """It goes to all processes of a terminal; theirs is to finish, or to be ended from here."""
    here = os.getpid()

    def work(block: int) -> bool:
        time.sleep(0.02)
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGINT)
        return os.getpid() != here

    found = work_in_processes(work, range(4), 2)
    assert any(found.results)
    assert found.is_sound


def test_children_die_with_their_parent() -> None:
    """Also when it is killed and can say nothing."""
    source, sink = os.pipe()
    middle = os.fork()
    if middle == 0:

        def work(block: int) -> None:
            os.write(sink, os.getpid().to_bytes(4, "little"))
            time.sleep(30)

        try:
            work_in_processes(work, range(2), 2)
        finally:
            os._exit(1)
    os.close(sink)
    pids = {int.from_bytes(os.read(source, 4), "little") for _ in range(2)}
    assert len(pids - {middle}) == 1
    began = time.perf_counter()
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    assert os.read(source, 1) == b""  # the last that held the other end is gone
    os.close(source)
    assert time.perf_counter() - began < 10


# ---- when ----------------------------------------------------------------------------------------


def test_reasons_not_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is said; a thread that draws a bar, or waits for blocks, is none."""
    assert why_not() is None
    stop = threading.Event()

    class Bar(threading.Thread):
        __module__ = "rich.live"

    idle = [Bar(target=stop.wait), threading.Thread(target=stop.wait, name="sartor-block_0")]
    for thread in idle:
        thread.start()
    assert why_not() is None
    other = threading.Thread(target=stop.wait, name="another")
    other.start()
    assert "another" in str(why_not())
    stop.set()
    for thread in (*idle, other):
        thread.join()
    with monkeypatch.context() as patch:
        patch.setenv("SARTOR_ACCELERATE", "compile")
        assert "sartor.accelerate" in str(why_not())
    with monkeypatch.context() as patch:
        patch.setattr(forked, "_has_gpu", lambda: True)
        assert "GPU" in str(why_not())
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert "sharded" in str(why_not())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "Linux" in str(why_not())


@pytest.mark.parametrize(
    ("pace", "pays"),
    [
        (Pace(0.001, None, 5, 7), False),  # 10 ms in all: a fork is not tried
        (Pace(0.05, None, 1, 6), False),  # half a second, and a trace since: threads once more
        (Pace(0.05, 0.04, 1, 6), False),
        (Pace(0.05, None, 2, 7), True),
        (Pace(0.5, None, 1, 0), True),  # five seconds: at once
        (Pace(0.05, 0.04, 2, 7), True),
        (Pace(0.05, 0.06, 2, 7), False),  # was slower
    ],
)
def test_processes_are_tried_where_they_may_pay(pace: Pace, pays: bool) -> None:
    """Ten blocks, 10 ms for a fork, and seven traces by now."""
    assert pace.forks_pay(10, 0.01, 7) is pays


# ---- the whole way -------------------------------------------------------------------------------


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fork wherever it can be done, and note how many blocks each time."""
    noted: list[int] = []

    def watched(work: Any, blocks: Any, processes: int, into: Any = ()) -> Any:
        noted.append(len(blocks))
        return work_in_processes(work, blocks, processes, into)

    monkeypatch.setattr(Pace, "forks_pay", lambda *_: True)
    monkeypatch.setattr(vectorised, "work_in_processes", watched)
    return noted


class TwoCores(Vectorised):
    """An engine that has two cores wherever it runs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.workers = 2


@pytest.mark.parametrize(
    ("name", "mapped"),
    [("pfedme", False), ("fedala", False), ("fedavg-ft", False), ("ditto", True)],
)
def test_runs_are_the_same_to_the_bit(
    name: str, mapped: bool, forks: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """States, models, scores, and costs, before and after local training, with two runs.

    States may rest in files; only the parent writes them.
    """

    def found(switch: str) -> Any:
        monkeypatch.setenv("SARTOR_ACCELERATE", {"0": "compile", "1": "all"}[switch])
        task = net_task()
        sim = simulation(
            build(name, task, Local(epochs=2, batch=3, lr=0.1), {}),
            task,
            [federation(), federation()],
            engine=TwoCores,
            chunk=1,
            rounds=2,
            folder=tmp_path / switch if mapped else None,
        )
        run(sim)
        ledger = sim.ledger()
        return outcome(sim), [np.asarray(ledger.gradient_evaluations), np.asarray(ledger.bytes_up)]

    in_threads, costs = found("0")
    assert not forks
    in_processes, same = found("1")
    assert len(forks) >= 3
    assert in_threads.keys() == in_processes.keys()
    for key, value in in_threads.items():
        assert np.array_equal(value, in_processes[key], equal_nan=True), key
    for one, other in zip(costs, same, strict=True):
        assert np.array_equal(one, other)
    gc.collect()  # a store holds its files open as long as it is there


def test_one_worker_never_forks_and_neither_does_an_engine_that_lost_a_child(
    forks: list[int],
) -> None:
    """Whoever was killed once for want of memory would be killed in every round."""
    sim = simulation(
        build("fedavg", net_task(), Local(), {}), net_task(), [federation()], engine=TwoCores
    )
    engine: Any = sim.engine
    here = os.getpid()
    engine._paces["work"] = Pace(1.0, 0.5, 2)

    def work(block: int) -> int:
        time.sleep(0.01)
        if os.getpid() != here:
            engine.calls["phase"] = (1, 2)
        if block == 100 and os.getpid() != here:
            os._exit(9)
        return block

    work.__qualname__ = "work"
    engine.workers = 1
    assert engine.blocks(work, [1, 2]) == [1, 2]
    assert not forks
    engine.workers = 2
    engine.calls.clear()
    assert engine.blocks(work, [3, 4, 5, 6]) == [3, 4, 5, 6]
    assert forks == [4]
    assert engine.calls == {"phase": (1, 2)}
    assert engine.may_fork
    assert engine.blocks(work, [100] * 4) == [100] * 4
    assert forks == [4, 4]
    assert engine.blocks(work, [1, 2, 3]) == [1, 2, 3]
    assert forks == [4, 4]
