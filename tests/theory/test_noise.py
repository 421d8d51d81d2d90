"""The covariance of fits: closed forms and Monte Carlo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sartor.theory.exact_fits import fit_each
from sartor.theory.linear_models import Clients, gradients, hessians, look
from sartor.theory.noise import noise_of

F64 = torch.float64


def draw_linear(lanes: int, n: int = 40, d: int = 3, uneven: bool = False, seed: int = 0):
    """Draw lanes of one client with the same features; noise grows with x_1 if uneven."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, dtype=F64, generator=draw).expand(lanes, 1, n, d)
    noise = torch.randn(lanes, 1, n, dtype=F64, generator=draw)
    if uneven:
        noise = noise * (0.3 + x[..., 0].abs())
    y = x.sum(-1) + 2.0 * noise
    return Clients(x, y, torch.ones(lanes, 1, n, dtype=torch.bool), "linear")


def draw_logistic(lanes: int, n: int = 100, seed: int = 0) -> Clients:
    """Draw lanes of two clients, each with its own 3 features."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.tensor([[1.0, 0.0, 0.5], [-0.5, 1.0, 0.0]], dtype=F64)
    x = torch.randn(lanes, 2, n, 3, dtype=F64, generator=draw)
    chance = torch.rand(lanes, 2, n, dtype=F64, generator=draw)
    y = (chance < torch.sigmoid((x @ w[..., None])[..., 0])).to(F64)
    return Clients(x, y, torch.ones(lanes, 2, n, dtype=torch.bool), "logistic")


def test_linear_noise_is_the_textbook_covariance() -> None:
    """σ̂²(XᵀX)⁻¹ with RSS/(n − d); ρ̂² = σ̂² tr(XᵀX)/n; every parameter is used."""
    clients = draw_linear(1)
    w = fit_each(clients).w
    found = noise_of(clients, w)
    x, y = clients.x[0, 0], clients.y[0, 0]
    sigma2 = (y - x @ w[0, 0]).square().sum() / 37
    torch.testing.assert_close(found.covariance[0, 0], sigma2 * torch.linalg.inv(x.T @ x))
    torch.testing.assert_close(found.gradient2[0, 0], sigma2 * x.square().sum() / 40)
    torch.testing.assert_close(found.complexity[0, 0], 3 * sigma2)
    values = torch.linalg.eigvalsh(x.T @ x / 40)
    assert float(found.used) == pytest.approx(3.0)
    assert float(found.smallest) == pytest.approx(float(values[0]))
    assert float(found.largest) == pytest.approx(float(values[-1]))
    torch.testing.assert_close(found.curvature[0, 0], 1 / torch.linalg.inv(x.T @ x / 40).diagonal())


@pytest.mark.parametrize(
    ("uneven", "middle", "n"), [(False, None, 40), (False, "sandwich", 40), (True, "sandwich", 300)]
)
def test_the_mean_of_the_estimates_is_the_variance_of_the_fits(uneven, middle, n: int) -> None:
    """2000 draws of labels: E V̂ = Cov(ŵ) and doubt = Var(t̂)/t²; the sandwich is a little low."""
    clients = draw_linear(2000, n=n, uneven=uneven)
    w = fit_each(clients).w
    found = noise_of(clients, w, middle)
    true = torch.cov(w[:, 0].T)
    wide = 0.1 if middle is None else 0.15
    gap = (found.covariance.mean(0)[0] - true).norm() / true.norm()
    assert float(gap) < wide
    total = found.total[:, 0]
    relative = total.var() / total.mean().square()
    assert float(found.doubt.mean()) == pytest.approx(
        float(relative), rel=0.15 if middle is None else 0.5
    )


def test_the_model_is_wrong_where_noise_is_uneven() -> None:
    """What the sandwich is for: noise that grows with x_1 makes w_1 noisier than the model says."""
    clients = draw_linear(2000, uneven=True)
    w = fit_each(clients).w
    true = float(w[:, 0, 0].var())
    assert float(noise_of(clients, w).each[:, 0, 0].mean()) < 0.75 * true
    assert float(noise_of(clients, w, "sandwich").each[:, 0, 0].mean()) > 0.8 * true


def test_the_sandwich_by_hand() -> None:
    """H⁻¹GH⁻¹/n with G = Σ g gᵀ/(n − used), ridge included; used = tr H⁻¹(H − ν) < 3."""
    clients = replace(draw_logistic(1), ridge=0.2)
    w = fit_each(clients).w
    found = noise_of(clients, w)  # with ridge the sandwich is the default
    each, curve = gradients(clients, w)[0, 0], hessians(clients, look(clients, w))[0, 0]
    used = 3 - 0.2 * torch.linalg.inv(curve).trace()
    g = each.T @ each / (100 - used)
    bread = torch.linalg.inv(curve)
    torch.testing.assert_close(found.used[0, 0], used)
    torch.testing.assert_close(found.covariance[0, 0], bread @ g @ bread / 100)
    torch.testing.assert_close(found.gradient2[0, 0], g.trace())
    assert float(used) < 2.5


def test_undetermined_models_have_huge_noise_and_no_nan() -> None:
    """A feature that is 0 for a client: rank 2 of 3, smallest eigenvalue 0."""
    clients = draw_linear(1)
    x = clients.x.clone()
    x[..., 2] = 0.0
    clients = replace(clients, x=x)
    found = noise_of(clients, fit_each(clients).w)
    assert torch.isfinite(found.covariance).all()
    assert float(found.used) == pytest.approx(2.0, abs=1e-6)
    assert float(found.smallest) < 1e-12 * float(found.largest)
