"""pFedBreD: pFedMe with a centre of its own for each client, and a Bregman divergence as distance.

Shi et al., "PRIOR: Personalized Prior for Reactivating the Information Overlooked in Federated
Learning", NeurIPS 2023, Algorithm 1, Eq. (12)-(14), (22), A.7.

| symbol | here | meaning |
|---|---|---|
| θ_i | client["params"] | the personal model, which is scored; never sent |
| w̄_i | client["memory"] | the last w_{i,R} of this client, before averaging; never sent |
| w_{i,r} | work["local"] | the client's copy of the global model; sent after R steps |
| μ_i | mu | the centre of the proximal solve: the mean of the personal prior |
| λ | prox_strength | the strength of the prior; 15 to 60 in the paper |
| α_m, α | local_lr, personal_lr | steps of w and of θ; 0.01 and 0.01 in the paper |
| η_α, η | prior_lr, memory_lr | steps of μ along the gradient and the memory; 0.01 and 0.05 |
| K, R | prox_steps, local.steps | proximal steps, mini-batches a round; 5 and 20 (batch 20) |
| β | relax | the server's over-relaxation; 1 is plain, 2 is the trick "AM" |
| c | prior_width | the width of the map from weights to means; see `sartor.methods.parts.bregman` |

Strategies (14), with w = w_{i,r−1} and θ = θ_{i,r−1}: `none` μ = w (pFedMe); `lg`
μ = w − η_α∇f(w); `meg` μ = w − η(w̄ − θ); `mh` both; `mh-variant` (22) takes the gradient at
w − η_α∇f(w; D') on a batch D' of its own. Then θ ← K steps on f + λD_{g*}(·, μ), and
w ← w − α_mλ∇²g*(μ)(μ − θ): the gradient (13) of the envelope with Dμ = I (A.7);
`envelope="exact"` multiplies by [Dμ]ᵀ.

`mode="code"` is the authors' program: `mh` is (22), and the stepped point w' = w − η_α∇f(…)
replaces w in the step of w as well; `lg` has η_α = 0.05; a proximal solve starts at μ (lg), w (meg)
or w' (mh); the server averages by samples. The paper says neither where a solve starts (ours: μ)
nor which batch ∇f is taken on (ours: that of the proximal solve). Families other than the Gaussian
take mirror steps, which stay inside the domain; w and μ are clipped into it. The mirror step moves
a weight near 0 by about α c² times the slope.

A newcomer takes the global model for θ, w and the memory, and trains from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend, half_square
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task, grad, hessian_product
from sartor.core.tree import Tree
from sartor.methods.fedavg import Weights, averaged
from sartor.methods.parts.bregman import KINDS, Gaussian, Separable, check_prior
from sartor.methods.parts.proximal import check_proximal, proximal_hyper

Prior = Gaussian | Separable
Centre = tuple[Tree, Tree, Tree]
Strategy = Literal["none", "lg", "meg", "mh", "mh-variant"]


class Recipe(NamedTuple):
    """What a strategy adds to w to make the mean μ of the prior."""

    gradient: bool = False
    memory: bool = False
    twice: bool = False


RECIPES: dict[str, Recipe] = {
    "none": Recipe(),  # μ = w: pFedMe
    "lg": Recipe(gradient=True),  # Eq. (14): μ = w − η_α∇f(w)
    "meg": Recipe(memory=True),  # Eq. (14): μ = w − η(w̄ − θ)
    "mh": Recipe(gradient=True, memory=True),  # Eq. (14): μ = w − η_α∇f(w) − η(w̄ − θ)
    # Eq. (22): μ = w − η_α∇f(w − η_α∇f(w; D')) − η(w̄ − θ)
    "mh-variant": Recipe(gradient=True, memory=True, twice=True),
}


def pfedbred(
    task: Task,
    local: Local,
    *,
    strategy: Strategy = "mh",
    mode: Literal["paper", "code"] = "paper",
    family: Literal["gaussian", "bernoulli", "poisson", "exponential"] = "gaussian",
    covariance: Any = None,
    mapping: Literal["auto", "affine", "none"] = "auto",
    envelope: Literal["first_order", "exact"] = "first_order",
    prox_steps: int = 5,
    inner_start: Literal["mu", "w", "theta"] | None = None,
    weights: Weights | None = None,
    train_all: bool = True,
) -> Method:
    """Build pFedBreD: min_w mean_i F_i(w), F_i(w) = min_θ f_i(θ) + λ D_{g*}(θ, μ_i(w)).

    Args:
        task: the network and its loss.
        local: local training; one step is one mini-batch with its proximal solve.
        strategy: how μ_i(w) is made; see the module's docstring.
        mode: the paper's algorithm, or what the authors' program does.
        family: the exponential family of the prior.
        covariance: Σ of the Gaussian: per parameter a variance or a tensor of variances, or a
            matrix over the flattened parameters in sorted order; the identity if None.
        mapping: how weights enter the family: through an affine map of width `prior_width`, or as
            means themselves ("none"); "auto" maps where the family is not Gaussian.
        envelope: the gradient of the envelope, to first order or exact.
        prox_steps: K.
        inner_start: where a proximal solve starts; the mode's own if None.
        weights: how the server averages; the mode's own if None.
        train_all: whether all clients train in every round (the paper's), or the sampled ones only.
    """
    check_proximal("pfedbred", local, prox_steps)
    as_code = mode == "code"
    recipe = RECIPES["mh-variant" if as_code and strategy == "mh" else strategy]
    replaces = recipe.twice and as_code
    start = inner_start or ("mu" if not as_code or strategy == "lg" else "w")
    affine = family != "gaussian" and mapping != "none"
    if envelope == "exact" and as_code:
        raise ConfigError(
            "envelope='exact' is the gradient of the paper's objective, and mode='code' does not "
            "step along it; use mode='paper', or envelope='first_order'."
        )
    rounds = averaged(task, local, weights or ("samples" if as_code else "uniform"))  # line 12
    (train,) = rounds.phases  # of which a step is one mini-batch with its proximal solve
    sigma = check_prior(family, covariance, mapping, task.init(0))

    def prior_of(work: Tree, ctx: ClientContext) -> Prior:
        if family == "gaussian":
            return sigma.like(tree.leaves(work["local"])[0])
        return Separable(KINDS[family], ctx.hyper["prior_width"] if affine else None)

    def loss(params: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
        """Return f_i; weight decay belongs to it."""
        value = task.loss(params, batch)
        if not local.weight_decay:
            return value
        return value + 0.5 * ctx.hyper["weight_decay"] * tree.dot(params, params)

    def ahead(w: Tree, at: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Return w − η_α∇f(at)."""
        slope = grad(lambda p: loss(p, batch, ctx))(at)
        return tree.addcmul(w, slope, -ctx.hyper["prior_lr"])

    def centre(work: Tree, prior: Prior, batch: Batch, other: Batch, ctx: ClientContext) -> Centre:
        """Return μ_i(w), w after the gradient alone, and where that gradient was taken."""
        w = at = stepped = work["local"]
        if recipe.gradient:
            at = ahead(w, w, other, ctx) if recipe.twice else w
            stepped = prior.project(ahead(w, at, batch, ctx))
        if not recipe.memory:
            return stepped, stepped, at
        theta, last = work["params"], work["memory"]
        mu = tree.add_difference(stepped, theta, last, ctx.hyper["memory_lr"])
        return prior.project(mu), stepped, at

    def solve(prior: Prior, theta: Tree, mu: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        """Take K steps down f + λD_{g*}(·, μ), Eq. (12)."""
        lam, alpha = ctx.hyper["prox_strength"], ctx.hyper["personal_lr"]

        def objective(work: Tree, batch: Batch, ctx: ClientContext) -> Tensor:
            theta = work["params"]
            if prior.spherical:
                return task.loss(theta, batch) + half_square(lam, theta, mu)
            return task.loss(theta, batch) + lam * prior.divergence(theta, mu)

        descent = descend(task, local, objective, lr="personal_lr")
        for _ in range(prox_steps):
            if isinstance(prior, Gaussian):
                theta = descent.step({"params": theta}, batch, ctx)["params"]
            else:
                slope = local.clipped(grad(lambda p: task.loss(p, batch))(theta), ctx)
                if local.weight_decay:
                    slope = tree.addcmul(slope, theta, ctx.hyper["weight_decay"])
                theta = prior.mirror_step(theta, mu, slope, alpha, lam)
        return theta

    def step(work: Tree, batches: Any, ctx: ClientContext) -> Tree:
        batch, other = batches if recipe.twice else (batches, batches)
        prior, w = prior_of(work, ctx), work["local"]
        mu, stepped, at = centre(work, prior, batch, other, ctx)  # line 7
        base = stepped if replaces else w
        starts = {"mu": mu, "w": base, "theta": work["params"]}
        theta = solve(prior, starts[start], mu, batch, ctx)  # line 8
        push = prior.curve(mu, tree.sub(mu, theta))  # Eq. (13) with Dμ = I
        if envelope == "exact" and recipe.gradient:
            # [Dμ]ᵀv = v − η_α(1 − η_α∇²f(w; D'))∇²f(at)v; without D', v − η_α∇²f(w)v
            eta = ctx.hyper["prior_lr"]
            bent = hessian_product(lambda p: loss(p, batch, ctx), at, push)
            if recipe.twice:
                again = hessian_product(lambda p: loss(p, other, ctx), w, bent)
                bent = tree.map(lambda x, h: x - eta * h, bent, again)
            push = tree.map(lambda x, h: x - eta * h, push, bent)
        rate = local.rate(ctx) * ctx.hyper["prox_strength"]
        moved = prior.project(tree.addcmul(base, push, -rate))  # line 9
        return {**work, "params": theta, "local": moved}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return {"params": params, "memory": params} if recipe.memory else {"params": params}

    def begin(client: Tree, ctx: ClientContext) -> Tree:
        work = {**client, "local": ctx.common["params"]}  # line 5
        return {k: prior_of(work, ctx).project(v) for k, v in work.items()}

    def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
        kept = {"memory": work["local"]} if recipe.memory else {}
        return {"params": work["params"], **kept}, {"params": work["local"]}

    hyper = proximal_hyper(local)
    if recipe.gradient:
        eta = 0.05 if as_code and strategy == "lg" else 0.01
        hyper["prior_lr"] = Hyper(eta, 0.0, note="0 leaves the gradient out of the prior's mean")
    if recipe.memory:
        hyper["memory_lr"] = Hyper(0.05, 0.0, note="0 leaves the memory out of the prior's mean")
    if affine:
        hyper["prior_width"] = Hyper(1.0, 0.0, open_low=True, note="weights stay within about it")
    return changed(
        rounds,
        name="pfedbred",
        hyper=hyper,
        init_client=init_client,
        begin=begin,
        phases=(replace(train, step=step, draws=2 if recipe.twice else 1),),
        finish=finish,
        who="everyone_trains" if train_all else "cohort",  # line 4
    )
