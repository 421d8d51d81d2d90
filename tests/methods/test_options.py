"""Options of methods are refused at the door, in words, and lists can be given as one word."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.methods import build
from sartor.methods.options import fits, say, taken


@pytest.fixture(scope="module")
def task() -> Task:
    layers = {"one": nn.Linear(3, 4), "fc": nn.Linear(4, 2)}
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    return Task(network, head="fc")


@pytest.mark.parametrize(
    ("method", "options", "reported"),
    [
        ("ditto", {"choices": ("a",)}, "Option choices must be a list of numbers, got ('a',)"),
        ("fedper", {"private": 3}, "Option private must be a list of names or nothing, got 3"),
        ("fedper", {"private": ("fc", 3)}, "must be a list of names or nothing, got ('fc', 3)"),
        ("fedavg", {"client_weights": ("a", "b"), "rule": "p_weighted"}, "a list of numbers"),
        ("fedavg", {"client_weights": (1, 2), "rule": "p_weighted"}, "sum 1, got a sum of 3"),
        ("fedavg", {"client_weights": (-1, 2), "rule": "p_weighted"}, "must be >= 0"),
        ("dichotomous", {"num_clusters": 3}, "num_clusters has no effect with version='holdout'"),
        ("dichotomous", {"radius": "estimated"}, "radius has no effect with version='holdout'"),
        ("dichotomous", {"inside": "threshold"}, "inside has no effect with version='holdout'"),
        ("dichotomous", {"version": "clustered", "num_clusters": 0}, "num_clusters must be >= 1"),
        ("dichotomous", {"version": "clustered", "fit_epochs": 0}, "fit_epochs must be >= 1"),
    ],
)
def test_what_cannot_be_right_is_reported(
    task: Task, method: str, options: dict[str, Any], reported: str
) -> None:
    """No traceback from inside: the option, what was expected, and what came."""
    with pytest.raises(ConfigError) as error:
        build(method, task, Local(), options)
    assert reported in str(error.value)


@pytest.mark.parametrize(
    ("word", "names"), [("one", {"one"}), ("one,fc", {"one", "fc"}), (["fc"], {"fc"})]
)
def test_a_list_of_names_may_be_one_word(task: Task, word: Any, names: set[str]) -> None:
    """As on the command line: --set private=one,fc."""
    record = build("fedper", task, Local(), {"private": word})
    private = {leaf for leaf in task.leaf_names if record.wire.private(leaf)}
    assert {leaf.split(".")[0] for leaf in private} == names


def test_one_number_is_a_list_of_one() -> None:
    assert taken(0.1, tuple[float, ...]) == (0.1,)
    assert taken([0.1, 1], tuple[float, ...]) == (0.1, 1)
    assert taken("a, b", tuple[str, ...] | None) == ("a", "b")
    assert taken(None, tuple[str, ...] | None) is None
    assert taken("a,b", str) == "a,b"
    assert taken("a,b", str | tuple[str, ...]) == "a,b"


def test_lists_are_checked_entry_by_entry() -> None:
    hint = tuple[float, ...]
    assert fits((1, 2.0), hint)
    assert not fits((1, "2"), hint)
    assert not fits((1, True), hint)
    assert say(hint) == "a list of numbers"
    pair = tuple[int, str]
    assert fits((1, "a"), pair)
    assert not fits((1,), pair)
