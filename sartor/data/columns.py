"""Clients from a column of the data, such as the writer or the user, and their train and test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.draws import TRAIN_SHARE
from sartor.data.split import Int, Ragged, split_rows


def column_of(attributes: dict[str, Any], name: str) -> npt.NDArray[Any]:
    """Return the column of that name, or say which ones there are."""
    if name not in attributes:
        known = did_you_mean(name, attributes) if attributes else "; it has no columns"
        raise ConfigError(f"The data have no column {name!r}{known}")
    return np.asarray(attributes[name])


def one_each(
    column: npt.NDArray[Any],
    name: str,
    clients: int | None,
    least: int | None,
    rng: np.random.Generator,
) -> tuple[Int, tuple[str, ...]]:
    """Make one client of every value of a column, or of some values drawn at random.

    Args:
        column: ``(samples,)``.
        name: of the column, for the messages.
        clients: how many values to draw; None for all.
        least: leave out values with fewer samples than this.
        rng: for the draw.

    Returns:
        The client of every sample, -1 for nobody, and the names of the clients.
    """
    values, inverse = np.unique(column, return_inverse=True)
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

    Args:
        owner: ``(samples,)`` the client of each, -1 for nobody.
        names: of the clients.
        num_train: how many samples, the first ones, are official training samples.
        merge: whether to pass over an official split, and take three quarters for training.
        share: what part is for training, where there is no official split for all clients.
        seed: of the division.

    Returns:
        Train, test, and the protocol: ``authors``, ``pfllib`` (75/25) or ``leaf`` (another share).
    """
    if not merge and num_train is not None:
        rows = np.arange(len(owner), dtype=np.int64)
        train, test = (
            Ragged.from_owner(one, owner[one], len(names))
            for one in (rows[:num_train], rows[num_train:])
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
