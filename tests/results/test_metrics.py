from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sartor.results import metrics

SHEET = [0.95, 0.9, 0.85, 0.8, 0.5]
accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_micro_weights_by_samples_and_macro_by_clients():
    """The worked example of the sheet: 0.9 of 100 and 0.5 of 10 samples."""
    assert metrics.micro([90, 5], [100, 10]) == pytest.approx(0.8636, abs=5e-5)
    assert metrics.macro([0.9, 0.5]) == pytest.approx(0.7)


@given(accuracies)
def test_micro_equals_macro_when_all_clients_have_equal_size(accuracy):
    """With equal m_i the pooled and the plain mean are one number."""
    correct = 40 * np.asarray(accuracy)
    assert metrics.micro(correct, np.full(len(accuracy), 40)) == pytest.approx(
        metrics.macro(accuracy)
    )


def test_a_client_without_test_samples_changes_no_average():
    """Nobody's accuracy is 0 because it could not be measured."""
    assert metrics.micro([9, 0], [10, 0]) == pytest.approx(0.9)
    assert metrics.macro(metrics.client_accuracy([9, 0], [10, 0])) == pytest.approx(0.9)
    assert math.isnan(metrics.micro([0, 0], [0, 0]))


def test_micro_works_over_leading_axes():
    """A whole curve at once equals its entries one by one."""
    correct = np.arange(12).reshape(2, 2, 3)
    count = np.array([[10, 20, 30], [30, 20, 10]])[:, None]
    whole = metrics.micro(correct, count)
    assert whole.shape == (2, 2)
    assert whole[1, 0] == metrics.micro(correct[1, 0], count[1, 0])


def test_the_numbers_of_the_sheet_on_fairness():
    """Section 6: a = (0.95, 0.9, 0.85, 0.8, 0.5)."""
    assert metrics.macro(SHEET) == pytest.approx(0.8)
    assert math.sqrt(metrics.variance_over_clients(SHEET)) == pytest.approx(0.158114, abs=1e-6)
    assert metrics.worst_share(SHEET, 20) == pytest.approx(0.5)
    assert metrics.jain_index(SHEET) == pytest.approx(0.962406, abs=1e-6)


@pytest.mark.parametrize(("percent", "number"), [(1, 1), (20, 1), (21, 2), (40, 2), (100, 5)])
def test_worst_share_takes_the_ceiling(percent, number):
    """The worst k% are ceil(kM/100) clients, at least one."""
    assert metrics.worst_share(SHEET, percent) == pytest.approx(np.mean(sorted(SHEET)[:number]))


@given(accuracies)
def test_jain_index_lies_between_one_over_m_and_one(accuracy):
    """The bounds of the sheet, for any accuracies, all zero included."""
    assert 1 / len(accuracy) - 1e-9 <= metrics.jain_index(accuracy) <= 1 + 1e-9


def test_small_clients_do_not_decide_the_worst_client_and_are_counted():
    """A client of 9 test samples is left out and said to be; one of 10 counts."""
    assert metrics.worst_client([0.9, 0.5, 0.1], [100, 10, 9]) == (0.5, 1, 1)
    assert metrics.worst_share([0.9, 0.5, 0.1], 1, [100, 10, 9]) == 0.5


def test_no_worst_client_is_made_up_when_all_are_too_small():
    """Without a single client above the floor the answer is NaN, with all of them counted."""
    worst = metrics.worst_client([0.9, 0.5], [3, 4])
    assert math.isnan(worst.value)
    assert worst.excluded == 2


def test_hurt_means_strictly_below_training_alone():
    """A client with equal accuracy is not hurt."""
    gain = metrics.gain([0.9, 0.8, 0.5], [0.8, 0.8, 0.6])
    assert (gain.hurt, gain.clients) == (1, 3)
    assert gain.fraction_hurt == pytest.approx(1 / 3)
    assert gain.minimum == pytest.approx(-0.1)
    assert gain.mean == pytest.approx(0, abs=1e-12)


def test_gain_over_oneself_is_zero_and_hurts_nobody():
    """The baseline compared with itself."""
    assert metrics.gain(SHEET, SHEET) == (0, 0, 0, 0, 5)


def test_last10_is_the_mean_of_the_last_ten_or_of_all_there_are():
    """Short runs are not padded."""
    curve = np.arange(20) / 20
    assert metrics.last(curve, 10) == pytest.approx(curve[10:].mean())
    assert metrics.last(curve[:3], 10) == pytest.approx(curve[:3].mean())
    assert metrics.last(curve) == curve[-1]


def test_best_on_validation_never_exceeds_best_on_test():
    """Choosing the round on other data cannot beat choosing it on the test data."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        test, validation = rng.random((2, 8))
        assert metrics.best_val(test, validation) <= metrics.best_test(test)
        assert metrics.best_val(test, test) == metrics.best_test(test)


def test_a_single_lucky_round_does_not_reach_the_target():
    """Three consecutive evaluations must reach it in the mean; never is None."""
    lucky = [0.1, 0.99, 0.1, 0.1, 0.1]
    assert metrics.rounds_to_target(range(5), lucky, 0.9) is None
    steady = [0.1, 0.5, 0.9, 0.9, 0.9, 0.9]
    assert metrics.rounds_to_target(range(0, 60, 10), steady, 0.9) == 40
    assert metrics.rounds_to_target(range(2), [1.0, 1.0], 0.5) is None
    assert metrics.rounds_to_target(range(4), [0.2, math.nan, 0.9, 0.9], 0.5) is None


def test_spread_is_the_sample_standard_deviation():
    """Section 5: ddof = 1, checked on the eight tasks' formula with known values."""
    values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    assert metrics.spread(values).std == pytest.approx(math.sqrt(32 / 7))
    assert math.isnan(metrics.spread([0.9]).std)


def test_a_diverged_repeat_stays_out_of_the_mean_but_is_listed():
    """NaN is a value to report and not one to average."""
    found = metrics.spread([0.8, math.nan, 0.6])
    assert found.mean == pytest.approx(0.7)
    assert len(found.values) == 3


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1000, 1.9623)],
)
def test_t_quantile_agrees_with_the_printed_table(degrees, expected):
    """The 97.5% column of any table of Student's t."""
    assert metrics.t_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-5)


def test_an_interval_of_pairs_has_one_degree_less_than_pairs():
    """Three differences 1, 2, 3 have deviation 1, and t at 2 degrees is 4.3027."""
    found = metrics.paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.mean, found.std) == (2.0, 1.0)
    wanted = 4.302653 / np.sqrt(3)
    assert found[3] - found.mean == pytest.approx(wanted, rel=1e-6)
    assert found.mean - found[2] == pytest.approx(wanted, rel=1e-6)


def test_t_quantile_agrees_with_scipy_everywhere():
    """An independent implementation, over probabilities and degrees of freedom."""
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 7, 19, 99, 5000):
        for probability in (0.005, 0.1, 0.5, 0.6, 0.95, 0.999):
            expected = stats.t.ppf(probability, degrees)
            found = metrics.t_quantile(probability, degrees)
            assert found == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_paired_interval_is_blind_to_what_the_pairs_share():
    """Adding the same difficulty to both members of a pair changes nothing."""
    rng = np.random.default_rng(1)
    first, second, shared = rng.random((3, 6))
    assert metrics.paired(first + shared, second + shared) == pytest.approx(
        metrics.paired(first, second)
    )


def test_paired_interval_covers_the_truth_about_as_often_as_it_says():
    """95% intervals of five normal pairs, 2,000 times: coverage within 2 points."""
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(2000):
        found = metrics.paired(rng.normal(0.3, 1, 5), np.zeros(5))
        hits += found.low <= 0.3 <= found.high
    assert abs(hits / 2000 - 0.95) < 0.02


def test_one_pair_has_a_difference_and_no_interval():
    """Nothing is known about the spread of a single pair."""
    found = metrics.paired([0.9], [0.8])
    assert found.mean == pytest.approx(0.1)
    assert math.isnan(found.low)
    assert metrics.paired([math.nan], [0.8]).number == 0


def test_balanced_accuracy_leaves_out_classes_that_a_client_lacks():
    """The mean recall over the classes it has."""
    assert metrics.balanced_accuracy([5, 0, 4], [10, 0, 4]) == pytest.approx(0.75)
