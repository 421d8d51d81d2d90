"""The CUDA engine, as far as it can be tried without a GPU: which widths, and which order."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core import tree
from sartor.core.local import Local
from sartor.core.method import ClientContext, Phase
from sartor.core.task import metered
from sartor.core.tree import Tree
from sartor.engines.cuda.graphs import Graphed, few_widths
from sartor.engines.plan import BatchPlan
from sartor.engines.vectorised import Vectorised, over_lanes
from sartor.methods import build
from tests.toys import assert_same, net_task, outcome, run, simulation, two_allocations


def _waste(schedule: list[int], widths: list[int]) -> int:
    return sum(min(w for w in widths if w >= need) - need for need in schedule)


@given(
    schedule=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    most=st.integers(1, 4),
)
def test_widths_waste_least(schedule: list[int], most: int) -> None:
    widths = few_widths(schedule, 9, most)
    assert len(widths) <= max(most, 1)
    assert widths == sorted(set(widths))
    assert widths[-1] == 9
    all_choices = itertools.combinations(range(1, 9), min(most - 1, 8))
    best = min(_waste([*schedule, 9], [*choice, 9]) for choice in all_choices)
    assert _waste(schedule, widths) == best


def test_many_widths_stay_few_and_close() -> None:
    steps = np.sort(np.random.default_rng(0).lognormal(3, 1, 2000).astype(int) + 1)[::-1]
    schedule = [int((steps > s).sum()) for s in range(steps.max())]
    widths = few_widths(schedule, 2000)
    assert len(widths) <= 40
    assert _waste(schedule, widths) < 0.05 * sum(schedule)


class _OneRun(Graphed):
    """Puts all runs into one, as the CUDA engine does, and takes the steps on the CPU."""

    def __init__(self, arena: Any, chunk: int | None = None) -> None:
        Vectorised.__init__(self, arena, chunk)
        self.shapes: list[tuple[int, ...]] = []

    runs = Vectorised.runs
    addresses = Vectorised.addresses
    clients = Vectorised.clients

    def _steps(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan, dims: ClientContext
    ) -> Any:
        self.shapes.append(plan.steps.shape)
        assert (np.diff(plan.steps[0]) <= 0).all()
        steps = torch.from_numpy(plan.steps)
        step = over_lanes(phase.step, dims=dims)
        for s in range(plan.num_steps):
            batch = plan.batches(self.arena, plan.table[:, :, s % plan.table.shape[2]])
            with metered() as calls:
                new = step(work, batch, ctx._replace(key=plan.keys[:, :, s]))
            self.calls[phase.name] = calls()
            work = tree.where(s < steps, new, work)
        return work, steps


@pytest.mark.parametrize("name", ["fedprox", "fedapa", "apfl"])
def test_all_runs_as_one(name: str) -> None:
    """Common messages are read in the steps of FedProx; runs differ in data, seed and cohort."""
    task = net_task()
    method = build(name, task, Local(epochs=2, batch=3, lr=0.1, momentum=0.5), {})
    settings: dict[str, Any] = {"participation": "at_least:0.6"}
    plain = run(simulation(method, task, two_allocations(), engine=Vectorised, **settings))
    other: Any = simulation(method, task, two_allocations(), engine=_OneRun, **settings)
    found = run(other)
    assert_same(outcome(found), outcome(plain), 1e-12)  # compiled losses add up in another order
    assert {shape[0] for shape in other.engine.shapes} == {1}
