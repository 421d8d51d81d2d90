"""``advise``: from a federation to a recommendation with its reason, its λ and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sartor.adviser.advice import Advice, Client
from sartor.adviser.crosscheck import FOLDS, cross_check
from sartor.adviser.estimates import ENOUGH, Estimates, Target, doubts, estimate
from sartor.adviser.features import View, view
from sartor.adviser.plan import Plan, Strategy, make_plan, round_bytes
from sartor.adviser.trial import Trial, try_pulls
from sartor.data.federation import Federation
from sartor.errors import ConfigError, FederationError, ModelError
from sartor.local import Local
from sartor.settings import Progress
from sartor.theory import coupling
from sartor.theory.constants import constants_of
from sartor.theory.heterogeneity import crossover
from sartor.theory.linear_models import Clients, fit_coupled, fit_pooled

WORTH = 0.05
"""Personalising must cut the expected error by this share, or the simpler end is advised."""


@dataclass(frozen=True)
class Subject:
    """What an advice is about, for its verification."""

    federation: Federation
    view: View | None
    clients: Clients | None
    model: nn.Module | None
    local: Local | None
    rounds: int
    seed: int
    device: str
    plans: dict[str, Plan] = field(default_factory=dict)
    centres: dict[str, Tensor] = field(default_factory=dict)


def advise(
    federation: Federation,
    *,
    model: nn.Module | None = None,
    features: str = "scaled",
    ridge: float = 0.0,
    basis: Literal["auto", "theory", "trial"] = "auto",
    target: Target = "loss",
    budget_mb: float | None = None,
    budget_rounds: int | None = None,
    accuracy: float | None = None,
    local: Local | None = None,
    rounds: int = 20,
    draws: int = 20,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Advice:
    """Say whether to federate, how much each client should personalise, and what it will cost.

    With a convex model (the default) every client fits its own data and sends its fit, with its
    noise and curvature; from these follow the heterogeneity R̂, the expected error at every λ, and
    the cost. Where that cannot be trusted (too few samples, separable classes) or for a network,
    all λ are trained as lanes of one pass and judged on validation data.

    Args:
        federation: the data.
        model: a network; None is linear, logistic or softmax regression on ``features``.
        features: "raw", "scaled", or "pca:K", for the convex model.
        ridge: ν of (ν/2)‖w‖² in every client's loss.
        basis: "theory", "trial", or the theory where it holds ("auto").
        target: what λ shall make small: excess "loss", or the error of "parameters".
        budget_mb: megabytes that may be sent, both ways, all clients.
        budget_rounds: communication rounds at most.
        accuracy: squared distance to the solution to reach; 1% of the statistical error if None.
        local: local training of a trial; for a convex model 5 epochs of step 0.1 if None.
        rounds: rounds of a trial.
        draws: drawings that calibrate the noise of the fits.
        seed: of draws and trials.
        device: of a trial.
        progress: shows how far a trial is.

    Raises:
        FederationError: one client, one class, or features that never vary.
        ConfigError: a value that cannot be right, or ``basis="theory"`` where it does not hold.

    >>> import sartor
    >>> from sartor.data.synthetic import logistic
    >>> fed, _ = logistic(spread=0.05, clients=10, samples=200, dim=3, test_samples=50)
    >>> sartor.advise(fed, features="raw").strategy
    'global'
    """
    _check(federation, budget_mb, budget_rounds, accuracy, rounds, draws, basis)
    seen, found, reasons = None, None, []
    if model is None and basis != "trial":
        seen = view(federation, features, ridge)
        clients = seen.clients()
        reasons = _too_few(federation, clients)
        if not reasons:
            weights = clients.sizes / clients.sizes.sum()
            found = estimate(clients, weights, target=target, draws=draws, seed=seed)
            reasons = _refusal(federation, clients, found)
    elif model is not None and basis == "theory":
        raise ConfigError(
            "The theory is for convex models; leave model out for a linear model of the features, "
            "or take basis='trial'."
        )
    if found is not None and seen is not None and not reasons:
        return _by_theory(
            federation, seen, clients, found, target, budget_mb, budget_rounds, accuracy, seed
        )
    ways = _ways_out(federation, seen) if reasons else []
    if basis == "theory":
        raise FederationError("\n".join([*reasons, *(f"Way out: {way}" for way in ways)]))
    if budget_rounds is not None:
        rounds = min(rounds, budget_rounds)
    network = model
    used, words = federation, "the network that was given"
    training = local or Local()
    if model is None:
        shown = seen if seen is not None else view(federation, features, ridge)
        network, used = shown.network(), shown.federation
        words = f"{shown.family} regression on {shown.kept}, trained by SGD"
        if local is None:
            training = Local(epochs=5, lr=0.1, weight_decay=ridge)
    trial = try_pulls(
        used,
        model=network,
        local=training,
        rounds=rounds,
        seed=seed,
        device=device,
        progress=progress,
    )
    about = Subject(used, None, None, network, training, rounds, seed, device)
    return _by_trial(used, trial, words, reasons, ways, about, budget_mb)


# ---- by theory -----------------------------------------------------------------------------------


def _by_theory(
    federation: Federation,
    seen: View,
    clients: Clients,
    found: Estimates,
    target: Target,
    budget_mb: float | None,
    budget_rounds: int | None,
    accuracy: float | None,
    seed: int,
) -> Advice:
    errors = found.errors("loss")
    by_target = (found.weights * found.errors(target)).sum(-1)
    mean = (found.weights * errors).sum(-1)
    squared = (found.weights * found.errors("parameters")).sum(-1)
    smoothness = float(constants_of(clients, found.noise).largest_smoothness)
    start = float((found.weights[:, None] * found.fits.w).sum(0).square().sum())

    def plan(position: int) -> Plan:
        goal = accuracy or max(0.01 * float(squared[position]), 1e-12)
        return make_plan(
            float(found.pulls[position]),
            smoothness=smoothness,
            curvatures=found.noise.smallest.clamp(min=1e-9),
            weights=found.weights,
            sizes=found.sizes,
            num_params=clients.num_params,
            start=max(start, goal),
            accuracy=goal,
        )

    theory = best = _simplest(by_target)
    notes = _cautions(federation, found)
    check = cross_check(clients, found.weights, float(found.pulls[best]), found.fits.w, seed=seed)
    reason = ""
    if check.contradicts:
        best = 0 if check.better_end == 0.0 else len(found.pulls) - 1
        end = "alone" if best == 0 else "with one model"
        reason = (
            f"Held-out samples decide: the theory's λ = {float(found.pulls[theory]):.3g} has a "
            f"loss of {check.chosen:.4g}, against {min(check.alone, check.one_model):.4g} {end}."
        )
        notes.insert(
            0,
            "the theory does not carry over to these data (a linear model may not describe them): "
            f"its choice is worse on held-out samples by {check.gap:.2g} ± {check.error:.2g}.",
        )
    unlimited = best

    def affordable(position: int) -> float:
        each = round_bytes(float(found.pulls[position]), clients.num_params, federation.num_clients)
        return _affordable(each, budget_mb, budget_rounds)

    if plan(best).strategy != "local" and plan(best).rounds > affordable(best):
        per = float((found.curvature.mean(-1) * found.weights).sum()) / 2.0
        left = torch.tensor(
            [0.0, *(plan(k).left(int(affordable(k))) for k in range(1, len(found.pulls)))]
        )
        within = mean + per * left
        if check.contradicts:  # what held-out samples ruled out stays out
            within[1:-1] = math.inf
        best = int(within.argmin())
        notes.insert(
            0,
            f"the budget allows {affordable(unlimited):.0f} rounds, but "
            f"λ = {float(found.pulls[unlimited]):.3g} needs about {plan(unlimited).rounds}; "
            f"λ = {float(found.pulls[best]):.3g} has the smallest expected error within it.",
        )
    chosen = plan(best)
    if chosen.strategy != "local" and chosen.rounds > affordable(best):
        chosen = chosen.within(int(affordable(best)))
    own = found.risks.total(found.effects.own, found.curvature / 2.0)
    distance = found.heterogeneity.distances2.clamp(min=0.0).sqrt()
    people = [
        Client(
            name=name,
            samples=int(found.sizes[i]),
            distance=float(distance[i]),
            noise=float(found.noise.total[i].sqrt()),
            prox_strength=float(found.own_pull[i]),
            alone=float(own[0, i]),
            one_model=float(own[-1, i]),
            advised=float(own[best, i]),
        )
        for i, name in enumerate(federation.names)
    ]
    constants = _constants(clients, found, smoothness)
    return Advice(
        basis="theory",
        strategy=chosen.strategy,
        reason=(reason or _reason(chosen.strategy, found, mean, best))
        if best == unlimited
        else f"The budget decides: with more of it λ = {float(found.pulls[unlimited]):.3g} would "
        f"be advised, with an expected excess loss of {float(mean[unlimited]):.4g}.",
        prox_strength=chosen.prox_strength,
        clients=people,
        pulls=found.pulls.tolist(),
        errors=mean.tolist(),
        rules=_rules(found, constants),
        constants=constants,
        plan=chosen,
        model=f"{seen.family} regression on {seen.kept}"
        + (f", ridge {seen.ridge:g}" if seen.ridge else ""),
        doubts=notes,
        settings=_run_settings(chosen, constants, seen.ridge),
        held_out={
            "alone": check.alone,
            "theory": check.chosen,
            "one model": check.one_model,
            "gap": check.gap,
            "error": check.error,
        },
        asked=_asked(clients, found, [plan(theory), plan(-1)]),
        subject=Subject(
            federation=seen.federation,
            view=seen,
            clients=clients,
            model=None,
            local=None,
            rounds=chosen.rounds,
            seed=seed,
            device="cpu",
            plans={"local": plan(0), "global": plan(-1), chosen.strategy: chosen},
            centres=_centres(clients, found.weights, chosen.prox_strength),
        ),
    )


def _centres(clients: Clients, weights: Tensor, pull: float) -> dict[str, Tensor]:
    """Return the exact global models of the strategies."""
    found = {"global": fit_pooled(clients, weights).w}
    if 0.0 < pull < math.inf:
        lam = torch.tensor(pull, dtype=torch.float64)
        found["personalised"] = fit_coupled(clients, weights, lam).centre
    return found


def _simplest(mean: Tensor) -> int:
    """Return the position of the best λ, or of an end that is nearly as good."""
    best = int(mean.argmin())
    ends = sorted((0, len(mean) - 1), key=lambda k: float(mean[k]))
    return ends[0] if float(mean[ends[0]]) <= (1.0 + WORTH) * float(mean[best]) else best


def _reason(strategy: Strategy, found: Estimates, mean: Tensor, best: int) -> str:
    share = found.weights * (1.0 - found.weights)
    noise = math.sqrt(float((share * found.noise.total).sum() / share.sum()))
    spread = found.fits.w.shape[-1] * float(found.effects.tau2) * float(share.sum())
    apart = f"the clients' best models are taken to lie {math.sqrt(spread):.3g} from their mean"
    chance = f"their own fits are off by {noise:.3g} for lack of samples"
    if strategy == "global":
        return f"Alike: {apart} and {chance}, so pooling removes more error than it adds."
    if strategy == "local":
        return f"Too different: {apart} while {chance}, so there is little to borrow."
    saved = 100.0 * (1.0 - float(mean[best]) / min(float(mean[0]), float(mean[-1])))
    return (
        f"In between: {apart} and {chance}; sharing in part saves {saved:.0f}% of the expected "
        "excess loss against the better of both ends."
    )


def _rules(found: Estimates, constants: dict[str, float]) -> dict[str, float]:
    """λ by every rule; R̂ = 0 gives ∞."""
    radius = math.sqrt(max(float(found.heterogeneity.radius2), 0.0))
    n, total, m = constants["n"], constants["N"], int(constants["m"])
    big, small, rho = constants["L"], constants["mu"], constants["rho"]
    if radius == 0.0:
        rules = dict.fromkeys(("v1 (ρ = 2)", "v1", "v2", "shrinkage"), math.inf)
    else:
        rules = {
            "v1 (ρ = 2)": float(coupling.v1(radius, n)),
            "v1": float(coupling.v1(radius, n, rho)),
            "v2": float(coupling.v2(radius, n, total, big, small, rho)),
            "shrinkage": float(coupling.shrinkage(radius, n, m, small, rho)),
        }
    return {**rules, "expected error": float(found.pull)}


def _constants(clients: Clients, found: Estimates, smoothness: float) -> dict[str, float]:
    about = found.heterogeneity
    return {
        "n": float(found.sizes.mean()),
        "N": float(found.sizes.sum()),
        "m": float(len(found.sizes)),
        "p": float(clients.num_params),
        "L": smoothness,
        "mu": float(found.noise.smallest.min()),
        "rho": float(found.noise.gradient2.max().sqrt()),
        "R2": float(about.radius2),
        "R2_standard_error": float(about.standard_error),
        "R2_jackknife": float(about.jackknife),
        "tau2": float(found.effects.tau2),
        "crossover": float(crossover(about, found.weights)),
    }


def _run_settings(plan: Plan, constants: dict[str, float], ridge: float) -> dict[str, Any]:
    """Return arguments of ``fit`` that carry the plan out, with full gradients."""
    local = {
        "steps": plan.num_local_steps,
        "batch": None,
        "lr": plan.local_lr,
        "weight_decay": ridge,
    }
    if plan.strategy != "personalised":
        return {"method": "local" if plan.strategy == "local" else "fedavg", "local": local}
    options = {
        "preset": "corollary1",
        "weights": "samples",
        "smoothness": constants["L"],
        "strong_convexity": min(max(constants["mu"], 1e-9), constants["L"]),
    }
    hyper = {"prox_strength": plan.prox_strength}
    return {"method": "fedprox", "local": local, "options": options, "hyper": hyper}


def _affordable(each: int, budget_mb: float | None, budget_rounds: int | None) -> float:
    """Return the rounds that a budget allows, of so many bytes each; ∞ without a limit."""
    limits = [math.inf if budget_rounds is None else float(budget_rounds)]
    if budget_mb is not None and each:
        limits.append(float((budget_mb * 1e6 + 0.5) // each))
    return min(limits)


def _asked(clients: Clients, found: Estimates, plans: list[Plan]) -> dict[str, int]:
    """Return the bytes of the estimates and of the held-out check, all clients, at 4 a number.

    A client sends its fit, variances, curvatures and five numbers, receives w̄ and sends two numbers
    for the standard error; the calibration adds k one way and b_i the other. The check trains the
    theory's choice and one model on every fold, and a client sends three sums of losses.
    """
    p, m = clients.num_params, len(found.sizes)
    numbers = (3 * p + 5) + (p + 2)
    if found.calibrated:
        numbers += p + 1
    trained = {plan.prox_strength: plan.bytes_total for plan in plans}
    return {
        "estimates": 4 * numbers * m,
        "held-out check": FOLDS * (sum(trained.values()) + 4 * 3 * m),
    }


# ---- refusals ------------------------------------------------------------------------------------


def _check(
    federation: Federation,
    budget_mb: float | None,
    budget_rounds: int | None,
    accuracy: float | None,
    rounds: int,
    draws: int,
    basis: str,
) -> None:
    if federation.num_clients < 2:
        raise FederationError(
            "Advice needs at least two clients, got one: with nobody to borrow from, the answer is "
            "to train alone."
        )
    faults = [
        f"{name} must be positive, got {value:g}"
        + ("; leave it out for no limit." if name.startswith("budget") else ".")
        for name, value in (
            ("budget_mb", budget_mb),
            ("budget_rounds", budget_rounds),
            ("accuracy", accuracy),
            ("rounds", rounds),
        )
        if value is not None and not value > 0
    ]
    if draws < 0 or draws == 1:
        faults.append(f"draws must be 0 or at least 2, got {draws}.")
    if basis not in ("auto", "theory", "trial"):
        faults.append(f"basis must be 'auto', 'theory' or 'trial', got {basis!r}.")
    if faults:
        raise ConfigError("\n".join(faults))


def _refusal(federation: Federation, clients: Clients, found: Estimates) -> list[str]:
    """Say why the estimates cannot be trusted; nothing if they can."""
    each = doubts(clients, found.fits, found.noise)
    bad = [(name, why) for name, why in zip(federation.names, each, strict=True) if why]
    return _in_words(bad, len(each))


def _too_few(federation: Federation, clients: Clients) -> list[str]:
    """Say before any fit that clients have fewer samples than parameters, which no fit can mend."""
    if clients.ridge:
        return []
    p = clients.num_params
    bad = [
        (name, [f"has {n:.0f} samples for {p} parameters (at least {ENOUGH * p:.0f} are needed)"])
        for name, n in zip(federation.names, clients.sizes.tolist(), strict=True)
        if n < p
    ]
    return _in_words(bad, federation.num_clients)


def _in_words(bad: list[tuple[str, list[str]]], total: int) -> list[str]:
    if not bad:
        return []
    shown = "; ".join(f"{name} {' and '.join(why)}" for name, why in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [
        f"the theory does not hold for {len(bad)} of {total} clients ({shown}{more}), so R̂ and "
        "the expected errors would be wrong."
    ]


def _ways_out(federation: Federation, seen: View | None) -> list[str]:
    ways: list[str] = []
    if seen is None:
        return ways
    least = float(federation.train.sizes.min())
    outputs = seen.num_classes - 1 if seen.family == "softmax" else 1
    keep = int(least // (ENOUGH * outputs)) - 1
    width = seen.federation.input_shape[0] - 1
    if 1 <= keep < width:
        ways.append(f"fewer features, features='pca:{keep}', suit the smallest client.")
    if not seen.ridge:
        ways.append(
            "a ridge term, such as ridge=0.1, makes every fit exist (R is then that of the ridge "
            "solutions)."
        )
    small = [
        name
        for name, size in zip(federation.names, federation.train.sizes.tolist(), strict=True)
        if size < ENOUGH * outputs * 2
    ]
    if small and len(small) < federation.num_clients - 1:
        ways.append(f"leave out clients with very few samples ({', '.join(small[:5])}).")
    ways.append("a frozen feature extractor with few outputs, and its features as x.")
    return ways


def _cautions(federation: Federation, found: Estimates) -> list[str]:
    notes = []
    if federation.num_clients == 2:
        notes.append("with two clients the spread between clients rests on one difference alone.")
    about = found.heterogeneity
    if float(about.radius2) < float(about.standard_error):
        notes.append("R̂ is within one standard error of 0: the clients may have the same model.")
    return notes


# ---- by trial ------------------------------------------------------------------------------------


def _by_trial(
    federation: Federation,
    trial: Trial,
    words: str,
    reasons: list[str],
    ways: list[str],
    about: Subject,
    budget_mb: float | None,
) -> Advice:
    mean = trial.mean
    if not np.isfinite(mean).any():
        raise ModelError("Every λ diverged; try a smaller learning rate.")
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
    plan = Plan(
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
    method = {"local": "local", "global": "fedavg", "personalised": "fedprox"}[strategy]
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
        settings={"method": method, "hyper": hyper, "rounds": trial.rounds},
        asked={"trial": trial.asked},
        subject=about,
    )
