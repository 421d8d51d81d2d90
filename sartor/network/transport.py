"""What carries the messages of a federation.

A transport sends each client its message, collects the answers until a deadline, and knows who is
there. It sees bytes; `dispatch.py` and `client.py` know what they mean. `Loopback` is
the plainest one: all clients in one process, as separate objects that exchange nothing but bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

Answer = Callable[[bytes], bytes]
"""What a client does with a message."""


class Transport(Protocol):
    """What carries messages between the server and its clients."""

    def present(self) -> frozenset[str]:
        """Return the names of the clients that can be written to now."""

    def exchange(self, messages: Mapping[str, bytes], deadline: float) -> dict[str, bytes]:
        """Send every client its message, and collect answers.

        Args:
            messages: from the name of a client to its message.
            deadline: seconds after which a client that has not answered is left out.

        Returns:
            the answers that came in time; an answer to an earlier message may be among them, which
            the server recognises by its number.
        """

    def notices(self) -> list[tuple[str, str]]:
        """Return who was turned away since the last call: names and reasons."""

    def close(self) -> None:
        """Say to the clients that nothing more will come, and release everything."""


class Loopback:
    """Clients in this process; only bytes cross.

    Args:
        clients: from a name to what the client does with a message.
        watch: called with (direction, name, bytes) of everything that crosses, "down" or "up".
    """

    def __init__(
        self,
        clients: Mapping[str, Answer],
        watch: Callable[[str, str, bytes], None] | None = None,
    ) -> None:
        self.clients = dict(clients)
        self.watch = watch

    def present(self) -> frozenset[str]:
        """Return the names of all clients."""
        return frozenset(self.clients)

    def exchange(self, messages: Mapping[str, bytes], deadline: float) -> dict[str, bytes]:
        """Let one client after the other answer; one that raises or is late has not answered."""
        answers: dict[str, bytes] = {}
        began = time.monotonic()
        for name, message in messages.items():
            if name not in self.clients:
                continue
            self._seen("down", name, bytes(message))
            try:
                answer = self.clients[name](bytes(message))
            except ConnectionError:
                continue
            if time.monotonic() - began <= deadline:
                self._seen("up", name, answer)
                answers[name] = answer
        return answers

    def _seen(self, direction: str, name: str, data: bytes) -> None:
        if self.watch is not None:
            self.watch(direction, name, data)

    def notices(self) -> list[tuple[str, str]]:
        """Return nothing: every client is let in."""
        return []

    def close(self) -> None:
        """Do nothing: nothing is held."""
