"""Trees for lanes: one launch for all leaves, where a library takes one or two for each.

The update of a network with ten parameter tensors is twenty kernels, and putting its outcome back
into the buffers of a graph another twenty; here they are two and one.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from sartor.engines.arena import Arena
from sartor.engines.lanes.shapes import DTYPES, ceil, dense, installed, kernels, merge, part
from sartor.engines.plan import Plan
from sartor.method import Batch

_BLOCK = 1024
_MOST_LEAVES = 24  # a launch; more arguments are slower to pass than another launch


# ---- a + factor · b -----------------------------------------------------------------------------


def takes_addcmul(a: list[Tensor], b: list[Tensor], factor: Tensor) -> bool:
    """Say whether the kernel serves these leaves: many, of one shape each, with one factor."""
    return (
        len(a) > 1
        and isinstance(factor, Tensor)
        and factor.dim() == 0
        and factor.dtype in DTYPES
        and all(x.is_cuda and x.dtype == factor.dtype and x.numel() for x in (*a, *b))
        and all(x.shape == y.shape for x, y in zip(a, b, strict=True))
        and installed()
        and not _differentiating()
    )


def _differentiating() -> bool:
    """Say whether a gradient is being taken through what is computed now."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    maps = torch._C._functorch.TransformType.Vmap
    return any(level.key() != maps for level in stack)


def addcmul(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return a + factor·b, leaf by leaf, for one client."""
    found = lane_addcmul([x[None] for x in a], [x[None] for x in b], factor[None])
    return [x[0] for x in found]


@torch.library.custom_op(
    "sartor::lane_addcmul",
    mutates_args=(),
    schema="(Tensor[] a, Tensor[] b, Tensor factor) -> Tensor[]",
)
def lane_addcmul(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return a + factor·b for leaves (L, ...) and factors (L)."""
    return _launch_addcmul(a, b, factor)


@lane_addcmul.register_fake
def _(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in a]


@lane_addcmul.register_vmap
def _(info: Any, in_dims: Any, a: Any, b: Any, factor: Any) -> Any:
    size = info.batch_size
    pair = _merged(info, in_dims[:2], a, b)
    found = lane_addcmul(*pair, merge(factor, in_dims[2], size))
    return [part(x, size) for x in found], [0] * len(found)


def _launch_addcmul(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    return _launch_pairs("addcmul", a, b, factor)


def _launch_pairs(kernel: str, a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Launch a kernel that makes one leaf of two, and of a factor for every lane."""
    a, b = [dense(x) for x in a], [dense(x) for x in b]
    factor = factor.contiguous()
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in a]
    for cut in _cuts(len(a)):
        sizes = tuple(x[0].numel() for x in a[cut])
        first = _first_blocks(sizes)
        with torch.cuda.device_of(factor):
            getattr(kernels("leaf_kernels"), kernel)[(first[-1], len(factor))](
                tuple(out[cut]),
                tuple(a[cut]),
                tuple(b[cut]),
                factor,
                A=tuple(x.stride(0) for x in a[cut]),
                B=tuple(x.stride(0) for x in b[cut]),
                SIZES=sizes,
                FIRST=first,
                COUNT=len(sizes),
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return out


# ---- ‖a − b‖² -----------------------------------------------------------------------------------


def takes_sqdist(a: list[Tensor], b: list[Tensor]) -> bool:
    """Say whether the kernel serves these leaves: many, of one shape each."""
    dtype = a[0].dtype if a else None
    return (
        1 < len(a) <= _MOST_LEAVES
        and dtype in DTYPES
        and all(x.is_cuda and x.dtype == dtype and x.numel() for x in (*a, *b))
        and all(x.shape == y.shape for x, y in zip(a, b, strict=True))
        and installed()
    )


def sqdist(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return Σ (a − b)² over all leaves, for one client."""
    found: Tensor = _SquaredDistance.apply(len(a), *a, *b)
    return found


class _SquaredDistance(torch.autograd.Function):
    """The squared distance of two lists of leaves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *given: Tensor) -> Tensor:
        lanes = [x[None] for x in given]
        return lane_sqdist(lanes[:count], lanes[count:])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _ScaledDifference.apply(ctx.count, 2 * grad, *ctx.saved_tensors)
        needed = any(ctx.needs_input_grad[1 + ctx.count :])
        return None, *slopes, *(-slope if needed else None for slope in slopes)


class _ScaledDifference(torch.autograd.Function):
    """factor·(a − b), leaf by leaf."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, factor: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        lanes = [x[None] for x in given]
        return tuple(x[0] for x in lane_difference(lanes[:count], lanes[count:], factor[None]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.count = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        count = ctx.count
        factor, *given = ctx.saved_tensors
        apart = (x - y for x, y in zip(given[:count], given[count:], strict=True))
        to_factor = sum((x * d).sum() for x, d in zip(along, apart, strict=True))
        to_a = [x * factor for x in along]
        return None, to_factor, *to_a, *(-x for x in to_a)


@torch.library.custom_op(
    "sartor::lane_sqdist", mutates_args=(), schema="(Tensor[] a, Tensor[] b) -> Tensor"
)
def lane_sqdist(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return Σ (a − b)² of leaves (L, ...): (L)."""
    return _launch_sqdist(a, b)


@torch.library.custom_op(
    "sartor::lane_difference",
    mutates_args=(),
    schema="(Tensor[] a, Tensor[] b, Tensor factor) -> Tensor[]",
)
def lane_difference(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return factor·(a − b) for leaves (L, ...) and factors (L)."""
    return _launch_difference(a, b, factor)


@lane_sqdist.register_fake
def _(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0].new_empty(a[0].shape[:1])


@lane_difference.register_fake
def _(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in a]


@lane_sqdist.register_vmap
def _(info: Any, in_dims: Any, a: Any, b: Any) -> Any:
    size = info.batch_size
    return part(lane_sqdist(*_merged(info, in_dims, a, b)), size), 0


@lane_difference.register_vmap
def _(info: Any, in_dims: Any, a: Any, b: Any, factor: Any) -> Any:
    size = info.batch_size
    pair = _merged(info, in_dims[:2], a, b)
    found = lane_difference(*pair, merge(factor, in_dims[2], size))
    return [part(x, size) for x in found], [0] * len(found)


def _merged(info: Any, in_dims: Any, *lists: list[Tensor]) -> list[list[Tensor]]:
    """Join the mapped axis of every leaf of some lists to the lanes."""
    return [
        [merge(x, dim, info.batch_size) for x, dim in zip(values, dims, strict=True)]  # type: ignore[misc]
        for values, dims in zip(lists, in_dims, strict=True)
    ]


def _launch_sqdist(a: list[Tensor], b: list[Tensor]) -> Tensor:
    a, b = [dense(x) for x in a], [dense(x) for x in b]
    sizes = tuple(x[0].numel() for x in a)
    first = _first_blocks(sizes)
    partial = torch.empty((len(a[0]), first[-1]), dtype=torch.float32, device=a[0].device)
    with torch.cuda.device_of(partial):
        kernels("leaf_kernels").sqdist[(first[-1], len(partial))](
            partial,
            tuple(a),
            tuple(b),
            A=tuple(x.stride(0) for x in a),
            B=tuple(x.stride(0) for x in b),
            SIZES=sizes,
            FIRST=first,
            COUNT=len(sizes),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return partial.sum(1).to(a[0].dtype)


def _launch_difference(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    return _launch_pairs("difference", a, b, factor)


# ---- putting an outcome back --------------------------------------------------------------------


def takes_settle(into: list[Tensor], values: list[Tensor]) -> bool:
    """Say whether the kernel can copy these leaves (1, lanes, ...)."""
    return (
        len(into) > 1
        and installed()
        and all(x.is_cuda and x.numel() and x.shape[0] == 1 for x in into)
        and all(x[0, 0].is_contiguous() for x in into)
        and all(
            x.dtype == y.dtype and x.shape == y.shape and x.dtype != torch.bool
            for x, y in zip(into, values, strict=True)
        )
    )


def settle(into: list[Tensor], values: list[Tensor], limit: Tensor, counter: Tensor) -> None:
    """Copy values into buffers, both (1, lanes, ...), where the limit is above the counter.

    Args:
        into: the buffers.
        values: what they shall hold.
        limit: (1, lanes) int64.
        counter: (1,) int64.
    """
    to = [x[0] for x in into]
    given = [dense(x[0]) for x in values]
    limit = limit.reshape(-1)
    for cut in _cuts(len(to)):
        sizes = tuple(x[0].numel() for x in to[cut])
        first = _first_blocks(sizes)
        with torch.cuda.device_of(counter):
            kernels("leaf_kernels").settle[(first[-1], len(to[0]))](
                tuple(to[cut]),
                tuple(given[cut]),
                limit,
                counter,
                TO=tuple(x.stride(0) for x in to[cut]),
                FROM=tuple(x.stride(0) for x in given[cut]),
                SIZES=sizes,
                FIRST=first,
                COUNT=len(sizes),
                BLOCK=_BLOCK,
                num_warps=4,
            )


def _cuts(number: int) -> list[slice]:
    return [slice(k, k + _MOST_LEAVES) for k in range(0, number, _MOST_LEAVES)]


def _first_blocks(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(ceil(size, _BLOCK) for size in sizes))


# ---- a batch ------------------------------------------------------------------------------------


def takes_fetch(plan: Plan, arena: Arena) -> bool:
    """Say whether the kernel can gather the batches of a plan: one draw, one label a sample."""
    return (
        plan.draws == 1
        and arena.x.is_cuda
        and arena.x.is_contiguous()
        and arena.x.dtype != torch.bool
        and arena.y.dim() == 1
        and arena.y.dtype != torch.bool
        and plan.table.shape[0] == 1
        and installed()
    )


def fetch(plan: Plan, arena: Arena, counter: Tensor, period: Tensor, width: int) -> Batch:
    """Gather the batch of step ``counter`` of the leading lanes: leaves (1, width, batch, ...)."""
    size, device = plan.batch, arena.device
    lead = (1, width, size)
    features = arena.x[0].numel()
    values = arena.x if arena.palette is None else arena.palette
    x = torch.empty((*lead, *arena.x.shape[1:]), dtype=values.dtype, device=device)
    y = torch.empty(lead, dtype=arena.y.dtype, device=device)
    mask = torch.empty(lead, dtype=torch.bool, device=device)
    rows = torch.empty(lead, dtype=torch.int64, device=device)
    last = torch.empty(lead[:2], dtype=torch.bool, device=device)
    block = min(1024, 1 << (max(features, 32) - 1).bit_length())
    with torch.cuda.device_of(x):
        kernels("leaf_kernels").fetch[(width * size, ceil(features, block))](
            plan.table,
            counter,
            period,
            plan.table if arena.row is None else arena.row,
            arena.x,
            values,
            arena.y,
            x,
            y,
            mask.view(torch.uint8),
            rows,
            last.view(torch.uint8),
            plan.table.stride(1),
            plan.capacity,
            F=features,
            HAS_ROWS=arena.row is not None,
            CODED=arena.palette is not None,
            SIZE=size,
            COLUMNS=plan.table.shape[3],
            BLOCK=block,
            num_warps=1 if block <= 128 else 4,
        )
    return Batch(x=x, y=y, mask=mask, rows=rows, last=last)
