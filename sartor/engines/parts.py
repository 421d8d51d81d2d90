"""The values of a round: what an engine does, what clients are asked to do, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
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

    def blocks(self, work: Any, blocks: list[Any]) -> list[Any]:
        """Apply ``work`` to every block of lanes, in order or in parallel."""

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


# ---- when memory runs out: work on a block in halves, and make later blocks smaller

B = TypeVar("B")
T = TypeVar("T")
Halves = tuple[list[B], int, int]
"""The halves of a block, the axis along which it was cut, and the lanes of the larger half."""


def sparing(
    engine: Engine,
    work: Callable[[B], T],
    halves: Callable[[B], Halves[B] | None],
    joined: Callable[[list[T], int], T],
) -> Callable[[B], T]:
    """Return ``work``, made to do a block in halves if there is no memory for it at once.

    A block writes to stores and tallies at its end, or in a way that can be repeated, so that half
    of a block can start where the whole one failed.

    Args:
        engine: makes its blocks smaller from then on.
        work: what is done to a block.
        halves: cuts a block, or returns None if it is a single lane.
        joined: puts what came of the halves together, along an axis.
    """

    @wraps(work)
    def careful(block: B) -> T:
        try:
            return work(block)
        except torch.OutOfMemoryError as error:
            said = str(error).splitlines()[0]
        # The error held on to the memory of the attempt; it is gone here.
        split = halves(block)
        if split is None:
            raise ConfigError(
                f"The work of a single client does not fit into memory ({said}); use a smaller "
                "batch, a smaller network, or more memory."
            )
        parts, axis, lanes = split
        engine.spare(lanes)
        return joined([careful(part) for part in parts], axis)

    return careful


def halved_block(block: Block) -> Halves[Block] | None:
    """Cut the slots of a block in two, or its runs if it has one slot."""
    if block.slots > 1:
        less = block.slots // 2
        rest = block.slots - less
        if block.only is not None:
            sides = [block.only[:rest], block.only[rest:]]
            parts = [Block(block.run, block.runs, block.slot, len(s), s) for s in sides]
        else:
            parts = [
                Block(block.run, block.runs, block.slot, rest),
                Block(block.run, block.runs, block.slot + rest, less),
            ]
        return parts, 1, block.runs * rest
    if block.runs > 1:
        rest = block.runs - block.runs // 2
        parts = [
            Block(block.run, rest, block.slot, 1, block.only),
            Block(block.run + rest, block.runs - rest, block.slot, 1, block.only),
        ]
        return parts, 0, rest
    return None


def joined_work(done: list[Any], axis: int) -> Any:
    """Put the uploads, costs and times of the halves of a block together."""
    uploads, costs, seconds = zip(*done, strict=True)
    times = seconds[0]
    if seconds[1] is not times:  # on a GPU all blocks share one clock
        times = {name: times[name] + seconds[1][name] for name in times}
    return tree.cat(list(uploads), axis), joined_costs(list(costs), axis), times


def joined_costs(costs: list[Costs], axis: int) -> Costs:
    """Add the costs of other slots, or put those of other runs behind one another."""
    put: Any = np.concatenate if axis == 0 else np.sum
    settings = {} if axis == 0 else {"axis": 0}
    return Costs(
        put([c.backward for c in costs], **settings), put([c.forward for c in costs], **settings)
    )


def halved_clients(block: tuple[int, np.ndarray]) -> Halves[tuple[int, np.ndarray]] | None:
    """Cut the ids (runs, n) of an evaluation in two."""
    run, ids = block
    runs, slots = ids.shape
    if slots > 1:
        rest = slots - slots // 2
        return [(run, ids[:, :rest]), (run, ids[:, rest:])], 1, runs * rest
    if runs > 1:
        rest = runs - runs // 2
        return [(run, ids[:rest]), (run + rest, ids[rest:])], 0, rest
    return None


def joined_scores(done: list[Any], axis: int) -> Any:
    """Put the costs and the messages' bytes of the halves of an evaluation together."""
    costs, messages = zip(*done, strict=True)
    total = np.concatenate(messages) if axis == 0 else np.sum(messages, axis=0)
    return joined_costs(list(costs), axis), total
