"""The laws that every method must honour, whatever it does.

``check_method`` tries all of them on one case; ``tests/methods/test_laws.py`` does so for every
entry of ``sartor.methods.METHODS`` with its defaults, and for every line of ``VARIANTS`` (some laws
of variants are slow tests). A new
method is covered as it is listed; a variant of it, or values that make it move, are one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sartor.compose.fields import get
from sartor.core import task as task_module
from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import ClientContext, Method, Phase, changed, endings
from sartor.core.task import Task
from sartor.engines.cpu import traces as traced
from sartor.methods import METHODS, Factory, build
from sartor.runs.archive import to_numpy
from sartor.runs.storage import read_state, write_state
from tests.toys import (
    assert_same,
    differ,
    federation,
    linear_task,
    net_task,
    outcome,
    run,
    simulation,
    states,
    two_allocations,
)

SGD = Local(epochs=1, batch=4, lr=0.2)
HEAVY = Local(epochs=2, batch=4, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
RESTART = replace(HEAVY, keep_optimiser=False, drop_last=True)
ADAM = Local(epochs=2, batch=4, lr=0.02, optimizer="adam", weight_decay=0.01, keep_optimiser=True)
ADAMW = replace(ADAM, optimizer="adamw", keep_optimiser=False, clip_norm=1.0)


@dataclass(frozen=True)
class Case:
    """A method with options, hyper-parameters and a local training."""

    method: str | Factory
    options: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, float] = field(default_factory=dict)
    local: Local = SGD
    linear: bool = False

    @property
    def is_default(self) -> bool:
        """Whether this is a method as it is listed, and no variant of it."""
        return not (self.options or self.hyper or self.linear) and self.local is SGD

    def task(self) -> Task:
        """Return the network: a small one, or a linear model."""
        return linear_task() if self.linear else net_task()

    def build(self, task: Task, local: Local | None = None) -> Method:
        """Build the record."""
        return build(self.method, task, local or self.local, dict(self.options))

    def __str__(self) -> str:
        """Name the case in the list of tests."""
        kinds = {id(SGD): "", id(HEAVY): "-heavy", id(RESTART): "-restart"}
        kinds |= {id(ADAM): "-adam", id(ADAMW): "-adamw"}
        name = self.method if isinstance(self.method, str) else self.method.__name__
        options = "-".join(str(v) if isinstance(v, str) else k for k, v in self.options.items())
        kind = f"{kinds.get(id(self.local), '-own')}{'-linear' if self.linear else ''}"
        return f"{name}{'-' if options else ''}{options}{kind}"


_CONVEX = {"smoothness": 2.0, "strong_convexity": 1.0}
_UNIT = {"body.weight": 0.5, "body.bias": 1.0, "fc.weight": 1.0}
VARIANTS: list[Case] = [
    Case("local", local=HEAVY),
    Case("local", {"participation": "sampled"}),
    Case("fedavg", hyper={"relax": 1.5}, local=HEAVY),
    Case("fedavg", {"rule": "uniform"}, local=RESTART),
    Case("fedavg", local=ADAM),
    Case("ditto", {"choices": (1.0, 0.1)}, local=ADAMW),
    Case("fedrep", local=ADAMW),
    Case("fedavg", {"class_weights": (1.0, 0.5, 3.0)}),
    Case("scaffold", {"class_weights": (1.0, 0.5, 3.0)}),
    Case("fedavg", {"rule": "chen"}, {"server_lr": 0.8}),
    Case("fedavg", {"rule": "p_weighted", "client_weights": (0.1, 0.2, 0.3, 0.3, 0.1)}),
    Case("fedavg-ft", {"ft_steps": 3}, local=HEAVY),
    Case("fedavg-ft", {"ft_epochs": 1, "ft_pull": True}, {"ft_prox_strength": 0.5}),
    Case("dichotomous", {"scope": "client", "score": "loss"}, local=HEAVY),
    Case("dichotomous", {"select_on": "validation", "score": "loss"}),
    Case("dichotomous", {"version": "threshold"}, {"heterogeneity": 0.32}),
    Case("dichotomous", {"version": "threshold", "radius": "estimated", "fit_epochs": 40}),
    Case("dichotomous", {"version": "sample_split", "select_on": "test", "score": "loss"}),
    Case("dichotomous", {"version": "clustered", "fit_epochs": 3}),
    Case("dichotomous", {"version": "clustered", "num_clusters": 2, "inside": "threshold"}),
    Case("fedprox", hyper={"prox_strength": 0.5}, local=HEAVY),
    Case("fedprox", {"preset": "free", "weights": "samples"}, {"server_lr": 0.7}),
    Case("fedprox", {"preset": "paper_real", "unbiased": True}, {"prox_strength": 0.5}),
    Case("fedprox", {"preset": "paper_synthetic", "smoothness": 2.0}),
    Case("fedprox", {"preset": "corollary1", **_CONVEX}, {"prox_strength": 0.5}),
    Case("fedprox", {"lambda_rule": "v1"}, {"heterogeneity": 2.0}),
    Case(
        "fedprox",
        {"lambda_rule": "v2", "preset": "paper_synthetic", **_CONVEX},
        {"heterogeneity": 2.0},
    ),
    Case(
        "fedprox",
        {"lambda_rule": "shrinkage", "preset": "corollary1", "weights": "samples", **_CONVEX},
        {"heterogeneity": 2.0, "noise": 3.0},
    ),
    Case("evidence", {"groups": "scalar"}, {"spread": 0.5}),
    Case("evidence", {"groups": "layer", "newton_steps": 2}, {"width": 2.0}),
    Case("evidence", {"learn": False}, {"spread": 0.3}),
    Case("evidence", {"groups": "full", "update": "em"}, {"spread": 0.3}),
    Case("evidence", linear=True),
    Case("evidence", {"groups": "full", "posterior": True}, linear=True),
    Case("evidence", {"sharing": "one"}, linear=True),
    Case("evidence", {"sharing": "alone", "multiples": False}, linear=True),
    Case("l2gd", {"gradient": "batch"}, {"average_probability": 0.4}),
    Case("l2gd", {"longest_run": 2}, local=replace(SGD, weight_decay=0.1)),
    Case("l2gd", {"participation": "sampled"}, {"average_probability": 0.6}),
    Case("l2gd", {"preset": "paper", "smoothness": 2.0}, {"prox_strength": 1.0}),
    Case("ditto", hyper={"prox_strength": 0.5}, local=HEAVY),
    Case("ditto", {"personal_steps": 3, "rule": "chen"}, {"personal_lr": 0.1}, RESTART),
    Case("ditto", {"choices": (1.0, 0.1, 2.0), "personal_epochs": 1}, local=RESTART),
    Case("per-fedavg", {"mode": "hessian_free"}, {"difference": 0.5, "personal_lr": 0.3}),
    Case("per-fedavg", {"mode": "exact", "preset": "prior"}, {"relax": 1.5}),
    Case("per-fedavg", {"rule": "normalized", "personal_steps": 2}),
    Case("fedprox-two-stage", {"weights": "samples", "final_steps": 3}, local=HEAVY),
    Case("fedprox-two-stage", {"domain": "ball"}, {"domain_size": 1.0}, RESTART),
    Case(
        "fedprox-two-stage",
        {"preset": "theory", "strong_convexity": 4.0, "growth": 0.5},
        {"prox_strength": 3.0},
    ),
    Case(
        "fedprox-two-stage",
        {"preset": "theory", "strong_convexity": 4.0, "domain": "box", "project_global": True},
        {"domain_size": 0.3},
    ),
    Case("pfedme", {"inner_start": "carry", "weights": "samples"}, {"relax": 1.5}),
    Case("pfedme", {"train_all": False}, local=replace(RESTART, momentum=0.0)),
    Case("pfedbred", {"strategy": "none", "inner_start": "theta"}, {"relax": 1.5}),
    Case("pfedbred", {"strategy": "lg", "envelope": "exact"}, {"prior_lr": 0.3}),
    Case("pfedbred", {"strategy": "meg", "train_all": False}, {"memory_lr": 0.5}),
    Case("pfedbred", {"strategy": "mh-variant", "envelope": "exact"}, {"prior_lr": 0.3}),
    Case("pfedbred", {"mode": "code"}, local=replace(RESTART, momentum=0.0)),
    Case("pfedbred", {"covariance": {**_UNIT, "fc.bias": 2.0}, "strategy": "lg"}),
    Case("pfedbred", {"family": "bernoulli"}, {"prior_width": 2.0}),
    Case("pfedbred", {"family": "poisson", "strategy": "meg"}),
    Case("pfedbred", {"family": "exponential", "envelope": "exact"}),
    Case("fedapa", hyper={"mix_lr": 0.5}, local=HEAVY),
    Case("fedapa", {"preset": "authors_code"}, {"mix_lr": 0.5, "self_weight": 0.4}),
    Case("fedapa", {"weight_step": "as_printed", "share": "all"}, {"mix_lr": 0.5}),
    Case("fedapa", {"clip_weights": False, "normalise_weights": False}, {"mix_lr": 0.1}),
    Case("fedapa", {"pin_weights": False, "schedule": "sequential"}, {"mix_lr": 0.5}),
    Case("fedapa", {"schedule": "parallel", "server_momentum": True}, {"mix_lr": 0.5}),
    Case("fedamp", {"scale": "absolute", "decay_every": 2}, {"mix_decay": 0.5}, HEAVY),
    Case("fedamp", {"start": "cloud", "pool": "participants"}, local=RESTART),
    Case("heur-fedamp", {"pool": "participants", "decay_every": 2}, {"mix_decay": 0.5}, HEAVY),
    Case("fedala", {"ala_for": "all", "layers": 2, "window": 3}, {"mix_lr": 0.5}, HEAVY),
    Case("fedala", {"share": 0.5, "start_passes": 3}, local=RESTART),
    Case("fedphp", {"transfer": "kd", "first_teacher": "initial"}, local=HEAVY),
    Case("fedphp", {"transfer": "mmd_fixed", "progress": "rounds"}, local=RESTART),
    Case("apple", {"shape": "cosine", "core_rate": "plain"}, {"pull": 0.5}, local=HEAVY),
    Case("apple", {"start": "uniform"}, {"relation_lr": 0.05}, local=RESTART),
    Case("apple", {"budget": 2, "max_clients": 7, "start_cores": "own"}, local=HEAVY),
    Case("fedfomo", {"distance": "l1", "fallback": "reference"}, local=HEAVY),
    Case("fedfomo", {"select_on": "validation", "affinity": "normalised", "available": "ever"}),
    Case("fedper", local=HEAVY),
    Case("fedrep", {"head_steps": 3, "body_epochs": 1}, local=HEAVY),
    Case("fedrep", {"head_epochs": 1, "final_head_epochs": 2}, local=RESTART),
    Case("fedbabu", {"ft_steps": 3, "ft_part": "head"}, local=HEAVY),
    Case("lg-fedavg", local=HEAVY),
    Case("lg-fedavg", {"warmup_rounds": 1}, local=HEAVY),
    Case("fedrod", {"personal_start": "zero"}, {"balance": 0.7}, HEAVY),
    Case("moon", hyper={"contrast_strength": 5.0}, local=HEAVY),
    Case("fedbn", {"private": ("body",)}, local=HEAVY),
    Case("fedem", {"components": 2, "refresh_weights": True}, {"relax": 1.5}, HEAVY),
    Case("pfedbayes", {"draws": 2, "personal_steps": 2, "predict_draws": 2}, local=HEAVY),
    Case("apfl", {"mixing": "step"}, {"share_decay": 0.1}, HEAVY),
    Case("apfl", {"mixing": "fixed", "rule": "uniform"}, local=RESTART),
    Case("scaffold", {"weights": "samples"}, {"server_lr": 0.8}, HEAVY),
    Case("scaffold", {"control": "gradient"}, local=RESTART),
    Case("pfedhn", {"share": "body", "evaluate": "after_local"}, local=HEAVY),
    Case("pfedla", {"retained": 1}, {"mix_lr": 0.5}, HEAVY),
    Case("fedpac", {"head_epochs": 2}, {"head_lr": 0.1}, HEAVY),
    Case("fedpac", local=RESTART),
    Case("dbe", {"init_mean": "full"}, {"mean_rate": 0.5}, HEAVY),
    Case("dbe", {"memory": False}, local=RESTART),
    Case("fedproto", {"prototypes": "running", "answer": "nearest_own"}, local=HEAVY),
    Case("fedproto", {"average": "count", "absent": "drop"}, local=RESTART),
    Case("fedgh", {"server_epochs": 2}, local=HEAVY),
]
CASES = [*(Case(name) for name in METHODS), *VARIANTS]


# ---- the runs that the laws read ----------------------------------------------------------------


Outcome = dict[str, np.ndarray]


class Straight(NamedTuple):
    """A run of three rounds on two allocations, and its state after two of them."""

    sim: Any
    state: Any
    outcome: Outcome


class Watched(NamedTuple):
    """What was seen while clients were trained one by one, for three rounds and to the end."""

    series: dict[str, int]
    """Bytes of common messages, own messages and uploads, before round 0 and in the rounds."""
    samples: list[int]
    """Samples whose loss was evaluated, and those whose loss was differentiated."""
    private: list[tuple[dict[str, Any], list[Any]]]
    """The private leaves of every model that was finished, and the leaves it sent."""
    called: set[str]
    """Functions of the record that were called."""
    written: set[str]
    """Functions that wrote into their arguments."""


class Uneven(NamedTuple):
    """What was seen while very unequal clients were trained one by one, two rounds and an end."""

    again: Any
    """The same run on all lanes at once, which has not begun."""
    outcome: Outcome
    narrow: set[str]
    """Functions of the record that computed in single precision."""
    padding: list[float]
    """How far each aggregate moves if the slots that only pad its cohort are left out."""


class Trials:
    """The runs of one case; each is trained once, however many laws read it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.task = case.task()
        self.method = case.build(self.task)
        self._pairs: dict[tuple[Any, ...], Outcome] = {}

    def new(self, feds: Any = None, method: Method | None = None, **settings: Any) -> Any:
        """Make a simulation that has not begun, on one federation by default."""
        settings = {"hyper": self.case.hyper, **settings}
        return simulation(method or self.method, self.task, feds or [federation()], **settings)

    def pair(self, method: Method | None = None, **settings: Any) -> Outcome:
        """Run on two allocations at once, scored at both ends; a changed method always anew."""
        settings = {"rounds": 2, "eval_every": settings.get("rounds", 2), **settings}
        key = tuple(sorted((k, str(v)) for k, v in settings.items()))
        if method is not None:
            return outcome(run(self.new(two_allocations(), method, **settings)))
        if key not in self._pairs:
            self._pairs[key] = outcome(run(self.new(two_allocations(), **settings)))
        return self._pairs[key]

    @cached_property
    def single(self) -> Any:
        """Three rounds on one federation, with every step as it is written."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(traced.Traces, "worth_it", 1 << 30)
            return run(self.new())

    @cached_property
    def narrow(self) -> Any:
        """Three rounds on two allocations in single precision."""
        return run(self.new(two_allocations(), eval_every=3, dtype=torch.float32))

    @property
    def long(self) -> dict[str, Any]:
        """The settings of `straight`: in chunks for variants, which have few other runs."""
        return {"rounds": 3, "eval_every": 3, "chunk": None if self.case.is_default else 6}

    @cached_property
    def straight(self) -> Straight:
        """Three rounds on two allocations, with what a checkpoint after the second would hold."""
        sim = self.new(two_allocations(), **self.long)
        sim.step()
        sim.step()
        state = sim.state()
        run(sim)
        return Straight(sim, state, {k: np.array(v) for k, v in outcome(sim).items()})

    @cached_property
    def watched(self) -> Watched:
        """Train one by one with every function of the record and of the task looked at."""
        return _watch(self)

    @cached_property
    def uneven(self) -> Uneven:
        """Two rounds of clients of 1 to 66 samples one by one, with a rate that fades."""
        return _uneven(self)


_LAST: list[Trials] = []


def trials(case: Case) -> Trials:
    """Return the runs of a case: those of the last one asked for are kept."""
    if not _LAST or _LAST[0].case is not case:
        _LAST[:] = [Trials(case)]
    return _LAST[0]


# ---- engines -------------------------------------------------------------------------------------


def engines_agree(case: Case) -> None:
    """Vectorised, whole or in chunks, or one client at a time: the same numbers.

    Chunks of one are those of the law of traces.
    """
    shared = trials(case)
    if not case.is_default:
        wanted = shared.pair(engine="sequential", rounds=3)
        assert_same(shared.straight.outcome, wanted, atol=1e-11)
        return
    wanted = shared.pair(engine="sequential")
    for chunk in (None, 3):
        assert_same(shared.pair(chunk=chunk), wanted, atol=1e-11)


def unequal_clients_agree(case: Case) -> None:
    """Clients of 1 to 66 samples, a warm-up and a decay: engines agree to the end."""
    seen = trials(case).uneven
    assert_same(outcome(run(seen.again)), seen.outcome, atol=1e-10)


def padding_is_no_client(case: Case) -> None:
    """An aggregate is that of the slots whose clients are there: the others count for nothing.

    Not even as a number of clients, by which a sum is divided.
    """
    moved, schedule = trials(case).uneven.padding, trials(case).method.schedule
    # Where clients are served in turn or all take part there is no padding.
    assert moved or schedule.in_turn or schedule.who != "cohort"
    assert max(moved, default=0.0) < 1e-12


def nothing_is_rounded(case: Case) -> None:
    """In a run in double precision no function of a record computes in single precision."""
    assert not trials(case).uneven.narrow


def a_sweep_row_is_the_single_run(case: Case) -> None:
    """A row of a sweep equals the run alone, and rows with different seeds differ."""
    shared, feds = trials(case), two_allocations()
    name = next(iter(shared.method.hyper))
    base = case.hyper.get(name, shared.method.hyper[name].default)
    rows = [(0, 0, base), (1, 4, base / 2), (0, 5, base)]
    hyper = [{**case.hyper, name: value} for _, _, value in rows]
    fed = [feds[k] for k, _, _ in rows]
    seeds = [seed for _, seed, _ in rows]
    swept = outcome(run(shared.new(fed, hyper=hyper, seeds=seeds)))
    # The first row is the run that other laws read; the last is there for its seed alone.
    alone = run(shared.new(fed[1:2], hyper=hyper[1:2], seeds=seeds[1:2]))
    for r, single in enumerate((shared.single, alone)):
        row = {n: v if n.endswith("/round") else v[r : r + 1] for n, v in swept.items()}
        assert_same(row, outcome(single), atol=1e-11)
    assert np.abs(swept["post/test/loss"][0] - swept["post/test/loss"][2]).max() > 1e-6


def a_mapped_store_is_a_store(case: Case, folder: Any) -> None:
    """States in memory-mapped files give the numbers of states in memory, to the bit."""
    assert_same(trials(case).pair(folder=folder, chunk=3), trials(case).pair(chunk=3))


def a_trace_is_the_step(case: Case) -> None:
    """Steps traced as soon as they can be give the numbers of the steps.

    One client at a time, and all at once from the first step on, when a client's model may still be
    the message that it came in.
    """
    shared = trials(case)
    for chunk, uses in ((1, 2), (None, 1)):
        sim = shared.new(two_allocations(), chunk=chunk, rounds=2, eval_every=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(traced.Traces, "worth_it", uses)
            run(sim)
        assert sim.engine.traces.made > 1  # of training, and of scoring
        assert_same(outcome(sim), shared.pair(engine="sequential"), atol=1e-11)


def float32_is_close(case: Case) -> None:
    """Single precision gives the losses of double precision within 2e-3 (three rounds)."""
    wanted, found = trials(case).straight.outcome, outcome(trials(case).narrow)
    for point in ("pre", "post"):
        name = f"{point}/test/loss"
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-3, atol=2e-3)


# ---- what travels and what it costs --------------------------------------------------------------


def private_leaves_are_caught(case: Case) -> None:
    """A method that puts a private leaf into its upload is stopped, whichever leaf it is."""
    shared = trials(case)
    method = shared.method
    for leaf in filter(method.wire.private, shared.task.leaf_names):

        def leaks(
            client: Any, work: Any, ctx: ClientContext, leaf: str = leaf
        ) -> tuple[dict[str, Any], dict[str, Any]]:
            client, upload = method.finish(client, work, ctx)
            return client, {**upload, "extra": {leaf: method.use.model(work, ctx)[leaf]}}

        sim = shared.new(method=changed(method, finish=leaks))
        with pytest.raises(ContractError, match=leaf.replace(".", r"\.")):
            run(sim)  # first rounds have another record, so it may take more than one step


def private_values_stay_home(case: Case) -> None:
    """No uploaded leaf has the value of a private leaf of the model."""
    seen = trials(case).watched.private
    assert seen
    for private, sent in seen:
        for name, leaf in private.items():
            for other in sent:
                alike = leaf.shape == other.shape and leaf.dtype == other.dtype
                assert not alike or not torch.allclose(leaf, other), name


def _marks(method: Method, kind: str) -> dict[str, str]:
    """Return which leaves of a message have marks, and where: names without the message's."""
    cut = len(kind) + 1
    return {k[cut:]: v[cut:] for k, v in method.wire.sparse.items() if k.startswith(f"{kind}/")}


def _packed(message: Any, marks: dict[str, str]) -> int:
    """Pack a message as a network could, and count: marks as bits, and the rows they mark."""
    leaves, sent = dict(tree.items(message)), []
    for name, leaf in leaves.items():
        if name in marks:
            sent.append(leaf[leaves[marks[name]] != 0])
        elif name not in marks.values():
            sent.append(leaf)
        else:
            sent.append(np.packbits(leaf.reshape(-1).numpy() != 0))
            sent += [] if leaf.dtype == torch.bool else [leaf[leaf != 0]]
    return sum(part.nbytes for part in sent)


def bytes_are_those_of_the_trees(case: Case) -> None:
    """The ledger holds the bytes of the messages and uploads of those present, counted by hand."""
    shared = trials(case)
    method, series = shared.method, shared.watched.series
    ledger = shared.straight.outcome
    assert ledger["bytes_down"][0].sum() == series["common"] + series["own"]
    assert ledger["bytes_up"][0].sum() == series["up"]
    assert (
        len(set(ledger["participants"][0])) > 1
        or (method.schedule.who == "everyone")
        or (method.schedule.who == "everyone_trains")
    )


def _spoiled(message: Any, there: Any) -> Any:
    """Put NaN into the real leaves of a message where ``there`` is false."""
    real = {
        name: torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf
        for name, leaf in tree.items(message)
    }

    def spoil(part: Any, prefix: str) -> Any:
        if isinstance(part, dict):
            return {k: spoil(v, f"{prefix}/{k}") for k, v in part.items()}
        return tree.where(there, {"": part}, {"": real[prefix[1:]]})[""]

    return spoil(message, "")


def _spoiled_rows(message: Any, marks: dict[str, str]) -> Any:
    """Put NaN into the rows of a message that have no mark."""
    leaves = dict(tree.items(message))

    def spoil(part: Any, prefix: str) -> Any:
        if isinstance(part, dict):
            return {k: spoil(v, f"{prefix}/{k}") for k, v in part.items()}
        name = prefix[1:]
        return _spoiled({"": part}, leaves[marks[name]] != 0)[""] if name in marks else part

    return spoil(message, "")


def what_does_not_travel_does_not_matter(case: Case) -> None:
    """NaN in unmarked rows and in messages of clients that exchange none changes nothing.

    Nor would it change a result, only the bytes, if all rows were sent. Scores "post" of clients
    that are not connected are left out: they are those of the message that would have been sent.
    """
    shared = trials(case)
    method = shared.method
    if method.wire.connected is None and not method.wire.sparse:
        return

    def connected(server: Any, ctx: Any) -> Any:
        all_clients = torch.ones_like(ctx.present)
        return all_clients if method.wire.connected is None else method.wire.connected(server, ctx)

    def broadcast(server: Any, ctx: Any) -> Any:
        message = _spoiled_rows(method.broadcast(server, ctx), _marks(method, "common"))
        return _spoiled(message, connected(server, ctx).any())

    def address(server: Any, index: Any, ctx: Any) -> Any:
        message = _spoiled_rows(method.address(server, index, ctx), _marks(method, "own"))
        return _spoiled(message, (connected(server, ctx) & (ctx.cohort == index)).any())

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        return kept, _spoiled_rows(upload, _marks(method, "upload"))

    def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
        return method.aggregate(server, _spoiled(uploads, connected(server, ctx)), ctx)

    hidden = "post" if method.wire.connected is not None else "none"

    def shown(found: Outcome) -> Outcome:
        return {k: v for k, v in found.items() if not k.startswith(hidden)}

    wanted = shown(shared.straight.outcome)
    broken = {"broadcast": broadcast, "address": address, "finish": finish, "aggregate": aggregate}
    assert_same(shown(shared.pair(replace(method, **broken), **shared.long)), wanted)
    if method.wire.sparse:
        whole = shown(shared.pair(changed(method, sparse={}), **shared.long))
        sizes = ("bytes_down", "bytes_up", "setup_bytes")
        assert sum(whole[k].sum() for k in sizes) > sum(wanted[k].sum() for k in sizes)
        assert_same({**whole, **{k: wanted[k] for k in sizes}}, wanted)


def gradients_are_counted(case: Case) -> None:
    """Gradient evaluations are the samples whose loss was differentiated, one by one.

    Those of extra rounds and of the last adaptation are counted apart.
    """
    count, ledger = trials(case).watched.samples, trials(case).straight.outcome
    kinds = ("forward_evaluations", "setup_forward"), ("gradient_evaluations", "setup_gradients")
    assert [sum(ledger[name][0].sum() for name in kind) for kind in kinds] == count
    assert count[1] > 0


def an_epoch_costs_its_samples(case: Case) -> None:
    """A method whose only phase is E epochs evaluates E·n_i gradients (times those of a step)."""
    task = case.task()
    local = replace(case.local, drop_last=False)
    method = case.build(task, local)
    (phase,) = method.phases if len(method.phases) == 1 else (None,)
    if phase is None or phase.steps is not None:
        return
    fed = federation()
    sim = run(simulation(method, task, [fed], hyper=case.hyper, participation="all", rounds=1))
    _, in_a_step = sim.engine.calls[phase.name]
    wanted = in_a_step * local.epochs * int(fed.train.sizes.sum())
    assert sim.ledger().gradient_evaluations[0, 0] == wanted


# ---- purity --------------------------------------------------------------------------------------


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _clone(v) for k, v in value.items()}
    if isinstance(value, tuple):
        parts = [_clone(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.clone()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b)


_RECORD = (
    "init_server",
    "init_client",
    "broadcast",
    "address",
    "begin",
    "finish",
    "aggregate",
    "model",
)


def _watch(shared: Trials) -> Watched:
    """Run a case one by one: the bytes, samples, private leaves and writes that it makes."""
    method = shared.method
    seen = Watched({"common": 0, "own": 0, "up": 0}, [0, 0], [], set(), set())

    def watch(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            before = _clone(args)
            found = fn(*args)
            seen.called.add(name)
            if not _equal(args, before):
                seen.written.add(name)
            return found

        return watched

    def phase(p: Phase) -> Phase:
        return replace(
            p, **{k: watch(f"{p.name}.{k}", getattr(p, k)) for k in ("enter", "step", "leave")}
        )

    def looked_at(record: Method, private: bool = False) -> Method:
        """Return a record that writes down what it does; of private leaves only if it has any."""
        pure = changed(
            record,
            **{k: watch(k, get(record, k)) for k in _RECORD},
            phases=tuple(phase(p) for p in record.phases),
            adapt=tuple(phase(p) for p in record.use.adapt),
        )

        def connected(server: Any, ctx: Any, there: Any) -> Any:
            if record.wire.connected is None:
                return there
            found = record.wire.connected(server, ctx)
            # A method that is made of methods answers for each of them; none counts bytes by this.
            return there if isinstance(found, dict) else there & found

        def receives(server: Any, ctx: Any) -> Any:
            return connected(server, ctx, ctx.present | (record.schedule.who == "everyone_trains"))

        def broadcast(server: Any, ctx: Any) -> Any:
            message = pure.broadcast(server, ctx)
            size = _packed(message, _marks(record, "common"))
            seen.series["common"] += size * int(receives(server, ctx).sum())
            return message

        def address(server: Any, index: Any, ctx: Any) -> Any:
            message = pure.address(server, index, ctx)
            size = _packed(message, _marks(record, "own"))
            seen.series["own"] += size * int(receives(server, ctx)[ctx.cohort == index].sum())
            return message

        def finish(client: Any, work: Any, ctx: ClientContext) -> tuple[Any, Any]:
            kept, upload = pure.finish(client, work, ctx)
            if private:
                model = record.use.model(work, ctx)
                home = {k: v for k, v in model.items() if record.wire.private(k)}
                seen.private.append((home, tree.leaves(upload)))
            return kept, upload

        def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
            for k in range(len(ctx.cohort)):
                if connected(server, ctx, ctx.present)[k]:
                    upload = tree.map(lambda leaf, k=k: leaf[k], uploads)
                    seen.series["up"] += _packed(upload, _marks(record, "upload"))
            return pure.aggregate(server, uploads, ctx)

        return changed(
            pure, broadcast=broadcast, address=address, finish=finish, aggregate=aggregate
        )

    def counted(plain: Any) -> Any:
        def watched(self: Task, params: Any, batch: Any, *rest: Any) -> Any:
            seen.samples[1 if task_module._METER.depth else 0] += int(batch.mask.sum())
            return plain(self, params, batch, *rest)

        return watched

    jacobian = Task.jacobian

    def derived(self: Task, params: Any, batch: Any) -> Any:
        scores, slopes = jacobian(self, params, batch)
        seen.samples[1] += int(batch.mask.sum()) * scores.shape[1]
        return scores, slopes

    inputs = Task.inputs

    def received(self: Task, params: Any, batch: Any, models: int = 1) -> Any:
        assert self.linear_layer is not None
        seen.samples[1] += int(batch.mask.sum()) * self.linear_layer[1].out_features * models
        return inputs(self, params, batch, models)

    warm = method.schedule.first
    if warm is not None:
        warm = replace(warm, method=looked_at(warm.method), handover=looked_at(warm.handover))
    other = changed(looked_at(method, private=True), first=warm)
    sim = shared.new(method=other, engine="sequential")
    # Making the simulation may have written messages, which no client received.
    seen.series.update(common=0, own=0, up=0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("losses", "judge", "represent", "collect"):
            patch.setattr(Task, name, counted(getattr(Task, name)))
        patch.setattr(Task, "jacobian", derived)
        patch.setattr(Task, "inputs", received)
        whole = sim.method  # what says to layers of the network what they need
        if whole.schedule.before is not None:
            sim.server, _ = sim.rounds.train(
                sim.server, sim.store, 0, "prologue", record=whole.schedule.before
            )
        for t in range(3):
            sim.server, _ = sim.rounds.train(sim.server, sim.store, t)
        series = dict(seen.series)
        for ending in endings(whole):
            sim.server, _ = sim.rounds.train(sim.server, sim.store, 3, "epilogue", record=ending)
        sim.clients.evaluate(sim.server, sim.store, 3)
    return seen._replace(series=series)


class _Narrow(TorchDispatchMode):
    """Notes whether anything is computed in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = fn(*args, **(kwargs or {}))
        parts = found if isinstance(found, (tuple, list)) else (found,)
        copies = fn in (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
        narrow = any(isinstance(p, torch.Tensor) and p.dtype == torch.float32 for p in parts)
        self.seen |= narrow and not copies  # a network that is wrapped is copied as it is
        return found


def _uneven(shared: Trials) -> Uneven:
    """Run a case one by one on very unequal clients; look at precision and at padded cohorts."""
    local = replace(shared.case.local, batch=16)
    try:
        method = shared.case.build(
            shared.task, replace(local, lr_decay=0.9, lr_schedule="warmup:3")
        )
    except ConfigError:  # it computes its own step size
        method = shared.case.build(shared.task, local)
    settings = {"rounds": 2, "eval_every": 2, "participation": "at_least:0.4", "seeds": [3]}
    fed = [federation(sizes=(3, 66, 1, 7, 11), test=3)]
    narrow: set[str] = set()
    padding: list[float] = []

    def watch(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with _Narrow() as mode:
                found = fn(*args)
            if mode.seen:
                narrow.add(name)
            return found

        return watched

    def phase(p: Phase) -> Phase:
        parts = ("enter", "step", "leave")
        return replace(p, **{k: watch(f"{p.name}.{k}", getattr(p, k)) for k in parts})

    def looked_at(record: Method) -> Method:
        def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
            found = watch("aggregate", record.aggregate)(server, uploads, ctx)
            there = ctx.present.nonzero()[:, 0]
            if 0 < len(there) < len(ctx.present):
                padding.append(0.0)
                rows = tree.map(lambda leaf: leaf[there], uploads)
                cut = ctx._replace(cohort=ctx.cohort[there], present=ctx.present[there])
                other = dict(tree.items(record.aggregate(server, rows, cut)))
                for name, leaf in tree.items(found):
                    off = (leaf.double() - other[name].double()).abs().nan_to_num(0.0)
                    padding.append(float(off.amax()) if off.numel() else 0.0)
            return found

        watched = (name for name in _RECORD if name not in ("init_server", "aggregate"))
        return changed(
            record,
            **{k: watch(k, get(record, k)) for k in watched},
            aggregate=aggregate,
            phases=tuple(phase(p) for p in record.phases),
            adapt=tuple(phase(p) for p in record.use.adapt),
            after=None if record.schedule.after is None else looked_at(record.schedule.after),
        )

    sim = shared.new(fed, looked_at(method), engine="sequential", **settings)
    return Uneven(shared.new(fed, method, **settings), outcome(run(sim)), narrow, padding)


def inputs_are_not_changed(case: Case) -> None:
    """No function of the record writes into its arguments."""
    seen = trials(case).watched
    assert not seen.written
    assert set(_RECORD) <= seen.called


def absent_uploads_do_not_matter(case: Case) -> None:
    """What the padding of a cohort would upload, even NaN, or client 0 for a choice, is nothing."""
    shared = trials(case)

    def wrong(leaf: torch.Tensor) -> torch.Tensor:
        return torch.full_like(leaf, torch.nan if leaf.is_floating_point() else 0)

    def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
        broken = tree.map(wrong, uploads)
        return shared.method.aggregate(server, tree.where(ctx.present, uploads, broken), ctx)

    found = shared.pair(changed(shared.method, aggregate=aggregate), **shared.long)
    assert_same(found, shared.straight.outcome)


def evaluation_changes_nothing(case: Case) -> None:
    """Scoring the models often, rarely, before or after leaves training as it is."""
    shared = trials(case)
    rare = shared.new(eval_every=3, points=(shared.method.use.headline,))
    assert_same(states(run(rare)), states(shared.single))


def stop_and_resume_is_straight(case: Case, folder: Any) -> None:
    """A simulation loaded from a state on disk continues to the same numbers, to the bit."""
    shared = trials(case)
    straight, state, wanted = shared.straight
    write_state(folder / "state", {"trees": state[0], "arrays": state[1]}, state[2])
    read, meta = read_state(folder / "state")
    resumed = shared.new(two_allocations(), **shared.long)
    resumed.load(read["trees"], to_numpy(read["arrays"]), meta)
    assert resumed.round_index == 2
    assert_same(outcome(run(resumed)), wanted)
    straight.load(*state)  # one that has run too far can go back
    assert straight.round_index == 2
    assert_same(outcome(run(straight)), wanted)


def dtype_survives(case: Case) -> None:
    """Every state has the precision that was asked for."""
    shared = trials(case)
    for dtype, sim in ((torch.float32, shared.narrow), (torch.float64, shared.single)):
        trees = [sim.server, sim.store.gather(sim.context.everybody), sim.params(0)]
        leaves = [leaf for t in trees for leaf in tree.leaves(t) if leaf.is_floating_point()]
        assert leaves
        assert {leaf.dtype for leaf in leaves} == {dtype}


# ---- symmetry ------------------------------------------------------------------------------------


def _tells_clients_apart(method: Method, case: Case) -> bool:
    """Say whether order of service, given weights or noise of their own tell clients apart."""
    noisy = any(phase.random for phase in method.phases)
    given = {"client_weights", "budget"} & case.options.keys()  # a budget draws its downloads
    return method.schedule.in_turn or bool(given) or noisy


def permuting_clients_permutes_the_result(case: Case) -> None:
    """Clients in another order give the same models in that order (full batches: no randomness)."""
    task = case.task()
    local = replace(case.local, batch=None, drop_last=False)
    method = case.build(task, local)
    if _tells_clients_apart(method, case):
        return
    fed, order = federation(), [3, 0, 4, 2, 1]
    other = replace(
        fed,
        **{
            s: type(fed.train).from_lists([fed.split(s).of(i) for i in order])
            for s in ("train", "val", "test")
        },
        names=tuple(fed.names[i] for i in order),
    )
    straight = run(simulation(method, task, [fed], hyper=case.hyper, participation="all"))
    turned = run(simulation(method, task, [other], hyper=case.hyper, participation="all"))
    for point in ("pre", "post"):
        wanted = straight.scores()[point, "test"].loss[0][:, order]
        np.testing.assert_allclose(
            turned.scores()[point, "test"].loss[0], wanted, rtol=0, atol=1e-10
        )


def equal_clients_stay_equal(case: Case) -> None:
    """Clients with the same data (and full batches) always have the same model."""
    task = case.task()
    method = case.build(task, replace(case.local, batch=None, drop_last=False))
    if _tells_clients_apart(method, case):
        return
    one = federation(sizes=(9,))
    same = replace(
        one,
        **{
            s: type(one.train).from_lists([one.split(s).of(0)] * 5)
            for s in ("train", "val", "test")
        },
        names=tuple("abcde"),
    )
    sim = run(simulation(method, task, [same], hyper=case.hyper, participation="all"))
    for scores in sim.scores().values():
        np.testing.assert_allclose(
            scores.loss[0], scores.loss[0][:, :1].repeat(5, 1), rtol=0, atol=1e-12
        )
    assert differ({"a": scores.loss[0][0]}, {"a": scores.loss[0][-1]})


# ---- meaning -------------------------------------------------------------------------------------


def every_hyper_parameter_moves_the_result(case: Case) -> None:
    """A hyper-parameter that changed nothing would be a lie."""
    shared = trials(case)
    method = shared.method
    base = {k: case.hyper.get(k, spec.default) for k, spec in method.hyper.items()}
    if "mix_lr" in base:
        base["mix_lr"] = max(base["mix_lr"], 0.1)
    # Halved and doubled: a threshold may be crossed in one direction only.
    less = ({**base, k: 0.5 * v if v else 0.3} for k, v in base.items())
    more = ({**base, k: min(2.0 * v, method.hyper[k].high)} for k, v in base.items())
    rows = [base, *less, *more]
    seeds = [0] * len(rows)
    sim = shared.new([federation()] * len(rows), hyper=rows, seeds=seeds, rounds=4, eval_every=2)
    run(sim)
    loss = np.concatenate([s.loss for s in sim.scores().values()], axis=1)
    for r, name in enumerate(base, start=1):
        moved = [np.abs(loss[k] - loss[0]).max() for k in (r, r + len(base))]
        assert max(moved) > 1e-7, name


LAWS: dict[str, Callable[..., None]] = {
    law.__name__: law
    for law in (
        engines_agree,
        unequal_clients_agree,
        padding_is_no_client,
        nothing_is_rounded,
        a_sweep_row_is_the_single_run,
        a_mapped_store_is_a_store,
        a_trace_is_the_step,
        float32_is_close,
        private_leaves_are_caught,
        private_values_stay_home,
        bytes_are_those_of_the_trees,
        what_does_not_travel_does_not_matter,
        gradients_are_counted,
        an_epoch_costs_its_samples,
        inputs_are_not_changed,
        absent_uploads_do_not_matter,
        evaluation_changes_nothing,
        stop_and_resume_is_straight,
        dtype_survives,
        permuting_clients_permutes_the_result,
        equal_clients_stay_equal,
        every_hyper_parameter_moves_the_result,
    )
}


FOR_VARIANTS = (
    "engines_agree",
    "unequal_clients_agree",
    "padding_is_no_client",
    "nothing_is_rounded",
    "private_values_stay_home",
    "bytes_are_those_of_the_trees",
    "what_does_not_travel_does_not_matter",
    "gradients_are_counted",
    "inputs_are_not_changed",
    "stop_and_resume_is_straight",
    "every_hyper_parameter_moves_the_result",
)
"""The laws that variants are most likely to break, and those that read a run that is there.

The others take variants only in slow tests.
"""

NEEDS_FOLDER = ("a_mapped_store_is_a_store", "stop_and_resume_is_straight")


def check_method(
    case: Case | str | Factory, folder: Any, laws: tuple[str, ...] = tuple(LAWS)
) -> None:
    """Check a method, given as a case, a name or a factory, against the laws.

    Args:
        case: what to check.
        folder: an empty folder for files, such as pytest's ``tmp_path``.
        laws: the names of the laws; all by default.
    """
    case = case if isinstance(case, Case) else Case(case)
    for name in laws:
        LAWS[name](case, *((folder,) if name in NEEDS_FOLDER else ()))
