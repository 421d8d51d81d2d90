"""The rounds of a simulation, with the clients' part sent away: what the server does in a round.

`RemoteRounds` is `engines.round.Rounds` whose clients are elsewhere: where a simulation works on
lanes, it writes messages and collects answers. `coordinator.py` puts `Simulation` on top of it: the
same state, the same books and checkpoints, and in place of the clients' states the numbers of the
generations that they keep (`vault.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sartor.core import tree, wire
from sartor.core.cohort import Participation
from sartor.core.method import Method, Site, records
from sartor.core.tree import Tree
from sartor.engines.arena import Arena
from sartor.engines.parts import Costs, Order, Receipt, Tally
from sartor.engines.round import Rounds
from sartor.engines.store import Store
from sartor.engines.vectorised import Vectorised
from sartor.network import admission
from sartor.network.admission import Admission
from sartor.network.office import Generations, Message, Office, Take
from sartor.network.vault import FIRST


class RemoteRounds(Rounds):
    """Rounds whose clients are reached by messages; see `Rounds` for the other arguments.

    Args:
        office: where messages go.
        rule: what is accepted of clients.
        sample: an arena in which every client has one sample of zeros: what an upload must look
            like is found by working on it.
    """

    def __init__(self, *args: Any, office: Office, rule: Admission, sample: Arena) -> None:
        super().__init__(*args)
        self.office, self.rule = office, rule
        self.labels = {id(record): name for name, record in records(self.method).items()}
        self.floor = np.full(self.arena.num_clients, FIRST, dtype=np.int64)
        self.last: dict[tuple[str, str], Tally] = {}
        self._templates: dict[str, Tree] = {}
        engine = Vectorised(sample, 1)
        self._sample = Rounds(
            self.method, self.task, sample, engine, self.seeds, self.hyper, Participation()
        )

    # ---- training

    def local_work(
        self,
        order: Order,
        site: Site,
        keys: np.ndarray,
        store: Store,
        receipt: Receipt,
        keep: Store | None,
    ) -> tuple[Tree, np.ndarray]:
        """Let the clients of an exchange work where they are; see `Rounds.local_work`."""
        assert isinstance(store, Generations)
        clock = self.clock(receipt.seconds)
        method, cohort = order.method, order.cohort[0]
        wanted = self.template(order, site, keys)
        marks = wire.marks_of(method.sparse, "upload")
        slot_of = {int(i): k for k, i in enumerate(cohort) if order.trains[0, k]}
        uploads, orders, silent = {}, {}, {}
        splits = tuple(receipt.tally)
        for i, k in slot_of.items():
            reports = bool(order.present[0, k])
            silent[i] = {
                name
                for name, _ in tree.items(wanted)
                if not (reports and wire.travels(order.talks, k, name)[1])
            }
            head = self._head("work", method, order.round_index, store, i, splits)
            head |= {"stage": order.stage, "reports": reports, "silent": sorted(silent[i])}
            head |= {"keep": keep is not None, "lasting": store.lasting}
            # Who is not written to needs the letter for its scores alone.
            talks = None if splits or keep is not None else order.talks
            orders[i] = (*self._letters(method, site, k, talks, head),)

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            scored = admission.scores(meta, splits)
            backward, forward = admission.costs(meta)
            uploads[i] = self.rule.upload(body.get("upload", {}), wanted, marks, silent[i])
            receipt.gradient_evaluations[0] += backward
            receipt.forward_evaluations[0] += forward
            for split, (correct, loss) in scored.items():
                receipt.tally[split].correct[0, i] = correct
                receipt.tally[split].loss[0, i] = loss

        note = {"kind": "work", "record": self.labels[id(method)], "round": order.round_index}
        taken = self.office.send(orders, self.rule.limit(wanted), take, note)
        store.base[sorted(taken)] = self.office.serial
        self.office.attended.append({**note, "lasting": store.lasting, "there": sorted(taken)})
        nothing = tree.zeros_like(wanted)
        device = self.arena.device
        rows = [tree.map(lambda v: v.to(device), uploads.get(int(i), nothing)) for i in cohort]
        there = np.array(
            [[not order.trains[0, k] or int(i) in taken for k, i in enumerate(cohort)]]
        )
        clock("train")
        return tree.map(lambda leaf: leaf[None], tree.stack(rows)), there

    def template(self, order: Order, site: Site, keys: np.ndarray) -> Tree:
        """Return an upload of the right names, shapes and types: of a client with one sample."""
        label = self.labels[id(order.method)]
        if label not in self._templates:
            ids, yes = order.cohort[:, :1], np.ones((1, 1), dtype=bool)
            rounds, common = self._sample, site.common
            hub = rounds.hub(order.stage, order.round_index, ids, yes)
            own = tree.map(lambda leaf: leaf[:, :1], site.own)
            params = {seed: self.task.init(seed) for seed in self.seeds}
            dtype = next(iter(self.hyper.values())).dtype
            start = tree.map(
                lambda leaf: leaf.to(self.arena.device, dtype), tree.stack(list(params.values()))
            )
            clients = self.arena.num_clients
            state = Store(lambda c: rounds.new_clients(start, c), 1, clients, self.arena.device)
            one = replace(order, cohort=ids, trains=yes, present=yes)
            zero = np.zeros(1, dtype=np.int64)
            receipt = Receipt(zero, zero.copy(), zero.copy(), zero.copy(), zero.copy())
            receipt.seconds = {"train": 0.0, "evaluate": 0.0}
            here = rounds.site(hub, keys[:, :1], common, own)
            upload, _ = rounds.local_work(one, here, keys[:, :1], state, receipt, None)
            self._templates[label] = tree.map(lambda leaf: leaf[0, 0].cpu().clone(), upload)
        return self._templates[label]

    # ---- evaluation

    def evaluate(
        self, server: Tree, store: Store, round_index: int, splits: tuple[str, ...] = ("test",)
    ) -> tuple[dict[str, Tally], Receipt]:
        """Let all clients score what they would use now; see `Rounds.evaluate`."""
        assert isinstance(store, Generations)
        method = self.record(round_index)
        zero = np.zeros(1, dtype=np.int64)
        receipt = Receipt(zero, zero.copy(), zero.copy(), zero.copy(), zero.copy())
        tallies = {split: self._blank() for split in splits}
        for run, ids in self.client_blocks():
            site, _ = self.letters_to(server, round_index, ids, run)
            orders = {}
            for k, i in enumerate(ids[0].tolist()):
                head = self._head("score", method, round_index, store, i, splits)
                orders[i] = self._letters(method, site, k, None, head)
            total = Costs(zero.copy(), zero.copy())

            def take(i: int, body: Tree, meta: dict[str, Any], total: Costs = total) -> None:
                self._take_scores(i, meta, tallies)
                backward, forward = admission.costs(meta)
                total.backward += backward
                total.forward += forward

            self._send_scores("score", "pre", orders, take, tallies, round_index)
            receipt.bytes_down += (np.ones_like(ids) * self._letter_bytes(method, site)).sum(1)
            receipt.gradient_evaluations += total.backward
            receipt.forward_evaluations += total.forward
        return tallies, receipt

    def evaluate_centre(
        self, server: Tree, round_index: int, splits: tuple[str, ...] = ("test",)
    ) -> dict[str, Tally]:
        """Let all clients score the global model; see `Rounds.evaluate_centre`."""
        tallies = {split: self._blank() for split in splits}
        centre = tree.map(lambda leaf: leaf[0], self.centre(server, round_index))
        head = {"kind": "centre", "round": round_index, "score": list(splits)}
        orders = {i: ({"common": centre}, head, _every_leaf) for i in range(self.arena.num_clients)}

        def take(i: int, body: Tree, meta: dict[str, Any]) -> None:
            self._take_scores(i, meta, tallies)

        self._send_scores("centre", "global", orders, take, tallies, round_index)
        return tallies

    def inspect_clients(self, store: Store, round_index: int) -> dict[str, np.ndarray]:
        """Return nothing: what a client's kept state shows stays with the client."""
        return {}

    def give_first(self, params: Tree, store: Generations) -> set[int]:
        """Send all clients the states that they begin with; return those who have kept theirs."""
        ids = self.everybody
        states = self.new_clients(params, ids)
        orders: dict[int, Message] = {}
        for k, i in enumerate(ids[0].tolist()):
            head = self._head("start", self.method, 0, store, i, ())
            state = {"client": tree.map(lambda leaf, k=k: leaf[0, k].cpu(), states)}
            orders[i] = (state, {**head, "lasting": True}, _every_leaf)
        note = {"kind": "start", "round": 0}
        taken = self.office.send(orders, 1 << 20, lambda i, body, meta: None, note)
        store.base[sorted(taken)] = self.office.serial
        return taken

    def keep_first(self, server: Tree, store: Generations) -> None:
        """Let all clients keep the model that they would use before any training."""
        ids = self.everybody
        method = self.record(0)
        site, _ = self.letters_to(server, 0, ids)
        orders = {}
        for k, i in enumerate(ids[0].tolist()):
            head = self._head("keep", method, 0, store, i, ())
            orders[i] = self._letters(method, site, k, None, {**head, "lasting": True})
        note = {"kind": "keep", "round": 0}
        taken = self.office.send(orders, 1 << 20, lambda i, body, meta: None, note)
        store.base[sorted(taken)] = self.office.serial

    def deploy(self, server: Tree, store: Generations, round_index: int, federation: str) -> None:
        """Let all clients write the model that they will use to their own disks."""
        method, ids = self.record(round_index), self.everybody
        site, _ = self.letters_to(server, round_index, ids)
        orders = {}
        for k, i in enumerate(ids[0].tolist()):
            head = self._head("deploy", method, round_index, store, i, ())
            orders[i] = self._letters(method, site, k, None, {**head, "federation": federation})
        note = {"kind": "deploy", "round": round_index}
        self.office.send(orders, 1 << 20, lambda i, body, meta: None, note)

    def _take_scores(self, i: int, meta: dict[str, Any], tallies: dict[str, Tally]) -> None:
        for split, (correct, loss) in admission.scores(meta, tuple(tallies)).items():
            tallies[split].correct[0, i], tallies[split].loss[0, i] = correct, loss

    def _send_scores(
        self,
        kind: str,
        point: str,
        orders: Mapping[int, Message],
        take: Take,
        tallies: dict[str, Tally],
        round_index: int,
    ) -> None:
        """Collect scores; whoever is not there keeps its last ones."""
        taken = self.office.send(orders, 1 << 20, take, {"kind": kind, "round": round_index})
        for split, tally in tallies.items():
            before = self.last.setdefault((point, split), Tally(*np.zeros((2, *tally.loss.shape))))
            for i in orders.keys() - taken:
                tally.correct[0, i], tally.loss[0, i] = before.correct[0, i], before.loss[0, i]
            self.last[point, split] = Tally(
                np.nan_to_num(tally.correct), np.where(np.isnan(tally.loss), 0.0, tally.loss)
            )

    # ---- messages

    def _head(
        self,
        kind: str,
        method: Method,
        round_index: int,
        store: Generations,
        client: int,
        splits: tuple[str, ...],
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "record": self.labels[id(method)],
            "round": round_index,
            "base": int(store.base[client]),
            "floor": int(self.floor[client]),
            "score": list(splits),
        }

    def _letters(
        self, method: Method, site: Site, slot: int, talks: Any, head: dict[str, Any]
    ) -> Message:
        """Write the letters to the client of a slot: only the rows and leaves that travel."""

        def goes(name: str) -> bool:
            return wire.travels(talks, slot, name.partition("/")[2])[0]

        def written(message: str, letter: Tree) -> Tree:
            if talks is not None:
                names = iter([name for name, _ in tree.items(letter)])
                letter = tree.map(
                    lambda leaf: leaf if goes(f"{message}/{next(names)}") else leaf * 0, letter
                )
            return wire.packed(letter, wire.marks_of(method.sparse, message))

        letters = {
            "common": written("common", tree.map(lambda leaf: leaf[0], site.common)),
            "own": written("own", tree.map(lambda leaf: leaf[0, slot], site.own)),
        }
        return letters, head, goes


def _every_leaf(name: str) -> bool:
    return True
