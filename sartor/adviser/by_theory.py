"""Advice from estimates: the λ with the smallest expected error, within a budget, and its cost."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sartor.adviser.advice import METHODS, Advice, Client, Subject
from sartor.adviser.crosscheck import FOLDS, cross_check
from sartor.adviser.estimates import Estimates, Target
from sartor.adviser.features import View
from sartor.adviser.plan import CostPlan, Strategy, make_plan, round_bytes
from sartor.data.federation import Federation
from sartor.theory import coupling
from sartor.theory.constants import constants_of
from sartor.theory.exact_fits import fit_coupled, fit_pooled
from sartor.theory.heterogeneity import crossover
from sartor.theory.linear_models import Clients

WORTH = 0.05
"""Personalising must cut the expected error by this share, or the simpler end is advised."""


def by_theory(
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
    """Return the advice that follows from what was estimated.

    Args:
        federation: the data.
        seen: the features that the model sees.
        clients: the clients' samples as a linear model has them.
        found: heterogeneity, noise, and the expected errors at every λ.
        target: what λ shall make small.
        budget_mb: megabytes that may be sent, if there is a limit.
        budget_rounds: rounds at most, if there is a limit.
        accuracy: squared distance to the solution to reach; 1% of the statistical error if None.
        seed: of the folds of the held-out check.
    """
    errors = found.errors("loss")
    by_target = (found.weights * found.errors(target)).sum(-1)
    mean = (found.weights * errors).sum(-1)
    squared = (found.weights * found.errors("parameters")).sum(-1)
    smoothness = float(constants_of(clients, found.noise).largest_smoothness)
    start = float((found.weights[:, None] * found.fits.w).sum(0).square().sum())

    def plan(position: int) -> CostPlan:
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
    own = found.own_errors()
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
    """Return λ by every rule; R̂ = 0 gives ∞."""
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


def _run_settings(plan: CostPlan, constants: dict[str, float], ridge: float) -> dict[str, Any]:
    """Return arguments of ``fit`` that carry the plan out, with full gradients."""
    local = {
        "steps": plan.num_local_steps,
        "batch": None,
        "lr": plan.local_lr,
        "weight_decay": ridge,
    }
    if plan.strategy != "personalised":
        return {"method": METHODS[plan.strategy], "local": local}
    options = {
        "preset": "corollary1",
        "weights": "samples",
        "smoothness": constants["L"],
        "strong_convexity": min(max(constants["mu"], 1e-9), constants["L"]),
    }
    hyper = {"prox_strength": plan.prox_strength}
    return {"method": METHODS[plan.strategy], "local": local, "options": options, "hyper": hyper}


def _affordable(each: int, budget_mb: float | None, budget_rounds: int | None) -> float:
    """Return the rounds that a budget allows, of so many bytes each; ∞ without a limit."""
    limits = [math.inf if budget_rounds is None else float(budget_rounds)]
    if budget_mb is not None and each:
        limits.append(float((budget_mb * 1e6 + 0.5) // each))
    return min(limits)


def _asked(clients: Clients, found: Estimates, plans: list[CostPlan]) -> dict[str, int]:
    """Return the bytes of the estimates and of the held-out check, all clients, at 4 a number.

    A client sends the half of its curvature that differs and receives the eigenvectors of their
    mean; it sends its fit, variances, curvatures and five numbers, receives w̄ and sends two numbers
    for the standard error; the calibration adds k one way and b_i the other. The check trains the
    theory's choice and one model on every fold, and a client sends three sums of losses.
    """
    p, m = clients.num_params, len(found.sizes)
    numbers = p * (p + 1) // 2 + p * p + (3 * p + 5) + (p + 2)
    if found.calibrated:
        numbers += p + 1
    trained = {plan.prox_strength: plan.bytes_total for plan in plans}
    return {
        "estimates": 4 * numbers * m,
        "held-out check": FOLDS * (sum(trained.values()) + 4 * 3 * m),
    }


def _cautions(federation: Federation, found: Estimates) -> list[str]:
    notes = []
    if federation.num_clients == 2:
        notes.append("with two clients the spread between clients rests on one difference alone.")
    about = found.heterogeneity
    if float(about.radius2) < float(about.standard_error):
        notes.append("R̂ is within one standard error of 0: the clients may have the same model.")
    return notes
