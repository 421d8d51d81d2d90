"""One round: draw the cohort, send messages, let the clients work, aggregate, count.

`docs/method-record.md` says the same in words. Where the clients work is in `work.py`, and how a
function is applied to all runs and clients is up to the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sartor.core import wire
from sartor.core.method import Method
from sartor.core.tree import Tree
from sartor.engines.context import Context
from sartor.engines.parts import Order, Receipt, States, on_device
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
        """Run one round; return the server's new state, and what the round cost.

        The clients' states in ``store`` change in place. ``stage`` is "train", "prologue",
        "epilogue" or "handover". Right after local training the models are scored on the splits
        ``score``, and put into ``keep``. ``record`` takes the place of the round's own.
        """
        method = record or self.context.record(round_index)
        cohort, trains, present = self.draw(method, stage, round_index)
        receipt = Receipt.blank(len(cohort))
        receipt.participants += trains.sum(1)
        receipt.tally = {split: self.context.blank_tally() for split in score}
        slots = cohort.shape[1]
        width = 1 if method.schedule.in_turn else slots
        for first in range(0, slots, width):
            cut = np.s_[:, first : first + width]
            drawn = cohort[cut], trains[cut], present[cut]
            at = method.schedule.stage or stage
            server = self._exchange(method, at, round_index, drawn, server, store, receipt, keep)
        warm = self.context.method.schedule.first
        if warm is not None and stage == "train" and round_index == warm.rounds - 1:
            server, given = self.train(server, store, round_index, "handover", record=warm.handover)
            receipt.bytes_down += given.bytes_down
            receipt.bytes_up += given.bytes_up
        return self.clients.agree(server), receipt

    def _exchange(
        self,
        method: Method,
        stage: str,
        t: int,
        drawn: Drawn,
        server: Tree,
        store: States,
        receipt: Receipt,
        keep: States | None,
    ) -> Tree:
        """Send messages, let the clients work, aggregate their uploads, and count the bytes."""
        context, engine, (cohort, trains, present) = self.context, self.context.engine, drawn
        clock = context.clock(receipt.seconds)
        server_ctx = context.server_ctx(stage, t, cohort, present)
        messages = context.messages(method, server, server_ctx)
        group = context.group(stage, t, cohort, messages, server_ctx=server_ctx)
        connected = None
        if method.wire.connected is not None:
            connected = engine.runs(method.wire.connected, server, server_ctx)
        clock("server")
        order = Order(method, stage, t, *drawn, group.ctx, group.keys, connected)
        uploads, there = self.clients.train(order, store, receipt, keep)
        clock = context.clock(receipt.seconds)
        receipt.participants -= (trains & ~there).sum(1)
        trains, present = trains & there, present & there
        server_ctx = server_ctx._replace(present=on_device(present, context.arena.device))
        if connected is not None:
            server_ctx = server_ctx._replace(present=wire.heard(connected, server_ctx.present))
        if method.wire.sparse:
            uploads = wire.received(uploads, wire.marks_of(method.wire.sparse, "upload"))
        if self.watch is not None and stage == "train":
            self.watch(uploads, cohort, trains)
        server = engine.runs(method.aggregate, server, uploads, server_ctx)
        sent = dict(zip(wire.MESSAGES, (*messages, uploads), strict=True))
        down, up = wire.sent(sent, method.wire.sparse, connected, trains, present)
        receipt.bytes_down += down
        receipt.bytes_up += up
        clock("server")
        return server

    def draw(self, method: Method, stage: str, round_index: int) -> Drawn:
        """Draw the cohort of a round, by local work, the most first, or in the order of turns."""
        ahead = self._drawn.pop((id(method), stage, round_index), None)
        if ahead is not None:
            return ahead
        context, schedule = self.context, method.schedule
        everybody = schedule.who == "everyone" or context.participation.kind == "all"
        if everybody or stage != "train":
            yes = np.ones_like(context.everybody, dtype=bool)
            drawn = context.everybody, yes, yes
        else:
            drawn = self._lots(round_index)
            if schedule.who == "everyone_trains":
                drawn = _everyone_trains(context.everybody, drawn, schedule.in_turn)
        if schedule.in_turn:
            return drawn
        cohort, trains, _ = drawn
        size = np.take_along_axis(context.arena.splits["train"].size, cohort, 1)
        order = np.argsort(-np.where(trains, size, -1), axis=1, kind="stable")
        return tuple(np.take_along_axis(part, order, 1) for part in drawn)  # type: ignore[return-value]

    def _lots(self, round_index: int) -> Drawn:
        """Draw the cohort of a round by the rule of participation."""
        rule, number = self.context.participation, self.context.arena.num_clients
        lots = [rule.draw(seed, round_index, number) for seed in self.context.seeds]
        cohort, present = (np.stack(part) for part in zip(*lots, strict=True))
        return cohort, present, present

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


def _everyone_trains(everybody: np.ndarray, drawn: Drawn, in_turn: bool) -> Drawn:
    """Let all clients train, and those of the cohort that are present report.

    Where clients take turns, those of the cohort come first, in the order of the draw.
    """
    cohort, _, present = drawn
    reports = np.zeros_like(everybody, dtype=bool)
    np.put_along_axis(reports, cohort, present, 1)
    if in_turn:
        turn = np.full_like(everybody, everybody.shape[1])
        np.put_along_axis(turn, cohort, np.arange(cohort.shape[1])[None], 1)
        everybody = np.argsort(turn, axis=1, kind="stable")
        reports = np.take_along_axis(reports, everybody, 1)
    return everybody, np.ones_like(reports), reports
