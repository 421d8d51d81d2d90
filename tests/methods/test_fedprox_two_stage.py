"""Two-stage FedProx: sampled stochastic steps, then everybody trains once more."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Method, ServerContext, changed
from sartor.core.task import Task, given, never
from sartor.data.synthetic import Logistic, Quadratic, logistic_radius, quadratics
from sartor.methods import build
from sartor.methods.fedprox_two_stage import fedprox_two_stage
from sartor.methods.local import local as local_train
from sartor.theory.two_stage import local_rate, server_rate
from tests.toys import (
    Q3,
    SIZES,
    centre,
    federation,
    net_task,
    outcome,
    personal,
    q3,
    quadratic_task,
    run,
    simulation,
    states,
)

NAME = "fedprox-two-stage"
A, C = np.array(Q3[0]), np.array(Q3[1])
GD = Local(steps=1, batch=None, lr=1 / 6)
SGD = Local(steps=4, batch=3, lr=0.2)
THEORY = {"preset": "theory", "strong_convexity": 1.0}


@functools.wraps(fedprox_two_stage)
def stage_one(*args, **options) -> Method:
    """Leave stage II out."""
    return changed(fedprox_two_stage(*args, **options), after=None)


def _net(factory, local: Local = SGD, options: dict | None = None, **settings):
    task = net_task()
    method = build(factory, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_no_pull_is_local_training_to_the_bit(momentum: float, weights: str) -> None:
    """λ = 0: w_i is LocalTrain's on the same batches, stage II included, and w_g never moves."""
    local = replace(SGD, momentum=momentum, keep_optimiser=True)

    def alone(task: Task, local: Local) -> Method:
        """LocalTrain with batches drawn anew in every step, and one more round of everybody."""
        base = local_train(task, local, participation="sampled")
        fresh = changed(base, phases=(replace(base.phases[0], fresh=True),))
        return changed(fresh, after=fresh)

    hyper = {"prox_strength": 0.0}
    found = outcome(_net(NAME, local, {"weights": weights}, hyper=hyper, rounds=4))
    wanted = outcome(_net(alone, local, rounds=4))
    for name in wanted:
        if name.startswith(("client/", "pre/", "post/")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    start = net_task().init(0)
    for name, leaf in start.items():
        np.testing.assert_array_equal(found[f"server/params/{name}"][0], leaf.double())


@pytest.mark.parametrize("final", [None, 7])
def test_no_pull_takes_all_steps_of_both_stages(final: int | None) -> None:
    """λ = 0 with full batches is LocalTrain of T·K_t + K_T steps."""
    local = Local(steps=2, batch=None, lr=0.1)
    hyper = {"prox_strength": 0.0}
    sim = q3(NAME, local, options={"final_steps": final}, hyper=hyper, rounds=3)
    whole = Local(steps=3 * 2 + (final or 2), batch=None, lr=0.1)
    np.testing.assert_array_equal(personal(sim), personal(q3("local", whole)))


def test_one_over_lambda_is_plain_averaging() -> None:
    """η = 1/λ, everybody there: w_g is the mean of the pushed models, weighted if asked."""
    hyper = {"prox_strength": 0.7, "server_lr": 1 / 0.7}
    sim = q3(stage_one, GD, hyper=hyper, rounds=3)
    assert centre(sim) == pytest.approx(personal(sim).mean(), abs=1e-12)
    sizes = [1, 2, 3]
    sized = q3(stage_one, GD, options={"weights": "samples"}, hyper=hyper, samples=sizes)
    assert centre(sized) == pytest.approx(personal(sized) @ np.array(sizes) / 6, abs=1e-12)


def test_constant_steps_on_full_batches_are_the_one_stage_method() -> None:
    """Without W and with full batches, stage I is FedProx of Yu et al.; so is the solution."""
    hyper = {"prox_strength": 2.0, "server_lr": 0.375}
    local = Local(steps=13, batch=None, lr=1 / 6)
    for rounds in (1, 4):
        two = q3(stage_one, local, hyper=hyper, rounds=rounds)
        one = q3("fedprox", local, options={"preset": "free"}, hyper=hyper, rounds=rounds)
        np.testing.assert_allclose(personal(two), personal(one), atol=1e-14)
        assert centre(two) == pytest.approx(centre(one), abs=1e-14)
    sim = q3(NAME, local, hyper=hyper, rounds=60)
    assert centre(sim) == pytest.approx(11 / 3, abs=1e-9)
    np.testing.assert_allclose(personal(sim), [22 / 9, 10 / 3, 47 / 9], atol=1e-9)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_pull_per_client_has_its_own_optimum(weights: str) -> None:
    """λ_i: the solution of Σ p_i [L_i(w_i) + (λ_i/2)‖w_g − w_i‖²]."""
    lam, samples = [0.5, 2.0, 5.0], [1, 2, 3]
    _, truth = quadratics(*Q3, samples=samples)
    p = torch.full((3,), 1 / 3, dtype=torch.float64) if weights == "uniform" else truth.weights
    w_g, w = truth.fedprox(torch.tensor(lam), weights=p)
    sim = q3(
        NAME,
        Local(steps=15, batch=None, lr=0.11),
        options={"weights": weights},
        hyper={"prox_strength": lam, "server_lr": 0.4},
        rounds=70,
        samples=samples,
    )
    assert centre(sim) == pytest.approx(float(w_g), abs=1e-8)
    np.testing.assert_allclose(personal(sim), w[:, 0], atol=1e-8)


# ---- who trains, and what the server does --------------------------------------------------------


def test_the_sampled_client_trains_and_the_other_keeps_its_model() -> None:
    """M = 2, one client a round: the printed branches, swapped, would do the opposite."""
    task = quadratic_task()
    method = build(stage_one, task, GD, {})
    fed, _ = quadratics([1.0, 2.0], [5.0, 9.0])
    hyper = {"prox_strength": 2.0, "server_lr": 0.3}
    sim = simulation(method, task, [fed], hyper=hyper, participation=1, rounds=6)
    w, w_g, seen = np.zeros(2), 0.0, set()
    for t in range(6):
        (i,) = sim.rounds.draw(method, "train", t)[0][0]
        before = personal(sim)
        sim.step()
        grown = w[i] - (1 / 6) * ([1.0, 2.0][i] * (w[i] - [5.0, 9.0][i]) + 2.0 * (w[i] - w_g))
        w[i] = grown
        w_g = w_g - 2.0 * 2 * 0.3 * 0.5 * (w_g - grown)  # λ m η p_i/B_g
        np.testing.assert_allclose(personal(sim), w, atol=1e-6)
        assert personal(sim)[1 - i] == before[1 - i]
        assert centre(sim) == pytest.approx(w_g, abs=1e-6)
        seen.add(int(i))
    assert seen == {0, 1}


def test_the_server_step_is_unbiased_over_cohorts() -> None:
    """(λ m η/B_g) Σ_C p_i (w_g − w_i) averages to λη Σ p_i (w_g − w_i) over all pairs."""
    one = torch.tensor(1.0, dtype=torch.float64)
    method = build(NAME, quadratic_task(3), SGD, {"weights": "samples"})

    def step(cohort: tuple[int, ...]) -> np.ndarray:
        ctx = ServerContext(
            hyper={"prox_strength": 2.0 * one, "server_lr": 0.5 * one},
            key=None,
            round=torch.tensor(0),
            sizes=torch.tensor([10, 20, 30]),
            cohort=torch.tensor(cohort),
            present=torch.ones(2, dtype=torch.bool),
        )
        pushed = {"params": {"w": torch.eye(3, dtype=torch.float64)[list(cohort)]}}
        server = {"params": {"w": torch.zeros(3, dtype=torch.float64)}}
        return method.aggregate(server, pushed, ctx)["params"]["w"].numpy()

    pairs = list(itertools.combinations(range(3), 2))
    np.testing.assert_allclose(np.mean([step(c) for c in pairs], 0), [1 / 6, 1 / 3, 1 / 2])
    np.testing.assert_allclose(step((1, 2)), [0, 1.5 / 3, 1.5 / 2])


def test_the_scale_of_a_cohort_is_in_double_precision() -> None:
    """m/B_g = 6/5 is no number of single precision: a step of w_g is exact to 1e-15."""
    one = torch.tensor(1.0, dtype=torch.float64)
    ctx = ServerContext(
        hyper={"prox_strength": one, "server_lr": one},
        key=None,
        round=torch.tensor(0),
        sizes=torch.full((6,), 10),
        cohort=torch.arange(5),
        present=torch.ones(5, dtype=torch.bool),
    )
    pushed = {"params": {"w": torch.ones(5, 1, dtype=torch.float64)}}
    server = {"params": {"w": torch.zeros(1, dtype=torch.float64)}}
    found = build(NAME, quadratic_task(), SGD, {}).aggregate(server, pushed, ctx)["params"]["w"]
    assert float(found) == pytest.approx(1.0, rel=1e-14)  # (6/5) · 5 · (1/6)


def test_stage_two_trains_everybody_around_the_last_global_model() -> None:
    """Clients that were never drawn train too; w_g stays, nothing is sent up, |θ| comes down."""
    hyper = {"prox_strength": 2.0}
    settings = {"hyper": hyper, "rounds": 1, "participation": 1}
    one, both = (
        q3(f, GD, **settings, options={"final_steps": 3} if f is NAME else {})
        for f in (stage_one, NAME)
    )
    assert (personal(one) == 0.0).sum() == 2
    w, w_g = personal(one).copy(), centre(one)
    for _ in range(3):
        w = w - (A * (w - C) + 2.0 * (w - w_g)) / 6
    np.testing.assert_allclose(personal(both), w, atol=1e-6)
    assert centre(both) == w_g
    assert both.ledger().setup_bytes.tolist() == [3 * 8]
    assert both.ledger().bytes_up.tolist() == one.ledger().bytes_up.tolist() == [[8]]


def test_a_learning_curve_shows_what_stopping_there_would_give() -> None:
    """The score after t rounds is the final score of a run of t rounds; training never notices."""
    long = _net(NAME, rounds=4)
    for rounds in (1, 3):
        short = _net(NAME, rounds=rounds)
        for split in ("test", "val"):
            wanted = short.scores()["pre", split].loss[:, -1]
            np.testing.assert_array_equal(long.scores()["pre", split].loss[:, rounds], wanted)
    rare = _net(NAME, rounds=4, eval_every=4)
    for name, leaf in states(long).items():
        np.testing.assert_array_equal(states(rare)[name], leaf, err_msg=name)


# ---- SoftLocalSGD --------------------------------------------------------------------------------


def _rows(num_samples: int, batch: int, steps: int) -> np.ndarray:
    """Return the rows that stage I draws in one round: (steps, batch)."""
    task = net_task()
    method = build(stage_one, task, Local(steps=steps, batch=batch), {})
    (phase,) = method.phases
    seen = []

    def record(work, batch, ctx):
        seen.append(batch.rows[batch.mask].tolist())
        return work

    idle = changed(method, phases=(replace(phase, step=record),))
    fed = federation(sizes=(num_samples,))
    run(
        simulation(
            idle, task, [fed], rounds=1, participation="all", engine="sequential", points=("pre",)
        )
    )
    return np.array(seen)


def test_batches_are_drawn_anew_without_replacement() -> None:
    """Lemma 19: Var of a batch mean is ((n/B − 1)/(n(n−1))) Σ‖x_j − x̄‖²; B = n gives 0."""
    rows = _rows(6, 4, 3000)
    assert all(len(set(batch)) == 4 for batch in rows)
    x = np.array([0.0, 1.0, 4.0, 9.0, 16.0, 25.0])
    wanted = (6 / 4 - 1) / (6 * 5) * ((x - x.mean()) ** 2).sum()
    assert x[rows].mean(1).var() == pytest.approx(wanted, rel=0.1)
    # Independent steps: a pass would make neighbouring batches share few rows.
    shared = [len(set(a) & set(b)) for a, b in itertools.pairwise(rows)]
    assert np.mean(shared) == pytest.approx(4 * 4 / 6, rel=0.02)
    assert all(sorted(batch) == list(range(6)) for batch in _rows(6, 9, 5))


def test_steps_are_counted_as_steps() -> None:
    """K_t is a number of mini-batches; given in epochs, as many as those would have taken."""
    sizes = np.array(SIZES)
    ledger = _net(NAME, Local(steps=5, batch=3), rounds=1, participation="all").ledger()
    full = np.minimum(sizes, 3)
    assert ledger.gradient_evaluations.tolist() == [[5 * int(full.sum())]]
    for drop, steps in ((False, -(-sizes // 3)), (True, sizes // 3)):
        local = Local(epochs=2, batch=3, drop_last=drop)
        ledger = _net(NAME, local, rounds=1, participation="all").ledger()
        wanted = int((2 * np.maximum(steps, 1) * full).sum())
        assert ledger.gradient_evaluations.tolist() == [[wanted]]


def test_growing_local_work_follows_the_theorem() -> None:
    """K_t + 1 ≥ C_1 max(λ², 1) t, and never less than was asked for."""
    options = {"growth": 0.5}
    for lam, wanted in ((0.3, [2, 2, 2, 2, 2, 2, 2, 3]), (2.0, [2, 2, 3, 5, 7, 9, 11, 13])):
        sim = q3(
            NAME,
            Local(steps=2, batch=None, lr=0.01),
            options=options,
            hyper={"prox_strength": lam},
            rounds=8,
        )
        assert (sim.ledger().gradient_evaluations[0] / 3).tolist() == wanted


# ---- steps of the theory -------------------------------------------------------------------------


def test_the_steps_of_the_theorem() -> None:
    """λ = 2, μ = 1: η = 1/3, 1/6, 1/9 restarting in every call, and η_g = 3, 1.5, 1."""
    sim = q3(
        NAME,
        Local(steps=3, batch=None),
        options={**THEORY, "final_steps": 2},
        hyper={"prox_strength": 2.0},
        rounds=3,
    )
    w, w_g = np.zeros(3), 0.0
    for t, steps in enumerate((3, 3, 3, 2)):
        for k in range(steps):
            w = w - 1 / (3 * (k + 1)) * (A * (w - C) + 2.0 * (w - w_g))
        if t < 3:
            w_g = w_g - 2.0 * (3.0, 1.5, 1.0)[t] * (w_g - w).mean()
    np.testing.assert_allclose(personal(sim), w, rtol=1e-12)
    assert centre(sim) == pytest.approx(w_g, rel=1e-12)
    assert [local_rate(k, 2.0, 1.0) for k in range(3)] == pytest.approx([1 / 3, 1 / 6, 1 / 9])
    assert [server_rate(t, 2.0, 1.0) for t in range(3)] == [3.0, 1.5, 1.0]


def test_the_steps_of_the_theorem_reach_the_solution() -> None:
    """With growing local work the squared error falls like 1/(t + 1), Eq. (39)."""
    errors = []
    for rounds in (4, 12, 36):
        options = {**THEORY, "growth": 0.25}
        sim = q3(
            NAME, Local(batch=None), options=options, hyper={"prox_strength": 2.0}, rounds=rounds
        )
        errors.append(abs(centre(sim) - 11 / 3) ** 2)
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1] / 3


@pytest.mark.parametrize("lam", [0.0, [0.0, 0.0, 0.0]])
def test_without_a_pull_the_theorems_server_stays_put(lam: Any) -> None:
    """λ = 0: Eq. (26) would divide by zero; w_g keeps its start and w_i is SGD with 1/(μ(k+1))."""
    sim = q3(
        NAME, Local(steps=2, batch=None), options=THEORY, hyper={"prox_strength": lam}, start=1.0
    )
    assert centre(sim) == 1.0
    w = np.ones(3)
    for k in (0, 1, 0, 1):
        w = w - A * (w - C) / (k + 1)
    np.testing.assert_allclose(personal(sim), w, atol=1e-12)


def test_a_pull_per_client_in_the_theorems_server_step() -> None:
    """λ_i: λμ/(μ+λ) in η_t is its mean over clients; a client without pull moves nothing."""
    lam = np.array([0.0, 1.0, 3.0])
    sim = q3(
        stage_one,
        Local(steps=1, batch=None),
        options=THEORY,
        hyper={"prox_strength": lam.tolist()},
        rounds=1,
    )
    w = personal(sim)
    np.testing.assert_allclose(w, A * C / (1 + lam), atol=1e-12)
    eta = 2.0 / np.mean(lam / (1 + lam))
    assert centre(sim) == pytest.approx(eta * np.mean(lam * w), rel=1e-12)


# ---- the domain ----------------------------------------------------------------------------------


def _plane(options: dict, size: float, *, rounds: int = 1, seen: list | None = None):
    """Train two clients in the plane, f = ½‖w − c‖², from zero; record every local iterate."""
    fed, _ = quadratics([[1.0, 1.0]] * 2, [[3.0, 4.0], [-0.3, 0.1]])
    task = Task(Quadratic(2), None, given, never)
    method = build(NAME, task, Local(steps=2, batch=None, lr=1.0), options)
    hyper = {"prox_strength": 0.5, "server_lr": 6.0, "domain_size": size}

    def watch(record: Method) -> Method:
        (phase,) = record.phases

        def step(work, batch, ctx):
            moved = phase.step(work, batch, ctx)
            if seen is not None:
                seen.append(moved["params"]["w"].numpy())
            return moved

        return changed(record, phases=(replace(phase, step=step),))

    watched = changed(watch(method), after=watch(method.schedule.after))
    sim = simulation(
        watched,
        task,
        [fed],
        hyper=hyper,
        rounds=rounds,
        participation="all",
        engine="sequential",
        points=("pre",),
    )
    return run(sim)


@pytest.mark.parametrize("domain", ["ball", "box"])
def test_all_local_iterates_stay_in_the_domain(domain: str) -> None:
    """After every step of both stages w_i ∈ W, and the bound is reached."""
    seen: list[np.ndarray] = []
    _plane({"domain": domain}, 1.0, rounds=3, seen=seen)
    order = 2 if domain == "ball" else np.inf
    size = np.linalg.norm(np.stack(seen), ord=order, axis=1)
    assert len(size) >= 2 * 2 * 4
    assert size.max() == pytest.approx(1.0, abs=1e-12)
    assert size.min() < 0.9


def test_a_projection_is_the_nearest_point() -> None:
    """From 0 a unit step of client (3, 4) leads to c; ball and box of size 1 cut it."""
    first: dict[str, list[np.ndarray]] = {"ball": [], "box": []}
    for domain, seen in first.items():
        _plane({"domain": domain}, 1.0, seen=seen)
        del seen[:4]  # the evaluation at the start, on copies
    np.testing.assert_allclose(first["ball"][0], [0.6, 0.8], atol=1e-12)
    np.testing.assert_allclose(first["box"][0], [1.0, 1.0], atol=1e-12)


@pytest.mark.parametrize("domain", ["ball", "box"])
def test_inside_the_domain_nothing_happens(domain: str) -> None:
    """A domain that is never left changes no bit."""
    wanted = states(_net(NAME))
    options = {"domain": domain, "project_global": True}
    found = states(_net(NAME, SGD, options, hyper={"domain_size": 1e3}))
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


@pytest.mark.parametrize("domain", ["ball", "box"])
def test_the_projection_is_non_expansive(domain: str) -> None:
    """‖P(a) − P(b)‖ ≤ ‖a − b‖ and P(a) ∈ W, through the server's step at λη = 1, the mean."""
    method = build(NAME, quadratic_task(3), SGD, {"domain": domain, "project_global": True})
    draw = torch.Generator().manual_seed(0)
    one = torch.tensor(1.0, dtype=torch.float64)
    ctx = ServerContext(
        hyper={"prox_strength": one, "server_lr": one, "domain_size": one},
        key=None,
        round=torch.tensor(0),
        sizes=torch.tensor([4]),
        cohort=torch.tensor([0]),
        present=torch.tensor([True]),
    )
    zero = {"params": {"w": torch.zeros(3, dtype=torch.float64)}}

    def project(w: torch.Tensor) -> torch.Tensor:
        return method.aggregate(zero, {"params": {"w": w[None]}}, ctx)["params"]["w"]

    moved = 0
    for _ in range(50):
        a, b = 2 * torch.randn(2, 3, dtype=torch.float64, generator=draw)
        assert (project(a) - project(b)).norm() <= (a - b).norm() + 1e-12
        moved += not torch.equal(project(a), a)
        just_outside = 1.01 * a / a.norm(p=2.0 if domain == "ball" else torch.inf)
        for point in (a, just_outside):
            assert project(point).norm(p=2.0 if domain == "ball" else torch.inf) <= 1 + 1e-12
    assert moved > 10


def test_the_global_model_is_projected_if_asked() -> None:
    """A server step of λη = 3 leaves W unless it is projected."""
    free, kept = (
        _plane({"domain": "ball", "project_global": flag}, 0.4).server["params"]["w"].norm()
        for flag in (False, True)
    )
    assert free > 0.5
    assert kept == pytest.approx(0.4, abs=1e-12)


# ---- experiments and errors ----------------------------------------------------------------------


def test_the_curves_of_the_paper() -> None:
    """Appendix D, fewer repeats: λ = 0 is flat, λ = 4 falls like FedAvg, 0.44 lies between."""
    radii, pulls, repeats = (0.0, 10.0, 20.0), (0.0, 0.44, 4.0), 2
    rows = [(r, lam, s) for lam in pulls for r in radii for s in range(repeats)]
    task = Task(Logistic(100))
    method = build(NAME, task, Local(steps=5, batch=16, lr=0.2), {})
    assert method.hyper["server_lr"].default == 0.8
    sim = simulation(
        method,
        task,
        [logistic_radius(r, seed=s, test_samples=400)[0] for r, _, s in rows],
        hyper=[{"prox_strength": lam} for _, lam, _ in rows],
        seeds=[s for _, _, s in rows],
        rounds=20,
        participation="all",
        eval_every=20,
        points=("pre",),
        dtype=torch.float32,
    )
    correct = run(sim).scores()["pre", "test"].correct[:, -1].sum(1) / 2000
    found = 100 * correct.reshape(len(pulls), len(radii), repeats).mean(2)
    wanted = [[73.4, 73.6, 74.4], [84.0, 75.3, 71.0], [86.2, 70.8, 64.0]]
    np.testing.assert_allclose(found, wanted, atol=4.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "theory"}, "needs strong_convexity=μ > 0 of the loss, got None"),
        ({"preset": "theory", "strong_convexity": -1.0}, "got -1.0"),
        ({"strong_convexity": 1.0}, "no effect with constant steps"),
        ({"final_steps": 0}, "final_steps must be >= 1, got 0"),
        ({"growth": 0.0}, "growth must be > 0, got 0"),
        ({"project_global": True}, "use domain='ball' or 'box'"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """An option that cannot be right is refused with the way to fix it."""
    with pytest.raises(ConfigError, match=words):
        build(NAME, net_task(), SGD, options)


def test_what_would_be_ignored_is_not_offered() -> None:
    """Steps of the theory leave no rates to set; without a domain there is no size."""
    theory = build(NAME, net_task(), SGD, THEORY).hyper
    assert not {"local_lr", "server_lr", "domain_size"} & theory.keys()
    assert "domain_size" in build(NAME, net_task(), SGD, {"domain": "box"}).hyper
    with pytest.raises(ConfigError, match="one value for all clients"):
        q3(NAME, GD, options={"domain": "box"}, hyper={"domain_size": [1.0, 2.0, 3.0]})
