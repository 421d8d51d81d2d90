"""Max pooling over 2×2 blocks with whole-tensor operations.

The library's own is a scalar loop on the CPU.

It takes a third of a LeNet-5 step there. Of equal numbers the first in reading order gets the
gradient, as in ``max_pool2d``, so the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_POOLING = (F.max_pool2d, torch.max_pool2d)
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


class FastPooling(TorchFunctionMode):
    """While active, send 2×2 max pooling of even images to the form above.

    For one lane at a time, without vmap.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch max pooling and leave everything else as it is."""
        kwargs = kwargs or {}
        if func in _POOLING and _fits(*args, **kwargs):
            return _HalvingMax.apply(args[0] if args else kwargs["input"])[0]
        return func(*args, **kwargs)


def _fits(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    two = (2, (2, 2), [2, 2])
    plain = padding in (0, (0, 0), [0, 0]) and dilation in (1, (1, 1), [1, 1])
    rows, columns = input.shape[-2:]
    even = rows % 2 == 0 and columns % 2 == 0 and rows * columns >= _LEAST
    return bool(
        kernel_size in two and (stride in two or not stride) and plain and even and not ceil_mode
    )
