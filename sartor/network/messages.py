"""Messages as bytes: one safetensors document, its header JSON with our own entry. No pickle.

A message is a tree of tensors and a dict of plain values. Leaves that do not travel (``hollow``)
are named with their shape, and the receiver reads zeros.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sartor.core.errors import MessageError
from sartor.core.tree import Tree
from sartor.runs.storage import apart, flatten, unflatten

_ENTRY = "sartor"
_MOST_HEADER = 1 << 24
_UNREADABLE = (SafetensorError, struct.error, ValueError, KeyError, TypeError, AttributeError)


def everything(leaf: str) -> bool:
    """Say that a leaf travels, whatever its name."""
    return True


def pack(
    tree: Mapping[str, Any], meta: Mapping[str, Any], sent: Callable[[str], bool] = everything
) -> bytes:
    """Return a tree and JSON-able values as bytes; ``sent`` says whether a leaf travels."""
    leaves, empty = flatten(tree)
    hollow = {
        name: [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
        for name, leaf in leaves.items()
        if not sent(name)
    }
    real = apart({name: leaf for name, leaf in leaves.items() if name not in hollow})
    head = json.dumps({"empty": empty, "hollow": hollow, "meta": meta}, allow_nan=True)
    return save(real, {_ENTRY: head})


def unpack(data: bytes, limit: int | None = None) -> tuple[Tree, dict[str, Any]]:
    """Return the tree and the values of a message.

    Raises:
        MessageError: it is above the limit in bytes, cut short, or not one of our messages.
    """
    if limit is not None and len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes, the limit is {limit}")
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if length > min(_MOST_HEADER, len(data)):
            raise MessageError(f"a message cut short: its header has {length} bytes")
        entry = json.loads(data[8 : 8 + length])["__metadata__"][_ENTRY]
        head = json.loads(entry)
        leaves: dict[str, Tensor] = load(data)
        for name, (dtype, shape) in head["hollow"].items():
            leaves[name] = torch.zeros(shape, dtype=getattr(torch, dtype))
        return unflatten(leaves, head["empty"]), dict(head["meta"])
    except MessageError:
        raise
    except _UNREADABLE as error:
        raise MessageError(f"a message that cannot be read: {error}") from error
