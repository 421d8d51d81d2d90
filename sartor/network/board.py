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
SIGN = 5.0
"""Seconds between signs of life while nothing happens."""


@dataclass
class Board:
    """Writes the file.

    Attributes:
        out: the run folder.
        rounds: rounds in all.
    """

    out: Path
    rounds: int
    _last: tuple[Any, ...] = field(default=(), init=False)
    _time: float = field(default=0.0, init=False)
    _made: bool = field(default=False, init=False)

    def show(self, coordinator: Coordinator, state: str) -> None:
        """Tell that the server is training, done, or stopped."""
        office = coordinator.office
        self._write(
            {
                "state": state,
                "round": coordinator.round_index,
                "method": coordinator.method.name,
                "there": sorted(office.names[i] for i in office.there()),
                "clients": list(office.names),
                "events": office.events[-20:],
            }
        )

    def wait(
        self,
        method: str,
        names: Sequence[str],
        wanted: int,
        there: Collection[str],
        events: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Tell who is there before the first round; written on change, or as a sign of life.

        Args:
            method: what will be trained.
            names: all clients.
            wanted: how many must come.
            there: who has come.
            events: what went wrong so far.
        """
        now = (sorted(there), len(events))
        if now == self._last and time.monotonic() - self._time < SIGN:
            return
        self._made = self._made or not self.out.exists()
        self._last, self._time = now, time.monotonic()
        with naming(self.out, "create"):
            self.out.mkdir(parents=True, exist_ok=True)
        self._write(
            {
                "state": "waiting",
                "round": 0,
                "method": method,
                "there": sorted(there),
                "clients": list(names),
                "wanted": wanted,
                "events": list(events)[-20:],
            }
        )

    def withdraw(self) -> None:
        """Take the file away, and the folder if it was made for it: nothing has begun."""
        (self.out / FILE).unlink(missing_ok=True)
        if self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                self.out.rmdir()

    def _write(self, content: dict[str, Any]) -> None:
        write_json(self.out / FILE, {**content, "rounds": self.rounds, "time": time.time()})
