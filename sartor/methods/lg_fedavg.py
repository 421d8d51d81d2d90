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
from a model that FedAvg trained for hundreds of rounds. Differs from it: the start is random, so
that hidden units of two clients agree only as far as the common start makes them; and the last
model of a client is used, not the one with the best test accuracy so far.

A newcomer receives the top layers, sets the initial lower layers under them, and trains both on
its own data as in any round (the paper lets all clients' models vote instead, for which their lower
layers would have to travel).
"""

from __future__ import annotations

from sartor.local import Local
from sartor.method import Method
from sartor.methods.partial import Average, layers, partly_shared
from sartor.task import Task


def lg_fedavg(
    task: Task,
    local: Local,
    *,
    shared: tuple[str, ...] | None = None,
    rule: Average = "normalized",
) -> Method:
    """Build LG-FedAvg: min over θ_g and all θ_l,i of Σ p_i L_i(θ_l,i, θ_g).

    Args:
        task: the network and its loss.
        local: local training, of lower and top layers together.
        shared: names of the submodules (or leaves) that are averaged; the head if None. With all of
            them the method is FedAvg, without any LocalTrain.
        rule: how the server averages; see ``fedavg``.
    """
    travels = task.is_head if shared is None else layers(task, shared)
    return partly_shared(task, local, travels, name="lg-fedavg", rule=rule, by_head=shared is None)
