"""FedRep: the head first, then the body, and never both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, changed
from sartor.core.task import Task, squared_error
from sartor.data.federation import Federation
from sartor.methods import METHODS, build
from tests.toys import federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)


def _net(local: Local = SGD, options: dict | None = None, name: str = "fedrep", **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_the_resting_part_does_not_move_by_a_bit(local: Local) -> None:
    """Neither gradient, momentum nor decay reach the body in the first phase, the head in the 2nd.

    A frozen parameter with momentum left over from another phase must not move.
    """
    task = net_task()
    method = build("fedrep", task, local, {"head_epochs": 2})
    steps = []

    def watch(phase: Any) -> Any:
        def step(work: Any, batch: Any, ctx: Any) -> Any:
            new = phase.step(work, batch, ctx)
            moved = {k for k, v in new["params"].items() if not torch.equal(v, work["params"][k])}
            steps.append((phase.name, moved))
            return new

        return replace(phase, step=step)

    watched = changed(method, phases=tuple(watch(p) for p in method.phases))
    run(simulation(watched, task, [federation()], engine="sequential"))
    head, body = {"fc.weight", "fc.bias"}, {"body.weight", "body.bias"}
    assert {name for name, _ in steps} == {"head", "train"}
    for name, moved in steps:
        assert moved == (head if name == "head" else body)


@pytest.mark.parametrize("rule", ["uniform", "normalized"])
@pytest.mark.parametrize("keep", [True, False])
def test_two_rounds_by_hand(rule: str, keep: bool) -> None:
    """Heads take their steps first, at the old body; the body then sees the new head.

    Momentum of a leaf is that leaf's alone, from round to round if it is kept.
    """
    mu, decay, lr, head_lr = 0.9, 0.1, 0.2, 0.3
    local = Local(1, 2, None, lr, mu, decay, keep_optimiser=keep)
    options = {"rule": rule, "head_steps": 3}
    sim = _net(local, options, rounds=2, participation="all", hyper={"head_lr": head_lr})
    task, fed = net_task(), federation()
    start = {k: v.double() for k, v in task.init(0).items()}
    body = tree.select(start, task.is_body)
    heads = [tree.select(start, task.is_head) for _ in range(5)]
    speed = [tree.zeros_like(start) for _ in range(5)]
    sizes = fed.train.sizes.double()
    p = [0.2] * 5 if rule == "uniform" else (sizes / sizes.sum()).tolist()
    for _ in range(2):
        bodies = []
        for i in range(5):
            rows = fed.train.of(i)
            batch = Batch(fed.x[rows], fed.y[rows], torch.ones(len(rows)).bool(), None, None)
            model = {**body, **heads[i]}
            if not keep:
                speed[i] = tree.zeros_like(start)
            for part, rate, num in ((task.is_head, head_lr, 3), (task.is_body, lr, 2)):
                for _ in range(num):
                    slope = torch.func.grad(task.loss)(model, batch)
                    for k in filter(part, model):
                        speed[i][k] = mu * speed[i][k] + slope[k] + decay * model[k]
                    model = {k: v - rate * speed[i][k] if part(k) else v for k, v in model.items()}
            heads[i] = tree.select(model, task.is_head)
            bodies.append(tree.select(model, task.is_body))
        body = {k: sum(w * b[k] for w, b in zip(p, bodies, strict=True)) for k in body}
    for i in range(5):
        for k, v in sim.params(i).items():
            torch.testing.assert_close(v, {**body, **heads[i]}[k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize("none", [{"head_epochs": 0}, {"head_steps": 0}])
def test_without_head_training_the_body_is_fedbabus(local: Local, none: dict) -> None:
    """τ_h = 0: heads never change, and the body is FedBABU's to the bit."""
    found = states(_net(local, {**none, "rule": "normalized"}))
    wanted = states(_net(local, {"ft_epochs": 0}, name="fedbabu"))
    start = net_task().init(0)
    heads = {k: v for k, v in found.items() if k.startswith("client/private/")}
    assert heads
    for key, leaf in heads.items():
        np.testing.assert_array_equal(leaf[0], start[key.split("/")[2]].numpy()[None].repeat(5, 0))
    for key in found:
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


def test_without_body_training_only_heads_are_fitted() -> None:
    """τ_φ = 0: the body stays at its start (but for the rounding of an average); heads move."""
    sim = _net(SGD, {"body_epochs": 0, "head_epochs": 5}, rounds=4, participation="all")
    start = net_task().init(0)
    for leaf, value in sim.server["params"].items():
        torch.testing.assert_close(value[0], start[leaf].double(), rtol=0, atol=1e-15)
    heads = sim.store.gather(sim.context.everybody)["private"]["fc.weight"][0]
    assert all(not torch.equal(h, start["fc.weight"].double()) for h in heads)


def test_one_step_each_is_not_fedper() -> None:
    """Heads move first, so the body's first step differs from FedPer's; the heads' do not."""
    local = Local(steps=1, batch=None, lr=0.2)
    options = {"head_steps": 1, "rule": "normalized"}
    ours = states(_net(local, options, rounds=1, participation="all"))
    other = states(_net(local, {}, name="fedper", rounds=1, participation="all"))
    np.testing.assert_array_equal(
        ours["client/private/fc.weight"], other["client/private/fc.weight"]
    )
    gap = ours["server/params/body.weight"] - other["server/params/body.weight"]
    assert np.abs(gap).max() > 1e-4


def test_the_body_of_a_linear_model_is_found_at_a_linear_rate() -> None:
    """With y = ⟨B w_i, x⟩ the principal angle between B and the truth contracts geometrically.

    The setting of the paper's theorem: rank 2, dimension 20, 50 clients of 25 samples (too few for
    any of them alone), heads fitted almost exactly, one gradient step on B a round.
    """
    draw = np.random.default_rng(3)
    d, k, m, n = 20, 2, 50, 25
    truth = np.linalg.qr(draw.normal(size=(d, k)))[0]
    x = draw.normal(size=(m, n, d))
    w = draw.normal(size=(m, k)) * np.sqrt(2)
    y = np.einsum("mnd,dk,mk->mn", x, truth, w)
    ids = np.repeat(np.arange(m), n)
    fed = Federation.from_arrays(
        torch.from_numpy(x.reshape(-1, d)),
        torch.from_numpy(y.reshape(-1)),
        client=ids,
        num_classes=0,
        test=0.0,
    )
    net = nn.Sequential(nn.Linear(d, k, bias=False), nn.Linear(k, 1, bias=False))
    task = Task(net, head="1", criterion=squared_error, is_correct=lambda s, _: s[:, 0] > 0)
    local = Local(steps=1, batch=None, lr=0.3)
    method = build("fedrep", task, local, {"head_steps": 40})
    sim = simulation(
        method, task, [fed], hyper={"head_lr": 0.5}, rounds=30, participation="all", eval_every=30
    )
    angles = []
    for _ in range(30):
        sim.step()
        found = np.linalg.qr(sim.server["params"]["0.weight"][0].numpy().T)[0]
        left = found - truth @ (truth.T @ found)
        angles.append(np.linalg.norm(left, 2))
    assert angles[-1] < 1e-3 < angles[4]
    rates = np.array(angles[11::5]) / np.array(angles[6:-5:5])
    assert rates.max() < 0.8


def test_the_last_heads_are_fitted_once_by_everybody() -> None:
    """After the last round every head trains on, nothing is sent up, and the body stays."""
    plain = _net(SGD, {"head_epochs": 1}, participation=2)
    ended = _net(SGD, {"head_epochs": 1, "final_head_epochs": 4}, participation=2)
    assert set(np.unique(ended.ledger().bytes_up)) == set(np.unique(plain.ledger().bytes_up))
    for leaf, value in plain.server["params"].items():
        assert torch.equal(ended.server["params"][leaf], value)
    before, after = (
        s.store.gather(s.context.everybody)["private"]["fc.weight"][0] for s in (plain, ended)
    )
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    series = ended.ledger().setup_gradients - plain.ledger().setup_gradients
    assert series.tolist() == [4 * int(federation().train.sizes.sum())]


def test_the_body_sees_the_batches_of_other_methods() -> None:
    """Phase, stream and cost: E epochs of the body, τ_h of the head."""
    method = build("fedrep", net_task(), SGD, {"head_epochs": 3})
    assert [(p.name, p.epochs, p.steps) for p in method.phases] == [
        ("head", 3, None),
        ("train", 2, None),
    ]
    sim = _net(SGD, {"head_epochs": 3}, participation="all", rounds=1)
    assert outcome(sim)["gradient_evaluations"].tolist() == [
        [5 * int(federation().train.sizes.sum())]
    ]


def test_defaults_are_the_papers() -> None:
    """Ten epochs of the head, a plain average, one rate."""
    method = build("fedrep", net_task(), SGD, {})
    assert method.phases[0].epochs == 10
    assert method.hyper["head_lr"].default == method.hyper["local_lr"].default == 0.2
    assert "head_lr" not in build("fedrep", net_task(), SGD, {"head_epochs": 0}).hyper
    assert METHODS["fedrep"].options["rule"][0] == "uniform"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_epochs": -1}, "head_epochs must be >= 0, got -1"),
        ({"head_steps": -2, "body_epochs": -3}, "head_steps .*-2;.*\nbody_epochs must .* got -3"),
        ({"final_head_epochs": -1}, "final_head_epochs"),
        ({"head_epochs": 0, "body_epochs": 0}, "Neither head nor body"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """What cannot be right is refused, all at once."""
    with pytest.raises(ConfigError, match=words):
        build("fedrep", net_task(), SGD, options)
