"""A small table: raw values inside, readable text, HTML, CSV and data frames outside."""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sartor.core.errors import MissingExtraError
from sartor.results.metrics import Spread

if TYPE_CHECKING:
    import pandas

MISSING = "–"
"""How a missing value is shown."""


def jsonable(value: Any) -> Any:
    """Return ``value`` with numpy and torch scalars and arrays plain, and NaN or infinity as None.

    >>> jsonable({"a": float("nan"), "b": (1, 2.5)})
    {'a': None, 'b': [1, 2.5]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return jsonable(value.tolist())
    return str(value)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | np.floating) and not math.isfinite(value))


UNITS = {"percent": " %", "points": " points", "change": " points"}
"""Kind of a column or a note -> its unit."""

FIGURES = {"error": 4, "gain": 3}
"""Significant figures of the largest value of a column; all of its kind have as many decimals."""


def _number(value: float, kind: str, decimals: int | None = None) -> str:
    if kind == "percent":
        return f"{100 * value:.1f}"
    if kind in ("points", "change", "end"):
        rounded = round(100 * value, 1)
        return f"{rounded:+.1f}" if rounded else "0.0"
    if kind in FIGURES:
        form = f".{FIGURES[kind]}g" if decimals is None else f",.{decimals}f"
        text = f"{value:{form}}"
        is_zero = not any(digit in text for digit in "123456789")
        if kind == "gain" and not is_zero:
            return f"{value:+{form}}"
        return text.lstrip("-") if is_zero else text
    if kind == "count":
        whole = abs(value) >= 100 or abs(value - round(value)) < 1e-9
        return f"{value:,.0f}" if whole else f"{value:,.1f}"
    if kind == "strength":
        return f"{value:.3g}" if math.isfinite(value) else "∞"
    if kind == "score gain":
        return f"{value:+.3f}" if round(value, 3) else "0.000"
    form = {"megabytes": ",.2f", "seconds": ".2f", "index": ".4f", "score": ".3f"}.get(kind, ".4g")
    return f"{value:{form}}"


def _decimals(values: Sequence[Any], kind: str) -> int:
    """Return the decimals with which the largest of errors or gains has its figures."""
    numbers = [v.mean if isinstance(v, Spread) else v for v in values]
    largest = max((abs(float(v)) for v in numbers if not _is_missing(v)), default=0.0)
    return max(0, FIGURES[kind] - 1 - math.floor(math.log10(largest))) if largest else 0


def format_cell(value: Any, kind: str = "", decimals: int | None = None) -> str:
    """Return the text of one cell.

    Args:
        value: a string, a number, a :class:`~sartor.results.metrics.Spread`, or None.
        kind: "percent" (of a share), "points" (signed, of a share; less is worse), "change"
            (signed, and less is not worse), "end" (of an interval of points), "error"
            (in the unit of the data), "gain" (of errors: signed, less is worse),
            "score" (such as an AUROC; three decimals) and "score gain",
            "count", "megabytes", "seconds", "index" (four decimals),
            "strength" (a λ, which may be infinite), or "" for the value as it is.
        decimals: of errors and gains; None for a few significant figures.

    >>> format_cell(0.9314, "percent"), format_cell(-0.02, "points"), format_cell(None)
    ('93.1', '-2.0', '–')
    """
    if isinstance(value, Spread):
        if _is_missing(value.mean):
            return MISSING
        text = _number(value.mean, kind, decimals)
        if _is_missing(value.std) or value.std == 0:  # one repeat, or a constant
            return text
        return f"{text} ± {_number(value.std, kind, decimals).lstrip('+')}"
    if kind == "strength" and isinstance(value, float) and math.isinf(value):
        return _number(value, kind)
    if _is_missing(value):
        return MISSING
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float | np.number):
        if not kind and float(value).is_integer():
            return str(int(value))
        return _number(float(value), kind, decimals)
    return str(value)


class Table:
    """Columns, rows of raw values, and notes below.

    ``str(table)`` is aligned text and a notebook shows HTML, both rounded for the eye;
    :meth:`to_csv` and :meth:`to_dataframe` keep every digit.

    Attributes:
        columns: names of the columns.
        rows: one list of values per row; a value may be a :class:`~sartor.results.metrics.Spread`.
        notes: what stands below, name -> value.
        formats: how a column or a note is shown, its name -> kind of :func:`format_cell`.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        notes: Mapping[str, Any] | None = None,
        formats: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        self.columns = list(columns)
        self.rows = [list(row) for row in rows]
        self.notes = dict(notes or {})
        self.formats = dict(formats or {})
        self.title = title
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {index} has {len(row)} values, expected {len(self.columns)} "
                    f"({', '.join(self.columns)})."
                )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        """Return the raw values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """Return one JSON-able dict per row; a spread becomes its mean and ``<column> std``."""
        names, rows = self._expanded()
        return [dict(zip(names, map(jsonable, row), strict=True)) for row in rows]

    def header(self, name: str) -> str:
        """Return the heading of a column with its unit."""
        unit = UNITS.get(self.formats.get(name, ""), "")
        return f"{name}{unit.replace('points', '(points)')}"

    def text_rows(self) -> list[list[str]]:
        """Return the cells as they are shown."""
        kinds = [self.formats.get(name, "") for name in self.columns]
        decimals: dict[str, int] = {}
        for name, kind in zip(self.columns, kinds, strict=True):
            if kind in FIGURES:
                needed = _decimals(self.column(name), kind)
                decimals[kind] = max(needed, decimals.get(kind, 0))

        def shown(value: Any, kind: str) -> str:
            return format_cell(value, kind, decimals.get(kind))

        return [list(map(shown, row, kinds)) for row in self.rows]

    def numeric(self, name: str) -> bool:
        """Return whether a column holds numbers, which stand to the right."""
        return all(not isinstance(value, str) for value in self.column(name))

    def note_lines(self) -> list[str]:
        """Return the notes as lines of text, with their units."""
        found = []
        for name, value in self.notes.items():
            kind = self.formats.get(name, "")
            unit = "" if isinstance(value, str) or _is_missing(value) else UNITS.get(kind, "")
            found.append(f"{name}: {format_cell(value, kind)}{unit}")
        return found

    def __str__(self) -> str:
        """Return aligned text."""
        header = [self.header(name) for name in self.columns]
        body = self.text_rows()
        widths = [max(map(len, cells)) for cells in zip(header, *body, strict=True)]
        right = [self.numeric(name) and bool(self.rows) for name in self.columns]

        def line(cells: list[str]) -> str:
            pairs = zip(cells, widths, right, strict=True)
            return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in pairs).rstrip()

        lines = [self.title] if self.title else []
        lines += [line(header), "  ".join("─" * width for width in widths)]
        lines += [line(cells) for cells in body]
        return "\n".join(lines + self.note_lines())

    def __repr__(self) -> str:
        """Return the table itself, so that a bare name at a prompt shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        right = [' style="text-align:right"' * self.numeric(name) for name in self.columns]

        def row(tag: str, cells: Sequence[str]) -> str:
            pairs = zip(cells, right, strict=True)
            inner = (f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell, style in pairs)
            return f"<tr>{''.join(inner)}</tr>"

        head = row("th", [self.header(name) for name in self.columns])
        body = "".join(row("td", cells) for cells in self.text_rows())
        # No colours: a notebook's own stand, in a light theme and in a dark one.
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self.note_lines())
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>{notes}"

    def _expanded(self) -> tuple[list[str], list[list[Any]]]:
        """Return columns and rows with every spread split into mean and standard deviation."""
        names: list[str] = []
        columns: list[list[Any]] = []
        for name in self.columns:
            values = self.column(name)
            names.append(name)
            columns.append([v.mean if isinstance(v, Spread) else v for v in values])
            if any(isinstance(v, Spread) for v in values):
                names.append(f"{name} std")
                columns.append([v.std if isinstance(v, Spread) else None for v in values])
        return names, [list(row) for row in zip(*columns, strict=True)]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a pandas data frame of the raw values.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        names, rows = self._expanded()
        return import_pandas().DataFrame(rows, columns=names)

    def to_csv(self, path: str | Path) -> Path:
        """Write the raw values as CSV and return the path."""
        names, rows = self._expanded()
        path = Path(path)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(["" if _is_missing(v) else v for v in row] for row in rows)
        return path


def import_pandas() -> Any:
    """Return the pandas module, or raise MissingExtraError."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError(
            "A data frame needs pandas, which is not installed; run pip install 'sartor[data]', "
            "or use to_csv(path), which needs nothing."
        ) from error
    return pandas
