"""Per-FedAvg: FedAvg over meta-gradients, for a start from which one step gives a good model.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020 (arXiv 2002.07948), Algorithm 1. A competitor
of Shi et al. 2023 (first order, Appendix C.3).

| symbol | here | meaning |
|---|---|---|
| w_t | server["params"] | the common starting point |
| α | personal_lr | the inner step, and the step of personalisation |
| β | local_lr | the meta-step |
| δ | difference | the width of the difference that stands for the Hessian (`hessian_free`) |
| τ | Local | meta-steps a round |
| D, D', D'' | batches | independent batches of a step: inner gradient, outer gradient, Hessian |
| β_AM | relax | over-relaxation of the average (Shi et al. 2023); 1 is plain |

With w̃ = w − α∇f(w; D) and g = ∇f(w̃; D') a step is w ← w − β·d, where d is
`first_order` g; `hessian_free` g − α[∇f(w + δg; D'') − ∇f(w − δg; D'')]/(2δ); `exact`
g − α∇²f(w; D'')g. The step is applied to w and the difference taken around w, never around w̃.

The paper's runs: α = 0.01, β = 0.001, τ = 10, batch 40, uniform weights, one step of
personalisation. `preset="prior"` personalises as Shi et al. 2023 do: a step with the rate of
training, then one with the personal rate (both 0.01); their "+FT" is one more, `personal_steps=2`.
D' is what FedAvg would see, so at α = 0 the method is FedAvg to the bit.

A newcomer takes the common start and personalises it as the other clients do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sartor.core import tree
from sartor.core.errors import ConfigError, below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task, grad, hessian_product
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg


def per_fedavg(
    task: Task,
    local: Local,
    *,
    mode: Literal["first_order", "hessian_free", "exact"] = "first_order",
    preset: Literal["paper", "prior"] = "paper",
    personal_steps: int = 1,
    rule: Literal["uniform", "normalized"] = "uniform",
) -> Method:
    """Build Per-FedAvg: min_w Σ p_i f_i(w − α∇f_i(w)).

    Args:
        task: the network and its loss.
        local: the meta-steps of a round; every step draws two batches (three with a Hessian) of the
            given size. Plain steps only: no momentum, no weight decay.
        mode: how the Hessian in the meta-gradient is treated; see the module's docstring.
        preset: `paper` personalises with the personal rate alone; `prior` takes one step with the
            rate of training before.
        personal_steps: steps of personalisation with the personal rate, on training data.
        rule: how the server averages: evenly (the paper's), or by numbers of samples.
    """
    local.only_sgd("per-fedavg", "takes plain meta-steps")
    if local.momentum or local.weight_decay:
        raise ConfigError(
            "Per-FedAvg takes plain meta-steps, got "
            f"momentum={local.momentum:g} and weight_decay={local.weight_decay:g}; set both to 0."
        )
    advice = "for the model without personalisation look at the scores of the point 'global'."
    refuse(below(1, advice, personal_steps=personal_steps))
    base = fedavg(task, local, rule=rule)

    def slope(params: Tree, batch: Batch) -> Tree:
        return grad(lambda at: task.loss(at, batch))(params)

    def curve(params: Tree, direction: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Return ∇²f(params) · direction, or the difference that stands for it."""
        if mode == "exact":
            return hessian_product(lambda at: task.loss(at, batch), params, direction)
        delta = ctx.hyper["difference"]
        ahead = slope(tree.map(lambda w, g: w + delta * g, params, direction), batch)
        behind = slope(tree.map(lambda w, g: w - delta * g, params, direction), batch)
        return tree.map(lambda a, b: (a - b) / (2.0 * delta), ahead, behind)

    def step(work: Tree, batches: tuple[Batch, ...], ctx: ClientContext) -> Tree:
        outer, inner = batches[:2]  # D' is the first draw: the batch of every other method
        w, alpha = work["params"], ctx.hyper["personal_lr"]
        # Alg. 1, client: w̃ = w − α∇f(w; D), then w ← w − β (I − α∇²f(w; D'')) ∇f(w̃; D')
        tried = tree.addcmul(w, slope(w, inner), -alpha)
        d = slope(tried, outer)
        if mode != "first_order":
            d = tree.map(lambda g, h: g - alpha * h, d, curve(w, d, batches[2], ctx))
        rate, d = -local.rate(ctx), local.clipped(d, ctx)
        return {"params": tree.addcmul(w, d, rate)}

    steps = replace(local, steps=personal_steps)
    adapt = [descend(task, steps, name="personalise", lr="personal_lr")]
    if preset == "prior":
        first = descend(task, replace(local, steps=1), name="personalise by training rate")
        adapt.insert(0, first)
    hyper = {**base.hyper, "personal_lr": Hyper(local.lr, 0.0, note="the inner step; 0 is FedAvg")}
    if mode == "hessian_free":
        note = "the width of the difference of gradients"
        hyper["difference"] = Hyper(1e-3, 0.0, open_low=True, note=note)
    (train,) = base.phases
    return changed(
        base,
        name="per-fedavg",
        hyper=hyper,
        phases=(replace(train, step=step, draws=2 if mode == "first_order" else 3),),
        adapt=tuple(adapt),
    )
