"""Where the files of the named data sets may lie, how they are found, and where to get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sartor.data import readers

Read = tuple[dict[str, readers.Pictures], Sequence[str]]
"""The images of every split, and the names of the classes if the files have them."""


@dataclass(frozen=True)
class Entry:
    """What is known of a data set before it is read."""

    summary: str
    num_classes: int
    shape: tuple[int, ...]
    samples: tuple[int, int]
    layouts: tuple[Layout, ...] = ()
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One way the files may lie: how to find them, how to read them, what to say to the user.

    Without ``read``, ``sartor.data.datasets`` reads the files, and keeps writers and users.
    """

    files: str
    origin: str
    find: Callable[[Path, str], dict[str, Any] | None]
    read: Callable[[dict[str, Any], Entry], Read] | None = None


def find_npz(root: Path, name: str) -> dict[str, Any] | None:
    """Find NAME.npz, or NAME_train.npz (or NAME_train_0.npz, ...) with NAME_test.npz."""
    for stem in (name, *_ALIASES.get(name, ())):
        whole = root / f"{stem}.npz"
        if whole.is_file():
            return {split: [(whole, f"_{split}")] for split in readers.SPLITS}
        parts = {}
        for split in readers.SPLITS:
            single = root / f"{stem}_{split}.npz"
            pieces = sorted(root.glob(f"{stem}_{split}_[0-9]*.npz"), key=_piece)
            parts[split] = [(path, "") for path in ([single] if single.is_file() else pieces)]
        if all(parts.values()) and _whole(parts["train"]):
            return parts
    return None


def _piece(path: Path) -> int:
    tail = path.stem.rsplit("_", 1)[-1]
    return int(tail) if tail.isdigit() else -1


def _whole(parts: list[tuple[Path, str]]) -> bool:
    """Say whether numbered pieces start at 0 and have no gap at the front."""
    numbers = [_piece(path) for path, _ in parts]
    return len(parts) == 1 or numbers == list(range(len(parts)))


def _read_npz(found: dict[str, Any], entry: Entry) -> Read:
    return readers.read_npz(found, entry.shape[1], entry.shape[0] == 3)


_ALIASES = {"emnist": ("emnist_balanced",)}
_FOLDERS = {
    "mnist": ("MNIST", "mnist"),
    "fashion_mnist": ("FashionMNIST", "fashion_mnist", "fashion-mnist"),
    "emnist": ("EMNIST", "emnist"),
}


def _find_idx(root: Path, name: str) -> dict[str, Any] | None:
    """Find the four IDX files of MNIST's kin in torchvision's or a plain folder."""
    kinds = {"train": "train", "test": "t10k"}
    if name == "emnist":
        kinds = {"train": "emnist-balanced-train", "test": "emnist-balanced-test"}
    folders = [root / folder / sub for folder in _FOLDERS[name] for sub in ("raw", ".")]
    if name == "emnist" or root.name in _FOLDERS[name]:
        folders += [root, root / "raw"]
    for folder in folders:
        found = {
            f"{split}_{part}": path
            for split, start in kinds.items()
            for part, axes in (("images", 3), ("labels", 1))
            for dash in "-."
            for end in ("", ".gz")
            if (path := folder / f"{start}-{part}{dash}idx{axes}-ubyte{end}").is_file()
        }
        if len(found) == 4:
            return found | {"transpose": name == "emnist"}
    return None


def _read_idx(found: dict[str, Any], entry: Entry) -> Read:
    return {
        split: readers.read_idx_pair(
            found[f"{split}_images"], found[f"{split}_labels"], found["transpose"]
        )
        for split in readers.SPLITS
    }, ()


_CIFAR_FILES = {
    ("cifar10", "bin"): (
        "cifar-10-batches-bin",
        [f"data_batch_{i}.bin" for i in range(1, 6)],
        ["test_batch.bin"],
    ),
    ("cifar10", "py"): (
        "cifar-10-batches-py",
        [f"data_batch_{i}" for i in range(1, 6)],
        ["test_batch"],
    ),
    ("cifar100", "bin"): ("cifar-100-binary", ["train.bin"], ["test.bin"]),
    ("cifar100", "py"): ("cifar-100-python", ["train"], ["test"]),
}


def _find_cifar(kind: str) -> Callable[[Path, str], dict[str, Any] | None]:
    def find(root: Path, name: str) -> dict[str, Any] | None:
        folder, train, test = _CIFAR_FILES[name, kind]
        for base in (root / folder, root) if root.name == folder else (root / folder,):
            found = {"train": [base / f for f in train], "test": [base / f for f in test]}
            if all(path.is_file() for paths in found.values() for path in paths):
                return found
        return None

    return find


def _read_cifar_binary(found: dict[str, Any], entry: Entry) -> Read:
    bytes_each = 1 if entry.num_classes == 10 else 2
    return {s: readers.read_cifar_binary(found[s], bytes_each) for s in readers.SPLITS}, ()


def _read_cifar_python(found: dict[str, Any], entry: Entry) -> Read:
    key = "labels" if entry.num_classes == 10 else "fine_labels"
    return {s: readers.read_cifar_python(found[s], key) for s in readers.SPLITS}, ()


def _find_leaf(root: Path, name: str) -> dict[str, Any] | None:
    """Find LEAF's data: JSON files in train and test, or in all_data."""
    folders = [root / name / "data", root / name]
    if name == "femnist" or root.name == name:  # the data folder may be LEAF's own
        folders += [root / "data", root]
    for base in folders:
        found = {s: sorted((base / s).glob("*.json")) for s in ("train", "test")}
        if all(found.values()):
            return found
        everything = sorted([*(base / "all_data").glob("*.json"), *base.glob("all_data*.json")])
        if everything:
            return {"train": everything}
    return None


def _find_lines(root: Path, name: str) -> dict[str, Any] | None:
    """Find NAME.jsonl or NAME.jsonl.gz."""
    for end in (".jsonl", ".jsonl.gz"):
        if (path := root / f"{name}{end}").is_file():
            return {"lines": path}
    return None


def _npz_layout(name: str, parts: str = "") -> Layout:
    return Layout(
        f"{name}.npz with arrays x_train, y_train, x_test, y_test (uint8){parts}",
        "made by you from any of the layouts below",
        find_npz,
        _read_npz,
    )


def _idx_layout(folder: str, start: str, origin: str) -> Layout:
    files = ", ".join(
        f"{kind}-{part}" for kind in start.split() for part in ("images-idx3", "labels-idx1")
    )
    return Layout(f"{folder}/raw/: {files} (-ubyte, .gz or not)", origin, _find_idx, _read_idx)


def _cifar_layouts(name: str, binary: str, python: str) -> tuple[Layout, ...]:
    origin = f"{_CIFAR_PAGE}, '{name.upper().replace('CIFAR', 'CIFAR-')} {{}} version'"
    return (
        _npz_layout(name, _PARTS.format(name)),
        Layout(binary, origin.format("binary"), _find_cifar("bin"), _read_cifar_binary),
        Layout(python, origin.format("python"), _find_cifar("py"), _read_cifar_python),
    )


def _leaf_layout(name: str) -> Layout:
    data = f"{name}/data"
    return Layout(
        f"{data}/train/*.json and {data}/test/*.json, or {data}/all_data/*.json",
        f"https://github.com/TalwalkarLab/leaf, folder data/{name}, preprocess.sh",
        _find_leaf,
    )


_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_MNIST_PAGE = "http://yann.lecun.com/exdb/mnist/ (torchvision's MNIST fetches the same files)"
_FASHION_PAGE = "https://github.com/zalandoresearch/fashion-mnist"
_EMNIST_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)"

_FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship")
DIGITS = tuple("0123456789")
_PARTS = ", or {0}_train.npz / {0}_train_0.npz, ... and {0}_test.npz with arrays x, y"

DATASETS: dict[str, Entry] = {
    "digits": Entry("8x8 handwritten digits, with Sartor", 10, (1, 8, 8), (1347, 450), (), DIGITS),
    "mnist": Entry(
        "28x28 handwritten digits",
        10,
        (1, 28, 28),
        (60_000, 10_000),
        (_npz_layout("mnist"), _idx_layout("MNIST", "train t10k", _MNIST_PAGE)),
        DIGITS,
    ),
    "fashion_mnist": Entry(
        "28x28 clothes",
        10,
        (1, 28, 28),
        (60_000, 10_000),
        (_npz_layout("fashion_mnist"), _idx_layout("FashionMNIST", "train t10k", _FASHION_PAGE)),
        (*_FASHION, "Bag", "Ankle boot"),
    ),
    "emnist": Entry(
        "28x28 letters and digits, the balanced split",
        47,
        (1, 28, 28),
        (112_800, 18_800),
        (
            _npz_layout("emnist"),
            _idx_layout("EMNIST", "emnist-balanced-train emnist-balanced-test", _EMNIST_PAGE),
        ),
    ),
    "cifar10": Entry(
        "32x32 colour photographs",
        10,
        (3, 32, 32),
        (50_000, 10_000),
        _cifar_layouts(
            "cifar10",
            "cifar-10-batches-bin/: data_batch_1.bin to data_batch_5.bin, test_batch.bin",
            "cifar-10-batches-py/: data_batch_1 to data_batch_5, test_batch",
        ),
        (*_CIFAR10, "truck"),
    ),
    "cifar100": Entry(
        "32x32 colour photographs",
        100,
        (3, 32, 32),
        (50_000, 10_000),
        _cifar_layouts(
            "cifar100",
            "cifar-100-binary/: train.bin, test.bin",
            "cifar-100-python/: train, test",
        ),
    ),
    "femnist": Entry(
        "28x28 letters and digits with their writers, from LEAF",
        62,
        (1, 28, 28),
        (0, 0),
        (_leaf_layout("femnist"),),
    ),
    "sent140": Entry(
        "tweets with their users, negative or positive, from LEAF",
        2,
        (25,),
        (1_600_498, 0),
        (
            Layout(
                "sent140.jsonl or sent140.jsonl.gz, a line for each tweet: "
                '{"user": ..., "text": ..., "label": 0 or 1}',
                "made by you from the layout below",
                _find_lines,
            ),
            _leaf_layout("sent140"),
        ),
        ("negative", "positive"),
    ),
}
