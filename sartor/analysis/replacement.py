"""Which records are replaced by which held-out samples, and on which samples models are compared.

Replacements are drawn ahead by their keys. A draw depends on the seed, the client's position and
its own number alone: other clients, and how many draws follow, do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sartor.core import rng
from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.core.method import Method
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.engines.parts import Arena

Judge = Callable[[int], tuple[Tensor, Tensor]]
"""``client -> (x, y)``, the samples over which the change of its losses is a maximum."""


class Replacements(NamedTuple):
    """Which records are replaced by which samples, one entry each."""

    client: np.ndarray  # positions of clients
    record: np.ndarray  # positions in the client's own training list
    row: np.ndarray  # rows of the features, or of the pool's, that take their place


@dataclass(frozen=True)
class Pool:
    """Where replacements come from, in words, and the rows of every client."""

    name: str
    rows: Ragged
    features: Federation | None = None  # that the rows are of; None for the trained one


def find_pool(federation: Federation, pool: str | Federation | None, method: Method) -> Pool:
    """Return the pool of a name, or the first of validation and test data that fits.

    Data fit if every client has some and the method does not read them in training.
    """
    if isinstance(pool, Federation):
        same = {"clients": "names", "samples of shape": "input_shape", "classes": "num_classes"}
        pairs = [(what, getattr(pool, k), getattr(federation, k)) for what, k in same.items()]
        faults = [
            f"{what} {theirs} instead of {own}" for what, theirs, own in pairs if theirs != own
        ]
        if faults:
            raise FederationError(
                f"The pool has {'; '.join(faults)}; a replacement must look like the record that "
                "it replaces, and belong to the same client."
            )
        return Pool("given federation", pool.train, pool)
    if pool is not None:
        if pool not in ("val", "test"):
            raise ConfigError(f"Unknown pool {pool!r}{did_you_mean(pool, ('val', 'test'))}")
        return Pool(_WORDS[pool], federation.split(pool))
    records = [m for m in (method, method.schedule.before, method.schedule.after) if m is not None]
    used = {phase.data for m in records for phase in (*m.phases, *m.use.adapt)}
    full = [name for name in _WORDS if bool((federation.split(name).sizes > 0).all())]
    best = next((name for name in full if name not in used), full[0] if full else "test")
    return Pool(_WORDS[best], federation.split(best))


_WORDS = {"val": "validation data of the client", "test": "test data of the client"}


def draw(
    federation: Federation, pool: Pool, clients: Sequence[int], num: int, seed: int
) -> Replacements:
    """Draw ``num`` records of every client, and for each a sample of its pool, uniformly."""
    empty = [federation.names[i] for i in clients if not len(pool.rows.of(i))]
    if empty:
        raise FederationError(
            f"{len(empty)} clients have nothing to replace a record by ({pool.name}): "
            f"{', '.join(empty[:5])}; hold some data out, give another pool, or name the other "
            "clients."
        )
    if len(set(clients)) < len(clients) or not clients:
        raise ConfigError("clients must name at least one client, and none of them twice.")

    def pick(i: int, what: str, size: int) -> np.ndarray:
        key = rng.fold(rng.key(seed), "stability", i, what)
        return (rng.uniform(key, (num,), torch.float64) * size).long().numpy()

    record = [pick(i, "record", len(federation.train.of(i))) for i in clients]
    rows = [pool.rows.of(i).numpy() for i in clients]
    row = [own[pick(i, "sample", len(own))] for i, own in zip(clients, rows, strict=True)]
    return Replacements(
        np.repeat(np.asarray(clients, dtype=np.int64), num),
        np.concatenate(record),
        np.concatenate(row),
    )


def check(given: Replacements, federation: Federation) -> Replacements:
    """Return given replacements as arrays; refuse positions that do not exist."""
    client, record, row = (np.asarray(part, dtype=np.int64).reshape(-1) for part in given)
    if not len(client) or not len(client) == len(record) == len(row):
        raise ConfigError(
            f"Replacements need one client, record and row each, got {len(client)}, {len(record)} "
            f"and {len(row)} of them."
        )
    if client.min() < 0 or client.max() >= federation.num_clients:
        raise ConfigError(f"Clients are numbered from 0 to {federation.num_clients - 1}.")
    wrong = (record < 0) | (record >= federation.train.sizes.numpy()[client])
    wrong |= (row < 0) | (row >= len(federation.x))
    if wrong.any():
        k = int(np.argmax(wrong))
        raise ConfigError(
            f"Replacement {k} puts row {row[k]} of {len(federation.x)} in the place of record "
            f"{record[k]} of client {federation.names[client[k]]}, which has "
            f"{int(federation.train.sizes[client[k]])}; positions count from 0."
        )
    return Replacements(client, record, row)


def place(arena: Arena, pool: Pool | None, chosen: Replacements) -> tuple[Arena, np.ndarray]:
    """Return an arena that holds the chosen samples, and where it holds them.

    Samples of the federation are there already; of a foreign pool, those that were drawn are added.
    """
    if pool is None or pool.features is None:
        return arena, chosen.row
    rows = torch.from_numpy(chosen.row)
    known = arena.features(torch.arange(len(arena.x), device=arena.device))
    pairs = ((known, pool.features.x), (arena.y, pool.features.y))
    x, y = (torch.cat([old, new[rows].to(old.device, old.dtype)]) for old, new in pairs)
    return replace(arena, x=x, y=y, palette=None), len(arena.x) + np.arange(len(rows))


def find_judge(
    federation: Federation, eval_set: str | tuple[Any, Any], arena: Arena
) -> tuple[Judge, str]:
    """Return the samples on which a client's models are compared, and what they are in words."""
    if not isinstance(eval_set, str):
        x, y = (torch.as_tensor(part) for part in eval_set)
        if x.shape[1:] != federation.x.shape[1:] or len(x) != len(y) or not len(x):
            raise ConfigError(
                f"eval_set must be a pair (x, y) with samples of shape {federation.input_shape}, "
                f"got {tuple(x.shape)} and {tuple(y.shape)}."
            )
        kind = (arena.x if arena.palette is None else arena.palette).dtype
        both = x.to(arena.x.device, kind), y.to(arena.y.device, arena.y.dtype)
        return lambda client: both, f"{len(x)} given samples"
    if eval_set not in ("test", "own"):
        raise ConfigError(f"Unknown eval_set {eval_set!r}{did_you_mean(eval_set, ('test', 'own'))}")
    test = federation.test
    if not len(test.rows) or (eval_set == "own" and not bool((test.sizes > 0).all())):
        raise FederationError(
            f"eval_set={eval_set!r} needs test samples of every client; hold some out, or give "
            "eval_set=(x, y)."
        )
    if eval_set == "own":

        def own(client: int) -> tuple[Tensor, Tensor]:
            rows = test.of(client).to(arena.device)
            return arena.features(rows), arena.y[rows]

        return own, "the client's own test samples"
    rows = test.rows.unique().to(arena.device)
    everybody = arena.features(rows), arena.y[rows]
    return lambda client: everybody, f"the {len(rows)} test samples of all clients"
