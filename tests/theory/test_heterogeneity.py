"""The distance between the clients' best models: R1, R2 and R3, their errors and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.theory.exact_fits import fit_each, fit_pooled
from sartor.theory.heterogeneity import (
    SplitHalf,
    crossover,
    from_fits,
    from_global,
    from_halves,
    shares,
    split_half,
)
from sartor.theory.linear_models import Clients, hessians, look
from sartor.theory.noise import noise_of
from sartor.theory.sampling_error import leave_one_out, student

F64 = torch.float64


def fits(
    radius2: float, draw: np.random.Generator, m: int = 10, n: int = 50, d: int = 5
) -> tuple[Tensor, Tensor]:
    """Draw the means of two halves of n samples with unit noise, centres R apart."""
    centres = draw.normal(size=(m, d))
    centres -= centres.mean(0)
    centres *= (radius2 / (centres**2).sum(1).mean()) ** 0.5
    first, second = (centres + draw.normal(size=(m, d)) * (2 / n) ** 0.5 for _ in range(2))
    return torch.from_numpy(first), torch.from_numpy(second)


@pytest.mark.parametrize("radius2", [0.0, 0.02, 0.09, 0.3])
def test_the_radius_and_the_noise_are_unbiased(radius2: float) -> None:
    """Mean estimation, m = 10, n = 50, d = 5: E R̂² = R² and E t̂_i = d/n = 0.1."""
    draw, weights = np.random.default_rng(1), torch.full((10,), 0.1, dtype=torch.float64)
    group = torch.zeros(10, dtype=torch.int64)
    found = [split_half(*fits(radius2, draw), shares(weights, group)) for _ in range(1500)]
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
    found = split_half(a + shift, b + shift, shares(weights, group))
    for members in (slice(0, 4), slice(4, 10)):
        one = torch.zeros(len(group[members]), dtype=torch.int64)
        alone = split_half(a[members], b[members], shares(weights[members], one))
        torch.testing.assert_close(found.radius2[members], alone.radius2, rtol=0, atol=1e-9)


def test_the_crossover_of_groups() -> None:
    """One model iff R̂² < (1 − 1/m) · mean t̂ of the group; one alone never gains."""
    noise = torch.tensor([0.1, 0.1, 0.1, 0.1, 5.0], dtype=F64)
    share = shares(torch.ones(5, dtype=F64), torch.tensor([0, 0, 2, 2, 4]))
    radius2 = torch.tensor([0.049, 0.049, 0.051, 0.051, 0.0], dtype=F64)
    found = crossover(SplitHalf(radius2, noise), share)
    assert (found < 0).tolist() == [True, True, False, False, False]
    a, b = torch.randn(2, 5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert float(crossover(split_half(a, b, share), share)[4]) == 0.0


def test_the_crossover_is_that_of_the_mean_squared_errors() -> None:
    """Mean estimation, d = 5, m = 10, n = 50: R² = 0.09; and for unequal weights and noise."""
    even, noise = torch.full((10,), 0.1, dtype=F64), torch.full((10,), 0.1, dtype=F64)
    assert float(crossover(SplitHalf(torch.tensor(0.09), noise), even)) == pytest.approx(
        0, abs=1e-8
    )
    draw = torch.Generator().manual_seed(3)
    p, t = torch.tensor([0.2, 0.3, 0.5], dtype=F64), torch.tensor([0.5, 0.1, 0.3], dtype=F64)
    best = torch.tensor([[0.3], [-0.2], [0.1]], dtype=F64)
    w = best + t.sqrt()[:, None] * torch.randn(200_000, 3, 1, dtype=F64, generator=draw)
    alone = (p * (w - best).square().sum(-1)).sum(-1)
    shared = (p * ((p[:, None] * w).sum(1, keepdim=True) - best).square().sum(-1)).sum(-1)
    r2 = (p * (best - (p[:, None] * best).sum(0)).square().sum(-1)).sum()
    gap = float(crossover(SplitHalf(r2, t), p))
    error = 4 * float((shared - alone).std()) / math.sqrt(200_000)
    assert float((shared - alone).mean()) == pytest.approx(gap, abs=error)


def test_shares_sum_to_one_inside_the_group() -> None:
    """Row i: the weights of i's group over their sum."""
    found = shares(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 2]))
    assert found.tolist() == [[0.25, 0.75, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]


# ---- the simulated table: linear regression, 10 clients, n_i from 60 to 120, d = 5 ---------------


def simulated(radius2: float, repeats: int = 400, stretch: float = 1.0):
    """Draw federations whose clients have Σp‖w_i* − w̄*‖² = R² exactly; p_i = n_i/N."""
    draw = torch.Generator().manual_seed(int(1000 * radius2))
    sizes = torch.linspace(60, 120, 10).round().long()
    p = sizes.to(F64) / sizes.sum()
    mask = (torch.arange(120) < sizes[:, None]).expand(repeats, 10, 120)
    x = torch.randn(repeats, 10, 120, 5, dtype=F64, generator=draw) * mask[..., None]
    x = x * torch.logspace(0, math.log10(stretch), 10, dtype=F64)[:, None, None]
    away = torch.randn(10, 5, dtype=F64, generator=draw)
    away = away - (p[:, None] * away).sum(0)
    best = 1.0 + away * (radius2 / (p * away.square().sum(-1)).sum()).sqrt()
    y = (x @ best[..., None])[..., 0] + torch.randn(mask.shape, dtype=F64, generator=draw)
    return Clients(x, y * mask, mask, "linear"), p.expand(repeats, 10), best


def estimates(clients: Clients, p: Tensor):
    """Return R1, R2 and R3."""
    w = fit_each(clients).w
    noise = noise_of(clients, w)
    curve = hessians(clients, look(clients, w))
    order = torch.arange(120) % 2 == 0
    first, second = (fit_each(clients.where(part)).w for part in (order, ~order))
    pooled = fit_pooled(clients, p).w
    return {
        "R1": from_fits(w, p, noise.covariance, noise.doubt),
        "R2": from_halves(first, second, p),
        "R3": from_global(w, pooled, p, noise.covariance, curve),
    }


@pytest.mark.parametrize("radius2", [0.0, 0.01, 0.09, 1.0])
def test_the_simulated_table(radius2: float) -> None:
    """Each estimator's mean is the truth, its s.d. is what it says, its intervals cover.

    R3 measures from the global fit, a little more than R² where Hessians differ by chance.
    """
    clients, p, best = simulated(radius2)
    w = fit_each(clients).w
    raw = (p * (w - (p[..., None] * w).sum(1, keepdim=True)).square().sum(-1)).sum(-1).mean()
    assert float(raw) > radius2 + 0.04
    apart2 = (best - (p[0, :, None] * best).sum(0)).square().sum(-1)
    for name, found in estimates(clients, p).items():
        wide = 4 * float(found.radius2.std()) / math.sqrt(400)
        extra = 0.008 * radius2 if name == "R3" else 0.0
        assert float(found.radius2.mean()) == pytest.approx(radius2 + extra / 2, abs=wide + extra)
        variance = float(found.radius2.var())
        said = float((found.floor + found.growth * radius2).mean())
        assert said == pytest.approx(variance, rel=0.3), name
        low, high = found.interval()
        assert 0.895 < float(((low <= radius2) & (radius2 <= high)).double().mean()) < 0.992, name
        gaps = (found.distances2.mean(0) - apart2).abs()
        assert (gaps < 4.5 * found.distances2.std(0) / math.sqrt(400) + 2 * extra).all(), name
        sizes = torch.linspace(60, 120, 10).round()  # E tr(XᵀX)⁻¹ = d/(n − d − 1), for halves too
        wanted = 5 / (sizes - 6) if name != "R2" else 2.5 / (sizes / 2 - 6)
        assert found.noise.mean(0).tolist() == pytest.approx(wanted.tolist(), rel=0.2), name


def test_the_halves_have_the_larger_error() -> None:
    """At R = 0 the variance of R2 is twice that of R1: s.d. 0.018 against 0.013."""
    clients, p, _ = simulated(0.0)
    found = estimates(clients, p)
    assert float(found["R1"].radius2.std()) == pytest.approx(0.013, rel=0.12)
    assert float(found["R2"].radius2.std()) == pytest.approx(0.018, rel=0.15)
    assert float(found["R2"].floor.mean() / found["R1"].floor.mean()) == pytest.approx(2, rel=0.25)


def test_the_global_fit_with_unequal_hessians() -> None:
    """Features of clients differ fourfold in scale: Σp‖w_i* − w_GT*‖² > R² is found."""
    clients, p, best = simulated(0.09, repeats=400, stretch=4.0)
    found = estimates(clients, p)["R3"]
    h = p[0, :, None] * torch.logspace(0, math.log10(4.0), 10, dtype=F64)[:, None].square()
    centre = (h * best).sum(0) / h.sum(0)  # E H_i is a multiple of I
    apart2 = (best - centre).square().sum(-1)
    truth = float((p[0] * apart2).sum())
    assert truth > 0.094
    error = 4 * float(found.radius2.std()) / math.sqrt(400) + 0.003  # H̄ itself varies
    assert float(found.radius2.mean()) == pytest.approx(truth, abs=error)
    said = float((found.floor + found.growth * truth).mean())
    assert said == pytest.approx(float(found.radius2.var()), rel=0.3)


def test_the_variance_of_the_global_form_is_exact() -> None:
    """Normal fits with known V_i and very unequal H_i: mean and variance of 20 000 draws."""
    draw = torch.Generator().manual_seed(8)
    best, p = torch.randn(3, 2, dtype=F64, generator=draw), torch.tensor([0.2, 0.3, 0.5]).to(F64)
    curve = torch.diag_embed(torch.tensor([[9.0, 0.1], [1.0, 1.0], [0.2, 4.0]], dtype=F64))
    roots = 0.2 * torch.randn(3, 2, 2, dtype=F64, generator=draw)
    w = best + (roots @ torch.randn(20_000, 3, 2, 1, dtype=F64, generator=draw))[..., 0]
    a = torch.linalg.solve((p[:, None, None] * curve).sum(0), p[:, None, None] * curve)
    pooled = (a @ w[..., None]).sum(-3)[..., 0]
    shape = (20_000, 3, 2, 2)
    covariance = (roots @ roots.mT).expand(shape)
    found = from_global(w, pooled, p.expand(20_000, 3), covariance, curve.expand(shape))
    truth = (p * (best - (a @ best[..., None]).sum(0)[:, 0]).square().sum(-1)).sum()
    assert float(found.radius2.mean()) == pytest.approx(float(truth), abs=0.02 * float(truth))
    said = float((found.floor + found.growth * found.radius2.clamp(min=0.0)).mean())
    assert said == pytest.approx(float(found.radius2.var()), rel=0.06)


def test_the_global_fit_is_the_mean_where_hessians_agree() -> None:
    """(R3) = (R1) in every number if all H_i are the same."""
    draw = torch.Generator().manual_seed(2)
    w, p = torch.randn(6, 3, dtype=F64, generator=draw), torch.arange(1, 7, dtype=F64) / 21
    roots = torch.randn(6, 3, 3, dtype=F64, generator=draw)
    covariance = roots @ roots.mT / 10
    curve = (torch.eye(3, dtype=F64) + 0.3).expand(6, 3, 3)
    one = from_fits(w, p, covariance)
    other = from_global(w, (p[:, None] * w).sum(0), p, covariance, curve)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right)


def test_groups_of_one_federation_are_the_halves() -> None:
    """``split_half`` with one group is ``from_halves``; lanes are single estimates."""
    a, b = torch.randn(2, 3, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(4))
    p = torch.arange(1, 7, dtype=F64) / 21
    found = from_halves(a, b, p.expand(3, 6))
    one = split_half(a[1], b[1], shares(p, torch.zeros(6)))
    torch.testing.assert_close(one.radius2, found.radius2[1].expand(6))
    torch.testing.assert_close(one.noise, found.noise[1])
    for left, right in zip(from_halves(a[1], b[1], p), found, strict=True):
        torch.testing.assert_close(left, right[1])


def test_the_jackknife_by_hand() -> None:
    """The mean's is s/√m; that of R̂² is by leaving clients out of the arrays themselves."""
    x = torch.tensor([1.0, 4.0, 2.0, 7.0], dtype=F64)
    found = leave_one_out(lambda p: (p * x).sum(-1), torch.full((4,), 0.25, dtype=F64))
    torch.testing.assert_close(found, x.std() / 2)
    draw = torch.Generator().manual_seed(6)
    w, p = torch.randn(5, 2, dtype=F64, generator=draw), torch.arange(1, 6, dtype=F64) / 15
    v = torch.eye(2, dtype=F64).expand(5, 2, 2) * 0.1
    left = []
    for k in range(5):
        keep = torch.arange(5) != k
        left.append(from_fits(w[keep], p[keep] / p[keep].sum(), v[keep]).radius2)
    values = torch.stack(left)
    wanted = (4 / 5 * (values - values.mean()).square().sum()).sqrt()
    torch.testing.assert_close(from_fits(w, p, v).jackknife, wanted)


def test_intervals() -> None:
    """The score interval's ends solve its equation; Student's quantiles are the tables'."""
    draw = torch.Generator().manual_seed(7)
    w, p = torch.randn(5, 2, dtype=F64, generator=draw), torch.full((5,), 0.2, dtype=F64)
    found = from_fits(w, p, torch.eye(2, dtype=F64).expand(5, 2, 2) * 0.05)
    for end in found.interval(1.5):
        left = (found.radius2 - end).square()
        torch.testing.assert_close(left, 1.5**2 * (found.floor + found.growth * end))
    low, high = found.interval_anew()
    spread = found.radius2 + found.subtracted
    assert float(found.subtracted) == pytest.approx(0.8 * 0.1)
    ends = torch.stack((low, high)) + found.subtracted
    torch.testing.assert_close(ends.prod().sqrt(), spread)
    t = float((ends[1] / spread).log() * spread / found.jackknife)
    assert t == pytest.approx(2.776, abs=2e-3)
    tables = {1: 12.706, 2: 4.303, 9: 2.262, 30: 2.042}
    for degrees, wanted in tables.items():
        assert student(0.95, degrees) == pytest.approx(wanted, rel=1e-3)


def test_what_the_bias_of_fits_adds_is_taken_off() -> None:
    """R̂² falls by Σ p_i s_i and d̂_i² by s_i; the noise and the variance stay."""
    draw = torch.Generator().manual_seed(4)
    w = torch.randn(5, 3, dtype=F64, generator=draw)
    p = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=F64)
    v = 0.1 * torch.eye(3, dtype=F64).expand(5, 3, 3)
    longer = torch.tensor([0.1, -0.05, 0.2, 0.0, 0.3], dtype=F64)
    plain, found = from_fits(w, p, v), from_fits(w, p, v, stretch=longer)
    torch.testing.assert_close(plain.radius2 - found.radius2, (p * longer).sum())
    torch.testing.assert_close(plain.distances2 - found.distances2, longer)
    torch.testing.assert_close(plain.floor, found.floor)
    assert float(found.jackknife) != float(plain.jackknife)
