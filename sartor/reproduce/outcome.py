"""What a reproduction gave: tables with published numbers beside ours, differences, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sartor.reproduce.plan import Plan
from sartor.reproduce.records import Record, measure
from sartor.reproduce.rules import Verdict, View, judge
from sartor.results import metrics
from sartor.results.tables import MISSING, Table, jsonable
from sartor.runs.storage import write_text

SCALES = {"percent": (100.0, 1, "%"), "number": (1.0, 4, ""), "kib": (1.0, 1, "KiB")}
SCALES |= {"seconds": (1.0, 4, "s"), "count": (1.0, 1, "")}
"""How a table shows its numbers: factor, decimals (significant ones for "number"), unit."""


@dataclass
class Outcome:
    """The records of a reproduction, and everything that is read off them.

    Attributes:
        plan: what was run.
        records: (row, column) -> seed -> record.
        skipped: columns that could not be run, with the reason.
        seconds: wall time of all passes.
    """

    plan: Plan
    records: dict[tuple[str, str], dict[int, Record]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, row: str, column: str, seed: int, record: Record) -> None:
        """Take in the record of one run."""
        self.records.setdefault((row, column), {})[seed] = record

    def values(self, words: str) -> dict[str, dict[str, np.ndarray]]:
        """Return a measure of every cell: row -> column -> one value per seed."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for row in self.plan.rows:
            for column in self.plan.columns:
                cell = self.records.get((row.name, column.name))
                if cell:
                    numbers = [measure(cell[seed], words, row.point) for seed in sorted(cell)]
                    found.setdefault(row.name, {})[column.name] = np.asarray(numbers)
        return found

    def verdicts(self) -> list[Verdict]:
        """Judge every rule of the plan."""
        return [judge(rule, self._view(rule)) for rule in self.plan.rules]

    def _view(self, rule: Mapping[str, Any]) -> View:
        table = self.plan.tables[rule.get("table", 0)]
        words = rule.get("measure", table["measure"])
        return View(
            self.values(words),
            tuple(row.name for row in self.plan.rows),
            tuple(rule.get("columns", self._columns())),
            {c.name: c.x for c in self.plan.columns},
            table["published"] if words == table["measure"] else {},
            self.values,
            frozenset(cell for cell in self.records if self._is_lost(*cell)),
        )

    def _columns(self) -> list[str]:
        """Return the names of the columns that could be run."""
        return [c.name for c in self.plan.columns if c.name not in self.skipped]

    def _is_lost(self, row: str, column: str) -> bool:
        """Say whether every run of a cell diverged."""
        runs = self.records.get((row, column), {}).values()
        return bool(runs) and all(record.get("diverged") for record in runs)

    def table(self, number: int = 0) -> Table:
        """Return a table: ours ± standard error over seeds, the published number in brackets."""
        spec = self.plan.tables[number]
        if "labels" in spec:
            return self._label_table(spec)
        values, columns, rows = self.values(spec["measure"]), self._columns(), []
        for name in spec.get("rows", [row.name for row in self.plan.rows]):
            cells = []
            for column in columns:
                known = spec["published"].get(name, {}).get(column)
                text = cell_text(values.get(name, {}).get(column), known, spec)
                if text == MISSING and self._is_lost(name, column):
                    text = "diverged" if known is None else f"diverged ({known:g})"
                cells.append(text)
            if any(cell != MISSING for cell in cells):
                rows.append([name, *cells])
        unit = scale_of(spec)[2]
        title = f"{spec['title']}{f', {unit}' if unit else ''}: ours ± s.e."
        beside = f" ({spec.get('beside', 'published')})" if spec["published"] else ""
        return Table(["", *columns], rows, title=title + beside)

    def _label_table(self, spec: Mapping[str, Any]) -> Table:
        found = self.label_counts(spec["labels"])
        if found is None:
            return Table(["client"], [], title=f"{spec['title']}: not run")
        names, counts = found
        pairs = zip(names, counts, strict=True)
        rows = [[name, *map(str, own), str(own.sum())] for name, own in pairs]
        classes = [str(c) for c in range(counts.shape[1])]
        return Table(["client", *classes, "all"], rows, title=f"{spec['title']}: samples by class")

    def label_counts(self, column: str) -> tuple[list[str], np.ndarray] | None:
        """Return names of the clients and (clients, classes) samples, of a column's first run."""
        for row in self.plan.rows:
            for record in self.records.get((row.name, column), {}).values():
                counts = record.get("labels")
                if counts is not None:
                    names = record.get("names") or [str(k) for k in range(len(counts))]
                    return names, np.asarray(counts)
        return None

    def against_published(self, number: int = 0) -> list[dict[str, Any]]:
        """Return published, ours, difference and whether they agree, one entry per number.

        They agree if the published number lies within two standard errors of our mean; that takes
        at least two seeds, and says nothing of the paper's own, unknown spread.
        """
        spec = self.plan.tables[number]
        values, factor = self.values(spec["measure"]), scale_of(spec)[0]
        found = []
        for row, cells in spec["published"].items():
            for column, known in cells.items():
                ours = values.get(row, {}).get(column)
                if known is None or ours is None or not np.isfinite(ours).any():
                    continue
                mean, error = factor * float(np.nanmean(ours)), factor * standard_error(ours)
                near = abs(mean - known) <= 2 * error if math.isfinite(error) else None
                entry = {"row": row, "column": column, "published": known, "ours": mean}
                found.append({**entry, "error": error, "difference": mean - known, "within": near})
        return found

    def paired(self, number: int = 0) -> list[Table]:
        """Return, for each reference row, every row minus it on the same allocations."""
        spec = self.plan.tables[number]
        values, (factor, _, _) = self.values(spec["measure"]), scale_of(spec)
        columns, found = self._columns(), []
        for reference in (name for name in self.plan.references if name in values):
            base = values[reference]
            rows = [
                [name, *(_interval(cells.get(c), base.get(c), factor) for c in columns)]
                for name, cells in values.items()
                if name != reference
            ]
            title = f"{spec['title']}: difference to {reference} on the same allocations [95 %]"
            found.append(Table(["", *columns], rows, title=title))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything that was read off the records, as JSON values."""
        tables = []
        for number, spec in enumerate(self.plan.tables):
            if "labels" in spec:
                counts = (self.label_counts(spec["labels"]) or (None, None))[1]
                tables.append({"title": spec["title"], "labels": counts})
                continue
            entry = {"title": spec["title"], "measure": spec["measure"]}
            published = self.against_published(number)
            tables.append({**entry, "values": self.values(spec["measure"]), "published": published})
        rules = [{"claim": v.claim, "verdict": v.word, "found": v.found} for v in self.verdicts()]
        about = {k: getattr(self.plan, k) for k in ("name", "title", "paper", "item", "quick")}
        measured = {"seconds": self.seconds, "skipped": self.skipped}
        return jsonable({**about, **measured, "tables": tables, "rules": rules})

    def write(self, path: Path) -> None:
        """Write :meth:`as_dict` to a file."""
        write_text(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False))


def scale_of(spec: Mapping[str, Any]) -> tuple[float, int, str]:
    """Return factor, decimals and unit of a table."""
    return SCALES[spec.get("scale", "percent")]


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean over seeds; NaN for one."""
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def shown(value: float, spec: Mapping[str, Any]) -> str:
    """Return a number as its table shows it; ``value`` is not yet scaled."""
    factor, digits, _ = scale_of(spec)
    if spec.get("scale") in ("number", "seconds"):
        return f"{factor * value:.{digits}g}"
    return f"{factor * value:.{digits}f}"


def cell_text(values: np.ndarray | None, known: float | None, spec: Mapping[str, Any]) -> str:
    """Return the text of a cell: ours ± s.e. (published)."""
    if values is None or not np.isfinite(values).any():
        return MISSING
    factor, digits, _ = scale_of(spec)
    error = standard_error(values)
    mean = float(np.nanmean(values))
    text = shown(mean, spec)
    free = spec.get("scale") in ("number", "seconds")
    # Runs of one pass share its time: what they differ by is rounding.
    if math.isfinite(error) and not (free and error <= 1e-9 * abs(mean)):
        text += f" ± {factor * error:.2g}" if free else f" ± {factor * error:.{digits}f}"
    lost = int((~np.isfinite(values)).sum())
    text += f" [{lost} diverged]" if lost else ""
    return text if known is None else f"{text} ({known:g})"


def _interval(mine: np.ndarray | None, base: np.ndarray | None, factor: float) -> str:
    if mine is None or base is None or len(mine) != len(base):
        return MISSING
    pair = metrics.paired(mine, base, 0.95)
    if not pair.number:
        return MISSING
    ends = f" [{factor * pair.low:+.2f}, {factor * pair.high:+.2f}]" if pair.number > 1 else ""
    return f"{factor * pair.mean:+.2f}{ends}"
