"""The loop of an LSTM layer for lanes: one kernel for all its steps, and one backwards.

Step by step such a loop is some fifteen operations, and twice as many backwards; most of them take
longer to begin than to compute. Here the state of some texts stays where the arithmetic is, from
the first step to the last. Derivatives of the first derivative are plain operations, so any order
is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from sartor.core.loops import lstm_loop as plain
from sartor.core.torch_private import differentiating_forwards
from sartor.engines.cpu import native
from sartor.engines.lanes.dense import product
from sartor.engines.lanes.rules import Derived, alone, each, front, operator
from sartor.engines.lanes.shapes import MOST_ELEMENTS, PRECISION, ceil, dense, launch, power, usable

_MOST_HIDDEN = 128  # of a state that a program can hold
_ROWS = 16  # texts of a program


def takes(
    given: Tensor, weight: Tensor, is_token: Tensor, start: tuple[Tensor, Tensor] | None = None
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


class _Recurrence(Derived):
    """Outputs and last memory of one client; gates and memories, which are not differentiated."""

    @staticmethod
    def forward(
        given: Tensor, weight: Tensor, is_token: Tensor, hidden: Tensor, cell: Tensor, turned: bool
    ) -> tuple[Tensor, ...]:
        outputs, gates, cells = alone(
            lane_recurrence, given, weight, is_token, hidden, cell, turned
        )
        return outputs, cells[:, 0 if turned else -1].clone(), gates, cells

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


class _RecurrenceGrad(Derived):
    """The gradients of what is given to the gates and of the first state.

    Gates and memories follow from ``given``, ``weight`` and the first state, through which they
    are differentiated again.
    """

    @staticmethod
    def forward(
        grad: Tensor,
        last: Tensor,
        given: Tensor,
        weight: Tensor,
        is_token: Tensor,
        hidden: Tensor,
        cell: Tensor,
        *found: Any,
    ) -> Any:
        return alone(lane_recurrence_grad, grad, last, weight, is_token, cell, *found)

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        grad, last, given, weight, is_token, *start, _gates, _cells = ctx.saved_tensors

        def gradients(grad: Tensor, last: Tensor, weight: Tensor, *state: Tensor) -> Any:
            loop = partial(_from_state, weight, is_token, *ctx.rest)
            pull: Any = torch.func.vjp(loop, *state)[1]
            return pull((grad, last))

        pull: Any = torch.func.vjp(gradients, grad, last, weight, given, *start)[1]
        to_grad, to_last, to_weight, to_given, *to_start = pull(along)
        return to_grad, to_last, to_given, to_weight, None, *to_start, None, None, None


def _empty_loop(given: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*given.shape[:3], weight.shape[2])
    return given.new_empty(shape), given.new_empty(given.shape), given.new_empty(shape)


def _empty_gradient(
    grad: Tensor,
    last: Tensor,
    weight: Tensor,
    is_token: Tensor,
    cell: Tensor,
    gates: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return gates.new_empty(gates.shape), cell.new_empty(cell.shape), cell.new_empty(cell.shape)


def _one_batch(size: int, dims: Any, given: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Join the texts of all lanes, where they have one model."""
    if dims[1] is not None or len(weight) > 1:
        return None
    ahead = front((given, *rest), (dims[0], *dims[2:]), size)
    if ahead[0].numel() >= MOST_ELEMENTS:
        return None
    first, *others = each(lambda x: x.flatten(0, 2)[None], ahead)
    return first, weight, *others


@operator(
    "lane_recurrence(Tensor given, Tensor weight, Tensor is_token, Tensor hidden, Tensor cell,"
    " bool backward) -> (Tensor, Tensor, Tensor)",
    _empty_loop,
    shared=_one_batch,
)
def lane_recurrence(
    given: Tensor, weight: Tensor, is_token: Tensor, hidden: Tensor, cell: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loops of lanes: outputs (L, B, T, H), gates (L, B, T, 4H), memories (L, B, T, H).

    From given (L, B, T, 4H), weight (L, 4H, H), is_token (L, B, T) and the output and memory
    (L, B, H) before the first step, which is the last in time if ``backward``. Gates are what
    their functions give; where no token is, they are anything.
    """
    tensors = (given, weight, is_token, hidden, cell)
    if native.serves(given):
        return native.recurrence(*tensors, backward)
    out = _empty_loop(given, weight)
    _launch("recurrence", tensors, 2, out, backward)
    return out


@operator(
    "lane_recurrence_grad(Tensor grad, Tensor last, Tensor weight, Tensor is_token, Tensor cell,"
    " Tensor gates, Tensor cells, bool backward) -> (Tensor, Tensor, Tensor)",
    _empty_gradient,
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

    From those of the outputs (L, B, T, H), ``grad``, and of the last memory (L, B, H), ``last``;
    the others as ``lane_recurrence`` took and found them.
    """
    tensors = (grad, last, weight, is_token, cell, gates, cells)
    if native.serves(grad):
        return native.recurrence_gradient(*tensors, backward)
    out = _empty_gradient(*tensors)
    _launch("recurrence_gradient", tensors, 3, out, backward)
    return out


def _launch(
    kernel: str, tensors: Sequence[Tensor], mask: int, out: tuple[Tensor, ...], backward: bool
) -> None:
    """Launch a kernel that reads tensors, the first (L, B, T, ...), and writes ``out``.

    ``mask`` is the number of the tensor that says where tokens are; the weights stand before it.
    """
    given = [dense(t) for t in tensors]
    lanes, batch, steps = given[0].shape[:3]
    size = given[mask - 1].shape[2]
    given[mask] = given[mask].view(torch.uint8)
    launch(
        "recurrent_kernels",
        kernel,
        (ceil(batch, _ROWS), lanes),
        *(*given, *out, *(t.stride(0) for t in given), batch),
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
