"""pFedBreD: personal priors, their strategies, families and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext
from sartor.core.task import Task, given, never
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from sartor.methods.parts.bregman import KINDS, Separable, gaussian
from tests.toys import (
    Q3,
    centre,
    federation,
    net_task,
    outcome,
    personal,
    q3,
    run,
    simulation,
    states,
)

A, C = np.array(Q3[0]), np.array(Q3[1])
ONE = Local(steps=1, batch=None, lr=0.1)
STRATEGIES = ("none", "lg", "meg", "mh", "mh-variant")


def _t(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _batch(x: Any, y: Any = None) -> Batch:
    x = torch.as_tensor(x, dtype=torch.float64)
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Batch(x, y, torch.ones(len(x), dtype=torch.bool), torch.arange(len(x)), _t(1.0) > 0)


def _client_context(**hyper: float) -> ClientContext:
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    return blank._replace(hyper={k: _t(v) for k, v in hyper.items()})


def _task(start: float = 0.0, dim: int = 1) -> Task:
    module = Quadratic(dim)
    with torch.no_grad():
        module.w.fill_(start)
    return Task(module, None, given, never)


def _step(options: dict, batches: Any, *, task: Task | None = None, **hyper: float) -> Any:
    """Return one local iteration from w = 1, w̄ = 0.5, θ = 2 as (θ⁺, w⁺)."""
    method = build("pfedbred", task or _task(), ONE, options)
    work = {k: {"w": _t([v])} for k, v in (("local", 1.0), ("memory", 0.5), ("params", 2.0))}
    values = {k: spec.default for k, spec in method.hyper.items()} | hyper
    new = method.phases[0].step(work, batches, _client_context(**values))
    return float(new["params"]["w"]), float(new["local"]["w"])


# ---- the centre ----------------------------------------------------------------------------------

TRACE = {"prox_strength": 2.0, "personal_lr": 1 / 3, "local_lr": 0.1}
STEPS = {"prior_lr": 0.1, "memory_lr": 0.05}


@pytest.mark.parametrize(
    ("strategy", "mode", "mu", "theta", "w"),
    [
        ("none", "paper", 1.0, 1.6666667, 1.1333333),
        ("lg", "paper", 1.2, 1.8, 1.12),
        ("lg", "code", 1.2, 1.8, 1.12),
        ("meg", "paper", 1.075, 1.7166667, 1.1283333),
        ("meg", "code", 1.075, 1.7166667, 1.1283333),
        ("mh", "paper", 1.275, 1.85, 1.115),
        ("mh-variant", "paper", 1.255, 1.8366667, 1.1163333),
        ("mh", "code", 1.255, 1.8366667, 1.2963333),
        ("mh-variant", "code", 1.255, 1.8366667, 1.2963333),
    ],
)
def test_one_iteration_has_the_known_numbers(
    strategy: str, mode: str, mu: float, theta: float, w: float
) -> None:
    """On ½(w − 3)², solved exactly: λ = 2, w = 1, w̄ = 0.5, θ = 2, η_α = α_m = 0.1, η = 0.05."""
    one = _batch([[1.0, 3.0]])
    twice = strategy == "mh-variant" or (strategy, mode) == ("mh", "code")
    options = {"strategy": strategy, "mode": mode, "prox_steps": 1}
    found = _step(options, (one, one) if twice else one, **TRACE, **STEPS)
    assert found == pytest.approx((theta, w), abs=1e-7)
    assert found[0] == pytest.approx((3 + 2 * mu) / 3, abs=1e-7)


@pytest.mark.parametrize("mode", ["paper", "code"])
def test_the_second_gradient_sees_the_other_batch(mode: str) -> None:
    """(22): ∇f(w; D') is taken on its own batch, ∇f at the stepped point on that of the solve."""
    main, other = _batch([[1.0, 3.0]]), _batch([[4.0, 0.5]])
    options = {"strategy": "mh-variant", "mode": mode, "prox_steps": 1}
    theta, w = _step(options, (main, other), **TRACE, **STEPS)
    at = 1.0 - 0.1 * 4.0 * (1.0 - 0.5)
    stepped = 1.0 - 0.1 * (at - 3.0)
    mu = stepped - 0.05 * (0.5 - 2.0)
    assert theta == pytest.approx((3 + 2 * mu) / 3, abs=1e-12)
    base = stepped if mode == "code" else 1.0
    assert w == pytest.approx(base - 0.2 * (mu - theta), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        *(({"strategy": s}, "mu") for s in ("none", "lg", "meg", "mh")),
        ({"strategy": "lg", "mode": "code"}, "mu"),
        ({"strategy": "meg", "mode": "code"}, "w"),
        ({"strategy": "mh", "mode": "code"}, "stepped"),
        ({"strategy": "mh", "inner_start": "w"}, "w"),
        ({"strategy": "mh", "inner_start": "theta"}, "theta"),
        ({"strategy": "mh", "mode": "code", "inner_start": "mu"}, "mu"),
    ],
)
def test_where_the_proximal_solve_starts(options: dict, start: str) -> None:
    """At μ (ours), and in the authors' program at μ (lg), w (meg), the stepped point (mh)."""
    one, strategy = _batch([[1.0, 3.0]]), options["strategy"]
    coded = options.get("mode") == "code" and strategy == "mh"
    hyper = {**TRACE, **STEPS, "personal_lr": 0.01}
    theta, _ = _step({**options, "prox_steps": 1}, (one, one) if coded else one, **hyper)
    stepped = 1.0
    if strategy in ("lg", "mh"):
        stepped = 1.18 if coded else 1.2
    mu = stepped + (0.075 if strategy in ("meg", "mh") else 0.0)
    x = {"mu": mu, "w": 1.0, "stepped": stepped, "theta": 2.0}[start]
    assert theta == pytest.approx(x - 0.01 * (x - 3.0 + 2.0 * (x - mu)), abs=1e-12)


def _net(options: dict, hyper: dict | None = None, rounds: int = 3, name: str = "pfedbred") -> Any:
    task = net_task()
    local = Local(epochs=2, batch=3, lr=0.1)
    method = build(name, task, local, options)
    return run(simulation(method, task, [federation()], hyper=hyper or {}, rounds=rounds))


def _same(one: Any, two: Any) -> bool:
    """Compare server, personal models and scores to the bit."""
    a, b = outcome(one), outcome(two)
    names = [k for k in a if k.startswith(("server/", "client/params", "pre/", "post/"))]
    return all(np.array_equal(a[k], b[k]) for k in names)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["paper", "code"])
def test_without_meta_steps_it_is_pfedme_to_the_bit(strategy: str, mode: str) -> None:
    """η_α = η = 0 and the same start: pFedMe, whatever the strategy."""
    given_ = {"prior_lr": 0.0, "memory_lr": 0.0}
    method = build("pfedbred", net_task(), Local(), {"strategy": strategy})
    hyper = {k: v for k, v in given_.items() if k in method.hyper}
    options = {"strategy": strategy, "mode": mode, "inner_start": "w", "weights": "uniform"}
    plain = _net({}, name="pfedme")
    assert _same(plain, _net(options, hyper))
    if hyper:
        assert not _same(plain, _net(options))


def test_mh_without_one_of_its_steps_is_the_other_strategy() -> None:
    """η = 0: mh is lg; η_α = 0: mh is meg; to the bit."""
    mh = _net({"strategy": "mh"})
    no_memory = _net({"strategy": "mh"}, {"memory_lr": 0.0})
    no_gradient = _net({"strategy": "mh"}, {"prior_lr": 0.0})
    assert _same(_net({"strategy": "lg"}), no_memory)
    assert _same(_net({"strategy": "meg"}), no_gradient)
    assert not _same(mh, no_memory)
    assert not _same(mh, no_gradient)


def test_the_first_iteration_has_no_memory() -> None:
    """Round 1, r = 1: w̄ = θ, so meg is pFedMe; from then on it is not."""
    for steps, rounds, equal in ((1, 1, True), (2, 1, False), (1, 2, False)):
        local = Local(steps=steps, batch=None, lr=0.1)
        found = [
            q3(name, local, options=options, rounds=rounds)
            for name, options in (("pfedbred", {"strategy": "meg"}), ("pfedme", {}))
        ]
        assert np.array_equal(personal(found[0]), personal(found[1])) == equal
        if equal:
            assert centre(found[0]) == centre(found[1])


@pytest.mark.parametrize("train_all", [True, False])
def test_the_memory_is_the_clients_own_last_local_model(train_all: bool) -> None:
    """w̄_i = w_{i,R} before averaging, of the last round in which client i trained."""
    options = {"strategy": "meg", "prox_steps": 1, "train_all": train_all}
    hyper = {"prox_strength": 2.0, "personal_lr": 0.1, "memory_lr": 0.5}
    sim = q3("pfedbred", ONE, options=options, hyper=hyper, participation=1, start=1.0)
    memory = sim.store.gather(sim.context.everybody)["memory"]["w"][0, :, 0].numpy()
    theta = personal(sim)
    trained = theta != 1.0
    assert trained.sum() == (3 if train_all else 1)
    np.testing.assert_allclose(memory, 1.0 - 0.2 * (1.0 - theta), atol=1e-12)
    assert (memory[~trained] == 1.0).all()
    assert np.abs(memory - centre(sim)).min() < 1e-12


def test_memory_and_personal_model_carry_over_to_the_next_round() -> None:
    """Round 2 starts from the new w, with the θ and w̄ of round 1, in μ = w − η(w̄ − θ)."""
    hyper = {"prox_strength": 2.0, "personal_lr": 0.1, "memory_lr": 0.5}
    sim = q3("pfedbred", ONE, options={"strategy": "meg"}, hyper=hyper, rounds=3, start=1.0)
    w, theta, memory = 1.0, np.ones(3), np.ones(3)
    for _ in range(3):
        mu = w - 0.5 * (memory - theta)
        theta = mu
        for _ in range(5):
            theta = theta - 0.1 * (A * (theta - C) + 2.0 * (theta - mu))
        memory = w - 0.1 * 2.0 * (mu - theta)
        w = memory.mean()
    np.testing.assert_allclose(personal(sim), theta, atol=1e-6)
    assert centre(sim) == pytest.approx(w, abs=1e-6)


def test_the_program_averages_by_samples_and_steps_further() -> None:
    """Mode code: weights n_i/Σn_j where the paper's are equal; lg has η_α = 0.05, mh 0.01."""
    hyper = {"prox_strength": 2.0, "personal_lr": 0.1}
    for mode, p in (("paper", np.ones(3) / 3), ("code", np.array([1, 2, 3]) / 6)):
        options = {"strategy": "meg", "mode": mode}
        sim = q3("pfedbred", ONE, options=options, hyper=hyper, samples=[1, 2, 3])
        sent = 0.2 * personal(sim)  # w = 0 and w̄ = θ = 0, so μ = 0
        assert centre(sim) == pytest.approx(p @ sent, abs=1e-12)
    rates = {
        (s, m): build("pfedbred", net_task(), Local(), {"strategy": s, "mode": m})
        .hyper["prior_lr"]
        .default
        for s in ("lg", "mh")
        for m in ("paper", "code")
    }
    assert rates == {
        ("lg", "paper"): 0.01,
        ("lg", "code"): 0.05,
        ("mh", "paper"): 0.01,
        ("mh", "code"): 0.01,
    }


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"strategy": "none"}, 0),
        ({"strategy": "lg"}, 1),
        ({"strategy": "meg"}, 0),
        ({"strategy": "mh"}, 1),
        ({"strategy": "mh-variant"}, 2),
        ({"strategy": "mh", "mode": "code"}, 2),
        ({"strategy": "mh", "family": "bernoulli"}, 1),
        ({"strategy": "lg", "envelope": "exact"}, 2),
    ],
)
def test_what_an_iteration_costs(options: dict, extra: int) -> None:
    """K gradients for the solve, and those of the centre and its Jacobian besides."""
    sim = q3("pfedbred", Local(steps=4, batch=None), options={**options, "prox_steps": 3})
    assert sim.ledger().gradient_evaluations.tolist() == [[3 * 4 * (3 + extra)]]


# ---- Per-FedAvg as a limit -----------------------------------------------------------------------


def test_one_proximal_step_of_rate_one_over_lambda_is_per_fedavg() -> None:
    """lg, K = 1 from μ, α = 1/λ: λ(μ − θ) = ∇f(μ), the first-order step of Per-FedAvg."""
    task, local = net_task(), Local(steps=2, batch=None, lr=0.1)
    lg = build("pfedbred", task, local, {"strategy": "lg", "prox_steps": 1})
    meta = build("per-fedavg", task, local, {})
    hyper = {"prox_strength": 8.0, "personal_lr": 0.125, "prior_lr": 0.3}
    settings: dict[str, Any] = {"participation": "all", "rounds": 3}
    one = run(simulation(lg, task, [federation()], hyper=hyper, **settings))
    two = run(simulation(meta, task, [federation()], hyper={"personal_lr": 0.3}, **settings))
    for name, leaf in one.server["params"].items():
        torch.testing.assert_close(leaf, two.server["params"][name], rtol=0, atol=1e-13)


def test_a_strong_prior_is_per_fedavg() -> None:
    """λ → ∞, exact solves: θ → μ and the step of w tends to −α_m∇f(μ)."""
    one, gap = _batch([[1.0, 3.0]]), []
    for lam in (1e2, 1e4, 1e6):
        hyper = {"prox_strength": lam, "personal_lr": 1 / (1 + lam), "local_lr": 0.1}
        options = {"strategy": "lg", "prox_steps": 1}
        theta, w = _step(options, one, **hyper, prior_lr=0.1)
        assert theta == pytest.approx(1.2, abs=2 / lam)
        gap.append(abs(w - (1.0 - 0.1 * (1.2 - 3.0))))
    assert gap[0] > gap[1] > gap[2]
    assert gap[2] < 1e-6


# ---- families ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "c", "lam", "mu", "theta", "slope"),
    [
        ("gaussian", 3.0, 2.0, 1.0, 1.666667, -1.333333),
        ("poisson", 3.0, 2.0, 1.0, 1.811590, -1.623180),
        ("exponential", 3.0, 2.0, 1.0, 2.0, -2.0),
        ("bernoulli", 0.8, 1.0, 0.5, 0.559770, -0.239081),
    ],
)
def test_the_gradient_of_the_envelope_is_that_of_finite_differences(
    family: str, c: float, lam: float, mu: float, theta: float, slope: float
) -> None:
    """(13) for f = ½(θ − c)² and μ = w: the known numbers, and the slope of the envelope."""
    task = _task(0.5)
    options = {"strategy": "none", "family": family, "mapping": "none", "prox_steps": 400}
    method = build("pfedbred", task, ONE, options)
    prior = gaussian(None, {}) if family == "gaussian" else Separable(KINDS[family])
    ctx = _client_context(prox_strength=lam, personal_lr=0.1, local_lr=1e-3)

    def solve(w: float) -> tuple[float, float, float]:
        work = {"local": {"w": _t([w])}, "params": {"w": _t([w])}}
        new = method.phases[0].step(work, _batch([[1.0, c]]), ctx)
        found = new["params"]
        value = 0.5 * (found["w"] - c).square().sum() + lam * prior.divergence(found, work["local"])
        return float(found["w"]), float(value), (w - float(new["local"]["w"])) / 1e-3

    found, _, step = solve(mu)
    assert found == pytest.approx(theta, abs=1e-6)
    assert step == pytest.approx(slope, abs=1e-6)
    h = 1e-4
    assert (solve(mu + h)[1] - solve(mu - h)[1]) / (2 * h) == pytest.approx(slope, abs=1e-6)


def _draw(seed: int, params: tree.Tree, size: float) -> tree.Tree:
    draw = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda p: size * torch.randn(p.shape, generator=draw, dtype=torch.float64), params
    )


@pytest.mark.parametrize("strategy", ["lg", "mh", "mh-variant"])
@pytest.mark.parametrize("family", ["gaussian", "sigma", "bernoulli", "exponential"])
def test_the_exact_gradient_is_the_slope_of_the_envelope(strategy: str, family: str) -> None:
    """With [Dμ]ᵀ the step of w is −α_m∇F(w): F's difference quotient along a random direction."""
    task, lam, width = net_task(), 4.0, 3.0
    params = _draw(1, task.init(0), 0.3)
    sigma = tree.map(lambda p: 0.5 + p.square(), params) if family == "sigma" else None
    kind = "gaussian" if sigma else family
    options = {
        "strategy": strategy,
        "family": kind,
        "covariance": sigma,
        "envelope": "exact",
        "prox_steps": 120,
    }
    method = build("pfedbred", task, ONE, options)
    rate = 0.1 if kind == "gaussian" else 0.1 / width**2 * 4
    hyper = {"prox_strength": lam, "personal_lr": rate, "local_lr": 1e-3, "prior_lr": 0.4}
    hyper |= {"memory_lr": 0.3, "prior_width": width}
    ctx = _client_context(**hyper)
    prior: Any = gaussian(sigma, params)
    if kind != "gaussian":
        prior = Separable(KINDS[kind], _t(width))
        lam = lam * width**2
        ctx = _client_context(**{**hyper, "prox_strength": lam})
    draw = np.random.default_rng(3)
    batch, other = (
        _batch(draw.normal(size=(6, 4)), torch.from_numpy(draw.integers(0, 3, 6))) for _ in range(2)
    )
    theta, memory = _draw(2, params, 0.3), _draw(4, params, 0.3)

    def slope(at: tree.Tree, which: Batch) -> tree.Tree:
        return torch.func.grad(lambda p: task.loss(p, which))(at)

    def centre_of(w: tree.Tree) -> tree.Tree:
        at = w
        if strategy == "mh-variant":
            at = tree.map(lambda p, g: p - 0.4 * g, w, slope(w, other))
        mu = tree.map(lambda p, g: p - 0.4 * g, w, slope(at, batch))
        if strategy == "lg":
            return mu
        return tree.map(lambda m, old, th: m - 0.3 * (old - th), mu, memory, theta)

    def go(w: tree.Tree) -> tree.Tree:
        batches = (batch, other) if strategy == "mh-variant" else batch
        work = {"local": w, "params": theta, "memory": memory}
        return method.phases[0].step(work, batches, ctx)

    def envelope(w: tree.Tree) -> float:
        found = go(w)["params"]
        return float(task.loss(found, batch) + lam * prior.divergence(found, centre_of(w)))

    direction = _draw(7, params, 1.0)
    found = tree.map(lambda w, new: (w - new) / 1e-3, params, go(params)["local"])
    h = 1e-4
    ahead, behind = (
        envelope(tree.map(lambda w, d, s=s: w + s * h * d, params, direction)) for s in (1, -1)
    )
    wanted = (ahead - behind) / (2 * h)
    assert float(tree.dot(found, direction)) == pytest.approx(wanted, rel=1e-5)
    rough = build("pfedbred", task, ONE, {**options, "envelope": "first_order"})
    batches = (batch, other) if strategy == "mh-variant" else batch
    work = {"local": params, "params": theta, "memory": memory}
    plain = rough.phases[0].step(work, batches, ctx)["local"]
    plain = tree.map(lambda w, new: (w - new) / 1e-3, params, plain)
    assert abs(float(tree.dot(plain, direction)) - wanted) > 1e-3 * abs(wanted)


def test_the_exact_gradient_shrinks_by_the_curvature() -> None:
    """Quadratics: exact and first-order steps of w differ by the factor 1 − η_α a."""
    one = _batch([[2.0, 3.0]])
    steps = {}
    for envelope in ("first_order", "exact"):
        options = {"strategy": "lg", "envelope": envelope, "prox_steps": 1}
        steps[envelope] = _step(options, one, **TRACE, prior_lr=0.1)[1] - 1.0
    assert steps["exact"] == pytest.approx(0.8 * steps["first_order"], rel=1e-12)


@pytest.mark.parametrize("form", ["numbers", "tensors", "matrix"])
def test_a_variance_for_all_is_a_weaker_prior(form: str) -> None:
    """Σ = v·1 with strength λ is the sphere with λ/v, in every way to write Σ."""
    task, v = net_task(), 4.0
    start = task.init(0)
    dim = sum(p.numel() for p in start.values())
    sigma: Any = {
        "numbers": dict.fromkeys(start, v),
        "tensors": tree.map(lambda p: torch.full_like(p, v), start),
        "matrix": v * torch.eye(dim),
    }[form]
    found = outcome(_net({"covariance": sigma}, {"prox_strength": 8.0}))
    wanted = outcome(_net({}, {"prox_strength": 2.0}))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-12, err_msg=name)


def test_a_full_covariance_has_its_own_proximal_point() -> None:
    """θ = (A + λΣ⁻¹)⁻¹(Ac + λΣ⁻¹w) and w⁺ = w − α_mλΣ⁻¹(w − θ), through the engine."""
    sigma = np.array([[2.0, 0.8], [0.8, 1.0]])
    a, c, lam = np.array([1.0, 3.0]), np.array([2.0, -1.0]), 2.0
    fed, _ = quadratics(a[None], c[None])
    task = _task(0.5, dim=2)
    options = {"strategy": "none", "covariance": torch.from_numpy(sigma), "prox_steps": 300}
    method = build("pfedbred", task, ONE, options)
    hyper = {"prox_strength": lam, "personal_lr": 0.1}
    sim = run(simulation(method, task, [fed], hyper=hyper, rounds=1, participation="all"))
    p, w = np.linalg.inv(sigma), np.full(2, 0.5)
    theta = np.linalg.solve(np.diag(a) + lam * p, a * c + lam * p @ w)
    np.testing.assert_allclose(states(sim)["client/params/w"][0, 0], theta, atol=1e-9)
    np.testing.assert_allclose(
        states(sim)["server/params/w"][0], w - 0.1 * lam * p @ (w - theta), atol=1e-9
    )


@pytest.mark.parametrize("family", KINDS)
def test_a_wide_family_is_the_gaussian(family: str) -> None:
    """As c → ∞ with λ ∝ c², θ and w tend to those of the Gaussian with λ/c²."""
    wanted = q3(
        "pfedbred",
        ONE,
        options={"prox_steps": 300},
        hyper={"prox_strength": 2.0, "personal_lr": 0.1},
        rounds=2,
    )
    c = 1e3
    hyper = {"prox_strength": 2.0 * c**2, "personal_lr": 0.1 / c**2, "prior_width": c}
    options = {"family": family, "prox_steps": 300}
    sim = q3("pfedbred", ONE, options=options, hyper=hyper, rounds=2)
    np.testing.assert_allclose(personal(sim), personal(wanted), atol=0.02)
    assert centre(sim) == pytest.approx(centre(wanted), abs=0.02)
    narrow = {"prox_strength": 2.0 * 49, "personal_lr": 0.1 / 49, "prior_width": 7.0}
    near = q3("pfedbred", ONE, options=options, hyper=narrow, rounds=2)
    assert np.abs(personal(near) - personal(wanted)).max() > 0.05


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("mode", ["paper", "code"])
def test_every_weight_stays_in_the_domain(family: str, mode: str) -> None:
    """Whatever the steps, θ_i, w_i and w̄_i are inside after every round, and finite."""
    wild = {"personal_lr": 3.0, "prior_lr": 5.0, "memory_lr": 3.0, "relax": 2.0}
    hyper = {**wild, "prior_width": 0.3, "local_lr": 2.0, "prox_strength": 1.0}
    sim = _net({"family": family, "mode": mode}, hyper, rounds=1)
    prior = Separable(KINDS[family], _t(0.3))
    client = sim.store.gather(sim.context.everybody)
    moved = 0.0
    for part in ("params", "memory"):
        inside = prior.project(client[part])
        for name, leaf in client[part].items():
            assert torch.equal(inside[name], leaf)
            assert torch.isfinite(leaf).all()
            moved = max(moved, float(leaf.abs().max()))
    assert moved > 0.29


@pytest.mark.parametrize("family", KINDS)
def test_a_round_begins_inside_the_domain(family: str) -> None:
    """A letter that over-relaxation took outside, or a wide start, is clipped before any step."""
    method = build("pfedbred", _task(), ONE, {"family": family})
    client = {k: {"w": _t([-9.0, 0.1])} for k in ("params", "memory")}
    ctx = _client_context(prior_width=0.3)._replace(common={"params": {"w": _t([-9.0, 0.2])}})
    work = method.begin(client, ctx)
    assert sorted(work) == ["local", "memory", "params"]
    for part, kept in (("params", 0.1), ("memory", 0.1), ("local", 0.2)):
        low, inside = work[part]["w"].tolist()
        assert -0.3 < low < -0.299
        assert inside == kept


@pytest.mark.parametrize("family", KINDS)
def test_a_network_learns_under_every_family(family: str) -> None:
    """With the default width the training loss of the personal models falls."""
    task, fed = net_task(), federation()
    method = build("pfedbred", task, Local(epochs=2, batch=3, lr=0.1), {"family": family})
    sim = simulation(method, task, [fed], rounds=12, participation="all")

    def loss() -> float:
        rows = [fed.train.of(i) for i in range(5)]
        return sum(
            float(task.loss(sim.params(i), _batch(fed.x[r], fed.y[r]))) for i, r in enumerate(rows)
        )

    first = loss()
    run(sim)
    assert loss() < 0.7 * first


class _Positive(nn.Module):
    """A network whose parameters start inside (0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), 0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def test_weights_as_means_need_a_network_that_starts_inside() -> None:
    """mapping='none' refuses an ordinary network and says how to mend it; another runs."""
    options = {"family": "bernoulli", "mapping": "none"}
    with pytest.raises(ConfigError, match=r"'body\.weight'.*use mapping='affine'"):
        build("pfedbred", net_task(), Local(), options)
    task = Task(_Positive())
    method = build("pfedbred", task, Local(epochs=1, batch=4), options)
    assert "prior_width" not in method.hyper
    sim = run(simulation(method, task, [federation()]))
    w = sim.store.gather(sim.context.everybody)["params"]["w"]
    assert 0 < float(w.min()) < float(w.max()) < 1
    assert float(w.max()) > 0.41


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "code", "envelope": "exact"}, "use mode='paper'"),
        ({"mapping": "affine"}, "no use with family='gaussian'"),
        ({"family": "poisson", "covariance": {}}, "covariance belongs to family='gaussian'"),
        ({"covariance": {"w": 1.0}}, "must name every parameter"),
    ],
)
def test_contradictions_are_refused(options: dict, words: str) -> None:
    """Options that would be ignored are errors."""
    with pytest.raises(ConfigError, match=words):
        build("pfedbred", net_task(), Local(), options)


def test_weight_decay_belongs_to_the_loss() -> None:
    """It is f + (δ/2)‖·‖² in the centre's gradient and in the solve, for both kinds of steps."""

    def fn(x: float) -> float:
        return (x - 3.0) + 0.5 * x

    one = _batch([[1.0, 3.0]])
    local = Local(steps=1, batch=None, lr=0.1, weight_decay=0.5)
    for family in ("gaussian", "poisson"):
        options = {"strategy": "lg", "family": family, "prox_steps": 1}
        method = build("pfedbred", _task(), local, options)
        work = {"local": {"w": _t([1.0])}, "params": {"w": _t([2.0])}}
        width = {"prior_width": 50.0, "weight_decay": 0.5, "prior_lr": 0.1}
        ctx = _client_context(prox_strength=2.0, personal_lr=0.01, local_lr=0.1, **width)
        theta = float(method.phases[0].step(work, one, ctx)["params"]["w"])
        mu = 1.0 - 0.1 * fn(1.0)
        if family == "gaussian":
            assert theta == pytest.approx(mu - 0.01 * fn(mu), abs=1e-12)
            continue
        prior = Separable(KINDS["poisson"], _t(50.0))
        slope = {"w": _t([fn(mu)])}
        new = prior.mirror_step({"w": _t([mu])}, {"w": _t([mu])}, slope, _t(0.01), _t(2.0))
        assert theta == pytest.approx(float(new["w"]), abs=1e-12)


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_gradients_are_clipped_before_the_decay(family: str) -> None:
    """As in all local training: the slope −2 becomes −¼, and the decay ½·1 comes after that."""
    local = Local(steps=1, batch=None, lr=0.1, weight_decay=0.5, clip_norm=0.25)
    options = {"strategy": "none", "family": family, "prox_steps": 1}
    method = build("pfedbred", _task(), local, options)
    work = {"local": {"w": _t([1.0])}, "params": {"w": _t([2.0])}}
    hyper = {"weight_decay": 0.5, "clip_norm": 0.25, "prior_width": 50.0, "local_lr": 0.1}
    ctx = _client_context(prox_strength=2.0, personal_lr=0.01, **hyper)
    theta = method.phases[0].step(work, _batch([[1.0, 3.0]]), ctx)["params"]["w"]
    wanted = _t([1.0 - 0.01 * (-0.25 + 0.5)])
    if family == "poisson":
        prior, start = Separable(KINDS["poisson"], _t(50.0)), {"w": _t([1.0])}
        slope = {"w": _t([-0.25 + 0.5])}
        wanted = prior.mirror_step(start, start, slope, _t(0.01), _t(2.0))["w"]
    torch.testing.assert_close(theta, wanted, rtol=0, atol=1e-12)
