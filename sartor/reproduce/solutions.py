"""Cells that are solved instead of trained.

``solve = "labels"`` counts labels: nothing is trained, and a row is only a name.

``solve = "exact"`` takes exact minimisers of logistic regression. A row names what is solved by
``set``: ``{end = "local"}``, ``{end = "global"}``, ``{pull = 0.1}`` (one-stage FedProx with that λ)
or ``{rule = "v1"}`` (λ by a rule of the theory, from the true heterogeneity).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.reproduce.problems import Problem
from sartor.reproduce.records import Record
from sartor.theory import coupling
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.linear_models import Clients


def statistical_errors(
    hypers: Sequence[dict[str, Any]], problems: Sequence[Problem]
) -> list[Record]:
    """Return mean_i ‖w_i − w_i*‖² and ‖w_g − w_g*‖² of every lane, and its R.

    LocalTrain's global model is the mean of the local ones; GlobalTrain's local models are all the
    global one.
    """
    by_kind: dict[str, list[int]] = {}
    for k, (hyper, problem) in enumerate(zip(hypers, problems, strict=True)):
        fed = problem.federation
        shape = (fed.num_clients, len(fed.train.rows))
        by_kind.setdefault(repr((sorted(hyper.items()), shape)), []).append(k)
    records: dict[int, Record] = {}
    for places in by_kind.values():
        chosen = [problems[k] for k in places]
        truth = torch.stack([p.truth for p in chosen if p.truth is not None])
        clients = stacked(chosen)
        weights = torch.full(truth.shape[:2], 1.0 / truth.shape[1], dtype=truth.dtype)
        centre = truth.mean(1)
        radius = (truth - centre[:, None]).square().sum(-1).mean(1).sqrt()
        own, common = _solve(hypers[places[0]], clients, weights, radius)
        local = (own - truth).square().sum(-1).mean(1)
        error = (common - centre).square().sum(-1)
        for k, *numbers in zip(places, local, error, radius, strict=True):
            names = ("local_error", "global_error", "radius")
            values = {n: float(v) for n, v in zip(names, numbers, strict=True)}
            records[k] = {"values": values, "probes": {}, "points": {}, "headline": "pre"}
    return [records[k] for k in range(len(hypers))]


def _solve(
    chosen: dict[str, Any], clients: Clients, weights: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the clients' models and the global one."""
    if chosen.get("end") == "local":
        own = fit_each(clients, tolerance=1e-8).w
        return own, own.mean(1)
    if chosen.get("end") == "global":
        common = fit_pooled(clients, weights).w
        return common[:, None].expand(*weights.shape, -1), common
    if not {"pull", "rule"} & set(chosen):
        raise ConfigError(
            f"A row that is solved exactly is set to {chosen}; give it end = 'local', "
            "end = 'global', pull = NUMBER or rule = NAME."
        )
    if "pull" in chosen:
        pull = torch.full_like(weights, float(chosen["pull"]))
    else:
        pull = _by_rule(chosen, clients, radius)
    coupled = fit_coupled(clients, weights, pull, tolerance=1e-8)
    return coupled.own, coupled.centre


def _by_rule(chosen: dict[str, Any], clients: Clients, radius: Tensor) -> Tensor:
    """Return λ by a rule, from the true R of the federation: (runs, clients)."""
    moments = clients.x.mT @ clients.x / clients.sizes[..., None, None]
    curvature = torch.linalg.eigvalsh(moments) / 4
    smooth, convex = curvature[..., -1].amax(-1), curvature[..., 0].amin(-1)
    noise = torch.tensor(float(chosen.get("noise", 2.0)), dtype=radius.dtype)
    pulls = [
        coupling.by_rule(chosen["rule"], r, noise, n, big, small).expand(len(n))
        for r, n, big, small in zip(radius, clients.sizes, smooth, convex, strict=True)
    ]
    return torch.stack(pulls).clamp(1e-9, 1e6)


def stacked(problems: Sequence[Problem]) -> Clients:
    """Return the training samples of logistic problems of one size: (problems, clients, n, d)."""
    feds = [problem.federation for problem in problems]
    shape = (len(feds), feds[0].num_clients, int(feds[0].train.sizes[0]))
    x = torch.stack([fed.x[fed.train.rows] for fed in feds]).double().reshape(*shape, -1)
    y = torch.stack([fed.y[fed.train.rows] for fed in feds]).double().reshape(shape)
    return Clients(x, y, torch.ones(shape, dtype=torch.bool), "logistic")


def label_maps(hypers: Sequence[dict[str, Any]], problems: Sequence[Problem]) -> list[Record]:
    """Count the samples of every client and class, for training and test together.

    The effective number of classes of a client with shares p is exp(−Σ p ln p): 1 for one class, C
    for C equal ones. Values are means over clients, unless they say fewest or most.
    """
    records: list[Record] = []
    for problem in problems:
        fed = problem.federation
        counts = (fed.label_counts("train") + fed.label_counts("test")).double()
        held, sizes = (counts > 0).sum(1), counts.sum(1)
        share = counts / sizes[:, None].clamp(min=1)
        effective = torch.special.entr(share).sum(1).exp()
        values = {
            "samples": sizes.sum(),
            "fewest_samples": sizes.min(),
            "most_samples": sizes.max(),
            "classes": held.double().mean(),
            "fewest_classes": held.min(),
            "most_classes": held.max(),
            "effective_classes": effective.mean(),
        }
        found = {name: float(value) for name, value in values.items()}
        empty = {"probes": {}, "points": {}, "headline": "pre"}
        labels = counts.long().tolist()
        records.append({"values": found, "labels": labels, "names": list(fed.names), **empty})
    return records


SOLVERS: dict[str, Callable[[Sequence[dict[str, Any]], Sequence[Problem]], list[Record]]] = {
    "exact": statistical_errors,
    "labels": label_maps,
}
"""How a pass is solved: from the hyper-parameters and the problem of every lane to its record."""
