"""The long tables of a report: every client, what was spent, what happened on the network."""

from __future__ import annotations

from typing import Any

import numpy as np

from sartor.report.layout import MOST_ROWS
from sartor.results.comparison import Comparison
from sartor.results.readings import POINT_WORDS
from sartor.results.scores import COUNTERS, PHASES
from sartor.results.tables import Table


def client_table(comparison: Comparison) -> Table:
    """Return one row per client (and run): its data, and its metric under every method."""
    first = next(iter(comparison.values()))
    several = len(first.runs) > 1 and all(
        [run.seed for run in result.runs] == [run.seed for run in first.runs]
        for result in comparison.values()
    )
    chosen = range(len(first.runs)) if several else range(1)
    about = ["train samples", "classes"] if first.held(0) else []
    columns = ["run"] * several + ["client", *about, "test samples"]
    points = [
        (f"{name} {point}", result, point)
        for name, result in comparison.items()
        for point in POINT_WORDS
        if (point, "test") in result.scores
    ]
    chose = {name: r for name, r in comparison.items() if any(map(r.ended_with, chosen))}
    rows: list[list[Any]] = []
    for run in chosen:
        ended = [result.ended_with(run) for result in chose.values()]
        measured = [result.client_measure(point, run) for _, result, point in points]
        count = first.scores[first.headline, "test"].count[run]
        held = first.held(run)
        for client, name in enumerate(first.clients):
            data = held[client] if held else ()
            values = [float(column[client]) for column in measured]
            words = [column[client] if column else None for column in ended]
            rows.append([*([run] * several), name, *data, int(count[client]), *values, *words])
    notes = {}
    if len(rows) > MOST_ROWS:
        notes["shown"] = f"the first {MOST_ROWS} of {len(rows)} rows; metrics.csv has all of them"
    if not several and len(first.runs) > 1:
        notes["shown"] = "run 0; metrics.csv has the others"
    names = [label for label, _, _ in points]
    formats = dict.fromkeys(names, comparison.headline_metric.kind)
    ends = [f"{name} ended with" for name in chose]
    return Table([*columns, *names, *ends], rows[:MOST_ROWS], notes=notes, formats=formats)


def ledger_table(comparison: Comparison) -> Table:
    """Return the costs of every method: totals of run 0, and medians of the times."""
    rows = []
    phases = [p for p in PHASES if any(p in r.ledger.seconds for r in comparison.values())]
    for name, result in comparison.items():
        ledger = result.ledger
        trips, down, up, gradients, forward = (float(ledger.total(c)[0]) for c in COUNTERS)
        once, extra = float(ledger.setup_bytes[0]), float(ledger.setup_gradients[0])
        row = [name, trips / max(ledger.num_rounds, 1), down / 1e6, up / 1e6, once / 1e6]
        row += [(down + up) / (trips or 1) / 1024, gradients + extra, extra, forward]
        times = (ledger.seconds.get(phase) for phase in phases)
        rows.append([*row, *(1000 * float(np.median(t)) if t else None for t in times)])
    counts = ["gradient evaluations", "of them once", "forward evaluations"]
    columns = {
        **{"method": "", "clients per round": "count"},
        **dict.fromkeys(("MB down", "MB up", "MB once", "KiB per client and round"), "megabytes"),
        **dict.fromkeys([*counts, *(f"ms {phase}" for phase in phases)], "count"),
    }
    notes = {
        "counted": "totals of run 0; a gradient evaluation is one sample in one backward pass, and "
        "what is counted once happens before the first round",
        "timed": "median wall-clock time of a round, all runs together; evaluation is separate",
    }
    return Table(list(columns), rows, notes=notes, formats=columns)


def event_table(comparison: Comparison) -> Table:
    """Return what went wrong on the network: which client, in which round, and why."""
    events = network_events(comparison)
    rows = [[int(e["round"]) + 1, str(e["client"]), str(e["why"])] for e in events[:MOST_ROWS]]
    notes = {}
    if len(events) > MOST_ROWS:
        notes["shown"] = f"the first {MOST_ROWS} of {len(events)}"
    return Table(["round", "client", "what happened"], rows, notes=notes, formats={})


def network_events(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the events of all runs that were trained over a network."""
    found = [result.config.get("network", {}) for result in comparison.values()]
    return [event for network in found for event in network.get("events", [])]
