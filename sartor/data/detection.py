"""Everything that may be wrong with a table, one function for each kind, with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sartor.data.cells import Array, is_missing, words_of
from sartor.data.checks import some
from sartor.data.encoding import column_faults
from sartor.data.findings import Columns, Finding
from sartor.data.numerals import by_mark, is_date
from sartor.data.shifts import VARIATION, Shift, Unit, chance_of_counts, levels_of
from sartor.data.suspicions import (
    CORRELATION,
    RECALL,
    copies,
    knows_label,
    quantities,
    suspected_code,
    suspected_dates,
    suspected_id,
    twin_levels,
)

FEW_SAMPLES = 10
"""A client with fewer rows is noted."""

FILL = ("--missing", "median+indicator")
"""The flags for empty cells."""

_SURE = 1e-4  # the chance of what is suspected without it


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
    dropped: set[str] = set()
    for name, (kind, values) in table.read.items():
        for finding in _column(table, name, kind, values, shifts):
            dropped |= {name} if "--drop" in finding.flags else set()
            yield finding
    yield from _units(units)
    yield from _twins(table, dropped)
    yield from _copies(table, dropped)


def refused(kind: str, columns: tuple[str, ...], fault: str, *clients: str) -> Finding:
    """Make a finding of what the reader refuses, in its words."""
    found, _, fix = fault.partition("; ")
    flags = ("--drop", *columns) if f"--drop {''.join(columns)}" in fault else ()
    flags = ("--categories", *columns) if not flags and "--categories" in fault else flags
    return Finding("fault", kind, columns, clients, found, fix.rstrip(".") or "see there", flags)


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
            f"{_many(small, 'client')} with fewer than {FEW_SAMPLES} rows: {some(small)}",
            "their scores say little; join them with others, or leave them out",
        )
    for group in twin_levels(table.clients):
        yield Finding(
            "suspect",
            "spelling",
            (),
            group,
            f"clients that differ in spelling alone: {_quoted(group)}",
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
            f"{_many(single, 'client')} with one class alone: {some(single)}",
            "there every accuracy is that of a constant answer; check the label, or leave them out",
        )
    for group in twin_levels(table.class_names):
        yield Finding(
            "suspect",
            "spelling",
            tuple(table.labels),
            (),
            f"classes that differ in spelling alone: {_quoted(group)}",
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
    strange = np.array([not is_missing(cell) and not _reads(cell) for cell in raw.tolist()])
    clients = [table.clients[i] for i in np.unique(table.owner[strange]).tolist()]
    finding = refused(kind, (name,), fault, *clients)
    texts = list(dict.fromkeys(str(cell).strip() for cell in raw[strange].tolist()))
    if marks := quantities(texts):
        return Finding(**{**vars(finding), "fix": _strip(marks), "flags": ()})
    return finding


def _strip(marks: Sequence[str]) -> str:
    return f"take {_quoted(marks)} off the cells in the file, so that numbers are left"


def _reads(cell: Any) -> bool:
    return by_mark(cell, ".") is not None or by_mark(cell, ",") is not None


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
            f"{cells:,} empty cells in {_many(gappy, 'column')}: {some(list(gappy))}",
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
                f"leave it out with --drop {name}, or say {' '.join(FILL)}, which puts there what "
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


# ---------------------------------------------------------------------- columns


def _column(
    table: Columns, name: str, kind: str, values: Array, shifts: Sequence[Shift]
) -> Iterator[Finding]:
    drop, out = ("--drop", name), f"leave it out: --drop {name}"
    nobody = np.full(len(values), "")
    refused = column_faults(name, kind, values, nobody, "mean")
    for fault in refused:
        yield refused("id" if "as ids" in fault else "cells", (name,), fault)
    if refused:
        return
    known = values[values != ""] if kind == "category" else values[~np.isnan(values)]
    distinct = set(known.tolist())
    if len(distinct) == 1:
        (only,) = distinct
        shown = only if kind == "category" else f"{only:.10g}"
        found = f"every cell that is not empty holds {shown!r}"
        yield Finding("note", "constant", (name,), (), found, out, drop)
        return
    if _names_clients(table, kind, values):
        found = "it has one value at every client, and says no more than the client's name"
        yield Finding("suspect", "client again", (name,), (), found, out, drop)
        return
    if why := suspected_id(name, kind, values, table.owner):
        yield Finding("suspect", "id", (name,), (), f"an id? {why}", out, drop)
        return
    yield from _label_copies(table, name, kind, values)
    if kind == "category":
        yield from _texts(table, name, values, shifts)
    else:
        yield from _numbers(table, name, values)


def _names_clients(table: Columns, kind: str, values: Array) -> bool:
    coded = levels_of(kind, values)
    if coded is None:
        distinct, codes = np.unique(values, return_inverse=True)
        coded = [""] * len(distinct), codes
    if len(table.clients) < 2 or (table.sizes == 1).any():
        return False
    pairs = np.unique(np.stack([table.owner, coded[1]]), axis=1)
    return pairs.shape[1] == len(table.clients) and len(np.unique(pairs[1])) > 1


def _label_copies(table: Columns, name: str, kind: str, values: Array) -> Iterator[Finding]:
    if table.y is None:
        return
    several = table.task == "multilabel"
    targets = dict(zip(table.labels, table.y.T, strict=True)) if several else {"": table.y}
    for label, y in targets.items():
        shown = label or next(iter(table.labels))
        classes = 0 if table.task == "regression" else int(y.max()) + 1
        target = y if table.task == "regression" else y.astype(np.int64)
        sure = knows_label(kind, values, target, classes)
        if sure < (RECALL if classes else CORRELATION):
            continue
        words = f"knows {sure:.1%} of {shown!r}, class by class"
        words = words if classes else f"goes with {shown!r} (correlation of ranks {sure:.4f})"
        yield Finding(
            "suspect",
            "label copy",
            (name,),
            (),
            f"alone it {words}",
            f"if it is written after the fact, it is the answer: --drop {name}",
            ("--drop", name),
            {"label": shown, "score": sure},
        )


def _texts(table: Columns, name: str, values: Array, shifts: Sequence[Shift]) -> Iterator[Finding]:
    levels, codes = levels_of("category", values) or ([], values)
    for group in twin_levels(levels):
        yield Finding(
            "suspect",
            "spelling",
            (name,),
            (),
            f"levels that differ in spelling alone: {_quoted(group)}",
            "write one level in one way; today each is a category of its own",
        )
    if len(levels) > 2 and all(map(is_date, levels)):
        yield Finding(
            "suspect",
            "dates",
            (name,),
            (),
            f"{len(levels)} dates ({levels[0]!r}, ...) are read as categories",
            f"turn them into numbers (days, hours), or --drop {name}",
            ("--drop", name),
        )
        return
    if marks := quantities(levels):
        found = f"{len(levels)} numbers with {_quoted(marks)} ({levels[0]!r}) become categories"
        yield Finding("suspect", "mixed", (name,), (), found, _strip(marks))
        return
    is_number = np.array([_reads(level) for level in levels])
    known = codes >= 0
    written = _shares(table, known, is_number[codes] & known) if len(levels) else np.zeros(0)
    if (written >= 0.9).any() and (written <= 0.1).any():
        numbers = [table.clients[i] for i in np.flatnonzero(written >= 0.9).tolist()]
        texts = [table.clients[i] for i in np.flatnonzero(written <= 0.1).tolist()]
        yield Finding(
            "suspect",
            "mixed",
            (name,),
            tuple(numbers),
            f"numbers at {some(numbers)}, texts at {some(texts)}; all become categories",
            f"write the same codes everywhere, or --drop {name}",
        )
        return
    alone = [s.client for s in shifts if s.column == name and s.measure == VARIATION]
    alone = [
        s.client
        for s in shifts
        if s.column == name and s.client in alone and s.is_flagged and s.distance > 0.999
    ]
    if alone:
        who = alone[:1] if len(alone) == len(table.clients) == 2 else alone
        yield Finding(
            "suspect",
            "other codes",
            (name,),
            tuple(who),
            f"no level at {some(who)} occurs anywhere else",
            f"if the same things have other names there, rename them; else --drop {name}",
        )


def _shares(table: Columns, known: Array, hit: Array) -> Array:
    """Return for every client the share of known cells that are hit, NaN without any."""
    count = len(table.clients)
    all_ = np.bincount(table.owner[known], minlength=count)
    hits = np.bincount(table.owner[hit], minlength=count)
    with np.errstate(invalid="ignore"):
        return np.where(all_ > 0, hits / all_, np.nan)


def _numbers(table: Columns, name: str, values: Array) -> Iterator[Finding]:
    if suspected_dates(values):
        yield Finding(
            "suspect",
            "dates",
            (name,),
            (),
            "whole numbers that read as dates, year, month and day",
            f"turn them into days since one day, or --drop {name}",
            ("--drop", name),
        )
        return
    code = suspected_code(values)
    if code is not None:
        value, count = code
        hit = values == value
        share = _shares(table, ~np.isnan(values), hit)
        clients = [table.clients[i] for i in np.argsort(-np.nan_to_num(share)) if share[i] > 0]
        yield Finding(
            "suspect",
            "code",
            (name,),
            tuple(clients),
            f"{value:g} in {count:,} cells, far from all others; most at {some(clients, 3)}",
            f"if it stands for an empty cell, leave those empty in the file, with {' '.join(FILL)}",
            facts={"value": value, "cells": count},
        )
    yield from _constant(table, name, values, None if code is None else code[0])


def _constant(table: Columns, name: str, values: Array, code: float | None) -> Iterator[Finding]:
    """Find clients at which nothing varies that varies elsewhere."""
    if levels_of("number", values) is not None:
        return  # of few values, a shift says it
    known = ~np.isnan(values)
    for client, own in zip(table.clients, table.parts(values), strict=True):
        own = own[~np.isnan(own)]
        if len(own) < FEW_SAMPLES or np.ptp(own) or own[0] == code:
            continue
        others = int(known.sum()) - len(own)
        same = int((values == own[0]).sum()) - len(own)
        counts = np.array([len(own), 0.0]), np.array([same, others - same])
        if others and chance_of_counts(*counts) < _SURE:
            yield Finding(
                "suspect",
                "constant",
                (name,),
                (client,),
                f"every cell at {client} holds {own[0]:g}; elsewhere {same / others:.0%} do",
                f"if nobody measured it there, leave those cells empty, or --drop {name}",
            )


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
            fix = f"one is enough: --drop {name}"
            yield Finding("note", "twins", (name,), (), found, fix, ("--drop", name))
        else:
            first[key] = name


def _copies(table: Columns, dropped: set[str]) -> Iterator[Finding]:
    columns = {name: found for name, found in table.read.items() if name not in dropped}
    if not columns:
        return
    found = copies({**columns, **table.labels}, table.owner)
    facts = {"within": found.within, "across": found.across}
    if not found.within and not found.across:
        return
    words = []
    if found.within:
        words.append(f"{found.within:,} rows repeat an earlier row of the same client")
    if found.across:
        pair = " and ".join(table.clients[i] for i in found.clients)
        words.append(f"{found.across:,} rows are held by several clients, most by {pair}")
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


def _many(things: Sequence[Any] | dict[str, Any], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def _quoted(words: Sequence[str]) -> str:
    return some([repr(word) for word in words])
