"""Checks, each on numbers that make it hold and numbers that make it fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sartor.core.errors import ConfigError
from sartor.reproduce.records import measure, series
from sartor.reproduce.rules import View, crossings, judge


def view(**rows: list[list[float]]) -> View:
    """Columns c0, c1, ... at x = 0, 1, ...; each cell is a list of seeds."""
    width = max(len(cells) for cells in rows.values())
    columns = tuple(f"c{k}" for k in range(width))
    values = {
        row: {c: np.asarray(cell) for c, cell in zip(columns, cells, strict=False)}
        for row, cells in rows.items()
    }
    places = {c: float(k) for k, c in enumerate(columns)}
    published = {"a": {"c0": 1.0, "c1": None}}
    return View(values, tuple(rows), columns, places, published, lambda words: values)


NUMBERS = view(
    a=[[1.0, 1.2], [2.0, 2.2], [3.0, 3.2]],
    b=[[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]],
    c=[[5.0, 5.0], [7.0, 7.0], [6.0, 6.0]],
)

CASES: list[tuple[dict[str, Any], bool]] = [
    ({"check": "order", "rows": ["a", "c"]}, True),
    ({"check": "order", "rows": ["c", "a"]}, False),
    ({"check": "order", "rows": ["b", "a"], "means": True}, True),
    ({"check": "order", "rows": ["b", "a"]}, False),
    ({"check": "order", "rows": ["b", "a"], "slack": 1.0}, True),
    ({"check": "above", "row": "c", "by": 2.5}, True),
    ({"check": "above", "row": "c", "by": 3.5}, False),
    ({"check": "above", "row": "a", "than": "b"}, False),
    ({"check": "above", "row": "a", "than": "b", "columns": ["c1", "c2"]}, True),
    ({"check": "below", "row": "b", "than": "c", "by": 3.0}, True),
    ({"check": "below", "row": "b"}, False),
    ({"check": "every_seed", "row": "c", "than": "b"}, True),
    ({"check": "every_seed", "row": "a", "than": "b"}, False),
    ({"check": "between", "row": "b", "ends": ["a", "c"]}, False),
    ({"check": "between", "row": "b", "ends": ["a", "c"], "columns": ["c0"]}, True),
    ({"check": "within", "row": "a", "of": "b", "by": 1.2}, True),
    ({"check": "within", "row": "a", "of": "b", "by": 1.0}, False),
    ({"check": "envelope", "row": "c", "of": ["a", "b"], "by": 0.0}, True),
    ({"check": "envelope", "row": "b", "of": ["a", "c"], "by": 1.0}, False),
    ({"check": "envelope", "row": "a", "of": ["b", "c"], "by": 1.2, "lower": True}, True),
    ({"check": "rises", "row": "a", "total": 1.9}, True),
    ({"check": "rises", "row": "a", "total": 2.1}, False),
    ({"check": "rises", "row": "c"}, False),
    ({"check": "rises", "row": "c", "slack": 1.0}, True),
    ({"check": "falls", "row": "a"}, False),
    ({"check": "flat", "row": "b", "by": 0.0}, True),
    ({"check": "flat", "row": "a", "by": 1.9}, False),
    ({"check": "crosses", "row": "a", "than": "b"}, True),
    ({"check": "crosses", "row": "a", "than": "b", "near": 0.9, "by": 0.05}, True),
    ({"check": "crosses", "row": "a", "than": "b", "near": 0.5, "by": 0.1}, False),
    ({"check": "crosses", "row": "a", "than": "c"}, False),
    ({"check": "slope", "row": "b", "near": 0.0, "by": 1e-9, "columns": ["c1", "c2"]}, True),
    ({"check": "slope", "row": "a", "near": 0.562, "by": 0.001, "columns": ["c1", "c2"]}, True),
    ({"check": "slope", "row": "a", "near": 1.0, "by": 0.4, "columns": ["c1", "c2"]}, False),
    ({"check": "interior", "row": "c"}, True),
    ({"check": "interior", "row": "a"}, False),
    ({"check": "best_in", "row": "c", "at_least": 3}, True),
    ({"check": "best_in", "row": "a", "at_least": 1}, False),
    ({"check": "best_in", "row": "a", "at_least": 2, "except": ["c"]}, True),
    ({"check": "expression", "value": 'v("c", "c1") / 2 > v("a", "c2")'}, True),
    ({"check": "expression", "value": 'max(v("a", "c0"), -1) >= mean("b")'}, False),
    ({"check": "expression", "value": 'sd("a", "c0") > 0.09'}, True),
    ({"check": "expression", "value": 'sd("a", "c0") > 0.11'}, False),
    ({"check": "published", "by": 0.2}, True),
    ({"check": "published", "by": 0.05}, False),
]


@pytest.mark.parametrize(("rule", "holds"), CASES)
def test_checks(rule: dict[str, Any], holds: bool) -> None:
    chosen = replace(NUMBERS, columns=tuple(rule.get("columns", NUMBERS.columns)))
    verdict = judge({"claim": "x", **rule}, chosen)
    assert verdict.holds is holds, verdict.found
    assert verdict.word == ("PASS" if holds else "FAIL")


def test_falls_is_rises_the_other_way_round() -> None:
    down = view(a=[[3.0], [2.0], [1.0]])
    assert judge({"claim": "x", "check": "falls", "row": "a", "total": 2.0}, down).holds


def test_what_was_not_run_is_never_passed() -> None:
    numbers = view(a=[[1.0], [2.0]], b=[[0.0]])
    rule = {"claim": "x", "check": "above", "row": "a", "than": "b"}
    verdict = judge(rule, numbers)
    assert verdict.holds is None
    assert verdict.word == "NOT RUN"
    lost = view(a=[[1.0]], b=[[float("nan")]])
    assert judge(rule, lost).found.startswith("no result for b")
    lost = replace(lost, lost=frozenset({("b", lost.columns[0])}))
    assert judge(rule, lost).found.startswith("every run of b")
    assert judge(rule, lost).holds is None


def test_others_are_all_rows_of_the_plan() -> None:
    numbers = view(a=[[1.0]], b=[[0.0]])
    more = View(
        numbers.values, ("a", "b", "c"), numbers.columns, numbers.places, {}, numbers.measured
    )
    assert judge({"claim": "x", "check": "above", "row": "a"}, numbers).holds
    assert judge({"claim": "x", "check": "above", "row": "a"}, more).holds is None


@pytest.mark.parametrize(
    "value", ["__import__('os')", "v('a', 'c0')", "a < 1", "v('a','c0') < open('x')", "1 < 2 < 3"]
)
def test_expressions_take_arithmetic_only(value: str) -> None:
    with pytest.raises(ConfigError, match=r"is not arithmetic|is not one comparison"):
        judge({"claim": "x", "check": "expression", "value": value}, NUMBERS)


def test_crossings_lie_on_straight_lines() -> None:
    assert crossings([0.0, 2.0, 4.0], np.array([1.0, -1.0, -3.0])) == [1.0]
    assert crossings([0.0, 1.0], np.array([1.0, 1.0])) == []


RECORD = {
    "headline": "pre",
    "points": {
        "pre/test": {
            "rounds": [0, 1, 2],
            "accuracy": [0.1, 0.6, 0.5],
            "loss": [3.0, 2.0, 1.0],
            "macro": 0.4,
            "worst": 0.2,
        },
        "post/test": {
            "rounds": [0, 1],
            "accuracy": [0.7, 0.8],
            "loss": [1.0, 0.5],
            "macro": 0.9,
            "worst": 0.3,
        },
        "pre/val": {"rounds": [2], "accuracy": [0.33], "loss": [1.5], "macro": 0.3, "worst": 0.3},
    },
    "kib": 7.0,
    "gradients": 20.0,
    "seconds": 0.5,
    "probes": {"error": {"rounds": [0, 1, 2, 3], "values": [8.0, 4.0, 2.1, 2.0]}},
    "values": {"local_error": 0.25},
    "diverged": None,
}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("best", 0.6),
        ("last", 0.5),
        ("best post", 0.8),
        ("last10", 0.4),
        ("macro", 0.4),
        ("worst post", 0.3),
        ("at 1", 0.6),
        ("loss", 1.0),
        ("last everyone", 0.33),
        ("kib", 7.0),
        ("gradients", 20.0),
        ("seconds", 0.5),
        ("probe error", 2.0),
        ("probe error at 1", 4.0),
        ("rounds_to error 1.1", 2.0),
        ("value local_error", 0.25),
    ],
)
def test_measures(words: str, value: float) -> None:
    assert measure(RECORD, words) == pytest.approx(value)


def test_a_row_says_where_it_is_scored_unless_the_measure_does() -> None:
    assert measure(RECORD, "best", "post") == 0.8
    assert measure(RECORD, "best pre", "post") == 0.6


def test_a_run_that_diverged_has_no_accuracy() -> None:
    assert np.isnan(measure({**RECORD, "diverged": {"round": 1}}, "best"))
    assert measure({**RECORD, "diverged": {"round": 1}}, "kib") == 7.0


def test_an_unknown_measure_is_told() -> None:
    with pytest.raises(ConfigError, match="best"):
        measure(RECORD, "bst")


def test_curves_count_rounds_that_are_over() -> None:
    assert series(RECORD, "accuracy") == ([0, 1, 2], [0.1, 0.6, 0.5])
    assert series(RECORD, "accuracy", "post") == ([1, 2], [0.7, 0.8])
    assert series(RECORD, "probe error")[1][-1] == 2.0


def test_a_rule_for_every_column_fails_by_those_that_were_run():
    """One column that fails decides, whatever the others would give; one that holds does not."""
    part = view(a=[[1.0], [2.0], [3.0]], b=[[2.0], [1.0]])
    rule = {"claim": "b above a", "check": "above", "row": "b", "than": "a"}
    assert judge(rule, part).word == "FAIL"
    assert judge(rule, part).found == "c1: least lead -1"
    fine = judge({**rule, "columns": ["c0", "c2"]}, replace(part, columns=("c0", "c2")))
    assert (fine.word, fine.found) == (
        "NOT RUN",
        "no result for b, c2; so far it holds in 1 of 2 columns",
    )
    assert judge({**rule, "means": True}, part).word == "NOT RUN"  # the mean may still turn
    rises = {"claim": "b rises", "check": "rises", "row": "b"}
    assert judge(rises, part).word == "NOT RUN"
