"""Fill the template of a report: style sheet, tables, figures and settings in its form."""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sartor._version import __version__
from sartor.report.sketch import Sketch
from sartor.results.tables import Table, jsonable

if TYPE_CHECKING:
    from sartor.report.drawing import Figure

MOST_ROWS = 2000
"""Rows of the client table on the page; all of them are in metrics.csv."""


def fill(**values: Any) -> str:
    """Return a page: ``page.html`` with the style sheet, the version, the date and the values."""
    page, style = _template()
    rendered = page.render(
        style=Markup(style),  # our own file, so it is not escaped
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )
    return rendered.lstrip()


@functools.cache
def _template() -> tuple[Any, str]:
    """Return the template and the style sheet; a federation has a page for every client."""
    page = Environment(
        loader=PackageLoader("sartor.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")
    return page, Path(__file__).with_name("style.css").read_text(encoding="utf-8")


SHAPES = {
    "o": "M8 2a6 6 0 1 0 .01 0z",
    "s": "M3 3h10v10H3z",
    "D": "M8 1l7 7-7 7-7-7z",
    "^": "M8 2l7 12H1z",
    "v": "M8 14L1 2h14z",
    "P": "M5.5 1h5v4.5H15v5h-4.5V15h-5v-4.5H1v-5h4.5z",
    "X": "M4.2 1L8 4.8 11.8 1 15 4.2 11.2 8 15 11.8 11.8 15 8 11.2 4.2 15 1 11.8 4.8 8 1 4.2z",
}
"""The markers of the figures, as paths in a box of 16 by 16."""


NUMBER = re.compile(r"[+-]?\d[\d,.]*( %)?|–")
"""A text that stands to the right, as numbers do."""


def shown(
    table: Table, looks: Mapping[str, tuple[int, str]], links: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a table in the form that the template takes.

    ``looks`` has the number of the colour and the marker of names in the first column, ``links``
    the page that such a name leads to.
    """
    texts = list(zip(*table.text_rows(), strict=True)) or [()] * len(table.columns)
    right = [
        table.numeric(name) or all(NUMBER.fullmatch(cell) for cell in cells)
        for name, cells in zip(table.columns, texts, strict=True)
    ]
    lowered = [_warns(table, name) for name in table.columns]
    verdicts = table.column("verdict") if "verdict" in table.columns else [""] * len(table)
    rows = []
    for cells, verdict in zip(table.text_rows(), verdicts, strict=True):
        # A loss that may be chance is no warning.
        sure = verdict in ("", "loses")
        number, mark = looks.get(cells[0], (0, ""))
        shown = [
            (signed(cell), numeric, low and sure and cell[0] == "-")
            for cell, numeric, low in zip(cells, right, lowered, strict=True)
        ]
        link = (links or {}).get(cells[0], "")
        rows.append(((number, SHAPES[mark]) if number else None, shown, link))
    head = list(zip(map(table.header, table.columns), right, strict=True))
    return {"head": head, "rows": rows, "notes": list(map(signed, table.note_lines()))}


def _warns(table: Table, name: str) -> bool:
    """Return whether numbers below zero are bad in a column: gains, but not ends of intervals."""
    is_gain = table.formats.get(name) in ("points", "gain", "score gain")
    return is_gain and name not in ("low", "high")


def pictures(
    figures: Sequence[Figure | Sketch],
) -> list[tuple[Figure | Sketch, Markup, Markup | None, str]]:
    """Return figures in the form that the template takes: for a screen, for a phone, and a class.

    The drawings have escaped their texts already.
    """
    found: list[tuple[Figure | Sketch, Markup, Markup | None, str]] = []
    for figure in figures:
        if isinstance(figure, Sketch):
            found.append((figure, Markup(figure.svg), None, "sketch"))
            continue
        from sartor.report.fitting import narrow_svg

        narrow = narrow_svg(figure)
        kind = ("broad" if figure.broad else "half") + " two" * (narrow is not None)
        phone = None if narrow is None else Markup(narrow)
        found.append((figure, Markup(figure.svg), phone, kind))
    return found


def signed(text: str) -> str:
    """Return a text with minus signs instead of hyphens before its numbers.

    >>> signed("-0.4 [-1.2, +0.4] by 3-fold")
    '−0.4 [−1.2, +0.4] by 3-fold'
    """
    return re.sub(r"(?<![\w.])-(?=\.?\d)", "−", text)


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "client"), count(2000, "client")
    ('1 client', '2,000 clients')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> listed(["local"]), listed(["local", "fedavg", "fedapa"])
    ('local', 'local, fedavg and fedapa')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def settings_lines(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted key, value) lines."""
    found = []
    for key, value in jsonable(settings).items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += settings_lines(value, f"{name}.")
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        text = "–" if value is None or value == "" else str(value)
        found.append((name, text if len(text) <= 300 else text[:297] + "…"))
    return found
