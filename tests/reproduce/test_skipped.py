"""A column without data is left out of the verdicts, now and when the folder is read again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sartor.core.errors import ConfigError
from sartor.reproduce import runner
from sartor.reproduce.passes import passes_of
from sartor.reproduce.plan import Plan, read

CONTENT: dict[str, Any] = {
    "title": "Tiny",
    "paper": "Nobody",
    "item": "Figure 0",
    "settings": {"data": "digits", "clients": 3, "rounds": 1, "partition": "iid"},
    "rows": [{"name": "alone", "method": "local"}],
    "columns": [{"name": "here"}, {"name": "absent", "data": "femnist"}],
    "tables": [{"title": "Accuracy", "measure": "last"}],
    "rules": [{"claim": "it learns", "check": "above", "row": "alone", "than": "alone"}],
}


def test_a_folder_remembers_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SARTOR_DATA", raising=False)
    plan: Plan = read("tiny", CONTENT)
    monkeypatch.setattr(runner, "load", lambda name, **form: plan)
    found = runner.run(plan, out=tmp_path / "run", device="cpu")
    again = runner.read(tmp_path / "run")
    assert list(found.skipped) == list(again.skipped) == ["absent"]
    assert [v.word for v in found.verdicts()] == [v.word for v in again.verdicts()] == ["PASS"]


def test_a_part_of_a_plan_is_run_and_the_rest_later(tmp_path: Path) -> None:
    """Rows and columns by name; what was run is not run again, and wrong names are reported."""
    content = {**CONTENT, "columns": [{"name": "here"}, {"name": "there", "rounds": 2}]}
    plan, place = read("tiny", content), {"out": tmp_path / "run", "device": "cpu"}
    assert not runner.run(plan, rows=(), **place).records
    names = [row.name for row in plan.rows]
    first = runner.run(plan, rows=names[:1], columns=["there"], **place)
    assert {column for _, column in first.records} == {"there"}
    assert names[0] in {row for row, _ in first.records}
    lines: list[str] = []
    runner.run(plan, reported=lines.append, **place)
    assert sum("finished earlier" in line for line in lines) == 1
    assert runner.finished(place["out"]) == len(lines)
    for kind in ("row", "column"):
        with pytest.raises(ConfigError, match=f"tiny has no {kind} 'no'"):
            runner.run(plan, **{f"{kind}s": ["no"]}, out=tmp_path / "wrong", device="cpu")
    assert not (tmp_path / "wrong").exists()


def test_who_shares_a_folder_leaves_what_others_have_begun(tmp_path: Path) -> None:
    """A pass is begun once; a last call without sharing ends what was left."""
    plan = read("tiny", {**CONTENT, "columns": [{"name": "here"}, {"name": "there", "rounds": 2}]})
    place = {"out": tmp_path / "run", "device": "cpu"}
    runner.run(plan, rows=(), **place)
    passes = tmp_path / "run" / "passes"
    passes.mkdir()
    begun = [passes / f"{one.key}.begun" for one in passes_of(plan)]
    begun[0].touch()
    runner.run(plan, shared=True, **place)
    assert runner.finished(place["out"]) == len(begun) - 1
    assert all(claim.exists() for claim in begun)
    runner.unclaim(place["out"])
    assert not any(claim.exists() for claim in begun)
    runner.run(plan, **place)
    assert runner.finished(place["out"]) == len(begun)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"probes": ["error"]}, "probes of a plan: there is no 'error'; did you mean 'errors'"),
        ({"solve": "exactly"}, "solve of a plan: there is no 'exactly'; did you mean 'exact'"),
        (
            {"solve": "exact", "data": "logistic-theory", "spread": 0.1, "partition": None},
            "give it end = 'local'",
        ),
    ],
)
def test_what_a_plan_names_wrongly_is_reported(settings: dict[str, Any], reported: str) -> None:
    content = {**CONTENT, "columns": [{"name": "here"}]}
    content["settings"] = {**CONTENT["settings"], **settings}
    with pytest.raises(ConfigError, match=re.escape(reported)):
        runner.run(read("tiny", content), device="cpu")


def test_a_wrong_device_leaves_no_folder(tmp_path: Path) -> None:
    """So that the same command with the right one need not resume anything."""
    with pytest.raises(ConfigError, match="Unknown device 'gpu'"):
        runner.run(read("tiny", CONTENT), out=tmp_path / "run", device="gpu")
    assert not (tmp_path / "run").exists()
