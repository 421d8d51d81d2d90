"""FedBN: FedAvg in which the normalisation layers stay at home, for clients whose inputs differ.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021 (arXiv 2102.07623).

| symbol | here | meaning |
|---|---|---|
| θ_s | server["params"] | everything else, averaged |
| γ, β | client["private"] | scales and shifts of the normalisation layers, which never leave |
| η | local_lr | the one step of both; 0.01 in the paper (batch 32, one epoch, no momentum) |
| – | relax | over-relaxation of the average; 1 is plain, as in the paper |

Differs from the paper: the statistics of BatchNorm, which stay at home in every method, are not
running ones but those of the client's training samples under the model that is used (see
`sartor/core/layers.py`). The scales and shifts of GroupNorm, LayerNorm, RMSNorm and InstanceNorm
stay at home as well. They are found by the type of the layer, at any depth, and not by "bn" in a
name. The server averages by numbers of samples; the authors, with domains of equal size, plainly
(`rule="uniform"`).

A network without such layers has nothing to keep at home, and the method is FedAvg on it, to the
bit, as the paper's rule says; this is the default, so that one comparison can run on any network.
`strict=True` refuses such a network instead.

A newcomer receives the shared layers, sets its normalisation layers to their initial scales and
shifts (those of others never travel, so there is no mean of them), and trains both on its own data
as in any round.
"""

from __future__ import annotations

from torch import nn

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.core.torch_private import NormBase
from sartor.methods.parts.partial import Average, layers, partly_shared

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, NormBase)
"""The layers that stay at home; the last is the base of BatchNorm and InstanceNorm."""


def fedbn(
    task: Task,
    local: Local,
    *,
    private: tuple[str, ...] | None = None,
    strict: bool = False,
    rule: Average = "normalized",
) -> Method:
    """Build FedBN: min over θ_s and all (γ_i, β_i) of Σ p_i L_i(θ_s, γ_i, β_i).

    Args:
        task: the network and its loss.
        local: local training, of all leaves together.
        private: names of the submodules (or leaves) that stay at home, in place of the
            normalisation layers: for layers of one's own making.
        strict: whether to refuse a network in which nothing stays at home.
        rule: how the server averages; see ``fedavg``.
    """
    norms = ((k, m) for k, m in task.module.named_modules() if isinstance(m, NORMS))
    found = tuple(leaf for name, layer in norms for leaf, _ in layer.named_parameters(prefix=name))
    at_home = layers(task, found if private is None else private)
    if strict and not any(at_home(leaf) for leaf in task.leaf_names):
        raise ConfigError(
            "fedbn keeps the normalisation layers of the network at home, but this network has no "
            "scales and shifts to train; use one with GroupNorm or LayerNorm (such as resnet8), "
            "name the private layers (private=('fc1',)), or set strict=false for plain FedAvg."
        )
    # Alg., server: all layers are averaged but those of normalisation.
    return partly_shared(task, local, lambda leaf: not at_home(leaf), name="fedbn", rule=rule)
