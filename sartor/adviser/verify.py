"""Verification: the recommendation, clients alone and one model for all, trained and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from sartor import methods
from sartor.adviser.advice import METHODS, Advice, Subject
from sartor.adviser.trial import clustered_error
from sartor.adviser.verification import Row, Verification
from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.errors import FederationError
from sartor.core.local import Local
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines import make_engine
from sartor.results.result import Result
from sartor.theory.exact_fits import fit_coupled, fit_each
from sartor.training.driver import drive
from sartor.training.fit import fit
from sartor.training.onboarding import result_of
from sartor.training.progress import Progress
from sartor.training.settings import list_runs, make_task
from sartor.training.simulation import Simulation

WORK = 2e8
"""Gradient evaluations of single samples that verification takes at most."""

PATIENCE = 3000
"""Rounds of verification, and local steps of a round, at most."""


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


def verify(advice: Advice, progress: Progress | None = None) -> Verification:
    """Train the recommendation, LocalTrain and GlobalTrain, and put predicted beside measured.

    For the theory all three take full gradients with the steps of their plans, from zero, and are
    compared on test data; for a trial all three train as the trial did, on all training data.

    Args:
        advice: what ``advise`` returned.
        progress: shows how far it is.

    Raises:
        FederationError: there are no test samples.
    """
    about: Subject = advice.subject
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
    return compare(advice, about, found, None, [])


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
        return compare(advice, about, _solved(advice, about), None, notes)
    for name in dict.fromkeys(("local", "global", advice.strategy)):
        steps = about.plans[name]
        rounds, inner = min(steps.rounds, PATIENCE), steps.num_local_steps
        if rounds < steps.rounds:
            notes.append(f"{name} was stopped after {rounds} of {steps.rounds} rounds.")
        if inner > PATIENCE:
            notes.append(f"{name} took {PATIENCE} of {inner} local steps a round.")
            inner = PATIENCE
        if name == "local":  # clients do not wait, so that many steps a round save overhead
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
    return compare(advice, about, results, reached, notes)


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
        points=(record.use.headline,),
    )
    distances = []

    def after_round() -> None:
        if centre is not None:
            now = tree.map(lambda leaf: leaf[0], simulation.server["params"])
            distances.append(float(tree.sqdist(now, centre)))

    # Scored at the start and at the end alone: a stale value would mislead.
    drive(simulation, progress=progress, title=method, after_round=after_round, stale=False)
    return result_of(simulation, {}), distances


# ---------------------------------------------------------------------- on test data


def compare(
    advice: Advice,
    about: Subject,
    results: dict[str, Trained],
    reached: int | None,
    notes: list[str],
) -> Verification:
    """Put the trained strategies beside each other on test data.

    Args:
        advice: what was recommended, with what it expected.
        about: what was trained on.
        results: "local", "global" and the advised strategy, trained.
        reached: the round in which the stated accuracy was reached, if it was measured.
        notes: what limits the comparison.
    """
    judged = {name: judge(found.network, about.federation) for name, found in results.items()}
    chosen = judged[advice.strategy][0]
    owner = owners(about.federation)
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


def owners(federation: Federation) -> np.ndarray:
    """Return the client of every test sample, in the order of ``judge``."""
    return np.repeat(np.arange(federation.num_clients), federation.test.sizes.numpy())


def judge(
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
