"""Run a reproduction: passes one after the other, each kept as soon as it is finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sartor.core.errors import ConfigError, MissingDataError, RunFolderError, did_you_mean
from sartor.engines.shard import processes
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.passes import Pass, passes_of, run_pass
from sartor.reproduce.plan import Plan, load
from sartor.reproduce.problems import make_problem
from sartor.runs import environment
from sartor.runs.storage import naming, read_json, write_json, write_text
from sartor.training.progress import Progress
from sartor.training.schema import parse_device

FOLDER = "passes"
"""Where finished passes are kept in the folder of a reproduction."""

ABOUT = "reproduction.json"
"""What is reproduced in a folder."""


def run(
    name: str | Plan,
    *,
    quick: bool = False,
    repeats: int | None = None,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    shared: bool = False,
    progress: Progress | None = None,
    reported: Callable[[str], None] | None = None,
) -> Outcome:
    """Run a reproduction, or resume one.

    Args:
        name: see ``sartor.reproduce.names()``; or a plan of your own.
        quick: the short form, which takes minutes on two cores.
        repeats: seeds, in place of the plan's.
        device: "auto", "cpu", "cuda".
        out: a folder that keeps finished passes; those that it has are not run again.
        rows: run these rows only; with ``out`` the others may follow later.
        columns: run these columns only.
        shared: leave out passes that another process has begun; several processes may share a
            folder, and a last call without it puts everything together.
        progress: shows how far a pass is.
        reported: is given a line when a pass begins and when a column is left out.

    Returns:
        Tables, differences and verdicts.

    Raises:
        MissingDataError: no column has its data here.
        ConfigError: the plan has no such row or column.
    """
    plan = name if isinstance(name, Plan) else load(name, quick=quick, repeats=repeats)
    target = parse_device(device)  # wrong names are reported before there is a folder
    where = None if out is None else Path(out) / FOLDER
    say = reported or (lambda line: None)
    wanted = chosen(plan, rows, columns)
    if out is not None:
        processes.first(lambda: _describe(Path(out), plan, repeats))
    skipped = _without_data(plan, say)
    if out is not None and skipped:  # so that a report made later leaves out the same columns
        write_json(Path(out) / ABOUT, {**read_json(Path(out) / ABOUT), "skipped": skipped})
    todo = [one for one in passes_of(plan) if one.lanes[0].column not in skipped]
    outcome = Outcome(plan, skipped=skipped)
    for number, one in enumerate(todo, 1):
        kept = None if where is None else where / f"{one.key}.json"
        if kept is not None and processes.first(kept.is_file):
            say(f"[{number}/{len(todo)}] {one.words}: finished earlier")
            stored = read_json(kept)
        elif not wanted(one) or (shared and kept is not None and not _claim(kept)):
            continue
        else:
            say(f"[{number}/{len(todo)}] {one.words}")
            began = time.perf_counter()
            lanes = run_pass(one, target, progress)
            stored = {"words": one.words, "seconds": time.perf_counter() - began, "lanes": lanes}
            if kept is not None and processes.is_first():
                _make(kept.parent)
                write_text(kept, json.dumps(stored, ensure_ascii=False))
        _take(outcome, stored)
    return outcome


def read(folder: str | Path) -> Outcome:
    """Return what the finished passes of a folder gave; nothing is trained."""
    about = read_json(Path(folder) / ABOUT)
    plan = load(about["name"], quick=about["quick"], repeats=about["repeats"])
    outcome = Outcome(plan, skipped=dict(about.get("skipped", {})))
    for one in passes_of(plan):
        kept = Path(folder) / FOLDER / f"{one.key}.json"
        if kept.is_file():
            _take(outcome, read_json(kept))
    return outcome


def finished(out: str | Path) -> int:
    """Return how many passes of a folder are finished."""
    return len(list((Path(out) / FOLDER).glob("*.json")))


def unclaim(out: str | Path) -> None:
    """Forget which passes were begun, before processes share a folder."""
    for claim in (Path(out) / FOLDER).glob("*.begun"):
        claim.unlink(missing_ok=True)


def _claim(kept: Path) -> bool:
    """Say that a pass is begun here; False if it was begun elsewhere."""
    _make(kept.parent)
    try:
        kept.with_suffix(".begun").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def chosen(
    plan: Plan, rows: Sequence[str] | None, columns: Sequence[str] | None
) -> Callable[[Pass], bool]:
    """Return whether a pass has something of some rows and columns.

    Raises:
        ConfigError: the plan has no such row or column.
    """
    known = {"row": [row.name for row in plan.rows], "column": [c.name for c in plan.columns]}
    for kind, names in (("row", rows), ("column", columns)):
        for name in names or ():
            if name not in known[kind]:
                hint = did_you_mean(name, known[kind])
                raise ConfigError(f"{plan.name} has no {kind} {name!r}{hint}")

    def wanted(one: Pass) -> bool:
        return any(
            (rows is None or not set(rows).isdisjoint(lane.all_rows))
            and (columns is None or lane.column in columns)
            for lane in one.lanes
        )

    return wanted


def _take(outcome: Outcome, stored: dict[str, Any]) -> None:
    outcome.seconds += stored["seconds"]
    for lane in stored["lanes"]:
        for row in lane["rows"]:
            outcome.add(row, lane["column"], lane["seed"], lane["record"])


def _describe(folder: Path, plan: Plan, repeats: int | None) -> None:
    """Write down what the folder reproduces; refuse one that holds something else."""
    path = folder / ABOUT
    about = {"name": plan.name, "quick": plan.quick, "repeats": repeats}
    if path.is_file():
        known = {key: read_json(path).get(key) for key in about}
        if known != about:
            raise RunFolderError(
                f"{folder} reproduces {known['name']} (quick: {known['quick']}, repeats: "
                f"{known['repeats']}), not this; use another folder."
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty and no reproduction; use another folder.")
    _make(folder)
    write_json(folder / "environment.json", environment())
    write_json(path, about)


def _make(folder: Path) -> None:
    with naming(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)


def _without_data(plan: Plan, say: Callable[[str], None]) -> dict[str, str]:
    """Find the columns whose data are not on this machine; refuse if there is no other column."""
    skipped: dict[str, str] = {}
    seen: dict[str, MissingDataError | None] = {}
    for column in plan.columns:
        settings = plan.settings_of(plan.rows[0], column)
        name = settings["data"]
        if name not in seen:
            try:
                make_problem(settings, settings["first_seed"])
                seen[name] = None
            except MissingDataError as error:
                seen[name] = error
        if (missing := seen[name]) is not None:
            skipped[column.name] = str(missing)
    if len(skipped) == len(plan.columns):
        raise next(error for error in seen.values() if error is not None)
    for column_name, reason in skipped.items():
        say(f"{column_name} is left out: {reason}")
    return skipped
