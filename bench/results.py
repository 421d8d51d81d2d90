"""Save measurements with the commit, the date and the machine, and read their history.

A record is a JSON object: ``kind`` ("rounds", "methods", "scaling" or "device"), ``commit``,
``date``, ``environment``, and the numbers of that command. The files of a folder make a history.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import load
from bench.floors import Work
from bench.rates import Rates, device_name
from bench.workloads import WORKLOADS
from sartor.core.errors import ConfigError
from sartor.results.tables import Table
from sartor.runs import environment

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"
NAMES = {
    "sartor": "Sartor",
    "reference": "Sartor, reference engine",
    "plain": "plain PyTorch loop",
    "fluke": "fluke-fl",
}
KINDS = {"rounds": "workloads", "methods": "rows", "scaling": "rows", "device": "rows"}
"""Kind of a record -> where its numbers are."""

STARTED = load.Meter()
"""Meter of the other processes' load since this process started."""


def git(*words: str) -> str:
    """Return the output of a git command; empty without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def stamp(device: str) -> Record:
    """Return the commit, the date and the machine of a measurement that ends now."""
    commit, _, committed = git("log", "-1", "--format=%h %cI").partition(" ")
    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {
        "commit": {"id": commit or "unknown", "date": committed, "changed": changed},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": {"device": device_name(device), **environment()},
    }


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for the numbers and the page."""
    parser.add_argument(
        "--json",
        type=Path,
        help="file for all numbers, or a folder, in which they get their own name",
    )
    parser.add_argument("--html", type=Path, help="file for the page (needs matplotlib)")


def write_outputs(args: argparse.Namespace, kind: str, **content: Any) -> Record:
    """Write the requested files, print their paths, and return the record."""
    about = {**stamp(content.get("device", "cpu")), "others": STARTED.others()}
    record = {"kind": kind, **about, **content}
    if args.json is not None:
        print(f"numbers: {write(record, args.json)}")
    if args.html is not None:
        from bench.page import write_page

        print(f"page: {write_page([record], args.html)}")
    return record


def write(record: Record, path: Path) -> Path:
    """Write a record to a file, or into a folder under its date, kind and commit."""
    if path.is_dir() or not path.suffix:
        moment = record["date"][:19].replace(":", "")
        path = path / f"{moment}-{record['kind']}-{record['commit']['id']}.json"
    make_folder(path.parent)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def make_folder(folder: Path) -> None:
    """Create a folder; keep the cache of the benchmarks out of the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve().is_relative_to(CACHE):
        (CACHE / ".gitignore").write_text("*\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """Return the records of files and folders, by date of the commit and then of the run.

    Raises:
        ConfigError: a path is missing, or is not a record.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise ConfigError(
                f"No results in {path}; expected files of python -m bench --json, or a folder of "
                "them. Measure first: python -m bench --json FOLDER."
            )
        files += found
    return sorted((_read(file) for file in files), key=_moment)


def _read(file: Path) -> Record:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); leave it out.") from None
    if isinstance(record, dict):
        record.setdefault("kind", "rounds")  # older files have no kind
        if KINDS.get(record["kind"], "") in record:
            unknown = {"id": "unknown", "date": "", "changed": False}
            return {"commit": unknown, "date": "", "environment": {}, "device": "cpu", **record}
    raise ConfigError(
        f"{file} is not the result of a benchmark; expected an object with one of the kinds "
        f"{', '.join(KINDS)}, as --json writes it. Leave it out, or measure again."
    )


def _moment(record: Record) -> tuple[float, float]:
    return _seconds(record["commit"]["date"]), _seconds(record["date"])


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp() if text else -math.inf


def commit_name(record: Record) -> str:
    """Return the commit of a record, with a plus if the files differed from it."""
    return str(record["commit"]["id"]) + "+" * bool(record["commit"]["changed"])


def label(found: Mapping[str, Any], device: str) -> str:
    """Return the name of a workload, with the settings that differ from its usual ones.

    >>> from dataclasses import asdict
    >>> label({"workload": {**asdict(WORKLOADS["dnn"]), "samples": 6000}}, "cuda")
    'dnn, samples 6,000, GPU'
    """
    mine, usual = found["workload"], WORKLOADS.get(found["workload"]["name"])
    parts = [mine["name"]]
    changed = {k: v for k, v in mine.items() if usual and v != getattr(usual, k)}
    parts += [f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in changed.items()]
    return ", ".join(parts + ["GPU"] * (device == "cuda"))


def ratio(found: Mapping[str, Any], name: str) -> float | None:
    """Return how many times as fast as the plain loop a contender is; None if either is missing."""
    rows = found["contenders"]
    return (
        rows["plain"]["seconds"] / rows[name]["seconds"] if {"plain", name} <= set(rows) else None
    )


def share(found: Mapping[str, Any], seconds: float, record: Record) -> float | None:
    """Return the floor of a round divided by its seconds; None without work or rates."""
    if "work" not in found or not record.get("rates"):
        return None
    return Work(**found["work"]).share(seconds, Rates(**record["rates"]))


def busy(found: Mapping[str, Any]) -> float:
    """Return the most processors that other processes kept busy during a workload."""
    return max((row["others"] for row in found["contenders"].values()), default=0.0)


def history(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return one row per workload and record, workload by workload, in the order of the records.

    A ratio depends on the machine, so every row names it.
    """
    rows: list[dict[str, Any]] = []
    for record in records:
        threads = record.get("settings", {}).get("threads")
        on_cpu = (
            [f"{threads} thread{'s' * (threads > 1)}"]
            if threads and record["device"] == "cpu"
            else []
        )
        machine = record["environment"].get("device") or "unknown"
        common = {
            "commit": commit_name(record),
            "run": record["date"][:10],
            "machine": ", ".join([machine, *on_cpu]),
        }
        for found in record["workloads"] if record["kind"] == "rounds" else []:
            mine = found["contenders"].get("sartor")
            if mine is not None:
                rows.append(
                    {
                        "workload": label(found, record["device"]),
                        **common,
                        "s a round": float(f"{mine['seconds']:.3g}"),
                        "× plain loop": ratio(found, "sartor"),
                        "share of floor": share(found, mine["seconds"], record),
                        "note": "busy" if busy(found) > load.QUIET else "",
                    }
                )
        for row in record["rows"] if record["kind"] == "device" else []:
            if "seconds a round" in row:
                what = " ".join(filter(None, [row["what"], row.get("network in")]))
                rows.append(
                    {
                        "workload": f"device: {what}",
                        **common,
                        "s a round": float(f"{row['seconds a round']:.3g}"),
                        "× plain loop": None,
                        "share of floor": row.get("share of the floor"),
                        "note": "busy" if record.get("others", 0.0) > load.QUIET else "",
                    }
                )
    order = list(dict.fromkeys(row["workload"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["workload"]))


def history_table(rows: list[dict[str, Any]]) -> Table:
    """Return the history as a table.

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError(
            "These results contain no round of Sartor, so there is no history; give files "
            "of python -m bench --json or python -m bench.device --json."
        )
    formats = {"share of floor": "percent", "× plain loop": "seconds"}
    return Table(list(rows[0]), [list(row.values()) for row in rows], formats=formats)
