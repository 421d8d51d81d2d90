"""APPLE: cores that are published, relations that stay at home, and a pull that fades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, changed
from sartor.core.task import Task, given, never
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from sartor.methods.apple import fade
from tests.toys import (
    SIZES,
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
KEPT = replace(SGD, lr=0.05, momentum=0.9, keep_optimiser=True)
FIXED = {"relation_lr": 0.0}
SIZE = 4 * 5 + 5 + 5 * 3 + 3  # the parameters of the toy network


def _net(name: str = "apple", local: Local = SGD, hyper: dict | None = None, **options: Any) -> Any:
    task = net_task()
    method = build(name, task, local, options)
    return run(simulation(method, task, two_allocations(), hyper=hyper or {}, rounds=4))


# ---- one step ------------------------------------------------------------------------------------

CORES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def _step(
    index: int = 0,
    p: torch.Tensor = P,
    curvature: float = 1.0,
    share: Any = (0.2, 0.3, 0.5),
    **hyper: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take one step on ½ a ‖w‖² and return the personal model before it, the core and p after."""
    options = {"start": "uniform", "max_clients": 5, "core_rate": "plain"}
    method = build("apple", quadratic_task(2), Local(), options)
    numbers = {"local_lr": 1.0, "relation_lr": 1.0, "pull": 0.0, "pull_rounds": 2.0, **hyper}
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        hyper={k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()},
        common={"cores": {"w": CORES}, "share": torch.tensor(share, dtype=torch.float64)},
        round=torch.tensor(0),
        index=torch.tensor(index),
    )
    shift = torch.zeros(5, dtype=torch.float64)
    shift[:3] = p - 1 / 3
    work = method.begin({"relation": {"shift": shift}}, ctx)
    before = method.use.model(work, ctx)["w"]
    x = torch.tensor([[curvature, curvature, 0.0, 0.0]], dtype=torch.float64)
    batch = Batch(x, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), None, None)
    work = method.phases[0].step(work, batch, ctx)
    after = work["relation"]["shift"]
    assert torch.equal(after[3:], torch.zeros(2, dtype=torch.float64))
    return before.numpy(), work["core"]["w"].numpy(), (after[:3] + 1 / 3).numpy()


def test_the_gradients_have_the_known_numbers() -> None:
    """On ½‖w‖²: w^P = (0.7, 0.5), ∂p = (0.7, 0.5, 1.2) (dot products), ∂w_1^C = (0.35, 0.25)."""
    personal, core, p = _step()
    np.testing.assert_allclose(personal, [0.7, 0.5], atol=1e-15)
    np.testing.assert_allclose(core, [1 - 0.35, -0.25], atol=1e-15)
    np.testing.assert_allclose(p, P.numpy() - np.array([0.7, 0.5, 1.2]), atol=1e-15)


def test_another_client_steps_on_its_own_core() -> None:
    """Client 3 moves its core (1, 1) by p_33 g = 0.2·(0.7, 0.5)."""
    _, core, p = _step(index=2)
    np.testing.assert_allclose(core, [1 - 0.14, 1 - 0.1], atol=1e-15)
    np.testing.assert_allclose(p, P.numpy() - np.array([0.7, 0.5, 1.2]), atol=1e-15)


def test_without_a_gradient_the_relations_go_to_the_shares() -> None:
    """With g = 0: p − p_0 shrinks by 1 − η_2 λ μ a step (λ = 1 in round 0): the form with ½."""
    share = np.array([0.2, 0.3, 0.5])
    _, core, p = _step(curvature=0.0, relation_lr=0.3, pull=0.5)
    np.testing.assert_allclose(p - share, (1 - 0.15) * (P.numpy() - share), atol=1e-15)
    np.testing.assert_array_equal(core, [1.0, 0.0])


def test_a_newcomer_mixes_the_known_cores_and_learns_relations() -> None:
    """A client outside the table: p = p_0 gives Σ p_0j w_j; a step moves p, and no core."""
    share = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    personal, core, p = _step(index=3, p=share)
    np.testing.assert_allclose(personal, share @ CORES, atol=1e-15)
    np.testing.assert_array_equal(core, CORES[2])  # some core, of weight 0
    np.testing.assert_allclose(p, share - CORES @ (share @ CORES), atol=1e-15)


@pytest.mark.parametrize(
    ("shape", "length", "rounds", "wanted"),
    [
        ("cosine", 10, (0, 5, 9, 10), (1, 0.5, 0.0245, 0)),
        ("exponential", 16, (0, 8, 16, 17), (1, 0.031623, 0, 0)),
        ("cosine", 0, (0, 1), (0, 0)),
        ("exponential", 0, (0, 1), (0, 0)),
    ],
)
def test_the_pull_fades(shape: Any, length: float, rounds: tuple, wanted: tuple) -> None:
    """λ(r) has the known numbers; it is 0 from round L on, and L = 0 leaves it out."""
    end = torch.tensor(float(length), dtype=torch.float64)
    found = [float(fade(torch.tensor(r), end, shape)) for r in rounds]
    np.testing.assert_allclose(found, wanted, atol=5e-5 if shape == "cosine" else 5e-7)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_own_core_alone_is_local_training(local: Local) -> None:
    """η_2 = 0 and p_i = e_i: LocalTrain in the client's rounds, to the bit."""
    found = outcome(_net(local=local, hyper=FIXED, start="self", core_rate="plain"))
    wanted = outcome(_net("local", local=local, participation="sampled"))
    for name in wanted:
        if name.startswith(("pre/", "post/")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_one_client_is_plain_sgd() -> None:
    """M = 1: p = 1 and M·η_1 = η_1, so the core is LocalTrain's model, to the bit."""
    task, feds = net_task(), [federation(sizes=(11,))]
    apple = simulation(build("apple", task, SGD, {}), task, feds, hyper=FIXED)
    alone = simulation(build("local", task, SGD, {}), task, feds)
    found, wanted = outcome(run(apple)), outcome(run(alone))
    np.testing.assert_array_equal(found["post/test/loss"], wanted["post/test/loss"])


def test_fixed_shares_give_everybody_the_same_download() -> None:
    """η_2 = 0 and p_i = p_0: everybody begins a round with Σ (n_j/n) w_j^C."""
    task = net_task()
    sim = run(simulation(build("apple", task, SGD, {}), task, [federation()], hyper=FIXED))
    share = np.array(SIZES) / sum(SIZES)
    for leaf in task.leaf_names:
        cores = sim.server["cores"][leaf][0].numpy()
        assert np.abs(cores - cores[:1]).max() > 1e-3
        wanted = np.tensordot(share, cores, 1)
        for i in range(len(SIZES)):
            found = sim.params(i, point="pre")[leaf].numpy()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_the_number_of_clients_multiplies_the_step_of_the_core() -> None:
    """The default is the paper's method with M·η_1 in place of η_1."""
    found = outcome(_net(local=replace(SGD, lr=0.02)))
    wanted = outcome(_net(local=replace(SGD, lr=0.1), core_rate="plain"))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-12)


# ---- a plain loop --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["cosine", "exponential"])
def test_a_run_is_a_plain_loop(shape: Any) -> None:
    """All clients at once, momentum anew in every round, trained cores (no mixtures) published."""
    draw = np.random.default_rng(5)
    centres, sizes = draw.normal(size=(4, 3)), np.array([1, 2, 3, 4])
    start = draw.normal(size=3)
    eta1, eta2, mu, length, beta = 0.3, 0.02, 2.0, 3, 0.5
    share = sizes / sizes.sum()
    cores, p, used = np.tile(start, (4, 1)), np.tile(share, (4, 1)), np.zeros((4, 3))
    for r in range(5):
        part = r / length
        lam = (np.cos(np.pi * part) + 1) / 2 if shape == "cosine" else 1e-3**part
        lam = lam if r < length else 0.0
        published = cores.copy()
        for i in range(4):
            mine = cores.copy()
            v_core, v_p = np.zeros(3), np.zeros(4)
            for _ in range(3):
                g = p[i] @ mine - centres[i]
                v_core = beta * v_core + p[i, i] * g
                v_p = beta * v_p + mine @ g + lam * mu * (p[i] - share)
                mine[i] = mine[i] - eta1 * v_core
                p[i] = p[i] - eta2 * v_p
            published[i], used[i] = mine[i], p[i] @ mine
        cores = published
    fed, _ = quadratics(np.ones_like(centres), centres, samples=sizes)
    module = Quadratic(3).double()
    with torch.no_grad():
        module.w.copy_(torch.from_numpy(start))
    task = Task(module, None, given, never)
    local = Local(steps=3, batch=None, lr=eta1, momentum=beta)
    method = build("apple", task, local, {"core_rate": "plain", "shape": shape})
    hyper = {"relation_lr": eta2, "pull": mu, "pull_rounds": length}
    sim = run(simulation(method, task, [fed], hyper=hyper, rounds=5, participation="all"))
    np.testing.assert_allclose(sim.server["cores"]["w"][0], cores, rtol=0, atol=1e-6)
    shift = states(sim)["client/relation/shift"][0]
    np.testing.assert_allclose(share + shift[:, :4], p, rtol=0, atol=1e-6)
    found = np.stack([sim.params(i)["w"].numpy() for i in range(4)])
    np.testing.assert_allclose(found, used, rtol=0, atol=1e-6)


# ---- what travels --------------------------------------------------------------------------------


def test_all_cores_and_the_shares_come_down_and_one_core_goes_up() -> None:
    """M|θ| and M shares down, |θ| up; relations are not among the uploads, nor may they be."""
    task = net_task()
    method = build("apple", task, SGD, {})
    seen = []

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        seen.append(sorted(upload))
        return kept, upload

    feds = [federation()]
    sim = simulation(changed(method, finish=finish), task, feds, engine="sequential")
    ledger = run(sim).ledger()
    assert {tuple(keys) for keys in seen} == {("core",)}
    assert method.wire.private("relation")
    np.testing.assert_array_equal(ledger.bytes_up, 8 * SIZE * ledger.participants)
    np.testing.assert_array_equal(ledger.bytes_down, 8 * (5 * SIZE + 5) * ledger.participants)


def test_only_the_cores_of_participants_change() -> None:
    """A cohort of one: one row of the table moves, one client's relations move."""
    task = net_task()
    sim = simulation(build("apple", task, SGD, {}), task, [federation()], participation=1)
    old = states(sim)
    sim.step()
    new = states(sim)
    moved = (new["server/cores/fc.weight"] != old["server/cores/fc.weight"])[0].any((1, 2))
    learnt = (new["client/relation/shift"] != 0)[0].any(1)
    assert moved.sum() == 1
    np.testing.assert_array_equal(moved, learnt)


# ---- starts --------------------------------------------------------------------------------------


def test_own_starts_are_other_networks_of_the_same_numbers() -> None:
    """Every core has the entries of the common start in another order; a seed gives the same."""
    task, feds = net_task(), [federation(), federation()]
    common = simulation(build("apple", task, SGD, {}), task, feds, seeds=[3, 3])
    own = simulation(build("apple", task, SGD, {"start_cores": "own"}), task, feds, seeds=[3, 3])
    for leaf in task.leaf_names:
        one, many = (sim.server["cores"][leaf].flatten(2).numpy() for sim in (common, own))
        np.testing.assert_array_equal(np.sort(many, -1), np.sort(one, -1))
        np.testing.assert_array_equal(many[0], many[1])
        # A bias of three entries has few orders, so some clients share one.
        assert len({tuple(row) for row in many[0]}) == (5 if many.shape[-1] > 3 else 2)


def test_own_starts_run_alike_on_both_engines() -> None:
    """The order of a core's entries follows from the seed, not from the engine."""
    task = net_task()
    method = build("apple", task, SGD, {"start_cores": "own"})
    found, wanted = (
        outcome(run(simulation(method, task, two_allocations(), engine=engine)))
        for engine in ("vectorised", "sequential")
    )
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-11)


def test_too_many_clients_are_refused() -> None:
    """It says what to set."""
    task = net_task()
    with pytest.raises(ConfigError, match="max_clients=5"):
        simulation(build("apple", task, SGD, {"max_clients": 4}), task, [federation()])


def test_the_room_for_relations_does_not_matter() -> None:
    """Room for 5 or for 256 clients: the same numbers."""
    found, wanted = outcome(_net(max_clients=5)), outcome(_net())
    np.testing.assert_array_equal(found["post/test/loss"], wanted["post/test/loss"])


# ---- a download budget ---------------------------------------------------------------------------

ROOM = {"max_clients": 6}


@pytest.mark.parametrize("start_cores", ["common", "own"])
def test_a_budget_for_all_others_is_no_budget(start_cores: str) -> None:
    """K = M − 1: the same cores, relations and scores; the own core is not sent down again."""
    options = {**ROOM, "start_cores": start_cores}
    plain, limited = (outcome(_net(local=KEPT, **options, **more)) for more in ({}, {"budget": 4}))
    for name, value in plain.items():
        if name.startswith(("server/", "client/", "pre/", "post/")):
            np.testing.assert_allclose(limited[name], value, atol=1e-12, err_msg=name)
    model = SIZE * 8
    trained = limited["participants"]
    share, ids = 5 * 8, 4 * 8
    np.testing.assert_array_equal(plain["bytes_down"], trained * (5 * model + share))
    np.testing.assert_array_equal(limited["bytes_down"], trained * (4 * model + share + ids))
    np.testing.assert_array_equal(limited["bytes_up"], trained * (model + ids))
    once = 5 * (5 * model + share) if start_cores == "own" else 0
    assert limited["setup_bytes"].tolist() == [once] * 2


def test_copies_are_renewed_by_downloads_alone_and_unseen_cores_come_first() -> None:
    """A copy is the core of the round it was got in; the first M − 1 of K = 1 are all others."""
    task = net_task()
    method = build("apple", task, SGD, {**ROOM, "budget": 1})
    sim = simulation(method, task, [federation()], participation="all", rounds=7)
    start = task.init(0)["fc.weight"].double()
    mine = {(i, j): start for i in range(5) for j in range(5)}
    asked: list[list[int]] = [[] for _ in range(5)]
    for t in range(7):
        cores, wish = sim.server["cores"]["fc.weight"][0].clone(), sim.server["wish"][0]
        for i in range(5):
            asked[i].append(int(wish[i, 0]))
            mine[i, asked[i][-1]] = cores[asked[i][-1]]
        sim.server, _ = sim.rounds.train(sim.server, sim.store, t)
        kept = sim.store.gather(sim.context.everybody)
        for i in range(5):
            others = [j for j in range(5) if j != i]
            for j in others:
                assert torch.equal(kept["copies"]["fc.weight"][0, i, j], mine[i, j])
            assert torch.equal(
                kept["core"]["fc.weight"][0, i], sim.server["cores"]["fc.weight"][0, i]
            )
    for i, ids in enumerate(asked):
        assert sorted(ids[:4]) == [j for j in range(5) if j != i]
        assert i not in ids
    assert len({tuple(ids[:4]) for ids in asked}) > 1


def _asks(
    p: Any, budget: int, round_index: int = 0, num: int = 4000, **options: float
) -> np.ndarray:
    """Draw the next downloads of client 0 with relations p, all cores got: (num, budget)."""
    size = len(p)
    fixed = {"start": "uniform", "max_clients": size, "budget": budget}
    method = build("apple", quadratic_task(1), Local(), {**fixed, **options})
    zeros = torch.zeros(size, 1, dtype=torch.float64)
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        common={"share": torch.full((size,), 1 / size, dtype=torch.float64)},
        own={"ids": torch.arange(budget)},
        round=torch.tensor(round_index),
        index=torch.tensor(0),
    )
    work = {
        "core": {"w": zeros[0]},
        "copies": {"w": zeros},
        "got": torch.ones(size, dtype=torch.bool),
        "relation": {"shift": torch.tensor(p, dtype=torch.float64) - 1 / size},
    }

    def one(key: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = method.finish(work, work, ctx._replace(key=key))[1]["wish"]
        return found

    keys = torch.stack((torch.arange(num), torch.zeros(num, dtype=torch.int64)), 1)
    return torch.func.vmap(one)(keys).numpy()


@pytest.mark.parametrize(
    ("base", "growth", "round_index", "b"),
    [
        (3.0, 0.0, 9, 3.0),
        (1.5, 1.0, 0, 1.5),
        (1.5, 2.0, 9, 5.0),
        (1.5, 16.0, 0, 4.0),
        (1.0, 0.0, 9, 1.0),
    ],
)
def test_downloads_are_drawn_by_the_size_of_relations(
    base: float, growth: float, round_index: int, b: float
) -> None:
    """P(j) ∝ b^|p_ij|, b = max(base, growth·r·K/M) with r the next round; the own core never."""
    p = [5.0, 0.0, -1.0, 0.5]
    ids = _asks(p, 1, round_index, choice_base=base, choice_growth=growth)[:, 0]
    weight = b ** np.abs(p[1:])
    wanted = weight / weight.sum()
    found = np.bincount(ids, minlength=4) / len(ids)
    assert found[0] == 0
    np.testing.assert_allclose(found[1:], wanted, atol=4 * 0.5 / len(ids) ** 0.5)


def test_several_downloads_are_drawn_without_replacement() -> None:
    """Pairs have the probabilities of two draws in turn: w_a/W · w_b/(W − w_a)."""
    p = [0.0, 0.0, 1.0, 2.0]
    ids = _asks(p, 2, choice_base=3.0, choice_growth=0.0)
    assert (ids[:, 0] != ids[:, 1]).all()
    w = 3.0 ** np.array(p)
    total = w[1:].sum()
    for a in (1, 2, 3):
        for c in {1, 2, 3} - {a}:
            wanted = w[a] / total * w[c] / (total - w[a])
            found = ((ids[:, 0] == a) & (ids[:, 1] == c)).mean()
            assert found == pytest.approx(wanted, abs=4 * 0.5 / len(ids) ** 0.5)


def test_with_its_own_core_alone_a_budget_does_not_matter() -> None:
    """η_2 = 0 and p_i = e_i: LocalTrain, however stale the copies are."""
    options = {**ROOM, "start": "self", "core_rate": "plain", "budget": 1}
    found = outcome(_net(hyper=FIXED, **options))
    wanted = outcome(_net("local", participation="sampled"))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget must be >= 1 core a round, got 0"),
        ({"budget": 1, "choice_base": 0.0}, "choice_base must be > 0"),
        ({"budget": 1, "choice_growth": -1.0}, "got 1.5 and -1"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(options: dict, words: str) -> None:
    """Zero cores is a mistake (None is all), and a base must be positive."""
    with pytest.raises(ConfigError, match=words):
        build("apple", net_task(), SGD, options)
