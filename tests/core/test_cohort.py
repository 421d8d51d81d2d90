"""Participation: cohorts drawn from (seed, round) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError

RULES = st.sampled_from(["all", 0.1, 0.5, 1, 2, "at_least:0.6", "at_least:1", "0.3"])


@given(RULES, st.integers(0, 99), st.integers(0, 99), st.integers(2, 30))
def test_a_cohort_holds_distinct_ids_and_comes_again(rule, seed: int, t: int, clients: int) -> None:
    """Ids are distinct and legal, somebody is there, and the same (seed, round) draws the same."""
    participation = Participation.parse(rule)
    ids, present = participation.draw(seed, t, clients)
    again = participation.draw(seed, t, clients)
    assert np.array_equal(ids, again[0])
    assert np.array_equal(present, again[1])
    assert len(set(ids.tolist())) == len(ids) == participation.slots(clients)
    assert set(ids.tolist()) <= set(range(clients))
    assert present.any()


def test_at_least_draws_every_size_from_the_bound_to_all() -> None:
    """With ⌈0.6 · 5⌉ = 3: sizes 3, 4 and 5, about equally often, and nothing else."""
    sizes = [Participation.parse("at_least:0.6").draw(0, t, 5)[1].sum() for t in range(300)]
    found = {int(size): sizes.count(size) for size in sizes}
    assert set(found) == {3, 4, 5}
    assert min(found.values()) > 70


def test_a_fraction_takes_its_share_and_everybody_in_turn() -> None:
    """0.4 of five clients is two a round; over many rounds all take part equally often."""
    drawn = [Participation.parse(0.4).draw(1, t, 5) for t in range(300)]
    assert {int(present.sum()) for _, present in drawn} == {2}
    counts = np.bincount(np.concatenate([ids for ids, _ in drawn]), minlength=5)
    assert counts.min() > 90
    assert counts.max() < 150


def test_seeds_and_rounds_draw_differently() -> None:
    """Another seed or another round is another cohort."""
    rule = Participation.parse(5)
    draws = {tuple(rule.draw(s, t, 20)[0]) for s in range(3) for t in range(3)}
    assert len(draws) == 9


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (1.0, ("all", 1.0)),
        ("all", ("all", 1.0)),
        ("1.0", ("all", 1.0)),
        (0.25, ("fraction", 0.25)),
        ("10", ("number", 10)),
        (1, ("number", 1)),
        ("at_least:0.6", ("at_least", 0.6)),
    ],
)
def test_rules_are_read_as_written(rule, wanted) -> None:
    """A whole number is a number of clients, a real number a share."""
    found = Participation.parse(rule)
    assert (found.kind, found.value) == wanted


@pytest.mark.parametrize(
    "rule", [0, -1, 0.0, 1.5, "most", "at_most:0.5", "at_least:2", "at_least:x", None]
)
def test_rules_that_make_no_sense_are_refused(rule) -> None:
    """The message says what to use."""
    with pytest.raises(ConfigError, match=r"at_least:0\.6"):
        Participation.parse(rule)


def test_more_clients_than_there_are_is_an_error() -> None:
    """It names both numbers."""
    with pytest.raises(ConfigError, match=r"10 clients.*only 4"):
        Participation.parse(10).draw(0, 0, 4)
