"""The work of clients that are on their own machines: orders go out, answers come in.

`Remote` is `engines.work.ClientWork` over messages. The clients keep their states; the server knows
the number of the state that each resumes from (`StateNumbers`, see `client_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from sartor.core import tree, wire
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, NetworkError
from sartor.core.method import ClientContext, Method, records
from sartor.core.tree import Tree
from sartor.engines.context import Context
from sartor.engines.evaluate import TEST, Evaluator, Splits
from sartor.engines.parts import Arena, Lanes, Order, Receipt, States, Tally
from sartor.engines.vectorised import Vectorised
from sartor.engines.work import InProcess, Trained
from sartor.network import admission
from sartor.network.admission import Admission
from sartor.network.client_state import FIRST
from sartor.network.dispatch import Dispatcher, Message, Take


class StateNumbers:
    """In place of the clients' states: the number of the state that each client resumes from.

    Args:
        clients: how many there are.
        lasting: whether the clients keep what comes of it (False for copies).
        saved: whether checkpoints hold the numbers (False for models, which go with the states).
    """

    def __init__(self, clients: int, lasting: bool = True, saved: bool = True) -> None:
        self.lasting, self.saved = lasting, saved
        self.base = np.full(clients, FIRST, dtype=np.int64)

    def fork(self) -> StateNumbers:
        """Return a copy to train from; the clients keep what comes of it in memory."""
        other = StateNumbers(len(self.base), lasting=False)
        other.base = self.base.copy()
        return other

    def dump(self) -> Tree:
        """Return what a checkpoint must hold."""
        return {"base": torch.from_numpy(self.base.copy())} if self.saved else {}

    def load(self, state: Tree) -> None:
        """Restore a checkpoint."""
        if self.saved:
            self.base = state["base"].numpy().astype(np.int64).copy()

    def gather(self, cohort: np.ndarray, run: int = 0) -> NoReturn:
        """Refuse: the states are with the clients."""
        raise ConfigError(
            "The models of the clients are not on the server: each client writes its own at the "
            "end. Only the point 'global' is here, for methods that have a global model."
        )

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Refuse; see `gather`."""
        self.gather(cohort)


@dataclass
class Remote:
    """Clients that are reached by messages; see `engines.work.ClientWork`.

    Attributes:
        context: method and engine; an arena that knows the sizes of the clients and has no samples.
        dispatcher: sends orders.
        rule: what is accepted of clients.
        sample: an arena in which every client has one sample of zeros: what an upload must look
            like is found by working on it.
        dtype: of all real numbers.
        wait: waits until a client is there.
        newcomers: whether the server sends the clients the states that they begin with.
        floor: of every client the lowest number of a state that is still needed.
    """

    context: Context
    dispatcher: Dispatcher
    rule: Admission
    sample: Arena
    dtype: torch.dtype
    wait: Callable[[], None]
    newcomers: bool = False

    plan_ahead = None  # clients draw their own batches

    def __post_init__(self) -> None:
        context = self.context
        self.evaluator = Evaluator(context)
        self.floor = np.full(context.arena.num_clients, FIRST, dtype=np.int64)
        self._labels = {id(record): name for name, record in records(context.method).items()}
        self._last: dict[tuple[str, str], Tally] = {}
        self._templates: dict[str, Tree] = {}

    # ---- states

    def keep_states(self, params: Tree, folder: Path | None) -> StateNumbers:
        """Know the numbers of the states that the clients keep."""
        return StateNumbers(self.context.arena.num_clients)

    def keep_models(self, server: Tree, store: States, folder: Path | None) -> StateNumbers:
        """Let the clients keep their models after local training."""
        return StateNumbers(self.context.arena.num_clients, saved=False)

    def start(self, server: Tree, store: States, keep: bool) -> None:
        """Send newcomers the states to begin with, or let clients keep their first models."""
        numbers = _numbers(store)
        if self.newcomers:
            self._give_first(numbers)
        if keep:
            self._keep_first(server, numbers)

    def agree(self, server: Tree) -> Tree:
        """Return the state as it is: there is one server."""
        return server

    def models(self, server: Tree, store: States, round_index: int, ids: np.ndarray) -> Tree:
        """Refuse: the models of clients are with the clients."""
        return store.gather(ids)

    # ---- training

    def train(self, order: Order, store: Lanes, receipt: Receipt, keep: Lanes | None) -> Trained:
        """Let the clients of an exchange work where they are; see `ClientWork.train`."""
        numbers = _numbers(store)
        clock = self.context.clock(receipt.seconds)
        method, cohort = order.method, order.cohort[0]
        wanted = self._template(order)
        marks = wire.marks_of(method.wire.sparse, "upload")
        slot_of = {int(i): k for k, i in enumerate(cohort) if order.trains[0, k]}
        uploads, orders, silent = {}, {}, {}
        splits = tuple(receipt.tally)
        for i, k in slot_of.items():
            reports = bool(order.present[0, k])
            silent[i] = {
                name
                for name, _ in tree.items(wanted)
                if not (reports and wire.travels(order.connected, k, name)[1])
            }
            head = self._head("work", method, order.round_index, numbers, i, splits)
            head |= {"stage": order.stage, "reports": reports, "silent": sorted(silent[i])}
            head |= {"keep": keep is not None, "lasting": numbers.lasting}
            # A client that receives no message needs it for its scores alone.
            connected = None if splits or keep is not None else order.connected
            orders[i] = self._messages(method, order.ctx, k, connected, head)

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            scored = admission.scores(meta, splits)
            backward, forward = admission.costs(meta)
            uploads[i] = self.rule.upload(body.get("upload", {}), wanted, marks, silent[i])
            receipt.gradient_evaluations += backward
            receipt.forward_evaluations += forward
            for split, sums in scored.items():
                receipt.tally[split].put(0, i, *sums)

        note = {"kind": "work", "record": self._labels[id(method)], "round": order.round_index}
        taken = self.dispatcher.send(orders, self.rule.limit(wanted), take, note)
        numbers.base[sorted(taken)] = self.dispatcher.serial
        there = {"lasting": numbers.lasting, "there": sorted(taken)}
        self.dispatcher.attended.append({**note, **there})
        nothing = tree.zeros_like(wanted)
        device = self.context.arena.device
        rows = [tree.map(lambda v: v.to(device), uploads.get(int(i), nothing)) for i in cohort]
        attends = [not order.trains[0, k] or int(i) in taken for k, i in enumerate(cohort)]
        clock("train")
        return tree.map(lambda leaf: leaf[None], tree.stack(rows)), np.array([attends])

    def _template(self, order: Order) -> Tree:
        """Return an upload of the right names, shapes and types: of a client with one sample."""
        label = self._labels[id(order.method)]
        if label not in self._templates:
            here, sample = self.context, self.sample
            ids, yes = order.cohort[:, :1], np.ones((1, 1), dtype=bool)
            parts = (here.method, here.task, sample, Vectorised(sample, 1), here.seeds, here.hyper)
            one = Context(*parts, Participation())
            own = tree.narrow(order.ctx.own, 1, 0, 1)
            at = (order.stage, order.round_index, ids, (order.ctx.common, own))
            group = one.group(*at)
            clients = InProcess(one)
            upload, _ = clients.train(
                replace(order, cohort=ids, trains=yes, present=yes, ctx=group.ctx, keys=group.keys),
                clients.keep_states(one.models(self.dtype), None),
                Receipt.blank(1),
                None,
            )
            self._templates[label] = tree.map(lambda leaf: leaf[0, 0].cpu().clone(), upload)
        return self._templates[label]

    # ---- evaluation

    def evaluate(
        self, server: Tree, store: States, round_index: int, splits: Splits = TEST
    ) -> tuple[dict[str, Tally], Receipt]:
        """Let all clients score what they would use now; also return what that costs."""
        numbers, method = _numbers(store), self.context.record(round_index)
        receipt = Receipt.blank(1)
        tallies = {split: self.context.blank_tally() for split in splits}

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            self._take_scores(i, meta, tallies)
            backward, forward = admission.costs(meta)
            receipt.gradient_evaluations += backward
            receipt.forward_evaluations += forward

        for block in self.evaluator.client_blocks():
            group = self.evaluator.messages_to(server, round_index, block.ids, block.run)
            ctx = group.ctx
            orders = self._orders("score", method, ctx, round_index, numbers, splits)
            self._send_scores("score", "pre", orders, take, tallies, round_index)
            receipt.bytes_down += wire.bytes_down(
                ctx.common, ctx.own, method.wire.sparse, group.present
            )
        return tallies, receipt

    def evaluate_common(
        self, models: Tree, round_index: int, splits: Splits = TEST, clients: int | None = None
    ) -> dict[str, Tally]:
        """Let all clients, or the first ones, score a model that they are sent."""
        arena = self.context.arena
        tallies = {split: self.context.blank_tally() for split in splits}
        common = tree.map(lambda leaf: leaf[0], models)
        head = {"kind": "centre", "round": round_index, "score": list(splits)}
        number = arena.num_clients if clients is None else clients
        orders: dict[int, Message] = {
            i: ({"common": common}, head, _every_leaf) for i in range(number)
        }

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            self._take_scores(i, meta, tallies)

        self._send_scores("centre", "global", orders, take, tallies, round_index)
        return tallies

    def show(self, store: States, round_index: int) -> dict[str, np.ndarray]:
        """Return nothing: what a client's kept state shows stays with the client."""
        return {}

    # ---- the first and the last order

    def _give_first(self, numbers: StateNumbers) -> None:
        """Send all clients the states that they begin with.

        Raises:
            NetworkError: some did not take theirs.
        """
        params = self.context.models(self.dtype)
        states = self.context.new_clients(params, self.context.everybody)
        orders: dict[int, Message] = {}
        for i in self.context.everybody[0].tolist():
            head = self._head("start", self.context.method, 0, numbers, i, ())
            state = {"client": tree.map(lambda leaf, i=i: leaf[0, i].cpu(), states)}
            orders[i] = (state, {**head, "lasting": True}, _every_leaf)
        taken = self._send("start", orders, 0)
        numbers.base[sorted(taken)] = self.dispatcher.serial
        missing = [name for i, name in enumerate(self.dispatcher.names) if i not in taken]
        if missing:
            raise NetworkError(
                f"{', '.join(missing)} did not take the state to begin with; start the newcomers "
                "and the server again."
            )

    def _keep_first(self, server: Tree, numbers: StateNumbers) -> None:
        """Let all clients keep the model that they would use before any training."""
        ctx = self.evaluator.messages_to(server, 0, self.context.everybody).ctx
        orders = self._orders("keep", self.context.record(0), ctx, 0, numbers, lasting=True)
        taken = self._send("keep", orders, 0)
        numbers.base[sorted(taken)] = self.dispatcher.serial

    def deploy(self, server: Tree, store: States, round_index: int, federation: str) -> None:
        """Let all clients write the model that they will use to their own disks."""
        method = self.context.record(round_index)
        ctx = self.evaluator.messages_to(server, round_index, self.context.everybody).ctx
        numbers = _numbers(store)
        orders = self._orders("deploy", method, ctx, round_index, numbers, federation=federation)
        self._send("deploy", orders, round_index)

    # ---- answers

    def _send(self, kind: str, orders: Mapping[int, Message], round_index: int) -> set[int]:
        """Send orders whose answers say nothing; return the clients that answered."""
        note = {"kind": kind, "round": round_index}
        return self.dispatcher.send(orders, 1 << 20, lambda i, body, meta: None, note)

    def _take_scores(self, i: int, meta: dict[str, Any], tallies: dict[str, Tally]) -> None:
        columns = len(next(iter(tallies.values())).columns)
        for split, sums in admission.scores(meta, tuple(tallies), columns).items():
            tallies[split].put(0, i, *sums)

    def _send_scores(
        self,
        kind: str,
        point: str,
        orders: Mapping[int, Message],
        take: Take,
        tallies: dict[str, Tally],
        round_index: int,
    ) -> None:
        """Collect scores; a client that is not there keeps its last ones."""
        taken = self.dispatcher.send(orders, 1 << 20, take, {"kind": kind, "round": round_index})
        for split, tally in tallies.items():
            columns = tally.columns
            none = Tally(**{name: np.zeros_like(column) for name, column in columns.items()})
            before = self._last.setdefault((point, split), none).columns.values()
            for i in orders.keys() - taken:
                tally.put(0, i, *(column[0, i] for column in before))
            self._last[point, split] = Tally(
                **{name: np.where(np.isnan(v), 0.0, v) for name, v in columns.items()}
            )

    # ---- messages

    def _orders(
        self,
        kind: str,
        method: Method,
        ctx: ClientContext,
        round_index: int,
        numbers: StateNumbers,
        splits: tuple[str, ...] = (),
        **more: Any,
    ) -> dict[int, Message]:
        """Write the same order to all clients of a context, each with its own messages."""
        orders = {}
        for k, i in enumerate(ctx.index[0].tolist()):
            head = self._head(kind, method, round_index, numbers, i, splits)
            orders[i] = self._messages(method, ctx, k, None, {**head, **more})
        return orders

    def _head(
        self,
        kind: str,
        method: Method,
        round_index: int,
        numbers: StateNumbers,
        client: int,
        splits: tuple[str, ...],
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "record": self._labels[id(method)],
            "round": round_index,
            "base": int(numbers.base[client]),
            "floor": int(self.floor[client]),
            "score": list(splits),
        }

    def _messages(
        self, method: Method, ctx: ClientContext, slot: int, connected: Any, head: dict[str, Any]
    ) -> Message:
        """Write the messages to the client of a slot: only the rows and leaves that travel."""

        def goes(name: str) -> bool:
            return wire.travels(connected, slot, name.partition("/")[2])[0]

        def written(kind: str, message: Tree) -> Tree:
            if connected is not None:
                names = iter([name for name, _ in tree.items(message)])
                message = tree.map(
                    lambda leaf: leaf if goes(f"{kind}/{next(names)}") else leaf * 0, message
                )
            return wire.packed(message, wire.marks_of(method.wire.sparse, kind))

        messages = {
            "common": written("common", tree.map(lambda leaf: leaf[0], ctx.common)),
            "own": written("own", tree.map(lambda leaf: leaf[0, slot], ctx.own)),
        }
        return messages, head, goes


def _every_leaf(name: str) -> bool:
    return True


def _numbers(store: Lanes) -> StateNumbers:
    """Return a store as what a federation over a network has."""
    assert isinstance(store, StateNumbers)
    return store
