"""Division of one labelled data set among clients: by classes, at random, by attribute.

Two protocols are in use for the same words, and they differ in more than detail:

- ``authors`` (the generator published with FedAPA): the official training and test sets stay
  apart, one matrix of class shares is applied to both, samples are taken in stored order, and
  draws are repeated until every client has more than 128 training and more than 2 test samples.
- ``pfllib`` (after PFLlib's generator): both sets are merged, divided, and each client's samples
  are split at random, 75% for training; no client grows beyond its fair size in a Dirichlet draw,
  and draws are repeated until the smallest client has ``least`` samples.

Draws are tried on counts alone, thousands of them if need be; rows are cut once, at the end.
The partitions of single papers have protocols of their own; see ``sartor.data.paper_partitions``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.draws import TRAIN_SHARE, Draw, authors, pfllib
from sartor.data.paper_partitions import equal_sizes, exact_classes, grouped, lognormal
from sartor.data.split import Int, Ragged, generator, numbered, split_rows

KINDS = ("column", "dirichlet", "iid", "pathological", "classes", "grouped", "lognormal")
PROTOCOLS = ("authors", "pfllib")
_PROTOCOLS_OF = {
    "dirichlet": (*PROTOCOLS, "equal"),
    "classes": ("own", "all"),
    "lognormal": ("mnist", "cifar", "mislabelled"),
}
_MERGED = ("pfllib", "equal")  # these pool official training and test samples
_EXAMPLES = {"dirichlet": "0.1", "column": "writer", "grouped": "0.5", "lognormal": "3"}
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
    """Rows of every client for training and testing, and a record of how they were drawn."""

    train: Ragged
    test: Ragged
    names: tuple[str, ...]
    info: dict[str, Any]
    y: Int | None = None  # all labels, if the partition changed some


def parse_partition(text: str) -> PartitionSpec:
    """Read ``dirichlet:0.1``, ``pathological:2``, ``iid``, ``column:writer``, ``classes:2``, ...

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
            example = _EXAMPLES.get(kind, "2")
            raise ConfigError(f"Partition {kind!r} needs a value, such as {kind}:{example}.")
        value = rest.pop(0) if kind == "column" else _number(kind, rest.pop(0))
    protocol = rest.pop(0) if rest else None
    if rest:
        raise ConfigError(
            f"Partition {text!r} has too many parts; write kind:value or kind:value:protocol."
        )
    if protocol is not None:
        _known_protocol(protocol, kind)
    return PartitionSpec(kind, value, protocol)


def _number(kind: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"Partition {kind} needs a number, got {text!r}.") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"Partition {kind} needs a positive number, got {text}.")
    if kind in ("pathological", "classes", "lognormal") and value != int(value):
        raise ConfigError(f"Partition {kind} needs a whole number of classes, got {text}.")
    return value


def _known_protocol(protocol: str, kind: str) -> None:
    known = _PROTOCOLS_OF.get(kind, PROTOCOLS)
    if protocol not in known:
        hint = did_you_mean(protocol, known)
        raise ConfigError(f"Unknown protocol {protocol!r} of partition {kind}{hint}")


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
    samples: int | None = None,
    train_share: float = TRAIN_SHARE,
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
        protocol: ``authors`` (default) or ``pfllib``; ``equal`` for dirichlet. ``classes`` has
            ``own`` and ``all``, ``lognormal`` has ``mnist``, ``cifar`` and ``mislabelled``; see
            ``sartor.data.paper_partitions``.
        attributes: columns for ``column:NAME``, each ``(samples,)``; ``grouped`` takes the first.
        seed: seed of the draw.
        min_train: the least number of training samples of a client. By default the protocol's
            own, if the mean client has five times as much; otherwise a tenth of the mean
            client. In protocol ``pfllib`` and for ``column`` the floor is on all samples of a
            client (those below it are left out of ``column``), for ``grouped`` on its users.
        min_test: the least number of test samples, by the same rule (``authors`` only).
        samples: the number of training samples in all, drawn by the seed; by default all of them.
        train_share: what part of a client is for training, where ``column`` or ``grouped`` splits.
        max_tries: how many draws to try before giving up.

    Returns:
        Rows for training and test, names and a record of the draw.
    """
    labels = np.asarray(y, dtype=np.int64)
    spec = parse_partition(partition) if isinstance(partition, str) else partition
    if protocol is not None:
        _known_protocol(protocol, spec.kind)
        if spec.protocol not in (None, protocol):
            raise ConfigError(f"Partition {spec} contradicts protocol={protocol!r}; give only one.")
    chosen = protocol or spec.protocol
    classes = int(labels.max()) + 1 if num_classes is None else num_classes
    columns, every, kept = attributes or {}, labels, None
    if samples is not None and spec.kind != "classes":
        merged = chosen in _MERGED or spec.kind == "lognormal"
        kept = _some(len(labels), None if merged else num_train, samples, train_share, seed)
        num_train = None if num_train is None else int((kept < num_train).sum())
        columns = {k: np.asarray(v)[kept] for k, v in columns.items()}
        labels = labels[kept]
    if spec.kind == "column":
        part = _by_column(spec, chosen, clients, num_train, columns, min_train, train_share, seed)
        return part if kept is None else _within(part, kept, every)
    chosen = chosen or {"classes": "own", "lognormal": "mnist"}.get(spec.kind, "authors")
    clients = 20 if clients is None else clients
    if clients < 1:
        raise ConfigError(f"clients must be >= 1, got {clients}.")
    if clients > len(labels):
        raise FederationError(
            f"{clients} clients cannot share {len(labels)} samples; use fewer clients."
        )
    value = spec.value if isinstance(spec.value, float) else 0.0
    rng = generator(seed, KINDS.index(spec.kind))
    draw = Draw(labels, str(spec), spec.kind, value, clients, classes, rng, max_tries)
    names = numbered(clients)
    info = {"partition": spec.kind, "value": spec.value, "protocol": chosen, "seed": seed}
    info["clients"] = clients
    changed: Int | None = None
    if spec.kind == "grouped":
        owner, info["of"] = grouped(columns, draw, min_train)
        train, test, info["protocol"] = _split_clients(
            owner, names, num_train, merge=chosen == "pfllib", share=train_share, seed=seed
        )
    elif spec.kind == "classes":
        official = _official(labels, num_train, draw.info)
        train, test = exact_classes(draw, official, samples, all_tests=chosen == "all")
    elif chosen == "authors":
        official = _official(labels, num_train, draw.info)
        train, test = authors(draw, official, min_train, min_test)
    else:
        if min_test is not None:
            raise ConfigError(
                f"min_test belongs to protocol authors; {chosen} has min_train at most."
            )
        if spec.kind == "lognormal":
            whole, changed = lognormal(draw, chosen)
        else:
            whole = equal_sizes(draw) if chosen == "equal" else pfllib(draw, min_train)
        owner = np.full(len(labels), -1, dtype=np.int64)
        owner[whole.rows.numpy()] = whole.owner.numpy()
        train, test = _split_each(owner, names, seed, TRAIN_SHARE)
    part = Partition(train, test, names, info | draw.info, changed)
    return part if kept is None else _within(part, kept, every)


def _some(total: int, num_train: int | None, samples: int, share: float, seed: int) -> Int:
    """Draw the rows to keep: so many training samples, and all official test samples."""
    pool = total if num_train is None else num_train
    wanted = min(round(samples / share), pool) if num_train is None else samples
    most = int(pool * share) if num_train is None else pool
    if not 1 <= samples <= most:
        raise ConfigError(
            f"samples must lie in 1..{most}, the number of training samples, got {samples}."
        )
    chosen = np.sort(generator(seed, len(KINDS), 1000).choice(pool, wanted, replace=False))
    return np.concatenate([chosen, np.arange(pool, total)])


def _within(part: Partition, kept: Int, labels: Int) -> Partition:
    """Give rows of a smaller set their numbers in the whole one."""
    train, test = (split.of_rows(torch.from_numpy(kept)) for split in (part.train, part.test))
    y: Int | None = None
    if part.y is not None:
        y = labels.copy()
        y[kept] = part.y
    return Partition(train, test, part.names, part.info | {"drawn_samples": len(train.rows)}, y)


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


def _by_column(
    spec: PartitionSpec,
    protocol: str | None,
    clients: int | None,
    num_train: int | None,
    attributes: dict[str, Any],
    least: int | None,
    share: float,
    seed: int,
) -> Partition:
    """Make one client of every value of a column, or of some values drawn at random."""
    column = str(spec.value)
    rng = generator(seed, KINDS.index(spec.kind))
    owner, names = _one_each(attributes, column, clients, least, rng)
    train, test, found = _split_clients(
        owner, names, num_train, merge=protocol == "pfllib", share=share, seed=seed
    )
    if protocol == "authors" and found != "authors":
        raise FederationError(
            f"Not every value of {column!r} has official training and test samples; use "
            f"{spec.kind}:{column}:pfllib, which pools and splits each client 75/25."
        )
    info = {"partition": "column", "value": column, "protocol": found, "seed": seed}
    return Partition(train, test, names, info | {"clients": len(names)})


def _one_each(
    columns: Mapping[str, Any],
    name: str,
    clients: int | None,
    least: int | None,
    rng: np.random.Generator,
) -> tuple[Int, tuple[str, ...]]:
    """Make one client of every value of a column, or of so many values drawn at random.

    Values with fewer than ``least`` samples are left out. Returns the client of every sample, -1
    for nobody, and the names of the clients.
    """
    if name not in columns:
        known = did_you_mean(name, columns) if columns else "; it has no columns"
        raise ConfigError(f"The data have no column {name!r}{known}")
    values, inverse = np.unique(np.asarray(columns[name]), return_inverse=True)
    owner: Int = inverse.astype(np.int64)
    sizes = np.bincount(owner, minlength=len(values))
    enough = np.flatnonzero(sizes >= (least or 0))
    if len(enough) == 0:
        raise FederationError(
            f"No value of {name!r} has {least} samples (the most frequent has {int(sizes.max())}); "
            "lower min_train."
        )
    if clients is not None and not 1 <= clients <= len(enough):
        of = f" with {least} samples" if least else ""
        raise FederationError(
            f"Column {name!r} has {len(enough)} values{of}; clients must lie in "
            f"1..{len(enough)}, got {clients}."
        )
    kept = enough
    if clients is not None:
        kept = enough[np.sort(rng.choice(len(enough), clients, replace=False))]
    place = np.full(len(values), -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return place[owner], tuple(str(value) for value in values[kept].tolist())


def _split_clients(
    owner: Int,
    names: Sequence[str],
    num_train: int | None,
    *,
    merge: bool,
    share: float,
    seed: int,
) -> tuple[Ragged, Ragged, str]:
    """Divide clients by the official split, if all have samples in both parts, else at random.

    At random a ``share`` is for training, or three quarters where ``merge`` passes over an official
    split. Returns train, test, and the protocol: ``authors``, ``pfllib`` (75/25) or ``leaf``.
    """
    if not merge and num_train is not None:
        rows = np.arange(len(owner), dtype=np.int64)
        train, test = (
            Ragged.from_owner(part, owner[part], len(names)) for part in np.split(rows, [num_train])
        )
        if bool((train.sizes > 0).all()) and bool((test.sizes > 0).all()):
            return train, test, "authors"
    part = TRAIN_SHARE if merge else share
    train, test = _split_each(owner, names, seed, part)
    return train, test, "pfllib" if part == TRAIN_SHARE else "leaf"


def _split_each(owner: Int, names: Sequence[str], seed: int, share: float) -> tuple[Ragged, Ragged]:
    """Split every client at random, a share (rounded down, at least one) for training."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    num_test = sizes - np.maximum((sizes * share + 1e-9).astype(np.int64), 1)
    train, _, test = split_rows(owner, names, test=num_test, val=0.0, seed=seed)
    return train, test
