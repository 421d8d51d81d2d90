"""Clients from a column of the data, such as the writer or the user, and their train and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.draws import TRAIN_SHARE
from sartor.data.split import Int, Ragged, split_rows


def one_each(
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


def split_clients(
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
    train, test = split_each(owner, names, seed, part)
    return train, test, "pfllib" if part == TRAIN_SHARE else "leaf"


def split_each(owner: Int, names: Sequence[str], seed: int, share: float) -> tuple[Ragged, Ragged]:
    """Split every client at random, a share (rounded down, at least one) for training."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    num_test = sizes - np.maximum((sizes * share + 1e-9).astype(np.int64), 1)
    train, _, test = split_rows(owner, names, test=num_test, val=0.0, seed=seed)
    return train, test
