"""Measures of answers, each one a function of labels, predictions and weights of samples.

Predictions are what ``Result.predict`` gives: probabilities ``(n, classes)`` of a classification,
``(n, labels)`` of a multi-label task, targets ``(n,)`` of a regression. Definitions are those of
scikit-learn, with which the tests compare. A measure that the samples do not define, such as the
AUROC of a client that has one class, is NaN.

| measure | of two classes, p = p(second class) | of more classes |
| --- | --- | --- |
| AUROC | P(p of a positive > p of a negative), ties ½ | mean over classes, each against the rest |
| average precision | Σ (R_k − R_{k−1}) P_k, thresholds from above | the same mean |
| sensitivity, specificity | TP / (TP + FN), TN / (TN + FP), at a threshold | – |
| F1 | 2 TP / (2 TP + FP + FN) | mean over the classes that occur |
| balanced accuracy | mean recall of the classes that occur | the same |
| Brier | mean of (p − y)² | mean of Σ_c (p_c − y_c)² |
| log loss | mean of −log p(y) | the same |
| calibration error | Σ_b n_b/n · |p̄_b − ȳ_b|, 10 bins of p | of the likeliest class and its truth |

Of several labels, each label is a problem of two classes, and the measure is their mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sartor.results.metrics import Array

Weight = Array | None
Function = Callable[[Array, Array, Weight], float]
"""``(y, predictions, weight) -> value``."""

BINS = 10
"""Of a calibration curve, of equal width."""


def _weights(y: Array, weight: Weight) -> Array:
    return np.ones(len(y)) if weight is None else np.asarray(weight, dtype=np.float64)


def _mean(values: Array, weight: Array) -> float:
    total = float(weight.sum())
    return float((values * weight).sum()) / total if total > 0 else math.nan


# ---- two classes: y is 0 or 1, p the probability (or any score) of 1


def placements(y: Array, p: Array, weight: Weight = None) -> Array:
    """Return for each sample the share of the other class that is on its right side; ties ½.

    Their mean over the positives, and that over the negatives, is the AUROC (DeLong, DeLong and
    Clarke-Pearson, 1988). NaN if one class is missing.

    >>> placements(np.array([1, 0, 1]), np.array([0.9, 0.5, 0.5]))
    array([1.  , 0.75, 0.5 ])
    """
    w, p = _weights(y, weight), np.asarray(p, dtype=np.float64)
    found = np.full(len(y), np.nan)
    for own in (0, 1):
        others = y != own
        values, where = np.unique(p[others], return_inverse=True)
        if not len(values) or w[others].sum() <= 0:
            return np.full(len(y), np.nan)
        mass = np.bincount(where, w[others], len(values))
        below = np.concatenate([[0.0], np.cumsum(mass)])
        left = below[np.searchsorted(values, p[~others], "left")]
        right = below[np.searchsorted(values, p[~others], "right")]
        share = 0.5 * (left + right) / below[-1]
        found[~others] = share if own else 1.0 - share
    return found


def auroc_of_two(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the area under the ROC curve."""
    positive = np.asarray(y) == 1
    found = placements(np.asarray(y), p, weight)
    return _mean(found[positive], _weights(y, weight)[positive])


def precision_of_two(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the average precision; NaN without positives."""
    w, order = _weights(y, weight), np.argsort(-np.asarray(p), kind="stable")
    sorted_p, hits = np.asarray(p)[order], (w * (np.asarray(y) == 1))[order]
    ends = np.flatnonzero(np.append(np.diff(sorted_p) != 0, True)) if len(order) else np.array([])
    if not len(ends) or hits.sum() <= 0:
        return math.nan
    true, every = np.cumsum(hits)[ends], np.cumsum(w[order])[ends]
    precision = np.divide(true, every, out=np.zeros_like(true), where=every > 0)
    return float((np.diff(true, prepend=0.0) * precision).sum() / true[-1])


def rates(y: Array, p: Array, threshold: float = 0.5, weight: Weight = None) -> tuple[float, float]:
    """Return sensitivity and specificity where ``p >= threshold`` is taken for positive."""
    w, positive, found = _weights(y, weight), np.asarray(y) == 1, np.asarray(p) >= threshold
    return _mean(found[positive], w[positive]), _mean(~found[~positive], w[~positive])


def best_threshold(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the threshold with the largest sensitivity + specificity (Youden); ½ if undefined.

    Halfway between two neighbouring values of p; of equally good ones the nearest to ½.

    >>> best_threshold(np.array([0, 0, 1]), np.array([0.1, 0.3, 0.9]))
    0.6
    """
    w, y, values = _weights(y, weight), np.asarray(y), np.unique(p)
    if not (w[y == 1].sum() > 0 and w[y != 1].sum() > 0):
        return 0.5
    where = np.searchsorted(values, p)
    gain = np.where(y == 1, w / w[y == 1].sum(), -w / w[y != 1].sum())
    above = np.cumsum(np.bincount(where, gain, len(values))[::-1])[::-1]
    cuts = np.append(values[0], (values[1:] + values[:-1]) / 2)
    best = np.flatnonzero(above >= above.max() - 1e-12)
    return float(cuts[best[np.argmin(np.abs(cuts[best] - 0.5))]])


def calibration_curve(
    y: Array, p: Array, bins: int = BINS, weight: Weight = None
) -> tuple[Array, Array, Array]:
    """Return mean p, share of positives and weight of every bin of p that is not empty."""
    w, p = _weights(y, weight), np.asarray(p, dtype=np.float64)
    where = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], p)
    mass, sums, hits = (np.bincount(where, v, bins) for v in (w, w * p, w * (np.asarray(y) == 1)))
    seen = mass > 0
    return sums[seen] / mass[seen], hits[seen] / mass[seen], mass[seen]


def calibration_of_two(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the expected calibration error."""
    mean, share, mass = calibration_curve(y, p, BINS, weight)
    return _mean(np.abs(mean - share), mass)


def f1_of_two(y: Array, p: Array, weight: Weight = None) -> float:
    """Return F1 of ``p > ½``; NaN if there is no positive and none is found."""
    return _f1(np.asarray(y) == 1, np.asarray(p) > 0.5, _weights(y, weight))


def _f1(true: Array, found: Array, weight: Array) -> float:
    both = float(weight[true & found].sum())
    total = float(weight[true].sum() + weight[found].sum())
    return 2 * both / total if total > 0 else math.nan


# ---- any number of classes


def _one_against_rest(of_two: Function) -> Function:
    """Let a measure of two classes be the mean over the classes that it is defined for."""

    @functools.wraps(of_two)
    def measure(y: Array, p: Array, weight: Weight = None) -> float:
        if p.ndim == 1 or (p.shape[1] == 2 and np.ndim(y) == 1):
            return of_two(y, p if p.ndim == 1 else p[:, 1], weight)
        truth = np.asarray(y)
        truth = truth > 0.5 if truth.ndim == 2 else truth[:, None] == np.arange(p.shape[1])
        found = [of_two(truth[:, k].astype(int), p[:, k], weight) for k in range(p.shape[1])]
        known = [value for value in found if math.isfinite(value)]
        return float(np.mean(known)) if known else math.nan

    return measure


auroc = _one_against_rest(auroc_of_two)
average_precision = _one_against_rest(precision_of_two)


def calibration_error(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the expected calibration error: of p, or of the likeliest class."""
    if np.ndim(y) == 2:
        return _one_against_rest(calibration_of_two)(y, p, weight)
    if p.ndim == 1 or p.shape[1] == 2:
        return calibration_of_two(y, p if p.ndim == 1 else p[:, 1], weight)
    right = (p.argmax(-1) == y).astype(int)
    return calibration_of_two(right, p.max(-1), weight)


def accuracy(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the share of right answers; of several labels, of samples with all of them right."""
    w = _weights(y, weight)
    right = ((p > 0.5) == (np.asarray(y) > 0.5)).all(1) if np.ndim(y) == 2 else p.argmax(-1) == y
    return _mean(right, w)


def labels_right(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the share of labels that are right."""
    return _mean(((p > 0.5) == (y > 0.5)).mean(1), _weights(y, weight))


def balanced_accuracy(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the mean recall of the classes that occur."""
    w, right = _weights(y, weight), p.argmax(-1) == y
    mass = np.bincount(y, w, p.shape[1])
    seen = mass > 0
    recall = np.bincount(y, w * right, p.shape[1])[seen] / mass[seen]
    return float(recall.mean()) if seen.any() else math.nan


def f1(y: Array, p: Array, weight: Weight = None) -> float:
    """Return F1: of the second of two classes, else the mean over classes that occur."""
    if np.ndim(y) == 2:
        return _one_against_rest(f1_of_two)(y, p, weight)
    w, found = _weights(y, weight), p.argmax(-1)
    if p.shape[1] == 2:
        return _f1(y == 1, found == 1, w)
    each = [_f1(y == k, found == k, w) for k in np.union1d(y, found)]
    return float(np.mean(each)) if each else math.nan


def micro_f1(y: Array, p: Array, weight: Weight = None) -> float:
    """Return 2 TP / (2 TP + FP + FN) over all labels of all samples; NaN if there is nothing.

    >>> round(micro_f1(np.array([[1, 0], [1, 1]]), np.array([[0.9, 0.6], [0.2, 0.8]])), 4)
    0.6667
    """
    w = np.repeat(_weights(y, weight), y.shape[1])
    return _f1(y.ravel() > 0.5, p.ravel() > 0.5, w)


def brier(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the mean squared difference of probabilities and outcomes."""
    w = _weights(y, weight)
    if np.ndim(y) == 2:
        return _mean(np.square(p - y).mean(1), w)
    if p.shape[1] == 2:
        return _mean(np.square(p[:, 1] - y), w)
    return _mean(np.square(p - (y[:, None] == np.arange(p.shape[1]))).sum(1), w)


def log_loss(y: Array, p: Array, weight: Weight = None) -> float:
    """Return the mean of −log p(y), with p of at least the smallest difference from 1."""
    tiny = np.finfo(np.float64).eps
    if np.ndim(y) == 2:
        sure = np.clip(np.where(y > 0.5, p, 1.0 - p), tiny, 1.0)
        return _mean(-np.log(sure).mean(1), _weights(y, weight))
    chosen = np.take_along_axis(np.asarray(p, np.float64), np.asarray(y)[:, None], 1)[:, 0]
    return _mean(-np.log(np.clip(chosen, tiny, 1.0)), _weights(y, weight))


def confusion(y: Array, p: Array, weight: Weight = None) -> Array:
    """Return (classes, classes) weights of samples: rows are true classes, columns answers."""
    classes = p.shape[1]
    flat = np.bincount(y * classes + p.argmax(-1), _weights(y, weight), classes * classes)
    return np.asarray(flat.reshape(classes, classes))


# ---- numbers


def rmse(y: Array, found: Array, weight: Weight = None) -> float:
    """Return the root of the mean squared error."""
    return math.sqrt(_mean(np.square(y - found), _weights(y, weight)))


def mae(y: Array, found: Array, weight: Weight = None) -> float:
    """Return the mean absolute error."""
    return _mean(np.abs(y - found), _weights(y, weight))


def r_squared(y: Array, found: Array, weight: Weight = None) -> float:
    """Return 1 − Σ(y − ŷ)² / Σ(y − ȳ)²; NaN where y does not vary.

    >>> r_squared(np.array([0.0, 2.0]), np.array([0.0, 1.0]))
    0.5
    """
    w = _weights(y, weight)
    spread = float((w * np.square(y - _mean(y, w))).sum())
    return 1 - float((w * np.square(y - found)).sum()) / spread if spread > 0 else math.nan


def probabilities(kind: str, scores: Any) -> Array:
    """Return predictions in float64 from the scores of a network, (n, ...).

    The targets of a regression stay what they are.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if kind == "multilabel":
        return np.asarray(np.exp(-np.logaddexp(0.0, -scores)))
    if kind == "regression":
        return scores.reshape(len(scores))
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))
