"""Class statistics of a client's features: sums, counts, and the means they make."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core.method import Batch, ClientContext, Phase
from sartor.core.task import Task
from sartor.core.tree import Tree


def class_sums(task: Task, name: str) -> Phase:
    """Build the pass through the training samples that adds up the features of every class.

    They are features of ``work["params"]``, before a linear head. It leaves ``work["sums"]``
    (classes, features) and ``work["counts"]`` (classes,).
    """

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        like = next(iter(work["params"].values()))
        sums = like.new_zeros((task.num_classes, task.feature_dim))
        return {**work, "sums": sums, "counts": like.new_zeros(task.num_classes)}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        found = task.represent(work["params"], batch)
        member = members(task, batch, found.dtype)
        sums = work["sums"] + member.mT @ found
        return {**work, "sums": sums, "counts": work["counts"] + member.sum(0)}

    return Phase(name, step, enter, batch=64, shuffle=False)


def members(task: Task, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Say which real sample belongs to which class: ones and zeros, (batch, classes)."""
    classes = torch.arange(task.num_classes, device=batch.y.device)
    return ((batch.y[:, None] == classes) & batch.mask[:, None]).to(dtype)


def class_means(sums: Tensor, counts: Tensor, fallback: Tensor | None = None) -> Tensor:
    """Return the mean feature of every class, or the fallback (zeros) where it has no samples."""
    means = sums / counts.clamp(min=1.0)[:, None]
    other = torch.zeros_like(means) if fallback is None else fallback
    return torch.where(counts[:, None] > 0, means, other)
