"""Compare ``auto`` with each of its candidates at the rate that is best on the test data.

``python -m bench.auto --data cifar10 --model lenet5 --clients 20 --partition dirichlet:0.1
--rounds 50 --seeds 3 --device cuda`` trains, on the same allocations, every candidate at every rate
for all rounds, and ``auto``, which sees no test data. The rows of the candidates are therefore
optimistic. It needs torch and numpy alone (and Pillow for images in folders).

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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train everything; return the numbers."""

    @functools.cache
    def federation(seed: int) -> sartor.Federation:
        given = {k: getattr(args, k) for k in ("clients", "partition", "samples")}
        given = {k: v for k, v in given.items() if v is not None}
        return sartor.Federation.from_dataset(args.data, seed=seed, **given)

    seeds = list(range(args.seeds))
    model = None if args.model is None else getattr(sartor.models, args.model)(federation(0))
    task = make_task(model, federation(0), None)
    shared: dict[str, Any] = {"model": model, "seeds": seeds, "device": args.device}
    rows: dict[str, Any] = {}
    local = auto.local_for(map(federation, seeds), args.rounds)
    for name in () if args.alone else candidates(task):
        own = replace(local, lr_decay=1.0) if name == "evidence" else local
        try:
            known = build(name, task, own, {}).hyper
        except sartor.errors.ConfigError as error:
            print(f"{name}: {error}")
            continue
        began = time.perf_counter()
        rates = auto.RATES if "local_lr" in known else (None,)
        values = {"local_lr": rates, "ft_lr": rates}
        grid: Any = [{k: v[i] for k, v in values.items() if k in known} for i in range(len(rates))]
        result = sartor.fit(
            name,
            federation,
            local=own,
            rounds=args.rounds,
            hyper={"horizon": float(args.rounds)} if "horizon" in known else {},
            sweep=grid if known.keys() & values.keys() else None,
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
    began = time.perf_counter()
    result = sartor.fit("auto", federation, rounds=args.rounds, eval_every=args.rounds, **shared)
    seconds = time.perf_counter() - began
    alone = result.baseline()
    pairs = [_against(result, alone, federation(s), r) for r, s in enumerate(seeds)]
    rows["auto"] = {
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
    return {"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}


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
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found = measure(args)
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
