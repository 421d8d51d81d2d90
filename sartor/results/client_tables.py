"""Tables of the clients of a result: what each reached, gained, and how evenly it is spread."""

from __future__ import annotations

from typing import Any

import numpy as np

from sartor.results import metrics
from sartor.results.evenness import Fairness, fairness
from sartor.results.gains import largest_class
from sartor.results.headline import ACCURACY, HeadlineMetric, has_accuracy
from sartor.results.readings import POINT_WORDS, Readings
from sartor.results.tables import Table

METRIC_COLUMNS = ("run", "round", "client", "point", "split", "accuracy", "loss", "count")
"""The columns of metrics.csv."""


def client_table(result: Readings, run: int | None) -> Table:
    """Return a row for every client; see ``Result.per_client``."""
    points = [point for point in POINT_WORDS if (point, "test") in result.scores]
    indices = result._indices(run)
    several = len(indices) > 1
    ended = {index: result.ended_with(index) for index in indices}
    chose = any(ended.values())
    shows_class = result.headline_metric is ACCURACY and result.held(0) is not None
    rows = []
    for index in indices:
        words, held = ended[index], result.held(index)
        count = result._scores().count[index]
        measured = [result.client_measure(point, index) for point in points]
        fine = result.diverged[index] is None
        loss = result._scores().mean_loss(index)[-1]
        largest = largest_class(result, [index])
        for client, name in enumerate(result.clients):
            row = [index] * several + [name, *(held[client] if held else (None, None))]
            row += [float(largest[client])] * shows_class
            row += [int(count[client]), *(float(column[client]) for column in measured)]
            row.append(float(loss[client]) if fine else None)
            rows.append(row + [words[client] if words else None] * chose)
    measures = [f"{result.measure} {point}" for point in points]
    columns = ["run"] * several + ["client", "train samples", "classes"]
    columns += ["largest class"] * shows_class + ["test samples"]
    return Table(
        [*columns, *measures, "loss"] + ["ended with"] * chose,
        rows,
        notes={"headline": f"{result.headline} ({POINT_WORDS[result.headline]})"},
        formats={
            **dict.fromkeys(measures, result.headline_metric.kind),
            "largest class": "percent",
        },
        title=f"{result.method}: clients",
    )


def fairness_by_run(result: Readings, run: int | None) -> Table:
    """Return a row for every run; see ``Result.fairness``."""
    indices = result._indices(run)
    found = {f"run {k}, seed {result.runs[k].seed}": fairness_of(result, k) for k in indices}
    rows = [[name, *one[:-2]] for name, one in found.items()]
    excluded = next(iter(found.values())).excluded
    return fairness_table(
        "run", rows, excluded, f"{result.method}: fairness", result.headline_metric
    )


def fairness_of(result: Readings, run: int) -> Fairness:
    """Return how evenly a run treats the clients; of errors the largest is the worst."""
    found = fairness(result.client_measure(run=run), result._scores().count[run])
    if result.headline_metric.sign > 0:
        return found
    ends = ("worst", "worst_decile", "best_decile", "best")
    return found._replace(**{a: getattr(found, b) for a, b in zip(ends, ends[::-1], strict=True)})


def fairness_table(
    first: str, rows: list[list[Any]], excluded: int, title: str, metric: HeadlineMetric
) -> Table:
    """Return a table of :class:`~sartor.results.evenness.Fairness` below its first column."""
    names = ["mean", "std", "worst", "worst decile", "best decile", "best"]
    notes: dict[str, Any] = {
        "std": "over clients, not over repeats",
        "even is": "Jain's index 1, Gini 0, entropy 1",
    }
    if metric.sign < 0:
        notes["shown"] = f"{metric.name}, of which less is better: the worst is the largest"
    if excluded:
        notes["worst, best and deciles"] = (
            f"among clients with at least {metrics.FLOOR} test samples; {excluded} left out"
        )
    formats = {
        **dict.fromkeys(names, metric.kind),
        **dict.fromkeys(("Jain", "Gini", "entropy"), "index"),
    }
    return Table(
        [first, *names, "Jain", "Gini", "entropy"], rows, notes=notes, formats=formats, title=title
    )


def metric_columns(result: Readings) -> dict[str, Any]:
    """Return the columns of metrics.csv; see ``Result.metric_columns``."""
    parts: dict[str, list[Any]] = {name: [] for name in METRIC_COLUMNS}
    names = np.asarray(result.clients, dtype=object)
    for (point, split), scores in result.scores.items():
        evaluations, clients = len(scores.rounds), len(result.clients)
        for run in range(len(result.runs)):
            valid = result._valid(point, split, run)[:, None]
            right = scores.accuracy(run)  # without meaning for a task that has no right answers
            size = evaluations * clients
            columns = (
                np.full(size, run),
                np.repeat(scores.rounds, clients),
                np.tile(names, evaluations),
                np.full(size, point, dtype=object),
                np.full(size, split, dtype=object),
                np.where(valid & has_accuracy(result.config), right, np.nan).ravel(),
                np.where(valid, scores.mean_loss(run), np.nan).ravel(),
                np.tile(np.asarray(scores.count[run]), evaluations),
            )
            for name, column in zip(METRIC_COLUMNS, columns, strict=True):
                parts[name].append(column)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
