"""Excess risk, and the bounds of LocalTrain, FedAvg, the better of them, and two-stage FedProx."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.theory import excess_risk as er
from sartor.theory import two_stage_risk as fp
from sartor.theory.stability import fedprox_bound

EQUAL = (torch.full((10,), 0.1, dtype=torch.float64), torch.full((10,), 200))
UNEQUAL = (torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([10, 60, 100]))
S1, S2 = 0.05 + 0.005 + 0.002, 0.025 + 0.0015 + 0.0004  # of UNEQUAL


def slope(x: Tensor, y: Tensor) -> np.ndarray:
    """Return the log-log slopes between neighbours."""
    return (y.log().diff() / x.log().diff()).numpy()


# ---- the metrics ---------------------------------------------------------------------------------


def problem() -> tuple[torch.Generator, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    root = torch.randn(2, 4, 4, dtype=torch.float64, generator=draw)
    models, targets = torch.randn(2, 2, 4, dtype=torch.float64, generator=draw)
    return draw, root, models, targets


def test_the_closed_form_is_the_mean_of_a_fresh_sample() -> None:
    """Two clients with linear regression: within four standard errors, which are small."""
    draw, root, models, targets = problem()
    x = torch.randn(2, 200_000, 4, dtype=torch.float64, generator=draw) @ root.mT
    y = (x @ targets[..., None])[..., 0]
    y = y + 0.5 * torch.randn(y.shape, dtype=torch.float64, generator=draw)

    def losses(w: Tensor) -> Tensor:
        return 0.5 * (y - (x @ w[..., None])[..., 0]).square()

    found = er.sampled_excess_risk(losses(models), losses(targets))
    exact = er.excess_risk(models, targets, root @ root.mT)
    assert found.value.shape == found.error.shape == exact.shape == (2,)
    assert ((found.value - exact).abs() < 4 * found.error).all()
    assert (found.error < 0.01 * exact).all()
    # Ten times fewer records: an error √10 times larger.
    few = er.sampled_excess_risk(losses(models)[:, :20_000], losses(targets)[:, :20_000])
    np.testing.assert_allclose(few.error / found.error, math.sqrt(10), rtol=0.1)


def test_the_closed_form_for_means() -> None:
    """Loss ½‖w − z‖²: the excess risk is ½‖ŵ − w*‖² for any data, and so is its estimate."""
    draw, _, models, targets = problem()
    exact = er.excess_risk(models, targets)
    torch.testing.assert_close(exact, 0.5 * (models - targets).square().sum(1))
    eye = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    torch.testing.assert_close(exact, er.excess_risk(models, targets, eye))
    z = targets[:, None] + torch.randn(2, 50_000, 4, dtype=torch.float64, generator=draw)
    losses = [0.5 * (w[:, None] - z).square().sum(2) for w in (models, targets)]
    found = er.sampled_excess_risk(*losses)
    assert ((found.value - exact).abs() < 4 * found.error).all()


def test_the_average_weighs_the_clients() -> None:
    """AER_p = Σ p_i IER_i, and errors add in squares."""
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    risks = torch.tensor([4.0, 8.0], dtype=torch.float64)
    found = er.average_excess_risk(risks, p)
    assert (float(found.value), float(found.error)) == (7.0, 0.0)
    sampled = er.Sampled(risks, torch.tensor([1.2, 0.3], dtype=torch.float64))
    found = er.average_excess_risk(sampled, p)
    assert float(found.value) == 7.0
    assert float(found.error) == pytest.approx(math.hypot(0.3, 0.225))


def test_excess_risk_lies_between_its_curvatures() -> None:
    """(μ/2)‖·‖² <= IER <= (β/2)‖·‖², with equality along the extreme directions."""
    _, root, models, targets = problem()
    bend = root @ root.mT
    curves, ways = torch.linalg.eigh(bend)
    low, high = er.excess_risk_range(models, targets, curves[:, -1], curves[:, 0])
    found = er.excess_risk(models, targets, bend)
    assert (low < found).all()
    assert (found < high).all()
    for way, side in ((0, 0), (-1, 1)):
        moved = targets + 3.0 * ways[..., way]
        edges = er.excess_risk_range(moved, targets, curves[:, -1], curves[:, 0])
        exact = er.excess_risk(moved, targets, bend)
        torch.testing.assert_close(edges[side], exact, rtol=1e-8, atol=0)


# ---- LocalTrain, FedAvg, and the better of the two -----------------------------------------------


def test_theorems_4_and_6_in_numbers() -> None:
    """β = 2, μ = ½, B = 3, σ = 4, R = 0.1: 32 · 12/n; 32 · 12 s_2 + 4βR²; (10) by hand."""
    assert float(er.local_risk(100, 2.0, 0.5, 3.0)) == pytest.approx(32 * 12 / 100)
    assert float(er.local_risk(100, 2.0, 0.5, 3.0, constant=1.0)) == pytest.approx(0.12)
    found = er.fedavg_average_risk(0.1, *UNEQUAL, 2.0, 0.5, 3.0)
    assert float(found) == pytest.approx(32 * 12 * S2 + 8 * 0.01)
    found = er.fedavg_average_risk(0.1, *UNEQUAL, 2.0, 0.5, 3.0, constants=(1.0, 1.0))
    assert float(found) == pytest.approx(12 * S2 + 2 * 0.01)
    found = er.fedavg_individual_risk(0.1, *UNEQUAL, 2.0, 0.5, 4.0)
    assert float(found) == pytest.approx(8 * 2 * 16 / 0.25 * S2 + (8 * 8 / 0.25 + 2) * 0.01)


def test_the_best_weights_are_the_sample_shares() -> None:
    """(11): with p_i = n_i/N the sum is 1/N, and every other p is worse."""
    sizes = UNEQUAL[1]
    shares = sizes.double() / sizes.sum()
    best = float(er.fedavg_average_risk(0.0, shares, sizes, 2.0, 0.5, 3.0, (1.0, 1.0)))
    assert best == pytest.approx(12 / 170)
    own = float(er.fedavg_individual_risk(0.0, shares, sizes, 2.0, 0.5, 4.0))
    assert own == pytest.approx(8 * 2 * 16 / 0.25 / 170)
    for tilt in ((0.05, -0.05, 0.0), (0.0, 0.02, -0.02)):
        p = shares + torch.tensor(tilt, dtype=torch.float64)
        assert float(er.fedavg_average_risk(0.0, p, sizes, 2.0, 0.5, 3.0, (1.0, 1.0))) > best
        assert float(er.fedavg_individual_risk(0.0, p, sizes, 2.0, 0.5, 4.0)) > own


def test_the_bounds_hold_for_means_in_a_ball() -> None:
    """Loss ½‖w − z‖² with ‖z‖ <= 1, so β = μ = 1, B = 2 and σ² <= 1: the errors are known.

    LocalTrain ½σ²/n_i; FedAvg ½(σ² s_2 + R²) on average, ½(σ² s_2 + ‖w_i* − w_g*‖²) for a client.
    """
    sigma2, r = 0.8, 0.3
    p, sizes = UNEQUAL
    assert (0.5 * sigma2 / sizes <= er.local_risk(sizes, 1.0, 1.0, 2.0)).all()
    exact = 0.5 * (sigma2 * S2 + r**2)
    assert exact <= float(er.fedavg_average_risk(r, p, sizes, 1.0, 1.0, 2.0))
    assert exact <= float(er.fedavg_individual_risk(r, p, sizes, 1.0, 1.0, sigma2**0.5))


def test_the_oracle_switches_once() -> None:
    """R² = (B/μ) m/N: FedAvg below, LocalTrain above; (18) and (19) stop rising there."""
    limit = float(er.oracle_threshold(10, 2000, 0.5, 3.0))
    assert limit == pytest.approx(6 * 10 / 2000)
    r = torch.logspace(-4, 2, 61, dtype=torch.float64)
    found = er.dichotomous_average_risk(r, *EQUAL, 2.0, 0.5, 3.0)
    base = 2 * 3 / 0.5 / 2000
    wanted = 2.0 * r.square().clamp(max=limit) + base
    torch.testing.assert_close(found, wanted)
    own = er.dichotomous_individual_risk(r, 200, *EQUAL, 2.0, 0.5, 3.0, 4.0)
    wanted = 8 / 0.25 * r.square().clamp(max=3 / (0.5 * 200)) + 2 * 16 / 0.25 / 2000
    torch.testing.assert_close(own, wanted)


def test_the_lower_bounds() -> None:
    """Theorem 8: d/n ∧ R² + d/N; Corollary 9: μ(β/n ∧ R² + β/N)."""
    assert float(er.error_floor(0.1, 200, 2000, 5)) == pytest.approx(0.01 + 0.0025)
    assert float(er.error_floor(1.0, 200, 2000, 5)) == pytest.approx(0.025 + 0.0025)
    assert float(er.risk_floor(0.1, 200, 2000, 4.0, 0.5)) == pytest.approx(0.5 * (0.01 + 0.002))
    assert float(er.risk_floor(1.0, 200, 2000, 4.0, 0.5)) == pytest.approx(0.5 * (0.02 + 0.002))


def test_the_better_of_two_is_optimal_in_rate_and_fedprox_is_not() -> None:
    """Upper over lower bound: within a factor for the dichotomy, unbounded for (28) at middle R."""
    ratios, others = [], []
    for m, n in itertools.product((10, 1000), (100, 10_000)):
        p, sizes = torch.full((m,), 1 / m, dtype=torch.float64), torch.full((m,), n)
        r = torch.logspace(-8, 2, 101, dtype=torch.float64)
        floor = er.risk_floor(r, n, m * n, 1.0, 0.5)
        ratios.append(er.dichotomous_average_risk(r, p, sizes, 1.0, 0.5, 1.0) / floor)
        others.append(fp.average_risk(r, p, sizes, 1.0, 0.5, 1.0) / floor)
    assert max(float(x.max()) for x in ratios) < 4.01
    assert min(float(x.min()) for x in ratios) > 1.99
    assert max(float(x.max()) for x in others) > 50
    for x in others:  # optimal again at both ends
        assert max(float(x[0]), float(x[-1])) < 5.01


# ---- two-stage FedProx ---------------------------------------------------------------------------


def test_the_pull_of_theorem_11() -> None:
    """μ = 0.1, n = 200, m = 10, C_p = 1: λ for four R, and both switch points."""
    for r, wanted in ((0.5, 0.000125), (0.05, 0.00883883), (0.02, 0.0220971), (0.001, 0.0625)):
        assert float(fp.average_prox_strength(r, *EQUAL, 0.1)) == pytest.approx(wanted, rel=1e-5)
    switches = [float(x) for x in fp.average_switches(*EQUAL)]
    assert switches == pytest.approx([0.00707107, 0.0707107], abs=5e-8)
    given = [float(fp.average_prox_strength(r, *EQUAL, 0.1, imbalance=2.0)) for r in (0.5, 0.05)]
    assert given == pytest.approx([0.000125, 0.00883883 / 2], rel=1e-5)


def test_the_pull_of_theorem_11_for_unequal_clients() -> None:
    """C_p = p_max s_1/s_2: all three rules by hand, never above μ/(16 p_max), and falling."""
    c = 0.5 * S1 / S2
    low, high = (float(x) for x in fp.average_switches(*UNEQUAL))
    assert (low, high) == pytest.approx((S2 / math.sqrt(S1), math.sqrt(S1)))
    rules = {0.5: S1 / 0.25, 0.2: math.sqrt(S1) / (c * 0.2), 0.01: S1 / (c * S2)}
    for r, wanted in rules.items():
        found = float(fp.average_prox_strength(r, *UNEQUAL, 0.1))
        assert found == pytest.approx(0.1 / 16 * wanted)
    assert 0.01 < low < 0.2 < high < 0.5
    r = torch.logspace(-5, 3, 200, dtype=torch.float64)
    for clients in (EQUAL, UNEQUAL):
        found = fp.average_prox_strength(r, *clients, 0.1)
        assert (found * clients[0].max() <= 0.1 / 16 * (1 + 1e-12)).all()
    found = fp.average_prox_strength(r, *EQUAL, 0.1)  # continuous where C_p = 1
    assert (found.diff() <= 1e-15).all()
    assert float((found[:-1] / found[1:]).max()) < (r[1] / r[0]) ** 2 + 1e-9
    spans = (slice(0, 60), slice(85, 95), slice(120, 199))
    for span, wanted in zip(spans, (0.0, -1.0, -2.0), strict=True):
        part = slice(span.start, span.stop)
        inside = slope(r[part], found[part])
        if wanted == -1.0:
            inside = inside[(r[part][:-1] > 0.00708).numpy() & (r[part][1:] < 0.0707).numpy()]
            assert len(inside) > 3
        np.testing.assert_allclose(inside, wanted, atol=1e-9)


def test_the_bound_of_theorem_11() -> None:
    """(28) by hand for unequal clients; for equal ones it is (30); slopes 0, 1, 0 in R."""
    c = 0.5 * S1 / S2
    factor = 0.5 / min(1, c) + max(1, c) * 2 * 3 / 0.5
    for r, least in ((0.1, 0.1 * math.sqrt(S1)), (0.5, S1)):
        found = float(fp.average_risk(r, *UNEQUAL, 2.0, 0.5, 3.0))
        assert found == pytest.approx(factor * (least + S2))
    small = float(fp.average_risk(0.1, *UNEQUAL, 2.0, 0.5, 3.0, imbalance=0.5))
    assert small == pytest.approx((1.0 + 12.0) * (0.1 * math.sqrt(S1) + S2))
    r = torch.logspace(-4, 1, 31, dtype=torch.float64)
    found = fp.average_risk(r, *EQUAL, 2.0, 0.5, 3.0)
    ratio = 10 / 2000
    wanted = (0.5 + 12.0) * ((r * ratio**0.5).clamp(max=ratio) + 1 / 2000)  # (30)
    torch.testing.assert_close(found, wanted)


def test_theorem_12() -> None:
    """Its λ on both sides of √(m/N), its ceiling μ/(16 p_max), and (29) by hand."""
    args = (1000, 200_000, 0.5)  # m, N, μ
    assert float(fp.individual_prox_strength(0.5, *args)) == pytest.approx(0.5 * 1000 / 200_000)
    scaled = fp.individual_prox_strength(0.5, *args, scales=(3.0, 1.0))
    assert float(scaled) == pytest.approx(3 * 0.5 / 200)
    near = 0.5 * math.sqrt(1000 / (0.01**2 * 200_000 + 1))
    assert float(fp.individual_prox_strength(0.01, *args)) == pytest.approx(near)
    scaled = fp.individual_prox_strength(0.01, *args, scales=(1.0, 0.5))
    assert float(scaled) == pytest.approx(near / 2)
    capped = fp.individual_prox_strength(0.01, *args, largest_weight=0.01)
    assert float(capped) == pytest.approx(0.5 / 0.16)
    few = fp.individual_prox_strength(0.0, 10, 2000, 0.5)
    assert float(few) == pytest.approx(0.5 * 10 / 16)
    # β = 2, μ = ½, B = 3, σ = 4, D = 6: (2.5)(6 + (64 + 4 + 16)·4) + 18.
    factor = 2.5 * (6 + 84 * 4) + 0.5 * 36
    for r, least in ((0.01, 0.01 / math.sqrt(200)), (1.0, 1 / 200)):
        found = float(fp.individual_risk(r, 200, 10, 2000, 2.0, 0.5, 3.0, 4.0, 6.0))
        assert found == pytest.approx(factor * (least + math.sqrt(10) / 2000))


def test_the_rates_of_fedprox() -> None:
    """−1 in n at both ends; the individual bound falls as 1/√m only where clients are equal."""
    n = torch.logspace(2, 6, 5, dtype=torch.float64)
    kind = (2.0, 0.5, 3.0, 4.0, 6.0)
    for r in (0.0, 1e6):
        found = fp.individual_risk(r, n, 10, 10 * n, *kind)
        np.testing.assert_allclose(slope(n, found), -1.0, atol=1e-9)
    m = torch.tensor([4.0, 16.0, 64.0], dtype=torch.float64)
    found = fp.individual_risk(0.0, 100, m, 100 * m, *kind)
    np.testing.assert_allclose(slope(m, found), -0.5, atol=1e-9)
    sweep = fp.average_risk(torch.zeros(3, 1), *EQUAL, torch.ones(2), 0.5, 1.0)
    assert sweep.shape == (3, 2)
    assert sweep.dtype == torch.float64


def test_proposition_10() -> None:
    """Both bounds by hand, with and without what training left."""
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    gamma = torch.tensor([0.4, 0.2], dtype=torch.float64)
    assert float(er.average_risk_by_stability(p, gamma, 3.0, 0.04, 0.1)) == pytest.approx(0.66)
    assert float(er.average_risk_by_stability(p, gamma, 3.0, 0.04)) == pytest.approx(0.56)
    found = er.individual_risk_by_stability(p, gamma, 3.0, torch.tensor([0.04, 0.08]), 0.1)
    assert found.tolist() == pytest.approx([0.4 + 0.8 + 0.06, 0.1 / 0.75 + 0.4 + 0.12])


@pytest.mark.parametrize("lam", [0.01, 0.1, 0.3])
def test_proposition_10_holds_for_means(lam: float) -> None:
    """Equal clients, ½‖w − z‖² with records on the unit ball: the exact E AER, by γ_i's bound.

    ½[s²R² + V(1−s)² + V(1 − (1−s)²)/m] with s = λ/(1+λ) and V = σ²/n.
    """
    n, m, r, sigma2 = 10, 5, 0.4, 0.5
    s, var = lam / (1 + lam), sigma2 / n
    exact = 0.5 * ((s * r) ** 2 + var * (1 - s) ** 2 + var * (1 - (1 - s) ** 2) / m)
    p = torch.full((m,), 1 / m, dtype=torch.float64)
    known = {"smoothness": 1.0, "strong_convexity": 1.0, "loss_bound": 2.0}
    gamma = fedprox_bound(torch.full((m,), n), 1 / m, lam, **known)
    assert exact <= float(er.average_risk_by_stability(p, gamma, lam, r**2))
