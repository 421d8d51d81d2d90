"""Blocks of lanes in processes of their own: each core works without waiting for Python's lock.

A step of a small network is some hundred short operations, and Python's lock is held between them:
two threads of one process take half as long again for a step as two processes do. So on Linux the
blocks of a round are worked by children of this process, made for the round by ``fork``. A child
has everything there was before, unread pages of memory included, so nothing is sent to it; what it
leaves behind it writes into a file in memory, and the parent reads it there.

What may go wrong, and what then happens:

- A child fails, is killed (memory), or leaves something that cannot be handed over: its blocks are
  done again here. Draws depend on seed, round and client alone, so the same numbers come out, or
  the same error, now where it can be seen.
- Ctrl-C, or an error here: children do not hear it; the parent ends them and waits for them. If the
  parent dies, so do they (``PR_SET_PDEATHSIG``).
- Locks: a thread that holds one while the process forks leaves it locked in the child. Hence no
  fork beside threads that are not known to be idle, where a GPU is about, or in a sharded run; and
  a child computes with one thread, since the threads of OpenMP do not survive a fork.

A program asks for it with ``sartor.accelerate("fork")``; otherwise blocks run in threads, with the
same numbers.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from sartor.engines.cpu.acceleration import is_on
from sartor.engines.cpu.handover import Pen, decoded, words_in

_TOKEN = struct.Struct("<I")
_TOKENS = 1024  # at most: a pipe holds that many without being read
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_IDLE_THREADS = ("rich.", "tqdm.")  # draw a bar now and then, and share no lock with our work
BLOCK_THREADS = "sartor-block"
"""How the names of our own threads begin."""


class Target(Protocol):
    """Something that blocks of lanes write to."""

    def put(self, *values: Any) -> None:
        """Take what a block left: arrays and trees."""


def why_not() -> str | None:
    """Say why this process cannot fork now; None if it can."""
    if not sys.platform.startswith("linux"):
        return "only on Linux"
    if not is_on("fork"):
        return "off; sartor.accelerate() asks for them"
    if _has_gpu():  # PyTorch's gradients have threads for it, and stop after a fork
        return "a GPU is about"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a sharded run has processes of its own"
    here = threading.current_thread()
    for thread in threading.enumerate():
        known = thread.name.startswith(BLOCK_THREADS)
        if thread is not here and not known and not _is_idle(thread):
            return f"thread {thread.name!r} may hold a lock"
    return None


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _is_idle(thread: threading.Thread) -> bool:
    return type(thread).__module__.startswith(_IDLE_THREADS)


@dataclass
class Outcome:
    """What came of forking.

    Attributes:
        results: of every block, in order.
        cost: seconds that making the children took.
        is_sound: whether all children could be made, and handed over all that they took.
    """

    results: list[Any]
    cost: float
    is_sound: bool


def work_in_processes(
    work: Callable[[Any], Any],
    blocks: Sequence[Any],
    processes: int,
    into: Sequence[Target] = (),
) -> Outcome:
    """Apply ``work`` to every block: in this process, and in children of it.

    Each takes the next block when it is done with one, so blocks with most work should come first.

    Args:
        work: returns tensors, arrays, numbers and words, in dicts, tuples and lists.
        blocks: its arguments.
        processes: how many, this one included.
        into: what ``work`` writes to by ``put``, and only so; what children put is put here, in
            the order of blocks.
    """
    source = _tokens(len(blocks))
    children: list[_Child] = []
    found: dict[int, tuple[Any, list[Any]]] = {}
    refused = False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there may be none, or a closed one
            stream.flush()  # so that no child can say again what was said here
    try:
        with _uninterrupted():  # a child that nobody knows of could not be ended
            for _ in range(processes - 1):
                try:
                    children.append(_Child(work, blocks, source, into))
                except OSError:  # no memory, or as many processes as may be: then fewer do
                    refused = True
        cost = time.perf_counter() - began
        for index in _taken(source, len(blocks)):
            found[index] = work(blocks[index]), []
        for child in children:
            found |= child.done()
        missing = [index for index in range(len(blocks)) if index not in found]
        for index in missing:
            found[index] = work(blocks[index]), []
    finally:
        with _uninterrupted():
            for child in children:
                child.end()
        os.close(source)
        torch.set_num_threads(threads)
    for index in sorted(found):
        for target, values in found[index][1]:
            into[target].put(*values)
    results = [found[index][0] for index in range(len(blocks))]
    return Outcome(results, cost, not (missing or refused))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals wait."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class _Child:
    """A process that works on blocks, and the file in memory where it leaves what it found."""

    def __init__(
        self,
        work: Callable[[Any], Any],
        blocks: Sequence[Any],
        source: int,
        into: Sequence[Target],
    ) -> None:
        self.file = os.memfd_create("sartor-blocks")
        self.pid = 0
        parent = os.getpid()
        stop = ctypes.CDLL(None).prctl
        try:
            with warnings.catch_warnings():
                # Python warns of locks that other threads may hold; see `why_not`.
                warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                stop(_DEATH_OF_PARENT, signal.SIGKILL)
                _live(parent, self.file, work, blocks, source, into)
        except BaseException:
            os.close(self.file)
            raise

    def done(self) -> dict[int, tuple[Any, list[Any]]]:
        """Wait for the child, and return the result and the writes of each block that it did."""
        if self._wait() != 0:
            return {}
        return {
            index: (decoded(self.file, result), decoded(self.file, writes))
            for index, result, writes in words_in(self.file)
        }

    def end(self) -> None:
        """Leave nothing of the child behind, whatever it is doing."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait()
        os.close(self.file)

    def _wait(self) -> int | None:
        """Wait for the end of the child; returns its exit code, None if nobody knows it."""
        try:
            _, status = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the host program collects its children by itself
            code = None
        self.pid = 0
        return code


def _live(
    parent: int,
    file: int,
    work: Callable[[Any], Any],
    blocks: Sequence[Any],
    source: int,
    into: Sequence[Target],
) -> None:
    """Be a child: work, write down what came of it, and end without a trace of the parent's."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        torch.set_num_threads(1)
        gc.freeze()  # what the parent made is the parent's to collect: looking at it copies it
        if os.getppid() == parent:
            _work_on(file, work, blocks, source, into)
            code = 0
    finally:
        os._exit(code)


def _work_on(
    file: int,
    work: Callable[[Any], Any],
    blocks: Sequence[Any],
    source: int,
    into: Sequence[Target],
) -> None:
    pen = Pen(file)
    writes: list[Any] = []
    for number, target in enumerate(into):
        target.put = _Noted(number, writes)  # type: ignore[method-assign]
    listed = []
    taken = _taken(source, len(blocks))
    for index in taken:
        try:
            result = work(blocks[index])
            listed.append((index, pen.encoded(result), pen.encoded(writes)))
        except Exception:  # the parent meets it again, where it can be seen
            for _ in taken:  # and soon: nobody begins another block
                pass
        writes.clear()
    pen.close(listed)


class _Noted:
    """Stands in for the ``put`` of a target in a child."""

    def __init__(self, number: int, writes: list[Any]) -> None:
        self.number, self.writes = number, writes

    def __call__(self, *values: Any) -> None:
        self.writes.append((self.number, values))


# ---- who takes which block -------------------------------------------------------------------


def _tokens(blocks: int) -> int:
    """Return the reading end of a pipe with one token for a few blocks each."""
    source, sink = os.pipe()
    size = _per_token(blocks)
    os.write(sink, b"".join(_TOKEN.pack(first) for first in range(0, blocks, size)))
    os.close(sink)
    return source


def _per_token(blocks: int) -> int:
    return max(1, -(-blocks // _TOKENS))


def _taken(source: int, blocks: int) -> Iterator[int]:
    """Take tokens as long as there are some, and yield the numbers of their blocks."""
    while token := os.read(source, _TOKEN.size):
        (first,) = _TOKEN.unpack(token)
        yield from range(first, min(first + _per_token(blocks), blocks))
