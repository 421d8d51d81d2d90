"""What stays the same from round to round: method, data, seeds; keys, contexts and messages.

A `Context` is a plain object that is handed to whatever works with clients: the rounds
(`round.py`), the work of clients (`work.py`) and the evaluator (`evaluate.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sartor.compose.fields import with_phases
from sartor.core import layers, rng, tree, wire
from sartor.core.cohort import Participation
from sartor.core.method import ClientContext, Method, Phase, ServerContext, no_message
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.engines.parts import (
    Arena,
    B,
    Block,
    Costs,
    Group,
    Sparing,
    T,
    Tally,
    Which,
    cut_arena,
    on_device,
    reorder,
    reorder_context,
)
from sartor.engines.plan import BatchPlan, build_plan, num_steps

AFTER = ("epilogue", "evaluate")
"""The stages of work that follows a round and takes its learning rate; they are numbered one up."""


def at_work(method: Method, task: Task) -> Method:
    """Return a method whose phases say to layers that draw, or look at batches, what they need.

    Without such layers it is the method itself.
    """
    if not (task.draws or task.norms):
        return method

    def change(phase: Phase) -> Phase:
        def step(work: Tree, batch: Any, ctx: ClientContext) -> Tree:
            with layers.working(ctx.key, batch):
                return phase.step(work, batch, ctx)

        return replace(phase, step=step, random=phase.random or bool(task.draws))

    return with_phases(method, change)


class Engine(Protocol):
    """What an engine must do; see `sequential.py` for the plainest one."""

    calls: dict[str, tuple[int, int]]
    lanes: int | None
    limit: int | None
    workers: int

    def tune(self, trial: Any, lanes: int, signature: Any) -> None:
        """Choose the number of lanes a block by measuring, if there is a choice."""

    def chunk(self, phases: tuple[Phase, ...]) -> int:
        """Say how many lanes to work on at once."""

    def spare(self, lanes: int) -> None:
        """Work on so many lanes at most from now on, and free what larger blocks left behind."""

    def runs(self, fn: Any, *args: Any) -> Any:
        """Apply a server function to each run."""

    def addresses(self, fn: Any, server: Tree, cohort: Tensor, server_ctx: ServerContext) -> Any:
        """Write the message to each client of the cohort."""

    def clients(self, fn: Any, *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the ctx."""

    def blocks(self, work: Any, blocks: list[Any]) -> list[Any]:
        """Apply ``work`` to every block of lanes, in order or in parallel."""

    def phase(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Any]:
        """Run a phase on each lane; returns the work and the number of steps taken."""


class Context:
    """Everything that stays the same from round to round.

    Args:
        method: the record.
        task: the network and its loss.
        arena: the data of all runs.
        engine: how functions are applied to lanes.
        seeds: one per run.
        hyper: (runs,) or (runs, clients) per name.
        participation: which clients participate in a round.

    Attributes:
        sizes: (runs, clients) training samples, on the device.
        everybody: (runs, clients) the ids of all clients, on the host.
        queued: whether the device works on while the host prepares what comes next.
        ahead: batches of the next round that are already drawn.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        arena: Arena,
        engine: Engine,
        seeds: Sequence[int],
        hyper: dict[str, Tensor],
        participation: Participation,
    ) -> None:
        self.method, self.task, self.arena, self.engine = method, task, arena, engine
        self.seeds = list(seeds)
        self.hyper = {k: v.to(arena.device) for k, v in hyper.items()}
        self.participation = participation
        self.base = np.stack([rng.key(seed).numpy() for seed in self.seeds])
        self.sizes = torch.from_numpy(arena.splits["train"].size).to(arena.device)
        self.everybody = np.tile(np.arange(arena.num_clients), (arena.num_runs, 1))
        self.queued = arena.device.type == "cuda"
        self.ahead: dict[Any, BatchPlan] = {}
        self._marks: list[tuple[dict[str, float], str, Any, Any]] = []

    def record(self, round_index: int) -> Method:
        """Return the method of a round, or of an evaluation before it: first the warm-up's."""
        warm = self.method.schedule.first
        return self.method if warm is None or round_index >= warm.rounds else warm.method

    # ---- what is read-only in a round

    def server_ctx(
        self, stage: str, round_index: int, cohort: np.ndarray, present: Which = None, run: int = 0
    ) -> ServerContext:
        """Return what the server reads, for the runs ``run, run+1, ...`` of a cohort."""
        device, runs = self.arena.device, slice(run, run + len(cohort))
        there = np.ones_like(cohort, dtype=bool) if present is None else present
        return ServerContext(
            hyper={name: value[runs] for name, value in self.hyper.items()},
            key=on_device(rng.fold_host(self.base[runs], stage, round_index), device),
            round=torch.full((len(cohort),), round_index, device=device),
            sizes=self.sizes[runs],
            cohort=on_device(cohort, device),
            present=on_device(there, device),
        )

    def keys(self, stage: str, round_index: int, cohort: np.ndarray, run: int = 0) -> np.ndarray:
        """Fold the keys of a cohort, (runs, slots, 2); on the host, as they are few."""
        run_keys = rng.fold_host(self.base[run : run + len(cohort)], stage, round_index)
        return rng.fold_host(run_keys[:, None, :], cohort)

    def messages(
        self, method: Method, server: Tree, server_ctx: ServerContext
    ) -> tuple[Tree, Tree]:
        """Write the messages to a cohort, as they arrive: (runs, ...) and (runs, slots, ...)."""
        common, own, sparse = {}, {}, method.wire.sparse
        if method.broadcast is not no_message:
            common = self.engine.runs(method.broadcast, server, server_ctx)
        if method.address is not no_message:
            own = self.engine.addresses(method.address, server, server_ctx.cohort, server_ctx)
        if sparse:
            common = wire.received(common, wire.marks_of(sparse, "common"))
            own = wire.received(own, wire.marks_of(sparse, "own"))
        return common, own

    def group(
        self,
        stage: str,
        t: int,
        ids: np.ndarray,
        messages: tuple[Tree, Tree],
        run: int = 0,
        server_ctx: ServerContext | None = None,
    ) -> Group:
        """Return clients ``ids`` (runs, slots) with their messages, common and own, in round t."""
        device, keys = self.arena.device, self.keys(stage, t, ids, run)
        server_ctx = server_ctx or self.server_ctx(stage, t, ids, run=run)
        cohort, (common, own) = server_ctx.cohort, messages
        sizes = server_ctx.sizes.gather(1, cohort)
        wide = {
            k: v.gather(1, cohort) if v.dim() == 2 else v[:, None].expand(cohort.shape)
            for k, v in server_ctx.hyper.items()
        }
        rows = torch.arange(self.arena.splits["train"].capacity, device=device)
        ctx = ClientContext(
            hyper=wide,
            common=common,
            own=own,
            key=on_device(keys, device),
            round=server_ctx.round,
            rate_round=server_ctx.round - 1 if stage in AFTER and t else server_ctx.round,
            index=cohort,
            num_samples=sizes,
            mask=rows < sizes[:, :, None],
            reports=server_ctx.present,
        )
        return Group(run, ids, np.ones_like(ids, dtype=bool), ctx, keys)

    # ---- states

    def blank_tally(self) -> Tally:
        """Return a tally of all clients in which nobody was scored."""
        return Tally.blank(self.everybody.shape, 2 if self.task.measure is None else 3)

    def models(self, dtype: torch.dtype) -> Tree:
        """Draw the initial models of all runs."""
        device = self.arena.device
        self.task.settle(device, dtype)
        starts = {seed: self.task.init(seed) for seed in dict.fromkeys(self.seeds)}
        stacked = tree.stack([starts[seed] for seed in self.seeds])
        params: Tree = tree.map(lambda leaf: leaf.to(device, dtype), stacked)
        return params

    def init(self, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Draw the initial models of all runs; return them and the server's first state."""
        params, server_ctx = self.models(dtype), self.server_ctx("init", 0, self.everybody)
        return params, self.engine.runs(self.method.init_server, params, server_ctx)

    def new_clients(self, params: Tree, cohort: np.ndarray) -> Tree:
        """Make the states of clients that have not trained yet."""
        found: Tree = self.engine.clients(
            lambda ctx: self.method.init_client(ctx.common, ctx._replace(common={})),
            self.group("init", 0, cohort, (params, {})).ctx,
        )
        return found

    def centre(self, server: Tree, round_index: int) -> Tree:
        """Return the parameters of the global model: (runs, ...)."""
        server_ctx = self.server_ctx("evaluate", round_index, self.everybody)
        found: Tree = self.engine.runs(self.method.use.centre, server, server_ctx)
        return found

    # ---- work

    def run_phases(self, phases: tuple[Phase, ...], work: Tree, group: Group) -> tuple[Tree, Costs]:
        """Run local phases on a block of lanes, and count the samples they read."""
        costs = Costs(*np.zeros((2, len(group.ids)), dtype=np.int64))
        for phase in phases:
            keys = rng.fold_host(group.keys, phase.stream or phase.name)
            if callable(phase.steps):
                steps = self.engine.clients(phase.steps, group.ctx).cpu().numpy()
                steps = np.where(group.present, steps, 0)
            else:
                steps = self.known_steps(phase, group.ids, group.present, group.run)
            if phase.when is None and steps.any():
                plan = self.plan(phase, group.ids, keys, steps, group.run)
                work, taken = self.engine.phase(phase, work, group.ctx, plan)
                samples = plan.samples
                if phase.stop is not None:
                    samples = plan.samples_in(taken.cpu().numpy())
            else:
                work, samples = self._some_take(phase, work, group, keys, steps)
            forward, backward = self.engine.calls.get(phase.name, (0, 0))
            costs.backward += backward * samples.sum(1) // phase.draws
            costs.forward += forward * samples.sum(1) // phase.draws
        return work, costs

    def _some_take(
        self, phase: Phase, work: Tree, group: Group, keys: np.ndarray, steps: np.ndarray
    ) -> tuple[Tree, np.ndarray]:
        """Run a phase with its takers in front, so that no step is computed for the others.

        Return the work, and how many samples each lane read, in some order.
        """
        ids, ctx = group.ids, group.ctx
        if phase.when is not None:
            steps = np.where(self.engine.clients(phase.when, work, ctx).cpu().numpy(), steps, 0)
        if not steps.any():  # no client takes it: no batches, no steps
            work = self.engine.clients(phase.enter, work, ctx)
            return self.engine.clients(phase.leave, work, ctx), steps
        order = np.argsort(steps == 0, axis=1, kind="stable")
        moves = not (order[:, 1:] > order[:, :-1]).all()
        pick, back = (on_device(v, self.arena.device) for v in (order, order.argsort(1)))
        if moves:
            work, ctx = reorder(work, pick), reorder_context(ctx, pick)
            keys = np.take_along_axis(keys, order[:, :, None], 1)
            ids, steps = (np.take_along_axis(v, order, 1) for v in (ids, steps))
        plan = self.plan(phase, ids, keys, steps, group.run)
        work, taken = self.engine.phase(phase, work, ctx, plan)
        samples = plan.samples if phase.stop is None else plan.samples_in(taken.cpu().numpy())
        return reorder(work, back) if moves else work, samples

    def known_steps(
        self, phase: Phase, ids: np.ndarray, present: np.ndarray, run: int
    ) -> np.ndarray:
        """Count the steps of clients in a phase of known length; absent clients take none."""
        split = self.arena.splits["train" if phase.data == "none" else phase.data]
        size = np.take_along_axis(split.size[run : run + len(ids)], ids, 1)
        return np.where(present, num_steps(phase, size), 0)

    def plan(
        self, phase: Phase, ids: np.ndarray, keys: np.ndarray, steps: np.ndarray, run: int
    ) -> BatchPlan:
        """Draw the batches of a phase, or take those that were drawn ahead."""
        if self.ahead and (key := plan_key(phase, ids, keys, steps, run)) in self.ahead:
            return self.ahead.pop(key)
        arena = cut_arena(self.arena, run, len(ids))
        part_keys = None if phase.part == (0.0, 1.0) else self._part_keys(ids, run)
        return build_plan(phase, arena, ids, keys, steps, part_keys)

    def _part_keys(self, ids: np.ndarray, run: int) -> np.ndarray:
        """Fold the keys of the order that cuts a client's samples into parts.

        It depends on the run's seed alone, so that equal clients are cut alike.
        """
        base = rng.fold_host(self.base[run : run + len(ids)], "part")
        return np.broadcast_to(base[:, None, :], (*ids.shape, 2))

    def pieces(self, work: Callable[[B], T], blocks: Sequence[B]) -> list[tuple[B, T]]:
        """Work on blocks; return what came of them, in smaller pieces where memory ran out."""
        found = self.engine.blocks(Sparing(work, self.engine.spare), list(blocks))
        return [piece for pieces in found for piece in pieces]

    def blocks(
        self, phases: tuple[Phase, ...], shape: tuple[int, ...], lanes: int | None = None
    ) -> list[Block]:
        """Cut (runs, slots) into blocks of at most ``lanes`` (the engine's choice if None)."""
        runs, slots = shape
        most = max(1, lanes or self.engine.chunk(phases))
        num_slots = min(slots, most)
        num_runs = min(runs, max(1, most // num_slots))
        return [
            Block(run, min(num_runs, runs - run), slot, min(num_slots, slots - slot))
            for run in range(0, runs, num_runs)
            for slot in range(0, slots, num_slots)
        ]

    # ---- time

    def clock(self, seconds: dict[str, float]) -> Callable[[str], float]:
        """Return a stop-watch: a call adds the time since the last under a name, and returns it."""
        if self.arena.device.type == "cuda":  # there `read_clocks` adds it
            return self._queued_clock(seconds)
        last = [time.perf_counter()]

        def stop(name: str) -> float:
            passed = time.perf_counter() - last[0]
            seconds[name] += passed
            last[0] += passed
            return passed

        return stop

    def _queued_clock(self, seconds: dict[str, float]) -> Callable[[str], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        before = [event]

        def mark(name: str) -> float:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
            self._marks.append((seconds, name, before[0], now))
            before[0] = now
            return 0.0

        return mark

    def read_clocks(self) -> None:
        """Wait for the device, and add the times that were marked in its queue."""
        if self._marks:
            torch.cuda.synchronize()
        for seconds, name, before, now in self._marks:
            seconds[name] += before.elapsed_time(now) / 1000
        self._marks.clear()


def plan_key(
    phase: Phase, ids: np.ndarray, keys: np.ndarray, steps: np.ndarray, run: int
) -> tuple[Any, ...]:
    """Return all that a plan depends on."""
    return id(phase), run, ids.shape, ids.tobytes(), keys.tobytes(), steps.tobytes()
