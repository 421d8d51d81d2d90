"""Lane convolutions with Triton: one kernel per pass for all lanes, and no patches in memory.

Three operators take tensors with one leading axis of lanes: the convolution, the gradient of its
input, and the gradients of kernel and bias. Under ``vmap`` a mapped axis joins that axis, so that
runs and clients become lanes of one launch. Each of the three is differentiated through the other
two, to any order. On a CPU the same three operators are those of ``native``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sartor.engines.cuda.conv_launches import (
    launch_forward,
    launch_input_grad,
    launch_weight_grad,
    outputs,
)
from sartor.engines.lanes.shapes import (
    MOST_ELEMENTS,
    folded,
    merge,
    part,
    side_by_side,
    unfold,
    usable,
)


def available(x: Tensor, weight: Tensor) -> bool:
    """Say whether the kernels can convolve these.

    CUDA, float32 or bfloat16, one group, and Triton is there.
    """
    return (
        usable(x, weight)
        and x.dim() == 4
        and weight.dim() == 4
        and x.shape[1] == weight.shape[1]
        # No output is larger than this while padding is at most half a kernel.
        and x.shape[0]
        * weight.shape[0]
        * (x.shape[2] + weight.shape[2])
        * (x.shape[3] + weight.shape[3])
        < MOST_ELEMENTS
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """Convolve a batch of one client: the same as ``F.conv2d`` with one group and no dilation.

    Args:
        x: images (batch, C, H, W).
        weight: the kernel (O, C, kh, kw).
        bias: one number per output channel (O), or None.
        stride: steps down and to the right.
        padding: rows and columns of zeros on each side.
    """
    out: Tensor = _Forward.apply(x, weight, bias, tuple(stride), tuple(padding))
    return out


# ---- one client: differentiable, to any order ---------------------------------------------------


class _Forward(torch.autograd.Function):
    """The convolution of one client."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Tensor:
        lanes = (x[None], weight[None], None if bias is None else bias[None])
        return lane_conv(*lanes, stride, padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Any:
        at_x, at_weight = ctx.saved_tensors
        parts = [None if bias is None else bias[:, None, None]]
        if x is not None:
            parts.append(_Forward.apply(x, at_weight, None, ctx.stride, ctx.padding))
        if weight is not None:
            parts.append(_Forward.apply(at_x, weight, None, ctx.stride, ctx.padding))
        return sum_of(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rest = (ctx.stride, ctx.padding)

        def of_weight() -> tuple[Tensor | None, Tensor | None]:
            if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
                return None, None
            found: tuple[Tensor, Tensor] = _WeightGrad.apply(
                x, grad, tuple(weight.shape[2:]), *rest
            )
            return found

        def of_x() -> Tensor | None:
            if not ctx.needs_input_grad[0]:
                return None
            found: Tensor = _InputGrad.apply(grad, weight, tuple(x.shape[2:]), *rest)
            return found

        (to_weight, to_bias), to_x = side_by_side(grad, of_weight, of_x)
        return to_x, to_weight, to_bias if ctx.biased else None, None, None


class _InputGrad(torch.autograd.Function):
    """The gradient of the input, linear in the gradient of the output and in the kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        weight: Tensor,
        size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Tensor:
        return lane_conv_input_grad(grad[None], weight[None], size, stride, padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, weight, ctx.size, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(grad, weight)
        ctx.save_for_forward(grad, weight)

    @staticmethod
    def jvp(ctx: Any, grad: Tensor | None, weight: Tensor | None, *_: Any) -> Any:
        at_grad, at_weight = ctx.saved_tensors
        rest = (ctx.size, ctx.stride, ctx.padding)
        return sum_of(
            [
                None if grad is None else _InputGrad.apply(grad, at_weight, *rest),
                None if weight is None else _InputGrad.apply(at_grad, weight, *rest),
            ]
        )

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        to_grad = to_weight = None
        if ctx.needs_input_grad[0]:
            to_grad = _Forward.apply(along, weight, None, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            kernel = tuple(weight.shape[2:])
            to_weight = _WeightGrad.apply(along, grad, kernel, ctx.stride, ctx.padding)[0]
        return to_grad, to_weight, None, None, None


class _WeightGrad(torch.autograd.Function):
    """The gradients of kernel and bias, linear in the input and in the gradient of the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        grad: Tensor,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        weight, bias = lane_conv_weight_grad(x[None], grad[None], kernel, stride, padding)
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, grad, ctx.kernel, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, grad)
        ctx.save_for_forward(x, grad)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, grad: Tensor | None, *_: Any) -> Any:
        at_x, at_grad = ctx.saved_tensors
        rest = (ctx.kernel, ctx.stride, ctx.padding)
        by_x = (None, None) if x is None else _WeightGrad.apply(x, at_grad, *rest)
        by_grad = (None, None) if grad is None else _WeightGrad.apply(at_x, grad, *rest)
        # The bias does not see the input.
        to_bias = torch.zeros_like(at_grad.sum((0, 2, 3))) if grad is None else by_grad[1]
        return sum_of([by_x[0], by_grad[0]]), to_bias

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        x, grad = ctx.saved_tensors
        to_x = to_grad = None
        if ctx.needs_input_grad[0]:
            to_x = _InputGrad.apply(grad, weight, tuple(x.shape[2:]), ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            to_grad = _Forward.apply(x, weight, bias, ctx.stride, ctx.padding)
        return to_x, to_grad, None, None, None


def sum_of(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Add what is there."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


# ---- many lanes: the operators ------------------------------------------------------------------


@torch.library.custom_op(
    "sartor::lane_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? b, SymInt[] stride, SymInt[] padding) -> Tensor",
)
def lane_conv(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Convolve x (L, B, C, H, W) with w (L, O, C, kh, kw), and add b (L, O)."""
    return launch_forward(x, w, b, stride, padding)


@torch.library.custom_op(
    "sartor::lane_conv_input_grad",
    mutates_args=(),
    schema="(Tensor g, Tensor w, SymInt[] size, SymInt[] stride, SymInt[] padding) -> Tensor",
)
def lane_conv_input_grad(
    g: Tensor,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return the gradient of inputs of ``size`` (H, W); g (L, B, O, H', W') is the outputs'."""
    return launch_input_grad(g, w, size, stride, padding)


@torch.library.custom_op(
    "sartor::lane_conv_weight_grad",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor g, SymInt[] kernel, SymInt[] stride, SymInt[] padding)"
        " -> (Tensor, Tensor)"
    ),
)
def lane_conv_weight_grad(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of kernels (L, O, C, kh, kw) and biases (L, O); g is the outputs'."""
    return launch_weight_grad(x, g, kernel, stride, padding)


@lane_conv.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return x.new_empty(
        *x.shape[:2], w.shape[1], *outputs(x.shape[3:], w.shape[3:], stride, padding)
    )


@lane_conv_input_grad.register_fake
def _(
    g: Tensor,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    return g.new_empty(*g.shape[:2], w.shape[2], *size)


@lane_conv_weight_grad.register_fake
def _(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    lanes, channels = g.shape[0], g.shape[2]
    return x.new_empty(lanes, channels, x.shape[2], *kernel), x.new_empty(lanes, channels)


@lane_conv.register_vmap
def _(info: Any, in_dims: Any, x: Any, w: Any, b: Any, stride: Any, padding: Any) -> Any:
    size = info.batch_size
    image = x.movedim(in_dims[0] or 0, 0).shape[-2:]
    grows = w.shape[-4] * math.prod(outputs(image, w.shape[-2:], stride, padding))
    rows = folded(x, in_dims[:3], w, grows)
    if rows is not None:
        return unfold(lane_conv(rows, w, b, stride, padding), size), 0
    x, w, b = (merge(t, dim, size) for t, dim in zip((x, w, b), in_dims, strict=False))
    return part(lane_conv(x, w, b, stride, padding), size), 0


@lane_conv_input_grad.register_vmap
def _(info: Any, in_dims: Any, g: Any, w: Any, *rest: Any) -> Any:
    size = info.batch_size
    g, w = (merge(t, dim, size) for t, dim in zip((g, w), in_dims, strict=False))
    return part(lane_conv_input_grad(g, w, *rest), size), 0


@lane_conv_weight_grad.register_vmap
def _(info: Any, in_dims: Any, x: Any, g: Any, *rest: Any) -> Any:
    size = info.batch_size
    x, g = (merge(t, dim, size) for t, dim in zip((x, g), in_dims, strict=False))
    weight, bias = lane_conv_weight_grad(x, g, *rest)
    return (part(weight, size), part(bias, size)), (0, 0)
