"""FedAPA: each client receives its own mixture of all extractors.

The server learns the mixture by gradient steps.

Sun, Sun, Pan, Fu, Guo, "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation",
IJCAI 2025 (arXiv 2502.07456), Algorithm 1, Eq. (3)-(7).

| symbol | here | meaning |
|---|---|---|
| θ_j, Θ | server["bodies"] | the last upload of every client: a table over clients |
| A, a_ij | server["mix"] | the share of client j in what client i receives |
| φ_i | client["head"] | the head, which never leaves |
| θ̄_i | site.own | the mixture sent to client i |
| Δθ_i | delta | how far the client travelled from it |
| η | mix_lr | the step on A |
| μ | self_weight | the value of a_ii before normalising |

Differs from the paper: Eq. (7) prints A_i ← A_i − η Θᵀ(θ_i − θ̄_i), which raises the distance
½‖Δθ_i‖² that the text says it lowers; the authors' code descends. `weight_step="descent"` (default)
takes the plus sign, "as_printed" the minus; see `test_mix_step_lowers_the_proxy`. Preset
`authors_code` has momentum 0.9 over the whole matrix, serves the clients of a round one after the
other, and pins and normalises a row just before its next use.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sartor import tree
from sartor.errors import ConfigError
from sartor.hyper import Hyper
from sartor.local import Local, descend
from sartor.method import Batch, Hub, Method, Site
from sartor.mixing import at, clip, combine, inner, normalise, pin_self, put_rows
from sartor.task import Task
from sartor.tree import Tree


def fedapa(
    task: Task,
    local: Local,
    *,
    preset: Literal["paper", "authors_code"] = "paper",
    weight_step: Literal["descent", "as_printed"] = "descent",
    clip_weights: bool = True,
    pin_weights: bool = True,
    normalise_weights: bool = True,
    share: Literal["body", "all"] = "body",
    schedule: Literal["parallel", "sequential"] | None = None,
    server_momentum: bool | None = None,
) -> Method:
    """Build FedAPA.

    Args:
        task: the network and its loss; its head stays private.
        local: local training, head and extractor together.
        preset: `paper` (parallel, no server momentum, self weight 0.5) or `authors_code`
            (sequential, momentum 0.9, self weight 1).
        weight_step: the sign of Eq. (7).
        clip_weights: clip A to [0, 1].
        pin_weights: set a_ii to the self weight.
        normalise_weights: divide each row by its sum.
        share: share the extractor (partial model sharing) or the whole model.
        schedule: overrides the preset's.
        server_momentum: overrides the preset's.
    """
    as_code = preset == "authors_code"
    one_by_one = (schedule or ("sequential" if as_code else "parallel")) == "sequential"
    momentum = as_code if server_momentum is None else server_momentum
    is_shared = task.is_body if share == "body" else (lambda leaf: True)
    if not any(is_shared(leaf) for leaf in task.leaf_names):
        raise ConfigError(
            "FedAPA shares the body of the network and keeps its head, but all parameters of this "
            "network belong "
            f"to the head {task.head!r}; use a network with a body (such as dnn), or share='all'."
        )
    sign = 1.0 if weight_step == "descent" else -1.0

    def settle(rows: Tensor, own: Tensor, hub: Hub) -> Tensor:
        """Pin the self weight and normalise (steps 6b, 6c)."""
        if pin_weights:
            rows = pin_self(rows, own, hub.hyper["self_weight"])
        return normalise(rows, own) if normalise_weights else rows

    def init_server(params: Tree, hub: Hub) -> Tree:
        body, num = tree.select(params, is_shared), hub.sizes.shape[0]
        table = tree.map(lambda leaf: leaf.expand(num, *leaf.shape).clone(), body)
        first = tree.leaves(params)[0]
        mix = torch.eye(num, dtype=first.dtype, device=first.device)
        server = {"bodies": table, "mix": mix}
        return {**server, "velocity": torch.zeros_like(mix)} if momentum else server

    def row_in_use(server: Tree, ids: Tensor, hub: Hub) -> Tensor:
        """Return the rows of A that clients are served with: (n, clients)."""
        rows: Tensor = server["mix"].index_select(0, ids)
        # Momentum moves rows between their uses, so they are settled when they are used.
        return settle(rows, ids, hub) if momentum else rows

    def address(server: Tree, index: Tensor, hub: Hub) -> Tree:
        row = at(row_in_use(server, index.reshape(1), hub), torch.zeros_like(index))
        return combine(row, server["bodies"])  # Eq. (5)

    def init_client(params: Tree, site: Site) -> Tree:
        return {
            "head": tree.select(params, lambda leaf: not is_shared(leaf)),
            **local.start(params=params),
        }

    def begin(client: Tree, site: Site) -> Tree:
        return {"params": {**site.own, **client["head"]}, **local.kept(client)}

    def objective(work: Tree, batch: Batch, site: Site) -> Tensor:
        return task.loss(work["params"], batch)

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        head = tree.select(work["params"], lambda leaf: not is_shared(leaf))
        return {"head": head, **local.kept(work)}, {"body": tree.select(work["params"], is_shared)}

    def aggregate(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        rows = row_in_use(server, hub.cohort, hub)
        delta = tree.sub(uploads["body"], combine(rows, server["bodies"]))  # Eq. (6)
        slope = sign * inner(server["bodies"], delta)  # ±ΘᵀΔθ_i
        slope = torch.where(hub.present[:, None], slope, torch.zeros_like(slope))
        rate = hub.hyper["mix_lr"]
        bodies = put_rows(server["bodies"], hub.cohort, uploads["body"], hub.present)
        if not momentum:
            rows = rows + rate * slope  # Eq. (7)
            rows = clip(rows) if clip_weights else rows
            rows = settle(rows, hub.cohort, hub)
            mix = put_rows({"mix": server["mix"]}, hub.cohort, {"mix": rows}, hub.present)
            return {"bodies": bodies, **mix}
        # One SGD over the whole matrix: the rows of absent clients move along their decayed buffer
        # too.
        used = put_rows({"mix": server["mix"]}, hub.cohort, {"mix": rows}, hub.present)["mix"]
        push = torch.zeros_like(used).index_copy(0, hub.cohort, slope)
        velocity = hub.hyper["mix_momentum"] * server["velocity"] + push
        mix = used + rate * velocity
        moved = {"mix": clip(mix) if clip_weights else mix, "velocity": velocity}
        somebody = hub.present.any()
        kept = {k: torch.where(somebody, moved[k], server[k]) for k in moved}
        return {"bodies": bodies, **kept}

    def inspect(server: Tree, hub: Hub) -> Tree:
        return {
            "mix": row_in_use(
                server, torch.arange(hub.sizes.shape[0], device=hub.sizes.device), hub
            )
        }

    hyper = {
        **local.hyper,
        "mix_lr": Hyper(0.01, 0.0, note="0 keeps every client alone", server=True),
    }
    if pin_weights:
        own = 1.0 if as_code else 0.5
        hyper["self_weight"] = Hyper(
            own, 0.0, 1.0, note="the share a client keeps, before normalising", server=True
        )
    if momentum:
        hyper["mix_momentum"] = Hyper(
            0.9, 0.0, 1.0, note="0 is a plain step on the mixing matrix", server=True
        )
    return Method(
        name="fedapa",
        hyper=hyper,
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        phases=(descend(objective, local),),
        finish=finish,
        aggregate=aggregate,
        private=lambda leaf: not is_shared(leaf) and leaf in task.leaf_names,
        headline="post",
        one_by_one=one_by_one,
        inspect=inspect,
    )
