"""Expected errors by λ against simulations, and τ² against known values."""

from __future__ import annotations

import math

import pytest
import torch

from sartor.theory.exact_fits import fit_coupled
from sartor.theory.linear_models import Clients
from sartor.theory.random_effects import best_pull, default_pulls, effects, risks

F64 = torch.float64


@pytest.mark.parametrize(
    ("radius2", "pull", "error"), [(0.02, 4.5, 0.0262), (0.09, 1.0, 0.0550), (0.30, 0.3, 0.0793)]
)
def test_the_shrinkage_check(radius2: float, pull: float, error: float) -> None:
    """With d = 5, n = 50, m = 10, μ = 1, ρ² = 5: best λ 4.5/1/0.3; alone 0.1, one R² + 0.01."""
    v, h = torch.full((10, 5), 1 / 50, dtype=F64), torch.ones(10, 5, dtype=F64)
    even = torch.full((10,), 0.1, dtype=F64)
    tau2 = torch.tensor(radius2 / (5 * 0.9), dtype=F64)
    grid = torch.cat((torch.tensor([0.0, math.inf]), torch.logspace(-2, 2, 4001))).to(F64)
    mean = risks(grid, v, h, even).total(tau2).mean(-1)
    assert float(best_pull(grid, mean)) == pytest.approx(pull, rel=2e-3)
    assert float(mean.min()) == pytest.approx(error, abs=2e-4)  # simulated
    assert float(mean[0]) == pytest.approx(0.1)
    assert float(mean[1]) == pytest.approx(radius2 + 0.01)


def test_the_errors_are_those_of_simulated_quadratic_clients() -> None:
    """Unequal h, v, p and λ_i, one coordinate: 200 000 draws, solved exactly."""
    draw = torch.Generator().manual_seed(0)
    h = torch.tensor([0.5, 1.0, 3.0], dtype=F64)
    v = torch.tensor([0.3, 0.1, 0.02], dtype=F64)
    p, tau2, runs = torch.tensor([0.2, 0.3, 0.5], dtype=F64), 0.15, 200_000
    pulls = torch.tensor([[0.4, 2.0, 1.0], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]], dtype=F64)
    found = risks(pulls, v[:, None], h[:, None], p).total(torch.tensor(tau2, dtype=F64))
    best = 3.0 + math.sqrt(tau2) * torch.randn(runs, 3, dtype=F64, generator=draw)
    fit = best + v.sqrt() * torch.randn(runs, 3, dtype=F64, generator=draw)
    for lam, wanted in zip(pulls, found, strict=True):
        force = p * h * lam / (h + lam) if lam.sum() else p
        centre = (force * fit).sum(-1, keepdim=True) / force.sum()
        own = (h * fit + lam * centre) / (h + lam)
        got = (own - best).square()
        error = 4 * got.std(0) / math.sqrt(runs)
        assert ((got.mean(0) - wanted).abs() < error).all()


def test_the_averages_are_the_minimisers_of_the_coupled_problem() -> None:
    """With v = 0 for all but one client, its part of every model is what ``fit_coupled`` gives."""
    a, p = torch.tensor([0.5, 1.0, 3.0], dtype=F64), torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    lam = torch.tensor([0.4, 2.0, 1.0], dtype=F64)
    x = a.sqrt()[:, None, None]
    for k in range(3):
        c = torch.zeros(3, dtype=F64)
        c[k] = 1.0
        clients = Clients(x, x[..., 0] * c[:, None], torch.ones(3, 1, dtype=torch.bool), "linear")
        own = fit_coupled(clients, p, lam).own[:, 0]
        noise = risks(lam[None, :], c[:, None], a[:, None], p).noise[0, :, 0]
        torch.testing.assert_close(noise, own.square())


def test_the_ends_are_alone_and_the_pooled_minimiser() -> None:
    """λ = 0: v_i and no τ²; λ = ∞: b_k ∝ p_k h_k. A weight h/2 makes losses of them."""
    h = torch.tensor([[0.5, 2.0], [1.0, 1.0]], dtype=F64)
    v = torch.tensor([[0.3, 0.2], [0.1, 0.4]], dtype=F64)
    p = torch.tensor([0.25, 0.75], dtype=F64)
    found = risks(torch.tensor([0.0, math.inf], dtype=F64), v, h, p)
    torch.testing.assert_close(found.noise[0], v)
    assert (found.apart[0] == 0).all()
    b = p[:, None] * h / (p[:, None] * h).sum(0)
    torch.testing.assert_close(found.noise[1], (b.square() * v).sum(0).expand(2, 2))
    torch.testing.assert_close(found.apart[1, 0], (1 - b[0]).square() + b[1].square())
    own = torch.tensor([0.1, 0.2], dtype=F64)
    whole = found.total(own, h / 2)
    by_hand = ((found.noise + own[:, None] * found.apart) * h / 2).sum(-1)
    torch.testing.assert_close(whole, by_hand)


@pytest.mark.parametrize("tau2", [0.0, 0.01, 0.3])
def test_known_variances_of_effects_are_found(tau2: float) -> None:
    """Ten clients, 8 coordinates with unequal noise, 400 lanes at once."""
    draw = torch.Generator().manual_seed(1)
    v = torch.logspace(-2.5, -0.5, 80, dtype=F64).reshape(10, 8)[torch.randperm(10, generator=draw)]
    w = 2.0 + math.sqrt(tau2) * torch.randn(400, 10, 8, dtype=F64, generator=draw)
    w = w + v.sqrt() * torch.randn(400, 10, 8, dtype=F64, generator=draw)
    found = effects(w, v.expand(400, 10, 8))
    assert float(found.tau2.mean()) == pytest.approx(tau2, rel=0.1, abs=0.002)
    assert float(found.likeliest.median()) == pytest.approx(tau2, rel=0.2, abs=0.001)
    torch.testing.assert_close(found.weight.sum(-1), torch.ones(400, dtype=F64))
    one = effects(w[7], v)
    torch.testing.assert_close(one.tau2, found.tau2[7])
    torch.testing.assert_close(one.own, found.own[7])


def test_restricted_likelihood_of_equal_noise_is_the_unbiased_variance() -> None:
    """Equal v: the likeliest τ² is Σ(w − w̄)²/((m−1)p) − v, not Σ(w − w̄)²/(mp) − v."""
    w = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(5))
    found = effects(w, torch.full((4, 3), 0.1, dtype=F64), values=4001)
    wanted = float((w - w.mean(0)).square().sum() / 9) - 0.1
    assert float(found.likeliest) == pytest.approx(wanted, rel=5e-3)


def test_a_client_far_away_has_a_larger_variance_of_its_own() -> None:
    """Nine alike and one far: its τ_i² is the largest, by much."""
    w = torch.randn(10, 6, dtype=F64, generator=torch.Generator().manual_seed(2)) * 0.3
    w[4] += 3.0
    own = effects(w, torch.full((10, 6), 0.05, dtype=F64)).own
    others = torch.cat((own[:4], own[5:]))
    assert own[4] > 4 * others.max()


def test_the_grid_of_pulls() -> None:
    """From 0 to ∞, rising."""
    grid = default_pulls(torch.tensor([[0.1, 2.0]], dtype=F64), 30)
    assert grid[0] == 0
    assert grid[-1] == math.inf
    assert (grid.diff()[:-1] > 0).all()
    assert float(grid[1]) == pytest.approx(1e-6)
    assert float(grid[-2]) == pytest.approx(2e4)
