"""Afterwards: the recommendation, everybody alone and one model for all, trained and compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sartor import methods
from sartor.adviser.advice import METHODS
from sartor.adviser.judging import Trained, compare
from sartor.adviser.verification import Verification
from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, FederationError
from sartor.core.local import Local
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines import make_engine
from sartor.results.result import Result
from sartor.theory.exact_fits import fit_coupled, fit_each
from sartor.training.fit import fit
from sartor.training.progress import Progress
from sartor.training.settings import list_runs, make_task
from sartor.training.simulation import Simulation

if TYPE_CHECKING:
    from sartor.adviser.advice import Advice
    from sartor.adviser.subject import Subject

WORK = 2e8
"""Gradient evaluations of single samples that verification takes at most."""

PATIENCE = 3000
"""Rounds of verification, and local steps of a round, at most."""


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
