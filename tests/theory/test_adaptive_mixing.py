"""Theorem 1 and Corollary 1 of FedAPA: the fall of a client's loss over one round."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.local import Local
from sartor.core.task import Task, never
from sartor.core.task import given as loss_given
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import build
from sartor.theory.adaptive_mixing import Problem, local_lr_range, mix_lr_limit, round_bound
from tests.toys import simulation

EXAMPLE = Problem(smoothness=1.0, lipschitz=1.0, radius=1.0, num_steps=2, noise=0.5)
RAW = {"clip_weights": False, "pin_weights": False, "normalise_weights": False}


def test_the_numbers_of_corollary_1() -> None:
    """S = 4, L_1 = L_2 = Max = 1, E = 2, σ² = ½, t = 0, η = 0.1: 0.051669 < α < 1.548331."""
    low, high = local_lr_range(4.0, 0.1, 0, EXAMPLE)
    assert low == pytest.approx(0.051669, abs=5e-7)
    assert high == pytest.approx(1.548331, abs=5e-7)
    assert mix_lr_limit(4.0, 0, EXAMPLE) == pytest.approx(0.8)


def test_the_number_of_theorem_1() -> None:
    """From F = 3 with α = 0.2, η = 0.1, t = 1: 3 − 0.18·4 + 0.02 + 0.4; the last term by M = 5."""
    args = (3.0, 4.0, 0.2, 0.1, 1)
    assert round_bound(*args, EXAMPLE) == pytest.approx(2.7)
    many = Problem(1.0, 1.0, 1.0, 2, noise=0.5, num_clients=5)
    assert round_bound(*args, many) == pytest.approx(2.7)
    assert round_bound(*args, many, "safe") == pytest.approx(4.3)
    assert round_bound(*args, many, "simplex") == pytest.approx(4.3)
    wide = Problem(2.0, 3.0, 2.0, 2, noise=0.5, num_clients=5)
    assert round_bound(*args, wide) == pytest.approx(3 - 0.16 * 4 + 0.04 + 9.6)
    assert round_bound(*args, wide, "simplex") == pytest.approx(3 - 0.16 * 4 + 0.04 + 12)


@given(
    st.floats(0.1, 10),
    st.floats(0.05, 0.95),
    st.integers(0, 20),
    st.floats(0.1, 5),
    st.floats(0.1, 5),
    st.floats(0.1, 3),
    st.floats(0, 2),
)
def test_the_range_is_where_the_bound_falls(
    total: float, share: float, t: int, big: float, lip: float, radius: float, noise: float
) -> None:
    """Inside the interval the bound is below the loss, at its ends equal, outside above."""
    problem = Problem(big, lip, radius, 3, noise)
    eta = share * mix_lr_limit(total, t, problem)
    low, high = local_lr_range(total, eta, t, problem)
    assert 0 < low < high

    def change(alpha: float) -> float:
        return round_bound(0.0, total, alpha, eta, t, problem)

    for end in (low, high):
        assert change(end) == pytest.approx(0.0, abs=1e-8 * max(1.0, end * total))
    assert change((low + high) / 2) < 0
    assert change(0.9 * low) > 0
    assert change(1.1 * high) > 0


def test_beyond_the_limit_on_the_mixing_step_no_rate_is_safe() -> None:
    """The interval closes at η = S²/(4 L_1 L_2 (t+1) Max³ (S + Eσ²))."""
    limit = mix_lr_limit(4.0, 3, EXAMPLE)
    low, high = local_lr_range(4.0, limit * (1 - 1e-9), 3, EXAMPLE)
    assert low == pytest.approx(high, rel=1e-3)
    assert math.isnan(local_lr_range(4.0, limit * (1 + 1e-9), 3, EXAMPLE)[0])


def test_a_constant_mixing_step_leaves_its_range() -> None:
    """The limit falls as 1/(t+1): 0.8 in round 0 is 0.08 in round 9."""
    found = [mix_lr_limit(4.0, t, EXAMPLE) for t in range(10)]
    np.testing.assert_allclose(found, 0.8 / np.arange(1, 11))


def test_without_a_mixing_step_it_is_the_descent_lemma() -> None:
    """η = 0: every 0 < α < 2/L_1 lowers the loss if there is no noise."""
    assert local_lr_range(4.0, 0.0, 0, Problem(2.5, 1.0, 1.0, 2)) == (0.0, pytest.approx(0.8))


def test_the_norm_of_the_table_may_exceed_its_largest_column() -> None:
    """Ones of 3 × 4: spectral norm 3.464, largest column 1.732; √M times that always suffices."""
    ones = np.ones((3, 4))
    assert np.linalg.norm(ones, 2) == pytest.approx(3.4641, abs=5e-5)
    assert np.linalg.norm(ones, axis=0).max() == pytest.approx(1.7321, abs=5e-5)
    draw = np.random.default_rng(0)
    for _ in range(20):
        table = draw.normal(size=(3, 4))
        column = np.linalg.norm(table, axis=0).max()
        assert np.linalg.norm(table, 2) <= 2.0 * column


# ---- runs ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One client's round: its losses at the download, after training, at the next download."""

    round: int
    loss: float
    trained: float
    later: float
    gradient_sum: float
    problem: Problem


def _run(
    bend: np.ndarray,
    centres: np.ndarray,
    start: np.ndarray,
    local_lr: float,
    mix_lr: float,
    steps: int,
    rounds: int = 8,
    **kind: Any,
) -> list[Step]:
    """Run FedAPA on quadratics, with the gradients and constants of every client and round."""
    num, dim = centres.shape
    fed, _ = quadratics(bend, centres)
    module = Quadratic(dim).double()
    with torch.no_grad():
        module.w.copy_(torch.from_numpy(start))
    task = Task(module, None, loss_given, never)
    method = build("fedapa", task, Local(steps=steps, batch=None, lr=local_lr), kind)
    sim = simulation(
        method, task, [fed], hyper={"mix_lr": mix_lr}, rounds=rounds, participation="all", points=()
    )

    def table() -> np.ndarray:
        found: np.ndarray = sim.server["bodies"]["w"][0].numpy()
        return found

    def downloads() -> np.ndarray:
        return np.stack([sim.params(i, point="pre")["w"].numpy() for i in range(num)])

    def losses(w: np.ndarray) -> np.ndarray:
        found: np.ndarray = 0.5 * (bend * np.square(w - centres)).sum(1)
        return found

    found, now = [], downloads()
    radius = np.linalg.norm(table(), axis=1).max()
    for t in range(rounds):
        sim.step()
        w, total = now.copy(), np.zeros(num)
        for _ in range(steps):
            slope = bend * (w - centres)
            total += np.square(slope).sum(1)
            w -= local_lr * slope
        np.testing.assert_allclose(table(), w, rtol=0, atol=1e-6)
        later = downloads()
        radius = max(radius, *(np.linalg.norm(x, axis=1).max() for x in (now, w, later)))
        for i in range(num):
            ball = radius + np.linalg.norm(centres[i])
            problem = Problem(bend[i].max(), bend[i].max() * ball, radius, steps, 0.0, num)
            parts = (losses(now)[i], losses(w)[i], losses(later)[i], total[i])
            found.append(Step(t, *map(float, parts), problem))
        now = later
    return found


def _toy(seed: int, *args: Any, **kind: Any) -> list[Step]:
    draw = np.random.default_rng(seed)
    bend, centres = draw.uniform(0.3, 2.0, (4, 3)), draw.normal(size=(4, 3))
    return _run(bend, centres, 0.3 * draw.normal(size=3), *args, **kind)


@pytest.mark.parametrize("sign", ["descent", "as_printed"])
@pytest.mark.parametrize(("alpha", "eta", "steps"), [(0.3, 0.01, 2), (0.8, 0.05, 1), (0.1, 0.2, 5)])
def test_theorem_1_holds_with_the_factor_m(sign: str, alpha: float, eta: float, steps: int) -> None:
    """Nothing is clipped or normalised: the safe form holds in every round, for either sign.

    Before the download it is the descent lemma; the download may raise the loss.
    """
    found = _toy(1, alpha, eta, steps, weight_step=sign, **RAW)
    for s in found:
        args = (s.loss, s.gradient_sum, alpha, eta, s.round, s.problem)
        bound = round_bound(*args, "safe")
        assert s.later <= bound + 1e-9
        assert s.trained <= bound - s.problem.drift(eta, s.round, "safe") + 1e-9
    assert max(s.later - s.trained for s in found) > 1e-4


@pytest.mark.parametrize("eta", [0.01, 0.5, 5.0])
def test_theorem_1_holds_on_the_simplex(eta: float) -> None:
    """With all steps on A the drift is at most 2 L_2 Max, for any η."""
    for s in _toy(2, 0.3, eta, 2):
        args = (s.loss, s.gradient_sum, 0.3, eta, s.round, s.problem)
        assert s.later <= round_bound(*args, "simplex") + 1e-9


def test_the_printed_bound_fails_for_many_equal_clients() -> None:
    """64 clients at 1 with ½w², α = ½, η = 6/64: the next download is −1, F = ½ > 0.3125."""
    one = np.ones((64, 1))
    found = _run(one, 0.0 * one, one[0], 0.5, 6 / 64, 1, rounds=1, **RAW)
    for s in found[:3]:
        assert s.problem.radius == pytest.approx(1.0)
        assert s.later == pytest.approx(0.5)
        args = (s.loss, s.gradient_sum, 0.5, 6 / 64, 0, s.problem)
        assert round_bound(*args) == pytest.approx(0.3125)
        assert round_bound(*args, "safe") == pytest.approx(12.125)


def test_corollary_1_lowers_the_loss_of_a_run() -> None:
    """Where α is inside the (safe) range of a client's round, its loss falls."""
    inside = []
    for s in _toy(4, 0.3, 1e-4, 3, **RAW):
        low, high = local_lr_range(s.gradient_sum, 1e-4, s.round, s.problem, "safe")
        if low < 0.3 < high:
            inside.append(s)
            assert s.later < s.loss
    assert len(inside) > 4
