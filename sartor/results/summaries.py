"""A run in a few lines: its numbers as JSON-able values, and what a prompt or a notebook shows."""

from __future__ import annotations

import html
from typing import Any

from sartor.compose.weighting import NAME
from sartor.results import metrics
from sartor.results.client_tables import client_table
from sartor.results.ending import still_falling
from sartor.results.readings import POINT_WORDS, Readings
from sartor.results.scores import COUNTERS, Run, varying
from sartor.results.selection import selection_of
from sartor.results.tables import Table, format_cell, jsonable

MOST_ROWS = 40
"""Clients that a notebook shows of a result."""


def summarise(result: Readings, run: int) -> dict[str, Any]:
    """Return the numbers of one run; see ``Result.summary``."""
    worst, chosen = result._worst(run), result.runs[run]
    total = {name: int(result.ledger.total(name)[run]) for name in COUNTERS}
    ended = result.ended_with(run)
    reported: dict[str, Any] = {}
    if ended is not None:
        reported["ended_with"] = {word: ended.count(word) for word in result.choices}
        reported["ended_with_by_client"] = dict(zip(result.clients, ended, strict=True))
    if "selection" in result.config:
        reported["selection"] = selection_of(result, run)
    points = {
        f"accuracy_{point}": result.curve(point, run=run)[1][-1]
        for point in POINT_WORDS
        if (point, "test") in result.scores
    }
    return dict(
        jsonable(
            {
                "method": result.method,
                "headline": result.headline,
                "measure": result.measure,
                "pooled_measure": result.pooled_measure(run),
                "accuracy": result._accuracy_of("last", run),
                "accuracy_best": result._accuracy_of("best", run),
                "accuracy_macro": result._accuracy_of("macro", run),
                "accuracy_last10": result._accuracy_of("last10", run),
                "accuracy_best_val": result._accuracy_of("best_val", run),
                **points,
                "worst_client": result.headline_metric.sign * worst.value,
                "worst_client_name": result.clients[worst.client] if worst.client >= 0 else None,
                "clients_below_floor": worst.excluded,
                "bytes_up": total["bytes_up"],
                "bytes_down": total["bytes_down"],
                "bytes_setup": int(result.ledger.setup_bytes[run]),
                "gradient_evaluations": total["gradient_evaluations"],
                "gradient_evaluations_setup": int(result.ledger.setup_gradients[run]),
                "forward_evaluations": total["forward_evaluations"],
                "forward_evaluations_setup": int(result.ledger.setup_forward[run]),
                "seconds": result.ledger.total_seconds / len(result.runs),
                "seconds_all_runs": result.ledger.total_seconds,
                "seed": chosen.seed,
                "hyper": chosen.hyper,
                "options": chosen.options,
                "rounds": (result.stopped[run] or {"round": result.ledger.num_rounds})["round"],
                "clients": len(result.clients),
                "diverged": result.diverged[run],
                "stopped": result.stopped[run],
                "still_falling": still_falling(result, run),
                **reported,
            }
        )
    )


def group_runs(result: Readings) -> dict[str, list[int]]:
    """Return the runs that are repeats of one another; see ``Result.groups``."""
    keys = [_settings(result, run) for run in result.runs]
    names = varying(keys)
    found: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        parts = [f"{name}={format_cell(key.get(name))}" for name in names]
        found.setdefault(" ".join([result.method, *parts]), []).append(index)
    return found


def _settings(result: Readings, run: Run) -> dict[str, Any]:
    """Return what was set for a run; what `auto` chose for it was not."""
    if "selection" in result.config:
        return dict(run.options)
    # Weights that follow from each client's samples differ between seeds.
    own = {k for k, v in run.hyper.items() if k.startswith(NAME) and isinstance(v, list)}
    return {**run.options, **{k: v for k, v in run.hyper.items() if k not in own}}


def one_line(result: Readings) -> str:
    """Return method, accuracy, worst client and cost in one line."""
    kind = result.headline_metric.kind
    unit = " %" if result.headline_metric.is_share else ""
    accuracy = format_cell(metrics.spread(result._each(result.pooled_measure)), kind)
    worst = format_cell(metrics.spread(result._each(result.worst_measure)), kind)
    megabytes = format_cell(metrics.spread(result.megabytes), "megabytes")
    lost = sum(entry is not None for entry in result.diverged)
    runs = f", {len(result.runs)} runs" if len(result.runs) > 1 else ""
    early = sum(entry is not None for entry in result.stopped)
    return (
        f"<Result {result.method}: {result.measure} {accuracy}{unit}, worst client {worst}{unit}, "
        f"{len(result.clients)} clients, {result.ledger.num_rounds} rounds{runs}, {megabytes} MB"
        f"{f', {early} stopped early' if early else ''}{f', {lost} diverged' if lost else ''}>"
    )


def notebook_page(result: Readings) -> str:
    """Return what a notebook shows: the line, and a table of the clients, or of the runs."""
    line = html.escape(one_line(result)[1:-1])
    if len(result.runs) > 1:
        return f"<p>{line}</p>{runs_table(result)._repr_html_()}"
    table = client_table(result, 0)
    more = max(len(table) - MOST_ROWS, 0)
    if more:  # the page stays short; per_client() has them all
        table.rows = table.rows[:MOST_ROWS]
        table.notes["clients not shown"] = more
    return f"<p>{line}</p>{table._repr_html_()}"


def runs_table(result: Readings) -> Table:
    """Return one row per run: what sets it apart, accuracy, worst client and rounds."""
    keys = [{**_settings(result, run), "seed": run.seed} for run in result.runs]
    names = varying(keys)
    reported = ("pooled_measure", "worst_client", "rounds")
    summaries = [summarise(result, run) for run in range(len(result.runs))]
    rows = [
        [run, *(key.get(name) for name in names), *(one[name] for name in reported)]
        for run, (key, one) in enumerate(zip(keys, summaries, strict=True))
    ]
    kind = result.headline_metric.kind
    return Table(
        ["run", *names, result.measure, "worst client", "rounds"],
        rows,
        formats={result.measure: kind, "worst client": kind},
        title=f"{result.method}: runs",
    )
