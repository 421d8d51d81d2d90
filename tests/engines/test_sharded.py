"""Sharding: any number of processes, the same numbers; and who goes, takes all with a word."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.engines.shard import processes as group
from sartor.engines.shard.processes import Processes, digest
from sartor.engines.shard.work import deal, share
from tests.engines.shards import ALL, FAST, resumed, straight
from tests.toys import assert_same, differ, outcome, run

ROOT = Path(__file__).parents[2]
TO_THE_BIT = ("fedprox, one lane at a time", "scaffold", "straight", "resumed")


@pytest.fixture(scope="module")
def nest() -> Iterator[subprocess.Popen[str]]:
    """Start the program that bears processes: it imports once, for all of them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engines.shards"],
        env={**env, "GLOO_SOCKET_IFNAME": "lo", "SARTOR_TIMEOUT": "120"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        yield program
        program.kill()


Start = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def start(nest: subprocess.Popen[str], tmp_path: Path) -> Start:
    """Return a function that runs jobs in ``size`` processes; exit code and words of each."""

    def call(size: int, *jobs: str, **env: str) -> list[tuple[int, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        assert nest.stdin is not None
        assert nest.stdout is not None
        print(
            json.dumps([str(tmp_path), size, {**place, **env}, jobs]), file=nest.stdin, flush=True
        )
        ends: list[tuple[int, str]] = [tuple(end) for end in json.loads(nest.stdout.readline())]
        return ends

    return call


def load(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read what rank 0 left of a job."""
    with np.load(folder / f"{name.replace('/', '-')}.npz") as found:
        return {key.replace("|", "/"): found[key] for key in found}


def check(name: str, found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Compare outcomes, to the bit where lanes are worked on one at a time."""
    labelled = ({f"{name}: {k}": v for k, v in each.items()} for each in (found, wanted))
    assert_same(*labelled, atol=0.0 if name in TO_THE_BIT else 1e-10)


# ---- who works on what


def test_work_is_dealt_longest_first_to_the_least_busy() -> None:
    """9 and 7 go apart, 5 joins 7 (12), 4 joins 9 (13), 2 joins the 12; zero is nobody's."""
    owner = deal(np.array([2, 7, 4, 0, 9, 5]), 2)
    assert owner.tolist() == [1, 1, 0, -1, 0, 1]
    # 13 and 14 of 27: an even division does not exist. By number, 3 and 3, it would be 13 : 14 too
    # in the best case and 6 : 21 in the order given.
    by_rank = [int(np.array([2, 7, 4, 0, 9, 5])[owner == r].sum()) for r in (0, 1)]
    assert by_rank == [13, 14]


def test_longest_first_is_within_four_thirds_of_the_best() -> None:
    """The tight example of Graham (1969): 5 5 4 4 3 3 3 on three, 11 in place of the best 9."""
    owner = deal(np.array([5, 5, 4, 4, 3, 3, 3]), 3)
    loads = [
        sum(w for w, r in zip((5, 5, 4, 4, 3, 3, 3), owner, strict=True) if r == k)
        for k in range(3)
    ]
    assert max(loads) == 11


@pytest.mark.parametrize(("runs", "slots", "size"), [(1, 5, 2), (3, 4, 2), (6, 1, 4), (2, 9, 3)])
def test_every_lane_with_work_has_one_owner(runs: int, slots: int, size: int) -> None:
    """Tiles cover what has work once, whatever the shape."""
    work = np.random.default_rng(0).integers(0, 3, (runs, slots))
    seen = np.zeros_like(work)
    for tiles in share(work, size):
        for tile in tiles:
            seen[tile.run : tile.run + tile.runs, tile.slots] += 1
    assert (seen[work > 0] == 1).all()
    assert seen.max() <= 1


def test_runs_of_a_sweep_stay_together_while_there_are_slots_enough() -> None:
    """Eight equal slots of ten runs on two processes: four whole columns each."""
    tiles = share(np.ones((10, 8), dtype=np.int64), 2)
    assert [[(t.run, t.runs, len(t.slots)) for t in mine] for mine in tiles] == [[(0, 10, 4)]] * 2


# ---- the same numbers


def test_two_and_three_processes_give_the_numbers_of_one(start: Start, tmp_path: Path) -> None:
    """States, kept models, scores, snapshots and counters agree to 1e-10.

    With one lane at a time they agree to the bit. A checkpoint of two processes goes on with one,
    two and three of them to the same end. Processes that see other data are refused: all notice,
    one tells (two, if the first is gone before the other can ask who does).
    """
    ends = start(2, *FAST, "straight", "resumed", "other data")
    assert [code for code, _ in ends] == [2, 2], ends
    assert sum("other data, seeds or hyper-parameters" in said for _, said in ends) >= 1, ends
    for name, make in FAST.items():
        check(name, load(tmp_path, name), outcome(run(make(None))))
    wanted = outcome(straight(None, tmp_path / "alone"))
    for name in ("straight", "resumed"):
        check(name, load(tmp_path, name), wanted)
    check("resumed", outcome(resumed(None, tmp_path)), wanted)
    name = "fedavg, two allocations"
    ends = start(3, "resumed", name)
    assert [code for code, _ in ends] == [0, 0, 0], ends
    check("resumed", load(tmp_path, "resumed"), wanted)
    check(name, load(tmp_path, name), outcome(run(FAST[name](None))))


def test_the_jobs_can_tell_numbers_apart() -> None:
    """One round less is another outcome, so that agreement means something."""
    a, b = (FAST["fedavg"](None) for _ in range(2))
    a.step()
    b.step()
    b.step()
    a_states, b_states = ({"w": s.server["params"]["fc.bias"].numpy()} for s in (a, b))
    assert differ(a_states, b_states)


@pytest.mark.slow
def test_every_method_with_two_processes(start: Start, tmp_path: Path) -> None:
    """Two allocations of unequal clients, of whom some are absent."""
    ends = start(2, *ALL, SARTOR_TIMEOUT="600")
    assert [code for code, _ in ends] == [0, 0], ends
    for name, make in ALL.items():
        check(name, load(tmp_path, name), outcome(run(make(None))))


@pytest.mark.slow
def test_torchrun_prints_one_table_and_writes_the_metrics_of_one_process(tmp_path: Path) -> None:
    """The command is the same with torchrun before it, and so is what it leaves."""
    words = ["-m", "sartor", "run", "fedavg", "--data", "digits", "--clients", "8"]
    words += ["--rounds", "3", "--out"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, *words, str(tmp_path / "one")], env=env, cwd=ROOT, capture_output=True
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shared = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *words, str(tmp_path / "two")],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    assert shared.stdout.count("gradient evaluations") == 1
    assert shared.stderr.count("round 3/3") == 1
    one, two = (tmp_path / name / "metrics.csv" for name in ("one", "two"))
    assert one.read_text() == two.read_text()


# ---- trouble


def test_a_killed_process_is_an_error_and_no_hang(start: Start) -> None:
    """The one that is left says so, once, and names the mend."""
    (code, said), (killed, _) = start(2, "die", SARTOR_TIMEOUT="60")
    assert killed == -9
    assert code == 2
    assert "lost the others" in said
    assert "resume" in said


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is joined, the first decides for itself."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert group.current() is None
    assert group.is_first()
    assert group.first(lambda: 5) == 5


def test_a_timeout_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what it got."""
    monkeypatch.setenv("SARTOR_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="'soon'"):
        group.timeout()


# ---- what travels


class Mirror(Processes):
    """Two processes of which the second sends what it is given; bytes are counted."""

    def __init__(self, other: list[torch.Tensor]) -> None:
        super().__init__(0, 2, None)
        self.other, self.sizes = other, []

    def _send(self, buffers: list[Any]) -> None:
        self.sizes = [len(b) for b in buffers]
        buffers[1].copy_(torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in self.other]))


def test_leaves_of_all_types_travel_as_their_bytes() -> None:
    """Nothing is padded: 2 rows here and 1 there, of 8, 4 and 1 bytes a number."""
    mine = {
        "a": {"flag": torch.tensor([True, False]), "wide": torch.arange(4.0).double().view(2, 2)},
        "b": {"x": torch.tensor([1.5, 2.5, 3.5])},
    }
    theirs = [torch.tensor([[7.0, 8.0]]).double(), torch.tensor([9.5]), torch.tensor([True])]
    mirror = Mirror(theirs)
    own, other = mirror.swap(mine, [{"a": 2, "b": 3}, {"a": 1, "b": 1}])
    assert mirror.sizes == [2 * 16 + 3 * 4 + 2, 16 + 4 + 1]
    assert own["a"]["wide"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert own["a"]["flag"].tolist() == [True, False]
    assert other["a"]["wide"].tolist() == [[7.0, 8.0]]
    assert other["b"]["x"].tolist() == [9.5]
    assert other["a"]["flag"].tolist() == [True]


def test_a_digest_sees_every_bit_and_its_place() -> None:
    """Swapped entries, a last bit, and a sign of zero are all seen."""
    a = {"w": torch.tensor([1.0, 2.0, 0.0])}
    others = ([2.0, 1.0, 0.0], [1.0, 2.0000002, 0.0], [1.0, 2.0, -0.0])
    assert all(int(digest(a)) != int(digest({"w": torch.tensor(o)})) for o in others)
    assert int(digest(a)) == int(digest({"w": torch.tensor([1.0, 2.0, 0.0])}))
