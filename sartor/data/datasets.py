"""Named data sets: where their files may lie, how they are read, and how to get them.

``digits`` comes with the package and needs no file. The others are read from a data folder, the
argument ``data_dir`` or the environment variable ``SARTOR_DATA``; nothing is downloaded. Images
are scaled to [-1, 1], channels first, unless another scale is asked for; texts become token ids.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.core.errors import ConfigError, MissingDataError, did_you_mean
from sartor.data import readers, text
from sartor.data.draws import TRAIN_SHARE
from sartor.data.layouts import DATASETS, DIGITS, Layout, find_npz
from sartor.data.partition import divide, parse_partition
from sartor.data.samples import Samples
from sartor.data.split import Ragged, carve_val, split_rows

ENVIRONMENT = "SARTOR_DATA"
SCALES = ("symmetric", "unit", "standard", "pixel")
LEAF_SHARE = 0.9  # of every user, for training


@dataclass(frozen=True)
class Dataset:
    """A labelled data set in memory, official training samples first.

    Images are ``(samples, channels, height, width)`` float32 in [-1, 1]; of texts x is ``(samples,
    0)``, for their tokens depend on which clients train.
    """

    name: str
    x: Tensor
    y: Tensor  # (samples,) int64
    num_train: int | None  # official training samples; None without such a split
    num_classes: int
    source: str  # where it was found
    class_names: tuple[str, ...] = ()
    attributes: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # for partitions by them
    train_share: float = TRAIN_SHARE  # of a client, where there is no official split
    texts: tuple[tuple[str, ...], ...] = ()  # the words of every text


@dataclass(frozen=True)
class Availability:
    """Whether a data set can be loaded here; a row of ``sartor data``."""

    name: str
    summary: str
    samples: str
    classes: int
    shape: tuple[int, ...]
    found: str | None
    how: str


# ---------------------------------------------------------------------- loading


def data_folder(data_dir: str | Path | None = None) -> Path | None:
    """Return the data folder: the argument, else ``SARTOR_DATA``, else None."""
    chosen = data_dir or os.environ.get(ENVIRONMENT) or None
    return None if chosen is None else Path(chosen).expanduser()


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a named data set; the last two loaded are kept in memory.

    Args:
        name: one of ``DATASETS``.
        data_dir: the data folder; by default the environment variable ``SARTOR_DATA``.

    Raises:
        MissingDataError: the files are not there; the message says how to get them.
    """
    if name not in DATASETS:
        raise ConfigError(f"Unknown data set {name!r}{did_you_mean(name, DATASETS)}")
    if name == "digits":
        return _load_digits()
    found = _find(name, data_dir)
    if found is None:
        raise MissingDataError(_how_to_get(name, data_dir))
    return _load(name, str(data_folder(data_dir)))


def _find(name: str, data_dir: str | Path | None) -> tuple[Layout, dict[str, Any]] | None:
    root = data_folder(data_dir)
    if root is None or not root.is_dir():
        return None
    for layout in DATASETS[name].layouts:
        files = layout.find(root, name)
        if files is not None:
            return layout, files
    return None


def _how_to_get(name: str, data_dir: str | Path | None) -> str:
    root = data_folder(data_dir)
    if root is None:
        where = f"no data folder is set: pass data_dir (--data-dir) or set {ENVIRONMENT}"
    elif not root.is_dir():
        where = f"the data folder {root} does not exist"
    else:
        where = f"searched in {root}"
    ways = "".join(
        f"\n  - {layout.files}\n    from: {layout.origin}" for layout in DATASETS[name].layouts
    )
    return (
        f"Data set {name!r} was not found; {where}. Put one of these into the data folder "
        f"(Sartor downloads nothing):{ways}"
    )


@lru_cache(maxsize=2)
def _load(name: str, root: str) -> Dataset:
    found = _find(name, root)
    assert found is not None
    layout, files = found
    if layout.read is None:
        return _read_users(name, files, root)
    entry = DATASETS[name]
    parts, names = layout.read(files, entry)
    for split in readers.SPLITS:
        shape = parts[split].x.shape[1:]
        expected = entry.shape[1:] if entry.shape[0] == 1 else (*entry.shape[1:], 3)
        if shape != expected:
            raise readers.broken(Path(root), f"{name} images have shape {shape}, not {expected}")
    total = sum(len(parts[split].x) for split in readers.SPLITS)
    x = torch.empty((total, *entry.shape), dtype=torch.float32)
    done = 0
    for split in readers.SPLITS:
        pixels = torch.from_numpy(np.require(parts[split].x, requirements=["C", "W"]))
        pixels = pixels.unsqueeze(1) if entry.shape[0] == 1 else pixels.permute(0, 3, 1, 2)
        x[done : done + len(pixels)] = pixels
        done += len(pixels)
    x.div_(255).sub_(0.5).div_(0.5)
    y = torch.from_numpy(np.concatenate([parts[split].y for split in readers.SPLITS]))
    classes = tuple(names) or entry.class_names
    num_train = len(parts["train"].x)
    return Dataset(name, x, y, num_train, entry.num_classes, root, classes)


def _read_users(name: str, files: dict[str, Any], root: str) -> Dataset:
    """Read FEMNIST or Sent140, whose samples have writers or users."""
    read = readers.read_leaf if name == "femnist" else text.read_leaf_texts
    is_lines = "lines" in files
    parts = [text.read_lines(files["lines"])] if is_lines else [read(files[s]) for s in files]
    y, users = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    num_train = len(parts[0].y) if len(parts) == 2 else None
    texts: tuple[tuple[str, ...], ...] = ()
    if name == "femnist":
        pixels = np.concatenate([part.x for part in parts]).reshape(-1, 1, 28, 28)
        x = torch.from_numpy(pixels).sub_(0.5).div_(0.5)
    else:
        texts = tuple(tuple(text.tokenise(one)) for part in parts for one in part.x)
        x = torch.empty((len(texts), 0), dtype=torch.int64)
    return Dataset(
        name,
        x,
        torch.from_numpy(y),
        num_train,
        DATASETS[name].num_classes,
        root,
        DATASETS[name].class_names,
        {"writer" if name == "femnist" else "user": users},
        LEAF_SHARE,
        texts,
    )


@lru_cache(maxsize=1)
def _load_digits() -> Dataset:
    """Load the digits with a fixed, stratified split into 1347 and 450 samples.

    1,797 images of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, 1998 (CC BY 4.0): its test part, in the order of scikit-learn's
    ``load_digits``; 8 × 8 counts from 0 to 16.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images, y = stored["images"], stored["labels"].astype(np.int64)
    train, _, test = split_rows(
        np.zeros_like(y), ["digits"], test=450 / len(y), val=0.0, seed=0, classes=y
    )
    order = torch.cat([train.rows, test.rows])
    x = torch.from_numpy(images.astype(np.float32)).reshape(-1, 1, 8, 8)[order]
    x = x.div_(16).sub_(0.5).div_(0.5)
    target = torch.from_numpy(y)[order]
    return Dataset("digits", x, target, len(train.rows), 10, "with Sartor", DIGITS)


# ---------------------------------------------------------------------- features


@lru_cache(maxsize=2)
def _scaled(name: str, root: str, scale: str, merged: bool) -> Tensor:
    """Return the images of a data set in another scale.

    With p the pixels from 0 to 255: ``unit`` p/255; or (p − μ)/(σ + 0.001) with mean and deviation
    over all images and pixels (``standard``), or over all images for every pixel and channel by
    itself (``pixel``), as in pFedMe's and pFedBreD's generators. μ and σ are those of the official
    training samples, unless the partition merged them with the test samples.
    """
    data = load(name, root or None)
    pixels = (data.x + 1) / 2
    if scale == "unit":
        return pixels
    known = pixels if merged or data.num_train is None else pixels[: data.num_train]
    if scale == "pixel":
        variance, mean = torch.var_mean(known, 0, correction=0)
    else:
        variance, mean = torch.var_mean(known, correction=0)
    return pixels.sub_(mean).div_(variance.sqrt() + 0.001 / 255)


def _encoded(
    data: Dataset, train: Ragged, size: int | None, length: int | None, info: dict[str, Any]
) -> Tensor:
    """Return token ids, with a vocabulary of the clients' training samples."""
    size = text.VOCABULARY if size is None else size
    length = text.LENGTH if length is None else length
    words = text.make_vocabulary((data.texts[row] for row in train.rows.tolist()), size)
    info |= {"vocabulary": size, "words": len(words), "length": length}
    return torch.from_numpy(text.encode(data.texts, words, length))


def _subset(data: Dataset) -> str | None:
    """Say what is missing of the published data set, if anything is."""
    official, known = DATASETS[data.name].samples, len(data.y)
    if data.texts and known < official[0]:
        return f"{known:,} tweets; the published set has {official[0]:,}"
    if data.num_train is not None and not data.texts and official[0] not in (0, data.num_train):
        return f"{data.num_train:,} training samples; the published set has {official[0]:,}"
    return None


def from_dataset(
    name: str,
    *,
    partition: str = "dirichlet:0.1",
    clients: int | None = None,
    protocol: str | None = None,
    seed: int = 0,
    val: float = 0.0,
    data_dir: str | Path | None = None,
    min_train: int | None = None,
    min_test: int | None = None,
    samples: int | None = None,
    scale: str | None = None,
    length: int | None = None,
    vocabulary: int | None = None,
) -> Samples:
    """Divide a named data set among clients.

    Args:
        name: one of ``DATASETS``.
        partition: ``dirichlet:0.1``, ``pathological:2``, ``iid``, ``column:writer``,
            ``classes:2``, ``lognormal:3`` or ``grouped:0.5``, perhaps followed by a protocol:
            ``dirichlet:0.1:pfllib``.
        clients: the number of clients; 20 by default, and for ``column`` one for every value.
        protocol: ``authors`` (default), ``pfllib``, or one of the partition's own; see
            ``sartor.data.partition``. ``lognormal`` takes ``cifar`` for CIFAR by default.
        seed: seed of the draw.
        val: the fraction of every client's training samples used for validation.
        data_dir: the data folder; by default the environment variable ``SARTOR_DATA``.
        min_train: the least number of training samples of a client; see ``divide``.
        min_test: the least number of test samples of a client.
        samples: training samples in all, drawn by the seed; by default all there are.
        scale: of images: ``symmetric`` ([-1, 1], the default), ``unit`` ([0, 1]), ``standard``
            (mean 0 and deviation 1 over everything) or ``pixel`` (for every pixel). Mean and
            deviation are those of the official training samples, or of all samples where the
            partition merges training and test samples.
        length: tokens of a text; 25 by default.
        vocabulary: token ids of texts in all; 10,000 by default. They are numbered by the
            training samples of the federation's clients.

    Example:
        >>> from sartor.data import Federation
        >>> Federation.from_dataset("digits", partition="iid", clients=10)
        Federation(10 clients, train=1347, val=0, test=450, input_shape=(1, 8, 8), num_classes=10)
    """
    if not 0 <= val < 1:
        raise ConfigError(f"val must be a fraction in [0, 1), got {val}.")
    if scale is not None and scale not in SCALES:
        raise ConfigError(f"Unknown scale {scale!r}{did_you_mean(scale, SCALES)}")
    data = load(name, data_dir)
    if data.texts and scale is not None:
        raise ConfigError(f"scale is for images, but {name} holds texts; leave it out.")
    if not data.texts and (length is not None or vocabulary is not None):
        raise ConfigError(
            f"length and vocabulary are for texts, but {name} holds images; leave them out."
        )
    spec = parse_partition(partition)
    if spec.kind == "lognormal" and name.startswith("cifar"):
        protocol = protocol or spec.protocol or "cifar"
    drawn = divide(
        data.y.numpy(),
        spec,
        clients=clients,
        num_train=data.num_train,
        num_classes=data.num_classes,
        protocol=protocol,
        attributes=data.attributes,
        seed=seed,
        min_train=min_train,
        min_test=min_test,
        samples=samples,
        train_share=data.train_share,
    )
    train, held = carve_val(drawn.train, drawn.names, val, seed)
    info: dict[str, Any] = {"dataset": name, "source": data.source, "val": val} | drawn.info
    if (subset := _subset(data)) is not None:
        info["subset"] = subset
    if data.class_names:
        info["class_names"] = list(data.class_names)
    x = data.x
    if data.texts:
        x = _encoded(data, train, vocabulary, length, info)
    elif scale not in (None, "symmetric"):
        official = len(data.y) if data.num_train is None else data.num_train
        merged = bool((drawn.train.rows >= official).any())
        x = _scaled(name, str(data_folder(data_dir) or ""), str(scale), merged)
        info["scale"] = scale
    y = data.y if drawn.y is None else torch.from_numpy(drawn.y)
    return Samples(x, y, train, held, drawn.test, drawn.names, data.num_classes, info)


def _files_of(found: dict[str, Any]) -> str:
    """Return the first file of a layout that was found, and how many there are."""
    paths: list[Path] = []
    for value in found.values():
        for item in value if isinstance(value, list) else [value]:
            path = item[0] if isinstance(item, tuple) else item
            if isinstance(path, Path) and path not in paths:
                paths.append(path)
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def available(data_dir: str | Path | None = None) -> list[Availability]:
    """Say for every data set whether it can be loaded here, and otherwise how to get it."""
    rows = []
    for name, entry in DATASETS.items():
        found = _find(name, data_dir)
        where = "with Sartor" if name == "digits" else None
        where = where if found is None else _files_of(found[1])
        counts = entry.samples
        if found is not None and found[0].find is find_npz:
            counts = readers.count_npz(found[1])
        samples = {"femnist": "by writer", "sent140": "by user"}.get(name)
        samples = samples or "{:,} + {:,}".format(*counts)
        if counts < entry.samples:
            samples += " (a subset)"
        how = "nothing to do" if where else _how_to_get(name, data_dir)
        rows.append(
            Availability(name, entry.summary, samples, entry.num_classes, entry.shape, where, how)
        )
    return rows
