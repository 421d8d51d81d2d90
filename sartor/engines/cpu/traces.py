"""Trace mapped functions that are used often into plain operations.

``vmap`` and ``grad`` cost 0.5 to 50 ms of Python per call, more than the arithmetic of a small
network. A trace is the same list of operations on stacked tensors, with the same bits.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.fx.graph import CodeGen

from sartor.core.task import unmetered
from sartor.core.torch_private import make_fx, one_fake_mode
from sartor.engines.cpu.acceleration import is_on, log_once
from sartor.engines.cpu.thinned import thin

# What a trace takes, as measured: some seconds at least, and so many calls of the function.
_TRACE_SECONDS = 0.05
_TRACE_CALLS = 4.0


class Traces:
    """The traced steps of an engine.

    Tracing patches modules of PyTorch while it runs, so it must not happen while other threads
    compute: a worker only asks for a trace, and ``prepare``, called between blocks, makes it.

    Attributes:
        at_once: whether no other thread computes: then a trace is made as soon as it pays.
        worth_it: calls after which a trace is made, in place of when it pays.
    """

    worth_it: int | None = None

    def __init__(self) -> None:
        self._uses: dict[Any, tuple[int, float]] = {}  # calls without a trace, and their seconds
        self._wanted: dict[Any, tuple[Callable[..., Any], Any, list[Any], list[Tensor]]] = {}
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._asked: set[Any] = set()  # keys for which a trace was tried, or soon is
        self._counted = False
        self.at_once = False

    def call(self, owner: Any, step: Callable[..., Any], *args: Any) -> Any:
        """Call a mapped function, or its trace if there is one for arguments of these shapes.

        ``owner`` is what the function belongs to; kept alive, so that its identity stays its own.
        """
        leaves: list[Tensor] = []
        form: list[Any] = []
        _flat(args, leaves, form)
        shapes = [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves]
        key = (id(owner), *form, *shapes)
        ready = self._ready.get(key)
        if ready is not None:
            return ready(leaves)
        self._counted = True
        began = time.perf_counter()
        result = step(*args)
        uses, seconds = self._uses.get(key, (0, 0.0))
        uses, seconds = uses + 1, seconds + time.perf_counter() - began
        self._uses[key] = uses, seconds
        if key not in self._asked and self._pays(uses, seconds):
            self._asked.add(key)
            self._wanted[key] = (step, owner, form, leaves)
            if self.at_once:
                with unmetered():
                    self._make()
        return result

    def _pays(self, uses: int, seconds: float) -> bool:
        """Say whether a trace, had it been made at first, would have paid for itself by now."""
        if self.worth_it is not None:
            return uses >= self.worth_it
        return seconds >= _TRACE_SECONDS + _TRACE_CALLS * seconds / uses

    @property
    def made(self) -> int:
        """How many traces there are."""
        return len(self._ready)

    def prepare(self) -> bool:
        """Make the traces asked for; say whether there were calls without one since last time."""
        self._make()
        counted, self._counted = self._counted, False
        return counted

    def _make(self) -> None:
        while self._wanted:
            key, wanted = self._wanted.popitem()
            try:
                self._ready[key] = _Trace(*wanted)
            except RuntimeError:  # an operation that cannot be traced: the step stays as it is
                continue


class _Trace:
    """A traced function of leaves, and the phase whose identity is its key."""

    def __init__(
        self, step: Callable[..., Any], owner: Any, form: list[Any], leaves: list[Tensor]
    ) -> None:
        self.owner = owner
        self.form: list[Any] = []

        def flat_step(*flat: Tensor) -> list[Tensor]:
            found: list[Tensor] = []
            self.form.clear()
            _flat(step(*_built(iter(form), iter(flat))), found, self.form)
            return found

        # A trace knows its arguments by identity, and one tensor may stand in two places now (a
        # model that is still the message it came in) that differ at another call.
        apart = [leaf.detach() for leaf in leaves]
        with one_fake_mode():
            traced = make_fx(flat_step)(*apart)
        traced.graph.set_codegen(CodeGen())  # plain arguments
        self.run = thin(traced).forward

    def __call__(self, leaves: list[Tensor]) -> Any:
        return _built(iter(self.form), iter(self.run(*leaves)))


def _flat(value: Any, leaves: list[Tensor], form: list[Any]) -> None:
    """List the leaves of trees, batches and contexts, and the form around them."""
    if isinstance(value, Tensor):
        leaves.append(value)
        form.append(None)
    elif isinstance(value, dict):
        form.append(len(value))
        for name in sorted(value):
            form.append(name)
            _flat(value[name], leaves, form)
    else:
        form.append((type(value), len(value)))
        for part in value:
            _flat(part, leaves, form)


def _built(form: Iterator[Any], leaves: Iterator[Tensor]) -> Any:
    """Put leaves back into their form."""
    kind = next(form)
    if kind is None:
        return next(leaves)
    if isinstance(kind, int):
        return {next(form): _built(form, leaves) for _ in range(kind)}
    make, length = kind
    parts = [_built(form, leaves) for _ in range(length)]
    return make(*parts) if hasattr(make, "_fields") else make(parts)


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: every step frees and allocates the same large blocks.

    By default glibc returns them to the system, and each new one costs page faults.
    """
    if not is_on("allocator") or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
    log_once("allocator", "Freed memory is kept for the rest of the process (mallopt).")
