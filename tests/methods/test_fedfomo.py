"""FedFomo: first-order weights of a few other models, and who is sent to whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core import rng
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, ServerContext, changed
from sartor.core.task import Task, given, never
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from sartor.methods.fedfomo import exploration
from tests.toys import (
    assert_same,
    federation,
    net_task,
    outcome,
    quadratic_task,
    run,
    simulation,
    states,
    two_allocations,
)

SGD = Local(epochs=2, batch=3, lr=0.2)
SIZE = 4 * 5 + 5 + 5 * 3 + 3  # the parameters of the toy network
GOOD = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.0))


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _mix(
    own: Any,
    others: Any,
    *,
    reference: Any = (0.0, 0.0),
    found: Any = None,
    samples: int = 1,
    offset: float = 0.0,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Weigh models on ½‖θ − (1, 0)‖² and return the new model and w̃."""
    task = Task(Quadratic(2), None, lambda s, y: given(s, y) + offset, never)
    method = build("fedfomo", task, Local(), options)
    others = _tensor(others).reshape(-1, 2)
    there = torch.ones(len(others), dtype=torch.bool) if found is None else torch.tensor(found)
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        own={"models": {"w": others}, "found": there}
    )
    client = {"params": {"w": _tensor(own)}, "reference": {"w": _tensor(reference)}}
    x = _tensor([[1.0, 1.0, 1.0, 0.0]]).repeat(samples + 1, 1)
    mask = torch.arange(samples + 1) < samples  # the last row is padding
    batch = Batch(x, torch.zeros(samples + 1, dtype=torch.int64), mask, None, None)
    phase = method.phases[0]
    work = phase.enter(method.begin(client, ctx), ctx)
    for _ in range(2):
        work = phase.step(work, batch, ctx)
    work = phase.leave(work, ctx)
    assert torch.equal(work["params"]["w"], work["reference"]["w"])
    _, upload = method.finish(client, work, ctx)
    return work["params"]["w"].numpy(), upload["raw"].numpy()


# ---- the weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "raw", "new"),
    [
        ("l2", (0.5, -0.5, 0.75), (0.7, 0.0)),
        ("l1", (0.5, -0.5, 0.75), (0.7, 0.0)),
        ("squared", (0.5, -0.5, 1.5), (0.625, 0.0)),
    ],
)
@pytest.mark.parametrize("samples", [1, 4])
def test_the_worked_case(distance: str, raw: tuple, new: tuple, samples: int) -> None:
    """w̃ = (0.5, −0.5, 0.75), w = (0.4, 0, 0.6), θ = (0.7, 0): mean losses, padding left out."""
    found = _mix(GOOD[0], GOOD[1:], samples=samples, distance=distance)
    np.testing.assert_allclose(found[1], raw, atol=2e-4)
    np.testing.assert_allclose(found[0], new, atol=2e-4)


def test_distances_add_up_as_they_should() -> None:
    """From (0, 0) the model (3, 4) is at 5, at 7 and at 25; its gain is −9.5."""
    for distance, far in (("l2", 5.0), ("l1", 7.0), ("squared", 25.0)):
        _, raw = _mix((1.0, 0.0), [(3.0, 4.0)], distance=distance)
        assert raw[1] == pytest.approx((0.5 - 0.5 * (4 + 16)) / far, rel=1e-5)


def test_a_constant_in_the_loss_changes_nothing() -> None:
    """Adding 7 to L leaves the weights."""
    for a, b in zip(_mix(GOOD[0], GOOD[1:]), _mix(GOOD[0], GOOD[1:], offset=7.0), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_a_model_at_the_reference_has_no_weight() -> None:
    """Numerator and distance are 0: the weight is 0, and nothing is NaN."""
    new, raw = _mix((0.5, 0.0), [(0.0, 0.0)])
    np.testing.assert_array_equal(raw[1:], [0.0])
    np.testing.assert_array_equal(new, [0.5, 0.0])


@pytest.mark.parametrize(("fallback", "wanted"), [("current", (0, 2)), ("reference", (0, 0))])
def test_nobody_helps(fallback: str, wanted: tuple) -> None:
    """If no w̃ is positive the client keeps its model, or goes back to its reference."""
    new, raw = _mix((0.0, 2.0), [(0.0, 1.0), (-1.0, 0.0)], fallback=fallback)
    assert raw.max() < 0
    np.testing.assert_array_equal(new, wanted)


def test_who_was_not_found_does_not_count() -> None:
    """A slot without a model has weight 0, however good what stands there."""
    new, raw = _mix((0.5, 0.0), [(1.0, 0.0), (0.9, 0.0)], found=[False, False])
    np.testing.assert_array_equal(raw[1:], [0.0, 0.0])
    np.testing.assert_array_equal(new, [0.5, 0.0])


def test_a_diverged_model_helps_nobody() -> None:
    """A model of NaN or infinity neither gets weight nor spoils the others."""
    wanted = _mix(GOOD[0], [GOOD[2]])
    found = _mix(GOOD[0], [(np.nan, 0.0), GOOD[2], (np.inf, 0.0)])
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-15)
    np.testing.assert_array_equal(found[1][[1, 3]], [0.0, 0.0])


def test_the_new_model_is_a_mean_of_those_that_help() -> None:
    """θ = Σ w_j θ_j with w = max(w̃, 0)/Σ, for any models of which one helps."""
    draw, helped = np.random.default_rng(0), 0
    for _ in range(20):
        models = draw.normal(size=(4, 2)) * 0.5 + [0.5, 0.0]
        new, raw = _mix(models[0], models[1:])
        if raw.max() > 0:
            helped += 1
            w = np.maximum(raw, 0) / np.maximum(raw, 0).sum()
            np.testing.assert_allclose(new, w @ models, atol=1e-12)
    assert helped > 10


# ---- who is sent to whom -------------------------------------------------------------------------


def _server(affinity: Any, there: Any) -> Any:
    rows = torch.arange(len(there), dtype=torch.float64)[:, None]
    return {"models": {"w": rows}, "affinity": _tensor(affinity), "there": torch.tensor(there)}


def _server_context(num: int, seed: int = 0, round_index: int = 0, **hyper: float) -> ServerContext:
    return ServerContext(
        hyper={k: _tensor(v) for k, v in hyper.items()},
        key=rng.key(seed),
        round=torch.tensor(round_index),
        sizes=torch.ones(num, dtype=torch.int64),
        cohort=torch.arange(num),
        present=torch.ones(num, dtype=torch.bool),
    )


def _sent(
    server: Any, index: int, ctx: ServerContext, **options: Any
) -> tuple[list[int], list[bool]]:
    method = build("fedfomo", quadratic_task(), Local(), options)
    message = method.address(server, torch.tensor(index), ctx)
    return message["models"]["w"][:, 0].long().tolist(), message["found"].tolist()


ROW = [9.0, 1.0, 5.0, -2.0, 3.0]
AFFINITY = [ROW, ROW, [0.0] * 5, ROW, ROW]


def test_the_largest_affinities_are_sent_first() -> None:
    """Client 0 gets 2, 4, 1: never itself; only 2 and 3 if only they uploaded in the last round."""
    server = _server(AFFINITY, [True] * 5)
    assert _sent(server, 0, _server_context(5), picks=4) == ([2, 4, 1], [True] * 3)
    assert _sent(server, 1, _server_context(5), picks=4) == ([0, 2, 4], [True] * 3)
    few = _server(AFFINITY, [True, False, True, True, False])
    ids, found = _sent(few, 0, _server_context(5), picks=4)
    assert (ids[:2], found) == ([2, 3], [True, True, False])
    assert _sent(server, 0, _server_context(5), picks=9) == ([2, 4, 1, 3], [True] * 4)
    assert _sent(server, 0, _server_context(5), picks=1) == ([], [])


def test_ties_are_broken_at_random() -> None:
    """With equal affinities every other client is sent sometimes, about equally often."""
    server = _server(AFFINITY, [True] * 5)
    counts = np.zeros(5)
    for seed in range(100):
        ids, _ = _sent(server, 2, _server_context(5, seed), picks=3)
        assert len(set(ids)) == 2
        counts[ids] += 1
    assert counts[2] == 0
    np.testing.assert_allclose(counts[[0, 1, 3, 4]], 50, atol=20)


def test_exploration_falls_to_nothing() -> None:
    """ε_0 = 0.3 and 0.05 a round: 0.30, 0.25, ..., 0.05, 0, 0."""
    server_contexts = [
        _server_context(5, round_index=t, explore_start=0.3, explore_decay=0.05) for t in range(8)
    ]
    wanted = [0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0]
    np.testing.assert_allclose([float(exploration(h)) for h in server_contexts], wanted, atol=1e-15)


def test_a_pick_is_random_as_often_as_it_should_be() -> None:
    """ε = 0: greedy; ε = 0.5: the best is first in (1 + 1/4)/2 of the draws; distinct always."""
    server = _server(AFFINITY, [True] * 5)
    for start, share, width in ((0.0, 1.0, 0.0), (0.5, 0.625, 0.15), (1.0, 0.25, 0.15)):
        first = []
        for seed in range(100):
            ctx = _server_context(5, seed, explore_start=start, explore_decay=0.0)
            ids, found = _sent(server, 0, ctx, picks=4, explore=True)
            assert len(set(ids)) == 3
            assert 0 not in ids
            assert all(found)
            first.append(ids[0] == 2)
        assert np.mean(first) == pytest.approx(share, abs=width)


def test_a_newcomer_is_sent_those_that_helped_others() -> None:
    """Columns of P without the diagonal decide; the message looks like any other."""
    method = build("fedfomo", quadratic_task(), Local(), {"picks": 3})
    affinity = np.zeros((4, 4))
    affinity[:, 1], affinity[:, 3], affinity[2, 2] = 2.0, 3.0, 100.0
    server, ctx = _server(affinity.tolist(), [True] * 4), _server_context(4)
    assert method.newcomer.message is not None
    message, usual = (
        method.newcomer.message(server, ctx),
        method.address(server, torch.tensor(0), ctx),
    )
    assert message["models"]["w"][:, 0].tolist() == [3.0, 1.0]
    assert message.keys() == usual.keys()
    assert message["models"]["w"].shape == usual["models"]["w"].shape
    assert message["found"].shape == usual["found"].shape


# ---- whole runs ----------------------------------------------------------------------------------


def _net(name: str = "fedfomo", local: Local = SGD, rounds: int = 4, **options: Any) -> Any:
    task = net_task()
    return run(
        simulation(build(name, task, local, options), task, two_allocations(), rounds=rounds)
    )


@pytest.mark.parametrize("keep", [False, True])
def test_own_model_only_is_local_training(keep: bool) -> None:
    """K = 1: the client keeps its model, whether it beats the reference or not; to the bit."""
    local = replace(SGD, lr=0.05, momentum=0.9, keep_optimiser=keep)
    found = outcome(_net(local=local, picks=1, select_on="validation"))
    wanted = outcome(_net("local", local=local, participation="sampled"))
    for name in wanted:
        if name.startswith(("pre/", "post/")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_the_first_round_is_local_training() -> None:
    """Nobody has uploaded anything yet."""
    found = outcome(_net(rounds=1, select_on="validation"))
    wanted = outcome(_net("local", rounds=1, participation="sampled"))
    np.testing.assert_array_equal(found["post/test/loss"], wanted["post/test/loss"])


@pytest.mark.parametrize("affinity", ["raw", "normalised"])
@pytest.mark.parametrize("fallback", ["current", "reference"])
def test_a_run_is_a_plain_loop(affinity: str, fallback: str) -> None:
    """Everybody sees everybody's last upload; the reference is the model before local training."""
    draw = np.random.default_rng(1)
    centres = np.repeat(draw.normal(size=(2, 3)), 2, axis=0) + 0.3 * draw.normal(size=(4, 3))
    start, lr, rounds = draw.normal(size=3), 1.7, 4  # a long step, so that training may do harm

    def loss(i: int, w: np.ndarray) -> float:
        return 0.5 * float(np.square(w - centres[i]).sum() * (3.0 if i == 3 else 1.0))

    models, refs, table = np.tile(start, (4, 1)), np.tile(start, (4, 1)), 0.1 * np.eye(4)
    alone = 0
    for t in range(rounds):
        mixed = models.copy()
        for i in range(4):
            seen = range(4) if t else [i]
            raw = np.zeros(4)
            for j in seen:
                far = np.linalg.norm(models[j] - refs[i]) + 1e-5
                raw[j] = (loss(i, refs[i]) - loss(i, models[j])) / far
            plus = np.maximum(raw, 0)
            if plus.sum() > 0:
                mixed[i] = plus @ models / plus.sum()
            else:
                alone += t > 0
                mixed[i] = models[i] if fallback == "current" else refs[i]
            table[i] += raw / max(abs(raw.sum()), 1e-9) if affinity == "normalised" else raw
        refs = mixed.copy()
        scale = np.array([1.0, 1.0, 1.0, 3.0])[:, None]
        models = mixed - lr * scale * (mixed - centres)
    assert alone > 0
    bend = np.ones_like(centres)
    bend[3] = 3.0
    fed, _ = quadratics(bend, centres, samples=5)
    module = Quadratic(3).double()
    with torch.no_grad():
        module.w.copy_(torch.from_numpy(start))
    task = Task(module, None, given, never)
    options = {"affinity": affinity, "fallback": fallback}
    method = build("fedfomo", task, Local(steps=1, batch=None, lr=lr), options)
    sim = run(simulation(method, task, [fed], rounds=rounds, participation="all"))
    after = states(sim)
    np.testing.assert_allclose(after["server/models/w"][0], models, rtol=0, atol=1e-6)
    np.testing.assert_allclose(after["client/params/w"][0], models, rtol=0, atol=1e-6)
    np.testing.assert_allclose(after["client/reference/w"][0], refs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(after["server/affinity"][0], table, rtol=0, atol=1e-6)
    assert np.abs(np.diag(table) - 0.1).min() > 1e-3  # the own model is weighed like any other


def test_only_rows_of_participants_change() -> None:
    """P, the models and who is available follow the cohort; an absent client keeps its state."""
    task = net_task()
    sim = simulation(build("fedfomo", task, SGD, {}), task, [federation()], participation=2)
    for _ in range(3):
        old = states(sim)
        sim.step()
        new = states(sim)
        came = new["server/there"][0]
        assert came.sum() == 2
        for name in ("server/affinity", "server/models/fc.weight", "client/params/fc.weight"):
            moved = (new[name] != old[name])[0].reshape(5, -1).any(1)
            assert not moved[~came].any(), name
        assert (new["client/params/fc.weight"] != old["client/params/fc.weight"])[0][came].any()


def test_everybodys_last_upload_can_be_had() -> None:
    """Whoever came once stays available with `ever`, and only the last round's with the default."""
    task, found = net_task(), {}
    for kind in ("last_round", "ever"):
        method = build("fedfomo", task, SGD, {"available": kind})
        sim = run(simulation(method, task, [federation()], participation=2, rounds=6))
        found[kind] = int(sim.server["there"].sum())
    assert found["last_round"] == 2
    assert found["ever"] > 2


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_client_never_trains_on_its_validation_samples(share: float) -> None:
    """One fixed part of its samples weighs the models, the others train; the same in all rounds."""
    task = net_task()
    method = build("fedfomo", task, SGD, {"val_share": share})
    used: dict[tuple[int, str], list[set[int]]] = {}

    def watch(phase: Any) -> Any:
        def enter(work: Any, ctx: ClientContext) -> Any:
            used.setdefault((int(ctx.index), phase.name), []).append(set())
            return phase.enter(work, ctx)

        def step(work: Any, batch: Batch, ctx: ClientContext) -> Any:
            used[int(ctx.index), phase.name][-1] |= set(batch.rows[batch.mask].tolist())
            return phase.step(work, batch, ctx)

        return replace(phase, enter=enter, step=step)

    watched = changed(method, phases=tuple(watch(p) for p in method.phases), adapt=())
    fed = federation(sizes=(10, 20, 15), val=0)
    sim = simulation(
        watched, task, [fed], engine="sequential", participation="all", eval_every=3, points=()
    )
    run(sim)
    for i, size in enumerate((10, 20, 15)):
        held, trained = (used[i, name] for name in ("mix", "train"))
        assert len(held) == 3
        assert all(rows == held[0] for rows in held)
        assert all(rows == trained[0] for rows in trained)
        assert not held[0] & trained[0]
        assert held[0] | trained[0] == set(range(size))
        assert len(held[0]) == pytest.approx(share * size, abs=1)


def test_a_few_models_travel_down_and_one_up() -> None:
    """K − 1 models down (none in round 0) and a byte of marks, one model and K weights up."""
    task = net_task()
    sim = run(simulation(build("fedfomo", task, SGD, {"picks": 3}), task, [federation()]))
    ledger = sim.ledger()
    np.testing.assert_array_equal(ledger.bytes_up, 8 * (SIZE + 3) * ledger.participants)
    wanted = np.array([1, 8 * 2 * SIZE + 1, 8 * 2 * SIZE + 1]) * ledger.participants
    np.testing.assert_array_equal(ledger.bytes_down, wanted)


def test_the_comparison_costs_forward_passes_only() -> None:
    """K + 1 passes over the validation samples, and the gradients of local training."""
    task, feds = net_task(), [federation()]
    method = build("fedfomo", task, SGD, {"picks": 3, "select_on": "validation"})
    ledger = run(simulation(method, task, feds, participation="all", rounds=1)).ledger()
    assert ledger.forward_evaluations[0, 0] == 4 * int(feds[0].val.sizes.sum())
    assert ledger.gradient_evaluations[0, 0] == 2 * int(feds[0].train.sizes.sum())


def test_exploring_runs_are_the_same_on_both_engines() -> None:
    """Random picks follow from the seed: the same in one call, in chunks, and one by one."""
    task = net_task()
    method = build("fedfomo", task, SGD, {"picks": 3, "explore": True})
    settings = {"hyper": {"explore_start": 0.5}, "rounds": 3}
    wanted = outcome(
        run(simulation(method, task, two_allocations(), engine="sequential", **settings))
    )
    found = outcome(run(simulation(method, task, two_allocations(), chunk=3, **settings)))
    assert_same(found, wanted, atol=1e-11)
    greedy = outcome(_net(picks=3, rounds=3))
    assert np.abs(greedy["post/test/loss"] - found["post/test/loss"]).max() > 1e-6


def test_the_model_before_training_is_the_mixture() -> None:
    """The point "pre" is what the client would train from: the authors' evaluation point."""
    task = net_task()
    sim = run(
        simulation(build("fedfomo", task, SGD, {}), task, [federation()], participation="all")
    )
    before = states(sim)
    mixed = np.stack([sim.params(i, point="pre")["fc.weight"].numpy() for i in range(5)])
    assert np.abs(mixed - before["client/params/fc.weight"][0]).max() > 1e-3
    more = simulation(
        build("fedfomo", task, SGD, {}), task, [federation()], participation="all", rounds=4
    )
    np.testing.assert_allclose(
        states(run(more))["client/reference/fc.weight"][0], mixed, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("options", [{"picks": 0}, {"val_share": 0.0}, {"val_share": 1.0}])
def test_wrong_numbers_are_refused(options: dict) -> None:
    """It says what is legal."""
    with pytest.raises(ConfigError, match="picks >= 1 and 0 < val_share < 1"):
        build("fedfomo", net_task(), SGD, options)
