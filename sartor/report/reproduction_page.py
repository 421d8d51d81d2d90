"""The page of a reproduction: verdicts, published beside ours, figures, what differs, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sartor.report.charts import Line, line_figure
from sartor.report.drawing import Figure
from sartor.report.evidence import Check, Measured, published_table, tally
from sartor.report.sections import Section, render_sections
from sartor.report.words import Words
from sartor.reproduce.outcome import Outcome, scale_of, standard_error
from sartor.reproduce.records import series


def render_reproduction(outcome: Outcome, environment: Mapping[str, Any] | None = None) -> str:
    """Return the page as text: one file, no network, no scripts."""
    plan = outcome.plan
    checks = [Check(v.claim, v.holds, v.found) for v in outcome.verdicts()]
    seeds = {len(cell) for cell in outcome.records.values()} or {0}
    repeats = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"{max(seeds)}"
    form = "short form" if plan.quick else "full form"
    words = Words(
        headline=f"{plan.item}, {form}: {tally(checks)}.",
        findings=[" ".join(plan.about.split()), *_agreement(outcome)],
        caveats=_caveats(outcome),
        tiles=[
            ("claims that hold", f"{sum(c.passed is True for c in checks)} of {len(checks)}", ""),
            ("allocations or repeats", repeats, "a cell"),
            ("training", _duration(outcome.seconds), "all passes"),
        ],
    )
    tables: list[Any] = []
    for number, spec in enumerate(plan.tables):
        tables.append(outcome.table(number))
        if rows := _measured(outcome, number):
            kind = "percent" if spec.get("scale", "percent") == "percent" else ""
            tables.append(published_table(rows, what="row, column", kind=kind, source=plan.paper))
    sections = [
        Section("Claims", [checks], "The shape that the paper shows, checked on our means."),
        Section("Figures", figures_of(outcome)),
        Section("Tables", tables, "Ours is the mean over allocations ± its standard error."),
        Section(
            "Differences",
            outcome.paired(),
            "Row minus reference on the same allocations, with 95 % intervals of the mean.",
        ),
        Section("What differs from the paper", list(plan.differs)),
        Section("Settings", [_settings(outcome)], folded=True),
    ]
    return render_sections(
        plan.title,
        [section for section in sections if any(section.parts)],
        words=words,
        facts=[plan.paper, plan.item, form],
        environment=environment,
    )


def figures_of(outcome: Outcome) -> list[Figure]:
    """Draw every figure of the plan that has numbers."""
    found = []
    for number, spec in enumerate(_one_by_one(outcome)):
        figure = _DRAW[spec["kind"]](outcome, f"figure-{number}", spec)
        if figure is not None:
            found.append(figure)
    return found


def _one_by_one(outcome: Outcome) -> list[dict[str, Any]]:
    """Give every column that a figure over rounds names a figure of its own."""
    found: list[dict[str, Any]] = []
    run = [column.name for column in outcome.plan.columns]
    for spec in outcome.plan.figures:
        named = spec.get("columns")
        if spec["kind"] != "rounds" or named is None:
            found.append(dict(spec))
            continue
        found += [
            {**spec, "column": name, "title": f"{spec['title']}, {name}"}
            for name in (run if named == "all" else named)
            if name in run
        ]
    return found


def _rows(outcome: Outcome, spec: Mapping[str, Any]) -> list[str]:
    return list(spec.get("rows", [row.name for row in outcome.plan.rows]))


def _by_column(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """A measure against the columns' x, one line per row."""
    table = next((t for t in outcome.plan.tables if t["measure"] == spec["measure"]), {})
    factor = scale_of(table)[0] if table else float(spec.get("factor", 1.0))
    values = outcome.values(spec["measure"])
    columns = [c for c in outcome.plan.columns if c.x is not None]
    lines = []
    for name in _rows(outcome, spec):
        cells = [values.get(name, {}).get(column.name) for column in columns]
        if all(cell is None for cell in cells):
            continue
        known = [table.get("published", {}).get(name, {}).get(c.name) for c in columns]
        errors = [math.nan if c is None else factor * standard_error(c) for c in cells]
        lines.append(
            Line(
                name,
                [float(c.x or 0.0) for c in columns],
                [math.nan if c is None else factor * float(np.nanmean(c)) for c in cells],
                None if all(map(math.isnan, errors)) else errors,
                None if not any(k is not None for k in known) else [_nan(k) for k in known],
            )
        )
    return _line_figure(key, spec, lines)


def _by_round(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """A curve over the rounds in one column, one line per row, mean over seeds."""
    column = spec.get("column", outcome.plan.columns[0].name)
    factor = 100.0 if spec["curve"].startswith("accuracy") else 1.0
    lines = []
    for name in _rows(outcome, spec):
        cell = outcome.records.get((name, column))
        if not cell:
            continue
        curves = [series(r, spec["curve"], outcome.plan.row(name).point) for r in cell.values()]
        shared = min(len(rounds) for rounds, _ in curves)
        if not shared:
            continue
        numbers = factor * np.asarray([values[:shared] for _, values in curves])
        error = numbers.std(0, ddof=1) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        lines.append(
            Line(
                name,
                curves[0][0][:shared],
                numbers.mean(0).tolist(),
                None if error is None else error.tolist(),
                band=True,
            )
        )
    return _line_figure(key, {"x_label": "rounds", "y_label": _label(spec["curve"]), **spec}, lines)


def _scatter(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """One measure against another, a point per row: costs against accuracy."""
    across, up = (outcome.values(spec[name]) for name in ("x_measure", "measure"))
    column = spec.get("column", outcome.plan.columns[0].name)
    lines = []
    for name in _rows(outcome, spec):
        x, y = across.get(name, {}).get(column), up.get(name, {}).get(column)
        if x is not None and y is not None:
            error = 100 * standard_error(y)
            lines.append(
                Line(
                    name,
                    [float(np.nanmean(x))],
                    [100 * float(np.nanmean(y))],
                    None if math.isnan(error) else [error],
                )
            )
    return _line_figure(key, spec, lines)


def _line_figure(key: str, spec: Mapping[str, Any], lines: Sequence[Line]) -> Figure | None:
    if not lines:
        return None
    return line_figure(
        key,
        spec["title"],
        lines,
        x_label=spec.get("x_label", ""),
        y_label=spec.get("y_label", ""),
        caption=spec.get("caption", ""),
        x_scale=spec.get("x_scale", "linear"),
        y_scale=spec.get("y_scale", "linear"),
    )


_DRAW = {"columns": _by_column, "rounds": _by_round, "scatter": _scatter}


def _label(curve: str) -> str:
    return "accuracy, %" if curve.startswith("accuracy") else curve.split()[-1].replace("_", " ")


def _measured(outcome: Outcome, number: int) -> list[Measured]:
    percent = outcome.plan.tables[number].get("scale", "percent") == "percent"
    factor = 0.01 if percent else 1.0
    one = len(outcome.plan.columns) == 1
    return [
        Measured(
            entry["row"] if one else f"{entry['row']}, {entry['column']}",
            factor * entry["published"],
            factor * entry["ours"],
            factor * entry["error"],
        )
        for entry in outcome.against_published(number)
    ]


def _agreement(outcome: Outcome) -> list[str]:
    judged = [
        entry["within"]
        for number in range(len(outcome.plan.tables))
        for entry in outcome.against_published(number)
        if entry["within"] is not None
    ]
    if not judged:
        return []
    return [
        f"{sum(judged)} of {len(judged)} numbers that stand in the paper lie within two standard "
        "errors of ours."
    ]


def _caveats(outcome: Outcome) -> list[str]:
    found = [f"{name} was not run: {reason}" for name, reason in outcome.skipped.items()]
    if outcome.plan.quick:
        found.append(
            "This is the short form: fewer rounds, samples and repeats than in the paper, so "
            "numbers are not comparable with the published ones; the shape may be."
        )
    return found


def _settings(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    shown = {k: v for k, v in plan.settings.items() if v is not None}
    for row in plan.rows:
        shown[f"row {row.name}"] = {"method": row.method, **row.set, **row.settings}
    for column in plan.columns:
        shown[f"column {column.name}"] = column.settings or "as above"
    return shown


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
