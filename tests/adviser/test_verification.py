"""The advice beside its rivals: how divisions are drawn, and what their intervals may say."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.adviser.trial import choose, clustered_error
from sartor.adviser.verification import Row, Verification
from sartor.adviser.verify import DIVISIONS, half_width, judge, redivide
from sartor.core.errors import ConfigError
from sartor.data.synthetic import logistic


def test_clustered_error_by_hand() -> None:
    """Differences 1, 2, 6 with shares ½, ¼, ¼: √(3/2 (0.75² + 0.125² + 0.875²)), mean 2.5."""
    found = clustered_error(np.array([1.0, 2.0, 6.0]), np.array([0.5, 0.25, 0.25]))
    assert found == pytest.approx(math.sqrt(1.5 * (0.75**2 + 0.125**2 + 0.875**2)))
    equal = np.array([0.3, -0.1, 0.4, 0.9])
    usual = equal.std(ddof=1) / 2.0
    assert clustered_error(equal, np.full(4, 0.25)) == pytest.approx(usual)
    empty = clustered_error(np.append(equal, 77.0), np.append(np.full(4, 0.25), 0.0))
    assert empty == pytest.approx(usual)


def test_clustered_error_is_that_of_federations_drawn_anew() -> None:
    """Clients that differ, with 5 to 40 samples each: 4000 federations."""
    draw = np.random.default_rng(0)
    means, errors, naive = [], [], []
    for _ in range(4000):
        sizes = draw.integers(5, 41, 25)
        owner = np.repeat(np.arange(25), sizes)
        gap = draw.normal(size=25)[owner] + draw.normal(size=len(owner))
        own = np.bincount(owner, gap) / sizes
        means.append(gap.mean())
        errors.append(clustered_error(own, sizes / sizes.sum()) ** 2)
        naive.append(gap.var(ddof=1) / len(gap))
    assert np.mean(errors) / np.var(means) == pytest.approx(1.0, abs=0.1)
    assert np.mean(naive) / np.var(means) < 0.15


@pytest.fixture(scope="module")
def advice() -> sartor.Advice:
    fed, _ = logistic(spread=0.4, clients=8, samples=200, dim=4, test_samples=50)
    return sartor.advise(fed, features="raw", draws=0, basis="theory")


@pytest.fixture(scope="module")
def checked(advice: sartor.Advice) -> Verification:
    return advice.verify()


def row(strategy: str, worse: float, half: float, loss: float = 0.5) -> Row:
    return Row(strategy, "fedprox", 0.1, loss, 0.8, worse, half)


@pytest.mark.parametrize(
    ("local", "one", "tuned", "said"),
    [
        ((0.1, 0.05), (0.2, 0.1), (0.0, 0.1), "confirmed"),
        ((0.1, 0.05), (0.0, 0.004), (0.0, 0.1), "confirmed"),  # an end at most 1 % better
        ((0.1, 0.05), (0.0, 0.006), (0.0, 0.1), "cannot tell"),
        ((-0.1, 0.05), (0.2, 0.1), (0.0, 0.1), "not confirmed"),
        ((0.1, 0.05), (0.2, 0.1), (-0.1, 0.05), "not confirmed"),  # a rival that is no end
        ((-0.1, 0.2), (0.2, 0.1), (0.0, 0.1), "cannot tell"),
    ],
)
def test_the_judgement_follows_the_intervals(
    local: tuple[float, float], one: tuple[float, float], tuned: tuple[float, float], said: str
) -> None:
    rows = [row("advised", 0.0, 0.0), row("local", *local), row("global", *one)]
    assert judge([*rows, row("fine-tuned", *tuned)]) == said


def test_an_interval_covers_the_truth_of_divisions_that_share_samples() -> None:
    """The mean difference of two constant predictors, over federations drawn anew."""
    draw = np.random.default_rng(0)
    covered = plain = 0
    for _ in range(400):
        gap = draw.normal(size=200) ** 2 - 1.0  # squared error of 0, less its mean
        picks = [draw.permutation(200)[:60] for _ in range(DIVISIONS)]
        means = np.array([gap[pick].mean() for pick in picks])
        covered += abs(means.mean()) <= half_width(means)
        plain += abs(means.mean()) <= 2.09 * means.std(ddof=1) / math.sqrt(DIVISIONS)
    assert covered / 400 > 0.9
    assert plain / 400 < 0.75


def test_a_division_belongs_to_a_client_and_holds_out_three_tenths() -> None:
    draw = np.random.default_rng(1)
    owner = np.repeat([0, 1, 2], [20, 1, 7])
    x = np.arange(28.0)[:, None] + draw.normal(size=(28, 1))
    fed = sartor.Federation.from_arrays(x, np.arange(28) % 2, client=owner, test=0.4)
    found = redivide(fed, 3)
    for one in found:
        assert one.test.sizes.tolist() == [6, 0, 2]
        for client in range(3):
            both = torch.cat((one.train.of(client), one.test.of(client)))
            assert sorted(both.tolist()) == np.flatnonzero(owner == client).tolist()
    assert not torch.equal(found[0].test.rows, found[1].test.rows)


def test_rows_are_paired_and_read_back(checked: Verification) -> None:
    names = ["advised", "local", "global", "fine-tuned", "best λ tried"]
    assert [one.strategy for one in checked.rows] == names
    assert checked.rows[0].worse == checked.rows[0].half == 0.0
    assert checked.divisions == DIVISIONS
    for one in checked.rows:
        assert one.loss == pytest.approx(checked.rows[0].loss + one.worse)
    assert checked.regret == max(0.0, -min(one.worse for one in checked.rows))
    text = json.loads(json.dumps(checked.to_dict(), allow_nan=False))
    assert Verification.from_dict(text).summary() == checked.summary()
    assert "Regret" in checked.summary()
    assert checked.table().columns[4:6] == ["above advised", "± 95 %"]


def test_solutions_on_a_division_are_those_of_scikit_learn(advice: sartor.Advice) -> None:
    """Alone and one model without a ridge: the losses of another program."""
    from sklearn.linear_model import LogisticRegression

    from sartor.adviser.verify import _models, _score

    seen = advice.subject.view
    (one,) = redivide(advice.subject.federation, 1)
    view = dataclasses.replace(seen, federation=one)
    train, test = view.clients("train"), view.clients("test")
    found = {name: _score(test, own) for name, own in _models(advice, train, []).items()}

    def theirs(x: Any, y: Any, at: int) -> float:
        model = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-10, max_iter=1000)
        held = test.mask[at]
        chance = model.fit(x, y).predict_proba(test.x[at][held].numpy())
        return float(-np.log(chance[range(len(chance)), test.y[at][held].long()]).sum())

    for i in range(8):
        x, y = train.x[i][train.mask[i]].numpy(), train.y[i][train.mask[i]].numpy()
        assert found["local"][0][i] == pytest.approx(theirs(x, y, i), rel=1e-5)
    x, y = train.x[train.mask].numpy(), train.y[train.mask].numpy()
    assert found["global"][0][3] == pytest.approx(theirs(x, y, 3), rel=1e-5)


def test_traffic_is_predicted_to_the_byte(advice: sartor.Advice, checked: Verification) -> None:
    """Models both ways and the number of local steps: what the run counted."""
    assert advice.plan is not None
    assert advice.strategy == "personalised"
    assert checked.rows[0].megabytes == pytest.approx(advice.plan.bytes_total / 1e6, rel=1e-9)


def test_a_gain_must_be_clear() -> None:
    """Four clients gain 1, 1, 1 and x: the mean must be above two standard errors."""
    share = np.full(4, 0.25)

    def position(last: float) -> int:
        gain = np.array([1.0, 1.0, 1.0, last])
        return choose(np.stack([np.full(4, 5.0), 5.0 - gain, np.full(4, 6.0)]), share)[0]

    assert position(0.5) == 1  # 0.875 ± 0.125
    assert position(-0.2) == 1  # 0.7 ± 0.3
    assert position(-0.5) == 0  # 0.625 ± 0.375: more than one error, less than two


def test_the_advice_states_its_own_traffic(advice: sartor.Advice) -> None:
    """Estimates: 4p + 7 numbers a client, p + 1 more with drawings, and the frame; 3 folds.

    The frame is p(p + 1)/2 numbers up and p² down: with p = 4, 10 and 16.
    """
    assert advice.asked["estimates"] == 4 * (4 * 4 + 7 + 26) * 8
    fed, _ = logistic(spread=0.4, clients=8, samples=200, dim=4, test_samples=50)
    drawn = sartor.advise(fed, features="raw", basis="theory")
    assert drawn.asked["estimates"] == 4 * (5 * 4 + 8 + 26) * 8
    plans = advice.subject.plans
    trained = plans["personalised"].bytes_total + plans["global"].bytes_total
    assert advice.asked["held-out check"] == 3 * (trained + 4 * 3 * 8)
    rows = {row[0]: row[1] for row in advice.costs().rows}
    assert rows["megabytes, once, for the held-out check"] == pytest.approx(
        advice.asked["held-out check"] / 1e6
    )
    again = sartor.Advice.from_dict(json.loads(json.dumps(advice.to_dict())))
    assert again.asked == advice.asked
    assert again.held_out == pytest.approx(advice.held_out)


def test_an_advice_from_a_file_cannot_be_verified(advice: sartor.Advice) -> None:
    """It has the numbers and not the data; the message says how to go about it."""
    again = sartor.Advice.from_dict(json.loads(json.dumps(advice.to_dict())))
    with pytest.raises(ConfigError, match=r"read from a file.*sartor\.advise"):
        again.verify()
