"""What a simulation reports after a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from sartor.results.headline import HEADLINE_METRICS, unit_of
from sartor.training.simulation import Simulation


def units_of(simulation: Simulation) -> np.ndarray:
    """Return (runs,) what a target's deviation of 1 is in the units of the data."""
    # The server of a network knows the names of its clients alone.
    infos = [getattr(federation, "info", {}) for federation in simulation.federations]
    return np.asarray([unit_of(info.get("preprocessing")) for info in infos])


def progress_of(simulation: Simulation) -> dict[str, Any]:
    """Return what a progress bar shows after a round; scores are means over the runs.

    They are those of the last evaluation at the method's headline point, on test samples where
    there are any; NaN as long as nothing is measured.
    """
    log = simulation.log
    wanted = f"{simulation.method.use.headline}/test"
    name = wanted if wanted in log.history else next(iter(log.history), None)
    accuracy = loss = np.full(len(simulation.runs), np.nan)
    if name is not None:
        accuracy, loss = log.means(name, simulation.answers)
    headline_metric = HEADLINE_METRICS[simulation.task.measured_as]
    value = headline_metric.measure(accuracy, loss, units_of(simulation))
    return {
        "accuracy": float(np.mean(accuracy)),
        "measure": headline_metric.name,
        "value": float(np.mean(value)),
        "bytes": int(log.bytes.sum()),
        "seconds": log.seconds["round"][-1],
        "runs": len(simulation.runs),
    }
