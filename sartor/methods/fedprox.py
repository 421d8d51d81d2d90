"""One-stage FedProx: one model per client, one global model, and a pull of strength λ between them.

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Algorithm 1,
Eq. (1), (8)-(12), (18), Theorem 2, Corollary 1. λ = 0 is LocalTrain, λ → ∞ is GlobalTrain.

| symbol | here | meaning |
|---|---|---|
| λ, λ_i | prox_strength | the pull; one number, or one per client (objective (18)) |
| w_g | server["params"] | the global model |
| w_i | client["params"] | the client's model, kept between rounds: the warm start |
| η | local_lr | the local step |
| γ | server_lr | the server's step on the average Moreau envelope |
| K | Local.steps | local steps a round |
| L, μ | smoothness, strong_convexity | of the clients' losses |

Differs from Li et al. 2020 and from public FedProx code, which restart every client from w_g: here
a client starts from its own last model. Step sizes (`preset`): `paper_real` γ = 1/λ, so that w_g is
the mean of the clients' models (with λ_i, 1 over the largest); `paper_synthetic` γ = 1/L_g, η =
1/(L+λ); `corollary1` γ = 1/(2 L_g), η = 1/(L+λ) and the smallest K that satisfies (12); `free`
takes γ, η and K as given. L_g = λL/(λ+L). With λ_i, L_g is the largest over clients and K comes
from the client that needs most (ours: the paper leaves it open). λ itself is given, or follows from
R and ρ by a rule of `sartor.theory.coupling` (`lambda_rule`) with n = N/m; values of R or ρ that
differ between clients give λ_i, with n_i (ours). `v2` gives a λ in the thousands where R <= 1/√n:
derive η from it.

A newcomer starts at the global model and takes rounds with the pull; its λ is the mean of the λ_i.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import (
    Batch,
    ClientContext,
    Method,
    ServerContext,
    changed,
    client_weights,
    weighted_sum,
)
from sartor.core.mixing import at
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg
from sartor.methods.local import local as local_train
from sartor.theory import coupling, proximal

Preset = Literal["paper_real", "paper_synthetic", "corollary1", "free"]


def fedprox(
    task: Task,
    local: Local,
    *,
    preset: Preset = "paper_real",
    lambda_rule: Literal["given", "v1", "v2", "shrinkage"] = "given",
    weights: Literal["uniform", "samples"] = "uniform",
    unbiased: bool = False,
    smoothness: float | None = None,
    strong_convexity: float | None = None,
) -> Method:
    """Build one-stage FedProx: min Σ p_i [L_i(w_i) + (λ/2)‖w_g − w_i‖²].

    Args:
        task: the network and its loss.
        local: local training.
        preset: where the step sizes come from; see the module's docstring.
        lambda_rule: where λ comes from; see the module's docstring.
        weights: p_i = 1/m (the paper's) or n_i/N.
        unbiased: under sampling, scale the cohort's sum by m/|S| instead of averaging over the
            cohort.
        smoothness: L, for the presets and rules that need it.
        strong_convexity: μ, for those that need it.
    """
    derived = preset in ("paper_synthetic", "corollary1")
    big, small = smoothness or 0.0, strong_convexity or 0.0
    if (derived or lambda_rule == "v2") and not big > 0:
        raise ConfigError(
            f"preset={preset!r} with lambda_rule={lambda_rule!r} needs smoothness=L > 0 of the "
            f"loss, got {smoothness}; give it, or take a preset and rule without it."
        )
    if preset == "corollary1" or lambda_rule in ("v2", "shrinkage"):
        proximal.check_strong_convexity(strong_convexity, smoothness)

    def pull(ctx: ServerContext) -> Tensor:
        """Return λ: 0-d, or (clients,)."""
        if lambda_rule == "given":
            return ctx.hyper["prox_strength"]
        r, rho = ctx.hyper["heterogeneity"], ctx.hyper["noise"]
        return coupling.by_rule(lambda_rule, r, rho, ctx.sizes, big, small).to(r.dtype)

    def own_pull(ctx: ClientContext) -> Tensor:
        return (ctx.hyper if lambda_rule == "given" else ctx.own)["prox_strength"]

    def address(server: Tree, index: Tensor, ctx: ServerContext) -> Tree:
        return {"prox_strength": at(pull(ctx), index)}

    def newcomer_message(server: Tree, ctx: ServerContext) -> Tree:
        return {"prox_strength": pull(ctx).mean()}

    def broadcast(server: Tree, ctx: ServerContext) -> Tree:
        message = {"params": server["params"]}
        if preset == "corollary1":
            message["steps"] = proximal.local_steps(pull(ctx), big, small).max()
        return message

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return h_i(w; w_g) = L_i(w) + (λ/2)‖w − w_g‖²."""
        w, w_g, lam = work["params"], ctx.common["params"], own_pull(ctx)
        return task.loss(w, batch) + half_square(lam, w, w_g)  # Eq. (8)

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        away = tree.sub(ctx.common["params"], work["params"])
        return work, {"push": tree.scale(away, own_pull(ctx))}  # Alg. 1, push: λ(w_g − w_{t,K})

    def server_step(ctx: ServerContext) -> Tensor:
        """Return γ; zero where λ = 0, as then nothing is pushed."""
        if preset == "free":
            return ctx.hyper["server_lr"]
        lam = pull(ctx).max()
        safe = torch.where(lam > 0, lam, torch.ones_like(lam))
        gamma = 1.0 / safe
        if derived:
            gamma = proximal.server_lr(safe, big, 2.0 if preset == "corollary1" else 1.0)
        return torch.where(lam > 0, gamma, torch.zeros_like(gamma))

    def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        share = client_weights(ctx, weights)[ctx.cohort] * ctx.present
        if unbiased:
            share = share * ctx.sizes.shape[0] / ctx.present.sum().clamp(min=1)
        else:
            share = share / torch.where(share.sum() > 0, share.sum(), torch.ones_like(share.sum()))
        slope = weighted_sum(uploads["push"], share)
        gamma = server_step(ctx)
        # Eq. (10): w_g ← w_g − γ Σ p_i λ(w_g − w_i)
        return {"params": tree.map(lambda w, g: w - gamma * g, server["params"], slope)}

    own = local.without_rate(f"fedprox with preset={preset!r}") if derived else local.hyper
    hyper = dict(own)
    if lambda_rule == "given":
        hyper["prox_strength"] = Hyper(0.1, 0.0, note="use 0 for pure local training")
    else:
        note = "R, how far the clients' best models are apart"
        hyper["heterogeneity"] = Hyper(1.0, 0.0, open_low=True, note=note)
        note = "ρ, the size of one sample's gradient; the paper's is 2"
        hyper["noise"] = Hyper(2.0, 0.0, note=note)
    if preset == "free":
        note = "1/prox_strength averages the clients' models"
        hyper["server_lr"] = Hyper(1.0, 0.0, note=note, server=True)
    train = descend(
        task,
        local,
        objective,
        lr=(lambda work, ctx: 1.0 / (big + own_pull(ctx))) if derived else "local_lr",
        steps=(lambda ctx: ctx.common["steps"]) if preset == "corollary1" else None,
    )
    alone = local_train(task, local)
    method = changed(
        fedavg(task, local),
        name="fedprox",
        hyper=hyper,
        init_client=alone.init_client,
        broadcast=broadcast,
        begin=alone.begin,  # Alg. 1, the warm start: w_{t,0} = w_{t-1,K}
        phases=(train,),
        finish=finish,
        aggregate=aggregate,
        averaged=("push",),
    )
    # The server sends a λ that follows from a rule; a given one is known to all clients.
    if lambda_rule == "given":
        return method
    return changed(method, address=address, message=newcomer_message)
