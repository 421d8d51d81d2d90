"""Settings in the wrong place of ``fit``: errors that say what to write.

A setting may belong to the call, to local training, to the method (a hyper-parameter or an option),
or to the federation. Whoever writes it in another place knew its name, so the place can be said.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from torch import nn

from sartor import methods
from sartor.core.errors import ConfigError, PFLError, did_you_mean, refuse
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.training.schema import settings_on

F = TypeVar("F", bound=Callable[..., Any])

_LOCAL = tuple(one.name for one in fields(Local))
_OTHER_WORDS = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "optimizer": "optimiser",
    "network": "model",
    "net": "model",
    "num_rounds": "rounds",
    "n_rounds": "rounds",
    "global_rounds": "rounds",
    "random_state": "seeds",
}
"""What other libraries call a setting; those that do not exist here are left out below."""


def guided(function: F) -> F:
    """Let a function like ``fit`` say where a keyword belongs that it does not have."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        method = args[0] if args else given.get("method")
        if method is not None:
            check_method(method)
        strange = {key: value for key, value in given.items() if key not in known}
        refuse(places(strange, method, known))
        return function(*args, **given)

    return cast(F, call)


def check_method(method: Any) -> None:
    """Refuse what cannot be a method; say what was meant."""
    if isinstance(method, Federation):
        raise ConfigError(
            "The first argument is a Federation, but should be the name of a method: "
            "sartor.fit('fedavg', federation)."
        )
    if isinstance(method, nn.Module) or hasattr(method, "get_params"):
        raise ConfigError(
            f"The first argument is a {type(method).__name__}, but should be the name of a method; "
            "a network goes to model=: sartor.fit('fedavg', federation, model=network)."
        )
    if not isinstance(method, str) and not callable(method):
        raise ConfigError(
            f"The first argument should be the name of a method, such as 'fedavg', got {method!r}."
        )


def places(
    strange: Mapping[str, Any], method: Any, known: Iterable[str], caller: str = "fit"
) -> list[str]:
    """Say for keywords that a function does not have where they belong, one sentence each."""
    hyper, options = _of_method(method) if strange else ((), ())
    return [
        _place(key, value, method, hyper, options, [*known], caller)
        for key, value in strange.items()
    ]


def _place(
    key: str,
    value: Any,
    method: Any,
    hyper: Sequence[str],
    options: Sequence[str],
    known: Sequence[str],
    caller: str,
) -> str:
    per_method = caller == "compare"
    name = method if isinstance(method, str) else getattr(method, "__name__", "the method")
    word = _OTHER_WORDS.get(key, key)
    if word in _LOCAL:
        here = f"{caller}(..., local=sartor.Local({word}={value!r}))"
        return f"{key} is a setting of local training; write {here}."
    if word != key and word in known:
        return f"{caller} has no {key}; it is called {word}: {caller}(..., {word}={value!r})."
    for kind, names in (("hyper", hyper), ("options", options)):
        if key in names:
            inside = f"{{{key!r}: {value!r}}}"
            inside = f"{{{name!r}: {inside}}}" if per_method else inside
            what = "a hyper-parameter" if kind == "hyper" else "an option"
            if kind == "hyper" and isinstance(value, list | tuple) and not per_method:
                kind, inside = "sweep", f"{{{key!r}: {list(value)!r}}}"
            return f"{key} is {what} of {name}; write {caller}(..., {kind}={inside})."
    if owners := [one for one in methods.METHODS if key in _hyper_of(one)]:
        some = ", ".join(owners[:4]) + (", ..." if len(owners) > 4 else "")
        return f"{key} is a hyper-parameter of {some}, but not of {name}."
    if key in {**settings_on("file", "dataset"), **settings_on("file", "table")}:
        return (
            f"{key} belongs to the data; give it where the federation is made, such as "
            f"Federation.from_dataset(..., {key}={value!r})."
        )
    return f"{caller} has no argument {key!r}{did_you_mean(key, {*known, *_LOCAL, *hyper})}"


def refuse_misplaced(
    method: Any, hyper: Mapping[str, Any] | None, sweep: Any, options: Mapping[str, Any] | None
) -> None:
    """Refuse settings of local training, and options, among hyper-parameters; and the reverse."""
    names, static = _of_method(method)
    faults = []
    swept = sweep if isinstance(sweep, Mapping) else {}
    for where, given in (("hyper", hyper or {}), ("sweep", swept)):
        for key, value in given.items():
            word = _OTHER_WORDS.get(key, key)
            if key in names or (key in static and where == "sweep"):
                continue
            if word == "lr":
                faults.append(
                    f"{key} is called local_lr among hyper-parameters; write "
                    f"{where}={{'local_lr': {value!r}}}."
                )
            elif word in _LOCAL and word not in _SWEPT:
                faults.append(
                    f"{key} is a setting of local training, not a hyper-parameter; write "
                    f"local=sartor.Local({word}={value!r})."
                )
            elif key in static and isinstance(value, str | bool):
                faults.append(
                    f"{key} is an option of the method, not a hyper-parameter; write "
                    f"options={{{key!r}: {value!r}}}."
                )
    for key, value in (options or {}).items():
        if key in names and key not in static:
            faults.append(
                f"{key} is a hyper-parameter, not an option; write hyper={{{key!r}: {value!r}}}."
            )
        elif key not in static and _OTHER_WORDS.get(key, key) in _LOCAL:
            word = _OTHER_WORDS.get(key, key)
            faults.append(
                f"{key} is a setting of local training, not an option; write "
                f"local=sartor.Local({word}={value!r})."
            )
    refuse(faults)


_SWEPT = ("momentum", "weight_decay", "clip_norm", "lr_decay")
"""Settings of local training that are hyper-parameters by the same name."""


def _of_method(method: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a method's hyper-parameters and of its options, as far as known."""
    if isinstance(method, str) and method not in methods.KNOWN:
        return (), ()  # another error says so
    hyper = _hyper_of(method)
    return hyper, tuple(methods.static_options(methods.find(method))) if method else ()


@functools.cache
def _hyper_of(method: Any) -> tuple[str, ...]:
    """Return the names of the hyper-parameters that a method has by default."""
    if method is None:
        return ()
    try:
        return tuple(methods.build(method, Task(nn.Linear(1, 1)), Local(), {}).hyper)
    except PFLError:  # one that asks more of its network
        return ()
