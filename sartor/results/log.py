"""The log of a simulation: what was measured and spent so far, and how each run ended.

| series | entries | holds |
|---|---|---|
| ``history["pre/test"]`` | one per evaluation | the columns of a tally, (runs, clients) each |
| ``when["pre"]`` | the same | round t for "post", after t rounds for "pre" and "global" |
| ``costs["bytes_up"]`` | one per round | a counter of the ledger, (runs,) |
| ``seconds["train"]`` | one per round | wall time, of all runs together |
| ``once["setup_bytes"]`` | one | what is spent outside of rounds, (runs,) |
| ``snapshots`` | one per evaluation | what the method shows of itself (``Method.inspect``) |
| ``diverged``, ``stopped`` | one per run | where it broke, why it ended early; or None |
| ``post["test"]`` | one | the last scores after local training, also of clients that sat out |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sartor.engines.parts import Receipt, Tally
from sartor.results.metrics import macro
from sartor.results.scores import COUNTERS, ONCE, PHASES, Ledger, Scores


def _each(function: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function(value) for name, value in values.items()}


class Log:
    """What was measured and spent; see the table above. Every run has names of clients."""

    def __init__(self, names: Sequence[Sequence[Any]]) -> None:
        runs = len(names)
        self.names = names
        self.history: dict[str, dict[str, list[np.ndarray]]] = {}
        self.when: dict[str, list[int]] = {}
        self.costs: dict[str, list[np.ndarray]] = {name: [] for name in COUNTERS}
        self.seconds: dict[str, list[float]] = {name: [] for name in PHASES}
        self.once = {name: np.zeros(runs, dtype=np.int64) for name in ONCE}
        self.snapshots: list[dict[str, Any]] = []
        self.diverged: list[dict[str, Any] | None] = [None] * runs
        self.stopped: list[dict[str, Any] | None] = [None] * runs
        self.post: dict[str, Tally] = {}
        self.bytes = np.zeros(runs, dtype=np.int64)  # that travelled in all rounds so far
        self._means: dict[str, tuple[int, np.ndarray, np.ndarray, np.ndarray | None]] = {}
        # Of rounds whose times were not read yet: of the round itself, and of its training.
        self.unread: list[tuple[dict[str, float], dict[str, float]]] = []

    # ---- scores

    def score(self, point: str, t: int, tallies: Mapping[str, Tally]) -> None:
        """Log the scores of an evaluation point by split, and the runs that diverged."""
        self.when.setdefault(point, []).append(t)
        for split, tally in tallies.items():
            series = self.history.setdefault(f"{point}/{split}", {})
            for name, column in tally.columns.items():
                series.setdefault(name, []).append(column.copy())
            broken = ~np.isfinite(tally.loss)
            for run in np.flatnonzero(broken.any(1)).tolist():
                if self.diverged[run] is None and self.stopped[run] is None:
                    client = self.names[run][int(np.argmax(broken[run]))]
                    at = t if point == "post" else max(t - 1, 0)
                    self.diverged[run] = {"round": at, "client": client}

    def start_post(self, tallies: Mapping[str, Tally]) -> None:
        """Let the scores after local training begin with those of the initial models."""
        self.post = {s: Tally(**_each(np.copy, t.columns)) for s, t in tallies.items()}

    def update_post(self, split: str, new: Tally) -> None:
        """Take the new scores after local training where there are any.

        A client that did not train still has its last model.
        """
        fresh, old = ~np.isnan(new.correct), self.post[split].columns
        self.post[split] = Tally(
            **{name: np.where(fresh, now, old[name]) for name, now in new.columns.items()}
        )

    def scored(self, point: str, round_index: int) -> bool:
        """Whether the models of a point were scored after ``round_index`` rounds."""
        seen = self.when.get(point, [])
        return bool(seen) and seen[-1] == round_index - (point == "post")

    def scores(
        self, answers: Callable[[str], tuple[np.ndarray, int]]
    ) -> dict[tuple[str, str], Scores]:
        """Return all scores by (point, split).

        For a split, ``answers`` returns the (runs, clients) answers that are scored, and how many
        of them the loss of a sample is the mean of.
        """
        found = {}
        for name, series in self.history.items():
            point, split = name.split("/")
            count, weight = answers(split)
            found[point, split] = Scores(
                rounds=list(self.when[point]),
                correct=np.stack(series["correct"], 1),
                loss=weight * np.stack(series["loss"], 1),
                count=count,
                measured=np.stack(series["measured"], 1) if "measured" in series else None,
            )
        return found

    def means(
        self, name: str, answers: Callable[[str], tuple[np.ndarray, int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return shares of right answers, mean losses and the mean measure at the end of a series.

        They are (runs,) each, asked for after every round, and computed when there is a new entry.
        """
        series = self.history[name]
        number = len(series["loss"])
        if self._means.get(name, (0,))[0] != number:
            count, weight = answers(name.split("/")[1])
            sizes = np.maximum(count.sum(1), 1)
            right, loss = (series[kind][-1].sum(1) / sizes for kind in ("correct", "loss"))
            measured = macro(series["measured"][-1]) if "measured" in series else None
            self._means[name] = (number, right, weight * loss, measured)
        return self._means[name][1:]

    # ---- costs

    def spend_round(self, receipt: Receipt) -> None:
        """Log the counted costs of a round."""
        self.bytes += receipt.bytes_up + receipt.bytes_down
        for name in COUNTERS:
            self.costs[name].append(getattr(receipt, name))

    def recount(self) -> None:
        """Forget what was computed from entries that have changed since."""
        rows = [row for name in ("bytes_up", "bytes_down") for row in self.costs[name]]
        self.bytes = np.sum([np.zeros_like(self.bytes), *rows], 0)
        self._means.clear()

    def spend_once(self, receipt: Receipt) -> None:
        """Log the counted costs of what happens once: prologue, epilogue, adaptation."""
        self.once["setup_bytes"] += receipt.bytes_down + receipt.bytes_up
        self.once["setup_gradients"] += receipt.gradient_evaluations
        self.once["setup_forward"] += receipt.forward_evaluations

    def time_round(self, own: dict[str, float], trained: dict[str, float]) -> None:
        """Log the times of a round.

        Args:
            own: of the whole round and of what is not in ``trained``.
            trained: of its training; on a GPU they are known only when the clocks are read.
        """
        for name, value in own.items():
            self.seconds[name].append(value)
        self.unread.append((own, trained))

    def time_once(self, seconds: Mapping[str, float]) -> None:
        """Add times to those of the last round."""
        for name, value in seconds.items():
            self.seconds[name][-1] += value

    def take_clocks(self) -> None:
        """Log the times of the rounds since the device was last read.

        Between two readings a GPU works on while later rounds are prepared, so that only the time
        of all of them together is known; each gets an equal share.
        """
        first = len(self.seconds["round"]) - len(self.unread)
        for at, (own, trained) in enumerate(self.unread, first):
            for name in PHASES[1:]:
                self.seconds[name][at] = own[name] + trained.get(name, 0.0)
        walls = self.seconds["round"]
        if self.unread:
            walls[first:] = [sum(walls[first:]) / len(self.unread)] * len(self.unread)
        self.unread.clear()

    def ledger(self) -> Ledger:
        """Return the counted costs so far."""
        runs = len(self.names)
        columns = {
            name: np.stack(rows, 1) if rows else np.zeros((runs, 0), dtype=np.int64)
            for name, rows in self.costs.items()
        }
        return Ledger(**columns, seconds=_each(list, self.seconds), **_each(np.copy, self.once))

    def end_run(self, run: int, last: int, used: int) -> None:
        """Let the records of a run end after round ``last``, with the models of round ``used``."""
        for name, series in self.history.items():
            point = name.split("/")[0]
            times = [t + (point == "post") for t in self.when[point]]  # rounds before an entry
            for values in series.values():
                source = values[times.index(used)][run].copy()
                for k, t in enumerate(times):
                    if t >= last:
                        values[k][run] = source
        chosen = next((snap for snap in self.snapshots if snap["round"] == used), None)
        for snap in self.snapshots if chosen is not None else ():
            for key in snap.keys() - {"round"} if snap["round"] >= last else ():
                snap[key][run] = chosen[key][run].copy()  # type: ignore[index]
        for rows in self.costs.values():
            for row in rows[last:]:
                row[run] = 0
        self.recount()

    # ---- checkpoints

    def dump(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint must hold: nested arrays, and JSON-able values."""
        arrays: dict[str, Any] = {
            "history": {name: _each(np.stack, series) for name, series in self.history.items()},
            "books": {name: np.stack(rows) for name, rows in self.costs.items() if rows},
            "post": {s: t.columns for s, t in self.post.items()},
            "once": _each(np.copy, self.once),
            "snapshots": {
                f"{k:06d}": {name: value for name, value in snap.items() if name != "round"}
                for k, snap in enumerate(self.snapshots)
            },
        }
        meta = {
            "when": _each(list, self.when),
            "seconds": _each(list, self.seconds),
            "diverged": list(self.diverged),
            "stopped": list(self.stopped),
            "snapshots": [snap["round"] for snap in self.snapshots],
        }
        return arrays, meta

    def load(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.history = {name: _each(list, series) for name, series in arrays["history"].items()}
        self.costs = {name: list(arrays["books"].get(name, [])) for name in COUNTERS}
        self.recount()
        self.post = {s: Tally(**columns) for s, columns in arrays.get("post", {}).items()}
        self.once = _each(np.copy, arrays["once"])
        self.when, self.seconds = _each(list, meta["when"]), _each(list, meta["seconds"])
        self.diverged = list(meta["diverged"])
        self.stopped = list(meta.get("stopped", self.stopped))
        snaps = arrays.get("snapshots", {})
        self.snapshots = [
            {"round": t, **snaps[f"{k:06d}"]} for k, t in enumerate(meta["snapshots"])
        ]
