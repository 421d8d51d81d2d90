"""FedEM: a few shared component models; each client mixes them with weights of its own.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021 (arXiv 2108.10252). A competitor of Shi et al. 2023. Not the FedEM of
Dieuleveut et al. 2021.

| symbol | here | meaning |
|---|---|---|
| θ_1 … θ_M | server["params"] | the components, on a leading axis of every leaf |
| π_i | client["mixture"] | the client's weights of the components; never sent |
| q_lm | work["posterior"] | how likely component m is to have made sample l; forgotten |
| M | components | their number; 3 in the paper |
| β | relax | over-relaxation of the average (Shi et al. 2023); 1 is plain |

A round is one step of expectation-maximisation. E: q_l = softmax_m(log π_im − ℓ_m(x_l, y_l)) for
every training sample, then π_i = mean_l q_l. M: each θ_m takes SGD steps on mean_l q_lm ℓ_m. The
server averages every θ_m by numbers of samples. A client predicts with Σ_m π_im p_m(y|x): it mixes
probabilities, not logits (for losses other than cross-entropy it mixes the outputs).

The paper's runs: M = 3, one epoch, batch 128, lr 0.03 with decay, momentum 0.9 kept between rounds,
weight decay 5e-4. Components must start apart, for equal ones stay equal: θ_1 is the network's own
start, and the others are the same numbers in another order within each leaf (the authors draw anew;
entries of a leaf are drawn alike, so an order is a draw). Differs from the authors' code: only the
clients of a round are averaged.

A newcomer downloads the components, takes the E-step on its training data, which sets its weights,
and trains nothing; `refresh_weights=True` does that for every client before its model is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core import rng, tree
from sartor.core.errors import below, refuse
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, Phase, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import Weights, averaged, with_kept
from sartor.methods.parts.mixture import component, mixed_scores
from sartor.methods.parts.starts import shuffled


def fedem(
    task: Task,
    local: Local,
    *,
    components: int = 3,
    weights: Weights = "samples",
    refresh_weights: bool = False,
) -> Method:
    """Build FedEM: max Σ_i Σ_l log Σ_m π_im exp(−ℓ_m(x_l, y_l)).

    Args:
        task: the network and its loss, a negative log-likelihood.
        local: the M-step, all components on the same batches.
        components: M; 1 is FedAvg.
        weights: how the server averages: by numbers of samples (the paper's), or evenly.
        refresh_weights: whether every client takes the E-step anew before its model is used, under
            the components it has just received.
    """
    refuse(below(1, "1 is FedAvg.", components=components))
    base = with_kept(averaged(task, local, weights), "mixture")

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        starts = [params]
        for m in range(1, components):
            starts.append({k: shuffled(p, rng.fold(ctx.key, k, m)) for k, p in params.items()})
        return {"params": tree.stack(starts)}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        even = tree.leaves(params)[0].new_full((components,), 1.0 / components)
        return {"mixture": even, **local.start(params=tree.stack([params] * components))}

    def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return Σ_m mean_l q_lm ℓ_m: the gradients of the components stay apart."""
        # Alg., M-step
        q = work["posterior"].index_select(0, batch.rows)
        parts = [
            task.mean(q[:, m] * task.losses(component(work["params"], m), batch), batch)
            for m in range(components)
        ]
        return torch.stack(parts).sum()

    expect = _expectation(task, components)
    return changed(
        base,
        name="fedem",
        init_server=init_server,
        init_client=init_client,
        phases=(expect, descend(task, local, objective, stacked=True)),
        # As logarithms, so that fine-tuning cannot make them negative.
        model=lambda work, ctx: {"params": work["params"], "weights": work["mixture"].log()},
        predict=lambda model, x: mixed_scores(task, model["params"], model["weights"], x),
        adapt=(expect,) if refresh_weights else (),
        centre=None,
        private=lambda leaf: leaf in ("mixture", "posterior"),
    )


def _expectation(task: Task, components: int) -> Phase:
    """Build the E-step: a pass that fills ``posterior`` and then sets ``mixture``."""

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        # The spare row takes the padding.
        blank = work["mixture"].new_zeros((ctx.mask.shape[0] + 1, components))
        return {**work, "posterior": blank}

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        # Alg., E-step: q_lm ∝ π_im exp(−ℓ_m(x_l, y_l))
        parts = [task.losses(component(work["params"], m), batch) for m in range(components)]
        q = torch.softmax(work["mixture"].log() - torch.stack(parts, -1), -1)
        q = torch.where(batch.mask[:, None], q, torch.zeros_like(q))
        return {**work, "posterior": work["posterior"].index_copy(0, batch.rows, q)}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        num = ctx.num_samples.to(work["mixture"].dtype)
        mean = work["posterior"].sum(0) / num.clamp(min=1.0)  # Alg.: π_im = mean_l q_lm
        return {**work, "mixture": torch.where(num > 0, mean, work["mixture"])}

    return Phase("expectation", step, enter, leave, batch=64, shuffle=False)
