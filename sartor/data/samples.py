"""The samples of all clients: flat features and labels, and three lists of rows for each client.

The features of all clients are one tensor, so that a batch for many clients is one gather. Nothing
is checked here: ``sartor.data.federation`` does so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError, did_you_mean
from sartor.core.task import PADDING
from sartor.data.client_data import ClientData
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
    def clients(self) -> tuple[str, ...]:
        """The names of the clients; ``self[name]`` has the samples of one."""
        return self.names

    def __getitem__(self, client: str | int) -> ClientData:
        """Return the samples of a client given by its name or by its position."""
        index = self.index(client)
        parts = [self.split(name).of(index) for name in SPLITS]
        rows, sizes = torch.cat(parts), [len(part) for part in parts]
        train, val, test = torch.arange(len(rows)).split(sizes)
        names = tuple(self.info.get("class_names", ()))
        return ClientData(self.names[index], self.x[rows], self.y[rows], train, val, test, names)

    def __iter__(self) -> Iterator[ClientData]:
        """Go over the samples of every client."""
        return (self[client] for client in range(self.num_clients))

    def __contains__(self, client: object) -> bool:
        """Say whether there is a client of this name."""
        return client in self._positions

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
        y, owner = self.y[ragged.rows], ragged.owner
        if self.task == "next-token":
            owner = owner.repeat_interleave(y.shape[1])
        cells = owner * self.num_classes + y.flatten()
        counts = torch.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        if self.task == "next-token":
            counts[:, PADDING] = 0
        return counts

    def num_answers(self, split: str = "test") -> Tensor:
        """Count the answers that are scored, ``(clients,)``: samples, or true tokens of texts."""
        ragged = self.split(split)
        if self.task != "next-token":
            return ragged.sizes
        true = (self.y[ragged.rows] != PADDING).sum(1)
        return torch.zeros(self.num_clients, dtype=torch.int64).index_add_(0, ragged.owner, true)

    def _keep(self, kept: Tensor) -> Self:
        """Return the samples of some clients, by a boolean mask; the others are "left_out"."""
        parts: dict[str, Any] = {name: self.split(name).select(kept) for name in SPLITS}
        names = tuple(self.names[i] for i in torch.nonzero(kept).flatten().tolist())
        gone = [self.names[i] for i in torch.nonzero(~kept).flatten().tolist()]
        info = self.info | {"left_out": [*self.info.get("left_out", []), *gone]}
        return replace(self, names=names, info=info, **parts)

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

    def describe(self) -> dict[str, Any]:
        """Return the sizes and the label skew as JSON-able values.

        The skew is the mean over clients of the total variation distance between a client's class
        shares p_i and those of all training samples p: ½ Σ_c |p_ic − p_c|.
        """
        counts = self.label_counts()
        sizes = {name: self.split(name).sizes for name in SPLITS}
        skew, held = None, None
        if self.num_classes:
            shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
            whole = counts.sum(0) / counts.sum().clamp(min=1)
            skew = float(0.5 * (shares - whole).abs().sum(1).mean())
            held = float((counts > 0).sum(1).double().mean())
        return {
            "clients": self.num_clients,
            "samples": {name: int(size.sum()) for name, size in sizes.items()},
            "smallest": {name: int(size.min()) for name, size in sizes.items()},
            "largest": {name: int(size.max()) for name, size in sizes.items()},
            "input_shape": list(self.input_shape),
            "num_classes": self.num_classes,
            "task": self.task,
            "classes_per_client": held,
            "label_skew": skew,
            "info": self.info,
        }

    def summary(self, limit: int = 20) -> str:
        """Return a table of the first clients: samples of each split and the largest classes."""
        facts = self.describe()
        lines = [
            f"{self.num_clients} clients, {facts['samples']['train']} training, "
            f"{facts['samples']['val']} validation, {facts['samples']['test']} test samples; "
            f"inputs {'x'.join(map(str, self.input_shape)) or 'scalar'}, "
            + {
                "classification": f"{self.num_classes} classes",
                "multilabel": f"{self.num_classes} labels, several at once",
                "regression": "real targets",
                "next-token": f"the next of {self.num_classes} tokens",
            }[self.task]
        ]
        if facts["label_skew"] is not None:
            lines.append(
                f"{facts['classes_per_client']:.1f} classes a client, label skew "
                f"{facts['label_skew']:.2f} (0: all clients alike, towards 1: nothing in common)"
            )
        if "subset" in self.info:
            lines.append(f"a subset of the published data: {self.info['subset']}")
        width = max(6, *(len(name) for name in self.names[:limit]))
        lines.append(f"{'client':<{width}}  {'train':>6}  {'val':>5}  {'test':>5}  classes")
        counts = self.label_counts()[:limit]
        for i, name in enumerate(self.names[:limit]):
            size = [len(self.split(split).of(i)) for split in SPLITS]
            top = torch.argsort(counts[i], descending=True, stable=True)[:5].tolist()
            shown = " ".join(f"{c}:{int(counts[i, c])}" for c in top if counts[i, c] > 0)
            more = int((counts[i] > 0).sum()) - sum(int(counts[i, c]) > 0 for c in top)
            tail = f" +{more} more" if more else ""
            lines.append(
                f"{name:<{width}}  {size[0]:>6}  {size[1]:>5}  {size[2]:>5}  {shown}{tail}"
            )
        rest = self.num_clients - limit
        if rest > 0:
            lines.append(f"... and {rest} more client{'s' if rest > 1 else ''}")
        return "\n".join(lines)

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
        splits = map(self.split, SPLITS)
        tensors = [self.x, self.y] + [t for split in splits for t in (split.rows, split.offsets)]
        for tensor in tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
        digest.update(json.dumps([self.num_classes, *self.names]).encode())
        if self.task in MATRIX_TASKS:
            digest.update(self.task.encode())
        return digest.hexdigest()
