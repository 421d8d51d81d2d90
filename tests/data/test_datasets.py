"""Laws of the named data sets, on small files in the published layouts that the tests write."""

from __future__ import annotations

import builtins
import gzip
import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError, FederationError, MissingDataError, MissingExtraError
from sartor.data import Federation, available, datasets, from_dataset, load
from sartor.data.datasets import ENVIRONMENT
from sartor.data.readers import read_cifar_python, read_leaf

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    """Keep a data folder of the machine out of the tests."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def pictures(count, side=28, channels=()):
    return RNG.integers(0, 256, (count, side, side, *channels), dtype=np.uint8)


def write_idx(path, array, *, compress=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if compress else raw)


def scaled(images):
    return (torch.from_numpy(np.ascontiguousarray(images)).float() / 255 - 0.5) / 0.5


def expect(data, train, test, y_train, y_test):
    """Assert that a data set holds these images and labels, training samples first."""
    assert torch.equal(data.x[: data.num_train], scaled(train))
    assert torch.equal(data.x[data.num_train :], scaled(test))
    assert data.y.tolist() == [*y_train.tolist(), *y_test.tolist()]


def test_digits_need_no_file_and_have_a_fixed_stratified_split():
    """1347 + 450 images in [-1, 1], a quarter of each class for test, the same every time."""
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert (float(data.x.min()), float(data.x.max())) == (-1, 1)
    assert data.num_train == 1347
    held = torch.bincount(data.y[1347:])
    assert int((held - torch.bincount(data.y) / 4).abs().max()) <= 1
    assert data.y[:8].tolist() == [2, 3, 4, 5, 6, 7, 8, 0]  # as drawn when this was written


def test_the_shipped_digits_are_those_of_scikit_learn():
    """The file in the package holds scikit-learn's images and labels, in its order."""
    shipped = Path(datasets.__file__).with_name("digits.npz")
    with np.load(shipped, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    assert images.shape == (1797, 8, 8)
    assert (int(images.min()), int(images.max())) == (0, 16)
    x, y = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    assert (images.reshape(-1, 64) == x).all()
    assert (labels == y).all()


@pytest.mark.parametrize("partition", ["dirichlet:0.1", "pathological:2", "iid"])
@pytest.mark.parametrize("protocol", ["authors", "pfllib"])
def test_the_default_data_set_can_be_divided_in_every_way(partition, protocol):
    """Digits over 20 clients work with each partition and protocol, with validation samples."""
    fed = from_dataset("digits", partition=partition, protocol=protocol, val=0.2, seed=3)
    assert fed.num_clients == 20
    assert min(int(s.sizes.min()) for s in (fed.train, fed.val, fed.test)) >= 1
    assert fed.info["dataset"] == "digits"
    assert fed.info["protocol"] == protocol
    json.dumps(fed.info)
    assert fed.x is from_dataset("digits", seed=4).x  # federations share the data


def test_validation_is_carved_from_training_samples_only():
    """A validation share leaves the test samples alone and takes only from training samples."""
    plain = from_dataset("digits", seed=1)
    carved = from_dataset("digits", seed=1, val=0.3)
    assert torch.equal(plain.test.rows, carved.test.rows)
    both = torch.cat([carved.train.rows, carved.val.rows]).sort().values
    assert torch.equal(both, plain.train.rows.sort().values)
    with pytest.raises(ConfigError, match="val must be"):
        from_dataset("digits", val=1.0)


def test_plain_npz_files_are_read(tmp_path):
    """mnist.npz with x_train, y_train, x_test, y_test is found and scaled."""
    train, test = pictures(6), pictures(3)
    y_train, y_test = np.arange(6, dtype=np.uint8), np.arange(3, dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=train, y_train=y_train, x_test=test, y_test=y_test)
    data = load("mnist", tmp_path)
    expect(data, train[:, None], test[:, None], y_train, y_test)


def test_numbered_npz_parts_are_joined_in_order(tmp_path):
    """cifar10_train_0, _1, ..., _10 make one training set; a gap makes none."""
    parts = [pictures(2, 32, (3,)) for _ in range(11)]
    for i, part in enumerate(parts):
        np.savez(tmp_path / f"cifar10_train_{i}.npz", x=part, y=np.full(2, i % 10))
    test = pictures(2, 32, (3,))
    np.savez(tmp_path / "cifar10_test.npz", x=test, y=[0, 1], class_names=list("abcdefghij"))
    data = load("cifar10", tmp_path)
    whole = np.concatenate(parts).transpose(0, 3, 1, 2)
    expect(data, whole, test.transpose(0, 3, 1, 2), np.repeat(np.arange(11) % 10, 2), np.arange(2))
    assert data.class_names == tuple("abcdefghij")
    other = tmp_path / "gap"
    other.mkdir()
    for i in (0, 2):
        (other / f"cifar10_train_{i}.npz").write_bytes(
            (tmp_path / f"cifar10_train_{i}.npz").read_bytes()
        )
    (other / "cifar10_test.npz").write_bytes((tmp_path / "cifar10_test.npz").read_bytes())
    with pytest.raises(MissingDataError, match="'cifar10' was not found; searched in"):
        load("cifar10", other)


def mosaic(images, side, mode):
    """Write images as lossless WebP mosaics, 32 a row and at most 2 rows each."""
    image = pytest.importorskip("PIL.Image")
    blobs = []
    for start in range(0, len(images), 64):
        part = images[start : start + 64].reshape(-1, side, side, images.shape[-1])
        rows = -(-len(part) // 32)
        padded = np.zeros((rows * 32, *part.shape[1:]), np.uint8)
        padded[: len(part)] = part
        tile = padded.reshape(rows, 32, side, side, -1).swapaxes(1, 2)
        tile = tile.reshape(rows * side, 32 * side, -1)
        out = io.BytesIO()
        image.fromarray(tile if mode == "RGB" else tile[..., 0]).save(out, "WEBP", lossless=True)
        blobs.append(out.getvalue())
    offsets = np.cumsum([0, *map(len, blobs)])
    return np.frombuffer(b"".join(blobs), np.uint8), offsets


def test_webp_mosaics_give_back_every_pixel(tmp_path):
    """Lossless mosaics, grey and in colour, with a padded end, decode to the source images."""
    grey = {"train": pictures(70, 28, (1,)), "test": pictures(5, 28, (1,))}
    arrays: dict[str, Any] = {}
    for split, images in grey.items():
        data, offsets = mosaic(images, 28, "L")
        arrays |= {f"webp_{split}": data, f"offsets_{split}": offsets}
        arrays[f"y_{split}"] = np.arange(len(images)) % 10
    np.savez(tmp_path / "fashion_mnist.npz", **arrays)
    data = load("fashion_mnist", tmp_path)
    expect(
        data,
        grey["train"].transpose(0, 3, 1, 2),
        grey["test"].transpose(0, 3, 1, 2),
        np.arange(70) % 10,
        np.arange(5),
    )
    colour = {"train": pictures(33, 32, (3,)), "test": pictures(2, 32, (3,))}
    for split, images in colour.items():
        blob, offsets = mosaic(images, 32, "RGB")
        np.savez(
            tmp_path / f"cifar10_{split}.npz", webp=blob, offsets=offsets, y=np.zeros(len(images))
        )
    data = load("cifar10", tmp_path)
    assert torch.equal(data.x[:33], scaled(colour["train"].transpose(0, 3, 1, 2)))


def test_mosaics_without_pillow_name_the_extra(tmp_path, monkeypatch):
    """Without Pillow the error says what to install."""
    np.savez(
        tmp_path / "fashion_mnist.npz",
        **{
            f"{k}_{s}": np.zeros(2, np.int64)
            for k in ("webp", "offsets", "y")
            for s in ("train", "test")
        },
    )
    real = builtins.__import__

    def no_pillow(name, *args, **kwargs):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(MissingExtraError, match=r"sartor\[data\]"):
        load("fashion_mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "start", "compress"),
    [
        ("mnist", "MNIST/raw", ("train", "t10k"), False),
        ("mnist", "mnist", ("train", "t10k"), True),
        ("fashion_mnist", "FashionMNIST/raw", ("train", "t10k"), True),
        ("emnist", "EMNIST/raw", ("emnist-balanced-train", "emnist-balanced-test"), False),
    ],
)
def test_idx_files_are_read_where_torchvision_puts_them(tmp_path, name, folder, start, compress):
    """IDX files, gzipped or not, give their images; EMNIST's are turned upright."""
    sets = {"train": (pictures(5), np.arange(5)), "test": (pictures(3), np.arange(3))}
    end = ".gz" if compress else ""
    for prefix, (images, y) in zip(start, sets.values(), strict=True):
        write_idx(tmp_path / folder / f"{prefix}-images-idx3-ubyte{end}", images, compress=compress)
        labels = y.astype(np.uint8)
        write_idx(tmp_path / folder / f"{prefix}-labels-idx1-ubyte{end}", labels, compress=compress)
    data = load(name, tmp_path)
    turned = {k: v.swapaxes(1, 2) if name == "emnist" else v for k, (v, _) in sets.items()}
    expect(data, turned["train"][:, None], turned["test"][:, None], np.arange(5), np.arange(3))


def cifar_parts(count, channels_first):
    images = pictures(count, 32, (3,))
    flat = images.transpose(0, 3, 1, 2).reshape(count, 3072)
    return images.transpose(0, 3, 1, 2) if channels_first else images, flat


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_binary_records_are_read(tmp_path, name):
    """Labels stand before the pixels; CIFAR-100's fine label is the second byte."""
    if name == "cifar10":
        base, files, before = "cifar-10-batches-bin", [f"data_batch_{i}" for i in range(1, 6)], 0
        files.append("test_batch")
    else:
        base, files, before = "cifar-100-binary", ["train", "test"], 1
    (tmp_path / base).mkdir()
    kept = []
    for i, file in enumerate(files):
        images, flat = cifar_parts(2, True)
        y = np.array([[i], [i + 1]], np.uint8)
        coarse = np.full((2, before), 77, np.uint8)
        records = np.concatenate([coarse, y, flat], axis=1)
        (tmp_path / base / f"{file}.bin").write_bytes(records.tobytes())
        kept.append((images, y[:, 0]))
    data = load(name, tmp_path)
    train = np.concatenate([images for images, _ in kept[:-1]])
    labels = np.concatenate([y for _, y in kept[:-1]])
    expect(data, train, kept[-1][0], labels, kept[-1][1])


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("old", [True, False])
def test_cifar_python_batches_are_read_without_running_them(tmp_path, protocol, old):
    """Batches as numpy pickles them, under its old and new module names, give their pixels."""
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    kept = {}
    for split in ("train", "test"):
        images, flat = cifar_parts(3, True)
        batch = {"data": flat, "fine_labels": [4, 5, 99], "filenames": ["a", "b", "c"]}
        raw = pickle.dumps(batch, protocol=protocol)
        if old and protocol < 4:
            raw = raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / split).write_bytes(raw)
        kept[split] = images
    if protocol == 5:  # arrays as out-of-band buffers; no published file uses it
        with pytest.raises(FederationError, match="do not trust"):
            load("cifar100", tmp_path)
        return
    labels = np.array([4, 5, 99])
    expect(load("cifar100", tmp_path), kept["train"], kept["test"], labels, labels)


def python_two_batch(flat, labels):
    """Return a batch with byte-string keys, as Python 2 wrote the published files."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01bt R".replace(
            b" ", b""
        )
        + b"(I1\n(I%d\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR" % len(labels)
        + b"(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\n"
        + b"T"
        + struct.pack("<i", flat.size)
        + flat.tobytes()
        + b"tb"
    )
    numbers = b"(l" + b"".join(b"I%d\na" % label for label in labels)
    return b"(dU\x04data" + array + b"sU\x06labels" + numbers + b"s."


def test_batches_of_python_two_are_read(tmp_path):
    """The published CIFAR-10 files were written by Python 2, with bytes where we have text."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    images, flat = cifar_parts(2, True)
    raw = python_two_batch(flat, [3, 7])
    for file in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / file).write_bytes(raw)
    data = load("cifar10", tmp_path)
    assert data.num_train == 10
    assert data.y.tolist() == [3, 7] * 6
    assert torch.equal(data.x[:2], scaled(images))


class Evil:
    """What a hostile file would do when it is loaded."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.system, ("touch HERE",)),
        (eval, ("__import__('pathlib').Path('HERE').touch()",)),
        (getattr, ("text", "upper")),
        (np.load, ("HERE",)),
        (io.open, ("HERE", "w")),
    ],
    ids=["system", "eval", "getattr", "numpy", "open"],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_batch_is_refused_and_runs_nothing(tmp_path, monkeypatch, call, protocol):
    """A pickle that calls anything is refused by name, and the call does not happen."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({"data": Evil(call), "labels": [0]}, protocol=protocol))
    with pytest.raises(FederationError, match="do not trust this file"):
        read_cifar_python([path], "labels")
    assert not (tmp_path / "HERE").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": 3, "labels": [1]}),
        pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]}, protocol=2),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, protocol=2),
        pickle.dumps({"data": np.array([{}], dtype=object), "labels": [1]}, protocol=2),
        b"\x80\x02cnumpy\nndarray.tofile\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
        b"P1\n.",
    ],
)
def test_damaged_batches_are_named(tmp_path, raw):
    """Whatever is wrong inside a batch, the error names the file."""
    path = tmp_path / "train"
    path.write_bytes(raw)
    with pytest.raises(FederationError, match=r"Cannot read .*train"):
        read_cifar_python([path], "labels")


def write_leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {u: {"x": x.tolist(), "y": list(y)} for u, (x, y) in users.items()},
    }
    path.write_text(json.dumps(data))


def test_leaf_json_gives_one_client_per_writer(tmp_path):
    """FEMNIST by writer: names are the writers, official train and test samples are kept."""
    made = {
        split: {f"f{i:04d}": (RNG.random((n, 784)), [i, 61][:n]) for i in range(3)}
        for split, n in (("train", 2), ("test", 1))
    }
    for split, users in made.items():
        first = dict(list(users.items())[:2])
        write_leaf(tmp_path / "femnist/data" / split / "part_0.json", first)
        write_leaf(tmp_path / "femnist/data" / split / "part_1.json", {"f0002": users["f0002"]})
    fed = Federation.from_dataset("femnist", partition="column:writer", data_dir=tmp_path)
    assert fed.names == ("f0000", "f0001", "f0002")
    assert fed.input_shape == (1, 28, 28)
    assert fed.num_classes == 62
    for i, name in enumerate(fed.names):
        for split in ("train", "test"):
            want = (made[split][name][0].astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
            got = fed.x[fed.split(split).of(i)].reshape(-1, 784)
            assert torch.equal(got, torch.from_numpy(want))


def test_leaf_all_data_is_split_by_us(tmp_path):
    """all_data has no official split, so each writer is split 90/10, or 75/25 if that is named."""
    users = {"a": (np.zeros((20, 784)), range(20)), "b": (np.ones((4, 784)), range(4))}
    write_leaf(tmp_path / "femnist/all_data/x.json", users)
    fed = from_dataset("femnist", partition="column:writer", data_dir=tmp_path)
    assert (fed.train.sizes.tolist(), fed.test.sizes.tolist()) == ([18, 3], [2, 1])
    assert fed.info["protocol"] == "leaf"
    fed = from_dataset("femnist", partition="column:writer:pfllib", data_dir=tmp_path)
    assert fed.train.sizes.tolist() == [15, 3]
    large = from_dataset("femnist", partition="column:writer", min_train=5, data_dir=tmp_path)
    assert large.names == ("a",)
    with pytest.raises(FederationError, match=r"No value.*21 samples.*has 20.*lower min_train"):
        from_dataset("femnist", partition="column:writer", min_train=21, data_dir=tmp_path)
    plain = tmp_path / "plain"
    write_leaf(plain / "femnist/all_data_0.json", {"c": (np.zeros((3, 784)), range(3))})
    fed = from_dataset("femnist", partition="column:writer", data_dir=plain)
    assert fed.names == ("c",)
    (tmp_path / "femnist/all_data/x.json").write_text('{"users": ["a"], "user_data": {}}')
    with pytest.raises(FederationError, match=r"Cannot read .*x.json"):
        read_leaf([tmp_path / "femnist/all_data/x.json"])


def test_missing_data_say_what_to_put_where(tmp_path, monkeypatch):
    """The error names the folder searched, every layout with its files, and the public source."""
    for name, parts in {
        "cifar10": ["cifar10.npz", "data_batch_1.bin", "cs.toronto.edu", "python version"],
        "mnist": ["mnist.npz", "MNIST/raw", "train-images-idx3", "lecun.com"],
        "femnist": ["femnist/data/train", "TalwalkarLab/leaf"],
    }.items():
        with pytest.raises(MissingDataError) as caught:
            load(name, tmp_path)
        for part in [str(tmp_path), *parts]:
            assert part in str(caught.value)
    with pytest.raises(MissingDataError, match=r"--data-dir.*SARTOR_DATA"):
        load("mnist")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "absent"))
    with pytest.raises(MissingDataError, match="absent does not exist"):
        load("mnist")


def test_an_unknown_data_set_is_named_with_the_nearest():
    """A typing error gets a hint."""
    with pytest.raises(ConfigError, match="did you mean 'fashion_mnist'"):
        from_dataset("fashion-mnist")
    with pytest.raises(ConfigError, match="has no columns"):
        from_dataset("digits", partition="column:writer")


def test_damaged_files_are_named(tmp_path):
    """A truncated npz, IDX or binary file is reported by its path."""
    (tmp_path / "mnist.npz").write_bytes(b"PK broken")
    with pytest.raises(FederationError, match=r"Cannot read .*mnist\.npz"):
        load("mnist", tmp_path)
    write = tmp_path / "FashionMNIST/raw"
    for start in ("train", "t10k"):
        write_idx(write / f"{start}-images-idx3-ubyte", pictures(2))
        write_idx(write / f"{start}-labels-idx1-ubyte", np.zeros(2, np.uint8))
    whole = (write / "t10k-images-idx3-ubyte").read_bytes()
    (write / "t10k-images-idx3-ubyte").write_bytes(whole[:-9])
    with pytest.raises(FederationError, match=r"t10k-images-idx3-ubyte: it should hold"):
        load("fashion_mnist", tmp_path)
    (tmp_path / "cifar-100-binary").mkdir()
    for file in ("train.bin", "test.bin"):
        (tmp_path / "cifar-100-binary" / file).write_bytes(b"123")
    with pytest.raises(FederationError, match=r"train\.bin: 3 bytes"):
        load("cifar100", tmp_path)
    np.savez(
        tmp_path / "emnist.npz",
        **{f"{k}_{s}": np.array([{}], dtype=object) for k in "xy" for s in ("train", "test")},
    )
    with pytest.raises(FederationError, match=r"emnist\.npz: Object arrays"):
        load("emnist", tmp_path)


def test_available_lists_what_is_here_and_how_to_get_the_rest(tmp_path):
    """Each data set is found, with its true size, or comes with the way to get it."""
    np.savez(
        tmp_path / "emnist_balanced.npz",
        x_train=pictures(4),
        y_train=np.zeros(4),
        x_test=pictures(1),
        y_test=np.zeros(1),
    )
    rows = {row.name: row for row in available(tmp_path)}
    assert rows["digits"].found == "with Sartor"
    assert rows["emnist"].samples == "4 + 1 (a subset)"
    assert rows["emnist"].found is not None
    assert rows["emnist"].found.endswith("emnist_balanced.npz")
    assert rows["cifar100"].found is None
    assert "cifar-100-binary" in rows["cifar100"].how
    fed = from_dataset("emnist", partition="iid", clients=1, data_dir=tmp_path)
    assert fed.info["subset"] == "4 training samples; the published set has 112,800"


def test_a_subset_says_so_wherever_it_is_described(tmp_path):
    """Fewer images than were published: in the record, in the summary, and in the list."""
    rows = {"train": 94, "test": 47}
    arrays = {f"x_{k}": pictures(n) for k, n in rows.items()}
    arrays |= {f"y_{k}": np.arange(n) % 47 for k, n in rows.items()}
    np.savez(tmp_path / "emnist_balanced.npz", **arrays)
    fed = from_dataset("emnist", partition="iid", clients=2, data_dir=tmp_path)
    assert fed.info["subset"] == "94 training samples; the published set has 112,800"
    assert "a subset of the published data: 94 training samples; the" in fed.summary()
    listed = {row.name: row.samples for row in available(tmp_path)}
    assert listed["emnist"] == "94 + 47 (a subset)"
    assert listed["mnist"] == "60,000 + 10,000"
    assert "subset" not in from_dataset("digits", clients=2).summary()


def test_images_can_be_scaled_as_the_papers_do(tmp_path):
    """Pixels p: p/255, (p - mean)/(deviation + 0.001) over everything, or pixel by pixel."""
    train, test = pictures(60), pictures(20)
    train[:, 0, 0] = 7  # a pixel that never changes must not divide by zero
    test[:, 0, 0] = 7
    y = np.arange(80) % 10
    np.savez(tmp_path / "mnist.npz", x_train=train, y_train=y[:60], x_test=test, y_test=y[60:])
    whole = np.concatenate([train, test]).astype(np.float64)[:, None]
    official = whole[:60]

    def made(scale, partition):
        options = {"clients": 2, "data_dir": tmp_path, "min_train": 1}
        return from_dataset("mnist", scale=scale, partition=partition, **options).x.double()

    def wanted(known, axis):
        return (whole - known.mean(axis)) / (known.std(axis) + 0.001)

    close = {"atol": 2e-4, "rtol": 1e-5}
    torch.testing.assert_close(made("unit", "iid"), torch.from_numpy(whole / 255), **close)
    for partition, known in (("iid", official), ("iid:pfllib", whole)):
        x = made("standard", partition)
        torch.testing.assert_close(x, torch.from_numpy(wanted(known, None)), **close)
        x = made("pixel", partition)
        torch.testing.assert_close(x, torch.from_numpy(wanted(known, 0)), **close)
    assert torch.equal(made("symmetric", "iid"), made(None, "iid"))
    first, again = (
        from_dataset("mnist", scale="pixel", partition="iid", clients=2, data_dir=tmp_path, seed=s)
        for s in (0, 1)
    )
    assert first.x is again.x  # seeds share the features
    assert first.info["scale"] == "pixel"
    with pytest.raises(ConfigError, match=r"Unknown scale 'pixels'.*'pixel'"):
        made("pixels", "iid")
    with pytest.raises(ConfigError, match="are for texts"):
        from_dataset("digits", length=3)
