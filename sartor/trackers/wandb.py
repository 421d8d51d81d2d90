"""Weights & Biases, offline: runs in a folder; ``wandb sync FOLDER`` sends them."""

from __future__ import annotations

from typing import Any

from sartor.trackers.tracker import Tracker, needed


class WeightsAndBiases(Tracker):
    """Writes one run per run, all of a sweep open at once.

    Args:
        project: its name.
        mode: "offline" keeps everything on this machine; "online" sends it.
        folder: where the files go; None takes what wandb is set to.
    """

    def __init__(
        self, project: str = "sartor", mode: str = "offline", folder: str | None = None
    ) -> None:
        self.wandb: Any = needed("wandb", "Weights & Biases")
        self.project, self.mode, self.folder = project, mode, folder
        self.runs: dict[int, Any] = {}

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        """Make a run beside those that are open."""
        self.runs[run] = self.wandb.init(
            project=self.project,
            name=name,
            group=group,
            config=settings,
            mode=self.mode,
            dir=self.folder,
            reinit="create_new",
        )

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        """Write the numbers of a round."""
        self.runs[run].log(numbers, step=step)

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        """Write the summary and end the run."""
        found = self.runs.pop(run)
        for name, value in (summary or {}).items():
            found.summary[name] = value
        found.finish(exit_code=int(summary is None))
