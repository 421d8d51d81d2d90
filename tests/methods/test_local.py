"""LocalTrain: everybody alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sartor.core.local import Local
from sartor.data.synthetic import quadratics
from sartor.methods import build
from tests.toys import (
    federation,
    net_task,
    outcome,
    personal,
    q3,
    quadratic_task,
    run,
    simulation,
    states,
)

SGD = Local(epochs=2, batch=3, lr=0.1)


def test_gradient_descent_on_a_quadratic_has_a_closed_form() -> None:
    """After K steps w = c + (1 − ηa)^K (w_0 − c): with a=2, c=3, η=0.1, K=5 that is 2.01696."""
    sim = q3("local", Local(steps=5, batch=None, lr=0.1), curvatures=[2.0], centres=[3.0])
    assert personal(sim)[0] == pytest.approx(2.01696, abs=1e-12)
    moved = q3("local", Local(steps=3, batch=None, lr=0.2), rounds=2, start=1.0)
    for a, c, w in zip((1, 2, 4), (0, 3, 6), personal(moved), strict=True):
        assert w == pytest.approx(c + (1 - 0.2 * a) ** 6 * (1 - c), abs=1e-6)


def test_nothing_travels() -> None:
    """Bytes are exactly zero, up and down."""
    task = net_task()
    ledger = run(simulation(build("local", task, SGD, {}), task, [federation()])).ledger()
    assert ledger.bytes_up.sum() == ledger.bytes_down.sum() == ledger.setup_bytes.sum() == 0


def test_a_client_does_not_notice_the_others_data() -> None:
    """Other data on the other clients leave a client's model as it is, to the bit."""
    task, fed = net_task(), federation()
    method = build("local", task, SGD, {})
    mine = torch.cat([fed.split(s).of(1) for s in ("train", "val", "test")])
    x = torch.randn_like(fed.x)
    x[mine] = fed.x[mine]
    first = run(simulation(method, task, [fed], participation="all"))
    second = run(simulation(method, task, [replace(fed, x=x)], participation="all"))
    for name, leaf in states(first).items():
        np.testing.assert_array_equal(states(second)[name][:, 1], leaf[:, 1], err_msg=name)
        assert not np.array_equal(states(second)[name][:, 0], leaf[:, 0])


def test_all_train_by_default_and_the_sampled_on_request() -> None:
    """There is no server that could sample; the option gives each client its share of work."""
    task = net_task()
    settings = {"participation": 2, "rounds": 4}
    everybody = run(simulation(build("local", task, SGD, {}), task, [federation()], **settings))
    assert everybody.ledger().participants.tolist() == [[5] * 4]
    option = {"participation": "sampled"}
    sampled = run(simulation(build("local", task, SGD, option), task, [federation()], **settings))
    assert sampled.ledger().participants.tolist() == [[2] * 4]


def test_before_the_next_round_is_after_the_last() -> None:
    """With nothing in between, pre[t + 1] equals post[t]."""
    task = net_task()
    sim = run(simulation(build("local", task, SGD, {}), task, [federation()], rounds=4))
    for split in ("test", "val"):
        pre, post = (sim.scores()[point, split] for point in ("pre", "post"))
        assert (pre.rounds, post.rounds) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])
        np.testing.assert_array_equal(pre.loss[:, 1:], post.loss)
        np.testing.assert_array_equal(pre.correct[:, 1:], post.correct)
        assert np.abs(np.diff(pre.loss, axis=1)).min() > 0


def test_an_optimiser_that_is_kept_does_not_notice_rounds() -> None:
    """Three rounds of two steps are six steps; an optimiser that restarts is another path."""
    heavy = Local(steps=2, batch=None, lr=0.05, momentum=0.9, keep_optimiser=True)
    straight = personal(q3("local", replace(heavy, steps=6)))
    np.testing.assert_allclose(personal(q3("local", heavy, rounds=3)), straight, rtol=0, atol=1e-12)
    restart = personal(q3("local", replace(heavy, keep_optimiser=False), rounds=3))
    assert np.abs(restart - straight).max() > 1e-2


def test_momentum_and_decay_are_those_of_the_formula() -> None:
    """V ← m v + g + d w, w ← w − η v, by hand on the three quadratics."""
    local = Local(steps=4, batch=None, lr=0.1, momentum=0.8, weight_decay=0.3)
    found = personal(q3("local", local, start=1.0))
    for a, c, w in zip((1, 2, 4), (0, 3, 6), found, strict=True):
        mine, velocity = 1.0, 0.0
        for _ in range(4):
            velocity = 0.8 * velocity + a * (mine - c) + 0.3 * mine
            mine -= 0.1 * velocity
        assert w == pytest.approx(mine, abs=1e-6)


def test_mean_estimation_has_error_d_over_n() -> None:
    """w_i is the mean of n unit-variance samples: E‖w_i − w_i*‖² = d/n."""
    d, n, clients = 3, 4, 300
    rng = np.random.default_rng(0)
    centres = np.repeat(rng.normal(size=(clients, d)), n, axis=0) + rng.normal(
        size=(clients * n, d)
    )
    fed, _ = quadratics(np.ones_like(centres), centres)
    truth = np.random.default_rng(0).normal(size=(clients, d))
    lists = type(fed.train).from_lists(np.arange(clients * n).reshape(clients, n))
    some = type(fed.train).from_lists([[clients * n + k] for k in range(clients)])
    names = tuple(map(str, range(clients)))
    fed = replace(fed, train=lists, test=some, val=type(fed.train).empty(clients), names=names)
    task = quadratic_task(d)
    method = build("local", task, Local(steps=1, batch=None, lr=1.0), {})
    sim = run(simulation(method, task, [fed], rounds=1))
    w = outcome(sim)["client/params/w"][0]
    np.testing.assert_allclose(w, centres.reshape(clients, n, d).mean(1), atol=1e-12)
    assert np.square(w - truth).sum(1).mean() == pytest.approx(d / n, rel=0.15)
