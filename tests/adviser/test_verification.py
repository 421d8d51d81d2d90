"""How far the verification trusts a difference: clients are the units, samples stand beside."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import sartor
from sartor.adviser import verify
from sartor.adviser.trial import choose, clustered_error
from sartor.adviser.verification import Row, Verification
from sartor.adviser.verify import Trained, judge, owners
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
    return sartor.advise(fed, features="raw", draws=0)


@pytest.fixture(scope="module")
def checked(advice: sartor.Advice) -> Verification:
    return advice.verify()


def test_rows_have_both_errors(
    advice: sartor.Advice, checked: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that counts comes from the clients' mean differences; both are written down."""
    monkeypatch.setattr(verify, "WORK", 1.0)  # the exact solutions
    about, local = advice.subject, advice.verify().rows[1]
    solved = verify._solved(advice, about)
    gaps = [judge(solved[name].network, about.federation)[0] for name in ("local", advice.strategy)]
    gap, owner = gaps[0] - gaps[1], owners(about.federation)
    own = np.bincount(owner, gap) / np.bincount(owner)
    assert local.standard_error == pytest.approx(own.std(ddof=1) / math.sqrt(8), rel=1e-6)
    assert local.sample_error == pytest.approx(gap.std(ddof=1) / 20.0, rel=1e-6)
    assert abs(local.standard_error / local.sample_error - 1.0) > 0.05
    assert (checked.rows[0].standard_error, checked.rows[0].sample_error) == (0.0, 0.0)
    local = checked.rows[1]
    text = json.loads(json.dumps(checked.to_dict(), allow_nan=False))
    assert text["rows"][1]["sample_error"] == pytest.approx(local.sample_error)
    assert Verification.from_dict(text) == checked
    assert checked.table().columns[4:7] == ["above advised", "± clients", "± samples"]
    assert "over clients" in checked.summary()


def test_owners_are_in_the_order_of_the_losses() -> None:
    """Test samples listed in any order: the losses stand client by client."""
    draw = np.random.default_rng(1)
    owner = draw.integers(0, 3, 60)
    x = draw.normal(size=(60, 2)).astype("float32")
    y = np.arange(60) % 2
    fed = sartor.Federation.from_arrays(x, y, client=owner, test=0.4)
    listed = np.concatenate([np.full(len(fed.test.of(c)), c) for c in range(3)])
    assert np.array_equal(owners(fed), listed)


def test_a_row_of_an_earlier_file_has_no_second_error() -> None:
    row = Row("advised", "fedprox", 0.1, 0.5, 0.8, 0.0, 0.0, 6, 0.1, 50)
    assert math.isnan(row.sample_error)


@pytest.mark.parametrize(
    ("clients", "samples", "holds"),
    [
        # Above the better end by 0.1 ± 0.34 over clients and ± 0.045 over samples.
        ([1.0] * 4 + [-0.8] * 4, 0.0, True),
        # By 0.1 ± 0 over clients and ± 0.15 over samples.
        ([0.1] * 8, 3.0, False),
    ],
)
def test_holds_is_judged_with_clients_as_units(
    advice: sartor.Advice,
    monkeypatch: pytest.MonkeyPatch,
    clients: list[float],
    samples: float,
    holds: bool,
) -> None:
    """Where the two errors disagree, that over clients decides."""
    federation = advice.subject.federation
    owner = owners(federation)
    assert len(owner) == 400
    losses = {"local": np.ones(400), "global": np.full(400, 9.0)}
    turns = samples * (-1.0) ** np.arange(400)
    losses["personalised"] = 1.0 + np.array(clients)[owner] + turns
    monkeypatch.setattr(verify, "judge", lambda name, fed: (losses[name], losses[name] > 0))
    trained = {name: Trained(name, 1, 0.0, 0) for name in losses}
    found = verify.compare(advice, advice.subject, trained, None, [])
    assert found.rows[1].worse == pytest.approx(-0.1)
    by_samples = found.rows[1].sample_error >= 0.1
    assert found.holds == holds != by_samples


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
    drawn = sartor.advise(fed, features="raw")
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
