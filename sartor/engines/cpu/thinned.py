"""A trace with fewer operations and the same numbers, to the bit.

Each operation of a trace costs some microseconds before it computes anything, as much as a small
operation itself. What is removed:

| what | why it changes nothing |
|---|---|
| views that arrive where their source was | same memory, same shape, same strides |
| multiplications by one, copies to the same type | the same numbers |
| the same operation on the same values again | the first has the answer |
| tensors filled with one number | they are made once and kept |
| unused results | such as the loss itself, where only its gradient is used |
| gradients of layers that only a step reads | gradient and step are one operation, same sums |

All but the first two are left alone in a trace that changes tensors in place.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sartor.core.torch_private import RESHAPE_ALIAS, TO_COPY, UNSAFE_VIEW, is_mutating
from sartor.engines.lanes.dense import moved_on_core
from sartor.engines.lanes.rules import DIRECT

_aten = torch.ops.aten
_Operation = type(_aten.add.Tensor)
_STEP = torch.ops.sartor.lane_addcmul.default
_GRADIENT = torch.ops.sartor.lane_product_and_sums.default
_FILLS = {
    _aten.zeros_like.default: lambda node: 0,
    _aten.ones_like.default: lambda node: 1,
    _aten.new_zeros.default: lambda node: 0,
    _aten.new_ones.default: lambda node: 1,
    _aten.scalar_tensor.default: lambda node: node.args[0],
    _aten.full.default: lambda node: node.args[1],
    _aten.full_like.default: lambda node: node.args[1],
}
_VIEWS = {
    _aten.view.default,
    UNSAFE_VIEW,
    RESHAPE_ALIAS,
    _aten.expand.default,
    _aten.transpose.int,
    _aten.t.default,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.detach.default,
    _aten.alias.default,
}
"""Views that begin where their source does, as long as they leave out none of its numbers."""
_MOST_KEPT = 1 << 20  # numbers of a tensor that is kept with a trace


def thin(traced: GraphModule) -> GraphModule:
    """Remove operations without effect and unused results, and call our own operators directly."""
    graph = traced.graph
    _skip_views(graph)
    if not any(_changes(node) for node in graph.nodes):
        _skip_copies(graph)
        _keep_fills(traced)
        _say_once(graph)
        _skip_views(graph)
        graph.eliminate_dead_code()
        _join_steps(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        # Nothing is differentiated or mapped any more: the way through PyTorch's registry, which
        # takes as long as a small operation, is spared.
        node.target = DIRECT.get(node.target, node.target)
    traced.recompile()
    return traced


def _skip_views(graph: Graph) -> None:
    """Take out views, one or several in a row, that end as what they began from."""
    for node in graph.nodes:
        here = _layout(node)
        source = _viewed(node)
        while source is not None and _numel(source) == _numel(node):
            if _layout(source) == here:
                node.replace_all_uses_with(source)
                break
            source = _viewed(source)


def _skip_copies(graph: Graph) -> None:
    """Take out multiplications by one, and copies to the type and layout that were there."""
    for node in graph.nodes:
        product = node.target in (_aten.mul.Scalar, _aten.mul.Tensor)
        once = product and node.args[1] == 1
        if not once and node.target not in (TO_COPY, _aten.clone.default):
            continue
        source = node.args[0]
        if _layout(node) == _layout(source) and not _is_returned(node):
            node.replace_all_uses_with(source)


def _keep_fills(traced: GraphModule) -> None:
    """Make constant tensors once, unless a result could share memory with them."""
    for node in traced.graph.nodes:
        if node.target not in _FILLS or not all(_reads(user) for user in node.users):
            continue
        value = _FILLS[node.target](node)
        if type(value) not in (bool, int, float) or _numel(node) > _MOST_KEPT:
            continue
        shape, stride, dtype = _layout(node)
        name = f"kept_{node.name}"
        filled = torch.empty_strided(shape, stride, dtype=dtype).fill_(value)
        traced.register_buffer(name, filled)
        with traced.graph.inserting_before(node):
            kept = traced.graph.get_attr(name)
        kept.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(kept)


def _say_once(graph: Graph) -> None:
    """Take out operations that were done before on the same values."""
    seen: dict[Any, Node] = {}
    for node in graph.nodes:
        if not _is_operation(node) or _is_returned(node) or _is_random(node):
            continue
        try:
            key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)


def _join_steps(graph: Graph) -> None:
    """Let the gradient of a layer's weights and the step along it be one operation."""
    for step in [node for node in graph.nodes if node.target is _STEP]:
        joined: dict[int, Node] = {}
        for number, (leaf, slope) in enumerate(zip(*_lists(step), strict=True)):
            gradient = _gradient(slope)
            if gradient is None or list(slope.users) != [step]:
                continue
            with graph.inserting_after(gradient):  # where the sums were, which others may read
                sums = graph.call_function(_aten.sum.dim_IntList, (gradient.args[0], [2]))
            for other in [user for user in gradient.users if user is not slope]:
                other.replace_all_uses_with(sums)
            with graph.inserting_before(step):
                given = (leaf, *gradient.args[:2], step.args[2])
                joined[number] = graph.call_function(moved_on_core, given)
        if not joined:
            continue
        rest = [number for number in range(len(_lists(step)[0])) if number not in joined]
        step.args = (*([leaves[k] for k in rest] for leaves in _lists(step)), step.args[2])
        for user in list(step.users):
            number = int(user.args[1])
            if number in joined:
                user.replace_all_uses_with(joined[number])
            else:
                user.args = (step, rest.index(number))


def _lists(step: Node) -> tuple[list[Node], list[Node]]:
    """Return the leaves that a step moves, and what it moves them along."""
    now, slopes = step.args[:2]
    return list(now), list(slopes)  # type: ignore[arg-type]


def _gradient(slope: Node) -> Node | None:
    """Return the operation that has this as first result, if it is a gradient of a layer."""
    source = slope.args[0] if slope.target is getitem and slope.args[1] == 0 else None
    if not isinstance(source, Node) or source.target is not _GRADIENT:
        return None
    others = [user for user in source.users if user is not slope]
    return source if all(u.target is getitem and u.args[1] == 1 for u in others) else None


# ---- what a node is --------------------------------------------------------------------------


def _layout(node: Any) -> Any:
    """Return shape, strides and type of a node's tensor; None if it is something else."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return (found.shape, found.stride(), found.dtype) if isinstance(found, Tensor) else None


def _numel(node: Node) -> int:
    layout = _layout(node)
    return -1 if layout is None else math.prod(layout[0])


def _viewed(node: Node) -> Node | None:
    """Return what a node is a view of; None if it has numbers of its own, or is a rare view."""
    source = node.args[0] if node.target in _VIEWS else None
    known = isinstance(source, Node) and _layout(node) and _layout(source)
    return source if isinstance(source, Node) and known else None


def _is_operation(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, _Operation)


def _changes(node: Node) -> bool:
    return _is_operation(node) and is_mutating(node.target)


def _is_random(node: Node) -> bool:
    target: Any = node.target
    return torch.Tag.nondeterministic_seeded in target.tags


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _reads(user: Node) -> bool:
    """Say whether an operation reads a value without returning it or a view of it."""
    if not _is_operation(user) or user.target in _VIEWS:
        return False
    target: Any = user.target
    return target.namespace == "aten" and not target.is_view
