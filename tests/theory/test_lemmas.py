"""The lemmas behind Theorem 1, on federations whose minimisers are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sartor.theory import lemmas
from sartor.theory.quantities import Inequality
from tests.theory.instances import Instance, logistic, quadratic

PULLS = (0.01, 0.3, 2.0, 50.0)
INSTANCES = [(make, seed) for make in (quadratic, logistic) for seed in range(3)]
Maker = Callable[[int], Instance]


@pytest.mark.parametrize(("make", "seed"), INSTANCES)
def test_the_lemmas_hold_on_solved_federations(make: Maker, seed: int) -> None:
    """(20), (4), (5) and v1's (3) for four pulls; (20) also without its factor 2."""
    found = make(seed)
    pooled, (big, mu) = found.pooled(), (found.smoothness, found.strong_convexity)
    at_target = found.gradients(found.targets)
    for lam in PULLS:
        shared, own = found.solve(lam)
        torch.testing.assert_close(found.weights @ own, shared, rtol=0, atol=1e-8)
        slopes = found.gradients(shared)
        near = lemmas.lemma_4(shared, own, slopes, lam, mu)
        assert near.left.shape == near.right.shape == found.weights.shape
        assert near.holds
        assert lemmas.lemma_4(shared, own, slopes, lam, mu, sharp=True).holds
        assert lemmas.lemma_1_global(shared, pooled, slopes, found.weights, lam, big, mu).holds
        args = (own, found.targets, at_target, found.weights)
        second = lemmas.lemma_1_local(*args, found.heterogeneity, lam, mu)
        first = lemmas.lemma_1_local(*args, found.heterogeneity, lam, mu, "v1")
        assert second.holds
        assert first.holds
        torch.testing.assert_close(first.left, second.left)
        assert float(first.right) < float(second.right)
        # The mean squared distance is enough.
        far = (found.targets - found.target).square().sum(1)
        mean = float((found.weights @ far).sqrt())
        assert mean < found.heterogeneity
        assert lemmas.lemma_1_local(*args, mean, lam, mu, "v1").holds


def test_the_sharp_lemma_4_is_an_equality_on_isotropic_losses() -> None:
    """With ½μ‖w − c_i‖² both sides are μ‖w̃_g − c_i‖/(μ+λ): no smaller factor is true."""
    mu, lam = 0.7, 1.3
    centres = torch.tensor([[0.0, 1.0], [2.0, -1.0], [3.0, 3.0]], dtype=torch.float64)
    shared = centres.mean(0)
    own = (mu * centres + lam * shared) / (mu + lam)
    found = lemmas.lemma_4(shared, own, mu * (shared - centres), lam, mu, sharp=True)
    torch.testing.assert_close(found.left, found.right, rtol=1e-12, atol=0)
    printed = lemmas.lemma_4(shared, own, mu * (shared - centres), lam, mu)
    torch.testing.assert_close(printed.right, 2 * found.right)
    # (4): with equal curvatures w̃_g = w_GT, and the right side is 4(1+1)/(μ(μ+λ)) Σ p_i μ²‖·‖².
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    slopes = mu * (shared - centres)
    four = lemmas.lemma_1_global(shared, shared + 1.0, slopes, weights, lam, mu, mu)
    assert float(four.left) == pytest.approx(2.0)
    spread = float((shared - centres).square().sum(1).mean())
    assert float(four.right) == pytest.approx(8 / (0.7 * 2.0) * 0.49 * spread)


def test_the_first_versions_bound_is_tight_on_isotropic_losses() -> None:
    """Without noise: μ s² R² <= (λ/2)(1 − (1−s)²) R² with s = λ/(μ+λ), alike to first order."""
    mu, lam = 2.0, 0.01
    targets = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    own = mu / (mu + lam) * targets
    half = torch.full((2,), 0.5, dtype=torch.float64)
    args = (own, targets, torch.zeros_like(targets), half, 1.0, lam, mu)
    found = lemmas.lemma_1_local(*args, "v1")
    assert float(found.left) == pytest.approx(mu * (lam / (mu + lam)) ** 2)
    assert float(found.right) == pytest.approx(lam / 2 * (1 - (mu / (mu + lam)) ** 2))
    assert 1.0 <= float(found.right / found.left) < 1.01
    assert float(lemmas.lemma_1_local(*args).right) == pytest.approx(lam / 2)


def test_lemma_5_holds_in_the_mean_over_draws() -> None:
    """Logistic regression, 30 draws: E‖w_GT − w_g*‖, and (21) for each draw; sharp ones too."""
    draws = [logistic(seed, spread=0.3) for seed in range(30)]
    first, fits = draws[0], torch.stack([found.pooled() for found in draws])
    for found, fit in zip(draws, fits, strict=True):
        slopes = found.gradients(found.target)
        args = (fit, found.target, slopes, found.weights, found.strong_convexity)
        assert lemmas.pooled_error(*args).holds
        assert lemmas.pooled_error(*args, sharp=True).holds
    big = max(found.smoothness for found in draws)
    given = (first.weights, first.sizes, first.heterogeneity, big, first.strong_convexity)
    for sharp in (False, True):
        mean = lemmas.lemma_5(fits, first.target, *given, first.noise, sharp)
        assert mean.holds
        assert mean.left.shape == ()


def test_lemma_5_in_numbers() -> None:
    """Weights (¼, ¾), n = (10, 90): √(Σp²/n) = 1/√80; ρ = √5, L = ½, R = 4, μ = ½: (1/4 + 2)·4."""
    weights, sizes = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([10, 90])
    fits = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    given = (torch.zeros(2, dtype=torch.float64), weights, sizes, 4.0, 0.5, 0.5)
    found = lemmas.lemma_5(fits, *given, 5**0.5)
    assert float(found.left) == pytest.approx(3.0)
    assert float(found.right) == pytest.approx(9.0)
    assert float(lemmas.lemma_5(fits, *given, 5**0.5, sharp=True).right) == pytest.approx(4.5)
    assert found.holds
    slopes = torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    one = lemmas.pooled_error(fits[0], given[0], slopes, weights, 0.5)
    assert (float(one.left), float(one.right)) == pytest.approx((5.0, 4 * 10**0.5))
    sharp = lemmas.pooled_error(fits[0], given[0], slopes, weights, 0.5, sharp=True)
    assert float(sharp.right) == pytest.approx(2 * 10**0.5)


def test_an_inequality_knows_whether_it_holds() -> None:
    """Every element counts; rounding does not."""
    one = torch.ones(2, dtype=torch.float64)
    assert Inequality(one, one * (1 - 1e-12)).holds
    assert not Inequality(one, torch.tensor([1.0, 0.999], dtype=torch.float64)).holds
    assert not Inequality(one * torch.nan, one).holds
    torch.testing.assert_close(Inequality(one, 3 * one).slack, 2 * one)
