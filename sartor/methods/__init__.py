"""The methods: an explicit dict, name -> entry. One file per method; no import tricks."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from sartor.errors import ConfigError, did_you_mean
from sartor.hyper import Hyper
from sartor.local import Local
from sartor.method import Method
from sartor.methods.fedapa import fedapa
from sartor.methods.fedavg import fedavg, fedavg_ft
from sartor.methods.fedprox import fedprox
from sartor.methods.local import local
from sartor.task import Task

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
        from torch import nn

        head = nn.Linear(1, 1)
        return self.factory(Task(head), Local()).hyper


PAPERS = {
    "Yu": "Yu, He, Sun, Xue, Li, The Effect of Personalization in FedProx, 2024 (two versions)",
    "Chen": "Chen, Zheng, Long, Su, Minimax Estimation for Personalized FL, JMLR 2023",
    "FedAPA": "Sun, Sun, Pan, Fu, Guo, FedAPA, IJCAI 2025",
    "PRIOR": "Shi et al., PRIOR: Personalized Prior, NeurIPS 2023",
}
"""The papers that Sartor reproduces, by the short name of its lists."""

METHODS: dict[str, MethodEntry] = {
    "local": MethodEntry(
        local,
        "every client alone; the floor",
        "folklore; LocalTrain of Yu et al. 2024, PureLocalTraining of Chen et al. 2021",
        "nothing",
        "baseline",
        ("Yu", "Chen"),
    ),
    "fedavg": MethodEntry(
        fedavg,
        "one model for all, averaged",
        "McMahan et al., AISTATS 2017",
        "model down, model up",
        "baseline",
        ("Yu", "Chen", "FedAPA", "PRIOR"),
    ),
    "fedavg-ft": MethodEntry(
        fedavg_ft,
        "FedAvg, then each client fine-tunes its copy",
        "folklore; Chen et al. 2021, section 3.3",
        "model down, model up",
        "baseline",
        ("Chen", "PRIOR"),
    ),
    "fedprox": MethodEntry(
        fedprox,
        "own models, pulled towards a global one with strength λ",
        "Yu et al., The Effect of Personalization in FedProx, 2024",
        "model down, gradient of the pull up",
        "regularised",
        ("Yu",),
    ),
    "fedapa": MethodEntry(
        fedapa,
        "own mixture of all extractors, learnt by the server; private head",
        "Sun et al., FedAPA, IJCAI 2025",
        "extractor down, extractor up",
        "collaborative",
        ("FedAPA",),
    ),
}


def static_options(factory: Factory) -> dict[str, tuple[Any, Any]]:
    """Read the static options of a factory off its signature.

    Name -> (default, allowed values or type).
    """
    hints = typing.get_type_hints(factory)
    found = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            found[name] = (parameter.default, hints.get(name, Any))
    return found


def build(method: str | Factory, task: Task, local: Local, options: dict[str, Any]) -> Method:
    """Build a method by name or factory, with its options checked.

    Raises:
        ConfigError: for an unknown method, option or value, naming the nearest legal one.
    """
    factory = find(method)
    known = static_options(factory)
    faults = []
    for name, value in options.items():
        if name not in known:
            faults.append(
                f"Unknown option {name!r} of method {_name(method)!r}{did_you_mean(name, known)}"
            )
        elif not _fits(value, known[name][1]):
            faults.append(f"Option {name} must be {_say(known[name][1])}, got {value!r}.")
    if faults:
        raise ConfigError("\n".join(faults))
    return factory(task, local, **options)


def find(method: str | Factory) -> Factory:
    """Return the factory of a name, or the factory itself."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ConfigError(f"Unknown method {method!r}{did_you_mean(method, METHODS)}")
    return METHODS[method].factory


def _name(method: str | Factory) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", "method")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        return any(_fits(value, part) for part in get_args(hint))
    if origin is tuple:
        return isinstance(value, (tuple, list))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _say(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(hint))
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join(_say(part) for part in get_args(hint))
    return {
        type(None): "nothing",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }.get(hint, getattr(hint, "__name__", str(hint)))


__all__ = ["METHODS", "MethodEntry", "build", "find", "static_options"]
