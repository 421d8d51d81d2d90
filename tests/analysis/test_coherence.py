from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sartor.analysis import chance_coherence, coherence, generalized_coherence, savitzky_golay
from sartor.core.errors import ConfigError


def equicorrelated(number: int, cosine: float) -> np.ndarray:
    """Unit vectors whose cosines are all equal: rows of a Cholesky factor."""
    return np.linalg.cholesky(np.full((number, number), cosine) + (1 - cosine) * np.eye(number))


@pytest.mark.parametrize(
    ("vectors", "value"),
    [
        (np.eye(4), 0.0),
        ([[1, 0], [1, 1]], 0.5),
        ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], 5 / 6),
        (equicorrelated(3, 0.5), 0.5),
        (equicorrelated(20, 0.1), 0.608253),
        (equicorrelated(100, 0.1), 0.999678),
        ([[1, 2, 3], [2, 4, 6]], 1.0),
        ([[1, 0], [0, 1], [1, 1]], 1.0),  # more vectors than dimensions
    ],
)
def test_worked_numbers(vectors, value):
    """Orthogonal 0, dependent 1, and the numbers of the sheet."""
    assert generalized_coherence(vectors) == pytest.approx(value, abs=5e-7)


def test_two_vectors_give_the_squared_cosine():
    """K = 2: GCE = cos²."""
    v, w = np.random.default_rng(0).normal(size=(2, 7))
    cosine = v @ w / np.linalg.norm(v) / np.linalg.norm(w)
    assert generalized_coherence([v, w]) == pytest.approx(cosine**2, rel=1e-12)


def test_scale_sign_order_and_rotation_do_not_matter_and_a_vector_more_never_lowers_it():
    """The invariances of a determinant of cosines."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(5, 9))
    value = generalized_coherence(vectors)
    rotation = np.linalg.qr(rng.normal(size=(9, 9)))[0]
    scale = np.array([1e-9, -1, 1e9, 3, -0.1])
    for other in (vectors[::-1], vectors @ rotation, scale[:, None] * vectors):
        assert generalized_coherence(other) == pytest.approx(value, rel=1e-10)
    grown = [generalized_coherence(vectors[:k]) for k in range(1, 6)]
    assert grown[0] == pytest.approx(0, abs=1e-15)
    assert (np.diff(grown) > 0).all()


def test_many_vectors_do_not_underflow_and_the_logarithm_still_differs():
    """K = 400, r = 0.9: det is 1e-395 and more below the smallest float; its logarithm is known."""
    found = coherence(equicorrelated(400, 0.9))
    expected = 399 * math.log(0.1) + math.log(1 + 399 * 0.9)
    assert found.log_determinant == pytest.approx(expected, rel=1e-10)
    assert found.log_determinant_per_vector == pytest.approx(expected / 400, rel=1e-10)
    assert found.value == 1.0


def test_zero_vectors_are_left_out_and_counted_and_tensors_are_taken():
    """A client that did not move says nothing; further axes are flattened."""
    vectors = torch.zeros(4, 2, 2, dtype=torch.float32)
    vectors[0, 0, 0], vectors[2, 0, 0], vectors[2, 1, 1] = 2.0, 1.0, 1.0
    assert coherence(vectors)[::2] == pytest.approx((0.5, 2))
    assert coherence(list(vectors)).dropped == 2
    assert math.isnan(coherence(torch.zeros(2, 3)).value)
    with pytest.raises(ConfigError, match="vector 1 has an entry"):
        coherence([[1.0, 2.0], [math.nan, 1.0]])
    with pytest.raises(ConfigError, match="one vector per row"):
        coherence([1.0, 2.0])


def test_three_ways_to_the_determinant_agree(monkeypatch):
    """Cosines, the vectors themselves, and cosines where vectors are too large for that."""
    vectors = np.random.default_rng(2).normal(size=(6, 30))
    direct = coherence(vectors)
    monkeypatch.setitem(coherence.__globals__, "_CLEAR", 2.0)
    factorised = coherence(vectors)
    monkeypatch.setitem(coherence.__globals__, "MOST_ELEMENTS", 0)
    for other in (factorised, coherence(vectors)):
        assert other.log_determinant == pytest.approx(direct.log_determinant, rel=1e-10)


@pytest.mark.parametrize("angle", [1e-1, 1e-3, 1e-5, 1e-7])
def test_nearly_parallel_vectors_keep_their_digits(angle):
    """Two vectors at a small angle: log det = 2 log sin, where 1 − cos² has lost its digits."""
    found = coherence([[1.0, 0.0, 0.0], [math.cos(angle), math.sin(angle), 0.0]])
    assert found.log_determinant == pytest.approx(2 * math.log(math.sin(angle)), rel=1e-10)


@pytest.mark.parametrize("number", [10, 30])
def test_vectors_whose_pivots_do_not_show_how_dependent_they_are(number):
    """Kahan's: the least pivot is 0.002, the least eigenvalue of the cosines far smaller."""
    sine = 0.002 ** (1 / (number - 1))
    upper = np.eye(number) - math.sqrt(1 - sine**2) * np.triu(np.ones((number, number)), 1)
    vectors = (np.diag(sine ** np.arange(number)) @ upper).T
    found = coherence(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    expected = 2 * math.fsum(k * math.log(sine) for k in range(number))
    assert found.log_determinant == pytest.approx(expected, rel=1e-9)


def test_chance_is_what_random_directions_give():
    """The baseline of the sheet, and a small simulation of it."""
    assert chance_coherence(100, 7850) == pytest.approx(0.469, abs=5e-4)
    assert chance_coherence(100, 79510) == pytest.approx(0.0604, abs=5e-5)
    rng = np.random.default_rng(3)
    drawn = [generalized_coherence(rng.normal(size=(4, 12))) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(chance_coherence(4, 12), abs=0.015)


@pytest.mark.parametrize(("window", "degree"), [(3, 2), (5, 2), (7, 3), (11, 3), (5, 0), (1, 0)])
def test_the_filter_keeps_polynomials_and_agrees_with_scipy(window, degree):
    """A polynomial of the degree comes back whole, ends included; scipy's "interp" mode is ours."""
    signal = pytest.importorskip("scipy.signal")
    places = np.arange(30.0)
    polynomial = sum((k + 1) * (places / 10) ** k for k in range(degree + 1))
    np.testing.assert_allclose(savitzky_golay(polynomial, window, degree), polynomial, rtol=1e-9)
    noisy = np.random.default_rng(4).normal(size=(3, 30))
    np.testing.assert_allclose(
        savitzky_golay(noisy, window, degree),
        signal.savgol_filter(noisy, window, degree, mode="interp"),
        atol=1e-10,
    )


def test_the_filter_by_hand():
    """Window 5, degree 2: the classical weights (−3, 12, 17, 12, −3)/35."""
    impulse = np.eye(11)[5]
    expected = np.array([-3, 12, 17, 12, -3]) / 35
    np.testing.assert_allclose(savitzky_golay(impulse, 5, 2)[3:8], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "degree", "word"), [(4, 2, "odd"), (11, 3, "longer"), (3, 3, "below the window")]
)
def test_a_filter_that_cannot_be_is_refused(window, degree, word):
    """The message says which of the two numbers is wrong."""
    with pytest.raises(ConfigError, match=word):
        savitzky_golay(np.zeros(6), window, degree)
