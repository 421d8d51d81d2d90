"""Afterwards: the recommendation, everybody alone and one model for all, trained and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from sartor import methods, tree
from sartor.adviser.advice import METHODS
from sartor.adviser.trial import clustered_error
from sartor.cohort import Participation
from sartor.data.federation import Federation
from sartor.engines import make_engine
from sartor.errors import ConfigError, FederationError
from sartor.fit import fit
from sartor.local import Local
from sartor.result import Result
from sartor.settings import Progress, list_runs, make_task
from sartor.simulation import Simulation
from sartor.table import Table, jsonable
from sartor.theory.exact_fits import fit_coupled, fit_each
from sartor.tree import Tree

if TYPE_CHECKING:
    from sartor.adviser.advice import Advice
    from sartor.adviser.subject import Subject

WORK = 2e8
"""Gradient evaluations of single samples that verification takes at most."""

PATIENCE = 3000
"""Rounds of verification, and local steps of a round, at most."""


@dataclass(frozen=True)
class Row:
    """One strategy, trained.

    Attributes:
        strategy: "advised", "local" or "global".
        method: of the library.
        expected: the adviser's mean error: excess loss (theory) or validation loss (trial).
        loss: mean test loss.
        accuracy: share of right answers on test data; NaN for regression.
        worse: mean test loss above that of the advised strategy.
        standard_error: of that difference, paired, with clients as the units: the test samples of a
            client share one model (``trial.clustered_error``).
        rounds: of training.
        megabytes: sent, both ways, at 4 bytes a number.
        gradients: gradient evaluations.
        sample_error: the standard error if every test sample were a unit of its own, as for these
            very models.
    """

    strategy: str
    method: str
    expected: float
    loss: float
    accuracy: float
    worse: float
    standard_error: float
    rounds: int
    megabytes: float
    gradients: int
    sample_error: float = math.nan


@dataclass(frozen=True)
class Verification:
    """Predicted beside measured.

    Attributes:
        rows: advised, local and global; an advised end stands twice.
        holds: the advised strategy's test loss is at most one standard error (clients as units)
            above the better end.
        predicted_rounds: rounds to the stated accuracy; None for a trial.
        measured_rounds: when the global model was that near; None if not reached or not measured.
        hurt_predicted: clients that one model was expected to hurt.
        hurt_measured: clients whose test loss with one model is above that of training alone.
        notes: what limits the comparison.
    """

    rows: list[Row]
    holds: bool
    predicted_rounds: int | None
    measured_rounds: int | None
    hurt_predicted: list[str]
    hurt_measured: list[str]
    notes: list[str]

    def table(self) -> Table:
        """Return predicted beside measured, a row per strategy."""
        columns = [
            "strategy",
            "method",
            "expected",
            "test loss",
            "above advised",
            "± clients",
            "± samples",
        ]
        columns += ["accuracy %", "rounds", "MB", "gradients"]
        rows = [
            [
                r.strategy,
                r.method,
                r.expected,
                r.loss,
                r.worse,
                r.standard_error,
                r.sample_error,
                100.0 * r.accuracy,
                r.rounds,
                r.megabytes,
                r.gradients,
            ]
            for r in self.rows
        ]
        notes = {
            "±": "standard errors of the difference: with clients as units, which counts, and with "
            "test samples as units, which takes the trained models as given"
        }
        return Table(columns, rows, notes, title="Predicted and measured")

    def summary(self) -> str:
        """Return the outcome in a few lines."""
        end = min(self.rows[1:], key=lambda row: row.loss)
        first = self.rows[0]
        said = "holds" if self.holds else "does NOT hold"
        against = (
            f"that of the better end ({end.strategy}) {end.loss:.4g}, a difference of "
            f"{-end.worse:+.2g} with standard error {end.standard_error:.2g} over clients."
        )
        if end.method == first.method:  # an advised end that is the better one
            other = max(self.rows[1:], key=lambda row: row.loss)
            against = (
                f"that of the other end ({other.strategy}) {other.loss:.4g}, a difference of "
                f"{-other.worse:+.2g} with standard error {other.standard_error:.2g} over clients."
            )
        lines = [f"The recommendation {said}: its test loss is {first.loss:.4g}, {against}"]
        if self.predicted_rounds is not None:
            found = self.measured_rounds
            lines.append(
                f"Rounds to the stated accuracy: {self.predicted_rounds} predicted, "
                + (f"{found} measured." if found is not None else "not reached or not measured.")
            )
        both = set(self.hurt_predicted) & set(self.hurt_measured)
        lines.append(
            f"Hurt by one model: {len(self.hurt_predicted)} clients expected, "
            f"{len(self.hurt_measured)} measured, {len(both)} of them the same."
        )
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        values = {**vars(self), "rows": [vars(row) for row in self.rows]}
        found: dict[str, Any] = jsonable(values)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verification:
        """Return the verification that ``to_dict`` wrote down."""
        numbers: list[dict[str, Any]] = [
            {k: math.nan if v is None else v for k, v in row.items()} for row in values["rows"]
        ]
        rows = [Row(**row) for row in numbers]
        return cls(**{**values, "rows": rows})

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()


def verify(advice: Advice, *, progress: Progress | None = None) -> Verification:
    """Train the recommendation, LocalTrain and GlobalTrain, and put predicted beside measured.

    For the theory all three take full gradients with the steps of their plans, from zero, and are
    compared on test data; for a trial all three train as the trial did, on all training data.

    Args:
        advice: what ``advise`` returned.
        progress: shows how far it is.

    Raises:
        ConfigError: the advice was read from a file, which has no data to train on.
        FederationError: there are no test samples.
    """
    about: Subject | None = advice.subject
    if about is None:
        raise ConfigError(
            "This advice was read from a file, which holds no data to train on; ask again with "
            "sartor.advise(federation), or sartor advise --verify, and verify that."
        )
    if not len(about.federation.test.rows):
        raise FederationError(
            "There are no test samples to verify the advice on; hold some out, for example with "
            "Federation.from_arrays(..., test=0.25)."
        )
    run = _by_plan if advice.basis == "theory" else _by_training
    return run(advice, about, progress)


def _by_training(advice: Advice, about: Subject, progress: Progress | None) -> Verification:
    """Train as the trial did, on all training data."""
    strategies: list[str] = list(dict.fromkeys(("local", "global", advice.strategy)))
    results = {
        name: fit(
            METHODS[name],
            about.federation,
            model=about.model,
            local=about.local,
            rounds=about.rounds,
            hyper={"prox_strength": advice.prox_strength} if name == "personalised" else {},
            seeds=about.seed,
            device=about.device,
            eval_every=max(1, about.rounds // 10),
            progress=progress,
        )
        for name in strategies
    }
    found = {name: _trained(result, 1.0) for name, result in results.items()}
    return _compare(advice, about, found, None, [])


class Trained(NamedTuple):
    """The models of one strategy, and what they cost.

    Attributes:
        network: from the number of a client to its model.
        rounds: of training.
        megabytes: sent, both ways.
        gradients: gradient evaluations.
    """

    network: Callable[[int], nn.Module]
    rounds: int
    megabytes: float
    gradients: int


def _trained(result: Result, scale: float) -> Trained:
    return Trained(
        result.model,
        len(result.ledger.bytes_up[0]),
        scale * float(result.megabytes),
        int(result.gradient_evaluations),
    )


def _solved(advice: Advice, about: Subject) -> dict[str, Trained]:
    """Return the exact solutions that the plans lead to, with the costs that the plans state."""
    clients, seen = about.clients, about.view
    assert clients is not None
    assert seen is not None
    weights = clients.sizes / clients.sizes.sum()
    own = {"local": fit_each(clients).w}
    own["global"] = about.centres["global"].expand_as(own["local"])
    if advice.strategy == "personalised":
        pull = torch.tensor(advice.prox_strength, dtype=torch.float64)
        own["personalised"] = fit_coupled(clients, weights, pull, start=own["local"]).own
    task = make_task(seen.network(), about.federation, None)
    return {
        name: Trained(
            lambda client, name=name: task.with_params(  # type: ignore[misc]
                {leaf: value.double() for leaf, value in seen.tree(own[name][client]).items()}
            ),
            about.plans[name].rounds,
            about.plans[name].bytes_total / 1e6,
            about.plans[name].gradients,
        )
        for name in own
    }


def _by_plan(advice: Advice, about: Subject, progress: Progress | None) -> Verification:
    """Train with the steps of the plans, and watch the distance from the exact solution."""
    plan, seen = advice.plan, about.view
    assert plan is not None
    assert seen is not None
    notes: list[str] = []
    reached: int | None = None
    results: dict[str, Trained] = {}
    work = sum(about.plans[name].gradients for name in {"local", "global", advice.strategy})
    if work > WORK:
        notes.append(
            f"full-gradient training by these plans takes {work:.1e} gradient evaluations, more "
            f"than {WORK:.0e}; the exact solutions are compared instead, with the costs of the "
            "plans, and rounds were not measured."
        )
        return _compare(advice, about, _solved(advice, about), None, notes)
    for name in dict.fromkeys(("local", "global", advice.strategy)):
        steps = about.plans[name]
        rounds, inner = min(steps.rounds, PATIENCE), steps.num_local_steps
        if rounds < steps.rounds:
            notes.append(f"{name} was stopped after {rounds} of {steps.rounds} rounds.")
        if inner > PATIENCE:
            notes.append(f"{name} took {PATIENCE} of {inner} local steps a round.")
            inner = PATIENCE
        if name == "local":  # nobody waits for anybody: many steps a round save bookkeeping
            inner = math.ceil(rounds / 50)
            rounds = math.ceil(rounds / inner)
        local = Local(steps=inner, batch=None, lr=steps.local_lr, weight_decay=seen.ridge)
        personal = name == "personalised"
        centre = None if name == "local" else seen.tree(about.centres[name])
        result, distances = _watched(
            METHODS[name],
            about.federation,
            seen.network(),
            local,
            rounds,
            {"prox_strength": advice.prox_strength} if personal else {},
            advice.settings.get("options", {}) if personal else {},
            centre,
            progress,
        )
        # It trains in float64, and a deployment would send 4 bytes a number.
        results[name] = _trained(result, 0.5)
        if name == advice.strategy and distances:
            near = [t for t, d in enumerate(distances, start=1) if d <= plan.accuracy]
            reached = near[0] if near else None
    return _compare(advice, about, results, reached, notes)


def _watched(
    method: str,
    federation: Federation,
    network: nn.Module,
    local: Local,
    rounds: int,
    hyper: dict[str, float],
    options: dict[str, Any],
    centre: Tree | None,
    progress: Progress | None,
) -> tuple[Result, list[float]]:
    """Train one method in float64; return it, and the global model's distances after each round."""
    task = make_task(network, federation, None)
    record = methods.build(method, task, local, options)
    (run,) = list_runs(record, options, hyper, {}, [0])
    simulation = Simulation(
        record,
        task,
        [federation],
        [run],
        lambda arena: make_engine("auto", arena, None, task),
        rounds=rounds,
        participation=Participation(),
        device=torch.device("cpu"),
        dtype=torch.float64,
        eval_every=rounds,
        points=(record.headline,),
    )
    distances = []
    if progress is not None:
        progress.start(rounds, method)
    try:
        while not simulation.finished:
            info = simulation.step()
            if centre is not None:
                now = tree.map(lambda leaf: leaf[0], simulation.server["params"])
                distances.append(float(tree.sqdist(now, centre)))
            if progress is not None:
                # Scored at the start and at the end alone: a stale value would mislead.
                seen = info if simulation.finished else {**info, "accuracy": None, "value": None}
                progress.update(simulation.round_index - 1, seen)
    finally:
        if progress is not None:
            progress.stop()
    return simulation.result({}, None), distances


def _compare(
    advice: Advice,
    about: Subject,
    results: dict[str, Trained],
    reached: int | None,
    notes: list[str],
) -> Verification:
    judged = {name: _judge(found.network, about.federation) for name, found in results.items()}
    chosen = judged[advice.strategy][0]
    owner = _owners(about.federation)
    share = np.bincount(owner, minlength=about.federation.num_clients).astype(float)
    expected = {"local": advice.errors[0], "global": advice.errors[-1]}
    if advice.contradicted:
        notes = [*notes, "expected errors are the theory's, which held-out samples contradict."]
    rows = []
    for label, name in (("advised", advice.strategy), ("local", "local"), ("global", "global")):
        losses, right = judged[name]
        apart = losses - chosen
        mean = np.bincount(owner, apart, len(share)) / np.maximum(share, 1.0)
        by_sample = float(apart.std(ddof=1) / math.sqrt(len(apart))) if len(apart) > 1 else 0.0
        several = int((share > 0).sum()) > 1
        result = results[name]
        rows.append(
            Row(
                strategy=label,
                method=METHODS[name],
                expected=expected.get(name, advice.error_at(advice.prox_strength)),
                loss=float(losses.mean()),
                accuracy=float(right.mean()) if about.federation.num_classes else math.nan,
                worse=float(apart.mean()),
                standard_error=clustered_error(mean, share / share.sum()) if several else by_sample,
                rounds=result.rounds,
                megabytes=result.megabytes,
                gradients=result.gradients,
                sample_error=by_sample,
            )
        )
    end = min(rows[1:], key=lambda row: row.loss)
    people = range(about.federation.num_clients)
    gap = judged["global"][0] - judged["local"][0]
    hurt = [
        about.federation.names[i]
        for i in people
        if (owner == i).any() and float(gap[owner == i].mean()) > 0
    ]
    theory = advice.basis == "theory" and advice.plan is not None and advice.strategy != "local"
    return Verification(
        rows=rows,
        holds=-end.worse <= end.standard_error,
        predicted_rounds=advice.plan.rounds if theory and advice.plan else None,
        measured_rounds=reached,
        hurt_predicted=advice.hurt,
        hurt_measured=hurt,
        notes=notes,
    )


def _owners(federation: Federation) -> np.ndarray:
    """Return the client of every test sample, in the order of ``_judge``."""
    return np.repeat(np.arange(federation.num_clients), federation.test.sizes.numpy())


def _judge(
    network_of: Callable[[int], nn.Module], federation: Federation
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of every test sample under its client's model, and whether it is right."""
    task = make_task(network_of(0), federation, None)
    losses, right = [], []
    with torch.no_grad():
        for client in range(federation.num_clients):
            rows = federation.test.of(client)
            if not len(rows):
                continue
            network = network_of(client)
            x = federation.x[rows]
            like = next(network.parameters()).dtype if x.is_floating_point() else x.dtype
            scores = network(x.to(like))
            losses.append(task.criterion(scores, federation.y[rows]).double())
            right.append(task.is_correct(scores, federation.y[rows]))
    return torch.cat(losses).numpy(), torch.cat(right).numpy()
