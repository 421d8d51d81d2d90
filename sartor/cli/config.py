"""What an experiment is, as one checked schema for files, flags and run folders.

A key of the file and a flag of the command line are the same thing: ``eval_every = 5`` is
``--eval-every 5``. Both end in :class:`Experiment`, so they are checked by the same rules, and
flags win over the file. Every fault is listed at once; an unknown key names the nearest one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sartor.core.errors import ConfigError, did_you_mean

Value = bool | int | float | str | list[float]
"""A hyper-parameter (a number, or one number per client) or an option (a word, true, false)."""

Values = Annotated[list[bool | int | float | str], Field(min_length=1)]
"""What a sweep tries of one hyper-parameter or option."""

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
    return {
        k: [parse_value(v) for v in (vs.split(",") if isinstance(vs, str) else vs)]
        if isinstance(vs, str | Sequence)
        else vs
        for k, vs in values.items()
    }


def _parse_names(value: Any) -> Any:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def _key(
    default: Any, text: str, group: str, show: str, *, everyday: bool = False, **checks: Any
) -> Any:
    """A field with what the command line shows of it.

    Args:
        default: its value where it is not given.
        text: its help.
        group: under which heading of the help it stands.
        show: the placeholder of its value.
        everyday: whether ``--help`` shows its flag; ``--help-all`` shows them all.
        checks: what the value must satisfy.
    """
    extra: dict[str, Any] = {"group": group, "show": show, "everyday": everyday}
    return Field(default, description=text, json_schema_extra=extra, **checks)


_DATA, _TRAINING, _SWITCHES, _ENGINE, _OUTPUT = ("Data", "Training", "Switches", "Engine", "Output")
_FIRST = "Options"
"""The heading of what belongs to the command itself, such as ``--json``."""


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ValueError("should be auto, cpu, mps, cuda or cuda:N")
    return name


class Experiment(BaseModel):
    """One experiment, checked: what to train, on which federation, how, and where to leave it.

    Attributes are the keys of a file and, with dashes, the flags of ``sartor run`` and
    ``sartor compare``. ``methods`` may be written ``method`` when there is only one.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    methods: Annotated[tuple[str, ...], BeforeValidator(_parse_names)] = Field(min_length=1)

    data: str = _key("digits", "A data set, a folder, or a CSV file.", _DATA, "X", everyday=True)
    client: str | None = _key(
        None, "CSV: the column that names the client.", _DATA, "NAME", everyday=True
    )
    clients: int | None = _key(
        None, "Number of clients of a data set.", _DATA, "N", ge=1, everyday=True
    )
    partition: str | None = _key(
        None, "dirichlet:0.1, pathological:2, classes:2, iid, ...", _DATA, "KIND", everyday=True
    )
    protocol: str | None = _key(None, "Rules of the partition: authors, pfllib.", _DATA, "NAME")
    samples: int | None = _key(None, "Training samples of a data set, in all.", _DATA, "N", ge=1)
    min_train: int | None = _key(None, "Least samples of a client; see data.", _DATA, "N", ge=1)
    scale: str | None = _key(None, "Of images: symmetric, unit, standard, pixel.", _DATA, "NAME")
    val: float = _key(0.0, "Share held out for validation.", _DATA, "P", ge=0, lt=1, everyday=True)
    test: float = _key(0.25, "Folders: share held out for testing.", _DATA, "P", gt=0, lt=1)
    label: str | None = _key(
        None, "Own data: the column of the label; A,B: several.", _DATA, "NAME", everyday=True
    )
    task: str | None = _key(
        None, "CSV: classification, multilabel, regression.", _DATA, "KIND", everyday=True
    )
    drop: Annotated[tuple[str, ...], BeforeValidator(_parse_names)] = _key(
        (), "CSV: columns to leave out.", _DATA, "A,B"
    )
    missing: str = _key("error", "CSV: empty cells: error, or mean.", _DATA, "HOW")
    standardise: bool = _key(
        False, "Folders: features of mean 0 and deviation 1; texts are categories.", _SWITCHES, ""
    )
    image_size: int | None = _key(
        None, "Folders of images: height and width.", _DATA, "PIXELS", ge=1
    )
    data_dir: Path | None = _key(None, "Where data sets lie (else SARTOR_DATA).", _DATA, "FOLDER")

    model: str | None = _key(
        None,
        "mclr, dnn, cnn2, lenet5, lstm, ...; else one that fits.",
        _TRAINING,
        "NAME",
        everyday=True,
    )
    rounds: int = _key(20, "Communication rounds.", _TRAINING, "T", ge=1, everyday=True)
    seed: int = _key(
        0, "First seed: allocation, start, batches.", _TRAINING, "S", ge=0, everyday=True
    )
    seeds: int = _key(
        1, "Repeat with seeds S, S+1, ..., S+K-1.", _TRAINING, "K", ge=1, everyday=True
    )
    set: Annotated[dict[str, Value], BeforeValidator(_parse_values)] = _key(
        {}, "Hyper-parameter or option; repeatable.", _TRAINING, "NAME=VALUE", everyday=True
    )
    sweep: Annotated[dict[str, Values], BeforeValidator(_parse_lists)] = _key(
        {}, "All values in one pass; repeatable.", _TRAINING, "NAME=V1,V2", everyday=True
    )
    lr: float | None = _key(
        None, "Local learning rate (local_lr).", _TRAINING, "X", gt=0, everyday=True
    )
    epochs: int = _key(1, "Local epochs a round.", _TRAINING, "E", ge=1, everyday=True)
    steps: int | None = _key(None, "Local steps a round, in place of epochs.", _TRAINING, "K", ge=1)
    batch: int | None = _key(32, "Local batch size.", _TRAINING, "B", ge=1, everyday=True)
    momentum: float | None = _key(None, "Momentum of local SGD.", _TRAINING, "X", ge=0, lt=1)
    weight_decay: float | None = _key(None, "Weight decay of local SGD.", _TRAINING, "X", ge=0)
    clip_norm: float | None = _key(None, "Longest gradient of local SGD.", _TRAINING, "X", ge=0)
    lr_decay: float | None = _key(
        None, "What is left of lr after a round.", _TRAINING, "X", gt=0, le=1
    )
    lr_schedule: str | None = _key(
        None, "Of lr: cosine, step:30:0.1, warmup:5+cosine.", _TRAINING, "KIND"
    )
    keep_optimiser: bool = _key(False, "Keep momentum between rounds.", _SWITCHES, "")
    drop_last: bool = _key(False, "Leave out a last, smaller batch.", _SWITCHES, "")
    finetune_steps: int | None = _key(
        None, "Steps of fine-tuning before use; not for local.", _TRAINING, "K", ge=0
    )
    participation: Annotated[int | float | str, BeforeValidator(parse_value)] = _key(
        1.0, "Per round: 0.5, 10, at_least:0.6.", _TRAINING, "P", everyday=True
    )
    do_no_harm: bool = _key(
        False,
        "Each client's best of alone, global, own; not for local.",
        _SWITCHES,
        "",
        everyday=True,
    )

    patience: int | None = _key(
        None, "Evaluations without a better validation loss; then stop.", _TRAINING, "N", ge=1
    )
    min_delta: float = _key(0.0, "What counts as better, with patience.", _TRAINING, "X", ge=0)
    restore_best: bool = _key(
        False, "End with the round best on validation data; with patience.", _SWITCHES, ""
    )

    engine: str = _key("auto", "auto, vectorised, sequential.", _ENGINE, "NAME")
    device: Annotated[str, AfterValidator(_device)] = _key(
        "auto", "auto, cpu, cuda, cuda:1.", _ENGINE, "NAME"
    )
    dtype: str = _key("float32", "float32, float64.", _ENGINE, "NAME")
    compute: str | None = _key(None, "Precision inside a step: bfloat16.", _ENGINE, "NAME")
    chunk: int | None = _key(None, "Clients at once; else measured.", _ENGINE, "N", ge=1)
    store: str = _key("memory", "Where resting clients live: memory, mapped.", _ENGINE, "KIND")

    points: Annotated[tuple[str, ...], BeforeValidator(_parse_names)] = _key(
        ("pre", "post"), "Models to score: pre, post, global.", _OUTPUT, "A,B"
    )
    eval_every: int = _key(1, "Rounds between evaluations.", _OUTPUT, "N", ge=1)
    checkpoint_every: int = _key(10, "Rounds between checkpoints.", _OUTPUT, "N", ge=1)
    track: Annotated[tuple[str, ...], BeforeValidator(_parse_names)] = _key(
        (), "tensorboard:FOLDER, mlflow:FILE, wandb:NAME, trackio:NAME.", _OUTPUT, "WHERE"
    )
    out: Path | None = _key(
        None, "Run folder; else runs/TIME-NAME.", _FIRST, "FOLDER", everyday=True
    )

    @property
    def method(self) -> str:
        """The method, when there is only one."""
        return self.methods[0]

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of the runs: ``seed``, ``seed + 1``, ...; each has its own allocation."""
        return tuple(range(self.seed, self.seed + self.seeds))

    @property
    def is_single(self) -> bool:
        """Whether this is one run of one method: no sweep, no repeats."""
        return len(self.methods) == 1 and self.seeds == 1 and not self.sweep

    def stored(self) -> dict[str, Any]:
        """Return the experiment as plain JSON values, from which :func:`build` makes it again.

        Paths become absolute, so that a run can be resumed from another working folder.
        """
        values = self.model_dump(mode="json")
        for key in ("data_dir", "out"):
            if values[key] is not None:
                values[key] = str(Path(values[key]).absolute())
        if is_folder(self.data):
            values["data"] = str(Path(self.data).absolute())
        return values


def is_folder(data: str) -> bool:
    """Whether ``data`` means a folder and not the name of a data set.

    >>> is_folder("./hospitals"), is_folder("digits")
    (True, False)
    """
    if any(sign in data for sign in "/\\.~"):
        return True
    if not Path(data).is_dir():
        return False
    from sartor.data.layouts import DATASETS  # a data set is not hidden by a folder of its name

    return data not in DATASETS


def keys() -> list[str]:
    """Return every key that a file may hold, in the order of the help text."""
    return ["method", *Experiment.model_fields]


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
    """Split ``name=value`` words of a repeatable flag.

    >>> parse_pairs("--set", ["prox_strength=0.1", "preset=paper"])
    {'prox_strength': '0.1', 'preset': 'paper'}

    Raises:
        ConfigError: a word without a name, a value or an equals sign, or a name given twice.
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
    if faults:
        where = f"{source}: " if source else ""
        if len(faults) == 1:
            raise ConfigError(f"{where}{faults[0]}")
        listed = "".join(f"\n  - {fault}" for fault in faults)
        raise ConfigError(f"{where}{len(faults)} things to mend:{listed}")
    return experiment


def _double(values: Mapping[str, Any]) -> list[str]:
    """Faults that no single field can see: one quantity given in two places."""
    tables = {t: values[t] for t in ("set", "sweep") if isinstance(values.get(t), Mapping)}
    faults = [
        f"{name} is both set and swept; keep one of them"
        for name in tables.get("set", {})
        if name in tables.get("sweep", {})
    ]
    same = ("momentum", "weight_decay", "clip_norm", "lr_decay")
    for key, name in (("lr", "local_lr"), *zip(same, same, strict=True)):
        faults += [
            f"{key} and {table} {name} say the same thing; keep one of them"
            for table, entries in tables.items()
            if values.get(key) is not None and name in entries
        ]
    return faults


def _sentence(error: Any, values: Mapping[str, Any]) -> str:
    """One fault, in words: the key (or flag), what was expected, what was given."""
    first, *rest = (str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {first!r}{did_you_mean(first, keys())}"
    name = first if first in values else f"--{first.replace('_', '-')}"
    kinds = ("bool", "int", "float", "str", "list[float]")
    place = ".".join([name, *(part for part in rest if part not in kinds)])
    wanted = str(error["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    if rest and rest[-1] in kinds:  # one branch of a union; the others fail as well
        wanted = "should be a number, a word, true or false"
    return f"{place} {wanted}, got {error['input']!r}"
