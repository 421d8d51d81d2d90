"""Launches of the convolution kernels: which kernel, with which tile, on how many programs.

Sums have a fixed order: the same call gives the same bits. Block sizes follow from the shapes by
rule, since a search would break the capture of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.engines.cpu import native
from sartor.engines.lanes.shapes import PRECISION, PROGRAMS, ceil, dense, launch, power

Pair = Sequence[int]
"""Rows and columns: of a kernel, a stride, a margin, an image."""

_DEEP = 16  # channels or places of a patch in one product of tensor cores
_MOST_GROUP = 8  # channels of a thread, in the kernels for few channels
_FEW_PROGRAMS = 200  # with fewer, tensor cores give the gradient of the input sooner
_MANY_IMAGES, _MANY_CHANNELS = 1024, 16  # of one lane: a library convolves them sooner
_MOST_SPLITS = 64  # shares of the sum over positions; more would make the partial sums large


def outputs(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, int]:
    """Return rows and columns of what a convolution makes."""
    rows, columns = (
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True)
    )
    return rows, columns


def launch_forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve x (L, B, C, H, W) with w (L, O, C, kh, kw), and add b (L, O)."""
    if native.serves(x):
        return native.convolved(x, w, b, stride, padding)
    lanes, batch = x.shape[:2]
    if lanes == 1 and batch >= _MANY_IMAGES and x.shape[2] >= _MANY_CHANNELS:
        return _library_forward(x, w, b, stride, padding)
    rows, columns = outputs(x.shape[3:], w.shape[3:], stride, padding)
    x, w = dense(x), dense(w)
    b = None if b is None else dense(b)
    out = x.new_empty(lanes, batch, w.shape[1], rows, columns)
    positions = batch * rows * columns
    steps = (x.stride(0), w.stride(0), 0 if b is None else b.stride(0))
    given = (x, w, w if b is None else b, out, *steps, positions)
    shapes = _shapes(x, w.shape[1], w.shape[3:], stride, padding, (rows, columns))
    group = _group(w.shape[1], _MOST_GROUP)
    if _few(w[0, 0].numel(), w.shape[1], group, ceil(positions, 512) * lanes):
        block = 512 if group <= 6 else 256
        grid = (ceil(positions, block), lanes, w.shape[1] // group)
        few = {"HAS_BIAS": b is not None, "GROUP": group, "BM": block, "num_warps": 2}
        launch("few_kernels", "forward_few", grid, *given, **shapes, **few)
        return out
    wide, tall, warps = _tile(w.shape[1], positions, lanes)
    if tall == 64 and shapes["C"] % _DEEP == 0 and _fills(positions, w.shape[1], lanes, 256, tall):
        wide, warps = 256, 8  # by taps, this many threads wait less
    grid = (ceil(positions, wide), lanes, ceil(w.shape[1], tall))
    patch = shapes["C"] * shapes["KH"] * shapes["KW"]
    tile = _blocks(tall, wide, _DEEP, warps)
    has_bias = {"HAS_BIAS": b is not None}
    launch("conv_kernels", "forward", grid, *given, patch, **shapes, **has_bias, **tile)
    return out


def _library_forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """Convolve many images of one lane, such as the tests of a model that all clients share."""
    bias = None if b is None else b[0]
    now = torch.backends.cudnn
    kept = {"benchmark": now.benchmark, "deterministic": now.deterministic}
    with now.flags(enabled=True, allow_tf32=False, **kept):
        out = F.conv2d(x[0], w[0], bias, tuple(stride), tuple(padding))
    return out[None]


def launch_input_grad(g: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of inputs of ``size`` (H, W) from g (L, B, O, rows, columns)."""
    if native.serves(g):
        return native.input_gradient(g, w, size, stride, padding)
    lanes, batch = g.shape[:2]
    g, w = dense(g), dense(w)
    out = g.new_empty(lanes, batch, w.shape[2], *size)
    positions = batch * size[0] * size[1]
    given = (g, w, out, g.stride(0), w.stride(0), positions)
    shapes = _shapes(out, w.shape[1], w.shape[3:], stride, padding, g.shape[3:])
    group = _group(w.shape[2], _MOST_GROUP)
    programs = ceil(positions, 256) * lanes
    if w.shape[2] <= _MOST_GROUP and w.shape[1] <= 32 and programs >= _FEW_PROGRAMS:
        grid = (ceil(positions, 256), lanes, w.shape[2] // group)
        few = {"GROUP": group, "BM": 256, "UNROLL": _group(w.shape[1], 16), "num_warps": 2}
        launch("few_kernels", "input_grad_few", grid, *given, **shapes, **few)
        return out
    wide, tall, warps = _tile(w.shape[2], positions, lanes)
    if tall == 32 and _fills(positions, w.shape[2], lanes, 128, tall):
        wide, warps = 128, 2
    grid = (ceil(positions, wide), lanes, ceil(w.shape[2], tall))
    tile = _blocks(tall, wide, _DEEP, warps)
    launch("conv_kernels", "input_grad", grid, *given, **shapes, **tile)
    return out


def launch_weight_grad(
    x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair
) -> tuple[Tensor, Tensor]:
    """Return the gradients of kernels (L, O, C, kh, kw) and biases (L, O)."""
    if native.serves(x):
        return native.kernel_gradient(x, g, kernel, stride, padding)
    lanes, batch, channels = x.shape[:3]
    outputs = g.shape[2]
    x, g = dense(x), dense(g)
    patch = channels * kernel[0] * kernel[1]
    positions = batch * g.shape[3] * g.shape[4]
    shapes = _shapes(x, outputs, kernel, stride, padding, g.shape[3:])
    wide = min(power(outputs), 64)
    tall = min(power(patch), 32 if wide == 64 else 64)
    by_rows = _rows_tile(shapes, ceil(patch, tall) * tall * ceil(outputs, wide) * wide)
    if by_rows is not None:
        tall, wide = by_rows
        tiles = ceil(channels * kernel[0], tall) * ceil(outputs * kernel[1], wide)
        deep, places = 64, batch * g.shape[3] * x.shape[4]
    else:
        tiles = ceil(patch, tall) * ceil(outputs, wide)
        deep, places = 64 if patch <= 32 else 32, positions
        if wide == 64 and patch >= 64:
            tall, deep = 64, 16
            tiles = ceil(patch, tall) * ceil(outputs, wide)
    share, splits = _shares(places, lanes * tiles, deep)
    partial = x.new_empty(lanes, splits, outputs, patch + 1, dtype=torch.float32)
    to_weight = x.new_empty(lanes, outputs, channels, *kernel)
    to_bias = x.new_empty(lanes, outputs)
    given: tuple[Any, ...] = (x, g, partial, x.stride(0), g.stride(0), positions)
    tile = _blocks(wide, deep, tall, 2 if tall * wide <= 1024 or deep == 16 else 4)
    if by_rows is not None:
        grid, rest = (splits, lanes, tiles + 1), {**shapes, "BO": power(outputs), **tile}
        launch("few_kernels", "weight_grad_rows", grid, *given, places, share, splits, **rest)
    else:
        grid = (splits, lanes, tiles + ceil(outputs, wide))
        launch("conv_kernels", "weight_grad", grid, *given, share, splits, **shapes, **tile)
    given = (partial, to_weight, to_bias, splits)
    sums = {"K": patch, "O": outputs, "SPLITS": power(splits, 1), "BLOCK": 64, "num_warps": 4}
    launch("conv_kernels", "sum_splits", (ceil(outputs * (patch + 1), 64), lanes), *given, **sums)
    return to_weight, to_bias


def _blocks(channels: int, positions: int, deep: int, warps: int) -> dict[str, Any]:
    """Name the sides of a tile, and what all products of tensor cores take."""
    sides = {"BN": channels, "BM": positions, "BK": deep}
    return {**sides, "PRECISION": PRECISION, "num_warps": warps, "num_stages": 3}


def _rows_tile(shapes: dict[str, int], work: int) -> tuple[int, int] | None:
    """Return the tile (rows of the input, columns of the gradient) of ``weight_grad_rows``.

    None where patches need fewer products, ``work`` for a position: rows pay off for a large
    kernel on few channels.
    """
    rows, columns = shapes["C"] * shapes["KH"], shapes["O"] * shapes["KW"]
    tall, wide = min(power(rows, 16), 64), min(power(columns, 16), 64)
    padded = ceil(rows, tall) * tall * ceil(columns, wide) * wide * shapes["W"] / shapes["WO"]
    return (tall, wide) if shapes["SW"] == 1 and padded <= 0.75 * work else None


def _group(channels: int, most: int) -> int:
    """Return the largest divisor of the number of channels that is at most ``most``."""
    return max(n for n in range(1, most + 1) if channels % n == 0)


def _few(patch: int, channels: int, group: int, programs: int) -> bool:
    """Say whether plain products beat tensor cores: few channels, or short sums, in good groups.

    Sixteen channels do so only where there are enough lanes to fill the device.
    """
    if group < 3 and channels > group:
        return False
    return channels <= _MOST_GROUP or patch <= 32 or (channels <= 16 and programs >= PROGRAMS)


def _fills(positions: int, channels: int, lanes: int, wide: int, tall: int) -> bool:
    """Say whether there are enough tiles of this size to fill the device."""
    return ceil(positions, wide) * lanes * ceil(channels, tall) >= PROGRAMS


def _tile(channels: int, positions: int, lanes: int) -> tuple[int, int, int]:
    """Choose a tile (positions, channels) and its warps.

    A thread that holds 16 sums spends most of its instructions on products. With too few such
    tiles to fill the device, tiles are halved; and where that is still too few, more threads share
    a tile, since then waiting is what takes the time.
    """
    tall = min(power(channels), 64)
    wide = full = (2048 if tall < 32 else 8192) // tall

    while wide > 64 and not _fills(positions, channels, lanes, wide, tall):
        wide //= 2
    enough = _fills(positions, channels, lanes, wide, tall)
    return wide, tall, 2 if enough and wide == full // 2 else 4


def _shares(positions: int, programs: int, deep: int) -> tuple[int, int]:
    """Split a sum: return positions a share (a multiple of ``deep``) and the number of shares."""
    chunks = ceil(positions, deep)
    # These programs have two warps, the others have four; many lanes profit from shorter shares.
    wanted = min(ceil((2 if programs < 100 else 4) * PROGRAMS, programs), chunks, _MOST_SPLITS)
    share = ceil(chunks, wanted)
    return share * deep, ceil(chunks, share)


def _shapes(
    x: Tensor, outputs: int, kernel: Pair, stride: Pair, padding: Pair, size: Pair
) -> dict[str, int]:
    """Name the compile-time numbers that all three products take."""
    names = ("C", "H", "W", "O", "KH", "KW", "SH", "SW", "PH", "PW", "HO", "WO")
    values = (*x.shape[2:], outputs, *kernel, *stride, *padding, *size)
    return dict(zip(names, map(int, values), strict=True))
