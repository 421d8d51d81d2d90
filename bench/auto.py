"""Compare ``auto`` with each of its candidates at the rate that is best on the test data.

    python -m bench.auto --data NAME [--model NAME] [--clients N] [--partition P] [--json FILE] ...
    python -m bench.auto --show FILE...

``python -m bench.auto --data cifar10 --model lenet5 --clients 20 --partition dirichlet:0.1
--rounds 50 --seeds 3 --device cuda`` trains, on the same allocations, every candidate at every rate
for all rounds, and ``auto``, which sees no test data. The rows of the candidates are therefore
optimistic. It needs torch and numpy alone (and Pillow for images in folders). The file of
``--json`` is written after every row, and rows that it has are not made again. ``--show`` prints
such files in one table, with a line for each data set, network, division and number of rounds.

Every allocation is one seed; differences are paired by it. A client counts as worse than alone if
``auto`` is right less often on its test samples than LocalTrain at the rate and rounds that its own
trials chose, by more than two standard errors, paired by sample.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sartor
from sartor.methods import build
from sartor.methods.auto import candidates
from sartor.results.tables import Table
from sartor.training import auto
from sartor.training.settings import make_task


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train everything, auto first; yield the numbers after every row."""

    @functools.cache
    def federation(seed: int) -> sartor.Federation:
        given = {k: getattr(args, k) for k in ("clients", "partition", "samples")}
        given = {k: v for k, v in given.items() if v is not None}
        return sartor.Federation.from_dataset(args.data, seed=seed, **given)

    seeds = list(range(args.first, args.first + args.seeds))
    known = federation(args.first)
    model = None if args.model is None else getattr(sartor.models, args.model)(known)
    task = make_task(model, known, None)
    shared: dict[str, Any] = {"model": model, "seeds": seeds, "device": args.device}
    found = {"settings": {k: str(v) for k, v in vars(args).items()}, "rows": {}}
    if args.json is not None and args.json.exists():
        earlier = json.loads(args.json.read_text())
        if all(earlier["settings"][k] == found["settings"][k] for k in (*CELL, "first", "seeds")):
            found = earlier
    rows: dict[str, Any] = found["rows"]
    if "auto" not in rows:
        rows["auto"] = of_auto(federation, seeds, args.rounds, shared)
        yield found
    local = auto.local_for(map(federation, seeds), args.rounds)
    for name in () if args.alone else candidates(task):
        if name in rows:
            continue
        own = replace(local, lr_decay=1.0, clip_norm=0.0) if name == "evidence" else local
        try:
            hyper = build(name, task, own, {}).hyper
        except sartor.errors.ConfigError as error:
            print(f"{name}: {error}")
            continue
        began = time.perf_counter()
        rates = auto.RATES if "local_lr" in hyper else (None,)
        values = {"local_lr": rates, "ft_lr": rates}
        grid: Any = [{k: v[i] for k, v in values.items() if k in hyper} for i in range(len(rates))]
        result = sartor.fit(
            name,
            federation,
            local=own,
            rounds=args.rounds,
            hyper={"horizon": float(args.rounds)} if "horizon" in hyper else {},
            sweep=grid if hyper.keys() & values.keys() else None,
            points=("pre",),
            eval_every=max(1, args.rounds // 10),
            **shared,
        )
        reached = np.atleast_1d(result.accuracy).reshape(len(rates), len(seeds))
        best = int(np.nanargmax(np.nan_to_num(reached, nan=-1.0).mean(1)))
        rows[name] = {
            "rate": rates[best],
            "accuracy": reached[best].tolist(),
            "by_rate": {str(rate): row.tolist() for rate, row in zip(rates, reached, strict=True)},
            "seconds": time.perf_counter() - began,
        }
        print(f"{name}: {reached[best].mean():.4f} at rate {rates[best]}", flush=True)
        yield found
    yield found


def of_auto(
    federation: Callable[[int], sartor.Federation],
    seeds: Sequence[int],
    rounds: int,
    shared: dict[str, Any],
) -> dict[str, Any]:
    """Return the row of auto."""
    began = time.perf_counter()
    result = sartor.fit("auto", federation, rounds=rounds, eval_every=rounds, **shared)
    seconds = time.perf_counter() - began
    alone = result.baseline()
    pairs = [_against(result, alone, federation(s), r) for r, s in enumerate(seeds)]
    row = {
        "accuracy": np.atleast_1d(result.accuracy).tolist(),
        "alone": np.atleast_1d(alone.accuracy).tolist(),
        "hurt": [hurt for hurt, _ in pairs],
        "better": [better for _, better in pairs],
        "seconds": seconds,
        "gradients": np.atleast_1d(result.gradient_evaluations).tolist(),
        "gradients_of_trials": [s["cost"]["gradients"] for s in _seeds(result)],
        "megabytes": np.atleast_1d(result.megabytes).tolist(),
        "chosen": _seeds(result),
    }
    print(f"auto: {np.mean(row['accuracy']):.4f}, {seconds:.0f} s", flush=True)
    return row


def _seeds(result: sartor.Result) -> list[dict[str, Any]]:
    return list(result.config["selection"]["seeds"].values())


def _against(
    result: sartor.Result, alone: sartor.Result, fed: sartor.Federation, run: int
) -> tuple[int, int]:
    """Return how many clients are worse than alone beyond noise, and how many better."""
    hurt = better = 0
    for client in range(fed.num_clients):
        rows = fed.test.of(client)
        if len(rows) < 2:
            continue
        with torch.no_grad():
            right = [
                (r.model(client, run=run)(fed.x[rows]).argmax(-1) == fed.y[rows]).double()
                for r in (result, alone)
            ]
        gain = right[0] - right[1]
        error = float(gain.std()) / math.sqrt(len(gain))
        hurt += float(gain.mean()) < -2.0 * error
        better += float(gain.mean()) > 2.0 * error
    return hurt, better


def table(found: dict[str, Any]) -> Table:
    """Return the rows, the best candidate first, and what auto gains over each."""
    rows = found["rows"]
    own = np.array(rows["auto"]["accuracy"])
    lines = []
    for name in sorted(rows, key=lambda name: -np.mean(rows[name]["accuracy"])):
        row, gain = rows[name], 100 * (own - np.array(rows[name]["accuracy"]))
        error = gain.std(ddof=1) / math.sqrt(len(gain)) if len(gain) > 1 else None
        rate, lead = row.get("rate"), None if name == "auto" else float(gain.mean())
        error = None if name == "auto" else error
        lines.append(
            [name, rate, float(np.mean(row["accuracy"])), lead, error, round(row["seconds"], 1)]
        )
    heads = ["method", "best rate on test", "accuracy", "auto gains (points)", "±", "seconds"]
    auto_row = rows["auto"]
    notes = {
        "worse than alone beyond noise": f"{sum(auto_row['hurt'])} clients",
        "better than alone beyond noise": f"{sum(auto_row['better'])} clients",
        "alone at its chosen rate": f"{100 * np.mean(auto_row['alone']):.2f} %",
        "auto": f"{np.mean(auto_row['gradients']):.3g} gradients, of them in trials "
        f"{np.mean(auto_row['gradients_of_trials']):.3g}; {np.mean(auto_row['megabytes']):.0f} MB",
        "rule": ", ".join(one["rule"] for one in auto_row["chosen"]),
    }
    return Table(heads, lines, formats={"accuracy": "percent"}, notes=notes)


CELL = ("data", "model", "clients", "partition", "samples", "rounds")
WITH_NAME = ("clients", "samples", "rounds")


def joined(files: Sequence[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the rows of each cell, their lists put after one another.

    The best rate of a candidate is chosen again, by all allocations of the cell.
    """
    cells: dict[tuple[str, ...], dict[str, Any]] = {}
    for found in sorted(files, key=lambda one: int(one["settings"]["first"])):
        rows = cells.setdefault(tuple(found["settings"][k] for k in CELL), {})
        for name, row in found["rows"].items():
            known = rows.setdefault(name, {"by_rate": {}, "seconds": 0.0})
            known["seconds"] += row["seconds"]
            for rate, reached in row.get("by_rate", {}).items():
                known["by_rate"].setdefault(rate, []).extend(reached)
            for key in ("accuracy", "alone", "hurt", "better", "chosen"):
                if key in row:
                    known.setdefault(key, []).extend(row[key])
    for rows in cells.values():
        for row in rows.values():
            if row["by_rate"]:
                reached = {r: np.nan_to_num(v, nan=-1.0).mean() for r, v in row["by_rate"].items()}
                row["rate"] = max(reached, key=lambda rate: reached[rate])
                row["accuracy"] = row["by_rate"][row["rate"]]
    return cells


def cells(files: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each cell: the best candidate, auto, the difference, clients hurt."""
    lines = []
    for cell, rows in joined(files).items():
        own = np.array(rows["auto"]["accuracy"])
        whole = {k: r for k, r in rows.items() if k != "auto" and len(r["accuracy"]) == len(own)}
        best = max(whole, key=lambda name: np.mean(whole[name]["accuracy"]), default=None)
        line = [
            ", ".join(
                f"{part} {key}" if key in WITH_NAME else part
                for key, part in zip(CELL, cell, strict=True)
                if part != "None"
            ),
            len(own),
        ]
        if best is not None:
            gain = 100 * (own - np.array(whole[best]["accuracy"]))
            error = gain.std(ddof=1) / math.sqrt(len(gain)) if len(gain) > 1 else None
            line += [f"{best} at {whole[best]['rate']}", float(np.mean(whole[best]["accuracy"]))]
            line += [float(own.mean()), f"{gain.mean():+.2f}", error]
        else:
            line += [None, None, float(own.mean()), None, None]
        alone = 100 * (own - np.array(rows["auto"]["alone"]))
        line += [f"{alone.mean():+.2f}", sum(rows["auto"]["hurt"]), sum(rows["auto"]["better"])]
        lines.append([*line, round(rows["auto"]["seconds"] / len(own))])
    heads = ["cell", "allocations", "best candidate", "its accuracy", "auto"]
    heads += ["auto gains (points)", "±", "over alone", "hurt", "better", "seconds"]
    return Table(heads, lines, formats={"its accuracy": "percent", "auto": "percent"})


def main() -> None:
    """Read the flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default=None, help="a name in sartor.models")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--partition", default=None)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="allocations")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alone", action="store_true", help="auto alone, without the candidates")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first allocation")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", type=Path, nargs="+", default=None, help="files of --json")
    args = parser.parse_args()
    if args.show:
        print(cells([json.loads(path.read_text()) for path in args.show]))
        return
    for found in measure(args):
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
