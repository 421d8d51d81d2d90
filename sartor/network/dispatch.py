"""Send numbered orders to clients, collect their answers, and log what went wrong."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sartor.core.errors import MessageError
from sartor.core.tree import Tree
from sartor.network.client_state import FIRST
from sartor.network.messages import everything, pack, unpack
from sartor.network.transport import Transport

Message = tuple[Tree, dict[str, Any], Callable[[str], bool]]
"""Trees, the head of the order, and which leaves travel."""

Take = Callable[[int, Tree, dict[str, Any]], None]
"""``(client, tree, values)``: takes an answer, or raises MessageError to refuse it."""


@dataclass
class Dispatcher:
    """Sends all orders of a server.

    Attributes:
        names: the clients, by index.
        deadline: seconds that a client has for an answer.
        serial: the number of the last order.
        known: the clients that this server has said hello to.
        events: the clients that were refused, late or lost, and why, in order.
        attended: of every order its record, round, whether it lasts, and who participated.
        bytes_down: what was sent so far, headers included.
        server: distinguishes this server from one before a restart.
        hello: says hello to the clients that are there and not known.
        away: the clients whose absence is already logged.
    """

    transport: Transport
    names: tuple[str, ...]
    deadline: float
    serial: int = FIRST
    known: set[int] = field(default_factory=set)
    events: list[dict[str, Any]] = field(default_factory=list)
    attended: list[dict[str, Any]] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    server: str = field(default_factory=lambda: secrets.token_hex(8))
    hello: Callable[[], None] = lambda: None
    away: set[int] = field(default_factory=set)

    def there(self) -> set[int]:
        """Return the clients that can be written to and are known."""
        here = self.transport.present()
        return {i for i in self.known if self.names[i] in here}

    def send_new(
        self,
        head: Callable[[int], dict[str, Any]],
        known: Collection[int],
        take: Take,
        note: dict[str, Any],
    ) -> set[int]:
        """Send an order without trees to the clients that are there and not known; see `send`."""
        here = self.transport.present()
        orders: dict[int, Message] = {
            i: ({}, head(i), everything)
            for i, name in enumerate(self.names)
            if name in here and i not in known
        }
        return self.send(orders, 1 << 20, take, note) if orders else set()

    def send(
        self, orders: Mapping[int, Message], limit: int, take: Take, note: dict[str, Any]
    ) -> set[int]:
        """Send orders, take the answers, and return the clients whose answer was taken.

        Args:
            orders: of every client its trees, the head of its order, and which leaves travel.
            limit: the most bytes of an answer.
            take: takes an answer or refuses it.
            note: what to write beside an event: the kind of order and the round.
        """
        self.serial += 1
        name = {"server": self.server, "serial": self.serial}
        is_hello = note["kind"] in ("facts", "hello")
        here = set(orders) if is_hello else self.there()
        messages = {
            i: pack(messages, {**head, **name}, sent)
            for i, (messages, head, sent) in orders.items()
            if i in here
        }
        taken: set[int] = set()
        strangers: set[int] = set()

        def judge(i: int, data: bytes | None) -> None:
            if i not in messages:
                if i not in self.away:  # logged once, until it is back
                    self._note(note, i, "not there")
                self.away.add(i)
                return
            try:
                if data is None:
                    raise MessageError("no answer in time")
                self.bytes_up += len(data)
                body, meta = unpack(data, limit)
                if {k: meta.get(k) for k in name} != name:
                    raise MessageError("an answer to an earlier order: too late")
                if meta.get("stranger") and not is_hello and i not in strangers:
                    strangers.add(i)
                    return
                if "fault" in meta:
                    raise MessageError(f"the client could not do it: {str(meta['fault'])[:300]}")
                take(i, body, meta)
                taken.add(i)
                if i in self.away:
                    self.away.discard(i)
                    self._note(note, i, "there again")
            except MessageError as error:
                self._note(note, i, str(error))

        for client, why in self.transport.notices():
            self._note({**note, "kind": "door"}, client, f"turned away: {why}")
        began = time.monotonic()
        answers = self._exchange(messages, self.deadline)
        for i in orders:
            judge(i, answers.get(i))
        if strangers:  # restarted in between: they get a hello, and are asked once more
            self.known -= strangers
            self.hello()
            left = max(self.deadline - (time.monotonic() - began), 0.1)
            again = {i: messages[i] for i in strangers if i in self.known}
            answers = self._exchange(again, left)
            for i in sorted(strangers):
                judge(i, answers.get(i))
        return taken

    def _note(self, note: dict[str, Any], client: int | str, why: str) -> None:
        name = self.names[client] if isinstance(client, int) else client
        reported = {**note, "client": name, "why": why}
        before = ({key: event.get(key) for key in reported} for event in self.events[-20:])
        if reported["kind"] == "hello" and reported in before:
            return  # hello is repeated while the server waits
        self.events.append({**reported, "time": time.time()})

    def _exchange(self, messages: Mapping[int, bytes], deadline: float) -> dict[int, bytes]:
        self.bytes_down += sum(map(len, messages.values()))
        named = {self.names[i]: data for i, data in messages.items()}
        answers = self.transport.exchange(named, deadline)
        return {i: answers[self.names[i]] for i in messages if self.names[i] in answers}
