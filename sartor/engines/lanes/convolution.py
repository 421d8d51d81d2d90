"""Convolutions for lanes: patches and one batched matrix product, instead of one group per client.

Under ``vmap`` a convolution with its own kernel per client becomes a grouped one, for which GPU
libraries launch a small kernel per client and change layouts back and forth. With few channels it
is faster to write the patches out once (they serve the forward pass and the kernel's gradient) and
to multiply all lanes in one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.engines.cpu import native
from sartor.engines.cuda.triton_conv import available, convolve

_MOST_PATCH = 512  # the largest patch (channels × kernel) worth writing out


def _patches(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Write out all patches: (batch, C, H, W) -> (batch, C·kh·kw, positions)."""
    batch, channels = x.shape[:2]
    view = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    rows, columns = view.shape[2:4]
    flat = view.permute(0, 1, 4, 5, 2, 3)
    return flat.reshape(batch, channels * kernel[0] * kernel[1], rows * columns)


class _Convolve(torch.autograd.Function):
    """Convolution without padding or bias, with its two gradients as matrix products.

    The backward pass is made of differentiable operations, so higher gradients are right too.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
        """Return the output (batch, O, H', W')."""
        kernel = (weight.shape[2], weight.shape[3])
        out = weight.reshape(weight.shape[0], -1) @ _patches(x, kernel, stride)
        rows = (x.shape[2] - kernel[0]) // stride[0] + 1
        return out.reshape(x.shape[0], weight.shape[0], rows, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the inputs for the gradients."""
        x, weight, ctx.stride = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of input and kernel."""
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[1]:
            patches = _patches(x, (weight.shape[2], weight.shape[3]), ctx.stride)
            to_weight = (grad.flatten(2) @ patches.mT).sum(0).reshape(weight.shape)
        if ctx.needs_input_grad[0]:
            to_x = _spread(grad, weight, (x.shape[2], x.shape[3]), ctx.stride)
        return to_x, to_weight, None


def _spread(grad: Tensor, weight: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return the gradient of the input.

    Each output position spreads over its patch, and patches are summed.
    """
    flat = weight.reshape(weight.shape[0], -1).mT
    return F.fold(flat @ grad.flatten(2), size, tuple(weight.shape[2:]), stride=stride)


def lane_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """Convolve a batch: the same numbers as ``F.conv2d`` with one group and no dilation.

    On a GPU with Triton its kernels do the work; the patches are the form for everything else.
    """
    rows, columns = pair(padding)
    if available(x, weight):
        return convolve(x, weight, bias, pair(stride), (rows, columns))
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    out: Tensor = _Convolve.apply(x, weight, pair(stride))
    return out if bias is None else out + bias[:, None, None]


def native_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
) -> Tensor | None:
    """Convolve a batch on one core of a CPU, or return None where a library does it better."""
    if not native.takes_conv(x, weight, bias, pair(stride), pair(padding)):
        return None
    if weight.requires_grad and not x.requires_grad:
        x = native.laid(x)  # once: data are read again for the gradient of the weights
    return convolve(x, weight, bias, pair(stride), pair(padding))


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a number for both axes, or the two that were given."""
    if not isinstance(value, int) and len(value) == 1:
        value = value[0]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """Return the arguments for ``lane_conv2d``, or None where the plain form must do the work."""
    patch = weight.shape[1] * weight.shape[2] * weight.shape[3]
    plain = groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4
    return None if plain or patch > _MOST_PATCH else (input, weight, bias, stride, padding)
