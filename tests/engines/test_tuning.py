"""Blocks of lanes by measuring: what others do on the cores meanwhile does not mislead."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sartor.core.local import Local
from sartor.engines.arena import Arena
from sartor.engines.cpu import kept, tuning
from sartor.engines.cpu.tuning import choose_chunk
from sartor.engines.vectorised import Vectorised
from sartor.methods import build
from tests.toys import federation, net_task, run, simulation

# Seconds of a round as they were measured with two cores free: trial and rehearsal. LeNet-5 has a
# hill between one lane and five; the dense network is best in one block.
LENET = {1: (6.1, 2.2), 2: (8.1, 6.5), 3: (8.1, 6.8), 4: (11.3, 6.3), 5: (11.6, 6.5)}
LENET |= {10: (13.9, 10.0), 20: (11.1, 10.2)}
DENSE = {1: (26.0, 7.2), 2: (20.0, 5.7), 4: (31.0, 4.4), 7: (20.0, 4.9), 13: (15.0, 4.7)}
DENSE |= {16: (12.6, 4.6), 25: (9.0, 4.6), 50: (7.4, 4.4), 100: (4.5, 2.8)}


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_CHOSEN", {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where choices are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SARTOR_CHOICES")
    return tmp_path / "sartor" / "choices.json"


def _disturbed(
    times: dict[int, tuple[float, float]], kind: int, noise: Iterator[float]
) -> Callable[[int], float]:
    return lambda lanes: times[lanes][kind] * next(noise)


def _noise(*first: float) -> Iterator[float]:
    yield from first
    while True:
        yield 1.0


def _never(*_: Any) -> Any:
    raise AssertionError("measured")


# ---- a trial beside other processes --------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [
        (),
        (9.0, 4.0),  # at the first look at one lane
        (1.0, 3.0, 1.0, 1.0, 1.0, 3.0),  # at all looks at one lane: one block of all seems best
        (1.0, 2.0, 0.5, 1.0, 1.0, 2.0, 0.5),  # four lanes seem best
        (1.0, 3.0, 1.0, 0.5, 1.0, 3.0, 1.0, 0.5),  # ten do
    ],
)
def test_one_lane_is_found_behind_a_hill(noise: tuple[float, ...]) -> None:
    """A convolution's neighbours of one lane are slower than wide blocks: no descent gets there."""
    trial = _disturbed(LENET, 0, _noise(*noise))
    rehearsal = _disturbed(LENET, 1, _noise())
    assert choose_chunk(trial, 20, 2, "lenet", rehearsal) == 1


@pytest.mark.parametrize(
    "noise",
    [
        (),
        (1.0, 0.1, 1.0, 1.0, 1.0, 1.0, 0.1),  # one lane had lucky moments
        (1.0, 1.0, 1.0, 1.0, 1.0, 3.0),  # one look at all lanes was slow
    ],
)
def test_all_lanes_stay_in_one_block(noise: tuple[float, ...]) -> None:
    trial = _disturbed(DENSE, 0, _noise(*noise))
    rehearsal = _disturbed(DENSE, 1, _noise())
    assert choose_chunk(trial, 100, 2, "dense", rehearsal) == 100


@pytest.mark.parametrize("late", range(4))
def test_a_rehearsal_that_errs_by_half_changes_nothing(late: int) -> None:
    rehearsal = _disturbed(LENET, 1, _noise(*[1.0] * late, 1.5))
    assert choose_chunk(_disturbed(LENET, 0, _noise()), 20, 2, "lenet", rehearsal) == 1


def test_looks_come_in_turns_and_none_is_wasted() -> None:
    """What is far slower, or surely so in a rehearsal, is not looked at twice."""
    asked: list[tuple[str, int]] = []

    def trial(lanes: int) -> float:
        asked.append(("trial", lanes))
        return 300.0 if lanes == 20 else LENET[lanes][0]

    def rehearsal(lanes: int) -> float:
        asked.append(("rehearsal", lanes))
        return LENET[lanes][1]

    choose_chunk(trial, 20, 2, "lenet", rehearsal)
    trials = [lanes for name, lanes in asked if name == "trial"]
    assert trials == [1, 1, 4, 10, 20, 1, 4, 10]
    assert [lanes for name, lanes in asked if name == "rehearsal"] == [1, 4]


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_few_lanes(lanes: int) -> None:
    assert choose_chunk(lambda _: 1.0, lanes, 2, "few", lambda _: 1.0) in range(1, lanes + 1)


# ---- what is kept --------------------------------------------------------------------------------


def _chosen(signature: str = "lenet", quiet: bool = True) -> int:
    trials = (_disturbed(LENET, kind, _noise()) for kind in (0, 1))
    return choose_chunk(next(trials), 20, 2, signature, next(trials), lambda: quiet)


def _later() -> None:
    """Begin another process, as far as choices know."""
    tuning._CHOSEN.clear()


def test_a_later_process_does_not_measure(cache: Path) -> None:
    assert _chosen() == 1
    _later()
    assert choose_chunk(_never, 20, 2, "lenet", _never) == 1
    assert [entry.name for entry in cache.parent.iterdir()] == [cache.name], "nothing lies about"


def test_other_work_is_measured(cache: Path) -> None:
    _chosen()
    with pytest.raises(AssertionError, match="measured"):
        choose_chunk(_never, 20, 2, "another network", _never)
    assert _chosen("another network") == 1
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("what", ["machine", "threads", "versions"])
def test_another_machine_measures_for_itself(
    what: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _chosen()
    _later()
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    else:
        changed = {"machine": (os, "cpu_count", lambda: 64), "versions": (kept, "__version__", "9")}
        monkeypatch.setattr(*changed[what])
        monkeypatch.setattr(kept, "_machine", kept._machine.__wrapped__)
    with pytest.raises(AssertionError, match="measured"):
        choose_chunk(_never, 20, 2, "lenet", _never)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"KEY": 0}', '{"KEY": 21}', '{"KEY": "1"}', '{"KEY": true}', "\x00\xff"],
)
def test_a_broken_file_is_passed_over_and_fixed(text: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(text.replace("KEY", kept._key("lenet")).encode("latin-1"))
    assert kept.recalled("lenet", 20) is None
    assert _chosen() == 1
    _later()
    assert choose_chunk(_never, 20, 2, "lenet", _never) == 1


@pytest.mark.parametrize("where", ["a file", "a folder", "nowhere"])
def test_where_nothing_can_be_kept(
    where: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "a file":  # instead of the folder
        cache.parent.write_text("")
    elif where == "a folder":  # instead of the file
        cache.mkdir(parents=True)
    else:

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(kept, "cache_folder", homeless)
    assert _chosen() == 1
    _later()
    assert _chosen() == 1


def test_only_long_rounds_measured_in_peace_are_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _chosen(quiet=False) == 1
    choose_chunk(lambda _: 0.1, 20, 2, "short", _never)
    assert not cache.exists()
    monkeypatch.setenv("SARTOR_CHOICES", "0")
    assert _chosen("switched off") == 1
    assert not cache.exists()


def test_the_oldest_choices_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    for number in range(5):
        kept.remember(f"net {number}", number + 1)
    kept.remember("net 3", 9)
    found = [kept.recalled(f"net {number}", 20) for number in range(5)]
    assert found == [None, None, 3, 9, 5]


# ---- the engine's own trials ---------------------------------------------------------------------


class TwoCores(Vectorised):
    """An engine that has two cores wherever it runs, and chooses its blocks."""

    def __init__(self, arena: Arena, chunk: int | None = None) -> None:
        super().__init__(arena)
        self.workers = 2

    def _was_quiet(self) -> bool:
        assert self._passed > 0
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no processes elsewhere")
@pytest.mark.parametrize("forks", ["0", "1"])
def test_rounds_that_are_rehearsed_are_chosen_for_once(
    forks: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later process works in the same blocks; in threads another choice may be right."""
    words = {"0": "compile", "1": "all"}
    monkeypatch.setenv("SARTOR_ACCELERATE", words[forks])
    monkeypatch.setattr(tuning, "_LONG", -1.0)

    def lanes() -> int | None:
        task = net_task()
        sim = simulation(
            build("fedavg", task, Local(batch=3, lr=0.1), {}), task, [federation()], engine=TwoCores
        )
        run(sim)
        assert sim.engine._clock is time.perf_counter
        return sim.engine.lanes

    threads = torch.get_num_threads()
    chosen = lanes()
    assert torch.get_num_threads() == threads
    assert list(json.loads(cache.read_text()).values()) == [chosen]
    _later()
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_measured", _never)
        assert lanes() == chosen
    _later()
    monkeypatch.setenv("SARTOR_ACCELERATE", words["1" if forks == "0" else "0"])
    lanes()
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize(("held_up", "quiet"), [(0.0, True), (0.05, True), (0.5, False)])
def test_rehearsals_that_wait_for_others_are_not_quiet(
    monkeypatch: pytest.MonkeyPatch, held_up: float, quiet: bool
) -> None:
    """By what the core did of the time that passed, whatever clock the rehearsal counts by."""
    sim = simulation(
        build("fedavg", net_task(), Local(batch=3, lr=0.1), {}), net_task(), [federation()]
    )
    engine = sim.engine
    now = {"wall": 0.0, "core": 0.0}

    def work() -> None:
        now["core"] += 1.0
        now["wall"] += 1.0 + held_up

    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(time, "thread_time", lambda: now["core"])
    for clock in (time.perf_counter, time.thread_time):
        engine._clock, engine._rehearses = clock, True
        engine.timed(work)
        assert engine._was_quiet() == quiet
