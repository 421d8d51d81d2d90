"""Convolutional networks of two, three and five layers, LeNet-5 among them.

The analyses of FedProx (Yu et al.) name CNN2, CNN3 and CNN5 by their number of convolutions only;
the widths of these are ours:

| network | convolutions | pooling | hidden layers |
| --- | --- | --- | --- |
| LeNet5 | 5×5: 6, 16, without padding | after each | 120, 84 |
| CNN2 | 5×5: 32, 64, without padding | after each | 128 |
| CNN3 | 3×3: 32, 64, 64, with padding | after each | 128 |
| CNN5 | 3×3: 32, 32, 64, 64, 128, with padding | after the 2nd, 4th and 5th | 128 |

Every network ends with the linear head ``fc`` and has ReLU, 2×2 max pooling and no normalisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from sartor.models.sizes import image_sizes

if TYPE_CHECKING:
    from sartor.data.federation import Federation


class Stack(nn.Module):
    """Convolutions conv1, conv2, ..., some of them pooled, hidden layers fc1, ..., and the head fc.

    5×5 convolutions are without padding. Images with a side below 16 pixels would vanish, so they
    get ``padding=2`` (LeNet-5 on 8×8 digits: 64 features before fc1).

    Attributes:
        kernel: the side of all convolutions, 3 or 5.
        widths: the channels of every convolution.
        pooled: the convolutions, counted from 1, that are followed by pooling.
        hidden: the sizes of the hidden layers.
    """

    head = "fc"
    kernel = 3
    widths: tuple[int, ...]
    pooled: tuple[int, ...]
    hidden: tuple[int, ...] = (128,)
    fc1: nn.Linear

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        super().__init__()
        padding = 1 if self.kernel == 3 else 2 if min(height, width) < 16 else 0
        for layer, wide in enumerate(self.widths, 1):
            conv = nn.Conv2d(channels, wide, self.kernel, padding=padding)
            self.add_module(f"conv{layer}", conv)
            channels, shrunk = wide, 2 if layer in self.pooled else 1
            lost = self.kernel - 1 - 2 * padding
            height, width = (height - lost) // shrunk, (width - lost) // shrunk
        inputs = channels * height * width
        for layer, wide in enumerate(self.hidden, 1):
            self.add_module(f"fc{layer}", nn.Linear(inputs, wide))
            inputs = wide
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        for layer in range(1, len(self.widths) + 1):
            x = getattr(self, f"conv{layer}")(x)
            # Pooling before ReLU gives the same numbers, and ReLU has a quarter of the values left.
            x = F.relu(F.max_pool2d(x, 2) if layer in self.pooled else x)
        x = x.flatten(1)
        for layer in range(1, len(self.hidden) + 1):
            x = F.relu(getattr(self, f"fc{layer}")(x))
        logits: Tensor = self.fc(x)
        return logits


class LeNet5(Stack):
    """LeNet-5 with ReLU and max pooling; extractor conv1, conv2, fc1, fc2, and the head fc."""

    kernel, widths, pooled, hidden = 5, (6, 16), (1, 2), (120, 84)


class CNN2(Stack):
    """Two 5×5 convolutions of 32 and 64 channels, each pooled, a hidden layer, and the head fc."""

    kernel, widths, pooled = 5, (32, 64), (1, 2)


class CNN3(Stack):
    """Three 3×3 convolutions of 32, 64 and 64 channels, each pooled."""

    widths, pooled = (32, 64, 64), (1, 2, 3)


class CNN5(Stack):
    """Five 3×3 convolutions of 32, 32, 64, 64 and 128 channels, pooled after 2, 4 and 5."""

    widths, pooled = (32, 32, 64, 64, 128), (2, 4, 5)


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
