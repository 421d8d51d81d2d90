"""Operations for lanes: what a network of the user calls, in forms that serve all lanes at once.

``LaneOperations`` catches calls while a step is recorded; the network is not changed. What it does
not know goes its plain way.

| call | instead |
|---|---|
| ``conv2d`` | ``convolution``: Triton kernels, or patches and one batched product |
| ``linear``, ``cross_entropy``, ``max_pool2d``, ``sartor.task.masked_mean`` | ``layers`` |
| ``sartor.tree.addcmul`` | ``leaves``: all leaves in one launch |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor import tree
from sartor.engines.lanes import convolution, layers, leaves
from sartor.task import masked_mean


class LaneOperations(TorchFunctionMode):
    """While active, send the operations that profit from it to their lane forms."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch what has a lane form, and leave everything else as it is."""
        kwargs = kwargs or {}
        serve = _FORMS.get(func)
        if serve is not None:
            found = serve(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    fixed = convolution.arguments(*args, **kwargs)
    return None if fixed is None else convolution.lane_conv2d(*fixed)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not layers.takes_linear(input, weight, bias):
        return None
    return layers.linear(input, weight, bias)


def _cross_entropy(
    input: Tensor, target: Tensor, reduction: str = "mean", **others: Any
) -> Tensor | None:
    plain = others in ({}, _ENTROPY_DEFAULTS)
    if not plain or reduction != "none" or not layers.takes_cross_entropy(input, target):
        return None
    return layers.cross_entropy(input, target)


_ENTROPY_DEFAULTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "label_smoothing": 0.0,
}


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    kernel = convolution.pair(kernel_size)
    step = kernel if stride is None or stride == [] else convolution.pair(stride)
    plain = (
        step == kernel
        and convolution.pair(padding) == (0, 0)
        and convolution.pair(dilation) == (1, 1)
        and not (ceil_mode or return_indices)
    )
    return layers.max_pool2d(input, kernel) if plain and layers.takes_pool(input, kernel) else None


def _mean(values: Tensor, mask: Tensor) -> Tensor | None:
    return layers.masked_mean(values, mask) if layers.takes_mean(values, mask) else None


def _addcmul(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor] | None:
    return leaves.addcmul(a, b, factor) if leaves.takes_addcmul(a, b, factor) else None


_FORMS: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    masked_mean: _mean,
    tree.addcmul_leaves: _addcmul,
}
