"""Engines: how the functions of a method are applied to all runs and all clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sartor.core.errors import ConfigError, ModelError, did_you_mean
from sartor.core.task import Task
from sartor.engines.context import Context, Engine
from sartor.engines.cuda.graphs import Graphed
from sartor.engines.parts import Arena
from sartor.engines.sequential import Sequential
from sartor.engines.shard.processes import Processes
from sartor.engines.shard.work import Sharded
from sartor.engines.vectorised import Vectorised
from sartor.engines.work import ClientWork, InProcess


def make_engine(name: str, arena: Arena, chunk: int | None, task: Task) -> Engine:
    """Make the engine of a name: "auto", "vectorised" or "sequential"."""
    known = ("auto", "vectorised", "sequential")
    if name not in known:
        raise ConfigError(f"Unknown engine {name!r}{did_you_mean(name, known)}")
    if task.unmapped is not None and name == "vectorised":
        raise ModelError(
            f"This network cannot be mapped over clients ({task.unmapped}); leave engine= out, and "
            "they train one after the other."
        )
    if name == "sequential" or task.unmapped is not None:
        return Sequential(arena, plain=task.unmapped is not None)
    if arena.device.type == "cuda":
        return Graphed(arena, chunk)
    convolves = any(parameter.dim() == 4 for parameter in task.module.parameters())
    return Vectorised(arena, chunk, single=convolves)


def client_work(processes: Processes | None) -> Callable[[Context], ClientWork]:
    """Return what makes the clients' work: here, or divided among processes if there are any."""
    return InProcess if processes is None else partial(Sharded, processes=processes)
