"""The dichotomous strategy: FedAvg or LocalTrain, whichever is better.

Chen, Zheng, Long, Su, "Minimax Estimation for Personalized Federated Learning", JMLR 24, 2023,
section 3.3, Eq. (18), (19): up to constants one of the two is optimal, with the switch where R²
equals m/N. Version `sample_split`: Yu et al., "The Effect of Personalization in FedProx" (arXiv
2410.08934), appendix C.3.

| symbol | here | meaning |
|---|---|---|
| R | heterogeneity | the distance of the clients' best models from their mean |
| ‖ℓ‖∞/μ | threshold_scale | the constant of the threshold R² ≤ (‖ℓ‖∞/μ)·m/N |
| – | server["choice"] | for every client, 0 for FedAvg and 1 for its own model |
| – | server["group"] | for every client, the lowest index in its cluster |

Versions: `holdout` trains both and takes the one with the lower error on held-out samples, for all
clients together (`scope="system"`) or each for itself (`scope="client"`); ties go to FedAvg.
`threshold` decides before training and runs the chosen one only: by a given R, or by R estimated
from two fits per client on halves of its samples. `sample_split` fits LocalTrain and FedAvg on
disjoint samples. `clustered` first groups the clients by those fits and then decides inside every
group, by `inside`; a client alone keeps its own model.

Ours, where the papers are silent: held-out samples come from the training data (a share
`val_share`, drawn at random), so that test data stay clean; `select_on="test"` is there to
reproduce the optimistic table of Yu et al. Clusters: the papers discuss them and give no algorithm.

Bytes: a client that is known to train alone receives nothing but the choice itself, which is not
counted then; with every other message it is, as eight bytes.

A newcomer uses what most clients use: the common model, or one that it trains alone. With clusters
there is no rule for it, as it belongs to none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.compose import within_groups
from sartor.compose.choice import Scope, SelectOn, best_of
from sartor.core import tree
from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local, descend
from sartor.core.method import ClientContext, Method, Phase, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.methods.fedavg import fedavg
from sartor.methods.local import local as local_train
from sartor.methods.parts.grouping import cross_distances, k_means, single_linkage
from sartor.theory.heterogeneity import crossover, shares, split_half


def dichotomous(
    task: Task,
    local: Local,
    *,
    version: Literal["holdout", "threshold", "sample_split", "clustered"] = "holdout",
    scope: Scope = "system",
    radius: Literal["given", "estimated"] = "given",
    inside: Literal["holdout", "threshold"] = "holdout",
    select_on: SelectOn = "holdout",
    score: Literal["error", "loss"] = "error",
    val_share: float = 0.2,
    split_share: float = 0.5,
    num_clusters: int | None = None,
    fit_epochs: int = 20,
) -> Method:
    """Build the choice between FedAvg and LocalTrain.

    Args:
        task: the network and its loss.
        local: local training, of both.
        version: how to choose; see the module's docstring.
        scope: one choice for all clients (of a cluster), or one per client.
        radius: for `threshold`: R as a hyper-parameter, or estimated.
        inside: for `clustered`: how to choose inside a cluster.
        select_on: the samples that decide: held out from training, the federation's validation
            data, or its test data.
        score: what is compared: the share of wrong answers, or the mean loss.
        val_share: the share of the training data that is held out.
        split_share: for `sample_split`: the share of LocalTrain.
        num_clusters: for `clustered`: k-means with so many groups; single linkage with a cut at the
            largest gap if None.
        fit_epochs: epochs of the fits behind estimates and clusters.
    """
    clustered = version == "clustered"
    by_radius = version == "threshold" or (clustered and inside == "threshold")
    faults = [
        f"{name} must be between 0 and 1, got {value}; 0.2 is a fifth of every client's training "
        "samples."
        for name, value in (("val_share", val_share), ("split_share", split_share))
        if not 0.0 < value < 1.0
    ]
    advice = "leave it out for the default."
    faults += below(1, advice, num_clusters=num_clusters, fit_epochs=fit_epochs)
    idle = {
        "num_clusters": num_clusters is not None and not clustered,
        "inside": inside != "holdout" and not clustered,
        "radius without inside='threshold'" if clustered else "radius": radius != "given"
        and not by_radius,
    }
    no_effect = f"has no effect with version={version!r}; leave it out."
    refuse([*faults, *(f"{name} {no_effect}" for name, holds in idle.items() if holds)])
    by_fits = clustered or (by_radius and radius == "estimated")
    end = 1.0 - val_share if select_on == "holdout" and not by_radius else 1.0
    middle = split_share * end if version == "sample_split" else 0.0
    common = _on_part(fedavg(task, local), (middle, end))
    base = best_of(
        "dichotomous",
        task,
        scope=scope,
        select_on=select_on,
        score=score,
        held_out=(end, 1.0),
        fedavg=within_groups(common) if clustered else common,
        local=_on_part(local_train(task, local), (0.0, middle or end)),
    )

    def gate(phase: Phase) -> Phase:
        """Leave out what is known not to be used: decided before training, or alone in a group."""
        of_fedavg, before = phase.name.startswith("fedavg"), phase.when

        def when(work: Tree, ctx: ClientContext) -> Tensor:
            alone = ctx.own["choice"] == 1
            needed = ~alone if of_fedavg else alone | torch.full_like(alone, not by_radius)
            return needed if before is None else needed & before(work, ctx)

        return replace(phase, when=when)

    def init_server(params: Tree, ctx: ServerContext) -> Tree:
        server = base.init_server(params, ctx)
        if not by_radius or by_fits:
            return server
        # Eq. (18): the two terms of its minimum are equal at R² = (‖ℓ‖∞/μ) m/N.
        limit = ctx.hyper["threshold_scale"] * ctx.sizes.shape[0] / ctx.sizes.sum()
        alone = ctx.hyper["heterogeneity"].square() > limit
        return {**server, "choice": server["choice"] + alone}

    hyper = dict(base.hyper)
    if by_radius and not by_fits:
        note = "the distance of the clients' best models from their mean"
        hyper["heterogeneity"] = Hyper(1.0, 0.0, note=note, server=True)
        note = "the largest loss over the strong convexity"
        hyper["threshold_scale"] = Hyper(1.0, 0.0, open_low=True, note=note, server=True)
    method = changed(
        base,
        hyper=hyper,
        init_server=init_server,
        phases=tuple(gate(phase) for phase in base.phases),
        connected=lambda server, ctx: (
            ctx.present & (server["choice"].index_select(0, ctx.cohort) == 0)
        ),
        centre=None if clustered else lambda server, ctx: server["fedavg"]["params"],
        after=None if by_radius else base.schedule.after,
    )
    if not by_fits:
        return method

    def fit(slot: str, part: tuple[float, float]) -> Phase:
        """Fit a model on a part of the client's samples."""
        longer = replace(local, epochs=fit_epochs, steps=None, keep_optimiser=False)
        return replace(descend(task, longer, name=f"fit {slot}", over=(slot,)), part=part)

    def group_and_decide(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
        sent = (tree.flat(uploads[slot], 1) for slot in ("first", "second"))  # (slots, d)
        first, second = (torch.zeros_like(rows).index_copy(0, ctx.cohort, rows) for rows in sent)
        group = server["group"]
        if clustered and num_clusters is not None:
            group = k_means((first + second) / 2, num_clusters)
        elif clustered:
            group = single_linkage(cross_distances(first, second))
        alone = (group[:, None] == group[None, :]).sum(1) == 1
        if by_radius:
            share = shares(ctx.sizes.to(first.dtype), group)
            alone = ~(crossover(split_half(first, second, share), share) < 0)
        inner = {"fedavg": {**server["fedavg"], "group": group}} if clustered else {}
        return {**server, **inner, "group": group, "choice": alone.to(group.dtype)}

    fits = changed(
        method,
        begin=lambda client, ctx: dict.fromkeys(("first", "second"), client["local"]["params"]),
        phases=(fit("first", (0.0, end / 2)), fit("second", (end / 2, end))),
        finish=lambda client, work, ctx: (client, work),
        aggregate=group_and_decide,
        connected=None,
    )
    return changed(method, before=fits)


def _on_part(method: Method, part: tuple[float, float]) -> Method:
    return changed(method, phases=tuple(replace(phase, part=part) for phase in method.phases))
