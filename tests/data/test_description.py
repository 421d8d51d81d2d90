"""A federation in words: every number of the table, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sartor.data import Federation

SEVEN = np.repeat(np.arange(7), [7, 6, 5, 4, 3, 2, 1])


def skewed() -> Federation:
    """Three clients: one with seven classes, one with class 0 alone, one with a single sample."""
    y = np.concatenate([SEVEN, [0, 0], [3]])
    client = np.repeat(["north", "south", "a long name"], [28, 2, 1])
    x = np.zeros((31, 2, 3))
    return Federation.from_arrays(x, y, client=client, test=np.arange(31) == 29)


def test_the_table_of_the_clients_by_hand() -> None:
    """Five largest classes, ties to the lower one, and how many more; the width of the names."""
    assert skewed().summary().splitlines() == [
        "3 clients, 30 training, 0 validation, 1 test samples; inputs 2x3, 7 classes",
        "3.0 classes a client, label skew 0.54 "
        "(0: all clients alike, towards 1: nothing in common)",
        "client        train    val   test  classes",
        "a long name       1      0      0  3:1",
        "north            28      0      0  0:7 1:6 2:5 3:4 4:3 +2 more",
        "south             1      0      1  0:1",
    ]


def test_a_long_table_is_cut() -> None:
    """The rest of the clients is shown by its number, and only if there is a rest."""
    assert skewed().summary(limit=2).splitlines()[-2:] == [
        "north            28      0      0  0:7 1:6 2:5 3:4 4:3 +2 more",
        "... and 1 more client",
    ]
    assert "more client" not in skewed().summary(limit=3)


def test_the_skew_is_the_mean_distance_of_class_shares() -> None:
    """½ Σ_c |p_ic − p_c|, worked out for three clients; sizes are those of the splits."""
    whole = np.bincount(SEVEN, minlength=7) + np.eye(7, dtype=int)[0] + np.eye(7, dtype=int)[3]
    whole = whole / 30
    own = [np.eye(7)[3], np.bincount(SEVEN) / 28, np.eye(7)[0]]
    wanted = np.mean([0.5 * np.abs(one - whole).sum() for one in own])
    facts = skewed().describe()
    assert facts["label_skew"] == pytest.approx(wanted)
    assert facts["classes_per_client"] == 3.0
    assert facts["samples"] == {"train": 30, "val": 0, "test": 1}
    assert facts["smallest"] == {"train": 1, "val": 0, "test": 0}
    assert facts["largest"] == {"train": 28, "val": 0, "test": 1}
    assert (facts["clients"], facts["input_shape"], facts["num_classes"]) == (3, [2, 3], 7)


@pytest.mark.parametrize(
    ("task", "y", "words"),
    [
        ("regression", np.arange(4.0), "real targets"),
        ("multilabel", np.eye(4)[:, :3], "3 labels, several at once"),
        ("next-token", np.ones((4, 2), dtype=int), "the next of 2 tokens"),
    ],
)
def test_other_tasks_say_what_is_learned(task: str, y: np.ndarray, words: str) -> None:
    """A regression has no classes, and so no skew."""
    x = y if task == "next-token" else np.zeros((4, 2))
    made = Federation.from_arrays(x, y, client=["a", "a", "b", "b"], task=task)
    assert words in made.summary()
    assert (made.describe()["label_skew"] is None) == (task == "regression")
