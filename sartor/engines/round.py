"""The order of one round, written once for all engines.

`docs/method-record.md` tells the same in words. An engine only says how a function is applied to
all runs and all lanes, and how the steps of a phase are taken.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sartor.core import rng, tree, wire
from sartor.core.method import ClientContext, Method, check_private
from sartor.core.tree import Tree
from sartor.engines.context import plan_key
from sartor.engines.evaluate import Evaluation
from sartor.engines.memory import halved_block, joined_work, sparing
from sartor.engines.moving import on_device
from sartor.engines.parts import Block, Costs, Order, Receipt, cut_arena, cut_context, planned
from sartor.engines.plan import BatchPlan, build_plan
from sartor.engines.store import Store

_TRIAL_STEPS = 4


class Rounds(Evaluation):
    """Letters out, local work, uploads in, aggregation."""

    def draw(
        self, method: Method, stage: str, round_index: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the cohort of a round, the clients with most local work first.

        Returns:
            ids, who of them trains, and who reports: (runs, slots) each.
        """
        ahead = self._drawn.pop((id(method), stage, round_index), None)
        if ahead is not None:
            return ahead
        if (method.schedule.who == "everyone") or stage != "train":
            cohort, trains = self.everybody, np.ones_like(self.everybody, dtype=bool)
            present = trains
        else:
            drawn = [
                self.participation.draw(seed, round_index, self.arena.num_clients)
                for seed in self.seeds
            ]
            cohort, present = np.stack([d[0] for d in drawn]), np.stack([d[1] for d in drawn])
            trains = present
            if method.schedule.who == "everyone_trains":
                reports = np.zeros_like(self.everybody, dtype=bool)
                np.put_along_axis(reports, cohort, present, 1)
                everybody = self.everybody
                if (
                    method.schedule.in_turn
                ):  # those drawn are served first, in the order of the draw
                    turn = np.full_like(everybody, everybody.shape[1])
                    np.put_along_axis(turn, cohort, np.arange(cohort.shape[1])[None], 1)
                    everybody = np.argsort(turn, axis=1, kind="stable")
                    reports = np.take_along_axis(reports, everybody, 1)
                cohort, present, trains = everybody, reports, np.ones_like(reports)
        if method.schedule.in_turn:
            return cohort, trains, present
        size = np.take_along_axis(self.arena.splits["train"].size, cohort, 1)
        order = np.argsort(-np.where(trains, size, -1), axis=1, kind="stable")
        return tuple(np.take_along_axis(part, order, 1) for part in (cohort, trains, present))  # type: ignore[return-value]

    def train(
        self,
        server: Tree,
        store: Store,
        round_index: int,
        stage: str = "train",
        score: tuple[str, ...] = (),
        keep: Store | None = None,
        record: Method | None = None,
    ) -> tuple[Tree, Receipt]:
        """Run one round.

        Args:
            server: the server's state.
            store: the clients' states; changed in place.
            round_index: the round.
            stage: "train", "prologue", "epilogue" or "handover".
            score: the splits on which the models are scored right after local training.
            keep: a store for the models after local training, if they are to be kept.
            record: the record to run, if not that of the stage (an epilogue's own epilogue).
        """
        other = {"prologue": self.method.schedule.before, "epilogue": self.method.schedule.after}
        warm = self.method.schedule.first
        if warm is not None:
            other["handover"] = warm.handover
        method = record or other.get(stage) or self.record(round_index)
        cohort, trains, present = self.draw(method, stage, round_index)
        runs, slots = cohort.shape
        zero = np.zeros(runs, dtype=np.int64)
        receipt = Receipt(trains.sum(1), zero.copy(), zero.copy(), zero.copy(), zero.copy())
        receipt.tally = {split: self._blank() for split in score}
        receipt.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0}
        width = 1 if method.schedule.in_turn else slots
        for first in range(0, slots, width):
            cut = slice(first, first + width)
            server = self._exchange(
                method,
                server,
                store,
                stage,
                round_index,
                cohort[:, cut],
                trains[:, cut],
                present[:, cut],
                receipt,
                keep,
            )
        if warm is not None and stage == "train" and round_index == warm.rounds - 1:
            server, given = self.train(server, store, round_index, "handover")
            receipt.bytes_down += given.bytes_down
            receipt.bytes_up += given.bytes_up
        return server, receipt

    def plan_ahead(self, round_index: int | None) -> None:
        """Draw the batches of a round to come while a GPU is busy with the one before.

        Only what is known before the round: phases that every client of the cohort takes, for a
        known number of steps, and as much as fits into memory. A plan that is not asked for is
        thrown away with the next.

        Args:
            round_index: the round, or None if there is none to come.
        """
        self._ahead.clear()
        local = type(self).local_work is Rounds.local_work  # elsewhere others draw their own
        if round_index is None or not self.queued or not local:
            return
        method = self.record(round_index)
        if method.schedule.in_turn:
            return
        try:
            self._draw_ahead(method, round_index)
        except torch.OutOfMemoryError:  # then it is drawn when it is its turn
            self._ahead.clear()

    def _draw_ahead(self, method: Method, round_index: int) -> None:
        drawn = cohort, trains, _ = self.draw(method, "train", round_index)
        self._drawn = {(id(method), "train", round_index): drawn}
        keys = self.keys(method.schedule.stage or "train", round_index, cohort)
        for block in self._blocks(method.phases, cohort.shape):
            ids = cohort[block.cut]
            for phase in method.phases:
                if callable(phase.steps) or phase.when is not None:
                    continue
                steps = self._known_steps(phase, ids, trains[block.cut], block.run)
                own = rng.fold_host(keys[block.cut], phase.stream or phase.name)
                self._ahead[plan_key(phase, ids, own, steps, block.run)] = self._plan(
                    phase, ids, own, steps, block.run
                )

    def _exchange(
        self,
        method: Method,
        server: Tree,
        store: Store,
        stage: str,
        round_index: int,
        cohort: np.ndarray,
        trains: np.ndarray,
        present: np.ndarray,
        receipt: Receipt,
        keep: Store | None,
    ) -> Tree:
        """Letters out, local work, uploads in, aggregation."""
        clock = self.clock(receipt.seconds)
        stage = method.schedule.stage or stage
        server_ctx = self.server_ctx(stage, round_index, cohort, present)
        keys = self.keys(stage, round_index, cohort)
        ctx = self.ctx(server_ctx, keys, *self.messages(method, server, server_ctx))
        connected = None
        if method.wire.connected is not None:
            connected = self.engine.runs(method.wire.connected, server, server_ctx)
        order = Order(method, stage, round_index, cohort, trains, present, connected)
        clock("server")
        uploads, there = self.local_work(order, ctx, keys, store, receipt, keep)
        clock = self.clock(receipt.seconds)
        receipt.participants -= (trains & ~there).sum(1)
        trains, present = trains & there, present & there
        server_ctx = server_ctx._replace(present=on_device(present, self.arena.device))
        if connected is not None:
            server_ctx = server_ctx._replace(present=wire.heard(connected, server_ctx.present))
        uploads = wire.received(uploads, wire.marks_of(method.wire.sparse, "upload"))
        if self.watch is not None and stage == "train":
            self.watch(uploads, cohort, trains)
        server = self.engine.runs(method.aggregate, server, uploads, server_ctx)
        messages = {"common": ctx.common, "own": ctx.own, "upload": uploads}
        down, up = wire.sent(messages, method.wire.sparse, connected, trains, present)
        receipt.bytes_down += down
        receipt.bytes_up += up
        clock("server")
        return server

    def attendance(self, order: Order) -> np.ndarray:
        """Say who of a cohort is there, (runs, slots): everybody, unless this is overridden."""
        return np.ones_like(order.trains)

    def local_work(
        self,
        order: Order,
        ctx: ClientContext,
        keys: np.ndarray,
        store: Store,
        receipt: Receipt,
        keep: Store | None,
    ) -> tuple[Tree, np.ndarray]:
        """Do what the clients of an exchange do between their letters and their uploads.

        Args:
            order: what they are asked to do.
            ctx: what they may read, their letters included: (runs, slots, ...).
            keys: (runs, slots, 2) on the host.
            store: their kept states; changed in place.
            receipt: what it costs, and the scores, are added here.
            keep: a store for the models after local training, if they are to be kept.

        Returns:
            the uploads (runs, slots, ...), and who of the cohort was there (runs, slots).
        """
        method, cohort = order.method, order.cohort
        attends = self.attendance(order)
        order = replace(order, trains=order.trains & attends)
        if self.engine.lanes is None and method.phases:
            self._tune(method, ctx, store, keys, cohort)
        blocks = self._blocks(method.phases, cohort.shape)
        uploads = self.work_blocks(order, blocks, ctx, keys, store, receipt, keep)
        rows: dict[int, list[Tree]] = {}
        for block, upload in zip(blocks, uploads, strict=True):
            rows.setdefault(block.run, []).append(upload)
        return tree.cat([tree.cat(row, 1) for row in rows.values()], 0), attends

    def work_blocks(
        self,
        order: Order,
        blocks: list[Block],
        ctx: ClientContext,
        keys: np.ndarray,
        store: Store,
        receipt: Receipt,
        keep: Store | None,
    ) -> list[Tree]:
        """Do the local work of some blocks of lanes, and return the uploads of each.

        See `local_work` for the arguments.
        """
        method, cohort, trains = order.method, order.cohort, order.trains
        in_turn = self.arena.device.type == "cuda"
        clock = self.clock({"train": 0.0} if in_turn else receipt.seconds)

        def work_on(block: Block) -> tuple[Tree, Costs, dict[str, float]]:
            seconds = receipt.seconds if in_turn else {"train": 0.0, "evaluate": 0.0}
            clock = self.clock(seconds)
            ids, there = cohort[block.cut], trains[block.cut]
            here = cut_context(ctx, block)
            state = store.gather(ids, block.run)
            work = self.engine.clients(method.begin, state, here)
            work, costs = self._phases(
                method.phases, work, here, keys[block.cut], ids, there, block.run
            )
            clock("train")
            if receipt.tally or keep is not None:
                model = self.engine.clients(method.use.model, work, here)
                if keep is not None:
                    keep.scatter(ids, model, there, block.run)
                for split, tally in receipt.tally.items():
                    self._score(method, model, here, ids, there, block.run, split, tally)
                clock("evaluate")
            state, upload = self.engine.clients(method.finish, state, work, here)
            check_private(method, upload)
            store.scatter(ids, state, there, block.run)
            clock("train")
            return upload, costs, seconds

        careful = sparing(self.engine, work_on, halved_block, joined_work)
        stores = [store] if keep is None else [store, keep]
        done = self.engine.blocks(careful, blocks, [*stores, *receipt.tally.values()])
        if not in_turn:
            # Blocks may have run side by side: divide the wall time as their own clocks say.
            passed = clock("train")
            busy = {
                name: sum(seconds[name] for _, _, seconds in done) for name in ("train", "evaluate")
            }
            scoring = passed * busy["evaluate"] / max(sum(busy.values()), 1e-12)
            receipt.seconds["train"] -= scoring
            receipt.seconds["evaluate"] += scoring
        for block, (_, costs, _) in zip(blocks, done, strict=True):
            receipt.gradient_evaluations[block.cut[0]] += costs.backward
            receipt.forward_evaluations[block.cut[0]] += costs.forward
        return [upload for upload, _, _ in done]

    def _tune(
        self, method: Method, ctx: ClientContext, store: Store, keys: np.ndarray, cohort: np.ndarray
    ) -> None:
        """Let the engine time a few steps of the main phase at several block sizes.

        Nothing is kept.
        """
        phase = max(method.phases, key=planned)
        sizes = self.arena.splits["train"].size

        def steps_of(ids: np.ndarray, there: np.ndarray, run: int) -> np.ndarray:
            known = replace(phase, steps=None) if callable(phase.steps) else phase
            return self._known_steps(known, ids, there, run)

        def prepare(block: Block) -> tuple[Tree, ClientContext, BatchPlan]:
            ids, here = cohort[block.cut], cut_context(ctx, block)
            arena = cut_arena(self.arena, block.run, block.runs)
            steps = np.where(np.take_along_axis(sizes[block.cut[0]], ids, 1) > 0, _TRIAL_STEPS, 0)
            parts = self._part_keys(phase, ids, block.run)
            plan = build_plan(phase, arena, ids, keys[block.cut], steps, parts)
            work = self.engine.clients(method.begin, store.gather(ids, block.run), here)
            for earlier in method.phases[: method.phases.index(phase)]:
                work = self.engine.clients(earlier.enter, work, here)
                work = self.engine.clients(earlier.leave, work, here)
            return work, here, plan

        def timed(one: tuple[Tree, ClientContext, BatchPlan]) -> tuple[float, float]:
            return self.engine.timed(lambda: self.engine.phase(phase, *one))

        def trial(lanes: int) -> float:
            """Predict the seconds of the whole phase in blocks of so many lanes."""
            blocks = self._blocks(method.phases, cohort.shape, lanes)
            ready = [prepare(block) for block in blocks[: self.engine.workers]]
            first, passed = (
                max(times) for times in zip(*self.engine.blocks(timed, ready), strict=True)
            )
            taken = sum(int(plan.steps.sum()) for _, _, plan in ready)
            # Blocks go to the first core that is free; the last to finish decides.
            cores = [0] * self.engine.workers
            for block in blocks:
                ids = cohort[block.cut]
                there = np.ones_like(ids, dtype=bool)
                cores[int(np.argmin(cores))] += int(steps_of(ids, there, block.run).sum())
            return first + passed * len(ready) / max(taken, 1) * max(cores)

        module = self.task.module
        shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
        # The words of a network tell what shapes do not, such as strides.
        network = (type(module), repr(module), shapes, tuple(self.arena.x.shape[1:]))
        signature = (method.name, network, phase.batch, cohort.shape)
        self.engine.tune(trial, cohort.size, signature)
