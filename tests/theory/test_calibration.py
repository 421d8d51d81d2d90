"""The noise of fits by simulated labels: against a loop and Monte Carlo, and its invariances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import rng
from sartor.theory import calibration, firth
from sartor.theory.calibration import calibrated, draw_labels, drawings, drawn_in
from sartor.theory.exact_fits import fit_each
from sartor.theory.heterogeneity import from_fits
from sartor.theory.linear_models import Clients, basis, hessians, look
from sartor.theory.noise import noise_of

F64 = torch.float64
APART = torch.tensor([[1.0, 0.0, 0.5], [-0.5, 1.0, 0.0]], dtype=F64)


def draw_logistic(lanes: int, n: int = 100, seed: int = 0, w: Tensor = APART) -> Clients:
    """Draw lanes of clients, each with its own features."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(lanes, len(w), n, w.shape[-1], dtype=F64, generator=draw)
    chance = torch.rand(lanes, len(w), n, dtype=F64, generator=draw)
    y = (chance < torch.sigmoid((x @ w[..., None])[..., 0])).to(F64)
    return Clients(x, y, torch.ones(lanes, len(w), n, dtype=torch.bool), "logistic")


def test_models_are_drawn_in_to_the_spread_that_is_left() -> None:
    """Fits ±2 around (1, 0), weights ½: spread 4, noise 2 · ½ · ½ · t; the mean stays."""
    w = torch.tensor([[3.0, 0.0], [-1.0, 0.0]], dtype=F64)
    half = torch.full((2,), 0.5, dtype=F64)
    found = drawn_in(w, torch.tensor([5.0, 7.0], dtype=F64), half)  # R̂² = 4 − 3 = 1
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=F64))
    all_noise = drawn_in(w, torch.tensor([9.0, 9.0], dtype=F64), half)
    torch.testing.assert_close(all_noise, torch.tensor([[1.0, 0.0]] * 2, dtype=F64))
    uneven = drawn_in(w, torch.zeros(2, dtype=F64), torch.tensor([0.3, 0.7], dtype=F64))
    torch.testing.assert_close(uneven, w)
    same = torch.ones(2, 2, dtype=F64)
    torch.testing.assert_close(drawn_in(same, torch.zeros(2, dtype=F64), half), same)


def test_calibration_is_what_drawn_labels_show() -> None:
    """By a loop: labels from w̃, their fits, and the linear fits that are taken off."""
    clients = draw_logistic(1, n=40)
    w = fit_each(clients, bias_reduced=True).w
    plain, p = noise_of(clients, w), torch.tensor([[0.4, 0.6]], dtype=F64)
    at = drawn_in(w, plain.total, p)
    inverse = torch.linalg.inv(hessians(clients, look(clients, at)))
    fits, lines, said = [], [], []
    for k in range(6):
        labels = draw_labels(clients, at, rng.fold(rng.key(3), "labels", k))
        other = replace(clients, y=labels)
        fits.append(fit_each(other, bias_reduced=True).w)
        lines.append(at - (inverse @ look(other, at).slope[..., None])[..., 0])
        said.append(noise_of(other, fits[-1]).total)
    fit, line = torch.stack(fits), torch.stack(lines)
    exact = inverse.diagonal(dim1=-2, dim2=-1).sum(-1) / 40
    spread = exact + fit.var(0).sum(-1) - line.var(0).sum(-1)
    ratio = spread / torch.stack(said).mean(0)
    found = calibrated(clients, w, plain, weights=p, bias_reduced=True, draws=6, seed=3)
    torch.testing.assert_close(found.total, plain.total * ratio, rtol=2e-3, atol=0)
    torch.testing.assert_close(found.complexity, plain.complexity * ratio, rtol=2e-3, atol=0)
    bias = (fit - line).mean(0)
    gaps = at - (p[..., None] * w).sum(-2, keepdim=True)
    longer = 2 * (gaps * (bias - (p[..., None] * bias).sum(-2, keepdim=True))).sum(-1)
    torch.testing.assert_close(found.stretch, longer, rtol=0.02, atol=1e-3)
    apart = (fit - fit.mean(0)).square().sum(-1) - (line - line.mean(0)).square().sum(-1)
    doubt = apart.var(0) * 6 / 25 / spread.square()
    torch.testing.assert_close(found.doubt, doubt, rtol=0.02, atol=0)


def test_linear_fits_leave_little_to_chance() -> None:
    """Twelve drawings scatter less with them than without: the variance of T_i over seeds."""
    clients = draw_logistic(1, n=100)
    at = APART[None]
    found = [drawings(clients, at, bias_reduced=True, draws=12, seed=s) for s in range(60)]
    scatter = torch.stack([d.spread for d in found]).var(0) / found[0].spread.square()
    without = 2.0 / 3.0 / 11.0  # of the variance of twelve round normal fits in three dimensions
    assert float(scatter.max()) < 0.5 * without
    doubt = torch.stack([d.doubt for d in found]).mean(0)
    assert float((doubt / scatter).mean()) == pytest.approx(1.0, abs=0.45)


def test_drawings_give_the_variance_of_the_fits() -> None:
    """Logistic, n = 40, d = 3, drawn from the true models: T_i and b_i of 1500 fits."""
    clients = draw_logistic(1500, n=40)
    w = fit_each(clients, bias_reduced=True, tolerance=1e-6).w
    found = drawings(clients, APART.expand_as(w), bias_reduced=True, draws=4)
    wanted = w.var(0).sum(-1)
    torch.testing.assert_close(found.spread.mean(0), wanted, rtol=0.06, atol=0)
    plain = noise_of(clients, APART.expand_as(w)).total.mean(0)
    assert float((plain / wanted).max()) < 0.95  # the formula at the truth is too small


@pytest.mark.parametrize(("radius2", "limit"), [(0.0, 0.014), (1.0, 0.06)])
def test_the_radius_is_unbiased_where_samples_are_few(radius2: float, limit: float) -> None:
    """With n = 40, d = 3, six clients, 600 federations; the plain formula misses at R = 0."""
    draw = torch.Generator().manual_seed(5)
    away = torch.randn(6, 3, dtype=F64, generator=draw)
    away = away - away.mean(0)
    away = away * (radius2 / away.square().sum(-1).mean()).sqrt()
    best = away + 0.6
    clients = draw_logistic(600, n=40, seed=6, w=best)
    p = torch.full((600, 6), 1.0 / 6.0, dtype=F64)
    w = fit_each(clients, bias_reduced=True, tolerance=1e-6).w
    plain = noise_of(clients, w)
    noise = calibrated(clients, w, plain, weights=p, bias_reduced=True, draws=8)
    found = from_fits(w, p, noise.covariance, noise.doubt, noise.stretch).radius2
    inverse = torch.linalg.inv(hessians(clients, look(clients, best.expand_as(w))))
    slope = look(clients, best.expand_as(w)).slope
    line = best - (inverse @ slope[..., None])[..., 0]
    control = from_fits(line, p, inverse / 40.0).radius2 - radius2
    share = torch.cov(torch.stack((found, control)))[0, 1] / control.var()
    left = found - radius2 - share * control
    assert abs(float(left.mean())) < limit
    if radius2 == 0.0:
        rough = from_fits(w, p, plain.covariance).radius2 - share * control
        assert float(rough.mean()) < -0.018


def test_fits_that_do_not_arrive_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = draw_logistic(2, n=30)
    at = fit_each(clients, bias_reduced=True).w
    usual = drawings(clients, at, bias_reduced=True, draws=5)
    monkeypatch.setattr(firth, "STEPS", 3)
    monkeypatch.setattr(firth, "NEAR", 1e-7)
    late = drawings(clients, at, bias_reduced=True, draws=5)
    torch.testing.assert_close(late.spread, usual.spread, rtol=1e-3, atol=0)
    torch.testing.assert_close(late.said, usual.said, rtol=1e-3, atol=0)


def test_quick_fits_are_those_of_fit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of two clients, too, and with padding that is not 0."""
    clients = draw_logistic(3, n=60)
    keep = torch.arange(60) < torch.tensor([60, 45])[:, None]
    clients = replace(clients, mask=keep.expand(3, 2, 60))
    at = fit_each(clients, bias_reduced=True).w
    quick = drawings(clients, at, bias_reduced=True, draws=4)

    def one_by_one(clients: Clients, start: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return calibration._one_by_one(clients, at, labels, None, True)

    monkeypatch.setattr(calibration, "_quick", one_by_one)
    slow = drawings(clients, at, bias_reduced=True, draws=4)
    for one, other in zip(quick, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-3, atol=1e-4)
    monkeypatch.undo()
    monkeypatch.setattr(firth, "CACHE", 2 * 60 * (4 + 9))
    blocks = drawings(clients, at, bias_reduced=True, draws=4)
    torch.testing.assert_close(blocks.spread, quick.spread, rtol=1e-3, atol=0)


def refitted(clients: Clients, w: Tensor, lanes: int) -> Tensor:
    """Return fits to labels that are drawn from given models, a lane each."""
    draw = torch.Generator().manual_seed(8)
    scores = clients.x @ w.reshape(*w.shape[:-1], -1, clients.outputs)
    chance = torch.rand(lanes, *scores.shape[1:-1], dtype=F64, generator=draw)
    if clients.family == "softmax":
        shares = torch.softmax(scores @ basis(clients.num_classes).T, -1).cumsum(-1)
        y = (shares < chance[..., None]).sum(-1)
    else:
        y = (chance < torch.sigmoid(scores[..., 0])).to(F64)
    many = replace(clients, y=y, mask=clients.mask.expand(lanes, -1, -1))
    return fit_each(many, start=w, tolerance=1e-5).w


def test_softmax_fits_are_calibrated() -> None:
    """Three classes, n = 150: T_i is that of 800 fits; the formula at the truth is too small."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 150, 2, dtype=F64, generator=draw)
    w = torch.tensor([[[1.0, 0.0, 0.5, -1.0], [0.0, 0.5, 1.0, 0.0]]], dtype=F64)
    mask = torch.ones(1, 2, 150, dtype=torch.bool)
    clients = Clients(x, torch.zeros(1, 2, 150, dtype=torch.int64), mask, "softmax", 3)
    found = drawings(clients, w, bias_reduced=False, draws=60)
    true = refitted(clients, w, 800).var(0).sum(-1)
    assert float(found.spread.sum() / true.sum()) == pytest.approx(1.0, abs=0.065)
    assert float(noise_of(clients, w).total.sum() / true.sum()) < 0.925


def test_ridge_is_calibrated_too() -> None:
    """T_i and the bias of ridge fits: by 800 fits; ridge shortens them."""
    clients = replace(draw_logistic(1, n=80), ridge=0.2)
    found = drawings(clients, APART[None], bias_reduced=False, draws=40)
    fits = refitted(clients, APART[None], 800)
    torch.testing.assert_close(found.spread[0], fits.var(0).sum(-1), rtol=0.1, atol=0)
    torch.testing.assert_close(found.drift[0], fits.mean(0) - APART, rtol=0, atol=0.03)
    assert float(found.drift[0, 0, 0]) < -0.3


def test_calibration_knows_neither_lanes_nor_padding() -> None:
    """A federation gives the same alone, in a batch with others, and with more padding."""
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
    torch.testing.assert_close(total(clients.take(slice(1, 2)))[0], whole[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(total(wider), whole, rtol=1e-3, atol=0)


def test_calibration_follows_a_client_wherever_it_is_listed() -> None:
    """Clients in another order and samples in another order: fingerprints stay with them."""
    clients = draw_logistic(2)
    prints = calibration.fingerprints(clients)
    assert len(prints.unique()) == 4
    turned = replace(clients, x=clients.x.flip(-3), y=clients.y.flip(-2))
    assert torch.equal(calibration.fingerprints(turned), prints.flip(-1))
    mixed = replace(clients, x=clients.x.flip(-2), y=clients.y.flip(-1))
    assert torch.equal(calibration.fingerprints(mixed), prints)
    other = replace(clients, y=clients.y.flip(-1))
    assert not bool((calibration.fingerprints(other) == prints).any())
    w = fit_each(clients, bias_reduced=True).w
    found = calibrated(clients, w, noise_of(clients, w), bias_reduced=True, draws=3)
    again = fit_each(turned, bias_reduced=True).w
    moved = calibrated(turned, again, noise_of(turned, again), bias_reduced=True, draws=3)
    torch.testing.assert_close(moved.total.flip(-1), found.total, rtol=1e-3, atol=0)


def test_linear_models_need_no_calibration() -> None:
    """The very same numbers come back."""
    clients = replace(draw_logistic(2), family="linear")
    w = fit_each(clients).w
    found = noise_of(clients, w)
    assert calibrated(clients, w, found, bias_reduced=False) is found
    assert float(found.stretch.abs().max()) == 0.0


def test_labels_are_drawn_with_the_chances_of_the_model() -> None:
    """Logistic and softmax: frequencies over 20,000 samples; each client has its own numbers."""
    x, mask = torch.ones(2, 20_000, 1, dtype=F64), torch.ones(2, 20_000, dtype=torch.bool)
    x[1, :1000] = 1.0 + 1e-9  # numbers are drawn by what a client has
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
