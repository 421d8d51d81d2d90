"""Auto: a stack of a few methods, each at its own rate; ``fit`` chooses all of its numbers.

What ``sartor.fit("auto", federation)`` trains in the end. Which parts there are, their rates and
rounds, and the weights of every client are found on held-out samples before; see
`sartor/training/auto.py`. Built by hand, all parts have equal weights.

Our own; stacking as of Wolpert, Neural Networks 1992, and Breiman, Machine Learning 1996.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from sartor.compose.stacking import stacked
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.methods.dbe import dbe
from sartor.methods.evidence import evidence
from sartor.methods.fedavg import fedavg, fedavg_ft
from sartor.methods.fedphp import fedphp
from sartor.methods.local import local as local_train
from sartor.methods.parts.priors import Sharing
from sartor.methods.pfedhn import pfedhn


def _without_rate(task: Task, local: Local, sharing: Sharing) -> Method:
    """Build ``evidence``, or one of its ends, which know no rate and take no steps to clip."""
    return evidence(task, replace(local, lr_decay=1.0, clip_norm=0.0), sharing=sharing)


ENDS: dict[str, Sharing] = {
    "evidence": "learned",
    "evidence-one": "one",
    "evidence-alone": "alone",
}
"""`evidence` and its ends, by their names among the parts."""
FACTORIES: dict[str, Callable[..., Method]] = {
    "local": local_train,
    "fedavg": fedavg,
    "fedavg-ft": fedavg_ft,
    "dbe": dbe,
    "fedphp": fedphp,
    **{name: functools.partial(_without_rate, sharing=sharing) for name, sharing in ENDS.items()},
    "pfedhn": pfedhn,
}
"""What can be a part."""
QUICK = 256
"""Parameters up to which `evidence` is tried: it factors a matrix of all of them in every step."""


def auto(
    task: Task, local: Local, *, parts: tuple[str, ...] = ("local", "fedavg", "fedavg-ft")
) -> Method:
    """Build the stack of some methods.

    Args:
        task: the network and its loss.
        local: local training of all parts.
        parts: names of methods.
    """
    unknown = [name for name in parts if name not in FACTORIES]
    if unknown or not parts or len(set(parts)) < len(parts):
        raise ConfigError(
            f"parts of auto are one or several different ones of {', '.join(FACTORIES)}; got "
            f"{', '.join(parts) or 'none'}."
        )
    if task.measured_as is None:
        raise ConfigError(
            "auto mixes predictions, and a network that gives its own loss has none; name a "
            "method, such as fedavg-ft."
        )
    return stacked("auto", task, **{slot(name): FACTORIES[name](task, local) for name in parts})


def candidates(task: Task) -> list[str]:
    """Return the methods that are worth a trial for a network."""
    names = ["local", "fedavg", "fedavg-ft"]
    if task.linear_layer is None and not all(map(task.is_head, task.leaf_names)):
        return [*names, "dbe", "fedphp"]
    if task.num_trained > QUICK or task.linear_layer is None:
        return names
    return [*names, "evidence", "evidence-one", "evidence-alone"]


def slot(name: str) -> str:
    """Return the name of a part as its hyper-parameters begin with it."""
    return name.replace("-", "_")
