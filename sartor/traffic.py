"""What a method sends, measured: a round of it on a toy federation, in sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sartor import models, tree
from sartor.cohort import Participation
from sartor.data.federation import Federation
from sartor.engines.round import Receipt
from sartor.engines.sequential import Sequential
from sartor.local import Local
from sartor.methods import Factory, build
from sartor.scores import Run
from sartor.simulation import Simulation
from sartor.task import Task

_CLIENTS, _SAMPLES, _CLASSES = 3, 8, 10


@dataclass(frozen=True)
class Traffic:
    """Bytes per client, divided by those of the model.

    Attributes:
        down: to a participant, in a round.
        up: from a participant, in a round.
        once: both ways, outside of the rounds.
    """

    down: float
    up: float
    once: float


def traffic(method: str | Factory) -> Traffic:
    """Run a method on three clients with a small network and read the ledger of its second round.

    In the first one some methods have nothing to send yet, such as prototypes.

    >>> traffic("fedavg")
    Traffic(down=1.0, up=1.0, once=0.0)
    """
    count = _CLIENTS * _SAMPLES
    x = torch.linspace(-1.0, 1.0, count * 64).reshape(count, 64)
    y = torch.arange(count) % _CLASSES
    who = np.repeat([f"client {i}" for i in range(_CLIENTS)], _SAMPLES)
    federation = Federation.from_arrays(x, y, client=who, test=0.25, val=0.25)
    network = models.dnn(federation)
    task = Task(network, network.head)
    simulation = _simulation(method, task, federation, rounds=2)
    simulation.step()
    simulation.step()
    ledger = simulation.ledger()
    size = _CLIENTS * tree.num_bytes(task.init(0))
    counted = (ledger.bytes_down[0, 1], ledger.bytes_up[0, 1], ledger.setup_bytes[0])
    return Traffic(*(float(number) / size for number in counted))


def one_round(
    method: str | Factory,
    task: Task,
    federation: Federation,
    *,
    before: int = 0,
    **options: Any,
) -> Receipt:
    """Run one round of everybody, without scoring, and return what it cost.

    Args:
        method: a name or a factory.
        task: the network and its loss.
        federation: the clients.
        before: rounds before the one whose cost is returned.
        options: of the method.
    """
    simulation = _simulation(method, task, federation, rounds=before + 1, **options)
    server = simulation.server
    for t in range(before + 1):
        server, receipt = simulation.rounds.train(server, simulation.store, t)
    return receipt


def _simulation(
    method: str | Factory, task: Task, federation: Federation, rounds: int, **options: Any
) -> Simulation:
    record = build(method, task, Local(steps=1, batch=4), options)
    return Simulation(
        record,
        task,
        [federation],
        [Run(seed=0)],
        Sequential,
        rounds=rounds,
        participation=Participation(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        points=(record.headline,),
    )
