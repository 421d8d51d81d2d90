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
    Pair,
    launch_forward,
    launch_input_grad,
    launch_weight_grad,
    outputs,
)
from sartor.engines.lanes.rules import Derived, alone, folded, operator
from sartor.engines.lanes.shapes import MOST_ELEMENTS, in_parallel, usable


def available(x: Tensor, weight: Tensor) -> bool:
    """Say whether the kernels can convolve these."""
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
    """Convolve x (batch, C, H, W) of one client with weight (O, C, kh, kw), and add bias (O).

    The same as ``F.conv2d`` with one group and no dilation.
    """
    out: Tensor = _Forward.apply(x, weight, bias, tuple(stride), tuple(padding))
    return out


# ---- one client: differentiable, to any order ---------------------------------------------------


class _Forward(Derived):
    """The convolution of one client."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Any:
        return alone(lane_conv, x, weight, bias, stride, padding)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Any:
        at_x, at_weight, *_bias = ctx.saved_tensors
        parts = [None if bias is None else bias[:, None, None]]
        if x is not None:
            parts.append(_Forward.apply(x, at_weight, None, *ctx.rest))
        if weight is not None:
            parts.append(_Forward.apply(at_x, weight, None, *ctx.rest))
        return sum_of(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *bias = ctx.saved_tensors

        def of_weight() -> Any:
            if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
                return None, None
            return _WeightGrad.apply(x, grad, tuple(weight.shape[2:]), *ctx.rest)

        def of_x() -> Tensor | None:
            if not ctx.needs_input_grad[0]:
                return None
            return _InputGrad.apply(grad, weight, tuple(x.shape[2:]), *ctx.rest)

        (to_weight, to_bias), to_x = in_parallel(grad, of_weight, of_x)
        return to_x, to_weight, to_bias if bias else None, None, None


class _InputGrad(Derived):
    """The gradient of the input, linear in the gradient of the output and in the kernel."""

    @staticmethod
    def forward(grad: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair) -> Any:
        return alone(lane_conv_input_grad, grad, weight, size, stride, padding)

    @staticmethod
    def jvp(ctx: Any, grad: Tensor | None, weight: Tensor | None, *_: Any) -> Any:
        at_grad, at_weight = ctx.saved_tensors
        by_grad = None if grad is None else _InputGrad.apply(grad, at_weight, *ctx.rest)
        by_weight = None if weight is None else _InputGrad.apply(at_grad, weight, *ctx.rest)
        return sum_of([by_grad, by_weight])

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        _, *steps = ctx.rest
        to_grad = to_weight = None
        if ctx.needs_input_grad[0]:
            to_grad = _Forward.apply(along, weight, None, *steps)
        if ctx.needs_input_grad[1]:
            to_weight = _WeightGrad.apply(along, grad, tuple(weight.shape[2:]), *steps)[0]
        return to_grad, to_weight, None, None, None


class _WeightGrad(Derived):
    """The gradients of kernel and bias, linear in the input and in the gradient of the output."""

    @staticmethod
    def forward(x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Any:
        return alone(lane_conv_weight_grad, x, grad, kernel, stride, padding)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, grad: Tensor | None, *_: Any) -> Any:
        at_x, at_grad = ctx.saved_tensors
        by_x = (None, None) if x is None else _WeightGrad.apply(x, at_grad, *ctx.rest)
        by_grad = (None, None) if grad is None else _WeightGrad.apply(at_x, grad, *ctx.rest)
        # The bias does not see the input.
        to_bias = torch.zeros_like(at_grad.sum((0, 2, 3))) if grad is None else by_grad[1]
        return sum_of([by_x[0], by_grad[0]]), to_bias

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        x, grad = ctx.saved_tensors
        _, *steps = ctx.rest
        to_x = to_grad = None
        if ctx.needs_input_grad[0]:
            to_x = _InputGrad.apply(grad, weight, tuple(x.shape[2:]), *steps)
        if ctx.needs_input_grad[1]:
            to_grad = _Forward.apply(x, weight, bias, *steps)
        return to_x, to_grad, None, None, None


def sum_of(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Add what is there."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


# ---- many lanes: the operators ------------------------------------------------------------------


def _empty_images(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    size = outputs(x.shape[3:], w.shape[3:], stride, padding)
    return x.new_empty(*x.shape[:2], w.shape[1], *size)


def _as_rows(
    size: int, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair
) -> Any:
    image = x.movedim(dims[0] or 0, 0).shape[-2:]
    grows = w.shape[-4] * math.prod(outputs(image, w.shape[-2:], stride, padding))
    rows = folded(x, dims[:3], w, grows)
    return None if rows is None else (rows, w, b, stride, padding)


@operator(
    "lane_conv(Tensor x, Tensor w, Tensor? b, SymInt[] stride, SymInt[] padding) -> Tensor",
    _empty_images,
    shared=_as_rows,
)
def lane_conv(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve x (L, B, C, H, W) with w (L, O, C, kh, kw), and add b (L, O)."""
    return launch_forward(x, w, b, stride, padding)


@operator(
    "lane_conv_input_grad(Tensor g, Tensor w, SymInt[] size, SymInt[] stride, SymInt[] padding)"
    " -> Tensor",
    lambda g, w, size, *_: g.new_empty(*g.shape[:2], w.shape[2], *size),
)
def lane_conv_input_grad(g: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of inputs of ``size`` (H, W); g (L, B, O, H', W') is the outputs'."""
    return launch_input_grad(g, w, size, stride, padding)


def _empty_kernels(x: Tensor, g: Tensor, kernel: Pair, *_: Any) -> tuple[Tensor, Tensor]:
    lanes, channels = g.shape[0], g.shape[2]
    return x.new_empty(lanes, channels, x.shape[2], *kernel), x.new_empty(lanes, channels)


@operator(
    "lane_conv_weight_grad(Tensor x, Tensor g, SymInt[] kernel, SymInt[] stride, SymInt[] padding)"
    " -> (Tensor, Tensor)",
    _empty_kernels,
)
def lane_conv_weight_grad(
    x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair
) -> tuple[Tensor, Tensor]:
    """Return the gradients of kernels (L, O, C, kh, kw) and biases (L, O); g is the outputs'."""
    return launch_weight_grad(x, g, kernel, stride, padding)
