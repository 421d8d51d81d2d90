"""Federations of real processes on this machine: a server, clients, and the means to hurt them."""

from __future__ import annotations

import contextlib
import html
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import sartor
from sartor.network.keys import Kit, init_project, read_kit

ROOT = Path(sartor.__file__).parents[1]
ENV = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ended_kit(project: Path, folder: Path) -> Kit:
    """Make a kit whose certificate ended yesterday."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from nvflare.lighter import utils

    shutil.copytree(project / "clients" / "site-1", folder)
    signer = load_pem_private_key((project / "authority" / "rootCA.key").read_bytes(), None)
    own = load_pem_private_key((folder / "client.key").read_bytes(), None)
    now = datetime.now(UTC)
    cert = utils.generate_cert(
        utils.Identity("site-1"),
        utils.Identity("sartor"),
        signer,
        own.public_key(),
        not_valid_before=now - timedelta(days=2),
        not_valid_after=now - timedelta(days=1),
    )
    (folder / "client.crt").write_bytes(utils.serialize_cert(cert))
    return read_kit(folder)


PACED = """
import sys, time
from pathlib import Path
from sartor.cli.network import built, own_data
from sartor.network.client import Client
from sartor.network.flare_client import FlareClient
from sartor.network.keys import read_kit
from sartor.network.messages import unpack
name, kit = sys.argv[1:]
def say(text):
    print(text, flush=True)
def load(split):
    return own_data(Path(name), name, None, split)
client = Client(load, built, Path("state-" + name), say=say)
def answer(message):
    if unpack(message)[1]["kind"] == "work":
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not Path("hurry").exists():
            time.sleep(0.05)
    return client.answer(message)
FlareClient(read_kit(kit), answer, say, patience=60).run()
"""
"""A client that works for a second a round, until there is no need to wait for it any more."""


class Party:
    """One process with its log."""

    def __init__(self, log: Path, words: list[str], limit: int | None = None) -> None:
        self.log = log

        def before() -> None:
            if limit is not None:  # as a full disk: no file may grow beyond this
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        with log.open("ab") as file:
            self.process = subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL if limit else file,
                stderr=subprocess.STDOUT,
                env=ENV,
                cwd=log.parent,
                preexec_fn=before if limit else None,
            )

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self, sign: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(sign)
        if sign == signal.SIGKILL:
            self.process.wait(timeout=30)

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)

    def free_disk(self) -> None:
        """Take the limit on files away."""
        endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, endless)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Federation:
    """Keys, data and processes of one federation in a folder.

    Args:
        folder: an empty folder.
        clients: how many.
        samples: of every client.
        settings: keys of the experiment.
    """

    def __init__(self, folder: Path, clients: int = 3, samples: int = 60, **settings: Any) -> None:
        self.folder = folder
        self.names = [f"site-{i + 1}" for i in range(clients)]
        self.port = free_port()
        self.parties: list[Party] = []
        init_project(folder / "keys", address=f"127.0.0.1:{self.port}", clients=self.names)
        draw = np.random.default_rng(5)
        (folder / "all").mkdir()
        for i, name in enumerate(self.names):
            (folder / name).mkdir()
            y = np.concatenate([np.arange(3), draw.integers(0, 3, samples - 3)])
            x = draw.normal(size=(samples, 6)) + np.eye(6)[y] * 2 + 0.3 * i
            for place in (name, "all"):
                np.savez(folder / place / f"{name}.npz", x=x.astype(np.float32), y=y)
        self.settings = {
            "method": "fedavg",
            "rounds": 6,
            "lr": 0.1,
            "model": "dnn",
            "points": ["pre"],
            "checkpoint_every": 1,
            **settings,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        (folder / "experiment.toml").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *error: object) -> None:
        for party in self.parties:
            party.kill(signal.SIGCONT)
            party.kill()

    def start(self, log: str, words: list[str], limit: int | None = None) -> Party:
        command = [sys.executable, *words]
        party = Party(self.folder / f"{log}.log", command, limit)
        self.parties.append(party)
        return party

    def serve(self, **flags: Any) -> Party:
        words = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        base = ["-m", "sartor", "serve", "experiment.toml", "--keys", "keys", "--out", "run"]
        return self.start("server", [*base, "--host", "127.0.0.1", *words])

    def join(self, name: str, limit: int | None = None, paced: bool = False) -> Party:
        """Start a client; a paced one makes rounds last a second, until `hurry`."""
        place = f"keys/clients/{name}"
        if paced:
            (self.folder / "paced.py").write_text(PACED)
            return self.start(name, ["paced.py", name, place])
        words = ["-m", "sartor", "join", place, "--data", name, "--device", "cpu"]
        return self.start(name, [*words, "--state", f"state-{name}", "--patience", "60"], limit)

    def hurry(self) -> None:
        """Let paced clients run as fast as they can."""
        (self.folder / "hurry").touch()

    def status(self) -> dict[str, Any]:
        path = self.folder / "run" / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {"round": -1, "events": []}

    def until(self, what: Callable[[], bool], seconds: float = 90.0) -> None:
        """Wait until something is true; fail with all logs if it never is."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def reach(self, round_index: int, seconds: float = 90.0) -> None:
        self.until(lambda: self.status()["round"] >= round_index, seconds)

    def finish(self, server: Party, seconds: float = 120.0) -> Any:
        """Wait for the server's end, and return the result of a whole run folder."""
        try:
            code = server.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.logs()) from None
        assert code == 0, self.logs()
        from sartor.report import write_report
        from sartor.runs import RunFolder

        result = RunFolder.open(self.folder / "run").read_result()
        assert result.ledger.num_rounds == self.settings["rounds"]
        assert np.isfinite(result.scores["pre", "test"].loss).all()
        assert self.status()["state"] == "done"
        events = self.events(result)
        page = html.unescape(write_report(self.folder / "run").read_text()) if events else ""
        for event in events[:5]:
            assert event["client"] in page
            assert event["why"] in page
        return result

    def events(self, result: Any) -> list[dict[str, Any]]:
        return list(result.config["network"]["events"])

    def checkpoint(self) -> Any:
        from sartor.runs import RunFolder

        found = RunFolder.open(self.folder / "run").read_checkpoint()
        assert found is not None
        return found

    def logs(self) -> str:
        return "\n".join(f"== {p.log.name}\n{p.log.read_text()[-1500:]}" for p in self.parties)
