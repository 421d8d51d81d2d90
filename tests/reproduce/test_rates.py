"""Rates: slopes, contraction, jittered hyper-parameters, and the optimum that FedProx goes to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sartor import reproduce
from sartor.core.errors import ConfigError
from sartor.reproduce.derived import jittered
from sartor.reproduce.passes import passes_of
from sartor.reproduce.plan import load, read
from sartor.reproduce.problems import make_problem
from sartor.reproduce.records import measure
from sartor.reproduce.rules import View, judge
from sartor.theory.exact_fits import fit_each, fit_pooled
from sartor.theory.linear_models import Clients

# ---------------------------------------------------------------------- slopes


def power(exponent: float, x: list[float]) -> View:
    columns = tuple(f"c{k}" for k in range(len(x)))
    cells = {c: np.array([3.0 * place**exponent]) for c, place in zip(columns, x, strict=True)}
    values = {"a": cells}
    places = dict(zip(columns, x, strict=True))
    return View(values, ("a",), columns, places, {}, lambda words: values)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 2.0])
def test_the_slope_of_a_power_is_its_exponent(exponent: float) -> None:
    rule = {"claim": "", "check": "slope", "row": "a", "near": exponent, "by": 1e-9}
    assert judge(rule, power(exponent, [1.0, 2.0, 4.0, 10.0])).holds
    assert judge({**rule, "near": exponent + 0.1}, power(exponent, [1.0, 3.0])).holds is False


def test_a_slope_needs_places_above_zero() -> None:
    rule = {"claim": "it falls", "check": "slope", "row": "a", "near": 1.0, "by": 0.1}
    for places in ([0.0, 1.0], [2.0]):
        with pytest.raises(ConfigError, match="x above 0"):
            judge(rule, power(1.0, places))


def test_a_slope_of_what_is_not_positive_fails() -> None:
    view = power(1.0, [1.0, 2.0])
    view.values["a"]["c0"][:] = -1.0
    rule = {"claim": "", "check": "slope", "row": "a", "near": 1.0, "by": 9.0}
    assert judge(rule, view).holds is False


# ---------------------------------------------------------------------- measures


def seen(*values: float | None) -> dict[str, Any]:
    return {"probes": {"gap": {"rounds": list(range(len(values))), "values": list(values)}}}


def test_contraction_is_the_worst_round() -> None:
    assert measure(seen(8.0, 4.0, 3.0, 0.3), "contraction gap") == pytest.approx(0.75)
    # What lies below 1e-12 times the first value is rounding.
    assert measure(seen(1.0, 0.1, 1e-13, 1e-13), "contraction gap") == pytest.approx(0.1)
    assert math.isnan(measure(seen(1.0, 0.1, None), "contraction gap"))


def test_rounds_below_count_from_the_first_value() -> None:
    assert measure(seen(8.0, 4.0, 2.0, 1.0), "rounds_below gap 0.25") == 2
    assert math.isnan(measure(seen(8.0, 4.0), "rounds_below gap 0.25"))
    assert math.isnan(measure(seen(8.0, 1.0, None), "rounds_below gap 0.25"))


def test_a_fall_is_looked_for_after_its_round_only() -> None:
    curve = {"rounds": [0, 5, 10, 15, 20], "accuracy": [0.9, 0.2, 0.6, 0.5, 0.7]}
    record = {"headline": "pre", "points": {"pre/test": curve}}
    assert measure(record, "fall 10") == pytest.approx(0.1)
    assert measure(record, "fall 0") == pytest.approx(0.7)
    assert measure(record, "fall 15") == pytest.approx(-0.2)
    assert math.isnan(measure(record, "fall 20"))


# ---------------------------------------------------------------------- jitter


def test_jitter_multiplies_numbers_by_seed_and_name() -> None:
    given = {"a": 2.0, "b": 2.0, "mode": "code", "flag": True, "rate": "1 / L"}
    assert jittered(given, 0.0, 3) == given
    once, again, other = (jittered(given, 0.1, seed) for seed in (3, 3, 4))
    assert once == again
    assert len({once["a"], once["b"], other["a"], 2.0}) == 4
    assert {k: once[k] for k in ("mode", "flag", "rate")} == {
        k: given[k] for k in ("mode", "flag", "rate")
    }
    drawn = np.array([jittered({"a": 2.0}, 0.1, seed)["a"] for seed in range(400)])
    assert drawn.mean() == pytest.approx(2.0, abs=0.04)
    assert drawn.std() == pytest.approx(0.2, abs=0.03)


def test_table_3_of_pfedbred_draws_its_hyper_parameters() -> None:
    """All S of one repeat share the draw; repeats and tasks do not share their numbers."""
    lanes = [lane for one in passes_of(load("bred-table3")) for lane in one.lanes]
    mnist = [
        lane for lane in lanes if lane.column == "FMNIST MCLR" and "(code)" not in lane.rows[0]
    ]
    by_seed = {s: {ln.hyper["prox_strength"] for ln in mnist if ln.seed == s} for s in range(5)}
    assert all(len(found) == 1 for found in by_seed.values())
    assert len(set.union(*by_seed.values())) == 5
    assert all(9.0 < value < 21.0 for found in by_seed.values() for value in found)
    assert set(mnist[0].hyper) == {
        *("prox_strength", "personal_lr", "prior_lr", "memory_lr", "local_lr")
    }


# ---------------------------------------------------------------------- exact, several sizes


def test_exact_solutions_of_several_sizes_share_a_pass() -> None:
    settings = {"solve": "exact", "data": "logistic-theory", "spread": 0.5, "clients": 3, "dim": 2}
    rows = [
        {"name": "LocalTrain", "method": "local", "set": {"end": "local"}},
        {"name": "GlobalTrain", "method": "fedavg", "set": {"end": "global"}},
    ]
    columns = [{"name": "n = {samples}", "x": "samples", "sweep": {"samples": [60, 120]}}]
    tables = [{"title": "Local error", "measure": "value local_error"}]
    parts = {"title": "t", "paper": "p", "item": "i", "settings": settings, "rows": rows}
    plan = read("sizes", {**parts, "columns": columns, "tables": tables})
    outcome = reproduce.run(plan)
    for column in plan.columns:
        problem = make_problem(plan.settings_of(plan.rows[0], column), 0)
        fed, truth = problem.federation, problem.truth
        assert truth is not None
        n = len(fed.train.rows) // 3
        assert n == column.x
        x = fed.x[fed.train.rows].double().reshape(3, n, 2)
        y = fed.y[fed.train.rows].double().reshape(3, n)
        clients = Clients(x, y, torch.ones(3, n, dtype=torch.bool), "logistic")
        own = fit_each(clients, tolerance=1e-8).w
        common = fit_pooled(clients, torch.full((3,), 1 / 3, dtype=torch.float64)).w
        for row, models in (("LocalTrain", own), ("GlobalTrain", common.expand(3, 2))):
            error = float((models - truth).square().sum(-1).mean())
            record = outcome.records[row, column.name][0]
            assert measure(record, "value local_error") == pytest.approx(error, rel=1e-6)


# ---------------------------------------------------------------------- the optimum


def fedprox(**parts: Any) -> dict[str, Any]:
    settings = {"data": "logistic-theory", "spread": 0.5, "clients": 3, "samples": 40, "dim": 3}
    settings |= {"test_samples": 6, "steps": 12, "batch": 0, "rounds": 20, "dtype": "float64"}
    settings |= {"points": ["pre"], "weight_decay": 0.3, "probes": ["optimum"]}
    steps = {"local_lr": "1 / (L + 0.3 + prox_strength)", "weight_decay": 0.3}
    steps |= {"server_lr": "(prox_strength + L + 0.3) / (2 * prox_strength * (L + 0.3))"}
    row: dict[str, Any] = {"name": "FedProx", "method": "fedprox"}
    row |= {"set": {"preset": "free", "prox_strength": 0.5, **steps, **parts.pop("set", {})}}
    table = {"title": "t", "measure": "probe optimum_gap"}
    words = {"title": "t", "paper": "p", "item": "i", "tables": [table], "rows": [row]}
    return {**words, "settings": {**settings, **parts.pop("settings", {})}}


def test_fedprox_goes_to_the_optimum_no_slower_than_promised() -> None:
    """The distance goes to 0, and a round leaves at most r = 1 − s/2 − s²/2, s = γμ_g."""
    plan = read("prox", fedprox())
    record = reproduce.run(plan, device="cpu").records["FedProx", "all"][0]
    assert measure(record, "probe optimum_gap at 0") > 0.01
    assert measure(record, "probe optimum_gap") < 1e-8
    fed = make_problem(plan.settings_of(plan.rows[0], plan.columns[0]), 0).federation
    x = fed.x[fed.train.rows].double().reshape(3, 40, 3)
    big = float(torch.linalg.eigvalsh(x.mT @ x / 40)[:, -1].max()) / 4 + 0.3
    s = (0.5 + big) / (2 * 0.5 * big) * (0.5 * 0.3 / 0.8)
    assert measure(record, "probe guaranteed_rate") == pytest.approx(1 - s / 2 - s * s / 2)
    condition = big / 0.3 * 0.8 / (0.5 + big)
    assert measure(record, "probe envelope_condition") == pytest.approx(condition)
    assert 0 < measure(record, "contraction optimum_gap") <= 1 - s / 2 - s * s / 2


def test_nothing_is_promised_for_too_few_local_steps() -> None:
    plan = read("prox", fedprox(settings={"steps": 2, "rounds": 1}))
    record = reproduce.run(plan, device="cpu").records["FedProx", "all"][0]
    assert math.isnan(measure(record, "probe guaranteed_rate"))


def test_the_optimum_is_that_of_fedprox_with_a_ridge() -> None:
    plan = fedprox()
    plan["rows"] = [{"name": "FedAvg", "method": "fedavg"}]
    with pytest.raises(ConfigError, match="prox_strength"):
        reproduce.run(read("avg", plan), device="cpu")
