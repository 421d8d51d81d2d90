"""Clients that join a trained federation over messages get what `onboard` gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.cli import main
from sartor.cli.config import build
from sartor.cli.network import built, job_of, own_data
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, NetworkError
from sartor.core.method import Method, changed
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.engines.vectorised import Vectorised
from sartor.methods import METHODS
from sartor.network.client import Client
from sartor.network.coordinator import Coordinator
from sartor.network.messages import unpack
from sartor.network.newcomers import serve_newcomers
from sartor.network.serve import serve
from sartor.network.transport import Loopback
from sartor.results.scores import Run
from sartor.runs import RunFolder
from sartor.runs.storage import read_state
from sartor.training.driver import drive
from sartor.training.onboarding import newcomer_record, onboard
from tests.laws import Case
from tests.network.test_loopback import alone
from tests.toys import CPU, federation, net_task, run, simulation

QUICK = ("ditto", "fedapa", "pfedme", "lg-fedavg")
CASES = [Case(name) for name in METHODS]
CASES += [Case("ditto", {"do_no_harm": True, "harm_on": "holdout"})]


def receive(sim: Any, case: Case, late: Federation, rounds: int) -> Coordinator:
    """Take newcomers in by messages: each is a client of its own, which builds its own method."""

    def build_method(settings: Any, data: Federation) -> tuple[Method, Task]:
        task = net_task()
        return case.build(task), task

    clients = {
        name: Client(lambda split, i=i: alone(late, i), build_method)
        for i, name in enumerate(late.names)
    }
    record = newcomer_record(sim)
    record = record if rounds else changed(record, headline="pre")
    like = {"shape": list(late.input_shape), "labels": ["int64", []], "tokens": False}
    found = Coordinator(
        record,
        net_task(),
        late.names,
        Run(seed=0, hyper={k: float(np.mean(v)) for k, v in sim.runs[0].hyper.items()}),
        lambda arena: Vectorised(arena, 1 << 20),
        Loopback({name: client.answer for name, client in clients.items()}),
        like=like,
        federation="toy",
        settings={},
        common={"newcomer": [sim.context.arena.num_clients, sim.round_index]},
        rounds=rounds,
        participation=Participation(),
        device=CPU,
        dtype=torch.float64,
        points=tuple(dict.fromkeys(("pre", record.use.headline))),
    )
    drive(found.simulation)
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=[] if c.method in QUICK else pytest.mark.slow)
        for c in CASES
    ],
)
def test_newcomers_over_messages_get_what_onboard_gives(case: Case) -> None:
    """Scores after every round, and nothing is uploaded; 0 rounds and 2."""
    task, fed = net_task(), federation()
    sim = run(simulation(case.build(task), task, [fed.without(3, 4)], hyper=case.hyper))
    late = fed.without(0, 1, 2)
    for rounds in (0, 2):
        wanted = onboard(sim, late, rounds=rounds)
        found = receive(sim, case, late, rounds)
        assert found.dispatcher.events == []
        assert found.simulation.scores().keys() == wanted.scores.keys()
        for key, scores in found.simulation.scores().items():
            np.testing.assert_allclose(scores.loss, wanted.scores[key].loss, atol=1e-10)
            np.testing.assert_array_equal(scores.correct, wanted.scores[key].correct)
        assert found.simulation.ledger().bytes_up.sum() == 0
        assert found.simulation.ledger().bytes_down.tolist() == wanted.ledger.bytes_down.tolist()


NAMES = ("ash", "birch", "cedar")
VALUES: dict[str, Any] = {
    "methods": "ditto",
    "rounds": 3,
    "lr": 0.2,
    "model": "dnn",
    "points": "pre",
    "dtype": "float64",
    "device": "cpu",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        y = np.concatenate([np.arange(3), draw.integers(0, 3, 21 + 6 * i)])
        x = draw.normal(size=(len(y), 5)) + np.eye(5)[y]
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=y)
    return folder


def loop(data: Path, home: Path, names: tuple[str, ...], up: list[bytes]) -> Loopback:
    clients = {
        name: Client(lambda split, name=name: own_data(data, name, None, split), built, home / name)
        for name in names
    }

    def watch(direction: str, name: str, message: bytes) -> None:
        up.extend([message] if direction == "up" else [])

    return Loopback({name: client.answer for name, client in clients.items()}, watch)


class Asked(Loopback):
    """Nobody is at the door at the first look; somebody asks for the status at every one."""

    def __init__(self, clients: Any, ask: Any) -> None:
        super().__init__(clients)
        self.looks, self.ask = 0, ask

    def present(self) -> frozenset[str]:
        self.looks += 1
        self.ask()
        return super().present() if self.looks > 1 else frozenset()


def test_the_status_tells_of_newcomers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who waits for newcomers, serves them or has stopped does not show what training left."""
    job, out, reported = job_of(build(VALUES)), tmp_path / "run", []

    def ask() -> None:
        assert main(["status", str(out)]) == 0
        reported.append(capsys.readouterr().out)

    serve(job, loop(data, tmp_path / "home", NAMES[:2], []), NAMES[:2], out)
    ask()
    assert "ditto: done, round 3 of 3" in reported.pop()
    late = loop(data, tmp_path / "home", NAMES[2:], [])
    serve_newcomers(job, Asked(late.clients, ask), NAMES[2:], out, rounds=2)
    assert any(
        "ditto: training is done; waiting for newcomers, 0 of 1 are there" in text
        and "missing: cedar" in text
        for text in reported
    )
    assert any(
        "ditto: training is done; serving newcomers, round 1 of 2" in text
        and "there: cedar" in text
        for text in reported
    )
    ask()
    assert "ditto: training is done; newcomers served, round 2 of 2" in reported[-1]
    with pytest.raises(NetworkError, match="Only 0 of 1 clients came"):
        serve_newcomers(job, Loopback({}), NAMES[2:], out, patience=0.1)
    ask()
    assert (
        "ditto: training is done; stopped while it served newcomers, round 0 of 5" in reported[-1]
    )


def test_a_newcomer_of_a_run_folder(data: Path, tmp_path: Path) -> None:
    """The whole way: a federation of two trains, and a third client comes when it is over."""
    job, out = job_of(build(VALUES)), tmp_path / "run"
    with pytest.raises(Exception, match="run"):
        serve_newcomers(job, loop(data, tmp_path, NAMES[2:], []), NAMES[2:], out)
    serve(job, loop(data, tmp_path / "home", NAMES[:2], []), NAMES[:2], out)
    before = RunFolder.open(out).read_checkpoint()
    sent: list[bytes] = []
    late = loop(data, tmp_path / "home", NAMES[2:], sent)
    result = serve_newcomers(job, late, NAMES[2:], out, rounds=2)
    fed = Federation.from_folder(data)
    wanted = sartor.fit(
        "ditto",
        fed.without("cedar"),
        model=sartor.models.dnn(fed),
        rounds=3,
        local=sartor.Local(lr=0.2),
        points=("pre",),
        dtype="float64",
        device="cpu",
    ).onboard(fed.without("ash", "birch"), rounds=2)
    scores = result.scores["pre", "test"]
    np.testing.assert_allclose(scores.loss, wanted.scores["pre", "test"].loss, atol=1e-10)
    (path,) = (tmp_path / "home" / "cedar").glob("*/model.safetensors")
    model, _ = read_state(path)
    for leaf, value in wanted.model("cedar").state_dict().items():
        torch.testing.assert_close(model[leaf], value.double(), rtol=0, atol=1e-9)
    assert all(not unpack(answer)[0].get("upload") for answer in sent)
    after = RunFolder.open(out).read_checkpoint()
    assert before is not None
    assert after is not None
    assert before[0] == after[0]
    again = RunFolder.open(out / "newcomers").read_result()
    assert again.clients == ("cedar",)
    with pytest.raises(ConfigError, match="ash cannot be a newcomer"):
        serve_newcomers(job, late, ("ash",), out)
    np.savez(data / "cedar.npz", x=np.zeros((20, 7), dtype=np.float32), y=np.arange(20) % 3)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "cedar.npz").write_bytes((data / "cedar.npz").read_bytes())
    with pytest.raises(NetworkError, match="Only 0 of 1 clients came"):
        serve_newcomers(job, loop(strange, tmp_path, NAMES[2:], []), NAMES[2:], out, patience=0.2)
