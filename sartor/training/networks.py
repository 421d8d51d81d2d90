"""A network of one's own: what is checked before training, and what a user should know of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from sartor import models
from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation


def given_network(model: Any) -> nn.Module | None:
    """Return the network that was given, or None; a ConfigError says what to give instead."""
    if model is None or isinstance(model, nn.Module):
        return model
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ConfigError(f"model is the class {name}, not a network; make one: model={name}(...).")
    if isinstance(model, str):
        known = [*models.MODELS]
        call = f"model=sartor.models.{model}(federation)"
        advice = f"write {call}" if model in known else f"unknown{did_you_mean(model, known)}"
        raise ConfigError(f"model is the name {model!r}, not a network; {advice}.")
    if name in models.MODELS:
        raise ConfigError(
            f"model is the function {name}, not a network; call it: "
            f"model=sartor.models.{name}(federation)."
        )
    if hasattr(model, "fit") and hasattr(model, "get_params"):
        near = "dnn" if "MLP" in name else "mclr"
        raise ConfigError(
            f"model is {name}, an estimator of scikit-learn, but clients train networks of "
            f"PyTorch; the nearest is model=sartor.models.{near}(federation)"
            + (", a logistic or linear regression." if near == "mclr" else ".")
        )
    kind = "a function" if callable(model) else f"a {type(model).__name__}"
    raise ConfigError(
        f"model is {kind} ({name}), but should be a torch.nn.Module, such as "
        "sartor.models.dnn(federation); leave it out for one that fits the data."
    )


def tried(network: nn.Module, federation: Any) -> bool | None:
    """Try a network on samples; return whether it draws in training, None if that is not known."""
    if not isinstance(federation, Federation):  # a server knows their shape alone
        return None
    x, y = federation.x[:2], federation.y[:2]
    given = getattr(network, "criterion", None) == "given"
    kind = "given" if given else federation.task
    draws = models.examine(network, x, y, kind, federation.num_classes)
    models.check_buffers(network, x)
    return draws


def mapped(task: Task, federation: Any) -> Task:
    """Return a task that knows whether its network can be mapped over clients."""
    if type(task.module) in models.MAKERS or not isinstance(federation, Federation):
        return task
    why = models.unmappable(task, federation.x[:2], federation.y[:2])
    return task if why is None else replace(task, unmapped=why)


def say_of_network(
    task: Task, local: Local, federations: Sequence[Federation], engine: str = "auto"
) -> None:
    """Say what a user should know of a network: whose statistics it has, and what it costs."""
    if task.norms:
        some = ", ".join(task.norms[:3]) + (", ..." if len(task.norms) > 3 else "")
        warnings.warn(
            f"The network has BatchNorm ({some}). Its statistics are those of each client's own "
            "training samples: they are never sent and never averaged. Scales and shifts are "
            "trained like other weights; the method fedbn keeps them at home too. To keep the "
            "statistics of a trained network, put the layers in evaluation mode: .eval().",
            stacklevel=5,
        )
    if task.unmapped is not None and engine == "auto":
        warnings.warn(_cost(task, local, federations), stacklevel=5)


def _cost(task: Task, local: Local, federations: Sequence[Federation]) -> str:
    """Say what it costs that clients train one after the other; measured here and now."""
    first = federations[0]
    sizes = np.array([first.train.sizes.tolist()])
    batch = min(local.batch or int(sizes.max()), int(sizes.max()))
    seconds = models.step_seconds(task, first.x[:batch], first.y[:batch], batch)
    per_pass = np.ceil(sizes / batch).astype(int)
    steps = int(
        (np.full_like(sizes, local.steps) if local.steps else local.epochs * per_pass).sum()
    )
    return (
        f"This network cannot be mapped over clients ({task.unmapped}), so they train one after "
        "the other, by the sequential engine, on plain gradients. Measured here: "
        f"{1000 * seconds:.3g} ms a step of {batch} samples, so about {seconds * steps:.2g} s for "
        f"the {steps} local steps of a round of all {sizes.size} clients, for every run."
    )
