"""Dense layers for lanes: one kernel where a library takes three, and three more backwards.

First derivatives are kernels; derivatives of those are plain operations, so any order is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sartor.engines.cpu import native
from sartor.engines.lanes.rules import Derived, alone, folded, operator
from sartor.engines.lanes.shapes import (
    PRECISION,
    PROGRAMS,
    ceil,
    dense,
    in_parallel,
    launch,
    usable,
)

_MANY_LANES, _SMALL_BATCH = 512, 32  # see ``_library_product``
_MANY_WEIGHTS, _FEW_ROWS = 1 << 20, 16  # of a large layer, and rows up to which kernels serve it
_SHORT = 256  # the least share of a long sum


def takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether the kernels serve this layer; a library multiplies large ones faster."""
    given = (x, weight) if bias is None else (x, weight, bias)
    rows = x.numel() // max(x.shape[-1], 1)
    suits = weight.numel() <= _MANY_WEIGHTS or rows <= _FEW_ROWS
    return suits and usable(*given) and x.dim() >= 2


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

        def of_weight() -> Any:
            if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
                return None, None
            return _ProductAndSums.apply(grad.mT, x)

        def of_x() -> Tensor | None:
            return _Product.apply(grad, weight) if ctx.needs_input_grad[0] else None

        (to_weight, to_bias), to_x = in_parallel(grad, of_weight, of_x)
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
    "lane_product(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    _empty_product,
    shared=_as_rows,
)
def lane_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a (L, M, K) · b (L, K, N), plus a row (L, N)."""
    return _launch_product(a, b, bias, False)[0]


@operator(
    "lane_product_and_sums(Tensor a, Tensor b) -> (Tensor, Tensor)",
    lambda a, b: (_empty_product(a, b), a.new_empty(a.shape[:2])),
)
def lane_product_and_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (L, M, K) · b (L, K, N), and the sums of a's rows (L, M)."""
    return _launch_product(a, b, None, True)


def _launch_product(a: Tensor, b: Tensor, bias: Tensor | None, sums: bool) -> tuple[Tensor, Tensor]:
    if not a.is_cuda:
        return on_core(a, b, bias, sums)
    lanes, rows, inner = a.shape
    columns = b.shape[2]
    forwards = b.stride(1) == 1
    large = max(rows, inner) * columns > _MANY_WEIGHTS
    many = lanes >= _MANY_LANES and min(rows, inner) <= _SMALL_BATCH
    if many or (large and rows > _FEW_ROWS):
        return _library_product(a, b, bias, sums)
    if large and forwards and not sums:
        found = _split_product(a, b, bias)
        return found, found
    tile = (16, 256, 32, 4) if large else _tile(rows, columns, lanes, forwards)
    out = a.new_empty(lanes, rows, columns)
    total = a.new_empty(lanes, rows) if sums else out
    _multiply(a, b, bias, out, total, tile, sums=sums)
    return out, total


def on_core(a: Tensor, b: Tensor, bias: Tensor | None, sums: bool) -> tuple[Tensor, Tensor]:
    """Multiply on a CPU: by compiled loops where one side is short; else by torch."""
    if sums and native.takes_outer(a, b):
        return native.outer(a, b), a.sum(2)
    if not native.takes_product(a, b) or sums:
        return _library_product(a, b, bias, sums)
    out = native.dense(a, b.mT, bias)
    return out, out


def moved_on_core(now: Tensor, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
    """Return now + factor · (a · b): the gradient of a layer's weights and the step along it.

    The gradient is not written out; the numbers are those of one after the other, to the bit.
    """
    if native.takes_outer(a, b):
        return native.outer(a, b, now, factor)
    return native.updated([now], [on_core(a, b, None, True)[0]], factor)[0]


def _split_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Do as the kernel does for few rows and a long sum, which many programs share."""
    lanes, rows, inner = a.shape
    columns = b.shape[2]
    tile = (16, 64, 32, 4)
    tiles = ceil(rows, tile[0]) * ceil(columns, tile[1]) * lanes
    splits = max(1, min(ceil(5 * PROGRAMS, tiles), inner // _SHORT))
    parts = a.new_empty(lanes, splits, rows, columns, dtype=torch.float32)
    _multiply(a, b, None, parts, parts, tile, splits=splits)
    out = parts.sum(1)
    out = out if bias is None else out + bias[:, None]
    return out.to(a.dtype)


def _multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor,
    tile: tuple[int, int, int, int],
    sums: bool = False,
    splits: int = 1,
) -> None:
    """Launch the kernel; ``out`` is (L, M, N), or with more splits than one (L, splits, M, N)."""
    lanes, rows, inner = a.shape
    columns = b.shape[2]
    tall, wide, deep, warps = tile
    bias = None if bias is None else dense(bias)
    apart = (a.stride(0), b.stride(0), 0 if bias is None else bias.stride(0))
    share = ceil(ceil(inner, splits), deep) * deep
    inside = (*a.stride()[1:], *b.stride()[1:])
    launch(
        "layer_kernels",
        "product",
        (ceil(rows, tall) * ceil(columns, wide), lanes, splits),
        *(a, b, a if bias is None else bias, out, total),
        *(*apart, rows, columns, inner, share, *inside),
        HAS_BIAS=bias is not None,
        SUMS=sums,
        SPLITS=splits,
        BM=tall,
        BN=wide,
        BK=deep,
        PRECISION=PRECISION,
        num_warps=warps,
        num_stages=3,
    )


def _library_product(
    a: Tensor, b: Tensor, bias: Tensor | None, sums: bool
) -> tuple[Tensor, Tensor]:
    """Do as the kernel does; with many lanes and few rows a library multiplies in half the time."""
    out = torch.bmm(a, b) if bias is None else torch.baddbmm(bias[:, None], a, b)
    return out, a.sum(2) if sums else out


def _tile(rows: int, columns: int, lanes: int, forwards: bool) -> tuple[int, int, int, int]:
    """Choose rows, columns and depth of a tile, and its warps; by timings on an H200.

    Forwards the right matrix is a transposed one, which wants narrow tiles.
    """
    if ceil(rows, 32) * ceil(columns, 64) * lanes >= PROGRAMS:
        return (64, 32, 32, 2) if forwards else (32, 64, 32, 2)
    return (32, 16, 64, 2) if forwards else (16, 32, 32, 4)
