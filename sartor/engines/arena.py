"""Put the data of all runs on one device; `parts.Arena` is what holds them.

Runs may have different allocations or different labels of one set of features (it is then held
once), or different data sets of one shape (they are then concatenated). A batch for all lanes is
one gather.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError
from sartor.data.conversion import COARSE, is_coarse
from sartor.data.federation import Federation
from sartor.data.split import SPLITS
from sartor.engines.parts import Arena, Split

_WORTH_PACKING = 1 << 20  # features; fewer fit into a cache
_GLANCE = 1 << 16  # of them are looked at first


def with_palette(arena: Arena) -> Arena:
    """Hold features that have at most 256 different values, as images have, as one byte each.

    A batch reads a quarter of the memory, and looks the values up: they are the same to the bit
    (but for the sign of zeros).
    """
    flat = arena.x.reshape(-1)
    if arena.palette is not None or not flat.is_floating_point() or flat.numel() < _WORTH_PACKING:
        return arena
    try:
        palette = flat[:_GLANCE].unique()
        for part in flat.split(_GLANCE << 4):
            if len(palette) <= 256:
                palette = torch.cat([palette, part.unique()]).unique()
        if len(palette) > 256 or palette.isnan().any():
            return arena
        codes = torch.empty_like(flat, dtype=torch.uint8)
        for part, code in zip(flat.split(_GLANCE << 4), codes.split(_GLANCE << 4), strict=True):
            code.copy_(torch.searchsorted(palette, part, out_int32=True))
    except torch.OutOfMemoryError:  # then they stay as they are
        return arena
    return replace(arena, x=codes.reshape(arena.x.shape), palette=palette)


def build_arena(
    federations: Sequence[Federation], device: torch.device, dtype: torch.dtype
) -> Arena:
    """Put the federations of all runs (one each, often the same object) on a device."""
    first = federations[0]
    for r, fed in enumerate(federations):
        if fed.num_clients != first.num_clients or fed.x.shape[1:] != first.x.shape[1:]:
            raise FederationError(
                f"Run {r} has {fed.num_clients} clients with features {tuple(fed.x.shape[1:])}, "
                f"run 0 has {first.num_clients} with {tuple(first.x.shape[1:])}: the runs of one "
                "sweep need the same number of clients and the same shape; run them separately."
            )
    features = {_features(fed): fed.x for fed in federations}
    samples = {_samples(fed): fed for fed in federations}
    row_of = _starts(features)
    sources = _starts({key: fed.y for key, fed in samples.items()})
    _warn_of_rounding("features", list(features.values()), dtype)
    _warn_of_rounding("targets", [fed.y for fed in samples.values()], dtype)
    x = _joined(list(features.values()), device, dtype)
    y = _joined([fed.y for fed in samples.values()], device, dtype)
    row = None
    if len(features) < len(samples):
        row = torch.cat(
            [torch.arange(len(f.x)) + row_of[_features(f)] for f in samples.values()]
        ).to(device)
    splits = {}
    for name in SPLITS:
        seen: dict[tuple[int, int], int] = {}
        rows: list[Tensor] = []
        start = np.zeros((len(federations), first.num_clients), dtype=np.int64)
        size = np.zeros_like(start)
        filled = 0
        for r, fed in enumerate(federations):
            lists = getattr(fed, name)
            shift = sources[_samples(fed)]
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
    return Arena(
        x=x,
        y=y,
        splits=splits,
        num_runs=len(federations),
        num_clients=first.num_clients,
        device=device,
        row=row,
    )


def with_replacements(
    arena: Arena, client: np.ndarray, record: np.ndarray, row: np.ndarray
) -> Arena:
    """Make an arena of many runs from that of one: each changes one training record at most.

    Features and labels stay shared, and so do the lists of all other clients: a run costs the list
    of the one client that it changes.

    Args:
        arena: of one run.
        client: (runs,) the client whose list is changed; -1 changes nothing.
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


def _features(fed: Federation) -> tuple[int, ...]:
    """Identify the features of a federation."""
    return (fed.x.data_ptr(), len(fed.x), *fed.x.stride())


def _samples(fed: Federation) -> tuple[int, ...]:
    """Identify the samples of a federation: features AND labels."""
    return (fed.y.data_ptr(), *_features(fed))


def _starts(parts: dict[tuple[int, ...], Tensor]) -> dict[tuple[int, ...], int]:
    """Say where each part begins when all are put end to end."""
    starts, total = {}, 0
    for key, part in parts.items():
        starts[key] = total
        total += len(part)
    return starts


def _warn_of_rounding(what: str, parts: list[Tensor], dtype: torch.dtype) -> None:
    """Warn where the precision of a run is too coarse for how much a column of numbers varies."""
    if any(part.dtype == torch.float64 and is_coarse(part, dtype) for part in parts):
        warnings.warn(
            f"The {what} vary by little beside their size, and {dtype} rounds them by more than "
            f"{COARSE:g} of their deviation; take dtype='float64', or standardise them.",
            stacklevel=2,
        )


def _joined(parts: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Put parts end to end on the device; real numbers get the given type, before they are many."""
    kinds = {part.dtype for part in parts}
    target = dtype if any(kind.is_floating_point for kind in kinds) else None
    moved = [part.to(device=device, dtype=target or part.dtype) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
