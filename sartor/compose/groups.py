"""A method inside every group of clients."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.compose.fields import moved_phase
from sartor.core import tree, wire
from sartor.core.method import ClientContext, Method, ServerContext, changed
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

    def view(ctx: ClientContext) -> ClientContext:
        return ctx._replace(common=ctx.own, own={})

    def init_server(params: Tree, server_ctx: ServerContext) -> Tree:
        num = server_ctx.sizes.shape[0]
        one = method.init_server(params, server_ctx)
        return {"rows": repeated(one, num), "group": torch.zeros_like(server_ctx.sizes)}

    def address(server: Tree, index: Tensor, server_ctx: ServerContext) -> Tree:
        return method.broadcast(tree.map(lambda leaf: at(leaf, index), server["rows"]), server_ctx)

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        of_cohort = server["group"].index_select(0, server_ctx.cohort)

        def one(row: Tree, group: Tensor) -> Tree:
            there = server_ctx.present & (of_cohort == group)
            return method.aggregate(row, uploads, server_ctx._replace(present=there))

        # One client after the other: all at once would need memory for every pair of clients.
        rows = torch.func.vmap(one, chunk_size=1)(server["rows"], server["group"])
        return {"rows": rows, "group": server["group"]}

    return changed(
        method,
        init_server=init_server,
        broadcast=lambda server, server_ctx: {},
        address=address,
        begin=lambda client, ctx: method.begin(client, view(ctx)),
        phases=tuple(moved_phase(p, view) for p in method.phases),
        finish=lambda client, work, ctx: method.finish(client, work, view(ctx)),
        aggregate=aggregate,
        model=lambda work, ctx: method.use.model(work, view(ctx)),
        centre=None,
        sparse=wire.moved(method.wire.sparse, {"common": "own", "upload": "upload"}),
    )
