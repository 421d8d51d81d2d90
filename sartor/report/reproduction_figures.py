"""Draw the figures of a reproduction as its plan specifies.

| kind | draws | needs |
|---|---|---|
| columns | a measure against the columns' x, one line per row | measure; columns to take some |
| rows | a measure against numbers given to the rows, one line per column | measure, rows, x |
| measures | several measures against x, one line per row | measure with {x}, x, column |
| rounds | a curve over the rounds, one line per row | curve, column; smooth = points of a window |
| scatter | one measure against another, a point per row | x_measure, measure, column |
| labels | which classes each client has, as a heat map | column |

Figures of one column also take ``columns = [...]`` or "all", and are then drawn for each column.
Lines are means over seeds with their standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sartor.analysis import savitzky_golay
from sartor.report.charts import Line, line_figure
from sartor.report.drawing import Figure
from sartor.report.heat import class_shares
from sartor.reproduce.outcome import Outcome, scale_of, standard_error
from sartor.reproduce.records import series

OF_ONE_COLUMN = ("rounds", "measures", "scatter", "labels")
FEW = 8
"""The most places on a logarithmic axis that all get a tick label."""

DEGREE = 3
"""Degree of the polynomial that smooths a curve."""


def figures_of(outcome: Outcome) -> list[Figure]:
    """Draw every figure of the plan for which there are numbers."""
    found = (
        DRAW[spec["kind"]](outcome, f"figure-{number}", spec)
        for number, spec in enumerate(_one_by_one(outcome))
    )
    return [figure for figure in found if figure is not None]


def _one_by_one(outcome: Outcome) -> list[dict[str, Any]]:
    """Split a figure of one column that names several columns into a figure for each."""
    found: list[dict[str, Any]] = []
    run = [column.name for column in outcome.plan.columns]
    for spec in outcome.plan.figures:
        named = spec.get("columns")
        if spec["kind"] not in OF_ONE_COLUMN or named is None:
            found.append(dict(spec))
            continue
        kept = run if named == "all" else [name for name in named if name in run]
        title = spec["title"]
        found += [{**spec, "column": name, "title": f"{title}, {name}"} for name in kept]
    return found


def _rows(outcome: Outcome, spec: Mapping[str, Any]) -> list[str]:
    return list(spec.get("rows", [row.name for row in outcome.plan.rows]))


def _column(outcome: Outcome, spec: Mapping[str, Any]) -> str:
    return str(spec.get("column", outcome.plan.columns[0].name))


def _line(
    name: str,
    x: Sequence[float],
    cells: Sequence[np.ndarray | None],
    factor: float,
    known: Sequence[float | None],
) -> Line | None:
    """Make a line from cells with one value per seed; None if all cells are missing."""
    if all(cell is None for cell in cells):
        return None
    means = [math.nan if c is None else factor * float(np.nanmean(c)) for c in cells]
    errors = [math.nan if c is None else factor * standard_error(c) for c in cells]
    published = [math.nan if k is None else k for k in known]
    return Line(
        name,
        x,
        means,
        None if all(map(math.isnan, errors)) else errors,
        published if any(k is not None for k in known) else None,
    )


def _by_column(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw a measure against the columns' x, one line per row."""
    named = spec.get("columns")
    places = {
        c.name: float(c.x)
        for c in outcome.plan.columns
        if c.x is not None and (named is None or c.name in named)
    }
    rows = _rows(outcome, spec)
    return _against(outcome, key, spec, {row: [(row, c) for c in places] for row in rows}, places)


def _by_row(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw a measure against a number of every row, one line per column."""
    kept = {row.name for row in outcome.plan.rows}
    pairs = zip(spec["rows"], spec["x"], strict=True)
    places = {row: float(x) for row, x in pairs if row in kept}
    columns = spec.get("columns", [column.name for column in outcome.plan.columns])
    return _against(outcome, key, spec, {c: [(row, c) for row in places] for c in columns}, places)


def _against(
    outcome: Outcome,
    key: str,
    spec: Mapping[str, Any],
    curves: Mapping[str, list[tuple[str, str]]],
    places: Mapping[str, float],
) -> Figure | None:
    """Draw the cells (row, column) of every curve at their places, with published values."""
    table = next((t for t in outcome.plan.tables if t["measure"] == spec["measure"]), {})
    factor = scale_of(table)[0] if table else float(spec.get("factor", 1.0))
    values, published = outcome.values(spec["measure"]), table.get("published", {})
    lines = []
    for name, cells in curves.items():
        ours = [values.get(row, {}).get(column) for row, column in cells]
        known = [published.get(row, {}).get(column) for row, column in cells]
        lines.append(_line(name, list(places.values()), ours, factor, known))
    return _line_figure(key, {"beside": table.get("beside", "published"), **spec}, lines)


def _by_measure(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw the measures that ``measure`` names for every x, in one column, one line per row."""
    column, factor = _column(outcome, spec), float(spec.get("factor", 1.0))
    tables = [outcome.values(spec["measure"].format(x=x)) for x in spec["x"]]
    lines = []
    for name in _rows(outcome, spec):
        cells = [values.get(name, {}).get(column) for values in tables]
        there = [None if c is None or np.isnan(c).all() else c for c in cells]
        lines.append(_line(name, [float(x) for x in spec["x"]], there, factor, []))
    return _line_figure(key, spec, lines)


def _by_round(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw a curve over the rounds in one column, one line per row, mean over seeds."""
    column = _column(outcome, spec)
    factor = 100.0 if spec["curve"].startswith("accuracy") else 1.0
    lines: list[Line | None] = []
    for name in _rows(outcome, spec):
        cell = outcome.records.get((name, column))
        if not cell:
            continue
        curves = [series(r, spec["curve"], outcome.plan.row(name).point) for r in cell.values()]
        shared = min(len(rounds) for rounds, _ in curves)
        if not shared:
            continue
        numbers = smoothed(
            factor * np.asarray([values[:shared] for _, values in curves]), spec.get("smooth", 0)
        )
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


def smoothed(curves: np.ndarray, window: int) -> np.ndarray:
    """Return curves (seeds, rounds) smoothed over a window of rounds.

    The window is made odd and at most as long as the curves; with three rounds or fewer the curves
    are returned as they are.
    """
    window = min(window, curves.shape[-1])
    window -= 1 - window % 2
    return curves if window <= DEGREE else savitzky_golay(curves, window, DEGREE)


def _scatter(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw one measure against another, a point per row, such as costs against accuracy."""
    across, up = (outcome.values(spec[name]) for name in ("x_measure", "measure"))
    column = _column(outcome, spec)
    lines = []
    for name in _rows(outcome, spec):
        x, y = across.get(name, {}).get(column), up.get(name, {}).get(column)
        if x is not None and y is not None:
            lines.append(_line(name, [float(np.nanmean(x))], [y], 100.0, []))
    return _line_figure(key, spec, lines)


def _labels(outcome: Outcome, key: str, spec: Mapping[str, Any]) -> Figure | None:
    """Draw the shares of the classes of every client, in the first run of a column."""
    found = outcome.label_counts(_column(outcome, spec))
    if found is None:
        return None
    reported = f"{spec.get('caption', '')} Share of each class among the samples of a client."
    return class_shares(key, spec["title"], reported.lstrip(), *found)


def _line_figure(key: str, spec: Mapping[str, Any], lines: Sequence[Line | None]) -> Figure | None:
    there = [line for line in lines if line is not None]
    if not there:
        return None
    places = sorted({float(x) for line in there for x in line.x})
    few = spec.get("x_scale") == "log" and len(places) <= FEW and places[0] > 0
    return line_figure(
        key,
        spec["title"],
        there,
        x_ticks=places if few and spec["kind"] in ("columns", "rows") else None,
        x_label=spec.get("x_label", ""),
        y_label=spec.get("y_label", ""),
        caption=spec.get("caption", ""),
        x_scale=spec.get("x_scale", "linear"),
        y_scale=spec.get("y_scale", "linear"),
        hollow_name=spec.get("beside", "published"),
    )


DRAW = {
    "columns": _by_column,
    "rows": _by_row,
    "measures": _by_measure,
    "rounds": _by_round,
    "scatter": _scatter,
    "labels": _labels,
}


def _label(curve: str) -> str:
    return "accuracy, %" if curve.startswith("accuracy") else curve.split()[-1].replace("_", " ")
