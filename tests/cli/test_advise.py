"""Laws of ``sartor advise``: what it prints, what it leaves, and what it says of bad input."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import sartor
from sartor.adviser import AdviceFolder, words
from sartor.adviser.verification import Verification
from sartor.cli import main
from sartor.cli.advice import as_flags
from sartor.cli.app import app
from sartor.data.synthetic import logistic

Change = Callable[[int, Any, Any], tuple[Any, Any]]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, without a data folder, and draws no pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SARTOR_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")


class Answer:
    """What a command left: its exit code, its output, and the JSON of its last line."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs ``sartor advise`` on a folder, in this process."""

    def call(data: Any, *flags: str) -> Answer:
        code = main(["advise", "--data", str(data), *flags])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


def sites(
    number: int = 4,
    samples: int = 80,
    dim: int = 2,
    spread: float = 0.3,
    change: Change = lambda i, x, y: (x, y),
) -> Path:
    """Write a folder with one CSV a client: logistic models that differ by ``spread``."""
    rng = np.random.default_rng(0)
    folder = Path("sites").absolute()
    folder.mkdir()
    for i in range(number):
        w = np.ones(dim) + spread * rng.normal(size=dim)
        x = rng.normal(size=(samples, dim))
        y = (rng.random(samples) < 1 / (1 + np.exp(-x @ w))).astype(int)
        x, y = change(i, x, y)
        head = ",".join([*(f"f{j}" for j in range(dim)), "y"])
        path = folder / f"site{i}.csv"
        np.savetxt(path, np.c_[x, y], fmt="%.5g", delimiter=",", header=head, comments="")
    return folder


# ---- what it answers -----------------------------------------------------------------------------


def test_the_answer_the_estimates_and_the_way_to_carry_it_out_are_printed(advise: Any) -> None:
    """Recommendation, constants with errors, λ by rule, clients, costs, how to, and the places."""
    answer = advise(sites(spread=0.6), "--basis", "theory", "--out", "a")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(("Federate", "Do not federate"))
    for part in ("Counted and estimated", "λ by rule", "excess loss of every client", "guaranteed"):
        assert part in answer.out
    found = AdviceFolder.open("a").read_advice()[0]
    here = found.constants["R2_standard_error"]
    assert f"{found.constants['R2']:.4g} ± {here:.2g}" in answer.out
    for name in ("v1 (ρ = 2)", "v1", "v2", "shrinkage", "expected error", "chosen"):
        assert f"\n{name} " in answer.out
    assert "site3" in answer.out
    assert "import sartor" in answer.out
    assert "Files   a" in answer.out
    assert "alone and together" in answer.err


def test_the_evidence_prints_intervals_costs_and_a_command_that_runs(advise: Any) -> None:
    """Answer, log evidence, a row for each client, rounds and bytes; the command trains."""
    answer = advise(sites(spread=0.6), "--out", "a")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(("Federate", "Do not federate", "These data cannot tell"))
    for part in ("log evidence of", "Held-out loss of every client", "± 95 %", "sent, both ways"):
        assert part in answer.out
    spoken = shlex.split(next(w for w in answer.out.splitlines() if w.startswith("  sartor run")))
    assert main([*spoken[1:], "--out", "b", "--json"]) == 0


def test_own_data_give_one_answer_for_every_seed(advise: Any) -> None:
    folder = sites(spread=0.6)
    first, other = (advise(folder, "--seed", s, "--out", s, "--json").json for s in ("0", "7"))
    assert other["held_out"] == first["held_out"]
    assert other["verdict"] == first["verdict"]


def test_a_table_with_gaps_and_categories_is_answered(advise: Any) -> None:
    """Empty cells are filled and marked, without a flag; the command does the same."""
    rng = np.random.default_rng(0)
    lines = ["place,age,kind,ill"]
    for i in range(120):
        age = "" if i % 7 == 0 else f"{rng.normal(50, 9):.1f}"
        lines.append(f"p{i % 3},{age},{'abc'[i % 5 % 3]},{int(rng.random() < 0.5)}")
    Path("table.csv").write_text("\n".join(lines))
    answer = advise("table.csv", "--client", "place", "--label", "ill", "--out", "a", "--json")
    assert answer.code == 0, answer.err
    assert "5 scaled features" in answer.json["model"]  # age, whether it is missing, three kinds
    assert "--missing indicator" in answer.json["carry_out"]
    assert "Empty cells of 1 columns (age)" in answer.err


def test_the_last_line_is_the_advice(advise: Any) -> None:
    """With --json stdout is one line; it, advice.json and the library say the same."""
    folder = sites()
    answer = advise(folder, "--out", "a", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.out.splitlines()) == 1
    reported = answer.json
    stored = json.loads(Path("a/advice.json").read_text())
    assert reported["strategy"] == stored["strategy"]
    assert reported["out"] == "a"
    assert reported["verification"] is None
    federation = sartor.Federation.from_folder(folder, seed=0, test=0.0)
    expected = sartor.advise(federation).to_dict()
    assert {key: reported[key] for key in expected} == expected
    assert stored["pulls"][0] == 0
    assert stored["pulls"][-1] == "inf"


def test_what_is_written_down_is_read_back(advise: Any) -> None:
    """From the folder comes the same advice, with the infinities, and the same verification."""
    folder = sites(number=3, samples=60, spread=0.1)
    answer = advise(folder, "--verify", "--basis", "theory", "--out", "a", "--json")
    assert answer.code == 0, answer.err
    found, verified = AdviceFolder.open("a").read_advice()
    expected = sartor.advise(sartor.Federation.from_folder(folder, seed=0), basis="theory")
    assert found.to_dict() == expected.to_dict()
    assert found.summary() == expected.summary()
    assert found.pulls == expected.pulls
    assert verified is not None
    assert verified.to_dict() == answer.json["verification"]
    assert "Advised and measured" in answer.err
    assert Verification.from_dict(verified.to_dict()).summary() == verified.summary()
    advised = verified.rows[0]
    assert advised.megabytes == pytest.approx(found.plan.bytes_total / 1e6, rel=0.3)


def test_the_python_that_is_printed_runs(advise: Any) -> None:
    """It trains the advised method with the advised strength and predicted rounds."""
    folder = sites(spread=0.8, samples=100)
    answer = advise(folder, "--basis", "theory", "--out", "a", "--json")
    names: dict[str, Any] = {}
    exec(compile(answer.json["carry_out"], "carry_out", "exec"), names)
    result = names["result"]
    assert result.method == answer.json["method"]
    assert result.ledger.num_rounds == answer.json["plan"]["rounds"]
    if answer.json["strategy"] == "personalised":
        used = result.runs[0].hyper["prox_strength"]
        assert used == pytest.approx(answer.json["prox_strength"])


def test_a_network_is_tried_and_the_command_repeats_it(advise: Any) -> None:
    """With --model λ is found by training, and `sartor run` with the printed words works."""
    folder = sites(samples=40)
    flags = (
        "--basis",
        "trial",
        "--model",
        "mclr",
        "--rounds",
        "2",
        "--lr",
        "0.1",
        "--out",
        "a",
        "--json",
    )
    answer = advise(folder, *flags)
    assert answer.code == 0, answer.err
    assert answer.json["basis"] == "trial"
    assert "round 2/2" in answer.err
    program, *spoken = shlex.split(answer.json["carry_out"])
    assert program == "sartor"
    assert spoken[:2] == ["run", answer.json["method"]]
    assert ("--set" in spoken) == (answer.json["strategy"] == "personalised")
    given = dict(zip(spoken[2::2], spoken[3::2], strict=True))
    assert given["--model"] == "mclr"
    assert float(given["--lr"]) == 0.1
    assert main([*spoken, "--out", "b", "--json"]) == 0


def test_a_budget_is_kept_or_its_lack_is_reported(advise: Any) -> None:
    """With one round, the recommendation needs at most one, or nobody talks; and it says why."""
    answer = advise(sites(), "--basis", "theory", "--budget-rounds", "1", "--out", "a")
    assert answer.code == 0, answer.err
    found = AdviceFolder.open("a").read_advice()[0]
    assert "the budget allows 1 rounds" in " ".join(found.doubts)
    assert found.reason.startswith("The budget decides")
    assert "smallest expected error within the budget" in answer.out


def test_a_budget_caps_the_plan() -> None:
    """What is advised sends no more than was allowed, and states the accuracy that this buys."""
    federation, _ = logistic(spread=0.4, clients=8, samples=200, dim=3, test_samples=20)
    by: dict[str, Any] = {"features": "raw", "basis": "theory"}
    free = sartor.advise(federation, **by)
    found = sartor.advise(federation, **by, budget_rounds=2)
    assert found.strategy == "personalised"
    assert free.plan.rounds > 2
    plan = found.plan
    assert plan.rounds == 2
    assert plan.bytes_total == 2 * 4 * 8 * (2 * 3 + 1)  # rounds, bytes, clients, model and K
    assert plan.accuracy == pytest.approx(plan.start * plan.rate**2)
    by_bytes = sartor.advise(federation, **by, budget_mb=plan.bytes_total / 1e6)
    assert by_bytes.plan == plan


def test_many_clients_are_shortened_on_the_screen_alone(advise: Any) -> None:
    """Twenty of thirty rows are shown, and a note says which; the file has all of them."""
    answer = advise(sites(number=30, samples=40, dim=1), "--out", "a")
    assert answer.code == 0, answer.err
    assert sum(line.startswith("site") for line in answer.out.splitlines()) == 20
    assert "of 30; advice.json has them all" in answer.out
    found = AdviceFolder.open("a").read_advice()[0]
    assert len(found.clients) == 30
    gains = sorted(client.gain for client in found.clients)
    shown = sorted(words.client_table(found, 20).column("gain"))
    assert shown == pytest.approx([*gains[:10], *gains[-10:]])


def test_a_folder_that_is_taken_is_refused_before_any_work(advise: Any) -> None:
    """It is left as it is, unless --overwrite replaces an advice."""
    folder = sites()
    assert advise(folder, "--out", "a").code == 0
    before = Path("a/advice.json").read_bytes()
    refused = advise(folder, "--out", "a", "--features", "raw")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert Path("a/advice.json").read_bytes() == before
    assert advise(folder, "--out", "a", "--features", "raw", "--overwrite").code == 0
    assert Path("a/advice.json").read_bytes() != before
    foreign = advise(folder, "--out", str(folder), "--overwrite")
    assert foreign.code == 2
    assert "no run folder" in foreign.err


def test_an_advice_cannot_be_resumed(advise: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says that there is nothing to resume."""
    assert advise(sites(), "--out", "a").code == 0
    assert main(["resume", "a"]) == 2
    assert "holds an advice" in capsys.readouterr().err


def test_a_damaged_advice_is_told_apart(advise: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing key is one clear message, not a traceback."""
    assert advise(sites(), "--out", "a").code == 0
    content = json.loads(Path("a/advice.json").read_text())
    del content["clients"]
    Path("a/advice.json").write_text(json.dumps(content))
    with pytest.raises(sartor.core.errors.RunFolderError, match=r"advice\.json is not whole"):
        AdviceFolder.open("a").read_advice()


def test_the_page_about_it_runs_and_names_every_flag() -> None:
    """The fenced example of docs/advise.md gives what it shows; its flags and image exist."""
    page = Path(__file__).parents[2] / "docs" / "advise.md"
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile(str(page), module_relative=False, optionflags=flags, encoding="utf-8")
    assert found.attempted >= 8
    assert found.failed == 0
    text = page.read_text(encoding="utf-8")
    for picture in re.findall(r"\]\((images/[^)]+)\)", text):
        assert (page.parent / picture).stat().st_size < 150_000
    command: Any = typer.main.get_command(app)
    known = {option for p in command.commands["advise"].params for option in p.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


# ---- bad input -----------------------------------------------------------------------------------


def test_two_clients_work_with_a_caution(advise: Any) -> None:
    """The answer stands, and says that it rests on one difference."""
    answer = advise(sites(number=2), "--out", "a")
    assert answer.code == 0, answer.err
    assert "rests on one difference alone" in answer.out
    assert "for clients like these" not in answer.out


def one_class(i: int, x: Any, y: Any) -> tuple[Any, Any]:
    return x, 0 * y if i == 1 else y


def test_a_client_with_one_class_is_answered_and_refused_by_the_theory(advise: Any) -> None:
    """By default there is an answer; with --basis theory it is refused, with the reason."""
    folder = sites(change=one_class)
    answer = advise(folder, "--out", "a", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["basis"] == "evidence"
    refused = advise(folder, "--basis", "theory", "--out", "b")
    assert refused.code == 2
    assert "site1 has samples of one class only" in refused.err
    assert "Way out: a ridge term, such as --ridge 0.1" in refused.err
    assert not Path("b").exists()


def test_fewer_samples_than_parameters_are_reported_before_any_fit(
    advise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message counts both and offers fewer features, as a flag."""
    folder = sites(samples=20, dim=30)
    module = sys.modules["sartor.adviser.advise"]  # the package has a function of this name
    monkeypatch.setattr(module, "estimate", lambda *_, **__: pytest.fail("fitted"))
    refused = advise(folder, "--basis", "theory", "--out", "a")
    assert refused.code == 2
    assert "site0 has 15 samples for 31 parameters (at least 155 are needed)" in refused.err
    assert "--features pca:2" in refused.err


def constant(i: int, x: Any, y: Any) -> tuple[Any, Any]:
    return 0 * x + 3, y


def broken(i: int, x: Any, y: Any) -> tuple[Any, Any]:
    return (np.where(np.arange(len(x))[:, None] == 3, np.nan, x) if i == 2 else x), y


def empty(i: int, x: Any, y: Any) -> tuple[Any, Any]:
    return (x[:0], y[:0]) if i == 1 else (x, y)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"number": 1}, "at least two clients, got one"),
        ({"change": constant}, "No feature varies"),
        ({"change": broken}, "NaN or infinite features: rows 163 (client site2)"),
        ({"change": empty}, "site1.csv cannot be used: it has no samples"),
    ],
)
def test_data_that_cannot_be_right_is_one_message(
    made: dict[str, Any], said: str, advise: Any
) -> None:
    """Exit code 2, the fault named, no traceback, nothing left behind."""
    answer = advise(sites(**made), "--out", "a")
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--features wavelet", "--features must be 'raw', 'scaled' or 'pca:K', got 'wavelet'"),
        ("--features pca:9", "needs a whole K from 1 to 2, got '9'"),
        ("--budget-mb -1", "--budget-mb must be positive, got -1; leave it out for no limit"),
        ("--budget-rounds 0", "--budget-rounds must be positive, got 0"),
        ("--ridge -1", "--ridge must be >= 0, got -1"),
        ("--basis magic", "--basis must be 'auto', 'evidence', 'theory' or 'trial', got 'magic'"),
        ("--model mclr --basis theory", "or take --basis trial"),
        ("--model mclr --features raw", "leave one or the other out"),
        ("--model mcrl", "did you mean 'mclr'?"),
        ("--clients 5", "has its own clients; leave out clients"),
        ("--budget-mb much", "valid number"),
        ("--lr -1", "--lr should be greater than 0, got '-1'"),
    ],
)
def test_a_flag_that_cannot_be_right_is_one_message(flags: str, said: str, advise: Any) -> None:
    """Exit code 2, the flag named with what it may be, nothing left behind."""
    answer = advise(sites(samples=20), *flags.split(), "--out", "a")
    assert answer.code == 2
    assert said in " ".join(answer.err.split())
    assert "Traceback" not in answer.err
    assert not Path("a").exists()


def test_a_missing_folder_is_reported(advise: Any) -> None:
    """The path is named, with what should be there."""
    answer = advise("./nowhere")
    assert answer.code == 2
    assert "nowhere is not a folder; give one that holds a file per client" in answer.err


def test_arguments_of_the_library_become_flags() -> None:
    """Words alone stay as they are."""
    assert as_flags("give model=... or features='pca:3'.") == "give --model or --features pca:3."
    assert as_flags("the features of a ridge") == "the features of a ridge"
