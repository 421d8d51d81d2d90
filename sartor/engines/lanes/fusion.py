"""ReLUs that cost nothing: the layer before one, or the pooling after it, computes it too.

In a step of a small network a ReLU is a kernel that reads and writes what another kernel had in
its hands. Which ones can be spared is learned from one pass through the step, by watching who uses
what: a dense layer or a pooling whose result goes to a ReLU and nowhere else, and a ReLU whose
result goes to a pooling and nowhere else. A watcher may miss a use (inside an inner ``vmap``, a
compiled function), so a second pass computes such pairs together and shows everybody else no
numbers in the place of what only the pair may see: it must agree with the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.engines.lanes.shapes import nested

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
    """What is known of the ReLUs of a step.

    Attributes:
        pairs: a call to the only call that uses what it gives; one of the two is a ReLU.
        rectify: the calls that compute the ReLU of their pair too.
        skip: the ReLUs that are then nothing.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}
        self.rectify: frozenset[int] = frozenset()
        self.skip: frozenset[int] = frozenset()
        self._learners: list[Pass] | None = None
        self._poisons = False

    def begin(self) -> Pass:
        """Return the record of a pass through the step."""
        found = Pass(self, self._poisons)
        if self._learners is not None:
            self._learners.append(found)
        return found

    def prove(self, before: Any, step: Callable[[], Any]) -> None:
        """Learn from one call of a step, and keep what was learned if another call agrees.

        They agree if in no lane a leaf differs by more than a ten-thousandth of what the step
        changed there: sums in another order differ by less.

        Args:
            before: the tree that the step is taken from, leaves (1, lanes, ...).
            step: takes the step with this fusion's operations, always on the same arguments.
        """
        self._keep({}, {})
        self._learners = []
        plain = list(nested(step()))
        learners, self._learners = self._learners, None
        if len(learners) == 1:
            self._keep(*learners[0].found())
        if not self.pairs:
            return
        self._poisons = True
        try:
            trio = zip(nested(before), plain, nested(step()), strict=True)
            proven = all(_agree(*leaves) for leaves in trio)
        except FormChangedError:
            proven = False
        finally:
            self._poisons = False
        if not proven:
            self._keep({}, {})

    def _keep(self, pairs: dict[int, int], kinds: dict[int, Any]) -> None:
        self.pairs = pairs
        both = {*pairs, *pairs.values()}
        self.skip = frozenset(number for number in both if kinds[number] == "relu")
        self.rectify = frozenset(both - self.skip)


class FormChangedError(RuntimeError):
    """A layer that computed its ReLU, too, cannot do so in this pass."""


class Pass:
    """One pass through a step: calls are numbered, and their results watched."""

    def __init__(self, fusion: Fusion, poisons: bool = False) -> None:
        self.pairs, self.rectify, self.skip = fusion.pairs, fusion.rectify, fusion.skip
        self.poisons = poisons
        self.number = 0
        self.real: dict[int, Tensor] = {}  # what only the other of a pair may see
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
        first = getattr(args[0], _TAG, None) if args else None
        if first in self.real and self.pairs.get(first) == number:
            args = (self.real[first], *args[1:])
        if is_relu and number in self.skip:
            found = args[0]
        elif number in self.rectify and form is not None:
            found = form(*args, **kwargs, rectify=True)
            if found is None:  # it was served when it was learned
                raise FormChangedError("A layer changed its form between two passes of one step.")
        else:
            found = None if is_relu or form is None else form(*args, **kwargs)
            self.kinds[number] = "relu" if is_relu else func if found is not None else None
            found = plain(*args, **kwargs) if found is None else found
        if self.poisons and number in self.pairs:
            self.real[number] = found
            found = found * torch.nan
        if isinstance(found, Tensor):
            setattr(found, _TAG, number)
        return found

    def found(self) -> tuple[dict[int, int], dict[int, Any]]:
        """Return the pairs of calls that can be one, and what all calls are."""
        pairs: dict[int, int] = {}
        only = {n: uses[0] for n, uses in self.uses.items() if len(uses) == 1}
        users = [(number, user) for number, user in only.items() if user is not None]
        for number, user in users:
            if self.kinds.get(number) in _LAYERS and self.kinds.get(user) == "relu":
                pairs[number] = user
        for number, user in users:
            is_relu = self.kinds.get(number) == "relu" and number not in pairs.values()
            if is_relu and self.kinds.get(user) in _POOLINGS:
                pairs[number] = user
        return pairs, self.kinds

    def _note(self, user: int | None, args: Any, kwargs: Any) -> None:
        for value in nested((args, kwargs)):
            number = getattr(value, _TAG, None) if isinstance(value, Tensor) else None
            if number is not None:
                self.uses.setdefault(number, []).append(user)


def _agree(before: Tensor, plain: Tensor, fused: Tensor) -> bool:
    """Say whether two outcomes of one step are the same; no number twice counts as the same."""
    for lane in range(plain.shape[1]):
        old, one, other = (leaf[:, lane].double() for leaf in (before, plain, fused))
        apart = torch.where(one.isnan() & other.isnan(), 0.0, (other - one).abs())
        moved = torch.where(one.isfinite() & old.isfinite(), (one - old).abs(), 0.0)
        size = torch.where(one.isfinite(), one.abs(), 0.0)
        near = 1e-4 * moved.amax() + 1e-6 * size.amax() if apart.numel() else 0.0
        if apart.numel() and not bool(apart.amax() <= near):
            return False
    return True
