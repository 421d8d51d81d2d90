"""Cells that can train together are lanes of one pass: all their seeds, λ and federations.

A pass is what is finished or not when a reproduction is interrupted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from sartor import methods
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.engines import client_work, make_engine
from sartor.engines.parts import Arena
from sartor.engines.shard import processes
from sartor.reproduce.derived import derive, jittered
from sartor.reproduce.plan import DATA, LOCAL, SETTINGS, Plan
from sartor.reproduce.probes import PROBES
from sartor.reproduce.problems import Problem, make_arena, make_network, make_problems
from sartor.reproduce.records import records_of
from sartor.reproduce.solutions import SOLVERS
from sartor.results.scores import Run
from sartor.training.driver import drive
from sartor.training.progress import Progress
from sartor.training.schema import DTYPES
from sartor.training.settings import with_static_parts
from sartor.training.simulation import Simulation

T = TypeVar("T")

MEMORY = 6e9
"""Bytes that the states of one pass may take; more runs train one pass after the other."""

COPIES = 8  # of a client's parameters: state, work, gradient, momentum, messages, uploads


@dataclass(frozen=True)
class Lane:
    """One run: a cell and a seed, with the hyper-parameters that make it differ from others.

    Rows share their runs where they differ only in the point at which they are scored, or in what
    clients do to their models before use: ``later`` holds the rows of the latter, each beside its
    options.
    """

    rows: tuple[str, ...]
    column: str
    seed: int
    hyper: dict[str, Any]
    data: dict[str, Any]
    later: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def place(self) -> dict[str, Any]:
        """Rows, column and seed, as they are stored."""
        return self.placed(self.rows)

    def placed(self, rows: Sequence[str]) -> dict[str, Any]:
        """Return some rows, the column and the seed, as they are stored."""
        return {"rows": list(rows), "column": self.column, "seed": self.seed}

    @property
    def all_rows(self) -> tuple[str, ...]:
        """All rows that use this run."""
        return (*self.rows, *(row for row, _ in self.later))


@dataclass(frozen=True)
class Pass:
    """Lanes that share everything but seed, federation and hyper-parameters."""

    method: str
    options: dict[str, Any]
    settings: dict[str, Any]
    lanes: tuple[Lane, ...]

    @property
    def words(self) -> str:
        """What is trained, in a few words."""
        rows = list(dict.fromkeys(row for lane in self.lanes for row in lane.all_rows))
        columns = list(dict.fromkeys(lane.column for lane in self.lanes))
        head = rows[0] if len(rows) == 1 else f"{self.method} ({len(rows)} rows)"
        tail = columns[0] if len(columns) == 1 else f"{len(columns)} columns"
        return f"{head}, {tail}, {len(self.lanes)} run{'s' * (len(self.lanes) > 1)}"

    @property
    def key(self) -> str:
        """A name that changes with anything that changes the numbers.

        Settings at their defaults do not count, so a new setting keeps what was run before it.
        """
        content = {
            "method": self.method,
            "options": self.options,
            "settings": _given(self.settings),
            "lanes": [
                {**lane.place, "hyper": lane.hyper, "data": _given(lane.data)}
                | ({"later": lane.later} if lane.later else {})
                for lane in self.lanes
            ],
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value != SETTINGS.get(key)}


def passes_of(plan: Plan) -> list[Pass]:
    """Group the cells of a plan; lanes that see the same batches are neighbours."""
    groups: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[Lane]]] = {}
    shape = ("data", "clients", "dim", "everyone", "samples_per_client")
    for row, column, settings in plan.cells():
        exact = settings["solve"] != "train"
        static = {} if exact else methods.static_options(methods.find(row.method))
        options = {k: v for k, v in row.set.items() if k in static}
        hyper = {k: v for k, v in row.set.items() if k not in static}
        hyper |= {k: column.values.get(v, v) for k, v in hyper.items() if isinstance(v, str)}
        data = {k: settings[k] for k in DATA}
        apart = {k: v for k, v in settings.items() if k not in DATA or k in shape}
        method = "exact" if exact else row.method
        named = [] if exact else sorted(hyper)
        key = json.dumps([method, options, apart, named], sort_keys=True, default=str)
        lanes = groups.setdefault(key, (method, options, settings, []))[3]
        rows, later = ((), ((row.name, row.then),)) if row.then else ((row.name,), ())
        first = settings["first_seed"]
        for seed in range(first, first + settings["seeds"]):
            own = jittered(hyper, settings["jitter"], seed)
            lanes.append(Lane(rows, column.name, seed, own, data, later))
    return [
        Pass(method, options, settings, _shared(lanes))
        for method, options, settings, lanes in groups.values()
    ]


def _shared(lanes: list[Lane]) -> tuple[Lane, ...]:
    """Train once what several rows use; lanes of one seed stay in order."""
    found: dict[str, Lane] = {}
    for lane in lanes:
        key = json.dumps([lane.column, lane.seed, lane.hyper, lane.data], sort_keys=True)
        known = found.get(key)
        if known is not None:
            lane = replace(known, rows=known.rows + lane.rows, later=known.later + lane.later)
        found[key] = lane
    return tuple(sorted(found.values(), key=lambda lane: lane.seed))


def run_pass(
    one: Pass, device: torch.device, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train a pass; return the record of every lane with its rows, column and seed."""
    problems = make_problems([(lane.data, lane.seed) for lane in one.lanes])
    if one.settings["solve"] != "train":
        solve = _known(one.settings["solve"], SOLVERS, "solve")
        found = solve([lane.hyper for lane in one.lanes], problems)
        pairs = zip(one.lanes, found, strict=True)
        return [{**lane.place, "record": record} for lane, record in pairs]
    both = zip(one.lanes, problems, strict=True)
    lanes = [replace(lane, hyper=derive(lane.hyper, problem)) for lane, problem in both]
    most = one.settings["runs_at_once"] or _at_once(one.settings, problems[0])
    entries = []
    for start in range(0, len(lanes), most):
        part = slice(start, start + most)
        entries += _train(one, lanes[part], problems[part], device, progress)
    return entries


def _at_once(settings: dict[str, Any], problem: Problem) -> int:
    """Return how many runs fit into :data:`MEMORY`."""
    params = make_network(settings, problem.federation).num_trained
    return max(1, int(MEMORY / (4 * params * problem.federation.num_clients * COPIES)))


def _train(
    one: Pass,
    lanes: Sequence[Lane],
    problems: Sequence[Problem],
    device: torch.device,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    settings, device = one.settings, processes.device_for(device)
    federations = [problem.federation for problem in problems]
    task = make_network(settings, federations[0])
    arena = make_arena(federations, device, DTYPES[settings["dtype"]], settings["everyone"])

    def simulate(then: Mapping[str, Any]) -> Simulation:
        return _simulation(one, lanes, federations, task, arena, then)

    simulation = simulate({})
    variants = {json.dumps(then, sort_keys=True): then for lane in lanes for _, then in lane.later}
    later = {name: simulate(then) for name, then in variants.items()}
    probes = [_known(name, PROBES, "probes")(simulation, problems) for name in settings["probes"]]
    seen: dict[str, list[tuple[int, np.ndarray]]] = {}  # by name: (round, one value per run)

    def after_round() -> None:
        for follower in later.values():
            follower.follow(simulation)
        t = simulation.round_index
        if t == simulation.num_rounds or t % simulation.eval_every == 0:
            for name, value in (pair for probe in probes for pair in probe().items()):
                seen.setdefault(name, []).append((t, np.asarray(value)))

    after_round()  # what there is before the first round
    drive(simulation, progress=progress, title=one.words, after_round=after_round)
    records = records_of(simulation, seen)
    entries = [
        {**lane.place, "record": record} for lane, record in zip(lanes, records, strict=True)
    ]
    for name, follower in later.items():
        for lane, base, record in zip(lanes, records, records_of(follower, {}), strict=True):
            rows = [row for row, then in lane.later if json.dumps(then, sort_keys=True) == name]
            both = {kind: {**base[kind], **record[kind]} for kind in ("points", "clients")}
            entries.append({**lane.placed(rows), "record": {**record, **both}})
    return [entry for entry in entries if entry["rows"]]


def _simulation(
    one: Pass,
    lanes: Sequence[Lane],
    federations: list[Federation],
    task: Task,
    arena: Arena,
    then: Mapping[str, Any],
) -> Simulation:
    """Make the simulation of a pass, with what clients do to their models before use."""
    settings = one.settings
    static = methods.static_options(methods.find(one.method))
    options = {**one.options, **{k: v for k, v in then.items() if k in static}}
    extra = {k: v for k, v in then.items() if k not in static}
    values = {key: settings[key] for key in LOCAL}
    values["batch"] = values["batch"] or None
    shared: dict[str, list[Any]] = {}
    for name, value in (pair for lane in lanes for pair in lane.hyper.items()):
        shared.setdefault(name, []).append(value)
    local = with_static_parts(Local(**values), {}, shared)
    record = methods.build(one.method, task, local, options)
    defaults = {name: spec.default for name, spec in record.hyper.items()}
    runs = [Run(lane.seed, {**defaults, **lane.hyper, **extra}, options) for lane in lanes]
    points = tuple(dict.fromkeys((*settings["points"], record.use.headline)))
    if record.use.centre is None or then:  # with ``then``, it is that of the training itself
        points = tuple(point for point in points if point != "global")
    return Simulation(
        record,
        task,
        federations,
        runs,
        lambda arena: make_engine("auto", arena, settings["chunk"], task),
        rounds=settings["rounds"],
        participation=Participation.parse(settings["participation"]),
        device=arena.device,
        dtype=DTYPES[settings["dtype"]],
        eval_every=settings["eval_every"],
        points=points,
        eval_start=settings["eval_every"] < settings["rounds"],
        arena=arena,
        clients=client_work(processes.current()),
    )


def _known(name: str, among: Mapping[str, T], key: str) -> T:
    """Return what a setting of a plan names."""
    if name not in among:
        raise ConfigError(f"{key} of a plan: there is no {name!r}{did_you_mean(name, among)}")
    return among[name]
