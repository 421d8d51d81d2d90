from __future__ import annotations

import math

import numpy as np
import pytest

from sartor.analysis import entropy, fairness, gini, pareto_front, to_reach
from sartor.core.errors import ConfigError
from sartor.results.comparison import Comparison
from tests.synthetic_results import make_comparison, make_result

EXAMPLE = [0.95, 0.9, 0.85, 0.8, 0.5]


def test_the_example_of_the_sheet():
    """Mean 0.8, population std 0.158114, worst 0.5, Jain 0.962406; Gini and entropy by hand."""
    found = fairness(EXAMPLE)
    assert found.mean == pytest.approx(0.8)
    assert found.std == pytest.approx(0.158114, abs=5e-7)
    assert (found.worst, found.best) == (0.5, 0.95)
    assert (found.worst_decile, found.best_decile) == (0.5, 0.95)
    assert found.jain == pytest.approx(0.962406, abs=5e-7)
    pairs = sum(abs(a - b) for a in EXAMPLE for b in EXAMPLE)
    assert found.gini == pytest.approx(pairs / (2 * 25 * 0.8))
    share = [a / 4 for a in EXAMPLE]
    assert found.entropy == pytest.approx(-sum(s * math.log(s) for s in share) / math.log(5))


def test_deciles_are_means_of_a_tenth():
    """Twenty clients: the lowest two and the highest two."""
    found = fairness(np.arange(1, 21) / 20)
    assert found.worst_decile == pytest.approx(0.075)
    assert found.best_decile == pytest.approx(0.975)


def test_even_and_one_for_all():
    """The ends of every index."""
    assert gini([0.7] * 5) == pytest.approx(0, abs=1e-12)
    assert entropy([0.7] * 5) == pytest.approx(1)
    assert gini([0, 0, 0, 0, 1]) == pytest.approx(0.8)
    assert entropy([0, 0, 0, 0, 1]) == 0
    assert (gini([0, 0]), entropy([0, 0]), entropy([0.3])) == (0, 1, 1)
    assert math.isnan(gini([math.nan]))


def test_clients_with_few_samples_do_not_decide_the_worst():
    """The floor holds for worst, best and deciles, not for the mean; NaN clients stay out."""
    found = fairness([0.9, 0.5, 0.0, 1.0, math.nan], [50, 50, 2, 3, 0])
    assert (found.worst, found.best, found.excluded, found.clients) == (0.5, 0.9, 2, 4)
    assert found.mean == pytest.approx(0.6)


def test_fairness_of_results_is_that_of_their_clients():
    """A row per run, a row per method; repeats are averaged, and the mean is the macro accuracy."""
    result = make_result("fedapa", seeds=(0, 1))
    table = result.fairness()
    assert table.column("mean") == pytest.approx(result.accuracy_macro.tolist())
    assert len(result.fairness(run=1)) == 1
    both = make_comparison(seeds=(0, 1)).fairness()
    assert both.column("method") == ["local", "fedavg", "fedprox", "fedapa"]
    assert both.column("Gini")[3] == pytest.approx(np.mean(table.column("Gini")))
    assert both.column("worst")[3] == pytest.approx(np.mean(result.worst_client))


def test_what_a_target_costs_by_hand():
    """A curve set by hand: reached in round 4 (pre), after four rounds of bytes and gradients."""
    result = make_result("fedavg", rounds=6, clients=2, count=np.array([10, 10]))
    scores = result.scores["pre", "test"]
    scores.correct[0] = np.array([0, 2, 4, 8, 8, 8, 9])[:, None]
    scores.loss[0] = np.array([30, 20, 9, 8, 7, 6, 5])[:, None]
    work = int(result.ledger.gradient_evaluations[0, 0])
    travels = 2 * 2 * 61_156 * 4
    found = to_reach(result, 0.8)
    assert found is not None
    assert (found.rounds, found.gradient_evaluations) == (5, 5 * work + 70)
    assert found.megabytes == pytest.approx((5 * travels + travels // 4) / 1e6)
    assert to_reach(result, 0.8, window=1).rounds == 3
    assert to_reach(result, 0.9) is None
    assert to_reach(result, 0.8, measure="loss").rounds == 4  # (0.9 + 0.8 + 0.7) / 3
    with pytest.raises(ConfigError, match="accuracy, loss"):
        to_reach(result, 0.8, measure="f1")


def test_after_local_training_the_round_has_been_paid_for():
    """A "post" entry t has had the download and the work of round t, and no upload of it."""
    result = make_result("fedapa", rounds=6, clients=2, count=np.array([10, 10]))
    result.scores["post", "test"].correct[0] = np.array([0, 8, 8, 8, 8, 8])[:, None]
    work, one_way = int(result.ledger.gradient_evaluations[0, 0]), 2 * 61_156 * 4
    reached = to_reach(result, 0.8)
    assert reached.rounds == 4
    assert reached.gradient_evaluations == 4 * work + 70
    assert reached.megabytes == pytest.approx((4 * one_way + 3 * one_way + one_way // 2) / 1e6)


def test_the_table_of_targets_says_how_many_runs_reached_them():
    """One row per target and method; not reached is shown, and costs are of those that did."""
    comparison = make_comparison(seeds=(0, 1, 2))
    table = comparison.to_reach([0.5, 0.999])
    assert len(table) == 8
    assert table.column("reached by") == ["3 of 3 runs"] * 4 + ["0 of 3 runs"] * 4
    each = [to_reach(comparison["fedapa"], 0.5, run=run).rounds for run in range(3)]
    assert table.column("rounds")[3].values == tuple(each)
    assert table.text_rows()[-1][3:] == ["–", "–", "–"]
    assert len(comparison.to_reach(0.4)) == 4


def test_the_front_is_what_nobody_beats():
    """Cheaper and better wins; equals stay together; a lost run is not on it."""
    assert pareto_front([3, 1, 2, 2, 9], [0.9, 0.5, 0.4, 0.6, 0.8]) == [1, 3, 0]
    assert sorted(pareto_front([1, 1], [0.5, 0.5])) == [0, 1]
    assert pareto_front([0, 1], [math.nan, 0.1]) == [1]
    assert pareto_front([2, 1], [0.5, 0.5]) == [1]
    with pytest.raises(ConfigError, match="one length"):
        pareto_front([1], [1, 2])


def test_methods_on_the_front():
    """Local sends nothing, FedAPA is the best; FedAvg costs as much and gets less."""
    comparison = make_comparison()
    assert comparison.pareto() == ["local", "fedapa"]
    with pytest.raises(ConfigError, match="did you mean 'megabytes'"):
        comparison.pareto("megabyte")
    assert Comparison({"local": comparison["local"]}).pareto("seconds") == ["local"]
