"""The samples of all clients: flat features and labels, and three lists of rows for each client.

The features of all clients are one tensor, so that a batch for many clients is one gather. Nothing
is checked here: ``sartor.data.federation`` does so.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError, did_you_mean
from sartor.core.task import PADDING
from sartor.data.split import SPLITS, Int, Ragged

TASKS = ("classification", "multilabel", "regression", "next-token")
"""What there is to learn."""

MATRIX_TASKS = ("multilabel", "next-token")
"""Tasks whose samples have several labels each."""


@dataclass(frozen=True, eq=False)
class Samples:
    """What readers return, unchecked; :class:`sartor.Federation` describes the fields."""

    x: Tensor
    y: Tensor
    train: Ragged
    val: Ragged
    test: Ragged
    names: tuple[str, ...]
    num_classes: int
    info: dict[str, Any] = field(default_factory=dict)
    task: str = ""

    def __post_init__(self) -> None:
        """Fill in the task that the number of classes implies."""
        if not self.task or self.task in ("classification", "regression"):
            plain = "classification" if self.num_classes else "regression"
            object.__setattr__(self, "task", plain)

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.names)

    @property
    def num_samples(self) -> int:
        """The number of samples that some client holds, all splits together."""
        return sum(len(self.split(name).rows) for name in SPLITS)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def split(self, name: str) -> Ragged:
        """Return the split called train, val or test."""
        if name not in SPLITS:
            raise FederationError(f"There is no split {name!r}{did_you_mean(name, SPLITS)}")
        ragged: Ragged = getattr(self, name)
        return ragged

    def label_counts(self, split: str = "train") -> Tensor:
        """Count the labels of every client: ``(clients, classes)`` int64."""
        ragged = self.split(split)
        shape = (self.num_clients, self.num_classes)
        if self.num_classes == 0:
            return torch.zeros(shape, dtype=torch.int64)
        if self.task == "multilabel":
            sums = torch.zeros(shape, dtype=torch.int64)
            return sums.index_add_(0, ragged.owner, self.y[ragged.rows].long())
        if self.task == "next-token":
            steps = self.y.shape[1]
            cells = ragged.owner.repeat_interleave(steps) * self.num_classes
            cells = cells + self.y[ragged.rows].flatten()
            counts = torch.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
            counts[:, PADDING] = 0
            return counts
        cells = ragged.owner * self.num_classes + self.y[ragged.rows]
        return torch.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)

    def num_answers(self, split: str = "test") -> Tensor:
        """Count the answers that are scored, ``(clients,)``: samples, or true tokens of texts."""
        ragged = self.split(split)
        if self.task != "next-token":
            return ragged.sizes
        true = (self.y[ragged.rows] != PADDING).sum(1)
        return torch.zeros(self.num_clients, dtype=torch.int64).index_add_(0, ragged.owner, true)

    def index(self, client: str | int) -> int:
        """Return the position of a client given by its name or by its position."""
        if isinstance(client, str):
            try:
                return self._positions[client]
            except KeyError:
                hint = did_you_mean(client, self.names[:1000])
                raise FederationError(f"There is no client {client!r}{hint}") from None
        if not 0 <= int(client) < self.num_clients:
            raise FederationError(
                f"There is no client {client}; positions go from 0 to {self.num_clients - 1}."
            )
        return int(client)

    def fingerprint(self) -> str:
        """Return a SHA-256 over features, labels, rows and names, in hexadecimal digits.

        Two federations with the same fingerprint train alike; a resumed run checks it.
        """
        return self._fingerprint

    def owners_of(self, rows: Int) -> list[str]:
        """Name the client of some rows (the first that holds each)."""
        owner = np.full(len(self.x), -1, dtype=np.int64)
        for name in reversed(SPLITS):
            split = self.split(name)
            owner[split.rows.numpy()] = split.owner.numpy()
        return [self.names[owner[row]] if owner[row] >= 0 else "" for row in rows]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        tensors = [self.x, self.y] + [t for name in SPLITS for t in self.split(name)]
        for tensor in tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
        digest.update(json.dumps([self.num_classes, *self.names]).encode())
        if self.task in MATRIX_TASKS:
            digest.update(self.task.encode())
        return digest.hexdigest()
