"""A simulation whose clients are elsewhere: the server of a federation, from round to round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, MessageError, NetworkError
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.engines.arena import Arena
from sartor.engines.round import Rounds
from sartor.engines.store import Store
from sartor.network.admission import Admission
from sartor.network.office import Generations, Message, Office
from sartor.network.remote_rounds import RemoteRounds
from sartor.network.roster import Roster, empty_arena, read_facts, sample_arena
from sartor.network.transport import Transport
from sartor.results.scores import Run
from sartor.training.simulation import Simulation

Waits = Callable[[int, Collection[str], Sequence[dict[str, Any]]], None]
"""``(how many are wanted, names of those there, events)``: told while a server waits."""


class Coordinator(Simulation):
    """The server's side of one run.

    Args:
        method: the record.
        task: the network and its loss.
        names: the clients, by index.
        run: seed, hyper-parameters and options.
        engine: makes the engine of the server's own work from an arena.
        transport: what carries messages.
        federation: names the federation; clients keep their states under it.
        common: what all greetings hold besides: how samples are held out, and the classes.
        settings: what the clients need to build the same method; JSON-able.
        deadline: seconds that a client has for an answer.
        quorum: how many clients must be there before the first round; all by default.
        grace: for a server that goes on after an interruption: seconds in which clients may come
            back before it goes on with those that are there.
        patience: seconds to wait for a client before giving up.
        waits: told again and again while too few are there: how many are wanted, who is there, and
            what went wrong so far.
        admission: what is accepted of clients.
        hellos: what clients told of their data before, by index.
        **rest: as for `Simulation`.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        names: Sequence[str],
        run: Run,
        engine: Any,
        transport: Transport,
        *,
        federation: str,
        settings: Mapping[str, Any],
        common: Mapping[str, Any] | None = None,
        deadline: float = 60.0,
        quorum: int | None = None,
        grace: float | None = None,
        patience: float = 600.0,
        waits: Waits = lambda wanted, there, events: None,
        admission: Admission | None = None,
        hellos: Mapping[int, dict[str, Any]] | None = None,
        device: torch.device,
        dtype: torch.dtype,
        **rest: Any,
    ) -> None:
        self.office = Office(transport, tuple(names), deadline)
        self.office.greet = self.greet
        self.rule = admission or Admission()
        self.federation, self.settings, self.one = federation, dict(settings), run
        self.common = dict(common or {})
        self.patience, self.waits = patience, waits
        self.hellos: dict[int, dict[str, Any]] = dict(hellos or {})
        self._weights = task.given_weights()
        self.dtype = dtype
        self.bases: list[np.ndarray] = []
        if grace is None:
            self.gather_clients(len(names) if quorum is None else quorum)
        else:
            self.gather_clients(len(names), grace)
        arena = empty_arena(len(names), self.hellos, device)
        super().__init__(
            method,
            task,
            [Roster(tuple(names))],  # type: ignore[list-item]
            [run],
            engine,
            device=device,
            dtype=dtype,
            arena=arena,
            **rest,
        )

    # ---- who is there

    def gather_clients(self, wanted: int, grace: float | None = None) -> bool:
        """Greet whoever has come, and wait until enough clients are there.

        Args:
            wanted: how many.
            grace: seconds after which one is enough; None insists.

        Returns:
            whether it had to wait.

        Raises:
            NetworkError: too few came in time.
        """
        began, waited = time.monotonic(), False
        while True:
            self.greet()
            there = self.office.there()
            passed = time.monotonic() - began
            needed = wanted if grace is None or passed <= grace else min(wanted, 1)
            if len(there) >= needed:
                return waited
            waited = True
            self.waits(needed, [self.office.names[i] for i in there], self.office.events)
            if passed > self.patience:
                missing = [n for i, n in enumerate(self.office.names) if i not in there]
                raise NetworkError(
                    f"Only {len(there)} of {needed} clients came within {self.patience:g} s; "
                    f"missing: {', '.join(missing[:10])}. Start them with sartor join, or begin "
                    "with fewer by --quorum."
                )
            time.sleep(0.05)

    def greet(self) -> None:
        """Say hello to the clients that are there and have not been greeted."""
        here = self.office.transport.present()
        new = [
            i
            for i, name in enumerate(self.office.names)
            if name in here and i not in self.office.known
        ]
        if not new:
            return
        orders: dict[int, Message] = {i: ({}, self._hello(i), lambda name: True) for i in new}

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            self.hellos[i] = self._checked(i, meta)

        serial = self.office.serial  # a greeting has no number of its own
        taken = self.office.send(orders, 1 << 20, take, {"kind": "hello", "round": self._now()})
        self.office.serial = serial
        self.office.known |= taken
        for i in taken:
            self._enter_sizes(i)

    def _now(self) -> int:
        return getattr(self, "round_index", 0)

    def _hello(self, index: int) -> dict[str, Any]:
        hyper = {
            name: value if np.ndim(value) == 0 else np.asarray(value)[index].item()
            for name, value in self.one.hyper.items()
        }
        return {
            "kind": "hello",
            "federation": self.federation,
            "settings": self.settings,
            "clients": len(self.office.names),
            "index": index,
            "seed": self.one.seed,
            "hyper": hyper,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights": self._weights,
            **self.common,
        }

    def _checked(self, index: int, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a client tells of its data, if it fits what the others told."""
        hello = read_facts(meta)
        for other in self.hellos.values():
            for part in ("shape", "labels", "tokens"):
                if other[part] != hello[part]:
                    raise MessageError(
                        f"its samples differ from those of the others: {part} {hello[part]}, "
                        f"expected {other[part]}"
                    )
            break  # the first one stands for all
        return hello

    def _enter_sizes(self, index: int) -> None:
        """Note the sizes of a client that came after the start."""
        if not hasattr(self, "rounds"):
            return
        for name, split in self.rounds.arena.splits.items():
            split.size[0, index] = self.hellos[index]["sizes"][name]
        train = torch.from_numpy(self.rounds.arena.splits["train"].size)
        self.rounds.sizes = train.to(self.rounds.arena.device)
        self.books.recount()

    # ---- what a simulation does otherwise

    def _make_rounds(
        self,
        arena: Arena,
        seeds: list[int],
        hyper: dict[str, Tensor],
        participation: Participation,
    ) -> Rounds:
        hello = next(iter(self.hellos.values()))
        sample = sample_arena(arena.num_clients, hello, arena.device, self.dtype)
        return RemoteRounds(
            self.method,
            self.task,
            arena,
            self.engine,
            seeds,
            hyper,
            participation,
            office=self.office,
            rule=self.rule,
            sample=sample,
        )

    def _make_store(self, params: Tree, folder: Any) -> Store:
        return Generations(self.rounds.arena.num_clients)

    def _trained_models(self, shape: Any, device: torch.device, folder: Any) -> Store | None:
        return _Elsewhere(shape[1]) if self.method.headline == "post" else None

    def _start(self, seconds: dict[str, float]) -> None:
        assert isinstance(self.rounds, RemoteRounds)
        assert isinstance(self.store, Generations)
        if self.trained is not None:
            self.rounds.keep_first(self.server, self.store)
        super()._start(seconds)

    def step(self) -> dict[str, Any]:
        """Run the next round with the clients that are there, at least one."""
        self.gather_clients(1)
        return super().step()

    def models(
        self, ids: np.ndarray, point: str | None = None, round_index: int | None = None
    ) -> Tree:
        """Refuse: the models of clients are with the clients."""
        raise ConfigError(
            "The models of the clients are not on the server: each client writes its own at the "
            "end. Only the point 'global' is here, for methods that have a global model."
        )

    def deploy(self) -> None:
        """Let all clients write the models that they will use."""
        assert isinstance(self.rounds, RemoteRounds)
        server, store = self.deployed()
        assert isinstance(store, Generations)
        self.rounds.deploy(server, store, self.round_index, self.federation)

    def _label_counts(self) -> None:
        """Know nothing of the clients' labels."""

    # ---- checkpoints

    def state(self) -> tuple[dict[str, Tree], dict[str, Any], dict[str, Any]]:
        """Return all state of the server; see `Simulation.state`."""
        trees, arrays, meta = super().state()
        meta |= {
            "serial": self.office.serial,
            "events": list(self.office.events),
            "attended": list(self.office.attended),
            "wire": [self.office.bytes_down, self.office.bytes_up],
            "hellos": {str(i): hello for i, hello in self.hellos.items()},
        }
        return trees, arrays, meta

    def load(self, trees: dict[str, Tree], arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().load(trees, arrays, meta)
        self.office.serial = int(meta["serial"])
        self.office.events = [*meta["events"], *self.office.events]
        self.office.attended = list(meta["attended"])
        self.office.bytes_down, self.office.bytes_up = meta["wire"]
        assert isinstance(self.store, Generations)
        self.bases = [self.store.base.copy()]
        for i, hello in meta["hellos"].items():
            self.hellos.setdefault(int(i), hello)
            self._enter_sizes(int(i))

    def settled(self) -> None:
        """Say that a checkpoint of the present state is on the disk.

        Two checkpoints are kept, so clients may drop what is older than the one before.
        """
        assert isinstance(self.rounds, RemoteRounds)
        assert isinstance(self.store, Generations)
        self.bases = [*self.bases, self.store.base.copy()][-2:]
        if len(self.bases) == 2:
            self.rounds.floor = np.minimum(*self.bases)


class _Elsewhere(Generations):
    """Marks that clients keep their models after local training."""

    def dump(self) -> Tree:
        """Return nothing: the models are with the clients."""
        return {}

    def load(self, state: Tree) -> None:
        """Take nothing."""
