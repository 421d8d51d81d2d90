"""The reference engine: a loop over runs and clients, no vmap. Slow, plain, trusted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from sartor.core import tree
from sartor.core.method import Hub, Phase, Site
from sartor.core.task import metered
from sartor.core.tree import Tree
from sartor.engines.arena import Arena
from sartor.engines.plan import Plan


def _at(value: Any, *index: int) -> Any:
    return tree.map(lambda leaf: leaf[index], value)


def _site_at(site: Site, r: int, k: int) -> Site:
    """Take the site of slot k of run r; the common letter and the round belong to the run."""
    run = {"common": _at(site.common, r), "round": site.round[r]}
    return Site(**{f: run[f] if f in run else _at(getattr(site, f), r, k) for f in Site._fields})


class Sequential:
    """One client at a time."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
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
        """Have nothing to choose."""

    def timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Have nothing to time."""
        return 0.0, 0.0

    def runs(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a server function to each run: trees and the hub, all with the runs on axis 0."""
        found = []
        for r in range(len(args[-1].round)):
            found.append(
                fn(
                    *(
                        Hub(*(_at(f, r) for f in a)) if isinstance(a, Hub) else _at(a, r)
                        for a in args
                    )
                )
            )
        return tree.stack(found)

    def addresses(
        self, fn: Callable[..., Any], server: Tree, cohort: torch.Tensor, hub: Hub
    ) -> Any:
        """Write the letter to each client of the cohort: (runs, slots, ...)."""
        found = []
        for r in range(cohort.shape[0]):
            one = Hub(*(_at(f, r) for f in hub))
            letters = [fn(_at(server, r), i, one) for i in cohort[r]]
            found.append(tree.stack(letters))
        return tree.stack(found)

    def clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the site."""
        *trees, site = args
        rows = []
        for r in range(site.index.shape[0]):
            slots = range(site.index.shape[1])
            rows.append(
                tree.stack(
                    [fn(*(_at(t, r, k) for t in trees), _site_at(site, r, k)) for k in slots]
                )
            )
        return tree.stack(rows)

    def blocks(self, work: Callable[[Any], Any], blocks: list[Any], into: Any = ()) -> list[Any]:
        """Apply ``work`` to every block of lanes, one after the other."""
        return [work(block) for block in blocks]

    def phase(self, phase: Phase, work: Tree, site: Site, plan: Plan) -> tuple[Tree, Any]:
        """Run a phase on each lane; returns the work and the number of steps each lane took."""
        rows, taken = [], torch.zeros(plan.steps.shape, dtype=torch.int64)
        for r in range(plan.steps.shape[0]):
            slots = []
            for k in range(plan.steps.shape[1]):
                here = _site_at(site, r, k)
                one = phase.enter(_at(work, r, k), here)
                for s in range(int(plan.steps[r, k])):
                    batch = plan.batches(self.arena, plan.table[r, k, s % plan.table.shape[2]])
                    with metered() as calls:
                        one = phase.step(one, batch, here._replace(key=plan.keys[r, k, s]))
                    self.calls[phase.name] = calls()
                    taken[r, k] += 1
                    if phase.stop is not None and bool(phase.stop(one, here)):
                        break
                slots.append(phase.leave(one, here))
            rows.append(tree.stack(slots))
        return tree.stack(rows), taken
