"""LG-FedAvg: each client has lower layers of its own under top layers that are averaged.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020 (arXiv 2001.01523).

| symbol | here | meaning |
|---|---|---|
| θ_g | server["params"] | the global model: the top layers, averaged by numbers of samples |
| θ_l | client["private"] | the local representation: the lower layers, which never leave |
| K | shared | which layers are global; the last two or three in the authors' runs |
| η | local_lr | the step of both; 0.1 (CIFAR-10, batch 50) and 0.05 (MNIST, batch 10) there |
| β | relax | over-relaxation of the average; 1 is plain, as in the paper |

It is FedPer with the two parts exchanged: on the same split, what the two upload adds up to what
FedAvg uploads. The authors' code averages plainly (`rule="uniform"`), has momentum 0.5, and starts
from a model that FedAvg trained for hundreds of rounds: the first `warmup_rounds` of a run are
FedAvg's, with whole models on the wire, and after the last of them every client receives the lower
layers to continue with. Without them the start is random, so that hidden units of two clients agree
only as far as the common start makes them. Differs from the authors' code: the last model of a
client is used, not the one with the best test accuracy so far.

A newcomer receives the top layers, sets the initial lower layers under them, and trains both on
its own data as in any round (the paper lets all clients' models vote instead, for which their lower
layers would have to travel).
"""

from __future__ import annotations

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.local import Local
from sartor.core.method import ClientContext, FirstRounds, Method, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg
from sartor.methods.parts.partial import Average, layers, partly_shared


def lg_fedavg(
    task: Task,
    local: Local,
    *,
    shared: tuple[str, ...] | None = None,
    rule: Average = "normalized",
    warmup_rounds: int = 0,
) -> Method:
    """Build LG-FedAvg: min over θ_g and all θ_l,i of Σ p_i L_i(θ_l,i, θ_g).

    Args:
        task: the network and its loss.
        local: local training, of lower and top layers together.
        shared: names of the submodules (or leaves) that are averaged; the head if None. With all of
            them the method is FedAvg, without any LocalTrain.
        rule: how the server averages; see ``fedavg``.
        warmup_rounds: how many of the first rounds are FedAvg's, of the whole network.
    """
    refuse(below(0, "0 leaves them out.", warmup_rounds=warmup_rounds))
    # Alg., client and server: all layers train together, and the top layers are averaged.
    travels = task.is_head if shared is None else layers(task, shared)
    method = partly_shared(
        task, local, travels, name="lg-fedavg", rule=rule, by_head=shared is None
    )
    if warmup_rounds == 0:
        return method
    # FedAvg has the first rounds, and every client gets its lower layers after them. The server
    # keeps FedAvg's lower layers beside the top ones: server["below"].
    whole = fedavg(task, local, rule=rule)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        below = tree.select(params, method.wire.private)
        return {**method.init_server(params, ctx), "below": below}

    def full(server: Tree) -> Tree:
        return {"params": {**server["params"], **server["below"]}}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        new = whole.aggregate(full(server), uploads, ctx)["params"]
        top = {k: v for k, v in new.items() if not method.wire.private(k)}
        return {"params": top, "below": tree.select(new, method.wire.private)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {**client, **local.kept(work)}, {"params": work["params"]}

    first = changed(
        whole, broadcast=lambda server, ctx: full(server), finish=finish, aggregate=aggregate
    )
    handover = changed(
        first,
        broadcast=lambda server, ctx: {"below": server["below"]},
        begin=lambda client, ctx: client,
        phases=(),
        finish=lambda client, work, ctx: ({**client, "private": ctx.common["below"]}, {}),
        aggregate=lambda server, uploads, ctx: server,
    )
    return changed(
        method,
        init_server=init_server,
        aggregate=lambda server, uploads, ctx: {**server, **method.aggregate(server, uploads, ctx)},
        first=FirstRounds(warmup_rounds, first, handover),
    )
