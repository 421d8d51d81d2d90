"""λ by training: all values of λ as lanes of one pass, scored on validation data.

For networks, whose weights are not identified, and wherever the theory does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from sartor import rng
from sartor.cohort import Participation
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.errors import FederationError
from sartor.fit import fit
from sartor.local import Local
from sartor.result import Result
from sartor.settings import Progress


@dataclass(frozen=True)
class Trial:
    """Validation losses of every client at every λ.

    Attributes:
        pulls: λ; 0 is every client alone, ∞ is one model for all.
        losses: (pulls, clients) mean validation losses after the last round.
        counts: (clients,) validation samples.
        rounds: rounds of training.
        local: local training that was used.
        best: the position of the smallest mean loss (weighted by validation samples).
        megabytes: what one run of FedProx sent, both ways.
        gradients: gradient evaluations of one run of FedProx.
        steady: (pulls,) the first scored round with a loss within 1% of the run's smallest.
    """

    pulls: tuple[float, ...]
    losses: np.ndarray
    counts: np.ndarray
    rounds: int
    local: Local
    best: int
    megabytes: float
    gradients: int
    steady: tuple[int, ...]

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
    participation: Participation | str | float = 1.0,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Trial:
    """Train FedProx at every λ at once, LocalTrain and FedAvg, and score them on validation data.

    Args:
        federation: with validation data, or some of the training data is held out for it.
        model: the network; chosen from the data if None.
        local: local training.
        rounds: communication rounds.
        pulls: finite positive values of λ; up to 0.5/lr by default, where steps stay stable.
        participation: who takes part in a round.
        seed: of the runs.
        device: "auto", "cpu" or "cuda".
        progress: shows how far it is.
    """
    held = with_validation(federation, seed=seed)
    top = math.log10(0.5 / local.lr)
    inner = tuple(pulls) if pulls else tuple(float(v) for v in np.logspace(top - 4.0, top, 9))
    shared: dict[str, Any] = {
        "model": model,
        "rounds": rounds,
        "seeds": seed,
        "local": local,
        "participation": participation,
        "device": device,
        "progress": progress,
        "eval_every": max(1, rounds // 20),
    }
    prox = fit("fedprox", held, sweep={"prox_strength": inner}, **shared)
    alone = fit("local", held, **shared)
    one = fit("fedavg", held, **shared)
    parts = [(alone, 0), *((prox, run) for run in range(len(inner))), (one, 0)]
    losses = np.stack([_losses(result, run) for result, run in parts])
    counts = held.val.sizes.numpy().astype(float)
    share = counts / counts.sum()
    mean = losses @ share
    return Trial(
        pulls=(0.0, *inner, math.inf),
        losses=losses,
        counts=counts,
        rounds=rounds,
        local=local,
        best=int(np.nanargmin(np.where(np.isfinite(mean), mean, np.inf))),
        megabytes=float(prox.select([0]).megabytes),
        gradients=int(prox.select([0]).gradient_evaluations),
        steady=tuple(_steady(result, run, share) for result, run in parts),
    )


def with_validation(federation: Federation, share: float = 0.2, seed: int = 0) -> Federation:
    """Return the federation, with part of the training data as validation data if it has none."""
    if bool((federation.val.sizes > 0).any()):
        return federation
    train, val = [], []
    for client in range(federation.num_clients):
        rows = federation.train.of(client)
        order = rng.permutation(rng.fold(rng.key(seed), "advice", client), len(rows))
        held = min(math.ceil(share * len(rows)), len(rows) - 1)
        val.append(rows[order[:held]])
        train.append(rows[order[held:]])
    if not sum(map(len, val)):
        raise FederationError(
            "Every client has a single training sample, so nothing can be held out to choose λ by; "
            "bring more samples."
        )
    return replace(federation, train=Ragged.from_lists(train), val=Ragged.from_lists(val))


def _losses(result: Result, run: int) -> np.ndarray:
    found = result.scores[(result.headline, "val")].mean_loss(run)[-1]
    return np.nan_to_num(found) if result.diverged[run] is None else np.full_like(found, np.nan)


def _steady(result: Result, run: int, share: np.ndarray) -> int:
    """Return the first scored round at which the loss is within 1% of its smallest."""
    scores = result.scores[(result.headline, "val")]
    curve = np.nan_to_num(scores.mean_loss(run)) @ share
    return int(scores.rounds[int(np.argmax(curve <= 1.01 * np.min(curve)))])
