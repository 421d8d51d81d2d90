"""How functions of lanes become operators of PyTorch, mapped by ``vmap``, and get gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sartor.engines.lanes.shapes import MOST_ELEMENTS

F = TypeVar("F", bound=Callable[..., Any])

DIRECT: dict[Any, Callable[..., Any]] = {}
"""What every operator calls, for traces in which nothing is differentiated or mapped any more."""


def operator(
    signature: str,
    empty: Callable[..., Any],
    shared: Callable[..., Sequence[Any] | None] | None = None,
    lanes: bool = True,
) -> Callable[[F], F]:
    """Register a function of tensors (lanes, ...) as an operator; a mapped axis joins the lanes.

    Args:
        signature: name and schema of the operator.
        empty: makes what it returns, without the numbers, from the same arguments.
        shared: from size and places of the mapped axis and the arguments, those of one lane that
            has all as its rows; None where they need lanes of their own.
        lanes: whether there is one axis of lanes; else it takes any number of leading axes.
    """
    name, _, schema = signature.partition("(")

    def register(function: F) -> F:
        made = torch.library.custom_op(
            f"sartor::{name}", function, mutates_args=(), schema=f"({schema}"
        )
        made.register_fake(empty)

        @made.register_vmap
        def _(info: Any, in_dims: Any, *given: Any) -> tuple[Any, int]:
            size = info.batch_size
            rows = None if shared is None else shared(size, in_dims, *given)
            if rows is not None:
                return each(lambda x: x.reshape(size, 1, -1, *x.shape[2:]), made(*rows)), 0
            ahead = front(given, in_dims, size)
            if not lanes:
                return made(*ahead), 0
            found = made(*each(lambda x: x.flatten(0, 1), ahead))
            return each(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), found), 0

        DIRECT[getattr(torch.ops.sartor, name).default] = function
        return cast(F, made)

    return register


def alone(operator: Callable[..., Any], *given: Any) -> Any:
    """Apply an operator to the tensors of one client, the only lane."""
    return each(lambda x: x[0], operator(*each(lambda x: x[None], given)))


def each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change a tensor, or all in a list or tuple; what is no tensor stays."""
    if isinstance(value, (list, tuple)):
        return type(value)(each(change, part) for part in value)
    return change(value) if isinstance(value, Tensor) else value


def front(value: Any, dim: Any, size: int) -> Any:
    """Put the mapped axis of tensors first; what is not mapped is repeated, without a copy."""
    if isinstance(value, (list, tuple)):
        return [front(part, axis, size) for part, axis in zip(value, dim, strict=True)]
    if not isinstance(value, Tensor):
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def folded(x: Tensor, dims: Sequence[int | None], weight: Tensor, grows: int) -> Tensor | None:
    """Join a mapped axis of a layer's inputs to the rows of the only lane: (1, size · rows, ...).

    ``dims`` are the mapped axes of inputs, weight (lanes, ...) and bias, ``grows`` the outputs of a
    row. None where lanes have weights of their own, or would become too long.
    """
    if len(weight) > 1 or dims[0] is None or any(dim is not None for dim in dims[1:]):
        return None
    rows = x.movedim(dims[0], 0)
    number = math.prod(rows.shape[:3])
    if max(rows.numel(), number * grows) >= MOST_ELEMENTS:
        return None
    return rows.flatten(0, 2)[None]


class Derived(torch.autograd.Function):
    """A function of one client with derivatives of its own, which ``vmap`` maps.

    Tensors among the inputs are saved, in order; ``ctx.rest`` has the others, without None.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the inputs."""
        tensors = [given for given in inputs if isinstance(given, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.rest = [x for x in inputs if not (x is None or isinstance(x, Tensor))]
