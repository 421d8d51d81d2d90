"""Engines: one order of a round, any way of working the lanes, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import ConfigError, ContractError, FederationError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Phase,
    Schedule,
    ServerContext,
    Use,
    changed,
    weighted_mean,
    weighted_sum,
)
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines import arena as arenas
from sartor.engines import make_engine
from sartor.engines.arena import build_arena, with_palette
from sartor.engines.plan import BatchPlan
from sartor.engines.vectorised import Vectorised
from sartor.engines.work import Store
from sartor.methods import build
from tests.toys import (
    CPU,
    assert_same,
    differ,
    federation,
    net_task,
    outcome,
    run,
    simulation,
    two_allocations,
)

LOCAL = Local(epochs=2, batch=3, lr=0.1, momentum=0.5)


def _run(method: Method, task: Task, feds: list[Federation] | None = None, **settings: Any) -> Any:
    return run(simulation(method, task, feds or two_allocations(), **settings))


# ---- a method that uses every field of the record ------------------------------------------------


def everything(task: Task) -> Method:
    """Build a method with every kind of phase, a prologue, an epilogue and adaptation."""

    def loss(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        return task.loss(work["params"], batch)

    def slope(params: Tree, batch: Batch) -> Tree:
        from sartor.core.task import grad

        return grad(lambda p: task.loss(p, batch))(params)

    def down(params: Tree, direction: Tree, rate: Any) -> Tree:
        return tree.map(lambda p, g: p - rate * g, params, direction)

    # Stops after 2, 3 or 4 steps according to the client, of five passes over 60% of its samples.
    def stop_step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        new = down(work["params"], slope(work["params"], batch), ctx.hyper["local_lr"])
        return {
            **work,
            "params": new,
            "count": work["count"] + 1,
            "ends": work["ends"] + batch.last,
        }

    stopping = Phase(
        "stopping",
        stop_step,
        enter=lambda work, ctx: {**work, "count": torch.zeros_like(ctx.index)},
        stop=lambda work, ctx: work["count"] >= 2 + ctx.index % 3,
        epochs=5,
        batch=2,
        share=0.6,
    )

    # Adds up the losses on validation data without a gradient, per sample.
    def look_step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        seen = (task.losses(work["params"], batch) * batch.mask).sum()
        return {**work, "seen": work["seen"] + seen}

    looking = Phase("looking", look_step, data="val", shuffle=False, batch=1)

    # Two independent batches a step: the gradient at a point found with the other batch.
    def pair_step(work: Tree, batch: tuple[Batch, Batch], ctx: ClientContext) -> Tree:
        ahead = down(work["params"], slope(work["params"], batch[0]), 0.05)
        new = down(work["params"], slope(ahead, batch[1]), ctx.hyper["local_lr"])
        return {**work, "params": new}

    pairs = Phase("pairs", pair_step, draws=2, batch=3, drop_last=True)

    # No data at all: noise from the key of the step.
    def shake(work: Tree, batch: Any, ctx: ClientContext) -> Tree:
        noise = rng.normal(ctx.key, (3,), work["params"]["fc.bias"].dtype)
        bias = work["params"]["fc.bias"] + 0.01 * noise
        return {**work, "params": {**work["params"], "fc.bias": bias}}

    shaking = Phase("shaking", shake, data="none", steps=3, random=True)

    counted = descend(
        task,
        Local(batch=4, lr=0.1),
        loss,
        name="counted",
        steps=lambda ctx: ctx.index % 3 + ctx.common["extra"],
        train=task.is_head,
    )

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        zero = torch.zeros_like(client["seen"])
        return {"params": ctx.common["params"], "seen": zero, "ends": torch.zeros_like(ctx.index)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept = {"seen": client["seen"] + work["seen"], "ends": client["ends"] + work["ends"]}
        return kept, {"params": work["params"]}

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        weights = (
            server_ctx.sizes[server_ctx.cohort] * server_ctx.present * server_ctx.hyper["local_lr"]
        )
        return {**server, "params": weighted_mean(uploads["params"], weights, server["params"])}

    def count(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        return {
            **server,
            "extra": server["extra"] + uploads["one"].sum() - server_ctx.sizes.shape[0] + 1,
        }

    one_off = Method(
        name="one-off",
        hyper={},
        init_server=lambda params, server_ctx: {},
        begin=begin,
        phases=(looking,),
        finish=lambda client, work, ctx: (
            {**client, "seen": client["seen"] + work["seen"]},
            {"one": torch.ones_like(ctx.index)},
        ),
        aggregate=count,
        broadcast=lambda server, server_ctx: {"params": server["params"]},
    )
    return Method(
        name="everything",
        hyper={"local_lr": Hyper(0.1)},
        init_server=lambda params, server_ctx: {
            "params": params,
            "extra": torch.ones_like(server_ctx.round),
        },
        init_client=lambda params, ctx: {
            "seen": params["fc.bias"].sum() * 0,
            "ends": torch.zeros_like(ctx.index),
        },
        broadcast=lambda server, server_ctx: dict(server),
        begin=begin,
        phases=(stopping, looking, pairs, shaking, counted),
        finish=finish,
        aggregate=aggregate,
        use=Use(adapt=(descend(task, Local(batch=4, lr=0.1), loss, name="adapting"),)),
        schedule=Schedule(before=one_off, after=one_off),
    )


def test_a_method_that_uses_everything_is_the_same_on_all_engines() -> None:
    """Stops, steps as data, pairs of batches, shares, no data, prologue, epilogue, adaptation."""
    task = net_task()
    wanted = outcome(_run(everything(task), task, engine="sequential"))
    for chunk in (None, 1, 7):
        assert_same(outcome(_run(everything(task), task, chunk=chunk)), wanted, atol=1e-11)
    assert wanted["server/extra"].tolist() == [
        3,
        3,
    ]  # one, one more in the prologue and in the epilogue
    assert (wanted["setup_bytes"] > 0).all()
    assert (wanted["client/ends"] > 0).any()


def test_a_method_that_uses_everything_is_counted_sample_by_sample() -> None:
    """Also where lanes stop early, batches are unequal, and a step has two gradients."""
    task, count = net_task(), [0, 0]
    plain = Task.losses

    def losses(self: Task, params: Any, batch: Any, *rest: Any) -> Any:
        from sartor.core.task import _METER

        count[1 if _METER.depth else 0] += int(batch.mask.sum())
        return plain(self, params, batch, *rest)

    slow = simulation(everything(task), task, [federation()], engine="sequential")
    fast = simulation(everything(task), task, [federation()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "losses", losses)
        for t in range(3):
            slow.server, _ = slow.rounds.train(slow.server, slow.store, t)
    for t in range(3):
        fast.server, receipt = fast.rounds.train(fast.server, fast.store, t)
        count[0] -= int(receipt.forward_evaluations[0])
        count[1] -= int(receipt.gradient_evaluations[0])
    assert count == [0, 0]


def test_a_stopping_phase_stops_when_it_says() -> None:
    """A lane takes the steps until its own condition holds, and not one more."""
    task = net_task()
    seen: dict[int, int] = {}
    method = everything(task)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        seen[int(ctx.index)] = int(work["count"])
        return method.finish(client, work, ctx)

    watched = changed(method, finish=finish)
    _run(watched, task, [federation()], engine="sequential", participation="all", rounds=1)
    assert seen == {0: 2, 1: 3, 2: 4, 3: 2, 4: 3}


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_a_phase_that_did_not_say_it_is_random_cannot_draw(engine: str) -> None:
    """Without `random`, the key of a step is empty, and using it is an error and not a constant."""
    task = net_task()
    method = everything(task)
    quiet = tuple(replace(p, random=False) for p in method.phases)
    with pytest.raises(ContractError, match="random=True"):
        _run(changed(method, phases=quiet), task, [federation()], engine=engine)


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_local_training_is_torchs_own_sgd_on_the_real_samples(engine: str) -> None:
    """A plain loop with torch.optim.SGD over the unpadded batches ends at the same models."""
    task = net_task()
    local = Local(epochs=2, batch=4, lr=0.1, momentum=0.9, weight_decay=0.05)
    method = build("local", task, local, {})
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    (phase,) = method.phases

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        seen.setdefault(int(ctx.index), []).append((batch.x[batch.mask], batch.y[batch.mask]))
        return phase.step(work, batch, ctx)

    watched = changed(method, phases=(replace(phase, step=step),))
    _run(watched, task, [federation()], engine="sequential", rounds=1)
    found = outcome(_run(method, task, [federation()], engine=engine, rounds=1))
    assert {len(x) for batches in seen.values() for x, _ in batches} >= {1, 2, 4}
    for client, batches in seen.items():
        module = task.with_params(task.init(0)).double()
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
        for x, y in batches:
            sgd.zero_grad()
            F.cross_entropy(module(x), y).backward()
            sgd.step()
        for name, leaf in module.named_parameters():
            wanted = leaf.detach().numpy()
            np.testing.assert_allclose(
                found[f"client/params/{name}"][0, client], wanted, atol=1e-12
            )


# ---- controls: what holds the engines together must matter ---------------------------------------


def test_without_the_lane_mask_the_numbers_are_wrong(monkeypatch) -> None:
    """Control: lanes that are done and are not masked continue training."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})
    right = outcome(_run(method, task))
    widths = BatchPlan.widths
    monkeypatch.setattr(BatchPlan, "widths", lambda self: [(w, False) for w, _ in widths(self)])
    assert differ(outcome(_run(method, task)), right, 1e-3)


def test_without_the_batch_mask_the_numbers_are_wrong(monkeypatch) -> None:
    """Control: padding that counts as samples changes the gradient."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})
    right = outcome(_run(method, task))
    batches = BatchPlan.batches

    def unmasked(self: BatchPlan, arena: Any, entry: Tensor) -> Any:
        batch = batches(self, arena, entry)
        assert isinstance(batch, Batch)
        return batch._replace(mask=torch.ones_like(batch.mask))

    monkeypatch.setattr(BatchPlan, "batches", unmasked)
    assert differ(outcome(_run(method, task)), right, 1e-3)


def test_without_the_present_mask_the_numbers_are_wrong() -> None:
    """Control: clients that only pad a cohort would be averaged in."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        return method.aggregate(
            server, uploads, server_ctx._replace(present=torch.ones_like(server_ctx.present))
        )

    broken = changed(method, aggregate=aggregate)
    assert differ(outcome(_run(broken, task)), outcome(_run(method, task)), 1e-3)


# ---- padding, other networks, other precisions ---------------------------------------------------


def test_a_far_larger_client_changes_nothing_for_the_others() -> None:
    """Padding to a larger capacity leaves every lane as it was, to the bit."""
    task = net_task()
    method = build("local", task, LOCAL, {})
    small = federation()
    large = federation(sizes=(2, 7, 4, 9, 5, 60))
    other = Federation(
        torch.cat([small.x, large.x]),
        torch.cat([small.y, large.y]),
        names=(*small.names, "giant"),
        num_classes=3,
        **{
            s: type(small.train).from_lists(
                [*(small.split(s).of(i) for i in range(5)), large.split(s).of(5) + len(small.x)]
            )
            for s in ("train", "val", "test")
        },
    )
    wanted = outcome(_run(method, task, [small]))
    found = outcome(_run(method, task, [other]))
    for name in ("client/params/body.weight", "client/params/fc.bias"):
        np.testing.assert_array_equal(found[name][:, :5], wanted[name])
    np.testing.assert_array_equal(found["post/test/loss"][:, :, :5], wanted["post/test/loss"])


class Conv(nn.Module):
    """A small relative of LeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3)
        self.norm, self.fc = nn.GroupNorm(1, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.max_pool2d(torch.relu(self.c1(x)), 2)
        found: Tensor = self.fc(torch.relu(self.norm(self.c2(z))).flatten(1))
        return found


@pytest.mark.parametrize("name", ["fedavg", "fedapa"])
def test_convolutions_are_the_same_on_all_engines(name: str) -> None:
    """Convolution, pooling and GroupNorm under vmap are those of one client at a time."""
    task = Task(Conv(), head="fc")
    feds = [federation(k, shape=(1, 6, 6)) for k in range(2)]
    method = build(name, task, LOCAL, {})
    wanted = outcome(_run(method, task, feds, engine="sequential", rounds=2))
    for chunk in (None, 3):
        assert_same(outcome(_run(method, task, feds, chunk=chunk, rounds=2)), wanted, atol=1e-11)


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_bfloat16_passes_keep_float32_states_and_come_close(engine: str) -> None:
    """Narrow passes change losses by less than 5%, and by more than nothing; states stay wide."""
    exact, narrow = net_task(), net_task(torch.bfloat16)
    wanted = _run(build("fedavg", exact, LOCAL, {}), exact, dtype=torch.float32)
    found = _run(build("fedavg", narrow, LOCAL, {}), narrow, dtype=torch.float32, engine=engine)
    assert found.server["params"]["fc.bias"].dtype == torch.float32
    a, b = (sim.scores()["pre", "test"].loss[:, -1] for sim in (found, wanted))
    np.testing.assert_allclose(a, b, rtol=0.05)
    assert np.abs(a - b).max() > 0


def test_seeds_change_start_batches_and_cohorts() -> None:
    """Two runs on one federation with different seeds share nothing that is random."""
    task = net_task()
    sim = _run(build("fedavg", task, LOCAL, {}), task, [federation()] * 2, seeds=[0, 1], rounds=6)
    loss = sim.scores()["pre", "test"].loss
    assert np.abs(loss[0] - loss[1]).min() > 1e-6
    assert (sim.ledger().participants[0] != sim.ledger().participants[1]).any()
    same = _run(build("fedavg", task, LOCAL, {}), task, [federation()] * 2, seeds=[1, 1], rounds=6)
    np.testing.assert_array_equal(same.scores()["pre", "test"].loss[0], loss[1])


def test_messages_come_from_the_state_at_the_start_of_the_round() -> None:
    """The ledger holds the size of the model, per participant, both ways, every round."""
    task = net_task()
    sim = _run(build("fedavg", task, LOCAL, {}), task, participation=2)
    one = sum(p.numel() for p in task.module.parameters()) * 8
    assert (sim.ledger().bytes_up == 2 * one).all()
    assert (sim.ledger().bytes_down == 2 * one).all()


def test_measured_blocks_are_part_of_the_state() -> None:
    """An engine that chooses its block of lanes by measuring continues with the same choice."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})

    def new() -> Any:
        sim = simulation(method, task, two_allocations())
        sim.engine.lanes = None
        return sim

    first = new()
    first.step()
    assert first.engine.lanes is not None
    state = first.state()
    second = new()
    second.load(*state)
    assert second.engine.lanes == first.engine.lanes
    assert_same(outcome(run(second)), outcome(run(first)))


# ---- arena ---------------------------------------------------------------------------------------


def _inspect(feds: list[Federation]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield features and labels of each client, as the arena and as the federation hold them."""
    arena = build_arena(feds, CPU, torch.float64)
    for split in ("train", "val", "test"):
        lists = arena.splits[split]
        for r, fed in enumerate(feds):
            for i in range(fed.num_clients):
                own = lists.rows[lists.start[r, i] : lists.start[r, i] + lists.size[r, i]]
                rows = fed.split(split).of(i)
                x = arena.x[own if arena.row is None else arena.row[own]]
                yield x, arena.y[own], fed.x[rows], fed.y[rows]


def test_the_arena_holds_every_runs_own_samples() -> None:
    """Another allocation, other data, other labels on the same features, the same lists."""
    first, second = two_allocations()
    relabelled = replace(first, y=(first.y + 1) % 3)
    moved = replace(first, x=first.x + 100)
    other = federation(5)
    feds = [first, second, relabelled, moved, other, first]
    for x, y, wanted_x, wanted_y in _inspect(feds):
        assert torch.equal(x, wanted_x)
        assert torch.equal(y, wanted_y)
    arena = build_arena([first, second, first], CPU, torch.float64)
    assert arena.x is first.x  # allocations of one set of samples hold it once
    assert arena.row is None
    arena = build_arena([first, relabelled, second], CPU, torch.float64)
    assert arena.x is first.x  # so do runs that differ in the labels alone
    assert len(arena.y) == 2 * len(first.y)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_runs_that_differ_in_labels_alone_train_as_if_alone(engine: str) -> None:
    """Each run of the sweep sees its own labels on the shared features."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})
    first, other = federation(), federation(5)
    feds = [fed for one in (first, other) for fed in (one, replace(one, y=(one.y + 1) % 3))]
    both = _run(method, task, feds, engine=engine).scores()["pre", "test"]
    for r, fed in enumerate(feds):
        alone = simulation(method, task, [fed], engine=engine, seeds=[r])
        single = run(alone).scores()["pre", "test"]
        np.testing.assert_allclose(both.loss[r], single.loss[0], atol=1e-11)
    assert not np.allclose(both.loss[0, 0], both.loss[1, 0])


# ---- evaluation in blocks of runs, and traces ----------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg-ft", "fedprox-two-stage", "fedamp"])
def test_more_runs_than_lanes_at_once_are_evaluated_in_blocks_of_runs(name: str) -> None:
    """Messages, adaptation, scores and bills of every run are its own, however the runs are cut."""
    task = net_task()
    method = build(name, task, LOCAL, {})
    feds = [*two_allocations(), federation(5)]
    points = ("pre", "global") if method.use.centre is not None else ("pre",)
    whole = _run(method, task, feds, chunk=1000, points=points, rounds=2)
    for chunk in (1, 2):
        cut = _run(method, task, feds, chunk=chunk, points=points, rounds=2)
        widest = max(len(block.ids) for block in cut.clients.evaluator.client_blocks())
        assert widest == chunk
        assert_same(outcome(cut), outcome(whole), atol=1e-11)


def test_the_initial_models_can_be_left_out_of_the_scores() -> None:
    """Nothing else changes; the point "post" needs them and keeps them."""
    task = net_task()
    method = build("fedprox-two-stage", task, LOCAL, {})
    every = _run(method, task, points=("pre",), eval_every=10)
    last = _run(method, task, points=("pre",), eval_every=10, eval_start=False)
    wanted, found = every.scores()["pre", "test"], last.scores()["pre", "test"]
    assert wanted.rounds == [0, *found.rounds]
    assert np.array_equal(wanted.loss[:, 1:], found.loss)
    post = _run(method, task, points=("pre", "post"), eval_start=False)
    assert post.scores()["pre", "test"].rounds[0] == 0


def test_blocks_come_back_in_order_and_late_ones_have_the_traces_of_early_ones() -> None:
    """Many blocks go in waves; what the first ones use often is traced for the others."""
    engine = Vectorised(build_arena([federation()], CPU, torch.float64), chunk=1)
    engine.workers = 2
    engine.traces.worth_it = 50
    slow = [0]

    def double(tensor: Tensor, ctx: Any) -> Tensor:
        slow[0] += 1
        return 2 * tensor

    def work(block: int) -> float:
        seen = 0.0
        for _ in range(20):
            seen += float(engine.traces.call(double, double, torch.tensor(float(block)), ()))
        return seen

    assert engine.blocks(work, list(range(40))) == [40.0 * block for block in range(40)]
    assert slow[0] < 20 * 40 / 4


def test_runs_of_different_shape_are_refused() -> None:
    """The message names both shapes."""
    with pytest.raises(FederationError, match=r"Run 1 has 2 clients.*run 0 has 5"):
        build_arena([federation(), federation(sizes=(4, 4))], CPU, torch.float64)


# ---- store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
def test_a_store_keeps_the_present_and_forgets_the_absent(mapped: bool, tmp_path) -> None:
    """What is put back is read; who never trained is new; a dump restores both."""

    def make(cohort: np.ndarray) -> Tree:
        lane = torch.from_numpy(cohort).double()
        return {"a": lane, "b": {"c": (10 + lane[..., None]).repeat(1, 1, 2).bfloat16()}}

    def new() -> Store:
        return Store(make, 2, 4, CPU, tmp_path / str(np.random.rand()) if mapped else None)  # noqa: NPY002

    store = new()
    cohort = np.array([[3, 0], [1, 2]])
    states = tree.map(lambda leaf: -leaf - 1, store.gather(cohort))
    store.scatter(cohort, states, np.array([[True, False], [True, True]]))
    everybody = np.tile(np.arange(4), (2, 1))
    wanted = [[0, 1, 2, -4], [0, -2, -3, 3]]
    assert store.gather(everybody)["a"].tolist() == wanted
    assert store.gather(everybody)["b"]["c"].dtype == torch.bfloat16
    assert store.gather(np.array([[3, 2]]), run=1)["a"].tolist() == [[3, -3]]
    other = new()
    other.load(store.dump())
    assert other.gather(everybody)["a"].tolist() == wanted
    assert torch.equal(other.gather(everybody)["b"]["c"], store.gather(everybody)["b"]["c"])


# ---- small parts ---------------------------------------------------------------------------------


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    """A typing error ends in a hint."""
    arena = build_arena([federation()], CPU, torch.float64)
    with pytest.raises(ConfigError, match=r"did you mean 'vectorised'"):
        make_engine("vectorized", arena, None, net_task())
    assert isinstance(make_engine("auto", arena, 3, net_task()), Vectorised)


def test_weighted_means_leave_out_weight_zero() -> None:
    """An upload of weight zero may be NaN; if all are, the fallback is returned."""
    uploads = {"w": torch.tensor([[1.0], [torch.nan], [4.0]])}
    old = {"w": torch.tensor([7.0])}
    assert weighted_mean(uploads, torch.tensor([1.0, 0.0, 2.0]), old)["w"].tolist() == [3.0]
    assert weighted_mean(uploads, torch.zeros(3), old)["w"].tolist() == [7.0]
    assert weighted_sum(uploads, torch.tensor([0.5, 0.0, 1.0]))["w"].tolist() == [4.5]


# ---- running ahead of a device -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedapa", "fedala", "pfedhn", "everything"])
def test_batches_drawn_ahead_are_those_of_the_round(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a device works the next round is planned; nothing but the time of planning changes."""
    task = net_task()
    method = everything(task) if name == "everything" else build(name, task, LOCAL, {})
    wanted = outcome(_run(method, task, chunk=4))
    sim = simulation(method, task, two_allocations(), chunk=4)
    sim.context.queued = True
    taken: list[bool] = []
    plan = sim.context.plan

    def watched(*args: Any) -> BatchPlan:
        before = len(sim.context.ahead)
        found = plan(*args)
        taken.append(len(sim.context.ahead) < before)
        return found

    monkeypatch.setattr(sim.context, "plan", watched)
    assert_same(outcome(run(sim)), wanted)
    assert any(taken) == (name != "pfedhn"), "pFedHN serves one client after the other"


def test_the_times_of_rounds_that_nobody_waited_for_are_shared() -> None:
    """Five rounds, looked at after the first, the third and the last: sums stay, shares are equal.

    A checkpoint looks as well.
    """
    task = net_task()
    sim = simulation(build("fedavg", task, LOCAL, {}), task, [federation()], rounds=5, eval_every=3)
    sim.context.queued = True
    looked = []
    for _ in range(5):
        sim.step()
        looked.append(not sim.log.unread)
    assert looked == [True, False, True, False, True]
    walls = sim.log.seconds["round"]
    assert walls[1] == walls[2]
    assert walls[3] == walls[4]
    assert len(walls) == len(sim.log.seconds["train"]) == 5
    parts = sim.log.seconds["train"]
    assert min(parts) > 0
    for looks in (slice(0, 1), slice(1, 3), slice(3, 5)):  # of two rounds one may be the longer
        assert sum(parts[looks]) <= sum(walls[looks])
    again = simulation(
        build("fedavg", task, LOCAL, {}), task, [federation()], rounds=5, eval_every=5
    )
    again.context.queued = True
    again.step()
    again.step()
    assert again.log.unread
    assert len(again.state()[2]["seconds"]["train"]) == 2
    assert not again.log.unread


# ---- memory --------------------------------------------------------------------------------------


def tight(most: int) -> type[Vectorised]:
    """Make an engine that runs out of memory with more than so many lanes."""

    class Tight(Vectorised):
        def phase(
            self, phase: Phase, work: Tree, ctx: ClientContext, plan: BatchPlan
        ) -> tuple[Tree, Tensor]:
            if plan.steps.size > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore")
            return super().phase(phase, work, ctx, plan)

    return Tight


@pytest.mark.parametrize(("name", "most"), [("fedapa", 3), ("everything", 1)])
def test_blocks_that_do_not_fit_are_halved(name: str, most: int) -> None:
    """States, scores and costs are those of the whole block, and later blocks fit at once."""
    task = net_task()
    method = everything(task) if name == "everything" else build(name, task, LOCAL, {})
    wanted = outcome(_run(method, task))
    sim = run(simulation(method, task, two_allocations(), engine=tight(most)))
    assert_same(outcome(sim), wanted, atol=1e-11)
    assert sim.engine.limit is not None
    assert sim.engine.limit <= most
    assert sim.engine.lanes == 1 << 20, "what was chosen stays, for all processes alike"


def test_a_client_that_does_not_fit_is_reported() -> None:
    """One lane cannot be halved: the message says what can be done."""
    task = net_task()
    sim = simulation(build("fedavg", task, LOCAL, {}), task, [federation()], engine=tight(0))
    with pytest.raises(ConfigError, match=r"single client does not fit.*9 GiB.*smaller batch"):
        sim.step()


def test_without_memory_to_plan_ahead_a_round_is_planned_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running out while the next round is drawn costs nothing but the time of drawing it later."""
    task = net_task()
    method = build("fedavg", task, LOCAL, {})
    wanted = outcome(_run(method, task, [federation()]))
    sim = simulation(method, task, [federation()])
    sim.context.queued = True
    tried: list[int] = []

    def draw(method: Method, stage: str, round_index: int, *cohort: np.ndarray) -> None:
        tried.append(round_index)
        sim.context.ahead["half"] = None  # type: ignore[assignment]
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sim.clients, "plan_ahead", draw)
    assert_same(outcome(run(sim)), wanted)
    assert tried == [1, 2]
    assert not sim.context.ahead


def test_a_state_that_cannot_be_put_stays_as_it_was() -> None:
    """Half of a block starts where the whole one failed: its states must not be half new."""
    store = Store(
        lambda ids: {"a": torch.zeros(*ids.shape, 2), "b": torch.zeros(*ids.shape)}, 1, 3, CPU
    )
    ids = np.array([[0, 1]])
    store.gather(ids)

    class Full:
        def to(self, *where: Any) -> Tensor:
            raise torch.OutOfMemoryError("no room")

    rows: Any = {"a": torch.ones(2, 2), "b": Full()}
    with pytest.raises(torch.OutOfMemoryError):
        store.put(np.zeros(2, dtype=int), np.array([0, 1]), rows)
    assert not store.gather(ids)["a"].any()


def test_features_of_few_values_are_packed_into_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches to the bit, from a byte a feature; what has more values stays as it is."""
    monkeypatch.setattr(arenas, "_WORTH_PACKING", 1)
    monkeypatch.setattr(arenas, "_GLANCE", 2)
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 2, 3), generator=rng)
    fed = Federation.from_arrays((images / 255 - 0.3) / 0.7, images[:, 0, 0] % 3, client=[0] * 300)
    arena = build_arena([fed], CPU, torch.float32)
    small = with_palette(arena)
    assert small.x.dtype == torch.uint8
    rows = torch.tensor([5, 0, 299, 5])
    assert torch.equal(small.features(rows), arena.x[rows])
    assert torch.equal(small.features(torch.arange(300)), arena.x)
    assert with_palette(small) is small
    more = replace(arena, x=torch.arange(600.0).reshape(300, 2))
    assert with_palette(more) is more
    broken = replace(arena, x=torch.full((300, 2), torch.nan))
    assert with_palette(broken) is broken
    whole = replace(arena, x=images)
    assert with_palette(whole) is whole


def test_a_simulation_of_packed_features_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_WORTH_PACKING", 1)
    fed = federation()
    fed = federation(data=((fed.x * 3).round() / 3, fed.y))  # few values
    task = net_task()
    method = build("fedprox", task, Local(epochs=2, batch=3, lr=0.1), {})
    other: Any
    plain = simulation(method, task, [fed])
    other = simulation(method, task, [fed])
    other.context.arena = other.engine.arena = with_palette(other.context.arena)
    assert other.context.arena.palette is not None
    assert_same(outcome(run(other)), outcome(run(plain)))
