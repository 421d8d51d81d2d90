"""Ditto: FedAvg's global model, and a personal model that is pulled towards it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, changed
from sartor.data.federation import Federation
from sartor.data.split import Ragged
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


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


@cache
def _fedavg(local: Local, rule: str):
    return _net("fedavg", local, {"rule": rule})


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
@pytest.mark.parametrize("rule", ["normalized", "uniform", "chen"])
@pytest.mark.parametrize("pull", [0.0, 1.0, 50.0])
def test_the_global_model_is_fedavgs_to_the_bit(local: Local, rule: str, pull: float) -> None:
    """Whatever λ is, w and its optimisers never notice the personal branch; nor do the bytes."""
    wanted = _fedavg(local, rule)
    found = _net("ditto", local, {"rule": rule}, hyper={"prox_strength": pull})
    leaves = states(found)
    for name, leaf in states(wanted).items():
        np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)
    for name in ("bytes_up", "bytes_down", "participants"):
        np.testing.assert_array_equal(
            getattr(found.ledger(), name), getattr(wanted.ledger(), name), err_msg=name
        )


@pytest.mark.parametrize(
    ("local", "options"),
    [(SGD, {}), (HEAVY, {}), (KEPT, {}), (SGD, {"choices": (0.0,)}), (HEAVY, {"choices": (0.0,)})],
)
def test_no_pull_is_local_training_in_the_rounds_of_the_client(local: Local, options: dict) -> None:
    """λ = 0: v_k is LocalTrain's, to the bit, trained in the rounds in which k was drawn."""
    hyper = {} if options else {"prox_strength": 0.0}
    wanted = outcome(_net("local", local, {"participation": "sampled"}, rounds=5))
    found = outcome(_net("ditto", local, options, hyper=hyper, rounds=5))
    trained = {k: v for k, v in wanted.items() if k.startswith("client/")}
    assert trained
    for name, leaf in trained.items():
        mine = name.replace("client/", "client/personal/")
        np.testing.assert_array_equal(found[mine], leaf, err_msg=name)
    for name in wanted:
        if name.startswith(("pre/", "post/")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_an_absent_client_keeps_its_personal_model() -> None:
    """With a cohort of one, the other two personal models stay at w_0."""
    sim = q3("ditto", GD, participation=1)
    assert sorted(used(sim) != 0.0)[:2] == [False, False]
    everybody = q3("ditto", GD)
    np.testing.assert_allclose(used(everybody), 0.1 * A * C, atol=1e-7)


def test_one_step_has_the_known_number() -> None:
    """From v = 0 with w = 1, a = 1, c = 3, λ = 2, η = 0.1 a step gives v = 0.5, and w stays."""
    method = build("ditto", quadratic_task(), GD, {})
    one = torch.ones(1, dtype=torch.float64)
    hyper = {"personal_lr": 0.1 * one[0], "prox_strength": 2.0 * one[0]}
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    ctx = blank._replace(hyper=hyper, common={"params": {"w": one}})
    batch = Batch(torch.tensor([[1.0, 3.0]]).double(), one.long(), one.bool(), None, None)
    work = method.begin({"personal": {"params": {"w": 0.0 * one}}}, ctx)
    work = method.phases[0].step(work, batch, ctx)
    assert float(work["personal"]["params"]["w"]) == pytest.approx(0.5, abs=1e-14)
    assert float(work["params"]["w"]) == 1.0


def test_the_fixed_point_on_the_three_quadratics() -> None:
    """W = 30/7 and λ = 2: v = (a c + λ w)/(a + λ) = (2.857143, 3.642857, 5.428571)."""
    sim = q3("ditto", GD, hyper={"prox_strength": 2.0}, rounds=200)
    assert centre(sim) == pytest.approx(30 / 7, abs=1e-6)
    np.testing.assert_allclose(used(sim), [2.857143, 3.642857, 5.428571], atol=1e-6)


def test_the_centre_is_fedavgs_and_not_that_of_fedprox() -> None:
    """FedProx pulls both ways and ends at (22/9, 10/3, 47/9); Ditto's pull is one way."""
    prox = q3("fedprox", GD, hyper={"prox_strength": 2.0}, rounds=300)
    np.testing.assert_allclose(used(prox), [22 / 9, 10 / 3, 47 / 9], atol=1e-6)
    own = used(q3("ditto", GD, hyper={"prox_strength": 2.0}, rounds=300))
    assert np.abs(own - used(prox)).min() > 0.2


def test_the_pull_is_to_the_received_model() -> None:
    """The centre is w_t for the whole round: not the trained w_k, and not w_{t+1}."""
    local = Local(steps=3, batch=None, lr=0.1)
    hyper = {"prox_strength": 2.0, "personal_lr": 0.07}
    w, v = 0.0, np.zeros(3)
    for t in range(1, 4):
        for _ in range(3):
            v = v - 0.07 * (A * (v - C) + 2.0 * (v - w))
        w = float(np.mean(C + (1 - 0.1 * A) ** 3 * (w - C)))
        sim = q3("ditto", local, hyper=hyper, rounds=t)
        np.testing.assert_allclose(used(sim), v, atol=1e-6)
        assert centre(sim) == pytest.approx(w, abs=1e-6)


def test_a_huge_pull_follows_the_global_model() -> None:
    """λ → ∞ with η_l < 2/(λ + L): v_k is w_t."""
    sim = q3("ditto", GD, hyper={"prox_strength": 1e5, "personal_lr": 1e-5}, rounds=150)
    np.testing.assert_allclose(used(sim), centre(sim), atol=1e-3)


def test_equal_clients_end_at_the_global_model() -> None:
    """With one objective for all, v_k and w go to the same point."""
    sim = q3(
        "ditto", GD, curvatures=[2.0] * 3, centres=[3.0] * 3, rounds=120, hyper={"personal_lr": 0.2}
    )
    np.testing.assert_allclose(used(sim), 3.0, atol=1e-8)
    assert centre(sim) == pytest.approx(3.0, abs=1e-8)


def test_a_pull_per_client_is_that_clients_run() -> None:
    """λ_k: client k's model is that of the run in which everybody has λ_k."""
    pulls = [0.0, 0.5, 4.0]
    mixed = used(q3("ditto", GD, hyper={"prox_strength": pulls}, rounds=7))
    for k, lam in enumerate(pulls):
        alone = used(q3("ditto", GD, hyper={"prox_strength": lam}, rounds=7))
        assert mixed[k] == alone[k]


def test_the_personal_branch_has_its_own_length_and_rate() -> None:
    """S personal steps of rate η_l; without them the branch is as long as the global one."""
    start, lam = 1.0, 1.0
    for options, local, steps in (
        ({"personal_steps": 4}, GD, 4),
        ({"personal_epochs": 3}, GD, 3),
        ({"personal_epochs": 3, "personal_steps": 2}, GD, 2),
        ({}, replace(GD, steps=5), 5),
        ({}, Local(epochs=2, batch=None, lr=0.1), 2),
    ):
        sim = q3("ditto", local, options=options, hyper={"personal_lr": 0.05}, start=start)
        v = np.full(3, start)
        for _ in range(steps):
            v = v - 0.05 * (A * (v - C) + lam * (v - start))
        np.testing.assert_allclose(used(sim), v, atol=1e-7)
        series = sim.ledger().gradient_evaluations
        assert series.tolist() == [[3 * (steps + (local.steps or local.epochs))]]


def test_the_personal_model_never_leaves() -> None:
    """The upload holds the global branch alone, and one that held more would be stopped."""
    task = net_task()
    method = build("ditto", task, SGD, {})
    seen = []

    def watch(client, work, ctx):
        kept, upload = method.finish(client, work, ctx)
        seen.append((work, upload))
        return kept, upload

    run(
        simulation(
            changed(method, finish=watch), task, [federation()], engine="sequential", rounds=2
        )
    )
    for work, upload in seen:
        assert list(upload) == ["params"]
        for name, leaf in tree.items(upload["params"]):
            assert torch.equal(leaf, work["params"][name])
            assert not torch.equal(leaf, work["personal"]["params"][name])
    leaky = changed(method, finish=lambda c, w, s: (c, {"personal": w["personal"]}))
    with pytest.raises(ContractError, match="personal"):
        simulation(leaky, task, [federation()]).step()


def test_momentum_of_one_branch_is_not_that_of_the_other() -> None:
    """Each branch is the run in which the other branch does not exist."""
    hyper = {"prox_strength": 0.0, "personal_lr": 0.01}
    found = states(_net("ditto", KEPT, hyper=hyper))
    alone = states(_net("local", replace(KEPT, lr=0.01), {"participation": "sampled"}))
    for name, leaf in alone.items():
        mine = name.replace("client/", "client/personal/")
        np.testing.assert_array_equal(found[mine], leaf, err_msg=name)
    assert any("personal/velocity" in name for name in found)


def test_the_default_pulls() -> None:
    """Out of the box λ = 1 (a default of 0 would be LocalTrain under another name)."""
    assert METHODS["ditto"].hyper["prox_strength"].default == 1.0


# ---- the choice of λ -----------------------------------------------------------------------------


@pytest.mark.parametrize("pull", [0.1, 2.0])
def test_one_choice_is_that_pull(pull: float) -> None:
    """With a single candidate the choice is the method with that λ, to the bit."""
    wanted = states(_net("ditto", HEAVY, hyper={"prox_strength": pull}))
    found = states(_net("ditto", HEAVY, {"choices": (pull,)}))
    assert sorted(found) == sorted(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def _first_round(choices: tuple[float, ...], fed: Federation) -> tuple[np.ndarray, ...]:
    """Return validation losses after round 0: with each λ (choices, clients), and with a choice.

    Later rounds start at the last choice, so only the first can be compared with whole runs.
    """
    task, found = net_task(), []
    for lam in (*choices, None):
        options = {"choices": choices} if lam is None else {}
        method = build("ditto", task, SGD, {**options, "personal_epochs": 8})
        hyper = {} if lam is None else {"prox_strength": lam}
        sim = simulation(method, task, [fed], hyper=hyper, rounds=1, participation="all")
        found.append(outcome(run(sim))["post/val/loss"][0, 0])
    return np.stack(found[:-1]), found[-1]


@pytest.mark.parametrize("choices", [(0.0, 0.3, 2.0), (2.0, 0.3, 0.0)])
def test_each_client_keeps_the_candidate_of_smallest_validation_loss(choices: tuple) -> None:
    """V_k has the λ whose validation loss is smallest for client k; padding does not count."""
    best: set[int] = set()
    for seed in range(6):
        fed = federation(seed, val=9)
        lists = [fed.val.of(i) for i in range(5)]
        cut = [rows[:n] for rows, n in zip(lists, (9, 2, 3, 5, 4), strict=True)]
        losses, chosen = _first_round(choices, replace(fed, val=Ragged.from_lists(cut)))
        np.testing.assert_allclose(chosen, losses.min(0), rtol=1e-12)
        best |= set(losses.argmin(0).tolist())
    assert best == {0, 1, 2}


def test_a_client_without_validation_data_uses_the_first_candidate() -> None:
    """It cannot choose; the others still do."""
    fed = federation(3, val=3)
    lists = [fed.val.of(i) for i in range(5)]
    poor = replace(fed, val=Ragged.from_lists([lists[0][:0], *lists[1:]]))
    task = net_task()
    models = []
    for options, hyper in (({"choices": (2.0, 0.3, 0.0)}, {}), ({}, {"prox_strength": 2.0})):
        method = build("ditto", task, SGD, {**options, "personal_epochs": 8})
        sim = run(simulation(method, task, [poor], hyper=hyper, rounds=1, participation="all"))
        models.append([sim.params(i)["fc.weight"] for i in range(5)])
    same = [torch.equal(a, b) for a, b in zip(*models, strict=True)]
    assert same[0]
    assert not all(same)


def test_the_choice_adds_up_real_validation_losses() -> None:
    """Losses (w − c)²/2 at c = 1, then at 5; padding at 9 does not count: 5 beats 29 and 13.

    Of equal sums the first is kept.
    """
    (_, choose, *_) = build("ditto", quadratic_task(), GD, {"choices": (0.0, 1.0, 2.0)}).phases
    assert (choose.data, choose.epochs, choose.steps) == ("val", 1, None)
    assert not choose.shuffle  # a sum needs no order, and no order is drawn for it
    values = {"params": 0.0, "try0": -2.0, "try1": 2.0, "try2": 0.0}
    personal = {k: {"w": torch.tensor([v], dtype=torch.float64)} for k, v in values.items()}
    work = choose.enter({"personal": personal, "params": {}}, None)
    assert work["personal"]["losses"].tolist() == [0.0, 0.0, 0.0]
    assert work["personal"]["losses"].dtype == torch.float64

    def batch(point: float) -> Batch:
        x = torch.tensor([[1.0, point], [1.0, 9.0]], dtype=torch.float64)
        mask = torch.tensor([True, False])
        return Batch(x, torch.zeros(2), mask, torch.tensor([0, 2]), torch.tensor(True))

    for point in (1.0, 5.0):
        work = choose.step(work, batch(point), None)
    assert work["personal"]["losses"].tolist() == [4.5 + 24.5, 0.5 + 4.5, 0.5 + 12.5]
    assert choose.leave(work, None)["personal"]["params"]["w"].tolist() == [2.0]
    work["personal"]["losses"] = torch.tensor([5.0, 3.0, 3.0])
    assert choose.leave(work, None)["personal"]["params"]["w"].tolist() == [2.0]


@pytest.mark.parametrize("name", ["personal_epochs", "personal_steps"])
def test_the_shortest_personal_training_is_one(name: str) -> None:
    """One pass or one step is legal, λ = 0 and λ < 1 are legal candidates."""
    options = {name: 1, "choices": (0.0, 0.5)}
    phase = build("ditto", net_task(), replace(SGD, epochs=3), options).phases[0]
    assert (phase.epochs, phase.steps) == ((1, None) if name == "personal_epochs" else (3, 1))


def test_what_can_be_set_has_no_negative_values() -> None:
    """λ from 0 on, 1 by default; η_l is that of the global branch until it is set."""
    hyper = build("ditto", net_task(), SGD, {}).hyper
    found = {k: (hyper[k].default, hyper[k].low) for k in ("prox_strength", "personal_lr")}
    assert found == {"prox_strength": (1.0, 0.0), "personal_lr": (SGD.lr, 0.0)}


def test_candidates_are_paid_for() -> None:
    """Three candidates cost three personal trainings, and a pass over the validation data each."""
    plain = _net("ditto", participation="all").ledger()
    three = _net("ditto", SGD, {"choices": (1.0, 0.1, 2.0)}, participation="all").ledger()
    np.testing.assert_array_equal(three.gradient_evaluations, 2 * plain.gradient_evaluations)
    assert three.forward_evaluations.tolist() == [[3 * 5 * 2] * 3]
    assert plain.forward_evaluations.sum() == 0


@pytest.mark.parametrize(
    ("options", "local", "words"),
    [
        ({"personal_steps": 0}, SGD, "personal_steps must be >= 1, got 0"),
        ({"personal_epochs": -1}, SGD, "personal_epochs must be >= 1, got -1"),
        ({"choices": (1.0, -0.5)}, SGD, "choices must be >= 0, got -0.5"),
        ({"choices": (1.0, 0.1)}, KEPT, "keep_optimiser=False"),
        ({"client_weights": (0.2,) * 5}, SGD, "rule='p_weighted'"),
    ],
)
def test_faults_are_named(options: dict, local: Local, words: str) -> None:
    """An option that cannot be right is refused with the way to fix it."""
    with pytest.raises(ConfigError, match=words):
        build("ditto", net_task(), local, options)


def test_with_choices_there_is_no_pull_to_set() -> None:
    """A λ that would be ignored is not offered."""
    assert "prox_strength" not in build("ditto", net_task(), SGD, {"choices": (1.0,)}).hyper
