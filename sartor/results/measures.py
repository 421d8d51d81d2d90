"""The measures of every task, for the models of a result on a federation's samples.

Training scores every model with one evaluator, by sums of losses and of correct answers; these
measures are worked out afterwards, from predictions.

| task | measures |
| --- | --- |
| classification | accuracy, mean recall of the classes that a client has |
| multilabel | exact match, F1 over all labels of all samples (micro), share of labels right |
| regression | root of the mean squared error, mean absolute error, R² = 1 − Σ(y − ŷ)² / Σ(y − ȳ)² |
| next-token | share of tokens that are right, perplexity exp(mean of −log p(token)) |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from sartor.core.errors import ConfigError
from sartor.core.task import PADDING
from sartor.data.federation import Federation
from sartor.results.metrics import Array, balanced_accuracy
from sartor.results.readings import Readings
from sartor.results.serving import answer
from sartor.results.tables import Table


def micro_f1(y: Array, found: Array) -> float:
    """Return 2 TP / (2 TP + FP + FN) over all labels of all samples; NaN if there is nothing.

    >>> micro_f1(np.array([[1, 0], [1, 1]]), np.array([[1, 1], [0, 1]]))
    0.6666666666666666
    """
    both = float(((y > 0) & (found > 0)).sum())
    total = float((y > 0).sum() + (found > 0).sum())
    return 2 * both / total if total else math.nan


def r_squared(y: Array, found: Array) -> float:
    """Return 1 − Σ(y − ŷ)² / Σ(y − ȳ)²; NaN where y does not vary.

    >>> r_squared(np.array([0.0, 2.0]), np.array([0.0, 1.0]))
    0.5
    """
    spread = float(np.square(y - y.mean()).sum())
    return 1 - float(np.square(y - found).sum()) / spread if spread > 0 else math.nan


def measure(task: str, y: Array, scores: Array) -> dict[str, float]:
    """Return the measures of a task, from labels and from scores as ``Prediction`` has them."""
    if task == "regression":
        gap = y - scores
        return {
            "RMSE": float(np.sqrt(np.square(gap).mean())),
            "MAE": float(np.abs(gap).mean()),
            "R²": r_squared(y, scores),
        }
    if task == "multilabel":
        found = scores > 0.5
        return {
            "exact match": float((found == (y > 0)).all(1).mean()),
            "micro F1": micro_f1(y, found),
            "labels right": float((found == (y > 0)).mean()),
        }
    if task == "next-token":
        true = y != PADDING
        chance = np.take_along_axis(scores, y[..., None], -1)[..., 0][true]
        return {
            "tokens right": float((scores.argmax(-1) == y)[true].mean()),
            "perplexity": float(np.exp(-np.log(np.maximum(chance, 1e-30)).mean())),
        }
    right = scores.argmax(-1) == y
    classes = scores.shape[1]
    per_class = np.bincount(y[right], minlength=classes), np.bincount(y, minlength=classes)
    return {
        "accuracy": float(right.mean()),
        "balanced accuracy": float(balanced_accuracy(*per_class)),
    }


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
    rows: list[list[Any]] = []
    columns: list[str] = []
    for client, name in enumerate(federation.names):
        own = federation.split(split).of(client)
        if not len(own):
            continue
        found = answer(result, network(client), federation.x[own], run)
        y = federation.y[own].numpy()
        if task == "regression":
            mean, scale = result.target(run)
            y = y * scale + mean
        values = measure(task, y, found.scores)
        columns = list(values)
        rows.append([name, len(own), *values.values()])
    if not rows:
        raise ConfigError(
            f"No client has samples in the split {split!r}; take another, or hold some out when "
            "the federation is made."
        )
    plain = ("RMSE", "MAE", "R²", "perplexity")
    formats = {name: "percent" for name in columns if name not in plain}
    title = f"{result.method}: {task}, {split}"
    return Table(["client", "samples", *columns], rows, formats=formats, title=title)
