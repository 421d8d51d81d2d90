"""FedBN: normalisation layers stay at home, found by their type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.methods import build
from sartor.models import resnet8
from tests.toys import federation, net_task, run, simulation

SGD = Local(epochs=2, batch=3, lr=0.2)


class Normed(nn.Module):
    """Two normalisation layers with unusual names, and a layer whose name says "bn" and is none."""

    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.Linear(4, 6)
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)))
        self.down = nn.GroupNorm(2, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.tanh(self.down(self.deep(self.bn1(x)))))
        return found


NORMED = Task(Normed(), head="fc")
AT_HOME = {"deep.0.1.weight", "deep.0.1.bias", "down.weight", "down.bias"}


def _private(module: nn.Module, **options: Any) -> set[str]:
    task = Task(module)
    return set(filter(build("fedbn", task, SGD, options).private, task.leaf_names))


def test_layers_are_found_by_type_at_any_depth() -> None:
    """Nested layers and layers without "bn" in the name are found; a Linear called bn1 is not."""
    assert _private(Normed()) == AT_HOME
    net = resnet8(input_shape=(1, 8, 8), num_classes=3)
    wanted = {k for k, p in net.named_parameters() if p.dim() == 1 and not k.startswith("fc.")}
    assert _private(net) == wanted
    assert {"norm.weight", "stage2.shortcut.1.bias"} < wanted
    assert len(wanted) == 18


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.BatchNorm1d(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_kind_of_normalisation_stays_at_home(layer: nn.Module) -> None:
    """All scales and shifts are private, also those of a network that is one such layer."""
    inside = {f"1.{k}" for k, _ in layer.named_parameters()}
    assert inside
    assert _private(nn.Sequential(nn.Linear(4, 4), layer)) == inside
    assert _private(layer) == {k for k, _ in layer.named_parameters()}


def test_clients_agree_on_everything_but_their_normalisation() -> None:
    """After download the shared leaves are one; each client has scales and shifts of its own."""
    method = build("fedbn", NORMED, SGD, {})
    sim = run(simulation(method, NORMED, [federation()], participation="all"))
    assert set(sim.server["params"]) == set(NORMED.leaf_names) - AT_HOME
    models = [sim.params(i) for i in range(5)]
    for leaf in NORMED.leaf_names:
        different = [not torch.equal(models[0][leaf], m[leaf]) for m in models[1:]]
        assert different == [leaf in AT_HOME] * 4, leaf


def test_the_traffic_is_fedavgs_without_the_normalisation() -> None:
    """Eight bytes a number and way: 24 numbers of FedAvg's stay at home."""
    books = [
        run(simulation(build(n, NORMED, SGD, {}), NORMED, [federation()])).ledger()
        for n in ("fedavg", "fedbn")
    ]
    saved = books[0].bytes_up - books[1].bytes_up
    num = books[0].bytes_up / (8 * sum(p.numel() for p in NORMED.module.parameters()))
    np.testing.assert_array_equal(saved, 24 * 8 * num)
    np.testing.assert_array_equal(books[0].bytes_down - books[1].bytes_down, saved)


def test_it_helps_clients_whose_inputs_are_shifted() -> None:
    """Feature shift: every other client sees the second input with the opposite sign.

    A scale per client undoes it, one for all cannot.
    """
    draw = torch.Generator().manual_seed(5)
    fed = federation(sizes=(40,) * 5, test=40)
    x = torch.randn(len(fed.x), 4, generator=draw, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for i in range(5):
        for rows in (fed.train.of(i), fed.val.of(i), fed.test.of(i)):
            x[rows] *= torch.tensor([1.0, 1.0 if i % 2 else -1.0, 1.0, 1.0]).double()
    fed = type(fed)(x, y, fed.train, fed.val, fed.test, fed.names, 3, {})

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.body = nn.Linear(4, 16)
            self.fc = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.fc(torch.tanh(self.body(self.norm(x))))
            return found

    task, loss = Task(Scaled(), head="fc"), {}
    local = Local(epochs=4, batch=10, lr=0.3)
    for name in ("fedavg", "fedbn"):
        sim = simulation(
            build(name, task, local, {}), task, [fed], rounds=12, participation="all", eval_every=12
        )
        loss[name] = float(run(sim).scores()["pre", "test"].loss[0, -1].sum())
    assert loss["fedbn"] < 0.8 * loss["fedavg"]


def test_a_network_without_normalisation_is_refused_when_asked() -> None:
    """Strict: the error says what to do; named layers, or layers of that kind, are accepted."""
    with pytest.raises(ConfigError, match=r"no scales.*GroupNorm.*resnet8.*private=.*strict=false"):
        build("fedbn", net_task(), SGD, {"strict": True})
    bare = Task(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, elementwise_affine=False)))
    with pytest.raises(ConfigError, match="no scales and shifts"):
        build("fedbn", bare, SGD, {"strict": True})
    assert build("fedbn", net_task(), SGD, {"strict": True, "private": ("fc",)}).private("fc.bias")
    assert build("fedbn", NORMED, SGD, {"strict": True}).private("down.bias")
