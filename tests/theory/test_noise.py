"""The covariance of fits: closed forms, Monte Carlo, calibration by drawn labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from sartor import rng
from sartor.theory.linear_models import Clients, basis, fit_each, gradients, hessians, look
from sartor.theory.calibration import calibrated, draw_labels
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
    """Draw lanes of two clients with 3 features of their own."""
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


def test_calibration_is_the_ratio_that_drawn_labels_show() -> None:
    """Var of fits to drawn labels over the mean of what ``noise_of`` says of them, by a loop."""
    clients = draw_logistic(1, n=40)
    w = fit_each(clients, bias_reduced=True).w
    plain = noise_of(clients, w)
    fits, said = [], []
    for k in range(6):
        labels = draw_labels(clients, w, rng.fold(rng.key(3), "labels", k))
        fits.append(fit_each(replace(clients, y=labels), bias_reduced=True).w)
        said.append(noise_of(replace(clients, y=labels), fits[-1]).total)
    ratio = torch.stack(fits).var(0).sum(-1) / torch.stack(said).mean(0)
    found = calibrated(clients, w, plain, bias_reduced=True, draws=6, seed=3)
    torch.testing.assert_close(found.total, plain.total * ratio, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.complexity, plain.complexity * ratio, rtol=1e-3, atol=0)
    least = 2 / 3 / 5  # 2 tr V²/t²/(draws − 1) for a round V; more if it is not
    assert least <= float(found.doubt.mean()) < 2 * least


def test_calibrated_noise_is_the_variance_of_the_fits() -> None:
    """Logistic, n = 40, d = 3, 800 lanes: within Monte Carlo error and what n = 40 leaves."""
    clients = draw_logistic(800, n=40)
    w = fit_each(clients, bias_reduced=True, tolerance=1e-6).w
    found = calibrated(clients, w, noise_of(clients, w), bias_reduced=True, draws=6)
    assert float(found.total.mean(0).sum() / w.var(0).sum()) == pytest.approx(1.0, abs=0.08)


def test_calibration_knows_neither_lanes_nor_padding() -> None:
    """A federation alone, beside others, and with more padding: the same."""
    clients = draw_logistic(3)
    wider = replace(
        clients,
        x=F.pad(clients.x, (0, 0, 0, 6), value=5.0),
        y=F.pad(clients.y, (0, 6)),
        mask=F.pad(clients.mask, (0, 6), value=False),
    )

    def total(part: Clients):
        w = fit_each(part, bias_reduced=True).w
        return calibrated(part, w, noise_of(part, w), bias_reduced=True, draws=3).total

    whole = total(clients)
    torch.testing.assert_close(total(clients.take(slice(1, 2)))[0], whole[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(total(wider), whole, rtol=1e-4, atol=0)


def test_linear_models_need_no_calibration() -> None:
    """The very same numbers come back."""
    clients = draw_linear(2)
    found = noise_of(clients, fit_each(clients).w)
    assert calibrated(clients, fit_each(clients).w, found, bias_reduced=False) is found


def test_labels_are_drawn_with_the_chances_of_the_model() -> None:
    """Logistic and softmax: frequencies over 20 000 samples; clients have numbers of their own."""
    x, mask = torch.ones(2, 20_000, 1, dtype=F64), torch.ones(2, 20_000, dtype=torch.bool)
    two = Clients(x, torch.zeros(2, 20_000, dtype=F64), mask, "logistic")
    drawn = draw_labels(two, torch.full((2, 1), 0.8, dtype=F64), rng.key(1))
    assert drawn.mean(1).tolist() == pytest.approx([0.68997] * 2, abs=0.013)
    assert abs(float(torch.corrcoef(drawn)[0, 1])) < 0.03
    three = Clients(x, torch.zeros(2, 20_000, dtype=torch.int64), mask, "softmax", 3)
    w = torch.tensor([[0.5, -1.0]] * 2, dtype=F64)
    drawn = draw_labels(three, w, rng.key(1))
    chance = torch.softmax(basis(3) @ w[0], 0)
    for c in range(3):
        assert float((drawn == c).double().mean()) == pytest.approx(float(chance[c]), abs=0.012)


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
