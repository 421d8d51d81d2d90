"""What a round is made of: data, blocks of lanes, kept states, orders, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.method import ClientContext, Method
from sartor.core.tree import Tree

# ---- the data of all runs on one device: a batch for all lanes is one gather


@dataclass(frozen=True)
class Split:
    """The index lists of one split.

    Attributes:
        rows: (total,) numbers of samples, on the device.
        start: (runs, clients) where a client's list starts in ``rows``, on the host.
        size: (runs, clients) how long it is, on the host.
        capacity: the longest list of all.
    """

    rows: Tensor
    start: np.ndarray
    size: np.ndarray
    capacity: int


@dataclass(frozen=True)
class Arena:
    """Features, labels and splits of all runs.

    Attributes:
        x: (rows, ...) features, or their codes; read them by ``features``.
        y: (samples, ...) labels.
        splits: the index lists of every split.
        num_runs: the number of runs.
        num_clients: the number of clients of each.
        device: where all that is.
        row: (samples,) where the features of a sample are in ``x``; None if sample and row are the
            same number, as they are unless runs differ in their labels alone.
        palette: the values that codes stand for; None if ``x`` holds the features themselves.
    """

    x: Tensor
    y: Tensor
    splits: dict[str, Split]
    num_runs: int
    num_clients: int
    device: torch.device
    row: Tensor | None = None
    palette: Tensor | None = None

    def features(self, rows: Tensor) -> Tensor:
        """Gather the features of some rows of ``x``."""
        found = self.x.index_select(0, rows)
        return found if self.palette is None else self.palette[found.int()]


def on_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return an array of the host as a tensor on a device."""
    held = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or held.device.type != "cpu":
        return held.to(device)
    # A copy from ordinary memory to a GPU waits until all work in its queue is done; one from
    # pinned memory takes its place in the queue, and the host continues.
    return held.pin_memory().to(device, non_blocking=True)


def cut_arena(arena: Arena, run: int, runs: int) -> Arena:
    """View the arena of some runs."""
    if runs == arena.num_runs:
        return arena
    cut = slice(run, run + runs)
    splits = {k: replace(s, start=s.start[cut], size=s.size[cut]) for k, s in arena.splits.items()}
    return replace(arena, splits=splits, num_runs=runs)


# ---- kept states


class Lanes(Protocol):
    """Kept states that clients read when they work, and write when they are done."""

    def gather(self, cohort: np.ndarray, run: int = 0) -> Tree:
        """Return the states of a cohort of the runs ``run, run+1, ...``: (runs, slots, ...)."""

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Put the states of the present members of a cohort back."""


class States(Lanes, Protocol):
    """The kept states of all clients, wherever they are: one tree per client and run."""

    def fork(self) -> States:
        """Return states that begin as these; writing to them changes only the copy."""

    def dump(self) -> Tree:
        """Return what a checkpoint must hold."""

    def load(self, state: Tree) -> None:
        """Restore a checkpoint."""


# ---- orders and costs


Which = np.ndarray | None
"""Marks of lanes, (runs, slots); None marks all."""


@dataclass(frozen=True)
class Group:
    """Clients that work at once, (runs, slots), in the runs ``run, run+1, ...``.

    Attributes:
        run: the first run.
        ids: which clients.
        present: which of them take part.
        ctx: what they read, their messages included.
        keys: (runs, slots, 2) on the host.
    """

    run: int
    ids: np.ndarray
    present: np.ndarray
    ctx: ClientContext
    keys: np.ndarray


@dataclass(frozen=True)
class Order:
    """What the clients of an exchange are asked to do.

    Attributes:
        method: the record.
        stage: what the keys are folded with.
        round_index: the round.
        cohort: (runs, slots) the clients.
        trains: (runs, slots) which of them train.
        present: (runs, slots) which of them report.
        ctx: what they read, their messages included: (runs, slots, ...).
        keys: (runs, slots, 2) on the host.
        connected: what ``Wire.connected`` returned, with the axis of runs first; None if all
            exchange messages.
    """

    method: Method
    stage: str
    round_index: int
    cohort: np.ndarray
    trains: np.ndarray
    present: np.ndarray
    ctx: ClientContext
    keys: np.ndarray
    connected: Any = None

    def group(self, block: Block) -> Group:
        """Return the clients of a block of lanes, of whom some train."""
        ids, trains, keys = (v[block.cut] for v in (self.cohort, self.trains, self.keys))
        return Group(block.run, ids, trains, cut_context(self.ctx, block), keys)


@dataclass
class Tally:
    """Scores of clients: (runs, clients), NaN where a client was not scored.

    Attributes:
        correct: right answers.
        loss: the sum of the losses.
        measured: the task's measure, if it has one; NaN also where samples do not define it.
    """

    correct: np.ndarray
    loss: np.ndarray
    measured: np.ndarray | None = None

    @classmethod
    def blank(cls, shape: tuple[int, ...], columns: int) -> Tally:
        """Return a tally of so many columns in which no client was scored."""
        return cls(*(np.full(shape, np.nan) for _ in range(columns)))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that there are, by name."""
        found = {"correct": self.correct, "loss": self.loss}
        return found if self.measured is None else {**found, "measured": self.measured}

    def put(self, run: Any, client: Any, *values: Any) -> None:
        """Put the scores of single clients: number j is that of ``client[j]`` in ``run[j]``."""
        for column, value in zip(self.columns.values(), values, strict=True):
            column[run, client] = value


@dataclass
class Costs:
    """Samples in passes with and without a gradient, per run."""

    backward: np.ndarray
    forward: np.ndarray


@dataclass
class Receipt:
    """What a round cost, per run, and how long its parts took."""

    participants: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    gradient_evaluations: np.ndarray
    forward_evaluations: np.ndarray
    seconds: dict[str, float] = field(
        default_factory=lambda: {"train": 0.0, "server": 0.0, "evaluate": 0.0}
    )
    tally: dict[str, Tally] = field(default_factory=dict)

    @classmethod
    def blank(cls, runs: int) -> Receipt:
        """Return a receipt on which nothing is counted yet."""
        return cls(*np.zeros((5, runs), dtype=np.int64))

    def add(self, runs: slice, costs: Costs) -> None:
        """Count what local work on some of the runs cost."""
        self.gradient_evaluations[runs] += costs.backward
        self.forward_evaluations[runs] += costs.forward


# ---- blocks of lanes


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

    @property
    def shape(self) -> tuple[int, int]:
        """Runs and slots."""
        return self.runs, self.slots

    def piece(self, axis: int, first: int, number: int) -> Block:
        """Return some runs (axis 0) or slots (axis 1) of the block."""
        if axis == 0:
            return replace(self, run=self.run + first, runs=number)
        if self.only is None:
            return replace(self, slot=self.slot + first, slots=number)
        return replace(self, slots=number, only=self.only[first : first + number])


@dataclass(frozen=True)
class Some:
    """Clients of an evaluation: their ids (runs, n), from run ``run`` on."""

    run: int
    ids: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Runs and clients."""
        return self.ids.shape

    def piece(self, axis: int, first: int, number: int) -> Some:
        """Return some runs (axis 0) or clients (axis 1)."""
        cut = slice(first, first + number)
        return (
            Some(self.run + first, self.ids[cut]) if axis == 0 else Some(self.run, self.ids[:, cut])
        )


BY_RUN = ("common", "round", "rate_round")
"""The fields of a client context that have no axis of slots."""


def cut_context(ctx: ClientContext, block: Block) -> ClientContext:
    """View (or, where slots are listed, copy) the contexts of a block of lanes."""
    only = None if block.only is None else on_device(block.only, ctx.index.device)

    def cut(name: str, value: Any) -> Tree:
        runs = tree.narrow(value, 0, block.run, block.runs)
        if name in BY_RUN:
            return runs
        if only is None:
            return tree.narrow(runs, 1, block.slot, block.slots)
        return tree.map(lambda leaf: leaf.index_select(1, only), runs)

    return ClientContext._make(map(cut, ClientContext._fields, ctx))


def reorder(value: Tree, order: Tensor) -> Tree:
    """Put the slots of every run into another order."""
    lane = torch.arange(len(order), device=order.device)[:, None]
    found: Tree = tree.map(lambda leaf: leaf[lane, order], value)
    return found


def reorder_context(ctx: ClientContext, order: Tensor) -> ClientContext:
    """Put the slots of every run of a context into another order."""
    moved: dict[str, Any] = ctx._asdict()
    moved |= {k: reorder(v, order) for k, v in moved.items() if k not in BY_RUN}
    return ClientContext(**moved)


B = TypeVar("B", Block, Some)
T = TypeVar("T")


@dataclass
class Sparing(Generic[B, T]):
    """Work that is done to a block in halves if there is no memory for it at once.

    A block writes to stores and tallies at its end, or in a way that can be repeated, so that half
    of a block can start where the whole one failed.

    Attributes:
        work: what is done to a block.
        spare: makes the blocks of an engine smaller from then on.
    """

    work: Callable[[B], T]
    spare: Callable[[int], None]

    def __call__(self, block: B) -> list[tuple[B, T]]:
        """Do the work; return the pieces of the block, with what came of each."""
        try:
            return [(block, self.work(block))]
        except torch.OutOfMemoryError as error:
            said = str(error).splitlines()[0]
        return self.in_halves(block, said)  # the error held on to the memory of the attempt

    def in_halves(self, block: B, said: str) -> list[tuple[B, T]]:
        """Cut the slots of a block in two, or its runs if it has one slot."""
        runs, slots = block.shape
        axis, whole, other = (1, slots, runs) if slots > 1 else (0, runs, 1)
        if whole == 1:
            raise ConfigError(
                f"The work of a single client does not fit into memory ({said}); use a smaller "
                "batch, a smaller network, or more memory."
            )
        rest = whole - whole // 2
        self.spare(other * rest)
        halves = block.piece(axis, 0, rest), block.piece(axis, rest, whole - rest)
        return [piece for half in halves for piece in self(half)]
