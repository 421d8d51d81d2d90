"""What all lane operators share: the way to kernels, the axis of lanes, the sizes of tiles."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")
DTYPES = (torch.float32, torch.bfloat16)
PRECISION = "tf32x3"
"""Of float32 products: three tensor-core products, as exact as "ieee" and faster."""
PROGRAMS = 264
"""What fills an H100 or H200: two programs for each of 132 multiprocessors."""
MOST_ELEMENTS = 2**31 - 1
"""Offsets inside a lane are 32-bit."""


def nested(value: Any) -> Iterator[Any]:
    """Go over what nested dicts, tuples and lists hold."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for inner in value:
        yield from nested(inner)


@cache
def installed() -> bool:
    """Say whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


@cache
def kernels(module: str) -> Any:
    """Import kernels at first use, so that only a GPU waits for Triton."""
    return importlib.import_module(f"sartor.engines.cuda.{module}")


def launch(module: str, kernel: str, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """Launch a kernel on the device of the tensors that it is given."""
    with torch.cuda.device_of(next(x for x in nested(given) if isinstance(x, Tensor))):
        getattr(kernels(module), kernel)[grid](*given, **constants)


def usable(*tensors: Tensor) -> bool:
    """Say whether kernels can read these: on CUDA, of one dtype that they know, not empty."""
    first = tensors[0]
    return (
        first.dtype in DTYPES
        and all(t.is_cuda and t.dtype == first.dtype for t in tensors)
        and all(0 < t.numel() < MOST_ELEMENTS for t in tensors)
        and not torch.is_autocast_enabled("cuda")
        and installed()
    )


def dense(tensor: Tensor) -> Tensor:
    """Make each lane contiguous; steps between lanes are free: what is repeated is not copied."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def power(number: int, least: int = 8) -> int:
    """Return the power of two that holds ``number``."""
    return max(least, 1 << math.ceil(math.log2(max(number, 1))))


def ceil(number: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-number // by)


def in_parallel(like: Tensor, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Do two things that do not need each other; where a graph is recorded, at the same time.

    Small kernels leave most of a GPU idle, so two of them take hardly longer than one. Both begin
    after all that was launched before, and what follows waits for both. ``like`` is a tensor on the
    device in question.
    """
    if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return first(), second()
    here, aside = torch.cuda.current_stream(), _stream_aside(torch.cuda.current_device())
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        one = first()
    other = second()
    here.wait_stream(aside)
    return one, other


@cache
def _stream_aside(device: int) -> Any:
    return torch.cuda.Stream(device)
