"""The table of cells that ``bench.auto`` makes of several files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import auto


def file(first: int, **rows: dict[str, float]) -> dict[str, Any]:
    settings = dict.fromkeys(auto.CELL, "None") | {"data": "digits", "clients": "5"}
    made: dict[str, Any] = {
        name: {"by_rate": {rate: [v] for rate, v in row.items()}, "seconds": 2.0}
        for name, row in rows.items()
    }
    own = {"accuracy": [0.9], "alone": [0.8], "hurt": [1], "better": [2], "seconds": 4.0}
    return {"settings": settings | {"first": str(first)}, "rows": {"auto": own, **made}}


def test_the_best_rate_is_chosen_by_all_allocations_of_a_cell() -> None:
    nan = float("nan")
    one = file(0, local={"0.1": 0.80, "0.3": 0.90}, dbe={"0.1": nan, "0.3": 0.85})
    two = file(1, local={"0.1": 0.82, "0.3": 0.60}, dbe={"0.1": 0.99, "0.3": 0.83})
    (row,) = auto.cells([two, one]).rows
    found = dict(zip(auto.cells([one, two]).columns, row, strict=True))
    assert found["cell"] == "digits, 5 clients"
    assert found["best candidate"] == "dbe at 0.3"
    assert found["its accuracy"] == pytest.approx(0.84)
    assert found["auto gains (points)"] == "+6.00"
    assert (found["hurt"], found["better"], found["over alone"]) == (2, 4, "+10.00")


def test_a_candidate_that_is_not_done_on_all_allocations_is_not_compared() -> None:
    table = auto.cells([file(0, local={"0.1": 0.7}, dbe={"0.1": 0.9}), file(1, local={"0.1": 0.7})])
    assert table.column("best candidate") == ["local at 0.1"]


def test_rows_of_a_file_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [
        "--data",
        "digits",
        "--model",
        "mclr",
        "--clients",
        "3",
        "--rounds",
        "1",
        "--seeds",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["auto", *kept, "--json", str(tmp_path / "a.json")])
    monkeypatch.setattr(auto, "candidates", lambda task: ["local"])
    auto.main()
    assert "local: " in capsys.readouterr().out
    first = (tmp_path / "a.json").read_text()
    auto.main()
    assert "local: " not in capsys.readouterr().out
    assert (tmp_path / "a.json").read_text() == first
