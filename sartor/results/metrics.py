"""The numbers of a result, as pure functions of counts and accuracies.

One definition of every measure, for all methods and engines. The last axis is always clients;
accuracies are shares in [0, 1] (a client without test samples is NaN and is left out); nothing
here knows about models, rounds on a device, or files.

==============  =====================================================================
symbol          meaning
==============  =====================================================================
M               number of clients
m_i             test samples of client i (``count``)
a_i             accuracy of client i on its own test samples (``accuracy``)
g_i             a_i minus the accuracy that client i reaches alone (``gain``)
T               number of rounds
R               number of repeats (runs that differ by their seed alone)
==============  =====================================================================

Two spreads exist and are never printed with the same sign: over repeats (:func:`spread`, sample
formula, ddof = 1) and over clients (:func:`variance_over_clients`, population formula).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOOR = 10
"""Clients with fewer test samples are too noisy for the worst client and for quantiles."""

FEW = 5
"""With fewer repeats than this, every value is listed beside mean and standard deviation."""


# --- one client, then all clients ---------------------------------------------------------------


def client_accuracy(correct: npt.ArrayLike, count: npt.ArrayLike) -> Array:
    """Return correct / count per client, NaN where a client has no test samples.

    >>> client_accuracy([9, 0], [10, 0])
    array([0.9, nan])
    """
    correct, count = np.asarray(correct, dtype=np.float64), np.asarray(count, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(count > 0, correct / count, np.nan)


def micro(correct: npt.ArrayLike, count: npt.ArrayLike) -> Array:
    """Return the pooled accuracy: all correct answers over all test samples, (..., clients) each.

    NaN where nobody has a test sample or an entry is NaN.

    >>> round(float(micro([90, 5], [100, 10])), 4)
    0.8636
    """
    correct, count = np.broadcast_arrays(
        np.asarray(correct, dtype=np.float64), np.asarray(count, dtype=np.float64)
    )
    return client_accuracy(correct.sum(axis=-1), count.sum(axis=-1))


def macro(accuracy: npt.ArrayLike) -> Array:
    """Return the plain mean over clients with test samples, each client alike.

    >>> float(macro([0.9, 0.5]))
    0.7
    """
    accuracy = np.asarray(accuracy, dtype=np.float64)
    known = np.isfinite(accuracy)
    total = np.where(known, accuracy, 0.0).sum(axis=-1)
    return client_accuracy(total, known.sum(axis=-1))


def balanced_accuracy(correct: npt.ArrayLike, count: npt.ArrayLike) -> Array:
    """Return the mean recall over the classes that a client has, from (..., classes) of each."""
    return macro(client_accuracy(correct, count))


# --- the distribution over clients --------------------------------------------------------------


class Worst(NamedTuple):
    """The worst client among those with enough test samples."""

    value: float  # its accuracy, NaN when no client has enough samples
    client: int  # its index, -1 when there is none
    excluded: int  # clients that were left out because of too few test samples


def _enough(accuracy: npt.ArrayLike, count: npt.ArrayLike | None, floor: int) -> Array:
    accuracy = np.asarray(accuracy, dtype=np.float64)
    keep = np.isfinite(accuracy)
    if count is not None:
        keep &= np.asarray(count) >= floor
    return np.asarray(keep)


def worst_client(
    accuracy: npt.ArrayLike, count: npt.ArrayLike | None = None, floor: int = FLOOR
) -> Worst:
    """Return the lowest accuracy among clients with at least ``floor`` test samples.

    >>> worst_client([0.9, 0.5, 0.0], [100, 40, 2])
    Worst(value=0.5, client=1, excluded=1)
    """
    accuracy = np.asarray(accuracy, dtype=np.float64)
    keep = _enough(accuracy, count, floor)
    excluded = int((~keep).sum())
    if not keep.any():
        return Worst(math.nan, -1, excluded)
    client = int(np.argmin(np.where(keep, accuracy, np.inf)))
    return Worst(float(accuracy[client]), client, excluded)


def worst_share(
    accuracy: npt.ArrayLike,
    percent: float,
    count: npt.ArrayLike | None = None,
    floor: int = FLOOR,
) -> float:
    """Return the mean of the ceil(percent * M / 100) lowest accuracies.

    >>> worst_share([0.95, 0.9, 0.85, 0.8, 0.5], 20)
    0.5
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be in (0, 100], got {percent}; use 10 for the worst tenth.")
    accuracy = np.asarray(accuracy, dtype=np.float64)
    kept = np.sort(accuracy[_enough(accuracy, count, floor)])
    if not kept.size:
        return math.nan
    # The small shift keeps 20% of 5 at one client when the product is 1.0000000000000002.
    number = max(1, math.ceil(percent * kept.size / 100 - 1e-9))
    return float(kept[:number].mean())


def finite(accuracy: npt.ArrayLike) -> Array:
    """Return the values that are neither NaN nor infinite, in order."""
    accuracy = np.asarray(accuracy, dtype=np.float64)
    return np.asarray(accuracy[np.isfinite(accuracy)])


def variance_over_clients(accuracy: npt.ArrayLike) -> float:
    """Return (1/M) sum (a_i - mean)^2, the population variance over clients."""
    known = finite(accuracy)
    return float(known.var()) if known.size else math.nan


def jain_index(accuracy: npt.ArrayLike) -> float:
    """Return (sum a)^2 / (M sum a^2), in [1/M, 1]; all zero counts as perfectly even.

    >>> round(jain_index([0.95, 0.9, 0.85, 0.8, 0.5]), 6)
    0.962406
    """
    known = finite(accuracy)
    if not known.size:
        return math.nan
    squares = float((known**2).sum())
    return 1.0 if squares == 0 else float(known.sum() ** 2 / (known.size * squares))


class Gain(NamedTuple):
    """What federating did to the clients that could be compared with training alone."""

    mean: float  # of g_i over the clients
    minimum: float
    fraction_hurt: float  # share of clients with g_i < 0
    hurt: int
    clients: int


def gain(accuracy: npt.ArrayLike, alone: npt.ArrayLike) -> Gain:
    """Return mean, minimum and the share of hurt clients of g_i = accuracy_i - alone_i.

    >>> gain([0.75, 0.5], [0.5, 1.0])
    Gain(mean=-0.125, minimum=-0.5, fraction_hurt=0.5, hurt=1, clients=2)
    """
    gains = finite(np.asarray(accuracy, dtype=np.float64) - np.asarray(alone, dtype=np.float64))
    if not gains.size:
        return Gain(math.nan, math.nan, math.nan, 0, 0)
    hurt = int((gains < 0).sum())
    return Gain(float(gains.mean()), float(gains.min()), hurt / gains.size, hurt, gains.size)


# --- a curve over rounds ------------------------------------------------------------------------


def last(curve: Sequence[float] | Array, number: int = 1) -> float:
    """Return the mean of the last ``number`` evaluations (fewer, if there are fewer)."""
    tail = np.asarray(curve, dtype=np.float64)[-number:]
    return float(tail.mean()) if tail.size else math.nan


def best_test(curve: Sequence[float] | Array) -> float:
    """Return the maximum over evaluations: optimistic, for comparison with papers that do so."""
    known = finite(np.asarray(curve))
    return float(known.max()) if known.size else math.nan


def best_val(test: Sequence[float] | Array, validation: Sequence[float] | Array) -> float:
    """Return the test accuracy of the evaluation with the best validation accuracy.

    The first one wins among equals, as a run that stops early would have it.

    >>> best_val([0.7, 0.8, 0.9], [0.6, 0.9, 0.8])
    0.8
    """
    test = np.asarray(test, dtype=np.float64)
    validation = np.asarray(validation, dtype=np.float64)
    if test.shape != validation.shape:
        raise ValueError(
            f"test and validation curves must be of one length, got {test.size} and "
            f"{validation.size}; evaluate both splits at the same rounds."
        )
    known = np.isfinite(validation)
    if not known.any():
        return math.nan
    return float(test[int(np.argmax(np.where(known, validation, -np.inf)))])


def rounds_to_target(
    rounds: Sequence[int], curve: Sequence[float] | Array, target: float, window: int = 3
) -> int | None:
    """Return the first round at which the mean of ``window`` evaluations reaches ``target``.

    The window ends at the round returned, so that the answer could have been known then. None
    means "not reached", which is a result and not an error.

    >>> rounds_to_target([0, 1, 2, 3, 4], [0.1, 0.9, 0.2, 0.8, 0.9], 0.6)
    3
    """
    values = np.asarray(curve, dtype=np.float64)
    for end in range(window, len(values) + 1):
        # A hair of slack: three times 0.9 must reach 0.9 although 2.7 / 3 may round below it.
        if values[end - window : end].mean() >= target - 1e-12:
            return int(rounds[end - 1])
    return None


# --- repeats ------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Mean and sample standard deviation (ddof = 1) over repeats."""

    mean: float  # of the repeats that have a value
    std: float  # NaN for fewer than two
    values: tuple[float, ...]  # all, in order; the ones to list when there are fewer than five


def spread(values: npt.ArrayLike) -> Spread:
    """Return mean ± sample standard deviation of the repeats; NaN repeats (diverged) stay out.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, values=(1.0, 2.0, 3.0))
    """
    every = np.atleast_1d(np.asarray(values, dtype=np.float64))
    known = finite(every)
    mean = float(known.mean()) if known.size else math.nan
    std = float(known.std(ddof=1)) if known.size > 1 else math.nan
    return Spread(mean, std, tuple(float(value) for value in every))


class Paired(NamedTuple):
    """Paired differences and the t-interval of their mean."""

    mean: float
    std: float  # sample formula (ddof = 1); NaN for fewer than two pairs, as low and high
    low: float
    high: float
    number: int  # of pairs


def paired(
    values: npt.ArrayLike,
    reference: npt.ArrayLike,
    confidence: float = 0.95,
    overlap: float = 0.0,
) -> Paired:
    """Return the mean of ``values - reference`` with its two-sided t-interval.

    Pairs with a missing member are left out. The interval supposes independent pairs whose
    differences are roughly normal: fair for repeats, a mere description over clients of one run.
    Repeats that divide the same samples have an ``overlap`` of n_test/n_train, which makes it wider
    (Nadeau and Bengio, 2003).

    >>> pair = paired([0.9, 0.8, 0.7], [0.8, 0.7, 0.6])
    >>> round(pair.mean, 6), pair.number
    (0.1, 3)
    """
    differences = finite(
        np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    )
    number = int(differences.size)
    if number == 0:
        return Paired(math.nan, math.nan, math.nan, math.nan, 0)
    mean = float(differences.mean())
    if number == 1:
        return Paired(mean, math.nan, math.nan, math.nan, 1)
    std = float(differences.std(ddof=1))
    error = std * math.sqrt(1 / number + overlap)
    half = t_quantile(0.5 + confidence / 2, number - 1) * error
    return Paired(mean, std, mean - half, mean + half, number)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t with ``degrees`` degrees of freedom.

    Bisection on the distribution function, which is a regularised incomplete beta function;
    accurate to about 1e-10, and written here because the core has no scipy.

    >>> round(t_quantile(0.975, 4), 4)
    2.7764
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(
            f"probability must be in (0, 1) and degrees >= 1, got {probability} and {degrees}."
        )
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) for t >= 0."""
    return 1 - 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised I_x(a, b) by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for k in range(1, 500):
        even = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        odd = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1))
        previous = value
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= c * d
        if abs(value - previous) < 1e-15 * abs(value):
            break
    return front * value
