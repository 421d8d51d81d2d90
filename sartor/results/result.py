"""The result of a training: scores per client, costs and models.

``Result`` is one method: one run, or a sweep of runs. It works from recorded sums alone, so a
result read from a run folder is the same as the one that ``fit`` returned.

What it is made of stands in the other modules of this room.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from sartor.core.errors import ConfigError, ContractError, RunFolderError, did_you_mean
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.results.client_tables import client_table, fairness_by_run, metric_columns
from sartor.results.exporting import FORMATS, export, export_folder
from sartor.results.gains import gain_table
from sartor.results.metrics import Array
from sartor.results.readings import Readings
from sartor.results.score_table import calibration_table, class_answers, confusion_table, score
from sartor.results.scores import COUNTERS, ONCE, Ledger, Run, Scores
from sartor.results.selection import candidates_table, weights_table
from sartor.results.serving import Prediction, predict
from sartor.results.summaries import group_runs, notebook_page, one_line, summarise
from sartor.results.tables import Table, import_pandas

if TYPE_CHECKING:
    import pandas

ModelMaker = Callable[[int, int, str], nn.Module]
Server = Callable[[int], tuple[Tree, dict[str, Any]]]
Writer = Callable[["Result", str | Path, bool], Path]

NO_MODELS = (
    "This result came without models. Read it with sartor.load(path), which takes them from its "
    "run folder; RunFolder.open(path).read_models() returns the weights alone."
)


class Result(Readings):
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
        server: run -> what newcomer messages are made from, to be written to a folder.
        writer: writes the result with its models to a folder (``sartor.runs.save_result``).
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
        server: Server | None = None,
        writer: Writer | None = None,
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
        nothing = [None] * len(self.runs)
        self.diverged = list(nothing if diverged is None else diverged)
        self.stopped = list(nothing if stopped is None else stopped)
        self.snapshots = list(snapshots)
        self.choices = tuple(choices)
        self.config = dict(config or {})
        self._models = models
        self._baseline = baseline
        self._baseline_result: Result | None = None
        self._newcomers = newcomers
        self._server = server
        self.writer = writer
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
        faults += [
            f"{name} has {len(entries)} entries for {len(self.runs)} runs"
            for name, entries in (("diverged", self.diverged), ("stopped", self.stopped))
            if len(entries) != len(self.runs)
        ]
        if faults:
            raise ContractError(f"Result of {self.method!r} is not whole: {'; '.join(faults)}.")

    # --- summaries ------------------------------------------------------------------------------

    def summary(self, run: int = 0) -> dict[str, Any]:
        """Return the numbers of one run as a JSON-able dict; what does not exist is None."""
        return summarise(self, run)

    def summaries(self) -> list[dict[str, Any]]:
        """Return :meth:`summary` of every run."""
        return [self.summary(run) for run in range(len(self.runs))]

    def groups(self) -> dict[str, list[int]]:
        """Return the runs that are repeats of one another: label -> indices of runs.

        The label is the method, followed by what differs between the groups, if anything does.
        """
        return group_runs(self)

    def select(self, runs: Sequence[int]) -> Result:
        """Return a result of some of the runs; the time is shared out in proportion.

        Args:
            runs: indices of the runs to keep.
        """
        kept = [index for run in runs for index in self._indices(run)]
        ledger, models, join = self.ledger, self._models, self._newcomers
        share = len(kept) / len(self.runs)
        chosen = copy.copy(self)
        chosen.runs = [self.runs[run] for run in kept]
        chosen.scores = {key: scores.select(kept) for key, scores in self.scores.items()}
        chosen.ledger = Ledger(
            **{name: np.asarray(getattr(ledger, name))[kept] for name in (*COUNTERS, *ONCE)},
            seconds={p: [share * t for t in times] for p, times in ledger.seconds.items()},
        )
        if self.label_counts is not None:
            chosen.label_counts = self.label_counts[kept]
        chosen.diverged = [self.diverged[run] for run in kept]
        chosen.stopped = [self.stopped[run] for run in kept]
        chosen.snapshots = [
            {k: v[kept] if np.ndim(v) > 0 else v for k, v in snapshot.items()}
            for snapshot in self.snapshots
        ]
        chosen.config = dict(self.config)
        if models is not None:
            chosen._models = lambda client, run, point: models(client, kept[run], point)
        if join is not None:
            chosen._newcomers = lambda data, run=0, **settings: join(
                data, run=kept[run], **settings
            )
        if self._server is not None:
            chosen._server = lambda run: self.server_state(kept[run])
        return chosen

    def per_client(self, run: int | None = None) -> Table:
        """Return a table of the clients: size, classes, accuracy at both points, loss.

        Args:
            run: index of a run; None for all of them (then with a column "run").
        """
        return client_table(self, run)

    def selection(self, run: int = 0) -> tuple[Table, Table]:
        """Return what ``auto`` chose and why: the candidates, and what every client uses.

        Args:
            run: index of the run.
        """
        return candidates_table(self, run), weights_table(self, run)

    def fairness(self, run: int | None = None) -> Table:
        """Return how evenly accuracy (or error) is spread over the clients, one row per run.

        Args:
            run: index of a run; None for all of them.
        """
        return fairness_by_run(self, run)

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
        """Return for each client its accuracy alone, federated, and the gain with its interval.

        Repeats become one row a client: their mean, and a verdict, "gains", "loses" or "cannot
        tell"; see ``sartor.results.gains``. In a regression it is the root mean squared error, and
        the gain what it falls by. The notes hold ``mean gain``, ``minimum gain``, ``fraction
        hurt``, ``clients hurt`` and ``verdicts``. Where each client ended with one of several
        models, a column says with which.

        Args:
            baseline: the LocalTrain result on the same seeds; made on demand by default.
            run: index of a run; None for all of them. Settings of a sweep are kept apart.
        """
        reference = baseline if baseline is not None else self.baseline()
        groups = self.groups() if run is None else {self.method: self._indices(run)}
        return gain_table(self, reference, self.partners(reference), groups)

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
        return metric_columns(self)

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
            raise RunFolderError(NO_MODELS)
        return self._models(index, chosen, point or self.headline)

    def predict(
        self,
        client: str | int,
        x: Any,
        *,
        run: int = 0,
        point: str | None = None,
        uncertainty: bool = False,
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
            uncertainty: average over what the model could be, given its samples, and return
                deviations; for ``evidence`` with its option ``posterior``.

        Returns:
            labels and scores; see ``sartor.results.serving.Prediction``.
        """
        (chosen,) = self._indices(run)
        return predict(self, self.model(client, chosen, point), x, chosen, uncertainty)

    def score(self, federation: Federation, split: str = "test", run: int = 0) -> Table:
        """Return all measures of the task for every client; see ``sartor.results.score_table``.

        Args:
            federation: with the clients of this result, prepared as for training.
            split: "train", "val" or "test".
            run: index of the run.
        """
        (chosen,) = self._indices(run)
        return score(self, lambda client: self.model(client, chosen), federation, split, chosen)

    def confusion(
        self,
        federation: Federation,
        client: str | int | None = None,
        split: str = "test",
        run: int = 0,
    ) -> Table:
        """Return how often each class was answered with each, of a client or of all.

        Arguments are those of :meth:`score`; ``client`` is a name, an index, or None for all.
        """
        return self._of_answers(confusion_table, federation, client, split, run)

    def calibration(
        self,
        federation: Federation,
        client: str | int | None = None,
        split: str = "test",
        run: int = 0,
    ) -> Table:
        """Return the calibration curve of a client or of all: probability against what came true.

        Arguments are those of :meth:`confusion`.
        """
        return self._of_answers(calibration_table, federation, client, split, run)

    def _of_answers(
        self,
        make: Callable[..., Table],
        federation: Federation,
        client: str | int | None,
        split: str,
        run: int,
    ) -> Table:
        (chosen,) = self._indices(run)
        clients = [*range(len(self.clients))] if client is None else [self.client_index(client)]
        models = functools.partial(self.model, run=chosen)
        y, p = class_answers(self, models, federation, split, clients, chosen)
        return make(self, y, p, split)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the result with the models of all clients, for ``sartor.load``.

        Everything is safetensors and JSON; the training data are not written.

        Args:
            path: a folder; parents are made.
            overwrite: replace an earlier result there.
        """
        if self._models is None or self.writer is None:
            raise RunFolderError(NO_MODELS)
        return self.writer(self, path, overwrite)

    def export(
        self,
        client: str | int,
        path: str | Path,
        *,
        run: int = 0,
        point: str | None = None,
        formats: Sequence[str] = FORMATS,
        overwrite: bool = False,
    ) -> Path:
        """Write the model of one client to a folder, or a file, that needs no Sartor to be used.

        A path without an ending is a folder, with the model as an ONNX program that takes raw
        samples, its parameters, how samples are prepared, and a card (README.md).

        The ending of a file decides: ``.onnx`` is that program alone
        (``pip install 'sartor[export]'``), ``.pt`` and ``.safetensors`` hold the plain
        ``state_dict``, ``.pt2`` a program by torch.export. Beside it stands ``NAME.json``: shape of
        a sample, classes, and how samples are to be prepared for all but ONNX.

        Args:
            client: name or index.
            path: the folder, or the file.
            run: index of the run.
            point: "pre", "post" or "global"; the headline point by default.
            formats: of a folder: "onnx", "safetensors", or both.
            overwrite: write into a folder that is not empty.
        """
        (chosen,) = self._indices(run)
        name = self.clients[self.client_index(client)]
        given = self, name, lambda: self.model(client, chosen, point), path, chosen
        if Path(path).suffix and not Path(path).is_dir():
            return export(*given)
        if point not in (None, self.headline):
            raise ConfigError(
                f"The card of a folder has the measures at {self.headline!r}, the headline point; "
                "leave point out, or export a file."
            )
        return export_folder(*given, self.known_baseline, formats, overwrite)

    @property
    def has_server(self) -> bool:
        """Whether there is a server state that newcomers can join from."""
        return self._server is not None

    def server_state(self, run: int = 0) -> tuple[Tree, dict[str, Any]]:
        """Return what newcomer messages are made from: a tree of tensors and JSON-able facts."""
        if self._server is None:
            raise RunFolderError(
                "This result was read without its server; read it with sartor.load(path), which "
                "takes it from its run folder."
            )
        return self._server(run)

    def give_models(
        self,
        models: ModelMaker,
        newcomers: Callable[..., Result],
        server: Server,
        writer: Writer,
    ) -> None:
        """Give a result that was read from a folder its models, and a way in for newcomers."""
        self._models, self._newcomers, self._server = models, newcomers, server
        self.writer = writer

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

        Nobody else's model changes. See ``sartor.training.onboarding``.

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
        return one_line(self)

    def _repr_html_(self) -> str:
        return notebook_page(self)
