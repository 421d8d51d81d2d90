"""Readers of the file layouts in which image data sets are published.

npz (plain arrays, or lossless WebP mosaics), IDX (also gzipped), CIFAR binary and python batches,
and LEAF's JSON. Nothing here runs code from a file: arrays are read with ``allow_pickle=False``,
and CIFAR's python batches, which are pickles, go through a reader that builds nothing but byte
arrays, lists, dicts and numbers.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from sartor.core.errors import FederationError, MissingExtraError

Bytes = npt.NDArray[np.uint8]
SPLITS = ("train", "test")
_BROKEN = (OSError, EOFError, LookupError, TypeError, ValueError, struct.error, zipfile.BadZipFile)
_ACROSS = 32  # images in a row of a mosaic


class Pictures(NamedTuple):
    """Images ``(n, height, width)`` or ``(n, height, width, channels)`` uint8 and their labels."""

    x: Bytes
    y: npt.NDArray[np.int64]


def broken(path: Path, reason: object) -> FederationError:
    """Return the error for a file that is there but cannot be read."""
    return FederationError(f"Cannot read {path}: {reason}. Fetch the file again.")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise the error for a broken file where reading it goes wrong."""
    try:
        yield
    except _BROKEN as error:
        raise broken(path, error) from error


def unzipped(path: Path) -> bytes:
    """Return what is in a file, gzipped or not."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


# ---------------------------------------------------------------------- npz


def read_npz(
    files: dict[str, Sequence[tuple[Path, str]]], side: int, colour: bool
) -> tuple[dict[str, Pictures], list[str]]:
    """Read train and test from npz files, and the class names if a file has them.

    Args:
        files: for each split the files, and the suffix of the arrays' names in them. Arrays are
            ``x`` and ``y``, or ``webp``, ``offsets`` and ``y`` for mosaics.
        side: the height and width of an image.
        colour: whether mosaics are in colour.
    """
    found: dict[str, Pictures] = {}
    names: list[str] = []
    for split, parts in files.items():
        pieces = []
        for path, suffix in parts:
            with reading(path), np.load(path, allow_pickle=False) as arrays:
                labels = arrays["y" + suffix].astype(np.int64)
                if "x" + suffix in arrays:
                    images = arrays["x" + suffix]
                else:
                    data, offsets = arrays["webp" + suffix].tobytes(), arrays["offsets" + suffix]
                    images = _mosaics(data, offsets, len(labels), side, colour)
                if "class_names" in arrays:
                    names = [str(name) for name in arrays["class_names"].tolist()]
                if len(images) != len(labels):
                    raise ValueError(f"{len(images)} images but {len(labels)} labels")
            pieces.append((images, labels))
        found[split] = Pictures(*map(np.concatenate, zip(*pieces, strict=True)))
    return found, names


def count_npz(files: dict[str, Sequence[tuple[Path, str]]]) -> tuple[int, int]:
    """Count the training and test samples of npz files without reading the images."""
    counts = dict.fromkeys(SPLITS, 0)
    for split, parts in files.items():
        for path, suffix in parts:
            with reading(path), np.load(path, allow_pickle=False) as arrays:
                counts[split] += len(arrays["y" + suffix])
    return counts["train"], counts["test"]


def _mosaics(data: bytes, offsets: Any, count: int, side: int, colour: bool) -> Bytes:
    """Decode lossless WebP mosaics: 32 images a row, padded with zeros at the end."""
    try:
        from PIL import Image, features
    except ImportError as error:
        raise MissingExtraError(
            "This data set is stored as WebP images, and reading them needs Pillow; install it "
            'with: pip install "sartor[data]"'
        ) from error
    if not features.check("webp"):
        raise MissingExtraError("The installed Pillow cannot read WebP; install one that can.")
    channels = 3 if colour else 1
    images = np.empty((count, side, side, channels), dtype=np.uint8)
    done = 0
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        with Image.open(io.BytesIO(data[start:stop])) as picture:
            tile = np.asarray(picture.convert("RGB" if colour else "L"))
        rows = len(tile) // side
        tile = tile.reshape(rows, side, _ACROSS, side, channels).swapaxes(1, 2)
        taken = min(rows * _ACROSS, count - done)
        images[done : done + taken] = tile.reshape(-1, side, side, channels)[:taken]
        done += taken
    if done < count:
        raise ValueError(f"its mosaics hold {done} images, but there are {count} labels")
    return images if colour else images[..., 0]


# ---------------------------------------------------------------------- IDX


def read_idx(path: Path) -> Bytes:
    """Read one IDX file of unsigned bytes, gzipped or not."""
    with reading(path):
        raw = unzipped(path)
        if len(raw) < 4:
            raise ValueError("it has no header")
        zeros, kind, axes = struct.unpack(">HBB", raw[:4])
        if zeros != 0 or kind != 0x08 or not 1 <= axes <= 4:
            raise ValueError("it is not an IDX file of unsigned bytes")
        shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
        data = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * axes)
        if data.size != int(np.prod(shape, dtype=np.int64)):
            raise ValueError(f"it should hold {shape} bytes, but holds {data.size}")
    return data.reshape(shape)


def read_idx_pair(images: Path, labels: Path, transpose: bool = False) -> Pictures:
    """Read images and labels; EMNIST is published with rows and columns exchanged."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise broken(images, f"images of shape {x.shape} do not fit labels of shape {y.shape}")
    return Pictures(np.ascontiguousarray(x.swapaxes(1, 2)) if transpose else x, y.astype(np.int64))


# ---------------------------------------------------------------------- CIFAR


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> Pictures:
    """Read CIFAR records: label bytes (the last one counts), then 3 x 32 x 32 pixels."""
    pieces = []
    for path in paths:
        with reading(path):
            raw = np.fromfile(path, dtype=np.uint8)
            if raw.size == 0 or raw.size % (label_bytes + 3072):
                raise ValueError(f"{raw.size} bytes are no whole number of CIFAR records")
        pieces.append(raw.reshape(-1, label_bytes + 3072))
    records = np.concatenate(pieces)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Pictures(pixels, records[:, label_bytes - 1].astype(np.int64))


def read_cifar_python(paths: Sequence[Path], key: str) -> Pictures:
    """Read CIFAR's python batches without running anything in them."""
    pieces = []
    for path in paths:
        try:
            with path.open("rb") as file:
                batch = _PlainUnpickler(file, encoding="bytes").load()
            data = batch.get(b"data", batch.get("data"))
            labels = batch.get(key.encode(), batch.get(key))
            if not isinstance(data, _Array) or labels is None:
                raise ValueError(f"it has no arrays 'data' and {key!r}")
            pixels = data.bytes().reshape(-1, 3, 32, 32)
            numbers = labels.bytes() if isinstance(labels, _Array) else labels
            if len(pixels) != len(numbers):
                raise ValueError("images and labels differ in number")
            pieces.append((pixels, np.array(numbers, dtype=np.int64)))
        # A damaged pickle can raise nearly anything; whatever it is, the file is at fault.
        except Exception as error:
            raise broken(path, error) from error
    x, y = map(np.concatenate, zip(*pieces, strict=True))
    return Pictures(x.transpose(0, 2, 3, 1), y)


class _Array:
    """What stands for a numpy array, and its class: the recorded state, nothing else."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes(self) -> Bytes:
        """Return the array, if it is one of unsigned bytes in C order."""
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1") or fortran:
            raise ValueError("an array in it is not of unsigned bytes in C order")
        if isinstance(raw, str):
            raw = raw.encode("latin-1")
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


class _DType:
    """What stands for a numpy dtype: its type code."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags: they mean nothing for single bytes."""


def _latin(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text in encoding {encoding!r}")
    return text.encode("latin-1")


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows no names but those of a byte array, and maps them to our stand-ins.

    No function or class of any module is ever looked up, so a file cannot call one.
    """

    _STAND_INS: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _latin,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name, or refuse the file."""
        try:
            return self._STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no CIFAR batch needs; do not trust this "
                "file, and use the binary version of the data set"
            ) from None

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to outside objects."""
        raise pickle.UnpicklingError("it refers to objects outside the file")


# ---------------------------------------------------------------------- LEAF


class Leaf(NamedTuple):
    """Samples with users: features ``(n, ...)`` float32 or a tuple of texts, labels, users."""

    x: Any
    y: npt.NDArray[np.int64]
    users: npt.NDArray[np.str_]


def leaf_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, x and y of every user of a LEAF JSON file (``users``, ``user_data``)."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for user in data["users"]:
        x, y = data["user_data"][user]["x"], data["user_data"][user]["y"]
        if len(x) != len(y):
            raise ValueError(f"user {user} has {len(x)} samples but {len(y)} labels")
        yield str(user), x, y


def read_leaf(paths: Sequence[Path]) -> Leaf:
    """Read LEAF JSON files of numbers."""
    found = []
    for path in paths:
        with reading(path):
            for user, x, y in leaf_users(path):
                if x:
                    arrays = np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.int64)
                    found.append((*arrays, np.full(len(y), user)))
    if not found:
        raise FederationError(f"No samples in {', '.join(map(str, paths))}.")
    with reading(paths[0].parent):
        return Leaf(*map(np.concatenate, zip(*found, strict=True)))
