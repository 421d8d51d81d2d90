"""A small file in the server's run folder that says how far it is, for ``sartor status``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.runs.storage import naming, write_json

if TYPE_CHECKING:
    from sartor.network.coordinator import Coordinator

FILE = "status.json"
MOST_EVENTS = 20
"""Events that the file holds, the last ones; the result has them all."""
SIGN = 5.0
"""Seconds between signs of life while nothing happens."""


@dataclass
class StatusFile:
    """Writes the file.

    Attributes:
        out: the run folder.
        rounds: rounds in all.
        method: what is trained.
        clients: the names of all clients.
        newcomers: whether they come after training, whose state is not shown any more then.
    """

    out: Path
    rounds: int
    method: str
    clients: Sequence[str]
    newcomers: bool = False
    _reported: dict[str, Any] = field(default_factory=dict, init=False)
    _time: float = field(default=0.0, init=False)
    _made: bool = field(default=False, init=False)

    def show(self, coordinator: Coordinator, state: str) -> None:
        """Say that the server is training (or serving newcomers), done, or stopped."""
        dispatcher = coordinator.dispatcher
        there = [dispatcher.names[i] for i in dispatcher.there()]
        self._write(state, coordinator.simulation.round_index, there, dispatcher.events)

    def wait(
        self,
        wanted: int,
        there: Collection[str],
        events: Sequence[dict[str, Any]] = (),
        done: int = 0,
    ) -> None:
        """Say which clients are there while too few are; written on change, or as a sign of life.

        Args:
            wanted: how many must come.
            there: the clients that have come.
            events: what went wrong so far.
            done: rounds that are over; 0 before the first one.
        """
        reported = {"wanted": wanted, "there": sorted(there), "events": len(events), "done": done}
        if reported == self._reported and time.monotonic() - self._time < SIGN:
            return
        self._made = self._made or not self.out.exists()
        with naming(self.out, "create"):
            self.out.mkdir(parents=True, exist_ok=True)
        self._write("waiting", done, there, events, wanted=wanted)
        self._reported, self._time = reported, time.monotonic()

    def stop(self, events: Sequence[dict[str, Any]], done: int) -> None:
        """Say that the server stopped while it waited; see `wait`."""
        self._write("stopped", done, (), events)

    def withdraw(self) -> None:
        """Remove the file, and the folder if it was made for it: nothing has begun."""
        (self.out / FILE).unlink(missing_ok=True)
        if self._made:
            with contextlib.suppress(OSError):  # something else is in it
                self.out.rmdir()

    def _write(
        self,
        state: str,
        round_index: int,
        there: Collection[str],
        events: Sequence[dict[str, Any]],
        **more: Any,
    ) -> None:
        self._reported = {}  # the next wait is written at once
        content = {
            "state": state,
            "round": round_index,
            "rounds": self.rounds,
            "method": self.method,
            "there": sorted(there),
            "clients": list(self.clients),
            "newcomers": self.newcomers,
            "events": list(events)[-MOST_EVENTS:],
            "time": time.time(),
        }
        write_json(self.out / FILE, content | more)
