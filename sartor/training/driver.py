"""The loop over rounds that everything that trains shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sartor.results.headline import chosen_metric
from sartor.training.progress import Progress
from sartor.training.simulation import Simulation


def drive(
    simulation: Simulation,
    *,
    progress: Progress | None = None,
    title: str | None = None,
    asks_to_stop: Callable[[], str | None] = lambda: None,
    after_round: Callable[[], None] = lambda: None,
    checkpoint: Callable[[], None] = lambda: None,
    checkpoint_every: int = 1,
    stale: bool = True,
) -> None:
    """Run the rounds that are left.

    After each round, in this order: it may become the last one, the progress is shown, a checkpoint
    is written if one is due, and ``after_round`` is called.

    Args:
        simulation: what is trained; without rounds, its initial models are scored.
        progress: shows how far it is.
        title: what it shows; the name of the method by default.
        asks_to_stop: returns why the round that is done should be the last one, or None.
        after_round: called after each round.
        checkpoint: writes a checkpoint.
        checkpoint_every: rounds between checkpoints; the last round has one too.
        stale: whether the scores of an earlier round may be shown; else only those at the end.
    """
    if progress is not None:
        progress.start(simulation.num_rounds, title or simulation.method.name)
    try:
        if not simulation.num_rounds:
            simulation.score_start()
        while not simulation.finished:
            simulation.step()
            if (why := asks_to_stop()) is not None:
                simulation.stop(why)
            if progress is not None:
                info = progress_of(simulation)
                if not stale and not simulation.finished:
                    info |= {"accuracy": None, "value": None}
                progress.update(simulation.round_index - 1, info)
            if simulation.round_index % checkpoint_every == 0 or simulation.finished:
                checkpoint()
            after_round()
    finally:
        if progress is not None:
            progress.stop()


def progress_of(simulation: Simulation) -> dict[str, Any]:
    """Return what a progress bar shows after a round; scores are means over the runs.

    They are those of the last evaluation at the method's headline point, on test samples where
    there are any; NaN as long as nothing is measured.
    """
    log = simulation.log
    wanted = f"{simulation.method.use.headline}/test"
    name = wanted if wanted in log.history else next(iter(log.history), None)
    unknown = np.full(len(simulation.runs), np.nan)
    accuracy, loss, measured = (
        (unknown, unknown, None) if name is None else log.means(name, simulation.answers)
    )
    headline_metric = chosen_metric(simulation.task.measured_as, simulation.measure)
    value = headline_metric.measure(accuracy, loss, simulation.units, measured)
    return {
        "accuracy": float(np.mean(accuracy)),
        "measure": headline_metric.name,
        "value": float(np.mean(value)),
        "bytes": int(log.bytes.sum()),
        "seconds": log.seconds["round"][-1],
        "runs": len(simulation.runs),
    }
