"""All measures of a task, for every client: what ``Result.score`` returns.

Sensitivity and specificity are those at the threshold that is best on validation data (Youden): of
the client, where it has both classes there, else of all clients. Without validation data it is ½.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from sartor.core.errors import ConfigError
from sartor.core.task import PADDING
from sartor.data.federation import Federation
from sartor.results import measures
from sartor.results.metrics import Array
from sartor.results.readings import Readings
from sartor.results.serving import answer
from sartor.results.tables import Table

PLAIN = ("RMSE", "MAE", "R²", "perplexity")
SHARES = (
    "accuracy",
    "balanced accuracy",
    "largest class",
    "sensitivity",
    "specificity",
    "exact match",
    "labels right",
    "tokens right",
)
POOLED, MEAN = "all samples", "mean over clients"
"""The last two rows: of all samples together, and each client alike."""

OF_CHANCES: dict[str, measures.Function] = {
    "AUROC": measures.auroc,
    "average precision": measures.average_precision,
    "Brier": measures.brier,
    "log loss": measures.log_loss,
    "calibration error": measures.calibration_error,
}
FUNCTIONS: dict[str, dict[str, measures.Function]] = {
    "classification": {
        "accuracy": measures.accuracy,
        "balanced accuracy": measures.balanced_accuracy,
        "F1": measures.f1,
        **OF_CHANCES,
    },
    "multilabel": {
        "exact match": measures.accuracy,
        "labels right": measures.labels_right,
        "micro F1": measures.micro_f1,
        "macro F1": measures.f1,
        **OF_CHANCES,
    },
    "regression": {"RMSE": measures.rmse, "MAE": measures.mae, "R²": measures.r_squared},
}


def measure(task: str, y: Array, scores: Array, weight: Array | None = None) -> dict[str, float]:
    """Return the measures of a task, from labels and from scores as ``Prediction`` has them."""
    if task == "next-token":
        true = y != PADDING
        chance = np.take_along_axis(scores, y[..., None], -1)[..., 0][true]
        return {
            "tokens right": float((scores.argmax(-1) == y)[true].mean()),
            "perplexity": float(np.exp(-np.log(np.maximum(chance, 1e-30)).mean())),
        }
    return {name: function(y, scores, weight) for name, function in FUNCTIONS[task].items()}


def formats_of(names: Sequence[str]) -> dict[str, str]:
    """Return how measures are shown: shares in per cent, other bounded ones with three decimals."""
    known = [name for name in names if name not in PLAIN]
    return {name: "percent" if name in SHARES else "score" for name in known}


def score(
    result: Readings,
    network: Callable[[int], nn.Module],
    federation: Federation,
    split: str,
    run: int,
) -> Table:
    """Return a row of measures for every client that has samples; see ``Result.score``."""
    if tuple(federation.names) != result.clients:
        raise ConfigError("The federation has other clients than this result; give the same one.")
    task = federation.task
    answers = {
        client: answered(result, network(client), federation, split, client, run)
        for client in range(federation.num_clients)
        if len(federation.split(split).of(client))
    }
    if not answers:
        raise ConfigError(
            f"No client has samples in the split {split!r}; take another, or hold some out when "
            "the federation is made."
        )
    found = {c: measure(task, y, scores) for c, (y, scores) in answers.items()}
    if task == "classification":
        for client, (y, _) in answers.items():
            most = int(federation.label_counts("train")[client].argmax())
            found[client] = {"largest class": float((y == most).mean()), **found[client]}
    if task == "classification" and next(iter(answers.values()))[1].shape[1] == 2:
        cuts = _thresholds(result, network, federation, [*answers], run)
        for client, (y, scores) in answers.items():
            pair = measures.rates(y, scores[:, 1], cuts[client])
            found[client] |= {"sensitivity": pair[0], "specificity": pair[1]}
            found[client]["threshold"] = cuts[client]
    rows: list[list[Any]] = [
        [federation.names[c], len(answers[c][0]), *values.values()] for c, values in found.items()
    ]
    columns = [*next(iter(found.values()))]
    if len(rows) > 1:
        rows += _all_clients(task, answers, columns, rows)
    formats = formats_of(columns)
    notes: dict[str, Any] = {}
    if "sensitivity" in columns:
        notes["positive class"] = str((result.facts().get("class_names") or ["0", "1"])[1])
    if "largest class" in columns:
        notes["largest class"] = "accuracy of always answering the client's most frequent class"
    title = f"{result.method}: {task}, {split}"
    return Table(["client", "samples", *columns], rows, formats=formats, title=title, notes=notes)


def answered(
    result: Readings, network: nn.Module, federation: Federation, split: str, client: int, run: int
) -> tuple[Array, Array]:
    """Return labels of a client's samples, in the units of the data, and predictions for them."""
    own = federation.split(split).of(client)
    found = answer(result, network, federation.x[own], run)
    y = federation.y[own].numpy()
    if federation.task == "regression":
        mean, scale = result.target(run)
        y = y * scale + mean
    return y, found.scores


def _thresholds(
    result: Readings,
    network: Callable[[int], nn.Module],
    federation: Federation,
    clients: list[int],
    run: int,
) -> dict[int, float]:
    """Return the threshold of every client, from validation data."""
    held = {
        c: answered(result, network(c), federation, "val", c, run)
        for c in clients
        if len(federation.val.of(c))
    }
    if not held:
        return dict.fromkeys(clients, 0.5)
    every = [np.concatenate(part) for part in zip(*held.values(), strict=True)]
    common = measures.best_threshold(every[0], every[1][:, 1])
    return {
        c: measures.best_threshold(held[c][0], held[c][1][:, 1])
        if c in held and len(np.unique(held[c][0])) == 2
        else common
        for c in clients
    }


def _all_clients(
    task: str, answers: dict[int, tuple[Array, Array]], columns: list[str], rows: list[list[Any]]
) -> list[list[Any]]:
    """Return the measures of all samples together, and their means over clients."""
    y, scores = (np.concatenate(part) for part in zip(*answers.values(), strict=True))
    pooled = measure(task, y, scores)
    table = np.asarray([row[2:] for row in rows], dtype=np.float64)
    means = [
        float(column[np.isfinite(column)].mean()) if np.isfinite(column).any() else math.nan
        for column in table.T
    ]
    sizes = [len(labels) for labels, _ in answers.values()]
    return [
        [POOLED, sum(sizes), *(pooled.get(name) for name in columns)],
        [MEAN, float(np.mean(sizes)), *means],
    ]


def confusion_table(result: Readings, y: Array, p: Array, split: str) -> Table:
    """Return how often each class was answered with each."""
    names = result.facts().get("class_names") or [str(k) for k in range(p.shape[1])]
    rows = [[f"true {a}", *row] for a, row in zip(names, measures.confusion(y, p), strict=True)]
    columns = [f"answered {name}" for name in names]
    title = f"{result.method}: confusion, {split}"
    return Table(["", *columns], rows, formats=dict.fromkeys(columns, "count"), title=title)


def calibration_table(result: Readings, y: Array, p: Array, split: str) -> Table:
    """Return mean probability, share of positives and samples of every bin that is not empty.

    Of more than two classes it is the probability of the likeliest, and whether it is right.
    """
    if p.shape[1] == 2:
        chance, truth, meaning = p[:, 1], y, "positive"
    else:
        chance, truth, meaning = p.max(-1), (p.argmax(-1) == y).astype(int), "right"
    columns = ("mean probability", f"share {meaning}", "samples")
    rows = [list(row) for row in zip(*measures.calibration_curve(truth, chance), strict=True)]
    notes = {"calibration error": round(measures.calibration_error(y, p), 4)}
    formats = {**dict.fromkeys(columns[:2], "score"), "samples": "count"}
    title = f"{result.method}: calibration, {split}"
    return Table(columns, rows, formats=formats, notes=notes, title=title)


def class_answers(
    result: Readings,
    network: Callable[[int], nn.Module],
    federation: Federation,
    split: str,
    clients: list[int],
    run: int,
) -> tuple[Array, Array]:
    """Return labels and probabilities of the samples of some clients, one after the other."""
    if federation.task != "classification":
        raise ConfigError(
            f"Confusion and calibration are of classes, and this task is {federation.task}; see "
            "result.score(federation)."
        )
    pairs = [
        answered(result, network(c), federation, split, c, run)
        for c in clients
        if len(federation.split(split).of(c))
    ]
    if not pairs:
        raise ConfigError(f"These clients have no samples in the split {split!r}; take another.")
    y, p = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return y, p
