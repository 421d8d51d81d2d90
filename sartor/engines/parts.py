"""The values of a round: what an engine does, what clients are asked to do, what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.method import ClientContext, Method, Phase, ServerContext
from sartor.core.tree import Tree
from sartor.engines.arena import Arena, on_device
from sartor.engines.plan import BatchPlan


class Engine(Protocol):
    """What an engine must do; see `sequential.py` for the plainest one."""

    calls: dict[str, tuple[int, int]]
    lanes: int | None
    limit: int | None
    workers: int

    def tune(self, trial: Any, lanes: int, signature: Any) -> None:
        """Choose the number of lanes a block by measuring, if there is a choice."""

    def timed(self, run: Any) -> tuple[float, float]:
        """Say how long some steps of a trial take: once, and each time."""

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

    def blocks(self, work: Any, blocks: list[Any], into: Any = ()) -> list[Any]:
        """Apply ``work`` to every block of lanes, in order or in parallel.

        What it writes to besides its results, by ``put`` alone, is named in ``into``.
        """

    def phase(
        self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree, Any]:
        """Run a phase on each lane; returns the work and the number of steps taken."""


@dataclass(frozen=True)
class Block:
    """A rectangle of lanes: ``runs`` runs from ``run`` on, ``slots`` slots from ``slot`` on.

    Slots that are not neighbours are listed in ``only``.
    """

    run: int
    runs: int
    slot: int
    slots: int
    only: np.ndarray | None = None

    @property
    def cut(self) -> tuple[slice, Any]:
        """The block as an index of (runs, slots) arrays."""
        columns = slice(self.slot, self.slot + self.slots) if self.only is None else self.only
        return slice(self.run, self.run + self.runs), columns


@dataclass(frozen=True)
class Order:
    """What the clients of an exchange are asked to do; messages and keys come beside it.

    Attributes:
        method: the record.
        stage: what the keys are folded with.
        round_index: the round.
        cohort: (runs, slots) the clients.
        trains: (runs, slots) which of them train.
        present: (runs, slots) which of them report.
        connected: what ``Wire.connected`` returned, with the axis of runs first; None if all
            exchange messages.
    """

    method: Method
    stage: str
    round_index: int
    cohort: np.ndarray
    trains: np.ndarray
    present: np.ndarray
    connected: Any = None


@dataclass
class Costs:
    """Samples in passes with and without a gradient, per run."""

    backward: np.ndarray
    forward: np.ndarray


@dataclass
class Tally:
    """Sums over test samples: (runs, clients), NaN where a client was not scored."""

    correct: np.ndarray
    loss: np.ndarray

    @classmethod
    def blank(cls, shape: tuple[int, ...]) -> Tally:
        """Return a tally in which no client was scored."""
        return cls(np.full(shape, np.nan), np.full(shape, np.nan))

    def put(self, run: np.ndarray, client: np.ndarray, correct: Any, loss: Any) -> None:
        """Put the sums of single clients: number j is that of ``client[j]`` in ``run[j]``."""
        self.correct[run, client] = correct
        self.loss[run, client] = loss


@dataclass
class Receipt:
    """What a round cost, per run, and how long its parts took."""

    participants: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    gradient_evaluations: np.ndarray
    forward_evaluations: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    tally: dict[str, Tally] = field(default_factory=dict)

    @classmethod
    def blank(cls, runs: int) -> Receipt:
        """Return a receipt on which nothing is counted yet."""
        receipt = cls(*np.zeros((5, runs), dtype=np.int64))
        receipt.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0}
        return receipt


def cut_runs(value: Tree, run: int, runs: int) -> Tree:
    """View some runs of a tree."""
    return tree.narrow(value, 0, run, runs)


def cut_context(ctx: ClientContext, block: Block) -> ClientContext:
    """View (or, where slots are listed, copy) the contexts of a block of lanes."""
    by_run = {"common", "round"}
    only = None if block.only is None else on_device(block.only, ctx.index.device)

    def slots(value: Tree) -> Tree:
        if only is None:
            return tree.narrow(value, 1, block.slot, block.slots)
        return tree.map(lambda leaf: leaf.index_select(1, only), value)

    def cut(field: str, value: Any) -> Tree:
        of_runs = cut_runs(value, block.run, block.runs)
        return of_runs if field in by_run else slots(of_runs)

    return ClientContext._make(map(cut, ClientContext._fields, ctx))


def planned(phase: Phase) -> tuple[bool, int]:
    """Rank phases by what they surely cost: first those that no client leaves out or ends."""
    return phase.when is None and phase.stop is None, phase.epochs if phase.steps is None else 1


def reorder(value: Tree, order: Tensor) -> Tree:
    """Put the slots of every run into another order."""
    lane = torch.arange(len(order), device=order.device)[:, None]
    found: Tree = tree.map(lambda leaf: leaf[lane, order], value)
    return found


def reorder_context(ctx: ClientContext, order: Tensor) -> ClientContext:
    """Put the slots of every run of a context into another order."""
    by_run = {"common", "round"}

    def moved(field: str, value: Any) -> Tree:
        return value if field in by_run else reorder(value, order)

    return ClientContext._make(map(moved, ClientContext._fields, ctx))


def cut_arena(arena: Arena, run: int, runs: int) -> Arena:
    """View the arena of some runs."""
    if runs == arena.num_runs:
        return arena
    splits = {
        k: replace(s, start=s.start[run : run + runs], size=s.size[run : run + runs])
        for k, s in arena.splits.items()
    }
    return replace(arena, splits=splits, num_runs=runs)
