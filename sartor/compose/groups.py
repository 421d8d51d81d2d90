"""A method inside every group of clients."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.compose.fields import get, viewed
from sartor.core import tree, wire
from sartor.core.errors import ConfigError
from sartor.core.method import ClientContext, Method, ServerContext, changed
from sartor.core.mixing import at, repeated
from sartor.core.tree import Tree

_PLAIN = Method("", {}, dict, dict, lambda *_: ({}, {}), dict)  # type: ignore[arg-type]
"""A record of which only the defaults matter."""


def within_groups(method: Method) -> Method:
    """Run a method inside every group of clients, as if the others did not exist.

    The server keeps one state of the method per client, equal inside a group, and the table
    ``group`` (clients,) with the group of every client. At first all clients are in one group; the
    method that is built on this record changes the table. Needed is a method whose messages are
    common to all clients, without extra rounds, whose ``aggregate`` looks at the clients that are
    present; one with other fields is refused.
    """
    fields = ("address", "connected", "message", "state", "server", "before", "after", "first")
    if given := [name for name in fields if get(method, name) != get(_PLAIN, name)]:
        raise ConfigError(
            f"{method.name} has {', '.join(given)}, which cannot be used inside groups of clients; "
            "take a method with one message for all clients and no extra rounds, such as fedavg."
        )

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
        viewed(method, view, lambda server_ctx: server_ctx),
        init_server=init_server,
        broadcast=lambda server, server_ctx: {},
        address=address,
        aggregate=aggregate,
        centre=None,
        state=None,
        sparse=wire.moved(method.wire.sparse, {"common": "own", "upload": "upload"}),
    )
