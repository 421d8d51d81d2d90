"""Run FedAvg with the PyPI package fluke-fl through its public classes, on the same data.

It runs in its own environment, which has fluke-fl but not Sartor. After every round the global
model is evaluated on the test samples of all clients together, which is the same work as evaluating
it client by client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.plain import make_model
from bench.workloads import Share

_KEEP: list[Any] = []


class Watch:
    """An observer that records the time of every round and the accuracy after it."""

    def __init__(self, device: str) -> None:
        self.device, self.began, self.accuracy = device, 0.0, 0.0
        self.seen: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        """Ignore all other events."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def start_round(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def server_evaluation(self, *args: Any, evals: dict[str, float], **kwargs: Any) -> None:
        """Record the accuracy of the global model."""
        self.accuracy = float(evals["accuracy"])

    def end_round(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seen.append((time.perf_counter() - self.began, self.accuracy))


class Given:
    """A splitter that returns our partition."""

    def __init__(self, share: Share, loader: Any) -> None:
        self.share, self.loader = share, loader

    def assign(self, clients: int, batch_size: int) -> Any:
        """Return a loader per client for training, and one for all test samples."""
        share = self.share
        x, y = torch.from_numpy(share.x), torch.from_numpy(share.y)

        def load(rows: Any, batch: int, shuffle: bool) -> Any:
            return self.loader(
                x[rows],
                y[rows],
                num_labels=share.workload.classes,
                batch_size=batch,
                shuffle=shuffle,
                skip_singleton=False,
            )

        trains = [load(rows, batch_size, True) for rows in share.train]
        everything = load(np.concatenate(share.test), 256, False)
        return (trains, [None] * clients), everything


def _without_vision_kernels() -> None:
    """Declare two operators that torchvision's kernels would define; nothing here calls them.

    fluke-fl imports torchvision, whose published wheel cannot load its kernels beside a torch
    without CUDA, and then fails at import because these names are unknown.
    """
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEEP.append(library)  # the names disappear when the library is garbage-collected


def rounds(share: Share, number: int, device: str, seed: int) -> Iterator[tuple[float, float]]:
    """Train, and yield the seconds of each round with its evaluation, and the accuracy after it."""
    if not torch.cuda.is_available():
        _without_vision_kernels()
    fluke, data, algorithms = (
        import_module(name) for name in ("fluke", "fluke.data", "fluke.algorithms")
    )
    evaluation = import_module("fluke.evaluation")
    w = share.workload
    env = fluke.FlukeENV()
    env.set_seed(seed)
    env.set_device(device)
    env.set_evaluator(evaluation.ClassificationEval(eval_every=1, n_classes=w.classes))
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)
    settings = {
        "client": {
            "batch_size": w.batch,
            "local_epochs": w.epochs,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": w.lr},
            "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        },
        "server": {"weighted": True},
        "model": make_model(w.model),
    }
    splitter = Given(share, data.FastDataLoader)
    federation = algorithms.CentralizedFL(w.clients, splitter, fluke.DDict(settings))
    watch = Watch(device)
    federation.attach(watch)
    federation.run(number, w.cohort / w.clients)
    yield from watch.seen
