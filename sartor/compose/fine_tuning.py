"""Fine-tuning: every client trains its model further, on a copy, before it is used."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.core.tree import Tree


def fine_tuned(
    method: Method,
    task: Task,
    local: Local,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    pull: bool = False,
) -> Method:
    """Let every client train its model further, on a copy, before it is used.

    The model that the method would use takes some more steps of plain SGD on the client's training
    data; training is not affected. What is used is then the model before local training ("pre"),
    fine-tuned.

    Args:
        method: any method.
        task: its network and loss.
        local: batches, momentum and decay of fine-tuning.
        epochs: passes over the training data; those of local training if None.
        steps: mini-batch steps; replaces epochs.
        pull: whether fine-tuning is pulled back to where it began, with strength
            ``ft_prox_strength``.
    """
    for name, length in (("epochs", epochs), ("steps", steps)):
        if length is not None and length < 0:
            raise ConfigError(f"{name} of fine-tuning must be >= 0, got {length}; 0 leaves it out.")
    if steps == 0 or (steps is None and epochs == 0):
        return method
    longer = replace(
        local,
        epochs=epochs or local.epochs,
        steps=steps or (None if epochs else local.steps),
        keep_optimiser=False,
    )

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        tuned = work["tuned"]
        value = task.loss({**tuned, **work["fixed"]}, batch, method.use.predict)
        if not pull:
            return value
        return value + half_square(ctx.hyper["ft_prox_strength"], tuned, work["anchor"])

    tune = descend(task, longer, objective, name="fine-tune", over=("tuned",), lr="ft_lr")

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        model = method.use.model(work, ctx)
        real = {k: v for k, v in model.items() if _is_real(v)}
        start = {"tuned": real, "fixed": {k: v for k, v in model.items() if k not in real}}
        return tune.enter({**start, "anchor": real} if pull else start, ctx)

    def model(work: Tree, ctx: ClientContext) -> Tree:
        if "tuned" in work:
            return {**work["tuned"], **work["fixed"]}
        return method.use.model(work, ctx)

    note = "the step size of fine-tuning; 0 leaves it out"
    hyper = {**method.hyper, "ft_lr": Hyper(local.lr, 0.0, note=note)}
    if pull:
        note = "the pull of fine-tuning back to where it began"
        hyper["ft_prox_strength"] = Hyper(0.1, 0.0, note=note)
    warm = method.schedule.first
    if warm is not None:
        first = fine_tuned(warm.method, task, local, epochs=epochs, steps=steps, pull=pull)
        warm = replace(warm, method=first)
    return changed(
        method,
        hyper=hyper,
        first=warm,
        adapt=(*method.use.adapt, replace(tune, enter=enter)),
        model=model,
        headline="pre",
    )


def _is_real(value: Tree | Tensor) -> bool:
    if isinstance(value, dict):
        return all(leaf.is_floating_point() for leaf in tree.leaves(value))
    return value.is_floating_point()
