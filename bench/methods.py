"""Time a round of every method relative to FedAvg, next to the ratios of Sun et al. 2025, Table 2.

    python -m bench.methods [--model lenet5] [--rounds 6] [--device cpu] [--npz FILE] [--html FILE]

All methods train on the same 20 clients (Dirichlet 0.5) with batch 64 and two epochs; only local
training and the server are timed, not the evaluation. FedAvg is timed before and after the others,
and its median is the unit. The numbers of gradients are relative to FedAvg too: the time of a
method should be explained by its gradients.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import sartor
from bench import results
from bench.prepare import images, synthetic
from sartor.core.errors import PFLError
from sartor.methods import METHODS
from sartor.results.tables import Table

PUBLISHED = {
    "fedavg": 17,
    "fedphp": 20,
    "fedamp": 19,
    "apple": 20,
    "fedala": 27,
    "pfedhn": 19,
    "pfedla": 35,
    "fedpac": 64,
    "dbe": 18,
    "fedproto": 26,
    "fedgh": 25,
    "fedapa": 18,
}
"""Seconds per iteration in Table 2 (CIFAR-10, 20 clients, one RTX 2080 Ti)."""


def one(name: str, federation: Any, args: argparse.Namespace) -> dict[str, float]:
    """Train a method and return seconds, gradients and KiB per round."""
    maker = getattr(sartor.models, args.model)
    local = sartor.Local(epochs=2, batch=64, lr=0.01)
    result = sartor.fit(
        name,
        federation,
        model=maker(federation),
        rounds=args.rounds,
        local=local,
        device=args.device,
        eval_every=args.rounds,
        points=("pre",),
    )
    seconds, ledger = result.ledger.seconds, result.ledger
    busy = np.asarray(seconds["train"]) + np.asarray(seconds["server"])
    bytes_ = float(ledger.total("bytes_down")[0] + ledger.total("bytes_up")[0])
    return {
        "seconds": float(statistics.median(busy[2:])),
        "gradients": float(np.median(np.asarray(ledger.gradient_evaluations)[0][2:])),
        "kib": bytes_ / float(ledger.total("participants")[0]) / 1024,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--npz", type=Path, default=None, help="Fashion-MNIST; synthetic images by default"
    )
    parser.add_argument(
        "--samples", type=int, default=2000, help="total number of training samples"
    )
    parser.add_argument("--methods", default="all", help="names, separated by commas")
    results.add_outputs(parser)
    args = parser.parse_args()
    x, y, _, name = images(args.npz) if args.npz else synthetic(args.samples, args.samples // 4)
    draw = np.random.default_rng(0)
    chosen = draw.permutation(len(x))[: args.samples + args.samples // 4]
    shares = draw.dirichlet(np.full(20, 0.5), int(y.max()) + 1)
    owner = np.array([draw.choice(20, p=shares[label]) for label in y[chosen]])
    pixels = np.asarray(x, dtype=np.float32)[chosen]
    pixels = ((pixels - pixels.mean()) / pixels.std())[:, None]
    federation = sartor.Federation.from_arrays(
        pixels, np.asarray(y)[chosen], client=[f"c{i:02d}" for i in owner], test=0.2
    )
    names = list(METHODS) if args.methods == "all" else args.methods.split(",")
    found: dict[str, dict[str, float]] = {}
    before = one("fedavg", federation, args)
    for method in names:
        try:
            found[method] = one(method, federation, args)
        except PFLError as error:
            print(f"{method}: {error}")
    after = one("fedavg", federation, args)
    unit = statistics.median(r["seconds"] for r in (before, after))
    rows = [
        {
            "method": method,
            "ms a round": 1000 * row["seconds"],
            "times FedAvg": row["seconds"] / unit,
            "gradients": row["gradients"] / before["gradients"],
            "published": PUBLISHED[method] / PUBLISHED["fedavg"] if method in PUBLISHED else None,
            "KiB a client": row["kib"],
        }
        for method, row in found.items()
    ]
    title = f"{args.model}, {name}, {args.device}"
    if rows:
        print(Table(list(rows[0]), [list(row.values()) for row in rows], title=title))
    results.write_outputs(args, "methods", device=args.device, title=title, rows=rows)


if __name__ == "__main__":
    main()
