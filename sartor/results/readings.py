"""What can be read off the records of a training: curves, numbers per client, and totals.

Everything follows from recorded sums (``sartor.results.scores``): a result read from a run folder
gives the same numbers as the one that ``fit`` returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, RunFolderError
from sartor.results import metrics
from sartor.results.headline import HeadlineMetric, has_accuracy, headline_metric_of
from sartor.results.metrics import Array
from sartor.results.scores import Ledger, Run, Scores

POINT_WORDS = {
    "pre": "after aggregation, before local training",
    "post": "after local training, before aggregation",
    "global": "the global model itself, after aggregation",
}
"""The points at which models are scored, in words."""


def _accuracy(kind: str, meaning: str) -> property:
    """Return a property: an accuracy of every run, or of the only one."""

    def get(readings: Readings) -> Any:
        return readings._each(lambda run: readings._accuracy_of(kind, run))

    return property(get, doc=meaning)


class Readings:
    """The records of a method, and the numbers that follow from them; :class:`Result` fills it.

    Attributes are those of :class:`sartor.Result`.
    """

    method: str
    headline: str
    runs: list[Run]
    clients: tuple[str, ...]
    scores: dict[tuple[str, str], Scores]
    ledger: Ledger
    label_counts: Array | None
    diverged: list[dict[str, Any] | None]
    stopped: list[dict[str, Any] | None]
    snapshots: list[dict[str, Any]]
    choices: tuple[str, ...]
    config: dict[str, Any]

    def curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and pooled accuracies of a run; NaN from its divergence on.

        All NaN where there is no right or wrong, as in a regression: see ``measure_curve``.

        Args:
            point: "pre", "post" or "global"; the headline point by default.
            split: "test" or "val".
            run: index of the run.
        """
        scores = self._scores(point, split)
        known = self._valid(point, split, run) & has_accuracy(self.config)
        return scores.rounds, np.where(known, scores.curve(run), np.nan)

    def loss_curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and mean losses over all samples; NaN once diverged. See ``curve``."""
        scores = self._scores(point, split)
        losses = metrics.micro(scores.loss[run], scores.count[run])
        return scores.rounds, np.where(self._valid(point, split, run), losses, np.nan)

    def client_accuracy(self, point: str | None = None, run: int = 0) -> Array:
        """Return (clients,) test accuracies at the last evaluation of a point; see ``curve``."""
        if not has_accuracy(self.config) or self.diverged[run] is not None:
            return np.full(len(self.clients), np.nan)
        return self._scores(point).accuracy(run)[-1]

    @property
    def headline_metric(self) -> HeadlineMetric:
        """What clients are compared by; see ``sartor.results.headline``."""
        return headline_metric_of(self.config)

    @property
    def measure(self) -> str:
        """The name of what clients are compared by: "accuracy", or "RMSE" in a regression, ..."""
        return self.headline_metric.name

    def measure_curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and what models are measured by, over all clients; see ``curve``.

        Sums are taken over all samples; what has no sums is a mean, each client alike.
        """
        rounds, accuracy = self.curve(point, split, run)
        losses, measured = self.loss_curve(point, split, run)[1], None
        if (each := self._scores(point, split).measured) is not None:
            measured = np.where(self._valid(point, split, run), metrics.macro(each[run]), np.nan)
        return rounds, self.headline_metric.measure(accuracy, losses, self._unit(run), measured)

    def client_measure(self, point: str | None = None, run: int = 0) -> Array:
        """Return (clients,) values of what the task is measured by, at the last evaluation."""
        if self.diverged[run] is not None:
            return np.full(len(self.clients), np.nan)
        scores = self._scores(point)
        accuracy, loss = scores.accuracy(run)[-1], scores.mean_loss(run)[-1]
        measured = None if scores.measured is None else scores.measured[run, -1]
        return self.headline_metric.measure(accuracy, loss, self._unit(run), measured)

    def pooled_measure(self, run: int = 0) -> float:
        """Return what models are measured by, over the test samples of all clients."""
        if self.diverged[run] is not None:
            return math.nan
        return metrics.last(self.measure_curve(run=run)[1])

    def mean_of(self, name: str, runs: Sequence[int] | None = None) -> float:
        """Return the mean of a number, such as "pooled_measure" or "seconds", over some runs.

        All runs by default; those without a value (NaN) stay out.
        """
        found = getattr(self, name)
        values = np.atleast_1d(self._each(found) if callable(found) else found)
        return metrics.spread(values if runs is None else values[runs]).mean

    def _unit(self, run: int) -> float:
        """Return what a target's deviation of 1 is in the units of the data."""
        return self.target(run)[1] if self.headline_metric.in_units else 1.0

    def facts(self) -> dict[str, Any]:
        """Return what is needed to use the models without the training data.

        Raises:
            RunFolderError: the result was written by a release that did not record it.
        """
        facts = self.config.get("rebuild")
        if facts is None:
            raise RunFolderError(
                "This result was written by an earlier release and does not say how samples were "
                "prepared; train again, or load the weights of models/ into your own network."
            )
        return dict(facts)

    def recipe(self, run: int) -> Mapping[str, Any] | None:
        """Return how samples become features in a run, or None if they are used as they are."""
        return self.facts().get("preprocessing", {}).get(str(self.runs[run].seed))

    def target(self, run: int) -> tuple[float, float]:
        """Return mean and scale of the target in the units of the data; (0, 1) if not scaled."""
        recipe = self.recipe(run) if "rebuild" in self.config else None
        step = (recipe or {}).get("target", {"mean": 0.0, "scale": 1.0})
        return float(step["mean"]), float(step["scale"])

    def worst_measure(self, run: int = 0) -> float:
        """Return the measure of the worst client among those with at least ten test samples."""
        return self.headline_metric.sign * self._worst(run).value

    def _scores(self, point: str | None = None, split: str = "test") -> Scores:
        key = (point or self.headline, split)
        if key not in self.scores:
            known = ", ".join(f"{a}/{b}" for a, b in self.scores)
            raise ConfigError(
                f"{self.method} was not evaluated at {key[0]}/{key[1]} (have: {known}); run fit "
                f"with points={key[0]!r} among its points, or a federation with that split."
            )
        return self.scores[key]

    def _valid(self, point: str | None, split: str, run: int) -> Array:
        rounds = np.asarray(self._scores(point, split).rounds)
        seen = self.diverged[run]
        if seen is None or not isinstance(seen.get("round"), int):
            return np.full(rounds.shape, seen is None)
        # "pre" entry t precedes the local training of round t, "post" entry t follows it.
        before = rounds < seen["round"] + ((point or self.headline) != "post")
        return np.asarray(before)

    def _each(self, function: Callable[[int], float]) -> Any:
        values = [function(run) for run in range(len(self.runs))]
        return values[0] if len(values) == 1 else np.asarray(values)

    def _accuracy_of(self, kind: str, run: int) -> float:
        if self.diverged[run] is not None or not has_accuracy(self.config):
            return math.nan
        rounds, curve = self.curve(run=run)
        if kind == "best":
            return metrics.best_test(curve)
        if kind == "last10":
            return metrics.last(curve, 10)
        if kind == "macro":
            return float(metrics.macro(self.client_accuracy(run=run)))
        if kind == "best_val":
            return self._best_val(rounds, curve, run)
        return metrics.last(curve)

    def _best_val(self, rounds: list[int], curve: Array, run: int) -> float:
        if (self.headline, "val") not in self.scores:
            return math.nan
        at, validation = self.curve(split="val", run=run)
        shared = [t for t in rounds if t in set(at)]
        return metrics.best_val(
            [curve[rounds.index(t)] for t in shared], [validation[at.index(t)] for t in shared]
        )

    def _worst(self, run: int) -> metrics.Worst:
        """Return the worst client; its value has the sign with which more is better."""
        values = self.headline_metric.sign * self.client_measure(run=run)
        return metrics.worst_client(values, self._scores().count[run])

    accuracy = _accuracy("last", "Pooled test accuracy at the last headline evaluation.")
    accuracy_best = _accuracy(
        "best", "Maximum over evaluations: optimistic; for comparison with papers that report it."
    )
    accuracy_macro = _accuracy(
        "macro", "Mean over clients, each client alike, at the last evaluation."
    )
    accuracy_last10 = _accuracy("last10", "Mean of the last ten evaluations.")
    accuracy_best_val = _accuracy(
        "best_val", "Test accuracy of the round that is best on validation data; NaN without any."
    )

    @property
    def worst_client(self) -> Any:
        """Worst measure among clients with at least ten test samples; NaN without any."""
        return self._each(self.worst_measure)

    @property
    def bytes_up(self) -> Any:
        """Payload sent by the clients in all rounds."""
        return self._each(lambda run: float(self.ledger.total("bytes_up")[run]))

    @property
    def bytes_down(self) -> Any:
        """Payload sent to the clients in all rounds."""
        return self._each(lambda run: float(self.ledger.total("bytes_down")[run]))

    @property
    def megabytes(self) -> Any:
        """MB (10^6 bytes) both ways, one-off traffic included."""
        totals = self.ledger.total("bytes_up") + self.ledger.total("bytes_down")
        return self._each(lambda run: float(totals[run] + self.ledger.setup_bytes[run]) / 1e6)

    @property
    def gradient_evaluations(self) -> Any:
        """Pairs of a sample and a backward pass in all rounds, one-off work included."""
        totals = self.ledger.total("gradient_evaluations") + self.ledger.setup_gradients
        return self._each(lambda run: float(totals[run]))

    @property
    def seconds(self) -> Any:
        """Wall time of the rounds; the runs of a sweep train together and share it equally."""
        return self._each(lambda run: self.ledger.total_seconds / len(self.runs))

    def ended_with(self, run: int = 0) -> list[str] | None:
        """Return what every client ended with, in words, or None if there was no choice.

        With ``do_no_harm`` the words are "alone", "global" and "personalised".

        Args:
            run: index of the run.
        """
        last = next((s["choice"] for s in reversed(self.snapshots) if "choice" in s), None)
        if not self.choices or last is None:
            return None
        numbers = np.asarray(last)[run].astype(int)
        return None if (numbers < 0).any() else [self.choices[k] for k in numbers]

    def ended_with_words(self, *runs: int) -> str | None:
        """Return how many clients ended with what: "alone 3, global 5 of 8 clients", or None.

        Args:
            runs: indices of runs, of which the mean is returned; the first by default.
        """
        found = [ended for run in runs or (0,) if (ended := self.ended_with(run)) is not None]
        if not found:
            return None
        mean = {word: sum(e.count(word) for e in found) / len(found) for word in self.choices}
        counts = ", ".join(f"{w} {f'{n:.1f}'.removesuffix('.0')}" for w, n in mean.items())
        return f"{'on average ' * (len(found) > 1)}{counts} of {len(self.clients)} clients"

    def held(self, run: int) -> list[tuple[int, int]] | None:
        """Return the training samples and classes of every client; None if labels do not tell."""
        if self.label_counts is None or self.config.get("task") not in (None, "classification"):
            return None
        return [(int(n.sum()), int((n > 0).sum())) for n in self.label_counts[run]]

    def _indices(self, run: int | None) -> list[int]:
        if run is None:
            return list(range(len(self.runs)))
        if not -len(self.runs) <= run < len(self.runs):
            raise ConfigError(f"run {run} does not exist; there are {len(self.runs)}, from 0.")
        return [run % len(self.runs)]
