"""What an engine records while it trains: runs, scores and the ledger of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sartor.results.metrics import Array, client_accuracy, micro

PHASES = ("round", "train", "server", "evaluate")
"""Timed phases: "round" is the whole wall time of a round, the others are its parts."""


@dataclass(frozen=True)
class Run:
    """One row of a sweep: its seed, hyper-parameters and the static options of the method.

    Runs that differ in their seed alone are repeats. A hyper-parameter is a list if it has one
    value per client.
    """

    seed: int
    hyper: dict[str, float | list[float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings in which runs differ, in the order of their first use.

    >>> varying([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 0}])
    ['b', 'c']
    """
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]


@dataclass
class Scores:
    """Sums over test samples, per run, evaluation and client, at one point of the round.

    "pre" entry t stands after t aggregations; "post" entry t after the local training of round t.
    """

    rounds: list[int]  # the t of every entry
    correct: Array  # (runs, evaluations, clients) correct answers
    loss: Array  # the same, sums of the losses
    count: Array  # (runs, clients) samples
    measured: Array | None = None  # as correct, values of a measure that has no sums

    def accuracy(self, run: int) -> Array:
        """Return (evaluations, clients) accuracies of a run; NaN for a client without samples."""
        return client_accuracy(self.correct[run], self.count[run])

    def mean_loss(self, run: int) -> Array:
        """Return (evaluations, clients) mean losses of a run."""
        return client_accuracy(self.loss[run], self.count[run])

    def curve(self, run: int) -> Array:
        """Return (evaluations,) pooled accuracies of a run."""
        return micro(self.correct[run], self.count[run])

    def faults(self, runs: int, clients: int) -> list[str]:
        """Return what is wrong with the shapes, one sentence each."""
        cube, flat = (runs, len(self.rounds), clients), (runs, clients)
        wanted = {"correct": cube, "loss": cube, "count": flat}
        return _faults(self, wanted | ({} if self.measured is None else {"measured": cube}))

    def select(self, runs: list[int]) -> Scores:
        """Return the scores of some runs."""
        measured = None if self.measured is None else self.measured[runs]
        return Scores(self.rounds, self.correct[runs], self.loss[runs], self.count[runs], measured)

    def arrays(self) -> dict[str, Array]:
        """Return what there is but the rounds, by name."""
        found = {name: getattr(self, name) for name in ("correct", "loss", "count", "measured")}
        return {name: array for name, array in found.items() if array is not None}


COUNTERS = (
    "participants",
    "bytes_down",
    "bytes_up",
    "gradient_evaluations",
    "forward_evaluations",
)
"""The counters of a ledger, in the order of its table."""

ONCE = ("setup_bytes", "setup_gradients", "setup_forward")
"""What is spent once and not in a round."""


@dataclass
class Ledger:
    """Counted costs: (runs, rounds) of what is spent in rounds, (runs,) of what is spent once.

    Once is spent what happens before round 0 and after the last, and what goes to clients that
    adapt the model before they use it.
    """

    participants: Array  # clients that trained
    bytes_down: Array  # payload sent to clients
    bytes_up: Array
    gradient_evaluations: Array  # pairs of a sample and a backward pass
    forward_evaluations: Array  # samples in forward-only passes of the method itself
    # Phase -> seconds of each round. A sweep trains all its runs in one pass, so that time belongs
    # to all of them together. See PHASES.
    seconds: dict[str, list[float]]
    setup_bytes: Array
    setup_gradients: Array
    setup_forward: Array

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds that were run."""
        return int(np.shape(self.participants)[1])

    @property
    def total_seconds(self) -> float:
        """Return the wall time of all rounds and all runs."""
        if "round" in self.seconds:
            return float(sum(self.seconds["round"]))
        return float(sum(sum(times) for times in self.seconds.values()))

    def total(self, counter: str) -> Array:
        """Return (runs,) the sum of a counter over the rounds, without what is spent once."""
        return np.asarray(np.sum(getattr(self, counter), axis=1))

    def megabytes(self, run: int, point: str, rounds: list[int]) -> Array:
        """Return the MB (10^6 bytes, both ways) that had travelled at every evaluation.

        "pre" entry t follows t whole rounds; "post" entry t has also seen the download of round t.
        """
        at = np.asarray(rounds, dtype=np.int64)
        down = self._until("bytes_down", run, at + (point == "post"))
        return np.asarray((down + self._until("bytes_up", run, at) + self.setup_bytes[run]) / 1e6)

    def gradients(self, run: int, point: str, rounds: list[int]) -> Array:
        """Return the gradient evaluations that had been made at every evaluation.

        "pre" entry t follows t whole rounds; "post" entry t has also seen the work of round t.
        """
        at = np.asarray(rounds, dtype=np.int64) + (point == "post")
        return np.asarray(self._until("gradient_evaluations", run, at) + self.setup_gradients[run])

    def _until(self, counter: str, run: int, number: Array) -> Array:
        """Return the sums of a counter over the first ``number`` rounds, for each of them."""
        sums = np.cumsum(np.asarray(getattr(self, counter))[run], dtype=np.float64)
        return np.concatenate([[0], sums])[np.minimum(number, len(sums))]

    def faults(self, runs: int) -> list[str]:
        """Return what is wrong with the shapes, one sentence each."""
        shape = (runs, np.shape(self.participants)[1] if np.ndim(self.participants) == 2 else 0)
        wanted = {**dict.fromkeys(COUNTERS, shape), **dict.fromkeys(ONCE, (runs,))}
        return [f"ledger.{fault}" for fault in _faults(self, wanted)]


def _faults(record: Scores | Ledger, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} has shape {found}, expected {shape}"
        for name, shape in wanted.items()
        if (found := np.shape(getattr(record, name))) != shape
    ]
