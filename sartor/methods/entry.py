"""What a listed method is: its factory, its facts, and the options read off its signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from torch import nn

from sartor.hyper import Hyper
from sartor.local import Local
from sartor.method import Method
from sartor.task import Task

PAPERS = {
    "Yu": "Yu, He, Sun, Xue, Li, The Effect of Personalization in FedProx, 2024 (two versions)",
    "Chen": "Chen, Zheng, Long, Su, Minimax Estimation for Personalized FL, JMLR 2023",
    "FedAPA": "Sun, Sun, Pan, Fu, Guo, FedAPA, IJCAI 2025",
    "PRIOR": "Shi et al., PRIOR: Personalized Prior, NeurIPS 2023",
}
"""The papers that Sartor reproduces, by the short name of its lists."""

Factory = Callable[..., Method]


@dataclass(frozen=True)
class MethodEntry:
    """A method as it is listed.

    Attributes:
        factory: ``(task, local, *, options) -> Method``.
        summary: one line.
        citation: where it comes from.
        travels: what goes over the wire, per round and participant.
        family: "baseline", "regularised" or "collaborative"; ``compare`` takes ``all-FAMILY``.
        papers: in which of the papers that Sartor reproduces it appears; see :data:`PAPERS`.
    """

    factory: Factory
    summary: str
    citation: str
    travels: str
    family: str = "own"
    papers: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """The static options: name -> (default, allowed values or type)."""
        return static_options(self.factory)

    @property
    def hyper(self) -> dict[str, Hyper]:
        """The sweepable hyper-parameters with default options and plain SGD."""
        head = nn.Linear(1, 1)
        return self.factory(Task(head), Local()).hyper


COMMON: dict[str, tuple[Any, Any]] = {
    "finetune_steps": (None, int | None),
    "finetune_epochs": (None, int | None),
    "robust": ("none", Literal["none", "median", "trimmed_mean", "krum", "multi_krum", "clip"]),
    "robust_share": (0.2, float),
    "robust_mix": (None, bool | None),
    "do_no_harm": (False, bool),
    "harm_share": (0.2, float),
    "harm_score": ("loss", Literal["loss", "error"]),
    "harm_on": ("auto", Literal["auto", "holdout", "validation"]),
}
"""Static options of every method.

How long each client fine-tunes its model before it is used; how the server averages, if not
plainly, which share of bad clients it reckons with, and whether uploads are mixed with their
nearest neighbours first (`sartor/compose/robust.py`); whether a client ends with the best of alone,
global and personalised, and by which samples (`sartor/compose/harm.py`).
"""


def static_options(factory: Factory) -> dict[str, tuple[Any, Any]]:
    """Read the static options of a factory off its signature.

    Name -> (default, allowed values or type). Those of :data:`COMMON` belong to every method.
    """
    hints = typing.get_type_hints(factory)
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            found[name] = (parameter.default, hints.get(name, Any))
    return {**found, **COMMON}


def fits(value: Any, hint: Any) -> bool:
    """Say whether a value is allowed by the type of an option."""
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return any(fits(value, part) for part in get_args(hint))
    if origin is tuple:
        return isinstance(value, (tuple, list))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def say(hint: Any) -> str:
    """Say in words what an option may be."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(hint))
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join(say(part) for part in get_args(hint))
    return {
        type(None): "nothing",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }.get(hint, getattr(hint, "__name__", str(hint)))
