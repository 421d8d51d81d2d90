"""Ctrl-C: noticed wherever it falls, told in one message, and always the same exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Ctrl-C during work; the message says what is kept and how to go on."""


_asked = threading.Event()


def is_asked() -> bool:
    """Tell whether Ctrl-C was pressed since :func:`watched` began."""
    return _asked.is_set()


@contextmanager
def watched() -> Iterator[None]:
    """Remember Ctrl-C while a command runs.

    A KeyboardInterrupt that falls into native code, or into an import that is half done, can come
    back as another error; the memory tells such an error from a bug.
    """
    earlier = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler; a handler that a host program set is left alone.
    mine = (
        threading.current_thread() is threading.main_thread()
        and earlier is signal.default_int_handler
    )
    if mine:
        _asked.clear()
        signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, earlier)
            _asked.clear()


def _note(number: int, frame: FrameType | None) -> None:
    _asked.set()
    signal.default_int_handler(number, frame)


@contextmanager
def stoppable(message: str) -> Iterator[None]:
    """Turn Ctrl-C, and whatever it became on its way up, into :class:`Interrupted`."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None
    except Exception as error:
        if not is_asked():
            raise
        raise Interrupted(message) from error
