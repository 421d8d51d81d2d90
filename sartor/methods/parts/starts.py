"""Starts that differ: the entries of one initial leaf in another order.

The entries of a leaf are drawn alike, so an order of them is as good as another draw.
"""

from __future__ import annotations

from torch import Tensor

from sartor.core import rng


def shuffled(leaf: Tensor, key: Tensor) -> Tensor:
    """Return the entries of a leaf in an order drawn by the key."""
    order = rng.permutation(key, leaf.numel())
    return leaf.reshape(-1).index_select(0, order).reshape(leaf.shape)
