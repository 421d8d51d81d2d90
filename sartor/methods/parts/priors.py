"""Learn a Gaussian prior on clients' models from sums, and weigh multiples of it.

| symbol | here | meaning |
|---|---|---|
| S, T | width, spread | variances of the mean of the prior around 0, of the models around it |
| m | clients | how many there are |
| γ | sure | Σ_i 1 − Var(w_i − w̄)/τ²: for how many clients the samples determine a coordinate |
| ν | pool | clients that a layer's τ² counts for in that of a coordinate |

MacKay's step is τ² = Σ(w_i − w̄)²/Σγ_i; that of EM is τ² = mean[(w_i − w̄)² + Var(w_i − w̄)], and its
fixed points are the same. Both are a quotient of two sums, which a group adds up before dividing.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.tree import Tree
from sartor.theory.learned_prior import DECADES, LEVELS, RIDGES, WIDTHS

Groups = Literal["scalar", "layer", "diag", "full"]
Sharing = Literal["learned", "one", "alone"]
Update = Literal["mackay", "em"]

CHANGE, LEAST, MOST = 30.0, 1e-10, 1e4
"""The most by which a variance changes in a round, and its bounds in units of σ²."""

FEW = ((1.0, 1.0), (10.0, 1.0), (100.0, 1.0), (10.0, 10.0), (100.0, 10.0))
"""The multiples (of T, of S) for a model of more than ``MANY`` parameters."""
MANY = 128
Multiples = tuple[tuple[float, float], ...]
"""Of (T, S), one pair for each prior."""

JUST_THIS: Multiples = ((1.0, 1.0),)


def multiples_of(sharing: Sharing, num_params: int) -> Multiples:
    """Return what T and S are multiplied with; (1, 1) is among them.

    A client sends a matrix of all parameters for each, so there are fewer where it is large.
    """
    if sharing == "one":
        return tuple((1.0, b) for b in RIDGES)
    if sharing == "alone":
        return tuple((a, 1.0) for a in RIDGES)
    return FEW if num_params > MANY else tuple((a, b) for b in WIDTHS for a in LEVELS)


def weights_of(lost: Tensor, count: Tensor, multiples: Multiples, regression: bool) -> Tensor:
    """Return the weight of each prior: exp(−Σ losses of samples left out − log10² .../(2 · 0.7²)).

    Args:
        lost: (K,) summed losses of samples left out; of a regression ½ squared errors, which are
            taken in units of their smallest mean.
        count: how many targets there are.
        multiples: K of them.
        regression: whether the losses are squared errors.
    """
    nats = torch.nan_to_num(lost, nan=1e30, posinf=1e30)
    if regression:
        nats = nats * count / (2.0 * nats.min().clamp(min=1e-300))
    far = [(math.log10(a) ** 2 + math.log10(b) ** 2) / (2.0 * DECADES**2) for a, b in multiples]
    return torch.softmax(-nats - torch.stack([nats.new_zeros(()) + one for one in far]), 0)


def quotient(
    squares: Tensor, sure: Tensor, old: Tensor, count: float, update: Update
) -> tuple[Tensor, Tensor]:
    """Return the two sums whose quotient is the next variance, coordinate by coordinate.

    Args:
        squares: (P,) Σ(w_i − w̄)².
        sure: (P,) Σγ_i.
        old: (P,) the variance of which γ_i are.
        count: over how many the sums go.
        update: whose step.
    """
    if update == "mackay":
        return squares, sure
    return squares + old * (count - sure), torch.full_like(sure, count)


def grouped(
    top: Tensor, bottom: Tensor, like: Tree, groups: Groups, pool: Tensor | float, least: float
) -> Tensor:
    """Divide two sums over each group.

    Args:
        top: (P,) the sums above.
        bottom: (P,) those below.
        like: a tree with the shapes of tensors.
        groups: what a group is; of "full" the diagonal is returned that it is pooled with.
        pool: ν, for "diag".
        least: the smallest divisor.
    """
    if groups == "scalar":
        return (top.sum() / bottom.sum().clamp(min=least)).expand(top.shape)
    tensor = layerwise(top, like) / layerwise(bottom, like).clamp(min=least)
    if groups != "diag":
        return tensor
    return (top + pool * tensor) / (bottom + pool).clamp(min=least)


def layerwise(row: Tensor, like: Tree) -> Tensor:
    """Replace every number by the sum over its tensor."""
    sizes = [leaf.numel() for leaf in tree.leaves(like)]
    return torch.cat([part.sum().expand(part.shape) for part in row.split(sizes)])


def bounded(
    new: Tensor, old: Tensor, unit: Tensor, least: Tensor | float = LEAST, most: float = MOST
) -> Tensor:
    """Keep a variance near its last value and within its bounds."""
    near = torch.minimum(torch.maximum(new, old / CHANGE), old * CHANGE)
    return torch.minimum(torch.maximum(near, least * unit), most * unit)
