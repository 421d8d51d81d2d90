"""L2GD: a fair coin between local gradient steps and steps towards the average."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, Method, ServerContext
from sartor.data.synthetic import quadratics
from sartor.methods import build
from sartor.theory import proximal
from sartor.training.simulation import Simulation
from tests.toys import (
    Q3,
    centre,
    federation,
    net_task,
    outcome,
    personal,
    q3,
    quadratic_task,
    run,
    simulation,
    used,
)

A, C = np.array(Q3[0]), np.array(Q3[1])
OPTIMUM = np.array([22 / 9, 10 / 3, 47 / 9])
PAPER = {"preset": "paper", "smoothness": 4.0}
THIRD = {"prox_strength": 2.0, "average_probability": 1 / 3, "local_lr": 1 / 12}


def ctx(hyper: dict[str, float], **fields: Any) -> ClientContext:
    """Make what a client sees, by hand."""
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in hyper.items()}
    return ClientContext(**{**dict.fromkeys(ClientContext._fields), "hyper": numbers, **fields})


def averaged(method: Method, x: torch.Tensor, ones: int, hyper: dict[str, float]) -> torch.Tensor:
    """Let all clients (rows of x) take a run of ones."""
    message = {"params": {"w": x.mean(0)}, "ones": torch.tensor(ones), "zeros": torch.tensor(0)}
    here = ctx(hyper, common=message)
    return torch.stack([method.begin({"params": {"w": row}}, here)["params"]["w"] for row in x])


def stepped(method: Method, x: torch.Tensor, hyper: dict[str, float]) -> torch.Tensor:
    """Let the three quadratic clients (rows of x) take one zero."""
    found = []
    for a, c, row in zip(*Q3, x, strict=True):
        data = torch.tensor([[a] * len(row) + [c] * len(row)], dtype=torch.float64)
        yes = torch.ones(1, dtype=torch.bool)
        batch = Batch(data, torch.zeros(1), yes, torch.zeros(1), yes)
        found.append(method.phases[0].step({"params": {"w": row}}, batch, ctx(hyper)))
    return torch.stack([work["params"]["w"] for work in found])


def lanes(num: int, rounds: int, options: dict, hyper: Any, participation: Any = 1.0) -> Any:
    """Make many runs on the three quadratics that differ in their coins, and as ``hyper`` says."""
    fed, _ = quadratics(*Q3)
    task = quadratic_task()
    method = build("l2gd", task, Local(), options)
    return simulation(
        method,
        task,
        [fed] * num,
        hyper=hyper,
        seeds=range(num),
        rounds=rounds,
        participation=participation,
        eval_every=rounds,
        points=("pre",),
    )


def models(sim: Simulation) -> np.ndarray:
    """Return x_i of all runs: (runs, clients)."""
    found: np.ndarray = sim.store.gather(sim.context.everybody)["params"]["w"][..., 0].numpy()
    return found


def coins(sim: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the coming runs of ones and zeros: (runs,) each."""
    return sim.server["ones"].numpy().copy(), sim.server["zeros"].numpy().copy()


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["full", "batch"])
@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_without_averages_it_is_local_training_to_the_bit(gradient: str, pull: float) -> None:
    """At p = 0 every round is ``longest_run`` steps of LocalTrain; λ = 0 is the paper's case."""
    task, batch = net_task(), None if gradient == "full" else 3
    settings: dict[str, Any] = {"participation": "all", "rounds": 4}
    options = {"longest_run": 5, "gradient": gradient}
    method = build("l2gd", task, Local(epochs=2, batch=3, lr=0.1), options)
    hyper = {"prox_strength": pull, "average_probability": 0.0}
    found = outcome(run(simulation(method, task, [federation()], hyper=hyper, **settings)))
    alone = build("local", task, Local(steps=5, batch=batch, lr=0.1), {})
    wanted = outcome(run(simulation(alone, task, [federation()], **settings)))
    for name in wanted:
        if name.startswith(("client/", "pre/", "post/", "gradient")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_without_pull_the_coin_only_counts_steps() -> None:
    """λ = 0, p > 0: gradient descent with step η/(1−p), as many times as there were zeros."""
    hyper = {"prox_strength": 0.0, "average_probability": 0.4, "local_lr": 0.06}
    sim = q3("l2gd", Local(), hyper=hyper, rounds=5)
    steps = int(sim.ledger().gradient_evaluations.sum()) // 3
    assert steps > 5
    np.testing.assert_allclose(personal(sim), C * (1 - (1 - 0.1 * A) ** steps), atol=1e-14)


def test_the_papers_preset_without_pull_is_local_training() -> None:
    """λ = 0: p* = 0, and η = 1/(2L)."""
    options = {**PAPER, "longest_run": 3}
    sim = q3("l2gd", Local(), options=options, hyper={"prox_strength": 0.0}, rounds=2)
    wanted = q3("local", Local(steps=3, batch=None, lr=1 / 8), rounds=2)
    np.testing.assert_array_equal(personal(sim), personal(wanted))


def test_one_client_descends_alone() -> None:
    """With m = 1 an average changes nothing, whatever λ."""
    alone = {"curvatures": [2.0], "centres": [3.0], "rounds": 6}
    hyper = {"average_probability": 0.5, "local_lr": 0.05}
    sim = q3("l2gd", Local(), hyper={**hyper, "prox_strength": 7.0}, **alone)
    steps = int(sim.ledger().gradient_evaluations.sum())
    assert personal(sim)[0] == pytest.approx(3 * (1 - 0.8**steps), abs=1e-14)


# ---- one flip ------------------------------------------------------------------------------------


def test_a_one_keeps_the_average_and_shrinks_the_distances() -> None:
    """x̄ stays, x_i − x̄ shrinks by 1 − c, and three ones are one after the other."""
    method = build("l2gd", quadratic_task(2), Local(), {})
    x = torch.tensor([[0.0, 1.0], [2.0, -1.0], [7.0, 3.0]], dtype=torch.float64)
    hyper = {"prox_strength": 0.5, "average_probability": 0.25, "local_lr": 0.1}  # c = 0.2
    once = averaged(method, x, 1, hyper)
    torch.testing.assert_close(once.mean(0), x.mean(0), rtol=0, atol=1e-15)
    torch.testing.assert_close(once - x.mean(0), 0.8 * (x - x.mean(0)), rtol=0, atol=1e-15)
    one_by_one = averaged(method, averaged(method, once, 1, hyper), 1, hyper)
    torch.testing.assert_close(averaged(method, x, 3, hyper), one_by_one, rtol=0, atol=1e-15)
    assert torch.equal(averaged(method, x, 0, hyper), x)


def test_a_large_coefficient_is_full_averaging() -> None:
    """A coefficient c = 1, or above, sets every model to the average: local gradient descent."""
    method = build("l2gd", quadratic_task(), Local(), {})
    x = torch.tensor([[0.1], [0.3], [0.7]], dtype=torch.float64)
    for pull in (2.5, 40.0):
        hyper = {"prox_strength": pull, "average_probability": 0.25, "local_lr": 0.1}
        assert torch.equal(averaged(method, x, 1, hyper), x.mean(0).expand(3, 1))


def test_the_flip_is_an_unbiased_gradient() -> None:
    """(1−p) · direction of a zero + p · direction of a one = ∇F, exactly."""
    method = build("l2gd", quadratic_task(), Local(), {})
    x = torch.tensor([[1.0], [-2.0], [5.0]], dtype=torch.float64, requires_grad=True)
    for p, lam, eta in ((1 / 3, 2.0, 1 / 12), (0.1, 0.5, 0.02)):
        hyper = {"prox_strength": lam, "average_probability": p, "local_lr": eta}
        a, c = (torch.tensor(v, dtype=torch.float64)[:, None] for v in Q3)
        apart = (x - x.mean(0)).square().sum()
        value = (0.5 * a * (x - c).square()).sum() / 3 + lam / 6 * apart
        (slope,) = torch.autograd.grad(value, x)
        at, alpha = x.detach(), 3 * eta
        zero, one = (at - stepped(method, at, hyper)) / alpha, at - averaged(method, at, 1, hyper)
        torch.testing.assert_close((1 - p) * zero + p * one / alpha, slope, rtol=0, atol=1e-14)


def test_the_coefficients_of_the_three_quadratics() -> None:
    """λ = 2, L = 4: p* = 1/3, α = 0.25; a zero steps by 0.125, a one by 0.5, in both presets."""
    x = torch.tensor([[1.0], [-2.0], [5.0]], dtype=torch.float64)
    a, c = (torch.tensor(v, dtype=torch.float64)[:, None] for v in Q3)
    for options, hyper in (({}, THIRD), (PAPER, {"prox_strength": 2.0})):
        method = build("l2gd", quadratic_task(), Local(), options)
        zero, one = stepped(method, x, hyper), averaged(method, x, 1, hyper)
        torch.testing.assert_close(zero, x - 0.125 * a * (x - c), rtol=0, atol=1e-15)
        torch.testing.assert_close(one, 0.5 * x + 0.5 * x.mean(0), rtol=0, atol=1e-15)
    free = q3("l2gd", Local(), hyper=THIRD, rounds=6)
    derived = q3("l2gd", Local(), options=PAPER, hyper={"prox_strength": 2.0}, rounds=6)
    np.testing.assert_allclose(personal(derived), personal(free), atol=1e-14)


# ---- the coin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [100, 2])
def test_the_coin_is_fair_however_rounds_are_cut(longest: int) -> None:
    """The flips are independent with P(one) = p, also the first, and where a run is cut.

    Public code forces a local step first. Every flip is compared with p, and every pair of
    neighbours with p².
    """
    p, num = 0.3, 1500
    hyper = {"average_probability": p, "local_lr": 0.01}
    sim = lanes(num, 8, {"longest_run": longest}, hyper)
    flips: list[list[int]] = [[] for _ in range(num)]
    while not sim.finished:
        ones, zeros = coins(sim)
        for flip, one, zero in zip(flips, ones, zeros, strict=True):
            flip += [1] * int(one) + [0] * min(int(zero), longest)
        sim.step()
    shortest = 8  # every round has a flip, so all runs have these
    table = np.array([flip[:shortest] for flip in flips])
    error = 4 * math.sqrt(p * (1 - p) / num)
    np.testing.assert_allclose(table.mean(0), p, atol=error)
    both = (table[:, 1:] * table[:, :-1]).mean(0)
    np.testing.assert_allclose(both, p**2, atol=4 * p * math.sqrt(1 / num))


def test_the_share_of_flips_that_exchange_models_is_p_times_1_minus_p() -> None:
    """p* = 1/3: after the first round, 2/9 of all flips cost an exchange (a one after a zero)."""
    num, rounds = 400, 30
    sim = lanes(num, rounds, PAPER, {"prox_strength": 2.0})
    sim.step()
    flips = np.zeros(num)
    for _ in range(rounds - 1):
        ones, zeros = coins(sim)
        assert ones.min() == zeros.min() == 1
        flips += ones + zeros
        sim.step()
    # The length of a round has mean 9/2 and variance (1−p)/p² + p/(1−p)² = 6.75.
    error = 4 * math.sqrt(6.75 / (num * (rounds - 1)))
    assert flips.sum() / (num * (rounds - 1)) == pytest.approx(9 / 2, abs=error)
    assert (num * (rounds - 1)) / flips.sum() == pytest.approx(2 / 9, abs=error * (2 / 9) ** 2)


def test_a_run_of_ones_costs_one_exchange() -> None:
    """Every round, however many ones, sends a model (and two lengths) down and a model up."""
    sim = lanes(1, 12, {}, {"average_probability": 0.6, "local_lr": 0.01})
    seen = []
    while not sim.finished:
        seen.append(int(coins(sim)[0][0]))
        sim.step()
    assert max(seen) > 2
    ledger = sim.ledger()
    assert ledger.bytes_down.tolist() == [[3 * (8 + 16)] * 12]
    assert ledger.bytes_up.tolist() == [[3 * 8] * 12]


def test_rows_of_a_sweep_flip_their_own_coins() -> None:
    """The lengths follow the swept p: rare averages mean long runs of zeros."""
    fed, _ = quadratics(*Q3)
    task = quadratic_task()
    rows = [{"average_probability": p, "local_lr": 0.01} for p in (0.05, 0.5)]
    method = build("l2gd", task, Local(), {})
    sim = simulation(method, task, [fed] * 2, hyper=rows, seeds=[1, 1], rounds=30, eval_every=30)
    total = np.zeros((2, 2))
    while not sim.finished:
        total += np.stack(coins(sim))
        sim.step()
    assert total[1, 0] > 4 * total[1, 1]
    assert total[0, 0] < total[0, 1]


# ---- the trajectory ------------------------------------------------------------------------------


def test_the_iterates_follow_the_coins_and_average_to_the_optimum() -> None:
    """Flip by flip in numpy gives the engine's models; their time average is x(λ) on quadratics.

    The average at an exchange is that of the models after the last zeros. The squared error obeys
    the theorem's bound at every flip.
    """
    num, rounds, warm = 1000, 50, 14
    p, eta, lam, m = 1 / 3, 1 / 12, 2.0, 3
    sim = lanes(num, rounds, PAPER, {"prox_strength": lam})
    x, total, flips = np.zeros((num, m)), np.zeros(m), 0
    errors = np.zeros((40, num))
    at = np.zeros(num, dtype=int)  # how many flips each run has behind it

    def visit(x: np.ndarray, active: np.ndarray, t: int) -> None:
        nonlocal total, flips
        seen = active & (at < len(errors))
        errors[at[seen], np.nonzero(seen)[0]] = np.square(x - OPTIMUM).sum(1)[seen]
        at[active] += 1
        if t >= warm:
            total, flips = total + x[active].sum(0), flips + int(active.sum())

    for t in range(rounds):
        ones, zeros = coins(sim)
        np.testing.assert_allclose(sim.server["params"]["w"][:, 0], x.mean(1), atol=1e-12)
        for k in range(int(ones.max())):
            active = ones > k
            visit(x, active, t)
            x = np.where(active[:, None], 0.5 * x + 0.5 * x.mean(1, keepdims=True), x)
        for k in range(int(zeros.max())):
            active = zeros > k
            visit(x, active, t)
            x = np.where(active[:, None], x - 0.125 * A * (x - C), x)
        sim.step()
        np.testing.assert_allclose(models(sim), x, atol=1e-11)
    assert flips > 150_000
    np.testing.assert_allclose(total / flips, OPTIMUM, atol=0.02)
    assert (total / flips).mean() == pytest.approx(11 / 3, abs=0.02)
    slope = (A * (OPTIMUM - C)) ** 2 / (1 - p) + (lam * (OPTIMUM - 11 / 3)) ** 2 / p
    sigma2 = slope.sum() / m**2
    left = (1 - eta * 1.0) ** np.arange(len(errors)) * np.square(OPTIMUM).sum()
    bound = left + 2 * m * (m * eta) * sigma2 / 1.0
    full = at.min() >= len(errors)
    assert full
    assert (errors.mean(1) <= bound).all()


def test_smaller_steps_come_closer() -> None:
    """It converges to a neighbourhood that shrinks with the step."""
    hyper = [{**THIRD, "local_lr": eta} for eta in (1 / 12, 1 / 48) for _ in range(100)]
    sim = run(lanes(200, 45, {}, hyper))
    wide, narrow = np.square(models(sim) - OPTIMUM).sum(1).reshape(2, 100).mean(1)
    assert narrow < 0.4 * wide


def test_models_before_training_are_those_after_the_ones() -> None:
    """What an evaluation scores, and hands out, is where the coming round's zeros will start."""
    sim = lanes(1, 9, {}, {**THIRD, "average_probability": 0.5})
    for _ in range(3):
        sim.step()
    ones, zeros = coins(sim)
    c = 2.0 / 12 / 0.5
    x = models(sim)[0]
    wanted = x.mean() + (1 - c) ** ones[0] * (x - x.mean())
    np.testing.assert_allclose(used(sim), wanted, atol=1e-14)
    for _ in range(int(zeros[0])):
        wanted = wanted - (1 / 12 / 0.5) * A * (wanted - C)
    sim.step()
    np.testing.assert_allclose(models(sim)[0], wanted, atol=1e-14)


# ---- who takes part ------------------------------------------------------------------------------


def test_all_clients_take_part_whatever_the_rule() -> None:
    """participation="all" has no sampling, as the paper."""
    some = run(lanes(1, 3, {}, THIRD, participation=1))
    everybody = run(lanes(1, 3, {}, THIRD, participation=1.0))
    np.testing.assert_array_equal(models(some), models(everybody))
    assert some.ledger().participants.tolist() == [[3, 3, 3]]


def test_sampled_clients_move_alone_and_make_the_average() -> None:
    """participation="sampled": the others keep their models, and x̄ is the mean of the sampled."""
    sim = lanes(1, 6, {"participation": "sampled"}, THIRD, participation=2)
    moved = []
    for t in range(6):
        before = models(sim)[0]
        cohort, trains, _ = sim.rounds.draw(sim.method, "train", t)
        ids = cohort[0][trains[0]]
        sim.step()
        after = models(sim)[0]
        away = np.setdiff1d(range(3), ids)
        np.testing.assert_array_equal(after[away], before[away])
        assert centre(sim) == pytest.approx(after[ids].mean(), abs=1e-14)
        moved.append(tuple(sorted(ids)))
    assert {len(ids) for ids in moved} == {2}
    assert len(set(moved)) > 1
    assert (models(sim)[0][1:] != 0).all()


def test_large_clients_count_as_much_as_small_ones() -> None:
    """The mean is plain, 1/m each, whatever the numbers of samples."""
    sim = q3("l2gd", Local(), hyper=THIRD, rounds=2, samples=[1, 5, 9])
    assert centre(sim) == pytest.approx(personal(sim).mean(), abs=1e-14)
    wanted = personal(q3("l2gd", Local(), hyper=THIRD, rounds=2))
    np.testing.assert_allclose(personal(sim), wanted, atol=1e-14)


def test_an_empty_round_keeps_the_average() -> None:
    """If nobody reports, x̄ stays, and the coin goes on."""
    method = build("l2gd", quadratic_task(), Local(), {"longest_run": 3})
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in THIRD.items()}
    ctx = ServerContext(
        hyper=numbers,
        key=torch.tensor([5, 6]),
        round=None,
        sizes=torch.tensor([1, 1, 1]),
        cohort=torch.arange(3),
        present=torch.zeros(3, dtype=torch.bool),
    )
    mean = {"w": torch.tensor([2.5], dtype=torch.float64)}
    server = {"params": mean, "ones": torch.tensor(1), "zeros": torch.tensor(8)}
    uploads = {"params": {"w": torch.full((3, 1), torch.nan, dtype=torch.float64)}}
    after = method.aggregate(server, uploads, ctx)
    assert torch.equal(after["params"]["w"], mean["w"])
    assert (int(after["ones"]), int(after["zeros"])) == (0, 5)  # five zeros of eight are left
    assert method.use.centre is not None
    assert torch.equal(method.use.centre(after, ctx)["w"], mean["w"])


# ---- the door ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "options", "words"),
    [
        (Local(momentum=0.9), {}, "leave momentum out"),
        (Local(), {"longest_run": 0}, "longest_run must be >= 1"),
        (Local(), {"preset": "paper"}, "needs smoothness=L > 0"),
    ],
)
def test_what_cannot_be_right_is_refused(local: Local, options: dict, words: str) -> None:
    """With a word on how to mend it."""
    with pytest.raises(ConfigError, match=words):
        build("l2gd", net_task(), local, options)


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"average_probability": 1.0}, "no client would train"),
        ({"prox_strength": [0.1, 0.2, 0.3]}, "one value for all clients"),
        ({"local_lr": [0.1, 0.2, 0.3]}, "one value for all clients"),
    ],
)
def test_numbers_that_break_the_average_are_refused(hyper: dict, words: str) -> None:
    """At p = 1 nobody trains; coefficients that differ would move the average."""
    with pytest.raises(ConfigError, match=words):
        lanes(1, 1, {}, hyper)


def test_the_papers_preset_leaves_nothing_to_set_but_the_pull() -> None:
    """Both p and η follow from λ and L, so that setting them is an error; η obeys the theorem."""
    method = build("l2gd", net_task(), Local(weight_decay=0.1), PAPER)
    assert set(method.hyper) == {"prox_strength", "weight_decay"}
    p = proximal.average_probability(2.0, 4.0)
    assert proximal.l2gd_limit(2.0, 4.0, p) == pytest.approx(proximal.l2gd_lr(2.0, 4.0))
