"""FedAPA: the step on the mixing matrix, its sign, its presets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core import mixing, tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ServerContext, changed
from sartor.core.task import Task, never
from sartor.core.task import given as loss_given
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from tests.toys import (
    assert_same,
    differ,
    federation,
    net_task,
    outcome,
    quadratic_task,
    run,
    simulation,
    states,
    two_allocations,
)

SGD = Local(epochs=2, batch=3, lr=0.2, momentum=0.5)
THETA = np.array([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]])  # rows are the clients' extractors
NEW = np.array([0.9, 0.3])
RAW = {"clip_weights": False, "pin_weights": False, "normalise_weights": False}


def _step(
    theta: Any = THETA, row: Any = (1.0, 0.0, 0.0), new: Any = NEW, mix_lr: float = 0.5, **kind: Any
) -> np.ndarray:
    """Take client 0's step on its row of A, and return the row it is served with next."""
    hyper = {"self_weight": kind.pop("self_weight", 0.5), "mix_momentum": 0.0, "mix_lr": mix_lr}
    theta = torch.as_tensor(np.asarray(theta), dtype=torch.float64)
    method = build("fedapa", quadratic_task(theta.shape[1]), Local(), kind)
    mix = torch.eye(len(theta), dtype=torch.float64)
    mix[0] = torch.as_tensor(np.asarray(row))
    server = {"bodies": {"w": theta}, "mix": mix, "velocity": torch.zeros_like(mix)}
    ctx = ServerContext(
        hyper={k: torch.tensor(v, dtype=torch.float64) for k, v in hyper.items()},
        key=None,
        round=None,
        sizes=torch.ones(len(theta), dtype=torch.int64),
        cohort=torch.tensor([0]),
        present=torch.tensor([True]),
    )
    upload = {"body": {"w": torch.as_tensor(np.asarray(new), dtype=torch.float64)[None]}}
    after = method.aggregate(server, upload, ctx)
    assert torch.equal(after["bodies"]["w"][1:], theta[1:])
    assert torch.equal(after["bodies"]["w"][0], upload["body"]["w"][0])
    assert method.show.server is not None
    found: np.ndarray = method.show.server(after, ctx)["mix"][0].numpy()
    return found


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {"mix_lr": 0.01, "self_weight": 0.5}),
        ({"preset": "authors_code"}, {"mix_lr": 0.01, "self_weight": 1.0, "mix_momentum": 0.9}),
        ({"pin_weights": False}, {"mix_lr": 0.01}),
        ({"server_momentum": True}, {"mix_lr": 0.01, "self_weight": 0.5, "mix_momentum": 0.9}),
    ],
)
def test_what_can_be_set_is_what_is_used(options: dict, wanted: dict[str, float]) -> None:
    """Each has the value of its preset, none is negative, and all are the server's."""
    hyper = build("fedapa", net_task(), SGD, options).hyper
    own = {k: h for k, h in hyper.items() if k not in SGD.hyper}
    assert {k: h.default for k, h in own.items()} == wanted
    assert {h.low for h in own.values()} == {0.0}
    assert all(h.server for h in own.values())
    assert {k: h.high for k, h in own.items() if k != "mix_lr"} == dict.fromkeys(
        wanted.keys() - {"mix_lr"}, 1.0
    )


def test_the_head_is_private_and_so_is_nothing_else() -> None:
    """Leaves of the head never leave; with share="all" there is nothing to keep."""
    task = net_task()
    leaves = (*task.leaf_names, "velocity")
    kept = build("fedapa", task, SGD, {}).wire.private
    assert [leaf for leaf in leaves if kept(leaf)] == ["fc.weight", "fc.bias"]
    assert not any(map(build("fedapa", task, SGD, {"share": "all"}).wire.private, leaves))


PRINTED = {"weight_step": "as_printed"}


EXAMPLES = [
    (RAW, (0.95, 0.05, 0.05)),
    ({}, (0.8333, 0.0833, 0.0833)),
    ({"self_weight": 1.0}, (0.9091, 0.0455, 0.0455)),
    ({"self_weight": 0.0}, (0, 0.5, 0.5)),
    ({"self_weight": 0.3}, (0.75, 0.125, 0.125)),
    ({"self_weight": 0.7}, (0.875, 0.0625, 0.0625)),
    ({"pin_weights": False}, (0.9048, 0.0476, 0.0476)),
    ({**RAW, **PRINTED}, (1.05, -0.05, -0.05)),
    (PRINTED, (1, 0, 0)),
    ({"self_weight": 0.0, **PRINTED}, (1, 0, 0)),  # a row of zeros is the client alone
    ({"clip_weights": False, **PRINTED}, (1.25, -0.125, -0.125)),
]


@pytest.mark.parametrize(("kind", "wanted"), EXAMPLES)
@pytest.mark.parametrize("lazy", [False, True])
def test_the_worked_example_in_every_variant(kind: dict, wanted: tuple, lazy: bool) -> None:
    """Δ = (−0.1, 0.3), ΘᵀΔ = (−0.1, 0.1, 0.1), η = 0.5, in every variant, eager or lazy."""
    np.testing.assert_allclose(_step(**kind, server_momentum=lazy), wanted, atol=5e-5)


def test_the_worked_example_without_normalising() -> None:
    """The pinned row stays (0.5, 0.05, 0.05); eager only: a lazy row is pinned before its use."""
    np.testing.assert_allclose(_step(normalise_weights=False), (0.5, 0.05, 0.05), atol=5e-5)


def _proxy(row: np.ndarray, theta: np.ndarray, new: np.ndarray) -> float:
    return 0.5 * float(np.square(new - np.asarray(row) @ theta).sum())


def test_the_proxy_of_the_worked_example() -> None:
    """½‖Δ‖² = 0.05 falls to 0.03725 by descent and rises to 0.06725 as printed; η < 0.7307."""
    assert _proxy(np.array([1.0, 0, 0]), THETA, NEW) == pytest.approx(0.05)
    assert _proxy(_step(**RAW), THETA, NEW) == pytest.approx(0.03725)
    assert _proxy(_step(**RAW, **PRINTED), THETA, NEW) == pytest.approx(0.06725)
    assert 2 / np.linalg.eigvalsh(THETA.T @ THETA).max() == pytest.approx(0.7307, abs=5e-5)


@given(st.integers(0, 10_000), st.floats(0.01, 0.99), st.integers(2, 5))
def test_mix_step_lowers_the_proxy(seed: int, share: float, clients: int) -> None:
    """Descent lowers ½‖θ_i − θ̄_i‖² for every 0 < η < 2/λ_max(ΘΘᵀ); the printed sign raises it."""
    draw = np.random.default_rng(seed)
    theta, row, new = (
        draw.normal(size=(clients, 3)),
        draw.dirichlet(np.ones(clients)),
        draw.normal(size=3),
    )
    eta = share * 2 / np.linalg.eigvalsh(theta.T @ theta).max()
    before = _proxy(row, theta, new)
    down = _proxy(_step(theta, row, new, eta, **RAW), theta, new)
    up = _proxy(_step(theta, row, new, eta, **RAW, **PRINTED), theta, new)
    assert down < before < up


def test_the_slope_is_that_of_autograd() -> None:
    """Differentiating ½‖θ_i − ΣA_ij θ_j‖² by the row gives −ΘᵀΔ."""
    theta, new = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    row = torch.rand(4, dtype=torch.float64)

    def proxy(weights: torch.Tensor) -> torch.Tensor:
        return 0.5 * (new - mixing.combine(weights, {"w": theta})["w"]).square().sum()

    delta = new - mixing.combine(row, {"w": theta})["w"]
    slope = mixing.inner({"w": theta}, {"w": delta[None]})[0]
    torch.testing.assert_close(torch.func.grad(proxy)(row), -slope)
    torch.testing.assert_close(
        torch.from_numpy(_step(theta, row, new, 0.3, **RAW)), row + 0.3 * slope
    )


def test_a_row_without_gradient_settles_at_its_fixed_point() -> None:
    """S ← s/(μ + s): with μ = 0.5 the others keep 0.5; with μ = 1, 1/s grows by one at each use."""
    own, half = torch.tensor([0]), torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    for mu, uses, wanted in ((0.5, 60, 0.5), (0.3, 60, 0.7), (1.0, 7, 1 / 9)):
        rows = half
        for _ in range(uses):
            rows = mixing.normalise(
                mixing.pin_self(rows, own, torch.tensor(mu, dtype=torch.float64)), own
            )
        assert float(rows[0, 1:].sum()) == pytest.approx(wanted, abs=1e-9)


# ---- whole runs ----------------------------------------------------------------------------------


def _net(
    method: str = "fedapa", hyper: dict | None = None, local: Local = SGD, **options: Any
) -> Any:
    task = net_task()
    record = build(method, task, local, options)
    return run(simulation(record, task, two_allocations(), hyper=hyper or {}, rounds=4))


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_rows_stay_on_the_simplex(preset: str) -> None:
    """With all switches on, every row in use sums to 1 with entries in [0, 1], in every round."""
    sim = _net(hyper={"mix_lr": 0.7}, preset=preset)
    assert [snap["round"] for snap in sim.log.snapshots] == [0, 1, 2, 3, 4]
    for snap in sim.log.snapshots:
        assert snap["mix"].shape == (2, 5, 5)
        np.testing.assert_allclose(snap["mix"].sum(-1), 1.0, atol=1e-6)
        assert snap["mix"].min() >= 0
        assert snap["mix"].max() <= 1 + 1e-6
    assert np.abs(sim.log.snapshots[-1]["mix"] - np.eye(5)).max() > 0.1


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_one_client_is_plain_sgd(preset: str) -> None:
    """With M = 1 the mixture is the client's own extractor, to the bit."""
    task, feds = net_task(), [federation(sizes=(11,))]
    apa = simulation(build("fedapa", task, SGD, {"preset": preset}), task, feds)
    alone = simulation(build("local", task, SGD, {}), task, feds)
    found, wanted = outcome(run(apa)), outcome(run(alone))
    np.testing.assert_array_equal(found["post/test/loss"], wanted["post/test/loss"])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_no_step_on_the_weights_is_local_training(preset: str, keep: bool) -> None:
    """η = 0: A stays the identity, and every participant trains alone."""
    local = replace(SGD, keep_optimiser=keep)
    apa = _net(hyper={"mix_lr": 0.0}, preset=preset, local=local)
    alone = _net("local", participation="sampled", local=local)
    found, wanted = outcome(apa), outcome(alone)
    atol = 0.0 if preset == "paper" else 1e-12
    for name in ("post/test/loss", "pre/test/loss"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=atol)
    np.testing.assert_array_equal(apa.log.snapshots[-1]["mix"], np.eye(5)[None].repeat(2, 0))


def test_a_common_start_gives_equal_weights_to_the_others() -> None:
    """After round 1 of a parallel schedule, all off-diagonal entries of a row are equal."""
    task = net_task()
    sim = simulation(
        build("fedapa", task, SGD, {}),
        task,
        [federation()],
        hyper={"mix_lr": 0.3},
        participation="all",
    )
    sim.step()
    mix = sim.server["mix"][0].numpy()
    off = mix[~np.eye(5, dtype=bool)].reshape(5, 4)
    np.testing.assert_allclose(off, off[:, :1].repeat(4, 1), atol=1e-12)
    assert off.max() > 0.01


@pytest.mark.parametrize("schedule", ["parallel", "sequential"])
def test_settling_at_once_or_when_used_is_the_same_without_momentum(schedule: str) -> None:
    """Eager and lazy post-processing send the same mixtures, also to partial cohorts."""
    eager = outcome(_net(hyper={"mix_lr": 0.5}, schedule=schedule))
    lazy = outcome(
        _net(hyper={"mix_lr": 0.5, "mix_momentum": 0.0}, schedule=schedule, server_momentum=True)
    )
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(lazy[name], eager[name], rtol=0, atol=1e-11)
    moving = outcome(
        _net(hyper={"mix_lr": 0.5, "mix_momentum": 0.9}, schedule=schedule, server_momentum=True)
    )
    assert differ({"a": moving["pre/test/loss"]}, {"a": eager["pre/test/loss"]}, 1e-4)


def test_a_fixed_uniform_matrix_is_fedavg() -> None:
    """A = 1/M for ever, all leaves shared and everybody there: FedAvg with equal weights."""
    task, feds = net_task(), two_allocations()
    options = {"share": "all", "pin_weights": False, "normalise_weights": False}
    apa = build("fedapa", task, SGD, options)

    def init_server(params: Any, ctx: ServerContext) -> Any:
        server = apa.init_server(params, ctx)
        return {**server, "mix": torch.full_like(server["mix"], 0.2)}

    uniform = changed(apa, init_server=init_server)
    found = outcome(
        run(simulation(uniform, task, feds, hyper={"mix_lr": 0.0}, participation="all", rounds=4))
    )
    fedavg = build("fedavg", task, SGD, {"rule": "uniform"})
    wanted = outcome(run(simulation(fedavg, task, feds, participation="all", rounds=4)))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-11)


def test_only_the_extractor_travels() -> None:
    """Down |θ_f| and up |θ_f| per participant; the whole model if all is shared."""
    for share, leaves in (("body", 4 * 5 + 5), ("all", 4 * 5 + 5 + 5 * 3 + 3)):
        ledger = _net(share=share).ledger()
        assert (ledger.bytes_up == 8 * leaves * ledger.participants).all()
        assert (ledger.bytes_down == ledger.bytes_up).all()


@pytest.mark.parametrize("share", ["body", "all"])
def test_a_newcomer_receives_the_mean_of_all(share: str) -> None:
    """Every client's last upload has the same weight; the letter looks like any other."""
    task = net_task()
    method = build("fedapa", task, SGD, {"share": share})
    sim = run(simulation(method, task, [federation()], hyper={"mix_lr": 0.3}))
    assert method.newcomer.message is not None
    server = tree.map(lambda leaf: leaf[0], sim.server)
    message = method.newcomer.message(server, None)
    usual = method.address(server, torch.tensor(1), None)
    assert {k: v.shape for k, v in message.items()} == {k: v.shape for k, v in usual.items()}
    for name, leaf in message.items():
        table = server["bodies"][name].numpy()
        assert np.abs(table - table[:1]).max() > 1e-3
        np.testing.assert_allclose(leaf.numpy(), table.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_where_nobody_comes_nothing_moves(preset: str) -> None:
    """A round without uploads leaves matrix, momentum and table, to the bit."""
    task = net_task()
    method = build("fedapa", task, SGD, {"preset": preset})
    sim = run(simulation(method, task, [federation()], hyper={"mix_lr": 0.5}))
    server = tree.map(lambda leaf: leaf[0], sim.server)
    ctx = ServerContext(
        hyper={k: leaf[0] for k, leaf in sim.context.hyper.items()},
        key=None,
        round=None,
        sizes=torch.ones(5, dtype=torch.int64),
        cohort=torch.tensor([2]),
        present=torch.tensor([False]),
    )
    uploads = {"body": tree.map(lambda leaf: leaf[2:3] + 1.0, server["bodies"])}
    after = method.aggregate(server, uploads, ctx)
    assert after.keys() == server.keys()
    for (name, new), (_, old) in zip(tree.items(after), tree.items(server), strict=True):
        assert torch.equal(new, old), name


@pytest.mark.parametrize("clip_weights", [True, False])
def test_an_absent_client_keeps_its_row(clip_weights: bool) -> None:
    """Without server momentum only the rows of participants move, in A and in the table."""
    task = net_task()
    method = build("fedapa", task, SGD, {"clip_weights": clip_weights})
    sim = simulation(method, task, [federation()], hyper={"mix_lr": 0.5}, participation=2)
    moved = 0
    for _ in range(4):
        old = states(sim)
        sim.step()
        new = states(sim)
        mix, body = (
            (new[name] != old[name])[0].reshape(5, -1).any(1)
            for name in ("server/mix", "server/bodies/body.weight")
        )
        assert body.sum() == 2
        assert not (mix & ~body).any()
        moved += mix.sum()
    assert moved > 2


def test_a_network_without_a_body_is_refused() -> None:
    """It says what to do."""
    task = Task(torch.nn.Sequential(torch.nn.Linear(2, 2)), head="0")
    with pytest.raises(ConfigError, match="share='all'"):
        build("fedapa", task, Local(), {})


# ---- quadratics by hand --------------------------------------------------------------------------


def _quadratic(
    centres: np.ndarray, start: np.ndarray, local: Local, rounds: int, hyper: dict, **options: Any
):
    fed, _ = quadratics(np.ones_like(centres), centres)
    module = Quadratic(centres.shape[1]).double()
    with torch.no_grad():
        module.w.copy_(torch.from_numpy(start))
    task = Task(module, None, loss_given, never)
    method = build("fedapa", task, local, options)
    return run(simulation(method, task, [fed], hyper=hyper, rounds=rounds, participation="all"))


@pytest.mark.parametrize("sign", ["descent", "as_printed"])
@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_the_authors_code_is_a_plain_loop(sign: str, mu: float) -> None:
    """Clients in turn, one SGD with momentum over the whole matrix, rows settled when used."""
    draw = np.random.default_rng(3)
    centres, start = draw.normal(size=(4, 3)), draw.normal(size=3)
    theta, mix, velocity = np.tile(start, (4, 1)), np.eye(4), np.zeros((4, 4))
    eta, lr = 0.2, 0.3
    for _ in range(6):
        for i in range(4):
            mix[i, i] = mu
            mix[i] /= mix[i].sum()
            mixed = mix[i] @ theta
            new = mixed.copy()
            for _ in range(2):
                new -= lr * (new - centres[i])
            slope = np.zeros((4, 4))
            slope[i] = theta @ (mixed - new) * (1 if sign == "descent" else -1)
            velocity = 0.9 * velocity + slope
            mix = np.clip(mix - eta * velocity, 0, 1)
            theta[i] = new
    sim = _quadratic(
        centres,
        start,
        Local(steps=2, batch=None, lr=lr),
        6,
        {"mix_lr": eta, "self_weight": mu},
        preset="authors_code",
        weight_step=sign,
    )
    np.testing.assert_allclose(sim.server["bodies"]["w"][0], theta, rtol=0, atol=1e-6)
    np.testing.assert_allclose(sim.server["mix"][0], mix, rtol=0, atol=1e-6)
    np.testing.assert_allclose(sim.server["velocity"][0], -velocity, rtol=0, atol=1e-6)


def test_two_clusters_find_each_other_by_descent_only() -> None:
    """Descent ends with help from the own cluster only, the printed sign from the other one."""
    draw = np.random.default_rng(0)
    centres = np.repeat(np.eye(20)[:2], 3, axis=0) + 0.05 * draw.normal(size=(6, 20))
    start = 0.01 * draw.normal(size=20)
    found = {}
    for sign in ("descent", "as_printed"):
        sim = _quadratic(
            centres,
            start,
            Local(steps=1, batch=None, lr=0.5),
            50,
            {"mix_lr": 0.1},
            weight_step=sign,
        )
        own = sim.server["mix"][0].numpy()
        inside = np.kron(np.eye(2, dtype=bool), np.ones((3, 3), dtype=bool)) & ~np.eye(
            6, dtype=bool
        )
        outside = ~inside & ~np.eye(6, dtype=bool)
        loss = sim.scores()["post", "test"].loss[0, -1].mean()
        found[sign] = (
            np.where(inside, own, 0).sum(1),
            np.where(outside, own, 0).sum(1),
            np.diag(own),
            loss,
        )
    helped, crossed, alone, loss = found["descent"]
    np.testing.assert_allclose(alone, 0.5, atol=0.03)
    np.testing.assert_allclose(helped, 0.5, atol=0.03)
    assert crossed.max() < 0.03
    helped, crossed, _, high = found["as_printed"]
    assert helped.max() < 0.05
    assert crossed.max() > 0.4
    assert high > 8 * loss


def test_engines_serve_sequential_schedules_alike() -> None:
    """One client after the other, in both engines and in any chunk."""
    task = net_task()
    method = build("fedapa", task, SGD, {"preset": "authors_code"})
    one = outcome(run(simulation(method, task, two_allocations(), engine="sequential")))
    assert_same(outcome(run(simulation(method, task, two_allocations(), chunk=1))), one, atol=1e-11)


@pytest.mark.parametrize(("preset", "own"), [("paper", 0.5), ("authors_code", 1.0)])
def test_a_weight_of_its_own_is_a_share(preset: str, own: float) -> None:
    """a_ii is 0.5 in the paper and 1 in the authors' code, and nothing beyond 1 is taken."""
    spec = build("fedapa", net_task(), SGD, {"preset": preset}).hyper["self_weight"]
    assert spec.default == own
    assert spec.fault("self_weight", 0.0) is None
    assert spec.fault("self_weight", 1.0) is None
    assert "<= 1, got 1.01" in (spec.fault("self_weight", 1.01) or "")
    assert ">= 0" in (spec.fault("self_weight", -0.01) or "")


def test_the_momentum_of_the_matrix_ends_at_one() -> None:
    """A velocity that grew by itself would be no average of past steps."""
    spec = build("fedapa", net_task(), SGD, {"server_momentum": True}).hyper["mix_momentum"]
    assert spec.default == 0.9
    assert spec.fault("mix_momentum", 1.0) is None
    assert "<= 1, got 1.01" in (spec.fault("mix_momentum", 1.01) or "")
