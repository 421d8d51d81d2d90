"""Steps without machinery: a mapped function used often is traced once into plain operations.

``vmap`` and ``grad`` cost about half a millisecond of Python a call, more than the arithmetic of a
small network. The trace is the same list of operations on stacked tensors, so the numbers are the
same to the bit.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sartor import tree
from sartor.engines.lanes import DIRECT

_WORTH_IT = 50  # uses after which a trace, had it been made at first, would have paid for itself


class Traces:
    """The traced steps of an engine.

    Tracing patches modules of PyTorch while it runs, so it must not happen while other threads
    compute: a worker only says what it would like, and ``prepare``, called between blocks, does it.
    """

    def __init__(self) -> None:
        self._uses: dict[Any, int] = {}
        self._wanted: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._counted = False

    def call(self, owner: Any, step: Callable[..., Any], *args: Any) -> Any:
        """Call a mapped function, or its trace if there is one for arguments of these shapes.

        Args:
            owner: what the function belongs to; kept alive, so that its identity stays its own.
            step: the mapped function, such as a step.
            args: trees, batches and the site.
        """
        key = (id(owner), *(_signature(a) for a in args))
        if key in self._ready:
            return self._ready[key](*args)
        self._counted = True
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        if uses == _WORTH_IT:
            self._wanted[key] = (step, (owner, args))
        return step(*args)

    def prepare(self) -> bool:
        """Make the traces that have been asked for.

        Returns:
            whether there were calls without a trace since the last time.
        """
        while self._wanted:
            key, (step, (owner, args)) = self._wanted.popitem()
            try:
                traced = _cleared(make_fx(step)(*args))
            except RuntimeError:  # an operation that cannot be traced: the step goes on as it is
                continue
            self._ready[key] = _Kept(owner, traced)
        counted, self._counted = self._counted, False
        return counted


class _Kept:
    """A trace, and the phase whose identity is its key."""

    def __init__(self, owner: Any, traced: GraphModule) -> None:
        self.owner, self.traced = owner, traced.forward

    def __call__(self, *args: Any) -> Any:
        return self.traced(*args)


def _cleared(traced: GraphModule) -> GraphModule:
    """Take out what changes nothing and what nobody reads, and call operators of ours directly."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.permute.default:
            source, order = node.args
            if list(order) == list(range(len(order))):
                node.replace_all_uses_with(source)
        elif node.target is torch.ops.aten.detach.default:  # a trace has no gradients to cut
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    for node in graph.nodes:
        # Nothing is differentiated or mapped any more: the way through PyTorch's registry, which
        # takes as long as a small operation, is spared.
        node.target = DIRECT.get(node.target, node.target)
    traced.recompile()
    return traced


def _signature(value: Any) -> Any:
    """Return the shapes and dtypes of a tree, or of a named tuple of trees."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, dict):
        return tuple((name, _signature(leaf)) for name, leaf in tree.items(value))
    return tuple(_signature(part) for part in value)


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory: every step frees and asks for the same large blocks.

    By default glibc returns them to the system and pays page faults for each new one, a third of
    the time of a dense step. Elsewhere than on Linux this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
