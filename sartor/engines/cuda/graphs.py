"""The vectorised engine on CUDA.

Each step is captured once per lane width in a CUDA graph, and replayed.

A step has static shapes, no branch on data, and takes its randomness from keys that are inputs, so
one capture serves all rounds. The step counter lives on the device; tables, messages and work trees
are copied into fixed buffers. Runs and clients become one axis of lanes, sorted by their number of
steps, so that few lanes are idle at any step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from sartor.core import tree
from sartor.core.method import ClientContext, Phase, ServerContext
from sartor.core.task import metered
from sartor.core.tree import Tree
from sartor.engines.cuda.recording import Function, copy, flattened, no_collection, once, signature
from sartor.engines.lanes import leaves
from sartor.engines.lanes.operations import LaneOperations
from sartor.engines.parts import Arena, on_device
from sartor.engines.plan import BatchPlan, num_steps
from sartor.engines.vectorised import PER_CLIENT, STOP_EVERY, Vectorised, narrow_context, over_lanes

_WIDTHS = 40  # the most lane widths to capture for one phase; wastes under 5% of lane-steps
_WORTH_IT = 12  # uses of a function after which it is captured
_MOST_COMMON = 1 << 30  # bytes that common messages may take when every lane gets its own copy
_EVERY_LANE = ClientContext._make((0,) * len(ClientContext._fields))


class Graphed(Vectorised):
    """Many lanes at once, in CUDA graphs."""

    def __init__(self, arena: Arena, chunk: int | None = None) -> None:
        super().__init__(arena, chunk)
        self._captured: dict[Any, _Captured] = {}
        self._functions: dict[Any, Function | None] = {}
        self._uses: dict[Any, int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def spare(self, lanes: int) -> None:
        """Work on so many lanes at most from now on; graphs of larger blocks give their memory."""
        super().spare(lanes)
        self._captured.clear()
        self._functions.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def steps(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Tensor]:
        """Take the steps of a phase by replaying graphs."""
        if plan.num_steps == 0:
            return super().steps(phase, work, ctx, plan)
        ctx, dims = _shared_once(ctx)
        if dims is not PER_CLIENT:
            return self._steps(phase, work, ctx, plan, dims)
        if plan.steps.shape[0] > 1 and _copied_common(ctx, plan.steps.size) <= _MOST_COMMON:
            return self._steps_of_all(phase, work, ctx, plan)
        return self._steps(phase, work, ctx, plan, PER_CLIENT)

    def _steps_of_all(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Tensor]:
        """Take the steps of all runs as those of one run with all their clients."""
        shape = plan.steps.shape
        order = np.argsort(-plan.steps.reshape(-1), kind="stable")
        pick = on_device(order, self.arena.device)
        back = torch.empty_like(pick)
        back[pick] = torch.arange(len(pick), device=pick.device)
        run = pick // shape[1]

        def flat(value: Any, index: Tensor, axes: int) -> Any:
            return tree.map(lambda leaf: leaf.flatten(0, axes - 1)[index][None], value)

        fields = (
            flat(value, run, 1) if dim is None else flat(value, pick, 2)
            for value, dim in zip(ctx, PER_CLIENT, strict=True)
        )
        found, taken = self._steps(
            phase, flat(work, pick, 2), ClientContext(*fields), plan.as_one_run(order), _EVERY_LANE
        )
        return (
            tree.map(lambda leaf: leaf[0][back].reshape(*shape, *leaf.shape[2:]), found),
            taken[0][back].reshape(shape),
        )

    def _steps(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan, dims: ClientContext
    ) -> tuple[Tree, Tensor]:
        fields = tuple(signature(field) for field in ctx)
        key = (id(phase), signature(work), fields, dims, plan.batch)
        known = self._captured.get(key)
        if known is None or not known.holds(plan):
            known = self._captured[key] = _Captured(self, phase, work, ctx, plan, dims)
        taken = on_device(plan.steps, self.arena.device)
        found = known.run(work, ctx, plan, taken)
        return found, taken if phase.stop is None else known.taken.clone()

    def runs(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a server function to each run."""
        return self._often(fn, super().runs, fn, *args)

    def addresses(
        self, fn: Callable[..., Any], server: Tree, cohort: Tensor, server_ctx: ServerContext
    ) -> Any:
        """Make the message to each client of the cohort: (runs, slots, ...)."""
        return self._often(fn, self._addresses, fn, server, cohort, server_ctx)

    def clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the ctx."""
        return self._often(fn, super().clients, fn, *args)

    def _addresses(self, fn: Callable[..., Any], *args: Any) -> Any:
        return Vectorised.runs(self, vmap(fn, in_dims=(None, 0, None)), *args)

    def _often(self, fn: Callable[..., Any], apply: Callable[..., Any], *args: Any) -> Any:
        """Apply a function; from its twelfth use with arguments of these shapes on by a graph."""
        given: list[Any] = []
        form = flattened(args[1:], given)
        key = (fn, apply.__name__, form, *(signature(leaf) for leaf in given))
        if key in self._functions:
            known = self._functions[key]
            return apply(*args) if known is None else known(given)
        self._uses[key] = uses = self._uses.get(key, 0) + 1
        if uses < _WORTH_IT:
            return apply(*args)

        def call(*given: Any) -> Any:
            return apply(fn, *given)

        self._functions[key] = Function.of(call, form, given, self.pool)
        return self._often(fn, apply, *args)

    @property
    def pool(self) -> Any:
        """The memory that all graphs share: their intermediate results never outlive a replay."""
        return self._pool


class _Captured:
    """The graphs and fixed buffers of one phase and shape."""

    def __init__(
        self,
        engine: Graphed,
        phase: Phase,
        work: Tree,
        ctx: ClientContext,
        plan: BatchPlan,
        dims: ClientContext,
    ) -> None:
        self.engine, self.phase, self.dims = engine, phase, dims
        # The phase is held so that its id stays its own.
        self.work: Tree = tree.map(_buffer, work)
        self.ctx = ClientContext(*(tree.map(_shared_buffer, field) for field in ctx))
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
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.widths = few_widths(_schedule(phase, engine.arena, plan), plan.steps.shape[1])
        self.step = over_lanes(phase.step, LaneOperations, dims)
        self.stop = None if phase.stop is None else over_lanes(phase.stop, dims=dims)

    def holds(self, plan: BatchPlan) -> bool:
        """Say whether the buffers are long enough for a plan."""
        return (
            plan.table.shape[2] <= self.table.shape[2] and plan.keys.shape[2] <= self.keys.shape[2]
        )

    def run(self, work: Tree, ctx: ClientContext, plan: BatchPlan, steps: Tensor) -> Tree:
        """Copy the inputs in, replay one graph per step, and return a copy of the outcome."""
        at = np.searchsorted(self.widths, [width for width, _ in plan.widths()])
        schedule = [self.widths[k] for k in at]
        missing = [width for width in dict.fromkeys(schedule) if width not in self.graphs]
        self._fill(work, ctx, plan, steps)
        if missing:
            with no_collection():
                self.graphs.update({width: self._capture(width) for width in missing})
            self._fill(work, ctx, plan, steps)  # recording a step takes it once
        for s, width in enumerate(schedule, 1):
            self.graphs[width].replay()
            asks = self.stop is not None and s % STOP_EVERY == 0
            if asks and bool((self.done | (self.limit <= s)).all()):
                break
        found: Tree = tree.map(torch.clone, self.work)
        return found

    def _fill(self, work: Tree, ctx: ClientContext, plan: BatchPlan, steps: Tensor) -> None:
        """Copy the inputs into the buffers."""
        copy(tree.leaves(self.work), tree.leaves(work))
        for mine, given in zip(self.ctx, ctx, strict=True):
            copy([once(x) for x in _leaves(mine)], [once(x) for x in _leaves(given)])
        self.table[:, :, : plan.table.shape[2]].copy_(plan.table)
        self.keys[:, :, : plan.keys.shape[2]].copy_(plan.keys)
        self.limit.copy_(steps)
        self.counter.zero_()
        self.period.fill_(plan.table.shape[2])
        self.taken.zero_()
        self.done.zero_()

    def _batch(self, width: int) -> Any:
        arena = self.engine.arena
        if leaves.takes_fetch(self.plan, arena):
            return leaves.fetch(self.plan, arena, self.counter, self.period, width)
        at = self.counter % self.period
        return self.plan.batches(arena, self.table[:, :width].index_select(2, at)[:, :, 0])

    def _next(self, width: int) -> Tree:
        """Compute what one step makes of the leading lanes."""
        key = self.keys[:, :width]
        key = key.index_select(2, self.counter)[:, :, 0] if key.shape[3] else key[:, :, 0]
        now = tree.narrow(self.work, 1, 0, width)
        here = narrow_context(self.ctx, width, self.dims)
        found: Tree = self.step(now, self._batch(width), here._replace(key=key))
        return found

    def _advance(self, width: int) -> None:
        """Take one step on the leading lanes, in place."""
        now = tree.narrow(self.work, 1, 0, width)
        here = narrow_context(self.ctx, width, self.dims)
        new = self._next(width)
        limit = self.limit[:, :width]
        if self.stop is not None:
            active = (self.counter < limit) & ~self.done[:, :width]
            self.taken[:, :width] += active
            limit = torch.where(active, limit, 0)
        _settle(tree.leaves(now), tree.leaves(new), limit, self.counter)
        if self.stop is not None:
            self.done[:, :width] |= self.stop(now, here)
        self.counter += 1

    def _capture(self, width: int) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), metered() as calls:
            self.counter.zero_()
            self._advance(width)
        self.engine.calls[self.phase.name] = calls()
        torch.cuda.current_stream().wait_stream(side)
        self.counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.engine.pool):
            self._advance(width)
        return graph


def _shared_once(ctx: ClientContext) -> tuple[ClientContext, ClientContext]:
    """Treat an own message that all clients of a run share as one of the run.

    Layers then work on all samples of a run as on one batch. The message of an evaluation is the
    model, and many methods give all clients the same. (On a CPU a model is scored alike whether it
    is shared or not, to the bit.) Returned beside the context: which of its fields have an axis of
    clients.
    """
    leaves = tree.leaves(ctx.own)
    if not leaves or any(leaf.shape[1] == 1 or leaf.stride(1) for leaf in leaves):
        return ctx, PER_CLIENT
    own = tree.map(lambda leaf: leaf[:, 0], ctx.own)
    return ctx._replace(own=own), PER_CLIENT._replace(own=cast(Any, None))


def _schedule(phase: Phase, arena: Arena, plan: BatchPlan) -> list[int]:
    """Return the width of every step of a typical cohort.

    It must not depend on who happened to be drawn first: sums of a step may be rounded otherwise
    at another width, and a resumed run would differ from the one that was not stopped.
    """
    if callable(phase.steps) or phase.when is not None:
        return [width for width, _ in plan.widths()]
    slots = plan.steps.shape[1]
    size = arena.splits["train" if phase.data == "none" else phase.data].size.reshape(-1)
    steps = np.sort(num_steps(phase, size))[::-1]
    lanes = steps[(np.arange(slots) * len(steps)) // slots]
    return [int((lanes > s).sum()) for s in range(int(lanes.max(initial=0)))]


def few_widths(schedule: list[int], slots: int, most: int = _WIDTHS) -> list[int]:
    """Choose at most so many widths to capture that rounding up wastes fewest lane-steps.

    The schedule has the width that every step needs; ``slots``, the number of lanes, is always
    among the widths, as another round may need it. They are in ascending order.
    """
    widths, counts = np.unique([*schedule, slots], return_counts=True)
    if len(widths) <= most:
        return [int(width) for width in widths]
    if len(widths) > 256:  # first to a grid, so that the search stays short
        widths = np.unique(np.ceil(np.linspace(1, slots, 257)[1:]).astype(np.int64))
        counts = np.bincount(np.searchsorted(widths, schedule), minlength=len(widths))
    number = len(widths)
    up_to = np.concatenate([[0], np.cumsum(counts)])
    # cost[i, j]: the lane-steps of widths i..j-1 when all are rounded up to width j-1.
    cost = (up_to[None, :] - up_to[:, None]) * np.concatenate([[0], widths])[None, :]
    cost = np.where(np.tri(number + 1, dtype=bool), np.inf, cost.astype(np.float64))
    best, choice = cost[0], []
    for _ in range(most - 1):
        total = best[:, None] + cost
        choice.append(total.argmin(0))
        best = total.min(0)
    found, at = [], number
    for step in reversed(choice):
        found.append(int(widths[at - 1]))
        at = int(step[at])
    return sorted([int(widths[at - 1]), *found])


def _buffer(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _shared_buffer(leaf: Tensor) -> Tensor:
    """Make a buffer for a tensor; what it repeats is held once."""
    return _buffer(once(leaf)).expand(leaf.shape)


def _leaves(value: Any) -> list[Tensor]:
    return tree.leaves(value) if isinstance(value, dict) else [value]


def _settle(now: list[Tensor], new: list[Tensor], limit: Tensor, counter: Tensor) -> None:
    """Write the outcome of a step into the buffers that it was computed from.

    Only lanes whose limit is above the counter change. Leaves that the step handed through stay;
    one that moved to another name is copied first, as its own buffer may be written before it is
    read.
    """
    homes = {leaf.untyped_storage().data_ptr() for leaf in now}
    into, values = [], []
    for old, leaf in zip(now, new, strict=True):
        if leaf.data_ptr() == old.data_ptr():
            continue
        into.append(old)
        values.append(leaf.clone() if leaf.untyped_storage().data_ptr() in homes else leaf)
    if leaves.takes_settle(into, values):
        leaves.settle(into, values, limit, counter)
    elif into:
        active = counter < limit
        masks = (active.reshape(active.shape + (1,) * (x.dim() - 2)) for x in into)
        both = zip(masks, values, into, strict=True)
        copy(into, [torch.where(mask, value, old) for mask, value, old in both])


def _copied_common(ctx: ClientContext, lanes: int) -> int:
    """Count the bytes of the common messages when every lane has its own."""
    return tree.num_bytes(ctx.common, 1) * lanes
