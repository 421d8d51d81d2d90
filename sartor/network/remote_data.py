"""What the server knows of data that it does not have: sizes, shapes, and one sample of zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import MessageError
from sartor.data.split import SPLITS
from sartor.engines.parts import Arena, Split


@dataclass(frozen=True)
class RemoteFederation:
    """The clients of a federation whose data is elsewhere.

    Attributes:
        names: of all clients, in the order of their indices.
        task: unknown: labels are not counted.
        info: nothing.
    """

    names: tuple[str, ...]
    task: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


def read_facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a client reports of its data.

    Raises:
        MessageError: it cannot be right.
    """
    try:
        sizes = {split: int(meta["sizes"][split]) for split in SPLITS}
        facts = {
            "sizes": sizes,
            "shape": [int(n) for n in meta["shape"]],
            "labels": [str(meta["labels"][0]), [int(n) for n in meta["labels"][1]]],
            "tokens": bool(meta["tokens"]),
            "classes": int(meta["classes"]),
            "class_names": [str(name) for name in meta["class_names"]],
            "task": str(meta["task"]),
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MessageError(f"a report of its data that cannot be read: {error!r}") from error
    if sizes["train"] < 1 or min(sizes.values()) < 0 or max(sizes.values()) > 1 << 40:
        raise MessageError(f"sizes that cannot be right: {sizes}")
    return facts


def empty_arena(
    clients: int, hellos: Mapping[int, Mapping[str, Any]], device: torch.device
) -> Arena:
    """Make the arena of a server: the sizes that clients report, and no samples."""
    splits = {}
    for name in SPLITS:
        size = np.zeros((1, clients), dtype=np.int64)
        for i, hello in hellos.items():
            size[0, i] = int(hello["sizes"][name])
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        splits[name] = Split(rows, np.zeros_like(size), size, int(size.max(initial=0)))
    nothing = torch.zeros(0, device=device)
    return Arena(nothing, nothing, splits, 1, clients, device)


def sample_arena(
    clients: int, hello: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Arena:
    """Make an arena in which every client has one sample of zeros."""
    kind, shape = hello["labels"]
    y: Tensor = torch.zeros((1, *shape), dtype=getattr(torch, kind), device=device)
    tokens = hello.get("tokens", False)
    x = torch.zeros((1, *hello["shape"]), dtype=torch.int64 if tokens else dtype, device=device)
    y = y.to(dtype) if y.is_floating_point() else y
    one, zero = np.ones((1, clients), dtype=np.int64), np.zeros((1, clients), dtype=np.int64)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    splits = {name: Split(rows, zero.copy(), one.copy(), 1) for name in SPLITS}
    return Arena(x, y, splits, 1, clients, device)
