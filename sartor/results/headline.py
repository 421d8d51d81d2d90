"""What the clients of a result are compared by: one number a client, known after every evaluation.

An evaluation records, for every client, how many answers are right and the sum of their losses.
What a task is measured by, if nothing else is asked for, follows from those two:

| task | headline metric | formula | better is |
| --- | --- | --- | --- |
| classification | accuracy | right / n | more |
| multilabel | exact match | samples with all labels right / n | more |
| next-token | tokens right | tokens right / tokens | more |
| regression | RMSE | σ √(2 L / n), L = Σ ½ (score − y)² | less |
| a network that gives its own loss | loss | L / n | less |

σ is what a target's deviation of 1 is in the units of the data: 1, unless a table was standardised.

With ``measure="auroc"`` and the like an evaluation records that measure of every client too, from
its predictions (``sartor.results.measures``). Such a measure has no sums: that of several clients
is their mean, each client alike, over those whose samples define it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, did_you_mean
from sartor.results import measures
from sartor.results.metrics import Array


@dataclass(frozen=True)
class HeadlineMetric:
    """What the clients of a result are compared by.

    Attributes:
        name: in words; the heading of its column.
        sign: 1 if more is better, −1 if less is.
        is_share: whether it is shown in per cent.
        function: works it out from labels and predictions; None if it follows from the sums.
        in_units: whether it is in the units of a regression's target.
        has_samples: whether a gain can be counted in samples.
    """

    name: str
    sign: int = 1
    is_share: bool = True
    function: measures.Function | None = None
    in_units: bool = False
    has_samples: bool = False

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[0].upper() + self.name[1:]

    @property
    def kind(self) -> str:
        """How a value is shown, as in ``sartor.results.tables.format_cell``."""
        if self.is_share:
            return "percent"
        return "error" if self.in_units or self.function is None else "score"

    @property
    def gain_kind(self) -> str:
        """How a gain is shown, as in ``sartor.results.tables.format_cell``."""
        return {"percent": "points", "score": "score gain"}.get(self.kind, "gain")

    @property
    def pooled(self) -> str:
        """How the values of several clients become one, in words."""
        return "pooled" if self.function is None else "mean over clients"

    def gain(self, mine: Any, theirs: Any) -> Any:
        """Return by how much ``mine`` is better than ``theirs``; negative is worse.

        >>> RMSE.gain(2.0, 5.0), ACCURACY.gain(0.5, 0.25)
        (3.0, 0.25)
        """
        return self.sign * (mine - theirs)

    def measure(
        self, accuracy: Array, mean_loss: Array, unit: Any = 1.0, measured: Array | None = None
    ) -> Array:
        """Return the values of the headline metric; ``unit`` is σ of the table above.

        >>> float(RMSE.measure(np.array(0.0), np.array(2.0), unit=10.0))
        20.0
        """
        if self.function is not None:
            found = np.full_like(accuracy, np.nan) if measured is None else measured
            return found * unit if self.in_units else found
        if self.is_share:
            return accuracy
        if self is RMSE:
            return np.asarray(unit * np.sqrt(2 * mean_loss))
        return mean_loss

    def text(self, value: float) -> str:
        """Return a value for a sentence.

        >>> ACCURACY.text(0.931), RMSE.text(26.4321), RMSE.text(float("nan"))
        ('93.1 %', '26.43', '–')
        """
        if not math.isfinite(value):
            return "–"
        if self.is_share:
            return f"{100 * value:.1f} %"
        return f"{value:.3f}" if self.kind == "score" else f"{value:.4g}"


ACCURACY = HeadlineMetric("accuracy", has_samples=True)
RMSE = HeadlineMetric("RMSE", -1, is_share=False, in_units=True)
LOSS = HeadlineMetric("loss", -1, is_share=False)

HEADLINE_METRICS = {
    "classification": ACCURACY,
    "multilabel": HeadlineMetric("exact match", has_samples=True),
    "next-token": HeadlineMetric("tokens right"),
    "regression": RMSE,
    None: LOSS,
}
"""The headline metric of every task; None is a network that gives its own loss."""

SHARES = tuple(metric.name for metric in HEADLINE_METRICS.values() if metric.is_share)


def _of_answers(name: str, function: measures.Function, sign: int = 1) -> HeadlineMetric:
    return HeadlineMetric(name, sign, is_share=False, function=function)


_CHANCES = {
    "auroc": _of_answers("AUROC", measures.auroc),
    "average-precision": _of_answers("average precision", measures.average_precision),
    "f1": _of_answers("F1", measures.f1),
    "brier": _of_answers("Brier score", measures.brier, -1),
    "calibration-error": _of_answers("calibration error", measures.calibration_error, -1),
    "loss": LOSS,
}

CHOICES: dict[str | None, dict[str, HeadlineMetric]] = {
    "classification": {
        "accuracy": ACCURACY,
        "balanced-accuracy": HeadlineMetric(
            "balanced accuracy", function=measures.balanced_accuracy
        ),
        **_CHANCES,
    },
    "multilabel": {
        "exact-match": HEADLINE_METRICS["multilabel"],
        "labels-right": HeadlineMetric("labels right", function=measures.labels_right),
        "micro-f1": _of_answers("micro F1", measures.micro_f1),
        **_CHANCES,
    },
    "next-token": {"tokens-right": HEADLINE_METRICS["next-token"], "loss": LOSS},
    "regression": {
        "rmse": RMSE,
        "mae": HeadlineMetric("MAE", -1, is_share=False, function=measures.mae, in_units=True),
        "r2": _of_answers("R²", measures.r_squared),
        "loss": LOSS,
    },
    None: {"loss": LOSS},
}
"""What clients can be compared by, by task and by the word that ``measure=`` takes."""

WORDS = tuple(dict.fromkeys(word for choices in CHOICES.values() for word in choices))
"""All words that ``measure=`` takes."""


def chosen_metric(task: str | None, word: str | None) -> HeadlineMetric:
    """Return the metric of a word; that of the task if the word is None.

    Raises:
        ConfigError: a task cannot be measured so.
    """
    choices = CHOICES[task]
    if word is None:
        return HEADLINE_METRICS[task]
    if word not in choices:
        raise ConfigError(
            f"A task of {task or 'a network that gives its own loss'} cannot be measured by "
            f"{word!r}; take one of {', '.join(choices)}{did_you_mean(word, choices)}"
        )
    return choices[word]


def headline_metric_of(config: Mapping[str, Any]) -> HeadlineMetric:
    """Return the headline metric of a result from its settings."""
    task = config.get("task", "classification")
    return chosen_metric(task if task in CHOICES else "classification", config.get("measure"))


def has_accuracy(config: Mapping[str, Any]) -> bool:
    """Say whether answers of a task are right or wrong."""
    return HEADLINE_METRICS.get(config.get("task", "classification"), ACCURACY).is_share


def unit_of(preprocessing: Mapping[str, Any] | None) -> float:
    """Return what a target's deviation of 1 is in the units of data that were prepared so."""
    return float((preprocessing or {}).get("target", {}).get("scale", 1.0))
