"""The vectorised engine on CUDA.

Each step is captured once per lane width in a CUDA graph, and replayed.

A step has static shapes, no branch on data, and takes its randomness from keys that are inputs, so
one capture serves all rounds. The step counter lives on the device; tables, letters and work trees
are copied into fixed buffers.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sartor import tree
from sartor.engines.arena import Arena
from sartor.engines.convolution import LaneConvolutions
from sartor.engines.plan import Plan
from sartor.engines.vectorised import STOP_EVERY, Vectorised, narrow_site, over_lanes
from sartor.method import Phase, Site
from sartor.task import metered
from sartor.tree import Tree

_WIDTHS = 24  # the most lane widths to capture for one phase of many lanes


class Graphed(Vectorised):
    """Many lanes at once, in CUDA graphs."""

    def __init__(self, arena: Arena, chunk: int | None = None) -> None:
        super().__init__(arena, chunk)
        self._captured: dict[Any, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def steps(self, phase: Phase, work: Tree, site: Site, plan: Plan) -> tuple[Tree, Tensor]:
        """Take the steps of a phase by replaying graphs."""
        if plan.num_steps == 0:
            return super().steps(phase, work, site, plan)
        key = (id(phase), _signature(work), tuple(_signature(field) for field in site), plan.batch)
        known = self._captured.get(key)
        if known is None or not known.holds(plan):
            known = self._captured[key] = _Captured(self, phase, work, site, plan)
        taken = torch.from_numpy(plan.steps).to(self.arena.device)
        found = known.run(work, site, plan, taken)
        return found, taken if phase.stop is None else known.taken.clone()

    @property
    def pool(self) -> Any:
        """The memory that all graphs share: their intermediate results never outlive a replay."""
        return self._pool


class _Captured:
    """The graphs and fixed buffers of one phase and shape."""

    def __init__(self, engine: Graphed, phase: Phase, work: Tree, site: Site, plan: Plan) -> None:
        self.engine, self.phase = engine, phase
        # The phase is held so that its id stays its own.
        self.work: Tree = tree.map(_buffer, work)
        self.site = Site(*(tree.map(_buffer, field) for field in site))
        grow = 1 if plan.table.shape[2] == 1 else 4 / 3
        period, steps = int(plan.table.shape[2] * grow), int(plan.keys.shape[2] * grow)
        self.table = plan.table.new_zeros((*plan.table.shape[:2], period, plan.table.shape[3]))
        self.keys = plan.keys.new_zeros((*plan.keys.shape[:2], steps, plan.keys.shape[3]))
        self.plan = replace(plan, table=self.table, keys=self.keys)
        device = self.table.device
        self.limit = torch.zeros(plan.steps.shape, dtype=torch.int64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.period = torch.ones(1, dtype=torch.int64, device=device)
        self.taken = torch.zeros_like(self.limit)
        self.done = torch.zeros_like(self.limit, dtype=torch.bool)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.step = over_lanes(phase.step, 2, LaneConvolutions)
        self.stop = None if phase.stop is None else over_lanes(phase.stop, 1)

    def holds(self, plan: Plan) -> bool:
        """Say whether the buffers are long enough for a plan."""
        return (
            plan.table.shape[2] <= self.table.shape[2] and plan.keys.shape[2] <= self.keys.shape[2]
        )

    def run(self, work: Tree, site: Site, plan: Plan, steps: Tensor) -> Tree:
        """Copy the inputs in, replay one graph per step, and return a copy of the outcome."""
        schedule = [self._allowed(width, idle) for width, idle in plan.widths()]
        missing = [kind for kind in dict.fromkeys(schedule) if kind not in self.graphs]
        if missing:
            with _no_collection():
                self.graphs.update({kind: self._capture(*kind) for kind in missing})
        _copy(tree.leaves(self.work), tree.leaves(work))
        for mine, given in zip(self.site, site, strict=True):
            _copy(_leaves(mine), _leaves(given))
        self.table[:, :, : plan.table.shape[2]].copy_(plan.table)
        self.keys[:, :, : plan.keys.shape[2]].copy_(plan.keys)
        self.limit.copy_(steps)
        self.counter.zero_()
        self.period.fill_(plan.table.shape[2])
        self.taken.zero_()
        self.done.zero_()
        for s, kind in enumerate(schedule, 1):
            self.graphs[kind].replay()
            asks = self.stop is not None and s % STOP_EVERY == 0
            if asks and bool((self.done | (self.limit <= s)).all()):
                break
        found: Tree = tree.map(torch.clone, self.work)
        return found

    def _allowed(self, width: int, idle: bool) -> tuple[int, bool]:
        """Round the width up to one of a limited number of widths; extra lanes are idle."""
        slots = self.limit.shape[1]
        if slots <= _WIDTHS:
            return width, idle
        rounded = math.ceil(math.ceil(width * _WIDTHS / slots) * slots / _WIDTHS)
        return rounded, idle or rounded > width

    def _advance(self, width: int, idle: bool) -> None:
        """Take one step on the leading lanes, in place."""
        at = self.counter % self.period
        entry = self.table[:, :width].index_select(2, at)[:, :, 0]
        key = self.keys[:, :width].index_select(2, self.counter)[:, :, 0]
        batch = self.plan.batches(self.engine.arena, entry)
        now = tree.narrow(self.work, 1, 0, width)
        here = narrow_site(self.site, width)
        new = self.step(now, batch, here._replace(key=key))
        active = self.counter < self.limit[:, :width]
        if self.stop is not None:
            active = active & ~self.done[:, :width]
            self.taken[:, :width] += active
        if idle or self.stop is not None:
            new = tree.where(active, new, now)
        _settle(tree.leaves(now), tree.leaves(new))
        if self.stop is not None:
            self.done[:, :width] |= self.stop(now, here)
        self.counter += 1

    def _capture(self, width: int, idle: bool) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), metered() as calls:
            self.counter.zero_()
            self._advance(width, idle)
        self.engine.calls[self.phase.name] = calls()
        torch.cuda.current_stream().wait_stream(side)
        self.counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.engine.pool):
            self._advance(width, idle)
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector away.

    Freeing a graph of an earlier simulation during a capture would spoil it.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _buffer(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _leaves(value: Any) -> list[Tensor]:
    return tree.leaves(value) if isinstance(value, dict) else [value]


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)


def _settle(now: list[Tensor], new: list[Tensor]) -> None:
    """Write the outcome of a step into the buffers that it was computed from.

    Leaves that the step handed through stay; one that moved to another name is copied first, as its
    own buffer may be written before it is read.
    """
    homes = {leaf.untyped_storage().data_ptr() for leaf in now}
    into, values = [], []
    for old, leaf in zip(now, new, strict=True):
        if leaf.data_ptr() == old.data_ptr():
            continue
        into.append(old)
        values.append(leaf.clone() if leaf.untyped_storage().data_ptr() in homes else leaf)
    _copy(into, values)


def _signature(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, leaf.shape, leaf.dtype) for name, leaf in tree.items(value))
    return value.shape, value.dtype
