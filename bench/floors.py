"""Compute the least time of a round from its operations and bytes and the rates of a device.

    python -m bench.floors [--device cuda] [--rates FLOPS BYTES]

Symbol  Meaning
c_l     operations of the products of layer l on one sample, two per multiply-add
d       parameters
x       numbers of one sample
n       samples that are trained on in a round, all epochs of the cohort
s       client-steps in a round
m       clients that train in a round
t       test samples that are scored in a round

The forward pass of a sample costs Σ_l c_l. In the backward pass every layer costs c_l for its
weights, and again c_l for its input unless that is the data (the sum Σ' leaves those layers out).
SGD and the mean take two operations per parameter:

    F = n (2 Σ c_l + Σ' c_l) + t Σ c_l + 2 d (s + m)

Every step reads and writes a client's parameters once and reads its batch; the test samples are
read, and the mean reads m models and writes one (4 bytes per number, 8 per label):

    B = 8 d s + (4 x + 8)(n + t) + 4 d (m + 1)

The floor is max(F / rate of operations, B / rate of bytes). Both counts leave out what a better
program could avoid: activations, poolings, biases, gradients in memory, gathered batches. They
assume plain products (no Winograd transform) and parameters that leave the caches between steps.
The parameters of a small network may stay in a cache, and then a program can be faster than the
floor by memory; both floors are therefore always shown. Rates are measured in the same run: a large
product of float32 matrices, and a large copy (bytes read plus bytes written), the best of several.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.plain import make_model
from bench.rates import Rates, measure_rates
from bench.workloads import LENGTH, WORKLOADS, Share, Workload

if TYPE_CHECKING:
    from sartor.data import Federation

COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM)
FREE = (nn.Embedding,)  # looked up, not multiplied


@dataclass(frozen=True)
class Sample:
    """The operations of a network on one sample, forward and backward, and its size."""

    forward: int
    backward: int
    parameters: int
    numbers: int


@dataclass(frozen=True)
class Work:
    """The work of a round: floating-point operations, bytes, client-steps."""

    flops: float
    bytes: float
    steps: float

    def floor(self, rates: Rates) -> dict[str, float]:
        """Return the floor in seconds: by arithmetic, by memory, and the larger of both."""
        arithmetic, memory = self.flops / rates.flops, self.bytes / rates.bytes
        return {"arithmetic": arithmetic, "memory": memory, "seconds": max(arithmetic, memory)}

    def share(self, seconds: float, rates: Rates) -> float:
        """Return the floor divided by a measured time; 1 is the best possible."""
        return self.floor(rates)["seconds"] / seconds


def count_sample(model: nn.Module, shape: Sequence[int]) -> Sample:
    """Count the products of a network on one sample, from the shapes of its layers alone.

    Args:
        model: all its parameters are in linear layers, convolutions, LSTM layers and embeddings.
        shape: of a sample.

    Raises:
        ConfigError: another layer has parameters, so the count would be too small.
    """
    from sartor.core.errors import ConfigError

    unknown = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if layer._parameters and not isinstance(layer, (*COUNTED, *FREE))
    ]
    if unknown:
        raise ConfigError(
            f"The operations of {', '.join(unknown)} cannot be counted: only linear layers, "
            "convolutions, LSTM layers and embeddings are known here; add the layer's rule to "
            "bench/floors.py."
        )
    ghost = copy.deepcopy(model).to("meta").requires_grad_()
    forward, backward = [], []

    def note(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(layer, nn.LSTM):  # every step multiplies by all weights
            sizes = {name: p.numel() for name, p in layer.named_parameters() if "weight" in name}
            steps = 2 * inputs[0].shape[:-1].numel()
            cost = steps * sum(sizes.values())
            first = steps * sum(size for name, size in sizes.items() if "ih_l0" in name)
        else:
            first = cost = 2 * output.numel() * layer.weight[0].numel()
        forward.append(cost)
        # The data need no gradient, so the layer that reads them has one backward product.
        backward.append(2 * cost - (0 if inputs[0].requires_grad else first))

    for layer in ghost.modules():
        if isinstance(layer, COUNTED):
            layer.register_forward_hook(note)
    is_text = any(isinstance(layer, FREE) for layer in ghost.modules())
    with torch.enable_grad():
        ghost(torch.empty(1, *shape, device="meta", dtype=torch.int64 if is_text else None))
    parameters = sum(p.numel() for p in model.parameters())
    return Sample(sum(forward), sum(backward), parameters, math.prod(shape))


def count_round(
    sample: Sample,
    sizes: Sequence[int],
    *,
    batch: int,
    epochs: int,
    cohort: int | None = None,
    tested: float = 0.0,
) -> Work:
    """Count a round of federated averaging; the work of a cohort is the mean over uniform draws.

    Args:
        sample: of :func:`count_sample`.
        sizes: training samples of every client.
        batch: samples of a step; the last one of an epoch may have fewer.
        epochs: of local training.
        cohort: clients that train in a round; all if None.
        tested: test samples that are scored per round.
    """
    m = len(sizes) if cohort is None else cohort
    part, d = m / len(sizes), sample.parameters
    n = part * epochs * sum(sizes)
    s = part * epochs * sum(-(-size // batch) for size in sizes)
    flops = n * (sample.forward + sample.backward) + tested * sample.forward + 2 * d * (s + m)
    moved = 8 * d * s + (4 * sample.numbers + 8) * (n + tested) + 4 * d * (m + 1)
    return Work(float(flops), float(moved), float(s))


def work_of_share(share: Share) -> Work:
    """Count a round of a workload, with the evaluation of every client."""
    w = share.workload
    sample = count_sample(make_model(w.model), share.x.shape[1:])
    sizes = [len(rows) for rows in share.train]
    tested = sum(len(rows) for rows in share.test)
    return count_round(
        sample, sizes, batch=w.batch, epochs=w.epochs, cohort=w.cohort, tested=tested
    )


def work_of_federation(
    federation: Federation,
    model: nn.Module,
    *,
    batch: int,
    epochs: int,
    cohort: int | None = None,
    test_every: int | None = None,
) -> Work:
    """Count a round on a federation whose clients are evaluated every few rounds, or never."""
    tested = 0.0 if test_every is None else int(federation.test.sizes.sum()) / test_every
    sizes = federation.train.sizes.tolist()
    sample = count_sample(model, federation.input_shape)
    return count_round(sample, sizes, batch=batch, epochs=epochs, cohort=cohort, tested=tested)


def _nominal(workload: Workload) -> Work:
    """Count a workload without its images, with random labels and its own partition."""
    from sartor.data import divide

    w, tests = workload, max(workload.samples // 6, workload.clients)
    labels = np.random.default_rng(0).integers(0, w.classes, w.samples + tests)
    cut = divide(
        labels, w.partition, clients=w.clients, num_train=w.samples, num_classes=w.classes, seed=0
    )
    shape = (LENGTH,) if w.model == "lstm" else (1, 28, 28)
    sample = count_sample(make_model(w.model), shape)
    return count_round(
        sample,
        cut.train.sizes.tolist(),
        batch=w.batch,
        epochs=w.epochs,
        cohort=w.cohort,
        tested=int(cut.test.sizes.sum()),
    )


def known_work() -> dict[str, Work]:
    """Return the work of a round of every workload, those of ``bench.device`` included."""
    from bench import device
    from sartor import models

    lenet = models.lenet5(input_shape=(3, 32, 32), num_classes=10)
    lanes, small = device.LANES, device.HEADLINE
    return {
        **{name: _nominal(workload) for name, workload in WORKLOADS.items()},
        "lanes": count_round(
            count_sample(lenet, (3, 32, 32)),
            [lanes["samples"]] * lanes["clients"],
            batch=lanes["batch"],
            epochs=lanes["epochs"],
        ),
        "headline": count_round(
            count_sample(device.TwoLayers(), (3, 32, 32)),
            [small["samples"]] * small["clients"],
            batch=small["batch"],
            epochs=small["epochs"],
            cohort=small["cohort"],
            tested=small["clients"] * small["tests"] / small["test_every"],
        ),
    }


def main() -> None:
    """Print the floor of every workload."""
    from sartor.results.tables import Table

    parser = argparse.ArgumentParser(
        description="Print the least time of a round of every workload."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--rates", nargs=2, type=float, metavar=("FLOPS", "BYTES"), help="per second"
    )
    args = parser.parse_args()
    rates = Rates(*args.rates) if args.rates else measure_rates(args.device)
    rows = []
    for name, work in known_work().items():
        floor = work.floor(rates)
        milliseconds = [1e3 * floor[kind] for kind in ("arithmetic", "memory", "seconds")]
        rows.append([name, work.steps, work.flops / 1e9, work.bytes / 1e9, *milliseconds])
    columns = ["workload", "client-steps", "GFLOP", "GB", "ms by arithmetic", "ms by memory"]
    print(Table([*columns, "floor, ms a round"], rows, title=str(rates)))


if __name__ == "__main__":
    main()
