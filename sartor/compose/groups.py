"""A method inside every group of clients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.method import Hub, Method, Phase, Site
from sartor.core.mixing import at, repeated
from sartor.core.tree import Tree


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
        return {"rows": repeated(one, num), "group": torch.zeros_like(hub.sizes)}

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
