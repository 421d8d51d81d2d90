"""The plan of a phase: which rows every lane sees at every step, drawn ahead of the work.

Both engines read the same plan, so they see the same batches. An epoch is a keyed permutation of
the client's own list; lanes of unequal size are packed without padding while the permutations are
drawn, and only the table of steps is rectangular.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.core import rng
from sartor.core.method import Batch, Phase
from sartor.engines.lanes import draws
from sartor.engines.parts import Arena, on_device


@dataclass(frozen=True)
class BatchPlan:
    """Rows and keys of every lane and step of a phase.

    Attributes:
        table: (runs, slots, period, columns) int64: per draw the numbers of the samples and their
            positions in the client's own list (-1 is padding), then whether the batch ends a pass.
            Step s reads entry s mod period.
        keys: (runs, slots, steps, 2) the key of every step; (runs, slots, steps, 0) if the phase is
            not random.
        steps: (runs, slots) how many steps each lane takes, on the host.
        samples: (runs, slots) how many real samples they hold, on the host.
        batch: rows a batch.
        draws: batches a step.
        capacity: the longest client list of the split.
        passes: (2, runs, slots) batches a pass, and samples that a pass draws from, on the host.
    """

    table: Tensor
    keys: Tensor
    steps: np.ndarray
    samples: np.ndarray
    batch: int
    draws: int
    capacity: int
    passes: np.ndarray

    def samples_in(self, steps: np.ndarray) -> np.ndarray:
        """Count the real samples of the first ``steps`` (runs, slots) steps of every lane."""
        if self.draws == 0:
            return np.zeros_like(steps)
        return self.draws * _samples(self.passes[1], self.passes[0], steps, self.batch)

    @property
    def num_steps(self) -> int:
        """The number of steps of the longest lane."""
        return int(self.steps.max(initial=0))

    def widths(self) -> list[tuple[int, bool]]:
        """Say per step how many leading slots cover all active lanes, and if some are idle."""
        active = self.steps > np.arange(self.num_steps)[:, None, None]
        widths = (active.any(1) * np.arange(1, self.steps.shape[1] + 1)).max(1, initial=0).tolist()
        return [(w, not bool(now[:, :w].all())) for w, now in zip(widths, active, strict=True)]

    def narrow(self, run: int, runs: int, slot: int, slots: int) -> BatchPlan:
        """View the plan of a block of lanes."""
        cut = (slice(run, run + runs), slice(slot, slot + slots))
        return replace(
            self,
            table=self.table[cut],
            keys=self.keys[cut],
            steps=self.steps[cut],
            samples=self.samples[cut],
            passes=self.passes[:, cut[0], cut[1]],
        )

    def as_one_run(self, order: np.ndarray) -> BatchPlan:
        """Return the plan of the lanes of all runs, in the given order, as that of one run."""
        pick = on_device(order, self.table.device)
        return replace(
            self,
            table=self.table.flatten(0, 1)[pick][None],
            keys=self.keys.flatten(0, 1)[pick][None],
            steps=self.steps.reshape(1, -1)[:, order],
            samples=self.samples.reshape(1, -1)[:, order],
            passes=self.passes.reshape(2, 1, -1)[:, :, order],
        )

    def batches(self, arena: Arena, entry: Tensor) -> Batch | tuple[Batch, ...]:
        """Gather the batches of a table entry: (..., columns) -> leaves (..., batch, ...)."""
        lead, size = entry.shape[:-1], self.batch
        found = []
        for d in range(self.draws):
            index = entry[..., 2 * d * size : (2 * d + 1) * size]
            rows = entry[..., (2 * d + 1) * size : (2 * d + 2) * size]
            flat = index.reshape(-1)
            row = flat if arena.row is None else arena.row.index_select(0, flat)
            mask = rows >= 0
            found.append(
                Batch(
                    x=arena.features(row).reshape((*lead, size, *arena.x.shape[1:])),
                    y=arena.y.index_select(0, flat).reshape((*lead, size, *arena.y.shape[1:])),
                    mask=mask,
                    rows=torch.where(mask, rows, self.capacity),
                    last=entry[..., -1] > 0,
                )
            )
        return found[0] if self.draws == 1 else tuple(found)


def num_steps(phase: Phase, sizes: np.ndarray) -> np.ndarray:
    """Return how many steps clients with so many samples take (phases of known length)."""
    used = _used(phase, sizes)[2]
    per_epoch = np.ones_like(sizes) if phase.data == "none" else _per_epoch(phase, used)
    if isinstance(phase.steps, int):
        return np.where(per_epoch > 0, phase.steps, 0)
    return phase.epochs * per_epoch


def _used(phase: Phase, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the phase's part of every client begins, how long it is, and its share."""
    if phase.part == (0.0, 1.0) and phase.share == 1.0:
        return np.zeros_like(sizes), sizes, sizes
    # A part that is not empty by its edges has the first sample, however few there are.
    first, end = (
        np.clip(np.floor(edge * sizes + 1e-9).astype(np.int64), math.ceil(edge), sizes)
        for edge in phase.part
    )
    return first, end - first, np.ceil(phase.share * (end - first) - 1e-9).astype(np.int64)


def _per_epoch(phase: Phase, sizes: np.ndarray) -> np.ndarray:
    if phase.batch is None or phase.fresh:
        return (sizes > 0).astype(np.int64)
    if phase.drop_last:
        return np.where(sizes > 0, np.maximum(sizes // phase.batch, 1), 0)
    return -(-sizes // phase.batch)


def build_plan(
    phase: Phase,
    arena: Arena,
    cohort: np.ndarray,
    keys: np.ndarray,
    steps: np.ndarray,
    part_keys: np.ndarray | None = None,
) -> BatchPlan:
    """Draw the rows of every step of a cohort (runs, slots), all on the host but the result.

    ``steps`` are 0 for the absent; ``part_keys`` are for a phase on a part of the data.
    """
    device, total_steps = arena.device, int(steps.max(initial=0))
    step_keys = torch.zeros((*steps.shape, total_steps, 0), dtype=torch.int64, device=device)
    if phase.random:
        folded = rng.fold_host(rng.fold_host(keys, "step")[:, :, None, :], np.arange(total_steps))
        step_keys = on_device(folded, device)
    if phase.data == "none":
        return _without_data(steps, step_keys)
    split = arena.splits[phase.data]
    lane = (np.arange(len(cohort))[:, None], cohort)
    start, full = split.start[lane].reshape(-1), split.size[lane].reshape(-1)
    first, length, used = _used(phase, full)
    size = max(1, min(phase.batch or split.capacity, split.capacity))
    per_epoch = np.maximum(_per_epoch(phase, used), 1)
    shuffle = phase.shuffle and phase.batch is not None
    period = total_steps if shuffle else _period(per_epoch, total_steps)
    s, flat_keys = torch.arange(period, device=device), keys.reshape(-1, 2)
    lane_steps = steps.reshape(-1)
    lane_start, lane_used, lane_epoch, lane_end = (
        on_device(array, device)[:, None] for array in (start, used, per_epoch, lane_steps)
    )
    within = (s % lane_epoch)[:, :, None] * size + torch.arange(size, device=device)
    real = (within < lane_used[:, :, None]) & (s < lane_end)[:, :, None]
    columns = []
    for d in range(phase.draws):
        rows = within
        if shuffle:
            draw_keys, epochs = rng.fold_host(flat_keys, "shuffle", d), -(-lane_steps // per_epoch)
            order, offset, base = _permutations(draw_keys, used, epochs, device)
            number = (base[:, None] + s // lane_epoch).clamp(max=len(offset) - 1)
            where = offset[number][:, :, None] + within
            rows = order[torch.where(real, where, 0)] if len(order) else torch.zeros_like(within)
        if phase.share < 1.0:
            rows = _subset(rng.fold_host(flat_keys, "share", d), length, 0 * first, rows, real)
        if part_keys is not None:
            rows = _subset(part_keys.reshape(-1, 2), full, first, rows, real)
        index = (lane_start[:, :, None] + torch.where(real, rows, 0)).clamp(max=len(split.rows) - 1)
        columns += [split.rows[index], torch.where(real, rows, -1)]
    last = ((s + 1) % lane_epoch == 0)[:, :, None].to(torch.int64)
    return BatchPlan(
        table=torch.cat([*columns, last], dim=-1).unflatten(0, steps.shape),
        keys=step_keys,
        steps=steps,
        samples=phase.draws * _samples(used, per_epoch, lane_steps, size).reshape(steps.shape),
        batch=size,
        draws=phase.draws,
        capacity=split.capacity,
        passes=np.stack([per_epoch, used]).reshape(2, *steps.shape),
    )


def _without_data(steps: np.ndarray, step_keys: Tensor) -> BatchPlan:
    table, none = step_keys.new_zeros((*steps.shape, 1, 1)), np.zeros_like(steps)
    return BatchPlan(table, step_keys, steps, none, 0, 0, 0, np.stack([none, none]))


def _period(per_epoch: np.ndarray, total_steps: int) -> int:
    """Return after how many steps the batches of passes in a fixed order come again."""
    period = min(total_steps, int(per_epoch.max(initial=1)))
    if np.any(per_epoch != period) and total_steps > period:
        return total_steps  # unequal passes do not repeat in step
    return period


def _subset(
    keys: np.ndarray, sizes: np.ndarray, first: np.ndarray, rows: Tensor, real: Tensor
) -> Tensor:
    """Read rows as places in one permutation of every lane's samples, from ``first`` on."""
    device = rows.device
    order, offset, base = _permutations(keys, sizes, np.ones_like(sizes), device)
    start = offset[base] + on_device(first, device)
    return order[torch.where(real, start[:, None, None] + rows, 0)]


def _samples(used: np.ndarray, per_epoch: np.ndarray, steps: np.ndarray, size: int) -> np.ndarray:
    """Count the real samples of the first ``steps`` batches."""
    a_pass = np.minimum(per_epoch * size, used)
    return np.asarray(steps // per_epoch * a_pass + np.minimum(steps % per_epoch * size, used))


def _permutations(
    keys: np.ndarray, sizes: np.ndarray, epochs: np.ndarray, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ``epochs[l]`` permutations of ``range(sizes[l])`` for every lane l, packed.

    Return them, where each begins, lanes outermost, and the number of every lane's first one.
    Lanes with the same key share what they draw.
    """
    first, same = _different(keys, sizes, epochs)
    keys, sizes, epochs = keys[first], sizes[first], epochs[first]
    base = on_device((np.cumsum(epochs) - epochs)[same], device)
    lanes = np.repeat(np.arange(len(sizes)), epochs)
    epoch = np.arange(len(lanes)) - np.repeat(np.cumsum(epochs) - epochs, epochs)
    size = sizes[lanes]
    blocks = (size + 3) // 4
    total, num_blocks = int(size.sum()), int(blocks.sum())
    host = np.stack([size, blocks, np.cumsum(blocks) - blocks, np.cumsum(size) - size])
    folded = rng.fold_host(keys[lanes], epoch)
    # One copy to the device: sizes and keys together.
    packed = on_device(np.concatenate([host, folded.T]), device)
    size_d, blocks_d, first_d, offset = packed[:4].unbind(0)
    segment_keys = packed[4:].T
    segment = torch.repeat_interleave(blocks_d, output_size=num_blocks)
    block = torch.arange(num_blocks, device=device) - first_d[segment]
    words_at = draws.words_at if device.type == "cuda" else rng.words_at
    words = words_at(segment_keys[segment], block)
    position = block[:, None] * 4 + torch.arange(4, device=device)
    value = (segment[:, None] << 32) + words
    value = torch.where(position < size_d[segment][:, None], value, torch.iinfo(torch.int64).max)
    order = torch.sort(value.reshape(-1), dim=0, stable=True).indices[:total]
    return position.reshape(-1)[order], offset, base


def _different(
    keys: np.ndarray, sizes: np.ndarray, epochs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return one lane for every different draw, and for every lane the number of its draw."""
    words = (keys[:, 0] << 32) | keys[:, 1]
    _, first, same = np.unique(words, return_index=True, return_inverse=True)
    alike = [np.array_equal(part[first][same], part) for part in (sizes, epochs)]
    if len(first) == len(keys) or not all(alike):
        return np.arange(len(keys)), np.arange(len(keys))
    return first, same
