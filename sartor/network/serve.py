"""The server's work from the first client to the last round: facts, rounds, checkpoints, models.

A server that was stopped or killed resumes from its last checkpoint when it is started again with
the same folder; its clients follow, because every order says from which state to resume.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, NetworkError
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines.vectorised import Vectorised
from sartor.network.admission import Admission
from sartor.network.client import Build
from sartor.network.coordinator import Coordinator
from sartor.network.dispatch import Dispatcher
from sartor.network.registration import Waits
from sartor.network.remote_data import read_facts
from sartor.network.status import StatusFile
from sartor.network.transport import Transport
from sartor.results.result import Result
from sartor.results.scores import Run
from sartor.runs import RunFolder
from sartor.training.driver import drive
from sartor.training.onboarding import result_of
from sartor.training.progress import Progress

GRACE = 10.0
"""Seconds that clients have to come back to a server that was restarted."""


class Shape(NamedTuple):
    """What a network must fit, of data that is elsewhere."""

    input_shape: tuple[int, ...]
    num_classes: int
    task: str


@dataclass(frozen=True)
class Job:
    """What is trained; everything but the data, which is elsewhere. See also ``fit``.

    Attributes:
        settings: what clients need to build the same method; JSON-able, without secrets.
        build: ``(settings, data or shape) -> method and task``.
        run_of: ``(method) -> seed, hyper-parameters and options``.
        split: how clients hold samples out: seed, test, val.
        device: of the server's own work.
    """

    settings: Mapping[str, Any]
    build: Build
    run_of: Callable[[Method], Run]
    split: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 20
    participation: Participation = field(default_factory=Participation)
    points: tuple[str, ...] = ("pre",)
    eval_every: int = 1
    checkpoint_every: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def title(self) -> str:
        """What is trained, in a word."""
        return ",".join(self.settings.get("methods", ()))

    def built(self, fixed: Mapping[str, Any]) -> tuple[Method, Task]:
        """Build the method for what the clients agreed on; earlier releases name no task."""
        plain = "classification" if fixed["classes"] else "regression"
        shape = Shape(tuple(fixed["shape"]), fixed["classes"], fixed.get("task", plain))
        return self.build(self.settings, cast(Federation, shape))

    def coordinator(
        self,
        method: Method,
        task: Task,
        names: Sequence[str],
        run: Run,
        transport: Transport,
        **more: Any,
    ) -> Coordinator:
        """Return a server for this job, with what is not of the job as `Coordinator` has it."""
        own: dict[str, Any] = {"rounds": self.rounds, "participation": self.participation}
        own |= {"settings": self.settings, "device": self.device, "dtype": self.dtype}
        own |= {"measure": self.settings.get("measure"), **more}
        engine = partial(Vectorised, chunk=256)
        return Coordinator(method, task, names, run, engine, transport, **own)


def serve(
    job: Job,
    transport: Transport,
    names: Sequence[str],
    out: str | Path,
    *,
    quorum: int | None = None,
    deadline: float = 60.0,
    patience: float = 600.0,
    admission: Admission | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Train over a network, and leave everything that may be known here in a run folder.

    Args:
        job: what is trained.
        transport: what carries messages.
        names: the clients, in the order of their indices.
        out: the run folder; an interrupted run in it is resumed.
        quorum: how many clients must be there before the first round; all by default.
        deadline: seconds that a client has for an answer.
        patience: seconds to wait for clients before giving up.
        admission: what is accepted of clients.
        progress: shows how far it is.
        say: prints what happens.
    """
    known = (Path(out) / "folder.json").exists()
    folder = RunFolder.open(out) if known else None
    if folder is not None and folder.has_result:
        return folder.read_result()
    status = StatusFile(Path(out), job.rounds, job.title, names)
    earlier: list[dict[str, Any]] = []
    came: list[str] = []
    wanted = len(names) if known else quorum or len(names)
    if folder is None:
        say(f"waiting for {wanted} of {len(names)} clients")
        try:
            facts, earlier = ask_facts(
                transport, names, job.split, wanted, deadline, patience, status.wait
            )
            agreed, came = _classes(facts), [names[i] for i in facts]
        except BaseException:
            status.withdraw()  # what did not begin leaves nothing behind
            raise
        fixed = {"federation": secrets.token_hex(8), "clients": list(names), **agreed}
        folder = RunFolder.create(out, {"network": fixed, "experiment": dict(job.settings)})
    fixed = folder.config["network"]
    if fixed["clients"] != list(names):
        raise ConfigError(
            f"{out} was begun with the clients {', '.join(fixed['clients'])}, not with "
            f"{', '.join(names)}; resume with those, or begin a new run with another --out."
        )
    method, task = job.built(fixed)
    checkpoint = folder.read_checkpoint() if known else None
    done = 0
    if checkpoint is not None:
        done, earlier = checkpoint[0], list(checkpoint[3]["events"])
    status.wait(wanted, came, earlier, done)
    with status.waiting(earlier, done):
        coordinator = job.coordinator(
            method,
            task,
            names,
            job.run_of(method),
            transport,
            federation=fixed["federation"],
            common={"split": dict(job.split), **{k: fixed[k] for k in ("classes", "class_names")}},
            deadline=deadline,
            quorum=wanted,
            grace=GRACE if known else None,
            patience=patience,
            waits=lambda wanted, there, new: status.wait(wanted, there, [*earlier, *new], done),
            admission=admission,
            eval_every=job.eval_every,
            points=tuple(dict.fromkeys((*job.points, method.use.headline))),
        )
    sent, simulation = coordinator.dispatcher, coordinator.simulation
    if checkpoint is None:
        sent.events = [*earlier, *sent.events]
    else:
        coordinator.load(*checkpoint[1:])
        say(f"resuming after round {simulation.round_index}")

    def write_checkpoint() -> None:
        folder.write_checkpoint(simulation.round_index, *coordinator.state())
        coordinator.saved()

    with status.following(coordinator) as show:
        drive(
            simulation,
            progress=progress,
            checkpoint=write_checkpoint,
            checkpoint_every=job.checkpoint_every,
            after_round=show,
        )
        coordinator.deploy()
        wire = {"bytes_down": sent.bytes_down, "bytes_up": sent.bytes_up}
        network = {**fixed, "events": sent.events, "wire": wire}
        about = {"network": network, "method": method.name, "task": task.kind}
        result = result_of(simulation, {**folder.config, **about})
        folder.write_result(result)
    return result


def clients_of(
    out: str | Path, listed: Sequence[str], say: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Return the clients of a run: those it was begun with, or those that the project lists.

    A client whose certificate was withdrawn keeps its place in a run that it was part of; it is
    absent from then on. One that was added to the project later is not part of it.
    """
    if not (Path(out) / "folder.json").exists():
        return list(listed)
    config = RunFolder.open(out).config
    if "network" not in config:
        raise ConfigError(f"{out} holds a run of one machine; give another --out.")
    begun: list[str] = list(config["network"]["clients"])
    new = sorted(set(listed) - set(begun))
    if new:
        say(
            f"{', '.join(new)} came to the project after this run was begun, and cannot take part "
            "in it; when it is over, --newcomers gives them models"
        )
    return begun


def ask_facts(
    transport: Transport,
    names: Sequence[str],
    split: Mapping[str, Any],
    quorum: int,
    deadline: float,
    patience: float,
    waits: Waits,
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Ask clients what their data looks like, until enough have answered.

    Returns:
        what they report, by client; and what happened meanwhile.

    Raises:
        NetworkError: too few came in time.
    """
    dispatcher = Dispatcher(transport, tuple(names), deadline)
    facts: dict[int, dict[str, Any]] = {}

    def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
        facts[i] = read_facts(meta)

    began = time.monotonic()
    head = {"kind": "facts", "split": dict(split)}
    while len(facts) < quorum:
        dispatcher.send_new(lambda i: head, facts, take, {"kind": "facts", "round": 0})
        waits(quorum, [names[i] for i in facts], dispatcher.events)
        if len(facts) < quorum and time.monotonic() - began > patience:
            missing = [name for i, name in enumerate(names) if i not in facts]
            why = {event["client"]: event["why"] for event in dispatcher.events}
            reported = "; ".join(f"{name}: {text}" for name, text in why.items())
            raise NetworkError(
                f"Only {len(facts)} of {quorum} clients came within {patience:g} s; missing: "
                f"{', '.join(missing[:10])}. {reported or 'Start them with sartor join.'}"
            )
        time.sleep(0.05)
    return facts, dispatcher.events


def _classes(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Agree on the shape of samples, and on the classes: those that any client has."""
    shapes = {tuple(f["shape"]) for f in facts.values()}
    named = {bool(f["class_names"]) for f in facts.values()}
    tasks = {f["task"] for f in facts.values()}
    if max(len(shapes), len(named), len(tasks)) > 1:
        raise NetworkError(
            f"The clients' samples differ: shapes {sorted(shapes)}"
            + (", and only some have named classes" if len(named) > 1 else "")
            + (f", tasks {sorted(tasks)}" if len(tasks) > 1 else "")
            + "; all clients need the same columns and the same kind of labels."
        )
    names = sorted({name for f in facts.values() for name in f["class_names"]})
    classes = len(names) or max(f["classes"] for f in facts.values())
    fixed = {"shape": list(shapes.pop()), "classes": classes, "class_names": names}
    return {**fixed, "task": tasks.pop()}
