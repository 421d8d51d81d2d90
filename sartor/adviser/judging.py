"""Trained models against test data: the rows of a verification, and who was hurt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sartor.adviser.advice import METHODS, Advice
from sartor.adviser.subject import Subject
from sartor.adviser.trial import clustered_error
from sartor.adviser.verification import Row, Verification
from sartor.data.federation import Federation
from sartor.training.settings import make_task


class Trained(NamedTuple):
    """The models of one strategy, and what they cost.

    Attributes:
        network: from the number of a client to its model.
        rounds: of training.
        megabytes: sent, both ways.
        gradients: gradient evaluations.
    """

    network: Callable[[int], nn.Module]
    rounds: int
    megabytes: float
    gradients: int


def compare(
    advice: Advice,
    about: Subject,
    results: dict[str, Trained],
    reached: int | None,
    notes: list[str],
) -> Verification:
    """Put the trained strategies beside each other on test data.

    Args:
        advice: what was recommended, with what it expected.
        about: what was trained on.
        results: "local", "global" and the advised strategy, trained.
        reached: the round in which the stated accuracy was reached, if it was measured.
        notes: what limits the comparison.
    """
    judged = {name: judge(found.network, about.federation) for name, found in results.items()}
    chosen = judged[advice.strategy][0]
    owner = owners(about.federation)
    share = np.bincount(owner, minlength=about.federation.num_clients).astype(float)
    expected = {"local": advice.errors[0], "global": advice.errors[-1]}
    if advice.contradicted:
        notes = [*notes, "expected errors are the theory's, which held-out samples contradict."]
    rows = []
    for label, name in (("advised", advice.strategy), ("local", "local"), ("global", "global")):
        losses, right = judged[name]
        apart = losses - chosen
        mean = np.bincount(owner, apart, len(share)) / np.maximum(share, 1.0)
        by_sample = float(apart.std(ddof=1) / math.sqrt(len(apart))) if len(apart) > 1 else 0.0
        several = int((share > 0).sum()) > 1
        result = results[name]
        rows.append(
            Row(
                strategy=label,
                method=METHODS[name],
                expected=expected.get(name, advice.error_at(advice.prox_strength)),
                loss=float(losses.mean()),
                accuracy=float(right.mean()) if about.federation.num_classes else math.nan,
                worse=float(apart.mean()),
                standard_error=clustered_error(mean, share / share.sum()) if several else by_sample,
                rounds=result.rounds,
                megabytes=result.megabytes,
                gradients=result.gradients,
                sample_error=by_sample,
            )
        )
    end = min(rows[1:], key=lambda row: row.loss)
    people = range(about.federation.num_clients)
    gap = judged["global"][0] - judged["local"][0]
    hurt = [
        about.federation.names[i]
        for i in people
        if (owner == i).any() and float(gap[owner == i].mean()) > 0
    ]
    theory = advice.basis == "theory" and advice.plan is not None and advice.strategy != "local"
    return Verification(
        rows=rows,
        holds=-end.worse <= end.standard_error,
        predicted_rounds=advice.plan.rounds if theory and advice.plan else None,
        measured_rounds=reached,
        hurt_predicted=advice.hurt,
        hurt_measured=hurt,
        notes=notes,
    )


def owners(federation: Federation) -> np.ndarray:
    """Return the client of every test sample, in the order of ``judge``."""
    return np.repeat(np.arange(federation.num_clients), federation.test.sizes.numpy())


def judge(
    network_of: Callable[[int], nn.Module], federation: Federation
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of every test sample under its client's model, and whether it is right."""
    task = make_task(network_of(0), federation, None)
    losses, right = [], []
    with torch.no_grad():
        for client in range(federation.num_clients):
            rows = federation.test.of(client)
            if not len(rows):
                continue
            network = network_of(client)
            x = federation.x[rows]
            like = next(network.parameters()).dtype if x.is_floating_point() else x.dtype
            scores = network(x.to(like))
            losses.append(task.criterion(scores, federation.y[rows]).double())
            right.append(task.is_correct(scores, federation.y[rows]))
    return torch.cat(losses).numpy(), torch.cat(right).numpy()
