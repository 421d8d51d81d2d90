"""Quadratic programmes over the simplex: exact answers, with a proof, and never an exception."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from sartor.methods.parts import simplex

KINDS = ("random", "singular", "equal", "grid", "tiny variances", "large", "a line", "mixed zeros")


def _programmes(kind: str, seed: int, num: int, dim: int = 4) -> np.ndarray:
    """Make P^(i) of every client: (num, num, num)."""
    draw = np.random.default_rng([seed, num])
    h, v = draw.normal(size=(num, dim)), draw.exponential(size=num)
    if kind == "singular":
        v = np.zeros(num)
    elif kind == "equal":
        h = h[draw.integers(0, min(2, num), num)]
        v = np.where(draw.random(num) < 0.4, 0.0, 0.3)
    elif kind == "grid":
        h, v = np.round(h), np.round(v, 1)
    elif kind == "tiny variances":
        v = v * 10.0 ** draw.integers(-9, 0, num)
    elif kind == "large":
        h, v = 1e6 * h, 1e-3 * v
    elif kind == "a line":
        h, v = h[:, :1], 1e-6 * v
    elif kind == "mixed zeros":
        v = np.where(draw.random(num) < 0.5, 0.0, v)
    apart = h[:, None] - h[None]
    return apart @ apart.transpose(0, 2, 1) + np.diag(v)


def _solve(p: np.ndarray, **how: int) -> np.ndarray:
    num = p.shape[-1]
    found = simplex.minimise(
        torch.from_numpy(p), torch.ones(num, num, dtype=torch.bool), torch.arange(num), **how
    )
    return found.numpy()


def _value(p: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ijk,ik->i", alpha, p, alpha)


def _brute(p: np.ndarray) -> float:
    """Return the minimum by trying every support."""
    best, num = np.inf, len(p)
    for size in range(1, num + 1):
        for some in itertools.combinations(range(num), size):
            kkt = np.ones((size + 1, size + 1))
            kkt[:size, :size], kkt[size, size] = p[np.ix_(some, some)], 0.0
            found = np.linalg.lstsq(kkt, np.eye(size + 1)[size], rcond=None)[0][:size]
            if found.min() >= -1e-9 and abs(found.sum() - 1) < 1e-6:
                found = found.clip(0) / found.clip(0).sum()
                best = min(best, found @ p[np.ix_(some, some)] @ found)
    return best


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_is_that_of_all_supports_tried(kind: str) -> None:
    """No support gives less, on random, singular, degenerate and badly scaled programmes."""
    for seed, num in itertools.product(range(4), (1, 2, 3, 5)):
        p = _programmes(kind, seed, num)
        value = _value(p, _solve(p))
        for i in range(num):
            scale = np.diag(p[i]).max()
            assert abs(value[i] - _brute(p[i])) <= 1e-12 * scale


@given(st.sampled_from(KINDS), st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 30))
def test_every_answer_has_its_proof(kind: str, seed: int, num: int, dim: int) -> None:
    """Answers lie on the simplex, and the gap that bounds what is missing is rounding."""
    p = _programmes(kind, seed, num, dim)
    alpha = _solve(p)
    assert alpha.min() >= 0
    np.testing.assert_allclose(alpha.sum(-1), 1.0, atol=1e-12)
    everybody = torch.ones(num, num, dtype=torch.bool)
    gap = simplex.gap(torch.from_numpy(p), torch.from_numpy(alpha), everybody).numpy()
    scale = np.einsum("ijj->ij", p).max(-1)
    assert (gap <= 1e-9 * np.einsum("iii->i", p) + 1e-13 * scale).all()


@pytest.mark.parametrize("kind", ["random", "grid", "mixed zeros"])
def test_scipy_finds_nothing_better(kind: str) -> None:
    """SLSQP from the middle of the simplex ends at the same value, or above it."""
    num = 8
    p = _programmes(kind, 5, num)
    value = _value(p, _solve(p))
    for i in range(num):
        found = optimize.minimize(
            lambda a, q=p[i]: a @ q @ a,
            np.full(num, 1 / num),
            jac=lambda a, q=p[i]: 2 * q @ a,
            bounds=[(0, 1)] * num,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-13, "maxiter": 500},
        )
        assert -1e-7 <= found.fun - value[i] <= 1e-5


def test_many_clients_need_few_pivots() -> None:
    """With sixty clients a fourth of the default is enough for every one of them."""
    p = _programmes("random", 0, 60, 30)
    alpha = _solve(p, pivots=15)
    assert (alpha.max(-1) < 1.0).all()  # nobody fell back to oneself


def test_the_gap_is_zero_at_the_minimum_only() -> None:
    """P = diag(1, 2): α = (2/3, 1/3); at (1/2, 1/2) the gap is 3/4 − 1/2."""
    p = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    both = torch.ones(2, dtype=torch.bool)
    best = simplex.minimise(p, both, torch.tensor(0))
    torch.testing.assert_close(best, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert float(simplex.gap(p, best, both)) == pytest.approx(0.0, abs=1e-15)
    assert float(simplex.gap(p, torch.full_like(best, 0.5), both)) == pytest.approx(0.25)


def test_entries_that_are_not_allowed_stay_zero() -> None:
    """The answer is that of the smaller programme, whatever stands in the rows left out."""
    p = torch.from_numpy(_programmes("random", 3, 6)[0])
    allowed = torch.tensor([True, True, False, True, False, True])
    wanted = simplex.minimise(p[allowed][:, allowed], torch.ones(4, dtype=torch.bool), _zero())
    p[2], p[:, 4] = torch.nan, torch.inf
    found = simplex.minimise(p, allowed, _zero())
    torch.testing.assert_close(found[allowed], wanted)
    assert not found[~allowed].any()


def _zero() -> torch.Tensor:
    return torch.tensor(0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_programme_is_answered_by_oneself(bad: float) -> None:
    """A number that is not finite gives weight 1 on oneself, and leaves its neighbours alone."""
    p = torch.from_numpy(_programmes("random", 1, 5))
    wanted = _solve(p.numpy())
    p[2, 1, 3] = bad
    found = _solve(p.numpy())
    np.testing.assert_array_equal(found[2], np.eye(5)[2])
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(wanted, 2, 0))


def test_an_answer_without_proof_is_oneself() -> None:
    """Too few pivots, or a matrix that is not positive semidefinite, end at weight 1 on oneself."""
    p = _programmes("random", 1, 5)
    np.testing.assert_array_equal(_solve(p, pivots=1)[3], np.eye(5)[3])
    negative = np.tile(-np.eye(3), (3, 1, 1))
    np.testing.assert_array_equal(_solve(negative), np.eye(3))


def test_ties_are_broken_for_oneself() -> None:
    """Where e_own is as good as anything, it is the answer: no variance, or nothing at all."""
    np.testing.assert_array_equal(_solve(np.zeros((4, 4, 4))), np.eye(4))
    p = _programmes("singular", 2, 6)
    np.testing.assert_array_equal(_solve(p), np.eye(6))


def test_the_scale_of_the_programme_does_not_matter() -> None:
    """P and cP have the same answer, for c from 1e-30 to 1e30."""
    p = _programmes("random", 4, 7)
    for c in (1e-30, 1e-6, 1e6, 1e30):
        np.testing.assert_allclose(_solve(c * p), _solve(p), atol=1e-12)


def test_runs_are_one_more_axis() -> None:
    """Under vmap over runs every programme has the answer that it has alone."""
    p = torch.from_numpy(np.stack([_programmes(k, 7, 6) for k in KINDS]))
    allowed = torch.ones(6, 6, dtype=torch.bool)
    found = torch.func.vmap(lambda q: simplex.minimise(q, allowed, torch.arange(6)))(p)
    for k in range(len(KINDS)):
        torch.testing.assert_close(
            found[k], simplex.minimise(p[k], allowed, torch.arange(6)), rtol=0, atol=1e-12
        )


def test_single_precision_is_solved_in_double() -> None:
    """The answer is float64, and exact for the programme as it was given."""
    p = torch.from_numpy(_programmes("random", 4, 7)).float()
    found = simplex.minimise(p, torch.ones(7, 7, dtype=torch.bool), torch.arange(7))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), _solve(p.double().numpy()), atol=1e-14)
