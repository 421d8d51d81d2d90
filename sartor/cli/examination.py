"""``sartor data FILE --client C --label L``: what an examination found, as tables for a person."""

from __future__ import annotations

import math
import shlex
from itertools import groupby

from sartor.cli.config import Experiment
from sartor.data.examination import Examination
from sartor.data.findings import listed
from sartor.data.shifts import CHANCE, LEAST, RANK, VARIATION, Shift
from sartor.results.tables import Table

MOST_CLIENTS = 20
"""Rows of the table of clients on a screen."""

MOST_COLUMNS = 15
"""Rows of the tables of columns on a screen."""

MOST_FINDINGS = 40
"""Rows of the table of findings on a screen."""

WIDEST = 8
"""With more clients than this, empty cells are shown for all of them together."""


def tables(found: Examination) -> list[Table]:
    """Return what there is, client by client and column by column, and then what to do."""
    made = [_clients(found), _empty(found), _shifts(found), _findings(found)]
    return [table for table in made if table is not None]


def _clients(found: Examination) -> Table:
    shown = found.clients[:MOST_CLIENTS]
    kinds = {"share": "percent", "empty cells": "percent", "samples": "count"}
    if found.task == "regression":
        columns = ["client", "samples", "median", "quartiles apart", "empty cells"]
        rows = [[c.name, c.samples, c.median, c.spread, c.empty] for c in shown]
    elif any(client.majority is not None for client in shown):
        columns = ["client", "samples", "classes", "largest class", "share", "empty cells"]
        rows = [
            [c.name, c.samples, c.classes, c.majority, c.majority_share, c.empty] for c in shown
        ]
    else:
        columns = ["client", "samples", "empty cells"]
        rows = [[c.name, c.samples, c.empty] for c in shown]
    label = ", ".join(found.label)
    title = (
        f"{found.source}: {found.rows:,} rows, {found.columns} columns besides client "
        f"({found.client}) and label ({label}: {found.task}), {len(found.clients)} clients"
    )
    notes = {"share": "of the largest class: the accuracy of always answering it"}
    notes = notes if "share" in columns else {}
    if len(found.clients) > MOST_CLIENTS:
        sizes = sorted(client.samples for client in found.clients)
        notes["more"] = (
            f"{len(found.clients) - MOST_CLIENTS} clients; all have {sizes[0]:,} to "
            f"{sizes[-1]:,} samples, half of them at most {sizes[len(sizes) // 2]:,} (--json: each)"
        )
    return Table(columns, rows, notes, kinds, title)


def _empty(found: Examination) -> Table | None:
    if not found.empty:
        return None
    sizes = {client.name: client.samples for client in found.clients}
    total = {
        name: sum(share * sizes[client] for client, share in shares.items()) / found.rows
        for name, shares in found.empty.items()
    }
    order = sorted(total, key=lambda name: -total[name])
    columns, rows = ["column", "all"], [[name, total[name]] for name in order[:MOST_COLUMNS]]
    if len(sizes) <= WIDEST:
        columns += list(sizes)
        rows = [[*row, *found.empty[str(row[0])].values()] for row in rows]
    else:
        columns += ["least", "most", "at", "clients without a value"]
        for row in rows:
            shares = found.empty[str(row[0])]
            most = max(shares, key=shares.__getitem__)
            without = sum(share == 1 for share in shares.values())
            row += [min(shares.values()), shares[most], most, without]
    kinds = {name: "percent" for name in columns if name not in ("column", "at")}
    kinds["clients without a value"] = "count"
    return Table(columns, rows, _rest(len(order), "column"), kinds, "Empty cells")


def _shifts(found: Examination) -> Table | None:
    flagged = [shift for shift in found.shifts if shift.is_flagged]
    moved = list(dict.fromkeys(shift.column for shift in flagged))
    compared = len(dict.fromkeys(shift.column for shift in found.shifts))
    if not compared:
        return None
    title = f"Shift between clients: {len(moved)} of {compared} columns, beyond chance"
    rows = []
    by_column = sorted(flagged, key=lambda shift: moved.index(shift.column))
    for name, group in groupby(by_column, key=lambda shift: shift.column):
        several = list(group)
        top, here = several[0], f"{several[0].client}"
        more = len(several) - 1
        rows.append(
            [
                f"{name} (label)" if name in found.label else name,
                here + (f" and {more} more" if more and len(found.clients) > 2 else ""),
                top.measure,
                round(top.distance, 2),
                *_sides(top),
            ]
        )
    columns = ["column", "client", "measure", "distance", "there", "elsewhere"]
    notes = {
        **_rest(len(rows), "column"),
        RANK: "Cohen's d from ranks; there and elsewhere: the medians",
        VARIATION: "half the sum of differences of the levels' shares: 0 alike, 1 none in common",
        "flagged": f"{RANK} of at least {LEAST[RANK]}, {VARIATION} of {LEAST[VARIATION]}, and a "
        f"chance of at most {CHANCE:.0%} after counting all comparisons (--json: all of them)",
        "what to do": "where it is real, clients need models of their own: sartor advise; where it "
        "is the way of writing, the findings below say how to fix it",
    }
    if not rows:
        one = [f"none of {compared} columns, beyond chance"]
        return Table(["shift between clients"], [one], {"flagged": notes["flagged"]})
    return Table(columns, rows[:MOST_COLUMNS], notes, title=title)


def _sides(shift: Shift) -> tuple[str, str]:
    if shift.shares is not None:
        return tuple(f"{shift.here}: {share:.0%}" for share in shift.shares)  # type: ignore[return-value]
    sides = [float(side) for side in (shift.here, shift.elsewhere) if side is not None]
    return tuple(f"{side:.4g}" if math.isfinite(side) else "–" for side in sides)  # type: ignore[return-value]


def _findings(found: Examination) -> Table | None:
    if not found.findings:
        return Table(["findings"], [["nothing to fix was found"]])
    rows = [
        [
            one.state,
            one.kind,
            ", ".join(one.columns[:3]) + (", ..." if len(one.columns) > 3 else ""),
            one.found,
            one.fix,
        ]
        for one in found.findings[:MOST_FINDINGS]
    ]
    left = len(found.findings) - MOST_FINDINGS
    notes = {"more": f"{left} findings (--json)"} if left > 0 else {}
    faults = sum(one.state == "fault" for one in found.findings)
    if faults:
        notes["fault"] = "training refuses the table until it is fixed"
    return Table(["", "what", "column", "found", "what to do"], rows, notes, title="Findings")


def _rest(count: int, what: str) -> dict[str, str]:
    return {"more": f"{count - MOST_COLUMNS} {what}s (--json)"} if count > MOST_COLUMNS else {}


def command(found: Examination, experiment: Experiment, *, is_folder: bool) -> str:
    """Return the command that trains on the table, with the flags that settle what flags can."""
    words = ["--data", experiment.data, *(["--standardise"] if is_folder else [])]
    for flag in ("client", "label", "task"):
        if (value := getattr(experiment, flag)) is not None:
            words += [f"--{flag}", str(value)]
    settled = found.flags()
    new = dict(zip(settled[::2], settled[1::2], strict=True))
    for name in ("drop", "categories"):
        both = [listed(getattr(experiment, name)), new.get(f"--{name}", "")]
        words += [f"--{name}", ",".join(filter(None, both))] if any(both) else []
    for name, default in (("missing", "error"), ("decimal", "auto")):
        value = new.get(f"--{name}", getattr(experiment, name))
        words += [f"--{name}", value] if value != default else []
    return shlex.join(["sartor", "run", "auto", *words])
