"""FedAPA: each client receives its own mixture of all extractors.

The server learns the mixture by gradient steps.

Sun, Sun, Pan, Fu, Guo, "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation",
IJCAI 2025 (arXiv 2502.07456), Algorithm 1, Eq. (3)-(7).

| symbol | here | meaning |
|---|---|---|
| θ_j, Θ | server["bodies"] | the last upload of every client: a table over clients |
| A, a_ij | server["mix"] | the share of client j in what client i receives |
| φ_i | client["head"] | the head, which never leaves |
| θ̄_i | ctx.own | the mixture sent to client i |
| Δθ_i | delta | how far the client travelled from it |
| η | mix_lr | the step on A |
| μ | self_weight | the value of a_ii before normalising |

Differs from the paper: Eq. (7) prints A_i ← A_i − η Θᵀ(θ_i − θ̄_i), which raises the distance
½‖Δθ_i‖² that the text says it lowers; the authors' code descends. `weight_step="descent"` (default)
takes the plus sign, "as_printed" the minus; see `test_mix_step_lowers_the_proxy`. Preset
`authors_code` has momentum 0.9 over the whole matrix, serves the clients of a round one after the
other, and pins and normalises a row just before its next use. Table 3 leaves out steps: without
clipping, self weight or normalising (`clip_weights`, `pin_weights`, `normalise_weights`; the
authors' "without self weight" has the number of `self_weight=0`), and `share="all"` for the whole
model. A row that sums to nothing or less, as can be without clipping, leaves its client alone.
`sartor.theory.adaptive_mixing` has Theorem 1 and Corollary 1.

A newcomer receives the plain mean of all extractors, and trains it with a head of its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import ClientContext, Method, ServerContext, changed
from sartor.core.mixing import clip, combine, inner, normalise, pin_self, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train


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
    """Build FedAPA: min Σ p_i L_i(θ_i, φ_i), each round from θ̄_i = Σ_j a_ij θ_j.

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
    sign = 1.0 if weight_step == "descent" else -1.0

    def is_shared(leaf: str) -> bool:
        return share == "all" or task.is_body(leaf)

    def is_kept(leaf: str) -> bool:
        return not is_shared(leaf)

    if not any(is_shared(leaf) for leaf in task.leaf_names):
        raise ConfigError(
            "FedAPA shares the body of the network and keeps its head, but all parameters that "
            f"are trained belong to the head {task.head!r}; use a network with a body (such as "
            "dnn), unfreeze a part of it, or set share='all'."
        )

    def settle(rows: Tensor, own: Tensor, ctx: ServerContext) -> Tensor:
        """Pin the self weight and normalise: post-processing (2) and (3) of Alg. 1."""
        if pin_weights:
            rows = pin_self(rows, own, ctx.hyper["self_weight"])
        return normalise(rows, own) if normalise_weights else rows

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        num, like = ctx.sizes.shape[0], tree.leaves(params)[0]
        mix = torch.eye(num, dtype=like.dtype, device=like.device)
        server = {"bodies": repeated(tree.select(params, is_shared), num), "mix": mix}
        return {**server, "velocity": torch.zeros_like(mix)} if momentum else server

    def rows_in_use(server: Tree, ids: Tensor, ctx: ServerContext) -> Tensor:
        """Return the rows of A that clients are served with: (n, clients)."""
        rows = server["mix"].index_select(0, ids)
        # Momentum moves rows between their uses, so they are settled when they are used.
        return settle(rows, ids, ctx) if momentum else rows

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        return combine(rows_in_use(server, index.reshape(1), ctx)[0], server["bodies"])  # Eq. (5)

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        return tree.map(lambda leaf: leaf.mean(0), server["bodies"])

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"head": tree.select(params, is_kept), **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": {**ctx.own, **client["head"]}, **local.kept(client)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        state = {"head": tree.select(work["params"], is_kept), **local.kept(work)}
        return state, {"body": tree.select(work["params"], is_shared)}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        def put(mix: Tensor, rows: Tensor) -> Tensor:
            return put_rows({"": mix}, ctx.cohort, {"": rows}, ctx.present)[""]

        # Alg. 1, server, after the uploads.
        rows = rows_in_use(server, ctx.cohort, ctx)
        delta = tree.sub(uploads["body"], combine(rows, server["bodies"]))  # Eq. (6)
        slope = sign * inner(server["bodies"], delta)  # ±ΘᵀΔθ_i
        slope = torch.where(ctx.present[:, None], slope, torch.zeros_like(slope))
        push = torch.zeros_like(server["mix"]).index_copy(0, ctx.cohort, slope)
        if momentum:  # one SGD over the whole matrix: it moves the rows of the others too
            push = ctx.hyper["mix_momentum"] * server["velocity"] + push
        mix = put(server["mix"], rows) + ctx.hyper["mix_lr"] * push  # Eq. (7)
        mix = clip(mix) if clip_weights else mix  # post-processing (1): clipping
        if not momentum:
            mix = put(mix, settle(mix.index_select(0, ctx.cohort), ctx.cohort, ctx))
        moved = {"mix": mix, "velocity": push} if momentum else {"mix": mix}
        some = ctx.present.any()
        moved = {k: torch.where(some, leaf, server[k]) for k, leaf in moved.items()}
        bodies = put_rows(server["bodies"], ctx.cohort, uploads["body"], ctx.present)
        return {"bodies": bodies, **moved}

    def show(server: Tree, ctx: ServerContext) -> Tree:
        all_clients = torch.arange(ctx.sizes.shape[0], device=ctx.sizes.device)
        return {"mix": rows_in_use(server, all_clients, ctx)}

    note = "the share a client keeps, before normalising"
    own = {
        "mix_lr": Hyper(0.01, 0.0, note="0 keeps every client alone", server=True),
        "self_weight": Hyper(1.0 if as_code else 0.5, 0.0, 1.0, note=note, server=True),
        "mix_momentum": Hyper(0.9, 0.0, 1.0, note="0 is a plain step on the matrix", server=True),
    }
    unused = {"self_weight": not pin_weights, "mix_momentum": not momentum}
    return changed(
        local_train(task, local, participation="sampled"),
        name="fedapa",
        hyper={**local.hyper, **{k: v for k, v in own.items() if not unused.get(k)}},
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        finish=finish,
        aggregate=aggregate,
        headline="post",
        in_turn=one_by_one,
        private=lambda leaf: is_kept(leaf) and leaf in task.leaf_names,
        message=newcomer_message,
        server=show,
    )
