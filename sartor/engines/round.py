"""The order of one round and of one evaluation, written once for all engines.

`docs/method-record.md` tells the same in words. An engine only says how a function is applied to
all runs and all lanes, and how the steps of a phase are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sartor import rng, tree, wire
from sartor.cohort import Participation
from sartor.engines.arena import Arena
from sartor.engines.plan import Plan, build_plan, num_steps
from sartor.engines.store import Store
from sartor.method import Batch, Hub, Method, Phase, Site, check_private
from sartor.task import Task
from sartor.tree import Tree

_TRIAL_STEPS = 4

Watch = Callable[[Tree, np.ndarray, np.ndarray], None]
"""Is shown uploads (runs, slots, ...), the ids of their clients, and which of them trained."""


class Engine(Protocol):
    """What an engine must do; see `sequential.py` for the plainest one."""

    calls: dict[str, tuple[int, int]]
    lanes: int | None
    workers: int

    def tune(self, trial: Any, lanes: int, signature: Any) -> None:
        """Choose the number of lanes a block by measuring, if there is a choice."""

    def chunk(self, phases: tuple[Phase, ...]) -> int:
        """Say how many lanes to work on at once."""

    def runs(self, fn: Any, *args: Any) -> Any:
        """Apply a server function to each run."""

    def addresses(self, fn: Any, server: Tree, cohort: Tensor, hub: Hub) -> Any:
        """Write the letter to each client of the cohort."""

    def clients(self, fn: Any, *args: Any) -> Any:
        """Apply a client function to each lane; the last argument is the site."""

    def blocks(self, work: Any, blocks: list[Any]) -> list[Any]:
        """Apply ``work`` to every block of lanes, in order or side by side."""

    def phase(self, phase: Phase, work: Tree, site: Site, plan: Plan) -> tuple[Tree, Any]:
        """Run a phase on each lane; returns the work and the number of steps taken."""


@dataclass(frozen=True)
class Block:
    """A rectangle of lanes: ``runs`` runs from ``run`` on, ``slots`` slots from ``slot`` on.

    Slots that are not neighbours are listed in ``only``.
    """

    run: int
    runs: int
    slot: int
    slots: int
    only: np.ndarray | None = None

    @property
    def cut(self) -> tuple[slice, Any]:
        """The block as an index of (runs, slots) arrays."""
        columns = slice(self.slot, self.slot + self.slots) if self.only is None else self.only
        return slice(self.run, self.run + self.runs), columns


@dataclass(frozen=True)
class Order:
    """What the clients of an exchange are asked to do; letters and keys come beside it.

    Attributes:
        method: the record.
        stage: what the keys are folded with.
        round_index: the round.
        cohort: (runs, slots) who is asked.
        trains: (runs, slots) who of them trains.
        present: (runs, slots) who of them reports.
        talks: what ``connected`` said, with the axis of runs first; None if all exchange messages.
    """

    method: Method
    stage: str
    round_index: int
    cohort: np.ndarray
    trains: np.ndarray
    present: np.ndarray
    talks: Any = None


@dataclass
class Costs:
    """Samples in passes with and without a gradient, per run."""

    backward: np.ndarray
    forward: np.ndarray


@dataclass
class Tally:
    """Sums over test samples: (runs, clients), NaN where a client was not scored."""

    correct: np.ndarray
    loss: np.ndarray


@dataclass
class Receipt:
    """What a round cost, per run, and how long its parts took."""

    participants: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    gradient_evaluations: np.ndarray
    forward_evaluations: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    tally: dict[str, Tally] = field(default_factory=dict)


class Rounds:
    """Everything that stays the same from round to round.

    Args:
        method: the record.
        task: the network and its loss.
        arena: the data of all runs.
        engine: how lanes are worked.
        seeds: one per run.
        hyper: (runs,) or (runs, clients) per name.
        participation: who takes part.
        eval_batch: test samples a step; chosen for the device if None.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        arena: Arena,
        engine: Engine,
        seeds: Sequence[int],
        hyper: dict[str, Tensor],
        participation: Participation,
        eval_batch: int | None = None,
    ) -> None:
        self.method, self.task, self.arena, self.engine = method, task, arena, engine
        self.seeds = list(seeds)
        self.hyper = {k: v.to(arena.device) for k, v in hyper.items()}
        self.participation = participation
        # On a CPU small batches waste less on padding; on a GPU few large steps are cheaper.
        self.eval_batch = eval_batch or (64 if arena.device.type == "cpu" else 256)
        self.base = np.stack([rng.key(seed).numpy() for seed in self.seeds])
        self.sizes = torch.from_numpy(arena.splits["train"].size).to(arena.device)
        self.everybody = np.tile(np.arange(arena.num_clients), (arena.num_runs, 1))
        self.watch: Watch | None = None
        self._marks: list[tuple[dict[str, float], str, Any, Any]] = []
        self._plain = replace(method, predict=None)  # scores a global model by its logits
        self._score_phases: dict[tuple[int, str], Phase] = {}
        self._score_plans: dict[Any, Plan] = {}

    # ---- what is read-only in a round
    # -----------------------------------------------------------------

    def hub(
        self,
        stage: str,
        round_index: int,
        cohort: np.ndarray,
        present: np.ndarray,
        run: int = 0,
    ) -> Hub:
        """Collect what the server of the cohort's runs, ``run`` and those after it, may read."""
        device, runs = self.arena.device, slice(run, run + len(cohort))
        key = rng.fold_host(self.base[runs], stage, round_index)
        return Hub(
            hyper={name: value[runs] for name, value in self.hyper.items()},
            key=torch.from_numpy(key).to(device),
            round=torch.full((len(cohort),), round_index, device=device),
            sizes=self.sizes[runs],
            cohort=torch.from_numpy(cohort).to(device),
            present=torch.from_numpy(present).to(device),
        )

    def keys(self, stage: str, round_index: int, cohort: np.ndarray, run: int = 0) -> np.ndarray:
        """Fold the keys of a cohort, (runs, slots, 2), on the host.

        Few numbers, many small operations.
        """
        run_keys = rng.fold_host(self.base[run : run + len(cohort)], stage, round_index)
        return rng.fold_host(run_keys[:, None, :], cohort)

    def site(self, hub: Hub, keys: np.ndarray, common: Tree, own: Tree) -> Site:
        """Collect what the clients of the hub's cohort may read: (runs, slots, ...)."""
        device, split = self.arena.device, self.arena.splits["train"]
        sizes = hub.sizes.gather(1, hub.cohort)
        wide = {
            k: v.gather(1, hub.cohort) if v.dim() == 2 else v[:, None].expand(hub.cohort.shape)
            for k, v in hub.hyper.items()
        }
        return Site(
            hyper=wide,
            common=common,
            own=own,
            key=torch.from_numpy(keys).to(device),
            round=hub.round,
            index=hub.cohort,
            num_samples=sizes,
            mask=torch.arange(split.capacity, device=device) < sizes[:, :, None],
            reports=hub.present,
        )

    def letters(self, method: Method, server: Tree, hub: Hub) -> tuple[Tree, Tree]:
        """Write the letters of a round, as they arrive: (runs, ...) and (runs, slots, ...)."""
        common = self.engine.runs(method.broadcast, server, hub)
        own = self.engine.addresses(method.address, server, hub.cohort, hub)
        return (
            wire.received(common, wire.marks_of(method.sparse, "common")),
            wire.received(own, wire.marks_of(method.sparse, "own")),
        )

    def _letter_bytes(self, method: Method, site: Site) -> np.ndarray:
        """Count the bytes of both letters to each client: (runs, slots), or one for all."""
        common = wire.num_bytes(site.common, wire.marks_of(method.sparse, "common"), 1)
        own = wire.num_bytes(site.own, wire.marks_of(method.sparse, "own"), 2)
        return common[..., None] + own

    # ---- state
    # ------------------------------------------------------------------------------------------

    def init(self, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Draw the initial models of all runs and the server's first state."""
        starts = {seed: self.task.init(seed) for seed in dict.fromkeys(self.seeds)}
        params: Tree = tree.map(
            lambda leaf: leaf.to(self.arena.device, dtype),
            tree.stack([starts[seed] for seed in self.seeds]),
        )
        hub = self.hub("init", 0, self.everybody, np.ones_like(self.everybody, dtype=bool))
        return params, self.engine.runs(self.method.init_server, params, hub)

    def new_clients(self, params: Tree, cohort: np.ndarray) -> Tree:
        """Make the states of clients that have not trained yet."""
        hub = self.hub("init", 0, cohort, np.ones_like(cohort, dtype=bool))
        found: Tree = self.engine.clients(
            lambda site: self.method.init_client(site.common, site._replace(common={})),
            self.site(hub, self.keys("init", 0, cohort), params, {}),
        )
        return found

    # ---- one round
    # --------------------------------------------------------------------------------------

    def record(self, round_index: int) -> Method:
        """Return the method of a round (or of an evaluation before it): first the warm-up's."""
        warm = self.method.warmup
        return self.method if warm is None or round_index >= warm.rounds else warm.method

    def draw(
        self, method: Method, stage: str, round_index: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the cohort of a round, the clients with most local work first.

        Returns:
            ids, who of them trains, and who reports: (runs, slots) each.
        """
        if method.everyone or stage != "train":
            cohort, trains = self.everybody, np.ones_like(self.everybody, dtype=bool)
            present = trains
        else:
            drawn = [
                self.participation.draw(seed, round_index, self.arena.num_clients)
                for seed in self.seeds
            ]
            cohort, present = np.stack([d[0] for d in drawn]), np.stack([d[1] for d in drawn])
            trains = present
            if method.train_all:
                reports = np.zeros_like(self.everybody, dtype=bool)
                np.put_along_axis(reports, cohort, present, 1)
                everybody = self.everybody
                if method.one_by_one:  # those drawn are served first, in the order of the draw
                    turn = np.full_like(everybody, everybody.shape[1])
                    np.put_along_axis(turn, cohort, np.arange(cohort.shape[1])[None], 1)
                    everybody = np.argsort(turn, axis=1, kind="stable")
                    reports = np.take_along_axis(reports, everybody, 1)
                cohort, present, trains = everybody, reports, np.ones_like(reports)
        if method.one_by_one:
            return cohort, trains, present
        size = np.take_along_axis(self.arena.splits["train"].size, cohort, 1)
        order = np.argsort(-np.where(trains, size, -1), axis=1, kind="stable")
        return tuple(np.take_along_axis(part, order, 1) for part in (cohort, trains, present))  # type: ignore[return-value]

    def train(
        self,
        server: Tree,
        store: Store,
        round_index: int,
        stage: str = "train",
        score: tuple[str, ...] = (),
        keep: Store | None = None,
        record: Method | None = None,
    ) -> tuple[Tree, Receipt]:
        """Run one round.

        Args:
            server: the server's state.
            store: the clients' states; changed in place.
            round_index: the round.
            stage: "train", "prologue", "epilogue" or "handover".
            score: the splits on which the models are scored right after local training.
            keep: a store for the models after local training, if they are to be kept.
            record: the record to run, if not that of the stage (an epilogue's own epilogue).
        """
        other = {"prologue": self.method.prologue, "epilogue": self.method.epilogue}
        warm = self.method.warmup
        if warm is not None:
            other["handover"] = warm.handover
        method = record or other.get(stage) or self.record(round_index)
        cohort, trains, present = self.draw(method, stage, round_index)
        runs, slots = cohort.shape
        zero = np.zeros(runs, dtype=np.int64)
        receipt = Receipt(trains.sum(1), zero.copy(), zero.copy(), zero.copy(), zero.copy())
        receipt.tally = {split: self._blank() for split in score}
        receipt.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0}
        width = 1 if method.one_by_one else slots
        for first in range(0, slots, width):
            cut = slice(first, first + width)
            server = self._exchange(
                method,
                server,
                store,
                stage,
                round_index,
                cohort[:, cut],
                trains[:, cut],
                present[:, cut],
                receipt,
                keep,
            )
        if warm is not None and stage == "train" and round_index == warm.rounds - 1:
            server, given = self.train(server, store, round_index, "handover")
            receipt.bytes_down += given.bytes_down
            receipt.bytes_up += given.bytes_up
        self._read_marks()
        return server, receipt

    def _exchange(
        self,
        method: Method,
        server: Tree,
        store: Store,
        stage: str,
        round_index: int,
        cohort: np.ndarray,
        trains: np.ndarray,
        present: np.ndarray,
        receipt: Receipt,
        keep: Store | None,
    ) -> Tree:
        """Letters out, local work, uploads in, aggregation."""
        clock = self._clock(receipt.seconds)
        stage = method.stage or stage
        hub = self.hub(stage, round_index, cohort, present)
        keys = self.keys(stage, round_index, cohort)
        site = self.site(hub, keys, *self.letters(method, server, hub))
        talks = None
        if method.connected is not None:
            talks = self.engine.runs(method.connected, server, hub)
        order = Order(method, stage, round_index, cohort, trains, present, talks)
        clock("server")
        uploads, there = self.local_work(order, site, keys, store, receipt, keep)
        clock = self._clock(receipt.seconds)
        receipt.participants -= (trains & ~there).sum(1)
        trains, present = trains & there, present & there
        hub = hub._replace(present=torch.from_numpy(present).to(self.arena.device))
        if talks is not None:
            hub = hub._replace(present=wire.heard(talks, hub.present))
        uploads = wire.received(uploads, wire.marks_of(method.sparse, "upload"))
        if self.watch is not None and stage == "train":
            self.watch(uploads, cohort, trains)
        server = self.engine.runs(method.aggregate, server, uploads, hub)
        messages = {"common": site.common, "own": site.own, "upload": uploads}
        down, up = wire.sent(messages, method.sparse, talks, trains, present)
        receipt.bytes_down += down
        receipt.bytes_up += up
        clock("server")
        return server

    def attendance(self, order: Order) -> np.ndarray:
        """Say who of a cohort is there, (runs, slots): everybody, unless this is overridden."""
        return np.ones_like(order.trains)

    def local_work(
        self,
        order: Order,
        site: Site,
        keys: np.ndarray,
        store: Store,
        receipt: Receipt,
        keep: Store | None,
    ) -> tuple[Tree, np.ndarray]:
        """Do what the clients of an exchange do between their letters and their uploads.

        Args:
            order: what they are asked to do.
            site: what they may read, their letters included: (runs, slots, ...).
            keys: (runs, slots, 2) on the host.
            store: their kept states; changed in place.
            receipt: what it costs, and the scores, are added here.
            keep: a store for the models after local training, if they are to be kept.

        Returns:
            the uploads (runs, slots, ...), and who of the cohort was there (runs, slots).
        """
        method, cohort = order.method, order.cohort
        attends = self.attendance(order)
        order = replace(order, trains=order.trains & attends)
        if self.engine.lanes is None and method.phases:
            self._tune(method, site, store, keys, cohort)
        blocks = self._blocks(method.phases, cohort.shape)
        uploads = self.work_blocks(order, blocks, site, keys, store, receipt, keep)
        rows: dict[int, list[Tree]] = {}
        for block, upload in zip(blocks, uploads, strict=True):
            rows.setdefault(block.run, []).append(upload)
        return tree.cat([tree.cat(row, 1) for row in rows.values()], 0), attends

    def work_blocks(
        self,
        order: Order,
        blocks: list[Block],
        site: Site,
        keys: np.ndarray,
        store: Store,
        receipt: Receipt,
        keep: Store | None,
    ) -> list[Tree]:
        """Do the local work of some blocks of lanes, and return the uploads of each.

        See `local_work` for the arguments.
        """
        method, cohort, trains = order.method, order.cohort, order.trains
        in_turn = self.arena.device.type == "cuda"
        clock = self._clock({"train": 0.0} if in_turn else receipt.seconds)

        def work_on(block: Block) -> tuple[Tree, Costs, dict[str, float]]:
            seconds = receipt.seconds if in_turn else {"train": 0.0, "evaluate": 0.0}
            clock = self._clock(seconds)
            ids, there = cohort[block.cut], trains[block.cut]
            here = _cut_site(site, block)
            state = store.gather(ids, block.run)
            work = self.engine.clients(method.begin, state, here)
            work, costs = self._phases(
                method.phases, work, here, keys[block.cut], ids, there, block.run
            )
            clock("train")
            if receipt.tally or keep is not None:
                model = self.engine.clients(method.model, work, here)
                if keep is not None:
                    keep.scatter(ids, model, there, block.run)
                for split, tally in receipt.tally.items():
                    self._score(method, model, here, ids, there, block.run, split, tally)
                clock("evaluate")
            state, upload = self.engine.clients(method.finish, state, work, here)
            check_private(method, upload)
            store.scatter(ids, state, there, block.run)
            clock("train")
            return upload, costs, seconds

        done = self.engine.blocks(work_on, blocks)
        if not in_turn:
            # Blocks may have run side by side: divide the wall time as their own clocks say.
            passed = clock("train")
            busy = {
                name: sum(seconds[name] for _, _, seconds in done) for name in ("train", "evaluate")
            }
            scoring = passed * busy["evaluate"] / max(sum(busy.values()), 1e-12)
            receipt.seconds["train"] -= scoring
            receipt.seconds["evaluate"] += scoring
        for block, (_, costs, _) in zip(blocks, done, strict=True):
            receipt.gradient_evaluations[block.cut[0]] += costs.backward
            receipt.forward_evaluations[block.cut[0]] += costs.forward
        return [upload for upload, _, _ in done]

    def _tune(
        self, method: Method, site: Site, store: Store, keys: np.ndarray, cohort: np.ndarray
    ) -> None:
        """Let the engine time a few steps of the main phase at several block sizes.

        Nothing is kept.
        """
        phase = max(method.phases, key=_planned)
        sizes = self.arena.splits["train"].size

        def prepare(block: Block) -> tuple[Tree, Site, Plan]:
            ids, here = cohort[block.cut], _cut_site(site, block)
            arena = _cut_arena(self.arena, block.run, block.runs)
            steps = np.where(np.take_along_axis(sizes[block.cut[0]], ids, 1) > 0, _TRIAL_STEPS, 0)
            parts = self._part_keys(phase, ids, block.run)
            plan = build_plan(phase, arena, ids, keys[block.cut], steps, parts)
            work = self.engine.clients(method.begin, store.gather(ids, block.run), here)
            for earlier in method.phases[: method.phases.index(phase)]:
                work = self.engine.clients(earlier.enter, work, here)
                work = self.engine.clients(earlier.leave, work, here)
            return work, here, plan

        def trial(lanes: int) -> float:
            """Predict the seconds of the whole phase in blocks of so many lanes."""
            blocks = self._blocks(method.phases, cohort.shape, lanes)
            ready = [prepare(block) for block in blocks[: self.engine.workers]]
            began = time.perf_counter()
            self.engine.blocks(lambda one: self.engine.phase(phase, *one), ready)
            passed = time.perf_counter() - began
            taken = sum(int(plan.steps.sum()) for _, _, plan in ready)
            # Blocks go to the first core that is free; the last to finish decides.
            cores = [0] * self.engine.workers
            for block in blocks:
                local = np.take_along_axis(sizes[block.cut[0]], cohort[block.cut], 1)
                cores[int(np.argmin(cores))] += int(local.sum())
            return passed * len(ready) / max(taken, 1) * max(cores)

        shapes = tuple((n, tuple(p.shape)) for n, p in self.task.module.named_parameters())
        signature = (method.name, type(self.task.module), shapes, phase.batch, cohort.shape)
        self.engine.tune(trial, cohort.size, signature)

    def _phases(
        self,
        phases: tuple[Phase, ...],
        work: Tree,
        site: Site,
        client_keys: np.ndarray,
        ids: np.ndarray,
        present: np.ndarray,
        run: int,
    ) -> tuple[Tree, Costs]:
        """Run local phases on a block of lanes, and count the samples they touch."""
        zero = np.zeros(ids.shape[0], dtype=np.int64)
        costs = Costs(zero.copy(), zero.copy())
        for phase in phases:
            keys = rng.fold_host(client_keys, phase.stream or phase.name)
            arena = _cut_arena(self.arena, run, ids.shape[0])
            if callable(phase.steps):
                steps = self.engine.clients(phase.steps, site).cpu().numpy()
            else:
                where = arena.splits["train" if phase.data == "none" else phase.data]
                size = np.take_along_axis(where.size, ids, 1)
                steps = num_steps(phase, size)
            steps = np.where(present, steps, 0)
            if phase.when is not None:
                takes = self.engine.clients(phase.when, work, site).cpu().numpy()
                steps = np.where(takes, steps, 0)
            if not steps.any():  # nobody takes it: no batches, no steps
                work = self.engine.clients(phase.enter, work, site)
                work = self.engine.clients(phase.leave, work, site)
                continue
            order = np.argsort(steps == 0, axis=1, kind="stable")
            if phase.when is None or (order[:, 1:] > order[:, :-1]).all():
                plan = build_plan(phase, arena, ids, keys, steps, self._part_keys(phase, ids, run))
                work, taken = self.engine.phase(phase, work, site, plan)
            else:  # those who take it come first, so that no step is computed for the others
                who, there = (np.take_along_axis(v, order, 1) for v in (ids, steps))
                their = np.take_along_axis(keys, order[:, :, None], 1)
                plan = build_plan(phase, arena, who, their, there, self._part_keys(phase, who, run))
                pick, back = (
                    torch.from_numpy(v).to(self.arena.device) for v in (order, order.argsort(1))
                )
                moved, taken = self.engine.phase(
                    phase, _reorder(work, pick), _reorder_site(site, pick), plan
                )
                work = _reorder(moved, back)
            samples = plan.samples
            if phase.stop is not None:
                samples = plan.samples_in(np.asarray(taken.cpu()))
            forward, backward = self.engine.calls.get(phase.name, (0, 0))
            costs.backward += backward * samples.sum(1) // phase.draws
            costs.forward += forward * samples.sum(1) // phase.draws
        return work, costs

    def _part_keys(self, phase: Phase, ids: np.ndarray, run: int) -> np.ndarray | None:
        """Fold the keys of the order that cuts a client's samples into parts.

        It depends on the run's seed alone, so that equal clients are cut alike.
        """
        if phase.part == (0.0, 1.0):
            return None
        base = rng.fold_host(self.base[run : run + len(ids)], "part")
        return np.broadcast_to(base[:, None, :], (*ids.shape, 2))

    # ---- evaluation
    # -------------------------------------------------------------------------------------

    def evaluate(
        self, server: Tree, store: Store, round_index: int, splits: tuple[str, ...] = ("test",)
    ) -> tuple[dict[str, Tally], Receipt]:
        """Score what every client would use now: letters, ``begin``, ``adapt``, ``model``.

        Nothing is kept. The receipt says what letters and adaptation cost.
        """
        tallies = {split: self._blank() for split in splits}
        method = self.record(round_index)

        def score(block: tuple[int, np.ndarray]) -> tuple[Costs, np.ndarray]:
            run, ids = block
            site, keys = self.letters_to(_cut(server, run, len(ids)), round_index, ids, run)
            model, costs = self.use(method, store, site, keys, ids, run)
            self.score(method, model, site, ids, run, tallies)
            return costs, (np.ones_like(ids) * self._letter_bytes(method, site)).sum(1)

        zero = np.zeros(self.arena.num_runs, dtype=np.int64)
        receipt = Receipt(zero, zero.copy(), zero.copy(), zero.copy(), zero.copy())
        blocks = self.client_blocks()
        found = self.engine.blocks(score, blocks)
        for (run, ids), (costs, letters) in zip(blocks, found, strict=True):
            runs = slice(run, run + len(ids))
            receipt.bytes_down[runs] += letters
            receipt.gradient_evaluations[runs] += costs.backward
            receipt.forward_evaluations[runs] += costs.forward
        return tallies, receipt

    def evaluate_centre(
        self, server: Tree, round_index: int, splits: tuple[str, ...] = ("test",)
    ) -> dict[str, Tally]:
        """Score the global model on every client's data."""
        return self.evaluate_common(self.centre(server, round_index), round_index, splits)

    def evaluate_common(
        self,
        models: Tree,
        round_index: int,
        splits: tuple[str, ...] = ("test",),
        clients: int | None = None,
    ) -> dict[str, Tally]:
        """Score one model per run, (runs, ...), on the data of the first clients, or of all."""
        tallies = {split: self._blank() for split in splits}

        def score(block: tuple[int, np.ndarray]) -> None:
            run, ids = block
            self.score_centre(_cut(models, run, len(ids)), round_index, ids, run, tallies)

        blocks = self.client_blocks()
        if clients is not None:
            most = self.engine.chunk((self._phase_once(self._plain, splits[0]),))
            width = max(1, most // clients)
            runs = range(0, self.arena.num_runs, width)
            blocks = [(run, self.everybody[run : run + width, :clients]) for run in runs]
        self.engine.blocks(score, blocks)
        return tallies

    def score_centre(
        self,
        centre: Tree,
        round_index: int,
        ids: np.ndarray,
        run: int,
        tallies: dict[str, Tally],
    ) -> None:
        """Score one model per run, (runs, ...), on the data of the clients ``ids`` (runs, n)."""
        hub = self.hub("evaluate", round_index, ids, np.ones_like(ids, dtype=bool), run)
        site = self.site(hub, self.keys("evaluate", round_index, ids, run), {}, {})
        model = tree.map(lambda leaf: leaf[:, None].expand(*ids.shape, *leaf.shape[1:]), centre)
        self.score(self._plain, model, site, ids, run, tallies)

    def score(
        self,
        method: Method,
        model: Tree,
        site: Site,
        ids: np.ndarray,
        run: int,
        tallies: dict[str, Tally],
    ) -> None:
        """Score the models (runs, n, ...) of the clients ``ids`` on their own data."""
        there = np.ones_like(ids, dtype=bool)
        for split, tally in tallies.items():
            self._score(method, model, site, ids, there, run, split, tally)

    def centre(self, server: Tree, round_index: int) -> Tree:
        """Return the parameters of the global model: (runs, ...)."""
        there = np.ones_like(self.everybody, dtype=bool)
        hub = self.hub("evaluate", round_index, self.everybody, there)
        found: Tree = self.engine.runs(self.method.centre, server, hub)
        return found

    def inspect_clients(self, store: Store, round_index: int) -> dict[str, np.ndarray]:
        """Return what the method shows of every client's kept state: (runs, clients, ...)."""
        found: dict[str, np.ndarray] = {}
        if self.method.inspect_client is None:
            return found
        for run, ids in self.client_blocks():
            for name, leaf in tree.items(self.inspect_some(store, round_index, ids, run)):
                rows = leaf.cpu().numpy()
                shape = (*self.everybody.shape, *rows.shape[2:])
                table = found.setdefault(name, np.zeros(shape, dtype=np.float32))
                table[run + np.arange(len(ids))[:, None], ids] = rows
        return found

    def inspect_some(self, store: Store, round_index: int, ids: np.ndarray, run: int = 0) -> Tree:
        """Return what the method shows of the kept states of the clients ``ids`` (runs, n)."""
        if self.method.inspect_client is None:
            return {}
        hub = self.hub("inspect", round_index, ids, np.ones_like(ids, dtype=bool), run)
        site = self.site(hub, self.keys("inspect", round_index, ids, run), {}, {})
        found = self.engine.clients(self.method.inspect_client, store.gather(ids, run), site)
        return tree.map(lambda leaf: leaf.float(), found)

    def client_blocks(self) -> list[tuple[int, np.ndarray]]:
        """Cut all clients into blocks, the largest test sets of every run first.

        Returns:
            of every block the first run, and the ids (runs, n) of its clients.
        """
        phases = self.method.adapt or (self._phase_once(self.method, "test"),)
        size = self.arena.splits["test"].size
        order = np.argsort(-size, axis=1, kind="stable")
        most = self.engine.chunk(phases)
        width = max(1, min(most // len(order), 4096))
        return [
            (run, order[run : run + most, slot : slot + width])
            for run in range(0, len(order), most)
            for slot in range(0, order.shape[1], width)
        ]

    def models(
        self, server: Tree, store: Store, round_index: int, ids: np.ndarray, run: int = 0
    ) -> tuple[Site, Tree, Costs]:
        """Return site and models of the clients ``ids`` (runs, n) before local training.

        The runs are ``run`` and those after it, and the server is theirs. The costs are those of
        adaptation.
        """
        site, keys = self.letters_to(server, round_index, ids, run)
        model, costs = self.use(self.record(round_index), store, site, keys, ids, run)
        return site, model, costs

    def letters_to(
        self, server: Tree, round_index: int, ids: np.ndarray, run: int = 0
    ) -> tuple[Site, np.ndarray]:
        """Write the letters of an evaluation to the clients ``ids`` (runs, n): sites and keys."""
        hub = self.hub("evaluate", round_index, ids, np.ones_like(ids, dtype=bool), run)
        keys = self.keys("evaluate", round_index, ids, run)
        letters = self.letters(self.record(round_index), server, hub)
        return self.site(hub, keys, *letters), keys

    def use(
        self,
        method: Method,
        store: Store,
        site: Site,
        keys: np.ndarray,
        ids: np.ndarray,
        run: int = 0,
    ) -> tuple[Tree, Costs]:
        """Do what clients do with a letter at an evaluation: ``begin``, ``adapt``, ``model``."""
        work = self.engine.clients(method.begin, store.gather(ids, run), site)
        there = np.ones_like(ids, dtype=bool)
        work, costs = self._phases(method.adapt, work, site, keys, ids, there, run)
        return self.engine.clients(method.model, work, site), costs

    def _score_phase(self, method: Method, split: str) -> Phase:
        predict = method.predict or self.task.logits

        def step(sums: Tree, batch: Batch, site: Site) -> Tree:
            scores = predict(site.own, batch.x)
            loss = torch.where(batch.mask, self.task.criterion(scores, batch.y), 0.0).sum()
            right = (self.task.is_correct(scores, batch.y) & batch.mask).sum()
            return {"correct": sums["correct"] + right, "loss": sums["loss"] + loss.double()}

        return Phase(
            name=f"score {split}", step=step, data=split, shuffle=False, batch=self.eval_batch
        )

    def _score(
        self,
        method: Method,
        model: Tree,
        site: Site,
        ids: np.ndarray,
        present: np.ndarray,
        run: int,
        split: str,
        tally: Tally,
    ) -> None:
        """Add up correct answers and losses of one model per lane.

        The model takes the place of a letter.
        """
        phase = self._phase_once(method, split)
        arena = _cut_arena(self.arena, run, ids.shape[0])
        size = np.where(present, np.take_along_axis(arena.splits[split].size, ids, 1), 0)
        order = np.argsort(-size, axis=1, kind="stable")
        pick = torch.from_numpy(order).to(self.arena.device)
        lane = torch.arange(len(pick), device=pick.device)[:, None]
        ids, size = np.take_along_axis(ids, order, 1), np.take_along_axis(size, order, 1)
        sorted_model = tree.map(lambda leaf: leaf[lane, pick], model)
        here = site._replace(own=sorted_model, common={}, index=site.index[lane, pick])
        signature = (split, run, ids.tobytes(), size.tobytes())
        plan = self._score_plans.get(signature)
        if plan is None:
            keys = np.zeros((*ids.shape, 2), dtype=np.int64)
            plan = build_plan(phase, arena, ids, keys, num_steps(phase, size))
            if len(self._score_plans) > 64:
                self._score_plans.clear()
            self._score_plans[signature] = plan
        zero = torch.zeros(ids.shape, device=self.arena.device, dtype=torch.float64)
        sums, _ = self.engine.phase(phase, {"correct": zero.long(), "loss": zero}, here, plan)
        found = torch.stack((sums["correct"].double(), sums["loss"])).cpu().numpy()
        where = (np.arange(run, run + len(ids))[:, None], ids)
        scored = np.take_along_axis(present, order, 1)
        tally.correct[where] = np.where(scored, found[0], tally.correct[where])
        tally.loss[where] = np.where(scored, found[1], tally.loss[where])

    def _phase_once(self, method: Method, split: str) -> Phase:
        """Make each scoring phase once, so that engines can recognise it."""
        key = (id(method), split)
        if key not in self._score_phases:
            self._score_phases[key] = self._score_phase(method, split)
        return self._score_phases[key]

    # ---- small parts
    # ------------------------------------------------------------------------------------

    def _blank(self) -> Tally:
        shape = (self.arena.num_runs, self.arena.num_clients)
        return Tally(np.full(shape, np.nan), np.full(shape, np.nan))

    def _blocks(
        self, phases: tuple[Phase, ...], shape: tuple[int, ...], lanes: int | None = None
    ) -> list[Block]:
        """Cut (runs, slots) into blocks of at most ``lanes`` (the engine's choice if None)."""
        runs, slots = shape
        most = max(1, lanes or self.engine.chunk(phases))
        num_slots = min(slots, most)
        num_runs = min(runs, max(1, most // num_slots))
        return [
            Block(run, min(num_runs, runs - run), slot, min(num_slots, slots - slot))
            for run in range(0, runs, num_runs)
            for slot in range(0, slots, num_slots)
        ]

    def _clock(self, seconds: dict[str, float]) -> Callable[[str], float]:
        """Return a stop-watch.

        Each call books the time since the last one under a name, and returns it. On a GPU it marks
        the moment in the queue of work, and the time is booked at the end of the round.
        """
        last = [time.perf_counter()]

        def stop(name: str) -> float:
            passed = time.perf_counter() - last[0]
            seconds[name] += passed
            last[0] += passed
            return passed

        if self.arena.device.type != "cuda":
            return stop
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        before = [event]

        def mark(name: str) -> float:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
            self._marks.append((seconds, name, before[0], now))
            before[0] = now
            return 0.0

        return mark

    def _read_marks(self) -> None:
        """Book the times that the device has taken, once it is done: nobody waits before."""
        if self._marks:
            torch.cuda.synchronize()
        for seconds, name, before, now in self._marks:
            seconds[name] += before.elapsed_time(now) / 1000
        self._marks.clear()


def _cut(value: Tree, run: int, runs: int) -> Tree:
    return tree.narrow(value, 0, run, runs)


def _cut_site(site: Site, block: Block) -> Site:
    """View (or, where slots are listed, copy) the site of a block of lanes."""
    by_run = {"common", "round"}
    only = None if block.only is None else torch.from_numpy(block.only).to(site.index.device)

    def slots(value: Tree) -> Tree:
        if only is None:
            return tree.narrow(value, 1, block.slot, block.slots)
        return tree.map(lambda leaf: leaf.index_select(1, only), value)

    return Site(
        **{
            f: _cut(v, block.run, block.runs)
            if f in by_run
            else slots(_cut(v, block.run, block.runs))
            for f, v in zip(Site._fields, site, strict=True)
        }
    )


def _planned(phase: Phase) -> tuple[bool, int]:
    """Rank phases by what they are sure to cost: first those that nobody leaves out or ends."""
    return phase.when is None and phase.stop is None, phase.epochs if phase.steps is None else 1


def _reorder(value: Tree, order: Tensor) -> Tree:
    """Put the slots of every run into another order."""
    lane = torch.arange(len(order), device=order.device)[:, None]
    found: Tree = tree.map(lambda leaf: leaf[lane, order], value)
    return found


def _reorder_site(site: Site, order: Tensor) -> Site:
    by_run = {"common", "round"}
    fields = zip(Site._fields, site, strict=True)
    return Site(**{f: v if f in by_run else _reorder(v, order) for f, v in fields})


def _cut_arena(arena: Arena, run: int, runs: int) -> Arena:
    if runs == arena.num_runs:
        return arena
    splits = {
        k: replace(s, start=s.start[run : run + runs], size=s.size[run : run + runs])
        for k, s in arena.splits.items()
    }
    return replace(arena, splits=splits, num_runs=runs)
