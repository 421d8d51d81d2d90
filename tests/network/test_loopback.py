"""A federation of separate clients that exchange bytes gives the numbers of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.method import Method, changed
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.engines.vectorised import Vectorised
from sartor.network.client import Client
from sartor.network.coordinator import Coordinator
from sartor.network.messages import unpack
from sartor.network.transport import Loopback
from sartor.results.headline import chosen_metric
from sartor.results.scores import COUNTERS, ONCE, Run
from sartor.runs.archive import to_numpy
from sartor.runs.storage import read_state, write_state
from sartor.training.settings import measured_by
from tests.laws import CASES, Case
from tests.toys import CPU, Frozen, assert_same, federation, net_task, outcome, run, simulation

SIZES = (3, 7, 5, 9)


def alone(fed: Federation, client: int) -> Federation:
    """Return the federation of one client, with its own samples and nothing else."""
    others = [i for i in range(fed.num_clients) if i != client]
    one = fed.without(*others)
    rows = {s: one.split(s).of(0) for s in ("train", "val", "test")}
    order = torch.cat([torch.as_tensor(r) for r in rows.values()])
    lists, filled = {}, 0
    for split, part in rows.items():
        lists[split] = type(fed.train).from_lists([np.arange(filled, filled + len(part))])
        filled += len(part)
    return Federation(
        fed.x[order], fed.y[order], names=one.names, num_classes=fed.num_classes, **lists
    )


def clients_of(
    case: Case,
    fed: Federation,
    folder: Path | None = None,
    make: Callable[[], Task] = net_task,
) -> dict[str, Client]:
    """Make separate clients: each builds a method and a task of its own."""

    def build(settings: Any, data: Federation) -> tuple[Method, Task]:
        task = make()
        return case.build(task), task

    return {
        name: Client(lambda split, i=i: alone(fed, i), build, folder and folder / name)  # type: ignore[misc]
        for i, name in enumerate(fed.names)
    }


def coordinator(
    case: Case,
    fed: Federation,
    transport: Any,
    method: Method | None = None,
    make: Callable[[], Task] = net_task,
    **settings: Any,
) -> Coordinator:
    task = make()
    method = method or case.build(task)
    hyper = {k: spec.default for k, spec in method.hyper.items()} | case.hyper
    settings = {
        "rounds": 3,
        "participation": Participation.parse("at_least:0.6"),
        "points": ("pre", "post", "global"),
        "dtype": torch.float64,
        **settings,
    }
    return Coordinator(
        method,
        task,
        fed.names,
        Run(seed=0, hyper=hyper),
        lambda arena: Vectorised(arena, 1 << 20),
        transport,
        federation="toy",
        settings={},
        device=CPU,
        **settings,
    )


def trained(server: Coordinator) -> Coordinator:
    """Run all rounds that are left."""
    run(server.simulation)
    return server


def found(server: Coordinator, clients: dict[str, Client]) -> dict[str, np.ndarray]:
    """Return what a run over a network left behind, on the server and at its clients."""
    sim = server.simulation
    leaves = {f"server/{k}": v for k, v in tree.items(sim.server)}
    states = []
    for i, client in enumerate(clients.values()):
        base, work = int(server.numbers.base[i]), client.work
        kept = (
            work.states.read(base)
            if base
            else {"client": work.context.new_clients(work.params, work.ids)}
        )
        states.append(kept)
    kept = tree.cat([s["client"] for s in states], 1)
    leaves |= {f"client/{k}": v for k, v in tree.items(kept)}
    if sim.trained is not None:
        models = tree.cat([s["trained"] for s in states], 1)
        leaves |= {f"trained/{k}": v for k, v in tree.items(models)}
    out = {k: v.detach().numpy().copy() for k, v in leaves.items()}
    for (point, split), scores in sim.scores().items():
        out |= {f"{point}/{split}/correct": scores.correct, f"{point}/{split}/loss": scores.loss}
    ledger = sim.ledger()
    out |= {name: getattr(ledger, name) for name in (*COUNTERS, *ONCE)}
    for k, snap in enumerate(sim.log.snapshots):
        out |= {f"snap/{k}/{name}": np.asarray(v) for name, v in snap.items()}
        for name in (
            next(iter(clients.values())).seen[k] if next(iter(clients.values())).seen else ()
        ):
            if name != "round":
                rows = [np.asarray(c.seen[k][name], dtype=np.float32) for c in clients.values()]
                out[f"snap/{k}/{name}"] = np.stack(rows)[None]
    return out


def check_same(
    case: Case,
    folder: Path | None = None,
    make: Callable[[], Task] | None = None,
    **settings: Any,
) -> None:
    make = make or case.task
    fed = federation() if "client_weights" in case.options else federation(sizes=SIZES)
    clients = clients_of(case, fed, folder, make)
    loop = Loopback({name: client.answer for name, client in clients.items()})
    sim = coordinator(case, fed, loop, make=make, **settings)
    trained(sim)
    assert sim.dispatcher.events == []
    task = make()
    settings = {"points": ("pre", "post", "global"), **settings}
    if "participation" not in settings:
        settings["participation"] = "at_least:0.6"
    wanted = run(simulation(case.build(task), task, [fed], hyper=case.hyper, **settings))
    assert_same(found(sim, clients), outcome(wanted), atol=1e-10)


@pytest.mark.parametrize("name", ["fedprox", "fedper", "fedgh"])
def test_frozen_parts_are_every_clients_own(name: str) -> None:
    """Clients and server bring the same frozen layer, which is in no message."""
    torch.manual_seed(2)
    frozen = Frozen()
    check_same(Case(name), make=lambda: Task(frozen, head="fc"))


def test_other_frozen_parts_are_refused() -> None:
    """A client that brings another frozen layer does not train with the others, and is named."""
    fed, case = federation(sizes=SIZES), Case("fedavg")
    torch.manual_seed(2)
    right, wrong = Frozen(), Frozen()
    clients = clients_of(case, fed, make=lambda: Task(right, head="fc"))
    odd = clients_of(case, fed, make=lambda: Task(wrong, head="fc"))["c1"]
    loop = Loopback({name: client.answer for name, client in (clients | {"c1": odd}).items()})
    sim = coordinator(case, fed, loop, make=lambda: Task(right, head="fc"), rounds=1, quorum=3)
    trained(sim)
    reported = [event for event in sim.dispatcher.events if "other weights" in str(event)]
    assert {event["client"] for event in reported} == {"c1"}
    assert len(reported) == len({event["round"] for event in reported})  # not at every hello
    assert len(odd.seen) == 0


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[] if c.is_default else pytest.mark.slow) for c in CASES],
)
def test_separate_clients_give_the_numbers_of_the_simulation(case: Case) -> None:
    check_same(case)


def test_clients_report_the_measure_that_they_are_compared_by() -> None:
    """Each works out the AUROC of its own samples; the server takes what the simulation has."""

    def make() -> Task:
        metric = chosen_metric("classification", "auroc")
        return replace(net_task(), measure=measured_by(metric, "classification"))

    case, fed = Case("fedavg"), federation(sizes=SIZES)
    clients = clients_of(case, fed, make=make)
    loop = Loopback({name: client.answer for name, client in clients.items()})
    server = trained(coordinator(case, fed, loop, make=make, points=("pre",), measure="auroc"))
    task = make()
    settings = {"points": ("pre",), "participation": "at_least:0.6"}
    alike = run(simulation(case.build(task), task, [fed], **settings))
    found, wanted = (s.scores()["pre", "test"].measured for s in (server.simulation, alike))
    assert found is not None
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_single_precision_gives_the_numbers_of_the_simulation() -> None:
    """Float32, one lane against four at once: the last bits may differ, 1e-5 must not."""
    case, fed = Case("fedapa", hyper={"mix_lr": 0.5}), federation(sizes=SIZES)
    clients = clients_of(case, fed)
    loop = Loopback({name: client.answer for name, client in clients.items()})
    sim = trained(coordinator(case, fed, loop, dtype=torch.float32))
    task = net_task()
    points = ("pre", "post", "global")
    wanted = run(
        simulation(
            case.build(task), task, [fed], hyper=case.hyper, dtype=torch.float32, points=points
        )
    )
    assert_same(found(sim, clients), outcome(wanted), atol=1e-5)


class Lossy(Loopback):
    """Loses every third answer, after the client has done its work."""

    count = 0

    def exchange(self, messages: Any, deadline: float) -> dict[str, bytes]:
        answers = super().exchange(messages, deadline)
        kept = {}
        for name, data in answers.items():
            if unpack(messages[name])[1]["kind"] == "work":
                self.count += 1
                if self.count % 3 == 0:
                    continue
            kept[name] = data
        return kept


def replayed(case: Case, fed: Federation, attended: list[dict[str, Any]], **settings: Any) -> Any:
    """Run the simulation with the participation that a federation recorded."""
    task = net_task()
    settings = {"points": ("pre", "post", "global"), **settings}
    sim = simulation(case.build(task), task, [fed], hyper=case.hyper, **settings)
    record = iter(attended)

    def attendance(order: Any) -> np.ndarray:
        there = next(record)["there"]
        return np.isin(order.cohort, there) | ~order.trains

    sim.clients.attendance = attendance  # type: ignore[attr-defined]
    return run(sim)


@pytest.mark.parametrize(
    "name",
    [
        *("fedapa", "scaffold", "lg-fedavg"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "ditto", "fedpac")),
    ],
)
def test_a_lost_answer_is_as_if_the_client_had_not_been_asked(name: str, tmp_path: Path) -> None:
    """Clients whose answers are lost continue from the state of before; so does the server."""
    case, fed = Case(name), federation(sizes=SIZES)
    clients = clients_of(case, fed, tmp_path)
    sim = trained(
        coordinator(case, fed, Lossy({name: c.answer for name, c in clients.items()}), rounds=4)
    )
    assert {event["why"] for event in sim.dispatcher.events} == {"no answer in time"}
    wanted = replayed(case, fed, sim.dispatcher.attended, rounds=4)
    assert_same(found(sim, clients), outcome(wanted), atol=1e-10)


@pytest.mark.parametrize(
    "name", ["fedapa", "fedrep", pytest.param("pfedme", marks=pytest.mark.slow)]
)
def test_restarts_of_server_and_clients_change_nothing(name: str, tmp_path: Path) -> None:
    """A server goes back to its checkpoint and its clients follow, to the bit."""
    case, fed = Case(name), federation(sizes=SIZES)
    straight_clients = clients_of(case, fed, tmp_path / "a")
    straight = coordinator(
        case, fed, Loopback({n: c.answer for n, c in straight_clients.items()}), rounds=6
    )
    wanted = found(trained(straight), straight_clients)

    clients = clients_of(case, fed, tmp_path / "b")
    loop = Loopback({n: c.answer for n, c in clients.items()})
    first = coordinator(case, fed, loop, rounds=6)
    for _ in range(2):
        first.simulation.step()
        state = first.state()
        first.saved()
    write_state(tmp_path / "state", {"trees": state[0], "arrays": state[1]}, state[2])
    first.simulation.step()  # lost with the server
    clients = clients_of(case, fed, tmp_path / "b")  # the clients' processes begin anew
    loop = Loopback({n: c.answer for n, c in clients.items()})
    second = coordinator(case, fed, loop, rounds=6)
    read, meta = read_state(tmp_path / "state")
    second.load(read["trees"], to_numpy(read["arrays"]), meta)
    second.simulation.step()
    name = fed.names[1]
    clients[name] = clients_of(case, fed, tmp_path / "b")[name]  # and one of them once more
    loop.clients[name] = clients[name].answer
    while not second.simulation.finished:
        second.simulation.step()
        second.saved()
    got = found(second, clients)
    assert second.dispatcher.events == []
    assert_same(
        {k: v for k, v in got.items() if "snap" not in k},
        {k: v for k, v in wanted.items() if "snap" not in k},
    )
    states = list((tmp_path / "b" / name / "toy").iterdir())
    assert 0 < len(states) <= 3, "old states are dropped"


def test_only_what_a_method_uploads_reaches_the_server(tmp_path: Path) -> None:
    """Every byte that the server received: no private leaf, by name or by value."""
    case, fed = Case("fedrep"), federation(sizes=SIZES)
    clients = clients_of(case, fed, tmp_path)
    got: list[bytes] = []

    def watch(direction: str, name: str, data: bytes) -> None:
        got.extend([data] if direction == "up" else [])

    loop = Loopback({n: c.answer for n, c in clients.items()}, watch)
    sim = trained(coordinator(case, fed, loop))
    method = sim.simulation.method
    uploads = [unpack(data) for data in got]
    names = {leaf for body, _ in uploads for leaf, _ in tree.items(body)}
    assert names
    assert not any(method.wire.private(part) for leaf in names for part in leaf.split("/"))
    private = [
        leaf.flatten().numpy().tobytes()
        for client in clients.values()
        for number in client.work.states.numbers()
        for key, leaf in tree.items(client.work.states.read(number)["client"])
        if any(method.wire.private(part) for part in key.split("/"))
    ]
    assert private
    for secret in private:
        assert not any(secret in data for data in got)
    samples = [row.numpy().tobytes() for row in fed.x.double()]
    assert not any(sample in data for sample in samples for data in got)


def test_a_client_that_leaks_is_stopped_on_its_own_machine() -> None:
    """The check stands at the seam: the leak never becomes bytes."""
    fed = federation(sizes=SIZES)
    case = Case("fedrep")

    def build(settings: Any, data: Federation) -> tuple[Method, Task]:
        task = net_task()
        method = case.build(task)

        def finish(client: Any, work: Any, ctx: Any) -> Any:
            kept, upload = method.finish(client, work, ctx)
            return kept, {
                **upload,
                "extra": {"fc.weight": method.use.model(work, ctx)["fc.weight"]},
            }

        return changed(method, finish=finish), task

    clients = clients_of(case, fed)
    clients["c1"] = Client(lambda split: alone(fed, 1), build)
    loop = Loopback({n: c.answer for n, c in clients.items()})
    sim = trained(coordinator(case, fed, loop, participation=Participation.parse("all")))
    assert {event["client"] for event in sim.dispatcher.events} == {"c1"}
    assert "private leaf" in sim.dispatcher.events[0]["why"]
