"""APFL: a mixture of an own model and FedAvg's, with a learnt share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, changed
from sartor.methods import METHODS, build
from tests.toys import (
    Q3,
    centre,
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

A, C = np.array(Q3[0]), np.array(Q3[1])
GD = Local(steps=1, batch=None, lr=0.1)
SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
FIXED = {"mixing": "fixed"}


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


def _kept(sim) -> tuple[np.ndarray, np.ndarray]:
    """Return v_i and α_i of a run on quadratics."""
    state = sim.store.gather(sim.context.everybody)
    return state["personal"]["w"][0, :, 0].numpy(), state["mix"]["share"][0].numpy()


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
@pytest.mark.parametrize(
    ("mixing", "share", "rule"),
    [("fixed", 0.0, "uniform"), ("round", 0.3, "normalized"), ("step", 1.0, "normalized")],
)
def test_the_global_model_is_fedavgs_to_the_bit(
    local: Local, mixing: str, share: float, rule: str
) -> None:
    """Whatever α and v are, w takes every step once, and FedAvg's bytes travel."""
    wanted = _net("fedavg", local, {"rule": rule})
    found = _net("apfl", local, {"mixing": mixing, "rule": rule}, hyper={"share_start": share})
    for name, leaf in states(wanted).items():
        assert_array_equal(states(found)[name], leaf, err_msg=name)
    for name in ("bytes_up", "bytes_down", "participants"):
        assert_array_equal(getattr(found.ledger(), name), getattr(wanted.ledger(), name))


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_a_share_of_one_is_local_training(local: Local) -> None:
    """α = 1, fixed: v_i is LocalTrain's to the bit, and is what the client uses."""
    wanted = outcome(_net("local", local, {"participation": "sampled"}, rounds=5))
    found = outcome(_net("apfl", local, FIXED, hyper={"share_start": 1.0}, rounds=5))
    for name, leaf in wanted.items():
        if name.startswith("client/params/"):
            assert_array_equal(found[name.replace("params", "personal")], leaf, err_msg=name)
        if name.startswith(("pre/", "post/")):
            assert_array_equal(found[name], leaf, err_msg=name)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_a_share_of_zero_is_fedavg(local: Local) -> None:
    """α = 0, fixed: what a client uses is FedAvg's model, to the bit; v_i stays (no decay)."""
    local = replace(local, weight_decay=0.0)
    wanted = outcome(_net("fedavg", local))
    sim = _net("apfl", local, FIXED, hyper={"share_start": 0.0})
    found = outcome(sim)
    for name, leaf in wanted.items():
        if name.startswith(("pre/", "post/")):
            assert_array_equal(found[name], leaf, err_msg=name)
    start = net_task().init(0)
    for name, leaf in sim.store.gather(sim.context.everybody)["personal"].items():
        assert_array_equal(leaf[0], start[name].double().expand_as(leaf[0]))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_at_the_fixed_point_the_mixture_is_the_clients_own_optimum(share: float) -> None:
    """F_i = ½a(x − c)²: with α fixed in (0, 1], v̄_i tends to c_i; v_i is not overwritten by it."""
    local = replace(GD, lr=0.4)
    sim = q3("apfl", local, options=FIXED, hyper={"share_start": share}, rounds=170)
    assert_allclose(used(sim), C, atol=1e-6)
    v, _ = _kept(sim)
    assert_allclose(v, (C - (1 - share) * centre(sim)) / share, atol=1e-5)


def _client_context(**hyper: float) -> ClientContext:
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in hyper.items()}
    one = torch.ones(1, dtype=torch.float64)
    return ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        hyper=numbers, common={"params": {"w": 0.0 * one}}
    )


def test_the_gradient_in_the_share_has_the_known_number() -> None:
    """V = 2, w = 0, a = 1, α = 0.75: v̄ = 1.5, ∂f/∂α = 1; a step of 0.1 gives 0.65, of 2 gives 0.

    The weight decay of training leaves α alone.
    """
    decayed = replace(GD, weight_decay=0.5)
    one = torch.ones(1, dtype=torch.float64)
    client = {"personal": {"w": 2.0 * one}, "mix": {"share": 0.75 * one[0]}}
    batch = Batch(torch.tensor([[1.0, 1.0]]).double(), one.long(), one.bool(), None, None)
    for mixing in ("round", "step"):
        method = build("apfl", quadratic_task(), decayed, {"mixing": mixing})
        for rate, decay, wanted in ((0.1, 0.0, 0.65), (2.0, 0.0, 0.0), (0.1, 0.4, 0.62)):
            ctx = _client_context(share_lr=rate, share_decay=decay, local_lr=0.1, weight_decay=0.5)
            work = method.begin(client, ctx)
            assert float(method.use.model(work, ctx)["w"]) == 1.5
            moved = method.phases[0].step(work, batch, ctx)
            assert float(moved["mix"]["share"]) == pytest.approx(wanted, abs=1e-14)
        up = {**client, "mix": {"share": 0.25 * one[0]}}  # v̄ = 0.5, ∂f/∂α = −1
        ctx = _client_context(share_lr=9.0, share_decay=0.0, local_lr=0.1, weight_decay=0.5)
        moved = method.phases[0].step(method.begin(up, ctx), batch, ctx)
        assert float(moved["mix"]["share"]) == 1.0


def test_a_step_is_taken_from_the_old_point() -> None:
    """W, v and α all move along gradients at the point before the step."""
    rate, turn, w, v, share = 0.1, 0.05, 1.0, np.full(3, 1.0), np.full(3, 0.4)
    local = replace(GD, steps=3)
    options, hyper = {"mixing": "step"}, {"share_start": 0.4, "share_lr": turn}
    for t in range(1, 4):
        w_i = np.full(3, w)
        for _ in range(3):
            slope = A * (share * v + (1 - share) * w_i - C)
            turned = np.clip(share - turn * (v - w_i) * slope, 0.0, 1.0)
            w_i, v = w_i - rate * A * (w_i - C), v - rate * share * slope
            share = turned
        w = float(w_i.mean())
        sim = q3("apfl", local, options=options, hyper=hyper, rounds=t, start=1.0)
        found = _kept(sim)
        assert_allclose(found[0], v, atol=1e-7)
        assert_allclose(found[1], share, atol=1e-7)
        assert centre(sim) == pytest.approx(w, abs=1e-7)
        assert_allclose(used(sim), share * v + (1 - share) * w, atol=1e-7)


def test_once_a_round_the_share_moves_first_and_at_the_received_model() -> None:
    """The share moves by the gradient at (v_i, w_t), and the steps of the round use it."""
    rate, turn, w, v, share = 0.1, 0.05, 1.0, np.full(3, 1.0), np.full(3, 0.4)
    hyper = {"share_start": 0.4, "share_lr": turn}
    for t in range(1, 4):
        slope = A * (share * v + (1 - share) * w - C)
        share = np.clip(share - turn * (v - w) * slope, 0.0, 1.0)
        w_i = np.full(3, w)
        for _ in range(2):
            v_bar = share * v + (1 - share) * w_i
            w_i, v = w_i - rate * A * (w_i - C), v - rate * share * A * (v_bar - C)
        w = float(w_i.mean())
        sim = q3("apfl", replace(GD, steps=2), hyper=hyper, rounds=t, start=1.0)
        assert_allclose(_kept(sim)[0], v, atol=1e-7)
        assert_allclose(_kept(sim)[1], share, atol=1e-7)


def test_the_share_sees_the_first_batch_of_training() -> None:
    """Once a round: the batch of the share is that of training's first step."""
    task = net_task()
    method = build("apfl", task, SGD, {})
    seen: dict[str, list] = {"mix": [], "train": []}

    def watch(phase):
        def step(work, batch, ctx):
            seen[phase.name].append((int(ctx.round), int(ctx.index), batch.rows.tolist()))
            return phase.step(work, batch, ctx)

        return replace(phase, step=step)

    watched = changed(method, phases=tuple(watch(p) for p in method.phases))
    run(simulation(watched, task, [federation()], engine="sequential"))
    firsts = {}
    for t, i, rows in seen["train"]:
        firsts.setdefault((t, i), rows)
    assert {(t, i): rows for t, i, rows in seen["mix"]} == firsts
    assert len(seen["mix"]) == len(firsts)


def test_momentum_is_left_to_training() -> None:
    """With a rate of zero for α, learning it changes nothing, kept momentum included."""
    for local in (HEAVY, KEPT):
        wanted = states(_net("apfl", local, FIXED))
        for mixing in ("round", "step"):
            found = states(_net("apfl", local, {"mixing": mixing}, hyper={"share_lr": 0.0}))
            assert sorted(found) == sorted(wanted)
            for name, leaf in wanted.items():
                assert_array_equal(found[name], leaf, err_msg=name)


def test_an_absent_client_keeps_its_model_and_share() -> None:
    """With a cohort of one, the other two stay as they were."""
    sim = q3("apfl", GD, participation=1, rounds=1, options={"mixing": "step"})
    assert sorted(_kept(sim)[0] != 0.0)[:2] == [False, False]
    many = q3("apfl", GD, participation=1, rounds=4, start=1.0)
    assert len(set(_kept(many)[1])) > 1


def test_a_start_per_client() -> None:
    """α_i⁰ may differ from client to client."""
    sim = q3("apfl", GD, options=FIXED, hyper={"share_start": [0.0, 0.5, 1.0]}, rounds=3)
    assert _kept(sim)[1].tolist() == [0.0, 0.5, 1.0]
    assert used(sim)[0] == centre(sim)


def test_the_ledger() -> None:
    """Two gradients a step; one batch more a round for α, or a third gradient in every step."""
    plain = _net("fedavg", participation="all").ledger().gradient_evaluations
    counted = {
        mixing: _net("apfl", SGD, {"mixing": mixing}, participation="all")
        .ledger()
        .gradient_evaluations
        for mixing in ("fixed", "round", "step")
    }
    assert_array_equal(counted["fixed"], 2 * plain)
    assert_array_equal(counted["step"], 3 * plain)
    firsts = int(np.minimum(federation().train.sizes.numpy(), 3).sum())
    assert_array_equal(counted["round"], 2 * plain + firsts)


def test_what_is_private_and_the_defaults() -> None:
    """V and α stay at home; α starts at one half; a fixed share has no rate to set."""
    method = build("apfl", net_task(), SGD, {})
    assert method.wire.private("personal")
    assert method.wire.private("mix")
    assert METHODS["apfl"].hyper["share_start"].default == 0.5
    assert METHODS["apfl"].hyper["share_decay"].default == 0.0
    assert "share_lr" not in build("apfl", net_task(), SGD, FIXED).hyper
