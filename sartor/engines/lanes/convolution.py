"""Convolutions for lanes: by Triton kernels on a GPU, by compiled loops on one core of a CPU.

Under ``vmap`` a convolution with its own kernel per client becomes a grouped one, for which GPU
libraries launch a small kernel per client and change layouts back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sartor.engines.cpu import native
from sartor.engines.cuda.triton_conv import available, convolve

_MOST_PATCH = 512  # channels × kernel: libraries are faster beyond


def lane_conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    """Convolve as ``torch.conv2d`` for all lanes on a GPU; None where a library must do it."""
    given = _arguments(*args, **kwargs)
    return convolve(*given) if given is not None and available(*given[:2]) else None


def native_conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    """Convolve as ``torch.conv2d`` on one core of a CPU; None where a library does it better."""
    given = _arguments(*args, **kwargs)
    if given is None or not native.takes_conv(*given):
        return None
    x, weight, *rest = given
    if weight.requires_grad and not x.requires_grad:
        x = native.laid(x)  # once: data are read again for the gradient of the weights
    return convolve(x, weight, *rest)


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a number for both axes, or the two that were given."""
    if not isinstance(value, int) and len(value) == 1:
        value = value[0]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """Return the arguments of ``convolve``; None for convolutions that it does not know."""
    patch = weight.shape[1] * weight.shape[2] * weight.shape[3]
    plain = groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4
    if plain or patch > _MOST_PATCH:
        return None
    return input, weight, bias, pair(stride), pair(padding)  # type: ignore[arg-type]
