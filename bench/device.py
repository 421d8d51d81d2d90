"""Measure a GPU, and compare with the floors given by arithmetic and memory.

    python -m bench.device lenet lanes codes headline large texts sweep methods [--profile]
    python -m bench.device lanes --rates 67e12 4.8e12 --html FILE

lenet      Fashion-MNIST, 20 clients, Dirichlet 0.1, LeNet-5, batch 64, 2 epochs, all tested
lanes      100 clients at once, CIFAR-shaped LeNet-5, batch 64: client-steps a second
codes      `lanes` on images of 256 grey values, one byte each, against numbers of four bytes
headline   1,000 clients of 50 CIFAR-shaped images, cohorts of 50, batch 10, a two-layer CNN,
           tested on 10,000 images every 10 rounds: seconds for 1,500 rounds
large      ResNet-8 with GroupNorm in 100 lanes, and LeNet-5 in 1,000 (50 runs of 20 clients)
texts      10 clients, two LSTM layers of 50, 25 tokens, batch 400, 20 steps: one launch a layer
           against step by step
sweep      20 values of λ × 5 seeds of `lenet` in one pass, against one run
methods    seconds a round of the costlier methods, against FedAvg

`lenet`, `sweep` and `methods` use Fashion-MNIST from SARTOR_DATA; the others use random data,
because the time does not depend on the images. Floors are those of ``bench.floors``, with rates
measured in the same run, or given (the data sheet of an H200: 67e12 float32 operations per second
without tensor cores, 4.8e12 bytes per second).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from bench import floors, results
from bench.rates import Rates, measure_rates

LENET = {"batch": 64, "epochs": 2}
LANES = {"clients": 100, "samples": 1800, "tests": 600, "batch": 64, "epochs": 2}
TEXTS = {"samples": 800, "batch": 400, "steps": 20}
LARGE = {"samples": 512, "tests": 8, "runs": 50, "rounds": 8}
HEADLINE = {
    "clients": 1000, "samples": 50, "tests": 10, "cohort": 50, "batch": 10, "epochs": 1,
    "test_every": 10, "rounds": 1500,
}  # fmt: skip
SETTLED = 15  # rounds after which all common graphs have been recorded
PARTS = ("train", "server", "evaluate")
METHODS = (
    "fedprox",
    "fedapa",
    "fedala",
    "fedpac",
    "apple",
    "pfedhn",
    "fedem",
    "pfedbayes",
    "pfedme",
)


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


def made_up(clients: int, samples: int, tests: int) -> sartor.Federation:
    """Make CIFAR-shaped clients with the given numbers of training and test samples each."""
    rng = torch.Generator().manual_seed(0)
    each = samples + tests
    x = torch.randn(clients * each, 3, 32, 32, generator=rng)
    y = torch.randint(0, 10, (clients * each,), generator=rng)
    ids = np.arange(clients * each) % clients
    return sartor.Federation.from_arrays(x, y, client=ids, test=tests / each)


def fashion() -> sartor.Federation:
    """Divide Fashion-MNIST as the other benchmarks do."""
    return sartor.Federation.from_dataset("fashion_mnist", partition="dirichlet:0.1", clients=20)


def train(
    fed: sartor.Federation, model: nn.Module, rounds: int, **settings: Any
) -> dict[str, np.ndarray]:
    """Return the seconds of every round and of its parts.

    Rounds without evaluation do not wait for the device, so each gets the mean of their time.
    """
    method = settings.pop("method", "fedavg")
    settings = {"device": "auto", "points": ("pre",), **settings}
    found = sartor.fit(method, fed, model=model, rounds=rounds, **settings)
    return {name: np.array(times) for name, times in found.ledger.seconds.items()}


def lenet(rounds: int) -> Iterator[dict[str, Any]]:
    """Time the workload that every library is compared by."""
    fed, local = fashion(), sartor.Local(batch=LENET["batch"], epochs=LENET["epochs"], lr=0.05)
    model = sartor.models.lenet5(fed)
    seconds = train(fed, model, rounds, local=local)["round"]
    yield {
        "what": "lenet",
        "seconds a round": float(np.median(seconds[3:])),
        "fastest": float(seconds.min()),
        "first": float(seconds[0]),
        "work": floors.work_of_federation(fed, model, **LENET, test_every=1),
    }


def lanes(rounds: int) -> Iterator[dict[str, Any]]:
    """Time 100 equal clients, in float32 and with bfloat16 networks."""
    fed = made_up(LANES["clients"], LANES["samples"], LANES["tests"])
    model = sartor.models.lenet5(fed)
    sizes = {name: LANES[name] for name in ("batch", "epochs")}
    work = floors.work_of_federation(fed, model, **sizes)
    for compute in (None, "bfloat16"):
        local = sartor.Local(batch=sizes["batch"], epochs=sizes["epochs"], lr=0.01)
        # Graphs are recorded before the first evaluation; later rounds do not wait for the device.
        seconds = train(fed, model, 3 * SETTLED, local=local, compute=compute, eval_every=SETTLED)
        middle = float((seconds["round"] - seconds["evaluate"])[SETTLED:].mean())
        yield {
            "what": "lanes",
            "network in": compute or "float32",
            "seconds a round": middle,
            "client-steps a second": work.steps / middle,
            "work": work,
        }


def codes(rounds: int) -> Iterator[dict[str, Any]]:
    """Time 100 equal clients on images with 256 values, and on others."""
    fed = made_up(LANES["clients"], LANES["samples"], LANES["tests"])
    grey = replace(fed, x=(32 * fed.x).round().clamp(-128, 127) / 32)
    model = sartor.models.lenet5(fed)
    local = sartor.Local(batch=LANES["batch"], epochs=LANES["epochs"], lr=0.01)
    found = []
    for images in (fed, grey):
        seconds = train(images, model, 3 * SETTLED, local=local, eval_every=SETTLED)
        found.append(float((seconds["round"] - seconds["evaluate"])[SETTLED:].mean()))
    yield {"what": "codes", "numbers": found[0], "bytes": found[1], "ratio": found[0] / found[1]}


def large(rounds: int) -> Iterator[dict[str, Any]]:
    """Time workloads that need much memory: a larger network, and many lanes."""
    few = made_up(LANES["clients"], LARGE["samples"], LARGE["tests"])
    model = sartor.models.resnet8(few)
    local = sartor.Local(batch=LANES["batch"], epochs=1, lr=0.01)
    yield {"what": "ResNet-8", **_pace(few, model, local=local)}
    fed, lenet = fashion(), sartor.Local(batch=LENET["batch"], epochs=LENET["epochs"], lr=0.05)
    many = _pace(fed, sartor.models.lenet5(fed), local=lenet, seeds=range(LARGE["runs"]))
    yield {"what": f"LeNet-5, {LARGE['runs'] * fed.num_clients:,} lanes", **many}


def texts(rounds: int) -> Iterator[dict[str, Any]]:
    """Time LSTM layers that take all steps in one launch, and step by step."""
    from bench.prepare import texts as drawn
    from sartor.engines.lanes import recurrence

    x, y, *_ = drawn(10 * TEXTS["samples"], 0)
    fed = sartor.Federation.from_arrays(x, y, client=np.arange(len(x)) % 10, tokens=True)
    local = sartor.Local(batch=TEXTS["batch"], steps=TEXTS["steps"], lr=0.1)
    found, most = [], recurrence._MOST_HIDDEN
    try:
        for limit in (most, 0):
            recurrence._MOST_HIDDEN = limit
            model = sartor.models.lstm(fed)
            times = train(fed, model, SETTLED + 4, local=local, eval_every=SETTLED)
            found.append(float(np.median(times["train"][SETTLED:])))
    finally:
        recurrence._MOST_HIDDEN = most
    yield {
        "what": "texts",
        "one launch, seconds a round": found[0],
        "step by step": found[1],
        "ratio": found[1] / found[0],
    }


def _pace(fed: sartor.Federation, model: nn.Module, **settings: Any) -> dict[str, float]:
    """Return client-steps per second in training, and the peak memory of the device."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    local, runs = settings["local"], len(settings.get("seeds", (0,)))
    times = train(fed, model, LARGE["rounds"], eval_every=LARGE["rounds"], **settings)
    steps = local.epochs * sum(-(-size // local.batch) for size in fed.train.sizes.tolist())
    seconds = float(times["train"][2:].mean())
    held = {"GiB": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}
    return {"client-steps a second": runs * steps / seconds, **held}


def headline(rounds: int) -> Iterator[dict[str, Any]]:
    """Time small cohorts of a larger population."""
    fed = made_up(HEADLINE["clients"], HEADLINE["samples"], HEADLINE["tests"])
    sizes = {name: HEADLINE[name] for name in ("batch", "epochs")}
    cohort, every = HEADLINE["cohort"], HEADLINE["test_every"]
    local = sartor.Local(batch=sizes["batch"], epochs=sizes["epochs"], lr=0.1)
    many = HEADLINE["rounds"]
    times = train(fed, TwoLayers(), many, local=local, participation=cohort, eval_every=every)
    rest = float(np.mean(times["round"][3 * SETTLED :]))
    yield {
        "what": "headline",
        "seconds a round": rest,
        "1,500 rounds": many * rest,
        "with what is compiled": float(times["round"].sum()),
        "first": float(times["round"][0]),
        **{f"{part} a round": float(times[part][3 * SETTLED :].mean()) for part in PARTS},
        "work": floors.work_of_federation(
            fed, TwoLayers(), **sizes, cohort=cohort, test_every=every
        ),
    }


def sweep(rounds: int) -> Iterator[dict[str, Any]]:
    """Time a sweep of 2,000 lanes against one run."""
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.05)
    model = sartor.models.lenet5(fed)
    one = train(fed, model, SETTLED + 4, method="fedprox", local=local)["round"]
    grid = {"prox_strength": [float(v) for v in np.logspace(-3, 1, 20)]}
    settings = {"method": "fedprox", "local": local, "seeds": range(5), "sweep": grid}
    many = train(fed, model, 6, **settings)["round"]
    yield {
        "what": "sweep",
        "one run, seconds a round": float(np.median(one[SETTLED:])),
        "100 runs, seconds a round": float(np.median(many[2:])),
        "ratio": float(np.median(many[2:]) / np.median(one[SETTLED:])),
    }


def methods(rounds: int) -> Iterator[dict[str, Any]]:
    """Time the costlier methods against FedAvg."""
    fed, local = fashion(), sartor.Local(epochs=2, batch=64, lr=0.001)
    base = 0.0
    for name in ("fedavg", *METHODS):
        model = sartor.models.lenet5(fed)
        times = train(fed, model, SETTLED + 4, method=name, local=local)["round"]
        seconds = float(np.median(times[SETTLED:]))
        base = base or seconds
        yield {"what": name, "seconds a round": seconds, "times FedAvg": seconds / base}


def profiled(rounds: int) -> None:
    """Print the kernels of one round of ``lenet``."""
    from torch.profiler import ProfilerActivity, profile

    class Watch:
        """Profiles the 16th round."""

        rounds = 0

        def start(self, total_rounds: int, description: str) -> None:
            """Do nothing."""

        def update(self, round_index: int, info: dict[str, Any]) -> None:
            """Begin after one round, end after the next."""
            self.rounds += 1
            if self.rounds == 15:
                tool.__enter__()
            elif self.rounds == 16:
                tool.__exit__(None, None, None)

        def stop(self) -> None:
            """Do nothing."""

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


WORK = {f.__name__: f for f in (lenet, lanes, codes, headline, large, texts, sweep, methods)}


def beside_floor(row: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Replace the work of a row by its floors and the share of the floor that was reached."""
    row = dict(row)
    work = row.pop("work", None)
    if work is None:
        return row
    least = work.floor(rates)
    return {
        **row,
        "floor by arithmetic": least["arithmetic"],
        "floor by memory": least["memory"],
        "share of the floor": work.share(row["seconds a round"], rates),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", choices=[*WORK, []], default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--rates", nargs=2, type=float, metavar=("FLOPS", "BYTES"), help="per second"
    )
    results.add_outputs(parser)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates = Rates(*args.rates) if args.rates else measure_rates(device)
    print(rates)
    rows = []
    for name in args.what or WORK:
        for found in WORK[name](args.rounds):
            row = beside_floor(found, rates)
            rows.append(row)
            shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            print("  ".join(shown), flush=True)
    if args.profile:
        profiled(args.rounds)
    results.write_outputs(args, "device", device=device, rates=asdict(rates), rows=rows)


if __name__ == "__main__":
    main()
