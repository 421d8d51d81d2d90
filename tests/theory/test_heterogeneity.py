"""The distance between the clients' best models, from two fits of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sartor.theory.heterogeneity import SplitHalf, federate, shares, split_half


def fits(radius2: float, draw: np.random.Generator, m: int = 10, n: int = 50, d: int = 5):
    """Draw the means of two halves of n samples with unit noise, centres R apart."""
    centres = draw.normal(size=(m, d))
    centres -= centres.mean(0)
    centres *= (radius2 / (centres**2).sum(1).mean()) ** 0.5
    halves = [centres + draw.normal(size=(m, d)) * (2 / n) ** 0.5 for _ in range(2)]
    return [torch.from_numpy(h) for h in halves]


@pytest.mark.parametrize("radius2", [0.0, 0.02, 0.09, 0.3])
def test_the_radius_and_the_noise_are_unbiased(radius2: float) -> None:
    """Mean estimation, m = 10, n = 50, d = 5: E R̂² = R² and E t̂_i = d/n = 0.1."""
    draw, weights = np.random.default_rng(1), torch.full((10,), 0.1, dtype=torch.float64)
    group = torch.zeros(10, dtype=torch.int64)
    found = [split_half(*fits(radius2, draw), weights, group) for _ in range(1500)]
    radius = torch.stack([f.radius2[0] for f in found])
    error = 4 * radius.std() / 1500**0.5
    assert abs(radius.mean() - radius2) < error
    noise = torch.stack([f.noise for f in found]).mean()
    assert noise == pytest.approx(0.1, rel=0.02)


def test_groups_are_estimated_each_for_itself() -> None:
    """Two far groups: every member has the radius of its own group."""
    draw = np.random.default_rng(2)
    a, b = fits(0.05, draw)
    shift = torch.tensor([0.0] * 4 + [100.0] * 6, dtype=torch.float64)[:, None]
    group = torch.tensor([0] * 4 + [4] * 6)
    weights = torch.linspace(1, 2, 10, dtype=torch.float64)
    found = split_half(a + shift, b + shift, weights, group)
    for members in (slice(0, 4), slice(4, 10)):
        one = torch.zeros(len(group[members]), dtype=torch.int64)
        alone = split_half(a[members], b[members], weights[members], one)
        torch.testing.assert_close(found.radius2[members], alone.radius2, rtol=0, atol=1e-9)


def test_the_crossover() -> None:
    """FedAvg iff R̂² < (1 − 1/m)·mean t̂ of the group; one alone never federates."""
    noise = torch.tensor([0.1, 0.1, 0.1, 0.1, 5.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 2, 2, 4])
    radius2 = torch.tensor([0.049, 0.049, 0.051, 0.051, -1.0], dtype=torch.float64)
    assert federate(SplitHalf(radius2, noise), group).tolist() == [True, True, False, False, False]


def test_shares_sum_to_one_inside_the_group() -> None:
    """Row i: the weights of i's group over their sum."""
    found = shares(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 2]))
    assert found.tolist() == [[0.25, 0.75, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]
