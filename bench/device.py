"""What a GPU reaches, beside the floors that follow from arithmetic and memory.

    python -m bench.device lenet lanes yardstick sweep methods [--profile] [--json FILE]

lenet      Fashion-MNIST, 20 clients, Dirichlet 0.1, LeNet-5, batch 64, 2 epochs, all tested
lanes      100 clients at once, CIFAR-shaped LeNet-5, batch 64: client-steps a second
yardstick  1,000 clients of 50 CIFAR-shaped images, cohorts of 50, batch 10, a two-layer CNN,
           tested every 10 rounds: seconds for 1,500 rounds, from 200
sweep      20 values of λ × 5 seeds of `lenet` in one pass, against one run
methods    seconds a round of the costlier methods, against FedAvg

Data are Fashion-MNIST from SARTOR_DATA for `lenet`, `sweep` and `methods`, made up for the others
(time does not depend on what images show). Floors: the floating-point operations by the card's
float32 rate, and the bytes that parameters, gradients and batches must move by its memory's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import sartor

PEAK_FLOPS, PEAK_BYTES = 67e12, 4.8e12  # NVIDIA H200: float32 without tensor cores, HBM3e
METHODS = ("fedapa", "fedala", "fedpac", "apple", "pfedhn", "fedem", "pfedbayes", "pfedme")


class Clock:
    """A progress that notes the seconds of every round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.last = 0.0

    def start(self, total_rounds: int, description: str) -> None:
        """Begin."""
        self.last = time.perf_counter()

    def update(self, round_index: int, info: dict[str, Any]) -> None:
        """Note a round."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.rounds.append(now - self.last)
        self.last = now

    def stop(self) -> None:
        """Nothing to end."""


class TwoLayers(nn.Module):
    """Two convolutions of 3 × 3 (32 and 64 channels), a pooling, 128 hidden units."""

    head = "fc"

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * 14 * 14, 128)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        logits: Tensor = self.fc(F.relu(self.hidden(x.flatten(1))))
        return logits


def made_up(clients: int, samples: int) -> sartor.Federation:
    """Make CIFAR-shaped clients with so many training samples each (and a third for tests)."""
    rng = torch.Generator().manual_seed(0)
    number = clients * samples * 4 // 3
    x = torch.randn(number, 3, 32, 32, generator=rng)
    y = torch.randint(0, 10, (number,), generator=rng)
    return sartor.Federation.from_arrays(x, y, client=np.arange(number) % clients)


def fashion() -> sartor.Federation:
    """Divide Fashion-MNIST as the other benchmarks do."""
    return sartor.Federation.from_dataset("fashion_mnist", partition="dirichlet:0.1", clients=20)


def lane_steps(fed: sartor.Federation, batch: int, epochs: int) -> int:
    """Count the steps of all clients in a round."""
    return int((epochs * -(-np.diff(fed.train.offsets.numpy()) // batch)).sum())


def floor(model: nn.Module, fed: sartor.Federation, batch: int, steps: int) -> dict[str, float]:
    """Return the least seconds of so many steps: by arithmetic, and by memory."""
    x = torch.zeros(batch, *fed.x.shape[1:])
    with FlopCounterMode(display=False) as counter:
        model(x)
    flops = 3 * counter.get_total_flops() * steps  # backwards twice as many as forwards
    parameters = 4 * sum(p.numel() for p in model.parameters())
    moved = (5 * parameters + 2 * 4 * x.numel()) * steps  # read twice, gradient, update; batch
    return {"arithmetic": flops / PEAK_FLOPS, "memory": moved / PEAK_BYTES}


def train(fed: sartor.Federation, model: nn.Module, rounds: int, **settings: Any) -> list[float]:
    """Return the seconds of every round."""
    clock = Clock()
    method = settings.pop("method", "fedavg")
    settings = {"device": "auto", "points": ("pre",), **settings}
    sartor.fit(method, fed, model=model, rounds=rounds, progress=clock, **settings)
    return clock.rounds


def lenet(rounds: int) -> Iterator[dict[str, Any]]:
    """Time the workload that every library is compared by."""
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.05)
    model = sartor.models.lenet5(fed)
    seconds = train(fed, model, rounds, local=local)
    least = floor(model, fed, 64, lane_steps(fed, 64, 2))
    yield {
        "what": "lenet",
        "seconds a round": float(np.median(seconds[3:])),
        "fastest": min(seconds),
        "first": seconds[0],
        **{f"floor by {k}": v for k, v in least.items()},
    }


def lanes(rounds: int) -> Iterator[dict[str, Any]]:
    """Time 100 equal clients, in float32 and with bfloat16 networks."""
    fed = made_up(100, 1800)
    model = sartor.models.lenet5(fed)
    steps = lane_steps(fed, 64, 2)
    for compute in (None, "bfloat16"):
        local = sartor.Local(epochs=2, batch=64, lr=0.01)
        seconds = train(fed, model, 6, local=local, compute=compute, eval_every=6)
        middle = float(np.median(seconds[1:-1]))
        yield {
            "what": "lanes",
            "network in": compute or "float32",
            "client-steps a second": steps / middle,
            "share of the arithmetic floor": floor(model, fed, 64, steps)["arithmetic"] / middle,
        }


def yardstick(rounds: int) -> Iterator[dict[str, Any]]:
    """Time small cohorts of a larger population."""
    fed = made_up(1000, 50)
    local = sartor.Local(epochs=1, batch=10, lr=0.1)
    seconds = train(fed, TwoLayers(), 200, local=local, participation=50, eval_every=10)
    rest = float(np.mean(seconds[20:]))
    yield {
        "what": "yardstick",
        "seconds a round": rest,
        "1,500 rounds": 1500 * rest,
        "first": seconds[0],
        **{f"floor by {k}": v for k, v in floor(TwoLayers(), fed, 10, 250).items()},
    }


def sweep(rounds: int) -> Iterator[dict[str, Any]]:
    """Time a sweep of 2,000 lanes against one run."""
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.05)
    model = sartor.models.lenet5(fed)
    one = train(fed, model, 6, method="fedprox", local=local)
    grid = {"lam": [float(v) for v in np.logspace(-3, 1, 20)]}
    many = train(fed, model, 6, method="fedprox", local=local, seeds=range(5), sweep=grid)
    yield {
        "what": "sweep",
        "one run, seconds a round": float(np.median(one[2:])),
        "100 runs, seconds a round": float(np.median(many[2:])),
        "ratio": float(np.median(many[2:]) / np.median(one[2:])),
    }


def methods(rounds: int) -> Iterator[dict[str, Any]]:
    """Time the costlier methods against FedAvg."""
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.01)
    base = float(np.median(train(fed, sartor.models.lenet5(fed), 8, local=local)[3:]))
    for name in METHODS:
        model = sartor.models.lenet5(fed)
        seconds = float(np.median(train(fed, model, 6, method=name, local=local)[3:]))
        yield {"what": name, "seconds a round": seconds, "times FedAvg": seconds / base}


def profiled(rounds: int) -> None:
    """Print the kernels of one round of ``lenet``."""
    from torch.profiler import ProfilerActivity, profile

    class Watch(Clock):
        """Profiles the 16th round."""

        def update(self, round_index: int, info: dict[str, Any]) -> None:
            """Begin after one round, end after the next."""
            super().update(round_index, info)
            if len(self.rounds) == 15:
                tool.__enter__()
            elif len(self.rounds) == 16:
                tool.__exit__(None, None, None)

    tool = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.05)
    sartor.fit(
        "fedavg",
        fed,
        model=sartor.models.lenet5(fed),
        rounds=17,
        local=local,
        progress=Watch(),
        points=("pre",),
    )
    kernels = [e for e in tool.key_averages() if e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    print(f"{sum(e.count for e in kernels)} kernels, ", end="")
    print(f"{sum(e.self_device_time_total for e in kernels) / 1e3:.1f} ms")
    for e in kernels[:20]:
        print(f"{e.self_device_time_total / 1e3:8.2f} ms {e.count:6d} × {e.key[:90]}")


WORK = {f.__name__: f for f in (lenet, lanes, yardstick, sweep, methods)}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", choices=[*WORK, []], default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.what or WORK:
        for row in WORK[name](args.rounds):
            rows.append(row)
            shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            print("  ".join(shown), flush=True)
    if args.profile:
        profiled(args.rounds)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
