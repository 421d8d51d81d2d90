"""Laws of the federation: what it keeps, what it refuses, and what a seed may change."""

from __future__ import annotations

import copy
import json
import pickle
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sartor
from sartor.core.errors import ConfigError, FederationError
from sartor.data import Federation, Ragged
from sartor.engines.arena import build_arena


def make(sizes, *, seed=0, classes=3, width=2, **options):
    """Return a federation with the given client sizes, and its arrays."""
    rng = np.random.default_rng(7)
    client = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = rng.normal(size=(len(client), width)).astype(np.float32)
    y = rng.integers(0, classes, len(client))
    fed = Federation.from_arrays(x, y, client=client, seed=seed, num_classes=classes, **options)
    return fed, x, y, client


sizes_of_clients = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@given(
    sizes=sizes_of_clients,
    test=st.floats(0, 0.6),
    val=st.floats(0, 0.35),
    stratify=st.booleans(),
    seed=st.integers(-5, 10**12),
)
def test_every_sample_goes_to_one_split_of_its_own_client(sizes, test, val, stratify, seed):
    """Each sample is in exactly one split, that of its client, and every client can train."""
    fed, x, y, client = make(sizes, test=test, val=val, stratify=stratify, seed=seed)
    rows = torch.cat([fed.train.rows, fed.val.rows, fed.test.rows])
    assert sorted(rows.tolist()) == list(range(len(x)))
    for split in (fed.train, fed.val, fed.test):
        names = [fed.names[i] for i in split.owner.tolist()]
        assert names == [str(c) for c in client[split.rows.numpy()]]
    assert int(fed.train.sizes.min()) >= 1
    assert torch.equal(fed.x, torch.from_numpy(x))
    assert fed.y.tolist() == y.tolist()


@given(sizes=sizes_of_clients, test=st.floats(0.05, 0.6))
def test_the_test_share_is_the_nearest_number_that_leaves_one_to_train(sizes, test):
    """A client of n samples gives round(test n) to test: one at least, all but one at most."""
    fed, *_ = make(sizes, test=test)
    for size, held in zip(sizes, fed.test.sizes.tolist(), strict=True):
        assert held == min(max(int(np.floor(size * test + 0.5)), 1), size - 1)


@given(sizes=st.lists(st.integers(2, 20), min_size=2, max_size=6), stratify=st.booleans())
def test_a_clients_split_does_not_change_when_another_clients_data_change(sizes, stratify):
    """Dropping, enlarging or reordering the other clients leaves a client's division alone."""
    fed, x, y, client = make(sizes, val=0.2, stratify=stratify)
    keep = client == 0
    more = np.concatenate([x[keep], np.full((50, 2), 9.0)])
    labels = np.concatenate([y[keep], np.arange(50) % 3])
    other = Federation.from_arrays(
        more, labels, client=["0"] * sum(keep) + ["!a"] * 50, val=0.2, stratify=stratify
    )
    mine = other.index("0")
    assert mine == 1
    for name in ("train", "val", "test"):
        before = fed.x[fed.split(name).of(fed.index("0"))]
        assert torch.equal(before, other.x[other.split(name).of(mine)])


def test_another_seed_draws_another_split():
    """The seed decides which samples are held out, and the same seed decides the same."""
    one, again, other = (make([40, 40], seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(one.test.rows, again.test.rows)
    assert not torch.equal(one.test.rows, other.test.rows)


@given(counts=st.lists(st.integers(4, 40), min_size=2, max_size=4))
def test_stratified_test_samples_keep_the_class_shares(counts):
    """Every class of a client gives its share of the test samples, up to one sample."""
    y = np.repeat(np.arange(len(counts)), counts)
    fed = Federation.from_arrays(
        np.zeros((len(y), 1)), y, client=np.zeros(len(y), int), test=0.25, stratify=True
    )
    held = fed.label_counts("test")[0].numpy()
    share = int(fed.test.sizes[0]) / len(y)
    assert np.abs(held - share * np.array(counts)).max() <= 1


def test_test_samples_may_be_marked():
    """With a mask, exactly the marked samples are test samples."""
    marks = np.array([True, False, False, True, False])
    fed = Federation.from_arrays(
        np.zeros((5, 1)), [0, 1, 0, 1, 0], client=[0, 0, 0, 1, 1], test=marks
    )
    assert fed.test.rows.tolist() == [0, 3]
    assert fed.train.rows.tolist() == [1, 2, 4]


def test_marks_of_zero_and_one_and_columns_of_text_objects_are_understood():
    """0 and 1 mark test samples like booleans; ids and labels may be objects that are text."""
    text = np.array(["b", "a", "b"], dtype=object)
    fed = Federation.from_arrays(np.zeros((3, 1)), text, client=text, test=[0, 0, 1])
    assert fed.names == ("a", "b")
    assert fed.y.tolist() == [1, 0, 1]
    assert fed.test.rows.tolist() == [2]


def test_one_client_one_class_and_one_sample_are_enough():
    """The smallest federation works: its one sample is for training."""
    fed = Federation.from_arrays([[1.0]], [0], client=["only"], val=0.2)
    assert (fed.num_clients, fed.num_classes) == (1, 1)
    assert fed.train.sizes.tolist() == [1]
    assert fed.test.sizes.tolist() == [0]
    assert fed.val.sizes.tolist() == [0]
    json.dumps(fed.describe())
    assert "only" in fed.summary()


@given(sizes=sizes_of_clients)
def test_label_counts_are_those_of_a_plain_count(sizes):
    """label_counts equals counting the labels of each client one by one."""
    fed, *_ = make(sizes)
    for split in ("train", "val", "test"):
        counts = fed.label_counts(split)
        for i in range(fed.num_clients):
            labels = fed.y[fed.split(split).of(i)].tolist()
            assert counts[i].tolist() == [labels.count(c) for c in range(3)]


def test_without_drops_clients_by_name_or_position_and_nothing_else():
    """The other clients keep their rows; an unknown name is refused with the nearest one."""
    fed, *_ = make([5, 6, 7, 8])
    small = fed.without("1", 3)
    assert small.names == ("0", "2")
    for i, name in enumerate(small.names):
        assert torch.equal(small.train.of(i), fed.train.of(fed.index(name)))
        assert torch.equal(small.test.of(i), fed.test.of(fed.index(name)))
    assert small.info["left_out"] == ["1", "3"]
    named = Federation.from_arrays([[0.0], [1.0]], [0, 1], client=["north", "south"])
    with pytest.raises(FederationError, match="did you mean 'north'"):
        named.without("nort")
    with pytest.raises(FederationError, match="0 to 3"):
        fed.without(4)
    with pytest.raises(FederationError, match="no client"):
        named.without(0, 1)


def test_the_fingerprint_sees_data_rows_and_names():
    """Equal federations share a fingerprint; any change of data, split or names changes it."""
    fed, x, y, client = make([6, 7])
    prints = {fed.fingerprint()}
    assert make([6, 7])[0].fingerprint() in prints
    changed = x.copy()
    changed[0, 0] += 1
    for other in (
        Federation.from_arrays(changed, y, client=client, num_classes=3),
        Federation.from_arrays(x, (y + 1) % 3, client=client, num_classes=3),
        Federation.from_arrays(x, y, client=client, num_classes=4),
        Federation.from_arrays(x, y, client=client, num_classes=3, seed=1),
        Federation.from_arrays(x, y, client=client, num_classes=3, names=["a", "b"]),
    ):
        prints.add(other.fingerprint())
    assert len(prints) == 6


def test_all_faults_are_listed_at_once_with_rows_and_clients():
    """NaN features and labels out of range are reported together, naming rows and clients."""
    x = np.zeros((6, 2))
    x[1, 0], x[4, 1] = np.nan, np.inf
    with pytest.raises(FederationError) as caught:
        Federation.from_arrays(
            x, [0, 1, -1, 0, 5, 1], client=["a", "a", "b", "b", "c", "c"], num_classes=2, val=1.5
        )
    text = str(caught.value)
    assert "3 faults" in text
    assert "2 samples have NaN or infinite features: rows 1, 4 (clients a, c)" in text
    assert "out of range 0..1: rows 2, 4 have -1, 5 (clients b, c)" in text
    assert "val must be a fraction" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": [0, 1, 0.5]}, r"rows 2: 0.5\) \(client 1\)"),
        ({"y": [0, np.nan, 1]}, "not whole numbers"),
        ({"y": [0, 1]}, "x has 3, y has 2, client has 3"),
        ({"y": [0, 1, -1]}, "out of range"),
        ({"y": np.array([0, "a", None], dtype=object)}, "y has dtype object"),
        ({"y": [[0], [1], [1]]}, "one label per sample"),
        ({"x": np.array([[1], ["a"], [None]], dtype=object)}, "x has dtype object"),
        ({"x": np.zeros((3, 2), dtype=complex)}, "complex"),
        ({"x": torch.zeros(3, 2, dtype=torch.complex64)}, "complex"),
        ({"x": np.zeros((3, 2)), "tokens": True}, "tokens=True"),
        ({"client": [0.5, 1.0, 2.0]}, "one integer or string per sample"),
        ({"client": [0, 1, 5], "names": ["a", "b"]}, "not in names"),
        ({"client": ["a", "b", "x"], "names": ["a", "b"]}, "not in names"),
        ({"x": np.zeros((0, 2)), "y": [], "client": np.zeros(0, int)}, "no samples"),
        ({"test": 1.0}, "fraction in"),
        ({"test": "half"}, "True or False per sample"),
        ({"test": [0, 1, 2]}, "True or False per sample"),
        ({"test": [True, False]}, "test has 2"),
        ({"x": [[np.nan], [0], [0]], "y": [0, 0.5, 0]}, "2 faults"),
        ({"test": 0.5, "val": 0.5}, "below 1"),
        ({"num_classes": -1}, "num_classes must be >= 0"),
        ({"min_samples": 9}, "No client has 9"),
        ({"info": {"a": object()}}, "JSON-able"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changes, message):
    """Each kind of bad input gives a FederationError that names it."""
    given = {"x": np.zeros((3, 2)), "y": [0, 1, 1], "client": [0, 1, 1]} | changes
    with pytest.raises(FederationError, match=message):
        Federation.from_arrays(given.pop("x"), given.pop("y"), **given)


def test_an_empty_client_is_refused_by_name_and_min_samples_drops_it():
    """A client of which no sample is there is named, and so is the way out."""
    names = [str(i) for i in range(18)]
    ids = np.repeat(np.arange(17), 4)
    x, y = np.zeros((len(ids), 1)), np.zeros(len(ids), int)
    with pytest.raises(FederationError, match=r"Client 17 has no training samples.*min_samples=1"):
        Federation.from_arrays(x, y, client=ids, names=names)
    fed = Federation.from_arrays(x, y, client=ids, names=names, min_samples=1)
    assert fed.names == tuple(names[:17])
    assert fed.info["left_out"] == ["17"]


def test_labels_may_be_text_floats_or_real_targets():
    """Text becomes classes in sorted order, whole floats classes, and 0 classes regression."""
    x, client = np.zeros((3, 1)), [0, 0, 1]
    text = Federation.from_arrays(x, ["cat", "ant", "cat"], client=client)
    assert text.y.tolist() == [1, 0, 1]
    assert text.info["class_names"] == ["ant", "cat"]
    assert Federation.from_arrays(x, [0.0, 2.0, 1.0], client=client).num_classes == 3
    real = Federation.from_arrays(x, [0.5, 2.0, 1.0], client=client, num_classes=0)
    assert real.y.dtype == torch.float32
    assert real.label_counts().shape == (2, 0)
    assert "real targets" in real.summary()
    json.dumps(real.describe())
    with pytest.raises(FederationError, match="targets are NaN"):
        Federation.from_arrays(x, [0.5, np.nan, 1.0], client=client, num_classes=0)


@pytest.mark.parametrize("kind", ["float64", "int64", "list", "torch"])
def test_numbers_are_kept_as_they_are_given(kind: str):
    """1e8 … 1e8 + 7 are eight numbers, as targets and features; a float64 run trains on them.

    A float32 run cannot, and says so; before they became two values for every run.
    """
    values = np.arange(8, dtype=np.int64) + 10**8
    kinds: dict[str, Any] = {
        "float64": values.astype(np.float64),
        "int64": values,
        "list": values.tolist(),
        "torch": torch.from_numpy(values).double(),
    }
    y = kinds[kind]
    x = torch.stack([y] * 2, 1) if kind == "torch" else np.stack([y] * 2, 1)
    fed = Federation.from_arrays(x, y, client=[0, 1] * 4, num_classes=0, test=0.0)
    assert fed.y.tolist() == values.tolist()
    assert fed.x[:, 1].tolist() == values.tolist()
    arena = build_arena([fed], torch.device("cpu"), torch.float64)
    assert arena.y.tolist() == values.tolist()
    with (
        pytest.warns(UserWarning, match="features vary by little .* dtype='float64'"),
        pytest.warns(UserWarning, match="targets vary by little .* dtype='float64'"),
    ):
        assert len(build_arena([fed], torch.device("cpu"), torch.float32).y.unique()) == 2


def test_numbers_are_held_in_the_precision_that_is_asked_for():
    """By default single where it is fine enough, as for a constant; else to the last bit."""
    x = np.array([[0.1, 0.7], [0.2, 0.7], [0.3, 0.7], [0.4, 0.7]])
    settings = {"client": [0, 1, 0, 1], "num_classes": 0, "test": 0.0}
    for standardise in (False, True):
        made = {
            dtype: Federation.from_arrays(
                x, x[:, 0], dtype=dtype, standardise=standardise, **settings
            )
            for dtype in (None, "float32", "float64")
        }
        assert made[None].x.dtype == made["float32"].y.dtype == torch.float32
        own = x - x.mean(0) if standardise else x
        wanted = own[:, 0] / x[:, 0].std() if standardise else own[:, 0]
        np.testing.assert_allclose(made["float64"].x[:, 0], wanted, rtol=1e-14)
        assert made["float64"].y.tolist() == x[:, 0].tolist()
        torch.testing.assert_close(made["float64"].x.float(), made[None].x, rtol=0, atol=2e-7)
    assert (
        Federation.from_arrays(x + 1e9, x[:, 0] + 1e9, dtype="float32", **settings).x.dtype
        == torch.float32
    )
    with pytest.raises(FederationError, match="no dtype 'float46'; did you mean 'float64'"):
        Federation.from_arrays(x, x[:, 0], dtype="float46", **settings)


def test_integers_are_features_unless_they_are_tokens():
    """Integer arrays become float32, with tokens=True int64, in any byte order or width."""
    for dtype in (np.uint8, np.int16, np.dtype(">i4"), np.dtype(">f8"), np.float16, np.bool_):
        x = np.array([[0, 1], [1, 0]]).astype(dtype)
        fed = Federation.from_arrays(x, [0, 1], client=[0, 1])
        assert fed.x.dtype == torch.float32
        assert fed.x.tolist() == [[0, 1], [1, 0]]
    tokens = Federation.from_arrays(torch.tensor([[3, 4]]), [0], client=[0], tokens=True)
    assert tokens.x.dtype == torch.int64


def test_a_client_is_never_tested_on_what_it_trains_on():
    """Overlapping splits of one client are refused; clients may share rows otherwise."""
    x, y = torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)
    none = Ragged.empty(2)

    def build(train, test):
        return Federation(
            x, y, Ragged.from_lists(train), none, Ragged.from_lists(test), ("a", "b"), 1
        )

    shared = build([[0], [1]], [[2], [2]])
    assert shared.num_samples == 4
    with pytest.raises(FederationError, match=r"1 samples are in train and in test .* \(b\)"):
        build([[0], [1, 2]], [[2], [2]])


@pytest.mark.parametrize(
    ("train", "names", "message"),
    [
        (Ragged.from_lists([[0], [5]]), ("a", "b"), "must lie in 0..2"),
        (Ragged.from_lists([[0], [1]]), ("a", "a"), "given twice: a"),
        (Ragged.from_lists([[0]]), ("a", "b"), "over 1 clients"),
        (Ragged(torch.tensor([0, 1]), torch.tensor([0, 2, 1])), ("a", "b"), "must rise"),
        (Ragged(torch.tensor([0, 1]).int(), torch.tensor([0, 1, 2])), ("a", "b"), "int64"),
    ],
)
def test_broken_index_lists_are_refused(train, names, message):
    """Rows and offsets that do not describe the data are refused before anything else."""
    none = Ragged.empty(2)
    with pytest.raises(FederationError, match=message):
        Federation(
            torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), train, none, none, names, 1
        )


@given(lists=st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6))
def test_ragged_keeps_every_list(lists):
    """A Ragged returns the lists it was made of, whole or selected."""
    ragged = Ragged.from_lists(lists)
    assert [ragged.of(i).tolist() for i in range(len(lists))] == lists
    assert ragged.sizes.tolist() == [len(one) for one in lists]
    keep = torch.tensor([i % 2 == 0 for i in range(len(lists))])
    part = ragged.select(keep)
    assert [part.of(i).tolist() for i in range(part.num_clients)] == lists[::2]
    with pytest.raises(IndexError):
        ragged.of(len(lists))


def test_a_hundred_thousand_clients_are_built_in_seconds():
    """Construction has no loop over samples: 100,000 clients of 6 samples take under 20 s."""
    clients = 100_000
    ids = np.arange(6 * clients) % clients
    started = time.perf_counter()
    fed = Federation.from_arrays(np.zeros((len(ids), 1), np.float32), ids % 10, client=ids)
    assert fed.num_clients == clients
    assert fed.label_counts().sum() == len(fed.train.rows)
    assert fed.without(3).num_clients == clients - 1
    assert time.perf_counter() - started < 20


def test_arrays_belong_to_from_arrays() -> None:
    empty = Ragged.from_lists([[]])
    given = (np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=np.int64))
    with pytest.raises(FederationError, match="from_arrays"):
        Federation(*given, Ragged.from_lists([[0, 1]]), empty, empty, ("a",), 2)


@pytest.mark.parametrize(
    ("given", "named"),
    [((1,), {}), ((1, 2), {}), ((1, 2), {"client": [0]}), ((), {"x": 1, "y": 2})],
)
def test_arrays_alone_are_reported_what_to_call(given, named):
    """Federation(x, y) names the maker for arrays, with its argument, and the others."""
    with pytest.raises(FederationError, match=r"Federation\.from_arrays\(x, y, client=\.\.\.\)"):
        Federation(*given, **named)


def test_a_federation_is_still_copied_and_stored():
    """Copies, pickles and replacements go past that check."""
    fed, *_ = make([4, 5])
    # Pickled on purpose: that is how a process hands a federation to another one.
    for other in (copy.copy(fed), pickle.loads(pickle.dumps(fed)), replace(fed, info={"a": 1})):
        assert other.fingerprint() == fed.fingerprint()


@pytest.mark.parametrize("wrong", [(np.ones((4, 2)), np.ones(4)), {"a": 1}, "digits", np.ones(3)])
def test_what_is_no_federation_is_reported_how_to_become_one(wrong):
    """Fit says what it got and how a federation is made."""
    with pytest.raises(ConfigError, match=r"should be a sartor.Federation, got .*from_arrays"):
        sartor.fit("local", wrong, rounds=1)
    with pytest.raises(ConfigError, match=r"for seed 0, should be"):
        sartor.fit("local", lambda seed: wrong, rounds=1)


def test_methods_may_be_written_with_commas():
    """compare("a, b") is compare(["a", "b"]), as on the command line."""
    fed, *_ = make([8, 9])
    found = sartor.compare("local, fedavg", fed, rounds=1, baselines=False)
    assert list(found) == ["local", "fedavg"]


def test_a_client_is_asked_for_by_name_or_position():
    """`fed["b"]` has the samples of that client, `fed.train[1]` its rows; a loop goes over them."""
    fed, x, y, client = make([5, 8, 3], val=0.2, test=0.25)
    assert fed.clients == fed.names
    for position, name in enumerate(fed.clients):
        rows = fed.train[position]
        assert torch.equal(rows, fed.train.of(position))
        assert (client[rows.numpy()] == position).all()
        own = fed[name]
        assert len(own) == (client == position).sum() == len(own.x) == len(own.y)
        for split in ("train", "val", "test"):
            places = getattr(own, split)
            rows = fed.split(split)[position]
            assert torch.equal(own.x[places], torch.from_numpy(x)[rows])
            assert torch.equal(own.y[places], torch.from_numpy(y)[rows])
    assert len(fed.train) == 3
    assert [len(rows) for rows in fed.train] == fed.train.sizes.tolist()
    assert [one.name for one in fed] == list(fed.clients)
    assert fed.clients[0] in fed
    assert "nobody" not in fed
    assert torch.equal(fed.train[-1], fed.train[2])
    with pytest.raises(IndexError, match="client 3 of a split over 3 clients"):
        fed.train[3]
    with pytest.raises(TypeError, match=r"federation\[name\] has the samples"):
        fed.train["1"]
    with pytest.raises(FederationError, match="There is no client 'z'"):
        fed["z"]


def test_a_client_shows_its_sizes_and_classes():
    """A prompt shows what a client has, by the names of the classes."""
    table = {"site": list("aaab"), "age": [1.0, 2.0, 3.0, 4.0], "ill": ["no", "yes", "no", "no"]}
    fed = Federation.from_dataframe(table, client="site", label="ill", test=0)
    shown = "ClientData('a', train=3, val=0, test=0, input_shape=(1,), no:2 yes:1)"
    assert repr(fed["a"]) == shown
