"""FedBABU: a body trained under one fixed head, and fine-tuning before use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch
from sartor.core.task import Task
from sartor.methods import METHODS, build
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
KEPT = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
POINTS = ("pre", "post", "global")


def _net(local: Local = SGD, options: dict | None = None, name: str = "fedbabu", **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_the_head_never_moves_on_server_or_clients(local: Local) -> None:
    """θ_h⁰ bit by bit in every round, with momentum and weight decay too; the body moves."""
    task = net_task()
    start = {k: v.double() for k, v in task.init(0).items()}
    sim = simulation(build("fedbabu", task, local, {}), task, [federation()])
    for _ in range(3):
        sim.step()
        clients = sim.store.gather(sim.context.everybody)["private"]
        centre = sim.params(0, point="global")
        assert sorted(clients) == ["fc.bias", "fc.weight"]
        for leaf, rows in clients.items():
            assert torch.equal(sim.server["head"][leaf][0], start[leaf])
            assert torch.equal(centre[leaf], start[leaf])
            assert all(torch.equal(row, start[leaf]) for row in rows[0])
        assert not torch.equal(centre["body.weight"], start["body.weight"])


def test_the_first_step_of_the_body_is_fedavgs() -> None:
    """Only the head's step is missing: after one full-batch step the bodies agree to the bit."""
    gd = Local(steps=1, batch=None, lr=0.2)
    ours, other = (states(_net(gd, {}, name, rounds=1)) for name in ("fedbabu", "fedavg"))
    for leaf in ("body.weight", "body.bias"):
        np.testing.assert_array_equal(ours[f"server/params/{leaf}"], other[f"server/params/{leaf}"])
    later = [states(_net(gd, {}, name, rounds=2)) for name in ("fedbabu", "fedavg")]
    assert np.abs(np.subtract(*(s["server/params/body.weight"] for s in later))).max() > 1e-5


@pytest.mark.parametrize("none", [{"ft_epochs": 0}, {"ft_steps": 0}])
def test_without_fine_tuning_clients_use_the_global_model(none: dict) -> None:
    """τ = 0: P is G, to the bit; with fine-tuning it is not, and G is the same as before."""
    found = outcome(_net(SGD, none, points=POINTS))
    tuned = outcome(_net(SGD, {"ft_epochs": 1}, points=POINTS))
    np.testing.assert_array_equal(found["pre/test/loss"], found["global/test/loss"])
    np.testing.assert_array_equal(tuned["global/test/loss"], found["global/test/loss"])
    assert np.abs(tuned["pre/test/loss"] - found["pre/test/loss"]).min() > 1e-8
    assert "ft_lr" not in build("fedbabu", net_task(), SGD, none).hyper


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_fine_tuned_models_never_come_back(local: Local) -> None:
    """However long clients fine-tune at evaluations, server and clients train as without it."""
    wanted, found = (states(_net(local, {"ft_epochs": n})) for n in (0, 4))
    assert sorted(found) == sorted(wanted)
    for key, leaf in wanted.items():
        np.testing.assert_array_equal(found[key], leaf, err_msg=key)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("part", ["all", "body", "head"])
def test_fine_tuning_moves_the_chosen_part(part: str, momentum: float) -> None:
    """One full step from (θ_f, θ_h⁰) with the rate of fine-tuning, on the client's own data.

    Its momentum begins at zero, whatever the body's training has kept.
    """
    task, fed = net_task(), federation()
    gd = Local(steps=1, batch=None, lr=0.2, momentum=momentum, keep_optimiser=True)
    sim = _net(gd, {"ft_steps": 1, "ft_part": part}, hyper={"ft_lr": 0.7})
    centre = sim.params(0, point="global")
    for i in range(5):
        rows = fed.train.of(i)
        batch = Batch(fed.x[rows], fed.y[rows], torch.ones(len(rows)).bool(), None, None)
        slope = torch.func.grad(task.loss)(centre, batch)
        for leaf, value in sim.params(i).items():
            moves = part == "all" or task.is_head(leaf) == (part == "head")
            wanted = centre[leaf] - 0.7 * slope[leaf] * moves
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
            assert torch.equal(value, centre[leaf]) != moves


class ZeroHead(nn.Linear):
    """A head that begins at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Blank(Net):
    """The small network with such a head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: Any = ZeroHead(5, 3)


def test_a_zero_head_teaches_nothing_so_ours_is_drawn() -> None:
    """Under θ_h⁰ = 0 the body's gradient is zero; the head that a task draws is not zero."""
    task = Task(Blank(), head="fc")
    sim = run(simulation(build("fedbabu", task, SGD, {}), task, [federation()]))
    start = task.init(0)
    for leaf, value in sim.server["params"].items():
        torch.testing.assert_close(value[0], start[leaf].double(), rtol=0, atol=1e-15)
    drawn: Tensor = net_task().init(0)["fc.weight"]
    assert bool((drawn != 0).all())


def test_the_head_is_no_traffic() -> None:
    """Bytes are those of FedPer: the body down and up."""
    for way in ("bytes_up", "bytes_down"):
        ours, other = (getattr(_net(SGD, {}, n).ledger(), way) for n in ("fedbabu", "fedper"))
        np.testing.assert_array_equal(ours, other)


def test_defaults_and_faults() -> None:
    """Five epochs of the whole model with the rate of training; negative lengths are refused."""
    method = build("fedbabu", net_task(), SGD, {})
    assert [(p.epochs, p.steps) for p in method.use.adapt] == [(5, None)]
    assert method.hyper["ft_lr"].default == 0.2
    assert METHODS["fedbabu"].options["ft_part"][0] == "all"
    for name in ("ft_epochs", "ft_steps"):
        with pytest.raises(ConfigError, match=f"{name} must be >= 0, got -1; 0 leaves"):
            build("fedbabu", net_task(), SGD, {name: -1})
