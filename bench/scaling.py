"""Measure how the time of a round grows with the cohort, the population, the network and the data.

    python -m bench.scaling [cohort population network data] [--json FILE] [--html FILE]

Simulated clients with 64 features and 10 classes, FedAvg, batch 10, one local epoch. One size is
changed at a time; the others stay at 10,000 clients (1,000 for `network` and `data`) of 10 samples,
cohorts of 100, and multinomial regression. The clients are evaluated in the last round only, which
is not timed, because an evaluation of all clients grows with the population anyway.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sartor
from bench import results
from sartor.data import Federation, Ragged

FEATURES, CLASSES = 64, 10
CURVES: dict[str, list[int]] = {
    "cohort": [10, 100, 1_000, 10_000],
    "population": [100, 1_000, 10_000, 100_000, 1_000_000],
    "network": [10, 100, 1_000, 10_000],
    "data": [10, 100, 1_000, 10_000],
}
MEANING = {
    "cohort": "clients that train in a round",
    "population": "registered clients",
    "network": "hidden units",
    "data": "samples of a client",
}


def made_up(clients: int, samples: int) -> Federation:
    """Make equal clients that share at most 100,000 samples, so that memory stays small."""
    rng = torch.Generator().manual_seed(0)
    pool = min(clients * (samples + 1), 100_000)
    x = torch.randn(pool, FEATURES, generator=rng)
    y = torch.randint(0, CLASSES, (pool,), generator=rng)
    rows = torch.arange(clients * (samples + 1)).reshape(clients, -1) % pool
    train = Ragged(rows[:, :-1].reshape(-1), torch.arange(clients + 1) * samples)
    test = Ragged(rows[:, -1].clone(), torch.arange(clients + 1))
    empty = Ragged(rows.new_zeros(0), torch.zeros(clients + 1, dtype=torch.int64))
    names = tuple(f"client{i}" for i in range(clients))
    return Federation(x, y, train, empty, test, names, CLASSES)


class Watch:
    """A timer of the rounds between the third and the last, which evaluates all clients.

    A GPU still computes while the host prepares the next round, so only the mean of those rounds is
    known there: from the end of the third on the device to the end of the last but one.
    """

    def __init__(self, rounds: int) -> None:
        self.ends: list[float] = []
        self.rounds, self.queued = rounds, torch.cuda.is_available()

    def start(self, total_rounds: int, description: str) -> None:
        """Do nothing."""

    def update(self, round_index: int, info: dict[str, Any]) -> None:
        """Record the end of a round."""
        if self.queued and len(self.ends) + 1 in (3, self.rounds - 1):
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def stop(self) -> None:
        """Do nothing."""

    def middle(self) -> list[float]:
        """Return the seconds of the timed rounds."""
        times = np.diff(self.ends[2:-1]).tolist()
        return [float(np.mean(times))] * len(times) if self.queued else times


def seconds(what: str, value: int, rounds: int) -> dict[str, Any]:
    """Time rounds with one size changed."""
    many = what in ("cohort", "population")
    clients = value if what == "population" else 10_000 if many else 1_000
    fed = made_up(clients, value if what == "data" else 10)
    hidden = value if what == "network" else None
    model = sartor.models.dnn(fed, hidden=hidden) if hidden else sartor.models.mclr(fed)
    began, watch = time.perf_counter(), Watch(rounds)
    sartor.fit(
        "fedavg",
        fed,
        model=model,
        rounds=rounds,
        local=sartor.Local(epochs=1, batch=10, lr=0.1),
        participation=min(value if what == "cohort" else 100, clients),
        points=("pre",),
        eval_every=rounds,
        progress=watch,
    )
    middle = watch.middle()
    return {
        "what": what,
        "value": value,
        "seconds": float(np.median(middle)),
        "fastest": min(middle),
        "slowest": max(middle),
        "in all": time.perf_counter() - began,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["what"] for row in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.1 * len(kinds), 2.8), sharey=True)
    for axis, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        mine = [row for row in rows if row["what"] == kind]
        axis.loglog([r["value"] for r in mine], [1e3 * r["seconds"] for r in mine], "o-")
        axis.set_xlabel(MEANING[kind])
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("milliseconds a round")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description="Measure the seconds of a round against size.")
    parser.add_argument("what", nargs="*", choices=[*CURVES, []], default=[])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--png", type=Path)
    results.add_outputs(parser)
    args = parser.parse_args()
    rows = []
    for what in args.what or CURVES:
        for value in CURVES[what]:
            row = seconds(what, value, args.rounds)
            rows.append(row)
            print(
                f"{MEANING[what]:32s}{value:10,d}  {1e3 * row['seconds']:9.2f} ms a round "
                f"({1e3 * row['fastest']:.2f} to {1e3 * row['slowest']:.2f})",
                flush=True,
            )
    if args.png:
        draw(rows, args.png)
    results.write_outputs(args, "scaling", meaning=MEANING, rows=rows)


if __name__ == "__main__":
    main()
