"""Verification: the advice beside its rivals, on divisions of all samples that are drawn anew.

Every client's samples are divided several times, 70/30 or as the federation was. On each division
the advised strategy is carried out, and beside it training alone, one model, FedAvg with
fine-tuning, and FedProx at several λ; they are compared on the samples that were held out, paired
by division. Linear models are solved for exactly, networks are trained as the advice's trial
trained them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import methods
from sartor.adviser.advice import Advice, Subject
from sartor.adviser.by_evidence import LITTLE
from sartor.adviser.features import View
from sartor.adviser.sharing import WAYS, all_samples, solved, standardised, suitable_threads
from sartor.adviser.verification import Judgement, Row, Verification
from sartor.core import rng, tree
from sartor.core.cohort import Participation
from sartor.core.errors import FederationError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.engines import make_engine
from sartor.results.metrics import Array
from sartor.results.result import Result
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.learned_prior import Prior, solve
from sartor.theory.linear_models import Clients, basis, losses_of, predict
from sartor.training.driver import drive
from sartor.training.fit import fit
from sartor.training.onboarding import result_of
from sartor.training.progress import Progress
from sartor.training.settings import list_runs, make_task
from sartor.training.simulation import Simulation

DIVISIONS, SMALL_DIVISIONS = 20, 4
"""How often samples are divided for a linear model, and for a network."""

HELD_OUT = 0.3
"""The share of a client's samples that is held out."""

RATES = (0.03, 0.1, 0.3)
"""Rates of FedAvg with fine-tuning; the best is taken afterwards."""

QUANTILES = {SMALL_DIVISIONS: 3.182, DIVISIONS: 2.093}
"""Of Student's t at 97.5 %, with one degree of freedom less than divisions."""

WORK = 2e8
"""Gradient evaluations of single samples that following a plan takes at most."""

PATIENCE = 3000
"""Rounds in which a plan is followed, and local steps of a round, at most."""


@dataclass
class Scored:
    """One way to train, scored on every division.

    Attributes:
        method: of the library.
        losses: (divisions, clients) summed test losses.
        right: (divisions,) right answers, or NaN.
        chosen: what was chosen afterwards.
        costs: rounds, megabytes and gradients of a division, where they were counted.
    """

    method: str
    losses: Array
    right: Array
    chosen: str = ""
    costs: dict[str, Any] = field(default_factory=dict)


def verify(advice: Advice, progress: Progress | None = None) -> Verification:
    """Carry the advice and its rivals out on several divisions, and compare them.

    Args:
        advice: what ``advise`` returned.
        progress: shows how far training is.
    """
    about: Subject = advice.subject
    network = about.model is not None
    times = SMALL_DIVISIONS if network else DIVISIONS
    divided = redivide(about.federation, times, share_of(about.federation))
    scored = (_trained if network else _solved)(advice, about, divided, progress)
    reached, costs, notes = None, dict[str, Any](), list[str]()
    if advice.basis == "theory" and advice.strategy != "local":
        reached, costs, notes = _follow_plan(advice, about, progress)
    scored["advised"].costs |= costs
    return compare(advice, scored, divided, reached, notes)


def share_of(federation: Federation) -> float:
    """Return the share to hold out: the federation's own, so that a λ meets its number of samples.

    30 % where all samples are for training, as those of an advice by the evidence are.
    """
    away = len(federation.test.rows) + len(federation.val.rows)
    return away / federation.num_samples if away else HELD_OUT


def redivide(federation: Federation, divisions: int, share: float = HELD_OUT) -> list[Federation]:
    """Divide all samples of every client anew; a client of one sample keeps it for training.

    A division belongs to a client's name, not to its place in the list.

    Args:
        federation: the data.
        divisions: how many.
        share: of a client's samples that is held out.
    """
    whole = all_samples(federation)
    found = []
    for number in range(divisions):
        train: list[Tensor] = []
        test: list[Tensor] = []
        for client, name in enumerate(whole.names):
            rows = whole.train.of(client)
            order = rng.permutation(rng.fold(rng.key(number), "verify", name), len(rows))
            cut = min(max(1, round(share * len(rows))), len(rows) - 1)
            test.append(rows[order[:cut]])
            train.append(rows[order[cut:]])
        if not any(len(rows) for rows in test):
            raise FederationError(
                "Every client has a single sample, so none can be held out to verify the advice on."
            )
        parts = Ragged.from_lists(train), Ragged.from_lists(test)
        found.append(replace(whole, train=parts[0], test=parts[1]))
    return found


# ---------------------------------------------------------------------- linear models


def _solved(
    advice: Advice, about: Subject, divided: Sequence[Federation], progress: Progress | None
) -> dict[str, Scored]:
    """Solve for every way of sharing on every division."""
    seen = about.view
    assert seen is not None
    pulls = [pull for pull in advice.pulls if 0.0 < pull < math.inf]
    if len(pulls) > 12:
        pulls = [pulls[k] for k in np.linspace(0, len(pulls) - 1, 12).round().astype(int)]
    names = ("local", "global", "personalised", *map(str, range(len(pulls))))
    losses: dict[str, list[Array]] = {name: [] for name in names}
    right: dict[str, list[float]] = {name: [] for name in names}
    if progress is not None:
        progress.start(len(divided), "verification")
    for number, one in enumerate(divided):
        view = replace(seen, federation=one)
        train, test, scale = _pair(view.clients("train"), view.clients("test"))
        with suitable_threads(train.num_params):
            models = _models(advice, train, pulls)
        for name, own in models.items():
            lost, hits = _score(test, own)
            losses[name].append(lost * scale)
            right[name].append(hits)
        if progress is not None:
            progress.update(number, {})
    if progress is not None:
        progress.stop()
    found = {name: Scored("", np.stack(losses[name]), np.array(right[name])) for name in names}
    tried = [found.pop(str(k)) for k in range(len(pulls))]
    best = min(range(len(pulls)), key=lambda k: tried[k].losses.sum())
    methods_of = {"local": "local", "global": "fedavg", "personalised": "fedprox"}
    if advice.basis == "evidence":
        methods_of = dict.fromkeys(methods_of, "evidence")
    for name, method in methods_of.items():
        found[name].method = method
    return {
        "advised": found[advice.strategy],
        "local": found["local"],
        "global": found["global"],
        "fine-tuned": _fine_tuned(about, divided, None),
        "best λ tried": replace(tried[best], method="fedprox", chosen=f"λ = {pulls[best]:.3g}"),
    }


def _pair(train: Clients, test: Clients) -> tuple[Clients, Clients, float]:
    """Standardise a regression's targets by those of training."""
    if train.family != "linear":
        return train, test, 1.0
    y = train.y[train.mask]
    mean, spread = y.mean(), float(y.std(correction=0)) or 1.0
    return standardised(train)[0], replace(test, y=(test.y - mean) / spread), spread**2


def _models(advice: Advice, train: Clients, pulls: Sequence[float]) -> dict[str, Tensor]:
    """Return (clients, p) for every way of sharing, and for every λ by its number."""
    sizes = train.sizes
    if advice.basis == "evidence":
        seen: View = advice.subject.view
        ways = {way: solved(train, way, seen.intercept) for way in WAYS}
        found = {
            "local": ways["alone"].own,
            "global": ways["one"].own,
            "personalised": ways["learned"].own,
        }
        prior = ways["one"].priors[ways["one"].best]
        for k, pull in enumerate(pulls):
            spread = torch.full_like(prior.spread, float(prior.noise / (sizes.mean() * pull)))
            found[str(k)] = solve(train, Prior(spread, prior.width, prior.noise)).own
        return found
    weights = sizes / sizes.sum()
    own = fit_each(train).w
    found = {"local": own, "global": fit_pooled(train, weights).w.expand_as(own)}
    for k, pull in enumerate((*pulls, advice.prox_strength)):
        name = str(k) if k < len(pulls) else "personalised"
        if 0.0 < pull < math.inf:
            lam = torch.tensor(pull, dtype=torch.float64)
            found[name] = fit_coupled(train, weights, lam, start=own).own
        else:
            found[name] = found["local" if pull == 0.0 else "global"]
    return found


def _score(test: Clients, own: Tensor) -> tuple[Array, float]:
    """Return the summed test loss of every client, and all right answers."""
    scores = predict(test, own)
    unit = 2.0 if test.family == "linear" else 1.0
    losses = (unit * losses_of(test, scores) * test.mask).sum(-1).numpy()
    if test.family == "linear":
        return losses, math.nan
    if test.family == "logistic":
        right = (scores[..., 0] > 0) == (test.y > 0.5)
    else:
        right = (scores @ basis(test.num_classes).T).argmax(-1) == test.y
    return losses, float((right & test.mask).sum())


# ---------------------------------------------------------------------- training


def _fine_tuned(about: Subject, divided: Sequence[Federation], progress: Progress | None) -> Scored:
    """Train FedAvg with fine-tuning on all divisions, at the best of a few rates."""
    used, scale = list(divided), 1.0
    settings: dict[str, Any] = {"model": about.model, "local": about.local, "rounds": about.rounds}
    if about.view is not None:
        plain = Local(epochs=2, batch=32, lr=0.05)
        settings = {"model": about.view.network(), "local": plain, "rounds": 25}
        if about.view.family == "linear":
            y = about.federation.y.double()
            spread = float(y.std(correction=0)) or 1.0
            scaled = ((y - y.mean()) / spread).float()
            # The library's loss is half the squared error.
            used, scale = [replace(one, y=scaled) for one in divided], 2.0 * spread**2
        used = [replace(one, x=one.x.float()) for one in used]
    sweep = {"local_lr": RATES} if about.view is not None else None
    result = fit(
        "fedavg-ft",
        used,
        seeds=range(len(used)),
        sweep=sweep,
        device=about.device,
        eval_every=settings["rounds"],
        progress=progress or False,
        **settings,
    )
    names = [f"rate {rate:g}" for rate in RATES] if sweep else ()
    return _of(result, "fedavg-ft", len(used), scale, names, bool(about.federation.num_classes))


def _trained(
    advice: Advice, about: Subject, divided: Sequence[Federation], progress: Progress | None
) -> dict[str, Scored]:
    """Train as the trial did, on all divisions at once."""
    pulls = [pull for pull in advice.pulls if 0.0 < pull < math.inf]
    classes = bool(about.federation.num_classes)

    def run(method: str, names: Sequence[str] = (), **more: Any) -> Scored:
        result = fit(
            method,
            list(divided),
            model=about.model,
            local=about.local,
            rounds=about.rounds,
            seeds=range(len(divided)),
            device=about.device,
            eval_every=about.rounds,
            progress=progress,
            **more,
        )
        return _of(result, method, len(divided), 1.0, names, classes)

    # Twice the same training is one: an advised end is that end.
    found = {"local": run("local"), "global": run("fedavg"), "fine-tuned": run("fedavg-ft")}
    found["best λ tried"] = run(
        "fedprox", [f"λ = {pull:.3g}" for pull in pulls], sweep={"prox_strength": pulls}
    )
    advised = found.get(advice.strategy)
    if advised is None:
        advised = run("fedprox", hyper={"prox_strength": advice.prox_strength})
    return {"advised": replace(advised), **found}


def _of(
    result: Result,
    method: str,
    divisions: int,
    scale: float,
    names: Sequence[str],
    classes: bool,
) -> Scored:
    """Return the scores of a result, at the value of its sweep that is best on test data."""
    at = result.scores[(result.headline, "test")]
    losses = np.asarray(at.loss[:, -1], dtype=float).reshape(-1, divisions, at.loss.shape[-1])
    right = np.asarray(at.correct[:, -1], dtype=float).sum(-1).reshape(-1, divisions)
    if not classes:
        right = np.full_like(right, np.nan)
    total = np.where(np.isfinite(losses), losses, np.inf).sum((1, 2))
    best = int(total.argmin())
    costs = {
        "rounds": len(result.ledger.bytes_up[0]),
        "megabytes": float(np.mean(result.megabytes)),
        "gradients": int(np.mean(result.gradient_evaluations)),
    }
    chosen = names[best] if names else ""
    return Scored(method, scale * losses[best], right[best], chosen, costs)


# ---------------------------------------------------------------------- the plan of the theory


def _follow_plan(
    advice: Advice, about: Subject, progress: Progress | None
) -> tuple[int | None, dict[str, Any], list[str]]:
    """Train the advised strategy by its plan; return when it was near enough, and its costs."""
    plan, seen, notes = advice.plan, about.view, list[str]()
    assert plan is not None
    assert seen is not None
    if plan.gradients > WORK:
        return (
            None,
            {},
            [
                f"following the plan takes {plan.gradients:.1e} gradient evaluations, more than "
                f"{WORK:.0e}, so its rounds were not measured."
            ],
        )
    rounds, inner = min(plan.rounds, PATIENCE), plan.num_local_steps
    if rounds < plan.rounds:
        notes.append(f"the plan was followed for {rounds} of {plan.rounds} rounds.")
    if inner > PATIENCE:
        notes.append(f"it took {PATIENCE} of {inner} local steps a round.")
        inner = PATIENCE
    local = Local(steps=inner, batch=None, lr=plan.local_lr, weight_decay=seen.ridge)
    personal = advice.strategy == "personalised"
    hyper = {"prox_strength": advice.prox_strength} if personal else {}
    options = advice.settings.get("options", {}) if personal else {}
    centre = seen.tree(about.centres[advice.strategy])
    task = make_task(seen.network(), about.federation, None)
    record = methods.build(advice.method, task, local, options)
    (run,) = list_runs(record, options, hyper, {}, [0])
    simulation = Simulation(
        record,
        task,
        [about.federation],
        [run],
        lambda arena: make_engine("auto", arena, None, task),
        rounds=rounds,
        participation=Participation(),
        device=torch.device("cpu"),
        dtype=torch.float64,
        eval_every=rounds,
        points=(record.use.headline,) if len(about.federation.test.rows) else (),
    )
    distances: list[float] = []

    def after_round() -> None:
        now = tree.map(lambda leaf: leaf[0], simulation.server["params"])
        distances.append(float(tree.sqdist(now, centre)))

    # Scored at the start and at the end alone: a stale value would mislead.
    drive(simulation, progress=progress, title=advice.method, after_round=after_round, stale=False)
    result = result_of(simulation, {})
    near = [t for t, d in enumerate(distances, start=1) if d <= plan.accuracy]
    costs = {
        "rounds": len(result.ledger.bytes_up[0]),
        # It trains in float64, and a deployment would send 4 bytes a number.
        "megabytes": 0.5 * float(result.megabytes),
        "gradients": int(result.gradient_evaluations),
    }
    return near[0] if near else None, costs, notes


# ---------------------------------------------------------------------- comparison


def compare(
    advice: Advice,
    scored: Mapping[str, Scored],
    divided: Sequence[Federation],
    reached: int | None = None,
    notes: Sequence[str] = (),
) -> Verification:
    """Put the rows beside each other, and judge the advice by the intervals.

    Args:
        advice: what was recommended, with what it expected.
        scored: the advised strategy first, then its rivals, each on all divisions.
        divided: the divisions.
        reached: the round in which the stated accuracy was reached, if it was measured.
        notes: what limits the comparison.
    """
    counts = np.stack([one.test.sizes.numpy() for one in divided]).astype(float)
    total = counts.sum(1)
    share = float(total[0] / (total[0] + len(divided[0].train.rows)))
    mean = {name: one.losses.sum(1) / total for name, one in scored.items()}
    expected = {"local": advice.errors[0], "global": advice.errors[-1]}
    expected["advised"] = advice.error_at(advice.prox_strength)
    if advice.basis == "evidence":
        known = {"local": "alone", "global": "one model", "personalised": "personalised"}
        expected["advised"] = advice.held_out[known[advice.strategy]]
    rows = []
    for name, one in scored.items():
        apart = mean[name] - mean["advised"]
        accuracy = float((one.right / total).mean()) if np.isfinite(one.right).all() else math.nan
        rows.append(
            Row(
                strategy=name,
                method=one.method,
                expected=expected.get(name, math.nan),
                loss=float(mean[name].mean()),
                accuracy=accuracy,
                worse=float(apart.mean()),
                half=half_width(apart, share),
                chosen=one.chosen,
                **one.costs,
            )
        )
    gap = (scored["global"].losses - scored["local"].losses).sum(0)
    seen = counts.sum(0) > 0
    names = divided[0].names
    plan = advice.plan if advice.basis == "theory" and advice.strategy != "local" else None
    caution = "expected errors are the theory's, which held-out samples contradict."
    return Verification(
        rows=rows,
        judgement=judge(rows),
        regret=max(0.0, -min(row.worse for row in rows)),
        divisions=len(divided),
        predicted_rounds=None if plan is None else plan.rounds,
        measured_rounds=reached,
        hurt_predicted=advice.hurt,
        hurt_measured=[name for i, name in enumerate(names) if seen[i] and gap[i] > 0],
        notes=[*notes, caution] if advice.contradicted else [*notes],
    )


def half_width(apart: Array, share: float = HELD_OUT) -> float:
    """Return half the 95 % interval of a mean over divisions that share their samples.

    t · √((1/J + n_test/n_train) s²) for J divisions (Nadeau and Bengio, 2003).
    """
    count = len(apart)
    if count < 2:
        return math.nan
    spread = (1.0 / count + share / (1.0 - share)) * float(apart.var(ddof=1))
    return QUANTILES[count] * math.sqrt(spread)


def judge(rows: Sequence[Row]) -> Judgement:
    """Say what the rows say of the advice, which is the first."""
    first, *others = rows
    if any(-row.worse - row.half > 0 for row in others):
        return "not confirmed"
    ends = [row for row in others if row.strategy in ("local", "global")]
    if all(-row.worse + row.half < LITTLE * first.loss for row in ends):
        return "confirmed"
    return "cannot tell"
