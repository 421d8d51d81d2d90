"""Methods made of methods: fine-tuned, or inside groups of clients; `beside.py` has the rest.

Each function takes records and returns a record; none knows what the methods do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sartor import tree, wire
from sartor.errors import ConfigError
from sartor.hyper import Hyper
from sartor.local import Local, descend
from sartor.method import Batch, Hub, Method, Phase, Site
from sartor.mixing import at
from sartor.task import Task
from sartor.tree import Tree


def fine_tuned(
    method: Method,
    task: Task,
    local: Local,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    pull: bool = False,
) -> Method:
    """Let every client train its model on, on a copy, before it is used.

    The model that the method would use takes some more steps of plain SGD on the client's training
    data; training never notices. What is used is then the model before local training ("pre"),
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

    def objective(work: Tree, batch: Batch, site: Site) -> Tensor:
        loss = task.loss({**work["tuned"], **work["fixed"]}, batch, method.predict)
        if not pull:
            return loss
        lam = site.hyper["ft_prox_strength"]
        return loss + 0.5 * lam * tree.sqdist(work["tuned"], work["anchor"])

    tune = descend(objective, longer, name="fine-tune", over=("tuned",), lr="ft_lr")

    def enter(work: Tree, site: Site) -> Tree:
        model = method.model(work, site)
        real = {k: v for k, v in model.items() if _is_real(v)}
        start = {"tuned": real, "fixed": {k: v for k, v in model.items() if k not in real}}
        return tune.enter({**start, "anchor": real} if pull else start, site)

    def model(work: Tree, site: Site) -> Tree:
        if "tuned" in work:
            return {**work["tuned"], **work["fixed"]}
        return method.model(work, site)

    hyper = {
        **method.hyper,
        "ft_lr": Hyper(local.lr, 0.0, note="the step size of fine-tuning; 0 leaves it out"),
    }
    if pull:
        hyper["ft_prox_strength"] = Hyper(
            0.1, 0.0, note="the pull of fine-tuning back to where it began"
        )
    warm = method.warmup
    if warm is not None:
        first = fine_tuned(warm.method, task, local, epochs=epochs, steps=steps, pull=pull)
        warm = replace(warm, method=first)
    return replace(
        method,
        hyper=hyper,
        warmup=warm,
        adapt=(*method.adapt, replace(tune, enter=enter)),
        model=model,
        headline="pre",
    )


def _is_real(value: Tree | Tensor) -> bool:
    if isinstance(value, dict):
        return all(leaf.is_floating_point() for leaf in tree.leaves(value))
    return value.is_floating_point()


def within_groups(method: Method) -> Method:
    """Run a method inside every group of clients, as if the others did not exist.

    The server keeps one state of the method per client, equal inside a group, and the table
    ``group`` (clients,) that says who belongs together; it begins with everybody in one group, and
    whoever builds on this record sets it.

    Args:
        method: a method whose letters are common to all (it has no ``address``) and whose
            ``aggregate`` looks at the clients that are present.
    """

    def view(site: Site) -> Site:
        return site._replace(common=site.own, own={})

    def init_server(params: Tree, hub: Hub) -> Tree:
        num = hub.sizes.shape[0]
        one = method.init_server(params, hub)
        rows = tree.map(lambda leaf: leaf.expand(num, *leaf.shape).clone(), one)
        return {"rows": rows, "group": torch.zeros_like(hub.sizes)}

    def address(server: Tree, index: Tensor, hub: Hub) -> Tree:
        return method.broadcast(tree.map(lambda leaf: at(leaf, index), server["rows"]), hub)

    def aggregate(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        of_cohort = server["group"].index_select(0, hub.cohort)

        def one(row: Tree, group: Tensor) -> Tree:
            there = hub.present & (of_cohort == group)
            return method.aggregate(row, uploads, hub._replace(present=there))

        # One client after the other: all at once would need memory for every pair of clients.
        rows = torch.func.vmap(one, chunk_size=1)(server["rows"], server["group"])
        return {"rows": rows, "group": server["group"]}

    def on_view(phase: Phase) -> Phase:
        steps, when, stop = phase.steps, phase.when, phase.stop
        return replace(
            phase,
            step=lambda work, batch, site: phase.step(work, batch, view(site)),
            enter=lambda work, site: phase.enter(work, view(site)),
            leave=lambda work, site: phase.leave(work, view(site)),
            steps=(lambda site: steps(view(site))) if callable(steps) else steps,
            when=(lambda work, site: when(work, view(site))) if when else None,
            stop=(lambda work, site: stop(work, view(site))) if stop else None,
        )

    return replace(
        method,
        init_server=init_server,
        broadcast=lambda server, hub: {},
        address=address,
        begin=lambda client, site: method.begin(client, view(site)),
        phases=tuple(on_view(p) for p in method.phases),
        finish=lambda client, work, site: method.finish(client, work, view(site)),
        aggregate=aggregate,
        model=lambda work, site: method.model(work, view(site)),
        centre=None,
        sparse=wire.moved(method.sparse, {"common": "own", "upload": "upload"}),
    )
