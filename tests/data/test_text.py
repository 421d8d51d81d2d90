"""Laws of texts: what is read, how it is cut into words, and who may shape the vocabulary."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

import sartor
from sartor.core.errors import ConfigError, FederationError, MissingDataError
from sartor.data import Federation, available, from_dataset, load
from sartor.data.datasets import ENVIRONMENT
from sartor.data.text import encode, make_vocabulary, tokenise
from sartor.models import lstm


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    """Keep a data folder of the machine out of the tests."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def tweets(users=12, each=6):
    """Every user says its own word; good tweets say 'fine'."""
    return [
        {"user": u, "text": f"own{u} {'fine' if i % 2 else 'bad'} word{i}", "label": i % 2}
        for u in range(users)
        for i in range(each)
    ]


def write_lines(folder, rows, *, compress=True):
    raw = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    name = "sent140.jsonl.gz" if compress else "sent140.jsonl"
    (folder / name).write_bytes(gzip.compress(raw) if compress else raw)


def write_leaf(path, users):
    """Write LEAF's records: id, date, query, user, text, and the label as y."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "users": list(users),
        "num_samples": [len(rows) for rows in users.values()],
        "user_data": {
            user: {
                "x": [["17", "Sat", "NO_QUERY", user, text, "1"] for text, _ in rows],
                "y": [label for _, label in rows],
            }
            for user, rows in users.items()
        },
    }
    path.write_text(json.dumps(data))


def test_words_are_cut_by_a_plain_rule():
    """Lower case, marks apart, apostrophes inside, links and names of users alike."""
    assert tokenise("Don't STOP, @Bob_1! see http://a.b/c?d=1 or www.x.y  :)") == [
        "don't", "stop", ",", "<user>", "!", "see", "<link>", "or", "<link>", ":", ")",
    ]  # fmt: skip
    assert tokenise("  \n ") == []


def test_token_ids_leave_room_for_padding_and_unknown_words():
    """0 fills up, 1 is unknown, words by falling frequency and then by name."""
    words = make_vocabulary([["b", "a", "c"], ["c", "b"], ["c"]], size=4)
    assert words == {"c": 2, "b": 3}
    ids = encode([["a", "b", "c", "c"], ["c"], []], words, length=3)
    assert ids.tolist() == [[1, 3, 2], [2, 0, 0], [1, 0, 0]]
    with pytest.raises(ConfigError, match="vocabulary must be >= 3"):
        make_vocabulary([["a"]], size=2)
    with pytest.raises(ConfigError, match="length must be >= 1"):
        encode([["a"]], words, length=0)


@pytest.mark.parametrize("compress", [True, False])
def test_one_client_per_user_with_enough_tweets(tmp_path, compress):
    """Users below the least number are left out; nine tenths are for training."""
    rows = [*tweets(users=3, each=10), {"user": "rare", "text": "on\u2028ce\x85", "label": 1}]
    write_lines(tmp_path, rows, compress=compress)
    fed = Federation.from_dataset(
        "sent140", partition="column:user", min_train=3, data_dir=tmp_path
    )
    assert fed.names == ("0", "1", "2")
    assert fed.train.sizes.tolist() == [9, 9, 9]
    assert fed.test.sizes.tolist() == [1, 1, 1]
    assert fed.x.dtype == torch.int64
    assert fed.input_shape == (25,)
    assert fed.num_classes == 2
    assert fed.info["class_names"] == ["negative", "positive"]
    assert fed.info["subset"] == "31 tweets; the published set has 1,600,498"
    assert fed.y.tolist() == [row["label"] for row in rows]


def test_the_vocabulary_is_made_of_training_samples_of_the_clients_alone(tmp_path):
    """A word that only test samples, held-out ones or left-out users say is unknown."""
    rows = tweets(users=3, each=10)
    for number, row in enumerate(rows):
        row["text"] = f"only{number} shared"
    write_lines(tmp_path, [*rows, {"user": "rare", "text": "solo shared", "label": 0}])
    fed = from_dataset("sent140", partition="column:user", min_train=3, val=0.3, data_dir=tmp_path)
    known = fed.x[:, 0] != 1
    train = torch.zeros(len(fed.x), dtype=torch.bool)
    train[fed.train.rows] = True
    assert torch.equal(known, train)
    assert (fed.x[:, 1] == 2).all()  # the most frequent word
    assert fed.info["words"] == 1 + len(fed.train.rows)
    small = from_dataset(
        "sent140", partition="column:user", data_dir=tmp_path, vocabulary=3, length=4
    )
    assert small.input_shape == (4,)
    assert set(small.x.unique().tolist()) == {0, 1, 2}
    assert small.info["vocabulary"] == 3


def test_users_are_grouped_into_clients(tmp_path):
    """Ten users at least in each client; labels can be divided by Dirichlet too."""
    write_lines(tmp_path, tweets(users=40, each=3))
    fed = from_dataset("sent140", partition="grouped:0.5", clients=3, data_dir=tmp_path)
    whole = load("sent140", tmp_path)
    users = whole.attributes["user"]
    owned = [
        set(users[torch.cat([fed.train.of(i), fed.test.of(i)]).numpy()].tolist()) for i in range(3)
    ]
    assert min(map(len, owned)) >= 10
    assert sum(map(len, owned)) == len(set.union(*owned)) == 40
    fed = from_dataset(
        "sent140", partition="dirichlet:0.5", clients=4, min_train=5, data_dir=tmp_path
    )
    assert int(fed.train.sizes.min()) >= 5


def test_leaf_files_with_official_splits_are_read(tmp_path):
    """Train and test folders stay apart; 4 is LEAF's raw positive label."""
    made = {
        "train": {"ann": [("good day", 4), ("bad day", 0)], "bob": [("day", 1)]},
        "test": {"ann": [("night", 0)], "bob": [("good", 1)]},
    }
    for split, users in made.items():
        write_leaf(tmp_path / "sent140/data" / split / f"all_data_{split}.json", users)
    fed = from_dataset("sent140", partition="column:user", data_dir=tmp_path)
    assert fed.names == ("ann", "bob")
    assert fed.y.tolist() == [1, 0, 1, 0, 1]
    assert fed.train.sizes.tolist() == [2, 1]
    assert fed.x[:, 0].tolist() == [4, 3, 2, 1, 4]  # day, bad, good; night is unknown
    alone = tmp_path / "alone"
    write_leaf(alone / "sent140/all_data/x.json", {"ann": [("a", 0)] * 10})
    for folder in (alone, alone / "sent140"):  # the data folder, or LEAF's own
        fed = from_dataset("sent140", partition="column:user", data_dir=folder)
        assert fed.train.sizes.tolist() == [9]


def test_missing_and_damaged_files_are_named(tmp_path):
    """The error says what to put where; a broken line names the file."""
    with pytest.raises(MissingDataError, match=r"(?s)sent140\.jsonl.*TalwalkarLab.*data/sent140"):
        load("sent140", tmp_path)
    row = {row.name: row for row in available(tmp_path)}["sent140"]
    assert row.found is None
    (tmp_path / "sent140.jsonl").write_text('{"user": 1, "text": "a", "label": 7}')
    with pytest.raises(FederationError, match=r"sent140\.jsonl: a label is 7"):
        load("sent140", tmp_path)
    (tmp_path / "sent140.jsonl").write_text("")
    with pytest.raises(FederationError, match="No samples"):
        load("sent140", tmp_path)
    (tmp_path / "sent140.jsonl").write_text('{"user": 1}')
    with pytest.raises(FederationError, match=r"Cannot read .*sent140\.jsonl"):
        load("sent140", tmp_path)
    write_lines(tmp_path, tweets(), compress=False)
    with pytest.raises(ConfigError, match="scale is for images"):
        from_dataset("sent140", partition="iid", scale="unit", data_dir=tmp_path)


def test_seeds_with_other_vocabularies_train_in_parallel(tmp_path):
    """The number of token ids is fixed, so one network serves every seed; and it learns."""
    write_lines(tmp_path, tweets())

    def made(seed):
        options = {"clients": 2, "min_train": 4, "vocabulary": 60, "length": 4}
        return from_dataset(
            "sent140", partition="grouped:0.5", seed=seed, data_dir=tmp_path, **options
        )

    assert not torch.equal(made(0).x, made(1).x)
    assert lstm(made(0)).embedding.weight.shape == (60, 50)
    result = sartor.fit(
        "fedavg",
        made,
        model=lstm(made(0), embedding=8, hidden=8, classifier=8, layers=1),
        rounds=4,
        seeds=[0, 1],
        local=sartor.Local(epochs=4, batch=8, lr=1.0),
        device="cpu",
    )
    assert min(result.accuracy) == 1.0  # the word says the class
