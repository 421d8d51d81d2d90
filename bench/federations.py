"""Compare evidence with oracles on federations that nature divided.

    python -m bench.federations --data FOLDER [--only heart wine] [--rows diag one] [--verdicts]
                                [--json FILE] [--markdown FILE]
    python -m bench.federations --data FOLDER --flamby
    python -m bench.federations --show FILE...

Every federation is divided 20 times at random, 70/30 within every client; features are
standardised by the training part. The models are linear. Rows are mean test losses over all
samples of all clients (log loss, or squared error of a target with deviation 1), and beside them
the differences evidence − row on the same divisions, with 95 % intervals (Student's t).

An oracle is solved exactly by ``bench.oracles``, which shares no code with the library, for every
value of a grid; the best is chosen by the mean TEST loss, which nobody has who trains.

With ``--verdicts`` the adviser sees all samples, and its verdict is held against the oracles.
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
from bench.divided import FEDERATIONS, Array, Divided, Missing, heart, heart_all, heart_flamby
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
    "auto": "`auto`",
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
    "auto": "`auto`",
}
"""The same in one line; a star for an oracle."""
OURS = "diag"
QUICK = [name for name in ROWS if name != "auto"]
"""What is made unless rows are named: the trials of auto take longer than all other rows."""
ORACLES = ("alone", "one", "prox-sum", "prox-mean")
ANSWERS = {"alone": ("alone",), "one model": ("one",), "personalise": ("prox-sum", "prox-mean")}
"""What the adviser can answer, and the oracles of that answer: the better one speaks for it."""
ANSWER_OF = {"local": "alone", "global": "one model", "personalised": "personalise"}
NEAR = 0.01
"""A share of the winner's loss within which an answer is as good."""
PUBLISHED = {
    "FLamby, pooled": (78.3, 76.4, 75.0, 64.4),
    "FLamby, local": (74.6, 74.6, 72.5, 70.2),
    "FLamby, FedAvg": (73.1, 71.9, 65.0, 64.0),
}
"""Accuracies of Fed-Heart-Disease in percent: Cleveland, Hungary, Switzerland, VA."""


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
    """Divide every client 70/30 at random."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for client in range(data.clients):
        rows = rng.permutation(np.flatnonzero(data.owner == client))
        cut = min(max(1, round(SHARE * len(rows))), len(rows) - 1)
        train.append(rows[:cut])
        test.append(rows[cut:])
    return scaled(data, train, test)


def scaled(data: Divided, train: list[Array], test: list[Array]) -> Split:
    """Standardise by the training part; a gap becomes its mean, which is 0."""
    seen = data.x[np.concatenate(train)]
    deviation = np.nanstd(seen, axis=0)
    x = (data.x - np.nanmean(seen, axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return Split(train, test, np.nan_to_num(x, nan=0.0))


def stratified(data: Divided, seed: int) -> Split:
    """Divide every client as FLamby does: 66/34, with equal shares of classes of three or more."""
    from sklearn.model_selection import train_test_split

    train, test = [], []
    for client in range(data.clients):
        rows = np.flatnonzero(data.owner == client)
        share = {"train_size": 0.66, "test_size": 0.34}
        labels = data.y[rows] if np.bincount(data.y[rows], minlength=2).min() > 2 else None
        parts = train_test_split(rows, **share, random_state=seed, stratify=labels)
        train.append(parts[0])
        test.append(parts[1])
    return scaled(data, train, test)


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


def trained(
    data: Divided, splits: Sequence[Split], method: str, **settings: Any
) -> tuple[Array, Array]:
    """Train a method on all splits at once; every split is a seed.

    Returns:
        (splits, clients) summed losses of the test samples, and how many answers were right.
    """
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
    return at.loss[:, -1] * (1.0 if data.classes else 2.0), at.correct[:, -1]


def library(data: Divided, splits: Sequence[Split], method: str, **settings: Any) -> Row:
    """Return the row of a method of the library."""
    began = time.perf_counter()
    losses, right = trained(data, splits, method, **settings)
    tested = [np.concatenate(one.test) for one in splits]
    loss = losses.sum(-1)
    score = score_of(data, tested, loss, right.sum(-1))
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


def rows(
    data: Divided, splits: Sequence[Split], rounds: int, names: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    """Return the rows of a federation that are asked for."""
    for name in names:
        if name in SOLVERS:
            yield name, oracle(data, splits, name)
        elif name == "fedavg-ft":
            local = sartor.Local(epochs=1, batch=32, lr=0.05)
            yield name, library(data, splits, name, rounds=rounds, local=local, eval_every=rounds)
        elif name == "auto":
            yield name, library(data, splits, name, rounds=rounds, eval_every=rounds)
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


def summary(
    name: str, data: Divided, found: dict[str, Row], earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a federation's part of the numbers.

    Args:
        name: of the federation.
        data: its samples.
        found: the rows that were made now.
        earlier: rows of an earlier summary, on the same splits.
    """
    made = dict(earlier or {})
    for key, row in found.items():
        made[key] = {
            "loss": float(row.loss.mean()),
            "score": float(row.score.mean()),
            "chosen": row.chosen,
            "seconds": row.seconds,
            "losses": row.loss.tolist(),
        }
    table = {key: made[key] for key in ROWS if key in made}
    for row in table.values():
        row["difference"], row["half"] = None, None
        if OURS in table:
            apart = np.subtract(table[OURS]["losses"], row["losses"])
            row["difference"], row["half"] = interval(apart)
    about = {"clients": data.clients, "samples": len(data.y), "features": data.x.shape[1]}
    return {"name": name, "classes": data.classes, **about, "rows": table}


def kept(earlier: dict[str, Any] | None, data: Divided, splits: int) -> dict[str, Any]:
    """Return the rows of an earlier summary that are of the same samples and splits."""
    if earlier is None or (earlier["samples"], earlier["features"]) != data.x.shape:
        return {}
    return {key: row for key, row in earlier["rows"].items() if len(row["losses"]) == splits}


def whole(data: Divided) -> sartor.Federation:
    """Return all samples, for the adviser; a gap becomes the mean of its column."""
    filled = np.where(np.isnan(data.x), np.nanmean(data.x, axis=0), data.x)
    every = [np.flatnonzero(data.owner == client) for client in range(data.clients)]
    return federation(data, Split(every, [np.arange(0)] * data.clients, filled))


def advised(data: Divided) -> dict[str, Any]:
    """Return what the adviser says of all samples, with its defaults."""
    began = time.perf_counter()
    advice = sartor.advise(whole(data))
    return {
        "verdict": advice.verdict,
        "strategy": ANSWER_OF[advice.strategy],
        "seconds": time.perf_counter() - began,
    }


class Judged(NamedTuple):
    """A verdict beside the oracles.

    Attributes:
        losses: the mean test loss of every answer.
        winner: the answer with the lowest.
        ahead: by how much the next is above it, and half the 95 % interval.
        ties: answers of which the 95 % interval of their difference to the winner has 0 in it.
        right: whether the verdict names the winner or an answer within ``NEAR`` of it, or cannot
            tell where there is a tie.
        regret: how much higher the loss of the recommended strategy is, in percent.
    """

    losses: dict[str, float]
    winner: str
    ahead: tuple[float, float]
    ties: list[str]
    right: bool
    regret: float


def judged(rows: dict[str, Any], verdict: str, strategy: str) -> Judged:
    """Hold a verdict against the oracles of every answer."""
    best = {
        answer: min((rows[key] for key in keys), key=lambda row: row["loss"])
        for answer, keys in ANSWERS.items()
    }
    losses = {answer: row["loss"] for answer, row in best.items()}
    winner, *others = sorted(losses, key=lambda answer: losses[answer])
    behind = {
        answer: interval(np.subtract(best[answer]["losses"], best[winner]["losses"]))
        for answer in others
    }
    ties = [answer for answer, (mean, half) in behind.items() if not mean > half]
    if verdict == "cannot tell":
        right = bool(ties)
    else:
        right = losses[verdict] <= (1 + NEAR) * losses[winner]
    regret = 100 * (losses[strategy] / losses[winner] - 1)
    return Judged(losses, winner, behind[others[0]], ties, right, regret)


def verdicts(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of what the adviser says, and what the oracles say of it."""
    lines = [
        "| federation | verdict | recommended | alone* | one* | FedProx* | winner | ahead by | "
        "tied with it | right | regret |",
        "|---" * 11 + "|",
    ]
    for one in found:
        if "advice" not in one or not all(key in one["rows"] for key in ORACLES):
            continue
        advice = one["advice"]
        so = judged(one["rows"], advice["verdict"], advice["strategy"])
        losses = " | ".join(f"{loss:.4f}" for loss in so.losses.values())
        ahead = "{:.4f} ± {:.4f}".format(*so.ahead)
        right = "yes" if so.right else "**no**"
        lines.append(
            f"| {one['name']} | {advice['verdict']} | {advice['strategy']} | {losses} | "
            f"{so.winner} | {ahead} | {', '.join(so.ties)} | {right} | {so.regret:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the tables as text."""
    parts = []
    for one in found:
        kind = f"{one['classes']} classes" if one["classes"] else "regression"
        measure = ("log loss", "accuracy") if one["classes"] else ("squared error", "R²")
        sizes = f"{one['clients']} clients, {one['samples']:,} samples, {count(one)} splits"
        lines = [
            f"**{one['name']}**: {sizes}, {one['features']} features, {kind}",
            "",
            f"| | {measure[0]} | {measure[1]} | `diag` − row | chosen |",
            "|---|---|---|---|---|",
        ]
        for key, row in one["rows"].items():
            none = key == OURS or row["difference"] is None
            apart = "" if none else f"{row['difference']:+.4f} ± {row['half']:.4f}"
            score = f"{row['score']:.4f}"
            lines.append(
                f"| {ROWS[key]} | {row['loss']:.4f} | {score} | {apart} | {row['chosen']} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def count(one: dict[str, Any]) -> int:
    """Return the number of splits."""
    return max((len(row["losses"]) for row in one["rows"].values()), default=0)


def overview(found: Sequence[dict[str, Any]]) -> str:
    """Return one table of all federations, with a sign where an interval is on one side of 0.

    ▲ is beside what ``diag`` is better than, ▼ beside what is better than ``diag``. The last column
    is the mark: the best of the oracles, and how far ``diag`` is above (+) or below (−) it.
    """
    keys = [key for key in ROWS if any(key in one["rows"] for one in found)]
    lines = [
        "| federation | splits | " + " | ".join(SHORT[key] for key in keys) + " | `diag` − best* |",
        "|---" * (len(keys) + 3) + "|",
    ]
    for one in found:
        cells = []
        for key in keys:
            row = one["rows"].get(key)
            sign = ""
            if row and OURS in one["rows"] and abs(row["difference"]) > row["half"]:
                sign = " ▲" if row["difference"] < 0 else " ▼"
            cells.append(f"{row['loss']:.4f}{sign}" if row else "")
        best = mark(one)
        cells.append(best and f"{best['difference']:+.4f} ± {best['half']:.4f}")
        lines.append(f"| {one['name']} | {count(one)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def mark(one: dict[str, Any]) -> Any:
    """Return the row of the best oracle, or "" where it or ``diag`` is not there."""
    table = one["rows"]
    if OURS not in table or not all(key in table for key in ORACLES):
        return ""
    return min((table[key] for key in ORACLES), key=lambda row: row["loss"])


def flamby(folder: Path | None, splits: int, rounds: int) -> str:
    """Return a table of accuracies per hospital, beside those of FLamby's benchmark."""
    lines = [
        "| | Cleveland | Hungary | Switzerland | VA | mean of four | without Switzerland |",
        "|---" * 7 + "|",
    ]
    for name, published in PUBLISHED.items():
        lines.append(_accuracies(name, np.array([published])))
    for name, make in {
        "heart, FLamby's features": heart_flamby,
        "heart": heart,
        "heart-all": heart_all,
    }.items():
        data = make(folder)
        made = [stratified(data, seed) for seed in range(splits)]
        sizes = np.array([[len(rows) for rows in one.test] for one in made])
        settings = {"rounds": rounds, "eval_every": rounds, "options": {"groups": OURS}}
        _, right = trained(data, made, "evidence", **settings)
        lines.append(_accuracies(f"`diag`, {name}", 100 * right / sizes))
        usual = [
            [np.mean(data.y[test] == np.bincount(data.y[train]).argmax()) for train, test in parts]
            for parts in (zip(one.train, one.test, strict=True) for one in made)
        ]
        lines.append(_accuracies(f"the commoner class, {name}", 100 * np.array(usual)))
    return "\n".join(lines) + "\n"


def _accuracies(name: str, each: Array) -> str:
    """Return a line of that table: (splits, hospitals) in percent, and their means."""
    cells = []
    for column in (*each.T, each.mean(1), each[:, [0, 1, 3]].mean(1)):
        mean, half = interval(column)
        cells.append(f"{mean:.1f}" if len(column) < 2 else f"{mean:.1f} ± {half:.1f}")
    return f"| {name} | " + " | ".join(cells) + " |"


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
    add("--rows", nargs="*", choices=list(ROWS), default=QUICK, help="what to make (all but auto)")
    add("--verdicts", action="store_true", help="ask the adviser as well")
    add("--flamby", action="store_true", help="accuracies beside FLamby's, and nothing else")
    add("--json", type=Path, help="file for all numbers; what it has of the same splits is kept")
    add("--markdown", type=Path, help="file for the tables")
    add("--show", nargs="+", type=Path, help="the tables of these files of numbers; train nothing")
    return parser.parse_args()


def read(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the federations of files of numbers, by name."""
    found = {}
    for file in files:
        for one in json.loads(file.read_text(encoding="utf-8"))["federations"]:
            found[one["name"]] = one
    return found


def main() -> int:
    """Run the command line."""
    args = arguments()
    known: dict[str, dict[str, Any]] = {}
    if args.flamby:
        print(flamby(args.data, args.splits, args.rounds))
        return 0
    if args.show:
        known = read(args.show)
    elif args.json is not None and args.json.is_file():
        known = read([args.json])
    for name in [] if args.show else args.only:
        try:
            data = FEDERATIONS[name](args.data)
        except Missing as why:
            print(f"{name}: skipped, {why}")
            continue
        splits = [split(data, seed) for seed in range(args.splits)]
        made = dict(rows(data, splits, args.rounds, args.rows))
        earlier = known.get(name)
        known[name] = summary(name, data, made, kept(earlier, data, args.splits))
        if args.verdicts:
            known[name]["advice"] = advised(data)
        elif earlier and "advice" in earlier:
            known[name]["advice"] = earlier["advice"]
        print(markdown([known[name]]))
        print(f"seconds: {sum(row.seconds for row in made.values()):.0f}\n", flush=True)
        if args.json is not None:
            settings = {"rounds": args.rounds, "federations": in_order(known)}
            args.json.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    found = in_order(known)
    text = f"{overview(found)}\n{verdicts(found)}\n{markdown(found)}"
    if args.show:
        print(text)
    if args.markdown is not None and found:
        args.markdown.write_text(text, encoding="utf-8")
    return 0


def in_order(known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the federations in the order of the page."""
    return [known[name] for name in FEDERATIONS if name in known]


if __name__ == "__main__":
    sys.exit(main())
