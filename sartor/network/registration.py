"""Which clients are there: say hello, read what they report of their data, wait for enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sartor.core.errors import MessageError, NetworkError
from sartor.core.tree import Tree
from sartor.network.dispatch import Dispatcher
from sartor.network.remote_data import read_facts

Waits = Callable[[int, Collection[str], Sequence[dict[str, Any]]], None]
"""``(how many are wanted, names of those there, events)``: called while a server waits."""

_ALIKE = ("shape", "labels", "tokens")
"""What must be the same in the data of all clients."""


@dataclass
class Registration:
    """The clients of a federation, as they come.

    Attributes:
        hello_head: the head of the hello to a client, by its index.
        patience: seconds to wait for clients before giving up.
        waits: called while too few are there.
        facts: what clients report of their data, by index.
        like: what the data of clients that trained before looks like, if these are newcomers.
        late: called with the index of a client that came.
        back: called when a wait is over.
        round_index: the round, for the log.
    """

    dispatcher: Dispatcher
    hello_head: Callable[[int], dict[str, Any]]
    patience: float = 600.0
    waits: Waits = lambda wanted, there, events: None
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    like: Mapping[str, Any] | None = None
    late: Callable[[int], None] = lambda index: None
    back: Callable[[], None] = lambda: None
    round_index: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.dispatcher.hello = self.hello

    def gather(self, wanted: int, grace: float | None = None) -> None:
        """Wait until enough clients are there, and say hello to them.

        After ``grace`` seconds one is enough. A NetworkError says that too few came in time.
        """
        began, waited, names = time.monotonic(), False, self.dispatcher.names
        while True:
            self.hello()
            there = self.dispatcher.there()
            passed = time.monotonic() - began
            needed = wanted if grace is None or passed <= grace else min(wanted, 1)
            if len(there) >= needed:
                break
            waited = True
            self.waits(needed, [names[i] for i in there], self.dispatcher.events)
            if passed > self.patience:
                missing = [name for i, name in enumerate(names) if i not in there]
                raise NetworkError(
                    f"Only {len(there)} of {needed} clients came within {self.patience:g} s; "
                    f"missing: {', '.join(missing[:10])}. Start them with sartor join, or begin "
                    "with fewer by --quorum."
                )
            time.sleep(0.05)
        if waited:
            self.back()

    def hello(self) -> None:
        """Say hello to the clients that are there and not known yet."""
        dispatcher = self.dispatcher

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            self.facts[i] = self._checked(meta)

        serial = dispatcher.serial  # a hello has no number of its own
        note = {"kind": "hello", "round": self.round_index()}
        taken = dispatcher.send_new(self.hello_head, dispatcher.known, take, note)
        dispatcher.serial = serial
        dispatcher.known |= taken
        for i in taken:
            self.late(i)

    def _checked(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a client reports of its data, if it fits the others'."""
        facts = read_facts(meta)
        first = next(iter(self.facts.values()), None)  # it stands for all
        trained = "those that the models were trained on"
        for other, whose in ((first, "those of the others"), (self.like, trained)):
            for part in _ALIKE:
                if other is not None and other[part] != facts[part]:
                    raise MessageError(
                        f"its samples differ from {whose}: {part} {facts[part]}, "
                        f"expected {other[part]}"
                    )
        return facts
