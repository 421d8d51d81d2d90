"""A residual network with GroupNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from sartor.models.sizes import image_sizes

if TYPE_CHECKING:
    from sartor.data.federation import Federation

_GROUPS = 8  # of every GroupNorm


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, added to a shortcut.

    The shortcut is a 1x1 convolution with GroupNorm where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(_GROUPS, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, outputs, height/stride, width/stride)``."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet8(nn.Module):
    """A residual network of eight layers: a stem, blocks of 16, 32 and 64 channels, and the head.

    The shape of He et al. 2016 for 32x32 images with one block a stage, and with GroupNorm (eight
    groups) in place of BatchNorm, whose statistics would differ from client to client.
    """

    head = "fc"

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, 16)
        self.stage1 = ResidualBlock(16, 16, 1)
        self.stage2 = ResidualBlock(16, 32, 2)
        self.stage3 = ResidualBlock(32, 64, 2)
        self.fc = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        x = F.relu(self.norm(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits


def resnet8(
    federation: Federation | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> ResNet8:
    """Return a residual network with GroupNorm for a federation of images, or for the given sizes.

    >>> sum(p.numel() for p in resnet8(input_shape=(3, 32, 32), num_classes=10).parameters())
    78042
    """
    channels, _, _, outputs = image_sizes("resnet8", 1, federation, input_shape, num_classes)
    return ResNet8(channels, outputs)
