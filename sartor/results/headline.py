"""What the clients of a result are compared by: one number a client, known after every evaluation.

An evaluation records, for every client, how many answers are right and the sum of their losses;
what models are compared by must follow from those two. Other measures of a task, such as F1 or R²,
need the predictions (``sartor.results.measures``).

| task | headline metric | formula | better is |
| --- | --- | --- | --- |
| classification | accuracy | right / n | more |
| multilabel | exact match | samples with all labels right / n | more |
| next-token | tokens right | tokens right / tokens | more |
| regression | RMSE | σ √(2 L / n), L = Σ ½ (score − y)² | less |
| a network that gives its own loss | loss | L / n | less |

σ is what a target's deviation of 1 is in the units of the data: 1, unless a table was standardised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sartor.results.metrics import Array


@dataclass(frozen=True)
class HeadlineMetric:
    """What the clients of a result are compared by."""

    name: str  # in words; the heading of its column
    sign: int = 1  # 1 if more is better, −1 if less is
    is_share: bool = True  # whether it is a share of right answers, shown in per cent

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[0].upper() + self.name[1:]

    @property
    def kind(self) -> str:
        """How a value is shown, as in ``sartor.results.tables.format_cell``."""
        return "percent" if self.is_share else "error"

    @property
    def gain_kind(self) -> str:
        """How a gain is shown, as in ``sartor.results.tables.format_cell``."""
        return "points" if self.is_share else "gain"

    def gain(self, mine: Any, theirs: Any) -> Any:
        """Return by how much ``mine`` is better than ``theirs``; negative is worse.

        >>> RMSE.gain(2.0, 5.0), ACCURACY.gain(0.5, 0.25)
        (3.0, 0.25)
        """
        return self.sign * (mine - theirs)

    def measure(self, accuracy: Array, mean_loss: Array, unit: Any = 1.0) -> Array:
        """Return the values of the headline metric; ``unit`` is σ of the table above.

        >>> float(RMSE.measure(np.array(0.0), np.array(2.0), unit=10.0))
        20.0
        """
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
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.4g}"


ACCURACY = HeadlineMetric("accuracy")
RMSE = HeadlineMetric("RMSE", -1, is_share=False)
LOSS = HeadlineMetric("loss", -1, is_share=False)

HEADLINE_METRICS = {
    "classification": ACCURACY,
    "multilabel": HeadlineMetric("exact match"),
    "next-token": HeadlineMetric("tokens right"),
    "regression": RMSE,
    None: LOSS,
}
"""The headline metric of every task; None is a network that gives its own loss."""

SHARES = tuple(metric.name for metric in HEADLINE_METRICS.values() if metric.is_share)


def headline_metric_of(config: Mapping[str, Any]) -> HeadlineMetric:
    """Return the headline metric of a result from its settings."""
    return HEADLINE_METRICS.get(config.get("task", "classification"), ACCURACY)


def unit_of(preprocessing: Mapping[str, Any] | None) -> float:
    """Return what a target's deviation of 1 is in the units of data that were prepared so."""
    return float((preprocessing or {}).get("target", {}).get("scale", 1.0))
