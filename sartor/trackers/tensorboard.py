"""TensorBoard: event files in a folder; look at them with ``tensorboard --logdir FOLDER``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sartor.runs import slug
from sartor.trackers.tracker import Tracker, needed


class TensorBoard(Tracker):
    """Writes one folder of event files per run.

    Args:
        folder: where; each run gets a folder of its name inside.
    """

    def __init__(self, folder: str | Path = "runs/tensorboard") -> None:
        needed("tensorboard", "TensorBoard")
        self.folder = Path(folder)
        self.writers: dict[int, Any] = {}

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        """Make the writer of a run, and show its settings as text."""
        from torch.utils.tensorboard import SummaryWriter

        self.writers[run] = SummaryWriter(str(self.folder / slug(name)))
        rows = "".join(f"\n| {key} | {value} |" for key, value in settings.items())
        self.writers[run].add_text("settings", f"| setting | value |\n|---|---|{rows}")

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        """Write the numbers of a round."""
        for name, value in numbers.items():
            self.writers[run].add_scalar(name, value, step)

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        """Close the file."""
        self.writers.pop(run).close()
