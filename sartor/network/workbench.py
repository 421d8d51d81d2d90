"""Where one client works: rounds of a simulation with one lane, and its own data alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.cohort import Participation
from sartor.core.hyper import Value, stack_hypers
from sartor.core.method import Method, Site, check_private, records
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines.arena import build_arena
from sartor.engines.parts import Engine, Order, Receipt, Tally
from sartor.engines.round import Rounds
from sartor.engines.store import Store
from sartor.engines.vectorised import Vectorised
from sartor.network.vault import FIRST, Vault


class Workbench:
    """Where one client works: rounds with one lane.

    Args:
        method: the record.
        task: the network and its loss.
        data: the client's own samples.
        head: of the greeting: seed, hyper-parameters, number of clients, index.
        vault: the client's private states.
        device: where to compute.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        data: Federation,
        head: Mapping[str, Any],
        vault: Vault,
        device: torch.device,
    ) -> None:
        self.method, self.vault, self.index = method, vault, int(head["index"])
        self.ids = np.array([[self.index]])
        self.dtype: torch.dtype = getattr(torch, head["dtype"])
        clients = int(head["clients"])
        arena = build_arena([data], device, self.dtype)
        splits = {}
        for name, split in arena.splits.items():
            start = np.zeros((1, clients), dtype=np.int64)
            size = np.zeros_like(start)
            start[0, self.index], size[0, self.index] = split.start[0, 0], split.size[0, 0]
            splits[name] = replace(split, start=start, size=size)
        arena = replace(arena, splits=splits, num_clients=clients)
        hyper: list[Mapping[str, Value]] = [head["hyper"]]
        stacked = stack_hypers(method.hyper, hyper, clients, self.dtype)
        engine: Engine = Vectorised(arena, 1)
        seed = int(head["seed"])
        self.rounds = Rounds(method, task, arena, engine, [seed], stacked, Participation())
        task.settle(device, self.dtype)
        start = tree.stack([task.init(seed)])
        self.params = tree.map(lambda leaf: leaf.to(device, self.dtype), start)
        self.records = records(method)

    def _site(self, letters: Tree, head: Mapping[str, Any], stage: str) -> tuple[Site, np.ndarray]:
        """Put the letters where the functions of a client read them."""
        reports = np.array([[bool(head.get("reports", True))]])
        hub = self.rounds.hub(stage, int(head["round"]), self.ids, reports)
        keys = self.rounds.keys(stage, int(head["round"]), self.ids)
        sparse = self._record(head).sparse

        def here(message: str, axes: int) -> Tree:
            whole = wire.unpacked(letters[message], wire.marks_of(sparse, message))
            device = self.rounds.arena.device
            return tree.map(lambda leaf: leaf.to(device)[(None,) * axes], whole)

        return self.rounds.site(hub, keys, here("common", 1), here("own", 2)), keys

    def _record(self, head: Mapping[str, Any]) -> Method:
        return self.records[head["record"]]

    def _states(self, head: Mapping[str, Any]) -> tuple[Store, Tree]:
        """Return the kept state from which an order goes on, and the model after training."""
        base = int(head["base"])
        kept = {} if base == FIRST else self.vault.read(base)
        self.vault.prune(base, int(head["floor"]))

        def make(cohort: np.ndarray) -> Tree:
            if base == FIRST:
                return self.rounds.new_clients(self.params, self.ids)
            device = self.rounds.arena.device
            return tree.map(lambda leaf: leaf.to(device), kept["client"])

        return _Lane(make, self.rounds.arena.device), kept.get("trained", {})

    def start(self, letters: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the state that the server gives to a newcomer."""
        state = tree.map(lambda leaf: leaf[None, None], letters["client"])
        generation = {"client": state, "trained": {}}
        self.vault.write(int(head["serial"]), generation, lasting=bool(head["lasting"]))
        return {}

    def work(self, letters: Tree, head: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
        """Train on a letter; return the upload and what it cost."""
        method = self._record(head)
        store, model = self._states(head)
        site, keys = self._site(letters, head, head["stage"])
        yes = np.ones((1, 1), dtype=bool)
        reports = np.array([[bool(head["reports"])]])
        order = Order(method, head["stage"], int(head["round"]), self.ids, yes, reports)
        receipt = _receipt(self._tallies(head["score"]))
        keep = _Lane(lambda cohort: {}, store.device) if head["keep"] else None
        upload, _ = self.rounds.local_work(order, site, keys, store, receipt, keep)
        if keep is not None:
            model = keep.table
        generation = {"client": store.table, "trained": model}
        self.vault.write(int(head["serial"]), generation, lasting=bool(head["lasting"]))
        upload = tree.map(lambda leaf: leaf[0, 0], upload) if head["reports"] else {}
        check_private(method, upload)  # the seam: whatever leaves this machine passes here
        upload = wire.packed(upload, wire.marks_of(method.sparse, "upload") if upload else {})
        sent = {k: v for k, v in tree.items(upload) if k not in head["silent"]}
        return {"upload": sent}, {"costs": _costs(receipt), "scores": self._scores(receipt.tally)}

    def score(
        self, letters: Tree, head: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Score the model that the client would use; also return what its kept state shows."""
        method = self._record(head)
        store, _ = self._states(head)
        site, keys = self._site(letters, head, "evaluate")
        model, costs = self.rounds.use(method, store, site, keys, self.ids)
        tallies = self._tallies(head["score"])
        self.rounds.score(method, model, site, self.ids, 0, tallies)
        look = self.rounds.inspect_some(store, int(head["round"]), self.ids)
        seen = {name: leaf[0, 0].tolist() for name, leaf in tree.items(look)}
        found = {"costs": [int(costs.backward[0]), int(costs.forward[0])]}
        return {**found, "scores": self._scores(tallies)}, seen

    def centre(self, letters: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Score a model that the server sent."""
        device = self.rounds.arena.device
        model = tree.map(lambda leaf: leaf.to(device)[None], letters["common"])
        tallies = self._tallies(head["score"])
        self.rounds.score_centre(model, int(head["round"]), self.ids, 0, tallies)
        return {"scores": self._scores(tallies)}

    def model(self, letters: Tree, head: Mapping[str, Any]) -> Tree:
        """Return the model that the client will use when training is over."""
        store, trained = self._states(head)
        model = trained
        if self.method.headline != "post" or not trained:
            site, keys = self._site(letters, head, "evaluate")
            model, _ = self.rounds.use(self._record(head), store, site, keys, self.ids)
        return tree.map(lambda leaf: leaf[0, 0].cpu(), model)

    def keep(self, letters: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the model that the client would use now, as if it came from training."""
        store, _ = self._states(head)
        site, keys = self._site(letters, head, "evaluate")
        model, _ = self.rounds.use(self._record(head), store, site, keys, self.ids)
        generation = {"client": store.gather(self.ids), "trained": model}
        self.vault.write(int(head["serial"]), generation, lasting=bool(head["lasting"]))
        return {}

    def _tallies(self, splits: list[str]) -> dict[str, Tally]:
        shape = (1, self.rounds.arena.num_clients)
        return {split: Tally(np.full(shape, np.nan), np.full(shape, np.nan)) for split in splits}

    def _scores(self, tallies: Mapping[str, Tally]) -> dict[str, list[float]]:
        where = (0, self.index)
        return {s: [float(t.correct[where]), float(t.loss[where])] for s, t in tallies.items()}


class _Lane(Store):
    """The state of one client, with the interface of a store of all clients."""

    def __init__(self, make: Callable[[np.ndarray], Tree], device: torch.device) -> None:
        self.device, self.folder = device, None
        self.table: Tree = make(np.zeros((1, 1), dtype=np.int64))

    def gather(self, cohort: np.ndarray, run: int = 0) -> Tree:
        """Return the state: (1, 1, ...)."""
        return self.table

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Take a new state."""
        if not self.table:
            self.table = tree.map(_own, states)
            return
        self.table = tree.map(lambda old, new: _own(new.to(old.dtype)), self.table, states)


def _own(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().clone()


def _receipt(tallies: dict[str, Tally]) -> Receipt:
    zero = np.zeros(1, dtype=np.int64)
    receipt = Receipt(zero, zero.copy(), zero.copy(), zero.copy(), zero.copy())
    receipt.seconds, receipt.tally = {"train": 0.0, "evaluate": 0.0}, tallies
    return receipt


def _costs(receipt: Receipt) -> list[int]:
    return [int(receipt.gradient_evaluations[0]), int(receipt.forward_evaluations[0])]
