"""From a checked experiment to the arguments of the library: names, options, data, network."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sartor import models
from sartor.cli.config import LOCAL_HYPER, Experiment, is_folder, refuse
from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.data.tables import is_table, read_table
from sartor.methods import KNOWN
from sartor.methods import build as build_method
from sartor.methods.options import OF_NETWORK
from sartor.training.schema import flag, settings_on
from sartor.training.settings import weights_of
from sartor.training.stopping import EarlyStopping

_KINDS = {
    "a data set": ("dataset", "is divided by its partition"),
    "a folder": ("folder", "has its own clients"),
    "a table": ("table", "has its own clients"),
}
"""What data may be: its word in the schema, and why keys of the others do not go with it."""


def check_names(experiment: Experiment) -> None:
    """Refuse methods, hyper-parameters and options that do not exist, all at once."""
    faults = [
        f"unknown method {name!r}{did_you_mean(name, KNOWN)}"
        for name in experiment.methods
        if name not in KNOWN
    ]
    if experiment.methods == ("auto",):
        refuse(_not_for_auto(experiment))
    known: dict[str, set[str]] = {}
    for method in experiment.methods:
        if method in KNOWN:
            try:
                known[method] = names_of(experiment, method)
            except ConfigError as error:
                faults.append(str(error))
    for table in ("set", "sweep"):
        for name in getattr(experiment, table):
            owner, dot, short = name.rpartition(".")
            if dot and owner not in experiment.methods:
                faults.append(f"{table} {name}: {owner!r} is not among the methods of this run")
                continue
            chosen = [owner] if dot else [*experiment.methods]
            if not all(method in known for method in chosen):
                continue  # already reported: the method, or its options, cannot be right
            names = set().union(*(known[method] for method in chosen))
            if short not in names:
                faults.append(f"{' and '.join(chosen)}: no {short!r}{did_you_mean(short, names)}")
    refuse(faults)


def _not_for_auto(experiment: Experiment) -> list[str]:
    """Find what auto chooses itself."""
    tables = [
        f"--{table} {name}" for table in ("set", "sweep") for name in getattr(experiment, table)
    ]
    flags = [*_given(experiment, "local"), *_given(experiment, "stopping")]
    named = ("do_no_harm", "finetune_steps", "class_weights")
    flags += [k for k in named if getattr(experiment, k)]
    if words := [*map(flag, flags), *tables]:
        return [
            f"auto chooses rates, rounds and methods itself, so it takes no {', '.join(words)}; "
            "leave that out, or name a method to set it for (see `sartor methods`)"
        ]
    return []


def names_of(experiment: Experiment, method: str) -> set[str]:
    """Return the names of a method's options and of the hyper-parameters that they bring."""
    from torch import nn

    if method == "auto":
        return set()
    options = KNOWN[method].options
    here = options.keys() - OF_NETWORK  # the network below replaces one that is not made yet
    fixed = {k: v for k, v in _chosen(experiment, method).items() if k in here}
    swept = {k: v for k, v in _mine(experiment.sweep, method).items() if k in here}
    names = {*options, *LOCAL_HYPER.values()}
    for values in itertools.product(*swept.values()):
        chosen = fixed | dict(zip(swept, values, strict=True))
        names |= {*build_method(method, Task(nn.Linear(1, 1)), Local(), chosen).hyper}
    return names


def _chosen(experiment: Experiment, method: str) -> dict[str, Any]:
    """Return what ``set`` and the flags for it hold for one method."""
    steps = experiment.finetune_steps
    flags: dict[str, Any] = {} if steps is None else {"finetune_steps": steps}
    flags |= {"do_no_harm": True} if experiment.do_no_harm else {}
    weights = experiment.class_weights
    shared = {} if weights is None else {"class_weights": weights_of(weights)}
    return shared | ({} if method == "local" else flags) | _mine(experiment.set, method)


def _mine(table: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the part of a table for one method; ``METHOD.NAME`` wins over a plain name."""
    plain = {name: value for name, value in table.items() if "." not in name}
    prefix = f"{method}."
    return plain | {k.removeprefix(prefix): v for k, v in table.items() if k.startswith(prefix)}


def settings_of(experiment: Experiment, method: str) -> dict[str, dict[str, Any]]:
    """Split ``set`` and ``sweep`` into what ``fit`` takes: hyper, options and sweep of one method.

    A plain name goes to every method that has it; ``METHOD.NAME`` to that one only.
    """
    known, options = names_of(experiment, method), KNOWN[method].options
    values = {k: v for k, v in _chosen(experiment, method).items() if k in known}
    return {
        "hyper": {k: v for k, v in values.items() if k not in options},
        "options": {k: v for k, v in values.items() if k in options},
        "sweep": {k: v for k, v in _mine(experiment.sweep, method).items() if k in known},
    }


def training_of(experiment: Experiment, method: str, federations: Any) -> dict[str, Any]:
    """Return what ``fit`` and ``search`` take alike: network, seeds, local training, engine."""
    settings = settings_of(experiment, method)
    chosen = method == "auto"  # by itself
    # do_no_harm is among the options, where names_of sees the hyper-parameters that it brings.
    same = settings_on("fit", "file").keys() - {"do_no_harm", "class_weights"}
    return {
        **{name: getattr(experiment, name) for name in same},
        "model": model_of(experiment, federations(experiment.seed)),
        "seeds": experiment.all_seeds,
        "hyper": settings["hyper"],
        "options": settings["options"],
        "local": None if chosen else local_of(experiment),
        "early_stopping": None if chosen else stopping_of(experiment),
    }


def local_of(experiment: Experiment) -> Local:
    """Return how a client trains in a round; what is not given keeps the library's default."""
    return Local(**_given(experiment, "local"))


def stopping_of(experiment: Experiment) -> EarlyStopping | None:
    """Return when to stop before the rounds are over, if the experiment says so."""
    if experiment.patience is None:
        if given := _given(experiment, "stopping"):
            words = " and ".join(map(flag, given))
            raise ConfigError(f"{words} needs --patience, the evaluations to wait; add it.")
        return None
    return EarlyStopping(experiment.patience, experiment.min_delta, restore=experiment.restore_best)


def federation_of(experiment: Experiment) -> Callable[[int], Federation]:
    """Return the maker of federations: the seed of a run is the seed of its allocation."""
    kind = kind_of(experiment)
    word, rule = _KINDS[kind]
    others = {key for other, _ in _KINDS.values() for key in _given(experiment, other)}
    if kind == "a folder" and experiment.client is not None:
        raise ConfigError(
            f"{experiment.data} is a folder, in which every file (or folder of images) is one "
            "client, with the client's name; leave out --client, or name one file of it to read "
            "that as a table with a column for the client."
        )
    if given := sorted(others - settings_on("file", word).keys()):
        raise ConfigError(
            f"{experiment.data} is {kind}, which {rule}; leave out {' and '.join(given)}."
        )

    @functools.cache
    def make(seed: int) -> Federation:
        maker, data, given = _source(experiment)
        lost = [key for key in ("client", "label") if key not in given]
        if lost and kind == "a table":
            columns, flags = ", ".join(read_table(Path(data))), " and ".join(map(flag, lost))
            raise ConfigError(f"{data} is a table; name a column with {flags} (it has: {columns}).")
        made: Federation = getattr(Federation, maker)(data, seed=seed, **given)
        return made

    return make


def federation_code(experiment: Experiment) -> str:
    """Return the Python call that makes the federation of the experiment's first seed."""
    maker, data, given = _source(experiment)
    given |= {"seed": experiment.seed}
    values = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    words = ", ".join([repr(str(data)), *(f"{key}={value!r}" for key, value in values.items())])
    return f"sartor.Federation.{maker}({words})"


def _source(experiment: Experiment) -> tuple[str, str | Path, dict[str, Any]]:
    """Return the maker of the federation, what it is made of, and its other arguments."""
    kind = kind_of(experiment)
    given = _given(experiment, _KINDS[kind][0])
    if kind == "a data set":
        return "from_dataset", experiment.data, given
    if kind == "a table" and "label" in given:
        given["label"] = label_of(given["label"])
    maker = "from_file" if kind == "a table" else "from_folder"
    return maker, Path(experiment.data).expanduser(), given


def given_flags(experiment: Experiment, *left_out: str) -> list[str]:
    """Return the words of the command line that give the settings of an advice their values."""
    found = []
    for key, value in _given(experiment, "advise").items():
        if key not in left_out:
            word = ",".join(value) if isinstance(value, tuple) else str(value)
            found += [flag(key), *([] if value is True else [word])]
    return found


def kind_of(experiment: Experiment) -> str:
    """Return "a data set", "a folder" (a file per client) or "a table" (one file for all)."""
    if not is_folder(experiment.data):
        return "a data set"
    return "a table" if is_table(experiment.data) else "a folder"


def label_of(words: str) -> str | list[str]:
    """Read the column of the label, or several with commas."""
    names = [name.strip() for name in words.split(",")]
    return names[0] if len(names) == 1 else names


def _given(experiment: Experiment, surface: str) -> dict[str, Any]:
    """Return the settings on a surface that differ from their defaults."""
    known = settings_on("file", surface)
    return {k: v for k, s in known.items() if (v := getattr(experiment, k)) != s.default}


def model_of(experiment: Experiment, federation: Federation) -> Any:
    """Return the network that the experiment names, or None for the one that fits the data."""
    if experiment.model is None:
        return None
    if experiment.model not in models.MODELS:
        hint = did_you_mean(experiment.model, models.MODELS)
        raise ConfigError(f"unknown model {experiment.model!r}{hint}")
    return models.MODELS[experiment.model](federation)
