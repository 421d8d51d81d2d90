"""The number of lanes in a block: by the network, or by a short trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sartor.core.local import Local
from sartor.core.task import Task
from sartor.engines import make_engine
from sartor.engines.arena import build_arena
from sartor.engines.cpu import tuning
from sartor.engines.cpu.tuning import choose_chunk
from sartor.engines.parts import Arena
from sartor.engines.vectorised import Vectorised
from sartor.methods import build
from tests.toys import CPU, federation, net_task, run, simulation

# Predicted seconds of a round of a dense network, with two cores free and with one of them busy.
FREE, BUSY = {50: 0.23, 100: 0.18}, {50: 0.52, 100: 3.75}


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_CHOSEN", {})


def _never(*_: Any) -> Any:
    raise AssertionError("measured")


def _disturbed(times: dict[int, float], *noise: float) -> Callable[[int], float]:
    def factors() -> Iterator[float]:
        yield from noise
        while True:
            yield 1.0

    factor = factors()
    return lambda lanes: times[lanes] * next(factor)


@pytest.mark.parametrize("noise", [(), (9.0, 9.0), (1.0, 5.0), (1.0, 1.0, 1.0, 5.0)])
def test_one_disturbed_trial_misleads_nobody(noise: tuple[float, ...]) -> None:
    """The first one pays for caches and threads; of two the faster counts."""
    assert choose_chunk(_disturbed(FREE, *noise), 100, 2, "free") == 100
    assert choose_chunk(_disturbed(BUSY, *noise), 100, 2, "busy") == 50


@pytest.mark.parametrize(
    ("lanes", "workers", "wanted"),
    [
        (100, 2, [50, 100]),
        (100, 8, [13, 100]),
        (5, 2, [3, 5]),
        (2000, 2, [256, 1000, 2000]),
        (2000, 1, [256, 2000]),
        (100, 1, []),  # nothing to choose
        (1, 2, []),
    ],
)
def test_candidates_take_turns(lanes: int, workers: int, wanted: list[int]) -> None:
    """All lanes, an equal share of each core, and at most 256; each twice."""
    asked: list[int] = []

    def trial(chunk: int) -> float:
        asked.append(chunk)
        return 1.0 / chunk

    assert choose_chunk(trial, lanes, workers, "net") == lanes
    assert asked == 2 * wanted


def test_a_process_tries_the_same_work_once() -> None:
    choose_chunk(FREE.__getitem__, 100, 2, "net")
    assert choose_chunk(_never, 100, 2, "net") == 100
    with pytest.raises(AssertionError, match="measured"):
        choose_chunk(_never, 100, 2, "another net")


def test_a_given_block_is_never_measured() -> None:
    """With chunk the engine asks for no trial."""
    sim = simulation(build("fedavg", net_task(), Local(), {}), net_task(), [federation()], chunk=2)
    sim.engine.tune(_never, 5, "net")
    assert sim.engine.lanes == 2


def test_convolutions_get_one_lane_without_a_trial() -> None:
    """Chosen when the first round asks, so that a resumed run keeps what its checkpoint says."""
    arena = build_arena([federation()], CPU, torch.float64)
    convolution = Task(nn.Conv2d(1, 3, 2))
    engine = make_engine("auto", arena, None, convolution)
    before = engine.lanes
    assert before is None
    engine.tune(_never, 20, "conv")
    assert engine.lanes == 1
    given = make_engine("auto", arena, 3, convolution)
    given.tune(_never, 20, "conv")
    assert given.lanes == 3
    dense = make_engine("auto", arena, None, net_task())
    assert isinstance(dense, Vectorised)
    dense.workers = 2
    dense.tune({10: 1.0, 20: 2.0}.__getitem__, 20, "dense")
    assert dense.lanes == 10


class TwoCores(Vectorised):
    """An engine that has two cores wherever it runs, and chooses its blocks."""

    def __init__(self, arena: Arena, chunk: int | None = None) -> None:
        super().__init__(arena)
        self.workers = 2


def test_a_round_measures_both_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real steps; afterwards the threads are as they were."""
    asked: list[int] = []

    def chosen(trial: Callable[[int], float], lanes: int, workers: int, signature: Any) -> int:
        asked.extend([lanes, workers])
        assert all(trial(chunk) > 0.0 for chunk in (lanes, -(-lanes // workers)))
        return lanes

    monkeypatch.setattr("sartor.engines.vectorised.choose_chunk", chosen)
    threads, task = torch.get_num_threads(), net_task()
    method = build("fedavg", task, Local(batch=3, lr=0.1), {})
    sim = simulation(method, task, [federation()], engine=TwoCores)
    run(sim)
    assert asked[1:] == [2]
    assert sim.engine.lanes == asked[0]
    assert torch.get_num_threads() == threads
