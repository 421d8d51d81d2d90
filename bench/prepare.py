"""Prepare the data of a workload once for all contenders: read or simulate it, and divide it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench.floors import work_of_share
from bench.workloads import LENGTH, TOKENS, Array, Share, Workload


def images(npz: Path | None) -> tuple[Array, Array, int, str]:
    """Return images (samples, 28, 28), labels, the number of training samples, and their origin."""
    if npz is not None:
        with np.load(npz) as file:
            parts = [file[name] for name in ("x_train", "x_test", "y_train", "y_test")]
        x, y = np.concatenate(parts[:2]), np.concatenate(parts[2:])
        return x, y.astype(np.int64), len(parts[0]), npz.name
    if os.environ.get("SARTOR_DATA"):
        from sartor.core.errors import PFLError
        from sartor.data import load

        try:
            found = load("fashion_mnist")
        except PFLError as error:
            print(f"no Fashion-MNIST: {error}")
        else:
            pixels = np.asarray(found.x).reshape(-1, 28, 28)
            return pixels, np.asarray(found.y), int(found.num_train or 60_000), "Fashion-MNIST"
    return synthetic(60_000, 10_000)


def synthetic(train: int, test: int) -> tuple[Array, Array, int, str]:
    """Simulate images of the size of Fashion-MNIST: ten patterns with noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, train + test)
    patterns = np.kron(rng.uniform(0, 255, (10, 7, 7)), np.ones((4, 4)))
    x = np.empty((train + test, 28, 28), dtype=np.float32)
    for start in range(0, len(x), 10_000):
        block = slice(start, start + 10_000)
        shape = x[block].shape
        x[block] = 0.08 * patterns[labels[block]] + 0.92 * rng.uniform(0, 255, shape)
    return x, labels, train, "synthetic images of the same shape and number"


def texts(train: int, test: int) -> tuple[Array, Array, int, str]:
    """Simulate texts of 5 to 25 tokens; class 1 has more tokens from the first half."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, TOKENS, (train + test, LENGTH))
    x[np.arange(LENGTH) >= rng.integers(5, LENGTH + 1, (len(x), 1))] = 0
    first = ((x > 0) & (x < TOKENS // 2)).sum(1)
    return x, (2 * first > (x > 0).sum(1)).astype(np.int64), train, "synthetic texts"


def share(workload: Workload, npz: Path | None, seed: int) -> Share:
    """Divide the samples among the clients."""
    from sartor.data import divide

    is_text = workload.model == "lstm"
    x, y, num_train, source = texts(12_000, 2_000) if is_text else images(npz)
    rng = np.random.default_rng(seed)
    tests = max(workload.samples // 6, workload.clients)
    first = rng.permutation(num_train)[: workload.samples]
    second = num_train + rng.permutation(len(x) - num_train)[:tests]
    rows = np.concatenate([np.sort(first), np.sort(second)])
    x, y = x[rows], y[rows]
    if not is_text:
        x = np.asarray(x, dtype=np.float32)
        x = ((x - x.mean()) / x.std())[:, None]
    cut = divide(
        y,
        workload.partition,
        clients=workload.clients,
        num_train=len(first),
        num_classes=workload.classes,
        seed=seed,
    )
    lists = [
        [split.of(i).numpy() for i in range(workload.clients)] for split in (cut.train, cut.test)
    ]
    return Share(np.ascontiguousarray(x), y, lists[0], lists[1], workload, source)


def main() -> None:
    """Write the data of the workload given as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--npz", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made = share(Workload(**json.loads(args.workload)), args.npz, args.seed)
    made.save(args.folder)
    sizes = [len(rows) for rows in made.train]
    about = {"source": made.source, "steps": made.steps(), "least": min(sizes), "most": max(sizes)}
    about["work"] = asdict(work_of_share(made))
    print(json.dumps(about))


if __name__ == "__main__":
    main()
