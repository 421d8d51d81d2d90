"""Theorem 1 in both versions: constants, rates, and the λ that it allows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.errors import ConfigError
from sartor.theory import coupling, statistical
from sartor.theory.quantities import sums
from sartor.theory.statistical import constants, global_bound, local_bound, prox_range

NUMBERS = (1.0, 0.1, 2.0)  # L, μ, ρ of the worked example, with n = 200 and m = 10


def numbers(found: statistical.Constants) -> list[float]:
    parts = (found.global_pooled, found.global_spread, found.local_pooled, found.local_spread)
    return [float(x) for x in parts]


def slope(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the log-log slopes between neighbours."""
    return y.log().diff() / x.log().diff()


def test_the_constants_of_both_versions() -> None:
    """L = 1, μ = 0.1, ρ = 2: C_1 to C_4, and the two arguments of v1's C_4."""
    np.testing.assert_allclose(
        numbers(constants(*NUMBERS)), [12800, 3200, 76800, 5212927.34], rtol=0, atol=5e-3
    )
    terms = [float(x) for x in statistical.v1_terms(0.1, 2.0)]
    np.testing.assert_allclose(terms, [20464.66, 3552.71], rtol=0, atol=5e-3)
    first = numbers(constants(*NUMBERS, version="v1"))
    np.testing.assert_allclose(first, [400, 439.0890, 3200, terms[0]], rtol=0, atol=5e-5)
    printed = numbers(constants(*NUMBERS, version="v1", form="printed"))
    np.testing.assert_allclose(printed, [*first[:3], terms[1]])


def test_the_other_branch_of_every_maximum() -> None:
    """Little noise: 2ρ/μ in v1's C_2; 32κ² and 198κ² in v2. Much: ((1+√3)ρ/μ)²."""
    assert float(constants(1.0, 8.0, 0.5, "v1").global_spread) == pytest.approx(1 / 8)
    calm = constants(3.0, 1.0, 1e-3)
    assert numbers(calm)[1::2] == pytest.approx([32 * 9, 198 * 9])
    loud = constants(1.0, 1.0, 10.0)
    spread = (1 + math.sqrt(3)) ** 2 * 100
    assert float(loud.global_spread) == pytest.approx(spread)
    assert float(loud.local_spread) == pytest.approx(100 * (1 + math.sqrt(4 * spread + 5)) ** 2)


def test_the_bounds_are_made_of_the_constants() -> None:
    """With n = 200, N = 2000: R = 0.05 (R² = 0.0025 < 1/n, R/√n = 0.00353553) and R = 0.5."""
    c, d = constants(*NUMBERS), constants(*NUMBERS, version="v1")
    args = (200, 2000)
    assert float(global_bound(0.05, *args, c)) == pytest.approx(6.4 + 3200 * 0.0025)
    assert float(local_bound(0.05, *args, c)) == pytest.approx(38.4 + 5212927.34 * 0.0025, rel=1e-8)
    assert float(global_bound(0.5, *args, c)) == pytest.approx(6.4 + 3200 / 200)
    near = 0.05 / math.sqrt(200)
    assert float(global_bound(0.05, *args, d)) == pytest.approx(0.2 + 439.0890 * near, rel=1e-6)
    wanted = 1.6 + 20464.66 * near + 16 * 0.0025
    assert float(local_bound(0.05, *args, d)) == pytest.approx(wanted, rel=1e-6)
    wanted = 1.6 + 20464.66 / 200 + 16 * 0.25
    assert float(local_bound(0.5, *args, d)) == pytest.approx(wanted, rel=1e-6)
    assert float(local_bound(9.0, *args, d)) == pytest.approx(wanted + 16 * 1.75, rel=1e-6)


@pytest.mark.parametrize(("version", "power"), [("v1", 1.0), ("v2", 2.0)])
def test_the_rates_of_the_bounds(version: statistical.Version, power: float) -> None:
    """Log-log slopes: −1 in n and m for equal clients, R or R² until 1/√n, then flat."""
    c, n = constants(*NUMBERS, version=version), torch.logspace(2, 6, 9, dtype=torch.float64)
    for bound in (global_bound, local_bound):
        alike = bound(0.0, n, 10 * n, c)
        torch.testing.assert_close(slope(n, alike), torch.full((8,), -1.0, dtype=torch.float64))
        many = bound(0.0, 100, 100 * n, c)
        torch.testing.assert_close(slope(n, many), torch.full((8,), -1.0, dtype=torch.float64))
        apart = bound(1e3, n, 1e12, c)
        torch.testing.assert_close(
            slope(n, apart), torch.full((8,), -1.0, dtype=torch.float64), rtol=0, atol=2e-3
        )
        r = torch.logspace(-5, -3, 7, dtype=torch.float64)
        rise = bound(r, 1e4, 1e12, c) - bound(0.0, 1e4, 1e12, c)
        np.testing.assert_allclose(slope(r, rise), power, atol=2e-3)
        far = torch.tensor([30.0, 60.0, 1e9], dtype=torch.float64)
        assert len(set(bound(far, 200, 2000, c).tolist())) == 1


def test_v1s_first_term_is_exact_on_means() -> None:
    """Loss (μ/2)‖w − z‖²: E‖w̃_g − w_g*‖² = ρ²/(μ²N) for every λ, which is C_1/N."""
    mu, sigma2, dim, n, m = 0.5, 1.0, 3, 20, 4
    rho = mu * math.sqrt(dim * sigma2)
    exact = dim * sigma2 / (m * n)
    found = float(global_bound(0.0, n, m * n, constants(mu, mu, rho, "v1")))
    assert found == pytest.approx(exact)


def test_both_bounds_hold_for_means_of_equal_clients() -> None:
    """Loss (μ/2)‖w − z‖²: the exact error of w̃_i is s²R² + V(1 − s)² + V(1 − (1−s)²)/m.

    With V = ρ²/(μ²n) and s = λ/(μ+λ), at both ends of every allowed range of λ.
    """
    mu, rho, n, m = 0.5, 1.0, 50, 8
    var = (rho / mu) ** 2 / n
    for version, r in itertools.product(("v1", "v2"), (1e-3, 0.05, 0.14, 0.15, 1.0, 10.0)):
        c = constants(mu, mu, rho, version)
        allowed = prox_range(r, n, m * n, mu, mu, rho, version)
        for lam in (float(allowed.low), float(allowed.high)):
            s = 1 - mu / (mu + lam)
            error = (s * r) ** 2 + var * (1 - s) ** 2 + var * (1 - (1 - s) ** 2) / m
            assert error <= float(local_bound(r, n, m * n, c))
            assert var / m <= float(global_bound(r, n, m * n, c))


# ---- λ -------------------------------------------------------------------------------------------


def test_the_allowed_pulls() -> None:
    """R = 0.05: v2 λ >= 6399.9, v1 λ = 2.828427. R = 0.5: v2 λ <= 0.8, v1 λ = 0.08."""
    args = (200, 2000, *NUMBERS)
    near, far = prox_range(0.05, *args), prox_range(0.5, *args)
    assert float(near.low) == pytest.approx(6399.9)
    assert near.high == math.inf
    assert float(far.low) == 0.0
    assert float(far.high) == pytest.approx(0.8)
    assert far.admits(torch.tensor([0.0, 0.79, 0.81])).tolist() == [True, True, False]
    assert near.admits(torch.tensor([6399.0, 6400.0, math.inf])).tolist() == [False, True, True]
    for r, wanted in ((0.05, 2.828427), (0.5, 0.08)):
        low, high = prox_range(r, *args, version="v1")
        assert float(low) == float(high) == pytest.approx(wanted, abs=5e-7)


def test_the_terms_of_the_condition() -> None:
    """R = 0.05: a_1 = 6399.9; a_2 = 3.86744, printed 0.31343; (82)'s second argument 11.1111."""
    args = (0.05, 200, 2000, *NUMBERS)
    assert float(statistical.global_floor(*args)) == pytest.approx(6399.9)
    assert float(statistical.local_floor(*args)) == pytest.approx(3.86744, abs=5e-6)
    printed = statistical.local_floor(*args, form="printed")
    assert float(printed) == pytest.approx(0.31343, abs=5e-6)
    assert [float(x) for x in coupling.v2_terms(*args)] == pytest.approx([6400, 11.1111], abs=5e-5)
    assert float(prox_range(*args, condition="(81)").low) == pytest.approx(6399.9)


def test_the_second_branch_of_the_first_floor() -> None:
    """L = μ = 1, R = 0, N/n = 400: 8 · 400/4 = 2 · 400 > 64, less μ; (82) asks for 5 · 400."""
    args = (0.0, 10, 4000, 1.0, 1.0, 2.0)
    assert float(statistical.global_floor(*args)) == pytest.approx(799)
    assert float(prox_range(*args, condition="(81)").low) == pytest.approx(799)
    assert float(prox_range(*args).low) == pytest.approx(1999)


@given(
    st.floats(0, 1),
    st.floats(1, 1e4),
    st.floats(1, 1e3),
    st.floats(0.01, 10),
    st.floats(1, 100),
    st.floats(0.01, 100),
)
def test_the_sufficient_condition_suffices(
    share: float, n: float, m: float, mu: float, kappa: float, rho: float
) -> None:
    """(82) is never below (81) with either a_2; the corrected a_2 is never below the printed."""
    args = (share / math.sqrt(n), n, m * n, kappa * mu, mu, rho)
    enough = float(prox_range(*args).low) * (1 + 1e-9) + 1e-9
    assert float(prox_range(*args, condition="(81)").low) <= enough
    assert float(prox_range(*args, condition="printed (81)").low) <= enough
    fixed = float(statistical.local_floor(*args))
    assert fixed >= float(statistical.local_floor(*args, form="printed")) - 1e-9


def test_the_floor_makes_the_proof_work() -> None:
    """At λ = a_2 step (72) is 192ρ²/(μ²N) + (195κ² + 3)R² at most: (74); the printed a_2 fails."""
    r, n, total, (big, mu, rho) = 0.05, 200, 2000, NUMBERS

    def step(lam: float) -> float:
        k2, var = (big / mu) ** 2, rho**2
        inside = 128 * k2 * var / total + (128 * k2 + 4) * (big * r) ** 2 + 2 * var / n
        rest = 96 * var / mu**2 / total + (96 * k2 + 3) * r**2
        return 12 / (mu + lam) ** 2 * inside + rest

    limit = 192 * (rho / mu) ** 2 / total + 198 * (big / mu * r) ** 2
    assert step(float(statistical.local_floor(r, n, total, *NUMBERS))) <= limit
    assert step(float(statistical.local_floor(r, n, total, *NUMBERS, form="printed"))) > limit


# ---- unequal clients -----------------------------------------------------------------------------


def test_unequal_clients_have_effective_sizes() -> None:
    """(34) and (55) with s_1 = Σp/n; for equal clients n and N come back."""
    same = sums([0.1] * 10, [200] * 10)
    assert 1 / float(same.local) == pytest.approx(200)
    assert 1 / float(same.pooled) == pytest.approx(2000)
    assert float(same.imbalance) == pytest.approx(1.0)
    p, sizes = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([10, 60, 100])
    found = sums(p, sizes)
    s1, s2 = 0.05 + 0.005 + 0.002, 0.025 + 0.0015 + 0.0004
    assert float(found.local) == pytest.approx(s1)
    assert float(found.pooled) == pytest.approx(s2)
    assert float(found.imbalance) == pytest.approx(0.5 * s1 / s2)
    big, mu, rho = NUMBERS
    args = (1 / found.local, 1 / found.pooled, *NUMBERS)
    apart = prox_range(0.5, *args)
    assert float(apart.high) == pytest.approx(rho**2 * s1 / (mu * 0.25))  # (34)
    high, _ = statistical.bounds_by_case(0.5, *args)
    assert float(high) == pytest.approx(((1 + math.sqrt(3)) * rho / mu) ** 2 * s1)  # (55)
    low, _ = statistical.bounds_by_case(0.1, *args)
    assert float(low) == pytest.approx(32 * ((rho / mu) ** 2 * s2 + (big / mu * 0.1) ** 2))
    edge = math.sqrt(s1)
    assert float(prox_range(edge * 0.999, *args).high) == math.inf
    assert float(prox_range(edge * 1.001, *args).low) == 0.0


def test_the_cases_are_below_the_joint_bound() -> None:
    """(55) and (76) against (6) and (7), on both sides of R = 1/√n; by hand on one."""
    r = torch.logspace(-4, 2, 25, dtype=torch.float64)
    shared, own = statistical.bounds_by_case(r, 200, 2000, *NUMBERS)
    c = constants(*NUMBERS)
    assert (shared <= global_bound(r, 200, 2000, c) * (1 + 1e-12)).all()
    assert (own <= local_bound(r, 200, 2000, c) * (1 + 1e-12)).all()
    own_near = statistical.bounds_by_case(0.05, 200, 2000, *NUMBERS)[1]
    assert float(own_near) == pytest.approx(192 * 400 / 2000 + 198 * 100 * 0.0025)
    own_far = statistical.bounds_by_case(5.0, 200, 2000, *NUMBERS)[1]
    assert float(own_far) == pytest.approx(5212927.34 / 200, rel=1e-8)


@pytest.mark.parametrize(
    ("weights", "sizes"), [([0.5], [3, 3]), ([0.5, 0.6], [3, 3]), ([1.0, 0.0], [3, 3]), ([1], [0])]
)
def test_impossible_clients_are_refused(weights: list, sizes: list) -> None:
    """Weights are positive, one for each client, with sum one; clients have samples."""
    with pytest.raises(ConfigError, match="Divide the weights by their sum"):
        sums(weights, sizes)


def test_sweeps_broadcast() -> None:
    """R along one axis, n along another, in double precision."""
    r = torch.tensor([0.01, 0.1, 1.0])[:, None]
    n = torch.tensor([100, 10000])
    c = constants(*NUMBERS)
    for found in (
        global_bound(r, n, 10 * n, c),
        local_bound(r, n, 10 * n, c),
        *prox_range(r, n, 10 * n, *NUMBERS),
        *prox_range(r, n, 10 * n, *NUMBERS, condition="(81)"),
        *statistical.bounds_by_case(r, n, 10 * n, *NUMBERS),
    ):
        assert found.shape == (3, 2)
        assert found.dtype == torch.float64
    assert constants(1.0, torch.tensor([0.1, 0.2]), 2.0).local_spread.shape == (2,)
