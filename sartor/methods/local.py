"""LocalTrain: every client fits its own data and never talks to anybody.

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
other libraries do.

A newcomer trains alone, from the common start.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from sartor.core.local import Local, descend
from sartor.core.method import Batch, Hub, Method, Site
from sartor.core.task import Task
from sartor.core.tree import Tree


def local(task: Task, local: Local, *, participation: Literal["all", "sampled"] = "all") -> Method:
    """Build LocalTrain: min_w L_i(w) on every client alone.

    Args:
        task: the network and its loss.
        local: local training.
        participation: everybody in every round, whatever the participation rule, or only the
            sampled clients.
    """

    def init_server(params: Tree, hub: Hub) -> Tree:
        return {}

    def init_client(params: Tree, site: Site) -> Tree:
        return {"params": params, **local.start(params=params)}

    def begin(client: Tree, site: Site) -> Tree:
        return client

    def objective(work: Tree, batch: Batch, site: Site) -> Tensor:
        return task.loss(work["params"], batch)

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        return work, {}

    def aggregate(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        return server

    return Method(
        name="local",
        hyper=local.hyper,
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        phases=(descend(objective, local),),
        finish=finish,
        aggregate=aggregate,
        private=lambda leaf: True,
        everyone=participation == "all",
    )
