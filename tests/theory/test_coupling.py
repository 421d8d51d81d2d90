"""The rules for λ."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.theory import coupling

NUMBERS = {"smoothness": 1.0, "strong_convexity": 0.1}


@pytest.mark.parametrize(
    ("spread", "first", "second"), [(0.05, 2.828427, 6399.9), (0.5, 0.08, 0.8)]
)
def test_both_versions_at_two_heterogeneities(spread: float, first: float, second: float) -> None:
    """L = 1, μ = 0.1, ρ = 2, n = 200, m = 10: below and above R = 1/√n."""
    assert float(coupling.v1(spread, 200)) == pytest.approx(first, abs=1e-6)
    assert float(coupling.v2(spread, 200, 2000, **NUMBERS)) == pytest.approx(second, abs=1e-9)


def test_the_second_argument_of_the_lower_bound() -> None:
    """(2κ or 5) μ Q = 11.1111 at R = 0.05; it decides where κ is near 1, less μ."""
    big, small, r, n, total = 1.0, 0.1, 0.05, 200, 2000
    q = (2 * (big * r) ** 2 + 4 / n) / ((big * r) ** 2 + 4 / total)
    assert 20 * small * q == pytest.approx(11.1111, abs=1e-4)
    # L = μ = 1, R → 0: Q → N/n = 40, and 5 · 40 = 200 > 64.
    flat = {"smoothness": 1.0, "strong_convexity": 1.0}
    assert float(coupling.v2(1e-9, 50, 2000, **flat)) == pytest.approx(5 * 40 - 1, rel=1e-6)
    assert float(coupling.v2(1e-9, 50, 100, **flat)) == pytest.approx(64 - 1)  # 5 · 2 < 64
    steep = {"smoothness": 3.0, "strong_convexity": 1.0}  # 2κ = 6 > 5
    assert float(coupling.v2(1e-9, 1, 1000, **steep)) == pytest.approx(6 * 1000 - 1, rel=1e-6)


def test_the_regimes_meet_at_one_over_root_n() -> None:
    """R = 1/√n belongs to the alike; v1 is continuous there only for ρ = 1."""
    n, edge, past = 100, 0.1, 0.1 * (1 + 1e-12)
    for rho in (1.0, 2.0):
        assert float(coupling.v1(edge, n, rho)) == pytest.approx(rho)
        assert float(coupling.v1(past, n, rho)) == pytest.approx(rho**2)
    assert float(coupling.v2(edge, n, 1000, **NUMBERS)) > 6000
    assert float(coupling.v2(past, n, 1000, **NUMBERS)) == pytest.approx(4 / 0.1)


@pytest.mark.parametrize(
    ("square", "wanted", "error"), [(0.02, 4.5, 0.0262), (0.09, 1.0, 0.0550), (0.30, 0.3, 0.0793)]
)
def test_shrinkage_minimises_the_mean_error(square: float, wanted: float, error: float) -> None:
    """With d = 5, n = 50, m = 10, μ = 1, ρ² = 5: λ, and the error of the personal models.

    Every client's estimate of its mean moves by λ/(1+λ) to the average. No other λ does better.
    """
    lam = float(coupling.shrinkage(math.sqrt(square), 50, 10, 1.0, math.sqrt(5)))
    assert lam == pytest.approx(wanted, abs=1e-12)
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(10, 5, dtype=torch.float64, generator=draw)
    truth = truth - truth.mean(0)
    truth = truth * (square / truth.square().sum(1).mean()).sqrt()
    noise = torch.randn(20000, 10, 5, dtype=torch.float64, generator=draw)
    own = truth + noise * math.sqrt(1 / 50)

    def mean_error(lam: float) -> float:
        shift = own.mean(1, keepdim=True) - own
        return float((own + lam / (1 + lam) * shift - truth).square().sum(-1).mean())

    assert mean_error(lam) == pytest.approx(error, rel=0.01)
    assert min(mean_error(f * lam) for f in (0.8, 1.25)) > mean_error(lam)
    assert mean_error(0.0) == pytest.approx(0.1, rel=0.01)
    assert mean_error(1e9) == pytest.approx(square + 0.01, rel=0.01)


def test_rules_take_tensors_and_fall_with_heterogeneity() -> None:
    """Values that broadcast, a λ for each; the less alike, the weaker the pull."""
    r = torch.tensor([0.01, 0.05, 0.2, 1.0], dtype=torch.float64)
    for lam in (
        coupling.v1(r, 200, torch.tensor(1.0)),
        coupling.v2(r, 200, 2000, **NUMBERS),
        coupling.shrinkage(r, torch.tensor(200), 10, 0.1),
    ):
        assert lam.shape == (4,)
        assert lam.dtype == torch.float64
        assert (lam[:-1] >= lam[1:]).all()
        assert lam[0] > lam[-1]


def test_a_federation_has_one_pull_or_one_for_each() -> None:
    """One R takes n = N/m; R_i or ρ_i that differ take n_i; equal ones count as one."""
    sizes, two = torch.tensor([100, 300]), torch.tensor(2.0, dtype=torch.float64)
    half = torch.tensor(0.5, dtype=torch.float64)
    constants = (1.0, 0.1)

    def pull(rule: str, r: torch.Tensor, rho: torch.Tensor) -> list[float]:
        found: list[float] = coupling.by_rule(rule, r, rho, sizes, *constants).tolist()
        return found

    assert pull("v1", half, two) == pytest.approx([0.08] * 2)
    assert pull("v2", half, two) == pytest.approx([0.8] * 2)
    assert pull("shrinkage", half, two) == pytest.approx([0.4] * 2)
    assert pull("v1", half.expand(2), two.expand(2)) == pytest.approx([0.08] * 2)
    own = torch.tensor([0.5, 1.0], dtype=torch.float64)
    np.testing.assert_allclose(pull("v1", own, two), [4 / 25, 4 / 300])
    np.testing.assert_allclose(pull("v2", half, 2 * own), [1 / 2.5, 4 / 7.5])
    np.testing.assert_allclose(pull("shrinkage", own, two), [0.5 * 4 / 2.5, 0.5 * 4 / 30])
    with pytest.raises(ConfigError, match="no rule 'v3' for the pull; known: shrinkage, v1, v2"):
        pull("v3", half, two)
