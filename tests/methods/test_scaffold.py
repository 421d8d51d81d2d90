"""SCAFFOLD: FedAvg with control variates against client drift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.methods import build
from tests.toys import centre, federation, net_task, q3, run, simulation, states

GD = Local(steps=1, batch=None, lr=0.1)
SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
TWO = {"curvatures": [1.0, 1.0], "centres": [0.0, 2.0], "start": 5.0}
UNEQUAL = {"curvatures": [1.0, 4.0], "centres": [0.0, 2.0], "start": 5.0}


def _controls(sim) -> np.ndarray:
    """Return c_1 … c_m and c of a run on quadratics."""
    own = sim.store.gather(sim.context.everybody)["control"]["w"][0, :, 0].numpy()
    return np.append(own, float(sim.server["control"]["w"][0, 0]))


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_the_worked_numbers(control: str) -> None:
    """From x = 5 with x²/2 and (x − 2)²/2, one step: x = 4.6, c_i = (5, 3), c = 4; then 4.24."""
    first = q3("scaffold", GD, options={"control": control}, **TWO)
    assert centre(first) == pytest.approx(4.6, abs=1e-12)
    assert_allclose(_controls(first), [5.0, 3.0, 4.0], atol=1e-12)
    second = q3("scaffold", GD, options={"control": control}, rounds=2, **TWO)
    assert centre(second) == pytest.approx(4.24, abs=1e-12)


def test_both_local_models_agree_in_the_second_round() -> None:
    """With exact controls y_1 = y_2 = 4.24: the drift is gone."""
    seen = []
    sim = q3("scaffold", GD, rounds=1, engine="sequential", **TWO)
    method = sim.method

    def finish(client, work, ctx):
        seen.append(float(work["params"]["w"][0]))
        return method.finish(client, work, ctx)

    sim.context.method = changed(method, finish=finish)
    sim.rounds.train(sim.server, sim.store, 1)
    assert_allclose(seen, [4.24, 4.24], atol=1e-12)


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_it_ends_at_the_optimum_where_fedavg_drifts_off(control: str) -> None:
    """x²/2 and 2(x − 2)² with K = 5: SCAFFOLD tends to 1.6, FedAvg to 1.385005."""
    local = replace(GD, steps=5)
    ours = q3("scaffold", local, options={"control": control}, rounds=40, **UNEQUAL)
    assert centre(ours) == pytest.approx(1.6, abs=1e-6)
    plain = q3("fedavg", local, options={"rule": "uniform"}, rounds=40, **UNEQUAL)
    assert centre(plain) == pytest.approx(1.385005, abs=1e-6)


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_momentum_and_decay_keep_the_optimum(control: str) -> None:
    """With both, x tends to the minimum of the decayed objective: 8/(5 + 2·0.5)."""
    for keep in (False, True):
        local = Local(
            steps=5, batch=None, lr=0.06, momentum=0.4, weight_decay=0.5, keep_optimiser=keep
        )
        sim = q3("scaffold", local, options={"control": control}, rounds=60, **UNEQUAL)
        assert centre(sim) == pytest.approx(8.0 / 6.0, abs=1e-5)
        assert abs(_controls(sim)[-1]) < 1e-4


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_a_control_is_the_mean_gradient_of_the_local_steps(local: Local) -> None:
    """Option II of plain SGD, and what it stands for with momentum: mean_k ∇f_i(y_k; ξ_k)."""
    task = net_task()
    method = build("scaffold", task, local, {})
    (train,) = method.phases
    seen: list[tuple[int, dict]] = []

    def step(work, batch, ctx):
        def loss(params):
            decay = 0.5 * local.weight_decay * sum(p.square().sum() for p in params.values())
            return task.loss(params, batch) + decay

        seen.append((int(ctx.index), torch.func.grad(loss)(work["params"])))
        return train.step(work, batch, ctx)

    watched = changed(method, phases=(replace(train, step=step),))
    sim = simulation(watched, task, [federation()], engine="sequential", rounds=3)
    taking_part = 0
    for _ in range(3):
        seen.clear()
        sim.step()
        kept = sim.store.gather(sim.context.everybody)["control"]
        for i in {i for i, _ in seen}:
            for leaf in task.leaf_names:
                mean = torch.stack([g[leaf] for j, g in seen if i == j]).mean(0)
                assert_allclose(kept[leaf][0, i], mean, atol=1e-12)
            taking_part += 1
    assert taking_part > 6


@pytest.mark.parametrize("control", ["steps", "gradient"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_with_everybody_the_servers_control_is_the_mean(control: str, weights: str) -> None:
    """C = Σ p_i c_i after every round of full participation."""
    options = {"control": control, "weights": weights}
    sim = _net("scaffold", SGD, options, participation="all")
    sizes = sim.context.sizes[0].double()
    p = sizes / sizes.sum() if weights == "samples" else torch.ones(5).double() / 5
    for name, leaf in sim.store.gather(sim.context.everybody)["control"].items():
        mean = torch.einsum("i,i...->...", p, leaf[0])
        assert_allclose(sim.server["control"][name][0], mean, atol=1e-14)
        assert float(mean.abs().max()) > 1e-3


def test_the_change_of_control_is_divided_by_all_clients() -> None:
    """One of three clients reports: c moves by a third of its change; the others keep theirs."""
    sim = q3("scaffold", GD, participation=1)
    own, c = _controls(sim)[:3], _controls(sim)[3]
    assert sorted(own != 0.0)[:2] == [False, False]
    assert c == pytest.approx(own.sum() / 3, abs=1e-15)
    assert c != 0.0


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
def test_the_first_round_is_fedavgs_to_the_bit(local: Local) -> None:
    """Controls start at zero."""
    for ours, theirs in (("uniform", "uniform"), ("samples", "normalized")):
        wanted = _net("fedavg", local, {"rule": theirs}, rounds=1)
        found = _net("scaffold", local, {"weights": ours}, rounds=1)
        for name, leaf in wanted.server["params"].items():
            assert torch.equal(found.server["params"][name], leaf)


def test_equal_clients_are_fedavg() -> None:
    """With one objective for all, c_i = c and every round is FedAvg's."""
    local, same = replace(GD, steps=3), {"curvatures": [2.0] * 3, "centres": [3.0] * 3}
    for t in (1, 4):
        ours = q3("scaffold", local, rounds=t, **same)
        plain = q3("fedavg", local, options={"rule": "uniform"}, rounds=t, **same)
        assert centre(ours) == pytest.approx(centre(plain), abs=1e-12)
        assert_allclose(_controls(ours), _controls(ours)[0], atol=1e-12)


def test_the_servers_step() -> None:
    """The server takes x + η_g mean(y − x), not η_g mean(y); η_g = 0 leaves x where it is."""
    for rate, wanted in ((0.0, 5.0), (0.5, 4.8), (2.0, 4.2)):
        sim = q3("scaffold", GD, hyper={"server_lr": rate}, **TWO)
        assert centre(sim) == pytest.approx(wanted, abs=1e-12)


def test_controls_survive_the_rounds() -> None:
    """C_i is stored (a copy that forgets it would be zero in every round)."""
    local = replace(GD, steps=5)
    one, two = (q3("scaffold", local, rounds=t, **UNEQUAL) for t in (1, 2))
    c, own, x = _controls(one)[2], _controls(one)[:2], centre(one)
    for i, (a, b) in enumerate(((1.0, 0.0), (4.0, 2.0))):
        y = x
        for _ in range(5):
            y -= 0.1 * (a * (y - b) - own[i] + c)
        assert _controls(two)[i] == pytest.approx(own[i] - c + (x - y) / 0.5, abs=1e-12)


def test_the_ledger() -> None:
    """Twice FedAvg's bytes both ways; FedAvg's gradients, and one more pass for option I."""
    plain = _net("fedavg", participation="all").ledger()
    ours = _net("scaffold", participation="all").ledger()
    full = _net("scaffold", SGD, {"control": "gradient"}, participation="all").ledger()
    for series in (ours, full):
        assert_array_equal(series.bytes_up, 2 * plain.bytes_up)
        assert_array_equal(series.bytes_down, 2 * plain.bytes_down)
    assert_array_equal(ours.gradient_evaluations, plain.gradient_evaluations)
    assert_array_equal(2 * full.gradient_evaluations, 3 * plain.gradient_evaluations)


def test_a_control_by_gradient_is_that_of_all_samples() -> None:
    """Option I: ∇f_i(x) at the received model, whatever the batches; padding does not count."""
    task = net_task()
    fed = federation(sizes=(70, 3))
    local = Local(steps=2, batch=3, lr=0.2)
    sim = simulation(
        build("scaffold", task, local, {"control": "gradient"}),
        task,
        [fed],
        participation="all",
        rounds=1,
    )
    start = {k: v[0].clone() for k, v in sim.server["params"].items()}
    run(sim)
    for i in range(2):
        rows = fed.train.of(i)
        x, y = fed.x[rows], fed.y[rows]
        slope = torch.func.grad(
            lambda p, x=x, y=y: torch.nn.functional.cross_entropy(task.logits(p, x), y)
        )(start)
        for name, leaf in slope.items():
            kept = sim.store.gather(sim.context.everybody)["control"][name][0, i]
            assert_allclose(kept, leaf, atol=1e-14)


def test_a_control_by_gradient_is_exact_for_several_batches() -> None:
    """150 samples are batches of 64, 64 and 22: their shares are those of double precision."""
    settings = {"options": {"control": "gradient"}, "samples": 150, "start": 5.0}
    sim = q3("scaffold", GD, curvatures=[1.0, 4.0], centres=[0.0, 2.0], **settings)
    assert_allclose(_controls(sim), [5.0, 12.0, 8.5], rtol=1e-14)


def test_the_own_control_never_leaves_and_a_zero_rate_is_refused() -> None:
    """Only its change is sent; a rate of 0 cannot be divided by."""
    method = build("scaffold", net_task(), SGD, {})
    assert method.wire.private("control")
    assert method.use.headline == "pre"
    with pytest.raises(ConfigError, match="local_lr must be > 0"):
        _net("scaffold", hyper={"local_lr": 0.0})
    still = states(_net("scaffold", SGD, {"control": "gradient"}, hyper={"local_lr": 0.0}))
    assert np.isfinite(still["server/control/fc.bias"]).all()
