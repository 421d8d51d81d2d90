"""The loop of an LSTM layer for lanes: one kernel for all its steps, and one backwards.

Step by step such a loop is some fifteen operations, and twice as many backwards; most of them take
longer to begin than to compute. Here the state of some texts stays where the arithmetic is, from
the first step to the last. Derivatives of the first derivative are plain operations, so any order
is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from sartor.engines.lanes import native
from sartor.engines.lanes.dense import product
from sartor.engines.lanes.shapes import (
    MOST_ELEMENTS,
    PRECISION,
    ceil,
    dense,
    kernels,
    merge,
    part,
    power,
    unfold,
    usable,
)
from sartor.loops import lstm_loop as plain

_MOST_HIDDEN = 128  # of a state that a program can hold
_ROWS = 16  # texts of a program


def takes(given: Tensor, weight: Tensor, is_token: Tensor) -> bool:
    """Say whether the kernels serve the loop of one client; see ``sartor.loops``."""
    if not (given.dim() == 3 and given.numel() and is_token.dtype == torch.bool):
        return False
    hidden = weight.shape[1]
    fits = weight.shape[0] == given.shape[2] == 4 * hidden and is_token.shape == given.shape[:2]
    if given.is_cuda:
        fits = fits and hidden <= _MOST_HIDDEN and usable(given, weight)
        return fits and _proven(given, hidden)
    return fits and native.takes_recurrence(given, weight)


def lstm_loop(
    given: Tensor, weight: Tensor, is_token: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``sartor.loops`` does, from a state of zeros."""
    outputs, last, *_ = _Recurrence.apply(given, weight, is_token, backward)
    return outputs, last


class _Recurrence(torch.autograd.Function):
    """Outputs and last memory of one client; gates and memories, which nobody differentiates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        given: Tensor, weight: Tensor, is_token: Tensor, backward: bool
    ) -> tuple[Tensor, ...]:
        found = lane_recurrence(given[None], weight[None], is_token[None], backward)
        outputs, gates, cells = (part[0] for part in found)
        return outputs, cells[:, 0 if backward else -1].clone(), gates, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given, weight, is_token, ctx.turned = inputs
        outputs, _, gates, cells = output
        ctx.save_for_backward(given, weight, is_token, gates, cells, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, last: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, outputs = ctx.saved_tensors
        to_given = _RecurrenceGrad.apply(grad, last, *saved, ctx.turned)
        if not ctx.needs_input_grad[1]:
            return to_given, None, None, None
        none = torch.zeros_like(outputs[:, :1])
        before = (outputs[:, 1:], none) if ctx.turned else (none, outputs[:, :-1])
        states = torch.cat(before, dim=1).flatten(0, 1)
        return to_given, product(to_given.flatten(0, 1).mT, states), None, None


class _RecurrenceGrad(torch.autograd.Function):
    """The gradient of what is given to the gates, from those of the outputs and the last memory.

    Gates and memories follow from ``given`` and ``weight``, through which they are differentiated
    again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        last: Tensor,
        given: Tensor,
        weight: Tensor,
        is_token: Tensor,
        gates: Tensor,
        cells: Tensor,
        backward: bool,
    ) -> Tensor:
        lanes = (part[None] for part in (grad, last, weight, is_token, gates, cells))
        return lane_recurrence_grad(*lanes, backward)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *given, is_token, _gates, _cells, ctx.turned = inputs
        ctx.save_for_backward(*given, is_token)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        *given, is_token = ctx.saved_tensors

        def gradient(grad: Tensor, last: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            pull: Any = torch.func.vjp(lambda x: plain(x, weight, is_token, ctx.turned), x)[1]
            found: Tensor = pull((grad, last))[0]
            return found

        pull: Any = torch.func.vjp(gradient, *given)[1]
        return (*pull(along), None, None, None, None)


@torch.library.custom_op(
    "sartor::lane_recurrence",
    mutates_args=(),
    schema=(
        "(Tensor given, Tensor weight, Tensor is_token, bool backward) -> (Tensor, Tensor, Tensor)"
    ),
)
def lane_recurrence(
    given: Tensor, weight: Tensor, is_token: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loops of lanes.

    Args:
        given: (L, B, T, 4H).
        weight: (L, 4H, H).
        is_token: (L, B, T).
        backward: whether to begin with the last step.

    Returns:
        Outputs (L, B, T, H), gates (L, B, T, 4H) after their functions, memories (L, B, T, H).
        Where no token is, gates are anything.
    """
    if native.serves(given):
        return native.recurrence(given, weight, is_token, backward)
    given, weight, is_token = dense(given), dense(weight), dense(is_token)
    lanes, batch, steps, _ = given.shape
    hidden = weight.shape[2]
    outputs, cells = (given.new_empty(lanes, batch, steps, hidden) for _ in range(2))
    gates = torch.empty_like(given, memory_format=torch.contiguous_format)
    _launch("recurrence", lanes, batch, steps, hidden, backward)(
        given,
        weight,
        is_token.view(torch.uint8),
        outputs,
        gates,
        cells,
        given.stride(0),
        weight.stride(0),
        is_token.stride(0),
    )
    return outputs, gates, cells


@torch.library.custom_op(
    "sartor::lane_recurrence_grad",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor last, Tensor weight, Tensor is_token, Tensor gates, Tensor cells,"
        " bool backward) -> Tensor"
    ),
)
def lane_recurrence_grad(
    grad: Tensor,
    last: Tensor,
    weight: Tensor,
    is_token: Tensor,
    gates: Tensor,
    cells: Tensor,
    backward: bool,
) -> Tensor:
    """Return the gradient of ``given`` (L, B, T, 4H).

    Args:
        grad: of the outputs (L, B, T, H).
        last: of the last memory (L, B, H).
        weight: as it was given.
        is_token: as it was given.
        gates: what ``lane_recurrence`` found.
        cells: what it found.
        backward: as it was given.
    """
    if native.serves(grad):
        return native.recurrence_gradient(grad, last, weight, is_token, gates, cells, backward)
    tensors = [dense(t) for t in (grad, last, weight, is_token, gates, cells)]
    lanes, batch, steps, hidden = grad.shape
    out = torch.empty_like(gates, memory_format=torch.contiguous_format)
    tensors[3] = tensors[3].view(torch.uint8)
    strides = (t.stride(0) for t in tensors)
    _launch("recurrence_gradient", lanes, batch, steps, hidden, backward)(*tensors, out, *strides)
    return out


def _launch(
    kernel: str, lanes: int, batch: int, steps: int, hidden: int, backward: bool
) -> Callable[..., None]:
    """Return what launches a kernel on tensors and their strides: a program for some texts."""

    def launch(*given: Any) -> None:
        with torch.cuda.device_of(given[0]):
            getattr(kernels("recurrent_kernels"), kernel)[(ceil(batch, _ROWS), lanes)](
                *given,
                batch,
                STEPS=steps,
                H=hidden,
                HP=power(hidden, 16),
                BACKWARD=backward,
                BM=_ROWS,
                PRECISION=PRECISION,
                num_warps=8,
                num_stages=1,  # weights that are fetched ahead would not fit
            )

    return launch


_PROOFS: dict[tuple[torch.device, torch.dtype, int], bool] = {}


def _proven(like: Tensor, hidden: int) -> bool:
    """Say whether the kernels agree with the plain loop on this device; tried once, on few texts.

    Compilers of kernels differ from version to version; what cannot be compiled, or gives other
    numbers, is left to the plain loop.
    """
    key = (like.device, like.dtype, hidden)
    if key not in _PROOFS:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be looked at now
        try:
            _PROOFS[key] = _agree(*key)
        except Exception as error:  # whatever a compiler may raise
            warn(f"An LSTM layer is computed step by step: {error}", stacklevel=2)
            _PROOFS[key] = False
    return _PROOFS[key]


def _agree(device: torch.device, dtype: torch.dtype, hidden: int) -> bool:
    """Compare outputs and gradients of two lanes, in both directions."""

    def wave(pace: float, *shape: int) -> Tensor:
        number = torch.arange(math.prod(shape), device=device, dtype=torch.float64)
        return torch.sin(pace * number).reshape(shape).to(dtype)

    given = 2.0 * wave(0.7, 2, 3, 5, 4 * hidden)
    grad, last = wave(0.3, 2, 3, 5, hidden), wave(1.7, 2, 3, hidden)
    weight = wave(1.3, 2, 4 * hidden, hidden) / hidden**0.5
    is_token = wave(0.9, 2, 3, 5) > -0.5
    near = 1e-4 if dtype == torch.float32 else 0.1
    for turned in (False, True):
        outputs, gates, cells = lane_recurrence(given, weight, is_token, turned)
        to_given = lane_recurrence_grad(grad, last, weight, is_token, gates, cells, turned)
        exact = (t.float() for t in (given, weight, grad, last))
        for lane, (x, w, *along) in enumerate(zip(*exact, strict=True)):
            here = (w, is_token[lane], turned)
            right, pull = torch.func.vjp(lambda x, here=here: plain(x, *here), x)[:2]
            wanted = (right[0], pull(tuple(along))[0])
            for found, right in zip((outputs[lane], to_given[lane]), wanted, strict=True):
                if not bool(((found.float() - right).abs() <= near).all()):
                    return False
    return True


@lane_recurrence.register_fake
def _(given: Tensor, weight: Tensor, is_token: Tensor, backward: bool) -> Any:
    shape = (*given.shape[:3], weight.shape[2])
    return given.new_empty(shape), given.new_empty(given.shape), given.new_empty(shape)


@lane_recurrence_grad.register_fake
def _(grad: Any, last: Any, weight: Any, is_token: Any, gates: Tensor, *_: Any) -> Tensor:
    return gates.new_empty(gates.shape)


@lane_recurrence.register_vmap
def _(info: Any, in_dims: Any, given: Any, weight: Any, is_token: Any, backward: bool) -> Any:
    size = info.batch_size
    x: Any = merge(given, in_dims[0], size)
    there: Any = merge(is_token, in_dims[2], size)
    if in_dims[1] is None and len(weight) == 1 and x.numel() < MOST_ELEMENTS:
        # One model for all lanes: their texts are one batch.
        x, there = (t.flatten(0, 1)[None] for t in (x, there))
        found = lane_recurrence(x, weight, there, backward)
        return tuple(unfold(t, size) for t in found), (0, 0, 0)
    found = lane_recurrence(x, merge(weight, in_dims[1], size), there, backward)
    return tuple(part(t, size) for t in found), (0, 0, 0)


@lane_recurrence_grad.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> Any:
    size = info.batch_size
    merged = (merge(t, dim, size) for t, dim in zip(given[:-1], in_dims, strict=False))
    return part(lane_recurrence_grad(*merged, given[-1]), size), 0
