"""pFedLA: each client receives its own mixture of all models, layer by layer.

The weights of the mixture come from a small hypernetwork per client, which the server trains.

Ma, Zhang, Guo, Xu, "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022
(arXiv 2205.03993). `retained` > 0 is HeurpFedLA.

| symbol | here | meaning |
|---|---|---|
| θ_j | server["models"] | the last upload of every client: a table over clients |
| v_i, ψ_i | server["nets"] | embedding and hypernetwork of client i; axis 0 is clients |
| α_i | mix | (layers, clients), rows ≥ 0 with sum 1: ReLU outputs over their sum |
| θ̄_i | ctx.own | layer l is Σ_j α_ij^l θ_j^l |
| Δθ_i | −apart | trained model minus θ̄_i |
| η_h | mix_lr | the step on v_i and ψ_i |
| K | retained | layers that stay the client's own: those of largest self weight |

Differs from the paper: the printed step (v, ψ) ← (v, ψ) − η_h (∂θ̄_i)ᵀΔθ_i raises ½‖Δθ_i‖², as do
public codes; `weight_step="descent"` (default) takes the plus sign, "as_printed" the minus. Public
codes take η_h = 0.005, at which the weights hardly leave 1/M in tens of rounds: the slope of a
normalised output is 1e-3 or less. Our default is 100. The paper mixes for all clients at once;
`schedule="sequential"` serves them one after the other, as public codes do. All θ_j start equal,
and so do all hypernetworks; with `start="even"` (default) the first weights are equal too, with
"drawn" outputs are U(0, 1) for every client, as in public codes. A retained layer stays at home and
travels in neither direction (one byte a layer says which do), so others keep mixing the copy of it
that was sent last. A newcomer receives the plain mean of all models.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import ClientContext, Method, ServerContext, changed
from sartor.core.mixing import combine, normalise, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.local import local as local_train
from sartor.methods.parts.starts import linear


def pfedla(
    task: Task,
    local: Local,
    *,
    layers: Literal["blocks", "tensors"] = "blocks",
    retained: int = 0,
    weight_step: Literal["descent", "as_printed"] = "descent",
    schedule: Literal["parallel", "sequential"] = "parallel",
    evaluate: Literal["mixed", "after_local"] = "mixed",
    start: Literal["even", "drawn"] = "even",
    embedding: int = 100,
    hidden: int = 100,
) -> Method:
    """Build pFedLA: min Σ p_i L_i(θ̄_i) over the hypernetworks that give the weights of θ̄_i.

    Args:
        task: the network and its loss.
        local: local training.
        layers: what is mixed with one row of weights: weight and bias together, or every tensor.
        retained: K, how many layers a client keeps for itself in a round; 0 is pFedLA.
        weight_step: the sign of the hypernetwork's step.
        schedule: mix for all clients of a round at once, or serve them one after the other.
        evaluate: whether mixed models are used as they are, or after local training.
        start: the first weights; see the module's docstring.
        embedding: the length of v_i.
        hidden: the width of the hypernetworks.
    """
    owner = {k: k if layers == "tensors" else k.rpartition(".")[0] for k in task.leaf_names}
    blocks = sorted(set(owner.values()))
    row_of = {k: blocks.index(block) for k, block in owner.items()}
    faults = below(1, "public codes take 100.", embedding=embedding, hidden=hidden)
    if not 0 <= retained <= len(blocks):
        faults.append(
            f"retained must be from 0 to {len(blocks)} (all layers), got {retained}; 0 is pFedLA."
        )
    refuse(faults)
    sign = 1.0 if weight_step == "descent" else -1.0

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        num, like = ctx.sizes.shape[0], tree.leaves(params)[0]
        key = rng.fold(ctx.key, "hypernetwork")
        columns = num if start == "drawn" else 1
        out = rng.uniform(rng.fold(key, "out"), (len(blocks), columns, hidden), like.dtype)
        net = {
            "embed": rng.normal(rng.fold(key, "embed"), (embedding,), like.dtype),
            **{
                f"layer{j}": linear(rng.fold(key, j), hidden if j else embedding, hidden, like)
                for j in range(3)
            },
            "out": {
                "weight": out.expand(-1, num, -1),  # positive, so that no row is empty
                "bias": like.new_zeros((len(blocks), num)),
            },
        }
        return repeated({"models": params, "nets": net}, num)

    def mixture(net: Tree, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return α_i of one client, (layers, clients), and which layers are sent, (layers,)."""
        found = net["embed"]
        for j in range(3):
            layer = net[f"layer{j}"]
            found = torch.relu(F.linear(found, layer["weight"], layer["bias"]))
        rows = torch.relu(net["out"]["weight"] @ found + net["out"]["bias"])
        own = index.expand(len(blocks))
        mix = normalise(rows, own)
        if not retained:
            return mix, torch.ones_like(own, dtype=torch.bool)
        # The K rows of largest self weight become one-hot, and so have no gradient.
        at_home = mix.index_select(-1, index.reshape(1))[:, 0].detach()
        coarse = (1e6 * at_home).round()  # rounding errors do not choose among equals
        rank = torch.argsort(torch.argsort(coarse, dim=0, descending=True, stable=True), dim=0)
        alone = (torch.arange(mix.shape[-1], device=mix.device) == index).to(mix.dtype)
        return torch.where((rank < retained)[:, None], alone, mix), rank >= retained

    mixtures = torch.func.vmap(mixture)

    def mixed(mix: Tensor, models: Tree) -> Tree:
        """Return θ̄ of every client in ``mix`` (..., layers, clients)."""
        # Alg., server: θ̄_i^l = Σ_j α_ij^l θ_j^l
        return {k: combine(mix[..., row_of[k], :], {k: t})[k] for k, t in models.items()}

    def chosen(table: Tree, ids: Tensor) -> Tree:
        return tree.map(lambda leaf: leaf.index_select(0, ids), table)

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        ids = index.reshape(1)
        mix, sent = mixtures(chosen(server["nets"], ids), ids)
        found = tree.map(lambda leaf: leaf[0], mixed(mix, server["models"]))
        return enclose(found, dict(zip(blocks, sent[0].unbind(), strict=True)))

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        found = tree.map(lambda leaf: leaf.mean(0), server["models"])
        yes = tree.leaves(found)[0].new_ones((), dtype=torch.bool)
        return enclose(found, dict.fromkeys(blocks, yes))

    def enclose(params: Tree, sent: Tree) -> Tree:
        """Make a message of a model: with marks of its layers, if some stay at home."""
        return {"params": params, "sent": sent} if retained else params

    def join(sent: Tree, there: Tree, here: Tree) -> Tree:
        """Take the layers that were sent from there, and the others from here."""
        return {k: tree.where(sent[owner[k]], {k: v}, {k: here[k]})[k] for k, v in there.items()}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {**({"params": params} if retained else {}), **local.start(params=params)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        params = ctx.own
        if retained:
            params = join(ctx.own["sent"], ctx.own["params"], client["params"])
        return {"params": params, **local.kept(client)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        if not retained:
            return local.kept(work), work["params"]
        kept = {"params": work["params"], **local.kept(work)}
        return kept, enclose(work["params"], ctx.own["sent"])

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        trained = uploads
        if retained:
            old = chosen(server["models"], ctx.cohort)
            trained = join(uploads["sent"], uploads["params"], old)

        def proxy(nets: Tree) -> Tensor:
            """Return Σ ½‖Δθ_i‖² over the clients that reported: a term per hypernetwork."""
            apart = tree.sub(mixed(mixtures(nets, ctx.cohort)[0], server["models"]), trained)
            apart = tree.where(ctx.present, apart, tree.zeros_like(apart))
            return 0.5 * tree.dot(apart, apart)

        nets = chosen(server["nets"], ctx.cohort)
        slope = torch.func.grad(proxy)(nets)
        rate = sign * ctx.hyper["mix_lr"]  # Alg., server, step on (v_i, ψ_i)
        moved = tree.map(lambda w, g: w - rate * g, nets, slope)
        return put_rows(server, ctx.cohort, {"models": trained, "nets": moved}, ctx.present)

    def show(server: Tree, ctx: ServerContext) -> Tree:
        all_clients = torch.arange(ctx.sizes.shape[0], device=ctx.sizes.device)
        return {"mix": mixtures(server["nets"], all_clients)[0]}

    sparse = {
        f"{message}/params/{k}": f"{message}/sent/{owner[k]}"
        for message in ("own", "upload")
        for k in task.leaf_names
    }
    note = "0 keeps the first weights for ever"
    return changed(
        local_train(task, local, participation="sampled"),
        name="pfedla",
        hyper={**local.hyper, "mix_lr": Hyper(100.0, 0.0, note=note, server=True)},
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        finish=finish,
        aggregate=aggregate,
        headline="pre" if evaluate == "mixed" else "post",
        in_turn=schedule == "sequential",
        private=lambda leaf: False,
        sparse=sparse if retained else {},
        message=newcomer_message,
        server=show,
    )
