"""Clients that join a trained federation over the network: the server answers, and learns nothing.

As in `sartor/training/onboarding.py`, where the rule stands: a newcomer gets the letters of the trained server,
begins from the state that the method's ``join`` makes, and takes some rounds of local work. Nothing
is uploaded and nobody else's model changes. The state is made by the server, because ``join`` reads
the server's state, which is not for clients' eyes (it may hold every client's model); it needs
nothing of the newcomer but its number and its sizes. It is sent once, in the order ``start``.

The clients that trained need not be there. A server that is stopped in between is started again
from the beginning: there is nothing to lose but a few rounds of the newcomers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, MessageError, NetworkError
from sartor.core.method import changed
from sartor.data.federation import Federation
from sartor.engines.vectorised import Vectorised
from sartor.network.board import Board
from sartor.network.coordinator import Coordinator
from sartor.network.office import Generations
from sartor.network.remote_rounds import RemoteRounds
from sartor.network.serve import Plan, shape_of
from sartor.network.transport import Loopback, Transport
from sartor.results.result import Result
from sartor.results.scores import Run
from sartor.runs import RunFolder
from sartor.training.onboarding import newcomer_record
from sartor.training.progress import Progress


class Reception(Coordinator):
    """The server's side of the newcomers' rounds; see `Coordinator`.

    Args:
        like: what a client of the trained federation told of its data.
    """

    def __init__(self, *args: Any, like: dict[str, Any], **settings: Any) -> None:
        self.like = like
        super().__init__(*args, **settings)

    def _checked(self, index: int, meta: Any) -> dict[str, Any]:
        hello = super()._checked(index, meta)
        for part in ("shape", "labels", "tokens"):
            if hello[part] != self.like[part]:
                raise MessageError(
                    f"its samples differ from those that the models were trained on: {part} "
                    f"{hello[part]}, expected {self.like[part]}"
                )
        return hello

    def _start(self, seconds: dict[str, float]) -> None:
        assert isinstance(self.rounds, RemoteRounds)
        assert isinstance(self.store, Generations)
        params, _ = self.rounds.init(self.dtype)
        taken = self.rounds.give_first(params, self.store)
        missing = [name for i, name in enumerate(self.office.names) if i not in taken]
        if missing:
            raise NetworkError(
                f"{', '.join(missing)} did not take the state to begin with; start the newcomers "
                "and the server again."
            )
        super()._start(seconds)


def trained_server(plan: Plan, out: str | Path) -> Coordinator:
    """Return the server of a run that is over, as its last checkpoint left it; without clients.

    Raises:
        ConfigError: the run is not over.
    """
    folder = RunFolder.open(out)
    checkpoint = folder.read_checkpoint()
    if checkpoint is None or not folder.has_result:
        raise ConfigError(
            f"The training in {out} is not over; newcomers get their models after the last round. "
            "Go on with it first, by the same command without --newcomers."
        )
    fixed = folder.config["network"]
    shape = shape_of(fixed)
    method, task = plan.build(plan.settings, cast(Federation, shape))
    server = Coordinator(
        method,
        task,
        fixed["clients"],
        plan.run_of(method),
        lambda arena: Vectorised(arena, 256),
        Loopback({}),
        federation=fixed["federation"],
        settings=plan.settings,
        common={k: fixed[k] for k in ("classes", "class_names")},
        quorum=0,
        hellos={int(i): hello for i, hello in checkpoint[3]["hellos"].items()},
        rounds=plan.rounds,
        participation=plan.participation,
        device=plan.device,
        dtype=plan.dtype,
        points=(),
    )
    server.load(*checkpoint[1:])
    return server


def welcome(
    plan: Plan,
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
        plan: what was trained.
        transport: what carries messages to the newcomers.
        names: the newcomers.
        out: the run folder of the training; what is measured goes into ``newcomers`` in it.
        rounds: rounds of local work of the newcomers; 0 takes what the server sends.
        deadline: seconds that a newcomer has for an answer.
        patience: seconds to wait for the newcomers.
        progress: told after every round.
        say: told what goes on, in words.
    """
    server = trained_server(plan, out)
    known = sorted(set(names) & set(server.office.names))
    if known or not names:
        raise ConfigError(
            f"{', '.join(known) or 'Nobody'} cannot be a newcomer; name clients that the training "
            f"in {out} was begun without, and make kits for them with sartor keys client."
        )
    record = newcomer_record(server)
    record = record if rounds else changed(record, headline="pre")
    hyper: dict[str, float | list[float]] = {
        name: float(np.mean(value)) for name, value in server.one.hyper.items()
    }
    say(f"waiting for {len(names)} newcomers")
    board = Board(Path(out), rounds, plan.title, names, newcomers=True)
    board.wait(len(names), ())
    try:
        again = Reception(
            record,
            server.task,
            list(names),
            Run(seed=server.one.seed, hyper=hyper, options=server.one.options),
            server.make_engine,
            transport,
            like=next(iter(server.hellos.values())),
            federation=server.federation,
            settings=plan.settings,
            common={
                **server.common,
                "split": dict(plan.split),
                "newcomer": [server.rounds.arena.num_clients, server.round_index],
            },
            deadline=deadline,
            patience=patience,
            waits=board.wait,
            rounds=rounds,
            participation=Participation(),
            device=plan.device,
            dtype=plan.dtype,
            points=tuple(dict.fromkeys(("pre", record.use.headline))),
        )
    except BaseException:
        board.stop((), 0)
        raise
    try:
        _rounds(again, progress, board)
        again.deploy()
        places = (Path(out) / ("newcomers" if k == 1 else f"newcomers-{k}") for k in count(1))
        place = next(path for path in places if not path.exists())
        network = {"clients": list(names), "newcomers of": str(out), "events": again.office.events}
        config = {"network": network, "experiment": dict(plan.settings), "method": record.name}
        result = again.result(config)
        RunFolder.create(place, config).write_result(result)
    except BaseException:
        board.show(again, "stopped")
        raise
    board.show(again, "done")
    say(f"what was measured is in {place}")
    return result


def _rounds(again: Reception, progress: Progress | None, board: Board) -> None:
    """Run the newcomers' rounds, with progress; without any, score what they were sent."""
    again.waits = lambda wanted, there, events: board.wait(wanted, there, events, again.round_index)
    board.show(again, "training")
    if progress is not None:
        progress.start(again.num_rounds, again.method.name)
    try:
        if not again.num_rounds:
            again.score_start()
        while not again.finished:
            info = again.step()
            board.show(again, "training")
            if progress is not None:
                progress.update(again.round_index - 1, info)
    finally:
        if progress is not None:
            progress.stop()
