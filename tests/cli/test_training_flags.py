"""Flags of schedules, early stopping and trackers, and the command that searches."""

from __future__ import annotations

import json
import sys

import pytest

from sartor.cli import main
from tests.training.test_search import Dice

SMALL = ["--data", "digits", "--clients", "4", "--val", "0.2", "--model", "mclr", "--rounds", "6"]


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here."""
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_run_stops_early_and_can_be_resumed(tmp_path, capsys) -> None:
    """``--min-delta 9`` lets nothing after the first evaluation count as better."""
    out = str(tmp_path / "run")
    flags = ["--patience", "2", "--min-delta", "9", "--restore-best", "--lr-schedule", "cosine"]
    assert main(["run", "fedavg", *SMALL, *flags, "--out", out, "--json"]) == 0
    row = last_line(capsys)
    assert row["stopped"] == {
        "round": 3,
        "best_round": 1,
        "why": "validation loss has not improved for 2 evaluations",
    }
    assert row["rounds"] == 3
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["local"]["lr_schedule"] == "cosine:6"
    assert config["early_stopping"]["restore"] is True
    assert main(["resume", out, "--json"]) == 0
    assert last_line(capsys)["stopped"] == row["stopped"]
    assert main(["run", "fedavg", *SMALL, *flags, "--out", out, "--overwrite"]) == 0
    assert "fedavg stopped early: 1 of 1 runs, first after round 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--restore-best"], "--restore-best needs --patience"),
        (["--lr-schedule", "cosin"], "cannot read the schedule 'cosin'"),
        (["--track", "tensorbord:x"], "did you mean 'tensorboard'?"),
    ],
)
def test_faults_are_reported_and_leave_no_folder(flags, words, tmp_path, capsys) -> None:
    """What cannot be right ends the command before a round."""
    out = tmp_path / "run"
    assert main(["run", "fedavg", *SMALL, *flags, "--out", str(out)]) != 0
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_search_prints_the_trials_and_the_best_values(tmp_path, capsys, monkeypatch) -> None:
    """By a study that draws at random; trials.csv keeps every digit."""
    monkeypatch.setattr(
        sys.modules["sartor.training.search"], "_new_study", lambda measure, seed: Dice()
    )
    words = ["search", "fedprox", *SMALL, "--space", "prox_strength=0.01:10:log"]
    words += ["--space", "weights=uniform,samples", "--trials", "3", "--lanes", "2"]
    assert main([*words, "--rounds", "1", "--out", str(tmp_path), "--json"]) == 0
    answer = last_line(capsys)
    rows = (tmp_path / "trials.csv").read_text().splitlines()
    assert rows[0] == "trial,prox_strength,weights,validation loss"
    values = {float(row.split(",")[3]): float(row.split(",")[1]) for row in rows[1:]}
    assert len(values) == 3
    assert answer["best"]["prox_strength"] == values[min(values)]
    assert answer["validation_loss"] == min(values)
    assert main(["search", "fedprox", *SMALL, "--space", "prox_strengh=1:2"]) != 0
    assert "did you mean 'prox_strength'?" in capsys.readouterr().err
