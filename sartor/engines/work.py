"""The work of clients: one protocol, and its plainest implementation, in this process.

| implementation | where the clients work |
|---|---|
| `InProcess` | here, on all lanes |
| `engines.shard.work.Sharded` | in several processes, each on some lanes |
| `network.remote_work.Remote` | on their own machines; messages go to them |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from sartor.core import rng, tree
from sartor.core.method import ClientContext, Method, check_private
from sartor.core.tree import Tree
from sartor.engines.context import Context, plan_key
from sartor.engines.evaluate import Evaluator
from sartor.engines.parts import (
    Block,
    Costs,
    Order,
    Receipt,
    Tally,
    cut_context,
    halved_block,
    joined_work,
    sparing,
)
from sartor.engines.store import Lanes, Make, States, Store
from sartor.engines.trial import tune_lanes

PlanAhead = Callable[[Method, str, int, np.ndarray, np.ndarray], None]
"""``(method, stage, round, cohort (runs, slots), which of them train)``."""


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

    def train(
        self,
        order: Order,
        ctx: ClientContext,
        keys: np.ndarray,
        store: Lanes,
        receipt: Receipt,
        keep: Lanes | None,
    ) -> tuple[Tree, np.ndarray]:
        """Do what clients do between the messages they receive and their uploads.

        Args:
            order: what they are asked to do.
            ctx: what they read, their messages included: (runs, slots, ...).
            keys: (runs, slots, 2) on the host.
            store: their kept states; changed in place.
            receipt: costs and scores are added here.
            keep: a store for the models after local training, if they are to be kept.

        Returns:
            the uploads (runs, slots, ...), and which clients were there (runs, slots).
        """

    def agree(self, server: Tree) -> Tree:
        """Return the server's state after a round, the same for all who compute it."""

    def evaluate(
        self, server: Tree, store: States, round_index: int, splits: tuple[str, ...] = ("test",)
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client would use now; also return what that costs."""

    def evaluate_common(
        self,
        models: Tree,
        round_index: int,
        splits: tuple[str, ...] = ("test",),
        clients: int | None = None,
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
        attendance: which clients of an order are there, (runs, slots); all by default. Replace it
            to repeat a federation in which some were absent.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.evaluator = context, Evaluator(context)
        self.evaluate = self.evaluator.evaluate
        self.evaluate_common = self.evaluator.evaluate_common
        self.show = self.evaluator.show
        self.attendance: Callable[[Order], np.ndarray] = everyone

    def keep_states(self, params: Tree, folder: Path | None) -> Store:
        """Keep the states in memory, or in files in a folder."""

        def make(cohort: np.ndarray) -> Tree:
            return self.context.new_clients(params, cohort)

        return self._store(make, folder and folder / "clients")

    def keep_models(self, server: Tree, store: States, folder: Path | None) -> Store:
        """Keep the models after local training in memory, or in files in a folder."""

        def make(cohort: np.ndarray) -> Tree:
            return self.models(server, store, 0, cohort)

        return self._store(make, folder and folder / "models")

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

    def train(
        self,
        order: Order,
        ctx: ClientContext,
        keys: np.ndarray,
        store: Lanes,
        receipt: Receipt,
        keep: Lanes | None,
    ) -> tuple[Tree, np.ndarray]:
        """Train all lanes, in blocks; see `ClientWork.train`."""
        attends = self.attendance(order)
        order = replace(order, trains=order.trains & attends)
        context, phases = self.context, order.method.phases
        if context.engine.lanes is None and phases:
            tune_lanes(context, order.method, ctx, store, keys, order.cohort)
        blocks = context.blocks(phases, order.cohort.shape)
        uploads = train_blocks(self.evaluator, order, blocks, ctx, keys, store, receipt, keep)
        rows: dict[int, list[Tree]] = {}
        for block, upload in zip(blocks, uploads, strict=True):
            rows.setdefault(block.run, []).append(upload)
        return tree.cat([tree.cat(row, 1) for row in rows.values()], 0), attends


def everyone(order: Order) -> np.ndarray:
    """Return that all clients of an order are there, (runs, slots)."""
    return np.ones_like(order.trains)


def train_blocks(
    evaluator: Evaluator,
    order: Order,
    blocks: list[Block],
    ctx: ClientContext,
    keys: np.ndarray,
    store: Lanes,
    receipt: Receipt,
    keep: Lanes | None,
) -> list[Tree]:
    """Train some blocks of lanes, and return the uploads of each; see `ClientWork.train`."""
    context, method = evaluator.context, order.method
    engine = context.engine
    one_clock = context.arena.device.type == "cuda"
    clock = context.clock({"train": 0.0} if one_clock else receipt.seconds)

    def train(block: Block) -> tuple[Tree, Costs, dict[str, float]]:
        seconds = receipt.seconds if one_clock else {"train": 0.0, "evaluate": 0.0}
        clock = context.clock(seconds)
        ids, there = order.cohort[block.cut], order.trains[block.cut]
        here = cut_context(ctx, block)
        state = store.gather(ids, block.run)
        work = engine.clients(method.begin, state, here)
        work, costs = context.run_phases(
            method.phases, work, here, keys[block.cut], ids, there, block.run
        )
        clock("train")
        if receipt.tally or keep is not None:
            model = engine.clients(method.use.model, work, here)
            if keep is not None:
                keep.scatter(ids, model, there, block.run)
            for split, tally in receipt.tally.items():
                evaluator.score_lanes(method, model, here, ids, there, block.run, split, tally)
            clock("evaluate")
        state, upload = engine.clients(method.finish, state, work, here)
        check_private(method, upload)
        store.scatter(ids, state, there, block.run)
        clock("train")
        return upload, costs, seconds

    careful = sparing(engine, train, halved_block, joined_work)
    done = engine.blocks(careful, blocks)
    if not one_clock:
        # Blocks may have run in parallel: divide the wall time as their own clocks say.
        passed = clock("train")
        busy = {name: sum(s[name] for _, _, s in done) for name in ("train", "evaluate")}
        scoring = passed * busy["evaluate"] / max(sum(busy.values()), 1e-12)
        receipt.seconds["train"] -= scoring
        receipt.seconds["evaluate"] += scoring
    for block, (_, costs, _) in zip(blocks, done, strict=True):
        receipt.gradient_evaluations[block.cut[0]] += costs.backward
        receipt.forward_evaluations[block.cut[0]] += costs.forward
    return [upload for upload, _, _ in done]
