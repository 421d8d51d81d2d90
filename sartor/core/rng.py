"""Randomness as data: a counter-based generator whose every value is a pure function of its key.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
in integer tensor operations. A key is a tensor of two 32-bit words (held in int64) on its last
axis; the value number ``j`` of a draw depends on ``(key, j)`` alone. So lanes, chunks, devices and
the order of execution cannot change a number, a longer draw begins with the shorter one, and
everything works inside ``vmap``.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sartor.core.errors import ContractError

_MASK = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FOLD = 1  # the last counter word of a fold; draws use 0, so the two never share a block
_KEEP = 2  # that of what dropout keeps


_MANY = 4096  # numbers, from which on a sample of few is cheaper than an order of all


def key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Make the key of a seed: shape (2,).

    >>> key(7).tolist()
    [7, 0]
    """
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK], dtype=torch.int64, device=device)


def _philox(k0: Any, k1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[Any, Any, Any, Any]:
    """Run ten rounds of Philox4x32 on numbers, int64 arrays or tensors; all words broadcast."""
    for _ in range(10):
        # A product of two 32-bit words wraps around in int64, but its 64 bits are the right ones.
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def fold(keys: Tensor, *data: int | str | Tensor) -> Tensor:
    """Derive a new key from each key and the data, one item after the other.

    Args:
        keys: (..., 2).
        data: integers, names (hashed to 32 bits), or integer tensors that broadcast with
            ``keys[..., 0]``.

    Returns:
        (..., 2), with the broadcast leading shape.
    """
    for item in data:
        low, high = _words(item)
        k0, k1 = keys[..., 0], keys[..., 1]
        zero = torch.zeros_like(k0)
        found = _philox(k0, k1, zero + low, zero + high, zero, zero + _FOLD)
        keys = torch.stack(torch.broadcast_tensors(found[0], found[1]), dim=-1)
    return keys


def fold_host(keys: np.ndarray, *data: int | str | np.ndarray) -> np.ndarray:
    """Fold keys as ``fold`` does, in numpy: for a few thousand many times faster than tensors."""
    for item in data:
        low, high = _words(item)
        if keys.size == 2 and isinstance(low, int):  # plain numbers are many times faster again
            k0, k1 = keys.reshape(2).tolist()
            found = _philox(k0, k1, low, high, 0, _FOLD)
            keys = np.array(found[:2], dtype=np.int64).reshape(keys.shape)
            continue
        zero = np.zeros_like(keys[..., 0])
        found = _philox(keys[..., 0], keys[..., 1], zero + low, zero + high, zero, zero + _FOLD)
        keys = np.stack(np.broadcast_arrays(found[0], found[1]), axis=-1)
    return keys


def _words(item: Any) -> tuple[Any, Any]:
    """Split an integer (or the hash of a name) into its low and high 32 bits."""
    word = zlib.crc32(item.encode()) if isinstance(item, str) else item
    return word & _MASK, (word >> 32) & _MASK


def words_at(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return the words ``4b .. 4b+3`` of ``bits`` for blocks b of keys (..., 2): (..., 4).

    ``blocks`` broadcasts with ``keys[..., 0]``; the words are integers in [0, 2^32).
    """
    if keys.shape[-1] != 2:
        raise ContractError(
            "This step draws random numbers, but its phase does not say so; build it with "
            "random=True."
        )
    zero = torch.zeros_like(keys[..., 0] + blocks)
    words = _philox(keys[..., 0], keys[..., 1], zero + blocks, zero, zero, zero)
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def bits(key: Tensor, num: int) -> Tensor:
    """Draw ``num`` integers in [0, 2^32) from one key: shape (num,), int64."""
    blocks = torch.arange((num + 3) // 4, device=key.device)
    return words_at(key[None, :], blocks).reshape(-1)[:num]


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniform numbers in the open interval (0, 1)."""
    num = math.prod(shape)
    unit = ((bits(key, num).to(torch.float64) + 0.5) * 2.0**-32).to(dtype)
    # Narrow types would round the largest values up to 1.
    return unit.clamp(max=1.0 - torch.finfo(dtype).eps / 2).reshape(shape)


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers (Box-Muller: values 2j and 2j+1 share two words).

    An engine may catch the call, as torch's own.
    """
    if has_torch_function((key,)):
        found: Tensor = handle_torch_function(normal, (key,), key, shape, dtype)
        return found
    num = math.prod(shape)
    unit = ((bits(key, 2 * ((num + 1) // 2)).to(torch.float64) + 0.5) * 2.0**-32).reshape(-1, 2)
    radius, angle = torch.sqrt(-2.0 * torch.log(unit[:, 0])), 2.0 * math.pi * unit[:, 1]
    pair = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pair.reshape(-1)[:num].to(dtype).reshape(shape)


def kept(key: Tensor, number: int, shape: tuple[int, ...], p: float) -> Tensor:
    """Draw which values dropout keeps, each with probability 1 − p: booleans of a shape.

    The draws of one key are told apart by their ``number``, and share no block with other uses of
    the key. An engine may catch the call, as torch's own.
    """
    if has_torch_function((key,)):
        found: Tensor = handle_torch_function(kept, (key,), key, number, shape, p)
        return found
    words = keep_words(key, number, math.prod(shape))
    return (words >= lowest_kept(p)).reshape(shape)


def lowest_kept(p: float) -> int:
    """Return the least of the 2^32 words that dropout of a share p keeps."""
    return round(p * 2.0**32)


def keep_words(key: Tensor, number: int, num: int) -> Tensor:
    """Draw ``num`` integers in [0, 2^32) for :func:`kept`: shape (num,), int64."""
    blocks = torch.arange((num + 3) // 4, device=key.device)
    words = _philox(key[0], key[1], blocks, number, 0, _KEEP)
    return torch.stack(words, dim=-1).reshape(-1)[:num]


def permutation(key: Tensor, num: int) -> Tensor:
    """Draw a permutation of ``range(num)``."""
    return torch.sort(bits(key, num), dim=0, stable=True).indices


def bits_host(key: np.ndarray, num: int) -> np.ndarray:
    """Draw as ``bits`` does, in numpy: for a few thousand numbers many times faster."""
    blocks = np.arange((num + 3) // 4)
    zero, (k0, k1) = np.zeros_like(blocks), key.tolist()
    return np.stack(_philox(k0, k1, blocks, zero, zero, zero), axis=-1).reshape(-1)[:num]


def sample_host(key: np.ndarray, num: int, count: int) -> np.ndarray:
    """Draw ``count`` different numbers of ``range(num)``, in random order, in numpy.

    All in the order of ``permutation``. Few of many are drawn one after the other, and what came
    before is left out: the cost grows with ``count`` alone.
    """
    if num < _MANY or count * 8 > num:
        return np.argsort(bits_host(key, num), kind="stable")[:count]
    drawn = 2 * count + 16  # repetitions are rare; more is drawn until enough are different
    while True:
        words = bits_host(key, 2 * drawn).reshape(-1, 2)
        # 63 bits: a number is likelier than another by num / 2^63 at most.
        found = ((words[:, 0] << 31) ^ words[:, 1]) % num
        different, first = np.unique(found, return_index=True)
        if len(different) >= count:
            return found[np.sort(first)[:count]]
        drawn *= 2
