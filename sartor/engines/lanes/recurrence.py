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
from sartor.models.recurrent import recur as plain

_MOST_HIDDEN = 128  # of a state that a program can hold
_ROWS = 16  # texts of a program


def takes(given: Tensor, weight: Tensor, is_token: Tensor) -> bool:
    """Say whether the kernels serve the loop of one client; see ``sartor.models.recurrent``."""
    if not (given.dim() == 3 and given.numel() and is_token.dtype == torch.bool):
        return False
    hidden = weight.shape[1]
    fits = weight.shape[0] == given.shape[2] == 4 * hidden and is_token.shape == given.shape[:2]
    if given.is_cuda:
        fits = fits and hidden <= _MOST_HIDDEN and usable(given, weight)
        return fits and _proven(given, hidden)
    return fits and native.takes_recurrence(given, weight)


def recur(given: Tensor, weight: Tensor, is_token: Tensor, backward: bool) -> Tensor:
    """Do what the function of this name in ``sartor.models.recurrent`` does."""
    outputs: Tensor = _Recurrence.apply(given, weight, is_token, backward)[0]
    return outputs


class _Recurrence(torch.autograd.Function):
    """Outputs, gates and memories of one client; who reads the latter two wants no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        given: Tensor, weight: Tensor, is_token: Tensor, backward: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = lane_recurrence(given[None], weight[None], is_token[None], backward)
        return found[0][0], found[1][0], found[2][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given, weight, is_token, ctx.turned = inputs
        ctx.save_for_backward(given, weight, is_token, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *_, outputs, _gates, _cells = ctx.saved_tensors
        to_given = _RecurrenceGrad.apply(grad, *ctx.saved_tensors, ctx.turned)
        if not ctx.needs_input_grad[1]:
            return to_given, None, None, None
        none = torch.zeros_like(outputs[:, :1])
        before = (outputs[:, 1:], none) if ctx.turned else (none, outputs[:, :-1])
        states = torch.cat(before, dim=1).flatten(0, 1)
        return to_given, product(to_given.flatten(0, 1).mT, states), None, None


class _RecurrenceGrad(torch.autograd.Function):
    """The gradient of what is given to the gates.

    Outputs, gates and memories follow from ``given`` and ``weight``, through which they are
    differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        given: Tensor,
        weight: Tensor,
        is_token: Tensor,
        outputs: Tensor,
        gates: Tensor,
        cells: Tensor,
        backward: bool,
    ) -> Tensor:
        lanes = (grad[None], weight[None], is_token[None], gates[None], cells[None])
        return lane_recurrence_grad(*lanes, backward)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, given, weight, is_token, *_, ctx.turned = inputs
        ctx.save_for_backward(grad, given, weight, is_token)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        *given, is_token = ctx.saved_tensors

        def gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            pull: Any = torch.func.vjp(lambda x: plain(x, weight, is_token, ctx.turned), x)[1]
            found: Tensor = pull(grad)[0]
            return found

        pull: Any = torch.func.vjp(gradient, *given)[1]
        return (*pull(along), None, None, None, None, None)


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
        "(Tensor grad, Tensor weight, Tensor is_token, Tensor gates, Tensor cells, bool backward)"
        " -> Tensor"
    ),
)
def lane_recurrence_grad(
    grad: Tensor, weight: Tensor, is_token: Tensor, gates: Tensor, cells: Tensor, backward: bool
) -> Tensor:
    """Return the gradient of ``given`` (L, B, T, 4H) from that of the outputs (L, B, T, H)."""
    if native.serves(grad):
        return native.recurrence_gradient(grad, weight, is_token, gates, cells, backward)
    tensors = [dense(t) for t in (grad, weight, is_token, gates, cells)]
    lanes, batch, steps, hidden = grad.shape
    out = torch.empty_like(gates, memory_format=torch.contiguous_format)
    tensors[2] = tensors[2].view(torch.uint8)
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

    given, grad = 2.0 * wave(0.7, 2, 3, 5, 4 * hidden), wave(0.3, 2, 3, 5, hidden)
    weight = wave(1.3, 2, 4 * hidden, hidden) / hidden**0.5
    is_token = wave(0.9, 2, 3, 5) > -0.5
    near = 1e-4 if dtype == torch.float32 else 0.1
    for turned in (False, True):
        outputs, gates, cells = lane_recurrence(given, weight, is_token, turned)
        to_given = lane_recurrence_grad(grad, weight, is_token, gates, cells, turned)
        exact = (t.float() for t in (given, weight, grad))
        for lane, (x, w, along) in enumerate(zip(*exact, strict=True)):
            here = (w, is_token[lane], turned)
            slope = torch.func.grad(lambda x, on=here, to=along: (plain(x, *on) * to).sum())(x)
            for found, right in ((outputs[lane], plain(x, *here)), (to_given[lane], slope)):
                if not bool(((found.float() - right).abs() <= near).all()):
                    return False
    return True


@lane_recurrence.register_fake
def _(given: Tensor, weight: Tensor, is_token: Tensor, backward: bool) -> Any:
    shape = (*given.shape[:3], weight.shape[2])
    return given.new_empty(shape), given.new_empty(given.shape), given.new_empty(shape)


@lane_recurrence_grad.register_fake
def _(grad: Tensor, weight: Any, is_token: Any, gates: Tensor, cells: Any, backward: Any) -> Tensor:
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
