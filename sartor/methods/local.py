"""LocalTrain: every client fits its own data, and no message is ever sent.

The floor all methods are measured from.

Folklore; `LocalTrain` in Yu et al., "The Effect of Personalization in FedProx" (arXiv 2410.08934),
Eq. (2); `PureLocalTraining` in Chen et al., "Minimax Estimation for Personalized Federated
Learning" (arXiv 2103.01901).

| symbol | here | meaning |
|---|---|---|
| w_i | client["params"] | the client's model, kept for the whole run |
| η | local_lr | the step of local training |

Differs from public code: all clients train in every round by default, since there is no server that
could sample them; ``participation="sampled"`` gives each client only its share of the compute, as
other libraries do. Momentum begins at zero in every round, as everywhere here, so that methods that
become LocalTrain do so to the bit; as nothing else is reset, ``keep_optimiser=True`` is the one
long descent that a round does not interrupt.

A newcomer trains alone, from the common start.
"""

from __future__ import annotations

from typing import Literal

from sartor.core.local import Local, descend
from sartor.core.method import ClientContext, Method, Schedule, ServerContext, Wire
from sartor.core.task import Task
from sartor.core.tree import Tree


def local(task: Task, local: Local, *, participation: Literal["all", "sampled"] = "all") -> Method:
    """Build LocalTrain: min_w L_i(w) on every client alone.

    Args:
        task: the network and its loss.
        local: local training.
        participation: all clients in every round, whatever the participation rule, or only the
            sampled ones.
    """

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"params": params, **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return client

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return work, {}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        return server

    return Method(
        name="local",
        hyper=local.hyper,
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        phases=(descend(task, local),),  # Eq. (2) of Yu et al.: min_w L_i(w)
        finish=finish,
        aggregate=aggregate,
        schedule=Schedule(who="everyone" if participation == "all" else "cohort"),
        wire=Wire(private=lambda leaf: True),
    )
