"""Max pooling over 2×2 blocks with whole-tensor operations.

The library's own is a scalar loop on the CPU: a third of a LeNet-5 step. This is the form for CPUs
where ``native`` cannot be compiled, one lane at a time. Of equal numbers the first in reading order
gets the gradient, as in ``max_pool2d``, so the numbers are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LEAST = 256  # pixels: smaller images are pooled faster by the library


class _HalvingMax(torch.autograd.Function):
    """The maximum of every 2×2 block: over rows, then over columns, without branches."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of the blocks, and those of the pairs of rows."""
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2]), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the gradient compares."""
        ctx.save_for_backward(inputs[0], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> Tensor:
        """Give the gradient to the winner of each block.

        The sign of (maximum − first) is 0 or 1.
        """
        x, out, rows = ctx.saved_tensors
        low = (rows - x[..., ::2, :]).sign_()
        right = (out - rows[..., ::2]).sign_()
        # Of equal columns the left one wins, unless its winner stands below and that of the right
        # one above.
        equal = 1 - (rows[..., 1::2] - rows[..., ::2]).abs_().sign_()
        equal.mul_(low[..., ::2]).sub_(low[..., 1::2]).clamp_(min=0)
        right += equal
        wide, full = torch.empty_like(rows), torch.empty_like(x)
        torch.mul(grad, right, out=wide[..., 1::2])
        torch.sub(grad, wide[..., 1::2], out=wide[..., ::2])
        torch.mul(wide, low, out=full[..., 1::2, :])
        torch.sub(wide, full[..., 1::2, :], out=full[..., ::2, :])
        return full


def takes(x: Tensor) -> bool:
    """Say whether images (..., H, W) can be halved, and are large enough for it to pay."""
    rows, columns = x.shape[-2:]
    return rows % 2 == 0 and columns % 2 == 0 and rows * columns >= _LEAST


def halved(x: Tensor) -> Tensor:
    """Return the largest of every 2×2 block, as ``max_pool2d(x, 2)``."""
    out: Tensor = _HalvingMax.apply(x)[0]
    return out
