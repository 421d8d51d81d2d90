"""The data of all runs on one device: flat tensors, and for every client an index list per split.

Runs may have different allocations of one data set (the features are then held once), or different
data sets of one shape (the features are then concatenated). A batch for all lanes is one gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.data.federation import Federation
from sartor.errors import FederationError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """The index lists of one split.

    Attributes:
        rows: (total,) positions in the features, on the device.
        start: (runs, clients) where a client's list starts in ``rows``, on the host.
        size: (runs, clients) how long it is, on the host.
        capacity: the longest list of all.
    """

    rows: Tensor
    start: np.ndarray
    size: np.ndarray
    capacity: int


@dataclass(frozen=True)
class Arena:
    """Features, labels and splits of all runs."""

    x: Tensor
    y: Tensor
    splits: dict[str, Split]
    num_runs: int
    num_clients: int
    device: torch.device


def build_arena(
    federations: Sequence[Federation], device: torch.device, dtype: torch.dtype
) -> Arena:
    """Put the federations of all runs (one each, often the same object) on a device."""
    first = federations[0]
    for r, fed in enumerate(federations):
        if fed.num_clients != first.num_clients or fed.x.shape[1:] != first.x.shape[1:]:
            raise FederationError(
                f"Run {r} has {fed.num_clients} clients with features {tuple(fed.x.shape[1:])}, "
                "run 0 has "
                f"{first.num_clients} with {tuple(first.x.shape[1:])}: the runs of one sweep need "
                "the same "
                "number of clients and the same shape; run them separately."
            )
    sources: dict[tuple[int, ...], int] = {}
    parts: list[Federation] = []
    total = 0
    for fed in federations:
        if _source(fed) not in sources:
            sources[_source(fed)] = total
            total += len(fed.x)
            parts.append(fed)
    x = parts[0].x if len(parts) == 1 else torch.cat([p.x for p in parts])
    y = parts[0].y if len(parts) == 1 else torch.cat([p.y for p in parts])
    splits = {}
    for name in SPLITS:
        seen: dict[tuple[int, int], int] = {}
        rows: list[Tensor] = []
        start = np.zeros((len(federations), first.num_clients), dtype=np.int64)
        size = np.zeros_like(start)
        filled = 0
        for r, fed in enumerate(federations):
            lists = getattr(fed, name)
            shift = sources[_source(fed)]
            known = (id(lists), shift)
            if known not in seen:
                seen[known] = filled
                rows.append(lists.rows + shift)
                filled += len(lists.rows)
            offsets = lists.offsets.numpy()
            start[r], size[r] = offsets[:-1] + seen[known], np.diff(offsets)
        flat = torch.cat(rows).to(device)
        if not len(flat):
            flat = torch.zeros(1, dtype=torch.int64, device=device)
        splits[name] = Split(flat, start, size, int(size.max(initial=0)))
    floating = x.is_floating_point()
    return Arena(
        x=x.to(device=device, dtype=dtype if floating else x.dtype),
        y=y.to(device=device, dtype=dtype if y.is_floating_point() else y.dtype),
        splits=splits,
        num_runs=len(federations),
        num_clients=first.num_clients,
        device=device,
    )


def with_replacements(
    arena: Arena, client: np.ndarray, record: np.ndarray, row: np.ndarray
) -> Arena:
    """Make an arena of many runs from that of one: each changes one training record at most.

    Features and labels stay shared, and so do the lists of all other clients: a run costs the list
    of the one client that it changes.

    Args:
        arena: of one run.
        client: (runs,) whose list is changed; -1 changes nothing.
        record: (runs,) the position in that client's own list.
        row: (runs,) the position in the features of what takes its place.
    """
    runs = len(client)
    splits = {
        name: replace(split, start=split.start.repeat(runs, 0), size=split.size.repeat(runs, 0))
        for name, split in arena.splits.items()
    }
    train = splits["train"]
    old = train.rows.cpu().numpy()
    parts, filled = [old], len(old)
    for run, (i, j, new) in enumerate(zip(client, record, row, strict=True)):
        if i < 0:
            continue
        first, size = int(train.start[run, i]), int(train.size[run, i])
        changed = old[first : first + size].copy()
        changed[j] = new
        parts.append(changed)
        train.start[run, i] = filled
        filled += size
    rows = torch.from_numpy(np.concatenate(parts)).to(arena.device)
    splits["train"] = replace(train, rows=rows)
    return replace(arena, splits=splits, num_runs=runs)


def _source(fed: Federation) -> tuple[int, ...]:
    """Identify the samples of a federation.

    Features AND labels, since runs may differ in the labels alone.
    """
    return (fed.x.data_ptr(), fed.y.data_ptr(), len(fed.x), *fed.x.stride())
