"""MOON: FedAvg with a contrastive term between features of three models."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.methods import METHODS, build
from sartor.methods.moon import contrast
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
POINTS = ("pre", "post", "global")


def _net(local: Local = SGD, name: str = "moon", **settings: Any):
    task = net_task()
    method = build(name, task, local, {})
    fed = settings.pop("fed", None) or federation()
    return run(simulation(method, task, [fed], **settings))


def _contrast(z: Tensor, towards: Tensor, away: Tensor, tau: float = 0.5) -> Tensor:
    return contrast(z, towards, away, torch.tensor(tau, dtype=z.dtype))


Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
OTHER = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_the_loss_has_the_known_numbers() -> None:
    """Cosines 1 and −1 at τ = 0.5 give log(1 + e^−4) = 0.018150; equal ones give log 2."""
    found = _contrast(Z, 3.0 * Z, -0.1 * Z)
    torch.testing.assert_close(found, torch.full((6,), log(1 + exp(-4))).double())
    assert float(found[0]) == pytest.approx(0.018150, abs=5e-7)
    torch.testing.assert_close(_contrast(Z, OTHER, OTHER), torch.full((6,), log(2)).double())


def test_the_loss_is_that_of_the_paper() -> None:
    """−log of a softmax over two cosines divided by τ, sample by sample."""
    towards, away = OTHER, OTHER.flip(0)
    a = torch.exp(F.cosine_similarity(Z, towards) / 0.7)
    b = torch.exp(F.cosine_similarity(Z, away) / 0.7)
    torch.testing.assert_close(_contrast(Z, towards, away, 0.7), -torch.log(a / (a + b)))


@pytest.mark.parametrize("tau", [0.01, 0.2, 0.5, 2.0])
def test_the_loss_is_bounded(tau: float) -> None:
    """0 ≤ ℓ_con ≤ log(1 + e^{2/τ}), also where e^{1/τ} has no value in single precision."""
    z = torch.cat([Z, Z]).float()
    found = _contrast(z, torch.cat([Z, -Z]).float(), torch.cat([-Z, Z]).float(), tau)
    most = 2 / tau + float(np.log1p(exp(-2 / tau)))
    assert bool((found >= 0).all())
    assert float(found.max()) == pytest.approx(most, rel=1e-5)


def test_equal_models_give_no_gradient() -> None:
    """z_prev = z_glob: the gradient is zero but for rounding."""
    slope = torch.func.grad(lambda z: _contrast(z, OTHER, OTHER).sum())(Z)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-15)


def test_features_of_zero_are_no_fault() -> None:
    """A sample whose features are all zero, as after ReLU, has a finite loss and gradient."""
    zero = torch.zeros_like(Z)
    for case in ((zero, Z, OTHER), (Z, zero, OTHER), (Z, OTHER, zero), (zero, zero, zero)):
        slope, value = torch.func.grad_and_value(
            lambda z, case=case: _contrast(z, *case[1:]).sum()
        )(case[0])
        assert bool(torch.isfinite(slope).all())
        assert bool(torch.isfinite(value))


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_without_contrast_it_is_fedavg(local: Local) -> None:
    """μ = 0: FedAvg's states, scores and bytes, to the bit."""
    wanted = outcome(_net(local, "fedavg", rounds=4, points=POINTS))
    found = outcome(_net(local, rounds=4, points=POINTS, hyper={"contrast_strength": 0.0}))
    skip = ("forward_evaluations", "setup_forward")
    for key in (k for k in wanted if k not in skip):
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


def test_the_first_participation_is_fedavgs() -> None:
    """Without a last model there is no contrast: the first round is FedAvg's, later ones are not.

    Public code that takes the initial or the received model as the last one differs here only in
    a constant: its gradient is zero.
    """
    hyper = {"contrast_strength": 5.0}
    wanted = states(_net(name="fedavg", rounds=1, participation="all"))
    found = states(_net(rounds=1, participation="all", hyper=hyper))
    for key in wanted:
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)
    later = [
        states(_net(name=n, rounds=2, participation="all"))["server/params/body.weight"]
        for n in ("fedavg", "moon")
    ]
    assert np.abs(later[0] - later[1]).max() > 1e-4


def test_a_federation_of_one_is_fedavg() -> None:
    """There the last local model is the received one, so the contrast never pushes."""
    fed, hyper = federation(sizes=(9,)), {"contrast_strength": 5.0}
    wanted = outcome(_net(name="fedavg", fed=fed, participation="all"))
    found = outcome(_net(fed=fed, participation="all", hyper=hyper))
    np.testing.assert_allclose(found["post/test/loss"], wanted["post/test/loss"], rtol=1e-12)


def test_two_rounds_by_hand() -> None:
    """The second round has the gradient of L + μ ℓ_con with the received and the last model."""
    task, fed, lr, mu, tau = net_task(), federation(), 0.3, 2.0, 0.4
    local = Local(steps=2, batch=None, lr=lr)
    hyper = {"contrast_strength": mu, "temperature": tau}
    sim = _net(local, rounds=2, participation="all", hyper=hyper)
    common = {k: v.double() for k, v in task.init(0).items()}
    last: list[Any] = [None] * 5
    p = fed.train.sizes.double() / fed.train.sizes.sum()
    for _ in range(2):
        for i in range(5):
            x, y = fed.x[fed.train.of(i)], fed.y[fed.train.of(i)]
            before, model = last[i], dict(common)

            def objective(w: Any, x: Any = x, y: Any = y, before: Any = before) -> Tensor:
                loss = F.cross_entropy(task.logits(w, x), y)
                if before is None:
                    return loss
                z, a, b = (task.features(m, x) for m in (w, common, before))  # noqa: B023
                cosines = torch.stack([F.cosine_similarity(z, a), F.cosine_similarity(z, b)], 1)
                return loss - mu * F.log_softmax(cosines / tau, 1)[:, 0].mean()

            for _ in range(2):
                model = tree.map(lambda w, s: w - lr * s, model, torch.func.grad(objective)(model))
            last[i] = model
        common = {k: sum(w * m[k] for w, m in zip(p, last, strict=True)) for k in common}
    for leaf, value in sim.params(0, point="global").items():
        torch.testing.assert_close(value, common[leaf], rtol=0, atol=1e-12)
    for i in range(5):
        for leaf, value in sim.params(i).items():
            torch.testing.assert_close(value, last[i][leaf], rtol=0, atol=1e-12)


def test_a_client_not_drawn_keeps_its_last_model() -> None:
    """One that never took part has none; one that did keeps it, however old it is."""
    sim = simulation(
        build("moon", net_task(), SGD, {}), net_task(), [federation()], participation=2
    )
    sim.step()
    before = sim.store.gather(sim.context.everybody)
    assert sorted(before["has_previous"][0].tolist()) == [0.0, 0.0, 0.0, 1.0, 1.0]
    sim.step()
    after = sim.store.gather(sim.context.everybody)
    drawn = sim.ledger().participants
    assert drawn.tolist() == [[2, 2]]
    same = [
        torch.equal(a, b)
        for a, b in zip(
            before["previous"]["body.weight"][0], after["previous"]["body.weight"][0], strict=True
        )
    ]
    assert sorted(same) == [False, False, True, True, True]
    assert sorted(after["previous"]) == ["body.bias", "body.weight"]


def test_a_step_is_one_gradient_and_two_passes_without() -> None:
    """Three forward passes a batch, one of them with a gradient; and the wire is FedAvg's."""
    ours, other = (_net(name=n, participation="all").ledger() for n in ("moon", "fedavg"))
    np.testing.assert_array_equal(ours.gradient_evaluations, other.gradient_evaluations)
    np.testing.assert_array_equal(ours.forward_evaluations, 2 * other.gradient_evaluations)
    np.testing.assert_array_equal(ours.bytes_up, other.bytes_up)
    np.testing.assert_array_equal(ours.bytes_down, other.bytes_down)


def test_the_default_has_contrast_and_a_head_is_needed() -> None:
    """μ = 1 (0 would be FedAvg under another name), τ = 0.5; scored after local training."""
    hyper = METHODS["moon"].hyper
    assert hyper["contrast_strength"].default == 1.0
    assert hyper["temperature"].default == 0.5
    assert hyper["temperature"].fault("temperature", 0.0)
    task = Task(Net())
    method = build("moon", task, SGD, {})
    assert method.use.headline == "post"
    with pytest.raises(ConfigError, match=r"set module\.head"):
        simulation(method, task, [federation()]).step()
