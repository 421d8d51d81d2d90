"""Convolutional networks of two, three and five layers.

The analyses of FedProx (Yu et al.) name CNN2, CNN3 and CNN5 by their number of convolutions only;
the widths here are ours:

| network | convolutions | pooling | hidden layer |
| --- | --- | --- | --- |
| CNN2 | 5×5: 32, 64, without padding | after each | 128 |
| CNN3 | 3×3: 32, 64, 64, with padding | after each | 128 |
| CNN5 | 3×3: 32, 32, 64, 64, 128, with padding | after the 2nd, 4th and 5th | 128 |

Every network ends with the linear head ``fc`` and has ReLU, 2×2 max pooling and no normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from sartor.models.sizes import after_pools, image_sizes

if TYPE_CHECKING:
    from sartor.data.federation import Federation

_HIDDEN = 128


class CNN2(nn.Module):
    """Two 5×5 convolutions of 32 and 64 channels, each pooled, a hidden layer, and the head fc.

    As in LeNet-5, images with a side below 16 pixels get ``padding=2`` in both convolutions.
    """

    head = "fc"

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__()
        padding = 2 if min(height, width) < 16 else 0
        rows, columns = (after_pools(side, padding) for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=padding)
        self.fc1 = nn.Linear(64 * rows * columns, _HIDDEN)
        self.fc = nn.Linear(_HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc(F.relu(self.fc1(x.flatten(1))))
        return logits


class Stack(nn.Module):
    """3×3 convolutions with padding, some of them pooled, a hidden layer, and the head fc.

    Args:
        channels: of the image.
        height: of the image.
        width: of the image.
        outputs: the number of classes.
        widths: the channels of every convolution.
        pooled: the convolutions, counted from 1, that are followed by pooling.
    """

    head = "fc"

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        outputs: int,
        widths: Sequence[int],
        pooled: Sequence[int],
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.pooled = frozenset(pooled)
        self.depth = len(widths)
        for layer, (inputs, wide) in enumerate(zip((channels, *widths), widths, strict=False), 1):
            self.add_module(f"conv{layer}", nn.Conv2d(inputs, wide, 3, padding=1))
        shrunk = 2 ** len(self.pooled)
        features = widths[-1] * (height // shrunk) * (width // shrunk)
        self.fc1 = nn.Linear(features, _HIDDEN)
        self.fc = nn.Linear(_HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        for layer in range(1, self.depth + 1):
            x = self.get_submodule(f"conv{layer}")(x)
            x = F.relu(F.max_pool2d(x, 2) if layer in self.pooled else x)
        logits: Tensor = self.fc(F.relu(self.fc1(x.flatten(1))))
        return logits


class CNN3(Stack):
    """Three 3×3 convolutions of 32, 64 and 64 channels, each pooled."""

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__(channels, height, width, outputs, (32, 64, 64), (1, 2, 3))


class CNN5(Stack):
    """Five 3×3 convolutions of 32, 32, 64, 64 and 128 channels, pooled after 2, 4 and 5."""

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__(channels, height, width, outputs, (32, 32, 64, 64, 128), (2, 4, 5))


def cnn2(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> CNN2:
    """Return the network of two convolutions for a federation of images, or for the given sizes.

    >>> sum(p.numel() for p in cnn2(input_shape=(1, 28, 28), num_classes=10).parameters())
    184586
    """
    return CNN2(*image_sizes("cnn2", 4, federation, input_shape, num_classes))


def cnn3(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> CNN3:
    """Return the network of three convolutions for a federation of images, or for the given sizes.

    >>> sum(p.numel() for p in cnn3(input_shape=(3, 32, 32), num_classes=10).parameters())
    188810
    """
    return CNN3(*image_sizes("cnn3", 8, federation, input_shape, num_classes))


def cnn5(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> CNN5:
    """Return the network of five convolutions for a federation of images, or for the given sizes.

    >>> sum(p.numel() for p in cnn5(input_shape=(1, 28, 28), num_classes=10).parameters())
    287722
    """
    return CNN5(*image_sizes("cnn5", 8, federation, input_shape, num_classes))
