"""Schedules of the local rate: hand-written loops, every method, every engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor import fit
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Method, Phase, changed
from sartor.core.schedule import parse
from sartor.methods import METHODS, build
from sartor.training.onboarding import onboard
from tests.toys import Net, assert_same, federation, net_task, outcome, personal, q3, run
from tests.toys import simulation as simulate

QUADRATICS = list(zip((1.0, 2.0, 4.0), (0.0, 3.0, 6.0), strict=True))
BY_HAND: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 1.0,
    "warmup:3": lambda t: (1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0)[t],
    "step:2:0.25": lambda t: (1.0, 1.0, 0.25, 0.25, 0.0625, 0.0625)[t],
    "cosine:6": lambda t: 0.5 * (1 + math.cos(math.pi * t / 6)),
    "cosine:6:0.2": lambda t: 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * t / 6)),
    "warmup:2+cosine:6": lambda t: (
        0.5 if t == 0 else 0.5 * (1 + math.cos(math.pi * max(t - 2, 0) / 4))
    ),
    "warmup:2+step:2:0.5": lambda t: (0.5, 1.0, 1.0, 1.0, 0.5, 0.5)[t],
}


@pytest.mark.parametrize("text", BY_HAND)
@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_the_rate_is_that_of_a_loop_written_by_hand(text: str, engine: str) -> None:
    """On a(w − c)²/2 two steps a round with η_0 δ^t s(t) are one product, in both engines."""
    local = Local(steps=2, batch=None, lr=0.2, lr_schedule=text, lr_decay=0.9)
    found = personal(q3("local", local, rounds=6, start=1.0, engine=engine))
    for (a, c), w in zip(QUADRATICS, found, strict=True):
        mine = 1.0
        for t in range(6):
            for _ in range(2):
                mine -= 0.2 * 0.9**t * BY_HAND[text](t) * a * (mine - c)
        assert w == pytest.approx(mine, rel=1e-12, abs=1e-12)


def test_work_after_the_last_round_takes_its_rate() -> None:
    """A cosine does not begin to rise again, and does not reach zero before an epilogue."""
    share = parse("cosine:5").share(torch.tensor([3, 4, 5, 9]), torch.float64)
    assert share[1] == share[2] == share[3] > 0
    assert share[0] > share[1]


FADING = {
    "lr_decay": (Local(lr_decay=0.5), lambda t: 0.5**t),
    "step": (Local(lr_schedule="step:2:0.1"), lambda t: 0.1 ** (t // 2)),
    "warmup": (Local(lr_schedule="warmup:4"), lambda t: min(1.0, (t + 1) / 4)),
    "cosine": (Local(lr_schedule="cosine:3"), lambda t: 0.5 * (1 + math.cos(math.pi * t / 3))),
    "all": (
        Local(lr_decay=0.7, lr_schedule="warmup:2+step:1:0.3"),
        lambda t: 0.7**t * min(1.0, (t + 1) / 2) * 0.3 ** max(t - 2, 0),
    ),
}


@pytest.mark.parametrize("kind", FADING)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_last_stage_takes_the_rate_of_the_last_round(kind: str, rounds: int) -> None:
    """An epilogue of one plain step at λ = 0: its size is η_0 s(T − 1), whatever fades it."""
    local, share = FADING[kind]
    local = replace(local, steps=1, batch=None, lr=0.2)
    sim = q3("fedprox-two-stage", local, hyper={"prox_strength": 0.0}, rounds=rounds, start=1.0)
    steps = [*range(rounds), rounds - 1]
    for (a, c), w in zip(QUADRATICS, personal(sim), strict=True):
        mine = 1.0
        for t in steps:
            mine -= 0.2 * share(t) * a * (mine - c)
        assert w == pytest.approx(mine, rel=1e-6)  # the features of q3 are float32


@pytest.mark.parametrize("kind", FADING)
def test_adaptation_takes_the_rate_of_the_last_round(kind: str) -> None:
    """Before training that is the first rate; after T rounds it is that of round T − 1."""
    local, share = FADING[kind]
    local, task = replace(local, steps=1, batch=None, lr=0.2), net_task()
    method = build("per-fedavg", task, local, {"preset": "prior"})
    hyper = {"personal_lr": 0.0}  # the step with the rate of training alone
    fed = federation(sizes=(70, 3), val=0)
    sim = simulate(method, task, [fed], hyper=hyper, rounds=3, points=("pre",))
    x, y = fed.x[fed.train.of(0)], fed.y[fed.train.of(0)]

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = torch.func.functional_call(task.module, w, (x,))
        return torch.nn.functional.cross_entropy(scores, y)

    for t in range(4):
        w = sim.params(0, point="global")
        slope = torch.func.grad(loss)(w)
        wanted = {k: w[k] - 0.2 * share(max(t - 1, 0)) * slope[k] for k in w}
        found = sim.params(0, point="pre")
        for k in w:
            torch.testing.assert_close(found[k], wanted[k], rtol=0, atol=1e-12)
        if t < 3:
            sim.step()


@pytest.mark.parametrize("kind", FADING)
def test_newcomers_take_the_rate_of_the_last_round(kind: str) -> None:
    """All their rounds: a newcomer of LocalTrain is LocalTrain with that constant rate."""
    local, share = FADING[kind]
    local, task = replace(local, batch=4, lr=0.2), net_task()
    fed = federation()
    sim = run(simulate(build("local", task, local, {}), task, [fed.without(4)], rounds=3))
    found = onboard(sim, fed.without(0, 1, 2, 3), rounds=2).model(0).state_dict()
    steady = Local(batch=4, lr=0.2 * share(2))
    method = build("local", task, steady, {})
    alone = run(simulate(method, task, [fed.without(0, 1, 2, 3)], rounds=2))
    for leaf, value in alone.params(0).items():
        torch.testing.assert_close(found[leaf], value, rtol=0, atol=1e-12)


def test_newcomers_count_rounds_after_those_of_training() -> None:
    """What depends on the round (a fading pull, a share) continues; the rate alone stays."""
    seen: list[tuple[int, int]] = []
    task = net_task()
    method = build("local", task, Local(batch=4, lr=0.2), {})
    begin = method.begin

    def watched(client: Any, ctx: Any) -> Any:
        seen.append((int(ctx.round), int(ctx.rate_round)))
        return begin(client, ctx)

    method, fed = changed(method, begin=watched), federation()
    sim = simulate(method, task, [fed.without(4)], rounds=3, engine="sequential")
    run(sim)
    seen.clear()
    onboard(sim, fed.without(0, 1, 2, 3), rounds=2)
    assert set(seen) >= {(3, 2), (4, 2)}


def _with_rate(method: Method, factor: Callable[[Any], Any]) -> Method:
    """Let a plain method read a local_lr (APPLE: both rates) that is multiplied outside."""
    names = ("local_lr", "relation_lr") if method.name == "apple" else ("local_lr",)

    def seen(fn: Callable[..., Any]) -> Callable[..., Any]:
        def with_view(*args: Any) -> Any:
            *rest, ctx = args
            rates = {k: ctx.hyper[k] * factor(ctx.rate_round) for k in names}
            return fn(*rest, ctx._replace(hyper={**ctx.hyper, **rates}))

        return with_view

    def on(phase: Phase) -> Phase:
        return replace(
            phase, step=seen(phase.step), enter=seen(phase.enter), leave=seen(phase.leave)
        )

    return changed(
        method,
        begin=seen(method.begin),
        phases=tuple(on(p) for p in method.phases),
        adapt=tuple(on(p) for p in method.use.adapt),
        after=None if method.schedule.after is None else _with_rate(method.schedule.after, factor),
    )


FEW = ("fedavg", "pfedme", "scaffold", "apple", "per-fedavg", "fedrep")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in METHODS]
)
def test_the_schedule_reaches_every_method(name: str) -> None:
    """Each method with a schedule is the one without whose local_lr is multiplied outside.

    A method that has no local_lr refuses one.
    """
    task, runs = net_task(), []
    local = Local(epochs=1, batch=3, lr=0.05)
    if name == "evidence":
        with pytest.raises(ConfigError, match="lr_schedule has nothing to act on"):
            build(name, task, replace(local, lr_schedule="step:1:0.5"), {})
        return
    timed = build(name, task, replace(local, lr_schedule="step:1:0.5"), {})
    plain = build(name, task, local, {})
    fed = federation(sizes=(4, 3), test=2, val=2)
    for method in (timed, _with_rate(plain, lambda t: 0.5**t), plain):
        sim = simulate(
            method, task, [fed], rounds=2, eval_every=2, points=("pre",), participation="all"
        )
        runs.append(outcome(run(sim)))
    assert_same(runs[0], runs[1], atol=1e-12)
    models = [k for k in runs[0] if k.startswith(("server/", "client/", "pre/test/loss"))]
    assert max(np.abs(runs[0][k] - 1.0 * runs[2][k]).max(initial=0) for k in models) > 1e-9


def test_a_constant_schedule_changes_no_bit_and_fit_fills_in_the_rounds() -> None:
    """``constant`` is None to the bit; "cosine" alone is the cosine over the rounds of the run."""
    fed, settings = federation(), {"model": Net(), "rounds": 3, "device": "cpu"}
    found = {
        text: fit("fedavg", fed, local=Local(lr=0.1, batch=3, lr_schedule=text), **settings)
        for text in (None, "constant", "cosine", "cosine:3", "cosine:4")
    }
    loss = {text: one.scores["pre", "test"].loss for text, one in found.items()}
    np.testing.assert_array_equal(loss["constant"], loss[None])
    np.testing.assert_array_equal(loss["cosine"], loss["cosine:3"])
    assert found["cosine"].config["local"]["lr_schedule"] == "cosine:3"
    assert np.abs(loss["cosine"] - loss["cosine:4"]).max() > 1e-5


@pytest.mark.parametrize(
    "text", ["cosin", "step:3", "step:0:0.5", "step:3:2", "cosine:5:2", "cosine+warmup:2", "warmup"]
)
def test_faults_are_named(text: str) -> None:
    """What cannot be read is refused with the forms that can."""
    with pytest.raises(ConfigError, match=r"cannot read the schedule .* known: constant, warmup:W"):
        Local(lr_schedule=text)


def test_a_warm_up_must_leave_rounds_and_a_derived_rate_has_no_schedule() -> None:
    """The run is too short for its warm-up; a preset that computes its step has nothing to fade."""
    with pytest.raises(ConfigError, match="warms up for 5 rounds, and there are only 5"):
        Local(lr_schedule="warmup:5+cosine").over(5)
    options = {"preset": "paper", "smoothness": 2.0}
    with pytest.raises(ConfigError, match="lr_schedule has nothing to act on"):
        build("l2gd", net_task(), Local(lr_schedule="step:1:0.5"), options)


@pytest.mark.parametrize("text", [*BY_HAND, "cosine", "warmup:4+cosine"])
def test_the_text_of_a_schedule_is_read_back(text: str) -> None:
    """``str(parse(text))`` means the same."""
    assert parse(str(parse(text))) == parse(text)
