"""Run a reproduction: passes one after the other, each kept as soon as it is finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sartor import processes
from sartor.errors import MissingDataError, RunFolderError
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.passes import passes_of, run_pass
from sartor.reproduce.plan import Plan, load
from sartor.reproduce.problems import make_problem
from sartor.runs import environment
from sartor.runs.storage import naming, read_json, write_json, write_text
from sartor.settings import Progress, parse_device

FOLDER = "passes"
"""Where finished passes lie in the folder of a reproduction."""

ABOUT = "reproduction.json"
"""What is reproduced in a folder."""


def run(
    name: str | Plan,
    *,
    quick: bool = False,
    repeats: int | None = None,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    told: Callable[[str], None] | None = None,
) -> Outcome:
    """Run a reproduction, or go on with one.

    Args:
        name: see ``sartor.reproduce.names()``; or a plan of your own.
        quick: the short form, which takes minutes on two cores.
        repeats: seeds, in place of the plan's.
        device: "auto", "cpu", "cuda".
        out: a folder that keeps finished passes; those that it has are not run again.
        part: (k, n) runs every n-th pass from the k-th on only; several processes may share a
            folder, and a last call with part (0, 1) puts everything together.
        progress: shows how far a pass is.
        told: is given a line when a pass begins and when a column is left out.

    Returns:
        Tables, differences and verdicts.

    Raises:
        MissingDataError: no column has its data here.
    """
    plan = name if isinstance(name, Plan) else load(name, quick=quick, repeats=repeats)
    target = parse_device(device)  # a wrong name is told before there is a folder
    where = None if out is None else Path(out) / FOLDER
    say = told or (lambda line: None)
    if out is not None:
        processes.first(lambda: _describe(Path(out), plan, repeats))
    skipped = _without_data(plan, say)
    if out is not None and skipped:  # so that a report made later leaves out the same columns
        write_json(Path(out) / ABOUT, {**read_json(Path(out) / ABOUT), "skipped": skipped})
    todo = [one for one in passes_of(plan) if one.lanes[0].column not in skipped]
    outcome = Outcome(plan, skipped=skipped)
    mine = todo[part[0] :: part[1]]
    for number, one in enumerate(mine, 1):
        kept = None if where is None else where / f"{one.key}.json"
        if kept is not None and processes.first(kept.is_file):
            say(f"[{number}/{len(mine)}] {one.words}: finished earlier")
            stored = read_json(kept)
        else:
            say(f"[{number}/{len(mine)}] {one.words}")
            began = time.perf_counter()
            records = run_pass(one, target, progress)
            lanes = [
                {**lane.place, "record": record}
                for lane, record in zip(one.lanes, records, strict=True)
            ]
            stored = {"words": one.words, "seconds": time.perf_counter() - began, "lanes": lanes}
            if kept is not None and processes.is_first():
                _keep(kept, stored)
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


def _take(outcome: Outcome, stored: dict[str, Any]) -> None:
    outcome.seconds += stored["seconds"]
    for lane in stored["lanes"]:
        for row in lane["rows"]:
            outcome.add(row, lane["column"], lane["seed"], lane["record"])


def _describe(folder: Path, plan: Plan, repeats: int | None) -> None:
    """Write down what the folder reproduces.

    Raises:
        RunFolderError: it holds something else.
    """
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
    with naming(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "environment.json", environment())
    write_json(path, about)


def _keep(path: Path, stored: dict[str, Any]) -> None:
    with naming(path.parent, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(stored, ensure_ascii=False))


def _without_data(plan: Plan, say: Callable[[str], None]) -> dict[str, str]:
    """Find the columns whose data are not on this machine.

    Raises:
        MissingDataError: there is no other column.
    """
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
