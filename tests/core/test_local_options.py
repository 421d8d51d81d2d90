"""Options of local training: clipped gradients and a rate that decays from round to round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sartor import fit
from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Method, Phase, changed
from sartor.methods import METHODS, build
from tests.toys import (
    Net,
    assert_same,
    federation,
    net_task,
    outcome,
    personal,
    q3,
    run,
    simulation,
)

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
QUADRATICS = list(zip((1.0, 2.0, 4.0), (0.0, 3.0, 6.0), strict=True))
PLAIN_STEPS = ("l2gd", "per-fedavg", "pfedme", "pfedbred")
STEPPING = ("fedavg", "fedrep", "scaffold", "apple", *PLAIN_STEPS)
TWO = federation(sizes=(4, 3), test=2, val=2)
SHORT: dict[str, Any] = {
    "rounds": 2,
    "eval_every": 2,
    "points": ("pre",),
    "participation": "all",
}


def _small(name: str) -> Local:
    local = SGD if name in PLAIN_STEPS else HEAVY
    return replace(local, epochs=1)


def _net(name: str, local: Local, options: dict | None = None, **settings: Any) -> dict:
    task = net_task()
    return outcome(
        run(simulation(build(name, task, local, options or {}), task, [federation()], **settings))
    )


# ---- the rate of a round -------------------------------------------------------------------------


def test_the_rate_decays_round_by_round() -> None:
    """On a(w − c)²/2, w − c = Π_t (1 − a η δ^t)^K (w_0 − c), which is another product at δ = 1."""
    local = Local(steps=2, batch=None, lr=0.2, lr_decay=0.5)
    found = personal(q3("local", local, rounds=3, start=1.0))
    for (a, c), w in zip(QUADRATICS, found, strict=True):
        left = np.prod([(1 - a * 0.2 * 0.5**t) ** 2 for t in range(3)])
        assert w == pytest.approx(c + left * (1 - c), abs=1e-6)


def test_the_decayed_rate_multiplies_the_velocity_and_not_the_gradient() -> None:
    """Momentum that survives the round is not shrunk by the decay: w ← w − η_t v."""
    local = Local(steps=2, batch=None, lr=0.05, momentum=0.8, keep_optimiser=True, lr_decay=0.5)
    found = personal(q3("local", local, rounds=2, start=1.0))
    for (a, c), w in zip(QUADRATICS, found, strict=True):
        mine, velocity = 1.0, 0.0
        for k in range(4):
            velocity = 0.8 * velocity + a * (mine - c)
            mine -= 0.05 * 0.5 ** (k // 2) * velocity
        assert w == pytest.approx(mine, abs=1e-6)


def _with_rate(method: Method, decay: float) -> Method:
    """Let a plain method read a local_lr (APPLE: both rates) that is smaller in later rounds."""
    names = ("local_lr", "relation_lr") if method.name == "apple" else ("local_lr",)

    def seen(fn: Callable[..., Any]) -> Callable[..., Any]:
        def with_view(*args: Any) -> Any:
            *rest, ctx = args
            rates = {k: ctx.hyper[k] * decay**ctx.rate_round for k in names}
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
        after=None if method.schedule.after is None else _with_rate(method.schedule.after, decay),
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name != "evidence"])
def test_the_decay_reaches_every_method(name: str) -> None:
    """Each method with lr_decay is the one without whose local_lr is multiplied by δ^t outside."""
    task, runs = net_task(), []
    faded, constant = (build(name, task, replace(_small(name), lr_decay=d), {}) for d in (0.5, 1.0))
    assert faded.hyper["lr_decay"].default == 0.5
    assert "lr_decay" not in constant.hyper
    for method in (faded, _with_rate(constant, 0.5), constant):
        runs.append(outcome(run(simulation(method, task, [TWO], **SHORT))))
    assert_same(runs[0], runs[1], atol=1e-12)
    models = [k for k in runs[0] if k.startswith(("server/", "client/", "pre/test/loss"))]
    apart = [np.abs(runs[0][k] - 1.0 * runs[2][k]).max(initial=0) for k in models]
    assert max(apart) > 1e-9


def test_a_method_without_a_rate_refuses_its_decay() -> None:
    """``evidence`` solves, so there is nothing that could fade."""
    with pytest.raises(ConfigError, match="lr_decay has nothing to act on"):
        build("evidence", net_task(), Local(lr_decay=0.5), {})


# ---- clipping ------------------------------------------------------------------------------------


def test_a_clipped_gradient_has_the_given_length() -> None:
    """Far from c a step is η·C long; nearer than C/a it is the plain step."""
    found = personal(q3("local", Local(steps=4, batch=None, lr=0.5, clip_norm=0.6), start=1.0))
    for (a, c), w in zip(QUADRATICS, found, strict=True):
        mine = 1.0
        for _ in range(4):
            mine -= 0.5 * float(np.clip(a * (mine - c), -0.6, 0.6))
        assert w == pytest.approx(mine, abs=1e-6)
        assert abs(w - 1.0) <= 4 * 0.5 * 0.6 + 1e-6


def test_the_norm_is_that_of_all_leaves_before_decay_and_momentum() -> None:
    """V ← m v + g·min(1, C/‖g‖) + d w, with one norm for the whole network."""
    task, fed = net_task(), federation()
    local = Local(steps=1, batch=None, lr=0.1, momentum=0.5, weight_decay=0.3, clip_norm=0.05)
    sim = run(simulation(build("local", task, local, {}), task, [fed], rounds=1))
    start = {k: v.double() for k, v in task.init(0).items()}
    for i in range(5):
        rows = fed.train.of(i)
        leaves = {k: v.clone().requires_grad_() for k, v in start.items()}
        logits = torch.func.functional_call(task.module, leaves, (fed.x[rows].double(),))
        torch.nn.functional.cross_entropy(logits, fed.y[rows]).backward()
        norm = torch.sqrt(sum(v.grad.square().sum() for v in leaves.values()))
        assert norm > 0.05
        for name, leaf in sim.params(i).items():
            wanted = start[name] - 0.1 * (leaves[name].grad * 0.05 / norm + 0.3 * start[name])
            torch.testing.assert_close(leaf, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in STEPPING else pytest.mark.slow) for n in METHODS],
)
def test_options_without_effect_are_plain_to_the_bit(name: str) -> None:
    """A long clip_norm or one of 0, and a decay of 1 where a decay is on, change no bit.

    A method that has no local_lr refuses a decay.
    """
    task, found = net_task(), []
    plain = build(name, task, _small(name), {})
    if name == "evidence":
        with pytest.raises(ConfigError, match="lr_decay has nothing to act on"):
            build(name, task, replace(_small(name), clip_norm=1e9, lr_decay=0.5), {})
        return
    both = build(name, task, replace(_small(name), clip_norm=1e9, lr_decay=0.5), {})
    cases: list[tuple[Method, dict]] = [(plain, {})]
    cases += [(both, {"lr_decay": 1.0, "clip_norm": c}) for c in (1e9, 0.0, 0.01)]
    for method, hyper in cases:
        found.append(outcome(run(simulation(method, task, [TWO], hyper=hyper, **SHORT))))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert np.abs(found[3]["pre/test/loss"] - found[0]["pre/test/loss"])[:, -1].max() > 1e-7


def test_models_trained_together_are_clipped_apart() -> None:
    """APFL's global model stays FedAvg's whatever the gradient of the own model."""
    local = replace(SGD, clip_norm=0.05)
    apfl, fedavg = (_net(name, local) for name in ("apfl", "fedavg"))
    for leaf in ("fc.weight", "body.weight"):
        np.testing.assert_allclose(
            apfl[f"server/params/{leaf}"], fedavg[f"server/params/{leaf}"], atol=1e-13
        )


def test_stacked_models_are_clipped_apart() -> None:
    """In FedEM a component with a short gradient keeps it beside one whose gradient is cut.

    Two components on one client in one step: each moves by its slope, cut to the norm by itself.
    """
    task = net_task()
    fed = federation(sizes=(70,))
    plain = Local(steps=1, batch=None, lr=0.1)
    moved = []
    for clip in (0.0, 0.1):
        local = replace(plain, clip_norm=clip)
        method = build("fedem", task, local, {"components": 2})
        sim = simulation(method, task, [fed], rounds=1)
        # Components of very unequal slopes: the second is near zero, and so is its gradient.
        sim.server = {"params": {k: v.clone() for k, v in sim.server["params"].items()}}
        for leaf in sim.server["params"].values():
            leaf[:, 1] *= 0.01
        start = {k: v[0].clone() for k, v in sim.server["params"].items()}
        run(sim)
        moved.append({k: (v[0] - start[k]) / -0.1 for k, v in sim.server["params"].items()})
    slopes, cut = moved
    for m in range(2):
        norm = torch.stack([leaf[m].square().sum() for leaf in slopes.values()]).sum().sqrt()
        for k, leaf in slopes.items():
            wanted = leaf[m] * min(1.0, 0.1 / float(norm))
            torch.testing.assert_close(cut[k][m], wanted, rtol=0, atol=1e-12)


# ---- the pull to a centre ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1},
        {"weight_decay": 0.2},
        {"momentum": 0.5},
        {"clip_norm": 0.1, "weight_decay": 0.2, "momentum": 0.5},
    ],
)
@pytest.mark.parametrize("head_only", [False, True])
def test_half_a_square_is_a_penalty_of_the_objective(options: dict, head_only: bool) -> None:
    """Its slope, which is added, is the one that is derived from half the squared distance."""
    task, local = net_task(), Local(batch=None, lr=0.3, **options)
    params = tree.map(torch.Tensor.double, task.init(0))
    entries = {"params": params, "own": tree.scale(params, 0.5)}
    centre = tree.map(torch.cos, params)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, *federation().x.shape[1:], generator=rng, dtype=torch.float64)
    batch: Any = SimpleNamespace(x=x, y=torch.arange(4) % 3, mask=torch.ones(4, dtype=torch.bool))
    hyper = {name: torch.tensor(spec.default).double() for name, spec in local.hyper.items()}
    ctx: Any = SimpleNamespace(hyper={**hyper, "pull": torch.tensor(0.7).double()}, round=0)
    kept = (lambda name: name.startswith("fc")) if head_only else (lambda name: True)

    def losses(work: tree.Tree, batch: Any, ctx: Any) -> torch.Tensor:
        return task.loss(work["params"], batch) + task.loss(work["own"], batch)

    def penalised(work: tree.Tree, batch: Any, ctx: Any) -> torch.Tensor:
        near, far = (tree.sqdist(work[k], centre) for k in ("params", "own"))
        return losses(work, batch, ctx) + 0.5 * ctx.hyper["pull"] * near + 0.5 * 0.2 * far

    def with_terms(work: tree.Tree, batch: Any, ctx: Any) -> torch.Tensor:
        near = half_square(ctx.hyper["pull"], work["params"], centre)
        return near + losses(work, batch, ctx) + half_square(0.2, work["own"], centre)

    settings: dict[str, Any] = {"over": ("params", "own"), "train": kept}
    found = []
    for phase in (
        descend(task, local, penalised, **settings),
        descend(task, local, with_terms, **settings),
    ):
        work = phase.enter(entries, ctx)
        for _ in range(3):
            work = phase.step(work, batch, ctx)
        found.append({k: work[k] for k in entries})
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)
    assert not torch.allclose(found[1]["own"]["fc.weight"], entries["own"]["fc.weight"])


def test_without_an_objective_it_is_the_loss_of_all_that_is_trained() -> None:
    """The default of one entry is the plain loss, that of several their sum, to the bit."""
    task, local = net_task(), Local(batch=None, lr=0.3)
    params = task.init(0)
    work = {"params": params, "own": tree.scale(params, 0.5)}
    x = torch.randn(4, *federation().x.shape[1:], generator=torch.Generator().manual_seed(0))
    batch: Any = SimpleNamespace(x=x, y=torch.arange(4) % 3, mask=torch.ones(4, dtype=torch.bool))
    ctx: Any = SimpleNamespace(hyper={"local_lr": torch.tensor(0.3)}, round=0)
    for over in (("params",), ("own",), ("params", "own")):

        def written(work: tree.Tree, batch: Any, ctx: Any, over: Any = over) -> torch.Tensor:
            return torch.stack([task.loss(work[entry], batch) for entry in over]).sum()

        phases = (descend(task, local, over=over), descend(task, local, written, over=over))
        found, wanted = (phase.step(work, batch, ctx) for phase in phases)
        for name, leaf in tree.items(found):
            assert torch.equal(leaf, dict(tree.items(wanted))[name]), name
        moved = {k for k in work if not torch.equal(found[k]["fc.weight"], work[k]["fc.weight"])}
        assert moved == set(over)


@pytest.mark.parametrize("wrong", ["a copy", "another entry", "twice"])
def test_half_a_square_of_what_is_not_trained_is_an_error(wrong: str) -> None:
    """It names the phase and what is trained."""

    def objective(work: Any, batch: Any, ctx: Any) -> Any:
        w, other = work["params"], work["other"]
        near = {"a copy": dict(w), "another entry": other, "twice": w}[wrong]
        return w["w"].sum() + half_square(0.1, w, other) + half_square(0.1, near, other)

    ones = {"w": torch.ones(2)}
    phase = descend(net_task(), SGD, objective)
    with pytest.raises(ContractError, match=r"'train' takes a trained entry .*\['params'\]"):
        phase.step({"params": ones, "other": dict(ones)}, None, None)


# ---- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg"])
def test_engines_agree_and_a_sweep_row_is_the_single_run(name: str) -> None:
    """Clipping at a norm that some batches exceed, in both engines and as rows of a sweep."""
    task, fed = net_task(), federation(sizes=(6, 3, 5))
    local = replace(SGD, clip_norm=0.3, lr_decay=0.7)
    method = build(name, task, local, {})
    slow = outcome(run(simulation(method, task, [fed], engine="sequential")))
    assert_same(outcome(run(simulation(method, task, [fed]))), slow, atol=1e-11)
    rows = [{"clip_norm": c, "lr_decay": d} for c, d in ((0.3, 0.7), (0.0, 0.7), (0.3, 1.0))]
    swept = outcome(run(simulation(method, task, [fed] * 3, hyper=rows, seeds=[0] * 3)))
    for r, row in enumerate(rows):
        alone = outcome(run(simulation(method, task, [fed], hyper=[row])))
        for key in ("pre/test/loss", "post/test/loss"):
            np.testing.assert_allclose(swept[key][r], alone[key][0], atol=1e-11)
    assert (
        np.abs(swept["pre/test/loss"][1:] - swept["pre/test/loss"][0]).max(axis=(1, 2)).min() > 1e-6
    )


def test_values_per_client_and_sweeps_switch_the_options_on() -> None:
    """``fit`` takes both as hyper-parameters without a word in ``Local``."""
    settings: dict[str, Any] = {"model": Net(), "rounds": 2, "device": "cpu", "local": SGD}
    fed = federation()
    swept = fit("fedavg", fed, sweep={"clip_norm": [0.0, 0.01], "lr_decay": [1.0, 0.5]}, **settings)
    plain = fit("fedavg", fed, **settings)
    found = swept.scores["pre", "test"].loss
    np.testing.assert_allclose(found[0], plain.scores["pre", "test"].loss[0], rtol=1e-6)
    assert len({tuple(np.round(row[-1], 7)) for row in found}) == 4
    some = fit("local", fed, hyper={"clip_norm": [0.01, 0, 0, 0, 0]}, **settings)
    alone = fit("local", fed, **settings)
    change = np.abs(some.scores["pre", "test"].loss - alone.scores["pre", "test"].loss)[0, -1]
    assert change[0] > 1e-4
    np.testing.assert_allclose(change[1:], 0.0, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip_norm": -1.0}, "clip_norm must be >= 0, got -1"),
        ({"clip_norm": float("nan")}, "clip_norm must be >= 0, got nan"),
        ({"lr_decay": 0.0}, "lr_decay must be > 0 and <= 1, got 0"),
        ({"lr_decay": 1.5}, "lr_decay must be > 0 and <= 1, got 1.5"),
    ],
)
def test_faults_are_named(values: dict, words: str) -> None:
    """What cannot be right is refused, in ``Local`` and as a hyper-parameter."""
    with pytest.raises(ConfigError, match=words):
        Local(**values)
    if not np.isnan(next(iter(values.values()))):
        with pytest.raises(ConfigError, match=words):
            fit("fedavg", federation(), model=Net(), rounds=1, hyper=values)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"preset": "paper_synthetic", "smoothness": 2.0}),
        ("fedprox-two-stage", {"preset": "theory", "strong_convexity": 4.0}),
        ("l2gd", {"preset": "paper", "smoothness": 2.0}),
    ],
)
def test_a_derived_rate_does_not_decay(name: str, options: dict) -> None:
    """Where a preset computes the step size, lr_decay is refused; clipping is not."""
    task = net_task()
    with pytest.raises(ConfigError, match="lr_decay has nothing to act on"):
        build(name, task, replace(SGD, lr_decay=0.9), options)
    assert "clip_norm" in build(name, task, replace(SGD, clip_norm=1.0), options).hyper
