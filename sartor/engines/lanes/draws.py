"""Numbers for lanes: what a step or a plan draws from its keys, in one launch or compiled call.

``sartor.core.rng.normal`` is Philox4x32-10 and the rule of Box and Muller in some 150 operations on
whole tensors, each a pass over one number for every parameter. Here they are one, on a GPU
(``draw_kernels``) and on a CPU (``native``), and the numbers are the same: in float64 to about
10⁻¹⁵, as logarithm, cosine and sine may be rounded differently there, and so in float32 to the last
bit but for the rarest of numbers.

A draw is a pure function of its key, so a trace may share two that are the same, and nothing about
it is random to PyTorch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sartor.core import rng
from sartor.engines.cpu import native
from sartor.engines.lanes.rules import operator
from sartor.engines.lanes.shapes import DTYPES, MOST_ELEMENTS, ceil, installed, launch

_BLOCK = 128  # counters of a program, one for each thread; a counter gives four numbers
_LAUNCHED = (*DTYPES, torch.float64)


def takes(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Say whether a kernel or compiled code draws numbers of this shape from the key (2,)."""
    return (
        key.shape == (2,)
        and key.dtype == torch.int64
        and 0 < math.prod(shape) < MOST_ELEMENTS
        and (_launches(key, dtype) or native.takes_draw(key, dtype))
    )


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw what ``rng.normal`` does, by the operator."""
    return lane_normal(key[None], math.prod(shape), dtype)[0].reshape(shape)


@operator(
    "lane_normal(Tensor keys, int num, ScalarType dtype) -> Tensor",
    lambda keys, num, dtype: keys.new_empty((keys.shape[0], num), dtype=dtype),
)
def lane_normal(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers: (L, num) of keys (L, 2)."""
    if _launches(keys, dtype):
        return _launch(keys, num, dtype)
    if native.takes_draw(keys, dtype):
        return native.drawn(keys, num, dtype)
    if not len(keys):
        return keys.new_empty((0, num), dtype=dtype)
    return torch.stack([rng.normal(key, (num,), dtype) for key in keys])


def kept(key: Tensor, number: int, shape: tuple[int, ...], p: float) -> Tensor:
    """Draw what ``rng.kept`` does, by the operator: compiled on a CPU."""
    low = rng.lowest_kept(p)
    return lane_kept(key[None], number, math.prod(shape), low)[0].reshape(shape)


@operator(
    "lane_kept(Tensor keys, int number, int num, int low) -> Tensor",
    lambda keys, number, num, low: keys.new_empty((keys.shape[0], num), dtype=torch.bool),
)
def lane_kept(keys: Tensor, number: int, num: int, low: int) -> Tensor:
    """Say which words of draw ``number`` are at least ``low``: (L, num) of keys (L, 2)."""
    if native.takes_draw(keys, torch.float32):
        return native.kept(keys, number, num, low)
    words = [rng.keep_words(key, number, num) for key in keys]
    return torch.stack(words) >= low if words else keys.new_empty((0, num), dtype=torch.bool)


def words_at(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return what ``rng.words_at`` does of keys (n, 2) and blocks (n,), on a GPU in one launch."""
    if not (keys.is_cuda and installed() and len(blocks)):
        return rng.words_at(keys, blocks)
    out = torch.empty((len(blocks), 4), dtype=torch.int64, device=keys.device)
    given = (out, keys, blocks.contiguous(), len(blocks), *keys.stride())
    grid = (ceil(len(blocks), _BLOCK),)
    launch("draw_kernels", "words", grid, *given, BLOCK=_BLOCK, num_warps=4)
    return out


def _launches(keys: Tensor, dtype: torch.dtype) -> bool:
    return keys.is_cuda and dtype in _LAUNCHED and installed()


def _launch(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((len(keys), num), dtype=dtype, device=keys.device)
    per_lane = ceil(ceil(num, 4), _BLOCK)
    given = (out, keys, num, per_lane, *keys.stride())
    launch("draw_kernels", "normal", (len(keys) * per_lane,), *given, BLOCK=_BLOCK, num_warps=4)
    return out
