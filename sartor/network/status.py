"""A small file in the server's run folder that says how far it is, for ``sartor status``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
    """Writes the file into a run folder, about the rounds of a method on some clients.

    With ``newcomers`` they come after training, whose state is not shown any more then.
    """

    out: Path
    rounds: int
    method: str
    clients: Sequence[str]
    newcomers: bool = False
    _reported: dict[str, Any] = field(default_factory=dict, init=False)
    _time: float = field(default=0.0, init=False)
    _made: bool = field(default=False, init=False)

    @contextlib.contextmanager
    def following(self, coordinator: Coordinator) -> Iterator[Callable[[], None]]:
        """Say how far a server is, also while it waits, until it is done or stopped.

        Yields what says so after a round.
        """
        dispatcher, registration = coordinator.dispatcher, coordinator.registration

        def show(state: str = "training") -> None:
            there = [dispatcher.names[i] for i in dispatcher.there()]
            self._write(state, coordinator.simulation.round_index, there, dispatcher.events)

        registration.waits = lambda wanted, there, events: self.wait(
            wanted, there, events, coordinator.simulation.round_index
        )
        registration.back = show
        show()
        try:
            yield show
        except BaseException:
            show("stopped")
            raise
        show("done")

    @contextlib.contextmanager
    def waiting(self, events: Sequence[dict[str, Any]] = (), done: int = 0) -> Iterator[None]:
        """Say that the server stopped, if it does so while it waits; see `wait`."""
        try:
            yield
        except BaseException:
            self._write("stopped", done, (), events)
            raise

    def wait(
        self,
        wanted: int,
        there: Collection[str],
        events: Sequence[dict[str, Any]] = (),
        done: int = 0,
    ) -> None:
        """Say which clients are there while too few are; written on change, or as a sign of life.

        ``events`` is what went wrong so far, ``done`` how many rounds are over.
        """
        reported = {"wanted": wanted, "there": sorted(there), "events": len(events), "done": done}
        if reported == self._reported and time.monotonic() - self._time < SIGN:
            return
        self._made = self._made or not self.out.exists()
        with naming(self.out, "create"):
            self.out.mkdir(parents=True, exist_ok=True)
        self._write("waiting", done, there, events, wanted=wanted)
        self._reported, self._time = reported, time.monotonic()

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
