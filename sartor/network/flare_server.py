"""The server's end of the transport on NVIDIA FLARE: a box of orders and answers per client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sartor.core.errors import NetworkError
from sartor.network.flare import CHANNEL, HOLD, LOST, flare_names
from sartor.network.keys import Kit, check_valid
from sartor.network.revocation import SERVER, Register

_HELD = 64  # calls held at once: fewer than the threads that handle messages


@dataclass
class _Box:
    """What passes between the server and one client."""

    session: str = ""
    identity: str = ""
    heard: float = -1e9
    ticket: int = 0
    order: bytes | None = None
    answer: bytes | None = None
    waiting: threading.Condition = field(default_factory=threading.Condition)


class FlareServer:
    """The server's end.

    Args:
        kit: the server's kit.
        names: the clients that may take part; others are turned away, certificate or not.
        host: the address to listen on; all addresses of this machine by default.
        project: the project's folder; a certificate that is withdrawn there is refused from the
            next call of its owner on.
    """

    def __init__(
        self,
        kit: Kit,
        names: Iterable[str],
        host: str = "0.0.0.0",
        project: str | Path | None = None,
    ) -> None:
        check_valid(kit)
        flare = flare_names()
        root, cert, key = map(str, kit.files)
        self._flare = flare
        self.boxes = {name: _Box() for name in names}
        self.register = Register(self.boxes, project)
        self.closing: str | None = None
        self._door: dict[tuple[str, str], int] = {}
        self._reported: set[tuple[str, str]] = set()
        self._held = threading.Semaphore(_HELD)
        self.cell = flare.CoreCell(
            fqcn=SERVER,
            root_url=f"grpc://{host}:{kit.port}",
            secure=True,
            credentials={"ca_cert": root, "server_cert": cert, "server_key": key},
        )
        for topic, handle in (("pull", self._pull), ("answer", self._answer), ("here", self._here)):
            self.cell.register_request_cb(CHANNEL, topic, handle)
        self.cell.set_message_interceptor(self._not_for_others)
        self.cell.set_cell_disconnected_cb(self._gone)
        try:
            self.cell.start()
        except Exception as error:
            raise NetworkError(
                f"Cannot listen on {host}:{kit.port}: {error}; stop the other server that uses "
                "this port, or give an address of this machine with --host."
            ) from error

    # ---- the seam

    def present(self) -> frozenset[str]:
        """Return the clients that were heard from in the last seconds."""
        now = time.monotonic()
        return frozenset(n for n, box in self.boxes.items() if now - box.heard < LOST)

    def exchange(self, messages: Mapping[str, bytes], deadline: float) -> dict[str, bytes]:
        """Put orders into the boxes, and wait for answers; see `Transport.exchange`."""
        end = time.monotonic() + deadline
        for name, data in messages.items():
            box = self.boxes[name]
            with box.waiting:
                box.ticket += 1
                box.order, box.answer = data, None
                box.waiting.notify_all()
        answers: dict[str, bytes] = {}
        for name in messages:
            box = self.boxes[name]
            with box.waiting:
                while box.answer is None:
                    left = min(end, box.heard + LOST) - time.monotonic()
                    if left <= 0:
                        break
                    box.waiting.wait(min(left, 0.5))
                if box.answer is not None:
                    answers[name] = box.answer
                box.order, box.answer = None, None
        return answers

    def notices(self) -> list[tuple[str, str]]:
        """Return who was turned away, and why; each reason once."""
        new = [key for key in list(self._door) if key not in self._reported]
        self._reported.update(new)
        return new

    def close(self, word: str = "stopped") -> None:
        """Tell the clients that nothing more will come, wait until they know, and stop."""
        self.closing = word
        for box in self.boxes.values():
            with box.waiting:
                box.waiting.notify_all()
        time.sleep(0.5)  # the calls that are held bring the word
        self.cell.stop()
        self._flare.CoreCell.ALL_CELLS.pop(SERVER, None)  # so that another can follow here

    # ---- calls of clients

    def _admit(self, request: Any) -> tuple[_Box | None, str]:
        """Say whose call this is, by the certificate of its connection; or why it is refused."""
        identity = str(request.get_prop(self._flare.COMMON_NAME))
        name, why = self.register.look_up(identity)
        if name is None:
            self._drop(identity)
            return None, self._turn_away(identity, why)
        box = self.boxes[name]
        session = str(request.get_header("session", ""))
        with box.waiting:
            now = time.monotonic()
            if box.session != session:
                if now - box.heard < LOST:
                    return None, self._turn_away(name, f"another process is connected as {name}")
                box.session, box.identity = session, identity
            box.heard = now
        return box, ""

    def _drop(self, identity: str) -> None:
        """Drop the connection of an identity that is refused now."""
        for box in self.boxes.values():
            if box.identity == identity:
                with box.waiting:
                    box.heard, box.session = -1e9, ""
                    box.order = None
                    box.waiting.notify_all()

    def _turn_away(self, name: str, why: str) -> str:
        key = (str(name), why)
        if key in self._door or len(self._door) < 1000:
            self._door[key] = self._door.get(key, 0) + 1
        return why

    def _gone(self, agent: Any) -> None:
        """Note at once that a connection was lost, until the client comes back."""
        identity, _, rest = str(agent.get_fqcn()).partition(".")
        session = rest.partition("-")[0]
        for box in self.boxes.values():
            if (box.identity, box.session) == (identity, session):
                with box.waiting:
                    box.heard = -1e9
                    box.waiting.notify_all()

    def _pull(self, request: Any) -> Any:
        box, why = self._admit(request)
        if box is None:
            return self._reply("refused", text=why)
        hold = HOLD if self._held.acquire(blocking=False) else 0.0
        done = request.get_header("done")  # its answer may still be on its way: not at once again

        def wanted() -> bool:
            new = box.order is not None and box.ticket != done
            return new or self.closing is not None

        try:
            with box.waiting:
                box.waiting.wait_for(wanted, hold)
                if box.order is not None and (hold or box.ticket != done):
                    return self._reply("order", box.order, ticket=box.ticket)
        finally:
            if hold:
                self._held.release()
        if self.closing is not None:
            return self._reply("bye", text=self.closing)
        return self._reply("nothing")

    def _answer(self, request: Any) -> None:
        box, _ = self._admit(request)
        if box is None:
            return
        with box.waiting:
            if box.order is not None and request.get_header("ticket") == box.ticket:
                box.answer, box.order = bytes(request.payload or b""), None
                box.waiting.notify_all()

    def _here(self, request: Any) -> Any:
        box, why = self._admit(request)
        return self._reply("refused", text=why) if box is None else self._reply("nothing")

    def _reply(self, kind: str, body: bytes = b"", **headers: Any) -> Any:
        reply = self._flare.make_reply(self._flare.OK, "", body)
        reply.add_headers({"kind": kind, **headers})
        return reply

    def _not_for_others(self, message: Any) -> Any:
        """Refuse to carry messages from one client to another."""
        if message.get_header(self._flare.DESTINATION) == SERVER:
            return None
        return self._flare.make_reply(self._flare.FORBIDDEN, "", None)
