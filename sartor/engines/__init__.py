"""Engines: how the functions of a method are applied to all runs and all clients."""

from __future__ import annotations

from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.task import Task
from sartor.engines.arena import Arena
from sartor.engines.cuda.graphs import Graphed
from sartor.engines.parts import Engine
from sartor.engines.sequential import Sequential
from sartor.engines.vectorised import Vectorised


def make_engine(name: str, arena: Arena, chunk: int | None, task: Task) -> Engine:
    """Make the engine of a name: "auto", "vectorised" or "sequential"."""
    known = ("auto", "vectorised", "sequential")
    if name not in known:
        raise ConfigError(f"Unknown engine {name!r}{did_you_mean(name, known)}")
    if name == "sequential":
        return Sequential(arena)
    if arena.device.type == "cuda":
        return Graphed(arena, chunk)
    convolves = any(parameter.dim() == 4 for parameter in task.module.parameters())
    return Vectorised(arena, chunk, single=convolves)
