"""Faults of a federation of real processes: each costs what it must, and no more."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("nvflare") is None:
    pytest.skip("needs nvflare: pip install 'sartor[network]'", allow_module_level=True)

import sartor
from sartor.cli import main
from sartor.cli.config import build
from sartor.cli.network import built, job_of
from sartor.core import tree
from sartor.network import keys
from sartor.training.simulation import Simulation
from tests.network.federation import Federation, ended_kit

pytestmark = pytest.mark.network


def replay(fed: Federation) -> Simulation:
    """Run the same experiment in one process, with the participation that the server recorded."""
    from sartor.data.federation import Federation as Data
    from sartor.engines.vectorised import Vectorised

    values = {k: v for k, v in fed.settings.items() if k != "method"}
    experiment = build({"methods": fed.settings["method"], **values})
    job = job_of(experiment)
    data = Data.from_folder(fed.folder / "all", seed=experiment.seed, test=experiment.test)
    method, task = built(job.settings, data)
    sim = Simulation(
        method,
        task,
        [data],
        [job.run_of(method)],
        lambda arena: Vectorised(arena, 1),
        rounds=job.rounds,
        participation=job.participation,
        device=job.device,
        dtype=job.dtype,
        points=job.points,
    )
    record = iter(fed.checkpoint()[3]["attended"])

    def attendance(order: Any) -> np.ndarray:
        return np.isin(order.cohort, next(record)["there"]) | ~order.trains

    sim.clients.attendance = attendance  # type: ignore[attr-defined]
    while not sim.finished:
        sim.step()
    return sim


def assert_replayed(fed: Federation, exact: bool = True) -> None:
    """The server's last state is that of the simulation with the same participation, to the bit."""
    wanted = dict(tree.items(replay(fed).server))
    found = dict(tree.items(fed.checkpoint()[1]["server"]))
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        if exact:
            assert torch.equal(found[name], leaf), name
        else:
            torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-5)


def test_a_federation_of_processes_is_the_simulation(tmp_path: Path) -> None:
    """Three processes and a server: the numbers of one process, and every model at its client."""
    with Federation(tmp_path, method="fedper", rounds=4) as fed:
        server = fed.serve()
        clients = [fed.join(name) for name in fed.names]
        result = fed.finish(server)
        assert [client.wait(30) for client in clients] == [0, 0, 0]
        assert fed.events(result) == []
        sim = replay(fed)
        assert_replayed(fed, exact=False)
        np.testing.assert_allclose(
            result.scores["pre", "test"].loss, sim.scores()["pre", "test"].loss, atol=1e-4
        )
        for i, name in enumerate(fed.names):
            (path,) = (tmp_path / f"state-{name}").glob("*/model.safetensors")
            model, _ = sartor.runs.storage.read_state(path)
            for leaf, value in sim.params(i).items():
                torch.testing.assert_close(model[leaf], value, rtol=0, atol=1e-5)


def test_a_newcomer_gets_a_model_when_training_is_over(tmp_path: Path) -> None:
    """The clients that trained are gone; the newcomer's kit was made after the end."""
    with Federation(tmp_path, clients=2, method="ditto", rounds=3) as fed:
        server = fed.serve()
        for name in fed.names:
            fed.join(name)
        fed.finish(server)
        keys.add_client(tmp_path / "keys", "site-3")
        (tmp_path / "site-3").mkdir()
        shutil.copy(tmp_path / "site-1" / "site-1.npz", tmp_path / "site-3" / "site-3.npz")
        server, late = fed.serve(newcomers="site-3", newcomer_rounds=2), fed.join("site-3")
        assert server.wait(90) == 0, fed.logs()
        assert late.wait(30) == 0
        assert len(list((tmp_path / "state-site-3").glob("*/model.safetensors"))) == 1
        result = sartor.runs.RunFolder.open(tmp_path / "run" / "newcomers").read_result()
        assert result.clients == ("site-3",)
        assert result.ledger.bytes_up.sum() == 0


def test_a_client_killed_in_a_round_comes_back(tmp_path: Path) -> None:
    with Federation(tmp_path, rounds=30) as fed:
        server = fed.serve()
        clients = {name: fed.join(name, paced=True) for name in fed.names}
        fed.reach(3)
        clients["site-2"].kill()
        killed, before = time.monotonic(), clients["site-2"].text.count("registered with")
        clients["site-2"] = fed.join("site-2", paced=True)
        fed.until(lambda: clients["site-2"].text.count("registered with") > before)
        fed.until(lambda: "trained" in clients["site-2"].text.split("registered with")[-1])
        assert time.monotonic() - killed < 30
        fed.hurry()
        result = fed.finish(server)
        assert {event["client"] for event in fed.events(result)} == {"site-2"}
        assert_replayed(fed, exact=False)


def test_a_killed_server_continues_where_it_was(tmp_path: Path) -> None:
    with Federation(tmp_path, method="ditto", rounds=12) as fed:
        server = fed.serve()
        clients = [fed.join(name, paced=True) for name in fed.names]
        fed.reach(4)
        server.kill()
        killed, before = time.monotonic(), fed.status()["round"]
        server = fed.serve()
        fed.until(lambda: fed.status()["round"] > before)
        assert time.monotonic() - killed < 30
        fed.hurry()
        result = fed.finish(server)
        assert [client.wait(30) for client in clients] == [0, 0, 0]
        assert fed.events(result) == []
        assert_replayed(fed, exact=False)


def test_a_client_that_is_too_slow_is_left_out(tmp_path: Path) -> None:
    with Federation(tmp_path, rounds=30) as fed:
        server = fed.serve(deadline=4.0)
        clients = {name: fed.join(name, paced=name == "site-1") for name in fed.names}
        fed.reach(2)
        slow = clients["site-3"]
        slow.kill(signal.SIGSTOP)
        fed.until(lambda: any(e["client"] == "site-3" for e in fed.status()["events"]))
        before = slow.text.count("trained")
        slow.kill(signal.SIGCONT)
        awake = time.monotonic()
        fed.until(lambda: slow.text.count("trained") > before + 1)
        assert time.monotonic() - awake < 30
        fed.hurry()
        result = fed.finish(server)
        late = [e["why"] for e in fed.events(result) if e["client"] == "site-3"]
        assert "no answer in time" in late
        assert_replayed(fed, exact=False)


def test_a_client_joins_late_and_another_leaves_for_good(tmp_path: Path) -> None:
    with Federation(tmp_path, rounds=30) as fed:
        late = fed.join("site-3")
        fed.until(lambda: "waiting for the server" in late.text)
        late.kill(signal.SIGSTOP)
        server = fed.serve(quorum=2)
        clients = {name: fed.join(name, paced=True) for name in fed.names[:2]}
        fed.reach(3)
        late.kill(signal.SIGCONT)
        came = time.monotonic()
        fed.until(lambda: "trained" in late.text)
        assert time.monotonic() - came < 30
        fed.until(lambda: late.text.count("trained") > 1)  # a round of all three is over
        clients["site-1"].kill()
        fed.hurry()
        result = fed.finish(server)
        seen = [set(a["there"]) for a in fed.checkpoint()[3]["attended"]]
        assert seen[0] == {0, 1}
        assert {0, 1, 2} in seen
        assert seen[-1] == {1, 2}
        assert any(e["client"] == "site-1" for e in fed.events(result))


def test_a_second_process_with_one_identity_is_turned_away(tmp_path: Path) -> None:
    with Federation(tmp_path, rounds=30) as fed:
        server = fed.serve()
        for name in fed.names:
            fed.join(name, paced=name == "site-2")
        fed.reach(1)
        twin = fed.start(
            "twin",
            ["-m", "sartor", "join", "keys/clients/site-1", "--data", "site-1", "--state", "twin"],
        )
        assert twin.wait(60) == 2
        assert "another process is connected as site-1" in twin.text
        fed.hurry()
        result = fed.finish(server)
        (event,) = fed.events(result)
        assert event["kind"] == "door"
        assert all(len(a["there"]) == 3 for a in fed.checkpoint()[3]["attended"])


TAMPER = """
import sys, torch
from pathlib import Path
from sartor.cli.network import built, own_data
from sartor.network.client import Client
from sartor.network.flare_client import FlareClient
from sartor.network.keys import read_kit
from sartor.network.messages import pack, unpack
name, kind = sys.argv[1:]
client = Client(lambda split: own_data(Path(name), name, None, split), built, Path("state-" + name))
count = 0
def answer(message):
    global count
    data = client.answer(message)
    if unpack(message)[1]["kind"] != "work":
        return data
    body, meta = unpack(data)
    count += 1
    first = next(iter(body["upload"]))
    leaf = body["upload"][first]
    how = kind if kind != "all" else ("nan", "shape", "large", "cut")[(count - 1) % 4]
    if how == "cut":
        return data[: len(data) // 2]
    change = {"nan": leaf * torch.nan, "shape": leaf[None], "large": torch.ones(1 << 20)}[how]
    return pack({"upload": {**body["upload"], first: change}}, meta)
FlareClient(read_kit("keys/clients/" + name), answer).run()
"""


def test_bad_updates_are_refused_and_cost_only_themselves(tmp_path: Path) -> None:
    """NaN, wrong shapes, absurdly large, cut short: one after the other, from one client."""
    with Federation(tmp_path, rounds=8) as fed:
        server = fed.serve()
        for name in fed.names[:2]:
            fed.join(name)
        (tmp_path / "tamper.py").write_text(TAMPER)
        fed.start("bad", ["tamper.py", "site-3", "all"])
        result = fed.finish(server)
        events = fed.events(result)
        assert [event["client"] for event in events] == ["site-3"] * 8
        words = ("not finite", "shape", "the limit is", "cannot be read")
        for event, word in zip(events, words * 2, strict=True):  # and no order is done twice
            assert word in event["why"]
        assert_replayed(fed, exact=False)


def test_a_client_whose_disk_is_full_is_absent(tmp_path: Path) -> None:
    """It says so and keeps its state, the others continue; with space it takes part again."""
    with Federation(tmp_path, method="ditto", rounds=30) as fed:
        server = fed.serve()
        for name in fed.names[:2]:
            fed.join(name, paced=True)
        full = fed.join("site-3", limit=2000)
        fed.reach(2)
        assert list((tmp_path / "state-site-3").glob("*/state-*")) == []
        full.free_disk()
        freed = time.monotonic()
        fed.until(lambda: bool(list((tmp_path / "state-site-3").glob("*/state-*.safetensors"))))
        assert time.monotonic() - freed < 30
        fed.hurry()
        result = fed.finish(server)
        assert {event["client"] for event in fed.events(result)} == {"site-3"}
        assert "cannot keep its state" in fed.events(result)[0]["why"]
        seen = [set(a["there"]) for a in fed.checkpoint()[3]["attended"]]
        assert seen[0] == {0, 1}
        assert seen[-1] == {0, 1, 2}
        assert_replayed(fed, exact=False)


# ---- who gets in

STRANGER = """
import sys
from dataclasses import replace
from sartor.network import flare_client
from sartor.network.keys import read_kit
flare_client.check_valid = lambda kit: None  # a client of its own making checks nothing
for folder, name in (word.split("=") for word in sys.argv[1:]):
    try:
        kit = replace(read_kit(folder), identity=name)
        print(name, flare_client.FlareClient(kit, bytes, patience=4).run())
    except Exception as error:
        print(name, error)
"""


def test_strangers_do_not_get_in(tmp_path: Path) -> None:
    """A foreign authority, a certificate that has ended, a name that is not listed, another's name.

    Clients that get no connection learn it on their own side; the server hears nothing.
    """
    with Federation(tmp_path, clients=2) as fed:
        server = fed.serve()
        fed.join("site-1")
        fed.until(lambda: "waiting for 2 of 2 clients" in server.text)
        foreign = tmp_path / "foreign"
        keys.init_project(foreign, address=f"127.0.0.1:{fed.port}", clients=["site-2"])
        ended_kit(tmp_path / "keys", tmp_path / "ended")
        keys.add_client(tmp_path / "keys", "site-9")
        (tmp_path / "stranger.py").write_text(STRANGER)
        kits = "keys/clients"
        attempts = ["foreign/clients/site-2=site-2", "ended=site-1", f"{kits}/site-1=site-2"]
        party = fed.start("stranger", ["stranger.py", *attempts, f"{kits}/site-9=site-9"])
        assert party.wait(90) == 0
        foreigner, ended, pretender, listed = party.text.splitlines()
        for line in (foreigner, pretender):
            assert line.startswith(f"site-2 No connection to 127.0.0.1:{fed.port}")
        assert "cert is not valid" in ended  # the layer below has looked at it as well
        assert listed.startswith("site-9 The server refuses: site-9 is not a client")
        fed.join("site-2")
        result = fed.finish(server)
        (event,) = fed.events(result)
        assert (event["client"], event["kind"]) == ("site-9", "door")
        assert all(a["there"] == [0, 1] for a in fed.checkpoint()[3]["attended"])
        assert_replayed(fed, exact=False)


def test_a_withdrawn_certificate_is_refused_while_the_server_runs(tmp_path: Path) -> None:
    """Its owner is out at once and cannot come back; a new kit for the same client opens."""
    with Federation(tmp_path, method="ditto", rounds=45) as fed:
        server = fed.serve()
        clients = {name: fed.join(name, paced=name == "site-1") for name in fed.names}
        fed.reach(2)
        stolen = tmp_path / "stolen"
        shutil.copytree(tmp_path / "keys" / "clients" / "site-2", stolen)
        assert main(["keys", "revoke", "site-2", "--keys", str(tmp_path / "keys")]) == 0
        assert clients["site-2"].wait(30) == 2
        assert "the certificate of site-2 was withdrawn" in clients["site-2"].text
        fed.until(lambda: "site-2" not in fed.status()["there"])
        thief = fed.start(
            "thief", ["-m", "sartor", "join", str(stolen), "--data", "site-2", "--state", "thief"]
        )
        assert thief.wait(60) == 2
        assert "was withdrawn" in thief.text
        assert not (tmp_path / "thief").exists()
        keys.add_client(tmp_path / "keys", "site-2")
        again = fed.join("site-2")
        fed.until(lambda: again.text.count("registered with") == 2)
        fed.until(lambda: "trained" in again.text.split("registered with")[-1])
        fed.hurry()
        result = fed.finish(server)
        assert {(e["client"], e["kind"]) for e in fed.events(result)} >= {("site-2", "door")}
        seen = [set(a["there"]) for a in fed.checkpoint()[3]["attended"]]
        assert {0, 2} in seen
        assert seen[0] == seen[-1] == {0, 1, 2}
        assert_replayed(fed, exact=False)


def test_random_kills_do_not_change_the_outcome(tmp_path: Path) -> None:
    """Kill -9 of a client or the server, again and again: the right number of rounds, to the bit.

    SARTOR_KILLS="ROUNDS GAP" makes it longer: rounds, and rounds between kills.
    """
    rounds, gap = map(float, os.environ.get("SARTOR_KILLS", "60 10").split())
    draw = np.random.default_rng(3)
    with Federation(tmp_path, method="ditto", rounds=int(rounds), epochs=60) as fed:
        server = fed.serve(patience=120)
        clients = {name: fed.join(name) for name in fed.names}
        kills, turn = 0, [3]
        after = 2
        while after < rounds - 3:
            fed.reach(after)
            turn = turn or draw.permutation(4).tolist()  # each of them, in random order
            who = turn.pop()
            kills += 1
            if who == 3:
                server.kill()
                server = fed.serve(patience=120)
            else:
                name = fed.names[who]
                clients[name].kill()
                clients[name] = fed.join(name)
            after += max(1, round(gap * draw.uniform(0.7, 1.3)))
        fed.finish(server, 300)
        assert kills > 3
        assert_replayed(fed)
