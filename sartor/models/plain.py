"""Logistic regression, one hidden layer, and LeNet-5."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core.errors import ModelError
from sartor.models.sizes import after_pools, image_sizes, product, sizes_of

if TYPE_CHECKING:
    from sartor.data.federation import Federation


class MCLR(nn.Module):
    """Multinomial logistic regression: one linear layer, which is the head."""

    head = "fc"

    def __init__(self, inputs: int, outputs: int) -> None:
        """Make the layers."""
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
        """Make the layers."""
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        logits: Tensor = self.fc(F.leaky_relu(self.fc1(x.flatten(1)), 0.1))
        return logits


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling; extractor conv1, conv2, fc1, fc2, and the head fc.

    Convolutions are 5x5 without padding. Images with a side below 16 pixels would vanish, so they
    get ``padding=2`` in both convolutions (8x8 digits: 64 features before fc1).
    """

    head = "fc"

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__()
        padding = 2 if min(height, width) < 16 else 0
        rows, columns = (after_pools(side, padding) for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=padding)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc = nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        # Pooling before ReLU gives the same numbers, and ReLU has a quarter of the values left.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        logits: Tensor = self.fc(x)
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
    return MCLR(product(shape), outputs)


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
    return DNN(product(shape), hidden, outputs)


def lenet5(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> LeNet5:
    """Return LeNet-5 for a federation of images, or for the given sizes.

    >>> sum(p.numel() for p in lenet5(input_shape=(3, 32, 32), num_classes=10).parameters())
    62006
    """
    return LeNet5(*image_sizes("lenet5", 4, federation, input_shape, num_classes))
