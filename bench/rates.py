"""Measure the rates of a machine: operations and bytes per second.

    python -m bench.rates [--device cuda] [--threads N]

Operations are measured by a large product of two float32 matrices (on a GPU without the shorter
formats of its tensor cores, PyTorch's default), bytes by a large copy, where a byte counts twice,
read and written. The fastest of several repeats counts, because a floor needs the best that the
machine can do.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import load


@dataclass(frozen=True)
class Rates:
    """The rates of a device.

    Attributes:
        flops: operations per second.
        bytes: bytes per second, read or written.
        device: its name.
        others: processors that other processes kept busy during the measurement, which makes the
            rates too low and shares of the floor too high.
    """

    flops: float
    bytes: float
    device: str = ""
    others: float = 0.0

    def __str__(self) -> str:
        """Return name and rates.

        >>> print(Rates(2e11, 2e10))
        rates as given: 200 GFLOP/s, 20.0 GB/s
        """
        name = self.device or "rates as given"
        return f"{name}: {self.flops / 1e9:,.0f} GFLOP/s, {self.bytes / 1e9:,.1f} GB/s"


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def fastest(job: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """Return the shortest time of a repeated job: at least three times, after a warm-up."""
    job()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        began = clock()
        job()
        times.append(clock() - began)
    return min(times)


def measure_rates(
    device: str = "cpu",
    *,
    seconds: float = 1.0,
    side: int | None = None,
    megabytes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure operations per second by a product of matrices, and bytes per second by a copy.

    Args:
        device: "cpu" or "cuda".
        seconds: of each measurement.
        side: of the matrices; 2048, or 8192 on a GPU.
        megabytes: that are copied; 256, or 2048 on a GPU.
        clock: in seconds.
    """
    gpu = device == "cuda"
    side, megabytes = side or (8192 if gpu else 2048), megabytes or (2048 if gpu else 256)
    wait = torch.cuda.synchronize if gpu else lambda: None
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    out = torch.empty_like(left)
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    meter = load.Meter()
    product = fastest(lambda: (torch.mm(left, right, out=out), wait()), seconds, clock)
    moved = fastest(lambda: (target.copy_(source), wait()), seconds, clock)
    rates = (2 * side**3 / product, 2 * megabytes * 2**20 / moved)
    return Rates(*rates, device_name(device), meter.others())


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description="Measure the rates of this machine.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(asdict(measure_rates(args.device))))


if __name__ == "__main__":
    main()
