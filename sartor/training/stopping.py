"""Early stopping on validation data: when to stop each run, and with which models.

A run stops when its measure on the validation samples of all clients, at the method's headline
point, has not improved by more than ``min_delta`` for ``patience`` evaluations in a row. Every run
of a sweep has its own verdict. All runs train in one pass, which lasts until the last has stopped;
the state of a run that stopped is put aside in the round of its verdict and put back at the end, so
that its row is the one that it would have alone.

| what | of a run that stopped after s rounds |
|---|---|
| models | those after s rounds; with ``restore``, those of the best evaluation |
| scores | entries from s on repeat those of the models it ends with |
| costs | nothing after s rounds |
| ``result.stopped[run]`` | {"round": s, "best_round": ..., "why": ...} |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError, refuse
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.results.headline import HEADLINE_METRICS, WORDS, HeadlineMetric, chosen_metric

_ARRAYS = ("best", "best_round", "waited", "stopped", "kept_round")


@dataclass(frozen=True)
class EarlyStopping:
    """When to stop before the planned rounds are over.

    Attributes:
        patience: evaluations in a row without improvement; the run stops at the last of them.
            With ``eval_every=k`` an evaluation is every k rounds.
        min_delta: an improvement is larger than this.
        min_share: and larger than this share of the best value so far.
        measure: "loss" (mean over all validation samples, smaller is better), "accuracy", or what
            ``fit`` is given as its measure, such as "auroc". None is that measure, else the loss.
        restore: end with the models of the best evaluation, whether the run stopped early or not.
            That takes a second copy of all states in memory.
    """

    patience: int = 5
    min_delta: float = 0.0
    measure: str | None = None
    restore: bool = False
    min_share: float = 0.0

    later: ClassVar[dict[str, Any]] = {"min_share": 0.0}

    def __post_init__(self) -> None:
        """Refuse what cannot be right."""
        faults = []
        whole = isinstance(self.patience, int) and not isinstance(self.patience, bool)
        if not whole or self.patience < 1:
            faults.append(f"patience must be a whole number >= 1, got {self.patience!r}.")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            faults.append(f"min_delta must be >= 0, got {self.min_delta!r}.")
        if not 0 <= self.min_share < 1:
            faults.append(f"min_share must be >= 0 and < 1, got {self.min_share!r}.")
        if self.measure not in (None, *WORDS):
            faults.append(f"measure must be one of {', '.join(WORDS)}, got {self.measure!r}.")
        refuse(faults)

    @classmethod
    def parse(cls, given: EarlyStopping | int | None) -> EarlyStopping | None:
        """Read a whole number as the patience."""
        return given if given is None or isinstance(given, cls) else cls(patience=given)  # type: ignore[arg-type]


class Watch:
    """The verdicts on all runs so far, and the states that were put aside.

    Attributes:
        best: (runs,) the best value, as a loss.
        best_round: (runs,) after how many rounds it was reached; −1 before the first evaluation.
        waited: (runs,) evaluations since then.
        stopped: (runs,) the rounds after which the run stopped, or −1.
        kept: the states that were put aside, (runs, ...) each, or None.
        kept_round: (runs,) the round of each, or −1.
    """

    def __init__(self, rule: EarlyStopping, runs: int, metric: HeadlineMetric) -> None:
        self.rule, self.metric = rule, metric
        self.best = np.full(runs, np.inf)
        self.best_round, self.stopped, self.kept_round = (np.full(runs, -1) for _ in range(3))
        self.waited = np.zeros(runs, dtype=np.int64)
        self.kept: Tree | None = None
        self.settled = False

    def look(self, t: int, values: np.ndarray, lost: np.ndarray, state: Callable[[], Tree]) -> bool:
        """Take in an evaluation and say whether no run is left to train.

        Args:
            t: rounds so far.
            values: (runs,) the measure.
            lost: (runs,) true for runs that diverged, which have no result.
            state: returns what to put aside, (runs, ...) each.
        """
        values = -self.metric.sign * np.asarray(values, dtype=np.float64)
        live = (self.stopped < 0) & ~lost
        known = np.where(np.isfinite(self.best), np.abs(self.best), 0.0)
        least = np.maximum(self.rule.min_delta, self.rule.min_share * known)
        better = live & (values < self.best - least)
        self.best = np.where(better, values, self.best)
        self.best_round = np.where(better, t, self.best_round)
        self.waited = np.where(better, 0, self.waited + live)
        ends = live & (self.waited >= self.rule.patience)
        self.stopped = np.where(ends, t, self.stopped)
        over = bool(np.all((self.stopped >= 0) | lost))
        aside = better if self.rule.restore else ends & (not over)
        if aside.any():
            self._keep(aside, t, state())
        return over

    def _keep(self, runs: np.ndarray, t: int, now: Tree) -> None:
        self.kept_round = np.where(runs, t, self.kept_round)
        mask = torch.from_numpy(runs)
        if self.kept is None or runs.all():
            self.kept = tree.map(torch.clone, now)
            return
        self.kept = tree.map(
            lambda new, old: torch.where(per_run(mask, new), new, old), now, self.kept
        )

    def verdicts(self) -> list[dict[str, Any] | None]:
        """Return for every run why it stopped, after which round, and its best one; or None."""
        many = f"{self.rule.patience} evaluation{'s' * (self.rule.patience > 1)}"
        share = f" by {self.rule.min_share:.0%}" if self.rule.min_share else ""
        why = f"validation {self.metric.name} has not improved{share} for {many}"
        pairs = zip(self.stopped.tolist(), self.best_round.tolist(), strict=True)
        return [None if s < 0 else {"round": s, "best_round": b, "why": why} for s, b in pairs]

    def ends(self, rounds: int) -> list[tuple[int, int]]:
        """Return for every run (its last round, the round of the models it ends with)."""
        last = np.where(self.stopped >= 0, self.stopped, rounds)
        kept = self.kept_round >= 0
        return list(zip(last.tolist(), np.where(kept, self.kept_round, last).tolist(), strict=True))

    def dump(self) -> tuple[Tree, dict[str, np.ndarray]]:
        """Return what a checkpoint must hold: the states put aside, and the verdicts."""
        arrays = {name: np.asarray(getattr(self, name)).copy() for name in _ARRAYS}
        return self.kept or {}, arrays | {"settled": np.asarray([self.settled], dtype=np.int64)}

    def load(self, kept: Tree, arrays: dict[str, np.ndarray], device: torch.device) -> None:
        """Take a checkpoint back."""
        for name in _ARRAYS:
            setattr(self, name, np.asarray(arrays[name]).copy())
        self.settled = bool(arrays["settled"][0])
        self.kept = tree.map(lambda leaf: leaf.to(device), kept) if kept else None


def watch_over(
    rule: EarlyStopping, runs: int, splits: Sequence[str], task: Task, measure: str | None = None
) -> Watch:
    """Make what decides when to stop, from the splits in which some client has samples.

    Raises:
        ConfigError: there is nothing to judge by.
    """
    if "val" not in splits:
        raise ConfigError(
            "Early stopping needs validation data, but no client has any; hold some out, "
            "for example with val=0.2 when the federation is made."
        )
    word = rule.measure or measure or "loss"
    metric = watched_metric(word, task.measured_as, measure)
    return Watch(rule, runs, metric)


def watched_metric(word: str, task: str | None, measure: str | None) -> HeadlineMetric:
    """Return the metric that validation data are judged by; a ConfigError says what is missing."""
    if word == "accuracy" and HEADLINE_METRICS[task].is_share:
        return HEADLINE_METRICS[task]  # also where it has a name of its own
    if word == "accuracy":
        raise ConfigError(
            "There is no right or wrong in this task, so nothing can be judged by its accuracy; "
            "use measure='loss'."
        )
    metric = chosen_metric(task, word)
    if metric.function is not None and word != measure:
        raise ConfigError(
            f"To judge by {word!r} on validation data, training must record it: give fit, search "
            f"or the command measure={word!r} too."
        )
    return metric


def per_run(mask: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return one value per run in the shape of a leaf, (runs, ...)."""
    return mask.to(leaf.device).reshape(-1, *(1,) * (leaf.dim() - 1))
