"""Mixing: rows of weights over a table of clients."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core import mixing

TABLE = {"a": torch.arange(12.0).reshape(3, 2, 2), "b": torch.tensor([[1.0], [2.0], [4.0]])}


def test_combine_is_the_weighted_sum_of_rows() -> None:
    """One mixture, several at once, and the unit vectors that pick rows."""
    w = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    both = mixing.combine(w, TABLE)
    assert torch.allclose(both["b"], torch.tensor([[2.8], [1.0]]))
    assert torch.equal(both["a"][1], TABLE["a"][0])
    assert torch.allclose(mixing.combine(w[0], TABLE)["a"], both["a"][0])


def test_inner_products_sum_over_leaves() -> None:
    """Entry (n, j) is the product of vector n and row j."""
    vectors = {"a": torch.randn(2, 2, 2), "b": torch.randn(2, 1)}
    found = mixing.inner(TABLE, vectors)
    for n in range(2):
        for j in range(3):
            wanted = (vectors["a"][n] * TABLE["a"][j]).sum() + (
                vectors["b"][n] * TABLE["b"][j]
            ).sum()
            assert torch.allclose(found[n, j], wanted)


def test_put_rows_writes_the_present_only() -> None:
    """The absent keep their row, even if their upload is NaN."""
    rows = {"a": torch.full((2, 2, 2), -1.0), "b": torch.tensor([[torch.nan], [9.0]])}
    found = mixing.put_rows(TABLE, torch.tensor([2, 0]), rows, torch.tensor([False, True]))
    assert found["b"].flatten().tolist() == [9.0, 2.0, 4.0]
    assert torch.equal(found["a"][1:], TABLE["a"][1:])
    assert TABLE["b"].flatten().tolist() == [1.0, 2.0, 4.0]


def test_at_takes_a_row_under_vmap_of_grad() -> None:
    """Indexing by a 0-d tensor works where plain indexing does not."""
    table = torch.arange(6.0).reshape(3, 2)

    def value(t, i):
        return (mixing.at(t, i) ** 2).sum()

    found = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0))(table, torch.tensor([2, 0]))
    assert torch.equal(found[0, 2], 2 * table[2])
    assert found[0, :2].abs().sum() == 0


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.integers(0, 2), st.floats(0, 1))
def test_clip_pin_and_normalise_end_on_the_simplex(
    row: list[float], own: int, weight: float
) -> None:
    """Whatever the row was, it sums to one with entries in [0, 1]."""
    rows, ids = torch.tensor([row], dtype=torch.float64), torch.tensor([own])
    found = mixing.normalise(mixing.pin_self(mixing.clip(rows), ids, torch.tensor(weight)), ids)
    assert torch.allclose(found.sum(), torch.ones((), dtype=torch.float64))
    assert bool((found >= 0).all())
    assert bool((found <= 1 + 1e-12).all())


def test_a_row_of_negative_sum_becomes_its_own_unit_vector() -> None:
    """Divided by its sum it would have every sign turned: neighbours that repel would attract."""
    rows = torch.tensor([[0.5, -1.0, -0.25], [0.5, -0.25, 0.0]], dtype=torch.float64)
    found = mixing.normalise(rows, torch.tensor([0, 1]))
    assert found.tolist() == [[1.0, 0.0, 0.0], [2.0, -1.0, 0.0]]


def test_an_empty_row_becomes_its_own_unit_vector() -> None:
    """A row of zeros has no direction: the client stays alone."""
    assert mixing.normalise(torch.zeros(1, 3), torch.tensor([1])).tolist() == [[0.0, 1.0, 0.0]]
