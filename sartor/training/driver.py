"""The loop over rounds that everything that trains shares."""

from __future__ import annotations

from collections.abc import Callable

from sartor.training.progress import Progress
from sartor.training.readout import progress_of
from sartor.training.simulation import Simulation


def drive(
    simulation: Simulation,
    *,
    progress: Progress | None = None,
    title: str | None = None,
    asks_to_stop: Callable[[], str | None] | None = None,
    after_round: Callable[[], None] | None = None,
    checkpoint: Callable[[], None] | None = None,
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
            why = asks_to_stop() if asks_to_stop is not None else None
            if why is not None:
                simulation.stop(why)
            if progress is not None:
                info = progress_of(simulation)
                if not stale and not simulation.finished:
                    info |= {"accuracy": None, "value": None}
                progress.update(simulation.round_index - 1, info)
            due = simulation.round_index % checkpoint_every == 0 or simulation.finished
            if checkpoint is not None and due:
                checkpoint()
            if after_round is not None:
                after_round()
    finally:
        if progress is not None:
            progress.stop()
