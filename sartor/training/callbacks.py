"""Callbacks: follow a training, and ask it to stop.

A callback is any object with some of these methods; each takes one argument and none is required:

| method | argument | when |
|---|---|---|
| ``on_start`` | :class:`Start` | before the first round that is left to do |
| ``on_evaluation`` | :class:`Evaluation` | after a round in which the models were scored |
| ``on_round`` | :class:`Round` | after that, in every round: what it cost |
| ``on_end`` | ``Result`` | when the run folder is written; with None if training broke off |

``on_round`` and ``on_evaluation`` may return :data:`STOP`: training then ends as if no more rounds
had been planned, and the result says so, in the words of the callback's ``why`` if it has that.
Values of a sweep are arrays with one entry per run; several methods, or several values of a static
option, each have a start and an end.

A fault in ``on_start`` ends the training before its first round. A later one is reported as a
warning with the callback's name, that callback is not called again, and training continues: the run
folder is as it would have been without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sartor.core.errors import CallbackError, PFLError
from sartor.results.headline import HEADLINE_METRICS, chosen_metric
from sartor.results.metrics import Array, macro, micro
from sartor.results.scores import COUNTERS, Run

if TYPE_CHECKING:
    from sartor.training.simulation import Simulation


class _Stop:
    """The type of :data:`STOP`."""

    def __repr__(self) -> str:
        return "sartor.STOP"


STOP: Final = _Stop()
"""What a callback returns to end the training."""


@dataclass(frozen=True)
class Start:
    """What is about to be trained.

    Attributes:
        method: its name.
        runs: seed, hyper-parameters and options of every run.
        clients: names of the clients.
        rounds: how many rounds are planned.
        done: how many of them are done already, in a run that is resumed.
        config: the resolved settings, as a run folder has them.
    """

    method: str
    runs: Sequence[Run]
    clients: Sequence[str]
    rounds: int
    done: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Round:
    """What a round cost.

    Attributes:
        number: rounds so far, this one included.
        rounds: how many are planned.
        cost: of this round, (runs,) each: participants, bytes_down, bytes_up,
            gradient_evaluations, forward_evaluations.
        seconds: wall time of the round, all runs together.
    """

    number: int
    rounds: int
    cost: Mapping[str, Array]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """How good the models are.

    Attributes:
        number: rounds so far.
        headline: the point at which the method is meant to be used, "pre" or "post".
        measure: the name of what the task is measured by: "accuracy", "RMSE" in a regression, ...
            (``sartor.results.headline``).
        value: (point, split) -> (runs,) of that measure, pooled over all clients.
        accuracy: (point, split) -> (runs,) shares of right answers, pooled; NaN where there is no
            right or wrong.
        loss: (point, split) -> (runs,) mean losses.
        correct: (point, split) -> (runs, clients) numbers of correct answers.
        count: split -> (runs, clients) numbers of answers: samples, or tokens of texts.
    """

    number: int
    headline: str
    measure: str
    value: Mapping[tuple[str, str], Array]
    accuracy: Mapping[tuple[str, str], Array]
    loss: Mapping[tuple[str, str], Array]
    correct: Mapping[tuple[str, str], Array] = field(repr=False)
    count: Mapping[str, Array] = field(repr=False)


class Listeners:
    """The callbacks of one training, in the order in which they are called."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = list(callbacks)

    def start(self, simulation: Simulation, config: Mapping[str, Any]) -> None:
        """Report that training begins.

        Raises:
            CallbackError: a callback failed; an error of Sartor's own passes as it is.
        """
        if not self.callbacks:
            return
        event = Start(
            method=simulation.method.name,
            runs=tuple(simulation.runs),
            clients=tuple(simulation.federations[0].names),
            rounds=simulation.num_rounds,
            done=simulation.round_index,
            config=dict(config),
        )
        for callback in self.callbacks:
            try:
                self._call(callback, "on_start", event)
            except PFLError:
                raise
            except Exception as error:
                raise CallbackError(
                    f"{name_of(callback)} failed in on_start, before the first round: "
                    f"{type(error).__name__}: {error}. Fix it, or leave it out of callbacks."
                ) from error

    def round(self, simulation: Simulation) -> str | None:
        """Report that a round is over; return which callback asked to stop, or None."""
        if not self.callbacks:
            return None
        seen = evaluation_of(simulation)
        asked = None if seen is None else self._report("on_evaluation", seen)
        event = Round(
            number=simulation.round_index,
            rounds=simulation.num_rounds,
            cost={name: simulation.log.costs[name][-1].copy() for name in COUNTERS},
            seconds=simulation.log.seconds["round"][-1],
        )
        later = self._report("on_round", event)
        return asked or later

    def end(self, result: Any) -> None:
        """Report that training is over."""
        self._report("on_end", result)

    def _report(self, event: str, what: Any) -> str | None:
        asked = None
        for callback in list(self.callbacks):
            try:
                if self._call(callback, event, what) is STOP:
                    asked = asked or getattr(callback, "why", None)
                    asked = asked or f"{name_of(callback)} asked to stop in {event}"
            except Exception as error:
                self.callbacks = [one for one in self.callbacks if one is not callback]
                warnings.warn(
                    f"{name_of(callback)} failed in {event}: {type(error).__name__}: {error}. It "
                    "is not called again, and training continues without it.",
                    stacklevel=2,
                )
        return asked

    @staticmethod
    def _call(callback: Any, event: str, what: Any) -> Any:
        method = getattr(callback, event, None)
        return None if method is None else method(what)


def name_of(callback: Any) -> str:
    """Return what a callback is called in messages: its ``name``, or that of its class."""
    return str(getattr(callback, "name", type(callback).__name__))


def evaluation_of(simulation: Simulation) -> Evaluation | None:
    """Return the scores after the last round, or None where there were none."""
    log, task = simulation.log, simulation.task.measured_as
    metric, answers = chosen_metric(task, simulation.measure), HEADLINE_METRICS[task].is_share
    value, accuracy, loss, correct, count = {}, {}, {}, {}, {}
    for name, series in log.history.items():
        point, split = name.split("/")
        key = (point, split)
        if not log.scored(point, simulation.round_index):
            continue
        count[split], weight = simulation.answers(split)
        correct[key] = series["correct"][-1].copy()
        loss[key] = micro(weight * series["loss"][-1], count[split])
        right = micro(correct[key], count[split])
        accuracy[key] = right if answers else np.full_like(right, np.nan)
        measured = macro(series["measured"][-1]) if "measured" in series else None
        value[key] = metric.measure(right, loss[key], simulation.units, measured)
    if not value:
        return None
    return Evaluation(
        number=simulation.round_index,
        headline=simulation.method.use.headline,
        measure=metric.name,
        value=value,
        accuracy=accuracy,
        loss=loss,
        correct=correct,
        count=count,
    )


def scalars(event: Evaluation | Round) -> list[dict[str, float]]:
    """Return the numbers of an event under the names that trackers show, one dict per run.

    ``accuracy/pre/test``, ``loss/pre/val``, ``cost/bytes_up`` and the like; in place of accuracy
    what the task is measured by, such as ``RMSE`` or ``exact_match``.
    """
    if isinstance(event, Round):
        columns: dict[str, Array] = {f"cost/{name}": value for name, value in event.cost.items()}
    else:
        measure = event.measure.replace(" ", "_")
        columns = {f"{measure}/{p}/{s}": value for (p, s), value in event.value.items()}
        columns |= {f"loss/{p}/{s}": value for (p, s), value in event.loss.items()}
    runs = len(next(iter(columns.values())))
    return [{name: float(np.asarray(v)[run]) for name, v in columns.items()} for run in range(runs)]
