"""What travels, from the ledger, against figures that papers print."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sartor import models
from sartor.data.federation import Federation
from sartor.methods import METHODS
from sartor.task import Task
from sartor.traffic import one_round, traffic

KIB = {
    "fedavg": 484.42,
    "fedphp": 484.42,
    "fedamp": 484.42,
    "fedala": 484.42,
    "pfedla": 484.42,
    "fedapa": 477.78,
    "fedper": 477.78,
    "apple": 5086.4 + 20 * 4 / 1024,  # twenty cores down and one up, and the shares n_j/n
}
"""KiB per client and round, both ways, of LeNet-5 on CIFAR-10 with 20 clients."""


@pytest.mark.parametrize("name", list(KIB))
def test_bytes_on_cifar10_are_those_of_table_2(name: str) -> None:
    """Sun et al. 2025, Table 2: 484 KB for whole models, 478 for extractors, 5087 for APPLE."""
    clients, samples = 20, 3
    x = torch.zeros(clients * samples, 3, 32, 32)
    who = np.repeat([f"c{i:02d}" for i in range(clients)], samples)
    fed = Federation.from_arrays(x, torch.arange(len(x)) % 10, client=who, test=0.34)
    network = models.lenet5(fed)
    receipt = one_round(name, Task(network, network.head), fed)
    kib = (receipt.bytes_down + receipt.bytes_up)[0] / clients / 1024
    assert kib == pytest.approx(KIB[name], abs=0.06)


def test_every_method_has_a_size() -> None:
    """One round on a toy says what a method sends, in models; heads and prototypes are small."""
    sizes = {name: traffic(name) for name in METHODS}
    assert all(s.down >= 0 and s.up >= 0 for s in sizes.values())
    assert sizes["local"].down == sizes["local"].up == 0
    assert sizes["lg-fedavg"].up < 0.2 < sizes["fedper"].up < 1
    assert sizes["fedproto"].up < 0.2
    assert sizes["apple"].down > 3
    assert sizes["fedem"].up == pytest.approx(3, abs=0.01)
