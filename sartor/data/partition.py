"""Division of one labelled data set among clients: Dirichlet, pathological, IID, by attribute.

Two protocols are in use for the same words, and they differ in more than detail:

- ``authors`` (the generator published with FedAPA): the official training and test sets stay
  apart, one matrix of class shares is applied to both, samples are taken in stored order, and
  draws are repeated until every client has more than 128 training and more than 2 test samples.
- ``pfllib`` (after PFLlib's generator): both sets are merged, divided, and each client's samples
  are split at random, 75% for training; no client grows beyond its fair size in a Dirichlet draw,
  and draws are repeated until the smallest client has ``least`` samples.

Draws are tried on counts alone, thousands of them if need be; rows are cut once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor.data.draws import TRAIN_SHARE, Draw, authors, pfllib
from sartor.data.split import Int, Ragged, split_rows
from sartor.errors import ConfigError, FederationError, did_you_mean

KINDS = ("column", "dirichlet", "iid", "pathological")
PROTOCOLS = ("authors", "pfllib")
MAX_TRIES = 20_000


@dataclass(frozen=True)
class PartitionSpec:
    """A partition as written on the command line: kind, its value, and perhaps the protocol."""

    kind: str
    value: float | str | None = None
    protocol: str | None = None

    def __str__(self) -> str:
        """Return the form that ``parse_partition`` reads."""
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return ":".join(part for part in (self.kind, value, self.protocol) if part is not None)


@dataclass(frozen=True)
class Partition:
    """Rows of every client, and how they were drawn."""

    train: Ragged
    test: Ragged
    names: tuple[str, ...]
    info: dict[str, Any]


def parse_partition(text: str) -> PartitionSpec:
    """Read ``dirichlet:0.1``, ``pathological:2``, ``iid`` or ``column:writer``.

    A protocol may follow: ``dirichlet:0.1:pfllib``.

    >>> parse_partition("dirichlet:0.1:pfllib")
    PartitionSpec(kind='dirichlet', value=0.1, protocol='pfllib')
    """
    kind, *rest = [part.strip() for part in text.split(":")]
    if kind not in KINDS:
        raise ConfigError(f"Unknown partition {kind!r} in {text!r}{did_you_mean(kind, KINDS)}")
    value: float | str | None = None
    if kind != "iid":
        if not rest or not rest[0]:
            example = {"dirichlet": "0.1", "pathological": "2", "column": "writer"}[kind]
            raise ConfigError(f"Partition {kind!r} needs a value, such as {kind}:{example}.")
        value = rest.pop(0) if kind == "column" else _number(kind, rest.pop(0))
    protocol = rest.pop(0) if rest else None
    if rest:
        raise ConfigError(
            f"Partition {text!r} has too many parts; write kind:value or kind:value:protocol."
        )
    if protocol is not None:
        _known_protocol(protocol)
    return PartitionSpec(kind, value, protocol)


def _number(kind: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"Partition {kind} needs a number, got {text!r}.") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"Partition {kind} needs a positive number, got {text}.")
    if kind == "pathological" and value != int(value):
        raise ConfigError(f"Partition pathological needs a whole number of classes, got {text}.")
    return value


def _known_protocol(protocol: str) -> None:
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, PROTOCOLS)
        raise ConfigError(f"Unknown protocol {protocol!r}{hint}")


def divide(
    y: npt.ArrayLike,
    partition: str | PartitionSpec,
    *,
    clients: int | None = None,
    num_train: int | None = None,
    num_classes: int | None = None,
    protocol: str | None = None,
    attributes: dict[str, Any] | None = None,
    seed: int = 0,
    min_train: int | None = None,
    min_test: int | None = None,
    max_tries: int = MAX_TRIES,
) -> Partition:
    """Divide labelled samples among clients.

    Args:
        y: ``(samples,)`` labels; the official training samples come first.
        partition: kind and value, such as ``dirichlet:0.1``; see ``parse_partition``.
        clients: the number of clients; for ``column`` the default is one for every value.
        num_train: how many samples are official training samples. None if there is no official
            split; protocol ``authors`` then makes one, stratified, 75% for training.
        num_classes: the number of classes; by default the largest label + 1.
        protocol: ``authors`` (default) or ``pfllib``.
        attributes: columns for ``column:NAME``, each ``(samples,)``.
        seed: seed of the draw.
        min_train: the least number of training samples of a client. By default the protocol's
            own, if the mean client has five times as much; otherwise a tenth of the mean
            client. In protocol ``pfllib`` the floor is on all samples of a client.
        min_test: the least number of test samples, by the same rule (``authors`` only).
        max_tries: how many draws to try before giving up.

    Returns:
        Rows for training and test, names and a record of the draw.
    """
    labels = np.asarray(y, dtype=np.int64)
    spec = parse_partition(partition) if isinstance(partition, str) else partition
    if protocol is not None:
        _known_protocol(protocol)
        if spec.protocol not in (None, protocol):
            raise ConfigError(f"Partition {spec} contradicts protocol={protocol!r}; give one.")
    chosen = protocol or spec.protocol
    classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if spec.kind == "column":
        return _by_column(labels, spec, chosen, clients, num_train, attributes or {}, seed)
    chosen = chosen or "authors"
    clients = 20 if clients is None else clients
    if clients < 1:
        raise ConfigError(f"clients must be >= 1, got {clients}.")
    if clients > len(labels):
        raise FederationError(
            f"{clients} clients cannot share {len(labels)} samples; use fewer clients."
        )
    draw = Draw(
        labels,
        str(spec),
        spec.kind,
        spec.value if isinstance(spec.value, float) else None,
        clients,
        classes,
        _generator(seed, spec.kind),
        max_tries,
        {},
    )
    names = tuple(f"client{i:0{len(str(clients - 1))}d}" for i in range(clients))
    info = {"partition": spec.kind, "value": spec.value, "protocol": chosen, "seed": seed}
    if chosen == "authors":
        official = _official(labels, num_train, draw.info)
        train, test = authors(draw, official, min_train, min_test)
    else:
        if min_test is not None:
            raise ConfigError("min_test belongs to protocol authors; pfllib has min_train only.")
        whole = pfllib(draw, min_train)
        owner = np.full(len(labels), -1, dtype=np.int64)
        owner[whole.rows.numpy()] = whole.owner.numpy()
        train, test = _three_quarters(owner, names, seed)
    return Partition(train, test, names, info | {"clients": clients} | draw.info)


def _generator(seed: int, kind: str) -> np.random.Generator:
    if seed < 0:
        raise ConfigError(f"seed must be >= 0, got {seed}.")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, KINDS.index(kind)])))


def _official(y: Int, num_train: int | None, info: dict[str, Any]) -> tuple[Int, Int]:
    """Return the rows of the official training and test set."""
    if num_train is None:
        train, _, test = split_rows(
            np.zeros_like(y), ["all"], test=1 - TRAIN_SHARE, val=0.0, seed=0, classes=y
        )
        info["official_split"] = "none; stratified 75/25 made here"
        return train.rows.numpy(), test.rows.numpy()
    rows = np.arange(len(y), dtype=np.int64)
    return rows[:num_train], rows[num_train:]


def _three_quarters(owner: Int, names: Sequence[str], seed: int) -> tuple[Ragged, Ragged]:
    """Split every client at random, three quarters (rounded down, at least one) for training."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    num_test = sizes - np.maximum((sizes * TRAIN_SHARE).astype(np.int64), 1)
    train, _, test = split_rows(owner, names, test=num_test, val=0.0, seed=seed)
    return train, test


# ---------------------------------------------------------------------- by attribute


def _by_column(
    y: Int,
    spec: PartitionSpec,
    protocol: str | None,
    clients: int | None,
    num_train: int | None,
    attributes: dict[str, Any],
    seed: int,
) -> Partition:
    """Make one client of every value of a column, or of some values drawn at random."""
    column = str(spec.value)
    if column not in attributes:
        known = did_you_mean(column, attributes) if attributes else "; it has no columns"
        raise ConfigError(f"The data have no column {column!r}{known}")
    values, owner = np.unique(np.asarray(attributes[column]), return_inverse=True)
    owner = owner.astype(np.int64)
    if clients is not None:
        if not 1 <= clients <= len(values):
            raise FederationError(
                f"Column {column!r} has {len(values)} values; clients must lie in "
                f"1..{len(values)}, got {clients}."
            )
        kept = np.sort(_generator(seed, spec.kind).choice(len(values), clients, replace=False))
        place = np.full(len(values), -1, dtype=np.int64)
        place[kept] = np.arange(clients)
        owner, values = place[owner], values[kept]
    names = tuple(str(value) for value in values.tolist())
    rows = np.arange(len(y), dtype=np.int64)
    official = [Ragged.from_owner(one, owner[one], len(names)) for one in _cut(rows, num_train)]
    complete = all(bool((split.sizes > 0).all()) for split in official) and len(official) == 2
    if protocol == "authors" and not complete:
        raise FederationError(
            f"Not every value of {column!r} has official training and test samples; use "
            f"{spec.kind}:{column}:pfllib, which pools and splits each client 75/25."
        )
    if protocol == "pfllib" or not complete:
        protocol = "pfllib"
        train, test = _three_quarters(owner, names, seed)
    else:
        protocol = "authors"
        train, test = official
    if bool(torch.any(train.sizes == 0)):
        raise FederationError(f"A value of {column!r} has no samples.")
    info = {"partition": "column", "value": column, "protocol": protocol, "seed": seed}
    return Partition(train, test, names, info | {"clients": len(names)})


def _cut(rows: Int, num_train: int | None) -> list[Int]:
    return [rows] if num_train is None else [rows[:num_train], rows[num_train:]]
