"""Seeded division of every client's samples into train, validation and test.

The draw of a client depends on the seed, on its own name and on the number of its own samples
(and their classes, when stratified), never on the other clients: adding a client, dropping one or
listing them in another order leaves every other division as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.core.errors import ConfigError

SPLITS = ("train", "val", "test")
"""What the samples of a client are for."""

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ragged:
    """One split of a federation: a list of sample rows for every client, laid end to end.

    ``split[i]`` are the rows of client ``i``, ``len(split)`` counts the clients, and a loop goes
    over the rows of one after the other.

    Attributes:
        rows: ``(total,)`` int64, positions in ``Federation.x``.
        offsets: ``(clients + 1,)`` int64; client ``i`` owns ``rows[offsets[i]:offsets[i + 1]]``.
    """

    rows: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, lists: Sequence[Any]) -> Ragged:
        """Lay one sequence of row numbers per client end to end.

        >>> Ragged.from_lists([[3, 1], [], [2]]).sizes.tolist()
        [2, 0, 1]
        """
        arrays = [np.asarray(one, dtype=np.int64).reshape(-1) for one in lists]
        sizes = np.array([len(one) for one in arrays], dtype=np.int64)
        rows = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
        return cls.from_sizes(rows, sizes)

    @classmethod
    def from_sizes(cls, rows: Int, sizes: Int) -> Ragged:
        """Take rows that are already grouped by client, and the number that each client has."""
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
        return cls(torch.from_numpy(np.ascontiguousarray(rows)), torch.from_numpy(offsets))

    @classmethod
    def from_owner(cls, rows: Int, owner: Int, clients: int) -> Ragged:
        """Group rows by their owner, keeping their order within a client; owner -1 is nobody."""
        order = np.argsort(owner, kind="stable")
        order = order[np.searchsorted(owner[order], 0) :]
        return cls.from_sizes(rows[order], np.bincount(owner[order], minlength=clients))

    @classmethod
    def empty(cls, clients: int) -> Ragged:
        """Return a split in which no client has a sample."""
        return cls(torch.empty(0, dtype=torch.int64), torch.zeros(clients + 1, dtype=torch.int64))

    @property
    def sizes(self) -> Tensor:
        """The number of samples of every client, ``(clients,)`` int64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def num_clients(self) -> int:
        """The number of clients, those without samples included."""
        return len(self.offsets) - 1

    @property
    def owner(self) -> Tensor:
        """The client of every entry of ``rows``, ``(total,)`` int64."""
        return torch.repeat_interleave(torch.arange(self.num_clients), self.sizes)

    def __len__(self) -> int:
        """Return the number of clients."""
        return self.num_clients

    def __getitem__(self, client: int) -> Tensor:
        """Return the rows of one client, by its position; see ``federation[name]`` for names."""
        if isinstance(client, bool) or not isinstance(client, int | np.integer):
            raise TypeError(
                f"a split is asked for a client by its position, got {client!r}; "
                "federation[name] has the samples of a client by its name."
            )
        return self.of(int(client))

    def __iter__(self) -> Iterator[Tensor]:
        """Go over the rows of every client."""
        return (self.of(client) for client in range(self.num_clients))

    def of(self, client: int) -> Tensor:
        """Return the rows of one client."""
        if not -self.num_clients <= client < self.num_clients:
            raise IndexError(f"client {client} of a split over {self.num_clients} clients")
        client %= self.num_clients
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def of_rows(self, rows: Tensor) -> Ragged:
        """Return the split whose entries are positions in ``rows`` as one of these rows."""
        return Ragged(rows[self.rows], self.offsets)

    def select(self, clients: Tensor) -> Ragged:
        """Keep some clients, given by a boolean mask over all of them, in their order."""
        kept = self.rows[clients[self.owner]]
        return Ragged.from_sizes(kept.numpy(), self.sizes[clients].numpy())


def numbered(clients: int) -> tuple[str, ...]:
    """Return names for clients that have none: client0, client1, ..., of equal length."""
    return tuple(f"client{i:0{len(str(clients - 1))}d}" for i in range(clients))


def generator(seed: int, *purpose: int) -> np.random.Generator:
    """Return the stream of random numbers of a seed and a purpose."""
    if seed < 0:
        raise ConfigError(f"seed must be >= 0, got {seed}.")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *purpose])))


def _scatter(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit counters into 64 well-mixed bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _client_keys(names: Sequence[str], seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Return one 64-bit key per client that depends on its name, the seed and the purpose only."""
    start = f"{purpose}:{seed}:".encode()
    digests = b"".join(
        hashlib.blake2b(start + name.encode(), digest_size=8).digest() for name in names
    )
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _within(sizes: Int) -> Int:
    """Return 0, 1, ..., size - 1 for every group, laid end to end."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(starts, sizes)


def _shuffled(owner: Int, sizes: Int, names: Sequence[str], seed: int, purpose: str) -> Int:
    """Return the order that shuffles every client's samples; ``owner`` of samples is ascending."""
    keys = _client_keys(names, seed, purpose)[owner]
    steps = _within(sizes).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    order: Int = np.lexsort((_scatter(_scatter(keys) + steps), owner))
    return order


def split_counts(sizes: Int, test: float, val: float) -> tuple[Int, Int]:
    """Return how many samples of each client go to test and to validation.

    Fractions are rounded to the nearest number, at least one wherever the client can spare it;
    one sample always stays for training, so a client with a single sample has no test sample.
    """

    def share(fraction: float, room: Int) -> Int:
        wanted = np.floor(sizes * fraction + 0.5).astype(np.int64)
        taken: Int = np.clip(np.maximum(wanted, int(fraction > 0)), 0, np.maximum(room, 0))
        return taken

    num_test = share(test, sizes - 1)
    return num_test, share(val, sizes - 1 - num_test)


def split_rows(
    owner: Int,
    names: Sequence[str],
    *,
    test: float | Bool | Int,
    val: float,
    seed: int,
    classes: Int | None = None,
    purpose: str = "split",
) -> tuple[Ragged, Ragged, Ragged]:
    """Divide the samples of every client into train, validation and test.

    Rows are ascending inside a client of each part.

    Args:
        owner: ``(samples,)`` the client of each sample; -1 for a sample that nobody has.
        names: the names of the clients, which key the draw.
        test: the fraction held out, a mask that marks the test samples, or the number of test
            samples of every client (integers).
        val: the fraction used for validation; of all samples of the client, or, where ``test``
            is a mask, of those that the mask leaves.
        seed: the seed of the draw.
        classes: labels, to keep the class shares of every client in each part.
        purpose: keeps the draws of different uses apart.
    """
    clients = len(names)
    rows = np.argsort(owner, kind="stable")
    rows = rows[np.searchsorted(owner[rows], 0) :]
    part = np.zeros(len(rows), dtype=np.int8)
    is_mask = isinstance(test, np.ndarray) and test.dtype == np.bool_
    if isinstance(test, np.ndarray) and is_mask:
        part[test[rows]] = 2
    free = np.flatnonzero(part == 0)
    held = owner[rows[free]]
    sizes = np.bincount(held, minlength=clients)
    order = _shuffled(held, sizes, names, seed, purpose)
    if classes is not None:
        order = _by_class_share(order, held, classes[rows[free]])
    if isinstance(test, np.ndarray):
        num_test = np.zeros_like(sizes) if is_mask else np.asarray(test, dtype=np.int64)
        num_val = split_counts(sizes - num_test, 0.0, val)[1]
    else:
        num_test, num_val = split_counts(sizes, test, val)
    rank = _within(sizes)
    chosen = np.where(rank < num_test[held], 2, np.where(rank < (num_test + num_val)[held], 1, 0))
    part[free[order]] = chosen
    train, held_val, held_test = (
        Ragged.from_sizes(own, np.bincount(owner[own], minlength=clients))
        for own in (rows[part == code] for code in range(3))
    )
    return train, held_val, held_test


def carve_val(train: Ragged, names: Sequence[str], val: float, seed: int) -> tuple[Ragged, Ragged]:
    """Take a fraction of every client's training rows for validation, one at least stays."""
    if val == 0:
        return train, Ragged.empty(train.num_clients)
    rest, taken, _ = split_rows(
        train.owner.numpy(), names, test=0.0, val=val, seed=seed, purpose="val"
    )
    return rest.of_rows(train.rows), taken.of_rows(train.rows)


def _by_class_share(order: Int, owner: Int, classes: Int) -> Int:
    """Interleave the classes of every client, so that every leading piece has its shares."""
    if len(order) == 0:
        return order
    labels = classes[order]
    grouped = np.lexsort((labels, owner))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (np.diff(owner[grouped]) != 0) | (np.diff(labels[grouped]) != 0)
    sizes = np.diff(np.append(np.flatnonzero(first), len(order)))
    place = np.empty(len(order))
    place[grouped] = (_within(sizes) + 0.5) / np.repeat(sizes, sizes)
    interleaved: Int = order[np.lexsort((np.arange(len(order)), place, owner))]
    return interleaved
