"""What must survive: a killed process, a full disk, bad input, and the shortcuts of the engines."""

from __future__ import annotations

import csv
import errno
import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor import Federation, Local
from sartor.cli import main
from sartor.core.errors import FederationError, RunFolderError
from sartor.core.method import Batch
from sartor.core.task import Task, metered
from sartor.engines.cpu import traces as traced
from sartor.methods import build
from sartor.report import write_report
from sartor.runs import RunFolder
from tests.toys import Net, assert_same, federation, net_task, outcome, run, simulation

QUICK: dict[str, Any] = {
    "rounds": 4,
    "model": Net(),
    "local": Local(epochs=1, batch=4, lr=0.1),
    "device": "cpu",
    "dtype": "float64",
    "chunk": 1024,
    "checkpoint_every": 2,
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own; drawing pages takes longer than training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command in this process: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def last_round(folder: str) -> int:
    """Return the round of a folder's checkpoint."""
    saved = RunFolder.open(folder).read_checkpoint()
    assert saved is not None
    return saved[0]


def metrics(folder: str | Path) -> str:
    """Return metrics.csv: every score of every client, with all digits."""
    return (Path(folder) / "metrics.csv").read_text()


def counts(folder: str | Path) -> list[dict[str, str]]:
    """Return ledger.csv without its seconds."""
    with (Path(folder) / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def assert_same_folder(found: str | Path, wanted: str | Path) -> None:
    """Check all that a run leaves, to the last bit; only times may differ."""
    found, wanted = Path(found), Path(wanted)
    assert metrics(found) == metrics(wanted)
    assert counts(found) == counts(wanted)
    one, two = (json.loads((f / "summary.json").read_text()) for f in (found, wanted))
    assert [without_times(row) for row in one] == [without_times(row) for row in two]
    models = files(wanted / "models")
    assert len(models) > 2
    assert files(found / "models") == models
    for path in models:
        assert (found / "models" / path).read_bytes() == (wanted / "models" / path).read_bytes()


def files(folder: Path) -> list[Path]:
    """Return the files below a folder, without those that a killed process had not finished."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp")
    return sorted(path.relative_to(folder) for path in found)


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("seconds")}


# ---- kill -9 -------------------------------------------------------------------------------------

# A block size that is measured may come out differently in another process, and other blocks add
# up in another order; so two separate runs agree to the last bit only if --chunk fixes it. (A run
# and its resumption always do: the choice is part of the checkpoint.)
DIGITS: tuple[str, ...] = ("--data", "digits", "--clients", "8", "--partition", "dirichlet:0.5")
DIGITS += ("--model", "dnn", "--seed", "0", "--checkpoint-every", "2", "--json")
DIGITS += ("--chunk", "6", "--rounds", "7", "--batch", "100")

DOOMED = """
import os, signal, sys
from sartor.cli import main
from sartor.training.simulation import Simulation

plain = Simulation.step

def step(self):
    info = plain(self)
    if self.round_index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return info

Simulation.step = step
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "line",
    [
        "fedapa --momentum 0.9 --keep-optimiser --participation at_least:0.6",
        "fedprox --sweep prox_strength=0.02,0.1 --seeds 2",
        "fedprox --store mapped --participation 0.5",
    ],
)
def test_kill_nine_then_resume_is_running_straight(line: str, command: Any) -> None:
    """A process is killed in the middle; another continues, and every bit is that of a whole run.

    It dies when the fifth round is over and nothing of it is on the disk but mapped states.
    """
    words = ("run", *line.split(), *DIGITS)
    died = subprocess.run(
        [sys.executable, "-c", DOOMED, *words, "--out", "a"], capture_output=True, text=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert last_round("a") == 4
    # This is another process: nothing of the run can be left in its memory.
    code, resumed, err = command("resume", "a", "--json")
    assert code == 0, err
    assert "round 7/7" in err
    assert "round 1/" not in err
    code, out, err = command(*words, "--out", "whole")
    assert code == 0, err
    assert_same_folder("a", "whole")
    rows = [json.loads(text.splitlines()[-1]) for text in (resumed, out)]
    one, two = (row if isinstance(row, list) else [row] for row in rows)
    assert [without_times(r) | {"out": ""} for r in one] == [
        without_times(r) | {"out": ""} for r in two
    ]
    gc.collect()  # the states of a run go with it
    assert not list(Path("a").glob("states/*"))


class Killed(BaseException):
    """Stands for a process that ends at once."""


@contextmanager
def pictured(out: str) -> Iterator[list[str]]:
    """Keep a copy of a folder from before each file in it is put in its place.

    A process that is killed at that moment leaves just this, with its temporary files.
    """
    taken: list[str] = []
    replace = os.replace

    def after_a_picture(*args: Any) -> None:
        taken.append(f"{out}-{len(taken)}")
        shutil.copytree(out, taken[-1])
        replace(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", after_a_picture)
        yield taken


@pytest.mark.parametrize("sweep", [{}, {"rule": ["normalized", "chen"]}], ids=["one", "sweep"])
def test_death_before_any_file_is_in_place_loses_nothing(sweep: dict[str, Any]) -> None:
    """Whichever file comes last, from settings to models: resumed, the folder is that of a run."""
    fed = federation()
    settings = {**QUICK, "sweep": sweep, "rounds": 2, "checkpoint_every": 1}
    with pictured("whole") as taken:
        sartor.fit("fedavg", fed, out="whole", **settings)
    folders = ["", "part-0", "part-1"] if sweep else [""]
    for out in taken:
        sartor.fit("fedavg", fed, out=out, resume=True, **settings)
        for folder in folders:
            assert metrics(Path(out, folder)) == metrics(Path("whole", folder)), out
        for folder in folders[-2:]:
            assert_same_folder(Path(out, folder), Path("whole", folder))
    assert len(taken) > 15


# ---- disk ----------------------------------------------------------------------------------------


@contextmanager
def failing(number: int, where: str = "", after: int = 0) -> Iterator[list[Path]]:
    """Let every new file in a folder that ends in ``where`` fail, but for the first ``after``."""
    refused: list[Path] = []
    left, mkstemp = [after], tempfile.mkstemp

    def refuse(*args: Any, **kwargs: Any) -> Any:
        folder = Path(kwargs["dir"])
        if str(folder).endswith(where):
            left[0] -= 1
            if left[0] < 0:
                refused.append(folder)
                raise OSError(number, os.strerror(number))
        return mkstemp(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", refuse)
        yield refused


def assert_same_result(found: sartor.Result, wanted: sartor.Result) -> None:
    for key, scores in wanted.scores.items():
        np.testing.assert_array_equal(found.scores[key].loss, scores.loss)
        np.testing.assert_array_equal(found.scores[key].correct, scores.correct)
    np.testing.assert_array_equal(
        found.ledger.gradient_evaluations, wanted.ledger.gradient_evaluations
    )


def test_a_full_disk_during_checkpoints_costs_checkpoints_only() -> None:
    """Training continues with a warning, and result and models are written when there is room."""
    wanted = sartor.fit("fedapa", federation(), out="whole", **QUICK)
    words = r"disk is full.*Training continues.*not up to date"
    full = failing(errno.ENOSPC, "checkpoints")
    with full as refused, pytest.warns(UserWarning, match=words):
        result = sartor.fit("fedapa", federation(), out="a", **QUICK)
    assert len(refused) == 2
    assert_same_result(result, wanted)
    assert_same_folder("a", "whole")


def test_a_disk_that_has_room_again_gets_the_next_checkpoint() -> None:
    """A checkpoint that failed is no hindrance to the next, from which the run continues."""

    class Stop:
        def start(self, total_rounds: int, description: str) -> None: ...

        def update(self, round_index: int, info: dict[str, Any]) -> None:
            if round_index == 4:
                raise Killed

        def stop(self) -> None: ...

    settings = {**QUICK, "rounds": 6}
    sartor.fit("fedapa", federation(), out="whole", **settings)
    fail = RunFolder.write_checkpoint
    tries: list[int] = []

    def first_fails(self: RunFolder, round_index: int, *args: Any) -> Any:
        tries.append(round_index)
        if round_index > 2:
            return fail(self, round_index, *args)
        with failing(errno.ENOSPC):
            return fail(self, round_index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "write_checkpoint", first_fails)
        with pytest.warns(UserWarning, match="disk is full"), pytest.raises(Killed):
            sartor.fit("fedapa", federation(), out="a", progress=Stop(), **settings)
    assert tries == [2, 4]
    assert last_round("a") == 4
    sartor.fit("fedapa", federation(), out="a", resume=True, **settings)
    assert_same_folder("a", "whole")


@pytest.mark.parametrize("sweep", [{}, {"local_lr": [0.1, 0.2]}], ids=["one", "sweep"])
def test_a_disk_that_is_full_to_the_end_leaves_the_result_in_memory(sweep: dict[str, Any]) -> None:
    """Nothing at all can be written after the start: the result is whole, its models included."""
    settings = {**QUICK, "sweep": sweep}
    wanted = sartor.fit("fedavg", federation(), **settings)
    with failing(errno.ENOSPC, after=3), pytest.warns(UserWarning, match="disk is full"):
        result = sartor.fit("fedavg", federation(), out="a", **settings)
    assert_same_result(result, wanted)
    assert torch.equal(result.model(0).fc.weight, wanted.model(0).fc.weight)
    assert not Path("a/result.safetensors").exists()


def test_a_sweep_over_options_that_cannot_be_joined_on_disk_is_joined_in_memory() -> None:
    """The last write of all fails: both parts are there, and so is the result."""
    settings = {**QUICK, "sweep": {"rule": ["normalized", "chen"]}}
    with failing(errno.ENOSPC, "a"), pytest.warns(UserWarning, match="disk is full"):
        result = sartor.fit("fedavg", federation(), out="a", **settings)
    assert_same_result(result, sartor.fit("fedavg", federation(), **settings))
    assert Path("a/part-0/result.safetensors").exists()
    assert Path("a/part-1/result.safetensors").exists()


def test_mapped_states_without_room_are_refused_with_the_way_out(command: Any) -> None:
    """Files for client states that cannot be made end the run before it begins."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sartor.engines.work.np.memmap", refuse)
        code, _, err = command("run", "fedprox", *TINY, "--store", "mapped", "--out", "a")
        with pytest.raises(RunFolderError, match=r"No space left.*store='memory'"):
            sartor.fit("fedprox", federation(), store="mapped", **QUICK)
    assert code == 2
    assert "store='memory'" in err
    assert not Path("a").exists()


TINY: tuple[str, ...] = ("--data", "digits", "--clients", "4", "--partition", "iid")
TINY += ("--model", "dnn", "--rounds", "2", "--chunk", "4", "--json")


def test_a_full_disk_does_not_silence_a_command(command: Any) -> None:
    """The numbers are printed and the exit code is 0; warnings say what is not on disk."""
    _, wanted, _ = command("run", "fedprox", *TINY, "--out", "whole")
    # Written before the disk is full: the experiment, and the three files that make the folder.
    with failing(errno.ENOSPC, after=4), warnings.catch_warnings():
        warnings.simplefilter("always")  # as for a user: shown, and not raised
        code, out, err = command("run", "fedprox", *TINY, "--out", "a")
    assert code == 0
    assert "disk is full" in err
    assert "Traceback" not in err
    one, two = (json.loads(text.splitlines()[-1]) | {"out": ""} for text in (out, wanted))
    assert without_times(one) == without_times(two)
    # What was started can be resumed when there is room.
    code, out, err = command("resume", "a", "--json")
    assert code == 0, err
    assert_same_folder("a", "whole")


def test_a_full_disk_does_not_silence_a_comparison(command: Any) -> None:
    """The last file of a comparison cannot be written: the rows are printed, the runs are kept."""
    with failing(errno.ENOSPC, "cmp", after=4):
        code, out, err = command("compare", "local,fedavg", *TINY, "--out", "cmp")
    assert code == 0, err
    assert "disk is full" in err
    assert {row["method"] for row in json.loads(out.splitlines()[-1])} >= {"local", "fedavg"}
    assert Path("cmp/fedavg/result.safetensors").exists()
    code, out, err = command("resume", "cmp", "--json")
    assert code == 0, err
    assert Path("cmp/comparison.json").exists()


@pytest.mark.parametrize("way", ["under a file", "read-only"])
def test_a_run_folder_that_cannot_be_made_is_refused_before_training(
    way: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code 2, the path, and the way out; in Python the error of the library."""
    monkeypatch.setattr("sartor.training.simulation.Simulation.step", None)  # nothing may train
    Path("file").write_text("mine")
    out = "file/run" if way == "under a file" else "run"
    with failing(errno.EROFS):
        code, text, err = command("run", "local", *TINY, "--out", out)
        with pytest.raises(RunFolderError, match=r"run.*choose another folder"):
            sartor.fit("local", federation(), out=out, **QUICK)
    assert code == 2
    assert not text
    assert out in err
    assert "choose another" in err
    assert "Traceback" not in err
    assert Path("file").read_text() == "mine"


# ---- bad input, from end to end ------------------------------------------------------------------


def ctx(name: str, rows: str, header: str = "a,b,y") -> None:
    """Write the file of a client."""
    Path("sites").mkdir(exist_ok=True)
    Path("sites", name).write_text("\n".join([header, *rows.split()]) + "\n")


GOOD = "1,2,0 2,1,1 3,5,0 4,4,1 5,0,0 6,1,1 7,2,0 8,3,1"


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("bonn.csv", "", ("bonn.csv", "no samples", "take the file away")),
        ("bonn.csv", "1,nan,0 2,2,1", ("NaN", "client bonn", "drop or fill")),
        ("bonn.csv", "1,inf,0 2,2,1", ("infinite", "client bonn", "drop or fill")),
        ("bonn.csv", "1,2,-1 2,2,1", ("out of range", "-1", "client bonn", "counted from 0")),
        ("bonn.csv", "1,2,0.5 2,2,1", ("not whole numbers", "0.5", "client bonn")),
        ("bonn.csv", "1,2,1700000000 2,2,1", ("up to 1700000000", "--label", "number the classes")),
        ("bonn.csv", "1,2,0 2,2", ("bonn.csv", "line 3 has 2 cells instead of 3")),
        ("bonn.csv", "1,tall,0", ("bonn.csv", "'b' holds tall", "encode it as numbers")),
        ("bonn.npz", "torn", ("bonn.npz", "cannot be used")),
    ],
)
def test_bad_files_are_refused_by_name(
    name: str, rows: str, words: tuple[str, ...], command: Any
) -> None:
    """The command says which file or client, and what to do; no run folder is left behind."""
    ctx("good.csv", GOOD)
    ctx(name, rows)
    code, out, err = command("run", "fedavg", "--data", "./sites", "--out", "a", "--json")
    assert code == 2, err
    assert not out
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert not Path("a").exists()
    with pytest.raises(FederationError, match=r"bonn|Labels"):
        Federation.from_folder("sites")


def test_a_client_without_training_samples_is_refused_by_name(command: Any) -> None:
    """A client that brings test samples only is named, and so is the way to leave it out."""
    for part in ("good.train", "good.test", "empty.test"):
        ctx(f"{part}.csv", GOOD)
    code, _, err = command("run", "fedavg", "--data", "./sites", "--out", "a")
    assert code == 2
    assert "Client empty has no training samples" in err
    assert "min_samples=1" in err
    fed = Federation.from_folder("sites", min_samples=1)
    assert sartor.fit("fedavg", fed, rounds=1).clients == ("good",)


def test_many_classes_are_legal_if_they_are_meant() -> None:
    """Labels far beyond the samples need num_classes; a part of many classes needs nothing."""
    x, client = np.zeros((4, 1)), [0, 0, 1, 1]
    with pytest.raises(FederationError, match=r"up to 20000.*4 samples.*num_classes"):
        Federation.from_arrays(x, [0, 20_000, 1, 1], client=client)
    assert Federation.from_arrays(x, [0, 20_000, 1, 1], client=client, num_classes=20_001).y.max()
    assert Federation.from_arrays(x, [0, 900, 1, 1], client=client).num_classes == 901


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "fedapa"])
def test_one_class_and_one_client_train(method: str, command: Any) -> None:
    """A single client that has seen a single class is right about it."""
    ctx("only.csv", "1,2,0 2,1,0 3,5,0 4,4,0")
    code, out, err = command("run", method, "--data", "./sites", "--rounds", "2", "--json")
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert (answer["accuracy"], answer["clients"]) == (1.0, 1)


def test_one_class_and_one_client_have_a_report() -> None:
    """The page is drawn also where there is next to nothing to draw."""
    ctx("only.csv", "1,2,0 2,1,0 3,5,0 4,4,0")
    sartor.fit("fedapa", Federation.from_folder("sites"), rounds=1, out="a")
    page = write_report("a").read_text(encoding="utf-8")
    assert re.search(r"\bonly\b", page)
    assert "100.0" in page
    assert not re.search(r"\bnan\b", page, flags=re.IGNORECASE)


def test_negative_lambda_is_refused_everywhere(command: Any) -> None:
    """Set, swept, or for one client: the name, the bound, the value; nothing is left behind."""
    for flags in (
        ("--set", "prox_strength=-0.5"),
        ("--sweep", "prox_strength=0.1,-0.5"),
        ("--set", "prox_strength=0.1,0.1,-0.5,0.1"),
    ):
        code, _, err = command("run", "fedprox", *TINY, *flags, "--out", "a")
        assert code == 2, flags
        assert "prox_strength must be >= 0, got -0.5" in err
        assert not Path("a").exists()


def test_lambda_zero_is_local_training(command: Any) -> None:
    """FedProx without its pull has every score of LocalTrain, to the last digit."""
    line = (*TINY, "--momentum", "0.9", "--keep-optimiser")
    assert command("run", "local", *line, "--out", "alone")[0] == 0
    assert command("run", "fedprox", *line, "--set", "prox_strength=0", "--out", "free")[0] == 0
    assert command("run", "fedprox", *line, "--set", "prox_strength=1", "--out", "held")[0] == 0
    assert metrics("free") == metrics("alone")
    assert metrics("held") != metrics("alone")


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedapa"])
def test_a_cohort_of_one_trains_one(method: str, command: Any) -> None:
    """--participation 1 is one client a round, and 1.0 is everybody."""
    command("run", method, *TINY, "--participation", "1", "--out", "one")
    command("run", method, *TINY, "--participation", "1.0", "--out", "all")
    assert [row["participants"] for row in counts("one")] == ["1", "1"]
    assert [row["participants"] for row in counts("all")] == ["4", "4"]


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "fedapa"])
def test_a_batch_larger_than_a_client_is_all_of_it(method: str, command: Any) -> None:
    """Any batch that holds the largest client gives the same run; also with --drop-last."""
    for out, flags in (
        ("a", ("--batch", "100000")),
        ("b", ("--batch", "1000", "--drop-last")),
        ("c", ("--batch", "8")),
    ):
        code, _, err = command("run", method, *TINY, *flags, "--out", out)
        assert code == 0, err
    assert metrics("a") == metrics("b")
    assert counts("a") == counts("b")
    assert metrics("c") != metrics("a")


# ---- traces --------------------------------------------------------------------------------------


class Conv(nn.Module):
    """A small relative of LeNet, for images that are large enough for the fast pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3)
        self.fc = nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.max_pool2d(torch.relu(self.c1(x)), 2)
        z = F.max_pool2d(torch.relu(self.c2(z)), 2)
        found: Tensor = self.fc(z.flatten(1))
        return found


TASKS: dict[str, tuple[Callable[[], Task], tuple[int, ...]]] = {
    "dnn": (net_task, (4,)),
    "conv": (lambda: Task(Conv(), head="fc"), (1, 16, 16)),
}
NEVER = 1 << 30


def trained(name: str, net: str, chunk: int, worth: int = NEVER, workers: int = 1) -> Any:
    """Run a method, with every step traced that was used ``worth`` times."""
    task, shape = TASKS[net][0](), TASKS[net][1]
    local = Local(epochs=2, batch=3, lr=0.1, momentum=0.5)
    feds = [federation(shape=shape)] * (2 if chunk > 1 else 1)
    sim = simulation(
        build(name, task, local, {}),
        task,
        feds,
        chunk=chunk,
        rounds=3,
        dtype=torch.float32,
        participation="all",  # blocks of the same shapes in every round, so that traces are used
    )
    sim.engine.workers = workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced.Traces, "worth_it", worth)
        return run(sim)


@cache
def untraced(name: str, net: str, chunk: int) -> Any:
    """Run a method as it is; tests of traces and of threads compare with the same run."""
    return trained(name, net, chunk)


# Every method with every network, with every size of block, and every network with every size; the
# other half of all combinations is slow.
PAIRWISE = {("fedavg", "conv", 3), ("fedavg", "dnn", 1), ("fedprox", "dnn", 3)}
PAIRWISE |= {("fedprox", "conv", 1), ("fedapa", "dnn", 1), ("fedapa", "conv", 3)}


@pytest.mark.parametrize(
    ("name", "net", "chunk"),
    [
        pytest.param(*way, marks=[] if way in PAIRWISE else pytest.mark.slow)
        for way in itertools.product(("fedavg", "fedprox", "fedapa"), TASKS, (1, 3))
    ],
)
def test_a_traced_step_is_the_step_to_the_bit(name: str, net: str, chunk: int) -> None:
    """Models, scores and the counted gradients are the same with traces and without."""
    plain, fast = untraced(name, net, chunk), trained(name, net, chunk, worth=2)
    assert not plain.engine.traces._ready
    assert len(fast.engine.traces._ready) >= 2  # of training, and of scoring
    assert_same(outcome(fast), outcome(plain))
    assert (fast.ledger().gradient_evaluations > 0).all()


def test_a_step_that_cannot_be_traced_continues_as_it_is() -> None:
    """A value taken out of a tensor stops the trace and not the run."""

    def step(work: dict[str, Tensor], factor: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": work["a"] * factor["f"].item()}

    traces, owner = traced.Traces(), object()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced.Traces, "worth_it", 2)
        for k in range(5):
            found = traces.call(owner, step, {"a": torch.ones(2)}, {"f": torch.tensor(float(k))})
            traces.prepare()
            assert found["a"].tolist() == [float(k)] * 2
    assert not traces._ready


def test_traces_take_over_the_calls() -> None:
    """Once a trace is made the step itself is not called; other shapes have their own traces."""
    calls: list[tuple[int, ...]] = []

    def step(work: dict[str, Tensor], factor: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(tuple(work["a"].shape))
        return {"a": work["a"] * factor["f"]}

    traces, owner = traced.Traces(), object()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced.Traces, "worth_it", 2)
        for size in (3, 4):
            for k in range(5):
                found = traces.call(
                    owner, step, {"a": torch.ones(size)}, {"f": torch.tensor(float(k))}
                )
                assert found["a"].tolist() == [float(k)] * size
                traces.prepare()
    assert calls == [(3,)] * 3 + [(4,)] * 3  # twice, and once while it is traced
    other = traces.call(object(), step, {"a": torch.ones(3)}, {"f": torch.tensor(2.0)})
    assert other["a"].tolist() == [2.0] * 3
    assert len(calls) == 7  # a trace belongs to its owner


def test_a_trace_takes_apart_what_was_one_tensor_when_it_was_made() -> None:
    """A model that is still its message at the first step is another tensor at the second."""
    traces, owner, message = traced.Traces(), object(), torch.ones(2)
    traces.worth_it = 1
    seen = []
    for model in (message, message + 1):
        pair = {"a": model}, {"a": message}
        seen.append(traces.call(owner, lambda x, y: {"a": x["a"] - y["a"]}, *pair)["a"].tolist())
        traces.prepare()
    assert traces.made == 1
    assert seen == [[0.0, 0.0], [1.0, 1.0]]


def test_a_trace_is_made_when_it_would_have_paid() -> None:
    """Long steps are traced after a few calls, short ones after many."""
    pays = traced.Traces()._pays
    assert [pays(uses, uses * 0.1) for uses in (1, 4, 5)] == [False, False, True]
    assert [pays(uses, uses * 0.001) for uses in (5, 50, 60)] == [False, False, True]


def test_a_trace_made_at_once_counts_no_loss() -> None:
    """Where nobody else computes the third call has a trace, and the log do not notice."""
    task, shape = TASKS["dnn"][0](), TASKS["dnn"][1]
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long)
    batch = Batch(x, y, torch.ones(2, dtype=torch.bool), torch.arange(2), torch.tensor(True))
    traces, owner = traced.Traces(), object()
    traces.worth_it, traces.at_once = 2, True
    params = {name: value.detach() for name, value in task.module.named_parameters()}
    counted = []
    for _ in range(3):
        with metered() as calls:
            traces.call(owner, lambda work: {"loss": task.loss(work, batch)}, params)
        counted.append(calls())
    assert counted == [(1, 0), (1, 0), (0, 0)]
    assert traces.made == 1


def test_traces_wait_until_nobody_computes() -> None:
    """Asking for a trace makes none: only prepare does, between blocks."""
    traces, owner = traced.Traces(), object()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced.Traces, "worth_it", 1)
        for _ in range(3):
            traces.call(owner, lambda work: {"a": work["a"] + 1}, {"a": torch.zeros(2)})
            assert not traces._ready
        traces.prepare()
    assert len(traces._ready) == 1


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("worth", [2, NEVER], ids=["traced", "plain"])
@pytest.mark.parametrize("net", list(TASKS))
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedapa"])
def test_two_threads_are_one_to_the_bit(name: str, net: str, worth: int) -> None:
    """Blocks side by side give the numbers of blocks one after the other."""
    wanted = outcome(untraced(name, net, 1))
    assert_same(outcome(trained(name, net, 1, worth, workers=2)), wanted)


@pytest.mark.parametrize(("net", "batch"), [("dnn", 3), ("conv", 3), ("conv", 9)])
def test_two_threads_with_one_lane_each_are_the_reference(net: str, batch: int) -> None:
    """One lane a block on two threads is the sequential engine, up to rounding in float64.

    Batches of nine are large enough for the compiled convolutions.
    """
    task, shape = TASKS[net][0](), TASKS[net][1]
    method = build("fedapa", task, Local(epochs=2, batch=batch, lr=0.1, momentum=0.5), {})
    fed = federation(shape=shape)
    wanted = outcome(run(simulation(method, task, [fed], engine="sequential")))
    sim = simulation(method, task, [fed], chunk=1)
    sim.engine.workers = 2
    assert_same(outcome(run(sim)), wanted, atol=1e-11)
