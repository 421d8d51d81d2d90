"""The methods: an explicit dict, name -> entry. One file per method; no import tricks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sartor.compose import fine_tuned
from sartor.errors import ConfigError, did_you_mean
from sartor.local import Local
from sartor.method import Method
from sartor.methods.dichotomous import dichotomous
from sartor.methods.ditto import ditto
from sartor.methods.entry import COMMON, PAPERS, Factory, MethodEntry, fits, say, static_options
from sartor.methods.fedapa import fedapa
from sartor.methods.fedavg import fedavg, fedavg_ft
from sartor.methods.fedprox import fedprox
from sartor.methods.fedprox_two_stage import fedprox_two_stage
from sartor.methods.l2gd import l2gd
from sartor.methods.local import local
from sartor.methods.per_fedavg import per_fedavg
from sartor.methods.pfedbred import pfedbred
from sartor.methods.pfedme import pfedme
from sartor.task import Task

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
    "fedprox-two-stage": MethodEntry(
        fedprox_two_stage,
        "FedProx, and a last local stage around the final global model",
        "Chen et al., Minimax Estimation for Personalized FL, JMLR 2023",
        "model down, model up",
        "regularised",
        ("Chen",),
    ),
    "dichotomous": MethodEntry(
        dichotomous,
        "FedAvg or local, whichever does better on held-out samples",
        "Chen et al., Minimax Estimation for Personalized FL, JMLR 2023, section 3.3",
        "model down, model up; two scores up once",
        "regularised",
        ("Yu", "Chen"),
    ),
    "ditto": MethodEntry(
        ditto,
        "FedAvg, and beside it own models pulled towards its model",
        "Li et al., Ditto, ICML 2021",
        "model down, model up",
        "regularised",
        ("Yu", "PRIOR"),
    ),
    "per-fedavg": MethodEntry(
        per_fedavg,
        "a start from which one local step gives a good model",
        "Fallah et al., NeurIPS 2020",
        "model down, model up",
        "regularised",
        ("PRIOR",),
    ),
    "pfedme": MethodEntry(
        pfedme,
        "own proximal points; the global model follows them",
        "T. Dinh et al., NeurIPS 2020",
        "model down, model up",
        "regularised",
        ("Yu", "PRIOR"),
    ),
    "pfedbred": MethodEntry(
        pfedbred,
        "pFedMe around a centre of one's own, in Bregman distance",
        "Shi et al., PRIOR, NeurIPS 2023",
        "model down, model up",
        "regularised",
        ("PRIOR",),
    ),
    "l2gd": MethodEntry(
        l2gd,
        "a coin: local gradient steps, or a step towards the average",
        "Hanzely, Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020",
        "average down, model up",
        "regularised",
        ("Yu", "Chen"),
    ),
    "fedapa": MethodEntry(
        fedapa,
        "own mixture of all extractors, learnt by the server",
        "Sun et al., FedAPA, IJCAI 2025",
        "extractor down, extractor up",
        "collaborative",
        ("FedAPA",),
    ),
}


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
        elif not fits(value, known[name][1]):
            faults.append(f"Option {name} must be {say(known[name][1])}, got {value!r}.")
    if faults:
        raise ConfigError("\n".join(faults))
    own = {name: value for name, value in options.items() if name not in COMMON}
    steps, epochs = options.get("finetune_steps"), options.get("finetune_epochs")
    record = factory(task, local, **own)
    if steps is None and epochs is None:
        return record
    return fine_tuned(record, task, local, steps=steps, epochs=epochs)


def find(method: str | Factory) -> Factory:
    """Return the factory of a name, or the factory itself."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ConfigError(f"Unknown method {method!r}{did_you_mean(method, METHODS)}")
    return METHODS[method].factory


def expand(names: Sequence[str]) -> list[str]:
    """Replace ``all`` and ``all-FAMILY`` by the methods they stand for; each once.

    >>> expand(["local", "all-baseline"])
    ['local', 'fedavg', 'fedavg-ft']
    """
    families = dict.fromkeys(entry.family for entry in METHODS.values())
    groups = {f"all-{f}": [k for k, e in METHODS.items() if e.family == f] for f in families}
    groups["all"] = list(METHODS)
    for name in names:
        if name.startswith("all") and name not in groups and name not in METHODS:
            raise ConfigError(f"Unknown group of methods {name!r}{did_you_mean(name, groups)}")
    return list(dict.fromkeys(one for name in names for one in groups.get(name, [name])))


def _name(method: str | Factory) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", "method")


__all__ = [
    "COMMON",
    "METHODS",
    "PAPERS",
    "Factory",
    "MethodEntry",
    "build",
    "expand",
    "find",
    "static_options",
]
