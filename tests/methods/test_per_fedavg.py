"""Per-FedAvg: a start from which one step gives a good model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, Site
from sartor.methods import build
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
MODES = ["first_order", "hessian_free", "exact"]


def _net(name: str, options: dict | None = None, local: Local = SGD, fed=None, **settings):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [fed or federation()], **settings))


def _one(mode: str, **settings):
    return q3("per-fedavg", GD, options={"mode": mode}, **settings)


@pytest.mark.parametrize("rule", ["uniform", "normalized"])
@pytest.mark.parametrize("mode", MODES)
def test_no_inner_step_is_fedavg_to_the_bit(mode: str, rule: str) -> None:
    """α = 0: FedAvg with step β, on the batches that FedAvg sees; bytes too."""
    hyper = {"personal_lr": 0.0, "relax": 1.5}
    found = outcome(_net("per-fedavg", {"mode": mode, "rule": rule}, hyper=hyper, rounds=4))
    wanted = outcome(_net("fedavg", {"rule": rule}, hyper={"relax": 1.5}, rounds=4))
    for name in wanted:
        if name.startswith(("server/", "client/", "pre/", "post/", "bytes_")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize(
    ("mode", "wanted"), [(MODES[0], 0.48), (MODES[1], 0.384), (MODES[2], 0.384)]
)
def test_one_meta_step_has_the_known_number(mode: str, wanted: float) -> None:
    """A = 2, c = 3, w = 0, α = β = 0.1: w̃ = 0.6, first order 0.48, with the Hessian 0.384."""
    sim = _one(mode, curvatures=[2.0], centres=[3.0])
    assert centre(sim) == pytest.approx(wanted, abs=1e-7)
    # The step is taken from w: from w̃ it would have given 0.6 + 0.48.


@pytest.mark.parametrize(
    ("mode", "wanted"), [(MODES[0], 3.918367), (MODES[1], 3.535411), (MODES[2], 3.535411)]
)
def test_the_fixed_point_on_the_three_quadratics(mode: str, wanted: float) -> None:
    """The weights are a(1 − αa) in first order and a(1 − αa)² with the Hessian, at α = 0.1."""
    found = centre(_one(mode, rounds=250, hyper={"personal_lr": 0.1}))
    assert found == pytest.approx(wanted, abs=1e-6)
    weight = A * (1 - 0.1 * A) ** (1 if mode == "first_order" else 2)
    assert found == pytest.approx((weight * C).sum() / weight.sum(), abs=1e-6)


@pytest.mark.parametrize("delta", [1e-3, 0.1, 10.0])
def test_a_central_difference_is_exact_on_quadratics(delta: float) -> None:
    """Hessian-free equals exact for every δ; first order differs by the factor 1 − αa."""
    hyper = {"personal_lr": 0.15}
    free = centre(_one("hessian_free", rounds=3, hyper={**hyper, "difference": delta}, start=1.0))
    exact = centre(_one("exact", rounds=3, hyper=hyper, start=1.0))
    assert free == pytest.approx(exact, rel=1e-10)
    first = [
        1.0 - centre(_one(mode, curvatures=[2.0], centres=[3.0], start=1.0, hyper=hyper))
        for mode in ("exact", "first_order")
    ]
    assert first[0] / first[1] == pytest.approx(1 - 0.15 * 2.0, rel=1e-6)


def test_the_exact_step_is_the_gradient_of_the_meta_objective() -> None:
    """With full batches the step is −β∇F_i, F_i(w) = f_i(w − α∇f_i(w)), derived from F_i itself."""
    task, fed, alpha = net_task(), federation(sizes=(6,)), 0.3
    local = Local(steps=1, batch=None, lr=1.0)
    start = {k: v.double() for k, v in task.init(0).items()}
    x, y = (t[torch.as_tensor(fed.train.of(0))] for t in (fed.x, fed.y))

    def loss(params):
        return torch.nn.functional.cross_entropy(task.logits(params, x), y)

    def meta(params):
        slope = torch.func.grad(loss)(params)
        return loss({k: v - alpha * slope[k] for k, v in params.items()})

    wanted = torch.func.grad(meta)(start)
    for mode, atol in (("exact", 1e-12), ("hessian_free", 1e-6)):
        method = build("per-fedavg", task, local, {"mode": mode})
        hyper = {"personal_lr": alpha}
        sim = run(simulation(method, task, [fed], hyper=hyper, rounds=1, participation="all"))
        for name, slope in wanted.items():
            moved = start[name] - sim.server["params"][name][0]
            np.testing.assert_allclose(moved, slope, atol=atol, err_msg=f"{mode} {name}")


def test_the_difference_is_taken_around_the_start_and_not_around_the_trial_point() -> None:
    """On a quartic-like loss the Hessian at w and at w̃ differ, and the free mode takes w's."""
    fine = {"difference": 1e-4, "personal_lr": 0.5}
    free = states(_net("per-fedavg", {"mode": "hessian_free"}, hyper=fine))
    exact = states(_net("per-fedavg", {"mode": "exact"}, hyper={"personal_lr": 0.5}))
    for name, leaf in exact.items():
        np.testing.assert_allclose(free[name], leaf, atol=1e-6, err_msg=name)


def test_the_perfect_inner_step_leaves_no_meta_gradient() -> None:
    """α = 1/a for all: w stays where it is, and one step personalises to c."""
    for mode in MODES:
        sim = _one(
            mode,
            curvatures=[2.0] * 3,
            centres=[-1.0, 3.0, 7.0],
            start=5.0,
            rounds=4,
            hyper={"personal_lr": 0.5},
        )
        assert centre(sim) == pytest.approx(5.0, abs=1e-12)
        np.testing.assert_allclose(used(sim), [-1, 3, 7], atol=1e-12)


# ---- personalisation -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_personalisation_is_plain_steps_with_the_inner_rate(steps: int) -> None:
    """θ_i = c + (1 − αa)^k (w − c)."""
    sim = q3(
        "per-fedavg", GD, options={"personal_steps": steps}, hyper={"personal_lr": 0.07}, rounds=3
    )
    wanted = C + (1 - 0.07 * A) ** steps * (centre(sim) - C)
    np.testing.assert_allclose(used(sim), wanted, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_preset_of_shi_takes_a_step_with_each_rate(steps: int) -> None:
    """One step with β, then α steps: (1 − βa)(1 − αa)^k."""
    options = {"preset": "prior", "personal_steps": steps}
    sim = q3("per-fedavg", GD, options=options, hyper={"personal_lr": 0.03}, rounds=3)
    wanted = C + (1 - 0.1 * A) * (1 - 0.03 * A) ** steps * (centre(sim) - C)
    np.testing.assert_allclose(used(sim), wanted, atol=1e-7)
    assert centre(sim) == centre(q3("per-fedavg", GD, hyper={"personal_lr": 0.03}, rounds=3))


def test_personalisation_leaves_training_alone() -> None:
    """However a copy is personalised or scored, w is the same to the bit."""
    wanted = states(_net("per-fedavg"))
    for options in ({"personal_steps": 5}, {"preset": "prior"}):
        for name, leaf in states(_net("per-fedavg", options)).items():
            np.testing.assert_array_equal(leaf, wanted[name])
    for name, leaf in states(_net("per-fedavg", eval_every=3)).items():
        np.testing.assert_array_equal(leaf, wanted[name])


def test_personalisation_never_sees_test_data() -> None:
    """A client with poisoned test labels and features uses the same model, to the bit."""
    fed = federation()
    rows = torch.as_tensor(np.concatenate([fed.test.of(i) for i in range(5)]))
    poisoned = replace(
        fed, x=fed.x.index_fill(0, rows, 100.0), y=fed.y.index_copy(0, rows, (fed.y[rows] + 1) % 3)
    )
    for options in ({"preset": "prior", "personal_steps": 2}, {"mode": "hessian_free"}):
        clean, dirty = (_net("per-fedavg", options, fed=f) for f in (fed, poisoned))
        for i in range(5):
            for name, leaf in clean.params(i).items():
                assert torch.equal(dirty.params(i)[name], leaf)
        assert np.abs(outcome(clean)["pre/test/loss"] - outcome(dirty)["pre/test/loss"]).min() > 0


# ---- batches, cost, server -----------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "draws"), [(MODES[0], 2), (MODES[1], 3), (MODES[2], 3)])
def test_the_batches_of_a_step_are_independent_draws(mode: str, draws: int) -> None:
    """Each draw passes through all samples once an epoch, in an order of its own."""
    task = net_task()
    method = build("per-fedavg", task, SGD, {"mode": mode})
    (phase,) = method.phases
    assert phase.draws == draws
    seen: list[list[list[int]]] = []

    def step(work, batches, site):
        seen.append([b.rows[b.mask].tolist() for b in batches])
        return phase.step(work, batches, site)

    watched = replace(method, phases=(replace(phase, step=step),))
    fed = federation(sizes=(9,))
    run(simulation(watched, task, [fed], rounds=1, participation="all", engine="sequential"))
    assert len(seen) == 6
    orders = [[row for batches in seen[:3] for row in batches[d]] for d in range(draws)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert len({tuple(order) for order in orders}) == draws


@pytest.mark.parametrize("mode", MODES)
def test_each_batch_has_its_own_role(mode: str) -> None:
    """D gives the inner gradient, D' the outer one, D'' the Hessian; D' is the first draw."""
    method = build("per-fedavg", quadratic_task(), GD, {"mode": mode})
    one = torch.ones(1, dtype=torch.float64)

    def batch(a: float, c: float) -> Batch:
        return Batch(torch.tensor([[a, c]]).double(), one.long(), one.bool(), None, None)

    hyper = {"local_lr": 0.1, "personal_lr": 0.2, "difference": 1e-3}
    blank = Site(**dict.fromkeys(Site._fields))
    site = blank._replace(hyper={k: v * one[0] for k, v in hyper.items()})
    batches = (batch(2.0, 3.0), batch(1.0, -1.0), batch(5.0, 7.0))
    moved = method.phases[0].step({"params": {"w": one}}, batches, site)["params"]["w"]
    tried = 1.0 - 0.2 * 1.0 * (1.0 + 1.0)
    slope = 2.0 * (tried - 3.0)
    bent = 0.0 if mode == "first_order" else 0.2 * 5.0 * slope
    assert float(moved) == pytest.approx(1.0 - 0.1 * (slope - bent), abs=1e-10)


@pytest.mark.parametrize(("mode", "cost"), [(MODES[0], 2), (MODES[1], 4), (MODES[2], 3)])
def test_the_cost_of_a_step(mode: str, cost: int) -> None:
    """First order 2 gradients, Hessian-free 4, exact 2 and one Hessian-vector product."""
    fed = federation()
    ledger = _net("per-fedavg", {"mode": mode}, participation="all").ledger()
    assert ledger.gradient_evaluations.tolist() == [[cost * 2 * int(fed.train.sizes.sum())] * 3]
    assert ledger.forward_evaluations.sum() == 0


def test_a_client_smaller_than_a_batch_trains() -> None:
    """Two samples and batches of 40: the client moves (others drop such clients in silence)."""
    for mode in MODES:
        sim = _net(
            "per-fedavg",
            {"mode": mode},
            Local(steps=1, batch=40, lr=0.2, drop_last=True),
            federation(sizes=(2,)),
            rounds=1,
            participation="all",
        )
        start = sim.task.init(0)["fc.weight"].double()
        assert (sim.server["params"]["fc.weight"][0] - start).abs().max() > 1e-3


def test_clients_count_evenly_unless_asked() -> None:
    """The mean over the cohort is uniform; `normalized` weighs by samples; β_AM over-relaxes."""
    sizes, hyper = [1, 2, 5], {"personal_lr": 0.1}
    moved = 0.1 * A * (1 - 0.1 * A) * C  # first-order models after a step from 0
    even = q3("per-fedavg", GD, samples=sizes, hyper=hyper)
    assert centre(even) == pytest.approx(moved.mean(), abs=1e-7)
    sized = q3("per-fedavg", GD, options={"rule": "normalized"}, samples=sizes, hyper=hyper)
    assert centre(sized) == pytest.approx(moved @ np.array(sizes) / 8, abs=1e-7)
    twice = q3("per-fedavg", GD, samples=sizes, hyper={**hyper, "relax": 2.0})
    assert centre(twice) == pytest.approx(2 * moved.mean(), abs=1e-7)


@pytest.mark.parametrize(
    ("local", "options", "words"),
    [
        (replace(SGD, momentum=0.9), {}, "momentum=0.9"),
        (replace(SGD, weight_decay=0.1), {}, "weight_decay=0.1"),
        (SGD, {"personal_steps": 0}, "personal_steps must be >= 1, got 0"),
    ],
)
def test_faults_are_named(local: Local, options: dict, words: str) -> None:
    """What has no meaning here is refused, not ignored."""
    with pytest.raises(ConfigError, match=words):
        build("per-fedavg", net_task(), local, options)


def test_only_the_free_mode_has_a_difference_to_set() -> None:
    """A δ that would be ignored is not offered."""
    offered = [
        "difference" in build("per-fedavg", net_task(), SGD, {"mode": m}).hyper for m in MODES
    ]
    assert offered == [False, True, False]
