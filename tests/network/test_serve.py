"""The whole work of a server, on clients in this process that exchange bytes alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.cli import main
from sartor.cli.config import build
from sartor.cli.network import built, job_of, own_data
from sartor.core.errors import ConfigError, NetworkError
from sartor.data.federation import Federation
from sartor.network.client import Client
from sartor.network.serve import clients_of, serve
from sartor.network.status import StatusFile
from sartor.network.transport import Loopback
from sartor.report import write_report
from sartor.runs import RunFolder
from sartor.runs.storage import read_json, read_state

NAMES = ("ash", "birch", "cedar")
VALUES: dict[str, Any] = {
    "methods": "fedper",
    "rounds": 4,
    "lr": 0.2,
    "model": "dnn",
    "checkpoint_every": 1,
    "participation": "at_least:0.6",
    "points": "pre",
    "dtype": "float64",
    "device": "cpu",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three files with labels in words; no client has all three classes."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        y = np.delete(np.array(["low", "mid", "top"]), i)[draw.integers(0, 2, 24 + 6 * i)]
        x = draw.normal(size=(len(y), 5)) + (y == "mid")[:, None] * 2.0
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=y)
    return folder


def clients(data: Path, home: Path) -> dict[str, Client]:
    return {name: Client(partial(own_data, data, name, None), built, home / name) for name in NAMES}


def answers(some: dict[str, Client]) -> Loopback:
    return Loopback({name: client.answer for name, client in some.items()})


def test_a_run_folder_and_the_models_of_a_federation(data: Path, tmp_path: Path) -> None:
    """The scores are those of `sartor.fit` on the same files, and so are the clients' models."""
    result = serve(
        job_of(build(VALUES)), answers(clients(data, tmp_path / "home")), NAMES, tmp_path / "run"
    )
    fed = Federation.from_folder(data)
    wanted = sartor.fit(
        "fedper",
        fed,
        model=sartor.models.dnn(fed),
        rounds=4,
        local=sartor.Local(lr=0.2),
        participation="at_least:0.6",
        points=("pre",),
        dtype="float64",
        device="cpu",
    )
    for key in wanted.scores:
        np.testing.assert_allclose(result.scores[key].loss, wanted.scores[key].loss, atol=1e-10)
        np.testing.assert_array_equal(result.scores[key].correct, wanted.scores[key].correct)
    for name in NAMES:
        (path,) = (tmp_path / "home" / name).glob("*/model.safetensors")
        model, _ = read_state(path)
        for leaf, value in wanted.model(name).state_dict().items():
            torch.testing.assert_close(model[leaf], value.double(), rtol=0, atol=1e-9)
    again = RunFolder.open(tmp_path / "run").read_result()
    for key, scores in result.scores.items():
        np.testing.assert_array_equal(again.scores[key].loss, scores.loss)
    with pytest.raises(ConfigError, match="not on the server"):
        result.model("ash")
    assert main(["status", str(tmp_path / "run")]) == 0


class Stops(Loopback):
    """Is interrupted after so many exchanges."""

    left = 11

    def exchange(self, messages: Any, deadline: float) -> dict[str, bytes]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().exchange(messages, deadline)


def test_a_server_that_was_stopped_continues(data: Path, tmp_path: Path) -> None:
    job = job_of(build(VALUES))
    straight = serve(job, answers(clients(data, tmp_path / "a")), NAMES, tmp_path / "straight")
    some = clients(data, tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        serve(job, Stops({n: c.answer for n, c in some.items()}), NAMES, tmp_path / "run")
    assert not RunFolder.open(tmp_path / "run").has_result
    result = serve(job, answers(clients(data, tmp_path / "b")), NAMES, tmp_path / "run")
    for key, scores in straight.scores.items():
        np.testing.assert_array_equal(result.scores[key].loss, scores.loss)
    unfinished = tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        serve(job, Stops({n: c.answer for n, c in some.items()}), NAMES, unfinished)
    with pytest.raises(ConfigError, match="was begun with the clients"):
        serve(job, answers(some), (*NAMES, "dogwood"), unfinished)


class OneByOne(Loopback):
    """Clients come one with every look at the door; somebody asks for the status each time."""

    def __init__(self, clients: Any, ask: Any) -> None:
        super().__init__(clients)
        self.looks, self.ask = 0, ask

    def present(self) -> frozenset[str]:
        self.looks += 1
        if self.looks > 1:
            self.ask()
        return frozenset(sorted(self.clients)[: self.looks - 1])


def test_a_server_that_waits_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status counts who has come before the first round, and is no error."""
    folder = tmp_path / "run"
    assert main(["status", str(folder)]) == 2
    assert "has no status.json" in capsys.readouterr().err
    reported: list[str] = []

    def ask() -> None:
        assert main(["status", str(folder)]) == 0
        reported.append(capsys.readouterr().out)

    some = {n: c.answer for n, c in clients(data, tmp_path / "home").items()}
    serve(job_of(build(VALUES)), OneByOne(some, ask), NAMES, folder, say=lambda text: None)
    first, second = reported[0], reported[1]
    assert "fedper: waiting for its first clients; 0 of 3 are there" in first
    assert "there: nobody" in first
    assert "missing: ash, birch, cedar" in first
    assert "1 of 3 are there" in second
    assert "missing: birch, cedar" in second
    ask()
    assert "fedper: done, round 4 of 4" in reported[-1]


class Away(Loopback):
    """Nobody is there as long as ``gone`` says so; somebody asks for the status meanwhile."""

    def __init__(self, clients: Any, ask: Any, gone: Any) -> None:
        super().__init__(clients)
        self.ask, self.gone = ask, gone

    def present(self) -> frozenset[str]:
        if not self.gone():
            return super().present()
        self.ask()
        return frozenset()


def test_a_server_that_waits_again_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restarted, or left alone between rounds, it waits; it does not show what it did before."""
    job, folder, reported = job_of(build(VALUES)), tmp_path / "run", []

    def ask() -> None:
        assert main(["status", str(folder)]) == 0
        reported.append(capsys.readouterr().out)

    some = {n: c.answer for n, c in clients(data, tmp_path / "home").items()}
    first = Stops(some)
    first.left = 6  # facts, hello, scores of the start, a round with its scores, and half a one
    with pytest.raises(KeyboardInterrupt):
        serve(job, first, NAMES, folder)
    ask()
    assert "fedper: stopped, round 1 of 4" in reported[-1]
    with pytest.raises(NetworkError, match="Only 0 of 3 clients came"):
        serve(job, Away(some, ask, lambda: True), NAMES, folder, patience=0.1)
    assert "waiting for clients, to resume after round 1 of 4; 0 of 3 are there" in reported[1]
    ask()
    assert "fedper: stopped, round 1 of 4" in reported[-1]
    reported.clear()

    def gone() -> bool:
        return len(reported) < 8 and read_json(folder / "status.json")["round"] == 3

    serve(job, Away(some, ask, gone), NAMES, folder)
    assert "waiting for clients, to resume after round 3 of 4; 0 of 1 are there" in reported[-1]
    assert "missing: ash, birch, cedar" in reported[-1]
    ask()
    assert "fedper: done, round 4 of 4" in reported[-1]


def test_a_server_for_which_nobody_came_leaves_nothing(tmp_path: Path) -> None:
    """Its folder is gone again; one that was there before stays, with what is in it."""
    job = job_of(build(VALUES))
    for place in ("new", "old"):
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / "notes.txt").write_text("mine")
        with pytest.raises(NetworkError, match="Only 0 of 3 clients came"):
            serve(job, Loopback({}), NAMES, tmp_path / place, patience=0.1)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes.txt"]


def test_a_run_keeps_the_clients_that_it_was_begun_with(data: Path, tmp_path: Path) -> None:
    """Whoever was withdrawn since keeps its place, and whoever was added since is reported."""
    reported: list[str] = []
    assert clients_of(tmp_path / "run", ["ash"], reported.append) == ["ash"]
    some = clients(data, tmp_path / "b")
    loop = Stops({n: c.answer for n, c in some.items()})
    with pytest.raises(KeyboardInterrupt):
        serve(job_of(build(VALUES)), loop, NAMES, tmp_path / "run")
    assert clients_of(tmp_path / "run", ["cedar", "ash"], reported.append) == list(NAMES)
    assert reported == []
    assert clients_of(tmp_path / "run", [*NAMES, "dogwood"], reported.append) == list(NAMES)
    assert "dogwood came to the project after" in reported[0]


def test_the_report_names_what_happened(data: Path, tmp_path: Path) -> None:
    some = clients(data, tmp_path / "home")

    def late(message: bytes) -> bytes:
        if b'"work\\"' in message or b'\\"kind\\": \\"work\\"' in message:
            raise ConnectionError
        return some["birch"].answer(message)

    loop = Loopback({**{n: c.answer for n, c in some.items()}, "birch": late})
    job = job_of(build({**VALUES, "participation": 1.0}))
    result = serve(job, loop, NAMES, tmp_path / "run")
    events = result.config["network"]["events"]
    assert [e["client"] for e in events] == ["birch"] * 4
    page = write_report(tmp_path / "run").read_text()
    assert "no answer in time" in page
    assert "What happened on the network" in page
    assert '<a href="#events">Network</a>' in page


def test_clients_that_do_not_fit_are_reported(data: Path, tmp_path: Path) -> None:
    np.savez(data / "cedar.npz", x=np.zeros((20, 7), dtype=np.float32), y=np.arange(20) % 2)
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.npz").write_bytes((data / f"{name}.npz").read_bytes())
    some = {
        name: Client(partial(own_data, tmp_path / name, name, None), built, None) for name in NAMES
    }
    with pytest.raises(NetworkError, match="samples differ"):
        serve(job_of(build(VALUES)), answers(some), NAMES, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_experiments_that_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match="one method"):
        job_of(build({**VALUES, "methods": "fedavg,fedper"}))
    with pytest.raises(ConfigError, match="harm_on"):
        job_of(build({**VALUES, "do_no_harm": True}))
    with pytest.raises(ConfigError, match="--class-weights 1,3"):
        job_of(build({**VALUES, "class_weights": "balanced"}))


def test_a_schedule_that_was_left_open_spans_the_rounds_of_the_server() -> None:
    """Clients are not sent the number of rounds, but the schedule that follows from it."""
    job = job_of(build({**VALUES, "rounds": 50, "lr_schedule": "cosine"}))
    assert job.settings["lr_schedule"] == "cosine:50"
    assert "rounds" not in job.settings
    open_ended = {k: v for k, v in VALUES.items() if k != "rounds"}
    assert job_of(build(open_ended)).rounds == 20


def test_adam_and_class_weights_over_a_network_are_those_of_one_process(
    data: Path, tmp_path: Path
) -> None:
    """The same experiment, served and fitted, ends in the same numbers."""
    more = {"optimizer": "adam", "lr": 0.01, "keep_optimiser": True, "class_weights": "1,2,5"}
    values = {**VALUES, "methods": "ditto", "participation": 1.0, **more}
    far = serve(
        job_of(build(values)), answers(clients(data, tmp_path / "home")), NAMES, tmp_path / "run"
    )
    federation = sartor.Federation.from_folder(data)
    local = sartor.Local(lr=0.01, optimizer="adam", keep_optimiser=True)
    near = sartor.fit(
        "ditto",
        federation,
        model=sartor.models.dnn(federation),
        rounds=4,
        local=local,
        class_weights=(1, 2, 5),
        dtype="float64",
        device="cpu",
        points=("pre",),
    )
    np.testing.assert_allclose(far.loss_curve()[1], near.loss_curve()[1], rtol=1e-9)


def test_taking_the_notice_away_leaves_what_others_put_there(tmp_path: Path) -> None:
    """A folder made for the notice goes with it, unless something else lies in it by then."""
    for name, more in (("empty", False), ("used", True)):
        out = tmp_path / name
        status = StatusFile(out, 3, "fedavg", NAMES)
        status.wait(wanted=3, there=["ash"])
        if more:
            (out / "mine.txt").write_text("stay")
        status.withdraw()
        assert out.exists() == more
        assert not (out / "status.json").exists()
