"""ReLUs that cost nothing: the layer before one, or the pooling after it, computes it too.

In a step of a small network a ReLU is a kernel that reads and writes what another kernel had in
its hands. Which ones can be spared is learned from one pass through the step, by watching who uses
what: a dense layer or a pooling whose result goes to a ReLU and nowhere else, and a ReLU whose
result goes to a pooling and nowhere else. The next pass computes them together. A watcher may miss
a use (code that does not go through PyTorch's functions), so the two passes must agree before the
second is used; see ``Fusion.prove``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

_POOLINGS = (F.max_pool2d, torch.max_pool2d)
_LAYERS = (F.linear, *_POOLINGS)
_RELUS = (F.relu, torch.relu, Tensor.relu)
# Questions about a tensor, which do not read its values.
_HARMLESS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
    ),
}
_TAG = "_sartor_call"  # the number of the call that a tensor came from


class Fusion:
    """What is known of the ReLUs of a step."""

    def __init__(self) -> None:
        self.rectify: frozenset[int] = frozenset()
        self.skip: frozenset[int] = frozenset()
        self._learner: Pass | None = None

    def begin(self) -> Pass:
        """Return the record of a pass through the step."""
        found = Pass(self)
        self._learner = self._learner or found
        return found

    def prove(self, before: Any, step: Callable[[], Any]) -> None:
        """Learn from one call of a step, and keep what was learned if another call agrees.

        They agree if no leaf differs by more than a thousandth of what the step changed: sums in
        another order differ by less, a ReLU that should not be there by more.

        Args:
            before: the tree that the step is taken from.
            step: takes the step with this fusion's operations, always on the same arguments.
        """
        self._learner = None
        plain = pytree.tree_leaves(step())
        self.rectify, self.skip = self._learner.found() if self._learner else (frozenset(),) * 2
        if self.rectify:
            fused = pytree.tree_leaves(step())
            trio = zip(pytree.tree_leaves(before), plain, fused, strict=True)
            if not all(_agree(*leaves) for leaves in trio):
                self.rectify = self.skip = frozenset()


class Pass:
    """One pass through a step: calls are numbered, and their results watched."""

    def __init__(self, fusion: Fusion) -> None:
        self.rectify, self.skip = fusion.rectify, fusion.skip
        self.number = 0
        self.kinds: dict[int, Any] = {}
        self.uses: dict[int, list[int | None]] = {}  # None: a use that is no ReLU and no pooling

    def call(
        self,
        func: Callable[..., Any],
        plain: Callable[..., Any],
        form: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a call, with the ReLU beside it if that is known to be right.

        Args:
            func: the function of torch that was called.
            plain: calls it in its usual form.
            form: the form for lanes, if there is one; takes ``rectify`` too.
            args: the arguments.
            kwargs: the named arguments.
        """
        is_relu = func in _RELUS and not kwargs.get("inplace") and len(args) == 1
        if not (is_relu or func in _LAYERS):
            if func not in _HARMLESS:
                self._note(None, args, kwargs)
            return plain(*args, **kwargs)
        number, self.number = self.number, self.number + 1
        self._note(number, args, kwargs)
        if is_relu and number in self.skip:
            found = args[0]
        elif number in self.rectify and form is not None:
            found = form(*args, **kwargs, rectify=True)
            if found is None:  # it was served when it was learned
                raise RuntimeError("A layer changed its form between two passes of one step.")
        else:
            found = None if is_relu or form is None else form(*args, **kwargs)
            self.kinds[number] = "relu" if is_relu else func if found is not None else None
            found = plain(*args, **kwargs) if found is None else found
        if isinstance(found, Tensor):
            setattr(found, _TAG, number)
        return found

    def found(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the calls that can compute a ReLU too, and the ReLUs that are then nothing."""
        rectify: set[int] = set()
        skip: set[int] = set()
        only = {n: uses[0] for n, uses in self.uses.items() if len(uses) == 1}
        pairs = [(n, user) for n, user in only.items() if user is not None]
        for number, user in pairs:
            if self.kinds.get(number) in _LAYERS and self.kinds.get(user) == "relu":
                rectify.add(number)
                skip.add(user)
        for number, user in pairs:
            is_relu = self.kinds.get(number) == "relu" and number not in skip
            if is_relu and self.kinds.get(user) in _POOLINGS:
                rectify.add(user)
                skip.add(number)
        return frozenset(rectify), frozenset(skip)

    def _note(self, user: int | None, args: Any, kwargs: Any) -> None:
        for value in pytree.tree_leaves((args, kwargs)):
            number = getattr(value, _TAG, None) if isinstance(value, Tensor) else None
            if number is not None:
                self.uses.setdefault(number, []).append(user)


def _agree(before: Tensor, plain: Tensor, fused: Tensor) -> bool:
    """Say whether two outcomes of one step are the same; no number twice counts as the same."""
    before, plain, fused = (leaf.double() for leaf in (before, plain, fused))
    apart = torch.where(plain.isnan() & fused.isnan(), 0.0, (fused - plain).abs())
    moved = torch.where(plain.isfinite() & before.isfinite(), (plain - before).abs(), 0.0)
    size = torch.where(plain.isfinite(), plain.abs(), 0.0)
    return bool(apart.amax() <= 1e-3 * moved.amax() + 1e-6 * size.amax()) if apart.numel() else True
