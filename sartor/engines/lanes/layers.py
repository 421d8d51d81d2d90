"""Dense layers, their loss and poolings for lanes: one kernel where a library takes several.

In a step of a small network nearly all the time goes into starting small kernels one by one. Under
``vmap`` a dense layer is three of them (product, scaled bias, sum) and three more backwards, a
cross-entropy about thirty. Here each is one forwards and one or two backwards, for all lanes. First
derivatives are kernels; derivatives of those are plain operations, so any order is right.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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

_MOST_WEIGHTS = 1 << 20  # of a dense layer; a library multiplies larger ones faster
_MOST_CLASSES = 1024
_IGNORED = -100  # the label that torch's cross-entropy leaves out


@cache
def _kernels() -> Any:
    """Import the kernels at first use: without a GPU nobody has to wait for Triton."""
    from sartor.engines.lanes import layer_kernels

    return layer_kernels


# ---- dense layers -------------------------------------------------------------------------------


def takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether the kernels serve this layer."""
    given = (x, weight) if bias is None else (x, weight, bias)
    return usable(*given) and x.dim() >= 2 and weight.numel() <= _MOST_WEIGHTS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, rectify: bool = False) -> Tensor:
    """Return x·Wᵀ + b for one client, as ``F.linear``; with ``rectify`` what is below 0 becomes 0.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O), or None.
        rectify: whether ``F.relu`` follows.
    """
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Linear.apply(flat, weight, bias, rectify)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """A dense layer of one client."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, rectify: bool) -> Tensor:
        row = None if bias is None else bias[None]
        return lane_product(x[None], weight.mT[None], row, None, rectify)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, rectify = inputs
        ctx.save_for_backward(x, weight, *((output,) if rectify else ()))
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rectified = ctx.saved_tensors
        mask = rectified[0] if rectified else None

        def of_weight() -> tuple[Tensor | None, Tensor | None]:
            if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
                return None, None
            turned = None if mask is None else mask.mT
            found: tuple[Tensor, Tensor] = _ProductAndSums.apply(grad.mT, x, turned)
            return found

        def of_x() -> Tensor | None:
            return _Product.apply(grad, weight, mask) if ctx.needs_input_grad[0] else None

        (to_weight, to_bias), to_x = side_by_side(grad, of_weight, of_x)
        return to_x, to_weight, to_bias if ctx.biased else None, None


class _Product(torch.autograd.Function):
    """The product of two matrices; the left one counts only where ``mask`` is above 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
        return lane_product(a[None], b[None], None, None if mask is None else mask[None], False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(given for given in inputs if given is not None))

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, *mask = ctx.saved_tensors
        return _kept(along @ b.mT, mask), _kept(a, mask).mT @ along, None


class _ProductAndSums(torch.autograd.Function):
    """The product of two matrices, and the sums of the left one's rows; masked as ``_Product``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        lanes = (a[None], b[None], None if mask is None else mask[None])
        product, sums = lane_product_and_sums(*lanes)
        return product[0], sums[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*(given for given in inputs if given is not None))

    @staticmethod
    def backward(ctx: Any, along: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, *mask = ctx.saved_tensors
        return _kept(along @ b.mT + sums[:, None], mask), _kept(a, mask).mT @ along, None


def _kept(values: Tensor, mask: list[Tensor]) -> Tensor:
    """Return the values where the mask, if there is one, is above 0 (or no number), else 0."""
    return torch.where(mask[0] <= 0, 0.0, values) if mask else values


@torch.library.custom_op(
    "sartor::lane_product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? bias, Tensor? mask, bool rectify) -> Tensor",
)
def lane_product(
    a: Tensor, b: Tensor, bias: Tensor | None, mask: Tensor | None, rectify: bool
) -> Tensor:
    """Return a (L, M, K) · b (L, K, N), plus a row (L, N); a counts where ``mask`` is above 0."""
    return _launch_product(a, b, bias, mask, rectify, False)[0]


@torch.library.custom_op(
    "sartor::lane_product_and_sums",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? mask) -> (Tensor, Tensor)",
)
def lane_product_and_sums(a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a (L, M, K) · b (L, K, N), and the sums of a's rows (L, M); masked as the product."""
    return _launch_product(a, b, None, mask, False, True)


@lane_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, mask: Tensor | None, rectify: bool) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@lane_product_and_sums.register_fake
def _(a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2]), a.new_empty(a.shape[:2])


@lane_product.register_vmap
def _(info: Any, in_dims: Any, a: Any, b: Any, bias: Any, mask: Any, rectify: bool) -> Any:
    size = info.batch_size
    given = (merge(t, dim, size) for t, dim in zip((a, b, bias, mask), in_dims, strict=False))
    return part(lane_product(*given, rectify), size), 0


@lane_product_and_sums.register_vmap
def _(info: Any, in_dims: Any, a: Any, b: Any, mask: Any) -> Any:
    size = info.batch_size
    given = (merge(t, dim, size) for t, dim in zip((a, b, mask), in_dims, strict=True))
    product, sums = lane_product_and_sums(*given)
    return (part(product, size), part(sums, size)), (0, 0)


def _launch_product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    rectify: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    lanes, rows, inner = a.shape
    columns = b.shape[2]
    tall, wide, deep, warps = _tile(rows, columns, lanes, forwards=b.stride(1) == 1)
    bias = None if bias is None else dense(bias)
    out = a.new_empty(lanes, rows, columns)
    total = a.new_empty(lanes, rows) if sums else out
    over = a if mask is None else mask
    with torch.cuda.device_of(a):
        _kernels().product[(ceil(rows, tall) * ceil(columns, wide), lanes)](
            a,
            b,
            a if bias is None else bias,
            over,
            out,
            total,
            a.stride(0),
            b.stride(0),
            0 if bias is None else bias.stride(0),
            over.stride(0),
            rows,
            columns,
            inner,
            a.stride(1),
            a.stride(2),
            b.stride(1),
            b.stride(2),
            over.stride(1),
            over.stride(2),
            HAS_BIAS=bias is not None,
            MASKED=mask is not None,
            RECTIFY=rectify,
            SUMS=sums,
            BM=tall,
            BN=wide,
            BK=deep,
            PRECISION=PRECISION,
            num_warps=warps,
            num_stages=3,
        )
    return out, total


def _tile(rows: int, columns: int, lanes: int, forwards: bool) -> tuple[int, int, int, int]:
    """Choose rows, columns and depth of a tile, and its warps; by timings on an H200.

    Forwards the right matrix is a transposed one, which wants narrow tiles.
    """
    if ceil(rows, 32) * ceil(columns, 64) * lanes >= PROGRAMS:
        return (64, 32, 32, 2) if forwards else (32, 64, 32, 2)
    return (32, 16, 64, 2) if forwards else (16, 32, 32, 4)


# ---- cross-entropy ------------------------------------------------------------------------------


def takes_cross_entropy(scores: Tensor, y: Tensor) -> bool:
    """Say whether the kernel serves these scores (batch, classes) and labels (batch)."""
    fits = scores.dim() == 2 and y.dim() == 1 and y.dtype == torch.int64
    return fits and usable(scores) and scores.shape[1] <= _MOST_CLASSES


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return −log softmax at the labels: ``F.cross_entropy(scores, y, reduction="none")``."""
    found: Tensor = _CrossEntropy.apply(scores, y)
    return found


class _CrossEntropy(torch.autograd.Function):
    """The loss of each sample."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, y: Tensor) -> Tensor:
        return row_losses(scores, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _CrossEntropyGrad.apply(grad, *ctx.saved_tensors), None


class _CrossEntropyGrad(torch.autograd.Function):
    """The gradient of the losses: (softmax − one-hot) times that of each loss."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        return row_slopes(grad, scores, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, scores, y = ctx.saved_tensors
        p = torch.softmax(scores, -1)
        kept = (y != _IGNORED)[:, None]
        along = torch.where(kept, along, 0.0)
        hot = (y[:, None] == torch.arange(scores.shape[1], device=y.device)).to(p.dtype)
        to_scores = p * (along - (p * along).sum(-1, keepdim=True)) * grad[:, None]
        return ((p - hot) * along).sum(-1), to_scores, None


@torch.library.custom_op(
    "sartor::row_losses", mutates_args=(), schema="(Tensor s, Tensor y) -> Tensor"
)
def row_losses(s: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every row of s (..., classes)."""
    return _launch_losses(s, y, None)


@torch.library.custom_op(
    "sartor::row_slopes", mutates_args=(), schema="(Tensor g, Tensor s, Tensor y) -> Tensor"
)
def row_slopes(g: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the losses of rows, times g."""
    return _launch_losses(s, y, g)


@row_losses.register_fake
def _(s: Tensor, y: Tensor) -> Tensor:
    return s.new_empty(y.shape)


@row_slopes.register_fake
def _(g: Tensor, s: Tensor, y: Tensor) -> Tensor:
    return s.new_empty(s.shape)


def _front(info: Any, in_dims: Any, *tensors: Tensor) -> list[Tensor]:
    """Put the mapped axis of every tensor first; what is not mapped is repeated."""
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


@row_losses.register_vmap
def _(info: Any, in_dims: Any, s: Any, y: Any) -> Any:
    return row_losses(*_front(info, in_dims, s, y)), 0


@row_slopes.register_vmap
def _(info: Any, in_dims: Any, g: Any, s: Any, y: Any) -> Any:
    return row_slopes(*_front(info, in_dims, g, s, y)), 0


def _launch_losses(s: Tensor, y: Tensor, g: Tensor | None) -> Tensor:
    s, y = s.contiguous(), y.contiguous()
    g = None if g is None else g.contiguous()
    classes = s.shape[-1]
    out = s.new_empty(y.shape) if g is None else torch.empty_like(s)
    wide = power(classes)
    block = max(1, min(1024 // wide, 16))
    with torch.cuda.device_of(s):
        _kernels().cross_entropy[(ceil(y.numel(), block),)](
            s,
            y,
            s if g is None else g,
            out,
            y.numel(),
            C=classes,
            IGNORE=_IGNORED,
            GRAD=g is not None,
            BC=wide,
            BR=block,
            num_warps=1 if wide * block <= 256 else 4,
        )
    return out


# ---- pooling ------------------------------------------------------------------------------------


def takes_pool(x: Tensor, kernel: tuple[int, int]) -> bool:
    """Say whether the kernel serves windows that lie side by side on images (batch, C, H, W)."""
    fits = x.dim() == 4 and kernel[0] * kernel[1] <= 16
    return fits and x.shape[2] >= kernel[0] and x.shape[3] >= kernel[1] and usable(x)


def max_pool2d(x: Tensor, kernel: tuple[int, int], rectify: bool = False) -> Tensor:
    """Return the largest value of every window, as ``F.max_pool2d(x, kernel)``.

    With ``rectify`` what is below 0 becomes 0: ``F.relu`` before or after gives the same.
    """
    found: Tensor = _Pool.apply(x, kernel, rectify)
    return found


class _Pool(torch.autograd.Function):
    """The largest value of every window."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], rectify: bool) -> Tensor:
        return pooled(x, kernel, rectify)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.rectify = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx: Any, along: Tensor, *_: Any) -> Tensor:
        return _taken(along, ctx.saved_tensors[0], ctx.kernel, ctx.rectify)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        found = _PoolGrad.apply(grad, ctx.saved_tensors[0], ctx.kernel, ctx.rectify)
        return found, None, None


class _PoolGrad(torch.autograd.Function):
    """The gradient of a pooling, linear in the gradient of its output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, x: Tensor, kernel: tuple[int, int], rectify: bool) -> Tensor:
        return unpooled(grad, x, kernel, rectify)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, ctx.kernel, ctx.rectify = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx: Any, grad: Tensor | None, *_: Any) -> Tensor | None:
        if grad is None:
            return None
        found: Tensor = _PoolGrad.apply(grad, ctx.saved_tensors[0], ctx.kernel, ctx.rectify)
        return found

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None, None, None]:
        found = _taken(along, ctx.saved_tensors[0], ctx.kernel, ctx.rectify)
        return found, None, None, None


def _taken(along: Tensor, x: Tensor, kernel: tuple[int, int], rectify: bool) -> Tensor:
    """Return what stands where the largest value of every window of x is, if it counts."""
    largest, where = F.max_pool2d(x, kernel, return_indices=True)
    found = along.flatten(2).gather(2, where.flatten(2)).reshape(where.shape)
    return _kept(found, [largest] if rectify else [])


@torch.library.custom_op(
    "sartor::pooled",
    mutates_args=(),
    schema="(Tensor x, SymInt[] kernel, bool rectify=False) -> Tensor",
)
def pooled(x: Tensor, kernel: Any, rectify: bool = False) -> Tensor:
    """Pool planes (..., H, W)."""
    return _launch_pool(x, None, kernel, rectify)


@torch.library.custom_op(
    "sartor::unpooled",
    mutates_args=(),
    schema="(Tensor g, Tensor x, SymInt[] kernel, bool rectify=False) -> Tensor",
)
def unpooled(g: Tensor, x: Tensor, kernel: Any, rectify: bool = False) -> Tensor:
    """Return the gradient of planes x (..., H, W) from that of what they were pooled to."""
    return _launch_pool(x, g, kernel, rectify)


@pooled.register_fake
def _(x: Tensor, kernel: Any, rectify: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-2], x.shape[-2] // kernel[0], x.shape[-1] // kernel[1])


@unpooled.register_fake
def _(g: Tensor, x: Tensor, kernel: Any, rectify: bool = False) -> Tensor:
    return x.new_empty(x.shape)


@pooled.register_vmap
def _(info: Any, in_dims: Any, x: Any, *rest: Any) -> Any:
    return pooled(*_front(info, in_dims[:1], x), *rest), 0


@unpooled.register_vmap
def _(info: Any, in_dims: Any, g: Any, x: Any, *rest: Any) -> Any:
    return unpooled(*_front(info, in_dims[:2], g, x), *rest), 0


def _launch_pool(x: Tensor, g: Tensor | None, kernel: Any, rectify: bool) -> Tensor:
    if native.serves(x):
        if g is None:
            return native.pooled(x, kernel, rectify)
        return native.unpooled(g, x, kernel, rectify)
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
    with torch.cuda.device_of(x):
        _kernels().pool[(ceil(total, block),)](
            x,
            x if g is None else g,
            out,
            total,
            H=height,
            W=width,
            HO=rows,
            WO=columns,
            KH=kernel[0],
            KW=kernel[1],
            GRAD=g is not None,
            RECTIFY=rectify,
            WIDE=x.numel() > MOST_ELEMENTS - block * kernel[0] * kernel[1],
            BLOCK=block,
            num_warps=8,  # one window a thread: more would be exchanged between threads
        )
    return out


# ---- the mean over real samples -----------------------------------------------------------------


def takes_mean(values: Tensor, mask: Tensor) -> bool:
    """Say whether the kernel serves these values (batch) and their mask (batch)."""
    fits = values.dim() == 1 and mask.dim() == 1 and mask.dtype == torch.bool and mask.is_cuda
    return fits and usable(values) and values.numel() < MOST_ELEMENTS


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return Σ values·mask / max(1, Σ mask) of one client."""
    found: Tensor = _Mean.apply(values, mask)
    return found


class _Mean(torch.autograd.Function):
    """The mean of the values under a mask."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, mask: Tensor) -> Tensor:
        return lane_mean(values[None], mask[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, mask = inputs
        ctx.save_for_backward(mask)
        ctx.dtype = values.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _MeanGrad.apply(grad, ctx.saved_tensors[0]), None


class _MeanGrad(torch.autograd.Function):
    """The gradient of a mean, linear in that of the mean."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, mask: Tensor) -> Tensor:
        return lane_mean_grad(grad[None], mask[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None]:
        weight = ctx.saved_tensors[0].to(along.dtype)
        return (along * weight).sum() / weight.sum().clamp(min=1.0), None


@torch.library.custom_op(
    "sartor::lane_mean", mutates_args=(), schema="(Tensor v, Tensor m) -> Tensor"
)
def lane_mean(v: Tensor, m: Tensor) -> Tensor:
    """Average v (L, n) under the mask m (L, n)."""
    return _launch_mean(v, m, None)


@torch.library.custom_op(
    "sartor::lane_mean_grad", mutates_args=(), schema="(Tensor g, Tensor m) -> Tensor"
)
def lane_mean_grad(g: Tensor, m: Tensor) -> Tensor:
    """Spread g (L) over the samples under the mask m (L, n)."""
    return _launch_mean(g, m, g)


@lane_mean.register_fake
def _(v: Tensor, m: Tensor) -> Tensor:
    return v.new_empty(v.shape[:1])


@lane_mean_grad.register_fake
def _(g: Tensor, m: Tensor) -> Tensor:
    return g.new_empty(m.shape)


@lane_mean.register_vmap
def _(info: Any, in_dims: Any, v: Any, m: Any) -> Any:
    size = info.batch_size
    given = (merge(t, dim, size) for t, dim in zip((v, m), in_dims, strict=True))
    return part(lane_mean(*given), size), 0


@lane_mean_grad.register_vmap
def _(info: Any, in_dims: Any, g: Any, m: Any) -> Any:
    size = info.batch_size
    given = (merge(t, dim, size) for t, dim in zip((g, m), in_dims, strict=True))
    return part(lane_mean_grad(*given), size), 0


def _launch_mean(v: Tensor, m: Tensor, g: Tensor | None) -> Tensor:
    lanes, size = m.shape
    v, m = (v if g is not None else dense(v)), dense(m).view(torch.uint8)
    out = v.new_empty(lanes) if g is None else v.new_empty(lanes, size)
    with torch.cuda.device_of(v):
        _kernels().mean[(lanes,)](
            v,
            m,
            v if g is None else g.contiguous(),
            out,
            v.stride(0),
            m.stride(0),
            size,
            GRAD=g is not None,
            BLOCK=min(power(size, 32), 1024),
            num_warps=1 if size <= 128 else 4,
        )
    return out
