"""What may be wrong with one column of a table, with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sartor.data.cells import Array
from sartor.data.checks import some
from sartor.data.encoding import column_faults
from sartor.data.findings import Columns, Finding, drop, is_number, quoted, refused, strip_words
from sartor.data.numerals import is_date
from sartor.data.shifts import VARIATION, Shift, chance_of_counts
from sartor.data.suspicions import (
    CORRELATION,
    RECALL,
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


def column_findings(
    table: Columns, name: str, kind: str, values: Array, shifts: Sequence[Shift]
) -> Iterator[Finding]:
    """Return what may be wrong with a column that could be read."""
    flag, out = ("--drop", name), f"leave it out: {drop(name)}"
    nobody = np.full(len(values), "")
    faults = column_faults(name, kind, values, nobody, "mean")
    for fault in faults:
        yield refused("id" if "as ids" in fault else "cells", (name,), fault)
    if faults:
        return
    known = values[values != ""] if kind == "category" else values[~np.isnan(values)]
    same = bool((known == known[0]).all())
    if same and (copied := [*_label_copies(table, name, kind, values)]):
        yield from copied  # it is filled for one class alone
        return
    if same:
        yield Finding("note", "constant", (name,), (), "one value", out, flag)
        return
    if values_by_client := _of_clients(table, kind, values):
        if values_by_client == len(table.clients):
            found = "another name of the client: one value at each, and no two the same"
            yield Finding("suspect", "client again", (name,), (), found, out, flag)
        else:
            found = "it has one value at every client"
            fix = "it says nothing about samples, and one client alone learns nothing from it"
            yield Finding("note", "of clients", (name,), (), found, fix)
        return
    if why := suspected_id(name, kind, values, table.owner):
        yield Finding("suspect", "id", (name,), (), f"an id? {why}", out, flag)
        return
    yield from _label_copies(table, name, kind, values)
    if kind == "category":
        yield from _texts(table, name, values, shifts)
    else:
        yield from _numbers(table, name, values)


def _of_clients(table: Columns, kind: str, values: Array) -> int:
    """Return how many values a column has, if every client has one of its own; else 0."""
    if len(table.clients) < 2 or (table.sizes == 1).any():
        return 0
    parts = table.parts(values)
    if any((part[1:] != part[:-1]).any() for part in parts):
        return 0
    return len({part[0] for part in parts})


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
            f"if it is written after the fact, it is the answer: {drop(name)}",
            ("--drop", name),
            {"label": shown, "score": sure},
        )


def _texts(table: Columns, name: str, values: Array, shifts: Sequence[Shift]) -> Iterator[Finding]:
    levels, codes = table.levels[name] or ([], values)
    for group in twin_levels(levels):
        yield Finding(
            "suspect",
            "spelling",
            (name,),
            (),
            f"levels that differ in spelling alone: {quoted(group)}",
            "write one level in one way; today each is a category of its own",
        )
    if len(levels) > 2 and all(map(is_date, levels)):
        yield Finding(
            "suspect",
            "dates",
            (name,),
            (),
            f"{len(levels)} dates ({levels[0]!r}, ...) are read as categories",
            f"turn them into numbers (days, hours), or {drop(name)}",
            ("--drop", name),
        )
        return
    if marks := quantities(levels):
        found = f"{len(levels)} numbers with {quoted(marks)} ({levels[0]!r}) become categories"
        yield Finding("suspect", "mixed", (name,), (), found, strip_words(marks))
        return
    numbers_here = np.array([is_number(level) for level in levels])
    known = codes >= 0
    written = _shares(table, known, numbers_here[codes] & known) if len(levels) else np.zeros(0)
    if (written >= 0.9).any() and (written <= 0.1).any():
        numbers = [table.clients[i] for i in np.flatnonzero(written >= 0.9).tolist()]
        texts = [table.clients[i] for i in np.flatnonzero(written <= 0.1).tolist()]
        yield Finding(
            "suspect",
            "mixed",
            (name,),
            tuple(numbers),
            f"numbers at {some(numbers)}, texts at {some(texts)}; all become categories",
            f"write the same codes everywhere, or {drop(name)}",
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
            f"if the same things have other names there, rename them; else {drop(name)}",
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
            f"turn them into days since one day, or {drop(name)}",
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
    if table.levels[name] is not None:
        return  # of few values, a shift says it
    total, same = int((~np.isnan(values)).sum()), []
    for client, part in zip(table.clients, table.parts(values), strict=True):
        own = part[~np.isnan(part)]
        if len(own) < FEW_SAMPLES or np.ptp(own) or own[0] == code:
            continue
        others, alike = total - len(own), int((values == own[0]).sum()) - len(own)
        counts = np.array([len(own), 0.0]), np.array([alike, others - alike])
        if others and chance_of_counts(*counts) < _SURE:
            same.append((client, float(own[0]), alike / others))
    if len(same) > max(1, len(table.clients) // 4):
        yield Finding(
            "note",
            "of clients",
            (name,),
            (),
            f"it has one value at {len(same)} of {len(table.clients)} clients",
            "it says more about clients than about samples, and one client alone learns nothing",
        )
    elif same:
        client, value, share = same[0]
        yield Finding(
            "suspect",
            "constant",
            (name,),
            tuple(one for one, _, _ in same),
            f"every cell at {client} holds {value:g}; elsewhere {share:.0%} do",
            f"if nobody measured it there, leave those cells empty, or {drop(name)}",
        )
