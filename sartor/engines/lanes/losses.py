"""Cross-entropy, and the mean over the real samples of a batch, for lanes.

Under ``vmap`` a cross-entropy is about thirty small kernels; here it is one forwards and one
backwards. Derivatives of first derivatives are plain operations, so any order is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sartor.engines.cpu import native
from sartor.engines.lanes.rules import Derived, alone, operator
from sartor.engines.lanes.shapes import MOST_ELEMENTS, ceil, dense, launch, power, usable

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


class _CrossEntropy(Derived):
    """The loss of each sample."""

    @staticmethod
    def forward(scores: Tensor, y: Tensor) -> Tensor:
        return row_losses(scores, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _CrossEntropyGrad.apply(grad, *ctx.saved_tensors), None


class _CrossEntropyGrad(Derived):
    """The gradient of the losses: (softmax − one-hot) times that of each loss."""

    @staticmethod
    def forward(grad: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        return row_slopes(grad, scores, y)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, scores, y = ctx.saved_tensors
        p = torch.softmax(scores, -1)
        kept = (y != _IGNORED)[:, None]
        along = torch.where(kept, along, 0.0)
        hot = (y[:, None] == torch.arange(scores.shape[1], device=y.device)).to(p.dtype)
        to_scores = p * (along - (p * along).sum(-1, keepdim=True)) * grad[:, None]
        return ((p - hot) * along).sum(-1), to_scores, None


@operator(
    "row_losses(Tensor s, Tensor y) -> Tensor", lambda s, y: s.new_empty(y.shape), lanes=False
)
def row_losses(s: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every row of s (..., classes)."""
    return _launch_losses(s, y, None)


@operator(
    "row_slopes(Tensor g, Tensor s, Tensor y) -> Tensor",
    lambda g, s, y: s.new_empty(s.shape),
    lanes=False,
)
def row_slopes(g: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the losses of rows, times g."""
    return _launch_losses(s, y, g)


def _launch_losses(s: Tensor, y: Tensor, g: Tensor | None) -> Tensor:
    if native.serves(s):
        return native.entropy(s, y, g, _IGNORED)
    s, y = s.contiguous(), y.contiguous()
    g = None if g is None else g.contiguous()
    classes = s.shape[-1]
    out = s.new_empty(y.shape) if g is None else torch.empty_like(s)
    wide = power(classes)
    block = max(1, min(1024 // wide, 16))
    launch(
        "layer_kernels",
        "cross_entropy",
        (ceil(y.numel(), block),),
        *(s, y, s if g is None else g, out, y.numel()),
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


class _Mean(Derived):
    """The mean of the values under a mask."""

    @staticmethod
    def forward(values: Tensor, mask: Tensor) -> Any:
        return alone(lane_mean, values, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _MeanGrad.apply(grad, ctx.saved_tensors[0]), None


class _MeanGrad(Derived):
    """The gradient of a mean, linear in that of the mean."""

    @staticmethod
    def forward(grad: Tensor, mask: Tensor) -> Any:
        return alone(lane_mean_grad, grad, mask)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None]:
        weight = ctx.saved_tensors[1].to(along.dtype)
        return (along * weight).sum() / weight.sum().clamp(min=1.0), None


@operator("lane_mean(Tensor v, Tensor m) -> Tensor", lambda v, m: v.new_empty(v.shape[:1]))
def lane_mean(v: Tensor, m: Tensor) -> Tensor:
    """Average v (L, n) under the mask m (L, n)."""
    return _launch_mean(v, m, None)


@operator("lane_mean_grad(Tensor g, Tensor m) -> Tensor", lambda g, m: g.new_empty(m.shape))
def lane_mean_grad(g: Tensor, m: Tensor) -> Tensor:
    """Spread g (L) over the samples under the mask m (L, n)."""
    return _launch_mean(g, m, g)


def _launch_mean(v: Tensor, m: Tensor, g: Tensor | None) -> Tensor:
    lanes, size = m.shape
    v, m = (v if g is not None else dense(v)), dense(m).view(torch.uint8)
    out = v.new_empty(lanes) if g is None else v.new_empty(lanes, size)
    launch(
        "layer_kernels",
        "mean",
        (lanes,),
        *(v, m, v if g is None else g.contiguous(), out, v.stride(0), m.stride(0), size),
        GRAD=g is not None,
        BLOCK=min(power(size, 32), 1024),
        num_warps=1 if size <= 128 else 4,
    )
    return out
