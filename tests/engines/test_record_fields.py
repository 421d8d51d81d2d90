"""Fields of a record that only some methods use: parts, fresh batches, who trains, who talks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from sartor.compose import within_groups
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Method, Phase, changed
from sartor.methods import build
from tests.toys import assert_same, federation, net_task, outcome, run, simulation

SGD = Local(epochs=2, batch=4, lr=0.2)


def rows_seen(
    phase: dict[str, Any], *, rounds: int = 1, engine: str = "sequential", **settings: Any
) -> list[list[tuple[int, list[int]]]]:
    """Run a phase that only looks, and return (client, rows) of every step, round by round."""
    seen: list[list[tuple[int, list[int]]]] = []
    task = net_task()

    def step(work: Any, batch: Any, ctx: Any) -> Any:
        seen[-1].append((int(ctx.index), batch.rows[batch.mask].tolist()))
        return work

    look = Phase(name="look", step=step, **phase)
    method = changed(build("fedavg", task, SGD, {}), phases=(look,))
    sim = simulation(method, task, [federation()], rounds=rounds, engine=engine, **settings)
    for t in range(rounds):
        seen.append([])
        sim.rounds.train(sim.server, sim.store, t)
    return seen


def test_parts_are_disjoint_cover_everything_and_stay_the_same() -> None:
    """(0, 0.3), (0.3, 1) share no sample, and are the same samples in every round."""
    edges = [(0.0, 0.3), (0.3, 1.0)]
    found = [rows_seen({"batch": 2, "part": part}, rounds=2, participation="all") for part in edges]
    for client, size in enumerate(federation().train.sizes.tolist()):
        parts = []
        for per_round in found:
            sets = [{r for i, rows in steps if i == client for r in rows} for steps in per_round]
            assert sets[0] == sets[1]
            parts.append(sets[0])
        assert not parts[0] & parts[1]
        assert parts[0] | parts[1] == set(range(size))
        assert len(parts[0]) == max(int(0.3 * size), 1)


def test_a_share_of_a_part_stays_inside_it() -> None:
    """``share`` draws from the part, anew in every round."""
    inside = rows_seen({"batch": None, "part": (0.0, 0.5)}, participation="all")[0]
    drawn = rows_seen({"batch": 1, "part": (0.0, 0.5), "share": 0.5}, rounds=6, participation="all")
    allowed = {client: set(rows) for client, rows in inside}
    used: Counter[tuple[int, int]] = Counter()
    for steps in drawn:
        for client, rows in steps:
            assert set(rows) <= allowed[client]
            used[client, rows[0]] += 1
    assert len({row for client, row in used if client == 3}) > 2  # nine samples: two of four


def test_parts_differ_between_seeds() -> None:
    """Another run cuts the data elsewhere."""
    a, b = (
        rows_seen({"batch": None, "part": (0.0, 0.5)}, participation="all", seeds=[seed])[0]
        for seed in (0, 1)
    )
    assert a != b


def test_fresh_batches_are_drawn_from_all_samples_every_time() -> None:
    """Without replacement inside a batch, with it between batches, and every sample alike."""
    steps = [s for t in rows_seen({"batch": 3, "steps": 40, "fresh": True}, rounds=5) for s in t]
    mine = [rows for client, rows in steps if client == 3]
    assert all(len(set(rows)) == 3 for rows in mine)
    assert any(set(a) & set(b) for a, b in pairwise(mine))
    counts = np.array([Counter(r for rows in mine for r in rows)[r] for r in range(9)])
    expected = counts.sum() / 9
    assert np.abs(counts - expected).max() < 5 * expected**0.5
    small = [rows for client, rows in steps if client == 0]
    assert all(sorted(rows) == [0, 1] for rows in small)  # a client smaller than the batch


def test_fresh_batches_are_counted() -> None:
    """A fresh step costs its batch, also where the client has less than one."""
    task, fed = net_task(), federation()
    plain = build("fedavg", task, replace(SGD, steps=5, batch=3), {})
    method = changed(plain, phases=tuple(replace(p, fresh=True) for p in plain.phases))
    found = run(simulation(method, task, [fed], participation="all", rounds=1)).ledger()
    sizes = np.minimum(fed.train.sizes.numpy(), 3)
    assert found.gradient_evaluations[0, 0] == 5 * sizes.sum()


def test_a_phase_that_is_left_out_costs_and_changes_nothing() -> None:
    """``when`` is asked per client."""
    task, fed = net_task(), federation()
    plain = build("local", task, SGD, {})
    some = changed(
        plain,
        phases=tuple(replace(p, when=lambda work, ctx: ctx.index < 2) for p in plain.phases),
    )
    for engine in ("sequential", "vectorised"):
        sim = run(simulation(some, task, [fed], engine=engine, rounds=2))
        whole = run(simulation(plain, task, [fed], engine=engine, rounds=2))
        start = task.init(0)
        for client in range(5):
            wanted = whole.params(client) if client < 2 else start
            for name, leaf in sim.params(client).items():
                torch.testing.assert_close(leaf, wanted[name].double(), rtol=0, atol=1e-14)
        assert sim.ledger().gradient_evaluations[0, 0] == 2 * int(fed.train.sizes[:2].sum())


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_phase_may_ask_the_work_and_is_taken_by_those_alone(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``when`` sees the work before ``enter``; the others are not stepped, planned or mixed up."""
    task, fed = net_task(), federation()
    base = counting()

    def step(work: Any, batch: Any, ctx: Any) -> Any:
        return {**work, "sum": work["sum"] + batch.rows.sum() + 100 * ctx.index}

    odd = Phase(
        name="odd",
        step=step,
        enter=lambda work, ctx: {**work, "rounds": work["rounds"] + 0},
        when=lambda work, ctx: work["turn"] & (work["rounds"] < 2),
        batch=None,
    )
    method = changed(
        base,
        init_client=lambda params, ctx: {
            "rounds": torch.zeros_like(ctx.index),
            "sum": torch.zeros_like(ctx.index),
        },
        begin=lambda client, ctx: {
            **client,
            "params": ctx.common["params"],
            "turn": (ctx.index == 1) | (ctx.index == 4),
        },
        phases=(odd,),
        finish=lambda client, work, ctx: (
            {"rounds": work["rounds"] + 1, "sum": work["sum"]},
            {"one": torch.ones_like(ctx.index)},
        ),
    )
    sim = simulation(method, task, [fed, fed], engine=engine, rounds=3, participation="all")
    widths: list[Any] = []
    before = sim.context.engine.phase

    def watched(phase: Any, work: Any, ctx: Any, plan: Any) -> Any:
        if phase.name == "odd":
            widths.append(plan.widths())
        return before(phase, work, ctx, plan)

    monkeypatch.setattr(sim.context.engine, "phase", watched)
    run(sim)
    assert widths == [[(2, False)], [(2, False)]]  # two lanes a run; the third round plans nothing
    sizes, capacity = fed.train.sizes, int(fed.train.sizes.max())
    wanted = [0] * 5
    for i in (1, 4):
        n = int(sizes[i])
        wanted[i] = 2 * (n * (n - 1) // 2 + (capacity - n) * capacity + 100 * i)
    assert sim.store.gather(sim.context.everybody)["sum"].tolist() == [wanted, wanted]


def test_who_takes_a_phase_in_a_group_sees_the_message_of_the_group() -> None:
    """``within_groups`` gives ``when``, ``steps`` and ``stop`` the message of the method."""
    task, fed = net_task(), federation()
    plain = build("fedavg", task, SGD, {})

    def ask(ctx: Any) -> torch.Tensor:
        return ctx.common["params"]["fc.bias"].isfinite().all()

    asking = tuple(
        replace(
            p,
            when=lambda work, ctx: ask(ctx),
            steps=lambda ctx: 3 * ask(ctx).long(),
            stop=lambda work, ctx: ask(ctx),
        )
        for p in plain.phases
    )
    method = within_groups(changed(plain, phases=asking))
    ledger = run(simulation(method, task, [fed], rounds=1, participation="all")).ledger()
    assert ledger.gradient_evaluations[0, 0] == np.minimum(fed.train.sizes.numpy(), 4).sum()


def counting() -> Method:
    """Make a method whose clients count their rounds and whose server counts reports."""
    return Method(
        name="counting",
        hyper={"local_lr": Hyper(0.1)},
        init_server=lambda params, server_ctx: {
            "params": params,
            "reports": torch.zeros_like(server_ctx.sizes),
        },
        init_client=lambda params, ctx: {"rounds": torch.zeros_like(ctx.index)},
        broadcast=lambda server, server_ctx: {"params": server["params"]},
        begin=lambda client, ctx: {**client, "params": ctx.common["params"]},
        finish=lambda client, work, ctx: (
            {"rounds": work["rounds"] + 1},
            {"one": torch.ones_like(ctx.index)},
        ),
        aggregate=lambda server, uploads, server_ctx: {
            **server,
            "reports": server["reports"].index_add(
                0, server_ctx.cohort, uploads["one"] * server_ctx.present
            ),
        },
    )


def test_all_train_while_the_cohort_reports() -> None:
    """``train_all``: every state moves in every round, and only the cohort reports."""
    task, fed = net_task(), federation()
    method = changed(counting(), who="everyone_trains")
    sim = run(simulation(method, task, [fed], participation=2, rounds=6))
    sampled = run(simulation(counting(), task, [fed], participation=2, rounds=6))
    assert sim.store.gather(sim.context.everybody)["rounds"].tolist() == [[6] * 5]
    assert sim.server["reports"].tolist() == sampled.server["reports"].tolist()
    assert int(sim.server["reports"].sum()) == 12
    size = sum(leaf.numel() for leaf in task.init(0).values()) * 8
    ledger = sim.ledger()
    assert ledger.participants.tolist() == [[5] * 6]
    assert ledger.bytes_down.tolist() == [[5 * size] * 6]
    assert ledger.bytes_up.tolist() == [[2 * 8] * 6]


def test_a_client_without_messages_is_not_billed() -> None:
    """``connected`` takes messages and uploads out of the log."""
    task = net_task()
    method = changed(counting(), connected=lambda server, server_ctx: server_ctx.cohort != 3)
    sim = run(simulation(method, task, [federation()], participation="all", rounds=2))
    size = sum(leaf.numel() for leaf in task.init(0).values()) * 8
    assert sim.ledger().bytes_down.tolist() == [[4 * size] * 2]
    assert sim.ledger().bytes_up.tolist() == [[4 * 8] * 2]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_global_model_is_scored_on_every_clients_data(engine: str) -> None:
    """The point "global" of FedAvg is its "pre"; a method without a global model has none."""
    task, fed = net_task(), federation()
    points = ("pre", "post", "global")
    sim = run(simulation(build("fedavg", task, SGD, {}), task, [fed], points=points, engine=engine))
    scores = sim.scores()
    assert scores["global", "test"].rounds == [0, 1, 2, 3]
    np.testing.assert_allclose(scores["global", "test"].loss, scores["pre", "test"].loss)
    alone = run(simulation(build("local", task, SGD, {}), task, [fed], points=points))
    assert ("global", "test") not in alone.scores()
    with pytest.raises(ConfigError, match="no global model"):
        alone.params(0, point="global")
    for name, leaf in sim.params(0, point="global").items():
        assert torch.equal(leaf, sim.server["params"][name][0])


def ending(task: Any) -> Method:
    """Make FedAvg with an epilogue: every client trains on, and keeps and uses what it found."""
    base = build("fedavg", task, SGD, {})
    kept = changed(
        base,
        init_client=lambda params, ctx: {"params": params, "over": ctx.index < 0},
        begin=lambda client, ctx: {
            "params": tree.where(client["over"], client["params"], ctx.common["params"]),
            "over": client["over"],
        },
        finish=lambda client, work, ctx: (client, {"params": work["params"]}),
    )

    last = changed(
        kept,
        phases=(descend(task, SGD, name="last"),),
        finish=lambda client, work, ctx: (
            {"params": work["params"], "over": torch.ones_like(work["over"])},
            {},
        ),
        aggregate=lambda server, uploads, server_ctx: server,
    )
    return changed(kept, after=last)


def test_evaluations_run_the_epilogue_on_copies() -> None:
    """An evaluation in round t scores what a run of t rounds deploys, and changes nothing."""
    task, fed = net_task(), federation()
    long = run(simulation(ending(task), task, [fed], rounds=3))
    rare = run(simulation(ending(task), task, [fed], rounds=3, eval_every=3))
    assert_same(
        {k: v for k, v in outcome(long).items() if k.startswith(("client", "server"))},
        {k: v for k, v in outcome(rare).items() if k.startswith(("client", "server"))},
    )
    for rounds in (1, 2, 3):
        short = run(simulation(ending(task), task, [fed], rounds=rounds))
        np.testing.assert_array_equal(
            long.scores()["pre", "test"].loss[:, rounds], short.scores()["pre", "test"].loss[:, -1]
        )
    assert bool(long.store.gather(long.context.everybody)["over"].all())


def test_a_run_that_is_resumed_after_its_end_does_not_end_twice() -> None:
    """The epilogue is part of the state: a finished run stays as it is."""
    task, fed = net_task(), federation()
    sim = run(simulation(ending(task), task, [fed], rounds=2))
    again = simulation(ending(task), task, [fed], rounds=2)
    again.load(*sim.state())
    assert again.finished
    for name, leaf in again.params(1).items():
        assert torch.equal(leaf, sim.params(1)[name])


def test_what_happens_once_is_counted_once() -> None:
    """Messages and gradients of an epilogue and of the last adaptation, however often evaluated."""
    task, fed = net_task(), federation()
    size = sum(leaf.numel() for leaf in task.init(0).values()) * 8
    total = int(fed.train.sizes.sum())
    sim = run(simulation(ending(task), task, [fed], rounds=2)).ledger()
    assert sim.setup_bytes.tolist() == [5 * size]
    assert sim.setup_gradients.tolist() == [2 * total]
    tuned = build("fedavg-ft", task, SGD, {"ft_epochs": 3})
    for every in (1, 2):
        ledger = run(simulation(tuned, task, [fed], rounds=2, eval_every=every)).ledger()
        assert ledger.setup_bytes.tolist() == [5 * size]
        assert ledger.setup_gradients.tolist() == [3 * total]


def test_held_out_data_must_exist() -> None:
    """A phase on validation data without any is refused with the way out."""
    task = net_task()
    base = build("fedavg", task, SGD, {})
    method = changed(base, phases=(replace(base.phases[0], data="val"),))
    with pytest.raises(ConfigError, match=r"val=0\.2"):
        simulation(method, task, [federation(val=0)])
