"""Two-stage FedProx: stochastic steps on the average Moreau envelope, then a final local stage.

Chen, Zheng, Long, Su, "Minimax Estimation for Personalized Federated Learning: An Alternative
between FedAvg and Local Training?", JMLR 24(262), 2023 (arXiv 2103.01901), Eq. (20), Algorithm 2,
Theorems 11 and 12. λ = 0 is LocalTrain. The one-stage method of Yu et al. 2024 is ``fedprox``.

| symbol | here | meaning |
|---|---|---|
| λ, λ_i | prox_strength | the pull; one number, or one per client (ours) |
| w_g, t | server["params"], ctx.round | the global model, the round |
| w_i | client["params"] | the client's model, kept between rounds: the warm start |
| p_i, B_g | weights | a client's weight; B_g of m clients take part in a round |
| η_{t,k}, k | local_lr or Eq. (26) | the local step, and its number, which restarts in every call |
| η_t | server_lr or Eq. (26) | the server's step |
| K_t, K_T | Local, growth; final_steps | SGD steps in a round of stage I, and in stage II |
| B | Local.batch | samples a step, drawn anew without replacement in every step |
| W, D | domain, domain_size | the set that local models are projected onto |
| μ | strong_convexity | of the clients' losses |

`preset="experiments"` (Appendix D) has constant steps; the paper's values are Local(steps=5,
batch=16, lr=0.2), server_lr 0.8, T = 20, all clients, λ in {0, 0.44, 4}. `preset="theory"` has
Eq. (26), (27): η_{t,k} = 1/((μ+λ)(k+1)), η_t = 2(μ+λ)/(λμ(t+1)).

Differs from the paper: Algorithm 2 prints the branches of stage I the wrong way round ("if i ∈ C_t
then keep, else train"); here the sampled clients train and push, as the server's line, Lemma 14 and
stage II demand. The server stays put at λ = 0, where Eq. (26) is void; with λ_i the factor
λμ/(μ+λ) in it becomes its mean Σ p_i λ_i μ/(μ+λ_i) (ours).

A newcomer starts at the global model and takes rounds around it, and the last stage after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    Phase,
    ServerContext,
    changed,
    client_weights,
    weighted_sum,
)
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg
from sartor.methods.local import local as local_train


def fedprox_two_stage(
    task: Task,
    local: Local,
    *,
    preset: Literal["experiments", "theory"] = "experiments",
    strong_convexity: float | None = None,
    weights: Literal["uniform", "samples"] = "uniform",
    final_steps: int | None = None,
    growth: float | None = None,
    domain: Literal["none", "ball", "box"] = "none",
    project_global: bool = False,
) -> Method:
    """Build two-stage FedProx: min Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²] over W.

    Args:
        task: the network and its loss.
        local: local training; where it counts in epochs, K_t is as many steps as those would take.
        preset: where the step sizes come from; see the module's docstring.
        strong_convexity: μ, for the preset `theory`.
        weights: p_i = 1/m or n_i/N.
        final_steps: K_T; as many as in a round of stage I if None.
        growth: C_1 of Eq. (26): K_t is at least C_1 max(λ², 1) t − 1; constant if None.
        domain: W: everything, a ball around the origin, or a box; ``domain_size`` is its radius or
            half its side.
        project_global: project the global model too, as the objective asks and Algorithm 2 omits.
    """
    theory = preset == "theory"
    faults = []
    if theory and not (strong_convexity and strong_convexity > 0):
        faults.append(
            f"preset='theory' needs strong_convexity=μ > 0 of the loss, got {strong_convexity}; "
            "give it, or take preset='experiments'."
        )
    if not theory and strong_convexity is not None:
        faults.append("strong_convexity has no effect with constant steps; use preset='theory'.")
    faults += below(1, "leave it out for as many as in a round.", final_steps=final_steps)
    if growth is not None and not growth > 0:
        faults.append(f"growth must be > 0, got {growth:g}; leave it out for constant steps.")
    if project_global and domain == "none":
        faults.append("project_global needs a domain; use domain='ball' or 'box'.")
    refuse(faults)
    mu = strong_convexity or 0.0

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return L_i(w) + (λ/2)‖w − w_g‖²."""
        w, w_g, lam = work["params"], ctx.common["params"], ctx.hyper["prox_strength"]
        return task.loss(w, batch) + half_square(lam, w, w_g)  # Eq. (20)

    def project(params: Tree, size: Tensor) -> Tree:
        """Return P_W: the nearest point of W."""
        if domain == "box":
            return tree.map(lambda w: torch.minimum(torch.maximum(w, -size), size), params)
        norm = tree.dot(params, params).sqrt()
        outside = norm > size
        factor = torch.where(outside, size / torch.where(outside, norm, 1.0), 1.0)
        return tree.scale(params, factor)

    def after(work: Tree, ctx: ClientContext) -> Tree:
        if domain != "none":
            work = {**work, "params": project(work["params"], ctx.hyper["domain_size"])}
        return {**work, "step": work["step"] + 1} if theory else work

    def rate(work: Tree, ctx: ClientContext) -> Tensor:
        return 1.0 / ((mu + ctx.hyper["prox_strength"]) * (work["step"] + 1))  # Eq. (26), (27)

    def num_steps(ctx: ClientContext) -> Tensor:
        """Return K_t."""
        n = ctx.num_samples
        batches = torch.ones_like(n)
        if local.batch is not None:
            full, part = n // local.batch, -(-n // local.batch)
            batches = full.clamp(min=1) if local.drop_last else part
        fixed = local.epochs * batches if local.steps is None else local.steps * torch.ones_like(n)
        if growth is None:
            return fixed
        need = growth * ctx.hyper["prox_strength"].square().clamp(min=1.0) * ctx.round
        return torch.maximum(fixed, need.ceil().to(n.dtype) - 1)

    def soft_local_sgd(name: str, steps: int | None) -> Phase:
        phase = descend(
            task,
            replace(local, steps=steps),
            objective,
            name=name,
            lr=rate if theory else "local_lr",
            steps=None if steps else num_steps,
            after=after,
        )
        phase = replace(phase, stream="train", fresh=True)
        if not theory:
            return phase

        def enter(work: Tree, ctx: ClientContext) -> Tree:
            return phase.enter({**work, "step": torch.zeros_like(ctx.num_samples)}, ctx)

        def leave(work: Tree, ctx: ClientContext) -> Tree:
            return phase.leave({k: v for k, v in work.items() if k != "step"}, ctx)

        return replace(phase, enter=enter, leave=leave)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return work, {"params": work["params"]}

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        lam = ctx.hyper["prox_strength"].expand(ctx.sizes.shape)
        p = client_weights(ctx, weights)
        if theory:
            envelope = (p * lam * mu / (lam + mu)).sum()  # Eq. (26): λμ/(μ+λ)
            moves = envelope > 0
            eta = torch.where(moves, 2.0 / torch.where(moves, envelope, 1.0), 0.0) / (ctx.round + 1)
        else:
            eta = ctx.hyper["server_lr"]
        unbias = ctx.sizes.shape[0] / ctx.present.sum().clamp(min=1).to(p.dtype)  # m/B_g
        step = eta * unbias * (lam * p)[ctx.cohort] * ctx.present
        drift = tree.map(lambda g, w: g - w, server["params"], uploads["params"])
        # Alg. 2, server: w_g ← w_g − (λ m η_t/B_g) Σ p_i (w_g − w_i)
        new = tree.sub(server["params"], weighted_sum(drift, step))
        return {"params": project(new, ctx.hyper["domain_size"]) if project_global else new}

    own = local.without_rate("fedprox-two-stage with preset='theory'") if theory else local.hyper
    hyper = {**own, "prox_strength": Hyper(0.44, 0.0, note="use 0 for pure local training")}
    if not theory:
        note = "1/prox_strength averages the clients' models"
        hyper["server_lr"] = Hyper(0.8, 0.0, note=note, server=True)
    if domain != "none":
        note = "the radius or half side of the domain"
        hyper["domain_size"] = Hyper(10.0, 0.0, open_low=True, note=note, server=True)
    alone = local_train(task, local)
    stage1 = changed(
        fedavg(task, local),
        name="fedprox-two-stage",
        hyper=hyper,
        init_client=alone.init_client,
        begin=alone.begin,  # Alg. 2, the warm start
        phases=(soft_local_sgd("train", local.steps if growth is None else None),),
        finish=finish,
        aggregate=aggregate,
    )
    stage2 = changed(  # Alg. 2, stage II: every client once more, around the final w_g
        stage1,
        phases=(soft_local_sgd("final", final_steps),),
        finish=lambda client, work, ctx: (work, {}),
        aggregate=lambda server, uploads, ctx: server,
    )
    return changed(stage1, after=stage2)
