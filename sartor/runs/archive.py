"""A result as tensors and JSON, and as rows of tables: what a run folder holds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sartor.results.result import Result
from sartor.results.scores import COUNTERS, ONCE, Ledger, Run, Scores
from sartor.results.tables import jsonable


def pack_result(result: Result) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a result as a tree, and the rest as a JSON-able dict."""
    scores = {f"{point}.{split}": one.arrays() for (point, split), one in result.scores.items()}
    counters = {name: getattr(result.ledger, name) for name in (*COUNTERS, *ONCE)}
    pictures, plain = {}, []
    for position, snapshot in enumerate(result.snapshots):
        arrays = {k: v for k, v in snapshot.items() if isinstance(v, np.ndarray | Tensor)}
        pictures[str(position)] = arrays
        plain.append({k: v for k, v in snapshot.items() if k not in arrays})
    tree = {"scores": scores, "ledger": counters, "snapshots": pictures}
    if result.label_counts is not None:
        tree["labels"] = {"counts": result.label_counts}
    meta = {
        "method": result.method,
        "headline": result.headline,
        "runs": [vars(run) for run in result.runs],
        "clients": list(result.clients),
        "rounds": {f"{p}.{s}": scores.rounds for (p, s), scores in result.scores.items()},
        "seconds": result.ledger.seconds,
        "diverged": result.diverged,
        "stopped": result.stopped,
        "snapshots": plain,
        "choices": list(result.choices),
        "config": result.config,
    }
    return tree, jsonable(meta)


def unpack_result(tree: Mapping[str, Any], meta: Mapping[str, Any]) -> Result:
    """Return the result that :func:`pack_result` took apart."""
    tree = to_numpy(tree)
    scores = {}
    for key, arrays in tree["scores"].items():
        point, split = key.split(".")
        scores[point, split] = Scores(rounds=list(meta["rounds"][key]), **arrays)
    return Result(
        method=meta["method"],
        headline=meta["headline"],
        runs=[Run(**run) for run in meta["runs"]],
        clients=meta["clients"],
        scores=scores,
        ledger=Ledger(seconds=dict(meta["seconds"]), **tree["ledger"]),
        label_counts=tree.get("labels", {}).get("counts"),
        diverged=meta["diverged"],
        stopped=meta.get("stopped"),
        snapshots=[
            {**plain, **tree["snapshots"].get(str(position), {})}
            for position, plain in enumerate(meta["snapshots"])
        ],
        choices=meta.get("choices", ()),
        config=meta["config"],
    )


def metrics_csv(result: Result) -> str:
    """Return the table of metrics, one row per run, round and client."""
    columns = result.metric_columns()
    return _csv(columns, zip(*(column.tolist() for column in columns.values()), strict=True))


def ledger_csv(result: Result) -> str:
    """Return the ledger: counters per run and round, seconds of the pass."""
    ledger = result.ledger
    header = ["run", "round", *COUNTERS, *ONCE, *(f"seconds_{phase}" for phase in ledger.seconds)]
    rows: list[list[Any]] = []
    for run in range(len(result.runs)):
        for t in range(ledger.num_rounds):
            counts = [int(getattr(ledger, name)[run][t]) for name in COUNTERS]
            once = [int(getattr(ledger, name)[run]) if t == 0 else 0 for name in ONCE]
            seconds = [float(s[t]) if t < len(s) else None for s in ledger.seconds.values()]
            rows.append([run, t, *counts, *once, *seconds])
    return _csv(header, rows)


def _csv(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return CSV; a missing number (None, NaN) is an empty cell."""
    out = io.StringIO()
    csv.writer(out).writerows(
        ["" if value is None or value != value else value for value in row]
        for row in (header, *rows)
    )
    return out.getvalue()


def to_numpy(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict of tensors as numpy arrays."""
    return {
        key: value.numpy() if isinstance(value, Tensor) else to_numpy(value)
        for key, value in tree.items()
    }
