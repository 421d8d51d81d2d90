"""What the pages of all reports share: the template, tables and settings as they need them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sartor import runs
from sartor._version import __version__
from sartor.table import Table, jsonable

MOST_ROWS = 2000
"""Rows of the client table on the page; all of them are in metrics.csv."""


def fill(name: str, environment: Mapping[str, Any] | None, **values: Any) -> str:
    """Return a page: a template of this folder with the style sheet, the version and the date.

    Args:
        name: the template.
        environment: versions and hardware of the machine that trained; of this one if None.
        values: what the template shows.
    """
    page = Environment(
        loader=PackageLoader("sartor.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    rendered = page.render(
        style=Markup(style),  # our own file
        environment=settings_lines(environment or runs.environment()),
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )
    return rendered.lstrip()


def shown(table: Table, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return what the template needs of a table; the first cell carries the method's colour."""
    text = table.text_rows()
    marks = [numbers.get(str(row[0]), 0) for row in text]
    lowered = [name for name in table.columns if table.formats.get(name) == "points"]
    return {
        "head": [(table.header(name), table.numeric(name)) for name in table.columns],
        "rows": [
            (
                mark,
                [
                    (_signed(cell), table.numeric(name), name in lowered and cell[0] == "-")
                    for name, cell in zip(table.columns, cells, strict=True)
                ],
            )
            for mark, cells in zip(marks, text, strict=True)
        ],
        "notes": table.note_lines(),
    }


def _signed(cell: str) -> str:
    """Return a number with a minus sign rather than a hyphen; other texts as they are."""
    return f"−{cell[1:]}" if cell[:1] == "-" and cell[1:2].isdigit() else cell


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "client"), count(2000, "client")
    ('1 client', '2,000 clients')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


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
