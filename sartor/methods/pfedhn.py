"""pFedHN: a hypernetwork on the server turns an embedding of each client into its model.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021
(arXiv 2103.04628). `share="body"` is pFedHN-PC: the head stays private.

| symbol | here | meaning |
|---|---|---|
| φ | server["weights"]["net"] | the hypernetwork; it never travels |
| v_i | server["weights"]["embed"] | the embeddings: a table over clients |
| θ_i = h(v_i; φ) | ctx.own | the generated parameters, sent to client i |
| θ̃_i | upload | the same after local training |
| ω_i | client["head"] | the private head (`share="body"`) |
| α | server_lr | the step on φ; that on v is embed_lr_ratio · α |

The server descends ½‖θ̃_i − h(v_i; φ)‖² with θ̃_i fixed, whose gradient is the pull-back of start
minus end: Algorithm 1 prints the other sign, the authors' code does not. One SGD with momentum and
decay moves φ and all embeddings, also those of absent clients; the norm of its gradient is clipped.

The authors' values: server_lr 0.01 (0.05 with private heads), momentum 0.9, decay 1e-3, clip 50,
embedding 1 + n/4, three hidden layers of 100, 5000 rounds of one client, 50 local steps of batch
64, local_lr 0.005, momentum 0.9 and weight decay 5e-5, an optimiser made anew. Their clients clip
gradients at norm 50 too (`clip_norm=50` of local training). With `keep_optimiser` the momentum of a
private head survives the round, as theirs does; what was generated starts without momentum.
A newcomer receives the model that the mean embedding generates; a private head starts anew.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import ConfigError, below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import ClientContext, Method, ServerContext, changed
from sartor.core.mixing import at
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train
from sartor.methods.parts.starts import linear


def pfedhn(
    task: Task,
    local: Local,
    *,
    share: Literal["all", "body"] = "all",
    hypernetwork: Literal["mlp", "linear", "table"] = "mlp",
    hn_update: Literal["sequential", "mean"] = "sequential",
    evaluate: Literal["generated", "after_local"] = "generated",
    embedding: int | None = None,
    hidden: int = 100,
    hidden_layers: int = 3,
    server_clip: float | None = 50.0,
) -> Method:
    """Build pFedHN: min over φ and v of the mean of L_i(h(v_i; φ)).

    Args:
        task: the network and its loss.
        local: local training.
        share: generate the whole model, or all but the head, which then stays private (pFedHN-PC).
        hypernetwork: `mlp`; `linear`, θ = Φv; or `table`, one free vector per client.
        hn_update: a server step after each client, so that later ones see it, or one step per round
            along the mean gradient.
        evaluate: whether generated models are used as they are, or after local training.
        embedding: the length of v; 1 + clients // 4 if None.
        hidden: the width of the hypernetwork.
        hidden_layers: how many layers of that width follow its first.
        server_clip: the largest norm of the server's gradient; None does not clip.
    """
    faults = below(1, "leave it out for 1 + clients/4.", embedding=embedding)
    faults += below(1, "the paper takes 100.", hidden=hidden)
    faults += below(0, "the paper takes 3.", hidden_layers=hidden_layers)
    if server_clip is not None and not server_clip > 0:
        faults.append(f"server_clip must be > 0, got {server_clip:g}; None does not clip.")
    refuse(faults)
    is_shared = task.is_body if share == "body" else (lambda leaf: True)
    leaves = {k: task.module.get_parameter(k).shape for k in sorted(task.leaf_names)}
    shapes = {k: shape for k, shape in leaves.items() if is_shared(k)}
    if not shapes:
        raise ConfigError(
            "pFedHN with share='body' generates the body of the network, but all parameters that "
            f"are trained belong to the head {task.head!r}; use share='all'."
        )

    local.one_past("pfedhn")

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        num, like = ctx.sizes.shape[0], tree.leaves(params)[0]
        if hypernetwork == "table":
            flat = tree.flat({k: params[k] for k in shapes})
            weights = {"net": {}, "embed": flat.expand(num, -1).clone()}
        else:
            size = embedding or 1 + num // 4
            key = rng.fold(ctx.key, "hypernetwork")
            embed = rng.normal(rng.fold(key, "embed"), (num, size), like.dtype)
            layers = 0 if hypernetwork == "linear" else hidden_layers + 1
            net = {}
            for j in range(layers):
                net[f"layer{j}"] = linear(rng.fold(key, j), hidden if j else size, hidden, like)
            for name, shape in shapes.items():
                width = hidden if layers else size
                out = linear(rng.fold(key, name), width, math.prod(shape), like)
                net[f"to {name}"] = out if layers else {"weight": out["weight"]}
            weights = {"net": net, "embed": embed}
        return {"weights": weights, "velocity": tree.zeros_like(weights)}

    def generate(net: Tree, v: Tensor) -> Tree:
        """Return h(v; φ) for embeddings (..., e): leaves (..., *shape)."""
        if hypernetwork == "table":
            sizes = [math.prod(shape) for shape in shapes.values()]
            parts = dict(zip(shapes, v.split(sizes, dim=-1), strict=True))
        else:
            if hypernetwork == "mlp":
                v = F.linear(v, net["layer0"]["weight"], net["layer0"]["bias"])
                for j in range(1, hidden_layers + 1):
                    layer = net[f"layer{j}"]
                    v = F.linear(torch.relu(v), layer["weight"], layer["bias"])
            ends = {k: net[f"to {k}"] for k in shapes}
            parts = {k: F.linear(v, end["weight"], end.get("bias")) for k, end in ends.items()}
        return {k: part.reshape(*v.shape[:-1], *shapes[k]) for k, part in parts.items()}

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        weights = server["weights"]  # Alg. 1, server: θ_i = h(v_i; φ)
        return generate(weights["net"], at(weights["embed"], index))

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        weights = server["weights"]
        return generate(weights["net"], weights["embed"].mean(0))

    def is_own(leaf: str) -> bool:
        return leaf not in shapes

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        head = tree.select(params, is_own)
        return {"head": head, **local.start(params=head)} if head else {}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        work = {"params": {**ctx.own, **client.get("head", {})}}
        if local.keeps:  # what was generated has no past; a private head has
            old = client["velocity"]["params"] if client else {}
            work["velocity"] = {"params": {**tree.zeros_like(ctx.own), **old}}
        return work

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        upload = tree.select(work["params"], lambda leaf: leaf in shapes)
        if not client:
            return {}, upload
        kept = {"head": tree.select(work["params"], is_own)}
        if local.keeps:
            kept["velocity"] = {"params": tree.select(work["velocity"]["params"], is_own)}
        return kept, upload

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        num = ctx.present.sum().clamp(min=1)

        def proxy(weights: Tree) -> Tensor:
            """Return the mean of ½‖θ̃_i − h(v_i; φ)‖² over the clients that reported."""
            rows = weights["embed"].index_select(0, ctx.cohort)
            apart = tree.sub(generate(weights["net"], rows), uploads)
            apart = tree.where(ctx.present, apart, tree.zeros_like(apart))
            return 0.5 * tree.dot(apart, apart) / num

        old, hyper, there = server["weights"], ctx.hyper, ctx.present.any()
        # Alg. 1, server: the pull-back of start minus end through h; see the docstring on its sign.
        slope, length = torch.func.grad(proxy)(old), there.to(num.dtype)
        if server_clip is not None:
            lengths = [torch.linalg.vector_norm(leaf) for leaf in tree.leaves(slope)]
            norm = torch.linalg.vector_norm(torch.stack(lengths))
            length = length * (server_clip / (norm + 1e-6)).clamp(max=1.0)
        # The weights are many, so each pass over them costs: if no client reported, the factors
        # are zero and one instead of a choice between two trees.
        decay = torch.where(there, hyper["server_decay"], 0.0)
        momentum = torch.where(there, hyper["server_momentum"], 1.0)
        rate = torch.where(there, hyper["server_lr"], 0.0)
        push = tree.addcmul(tree.scale(slope, length), old, decay)
        push = tree.addcmul(push, server["velocity"], momentum)
        moved = {
            "net": tree.addcmul(old["net"], push["net"], -rate),
            "embed": old["embed"] - hyper["embed_lr_ratio"] * rate * push["embed"],
        }
        return {"weights": moved, "velocity": push}

    own = {
        "server_lr": Hyper(0.01, 0.0, note="the step on the hypernetwork", server=True),
        "embed_lr_ratio": Hyper(
            1.0, 0.0, note="the step on the embeddings, in units of server_lr", server=True
        ),
        "server_momentum": Hyper(0.9, 0.0, 1.0, note="0 is a plain step", server=True),
        "server_decay": Hyper(1e-3, 0.0, note="the hypernetwork's weight decay", server=True),
    }
    return changed(
        local_train(task, local, participation="sampled"),
        name="pfedhn",
        hyper={**local.hyper, **own},
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        finish=finish,
        aggregate=aggregate,
        headline="pre" if evaluate == "generated" else "post",
        in_turn=hn_update == "sequential",
        private=lambda leaf: leaf in leaves and leaf not in shapes,
        message=newcomer_message,
    )
