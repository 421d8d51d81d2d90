"""Starts that are drawn by key: initial leaves in another order, and layers of a hypernetwork."""

from __future__ import annotations

import math

from torch import Tensor

from sartor.core import rng
from sartor.core.tree import Tree


def shuffled(leaf: Tensor, key: Tensor) -> Tensor:
    """Return the entries of a leaf in another order.

    They are drawn alike, so an order of them is as good as another draw.
    """
    order = rng.permutation(key, leaf.numel())
    return leaf.reshape(-1).index_select(0, order).reshape(leaf.shape)


def linear(key: Tensor, inputs: int, outputs: int, like: Tensor) -> Tree:
    """Draw a linear layer as torch does: weight and bias uniform in ±1/√inputs."""
    bound = 1.0 / math.sqrt(inputs)
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return {
        k: bound * (2.0 * rng.uniform(rng.fold(key, k), shape, like.dtype) - 1.0)
        for k, shape in shapes.items()
    }
