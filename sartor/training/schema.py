"""Every setting of a training, declared once.

From :data:`SETTINGS` follow the checks of ``fit`` and the list in its docstring, the keys of
experiment files, the flags of the command line, and the keys of reproduction plans. To add a
setting, add a row; if ``fit`` takes it, add it to the signature of ``fit`` too (a test compares).

``on`` says where a setting appears and what it belongs to:

| word | meaning |
|---|---|
| fit | a keyword of ``sartor.fit`` |
| file | a key of experiment files, and a flag of ``run``, ``compare`` and ``search`` |
| plan | a key of reproduction plans |
| advise, look | a flag of ``sartor advise``, of ``sartor data`` |
| everyday | ``--help`` shows its flag; ``--help-all`` shows them all |
| dataset, folder, table | how data of that kind are read or divided |
| synthetic | the size of a synthetic problem |
| local, stopping | an attribute of ``sartor.Local``, of ``sartor.EarlyStopping`` |
| server | is not sent to the clients of a network |
| free | may change when a run is resumed |
"""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.local import Local
from sartor.engines.shard import processes
from sartor.results.headline import WORDS
from sartor.training.progress import shown
from sartor.training.stopping import EarlyStopping

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Of parameters, features and hyper-parameters."""

COMPUTE = {**DTYPES, "bfloat16": torch.bfloat16}
"""Of forward and backward passes."""

IN_PLANS = Local(epochs=1, batch=32, lr=0.05)
"""What a reproduction plan means by local training that it does not write out."""

MEASURES = {word: word for word in WORDS}
POINTS = {point: point for point in ("pre", "post", "global")}
STORES = {store: store for store in ("memory", "mapped")}

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "whole": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "word": ((str,), "a word"),
    "switch": ((bool,), "true or false"),
    "names": ((list, tuple), "a list of names"),
    "share": ((int, float, str), "a number or a word"),
    "values": ((Mapping,), "a table of names and values"),
    "lists": ((Mapping,), "a table of names and lists of values"),
    "path": ((object,), "a path"),
    "object": ((object,), "an object"),
}
"""What a value may be: its Python types, and the words for it."""


COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Setting:
    """One setting; with dashes in place of underscores its name is the flag."""

    name: str
    kind: str = "object"  # a word of KINDS
    default: Any = None
    help: str = ""  # one sentence for the command line
    on: str = "fit"  # where it appears; see the module
    show: str = ""  # the placeholder of its value in the help
    low: float | None = None  # value >= low
    above: float | None = None  # value > above
    high: float | None = None  # value <= high
    below: float | None = None  # value < below
    optional: bool = False  # None is allowed although it is not the default
    choices: Mapping[str, Any] | None = None  # the words allowed, and what each means
    reader: Callable[[Any], Any] | None = None  # reads a value of fit, in place of the checks here
    pattern: tuple[str, str] | None = None  # a regular expression for a word, and its description
    about: str = ""  # a sentence for the docstring of fit, if few calls need the setting
    group: str = ""  # its heading in the help

    @property
    def allows_none(self) -> bool:
        """Whether None is a value."""
        return self.optional or self.default is None

    def is_on(self, *words: str) -> bool:
        """Say whether all of these words are in ``on``."""
        return set(words) <= set(self.on.split())

    def default_on(self, surface: str) -> Any:
        """Return the default in files or plans.

        A plan has no empty values, so that what a file leaves to ``Local`` is written out there;
        and its defaults never change, so that what was reproduced once is reproduced again.
        """
        if surface != "plan":
            return self.default
        value = getattr(IN_PLANS, self.name) if self.is_on("local") else self.default
        return list(value) if isinstance(value, tuple) else value

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None."""
        if value is None and self.allows_none:
            return None
        types, words = KINDS[self.kind]
        right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        signs = {">=": self.low, ">": self.above, "<=": self.high, "<": self.below}
        bounds = {sign: bound for sign, bound in signs.items() if bound is not None}
        if right and bounds:
            right = math.isfinite(value) and all(COMPARE[s](value, b) for s, b in bounds.items())
        if not right:
            limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items())
            return f"{self.name} must be {words}{' ' * bool(limits)}{limits}, got {value!r}."
        if self.choices is not None:
            one = self.name.removesuffix("s") if self.kind == "names" else self.name
            for word in value if self.kind == "names" else (value,):
                if word not in self.choices:
                    return f"Unknown {one} {word!r}{did_you_mean(str(word), self.choices)}"
        return None

    def read(self, value: Any) -> Any:
        """Return the checked value of a keyword of ``fit``."""
        if self.reader is not None:
            return self.reader(value)
        if fault := self.fault(value):
            raise ConfigError(fault)
        if self.choices is None or value is None:
            return value
        if self.kind == "names":
            return tuple(self.choices[word] for word in value)
        return self.choices[value]


def parse_device(name: str | torch.device) -> torch.device:
    """Read "auto", "cpu" or "cuda"."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"Unknown device {name!r}; use 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda', but PyTorch sees no GPU here; use device='cpu' or 'auto'."
        )
    return device


def parse_seeds(seeds: Sequence[int] | int) -> tuple[int, ...]:
    """Read one seed or several different ones."""
    found = (seeds,) if isinstance(seeds, (int, np.integer)) else tuple(seeds)
    whole = all(isinstance(s, (int, np.integer)) and not isinstance(s, bool) for s in found)
    if not found or not whole or len(set(found)) < len(found):
        raise ConfigError(f"seeds must be one or several different whole numbers, got {seeds!r}.")
    return tuple(int(s) for s in found)


def parse_whole(name: str, value: int) -> int:
    """Refuse what is not a whole number of at least 1."""
    return int(Setting(name, "whole", 1, low=1).read(value))


def parse_choice(name: str, value: str, known: Mapping[str, Any]) -> Any:
    """Return the meaning of a known word."""
    return Setting(name, "word", "", choices=known).read(value)


def _in_first(read: Callable[[Any], Any], otherwise: Any) -> Callable[[Any], Any]:
    """Read a value in the first of several processes; the others do without."""
    return lambda value: read(value) if processes.is_first() else otherwise


def _group(name: str, *settings: Setting) -> tuple[Setting, ...]:
    return tuple(replace(setting, group=setting.group or name) for setting in settings)


# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("methods", "names", (), "What to train.", "file"),
    *_group(
        "Data",
        Setting("data", "word", "digits", "A data set, a folder, or a CSV file.",
                "file plan advise server everyday", "X"),
        Setting("client", "word", None, "CSV: the column that names the client.",
                "file look table advise server everyday", "NAME"),
        Setting("clients", "whole", None, "Number of clients of a data set.",
                "file look plan dataset synthetic advise server everyday", "N", low=1),
        Setting("partition", "word", None, "dirichlet:0.1, pathological:2, classes:2, iid, ...",
                "file look plan dataset advise server everyday", "KIND"),
        Setting("protocol", "word", None, "Rules of the partition: authors, pfllib.",
                "file plan dataset advise server", "NAME"),
        Setting("samples", "whole", None, "Training samples of a data set, in all.",
                "file look plan dataset synthetic advise", "N", low=1),
        Setting("samples_per_client", "whole", None, "Samples of every client.",
                "plan dataset", low=1),
        Setting("min_train", "whole", None, "Fewest training samples of a client.",
                "file look plan dataset advise", "N", low=1),
        Setting("min_test", "whole", None, "Fewest test samples of a client.",
                "plan dataset", low=0),
        Setting("scale", "word", None, "Of images: symmetric, unit, standard, pixel.",
                "file plan dataset advise", "NAME"),
        Setting("val", "number", 0.0, "Share held out for validation.",
                "file dataset folder table advise", "P", low=0, below=1),
        Setting("val", "number", None, "Share held out for validation.",
                "plan dataset", low=0, below=1),
        Setting("test", "number", 0.25, "Folders: share held out for testing.",
                "file folder table advise", "P", above=0, below=1),
        Setting("label", "word", None, "Own data: the column of the label; A,B: several.",
                "file look folder table advise server everyday", "NAME"),
        Setting("task", "word", None, "CSV: classification, multilabel, regression.",
                "file look table advise server everyday", "KIND"),
        Setting("drop", "names", (), "CSV: columns to leave out.",
                "file look folder table advise server", "A,B"),
        Setting("categories", "names", (), "CSV: columns of numbers that are categories.",
                "file look folder table advise server", "A,B"),
        Setting("missing", "word", "error",
                "CSV: empty cells: error, mean, median, indicator, median+indicator.",
                "file look folder table advise server", "HOW"),
        Setting("decimal", "word", "auto", "CSV: decimal mark: point, comma; auto: as it shows.",
                "file look folder table advise server", "MARK"),
        Setting("standardise", "switch", False,
                "Folders: features of mean 0 and deviation 1; texts are categories.",
                "file folder advise server", group="Switches"),
        Setting("image_size", "whole", None, "Folders of images: height and width.",
                "file folder advise server", "PIXELS", low=1),
        Setting("data_dir", "path", None, "Folder of data sets (else SARTOR_DATA).",
                "file look dataset advise server", "FOLDER"),
        Setting("everyone", "whole", 0, "Also score models on so many test samples of all clients.",
                "plan", low=0),
        Setting("spread", "number", None, "Deviation of the true models from their mean.", "plan"),
        Setting("radius", "number", None, "Distance of the true models from their mean.", "plan"),
        Setting("dim", "whole", None, "Features of a synthetic problem.", "plan synthetic", low=1),
        Setting("test_samples", "whole", None, "Most test samples of a client.",
                "plan synthetic", low=1),
    ),
    *_group(
        "Training",
        Setting("model"),
        Setting("model", "word", None, "mclr, dnn, cnn2, lenet5, lstm, ...; else one that fits.",
                "file plan advise everyday", "NAME"),
        Setting("rounds", "whole", None,
                "Rounds; else until validation loss stops falling.",
                "fit file advise server everyday", "T", low=1),
        Setting("rounds", "whole", 20, "Communication rounds.", "plan", low=1),
        Setting("equal", "word", None, "compare: the same for all methods: gradients.",
                "file", "WHAT", choices={"gradients": "gradients"}),
        Setting("seed", "whole", 0, "First seed: allocation, start, batches.",
                "file look advise everyday", "S", low=0),
        Setting("first_seed", "whole", 0, "The seed of the first repeat.", "plan", low=0),
        Setting("seeds", "object", (0,), reader=parse_seeds),
        Setting("seeds", "whole", None,
                "Repeats, with seeds S, S+1, ...; else 10 for a CSV.",
                "file everyday", "K", low=1),
        Setting("seeds", "whole", 1, "Repeat with seeds S, S+1, ..., S+K-1.", "plan", "K", low=1),
        Setting("hyper"),
        Setting("set", "values", {}, "Hyper-parameter or option; repeatable.",
                "file everyday", "NAME=VALUE"),
        Setting("sweep"),
        Setting("sweep", "lists", {}, "All values in one pass; repeatable.",
                "file everyday", "NAME=V1,V2"),
        Setting("options"),
        Setting("local", reader=lambda local: local or Local()),
        Setting("optimizer", "word", "sgd", "Of local training: sgd, adam, adamw.",
                "file local", "NAME"),
        Setting("lr", "number", None, "Local rate, local_lr (0.1; Adam 0.001).",
                "file plan local advise everyday", "X", above=0),
        Setting("epochs", "whole", 5, "Local epochs a round.",
                "file plan local advise everyday", "E", low=1),
        Setting("steps", "whole", None, "Local steps a round, in place of epochs.",
                "file plan local advise", "K", low=1),
        Setting("batch", "whole", 10, "Local batch size.",
                "file local advise everyday", "B", low=1, optional=True),
        Setting("batch", "whole", 32, "Local batch size; 0 takes all samples at once.",
                "plan local", low=0),
        Setting("momentum", "number", None, "Momentum of local SGD.",
                "file plan local advise", "X", low=0, below=1),
        Setting("weight_decay", "number", None, "Weight decay of local SGD.",
                "file plan local advise", "X", low=0),
        Setting("clip_norm", "number", None, "Largest gradient norm of local SGD; 0 is no limit.",
                "file plan local", "X", low=0),
        Setting("lr_decay", "number", None, "Factor on lr after every round.",
                "file plan local", "X", above=0, high=1),
        Setting("lr_schedule", "word", None, "Of lr: cosine, step:30:0.1, warmup:5+cosine.",
                "file local", "KIND"),
        Setting("keep_optimiser", "switch", False, "Keep momentum, or Adam's past, between rounds.",
                "file plan local", group="Switches"),
        Setting("drop_last", "switch", False, "Leave out a last, smaller batch.",
                "file plan local", group="Switches"),
        Setting("finetune_steps", "whole", None, "Steps of fine-tuning before use; not for local.",
                "file", "K", low=0),
        Setting("participation", "share", 1.0, "Per round: 0.5, 10, at_least:0.6.",
                "fit file plan server", "P", reader=Participation.parse),
        Setting("do_no_harm", "switch", False,
                "Each client's best of alone, global, own; not for local.",
                "fit file everyday", group="Switches"),
        Setting("class_weights", "word", None,
                "Weights of classes in training: balanced, or 1,3,...", "fit file", "WHAT"),
        Setting("patience", "whole", None,
                "Evaluations without a better validation loss; then stop.",
                "file stopping", "N", low=1),
        Setting("min_delta", "number", 0.0, "Smallest improvement that counts, with patience.",
                "file stopping", "X", low=0),
        Setting("restore_best", "switch", False,
                "End with the round best on validation data; with patience.",
                "file stopping", group="Switches"),
        Setting("solve", "word", "train", "train, or without rounds: exact, labels.", "plan"),
        Setting("probes", "names", (), "What to measure beyond accuracy and loss.", "plan"),
        Setting("runs_at_once", "whole", None, "Runs of one pass; else by memory.", "plan", low=1),
        Setting("jitter", "number", 0.0,
                "Multiply a row's hyper-parameters by 1 + jitter · z, z ~ N(0, 1) for every seed.",
                "plan", low=0),
    ),
    *_group(
        "Engine",
        Setting("engine", "word", "auto", "auto, vectorised, sequential.",
                "fit file server free", "NAME",
                about='"auto", "vectorised" or "sequential" (the reference: one client at a '
                "time, slow)."),
        Setting("chunk", "whole", None, "Clients at once; else measured.",
                "fit file plan server free", "N", low=1,
                about="lanes at once; measured or chosen if None."),
        Setting("device", "word", "auto", "auto, cpu, cuda, cuda:1.",
                "fit file advise server free", "NAME", reader=parse_device,
                pattern=(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N"),
                about='"auto", "cpu", "cuda".'),
        Setting("dtype", "word", "float32", "float32, float64.", "fit file plan", "NAME",
                choices=DTYPES, about='"float32" or "float64".'),
        Setting("compute", "word", None, "Precision inside a step: bfloat16.", "fit file", "NAME",
                choices=COMPUTE,
                about='dtype of forward and backward passes, such as "bfloat16", if not '
                "``dtype``."),
        Setting("store", "word", "memory", "Where client states are kept: memory, mapped.",
                "fit file server", "KIND", choices=STORES,
                about='"memory", or "mapped" for client states in memory-mapped files.'),
    ),
    *_group(
        "Output",
        Setting("eval_every", "whole", 1, "Rounds between evaluations.", "fit file plan", "N",
                low=1, about="score the models every so many rounds, and after the last."),
        Setting("points", "names", ("pre", "post"), "Models to score: pre, post, global.",
                "fit file plan", "A,B", choices=POINTS,
                about='"pre" (after aggregation), "post" (after local training), "global" (the '
                "global model of methods that have one, on every client's data), or several."),
        Setting("out", about="a run folder for checkpoints, metrics, models and the result."),
        Setting("checkpoint_every", "whole", 10, "Rounds between checkpoints.",
                "fit file free", "N", low=1, about="rounds between checkpoints, with ``out``."),
        Setting("resume", "switch", False,
                about="continue from the last checkpoint in ``out``."),
        Setting("reopen", "switch", False,
                about="with ``resume``, load a finished run with its server instead of its tables "
                "alone, so that newcomers can join."),
        Setting("progress", reader=_in_first(shown, None),
                about="shows progress; True takes what suits a terminal, a notebook or a file."),
        Setting("callbacks", "object", (), reader=_in_first(tuple, ()),
                about="objects that are called after rounds, evaluations and the end, and may ask "
                "to stop; see ``sartor.training.callbacks``."),
        Setting("early_stopping", reader=EarlyStopping.parse,
                about="when to stop before the rounds are over, judged on validation data; a "
                "number is the patience. See ``sartor.EarlyStopping``."),
        Setting("measure", "word", None,
                "Compare by auroc, f1, brier, mae, ...; else the task's.",
                "fit file advise everyday", "NAME", choices=MEASURES,
                about="what clients are compared by, stop by and are searched by, such as "
                '"auroc", "balanced-accuracy", "brier" or "mae"; accuracy (of a regression RMSE) '
                "if None. See ``sartor.results.headline``."),
        Setting("track", "names", (),
                "tensorboard:FOLDER, mlflow:FILE, wandb:NAME, trackio:NAME.", "file", "WHERE"),
        Setting("out", "path", None, "Run folder; else runs/TIME-NAME.",
                "file advise server everyday", "FOLDER", group="Options"),
    ),
)
# fmt: on
"""All settings, in the order of the help and of the keywords of ``fit``."""


def settings_on(*words: str) -> dict[str, Setting]:
    """Return the settings whose ``on`` has all of these words, by name and in order."""
    return {setting.name: setting for setting in SETTINGS if setting.is_on(*words)}


def flag(key: str) -> str:
    """Return the flag of a key: ``--eval-every`` of ``eval_every``."""
    return f"--{key.replace('_', '-')}"


def help_text(setting: Setting) -> str:
    """Return the help of a flag, with its default in brackets."""
    if setting.default in (None, {}, False, ()):
        return setting.help
    many = isinstance(setting.default, tuple)
    return f"{setting.help} ({','.join(setting.default) if many else setting.default})"


def flag_tables() -> str:
    """Return every flag of an experiment with its help, as tables in Markdown."""
    parts = []
    for group in ("Data", "Training", "Switches", "Engine", "Output"):
        rows = [f"| {group.lower()} | |", "|---|---|"]
        for one in settings_on("file").values():
            if one.group == group or (one.group, group) == ("Options", "Output"):
                rows.append(f"| `{f'{flag(one.name)} {one.show}'.rstrip()}` | {help_text(one)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def documented(function: F) -> F:
    """Put the settings that few calls need into the docstring of ``fit``, at "Other Args"."""
    wrap = textwrap.TextWrapper(100, " " * 8, " " * 12, break_on_hyphens=False)
    listed = [one for one in settings_on("fit").values() if one.about]
    lines = [wrap.fill(f"{one.name}: {one.about}") for one in listed]
    before, heading, after = (function.__doc__ or "").partition("Other Args:\n")
    rest = after.partition("\n\n")[2]
    function.__doc__ = before + heading + "\n".join(lines) + "\n\n" + rest
    return function
