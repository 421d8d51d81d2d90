"""Arrays that a user gives, as the tensors that a federation holds.

What cannot be converted is noted in a list of faults, so that all of them are reported at once
(``sartor.data.checks.raise_faults``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.core.task import PADDING
from sartor.data.checks import OwnersOf, of_clients, some_of
from sartor.data.samples import MATRIX_TASKS
from sartor.data.split import Bool, Int

IGNORED = -100
"""The label that PyTorch's losses pass over; in a next-token task it becomes padding."""


COARSE = 1e-3
"""The share of a column's deviation that rounding may take: more would show in a fit."""


def as_features(x: Any, tokens: bool, faults: list[str], exact: bool = False) -> Tensor | None:
    """Return features as real numbers (or int64, for tokens), or note why it cannot be.

    See :func:`as_real` for their precision.
    """
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            faults.append(
                f"x has dtype {array.dtype}; features must be numbers of one shape per sample. "
                "Convert them first, for example with x.astype('float32')."
            )
            return None
        x = torch.from_numpy(np.ascontiguousarray(array).astype(_native(array.dtype), copy=False))
    if x.is_complex():
        faults.append("x is complex; give real features, for example real and imaginary parts.")
        return None
    if x.ndim == 0:
        faults.append("x is a single number; give an array with one row per sample.")
        return None
    features: Tensor = x.detach().cpu()
    if tokens:
        if features.is_floating_point():
            faults.append(
                f"x has dtype {x.dtype}, but tokens=True expects integer token ids; convert them, "
                "for example with x.astype(int), or leave out tokens=True for real features."
            )
            return None
        return features.to(torch.int64).contiguous()
    return as_real(features, exact).contiguous()


def as_real(values: Tensor, exact: bool = False) -> Tensor:
    """Return numbers in single precision, or in double where that would be coarse or is asked for.

    Numbers that single precision does not reach are returned in it, as infinities, which are
    refused later.

    >>> [as_real(torch.tensor(v).double() + 1).dtype for v in ([10**8, 10**8 + 1], [0, 1])]
    [torch.float64, torch.float32]
    """
    return values.to(torch.float64 if exact or is_coarse(values) else torch.float32)


def is_coarse(values: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a type rounds some column by a noticeable share of its standard deviation."""
    if values.dtype in (dtype, torch.bool, torch.uint8) or len(values) < 2:
        return False
    rows = values.reshape(len(values), -1).double()
    lost = (rows - rows.to(dtype)).abs().amax(0)
    varies = torch.isfinite(lost) & (rows.amax(0) > rows.amin(0))
    return bool((varies & (lost > COARSE * rows.std(0))).any())


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the nearest type that torch can take over: machine order, no half-known widths."""
    if dtype.kind == "f":
        return np.dtype(np.float32) if dtype.itemsize <= 4 else np.dtype(np.float64)
    if dtype.kind == "b" or dtype == np.dtype(np.uint8):
        return dtype
    return np.dtype(np.int64)


def as_labels(
    y: Any,
    num_classes: int | None,
    faults: list[str],
    owners: OwnersOf,
    task: str | None = None,
    exact: bool = False,
) -> tuple[Tensor | None, list[str]]:
    """Return labels as int64 (real for regression), and the class names if they were text."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else plain(y)
    if task in MATRIX_TASKS:
        return _matrix(array, task, faults), []
    if array.ndim != 1:
        faults.append(f"y must hold one label per sample, got shape {array.shape}; use y.ravel().")
        return None, []
    if array.dtype.kind in "US":
        values, labels = np.unique(array.astype(str), return_inverse=True)
        return torch.from_numpy(labels.astype(np.int64)), [str(v) for v in values.tolist()]
    if array.dtype.kind not in "biuf":
        faults.append(
            f"y has dtype {array.dtype}; labels must be whole numbers or strings. Convert them, "
            "for example with y.astype(int) or y.astype(str)."
        )
        return None, []
    if num_classes == 0:
        return as_real(torch.from_numpy(array.astype(_native(array.dtype))), exact), []
    if array.dtype.kind == "f":
        broken = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if len(broken):
            faults.append(
                f"{len(broken)} labels are not whole numbers (rows {some_of(broken)}: "
                f"{some_of(array[broken])}){of_clients(broken, owners)}; classes are 0, 1, ...; "
                "for regression pass num_classes=0."
            )
            return None, []
    return torch.from_numpy(array.astype(np.int64)), []


def _matrix(array: npt.NDArray[Any], task: str, faults: list[str]) -> Tensor | None:
    """Return the labels of a task that has several for every sample."""
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        what = {"multilabel": "one 0 or 1 per label", "next-token": "one token id per step"}[task]
        faults.append(
            f"y of the task {task!r} must be of shape (samples, ...) with {what}, got an array of "
            f"shape {array.shape} and dtype {array.dtype}."
        )
        return None
    if task == "multilabel":
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype.kind == "f":
        faults.append(
            f"y of the task {task!r} must be whole token ids, got {array.dtype}; convert it, for "
            "example with y.astype(int)."
        )
        return None
    ids = array.astype(np.int64)
    return torch.from_numpy(np.where(ids == IGNORED, PADDING, ids))


def plain(values: Any) -> npt.NDArray[Any]:
    """Return an array; one of Python objects that are all text becomes text."""
    array = np.asarray(values)
    if array.dtype == object and all(isinstance(value, str) for value in array.flat):
        return array.astype(np.str_)
    return array


def client_ids(
    client: Any, names: Sequence[str] | None, faults: list[str]
) -> tuple[Int | None, tuple[str, ...]]:
    """Return the position of every sample's client, and the names."""
    ids = plain(client)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUSb" or ids.dtype == np.bool_:
        faults.append(
            f"client must be one integer or string per sample, got an array of shape {ids.shape} "
            f"and dtype {ids.dtype}; convert it, for example with client.astype(str)."
        )
        return None, ()
    if names is None:
        values, positions = np.unique(ids, return_inverse=True)
        return positions.astype(np.int64), tuple(str(value) for value in values.tolist())
    known = tuple(str(name) for name in names)
    if ids.dtype.kind in "iu":
        positions = ids.astype(np.int64)
        outside = np.flatnonzero((positions < 0) | (positions >= len(known)))
        values = positions
    else:
        place = {name: i for i, name in enumerate(known)}
        texts, inverse = np.unique(ids.astype(str), return_inverse=True)
        positions = np.array([place.get(text, -1) for text in texts.tolist()], np.int64)[inverse]
        outside, values = np.flatnonzero(positions < 0), ids
    if len(outside):
        wrong = ", ".join(str(values[row]) for row in outside[:5])
        faults.append(
            f"{len(outside)} samples belong to clients that are not in names ({wrong}); integer "
            f"ids are positions 0..{len(known) - 1} in names, strings must be members of it."
        )
        return None, known
    return positions, known


def as_mask(test: Any, faults: list[str]) -> Bool | None:
    """Return the marks of the test samples as booleans, or note why they are none."""
    marks = np.asarray(test)
    if marks.ndim != 1 or marks.dtype.kind not in "biu" or not np.isin(marks, (0, 1)).all():
        faults.append(
            f"test must be a fraction, such as 0.25, or one True or False per sample; got "
            f"{type(test).__name__} of shape {marks.shape} and dtype {marks.dtype}."
        )
        return None
    return marks.astype(np.bool_)


def check_fractions(given: dict[str, float], faults: list[str]) -> None:
    """Note fractions that leave nothing to train on."""
    wrong = [name for name, value in given.items() if not 0 <= value < 1]
    faults += [f"{name} must be a fraction in [0, 1), got {given[name]}." for name in wrong]
    if not wrong and sum(given.values()) >= 1:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        faults.append(f"test + val must stay below 1 to leave samples to train on, got {shown}.")
