"""Numbers as people write them: with a decimal comma, or separators of thousands; and dates.

``1,5`` is a number in Bonn and ``1,234`` is another one in Oslo than in London. A column is read by
the one way that fits all its cells; where two ways fit and differ, the other columns of the table
decide (``decimal_of``), and where they do not, it is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Decimal = Literal["auto", "point", "comma"]
DECIMALS: tuple[Decimal, ...] = ("auto", "point", "comma")

_SPACES = "' \u2019\u00a0\u202f\u2009"  # an apostrophe (Swiss) or a space (French, SI)
_TAIL = r"(?:[eE][+-]?\d+)?"
_FORMS = {
    mark: re.compile(
        rf"[+-]?(?:[1-9]\d{{0,2}}(?:(?P<group>[{re.escape(other)}{_SPACES}])\d{{3}})"
        rf"(?:(?P=group)\d{{3}})*|\d+(?={re.escape(mark)}|$|[eE])|(?={re.escape(mark)}\d))"
        rf"(?:{re.escape(mark)}\d*)?{_TAIL}"
    )
    for mark, other in ((".", ","), (",", "."))
}
"""A number by its decimal mark; the other mark, spaces and apostrophes part thousands."""

_MONTH = r"(?:jan|feb|m[aä]r|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz])[a-zä]*\.?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s*[ap]m)?(?:\s*(?:z|[+-]\d{2}:?\d{2}))?"
_DATE = re.compile(
    rf"(?:(?:\d{{4}}[-/.]\d{{1,2}}(?:[-/.]\d{{1,2}})?|\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}\.?[ -]{_MONTH}[ -]\d{{2,4}}|{_MONTH} \d{{1,2}},? \d{{4}})(?:[t ]\s*{_TIME})?"
    rf"|{_TIME})",
    re.IGNORECASE,
)


def number_of(cell: Any) -> float | None:
    """Return the number in a cell, or None if it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def by_mark(cell: Any, mark: str) -> float | None:
    """Return the number in a cell with this decimal mark, or None if it is none.

    >>> by_mark("1.234,5", ","), by_mark("1,234", "."), by_mark("1,5", "."), by_mark("0,123", ".")
    (1234.5, 1234.0, None, None)
    """
    plain = number_of(cell)
    if not isinstance(cell, str) or (plain is not None and (mark == "." or "." not in cell)):
        return plain
    text = cell.strip()
    if not _FORMS[mark].fullmatch(text):
        return None
    other = "," if mark == "." else "."
    digits = re.sub(rf"[{re.escape(other)}{_SPACES}]", "", text)
    return number_of(digits.replace(mark, "."))


def is_date(cell: Any) -> bool:
    """Say whether a text is a date or a time of day.

    >>> [is_date(cell) for cell in ("2024-01-31", "31.01.24 08:15", "3 Mar 2020", "1.5", "T2-1")]
    [True, True, True, False, False]
    """
    return isinstance(cell, str) and bool(_DATE.fullmatch(cell.strip()))


class Numbers(NamedTuple):
    """How different cells read as numbers.

    Attributes:
        values: the number in each cell, None where there is none.
        how: "plain" (as Python writes numbers), "point", "comma" (with separators or a decimal
            comma), "both" (some cells with a point, some with a comma), or "" if a cell can be
            either, and nothing decides.
    """

    values: list[float | None]
    how: str


def read_numbers(cells: Sequence[Any], decimal: Decimal = "auto") -> Numbers:
    """Read cells as numbers, by the way that fits all of them, or most if none does.

    >>> read_numbers(["1,5", "1.234,5"])
    Numbers(values=[1.5, 1234.5], how='comma')
    >>> read_numbers(["1,234", "5"]).how, read_numbers(["1,234", "5"], "point").values
    ('', [1234.0, 5.0])
    """
    plain = [number_of(cell) for cell in cells]
    if None not in plain and decimal != "comma":
        return Numbers(plain, "plain")
    point, comma = ([by_mark(cell, mark) for cell in cells] for mark in ".,")
    if None not in point and None not in comma:
        if point == comma:
            return Numbers(point, "plain" if point == plain else "point")
        if decimal == "auto":
            return Numbers(point, "plain" if None not in plain else "")
        return Numbers(comma, "comma") if decimal == "comma" else Numbers(point, "point")
    found = {"point": len(point) - point.count(None), "comma": len(comma) - comma.count(None)}
    if None in point and None in comma:
        pairs = list(zip(point, comma, strict=True))
        if all((p is None) != (c is None) or p == c is not None for p, c in pairs):
            return Numbers([c if p is None else p for p, c in pairs], "both")
    if found["comma"] > found["point"] or (found["comma"] == found["point"] and decimal == "comma"):
        return Numbers(comma, "comma")
    return Numbers(point, "plain" if point == plain else "point")


def decimal_of(columns: Iterable[Sequence[Any]]) -> Decimal:
    """Return the decimal mark that a table's cells show, or "auto" if none or both do.

    Only cells that can be read in one way count, in columns of nothing but numbers.

    >>> decimal_of([["1,5", "2"], ["1,234"]]), decimal_of([["1.5"], ["1,5"]]), decimal_of([["7"]])
    ('comma', 'auto', 'auto')
    """
    seen: set[Decimal] = set()
    for cells in columns:
        pairs = [(by_mark(cell, "."), by_mark(cell, ",")) for cell in cells]
        if any(point is None and comma is None for point, comma in pairs):
            continue
        seen |= {"comma"} if any(point is None for point, _ in pairs) else set()
        seen |= {"point"} if any(comma is None for _, comma in pairs) else set()
    return seen.pop() if len(seen) == 1 else "auto"
