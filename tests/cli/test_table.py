"""Laws of a CSV file on the command line: one command to a table of gains, all faults at once."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import sartor
from sartor.cli import main
from sartor.cli.config import build
from sartor.cli.settings import federation_code


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, and draws no pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")
    rng = np.random.default_rng(0)
    with open("my.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "id", "age", "sex", "y", "z"])
        for i in range(90):
            age, sex = rng.normal(50, 10), rng.choice(["f", "m"])
            ill = int(age + 8 * (sex == "f") > 55)
            writer.writerow([f"s{i % 3}", f"p{i}", f"{age:.2f}", sex, ill, 1 - ill])


WORDS = [
    "--data",
    "my.csv",
    "--client",
    "site",
    "--drop",
    "id,z",
    "--rounds",
    "2",
    "--model",
    "dnn",
]


def test_one_command_prints_what_each_site_gains(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of gains has a row for every site; the folder predicts for new rows."""
    assert main(["run", "fedavg", *WORDS, "--label", "y", "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert "fedavg: gain over training alone" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("s")]
    assert [row[0] for row in rows] == ["s0", "s1", "s2"]
    result = sartor.load("run")
    assert result.predict("s1", {"age": [20.0, 90.0], "sex": ["m", "f"]}).labels.shape == (2,)


def test_a_comparison_uses_its_own_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Methods beside local have a table of gains each; several labels make several tasks."""
    words = [*WORDS, "--label", "y,z", "--out", "run"]
    words[words.index("id,z")] = "id"
    assert main(["compare", "local,ditto", "--no-baselines", *words]) == 0
    assert capsys.readouterr().out.count("gain over training alone") == 1
    stored = json.loads(Path("run/experiment.json").read_text())
    assert (stored["client"], stored["label"], stored["drop"]) == ("site", "y,z", ["id"])


def test_faults_of_a_file_are_reported_before_a_folder_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All faults in one message, exit code 2, and nothing left behind."""
    text = Path("my.csv").read_text().splitlines()
    text[3] = text[3].replace("s2,", ",", 1)
    text[5] = "s1,p4,old,f,1,0"
    Path("my.csv").write_text("\n".join(text))
    words = [word if word != "id,z" else "z" for word in WORDS]
    assert main(["run", "fedavg", *words, "--label", "y", "--out", "run"]) == 2
    shown = capsys.readouterr().err
    assert "3 faults in the data" in shown  # the id is one
    assert "'site' names no client in 1 rows (2)" in shown
    assert "'old' in row 4" in shown
    assert not Path("run").exists()


def test_columns_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --client or --label the columns are listed; flags of data sets are refused."""
    assert main(["run", "fedavg", "--data", "my.csv"]) == 2
    assert "--client and --label (it has: site, id, age" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["run", "fedavg", *WORDS, "--label", "y", "--partition", "iid"]) == 2
    assert "is a table, which has its own clients; leave out partition" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["run", "fedavg", "--data", "digits", "--client", "site"]) == 2


def test_the_data_command_and_the_code_make_the_same_federation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``sartor data FILE`` shows the clients; the Python call makes what the flags make."""
    text = Path("my.csv").read_text().splitlines()
    Path("my.csv").write_text("\n".join(f"{a},{b}" for a, _, b in (t.split(",", 2) for t in text)))
    assert main(["data", "my.csv", "--client", "site", "--label", "y"]) == 0
    assert "3 clients, 66 training" in capsys.readouterr().out
    flags = {"data": "my.csv", "client": "site", "label": "y,z", "drop": "sex", "seed": 4}
    code = federation_code(build({"method": "local"}, flags=flags))
    made = eval(code, {"sartor": sartor})
    assert (made.task, made.info["seed"]) == ("multilabel", 4)


def test_newcomers_of_a_table_come_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """``sartor onboard RUN new.csv`` prepares them as those who trained were."""
    assert main(["run", "ditto", *WORDS, "--label", "y", "--out", "run"]) == 0
    lines = Path("my.csv").read_text().replace("s0,", "new,").splitlines()
    Path("new.csv").write_text("\n".join([lines[0], *(t for t in lines if t.startswith("new"))]))
    capsys.readouterr()
    assert main(["onboard", "run", "new.csv", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["clients"] == 1
    assert found["accuracy"] > 0


def test_a_regression_has_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    """A target of numbers is compared by its error, on the screen and without a page of classes."""
    from sartor.report import write_report

    words = [*WORDS, "--label", "age", "--out", "run"]
    assert main(["compare", "ditto", *words]) == 0
    shown = capsys.readouterr()
    assert "RMSE" in shown.out
    assert "ditto: gain over training alone" in shown.out
    assert re.search(r"ditto \(10 runs\)  round 2/2  RMSE [1-9]", shown.err)
    assert "accuracy" not in shown.out + shown.err
    page = write_report(Path("run")).read_text(encoding="utf-8")
    assert "RMSE by round" in page
    capsys.readouterr()
    assert main(["run", "ditto", *words[:-1], "other", "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["measure"], found["accuracy"]) == ("RMSE", None)
    assert 0 < found["pooled_measure"] < 100


def test_auto_needs_nothing_but_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints what was chosen and why, says so in JSON, resumes, and refuses what it chooses."""
    monkeypatch.setattr("sartor.training.auto.candidates", lambda task: ["local", "fedavg"])
    words = ["run", "auto", *WORDS, "--label", "y", "--seeds", "1"]
    assert main([*words, "--json", "--out", "run"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(answer["selection"]["candidates"]) == {"local", "fedavg"}
    assert set(answer["selection"]["clients"]) == {"s0", "s1", "s2"}
    assert main(["resume", "run"]) == 0
    shown = capsys.readouterr().out
    assert "what auto tried" in shown
    assert "what every client uses" in shown
    assert sartor.load("run").predict("s1", {"age": [20.0], "sex": ["m"]}).labels.shape == (1,)
    assert main([*words, "--lr", "0.1", "--set", "fedavg_lr=1"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "takes no --lr, --set fedavg_lr; leave that out" in error
    assert main(["methods", "auto"]) == 0
    assert "fedavg-ft" in capsys.readouterr().out
