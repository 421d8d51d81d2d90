"""What stays the same from round to round, and how clients go through their phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core import rng, tree, wire
from sartor.core.cohort import Participation
from sartor.core.method import ClientContext, Method, Phase, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.engines.arena import Arena
from sartor.engines.moving import on_device
from sartor.engines.parts import (
    Block,
    Costs,
    Engine,
    Tally,
    cut_arena,
    reorder,
    reorder_context,
)
from sartor.engines.plan import BatchPlan, build_plan, num_steps

Watch = Callable[[Tree, np.ndarray, np.ndarray], None]
"""Is shown uploads (runs, slots, ...), the ids of their clients, and which of them trained."""


class Base:
    """Everything that stays the same from round to round.

    Args:
        method: the record.
        task: the network and its loss.
        arena: the data of all runs.
        engine: how lanes are worked.
        seeds: one per run.
        hyper: (runs,) or (runs, clients) per name.
        participation: who takes part.
        eval_batch: test samples a step; chosen for the device if None.
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
        eval_batch: int | None = None,
    ) -> None:
        self.method, self.task, self.arena, self.engine = method, task, arena, engine
        self.seeds = list(seeds)
        self.hyper = {k: v.to(arena.device) for k, v in hyper.items()}
        self.participation = participation
        # On a CPU small batches waste less on padding; on a GPU few large steps are cheaper.
        self.eval_batch = eval_batch or (64 if arena.device.type == "cpu" else 256)
        self.base = np.stack([rng.key(seed).numpy() for seed in self.seeds])
        self.sizes = torch.from_numpy(arena.splits["train"].size).to(arena.device)
        self.everybody = np.tile(np.arange(arena.num_clients), (arena.num_runs, 1))
        self.watch: Watch | None = None
        self._marks: list[tuple[dict[str, float], str, Any, Any]] = []
        self._plain = changed(method, predict=None)  # scores a global model by its logits
        self._score_phases: dict[tuple[int, str, bool], Phase] = {}
        self._score_plans: dict[Any, BatchPlan] = {}
        self._plan_bytes = 0
        self.queued = arena.device.type == "cuda"  # work goes on while the host runs ahead
        self._ahead: dict[Any, BatchPlan] = {}  # plans of the next round
        self._drawn: dict[Any, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # and its cohort

    # ---- what is read-only in a round
    # -----------------------------------------------------------------

    def server_ctx(
        self,
        stage: str,
        round_index: int,
        cohort: np.ndarray,
        present: np.ndarray,
        run: int = 0,
    ) -> ServerContext:
        """Collect what the server of the cohort's runs, ``run`` and those after it, may read."""
        device, runs = self.arena.device, slice(run, run + len(cohort))
        key = rng.fold_host(self.base[runs], stage, round_index)
        return ServerContext(
            hyper={name: value[runs] for name, value in self.hyper.items()},
            key=on_device(key, device),
            round=torch.full((len(cohort),), round_index, device=device),
            sizes=self.sizes[runs],
            cohort=on_device(cohort, device),
            present=on_device(present, device),
        )

    def keys(self, stage: str, round_index: int, cohort: np.ndarray, run: int = 0) -> np.ndarray:
        """Fold the keys of a cohort, (runs, slots, 2), on the host.

        Few numbers, many small operations.
        """
        run_keys = rng.fold_host(self.base[run : run + len(cohort)], stage, round_index)
        return rng.fold_host(run_keys[:, None, :], cohort)

    def ctx(
        self, server_ctx: ServerContext, keys: np.ndarray, common: Tree, own: Tree
    ) -> ClientContext:
        """Collect what the clients of the hub's cohort may read: (runs, slots, ...)."""
        device, split = self.arena.device, self.arena.splits["train"]
        sizes = server_ctx.sizes.gather(1, server_ctx.cohort)
        wide = {
            k: v.gather(1, server_ctx.cohort)
            if v.dim() == 2
            else v[:, None].expand(server_ctx.cohort.shape)
            for k, v in server_ctx.hyper.items()
        }
        return ClientContext(
            hyper=wide,
            common=common,
            own=own,
            key=on_device(keys, device),
            round=server_ctx.round,
            index=server_ctx.cohort,
            num_samples=sizes,
            mask=torch.arange(split.capacity, device=device) < sizes[:, :, None],
            reports=server_ctx.present,
        )

    def messages(
        self, method: Method, server: Tree, server_ctx: ServerContext
    ) -> tuple[Tree, Tree]:
        """Write the letters of a round, as they arrive: (runs, ...) and (runs, slots, ...)."""
        common = self.engine.runs(method.broadcast, server, server_ctx)
        own = self.engine.addresses(method.address, server, server_ctx.cohort, server_ctx)
        return (
            wire.received(common, wire.marks_of(method.wire.sparse, "common")),
            wire.received(own, wire.marks_of(method.wire.sparse, "own")),
        )

    def _message_bytes(self, method: Method, ctx: ClientContext) -> np.ndarray:
        """Count the bytes of both letters to each client: (runs, slots), or one for all."""
        common = wire.num_bytes(ctx.common, wire.marks_of(method.wire.sparse, "common"), 1)
        own = wire.num_bytes(ctx.own, wire.marks_of(method.wire.sparse, "own"), 2)
        return common[..., None] + own

    # ---- state
    # ------------------------------------------------------------------------------------------

    def init(self, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Draw the initial models of all runs and the server's first state."""
        self.task.settle(self.arena.device, dtype)
        starts = {seed: self.task.init(seed) for seed in dict.fromkeys(self.seeds)}
        params: Tree = tree.map(
            lambda leaf: leaf.to(self.arena.device, dtype),
            tree.stack([starts[seed] for seed in self.seeds]),
        )
        server_ctx = self.server_ctx(
            "init", 0, self.everybody, np.ones_like(self.everybody, dtype=bool)
        )
        return params, self.engine.runs(self.method.init_server, params, server_ctx)

    def new_clients(self, params: Tree, cohort: np.ndarray) -> Tree:
        """Make the states of clients that have not trained yet."""
        server_ctx = self.server_ctx("init", 0, cohort, np.ones_like(cohort, dtype=bool))
        found: Tree = self.engine.clients(
            lambda ctx: self.method.init_client(ctx.common, ctx._replace(common={})),
            self.ctx(server_ctx, self.keys("init", 0, cohort), params, {}),
        )
        return found

    def record(self, round_index: int) -> Method:
        """Return the method of a round (or of an evaluation before it): first the warm-up's."""
        warm = self.method.schedule.first
        return self.method if warm is None or round_index >= warm.rounds else warm.method

    def _phases(
        self,
        phases: tuple[Phase, ...],
        work: Tree,
        ctx: ClientContext,
        client_keys: np.ndarray,
        ids: np.ndarray,
        present: np.ndarray,
        run: int,
    ) -> tuple[Tree, Costs]:
        """Run local phases on a block of lanes, and count the samples they touch."""
        zero = np.zeros(ids.shape[0], dtype=np.int64)
        costs = Costs(zero.copy(), zero.copy())
        for phase in phases:
            keys = rng.fold_host(client_keys, phase.stream or phase.name)
            arena = cut_arena(self.arena, run, ids.shape[0])
            if callable(phase.steps):
                steps = np.where(present, self.engine.clients(phase.steps, ctx).cpu().numpy(), 0)
            else:
                steps = self._known_steps(phase, ids, present, run)
            if phase.when is not None:
                takes = self.engine.clients(phase.when, work, ctx).cpu().numpy()
                steps = np.where(takes, steps, 0)
            if not steps.any():  # nobody takes it: no batches, no steps
                work = self.engine.clients(phase.enter, work, ctx)
                work = self.engine.clients(phase.leave, work, ctx)
                continue
            order = np.argsort(steps == 0, axis=1, kind="stable")
            if phase.when is None or (order[:, 1:] > order[:, :-1]).all():
                plan = self._plan(phase, ids, keys, steps, run)
                work, taken = self.engine.phase(phase, work, ctx, plan)
            else:  # those who take it come first, so that no step is computed for the others
                who, there = (np.take_along_axis(v, order, 1) for v in (ids, steps))
                their = np.take_along_axis(keys, order[:, :, None], 1)
                plan = build_plan(phase, arena, who, their, there, self._part_keys(phase, who, run))
                pick, back = (on_device(v, self.arena.device) for v in (order, order.argsort(1)))
                moved, taken = self.engine.phase(
                    phase, reorder(work, pick), reorder_context(ctx, pick), plan
                )
                work = reorder(moved, back)
            samples = plan.samples
            if phase.stop is not None:
                samples = plan.samples_in(np.asarray(taken.cpu()))
            forward, backward = self.engine.calls.get(phase.name, (0, 0))
            costs.backward += backward * samples.sum(1) // phase.draws
            costs.forward += forward * samples.sum(1) // phase.draws
        return work, costs

    def _known_steps(
        self, phase: Phase, ids: np.ndarray, present: np.ndarray, run: int
    ) -> np.ndarray:
        """Count the steps of clients in a phase of known length; those absent take none."""
        split = self.arena.splits["train" if phase.data == "none" else phase.data]
        size = np.take_along_axis(split.size[run : run + len(ids)], ids, 1)
        return np.where(present, num_steps(phase, size), 0)

    def _plan(
        self, phase: Phase, ids: np.ndarray, keys: np.ndarray, steps: np.ndarray, run: int
    ) -> BatchPlan:
        """Draw the batches of a phase, or take them from what was drawn ahead."""
        ready = self._ahead.pop(plan_key(phase, ids, keys, steps, run), None)
        if ready is not None:
            return ready
        arena = cut_arena(self.arena, run, len(ids))
        return build_plan(phase, arena, ids, keys, steps, self._part_keys(phase, ids, run))

    def _part_keys(self, phase: Phase, ids: np.ndarray, run: int) -> np.ndarray | None:
        """Fold the keys of the order that cuts a client's samples into parts.

        It depends on the run's seed alone, so that equal clients are cut alike.
        """
        if phase.part == (0.0, 1.0):
            return None
        base = rng.fold_host(self.base[run : run + len(ids)], "part")
        return np.broadcast_to(base[:, None, :], (*ids.shape, 2))

    # ---- small parts
    # ------------------------------------------------------------------------------------

    def _blank(self) -> Tally:
        shape = (self.arena.num_runs, self.arena.num_clients)
        return Tally(np.full(shape, np.nan), np.full(shape, np.nan))

    def _blocks(
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

    def clock(self, seconds: dict[str, float]) -> Callable[[str], float]:
        """Return a stop-watch.

        Each call books the time since the last one under a name, and returns it. On a GPU it marks
        the moment in the queue of work, and the time is booked by ``read_clocks``.
        """
        last = [time.perf_counter()]

        def stop(name: str) -> float:
            passed = time.perf_counter() - last[0]
            seconds[name] += passed
            last[0] += passed
            return passed

        if self.arena.device.type != "cuda":
            return stop
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
        """Book the times that the device has taken, once it is done: nobody waits before."""
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
