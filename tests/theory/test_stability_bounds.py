"""Federated stability: bounds, and exact shifts where the loss is quadratic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.theory import stability_bounds as sb


def fits(z: list[Tensor], p: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Return w̃_g and w̃_i for the loss ½‖w − z‖²: the pull towards the weighted mean of means."""
    means = torch.stack([part.mean(0) for part in z])
    shared = p @ means
    share = 1 / (1 + lam)
    return shared, share * means + (1 - share) * shared


def test_the_shifts_of_mean_estimation() -> None:
    """With n = 10, ‖z − z′‖ = 1, p_i = 1/5: s = 0.1 (LocalTrain), 0.02 (FedAvg), 0.036 (λ = 4)."""
    draw = torch.Generator().manual_seed(0)
    z = [torch.randn(10, 3, dtype=torch.float64, generator=draw) for _ in range(5)]
    p = torch.full((5,), 0.2, dtype=torch.float64)
    changed = [part.clone() for part in z]
    changed[1][4, 0] += 1.0
    for lam, wanted in ((0.0, 0.1), (math.inf, 0.02), (4.0, 0.036)):
        found = float((fits(z, p, lam)[1] - fits(changed, p, lam)[1])[1].norm())
        assert found == pytest.approx(wanted)
        assert float(sb.mean_shift(1.0, 10, 0.2, lam)) == pytest.approx(wanted)


def test_the_first_order_shift_is_exact_on_quadratics() -> None:
    """½(w − z)ᵀA(w − z) + (λ/2)‖w − c‖²: (A + λI)⁻¹ A(z − z′)/n; λ along an axis."""
    draw = torch.Generator().manual_seed(1)
    root = torch.randn(3, 3, dtype=torch.float64, generator=draw)
    bend, z = root @ root.T, torch.randn(8, 3, dtype=torch.float64, generator=draw)
    changed, centre = z.clone(), torch.ones(3, dtype=torch.float64)
    changed[2] = torch.tensor([1.0, -2.0, 0.5])
    lams, eye = torch.tensor([0.0, 0.5, 20.0], dtype=torch.float64), torch.eye(3)

    def fit(z: Tensor, lam: Tensor) -> Tensor:
        return torch.linalg.solve(bend + lam * eye, bend @ z.mean(0) + lam * centre)

    wanted = torch.stack([(fit(z, lam) - fit(changed, lam)).norm() for lam in lams])
    change = bend @ (changed[2] - z[2])
    torch.testing.assert_close(sb.model_shift(change, bend, 8, lams), wanted)
    assert float(sb.model_shift(change, bend, 8)) == pytest.approx(float(wanted[0]))


def test_the_bounds_in_numbers() -> None:
    """β = 2, μ = ½, B = 3: 384/n, times p for FedAvg; 960/(n(μ+λ)) and what training left."""
    assert float(sb.local_stability(100, 2.0, 0.5, 3.0)) == pytest.approx(3.84)
    assert float(sb.fedavg_stability(100, 0.25, 2.0, 0.5, 3.0)) == pytest.approx(0.96)
    assert float(sb.fedprox_stability(100, 1.5, 2.0, 0.5, 3.0)) == pytest.approx(4.8)
    assert float(sb.fedprox_stability(100, 1.5, 2.0, 0.5, 3.0, 0.2)) == pytest.approx(5.0)
    assert float(sb.loss_shift(0.1, 2.0, 3.0)) == pytest.approx(0.1 * 12**0.5 + 0.01)


def test_the_slopes_of_the_bounds() -> None:
    """−1 in n_i; FedAvg linear in p_i; FedProx falls in λ, as 1/λ in the end; so do the shifts."""
    n = torch.logspace(1, 4, 4, dtype=torch.float64)
    p = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    kind = (2.0, 0.5, 3.0)

    def slope(x: Tensor, y: Tensor) -> np.ndarray:
        return (y.log().diff() / x.log().diff()).numpy()

    for found in (
        sb.local_stability(n, *kind),
        sb.fedavg_stability(n, 0.1, *kind),
        sb.fedprox_stability(n, 1.0, *kind),
        sb.mean_shift(1.0, n, 0.1, 2.0),
    ):
        np.testing.assert_allclose(slope(n, found), -1.0, atol=1e-12)
    np.testing.assert_allclose(slope(p, sb.fedavg_stability(100, p, *kind)), 1.0, atol=1e-12)
    lam = torch.logspace(-3, 6, 19, dtype=torch.float64)
    assert (sb.fedprox_stability(100, lam, *kind).diff() < 0).all()
    np.testing.assert_allclose(
        slope(lam, sb.fedprox_stability(100, lam, *kind))[-2:], -1.0, atol=1e-4
    )
    shifts = sb.mean_shift(1.0, 100, 0.1, lam)
    assert (shifts.diff() < 0).all()
    assert 0.001 < float(shifts[-1]) < float(shifts[0]) < 0.01


@pytest.mark.parametrize("lam", [0.0, 0.05, 0.3, math.inf])
def test_losses_change_within_the_bounds(lam: float) -> None:
    """Records in the unit ball, ½‖w − z‖²: β = μ = 1, B = 2. Lemma 26, and γ_i of each method."""
    draw = torch.Generator().manual_seed(5)

    def ball(*shape: int) -> Tensor:
        z = torch.randn(*shape, 2, dtype=torch.float64, generator=draw)
        return z / z.norm(dim=-1, keepdim=True).clamp(min=1.0)

    z, p = [ball(10) for _ in range(5)], torch.full((5,), 0.2, dtype=torch.float64)
    looks, worst = ball(500), 0.0
    for _ in range(20):
        changed = [part.clone() for part in z]
        changed[0][3] = ball(1)[0]
        before, after = (fits(part, p, lam)[1][0] for part in (z, changed))
        gap = (0.5 * (before - looks).square() - 0.5 * (after - looks).square()).sum(1).abs().max()
        shift = (before - after).norm()
        assert float(gap) <= float(sb.loss_shift(shift, 1.0, 2.0)) + 1e-12
        worst = max(worst, float(gap))
    assert worst > 0.0
    if lam == math.inf:
        bound = sb.fedavg_stability(10, 0.2, 1.0, 1.0, 2.0)
    elif lam == 0.0:
        bound = sb.local_stability(10, 1.0, 1.0, 2.0)
    else:
        assert bool(sb.fedprox_conditions(10, 0.2, lam, 1.0, 1.0))
        bound = sb.fedprox_stability(10, lam, 1.0, 1.0, 2.0)
    assert worst <= float(bound)


def test_the_conditions_of_fedprox() -> None:
    """Both n_i >= 4β/μ and p_i λ <= μ/16, client by client."""
    n, p = torch.tensor([15, 16, 16]), torch.tensor([0.1, 0.1, 0.2], dtype=torch.float64)
    found = sb.fedprox_conditions(n, p, 0.3, 2.0, 0.5)
    assert found.tolist() == [False, True, False]


def test_proposition_10() -> None:
    """Both bounds by hand, with and without what training left."""
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    gamma = torch.tensor([0.4, 0.2], dtype=torch.float64)
    assert float(sb.average_risk_bound(p, gamma, 3.0, 0.04, 0.1)) == pytest.approx(0.66)
    assert float(sb.average_risk_bound(p, gamma, 3.0, 0.04)) == pytest.approx(0.56)
    found = sb.individual_risk_bound(p, gamma, 3.0, torch.tensor([0.04, 0.08]), 0.1)
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
    gamma = sb.fedprox_stability(torch.full((m,), n), lam, 1.0, 1.0, 2.0)
    assert exact <= float(sb.average_risk_bound(p, gamma, lam, r**2))
