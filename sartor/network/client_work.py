"""What one client does on its own machine: the work of a simulation with one lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.cohort import Participation
from sartor.core.hyper import Value, stack_hypers
from sartor.core.method import Method, check_private, records
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines.arena import build_arena
from sartor.engines.context import Context, at_work
from sartor.engines.parts import Group, Order, Receipt, Tally
from sartor.engines.vectorised import Vectorised
from sartor.engines.work import InProcess
from sartor.network.client_state import FIRST, ClientState


class SingleClient:
    """One client at work, on its own data alone.

    Args:
        method: the record.
        task: the network and its loss.
        data: the client's own samples.
        head: of the hello: seed, hyper-parameters, number of clients, index.
        states: the client's private states.
        device: where to compute.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        data: Federation,
        head: Mapping[str, Any],
        states: ClientState,
        device: torch.device,
    ) -> None:
        method = at_work(method, task)
        self.method, self.states, self.index = method, states, int(head["index"])
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
        seed = int(head["seed"])
        parts = (method, task, arena, Vectorised(arena, 1), [seed], stacked, Participation())
        self.context = Context(*parts)
        self.work_here = InProcess(self.context)
        self.evaluator = self.work_here.evaluator
        self.params = self.context.models(self.dtype)
        self.records = records(method)

    def _group(self, messages: Tree, head: Mapping[str, Any], stage: str) -> Group:
        """Put the messages where the functions of a client read them."""
        sparse = self._record(head).wire.sparse

        def here(message: str, axes: int) -> Tree:
            whole = wire.unpacked(messages[message], wire.marks_of(sparse, message))
            device = self.context.arena.device
            return tree.map(lambda leaf: leaf.to(device)[(None,) * axes], whole)

        at = (stage, int(head["round"]), self.ids)
        reports = np.array([[bool(head.get("reports", True))]])
        server_ctx = self.context.server_ctx(*at, reports)
        both = here("common", 1), here("own", 2)
        return self.context.group(*at, both, server_ctx=server_ctx)

    def _record(self, head: Mapping[str, Any]) -> Method:
        return self.records[head["record"]]

    def _states(self, head: Mapping[str, Any]) -> tuple[_Lane, Tree]:
        """Return the kept state that an order resumes from, and the model after training."""
        base = int(head["base"])
        kept = {} if base == FIRST else self.states.read(base)
        self.states.prune(base, int(head["floor"]))

        if base == FIRST:
            return _Lane(self.context.new_clients(self.params, self.ids)), {}
        device = self.context.arena.device
        state = tree.map(lambda leaf: leaf.to(device), kept["client"])
        return _Lane(state), kept.get("trained", {})

    def start(self, messages: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the state that the server gives to a newcomer."""
        state = tree.map(lambda leaf: leaf[None, None], messages["client"])
        kept = {"client": state, "trained": {}}
        self.states.write(int(head["serial"]), kept, lasting=bool(head["lasting"]))
        return {}

    def work(self, messages: Tree, head: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
        """Train on a message; return the upload and what it cost."""
        method = self._record(head)
        store, model = self._states(head)
        group = self._group(messages, head, head["stage"])
        yes = np.ones((1, 1), dtype=bool)
        reports = np.array([[bool(head["reports"])]])
        at = (head["stage"], int(head["round"]), self.ids, yes, reports)
        receipt = Receipt.blank(1)
        receipt.tally = self._tallies(head["score"])
        keep = _Lane({}) if head["keep"] else None
        order = Order(method, *at, group.ctx, group.keys)
        upload, _ = self.work_here.train(order, store, receipt, keep)
        if keep is not None:
            model = keep.table
        kept = {"client": store.table, "trained": model}
        self.states.write(int(head["serial"]), kept, lasting=bool(head["lasting"]))
        upload = tree.map(lambda leaf: leaf[0, 0], upload) if head["reports"] else {}
        check_private(method, upload)  # whatever leaves this machine passes here
        upload = wire.packed(upload, wire.marks_of(method.wire.sparse, "upload") if upload else {})
        sent = {k: v for k, v in tree.items(upload) if k not in head["silent"]}
        return {"upload": sent}, {"costs": _costs(receipt), "scores": self._scores(receipt.tally)}

    def score(
        self, messages: Tree, head: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Score the model that the client would use; also return what its kept state shows."""
        method = self._record(head)
        store, _ = self._states(head)
        group = self._group(messages, head, "evaluate")
        model, costs = self.evaluator.use(method, store, group)
        tallies = self._tallies(head["score"])
        self.evaluator.score(method, model, group, tallies)
        look = self.evaluator.show_some(store, int(head["round"]), self.ids)
        seen = {name: leaf[0, 0].tolist() for name, leaf in tree.items(look)}
        found = {"costs": [int(costs.backward[0]), int(costs.forward[0])]}
        return {**found, "scores": self._scores(tallies)}, seen

    def centre(self, messages: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Score a model that the server sent."""
        device = self.context.arena.device
        model = tree.map(lambda leaf: leaf.to(device)[None], messages["common"])
        tallies = self._tallies(head["score"])
        self.evaluator.score_centre(model, int(head["round"]), self.ids, 0, tallies)
        return {"scores": self._scores(tallies)}

    def model(self, messages: Tree, head: Mapping[str, Any]) -> Tree:
        """Return the model that the client will use when training is over."""
        store, trained = self._states(head)
        model = trained
        if self.method.use.headline != "post" or not trained:
            group = self._group(messages, head, "evaluate")
            model, _ = self.evaluator.use(self._record(head), store, group)
        return tree.map(lambda leaf: leaf[0, 0].cpu(), model)

    def keep(self, messages: Tree, head: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the model that the client would use now, as if it came from training."""
        store, _ = self._states(head)
        group = self._group(messages, head, "evaluate")
        model, _ = self.evaluator.use(self._record(head), store, group)
        kept = {"client": store.gather(self.ids), "trained": model}
        self.states.write(int(head["serial"]), kept, lasting=bool(head["lasting"]))
        return {}

    def _tallies(self, splits: list[str]) -> dict[str, Tally]:
        return {split: self.context.blank_tally() for split in splits}

    def _scores(self, tallies: Mapping[str, Tally]) -> dict[str, list[float]]:
        where = (0, self.index)
        return {s: [float(v[where]) for v in t.columns.values()] for s, t in tallies.items()}


class _Lane:
    """The kept state of one client; see `engines.store.Lanes`."""

    def __init__(self, table: Tree) -> None:
        self.table = table

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


def _costs(receipt: Receipt) -> list[int]:
    return [int(receipt.gradient_evaluations[0]), int(receipt.forward_evaluations[0])]
