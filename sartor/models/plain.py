"""Logistic regression, and one hidden layer."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core.errors import ModelError
from sartor.models.sizes import sizes_of

if TYPE_CHECKING:
    from sartor.data.federation import Federation


class MCLR(nn.Module):
    """Multinomial logistic regression: one linear layer, which is the head."""

    head = "fc"

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class DNN(nn.Module):
    """One hidden layer with leaky ReLU (slope 0.1), and a linear head."""

    head = "fc"

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        logits: Tensor = self.fc(F.leaky_relu(self.fc1(x.flatten(1)), 0.1))
        return logits


def mclr(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> MCLR:
    """Return multinomial logistic regression for a federation, or for the given sizes.

    >>> sum(p.numel() for p in mclr(input_shape=(28, 28), num_classes=10).parameters())
    7850
    """
    shape, outputs = sizes_of(federation, input_shape, num_classes)
    return MCLR(prod(shape), outputs)


def dnn(
    federation: Federation | None = None,
    *,
    hidden: int = 100,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> DNN:
    """Return a network with one hidden layer for a federation, or for the given sizes.

    >>> sum(p.numel() for p in dnn(input_shape=(784,), num_classes=10).parameters())
    79510
    """
    if hidden < 1:
        raise ModelError(f"hidden must be >= 1, got {hidden}.")
    shape, outputs = sizes_of(federation, input_shape, num_classes)
    return DNN(prod(shape), hidden, outputs)
