"""Provide what the bounds have in common: broadcasting, sums over clients, inequalities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sartor.core.errors import ConfigError

Number = float | Tensor
"""One value, or values that broadcast, such as those of a sweep."""

Form = Literal["corrected", "printed"]
"""The corrected formula, or the one printed in the paper."""


def tensors(*values: Number) -> list[Tensor]:
    """Return the values in double precision, ready to broadcast."""
    return [torch.as_tensor(value, dtype=torch.float64) for value in values]


class Inequality(NamedTuple):
    """A claim left <= right about solved instances, element by element; the shapes broadcast.

    >>> Inequality(torch.tensor(1.0), torch.tensor([1.0, 2.0])).holds
    True
    """

    left: Tensor
    right: Tensor

    @property
    def slack(self) -> Tensor:
        """The difference right − left."""
        return self.right - self.left

    @property
    def holds(self) -> bool:
        """Whether left <= right everywhere, up to rounding."""
        rounding = 1e-9 * torch.maximum(self.left.abs(), self.right.abs()) + 1e-15
        return bool((self.left <= self.right + rounding).all())


class Sums(NamedTuple):
    """Sums over clients that the bounds use."""

    local: Tensor  # s_1 = Σ p_i/n_i, the mean of 1/n_i; 1/n for equal clients
    pooled: Tensor  # s_2 = Σ p_i²/n_i; 1/N for p_i = n_i/N
    largest: Tensor  # the largest p_i

    @property
    def imbalance(self) -> Tensor:
        """p_max s_1/s_2, the smallest C_p of (25) in ``two_stage_risk``; 1 for equal clients."""
        return self.largest * self.local / self.pooled


def sums(weights: Tensor | Sequence[float], sizes: Tensor | Sequence[int]) -> Sums:
    """Return Σ p_i/n_i, Σ p_i²/n_i and max p_i of clients with weights p_i and n_i samples each.

    >>> [round(float(x), 6) for x in sums([0.5, 0.5], [10, 40])]
    [0.0625, 0.03125, 0.5]
    """
    p = torch.as_tensor(weights, dtype=torch.float64)
    n = torch.as_tensor(sizes, dtype=torch.float64)
    check_clients(p.tolist(), n.tolist())
    return Sums((p / n).sum(), (p.square() / n).sum(), p.max())


def check_clients(weights: Sequence[float], sizes: Sequence[float]) -> None:
    """Refuse weights that are not positive with sum 1, and clients without samples."""
    unlike = len(weights) != len(sizes) or abs(sum(weights) - 1.0) > 1e-6
    if unlike or min(weights) <= 0 or min(sizes) < 1:
        raise ConfigError(
            "weights must be one positive number per client with sum 1, and sizes >= 1; got "
            f"{len(weights)} weights with sum {sum(weights):g} for {len(sizes)} clients. Divide "
            "the weights by their sum, and drop clients without samples."
        )
