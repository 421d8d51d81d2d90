"""A client's end of the transport on NVIDIA FLARE: it pulls orders and brings answers."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sartor.core.errors import NetworkError
from sartor.network.flare import BEAT, CHANNEL, HOLD, LOST, flare_names
from sartor.network.keys import Kit, check_valid
from sartor.network.revocation import SERVER


class FlareClient:
    """A client's end: it pulls orders and brings answers until the server says good-bye.

    Without a server for ``patience`` seconds it gives up.
    """

    def __init__(
        self,
        kit: Kit,
        answer: Callable[[bytes], bytes],
        say: Callable[[str], None] = lambda text: None,
        patience: float = 3600.0,
    ) -> None:
        check_valid(kit)
        self._flare = flare_names()
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
        """Wait until a server listens at its address.

        A try in vain costs nothing here; to the layers below it is a reason to wait ever longer.
        """
        reported = False
        while not self.stopped.is_set():
            try:
                socket.create_connection((self.kit.host, self.kit.port), timeout=2.0).close()
                return
            except OSError:
                self._check_patience()
                if not reported:
                    self.say(f"waiting for the server at {self.kit.host}:{self.kit.port}")
                    reported = True
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
                    f"The server refuses: {reply.get_header('text')}. Ask the keeper of the "
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
