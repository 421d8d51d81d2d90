"""Tiny federations, networks and drivers for the tests of the core: float64 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.hyper import Value
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task, given, never
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.data.synthetic import Quadratic, quadratics
from sartor.engines import client_work
from sartor.engines.sequential import Sequential
from sartor.engines.shard.processes import Processes
from sartor.engines.vectorised import Vectorised
from sartor.methods import build
from sartor.models import mclr
from sartor.results.scores import COUNTERS, ONCE, Run
from sartor.training.simulation import Simulation

CPU = torch.device("cpu")
SIZES = (2, 7, 4, 9, 5)
Q3 = ([1.0, 2.0, 4.0], [0.0, 3.0, 6.0])
"""The three quadratics of the method sheets: curvatures and centres."""


class Net(nn.Module):
    """A body of one layer and a head."""

    head = "fc"

    def __init__(self, inputs: int = 4, hidden: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.tanh(self.body(x)))
        return found


class Frozen(Net):
    """The toy network after a frozen layer and a constant."""

    pretrained = True
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.before(x)) * self.scale)


class Noisy(nn.Module):
    """A network as users bring them: BatchNorm, and dropout in two forms."""

    head = "fc"

    def __init__(self, norm: bool = True, drop: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.share = drop / 2
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.body(x))))
        found: Tensor = self.fc(nn.functional.dropout(x, self.share, self.training))
        return found


class Parabola(Quadratic):
    """A quadratic whose output is its loss, as `sartor.fit` must know."""

    criterion = "given"


def federation(
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
    val: int = 2,
    test: int = 5,
    shape: tuple[int, ...] = (4,),
    classes: int = 3,
    data: tuple[Tensor, Tensor] | None = None,
) -> Federation:
    """Make unequal clients; a seed is an allocation of the samples (of ``data``, if given)."""
    draw = np.random.default_rng([7, seed])
    each = np.asarray(sizes) + val + test
    if data is None:
        x = torch.from_numpy(draw.normal(size=(each.sum(), *shape)))
        y = torch.from_numpy(draw.integers(0, classes, each.sum()))
    else:
        x, y = data
    order = draw.permutation(len(x))[: each.sum()]
    lists = np.split(order, np.cumsum(each)[:-1])
    cut = [np.split(rows, [n, n + val]) for rows, n in zip(lists, sizes, strict=True)]
    train, held, tested = (Ragged.from_lists([c[k] for c in cut]) for k in range(3))
    names = tuple(f"c{i}" for i in range(len(sizes)))
    return Federation(x, y, train, held, tested, names, classes, {"seed": seed})


def two_allocations() -> list[Federation]:
    """Two allocations of one set of samples to five unequal clients."""
    first = federation(0)
    return [first, federation(1, sizes=(5, 3, 8, 4, 7), data=(first.x, first.y))]


def net_task(compute: torch.dtype | None = None) -> Task:
    """Wrap the small network."""
    return Task(Net(), head="fc", compute=compute)


def linear_task() -> Task:
    """Wrap a linear model for the same samples."""
    return Task(mclr(input_shape=(4,), num_classes=3), head="fc")


def quadratic_task(dim: int = 1) -> Task:
    """Wrap a quadratic, whose output is its loss."""
    return Task(Quadratic(dim), None, given, never)


def simulation(
    method: Method,
    task: Task,
    federations: Sequence[Federation],
    *,
    hyper: Mapping[str, Value] | Sequence[Mapping[str, Value]] = (),
    seeds: Sequence[int] | None = None,
    engine: str | type[Vectorised] = "vectorised",
    chunk: int | None = None,
    rounds: int = 3,
    participation: str | float = "at_least:0.6",
    dtype: torch.dtype = torch.float64,
    eval_every: int = 1,
    points: tuple[str, ...] = ("pre", "post"),
    eval_start: bool = True,
    folder: Path | None = None,
    processes: Processes | None = None,
) -> Simulation:
    """Make a simulation that has not begun: one run per federation."""
    num = len(federations)
    hypers: list[Any] = (
        [dict(hyper)] * num if isinstance(hyper, Mapping) else list(hyper) or [{}] * num
    )
    runs = [
        Run(seed=seed, hyper=dict(h))
        for seed, h in zip(seeds if seeds is not None else range(num), hypers, strict=True)
    ]

    def make(arena: Any) -> Any:
        # A fixed number of lanes a block, so that nothing depends on measured times.
        if engine == "sequential":
            return Sequential(arena)
        kind = Vectorised if isinstance(engine, str) else engine
        return kind(arena, chunk or 1 << 20)

    return Simulation(
        method,
        task,
        list(federations),
        runs,
        make,
        rounds=rounds,
        participation=Participation.parse(participation),
        device=CPU,
        dtype=dtype,
        eval_every=eval_every,
        points=points,
        eval_start=eval_start,
        store_folder=folder,
        clients=client_work(processes),
    )


def run(sim: Simulation) -> Simulation:
    """Run all rounds that are left."""
    while not sim.finished:
        sim.step()
    return sim


def states(sim: Simulation) -> dict[str, np.ndarray]:
    """Return everything that training leaves behind: server, all clients, trained models."""
    found = {f"server/{k}": v for k, v in tree.items(sim.server)}
    everybody = sim.context.everybody
    found |= {f"client/{k}": v for k, v in tree.items(sim.store.gather(everybody))}
    if sim.trained is not None:
        found |= {f"trained/{k}": v for k, v in tree.items(sim.trained.gather(everybody))}
    return {k: v.detach().numpy().copy() for k, v in found.items()}


def outcome(sim: Simulation) -> dict[str, np.ndarray]:
    """Return the states and everything that was measured."""
    found = states(sim)
    for (point, split), scores in sim.scores().items():
        found |= {f"{point}/{split}/correct": scores.correct, f"{point}/{split}/loss": scores.loss}
    ledger = sim.ledger()
    found |= {name: getattr(ledger, name) for name in (*COUNTERS, *ONCE)}
    for k, snap in enumerate(sim.log.snapshots):
        found |= {f"snap/{k}/{name}": np.asarray(v) for name, v in snap.items()}
    return found


def assert_same(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], atol: float = 0.0
) -> None:
    """Check two outcomes leaf by leaf; the default tolerance is none.

    Numbers above 1 may differ by ``atol`` of themselves: a sum of losses can be 10⁵.
    """
    assert sorted(found) == sorted(wanted)
    for name in wanted:
        np.testing.assert_allclose(
            found[name], wanted[name], rtol=atol, atol=atol, err_msg=name, equal_nan=True
        )


def differ(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], least: float = 1e-9) -> bool:
    """Say whether two outcomes differ somewhere by more than rounding."""
    return any(
        a[k].shape != b[k].shape or float(np.max(np.abs(a[k] - b[k]), initial=0.0)) > least
        for k in a
    )


def q3(
    name: str,
    local: Local,
    *,
    options: Mapping[str, Any] | None = None,
    hyper: Mapping[str, Value] | None = None,
    rounds: int = 1,
    curvatures: Sequence[float] = Q3[0],
    centres: Sequence[float] = Q3[1],
    samples: int | Sequence[int] = 1,
    start: float = 0.0,
    participation: str | float = 1.0,
    engine: str = "vectorised",
) -> Simulation:
    """Run a method on quadratics (the three of the sheets by default), from ``start``."""
    fed, _ = quadratics(curvatures, centres, samples=samples)
    module = Quadratic()
    with torch.no_grad():
        module.w.fill_(start)
    task = Task(module, None, given, never)
    method = build(name, task, local, dict(options or {}))
    sim = simulation(
        method,
        task,
        [fed],
        hyper=hyper or {},
        rounds=rounds,
        participation=participation,
        engine=engine,
        eval_every=rounds,
        points=("pre",),
    )
    return run(sim)


def personal(sim: Simulation) -> np.ndarray:
    """Return the clients' kept scalars w_i of a run on quadratics."""
    found: np.ndarray = sim.store.gather(sim.context.everybody)["params"]["w"][0, :, 0].numpy()
    return found


def centre(sim: Simulation) -> float:
    """Return the server's scalar w_g of a run on quadratics."""
    return float(sim.server["params"]["w"][0, 0])


def used(sim: Simulation) -> np.ndarray:
    """Return the scalar that each client would use now."""
    return np.array([float(sim.params(i)["w"][0]) for i in range(sim.context.arena.num_clients)])
