"""What a method sends and computes, measured: a round of it on a toy federation.

``python -m sartor.analysis.traffic`` measures every listed method and writes
``methods/measured.json``, from which lists and pages are made without training; a law holds the
file to the measurement.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor import models
from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.engines.parts import Receipt
from sartor.engines.sequential import Sequential
from sartor.methods import METHODS, Factory, build
from sartor.results.scores import Run
from sartor.training.simulation import Simulation

_CLIENTS, _SAMPLES, _CLASSES = 3, 8, 10
_TRAINED = 4  # samples of a client that are neither for test nor for validation: one batch

MEASURED = Path(__file__).parents[1] / "methods" / "measured.json"
"""The figures of every listed method, as :func:`traffic` finds them."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and work per client, divided by those of the model and of one local pass.

    Attributes:
        down: to a participant, in a round.
        up: from a participant, in a round.
        once: both ways, outside of the rounds.
        gradients: samples through gradients in a round, for every training sample of a
            participant, where local training is one pass; FedAvg has 1.
    """

    down: float
    up: float
    once: float
    gradients: float


def traffic(method: str | Factory) -> Traffic:
    """Run a method on three clients with a small network and read the ledger of its second round.

    Methods that take linear models only have one.

    In the first one some methods have nothing to send yet, such as prototypes.

    >>> traffic("fedavg")
    Traffic(down=1.0, up=1.0, once=0.0, gradients=1.0)
    """
    count = _CLIENTS * _SAMPLES
    x = torch.linspace(-1.0, 1.0, count * 64).reshape(count, 64)
    y = torch.arange(count) % _CLASSES
    who = np.repeat([f"client {i}" for i in range(_CLIENTS)], _SAMPLES)
    federation = Federation.from_arrays(x, y, client=who, test=0.25, val=0.25)
    small = isinstance(method, str) and method in METHODS and METHODS[method].small
    network = models.mclr(federation) if small else models.dnn(federation)
    task = Task(network, network.head)
    simulation = _simulation(method, task, federation, rounds=2)
    simulation.step()
    simulation.step()
    ledger = simulation.ledger()
    size = _CLIENTS * tree.num_bytes(task.init(0))
    return Traffic(
        down=float(ledger.bytes_down[0, 1]) / size,
        up=float(ledger.bytes_up[0, 1]) / size,
        once=float(ledger.setup_bytes[0]) / size,
        gradients=float(ledger.gradient_evaluations[0, 1]) / (_CLIENTS * _TRAINED),
    )


def known(name: str) -> Traffic:
    """Return the stored figures of a listed method; a method that has none is measured.

    >>> known("fedper").up < known("fedavg").up
    True
    """
    stored = _stored()
    return Traffic(**stored[name]) if name in stored else traffic(name)


@cache
def _stored() -> dict[str, dict[str, float]]:
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}


def measure_all() -> str:
    """Measure every listed method; return the text of :data:`MEASURED`."""
    found = {name: {k: round(v, 4) for k, v in asdict(traffic(name)).items()} for name in METHODS}
    return "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in found.items()) + "\n}\n"


def one_round(
    method: str | Factory, task: Task, federation: Federation, *, before: int = 0, **options: Any
) -> Receipt:
    """Run ``before`` rounds of all clients and one more, and return what that one cost."""
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
        points=(record.use.headline,),
    )


if __name__ == "__main__":
    MEASURED.write_text(measure_all(), encoding="utf-8")
