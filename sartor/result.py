"""The result of a training: scores per client, costs and models.

``Result`` is one method: one run, or a sweep of runs. It works from recorded sums alone, so a
result read from a run folder is the same as the one that ``fit`` returned.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from sartor import metrics
from sartor.analysis.evenness import Fairness, fairness
from sartor.errors import ConfigError, ContractError, RunFolderError, did_you_mean
from sartor.metrics import Array
from sartor.scores import COUNTERS, ONCE, Ledger, Run, Scores
from sartor.table import Table, format_cell, import_pandas, jsonable
from sartor.yardstick import Yardstick, yardstick_of

if TYPE_CHECKING:
    import pandas

    from sartor.data.federation import Federation
    from sartor.serving import Prediction
    from sartor.tree import Tree

__all__ = ["METRIC_COLUMNS", "POINT_WORDS", "Result"]

ModelMaker = Callable[[int, int, str], nn.Module]
MOST_ROWS = 40
"""Clients that a notebook shows of a result."""
METRIC_COLUMNS = ("run", "round", "client", "point", "split", "accuracy", "loss", "count")


class Result:
    """What a method reached, for whom, and at what cost.

    The numbers ``accuracy``, ``accuracy_best``, ``accuracy_macro``, ``accuracy_last10``,
    ``accuracy_best_val``, ``worst_client``, ``bytes_up``, ``bytes_down``,
    ``gradient_evaluations`` and ``seconds`` are floats for one run and arrays ``(runs,)`` for a
    sweep. ``accuracy`` is the last evaluation at the method's headline point, pooled over all
    clients. A run that diverged has NaN for its accuracies: it has no result. So has a regression,
    whose answers are not right or wrong: ``pooled_measure(run)`` is its error.

    Args:
        method: name of the method.
        headline: "pre" (after aggregation) or "post" (after local training): the point at which
            the method is meant to be used.
        runs: one :class:`Run` per row of the sweep.
        clients: names of the clients.
        scores: (point, split) -> :class:`Scores`, for instance ``("pre", "test")``.
        ledger: counted costs.
        label_counts: (runs, clients, classes) training samples per class, or None.
        diverged: per run None, or ``{"round": ..., "client": ...}``.
        stopped: per run None, or ``{"round": rounds it trained, "why": ...}`` where it ended before
            the planned rounds were over; early stopping adds ``"best_round"``.
        snapshots: ``{"round": t, "mix": (runs, M, M)}`` and the like, for pictures.
        choices: the names behind the numbers of the snapshots' table ``choice``, where each client
            ends with one of several models.
        config: the resolved settings.
        models: (client index, run, point) -> a network ready to use, or None.
        baseline: makes the LocalTrain result on the same allocations when first asked for.
        newcomers: gives clients that join later their models.
        server: run -> what newcomers are greeted from, to be written to a folder.
    """

    def __init__(
        self,
        *,
        method: str,
        headline: str,
        runs: Sequence[Run],
        clients: Sequence[str],
        scores: Mapping[tuple[str, str], Scores],
        ledger: Ledger,
        label_counts: Array | None = None,
        diverged: Sequence[dict[str, Any] | None] | None = None,
        stopped: Sequence[dict[str, Any] | None] | None = None,
        snapshots: Sequence[dict[str, Any]] = (),
        choices: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        models: ModelMaker | None = None,
        baseline: Callable[[], Result] | None = None,
        newcomers: Callable[..., Result] | None = None,
        server: Callable[[int], tuple[Tree, dict[str, Any]]] | None = None,
    ) -> None:
        self.method = method
        self.headline = headline
        self.runs = list(runs)
        self.clients = tuple(clients)
        # In one order, whether they were measured in one go, resumed, or read from a file.
        order = sorted(scores, key=lambda key: (key[0] != "pre", key))
        self.scores = {key: scores[key] for key in order}
        self.ledger = ledger
        self.label_counts = label_counts
        self.diverged = list(diverged) if diverged is not None else [None] * len(self.runs)
        self.stopped = list(stopped) if stopped is not None else [None] * len(self.runs)
        self.snapshots = list(snapshots)
        self.choices = tuple(choices)
        self.config = dict(config or {})
        self._models = models
        self._baseline = baseline
        self._baseline_result: Result | None = None
        self._newcomers = newcomers
        self._server = server
        self._check()

    def _check(self) -> None:
        faults = []
        if (self.headline, "test") not in self.scores:
            known = ", ".join(f"{point}/{split}" for point, split in self.scores)
            faults.append(f"no scores at the headline point {self.headline!r}/test (have: {known})")
        for (point, split), scores in self.scores.items():
            found = scores.faults(len(self.runs), len(self.clients))
            faults += [f"{point}/{split} {fault}" for fault in found]
        faults += self.ledger.faults(len(self.runs))
        if len(self.diverged) != len(self.runs):
            faults.append(f"diverged has {len(self.diverged)} entries for {len(self.runs)} runs")
        if len(self.stopped) != len(self.runs):
            faults.append(f"stopped has {len(self.stopped)} entries for {len(self.runs)} runs")
        if faults:
            raise ContractError(f"Result of {self.method!r} is not whole: {'; '.join(faults)}.")

    # --- numbers, one per run -------------------------------------------------------------------

    def curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and pooled accuracies of a run; NaN from its divergence on.

        Args:
            point: "pre", "post" or "global"; the headline point by default.
            split: "test" or "val".
            run: index of the run.
        """
        scores = self._scores(point, split)
        return scores.rounds, np.where(self._valid(point, split, run), scores.curve(run), np.nan)

    def loss_curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and mean losses over all samples of a run; NaN from its divergence on.

        Args:
            point: "pre", "post" or "global"; the headline point by default.
            split: "test" or "val".
            run: index of the run.
        """
        scores = self._scores(point, split)
        losses = metrics.micro(scores.loss[run], scores.count[run])
        return scores.rounds, np.where(self._valid(point, split, run), losses, np.nan)

    def client_accuracy(self, point: str | None = None, run: int = 0) -> Array:
        """Return (clients,) test accuracies at the last evaluation of a point."""
        if self.diverged[run] is not None:
            return np.full(len(self.clients), np.nan)
        return np.asarray(self._scores(point).accuracy(run)[-1])

    @property
    def yardstick(self) -> Yardstick:
        """What clients are compared by; see ``sartor.yardstick``."""
        return yardstick_of(self.config)

    @property
    def measure(self) -> str:
        """The name of what clients are compared by: "accuracy", or "RMSE" in a regression, ..."""
        return self.yardstick.name

    def measure_curve(
        self, point: str | None = None, split: str = "test", run: int = 0
    ) -> tuple[list[int], Array]:
        """Return rounds and what the task is measured by, over all samples; NaN once diverged.

        Args:
            point: "pre", "post" or "global"; the headline point by default.
            split: "test" or "val".
            run: index of the run.
        """
        rounds, accuracy = self.curve(point, split, run)
        losses = self.loss_curve(point, split, run)[1]
        return rounds, self.yardstick.measure(accuracy, losses, self._unit(run))

    def client_measure(self, point: str | None = None, run: int = 0) -> Array:
        """Return (clients,) values of what the task is measured by, at the last evaluation."""
        if self.diverged[run] is not None:
            return np.full(len(self.clients), np.nan)
        scores = self._scores(point)
        accuracy, loss = scores.accuracy(run)[-1], scores.mean_loss(run)[-1]
        return self.yardstick.measure(accuracy, loss, self._unit(run))

    def pooled_measure(self, run: int = 0) -> float:
        """Return what the task is measured by, over the test samples of all clients."""
        if self.diverged[run] is not None:
            return math.nan
        return metrics.last(self.measure_curve(run=run)[1])

    def _unit(self, run: int) -> float:
        """Return what a target's deviation of 1 is in the units of the data."""
        if self.yardstick.is_share:
            return 1.0
        from sartor.serving import target_of

        return target_of(self, run)[1]

    def worst_measure(self, run: int = 0) -> float:
        """Return the measure of the worst client among those with at least ten test samples."""
        return self.yardstick.sign * self._worst(run).value

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
        if self.diverged[run] is not None or not self.yardstick.is_share:
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
        values = self.yardstick.sign * self.client_measure(run=run)
        return metrics.worst_client(values, self._scores().count[run])

    @property
    def accuracy(self) -> Any:
        """Pooled test accuracy at the last evaluation of the headline point."""
        return self._each(lambda run: self._accuracy_of("last", run))

    @property
    def accuracy_best(self) -> Any:
        """Maximum over evaluations: optimistic; for comparison with papers that report it."""
        return self._each(lambda run: self._accuracy_of("best", run))

    @property
    def accuracy_macro(self) -> Any:
        """Mean over clients, each client alike, at the last evaluation."""
        return self._each(lambda run: self._accuracy_of("macro", run))

    @property
    def accuracy_last10(self) -> Any:
        """Mean of the last ten evaluations."""
        return self._each(lambda run: self._accuracy_of("last10", run))

    @property
    def accuracy_best_val(self) -> Any:
        """Test accuracy of the round that is best on validation data; NaN without such data."""
        return self._each(lambda run: self._accuracy_of("best_val", run))

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
            runs: indices of runs, of which the mean is told; the first by default.
        """
        found = [ended for run in runs or (0,) if (ended := self.ended_with(run)) is not None]
        if not found:
            return None
        mean = {word: sum(e.count(word) for e in found) / len(found) for word in self.choices}
        counts = ", ".join(f"{w} {f'{n:.1f}'.removesuffix('.0')}" for w, n in mean.items())
        return f"{'on average ' * (len(found) > 1)}{counts} of {len(self.clients)} clients"

    # --- summaries ------------------------------------------------------------------------------

    def summary(self, run: int = 0) -> dict[str, Any]:
        """Return the numbers of one run as a JSON-able dict; what does not exist is None."""
        worst, chosen = self._worst(run), self.runs[run]
        total = {name: int(self.ledger.total(name)[run]) for name in COUNTERS}
        ended = self.ended_with(run)
        told = (
            {}
            if ended is None
            else {
                "ended_with": {word: ended.count(word) for word in self.choices},
                "ended_with_by_client": dict(zip(self.clients, ended, strict=True)),
            }
        )
        points = {
            f"accuracy_{point}": self.curve(point, run=run)[1][-1]
            if self.yardstick.is_share
            else None
            for point in POINT_WORDS
            if (point, "test") in self.scores
        }
        return dict(
            jsonable(
                {
                    "method": self.method,
                    "headline": self.headline,
                    "measure": self.measure,
                    "pooled_measure": self.pooled_measure(run),
                    "accuracy": self._accuracy_of("last", run),
                    "accuracy_best": self._accuracy_of("best", run),
                    "accuracy_macro": self._accuracy_of("macro", run),
                    "accuracy_last10": self._accuracy_of("last10", run),
                    "accuracy_best_val": self._accuracy_of("best_val", run),
                    **points,
                    "worst_client": self.yardstick.sign * worst.value,
                    "worst_client_name": self.clients[worst.client] if worst.client >= 0 else None,
                    "clients_below_floor": worst.excluded,
                    "bytes_up": total["bytes_up"],
                    "bytes_down": total["bytes_down"],
                    "bytes_setup": int(self.ledger.setup_bytes[run]),
                    "gradient_evaluations": total["gradient_evaluations"],
                    "gradient_evaluations_setup": int(self.ledger.setup_gradients[run]),
                    "forward_evaluations": total["forward_evaluations"],
                    "forward_evaluations_setup": int(self.ledger.setup_forward[run]),
                    "seconds": self.ledger.total_seconds / len(self.runs),
                    "seconds_all_runs": self.ledger.total_seconds,
                    "seed": chosen.seed,
                    "hyper": chosen.hyper,
                    "options": chosen.options,
                    "rounds": (self.stopped[run] or {"round": self.ledger.num_rounds})["round"],
                    "clients": len(self.clients),
                    "diverged": self.diverged[run],
                    "stopped": self.stopped[run],
                    **told,
                }
            )
        )

    def summaries(self) -> list[dict[str, Any]]:
        """Return :meth:`summary` of every run."""
        return [self.summary(run) for run in range(len(self.runs))]

    def groups(self) -> dict[str, list[int]]:
        """Return the runs that are repeats of one another: label -> indices of runs.

        The label is the method, followed by what differs between the groups, if anything does.
        """
        keys = [{**run.options, **run.hyper} for run in self.runs]
        varying = [
            name
            for name in dict.fromkeys(name for key in keys for name in key)
            if len({repr(key.get(name)) for key in keys}) > 1
        ]
        found: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            parts = [f"{name}={format_cell(key.get(name))}" for name in varying]
            found.setdefault(" ".join([self.method, *parts]), []).append(index)
        return found

    def select(self, runs: Sequence[int]) -> Result:
        """Return a result of some of the runs; the time is shared out in proportion.

        Args:
            runs: indices of the runs to keep.
        """
        kept = [index for run in runs for index in self._indices(run)]
        ledger = self.ledger
        models, join = self._models, self._newcomers
        share = len(kept) / len(self.runs)
        chosen = Result(
            method=self.method,
            headline=self.headline,
            runs=[self.runs[run] for run in kept],
            clients=self.clients,
            scores={
                key: Scores(s.rounds, s.correct[kept], s.loss[kept], s.count[kept])
                for key, s in self.scores.items()
            },
            ledger=Ledger(
                **{name: np.asarray(getattr(ledger, name))[kept] for name in (*COUNTERS, *ONCE)},
                seconds={p: [share * t for t in times] for p, times in ledger.seconds.items()},
            ),
            label_counts=None if self.label_counts is None else self.label_counts[kept],
            diverged=[self.diverged[run] for run in kept],
            stopped=[self.stopped[run] for run in kept],
            snapshots=[
                {k: v[kept] if np.ndim(v) > 0 else v for k, v in snapshot.items()}
                for snapshot in self.snapshots
            ],
            choices=self.choices,
            config=self.config,
            models=None if models is None else lambda c, r, point: models(c, kept[r], point),
            baseline=self._baseline,
            newcomers=None
            if join is None
            else lambda data, run=0, **settings: join(data, run=kept[run], **settings),
            server=None if self._server is None else lambda run: self.server_state(kept[run]),
        )
        chosen._baseline_result = self._baseline_result
        return chosen

    def _indices(self, run: int | None) -> list[int]:
        if run is None:
            return list(range(len(self.runs)))
        if not -len(self.runs) <= run < len(self.runs):
            raise ConfigError(f"run {run} does not exist; there are {len(self.runs)}, from 0.")
        return [run % len(self.runs)]

    def per_client(self, run: int | None = None) -> Table:
        """Return a table of the clients: size, classes, accuracy at both points, loss.

        Args:
            run: index of a run; None for all of them (then with a column "run").
        """
        points = [point for point in POINT_WORDS if (point, "test") in self.scores]
        indices = self._indices(run)
        chose = any(self.ended_with(index) for index in indices)
        rows = []
        for index in indices:
            words = self.ended_with(index)
            count = self._scores().count[index]
            at = {point: self.client_measure(point, index) for point in points}
            fine = self.diverged[index] is None
            loss = self._scores().mean_loss(index)[-1]
            for client, name in enumerate(self.clients):
                counted = self.label_counts if self.counts_samples else None
                labels = None if counted is None else counted[index][client]
                rows.append(
                    [
                        *([index] if len(indices) > 1 else []),
                        name,
                        None if labels is None else int(labels.sum()),
                        None if labels is None else int((labels > 0).sum()),
                        int(count[client]),
                        *(float(at[point][client]) for point in points),
                        float(loss[client]) if fine else None,
                        *([words[client] if words else None] if chose else []),
                    ]
                )
        columns = ["client", "train samples", "classes", "test samples"]
        columns += [f"{self.measure} {point}" for point in points]
        columns += ["loss"] + ["ended with"] * chose
        return Table(
            ["run", *columns] if len(indices) > 1 else columns,
            rows,
            notes={"headline": f"{self.headline} ({POINT_WORDS[self.headline]})"},
            formats={f"{self.measure} {point}": self.yardstick.kind for point in points},
            title=f"{self.method}: clients",
        )

    @property
    def counts_samples(self) -> bool:
        """Whether every sample is one of the labels that are counted."""
        return self.config.get("task") in (None, "classification")

    def fairness(self, run: int | None = None) -> Table:
        """Return how evenly accuracy (or error) is spread over the clients, one row per run.

        Args:
            run: index of a run; None for all of them.
        """
        indices = self._indices(run)
        rows = [
            [f"run {index}, seed {self.runs[index].seed}", *self._fairness(index)[:-2]]
            for index in indices
        ]
        found = self._fairness(indices[0])
        title = f"{self.method}: fairness"
        return fairness_table(["run"], rows, found.excluded, title, self.yardstick)

    def _fairness(self, run: int) -> Fairness:
        found = fairness(self.client_measure(run=run), self._scores().count[run])
        if self.yardstick.sign > 0:
            return found
        return found._replace(  # the largest error is the worst
            worst=found.best,
            worst_decile=found.best_decile,
            best_decile=found.worst_decile,
            best=found.worst,
        )

    def baseline(self) -> Result:
        """Return the LocalTrain result on the same allocations, training it when first asked.

        Raises:
            ConfigError: this result does not know how to make one.
        """
        if self._baseline_result is None:
            if self._baseline is None:
                raise ConfigError(
                    f"This result of {self.method!r} has no baseline to compare with; pass one: "
                    'result.gain(sartor.fit("local", federation, ...)) with the same seeds.'
                )
            self._baseline_result = self._baseline()
        return self._baseline_result

    @property
    def can_compare(self) -> bool:
        """Whether there is a baseline, or a way to train one."""
        return self._baseline_result is not None or self._baseline is not None

    @property
    def known_baseline(self) -> Result | None:
        """The baseline, if it is there already; asking never trains."""
        return self._baseline_result

    def attach_baseline(self, baseline: Result) -> None:
        """Give this result a LocalTrain result on the same seeds to be compared with."""
        self.partners(baseline)
        self._baseline_result = baseline

    def gain(self, baseline: Result | None = None, run: int | None = None) -> Table:
        """Return for each client its accuracy alone, federated, and the gain.

        In a regression it is the root mean squared error, and the gain what it falls by.
        The notes hold ``mean gain``, ``minimum gain``, ``fraction hurt`` and ``clients hurt``.
        Where each client ended with one of several models, a column says with which.

        Args:
            baseline: the LocalTrain result on the same seeds; made on demand by default.
            run: index of a run; None for all of them (then with a column "run").
        """
        reference = baseline if baseline is not None else self.baseline()
        partner = self.partners(reference)
        indices = self._indices(run)
        ended = {index: self.ended_with(index) for index in indices}
        chose = any(ended.values())
        rows: list[list[Any]] = []
        told = self.ended_with_words(*indices)
        gained: list[tuple[float, float]] = []
        yardstick = self.yardstick
        for index in indices:
            words = ended[index]
            alone = reference.client_measure(run=partner[index])
            federated = self.client_measure(run=index)
            count = self._scores().count[index]
            for client, name in enumerate(self.clients):
                a, f = float(alone[client]), float(federated[client])
                row = [name, int(count[client]), a, f, yardstick.gain(f, a)]
                row += [words[client] if words else None] * chose
                rows.append([index, *row] if len(indices) > 1 else row)
                gained.append((yardstick.sign * f, yardstick.sign * a))
        gains = metrics.gain([f for f, _ in gained], [a for _, a in gained])
        columns = ["client", "test samples", "alone", "federated", "gain"] + ["ended with"] * chose
        return Table(
            ["run", *columns] if len(indices) > 1 else columns,
            rows,
            notes={
                "mean gain": gains.mean,
                "minimum gain": gains.minimum,
                "fraction hurt": gains.fraction_hurt,
                "clients hurt": gains.hurt,
                **(
                    {"measure": f"{yardstick.name}; the gain is what it falls by"}
                    if yardstick.sign < 0
                    else {}
                ),
                **({} if told is None else {"ended with": told}),
            },
            formats={
                "alone": yardstick.kind,
                "federated": yardstick.kind,
                "gain": yardstick.gain_kind,
            },
            title=f"{self.method}: gain over training alone",
        )

    def partners(self, reference: Result) -> list[int]:
        """Return for every run the run of ``reference`` on the same allocation (equal seed).

        Raises:
            ConfigError: the clients differ, or a seed is missing in the reference.
        """
        if reference.clients != self.clients:
            raise ConfigError(
                f"{self.method} has {len(self.clients)} clients and {reference.method} "
                f"{len(reference.clients)}, or their names differ; compare results of one "
                "federation."
            )
        mine, theirs = [run.seed for run in self.runs], [run.seed for run in reference.runs]
        if mine == theirs:
            return list(range(len(mine)))
        missing = sorted(set(mine) - set(theirs))
        if missing:
            raise ConfigError(
                f"{reference.method} was not run with seed {', '.join(map(str, missing))}, so "
                f"{self.method} cannot be paired with it; run both with the same seeds."
            )
        return [theirs.index(seed) for seed in mine]

    # --- rows, models, display ------------------------------------------------------------------

    def metric_columns(self) -> dict[str, Any]:
        """Return the table of metrics as columns: run, round, client, point, split, and so on.

        Rows are ordered by point and split, then run, evaluation and client.
        """
        parts: dict[str, list[Any]] = {name: [] for name in METRIC_COLUMNS}
        names = np.asarray(self.clients, dtype=object)
        for (point, split), scores in self.scores.items():
            evaluations, clients = len(scores.rounds), len(self.clients)
            for run in range(len(self.runs)):
                valid = self._valid(point, split, run)[:, None]
                accuracy = np.where(valid, scores.accuracy(run), np.nan)
                loss = np.where(valid, scores.mean_loss(run), np.nan)
                size = evaluations * clients
                parts["run"].append(np.full(size, run))
                parts["round"].append(np.repeat(scores.rounds, clients))
                parts["client"].append(np.tile(names, evaluations))
                parts["point"].append(np.full(size, point, dtype=object))
                parts["split"].append(np.full(size, split, dtype=object))
                parts["accuracy"].append(accuracy.ravel())
                parts["loss"].append(loss.ravel())
                parts["count"].append(np.tile(np.asarray(scores.count[run]), evaluations))
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per run, round, client, point and split.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return import_pandas().DataFrame(self.metric_columns())

    def client_index(self, client: str | int) -> int:
        """Return the index of a client given by name or index."""
        if isinstance(client, str):
            if client not in self.clients:
                raise ConfigError(f"no client {client!r}{did_you_mean(client, self.clients)}")
            return self.clients.index(client)
        if not 0 <= client < len(self.clients):
            raise ConfigError(
                f"no client {client}; there are {len(self.clients)}, from 0 to "
                f"{len(self.clients) - 1}."
            )
        return int(client)

    def model(self, client: str | int, run: int = 0, point: str | None = None) -> nn.Module:
        """Return the final model of a client, ready to use.

        Args:
            client: name or index.
            run: index of the run.
            point: "pre", "post" or "global"; the headline point by default.
        """
        index, (chosen,) = self.client_index(client), self._indices(run)
        if self._models is None:
            raise RunFolderError(
                "This result came without models. Read it with sartor.load(path), which takes them "
                "from its run folder; RunFolder.open(path).read_models() returns the weights alone."
            )
        return self._models(index, chosen, point or self.headline)

    def predict(
        self, client: str | int, x: Any, *, run: int = 0, point: str | None = None
    ) -> Prediction:
        """Answer for new samples with the model of a client.

        Samples are prepared as the training data were: numbers of a table are standardised,
        categories become columns, texts token ids.

        Args:
            client: name or index.
            x: as the federation was made: an array ``(samples, ...)``; for a table a data frame, a
                dict of columns, or a list of dicts; for texts a list of them.
            run: index of the run.
            point: "pre", "post" or "global"; the headline point by default.

        Returns:
            labels and scores; see ``sartor.serving.Prediction``.
        """
        from sartor.serving import predict

        (chosen,) = self._indices(run)
        return predict(self, client, x, chosen, point)

    def score(self, federation: Federation, split: str = "test", run: int = 0) -> Table:
        """Return the measures of the task for every client; see ``sartor.measures.score``.

        Args:
            federation: with the clients of this result, prepared as for training.
            split: "train", "val" or "test".
            run: index of the run.
        """
        from sartor.measures import score

        (chosen,) = self._indices(run)
        return score(self, federation, split, chosen)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the result with the models of all clients, for ``sartor.load``.

        Everything is safetensors and JSON; the training data are not written.

        Args:
            path: a folder; parents are made.
            overwrite: replace an earlier result there.
        """
        from sartor.runs import RunFolder
        from sartor.serving import tree_of

        folder = RunFolder.create(path, self.config, overwrite=overwrite)
        for run in range(len(self.runs)):
            trees = [tree_of(self.model(client, run)) for client in range(len(self.clients))]
            folder.write_models(self.clients, trees, run)
            if self._server is not None:
                folder.write_server(*self.server_state(run), run)
        folder.write_result(self)
        return folder.path

    def export(
        self, client: str | int, path: str | Path, *, run: int = 0, point: str | None = None
    ) -> Path:
        """Write the model of one client to a file that needs no Sartor to be used.

        The ending decides: ``.pt`` and ``.safetensors`` hold the plain ``state_dict``, ``.pt2`` a
        program by torch.export, ``.onnx`` one in ONNX (``pip install 'sartor[onnx]'``). Beside it
        stands ``NAME.json``: shape of a sample, classes, and how samples are to be prepared.

        Args:
            client: name or index.
            path: the file.
            run: index of the run.
            point: "pre", "post" or "global"; the headline point by default.
        """
        from sartor.serving import export

        (chosen,) = self._indices(run)
        return export(self, client, path, chosen, point)

    def server_state(self, run: int = 0) -> tuple[Tree, dict[str, Any]]:
        """Return what newcomers are greeted from, as a tree of tensors and JSON-able facts."""
        if self._server is None:
            raise RunFolderError("This result has no server; it stays in the folder it came from.")
        return self._server(run)

    def give_models(
        self,
        models: ModelMaker,
        newcomers: Callable[..., Result],
        server: Callable[[int], tuple[Tree, dict[str, Any]]],
    ) -> None:
        """Give a result that was read from a folder its models, and a way in for newcomers."""
        self._models, self._newcomers, self._server = models, newcomers, server

    def onboard(
        self,
        newcomers: Federation | tuple[Any, Any],
        *,
        rounds: int = 5,
        finetune_epochs: int = 0,
        run: int = 0,
        test: float = 0.25,
    ) -> Result:
        """Give clients that join after training their models, by the method's own rule.

        Nobody else's model changes. See ``sartor.onboard``.

        Args:
            newcomers: a federation of newcomers, or the pair (x, y) of one.
            rounds: rounds of the method's local work; 0 takes what the server sends.
            finetune_epochs: passes of plain fine-tuning after that.
            run: index of the run.
            test: the share held out for testing, if ``newcomers`` is a pair.
        """
        if self._newcomers is None:
            raise RunFolderError(
                "This result was read without its server; read it with sartor.load(path), or use "
                "sartor onboard with its run folder."
            )
        (chosen,) = self._indices(run)
        return self._newcomers(
            newcomers, rounds=rounds, finetune_epochs=finetune_epochs, run=chosen, test=test
        )

    def __repr__(self) -> str:
        """Return method, accuracy, worst client and cost in one line."""
        kind = self.yardstick.kind
        unit = " %" if self.yardstick.is_share else ""
        accuracy = format_cell(metrics.spread(self._each(self.pooled_measure)), kind)
        worst = format_cell(metrics.spread(self._each(self.worst_measure)), kind)
        megabytes = format_cell(metrics.spread(self.megabytes), "megabytes")
        lost = sum(entry is not None for entry in self.diverged)
        runs = f", {len(self.runs)} runs" if len(self.runs) > 1 else ""
        early = sum(entry is not None for entry in self.stopped)
        return (
            f"<Result {self.method}: {self.measure} {accuracy}{unit}, worst client {worst}{unit}, "
            f"{len(self.clients)} clients, {self.ledger.num_rounds} rounds{runs}, {megabytes} MB"
            f"{f', {early} stopped early' if early else ''}{f', {lost} diverged' if lost else ''}>"
        )

    def _repr_html_(self) -> str:
        line = html.escape(repr(self)[1:-1])
        if len(self.runs) > 1:
            return f"<p>{line}</p>{self._runs_table()._repr_html_()}"
        table = self.per_client(run=0)
        more = max(len(table) - MOST_ROWS, 0)
        if more:  # the page stays short; per_client() has them all
            table.rows = table.rows[:MOST_ROWS]
            table.notes["clients not shown"] = more
        return f"<p>{line}</p>{table._repr_html_()}"

    def _runs_table(self) -> Table:
        """Return one row per run: what sets it apart, accuracy, worst client and rounds."""
        keys = [{**run.options, **run.hyper, "seed": run.seed} for run in self.runs]
        names = dict.fromkeys(name for key in keys for name in key)
        varying = [name for name in names if len({repr(key.get(name)) for key in keys}) > 1]
        told = ("pooled_measure", "worst_client", "rounds")
        rows = [
            [run, *(key.get(name) for name in varying), *(one[name] for name in told)]
            for run, (key, one) in enumerate(zip(keys, self.summaries(), strict=True))
        ]
        kind = self.yardstick.kind
        return Table(
            ["run", *varying, self.measure, "worst client", "rounds"],
            rows,
            formats={self.measure: kind, "worst client": kind},
            title=f"{self.method}: runs",
        )


def fairness_table(
    first: list[str], rows: list[list[Any]], excluded: int, title: str, yardstick: Yardstick
) -> Table:
    """Return a table of :class:`~sartor.analysis.evenness.Fairness` below its first column."""
    names = ["mean", "std", "worst", "worst decile", "best decile", "best"]
    notes: dict[str, Any] = {
        "std": "over clients, not over repeats",
        "even is": "Jain's index 1, Gini 0, entropy 1",
    }
    if yardstick.sign < 0:
        notes["shown"] = f"{yardstick.name}, of which less is better: the worst is the largest"
    if excluded:
        notes["worst, best and deciles"] = (
            f"among clients with at least {metrics.FLOOR} test samples; {excluded} left out"
        )
    formats = {
        **dict.fromkeys(names, yardstick.kind),
        **dict.fromkeys(("Jain", "Gini", "entropy"), "index"),
    }
    return Table(
        [*first, *names, "Jain", "Gini", "entropy"], rows, notes=notes, formats=formats, title=title
    )


POINT_WORDS = {
    "pre": "after aggregation, before local training",
    "post": "after local training, before aggregation",
    "global": "the global model itself, after aggregation",
}
"""The points at which models are scored, in words."""
