"""The constants of the theorems, from samples: by hand, by autograd, and the trap of 1/n."""

from __future__ import annotations

import math

import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.theory.constants import bend, constants_of, logistic_noise_bound
from sartor.theory.exact_fits import fit_each
from sartor.theory.linear_models import Clients, hessians, look, sample_losses
from sartor.theory.noise import noise_of

F64 = torch.float64


def draw(family: str, ridge: float = 0.0) -> Clients:
    """Three clients of 30, 40 and 50 samples with 4 features."""
    seed = torch.Generator().manual_seed(0)
    mask = torch.arange(50) < torch.tensor([30, 40, 50])[:, None]
    x = torch.randn(3, 50, 4, dtype=F64, generator=seed)
    noise = torch.randn(3, 50, dtype=F64, generator=seed)
    y = x.sum(-1) + 2 * noise
    if family == "logistic":
        y = (y > 0).to(F64)
    if family == "softmax":
        y = torch.bucketize(y, torch.tensor([-1.0, 1.0], dtype=F64))
    return Clients(x, y, mask, family, 3 if family == "softmax" else 2, ridge)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("family", ["linear", "logistic", "softmax"])
def test_curvatures_stay_between_the_constants(family: str, ridge: float) -> None:
    """On the ball ‖w‖ ≤ B: μ ≤ Λ(∇²L_i) ≤ L_i ≤ max_j of the samples, and every loss ≤ ‖ℓ‖∞."""
    clients = draw(family, ridge)
    found = constants_of(clients, noise_of(clients, fit_each(clients).w), radius=0.7)
    seed = torch.Generator().manual_seed(1)
    for _ in range(30):
        w = torch.randn(3, clients.num_params, dtype=F64, generator=seed)
        w = 0.7 * w / w.norm(dim=-1, keepdim=True)
        values = torch.linalg.eigvalsh(hessians(clients, look(clients, w)))
        assert (values[:, 0] >= found.strong_convexity - 1e-12).all()
        assert (values[:, -1] <= found.smoothness + 1e-12).all()
        losses = sample_losses(clients, w).amax(-1) + ridge / 2 * 0.7**2
        assert (losses <= found.loss_bound).all()
    assert (found.strong_convexity > 0).all()
    assert (found.smoothness <= found.sample_smoothness).all()
    assert found.diameter == 1.4


def test_logistic_constants_by_hand() -> None:
    """L_i, per sample, μ by (e^{b/2} + e^{−b/2})⁻², sup ℓ = ln(1 + e^b), with ridge and padding."""
    clients = draw("logistic", 0.05)
    fits = fit_each(clients)
    noise = noise_of(clients, fits.w, "sandwich")
    found = constants_of(clients, noise, radius=2.0)
    for i, n in enumerate((30, 40, 50)):
        x, y = clients.x[i, :n], clients.y[i, :n]
        values, far = torch.linalg.eigvalsh(x.T @ x / n), float(x.norm(dim=1).max())
        b = 2.0 * far
        assert float(found.smoothness[i]) == pytest.approx(float(values[-1]) / 4 + 0.05)
        assert float(found.sample_smoothness[i]) == pytest.approx(far**2 / 4 + 0.05)
        least = float(values[0]) / (math.exp(b / 2) + math.exp(-b / 2)) ** 2
        assert float(found.strong_convexity[i]) == pytest.approx(least + 0.05)
        largest = math.log1p(math.exp(b)) + 0.05 / 2 * 4
        assert float(found.loss_bound[i]) == pytest.approx(largest)
        each = x * (torch.sigmoid(x @ fits.w[i]) - y)[:, None] + 0.05 * fits.w[i]
        rho2 = each.square().sum() / (n - noise.used[i])
        torch.testing.assert_close(found.noise2[i], rho2)
    at_fit = constants_of(clients, noise)
    torch.testing.assert_close(at_fit.strong_convexity, noise.smallest)
    assert at_fit.diameter == math.inf
    assert (at_fit.loss_bound == math.inf).all()


def test_all_clients_together() -> None:
    """The largest L, ρ and loss, the smallest μ; κ = L/μ; lanes before the clients stay."""
    clients = draw("linear")
    found = constants_of(clients, noise_of(clients, fit_each(clients).w), radius=1.0)
    assert float(found.largest_smoothness) == float(found.smoothness.max())
    assert float(found.largest_sample_smoothness) == float(found.sample_smoothness.max())
    assert float(found.smallest_strong_convexity) == float(found.strong_convexity.min())
    assert float(found.condition) == float(found.smoothness.max() / found.strong_convexity.min())
    assert float(found.noise) == pytest.approx(float(found.noise2.max()) ** 0.5)
    assert float(found.largest_loss) == float(found.loss_bound.max())


def test_without_the_factor_of_the_mean_steps_are_n_times_too_small() -> None:
    """η = 1/(L + λ) of ours descends; with L = Λ_max(XᵀX)/4 it is n times smaller, and crawls."""
    clients = draw("logistic").take(slice(2, 3))
    fits = fit_each(clients)
    found = constants_of(clients, noise_of(clients, fits.w))
    x = clients.x[0]
    printed = float(torch.linalg.eigvalsh(x.T @ x)[-1]) / 4
    assert printed == pytest.approx(50 * float(found.largest_smoothness))
    left = {}
    for name, step in (("ours", float(found.local_lr())), ("printed", 1 / printed)):
        w = torch.zeros(1, 4, dtype=F64)
        for _ in range(60):
            w = w - step * look(clients, w).slope
        left[name] = float((w - fits.w).norm() / fits.w.norm())
    assert left["ours"] < 0.05
    assert left["printed"] > 0.5
    assert float(found.local_lr(3.0)) == pytest.approx(1 / (printed / 50 + 3.0))


def test_the_bound_on_logistic_noise_holds() -> None:
    """Features within ±c_X: E‖∇ℓ(w*, z)‖² ≤ c_X² d/4, near it for chances of a half."""
    seed = torch.Generator().manual_seed(2)
    x = (2 * torch.randint(0, 2, (1, 4000, 4), generator=seed) - 1).to(F64) * 1.5
    for scale, near in ((0.0, True), (1.0, False)):
        chance = torch.sigmoid(scale * x.sum(-1))
        y = (torch.rand(1, 4000, dtype=F64, generator=seed) < chance).to(F64)
        clients = Clients(x, y, torch.ones(1, 4000, dtype=torch.bool), "logistic")
        found = constants_of(clients, noise_of(clients, fit_each(clients).w, "sandwich"))
        bound = logistic_noise_bound(4, 1.5)
        assert bound == 1.5**2
        assert (float(found.noise2) > 0.98 * bound) == near
        assert float(found.noise2) < 1.01 * bound


def test_bends_and_radius() -> None:
    """1, 1/4, 1/2; a ball has a size."""
    assert [bend(f) for f in ("linear", "logistic", "softmax")] == [1.0, 0.25, 0.5]
    clients = draw("linear")
    with pytest.raises(ConfigError, match="radius must be > 0 and finite, got -1"):
        constants_of(clients, noise_of(clients, fit_each(clients).w), radius=-1.0)
