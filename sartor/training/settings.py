"""What ``fit`` and ``compare`` are given, checked and resolved."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sartor import methods, models
from sartor.compose.weighting import NAME
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError
from sartor.core.hyper import Value
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import (
    Criterion,
    Task,
    all_labels,
    binary_cross_entropy,
    cross_entropy,
    given,
    head_of,
    is_pretrained,
    most_likely,
    never,
    next_tokens,
    squared_error,
    token_cross_entropy,
)
from sartor.data.federation import Federation
from sartor.results.headline import HeadlineMetric, chosen_metric
from sartor.results.measures import probabilities
from sartor.results.scores import Run
from sartor.results.serving import facts_of
from sartor.training import networks, open_ended
from sartor.training.progress import Progress
from sartor.training.schema import settings_on
from sartor.training.simulation import phases_on
from sartor.training.stopping import EarlyStopping

Sweep = Mapping[str, Sequence[Value]] | Sequence[Mapping[str, Value]]
"""Name -> values, of which all combinations are meant; or the combinations themselves."""

Federations = Federation | Sequence[Federation] | Callable[[int], Federation]
"""The data of all seeds, one for each seed, or a function from seed to data."""

LOSSES: dict[str, tuple[Criterion, Criterion]] = {
    "classification": (cross_entropy, most_likely),
    "multilabel": (binary_cross_entropy, all_labels),
    "regression": (squared_error, never),
    "next-token": (token_cross_entropy, next_tokens),
}
"""The loss of every task, and what counts as a correct answer."""


@dataclass(frozen=True)
class Settings:
    """What all passes of one call of ``fit`` share; see ``fit`` for the meaning of each."""

    model: nn.Module | None
    rounds: int
    seeds: tuple[int, ...]
    local: Local
    participation: Participation
    engine: str
    chunk: int | None
    device: torch.device
    dtype: torch.dtype
    compute: torch.dtype | None
    store: str
    eval_every: int
    points: tuple[str, ...]
    checkpoint_every: int
    progress: Progress | None
    callbacks: tuple[Any, ...]
    early_stopping: EarlyStopping | None
    measure: str | None
    open_ended: bool = False  # no number of rounds was given; see sartor/training/open_ended.py

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Check the keywords of ``fit`` by the schema; a ConfigError says what cannot be right."""
        known = settings_on("fit")
        named = [one.name for one in fields(cls) if one.name in known]
        words = {name: known[name].read(given[name]) for name in named}
        if words["rounds"] is None:
            words |= {"rounds": open_ended.CAP, "open_ended": True}
        found = cls(**words)
        if found.open_ended and found.early_stopping is None:
            found = replace(found, early_stopping=open_ended.rule(found.store))
        return replace(found, local=found.local.over(found.rounds))

    def plain(self) -> dict[str, Any]:
        """Return all settings but objects of the caller as JSON-able values."""
        named = ("model", "progress", "callbacks", *(() if self.open_ended else ("open_ended",)))
        return {k: _plain(v) for k, v in vars(self).items() if k not in named}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, Local | EarlyStopping):
        return plain_of(value)
    if isinstance(value, Participation):
        return dict(vars(value))
    return list(value) if isinstance(value, tuple) else value


def plain_of(value: Local | EarlyStopping) -> dict[str, Any]:
    """Return the attributes as JSON-able values; later ones only where they are used.

    So a folder of an earlier release, which does not name them, can be resumed.
    """
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(value).items()}
    return {k: v for k, v in plain.items() if k not in value.later or v != value.later[k]}


def list_runs(
    record: Method,
    options: Mapping[str, Any],
    hyper: Mapping[str, Value],
    sweep: Sweep,
    seeds: Sequence[int],
) -> list[Run]:
    """List the runs: all combinations of the sweep, seeds fastest."""
    defaults = {name: spec.default for name, spec in record.hyper.items()}
    runs = []
    for row in rows_of(sweep):
        chosen = {**defaults, **hyper, **row}
        numbers = {k: _numbers(k, v) for k, v in chosen.items()}
        runs += [Run(seed=seed, hyper=dict(numbers), options=dict(options)) for seed in seeds]
    return runs


def rows_of(sweep: Sweep) -> list[dict[str, Value]]:
    """Return the combinations of a sweep, one dict each.

    >>> rows_of({"a": [1.0, 2.0], "b": [3.0]})
    [{'a': 1.0, 'b': 3.0}, {'a': 2.0, 'b': 3.0}]
    """
    if not isinstance(sweep, Mapping):
        return [dict(row) for row in sweep]
    products = itertools.product(*sweep.values())
    return [dict(zip(sweep, values, strict=True)) for values in products]


def checked_rows(rows: Sequence[Any], static: Mapping[str, Any]) -> list[dict[str, Value]]:
    """Return the rows of a sweep that is given as a list; a ConfigError says what is wrong."""
    if isinstance(rows, str) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(
            "sweep must be a dict, name -> values, or a list of dicts, one per run, such as "
            f"[{{'local_lr': 0.1}}, {{'local_lr': 0.2}}]; got {rows!r}."
        )
    names = [*rows[0]]
    other = next((row for row in rows if row.keys() != rows[0].keys()), None)
    if other is not None:
        raise ConfigError(
            f"the rows of a sweep must name the same hyper-parameters; one has {names}, another "
            f"{[*other]}. Write out the values that a row leaves to the others."
        )
    fixed = sorted({name for row in rows for name in row if name in static})
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} is a static option, and the rows of one sweep share their "
            "options; give it in options=, or as sweep={name: values}."
        )
    return [dict(row) for row in rows]


def _numbers(name: str, value: Any) -> float | list[float]:
    """Read a hyper-parameter: one number, or one per client (a list, an array or a tensor)."""
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(value, dtype=np.float64)
        if array.ndim <= 1:
            return array.tolist()
    raise ConfigError(
        f"{name} must be a number, or one number per client, got {value!r}; names of variants "
        "and other static settings go to options=."
    )


def weights_of(given: str | Sequence[float]) -> str | tuple[float, ...]:
    """Read class weights: "balanced", or numbers, also in a text with commas.

    >>> weights_of("1,3"), weights_of("balanced")
    ((1.0, 3.0), 'balanced')
    """
    if given == "balanced":
        return "balanced"
    try:
        parts = given.split(",") if isinstance(given, str) else list(given)
        return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        raise ConfigError(
            f"class_weights must be 'balanced' or numbers, one for every class, got {given!r}."
        ) from None


def balanced_weights(federation: Federation) -> dict[str, list[float]]:
    """Return the weights of every class at every client, by its own training samples."""
    counts = federation.label_counts("train").double()
    total, seen = counts.sum(1, keepdim=True), (counts > 0).sum(1, keepdim=True)
    own = torch.where(counts > 0, total / (seen * counts.clamp(min=1)), 1.0)
    return {f"{NAME}{c}": column.tolist() for c, column in enumerate(own.T)}


def warn_of_lost_weights(model: nn.Module | None) -> None:
    """Warn if a network brings weights that every seed will draw over."""
    if model is None or is_pretrained(model) is not None:
        return
    if (odd := models.unlike_a_draw(model)) is not None:
        warnings.warn(
            f"The network brings weights that its layers did not draw themselves ({odd}), and they "
            "are not used: every seed draws its own. To start from them, give "
            "sartor.models.pretrained(network); to draw anew without this warning, set "
            "network.pretrained = False.",
            stacklevel=5,
        )


def make_task(
    model: nn.Module | None,
    federation: Federation,
    compute: torch.dtype | None,
    measure: str | None = None,
) -> Task:
    """Wrap the user's network, or the one that fits the data, with the loss that it says.

    ``measure`` is one of the words of ``sartor.results.headline``; None takes that of the task.
    """
    network = networks.given_network(model) or models.default(federation)
    head = head_of(network)
    models.check_module(network, head)
    draws = networks.tried(network, federation)
    if getattr(network, "criterion", None) == "given":
        chosen_metric(None, measure)
        task = Task(network, head, given, never, compute, draws=draws)
    else:
        kind = federation.task
        metric = chosen_metric(kind, measure)
        own = measured_by(metric, kind)
        task = Task(network, head, *LOSSES[kind], compute, kind, own, draws=draws)
    return networks.mapped(task, federation)


def measured_by(
    metric: HeadlineMetric, kind: str
) -> Callable[[np.ndarray, np.ndarray], float] | None:
    """Return what a task records of a client's labels and scores; None if sums are enough."""
    return None if metric.function is None else functools.partial(_measured, metric, kind)


def _measured(metric: HeadlineMetric, kind: str, y: np.ndarray, scores: np.ndarray) -> float:
    """Return the measure of a client's labels and scores; NaN where scores have diverged."""
    if metric.function is None or not np.isfinite(scores).all():
        return math.nan
    return metric.function(y, probabilities(kind, scores), None)


def with_static_parts(local: Local, hyper: Mapping[str, Any], sweep: Sweep) -> Local:
    """Switch momentum, weight decay, clipping or the decay of the rate on where a value is given.

    The value itself is checked, and used, as that of any hyper-parameter.
    """
    changes: dict[str, Any] = {}
    for name in ("momentum", "weight_decay"):
        numbers = [v for v in _given(name, hyper, sweep) if v > 0]
        if numbers and not getattr(local, name):
            changes[name] = min(max(numbers), 1.0) if name == "momentum" else max(numbers)
    if not local.clip_norm and _given("clip_norm", hyper, sweep):
        changes["clip_norm"] = 1.0
    if local.lr_decay == 1.0 and _given("lr_decay", hyper, sweep):
        changes["lr_decay"] = 0.5
    return replace(local, **changes)


def _given(name: str, hyper: Mapping[str, Any], sweep: Sweep) -> list[float]:
    """Return every finite number that is given for a hyper-parameter, those per client too."""
    if isinstance(sweep, Mapping):
        values: Sequence[Any] = sweep.get(name, (hyper[name],) if name in hyper else ())
    else:
        values = [both[name] for row in sweep if name in (both := {**hyper, **row})]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    return [float(v) for v in flat if isinstance(v, (int, float)) and math.isfinite(v)]


HARM_SCORES = {
    "accuracy": "error",
    "exact-match": "error",
    "tokens-right": "error",
    "balanced-accuracy": "error",
    "f1": "error",
    "micro-f1": "error",
    "labels-right": "error",
    "auroc": "auroc",
    "average-precision": "auroc",
    "brier": "brier",
}
"""Measure -> what ``do_no_harm`` compares by; the loss for all others."""


def with_held_out(
    method: str | methods.Factory,
    task: Task,
    local: Local,
    options: dict[str, Any],
    federations: Sequence[Federation],
    measure: str | None = None,
) -> dict[str, Any]:
    """Say what decides under ``do_no_harm``, where that is left open: which score, which samples.

    The score is the one that is nearest to the measure. The samples are the validation data, if
    every client of every federation has some and the method does not use them itself; else a part
    of the training data.
    """
    if not options.get("do_no_harm"):
        return options
    if measure in HARM_SCORES:
        options = {"harm_score": HARM_SCORES[measure], **options}
    if options.get("harm_on", "auto") != "auto":
        return options
    own = {k: v for k, v in options.items() if k != "do_no_harm" and not k.startswith("harm_")}
    used = phases_on("val", methods.build(method, task, local, own))
    given = all(bool((federation.val.sizes > 0).all()) for federation in federations)
    return {**options, "harm_on": "validation" if given and not used else "holdout"}


def federations_of(federation: Federations, settings: Settings) -> dict[int, Federation]:
    """Return the federation of every seed, with validation samples where they decide the end."""
    found = {seed: federation_of(federation, settings.seeds, seed) for seed in settings.seeds}
    if not settings.open_ended:
        return found
    known = {id(one): open_ended.with_validation(one) for one in found.values()}
    return {seed: known[id(one)] for seed, one in found.items()}


def federation_of(federation: Federations, seeds: Sequence[int], seed: int) -> Federation:
    """Return the federation of a seed; a ConfigError says that there is none for it."""
    if isinstance(federation, Federation):
        return federation
    if callable(federation):
        return _is_federation(federation(seed), f"the function, for seed {seed},")
    if not isinstance(federation, list | tuple):
        return _is_federation(federation, "federation")
    for number, one in enumerate(federation):
        _is_federation(one, f"federation[{number}]")
    if len(federation) != len(seeds):
        raise ConfigError(
            f"{len(federation)} federations for {len(seeds)} seeds; give one federation, one per "
            "seed, or a function from seed to federation."
        )
    return federation[list(seeds).index(seed)]


def _is_federation(found: Any, what: str) -> Federation:
    if isinstance(found, Federation):
        return found
    raise ConfigError(
        f"{what} should be a sartor.Federation, got {type(found).__name__}. Make one with "
        "Federation.from_arrays(x, y, client=...), from_dataframe(df, client=..., label=...), "
        "from_folder(path) or from_dataset('digits')."
    )


def remembered(federation: Federations) -> Federations:
    """Make each seed's federation once, so that all methods of a comparison share it."""
    if isinstance(federation, Federation) or not callable(federation):
        return federation
    return functools.cache(federation)


def resolved(
    method: str | methods.Factory,
    record: Method,
    settings: Settings,
    local: Local,
    task: Task,
    options: Mapping[str, Any],
    hyper: Mapping[str, Any],
    sweep: Sweep,
    federations: dict[int, Federation],
) -> dict[str, Any]:
    """Return the resolved settings as JSON-able values."""
    static = methods.static_options(methods.find(method))
    swept = {k: list(v) for k, v in sweep.items()} if isinstance(sweep, Mapping) else rows_of(sweep)
    return {
        "method": record.name,
        "options": {k: v[0] for k, v in static.items()} | dict(options),
        "hyper": {k: spec.default for k, spec in record.hyper.items()} | dict(hyper),
        "sweep": swept,
        **settings.plain(),
        "local": plain_of(local),
        "model": {
            "class": type(task.module).__name__,
            "head": task.head,
            "parameters": sum(p.numel() for p in task.module.parameters()),
            **task.given_weights(),
        },
        "task": task.measured_as,
        "rebuild": facts_of(method, task, record.use.predict is not None, federations),
        "data": next(iter(federations.values())).describe(),
        "fingerprints": {str(seed): fed.fingerprint() for seed, fed in federations.items()},
    }
