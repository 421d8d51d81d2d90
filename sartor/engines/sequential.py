"""The reference engine: a loop over runs and clients, no vmap. Slow, plain, trusted.

It is also the engine of networks that cannot be mapped over clients. Then gradients are those of
plain autograd, which follows whatever a network does: branches on data, ``.item()``, functions with
gradients of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch

from sartor.core import tree
from sartor.core.method import ClientContext, Phase, ServerContext
from sartor.core.task import alone, metered
from sartor.core.tree import Tree
from sartor.engines.parts import BY_RUN, Arena
from sartor.engines.plan import BatchPlan


def _at(value: Any, *index: int) -> Any:
    if isinstance(value, ServerContext):
        return ServerContext(*(_at(field, *index) for field in value))
    return tree.map(lambda leaf: leaf[index], value)


def _context_at(ctx: ClientContext, r: int, k: int) -> ClientContext:
    """Take the context of slot k of run r; the common message and the rounds belong to the run."""
    run = {name: _at(getattr(ctx, name), r) for name in BY_RUN}
    return ClientContext(
        **{f: run[f] if f in run else _at(getattr(ctx, f), r, k) for f in ClientContext._fields}
    )


class Sequential:
    """One client at a time; ``plain`` takes gradients by autograd, not by ``torch.func``."""

    def __init__(self, arena: Arena, plain: bool = False) -> None:
        self.arena = arena
        self.around = alone if plain else nullcontext
        self.lanes: int | None = None
        self.limit: int | None = None
        self.workers = 1
        self.calls: dict[str, tuple[int, int]] = {}

    def chunk(self, phases: tuple[Phase, ...]) -> int:
        """Take any number of lanes: they are worked one by one anyway."""
        return self.limit or 1 << 30

    def spare(self, lanes: int) -> None:
        """Make blocks smaller, so that fewer outcomes are stacked at a time."""
        self.limit = min(lanes, self.limit or lanes)

    def tune(self, trial: Callable[[int], float], lanes: int, signature: Hashable) -> None:
        """Do nothing: there is no choice."""

    def runs(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a server function to each run; its arguments have the runs on axis 0."""
        runs = range(len(args[-1].round))
        return tree.stack([fn(*(_at(a, r) for a in args)) for r in runs])

    def addresses(
        self, fn: Callable[..., Any], server: Tree, cohort: torch.Tensor, server_ctx: ServerContext
    ) -> Any:
        """Write the message to each client of the cohort: (runs, slots, ...)."""

        def of_run(server: Tree, cohort: torch.Tensor, server_ctx: ServerContext) -> Any:
            return tree.stack([fn(server, i, server_ctx) for i in cohort])

        return self.runs(of_run, server, cohort, server_ctx)

    def clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the ctx."""
        *trees, ctx = args
        runs, slots = (range(length) for length in ctx.index.shape)

        def of_lane(r: int, k: int) -> Any:
            return fn(*(_at(t, r, k) for t in trees), _context_at(ctx, r, k))

        return tree.stack([tree.stack([of_lane(r, k) for k in slots]) for r in runs])

    def blocks(self, work: Callable[[Any], Any], blocks: list[Any]) -> list[Any]:
        """Apply ``work`` to every block of lanes, one after the other."""
        return [work(block) for block in blocks]

    def phase(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Any]:
        """Run a phase on each lane; returns the work and the number of steps each lane took."""
        rows, taken = [], torch.zeros(plan.steps.shape, dtype=torch.int64)
        for r in range(plan.steps.shape[0]):
            slots = []
            for k in range(plan.steps.shape[1]):
                here = _context_at(ctx, r, k)
                one = phase.enter(_at(work, r, k), here)
                for s in range(int(plan.steps[r, k])):
                    batch = plan.batches(self.arena, plan.table[r, k, s % plan.table.shape[2]])
                    with self.around(), metered() as calls:
                        one = phase.step(one, batch, here._replace(key=plan.keys[r, k, s]))
                    self.calls[phase.name] = calls()
                    taken[r, k] += 1
                    if phase.stop is not None and bool(phase.stop(one, here)):
                        break
                slots.append(phase.leave(one, here))
            rows.append(tree.stack(slots))
        return tree.stack(rows), taken
