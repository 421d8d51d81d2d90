"""Ctrl-C: noticed anywhere, reported in one message, with one exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Ctrl-C during work; the message says what is kept and how to resume."""


_asked = threading.Event()


def is_asked() -> bool:
    """Say whether Ctrl-C was pressed since :func:`watched` began."""
    return _asked.is_set()


@contextmanager
def watched() -> Iterator[None]:
    """Remember Ctrl-C while a command runs.

    A KeyboardInterrupt in native code, or in an unfinished import, can come back as another error;
    what is remembered distinguishes such an error from a bug.
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
