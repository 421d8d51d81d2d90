"""Operations for lanes: what a network of the user calls, in forms that serve all lanes at once.

``LaneOperations`` catches calls while a step is recorded for a GPU, ``CoreLanes`` while the cores
of a CPU work on many lanes, ``CoreOperations`` while one core works on one lane, and
``DrawOperations`` while a step of one lane draws; the network is not changed. What they do not know
goes its plain way.

| call | on a GPU, all lanes | on a CPU |
|---|---|---|
| ``conv2d`` | ``triton_conv``: Triton kernels | ``native``, one lane |
| ``max_pool2d`` | ``pooling`` | ``native``, one lane |
| ``linear`` | ``dense`` | ``dense`` by ``native``, both ways, many lanes with few outputs |
| ``cross_entropy`` | ``losses`` | ``losses`` by ``native``, many lanes with few classes |
| ``sartor.core.task.masked_mean`` | ``losses`` | |
| ``sartor.core.loops.lstm_loop`` | ``recurrence``: one launch | ``recurrence`` by ``native`` |
| ``sartor.core.tree.addcmul`` | ``leaves``: one launch | ``leaves`` by ``native``, many lanes |
| ``sartor.core.tree.add_difference``, ``pulled_step`` | ``leaves``: one launch | |
| ``sartor.core.rng.normal`` | ``draws``: one launch | ``native`` |
| ``sartor.core.rng.kept`` | | ``draws`` by ``native`` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor.core import rng, tree
from sartor.core.loops import lstm_loop
from sartor.core.task import masked_mean
from sartor.core.torch_private import differentiating
from sartor.engines.cpu import native
from sartor.engines.cuda.triton_conv import available, convolve
from sartor.engines.lanes import dense, draws, leaves, losses, pooling, recurrence

_MOST_PATCH = 512  # channels × kernel of a convolution: libraries are faster beyond


class _Operations(TorchFunctionMode):
    """While active, send the operations that profit from it to other forms."""

    forms: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """For a function of torch or of ours: what serves it, or returns None to leave it alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch what has another form, and leave everything else as it is."""
        kwargs = kwargs or {}
        serve = self.forms.get(func)
        if serve is not None:
            found = serve(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    given = _convolution(*args, **kwargs)
    return convolve(*given) if given is not None and available(*given[:2]) else None


def _conv2d_alone(*args: Any, **kwargs: Any) -> Tensor | None:
    given = _convolution(*args, **kwargs)
    if given is None or not native.takes_conv(*given):
        return None
    x, weight, *rest = given
    if weight.requires_grad and not x.requires_grad:
        x = native.laid(x)  # once: data are read again for the gradient of the weights
    return convolve(x, weight, *rest)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """Return the arguments of ``convolve``; None for convolutions that it does not know."""
    other = groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4
    if other or weight.shape[1:].numel() > _MOST_PATCH:
        return None
    return input, weight, bias, _pair(stride), _pair(padding)  # type: ignore[arg-type]


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a number for both axes, or the two that were given."""
    if not isinstance(value, int) and len(value) == 1:
        value = value[0]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _linear_on_cores(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = native.takes_linear(input, weight, bias)
    return dense.linear(input, weight, bias) if fits else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = dense.takes_linear(input, weight, bias)
    return dense.linear(input, weight, bias) if fits else None


def _cross_entropy(
    input: Tensor, target: Tensor, reduction: str = "mean", **others: Any
) -> Tensor | None:
    plain = others in ({}, _ENTROPY_DEFAULTS) and reduction == "none"
    takes = native.takes_cross_entropy if input.is_cpu else losses.takes_cross_entropy
    return losses.cross_entropy(input, target) if plain and takes(input, target) else None


_ENTROPY_DEFAULTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "label_smoothing": 0.0,
}


def _max_pool2d(*args: Any, **kwargs: Any) -> Tensor | None:
    x, kernel = _windows(*args, **kwargs)
    return pooling.max_pool2d(x, kernel) if kernel and pooling.takes_pool(x, kernel) else None


def _windows(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, tuple[int, int] | None]:
    """Return the images and the size of windows without overlap; None for other windows."""
    kernel = _pair(kernel_size)
    step = kernel if stride is None or stride == [] else _pair(stride)
    plain = (
        step == kernel
        and _pair(padding) == (0, 0)
        and _pair(dilation) == (1, 1)
        and not (ceil_mode or return_indices)
    )
    return input, kernel if plain else None


def _mean(values: Tensor, mask: Tensor) -> Tensor | None:
    return losses.masked_mean(values, mask) if losses.takes_mean(values, mask) else None


def _lstm_loop(
    given: Tensor, weight: Tensor, is_token: Tensor, backward: bool = False, start: Any = None
) -> tuple[Tensor, Tensor] | None:
    fits = recurrence.takes(given, weight, is_token, start)
    return recurrence.lstm_loop(given, weight, is_token, backward, start) if fits else None


def _update(kernel: str, factors: int) -> Callable[..., list[Tensor] | None]:
    def serve(*given: Any) -> list[Tensor] | None:
        lists, scales = list(given[:-factors]), list(given[-factors:])
        if not leaves.takes_update(lists, scales):
            return None
        return leaves.update(kernel, lists, scales)

    return serve


def _addcmul_on_cores(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor] | None:
    fits = native.takes_update(a, b, factor) and not differentiating()
    return leaves.update("addcmul", [a, b], [factor]) if fits else None


def _normal(
    key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor | None:
    return draws.normal(key, shape, dtype) if draws.takes(key, shape, dtype) else None


def _kept(key: Tensor, number: int, shape: tuple[int, ...], p: float) -> Tensor | None:
    fits = key.is_cpu and draws.takes(key, shape, torch.float32)
    return draws.kept(key, number, shape, p) if fits else None


def _max_pool2d_alone(*args: Any, **kwargs: Any) -> Tensor | None:
    x, kernel = _windows(*args, **kwargs)
    return pooling.max_pool2d(x, kernel) if kernel and native.takes_pool(x, kernel) else None


class LaneOperations(_Operations):
    """All lanes at once on a GPU."""

    forms: ClassVar = {
        torch.conv2d: _conv2d,
        F.linear: _linear,
        F.cross_entropy: _cross_entropy,
        F.max_pool2d: _max_pool2d,
        torch.max_pool2d: _max_pool2d,
        masked_mean: _mean,
        lstm_loop: _lstm_loop,
        tree.addcmul_leaves: _update("addcmul", 1),
        tree.add_difference_leaves: _update("add_difference", 1),
        tree.pulled_step_leaves: _update("pulled_step", 2),
        rng.normal: _normal,
    }


class CoreOperations(_Operations):
    """One lane on one core of a CPU, without vmap."""

    forms: ClassVar = {
        torch.conv2d: _conv2d_alone,
        F.max_pool2d: _max_pool2d_alone,
        torch.max_pool2d: _max_pool2d_alone,
        lstm_loop: _lstm_loop,
    }


class DrawOperations(_Operations):
    """Steps on a CPU that draw, with vmap or without."""

    forms: ClassVar = {rng.normal: _normal, rng.kept: _kept}


class CoreLanes(_Operations):
    """Many lanes on the cores of a CPU."""

    forms: ClassVar = {
        **DrawOperations.forms,
        F.linear: _linear_on_cores,
        F.cross_entropy: _cross_entropy,
        lstm_loop: _lstm_loop,
        tree.addcmul_leaves: _addcmul_on_cores,
    }
