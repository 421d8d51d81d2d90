"""Federated stability, measured: how far one record moves its client's model, for any method.

Chen, Zheng, Long, Su, JMLR 24(262), 2023 (arXiv 2103.01901), Definition 5. For every client i, some
record z_ij of its training data is replaced by a z′ that it did not train on, and the WHOLE
federation is trained again from the same initial model, with the same cohorts, batches and seeds.

| symbol | here | meaning |
|---|---|---|
| S, S′ | lane 0, the other lanes | the federation, and with record j of client i replaced |
| J | replacements | how many z_ij, z′ a client |
| s | distance | ‖ŵ_i(S) − ŵ_i(S′)‖ over all real leaves of what client i uses |
| Δ | change | max over the evaluation set of the change of the loss of ŵ_i |
| γ̂_i | gamma | max Δ over the J; a LOWER bound of γ_i, which is over all S, j, z′ and z |

All federations train as lanes of one pass, or of several within a memory budget. They share
features and labels: a lane costs the index list of the one client that it changes. Every pass has
its own lane 0, so that what is compared went through the same arithmetic. Bounds and a shortcut for
convex losses are in ``sartor.theory.stability``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sartor import methods
from sartor.analysis.replacement import Replacements, check, draw, find_judge, find_pool, place
from sartor.core import tree
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, DivergedError
from sartor.core.hyper import Value
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.engines import make_engine
from sartor.engines.arena import build_arena, with_replacements
from sartor.engines.parts import Arena
from sartor.results.tables import Table
from sartor.training.driver import drive, progress_of
from sartor.training.progress import Progress
from sartor.training.schema import DTYPES, parse_choice, parse_device, parse_seeds, parse_whole
from sartor.training.settings import list_runs, make_task, with_static_parts
from sartor.training.simulation import Simulation

_BATCH = 4096  # evaluation samples at once


@dataclass(frozen=True)
class StabilityReport:
    """What was measured."""

    method: str  # the name of the method
    names: tuple[str, ...]  # the clients of the federation
    sizes: np.ndarray  # (clients,) n_i
    replacements: Replacements  # the K records that were replaced, and by what
    distance: np.ndarray  # (K,) s
    change: np.ndarray  # (K,) Δ
    pool: str  # where z′ came from
    eval_set: str  # over which samples Δ is a maximum
    passes: int  # how many passes the lanes took
    seconds: float  # how long it took

    @property
    def gamma(self) -> np.ndarray:
        """γ̂_i = max Δ, (clients,): a lower bound of γ_i; NaN for clients that were left out."""
        return self.per_client("change", 1.0)

    def per_client(self, what: str = "change", quantile: float | None = None) -> np.ndarray:
        """Return the mean, or a quantile, of "change" (Δ) or "distance" (s): (clients,)."""
        values: np.ndarray = getattr(self, what)
        found = np.full(len(self.names), np.nan)
        for i in np.unique(self.replacements.client):
            own = values[self.replacements.client == i]
            found[i] = own.mean() if quantile is None else np.quantile(own, quantile)
        return found

    def table(self) -> Table:
        """Return n_i, γ̂_i, the mean and 95 % quantile of Δ, and the mean and largest s."""
        columns: dict[str, np.ndarray] = {
            "n": self.sizes,
            "gamma": self.gamma,
            "mean Δ": self.per_client(),
            "95% Δ": self.per_client(quantile=0.95),
            "mean s": self.per_client("distance"),
            "max s": self.per_client("distance", 1.0),
        }
        kept = np.unique(self.replacements.client)
        rows = [[self.names[i], *(column[i] for column in columns.values())] for i in kept]
        notes = {
            "gamma": "max Δ, a lower bound of the stability γ_i",
            "z′ from": self.pool,
            "Δ over": self.eval_set,
        }
        return Table(["client", *columns], rows, notes, title=f"stability of {self.method}")

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table())


def stability(
    method: str | methods.Factory,
    federation: Federation,
    *,
    model: nn.Module | None = None,
    local: Local | None = None,
    rounds: int = 20,
    replacements: int | Replacements = 20,
    clients: Sequence[str | int] | None = None,
    pool: str | Federation | None = None,
    eval_set: str | tuple[Any, Any] = "test",
    hyper: Mapping[str, Value] | None = None,
    options: Mapping[str, Any] | None = None,
    participation: Participation | str | float = 1.0,
    seed: int = 0,
    engine: str = "auto",
    chunk: int | None = None,
    device: str | torch.device = "auto",
    dtype: str = "float32",
    memory: int = 1 << 30,
    progress: Progress | None = None,
) -> StabilityReport:
    """Measure the federated stability of a method.

    Args:
        method: a name of ``sartor.methods.METHODS``, or a factory.
        federation: the data.
        model: a network; chosen from the data if None.
        local: local training.
        rounds: communication rounds.
        replacements: J, how many a client; the protocol asks for 20 at least. Or the replacements
            themselves, whose rows are positions in ``federation.x``.
        clients: whose records are replaced; all clients if None.
        pool: where z′ comes from, always from the same client: "val", "test", or a federation with
            the same clients whose training samples are the pool. None takes validation data if
            every client has some and the method does not train on them, else test data.
        eval_set: the z of Δ: "test", the test samples of all clients; "own", those of the client;
            or a pair (x, y). The larger, the closer is γ̂ to γ.
        hyper: values of hyper-parameters.
        options: static options of the method.
        participation: which clients participate; the same cohorts in all lanes.

    Other Args:
        seed: of the training and of the draws; a larger J begins with the draws of a smaller one.
        engine: see ``fit``.
        chunk: see ``fit``.
        device: see ``fit``.
        dtype: see ``fit``.
        memory: bytes that the states of the lanes of a pass may take, roughly.
        progress: shows how far it is, over the rounds of all passes.

    Raises:
        ConfigError, FederationError: for what cannot be right.
        DivergedError: if a model became NaN.
    """
    began = time.perf_counter()
    hyper, options = dict(hyper or {}), dict(options or {})
    seed, rounds = parse_seeds(seed)[0], parse_whole("rounds", rounds)
    number = parse_choice("dtype", dtype, DTYPES)
    task = make_task(model, federation, None)
    record = methods.build(
        method, task, with_static_parts((local or Local()).over(rounds), hyper, {}), options
    )
    run = list_runs(record, options, hyper, {}, (seed,))[0]
    if isinstance(replacements, Replacements):
        if pool is not None or clients is not None:
            raise ConfigError("Given replacements say all; leave pool= and clients= out.")
        chosen, source = check(replacements, federation), None
    else:
        ids = range(federation.num_clients) if clients is None else map(federation.index, clients)
        source, num = find_pool(federation, pool, record), parse_whole("replacements", replacements)
        chosen = draw(federation, source, list(ids), num, seed)
    base, row = place(build_arena([federation], parse_device(device), number), source, chosen)
    judge, over = find_judge(federation, eval_set, base)

    def simulate(arena: Arena) -> Simulation:
        return Simulation(
            record,
            task,
            [federation] * arena.num_runs,
            [run] * arena.num_runs,
            lambda arena: make_engine(engine, arena, chunk, task),
            rounds=rounds,
            participation=Participation.parse(participation),
            device=arena.device,
            dtype=number,
            points=(),
            arena=arena,
        )

    most = max(1, int(memory) // _bytes_per_run(simulate(base)) - 1)
    order = np.argsort(chosen.client, kind="stable")  # a client's lanes stay together
    passes = np.array_split(order, -(-len(order) // most))
    distance, change = np.zeros(len(order)), np.zeros(len(order))

    def shown(before: int, simulation: Simulation) -> None:
        if progress is not None:
            progress.update(before + simulation.round_index - 1, progress_of(simulation))

    if progress is not None:
        progress.start(rounds * len(passes), f"{record.name} ({len(order) + len(passes)} runs)")
    try:
        for k, part in enumerate(passes):
            client = np.concatenate([[-1], chosen.client[part]])
            place_of = np.concatenate([[0], chosen.record[part]])
            arena = with_replacements(base, client, place_of, np.concatenate([[0], row[part]]))
            simulation = simulate(arena)
            drive(simulation, after_round=partial(shown, k * rounds, simulation))
            for i in np.unique(chosen.client[part]).tolist():
                lanes = np.nonzero(client == i)[0]
                distance[part[lanes - 1]], change[part[lanes - 1]] = _compare(
                    simulation, i, lanes, judge(i)
                )
    finally:
        if progress is not None:
            progress.stop()
    return StabilityReport(
        method=record.name,
        names=federation.names,
        sizes=federation.train.sizes.numpy(),
        replacements=chosen,
        distance=distance,
        change=change,
        pool="given replacements" if source is None else source.name,
        eval_set=over,
        passes=len(passes),
        seconds=time.perf_counter() - began,
    )


def _compare(
    simulation: Simulation, client: int, lanes: np.ndarray, judge: tuple[Tensor, Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Return s and Δ of a client's model in some lanes against lane 0."""
    ids = np.full((len(simulation.runs), 1), client)
    model = tree.map(lambda leaf: leaf[:, 0], simulation.models(ids))
    real = [leaf for leaf in tree.leaves(model) if leaf.is_floating_point()]
    flat = torch.cat([leaf.double().reshape(len(ids), -1) for leaf in real], 1)
    predict = simulation.task.answer(simulation.method.use.predict)

    def losses(lane: int) -> Tensor:
        own = tree.map(lambda leaf: leaf[lane], model)
        parts = zip(judge[0].split(_BATCH), judge[1].split(_BATCH), strict=True)
        with torch.no_grad():
            found = [simulation.task.criterion(predict(own, x), y) for x, y in parts]
        return torch.cat(found).double()

    first = losses(0)
    change = torch.stack([(losses(int(lane)) - first).abs().max() for lane in lanes])
    distance = (flat[torch.from_numpy(lanes).to(flat.device)] - flat[0]).norm(dim=1)
    if not bool(torch.isfinite(distance + change).all()):
        name = simulation.federations[0].names[client]
        raise DivergedError(
            f"The model or a loss of client {name} is not finite after {simulation.num_rounds} "
            "rounds, so its stability cannot be measured; try a smaller local_lr.",
            run=0,
            round=simulation.num_rounds - 1,
            client=name,
        )
    return distance.cpu().numpy(), change.cpu().numpy()


def _bytes_per_run(simulation: Simulation) -> int:
    """Estimate the memory of one run: states and models, then batches, activations and plans."""
    stores = (simulation.store, simulation.trained)
    everybody = simulation.context.everybody
    states = [store.gather(everybody) for store in stores if store is not None]
    kept = sum(map(tree.num_bytes, (simulation.server, *states)))
    arena, module = simulation.context.arena, simulation.task.module
    weights = simulation.task.num_trained * simulation.dtype.itemsize
    phases = simulation.method.phases
    capacity = arena.splits["train"].capacity
    batch = max((min(p.batch or capacity, capacity) for p in phases), default=0)
    passes = max((p.epochs if p.steps is None else 1 for p in phases), default=0)
    sample = arena.x[:1].numel() * arena.x.element_size()
    inside = 2 * _activations(module, arena.x[:1].cpu()) * simulation.dtype.itemsize
    lane = 3 * weights + batch * (2 * sample + inside) + 48 * capacity * passes
    return 3 * kept + arena.num_clients * lane


def _activations(module: nn.Module, sample: Tensor) -> int:
    """Count the numbers that the parts of a network give for one sample."""
    seen: list[int] = []

    def count(part: nn.Module, given: Any, found: Any) -> None:
        seen.append((found[0] if isinstance(found, tuple) else found).numel())

    parts = [part for part in module.modules() if not list(part.children())]
    hooks = [part.register_forward_hook(count) for part in parts]
    try:
        with torch.no_grad():
            kind = next(module.parameters()).dtype
            module(sample.to(kind) if sample.is_floating_point() else sample)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(seen)
