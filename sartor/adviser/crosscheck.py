"""Does the theory carry over to these data? Held-out losses of its choice and of both ends.

The theory takes losses as quadratic and the clients' differences as round; real data may be
neither. Every sample is held out once, every client is fitted exactly on the others, and the choice
stands unless an end is better on the held-out samples by more than one standard error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sartor.core import rng
from sartor.theory.calibration import fingerprints
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.linear_models import Clients, sample_losses

FOLDS = 3
"""How often the samples are divided."""


class Check(NamedTuple):
    """Mean held-out losses, and what they say of the choice.

    Attributes:
        alone: with every client alone.
        chosen: with the λ of the theory.
        one_model: with one model for all.
        gap: of the choice above the better end.
        error: the standard error of that, paired over samples.
    """

    alone: float
    chosen: float
    one_model: float
    gap: float
    error: float

    @property
    def contradicts(self) -> bool:
        """Whether an end is better beyond the noise."""
        return self.gap > self.error

    @property
    def better_end(self) -> float:
        """The λ of the better end: 0 or ∞."""
        return 0.0 if self.alone <= self.one_model else math.inf


def cross_check(
    clients: Clients,
    weights: Tensor,
    pull: float,
    start: Tensor,
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> Check:
    """Fit on all folds but one and score on that one, for λ = 0, the given λ, and ∞.

    A client's division depends on its samples alone, not on where it is listed.

    Args:
        clients: (clients, samples, d).
        weights: (clients,) p_i.
        pull: λ of the theory.
        start: (clients, p) where fits begin.
        folds: how often the samples are divided.
        seed: of the division.
    """
    rank = _order(clients, seed)
    sums = []
    for fold in range(folds):
        held = clients.mask & (rank % folds == fold) & (clients.sizes[:, None] > 1)
        part = clients.where(~held)
        alone = fit_each(part, start=start, tolerance=1e-7).w
        pooled = fit_pooled(part, weights, tolerance=1e-7).w.expand_as(alone)
        chosen = alone if pull == 0.0 else pooled
        if 0.0 < pull < math.inf:
            lam = torch.tensor(pull, dtype=torch.float64)
            chosen = fit_coupled(part, weights, lam, start=start, tolerance=1e-7).own
        away = clients.where(held)
        sums.append(torch.stack([sample_losses(away, w)[held] for w in (alone, chosen, pooled)]))
    losses = torch.cat(sums, 1)
    mean = losses.mean(1)
    apart = losses[1] - losses[0 if mean[0] <= mean[2] else 2]
    error = float(apart.std() / math.sqrt(max(len(apart), 1)))
    alone_at, chosen_at, one_at = mean.tolist()
    return Check(alone_at, chosen_at, one_at, float(apart.mean()), error)


def _order(clients: Clients, seed: int) -> Tensor:
    """Return a random rank of every sample among those of its client; padding comes last."""
    keys = rng.fold(rng.key(seed), "check", fingerprints(clients))
    num_samples = clients.mask.shape[-1]
    words = rng.words_at(keys[:, None, :], torch.arange((num_samples + 3) // 4))
    order = words.flatten(1)[:, :num_samples]
    return torch.where(clients.mask, order, 2**40).argsort(dim=-1, stable=True).argsort(-1)
