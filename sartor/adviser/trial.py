"""λ by training: all values of λ as lanes of one pass, scored on validation data.

For networks, whose weights are not identified, and wherever the theory does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sartor.core import rng
from sartor.core.cohort import Participation
from sartor.core.errors import FederationError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.results.result import Result
from sartor.results.scores import Scores
from sartor.training.fit import fit
from sartor.training.progress import Progress

CLEAR = 2.0
"""Standard errors by which a λ between the ends must be better than the better end."""


@dataclass(frozen=True)
class Trial:
    """Validation losses of every client at every λ.

    Attributes:
        pulls: λ; 0 is every client alone, ∞ is one model for all.
        losses: (pulls, clients) mean validation losses after the last round.
        counts: (clients,) validation samples, of all folds.
        folds: how often the data were divided.
        rounds: rounds of training.
        local: local training that was used.
        best: the position of the choice: the smallest mean loss, or an end that is not clearly
            worse.
        margin: how much smaller the mean loss at ``best`` is than at the better end.
        noise: the standard error of the difference between the best λ and the better end, over
            clients.
        megabytes: what one run of FedProx sent, both ways.
        gradients: gradient evaluations of one run of FedProx.
        steady: (pulls,) the first scored round with a loss within 1% of the run's smallest.
        asked: bytes that the whole trial sent: every λ, and one model, on every fold.
    """

    pulls: tuple[float, ...]
    losses: np.ndarray
    counts: np.ndarray
    rounds: int
    local: Local
    best: int
    margin: float
    noise: float
    folds: int
    megabytes: float
    gradients: int
    steady: tuple[int, ...]
    asked: int = 0

    @property
    def mean(self) -> np.ndarray:
        """(pulls,) mean validation losses over all samples."""
        found: np.ndarray = self.losses @ (self.counts / self.counts.sum())
        return found


def try_pulls(
    federation: Federation,
    *,
    model: nn.Module | None,
    local: Local,
    rounds: int,
    pulls: Sequence[float] | None = None,
    folds: int = 3,
    participation: Participation | str | float = 1.0,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Trial:
    """Train FedProx at every λ at once, LocalTrain and FedAvg, and score them on validation data.

    Args:
        federation: with validation data, or the training data are divided in folds.
        model: the network; chosen from the data if None.
        local: local training.
        rounds: communication rounds.
        pulls: finite positive values of λ; up to 0.5/lr by default, where steps stay stable.
        folds: how often the training data are divided, where there is no validation data; all
            divisions are lanes of the same pass.
        participation: which clients participate in a round.
        seed: of the runs.
        device: "auto", "cpu" or "cuda".
        progress: shows how far it is.
    """
    parts_of = held_out(federation, folds, seed)
    seeds = tuple(range(seed, seed + len(parts_of)))
    top = math.log10(0.5 / local.lr)
    inner = tuple(pulls) if pulls else tuple(float(v) for v in np.logspace(top - 4.0, top, 9))
    shared: dict[str, Any] = {
        "model": model,
        "rounds": rounds,
        "seeds": seeds,
        "local": local,
        "participation": participation,
        "device": device,
        "progress": progress,
        "eval_every": max(1, rounds // 20),
    }
    prox = fit("fedprox", parts_of, sweep={"prox_strength": inner}, **shared)
    alone = fit("local", parts_of, **shared)
    one = fit("fedavg", parts_of, **shared)
    folds_of = range(len(seeds))
    rows = [(alone, folds_of)]
    rows += [(prox, range(k * len(seeds), (k + 1) * len(seeds))) for k in range(len(inner))]
    rows += [(one, folds_of)]
    counts = sum(_scores(alone).count[run] for run in folds_of).astype(float)
    losses = np.stack([_losses(result, runs, counts) for result, runs in rows])
    share = counts / counts.sum()
    best, margin, noise = choose(losses, share)
    return Trial(
        pulls=(0.0, *inner, math.inf),
        losses=losses,
        counts=counts,
        rounds=rounds,
        local=local,
        best=best,
        margin=margin,
        noise=noise,
        folds=len(seeds),
        megabytes=float(prox.select([0]).megabytes),
        gradients=int(prox.select([0]).gradient_evaluations),
        steady=tuple(_steady(result, runs) for result, runs in rows),
        asked=int(1e6 * float(np.sum(prox.megabytes) + np.sum(one.megabytes))),
    )


def choose(losses: np.ndarray, share: np.ndarray) -> tuple[int, float, float]:
    """Return the position of the λ to take, its gain over the better end, and the gain's error.

    A λ between the ends is taken only if it is better than both by more than two standard errors of
    the clients' differences: the smallest of many means is small by chance, too. Of the ends, that
    of the smaller mean is taken; neither is safer than the other.

    Args:
        losses: (pulls, clients), the ends first and last; NaN where training diverged.
        share: (clients,) of sum 1.
    """
    mean = losses @ share
    mean = np.where(np.isfinite(mean), mean, np.inf)
    end = 0 if mean[0] <= mean[-1] else len(mean) - 1
    best = int(mean.argmin())
    gap = losses[end] - losses[best]
    noise = clustered_error(gap, share)
    if not mean[end] - mean[best] > CLEAR * noise:
        best = end
    return best, float(mean[end] - mean[best]), noise


def clustered_error(gap: np.ndarray, share: np.ndarray) -> float:
    """Return the standard error of Σ s_i g_i, clients as units: √(m/(m−1) Σ s_i²(g_i − ḡ)²).

    The samples of a client share one model, so that they are no units of their own.

    Args:
        gap: (clients,) mean differences g_i.
        share: (clients,) s_i, of sum 1; clients of share 0 do not count.
    """
    taking = share > 0
    gap, share = gap[taking], share[taking]
    spread = share * (gap - gap @ share)
    return float(np.sqrt((spread**2).sum() * len(share) / max(len(share) - 1, 1)))


def held_out(federation: Federation, folds: int = 3, seed: int = 0) -> list[Federation]:
    """Return the federation with its validation data, or divided ``folds`` times.

    Without validation data every sample of a client's training data is held out once; a client
    keeps at least one sample for training. The division belongs to a client's name, not to its
    place in the list.
    """
    if bool((federation.val.sizes > 0).any()):
        return [federation]
    parts: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(folds)]
    for client in range(federation.num_clients):
        rows = federation.train.of(client)
        order = rng.permutation(
            rng.fold(rng.key(seed), "advice", federation.names[client]), len(rows)
        )
        for fold, (train, val) in enumerate(parts):
            held = torch.zeros(len(rows), dtype=torch.bool)
            held[order[fold::folds]] = len(rows) > 1
            val.append(rows[held])
            train.append(rows[~held])
    if not any(len(rows) for _, val in parts for rows in val):
        raise FederationError(
            "Every client has a single training sample, so nothing can be held out to choose λ by; "
            "bring more samples."
        )
    return [
        replace(federation, train=Ragged.from_lists(train), val=Ragged.from_lists(val))
        for train, val in parts
    ]


def _scores(result: Result) -> Scores:
    return result.scores[(result.headline, "val")]


def _losses(result: Result, runs: range, counts: np.ndarray) -> np.ndarray:
    """Return mean validation losses over all folds: (clients,); NaN if a run diverged."""
    total = sum(_scores(result).loss[run, -1] for run in runs)
    if any(result.diverged[run] is not None for run in runs):
        return np.full(len(counts), np.nan)
    found: np.ndarray = total / np.maximum(counts, 1.0)
    return found


def _steady(result: Result, runs: range) -> int:
    """Return the first scored round at which the loss is within 1% of its smallest."""
    scores = _scores(result)
    curve = np.nan_to_num(sum(scores.loss[run].sum(-1) for run in runs), nan=np.inf)
    return int(scores.rounds[int(np.argmax(curve <= 1.01 * np.min(curve)))])
