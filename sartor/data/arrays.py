"""Federations from arrays with a client id for every sample, and their standardisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError, did_you_mean
from sartor.data.checks import (
    check,
    class_faults,
    feature_faults,
    label_faults,
    matrix_faults,
    raise_faults,
)
from sartor.data.conversion import (
    as_features,
    as_labels,
    as_mask,
    check_fractions,
    client_ids,
)
from sartor.data.encoding import client_statistics, combine_statistics, prepare
from sartor.data.samples import MATRIX_TASKS, TASKS, Samples
from sartor.data.split import Int, split_rows

_DTYPES = ("float32", "float64")


def from_arrays(
    x: Any,
    y: Any,
    *,
    client: Any,
    test: Any = 0.25,
    val: float = 0.0,
    seed: int = 0,
    stratify: bool = False,
    num_classes: int | None = None,
    names: Sequence[str] | None = None,
    min_samples: int = 0,
    tokens: bool = False,
    task: str | None = None,
    standardise: bool = False,
    dtype: str | None = None,
    info: dict[str, Any] | None = None,
) -> Samples:
    """Make a federation from arrays and a client id for every sample.

    Args:
        x: ``(samples, ...)`` numbers; array or tensor. See ``dtype``.
        y: ``(samples,)`` labels 0, 1, ..., or strings (classes in sorted order); ``(samples,
            labels)`` of 0 and 1 with ``task="multilabel"``; ``(samples, steps)`` token ids
            with ``task="next-token"``, or None for the tokens of ``x`` shifted by one.
        client: ``(samples,)`` ids, integers or strings. Without ``names``, clients are the
            distinct ids in sorted order.
        test: the fraction of every client's samples held out for testing, or ``(samples,)``
            booleans that mark the test samples.
        val: the fraction held out for validation.
        seed: seed of the division. A client's division depends on its own name and data only.
        stratify: keep the class shares of every client in each part.
        num_classes: at least the largest label + 1, which is the default; 0 for regression.
        names: all clients, in order. Integer ids are then positions in it, strings members.
        min_samples: leave out clients with fewer training samples than this.
        tokens: keep integer features as int64 token ids instead of real numbers.
        task: "classification", "multilabel", "regression" or "next-token"; by default the
            first, or regression with ``num_classes=0``.
        standardise: give every feature (every channel of images) mean 0 and deviation 1 by
            federated statistics of the training samples; ``Result.predict`` does the same.
        dtype: the precision that features and targets are held in, "float32" or "float64". By
            default float64 where float32 would round a column by more than a thousandth of its
            standard deviation, and float32 elsewhere. A run rounds them to a ``dtype`` of its own.
        info: what to remember about the origin; JSON-able.

    Returns:
        The federation, with the samples in the given order.

    Example:
        >>> from sartor.data import Federation
        >>> fed = Federation.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], client=[7, 7, 8])
        >>> fed.names, fed.train.sizes.tolist(), fed.test.sizes.tolist()
        (('7', '8'), [1, 1], [1, 0])
    """
    faults: list[str] = []
    if task is not None and task not in TASKS:
        raise FederationError(f"There is no task {task!r}{did_you_mean(task, TASKS)}")
    if task == "next-token":
        tokens = True
        x, y = next_tokens(x) if y is None else (x, y)
    num_classes = 0 if task == "regression" else num_classes
    if dtype not in (None, *_DTYPES):
        raise FederationError(f"There is no dtype {dtype!r}{did_you_mean(dtype, _DTYPES)}")
    exact = dtype == "float64"
    features = as_features(x, tokens, faults, exact)
    ids, known = client_ids(client, names, faults)

    def owners(rows: Int) -> list[str]:
        if ids is None:
            return []
        return [known[ids[row]] for row in rows if row < len(ids)]

    labels, class_names = as_labels(y, num_classes, faults, owners, task, exact)
    is_mask = not isinstance(test, int | float | np.number)
    marks = as_mask(test, faults) if is_mask else None
    check_fractions({"val": val} if is_mask else {"test": test, "val": val}, faults)
    given = {"x": features, "y": labels, "client": ids, "test": marks}
    lengths = {name: len(part) for name, part in given.items() if part is not None}
    classes = 0 if num_classes is None else num_classes
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        faults.append(f"Lengths differ: {sizes} samples; every sample needs all of them.")
    if 0 in lengths.values():
        faults.append("There are no samples; a federation needs at least one.")
    if features is not None:
        faults += feature_faults(features, owners)
    if labels is not None and task in MATRIX_TASKS:
        classes = _num_labels(task, features, labels, num_classes)
        if features is not None and len(features) == len(labels):
            faults += matrix_faults(features, labels, classes, task, owners)
    elif labels is not None:
        if num_classes is None:
            classes = max(int(labels.max()) + 1 if len(labels) else 0, 1)
            faults += class_faults(labels, classes)
        faults += label_faults(labels, classes, owners)
    raise_faults(faults)
    assert features is not None
    assert labels is not None
    assert ids is not None
    parts = split_rows(
        ids,
        known,
        test=test if marks is None else marks,
        val=val,
        seed=seed,
        classes=labels.numpy() if stratify and classes and labels.ndim == 1 else None,
    )
    record: dict[str, Any] = {"source": "arrays", "seed": seed, "stratify": stratify}
    record |= {"test": "given" if is_mask else test, "val": val}
    if class_names:
        record["class_names"] = class_names
    made = Samples(features, labels, *parts, known, classes, record, task or "")
    if min_samples > 0:
        trained = made.train.sizes
        if int(trained.max()) < min_samples:
            raise FederationError(
                f"No client has {min_samples} training samples (the largest has "
                f"{int(trained.max())}); lower min_samples."
            )
        made = made._keep(trained >= min_samples)
    made = replace(made, info=made.info | (info or {}))
    made = standardised(made, exact) if standardise else made
    return narrowed(made) if dtype == "float32" else made


def narrowed(samples: Samples) -> Samples:
    """Return samples whose real numbers are held in single precision, however coarse it is."""
    x, y = (v.float() if v.is_floating_point() else v for v in (samples.x, samples.y))
    return replace(samples, x=x, y=y)


def next_tokens(x: Any) -> tuple[Any, Any]:
    """Return the tokens before and after every step of texts: inputs and labels.

    >>> [part.tolist() for part in next_tokens([[5, 6, 7, 0]])]
    [[[5, 6, 7]], [[6, 7, 0]]]
    """
    ids = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise FederationError(
            "A next-token task without y needs texts of at least two tokens, x of shape (samples, "
            f"tokens), got shape {ids.shape}."
        )
    return ids[:, :-1], ids[:, 1:]


def standardised(samples: Samples, exact: bool = False) -> Samples:
    """Check samples and standardise real features by federated statistics.

    Statistics are per feature, or per channel of images. Every client sends count, sum and sum of
    squares of its training samples; see ``sartor.data.encoding``. The constants are kept in
    ``info["preprocessing"]``. With ``exact`` the results are held in double precision.
    """
    check(samples)
    x = samples.x
    if not x.is_floating_point() or x.ndim < 2:
        raise FederationError(
            f"standardise=True needs rows of real features, got {x.dtype} of shape "
            f"{tuple(x.shape)}; leave it out."
        )
    flat = x.numpy().astype(np.float64)
    messages = []
    for client in range(samples.num_clients):
        own = flat[samples.train.of(client).numpy()]
        values = np.moveaxis(own, 1, 0).reshape(x.shape[1], -1)
        rows = np.arange(values.shape[1])
        columns = {str(i): ("number", column) for i, column in enumerate(values)}
        messages.append(client_statistics(columns, rows))
    steps = combine_statistics(messages)
    recipe = {"kind": "scale", **{k: [step[k] for step in steps] for k in ("mean", "scale")}}
    recipe |= {"dtype": "float64"} if exact else {}
    made = torch.from_numpy(prepare(flat, recipe))
    return replace(samples, x=made, info=samples.info | {"preprocessing": recipe})


def _num_labels(task: str | None, x: Tensor | None, y: Tensor, given: int | None) -> int:
    """Return the number of labels, or of token ids: those that x and y have, or more."""
    if task == "multilabel":
        return int(y.shape[1])
    most = [int(part.max()) + 1 for part in (x, y) if part is not None and part.numel()]
    return given or max([*most, 2])
