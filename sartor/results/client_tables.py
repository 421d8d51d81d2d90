"""Tables of the clients of a result: what each reached, gained, and how evenly it is spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sartor.results import metrics
from sartor.results.evenness import Fairness, fairness
from sartor.results.headline import HeadlineMetric
from sartor.results.readings import POINT_WORDS, Readings
from sartor.results.tables import Table

METRIC_COLUMNS = ("run", "round", "client", "point", "split", "accuracy", "loss", "count")
"""The columns of metrics.csv."""


def client_table(result: Readings, run: int | None) -> Table:
    """Return a row for every client; see ``Result.per_client``."""
    points = [point for point in POINT_WORDS if (point, "test") in result.scores]
    indices = result._indices(run)
    chose = any(result.ended_with(index) for index in indices)
    rows = []
    for index in indices:
        words = result.ended_with(index)
        count = result._scores().count[index]
        at = {point: result.client_measure(point, index) for point in points}
        fine = result.diverged[index] is None
        loss = result._scores().mean_loss(index)[-1]
        for client, name in enumerate(result.clients):
            counted = result.label_counts if result.counts_samples else None
            labels = None if counted is None else counted[index][client]
            rows.append(
                [
                    *([index] if len(indices) > 1 else []),
                    name,
                    None if labels is None else int(labels.sum()),
                    None if labels is None else int((labels > 0).sum()),
                    int(count[client]),
                    *(float(at[point][client]) for point in points),
                    float(loss[client]) if fine else None,
                    *([words[client] if words else None] if chose else []),
                ]
            )
    columns = ["client", "train samples", "classes", "test samples"]
    columns += [f"{result.measure} {point}" for point in points]
    columns += ["loss"] + ["ended with"] * chose
    return Table(
        ["run", *columns] if len(indices) > 1 else columns,
        rows,
        notes={"headline": f"{result.headline} ({POINT_WORDS[result.headline]})"},
        formats={f"{result.measure} {point}": result.headline_metric.kind for point in points},
        title=f"{result.method}: clients",
    )


def gain_table(
    result: Readings, reference: Readings, partner: Sequence[int], run: int | None
) -> Table:
    """Return what every client gains over training alone; see ``Result.gain``.

    Args:
        result: the clients, federated.
        reference: the same clients, each alone.
        partner: for every run of the result the run of the reference to compare it with.
        run: index of a run; None for all of them.
    """
    indices = result._indices(run)
    ended = {index: result.ended_with(index) for index in indices}
    chose = any(ended.values())
    rows: list[list[Any]] = []
    reported = result.ended_with_words(*indices)
    gained: list[tuple[float, float]] = []
    headline_metric = result.headline_metric
    for index in indices:
        words = ended[index]
        alone = reference.client_measure(run=partner[index])
        federated = result.client_measure(run=index)
        count = result._scores().count[index]
        for client, name in enumerate(result.clients):
            a, f = float(alone[client]), float(federated[client])
            row = [name, int(count[client]), a, f, headline_metric.gain(f, a)]
            row += [words[client] if words else None] * chose
            rows.append([index, *row] if len(indices) > 1 else row)
            gained.append((headline_metric.sign * f, headline_metric.sign * a))
    gains = metrics.gain([f for f, _ in gained], [a for _, a in gained])
    columns = ["client", "test samples", "alone", "federated", "gain"] + ["ended with"] * chose
    return Table(
        ["run", *columns] if len(indices) > 1 else columns,
        rows,
        notes={
            "mean gain": gains.mean,
            "minimum gain": gains.minimum,
            "fraction hurt": gains.fraction_hurt,
            "clients hurt": gains.hurt,
            **(
                {"measure": f"{headline_metric.name}; the gain is what it falls by"}
                if headline_metric.sign < 0
                else {}
            ),
            **({} if reported is None else {"ended with": reported}),
        },
        formats={
            "alone": headline_metric.kind,
            "federated": headline_metric.kind,
            "gain": headline_metric.gain_kind,
            "mean gain": headline_metric.gain_kind,
            "minimum gain": headline_metric.gain_kind,
            "fraction hurt": "percent",
        },
        title=f"{result.method}: gain over training alone",
    )


def fairness_by_run(result: Readings, run: int | None) -> Table:
    """Return a row for every run; see ``Result.fairness``."""
    indices = result._indices(run)
    rows = [
        [f"run {index}, seed {result.runs[index].seed}", *fairness_of(result, index)[:-2]]
        for index in indices
    ]
    found = fairness_of(result, indices[0])
    title = f"{result.method}: fairness"
    return fairness_table(["run"], rows, found.excluded, title, result.headline_metric)


def fairness_of(result: Readings, run: int) -> Fairness:
    """Return how evenly a run treats the clients; of errors the largest is the worst."""
    found = fairness(result.client_measure(run=run), result._scores().count[run])
    if result.headline_metric.sign > 0:
        return found
    return found._replace(
        worst=found.best,
        worst_decile=found.best_decile,
        best_decile=found.worst_decile,
        best=found.worst,
    )


def fairness_table(
    first: list[str],
    rows: list[list[Any]],
    excluded: int,
    title: str,
    headline_metric: HeadlineMetric,
) -> Table:
    """Return a table of :class:`~sartor.results.evenness.Fairness` below its first column."""
    names = ["mean", "std", "worst", "worst decile", "best decile", "best"]
    notes: dict[str, Any] = {
        "std": "over clients, not over repeats",
        "even is": "Jain's index 1, Gini 0, entropy 1",
    }
    if headline_metric.sign < 0:
        notes["shown"] = (
            f"{headline_metric.name}, of which less is better: the worst is the largest"
        )
    if excluded:
        notes["worst, best and deciles"] = (
            f"among clients with at least {metrics.FLOOR} test samples; {excluded} left out"
        )
    formats = {
        **dict.fromkeys(names, headline_metric.kind),
        **dict.fromkeys(("Jain", "Gini", "entropy"), "index"),
    }
    return Table(
        [*first, *names, "Jain", "Gini", "entropy"], rows, notes=notes, formats=formats, title=title
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
            accuracy = np.where(valid & result.headline_metric.is_share, right, np.nan)
            loss = np.where(valid, scores.mean_loss(run), np.nan)
            size = evaluations * clients
            parts["run"].append(np.full(size, run))
            parts["round"].append(np.repeat(scores.rounds, clients))
            parts["client"].append(np.tile(names, evaluations))
            parts["point"].append(np.full(size, point, dtype=object))
            parts["split"].append(np.full(size, split, dtype=object))
            parts["accuracy"].append(accuracy.ravel())
            parts["loss"].append(loss.ravel())
            parts["count"].append(np.tile(np.asarray(scores.count[run]), evaluations))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
