"""What accuracy costs: rounds, bytes and gradients to a target, and which methods are beaten.

The target is reached at the first evaluation that ends ``window`` evaluations whose mean reaches
it. Not reached is a result, and returned as None. Costs count what was spent up to that
evaluation, one-off traffic and work included.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError
from sartor.results import metrics
from sartor.results.headline import has_accuracy
from sartor.results.readings import Readings

MEASURES = ("accuracy", "loss")
"""Other measures that a target may be set for: pooled accuracy (at least;
where answers are right or wrong), or mean test loss (at most)."""


class Reached(NamedTuple):
    """What had been spent when a target was reached."""

    rounds: int  # of training that had begun or ended
    megabytes: float  # MB (10^6 bytes) that had travelled, both ways
    gradient_evaluations: float  # pairs of a sample and a backward pass


def to_reach(
    result: Readings, target: float, *, measure: str | None = None, run: int = 0, window: int = 3
) -> Reached | None:
    """Return what a run had spent when it reached a target, or None if it never did.

    Args:
        result: of one method.
        target: pooled test accuracy (a share) to reach, or error or mean test loss to go below.
        measure: "accuracy", "loss", or what the task is measured by, which is the default.
        run: index of the run.
        window: evaluations whose mean has to reach the target.

    Raises:
        ConfigError: an unknown measure; a task without right and wrong has no accuracy.
    """
    own = result.headline_metric
    known = tuple(
        dict.fromkeys((own.name, *(MEASURES if has_accuracy(result.config) else ("loss",))))
    )
    if measure not in (None, *known):
        raise ConfigError(f"measure must be one of {', '.join(known)}, got {measure!r}.")
    if measure in (None, own.name):
        (rounds, curve), sign = result.measure_curve(run=run), own.sign
    elif measure == "accuracy":
        (rounds, curve), sign = result.curve(run=run), 1
    else:
        (rounds, curve), sign = result.loss_curve(run=run), -1
    at = metrics.rounds_to_target(rounds, sign * curve, sign * target, window)
    if at is None:
        return None
    point = result.headline
    return Reached(
        at + (point == "post"),
        float(result.ledger.megabytes(run, point, [at])[0]),
        float(result.ledger.gradients(run, point, [at])[0]),
    )


def pareto_front(cost: npt.ArrayLike, value: npt.ArrayLike) -> list[int]:
    """Return the indices of what nothing else beats: cheaper or equal, and better or equal.

    Point i is beaten if some j has cost_j ≤ cost_i and value_j ≥ value_i, one of them strictly.
    Points with a NaN are never on the front. In order of rising cost.

    >>> pareto_front([1, 2, 3, 3], [0.5, 0.4, 0.9, 0.8])
    [0, 2]
    """
    costs = np.asarray(cost, dtype=np.float64)
    values = np.asarray(value, dtype=np.float64)
    if costs.shape != values.shape or costs.ndim != 1:
        raise ConfigError(
            f"cost and value must be two lists of one length, got {costs.shape} and "
            f"{values.shape}; give one pair per point."
        )
    kept = []
    for index in np.lexsort((-values, costs)):
        if not (np.isfinite(costs[index]) and np.isfinite(values[index])):
            continue
        cheaper = (costs <= costs[index]) & (values >= values[index])
        strictly = (costs < costs[index]) | (values > values[index])
        if not (cheaper & strictly).any():
            kept.append(int(index))
    return kept
