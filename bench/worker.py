"""Run one contender on one workload in its own process; the last line is a JSON object."""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import load
from bench.workloads import Share

CONTENDERS = ("sartor", "reference", "plain", "fluke")
PARTS: dict[str, list[float]] = {}
"""Seconds of each part of a round, from Sartor's ledger."""


class Clock:
    """A progress display that records the time of every round, and its accuracy."""

    def __init__(self, device: str) -> None:
        self.device, self.last = device, 0.0
        self.seen: list[tuple[float, float]] = []

    def start(self, total_rounds: int, description: str) -> None:
        """Start the clock."""
        self.last = time.perf_counter()

    def update(self, round_index: int, info: dict[str, Any]) -> None:
        """Record a round."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seen.append((now - self.last, float(info["accuracy"])))
        self.last = now

    def stop(self) -> None:
        """Do nothing."""


def sartor_rounds(
    share: Share, number: int, device: str, seed: int, engine: str
) -> Iterator[tuple[float, float]]:
    """Train with ``sartor.fit``, and yield seconds and accuracy of each round."""
    import sartor
    from sartor import models
    from sartor.data import Federation, Ragged

    w = share.workload
    empty = Ragged.from_lists([[] for _ in range(w.clients)])
    federation = Federation(
        torch.from_numpy(share.x),
        torch.from_numpy(share.y),
        Ragged.from_lists(share.train),
        empty,
        Ragged.from_lists(share.test),
        tuple(f"client{i}" for i in range(w.clients)),
        w.classes,
    )
    torch.manual_seed(seed)
    clock = Clock(device)
    settings: dict[str, Any] = {
        "model": models.MODELS[w.model](federation),
        "seeds": seed,
        "local": sartor.Local(epochs=w.epochs, batch=w.batch, lr=w.lr),
        "participation": w.cohort if w.cohort < w.clients else 1.0,
        "engine": engine,
        "device": device,
        "points": ("pre",),
    }
    result = sartor.fit("fedavg", federation, rounds=number, progress=clock, **settings)
    PARTS.update(result.ledger.seconds)
    if engine == "auto":
        # The same rounds with steps that only receive their batches show the share of gathering.
        idle = sartor.fit(_idle, federation, rounds=min(number, 4), **settings)
        PARTS["gather"] = idle.ledger.seconds["train"]
    yield from clock.seen


def _idle(task: Any, local: Any) -> Any:
    """Build FedAvg with local steps that change nothing."""
    from sartor.core.method import changed
    from sartor.methods.fedavg import fedavg

    method = fedavg(task, local)
    return changed(method, phases=(replace(method.phases[0], step=lambda work, batch, ctx: work),))


def contest(
    name: str, share: Share, number: int, device: str, seed: int
) -> Iterator[tuple[float, float]]:
    """Run a contender by name."""
    if name in ("sartor", "reference"):
        engine = "auto" if name == "sartor" else "sequential"
        return sartor_rounds(share, number, device, seed, engine)
    if name == "plain":
        from bench import plain

        return plain.rounds(share, number, device, seed)
    from bench import other

    return other.rounds(share, number, device, seed)


def peak_mb() -> float:
    """Return the peak memory of this process, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the memory of the parent before the fork
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Run a contender and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    share = Share.load(args.folder)
    before, meter = peak_mb(), load.Meter()
    seen = list(contest(args.contender, share, args.rounds, args.device, args.seed))
    if len(seen) != args.rounds:
        raise SystemExit(f"{len(seen)} of {args.rounds} rounds were seen")
    report = {
        "seconds": [s for s, _ in seen],
        "accuracy": [a for _, a in seen],
        "memory_mb": peak_mb(),
        "memory_before_mb": before,
        "parts": PARTS,
        "others": meter.others(),
        "torch": torch.__version__,
    }
    if args.device == "cuda":
        report["gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(report))


if __name__ == "__main__":
    main()
