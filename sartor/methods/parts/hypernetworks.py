"""Layers of hypernetworks, which a server keeps for itself: trees of tensors, drawn by key."""

from __future__ import annotations

import math

from torch import Tensor

from sartor.core import rng
from sartor.core.tree import Tree


def linear(key: Tensor, inputs: int, outputs: int, like: Tensor) -> Tree:
    """Draw a linear layer as torch does: weight and bias uniform in ±1/√inputs."""
    bound = 1.0 / math.sqrt(inputs)
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return {
        k: bound * (2.0 * rng.uniform(rng.fold(key, k), shape, like.dtype) - 1.0)
        for k, shape in shapes.items()
    }
