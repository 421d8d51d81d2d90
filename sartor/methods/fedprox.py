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
the mean of the clients' models; `paper_synthetic` γ = 1/L_g, η = 1/(L+λ); `corollary1` γ = 1/(2
L_g), η = 1/(L+λ) and the smallest K that satisfies (12); `free` takes γ, η and K as given. L_g =
λL/(λ+L). With λ_i, L_g is the largest over clients and K comes from the client that needs most
(ours: the paper leaves it open).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sartor import tree
from sartor.errors import ConfigError
from sartor.hyper import Hyper
from sartor.local import Local, descend
from sartor.method import Batch, Hub, Method, Site, weighted_sum
from sartor.task import Task
from sartor.tree import Tree

Preset = Literal["paper_real", "paper_synthetic", "corollary1", "free"]


def fedprox(
    task: Task,
    local: Local,
    *,
    preset: Preset = "paper_real",
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
        weights: p_i = 1/m (the paper's) or n_i/N.
        unbiased: under sampling, scale the cohort's sum by m/|S| instead of averaging over the
            cohort.
        smoothness: L, for the presets that need it.
        strong_convexity: μ, for the preset that needs it.
    """
    derived = preset in ("paper_synthetic", "corollary1")
    if derived and not (smoothness and smoothness > 0):
        raise ConfigError(
            f"preset={preset!r} needs smoothness=L > 0 of the loss, got {smoothness}."
        )
    if preset == "corollary1" and not (
        strong_convexity and 0 < strong_convexity <= (smoothness or 0)
    ):
        raise ConfigError(
            "preset='corollary1' needs 0 < strong_convexity <= smoothness, got "
            f"{strong_convexity}; "
            "add a ridge term (weight_decay) to make a convex loss strongly convex."
        )
    big, small = smoothness or 0.0, strong_convexity or 0.0

    def init_server(params: Tree, hub: Hub) -> Tree:
        return {"params": params}

    def broadcast(server: Tree, hub: Hub) -> Tree:
        letter = {"params": server["params"]}
        if preset == "corollary1":
            letter["steps"] = local_steps(hub.hyper["prox_strength"].max(), big, small)
        return letter

    def init_client(params: Tree, site: Site) -> Tree:
        return {"params": params, **local.start(params=params)}

    def begin(client: Tree, site: Site) -> Tree:
        return client  # the warm start: w_{t,0} = w_{t-1,K}

    def objective(work: Tree, batch: Batch, site: Site) -> Tensor:
        lam = site.hyper["prox_strength"]
        pull = tree.sqdist(work["params"], site.common["params"])
        return task.loss(work["params"], batch) + 0.5 * lam * pull  # h_i of Eq. (8)

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        lam = site.hyper["prox_strength"]
        push = tree.map(lambda g, w: lam * (g - w), site.common["params"], work["params"])
        return work, {"push": push}  # λ(w_g − w_{t,K})

    def server_step(hub: Hub) -> Tensor:
        """Return γ; zero where λ = 0, as then nothing is pushed."""
        if preset == "free":
            gamma: Tensor = hub.hyper["server_lr"]
            return gamma
        lam = hub.hyper["prox_strength"].max()
        safe = torch.where(lam > 0, lam, torch.ones_like(lam))
        if preset == "paper_real":
            gamma = 1.0 / safe
        else:
            gamma = (safe + big) / (safe * big)  # 1/L_g
            gamma = gamma / 2.0 if preset == "corollary1" else gamma
        return torch.where(lam > 0, gamma, torch.zeros_like(gamma))

    def aggregate(server: Tree, uploads: Tree, hub: Hub) -> Tree:
        sizes = hub.sizes.to(hub.hyper["prox_strength"].dtype)
        p = sizes / sizes.sum() if weights == "samples" else torch.ones_like(sizes) / sizes.shape[0]
        share = p[hub.cohort] * hub.present
        if unbiased:
            share = share * hub.sizes.shape[0] / hub.present.sum().clamp(min=1)
        else:
            share = share / torch.where(share.sum() > 0, share.sum(), torch.ones_like(share.sum()))
        slope = weighted_sum(uploads["push"], share)
        gamma = server_step(hub)
        return {"params": tree.map(lambda w, g: w - gamma * g, server["params"], slope)}

    hyper = {**local.hyper, "prox_strength": Hyper(0.1, 0.0, note="use 0 for pure local training")}
    if derived:
        del hyper["local_lr"]
    if preset == "free":
        hyper["server_lr"] = Hyper(
            1.0, 0.0, note="1/prox_strength averages the clients' models", server=True
        )
    return Method(
        name="fedprox",
        hyper=hyper,
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        begin=begin,
        phases=(
            descend(
                objective,
                local,
                lr=(lambda work, site: 1.0 / (big + site.hyper["prox_strength"]))
                if derived
                else "local_lr",
                steps=(lambda site: site.common["steps"]) if preset == "corollary1" else None,
            ),
        ),
        finish=finish,
        aggregate=aggregate,
    )


def local_steps(prox_strength: Tensor, smoothness: float, strong_convexity: float) -> Tensor:
    """Return the smallest K of condition (12) at Corollary 1's steps.

    ⌈ln(16(2 + 64λ²/μ²)) / ln((λ+L)/(L−μ))⌉.
    """
    lam = prox_strength.double()
    if smoothness == strong_convexity:
        return torch.ones_like(lam, dtype=torch.int64)
    need = torch.log(16.0 * (2.0 + 64.0 * lam.square() / strong_convexity**2))
    rate = torch.log((lam + smoothness) / (smoothness - strong_convexity))
    return torch.ceil(need / rate - 1e-12).clamp(min=1).to(torch.int64)


def corollary1(
    prox_strength: float, smoothness: float, strong_convexity: float
) -> dict[str, float]:
    """Return Corollary 1's numbers for one λ.

    Local_lr, server_lr, num_local_steps, and Theorem 2's rate a round.

    >>> corollary1(2.0, 4.0, 1.0)["num_local_steps"]
    13
    """
    lam, big, small = prox_strength, smoothness, strong_convexity
    l_g, mu_g = lam * big / (lam + big), lam * small / (lam + small)
    gamma = 1.0 / (2.0 * l_g)
    steps = int(local_steps(torch.tensor(lam, dtype=torch.float64), big, small))
    return {
        "local_lr": 1.0 / (lam + big),
        "server_lr": gamma,
        "num_local_steps": steps,
        "num_local_steps_bound": math.ceil(
            2 + (lam + big) / (lam + small) * math.log(1056.0 * (big / small) ** 2)
        ),
        "rate": 1.0 - gamma * mu_g / 2.0 - (gamma * mu_g) ** 2 / 2.0,
    }
