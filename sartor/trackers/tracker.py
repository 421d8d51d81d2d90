"""What all trackers share, and making one from its name."""

from __future__ import annotations

import importlib
from typing import Any

from sartor.core.errors import ConfigError, MissingExtraError, did_you_mean
from sartor.results.result import Result
from sartor.results.scores import varying
from sartor.results.tables import format_cell, jsonable
from sartor.training.callbacks import Evaluation, Round, Start, scalars

TRACKERS = {
    "tensorboard": "TensorBoard",
    "mlflow": "MLflow",
    "wandb": "WeightsAndBiases",
    "trackio": "Trackio",
}
"""The trackers: the module in this package, and the class in it."""


class Tracker:
    """Turn what a callback receives into the three verbs; a tracker is a subclass with them."""

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        """Begin a run.

        Args:
            run: index of the run.
            name: the method, and what sets this run apart from the others.
            group: the method.
            settings: seed, hyper-parameters, options and the settings that all runs share, flat.
        """

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        """Take the numbers of a run after ``step`` rounds."""

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        """End a run, with its summary or, if training broke off, None."""

    def on_start(self, start: Start) -> None:
        """Open every run."""
        self.count = len(start.runs)
        for run, name in enumerate(labels(start)):
            self.open(run, name, start.method, settings_of(start, run))

    def on_evaluation(self, seen: Evaluation) -> None:
        """Log what the task is measured by, and losses."""
        for run, numbers in enumerate(scalars(seen)):
            self.log(run, numbers, seen.number)

    def on_round(self, seen: Round) -> None:
        """Log costs."""
        for run, numbers in enumerate(scalars(seen)):
            self.log(run, {**numbers, "cost/seconds": seen.seconds}, seen.number)

    def on_end(self, result: Result | None) -> None:
        """Close every run that was opened."""
        for run in range(getattr(self, "count", 0)):
            self.close(run, None if result is None else result.summary(run))
        self.count = 0


def track(words: str) -> Tracker:
    """Make a tracker from its name and where it writes, such as "tensorboard:runs/board".

    Args:
        words: NAME or NAME:PLACE. The place is a folder for tensorboard, a file or a tracking
            address for mlflow, and a project for wandb and trackio.

    Raises:
        ConfigError: there is no such tracker.
        MissingExtraError: its package is not installed.
    """
    name, _, place = words.partition(":")
    if name not in TRACKERS:
        raise ConfigError(f"there is no tracker {name!r}{did_you_mean(name, TRACKERS)}")
    make = getattr(importlib.import_module(f"sartor.trackers.{name}"), TRACKERS[name])
    return make(place) if place else make()


def needed(package: str, owner: str) -> Any:
    """Import an optional package, or raise MissingExtraError with what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"Tracking with {owner} needs the package {package}, which is not installed; run "
            f"pip install {package}, or pip install 'sartor[track]' for TensorBoard."
        ) from error


def labels(start: Start) -> list[str]:
    """Return a name for every run: the method, and the values in which the runs differ."""
    keys = [{**run.options, **run.hyper, "seed": run.seed} for run in start.runs]
    names = varying(keys)
    return [
        " ".join([start.method, *(f"{n}={format_cell(key.get(n))}" for n in names)]) for key in keys
    ]


def settings_of(start: Start, run: int) -> dict[str, Any]:
    """Return the settings of a run as one flat dict of numbers and words."""
    chosen = start.runs[run]
    found = {"method": start.method, "seed": chosen.seed}
    found |= {"rounds": start.rounds, "clients": len(start.clients)}
    parts = {"hyper": chosen.hyper, "options": chosen.options}
    parts |= {name: start.config.get(name) or {} for name in ("local", "participation")}
    for part, values in parts.items():
        found |= {f"{part}/{name}": value for name, value in dict(values).items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in jsonable(found).items()
        if value is not None
    }


def numbers_of(summary: dict[str, Any] | None) -> dict[str, float]:
    """Return what of a summary is a number; what the task is measured by under its name."""
    found = dict(summary or {})
    if "measure" in found:
        found[str(found["measure"]).replace(" ", "_")] = found.pop("pooled_measure", None)
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def finals(summary: dict[str, Any] | None) -> dict[str, float]:
    """Return the numbers of a summary under the names that they have beside those of rounds."""
    return {f"final/{name}": value for name, value in numbers_of(summary).items()}
