"""Laws of federations from torch data sets and from Hugging Face data sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from sartor.core.errors import FederationError
from sartor.data import Federation


class Pairs(Dataset):
    """A data set that is read sample by sample."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Columns:
    """What a Hugging Face data set looks like from outside."""

    def __init__(self, features=None, **columns):
        self.columns, self.features = columns, features or {}
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]


def test_torch_data_sets_are_clients():
    """A TensorDataset and one read sample by sample make the same federation."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    made = [
        Federation.from_torch({"oslo": kind(x, y), "bonn": kind(x + 1, y)}, seed=1)
        for kind in (TensorDataset, Pairs)
    ]
    assert made[0].names == ("oslo", "bonn")
    assert made[0].fingerprint() == made[1].fingerprint()
    assert torch.equal(made[0].x, torch.cat([x, x + 1]))


def test_given_parts_are_kept():
    """Data sets called train, val and test stay what they are."""
    x, y = torch.arange(6.0)[:, None], torch.tensor([0, 1] * 3)
    parts = {"train": Pairs(x, y), "val": Pairs(x + 10, y), "test": Pairs(x + 20, y)}
    fed = Federation.from_torch({"a": parts, "b": parts}, standardise=True)
    mean, scale = (fed.info["preprocessing"][key][0] for key in ("mean", "scale"))
    assert mean == 2.5  # of training samples alone
    for name, shift in (("train", 0), ("val", 10), ("test", 20)):
        values = fed.x[fed.split(name).of(1)][:, 0] * scale + mean
        assert values.tolist() == pytest.approx([v + shift for v in range(6)], abs=1e-5)


def test_all_faults_of_torch_data_sets_are_told():
    """Faults of every client are in one message."""
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(FederationError) as caught:
        Federation.from_torch(
            {
                "a": Pairs(x, y),
                "b": Pairs(torch.randn(4, 2), y),
                "c": Pairs([], []),
                "d": [1, 2],
                "e": Pairs(["text"], [0]),
            }
        )
    text = str(caught.value)
    for part in (
        "Client c: the data set has no",
        "Client d: 2 items are not pairs",
        "Client e: it",
    ):
        assert part in text
    assert "x has different shapes in different clients: [(2,), (3,)]" in text
    with pytest.raises(FederationError, match="dict from a client's name"):
        Federation.from_torch([Pairs(x, y)])
    with pytest.raises(FederationError, match="give all alike"):
        Federation.from_torch({"a": Pairs(x, y), "b": {"train": Pairs(x, y)}})


def test_a_hugging_face_table_is_a_table():
    """Columns of a data set are those of a table; its parts are kept."""
    rows = {"user": list("aabb"), "v": [1.0, 2, 3, 4], "label": [0, 1, 0, 1]}
    one = Federation.from_hf(Columns(**rows), "user", seed=2)
    two = Federation.from_dataframe(rows, client="user", label="label", seed=2)
    assert one.fingerprint() == two.fingerprint()
    parts = {"train": Columns(**rows), "validation": Columns(**rows), "test": Columns(**rows)}
    fed = Federation.from_hf(parts, "user")
    sizes = [fed.split(name).sizes.tolist() for name in ("train", "val", "test")]
    assert sizes == [[2, 2]] * 3
    with pytest.raises(FederationError, match="did you mean 'user'"):
        Federation.from_hf(Columns(**rows), "usr")
    with pytest.raises(FederationError, match="with the parts extra"):
        Federation.from_hf({"extra": Columns(**rows)}, "user")


def test_texts_and_images_of_hugging_face():
    """A text column becomes token ids, an image column pixels between 0 and 1."""
    rows = {
        "user": list("aabb"),
        "t": ["one two", "two", "two three", "one"],
        "label": [0, 1, 0, 1],
    }
    fed = Federation.from_hf(Columns(**rows), "user", text="t", length=4)
    assert (fed.x.dtype, tuple(fed.x.shape)) == (torch.int64, (4, 4))
    Image = type("Image", (), {})
    pixels = [np.full((6, 6, 3), 51 * i, dtype=np.uint8) for i in range(4)]
    fed = Federation.from_hf(
        Columns({"picture": Image()}, user=list("aabb"), picture=pixels, label=[0, 1, 0, 1]), "user"
    )
    assert tuple(fed.x.shape) == (4, 3, 6, 6)
    assert fed.x[2].unique().tolist() == pytest.approx([0.4])


def test_real_hugging_face_data_sets():
    """The library's own classes work, with the names of its class labels."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "user": datasets.Value("string"),
            "v": datasets.Value("float32"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    rows = {"user": list("aabb"), "v": [1.0, 2, 3, 4], "label": [0, 1, 0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    fed = Federation.from_hf(datasets.DatasetDict(train=data, test=data), "user")
    assert fed.info["class_names"] == ["no", "yes"]
    assert fed.train.sizes.tolist() == [2, 2]
