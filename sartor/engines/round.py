"""One round: draw the cohort, send messages, let the clients work, aggregate, count.

`docs/method-record.md` says the same in words. Where the clients work is in `work.py`, and how a
function is applied to all runs and clients is up to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sartor.core import wire
from sartor.core.method import Method
from sartor.core.tree import Tree
from sartor.engines.arena import on_device
from sartor.engines.context import Context
from sartor.engines.parts import Order, Receipt, Tally
from sartor.engines.store import States
from sartor.engines.work import ClientWork

Watch = Callable[[Tree, np.ndarray, np.ndarray], None]
"""Receives uploads (runs, slots, ...), the ids of their clients, and which of them trained."""

Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The ids of a cohort, which of them train, and which of them report: (runs, slots) each."""


class Rounds:
    """Run rounds, one at a time.

    Args:
        context: method, data and engine.
        clients: what does the clients' work.

    Attributes:
        watch: receives the uploads of every round.
    """

    def __init__(self, context: Context, clients: ClientWork) -> None:
        self.context, self.clients = context, clients
        self.watch: Watch | None = None
        self._drawn: dict[tuple[int, str, int], Drawn] = {}  # the cohort of the next round

    def train(
        self,
        server: Tree,
        store: States,
        round_index: int,
        stage: str = "train",
        score: tuple[str, ...] = (),
        keep: States | None = None,
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

        Returns:
            the server's new state, and what the round cost.
        """
        method = record
        if method is None:
            outside = None if stage == "train" else self._outside(stage)
            method = outside or self.context.record(round_index)
        cohort, trains, present = self.draw(method, stage, round_index)
        receipt = Receipt.blank(len(cohort))
        receipt.participants += trains.sum(1)
        receipt.tally = {split: Tally.blank(self.context.everybody.shape) for split in score}
        slots = cohort.shape[1]
        width = 1 if method.schedule.in_turn else slots
        for first in range(0, slots, width):
            cut = (slice(None), slice(first, first + width))
            at = method.schedule.stage or stage
            order = Order(method, at, round_index, cohort[cut], trains[cut], present[cut])
            server = self._exchange(order, server, store, receipt, keep)
        warm = self.context.method.schedule.first
        if warm is not None and stage == "train" and round_index == warm.rounds - 1:
            server, given = self.train(server, store, round_index, "handover")
            receipt.bytes_down += given.bytes_down
            receipt.bytes_up += given.bytes_up
        return self.clients.agree(server), receipt

    def _outside(self, stage: str) -> Method | None:
        """Return the record of a stage outside of rounds."""
        schedule = self.context.method.schedule
        handover = None if schedule.first is None else schedule.first.handover
        stages = {"prologue": schedule.before, "epilogue": schedule.after, "handover": handover}
        return stages.get(stage)

    def _exchange(
        self, order: Order, server: Tree, store: States, receipt: Receipt, keep: States | None
    ) -> Tree:
        """Send messages, let the clients work, aggregate their uploads, and count the bytes."""
        context, method, engine = self.context, order.method, self.context.engine
        clock = context.clock(receipt.seconds)
        at = (order.stage, order.round_index, order.cohort)
        server_ctx, keys = context.server_ctx(*at, order.present), context.keys(*at)
        ctx = context.client_ctx(server_ctx, keys, *context.messages(method, server, server_ctx))
        if method.wire.connected is not None:
            connected = engine.runs(method.wire.connected, server, server_ctx)
            order = replace(order, connected=connected)
        clock("server")
        uploads, there = self.clients.train(order, ctx, keys, store, receipt, keep)
        clock = context.clock(receipt.seconds)
        receipt.participants -= (order.trains & ~there).sum(1)
        trains, present = order.trains & there, order.present & there
        server_ctx = server_ctx._replace(present=on_device(present, context.arena.device))
        if order.connected is not None:
            heard = wire.heard(order.connected, server_ctx.present)
            server_ctx = server_ctx._replace(present=heard)
        if method.wire.sparse:
            uploads = wire.received(uploads, wire.marks_of(method.wire.sparse, "upload"))
        if self.watch is not None and order.stage == "train":
            self.watch(uploads, order.cohort, trains)
        server = engine.runs(method.aggregate, server, uploads, server_ctx)
        messages = {"common": ctx.common, "own": ctx.own, "upload": uploads}
        down, up = wire.sent(messages, method.wire.sparse, order.connected, trains, present)
        receipt.bytes_down += down
        receipt.bytes_up += up
        clock("server")
        return server

    def draw(self, method: Method, stage: str, round_index: int) -> Drawn:
        """Draw the cohort of a round, the clients with most local work first.

        Clients that take turns stay in the order of the draw.
        """
        ahead = self._drawn.pop((id(method), stage, round_index), None)
        if ahead is not None:
            return ahead
        context, schedule = self.context, method.schedule
        all_participate = schedule.who == "everyone" or context.participation.kind == "all"
        if all_participate or stage != "train":
            all_of_them = np.ones_like(context.everybody, dtype=bool)
            drawn = context.everybody, all_of_them, all_of_them
        else:
            number = context.arena.num_clients
            lots = [context.participation.draw(s, round_index, number) for s in context.seeds]
            cohort, present = (np.stack(part) for part in zip(*lots, strict=True))
            drawn = cohort, present, present
            if schedule.who == "everyone_trains":
                drawn = _everyone_trains(context.everybody, cohort, present, schedule.in_turn)
        if schedule.in_turn:
            return drawn
        cohort, trains, present = drawn
        size = np.take_along_axis(context.arena.splits["train"].size, cohort, 1)
        order = np.argsort(-np.where(trains, size, -1), axis=1, kind="stable")
        return tuple(np.take_along_axis(part, order, 1) for part in drawn)  # type: ignore[return-value]

    def plan_ahead(self, round_index: int | None) -> None:
        """Draw the batches of a round to come while a GPU is busy with the one before.

        As much as fits into memory. A plan that is not used is dropped with the next.

        Args:
            round_index: the round, or None if there is none to come.
        """
        self.context.ahead.clear()
        if round_index is None or not self.context.queued or self.clients.plan_ahead is None:
            return
        method = self.context.record(round_index)
        if method.schedule.in_turn:
            return
        try:
            drawn = cohort, trains, _ = self.draw(method, "train", round_index)
            self._drawn = {(id(method), "train", round_index): drawn}
            stage = method.schedule.stage or "train"
            self.clients.plan_ahead(method, stage, round_index, cohort, trains)
        except torch.OutOfMemoryError:  # then it is drawn when it is its turn
            self.context.ahead.clear()


def _everyone_trains(
    everybody: np.ndarray, cohort: np.ndarray, present: np.ndarray, in_turn: bool
) -> Drawn:
    """Let all clients train, and those of the cohort that are present report.

    Where clients take turns, those of the cohort come first, in the order of the draw.
    """
    reports = np.zeros_like(everybody, dtype=bool)
    np.put_along_axis(reports, cohort, present, 1)
    if in_turn:
        turn = np.full_like(everybody, everybody.shape[1])
        np.put_along_axis(turn, cohort, np.arange(cohort.shape[1])[None], 1)
        everybody = np.argsort(turn, axis=1, kind="stable")
        reports = np.take_along_axis(reports, everybody, 1)
    return everybody, np.ones_like(reports), reports
