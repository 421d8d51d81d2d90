"""The loop of an LSTM layer for lanes: one kernel for all its steps, and one backwards.

Step by step such a loop is some fifteen operations, and twice as many backwards; most of them take
longer to begin than to compute. Here the state of some texts stays where the arithmetic is, from
the first step to the last. Derivatives of the first derivative are plain operations, so any order
is right.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from sartor.core.loops import lstm_loop as plain
from sartor.core.torch_private import differentiating_forwards
from sartor.engines.cpu import native
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

_MOST_HIDDEN = 128  # of a state that a program can hold
_ROWS = 16  # texts of a program


def takes(
    given: Tensor,
    weight: Tensor,
    is_token: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """Say whether the kernels serve the loop of one client; see ``sartor.core.loops``."""
    if not (given.dim() == 3 and given.numel() and is_token.dtype == torch.bool):
        return False
    size = weight.shape[1]
    first = (given.shape[0], size)
    if not (
        weight.shape[0] == given.shape[2] == 4 * size
        and is_token.shape == given.shape[:2]
        and all(t.shape == first and t.dtype == given.dtype for t in start or ())
        and not differentiating_forwards()  # there is no such rule
    ):
        return False
    if given.is_cuda:
        return size <= _MOST_HIDDEN and usable(given, weight) and _proven(given, size)
    return native.takes_recurrence(given, weight)


def lstm_loop(
    given: Tensor,
    weight: Tensor,
    is_token: Tensor,
    backward: bool,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``sartor.core.loops`` does."""
    if start is None:
        zero = given.new_zeros(given.shape[0], weight.shape[1])
        start = (zero, zero)
    outputs, last, *_ = _Recurrence.apply(given, weight, is_token, *start, backward)
    return outputs, last


class _Recurrence(torch.autograd.Function):
    """Outputs and last memory of one client; gates and memories, which are not differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        given: Tensor,
        weight: Tensor,
        is_token: Tensor,
        hidden: Tensor,
        cell: Tensor,
        backward: bool,
    ) -> tuple[Tensor, ...]:
        lanes = (part[None] for part in (given, weight, is_token, hidden, cell))
        outputs, gates, cells = (part[0] for part in lane_recurrence(*lanes, backward))
        return outputs, cells[:, 0 if backward else -1].clone(), gates, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, ctx.turned = inputs
        outputs, _, gates, cells = output
        ctx.save_for_backward(*given, gates, cells, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, last: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, outputs = ctx.saved_tensors
        to_given, to_hidden, to_cell = _RecurrenceGrad.apply(grad, last, *saved, ctx.turned)
        to_weight = None
        if ctx.needs_input_grad[1]:
            first = saved[3][:, None]
            before = (outputs[:, 1:], first) if ctx.turned else (first, outputs[:, :-1])
            states = torch.cat(before, dim=1).flatten(0, 1)
            to_weight = product(to_given.flatten(0, 1).mT, states)
        return to_given, to_weight, None, to_hidden, to_cell, None


class _RecurrenceGrad(torch.autograd.Function):
    """The gradients of what is given to the gates and of the first state.

    Gates and memories follow from ``given``, ``weight`` and the first state, through which they
    are differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        last: Tensor,
        given: Tensor,
        weight: Tensor,
        is_token: Tensor,
        hidden: Tensor,
        cell: Tensor,
        gates: Tensor,
        cells: Tensor,
        backward: bool,
    ) -> tuple[Tensor, ...]:
        lanes = (part[None] for part in (grad, last, weight, is_token, cell, gates, cells))
        return tuple(part[0] for part in lane_recurrence_grad(*lanes, backward))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, _gates, _cells, ctx.turned = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        grad, last, given, weight, is_token, *start = ctx.saved_tensors

        def gradients(grad: Tensor, last: Tensor, weight: Tensor, *state: Tensor) -> Any:
            loop = partial(_from_state, weight, is_token, ctx.turned)
            pull: Any = torch.func.vjp(loop, *state)[1]
            return pull((grad, last))

        pull: Any = torch.func.vjp(gradients, grad, last, weight, given, *start)[1]
        to_grad, to_last, to_weight, to_given, *to_start = pull(along)
        return to_grad, to_last, to_given, to_weight, None, *to_start, None, None, None


@torch.library.custom_op(
    "sartor::lane_recurrence",
    mutates_args=(),
    schema=(
        "(Tensor given, Tensor weight, Tensor is_token, Tensor hidden, Tensor cell, bool backward)"
        " -> (Tensor, Tensor, Tensor)"
    ),
)
def lane_recurrence(
    given: Tensor,
    weight: Tensor,
    is_token: Tensor,
    hidden: Tensor,
    cell: Tensor,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loops of lanes.

    Args:
        given: (L, B, T, 4H).
        weight: (L, 4H, H).
        is_token: (L, B, T).
        hidden: (L, B, H) the output before the first step.
        cell: (L, B, H) the memory before it.
        backward: whether to begin with the last step.

    Returns:
        Outputs (L, B, T, H), gates (L, B, T, 4H) after their functions, memories (L, B, T, H).
        Where no token is, gates are anything.
    """
    if native.serves(given):
        return native.recurrence(given, weight, is_token, hidden, cell, backward)
    tensors = [dense(t) for t in (given, weight, is_token, hidden, cell)]
    outputs, cells = (given.new_empty(*given.shape[:3], weight.shape[2]) for _ in range(2))
    gates = given.new_empty(given.shape)
    _launch("recurrence", tensors, 2, (outputs, gates, cells), backward)
    return outputs, gates, cells


@torch.library.custom_op(
    "sartor::lane_recurrence_grad",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor last, Tensor weight, Tensor is_token, Tensor cell, Tensor gates,"
        " Tensor cells, bool backward) -> (Tensor, Tensor, Tensor)"
    ),
)
def lane_recurrence_grad(
    grad: Tensor,
    last: Tensor,
    weight: Tensor,
    is_token: Tensor,
    cell: Tensor,
    gates: Tensor,
    cells: Tensor,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``given`` (L, B, T, 4H) and of the first output and memory.

    Args:
        grad: of the outputs (L, B, T, H).
        last: of the last memory (L, B, H).
        weight: as it was given.
        is_token: as it was given.
        cell: as it was given.
        gates: what ``lane_recurrence`` found.
        cells: what it found.
        backward: as it was given.
    """
    if native.serves(grad):
        given = (grad, last, weight, is_token, cell, gates, cells)
        return native.recurrence_gradient(*given, backward)
    tensors = [dense(t) for t in (grad, last, weight, is_token, cell, gates, cells)]
    out = gates.new_empty(gates.shape)
    to_hidden, to_cell = (cell.new_empty(cell.shape) for _ in range(2))
    _launch("recurrence_gradient", tensors, 3, (out, to_hidden, to_cell), backward)
    return out, to_hidden, to_cell


def _launch(
    kernel: str, given: list[Tensor], mask: int, out: tuple[Tensor, ...], backward: bool
) -> None:
    """Launch a kernel on tensors with contiguous lanes: a program for some texts.

    Args:
        kernel: its name.
        given: what it reads; the first is (L, B, T, ...).
        mask: which of them says where tokens are; the weights stand before it.
        out: what it writes, without gaps.
        backward: whether the loop begins with the last step.
    """
    lanes, batch, steps = given[0].shape[:3]
    size = given[mask - 1].shape[2]
    given[mask] = given[mask].view(torch.uint8)
    with torch.cuda.device_of(given[0]):
        getattr(kernels("recurrent_kernels"), kernel)[(ceil(batch, _ROWS), lanes)](
            *given,
            *out,
            *(t.stride(0) for t in given),
            batch,
            STEPS=steps,
            H=size,
            HP=power(size, 16),
            BACKWARD=backward,
            BM=_ROWS,
            PRECISION=PRECISION,
            num_warps=8,
            num_stages=1,  # weights that are fetched ahead would not fit
        )


_PROOFS: dict[tuple[torch.device, torch.dtype, int], bool] = {}


def _proven(like: Tensor, hidden: int) -> bool:
    """Say whether the kernels agree with the plain loop on this device; tried once, on few texts.

    Compilers of kernels differ from version to version; what cannot be compiled, or gives other
    numbers, is left to the plain loop.
    """
    key = (like.device, like.dtype, hidden)
    if key not in _PROOFS:
        capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or torch.compiler.is_compiling():
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
    weight = wave(1.3, 2, 4 * hidden, hidden) / hidden**0.5
    is_token = wave(0.9, 2, 3, 5) > -0.5
    first, cell, last = (wave(pace, 2, 3, hidden) for pace in (0.4, 1.1, 1.7))
    grad = wave(0.3, 2, 3, 5, hidden)
    near = 1e-4 if dtype == torch.float32 else 0.1
    for turned in (False, True):
        outputs, gates, cells = lane_recurrence(given, weight, is_token, first, cell, turned)
        back = lane_recurrence_grad(grad, last, weight, is_token, cell, gates, cells, turned)

        for lane in range(2):
            x, w, h, c, *along = (t[lane].float() for t in (given, weight, first, cell, grad, last))
            loop = partial(_from_state, w, is_token[lane], turned)
            right, pull = torch.func.vjp(loop, x, h, c)[:2]
            found = (outputs[lane], *(part[lane] for part in back))
            for one, other in zip(found, (right[0], *pull(tuple(along))), strict=True):
                if not bool(((one.float() - other).abs() <= near).all()):
                    return False
    return True


def _from_state(
    weight: Tensor, is_token: Tensor, turned: bool, given: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    return plain(given, weight, is_token, turned, (hidden, cell))


@lane_recurrence.register_fake
def _(given: Tensor, weight: Tensor, *_: Any) -> Any:
    shape = (*given.shape[:3], weight.shape[2])
    return given.new_empty(shape), given.new_empty(given.shape), given.new_empty(shape)


@lane_recurrence_grad.register_fake
def _(grad: Any, last: Any, weight: Any, is_token: Any, cell: Any, gates: Any, *_: Any) -> Any:
    return gates.new_empty(gates.shape), cell.new_empty(cell.shape), cell.new_empty(cell.shape)


@lane_recurrence.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> Any:
    size, weight = info.batch_size, given[1]
    merged: list[Any] = [merge(t, dim, size) for t, dim in zip(given[:-1], in_dims, strict=False)]
    if in_dims[1] is None and len(weight) == 1 and merged[0].numel() < MOST_ELEMENTS:
        # One model for all lanes: their texts are one batch.
        texts = [t.flatten(0, 1)[None] for t in merged]
        found = lane_recurrence(texts[0], weight, *texts[2:], given[-1])
        return tuple(unfold(t, size) for t in found), (0, 0, 0)
    return tuple(part(t, size) for t in lane_recurrence(*merged, given[-1])), (0, 0, 0)


@lane_recurrence_grad.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> Any:
    size = info.batch_size
    merged = (merge(t, dim, size) for t, dim in zip(given[:-1], in_dims, strict=False))
    found = lane_recurrence_grad(*merged, given[-1])
    return tuple(part(t, size) for t in found), (0, 0, 0)
