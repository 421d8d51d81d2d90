"""How far the clients' best models lie from one another, estimated from their fits.

R² = Σ p_i ‖w_i* − w̄*‖² cannot be read off the fits ŵ_i themselves: their own noise adds to every
distance. Fits on two halves of a client's samples have independent noise, which vanishes from the
product of their deviations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitHalf(NamedTuple):
    """What two fits per client say.

    Attributes:
        radius2: (clients,) R̂² of every client's group; may be negative.
        noise: (clients,) t̂_i, the estimated E‖ŵ_i − w_i*‖² of a fit on all samples of client i.
    """

    radius2: Tensor
    noise: Tensor


def split_half(first: Tensor, second: Tensor, weights: Tensor, group: Tensor) -> SplitHalf:
    """Estimate heterogeneity and noise from fits on two disjoint halves of every client's data.

    R̂² = Σ p_i ⟨a_i − ā, b_i − b̄⟩ and t̂_i = ‖a_i − b_i‖²/4, with p normalised inside each group.
    Valid for strongly convex, converged fits; not for networks, whose weights are not identified.

    Args:
        first: (clients, d) the fits a_i.
        second: (clients, d) the fits b_i.
        weights: (clients,) p_i.
        group: (clients,) labels; one group if all are equal.
    """
    share = shares(weights, group)
    deviations = (first - share @ first) * (second - share @ second)
    noise = (first - second).square().sum(1) / 4.0
    return SplitHalf(share @ deviations.sum(1), noise)


def shares(weights: Tensor, group: Tensor) -> Tensor:
    """Return (clients, clients): row i holds the weights inside the group of i, with sum 1."""
    inside = weights * (group[:, None] == group[None, :])
    return inside / inside.sum(1, keepdim=True)


def federate(found: SplitHalf, group: Tensor) -> Tensor:
    """Say for every client whether its group's one model beats its members' own ones.

    R̂² < (1 − 1/m) · mean t̂_i over the m members: the crossover of the two mean-square errors for
    clients of equal size and noise. A group of one has nothing to gain.
    """
    even = shares(torch.ones_like(found.noise), group)
    size = (group[:, None] == group[None, :]).sum(1)
    return (found.radius2 < (1.0 - 1.0 / size) * (even @ found.noise)) & (size > 1)
