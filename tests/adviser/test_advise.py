"""The adviser end to end, on federations whose truth is known, and on what it must refuse."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.adviser.trial import choose, held_out
from sartor.core.errors import ConfigError, FederationError
from sartor.data.synthetic import logistic


def synthetic(spread: float, **settings: Any) -> sartor.Federation:
    options = {"clients": 8, "samples": 200, "dim": 4, "test_samples": 200, **settings}
    return logistic(spread=spread, **options)[0]


@pytest.fixture(scope="module")
def alike() -> sartor.Advice:
    fed = synthetic(0.0, clients=12, dim=10, test_samples=50)
    return sartor.advise(fed, features="raw", basis="theory")


@pytest.fixture(scope="module")
def between() -> sartor.Advice:
    return sartor.advise(synthetic(0.4), features="raw", basis="theory")


@pytest.fixture(scope="module")
def apart() -> sartor.Advice:
    return sartor.advise(synthetic(20.0, samples=400), features="raw", basis="theory")


def test_the_strategy_follows_the_heterogeneity(
    alike: sartor.Advice, between: sartor.Advice, apart: sartor.Advice
) -> None:
    assert (alike.strategy, alike.prox_strength) == ("global", math.inf)
    assert between.strategy == "personalised"
    assert 0.0 < between.prox_strength < math.inf
    assert apart.strategy in ("local", "personalised")
    assert apart.prox_strength < between.prox_strength
    assert [advice.basis for advice in (alike, between, apart)] == ["theory"] * 3


def test_who_is_hurt_by_one_model(alike: sartor.Advice, apart: sartor.Advice) -> None:
    assert alike.hurt == []
    assert len(apart.hurt) == 8


def test_the_chosen_error_is_below_both_ends(between: sartor.Advice) -> None:
    chosen = between.error_at(between.prox_strength)
    assert chosen < min(between.errors[0], between.errors[-1])
    assert chosen == pytest.approx(min(between.errors), rel=1e-9)


def test_training_alone_costs_what_theory_says(between: sartor.Advice) -> None:
    """The excess loss of a well-specified fit is p/(2n)."""
    assert between.errors[0] == pytest.approx(4 / (2 * 200), rel=0.15)


def test_gain_and_table(between: sartor.Advice) -> None:
    assert all(client.gain == client.alone - client.advised for client in between.clients)
    table = between.table()
    assert len(table) == 8
    assert table.column("samples") == [200] * 8


def test_everything_is_strict_json(alike: sartor.Advice, between: sartor.Advice) -> None:
    for advice in (alike, between):
        text = json.dumps(advice.to_dict(), allow_nan=False)
        assert json.loads(text)["strategy"] == advice.strategy
    assert alike.to_dict()["prox_strength"] == "inf"


def test_rules_are_those_of_the_theory(between: sartor.Advice) -> None:
    from sartor.theory import coupling

    found, radius = between.constants, math.sqrt(between.constants["R2"])
    assert between.rules["v1 (ρ = 2)"] == pytest.approx(float(coupling.v1(radius, 200)))
    assert between.rules["shrinkage"] == pytest.approx(
        float(coupling.shrinkage(radius, 200, 8, found["mu"], found["rho"]))
    )


def test_verification_agrees() -> None:
    fed = synthetic(0.25, clients=12, dim=10, samples=150, test_samples=1500)
    checked = sartor.advise(fed, features="raw", basis="theory").verify()
    assert checked.judgement != "not confirmed"
    assert checked.measured_rounds is not None
    assert checked.measured_rounds <= (checked.predicted_rounds or 0) <= 2 * checked.measured_rounds
    json.dumps(checked.to_dict(), allow_nan=False)


def test_long_plans_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sartor.adviser import verify

    advice = sartor.advise(synthetic(0.4), features="raw", accuracy=1e-9, draws=0, basis="theory")
    monkeypatch.setattr(verify, "WORK", 1.0)
    reached, costs, notes = verify._follow_plan(advice, advice.subject, None)
    assert (reached, costs) == (None, {})
    assert "not measured" in notes[0]


def test_a_budget_makes_the_pull_smaller(between: sartor.Advice) -> None:
    assert between.plan is not None
    rounds = between.plan.rounds // 6
    tight = sartor.advise(synthetic(0.4), features="raw", budget_rounds=rounds, basis="theory")
    assert tight.prox_strength < between.prox_strength
    assert "budget" in tight.doubts[0]
    per_round = between.plan.bytes_total / between.plan.rounds
    same = sartor.advise(
        synthetic(0.4), features="raw", budget_mb=per_round * rounds / 1e6, basis="theory"
    )
    assert same.prox_strength == tight.prox_strength


def test_advice_does_not_depend_on_the_order_of_clients() -> None:
    fed = synthetic(0.4)
    x, y = fed.x.numpy(), fed.y.numpy()
    owner, test = np.empty(len(x), dtype=int), np.zeros(len(x), dtype=bool)
    owner[fed.train.rows], owner[fed.test.rows] = fed.train.owner, fed.test.owner
    test[fed.test.rows] = True
    ways = []
    for label in (lambda i: i, lambda i: 7 - i):
        moved = sartor.Federation.from_arrays(x, y, client=label(owner), test=test)
        ways.append(sartor.advise(moved, features="raw", draws=4, basis="theory"))
    assert ways[0].prox_strength == pytest.approx(ways[1].prox_strength)
    assert ways[0].constants["R2"] == pytest.approx(ways[1].constants["R2"], rel=1e-4)
    assert ways[0].held_out == pytest.approx(ways[1].held_out, rel=1e-5)


# ---- trials --------------------------------------------------------------------------------------


def skewed(clients: int = 6, samples: int = 30, seed: int = 0) -> sartor.Federation:
    """Clients with two of three classes each: softmax fits do not exist."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), samples)
    y = (owner + rng.integers(0, 2, len(owner))) % 3
    x = rng.normal(size=(len(owner), 5)) + 1.5 * np.eye(3, 5)[y]
    return sartor.Federation.from_arrays(x.astype("float32"), y, client=owner, test=0.3)


@pytest.fixture(scope="module")
def trial() -> sartor.Advice:
    return sartor.advise(skewed(), rounds=4, basis="trial")


def test_a_trial_trains_every_pull(trial: sartor.Advice) -> None:
    assert trial.basis == "trial"
    assert trial.pulls[0] == 0.0
    assert trial.pulls[-1] == math.inf
    assert trial.error_at(trial.prox_strength) <= min(trial.errors[0], trial.errors[-1])


def test_a_trial_is_the_sweep_it_says(trial: sartor.Advice) -> None:
    """One λ of the pass equals a run of its own."""
    about, position = trial.subject, 3
    total = count = 0.0
    for fold, held in enumerate(held_out(about.federation)):
        alone = sartor.fit(
            "fedprox",
            held,
            model=about.model,
            local=about.local,
            rounds=4,
            seeds=fold,
            hyper={"prox_strength": trial.pulls[position]},
        )
        scores = alone.scores[(alone.headline, "val")]
        total, count = total + scores.loss[0, -1].sum(), count + scores.count[0].sum()
    assert trial.errors[position] == pytest.approx(total / count, rel=1e-4)


def test_a_network_is_judged_by_training() -> None:
    fed = skewed()
    advice = sartor.advise(fed, model=sartor.models.dnn(fed), rounds=3)
    assert advice.basis == "trial"
    assert not any("theory" in doubt for doubt in advice.doubts)
    checked = advice.verify()
    names = {"advised", "local", "global", "fine-tuned", "best λ tried"}
    assert {row.strategy for row in checked.rows} == names
    assert checked.predicted_rounds is None


def test_every_sample_is_held_out_once() -> None:
    fed = skewed()
    folds = held_out(fed)
    for client in range(6):
        whole = fed.train.of(client).sort().values
        held = torch.cat([fold.val.of(client) for fold in folds]).sort().values
        assert torch.equal(held, whole)
        for fold in folds:
            both = torch.cat((fold.train.of(client), fold.val.of(client))).sort().values
            assert torch.equal(both, whole)
    assert held_out(folds[0]) == [folds[0]]


def test_a_pull_is_chosen_only_beyond_the_noise() -> None:
    share = np.full(4, 0.25)
    sure = np.array([[1.0, 1.0, 1.0, 1.0], [0.5, 0.6, 0.5, 0.6], [1.1, 1.1, 1.1, 1.1]])
    assert choose(sure, share)[0] == 1
    chance = np.array([[1.0, 1.0, 1.0, 1.0], [0.2, 1.3, 1.2, 1.2], [1.1, 1.1, 1.1, 1.1]])
    best, margin, noise = choose(chance, share)
    assert (best, margin) == (0, 0.0)
    assert noise > 0.025
    lost = np.array([[1.0, 1.0, 1.0, 1.0], [np.nan] * 4, [0.9, 0.9, 0.9, 0.9]])
    assert choose(lost, share)[0] == 2


# ---- refusals ------------------------------------------------------------------------------------


def test_one_client_is_reported_to_train_alone() -> None:
    fed = sartor.Federation.from_arrays(np.eye(8), np.arange(8) % 2, client=np.zeros(8, int))
    with pytest.raises(FederationError, match=r"two clients.*train alone"):
        sartor.advise(fed)


def test_two_clients_are_advised_with_caution() -> None:
    advice = sartor.advise(synthetic(0.4, clients=2), features="raw", basis="theory")
    assert any("two clients" in doubt for doubt in advice.doubts)


def test_theory_that_does_not_hold_can_be_refused() -> None:
    with pytest.raises(FederationError, match=r"(?s)does not hold.*Way out"):
        sartor.advise(skewed(), basis="theory")


def test_a_class_that_a_client_lacks_makes_its_loss_flat() -> None:
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(4), 200)
    y = rng.integers(0, 3, 800)
    y[(owner == 0) & (y == 2)] = 1
    x = rng.normal(size=(800, 2)) + 0.3 * y[:, None]
    fed = sartor.Federation.from_arrays(x, y, client=owner)
    with pytest.raises(FederationError, match=r"1 of 4 clients \(0 has a loss that is flat"):
        sartor.advise(fed, basis="theory")


def test_constant_features_are_refused() -> None:
    fed = sartor.Federation.from_arrays(
        np.ones((40, 3)), np.arange(40) % 2, client=np.arange(40) % 4
    )
    with pytest.raises(FederationError, match="No feature varies"):
        sartor.advise(fed)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budget_mb": -1.0}, "budget_mb must be positive"),
        ({"budget_rounds": 0}, "budget_rounds must be positive"),
        ({"ridge": -0.1}, "ridge must be >= 0"),
        ({"features": "pca:0"}, "whole K from 1"),
        ({"features": "fourier"}, "'raw', 'scaled' or 'pca:K'"),
        ({"basis": "guess"}, "basis must be"),
        ({"draws": 1}, "draws must be"),
    ],
)
def test_values_that_cannot_be_right(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sartor.advise(synthetic(0.1), **wrong)


def test_theory_and_a_network_do_not_go_together() -> None:
    fed = skewed()
    with pytest.raises(ConfigError, match="convex"):
        sartor.advise(fed, model=sartor.models.dnn(fed), basis="theory")


def test_too_many_parameters_are_refused_with_a_way_out() -> None:
    rng = np.random.default_rng(0)
    fed = sartor.Federation.from_arrays(
        rng.normal(size=(40, 1500)), np.arange(40) % 2, client=np.arange(40) % 4
    )
    with pytest.raises(ConfigError, match="pca:"):
        sartor.advise(fed, basis="theory")


def test_regression_is_advised_too() -> None:
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(6), 60)
    w = rng.normal(size=(6, 3))
    x = rng.normal(size=(360, 3))
    y = (x * w[owner]).sum(1) + 0.5 * rng.normal(size=360)
    fed = sartor.Federation.from_arrays(x, y, client=owner, num_classes=0)
    advice = sartor.advise(fed, features="raw", basis="theory")
    assert advice.strategy in ("local", "personalised")
    assert len(advice.hurt) >= 5
    assert advice.verify().holds
