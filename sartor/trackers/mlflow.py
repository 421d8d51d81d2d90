"""MLflow: runs in a tracking store, by default ``mlflow.db``; look with ``mlflow ui``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sartor.trackers.tracker import Tracker, finals, needed


class MLflow(Tracker):
    """Writes runs to a tracking store, without touching the run that a caller may have open.

    Args:
        address: the tracking address, such as ``sqlite:///runs.db`` or that of a server; a plain
            path is a database in that file. None takes what MLflow is set to.
        experiment: its name in MLflow.
    """

    def __init__(self, address: str | None = None, experiment: str = "sartor") -> None:
        mlflow = needed("mlflow", "MLflow")
        if address is not None and ":" not in address:
            Path(address).parent.mkdir(parents=True, exist_ok=True)
            address = f"sqlite:///{Path(address).absolute()}"
        self.client: Any = mlflow.MlflowClient(tracking_uri=address)
        self.entities: Any = mlflow.entities
        self.experiment = experiment
        self.ids: dict[int, str] = {}

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        """Make a run with its settings as parameters."""
        known = self.client.get_experiment_by_name(self.experiment)
        home = known.experiment_id if known else self.client.create_experiment(self.experiment)
        tags = {"mlflow.runName": name, "method": group}
        self.ids[run] = self.client.create_run(home, tags=tags).info.run_id
        params = [self.entities.Param(key, str(value)) for key, value in settings.items()]
        self.client.log_batch(self.ids[run], params=params)

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        """Write the numbers of a round."""
        now = int(1000 * time.time())
        values = [self.entities.Metric(key, value, now, step) for key, value in numbers.items()]
        self.client.log_batch(self.ids[run], metrics=values)

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        """Write the summary, and say how the run ended."""
        if summary:
            self.log(run, finals(summary), int(summary["rounds"]))
        self.client.set_terminated(self.ids.pop(run), "FAILED" if summary is None else "FINISHED")
