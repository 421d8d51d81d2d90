"""Advice from a learned prior: alone, one model, personalised, or these data cannot tell.

Two judges must agree: the losses of samples left out (cross-validation over all samples, paired),
and the evidence log p(data) of each way of sharing. A difference counts as sure if

- its 95 % interval leaves out 0 and the evidence leans the same way, by more than ``LEAN``, or
- its standard error alone leaves out 0 and the evidence is clear, by more than ``CLEAR`` nats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sartor.adviser.advice import Advice, Client, Subject
from sartor.adviser.features import View
from sartor.adviser.measured import against, measure
from sartor.adviser.plan import CostPlan, Strategy
from sartor.adviser.sharing import FACTORS, Sharing, judge
from sartor.data.federation import Federation
from sartor.methods.parts.priors import multiples_of
from sartor.results.headline import HeadlineMetric

LEAN, CLEAR = 1.0, 5.0
"""Nats of evidence: a leaning, and odds of 150 to 1."""

TWO_SIDED = 1.96
"""Standard errors of a 95 % interval."""

LITTLE = 0.01
"""A share of the loss below which a difference does not matter."""

ROUNDS = 25
"""Rounds in which the method ``evidence`` arrives."""

STEPS = 6
"""Newton steps in a round; a regression takes one."""

WAY_OF: dict[Strategy, str] = {"local": "alone", "global": "one", "personalised": "learned"}
"""A way of sharing, by strategy; also the option ``sharing`` of the method ``evidence``."""


class Gap(NamedTuple):
    """How much larger the loss of one way of sharing is than that of another.

    Attributes:
        value: the mean difference of the losses of samples left out.
        error: its standard error, paired by sample.
        nats: by how much the other's evidence is larger.
    """

    value: float
    error: float
    nats: float

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        return TWO_SIDED * self.error

    @property
    def sure(self) -> bool:
        """Whether the other way is better beyond doubt."""
        by_losses = self.value > self.half and self.nats > LEAN
        return by_losses or (self.value > self.error and self.nats > CLEAR)


def by_evidence(
    federation: Federation,
    seen: View,
    theory: Advice | None,
    budget_mb: float | None,
    budget_rounds: int | None,
    metric: HeadlineMetric | None = None,
) -> Advice:
    """Return the advice that follows from samples left out and from the evidence.

    Args:
        federation: the data.
        seen: all samples of the federation, as the linear model sees them.
        theory: what the theory of Yu et al. says; None where its conditions do not hold.
        budget_mb: megabytes that may be sent, if there is a limit.
        budget_rounds: rounds at most, if there is a limit.
        metric: what the advice is shown by beside the losses, if anything.
    """
    found = judge(seen)
    loss = {way: found.mean(way) for way in found.found}
    shared = "one" if loss["one"] <= loss["learned"] else "learned"
    gain, degree = gap(found, "alone", shared), gap(found, "one", "learned")
    back = gap(found, shared, "alone")
    strategy, verdict = decide(loss, gain, back, degree)
    way = WAY_OF[strategy]
    scale = found.scale
    people = [_client(found, i, name, way, scale) for i, name in enumerate(federation.names)]
    best = found.found["learned"].priors[found.found["learned"].best]
    sizes = seen.federation.train.sizes.double()
    variance = float(best.spread[:-1].mean() if len(best.spread) > 1 else best.spread.mean())
    pull = float(best.noise) / (float(sizes.mean()) * max(variance, 1e-300))
    curve = [loss["alone"], *found.curve.tolist(), loss["one"]]
    curve[1 + FACTORS.index(1.0)] = loss["learned"]  # the average over spreads and widths
    chosen = {"local": 0.0, "global": math.inf, "personalised": pull}[strategy]
    notes = _notes(federation, seen, found)
    measured = {} if metric is None else measure(seen, found, way, metric)
    if measured and (doubt := against(measured)) is not None:
        notes.insert(0, doubt)
    if theory is not None:
        notes.append(_beside(theory))
    if strategy == "local":
        notes.append(
            "alone, too, sends sums: they learn one ridge for all. The method local with a weight "
            "decay of a client's own sends nothing."
        )
    options = {} if way == "learned" else {"sharing": way}
    plan = _plan(strategy, chosen, seen, options, (budget_mb, budget_rounds), notes)
    return Advice(
        basis="evidence",
        strategy=strategy,
        verdict=verdict,
        reason=_reason(verdict, loss, gain, degree, sizes.mean().item()),
        prox_strength=chosen,
        clients=people,
        pulls=[0.0, *(pull / factor for factor in FACTORS), math.inf],
        errors=[value * scale for value in curve],
        rules={},
        constants={
            "n": float(sizes.mean()),
            "N": float(sizes.sum()),
            "m": float(federation.num_clients),
            "p": float(seen.clients().num_params),
            **{f"evidence_{name}": one.evidence for name, one in found.found.items()},
        },
        plan=plan,
        model=f"{seen.family} regression on {seen.kept}",
        doubts=notes,
        settings={"method": "evidence", "options": options, "rounds": plan.rounds},
        held_out={
            "alone": loss["alone"] * scale,
            "one model": loss["one"] * scale,
            "personalised": loss["learned"] * scale,
            "gain": gain.value * scale,
            "gain_half": gain.half * scale,
            "degree": degree.value * scale,
            "degree_half": degree.half * scale,
        },
        measured=measured,
        subject=Subject(seen.federation, seen, None, None, None, ROUNDS, 0, "cpu"),
    )


def gap(found: Sharing, way: str, other: str) -> Gap:
    """Compare two ways of sharing."""
    value, error = found.difference(way, other)
    nats = found.found[other].evidence - found.found[way].evidence
    return Gap(value, error, nats)


def decide(loss: dict[str, float], gain: Gap, back: Gap, degree: Gap) -> tuple[Strategy, str]:
    """Return what to do, and what can be said of it.

    Args:
        loss: mean losses of samples left out, by way of sharing.
        gain: alone − the better of the shared ways.
        back: the same the other way round.
        degree: one model − the learned prior.
    """
    # One model is simpler, so it stands unless both judges prefer to personalise.
    personal = degree.sure or (degree.value > 0 and degree.nats > LEAN)
    shared: Strategy = "personalised" if personal else "global"
    if gain.sure:
        return shared, "personalise" if personal else "one model"
    little = LITTLE * min(loss.values())
    if back.sure or back.value > back.half or gain.value + gain.half < little:
        return "local", "alone"
    if gain.value > 0:
        return shared, "cannot tell"
    return "local", "cannot tell"


def more_samples(gain: Gap, per_client: float) -> float:
    """Return how many more samples a client would need for the interval to leave out 0.

    A standard error falls as 1/√n; that the gain itself falls too is not in it, so it is a least.
    """
    if not gain.error > 0 or gain.value == 0:
        return math.inf
    return per_client * max((gain.half / abs(gain.value)) ** 2 - 1.0, 0.0)


def _client(found: Sharing, i: int, name: str, way: str, scale: float) -> Client:
    _, error = found.difference("alone", way, i)
    size = int(found.mask[i].sum())
    return Client(
        name=name,
        samples=size,
        distance=math.nan,
        noise=math.nan,
        prox_strength=math.nan,
        alone=found.mean("alone", i) * scale if size else math.nan,
        one_model=found.mean("one", i) * scale if size else math.nan,
        advised=found.mean(way, i) * scale if size else math.nan,
        half=TWO_SIDED * error * scale,
    )


def _reason(verdict: str, loss: dict[str, float], gain: Gap, degree: Gap, per_client: float) -> str:
    low = min(loss.values())

    def share(value: float) -> str:
        return f"{100.0 * value / low:+.1f} %"

    saved = f"{100.0 * gain.value / low:.1f} % ± {100.0 * gain.half / low:.1f}"
    if verdict == "personalise":
        apart = f"{100.0 * degree.value / low:.1f} % ± {100.0 * degree.half / low:.1f}"
        return (
            f"Borrowing in part lowers the loss of samples left out by {saved} against training "
            f"alone, and by {apart} against one model; the evidence agrees ({gain.nats:+.0f} and "
            f"{degree.nats:+.0f} nats)."
        )
    if verdict == "one model":
        return (
            f"One model lowers the loss of samples left out by {saved} against training alone "
            f"(evidence {gain.nats:+.0f} nats), and personalising is not better beyond doubt "
            f"({share(degree.value)} ± {100.0 * degree.half / low:.1f}, {degree.nats:+.0f} nats)."
        )
    if verdict == "alone":
        return (
            f"Nothing to gain: sharing changes the loss of samples left out by "
            f"{share(-gain.value)} ± {100.0 * gain.half / low:.1f} against training alone."
        )
    more = more_samples(gain, per_client)
    if gain.value > gain.half:
        needed = "The interval leaves out 0, but the evidence does not lean that way"
    elif more < 50 * per_client:
        needed = f"With some {max(more, 1.0):,.0f} more samples a client they could"
    else:
        needed = f"Not with {50 * per_client:,.0f} more samples a client either"
    return (
        f"Sharing changes the loss of samples left out by {share(-gain.value)} ± "
        f"{100.0 * gain.half / low:.1f} against training alone (evidence {gain.nats:+.0f} nats). "
        f"{needed}; until then the lower loss is recommended."
    )


def _notes(federation: Federation, seen: View, found: Sharing) -> list[str]:
    notes = [
        f"all {int(seen.federation.train.sizes.sum()):,} samples were used, those for validation "
        f"and testing too: each was left out {found.repeats} times in {found.folds} parts, so "
        "that the answer does not depend on a division."
    ]
    if federation.num_clients == 2:
        notes.append("with two clients the prior between clients rests on one difference alone.")
    tiny = [
        name
        for name, size in zip(federation.names, seen.federation.train.sizes.tolist(), strict=True)
        if size == 1
    ]
    if tiny:
        notes.append(
            f"{len(tiny)} clients have one sample, which cannot be left out: {', '.join(tiny[:3])}."
        )
    return notes


def _beside(theory: Advice) -> str:
    said = {
        "local": "train alone",
        "global": "one model for all",
        "personalised": f"personalise with λ = {theory.prox_strength:.3g}",
    }[theory.strategy]
    return f"the theory of Yu et al. and Chen et al., whose conditions hold here, says: {said}."


def _plan(
    strategy: Strategy,
    pull: float,
    seen: View,
    options: dict[str, str],
    limits: tuple[float | None, int | None],
    notes: list[str],
) -> CostPlan:
    """Return the cost of the rounds in which ``evidence`` arrives, or that a budget allows."""
    sizes = seen.federation.train.sizes
    down, up = (numbers * len(sizes) for numbers in round_bytes(seen, options))
    each, rounds, (budget_mb, budget_rounds) = down + up, ROUNDS, limits
    allowed = [budget_rounds or ROUNDS]
    if budget_mb is not None:
        allowed.append(max(int((budget_mb * 1e6 - down) // each), 0))
    if min(allowed) < ROUNDS:
        rounds = max(min(allowed), 1)
        notes.insert(
            0,
            f"the budget allows {min(allowed)} rounds of {each / 1e6:.3g} MB; with fewer than "
            f"{ROUNDS} the prior is not learned to its end.",
        )
    steps = 1 if seen.family == "linear" else STEPS
    return CostPlan(
        strategy=strategy,
        prox_strength=pull,
        local_lr=math.nan,
        server_lr=math.nan,
        num_local_steps=0,
        rounds=rounds,
        guaranteed_rounds=rounds,
        start=math.nan,
        accuracy=math.nan,
        bytes_total=rounds * each + down,  # the last models are solved for once more
        gradients=(rounds * (steps + 1) + steps) * _scores(seen, options) * int(sizes.sum()),
        rate=math.nan,
        guaranteed_rate=math.nan,
    )


def _scores(seen: View, options: dict[str, str]) -> int:
    """Return the gradient evaluations of a sample in a step: each score's, under each prior."""
    return max(seen.federation.num_classes, 1) * _priors(seen, options)


def _priors(seen: View, options: dict[str, str]) -> int:
    p = seen.federation.input_shape[0] * max(seen.federation.num_classes, 1)
    return len(multiples_of(options.get("sharing", "learned"), p))  # type: ignore[arg-type]


def round_bytes(seen: View, options: dict[str, str]) -> tuple[int, int]:
    """Return the bytes that a client receives and sends in a round, at 4 bytes a number."""
    p = seen.federation.input_shape[0] * max(seen.federation.num_classes, 1)
    k = _priors(seen, options)
    down = k * (p * p + p + 1) + p + 1  # covariances, centres, weights; spread, noise
    up = k * (p * p + p + 2) + 2 * p + 3  # curvatures, slopes, scores; squares, sure; three numbers
    return 4 * down, 4 * up
