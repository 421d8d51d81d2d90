"""Laws of the partitions of single papers: classes, lognormal sizes, equal sizes, grouped users."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.errors import ConfigError, FederationError
from sartor.data import from_dataset
from sartor.data.partition import divide


def counts(y, split, classes=10):
    table = np.zeros((split.num_clients, classes), int)
    np.add.at(table, (split.owner.numpy(), y[split.rows.numpy()]), 1)
    return table


def uneven(num_train=6000, num_test=1000, classes=10):
    """Labels whose classes are not equally frequent, as MNIST's are not."""
    rng = np.random.default_rng(5)
    shares = rng.uniform(0.8, 1.2, classes)
    return rng.choice(classes, num_train + num_test, p=shares / shares.sum()), num_train


# ---------------------------------------------------------------------- classes:s


@given(
    wanted=st.integers(1, 10),
    clients=st.integers(1, 25),
    samples=st.one_of(st.none(), st.integers(250, 450)),  # the rarest class has 484
    seed=st.integers(0, 2**40),
)
def test_every_client_has_exactly_s_classes_and_the_same_size(wanted, clients, samples, seed):
    """As many classes as asked for, one size, even over the classes, and no sample twice."""
    y, num_train = uneven()
    drawn = divide(
        y, f"classes:{wanted}", clients=clients, num_train=num_train, samples=samples, seed=seed
    )
    table = counts(y, drawn.train)
    assert ((table > 0).sum(1) == wanted).all()
    each = table.sum(1)
    assert len(set(each.tolist())) == 1
    if samples is not None:
        assert each[0] == samples // clients
    held = np.where(table > 0, table, each[0])
    assert (np.where(table > 0, table, 0).max(1) - held.min(1)).max() <= 1
    holders = (table > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    rows = drawn.train.rows.numpy()
    assert len(np.unique(rows)) == len(rows)
    assert rows.max() < num_train


def test_tests_are_the_official_samples_of_ones_own_classes_or_all():
    """Every client is tested on the whole official test set, cut to its classes by default."""
    y, num_train = uneven()
    for protocol in ("own", "all"):
        drawn = divide(y, f"classes:3:{protocol}", clients=10, num_train=num_train)
        mine = counts(y, drawn.train) > 0
        official = np.bincount(y[num_train:], minlength=10)
        shown = official[None] if protocol == "all" else official * mine
        assert np.array_equal(counts(y, drawn.test), np.broadcast_to(shown, (10, 10)))


def test_two_thousand_samples_for_ten_clients():
    """The analysis of FedProx: 10 clients with 200 training samples each, drawn by the seed."""
    y, num_train = uneven()
    first, again, other = (
        divide(y, "classes:2", clients=10, num_train=num_train, samples=2000, seed=s)
        for s in (0, 0, 1)
    )
    assert first.train.sizes.tolist() == [200] * 10
    assert set(counts(y, first.train).flatten()) == {0, 100}
    assert first.train.rows.equal(again.train.rows)
    assert not first.train.rows.equal(other.train.rows)
    assert first.info["samples_per_client"] == 200


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("classes:11", {}, "more classes a client than the 10"),
        ("classes:2", {"samples": 9}, "use at least 20"),
        ("classes:1", {"samples": 7000}, r"classes:1 with 10 clients of 700 .*use samples=\d+"),
        ("classes:2", {"protocol": "authors"}, r"Unknown protocol 'authors' of partition classes"),
        ("classes:1.5", {}, "whole number of classes"),
        ("lognormal:11", {}, "more classes a client"),
        ("lognormal:3", {"clients": 400}, r"lognormal:3 gives 400 clients.*fewer clients"),
        ("lognormal:3", {"min_test": 2}, "min_test belongs"),
        ("lognormal", {}, "such as lognormal:3"),
        ("dirichlet:1:equal", {"clients": 4000}, "too few for training and test"),
        ("grouped:0.5", {}, "no column"),
        ("iid:equal", {}, "Unknown protocol 'equal' of partition iid"),
        ("iid", {"samples": 6001}, r"samples must lie in 1\.\.6000.*got 6001"),
        ("iid:pfllib", {"samples": 6001}, r"samples must lie in 1\.\.5250.*got 6001"),
    ],
)
def test_wrong_numbers_say_what_to_change(spec, options, message):
    """Each error names the number and the way out."""
    y, num_train = uneven()
    with pytest.raises((ConfigError, FederationError), match=message):
        divide(y, spec, **({"clients": 10, "num_train": num_train} | options))


# ---------------------------------------------------------------------- lognormal:k


@pytest.mark.parametrize(
    ("rule", "clients", "low", "high"),
    [("mnist", 100, 10, 200), ("mnist", 20, 20, 400), ("cifar", 20, 600, 1200)],
)
@pytest.mark.parametrize("seed", [0, 3])
def test_lognormal_clients_hold_neighbouring_classes_and_what_the_formula_gives(
    rule, clients, low, high, seed
):
    """Classes (i + j) mod 10, ten samples of each, then at least the smallest random integer."""
    y = np.arange(70_000) % 10
    drawn = divide(y, f"lognormal:3:{rule}", clients=clients, num_train=60_000, seed=seed)
    table = counts(y, drawn.train) + counts(y, drawn.test)
    for client, row in enumerate(table):
        assert set(np.flatnonzero(row)) == {(client + j) % 10 for j in range(3)}
    more = table[table > 0] - 10
    assert (more >= 0).all()
    assert (more[more > 0] >= low).all()
    assert (more > high).any()  # the lognormal part
    assert table.sum(0).max() < 7000
    sizes = table.sum(1)
    assert np.array_equal(drawn.train.sizes.numpy(), (sizes * 0.75).astype(int))
    assert np.array_equal(drawn.test.sizes.numpy(), sizes - (sizes * 0.75).astype(int))
    rows = np.concatenate([drawn.train.rows.numpy(), drawn.test.rows.numpy()])
    assert len(np.unique(rows)) == len(rows)
    assert rows.max() >= 60_000  # pooled: official test samples are dealt out too


def test_lognormal_sizes_follow_the_published_formula():
    """Ten samples of a class for every client leave none to scale: sizes are 10, then uniform."""
    y = np.arange(100_000) % 10
    drawn = divide(y, "lognormal:1", clients=1000, num_train=0)
    # Scaled to 10,000 - 10 x 1000 = 0 samples: only the uniform part U{10..200} is left.
    more = (counts(y, drawn.train) + counts(y, drawn.test)).sum(1) - 10
    given_more = more[more > 0]
    assert given_more.min() >= 10
    assert given_more.max() <= 200
    assert abs(given_more[:600].mean() - 105) < 8


def test_the_published_generator_for_mnist_labels_2700_samples_wrongly():
    """The first ten of each class carry j instead of the class: 100 x 3 x 10 less 300."""
    y = np.arange(70_000) % 10
    right = divide(y, "lognormal:3", clients=100, num_train=60_000)
    wrong = divide(y, "lognormal:3:mislabelled", clients=100, num_train=60_000)
    assert right.y is None
    assert wrong.train.rows.equal(right.train.rows)
    assert wrong.info["wrong_labels"] == 2700
    assert wrong.y is not None
    changed = np.flatnonzero(wrong.y != y)
    assert len(changed) == 2700
    assert set(wrong.y[changed]) == {0, 1, 2}
    held = np.concatenate([wrong.train.rows.numpy(), wrong.test.rows.numpy()])
    assert np.isin(changed, held).all()


def test_the_federation_takes_the_changed_labels_and_the_rule_of_its_data(tmp_path):
    """From the name of the data set: CIFAR has its own rule, and wrong labels reach y."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (900, 28, 28), dtype=np.uint8), np.arange(900) % 10
    np.savez(
        tmp_path / "mnist.npz", x_train=x[:800], y_train=y[:800], x_test=x[800:], y_test=y[:100]
    )
    options = {"clients": 10, "data_dir": tmp_path}
    plain = from_dataset("mnist", partition="lognormal:3", **options)
    wrong = from_dataset("mnist", partition="lognormal:3:mislabelled", **options)
    assert plain.info["protocol"] == "mnist"
    assert int((plain.y != wrong.y).sum()) == wrong.info["wrong_labels"] == 10 * 30 - 30
    x = rng.integers(0, 256, (600, 32, 32, 3), dtype=np.uint8)
    for split in ("train", "test"):
        np.savez(tmp_path / f"cifar10_{split}.npz", x=x, y=np.arange(600) % 10)
    fed = from_dataset("cifar10", partition="lognormal:3", **options)
    assert fed.info["protocol"] == "cifar"
    fed = from_dataset("cifar10", partition="lognormal:3:mnist", **options)
    assert fed.info["protocol"] == "mnist"


# ---------------------------------------------------------------------- dirichlet:a:equal


@given(
    value=st.sampled_from([0.01, 0.1, 1.0, 1000.0]),
    clients=st.integers(1, 60),
    seed=st.integers(0, 2**40),
)
def test_equal_clients_have_one_size_whatever_the_concentration(value, clients, seed):
    """⌊N/m⌋ samples each, 75/25, nobody shares a sample."""
    y, num_train = uneven()
    drawn = divide(y, f"dirichlet:{value}:equal", clients=clients, num_train=num_train, seed=seed)
    each = len(y) // clients
    assert set(drawn.train.sizes.tolist()) == {int(each * 0.75)}
    assert set((drawn.train.sizes + drawn.test.sizes).tolist()) == {each}
    rows = np.concatenate([drawn.train.rows.numpy(), drawn.test.rows.numpy()])
    assert len(np.unique(rows)) == len(rows)


def test_equal_clients_become_alike_as_the_concentration_grows():
    """At 0.01 a client has one or two classes, at 1000 all of them in the shares of the whole."""
    y, num_train = uneven()
    most = []
    for value in (0.01, 1, 1000):
        drawn = divide(y, f"dirichlet:{value}:equal", clients=40, num_train=num_train)
        table = counts(y, drawn.train) + counts(y, drawn.test)
        most.append(float((table.max(1) / table.sum(1)).mean()))
    assert most[0] > 0.8
    assert most[0] > most[1] > most[2]
    assert most[2] < 0.2


# ---------------------------------------------------------------------- grouped and samples


@given(clients=st.integers(1, 12), least=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_users_stay_whole_and_every_client_has_its_least_number(clients, least, seed):
    """No user is in two clients, each client has at least so many users, nobody is lost."""
    rng = np.random.default_rng(1)
    users = rng.integers(0, 100, 900).astype(str)
    y = rng.integers(0, 2, 900)
    drawn = divide(
        y,
        "grouped:0.5",
        clients=clients,
        attributes={"user": users},
        min_train=least,
        seed=seed,
        train_share=0.9,
    )
    owner = np.full(900, -1)
    for split in (drawn.train, drawn.test):
        owner[split.rows.numpy()] = split.owner.numpy()
    assert (owner >= 0).all()
    pairs = np.unique(np.stack([owner.astype(str), users]), axis=1)
    assert pairs.shape[1] == len(np.unique(users))
    assert np.unique(pairs[0], return_counts=True)[1].min() >= least
    sizes = np.bincount(owner)
    assert np.array_equal(drawn.train.sizes.numpy(), (sizes * 0.9 + 1e-9).astype(int))


def test_official_splits_of_users_are_kept_when_they_are_grouped():
    """With train and test files of LEAF, test samples stay test samples; ten users at least."""
    users = np.tile(np.arange(50), 4)
    y = np.zeros(200, int)
    drawn = divide(y, "grouped:0.5", clients=4, num_train=150, attributes={"user": users})
    assert int(drawn.train.rows.max()) < 150 <= int(drawn.test.rows.min())
    assert drawn.train.sizes.sum() + drawn.test.sizes.sum() == 200
    assert drawn.test.sizes.min() >= 10
    with pytest.raises(FederationError, match="at least 10 users, but there are 50"):
        divide(y, "grouped:0.5", clients=6, num_train=150, attributes={"user": users})


@pytest.mark.parametrize("spec", ["iid", "dirichlet:1", "pathological:2", "column:site"])
def test_a_limit_takes_training_samples_by_the_seed_and_leaves_the_test_set(spec):
    """Two thousand of six thousand training samples, other ones for another seed."""
    y, num_train = uneven()
    sites = {"site": np.arange(len(y)) % 7}
    options = {"num_train": num_train, "attributes": sites, "samples": 2000}
    options |= {} if spec.startswith("column") else {"clients": 10}
    first, again, other = (divide(y, spec, seed=s, **options) for s in (0, 0, 1))
    # Shares of classes are rounded down, so that a few samples may be left over.
    assert 2000 - 100 <= len(first.train.rows) <= 2000
    assert int(first.train.rows.max()) < num_train
    assert len(first.test.rows) >= 1000 - 100
    assert int(first.test.rows.min()) >= num_train
    assert first.train.rows.equal(again.train.rows)
    assert set(first.train.rows.tolist()) != set(other.train.rows.tolist())


def test_a_limit_on_merged_samples_is_on_those_for_training():
    """Protocol pfllib takes 2000 / 0.75 samples of everything, so about 2000 are trained on."""
    y, num_train = uneven()
    drawn = divide(y, "iid:pfllib", clients=10, num_train=num_train, samples=2000)
    assert abs(len(drawn.train.rows) - 2000) <= 10
    assert len(drawn.train.rows) + len(drawn.test.rows) == 2667
    wrong = divide(np.arange(70_000) % 10, "lognormal:3:mislabelled", clients=10, samples=30_000)
    assert len(wrong.y) == 70_000
    assert int((wrong.y != np.arange(70_000) % 10).sum()) == wrong.info["wrong_labels"] == 270


def test_partitions_of_papers_are_reached_by_name():
    """From the named data sets, on digits."""
    fed = from_dataset("digits", partition="classes:2", clients=10, samples=500)
    assert fed.train.sizes.tolist() == [50] * 10
    assert ((fed.label_counts() > 0).sum(1) == 2).all()
    fed = from_dataset("digits", partition="dirichlet:0.1:equal", clients=40)
    assert set((fed.train.sizes + fed.test.sizes).tolist()) == {1797 // 40}
    fed = from_dataset("digits", partition="lognormal:3", clients=20)
    assert fed.num_clients == 20
