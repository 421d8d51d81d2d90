"""pFedMe: proximal points around a global model that follows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local, descend
from sartor.core.method import changed
from sartor.data.synthetic import quadratics
from sartor.methods import build
from tests.toys import (
    Q3,
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
    used,
)

A, C = np.array(Q3[0]), np.array(Q3[1])
ONE = Local(steps=1, batch=None, lr=0.1)
EXACT = {"prox_strength": 2.0, "personal_lr": [1 / 3, 1 / 4, 1 / 6]}
"""α = 1/(a + λ): on (a/2)(θ − c)² one step is the exact proximal point."""


def _exact(local: Local, **settings: Any) -> Any:
    hyper = {**EXACT, **settings.pop("hyper", {})}
    options = {"prox_steps": 1, **settings.pop("options", {})}
    return q3("pfedme", local, options=options, hyper=hyper, **settings)


def test_one_exact_step_has_the_known_numbers() -> None:
    """A = 1, c = 3, λ = 2, w = 1, η = 0.1: θ = 1.666667, w⁺ = 1.133333."""
    sim = q3(
        "pfedme",
        ONE,
        options={"prox_steps": 1},
        hyper={"prox_strength": 2.0, "personal_lr": 1 / 3},
        curvatures=[1.0],
        centres=[3.0],
        start=1.0,
    )
    assert personal(sim) == pytest.approx([5 / 3], abs=1e-7)
    assert centre(sim) == pytest.approx(1.1333333333, abs=1e-7)


@pytest.mark.parametrize("lam", [0.5, 1.0, 30.0, 1000.0])
def test_the_outer_step_has_the_whole_pull(lam: float) -> None:
    """W⁺ = w − ηλ(w − θ) with θ = (ac + λw)/(a + λ), for pulls far from 1 in both directions."""
    hyper = {"prox_strength": lam, "personal_lr": [1.0 / (a + lam) for a in A]}
    sim = q3("pfedme", ONE, options={"prox_steps": 1}, hyper=hyper, start=1.0)
    theta = (A * C + lam) / (A + lam)
    np.testing.assert_allclose(personal(sim), theta, rtol=1e-9)
    wanted = (1.0 - 0.1 * lam * (1.0 - theta)).mean()
    assert centre(sim) == pytest.approx(wanted, rel=1e-6)


def test_without_a_pull_the_global_model_stays() -> None:
    """λ = 0: w never moves, and θ_i is K plain gradient steps from it."""
    hyper = {"prox_strength": 0.0, "personal_lr": 0.1}
    sim = q3("pfedme", replace(ONE, steps=3), options={"prox_steps": 4}, hyper=hyper, rounds=2)
    assert centre(sim) == 0.0
    np.testing.assert_allclose(personal(sim), C - (1 - 0.1 * A) ** 4 * C, atol=1e-7)


def test_the_fixed_point_on_the_three_quadratics() -> None:
    """R = 1, β = 1, exact, λ = 2: w = 11/3 and θ = (22/9, 10/3, 47/9)."""
    sim = _exact(replace(ONE, lr=0.4), rounds=120)
    assert centre(sim) == pytest.approx(11 / 3, abs=1e-7)
    np.testing.assert_allclose(personal(sim), [22 / 9, 10 / 3, 47 / 9], atol=1e-6)


def test_more_local_steps_move_the_fixed_point() -> None:
    """R > 1: w tends to Σ q_i c_i/Σ q_i with q_i = 1 − (1 − ηa_iλ/(a_i+λ))^R."""
    sim = _exact(replace(ONE, steps=4, lr=0.3), rounds=60)
    q = 1 - (1 - 0.3 * A * 2 / (A + 2)) ** 4
    assert centre(sim) == pytest.approx(q @ C / q.sum(), abs=1e-6)
    assert abs(centre(sim) - 11 / 3) > 0.1


def test_a_full_outer_step_sends_the_personal_model() -> None:
    """ηλ = 1, R = 1: w_{i,1} = θ_i, so the server holds their mean."""
    sim = _exact(replace(ONE, lr=0.5))
    np.testing.assert_allclose(personal(sim), A * C / (A + 2), atol=1e-7)
    assert centre(sim) == pytest.approx(personal(sim).mean(), abs=1e-14)


@pytest.mark.parametrize("start", ["w", "carry"])
def test_where_the_proximal_solve_starts(start: str) -> None:
    """At w for every batch, or on from the last θ within a round ("carry"); a round starts at w."""
    eta, lam, alpha = 0.1, 2.0, 0.05
    hyper = {"prox_strength": lam, "personal_lr": alpha}
    local = Local(steps=3, batch=None, lr=eta)
    sim = q3(
        "pfedme", local, options={"inner_start": start, "prox_steps": 2}, hyper=hyper, rounds=2
    )
    w_g = 0.0
    for _ in range(2):
        w, theta = np.full(3, w_g), np.full(3, w_g)
        for _ in range(3):
            theta = w if start == "w" else theta
            for _ in range(2):
                theta = theta - alpha * (A * (theta - C) + lam * (theta - w))
            w = w - eta * lam * (w - theta)
        w_g = w.mean()
    np.testing.assert_allclose(personal(sim), theta, atol=1e-7)
    assert centre(sim) == pytest.approx(w_g, abs=1e-7)


def test_weight_decay_acts_on_the_personal_model_alone() -> None:
    """θ ← θ − α[∇f + λ(θ − w) + δθ], as in the authors' code; without it there is none."""
    hyper = {"prox_strength": 2.0, "personal_lr": 0.1}
    found = {}
    for decay in (0.0, 0.5):
        local = Local(steps=1, batch=None, lr=0.1, weight_decay=decay)
        sim = q3("pfedme", local, options={"prox_steps": 2}, hyper=hyper, start=2.0)
        theta = np.full(3, 2.0)
        for _ in range(2):
            theta = theta - 0.1 * (A * (theta - C) + 2.0 * (theta - 2.0) + decay * theta)
        np.testing.assert_allclose(personal(sim), theta, atol=1e-7)
        assert centre(sim) == pytest.approx((2.0 - 0.2 * (2.0 - theta)).mean(), abs=1e-7)
        found[decay] = centre(sim)
    assert found[0.0] != found[0.5]


def test_the_server_extrapolates_and_averages_plainly() -> None:
    """W ← (1 − β)w + β · mean: uniform by default, by samples if asked; β = 0 stays."""
    hyper, samples = {"prox_strength": 2.0, "personal_lr": 0.1}, [1, 2, 3]

    def moved(beta: float, **options: Any) -> float:
        return centre(
            q3(
                "pfedme",
                ONE,
                options=options,
                hyper={**hyper, "relax": beta},
                samples=samples,
                start=1.0,
            )
        )

    theta = np.ones(3)
    for _ in range(5):
        theta = theta - 0.1 * (A * (theta - C) + 2.0 * (theta - 1.0))
    w = 1.0 - 0.2 * (1.0 - theta)
    assert moved(1.0) == pytest.approx(w.mean(), abs=1e-7)
    assert moved(2.0) == pytest.approx(-1.0 + 2 * w.mean(), abs=1e-7)
    assert moved(0.0) == pytest.approx(1.0, abs=1e-15)
    assert moved(1.0, weights="samples") == pytest.approx(w @ samples / 6, abs=1e-7)


@pytest.mark.parametrize("train_all", [True, False])
def test_all_train_and_the_sampled_are_averaged(train_all: bool) -> None:
    """With one reporter of three, all θ_i move (or only its own) and w is the reporter's."""
    hyper = {"prox_strength": 2.0, "personal_lr": 0.1}
    sim = q3(
        "pfedme", ONE, options={"train_all": train_all}, hyper=hyper, participation=1, start=1.0
    )
    theta = personal(sim)
    assert (theta != 1.0).sum() == (3 if train_all else 1)
    sent = 1.0 - 0.2 * (1.0 - theta)
    assert np.abs(sent - centre(sim)).min() < 1e-12
    ledger = sim.ledger()
    assert ledger.bytes_down.tolist() == [[24 if train_all else 8]]
    assert ledger.bytes_up.tolist() == [[8]]


def test_the_personal_model_is_its_own() -> None:
    """θ_i is scored, differs from w_{i,R} and w, and keeps its bits when a new w arrives."""
    task = net_task()
    sim = simulation(
        build("pfedme", task, Local(epochs=1, batch=3, lr=0.2), {}),
        task,
        [federation()],
        participation="all",
    )
    sim.step()
    before = {k: v for k, v in states(sim).items() if k.startswith("client/")}
    for leaf in sim.server["params"].values():
        leaf.fill_(7.0)
    for i in range(5):
        for name, leaf in sim.params(i).items():
            np.testing.assert_array_equal(leaf.numpy(), before[f"client/params/{name}"][0, i])
            assert not torch.allclose(leaf, sim.server["params"][name])
    found = outcome(run(sim))
    np.testing.assert_array_equal(found["pre/test/loss"][:, 1:], found["post/test/loss"])


def test_one_batch_costs_as_many_gradients_as_there_are_proximal_steps() -> None:
    """R·K gradients on each client."""
    sim = q3("pfedme", replace(ONE, steps=4), options={"prox_steps": 3})
    assert sim.ledger().gradient_evaluations.tolist() == [[3 * 4 * 3]]


def test_one_more_step_on_a_copy_is_the_fine_tuning_trick() -> None:
    """v_i = θ_i − α∇f_i(θ_i) at evaluation; training does not notice."""
    task = quadratic_task()
    method = build("pfedme", task, ONE, {})
    extra = descend(task, ONE, name="fine-tune", lr="personal_lr")
    sims = [
        run(simulation(m, task, [quadratics(*Q3)[0]], participation="all"))
        for m in (method, changed(method, adapt=(extra,)))
    ]
    theta = personal(sims[0])
    np.testing.assert_array_equal(personal(sims[1]), theta)
    np.testing.assert_allclose(used(sims[1]), theta - 0.05 * A * (theta - C), atol=1e-7)
    np.testing.assert_array_equal(used(sims[0]), theta)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("train_all", [True, False])
def test_it_is_pfedbred_without_a_personal_centre_to_the_bit(train_all: bool, decay: float) -> None:
    """PFedBreD with strategy none, the Gaussian and the same start: every state and score."""
    task, local = net_task(), Local(epochs=2, batch=3, lr=0.1, weight_decay=decay)
    common = {"train_all": train_all, "prox_steps": 3}
    wanted = build("pfedme", task, local, common)
    found = build("pfedbred", task, local, {**common, "strategy": "none", "inner_start": "w"})
    one, two = (
        outcome(run(simulation(m, task, [federation()], hyper={"relax": 1.5}, rounds=4)))
        for m in (wanted, found)
    )
    assert sorted(one) == sorted(two)
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.parametrize(
    ("local", "options", "words"),
    [
        (Local(momentum=0.9), {}, "no use for momentum=0.9; set momentum = 0"),
        (Local(), {"prox_steps": 0}, "prox_steps must be >= 1, got 0"),
    ],
)
def test_what_has_no_meaning_is_refused(local: Local, options: dict, words: str) -> None:
    """Momentum and empty solves are errors that say how to fix them."""
    for name in ("pfedme", "pfedbred"):
        with pytest.raises(ConfigError, match=words):
            build(name, net_task(), local, options)


def test_everybody_trains_by_default() -> None:
    """Algorithm 1 trains all clients and averages a sample of them."""
    method = build("pfedme", net_task(), Local(), {})
    assert method.schedule.who == "everyone_trains"
    assert (
        build("pfedme", net_task(), Local(), {"train_all": False}).schedule.who != "everyone_trains"
    )


def test_the_hyper_parameters_begin_within_the_papers_ranges() -> None:
    """λ = 15, α = 0.05, β = 1; none is negative, and β is the server's: one number a run."""
    hyper = build("pfedme", net_task(), Local(), {}).hyper
    found = {k: (h.default, h.low, h.server) for k, h in hyper.items() if k not in Local().hyper}
    assert found == {
        "prox_strength": (15.0, 0.0, False),
        "personal_lr": (0.05, 0.0, False),
        "relax": (1.0, 0.0, True),
    }
