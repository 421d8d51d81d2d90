"""The vectorised engine: vmap over clients inside vmap over runs.

Slots come sorted by their number of steps, so that at step s only the leading lanes that are still
active are computed; lanes inside that width that are done are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from sartor.core import tree
from sartor.core.method import ClientContext, Phase, ServerContext
from sartor.core.task import alone, metered
from sartor.core.tree import Tree
from sartor.engines.cpu.compiler import library
from sartor.engines.cpu.traces import Traces, keep_freed_memory
from sartor.engines.cpu.tuning import choose_chunk
from sartor.engines.lanes.operations import CoreLanes, CoreOperations, DrawOperations
from sartor.engines.parts import Arena
from sartor.engines.plan import BatchPlan

# The common message and the rounds belong to the run: they are not copied per client.
PER_CLIENT = ClientContext._make((0, None, 0, 0, None, None, 0, 0, 0, 0))
_UNTUNED = 256  # lanes in a block on a CPU before anything was measured
STOP_EVERY = 8  # how often the host asks whether all lanes of a stopping phase are done


class Vectorised:
    """Many lanes at once."""

    def __init__(self, arena: Arena, chunk: int | None = None, single: bool = False) -> None:
        """Make an engine.

        Args:
            arena: the data of all runs.
            chunk: the number of lanes in a block; None lets the engine choose.
            single: whether its choice on a CPU is one lane, as is fastest for convolutions.
        """
        self.arena = arena
        self.lanes = chunk
        self.limit: int | None = None  # of lanes, by memory
        self.workers = torch.get_num_threads() if arena.device.type == "cpu" else 1
        self.traces = Traces()
        self.single = single
        if arena.device.type == "cpu":
            keep_freed_memory()
            library()  # compiled here, so that neither a trial nor two threads wait for it
        self.calls: dict[str, tuple[int, int]] = {}

    def chunk(self, phases: tuple[Phase, ...]) -> int:
        """Say how many lanes to work on at once."""
        wanted = self.lanes or (_UNTUNED if self.arena.device.type == "cpu" else 1 << 30)
        return min(wanted, self.limit or wanted)

    def spare(self, lanes: int) -> None:
        """Work on so many lanes at most from now on."""
        self.limit = min(lanes, self.limit or lanes)

    def tune(self, trial: Callable[[int], float], lanes: int, signature: Hashable) -> None:
        """Choose the number of lanes in a block, unless it was given: by the network or a trial."""
        if self.lanes is not None or self.arena.device.type != "cpu":
            return
        if self.single:
            self.lanes = 1
        else:
            means = (self.workers, library() is not None)
            self.lanes = choose_chunk(trial, lanes, self.workers, (signature, means))

    def runs(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a server function to each run: trees and the server context, runs on axis 0."""
        if self.arena.num_runs == 1:
            return _lift(fn(*(_drop(a) for a in args)))
        return vmap(fn)(*args)

    def addresses(
        self, fn: Callable[..., Any], server: Tree, cohort: Tensor, server_ctx: ServerContext
    ) -> Any:
        """Make the message to each client of the cohort: (runs, slots, ...)."""
        return self.runs(vmap(fn, in_dims=(None, 0, None)), server, cohort, server_ctx)

    def clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the ctx."""
        mapped = over_lanes(fn)
        if self.arena.device.type != "cpu":
            return mapped(*args)
        return self.traces.call(fn, mapped, *args)

    def blocks(self, work: Callable[[Any], Any], blocks: list[Any]) -> list[Any]:
        """Apply ``work`` to every block of lanes; on a CPU blocks run in parallel, one per core."""
        done: list[Any] = []
        wave = self.workers
        while len(done) < len(blocks):
            # While steps still run without a trace, blocks come in waves that double in length,
            # so that the first blocks of a long list make the traces of the others.
            rest, learning = blocks[len(done) :], self.traces.prepare() or not done
            done += self._threaded(work, rest[:wave] if learning and len(rest) > 2 * wave else rest)
            wave *= 2
        return done

    def _threaded(self, work: Callable[[Any], Any], blocks: list[Any]) -> list[Any]:
        if self.workers == 1 or len(blocks) == 1:
            self.traces.at_once = True
            try:
                return [work(block) for block in blocks]
            finally:
                self.traces.at_once = False
        return list(_pool(self.workers).map(work, blocks))

    def phase(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Tensor]:
        """Run a phase on all lanes; returns the work and the number of steps each lane took."""
        work = self.clients(phase.enter, work, ctx)
        work, taken = self.steps(phase, work, ctx, plan)
        return self.clients(phase.leave, work, ctx), taken

    def steps(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Tensor]:
        """Take the steps of a phase, narrowing the lanes as the short ones finish."""
        if plan.steps.size == 1:
            return self._steps_alone(phase, work, ctx, plan)
        device, widths = self.arena.device, plan.widths()
        # The compiled layers pay in traces, and steps of ever other widths are not traced. What
        # serves a step follows from the plan alone: a resumed run has the same bits.
        served = device.type == "cpu" and len({width for width, _ in widths}) == 1
        owner, means = (phase, CoreLanes) if served else (phase.step, _drawing(phase))
        step = partial(self._counted, phase, over_lanes(phase.step, means))
        steps = torch.from_numpy(plan.steps).to(device)
        stops = None if phase.stop is None else _Stops(phase.stop, self, steps)
        finished: list[Tree] = []
        before, here = plan.steps.shape[1], ctx
        for s, (width, idle) in enumerate(widths):
            if width < before:
                finished.append(tree.narrow(work, 1, width, before - width))
                work, before = tree.narrow(work, 1, 0, width), width
                here = narrow_context(ctx, width)
            batch = plan.batches(self.arena, plan.table[:, :width, s % plan.table.shape[2]])
            at = here._replace(key=plan.keys[:, :width, s])
            new = self.traces.call(owner, step, work, batch, at)
            if stops is not None:
                work = stops.settled(s, work, new, here)
                if stops.all_done(s):
                    break
            else:
                work = tree.where(s < steps[:, :width], new, work) if idle else new
        return tree.cat([work, *reversed(finished)], 1), steps if stops is None else stops.taken

    def _counted(self, phase: Phase, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step and remember how many losses it computes; a trace does not count them."""
        with metered() as calls:
            found = step(*args)
        self.calls[phase.name] = calls()
        return found

    def _steps_alone(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Tensor]:
        """Take the steps of one lane without vmap, on plain autograd."""
        now, here = _drop(_drop(work)), _drop_context(_drop(ctx))
        operations = CoreOperations if self.arena.device.type == "cpu" else nullcontext
        drawing = _drawing(phase)
        taken = 0

        def step(*args: Any) -> Tree:
            with alone(operations), drawing():
                return phase.step(*args)

        counted = partial(self._counted, phase, step)
        for s in range(plan.num_steps):
            batch = plan.batches(self.arena, plan.table[0, 0, s % plan.table.shape[2]])
            now = self.traces.call(
                phase, counted, now, batch, here._replace(key=plan.keys[0, 0, s])
            )
            taken += 1
            if phase.stop is not None and bool(phase.stop(now, here)):
                break
        return _lift(_lift(now)), torch.full((1, 1), taken, device=self.arena.device)


class _Stops:
    """The lanes of a phase that clients end by themselves.

    Args:
        stop: says of a client that it is done.
        engine: asks all lanes.
        steps: (runs, slots) the most steps that each takes.
    """

    def __init__(self, stop: Callable[..., Any], engine: Vectorised, steps: Tensor) -> None:
        self.stop, self.engine, self.steps = stop, engine, steps
        self.taken = torch.zeros_like(steps)
        self.done = torch.zeros_like(steps, dtype=torch.bool)

    def settled(self, s: int, now: Tree, new: Tree, ctx: ClientContext) -> Tree:
        """Return the work of the leading lanes after step ``s``, if it was theirs to take."""
        width = ctx.index.shape[1]
        active = (s < self.steps[:, :width]) & ~self.done[:, :width]
        now = tree.where(active, new, now)
        self.taken[:, :width] += active
        self.done[:, :width] |= self.engine.clients(self.stop, now, ctx)
        return now

    def all_done(self, s: int) -> bool:
        """Say now and then whether no lane has a step left."""
        asks = s % STOP_EVERY == STOP_EVERY - 1
        return asks and bool((self.done | (self.steps <= s + 1)).all())


def _drawing(phase: Phase) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context for the steps of a phase: only phases that draw need one."""
    return DrawOperations if phase.random else nullcontext


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Return the threads for blocks, one core each; kept for the life of the process."""
    return ThreadPoolExecutor(workers, "sartor-block", initializer=_take_one_core)


def _take_one_core() -> None:
    """Let this thread use one core from now on.

    The first operation of a thread gives it the number of cores that was set last anywhere in the
    process, and so may undo what the thread has set for itself. Asking for the number counts as
    that operation; after it the thread keeps its own.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


def over_lanes(
    fn: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dims: ClientContext = PER_CLIENT,
) -> Callable[..., Any]:
    """Map a client function of trees and the ctx, of which ``dims`` have an axis of clients."""
    return partial(_on_lanes, fn, context, dims)


def _on_lanes(fn: Callable[..., Any], context: Any, dims: ClientContext, *args: Any) -> Any:
    inner = vmap(fn, in_dims=(*(0,) * (len(args) - 1), dims))
    runs, slots = args[-1].index.shape
    with context():
        if runs * slots == 1:
            return _lift(_lift(fn(*(_drop_context(_drop(a), dims) for a in args))))
        if runs == 1:
            return _lift(inner(*(_drop(a) for a in args)))
        return vmap(inner)(*args)


def narrow_context(
    ctx: ClientContext, width: int, dims: ClientContext = PER_CLIENT
) -> ClientContext:
    """View the contexts of the leading slots."""
    fields = zip(ctx, dims, strict=True)
    return ClientContext._make(v if d is None else tree.narrow(v, 1, 0, width) for v, d in fields)


def _drop(value: Any) -> Any:
    """Take the only run out of trees and named tuples of trees."""
    if isinstance(value, tuple):
        parts = [_drop(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return tree.map(lambda leaf: leaf[0], value)


def _drop_context(value: Any, dims: ClientContext = PER_CLIENT) -> Any:
    """Take the only slot out; what belongs to the run has no such axis."""
    if isinstance(value, ClientContext):
        fields = zip(value, dims, strict=True)
        return ClientContext._make(v if d is None else _drop(v) for v, d in fields)
    return _drop(value)


def _lift(value: Any) -> Any:
    """Add the axis of the only run again."""
    if isinstance(value, tuple):
        return tuple(map(_lift, value))
    return tree.map(lambda leaf: leaf[None], value)
