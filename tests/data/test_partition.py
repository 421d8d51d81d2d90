"""Laws of the partitions: nobody shares a sample, seeds decide, floors hold, errors help."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.errors import ConfigError, FederationError
from sartor.data.partition import PartitionSpec, divide, parse_partition


def labels(num_train=4000, num_test=1000, classes=10):
    return np.concatenate([np.arange(num_train) % classes, np.arange(num_test) % classes])


def draw(spec, clients=20, num_train=4000, num_test=1000, classes=10, **options):
    y = labels(num_train, num_test, classes)
    return y, divide(y, spec, clients=clients, num_train=num_train, **options)


def counts(y, split, classes=10):
    table = np.zeros((split.num_clients, classes), int)
    np.add.at(table, (split.owner.numpy(), y[split.rows.numpy()]), 1)
    return table


SPECS = ["dirichlet:0.5", "pathological:2", "iid"]


@given(
    spec=st.sampled_from(SPECS),
    protocol=st.sampled_from(["authors", "pfllib"]),
    clients=st.sampled_from([1, 5, 10, 20]),
    seed=st.integers(0, 2**40),
)
def test_every_sample_is_given_to_at_most_one_client(spec, protocol, clients, seed):
    """No row occurs twice, in train or test, and every client has both."""
    if clients == 1 and spec.startswith("pathological"):
        clients = 5
    y, drawn = draw(spec, clients, seed=seed, protocol=protocol)
    rows = np.concatenate([drawn.train.rows.numpy(), drawn.test.rows.numpy()])
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < len(y)
    assert drawn.train.num_clients == drawn.test.num_clients == clients == len(drawn.names)
    assert int(drawn.train.sizes.min()) > 0
    assert int(drawn.test.sizes.min()) > 0


@given(seed=st.integers(0, 1000), spec=st.sampled_from(["dirichlet:0.3", "pathological:2"]))
def test_authors_give_test_labels_the_shares_of_the_training_labels(seed, spec):
    """One share matrix divides both sets, so class counts agree up to rounding, sets apart."""
    y, drawn = draw(spec, seed=seed)
    assert int(drawn.train.rows.max()) < 4000 <= int(drawn.test.rows.min())
    train, test = counts(y, drawn.train), counts(y, drawn.test)
    assert np.abs(train / 4 - test).max() <= 1  # 400 and 100 samples a class


@given(seed=st.integers(0, 1000))
def test_authors_take_samples_in_stored_order(seed):
    """Each class is handed out from the front: client by client, in stored order."""
    y, drawn = draw("dirichlet:0.5", seed=seed)
    for c in range(10):
        rows = drawn.train.rows.numpy()
        taken = rows[y[rows] == c]
        assert taken.tolist() == list(range(c, 10 * len(taken), 10))


@pytest.mark.parametrize(
    ("clients", "classes", "k", "size"),
    [(20, 10, 2, 4), (50, 10, 2, 10), (20, 100, 10, 2), (50, 100, 10, 5)],
)
def test_authors_pathological_clients_form_groups_with_the_same_classes(clients, classes, k, size):
    """Blocks of M k / C clients share k classes, blocks are disjoint, shares lie near equal."""
    y, drawn = draw(f"pathological:{k}", clients, 60_000, 10_000, classes)
    held = counts(y, drawn.train, classes)
    for client in range(clients):
        group = client // size
        assert np.flatnonzero(held[client]).tolist() == list(range(group * k, group * k + k))
    for c in range(classes):
        shares = held[:, c][held[:, c] > 0]
        assert shares.max() / shares.min() < 0.7 / 0.3 + 0.1


def test_authors_floors_are_those_of_the_protocol_when_data_are_many():
    """With many samples every client has more than 128 for training and more than 2 for test."""
    for seed in range(5):
        _, drawn = draw("dirichlet:0.1", 20, 50_000, 10_000, seed=seed)
        assert int(drawn.train.sizes.min()) > 128
        assert int(drawn.test.sizes.min()) > 2
        assert (drawn.info["min_train"], drawn.info["min_test"]) == (129, 3)
        assert "min_train_note" not in drawn.info


def test_fifty_clients_of_fifty_thousand_need_and_get_hundreds_of_tries():
    """A draw that is accepted once in 500 times is found, on counts alone."""
    tries = [draw("dirichlet:0.1", 50, 50_000, 10_000, seed=s)[1].info["tries"] for s in range(8)]
    assert 50 < np.mean(tries) < 3000


def test_floors_shrink_with_the_data_and_say_so():
    """Where 129 samples a client cannot be had, a tenth of the mean client is asked, and noted."""
    _, drawn = draw("dirichlet:0.1", 20, 1347, 450)
    assert drawn.info["min_train"] == 6
    assert "lowered to 6" in drawn.info["min_train_note"]
    assert int(drawn.train.sizes.min()) >= 6
    _, strict = draw("dirichlet:0.5", 20, 1347, 450, min_train=20, min_test=5)
    assert int(strict.train.sizes.min()) >= 20
    assert int(strict.test.sizes.min()) >= 5


@given(seed=st.integers(0, 1000))
def test_pfllib_dirichlet_holds_the_floor_and_splits_three_to_one(seed):
    """Every client has 40 samples or more, three quarters of them, rounded down, to train."""
    _, drawn = draw("dirichlet:0.3:pfllib", seed=seed)
    sizes = (drawn.train.sizes + drawn.test.sizes).numpy()
    assert sizes.min() >= 40 == drawn.info["min_samples"]
    assert sizes.sum() == 5000
    assert drawn.train.sizes.tolist() == (sizes * 0.75).astype(int).tolist()


def test_pfllib_stops_feeding_clients_at_their_fair_size():
    """Before the last class that a client got, it held less than N/M samples."""
    for seed in range(10):
        y, drawn = draw("dirichlet:0.3:pfllib", seed=seed)
        held = counts(y, drawn.train) + counts(y, drawn.test)
        for row in held[:-1]:  # rounding may leave a sample of a class to the very last client
            last = np.flatnonzero(row)[-1]
            assert row[:last].sum() < 5000 / 20


def test_pfllib_pathological_gives_the_last_of_a_group_the_rest():
    """All samples are used, and the last client of each group is the largest."""
    _, drawn = draw("pathological:2:pfllib", seed=3)
    sizes = (drawn.train.sizes + drawn.test.sizes).numpy().reshape(5, 4)
    assert sizes.sum() == 5000
    assert (sizes.argmax(1) == 3).all()
    assert sizes.min() >= 2 * 12  # two classes of 500, a tenth of the mean of 125 from each


def test_iid_clients_are_equal_in_size_and_alike():
    """Sizes differ by one at most, everything is used, and no class is missing."""
    for protocol in ("authors", "pfllib"):
        y, drawn = draw("iid", 7, protocol=protocol)
        sizes = (drawn.train.sizes + drawn.test.sizes).numpy()
        assert np.ptp(sizes) <= 2
        assert sizes.sum() == 5000
        assert counts(y, drawn.train).min() > 20


def test_a_column_makes_one_client_of_every_value():
    """Clients are the values, named after them; official test samples are kept where all have."""
    y = labels(8, 4, 2)
    writers = np.array(["w2", "w1", "w3", "w2"] * 3)
    drawn = divide(y, "column:writer", num_train=8, attributes={"writer": writers})
    assert drawn.names == ("w1", "w2", "w3")
    assert drawn.train.rows.tolist() == [1, 5, 0, 3, 4, 7, 2, 6]
    assert drawn.test.rows.tolist() == [9, 8, 11, 10]
    pooled = divide(y, "column:writer:pfllib", num_train=8, attributes={"writer": writers})
    assert pooled.train.sizes.tolist() == [2, 4, 2]
    assert pooled.test.sizes.tolist() == [1, 2, 1]
    some = divide(y, "column:writer", num_train=8, clients=2, attributes={"writer": writers})
    assert set(some.names) < {"w1", "w2", "w3"}
    with pytest.raises(ConfigError, match="did you mean 'writer'"):
        divide(y, "column:writr", attributes={"writer": writers})
    with pytest.raises(FederationError, match="3 values"):
        divide(y, "column:writer", clients=9, attributes={"writer": writers})


def test_users_without_official_test_samples_are_pooled():
    """Split by user, LEAF's users have train or test samples, not both: 75/25 is drawn."""
    users = np.array(["a"] * 8 + ["b"] * 4)
    drawn = divide(labels(8, 4, 2), "column:user", num_train=8, attributes={"user": users})
    assert drawn.info["protocol"] == "pfllib"
    assert drawn.train.sizes.tolist() == [6, 3]
    with pytest.raises(FederationError, match="pfllib"):
        divide(labels(8, 4, 2), "column:user:authors", num_train=8, attributes={"user": users})


def test_without_an_official_split_authors_make_one():
    """A pool without train and test is split 75/25 by class first, and the record says so."""
    y = np.arange(4000) % 10
    drawn = divide(y, "dirichlet:1", clients=5)
    assert "stratified" in drawn.info["official_split"]
    assert counts(y, drawn.train).sum(0).max() <= 300


@given(spec=st.sampled_from([f"{s}:{p}" for s in SPECS for p in ("authors", "pfllib")]))
def test_the_seed_decides_the_draw(spec):
    """The same seed gives the same rows, another seed other rows."""
    one, again, other = (draw(spec, seed=s)[1] for s in (5, 5, 6))
    assert one.train.rows.tolist() == again.train.rows.tolist()
    assert one.test.rows.tolist() == again.test.rows.tolist()
    assert (
        one.train.rows.tolist() != other.train.rows.tolist()
        or one.train.offsets.tolist() != other.train.offsets.tolist()
    )


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("dirichlet:0.1", {"min_train": 180}, "No draw .* Use fewer clients, a larger conc"),
        ("dirichlet:0.1", {"min_train": 300}, "use at most 13 clients or min_train=200"),
        ("pathological:2", {"clients": 7}, "Use clients=5"),
        ("iid", {"clients": 4500}, "use fewer clients"),
        ("dirichlet:0.1", {"clients": 6000}, "cannot share 5000 samples"),
        ("dirichlet:0.1:pfllib", {"min_train": 400}, "lower it or use fewer"),
        ("pathological:2:pfllib", {"clients": 4000}, "cannot be divided among 800"),
    ],
)
def test_a_draw_that_cannot_succeed_says_what_to_change(spec, options, message):
    """Impossible requests end in an error with a way out, never in an endless loop."""
    options = {"clients": 20, "max_tries": 200} | options
    with pytest.raises(FederationError, match=message):
        draw(spec, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "dirichlet:0.1:authors", "protocol": "pfllib"}, "contradicts"),
        ({"spec": "iid", "protocol": "author"}, "did you mean 'authors'"),
        ({"spec": "iid", "clients": 0}, "clients must be >= 1"),
        ({"spec": "iid", "seed": -1}, "seed must be >= 0"),
        ({"spec": "pathological:11"}, "more classes a client than the 10"),
        ({"spec": "dirichlet:1", "min_train": 0}, "min_train must be >= 1"),
        ({"spec": "dirichlet:1:pfllib", "min_test": 2}, "belongs to protocol authors"),
    ],
)
def test_wrong_options_are_refused(options, message):
    """Contradictions and values out of range are configuration errors."""
    with pytest.raises(ConfigError, match=message):
        draw(**options)


@pytest.mark.parametrize("text", ["dirichlet:0.1", "pathological:2:pfllib", "iid", "column:site"])
def test_a_partition_reads_what_it_writes(text):
    """Parsing and printing are inverse."""
    assert str(parse_partition(text)) == text
    assert parse_partition("iid:pfllib") == PartitionSpec("iid", None, "pfllib")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichle:0.1", "did you mean 'dirichlet'"),
        ("dirichlet", "such as dirichlet:0.1"),
        ("dirichlet:x", "needs a number"),
        ("dirichlet:-1", "positive"),
        ("dirichlet:nan", "positive"),
        ("pathological:1.5", "whole number"),
        ("column:", "such as column:writer"),
        ("dirichlet:0.1:pflib", "did you mean 'pfllib'"),
        ("iid:authors:3", "too many parts"),
    ],
)
def test_a_mistyped_partition_is_named_with_the_nearest(text, message):
    """Unknown kinds, protocols and values are configuration errors with a hint."""
    with pytest.raises(ConfigError, match=message):
        parse_partition(text)
