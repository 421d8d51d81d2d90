"""Prove that a change of the code leaves every result as it was, to the bit.

    python -m bench.same_numbers --write FILE [--only PATTERN] [--jobs 2]
    python -m bench.same_numbers --against FILE [--only PATTERN] [--jobs 2]

The first form trains some hundred small configurations and records a digest of each result with a
few readable numbers. The second form trains them again and compares: it prints how many are equal,
names those that differ with the largest relative difference of their readable numbers, and exits
with status 1 if any differs, is missing or is new. A record holds for one machine and one build of
PyTorch: other machines may round differently.

A digest is SHA-256, cut to 16 hexadecimal digits, over the bytes of

* the scores: rounds, correct answers, losses and samples at every point and split;
* the counters of the ledger, but not its seconds;
* the final model of every client in every run;
* the snapshots (mixing weights, choices), and in which round a run stopped or diverged.

Where the library itself chooses the engine (a trial of the adviser, newcomers of a loaded run) it
measures how many lanes to train at once, so the last bits depend on how busy the machine is. Such
numbers are recorded under names that begin with ``about_`` and may differ by 1e-6 of themselves.

A refusal (an error of the library) is recorded by the name of its class. Only the top level of
``sartor`` is imported, so that the same file runs before and after modules move.

Group        What its configurations are
reference    every method on the sequential engine in float64: settings, options, variants
float32      every method on the sequential engine in float32
vectorised   every method on the vectorised engine, 64 lanes a block
networks     convolutions, normalisation, LSTMs, frozen layers, on both engines
newcomers    clients that join after training, for every method
results      gains, comparisons, early stopping, resumed and saved runs
advice       the adviser, by theory and by trial
data         how data sets are divided among clients
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
import multiprocessing
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn

import sartor
from sartor import EarlyStopping, Federation, Local

Entry = dict[str, Any]
"""What is recorded of a configuration: a digest and numbers, or why there is none."""

COUNTERS = (
    "participants",
    "bytes_down",
    "bytes_up",
    "gradient_evaluations",
    "forward_evaluations",
    "setup_bytes",
    "setup_gradients",
    "setup_forward",
)
"""The counters of a ledger, all but its seconds."""

# ---- data and networks ---------------------------------------------------------------------------

SIZES = (2, 7, 4, 9, 5)
"""Training samples of the clients: the smallest has less than a batch."""


def _divided(x: Any, y: Any, sizes: Sequence[int], seed: int, **rest: Any) -> Federation:
    """Give each client so many training samples, 5 test samples and 2 to 3 for validation."""
    held, test = 3, 5
    owner = np.repeat(np.arange(len(sizes)), np.asarray(sizes) + held + test)
    place = np.concatenate([np.arange(n + held + test) for n in sizes])
    order = np.random.default_rng([11, seed]).permutation(len(owner))
    return Federation.from_arrays(
        x[order], y[order], client=owner, test=place < test, val=0.25, seed=seed, **rest
    )


def _total(sizes: Sequence[int]) -> int:
    return sum(sizes) + 8 * len(sizes)


@functools.cache
def classes(seed: int = 0, clients: int = 5, dtype: str = "float64") -> Federation:
    """Return unequal clients with four features and three classes; a seed is an allocation."""
    sizes = (SIZES if seed == 0 else (5, 3, 8, 4, 7))[:clients]
    draw = np.random.default_rng([7, 0])
    x = draw.normal(size=(_total(sizes), 4))
    y = (x @ draw.normal(size=(4, 3)) + draw.normal(size=(len(x), 3))).argmax(1)
    return _divided(x.astype(dtype), y, sizes, seed, num_classes=3)


@functools.cache
def newcomers() -> Federation:
    """Return two clients that join after training."""
    draw = np.random.default_rng([7, 1])
    x = draw.normal(size=(_total((6, 3)), 4))
    y = draw.integers(0, 3, len(x))
    return _divided(x, y, (6, 3), 5, num_classes=3, names=("late", "later"))


@functools.cache
def regression() -> Federation:
    """Return unequal clients whose targets are real numbers."""
    draw = np.random.default_rng([7, 2])
    x = draw.normal(size=(_total(SIZES), 4))
    y = x @ np.array([1.0, -2.0, 0.5, 0.0]) + draw.normal(size=len(x))
    return _divided(x, y, SIZES, 0, num_classes=0)


@functools.cache
def multilabel() -> Federation:
    """Return unequal clients with three labels a sample."""
    draw = np.random.default_rng([7, 3])
    x = draw.normal(size=(_total(SIZES), 4))
    y = (x[:, :3] + draw.normal(size=(len(x), 3)) > 0).astype(np.float64)
    return _divided(x, y, SIZES, 0, task="multilabel")


@functools.cache
def images(dtype: str = "float64", side: int = 6) -> Federation:
    """Return unequal clients with images of one channel."""
    draw = np.random.default_rng([7, 4])
    x = draw.normal(size=(_total(SIZES), 1, side, side)).astype(dtype)
    return _divided(x, draw.integers(0, 3, len(x)), SIZES, 0, num_classes=3)


@functools.cache
def texts(next_token: bool = False) -> Federation:
    """Return unequal clients with texts of five tokens, to classify or to continue."""
    draw = np.random.default_rng([7, 5])
    x = draw.integers(1, 9, size=(_total(SIZES), 5))
    y = draw.integers(1, 9, size=x.shape) if next_token else draw.integers(0, 3, len(x))
    kind = {"task": "next-token"} if next_token else {"num_classes": 3}
    return _divided(x, y, SIZES, 0, tokens=True, **kind)


@functools.cache
def sizeable(spread: float, kind: str = "classes", samples: int = 120) -> Federation:
    """Return six clients with two features and enough samples for the theory of the adviser."""
    draw = np.random.default_rng([7, 6])
    truth = draw.normal(size=2) + spread * draw.normal(size=(6, 2))
    owner = np.repeat(np.arange(6), samples)
    x = draw.normal(size=(len(owner), 2))
    score = (x * truth[owner]).sum(1)
    if kind == "regression":
        y, number = score + draw.normal(size=len(score)), 0
    else:
        y, number = (score + draw.logistic(size=len(score)) > 0).astype(np.int64), 2
    return Federation.from_arrays(x, y, client=owner, test=0.25, val=0.2, num_classes=number)


class Net(nn.Module):
    """A body of one layer and a head."""

    head = "fc"

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.fc = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        found: Tensor = self.fc(torch.tanh(self.body(x)))
        return found


class Normed(Net):
    """The small network with a normalisation layer, which fedbn keeps at home."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(classes)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        found: Tensor = self.fc(torch.tanh(self.norm(self.body(x))))
        return found


class Frozen(Net):
    """The small network after a frozen layer and a constant."""

    pretrained = True
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return super().forward(torch.tanh(self.before(x)) * self.scale)


class Conv(nn.Module):
    """Two convolutions with normalisation and pooling, and a head."""

    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.second = nn.Conv2d(2, 3, 2)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        found: Tensor = self.fc(torch.relu(self.second(x)).flatten(1))
        return found


# ---- from a result to its digest -----------------------------------------------------------------


def _feed(digest: Any, value: Any) -> None:
    """Add a value to a digest: type, shape and bytes of arrays, and containers item by item."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{{{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{type(value).__name__}={value!r};".encode())


FIGURES = {"accuracy": 4, "loss": 9}
"""Significant figures of numbers that are recorded for readers; others are recorded whole."""


def _entry(content: Any, **numbers: Any) -> Entry:
    """Return the digest of a content and the readable numbers; NaN and infinity become None."""
    digest = hashlib.sha256()
    _feed(digest, content)
    entry: Entry = {"digest": digest.hexdigest()[:16]}
    for name, number in numbers.items():
        value = number if isinstance(number, int) else float(number)
        if name in FIGURES:
            value = float(f"{value:.{FIGURES[name]}g}")
        entry[name] = value if math.isfinite(value) else None
    return entry


def _numbers_of(facts: Any) -> Any:
    """Keep the numbers of a dict, whose sentences may be put in other words."""
    return facts and {k: v for k, v in facts.items() if not isinstance(v, str)}


def content_of(result: Any) -> dict[str, Any]:
    """Return every number of a result that training determines."""
    runs, clients = range(len(result.runs)), range(len(result.clients))
    return {
        "scores": {
            f"{point}/{split}": [scores.rounds, scores.correct, scores.loss, scores.count]
            for (point, split), scores in result.scores.items()
        },
        "ledger": {name: np.asarray(getattr(result.ledger, name)) for name in COUNTERS},
        "models": [[dict(result.model(i, r).state_dict()) for i in clients] for r in runs],
        "snapshots": list(result.snapshots),
        "ends": [[_numbers_of(end) for end in ends] for ends in (result.stopped, result.diverged)],
        "headline": result.headline,
    }


def of_result(result: Any, *more: Any) -> Entry:
    """Return the entry of a result, with more content where a configuration has some."""
    content = content_of(result)
    ledger, test = content["ledger"], result.scores[result.headline, "test"]
    leaves = [leaf for run in content["models"] for model in run for leaf in model.values()]
    return _entry(
        [content, *more],
        accuracy=np.mean(result.accuracy),
        loss=float(test.loss[:, -1].sum()) / float(test.count.sum()),
        weights=math.fsum(float(leaf.double().abs().sum()) for leaf in leaves),
        bytes=int(sum(ledger[k].sum() for k in ("bytes_down", "bytes_up", "setup_bytes"))),
        gradients=int(ledger["gradient_evaluations"].sum() + ledger["setup_gradients"].sum()),
    )


def _cells(table: Any) -> list[list[Any]]:
    """Return the numbers of a table; its words may change."""
    return [[cell for cell in row if isinstance(cell, int | float)] for row in table.rows]


# ---- configurations ------------------------------------------------------------------------------

SGD = Local(epochs=1, batch=4, lr=0.2)
HEAVY = Local(epochs=2, batch=4, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
RESTART = replace(HEAVY, keep_optimiser=False, drop_last=True)
PLAIN_RESTART = replace(RESTART, momentum=0.0)
SCHEDULED = Local(
    steps=3, batch=3, lr=0.3, clip_norm=0.5, lr_decay=0.9, lr_schedule="warmup:2+cosine"
)
FULL = Local(epochs=2, batch=None, lr=0.1)
LOCALS = {"heavy": HEAVY, "restart": RESTART, "scheduled": SCHEDULED, "full": FULL}

REFERENCE: dict[str, Any] = {
    "engine": "sequential",
    "dtype": "float64",
    "device": "cpu",
    "rounds": 3,
    "eval_every": 2,
    "participation": 0.6,
    "local": SGD,
}
VECTORISED = {**REFERENCE, "engine": "vectorised", "chunk": 64}
NARROW = {**REFERENCE, "dtype": "float32"}


@dataclass(frozen=True)
class Configuration:
    """A name, what makes its entry, and its training where other settings make sense.

    Attributes:
        name: group, method and what is special.
        work: trains and returns the entry.
        train: trains with other settings on top, such as another engine; returns the result.
    """

    name: str
    work: Callable[[], Entry]
    train: Callable[..., Any] | None = None


def fitted(method: str, data: Any = None, net: Any = None, **settings: Any) -> Any:
    """Train a method on the reference engine, on the small classification by default."""
    data = classes() if data is None else data
    torch.manual_seed(0)
    network = (net or _plain_net(method))()
    return sartor.fit(method, data, model=network, **{**REFERENCE, **settings})


def _plain_net(method: str) -> Callable[..., nn.Module]:
    return Normed if method == "fedbn" else Net


def _fit(name: str, method: str, *data: Any, **settings: Any) -> Configuration:
    def train(**other: Any) -> Any:
        return fitted(method, *data, **{**settings, **other})

    return Configuration(name, lambda: of_result(train()), train)


def _words(values: Mapping[str, Any]) -> str:
    """Name options in a configuration: ``rule=uniform,layers=2``."""
    texts = []
    for name, value in values.items():
        many = isinstance(value, tuple | dict)
        texts.append(name if many else f"{name}={value}")
    return ",".join(texts)


WEIGHTS = (0.1, 0.2, 0.3, 0.3, 0.1)
CONVEX = {"smoothness": 2.0, "strong_convexity": 1.0}
UNIT = {"body.weight": 0.5, "body.bias": 1.0, "fc.weight": 1.0, "fc.bias": 2.0}

COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("rule", "p_weighted"): {"client_weights": WEIGHTS},
    ("preset", "paper_synthetic"): {"smoothness": 2.0},
    ("preset", "corollary1"): CONVEX,
    ("preset", "theory"): {"strong_convexity": 4.0},
    ("preset", "paper"): {"smoothness": 2.0},
    ("lambda_rule", "v2"): {"preset": "paper_synthetic", **CONVEX},
    ("lambda_rule", "shrinkage"): {"preset": "corollary1", **CONVEX},
    ("radius", "estimated"): {"version": "threshold", "fit_epochs": 30},
    ("inside", "threshold"): {"version": "clustered", "num_clusters": 2, "fit_epochs": 3},
    ("version", "clustered"): {"fit_epochs": 3},
    ("mapping", "affine"): {"family": "bernoulli"},
    ("select_on", "test"): {"version": "sample_split"},
    ("project_global", "True"): {"domain": "box"},
    ("ft_pull", "True"): {"ft_steps": 2},
    ("harm_score", "error"): {"do_no_harm": True},
    ("harm_on", "holdout"): {"do_no_harm": True},
    ("harm_on", "validation"): {"do_no_harm": True},
    ("robust_mix", "True"): {"robust": "median"},
    ("robust_mix", "False"): {"robust": "krum"},
}
"""(option, value) -> what else a method needs for it; options that a method lacks are left out."""

Variant = tuple[str, dict[str, Any], dict[str, float], Local]


def _v(
    method: str,
    options: dict[str, Any] | None = None,
    hyper: dict[str, float] | None = None,
    local: Local = SGD,
) -> Variant:
    return method, options or {}, hyper or {}, local


VARIANTS: list[Variant] = [
    _v("fedavg", hyper={"relax": 1.5}, local=HEAVY),
    _v("fedavg", {"rule": "uniform"}, local=RESTART),
    _v("fedavg", {"rule": "chen"}, {"server_lr": 0.8}),
    _v("fedavg-ft", {"ft_steps": 3}, local=HEAVY),
    _v("fedavg-ft", {"ft_epochs": 1, "ft_pull": True}, {"ft_prox_strength": 0.5}),
    _v("dichotomous", {"scope": "client", "score": "loss"}, local=HEAVY),
    _v("dichotomous", {"select_on": "validation", "score": "loss"}),
    _v("dichotomous", {"version": "threshold"}, {"heterogeneity": 0.32}),
    _v("dichotomous", {"version": "sample_split", "select_on": "test", "score": "loss"}),
    _v("dichotomous", {"val_share": 0.4, "scope": "client"}),
    _v("dichotomous", {"version": "sample_split", "split_share": 0.3}),
    _v("fedprox", hyper={"prox_strength": 0.5}, local=HEAVY),
    _v("fedprox", {"preset": "free", "weights": "samples"}, {"server_lr": 0.7}),
    _v("fedprox", {"preset": "paper_real", "unbiased": True}, {"prox_strength": 0.5}),
    _v("fedprox", {"preset": "corollary1", **CONVEX}, {"prox_strength": 0.5}),
    _v("fedprox", {"lambda_rule": "v1"}, {"heterogeneity": 2.0}),
    _v(
        "fedprox",
        {"lambda_rule": "v2", "preset": "paper_synthetic", **CONVEX},
        {"heterogeneity": 2.0},
    ),
    _v(
        "fedprox",
        {"lambda_rule": "shrinkage", "preset": "corollary1", "weights": "samples", **CONVEX},
        {"heterogeneity": 2.0, "noise": 3.0},
    ),
    _v("l2gd", {"gradient": "batch"}, {"average_probability": 0.4}),
    _v("l2gd", {"longest_run": 2}, local=replace(SGD, weight_decay=0.1)),
    _v("l2gd", {"participation": "sampled"}, {"average_probability": 0.6}),
    _v("l2gd", {"preset": "paper", "smoothness": 2.0}, {"prox_strength": 1.0}),
    _v("ditto", hyper={"prox_strength": 0.5}, local=HEAVY),
    _v("ditto", {"personal_steps": 3, "rule": "chen"}, {"personal_lr": 0.1}, RESTART),
    _v("ditto", {"choices": (1.0, 0.1, 2.0), "personal_epochs": 1}, local=RESTART),
    _v("per-fedavg", {"mode": "hessian_free"}, {"difference": 0.5, "personal_lr": 0.3}),
    _v("per-fedavg", {"mode": "exact", "preset": "prior"}, {"relax": 1.5}),
    _v("per-fedavg", {"rule": "normalized", "personal_steps": 2}),
    _v("fedprox-two-stage", {"weights": "samples", "final_steps": 3}, local=HEAVY),
    _v("fedprox-two-stage", {"domain": "ball"}, {"domain_size": 1.0}, RESTART),
    _v(
        "fedprox-two-stage",
        {"preset": "theory", "strong_convexity": 4.0, "growth": 0.5},
        {"prox_strength": 3.0},
    ),
    _v(
        "fedprox-two-stage",
        {"preset": "theory", "strong_convexity": 4.0, "domain": "box", "project_global": True},
        {"domain_size": 0.3},
    ),
    _v("pfedme", {"inner_start": "carry", "weights": "samples"}, {"relax": 1.5}),
    _v("pfedme", {"train_all": False, "prox_steps": 2}, local=PLAIN_RESTART),
    _v("pfedbred", {"strategy": "none", "inner_start": "theta"}, {"relax": 1.5}),
    _v("pfedbred", {"strategy": "lg", "envelope": "exact"}, {"prior_lr": 0.3}),
    _v("pfedbred", {"strategy": "meg", "train_all": False}, {"memory_lr": 0.5}),
    _v("pfedbred", {"strategy": "mh-variant", "envelope": "exact"}, {"prior_lr": 0.3}),
    _v("pfedbred", {"mode": "code"}, local=PLAIN_RESTART),
    _v("pfedbred", {"covariance": UNIT, "strategy": "lg"}),
    _v("pfedbred", {"covariance": UNIT, "strategy": "mh", "prox_steps": 2}),
    _v("pfedbred", {"family": "bernoulli"}, {"prior_width": 2.0}),
    _v("pfedbred", {"family": "poisson", "strategy": "meg"}),
    _v("pfedbred", {"family": "exponential", "envelope": "exact"}),
    _v("fedapa", hyper={"mix_lr": 0.5}, local=HEAVY),
    _v("fedapa", {"preset": "authors_code"}, {"mix_lr": 0.5, "self_weight": 0.4}),
    _v("fedapa", {"weight_step": "as_printed", "share": "all"}, {"mix_lr": 0.5}),
    _v("fedapa", {"clip_weights": False, "normalise_weights": False}, {"mix_lr": 0.1}),
    _v("fedapa", {"pin_weights": False, "schedule": "sequential"}, {"mix_lr": 0.5}),
    _v("fedapa", {"schedule": "parallel", "server_momentum": True}, {"mix_lr": 0.5}),
    _v("fedamp", {"scale": "absolute", "decay_every": 2}, {"mix_decay": 0.5}, HEAVY),
    _v("fedamp", {"start": "cloud", "pool": "participants"}, local=RESTART),
    _v("heur-fedamp", {"pool": "participants", "decay_every": 2}, {"mix_decay": 0.5}, HEAVY),
    _v("fedala", {"ala_for": "all", "layers": 2, "window": 3}, {"mix_lr": 0.5}, HEAVY),
    _v("fedala", {"share": 0.5, "start_passes": 3, "calm": 0.3}, local=RESTART),
    _v("fedphp", {"transfer": "kd", "first_teacher": "initial"}, local=HEAVY),
    _v("fedphp", {"transfer": "mmd_fixed", "progress": "rounds"}, local=RESTART),
    _v("apple", {"shape": "cosine", "core_rate": "plain"}, {"pull": 0.5}, HEAVY),
    _v("apple", {"start": "uniform"}, {"relation_lr": 0.05}, RESTART),
    _v("apple", {"budget": 2, "max_clients": 7, "start_cores": "own"}, local=HEAVY),
    _v("apple", {"budget": 2, "choice_base": 2.0, "choice_growth": 1.3}),
    _v("fedfomo", {"distance": "l1", "fallback": "reference"}, local=HEAVY),
    _v("fedfomo", {"select_on": "validation", "affinity": "normalised", "available": "ever"}),
    _v("fedfomo", {"picks": 2, "explore": True, "val_share": 0.4}),
    _v("fedper", {"private": ("body",)}),
    _v("fedrep", {"head_steps": 3, "body_epochs": 1}, local=HEAVY),
    _v("fedrep", {"head_epochs": 1, "final_head_epochs": 2}, local=RESTART),
    _v("fedbabu", {"ft_steps": 3, "ft_part": "head"}, local=HEAVY),
    _v("fedbabu", {"ft_epochs": 1, "ft_part": "body"}),
    _v("lg-fedavg", {"warmup_rounds": 1}, local=HEAVY),
    _v("lg-fedavg", {"shared": ("body",)}),
    _v("fedrod", {"personal_start": "zero"}, {"balance": 0.7}, HEAVY),
    _v("moon", hyper={"contrast_strength": 5.0}, local=HEAVY),
    _v("fedbn", {"private": ("body",)}, local=HEAVY),
    _v("fedem", {"components": 2, "refresh_weights": True}, {"relax": 1.5}, HEAVY),
    _v("pfedbayes", {"draws": 2, "personal_steps": 2, "predict_draws": 2}, local=HEAVY),
    _v("apfl", {"mixing": "step"}, {"share_decay": 0.1}, HEAVY),
    _v("apfl", {"mixing": "fixed", "rule": "uniform"}, local=RESTART),
    _v("scaffold", {"weights": "samples"}, {"server_lr": 0.8}, HEAVY),
    _v("scaffold", {"control": "gradient"}, local=RESTART),
    _v("pfedhn", {"share": "body", "evaluate": "after_local"}, local=HEAVY),
    _v("pfedhn", {"embedding": 3, "hidden": 4, "hidden_layers": 1, "server_clip": None}),
    _v("pfedla", {"retained": 1}, {"mix_lr": 0.5}, HEAVY),
    _v("pfedla", {"embedding": 3, "hidden": 4, "layers": "tensors"}),
    _v("fedpac", {"head_epochs": 2, "cutoff": 0.1}, {"head_lr": 0.1}, HEAVY),
    _v("dbe", {"init_mean": "full"}, {"mean_rate": 0.5}, HEAVY),
    _v("dbe", {"memory": False}, local=RESTART),
    _v("fedproto", {"prototypes": "running", "answer": "nearest_own"}, local=HEAVY),
    _v("fedproto", {"average": "count", "absent": "drop"}, local=RESTART),
    _v("fedgh", {"server_epochs": 2, "server_batch": 2}, local=HEAVY),
]
"""Options that act together, and numbers that are not a choice from a list."""


LATER = ("class_weights",)
"""Options since 0.1.0."""


def _choices(hint: Any) -> list[Any]:
    """Return the values that the type of an option lists: words, true and false."""
    if hint is bool:
        return [True, False]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for part in get_args(hint) for value in _choices(part)]


def of_options() -> Iterator[Configuration]:
    """Yield every listed value of every option of every method, all but the defaults."""
    common = sartor.methods.COMMON
    for method, listed in sartor.methods.METHODS.items():
        known = listed.options
        for option, (default, hint) in known.items():
            if option in common and method not in ("fedavg", "ditto", "fedper"):
                continue
            if option in LATER:
                continue
            for value in _choices(hint):
                if value is None or (value == default and type(value) is type(default)):
                    continue
                needed = COMPANIONS.get((option, str(value)), {})
                more = {k: v for k, v in needed.items() if k in known}
                options = {**more, option: value}
                name = f"reference/{method}/{option}={value}"
                yield _fit(name, method, options=options)


def of_variants(group: str, settings: Mapping[str, Any]) -> Iterator[Configuration]:
    """Yield the variants on an engine."""
    for method, options, hyper, local in VARIANTS:
        kind = next((f"+{k}" for k, v in LOCALS.items() if v is local), "")
        name = f"{group}/{method}/variant:{_words({**options, **hyper})}{kind}"
        given = {**settings, "options": options, "hyper": hyper, "local": local}
        yield _fit(name, method, **given)


def _moved(method: str, specs: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return a row of defaults and rows in which one hyper-parameter at a time is another.

    Rates that follow from that of local training are 0.05, its default in 0.1.0.
    """
    base = {name: float(spec.default) for name, spec in specs.items()}
    for name, value in base.items():
        follows = name.endswith("_lr") and (method, name) != ("fedpac", "head_lr")
        base[name] = 0.05 if follows and value == Local().lr else value
    rows = [base]
    for name, value in base.items():
        other = 0.5 * value if value else 0.3
        rows.append({**base, name: min(max(other, specs[name].low), specs[name].high)})
    return rows


ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "clip")
SINCE = ("evidence",)
"""Methods since 0.1.0: they come last, so that the others keep their configurations."""


def of_methods() -> Iterator[Configuration]:
    """Yield every method on the reference engine in settings that concern all methods."""
    for number, method in enumerate(sorted(sartor.methods.METHODS, key=SINCE.__contains__)):
        listed, here = sartor.methods.METHODS[method], f"reference/{method}"
        yield _fit(f"{here}/default", method)
        yield _fit(f"{here}/all participate", method, participation=1.0, rounds=2)
        for kind, local in LOCALS.items():
            yield _fit(f"{here}/{kind}", method, local=local)
        two = [classes(0), classes(1)]
        least = {"participation": "at_least:0.4", "rounds": 4}
        yield _fit(f"{here}/two seeds, at least 0.4", method, two, seeds=(3, 4), **least)
        yield _fit(f"{here}/2 clients, each round", method, participation=2, eval_every=1)
        rows = _moved(method, listed.hyper)
        yield _fit(f"{here}/hyper one by one", method, sweep=rows, rounds=2, eval_every=2)
        each = {"local_lr": [0.05, 0.1, 0.2, 0.3, 0.4]}
        yield _fit(f"{here}/rate per client", method, hyper=each, rounds=2)
        yield _fit(f"{here}/finetune 2 steps", method, options={"finetune_steps": 2}, rounds=2)
        rule = ROBUST[number % len(ROBUST)]
        robust = {"robust": rule, "robust_share": 0.3}
        yield _fit(f"{here}/robust {rule}", method, options=robust, participation="all")
        yield _fit(f"{here}/do no harm", method, do_no_harm=True, rounds=2)
        points = ("pre", "post", "global")
        yield _fit(f"{here}/all points", method, points=points, rounds=1)
        one = functools.partial(_plain_net(method), 1)
        yield _fit(f"{here}/regression", method, regression(), one, rounds=2)
        yield _fit(f"float32/{method}/default", method, classes(dtype="float32"), **NARROW)
        yield _fit(f"float32/{method}/scheduled", method, **{**NARROW, "local": SCHEDULED})
        yield _fit(f"vectorised/{method}/default", method, **VECTORISED)
        wide = {**VECTORISED, "dtype": "float32", "seeds": (3, 4)}
        yield _fit(f"vectorised/{method}/float32, two seeds", method, two, **wide)
        yield Configuration(
            f"newcomers/{method}", functools.partial(_joined, method, rounds=2, finetune_epochs=1)
        )


def _joined(method: str, **how: Any) -> Entry:
    """Train, and let two clients join."""
    return of_result(fitted(method, rounds=2).onboard(newcomers(), **how))


def of_settings() -> Iterator[Configuration]:
    """Yield combinations and settings that are alike for all methods, on a few of them."""
    for method in ("fedavg", "ditto", "fedrep", "fedapa"):
        here = f"reference/{method}"
        yield _fit(f"{here}/multilabel", method, multilabel())
        grid = {"local_lr": [0.05, 0.2], "finetune_steps": [1, 2]}
        yield _fit(f"{here}/sweep of option and rate", method, sweep=grid, seeds=2, rounds=2)
        epochs = {"finetune_epochs": 1, "do_no_harm": True, "robust": "median"}
        yield _fit(f"{here}/finetune, robust, no harm", method, options=epochs, rounds=2)
        error = {"harm_score": "error", "harm_share": 0.4, "harm_on": "holdout"}
        for margin in (0.0, 3.0):
            given = {"options": error, "hyper": {"harm_margin": margin}, "rounds": 2}
            yield _fit(f"{here}/no harm, margin {margin}", method, do_no_harm=True, **given)
        for schedule in ("cosine", "step:2:0.5", "warmup:3", "cosine:6:0.1"):
            local = replace(HEAVY, lr_schedule=schedule)
            yield _fit(f"{here}/lr_schedule {schedule}", method, local=local, rounds=4)
        yield _fit(f"{here}/mapped store", method, store="mapped")
        yield _fit(f"{here}/bfloat16", method, compute="bfloat16", dtype="float32")
        for chunk in (1, 3):
            name = f"vectorised/{method}/chunk {chunk}"
            yield _fit(name, method, **{**VECTORISED, "chunk": chunk})
        yield _fit(f"vectorised/{method}/do no harm", method, do_no_harm=True, **VECTORISED)
        yield _fit(f"vectorised/{method}/mapped store", method, store="mapped", **VECTORISED)
        yield _fit(f"vectorised/{method}/regression", method, regression(), _one, **VECTORISED)
    for rule in ROBUST:
        for mix in (True, False):
            options = {"robust": rule, "robust_share": 0.3, "robust_mix": mix}
            name = f"reference/fedavg/robust {rule}, share 0.3, mix {mix}"
            yield _fit(name, "fedavg", options=options, participation=1.0)


def _one() -> nn.Module:
    return Net(1)


def of_networks() -> Iterator[Configuration]:
    """Yield convolutions for every method, and other networks for a few."""
    for method in sartor.methods.METHODS:
        short = {"rounds": 2, "eval_every": 2}
        yield _fit(f"networks/{method}/conv", method, images(), Conv, **short)
        wide = {**VECTORISED, "dtype": "float32", **short}
        yield _fit(f"networks/{method}/conv, vectorised", method, images("float32"), Conv, **wide)
    for method in ("local", "fedavg", "ditto", "fedrep"):
        for kind, engine in (("", REFERENCE), (", vectorised", VECTORISED)):
            settings = {**engine, "rounds": 2}
            here = f"networks/{method}"
            yield _fit(f"{here}/lstm{kind}", method, texts(), _lstm, **settings)
            yield _fit(f"{here}/next token{kind}", method, texts(True), _language, **settings)
            yield _fit(f"{here}/frozen{kind}", method, None, Frozen, **settings)
            if method != "fedrep":  # which needs a body under the head
                yield _fit(f"{here}/mclr{kind}", method, None, _mclr, **settings)
            yield _fit(f"{here}/dnn{kind}", method, None, _dnn, **settings)
    strict = {"options": {"strict": True}}
    yield _fit("networks/fedbn/conv, strict", "fedbn", images(), Conv, **strict)
    yield _fit("networks/fedavg/cnn2", "fedavg", images("float32", 28), _cnn2, **NARROW)


def _lstm() -> nn.Module:
    return sartor.models.lstm(texts(), embedding=3, hidden=3, layers=1, classifier=4)


def _language() -> nn.Module:
    return sartor.models.language_lstm(texts(True), embedding=3, hidden=3)


def _mclr() -> nn.Module:
    return sartor.models.mclr(classes())


def _dnn() -> nn.Module:
    return sartor.models.dnn(classes())


def _cnn2() -> nn.Module:
    return sartor.models.cnn2(images("float32", 28))


# ---- results, advice, data -----------------------------------------------------------------------


def _gained(method: str, data: Any = None, net: Any = None, **settings: Any) -> Entry:
    """Compare a result with training alone, and predict and score with it."""
    data = classes() if data is None else data
    result = fitted(method, data, net, **settings)
    tables = [result.gain(), result.per_client(), result.fairness()]
    answer = result.predict(0, np.asarray(data.x[:4]))
    numbers = [result.accuracy_best, result.accuracy_macro, result.worst_client]
    return of_result(result, [_cells(t) for t in tables], answer.labels, answer.scores, numbers)


def _compared(names: str, **settings: Any) -> Entry:
    """Compare several methods with one another."""
    torch.manual_seed(0)
    given = {**REFERENCE, "rounds": 2, **settings}
    found = sartor.compare(names, classes(), model=Net(), **given)
    results = [content_of(found[name]) for name in found]
    hurt = [found.hurt(name) for name in found]
    return _entry([list(found), results, hurt], methods=len(found))


class _Ends:
    """A callback that ends a run after its second round: politely, or by an interruption."""

    def __init__(self, interrupt: bool) -> None:
        self.interrupt, self.rounds = interrupt, 0

    def on_round(self, _: Any) -> Any:
        """Ask to stop, or interrupt."""
        self.rounds += 1
        if self.rounds < 2:
            return None
        if self.interrupt:
            raise KeyboardInterrupt
        return sartor.STOP


def _resumed(method: str, **settings: Any) -> Entry:
    """Interrupt a run and resume it; stop another; load the first, and let clients join it."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"checkpoint_every": 1, "rounds": 4, **settings}
        first, second = Path(folder) / "interrupted", Path(folder) / "stopped"
        stopped = fitted(method, out=second, callbacks=[_Ends(False)], **given)
        try:
            fitted(method, out=first, callbacks=[_Ends(True)], **given)
        except KeyboardInterrupt:
            resumed = fitted(method, out=first, resume=True, **given)
        else:
            raise RuntimeError("the run was not interrupted")
        loaded = sartor.load(first, model=_plain_net(method)())
        joined = of_result(loaded.onboard(newcomers(), rounds=1))
        entry = of_result(resumed, [content_of(result) for result in (stopped, loaded)])
        return {**entry, "about_loss": joined["loss"], "about_weights": joined["weights"]}


class _Study:
    """A study that draws at random from a fixed seed, and forgets what it is told."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(5)

    def ask(self) -> _Study:
        """Return a trial."""
        return self

    def tell(self, *given: Any, **named: Any) -> None:
        """Take what a trial reached."""

    def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> float:
        """Draw a number."""
        if log:
            return float(np.exp(self.draw.uniform(np.log(low), np.log(high))))
        return float(self.draw.uniform(low, high))

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        """Draw one of some choices."""
        return choices[int(self.draw.integers(len(choices)))]


def _searched() -> Entry:
    """Search a hyper-parameter and an option with a fixed sampler."""
    space = {"prox_strength": (0.01, 10.0, "log"), "weights": ["uniform", "samples"]}
    given = {**VECTORISED, "rounds": 2, "options": {"preset": "free"}, "study": _Study()}
    torch.manual_seed(0)
    found = sartor.search("fedprox", classes(), space, trials=4, lanes=2, model=Net(), **given)
    return of_result(found.result, _cells(found.table), found.value)


def of_results() -> Iterator[Configuration]:
    """Yield what is read off results, and runs that stop, resume and are saved."""
    for method in ("fedavg", "fedprox", "apfl", "fedproto"):
        yield Configuration(f"results/{method}/gain", functools.partial(_gained, method))
    for method in ("fedavg", "ditto"):
        work = functools.partial(_gained, method, regression(), _one)
        yield Configuration(f"results/{method}/gain, regression", work)
        harm = functools.partial(_gained, method, do_no_harm=True)
        yield Configuration(f"results/{method}/gain, no harm", harm)
        for restore in (True, False):
            for measure in ("loss", "accuracy"):
                rule = EarlyStopping(patience=1, restore=restore, measure=measure)
                name = f"results/{method}/early stopping, {measure}, restore {restore}"
                given = {"early_stopping": rule, "rounds": 8, "eval_every": 1}
                rates = {"local_lr": [0.1, 1.0, 3.0]}
                yield _fit(name, method, **given, sweep=rates)
        real = (method, regression(), _one)
        yield _fit(f"results/{method}/diverges", *real, hyper={"local_lr": 1e200})
        sweep = {"local_lr": [0.1, 1e200]}
        yield _fit(f"results/{method}/one run diverges", *real, sweep=sweep)
    for method in ("local", "fedavg", "ditto", "fedper", "scaffold", "fedapa", "dbe", "lg-fedavg"):
        yield Configuration(f"results/{method}/resumed", functools.partial(_resumed, method))
        heavy = functools.partial(_resumed, method, local=HEAVY)
        yield Configuration(f"results/{method}/resumed, heavy", heavy)
        for rounds, epochs in ((0, 0), (3, 0), (0, 2)):
            how = {"rounds": rounds, "finetune_epochs": epochs}
            name = f"newcomers/{method}/{rounds} rounds, {epochs} epochs"
            yield Configuration(name, functools.partial(_joined, method, **how))
    for names in ("all-baseline", "fedprox,ditto", "all-regularised"):
        yield Configuration(f"results/compare {names}", functools.partial(_compared, names))
    harm = functools.partial(_compared, "ditto", do_no_harm=True)
    yield Configuration("results/compare ditto, no harm", harm)
    yield Configuration("results/search", _searched)


CLIENT_NUMBERS = ("samples", "distance", "noise", "prox_strength", "alone", "one_model", "advised")


def _advised(verify: bool, data: Federation, **settings: Any) -> Entry:
    """Ask for advice and keep its numbers."""
    torch.manual_seed(0)
    found = sartor.advise(data, device="cpu", draws=4, **settings)
    plan = found.plan
    numbers = [] if plan is None else [getattr(plan, f.name) for f in dataclasses.fields(plan)]
    content = [found.basis, found.strategy, found.prox_strength, found.pulls, found.asked]
    clients = [[getattr(client, name) for name in CLIENT_NUMBERS] for client in found.clients]
    rest = [found.errors, found.rules, found.constants, found.held_out, numbers, clients]
    near = {"about_trial": _size(rest)} if found.basis == "trial" else {}
    if verify:
        near["about_verified"] = _size(found.verify().to_dict())
    exact = [content, *([] if found.basis == "trial" else rest)]
    return _entry(exact, prox_strength=found.prox_strength, **near)


def _size(value: Any) -> float:
    """Return the sum of log(1 + |v|) over all finite numbers v, so that small ones count too."""
    finite = (number for number in _plain_numbers(value) if math.isfinite(number))
    return math.fsum(math.log1p(abs(number)) for number in finite)


def _plain_numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a tree of JSON values, but for those of times."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if "second" not in str(key):
                yield from _plain_numbers(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _plain_numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def of_advice() -> Iterator[Configuration]:
    """Yield the adviser on federations that differ in how much their clients differ."""
    for spread in (0.05, 0.5, 2.0):
        for kind in ("classes", "regression"):
            for target in ("loss", "parameters")[: 1 if kind == "regression" else 2]:
                data = functools.partial(sizeable, spread, kind)
                name = f"advice/{kind}, spread {spread}, target {target}"
                yield Configuration(name, _ask(data, target=target, features="raw"))
    data = functools.partial(sizeable, 0.5)
    small = functools.partial(sizeable, 0.5, "classes", 12)
    local = Local(epochs=1, lr=0.1, batch=4)
    yield Configuration("advice/scaled, ridge", _ask(data, ridge=0.1))
    yield Configuration("advice/pca", _ask(data, features="pca:1"))
    yield Configuration("advice/budget", _ask(data, budget_mb=0.01, budget_rounds=5))
    yield Configuration("advice/trial", _ask(small, basis="trial", rounds=2, local=local))
    yield Configuration("advice/too few samples", _ask(small, rounds=2, local=local))
    yield Configuration("advice/verified", _ask(data, True, features="raw"))


def _ask(data: Callable[[], Federation], verify: bool = False, **settings: Any) -> Any:
    return lambda: _advised(verify, data(), **settings)


def _divide(**settings: Any) -> Entry:
    """Divide a data set among clients."""
    fed = Federation.from_dataset("digits", **settings)
    splits = [[fed.split(k).rows, fed.split(k).sizes] for k in ("train", "val", "test")]
    content = [fed.x, fed.y, splits, list(fed.names), fed.num_classes]
    return _entry(content, clients=fed.num_clients, samples=int(fed.num_samples))


def of_data() -> Iterator[Configuration]:
    """Yield divisions of a data set, and those of the federations that are used here."""
    kinds = {
        "iid": ("authors", "pfllib"),
        "dirichlet:0.1": ("authors", "pfllib", "equal"),
        "dirichlet:1.0": ("authors", "pfllib", "equal"),
        "pathological:2": ("authors", "pfllib"),
        "classes:2": ("own", "all"),
        "lognormal:3": (None,),
    }
    for kind, protocols in kinds.items():
        for protocol in protocols:
            for seed in (0, 1):
                given = {"partition": kind, "clients": 5, "protocol": protocol, "seed": seed}
                name = f"data/digits/{kind}, {protocol or 'default'}, seed {seed}"
                yield Configuration(name, functools.partial(_divide, **given, val=0.1))
    makers: dict[str, Callable[[], Federation]] = {
        "classes": classes,
        "newcomers": newcomers,
        "regression": regression,
        "multilabel": multilabel,
        "images": images,
        "texts": texts,
        "standardised": _standardised,
    }
    for name, make in makers.items():
        yield Configuration(f"data/arrays/{name}", functools.partial(_made, make))


def _standardised() -> Federation:
    draw = np.random.default_rng([7, 8])
    x = 3.0 * draw.normal(size=(60, 4)) + 1.0
    y = draw.integers(0, 3, 60)
    owner = np.arange(60) % 4
    return Federation.from_arrays(x, y, client=owner, stratify=True, standardise=True, val=0.2)


def _made(make: Callable[[], Federation]) -> Entry:
    fed = make()
    return _entry([fed.fingerprint(), fed.x, fed.y, list(fed.names)], samples=int(fed.num_samples))


def configurations() -> dict[str, Configuration]:
    """Return every configuration by its name."""
    found: dict[str, Configuration] = {}
    groups = (
        of_methods(),
        of_options(),
        of_variants("reference", REFERENCE),
        of_variants("vectorised", {**VECTORISED, "eval_every": 3}),
        of_settings(),
        of_networks(),
        of_results(),
        of_advice(),
        of_data(),
    )
    for group in groups:
        for one in group:
            if one.name in found:
                raise ValueError(f"two configurations are called {one.name!r}")
            found[one.name] = one
    return found


# ---- recording and comparing ---------------------------------------------------------------------


@functools.cache
def _known() -> dict[str, Configuration]:
    torch.set_num_threads(1)
    return configurations()


def measure(name: str) -> tuple[str, Entry, float]:
    """Return the name of a configuration, its entry, and the seconds that it took."""
    work = _known()[name].work
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry = work()
        except Exception as error:  # an entry for each configuration, whatever happens in it
            kind = type(error)
            ours = kind.__module__.split(".")[0] == "sartor"
            text = " ".join(str(error).split())[:200]
            entry = {"refused": kind.__name__} if ours else {"failed": f"{kind.__name__}: {text}"}
            if ours:
                print(f"  refused {name}: {text}", file=sys.stderr)
    return name, entry, time.perf_counter() - began


def measure_all(names: Sequence[str], jobs: int) -> dict[str, Entry]:
    """Run configurations, in several processes if asked, and print how far it is."""
    found: dict[str, Entry] = {}
    spent: list[tuple[float, str]] = []
    began = time.perf_counter()

    def collect(outcomes: typing.Iterable[tuple[str, Entry, float]]) -> None:
        for name, entry, seconds in outcomes:
            found[name] = entry
            spent.append((seconds, name))
            if "failed" in entry:
                print(f"  failed {name}: {entry['failed']}", flush=True)
            if len(found) % 50 == 0 or len(found) == len(names):
                passed = time.perf_counter() - began
                print(f"{len(found)} of {len(names)}, {passed:.0f} s", flush=True)

    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            collect(pool.imap_unordered(measure, names, chunksize=4))
    else:
        collect(map(measure, names))
    slow = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(spent)[:-6:-1])
    print(f"slowest: {slow}")
    return {name: found[name] for name in names}


NEAR = 1e-6
"""How far numbers that depend on measured times may differ, of themselves."""


def differences(one: Entry, other: Entry) -> dict[str, float]:
    """Return what differs: the field, and by how much of itself; infinity if it is no number."""
    found = {}
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        gap = math.inf
        if isinstance(a, int | float) and isinstance(b, int | float) and a != b:
            gap = abs(a - b) / max(abs(a), abs(b))
        if a != b and not (name.startswith("about_") and gap <= NEAR):
            found[name] = gap
    return found


FIELDS = ("digest", "accuracy", "loss", "weights", "bytes", "gradients")
"""The fields of an entry of a result, in the order of its line: most entries are of this kind."""


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write a record, one line a configuration: the values of ``FIELDS``, or a dict."""
    about = {"sartor": sartor.__version__, "torch": torch.__version__, "numpy": np.__version__}
    lines = [f'"about":{json.dumps(about)}', f'"fields":{json.dumps(FIELDS)}']
    for name, entry in entries.items():
        value = list(entry.values()) if tuple(entry) == FIELDS else entry
        lines.append(f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}")
    path.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def read(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read a record: the entries by name, and the versions with which it was made."""
    found = json.loads(path.read_text(encoding="utf-8"))
    about, fields = found.pop("about"), found.pop("fields")
    entries = {
        name: dict(zip(fields, value, strict=True)) if isinstance(value, list) else value
        for name, value in found.items()
    }
    return entries, about


def compare(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> int:
    """Print what is equal and what differs; return the number of configurations that differ."""
    missing = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    all_gaps = {name: differences(old[name], new[name]) for name in old if name in new}
    changed = {name: gaps for name, gaps in all_gaps.items() if gaps}
    largest = 0.0
    for name, gaps in changed.items():
        stories = [e.get("refused") or e.get("failed") for e in (old[name], new[name])]
        if any(stories):
            print(f"differs: {name}: {stories[0] or 'trained'} -> {stories[1] or 'trained'}")
            continue
        shown = {field: gap for field, gap in gaps.items() if field != "digest"}
        largest = max([largest, *shown.values()])
        words = ", ".join(f"{field} by {gap:.1e} of itself" for field, gap in shown.items())
        print(f"differs: {name}: {words or 'the digest, but no number that is recorded'}")
    for words, names in (("missing", missing), ("new", added)):
        for name in names:
            print(f"{words}: {name}")
    groups = dict.fromkeys(name.split("/")[0] for name in old)
    for group in groups:
        mine = [name for name in old if name.split("/")[0] == group]
        equal = sum(name in new and name not in changed for name in mine)
        print(f"{group}: {equal} of {len(mine)} equal")
    equal = len(old) - len(changed) - len(missing)
    print(
        f"{equal} equal, {len(changed)} different, {len(missing)} missing, {len(added)} new; "
        f"largest relative difference {largest:.1e}"
    )
    return len(changed) + len(missing) + len(added)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.same_numbers")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="record the numbers")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare with a record")
    what.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--only", metavar="PATTERN", help="names such as 'reference/fedavg/*'")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    chosen = parser.parse_args(arguments)

    def wanted(names: typing.Iterable[str]) -> list[str]:
        return [n for n in names if not chosen.only or fnmatch.fnmatchcase(n, chosen.only)]

    names = wanted(_known())
    if chosen.list:
        print("\n".join(names))
        return 0
    if chosen.write:
        entries = measure_all(names, chosen.jobs)
        write(chosen.write, entries)
        refused = sum("refused" in entry for entry in entries.values())
        failed = sum("failed" in entry for entry in entries.values())
        print(f"{len(entries)} recorded, {refused} of them refused, {failed} failed")
        return 1 if failed else 0
    old, about = read(chosen.against)
    print("against", ", ".join(f"{name} {version}" for name, version in about.items()))
    kept = wanted(old)
    entries = measure_all(names, chosen.jobs)
    return 1 if compare({name: old[name] for name in kept}, entries) else 0


if __name__ == "__main__":
    sys.exit(main())
