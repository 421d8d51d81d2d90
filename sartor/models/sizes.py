"""Find the sizes of a network: given, or taken from a federation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sartor.core.errors import ModelError

if TYPE_CHECKING:
    from sartor.data.federation import Federation


def sizes_of(
    federation: Federation | None, input_shape: tuple[int, ...] | None, num_classes: int | None
) -> tuple[tuple[int, ...], int]:
    """Return the shape of a sample and the number of outputs, given or from the federation."""
    shape, outputs = input_shape, num_classes
    if federation is not None:
        shape = federation.input_shape if shape is None else shape
        outputs = federation.num_classes if outputs is None else outputs
    if shape is None or outputs is None:
        raise ModelError("Give a federation, or both input_shape and num_classes.")
    if outputs < 0 or any(side < 1 for side in shape):
        raise ModelError(f"Sizes must be positive, got {shape} and {outputs} classes.")
    return tuple(shape), max(outputs, 1)  # regression has one output


def image_sizes(
    name: str,
    least: int,
    federation: Federation | None,
    input_shape: tuple[int, ...] | None,
    num_classes: int | None,
) -> tuple[int, int, int, int]:
    """Return channels, height, width and outputs; refuse images with a side below ``least``."""
    shape, outputs = sizes_of(federation, input_shape, num_classes)
    if len(shape) != 3:
        raise ModelError(
            f"{name} needs images of shape (channels, height, width), got samples of shape "
            f"{shape}; reshape x, or use mclr or dnn."
        )
    if min(shape[1:]) < least:
        raise ModelError(
            f"{name} needs images of at least {least}x{least} pixels, got {shape[1]}x{shape[2]}; "
            "use mclr or dnn."
        )
    return shape[0], shape[1], shape[2], outputs
