"""Define the workloads, and the folder from which every contender reads the data.

This module needs only numpy, so that a contender in another environment can use it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TOKENS, LENGTH = 1000, 25  # token ids of the texts, 0 for padding; tokens of a text at most


@dataclass(frozen=True)
class Workload:
    """One setting of federated averaging.

    Attributes:
        name: what ``--workload`` calls it.
        model: lenet5, dnn (784-100-10) or mclr for images, lstm for texts.
        clients: how many clients.
        partition: how the samples are divided, as ``sartor run --partition`` has it.
        batch: samples a batch.
        epochs: local epochs a round.
        cohort: clients that train in a round; all of them are evaluated.
        lr: rate of plain SGD.
        samples: training samples in all; tests are a sixth of that.
    """

    name: str
    model: str
    clients: int
    partition: str
    batch: int
    epochs: int
    cohort: int
    lr: float
    samples: int = 60_000

    @property
    def classes(self) -> int:
        """The number of classes: ten garments, or two moods."""
        return 2 if self.model == "lstm" else 10

    def describe(self) -> str:
        """Return one line for the head of a table."""
        share = "all train" if self.cohort == self.clients else f"{self.cohort} train in a round"
        return (
            f"{self.model}, {self.clients} clients ({self.partition}, {share}), "
            f"batch {self.batch}, local epochs {self.epochs}"
        )


WORKLOADS = {
    w.name: w
    for w in (
        Workload("lenet", "lenet5", 20, "dirichlet:0.1", 64, 2, 20, 0.05),
        Workload("dnn", "dnn", 100, "iid", 20, 1, 100, 0.05),
        Workload("mclr", "mclr", 100, "iid", 20, 1, 100, 0.05),
        Workload("many", "lenet5", 1000, "iid", 64, 2, 100, 0.05),
        Workload("lstm", "lstm", 20, "iid", 20, 1, 20, 0.1, samples=6_000),
    )
}


def quick(workload: Workload) -> Workload:
    """Return the same setting with a tenth of the samples (and of the thousand clients)."""
    small = replace(workload, samples=workload.samples // 10)
    return replace(small, clients=100, cohort=10) if workload.clients == 1000 else small


@dataclass(frozen=True)
class Share:
    """The data of a workload, divided among the clients."""

    x: Array
    y: Array
    train: list[Array]
    test: list[Array]
    workload: Workload
    source: str

    def steps(self) -> float:
        """Return the mean number of client-steps in a round."""
        w = self.workload
        batches = [-(-len(rows) // w.batch) * w.epochs for rows in self.train]
        return sum(batches) * w.cohort / w.clients

    def save(self, folder: Path) -> None:
        """Write the data to a folder that ``load`` reads."""
        arrays = {"x": self.x, "y": self.y}
        for name, lists in (("train", self.train), ("test", self.test)):
            arrays[f"{name}_rows"] = np.concatenate(lists)
            arrays[f"{name}_ends"] = np.cumsum([len(rows) for rows in lists])
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        about = {"workload": asdict(self.workload), "source": self.source}
        (folder / "about.json").write_text(json.dumps(about))

    @classmethod
    def load(cls, folder: Path) -> Share:
        """Read what ``save`` wrote."""
        about = json.loads((folder / "about.json").read_text())

        def lists(name: str) -> list[Array]:
            rows, ends = (np.load(folder / f"{name}_{part}.npy") for part in ("rows", "ends"))
            return np.split(rows, ends[:-1])

        return cls(
            np.load(folder / "x.npy"),
            np.load(folder / "y.npy"),
            lists("train"),
            lists("test"),
            Workload(**about["workload"]),
            about["source"],
        )
