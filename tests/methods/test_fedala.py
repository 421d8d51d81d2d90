"""FedALA: the learnt mixture of global and local model, its limits, and its first learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task, given, never
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from sartor.methods.fedala import _top_layers
from tests.toys import (
    Net,
    assert_same,
    federation,
    net_task,
    outcome,
    q3,
    quadratic_task,
    run,
    simulation,
    states,
    used,
)

SGD = Local(epochs=2, batch=3, lr=0.2)
KEPT = Local(epochs=2, batch=3, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
SHORT = {"window": 2, "start_passes": 5}


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings: Any) -> Any:
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


def _t(value: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(value, dtype=float), dtype=torch.float64)


def _learn(own: Any, common: Any, centre: Any, steps: int, eta: float = 1.0) -> list[np.ndarray]:
    """Return W after each step on ½‖θ − c‖², from W = 1; neither model may change."""
    dim = len(own)
    method = build("fedala", quadratic_task(dim), Local(batch=None), {})
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        hyper={"mix_lr": _t(eta)}, common={"params": {"w": _t(common)}}, index=torch.tensor(0)
    )
    client = method.init_client({"w": _t(own)}, ctx)
    work = method.begin({**client, "trained": torch.tensor(True)}, ctx)
    phase = method.phases[1]
    work = phase.enter(work, ctx)
    sample = _t([[*np.ones(dim), *centre]])
    batch = Batch(sample, torch.zeros(1).long(), torch.ones(1).bool(), None, torch.tensor(True))
    found = []
    for _ in range(steps):
        work = phase.step(work, batch, ctx)
        assert work["top"]["w"].tolist() == list(own)
        found.append(work["mix"]["w"].numpy())
    left = phase.leave(work, ctx)["params"]["w"].numpy()
    wanted = np.asarray(own) + found[-1] * (np.asarray(common) - own)
    np.testing.assert_allclose(left, wanted, atol=1e-14)
    return found


# ---- the step on W -------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    """θ_l = 0, θ_g = 1, c = 0.3, η = 1: one step takes W from 1 to 0.3, where it stays."""
    found = _learn([0.0], [1.0], [0.3], 3)
    np.testing.assert_allclose(np.ravel(found), [0.3, 0.3, 0.3], atol=1e-15)


def test_weights_go_to_the_best_mixture_in_the_unit_interval() -> None:
    """For ηδ² < 2, W → clip((c − θ_l)/δ, 0, 1), each element for itself."""
    own, common = np.array([0.0, 1.0, -1.0, 2.0]), np.array([1.0, 0.2, 0.1, 2.9])
    centre = np.array([0.4, 0.6, -3.0, 9.0])
    last = _learn(own, common, centre, 200)[-1]
    wanted = np.clip((centre - own) / (common - own), 0, 1)
    assert sorted(wanted)[::3] == [0.0, 1.0]
    np.testing.assert_allclose(last, wanted, atol=1e-9)


def test_weights_stay_where_the_models_agree() -> None:
    """No difference, no step: W keeps 1 however steep the loss."""
    found = _learn([5.0, 0.0], [5.0, 1.0], [0.0, 0.3], 2)
    assert found[-1][0] == 1.0
    assert found[-1][1] != 1.0


@pytest.mark.parametrize("layers", [1, 2])
def test_weights_stay_in_the_unit_interval_and_are_each_clients_own(layers: int) -> None:
    """In runs of steep steps W is clipped, inner values occur, and no two clients share W."""
    sim = _net("fedala", options={"layers": layers}, hyper={"mix_lr": 30.0}, rounds=4)
    found = {k: v for k, v in states(sim).items() if k.startswith("client/mix/")}
    assert len(found) == 2 * layers
    mix = np.concatenate([v[0].reshape(5, -1) for v in found.values()], axis=1)
    assert mix.min() == 0.0
    assert mix.max() == 1.0
    assert ((mix > 0.01) & (mix < 0.99)).any()
    assert len(np.unique(mix, axis=0)) == 5


def test_only_the_top_is_mixed() -> None:
    """After W is learnt, the lower layers are the global model's, the top lies between the two."""
    task = net_task()
    method = build("fedala", task, SGD, {})
    seen = []

    mix, first, train = method.phases

    def leave(work: Any, ctx: ClientContext) -> Any:
        before = dict(ctx.common["params"])
        found = first.leave(work, ctx)
        same = all(torch.equal(leaf, before[k]) for k, leaf in work["top"].items())
        seen.append((found["params"], before, work["top"], same))
        return found

    watched = changed(method, phases=(mix, replace(first, leave=leave), train))
    sim = simulation(watched, task, [federation()], engine="sequential", points=("post",))
    run(sim)
    moved = 0
    for mixed, common, own, same in seen:
        assert sorted(own) == ["fc.bias", "fc.weight"]
        for name in ("body.weight", "body.bias"):
            assert torch.equal(mixed[name], common[name])
        low, high = (tree.map(f, own, {k: common[k] for k in own}) for f in (torch.min, torch.max))
        for name in own:
            assert (low[name] - 1e-12 <= mixed[name]).all()
            assert (mixed[name] <= high[name] + 1e-12).all()
            moved += not same and not torch.equal(mixed[name], common[name])
    assert moved > 5


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(
    ("options", "hyper"), [({"layers": 0}, {}), ({**SHORT, "layers": 2}, {"mix_lr": 0.0})]
)
def test_nothing_to_learn_is_fedavg(local: Local, options: dict, hyper: dict) -> None:
    """No layers, or η = 0 so that W stays 1: FedAvg's models and scores, to the bit."""
    wanted = outcome(_net("fedavg", local, rounds=4))
    found = outcome(_net("fedala", local, options, hyper=hyper, rounds=4))
    for name, value in wanted.items():
        if name.startswith(("server/", "client/", "pre/", "post/", "bytes")):
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_weights_of_zero_on_all_layers_are_local_training(local: Local) -> None:
    """W = 0 for ever, p = all: every client goes on from its own model, to the bit."""
    task = net_task()
    method = build("fedala", task, local, {**SHORT, "layers": 2})

    def init_client(params: Any, ctx: ClientContext) -> Any:
        client = method.init_client(params, ctx)
        return {**client, "mix": tree.zeros_like(client["mix"])}

    frozen = changed(method, init_client=init_client)
    settings: dict[str, Any] = {"participation": "all", "rounds": 4}
    sim = simulation(frozen, task, [federation()], hyper={"mix_lr": 0.0}, **settings)
    found, wanted = outcome(run(sim)), outcome(_net("local", local, **settings))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_array_equal(found[name], wanted[name])
    np.testing.assert_array_equal(found["client/top/fc.weight"], wanted["client/params/fc.weight"])


def test_the_first_round_is_fedavgs() -> None:
    """Nobody has a model of its own yet: no W is learnt, and none is paid for."""
    found, wanted = (outcome(_net(name, KEPT, rounds=1)) for name in ("fedala", "fedavg"))
    for name, value in wanted.items():
        if name.startswith("server/") or name == "gradient_evaluations":
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("ala_for", ["participants", "all"])
def test_one_client_is_plain_sgd(ala_for: str) -> None:
    """Global and local model are the same: W stays 1, and the path is LocalTrain's to the bit."""
    task, feds = net_task(), [federation(sizes=(11,))]
    sims = [
        run(simulation(build(n, task, SGD, o), task, feds, rounds=4))
        for n, o in (("fedala", {"layers": 2, "ala_for": ala_for}), ("local", {}))
    ]
    found, wanted = (outcome(sim) for sim in sims)
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_array_equal(found[name], wanted[name])
    assert (found["client/mix/fc.weight"] == 1.0).all()
    assert not found["client/started"].any()


def test_a_client_without_a_model_of_its_own_takes_the_global_one() -> None:
    """One client a round: on its first turn it trains from Θ, as FedAvg's clients do."""
    task = net_task()
    method = build("fedala", task, SGD, {**SHORT, "layers": 2})
    turns = []

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        turns.append((int(ctx.index), bool(client["trained"]), work, kept))
        return kept, upload

    watched = changed(method, finish=finish)
    run(simulation(watched, task, [federation()], engine="sequential", rounds=12, participation=1))
    seen: set[int] = set()
    for who, trained, work, kept in turns:
        assert trained == (who in seen)
        assert bool(kept["trained"])
        if who not in seen:
            assert all(bool((leaf == 1).all()) for leaf in tree.leaves(work["mix"]))
            assert not bool(kept["started"])
        seen.add(who)
    assert 2 <= len(seen) < len(turns)


# ---- the first learning --------------------------------------------------------------------------


def _passes(**options: Any) -> list[int]:
    """Return the passes over W of one client among three, round by round, on quadratics."""
    local = Local(steps=1, batch=None, lr=0.1)
    sim = q3("fedala", local, options=options, rounds=4)
    series = sim.ledger().gradient_evaluations[0]
    return [int(spent) // 3 - 1 for spent in series]


def test_the_first_learning_is_long_and_the_later_ones_one_pass() -> None:
    """Calm at once: window + 1 passes, then one; never calm: all start_passes; 0 in round 0."""
    assert _passes(calm=1e9) == [0, 11, 1, 1]
    assert _passes(calm=1e9, window=4) == [0, 5, 1, 1]
    assert _passes(calm=0.0, start_passes=30) == [0, 30, 1, 1]
    assert _passes(calm=1e9, start_passes=3) == [0, 3, 1, 1]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_only_the_first_learning_is_planned_at_length(engine: str) -> None:
    """Started clients plan one pass; those without a model of their own plan none."""
    task, fed = net_task(), federation()
    sim = simulation(build("fedala", task, SGD, {}), task, [fed], engine=engine, participation=3)
    plans: list[tuple[str, list[int]]] = []
    before = sim.context.engine.phase

    def watched(phase: Any, work: Any, ctx: Any, plan: Any) -> Any:
        if phase.name.startswith("mix"):
            passes = -(-plan.steps // plan.passes[0])
            plans.append((phase.name, sorted(int(k) for k in passes.ravel() if k)))
        return before(phase, work, ctx, plan)

    sim.context.engine.phase = watched
    planned = []
    for t in range(6):
        plans.clear()
        before_round = states(sim)
        there = sim.rounds.draw(sim.method, "train", t)[0][0]
        started, trained = (before_round[f"client/{k}"][0][there] for k in ("started", "trained"))
        sim.server, _ = sim.rounds.train(sim.server, sim.store, t)
        wanted = {"mix": [1] * int(started.sum())}
        wanted["mix-start"] = [100] * int((trained & ~started).sum())
        assert plans == [(k, v) for k, v in wanted.items() if v]
        planned += [name for name, _ in plans]
    assert {*planned} == {"mix", "mix-start"}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("own", [[1.0], [0.5]], ids=["same", "apart"])
def test_who_takes_which_learning(started: bool, own: list) -> None:
    """Equal models are not mixed; others take one pass, or the long first one if not started."""
    method = build("fedala", quadratic_task(), Local(batch=None), {})
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        common={"params": {"w": _t([1.0])}}, index=torch.tensor(0)
    )
    flags = {"trained": torch.tensor(True), "started": torch.tensor(started)}
    work = method.begin({**method.init_client({"w": _t(own)}, ctx), **flags}, ctx)
    taken = [bool(phase.when(work, ctx)) for phase in method.use.adapt]
    apart = own != [1.0]
    assert taken == [apart and started, apart and not started]


def test_one_pass_has_the_batches_of_the_first_of_many() -> None:
    """Both phases draw their sample from one stream, so a started client sees the same rows."""
    task, fed = net_task(), federation()
    method = build("fedala", task, SGD, {"window": 2, "calm": 1e9})
    seen: dict[str, list[Any]] = {"mix": [], "mix-start": []}

    def looking(phase: Any, taken: bool) -> Any:
        def step(work: Any, batch: Any, ctx: ClientContext) -> Any:
            seen[phase.name].append((int(ctx.index), batch.rows.tolist()))
            return phase.step(work, batch, ctx)

        return replace(phase, step=step, when=lambda work, ctx: ctx.index >= 5 * (not taken))

    for name in seen:
        mixing = tuple(looking(p, p.name == name) for p in method.phases[:2])
        sim = simulation(
            changed(method, phases=mixing), task, [fed], engine="sequential", participation="all"
        )
        sim.rounds.train(sim.server, sim.store, 1)
    first: dict[int, list[Any]] = {}
    for client, rows in seen["mix"]:
        first.setdefault(client, []).append(rows)
    again: dict[int, list[Any]] = {}
    for client, rows in seen["mix-start"]:
        again.setdefault(client, []).append(rows)
    assert sorted(first) == [0, 1, 2, 3, 4]
    for client, rows in first.items():
        assert again[client] == rows * 3  # window + 1 passes


def test_only_the_last_batch_of_a_pass_is_recorded() -> None:
    """Batches inside a pass add no loss and no pass; the last one adds its own, before its step."""
    method = build("fedala", quadratic_task(), Local(batch=None), {"window": 3})
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        hyper={"mix_lr": _t(0.1)}, common={"params": {"w": _t([1.0])}}, index=torch.tensor(0)
    )
    client = {**method.init_client({"w": _t([0.0])}, ctx), "trained": torch.tensor(True)}
    phase = method.phases[1]
    work = phase.enter(method.begin(client, ctx), ctx)
    for c, last, passes, losses in (
        (0.0, False, 0, [0.0, 0.0, 0.0]),  # W goes from 1 to 0.9
        (0.7, True, 1, [0.0, 0.0, 0.02]),  # to 0.88
        (0.5, False, 1, [0.0, 0.0, 0.02]),
    ):
        sample = _t([[1.0, c]])
        batch = Batch(sample, torch.zeros(1).long(), torch.ones(1).bool(), None, torch.tensor(last))
        work = phase.step(work, batch, ctx)
        assert int(work["passes"]) == passes
        np.testing.assert_allclose(work["losses"], losses, atol=1e-14)


def _loop(
    a: np.ndarray, c: np.ndarray, rounds: int, lr: float, eta: float, calm: float, window: int
) -> tuple[np.ndarray, np.ndarray, float, list[int]]:
    """Run FedALA plainly; returns the models after W is learnt once more, W, Θ, first passes."""
    m, common = len(a), 0.0
    own, mix, first = np.zeros(m), np.ones(m), [0] * m
    for t in range(rounds + 1):
        hat = np.full(m, common)
        for i in range(m):
            delta = common - own[i]
            if t == 0 or delta == 0:
                continue
            losses: list[float] = []
            w = mix[i]
            while True:
                at = own[i] + w * delta
                losses.append(0.5 * a[i] * (at - c[i]) ** 2)
                w = float(np.clip(w - eta * a[i] * (at - c[i]) * delta, 0, 1))
                if first[i] or (len(losses) > window and np.std(losses[-window:]) < calm):
                    break
            first[i] = first[i] or len(losses)
            mix[i], hat[i] = w, own[i] + w * delta
        if t == rounds:
            return hat, mix, common, first
        own = c + (1 - lr * a) ** 2 * (hat - c)
        common = float(own.mean())
    raise AssertionError


def test_a_run_is_a_plain_loop() -> None:
    """Three rounds with an uncalm start equal a loop over clients; "pre" is after W is learnt."""
    a, c = np.array([1.0, 2.0, 4.0, 0.5]), np.array([0.0, 1.5, 2.0, -2.0])
    calm, window = 0.03, 3
    hat, mix, common, first = _loop(a, c, 3, 0.1, 0.1, calm, window)
    assert len(set(first)) == 3
    fed, _ = quadratics(a, c)
    module = Quadratic().double()
    with torch.no_grad():
        module.w.zero_()
    task = Task(module, None, given, never)
    options = {"calm": calm, "window": window}
    method = build("fedala", task, Local(steps=2, batch=None, lr=0.1), options)
    settings: dict[str, Any] = {"hyper": {"mix_lr": 0.1}, "participation": "all"}
    sim = run(simulation(method, task, [fed], rounds=3, **settings))
    np.testing.assert_allclose(used(sim), hat, atol=1e-6)
    assert float(sim.server["params"]["w"][0, 0]) == pytest.approx(common, abs=1e-6)
    sim = run(simulation(method, task, [fed], rounds=4, **settings))  # now W is kept
    found = sim.store.gather(sim.context.everybody)["mix"]["w"][0, :, 0]
    np.testing.assert_allclose(found, mix, atol=1e-6)
    assert ((mix > 0.01) & (mix < 0.99)).any()


# ---- what is used for it -------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "part"), [(0.8, (2, 6, 4, 8, 4)), (0.3, (1, 3, 2, 3, 2))])
def test_a_share_of_the_samples_is_used(share: float, part: tuple) -> None:
    """A pass over W costs ⌈s·n_i⌉ gradients; with full batches all n_i, as nothing is random."""
    options = {"share": share, "window": 2, "calm": 1e9}
    for local, spent in ((SGD, sum(part)), (replace(SGD, batch=None), 27)):
        sim = _net("fedala", local, options, participation="all", rounds=3)
        found = sim.ledger().gradient_evaluations[0].tolist()
        assert found == [2 * 27, 2 * 27 + 3 * spent, 2 * 27 + spent]


class _HeadFirst(nn.Module):
    """Names its head before its body."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.low, self.high = nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.high(self.low(x)) * self.scale)
        return found


def test_layers_are_counted_from_the_head_down() -> None:
    """A layer is a module with its parameters, not a tensor; 0 is none, not all."""
    assert _top_layers(net_task(), 0) == frozenset()
    assert _top_layers(net_task(), 1) == {"fc.weight", "fc.bias"}
    everything = frozenset(net_task().leaf_names)
    assert _top_layers(net_task(), 2) == _top_layers(net_task(), 9) == everything
    odd = Task(_HeadFirst(), head="fc")
    assert _top_layers(odd, 1) == {"fc.weight", "fc.bias"}
    assert _top_layers(odd, 2) == {"fc.weight", "fc.bias", "high.weight"}
    assert _top_layers(Task(Net()), 1) == {"fc.weight", "fc.bias"}  # no head is named


# ---- all clients mix -----------------------------------------------------------------------------


def test_with_everybody_there_it_does_not_matter_who_mixes() -> None:
    """Full participation: `all` and `participants` are one method, to the bit."""
    runs = [
        outcome(_net("fedala", KEPT, {**SHORT, "ala_for": who}, participation="all"))
        for who in ("participants", "all")
    ]
    assert_same(*runs)


def test_absent_clients_mix_but_do_not_train() -> None:
    """`all`: everybody receives Θ and moves to its mixture; only the cohort trains and reports."""
    task = net_task()
    method: Method = build("fedala", task, SGD, {**SHORT, "layers": 2, "ala_for": "all"})
    seen = []

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        mixed = tree.map(torch.lerp, client["top"], ctx.common["params"], work["mix"])
        trained = not all(torch.allclose(mixed[k], kept["top"][k]) for k in mixed)
        seen.append((bool(ctx.reports), trained, int(ctx.round)))
        return kept, upload

    sim = simulation(
        changed(method, finish=finish), task, [federation()], engine="sequential", rounds=4
    )
    run(sim)
    assert len(seen) == 20
    assert {trained for reports, trained, _ in seen if reports} == {True}
    assert {trained for reports, trained, t in seen if not reports and t} == {False}
    ledger = sim.ledger()
    size = tree.num_bytes(task.init(0)) * 2
    assert (ledger.bytes_down == 5 * size).all()
    assert ledger.bytes_up.sum() == size * sum(reports for reports, _, _ in seen) < 20 * size


def test_a_newcomer_uses_the_global_model() -> None:
    """A client in its first state is scored with Θ, whatever the round."""
    task = net_task()
    method = build("fedala", task, SGD, SHORT)
    sim = run(simulation(method, task, [federation()], rounds=3, participation=1))
    centre = sim.params(0, point="global")
    fresh = ~sim.store.gather(sim.context.everybody)["trained"][0]
    assert fresh.any()
    for i in range(5):
        if fresh[i]:
            assert all(torch.equal(sim.params(i)[k], centre[k]) for k in centre)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": -1}, "layers must be >= 0, got -1"),
        ({"share": 0.0}, "share must be > 0 and <= 1, got 0"),
        ({"share": 1.5}, "got 1.5"),
        ({"calm": -0.1}, "calm must be >= 0"),
        ({"window": 1}, "window must be >= 2, got 1"),
        ({"start_passes": 0}, "start_passes must be >= 1, got 0"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """What cannot be right is refused."""
    with pytest.raises(ConfigError, match=words):
        build("fedala", net_task(), SGD, options)
