"""Arithmetic on trees: nested dicts of tensors, walked in the sorted order of their keys.

A leaf's name is its path, joined by "/". Two trees that should match and do not end in one error
that names the difference, never in silent broadcasting between the wrong leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sartor.core.errors import ContractError

Tree = dict[str, Any]
"""A nested dict whose leaves are tensors."""


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``fn`` to the leaves of trees of one structure.

    >>> map(lambda a, b: a + b, {"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(3)}
    """
    keys = tree.keys() if isinstance(tree, dict) else None
    for other in rest:
        if (other.keys() if isinstance(other, dict) else None) != keys:
            raise _difference(tree, other)
    if keys is None:
        return fn(tree, *rest)
    return {k: map(fn, tree[k], *(other[k] for other in rest)) for k in sorted(tree)}


def _difference(tree: Any, other: Any) -> ContractError:
    wanted = f"the keys {sorted(tree)}" if isinstance(tree, dict) else "a leaf"
    found = sorted(other) if isinstance(other, dict) else type(other).__name__
    if not isinstance(tree, dict):
        found = f"the keys {found}"
    return ContractError(f"Trees differ: expected {wanted}, found {found}.")


def items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, leaf)`` in sorted order, the name being the path joined by "/"."""
    for k in sorted(tree):
        if isinstance(tree[k], dict):
            yield from items(tree[k], f"{prefix}{k}/")
        else:
            yield f"{prefix}{k}", tree[k]


def leaves(tree: Tree) -> list[Tensor]:
    """List the leaves in sorted order of their names."""
    return [leaf for _, leaf in items(tree)]


def select(tree: Tree, keep: Callable[[str], bool]) -> Tree:
    """Keep the top-level leaves whose name satisfies ``keep``."""
    return {k: v for k, v in tree.items() if keep(k)}


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a − b."""
    return map(torch.sub, a, b)


def scale(a: Tree, factor: float | Tensor) -> Tree:
    """Return factor · a."""
    return map(lambda leaf: leaf * factor, a)


def addcmul(a: Tree, b: Tree, factor: Tensor) -> Tree:
    """Return a + factor · b, rounded once where the device can."""
    return _by_leaf(addcmul_leaves, (a, b), factor)


def addcmul_leaves(a: list[Tensor], b: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return a + factor · b, leaf by leaf; an engine may catch the call, as torch's own."""
    if has_torch_function((factor,)):
        return handle_torch_function(addcmul_leaves, (factor,), a, b, factor)
    return [torch.addcmul(x, y, factor) for x, y in zip(a, b, strict=True)]


def add_difference(a: Tree, b: Tree, c: Tree, factor: Tensor) -> Tree:
    """Return a + factor · (b − c)."""
    return _by_leaf(add_difference_leaves, (a, b, c), factor)


def add_difference_leaves(
    a: list[Tensor], b: list[Tensor], c: list[Tensor], factor: Tensor
) -> list[Tensor]:
    """Return a + factor · (b − c), leaf by leaf; see ``addcmul_leaves``."""
    if has_torch_function((factor,)):
        return handle_torch_function(add_difference_leaves, (factor,), a, b, c, factor)
    return [torch.addcmul(x, y - z, factor) for x, y, z in zip(a, b, c, strict=True)]


def pulled_step(now: Tree, slope: Tree, centre: Tree, rate: Tensor, strength: Tensor) -> Tree:
    """Return now − rate · (slope + strength · (now − centre))."""
    return _by_leaf(pulled_step_leaves, (now, slope, centre), rate, strength)


def pulled_step_leaves(
    now: list[Tensor], slope: list[Tensor], centre: list[Tensor], rate: Tensor, strength: Tensor
) -> list[Tensor]:
    """Return now − rate · (slope + strength · (now − centre)); see ``addcmul_leaves``."""
    factors = (rate, strength)
    if has_torch_function(factors):
        return handle_torch_function(pulled_step_leaves, factors, now, slope, centre, *factors)
    slope = add_difference_leaves(slope, now, centre, strength)
    return addcmul_leaves(now, slope, -rate)


def _by_leaf(fn: Callable[..., list[Tensor]], trees: tuple[Tree, ...], *factors: Tensor) -> Tree:
    """Call a function of lists of leaves; trees that differ are refused."""
    rows: list[tuple[Tensor, ...]] = []
    map(lambda *leaf: rows.append(leaf), *trees)
    found = iter(fn(*([row[k] for row in rows] for k in range(len(trees))), *factors))
    return map(lambda x: next(found), trees[0])


def zeros_like(a: Tree) -> Tree:
    """Return a tree of zeros of the same shapes."""
    return map(torch.zeros_like, a)


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product Σ a·b over all leaves."""
    products = leaves(map(lambda x, y: (x * y).sum(), a, b))
    return torch.stack(products).sum()


def sqdist(a: Tree, b: Tree) -> Tensor:
    """Return the squared distance ‖a − b‖² over all leaves."""
    apart = sub(a, b)
    return dot(apart, apart)


def num_bytes(tree: Tree, skip: int = 0) -> int:
    """Count the bytes of a tree, leaving out the first ``skip`` axes of every leaf."""
    return sum(leaf[(0,) * skip].numel() * leaf.element_size() for leaf in leaves(tree))


def where(mask: Tensor, a: Tree, b: Tree) -> Tree:
    """Choose leaf by leaf: ``mask`` has the leading axes of every leaf."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())), x, y)

    return map(choose, a, b)


def stack(trees: list[Any], dim: int = 0) -> Any:
    """Stack trees (or tuples of trees) of one structure along a new axis."""
    if isinstance(trees[0], tuple):
        return tuple(stack([t[k] for t in trees], dim) for k in range(len(trees[0])))
    return map(lambda *xs: torch.stack(xs, dim), *trees)


def cat(trees: list[Any], dim: int = 0) -> Any:
    """Concatenate trees (or tuples of trees) of one structure along an axis."""
    if len(trees) == 1:
        return trees[0]
    if isinstance(trees[0], tuple):
        return tuple(cat([t[k] for t in trees], dim) for k in range(len(trees[0])))
    return map(lambda *xs: torch.cat(xs, dim), *trees)


def flat(tree: Tree, skip: int = 0) -> Tensor:
    """Lay all leaves end to end, keeping the first ``skip`` axes, which they share."""
    return torch.cat([leaf.reshape(*leaf.shape[:skip], -1) for leaf in leaves(tree)], skip)


def shaped(row: Tensor, like: Tree) -> Tree:
    """Cut a row of numbers into the leaves of a tree; undoes ``flat``."""
    parts = iter(row.split([leaf.numel() for leaf in leaves(like)]))
    return map(lambda leaf: next(parts).reshape(leaf.shape), like)


def narrow(tree: Any, dim: int, start: int, length: int) -> Any:
    """View the rows ``start .. start+length`` of an axis of every leaf."""
    return map(lambda leaf: leaf.narrow(dim, start, length), tree)
