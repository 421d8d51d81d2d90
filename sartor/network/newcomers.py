"""Clients that join a trained federation over the network: the server answers, and learns nothing.

The rule is that of `sartor/training/onboarding.py`: a newcomer receives the messages of the trained
server, begins from the state that the method makes for newcomers, and takes some rounds of local
work. Nothing is uploaded and no other model changes. The server makes that state, because it takes
the server's own state, which clients must not see (it may hold every client's model); of the
newcomer it takes its number and its sizes alone. It is sent once, in the order ``start``.

The clients that trained need not be there. A server that is stopped in between starts again from
the beginning: only a few rounds of the newcomers are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError
from sartor.core.method import changed
from sartor.network.coordinator import Coordinator
from sartor.network.serve import Job
from sartor.network.status import StatusFile
from sartor.network.transport import Loopback, Transport
from sartor.results.result import Result
from sartor.results.scores import Run
from sartor.runs import RunFolder
from sartor.training.driver import drive
from sartor.training.onboarding import newcomer_record, result_of
from sartor.training.progress import Progress


def trained_server(job: Job, out: str | Path) -> Coordinator:
    """Return the server of a run that is over, as its last checkpoint left it; without clients."""
    folder = RunFolder.open(out)
    checkpoint = folder.read_checkpoint()
    if checkpoint is None or not folder.has_result:
        raise ConfigError(
            f"The training in {out} is not over; newcomers get their models after the last round. "
            "Resume it first, by the same command without --newcomers."
        )
    fixed = folder.config["network"]
    method, task = job.built(fixed)
    server = job.coordinator(
        method,
        task,
        fixed["clients"],
        job.run_of(method),
        Loopback({}),
        federation=fixed["federation"],
        common={k: fixed[k] for k in ("classes", "class_names")},
        quorum=0,
        facts={int(i): facts for i, facts in checkpoint[3]["hellos"].items()},
        points=(),
    )
    server.load(*checkpoint[1:])
    return server


def serve_newcomers(
    job: Job,
    transport: Transport,
    names: Sequence[str],
    out: str | Path,
    *,
    rounds: int = 5,
    deadline: float = 60.0,
    patience: float = 600.0,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Give newcomers their models, by the method's own rule.

    Args:
        job: what was trained.
        transport: what carries messages to the newcomers.
        names: the newcomers.
        out: the run folder of the training; what is measured goes into ``newcomers`` in it.
        rounds: rounds of local work of the newcomers; 0 takes what the server sends.
        deadline: seconds that a newcomer has for an answer.
        patience: seconds to wait for the newcomers.
        progress: shows how far it is.
        say: prints what happens.
    """
    server = trained_server(job, out)
    known = sorted(set(names) & set(server.dispatcher.names))
    if known or not names:
        raise ConfigError(
            f"{', '.join(known) or 'Nobody'} cannot be a newcomer; name clients that the training "
            f"in {out} was begun without, and make kits for them with sartor keys client."
        )
    record = newcomer_record(server.simulation)
    record = record if rounds else changed(record, headline="pre")
    hyper: dict[str, float | list[float]] = {
        name: float(np.mean(value)) for name, value in server.run.hyper.items()
    }
    say(f"waiting for {len(names)} newcomers")
    status = StatusFile(Path(out), rounds, job.title, names, newcomers=True)
    status.wait(len(names), ())
    with status.waiting():
        again = job.coordinator(
            record,
            server.simulation.task,
            list(names),
            Run(seed=server.run.seed, hyper=hyper, options=server.run.options),
            transport,
            like=next(iter(server.registration.facts.values())),
            federation=server.federation,
            common={
                **server.common,
                "split": dict(job.split),
                "newcomer": [len(server.dispatcher.names), server.simulation.round_index],
            },
            deadline=deadline,
            patience=patience,
            waits=status.wait,
            rounds=rounds,
            participation=Participation(),
            points=tuple(dict.fromkeys(("pre", record.use.headline))),
        )
    with status.following(again) as show:
        drive(again.simulation, progress=progress, after_round=show)
        again.deploy()
        places = (Path(out) / ("newcomers" if k == 1 else f"newcomers-{k}") for k in count(1))
        place = next(path for path in places if not path.exists())
        events = again.dispatcher.events
        network = {"clients": list(names), "newcomers of": str(out), "events": events}
        config = {"network": network, "experiment": dict(job.settings), "method": record.name}
        result = result_of(again.simulation, config)
        RunFolder.create(place, config).write_result(result)
    say(f"what was measured is in {place}")
    return result
