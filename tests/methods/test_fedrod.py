"""Fed-RoD: a balanced generic head, and a personal one that nothing else notices."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.core.task import Task
from sartor.data.split import Ragged
from sartor.methods import METHODS, build
from sartor.methods.fedrod import log_prior
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
POINTS = ("pre", "post", "global")


def _net(local: Local = SGD, options: dict | None = None, name: str = "fedrod", **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    fed = settings.pop("fed", None) or federation()
    return run(simulation(method, task, [fed], **settings))


def _shift(counts: list[float], balance: float) -> torch.Tensor:
    return log_prior(torch.tensor(counts).double(), torch.tensor(balance).double())


def test_the_balanced_softmax_has_the_known_number() -> None:
    """Counts (9, 1), scores (0, 0), label 1: log 10; balanced counts shift all scores alike."""
    loss = F.cross_entropy(_shift([9.0, 1.0], 1.0)[None], torch.tensor([1]))
    assert float(loss) == pytest.approx(log(10), abs=1e-12)
    half = F.cross_entropy(_shift([9.0, 1.0], 0.5)[None], torch.tensor([1]))
    assert float(half) == pytest.approx(log(4), abs=1e-12)
    assert _shift([4.0, 4.0], 1.0).tolist() == [log(4.0)] * 2


def test_an_absent_class_drops_out_and_gets_no_gradient() -> None:
    """Its shift is −∞, its probability and gradient 0; with γ = 0 it counts as any other."""
    scores = torch.tensor([0.3, -0.2, 5.0]).double()
    loss = lambda s: F.cross_entropy(s[None], torch.tensor([1]))  # noqa: E731
    slope = torch.func.grad(lambda s: loss(s + _shift([2.0, 2.0, 0.0], 1.0)))(scores)
    pair = torch.func.grad(loss)(scores[:2])
    torch.testing.assert_close(slope, torch.cat([pair, pair.new_zeros(1)]), rtol=0, atol=1e-15)
    assert _shift([2.0, 0.0], 0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_without_balance_the_generic_model_is_fedavgs(local: Local) -> None:
    """γ = 0: body and generic head are FedAvg's to the bit, with their optimisers and bytes.

    So the personal head, which trains all the while, has no influence on them.
    """
    wanted = outcome(_net(local, name="fedavg", points=POINTS))
    found = outcome(_net(local, hyper={"balance": 0.0}, points=POINTS))
    kept = [k for k in wanted if k.startswith(("server/", "client/", "global/", "bytes"))]
    assert kept
    for key in kept:
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)
    assert np.abs(found["post/test/loss"] - wanted["post/test/loss"]).min() > 1e-8


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_the_generic_model_never_notices_the_personal_head(local: Local) -> None:
    """Two personal heads that differ in everything leave the same generic model, to the bit."""
    one, other = (states(_net(local, {"personal_start": s})) for s in ("generic", "zero"))
    for key in (k for k in one if k.startswith(("server/", "client/velocity/params"))):
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    assert np.abs(one["client/personal/fc.weight"] - other["client/personal/fc.weight"]).max() > 0.1


def test_with_balanced_classes_the_generic_model_is_fedavgs() -> None:
    """Every client has three samples of each class: a shift of all scores changes nothing."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(75, 4, generator=draw).double(), torch.arange(75) % 3
    cut = [
        Ragged.from_lists([np.arange(15 * i + a, 15 * i + b) for i in range(5)])
        for a, b in ((0, 9), (9, 11), (11, 15))
    ]
    fed = replace(federation(), x=x, y=y, train=cut[0], val=cut[1], test=cut[2])
    wanted, found = (states(_net(SGD, name=n, fed=fed)) for n in ("fedavg", "fedrod"))
    for key in (k for k in wanted if k.startswith("server/")):
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=1e-13)
    skewed = [states(_net(SGD, name=n))["server/params/fc.bias"] for n in ("fedavg", "fedrod")]
    assert np.abs(skewed[0] - skewed[1]).max() > 1e-3


@pytest.mark.parametrize("start", ["generic", "zero"])
def test_two_steps_by_hand(start: str) -> None:
    """The personal head's step sees the features and scores of before the generic step."""
    task, fed, lr = net_task(), federation(), 0.3
    local = Local(steps=2, batch=None, lr=lr)
    sim = _net(local, {"personal_start": start}, rounds=1, participation="all")
    params = {k: v.double() for k, v in task.init(0).items()}
    for i in range(5):
        x, y = fed.x[fed.train.of(i)], fed.y[fed.train.of(i)]
        shift = torch.bincount(y, minlength=3).double().log()
        theta = dict(params)
        own = tree.select(params, task.is_head)
        own = own if start == "generic" else tree.zeros_like(own)
        for _ in range(2):
            z = torch.tanh(x @ theta["body.weight"].T + theta["body.bias"])
            g = z @ theta["fc.weight"].T + theta["fc.bias"]
            slope_p = torch.func.grad(
                lambda p, z=z, g=g, y=y: F.cross_entropy(g + z @ p["fc.weight"].T + p["fc.bias"], y)
            )(own)
            slope = torch.func.grad(
                lambda t, x=x, y=y, shift=shift: F.cross_entropy(task.logits(t, x) + shift, y)
            )(theta)
            own = tree.map(lambda p, s: p - lr * s, own, slope_p)
            theta = tree.map(lambda p, s: p - lr * s, theta, slope)
        kept = sim.store.gather(sim.context.everybody)["personal"]
        for leaf, value in own.items():
            torch.testing.assert_close(kept[leaf][0, i], value, rtol=0, atol=1e-12)


def test_a_client_uses_the_sum_of_both_heads() -> None:
    """The model is one network with scores g + p_i; a zero personal head gives the generic one."""
    task, fed = net_task(), federation()
    sim = _net(points=POINTS)
    kept = sim.store.gather(sim.context.everybody)["personal"]
    for i in range(5):
        generic = sim.params(i, point="global")
        personal = {k: v[0, i] for k, v in kept.items()}
        z = task.features(generic, fed.x)
        wanted = task.classify(generic, z) + task.classify(personal, z)
        torch.testing.assert_close(task.logits(sim.params(i), fed.x), wanted, rtol=0, atol=1e-12)
    zero = outcome(_net(SGD, {"personal_start": "zero"}, points=POINTS))
    np.testing.assert_array_equal(zero["pre/test/loss"][:, 0], zero["global/test/loss"][:, 0])
    assert np.abs(zero["pre/test/loss"][:, 2] - zero["global/test/loss"][:, 2]).max() > 1e-4


@pytest.mark.parametrize("drop_last", [False, True])
def test_class_counts_are_exact(drop_last: bool) -> None:
    """All training samples count, also those that the last batch of an epoch drops."""
    task, fed = net_task(), federation(sizes=(300, 2, 7, 4, 9))
    method = build("fedrod", task, replace(SGD, drop_last=drop_last), {})
    seen = {}

    def finish(client: Any, work: Any, ctx: Any) -> Any:
        seen[int(ctx.index)] = work["counts"].tolist()
        return method.finish(client, work, ctx)

    watched = changed(method, finish=finish)
    sim = simulation(watched, task, [fed], engine="sequential", participation="all", rounds=2)
    losses = run(sim).scores()
    for i in range(5):
        assert seen[i] == torch.bincount(fed.y[fed.train.of(i)], minlength=3).tolist()
    assert all(np.isfinite(s.loss).all() for s in losses.values())


def test_the_personal_head_never_leaves() -> None:
    """The upload is FedAvg's; one with the personal head is stopped. Absent clients keep theirs."""
    task = net_task()
    method = build("fedrod", task, SGD, {})
    leaky = changed(method, finish=lambda c, w, s: (c, {"personal": w["personal"]}))
    with pytest.raises(ContractError, match="personal"):
        simulation(leaky, task, [federation()]).step()
    sim = _net(participation=2, rounds=1)
    rows = sim.store.gather(sim.context.everybody)["personal"]["fc.weight"][0]
    still = [torch.equal(row, task.init(0)["fc.weight"].double()) for row in rows]
    assert sorted(still) == [False, False, True, True, True]


def test_the_default_balances_and_a_head_is_needed() -> None:
    """γ = 1 out of the box; a network without a named linear head is refused with the mend."""
    assert METHODS["fedrod"].hyper["balance"].default == 1.0
    task = Task(Net())
    with pytest.raises(ConfigError, match=r"set module\.head"):
        simulation(build("fedrod", task, SGD, {}), task, [federation()]).step()
