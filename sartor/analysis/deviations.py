"""Loss of every client on every class, as a deviation from the mean over clients.

==============  =====================================================================
symbol          meaning
==============  =====================================================================
m_ic, m_c       test samples of client i with class c, and their sum over clients
L_ic            mean loss of client i's model on its own test samples of class c; 0 without any
L̄_c             Σ_i (m_ic / m_c) L_ic, the mean over all samples of the class, each by its owner
G_ic            mean loss of client i's model on all clients' test samples of class c
Ḡ_c             (1/M) Σ_i G_ic
ΔL_ic, ΔG_ic    L_ic − L̄_c and G_ic − Ḡ_c
==============  =====================================================================

So Σ_i ΔG_ic = 0 and Σ_i m_ic ΔL_ic = 0; on a class that a client lacks, ΔL_ic = −L̄_c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sartor.core.errors import ConfigError
from sartor.core.task import cross_entropy
from sartor.data.federation import Federation
from sartor.results.metrics import Array
from sartor.results.result import Result

BATCH = 4096
"""Samples in one forward pass."""


class Deviations(NamedTuple):
    """Losses per client and class and their deviations from the mean."""

    local: Array  # (clients, classes) ΔL
    pooled: Array  # (clients, classes) ΔG; NaN for a class that nobody has
    local_loss: Array  # (clients, classes) L
    pooled_loss: Array  # (clients, classes) G
    counts: Array  # (clients, classes) m


def class_means(losses: npt.ArrayLike, labels: npt.ArrayLike, classes: int) -> tuple[Array, Array]:
    """Return the mean loss of every class (NaN without samples) and the number of samples.

    >>> class_means([1.0, 3.0, 5.0], [0, 0, 2], 3)
    (array([ 2., nan,  5.]), array([2, 0, 1]))
    """
    losses = np.asarray(losses, dtype=np.float64)
    labels = np.asarray(labels, dtype=np.int64)
    counts = np.bincount(labels, minlength=classes)
    total = np.bincount(labels, weights=losses, minlength=classes)
    means = np.divide(total, counts, out=np.full(classes, np.nan), where=counts > 0)
    return means, counts


def deviate(local_loss: npt.ArrayLike, pooled_loss: npt.ArrayLike, counts: npt.ArrayLike) -> Array:
    """Return (2, clients, classes): ΔL and ΔG from L, G and m, each (clients, classes).

    What stands in L where a client has no sample counts as 0.
    """
    counts = np.asarray(counts, dtype=np.float64)
    local = np.where(counts > 0, np.asarray(local_loss, dtype=np.float64), 0.0)
    pooled = np.asarray(pooled_loss, dtype=np.float64)
    total = counts.sum(axis=0)
    weighted = (counts * local).sum(axis=0)
    mean = np.divide(weighted, total, out=np.zeros_like(weighted), where=total > 0)
    return np.stack([local - mean, pooled - pooled.mean(axis=0)])


def loss_deviations(
    models: Result | Sequence[nn.Module],
    federation: Federation,
    *,
    run: int = 0,
    point: str | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Deviations:
    """Return ΔL and ΔG of every client and class on the test samples of a federation.

    Args:
        models: a result with models, or one network per client.
        federation: of classes, on whose test samples the models are judged.
        run: index of the run of a result.
        point: "pre" or "post" of a result; its headline point by default.
        criterion: ``(scores, labels) -> losses``, one per sample.

    Raises:
        ConfigError: the numbers of models and clients differ, or there are no classes.
    """
    networks = _networks(models, federation, run, point)
    rows, owner = federation.test.rows, federation.test.owner
    labels, classes = federation.y[rows], federation.num_classes
    own, pooled, counts = [], [], []
    for client, network in enumerate(networks):
        losses = _losses(network, federation.x, rows, labels, criterion)
        mine = (owner == client).numpy()
        loss, number = class_means(losses[mine], labels[mine], classes)
        own.append(np.nan_to_num(loss, nan=0.0))
        counts.append(number)
        pooled.append(class_means(losses, labels, classes)[0])
    found = np.stack(own), np.stack(pooled), np.stack(counts)
    local, deviation = deviate(*found)
    return Deviations(local, deviation, *found)


def _networks(
    models: Result | Sequence[nn.Module], federation: Federation, run: int, point: str | None
) -> Sequence[nn.Module]:
    if federation.num_classes == 0:
        raise ConfigError(
            "Losses per class need classes, and this federation has real targets; give one whose "
            "num_classes is at least 2."
        )
    found = models
    if not isinstance(found, Sequence):
        found = [found.model(client, run, point) for client in range(len(found.clients))]
    if len(found) != federation.num_clients:
        raise ConfigError(
            f"{len(found)} models for {federation.num_clients} clients; give one model per client, "
            "and the federation that they were trained on."
        )
    return found


@torch.no_grad()
def _losses(
    network: nn.Module,
    x: Tensor,
    rows: Tensor,
    labels: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
) -> Array:
    was_training = network.training
    network.eval()
    first: Tensor = next(chain(network.parameters(), network.buffers()), x)
    parts = []
    for start in range(0, len(rows), BATCH):
        inputs = x[rows[start : start + BATCH]].to(first.device)
        if inputs.is_floating_point() and first.is_floating_point():
            inputs = inputs.to(first.dtype)
        answers = labels[start : start + BATCH].to(first.device)
        parts.append(criterion(network(inputs), answers).double().cpu())
    network.train(was_training)
    return torch.cat(parts).numpy() if parts else np.empty(0)
