"""Class weights: the losses of rare classes count for more where a model is trained.

| symbol | here | meaning |
|---|---|---|
| w_c | class_weight_0, class_weight_1, ... | the weight of class c, a hyper-parameter |
| n_i, n_ic, K_i | | samples of client i for training, those of class c, classes it has |

A step descends (1/B) Σ_b w_{y_b} ℓ_b in place of (1/B) Σ_b ℓ_b. ``balanced`` gives every client
weights of its own, w_ic = n_i/(K_i n_ic), which need nothing that it does not know: their mean over
its samples is 1, so that a rate means the same. A client with one class has weights of 1. What is
measured stays plain: test and validation losses, early stopping, the choice of ``do_no_harm``.
"""

from __future__ import annotations

from typing import Any

import torch

from sartor.compose.fields import viewed
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.method import ClientContext, Method, Phase, changed
from sartor.core.task import Task, Weighted, cross_entropy, weighing
from sartor.core.tree import Tree

NAME = "class_weight_"


def checked(task: Task, weights: str | tuple[float, ...]) -> tuple[float, ...]:
    """Return the weight of every class, 1 where each client has its own; or refuse."""
    if task.kind != "classification" or getattr(task.criterion, "plain", None) is not cross_entropy:
        what = "gives its own loss" if task.measured_as is None else f"learns {task.kind}"
        raise ConfigError(f"class_weights are for classification, and this network {what}.")
    classes = task.num_classes
    if weights == "balanced":
        return (1.0,) * classes
    found = tuple(float(weight) for weight in weights)
    if len(found) != classes or not all(weight >= 0 for weight in found) or not any(found):
        raise ConfigError(
            f"class_weights must be 'balanced' or {classes} numbers >= 0, one for every class in "
            f"the order of the labels, got {list(found)}."
        )
    return found


def weighted(method: Method, weights: tuple[float, ...]) -> Method:
    """Let every step of a method descend weighted losses; its task has a ``Weighted`` criterion."""
    names = [f"{NAME}{c}" for c in range(len(weights))]
    note = "how much the losses of this class count in training"

    def same(ctx: Any) -> Any:
        return ctx

    def phase(one: Phase) -> Phase:
        def step(work: Tree, batch: Any, ctx: ClientContext) -> Tree:
            with weighing(torch.stack([ctx.hyper[name] for name in names])):
                return one.step(work, batch, ctx)

        return Phase(**{**vars(one), "step": step})

    more = {name: Hyper(w, 0.0, note=note) for name, w in zip(names, weights, strict=True)}
    return changed(viewed(method, same, same, phase), hyper={**method.hyper, **more})


def for_weights(task: Task) -> Task:
    """Return the task with losses that can be weighted where they are descended."""
    return task.with_criterion(Weighted(task.criterion))
