"""Linear models of all clients, solved exactly, by NumPy alone: nothing here is of Sartor.

They are what a method is measured against (``bench.federations``): every client alone, one model
for all, and the exact optimum of FedProx. Features carry a last column of ones. A model of c
outputs is a flat vector of c rows; classification is a softmax with one row for each class, a
regression half the squared error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
STEPS, DONE = 60, 1e-10


class Samples(NamedTuple):
    """The samples of one client: features with a column of ones, and labels or targets."""

    x: Floats
    y: npt.NDArray[Any]


class Found(NamedTuple):
    """The optimum of a federation: the common model, and one model for each client."""

    mean: Floats
    models: Floats


def scores(w: Floats, x: Floats) -> Floats:
    """Return the (samples, outputs) scores of a model."""
    return x @ w.reshape(-1, x.shape[1]).T


def _softmax(f: Floats) -> tuple[Floats, Floats]:
    """Return probabilities, and the logarithms of their denominators."""
    top = f.max(1, keepdims=True)
    e = np.exp(f - top)
    total = e.sum(1, keepdims=True)
    return e / total, (np.log(total) + top)[:, 0]


def losses(w: Floats, data: Samples, classes: int) -> Floats:
    """Return the loss of every sample: log loss, or half the squared error."""
    f = scores(w, data.x)
    if not classes:
        return 0.5 * (data.y - f[:, 0]) ** 2
    return _softmax(f)[1] - f[np.arange(len(f)), data.y]


def slopes(w: Floats, data: Samples, classes: int) -> tuple[Floats, Floats]:
    """Return gradient and Hessian of the summed loss."""
    x, d = data.x, data.x.shape[1]
    if not classes:
        return x.T @ (x @ w - data.y), x.T @ x
    p = _softmax(scores(w, x))[0]
    wide = (p[:, :, None] * x[:, None, :]).reshape(len(x), -1)
    hessian = -wide.T @ wide
    for k in range(classes):
        own = slice(k * d, (k + 1) * d)
        hessian[own, own] += x.T @ wide[:, own]
    errors = p.copy()
    errors[np.arange(len(x)), data.y] -= 1.0
    return (errors.T @ x).ravel(), hessian


def size(data: Samples, classes: int) -> int:
    """Return the number of parameters of a model."""
    return data.x.shape[1] * max(classes, 1)


def intercepts(data: Samples, classes: int) -> npt.NDArray[np.bool_]:
    """Return which parameters belong to the column of ones."""
    d = data.x.shape[1]
    return np.arange(size(data, classes)) % d == d - 1


def single(data: Samples, classes: int, ridge: Floats, start: Floats | None = None) -> Floats:
    """Return argmin of the summed loss + ½ Σ ridge w², by Newton steps with a line search."""
    w = np.zeros(size(data, classes)) if start is None else start

    def cost(w: Floats) -> float:
        return float(losses(w, data, classes).sum() + 0.5 * ridge @ (w * w))

    now = cost(w)
    for _ in range(STEPS):
        slope, hessian = slopes(w, data, classes)
        slope = slope + ridge * w
        step = np.linalg.solve(hessian + np.diag(ridge), slope)
        length = 1.0
        while (new := cost(w - length * step)) > now + 1e-12 * abs(now) and length > 1e-6:
            length /= 2.0
        w, now = w - length * step, new
        if not classes or slope @ step < DONE * max(1.0, now):
            break  # a regression is solved by one step
    return w


def together(
    clients: Sequence[Samples],
    classes: int,
    pulls: Floats,
    ridge: float,
    start: Found | None = None,
) -> Found:
    """Return the optimum of FedProx over all models at once.

    It is argmin of Σ_i [L_i(w_i) + ½ λ_i |w_i − w̄|²] + ½ ridge |w̄|², L_i summed over samples. The
    system of a Newton step is an arrow: a block for each client, coupled by w̄ alone, so w̄ is solved
    for first (its Schur complement is ridge + Σ λ_i H_i⁻¹ A_i, with H_i = A_i + λ_i).

    Args:
        clients: the samples of every client.
        classes: the number of classes; 0 for regression.
        pulls: λ_i, positive.
        ridge: of w̄, positive.
        start: where to start; by default at zero.
    """
    p = size(clients[0], classes)
    mean, models = start or Found(np.zeros(p), np.zeros((len(clients), p)))
    eye = np.eye(p)

    def cost(mean: Floats, models: Floats) -> float:
        fit = sum(
            float(losses(w, one, classes).sum()) for w, one in zip(models, clients, strict=True)
        )
        return fit + float(
            0.5 * pulls @ ((models - mean) ** 2).sum(1) + 0.5 * ridge * (mean @ mean)
        )

    now = cost(mean, models)
    for _ in range(STEPS):
        down = ridge * mean
        schur, pushed, solved, gradients = ridge * eye, down.copy(), [], []
        for w, one, pull in zip(models, clients, pulls, strict=True):
            slope, a = slopes(w, one, classes)
            slope = slope + pull * (w - mean)
            both = np.linalg.solve(a + pull * eye, np.column_stack([slope, a]))
            # λ H⁻¹ = I − H⁻¹A, without a difference of large numbers.
            schur = schur + pull * both[:, 1:]
            pushed += pull * both[:, 0] - pull * (w - mean)
            down = down - pull * (w - mean)
            solved.append((both[:, 0], eye - both[:, 1:]))
            gradients.append(slope)
        move = -np.linalg.solve(schur, pushed)
        moves = np.stack([back @ move - own for own, back in solved])
        gain = -(move @ down + sum(g @ m for g, m in zip(gradients, moves, strict=True)))
        length = 1.0
        while (new := cost(mean + length * move, models + length * moves)) > now + 1e-12 * abs(
            now
        ) and length > 1e-6:
            length /= 2.0
        mean, models, now = mean + length * move, models + length * moves, new
        if not classes or gain < DONE * max(1.0, now):
            break
    return Found(mean, models)


def totals(models: Sequence[Floats], clients: Sequence[Samples], classes: int) -> tuple[float, int]:
    """Return the summed loss (regression: squared error) over all samples, and correct answers."""
    loss, correct = 0.0, 0
    for w, one in zip(models, clients, strict=True):
        loss += float(losses(w, one, classes).sum()) * (1.0 if classes else 2.0)
        if classes:
            correct += int((scores(w, one.x).argmax(1) == one.y).sum())
    return loss, correct
