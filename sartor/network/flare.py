"""The transport of real federations: NVIDIA FLARE's cell network, with mutual TLS.

Only its network layer is used (`nvflare.fuel.f3.cellnet`, over gRPC): encrypted connections,
certificates on both sides, reconnection, and the rules that the name of a client is the name in its
certificate and the server's certificate is that of its host. (Its other driver, plain TCP with TLS,
shakes hands while it accepts: a stranger who connects and stays silent would keep all others out.)
There are no jobs: a job would let the server send code to its clients, would end when a client's
process dies, and would not take a client back that returns.

Clients ask, the server answers: a client accepts no calls, so nobody on the network can make it do
anything. It pulls its next order (the server holds the call until there is one), works, and brings
the answer with the number of the order. A second process with the same identity is turned away for
as long as the first one is heard from.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sartor.errors import NetworkError
from sartor.network.extra import network_extra
from sartor.network.keys import Kit, check_valid
from sartor.network.revocation import SERVER, Register

CHANNEL = "sartor"
HOLD = 2.0
"""Seconds for which the server holds a call that has nothing to bring yet."""
BEAT = 1.0
"""Seconds between signs of life of a client."""
LOST = 5.0
"""Seconds of silence after which a client counts as gone."""
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
        flare = _flare()
        root, cert, key = map(str, kit.files)
        self._flare = flare
        self.boxes = {name: _Box() for name in names}
        self.register = Register(self.boxes, project)
        self.closing: str | None = None
        self._door: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()
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
        new = [key for key in list(self._door) if key not in self._told]
        self._told.update(new)
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
        """Take whoever came in with an identity that is refused now off the list of those here."""
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
        """Note at once that a connection was lost; whoever comes back is heard from again."""
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


class FlareClient:
    """A client's end: it pulls orders and brings answers until the server says good-bye.

    Args:
        kit: the client's kit.
        answer: what the client does with an order.
        say: told what goes on, in words.
        patience: seconds without a server after which the client gives up.
    """

    def __init__(
        self,
        kit: Kit,
        answer: Callable[[bytes], bytes],
        say: Callable[[str], None] = lambda text: None,
        patience: float = 3600.0,
    ) -> None:
        check_valid(kit)
        self._flare = _flare()
        self.kit, self.answer, self.say, self.patience = kit, answer, say, patience
        self.session = secrets.token_hex(16)
        self.stopped = threading.Event()
        self.cells = 0
        self.cell: Any = None
        self.done: int | None = None

    def run(self) -> str:
        """Serve orders; return the server's last word.

        Raises:
            NetworkError: the server turned this client away, or was not there for too long.
        """
        threading.Thread(target=self._beat, daemon=True).start()
        self.heard = time.monotonic()
        try:
            while not self.stopped.is_set():
                self._await_port()
                self._open()
                word = self._serve()
                self._close()
                if word is not None:
                    return word
            return "stopped here"
        finally:
            self.stopped.set()
            self._close()

    def _await_port(self) -> None:
        """Wait until somebody listens at the server's address.

        A try in vain costs nothing here; to the layers below it is a reason to wait ever longer.
        """
        told = False
        while not self.stopped.is_set():
            try:
                socket.create_connection((self.kit.host, self.kit.port), timeout=2.0).close()
                return
            except OSError:
                self._check_patience()
                if not told:
                    self.say(f"waiting for the server at {self.kit.host}:{self.kit.port}")
                    told = True
                self.stopped.wait(0.5)

    def _check_patience(self) -> None:
        silent = time.monotonic() - self.heard
        if silent > self.patience:
            raise NetworkError(
                f"No connection to {self.kit.host}:{self.kit.port} for {silent:.0f} s; is the "
                "server running, is the address right, and is this kit of the same project as "
                "the server's?"
            )

    def _open(self) -> None:
        """Connect, under a name below the client's own: no two processes get each other's mail."""
        root, cert, key = map(str, self.kit.files)
        self.done = None
        self.cells += 1
        self.cell = self._flare.CoreCell(
            fqcn=f"{self.kit.identity}.{self.session}-{self.cells}",
            root_url=f"grpc://{self.kit.host}:{self.kit.port}",
            secure=True,
            credentials={"ca_cert": root, "client_cert": cert, "client_key": key},
        )
        self.cell.start()

    def _close(self) -> None:
        cell, self.cell = self.cell, None
        if cell is not None:
            cell.stop()
            self._flare.CoreCell.ALL_CELLS.pop(cell.get_fqcn(), None)

    def _serve(self) -> str | None:
        """Serve orders until the server says good-bye (its last word), or is gone (None)."""
        began = time.monotonic()
        while not self.stopped.is_set():
            reply = self._call("pull", timeout=HOLD + 2.0, done=self.done)
            if reply is None:
                self._check_patience()
                if time.monotonic() - max(self.heard, began) > LOST:
                    return None
                self.stopped.wait(0.1)
                continue
            self.heard = time.monotonic()
            kind = reply.get_header("kind")
            if kind == "order":
                self._work(reply)
                self.heard = time.monotonic()
            elif kind == "bye":
                return str(reply.get_header("text"))
            elif kind == "refused":
                raise NetworkError(
                    f"The server refuses: {reply.get_header('text')}. Ask whoever keeps the "
                    "project's keys for a kit that counts (sartor keys client NAME), or stop the "
                    "other process that has this one."
                )
        return None

    def _work(self, order: Any) -> None:
        """Do an order, and send the answer without waiting: a server that is gone says nothing."""
        data = self.answer(bytes(order.payload))
        headers = {"session": self.session, "ticket": order.get_header("ticket")}
        cell = self.cell
        if cell is not None:
            message = self._flare.Message(headers, data)
            cell.fire_and_forget(
                channel=CHANNEL, topic="answer", targets=[SERVER], message=message, optional=True
            )
            self.done = headers["ticket"]

    def _beat(self) -> None:
        while not self.stopped.wait(BEAT):
            self._call("here", timeout=BEAT)

    def _call(self, topic: str, body: bytes = b"", timeout: float = 5.0, **headers: Any) -> Any:
        """Call the server; None if it cannot be reached."""
        message = self._flare.Message({"session": self.session, **headers}, body)
        cell = self.cell
        if cell is None:
            return None
        try:
            reply = cell.send_request(
                channel=CHANNEL,
                topic=topic,
                target=SERVER,
                request=message,
                timeout=timeout,
                optional=True,
            )
        except Exception:  # the cell is stopping
            return None
        good = reply.get_header(self._flare.RETURN_CODE) == self._flare.OK
        return reply if good else None


class _Names:
    """The names of NVIDIA FLARE that are used here."""

    def __init__(self) -> None:
        from nvflare.fuel.f3.cellnet.core_cell import CoreCell
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
        from nvflare.fuel.f3.cellnet.utils import make_reply
        from nvflare.fuel.f3.message import Message

        self.CoreCell: Any = CoreCell
        self.Message: Any = Message
        self.make_reply: Any = make_reply
        self.COMMON_NAME, self.OK = MessagePropKey.COMMON_NAME, ReturnCode.OK
        self.DESTINATION = MessageHeaderKey.DESTINATION
        self.RETURN_CODE = MessageHeaderKey.RETURN_CODE
        self.FORBIDDEN = ReturnCode.UNAUTHENTICATED


def _flare() -> _Names:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines would run through ours
    with network_extra():
        names = _Names()
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters is said by us
    return names
