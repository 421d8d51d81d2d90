"""FedPAC: a shared extractor, aligned with common class centroids, and heads that help each other.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023 (arXiv 2306.11867).

| symbol | here | meaning |
|---|---|---|
| θ_f | server["body"] | the shared extractor f, averaged by samples |
| φ_i | server["heads"] | the head of client i, combined; it waits here for its next round |
| c_c | server["centroids"], server["seen"] | the mean feature of class c, where anybody had it |
| h_i | upload["h"] | rows π_{i,c} μ_{i,c}: class shares times class means, under the received θ_f |
| v_i | upload["variance"] | tr Cov(onehot(y) ⊗ f(x)) / n_i, the variance of h_i |
| α_i | mix | argmin ‖h_i − Σ_j α_j h_j‖² + Σ_j α_j² v_j on the simplex of the round's clients |
| λ | align_strength | the pull of a sample's features to its class's centroid; 1 in the paper |
| η_g, η_f | head_lr, local_lr | the steps of head and extractor; 0.1 and 0.01 in the paper |
| ε | cutoff | weights below it are dropped; 1e-3 in the paper |

A round: statistics of the received extractor; `head_epochs` of the head alone, with an optimiser of
its own that starts anew; ``local`` for the extractor alone, on loss + λ·mean (f(x) − c_y)²; class
means of the trained extractor. A class without a centroid is aligned with the client's own mean;
in the first round nothing is. The paper's runs: 5 epochs, batch 50, momentum 0.5, decay 5e-4.

Both ways travel, for a client with C_i of C classes: 2|θ| + (C + 2C_i)·D + C_i + 1 numbers (n_i is
the sum of the counts) and a bit per class each way. The combined head φ_i is mixed by the server,
so it costs |θ_h| down, however many heads are in it. Sun et al. 2025 print 553 KB where this is
491.0 to 494.3 KiB (LeNet-5, CIFAR-10, C_i from 5 to 10); they do not say what the rest is.

Differs from the authors' code: the programme is solved exactly, without dropping eigenvalues; a
class that no client brought in a round keeps its centroid; if the programme has no answer, a client
keeps its own head. A newcomer receives the extractor and the plain mean of all heads, as no
statistics show yet which clients it resembles.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Newcomer,
    Phase,
    ServerContext,
    Wire,
    client_weights,
    weighted_mean,
)
from sartor.core.mixing import at, combine, normalise, put_rows, repeated
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.parts import simplex
from sartor.methods.parts.prototypes import class_means, class_sums, members


def fedpac(task: Task, local: Local, *, head_epochs: int = 1, cutoff: float = 1e-3) -> Method:
    """Build FedPAC: min Σ p_i [L_i(θ_f, φ_i) + λ R_i(θ_f)], with heads combined by similarity.

    Args:
        task: the network and its loss; its head must be linear.
        local: local training of the extractor. Momentum that survives rounds is the extractor's.
        head_epochs: passes in which the head trains before.
        cutoff: weights of other heads below this are set to zero.
    """
    faults = below(1, "the paper's is 1.", head_epochs=head_epochs)
    if not 0.0 <= cutoff < 1.0:
        faults.append(f"cutoff must be >= 0 and < 1, got {cutoff:g}; 0 keeps every weight.")
    refuse(faults)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        like, num = tree.leaves(params)[0], ctx.sizes.shape[0]
        head = tree.select(params, task.is_head)
        return {
            "body": tree.select(params, task.is_body),
            "heads": repeated(head, num),
            "centroids": like.new_zeros((task.num_classes, task.feature_dim)),
            "seen": like.new_zeros(task.num_classes).bool(),
        }

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        return {k: server[k] for k in ("body", "centroids", "seen")}

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        return {"head": tree.map(lambda leaf: at(leaf, index), server["heads"])}

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        return {"head": tree.map(lambda leaf: leaf.mean(0), server["heads"])}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return local.start(params=tree.select(params, task.is_body))

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        rest = {"kept": client} if local.keeps else {}
        return {"params": {**ctx.common["body"], **ctx.own["head"]}, **rest}

    def body_loss(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        found = task.represent(work["params"], batch)
        losses = task.criterion(task.classify(work["params"], found), batch.y)
        seen = ctx.common["seen"][:, None]
        targets = torch.where(seen, ctx.common["centroids"], work["means"])
        far = (found - targets.index_select(0, batch.y)).square().mean(-1)
        pull = ctx.hyper["align_strength"] * seen.any()  # nothing to align with in round 0
        return task.mean(losses + pull * far, batch)  # Alg., body: loss + λ R_i(θ_f)

    head = replace(local, epochs=head_epochs, steps=None, keep_optimiser=False)
    train = descend(task, local, body_loss, train=task.is_body)

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        return train.enter({**work, **work["kept"]} if local.keeps else work, ctx)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        sent = {k: work[k] for k in ("h", "variance", "sums", "counts")}
        sent["body"] = tree.select(work["params"], task.is_body)
        sent["head"] = tree.select(work["params"], task.is_head)
        return local.kept(work), sent

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        sent = tree.where(ctx.present, uploads, tree.zeros_like(uploads))
        share = client_weights(ctx)[ctx.cohort] * ctx.present
        counts = sent["counts"].sum(0)
        # Alg., server: body by samples, heads by α_i, centroids by class counts.
        mix = collaboration(sent["h"], sent["variance"], ctx.present, cutoff)
        return {
            "body": weighted_mean(sent["body"], share, server["body"]),
            "heads": put_rows(server["heads"], ctx.cohort, combine(mix, sent["head"]), ctx.present),
            "centroids": class_means(sent["sums"].sum(0), counts, server["centroids"]),
            "seen": server["seen"] | (counts > 0),
        }

    head_rate = local.lr if local.adapts else 0.1
    own = {
        "head_lr": Hyper(head_rate, 0.0, note="the step size of the head"),
        "align_strength": Hyper(1.0, 0.0, note="the pull to the class centroids; 0 leaves it out"),
    }
    return Method(
        name="fedpac",
        hyper={**local.hyper, **own},
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        address=address,
        begin=begin,
        phases=(
            _statistics(task),
            descend(task, head, name="head", lr="head_lr", train=task.is_head),
            replace(train, enter=enter),
            class_sums(task, "centroids"),
        ),
        finish=finish,
        aggregate=aggregate,
        wire=Wire(
            sparse={
                "common/centroids": "common/seen",
                "upload/h": "upload/counts",
                "upload/sums": "upload/counts",
            }
        ),
        newcomer=Newcomer(message=newcomer_message),
    )


def collaboration(h: Tensor, variance: Tensor, present: Tensor, cutoff: float) -> Tensor:
    """Return the weights with which each client of a cohort combines heads: (slots, slots).

    The absent are left out, and keep to themselves. Weights below the cutoff are dropped, and the
    others brought to sum 1.
    """
    # Alg., quadratic programme: P_jk = ⟨h_i − h_j, h_i − h_k⟩ + δ_jk v_j
    flat = h.reshape(h.shape[0], -1).to(torch.float64)
    flat = flat - flat.mean(0)  # P does not change, and less cancels below
    gram = flat @ flat.mT
    home = gram.diagonal()[:, None] - gram  # ⟨h_i, h_i − h_j⟩
    bias = home[:, :, None] + (gram[None] - gram[:, None, :])  # ⟨h_i − h_j, h_i − h_k⟩ as (i, j, k)
    own = torch.arange(h.shape[0], device=h.device)
    allowed = present | (own == own[:, None])
    mix = simplex.minimise(bias + torch.diag(variance.to(torch.float64)), allowed, own)
    return normalise(torch.where(mix < cutoff, 0.0, mix), own)


def _statistics(task: Task) -> Phase:
    """Pass once over the data for h_i, v_i and the client's own class means."""
    plain = class_sums(task, "statistics")

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        work = plain.enter(work, ctx)
        return {**work, "squares": work["counts"].new_zeros(())}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        found = task.represent(work["params"], batch)
        member = members(task, batch, found.dtype)
        return {
            **work,
            "sums": work["sums"] + member.mT @ found,
            "counts": work["counts"] + member.sum(0),
            "squares": work["squares"] + (found.square().sum(-1) * batch.mask).sum(),
        }

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        num = work["counts"].sum().clamp(min=1.0)
        h = work["sums"] / num
        spread = (work["squares"] / num - h.square().sum()).clamp(min=0.0)  # V_i
        means = class_means(work["sums"], work["counts"])
        rest = {k: v for k, v in work.items() if k not in ("sums", "counts", "squares")}
        return {**rest, "h": h, "variance": spread / num, "means": means}

    return replace(plain, enter=enter, step=step, leave=leave)
