"""Fed-RoD: one body with two heads: a generic one for balanced classes, a personal one on top.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022 (arXiv 2107.00778).

| symbol | here | meaning |
|---|---|---|
| θ, ψ | server["params"] | the body and the generic head: averaged as in FedAvg |
| φ_i | client["personal"] | the personal head, which never leaves; its scores are added |
| n_{i,c} | work["counts"] | how many training samples of each class the client has |
| γ | balance | the exponent of the class counts; 1 in the paper, 0 is FedAvg beside the head |
| η | local_lr | the step of all parts |

The generic model is trained with the balanced softmax, the cross-entropy of the scores
g_c + γ log n_{i,c}, in which a class that the client does not have drops out. The personal head is
trained with the cross-entropy of g + p_i, where features and g are constants: body and generic head
never notice it. What a client uses is g + p_i; as both heads are linear, that is one network whose
head is their sum. The generic model is the global one (the point "global").

Differs from public code: class counts are exact, from a pass over all training samples in every
round, so that no label that can be drawn has count 0. The variant in which a small network makes
the personal heads is left out.

A newcomer receives body and generic head, begins its personal head as all others did, and trains it
on its own data as in any round.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, Phase, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Rule, fedavg, with_kept
from sartor.methods.parts.partial import check_whole_head
from sartor.methods.parts.prototypes import members


def fedrod(
    task: Task,
    local: Local,
    *,
    personal_start: Literal["generic", "zero"] = "generic",
    rule: Rule = "normalized",
) -> Method:
    """Build Fed-RoD: min Σ p_i BSM_i(θ, ψ), and beside it min over φ_i of CE_i(g + p_i).

    Args:
        task: the network and its loss; its head must be linear.
        local: local training, of all parts together.
        personal_start: where a personal head begins: at the initial generic head (as in public
            code), or at zero, so that a client begins with the generic model.
        rule: how the server averages; see ``fedavg``.
    """
    check_whole_head("fedrod", task)
    base = with_kept(fedavg(task, local, rule=rule), "personal")

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        head = tree.select(params, task.is_head)
        personal = head if personal_start == "generic" else tree.zeros_like(head)
        return {"personal": personal, **local.start(params=params, personal=head)}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        features = task.represent(work["params"], batch)
        generic = task.classify(work["params"], features)
        own = generic.detach() + task.classify(work["personal"], features.detach())
        # Alg., client: balanced softmax for the generic head, the plain loss for g + p_i, of which
        # only the personal head is trained.
        shifted = generic + log_prior(work["counts"], ctx.hyper["balance"])
        losses = task.criterion(shifted, batch.y) + task.criterion(own, batch.y)
        return task.mean(losses, batch)

    def model(work: Tree, ctx: ClientContext) -> Tree:
        head = tree.select(work["params"], task.is_head)
        return {**work["params"], **tree.add(head, work["personal"])}

    note = "the exponent of the class counts; 0 ignores them"
    return changed(
        base,
        name="fedrod",
        hyper={**base.hyper, "balance": Hyper(1.0, 0.0, note=note)},
        init_client=init_client,
        phases=(class_counts(task), descend(task, local, objective, over=("params", "personal"))),
        model=model,
        private=lambda leaf: leaf == "personal",
    )


def class_counts(task: Task) -> Phase:
    """Build the pass that counts a client's training samples of every class."""

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        like = next(iter(work["params"].values()))
        return {**work, "counts": like.new_zeros(task.num_classes)}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        member = members(task, batch, work["counts"].dtype)
        return {**work, "counts": work["counts"] + member.sum(0)}

    return Phase("class counts", step, enter, batch=256, shuffle=False)


def log_prior(counts: Tensor, balance: Tensor) -> Tensor:
    """Return γ log n_c, which is −∞ for a class without samples unless γ = 0."""
    absent = (counts == 0) & (balance > 0)
    shift = balance * counts.clamp(min=1.0).log()
    return torch.where(absent, shift.new_full((), -torch.inf), shift)
