"""Advice from a learned prior: one answer for every seed and order, right where truth is known."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import sartor
from sartor.adviser.advice import Advice
from sartor.adviser.by_evidence import Gap, _reason, decide, more_samples
from sartor.adviser.features import view
from sartor.adviser.measured import against
from sartor.adviser.sharing import all_samples, judge, most_features, ranks, standardised
from sartor.core.errors import ConfigError, FederationError
from sartor.theory.learned_prior import averaged


def drawn(
    spread: float,
    *,
    clients: int = 8,
    samples: int = 40,
    dim: int = 3,
    seed: int = 0,
    regression: bool = False,
    **more: Any,
) -> sartor.Federation:
    """Clients whose models are ``spread`` apart from a common one of norm 1."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), samples)
    centre = draw.normal(size=dim)
    w = centre / np.linalg.norm(centre) + spread * draw.normal(size=(clients, dim))
    x = draw.normal(size=(len(owner), dim))
    score = (x * w[owner]).sum(1)
    if regression:
        y = 1000.0 * (score + draw.normal(size=len(owner))) + 5e4
        return sartor.Federation.from_arrays(x, y, client=owner, num_classes=0, **more)
    y = (draw.random(len(owner)) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(int)
    return sartor.Federation.from_arrays(x, y, client=owner, **more)


@pytest.mark.parametrize("regression", [False, True])
def test_the_ends_and_the_middle_are_found(regression: bool) -> None:
    """Equal models, models that differ by half their size, and models with nothing in common."""
    alike = drawn(0.0, regression=regression)
    assert sartor.advise(alike).verdict == "one model"
    between = sartor.advise(drawn(0.5, regression=regression, clients=12))
    assert between.verdict == "personalise"
    assert (between.method, between.settings["options"]) == ("evidence", {})
    apart = sartor.advise(drawn(20.0, regression=regression, samples=80))
    assert apart.verdict == "alone"
    assert apart.settings["options"] == {"sharing": "alone"}


def test_noise_alone_cannot_tell_or_gains_nothing() -> None:
    """Labels without any relation: nobody can gain, and nothing is claimed."""
    draw = np.random.default_rng(5)
    owner = np.repeat(np.arange(5), 30)
    fed = sartor.Federation.from_arrays(
        draw.normal(size=(150, 4)), draw.integers(0, 2, 150), client=owner
    )
    assert sartor.advise(fed).verdict in ("alone", "one model", "cannot tell")


def test_neither_seed_nor_division_nor_order_changes_the_answer() -> None:
    fed = drawn(0.4)
    first = sartor.advise(fed)
    draw = np.random.default_rng(0)
    owner = np.empty(len(fed.x), dtype=int)
    for split in (fed.train, fed.test):
        owner[split.rows] = split.owner
    names = np.array(["h", "g", "f", "e", "d", "c", "b", "a"])
    same = np.array([str(i) for i in range(8)])
    for seed in range(3):
        order = draw.permutation(len(owner))
        x, y = fed.x.numpy()[order], fed.y.numpy()[order]
        moved = sartor.Federation.from_arrays(x, y, client=same[owner[order]], seed=seed, test=0.4)
        again = sartor.advise(moved, seed=seed)
        assert again.verdict == first.verdict
        assert again.held_out == pytest.approx(first.held_out, rel=1e-6)
    # Names decide the folds, so a client that is called otherwise may move within its noise.
    named = sartor.Federation.from_arrays(fed.x.numpy(), fed.y.numpy(), client=names[owner])
    assert sartor.advise(named).verdict == first.verdict


def test_folds_do_not_depend_on_units() -> None:
    fed = all_samples(drawn(0.4))
    mask = torch.ones(8, 40, dtype=torch.bool)
    scaled = dataclasses.replace(fed, x=fed.x.double() * torch.tensor([3.0, 0.01, 100.0]) + 7.0)
    assert torch.equal(ranks(fed, mask, 0), ranks(scaled, mask, 0))
    assert not torch.equal(ranks(fed, mask, 0), ranks(fed, mask, 1))


def test_units_of_a_regression_scale_its_losses_alone() -> None:
    fed = drawn(0.5, regression=True)
    other = dataclasses.replace(fed, y=fed.y.double() / 1000.0)
    first, second = sartor.advise(fed), sartor.advise(other)
    assert first.verdict == second.verdict
    for key, value in first.held_out.items():
        assert value == pytest.approx(1e6 * second.held_out[key], rel=1e-4)


def test_held_out_losses_are_those_of_refits() -> None:
    """Alone, on a regression: ridges in NumPy without each fold, under the priors and weights."""
    fed = all_samples(drawn(0.5, regression=True, clients=3, samples=20))
    seen = view(fed)
    found = judge(seen)
    clients, _ = standardised(seen.clients())
    assert (found.folds, found.repeats) == (10, 3)
    assert seen.intercept
    wanted = np.zeros((3, 20))
    for repeat in range(3):
        place = (ranks(seen.federation, clients.mask, repeat) % 10).numpy()
        for fold in range(10):
            held = torch.from_numpy(place == fold)
            one = averaged(clients.where(~held), alone=True, start=found.found["alone"])
            for i in range(3):
                x, y, away = clients.x[i].numpy(), clients.y[i].numpy(), place[i] == fold
                w = np.zeros(4)
                for share, prior in zip(one.weights.tolist(), one.priors, strict=True):
                    pull = np.diag(float(prior.noise) / prior.spread.numpy())
                    left = x[~away]
                    w += share * np.linalg.solve(left.T @ left + pull, left.T @ y[~away])
                wanted[i, away] += (x[away] @ w - y[away]) ** 2 / 3.0
    np.testing.assert_allclose(found.losses[0], wanted, rtol=1e-6)
    value, error = found.difference("alone", "one")
    gap = (found.losses[0] - found.losses[1]).ravel()
    assert value == pytest.approx(gap.mean())
    assert error == pytest.approx(gap.std(ddof=1) / math.sqrt(60))


def test_few_samples_one_class_and_separable_clients_are_answered() -> None:
    draw = np.random.default_rng(2)
    owner = np.repeat([0, 1, 2, 3, 4], [60, 3, 1, 40, 30])
    x = draw.normal(size=(len(owner), 3))
    y = (x[:, 0] > 0).astype(int)  # separable
    y[owner == 3] = 1  # and of one class
    fed = sartor.Federation.from_arrays(x, y, client=owner, test=0)
    advice = sartor.advise(fed)
    assert advice.strategy == "personalised"
    assert math.isnan(advice.clients[2].gain)
    assert any("one sample" in note for note in advice.doubts)
    json.dumps(advice.to_dict(), allow_nan=False)


def test_gaps_need_both_judges() -> None:
    assert Gap(1.0, 0.4, 2.0).sure
    assert not Gap(1.0, 0.4, 0.5).sure  # the evidence does not lean this way
    assert not Gap(1.0, 0.6, 4.0).sure
    assert Gap(1.0, 0.6, 6.0).sure  # clear evidence, and one standard error
    assert not Gap(1.0, 1.1, 60.0).sure
    assert Gap(1.0, 0.5, 0.0).half == pytest.approx(0.98)


LOSS = {"alone": 1.0, "one": 1.0, "learned": 1.0}


@pytest.mark.parametrize(
    ("gain", "degree", "said"),
    [
        (Gap(0.1, 0.01, 9.0), Gap(0.1, 0.01, 9.0), ("personalised", "personalise")),
        (Gap(0.1, 0.01, 9.0), Gap(-0.1, 0.01, -9.0), ("global", "one model")),
        (Gap(0.1, 0.01, 9.0), Gap(0.01, 0.1, 0.5), ("global", "one model")),
        (Gap(-0.1, 0.01, -9.0), Gap(0.1, 0.01, 9.0), ("local", "alone")),
        (Gap(0.001, 0.002, 0.0), Gap(0.1, 0.01, 9.0), ("local", "alone")),  # 0.5 % at most
        (Gap(0.1, 0.2, 0.0), Gap(0.1, 0.01, 9.0), ("personalised", "cannot tell")),
        (Gap(-0.01, 0.2, 0.0), Gap(0.1, 0.01, 9.0), ("local", "cannot tell")),
    ],
)
def test_the_decision(gain: Gap, degree: Gap, said: tuple[str, str]) -> None:
    back = Gap(-gain.value, gain.error, -gain.nats)
    assert decide(LOSS, gain, back, degree) == said


def test_samples_that_would_be_needed() -> None:
    """An interval twice as wide as the gain needs four times the samples."""
    assert more_samples(Gap(0.98, 1.0, 0.0), 50.0) == pytest.approx(150.0)
    assert more_samples(Gap(3.0, 1.0, 0.0), 50.0) == 0.0
    assert more_samples(Gap(0.0, 1.0, 0.0), 50.0) == math.inf


def test_many_features_are_reduced_and_reported() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 600))
    fed = sartor.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(120) % 4)
    assert most_features(all_samples(fed)).startswith("pca:")
    assert most_features(all_samples(drawn(0.1))) == "scaled"


def test_more_than_it_can_look_at_is_refused_with_a_way_out() -> None:
    """Scores that were read as 70 classes, in many clients; and clients of one sample each."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(60), 80)
    x, y = draw.normal(size=(4800, 3)), np.arange(4800) % 70
    fed = sartor.Federation.from_arrays(x, y, client=owner)
    with pytest.raises(FederationError, match="task='regression'"):
        sartor.advise(fed)
    ones = sartor.Federation.from_arrays(x[:9], y[:9] % 2, client=np.arange(9), test=0)
    with pytest.raises(FederationError, match="single sample"):
        sartor.advise(ones)


def test_judges_that_disagree_are_reported() -> None:
    """No samples are asked for where the interval is clear and the evidence is not."""
    said = _reason("cannot tell", LOSS, Gap(0.1, 0.01, 0.0), Gap(0.1, 0.01, 9.0), 50.0)
    assert "evidence does not lean" in said
    assert "more samples" not in said
    said = _reason("cannot tell", LOSS, Gap(0.1, 0.1, 0.0), Gap(0.1, 0.01, 9.0), 50.0)
    assert "With some 142 more samples" in said


def test_a_ridge_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learns the ridge.*basis='theory'"):
        sartor.advise(drawn(0.1), ridge=0.1)


def test_the_advice_is_read_back_and_verified() -> None:
    advice = sartor.advise(drawn(0.5, clients=12))
    again = sartor.Advice.from_dict(json.loads(json.dumps(advice.to_dict(), allow_nan=False)))
    assert again.summary() == advice.summary()
    assert "held-out loss" in advice.summary()
    assert advice.table().columns[-2:] == ["outcome", "one model hurts"]
    checked = advice.verify()
    assert checked.judgement != "not confirmed"
    assert checked.rows[0].expected == advice.held_out["personalised"]


def test_two_clients_are_advised_with_caution() -> None:
    advice = sartor.advise(drawn(0.4, clients=2))
    assert any("two clients" in doubt for doubt in advice.doubts)


def test_the_theory_stands_beside_where_it_holds() -> None:
    advice = sartor.advise(drawn(0.4, samples=120))
    assert any("theory of Yu et al." in note for note in advice.doubts)
    short = sartor.advise(drawn(0.4, samples=10))
    assert not any("theory of Yu et al." in note for note in short.doubts)


@pytest.mark.parametrize(("spread", "classes"), [(0.0, 2), (0.5, 0), (0.5, 3), (20.0, 2)])
def test_costs_are_those_of_the_run(spread: float, classes: int) -> None:
    """Bytes and gradients of the plan, from a run of the advised method on the same samples."""
    fed = drawn(spread, samples=60, regression=not classes)
    if classes == 3:
        y = fed.y + (fed.x[:, 1] > 1.0)
        fed = dataclasses.replace(fed, y=y, num_classes=3)
    advice = sartor.advise(fed, budget_rounds=2)
    assert advice.plan is not None
    outputs = max(classes, 1)
    result = sartor.fit(
        advice.method,
        fed,
        model=torch.nn.Linear(3, outputs),
        rounds=2,
        options=advice.settings["options"],
    )
    sent = int(1e6 * float(result.megabytes) + 0.5)
    assert advice.plan.bytes_total == sent
    share = len(fed.x) / len(fed.train.rows)
    assert advice.plan.gradients == pytest.approx(result.gradient_evaluations * share)
    assert "budget allows 2 rounds" in advice.doubts[0]


def test_the_advice_in_a_measure_that_people_use() -> None:
    """The AUROC of samples left out is scikit-learn's, and its interval about DeLong's.

    Other orders of rows and clients give the same rows.
    """
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 3))
    client = np.array(list("abc"))[np.arange(600) % 3]
    y = (x[:, 0] + 0.5 * rng.normal(size=600) > 1.2).astype(int)
    fed = sartor.Federation.from_arrays(x, y, client=client)
    advice = sartor.advise(fed, measure="auroc")
    assert [row[0] for row in advice.measured["clients"]] == ["a", "b", "c", "all clients"]
    whole = all_samples(fed)
    found = judge(view(whole, "scaled", 0.0))
    for i, row in enumerate(advice.measured["clients"][:3]):
        own = found.mask[i]
        labels = found.clients.y[i].numpy()[own]
        areas = [roc_auc_score(labels, way[i, own, 0]) for way in found.scores]
        assert row[1:3] == pytest.approx(areas[:2])
        low, high = row[5:]
        assert low <= row[4] <= high
    order = rng.permutation(600)
    other = sartor.advise(
        sartor.Federation.from_arrays(x[order], y[order], client=client[order]), measure="auroc"
    )
    assert other.measured["clients"][0][1:] == pytest.approx(
        advice.measured["clients"][0][1:], abs=1e-6
    )
    again = Advice.from_dict(advice.to_dict())
    assert again.measured == advice.to_dict()["measured"]


def test_a_measure_speaks_against_the_advice() -> None:
    """If its interval lies below zero, a note says that losses and the measure disagree."""
    rows = [["all clients", 0.8, 0.7, 0.7, -0.1, -0.15, -0.05]]
    measured = {"measure": "AUROC", "sign": 1, "clients": rows}
    assert "by AUROC the advice is worse than training alone" in (against(measured) or "")
    rows[0][-1] = 0.01
    assert against(measured) is None
    with pytest.raises(ConfigError, match="judged by losses alone"):
        sartor.advise(federation_of_two(), basis="trial", measure="auroc")


def federation_of_two() -> sartor.Federation:
    """Two small clients."""
    x = np.random.default_rng(0).normal(size=(40, 2))
    return sartor.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(40) % 2)


@pytest.mark.parametrize("measure", ["mae", "r2", "rmse"])
def test_a_regression_is_measured_in_its_own_units(measure: str) -> None:
    """A target in other units changes errors by their factor, and R² not at all."""
    rng = np.random.default_rng(1)
    x, client = rng.normal(size=(200, 2)), np.arange(200) % 4
    y = x[:, 0] + 0.3 * rng.normal(size=200)
    found = []
    for factor in (1.0, 1000.0):
        fed = sartor.Federation.from_arrays(x, factor * y, client=client, task="regression")
        found.append(sartor.advise(fed, measure=measure).measured["clients"][-1][1])
    assert found[1] == pytest.approx(found[0] * (1 if measure == "r2" else 1000.0), rel=1e-5)
