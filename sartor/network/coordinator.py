"""The server of a federation: registered clients, and a simulation in which they work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from sartor.core.method import Method
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.network.admission import Admission
from sartor.network.dispatch import Dispatcher
from sartor.network.registration import Registration, Waits
from sartor.network.remote_data import RemoteFederation, empty_arena, sample_arena
from sartor.network.remote_work import Remote, StateNumbers
from sartor.network.transport import Transport
from sartor.results.scores import Run
from sartor.training.simulation import Simulation


class Coordinator:
    """The server's side of one run.

    Args:
        names: the clients, by index.
        engine: makes the engine of the server's own work from an arena.
        federation: names the federation; clients keep their states under it.
        common: what every hello holds besides: how samples are held out, and the classes.
        settings: what the clients need to build the same method; JSON-able.
        deadline: seconds that a client has for an answer.
        quorum: how many clients must be there before the first round; all by default.
        grace: for a server that resumes after an interruption: seconds in which clients may come
            back before it resumes with those that are there.
        patience: seconds to wait for a client before giving up.
        waits: called while too few are there: how many are wanted, which are there, and what went
            wrong so far.
        facts: what clients reported of their data before, by index.
        like: for newcomers: what a client of the trained federation reported of its data. The
            server then sends them the states that they begin with.
        **rest: as for `Simulation`, and so is what is not listed.
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
        facts: Mapping[int, dict[str, Any]] | None = None,
        like: Mapping[str, Any] | None = None,
        device: torch.device,
        dtype: torch.dtype,
        **rest: Any,
    ) -> None:
        self.federation, self.run, self.common = federation, run, dict(common or {})
        self._hello_head = {
            "kind": "hello",
            "federation": federation,
            "settings": dict(settings),
            "clients": len(names),
            "seed": run.seed,
            "dtype": str(dtype).removeprefix("torch."),
            "weights": task.given_weights(),
            **self.common,
        }
        self._bases: list[np.ndarray] = []  # numbers of the states in the last two checkpoints
        self.dispatcher = Dispatcher(transport, tuple(names), deadline)
        self.registration = Registration(
            self.dispatcher, self._hello, patience, waits, dict(facts or {}), like
        )
        wanted = len(names) if quorum is None or grace is not None else quorum
        self.registration.gather(wanted, grace)
        known = self.registration.facts
        self.simulation = Simulation(
            method,
            task,
            [RemoteFederation(tuple(names))],  # type: ignore[list-item]
            [run],
            engine,
            device=device,
            dtype=dtype,
            arena=empty_arena(len(names), known, device),
            clients=partial(
                Remote,
                dispatcher=self.dispatcher,
                rule=admission or Admission(),
                sample=sample_arena(len(names), next(iter(known.values())), device, dtype),
                dtype=dtype,
                wait=partial(self.registration.gather, 1),
                newcomers=like is not None,
            ),
            **rest,
        )
        self.registration.late = self._enter_sizes
        self.registration.round_index = lambda: self.simulation.round_index

    @property
    def clients(self) -> Remote:
        """What lets the clients work."""
        assert isinstance(self.simulation.clients, Remote)
        return self.simulation.clients

    @property
    def numbers(self) -> StateNumbers:
        """The numbers of the states that the clients resume from."""
        assert isinstance(self.simulation.store, StateNumbers)
        return self.simulation.store

    def _hello(self, index: int) -> dict[str, Any]:
        """Return the head of the hello to a client."""
        hyper = {
            name: value if np.ndim(value) == 0 else np.asarray(value)[index].item()
            for name, value in self.run.hyper.items()
        }
        return {**self._hello_head, "index": index, "hyper": hyper}

    def _enter_sizes(self, index: int) -> None:
        """Enter the sizes of a client that came after the start."""
        context = self.simulation.context
        for name, split in context.arena.splits.items():
            split.size[0, index] = self.registration.facts[index]["sizes"][name]
        train = torch.from_numpy(context.arena.splits["train"].size)
        context.sizes = train.to(context.arena.device)
        self.simulation.log.recount()

    def deploy(self) -> None:
        """Let all clients write the models that they will use."""
        server, store = self.simulation.deployed()
        self.clients.deploy(server, store, self.simulation.round_index, self.federation)

    # ---- checkpoints

    def state(self) -> tuple[dict[str, Tree], dict[str, Any], dict[str, Any]]:
        """Return all state of the server; see `Simulation.state`."""
        trees, arrays, meta = self.simulation.state()
        sent = self.dispatcher
        meta |= {
            "serial": sent.serial,
            "events": list(sent.events),
            "attended": list(sent.attended),
            "wire": [sent.bytes_down, sent.bytes_up],
            "hellos": {str(i): facts for i, facts in self.registration.facts.items()},
        }
        return trees, arrays, meta

    def load(self, trees: dict[str, Tree], arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self.simulation.load(trees, arrays, meta)
        sent = self.dispatcher
        sent.serial = int(meta["serial"])
        sent.events = [*meta["events"], *sent.events]
        sent.attended = list(meta["attended"])
        sent.bytes_down, sent.bytes_up = meta["wire"]
        self._bases = [self.numbers.base.copy()]
        for i, facts in meta["hellos"].items():
            self.registration.facts.setdefault(int(i), facts)
            self._enter_sizes(int(i))

    def saved(self) -> None:
        """Note that a checkpoint of the present state is on the disk.

        Two checkpoints are kept, so clients may drop what is older than the one before.
        """
        self._bases = [*self._bases, self.numbers.base.copy()][-2:]
        if len(self._bases) == 2:
            self.clients.floor = np.minimum(*self._bases)
