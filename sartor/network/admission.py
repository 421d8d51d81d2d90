"""What is checked before an answer of a client touches the server's state.

The server knows what every upload must look like: it makes one itself, from a single sample of
zeros. An answer that differs in a name, a shape or a type, that holds a number that is not finite,
or that is larger than a bound, is refused with the reason; its client counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.errors import MessageError, PFLError
from sartor.core.tree import Tree

_HEADER = 1 << 20  # bytes that names, shapes and values may take beside the numbers


@dataclass(frozen=True)
class Admission:
    """The rule of what is accepted.

    Attributes:
        max_norm: the largest Euclidean norm of all real numbers of an upload together.
        max_bytes: the most bytes of an answer; None allows what the upload needs, and a header.
    """

    max_norm: float | None = None
    max_bytes: int | None = None

    def limit(self, wanted: Tree) -> int:
        """Return the most bytes that an answer with such an upload may have."""
        return self.max_bytes or tree.num_bytes(wanted) + _HEADER

    def upload(
        self, sent: Mapping[str, Any], wanted: Tree, marks: Mapping[str, str], silent: set[str]
    ) -> Tree:
        """Return an upload as ``aggregate`` reads it, or refuse it.

        Args:
            sent: leaves by their names.
            wanted: an upload of the right names, shapes and types.
            marks: which leaves bring only some rows, and which leaf marks them.
            silent: the leaves that were not asked for; zeros take their place.

        Raises:
            MessageError: with the reason.
        """
        model = dict(tree.items(wanted))
        names = model.keys() - silent
        if sent.keys() != names:
            more, less = sorted(sent.keys() - names), sorted(names - sent.keys())
            raise MessageError(f"wrong leaves: {less[:3]} are missing, {more[:3]} are not expected")
        for name, leaf in sent.items():
            _check_leaf(name, leaf, model, marks)
        try:
            whole = wire.unpacked(dict(sent), {k: v for k, v in marks.items() if k in sent})
        except PFLError as error:
            raise MessageError(str(error)) from error
        real = [leaf for leaf in sent.values() if leaf.is_floating_point()]
        norm = math.sqrt(sum(float(leaf.double().square().sum()) for leaf in real))
        if self.max_norm is not None and not norm <= self.max_norm:
            raise MessageError(f"a norm of {norm:.6g}, above the bound of {self.max_norm:g}")
        leaves = {k: whole.get(k, torch.zeros_like(v)) for k, v in model.items()}
        return _nested(wanted, leaves)


def _check_leaf(
    name: str, leaf: Tensor, model: Mapping[str, Tensor], marks: Mapping[str, str]
) -> None:
    want = model[name]
    if leaf.dtype != want.dtype:
        raise MessageError(f"{name!r} has the type {leaf.dtype}, expected {want.dtype}")
    shape, found = want.shape, leaf.shape
    if name in marks:  # only some rows came
        shape, found = want.shape[model[marks[name]].dim() :], leaf.shape[1:]
    if shape != found:
        raise MessageError(f"{name!r} has the shape {tuple(found)}, expected {tuple(shape)}")
    if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
        raise MessageError(f"{name!r} holds numbers that are not finite")


def _nested(like: Tree, leaves: Mapping[str, Tensor], prefix: str = "") -> Tree:
    return {
        k: _nested(v, leaves, f"{prefix}{k}/") if isinstance(v, dict) else leaves[f"{prefix}{k}"]
        for k, v in like.items()
    }


def scores(
    meta: Mapping[str, Any], splits: tuple[str, ...], columns: int = 2
) -> dict[str, tuple[float, ...]]:
    """Read the correct answers, losses and measure that a client reports, or refuse them."""
    try:
        found = {
            s: tuple(float(meta["scores"][s][column]) for column in range(columns)) for s in splits
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MessageError(f"the scores cannot be read: {error!r}") from error
    if any(not numbers[0] >= 0 for numbers in found.values()):
        raise MessageError("a number of correct answers is negative or not a number")
    return found


def costs(meta: Mapping[str, Any]) -> tuple[int, int]:
    """Read the counted samples with and without a gradient, or refuse them."""
    try:
        backward, forward = (int(number) for number in meta["costs"])
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"the costs cannot be read: {error!r}") from error
    if min(backward, forward) < 0 or max(backward, forward) >= 1 << 53:
        raise MessageError("the costs are not sensible numbers")
    return backward, forward
