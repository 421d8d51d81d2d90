"""Everything that may be wrong with a table, one function for each kind, with what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import numpy as np

from sartor.data.cells import is_missing, words_of
from sartor.data.checks import some
from sartor.data.column_findings import FEW_SAMPLES, FILL, column_findings
from sartor.data.findings import (
    Columns,
    Finding,
    drop,
    is_number,
    listed,
    many,
    quoted,
    refused,
    strip_words,
)
from sartor.data.shifts import Shift, Unit
from sartor.data.suspicions import (
    copies,
    quantities,
    twin_levels,
)

MANY_CLASSES = 20
"""A label of more whole numbers may be a target."""


def detect(
    table: Columns, faults: Sequence[str], shifts: Sequence[Shift], units: Sequence[Unit]
) -> Iterator[Finding]:
    """Return all findings: from the clients and labels, then from the columns, then from rows."""
    for fault in faults:
        yield refused("client or label", (), fault)
    yield from _clients(table)
    for name, fault in table.faults.items():
        yield _unread(table, name, fault)
    yield from _empty(table)
    yield from _notes(table)
    yield from _targets(table)
    dropped: set[str] = set()
    single: list[str] = []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, (kind, values) in table.read.items():
        for finding in column_findings(table, name, kind, values, shifts):
            dropped |= {name} if "--drop" in finding.flags else set()
            if finding.kind == "of clients":
                alike.setdefault((finding.kind, finding.found, finding.fix), []).append(name)
            elif finding.kind == "constant" and finding.state == "note":
                single.append(name)
            else:
                yield finding
    for (what, found, fix), names in alike.items():
        yield Finding("note", what, tuple(names), (), found, fix)
    if single:
        found = f"{many(single, 'column')} with one value in every cell that is not empty"
        flags = ("--drop", listed(single))
        fix = f"they say nothing; to leave them out: --drop {shlex.quote(listed(single))}"
        yield Finding("note", "constant", tuple(single), (), found, fix, flags)
    yield from _units(units)
    yield from _twins(table, dropped)
    yield from _copies(table, dropped)


# ---------------------------------------------------------------------- clients


def _clients(table: Columns) -> Iterator[Finding]:
    sizes = table.sizes.tolist()
    small = [name for name, size in zip(table.clients, sizes, strict=True) if size < FEW_SAMPLES]
    if small:
        yield Finding(
            "note",
            "few samples",
            (),
            tuple(small),
            f"{many(small, 'client')} with fewer than {FEW_SAMPLES} rows: {some(small)}",
            "their scores say little; join them with others, or leave them out",
        )
    for group in twin_levels(table.clients):
        yield Finding(
            "suspect",
            "spelling",
            (),
            group,
            f"clients that differ in spelling alone: {quoted(group)}",
            "write one name in one way; today they are clients of their own",
        )
    if table.y is None or table.task != "classification":
        return
    held = [len(np.unique(table.y[table.owner == i])) for i in range(len(sizes))]
    single = [name for name, n in zip(table.clients, held, strict=True) if n == 1]
    if single:
        yield Finding(
            "suspect",
            "one class",
            tuple(table.labels),
            tuple(single),
            f"{many(single, 'client')} with one class alone: {some(single)}",
            "there every accuracy is that of a constant answer; check the label, or leave them out",
        )
    for group in twin_levels(table.class_names):
        yield Finding(
            "suspect",
            "spelling",
            tuple(table.labels),
            (),
            f"classes that differ in spelling alone: {quoted(group)}",
            "write one class in one way; today they are classes of their own",
        )


# ---------------------------------------------------------------------- cells


def _unread(table: Columns, name: str, fault: str) -> Finding:
    """Say more than the reader about a column that it refuses: who wrote what."""
    raw = np.asarray(table.raw[name])
    if raw.ndim != 1 or raw.dtype.kind not in "OU":
        return refused("dates" if "dates" in fault else "cells", (name,), fault)
    if "dates" in fault:
        return refused("dates", (name,), fault)
    kind = "decimals" if "decimal=" in fault else "mixed"
    strange = np.array([not is_missing(cell) and not is_number(cell) for cell in raw.tolist()])
    clients = [table.clients[i] for i in np.unique(table.owner[strange]).tolist()]
    finding = refused(kind, (name,), fault, *clients)
    texts = list(dict.fromkeys(str(cell).strip() for cell in raw[strange].tolist()))
    if marks := quantities(texts):
        return Finding(**{**vars(finding), "fix": strip_words(marks), "flags": ()})
    return finding


def _empty(table: Columns) -> Iterator[Finding]:
    """Say which columns have empty cells, where a column is empty, and where it is much emptier."""
    gaps = {name: table.empty(name) for name in table.read}
    whole = [name for name, share in gaps.items() if (share[table.sizes > 0] == 1).all()]
    gappy = {n: share for n, share in gaps.items() if share.any() and n not in whole}
    if gappy and table.missing == "error":
        cells = sum(round(float(share @ table.sizes)) for share in gappy.values())
        yield Finding(
            "fault",
            "empty",
            tuple(gappy),
            (),
            f"{cells:,} empty cells in {many(gappy, 'column')}: {some(list(gappy))}",
            f"fill and mark them with {' '.join(FILL)} (or mean, median, indicator)",
            FILL,
        )
    for name, share in gappy.items():
        at = [i for i in np.flatnonzero(share == 1).tolist() if table.sizes[i] > 1]
        rest = np.setdiff1d(np.arange(len(share)), at)
        if at:
            clients = [table.clients[i] for i in at]
            elsewhere = float(share[rest] @ table.sizes[rest] / max(table.sizes[rest].sum(), 1))
            yield Finding(
                "suspect",
                "empty at a client",
                (name,),
                tuple(clients),
                f"no value at {some(clients)}; elsewhere {elsewhere:.0%} of the cells are empty",
                f"leave it out with {drop(name)}, or say {' '.join(FILL)}, which puts there what "
                "the other clients have",
                facts={"elsewhere": elsewhere},
            )


def _notes(table: Columns) -> Iterator[Finding]:
    for how in dict.fromkeys(note.how for note in table.notes):
        own = [note for note in table.notes if note.how == how]
        yield Finding(
            "note",
            "decimals",
            tuple(note.column for note in own),
            (),
            words_of(own)[0].rstrip("."),
            "if that is wrong: --decimal point or --decimal comma",
        )


def _targets(table: Columns) -> Iterator[Finding]:
    """Say that classes may be numbers."""
    classes = len(table.class_names)
    for name, (kind, _) in table.labels.items():
        if table.task == "classification" and kind == "number" and classes > MANY_CLASSES:
            found = f"{classes} different whole numbers are taken for classes"
            fix = "if they are amounts, and not names: --task regression"
            yield Finding("note", "task", (name,), (), found, fix)


def _units(units: Sequence[Unit]) -> Iterator[Finding]:
    for unit in units:
        if unit.factor == 0:
            found, fix = f"{unit.client} differs as {unit.units} do", "convert one into the other"
        else:
            big = unit.factor if unit.factor > 1 else 1 / unit.factor
            part = f"1/{big:.3g}" if unit.factor < 1 else f"{big:.3g} times"
            like = f", as between {unit.units}" if unit.units else "; no pair of units is known"
            found = f"values at {unit.client} are {part} those elsewhere{like}"
            what = "multiply" if unit.factor < 1 else "divide"
            fix = f"if the units differ, {what} the values of {unit.client} by the exact factor"
        yield Finding(
            "suspect",
            "units",
            (unit.column,),
            (unit.client,),
            found,
            f"{fix} in the file",
            facts={"factor": unit.factor or None, "units": unit.units},
        )


# ---------------------------------------------------------------------- columns and rows alike


def _twins(table: Columns, dropped: set[str]) -> Iterator[Finding]:
    first: dict[bytes, str] = {}
    for name, (kind, values) in table.read.items():
        if name in dropped or len(np.unique(values[:1000])) < 2:
            continue
        key = kind.encode() + values.tobytes()
        if key in first:
            found = f"equal to {first[key]!r} in every row"
            fix = f"one is enough: {drop(name)}"
            yield Finding("note", "twins", (name,), (), found, fix, ("--drop", name))
        else:
            first[key] = name


def _copies(table: Columns, dropped: set[str]) -> Iterator[Finding]:
    columns = {name: found for name, found in table.read.items() if name not in dropped}
    if not columns:
        return
    found = copies({**columns, **table.labels}, table.levels, table.owner)
    facts = {"within": found.within, "across": found.across}
    if not found.within and not found.across:
        return
    words = []
    if found.within:
        words.append(f"{many(found.within, 'row')} equal to an earlier one of the same client")
    if found.across:
        pair = " and ".join(table.clients[i] for i in found.clients)
        words.append(f"{many(found.across, 'row')} that several clients hold, most {pair}")
    if found.is_chance:
        words.append("columns of so few values make such rows by themselves")
        yield Finding("note", "equal rows", (), (), "; ".join(words), "nothing", facts=facts)
        return
    yield Finding(
        "suspect",
        "equal rows",
        (),
        tuple(table.clients[i] for i in found.clients),
        "; ".join(words),
        "take repeated rows out of the file: the same one would be trained on and tested on",
        facts=facts,
    )
