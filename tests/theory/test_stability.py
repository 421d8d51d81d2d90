"""Bounds on the federated stability, and the shortcut for convex losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.theory.stability import (
    fedavg_bound,
    fedavg_shift,
    fedprox_bound,
    fedprox_error,
    fedprox_shift,
    local_bound,
    local_shift,
    loss_change,
)

F64 = torch.float64
LOSS = {"smoothness": 2.0, "strong_convexity": 0.5, "loss_bound": 3.0}


def problem(seed: int = 0, m: int = 4, d: int = 3):
    """Draw linear regressions of unequal clients."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [6, 9, 12, 20][:m]
    xs = [torch.randn(n, d, dtype=F64, generator=draw) for n in sizes]
    ys = [torch.randn(n, dtype=F64, generator=draw) for n in sizes]
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)[:m]
    return xs, ys, weights / weights.sum()


def fedprox_fit(xs, ys, weights, lam):
    """Solve min Σ p_k [½‖y − Xw_k‖²/n_k + (λ_k/2)‖w_k − w_g‖²] as one linear system."""
    m, d = len(xs), xs[0].shape[1]
    lam = torch.as_tensor(lam, dtype=F64).expand(m)
    big, right = (
        torch.zeros((m + 1) * d, (m + 1) * d, dtype=F64),
        torch.zeros((m + 1) * d, dtype=F64),
    )
    eye, centre = torch.eye(d, dtype=F64), slice(m * d, (m + 1) * d)
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        own = slice(k * d, (k + 1) * d)
        big[own, own] = x.T @ x / len(x) + lam[k] * eye
        big[own, centre] = -lam[k] * eye
        big[centre, own] = -weights[k] * lam[k] * eye
        big[centre, centre] += weights[k] * lam[k] * eye
        right[own] = x.T @ y / len(x)
    return torch.linalg.solve(big, right).reshape(m + 1, d)


@pytest.mark.parametrize("lam", [0.05, 1.0, 40.0, [0.1, 1.0, 0.0, 5.0]])
def test_fedprox_shift_is_the_derivative_of_the_joint_solution(lam) -> None:
    """The gradient δ of one client, made small: its minimiser moves as the formula says."""
    xs, ys, weights = problem()
    hessians = torch.stack([x.T @ x / len(x) for x in xs])
    before = fedprox_fit(xs, ys, weights, lam)
    i, j, n = 1, 4, 9
    old = xs[i][j] * (xs[i][j] @ before[i] - ys[i][j])
    # Only the label of a record changes: the Hessian stays, and the shift is exact.
    changed = [y.clone() for y in ys]
    changed[i][j] += 0.7
    new = xs[i][j] * (xs[i][j] @ before[i] - changed[i][j])
    moved = fedprox_fit(xs, changed, weights, lam)[i] - before[i]
    pull = torch.tensor(lam, dtype=F64)
    torch.testing.assert_close(fedprox_shift(hessians, weights, pull, i, old, new, n), moved)
    assert moved.norm() > 1e-3


def test_fedprox_shift_goes_from_local_to_fedavg() -> None:
    """λ = 0 is LocalTrain, λ → ∞ FedAvg, also for unequal Hessians."""
    xs, _, weights = problem()
    hessians = torch.stack([x.T @ x / len(x) for x in xs])
    old, new = torch.randn(2, 5, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    alone = local_shift(hessians[2], old, new, 12)
    torch.testing.assert_close(fedprox_shift(hessians, weights, 0.0, 2, old, new, 12), alone)
    torch.testing.assert_close(
        fedprox_shift(hessians, weights, 1e-12, 2, old, new, 12), alone, rtol=1e-9, atol=1e-12
    )
    common = fedavg_shift(hessians, weights, 2, old, new, 12)
    far = fedprox_shift(hessians, weights, 1e7, 2, old, new, 12)
    torch.testing.assert_close(far, common, rtol=1e-4, atol=1e-7)
    fixed = local_shift(hessians[2], old, new, 12, 1e7)
    assert fixed.norm() < 1e-5 * common.norm()  # with w_g held, λ = ∞ would let nothing move


def test_the_shortcuts_give_the_numbers_of_mean_estimation() -> None:
    """½‖w − z‖², n = 10, ‖z − z′‖ = 1, p_i = 1/5, λ = 4: s = 0.1, 0.02, 0.036."""
    eyes, p = torch.eye(3, dtype=F64).repeat(5, 1, 1), torch.full((5,), 0.2, dtype=F64)
    old, new = torch.zeros(3, dtype=F64), torch.tensor([0.0, 0.6, 0.8], dtype=F64)
    found = [
        local_shift(eyes[0], old, new, 10),
        fedavg_shift(eyes, p, 0, old, new, 10),
        fedprox_shift(eyes, p, 4.0, 0, old, new, 10),
    ]
    assert [float(v.norm()) for v in found] == pytest.approx([0.1, 0.02, 0.036], rel=1e-12)


def test_shifts_are_batched_over_records_and_replacements() -> None:
    """(j, 1, d) against (1, k, d) gives all pairs, each as if alone."""
    xs, _, weights = problem()
    hessians = torch.stack([x.T @ x / len(x) for x in xs])
    draw = torch.Generator().manual_seed(1)
    old = torch.randn(4, 1, 3, dtype=F64, generator=draw)
    new = torch.randn(1, 6, 3, dtype=F64, generator=draw)
    for shift in (
        lambda a, b: local_shift(hessians[1], a, b, 9, 0.3),
        lambda a, b: fedavg_shift(hessians, weights, 1, a, b, 9),
        lambda a, b: fedprox_shift(hessians, weights, 0.3, 1, a, b, 9),
    ):
        pairs = shift(old, new)
        assert pairs.shape == (4, 6, 3)
        torch.testing.assert_close(pairs[2, 5], shift(old[2, 0], new[0, 5]))


def test_bounds_have_the_printed_constants() -> None:
    """32β‖ℓ‖∞/(μn), p_i times that, and 160β‖ℓ‖∞/(n(μ+λ))."""
    assert local_bound(100, **LOSS) == pytest.approx(32 * 2 * 3 / (0.5 * 100))
    assert fedavg_bound(100, 0.2, **LOSS) == pytest.approx(0.2 * local_bound(100, **LOSS))
    assert fedprox_bound(100, 0.2, 0.1, **LOSS) == pytest.approx(160 * 6 / (100 * 0.6))


def test_bounds_refuse_what_their_proofs_do_not_cover() -> None:
    """n_i >= 4β/μ = 16 (times p_i for FedAvg), p_i λ <= μ/16."""
    local_bound(16, **LOSS)
    with pytest.raises(ConfigError, match=r"n_i >= .* = 16 samples, got 15"):
        local_bound(15, **LOSS)
    fedavg_bound(4, 0.25, **LOSS)
    with pytest.raises(ConfigError, match=r"= 4 samples, got 3"):
        fedavg_bound(3, 0.25, **LOSS)
    fedprox_bound(16, 0.25, 0.125, **LOSS)
    with pytest.raises(ConfigError, match=r"p_i λ <= μ/16 = 0.03125, got 0.25 · 0.126"):
        fedprox_bound(16, 0.25, 0.126, **LOSS)
    with pytest.raises(ConfigError, match="= 16 samples"):
        fedprox_bound(15, 0.25, 0.1, **LOSS)
    with pytest.raises(ConfigError, match="ridge"):
        local_bound(100, smoothness=1.0, strong_convexity=0.0, loss_bound=1.0)
    with pytest.raises(ConfigError, match="prox_strength must be >= 0"):
        fedprox_shift(torch.eye(2)[None], torch.ones(1), -1.0, 0, torch.ones(2), torch.ones(2), 3)


def test_inexact_solving_widens_the_bound_of_fedprox() -> None:
    """Err_i = √(2β‖ℓ‖∞) E + β E², with E of (59) put together from Lemma 25."""
    lam, p, eps_g, eps_i = 0.1, 0.2, 1e-3, 2e-3
    beta, mu, big = LOSS["smoothness"], LOSS["strong_convexity"], LOSS["loss_bound"]
    zeta_g, zeta_i = lam * eps_g, (beta + lam) * eps_i
    delta_g, delta_i = lam / 2 * eps_g**2, (beta + lam) / 2 * eps_i**2
    far = 8 * zeta_i / (mu + lam) + (8 * delta_i / (mu + lam)) ** 0.5
    far += (
        8 / mu * (2 * zeta_g + 4 * p * lam * eps_i + (2 * mu * lam * delta_g / (mu + lam)) ** 0.5)
    )
    known = {"smoothness": beta, "strong_convexity": mu}
    errors = {"global_error": eps_g, "local_error": eps_i}
    assert fedprox_error(p, lam, **known, **errors) == pytest.approx(far, rel=1e-12)
    added = fedprox_bound(100, p, lam, **LOSS, **errors) - fedprox_bound(100, p, lam, **LOSS)
    assert added == pytest.approx((2 * beta * big) ** 0.5 * far + beta * far**2, rel=1e-9)


def test_lemma_26_is_sharp_for_quadratics() -> None:
    """½‖w − z‖² with its largest value at w: a step of s straight away from z attains the bound."""
    z, w = torch.zeros(2, dtype=F64), torch.tensor([3.0, 4.0], dtype=F64)
    step = 0.3 * w / w.norm()
    rise = 0.5 * (w + step - z).square().sum() - 0.5 * (w - z).square().sum()
    bound = loss_change(step.norm(), smoothness=1.0, loss_bound=12.5)
    torch.testing.assert_close(bound, rise)


def test_the_slopes_of_the_bounds() -> None:
    """−1 in n_i; FedAvg linear in p_i; FedProx falls in λ, as 1/λ in the end. One call for all."""
    n, p = torch.logspace(2, 5, 4, dtype=F64), torch.tensor([0.01, 0.1, 1.0], dtype=F64)

    def slope(x: Tensor, y: Tensor) -> list[float]:
        return (y.log().diff() / x.log().diff()).tolist()

    for found in (
        local_bound(n, **LOSS),
        fedavg_bound(n, 0.1, **LOSS),
        fedprox_bound(n, 0.1, 0.2, **LOSS),
    ):
        assert slope(n, found) == pytest.approx([-1.0] * 3)
    assert slope(p, fedavg_bound(100, p, **LOSS)) == pytest.approx([1.0] * 2)
    lam = torch.logspace(-3, 6, 19, dtype=F64)
    found = fedprox_bound(100, 1e-9, lam, **LOSS)
    assert (found.diff() < 0).all()
    assert slope(lam, found)[-1] == pytest.approx(-1.0, abs=1e-4)


def test_a_bound_names_the_client_at_fault() -> None:
    """Numbers broadcast; the message reports the first that is not covered."""
    with pytest.raises(ConfigError, match=r"= 16 samples, got 7"):
        local_bound(torch.tensor([20.0, 7.0, 3.0]), **LOSS)
    with pytest.raises(ConfigError, match=r"got 0.5 · 0.1"):
        fedprox_bound(100, torch.tensor([0.1, 0.5]), 0.1, **LOSS)


@pytest.mark.parametrize("lam", [0.0, 0.05, 0.3, math.inf])
def test_losses_change_within_the_bounds(lam: float) -> None:
    """Records in the unit ball, ½‖w − z‖²: β = μ = 1, ‖ℓ‖∞ = 2. Lemma 26, and each method's γ_i."""
    draw = torch.Generator().manual_seed(5)

    def ball(*shape: int) -> Tensor:
        z = torch.randn(*shape, 2, dtype=F64, generator=draw)
        return z / z.norm(dim=-1, keepdim=True).clamp(min=1.0)

    def fit(z: Tensor) -> Tensor:
        share = 1 / (1 + lam)
        return share * z[0].mean(0) + (1 - share) * z.mean((0, 1))

    z, looks, worst = ball(5, 10), ball(500), 0.0
    for _ in range(20):
        changed = z.clone()
        changed[0, 3] = ball(1)[0]
        before, after = fit(z), fit(changed)
        gap = (0.5 * (before - looks).square() - 0.5 * (after - looks).square()).sum(1).abs().max()
        shift = (before - after).norm()
        assert float(gap) <= float(loss_change(shift, smoothness=1.0, loss_bound=2.0)) + 1e-12
        worst = max(worst, float(gap))
    known = {"smoothness": 1.0, "strong_convexity": 1.0, "loss_bound": 2.0}
    if lam == math.inf:
        bound = fedavg_bound(10, 0.2, **known)
    elif lam == 0.0:
        bound = local_bound(10, **known)
    else:
        bound = fedprox_bound(10, 0.2, lam, **known)
    assert 0.0 < worst <= float(bound)
