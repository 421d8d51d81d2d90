"""Trees: arithmetic by name, and one error for two trees that do not match."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sartor.core import tree
from sartor.core.errors import ContractError

A = {"w": torch.tensor([1.0, 2.0]), "part": {"b": torch.tensor([[3.0]])}}
B = {"part": {"b": torch.tensor([[10.0]])}, "w": torch.tensor([4.0, 5.0])}


def test_leaves_are_walked_in_the_order_of_their_names() -> None:
    """Insertion order does not matter."""
    assert [name for name, _ in tree.items(A)] == ["part/b", "w"] == [n for n, _ in tree.items(B)]


def test_arithmetic_pairs_leaves_by_name() -> None:
    """Leaves are matched by name and not by order."""
    assert tree.add(A, B)["w"].tolist() == [5.0, 7.0]
    assert tree.sub(B, A)["part"]["b"].tolist() == [[7.0]]
    assert tree.scale(A, 2.0)["w"].tolist() == [2.0, 4.0]
    assert tree.dot(A, B).item() == 4 + 10 + 30
    assert tree.sqdist(A, B).item() == 9 + 9 + 49
    assert tree.dot(tree.zeros_like(A), B).item() == 0


@pytest.mark.parametrize(
    "other",
    [
        {"w": A["w"]},
        {"w": A["w"], "other": {"b": torch.zeros(1, 1)}},
        {"w": A["w"], "part": torch.zeros(1)},
        {"w": {"x": A["w"]}, "part": A["part"]},
    ],
)
def test_trees_that_differ_are_an_error_that_names_the_difference(other) -> None:
    """A missing, a strange, a flat or a deep entry: always a ContractError."""
    with pytest.raises(ContractError, match="Trees differ"):
        tree.add(A, other)


def test_an_update_of_trees_that_differ_is_an_error() -> None:
    """Also where both have as many leaves."""
    with pytest.raises(ContractError, match="Trees differ"):
        tree.addcmul({"a": torch.ones(2)}, {"b": torch.ones(2)}, torch.tensor(1.0))


def test_bytes_are_numbers_times_their_width() -> None:
    """Axes of runs and clients can be left out."""
    leaf = {
        "a": torch.zeros(2, 3, 5, dtype=torch.float64),
        "b": torch.zeros(2, 3, dtype=torch.int32),
    }
    assert tree.num_bytes(leaf) == 30 * 8 + 6 * 4
    assert tree.num_bytes(leaf, 2) == 5 * 8 + 4
    assert tree.num_bytes({}, 2) == 0


def test_where_chooses_by_leading_axes() -> None:
    """The mask covers the first axes of every leaf, whatever follows."""
    a = {"m": torch.ones(2, 3, 4), "v": torch.ones(2, 3)}
    mask = torch.tensor([[True, False, True], [False, False, True]])
    found = tree.where(mask, a, tree.zeros_like(a))
    assert torch.equal(found["v"], mask.float())
    assert torch.equal(found["m"], mask.float()[:, :, None].expand(2, 3, 4))


def test_stack_cat_and_narrow_undo_each_other() -> None:
    """Stacking and cutting gives the parts back, also for tuples of trees."""
    stacked = tree.stack([A, B], 0)
    assert torch.equal(tree.narrow(stacked, 0, 1, 1)["w"][0], B["w"])
    whole = tree.cat([tree.narrow(stacked, 0, 0, 1), tree.narrow(stacked, 0, 1, 1)], 0)
    assert all(
        torch.equal(x, y) for x, y in zip(tree.leaves(whole), tree.leaves(stacked), strict=True)
    )
    first, second = tree.stack([(A, B), (B, A)], 0)
    assert torch.equal(first["w"], stacked["w"])
    assert torch.equal(second["w"], stacked["w"].flip(0))


def test_flat_and_shaped_undo_each_other() -> None:
    """Leaves lie end to end in the order of their names, behind the axes they share."""
    one: Any = {"b": torch.arange(6.0).reshape(2, 3), "a": {"x": torch.tensor(9.0)}}
    assert tree.flat(one).tolist() == [9, 0, 1, 2, 3, 4, 5]
    back = tree.shaped(tree.flat(one), one)
    assert torch.equal(back["b"], one["b"])
    assert torch.equal(back["a"]["x"], one["a"]["x"])
    rows = tree.flat(tree.stack([one, tree.scale(one, 2.0)]), 1)
    assert rows.shape == (2, 7)
    assert torch.equal(rows[1], 2 * rows[0])


def test_select_keeps_named_leaves() -> None:
    """Only the top level is looked at."""
    assert set(tree.select(A, lambda name: name == "w")) == {"w"}
