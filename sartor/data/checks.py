"""What a federation refuses: every check returns sentences, one for each fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.core.errors import FederationError, PFLError, did_you_mean
from sartor.data.samples import MATRIX_TASKS, TASKS, Samples
from sartor.data.split import SPLITS, Int, Ragged

OwnersOf = Callable[[Int], list[str]]
_MANY_CLASSES = 10_000  # fewer need no sample each: a federation may hold a part of them
_CHUNK = 65_536  # samples looked at together when a fault is searched, to bound memory


def raise_faults(
    faults: Sequence[str], where: str = "the data", kind: type[PFLError] = FederationError
) -> None:
    """Raise one error that lists every fault, or return if there is none."""
    if not faults:
        return
    listed = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(faults, 1))
    error = kind(faults[0] if len(faults) == 1 else f"{len(faults)} faults in {where}:\n{listed}")
    if isinstance(error, FederationError):
        error.faults = tuple(faults)
    raise error


def check(found: Samples) -> None:
    """Raise one error with everything that keeps samples from being trained on."""
    raise_faults(structural_faults(found))
    raise_faults(sample_faults(found, found.owners_of) + leak_faults(found))


def matrix_faults(x: Tensor, y: Tensor, num_classes: int, task: str, owners: OwnersOf) -> list[str]:
    """List what is wrong with labels of which every sample has several."""
    if task == "multilabel":
        if y.ndim != 2 or not y.is_floating_point() or y.shape[1] != num_classes:
            return [
                f"y of a multi-label task must be real of shape (samples, {num_classes}), got "
                f"{y.dtype} of shape {tuple(y.shape)}."
            ]
        bad = np.flatnonzero(((y != 0) & (y != 1)).any(1).numpy())
        said, fix = "have labels other than 0 and 1", "give 1 for every label that holds, else 0"
    else:
        if y.ndim != 2 or y.dtype != torch.int64 or y.shape != x.shape:
            return [
                f"y of a next-token task must hold one int64 token id for every step of x, got "
                f"{y.dtype} of shape {tuple(y.shape)} for x of shape {tuple(x.shape)}."
            ]
        bad = np.flatnonzero(((y < 0) | (y >= num_classes)).any(1).numpy())
        said = f"have token ids outside 0..{num_classes - 1} (0 is padding)"
        fix = "number tokens from 1, and pass a num_classes above the largest"
    if not len(bad):
        return []
    return [f"{len(bad)} samples {said}: rows {some_of(bad)}{of_clients(bad, owners)}; {fix}."]


def structural_faults(found: Samples) -> list[str]:
    """List what keeps the parts of a federation from fitting together."""
    clients, samples, names = found.num_clients, len(found.x), found.names
    faults: list[str] = []
    if found.task not in TASKS:
        hint = did_you_mean(found.task, TASKS)
        faults.append(f"There is no task {found.task!r}{hint}")
    if samples != len(found.y):
        faults.append(f"x has {samples} samples and y {len(found.y)}; they must agree.")
    if not names:
        faults.append("There are no clients; a federation needs at least one.")
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        faults.append(f"Client names must differ; given twice: {', '.join(twice[:5])}.")
    for name in SPLITS:
        faults += ragged_faults(name, found.split(name), clients, samples)
    if not faults:
        faults += empty_faults(found.train, names)
    try:
        json.dumps(found.info)
    except (TypeError, ValueError) as error:
        faults.append(f"info must hold JSON-able values only: {error}.")
    return faults


def sample_faults(found: Samples, owners: OwnersOf) -> list[str]:
    """List features and labels that cannot be trained on."""
    x, y, classes, task = found.x, found.y, found.num_classes, found.task
    faults = feature_faults(x, owners)
    if task in MATRIX_TASKS:
        return faults + matrix_faults(x, y, classes, task, owners)
    return faults + label_faults(y, classes, owners)


def leak_faults(found: Samples) -> list[str]:
    """List clients that are tested on their own training samples."""
    splits, samples = {name: found.split(name) for name in SPLITS}, len(found.x)
    rows = torch.cat([split.rows for split in splits.values()])
    if len(rows) <= samples and int(torch.bincount(rows).max()) <= 1:
        return []
    faults = []
    cells = {name: split.owner * samples + split.rows for name, split in splits.items()}
    for one, other in (("train", "test"), ("train", "val"), ("val", "test")):
        both = np.intersect1d(cells[one].numpy(), cells[other].numpy())
        if len(both):
            who = sorted({found.names[cell // samples] for cell in both[:1000].tolist()})
            faults.append(
                f"{len(both)} samples are in {one} and in {other} of the same client "
                f"({', '.join(who[:5])}); keep the splits apart."
            )
    return faults


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
                f"{len(bad)} samples have NaN or infinite features: rows {some_of(bad)}"
                f"{of_clients(bad, owners)}; drop or fill them."
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
                f"{len(bad)} targets are NaN or infinite: rows {some_of(bad)}"
                f"{of_clients(bad, owners)}; drop or fill them."
            )
    elif y.dtype != torch.int64:
        faults.append(f"y has dtype {y.dtype}; class labels must be int64.")
    elif len(y) and not (int(y.min()) >= 0 and int(y.max()) < num_classes):
        bad = np.flatnonzero(((y < 0) | (y >= num_classes)).numpy())
        faults.append(
            f"{len(bad)} labels are out of range 0..{num_classes - 1}: rows {some_of(bad)} have "
            f"{some_of(y.numpy()[bad])}{of_clients(bad, owners)}; classes are counted from 0, and "
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
    rows, offsets = split.rows, split.offsets
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
    shown = some([names[i] for i in empty], 10)
    who = f"Client {shown} has" if len(empty) == 1 else f"{len(empty)} clients ({shown}) have"
    return [
        f"{who} no training samples, so nothing can be trained there; leave out such clients "
        "with min_samples=1 (from_arrays, from_folder), or give them samples."
    ]


def some(values: Sequence[Any] | npt.NDArray[Any], most: int = 5) -> str:
    """Show the first few of some values."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


def some_of(values: Any) -> str:
    """Show the first five of some numbers."""
    return some([f"{value:g}" for value in values[:6].tolist()])


def of_clients(rows: Int, owners: OwnersOf) -> str:
    """Name the first five clients of some rows, in brackets."""
    names = [name for name in dict.fromkeys(owners(rows[:1000])) if name]
    if not names:
        return ""
    return f" (client{'s' if len(names) > 1 else ''} {some(names)})"
