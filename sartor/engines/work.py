"""The work of clients: one protocol, its plainest implementation, and where states are kept.

| implementation | where the clients work |
|---|---|
| `InProcess` | here, on all lanes |
| `engines.shard.work.Sharded` | in several processes, each on some lanes |
| `network.remote_work.Remote` | on their own machines; messages go to them |
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sartor.core import rng, tree
from sartor.core.errors import RunFolderError
from sartor.core.method import Method, check_private
from sartor.core.tree import Tree
from sartor.engines.context import Context, plan_key
from sartor.engines.evaluate import TEST, Evaluator, Splits
from sartor.engines.parts import (
    Block,
    Costs,
    Lanes,
    Order,
    Receipt,
    States,
    Tally,
    on_device,
)
from sartor.engines.trial import tune_lanes

PlanAhead = Callable[[Method, str, int, np.ndarray, np.ndarray], None]
"""``(method, stage, round, cohort (runs, slots), which of them train)``."""

Trained = tuple[Tree, np.ndarray]
"""The uploads of an order, and which of its clients were there."""

Make = Callable[[np.ndarray], Tree]
"""``(cohort (runs, slots)) -> states (runs, slots, ...)`` of clients that have not trained yet."""


class ClientWork(Protocol):
    """What clients do, wherever they are."""

    @property
    def plan_ahead(self) -> PlanAhead | None:
        """What draws the batches of a round to come; None if they cannot be drawn ahead."""

    def keep_states(self, params: Tree, folder: Path | None) -> States:
        """Make what keeps the clients' states between rounds.

        Args:
            params: the initial models, (runs, ...).
            folder: for memory-mapped files, where the states are here; None for memory.
        """

    def keep_models(self, server: Tree, store: States, folder: Path | None) -> States:
        """Make what keeps the models after local training; see `keep_states`."""

    def wait(self) -> None:
        """Wait until there are clients to work with."""

    def start(self, server: Tree, store: States, keep: bool) -> None:
        """Prepare the clients for the first round.

        Args:
            server: the server's first state.
            store: the clients' kept states.
            keep: whether the models after local training are kept.
        """

    def train(self, order: Order, store: Lanes, receipt: Receipt, keep: Lanes | None) -> Trained:
        """Do what clients do between the messages they receive and their uploads.

        Args:
            order: what they are asked to do.
            store: their kept states; changed in place.
            receipt: costs and scores are added here.
            keep: a store for the models after local training, if they are to be kept.

        Returns:
            the uploads (runs, slots, ...), and which clients were there (runs, slots).
        """

    def agree(self, server: Tree) -> Tree:
        """Return the server's state after a round, the same for all who compute it."""

    def evaluate(
        self, server: Tree, store: States, round_index: int, splits: Splits = TEST
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client would use now; also return what that costs."""

    def evaluate_common(
        self, models: Tree, round_index: int, splits: Splits = TEST, clients: int | None = None
    ) -> dict[str, Tally]:
        """Score one model per run, (runs, ...), on the data of the first clients, or of all."""

    def show(self, store: States, round_index: int) -> dict[str, np.ndarray]:
        """Return what the method shows of every client's kept state: (runs, clients, ...)."""

    def models(self, server: Tree, store: States, round_index: int, ids: np.ndarray) -> Tree:
        """Return what the clients ``ids`` (runs, n) would use now: (runs, n, ...)."""


class InProcess:
    """Clients that work in this process.

    Args:
        context: method, data and engine.

    Attributes:
        attendance: which clients of an order are there, (runs, slots); all if None. Set it to
            repeat a federation in which some were absent.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.evaluator = context, Evaluator(context)
        self.attendance: Callable[[Order], np.ndarray] | None = None
        self._not_private: set[tuple[int, str]] = set()  # record and leaf of uploads that were seen

    def keep_states(self, params: Tree, folder: Path | None) -> Store:
        """Keep the states in memory, or in files in a folder."""
        return self._store(
            lambda cohort: self.context.new_clients(params, cohort), folder and folder / "clients"
        )

    def keep_models(self, server: Tree, store: States, folder: Path | None) -> Store:
        """Keep the models after local training in memory, or in files in a folder."""
        return self._store(
            lambda cohort: self.models(server, store, 0, cohort), folder and folder / "models"
        )

    def _store(self, make: Make, folder: Path | None) -> Store:
        arena = self.context.arena
        return Store(make, arena.num_runs, arena.num_clients, arena.device, folder)

    def wait(self) -> None:
        """Return at once: all clients are here."""

    def start(self, server: Tree, store: States, keep: bool) -> None:
        """Do nothing: clients are made when they are needed."""

    def agree(self, server: Tree) -> Tree:
        """Return the state as it is."""
        return server

    def evaluate(
        self, server: Tree, store: Lanes, round_index: int, splits: Splits = TEST
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client would use now; also return what that costs."""
        return self.evaluator.evaluate(server, store, round_index, splits)

    def evaluate_common(
        self, models: Tree, round_index: int, splits: Splits = TEST, clients: int | None = None
    ) -> dict[str, Tally]:
        """Score one model per run, (runs, ...), on the data of the first clients, or of all."""
        return self.evaluator.evaluate_common(models, round_index, splits, clients)

    def show(self, store: Lanes, round_index: int) -> dict[str, np.ndarray]:
        """Return what the method shows of every client's kept state: (runs, clients, ...)."""
        return self.evaluator.show(store, round_index)

    def models(self, server: Tree, store: States, round_index: int, ids: np.ndarray) -> Tree:
        """Return what the clients ``ids`` (runs, n) would use now: (runs, n, ...)."""
        return self.evaluator.models(server, store, round_index, ids)[1]

    def plan_ahead(
        self, method: Method, stage: str, t: int, cohort: np.ndarray, trains: np.ndarray
    ) -> None:
        """Draw the batches of a round to come.

        Only what is known before the round: phases that every client of the cohort takes, for a
        known number of steps.
        """
        context = self.context
        keys = context.keys(stage, t, cohort)
        for block in context.blocks(method.phases, cohort.shape):
            ids = cohort[block.cut]
            for phase in method.phases:
                if callable(phase.steps) or phase.when is not None:
                    continue
                steps = context.known_steps(phase, ids, trains[block.cut], block.run)
                own = rng.fold_host(keys[block.cut], phase.stream or phase.name)
                key = plan_key(phase, ids, own, steps, block.run)
                context.ahead[key] = context.plan(phase, ids, own, steps, block.run)

    def attending(self, order: Order) -> tuple[Order, np.ndarray]:
        """Return an order to those who are there, and who that is."""
        if self.attendance is None:
            return order, np.ones_like(order.trains)
        attends = self.attendance(order)
        return replace(order, trains=order.trains & attends), attends

    def train(self, order: Order, store: Lanes, receipt: Receipt, keep: Lanes | None) -> Trained:
        """Train all lanes, in blocks; see `ClientWork.train`."""
        order, attends = self.attending(order)
        if self.context.engine.lanes is None and order.method.phases:
            tune_lanes(self.context, order, store)
        blocks = self.context.blocks(order.method.phases, order.cohort.shape)
        return self.train_blocks(order, blocks, store, receipt, keep), attends

    def train_blocks(
        self,
        order: Order,
        blocks: Sequence[Block],
        store: Lanes,
        receipt: Receipt,
        keep: Lanes | None,
    ) -> Tree:
        """Train some blocks of lanes; return the uploads (runs, slots, ...), zeros elsewhere."""
        context, method, engine = self.context, order.method, self.context.engine
        one_clock = context.arena.device.type == "cuda"
        clock = context.clock({"train": 0.0} if one_clock else receipt.seconds)

        def train(block: Block) -> tuple[Tree, Costs, dict[str, float]]:
            seconds = receipt.seconds if one_clock else {"train": 0.0, "evaluate": 0.0}
            clock = context.clock(seconds)
            group = order.group(block)
            state = store.gather(group.ids, block.run)
            work = engine.clients(method.begin, state, group.ctx)
            work, costs = context.run_phases(method.phases, work, group)
            clock("train")
            if receipt.tally or keep is not None:
                model = engine.clients(method.use.model, work, group.ctx)
                model, _ = self.evaluator.equipped(method, model, group)
                if keep is not None:
                    keep.scatter(group.ids, model, group.present, block.run)
                self.evaluator.score(method, model, group, receipt.tally)
                clock("evaluate")
            state, upload = engine.clients(method.finish, state, work, group.ctx)
            self._check_private(method, upload)
            store.scatter(group.ids, state, group.present, block.run)
            clock("train")
            return upload, costs, seconds

        done = context.pieces(train, blocks)
        if not one_clock:
            # Blocks may have run in parallel: divide the wall time as their own clocks say.
            passed = clock("train")
            busy = {name: sum(s[name] for _, (_, _, s) in done) for name in ("train", "evaluate")}
            scoring = passed * busy["evaluate"] / max(sum(busy.values()), 1e-12)
            receipt.seconds["train"] -= scoring
            receipt.seconds["evaluate"] += scoring
        for block, (_, costs, _) in done:
            receipt.add(block.cut[0], costs)
        (block, (uploads, _, _)), *_ = done
        return uploads if block.shape == order.cohort.shape else _assembled(order, done)

    def _check_private(self, method: Method, upload: Tree) -> None:
        """Refuse private leaves: every leaf of a record's uploads is asked about once."""
        for name, leaf in tree.items(upload):
            if (id(method), name) not in self._not_private:
                check_private(method, {name: leaf})
                self._not_private.add((id(method), name))


def _assembled(order: Order, done: Sequence[tuple[Block, tuple[Tree, Any, Any]]]) -> Tree:
    """Put the uploads of blocks into one table of all lanes."""
    shape, first = order.cohort.shape, done[0][1][0]
    table: Tree = tree.map(lambda leaf: leaf.new_zeros((*shape, *leaf.shape[2:])), first)
    for block, (upload, _, _) in done:
        for into, new in zip(tree.leaves(table), tree.leaves(upload), strict=True):
            into[block.cut] = new
    return table


class Store:
    """Kept states on this machine.

    Args:
        make: makes the states of new clients.
        runs: number of runs.
        clients: number of clients.
        device: where gathered states go, and where a store in memory lives.
        folder: a folder for memory-mapped files; None keeps everything in memory.
    """

    def __init__(
        self, make: Make, runs: int, clients: int, device: torch.device, folder: Path | None = None
    ) -> None:
        self.make, self.shape, self.device, self.folder = make, (runs, clients), device, folder
        self.touched = np.zeros((runs, clients), dtype=bool)
        first = make(np.zeros((runs, 1), dtype=np.int64))
        if folder is None:
            self.table: Tree = self._fresh()
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.table = tree.map(self._mapped, first)
            except OSError as error:
                raise RunFolderError(
                    f"Cannot make files for client states in {folder}: {error}; free some space "
                    "there, choose another folder with out=, or use store='memory'."
                ) from error

    def _fresh(self) -> Tree:
        """Make the states of all clients."""
        everybody = np.tile(np.arange(self.shape[1]), (self.shape[0], 1))
        return tree.map(lambda leaf: leaf.contiguous().clone(), self.make(everybody))

    def _mapped(self, leaf: Tensor) -> Tensor:
        shape = (*self.shape, *leaf.shape[2:])
        dtype = {torch.bfloat16: torch.int16}.get(leaf.dtype, leaf.dtype)
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".state", delete=False) as file:
            path = file.name
        return torch.from_numpy(np.memmap(path, dtype=kind, mode="w+", shape=shape)).view(
            leaf.dtype
        )

    def gather(self, cohort: np.ndarray, run: int = 0) -> Tree:
        """Return the states of a cohort of the runs ``run, run+1, ...``: (runs, slots, ...)."""
        if self.folder is not None and self.table:
            return self._gather_mapped(cohort, run)
        index = self._index(run + np.arange(len(cohort))[:, None], cohort)
        return tree.map(lambda leaf: leaf[index], self.table)

    def _gather_mapped(self, cohort: np.ndarray, run: int) -> Tree:
        """Read the states that were put from their files, and make the others."""
        index = self._index(run + np.arange(len(cohort))[:, None], cohort)
        block = slice(run, run + len(cohort))
        seen = self.touched[np.arange(run, block.stop)[:, None], cohort]
        full = np.zeros((self.shape[0], cohort.shape[1]), dtype=np.int64)
        full[block] = cohort
        if not seen.any():
            return tree.map(lambda leaf: leaf[block], self.make(full))
        found: Tree = tree.map(lambda leaf: leaf[index].to(self.device), self.table)
        if seen.all():
            return found
        fresh = tree.map(lambda leaf: leaf[block], self.make(full))
        return tree.where(on_device(seen, self.device), found, fresh)

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Put the states of the present members of a cohort back."""
        block, slot = np.nonzero(present)
        held = tree.leaves(states)
        picked = tuple(on_device(i, held[0].device) for i in (block, slot)) if held else ()
        rows = tree.map(lambda new: new[picked], states)
        self.put(block + run, cohort[present], rows)

    def put(self, run: np.ndarray, client: np.ndarray, rows: Tree) -> None:
        """Put single states: row j is that of ``client[j]`` in ``run[j]``."""
        self.touched[run, client] = True
        index = self._index(run, client)
        # First what may fail for want of memory, so that a state is never half new.
        ready = tree.map(lambda leaf, new: new.to(leaf.device, leaf.dtype), self.table, rows)
        tree.map(lambda leaf, new: leaf.index_put_(index, new), self.table, ready)

    def rows(self, run: np.ndarray, client: np.ndarray) -> Tree:
        """Return single states that were put, (rows, ...), on the device; see `put`."""
        index = self._index(run, client)
        found: Tree = tree.map(lambda leaf: leaf[index].to(self.device), self.table)
        return found

    def fork(self) -> Store:
        """Return a store in memory that begins as this one is; writing to it changes only it."""
        return Store(self.gather, *self.shape, self.device)

    def _index(self, run: np.ndarray, client: np.ndarray) -> tuple[Tensor, Tensor]:
        home = torch.device("cpu") if self.folder is not None else self.device
        return on_device(run, home), on_device(client, home)

    def dump(self) -> Tree:
        """Return what a checkpoint must hold.

        The rows of clients that have trained, and which they are.
        """
        index = self._index(*np.nonzero(self.touched))
        rows = tree.map(lambda leaf: leaf[index], self.table)
        return {"rows": rows, "touched": torch.from_numpy(self.touched.copy())}

    def load(self, state: Tree) -> None:
        """Restore a checkpoint; a client that has not trained in it is new again."""
        if self.folder is None and self.touched.any():
            self.table = self._fresh()
        self.touched = state["touched"].numpy().astype(bool).copy()
        run, client = np.nonzero(self.touched)
        self.put(run, client, state["rows"])
