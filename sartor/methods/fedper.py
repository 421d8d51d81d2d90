"""FedPer: the lower layers are averaged, the last ones stay private, and all train together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019
(arXiv 1912.00818).

| symbol | here | meaning |
|---|---|---|
| W_B | server["params"] | the base layers, averaged by numbers of samples |
| W_P | client["private"] | the personalisation layers, which never leave |
| η | local_lr | the one step of both; 0.01 in the paper |
| K_P | private | which layers are private; the last one to four blocks in the paper |
| β | relax | over-relaxation of the average; 1 is plain, as in the paper |

Differs from the paper: the head is the private part unless other layers are named, and all clients
begin with one random model, private layers included, so that runs of different methods start at
the same point. The paper trains 4 epochs of batch 128 a round, with all clients.

A newcomer receives the base layers, sets the initial private layers on them, and trains both on
its own data as in any round.
"""

from __future__ import annotations

from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.methods.parts.partial import Average, layers, partly_shared


def fedper(
    task: Task,
    local: Local,
    *,
    private: tuple[str, ...] | None = None,
    rule: Average = "normalized",
) -> Method:
    """Build FedPer: min over W_B and all W_P,i of Σ p_i L_i(W_B, W_P,i).

    Args:
        task: the network and its loss.
        local: local training, of base and private layers together.
        private: names of the submodules (or leaves) that stay at home; the head if None. Without
            any the method is FedAvg, with all of them LocalTrain.
        rule: how the server averages; see ``fedavg``.
    """
    at_home = task.is_head if private is None else layers(task, private)
    # Alg., client and server: all layers train together, and the base layers are averaged.
    return partly_shared(
        task,
        local,
        lambda leaf: not at_home(leaf),
        name="fedper",
        rule=rule,
        by_head=private is None,
    )
