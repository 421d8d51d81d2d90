"""Compare ways to take one training step for each of 20 clients on a CPU: LeNet-5.

Run it with ``python -m bench.cpu_lanes``; it prints milliseconds per client-step. Every way is
checked to do the same work: one step of SGD for each lane, on that lane's batch and parameters. The
ways take turns, and only times at which the machine is otherwise idle count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from bench import load
from sartor import models

RATE = 0.01
BASE = "plain module + SGD, 2 threads"
Params = dict[str, Tensor]
Way = Callable[[], None]
Forward = Callable[[Params, Tensor], Tensor]


def lenet(params: Params, x: Tensor) -> Tensor:
    """Apply LeNet-5 with the operators of ``torch.nn``."""
    x = F.max_pool2d(F.relu(F.conv2d(x, params["conv1.weight"], params["conv1.bias"])), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, params["conv2.weight"], params["conv2.bias"])), 2)
    return dense(params, x.flatten(1))


def dense(params: Params, x: Tensor) -> Tensor:
    """Apply the three linear layers of LeNet-5."""
    x = F.relu(F.linear(x, params["fc1.weight"], params["fc1.bias"]))
    x = F.relu(F.linear(x, params["fc2.weight"], params["fc2.bias"]))
    return F.linear(x, params["fc.weight"], params["fc.bias"])


def lenet_im2col(params: Params, x: Tensor) -> Tensor:
    """Apply LeNet-5 with each convolution as a gather of patches and one matrix product."""
    for layer in ("conv1", "conv2"):
        weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
        side = x.shape[-1] - 4
        patches = x.unfold(2, 5, 1).unfold(3, 5, 1)  # (batch, channels, side, side, 5, 5)
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, weight[0].numel())
        out = torch.addmm(bias, flat, weight.flatten(1).t()).reshape(-1, side, side, len(weight))
        x = F.relu(pool_last(out)).permute(0, 3, 1, 2)
    return dense(params, x.flatten(1))


def pool_last(x: Tensor) -> Tensor:
    """Halve height and width by maxima; channels are the last axis."""
    rows = torch.maximum(x[:, ::2], x[:, 1::2])
    return torch.maximum(rows[:, :, ::2], rows[:, :, 1::2])


class HalvingMax(torch.autograd.Function):
    """Maximum over blocks of 2x2: rows, then columns, with vector instructions.

    ``max_pool2d`` compares and keeps positions with a scalar, branching loop on the CPU: a third of
    a LeNet-5 step. Here every pass is a whole-tensor operation without branches; of equal numbers
    the first gets the gradient. Only the last two axes matter, so the rule for vmap is to put the
    lanes in front.
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of the blocks, and those of the pairs of rows."""
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2]), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the gradient compares."""
        ctx.save_for_backward(inputs[0], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> Tensor:
        """Give the gradient to the winner of each pair."""
        return HalvingMaxBack.apply(gradient, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        """Put the lanes in front."""
        return HalvingMax.apply(x.movedim(in_dims[0], 0)), (0, 0)


class HalvingMaxBack(torch.autograd.Function):
    """The gradient of HalvingMax (an operator of its own, so that vmap knows it)."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, out: Tensor, rows: Tensor) -> Tensor:
        """Spread the gradient over columns, then over rows: the sign of max - first is 0 or 1."""
        wide, full = torch.empty_like(rows), torch.empty_like(x)
        torch.mul(gradient, (out - rows[..., ::2]).sign_(), out=wide[..., 1::2])
        torch.sub(gradient, wide[..., 1::2], out=wide[..., ::2])
        torch.mul(wide, (rows - x[..., ::2, :]).sign_(), out=full[..., 1::2, :])
        torch.sub(wide, full[..., 1::2, :], out=full[..., ::2, :])
        return full

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: no second derivatives here."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Tensor) -> Any:
        """Put the lanes in front; what has none is repeated."""
        front = [
            a.expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0)
            for a, dim in zip(args, in_dims, strict=True)
        ]
        return HalvingMaxBack.apply(*front), 0


def lenet_halving(params: Params, x: Tensor) -> Tensor:
    """Apply LeNet-5 with HalvingMax before the ReLU."""
    for layer in ("conv1", "conv2"):
        x = F.conv2d(x, params[f"{layer}.weight"], params[f"{layer}.bias"])
        x = F.relu(HalvingMax.apply(x)[0])
    return dense(params, x.flatten(1))


class Bench:
    """The lanes: 20 models, 20 batches, and the ways to take a step for each of them."""

    def __init__(self, lanes: int, batch: int) -> None:
        torch.manual_seed(0)
        self.lanes = lanes
        self.x = torch.randn(lanes, batch, 1, 28, 28)
        self.y = torch.randint(10, (lanes, batch))
        self.module = models.lenet5(input_shape=(1, 28, 28), num_classes=10)
        one = {name: p.detach() for name, p in self.module.named_parameters()}
        self.stack = {name: p.expand(lanes, *p.shape).contiguous() for name, p in one.items()}
        self.each = [{name: p.clone() for name, p in one.items()} for _ in range(lanes)]
        self.start = {name: p.clone() for name, p in one.items()}
        self.pool = ThreadPoolExecutor(2)
        self.ready = threading.Barrier(2)
        self.own = threading.local()  # functional_call swaps parameters: one module per thread
        self.copies = [self._copy() for _ in range(lanes)]
        self.optims = [torch.optim.SGD(m.parameters(), lr=RATE) for m in self.copies]

    def stores(self) -> list[list[Params]]:
        """Return the parameters of the lanes in each of the three places where ways keep them."""
        modules: list[Params] = [dict(m.named_parameters()) for m in self.copies]
        stacked = [{name: p[i] for name, p in self.stack.items()} for i in range(self.lanes)]
        return [modules, self.each, stacked]

    def reset(self) -> None:
        """Put all parameters back to the start."""
        with torch.no_grad():
            for params in itertools.chain(*self.stores()):
                for name, p in params.items():
                    p.copy_(self.start[name])

    def after_one(self, way: Way) -> list[Tensor]:
        """Run a way once from the start; return every lane's parameters as one vector."""
        self.reset()
        way()
        begin = torch.cat([p.flatten() for p in self.start.values()])
        for store in self.stores():
            found = [
                torch.cat([lane[name].detach().flatten() for name in self.start]) for lane in store
            ]
            if not all(torch.equal(lane, begin) for lane in found):
                return found
        return []

    def same_work(self, way: Way, expected: list[Tensor]) -> bool:
        """Return whether a way takes the same step as the plain loop, on every lane."""
        found = self.after_one(way)
        return bool(found) and all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True)
        )

    def _copy(self) -> nn.Module:
        module = models.lenet5(input_shape=(1, 28, 28), num_classes=10)
        module.load_state_dict(self.module.state_dict())
        return module

    # ------------------------------------------------------------------ one lane

    def plain(self, lane: int) -> None:
        """Take a step as in a usual training loop."""
        optim = self.optims[lane]
        optim.zero_grad()
        loss = F.cross_entropy(self.copies[lane](self.x[lane]), self.y[lane])
        loss.backward()
        optim.step()

    def plain_channels_last(self, lane: int) -> None:
        """Take the same step with channels last."""
        optim = self.optims[lane]
        optim.zero_grad()
        x = self.x[lane].contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(self.copies[lane](x), self.y[lane])
        loss.backward()
        optim.step()

    def autograd(self, lane: int, forward: Forward = lenet) -> None:
        """Take a step with torch.autograd.grad on a dict of tensors and an update in place."""
        params = self.each[lane]
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(forward(leaves, self.x[lane]), self.y[lane])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            torch._foreach_add_(list(params.values()), grads, alpha=-RATE)

    def functional(self, lane: int) -> None:
        """Take the step of the reference engine: torch.func.grad and functional_call."""
        params = self.each[lane]
        if not hasattr(self.own, "module"):
            self.own.module = self._copy()
        module = self.own.module

        def loss(p: Params) -> Tensor:
            return F.cross_entropy(functional_call(module, p, (self.x[lane],)), self.y[lane])

        grads = grad(loss)({name: p.detach() for name, p in params.items()})
        self.each[lane] = {name: p.detach() - RATE * grads[name] for name, p in params.items()}

    # ------------------------------------------------------------------ all lanes

    def loop(self, step: Callable[[int], None], threads: int) -> Way:
        """Return a way that takes one lane after the other."""

        def way() -> None:
            torch.set_num_threads(threads)
            for lane in range(self.lanes):
                step(lane)

        return way

    def two_threads(self, step: Callable[[int], None]) -> Way:
        """Return a way with two Python threads that take every second lane each."""

        def half(first: int) -> None:
            torch.set_num_threads(1)
            self.ready.wait()  # one worker each
            for lane in range(first, self.lanes, 2):
                step(lane)

        def way() -> None:
            torch.set_num_threads(1)
            for done in [self.pool.submit(half, first) for first in (0, 1)]:
                done.result()

        return way

    def mapped_step(self, forward: Forward) -> Callable[[Params, Tensor, Tensor], Params]:
        """Return the step of many lanes: vmap of grad."""

        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(forward(params, x), y)

        def step(params: Params, x: Tensor, y: Tensor) -> Params:
            grads = vmap(grad(loss))(params, x, y)
            return {name: p - RATE * grads[name] for name, p in params.items()}

        return step

    def mapped(self, chunk: int, forward: Forward = lenet, compiled: bool = False) -> Way:
        """Return a way that maps over ``chunk`` lanes at a time, with two threads of arithmetic."""
        step: Any = self.mapped_step(forward)
        if compiled:
            step = torch.compile(step, dynamic=False)

        def way() -> None:
            torch.set_num_threads(2)
            for start in range(0, self.lanes, chunk):
                self.block(step, start, chunk)

        return way

    def mapped_threads(self, chunk: int, forward: Forward = lenet, compiled: bool = False) -> Way:
        """Return a way with two Python threads that map over ``chunk`` lanes at a time each."""
        step: Any = self.mapped_step(forward)
        if compiled:
            step = torch.compile(step, dynamic=False)

        def half(first: int) -> None:
            torch.set_num_threads(1)
            self.ready.wait()
            for start in range(first * chunk, self.lanes, 2 * chunk):
                self.block(step, start, chunk)

        def way() -> None:
            torch.set_num_threads(1)
            if compiled and not warm:  # the compiler works in one thread
                self.block(step, 0, chunk)
                warm.append(True)
            for done in [self.pool.submit(half, first) for first in (0, 1)]:
                done.result()

        warm: list[bool] = []
        return way

    def block(self, step: Any, start: int, chunk: int) -> None:
        """Take the step of some lanes and write the parameters back."""
        rows = slice(start, start + chunk)
        part = {name: p[rows] for name, p in self.stack.items()}
        new = step(part, self.x[rows], self.y[rows])
        for name, p in new.items():
            self.stack[name][rows] = p


def without_mkldnn(way: Way) -> Way:
    """Use PyTorch's own convolution instead of oneDNN's."""

    def wrapped() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            way()

    return wrapped


def ways(bench: Bench, compile_too: bool) -> dict[str, Way]:
    """Return all ways by name."""
    found: dict[str, Way] = {
        BASE: bench.loop(bench.plain, 2),
        "plain module + SGD, 1 thread": bench.loop(bench.plain, 1),
        "plain, channels last, 2 threads": bench.loop(bench.plain_channels_last, 2),
        "plain, own convolution, 2 threads": without_mkldnn(bench.loop(bench.plain, 2)),
        "plain, own convolution, 1 thread": without_mkldnn(bench.loop(bench.plain, 1)),
        "autograd.grad + foreach, 2 threads": bench.loop(bench.autograd, 2),
        "autograd.grad + foreach, 1 thread": bench.loop(bench.autograd, 1),
        "autograd.grad, halving pool, 1 thread": bench.loop(
            lambda lane: bench.autograd(lane, lenet_halving), 1
        ),
        "autograd.grad, halving pool, 2 threads": bench.loop(
            lambda lane: bench.autograd(lane, lenet_halving), 2
        ),
        "autograd.grad, im2col, 2 threads": bench.loop(
            lambda lane: bench.autograd(lane, lenet_im2col), 2
        ),
        "autograd.grad, im2col, 1 thread": bench.loop(
            lambda lane: bench.autograd(lane, lenet_im2col), 1
        ),
        "func.grad + functional_call, 2 threads": bench.loop(bench.functional, 2),
        "func.grad + functional_call, 1 thread": bench.loop(bench.functional, 1),
        "2 Python threads: plain module + SGD": bench.two_threads(bench.plain),
        "2 Python threads: own convolution": without_mkldnn(bench.two_threads(bench.plain)),
        "2 Python threads: autograd.grad + foreach": bench.two_threads(bench.autograd),
        "2 Python threads: autograd.grad, im2col": bench.two_threads(
            lambda lane: bench.autograd(lane, lenet_im2col)
        ),
        "2 Python threads: autograd.grad, halving pool": bench.two_threads(
            lambda lane: bench.autograd(lane, lenet_halving)
        ),
        "2 Python threads: func.grad": bench.two_threads(bench.functional),
    }
    for chunk in (20, 10, 5, 2, 1):
        found[f"vmap over {chunk}, 2 threads"] = bench.mapped(chunk)
        found[f"vmap over {chunk}, halving pool, 2 threads"] = bench.mapped(chunk, lenet_halving)
    for chunk in (20, 5, 1):
        found[f"vmap over {chunk}, im2col, 2 threads"] = bench.mapped(chunk, lenet_im2col)
    for chunk in (10, 5, 2):
        found[f"2 Python threads: vmap over {chunk}"] = bench.mapped_threads(chunk)
        found[f"2 Python threads: vmap over {chunk}, halving pool"] = bench.mapped_threads(
            chunk, lenet_halving
        )
    if compile_too:
        for chunk in (20, 5, 1):
            found[f"compiled vmap over {chunk}, 2 threads"] = bench.mapped(chunk, compiled=True)
            found[f"compiled vmap over {chunk}, im2col, 2 threads"] = bench.mapped(
                chunk, lenet_im2col, compiled=True
            )
        for chunk in (5, 1):
            found[f"2 Python threads: compiled vmap over {chunk}"] = bench.mapped_threads(
                chunk, compiled=True
            )
    return found


def product_rate(threads: int, size: int = 1024, repeats: int = 30) -> float:
    """Return the best GFLOP/s of repeated float32 matrix products."""
    torch.set_num_threads(threads)
    load.wait_for_quiet(time.perf_counter() + 30)
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best / 1e9)


def step_flops(batch: int) -> int:
    """Count the operations of a LeNet-5 step: backward twice forward, but for conv1's input."""
    conv1, conv2 = 24 * 24 * 6 * 25, 8 * 8 * 16 * 150
    linear = 256 * 120 + 120 * 84 + 84 * 10
    return 2 * batch * (2 * conv1 + 3 * conv2 + 3 * linear)


def measure(
    bench: Bench, ways: dict[str, Way], repeats: int, limit: float
) -> dict[str, dict[str, float]]:
    """Time the ways in turn while the machine is idle: median and best ms per client-step.

    A sample counts if other processes took less than a tenth of a processor in that time. If a way
    has no such sample after ``limit`` seconds, its noisy samples are used (``quiet`` is then 0).
    """
    times: dict[str, list[tuple[float, bool]]] = {}
    expected = bench.after_one(ways[BASE])
    for name, way in ways.items():
        try:
            way()
            if bench.same_work(way, expected):
                times[name] = []
            else:
                print(f"{name}: not measured (does other work than the plain loop)", flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            print(f"{name}: not measured ({reason})", flush=True)
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        short = [name for name in times if sum(q for _, q in times[name]) < repeats]
        if not short:
            break
        for name in short:
            load.wait_for_quiet(end)
            times[name].append(_sample(ways[name], bench.lanes))
    found = {}
    for name, samples in times.items():
        quiet = [t for t, q in samples if q]
        kept = quiet or [t for t, _ in samples]
        if kept:
            found[name] = {
                "median": statistics.median(kept),
                "best": min(kept),
                "quiet": len(quiet),
            }
    return found


def _sample(way: Way, lanes: int, least: float = 0.06) -> tuple[float, bool]:
    """Return milliseconds per client-step of a way, and whether the machine was idle."""
    meter = load.Meter()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < least or count < 1:
        way()
        count += 1
    cost = (time.perf_counter() - start) / count / lanes * 1e3
    return cost, meter.others() < load.QUIET


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds to wait for an idle machine"
    )
    parser.add_argument(
        "--only",
        default="",
        help="measure only ways whose name contains one of these texts, separated by |",
    )
    parser.add_argument("--compile", action="store_true", help="also torch.compile (needs gcc)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    rates = {threads: product_rate(threads) for threads in (1, 2)}
    flops = step_flops(args.batch)
    print(f"matrix product: {rates[1]:.0f} GFLOP/s with 1 thread, {rates[2]:.0f} with 2")
    print(f"one step: {flops / 1e6:.0f} MFLOP, {flops / rates[2] / 1e6:.2f} ms at that rate")
    bench = Bench(args.lanes, args.batch)
    todo = ways(bench, args.compile)
    words = [BASE, *args.only.split("|")]
    todo = {name: way for name, way in todo.items() if any(word in name for word in words)}
    found = measure(bench, todo, args.repeats, args.limit)
    base = found[BASE]["median"]
    print(f"{'way':52} {'median':>8} {'best':>8} {'x plain':>8} {'quiet':>6}  (ms per client-step)")
    for name, cost in sorted(found.items(), key=lambda item: item[1]["median"]):
        ratio = base / cost["median"]
        print(
            f"{name:52} {cost['median']:8.3f} {cost['best']:8.3f} {ratio:8.2f} {cost['quiet']:6d}"
        )
    if args.json is not None:
        args.json.write_text(
            json.dumps({"gflops": rates, "step_mflop": flops / 1e6, "ways": found})
        )


if __name__ == "__main__":
    main()
