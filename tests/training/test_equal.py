"""Equal gradient evaluations for all methods of a comparison, by the counts of the ledger."""

from __future__ import annotations

import numpy as np
import pytest

import sartor
from sartor import Local
from sartor.core.errors import ConfigError
from sartor.runs import ComparisonFolder
from tests.toys import Net, federation

NAMES = ["ditto", "per-fedavg", "fedavg-ft", "fedprox"]
GIVEN = {"model": Net(), "local": Local(epochs=1, batch=4, lr=0.1), "device": "cpu"}


def work(result):
    """Return the gradient evaluations of a result and of its dearest round, mean over runs."""
    ledger = result.ledger
    each = ledger.gradient_evaluations.mean(0)
    return each.sum() + ledger.setup_gradients.mean(), each.max()


def test_every_method_has_the_work_of_the_dearest_within_a_round():
    """All clients in every round: the counts agree, and the dearest has the rounds asked for."""
    found = sartor.compare(NAMES, federation(), equal="gradients", rounds=5, seeds=(0, 1), **GIVEN)
    totals = {name: work(result) for name, result in found.items()}
    assert min(result.ledger.num_rounds for result in found.values()) == 5
    target = max(
        work(sartor.fit(name, federation(), rounds=5, seeds=(0, 1), **GIVEN))[0] for name in NAMES
    )
    for name, (total, each) in totals.items():
        assert abs(total - target) <= each, name
    words = str(found.table())
    assert "equal gradient evaluations: those of the dearest; rounds: local 1" in words


def test_with_sampled_clients_a_method_ends_in_the_nearest_round():
    """Rounds then differ in what they cost, and the counts still agree within about one."""
    data = federation(sizes=(3, 17, 8, 30, 5))
    found = sartor.compare(
        ["ditto", "l2gd"],
        data,
        equal="gradients",
        rounds=10,
        participation=0.4,
        **GIVEN,
    )
    totals = {name: work(result) for name, result in found.items()}
    targets = [total for total, _ in totals.values()]
    for name, (total, each) in totals.items():
        assert abs(total - np.median(targets)) <= 2 * each, name
    assert "it has had its gradient evaluations" in str(found.table())


def test_what_does_not_go_together_is_refused():
    """It needs a number of rounds, and no early stopping."""
    data = federation()
    with pytest.raises(ConfigError, match="give that number, such as rounds=20"):
        sartor.compare("ditto", data, equal="gradients", **GIVEN)
    with pytest.raises(ConfigError, match="early stopping cannot both decide"):
        sartor.compare("ditto", data, equal="gradients", rounds=3, early_stopping=2, **GIVEN)
    with pytest.raises(ConfigError, match="equal must be 'gradients', got 'bytes'"):
        sartor.compare("ditto", data, equal="bytes", rounds=3, **GIVEN)


def test_a_folder_of_equal_work_resumes_and_says_so(tmp_path):
    """The probes leave nothing behind; a second call reads what the first wrote."""
    given = {**GIVEN, "equal": "gradients", "rounds": 3, "out": tmp_path / "a"}
    first = sartor.compare("ditto", federation(), **given)
    again = sartor.compare("ditto", federation(), resume=True, **given)
    for name in first:
        assert work(first[name]) == work(again[name])
    read = ComparisonFolder.open(tmp_path / "a").read_comparison()
    assert "those of the dearest" in str(read.table())
