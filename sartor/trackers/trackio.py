"""Trackio: runs in a local database; look at them with ``trackio show``."""

from __future__ import annotations

from typing import Any

from sartor.trackers.tracker import Tracker, finals, needed


class Trackio(Tracker):
    """Writes one run per run. Trackio has one run open at a time: a sweep is written at its end.

    Args:
        project: its name.
    """

    def __init__(self, project: str = "sartor") -> None:
        self.trackio: Any = needed("trackio", "Trackio")
        self.project = project
        self.live: Any = None
        self.waiting: dict[int, tuple[dict[str, Any], list[tuple[dict[str, float], int]]]] = {}

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        """Make a run, or remember how to."""
        words: dict[str, Any] = {"project": self.project, "name": name, "group": group}
        words |= {"config": settings, "embed": False}
        if self.count == 1:
            self.live = self.trackio.init(**words)
        else:
            self.waiting[run] = (words, [])

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        """Write the numbers of a round, or keep them for the end."""
        if self.live is not None:
            self.live.log(numbers, step=step)
        else:
            self.waiting[run][1].append((numbers, step))

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        """Write what is kept and the summary, and end the run."""
        if run in self.waiting:
            words, kept = self.waiting.pop(run)
            self.live = self.trackio.init(**words)
            for numbers, step in kept:
                self.live.log(numbers, step=step)
        if summary is not None:
            self.live.log(finals(summary), step=int(summary["rounds"]))
        self.live.finish()
        self.live = None
