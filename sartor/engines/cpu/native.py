"""Layers, losses and draws for the cores of a CPU, compiled where a C++ compiler is found.

Libraries are built for many channels; with the one to sixteen of a client's small network most of
a vector register stays empty, above all backwards. ``native.cpp`` works on images whose batch is
the last axis, (C, H, W, B): every loop runs over neighbouring samples. To PyTorch such images are
ordinary ones, (B, C, H, W), with other strides, so that what stands between two of these
operations, such as a ReLU, keeps the layout, and nothing is copied. ``layers.cpp`` has a dense
layer with few outputs, cross-entropy over few classes and the update of a network, for all lanes,
``recurrence.cpp`` the loop of an LSTM layer; where the compiler has OpenMP, its threads share that
work (with GCC they are those of PyTorch).

``compiler`` compiles them; where it cannot, PyTorch's own operations are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core.torch_private import differentiating_forwards
from sartor.engines.cpu.compiler import NAMES, address, function, library, numbers
from sartor.engines.lanes import shapes

LANES = 8
"""Samples of a vector, as in the source."""
_MOST_PAIRS = 100  # input channels × output channels: with more, PyTorch's own are faster
_MOST_OUTPUTS = 128  # of a dense layer
_LEAST_INPUTS = 16  # of a dense layer: a vector of float32 at its widest
_SHORT = 64  # samples of a batch: with more, libraries are as fast
_LARGE = 1 << 23  # bytes of a leaf in all lanes that caches will not hold until it is read
_MOST_CLASSES = 32
_MOST_STATE = 512  # numbers of an LSTM layer's state: with 1,024 a library multiplies faster
_WORTH_IT = 1 << 15  # multiplications of a client's layer: below, calls cost what they save


def takes_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> bool:
    """Say whether these operations convolve x (B, C, H, W) with weight (O, C, kh, kw).

    What does not fit together is left to PyTorch, which says so.
    """
    return (
        _takes(x)
        and _is_like(x, weight, (*weight.shape[:1], *x.shape[1:2], *weight.shape[2:]))
        and weight.dim() == 4
        and (bias is None or _is_like(x, bias, weight.shape[:1]))
        and tuple(stride) == (1, 1)
        and weight.shape[0] * weight.shape[1] <= _MOST_PAIRS
        and all(
            0 <= p < k <= n for p, k, n in zip(padding, weight.shape[2:], x.shape[2:], strict=True)
        )
        and library() is not None
    )


def _is_like(x: Tensor, other: Tensor, shape: Sequence[int]) -> bool:
    return other.dtype == x.dtype and other.device == x.device and other.shape == tuple(shape)


def takes_pool(x: Tensor, kernel: Sequence[int]) -> bool:
    """Say whether these operations pool images (B, C, H, W)."""
    return (
        _takes(x)
        and all(0 < k <= n for k, n in zip(kernel, x.shape[2:], strict=True))
        and library() is not None
    )


def takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether a dense layer of one client, x (..., I) and weight (O, I), is computed here.

    What does not fit together is left to PyTorch, which says so.
    """
    if not (x.dim() >= 2 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]):
        return False
    outputs, inputs = weight.shape
    return (
        0 < outputs <= _MOST_OUTPUTS
        and inputs >= _LEAST_INPUTS
        and x.numel() * outputs >= _WORTH_IT
        and (bias is None or _is_like(x, bias, weight.shape[:1]))
        and weight.dtype == x.dtype
        and weight.device == x.device
        and _derived_backwards(x)
    )


def takes_product(a: Tensor, b: Tensor) -> bool:
    """Say whether a (L, M, K) · b (L, K, N) is such a layer's: rows and columns contiguous."""
    return (
        a.dtype in NAMES
        and a.stride(2) == b.stride(1) == 1
        and a.shape[2] >= _LEAST_INPUTS
        and b.shape[2] <= _MOST_OUTPUTS
        and library() is not None
    )


def takes_outer(a: Tensor, b: Tensor) -> bool:
    """Say whether a (L, M, K) · b (L, K, N) with a short K is computed here."""
    return (
        serves(a)
        and a.dtype == b.dtype
        and a.dtype in NAMES
        and 0 < a.shape[2] <= _SHORT
        and 0 < a.shape[1] <= _MOST_OUTPUTS
        and b.shape[2] >= _LEAST_INPUTS
        and b.stride(2) == 1
        and library() is not None
    )


def takes_cross_entropy(scores: Tensor, y: Tensor) -> bool:
    """Say whether the losses of scores (batch, classes) with labels (batch) are computed here."""
    fits = scores.dim() == 2 and y.shape == scores.shape[:1] and y.dtype == torch.int64
    return fits and 0 < scores.shape[1] <= _MOST_CLASSES and _derived_backwards(scores)


def _derived_backwards(x: Tensor) -> bool:
    """Say whether numbers like these are served, and not derived forwards, which has no rule."""
    return (
        serves(x)
        and x.dtype in NAMES
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not differentiating_forwards()
        and library() is not None
    )


def takes_recurrence(given: Tensor, weight: Tensor) -> bool:
    """Say whether the loop of an LSTM layer is computed here."""
    fits = weight.dtype == given.dtype and serves(weight) and weight.shape[1] <= _MOST_STATE
    return fits and _derived_backwards(given)


def takes_update(now: list[Tensor], slope: list[Tensor], factor: Tensor) -> bool:
    """Say whether now + factor · slope is computed here, for leaves of one client."""
    given = [*now, *slope]
    return (
        bool(now)
        and factor.dim() == 0
        and factor.dtype in NAMES
        and all(serves(x) and x.dtype == factor.dtype and x.numel() > 0 for x in given)
        and all(x.shape == y.shape for x, y in zip(now, slope, strict=True))
        and library() is not None
    )


def takes_draw(keys: Tensor, dtype: torch.dtype) -> bool:
    """Say whether numbers of this type are drawn here."""
    return serves(keys) and dtype in NAMES and library() is not None


def serves(x: Tensor) -> bool:
    """Say whether a tensor is where these operations work."""
    return x.device.type == "cpu"


def _takes(x: Tensor) -> bool:
    plain = serves(x) and x.dtype in NAMES and x.dim() == 4 and x.numel() > 0
    return plain and x.shape[0] >= LANES and not torch.is_autocast_enabled("cpu")


# ---- what the operators of lanes do on a CPU ------------------------------------------------


def convolved(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Convolve x (L, B, C, H, W) with w (L, O, C, kh, kw), and add b (L, O)."""
    _check_stride(stride)
    x, w = _batch_last(x), w.contiguous()
    b = None if b is None else b.contiguous()
    lanes, channels, height, width, batch = x.shape
    outputs, kernel = w.shape[1], w.shape[3:]
    _check(w.shape[:3] == (lanes, outputs, channels) and (b is None or b.shape == w.shape[:2]))
    rows, columns = (
        n + 2 * p - k + 1 for n, p, k in zip((height, width), padding, kernel, strict=True)
    )
    out = x.new_empty(lanes, outputs, rows, columns, batch)
    scratch = x.new_empty(w[0].numel())
    shape = numbers(batch, channels, height, width, outputs, *kernel, *padding)
    call = function("convolve", x.dtype)
    for lane in range(lanes):
        call(shape, *(address(t, lane) for t in (x, w, b, out)), address(scratch))
    return out.permute(0, 4, 1, 2, 3)


def input_gradient(
    g: Tensor, w: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient of the inputs; g (L, B, O, H', W') is the outputs'.

    It is a convolution with the kernel turned round, which sees all of its margin.
    """
    margin = [k - 1 - p for k, p in zip(w.shape[3:], padding, strict=True)]
    return convolved(g, w.flip(3, 4).transpose(1, 2), None, stride, margin)


def kernel_gradient(
    x: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of kernels (L, O, C, kh, kw) and biases (L, O); g is the outputs'."""
    _check_stride(stride)
    x, g = _batch_last(x), _batch_last(g)
    rows, columns = padding
    if rows or columns:
        x = F.pad(x, (0, 0, columns, columns, rows, rows))
    lanes, channels, height, width, batch = x.shape
    outputs = g.shape[1]
    _check(g.shape == (lanes, outputs, height - kernel[0] + 1, width - kernel[1] + 1, batch))
    weight = x.new_empty(lanes, outputs, channels, *kernel)
    bias = x.new_empty(lanes, outputs)
    scratch = x.new_zeros(lanes, weight[0].numel() * LANES)
    shape = numbers(batch, channels, height, width, outputs, *kernel, 0, 0)
    call = function("kernel_gradient", x.dtype)
    for lane in range(lanes):
        call(shape, *(address(t, lane) for t in (x, g, weight, bias, scratch)))
    return weight, bias


def pool(x: Tensor, g: Tensor | None, kernel: Sequence[int]) -> Tensor:
    """Pool images (..., B, C, H, W); or return their gradient from that of the outcome, ``g``."""
    front = x.shape[:-3]
    x = _batch_last(x.flatten(0, -4)[None])[0]
    channels, height, width, batch = x.shape
    rows, columns = height // kernel[0], width // kernel[1]
    if g is None:
        out = x.new_empty(channels, rows, columns, batch)
    else:
        g = _batch_last(g.flatten(0, -4)[None])[0]
        _check(g.shape == (channels, rows, columns, batch))
        covered = height % kernel[0] == 0 and width % kernel[1] == 0
        out = torch.empty_like(x) if covered else torch.zeros_like(x)
    shape = numbers(channels, height, width, batch, *kernel)
    function("pool", x.dtype)(shape, address(x), address(g), address(out))
    return out.permute(3, 0, 1, 2).unflatten(0, front)


def dense(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (L, M, K) times the transpose of w (L, N, K), plus a row (L, N)."""
    x, w = (t if t.stride(2) == 1 else t.contiguous() for t in (x, w))
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    lanes, rows, depth = x.shape
    columns = w.shape[1]
    _check(w.shape == (lanes, columns, depth) and depth >= _LEAST_INPUTS)
    _check(bias is None or bias.shape == (lanes, columns))
    out = x.new_empty(lanes, rows, columns)
    strides = (*x.stride()[:2], *w.stride()[:2], 0 if bias is None else bias.stride(0))
    _on_cores("dense", (lanes, rows, columns, depth, *strides), x, w, bias, out)
    return out


def outer(a: Tensor, b: Tensor, now: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """Return a (L, M, K) · b (L, K, N); with ``now`` (L, M, N), now + factor (L) times that."""
    lanes, rows, depth = a.shape
    columns = b.shape[2]
    _check(b.shape == (lanes, depth, columns) and b.stride(2) == 1 and columns >= _LEAST_INPUTS)
    _check(all(t is None or t.dtype == a.dtype for t in (b, now, factor)))
    if now is not None and factor is not None:
        now = shapes.dense(now)
        factor = factor.contiguous()
        _check(now.shape == (lanes, rows, columns) and factor.shape == (lanes,))
    out = a.new_empty(lanes, rows, columns)
    strides = (*a.stride(), *b.stride()[:2], 0 if now is None else now.stride(0))
    sizes = (lanes, rows, columns, depth, *strides, out.nbytes >= _LARGE)
    _on_cores("outer", sizes, a, b, now, factor, out)
    return out


def entropy(scores: Tensor, y: Tensor, slopes: Tensor | None, ignored: int) -> Tensor:
    """Return the loss of every row of scores (..., classes), or with slopes its gradient.

    Raises:
        IndexError: a label is no class.
    """
    scores, y = scores.contiguous(), y.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    _check(y.shape == scores.shape[:-1] and (slopes is None or slopes.shape == y.shape))
    out = scores.new_empty(y.shape) if slopes is None else torch.empty_like(scores)
    classes = scores.shape[-1]
    if not _on_cores("entropy", (y.numel(), classes, ignored), scores, y, slopes, out):
        raise IndexError(
            f"A label is not one of the {classes} classes that the network has outputs for, 0 to "
            f"{classes - 1}; give the network an output for every class, or fix the labels."
        )
    return out


def recurrence(
    given: Tensor, weight: Tensor, is_token: Tensor, hidden: Tensor, cell: Tensor, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the loops of an LSTM layer; see ``recurrence.lane_recurrence``."""
    _check_loop(given, weight, is_token, hidden, cell)
    outputs, cells = (given.new_empty(*given.shape[:3], weight.shape[2]) for _ in range(2))
    found = outputs, given.new_empty(given.shape), cells
    _loop("recurrence", outputs.shape, backward, given, weight, is_token, hidden, cell, *found)
    return found


def recurrence_gradient(
    grad: Tensor,
    last: Tensor,
    weight: Tensor,
    is_token: Tensor,
    cell: Tensor,
    gates: Tensor,
    cells: Tensor,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Go back through such loops; see ``recurrence.lane_recurrence_grad``."""
    _check_loop(gates, weight, is_token, last, cell)
    _check(grad.shape == cells.shape == (*gates.shape[:3], weight.shape[2]))
    _check(grad.dtype == cells.dtype == gates.dtype)
    found = grad.new_empty(gates.shape), grad.new_empty(cell.shape), grad.new_empty(cell.shape)
    given = (grad, last, weight, is_token, cell, gates, cells)
    _loop("recurrence_gradient", grad.shape, backward, *given, *found)
    return found


def _check_loop(gates: Tensor, weight: Tensor, is_token: Tensor, *states: Tensor) -> None:
    lanes, batch, _, width = gates.shape
    size = weight.shape[2]
    _check(weight.shape == (lanes, 4 * size, size) and width == 4 * size)
    _check(is_token.shape == gates.shape[:3] and is_token.dtype == torch.bool)
    _check(all(t.shape == (lanes, batch, size) for t in states))
    _check(all(t.dtype == gates.dtype for t in (weight, *states)))


def _loop(name: str, shape: Sequence[int], backward: bool, *tensors: Tensor) -> None:
    """Call a compiled loop; the last three tensors are what it writes."""
    given = [shapes.dense(t) for t in tensors[:-3]]
    _on_cores(name, (*shape, backward, *(t.stride(0) for t in given)), *given, *tensors[-3:])


def updated(now: list[Tensor], slope: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return now + factor · slope for leaves (L, ...) and factors (L)."""
    factor = factor.contiguous()
    lanes, found = len(factor), []
    threads, call = torch.get_num_threads(), function("update", factor.dtype)
    for given in zip(now, slope, strict=True):
        a, b = (shapes.dense(x) for x in given)
        _check(a.shape == b.shape and len(a) == lanes and a.dtype == b.dtype == factor.dtype)
        out = a.new_empty(a.shape)
        size = a[0].numel()
        shape = numbers(lanes, size, a.stride(0), b.stride(0), out.nbytes >= _LARGE)
        call(shape, threads, *(address(x) for x in (a, b, factor, out)))
        found.append(out)
    return found


def drawn(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers: (L, num) of keys (L, 2), as ``rng.normal`` does."""
    _check(keys.dim() == 2 and keys.shape[1] == 2 and keys.dtype == torch.int64)
    keys = keys.contiguous()
    out = torch.empty((len(keys), num), dtype=dtype)
    function("normals", dtype)(numbers(len(keys), num), address(keys), address(out))
    return out


def kept(keys: Tensor, number: int, num: int, low: int) -> Tensor:
    """Draw what dropout keeps: (L, num) booleans of keys (L, 2), as ``rng.kept`` does."""
    _check(keys.dim() == 2 and keys.shape[1] == 2 and keys.dtype == torch.int64)
    keys = keys.contiguous()
    out = torch.empty((len(keys), num), dtype=torch.bool)
    where = numbers(len(keys), num, number, low)
    function("keep", torch.float32)(where, address(keys), address(out))
    return out


def _on_cores(name: str, sizes: Sequence[int], first: Tensor, *others: Tensor | None) -> Any:
    """Call a compiled function whose work the threads of PyTorch share."""
    where = (address(t) for t in (first, *others))
    return function(name, first.dtype)(numbers(*sizes), torch.get_num_threads(), *where)


def _check(fits: bool) -> None:
    """Stop before numbers outside of a tensor are touched."""
    if not fits:
        raise ValueError("the tensors of a lane operation do not fit together")


def _check_stride(stride: Sequence[int]) -> None:
    if tuple(stride) != (1, 1):
        raise ValueError(f"a stride of 1 was expected, got {tuple(stride)}")


def laid(x: Tensor) -> Tensor:
    """Return images (B, C, H, W) whose samples are neighbours in memory."""
    return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def _batch_last(x: Tensor) -> Tensor:
    """Return images (L, B, C, H, W) as (L, C, H, W, B) without gaps; mostly they are so already."""
    if x.shape[1] < LANES:
        raise ValueError(f"a batch of at least {LANES} was expected, got {x.shape[1]}")
    return x.permute(0, 2, 3, 4, 1).contiguous()
