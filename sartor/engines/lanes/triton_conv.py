"""Lane convolutions with Triton: one kernel per pass for all lanes, and no patches in memory.

Three operators take tensors with one leading axis of lanes: the convolution, the gradient of its
input, and the gradients of kernel and bias. Under ``vmap`` a mapped axis joins that axis, so that
runs and clients become lanes of one launch. Each of the three is differentiated through the other
two, to any order. Sums have a fixed order: the same call gives the same bits. Block sizes follow
from the shapes by rule, since a search would break the capture of a graph. On a CPU the same three
operators are those of ``native``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sartor.engines.lanes import native
from sartor.engines.lanes.shapes import (
    MOST_ELEMENTS,
    PRECISION,
    PROGRAMS,
    ceil,
    dense,
    merge,
    part,
    power,
    side_by_side,
    usable,
)

_MOST_GROUP = 8  # channels of a thread, in the kernels for few channels
_FEW_PROGRAMS = 200  # with fewer, tensor cores give the gradient of the input sooner
_MOST_SPLITS = 64  # shares of the sum over positions; more would make the partial sums large


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


@cache
def _kernels() -> Any:
    """Import the kernels at first use: without a GPU nobody has to wait for Triton."""
    from sartor.engines.lanes import conv_kernels

    return conv_kernels


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
    return _launch_forward(x, w, b, stride, padding)


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
    return _launch_input_grad(g, w, size, stride, padding)


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
    return _launch_weight_grad(x, g, kernel, stride, padding)


@lane_conv.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return x.new_empty(
        *x.shape[:2], w.shape[1], *_outputs(x.shape[3:], w.shape[3:], stride, padding)
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


def _outputs(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    rows, columns = (
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True)
    )
    return rows, columns


# ---- launches -----------------------------------------------------------------------------------


def _launch_forward(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    if native.serves(x):
        return native.convolved(x, w, b, stride, padding)
    lanes, batch = x.shape[:2]
    rows, columns = _outputs(x.shape[3:], w.shape[3:], stride, padding)
    x, w = dense(x), dense(w)
    b = None if b is None else dense(b)
    out = x.new_empty(lanes, batch, w.shape[1], rows, columns)
    positions = batch * rows * columns
    shapes = _shapes(x, w.shape[1], w.shape[3:], stride, padding, (rows, columns))
    group = _group(w.shape[1], _MOST_GROUP)
    if _few(w[0, 0].numel(), w.shape[1], group, ceil(positions, 512) * lanes):
        block = 512 if group <= 6 else 256
        with torch.cuda.device_of(x):
            _kernels().forward_few[(ceil(positions, block), lanes, w.shape[1] // group)](
                x,
                w,
                w if b is None else b,
                out,
                x.stride(0),
                w.stride(0),
                0 if b is None else b.stride(0),
                positions,
                **shapes,
                HAS_BIAS=b is not None,
                GROUP=group,
                BM=block,
                num_warps=2,
            )
        return out
    wide, tall, warps = _tile(w.shape[1], positions, lanes)
    grid = (ceil(positions, wide), lanes, ceil(w.shape[1], tall))
    with torch.cuda.device_of(x):
        _kernels().forward[grid](
            x,
            w,
            w if b is None else b,
            out,
            x.stride(0),
            w.stride(0),
            0 if b is None else b.stride(0),
            positions,
            shapes["C"] * shapes["KH"] * shapes["KW"],
            **shapes,
            HAS_BIAS=b is not None,
            BN=tall,
            BM=wide,
            BK=16,
            PRECISION=PRECISION,
            num_warps=warps,
            num_stages=3,
        )
    return out


def _launch_input_grad(
    g: Tensor, w: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    if native.serves(g):
        return native.input_gradient(g, w, size, stride, padding)
    lanes, batch = g.shape[:2]
    g, w = dense(g), dense(w)
    out = g.new_empty(lanes, batch, w.shape[2], *size)
    positions = batch * size[0] * size[1]
    shapes = _shapes(out, w.shape[1], w.shape[3:], stride, padding, g.shape[3:])
    group = _group(w.shape[2], _MOST_GROUP)
    programs = ceil(positions, 256) * lanes
    if w.shape[2] <= _MOST_GROUP and w.shape[1] <= 32 and programs >= _FEW_PROGRAMS:
        with torch.cuda.device_of(g):
            _kernels().input_grad_few[(ceil(positions, 256), lanes, w.shape[2] // group)](
                g,
                w,
                out,
                g.stride(0),
                w.stride(0),
                positions,
                **shapes,
                GROUP=group,
                BM=256,
                UNROLL=_group(w.shape[1], 16),
                num_warps=2,
            )
        return out
    wide, tall, warps = _tile(w.shape[2], positions, lanes)
    grid = (ceil(positions, wide), lanes, ceil(w.shape[2], tall))
    with torch.cuda.device_of(g):
        _kernels().input_grad[grid](
            g,
            w,
            out,
            g.stride(0),
            w.stride(0),
            positions,
            **shapes,
            BN=tall,
            BM=wide,
            BK=16,
            PRECISION=PRECISION,
            num_warps=warps,
            num_stages=3,
        )
    return out


def _launch_weight_grad(
    x: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
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
    share, splits = _shares(places, lanes * tiles, deep)
    partial = x.new_empty(lanes, splits, outputs, patch + 1, dtype=torch.float32)
    to_weight = x.new_empty(lanes, outputs, channels, *kernel)
    to_bias = x.new_empty(lanes, outputs)
    common = {
        "BN": wide,
        "BM": deep,
        "BK": tall,
        "PRECISION": PRECISION,
        "num_warps": 2 if tall * wide <= 1024 else 4,
        "num_stages": 3,
    }
    given = (x, g, partial, x.stride(0), g.stride(0), positions)
    with torch.cuda.device_of(x):
        if by_rows is not None:
            _kernels().weight_grad_rows[(splits, lanes, tiles + 1)](
                *given,
                places,
                share,
                splits,
                **shapes,
                BO=power(outputs),
                **common,
            )
        else:
            _kernels().weight_grad[(splits, lanes, tiles + ceil(outputs, wide))](
                *given,
                share,
                splits,
                **shapes,
                **common,
            )
        block = 64
        _kernels().sum_splits[(ceil(outputs * (patch + 1), block), lanes)](
            partial,
            to_weight,
            to_bias,
            splits,
            K=patch,
            O=outputs,
            SPLITS=power(splits, 1),
            BLOCK=block,
            num_warps=4,
        )
    return to_weight, to_bias


def _rows_tile(shapes: dict[str, int], work: int) -> tuple[int, int] | None:
    """Return the tile (rows of the input, columns of the gradient) of ``weight_grad_rows``.

    Args:
        shapes: the numbers of the convolution.
        work: products a position with a tile of patches.

    Returns:
        None where patches need fewer products: rows pay off for a large kernel on few channels.
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


def _tile(channels: int, positions: int, lanes: int) -> tuple[int, int, int]:
    """Choose a tile (positions, channels) and its warps.

    A thread that holds 16 sums spends most of its instructions on products. With too few such
    tiles to fill the device, tiles are halved; and where that is still too few, more threads share
    a tile, since then waiting is what takes the time.
    """
    tall = min(power(channels), 64)
    wide = full = (2048 if tall < 32 else 8192) // tall

    def programs() -> int:
        return ceil(positions, wide) * lanes * ceil(channels, tall)

    while wide > 64 and programs() < PROGRAMS:
        wide //= 2
    enough = programs() >= PROGRAMS
    return wide, tall, 2 if enough and wide == full // 2 else 4


def _shares(positions: int, programs: int, deep: int) -> tuple[int, int]:
    """Split a sum over positions.

    Return positions a share (a multiple of ``deep``) and the number of shares.
    """
    chunks = ceil(positions, deep)
    # These programs have two warps, the others have four; many lanes profit from shorter shares.
    wanted = min(ceil((2 if programs < 100 else 4) * PROGRAMS, programs), chunks, _MOST_SPLITS)
    share = ceil(chunks, wanted)
    return share * deep, ceil(chunks, share)


def _shapes(
    x: Tensor,
    outputs: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    size: Sequence[int],
) -> dict[str, int]:
    """Name the compile-time numbers that all three products take."""
    names = ("C", "H", "W", "O", "KH", "KW", "SH", "SW", "PH", "PW", "HO", "WO")
    values = (*x.shape[2:], outputs, *kernel, *stride, *padding, *size)
    return dict(zip(names, map(int, values), strict=True))
