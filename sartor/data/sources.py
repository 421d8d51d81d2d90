"""Federations from other libraries: one torch Dataset per client, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import FederationError, MissingExtraError, did_you_mean
from sartor.data.arrays import from_arrays, standardised
from sartor.data.checks import check, raise_faults
from sartor.data.encoding import Array
from sartor.data.samples import Samples
from sartor.data.split import Ragged
from sartor.data.tables import from_dataframe

_PARTS = ("train", "val", "test")
_WORDS = {"validation": "val", "valid": "val", "dev": "val"}


def from_torch(
    datasets: Mapping[str, Any],
    *,
    test: float = 0.25,
    val: float = 0.0,
    seed: int = 0,
    stratify: bool = False,
    num_classes: int | None = None,
    task: str | None = None,
    tokens: bool = False,
    standardise: bool = False,
    min_samples: int = 0,
) -> Samples:
    """Make a federation from one ``torch.utils.data.Dataset`` per client.

    Args:
        datasets: name of a client -> its data set of pairs (x, y); or a dict with its data sets
            "train", "test" and perhaps "val", whose division is then kept for all clients.
        test: the fraction of every client's samples held out for testing.
        val: the fraction held out for validation.
        seed: seed of the division.
        stratify: keep the class shares of every client in each part.
        num_classes: see ``Federation.from_arrays``.
        task: see ``Federation.from_arrays``.
        tokens: keep integer features as token ids.
        standardise: see ``Federation.from_arrays``.
        min_samples: leave out clients with fewer training samples than this.

    Raises:
        FederationError: one message with the faults of all clients.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> one = TensorDataset(torch.randn(8, 3), torch.tensor([0, 1] * 4))
        >>> from sartor.data import Federation
        >>> Federation.from_torch({"bonn": one, "oslo": one}).names
        ('bonn', 'oslo')
    """
    if not isinstance(datasets, Mapping) or not datasets:
        raise FederationError(
            "from_torch needs a dict from a client's name to its data set, such as "
            f"{{'bonn': dataset}}, got {type(datasets).__name__}."
        )
    faults: list[str] = []
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    names: list[str] = []
    parts: list[str] = []
    divided = [isinstance(value, Mapping) for value in datasets.values()]
    if any(divided) and not all(divided):
        raise FederationError(
            "Some clients have one data set and some a dict of train and test; give all alike."
        )
    for name, given in datasets.items():
        for part, dataset in (given if isinstance(given, Mapping) else {"": given}).items():
            kind = _WORDS.get(part, part)
            where = f"Client {name}" + (f", {part}" if part else "")
            if part and kind not in _PARTS:
                faults.append(f"{where}: there is no such part{did_you_mean(part, _PARTS)}")
                continue
            found = _read(dataset, where, faults)
            if found is not None:
                xs.append(found[0])
                ys.append(found[1])
                names += [str(name)] * len(found[1])
                parts += [kind] * len(found[1])
    for role, tensors in (("x", xs), ("y", ys)):
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            faults.append(
                f"{role} has different shapes in different clients: {sorted(shapes)}; give all "
                "samples one shape."
            )
    raise_faults(faults)
    marks = np.array(parts)
    made = from_arrays(
        torch.cat(xs),
        torch.cat(ys),
        client=np.array(names),
        names=[str(name) for name in datasets],
        test=marks == "test" if all(divided) else test,
        val=0.0 if (marks == "val").any() else val,
        seed=seed,
        stratify=stratify,
        num_classes=num_classes,
        task=task,
        tokens=tokens,
        min_samples=min_samples,
        info={"source": "torch"},
    )
    made = _held_out(made, marks == "val")
    return standardised(made) if standardise else made


def from_hf(
    dataset: Any,
    client_column: str,
    *,
    label: str | Sequence[str] = "label",
    text: str | None = None,
    image: str | None = None,
    **rest: Any,
) -> Samples:
    """Make a federation from a Hugging Face data set with a column that names the client.

    Args:
        dataset: a ``datasets.Dataset``; a ``DatasetDict`` with "train" and "test" (and perhaps
            "validation"), whose division is kept; or a name for ``datasets.load_dataset``, which
            needs ``pip install 'sartor[hf]'``.
        client_column: the column that names the client of a row.
        label: the column of the label, or several of 0 and 1.
        text: a column of texts to learn from.
        image: a column of images to learn from, scaled to [0, 1]; found by its type if None.
        rest: see ``sartor.data.tables.from_dataframe``, and for images ``Federation.from_arrays``.

    Raises:
        FederationError: one message with all faults.
    """
    if isinstance(dataset, str):
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise MissingExtraError(
                "To load a data set by name, Hugging Face's datasets is needed; install it with: "
                "pip install 'sartor[hf]'"
            ) from error
        dataset = load_dataset(dataset)
    given = dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}
    kinds = {part: _WORDS.get(part, part) for part in given}
    wrong = [part for part, kind in kinds.items() if part and kind not in _PARTS]
    if wrong or not all(hasattr(one, "column_names") for one in given.values()):
        raise FederationError(
            "from_hf needs a datasets.Dataset, or a DatasetDict of train, validation and test; got "
            f"{type(dataset).__name__}" + (f" with the parts {', '.join(given)}." if wrong else ".")
        )
    first = next(iter(given.values()))
    known = list(first.column_names)
    wanted = [client_column, *([label] if isinstance(label, str) else label), text, image]
    faults = [
        f"The data set has no column {name!r}{did_you_mean(name, known)}"
        for name in wanted
        if name is not None and name not in known
    ]
    raise_faults(faults)
    types = getattr(first, "features", None) or {}
    if image is None and text is None:
        pictures = [name for name in known if type(types.get(name)).__name__ == "Image"]
        image = pictures[0] if pictures else None
    columns = {n: [v for one in given.values() for v in one[n]] for n in known if n != image}
    if isinstance(label, str) and (classes := getattr(types.get(label), "names", None)):
        columns[label] = [classes[value] if value >= 0 else None for value in columns[label]]
    marks = np.array([kinds[part] for part, one in given.items() for _ in range(len(one))])
    if any(kinds.values()):
        rest["test"] = marks == "test"
    if image is not None:
        pixels = _images([v for one in given.values() for v in one[image]], image)
        clients = np.array([str(value) for value in columns[client_column]])
        if isinstance(label, str):
            y: Any = columns[label]
        else:
            y, rest = np.stack([columns[n] for n in label], 1), {"task": "multilabel"} | rest
        made = from_arrays(pixels, y, client=clients, info={"source": "huggingface"}, **rest)
    else:
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        roles: dict[str, Any] = {"client": client_column, "label": label, "text_column": text}
        made = from_dataframe(arrays, source="huggingface", **roles, **rest)
    return _held_out(made, marks == "val")


def _read(dataset: Any, where: str, faults: list[str]) -> tuple[Tensor, Tensor] | None:
    """Return all samples of a data set, or note what is wrong with it."""
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:
        x, y = tensors
    else:
        try:
            items = [dataset[i] for i in range(len(dataset))]
        except (TypeError, NotImplementedError) as error:
            faults.append(f"{where}: a data set needs a length and positions ({error}).")
            return None
        pairs = [item for item in items if isinstance(item, tuple | list) and len(item) == 2]
        if len(pairs) < len(items):
            faults.append(f"{where}: {len(items) - len(pairs)} items are not pairs (x, y).")
            return None
        try:
            x = torch.stack([torch.as_tensor(one) for one, _ in pairs]) if pairs else torch.empty(0)
            y = torch.stack([torch.as_tensor(one) for _, one in pairs]) if pairs else torch.empty(0)
        except (TypeError, ValueError, RuntimeError) as error:
            faults.append(
                f"{where}: items cannot be stacked ({error}); every x and y must be numbers of one "
                "shape, for example with transform=ToTensor()."
            )
            return None
    if not len(x):
        faults.append(f"{where}: the data set has no samples.")
        return None
    return x, y


def _held_out(made: Samples, is_val: Array) -> Samples:
    """Move the rows that are marked from training to validation."""
    if not is_val.any():
        return made
    check(made)
    rows, owner = made.train.rows.numpy(), made.train.owner.numpy()
    held = is_val[rows]
    train, val = (
        Ragged.from_owner(rows[chosen], owner[chosen], made.num_clients) for chosen in (~held, held)
    )
    return replace(made, train=train, val=val)


def _images(values: Sequence[Any], name: str) -> Array:
    """Return images as ``(samples, channels, height, width)`` float32 between 0 and 1."""
    found = []
    for value in values:
        pixels = np.asarray(value)
        pixels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
        found.append(pixels.astype(np.float32) / (255.0 if pixels.dtype == np.uint8 else 1.0))
    shapes = sorted({image.shape for image in found})
    if len(shapes) > 1:
        raise FederationError(
            f"Images of column {name!r} have {len(shapes)} different shapes ({shapes[:3]}, ...); "
            "resize and convert them first, with dataset.map(...)."
        )
    return np.stack(found)
