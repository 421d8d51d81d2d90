"""Advice from a trial: the λ with the smallest validation loss, and what its rounds would cost."""

from __future__ import annotations

import math

import numpy as np

from sartor.adviser.advice import METHODS, Advice, Client, Subject
from sartor.adviser.plan import CostPlan, Strategy
from sartor.adviser.trial import Trial
from sartor.core.errors import ModelError
from sartor.data.federation import Federation


def by_trial(
    federation: Federation,
    trial: Trial,
    words: str,
    reasons: list[str],
    ways: list[str],
    about: Subject,
    budget_mb: float | None,
) -> Advice:
    """Return the advice that follows from the losses of a trial.

    Args:
        federation: the data.
        trial: validation losses of every client at every λ.
        words: what was trained.
        reasons: why the theory was not asked, if it was meant to be.
        ways: what would make the theory hold.
        about: what a verification trains.
        budget_mb: megabytes that may be sent, if there is a limit.

    Raises:
        ModelError: training diverged at every λ.
    """
    mean = trial.mean
    if not np.isfinite(mean).any():
        raise ModelError(
            f"Every λ diverged with lr={trial.local.lr:g}; pass local=Local(lr=...) with a smaller "
            "one."
        )
    best = trial.best
    pull = trial.pulls[best]
    strategy: Strategy = "local" if best == 0 else "global" if math.isinf(pull) else "personalised"
    own = np.argmin(np.where(np.isfinite(trial.losses), trial.losses, np.inf), axis=0)
    people = [
        Client(
            name=name,
            samples=int(federation.train.sizes[i]),
            distance=math.nan,
            noise=math.nan,
            prox_strength=trial.pulls[int(own[i])],
            alone=float(trial.losses[0, i]),
            one_model=float(trial.losses[-1, i]),
            advised=float(trial.losses[best, i]),
        )
        for i, name in enumerate(federation.names)
    ]
    ends = {"alone": float(mean[0]), "with one model": float(mean[-1])}
    near = min(ends, key=lambda name: ends[name])
    reason = (
        f"Validation loss is smallest for λ = {pull:.3g}: {mean[best]:.4g}, against "
        f"{ends[near]:.4g} {near}, a gain of {trial.margin:.2g} ± {trial.noise:.2g}."
        if strategy == "personalised"
        else f"Validation loss is {mean[best]:.4g} {near}; no λ between is better beyond its noise."
    )
    rounds = max(trial.steady[best], 1)
    sent = 0 if strategy == "local" else int(trial.megabytes * 1e6 * rounds / trial.rounds)
    notes = list(reasons)
    if any(trial.steady[k] >= trial.rounds for k in (best, len(trial.pulls) - 1)):
        notes.append(
            f"the losses were still falling after {trial.rounds} rounds; sharing may need more of "
            "them than training alone, so try again with rounds twice as many."
        )
    if budget_mb is not None and sent > budget_mb * 1e6:
        allowed = max(1, int(rounds * budget_mb * 1e6 / sent))
        notes.append(f"the budget of {budget_mb:g} MB allows {allowed} of about {rounds} rounds.")
    plan = CostPlan(
        strategy=strategy,
        prox_strength=pull,
        local_lr=trial.local.lr,
        server_lr=0.0 if strategy != "personalised" else 1.0 / pull,
        num_local_steps=trial.local.steps or trial.local.epochs,
        rounds=rounds,
        guaranteed_rounds=trial.rounds,
        start=float(mean[best]),
        accuracy=0.01 * float(mean[best]),
        bytes_total=sent,
        gradients=int(trial.gradients * rounds / trial.rounds),
        rate=math.nan,
        guaranteed_rate=math.nan,
    )
    hyper = {"prox_strength": pull} if strategy == "personalised" else {}
    return Advice(
        basis="trial",
        strategy=strategy,
        reason=reason,
        prox_strength=pull,
        clients=people,
        pulls=list(trial.pulls),
        errors=mean.tolist(),
        rules={},
        constants={
            "n": float(federation.train.sizes.double().mean()),
            "N": float(federation.train.sizes.sum()),
            "m": float(federation.num_clients),
        },
        plan=plan,
        model=words,
        doubts=notes,
        ways_out=ways,
        settings={"method": METHODS[strategy], "hyper": hyper, "rounds": trial.rounds},
        asked={"trial": trial.asked},
        subject=about,
    )
