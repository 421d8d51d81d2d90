"""What the page of a client shows beyond the result: its samples, and how its model answers.

Both need the data, which a run folder does not hold; a command that has them writes counts and
measures, never samples, to ``clients.json`` of the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor.core.errors import PFLError
from sartor.data.federation import Federation
from sartor.data.split import SPLITS
from sartor.results import measures
from sartor.results.comparison import Comparison
from sartor.results.metrics import Array
from sartor.results.result import Result
from sartor.results.score_table import answered
from sartor.results.tables import jsonable
from sartor.runs.storage import FORMAT, read_ours, write_json

FILE = "clients.json"

MOST_NETWORKS = 4000
"""Networks of a method that answer, one for each client and run; further runs are left out."""

MOST_CLASSES = 12
"""The most classes with a table of true classes against answers."""

INDICATOR = " missing"
"""How the name of a column ends that says where a value was missing."""


def write_facts(
    folder: str | Path, comparison: Comparison, federations: Callable[[int], Federation]
) -> Path:
    """Write what the pages of the clients show to the folder of a run or a comparison.

    Args:
        folder: of the run or the comparison.
        comparison: the methods, with their models.
        federations: makes the federation of a seed.
    """
    every = comparison.expanded()
    first = next(iter(every.values()))
    federation = federations(first.runs[0].seed)
    content = {
        "format": FORMAT,
        "data": {name: _data_of(federation, k) for k, name in enumerate(federation.names)},
        "answers": {name: _answers(result, federations) for name, result in every.items()},
    }
    path = Path(folder) / FILE
    write_json(path, jsonable(content))
    return path


def read_facts(folder: Path | None) -> dict[str, Any]:
    """Return what :func:`write_facts` wrote, or nothing."""
    if folder is None or not (folder / FILE).is_file():
        return {}
    return dict(read_ours(folder / FILE))


def _data_of(federation: Federation, client: int) -> dict[str, Any]:
    """Return samples, classes and missing values of a client."""
    rows = {name: federation.split(name).of(client) for name in SPLITS}
    found: dict[str, Any] = {"samples": {name: len(own) for name, own in rows.items()}}
    if federation.task == "classification":
        names = federation.info.get("class_names") or list(map(str, range(federation.num_classes)))
        y = federation.y[torch.cat(list(rows.values()))]
        counts = torch.bincount(y, minlength=federation.num_classes).tolist()
        found["classes"] = dict(zip(map(str, names), counts, strict=True))
    columns = federation.info.get("features") or []
    if federation.x.ndim == 2 and len(columns) == federation.x.shape[1]:
        own = torch.cat(list(rows.values()))
        x = federation.x[own].numpy()
        missing = {
            name.removesuffix(INDICATOR): float((x[:, place] > 0).mean())
            for place, name in enumerate(columns)
            if name.endswith(INDICATOR) and len(own)
        }
        found |= {"missing": missing} if missing else {}
    return found


def _answers(result: Result, federations: Callable[[int], Federation]) -> dict[str, Any]:
    """Return client -> measures and answers on its test samples, means over runs."""
    if result.config.get("task") not in ("classification", "multilabel", "regression"):
        return {}
    most = max(1, MOST_NETWORKS // len(result.clients))
    runs = [k for k, lost in enumerate(result.diverged) if lost is None][:most]
    rows: dict[str, list[dict[str, float]]] = {}
    formats: dict[str, str] = {}
    pooled: dict[str, list[tuple[Array, Array]]] = {}
    try:
        for run in runs:
            federation = federations(result.runs[run].seed)
            table = result.score(federation, run=run)
            formats = {name: table.formats.get(name, "") for name in table.columns[2:]}
            some = [k for k in range(federation.num_clients) if len(federation.test.of(k))]
            for client, row in zip(some, table.rows, strict=False):  # two rows of means follow
                measured = dict(zip(table.columns[2:], row[2:], strict=True))
                rows.setdefault(result.clients[client], []).append(measured)
            if federation.task == "classification" and federation.num_classes <= MOST_CLASSES:
                for client in some:
                    network = result.model(client, run)
                    found = answered(result, network, federation, "test", client, run)
                    pooled.setdefault(result.clients[client], []).append(found)
    except PFLError:  # a network that cannot be asked again; the page does without
        return {}
    return {name: _of_client(own, formats, pooled.get(name, [])) for name, own in rows.items()}


def _of_client(
    rows: list[dict[str, float]], formats: Mapping[str, str], pairs: list[tuple[Array, Array]]
) -> dict[str, Any]:
    means = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row.get(name) is not None]
        known = [value for value in values if math.isfinite(value)]
        means[name] = float(np.mean(known)) if known else math.nan
    found: dict[str, Any] = {"runs": len(rows), "measures": means, "formats": dict(formats)}
    if pairs:
        matrices = [measures.confusion(y, scores) for y, scores in pairs]
        found["confusion"] = np.mean(matrices, axis=0)
        y, scores = (np.concatenate(part) for part in zip(*pairs, strict=True))
        if scores.shape[1] == 2:
            curve = measures.calibration_curve(y, scores[:, 1])
            found["calibration"] = np.stack(curve, axis=1)
    return found
