"""Dense layers of many lanes on the cores of a CPU; on a GPU a library multiplies as fast.

First derivatives are operators; derivatives of those are plain operations, so any order is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sartor.engines.cpu import native
from sartor.engines.lanes.rules import Derived, alone, folded, operator


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b for one client, as ``F.linear``.

    x is (..., I), the weight (O, I), the bias (O) or None.
    """
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices of one client."""
    found: Tensor = _Product.apply(a, b)
    return found


class _Linear(Derived):
    """A dense layer of one client."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return alone(lane_product, x, weight.mT, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            to_weight, to_bias = _ProductAndSums.apply(grad.mT, x)
        if ctx.needs_input_grad[0]:
            to_x = _Product.apply(grad, weight)
        return to_x, to_weight, to_bias if ctx.biased else None


class _Product(Derived):
    """The product of two matrices."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Any:
        return alone(lane_product, a, b, None)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return along @ b.mT, a.mT @ along


class _ProductAndSums(Derived):
    """The product of two matrices, and the sums of the left one's rows."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Any:
        return alone(lane_product_and_sums, a, b)

    @staticmethod
    def backward(ctx: Any, along: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return along @ b.mT + sums[:, None], a.mT @ along


def _empty_product(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _as_rows(size: int, dims: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
    rows = folded(a, dims[:3], b, b.shape[-1])
    return None if rows is None else (rows, b, bias)


@operator(
    "lane_product(Tensor a, Tensor b, Tensor? bias) -> Tensor", _empty_product, shared=_as_rows
)
def lane_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a (L, M, K) · b (L, K, N), plus a row (L, N): by compiled loops where b is narrow."""
    if native.takes_product(a, b):
        return native.dense(a, b.mT, bias)
    return torch.bmm(a, b) if bias is None else torch.baddbmm(bias[:, None], a, b)


@operator(
    "lane_product_and_sums(Tensor a, Tensor b) -> (Tensor, Tensor)",
    lambda a, b: (_empty_product(a, b), a.new_empty(a.shape[:2])),
)
def lane_product_and_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (L, M, K) · b (L, K, N), and the sums of a's rows (L, M)."""
    return (native.outer(a, b) if native.takes_outer(a, b) else torch.bmm(a, b)), a.sum(2)


def moved_on_core(now: Tensor, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
    """Return now + factor · (a · b): the gradient of a layer's weights and the step along it.

    The gradient is not written out; the numbers are those of one after the other, to the bit.
    """
    if native.takes_outer(a, b):
        return native.outer(a, b, now, factor)
    return native.updated([now], [torch.bmm(a, b)], factor)[0]
