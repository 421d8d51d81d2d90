"""The work of clients divided among processes: each trains some lanes, then all exchange.

Every process holds the data, the server's state and the kept states of all clients, and takes the
server's steps itself: same inputs, same numbers. What is divided is the work of the lanes, in
training and in evaluation. The division follows from sizes that all processes know, so it needs no
message; and since all randomness is keyed, it cannot change a draw. After the local work of an
exchange uploads travel, with the kept states (and kept models) of the clients that trained, their
scores and costs; see `docs/scaling.md` for the bytes.

Lanes that do not train are skipped, and the uploads of clients that do not report are zeros, as in
a federation over a network: `aggregate` does not read them.

Numbers: a lane's own arithmetic is the same, but lanes worked on together share matrix products,
whose rounding may depend on how many they are. With one lane at a time (``chunk=1``, or the
reference engine) runs are equal to the bit for any number of processes; else to rounding (1e-10 in
float64). Where a server's step itself does not repeat to the bit, as sums in no fixed order on a
GPU, processes would drift apart: after every round eight bytes of each are compared, and rank 0's
state is taken by all if they differ.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import FederationError
from sartor.core.method import Phase
from sartor.core.tree import Tree
from sartor.engines.context import Context
from sartor.engines.evaluate import TEST, Splits
from sartor.engines.parts import Block, Lanes, Order, Receipt, Some, Tally, cut_context, on_device
from sartor.engines.plan import num_steps
from sartor.engines.shard.processes import Processes, digest
from sartor.engines.trial import tune_lanes
from sartor.engines.work import InProcess, Store, Trained

FINE = 4
"""Pieces of work a process at least, where there are so many lanes."""

Where = tuple[np.ndarray, np.ndarray]
"""Runs and slots, or runs and clients, of single lanes."""


@dataclass(frozen=True)
class Tile:
    """Some slots of ``runs`` neighbouring runs from ``run`` on."""

    run: int
    runs: int
    slots: np.ndarray

    def lanes(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return runs and slots of the lanes of the tile that ``which`` (runs, slots) marks."""
        run, slot = np.nonzero(which[self.run : self.run + self.runs][:, self.slots])
        return run + self.run, self.slots[slot]


def deal(work: np.ndarray, size: int) -> np.ndarray:
    """Divide pieces of work among processes, the longest first, each to the least busy.

    That is Graham's longest-processing-time rule: the busiest process has at most 4/3 − 1/(3·size)
    of what the best division gives it. Ties go to the lower rank.

    >>> deal(np.array([2, 7, 4, 9, 5]), 2).tolist()
    [1, 1, 0, 0, 1]

    Args:
        work: (pieces,) how long each takes; 0 is given to no process.
        size: the number of processes.

    Returns:
        (pieces,) the rank that each goes to; −1 for none.
    """
    owner = np.full(len(work), -1, dtype=np.int64)
    busy = [(0, rank) for rank in range(size)]
    for piece in np.argsort(-work, kind="stable").tolist():
        if work[piece] <= 0:
            break
        load, rank = busy[0]
        owner[piece] = rank
        heapq.heapreplace(busy, (load + int(work[piece]), rank))
    return owner


def share(work: np.ndarray, size: int) -> list[list[Tile]]:
    """Divide lanes with so much work, (runs, slots), among processes.

    A piece is a slot of all runs, so that runs stay together in one call; of fewer where there are
    not enough slots to go round.
    """
    runs = len(work)
    slots = max(1, int((work > 0).any(0).sum()))
    parts = min(runs, -(-FINE * size // slots))
    edges = np.arange(parts + 1) * runs // parts
    load = np.add.reduceat(work, edges[:-1], axis=0)
    owner = deal(load.reshape(-1), size).reshape(load.shape)
    found: list[list[Tile]] = []
    for rank in range(size):
        mine = [np.nonzero(owner[part] == rank)[0] for part in range(parts)]
        found.append(
            [
                Tile(int(edges[p]), int(edges[p + 1] - edges[p]), slots)
                for p, slots in enumerate(mine)
                if len(slots)
            ]
        )
    return found


class Sharded(InProcess):
    """Clients whose lanes are divided among processes; see `engines.work.ClientWork`.

    Every process holds all states, and makes single models by itself.

    Args:
        context: method, data and engine.
        processes: all of them.
    """

    plan_ahead = None  # type: ignore[assignment]  # blocks are known only in the round

    def __init__(self, context: Context, processes: Processes) -> None:
        super().__init__(context)
        self.processes = processes
        self._shares: dict[bytes, list[list[Tile]]] = {}
        self._tuned = False
        self._check_same()

    def _check_same(self) -> None:
        """Refuse processes that were given different problems."""
        arena = self.context.arena
        text = f"{self.context.method.name} {self.context.seeds}"
        words = np.frombuffer(text.encode(), dtype=np.uint8)
        reported: Tree = {"x": arena.x, "y": arena.y, "hyper": self.context.hyper}
        if arena.palette is not None:
            reported["palette"] = arena.palette
        reported["words"] = torch.from_numpy(words.copy()).to(arena.device)
        reported["splits"] = {
            name: {"rows": split.rows, "size": torch.from_numpy(split.size).to(arena.device)}
            for name, split in arena.splits.items()
        }
        mine = {"digest": {"": digest(reported).reshape(1)}}
        found = self.processes.swap(mine, [{"digest": 1}] * self.processes.size)
        values = [int(one["digest"][""]) for one in found]
        wrong = [rank for rank, value in enumerate(values) if value != values[0]]
        if wrong:
            raise FederationError(
                f"Process {wrong[0]} of {self.processes.size} has other data, seeds or "
                "hyper-parameters than process 0; all must be started with the same command and "
                "see the same files."
            )

    def _share(self, work: np.ndarray) -> list[list[Tile]]:
        """Divide lanes; a division is remembered, since full cohorts come again every round."""
        key = work.tobytes()
        if key not in self._shares:
            if len(self._shares) >= 8:
                self._shares.clear()
            self._shares[key] = share(work, self.processes.size)
        return self._shares[key]

    def _steps(self, phases: Sequence[Phase], ids: np.ndarray) -> np.ndarray:
        """Count the samples in the steps of local phases, with their padding: (runs, slots).

        A phase whose length a client finds out for itself counts as one pass, and one that not
        everybody takes as if all did.
        """
        total = np.ones(ids.shape, dtype=np.int64)
        for phase in phases:
            split = self.context.arena.splits["train" if phase.data == "none" else phase.data]
            known = replace(phase, steps=None, epochs=1) if callable(phase.steps) else phase
            steps = num_steps(known, np.take_along_axis(split.size, ids, 1))
            batch = split.capacity if phase.batch is None else min(phase.batch, split.capacity)
            total += steps * max(1, batch) * (1 if phase.data == "none" else phase.draws)
        return total

    def agree(self, server: Tree) -> Tree:
        """Return rank 0's state where processes differ."""
        return self.processes.agreed(server)

    # ---- training

    def train(self, order: Order, store: Lanes, receipt: Receipt, keep: Lanes | None) -> Trained:
        """Work on the lanes of this process, and take the rest from the others."""
        order, attends = self.attending(order)
        phases, trains, cohort = order.method.phases, order.trains, order.cohort
        reports = order.present & trains
        shares = self._share(np.where(trains, self._steps(phases, cohort), 0))
        if phases:
            self._tune_first(order, store)
        blocks = self._tile_blocks(phases, shares[self.processes.rank])
        here = order
        if not blocks:  # a lane that does not train says what an upload looks like
            here, blocks = replace(order, trains=np.zeros_like(trains)), [Block(0, 1, 0, 1)]
        own = Receipt.blank(len(cohort))
        own.tally, own.seconds = receipt.tally, receipt.seconds
        uploads = self.train_blocks(here, blocks, store, own, keep)
        clock = self.context.clock(receipt.seconds)
        heard = on_device(reports & here.trains, self.context.arena.device)
        uploads = tree.where(heard, uploads, tree.zeros_like(uploads))
        self._exchange_lanes(shares, order, reports, uploads, store, keep, own)
        receipt.gradient_evaluations += own.gradient_evaluations
        receipt.forward_evaluations += own.forward_evaluations
        clock("train")
        return uploads, attends

    def _exchange_lanes(
        self,
        shares: list[list[Tile]],
        order: Order,
        reports: np.ndarray,
        uploads: Tree,
        store: Lanes,
        keep: Lanes | None,
        own: Receipt,
    ) -> None:
        """Fill in what other processes found; ``own`` becomes the costs of all."""
        worked = [_lanes(tiles, order.trains) for tiles in shares]
        heard = [_lanes(tiles, reports) for tiles in shares]
        clients = [(run, order.cohort[run, slot]) for run, slot in worked]
        both = (("state", store), ("trained", keep))
        stores = {name: one for name, one in both if isinstance(one, Store)}
        me = self.processes.rank
        mine = {"upload": _pick(uploads, *heard[me])}
        mine |= {name: one.rows(*clients[me]) for name, one in stores.items()}
        rows = [dict.fromkeys(stores, len(w[0])) for w in worked]
        for rank, theirs in self._swapped(mine, own.tally, own, clients, rows, heard):
            _put(uploads, *heard[rank], theirs["upload"])
            for name, one in stores.items():
                one.put(*clients[rank], theirs[name])

    def _swapped(
        self,
        mine: dict[str, Tree],
        tallies: Mapping[str, Tally],
        receipt: Receipt | None,
        clients: list[Where],
        rows: list[dict[str, int]],
        heard: list[Where] | None = None,
    ) -> list[tuple[int, dict[str, Tree]]]:
        """Give every process the trees of all; add the others' scores and costs to those here.

        Args:
            mine: what there is beside scores and costs.
            tallies: the scores.
            receipt: the costs, if they travel.
            clients: of every process, the runs and clients that it worked on.
            rows: of every process, how many rows each part of ``mine`` has.
            heard: of every process, the runs and slots of its uploads, where ``mine`` has them.
        """
        me, device = self.processes.rank, self.context.arena.device
        mine["tally"] = {
            split: on_device(
                np.stack([one[clients[me]] for one in tally.columns.values()], 1), device
            )
            for split, tally in tallies.items()
        }
        if receipt is not None:
            mine["costs"] = {"": on_device(_counts(receipt), device)}
        for rank, count in enumerate(rows):
            count |= {"tally": len(clients[rank][0]), "costs": len(self.context.everybody)}
            if heard is not None:
                count["upload"] = len(heard[rank][0])
        found = [(k, one) for k, one in enumerate(self.processes.swap(mine, rows)) if k != me]
        for rank, theirs in found:
            for split, tally in tallies.items():
                tally.put(*clients[rank], *theirs["tally"][split].cpu().numpy().T)
            if receipt is not None:
                _add(receipt, theirs["costs"][""].cpu().numpy())
        return found

    def _tune_first(self, order: Order, store: Lanes) -> None:
        """Let rank 0 choose the number of lanes a block for all, on a share of the usual size."""
        if self.context.engine.lanes is not None or self._tuned:
            return
        self._tuned = True

        def measure() -> int:
            some = np.arange(0, order.cohort.shape[1], self.processes.size)
            ctx = cut_context(order.ctx, Block(0, len(order.cohort), 0, len(some), some))
            cut = {
                name: getattr(order, name)[:, some]
                for name in ("cohort", "keys", "trains", "present")
            }
            tune_lanes(self.context, replace(order, ctx=ctx, **cut), store)
            return self.context.engine.lanes or 0

        self.context.engine.lanes = self.processes.first(measure) or None

    def _tile_blocks(self, phases: tuple[Phase, ...], tiles: list[Tile]) -> list[Block]:
        """Cut tiles into blocks of as many lanes as the engine likes."""
        return [
            Block(
                tile.run + block.run,
                block.runs,
                0,
                block.slots,
                tile.slots[block.slot : block.slot + block.slots],
            )
            for tile in tiles
            for block in self.context.blocks(phases, (tile.runs, len(tile.slots)))
        ]

    # ---- evaluation

    def _evaluation(self) -> tuple[list[Some], list[Where]]:
        """Divide all clients by their test samples.

        Return the blocks of this process, and runs and clients of every process.
        """
        context = self.context
        size = context.arena.splits["test"].size
        order = np.argsort(-size, axis=1, kind="stable")
        adapt = context.method.use.adapt
        shares = self._share(self._steps(adapt, order) + np.take_along_axis(size, order, 1))
        phases = adapt or (self.evaluator.phase(context.method, "test"),)
        blocks = self._tile_blocks(phases, shares[self.processes.rank])
        lanes = [_lanes(tiles, np.ones_like(order, dtype=bool)) for tiles in shares]
        clients = [(run, order[run, slot]) for run, slot in lanes]
        return [Some(block.run, order[block.cut]) for block in blocks], clients

    def evaluate(
        self, server: Tree, store: Lanes, round_index: int, splits: Splits = TEST
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client would use now; also return what that costs."""
        blocks, clients = self._evaluation()
        tallies, receipt = self.evaluator.evaluate(server, store, round_index, splits, blocks)
        self._swapped({}, tallies, receipt, clients, [{} for _ in clients])
        return tallies, receipt

    def evaluate_common(
        self, models: Tree, round_index: int, splits: Splits = TEST, clients: int | None = None
    ) -> dict[str, Tally]:
        """Score one model per run; on the data of a few first clients every process does it all."""
        blocks, everybody = self._evaluation()
        tallies = self.evaluator.evaluate_common(models, round_index, splits, clients, blocks)
        if clients is None:
            self._swapped({}, tallies, None, everybody, [{} for _ in everybody])
        return tallies

    def show(self, store: Lanes, round_index: int) -> dict[str, np.ndarray]:
        """Return what the method shows of every client's kept state: (runs, clients, ...)."""
        blocks, ids = self._evaluation()
        everybody, device = self.context.everybody, self.context.arena.device
        shown = self.evaluator.show(store, round_index, blocks)
        if not shown:  # no client is this process's: take names and shapes from one
            one = self.evaluator.show_some(store, round_index, everybody[:1, :1])
            shown = {k: leaf.cpu().numpy()[:0, :0] for k, leaf in tree.items(one)}
        mine = {k: {"": on_device(v[ids[self.processes.rank]], device)} for k, v in shown.items()}
        rows = [dict.fromkeys(mine, len(run)) for run, _ in ids]
        found = {
            k: np.zeros((*everybody.shape, *v.shape[2:]), dtype=np.float32)
            for k, v in shown.items()
        }
        for where, theirs in zip(ids, self.processes.swap(mine, rows), strict=True):
            for name, table in found.items():
                table[where] = theirs[name][""].cpu().numpy()
        return found


def _lanes(tiles: list[Tile], which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return runs and slots of the marked lanes of some tiles, in one order for all processes."""
    parts = [tile.lanes(which) for tile in tiles]
    none = np.zeros(0, dtype=np.int64)
    run, slot = (np.concatenate([none, *(part[k] for part in parts)]) for k in (0, 1))
    return run, slot


def _index(run: np.ndarray, slot: np.ndarray, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return on_device(run, leaf.device), on_device(slot, leaf.device)


def _pick(value: Tree, run: np.ndarray, slot: np.ndarray) -> Tree:
    found: Tree = tree.map(lambda leaf: leaf[_index(run, slot, leaf)], value)
    return found


def _put(value: Tree, run: np.ndarray, slot: np.ndarray, rows: Tree) -> None:
    tree.map(lambda leaf, new: leaf.index_put_(_index(run, slot, leaf), new), value, rows)


_COUNTS = ("bytes_down", "gradient_evaluations", "forward_evaluations")


def _counts(receipt: Receipt) -> np.ndarray:
    """Return what processes count each for themselves: (runs, counters)."""
    return np.stack([getattr(receipt, name) for name in _COUNTS], 1).astype(np.int64)


def _add(receipt: Receipt, counts: np.ndarray) -> None:
    for k, name in enumerate(_COUNTS):
        setattr(receipt, name, getattr(receipt, name) + counts[:, k])
