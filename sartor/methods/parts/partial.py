"""Networks of which some leaves are shared and the others stay at home: what several methods need.

FedPer, FedRep, FedBABU, LG-FedAvg and FedBN are FedAvg on the shared leaves; they differ in which
leaves those are, and in which are trained when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from sartor.core import tree
from sartor.core.errors import ConfigError, did_you_mean, refuse
from sartor.core.local import Local, descend
from sartor.core.method import ClientContext, Method, Phase, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg

Leaves = Callable[[str], bool]
"""A predicate on the names of leaves."""

Average = Literal["normalized", "uniform"]
"""How the server averages: by numbers of samples, or plainly."""


def partly_shared(
    task: Task,
    local: Local,
    is_shared: Leaves,
    *,
    name: str,
    rule: Average = "normalized",
    by_head: bool = False,
) -> Method:
    """Build FedAvg on the shared leaves, while each client keeps the others for itself.

    All leaves are trained together; a method with another order replaces the phases. If all leaves
    are shared this is FedAvg to the bit, and if none is, LocalTrain in the client's own rounds.

    With ``by_head`` the split is that into head and body, so a network without one of them is
    refused when a simulation is made.
    """
    base = fedavg(task, local, rule=rule)

    def is_private(leaf: str) -> bool:
        return leaf in task.leaf_names and not is_shared(leaf)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        if by_head:
            _check_head(name, task)
        return base.init_server(tree.select(params, is_shared), ctx)

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"private": tree.select(params, is_private), **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": {**ctx.common["params"], **client["private"]}, **local.kept(client)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        private = tree.select(work["params"], is_private)
        shared = tree.select(work["params"], is_shared)
        return {"private": private, **local.kept(work)}, {"params": shared}

    return changed(
        base,
        name=name,
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        finish=finish,
        centre=None,
        private=is_private,
    )


def train_part(
    task: Task, local: Local, part: Leaves, *, name: str = "train", lr: str = "local_lr"
) -> Phase:
    """Build the phase that trains some leaves of ``work["params"]`` and leaves the others fixed.

    Momentum that is kept between rounds belongs to the leaves: that of the others stays too.
    """
    local.one_past("a method that trains parts in turn")
    phase = descend(task, local, name=name, lr=lr, train=part)
    if not local.keeps:
        return phase

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        all_of_it = work["velocity"]["params"]
        moving = {"velocity": {"params": tree.select(all_of_it, part)}}
        return phase.enter({**work, **moving, "resting": all_of_it}, ctx)

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        work = dict(phase.leave(work, ctx))
        velocity = {"params": {**work.pop("resting"), **work["velocity"]["params"]}}
        return {**work, "velocity": velocity}

    return replace(phase, enter=enter, leave=leave)


def layers(task: Task, names: tuple[str, ...]) -> Leaves:
    """Return the predicate of the leaves that belong to the named submodules, at any depth.

    A dotted name may also be that of a single leaf; one that the network does not have is refused.
    """
    known = [name for name, _ in task.module.named_modules() if name]
    known += [name for name, _ in task.module.named_parameters()]
    refuse(
        f"The network has no layer {name!r}{did_you_mean(name, known)}"
        for name in names
        if name not in known
    )
    return lambda leaf: any(leaf == name or leaf.startswith(f"{name}.") for name in names)


def check_whole_head(name: str, task: Task) -> None:
    """Refuse a network of whose head a part is frozen: the method writes all of it."""
    if task.head is None:
        return
    frozen = [leaf for leaf in task.fixed if task.is_head(leaf)]
    if frozen:
        raise ConfigError(
            f"{name} makes the head of the network itself, but {', '.join(frozen)} is frozen; "
            "unfreeze it."
        )


def _check_head(name: str, task: Task) -> None:
    """Refuse a network that is not made of a body and a head."""
    apart = f"{name} treats the body and the head of the network apart, but"
    if task.head is None:
        raise ConfigError(
            f"{apart} no head is named; set module.head to the name of the last layer, such as "
            "'fc'."
        )
    if not any(task.is_head(leaf) for leaf in task.leaf_names):
        raise ConfigError(f"{apart} its head {task.head!r} is frozen; unfreeze it.")
    if not any(task.is_body(leaf) for leaf in task.leaf_names):
        raise ConfigError(
            f"{apart} all parameters that it trains belong to the head {task.head!r}; use a "
            "network with a body, such as dnn, or unfreeze a part of it."
        )
