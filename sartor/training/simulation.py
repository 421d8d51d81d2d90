"""A simulation: all runs of one method, from round to round.

Everything that a round reads is in the trees and counters here, and what was measured and spent is
in the log (``sartor.results.log``): a checkpoint is a dump of both. What happens inside a round is
in ``sartor.engines.round``, where the clients work in ``sartor.engines.work``, and the loop over
rounds in ``sartor.training.driver``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError
from sartor.core.hyper import stack_hypers
from sartor.core.method import Method, Phase, endings
from sartor.core.task import Predictor, Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines.arena import build_arena, with_palette
from sartor.engines.context import Context, Engine, at_work
from sartor.engines.evaluate import Evaluator
from sartor.engines.parts import Arena, Receipt, States, Tally
from sartor.engines.round import Rounds
from sartor.engines.work import ClientWork, InProcess
from sartor.results.headline import unit_of
from sartor.results.log import Log
from sartor.results.metrics import macro
from sartor.results.scores import PHASES, Ledger, Run, Scores
from sartor.training.stopping import EarlyStopping, Watch, per_run, watch_over


class Simulation:
    """All runs of one method, from round to round; see ``fit`` for what is not explained here.

    Args:
        federations: one per run (often the same object).
        engine: makes the engine from the arena.
        points: "pre", "post", "global" (for methods that have a global model); none, to score
            nothing.
        eval_start: score the initial models too; False leaves that out, for long sweeps of which
            only the end is wanted. The point "post" needs them.
        store_folder: a folder for memory-mapped client states; None keeps them in memory.
        arena: the data of all runs where they are not simply those of the federations.
        clients: makes what does the clients' work; in this process by default.
        measure: what clients are compared by; that of the task by default. The task of a measure
            that has no sums has it too.

    Attributes:
        store: the clients' kept states.
        trained: the models after local training, where those are the ones to use; else None.
        receipt: what the last round cost.
        closed: whether the epilogue is over.
        leader: the simulation whose training is used, if not its own.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        federations: Sequence[Federation],
        runs: Sequence[Run],
        engine: Any,
        *,
        rounds: int,
        participation: Participation,
        device: torch.device,
        dtype: torch.dtype,
        eval_every: int = 1,
        points: tuple[str, ...] = ("pre", "post"),
        eval_start: bool = True,
        store_folder: Path | None = None,
        arena: Arena | None = None,
        clients: Callable[[Context], ClientWork] = InProcess,
        stopping: EarlyStopping | None = None,
        measure: str | None = None,
    ) -> None:
        method = at_work(method, task)
        self.method, self.task, self.runs, self.num_rounds = method, task, list(runs), rounds
        self.federations = list(federations)
        self.eval_every, self.points, self.measure = eval_every, points, measure
        if arena is None:
            arena = build_arena(federations, device, dtype)
            arena = with_palette(arena) if device.type == "cuda" else arena  # a CPU gathers as fast
        self.eval_start = bool(points) and (eval_start or "post" in points)
        _check_held_out(method, arena)
        hyper = stack_hypers(method.hyper, [run.hyper for run in runs], arena.num_clients, dtype)
        self.make_engine, self.dtype = engine, dtype
        self.engine: Engine = engine(arena)
        seeds = [run.seed for run in runs]
        self.context = Context(method, task, arena, self.engine, seeds, hyper, participation)
        self.clients = clients(self.context)
        self.rounds = Rounds(self.context, self.clients)
        self.splits = tuple(s for s in ("test", "val") if arena.splits[s].size.any())
        params, self.server = self.context.init(dtype)
        self.store = self.clients.keep_states(params, store_folder)
        self.trained: States | None = None
        if method.use.headline == "post":
            self.trained = self.clients.keep_models(self.server, self.store, store_folder)
        self.round_index = 0
        self.closed = False
        self.log = Log([federation.names for federation in self.federations])
        self.watch = None
        if stopping is not None:
            self.watch = watch_over(stopping, len(self.runs), self.splits, task, measure)
        self._adaptation: Receipt | None = None  # what that of the last evaluation cost
        self.receipt: Receipt | None = None
        self.leader: Simulation | None = None
        self._begun = dict.fromkeys(PHASES, 0.0)  # seconds before the first round of a leader

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or every run has diverged."""
        return self.round_index >= self.num_rounds or all(d is not None for d in self.log.diverged)

    @property
    def pending(self) -> bool:
        """Whether the models that would be used take an epilogue first; see `deployed`."""
        return self.method.schedule.after is not None and not self.closed

    def step(self) -> None:
        """Run the next round, and score what is due."""
        self.clients.wait()
        began = time.perf_counter()
        seconds = dict.fromkeys(PHASES, 0.0)
        if self.round_index == 0:
            self._start(seconds)
        t = self.round_index
        post = self.splits if "post" in self.points else ()
        self.server, self.receipt = self.rounds.train(
            self.server, self.store, t, score=post, keep=self.trained
        )
        if self.context.queued:
            self.rounds.plan_ahead(None if t + 1 == self.num_rounds else t + 1)
        self._after(self.receipt, seconds, began)

    def _after(self, receipt: Receipt, seconds: dict[str, float], began: float) -> None:
        """Log a round that was trained: costs, scores and times."""
        t = self.round_index
        self.log.spend_round(receipt)
        self.round_index = t + 1
        last = self.round_index == self.num_rounds
        if last and self.method.schedule.after is not None:
            for ending in endings(self.method):
                self._one_off("epilogue", ending, seconds)
            self.closed = True
        due = last or self.round_index % self.eval_every == 0
        for split in self.splits if "post" in self.points else ():
            self.log.update_post(split, receipt.tally[split])
        over = due and self._score(seconds)
        if over and not last:
            self._close(seconds)
        if self.finished:
            self._settle()
        looks = due or t == 0 or self.finished or not self.context.queued
        if looks:
            self.context.read_clocks()
        seconds["round"] = time.perf_counter() - began
        self.log.time_round(seconds, receipt.seconds)
        if looks:
            self.log.take_clocks()

    def follow(self, leader: Simulation) -> None:
        """Use in another way what a simulation trains.

        The two methods differ in what a client does to its model before use (``adapt`` and
        ``model``), and in nothing that training sees; so one training serves both. To be called
        before the leader's first step and after each. Rounds, cohorts, bytes and gradients are the
        leader's; scores, and what adaptation costs, are this simulation's own.

        Raises:
            ConfigError: the method has a prologue or an epilogue, which would be run twice.
        """
        if self.method.schedule.before is not None or self.method.schedule.after is not None:
            raise ConfigError(
                f"{self.method.name} trains before its first round or after its last, so another "
                "use of its models needs a training of its own; in a plan give the options of "
                "``then`` in ``set``."
            )
        began = time.perf_counter()
        self.leader, self.server, self.store = leader, leader.server, leader.store
        if leader.receipt is None:
            self._start(self._begun)
            return
        seconds, self._begun = self._begun, dict.fromkeys(PHASES, 0.0)
        self._after(leader.receipt, seconds, began)

    def _read_clocks(self) -> None:
        """Wait for the device and log the times of the rounds since it was last read."""
        if self.log.unread:
            self.context.read_clocks()
            self.log.take_clocks()

    def stop(self, why: str) -> None:
        """End as if no more rounds had been planned, and note why for every run not yet stopped."""
        if self.round_index < self.num_rounds:
            seconds = dict.fromkeys(PHASES, 0.0)
            began = time.perf_counter()
            self._close(seconds)
            self.context.read_clocks()
            seconds["round"] = time.perf_counter() - began
            self._read_clocks()
            self.log.time_once(seconds)
            mine = {"round": self.round_index, "why": why}
            self.log.stopped = [old or dict(mine) for old in self.log.stopped]
            self._settle()

    def _score(self, seconds: dict[str, float]) -> bool:
        """Score the models after this round; return whether every run has stopped."""
        t = self.round_index
        if "post" in self.points:
            self.log.score("post", t - 1, {s: self.log.post[s] for s in self.splits})
        if self.points:
            server, store = self.deployed(seconds)
            if "pre" in self.points:
                self._evaluate(server, store, seconds)
            if "global" in self.points:
                self._evaluate_centre(server, seconds)
            self._snapshot(server, store)
        return self.watch is not None and self._asks_to_stop(self.watch)

    def _asks_to_stop(self, watch: Watch) -> bool:
        """Let early stopping see the scores of this round; return whether every run stops."""
        series = self.log.history[f"{self.method.use.headline}/val"]
        count, weight = self.answers("val")
        sizes = np.maximum(count.sum(1), 1)
        with np.errstate(over="ignore", invalid="ignore"):  # of runs that are diverging
            accuracy, loss = series["correct"][-1].sum(1), weight * series["loss"][-1].sum(1)
            measured = macro(series["measured"][-1]) if "measured" in series else None
            values = watch.metric.measure(accuracy / sizes, loss / sizes, 1.0, measured)
        lost = np.array([d is not None for d in self.log.diverged])
        over = watch.look(self.round_index, values, lost, self._to_keep)
        self.log.stopped = watch.verdicts()
        return over

    def _close(self, seconds: dict[str, float]) -> None:
        """Make the round that is done the last one: its epilogue and its evaluation."""
        self.rounds.plan_ahead(None)
        self.num_rounds = self.round_index
        scored = any(self.log.scored(point, self.round_index) for point in self.log.when)
        for ending in endings(self.method) if self.pending else ():
            self._one_off("epilogue", ending, seconds)
        self.closed = self.closed or self.method.schedule.after is not None
        if not scored:
            self._score(seconds)
        elif self._adaptation is not None:
            self.log.spend_once(self._adaptation)

    def _to_keep(self) -> Tree:
        """Return the states that would be used now, (runs, ...) each."""
        server, store = self.deployed()
        everybody = self.context.everybody
        found = {"server": server, "clients": store.gather(everybody)}
        if self.trained is not None:
            found["trained"] = self.trained.gather(everybody)
        return found

    def _settle(self) -> None:
        """Put back the states that early stopping kept, and end the log of each run; once."""
        watch = self.watch
        if watch is None or watch.settled:
            return
        watch.settled = True
        kept, everybody = watch.kept or {}, self.context.everybody
        back = watch.kept_round >= 0
        back &= np.array([lost is None for lost in self.log.diverged])
        if back.any():
            mask = torch.from_numpy(back)
            self.server = tree.map(
                lambda old, now: torch.where(per_run(mask, now), old, now),
                kept["server"],
                self.server,
            )
            present = np.broadcast_to(back[:, None], everybody.shape)
            for store, name in ((self.store, "clients"), (self.trained, "trained")):
                if store is not None and tree.leaves(kept[name]):
                    store.scatter(everybody, kept[name], present)
        for run, (last, used) in enumerate(watch.ends(self.round_index)):
            if self.log.diverged[run] is None:
                self.log.end_run(run, last, used)
        watch.kept = None

    def _used_round(self, run: int) -> int:
        """Return the round of the models that a run ends with."""
        if self.watch is None or not self.watch.settled or self.log.diverged[run] is not None:
            return self.round_index
        return self.watch.ends(self.round_index)[run][1]

    def _start(self, seconds: dict[str, float]) -> None:
        """Before round 0: the method's prologue, and the scores of the initial models."""
        self.clients.start(self.server, self.store, self.trained is not None)
        if self.method.schedule.before is not None:
            self._one_off("prologue", self.method.schedule.before, seconds)
        if not self.eval_start:
            return
        server, store = self.deployed(seconds)
        tallies = self._evaluate(server, store, seconds, record="pre" in self.points)
        self.log.start_post(tallies)
        if "global" in self.points:
            self._evaluate_centre(server, seconds)
        self._snapshot(server, store)

    def _one_off(self, stage: str, record: Method, seconds: dict[str, float]) -> None:
        self.server, receipt = self.rounds.train(
            self.server, self.store, self.round_index, stage, record=record
        )
        self.log.spend_once(receipt)
        self.context.read_clocks()
        for name, value in receipt.seconds.items():
            seconds[name] += value

    def deployed(self, seconds: dict[str, float] | None = None) -> tuple[Tree, States]:
        """Return the states that would be used if training stopped now.

        Before the end that takes the epilogue, on copies.
        """
        if not self.pending:
            return self.server, self.store
        clock = self.context.clock({"evaluate": 0.0} if seconds is None else seconds)
        store, server = self.store.fork(), self.server
        for ending in endings(self.method):
            server, _ = self.rounds.train(
                server, store, self.round_index, "epilogue", record=ending
            )
        clock("evaluate")
        return server, store

    def _evaluate(
        self, server: Tree, store: States, seconds: dict[str, float], record: bool = True
    ) -> dict[str, Tally]:
        clock, t = self.context.clock(seconds), self.round_index
        tallies, receipt = self.clients.evaluate(server, store, t, self.splits)
        if record:
            self.log.score("pre", t, tallies)
        adapt, last = self.method.use.adapt or self.task.norms, "evaluate"
        seen = adapt and any(one.schedule.stage == last for one in endings(self.method))
        self._adaptation = receipt if adapt and not seen else None
        if self._adaptation is not None and t == self.num_rounds:
            self.log.spend_once(receipt)  # the adaptation whose models are used
        clock("evaluate")
        return tallies

    def _evaluate_centre(self, server: Tree, seconds: dict[str, float]) -> None:
        if self.method.use.centre is None:
            return
        clock, t = self.context.clock(seconds), self.round_index
        centre = self.context.centre(server, t)
        self.log.score("global", t, self.clients.evaluate_common(centre, t, self.splits))
        clock("evaluate")

    def _snapshot(self, server: Tree, store: States) -> None:
        show, t = self.method.show, self.round_index
        if show.server is None and show.client is None:
            return
        small: dict[str, np.ndarray] = {}
        if show.server is not None:
            server_ctx = self.context.server_ctx("inspect", t, self.context.everybody)
            seen = self.engine.runs(show.server, server, server_ctx)
            small = {name: leaf.float().cpu().numpy() for name, leaf in tree.items(seen)}
        if show.client is not None:
            small |= self.clients.show(store, t)
        self.log.snapshots.append({"round": t, **small})

    @property
    def units(self) -> np.ndarray:
        """What a target's deviation of 1 is in the units of the data, (runs,)."""
        infos = [federation.info for federation in self.federations]
        return np.asarray([unit_of(info.get("preprocessing")) for info in infos])

    def score_start(self) -> None:
        """Score the models of a simulation without rounds."""
        self._start(dict.fromkeys(PHASES, 0.0))

    # ---- results

    def scores(self) -> dict[tuple[str, str], Scores]:
        """Return what was measured so far, by (point, split)."""
        return self.log.scores(self.answers)

    def answers(self, split: str) -> tuple[np.ndarray, int]:
        """Return (runs, clients) answers that are scored, and how many a sample's loss is over.

        A text of a next-token task has one for every token, and its loss is a mean over all steps.
        """
        if self.task.kind != "next-token":
            return self.context.arena.splits[split].size.copy(), 1
        counts = np.stack([fed.num_answers(split).numpy() for fed in self.federations])
        return counts, int(self.federations[0].y.shape[1])

    def ledger(self) -> Ledger:
        """Return the counted costs so far."""
        self._read_clocks()
        found = self.log.ledger()
        if self.leader is not None:  # what a round would take if this one trained itself
            own, theirs = found.seconds["evaluate"], self.leader.ledger().seconds
            pairs = zip(theirs["round"], theirs["evaluate"], own, strict=True)
            found.seconds["round"] = [whole - other + mine for whole, other, mine in pairs]
        return found

    def params(self, client: int, run: int = 0, point: str | None = None) -> Tree:
        """Return the parameters that a client would use now, at an evaluation point."""
        point = point or self.method.use.headline
        ids = np.full((len(self.runs), 1), client)
        if point == "global":
            if self.method.use.centre is None:
                raise ConfigError(
                    f"{self.method.name} has no global model; ask for the point 'pre' or 'post'."
                )
            centre = self.context.centre(self.deployed()[0], self._used_round(run))
            if not self.task.norms:
                return tree.map(lambda leaf: leaf[run].detach().cpu().clone(), centre)
            model = Evaluator(self.context).common(centre, self._used_round(run), ids)[1]
            return tree.map(lambda leaf: leaf[run, 0].detach().cpu().clone(), model)
        model = self.models(ids, point, self._used_round(run))
        found: Tree = tree.map(lambda leaf: leaf[run, 0].detach().cpu().clone(), model)
        return found

    def models(
        self, ids: np.ndarray, point: str | None = None, round_index: int | None = None
    ) -> Tree:
        """Return what the clients ``ids`` (runs, n) would use now: (runs, n, ...).

        Clients that adapt a model draw as in ``round_index``, now by default.
        """
        if (point or self.method.use.headline) == "post" and self.trained is not None:
            return self.trained.gather(ids)
        at = self.round_index if round_index is None else round_index
        return self.clients.models(*self.deployed(), at, ids)

    def network(self, client: int, run: int = 0, point: str | None = None) -> nn.Module:
        """Return a client's model as an ordinary module."""
        params, predict = self.params(client, run, point), self.method.use.predict
        if predict is None or point == "global":
            return self.task.with_params(params)
        return Predictor(params, self.task.answer(predict), self.task.fixed)

    def label_counts(self) -> np.ndarray | None:
        """Count the labels of every client: (runs, clients, classes), where there are classes."""
        known = all(fed.task not in ("regression", "next-token", "") for fed in self.federations)
        counts = [fed.label_counts("train").numpy() for fed in self.federations if known]
        return np.stack(counts) if known else None

    # ---- checkpoints

    def state(self) -> tuple[dict[str, Tree], dict[str, Any], dict[str, Any]]:
        """Return all state: trees of tensors, nested arrays, and JSON-able values."""
        self._read_clocks()
        trees = {"server": self.server, "clients": self.store.dump()}
        if self.trained is not None:
            trees["trained"] = self.trained.dump()
        arrays, meta = self.log.dump()
        arrays["watch"] = {}
        if self.watch is not None:
            trees["kept"], arrays["watch"] = self.watch.dump()
        meta |= {
            "round": self.round_index,
            "planned": self.num_rounds,
            "closed": self.closed,
            "lanes": self.engine.lanes,
            "limit": self.engine.limit,
        }
        return trees, arrays, meta

    def load(self, trees: dict[str, Tree], arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        """Restore a checkpoint; the next ``step`` continues from there."""
        device = self.context.arena.device
        self.server = tree.map(
            lambda old, new: new.to(device, old.dtype), self.server, trees["server"]
        )
        self.store.load(trees["clients"])
        if self.trained is not None:
            self.trained.load(trees["trained"])
        self.log.load(arrays, meta)
        self.round_index, self.closed = meta["round"], meta["closed"]
        self.num_rounds = meta.get("planned", self.num_rounds)
        if self.watch is not None:
            self.watch.load(trees.get("kept", {}), arrays["watch"], device)
        # The same blocks of lanes give the same numbers to the last bit.
        self.engine.lanes = self.engine.lanes or meta["lanes"]
        self.engine.limit = meta.get("limit")


def phases_on(split: str, method: Method) -> list[Phase]:
    """Return the phases of a method, of its prologue and of its epilogues that use a split."""
    records = [method, method.schedule.before, *endings(method)]
    phases = [p for r in records if r is not None for p in (*r.phases, *r.use.adapt)]
    return [phase for phase in phases if phase.data == split]


def _check_held_out(method: Method, arena: Arena) -> None:
    """Refuse a method that needs held-out data where there is none."""
    for split, words in (("val", "validation"), ("test", "test")):
        phases = phases_on(split, method)
        if phases and not arena.splits[split].size.any():
            raise ConfigError(
                f"{method.name} uses {words} data in its phase {phases[0].name!r}, but no client "
                f"has any; hold some out, for example with {split}=0.2 when the federation is made."
            )
