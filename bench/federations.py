"""Compare evidence with oracles on federations that nature divided.

    python -m bench.federations --data FOLDER [--only heart wine] [--json FILE] [--markdown FILE]

Every federation is divided 20 times at random, 70/30 within every client; features are
standardised by the training part. The models are linear. Rows are mean test losses over all
samples of all clients (log loss, or squared error of a target with deviation 1), and beside them
the differences evidence − row on the same divisions, with 95 % intervals (Student's t).

An oracle is solved exactly by ``bench.oracles``, which shares no code with the library, for every
value of a grid; the best is chosen by the mean TEST loss, which nobody has who trains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import sartor
from bench import oracles
from bench.divided import FEDERATIONS, Array, Divided, Missing
from bench.oracles import Samples
from sartor.data.split import Ragged

SHARE = 0.7
RIDGES = np.logspace(3, -4, 15)
"""Of a client alone and of one model for all; and whether intercepts have a hundredth of it."""
PULLS = np.logspace(3.5, -2, 12)
"""λ of FedProx for the summed loss of a client; for the mean loss, times n_i / mean n."""
MEAN_RIDGES = (0.01, 0.1, 1.0)
"""Of w̄ in FedProx: on separable data its optimum without one is infinitely far."""
ROWS = {
    "alone": "every client alone, best ridge (oracle)",
    "one": "one model for all, best ridge (oracle)",
    "prox-sum": "FedProx, best λ, summed losses (oracle)",
    "prox-mean": "FedProx, best λ, mean losses (oracle)",
    "fedavg-ft": "FedAvg, fine-tuned",
    "scalar": "evidence, `scalar`",
    "layer": "evidence, `layer`",
    "diag": "evidence, `diag`",
}
SHORT = {
    "alone": "alone*",
    "one": "one*",
    "prox-sum": "FedProx, sum*",
    "prox-mean": "FedProx, mean*",
    "fedavg-ft": "FedAvg+FT",
    "scalar": "`scalar`",
    "layer": "`layer`",
    "diag": "`diag`",
}
"""The same in one line; a star for an oracle."""
OURS = "diag"


class Split(NamedTuple):
    """One division: for each client the rows to train and to test on, and all features."""

    train: list[Array]
    test: list[Array]
    x: Array

    def samples(self, data: Divided, part: str) -> list[Samples]:
        """Return the clients for the oracles, with a column of ones."""
        rows = self.train if part == "train" else self.test
        wide = np.column_stack([self.x, np.ones(len(self.x))])
        return [Samples(wide[one], data.y[one]) for one in rows]


class Row(NamedTuple):
    """What a row of the table is of: per split, and what an oracle chose."""

    loss: Array
    score: Array
    chosen: str
    seconds: float


def split(data: Divided, seed: int) -> Split:
    """Divide every client 70/30, and standardise by the training part."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for client in range(data.clients):
        rows = rng.permutation(np.flatnonzero(data.owner == client))
        cut = min(max(1, round(SHARE * len(rows))), len(rows) - 1)
        train.append(rows[:cut])
        test.append(rows[cut:])
    seen = data.x[np.concatenate(train)]
    deviation = seen.std(0)
    return Split(train, test, (data.x - seen.mean(0)) / np.where(deviation > 0, deviation, 1.0))


def federation(data: Divided, one: Split) -> sartor.Federation:
    """Return the same division for the library."""
    return sartor.Federation(
        torch.from_numpy(one.x),
        torch.from_numpy(data.y),
        Ragged.from_lists(one.train),
        Ragged.empty(data.clients),
        Ragged.from_lists(one.test),
        tuple(str(k) for k in range(data.clients)),
        data.classes,
    )


def library(data: Divided, splits: Sequence[Split], method: str, **settings: Any) -> Row:
    """Train a method on all splits at once; every split is a seed."""
    began = time.perf_counter()
    made = [federation(data, one) for one in splits]
    result = sartor.fit(
        method,
        made,
        seeds=list(range(len(splits))),
        model=nn.Linear(data.x.shape[1], max(data.classes, 1)),
        dtype="float64",
        progress=False,
        **settings,
    )
    at = result.scores[result.headline, "test"]
    loss = at.loss[:, -1].sum(-1) * (1.0 if data.classes else 2.0)
    tested = [np.concatenate(one.test) for one in splits]
    score = score_of(data, tested, loss, at.correct[:, -1].sum(-1))
    return Row(loss / len(tested[0]), score, "", time.perf_counter() - began)


def score_of(data: Divided, tested: Sequence[Array], loss: Array, correct: Array) -> Array:
    """Return accuracies, or R²: how much of the variance of the test targets is explained."""
    if data.classes:
        return np.asarray(correct) / np.array([len(rows) for rows in tested])
    return 1.0 - np.asarray(loss) / np.array(
        [np.square(data.y[rows] - data.y[rows].mean()).sum() for rows in tested]
    )


Config = tuple[float, ...]


def ridges(train: Sequence[Samples], classes: int, alone: bool) -> Iterator[tuple[Config, Any]]:
    """Solve for every ridge of the grid, for each client or for all samples in one."""
    whole = Samples(np.concatenate([a.x for a in train]), np.concatenate([a.y for a in train]))
    groups = list(train) if alone else [whole]
    free = oracles.intercepts(whole, classes)
    for share in (1.0, 0.01):
        found: list[Any] = [None] * len(groups)
        for ridge in RIDGES:
            each = np.where(free, share * ridge, ridge)
            found = [
                oracles.single(one, classes, each, w) for one, w in zip(groups, found, strict=True)
            ]
            yield (float(ridge), share), found if alone else found * len(train)


def proximal(train: Sequence[Samples], classes: int, mean: bool) -> Iterator[tuple[Config, Any]]:
    """Solve FedProx for every λ and every ridge of its mean."""
    sizes = np.array([len(one.y) for one in train], dtype=np.float64)
    shares = sizes / sizes.mean() if mean else np.ones(len(sizes))
    for ridge in MEAN_RIDGES:
        found = None
        for pull in PULLS:
            found = oracles.together(train, classes, pull * shares, ridge, found)
            yield (float(pull), ridge), found.models


SOLVERS: dict[str, Any] = {
    "alone": lambda train, classes: ridges(train, classes, alone=True),
    "one": lambda train, classes: ridges(train, classes, alone=False),
    "prox-sum": lambda train, classes: proximal(train, classes, mean=False),
    "prox-mean": lambda train, classes: proximal(train, classes, mean=True),
}


def oracle(data: Divided, splits: Sequence[Split], name: str) -> Row:
    """Solve for a whole grid on every split, and keep the best by the mean test loss."""
    began = time.perf_counter()
    found: dict[Config, list[tuple[float, int]]] = {}
    for one in splits:
        train, test = one.samples(data, "train"), one.samples(data, "test")
        for config, models in SOLVERS[name](train, data.classes):
            found.setdefault(config, []).append(oracles.totals(models, test, data.classes))
    best = min(found, key=lambda config: sum(loss for loss, _ in found[config]))
    loss, correct = map(np.array, zip(*found[best], strict=True))
    tested = [np.concatenate(one.test) for one in splits]
    score = score_of(data, tested, loss, correct)
    grid = RIDGES if name in ("alone", "one") else PULLS
    edge = ", an end of the grid" if best[0] in (float(grid[0]), float(grid[-1])) else ""
    words = f"{best[0]:.3g}{edge}"
    return Row(loss / len(tested[0]), score, words, time.perf_counter() - began)


def rows(data: Divided, splits: Sequence[Split], rounds: int) -> Iterator[tuple[str, Row]]:
    """Return all rows of a federation."""
    for name in ROWS:
        if name in SOLVERS:
            yield name, oracle(data, splits, name)
        elif name == "fedavg-ft":
            local = sartor.Local(epochs=1, batch=32, lr=0.05)
            yield name, library(data, splits, name, rounds=rounds, local=local, eval_every=rounds)
        else:
            settings = {"rounds": rounds, "eval_every": rounds, "options": {"groups": name}}
            yield name, library(data, splits, "evidence", **settings)


def interval(difference: Array) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval (Student's t) of paired differences."""
    from scipy import stats

    count = len(difference)
    if count < 2:
        return float(difference.mean()), float("nan")
    width = stats.t.ppf(0.975, count - 1) * difference.std(ddof=1) / np.sqrt(count)
    return float(difference.mean()), float(width)


def summary(name: str, data: Divided, found: dict[str, Row]) -> dict[str, Any]:
    """Return a federation's part of the numbers."""
    table: dict[str, Any] = {}
    for key, row in found.items():
        mean, half = interval(found[OURS].loss - row.loss)
        table[key] = {
            "loss": float(row.loss.mean()),
            "score": float(row.score.mean()),
            "difference": mean,
            "half": half,
            "chosen": row.chosen,
            "seconds": row.seconds,
            "losses": row.loss.tolist(),
        }
    about = {"clients": data.clients, "samples": len(data.y), "features": data.x.shape[1]}
    return {"name": name, "classes": data.classes, **about, "rows": table}


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the tables as text."""
    parts = []
    for one in found:
        kind = f"{one['classes']} classes" if one["classes"] else "regression"
        measure = ("log loss", "accuracy") if one["classes"] else ("squared error", "R²")
        splits = len(one["rows"][OURS]["losses"])
        sizes = f"{one['clients']} clients, {one['samples']:,} samples, {splits} splits"
        lines = [
            f"**{one['name']}**: {sizes}, {one['features']} features, {kind}",
            "",
            f"| | {measure[0]} | {measure[1]} | `diag` − row | chosen |",
            "|---|---|---|---|---|",
        ]
        for key, row in one["rows"].items():
            apart = "" if key == OURS else f"{row['difference']:+.4f} ± {row['half']:.4f}"
            score = f"{row['score']:.4f}"
            lines.append(
                f"| {ROWS[key]} | {row['loss']:.4f} | {score} | {apart} | {row['chosen']} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def overview(found: Sequence[dict[str, Any]]) -> str:
    """Return one table of all federations, with a sign where an interval is on one side of 0.

    ▲ is beside what ``diag`` is better than, ▼ beside what is better than ``diag``.
    """
    keys = [key for key in ROWS if all(key in one["rows"] for one in found)]
    lines = [
        "| federation | " + " | ".join(SHORT[key] for key in keys) + " |",
        "|---" * (len(keys) + 1) + "|",
    ]
    for one in found:
        cells = []
        for key in keys:
            row = one["rows"][key]
            sign = ""
            if key != OURS and abs(row["difference"]) > row["half"]:
                sign = " ▲" if row["difference"] < 0 else " ▼"
            cells.append(f"{row['loss']:.4f}{sign}")
        lines.append(f"| {one['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.federations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    home = os.environ.get("SARTOR_DATA")
    add(
        "--data",
        type=Path,
        default=Path(home) / "federations" if home else None,
        help="folder of heart.csv and the other tables (else SARTOR_DATA/federations)",
    )
    add("--splits", type=int, default=20, help="random 70/30 divisions (default 20)")
    add("--rounds", type=int, default=25, help="of the library's methods (default 25)")
    add("--only", nargs="+", choices=list(FEDERATIONS), default=list(FEDERATIONS))
    add("--json", type=Path, help="file for all numbers")
    add("--markdown", type=Path, help="file for the tables")
    add("--show", nargs="+", type=Path, help="the tables of these files of numbers; train nothing")
    return parser.parse_args()


def main() -> int:
    """Run the command line."""
    args = arguments()
    found = []
    for file in args.show or []:
        found += json.loads(file.read_text(encoding="utf-8"))["federations"]
    for name in [] if args.show else args.only:
        try:
            data = FEDERATIONS[name](args.data)
        except Missing as why:
            print(f"{name}: skipped, {why}")
            continue
        splits = [split(data, seed) for seed in range(args.splits)]
        made = dict(rows(data, splits, args.rounds))
        found.append(summary(name, data, made))
        print(markdown(found[-1:]))
        print(f"seconds: {sum(row.seconds for row in made.values()):.0f}\n", flush=True)
        if args.json is not None:
            settings = {"splits": args.splits, "rounds": args.rounds}
            args.json.write_text(json.dumps({**settings, "federations": found}, indent=1))
    if args.show:
        print(overview(found) + "\n" + markdown(found))
    if args.markdown is not None and found:
        args.markdown.write_text(overview(found) + "\n" + markdown(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
