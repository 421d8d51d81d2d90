"""What each special path of a GPU is worth: rounds with it switched off, against rounds with all.

    python -m bench.paths [--workloads lenet lanes dnn texts small] [--only PATH ...] [--json FILE]

A path is code that only makes rounds faster. Each is switched off by itself: its entry is replaced
by the plain way. A figure is the time of a round without the path over the time with it, so above 1
the path gains. Every measurement without stands between two with everything on. ``torch.compile``
is tried on the plain step of all lanes, in place of graphs and kernels.

lenet      20 clients of very different sizes (Dirichlet 0.1 of Fashion-MNIST), batch 64, tested
           in every round (``small`` in every tenth, the others not)
lanes      100 equal clients, images of the size of CIFAR's, LeNet-5, batch 64
small      1,000 clients of 50 images, cohorts of 50, a two-layer CNN, batch 10
dnn        100 clients of 600 samples, 784-100-10, batch 20
texts      10 clients, two LSTM layers of 50, batch 400
resnet     ResNet-8 with GroupNorm, 100 lanes
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

import sartor
from bench import device, results
from sartor.core import rng, tree
from sartor.core.loops import lstm_loop
from sartor.core.task import masked_mean
from sartor.engines import vectorised
from sartor.engines.cuda import graphs
from sartor.engines.lanes import leaves, operations

SETTLED = 14
"""Rounds after which all common graphs have been recorded."""


def _equal(clients: int, each: int, *shape: int) -> sartor.Federation:
    x = torch.randn(clients * each, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1))
    return sartor.Federation.from_arrays(x, y, client=np.arange(len(x)) % clients, test=0.1)


def _texts() -> sartor.Federation:
    from bench.prepare import texts

    x, y, *_ = texts(10 * device.TEXTS["samples"], 0)
    return sartor.Federation.from_arrays(x, y, client=np.arange(len(x)) % 10, tokens=True)


def _workload(name: str) -> tuple[sartor.Federation, Any, dict[str, Any]]:
    """Return the data, the network and the settings of a workload."""
    if name == "lenet":
        fed = device.fashion()
        local = sartor.Local(batch=64, epochs=2, lr=0.05)
        return fed, sartor.models.lenet5(fed), {"local": local, "eval_every": 1}
    if name == "lanes":
        fed = device.made_up(100, 900, 100)
        return fed, sartor.models.lenet5(fed), {"local": sartor.Local(epochs=1, batch=64, lr=0.01)}
    if name == "small":
        fed = device.made_up(1000, 50, 10)
        local = sartor.Local(epochs=1, batch=10, lr=0.1)
        return fed, device.TwoLayers(), {"local": local, "participation": 50, "eval_every": 10}
    if name == "dnn":
        fed = _equal(100, 600, 784)
        return fed, sartor.models.dnn(fed), {"local": sartor.Local(epochs=1, batch=20, lr=0.05)}
    if name == "texts":
        fed = _texts()
        return fed, sartor.models.lstm(fed), {"local": sartor.Local(batch=400, steps=20, lr=0.1)}
    fed = device.made_up(100, 256, 8)
    return fed, sartor.models.resnet8(fed), {"local": sartor.Local(epochs=1, batch=64, lr=0.01)}


def _without(*functions: Any) -> Callable[[], Any]:
    """Return a switch that leaves functions of torch or of ours to their plain way."""
    forms = {k: v for k, v in operations.LaneOperations.forms.items() if k not in functions}
    return lambda: mock.patch.object(operations.LaneOperations, "forms", forms)


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


def _plainly(self: Any, fn: Any, apply: Callable[..., Any], *args: Any) -> Any:
    return apply(*args)


@contextlib.contextmanager
def _no_graphs() -> Iterator[None]:
    """Leave everything to vmap: no graphs, no kernels."""
    with mock.patch("sartor.engines.Graphed", vectorised.Vectorised):
        yield


@contextlib.contextmanager
def _compiled() -> Iterator[None]:
    """Compile the plain step of all lanes with ``torch.compile``."""
    plain = vectorised.over_lanes

    def over_lanes(fn: Any, *rest: Any, **more: Any) -> Any:
        if getattr(fn, "__name__", "") != "step":
            return plain(fn, *rest, **more)
        if fn not in known:
            mapped = plain(fn, *rest, **more)
            known[fn] = torch.compile(mapped, dynamic=False, mode="max-autotune-no-cudagraphs")
        return known[fn]

    known: dict[Any, Any] = {}
    with _no_graphs(), mock.patch.object(vectorised, "over_lanes", over_lanes):
        yield


PATHS: dict[str, Callable[[], Any]] = {
    "recorded server and client functions": _replaced(graphs.Graphed, "_often", _plainly),
    "convolutions": _without(torch.conv2d),
    "poolings": _without(F.max_pool2d, torch.max_pool2d),
    "dense layers": _without(F.linear),
    "losses and means": _without(F.cross_entropy, masked_mean),
    "updates in one launch": _without(
        tree.addcmul_leaves, tree.add_difference_leaves, tree.pulled_step_leaves
    ),
    "settling in one launch": _replaced(leaves, "takes_settle", lambda *a: False),
    "batches in one launch": _replaced(leaves, "takes_fetch", lambda *a: False),
    "LSTM in one launch": _without(lstm_loop),
    "random draws": _without(rng.normal),
    "all lane operators (plain vmap in graphs)": _replaced(operations.LaneOperations, "forms", {}),
    "graphs and operators (plain vmap)": _no_graphs,
    "torch.compile of the plain step": _compiled,
}
"""Every path, and how to do without it."""

TOUCHES = {
    "LSTM in one launch": ("texts",),
    "random draws": (),
    "convolutions": ("lenet", "lanes", "small", "resnet"),
    "poolings": ("lenet", "lanes", "small"),
    "torch.compile of the plain step": ("lanes", "dnn"),
}
"""The workloads that a path has something to do in, where that is not all of them."""


def timed(name: str, rounds: int) -> tuple[float, float, float]:
    """Return the settled seconds of a round, those of the first, and GiB at the peak."""
    fed, model, settings = _workload(name)
    torch.cuda.reset_peak_memory_stats()
    settings = {"eval_every": SETTLED + rounds, **settings}
    times = device.train(fed, model, SETTLED + rounds, **settings)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return float(times["round"][SETTLED:-1].mean()), float(times["round"][0]), peak


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    names = ("lenet", "lanes", "small", "dnn", "texts", "resnet")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", choices=[*PATHS], default=[*PATHS])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--minutes", type=float, default=60.0)
    results.add_outputs(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here; run this on a machine with one.")
    end = time.monotonic() + 60 * args.minutes
    rows = []
    for workload in args.workloads:
        timed(workload, args.rounds)  # compiles
        before = timed(workload, args.rounds)
        print(f"{workload}: {before[0]:.4g} s with everything on, {before[2]:.2f} GiB", flush=True)
        for path in args.only:
            if workload not in TOUCHES.get(path, names) or time.monotonic() > end:
                continue
            try:
                with PATHS[path]():
                    off = timed(workload, args.rounds)
            except Exception as error:  # a path that others stand on may not be missing
                print(f"{workload:8}{path:45} {type(error).__name__}: {error}"[:200], flush=True)
                continue
            after = timed(workload, args.rounds)
            on = (before[0] + after[0]) / 2
            row = {"workload": workload, "path": path, "with": on, "without": off[0]}
            row |= {"gain": off[0] / on, "first": off[1], "GiB": off[2], "GiB with": after[2]}
            rows.append(row)
            print(f"{workload:8}{path:45} {off[0] / on:6.2f}  {off[0]:.4g} s", flush=True)
            before = after
    results.write_outputs(args, "paths", rows=rows)


if __name__ == "__main__":
    main()
