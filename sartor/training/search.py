"""Hyper-parameter search in which trials train as lanes of one pass.

Optuna proposes a batch of trials, they train together as the rows of one sweep, and it receives
what each reached on the validation data; then comes the next batch. The test data take no part in
the choice: they are scored, as in every run, and only the result of the best trial shows them.

A row of the search is the run that ``fit`` would make with its values. Values of static options are
searched too; the trials of a batch that share them train together.
"""

from __future__ import annotations

import html
import importlib
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sartor import methods
from sartor.core.errors import ConfigError, DivergedError, MissingExtraError, refuse
from sartor.results.headline import HeadlineMetric
from sartor.results.result import Result
from sartor.results.tables import Table, format_cell
from sartor.training.fit import fit
from sartor.training.open_ended import FIXED
from sartor.training.schema import MEASURES, parse_choice, parse_seeds, parse_whole
from sartor.training.settings import Federations, federation_of, remembered
from sartor.training.stopping import watched_metric

Space = Mapping[str, Sequence[Any]]
"""Name -> (low, high), (low, high, "log"), (low, high, "int"), or a list of choices."""


@dataclass
class Search:
    """What a search found.

    Attributes:
        method: the name of the method.
        measure: what it went by on validation data: "loss", "accuracy", "auroc", ...
        best: the values of the best trial.
        value: what they reached: the mean over seeds, after the last round.
        result: the Result of the best trial, one run per seed.
        table: one row per trial: its values, and what it reached; None where it diverged.
        study: Optuna's study, for its own tools.
    """

    method: str
    measure: str
    best: dict[str, Any]
    value: float
    result: Result
    table: Table
    study: Any = field(repr=False)

    def __repr__(self) -> str:
        """Return the method, the best values and what they reached."""
        words = ", ".join(f"{name}={format_cell(value)}" for name, value in self.best.items())
        return (
            f"<Search {self.method}: {words}; validation {self.measure} {self.value:.4g}, "
            f"{len(self.table)} trials>"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{self.table._repr_html_()}"


def search(
    method: str | methods.Factory,
    federation: Federations,
    space: Space,
    *,
    trials: int = 40,
    lanes: int = 10,
    measure: str | None = None,
    seeds: Sequence[int] | int = (0,),
    hyper: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    study: Any = None,
    sampler_seed: int = 0,
    **settings: Any,
) -> Search:
    """Search the hyper-parameters that do best on validation data.

    Args:
        method: a name, or a factory; see ``fit``.
        federation: the data, with validation samples.
        space: name -> ``(low, high)``, ``(low, high, "log")``, ``(low, high, "int")``, or a list of
            choices. Names are hyper-parameters or static options.
        trials: how many values to try.
        lanes: trials a batch; those of a batch are chosen without knowing of one another.
        measure: "loss" (smaller is better), "accuracy", "auroc", or any that ``fit`` takes; the
            loss if None.
        seeds: every trial trains with each; its value is the mean.
        hyper: values that are not searched.
        options: static options that are not searched.
        study: an Optuna study to continue, or any object with ``ask`` and ``tell``; a new one
            with a TPE sampler if None. Its direction must fit the measure.
        sampler_seed: the seed of the new study's sampler.
        settings: everything else that ``fit`` takes, such as rounds (20), local or early_stopping.

    Returns:
        a Search: the best values, a table of all trials, the best trial's Result, the study.

    Raises:
        ConfigError: for what cannot be right, or if every trial diverged.
        MissingExtraError: Optuna is not installed, and no study is given.
    """
    if settings.get("rounds") is None:
        settings["rounds"] = FIXED
    trials, lanes = parse_whole("trials", trials), parse_whole("lanes", lanes)
    measure = measure or "loss"
    parse_choice("measure", measure, MEASURES)
    for name in ("sweep", "out", "resume"):
        if name in settings:
            raise ConfigError(f"search takes no {name}; train the best values with fit for that.")
    _check_space(space)
    chosen, federations = parse_seeds(seeds), remembered(federation)
    gives_loss = getattr(settings.get("model"), "criterion", None) == "given"
    kind = None if gives_loss else federation_of(federations, chosen, chosen[0]).task
    metric = watched_metric(measure, kind, measure)
    if measure != "accuracy":
        settings["measure"] = measure
    for seed in chosen:
        of_seed = federation_of(federations, chosen, seed)
        if not len(of_seed.val.rows):
            raise ConfigError(
                "A search is judged on validation data, but no client has any; hold some out, for "
                "example with val=0.2 when the federation is made."
            )
    study = study if study is not None else _new_study(metric, sampler_seed)
    static = methods.static_options(methods.find(method))
    sign = -metric.sign
    rows: list[list[Any]] = []
    best: tuple[float, dict[str, Any], Result] | None = None
    while len(rows) < trials:
        asked = [study.ask() for _ in range(min(lanes, trials - len(rows)))]
        values = [{k: _suggest(trial, k, v) for k, v in space.items()} for trial in asked]
        reached: list[float] = [math.nan] * len(asked)
        rest = [{k: v for k, v in one.items() if k not in static} for one in values]
        for members in _together(values, static):
            passed = {k: v for k, v in values[members[0]].items() if k in static}
            try:
                result = fit(
                    method,
                    federations,
                    seeds=chosen,
                    hyper=hyper,
                    options={**(options or {}), **passed},
                    sweep=[rest[m] for m in members],
                    **settings,
                )
            except DivergedError:  # the only run of its pass
                continue
            for place, m in enumerate(members):
                runs = range(place * len(chosen), (place + 1) * len(chosen))
                reached[m] = _validated(result, runs)
                # Comparisons with NaN are false: a trial that diverged is never the best.
                if sign * reached[m] < (math.inf if best is None else sign * best[0]):
                    best = (reached[m], values[m], result.select(list(runs)))
        for trial, one, value in zip(asked, values, reached, strict=True):
            _report(study, trial, value)
            rows.append([len(rows), *one.values(), None if math.isnan(value) else value])
    if best is None:
        raise ConfigError("Every trial diverged; search smaller rates (local_lr).")
    value, found, result = best
    formats = {f"validation {measure}": "percent" if metric.is_share else ""}
    title = f"{result.method}: {trials} trials"
    table = Table(["trial", *space, f"validation {measure}"], rows, formats=formats, title=title)
    return Search(result.method, measure, found, value, result, table, study)


def _check_space(space: Space) -> None:
    faults = []
    for name, given in space.items():
        if isinstance(given, list):
            faults += [] if given else [f"space[{name!r}] is an empty list of choices."]
            continue
        parts = given if isinstance(given, tuple) and len(given) in (2, 3) else (None, None)
        low, high, kind = (*parts, None)[:3]
        real = isinstance(low, int | float) and isinstance(high, int | float)
        if not real or kind not in (None, "log", "int") or not low < high:
            faults.append(
                f"space[{name!r}] must be (low, high), (low, high, 'log'), (low, high, 'int') with "
                f"low < high, or a list of choices; got {given!r}."
            )
        elif kind == "log" and low <= 0:
            faults.append(f"space[{name!r}] is on a log scale, so low must be > 0, got {low!r}.")
    if not space:
        faults.append("space is empty; name at least one hyper-parameter to search.")
    refuse(faults)


def _suggest(trial: Any, name: str, given: Sequence[Any]) -> Any:
    if isinstance(given, list):
        return trial.suggest_categorical(name, given)
    if len(given) == 3 and given[2] == "int":
        return trial.suggest_int(name, given[0], given[1])
    return trial.suggest_float(name, float(given[0]), float(given[1]), log=len(given) == 3)


def _together(values: list[dict[str, Any]], static: Mapping[str, Any]) -> list[list[int]]:
    """Group the trials that share their static options, in order."""
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(values):
        key = repr({k: v for k, v in one.items() if k in static})
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _validated(result: Result, runs: Sequence[int]) -> float:
    """Return the mean over runs of the last value on validation data; NaN if one diverged."""
    if any(result.diverged[run] is not None for run in runs):
        return math.nan
    return float(np.mean([result.measure_curve(split="val", run=run)[1][-1] for run in runs]))


def _report(study: Any, trial: Any, value: float) -> None:
    if math.isnan(value):
        optuna = sys.modules.get("optuna")  # it is there if the study is Optuna's
        study.tell(trial, state="FAIL" if optuna is None else optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, value)


def _new_study(metric: HeadlineMetric, seed: int) -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise MissingExtraError(
            "A search needs Optuna, which is not installed; run pip install 'sartor[search]', or "
            "pass a study of your own with ask() and tell()."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Trials of one batch do not know of one another: the liar keeps them apart.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    direction = "minimize" if metric.sign < 0 else "maximize"
    return optuna.create_study(direction=direction, sampler=sampler)
