"""Max pooling over windows that do not overlap: one kernel for all lanes, and one backwards.

On a CPU the same operators are those of ``native``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.engines.cpu import native
from sartor.engines.lanes.rules import Derived, operator
from sartor.engines.lanes.shapes import MOST_ELEMENTS, ceil, launch, usable


def takes_pool(x: Tensor, kernel: tuple[int, int]) -> bool:
    """Say whether the kernel serves windows without overlap on images (batch, C, H, W)."""
    fits = x.dim() == 4 and kernel[0] * kernel[1] <= 16
    return fits and x.shape[2] >= kernel[0] and x.shape[3] >= kernel[1] and usable(x)


def max_pool2d(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Return the largest value of every window, as ``F.max_pool2d(x, kernel)``."""
    found: Tensor = _Pool.apply(x, kernel)
    return found


class _Pool(Derived):
    """The largest value of every window."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Tensor:
        return pooled(x, kernel)

    @staticmethod
    def jvp(ctx: Any, along: Tensor, *_: Any) -> Tensor:
        return _taken(along, ctx.saved_tensors[0], *ctx.rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _PoolGrad.apply(grad, ctx.saved_tensors[0], *ctx.rest), None


class _PoolGrad(Derived):
    """The gradient of a pooling, linear in the gradient of its output."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, kernel: tuple[int, int]) -> Tensor:
        return unpooled(grad, x, kernel)

    @staticmethod
    def jvp(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        return None if grad is None else _PoolGrad.apply(grad, ctx.saved_tensors[1], *ctx.rest)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None, None]:
        return _taken(along, ctx.saved_tensors[1], *ctx.rest), None, None


def _taken(along: Tensor, x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Return what stands where the largest value of every window of x is."""
    _, where = F.max_pool2d(x, kernel, return_indices=True)
    return along.flatten(2).gather(2, where.flatten(2)).reshape(where.shape)


@operator(
    "pooled(Tensor x, SymInt[] kernel) -> Tensor",
    lambda x, kernel: x.new_empty(
        *x.shape[:-2], x.shape[-2] // kernel[0], x.shape[-1] // kernel[1]
    ),
    lanes=False,
)
def pooled(x: Tensor, kernel: Any) -> Tensor:
    """Pool planes (..., H, W)."""
    return _launch_pool(x, None, kernel)


@operator(
    "unpooled(Tensor g, Tensor x, SymInt[] kernel) -> Tensor",
    lambda g, x, kernel: x.new_empty(x.shape),
    lanes=False,
)
def unpooled(g: Tensor, x: Tensor, kernel: Any) -> Tensor:
    """Return the gradient of planes x (..., H, W) from that of what they were pooled to."""
    return _launch_pool(x, g, kernel)


def _launch_pool(x: Tensor, g: Tensor | None, kernel: Any) -> Tensor:
    if native.serves(x):
        return native.pool(x, g, kernel)
    x = x.contiguous()
    height, width = x.shape[-2:]
    rows, columns = height // kernel[0], width // kernel[1]
    total = x[..., 0, 0].numel() * rows * columns
    if g is None:
        out = x.new_empty(*x.shape[:-2], rows, columns)
    else:
        g = g.contiguous()
        covered = height % kernel[0] == 0 and width % kernel[1] == 0
        out = torch.empty_like(x) if covered else torch.zeros_like(x)
    block = 256
    launch(
        "layer_kernels",
        "pool",
        (ceil(total, block),),
        *(x, x if g is None else g, out, total),
        H=height,
        W=width,
        HO=rows,
        WO=columns,
        KH=kernel[0],
        KW=kernel[1],
        GRAD=g is not None,
        WIDE=x.numel() > MOST_ELEMENTS - block * kernel[0] * kernel[1],
        BLOCK=block,
        num_warps=8,  # one window a thread: more would be exchanged between threads
    )
    return out
