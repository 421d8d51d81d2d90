"""Choose the number of lanes a block: time a few steps at several sizes. Nothing is kept."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from sartor.core.method import ClientContext, Phase
from sartor.core.tree import Tree
from sartor.engines.context import Context
from sartor.engines.parts import Block, Lanes, Order, cut_context
from sartor.engines.plan import BatchPlan

_TRIAL_STEPS = 4


def planned(phase: Phase) -> tuple[bool, int]:
    """Rank phases by what they surely cost: first those that no client leaves out or ends."""
    return phase.when is None and phase.stop is None, phase.epochs if phase.steps is None else 1


def tune_lanes(context: Context, order: Order, store: Lanes) -> None:
    """Let the engine time a few steps of the main phase at several block sizes."""
    engine, method, cohort = context.engine, order.method, order.cohort
    phase = max(method.phases, key=planned)
    sizes = context.arena.splits["train"].size

    def steps_of(ids: np.ndarray, run: int) -> int:
        known = replace(phase, steps=None) if callable(phase.steps) else phase
        return int(context.known_steps(known, ids, np.ones_like(ids, dtype=bool), run).sum())

    def prepare(block: Block) -> tuple[Tree, ClientContext, BatchPlan]:
        ids, here = cohort[block.cut], cut_context(order.ctx, block)
        steps = np.where(np.take_along_axis(sizes[block.cut[0]], ids, 1) > 0, _TRIAL_STEPS, 0)
        plan = context.plan(phase, ids, order.keys[block.cut], steps, block.run)
        work = engine.clients(method.begin, store.gather(ids, block.run), here)
        for earlier in method.phases[: method.phases.index(phase)]:
            work = engine.clients(earlier.enter, work, here)
            work = engine.clients(earlier.leave, work, here)
        return work, here, plan

    def timed(one: tuple[Tree, ClientContext, BatchPlan]) -> float:
        began = time.perf_counter()
        engine.phase(phase, *one)
        return time.perf_counter() - began

    def trial(lanes: int) -> float:
        """Predict the seconds of the whole phase in blocks of so many lanes."""
        blocks = context.blocks(method.phases, cohort.shape, lanes)
        ready = [prepare(block) for block in blocks[: engine.workers]]
        passed = max(engine.blocks(timed, ready))
        taken = sum(int(plan.steps.sum()) for _, _, plan in ready)
        # Blocks go to the first core that is free; the last to finish decides.
        cores = [0] * engine.workers
        for block in blocks:
            cores[int(np.argmin(cores))] += steps_of(cohort[block.cut], block.run)
        return passed * len(ready) / max(taken, 1) * max(cores)

    module = context.task.module
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
    # The words of a network say what shapes do not, such as strides.
    network = (type(module), repr(module), shapes, tuple(context.arena.x.shape[1:]))
    engine.tune(trial, cohort.size, (method.name, network, phase.batch, cohort.shape))
