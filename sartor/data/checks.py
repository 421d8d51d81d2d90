"""What a federation refuses at the door: conversions and checks of features and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.data.split import Bool, Int, Ragged
from sartor.errors import FederationError

OwnersOf = Callable[[Int], list[str]]
TASKS = ("classification", "multilabel", "regression", "next-token")
"""What there is to learn."""

MATRIX_TASKS = ("multilabel", "next-token")
"""Tasks whose samples have several labels each."""

IGNORED = -100
"""The label that PyTorch's losses pass over; in a next-token task it becomes padding, 0."""

_MANY_CLASSES = 10_000  # fewer need no sample each: a federation may hold a part of them
_CHUNK = 65_536  # samples looked at together when a fault is searched, to bound memory


def raise_faults(faults: Sequence[str]) -> None:
    """Raise one error that lists every fault, or return if there is none."""
    if not faults:
        return
    listed = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(faults, 1))
    text = faults[0] if len(faults) == 1 else f"{len(faults)} faults in the data:\n{listed}"
    error = FederationError(text)
    error.faults = tuple(faults)
    raise error


def as_mask(test: Any, faults: list[str]) -> Bool | None:
    """Return the marks of the test samples as booleans, or note why they are none."""
    marks = np.asarray(test)
    if marks.ndim != 1 or marks.dtype.kind not in "biu" or not np.isin(marks, (0, 1)).all():
        faults.append(
            f"test must be a fraction, or one True or False per sample; got {type(test).__name__} "
            f"of shape {marks.shape} and dtype {marks.dtype}."
        )
        return None
    return marks.astype(np.bool_)


def plain(values: Any) -> npt.NDArray[Any]:
    """Return an array; one of Python objects that are all text becomes text."""
    array = np.asarray(values)
    if array.dtype == object and all(isinstance(value, str) for value in array.flat):
        return array.astype(np.str_)
    return array


def is_mask(test: Any) -> bool:
    """Tell whether ``test`` marks samples, rather than being a fraction."""
    return not isinstance(test, int | float | np.number)


def check_fractions(test: Any, val: float, faults: list[str]) -> None:
    """Note fractions that leave nothing to train on."""
    given = [("val", val)] if test is None else [("test", test), ("val", val)]
    for name, value in given:
        if not 0 <= value < 1:
            faults.append(f"{name} must be a fraction in [0, 1), got {value}.")
    if all(0 <= value < 1 for _, value in given) and sum(value for _, value in given) >= 1:
        faults.append(f"test + val must stay below 1 to leave samples to train on, got {given}.")


def as_features(x: Any, tokens: bool, faults: list[str]) -> Tensor | None:
    """Return features as a float32 (or int64, for tokens) tensor, or note why it cannot be."""
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
        faults.append("x is a single number; it needs one row per sample.")
        return None
    features: Tensor = x.detach().cpu()
    if tokens:
        if features.is_floating_point():
            faults.append(f"x has dtype {x.dtype}, but tokens=True expects integer token ids.")
            return None
        return features.to(torch.int64).contiguous()
    return features.to(torch.float32).contiguous()


def as_labels(
    y: Any, num_classes: int | None, faults: list[str], owners: OwnersOf, task: str | None = None
) -> tuple[Tensor | None, list[str]]:
    """Return labels as int64 (float32 for regression), and the class names if they were text."""
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
        return torch.from_numpy(array.astype(np.float32)), []
    if array.dtype.kind == "f":
        broken = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if len(broken):
            faults.append(
                f"{len(broken)} labels are not whole numbers (rows {_some(broken)}: "
                f"{_some(array[broken])}){_of_clients(broken, owners)}; classes are 0, 1, ...; for "
                "regression pass num_classes=0."
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
        faults.append(f"y of the task {task!r} must be whole token ids, got {array.dtype}.")
        return None
    ids = array.astype(np.int64)
    return torch.from_numpy(np.where(ids == IGNORED, 0, ids))


def matrix_faults(x: Tensor, y: Tensor, num_classes: int, task: str, owners: OwnersOf) -> list[str]:
    """List what is wrong with labels of which every sample has several."""
    if task == "multilabel":
        if y.ndim != 2 or not y.is_floating_point() or y.shape[1] != num_classes:
            return [
                f"y of a multi-label task must be real of shape (samples, {num_classes}), got "
                f"{y.dtype} of shape {tuple(y.shape)}."
            ]
        bad = np.flatnonzero(((y != 0) & (y != 1)).any(1).numpy())
        said = "have labels other than 0 and 1"
    else:
        if y.ndim != 2 or y.dtype != torch.int64 or y.shape != x.shape:
            return [
                f"y of a next-token task must hold one int64 token id for every step of x, got "
                f"{y.dtype} of shape {tuple(y.shape)} for x of shape {tuple(x.shape)}."
            ]
        bad = np.flatnonzero(((y < 0) | (y >= num_classes)).any(1).numpy())
        said = f"have token ids outside 0..{num_classes - 1} (0 is padding)"
    if not len(bad):
        return []
    return [f"{len(bad)} samples {said}: rows {_some(bad)}{_of_clients(bad, owners)}."]


def feature_faults(x: Tensor, owners: OwnersOf) -> list[str]:
    """List samples whose features are not finite, with their clients."""
    # A sum is finite only if every term is; the slow search runs only when it is not.
    if x.is_floating_point() and x.numel() and not bool(torch.isfinite(x.sum())):
        flat = x.reshape(len(x), -1)
        bad = np.concatenate(
            [
                np.flatnonzero(~torch.isfinite(flat[i : i + _CHUNK]).all(1).numpy()) + i
                for i in range(0, len(flat), _CHUNK)
            ]
        )
        if len(bad):
            return [
                f"{len(bad)} samples have NaN or infinite features: rows {_some(bad)}"
                f"{_of_clients(bad, owners)}; drop or fill them."
            ]
    return []


def label_faults(y: Tensor, num_classes: int, owners: OwnersOf) -> list[str]:
    """List labels that are out of range, or targets that are not finite, with their clients."""
    faults: list[str] = []
    if num_classes < 0:
        faults.append(f"num_classes must be >= 0 (0 for regression), got {num_classes}.")
    elif num_classes == 0:
        if not y.is_floating_point():
            faults.append(f"num_classes is 0 (regression), but y has dtype {y.dtype}, not float.")
        elif not bool(torch.isfinite(y).all()):
            bad = np.flatnonzero(~torch.isfinite(y).numpy())
            faults.append(
                f"{len(bad)} targets are NaN or infinite: rows {_some(bad)}"
                f"{_of_clients(bad, owners)}; drop or fill them."
            )
    elif y.dtype != torch.int64:
        faults.append(f"y has dtype {y.dtype}; class labels must be int64.")
    elif len(y) and not (int(y.min()) >= 0 and int(y.max()) < num_classes):
        bad = np.flatnonzero(((y < 0) | (y >= num_classes)).numpy())
        faults.append(
            f"{len(bad)} labels are out of range 0..{num_classes - 1}: rows {_some(bad)} have "
            f"{_some(y.numpy()[bad])}{_of_clients(bad, owners)}; classes are counted from 0, and "
            "num_classes must exceed the largest."
        )
    return faults


def class_faults(y: Tensor, classes: int) -> list[str]:
    """Note labels that are hardly classes: ids or times would make a network of their size."""
    if classes <= max(len(y), _MANY_CLASSES):
        return []
    return [
        f"Labels go up to {classes - 1}, but there are only {len(y)} samples: are they classes 0, "
        "1, ...? Name the column of the label with label= (--label); or number the classes from 0; "
        "or, if there are that many, pass num_classes."
    ]


def ragged_faults(name: str, split: Ragged, clients: int, samples: int) -> list[str]:
    """List what is wrong with the rows of one split."""
    rows, offsets = split
    if rows.dtype != torch.int64 or offsets.dtype != torch.int64:
        return [f"{name} must hold int64 rows and offsets, got {rows.dtype}, {offsets.dtype}."]
    if len(offsets) != clients + 1:
        return [f"{name} is over {len(offsets) - 1} clients, but there are {clients} names."]
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(rows) or bool((split.sizes < 0).any()):
        return [f"{name}.offsets must rise from 0 to {len(rows)}, the number of rows."]
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < samples):
        return [f"{name}.rows must lie in 0..{samples - 1}, the rows of x."]
    return []


def empty_faults(train: Ragged, names: Sequence[str]) -> list[str]:
    """List the clients that have nothing to train on."""
    empty = torch.nonzero(train.sizes == 0).flatten().tolist()
    if not empty:
        return []
    shown = ", ".join(names[i] for i in empty[:10]) + (", ..." if len(empty) > 10 else "")
    who = f"Client {shown} has" if len(empty) == 1 else f"{len(empty)} clients ({shown}) have"
    return [
        f"{who} no training samples, so nothing can be trained there; leave out such clients "
        "with min_samples=1 (from_arrays, from_folder), or give them samples."
    ]


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


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the nearest type that torch can take over: machine order, no half-known widths."""
    if dtype.kind == "f":
        return np.dtype(np.float32) if dtype.itemsize <= 4 else np.dtype(np.float64)
    if dtype.kind == "b" or dtype == np.dtype(np.uint8):
        return dtype
    return np.dtype(np.int64)


def _some(values: Any) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:5].tolist())
    return shown + (", ..." if len(values) > 5 else "")


def _of_clients(rows: Int, owners: OwnersOf) -> str:
    names = [name for name in dict.fromkeys(owners(rows[:1000])) if name]
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f" (client{'s' if len(names) > 1 else ''} {shown})"
