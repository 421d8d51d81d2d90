"""Exact fits of convex models: derivatives, limits, worked numbers, awkward clients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core.errors import ConfigError
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.linear_models import (
    Clients,
    basis,
    flat_weights,
    gradients,
    hessians,
    look,
    predict,
    sample_losses,
)

F64 = torch.float64


def problem(family: str, *, ridge: float = 0.0, lanes: tuple[int, ...] = (), seed: int = 0):
    """Draw four clients of 30 to 60 samples with three features, padded, and their weights."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([30, 40, 50, 60])
    mask = (torch.arange(60) < sizes[:, None]).expand(*lanes, 4, 60)
    x = torch.randn(*lanes, 4, 60, 3, dtype=F64, generator=draw) * mask[..., None]
    w = torch.randn(4, 3, dtype=F64, generator=draw)
    scores = (x @ w[..., None])[..., 0]
    noise = torch.randn(scores.shape, dtype=F64, generator=draw)
    if family == "linear":
        y = scores + noise
    elif family == "logistic":
        y = (scores + 1.5 * noise > 0).to(F64)
    else:
        y = torch.bucketize(scores + 1.5 * noise, torch.tensor([-0.7, 0.7]).to(F64))
    y = y * mask
    clients = Clients(x, y, mask, family, 3 if family == "softmax" else 2, ridge)
    return clients, (sizes / sizes.sum()).to(F64)


def plain_loss(clients: Clients, i: int, w: Tensor) -> Tensor:
    """The mean loss of one client, by torch's own losses."""
    x, y = clients.x[i][clients.mask[i]], clients.y[i][clients.mask[i]]
    if clients.family == "linear":
        loss = 0.5 * F.mse_loss(x @ w, y)
    elif clients.family == "logistic":
        loss = F.binary_cross_entropy_with_logits(x @ w, y)
    else:
        loss = F.cross_entropy(x @ w.reshape(3, 2) @ basis(3).T, y.long())
    return loss + 0.5 * clients.ridge * w.square().sum()


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("family", ["linear", "logistic", "softmax"])
def test_losses_gradients_and_hessians_are_those_of_autograd(family: str, ridge: float) -> None:
    """At arbitrary models; a client's gradient is the mean of its samples' gradients."""
    clients, _ = problem(family, ridge=ridge)
    draw = torch.Generator().manual_seed(1)
    w = torch.randn(4, clients.num_params, dtype=F64, generator=draw)
    point = look(clients, w)
    curve, each = hessians(clients, point), gradients(clients, w)
    plain = sample_losses(clients, w).sum(-1) / clients.sizes
    for i in range(4):

        def loss(at: Tensor, i: int = i) -> Tensor:
            return plain_loss(clients, i, at)

        torch.testing.assert_close(point.loss[i], loss(w[i]))
        torch.testing.assert_close(plain[i], loss(w[i]) - ridge / 2 * w[i].square().sum())
        torch.testing.assert_close(point.slope[i], torch.autograd.functional.jacobian(loss, w[i]))
        torch.testing.assert_close(curve[i], torch.autograd.functional.hessian(loss, w[i]))
    torch.testing.assert_close(each.sum(-2) / clients.sizes[:, None], point.slope)
    assert (each[~clients.mask] == 0).all()


@pytest.mark.parametrize(
    ("family", "ridge", "reduced"),
    [
        ("linear", 0.0, False),
        ("logistic", 0.0, False),
        ("logistic", 0.1, False),
        ("softmax", 0.0, False),
        ("logistic", 0.0, True),
    ],
)
def test_every_fit_is_stationary(family: str, ridge: float, reduced: bool) -> None:
    """The gradient by autograd vanishes, Firth's penalty log det(n H)/(2n) included."""
    clients, weights = problem(family, ridge=ridge)
    fits = fit_each(clients, bias_reduced=reduced)
    assert fits.converged.all()
    assert not fits.separable.any()
    for i in range(4):

        def loss(at: Tensor, i: int = i) -> Tensor:
            found = plain_loss(clients, i, at)
            if reduced:
                x = clients.x[i][clients.mask[i]]
                q = torch.sigmoid(x @ at)
                found = found - torch.logdet((x.T * (q * (1 - q))) @ x) / (2 * len(x))
            return found

        assert torch.autograd.functional.jacobian(loss, fits.w[i]).norm() < 1e-8
    if not reduced:
        pooled = fit_pooled(clients, weights)
        slope = (weights[:, None] * look(clients, pooled.w.expand(4, -1)).slope).sum(0)
        assert pooled.converged.all()
        assert slope.norm() < 1e-8


@pytest.mark.parametrize("family", ["linear", "logistic", "softmax"])
def test_coupled_fits_go_from_alone_to_pooled(family: str) -> None:
    """λ → 0 is every client alone, λ → ∞ one model for all; in between all gradients vanish."""
    clients, weights = problem(family)
    alone, pooled = fit_each(clients).w, fit_pooled(clients, weights).w
    near = fit_coupled(clients, weights, torch.tensor(1e-9))
    far = fit_coupled(clients, weights, torch.tensor(1e7))
    assert near.converged.all()
    assert far.converged.all()
    torch.testing.assert_close(near.own, alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(far.own, pooled.expand(4, -1), rtol=0, atol=1e-6)
    for pull in (torch.tensor(0.2), torch.tensor([0.0, 0.1, 1.0, 10.0])):
        found = fit_coupled(clients, weights, pull)
        lam = pull.to(F64).expand(4)[:, None]
        slope = look(clients, found.own).slope
        assert (slope + lam * (found.own - found.centre)).norm() < 1e-8
        assert (weights[:, None] * lam * (found.own - found.centre)).sum(0).norm() < 1e-9
        again = fit_coupled(clients, weights, pull, start=alone)
        torch.testing.assert_close(again.own, found.own, rtol=0, atol=1e-7)


def test_the_worked_quadratic_of_three_clients() -> None:
    """With a = (1, 2, 4), c = (0, 3, 6), λ = 2: w_g = 11/3, w = (22/9, 10/3, 47/9); ∞: 30/7."""
    a, c = torch.tensor([1.0, 2.0, 4.0], dtype=F64), torch.tensor([0.0, 3.0, 6.0], dtype=F64)
    x = a.sqrt()[:, None, None]
    clients = Clients(x, x[..., 0] * c[:, None], torch.ones(3, 1, dtype=torch.bool), "linear")
    even = torch.full((3,), 1 / 3, dtype=F64)
    found = fit_coupled(clients, even, torch.tensor(2.0))
    assert found.centre.tolist() == pytest.approx([11 / 3], rel=1e-10)
    assert found.own[:, 0].tolist() == pytest.approx([22 / 9, 10 / 3, 47 / 9], rel=1e-10)
    assert fit_pooled(clients, even).w.tolist() == pytest.approx([30 / 7], rel=1e-10)
    near = fit_coupled(clients, even, torch.tensor(1e-8))
    assert near.centre.tolist() == pytest.approx([3.0], rel=1e-6)


@pytest.mark.parametrize("family", ["linear", "logistic", "softmax"])
def test_lanes_are_single_fits_and_padding_does_not_matter(family: str) -> None:
    """Two axes of lanes, and more padding with wild values in it, give the same models."""
    clients, weights = problem(family, lanes=(2, 3))
    wider = replace(
        clients,
        x=F.pad(clients.x, (0, 0, 0, 7), value=99.0),
        y=F.pad(clients.y, (0, 7), value=1),
        mask=F.pad(clients.mask, (0, 7), value=False),
    )
    reduced = family == "logistic"
    one = Clients(clients.x[1, 2], clients.y[1, 2], clients.mask[1, 2], family, 3)
    one = replace(one, num_classes=clients.num_classes)
    lam = torch.tensor(0.3)
    for fit in (
        lambda c: fit_each(c, bias_reduced=reduced).w,
        lambda c: fit_pooled(c, weights).w,
        lambda c: fit_coupled(c, weights, lam).own,
    ):
        torch.testing.assert_close(fit(clients)[1, 2], fit(one), rtol=0, atol=1e-7)
        torch.testing.assert_close(fit(wider), fit(clients), rtol=0, atol=1e-9)


def test_separable_clients_are_found_and_firth_fits_them() -> None:
    """Without a minimiser: not converged, separable; Firth's penalty and ridge have one."""
    clients, _ = problem("logistic")
    y = clients.y.clone()
    y[1] = (clients.x[1, :, 0] > 0).to(F64)  # told apart by the first feature
    clients = replace(clients, y=y * clients.mask)
    fits = fit_each(clients)
    assert fits.separable.tolist() == [False, True, False, False]
    assert fits.converged.tolist() == [True, False, True, True]
    firth = fit_each(clients, bias_reduced=True)
    assert firth.converged.all()
    assert not firth.separable.any()
    assert firth.w.norm(dim=-1).max() < 50
    ridge = fit_each(replace(clients, ridge=0.01))
    assert ridge.converged.all()
    assert not ridge.separable.any()
    # The other clients do not notice.
    torch.testing.assert_close(fits.w[[0, 2, 3]], fit_each(clients.take(torch.tensor([0, 2, 3]))).w)


def test_softmax_separation_and_one_class() -> None:
    """A client with one class and an intercept is separable, in both families of labels."""
    x = torch.randn(1, 20, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1.0
    mask = torch.ones(1, 20, dtype=torch.bool)
    for family, classes in (("logistic", 2), ("softmax", 3)):
        one = Clients(x, torch.ones(1, 20, dtype=F64), mask, family, classes)
        assert fit_each(one).separable.all()
    by_sign = torch.bucketize(x[..., 1].contiguous(), torch.tensor([-0.5, 0.5]).to(F64))
    assert fit_each(Clients(x, by_sign, mask, "softmax", 3)).separable.all()
    assert not fit_each(Clients(x, by_sign.to(F64), mask, "linear")).separable.any()


def test_firth_removes_the_bias_of_first_order() -> None:
    """Logistic regression, 40 samples, 3 features: the mean fit is far nearer to the truth."""
    draw = torch.Generator().manual_seed(3)
    w = torch.tensor([1.0, -0.5, 0.5], dtype=F64)
    x = torch.randn(4000, 40, 3, dtype=F64, generator=draw)
    y = (torch.rand(4000, 40, dtype=F64, generator=draw) < torch.sigmoid(x @ w)).to(F64)
    clients = Clients(x, y, torch.ones(4000, 40, dtype=torch.bool), "logistic")
    plain, firth = fit_each(clients), fit_each(clients, bias_reduced=True)
    keep = ~plain.separable
    assert (plain.w[keep].mean(0) - w).norm() > 0.15
    assert (firth.w.mean(0) - w).norm() < 0.04


def test_the_basis_and_the_weights_of_softmax() -> None:
    """Q is orthonormal with columns of sum 0; scores are those of the full weights."""
    q = basis(5)
    torch.testing.assert_close(q.T @ q, torch.eye(4, dtype=F64))
    torch.testing.assert_close(q.sum(0), torch.zeros(4, dtype=F64), rtol=0, atol=1e-14)
    clients, _ = problem("softmax")
    w = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(2))
    full = flat_weights(clients, w)
    torch.testing.assert_close(clients.x @ full, predict(clients, w) @ basis(3).T)
    torch.testing.assert_close(full.square().sum((-1, -2)), w.square().sum(-1))


def test_fewer_samples_than_parameters() -> None:
    """Least squares still fits, with zero residual; nothing becomes NaN."""
    draw = torch.Generator().manual_seed(4)
    x, y = torch.randn(1, 3, 5, dtype=F64, generator=draw), torch.ones(1, 3, dtype=F64)
    clients = Clients(x, y, torch.ones(1, 3, dtype=torch.bool), "linear")
    assert math.isclose(float(look(clients, fit_each(clients).w).loss[0]), 0.0, abs_tol=1e-12)


def test_firth_is_for_plain_logistic_regression() -> None:
    """The message says what to leave out."""
    with pytest.raises(ConfigError, match=r"bias_reduced is for logistic .* linear with ridge=0"):
        fit_each(problem("linear")[0], bias_reduced=True)
