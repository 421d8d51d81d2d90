"""What is found in a table, and the table as it is looked at."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sartor.data.cells import Array, Note
from sartor.data.checks import some
from sartor.data.encoding import empty_cells
from sartor.data.numerals import by_mark
from sartor.data.shifts import levels_of

State = Literal["fault", "suspect", "note"]
STATES: tuple[State, ...] = ("fault", "suspect", "note")


@dataclass(frozen=True)
class Finding:
    """Something that a person should look at.

    Attributes:
        state: "fault" (training refuses it), "suspect" (training would take it, and probably should
            not), "note" (good to know).
        kind: one word or two for what it is: "id", "empty", "units", ...
        columns: the columns it is about.
        clients: the clients it is about; none where it is about all.
        found: what there is.
        fix: what to do, flags included.
        flags: words for the command line that settle it, such as ("--drop", "id").
        facts: numbers, for a program.
    """

    state: State
    kind: str
    columns: tuple[str, ...]
    clients: tuple[str, ...]
    found: str
    fix: str
    flags: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """A table as it is looked at.

    Attributes:
        raw: the cells of every column that may be learned from.
        read: those of them that can be read, as ``read_column`` gives them.
        faults: why the others cannot, by column.
        notes: numbers that are not written as in Python.
        owner: the number of every row's client.
        clients: their names.
        labels: the columns of the label that can be read.
        task: "classification", "multilabel" or "regression".
        y: classes, several labels, or targets of every row; None if they cannot be read.
        class_names: of a classification.
        missing: what is to be done with empty cells.
    """

    raw: Mapping[str, Array]
    read: Mapping[str, tuple[str, Array]]
    faults: Mapping[str, str]
    notes: Sequence[Note]
    owner: Array
    clients: tuple[str, ...]
    labels: Mapping[str, tuple[str, Array]]
    task: str
    y: Array | None
    class_names: tuple[str, ...]
    missing: str

    @property
    def sizes(self) -> Array:
        """The rows of every client."""
        return np.bincount(self.owner, minlength=len(self.clients))

    @cached_property
    def levels(self) -> dict[str, tuple[list[str], Array] | None]:
        """Levels and codes of every column, as ``levels_of`` gives them."""
        columns = {**self.read, **self.labels}
        return {name: levels_of(*found) for name, found in columns.items()}

    @cached_property
    def _by_client(self) -> tuple[Array, Array]:
        return np.argsort(self.owner, kind="stable"), np.cumsum(self.sizes)[:-1]

    def parts(self, values: Array) -> list[Array]:
        """Return the values of every client."""
        order, ends = self._by_client
        return np.split(values[order], ends)

    def empty(self, name: str) -> Array:
        """Return the share of empty cells of a column, for every client."""
        gone = self.owner[empty_cells(*self.read[name])]
        return np.bincount(gone, minlength=len(self.clients)) / np.maximum(self.sizes, 1)


def refused(kind: str, columns: tuple[str, ...], fault: str, *clients: str) -> Finding:
    """Make a finding of what the reader refuses, in its words."""
    found, _, fix = fault.partition("; ")
    flags: tuple[str, ...] = ()
    if len(columns) == 1 and f"--drop {columns[0]}" in fault:
        flags = ("--drop", *columns)
    return Finding("fault", kind, columns, clients, found, fix.rstrip(".") or "see there", flags)


def drop(name: str) -> str:
    """Write the flag that leaves out a column, as a shell takes it."""
    return f"--drop {shlex.quote(listed([name]))}"


def listed(names: Sequence[str]) -> str:
    """Write names for a flag that takes several with commas; one that has a comma is quoted."""
    return ",".join(f'"{name}"' if "," in name else name for name in names)


def strip_words(marks: Sequence[str]) -> str:
    """Say what to do with units and signs in cells."""
    return f"take {quoted(marks)} off the cells in the file, so that numbers are left"


def is_number(cell: Any) -> bool:
    """Say whether a cell is a number in some way of writing."""
    return by_mark(cell, ".") is not None or by_mark(cell, ",") is not None


def many(things: int | Sequence[Any] | dict[str, Any], what: str) -> str:
    """Count things."""
    count = things if isinstance(things, int) else len(things)
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def quoted(words: Sequence[str]) -> str:
    """Show the first words in quotes."""
    return some([repr(word) for word in words])
