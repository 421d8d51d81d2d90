"""Progress: a live bar on a terminal or in a notebook, plain lines on stderr elsewhere.

All show the round, the accuracy (or error), the bytes sent so far and the time left.
"""

from __future__ import annotations

import html
import importlib
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sartor.results.headline import SHARES

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """What shows how far a long training is."""

    def start(self, total_rounds: int, description: str) -> None:
        """Begin a run of ``total_rounds`` rounds."""

    def update(self, round_index: int, info: dict[str, Any]) -> None:
        """Show round ``round_index``, from 0: its measure and value, bytes, seconds, runs."""

    def stop(self) -> None:
        """End, also after an error."""


def reporter(*, plain: bool) -> Progress:
    """Return the reporter for this place: live where it can be, unless ``plain`` is asked for."""
    if not plain and in_notebook():
        return NotebookBar()
    return PlainLines() if plain or not sys.stderr.isatty() else LiveBar()


def shown(progress: Progress | bool | None) -> Progress | None:
    """Return what shows progress; True takes what suits a terminal, a notebook or a file."""
    return reporter(plain=False) if progress is True else progress or None


def in_notebook() -> bool:
    """Say whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def in_words(info: Mapping[str, Any]) -> str:
    """Say the figures of a round: what the task is measured by, mean over the runs, and megabytes.

    >>> in_words({"accuracy": 0.931, "bytes": 2_500_000})
    'accuracy 93.1%  2.5 MB'
    >>> in_words({"measure": "RMSE", "value": 26.4321})
    'RMSE 26.43'
    """
    words = []
    name = info.get("measure", "accuracy")
    value = info.get("value", info.get("accuracy"))
    if value is not None and np.size(value):
        mean = float(np.mean(np.asarray(value, dtype=float)))
        text = f"{100 * mean:.1f}%" if name in SHARES else f"{mean:.4g}"
        words.append(f"{name} {text if math.isfinite(mean) else '–'}")
    if info.get("bytes") is not None:
        words.append(f"{float(np.mean(np.asarray(info['bytes'], dtype=float))) / 1e6:.1f} MB")
    return "  ".join(words)


class _Reporter:
    """What all reporters share: the run that is shown, and the figures known so far."""

    def start(self, total_rounds: int, description: str) -> None:
        self.total, self.description, self.began = total_rounds, description, time.monotonic()
        self.first: int | None = None
        self.known: dict[str, Any] = {}
        self.open()

    def update(self, round_index: int, info: Mapping[str, Any]) -> None:
        self.known.update({k: v for k, v in info.items() if v is not None})
        self.draw(round_index + 1, in_words(self.known))

    def stop(self) -> None:
        """End the run; what was shown stays."""

    def open(self) -> None:
        """Show that a run begins."""

    def draw(self, done: int, words: str) -> None:
        """Show that ``done`` rounds are done, with the figures of the last."""


class PlainLines(_Reporter):
    """A line for the first round, the last, and about every tenth part between."""

    def draw(self, done: int, words: str) -> None:
        """Print a line, if one is due."""
        begun, self.first = self.first is not None, self.first or done
        if not begun or done == self.total or done % max(1, self.total // 10) == 0:
            spent = time.monotonic() - self.began
            left = spent / (done - self.first + 1) * (self.total - done)
            text = f"{self.description}  round {done}/{self.total}  {words}  {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)


class NotebookBar(_Reporter):
    """One line of HTML a method, updated in place; it takes the colours of the page."""

    def open(self) -> None:
        """Display the line."""
        shown = importlib.import_module("IPython.display")  # there, or this is no notebook
        self.html = shown.HTML
        self.handle = shown.display(self.html(self._line(0, "starting")), display_id=True)

    def draw(self, done: int, words: str) -> None:
        """Update the line."""
        if self.handle is not None:
            self.handle.update(self.html(self._line(done, words)))

    def _line(self, done: int, words: str) -> str:
        spent = time.monotonic() - self.began
        return (
            f"<div>{html.escape(self.description)} <progress value='{done}' max='{self.total}'>"
            f"</progress> round {done}/{self.total} {html.escape(words)} {spent:.0f} s</div>"
        )


class LiveBar(_Reporter):
    """One bar a method, redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.bar: Any = None

    def open(self) -> None:
        """Draw the bar."""
        from rich import progress  # here, so that training without a terminal does not need it
        from rich.console import Console

        self.bar = progress.Progress(
            progress.TextColumn("{task.description:<10}"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            progress.TextColumn("{task.fields[words]}"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console or Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task(self.description, total=self.total, words="starting")

    def draw(self, done: int, words: str) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=done, words=words)

    def stop(self) -> None:
        """End the run; the finished bar stays on the screen."""
        if self.bar is not None:
            self.bar.stop()
