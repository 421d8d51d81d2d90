"""pFedBayes: every weight is a Gaussian; own distributions, kept near a global one by a KL term.

Zhang, Li, Li, Guo, Shao, "Personalized Federated Learning via Variational Bayesian Inference", ICML
2022 (arXiv 2206.07977). A competitor of Shi et al. 2023.

| symbol | here | meaning |
|---|---|---|
| v = (μ, ρ) | server["params"] | the global distribution: N(μ, σ²) with σ = log(1 + e^ρ) |
| v_i, q_i | client["own"] | the client's distribution, kept between rounds, never sent |
| u_i | work["copy"]["near"] | its copy of the global distribution, which moves and is sent |
| ζ | kl_strength | the weight of KL(q_i ‖ u_i); 10 in the paper |
| ρ_0 | rho_start | the first ρ of all weights; −2.5 in the paper |
| η_1, η_2 | local_lr, copy_lr | the steps of v_i and of u_i; 0.001 in the paper |
| K | draws | noise vectors ε per gradient |
| β | relax | v ← (1 − β)v + β mean(u_i); 1 in the paper |
| – | noise_scale | the standard deviation of ε: 1; the public code has 0.001 |

A local step on one batch: v_i takes `personal_steps` steps on mean_k NLL(μ_i + σ_i ε_k) +
(ζ/n_i) KL(q_i ‖ u_i), each with new noise; then u_i takes one on (ζ/n_i) KL(q_i ‖ u_i). The
objective is the paper's divided by n_i, so that rates are comparable with those of other methods.
The KL has curvature ζ/(n_i σ²) in the means, and SGD needs a rate below 2/curvature: so ζ is 0.1
here by default, as ζ = 10 asks for the rate of the paper. 20 steps of batch 100 there.

Differs from the paper: only the clients of a round train; weight decay, where local training has
it, acts on the mean of q_i and is part of what is clipped; μ starts as the network does (N(0, 0.1²)
in the public code). That code takes Adam, five personal steps a batch, and averages by samples
(`weights="samples"`). The momentum of u_i starts anew in every round.

A newcomer takes the mean of the global distribution for its own mean and ρ_0 for its spread, and
trains on from there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Weights, averaged
from sartor.methods.parts.mixture import mixed_scores


def pfedbayes(
    task: Task,
    local: Local,
    *,
    draws: int = 1,
    personal_steps: int = 1,
    predict_draws: int = 0,
    weights: Weights = "uniform",
) -> Method:
    """Build pFedBayes: min_w mean_i min_q {−E_q log p(D_i|θ) + ζ KL(q ‖ w)}.

    Args:
        task: the network and its loss, a negative log-likelihood.
        local: local training; one step is one batch.
        draws: K.
        personal_steps: steps of v_i on every batch; 1 in the paper, 5 in the public code.
        predict_draws: networks drawn from q_i whose probabilities are averaged; 0 uses the mean
            network.
        weights: how the server averages: evenly (the paper's), or by numbers of samples.
    """
    faults = below(1, "1 is the default.", draws=draws, personal_steps=personal_steps)
    refuse([*faults, *below(0, "0 is the default.", predict_draws=predict_draws)])
    base = averaged(task, local, weights)
    plain = replace(local, weight_decay=0.0)

    def first(params: Tree, start: Tensor) -> Tree:
        return {"mu": params, "rho": tree.map(lambda p: torch.ones_like(p) * start, params)}

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        return {"params": first(params, ctx.hyper["rho_start"])}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        own = first(params, ctx.hyper["rho_start"])
        return {"own": own, **plain.start(own=own)}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        copy = {"near": ctx.common["params"]}
        return {"own": client["own"], "copy": copy, **plain.kept(client)}

    def pull(own: Tree, near: Tree, ctx: ClientContext) -> Tensor:
        return ctx.hyper["kl_strength"] / ctx.num_samples * kl(own, near)

    def of_own(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        own, scale = work["own"], ctx.hyper["noise_scale"]
        nets = [sampled(own, scale * work["noise"][k]) for k in range(draws)]
        fit = torch.stack([task.loss(net, batch) for net in nets]).mean()
        if local.weight_decay:
            fit = fit + 0.5 * ctx.hyper["weight_decay"] * tree.dot(own["mu"], own["mu"])
        # Alg., client, own distribution: NLL + (ζ/n_i) KL(q_i ‖ u_i)
        return fit + pull(own, work["copy"]["near"], ctx)

    def of_copy(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        return pull(work["own"], work["near"], ctx)  # Alg., client, copy: (ζ/n_i) KL(q_i ‖ u_i)

    train = descend(task, plain, of_own, over=("own",))
    afresh = replace(plain, keep_optimiser=False)
    follow = descend(task, afresh, of_copy, over=("near",), lr="copy_lr")

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        return {**train.enter(work, ctx), "copy": follow.enter(work["copy"], ctx)}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        like = tree.leaves(work["own"]["mu"])
        shape = (personal_steps, draws, sum(leaf.numel() for leaf in like))
        noise = rng.normal(ctx.key, shape, like[0].dtype)
        for j in range(personal_steps):
            work = train.step({**work, "noise": noise[j]}, batch, ctx)
        copy = follow.step({**work["copy"], "own": work["own"]}, batch, ctx)
        changed = {"copy": {k: v for k, v in copy.items() if k != "own"}}
        return {k: v for k, v in {**work, **changed}.items() if k != "noise"}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {"own": work["own"], **plain.kept(work)}, {"params": work["copy"]["near"]}

    def model(work: Tree, ctx: ClientContext) -> Tree:
        own = work["own"]
        if not predict_draws:
            return own["mu"]
        like = tree.leaves(own["mu"])
        shape = (predict_draws, sum(leaf.numel() for leaf in like))
        noise = rng.normal(rng.fold(ctx.key, "predict"), shape, like[0].dtype)
        scaled = ctx.hyper["noise_scale"] * noise
        return {"networks": tree.stack([sampled(own, scaled[k]) for k in range(predict_draws)])}

    def predict(networks: Tree, x: Tensor) -> Tensor:
        table = networks["networks"]
        return mixed_scores(task, table, tree.leaves(table)[0].new_zeros(predict_draws), x)

    return changed(
        base,
        name="pfedbayes",
        hyper={
            **base.hyper,
            "copy_lr": Hyper(local.lr, 0.0, note="the step of the global distribution's copy"),
            "kl_strength": Hyper(0.1, 0.0, note="0 leaves every client alone"),
            "rho_start": Hyper(-2.5, note="the first spread of a weight is log(1 + exp(this))"),
            "noise_scale": Hyper(1.0, 0.0, note="0 trains the mean network alone"),
        },
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        phases=(replace(train, enter=enter, step=step, random=True),),
        finish=finish,
        model=model,
        predict=predict if predict_draws else None,
        centre=lambda server, ctx: server["params"]["mu"],
        private=lambda leaf: leaf == "own",
    )


def sampled(own: Tree, noise: Tensor) -> Tree:
    """Return the network μ + σ ε, for ε (parameters,) in the order of the leaves."""
    mu, rho = tree.flat(own["mu"]), tree.flat(own["rho"])
    return tree.shaped(mu + F.softplus(rho) * noise, own["mu"])


def log_sigma(rho: Tensor) -> Tensor:
    """Return log(log(1 + e^ρ)), which is ρ itself far below zero."""
    return torch.where(rho < -20.0, rho, F.softplus(rho.clamp(min=-20.0)).log())


def kl(q: Tree, w: Tree) -> Tensor:
    """Return KL(q ‖ w) of independent Gaussians, summed over all weights."""
    log_w = log_sigma(tree.flat(w["rho"]))
    wider = log_w - log_sigma(tree.flat(q["rho"]))
    away = (tree.flat(q["mu"]) - tree.flat(w["mu"])) * torch.exp(-log_w)
    return (wider + 0.5 * (torch.exp(-2.0 * wider) + away.square() - 1.0)).sum()
