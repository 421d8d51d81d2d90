"""Score models: what every client would use now, on its own data. Nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.method import Batch, ClientContext, Method, Phase, changed
from sartor.core.tree import Tree
from sartor.engines.context import Context
from sartor.engines.parts import (
    Arena,
    Block,
    Costs,
    Group,
    Lanes,
    Receipt,
    Some,
    Split,
    Tally,
    cut_arena,
    cut_context,
    on_device,
)
from sartor.engines.plan import BatchPlan, build_plan, num_steps

GROUP = 32
"""Clients, at most, whose messages are written together where lanes are worked one at a time."""

Splits = tuple[str, ...]
TEST: Splits = ("test",)

STATISTICS_BATCH = 256
"""Samples of a batch over which BatchNorm normalises while statistics are collected."""

_GROUP_BYTES = 1 << 25  # of their models
_SHARES = 8  # groups a core at least, as clients differ in size
_KEPT = 1 << 26  # bytes of plans that are kept from one evaluation to the next


class Evaluator:
    """Score the models of clients in this process.

    Args:
        context: method, data and engine.

    Attributes:
        eval_batch: test samples a step.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        # On a CPU small batches waste less on padding; on a GPU few large steps are cheaper.
        self.eval_batch = 64 if context.arena.device.type == "cpu" else 256
        self._plain = changed(context.method, predict=None)  # scores a global model by its logits
        self._phases: dict[tuple[int, str, bool], Phase] = {}
        self._collecting: dict[int, tuple[Phase, Tree]] = {}
        self._plans: dict[Any, BatchPlan] = {}
        self._plan_bytes = 0

    def evaluate(
        self,
        server: Tree,
        store: Lanes,
        round_index: int,
        splits: Splits = TEST,
        blocks: Sequence[Some] | None = None,
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client, or those of the blocks, would use now, and what that costs."""
        context, method = self.context, self.context.record(round_index)
        tallies = {split: context.blank_tally() for split in splits}

        def score(block: Some) -> tuple[Costs, np.ndarray]:
            here = tree.narrow(server, 0, block.run, len(block.ids))
            group = self.messages_to(here, round_index, block.ids, block.run)
            model, costs = self.use(method, store, group)
            self.score(method, model, group, tallies)
            ctx, sparse = group.ctx, method.wire.sparse
            return costs, wire.bytes_down(ctx.common, ctx.own, sparse, group.present)

        receipt = Receipt.blank(context.arena.num_runs)
        blocks = self.client_blocks() if blocks is None else blocks
        for block, (costs, sent) in context.pieces(score, blocks):
            runs = slice(block.run, block.run + len(block.ids))
            receipt.bytes_down[runs] += sent
            receipt.add(runs, costs)
        return tallies, receipt

    def evaluate_common(
        self,
        models: Tree,
        round_index: int,
        splits: Splits = TEST,
        clients: int | None = None,
        blocks: Sequence[Some] | None = None,
    ) -> dict[str, Tally]:
        """Score one model per run, (runs, ...), on the data of the first clients, or of all."""
        context = self.context
        tallies = {split: context.blank_tally() for split in splits}

        def score(block: Some) -> None:
            run, ids = block.run, block.ids
            self.score_centre(tree.narrow(models, 0, run, len(ids)), round_index, ids, run, tallies)

        if clients is not None:
            most = context.engine.chunk((self.phase(self._plain, splits[0]),))
            width = max(1, most // clients)
            runs = range(0, context.arena.num_runs, width)
            blocks = [Some(run, context.everybody[run : run + width, :clients]) for run in runs]
        context.pieces(score, self.client_blocks() if blocks is None else blocks)
        return tallies

    def score_centre(
        self,
        centre: Tree,
        round_index: int,
        ids: np.ndarray,
        run: int,
        tallies: dict[str, Tally],
    ) -> None:
        """Score one model per run, (runs, ...), on the data of the clients ``ids`` (runs, n)."""
        group, model = self.common(centre, round_index, ids, run)
        self.score(self._plain, model, group, tallies)

    def common(
        self, centre: Tree, round_index: int, ids: np.ndarray, run: int = 0
    ) -> tuple[Group, Tree]:
        """Return one model per run as the clients ``ids`` (runs, n) would use it."""
        group = self.context.group("evaluate", round_index, ids, ({}, {}), run)
        model = tree.map(lambda leaf: leaf[:, None].expand(*ids.shape, *leaf.shape[1:]), centre)
        return group, self.equipped(self._plain, model, group)[0]

    def score(self, method: Method, model: Tree, group: Group, tallies: dict[str, Tally]) -> None:
        """Score the models (runs, n, ...) of clients on their own data."""
        for split, tally in tallies.items():
            self._score_split(method, model, group, split, tally)

    def show(
        self, store: Lanes, round_index: int, blocks: Sequence[Some] | None = None
    ) -> dict[str, np.ndarray]:
        """Return what the method shows of every client's kept state: (runs, clients, ...)."""
        found: dict[str, np.ndarray] = {}
        for block in self.client_blocks() if blocks is None else blocks:
            run, ids = block.run, block.ids
            for name, leaf in tree.items(self.show_some(store, round_index, ids, run)):
                rows = leaf.cpu().numpy()
                shape = (*self.context.everybody.shape, *rows.shape[2:])
                table = found.setdefault(name, np.zeros(shape, dtype=np.float32))
                table[run + np.arange(len(ids))[:, None], ids] = rows
        return found

    def show_some(self, store: Lanes, round_index: int, ids: np.ndarray, run: int = 0) -> Tree:
        """Return what the method shows of the kept states of the clients ``ids`` (runs, n)."""
        context = self.context
        if context.method.show.client is None:
            return {}
        ctx = context.group("inspect", round_index, ids, ({}, {}), run).ctx
        found = context.engine.clients(context.method.show.client, store.gather(ids, run), ctx)
        return tree.map(lambda leaf: leaf.float(), found)

    def client_blocks(self) -> list[Some]:
        """Cut all clients into blocks, the largest test sets of every run first."""
        phases = self.context.method.use.adapt or (self.phase(self.context.method, "test"),)
        size = self.context.arena.splits["test"].size
        order = np.argsort(-size, axis=1, kind="stable")
        most = self.context.engine.chunk(phases)
        if self._groups(most):
            runs = enumerate(zip(order, size, strict=True))
            return [Some(run, ids[None]) for run, pair in runs for ids in self._grouped(*pair)]
        width = max(1, min(most // len(order), 4096))
        return [
            Some(run, order[run : run + most, slot : slot + width])
            for run in range(0, len(order), most)
            for slot in range(0, order.shape[1], width)
        ]

    def _groups(self, lanes: int) -> bool:
        """Say whether clients are tested in groups: a small test costs less than its overhead."""
        if lanes != 1 or self.context.arena.device.type != "cpu":
            return False
        warm = self.context.method.schedule.first  # who trains first is left to training's blocks
        if self.context.task.norms:  # and who looks at training samples
            return False
        return not (self.context.method.use.adapt or (warm and warm.method.use.adapt))

    def _group_size(self) -> int:
        """Return how many models are held at a time beside those that clients keep."""
        each = 4 * self.context.task.num_trained
        return max(1, min(GROUP, _GROUP_BYTES // max(each, 1)))

    def _grouped(self, order: np.ndarray, size: np.ndarray) -> list[np.ndarray]:
        """Cut the clients of a run, in the given order, into groups of about equal work at most."""
        batches = np.cumsum(-(-size[order] // self.eval_batch))
        share = max(1, -(-int(batches[-1]) // (_SHARES * self.context.engine.workers)))
        by_work = np.searchsorted(batches, np.arange(share, int(batches[-1]), share)) + 1
        most = self._group_size()
        by_number = np.arange(most, len(order), most)
        return [ids for ids in np.split(order, np.union1d(by_work, by_number)) if len(ids)]

    def models(
        self, server: Tree, store: Lanes, round_index: int, ids: np.ndarray, run: int = 0
    ) -> tuple[ClientContext, Tree, Costs]:
        """Return contexts and models of the clients ``ids`` (runs, n) before local training.

        The runs are ``run`` and those after it, and the server is theirs. The costs are those of
        adaptation.
        """
        group = self.messages_to(server, round_index, ids, run)
        return group.ctx, *self.use(self.context.record(round_index), store, group)

    def messages_to(self, server: Tree, t: int, ids: np.ndarray, run: int = 0) -> Group:
        """Write the messages of an evaluation in round ``t`` to the clients ``ids``."""
        server_ctx = self.context.server_ctx("evaluate", t, ids, run=run)
        messages = self.context.messages(self.context.record(t), server, server_ctx)
        return self.context.group("evaluate", t, ids, messages, run, server_ctx)

    def use(self, method: Method, store: Lanes, group: Group) -> tuple[Tree, Costs]:
        """Do what clients do with a message at an evaluation: ``begin``, ``adapt``, ``model``."""
        engine = self.context.engine
        work = engine.clients(method.begin, store.gather(group.ids, group.run), group.ctx)
        work, costs = self.context.run_phases(method.use.adapt, work, group)
        model = engine.clients(method.use.model, work, group.ctx)
        model, more = self.equipped(method, model, group)
        return model, Costs(costs.backward + more.backward, costs.forward + more.forward)

    def equipped(self, method: Method, model: Tree, group: Group) -> tuple[Tree, Costs]:
        """Give the models (runs, n, ...) of clients the statistics of their own samples.

        A network without BatchNorm in training mode needs none: the models are returned as they
        are, at no cost.
        """
        if not self.context.task.norms:
            return model, Costs(*np.zeros((2, len(group.ids)), dtype=np.int64))
        if id(method) not in self._collecting:
            self._collecting[id(method)] = self._collect_phase(method, model)
        phase, sums = self._collecting[id(method)]
        wide = tree.map(
            lambda leaf: leaf.to(self.context.arena.device).expand(*group.ids.shape, *leaf.shape),
            sums,
        )
        work, costs = self.context.run_phases((phase,), {"model": model, "sums": wide}, group)
        return work["model"], costs

    def _collect_phase(self, method: Method, model: Tree) -> tuple[Phase, Tree]:
        """Make the phase that collects statistics, and the empty sums that it starts from."""
        task, arena, predict = self.context.task, self.context.arena, method.use.predict
        one = arena.features(arena.splits["train"].rows[:1] if arena.row is None else arena.row[:1])
        yes = torch.ones(1, dtype=torch.bool, device=arena.device)
        first = tree.map(lambda leaf: leaf[0, 0], model)
        sums = task.no_sums(first, Batch(one, arena.y[:1], yes, yes.long(), yes[0]), predict)

        def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
            found = task.collect(work["model"], batch, predict)
            return {**work, "sums": tree.map(torch.add, work["sums"], found)}

        def leave(work: Tree, ctx: ClientContext) -> Tree:
            return {"model": task.equipped(work["model"], work["sums"], predict)}

        phase = Phase("statistics", step, leave=leave, shuffle=False, batch=STATISTICS_BATCH)
        return phase, sums

    def _score_phase(self, method: Method, split: str, pooled: bool) -> Phase:
        predict = self.context.task.answer(method.use.predict)

        def scored(scores: Tensor, batch: Batch) -> Tree:
            loss = torch.where(batch.mask, self.context.task.criterion(scores, batch.y), 0.0)
            return {
                "correct": self.context.task.is_correct(scores, batch.y) & batch.mask,
                "loss": loss,
            }

        def step(sums: Tree, batch: Batch, ctx: ClientContext) -> Tree:
            scores = predict(ctx.own, batch.x)
            found = scored(scores, batch)
            right, loss = found["correct"].sum(), found["loss"].sum()
            new = {"correct": sums["correct"] + right, "loss": sums["loss"] + loss.double()}
            if "scores" in sums:  # padding goes to the spare row
                flat = scores.reshape(scores.shape[0], -1)
                new["scores"] = sums["scores"].index_copy(0, batch.rows, flat)
            return new

        def pooled_step(sums: Tree, batch: Batch, ctx: ClientContext) -> Tree:
            whose = ctx.own["slot"][batch.rows]
            found = scored(predict(ctx.own["model"], batch.x), batch)
            # Samples are the last axis; before it may be the steps of a text.
            rows = {k: v.reshape(-1, v.shape[-1]).double().sum(0) for k, v in found.items()}
            return {k: sums[k].index_add(0, whose, rows[k]) for k in sums}

        return Phase(
            name=f"score {split}",
            step=pooled_step if pooled else step,
            data=split,
            shuffle=False,
            batch=self.eval_batch,
        )

    def _score_split(
        self, method: Method, model: Tree, group: Group, split: str, tally: Tally
    ) -> None:
        """Add up correct answers and losses of one model per lane; take the measure, if any."""
        run, ids, present = group.run, group.ids, group.present
        arena, engine = cut_arena(self.context.arena, run, len(ids)), self.context.engine
        size = np.where(present, np.take_along_axis(arena.splits[split].size, ids, 1), 0)
        order = np.argsort(-size, axis=1, kind="stable")
        here = group.ctx._replace(own=model, common={})  # the model takes the place of a message
        if (order[:, 1:] < order[:, :-1]).any():
            here = self._ordered(here, order)
            ids, size, present = (np.take_along_axis(v, order, 1) for v in (ids, size, present))
        one_by_one = len(ids) == 1 < ids.size and self._groups(engine.chunk(()))
        lists = self.context.task.measure is not None
        if one_by_one and not lists and all(leaf.stride(1) == 0 for leaf in tree.leaves(model)):
            sums = self._pooled(method, here, ids, size, run, split)
        else:
            phase = self.phase(method, split)
            zero = torch.zeros(ids.shape, device=arena.device, dtype=torch.float64)
            start, plan = {"correct": zero.long(), "loss": zero}, self._plan(phase, ids, size, run)
            if lists:
                start["scores"] = self._blank_scores(method, here, arena, split)
            run_phase = self._one_by_one if one_by_one else engine.phase
            sums = run_phase(phase, start, here, plan)[0]
        found = torch.stack((sums["correct"].double(), sums["loss"])).cpu().numpy()
        columns = list(found[:, present])
        if lists:
            columns.append(self._measured(sums["scores"], arena.splits[split], ids)[present])
        tally.put(np.nonzero(present)[0] + run, ids[present], *columns)

    def _blank_scores(self, method: Method, ctx: ClientContext, arena: Arena, split: str) -> Tensor:
        """Return a list for the scores of all samples of a client, with a spare row: per lane."""
        predict = self.context.task.answer(method.use.predict)
        model = tree.map(lambda leaf: leaf[0, 0], ctx.own)
        with torch.no_grad():
            one = predict(model, arena.features(arena.splits[split].rows[:1]))
        shape = (*ctx.index.shape, arena.splits[split].capacity + 1, one[0].numel())
        return one.new_zeros(shape)

    def _measured(self, scores: Tensor, lists: Split, ids: np.ndarray) -> np.ndarray:
        """Return the task's measure of the scores (runs, slots, rows, outputs) of clients."""
        held, y = scores.cpu().numpy(), self.context.arena.y
        found = np.full(ids.shape, np.nan)
        for run, slot in np.ndindex(ids.shape):
            start, size = (int(part[run, ids[run, slot]]) for part in (lists.start, lists.size))
            if size and self.context.task.measure is not None:
                labels = y[lists.rows[start : start + size]].cpu().numpy()
                found[run, slot] = self.context.task.measure(labels, held[run, slot, :size])
        return found

    def _ordered(self, ctx: ClientContext, order: np.ndarray) -> ClientContext:
        """Put models and the clients' numbers in order; one that all lanes share needs no copy."""
        pick = on_device(order, self.context.arena.device)
        lane = torch.arange(len(pick), device=pick.device)[:, None]
        own = tree.map(lambda leaf: leaf if leaf.stride(1) == 0 else leaf[lane, pick], ctx.own)
        return ctx._replace(own=own, index=ctx.index[lane, pick])

    def _plan(self, phase: Phase, ids: np.ndarray, size: np.ndarray, run: int) -> BatchPlan:
        """Return the batches of a scoring phase: those of an earlier evaluation, or new ones."""
        signature = (phase.data, run, ids.tobytes(), size.tobytes())
        if signature not in self._plans:
            plan = self._new_plan(phase, ids, size, run)
            self._plan_bytes += plan.table.nbytes
            if self._plan_bytes > _KEPT:
                self._plans, self._plan_bytes = {}, plan.table.nbytes
            self._plans[signature] = plan
        return self._plans[signature]

    def _new_plan(self, phase: Phase, ids: np.ndarray, size: np.ndarray, run: int) -> BatchPlan:
        keys = np.zeros((*ids.shape, 2), dtype=np.int64)
        arena = cut_arena(self.context.arena, run, len(ids))
        return build_plan(phase, arena, ids, keys, num_steps(phase, size))

    def _one_by_one(
        self, phase: Phase, start: Tree, ctx: ClientContext, plan: BatchPlan
    ) -> tuple[Tree]:
        """Run a phase on one lane after the other."""
        found = []
        for slot in range(plan.steps.shape[1]):
            lane, narrow = cut_context(ctx, Block(0, 1, slot, 1)), plan.narrow(0, 1, slot, 1)
            own = tree.narrow(start, 1, slot, 1)
            found.append(self.context.engine.phase(phase, own, lane, narrow)[0])
        return (tree.cat(found, 1),)

    def _pooled(
        self,
        method: Method,
        ctx: ClientContext,
        ids: np.ndarray,
        size: np.ndarray,
        run: int,
        split: str,
    ) -> Tree:
        """Score a model that all lanes of a run share: their samples are one list.

        Batches are full then, however few samples a client has.
        """
        phase = self.phase(method, split, pooled=True)
        mine = cut_arena(self.context.arena, run, 1)
        lists, number = mine.splits[split], int(size.sum())
        # Few lengths for all groups, so that their steps have the same shapes.
        slots, capacity = max(GROUP, ids.shape[1]), 1 << max(number - 1, 0).bit_length()
        zero = torch.zeros((1, 1, slots + 1), device=self.context.arena.device, dtype=torch.float64)
        sums = {"correct": zero, "loss": zero}
        if not number:
            return tree.map(lambda leaf: leaf[:, 0, : ids.shape[1]], sums)
        where = on_device(np.repeat(lists.start[0][ids[0]], size[0]), self.context.arena.device)
        first = np.repeat(np.cumsum(size[0]) - size[0], size[0])
        rows = lists.rows[where + on_device(np.arange(number) - first, self.context.arena.device)]
        whole = Split(rows, np.zeros((1, 1), np.int64), np.full((1, 1), number), capacity)
        arena = replace(mine, splits={split: whole}, num_clients=1)
        keys = np.zeros((1, 1, 2), dtype=np.int64)
        steps = num_steps(phase, np.full((1, 1), number))
        plan = build_plan(phase, arena, np.zeros((1, 1), np.int64), keys, steps)
        slot = np.full((1, 1, capacity + 1), slots)  # where padding goes
        slot[0, 0, :number] = np.repeat(np.arange(ids.shape[1]), size[0])
        lane = cut_context(ctx, Block(0, 1, 0, 1))
        lane = lane._replace(
            own={"model": lane.own, "slot": on_device(slot, self.context.arena.device)}
        )
        sums, _ = self.context.engine.phase(phase, sums, lane, plan)
        found: Tree = tree.map(lambda leaf: leaf[:, 0, : ids.shape[1]], sums)
        return found

    def phase(self, method: Method, split: str, pooled: bool = False) -> Phase:
        """Make each scoring phase once, so that engines can recognise it."""
        key = (id(method), split, pooled)
        if key not in self._phases:
            self._phases[key] = self._score_phase(method, split, pooled)
        return self._phases[key]
