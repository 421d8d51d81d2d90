"""Compare our convolutions with PyTorch's on one core of a CPU, in milliseconds and GFLOP/s.

    python -m bench.convolutions [--repeats N]

First, both are checked to give the same numbers. The gradient by the input is left out where the
input is an image, as in training. Times are process times, the best of five, so other processes
hardly affect them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from sartor.engines.cpu import compiler as cpp
from sartor.engines.cpu import native
from sartor.results.tables import Table

SHAPES = (  # batch, channels, side, outputs, kernel, padding
    (64, 1, 28, 6, 5, 0),
    (64, 6, 12, 16, 5, 0),
    (20, 6, 12, 16, 5, 0),
    (64, 3, 32, 6, 5, 0),
    (64, 1, 28, 32, 5, 2),
    (64, 16, 32, 16, 3, 1),
    (64, 64, 8, 64, 3, 1),
    (64, 32, 14, 64, 5, 2),
)


def best(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of a call, in milliseconds."""
    work()
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats):
            work()
        found.append((time.process_time() - began) / repeats * 1000)
    return min(found)


def row(shape: tuple[int, ...], repeats: int) -> list[str]:
    """Measure one convolution."""
    batch, channels, side, outputs, kernel, pad = shape
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, side, side, generator=rng)
    weight, bias = torch.randn(outputs, channels, kernel, kernel), torch.randn(outputs)
    out = F.conv2d(x, weight, bias, padding=pad)
    grad = torch.randn(out.shape, generator=rng)
    # Our operations exchange tensors in which the batch is the last axis in memory.
    ours_x, ours_g = (
        t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)[None] for t in (x, grad)
    )
    ours_w, size, window = weight[None], (side, side), (kernel, kernel)
    one, padding, inner = (1, 1), (pad, pad), channels > 3

    def forward() -> torch.Tensor:
        return native.convolved(ours_x, ours_w, bias[None], one, padding)

    def to_input() -> torch.Tensor:
        return native.input_gradient(ours_g, ours_w, size, one, padding)

    def to_kernel() -> tuple[torch.Tensor, torch.Tensor]:
        return native.kernel_gradient(ours_x, ours_g, window, one, padding)

    def backward() -> tuple[torch.Tensor, ...]:
        wanted = [inner, True, True]
        found: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, x, weight, [outputs], one, padding, one, False, [0, 0], 1, wanted
        )
        return found

    theirs = backward()
    pairs = [(forward()[0], out), (to_kernel()[0][0], theirs[1])]
    pairs += [(to_input()[0], theirs[0])] if inner else []
    for mine, other in pairs:
        assert (mine - other).abs().max() < 1e-4 * other.abs().max(), shape
    work = 2e-6 * out.numel() * channels * kernel * kernel
    times = {
        "forward": best(forward, repeats),
        "input": best(to_input, repeats) if inner else 0.0,
        "kernel": best(to_kernel, repeats),
    }
    plain = best(lambda: F.conv2d(x, weight, bias, padding=pad), repeats), best(backward, repeats)
    rates = [f"{work / t:.0f}" for t in times.values() if t]
    return [
        f"{batch} x {channels} x {side} x {side} -> {outputs}, {kernel} x {kernel}",
        f"{times['forward']:.2f}",
        f"{plain[0]:.2f}",
        f"{times['input'] + times['kernel']:.2f}",
        f"{plain[1]:.2f}",
        f"{sum(plain) / sum(times.values()):.1f}",
        ", ".join(rates),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Convolutions on one core.")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if cpp.library() is None:
        raise SystemExit(f"There is nothing to compare: {cpp.status()}.")
    head = ["convolution", "forward", "PyTorch", "backward", "PyTorch", "ratio", "GFLOP/s"]
    print(Table(head, [row(shape, args.repeats) for shape in SHAPES]))


if __name__ == "__main__":
    main()
