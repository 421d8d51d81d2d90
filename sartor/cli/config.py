"""An experiment: the keys of a file and the flags of a command, checked by one set of rules.

A key of the file and a flag of the command line are the same thing: ``eval_every = 5`` is
``--eval-every 5``. Both are declared in ``sartor.training.schema`` and end in :class:`Experiment`;
flags win over the file. Every fault is listed at once; an unknown key names the nearest one.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from sartor.core.errors import ConfigError, did_you_mean
from sartor.data.layouts import DATASETS
from sartor.training.schema import Setting, flag, settings_on

Value = bool | int | float | str | list[float]
"""A hyper-parameter (a number, or one number per client) or an option (a word, true, false)."""

Values = Annotated[list[bool | int | float | str], Field(min_length=1)]
"""What a sweep tries of one hyper-parameter or option."""

LOCAL_HYPER = {
    key: "local_lr" if key == "lr" else key
    for key, setting in settings_on("file", "local").items()
    if setting.kind == "number"
}
"""Keys of local training that give the default of a hyper-parameter, which every method has."""

SUFFIXES = (".toml", ".yaml", ".yml")
"""The endings by which a file of an experiment is known."""


def parse_value(text: Any) -> Any:
    """Read a word of the command line: a number, true or false, numbers with commas, or the word.

    >>> parse_value("0.1"), parse_value("3"), parse_value("true"), parse_value("descent")
    (0.1, 3, True, 'descent')
    >>> parse_value("0.1,0.2")
    [0.1, 0.2]
    """
    if not isinstance(text, str):
        return text
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    if "," in word:
        parts = [parse_value(part) for part in word.split(",")]
        if all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
            return [float(part) for part in parts]
    return word


def _parse_values(values: Any) -> Any:
    return {k: parse_value(v) for k, v in values.items()} if isinstance(values, Mapping) else values


def _parse_lists(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    lists = {k: vs.split(",") if isinstance(vs, str) else vs for k, vs in values.items()}
    return {
        k: [*map(parse_value, vs)] if isinstance(vs, Sequence) else vs for k, vs in lists.items()
    }


def parse_names(value: Any) -> Any:
    """Read names with commas; what is no text stays as it is.

    >>> parse_names("north, south,"), parse_names('"Carcinoma, NOS",age')
    (['north', 'south'], ['Carcinoma, NOS', 'age'])
    """
    if isinstance(value, str):
        names = next(csv.reader([value], skipinitialspace=True), [])
        return [name.strip() for name in names if name.strip()]
    return value


_TYPES: dict[str, Any] = {
    "whole": int,
    "number": float,
    "word": str,
    "switch": bool,
    "path": Path,
    "names": Annotated[tuple[str, ...], BeforeValidator(parse_names)],
    "share": Annotated[int | float | str, BeforeValidator(parse_value)],
    "values": Annotated[dict[str, Value], BeforeValidator(_parse_values)],
    "lists": Annotated[dict[str, Values], BeforeValidator(_parse_lists)],
}
"""The type of a key, by the kind of its setting."""


def _field(setting: Setting) -> tuple[Any, Any]:
    """Return the type and the checks of a key."""
    kind = _TYPES[setting.kind]
    if setting.pattern is not None:
        kind = Annotated[kind, AfterValidator(lambda word: _matched(word, *setting.pattern))]
    if setting.name == "methods":
        return kind, Field(min_length=1)
    bounds = {"ge": setting.low, "gt": setting.above, "le": setting.high, "lt": setting.below}
    given: dict[str, Any] = {sign: bound for sign, bound in bounds.items() if bound is not None}
    return (kind | None if setting.allows_none else kind), Field(setting.default, **given)


def _matched(word: str, pattern: str, wanted: str) -> str:
    if not re.fullmatch(pattern, word):
        raise ValueError(f"should be {wanted}")
    return word


_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
_FIELDS: dict[str, Any] = {name: _field(one) for name, one in settings_on("file").items()}
_Keys: Any = create_model("_Keys", __config__=_CONFIG, **_FIELDS)


class Experiment(_Keys):  # type: ignore[misc]
    """One experiment, checked: what to train, on which federation, how, and where to keep it.

    Attributes are the keys of a file and, with dashes, the flags of ``sartor run`` and
    ``sartor compare``. ``methods`` may be written ``method`` when there is only one.
    """

    @property
    def method(self) -> str:
        """The method, when there is only one."""
        return str(self.methods[0])

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of the runs: ``seed``, ``seed + 1``, ...; each has its own allocation."""
        return tuple(range(self.seed, self.seed + (self.seeds or 1)))

    @property
    def is_single(self) -> bool:
        """Whether this is one run of one method: no sweep, no repeats."""
        return len(self.methods) == 1 and len(self.all_seeds) == 1 and not self.sweep

    def stored(self) -> dict[str, Any]:
        """Return the experiment as plain JSON values, from which :func:`build` makes it again.

        Paths become absolute, so that a run can be resumed from another working folder.
        """
        values: dict[str, Any] = self.model_dump(mode="json")
        for key in ("data_dir", "out"):
            if values[key] is not None:
                values[key] = str(Path(values[key]).absolute())
        if is_folder(self.data):
            values["data"] = str(Path(self.data).absolute())
        return values


def is_folder(data: str) -> bool:
    """Say whether ``data`` means a folder and not the name of a data set.

    >>> is_folder("./hospitals"), is_folder("digits")
    (True, False)
    """
    # A folder does not hide a data set of its name.
    is_path = any(sign in data for sign in "/\\.~")
    return is_path or (Path(data).is_dir() and data not in DATASETS)


def keys() -> list[str]:
    """Return every key that a file may hold, in the order of the help text."""
    return ["method", *settings_on("file")]


def read_file(path: str | Path) -> dict[str, Any]:
    """Read the keys of a TOML or YAML file, not yet checked.

    Raises:
        ConfigError: the file is missing, cannot be parsed, or is not a table of keys.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: an experiment file ends in {', '.join(SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = [p.stem for p in path.parent.glob(f"*{path.suffix}")]
        hint = did_you_mean(path.stem, others) if others else "; check the path"
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise ConfigError(f"{path} is not valid {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, such as rounds = 20; it does not.")
    return {str(key): value for key, value in values.items()}


def parse_pairs(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Split ``name=value`` words of a repeatable flag; each has both, and its name once.

    >>> parse_pairs("--set", ["prox_strength=0.1", "preset=paper"])
    {'prox_strength': '0.1', 'preset': 'paper'}
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ConfigError(
                f"{flag} wants NAME=VALUE, such as {flag} local_lr=0.1, got {pair!r}."
            )
        if name in values:
            raise ConfigError(f"{flag} {name} is given twice; keep one of them.")
        values[name] = value
    return values


def build(
    values: Mapping[str, Any], *, flags: Mapping[str, Any] | None = None, source: str | None = None
) -> Experiment:
    """Check keys and flags and make the experiment; flags win over the keys of the file.

    ``set`` and ``sweep`` are merged name by name, and a name given as a flag in one of the two
    replaces it in the other, so a flag can sweep what the file fixed.

    Args:
        values: keys of a file or of a stored experiment.
        flags: keys given on the command line, by their key names.
        source: the name of the file, for messages.

    Raises:
        ConfigError: with every fault that was found, in one message.
    """
    merged, flags = dict(values), dict(flags or {})
    if {"method", "methods"} & flags.keys():
        merged.pop("method", None), merged.pop("methods", None)
    for table, other in (("set", "sweep"), ("sweep", "set")):
        if table in flags and isinstance(merged.get(table, {}), Mapping):
            new = flags.pop(table)
            merged[table] = {**merged.get(table, {}), **new}
            if isinstance(merged.get(other), Mapping):
                merged[other] = {k: v for k, v in merged[other].items() if k not in new}
    merged.update(flags)

    faults = []
    if "method" in merged:
        if "methods" in merged:
            faults.append("give either method or methods, not both")
        merged["methods"] = merged.pop("method")
    if "methods" not in merged:
        faults.append('no method is named; add method = "fedavg" (see `sartor methods`)')
        merged["methods"] = "?"
    faults += _double(merged)
    try:
        experiment = Experiment.model_validate(merged)
    except ValidationError as error:
        faults += dict.fromkeys(_sentence(e, values) for e in error.errors(include_url=False))
    refuse(faults, f"{source}: " if source else "")
    return experiment


def refuse(faults: Sequence[str], where: str = "") -> None:
    """Raise an error that lists all faults, if there are any."""
    if len(faults) == 1:
        raise ConfigError(f"{where}{faults[0]}")
    if faults:
        listed = "".join(f"\n  - {fault}" for fault in faults)
        raise ConfigError(f"{where}{len(faults)} things to fix:{listed}")


def _double(values: Mapping[str, Any]) -> list[str]:
    """Find the faults that no single field shows: one quantity given in two places."""
    tables = {t: values[t] for t in ("set", "sweep") if isinstance(values.get(t), Mapping)}
    both = [name for name in tables.get("set", {}) if name in tables.get("sweep", {})]
    faults = [f"{name} is both set and swept; keep one of them" for name in both]
    return faults + [
        f"{key} and {table} {name} say the same thing; keep one of them"
        for key, name in LOCAL_HYPER.items()
        for table, entries in tables.items()
        if values.get(key) is not None and name in entries
    ]


def _sentence(error: Any, values: Mapping[str, Any]) -> str:
    """Describe one fault: the key (or flag), what was expected, what was given."""
    first, *rest = (str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {first!r}{did_you_mean(first, keys())}"
    name = first if first in values else flag(first)
    kinds = ("bool", "int", "float", "str", "list[float]")
    place = ".".join([name, *(part for part in rest if part not in kinds)])
    wanted = str(error["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    if rest and rest[-1] in kinds:  # one branch of a union; the others fail as well
        wanted = "should be a number, a word, true or false"
    return f"{place} {wanted}, got {error['input']!r}"
