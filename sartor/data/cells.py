"""The cells of one column: which are empty, whether they are numbers or categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.data.checks import some
from sartor.data.numerals import Decimal, by_mark, is_date, number_of, read_numbers

Array = npt.NDArray[Any]
MISSING = frozenset(
    {"", "na", "n/a", "n.a.", "nan", "null", "none", "?", "<na>", ".", "#n/a", "#null!", "#value!"}
)
"""Words that mean that a cell is empty, in any case."""

_MOST_FOR_DECIMAL = 1000  # cells of a column that are looked at for the table's decimal mark


class Note(NamedTuple):
    """A column whose numbers are not written as Python writes them, and one of its cells."""

    column: str
    how: str  # "comma", "point" or "both", see ``numerals.Numbers``
    cell: str
    value: float


def is_missing(cell: Any) -> bool:
    """Say whether a cell is empty: None, NaN, or a word such as NA.

    >>> [is_missing(cell) for cell in (None, float("nan"), " NA ", 0, "x")]
    [True, True, True, False, False]
    """
    if cell is None:
        return True
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return bool(cell != cell) if isinstance(cell, float | np.floating) else str(cell) == "<NA>"


def level_of(cell: Any) -> str:
    """Write a cell as the name of a level: 3.0 and 3 are one level."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell).strip()


def read_column(
    name: str,
    values: Any,
    faults: list[str],
    *,
    category: bool = False,
    decimal: Decimal = "auto",
    notes: list[Note] | None = None,
) -> tuple[str, Array] | None:
    """Read a column: ("number", float64 with NaN) or ("category", text with ``""``).

    If it cannot be used, add the reason to the faults and return None. Numbers that are written
    with a decimal comma or with separators are noted.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        faults.append(f"Column {name!r} has shape {array.shape}; every cell must be one value.")
        return None
    if array.dtype.kind in "biuf" and not category:
        return "number", array.astype(np.float64)
    if array.dtype.kind in "mM":
        faults.append(_no_dates(name, "dates"))
        return None
    if not category and decimal != "comma":
        try:  # a column of plain numbers needs no look at its cells
            return "number", array.astype(np.float64)
        except (TypeError, ValueError):
            pass
    different, places = distinct(array)
    empty = np.array([is_missing(cell) for cell in different], dtype=np.bool_)
    given = [cell for cell, gone in zip(different, empty.tolist(), strict=True) if not gone]
    if not category:
        found = read_numbers(given, decimal)
        numbers = np.full(len(different), np.nan)
        numbers[~empty] = [np.nan if value is None else value for value in found.values]
        known = np.zeros(len(different), dtype=np.bool_)
        known[~empty] = [value is not None for value in found.values]
        if known.sum() == len(given):
            if not found.how:
                faults.append(_either(name, given))
                return None
            _note(name, given, found.values, found.how, notes)
            return "number", numbers[places]
        strange = np.flatnonzero(~(known | empty)[places])
        if 2 * len(strange) < len(array) - int(empty[places].sum()):
            faults.append(_no_numbers(name, array, strange))
            return None
        if all(map(is_date, given)):
            faults.append(_no_dates(name, f"dates or times ({str(given[0])[:20]!r})"))
            return None
    text = ["" if gone else level_of(c) for c, gone in zip(different, empty.tolist(), strict=True)]
    return "category", np.array(text, dtype=np.str_)[places]


def sample_of(values: Any) -> list[str]:
    """Return the first texts of a column that are not empty, to find its decimal mark by."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "OU":
        return []
    cells = dict.fromkeys(c for c in array[:_MOST_FOR_DECIMAL].tolist() if isinstance(c, str))
    return [cell for cell in cells if not is_missing(cell)]


def words_of(notes: Sequence[Note]) -> list[str]:
    """Return a sentence for every way in which numbers of some columns were written."""
    about = {
        "comma": "with a decimal comma",
        "point": "with separators of thousands",
        "both": "partly with a decimal point and partly with a decimal comma",
    }
    found = []
    for how, words in about.items():
        own = [note for note in notes if note.how == how]
        if own:
            each = some([f"{n.column} ({n.cell!r} is {n.value:.10g})" for n in own], 4)
            found.append(f"Numbers {words} were read in {each}.")
    return found


def distinct(array: Array) -> tuple[list[Any], Array]:
    """Return the different cells and the position of every cell among them.

    Cells of several kinds stay apart: True, 1 and 1.0 would count as one.
    """
    cells = array.tolist()
    if not set(map(type, cells)) <= {str, type(None), float}:
        return cells, np.arange(len(cells))
    order = {cell: place for place, cell in enumerate(dict.fromkeys(cells))}
    return list(order), np.fromiter(map(order.__getitem__, cells), np.intp, len(cells))


def _note(
    name: str,
    cells: Sequence[Any],
    values: Sequence[float | None],
    how: str,
    notes: list[Note] | None,
) -> None:
    if notes is None or how == "plain":
        return
    other = {"comma": ".", "point": ",", "both": "."}[how]  # the mark by which it reads otherwise
    for cell, value in zip(cells, values, strict=True):
        odd = number_of(cell) != value and by_mark(cell, other) != value
        if value is not None and odd:
            notes.append(Note(name, how, str(cell).strip(), value))
            return
    cell, value = next(
        (c, v) for c, v in zip(cells, values, strict=True) if v is not None and number_of(c) != v
    )
    notes.append(Note(name, how, str(cell).strip(), value))


def _no_numbers(name: str, array: Array, strange: Array) -> str:
    shown = some([f"{str(array[i])[:20]!r} in row {i}" for i in strange[:4].tolist()], 3)
    return (
        f"Column {name!r} holds numbers, but {len(strange)} cells are text: {shown}; "
        f"fix them, or name the column in categories=[{name!r}] (--categories {name})."
    )


def _no_dates(name: str, what: str) -> str:
    return (
        f"Column {name!r} holds {what}; turn them into numbers (days, hours), or leave the column "
        f"out with drop=[{name!r}] (--drop {name})."
    )


def _either(name: str, cells: Sequence[Any]) -> str:
    cell = next(c for c in cells if by_mark(c, ".") != by_mark(c, ","))
    shown = str(cell).strip()[:20]
    return (
        f"Column {name!r} holds {shown!r}, which is {by_mark(cell, '.'):g} or "
        f"{by_mark(cell, ','):g}; say which with decimal='point' (--decimal point) or 'comma'."
    )
