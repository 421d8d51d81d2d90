"""What a simulation tells: a line of progress after a round, and the result at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sartor.core.tree import Tree
from sartor.results.headline import HEADLINE_METRICS, unit_of
from sartor.results.result import Result
from sartor.runs import save_result

if TYPE_CHECKING:
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


def result_of(
    simulation: Simulation,
    label_counts: np.ndarray | None,
    config: Mapping[str, Any],
    baseline: Callable[[], Result] | None,
) -> Result:
    """Return everything that was measured, with the models and a way in for newcomers.

    Args:
        simulation: what was run.
        label_counts: (runs, clients, classes) training samples, where they are known.
        config: the resolved settings.
        baseline: trains LocalTrain on the same allocations, when asked.
    """

    def newcomers(data: Any, **settings: Any) -> Result:
        from sartor.training.onboarding import onboard

        return onboard(simulation, data, **settings)

    def server(run: int) -> tuple[Tree, dict[str, Any]]:
        from sartor.training.onboarding import stored_form, trained

        return stored_form(trained(simulation, run))

    method, log = simulation.method, simulation.log
    chosen = any("choice" in snap for snap in log.snapshots)
    return Result(
        method=method.name,
        headline=method.use.headline,
        runs=simulation.runs,
        clients=simulation.federations[0].names,
        scores=simulation.scores(),
        ledger=simulation.ledger(),
        label_counts=label_counts,
        diverged=log.diverged,
        stopped=log.stopped,
        snapshots=log.snapshots,
        choices=method.show.names if chosen else (),
        config=config,
        models=simulation.network,
        baseline=baseline,
        newcomers=newcomers,
        server=server,
        writer=save_result,
    )
