"""Small networks without buffers, and the check that a network can be trained over lanes.

A network here is a plain ``nn.Module`` with an attribute ``head``: the dotted name of the
submodule that maps features to classes, which personalised methods may keep private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from sartor.data.federation import Federation

_GROUPS = 8  # of every GroupNorm


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

    Convolutions are 5x5 without padding. Images with a side below 16 pixels would vanish, so
    they get ``padding=2`` in both convolutions (8x8 digits: 64 features before fc1).
    """

    head = "fc"

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        """Make the layers."""
        super().__init__()
        padding = 2 if min(height, width) < 16 else 0
        rows, columns = (_after_pools(side, padding) for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=padding)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc = nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)``."""
        # Pooling before ReLU gives the same numbers and leaves a quarter of the values to rectify.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        logits: Tensor = self.fc(x)
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, added to a shortcut.

    The shortcut is a 1x1 convolution with GroupNorm where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Make the layers."""
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
    groups) in place of BatchNorm, whose running statistics cannot be mapped over clients.
    """

    head = "fc"

    def __init__(self, channels: int, outputs: int) -> None:
        """Make the layers."""
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
    shape, outputs = _sizes(federation, input_shape, num_classes)
    return MCLR(_product(shape), outputs)


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
    shape, outputs = _sizes(federation, input_shape, num_classes)
    return DNN(_product(shape), hidden, outputs)


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
    shape, outputs = _sizes(federation, input_shape, num_classes)
    if len(shape) != 3:
        raise ModelError(
            f"lenet5 needs images of shape (channels, height, width), got samples of shape "
            f"{shape}; reshape x, or use mclr or dnn."
        )
    if min(shape[1:]) < 4:
        raise ModelError(
            f"lenet5 needs images of at least 4x4 pixels, got {shape[1]}x{shape[2]}; use mclr "
            "or dnn."
        )
    return LeNet5(shape[0], shape[1], shape[2], outputs)


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
    shape, outputs = _sizes(federation, input_shape, num_classes)
    if len(shape) != 3:
        raise ModelError(
            f"resnet8 needs images of shape (channels, height, width), got samples of shape "
            f"{shape}; reshape x, or use mclr or dnn."
        )
    return ResNet8(shape[0], outputs)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "dnn": dnn,
    "lenet5": lenet5,
    "mclr": mclr,
    "resnet8": resnet8,
}


def default(federation: Federation) -> nn.Module:
    """Choose a network: LeNet-5 for images of 16 pixels or more, else one hidden layer."""
    shape = federation.input_shape
    if len(shape) == 3 and min(shape[1:]) >= 16:
        return lenet5(federation)
    return dnn(federation)


def check_module(module: nn.Module, head: str | None = None) -> None:
    """Raise a ModelError that names every layer that cannot be trained over lanes.

    Args:
        module: the network.
        head: the dotted name of its head, or None if no part is private.
    """
    faults = _layer_faults(module) + _buffer_faults(module) + _parameter_faults(module)
    if head is not None:
        layers = dict(module.named_modules())
        layers.pop("")
        if head not in layers:
            hint = did_you_mean(head, layers) if layers else "; it has no submodules"
            faults.append(f"Model has no submodule {head!r} to be the head{hint}")
        elif next(layers[head].parameters(), None) is None:
            faults.append(
                f"Head {head!r} ({type(layers[head]).__name__}) has no parameters; name the "
                "layer that maps features to classes."
            )
    if len(faults) == 1:
        raise ModelError(faults[0])
    if faults:
        listed = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(faults, 1))
        raise ModelError(f"{len(faults)} faults in the model:\n{listed}")


def _layer_faults(module: nn.Module) -> list[str]:
    faults = []
    for name, layer in module.named_modules():
        where = f"{type(layer).__name__} at {name!r}" if name else f"{type(layer).__name__}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            faults.append(
                f"Model has BatchNorm ({where}): running statistics cannot be mapped over "
                "clients; use nn.GroupNorm instead."
            )
        elif isinstance(layer, nn.RNNBase):
            faults.append(
                f"Model has {where}: fused recurrent layers cannot be mapped over clients; write "
                "the cell with nn.Linear and a Python loop over time."
            )
        elif layer.training and (
            (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
            or (isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0)
            or isinstance(layer, nn.RReLU)
        ):
            faults.append(
                f"Model has {where}: random layers are not supported in training; set p=0, "
                "remove it, or put the layer in evaluation mode with .eval()."
            )
    return faults


def _buffer_faults(module: nn.Module) -> list[str]:
    faults = []
    for name, layer in module.named_modules():
        held = [key for key, value in layer._buffers.items() if value is not None]
        if held and not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            where = f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__
            faults.append(
                f"Model has buffers ({', '.join(held)}) in {where}: state outside the parameters "
                "cannot be mapped over clients; make constants inside forward, or use a layer "
                "without buffers (InstanceNorm with track_running_stats=False, GroupNorm)."
            )
    return faults


def _parameter_faults(module: nn.Module) -> list[str]:
    seen: dict[int, str] = {}
    faults = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.UninitializedParameter):
            faults.append(
                f"Parameter {name!r} has no shape yet (a lazy layer); run one batch through the "
                "model first."
            )
            continue
        if id(parameter) in seen:
            faults.append(
                f"Parameters {seen[id(parameter)]!r} and {name!r} are one tensor: tied weights "
                "cannot be split by name; use the same submodule twice in forward, or untie them."
            )
        seen.setdefault(id(parameter), name)
    if not seen and not faults:
        faults.append(f"Model {type(module).__name__} has no parameters; nothing can be trained.")
    return faults


def _sizes(
    federation: Federation | None,
    input_shape: tuple[int, ...] | None,
    num_classes: int | None,
) -> tuple[tuple[int, ...], int]:
    """Take the sizes from the federation, unless they are given."""
    shape = input_shape if input_shape is not None or federation is None else federation.input_shape
    outputs = num_classes if num_classes is not None or federation is None else None
    if outputs is None and federation is not None:
        outputs = federation.num_classes
    if shape is None or outputs is None:
        raise ModelError("Give a federation, or both input_shape and num_classes.")
    if outputs < 0 or any(side < 1 for side in shape):
        raise ModelError(f"Sizes must be positive, got {shape} and {outputs} classes.")
    return tuple(shape), max(outputs, 1)  # regression has one output


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _after_pools(side: int, padding: int) -> int:
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return side
