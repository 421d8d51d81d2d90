"""Trees for lanes: one launch for all leaves, where a library takes one or two for each.

The update of a network with ten parameter tensors is twenty kernels, and putting its outcome back
into the buffers of a graph another twenty; here they are two and one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sartor.core.method import Batch
from sartor.core.torch_private import differentiating
from sartor.engines.cpu import native
from sartor.engines.lanes.rules import alone, operator
from sartor.engines.lanes.shapes import DTYPES, ceil, dense, installed, launch
from sartor.engines.parts import Arena

if TYPE_CHECKING:
    from sartor.engines.plan import BatchPlan

_BLOCK = 1024
_MOST_LEAVES = 24  # a launch; more arguments are slower to pass than another launch


# ---- one leaf of two or three -------------------------------------------------------------------


def takes_update(lists: list[list[Tensor]], factors: list[Tensor]) -> bool:
    """Say whether the kernels serve these leaves: of one shape each, with one factor for all."""
    dtype = factors[0].dtype if isinstance(factors[0], Tensor) else None
    return (
        dtype in DTYPES
        and bool(lists[0])
        and all(isinstance(f, Tensor) and f.dim() == 0 and f.dtype == dtype for f in factors)
        and all(x.is_cuda and x.dtype == dtype and x.numel() for leaf in lists for x in leaf)
        and all(len({x.shape for x in row}) == 1 for row in zip(*lists, strict=True))
        and installed()
        and not differentiating()
    )


def update(kind: str, lists: list[list[Tensor]], factors: list[Tensor]) -> list[Tensor]:
    """Return what an operator of ``UPDATES`` makes of lists of leaves and factors of one client."""
    found: list[Tensor] = alone(UPDATES[kind], *lists, *factors)
    return found


def _update(kind: str, lists: int, factors: int) -> Any:
    """Make an operator for leaves (L, ...) and factors (L)."""
    names = [*(f"Tensor[] x{k}" for k in range(lists)), *(f"Tensor f{k}" for k in range(factors))]

    @operator(
        f"lane_{kind}({', '.join(names)}) -> Tensor[]",
        lambda *given: [x.new_empty(x.shape) for x in given[0]],
    )
    def update(*given: Any) -> list[Tensor]:
        return _launch_update(kind, list(given[:lists]), list(given[lists:]))

    return update


UPDATES = {
    "addcmul": _update("addcmul", 2, 1),
    "add_difference": _update("add_difference", 3, 1),
    "pulled_step": _update("pulled_step", 3, 2),
}
"""What the functions of these names in ``sartor.core.tree`` do, in one launch for all leaves."""


def _launch_update(kind: str, lists: list[list[Tensor]], factors: list[Tensor]) -> list[Tensor]:
    if kind == "addcmul" and native.serves(factors[0]):
        return native.updated(lists[0], lists[1], factors[0])
    lists = [[dense(x) for x in leaf] for leaf in lists]
    factors = [f.contiguous() for f in factors]
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in lists[0]]
    lists += lists[-1:] * (3 - len(lists))  # what a kind has no use for is not read
    factors += factors[-1:] * (2 - len(factors))
    _launch("update", [out, *lists], (*factors, kind))
    return out


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

    The limit is (1, lanes), the counter (1,), both int64.
    """
    to = [x[0] for x in into]
    given = [dense(x[0]) for x in values]
    _launch("settle", [to, given], (limit.reshape(-1), counter))


def _launch(
    kernel: str, lists: list[list[Tensor]], rest: Sequence[Any], numbers: Sequence[list[int]] = ()
) -> None:
    """Launch a kernel for lists of leaves (L, ...), of which it writes the first.

    ``rest`` is what it takes beside them; ``numbers`` are lists of one number a leaf that it must
    know when it is compiled.
    """
    into = lists[0]
    for first in range(0, len(into), _MOST_LEAVES):
        cut = slice(first, first + _MOST_LEAVES)
        sizes = tuple(leaf[0].numel() for leaf in into[cut])
        blocks = (0, *itertools.accumulate(ceil(size, _BLOCK) for size in sizes))
        launch(
            "leaf_kernels",
            kernel,
            (blocks[-1], len(into[0])),
            *(tuple(leaves[cut]) for leaves in lists),
            *rest,
            *(tuple(of_leaf[cut]) for of_leaf in numbers),
            STEPS=tuple(tuple(leaf.stride(0) for leaf in leaves[cut]) for leaves in lists),
            SIZES=sizes,
            FIRST=blocks,
            COUNT=len(sizes),
            BLOCK=_BLOCK,
            num_warps=4,
        )


# ---- a batch ------------------------------------------------------------------------------------


def takes_fetch(plan: BatchPlan, arena: Arena) -> bool:
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


def fetch(plan: BatchPlan, arena: Arena, counter: Tensor, period: Tensor, width: int) -> Batch:
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
    launch(
        "leaf_kernels",
        "fetch",
        (width * size, ceil(features, block)),
        *(plan.table, counter, period, plan.table if arena.row is None else arena.row),
        *(arena.x, values, arena.y, x, y, mask.view(torch.uint8), rows, last.view(torch.uint8)),
        *(plan.table.stride(1), plan.capacity),
        F=features,
        HAS_ROWS=arena.row is not None,
        CODED=arena.palette is not None,
        SIZE=size,
        COLUMNS=plan.table.shape[3],
        BLOCK=block,
        num_warps=1 if block <= 128 else 4,
    )
    return Batch(x=x, y=y, mask=mask, rows=rows, last=last)
