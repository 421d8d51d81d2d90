"""The samples of one client, as ``federation["oslo"]`` gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.data.split import SPLITS


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds: a copy, as models see it, of its part of a federation.

    Attributes:
        name: of the client.
        x: ``(samples, ...)`` its features; training samples first, then validation, then test.
        y: their labels; a target that was standardised is so here.
        train: positions in ``x`` of the training samples; ``x[train]`` are their features.
        val: positions of the validation samples.
        test: positions of the test samples.
        class_names: names of the classes, if they have any.
    """

    name: str
    x: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.x)

    def __repr__(self) -> str:
        """Return the sizes, and how often each class occurs, in one line."""
        sizes = ", ".join(f"{name}={len(getattr(self, name))}" for name in SPLITS)
        shape = tuple(self.x.shape[1:])
        text = f"ClientData({self.name!r}, {sizes}, input_shape={shape}"
        if self.y.dtype == torch.int64 and self.y.ndim == 1:
            values, counts = self.y.unique(return_counts=True)
            names = [self.class_names[k] if self.class_names else str(k) for k in values.tolist()]
            pairs = list(zip(names, counts.tolist(), strict=True))
            text += ", " + " ".join(f"{name}:{count}" for name, count in pairs[:10])
            text += " ..." * (len(pairs) > 10)
        return f"{text})"
