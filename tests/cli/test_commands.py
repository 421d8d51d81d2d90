"""Laws of the commands: what they print, where they leave their files, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sartor
from sartor.cli import main
from sartor.cli.config import Experiment, build
from sartor.core.errors import RunFolderError
from sartor.training.schema import flag

TINY = (
    "--data",
    "digits",
    "--clients",
    "4",
    "--partition",
    "iid",
    "--model",
    "dnn",
    "--rounds",
    "2",
)
PROMISED = {
    "method",
    "accuracy",
    "accuracy_best",
    "accuracy_macro",
    "worst_client",
    "bytes_up",
    "bytes_down",
    "gradient_evaluations",
    "seconds",
    "out",
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, without a data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SARTOR_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Drawing takes longer than training here; tests that ask for ``pages`` get them."""
    if "pages" not in request.fixturenames:
        monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")


@pytest.fixture
def pages() -> None:
    """Let the commands write their reports."""


class Answer:
    """What a command left: its exit code, its output, and the JSON of its last line."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command in this process."""

    def call(*words: str) -> Answer:
        code = main(list(words))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


def same(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out what may differ between two equal runs: times and places."""
    return {k: v for k, v in row.items() if not k.startswith("seconds") and k != "out"}


def test_the_last_line_of_a_run_is_one_object(command: Any) -> None:
    """With --json the last line of stdout is one JSON object with the promised keys."""
    answer = command("run", "fedapa", *TINY, "--seed", "3", "--out", "runs/a", "--json")
    assert answer.code == 0, answer.err
    assert answer.json.keys() >= PROMISED
    assert (answer.json["method"], answer.json["seed"]) == ("fedapa", 3)
    assert answer.json["out"] == "runs/a"
    assert len(answer.out.splitlines()) == 1
    assert "round 2/2" in answer.err
    assert "runs/a" in answer.err
    assert (Path("runs/a") / "summary.json").exists()


def test_the_last_line_of_a_sweep_is_a_list(command: Any) -> None:
    """A sweep with repeats is one pass, and a list with hyper-parameters and seed of every run."""
    words = ("--sweep", "prox_strength=0.02,0.5", "--seeds", "3", "--json", "--out", "a")
    answer = command("run", "fedprox", *TINY, *words)
    assert answer.code == 0, answer.err
    found = [(row["hyper"]["prox_strength"], row["seed"]) for row in answer.json]
    assert found == [(strength, seed) for strength in (0.02, 0.5) for seed in (0, 1, 2)]
    assert all(row.keys() >= PROMISED for row in answer.json)
    assert answer.err.count("round 2/2") == 1


def test_a_row_of_a_sweep_is_the_single_run(command: Any) -> None:
    """Swept and repeated or alone: the same seed and the same values give the same numbers."""
    sweep = command(
        "run", "fedprox", *TINY, "--sweep", "prox_strength=0.1,1", "--seeds", "2", "--json",
        "--dtype", "float64", "--out", "a",
    ).json  # fmt: skip
    single = command(
        "run", "fedprox", *TINY, "--set", "prox_strength=1", "--seed", "1", "--json",
        "--dtype", "float64", "--out", "b",
    ).json  # fmt: skip
    row = next(r for r in sweep if r["seed"] == 1 and r["hyper"]["prox_strength"] == 1)
    assert row["accuracy"] == pytest.approx(single["accuracy"], abs=1e-12)
    assert row["bytes_up"] == single["bytes_up"]


def test_a_file_and_flags_give_the_same_run(command: Any) -> None:
    """An experiment file does what the same flags do."""
    Path("experiment.toml").write_text(
        'method = "fedprox"\ndata = "digits"\nclients = 4\npartition = "iid"\nmodel = "dnn"\n'
        "rounds = 2\nlr = 0.1\n[set]\nprox_strength = 0.3\n"
    )
    one = command("run", "experiment.toml", "--json", "--out", "a")
    two = command(
        "run", "fedprox", *TINY, "--lr", "0.1", "--set", "prox_strength=0.3", "--json", "--out", "b"
    )
    assert one.code == two.code == 0, one.err + two.err
    assert same(one.json) == same(two.json)


def test_a_comparison_lists_every_method(command: Any) -> None:
    """Compare gives one object per method, a table with all, and a folder each."""
    words = ("local,fedprox", *TINY, "--set", "prox_strength=0.3", "--out", "c")
    answer = command("compare", "--no-baselines", *words, "--json")
    assert answer.code == 0, answer.err
    assert [row["method"] for row in answer.json] == ["local", "fedprox"]
    assert answer.json[1]["hyper"]["prox_strength"] == 0.3
    assert [row["out"] for row in answer.json] == ["c/local", "c/fedprox"]
    shown = command("compare", "--no-baselines", *words[:-1], "d")
    assert shown.code == 0
    assert "clients hurt" in shown.out
    assert "fedprox" in shown.out


def test_a_value_for_one_method_leaves_the_others_alone(command: Any) -> None:
    """METHOD.NAME sets a value for that method only, and wins over the plain name."""
    sets = ("--set", "local_lr=0.2", "--set", "fedavg.local_lr=0.05")
    rows = command(
        "compare", "local,fedavg", "--no-baselines", *TINY, *sets, "--json", "--out", "a"
    ).json
    assert [row["hyper"]["local_lr"] for row in rows] == [0.2, 0.05]


def test_every_key_is_a_flag(command: Any) -> None:
    """The whole help of run and compare names a flag for every key of the schema."""
    for name in ("run", "compare"):
        text = command(name, "--help-all").out
        missing = [k for k in Experiment.model_fields if k != "methods" and flag(k) not in text]
        assert not missing


def test_the_help_fits_a_screen(command: Any) -> None:
    """Sartor --help has at most 30 lines, and names every command."""
    answer = command("--help")
    assert answer.code == 0
    assert len(answer.out.strip().splitlines()) <= 30
    names = ("demo", "run", "compare", "resume", "predict", "export", "onboard", "report", "data")
    others = ("methods", "serve", "join", "status", "keys")
    for name in (*names, *others, "--version"):
        assert name in answer.out


def test_the_version_is_the_packages(command: Any) -> None:
    """--version prints the version of the package."""
    assert command("--version").out.strip() == f"sartor {sartor.__version__}"


FAULTS = [
    ("run fedpox", "did you mean 'fedprox'"),
    ("run fedprox --set prox_strenght=1", "did you mean 'prox_strength'"),
    ("run fedprox --set prox_strength=-1", "prox_strength must be"),
    ("run fedprox --sweep prox_strength=0.1,-1", "prox_strength must be"),
    ("run fedapa --set preset=papr", "preset"),
    ("run fedavg --set rule=best", "rule"),
    ("run local --rounds none", "--rounds"),
    ("run local --rounds 0", "--rounds"),
    ("run local --clients 0 --val 2", "2 things to fix"),
    ("run local --data digit", "did you mean 'digits'"),
    ("run local --data mnist", "Sartor downloads nothing"),
    ("run local --data ./nowhere", "nowhere"),
    ("run local --data ./nowhere --clients 3", "clients"),
    ("run local --label x", "label"),
    ("run local --model lenet", "did you mean 'lenet5'"),
    ("run local --partition dirichlet", "dirichlet:0.1"),
    ("run local --partition dirchlet:1", "did you mean 'dirichlet'"),
    ("run local --participation some", "at_least:0.6"),
    ("run local --device cudaa", "cudaa"),
    ("run local --engine magic", "magic"),
    ("run local --dtype float8", "float8"),
    ("run local --set x", "NAME=VALUE"),
    ("run local,fedavg", "sartor compare local,fedavg"),
    ("run nothing.toml", "no such file"),
    ("compare local,fedpox", "did you mean 'fedprox'"),
    ("compare local,fedavg --set fedprox.prox_strength=1", "not among the methods"),
    ("resume nowhere", "does not exist"),
    ("resume .", "experiment.json"),
    ("methods fedpox", "did you mean 'fedprox'"),
    ("data digit", "did you mean 'digits'"),
    ("run local --round 3", "--rounds"),
    ("rnu local", "run"),
]


@pytest.mark.parametrize(("line", "part"), FAULTS, ids=[line for line, _ in FAULTS])
def test_a_fault_is_one_message(command: Any, line: str, part: str) -> None:
    """A fault of the input ends with code 2 and one message that helps; nothing is left behind."""
    answer = command(*line.split())
    assert answer.code == 2
    assert part in answer.err
    assert "Traceback" not in answer.err
    assert not answer.out
    assert not list(Path().glob("runs/*"))


def test_debug_shows_the_traceback(command: Any) -> None:
    """--debug, anywhere on the line, adds the traceback and keeps code and message."""
    for line in ("--debug run fedpox", "run fedpox --debug"):
        answer = command(*line.split())
        assert answer.code == 2
        assert "Traceback" in answer.err
        assert "did you mean 'fedprox'" in answer.err


def test_a_bug_is_reported_without_a_traceback(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw ends with code 1 and says how to see more."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(sartor, "fit", broken)
    answer = command("run", "local", *TINY)
    assert answer.code == 1
    assert "ZeroDivisionError: oh" in answer.err
    assert "--debug" in answer.err
    assert "Traceback" not in answer.err


def test_a_folder_that_is_not_empty_is_kept(command: Any) -> None:
    """A second run into the same folder is refused, unless --overwrite says so; notes stay."""
    line = ("run", "local", *TINY, "--out", "a", "--json")
    first = command(*line)
    Path("a/notes.txt").write_text("mine")
    second = command(*line)
    assert (first.code, second.code) == (0, 2)
    for way in ("--out", "--overwrite", "sartor resume a"):
        assert way in second.err
    third = command(*line, "--overwrite", "--seed", "1")
    assert third.code == 0, third.err
    assert third.json["seed"] == 1
    assert Path("a/notes.txt").read_text() == "mine"


def test_overwrite_never_touches_a_folder_of_others(command: Any) -> None:
    """--overwrite refuses a folder that is no run folder."""
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("x")
    answer = command("run", "local", *TINY, "--out", "thesis", "--overwrite")
    assert answer.code == 2
    assert [path.name for path in Path("thesis").iterdir()] == ["chapter.tex"]


def test_default_folders_do_not_collide(command: Any) -> None:
    """Two runs in the same second get two folders."""
    found = {command("run", "local", *TINY, "--json").json["out"] for _ in range(2)}
    assert len(found) == 2
    assert all(Path(out).parent == Path("runs") for out in found)


class Stop:
    """A progress that presses Ctrl-C after a given number of rounds."""

    def __init__(self, after: int) -> None:
        self.after = after

    def start(self, total_rounds: int, description: str) -> None:
        pass

    def update(self, round_index: int, info: Any) -> None:
        if round_index + 1 == self.after:
            raise KeyboardInterrupt

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    "line",
    [
        "run fedapa --momentum 0.9 --keep-optimiser",
        "run fedprox --sweep prox_strength=0.1,1 --seeds 2",
        "run fedapa --sweep weight_step=descent,as_printed",
        "compare local,fedavg --no-baselines",
    ],
)
def test_ctrl_c_then_resume_is_running_straight(
    command: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Ctrl-C ends with 130 and says how to resume; resumed, the numbers are those of a whole run.

    It falls before the first checkpoint, and between the first and the last.
    """
    words = (*line.split(), *TINY, "--rounds", "4", "--checkpoint-every", "2", "--json")
    whole = command(*words, "--out", "whole")
    assert whole.code == 0, whole.err
    for after in (1, 3):
        out = f"stopped-{after}"
        with monkeypatch.context() as patched:
            patched.setattr("sartor.cli.training.reporter", lambda plain, after=after: Stop(after))
            stopped = command(*words, "--out", out)
        assert stopped.code == 130
        assert f"sartor resume {out}" in stopped.err
        resumed = command("resume", out, "--json")
        assert resumed.code == 0, resumed.err
        rows = [whole.json, resumed.json]
        one, two = ([same(r) for r in (row if isinstance(row, list) else [row])] for row in rows)
        assert one == two, after


def test_a_finished_run_can_be_resumed(command: Any) -> None:
    """Resuming what is finished trains nothing and gives the same answer."""
    one = command("run", "fedavg", *TINY, "--out", "a", "--json")
    two = command("resume", "a", "--json")
    assert two.code == 0, two.err
    assert one.json == two.json
    assert "round" not in two.err


def test_a_diverged_method_does_not_spoil_a_comparison(command: Any) -> None:
    """If one method diverges the others are still compared, and the loss is reported."""
    words = (
        "compare",
        "local,fedavg",
        "--no-baselines",
        *TINY,
        "--set",
        "fedavg.local_lr=1e38",
        "--out",
        "a",
    )
    answer = command(*words, "--json")
    assert answer.code == 0, answer.err
    assert [row["method"] for row in answer.json] == ["local"]
    assert "fedavg" in answer.err
    assert "local_lr" in answer.err
    alone = command("run", "fedavg", *TINY, "--lr", "1e38", "--out", "b")
    assert alone.code == 2
    assert "try a smaller local_lr" in alone.err


def test_methods_lists_what_there_is(command: Any) -> None:
    """Sartor methods --json is a list with the promised facts of every method."""
    answer = command("methods", "--json")
    assert answer.code == 0
    entries = {entry["name"]: entry for entry in answer.json}
    assert {"local", "fedavg", "fedprox", "fedapa"} <= entries.keys()
    for entry in entries.values():
        assert entry.keys() == {
            "name",
            "family",
            "summary",
            "travels",
            "citation",
            "papers",
            "models_down",
            "models_up",
            "models_once",
            "gradients",
            "hyper",
            "options",
        }
        assert ("local_lr" in entry["hyper"]) == (entry["name"] != "evidence")
        assert entry["family"] in ("baseline", "regularised", "collaborative")
    sizes = [entries["local"], entries["fedavg"], entries["fedavg-ft"]]
    assert [entry["models_down"] for entry in sizes] == [0, 1, 1]
    assert [entry["models_once"] for entry in sizes] == [0, 0, 1]
    assert 0.5 < entries["fedapa"]["models_up"] < 1  # the head stays at home
    assert set(entries["fedapa"]["options"]["preset"]["allowed"]) == {"paper", "authors_code"}
    listed = command("methods").out
    assert all(name in listed for name in entries)
    assert "weight_step" in command("methods", "fedapa").out


def test_a_family_of_methods_is_compared_by_its_name(command: Any) -> None:
    """`all-baseline` stands for its members; a group that does not exist is named."""
    answer = command("compare", "all-baseline", *TINY, "--no-baselines", "--out", "c", "--json")
    assert answer.code == 0, answer.err
    assert [row["method"] for row in answer.json] == ["local", "fedavg", "fedavg-ft"]
    wrong = command("compare", "all-regularized", *TINY)
    assert wrong.code == 2
    assert "did you mean 'all-regularised'" in wrong.err


def test_any_method_can_be_fine_tuned_by_a_flag(command: Any) -> None:
    """`--finetune-steps` reaches every method but LocalTrain, and brings `ft_lr` with it."""
    words = ("compare", "fedavg", *TINY, "--finetune-steps", "2", "--set", "ft_lr=0.2")
    answer = command(*words, "--out", "tuned", "--json")
    assert answer.code == 0, answer.err
    rows = {row["method"]: row for row in answer.json}
    assert rows["fedavg"]["options"] == {"finetune_steps": 2}
    assert rows["fedavg"]["hyper"]["ft_lr"] == 0.2
    assert rows["fedavg"]["gradient_evaluations_setup"] > 0
    assert rows["local"]["options"] == {}


def test_the_global_model_is_scored_on_request(command: Any) -> None:
    """`--points pre,global` scores the global model too."""
    answer = command("run", "ditto", *TINY, "--points", "pre,global", "--out", "g", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["accuracy_global"] != answer.json["accuracy_pre"]
    assert "accuracy_post" not in answer.json
    assert command("run", "ditto", *TINY, "--points", "middle").code == 2


def test_the_divisions_of_papers_are_reached_by_flags(command: Any) -> None:
    """Exact classes, a limit of samples, a scale and a network of two convolutions."""
    words = ("--data", "digits", "--partition", "classes:2", "--clients", "5", "--samples", "100")
    fits = ("--scale", "pixel", "--model", "cnn2", "--rounds", "1", "--device", "cpu")
    answer = command("run", "fedavg", *words, *fits, "--out", "p", "--json")
    assert answer.code == 0, answer.err
    reported = command("data", "digits", *words[2:], "--json")
    assert reported.json["samples"]["train"] == 100
    assert reported.json["smallest"]["train"] == reported.json["largest"]["train"] == 20
    assert reported.json["classes_per_client"] == 2
    wrong = command("run", "fedavg", *words[:2], "--partition", "classes:12")
    assert wrong.code == 2
    assert "more classes a client than the 10" in wrong.err
    assert "did you mean 'cnn2'" in command("run", "fedavg", *words, "--model", "cnnn2").err


def hospital(folder: str, names: tuple[str, ...], seed: int) -> None:
    """Write one file per client: two inputs, and whether their sum is positive."""
    draw = np.random.default_rng(seed)
    Path(folder).mkdir()
    for name in names:
        x = draw.normal(size=(40, 2)).astype(np.float32)
        np.savez(Path(folder) / f"{name}.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))


def test_newcomers_get_models_from_a_run_folder(command: Any) -> None:
    """Sartor onboard loads the trained server and writes the newcomers' models."""
    hospital("known", ("a", "b", "c"), 0)
    hospital("new", ("d", "e"), 1)
    words = ("compare", "fedavg,ditto", "--data", "./known", "--rounds", "3", "--lr", "0.5")
    assert command(*words, "--no-baselines", "--out", "run").code == 0
    before = (Path("run/ditto") / "result.safetensors").read_bytes()
    many = command("onboard", "run", "new")
    assert many.code == 2
    assert "choose one with --method" in many.err
    answer = command("onboard", "run", "new", "--method", "ditto", "--rounds", "2", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["clients"] == 2
    assert answer.json["accuracy"] > 0.7
    assert answer.json["bytes_up"] == 0
    assert list(Path("run/ditto/newcomers/models").rglob("*.safetensors"))
    assert (Path("run/ditto") / "result.safetensors").read_bytes() == before
    again = command("onboard", "run", "new", "--method", "ditto")
    assert again.code == 2
    assert "--overwrite" in again.err


def test_data_lists_what_there_is(command: Any) -> None:
    """Sartor data says what is here, how to get the rest, and how data would be divided."""
    entries = {entry["name"]: entry for entry in command("data", "--json").json}
    assert entries["digits"]["found"]
    assert entries["mnist"]["found"] is None
    assert "mnist" in command("data").out
    missing = command("data", "mnist")
    assert (missing.code, "from:" in missing.out) == (0, True)
    divided = command("data", "digits", "--clients", "7", "--partition", "iid", "--json")
    assert divided.json["clients"] == 7


def test_a_folder_of_files_can_be_trained(command: Any) -> None:
    """--data ./folder trains on one file per client, with the label column that is named."""
    Path("sites").mkdir()
    for site in ("north", "south"):
        rows = "".join(f"{i % 5},{(7 * i) % 3},{i % 2}\n" for i in range(40))
        Path(f"sites/{site}.csv").write_text("age,dose,sick\n" + rows)
    words = ("--model", "mclr", "--rounds", "1", "--label", "sick", "--json", "--out", "a")
    answer = command("run", "fedavg", "--data", "./sites", *words)
    assert answer.code == 0, answer.err
    assert answer.json["clients"] == 2


def test_the_stored_experiment_is_the_one_that_was_asked_for(command: Any) -> None:
    """experiment.json builds the experiment again, defaults included."""
    command("run", "fedprox", *TINY, "--set", "prox_strength=0.2", "--out", "a")
    stored = build(json.loads(Path("a/experiment.json").read_text()))
    asked = build(
        {
            "method": "fedprox",
            "data": "digits",
            "clients": 4,
            "partition": "iid",
            "model": "dnn",
            "rounds": 2,
            "set": {"prox_strength": 0.2},
            "out": Path("a").absolute(),
        }
    )
    assert stored == asked


@pytest.mark.usefixtures("pages")
def test_report_writes_one_page(command: Any) -> None:
    """Sartor report writes report.html into the folder and says where it is."""
    command("run", "fedavg", *TINY, "--out", "a")
    Path("a/report.html").unlink(missing_ok=True)
    answer = command("report", "a")
    assert answer.code == 0, answer.err
    assert "a/report.html" in answer.out
    page = Path("a/report.html").read_text(encoding="utf-8")
    trained = json.loads(Path("a/summary.json").read_text())[0]["accuracy"]
    assert "fedavg" in page
    assert f"{100 * trained:.1f}" in page
    nowhere = command("report", "nowhere")
    assert nowhere.code == 2
    assert "nowhere" in nowhere.err


def test_report_writes_figures_for_a_paper(command: Any) -> None:
    """--format pdf writes one file for each figure; --out says where; another word is refused."""
    command("run", "fedavg", *TINY, "--out", "a")
    answer = command("report", "a", "--format", "pdf")
    assert answer.code == 0, answer.err
    names = {path.name for path in Path("a/figures").iterdir()}
    assert {"accuracy-by-round.pdf", "label-map.pdf", "captions.txt"} <= names
    assert "a/figures/accuracy-by-round.pdf" in answer.out
    reported = command("report", "a", "--format", "png", "--out", "b", "--json")
    listed = json.loads(reported.out.splitlines()[-1])["figures"]
    assert "b/label-map.png" in listed
    assert all(Path(path).stat().st_size > 1000 for path in listed)
    assert command("report", "a", "--out", "c").code == 0
    assert Path("c/report.html").exists()
    wrong = command("report", "a", "--format", "pfd")
    assert wrong.code == 2
    assert "did you mean 'pdf'" in wrong.err


@pytest.mark.usefixtures("pages")
def test_a_run_without_a_page_keeps_its_numbers(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the report cannot be written the results are printed all the same."""

    def broken(out: Path) -> Path:
        raise RunFolderError("the disk is full")

    monkeypatch.setattr("sartor.cli.work._write_report", broken)
    answer = command("run", "local", *TINY, "--out", "a", "--json")
    assert answer.code == 0
    assert answer.json.keys() >= PROMISED
    assert "the disk is full" in answer.err


def test_the_program_is_the_module() -> None:
    """Python -m sartor is the program, and a fault ends its process with code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "sartor", "run", "fedpox"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'fedprox'" in done.stderr


def test_sigint_ends_the_process_with_130() -> None:
    """A real SIGINT in the middle of a run ends with 130, and the run can be resumed."""
    words = ["run", "ditto", *TINY, "--rounds", "100000", "--eval-every", "100000"]
    words += ["--store", "mapped"]
    with subprocess.Popen(
        [sys.executable, "-m", "sartor", *words, "--checkpoint-every", "1", "--out", "a"],
        stderr=subprocess.PIPE,
        text=True,
        # Whoever starts the tests in the background may have switched the signal off.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert "round 1/100000" in process.stderr.readline()
        while not Path("a/checkpoints/latest.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130, rest
    assert "sartor resume a" in rest
    assert not list(Path("a").rglob("*.state")), "states in files are the process's own"


def test_an_error_that_ctrl_c_became_is_an_interruption(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code may answer a KeyboardInterrupt with an error of its own; no bug is reported."""

    def fit(*arguments: Any, **settings: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("something in C++ went wrong") from None

    monkeypatch.setattr("sartor.fit", fit)
    # Whoever starts the tests in the background may have switched the signal off.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = command("run", "local", *TINY, "--out", "a")
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert answer.code == 130, answer.err
    assert "sartor resume a" in answer.err
    monkeypatch.setattr("sartor.fit", _fail)
    assert command("run", "local", *TINY, "--out", "b").code == 1, "the next command starts afresh"


def _fail(*arguments: Any, **settings: Any) -> None:
    raise RuntimeError("a bug")


@pytest.mark.slow
@pytest.mark.usefixtures("pages")
def test_the_demo_shows_four_methods(command: Any) -> None:
    """Sartor demo compares four methods on digits and leaves a report that shows a gain."""
    answer = command("demo", "--out", "demo", "--json")
    assert answer.code == 0, answer.err
    columns = ("accuracy", "worst client", "clients hurt", "MB", "gradient evaluations", "seconds")
    for word in (*columns, "demo/report.html"):
        assert word in answer.err
    accuracy: dict[str, list[float]] = {}
    for row in answer.json:
        accuracy.setdefault(row["method"], []).append(row["accuracy"])
    assert list(accuracy) == ["local", "fedavg", "fedavg-ft", "ditto"]
    for seed, alone in enumerate(accuracy["local"]):
        assert accuracy["fedavg-ft"][seed] > alone + 0.03
        assert accuracy["ditto"][seed] > alone + 0.03
    page = (Path("demo") / "report.html").read_text()
    assert re.search(r"the mean gain of a client is \+\d\.\d points \(95 % interval \+", page)
    assert "Training alone gets 90.1 %, surely less." in page


@pytest.mark.slow
@pytest.mark.usefixtures("pages")
def test_the_other_demo_shows_when_not_to_federate(command: Any) -> None:
    """With many samples of few classes nobody gains, and the page says so."""
    answer = command("demo", "--when-not-to", "--out", "demo")
    assert answer.code == 0, answer.err
    for word in ("local", "fedavg", "fedprox", "fedapa", "nobody needs the others"):
        assert word in answer.out
    assert "is worth +" not in (Path("demo") / "report.html").read_text()


def test_the_baselines_stand_beside_every_comparison(command) -> None:
    """LocalTrain, FedAvg and FedAvg with fine-tuning are added unless they are left out."""
    rows = command("compare", "fedprox", *TINY, "--json", "--out", "a").json
    assert [row["method"] for row in rows] == ["local", "fedavg", "fedavg-ft", "fedprox"]


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("fedper", "private=fc1"),
        ("lg-fedavg", "shared=fc1,fc"),
        ("pfedla", "retained=2"),
    ],
)
def test_options_may_name_layers_of_the_network(command: Any, method: str, option: str) -> None:
    """They are checked against the network of the run, not against one that stands in for it."""
    words = ("run", method, *TINY, "--model", "dnn", "--rounds", "1")
    answer = command(*words, "--set", option, "--out", "a", "--json")
    assert answer.code == 0, answer.err
    name = option.partition("=")[0]
    wrong = "7" if name == "retained" else "fc3"
    answer = command(*words, "--set", f"{name}={wrong}", "--out", "b")
    assert answer.code == 2
    assert wrong in answer.err
    assert "did you mean 'fc'?" in answer.err or "from 0 to 2" in answer.err


def test_lists_of_options_are_described(command: Any) -> None:
    """Sartor methods says whether a list is of names or of numbers."""
    allowed = {
        name: command("methods", method, "--json").json["options"][name]["allowed"]
        for method, name in (("fedper", "private"), ("ditto", "choices"))
    }
    assert allowed == {"private": ["names with commas", None], "choices": ["numbers with commas"]}
