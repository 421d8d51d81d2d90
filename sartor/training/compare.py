"""Train several methods on equal footing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sartor import methods
from sartor.core.errors import ConfigError, DivergedError, refuse
from sartor.core.hyper import Value
from sartor.engines.shard import processes
from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.runs import ComparisonFolder
from sartor.training.auto import without_choices
from sartor.training.equal import check, lengths
from sartor.training.fit import begin_folder, fit, save_or_warn
from sartor.training.misplaced import places
from sartor.training.settings import Federations, remembered

BASELINES = ("local", "fedavg", "fedavg-ft")
_SHARED = ("data", "rounds", "seeds", "local", "participation", "model", "device", "dtype")


def compare(
    names: str | Sequence[str],
    federation: Federations,
    *,
    baselines: bool = True,
    hyper: Mapping[str, Mapping[str, Value]] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    do_no_harm: bool = False,
    equal: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> Comparison:
    """Train several methods on the same allocations, seeds and settings.

    Args:
        names: methods, in a list or with commas; "all", or "all-regularised" and the like, stand
            for a family.
        federation: see ``fit``.
        baselines: put LocalTrain, FedAvg and FedAvg + fine-tuning beside them.
        hyper: per method, values of hyper-parameters.
        options: per method, static options.
        do_no_harm: see ``fit``; for all methods but LocalTrain, which they are measured from.
        equal: "gradients" lets every method have the gradient evaluations that the dearest has in
            ``rounds`` rounds, by training longer. See ``sartor.training.equal``.
        out: a folder with one run folder per method.
        resume: continue where an earlier call with the same ``out`` stopped.
        settings: everything else that ``fit`` takes.

    Returns:
        a Comparison: a table, and paired differences with their intervals.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    wanted = methods.expand([*(BASELINES if baselines else ()), *listed])
    for name in wanted:
        methods.find(name)
    known = inspect.signature(fit).parameters
    strange = {key: value for key, value in settings.items() if key not in known}
    refuse(places(strange, wanted[-1], known, "compare"))
    federations = remembered(federation)
    shared: dict[str, Any] = {} if equal is None else {"equal": equal}
    if equal is not None:
        check(equal, settings.get("rounds"), settings.get("early_stopping") is not None)
    folder = None
    if out is not None:
        config = {"methods": wanted, "rounds": settings.get("rounds"), **shared}
        folder, _ = begin_folder(ComparisonFolder, out, config, resume)

    def train(name: str, more: dict[str, Any]) -> Result:
        own = {**(settings if name != "auto" else without_choices(settings)), **more}
        if callbacks := (*settings.get("callbacks", ()), *more.get("callbacks", ())):
            own["callbacks"] = callbacks if more.get("callbacks") != () else ()
        return fit(
            name,
            federations,
            hyper=(hyper or {}).get(name),
            options=(options or {}).get(name),
            do_no_harm=do_no_harm and name not in ("local", "auto"),
            **own,
        )

    long: dict[str, dict[str, Any]] = {}
    if equal is not None:
        long = lengths(wanted, int(settings["rounds"]), train)
    results = {}
    for name in wanted:
        try:
            path = None if folder is None else folder.run_path(name)
            results[name] = train(name, {"out": path, "resume": resume, **long.get(name, {})})
        except DivergedError as error:
            warnings.warn(f"{name} is left out of the comparison: {error}", stacklevel=2)
    if not results:
        raise ConfigError("Every method diverged; try a smaller local_lr.")
    first = next(iter(results.values())).config
    shared |= {k: v for k, v in first.items() if k in _SHARED}
    if equal is not None:
        shared["rounds"] = settings["rounds"]
    comparison = Comparison(results, config={**shared, "methods": wanted})
    if folder is not None and processes.is_first():
        save_or_warn(lambda: folder.write_comparison(comparison), folder.path)
    return comparison
