"""What a process leaves for another one: results, written to a file in memory.

Numbers go as they are, byte by byte, and keep their type, shape and strides; what stands around
them (dicts, tuples, names) goes as JSON. Nothing that is read can make anything else run.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.engines.parts import Costs

_HEAD = struct.Struct("<QQ")  # where the JSON begins in the file, and how long it is


class Pen:
    """Writes numbers to a file, and returns the words that lead to them."""

    def __init__(self, file: int) -> None:
        self.file, self.end = file, _HEAD.size

    def write(self, flat: np.ndarray) -> int:
        """Write bytes; returns where they begin."""
        start, view = self.end, flat.data
        while len(view):
            written = os.pwrite(self.file, view, self.end)
            self.end += written
            view = view[written:]
        return start

    def encoded(self, value: Any) -> list[Any]:
        """Write the numbers of a result, and return the rest of it as lists and words."""
        if isinstance(value, Tensor):
            dense = value.detach().clone()  # keeps the order of axes in memory
            flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
            kind = str(dense.dtype).removeprefix("torch.")
            return ["tensor", kind, list(dense.shape), list(dense.stride()), self.write(flat)]
        if isinstance(value, np.ndarray):
            row = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return ["array", value.dtype.str, list(value.shape), self.write(row)]
        if isinstance(value, dict):
            return ["dict", [[key, self.encoded(part)] for key, part in value.items()]]
        if isinstance(value, Costs):
            return ["costs", self.encoded(value.backward), self.encoded(value.forward)]
        if type(value) in (tuple, list):
            return [type(value).__name__, [self.encoded(part) for part in value]]
        if value is None or type(value) in (bool, int, float, str):
            return ["plain", value]
        raise TypeError(f"a {type(value).__name__} cannot be handed from process to process")

    def close(self, words: Any) -> None:
        """Write the words that lead to all the rest."""
        text = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
        where = self.write(text)
        os.pwrite(self.file, _HEAD.pack(where, len(text)), 0)


def words_in(file: int) -> Any:
    """Return the words that a pen was closed with."""
    where, length = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
    text = np.empty(length, dtype=np.uint8)
    _read(file, text, where)
    return json.loads(text.tobytes())


def decoded(file: int, words: list[Any]) -> Any:
    """Return what was encoded as these words."""
    match words:
        case ["tensor", kind, shape, stride, where]:
            dense = torch.empty_strided(shape, stride, dtype=getattr(torch, kind))
            flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
            _read(file, flat, where)
            return dense
        case ["array", kind, shape, where]:
            array = np.empty(shape, dtype=np.dtype(kind))
            _read(file, array.reshape(-1).view(np.uint8), where)
            return array
        case ["dict", pairs]:
            return {key: decoded(file, part) for key, part in pairs}
        case ["costs", backward, forward]:
            return Costs(decoded(file, backward), decoded(file, forward))
        case ["tuple", parts]:
            return tuple(decoded(file, part) for part in parts)
        case ["list", parts]:
            return [decoded(file, part) for part in parts]
    return words[1]


def _read(file: int, flat: np.ndarray, where: int) -> None:
    view = flat.data
    while len(view):
        count = os.preadv(file, [view], where)
        if not count:
            raise EOFError("what a process left ends too early")
        where += count
        view = view[count:]
