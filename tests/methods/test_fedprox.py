"""One-stage FedProx: from LocalTrain (λ = 0) to GlobalTrain (λ → ∞)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ServerContext
from sartor.data.synthetic import quadratics
from sartor.methods import build
from sartor.theory import coupling, proximal
from sartor.training.simulation import Simulation
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
)

A, C = np.array(Q3[0]), np.array(Q3[1])
THEORY = {"preset": "corollary1", "smoothness": 4.0, "strong_convexity": 1.0}
GD = Local(steps=1, batch=None, lr=1 / 6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "option", [{}, {"preset": "free"}, {"weights": "samples", "unbiased": True}]
)
def test_no_pull_is_local_training_to_the_bit(option: dict, keep: bool) -> None:
    """λ = 0: every w_i is LocalTrain's, and w_g never moves."""
    task = net_task()
    local = Local(epochs=2, batch=3, lr=0.1, momentum=0.9, keep_optimiser=keep)
    settings = {"participation": "all", "rounds": 4}
    prox = simulation(
        build("fedprox", task, local, option),
        task,
        [federation()],
        hyper={"prox_strength": 0.0},
        **settings,
    )
    start = {k: v.clone() for k, v in prox.server["params"].items()}
    alone = simulation(build("local", task, local, {}), task, [federation()], **settings)
    found, wanted = outcome(run(prox)), outcome(run(alone))
    for name in wanted:
        if name.startswith(("client/", "pre/", "post/")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    for name, leaf in start.items():
        assert torch.equal(prox.server["params"][name], leaf)


def test_no_pull_on_quadratics_is_local_training_for_the_derived_presets() -> None:
    """Presets that derive their steps from L take LocalTrain's at η = 1/L."""
    wanted = personal(q3("local", Local(steps=3, batch=None, lr=0.25), rounds=2))
    options = {"preset": "paper_synthetic", "smoothness": 4.0}
    sim = q3(
        "fedprox",
        Local(steps=3, batch=None),
        options=options,
        hyper={"prox_strength": 0.0},
        rounds=2,
    )
    np.testing.assert_allclose(personal(sim), wanted, atol=1e-14)
    assert centre(sim) == 0.0


def test_one_over_lambda_makes_the_server_the_mean() -> None:
    """γ = 1/λ: w_g is the mean of the pushed models, over the cohort, weighted if asked."""
    hyper = {"prox_strength": 0.7}
    sim = q3("fedprox", GD, hyper=hyper, rounds=3)
    assert centre(sim) == pytest.approx(personal(sim).mean(), abs=1e-14)
    free = q3(
        "fedprox", GD, options={"preset": "free"}, hyper={**hyper, "server_lr": 1 / 0.7}, rounds=3
    )
    assert centre(free) == pytest.approx(centre(sim), abs=1e-14)
    sized = q3("fedprox", GD, options={"weights": "samples"}, hyper=hyper, samples=[1, 2, 3])
    assert centre(sized) == pytest.approx(personal(sized) @ [1 / 6, 2 / 6, 3 / 6], abs=1e-14)


def test_the_solution_on_the_three_quadratics() -> None:
    """λ = 2: w_g = 11/3, w = (22/9, 10/3, 47/9); there Σ p_i ∇L_i(w_i) = 0, w_g = Σ p_i w_i."""
    sim = q3("fedprox", Local(batch=None), options=THEORY, hyper={"prox_strength": 2.0}, rounds=60)
    assert centre(sim) == pytest.approx(11 / 3, abs=1e-9)
    w = personal(sim)
    np.testing.assert_allclose(w, [22 / 9, 10 / 3, 47 / 9], atol=1e-9)
    assert (A * (w - C)).sum() == pytest.approx(0, abs=1e-8)
    assert centre(sim) == pytest.approx(w.mean(), abs=1e-9)


def test_the_two_ends_of_the_pull() -> None:
    """λ → ∞ is the global minimiser 30/7; λ → 0 is the mean of the minimisers, 3."""
    strong = q3(
        "fedprox", Local(batch=None), options=THEORY, hyper={"prox_strength": 1e5}, rounds=50
    )
    assert centre(strong) == pytest.approx(30 / 7, abs=1e-3)
    np.testing.assert_allclose(personal(strong), 30 / 7, atol=1e-3)
    weak = q3(
        "fedprox", Local(batch=None), options=THEORY, hyper={"prox_strength": 1e-4}, rounds=16
    )
    assert centre(weak) == pytest.approx(3.0, abs=1e-3)
    np.testing.assert_allclose(personal(weak), C, atol=1e-3)


def test_one_round_from_zero_has_the_sheets_numbers() -> None:
    """K = 1, η = 1/6: w = (0, 1, 4), w_g = 1.25 with γ = 0.375 and 5/3 with γ = 0.5."""
    for gamma, wanted in ((0.375, 1.25), (0.5, 5 / 3)):
        hyper = {"prox_strength": 2.0, "server_lr": gamma}
        sim = q3("fedprox", GD, options={"preset": "free"}, hyper=hyper)
        np.testing.assert_allclose(personal(sim), [0, 1, 4], atol=1e-7)
        assert centre(sim) == pytest.approx(wanted, abs=1e-7)


def test_presets_take_their_steps_from_the_theory() -> None:
    """One round from zero with γ = 1/(2 L_g) and K of (12), with γ = 1/L_g, and with γ = 1/λ."""
    hyper, lam = {"prox_strength": 2.0}, 2.0
    prox = {"preset": "paper_synthetic", "smoothness": 4.0}
    cases = [
        (q3("fedprox", Local(batch=None), options=THEORY, hyper=hyper), 13, 1 / 6, 0.375),
        (q3("fedprox", Local(steps=3, batch=None), options=prox, hyper=hyper), 3, 1 / 6, 0.75),
        (q3("fedprox", Local(steps=3, batch=None, lr=0.1), hyper=hyper), 3, 0.1, 0.5),
    ]
    for sim, steps, eta, gamma in cases:
        w = np.zeros(3)
        for _ in range(steps):
            w = w - eta * (A * (w - C) + lam * w)
        np.testing.assert_allclose(personal(sim), w, atol=1e-7)
        assert centre(sim) == pytest.approx(gamma * lam * w.mean(), abs=1e-7)
    assert cases[0][0].ledger().gradient_evaluations.tolist() == [[3 * 13]]
    exact = q3("fedprox", Local(steps=40, batch=None), options=prox, hyper=hyper, rounds=20)
    assert centre(exact) == pytest.approx(11 / 3, abs=1e-9)


def test_the_measured_contraction_stays_below_the_theorems_rate() -> None:
    """The squared error of w_g shrinks by 0.3906 a round, less than r = 0.84375 allows."""
    wide = []
    for t in range(1, 12):
        sim = q3(
            "fedprox", Local(batch=None), options=THEORY, hyper={"prox_strength": 2.0}, rounds=t
        )
        wide.append((centre(sim) - 11 / 3) ** 2)
    ratios = np.array(wide[1:]) / np.array(wide[:-1])
    assert (ratios <= 0.84375).all()
    assert ratios[-1] == pytest.approx(0.3906, abs=5e-4)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_pull_per_client_has_its_own_optimum(weights: str) -> None:
    """λ_i: w_g = Σ p_i λ_i w_i/Σ p_i λ_i, and w_i solves ∇L_i(w_i) = λ_i(w_g − w_i)."""
    lam, samples = [0.5, 2.0, 5.0], [1, 2, 3]
    options = {**THEORY, "weights": weights}
    sim = q3(
        "fedprox",
        Local(batch=None),
        options=options,
        hyper={"prox_strength": lam},
        rounds=80,
        samples=samples,
    )
    _, truth = quadratics(*Q3, samples=samples)
    p = torch.full((3,), 1 / 3, dtype=torch.float64) if weights == "uniform" else truth.weights
    w_g, w = truth.fedprox(torch.tensor(lam), weights=p)
    assert centre(sim) == pytest.approx(float(w_g), abs=1e-8)
    np.testing.assert_allclose(personal(sim), w[:, 0], atol=1e-8)
    share = p.numpy() * np.array(lam)
    assert centre(sim) == pytest.approx(share @ personal(sim) / share.sum(), abs=1e-8)
    assert p.numpy() @ (A * (personal(sim) - C)) == pytest.approx(0, abs=1e-7)


def test_equal_clients_end_where_each_would_alone() -> None:
    """With one objective for all, every λ gives LocalTrain's solution."""
    for lam in (0.0, 0.3, 30.0):
        sim = q3(
            "fedprox",
            Local(batch=None),
            options=THEORY,
            hyper={"prox_strength": lam},
            curvatures=[2.0] * 3,
            centres=[3.0] * 3,
            rounds=60,
        )
        np.testing.assert_allclose(personal(sim), 3.0, atol=1e-6)


def test_a_client_starts_from_its_own_last_model() -> None:
    """The warm start: an absent client keeps w_i; training continues from it, not from w_g."""
    sim = q3("fedprox", GD, hyper={"prox_strength": 2.0}, rounds=2)
    first = q3("fedprox", GD, hyper={"prox_strength": 2.0}, rounds=1)
    w, w_g = personal(first), centre(first)
    np.testing.assert_allclose(personal(sim), w - (A * (w - C) + 2.0 * (w - w_g)) / 6, atol=1e-7)
    few = q3("fedprox", GD, hyper={"prox_strength": 2.0}, participation=1)
    assert sorted(personal(few) != 0.0) in ([False, False, True], [False, False, False])
    assert centre(few) == pytest.approx(
        personal(few).sum(), abs=1e-12
    )  # the mean over a cohort of one


def test_the_unbiased_rule_is_unbiased_over_cohorts() -> None:
    """γ (m/|S|) Σ_S p_i g_i averages to γ Σ p_i g_i over all pairs."""
    task = quadratic_task(3)
    options = {"preset": "free", "weights": "samples"}
    one = torch.tensor(1.0, dtype=torch.float64)

    def step(cohort: tuple[int, ...], unbiased: bool) -> np.ndarray:
        method = build("fedprox", task, Local(), {**options, "unbiased": unbiased})
        ctx = ServerContext(
            hyper={"prox_strength": one, "server_lr": one},
            key=None,
            round=None,
            sizes=torch.tensor([10, 20, 30]),
            cohort=torch.tensor(cohort),
            present=torch.ones(2, dtype=torch.bool),
        )
        pushes = {"push": {"w": torch.eye(3, dtype=torch.float64)[list(cohort)]}}
        server = {"params": {"w": torch.zeros(3, dtype=torch.float64)}}
        return -method.aggregate(server, pushes, ctx)["params"]["w"].numpy()

    pairs = list(itertools.combinations(range(3), 2))
    np.testing.assert_allclose(np.mean([step(c, True) for c in pairs], 0), [1 / 6, 1 / 3, 1 / 2])
    np.testing.assert_allclose(step((1, 2), False), [0, 0.4, 0.6])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "corollary1"}, "needs smoothness=L > 0"),
        ({"preset": "paper_synthetic", "smoothness": -1.0}, "got -1.0"),
        ({"preset": "corollary1", "smoothness": 4.0}, "0 < strong_convexity <= smoothness"),
        ({"preset": "corollary1", "smoothness": 4.0, "strong_convexity": 5.0}, "got 5.0"),
    ],
)
def test_presets_say_what_they_need(options: dict, words: str) -> None:
    """A missing or impossible constant is named."""
    with pytest.raises(ConfigError, match=words):
        build("fedprox", net_task(), Local(), options)


def test_derived_steps_leave_no_rate_to_set() -> None:
    """A preset that derives η has no local_lr that would be ignored."""
    method = build("fedprox", net_task(), Local(), THEORY)
    assert "local_lr" not in method.hyper
    assert "server_lr" not in method.hyper


# ---- the rules for λ -----------------------------------------------------------------------------

RULES = ["v1", "v2", "shrinkage"]
CONVEX = {"smoothness": 4.0, "strong_convexity": 1.0}
SAMPLES = [2, 3, 7]


def ruled(rule: str, hyper: dict, preset: str = "paper_synthetic", **settings: Any) -> Simulation:
    """Run FedProx on three quadratics with unequal numbers of samples."""
    options = {"preset": preset, "lambda_rule": rule, **CONVEX}
    local = Local(steps=3, batch=None)
    return q3("fedprox", local, options=options, hyper=hyper, rounds=4, samples=SAMPLES, **settings)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_a_rule_is_its_pull_given_by_hand(rule: str, spread: float) -> None:
    """One R gives one λ, from n = N/m; below and above R = 1/√n, and every preset follows it."""
    lam = {
        "v1": coupling.v1(spread, 4, 3.0),
        "v2": coupling.v2(spread, 4, 12, 4.0, 1.0, 3.0),
        "shrinkage": coupling.shrinkage(spread, 4, 3, 1.0, 3.0),
    }[rule]
    for preset in ("paper_synthetic", "corollary1"):
        sim = ruled(rule, {"heterogeneity": spread, "noise": 3.0}, preset)
        given = ruled("given", {"prox_strength": float(lam)}, preset)
        np.testing.assert_array_equal(personal(sim), personal(given))
        assert centre(sim) == centre(given)


@pytest.mark.parametrize("rule", RULES)
def test_an_own_heterogeneity_gives_an_own_pull(rule: str) -> None:
    """R_i (or ρ_i) gives λ_i, with the client's own n_i."""
    n = torch.tensor(SAMPLES, dtype=torch.float64)
    for spread, noise in (([0.9, 1.0, 3.0], 2.0), (1.5, [1.0, 2.0, 3.0])):
        r, rho = (torch.as_tensor(v, dtype=torch.float64) for v in (spread, noise))
        lam = {
            "v1": coupling.v1(r, n, rho),
            "v2": coupling.v2(r, n, 12, 4.0, 1.0, rho),
            "shrinkage": coupling.shrinkage(r, n, 3, 1.0, rho),
        }[rule]
        assert len(set(lam.tolist())) == 3
        sim = ruled(rule, {"heterogeneity": spread, "noise": noise})
        given = ruled("given", {"prox_strength": lam.tolist()})
        np.testing.assert_array_equal(personal(sim), personal(given))
        assert centre(sim) == centre(given)


def test_a_row_with_one_heterogeneity_keeps_it_beside_rows_with_many() -> None:
    """In a sweep, values per client in one row do not change what one number means in another."""
    fed, _ = quadratics(*Q3, samples=SAMPLES)
    task = quadratic_task()
    options = {"preset": "paper_synthetic", "lambda_rule": "v1", **CONVEX}
    method = build("fedprox", task, Local(steps=3, batch=None), options)
    rows = [{"heterogeneity": 1.5}, {"heterogeneity": [0.9, 1.0, 3.0]}]
    both = run(simulation(method, task, [fed] * 2, hyper=rows, rounds=4, participation="all"))
    for k, row in enumerate(rows):
        found = both.store.gather(both.context.everybody)["params"]["w"][k, :, 0].numpy()
        np.testing.assert_array_equal(found, personal(ruled("v1", row)))


def test_the_message_with_the_pull_is_sent_only_where_a_rule_makes_it() -> None:
    """A given λ costs nothing to send; a rule's costs one number (8 bytes) a client."""
    sent = {
        rule: ruled(rule, {}, "paper_real").ledger().bytes_down.tolist() for rule in ("given", "v1")
    }
    assert sent == {"given": [[3 * 8] * 4], "v1": [[3 * 16] * 4]}
    method = build("fedprox", net_task(), Local(), {"lambda_rule": "v1"})
    assert "prox_strength" not in method.hyper
    assert method.hyper["noise"].default == 2.0


def test_the_client_that_needs_most_steps_decides() -> None:
    """With λ_i, K is the largest of all clients', which need not be that of the largest λ_i."""
    lam = [0.5, 2.0, 100.0]
    need = [proximal.corollary1(v, 4.0, 1.0)["num_local_steps"] for v in lam]
    assert need[2] < max(need)
    sim = q3("fedprox", Local(batch=None), options=THEORY, hyper={"prox_strength": lam})
    assert sim.ledger().gradient_evaluations.tolist() == [[3 * max(need)]]


@pytest.mark.parametrize("preset", ["paper_real", "paper_synthetic", "corollary1"])
def test_the_largest_pull_sets_the_servers_step(preset: str) -> None:
    """With λ_i, γ is that of the largest one: no client's envelope is steeper."""
    lam = np.array([0.5, 2.0, 5.0])
    options = {"preset": preset, "smoothness": 4.0, "strong_convexity": 1.0}
    local, hyper = Local(steps=3, batch=None, lr=0.1), {"prox_strength": lam.tolist()}
    sim = q3("fedprox", local, options=options, hyper=hyper)
    steep = 5.0 * 4.0 / 9.0  # L_g of λ = 5
    gamma = {"paper_real": 1 / 5, "paper_synthetic": 1 / steep, "corollary1": 1 / (2 * steep)}
    assert centre(sim) == pytest.approx(gamma[preset] * (lam * personal(sim)).mean(), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lambda_rule": "v2"}, "needs smoothness=L > 0"),
        ({"lambda_rule": "v2", "smoothness": 4.0}, "0 < strong_convexity <= smoothness"),
        ({"lambda_rule": "shrinkage"}, "0 < strong_convexity"),
    ],
)
def test_rules_say_what_they_need(options: dict, words: str) -> None:
    """A missing constant is named; ``v1`` needs none."""
    build("fedprox", net_task(), Local(), {"lambda_rule": "v1"})
    with pytest.raises(ConfigError, match=words):
        build("fedprox", net_task(), Local(), options)
    with pytest.raises(ConfigError, match="heterogeneity must be > 0"):
        ruled("v1", {"heterogeneity": 0.0})


def test_the_centre_is_the_global_model() -> None:
    """What is scored as the global model is w_g."""
    sim = q3("fedprox", GD, hyper={"prox_strength": 2.0})
    assert sim.method.use.centre is not None
    assert sim.method.use.centre(sim.server, None) == sim.server["params"]
