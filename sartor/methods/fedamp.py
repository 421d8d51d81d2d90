"""FedAMP: each client is pulled to its own mixture of all models, in which similar ones weigh most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID
Data", AAAI 2021 (arXiv 2007.03797). HeurFedAMP is its variant for deep networks. Competitors of Sun
et al. 2025 and Shi et al. 2023.

| symbol | here | meaning |
|---|---|---|
| w_i | client["params"] | the personal model: kept, uploaded and used |
| W | server["models"] | the last upload of every client: a table over clients |
| u_i | ctx.own | the cloud model of client i, Σ_j ξ_ij w_j |
| ξ | mixture | the weights of all models for every client; rows sum to 1 |
| σ | bandwidth, sharpness | FedAMP divides squared distances by it, HeurFedAMP multiplies cosines |
| α_k | mix_lr | the server's step; with `decay_every`, times mix_decay every so many rounds |
| λ | collaboration | the strength of collaboration (`scale="absolute"`) |
| λ/α_k | prox_strength | the pull of w_i towards u_i |
| ξ_ii | self_weight | what HeurFedAMP leaves to the client itself |

FedAMP: ξ_ij = α_k A'(‖w_i − w_j‖²) with A'(x) = exp(−x/σ)/σ, and ξ_ii is the rest. HeurFedAMP: the
others share 1 − ξ_ii in proportion to exp(σ cos(w_i, w_j)). Then w_i descends F_i(w) +
(λ/2α_k)‖w − u_i‖². The paper lets α_k decay and σ depend on the data; one public code takes λ = 1,
α = 10⁴ times 0.1 every 30 rounds, and for HeurFedAMP σ = 25, ξ_ii = 1/m.

Differs from the paper: ξ_ii >= 0 asks for α <= σ/(m−1), and a good σ depends on the network, so by
default (`scale="relative"`) σ is a multiple of the mean squared distance between two models,
α_k = mix_weight·σ/(m−1), and the pull λ/α_k is given; `scale="absolute"` takes λ, α and σ as they
are. Clients may be drawn: those that never reported are in no mixture, receive the mean of
the pool (that of all who did, if the pool is empty), and start from it. In some public code the
pull has no gradient, so that the method is LocalTrain; here it has one.

A newcomer receives the mean of all models that were ever reported, and trains from it with a pull
back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Batch, ClientContext, Method, Newcomer, ServerContext, Show, Use
from sartor.core.mixing import at, combine, inner, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree

Start = Literal["own", "cloud"]
Pool = Literal["stored", "participants"]


def fedamp(
    task: Task,
    local: Local,
    *,
    scale: Literal["relative", "absolute"] = "relative",
    start: Start = "own",
    pool: Pool = "stored",
    decay_every: int | None = None,
) -> Method:
    """Build FedAMP: min Σ F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²), A(x) = 1 − exp(−x/σ).

    Args:
        task: the network and its loss.
        local: local training of the pulled model.
        scale: how λ, α and σ are given; see the module's docstring.
        start: a round starts from the client's own last model, or from its cloud model.
        pool: mix the last uploads of all clients, or only those of the last round's participants.
        decay_every: multiply α_k by ``mix_decay`` every so many rounds; never if None.
    """
    relative = scale == "relative"

    def others(models: Tree, mask: Tensor, ctx: ServerContext, fade: Tensor) -> Tensor:
        near = tree.map(lambda leaf: leaf - leaf.mean(0), models)  # keeps the digits of distances
        gram = inner(near, near)
        norm = gram.diagonal()
        far = torch.where(mask, norm[:, None] + norm - 2.0 * gram, 0.0).clamp(min=0.0)
        sigma = ctx.hyper["bandwidth"]
        if not relative:  # Alg., cloud model: ξ_ij = α_k A'(‖w_i − w_j‖²)
            return fade * ctx.hyper["mix_lr"] * torch.exp(-far / sigma) / sigma
        both = mask & mask.mT
        mean = (far * both).sum() / both.sum().clamp(min=1)
        sigma = sigma * torch.where(mean > 0, mean, torch.ones_like(mean))
        share = fade * ctx.hyper["mix_weight"] / mask.sum(1, keepdim=True).clamp(min=1)
        return share * torch.exp(-far / sigma)

    def pull(ctx: ClientContext) -> Tensor:
        if relative:
            return ctx.hyper["prox_strength"]
        return ctx.hyper["collaboration"] / ctx.hyper["mix_lr"]

    sigma = Hyper(1.0, 0.0, open_low=True, note="small: no client is near another", server=True)
    if relative:
        note = "what all others weigh together if they are equal; 0 keeps every client alone"
        hyper = {
            "bandwidth": sigma,
            "mix_weight": Hyper(0.5, 0.0, 1.0, note=note, server=True),
            "prox_strength": _PULL,
        }
    else:
        note = "the server's step; above bandwidth/(clients − 1) a client's own weight is negative"
        hyper = {
            "bandwidth": sigma,
            "mix_lr": Hyper(0.05, 0.0, open_low=True, note=note, server=True),
            "collaboration": Hyper(1.0, 0.0, note="0 keeps every client alone"),
        }
    return _attentive("fedamp", task, local, others, pull, hyper, start, pool, decay_every)


def heur_fedamp(
    task: Task,
    local: Local,
    *,
    start: Start = "own",
    pool: Pool = "stored",
    decay_every: int | None = None,
) -> Method:
    """Build HeurFedAMP: FedAMP with the angle between models in place of their distance.

    Args:
        task: the network and its loss.
        local: local training of the pulled model.
        start: see ``fedamp``.
        pool: see ``fedamp``.
        decay_every: see ``fedamp``; the pull λ/α_k grows as α_k falls.
    """

    def others(models: Tree, mask: Tensor, ctx: ServerContext, fade: Tensor) -> Tensor:
        gram = inner(models, models)
        norm = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
        score = ctx.hyper["sharpness"] * gram / (norm[:, None] * norm)
        score = torch.where(mask, score, torch.finfo(gram.dtype).min)
        # Alg. HeurFedAMP: ξ_ij = (1 − ξ_ii) softmax_j(σ cos(w_i, w_j))
        return (1.0 - ctx.hyper["self_weight"]) * torch.softmax(score, -1)

    hyper = {
        "sharpness": Hyper(25.0, 0.0, note="0 weighs all others alike", server=True),
        "self_weight": Hyper(0.5, 0.0, 1.0, note="1 keeps every client alone", server=True),
        "prox_strength": _PULL,
    }

    def pull(ctx: ClientContext) -> Tensor:
        return ctx.hyper["prox_strength"]

    return _attentive("heur-fedamp", task, local, others, pull, hyper, start, pool, decay_every)


_PULL = Hyper(0.03, 0.0, note="the pull to the cloud model; 0 is local training")


def _attentive(
    name: str,
    task: Task,
    local: Local,
    others: Callable[[Tree, Tensor, ServerContext, Tensor], Tensor],
    pull: Callable[[ClientContext], Tensor],
    hyper: dict[str, Hyper],
    start: Start,
    pool: Pool,
    decay_every: int | None,
) -> Method:
    """Build what both share.

    ``others(models, mask, ctx, α_k/α_0)`` returns ξ_ij where mask (i, j) holds, which says that j
    is not i and stands in the pool, and anything elsewhere; ``pull(ctx)`` returns λ/α_0.
    """
    if decay_every is not None:
        refuse(below(1, "leave it out for none.", decay_every=decay_every))
        note = "what the server's step is multiplied by every so many rounds"
        hyper = {**hyper, "mix_decay": Hyper(0.1, 0.0, 1.0, True, note, server=True)}

    def fade(seen: ServerContext | ClientContext) -> Tensor:
        """Return α_k/α_0."""
        if decay_every is None:
            return torch.ones_like(seen.round, dtype=next(iter(seen.hyper.values())).dtype)
        return seen.hyper["mix_decay"] ** (seen.round // decay_every)

    def mixture(server: Tree, ctx: ServerContext) -> Tensor:
        """Return ξ: (clients, clients)."""
        there, known = server["pool"], server["known"]
        eye = torch.eye(len(there), dtype=torch.bool, device=there.device)
        mask = there & ~eye
        found = torch.where(mask, others(server["models"], mask, ctx, fade(ctx)), 0.0)
        # A client without a model gets the mean of the pool, or of all if nobody came.
        pool_or_all = torch.where(there.any(), there, known)
        even = pool_or_all.to(found.dtype) / pool_or_all.sum().clamp(min=1)
        found = torch.where(known[:, None], found, even)
        return torch.where(eye, 1.0 - torch.where(eye, 0.0, found).sum(1, keepdim=True), found)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        none = torch.zeros_like(ctx.sizes, dtype=torch.bool)
        models = repeated(params, ctx.sizes.shape[0])
        return {"models": models, "known": none, "pool": none.clone()}

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        # Alg., cloud model: u_i = Σ_j ξ_ij w_j
        return combine(at(mixture(server, ctx), index), server["models"])

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        known = server["known"] | ~server["known"].any()
        weights = known.to(tree.leaves(server["models"])[0].dtype)
        return combine(weights / weights.sum(), server["models"])

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        kept = local.start(params=params)
        if start == "cloud":
            return kept
        return {"params": params, "fresh": torch.ones_like(ctx.index, dtype=torch.bool), **kept}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        if start == "cloud":
            return {"params": ctx.own, **local.kept(client)}
        params = tree.where(client["fresh"], ctx.own, client["params"])
        return {"params": params, **local.kept(client)}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return F_i(w) + (λ/2α_k)‖w − u_i‖²."""
        w, u, strength = work["params"], ctx.own, pull(ctx) / fade(ctx)
        return task.loss(w, batch) + half_square(strength, w, u)  # Alg., client step

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        upload = {"params": work["params"]}
        if start == "cloud":
            return local.kept(work), upload
        return {**work, "fresh": torch.zeros_like(client["fresh"])}, upload

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        models = put_rows(server["models"], ctx.cohort, uploads["params"], ctx.present)
        came = torch.zeros_like(server["known"]).index_copy(0, ctx.cohort, ctx.present)
        known = server["known"] | came
        return {"models": models, "known": known, "pool": known if pool == "stored" else came}

    return Method(
        name=name,
        hyper={**local.hyper, **hyper},
        init_server=init_server,
        init_client=init_client,
        address=address,
        begin=begin,
        phases=(descend(task, local, objective),),
        finish=finish,
        aggregate=aggregate,
        use=Use(headline="post"),
        newcomer=Newcomer(message=newcomer_message),
        show=Show(server=lambda server, ctx: {"mix": mixture(server, ctx)}),
    )
