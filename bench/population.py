"""Measure the memory of a large population: 100,000 clients with LeNet-5 states, cohorts of 100.

The states are kept in memory-mapped files, so memory grows with the cohort. Run it with
``python -m bench.population``.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch

import sartor
from sartor.data.split import Ragged


def population(
    clients: int, per_client: int = 10, tests: int = 2, seed: int = 0
) -> sartor.Federation:
    """Give each client a few rows of one pool of synthetic images of the size of Fashion-MNIST."""
    rng = np.random.default_rng(seed)
    pool, held = 20_000, 4_000
    x = torch.from_numpy(rng.normal(size=(pool, 1, 28, 28)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 10, pool))
    train = rng.integers(0, pool - held, (clients, per_client))
    test = rng.integers(pool - held, pool, (clients, tests))
    offsets = lambda n: torch.arange(clients + 1) * n  # noqa: E731
    return sartor.Federation(
        x=x,
        y=y,
        train=Ragged(torch.from_numpy(train).reshape(-1), offsets(per_client)),
        val=Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(clients + 1, dtype=torch.int64)),
        test=Ragged(torch.from_numpy(test).reshape(-1), offsets(tests)),
        names=tuple(str(i) for i in range(clients)),
        num_classes=10,
        info={"dataset": "synthetic images"},
    )


def main() -> None:
    """Train, and print peak memory and seconds per round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="fedprox")
    parser.add_argument("--store", default="mapped")
    args = parser.parse_args()
    began = time.perf_counter()
    fed = population(args.clients)
    print(f"{fed.num_clients} clients in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    result = sartor.fit(
        args.method,
        fed,
        model=sartor.models.lenet5(fed),
        rounds=args.rounds,
        participation=args.cohort,
        local=sartor.Local(epochs=1, batch=10, lr=0.05),
        store=args.store,
        eval_every=args.rounds,
        points=("pre",),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = result.ledger.seconds
    state = 44_426 * 4 * args.clients / 2**30
    print(
        f"{args.rounds} rounds in {time.perf_counter() - began:.1f} s, states of all clients "
        f"{state:.1f} GiB"
    )
    print(
        "seconds a round without evaluation:",
        [round(t + s, 2) for t, s in zip(seconds["train"], seconds["server"], strict=True)],
    )
    print(f"peak resident memory {peak:.2f} GiB; MB up {result.bytes_up / 1e6:.1f}")


if __name__ == "__main__":
    main()
