"""FedAvg: rules of averaging, fixed points, the AM trick, traffic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Hub
from sartor.methods import build
from tests.toys import (
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

GD = Local(steps=5, batch=None, lr=0.1)
SIZES = (10, 20, 30)


def _weights(
    cohort: list[int], rule: str, sizes: tuple[int, ...] = SIZES, rate: float = 1.0, **options
) -> np.ndarray:
    """Return the weights with which a rule takes the uploads of a cohort, from zero."""
    task = quadratic_task(3)
    method = build("fedavg", task, Local(), {"rule": rule, **options})
    name = "relax" if rule in ("normalized", "uniform") else "server_lr"
    lr, rate_ = torch.tensor(0.1, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64)
    hub = Hub(
        hyper={"local_lr": lr, name: rate_},
        key=None,
        round=torch.tensor(0),
        sizes=torch.tensor(sizes),
        cohort=torch.tensor(cohort),
        present=torch.ones(len(cohort), dtype=torch.bool),
    )
    uploads = {"params": {"w": torch.eye(3, dtype=torch.float64)[cohort]}}
    server = {"params": {"w": torch.zeros(3, dtype=torch.float64)}}
    return method.aggregate(server, uploads, hub)["params"]["w"].numpy()


def test_rules_weigh_the_cohort_as_the_sheet_says() -> None:
    """For n = (10, 20, 30) and {2, 3}: normalized (0.4, 0.6); chen (0.5, 0.75), sum 1.25."""
    np.testing.assert_allclose(_weights([1, 2], "normalized"), [0, 0.4, 0.6])
    np.testing.assert_allclose(_weights([1, 2], "chen"), [0, 0.5, 0.75])
    np.testing.assert_allclose(_weights([1, 2], "uniform"), [0, 0.5, 0.5])
    np.testing.assert_allclose(_weights([1, 2], "p_weighted"), [0, 0.5, 0.5])
    p = (0.2, 0.5, 0.3)
    np.testing.assert_allclose(
        _weights([1, 2], "p_weighted", rate=0.8, client_weights=p), [0, 0.6, 0.36]
    )


def test_chen_is_unbiased_over_cohorts_and_normalized_is_not() -> None:
    """Averaged over the three pairs, chen weighs with n_i/N."""
    pairs = list(itertools.combinations(range(3), 2))
    mean = {
        r: np.mean([_weights(list(c), r) for c in pairs], axis=0) for r in ("chen", "normalized")
    }
    np.testing.assert_allclose(mean["chen"], np.array(SIZES) / 60)
    assert np.abs(mean["normalized"] - np.array(SIZES) / 60).max() > 0.01


def test_rules_agree_where_they_must() -> None:
    """With everybody, normalized = chen = p_weighted by n_i/N; with equal n_i all agree."""
    everybody = [0, 1, 2]
    np.testing.assert_allclose(_weights(everybody, "normalized"), _weights(everybody, "chen"))
    shares = tuple(n / 60 for n in SIZES)
    np.testing.assert_allclose(
        _weights([0, 2], "p_weighted", client_weights=shares), _weights([0, 2], "chen")
    )
    for rule in ("normalized", "uniform", "chen", "p_weighted"):
        np.testing.assert_allclose(_weights(everybody, rule, sizes=(7, 7, 7)), [1 / 3] * 3)


def test_full_participation_of_chen_is_over_relaxation() -> None:
    """With S = m, the server step η_t of chen is AM with β = η_t."""
    for rate in (0.5, 2.0):
        np.testing.assert_allclose(
            _weights([0, 1, 2], "chen", rate=rate), _weights([0, 1, 2], "normalized", rate=rate)
        )


def test_one_client_is_plain_sgd() -> None:
    """Alone, rounds are invisible without momentum."""
    one = q3("fedavg", GD, rounds=4, curvatures=[2.0], centres=[3.0])
    alone = q3("local", GD, rounds=4, curvatures=[2.0], centres=[3.0])
    assert centre(one) == personal(alone)[0]
    task = net_task()
    local = Local(epochs=2, batch=3, lr=0.2)
    fed = [federation(sizes=(11,))]
    a = outcome(run(simulation(build("fedavg", task, local, {}), task, fed)))
    b = outcome(run(simulation(build("local", task, local, {}), task, fed)))
    np.testing.assert_array_equal(a["server/params/fc.weight"], b["client/params/fc.weight"][:, 0])


@pytest.mark.parametrize(("rule", "name"), [("normalized", "relax"), ("chen", "server_lr")])
def test_one_full_gradient_step_is_gradient_descent_on_the_whole(rule: str, name: str) -> None:
    """With K = 1 and everybody: w ← w − η_l η_t Σ p_i ∇L_i(w), p_i = n_i/N."""
    found = q3(
        "fedavg",
        Local(steps=1, batch=None, lr=0.1),
        options={"rule": rule},
        hyper={name: 0.7},
        samples=[1, 2, 3],
        rounds=3,
    )
    w = 0.0
    for _ in range(3):
        slope = sum(
            p / 6 * a * (w - c) for p, a, c in zip((1, 2, 3), (1, 2, 4), (0, 3, 6), strict=True)
        )
        w -= 0.1 * 0.7 * slope
    assert centre(found) == pytest.approx(w, abs=1e-12)


def test_equal_data_is_one_client() -> None:
    """Clients with one and the same objective train the model that one of them would."""
    many = q3("fedavg", GD, curvatures=[2.0] * 4, centres=[3.0] * 4, rounds=3)
    one = q3("fedavg", GD, curvatures=[2.0], centres=[3.0], rounds=3)
    assert centre(many) == pytest.approx(centre(one), abs=1e-14)


@pytest.mark.parametrize(("steps", "wanted"), [(1, 30 / 7), (5, 3.767533), (160, 3.0)])
def test_the_fixed_point_moves_with_the_local_work(steps: int, wanted: float) -> None:
    """K local steps end at Σ q_i c_i/Σ q_i, q_i = 1 − (1 − η a_i)^K: 30/7 for 1, 3 for many."""
    local = Local(steps=steps, batch=None, lr=0.1)
    assert centre(q3("fedavg", local, rounds={1: 120, 5: 30, 160: 4}[steps])) == pytest.approx(
        wanted, abs=5e-7
    )


@pytest.mark.parametrize(
    ("options", "hyper", "wanted"),
    [
        ({}, {}, 2.5168),
        ({}, {"relax": 2.0}, 5.0336),
        ({"rule": "uniform"}, {"relax": 2.0}, 5.0336),
        ({"rule": "chen"}, {"server_lr": 0.8}, 2.01344),
        ({"rule": "p_weighted"}, {"server_lr": 0.8}, 2.01344),
    ],
)
def test_one_round_from_zero_has_the_sheets_numbers(options, hyper, wanted: float) -> None:
    """Q3, K = 5, η_l = 0.1: β = 1, β = 2 and η_t = 0.8."""
    assert centre(q3("fedavg", GD, options=options, hyper=hyper)) == pytest.approx(
        wanted, abs=1e-10
    )


def test_over_relaxation_is_stable_up_to_its_bound() -> None:
    """The round map has slope ρ = 0.331977, so AM contracts by |1 − β(1 − ρ)|: β < 2.9939."""
    reach = [1 - 0.9**5, 1 - 0.8**5, 1 - 0.6**5]
    fixed = (3 * reach[1] + 6 * reach[2]) / sum(reach)
    for beta in (1.0, 2.0, 2.98, 3.01):
        far = [centre(q3("fedavg", GD, hyper={"relax": beta}, rounds=t)) - fixed for t in (1, 2)]
        assert far[1] / far[0] == pytest.approx(1 - beta * (1 - 0.331977), abs=1e-5)
    bound = 2 / (1 - 0.331977)
    assert bound == pytest.approx(2.9939, abs=1e-4)
    after = {
        b: abs(centre(q3("fedavg", GD, hyper={"relax": b}, rounds=80)) - fixed) for b in (2.9, 3.1)
    }
    assert after[2.9] < 0.1 < 100 < after[3.1]


def test_traffic_is_twice_the_cohorts_models() -> None:
    """Every round costs 2·S·|θ| and S participants."""
    task = net_task()
    local = Local(epochs=1, batch=4)
    ledger = run(
        simulation(build("fedavg", task, local, {}), task, [federation()], participation=3)
    ).ledger()
    size = 8 * sum(p.numel() for p in task.module.parameters())
    assert (ledger.bytes_up + ledger.bytes_down == 2 * 3 * size).all()
    assert (ledger.participants == 3).all()


def test_the_model_is_the_same_for_everybody() -> None:
    """One model serves all clients, and it is the server's."""
    sim = q3("fedavg", GD)
    assert {float(sim.params(i)["w"][0]) for i in range(3)} == {centre(sim)}


def test_weights_that_do_nothing_or_do_not_fit_are_refused() -> None:
    """The message names the rule, or both numbers."""
    task = net_task()
    with pytest.raises(ConfigError, match="no effect with rule='uniform'"):
        build("fedavg", task, Local(), {"rule": "uniform", "client_weights": (0.5, 0.5)})
    method = build("fedavg", task, Local(), {"rule": "p_weighted", "client_weights": (0.5, 0.5)})
    with pytest.raises(ConfigError, match="2 values, but there are 5 clients"):
        run(simulation(method, task, [federation()]))
