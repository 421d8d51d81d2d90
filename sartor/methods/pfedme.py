"""pFedMe: minimise the mean Moreau envelope of the clients' losses; each keeps its proximal point.

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020 (arXiv
2006.08848), Algorithm 1.

| symbol | here | meaning |
|---|---|---|
| θ_i | client["params"] | the personal model, which is scored; never sent |
| w_{i,r} | work["local"] | the client's copy of the global model; sent after R steps |
| λ | prox_strength | the pull of θ towards w; 15 to 30 in the paper |
| K | prox_steps | gradient steps of the proximal solve, all on one batch; 5 |
| α | personal_lr | their size; 0.01 to 0.1 in the paper; keep α(λ + L) < 2 |
| η | local_lr | the step of w; 0.005 to 0.01 in the paper, with hundreds of rounds |
| R | local.steps | mini-batches a round; 20 in the paper (batch 20) |
| β | relax | the server's over-relaxation; 1 is plain, 2 is the "AM" of Shi et al. 2023 |

All clients train in every round and a sample of them is averaged (`train_all`). The paper does not
say where a proximal solve starts: ours starts at w_{i,r}; `inner_start="carry"` continues from the
last θ after the first batch of a round, as the authors' code does. That code also averages by
samples (`weights="samples"`; the paper averages plainly), decays the weights in the proximal steps
(`weight_decay=0.001` of local training, which acts on θ alone), and scores w_{i,R} in place of θ_i
(ours does not).

A newcomer takes the global model for θ and w, and finds its proximal point when it trains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from sartor.core import tree
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Weights, averaged
from sartor.methods.parts.proximal import check_proximal, proximal_hyper


def pfedme(
    task: Task,
    local: Local,
    *,
    prox_steps: int = 5,
    inner_start: Literal["w", "carry"] = "w",
    weights: Weights = "uniform",
    train_all: bool = True,
) -> Method:
    """Build pFedMe: min_w mean_i F_i(w), F_i(w) = min_θ f_i(θ) + (λ/2)‖θ − w‖².

    Args:
        task: the network and its loss.
        local: local training; one step is one mini-batch with its proximal solve.
        prox_steps: K.
        inner_start: where a proximal solve starts: at w, or at the last θ ("carry").
        weights: how the server averages: plainly (the paper's), or by numbers of samples.
        train_all: whether all clients train in every round (the paper's), or the sampled ones only.
    """
    check_proximal("pfedme", local, prox_steps)
    base = averaged(task, local, weights)
    (train,) = base.phases  # of which a step is one mini-batch with its proximal solve

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"params": params}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        return {"params": client["params"], "local": ctx.common["params"]}

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        return {**work, "params": work["local"]} if inner_start == "carry" else work

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return f_i(θ) + (λ/2)‖θ − w‖²."""
        theta, w, lam = work["params"], work["local"], ctx.hyper["prox_strength"]
        return task.loss(theta, batch) + half_square(lam, theta, w)  # Alg. 1, proximal solve

    solve = descend(task, local, objective, lr="personal_lr")

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        if inner_start == "w":
            work = {**work, "params": work["local"]}
        for _ in range(prox_steps):
            work = solve.step(work, batch, ctx)
        rate = local.rate(ctx) * ctx.hyper["prox_strength"]
        w, theta = work["local"], work["params"]
        # Alg. 1, step of w: w_{i,r+1} = w_{i,r} − ηλ(w_{i,r} − θ)
        return {**work, "local": tree.add_difference(w, theta, w, rate)}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        return {"params": work["params"]}, {"params": work["local"]}

    return changed(
        base,
        name="pfedme",
        hyper=proximal_hyper(local),
        init_client=init_client,
        begin=begin,
        phases=(replace(train, step=step, enter=enter),),
        finish=finish,
        who="everyone_trains" if train_all else "cohort",
    )
