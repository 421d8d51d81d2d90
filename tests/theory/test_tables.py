"""Tables 1 and 2: how the methods compare."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.theory import tables
from sartor.theory.proximal import corollary1, envelope
from sartor.theory.tables import statistical_rate, table_2, work


def test_table_1_in_its_three_regimes() -> None:
    """With n = 100, m = 16: above 1/√n, between the switches, and below 1/(m√n)."""
    args, kind = (100, 16), {"diameter": 3.0, "loss_bound": 2.0}
    wanted = {
        "chen": ((9 + 2) / 100, 2 * 0.005, 2 / 400),
        "v1": (1 / 100, 0.005, 1 / 1600),
        "v2": (1 / 100, 0.0025, 1 / 1600),
        "lower": (1 / 100, 0.0025, 1 / 1600),
    }
    for source, row in wanted.items():
        found = [float(statistical_rate(source, r, *args, **kind)) for r in (0.5, 0.05, 0.005)]
        assert found == pytest.approx(row), source
    first = {"chen": (1 / 200, 2 / 40), "v1": (1 / 1600, 1 / 1600), "v2": (1 / 1600, 1 / 1600)}
    for source, (middle, low) in first.items():  # R = 0.02: R² = 0.0004 < 1/1600 < R/√n = 0.002
        printed = [
            float(statistical_rate(source, r, *args, **kind, form="printed")) for r in (0.02, 0.005)
        ]
        scale = {"chen": 2 * 0.002, "v1": 0.002, "v2": 0.0004}[source]
        assert printed == pytest.approx([scale, low]), (source, middle)
    # Where R² > 1/(mn) the printed ∧ is below what is possible.
    printed = statistical_rate("lower", 0.05, *args, form="printed")
    assert float(printed) == pytest.approx(1 / 1600)
    assert float(printed) < float(statistical_rate("lower", 0.05, *args))


def test_the_corrected_rates_have_no_jumps_and_never_beat_the_lower_bound() -> None:
    """All rows over R and m: rising in R, continuous, and at least the lower bound."""
    r, n = torch.logspace(-6, 0, 4001, dtype=torch.float64), 400
    for m, source in itertools.product((4, 100), tables.SOURCES):
        # D² + B = B at D = 0, so that Chen's row meets its first column.
        found = statistical_rate(source, r, n, m, diameter=0.0)
        assert (found.diff() >= 0).all()
        assert float((found[1:] / found[:-1]).max()) < 1.02
        assert (found >= statistical_rate("lower", r, n, m)).all()
    edge = torch.tensor(1 / math.sqrt(n * 100), dtype=torch.float64)
    near = [float(statistical_rate("v2", edge * f, n, 100)) for f in (0.5, 1.0, 2.0)]
    assert near == pytest.approx([1 / 40000, 1 / 40000, 4 / 40000])


def test_the_slopes_of_table_1() -> None:
    """Between the switches: R for v1 and Chen, R² for v2; below, 1/(mn) against 1/(√m n)."""
    r = torch.tensor([1e-3, 2e-3], dtype=torch.float64)
    for source, power in (("chen", 1), ("v1", 1), ("v2", 2), ("lower", 2)):
        found = statistical_rate(source, r, 1e4, 1e6)
        assert float(found[1] / found[0]) == pytest.approx(2.0**power)
        few, many = (float(statistical_rate(source, 0.0, 100, m)) for m in (25, 100))
        assert few / many == pytest.approx(2.0 if source == "chen" else 4.0)


def test_an_unknown_row_is_refused() -> None:
    """The message lists the rows."""
    with pytest.raises(ConfigError, match="no row 'chan'; did you mean 'chen'"):
        statistical_rate("chan", 0.1, 10, 10)


def test_table_2_in_numbers() -> None:
    """L = 1, μ = 0.1, λ = 0.5, ε = 1e-4: all six rows."""
    found = table_2(
        1e-4, 0.5, 1.0, 0.1, num_clients=10, num_local_steps=20, inexactness=0.5, gap=3.0
    )
    log = math.log(1e4)
    wanted = {
        "fedprox_li": (math.nan, 6e4),
        "pfedme": (math.nan, 50.0),
        "ditto": (1.0, 1e4),
        "l2gd": (3.0, 20 / 3 * log),
        "fedprox_two_stage": (5e3, 1e4),
        "fedprox": (2.5, 4.0 * log),
    }
    assert set(found) == set(wanted)
    for name, row in found.items():
        assert (row.gradients, row.exchanges) == pytest.approx(wanted[name], nan_ok=True), name
        assert row.convexity == ("convex" if name == "fedprox_li" else "strongly convex")
        assert row.bounded_domain == (name == "fedprox_two_stage")
    assert table_2(1e-4, 3.0, 1.0, 0.1)["fedprox_two_stage"].exchanges == pytest.approx(3e4)


def test_the_work_is_free_of_the_pull() -> None:
    """Gradients K · rounds are O(κ ln(1/ε)) for any λ, while the rounds follow κ_g."""
    found = [work(1e-8, 1.0, lam, 40.0, 1.0) for lam in (0.1, 1.0, 10.0, 100.0)]
    for row in found:
        assert row.num_gradients == row.num_rounds * row.num_local_steps
    # Up to the logarithm that K needs.
    logs = [math.log(16 * (2 + 64 * lam**2)) for lam in (0.1, 1.0, 10.0, 100.0)]
    gradients = [row.num_gradients / log for row, log in zip(found, logs, strict=True)]
    assert max(gradients) / min(gradients) < 1.9
    rounds = np.array([row.num_rounds for row in found])
    conditions = np.array([envelope(lam, 40.0, 1.0).condition for lam in (0.1, 1.0, 10.0, 100.0)])
    assert rounds[-1] / rounds[0] > 10
    # r ≈ 1 − 1/(4κ_g): 4 ln(1/ε) rounds for each unit of κ_g.
    np.testing.assert_allclose(rounds[1:] / conditions[1:], 4 * math.log(1e8), rtol=0.35)
    steps, rate = work(1e-6, 1.0, 0.5, 1.0, 0.1), corollary1(0.5, 1.0, 0.1)["rate"]
    assert steps.num_local_steps == 20
    assert rate**steps.num_rounds <= 1e-6 < rate ** (steps.num_rounds - 1)
