"""The static options of methods: read off a factory's signature, checked, and said in words."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from sartor.core.method import Method

COMMON: dict[str, tuple[Any, Any]] = {
    "finetune_steps": (None, int | None),
    "finetune_epochs": (None, int | None),
    "robust": ("none", Literal["none", "median", "trimmed_mean", "krum", "multi_krum", "clip"]),
    "robust_share": (0.2, float),
    "robust_mix": (None, bool | None),
    "class_weights": (None, Literal["balanced"] | tuple[float, ...] | None),
    "do_no_harm": (False, bool),
    "harm_share": (0.2, float),
    "harm_score": ("loss", Literal["loss", "error", "brier", "auroc"]),
    "harm_on": ("auto", Literal["auto", "holdout", "validation"]),
}
"""Static options of every method.

How long each client fine-tunes its model before it is used; how the server averages, if not
plainly, which share of bad clients it reckons with, and whether uploads are mixed with their
nearest neighbours first (`sartor/compose/robust.py`); how much the losses of each class count in
training (`sartor/compose/weighting.py`); whether a client ends with the best of alone,
global and personalised, and by which samples (`sartor/compose/harm.py`).
"""


OF_NETWORK = frozenset({"private", "shared", "retained", "strict", "covariance", "class_weights"})
"""Options that speak of a network's layers: only where it is known can their values be checked.

Those of class weights have hyper-parameters, which the command line leaves alone.
"""


def static_options(factory: Callable[..., Method]) -> dict[str, tuple[Any, Any]]:
    """Read the static options of a factory off its signature.

    Name -> (default, allowed values or type). Those of :data:`COMMON` belong to every method.
    """
    hints = typing.get_type_hints(factory)
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            found[name] = (parameter.default, hints.get(name, Any))
    return {**found, **COMMON}


def taken(value: Any, hint: Any) -> Any:
    """Return a value as an option of this type takes it: where that is a list, one word is one too.

    >>> taken("fc1,fc2", tuple[str, ...]), taken(0.1, tuple[float, ...])
    (('fc1', 'fc2'), (0.1,))
    """
    parts = get_args(hint) if _is_union(hint) else (hint,)
    lists = [part for part in parts if get_origin(part) is tuple]
    if not lists:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if fits(value, hint):
        return value
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip()) or value
    alone = (value,)
    return alone if fits(alone, lists[0]) else value


def fits(value: Any, hint: Any) -> bool:
    """Say whether a value is allowed by the type of an option."""
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if _is_union(hint):
        return any(fits(value, part) for part in get_args(hint))
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def say(hint: Any) -> str:
    """Say in words what an option may be."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(hint))
    if _is_union(hint):
        return " or ".join(say(part) for part in get_args(hint))
    if origin is tuple:
        what = {str: "names", int: "whole numbers", float: "numbers"}
        return f"a list of {what.get(get_args(hint)[0], 'values')}"
    return {
        type(None): "nothing",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }.get(hint, getattr(hint, "__name__", str(hint)))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (types.UnionType, typing.Union)
