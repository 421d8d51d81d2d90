"""Functions of tensors as CUDA graphs, and the buffers that graphs read.

A graph reads fixed places of memory, so its arguments are copied into buffers. What a function only
hands on, such as an upload that is the model itself, is not copied.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.torch_private import TorchDispatchMode, changed_arguments, foreach_copy_
from sartor.engines.lanes.shapes import nested

_MOST_COPIED = 1 << 30  # bytes of arguments of a recorded function


class Function:
    """The graph of a function ``call`` of tensors, given by form and leaves; see ``flattened``.

    ``reads`` are the numbers of the leaves that it reads, ``pool`` is what all graphs share.
    """

    def __init__(
        self, call: Callable[..., Any], form: Any, given: list[Any], reads: set[int], pool: Any
    ) -> None:
        held = [clone(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        self.buffers = {k: held[k] for k in sorted(reads)}
        self.graph, found = self._record(lambda: call(*rebuilt(form, iter(held))), pool)
        self.found: list[Any] = []
        self.form = flattened(found, self.found)
        homes = {_place(leaf): k for k, leaf in enumerate(held) if isinstance(leaf, Tensor)}
        places = {n: _place(leaf) for n, leaf in enumerate(self.found) if isinstance(leaf, Tensor)}
        self.handed = {n: homes[place] for n, place in places.items() if place in homes}
        for n in self.handed:
            self.found[n] = None  # what is handed on is not held
        # A view of an argument that happened to be another argument looked as if handed on.
        rest = {_storage(leaf) for leaf in self.found if isinstance(leaf, Tensor)}
        self.buffers |= {
            k: leaf
            for k, leaf in enumerate(held)
            if isinstance(leaf, Tensor) and _storage(leaf) in rest
        }
        self.works = any(isinstance(leaf, Tensor) for leaf in self.found)

    @classmethod
    def of(
        cls, call: Callable[..., Any], form: Any, given: list[Any], pool: Any
    ) -> Function | None:
        """Record a function; None if it cannot be recorded."""
        try:
            reads = read_by(call, form, given)
            if sum(given[k].nbytes for k in reads) > _MOST_COPIED:
                return None
            return cls(call, form, given, reads, pool)
        except RuntimeError:
            return None

    @staticmethod
    def _record(call: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        """Return a graph of a call, and what it gives."""
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), no_collection():
            warnings.simplefilter("ignore")  # a function may only hand its arguments on
            with torch.cuda.graph(graph, pool=pool):
                return graph, call()

    def __call__(self, given: list[Any]) -> Any:
        """Return what the function gives for arguments of these leaves."""
        if self.works:
            both = [(old, given[k]) for k, old in self.buffers.items() if old.numel()]
            copy([once(old) for old, _ in both], [once(new) for _, new in both])
            self.graph.replay()
        return rebuilt(self.form, (self._leaf(n, given) for n in range(len(self.found))))

    def _leaf(self, n: int, given: list[Any]) -> Any:
        if n in self.handed:
            return given[self.handed[n]]
        leaf = self.found[n]
        return clone(leaf) if isinstance(leaf, Tensor) else leaf


class _Reader(TorchDispatchMode):  # type: ignore[misc]
    """Notes which storages are read: given to an operation that does more than look at them.

    What is ``given`` must not be changed.
    """

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.fixed = {_storage(leaf) for leaf in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the tensors of a call, and make it."""
        if not func.is_view:
            tensors = (x for x in nested((args, kwargs)) if isinstance(x, Tensor))
            self.storages.update(_storage(x) for x in tensors)
        for position, name in changed_arguments(func):
            value = args[position] if position < len(args) else (kwargs or {}).get(name)
            if isinstance(value, Tensor) and _storage(value) in self.fixed:
                raise RuntimeError(f"{func} changes an argument of a function, which must be pure.")
        return func(*args, **(kwargs or {}))


def read_by(call: Callable[..., Any], form: Any, given: list[Any]) -> set[int]:
    """Call a function once; return the numbers of the tensors that it reads.

    A tensor of which it returns a part, or another view, counts as read.

    Raises:
        RuntimeError: the function waits for the device or changes an argument; it cannot be
            recorded.
    """
    found: list[Any] = []
    tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
    with _aside(), no_waiting(), _Reader(tensors) as reader:
        flattened(call(*rebuilt(form, iter(given))), found)
    whole = {_place(leaf) for leaf in tensors}
    views = [leaf for leaf in found if isinstance(leaf, Tensor) and _place(leaf) not in whole]
    read = reader.storages | {_storage(leaf) for leaf in views}
    return {k for k, x in enumerate(given) if isinstance(x, Tensor) and _storage(x) in read}


def _storage(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


def _place(leaf: Tensor) -> tuple[Any, ...]:
    """Identify a tensor by its memory, shape, strides and type."""
    return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype


# ---- forms --------------------------------------------------------------------------------------


def flattened(value: Any, into: list[Any]) -> Any:
    """Append the leaves of nested dicts and tuples to a list, and return their form, hashable."""
    if isinstance(value, dict):
        return dict, tuple((name, flattened(leaf, into)) for name, leaf in value.items())
    if isinstance(value, tuple):
        return type(value), tuple(flattened(leaf, into) for leaf in value)
    into.append(value)
    return None


def rebuilt(form: Any, leaves: Iterator[Any]) -> Any:
    """Undo ``flattened``."""
    if form is None:
        return next(leaves)
    kind, parts = form
    if kind is dict:
        return {name: rebuilt(part, leaves) for name, part in parts}
    found = (rebuilt(part, leaves) for part in parts)
    return kind(*found) if hasattr(kind, "_fields") else tuple(found)


def signature(value: Any) -> Any:
    """Describe a tensor or a tree: two that agree in this can share a graph."""
    if isinstance(value, dict):
        return tuple((name, *signature(leaf)) for name, leaf in tree.items(value))
    return (value.shape, value.dtype, repeats(value)) if isinstance(value, Tensor) else value


# ---- buffers ------------------------------------------------------------------------------------


def once(leaf: Tensor) -> Tensor:
    """View an expanded tensor without its repetitions."""
    if 0 not in leaf.stride():
        return leaf
    return leaf[tuple(slice(0, 1) if step == 0 else slice(None) for step in leaf.stride())]


def clone(leaf: Tensor) -> Tensor:
    """Copy a tensor; repeated axes stay repeated."""
    return once(leaf).clone().expand(leaf.shape)


def repeats(leaf: Tensor) -> tuple[bool, ...]:
    """Say along which axes a tensor repeats itself."""
    return tuple(step == 0 for step in leaf.stride())


def copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into buffers, in one launch where that is possible."""
    if into:
        foreach_copy_(into, values)


# ---- recording ----------------------------------------------------------------------------------


@contextmanager
def _aside() -> Iterator[None]:
    """Work on a stream of its own, as is asked of what will be recorded."""
    if not torch.cuda.is_available():
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Refuse what waits for the device: it cannot be captured."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the collector away: freeing an older graph during a capture would spoil it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
