"""Cross-entropy, and the mean over the real samples of a batch, for lanes.

Under ``vmap`` a cross-entropy is about thirty small kernels; here it is one forwards and one
backwards. Derivatives of first derivatives are plain operations, so any order is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sartor.engines.cpu import native
from sartor.engines.lanes.shapes import (
    MOST_ELEMENTS,
    ceil,
    dense,
    front,
    kernels,
    merge,
    part,
    power,
    usable,
)

_MOST_CLASSES = 1024
_IGNORED = -100  # the label that torch's cross-entropy leaves out


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


@row_losses.register_vmap
def _(info: Any, in_dims: Any, s: Any, y: Any) -> Any:
    return row_losses(*front(info, in_dims, s, y)), 0


@row_slopes.register_vmap
def _(info: Any, in_dims: Any, g: Any, s: Any, y: Any) -> Any:
    return row_slopes(*front(info, in_dims, g, s, y)), 0


def on_core(s: Tensor, y: Tensor) -> Tensor:
    """Do what ``row_losses`` does on a CPU."""
    return native.entropy(s, y, None, _IGNORED)


def slopes_on_core(g: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Do what ``row_slopes`` does on a CPU."""
    return native.entropy(s, y, g, _IGNORED)


def _launch_losses(s: Tensor, y: Tensor, g: Tensor | None) -> Tensor:
    if native.serves(s):
        return native.entropy(s, y, g, _IGNORED)
    s, y = s.contiguous(), y.contiguous()
    g = None if g is None else g.contiguous()
    classes = s.shape[-1]
    out = s.new_empty(y.shape) if g is None else torch.empty_like(s)
    wide = power(classes)
    block = max(1, min(1024 // wide, 16))
    with torch.cuda.device_of(s):
        kernels("layer_kernels").cross_entropy[(ceil(y.numel(), block),)](
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
        kernels("layer_kernels").mean[(lanes,)](
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
