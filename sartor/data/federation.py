"""Federation: flat features and labels, and for every client three lists of sample rows.

The features of all clients are one tensor, so that a batch for many clients is one gather; a
client is a name and its rows for training, validation and test. Everything that could not be
trained on is refused here, with all faults listed at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError, did_you_mean
from sartor.core.task import PADDING
from sartor.data.checks import (
    MATRIX_TASKS,
    leak_faults,
    raise_faults,
    sample_faults,
    structural_faults,
)
from sartor.data.split import SPLITS, Int, Ragged


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of all clients.

    The tensors are shared, not copied: federations made from one data set hold the same ``x``.
    Treat them as read-only.

    Attributes:
        x: ``(samples, ...)`` features, float32 (float64 is kept; int64 for tokens), on the CPU.
        y: ``(samples,)`` int64 class labels, or real targets when ``num_classes`` is 0;
            ``(samples, labels)`` 0.0 and 1.0 of a multi-label task; ``(samples, steps)`` token ids
            of a next-token task, 0 for padding.
        train: rows of every client for training; no client may be empty.
        val: rows for validation; may be empty for everybody.
        test: rows for testing.
        names: one name per client.
        num_classes: the number of classes, of labels, or of token ids; 0 for regression.
        info: how the federation was made, as JSON-able values.
        task: "classification", "multilabel", "regression" or "next-token"; by default the first,
            or regression when ``num_classes`` is 0.
    """

    x: Tensor
    y: Tensor
    train: Ragged
    val: Ragged
    test: Ragged
    names: tuple[str, ...]
    num_classes: int
    info: dict[str, Any] = field(default_factory=dict)
    task: str = ""

    if not TYPE_CHECKING:  # a checker of types sees the fields

        def __new__(cls, *given: Any, **named: Any) -> Federation:
            """Tell who calls it with arrays alone what to call instead."""
            fields = list(cls.__dataclass_fields__)
            places = set(fields[: len(given)]) | set(named)
            if places and (not places >= set(fields[:7]) or places - set(fields)):
                raise FederationError(
                    "Federation(...) wants samples that are divided among clients already; with "
                    "arrays use Federation.from_arrays(x, y, client=...), where client names the "
                    "client of every sample. For a table there is Federation.from_dataframe(df, "
                    "client='COLUMN', label='COLUMN'), for files Federation.from_folder(path)."
                )
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained on."""
        if not (isinstance(self.x, Tensor) and isinstance(self.y, Tensor)):
            raise FederationError(
                f"Federation(...) takes tensors, got {type(self.x).__name__} and "
                f"{type(self.y).__name__}; Federation.from_arrays(x, y, client=...) takes arrays."
            )
        if not self.task or self.task in ("classification", "regression"):
            plain = "classification" if self.num_classes else "regression"
            object.__setattr__(self, "task", plain)
        raise_faults(structural_faults(self))
        raise_faults(sample_faults(self, self._owners_of) + leak_faults(self))

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        client: Any,
        test: Any = 0.25,
        val: float = 0.0,
        seed: int = 0,
        stratify: bool = False,
        num_classes: int | None = None,
        names: Sequence[str] | None = None,
        min_samples: int = 0,
        tokens: bool = False,
        task: str | None = None,
        standardise: bool = False,
        info: dict[str, Any] | None = None,
    ) -> Federation:
        """Make a federation from arrays and a client id for every sample.

        Args:
            x: ``(samples, ...)`` numbers; array or tensor.
            y: ``(samples,)`` labels 0, 1, ..., or strings (classes in sorted order); ``(samples,
                labels)`` of 0 and 1 with ``task="multilabel"``; ``(samples, steps)`` token ids
                with ``task="next-token"``, or None for the tokens of ``x`` shifted by one.
            client: ``(samples,)`` ids, integers or strings. Without ``names``, clients are the
                distinct ids in sorted order.
            test: the fraction of every client's samples held out for testing, or ``(samples,)``
                booleans that mark the test samples.
            val: the fraction held out for validation.
            seed: seed of the division. A client's division depends on its own name and data only.
            stratify: keep the class shares of every client in each part.
            num_classes: at least the largest label + 1, which is the default; 0 for regression.
            names: all clients, in order. Integer ids are then positions in it, strings members.
            min_samples: leave out clients with fewer training samples than this.
            tokens: keep integer features as int64 token ids instead of real numbers.
            task: "classification", "multilabel", "regression" or "next-token"; by default the
                first, or regression with ``num_classes=0``.
            standardise: give every feature (every channel of images) mean 0 and deviation 1 by
                federated statistics of the training samples; ``Result.predict`` does the same.
            info: what to remember about the origin; JSON-able.

        Returns:
            The federation, with the samples in the given order.

        Example:
            >>> fed = Federation.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], client=[7, 7, 8])
            >>> fed.names, fed.train.sizes.tolist(), fed.test.sizes.tolist()
            (('7', '8'), [1, 1], [1, 0])
        """
        from sartor.data.arrays import from_arrays

        return from_arrays(
            x,
            y,
            client=client,
            test=test,
            val=val,
            seed=seed,
            stratify=stratify,
            num_classes=num_classes,
            names=names,
            min_samples=min_samples,
            tokens=tokens,
            task=task,
            standardise=standardise,
            info=info,
        )

    @classmethod
    def from_dataframe(
        cls, frame: Any, *, client: str, label: str | Sequence[str], **rest: Any
    ) -> Federation:
        """Take a table with a column for the client; see ``sartor.data.tables.from_dataframe``."""
        from sartor.data.tables import from_dataframe

        return from_dataframe(frame, client=client, label=label, **rest)

    @classmethod
    def from_file(
        cls, path: str | Path, *, client: str, label: str | Sequence[str], **rest: Any
    ) -> Federation:
        """Read one CSV, TSV or Parquet file; see ``sartor.data.tables.from_file``."""
        from sartor.data.tables import from_file

        return from_file(path, client=client, label=label, **rest)

    @classmethod
    def from_torch(cls, datasets: Mapping[str, Any], **rest: Any) -> Federation:
        """Take one torch Dataset per client; see ``sartor.data.sources.from_torch``."""
        from sartor.data.sources import from_torch

        return from_torch(datasets, **rest)

    @classmethod
    def from_hf(cls, dataset: Any, client_column: str, **rest: Any) -> Federation:
        """Take a Hugging Face data set; see ``sartor.data.sources.from_hf``."""
        from sartor.data.sources import from_hf

        return from_hf(dataset, client_column, **rest)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        label: str | None = None,
        test: float = 0.25,
        val: float = 0.0,
        seed: int = 0,
        stratify: bool = False,
        num_classes: int | None = None,
        min_samples: int = 0,
        standardise: bool = False,
        image_size: int | tuple[int, int] | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> Federation:
        """Read a file or a folder of images per client; see ``sartor.data.folder.from_folder``."""
        from sartor.data.folder import from_folder

        return from_folder(
            path,
            label=label,
            test=test,
            val=val,
            seed=seed,
            stratify=stratify,
            num_classes=num_classes,
            min_samples=min_samples,
            standardise=standardise,
            image_size=image_size,
            like=like,
        )

    @classmethod
    def from_dataset(
        cls,
        name: str,
        *,
        partition: str = "dirichlet:0.1",
        clients: int | None = None,
        protocol: str | None = None,
        seed: int = 0,
        val: float = 0.0,
        data_dir: str | Path | None = None,
        min_train: int | None = None,
        min_test: int | None = None,
        samples: int | None = None,
        scale: str | None = None,
        length: int | None = None,
        vocabulary: int | None = None,
    ) -> Federation:
        """Divide a named data set among clients; see ``sartor.data.datasets.from_dataset``."""
        from sartor.data.datasets import from_dataset

        return from_dataset(
            name,
            partition=partition,
            clients=clients,
            protocol=protocol,
            seed=seed,
            val=val,
            data_dir=data_dir,
            min_train=min_train,
            min_test=min_test,
            samples=samples,
            scale=scale,
            length=length,
            vocabulary=vocabulary,
        )

    # ------------------------------------------------------------------ reading

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

    def without(self, *clients: str | int) -> Federation:
        """Return the federation without some clients, given by name or by position."""
        keep = torch.ones(self.num_clients, dtype=torch.bool)
        keep[[self.index(client) for client in clients]] = False
        if not bool(keep.any()):
            raise FederationError("without() would leave no client; keep at least one.")
        names = tuple(name for name, kept in zip(self.names, keep.tolist(), strict=True) if kept)
        gone = [name for name, kept in zip(self.names, keep.tolist(), strict=True) if not kept]
        return Federation(
            self.x,
            self.y,
            self.train.select(keep),
            self.val.select(keep),
            self.test.select(keep),
            names,
            self.num_classes,
            self.info | {"left_out": [*self.info.get("left_out", []), *gone]},
            self.task,
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 over features, labels, rows and names, in hexadecimal digits.

        Two federations with the same fingerprint train alike; a resumed run checks it.
        """
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """Return the sizes and the label skew as JSON-able values."""
        from sartor.data.description import describe

        return describe(self)

    def summary(self, limit: int = 20) -> str:
        """Return a table of the first clients: samples of each split and the largest classes."""
        from sartor.data.description import summary

        return summary(self, limit)

    def __repr__(self) -> str:
        """Return the sizes in one line."""
        train, val, test = (len(self.split(name).rows) for name in SPLITS)
        return (
            f"Federation({self.num_clients} clients, train={train}, val={val}, test={test}, "
            f"input_shape={self.input_shape}, num_classes={self.num_classes})"
        )

    # ------------------------------------------------------------------ private

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

    def _owners_of(self, rows: Int) -> list[str]:
        """Name the client of some rows (the first that holds each)."""
        owner = np.full(len(self.x), -1, dtype=np.int64)
        for name in reversed(SPLITS):
            split = self.split(name)
            owner[split.rows.numpy()] = split.owner.numpy()
        return [self.names[owner[row]] if owner[row] >= 0 else "" for row in rows]
