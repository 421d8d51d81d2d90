"""FedPHP: FedAvg whose clients keep an average of their past models, which teaches and is used.

Li, Zhan, Shao, Li, Song, "FedPHP: Federated Personalization with Inherited Private Models",
ECML-PKDD 2021. A competitor of Sun et al. 2025.

| symbol | here | meaning |
|---|---|---|
| w | server["params"] | the global model: FedAvg's average |
| w_i | work["params"] | the client's copy of it, trained and sent |
| w_i^P | client["inherited"] | the inherited private model (HPM): kept, used, never sent |
| z_i | client["times"] | how often the client has taken part |
| Z | horizon | how often it is expected to: drawn share of clients times rounds |
| μ | inherit_weight | the largest weight of the past; 0.9 |
| λ | transfer_strength | the weight of the teacher; 0.1 (0.05 also tried with MMD) |
| R | transfer | how the teacher is followed, feature by feature or answer by answer |

A client descends (1 − λ)·loss + λ·R from the global model, where R compares it with the fixed HPM
on the same batch; then w_i^P ← μ_i w_i^P + (1 − μ_i) w_i with μ_i = μ·min(z_i/Z, 1), so that the
first time the HPM is the model just trained. R: `mmd`, the squared maximum mean discrepancy of
features under five Gaussian kernels exp(−d²/(b 2^k)), k = −2..2, b the mean d² over pairs of the
joint batch; `mmd_fixed`, the same with exp(−d²/2a), a = 10, 15, 20, 50, as in another public code;
`kd`, the cross-entropy of softmax(teacher/4) and the student. That other code also lets μ_i follow
the round instead of z_i (`progress="rounds"`, with `horizon` the number of rounds).

The authors' code: λ = 0.1, rate 0.03, 5 epochs, 100 clients of which a tenth is drawn, 1000 rounds
(Z = 100), a new optimiser in every round. Differs from it: gradients are clipped only where local
training says so (`clip_norm`); no `mmd` on a batch of one sample, where its slope has no bound; the
first teacher is the first global model received (theirs is the initial one,
`first_teacher="initial"`: the same where all take part).

A newcomer takes the global model as its HPM and teacher; after its first training the HPM is the
model it trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Rule, fedavg, with_kept


def fedphp(
    task: Task,
    local: Local,
    *,
    transfer: Literal["mmd", "mmd_fixed", "kd"] = "mmd",
    progress: Literal["participations", "rounds"] = "participations",
    first_teacher: Literal["received", "initial"] = "received",
    rule: Rule = "normalized",
) -> Method:
    """Build FedPHP: min over w of (1 − λ) L_i(w) + λ R(w, w_i^P) on each client, averaged.

    Args:
        task: the network and its loss; its head must be linear.
        local: local training.
        transfer: how the teacher is followed; see the module's docstring.
        progress: what makes the weight of the past grow: own participations, or rounds.
        first_teacher: the HPM of a client that takes part for the first time: the global model that
            it receives, or the initial model of the run.
        rule: how the server averages; see ``fedavg``.
    """
    base = with_kept(fedavg(task, local, rule=rule), "inherited", "times")

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        own = {"inherited": params, "times": torch.zeros_like(ctx.index)}
        return {**base.init_client(params, ctx), **own}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        work = base.begin(client, ctx)
        if first_teacher == "received":
            first = tree.where(work["times"] == 0, ctx.common["params"], work["inherited"])
            work = {**work, "inherited": first}
        return work

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        found = task.features(work["params"], batch.x)
        scores = task.classify(work["params"], found)
        loss = task.loss(work["params"], batch, lambda params, x: scores)
        if transfer == "kd":
            gap = task.mean(distillation(scores, work["taught"]), batch)
        else:
            gap = discrepancy(found, work["taught"], batch.mask, transfer == "mmd")
        lam = ctx.hyper["transfer_strength"]
        return (1.0 - lam) * loss + lam * gap  # Alg., client: (1 − λ) L_i(w) + λ R(w, w_i^P)

    train = descend(task, local, objective)

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        taught = task.represent(work["inherited"], batch)
        if transfer == "kd":
            taught = task.classify(work["inherited"], taught)
        new = train.step({**work, "taught": taught}, batch, ctx)
        return {k: new[k] for k in work}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        passed = work["times"] if progress == "participations" else ctx.round
        mu = ctx.hyper["inherit_weight"] * (passed / ctx.hyper["horizon"]).clamp(max=1.0)
        inherited = tree.map(  # Alg., client, at the end: w_i^P ← μ_i w_i^P + (1 − μ_i) w_i
            lambda old, new: mu * old + (1.0 - mu) * new, work["inherited"], work["params"]
        )
        return {**train.leave(work, ctx), "inherited": inherited, "times": work["times"] + 1}

    return changed(
        base,
        name="fedphp",
        hyper={
            **base.hyper,
            "transfer_strength": Hyper(0.1, 0.0, 1.0, note="0 trains as FedAvg does"),
            "inherit_weight": Hyper(0.9, 0.0, 1.0, note="0 uses the model just trained"),
            "horizon": Hyper(20.0, 1.0, note="set it to the participations a client can expect"),
        },
        init_client=init_client,
        begin=begin,
        phases=(replace(train, step=step, leave=leave),),
        model=lambda work, ctx: work["inherited"],
        private=lambda leaf: leaf == "inherited",
    )


def discrepancy(found: Tensor, taught: Tensor, mask: Tensor, adaptive: bool) -> Tensor:
    """Return the squared maximum mean discrepancy of two sets of features, diagonals included.

    If ``adaptive``, the kernels' widths follow the distances in the batch.
    """
    half = mask.to(found.dtype)
    real, num = torch.cat((half, half)), 2.0 * half.sum()
    joint = torch.cat((found, taught))
    # Distances do not change by a shift; this one keeps their digits.
    joint = joint - (joint * real[:, None]).sum(0).detach() / num.clamp(min=1.0)
    norm = joint.square().sum(-1)
    far = (norm[:, None] + norm - 2.0 * joint @ joint.mT).clamp(min=0.0)
    if adaptive:
        pairs = (num * (num - 1.0)).clamp(min=1.0)
        mean = (real[:, None] * real * far.detach()).sum() / pairs + 1e-8
        kernel = torch.stack([torch.exp(-far / (mean * 2.0**k)) for k in range(-2, 3)]).sum(0)
    else:
        kernel = torch.stack([torch.exp(-far / (2.0 * a)) for a in (10, 15, 20, 50)]).sum(0)
    weight = torch.cat((half, -half)) / half.sum().clamp(min=1.0)
    value = weight @ kernel @ weight  # the means of XX + YY − XY − YX
    return torch.where(num > 2.0, value, 0.0 * value) if adaptive else value


def distillation(scores: Tensor, taught: Tensor) -> Tensor:
    """Return −Σ_c softmax(taught/4)_c log softmax(scores)_c of each sample."""
    wanted = F.softmax(taught / 4.0, -1)
    return -(wanted * F.log_softmax(scores, -1)).sum(-1)
