"""Row-stochastic matrices and the tables they mix: one row per client.

``repeated`` makes a table, ``combine`` and ``put_rows`` are the two ways in which a server touches
it; the rest keeps a row on (or near) the simplex.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.tree import Tree


def at(table: Tensor, index: Tensor) -> Tensor:
    """Take row ``index`` (a 0-d integer tensor) in a way that works under ``vmap`` and ``grad``."""
    return table.index_select(0, index.reshape(1))[0]


def repeated(one: Tree, num: int) -> Tree:
    """Return a table whose ``num`` rows are copies of one tree: leaves (num, ...)."""
    found: Tree = tree.map(lambda leaf: leaf.expand(num, *leaf.shape).clone(), one)
    return found


def combine(weights: Tensor, table: Tree) -> Tree:
    """Mix the rows of a table: Σ_j weights[..., j] · table[j] for every leaf (rows, ...).

    ``weights`` are (rows,) for one mixture, or (n, rows) for n of them.
    """

    def one(leaf: Tensor) -> Tensor:
        flat = weights.to(leaf.dtype) @ leaf.reshape(leaf.shape[0], -1)
        return flat.reshape(weights.shape[:-1] + leaf.shape[1:])

    return tree.map(one, table)


def inner(table: Tree, vectors: Tree) -> Tensor:
    """Return the products ⟨vectors[n], table[j]⟩ summed over leaves: shape (n, rows)."""
    products = [
        v.reshape(v.shape[0], -1) @ t.reshape(t.shape[0], -1).mT
        for v, t in zip(tree.leaves(vectors), tree.leaves(table), strict=True)
    ]
    return torch.stack(products).sum(0)


def put_rows(table: Tree, cohort: Tensor, rows: Tree, present: Tensor) -> Tree:
    """Replace the rows of the cohort's present members; the ids of a cohort are distinct."""

    def one(old: Tensor, new: Tensor) -> Tensor:
        mask = present.reshape((-1,) + (1,) * (old.dim() - 1))
        kept = torch.where(mask, new, old.index_select(0, cohort))
        return old.index_copy(0, cohort, kept)

    return tree.map(one, table, rows)


def clip(rows: Tensor) -> Tensor:
    """Clip every weight to [0, 1]."""
    return rows.clamp(0.0, 1.0)


def pin_self(rows: Tensor, own: Tensor, weight: Tensor) -> Tensor:
    """Set each row's weight for its own client: rows[n, own[n]] = weight."""
    return torch.where(_is_own(rows, own), weight, rows)


def normalise(rows: Tensor, own: Tensor) -> Tensor:
    """Divide each row by its sum; one that sums to nothing, or less, becomes its unit vector.

    A negative sum would turn the sign of every weight.
    """
    total = rows.sum(-1, keepdim=True)
    nothing = total < 1e-12
    safe = torch.where(nothing, torch.ones_like(total), total)
    alone = _is_own(rows, own).to(rows.dtype)
    return torch.where(nothing, alone, rows / safe)


def _is_own(rows: Tensor, own: Tensor) -> Tensor:
    return torch.arange(rows.shape[-1], device=rows.device) == own[:, None]
