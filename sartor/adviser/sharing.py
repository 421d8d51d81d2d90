"""What training alone, one model and a learned prior are worth, by samples that were left out.

Three ways of sharing are solved exactly (`sartor/theory/learned_prior.py`), each with its own ridge
or prior learned: "alone", "one" and "learned". Every sample is held out once in each repeat of a
cross-validation over all samples of all clients; the losses are paired, sample by sample.

The folds depend on a sample's values and its client's name alone: not on a seed, nor on the order
of rows or clients, nor on the units of a column (ranks of values stand for values).

Without a part, a prior is learned anew from where that of all samples is, and of its multiples
those are tried that weighed something there; so much of the choice has seen the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.adviser.features import View
from sartor.core import rng
from sartor.core.errors import FederationError
from sartor.data.federation import Federation
from sartor.data.samples import Samples
from sartor.data.split import SPLITS, Ragged
from sartor.results.metrics import Array
from sartor.theory.learned_prior import Averaged, Prior, averaged, solve
from sartor.theory.linear_models import Clients, losses_of, predict

WAYS = ("alone", "one", "learned")
"""Ways of sharing."""

FACTORS = tuple(10.0 ** (k / 2) for k in range(4, -5, -1))
"""What the learned spread is multiplied with for the curve, from nearly alone to nearly one."""

MOST_WORK = 1e8
"""Of a Newton step for all clients: about a minute for an answer on one core."""

SMALL = 100
"""Parameters below which a solve is quicker with one thread."""

COLUMNS = 64
"""Features whose ranks make a sample's number, at most."""


@dataclass(frozen=True)
class Sharing:
    """The ways of sharing, solved on all samples and judged on samples left out.

    Attributes:
        found: each way, on all samples.
        losses: (ways, clients, samples) mean losses over the repeats, 0 for padding; a regression's
            are squared errors in units of the target's variance.
        curve: (factors,) mean losses with the learned spread times each of ``FACTORS``.
        folds: parts that every client's samples were divided in.
        repeats: how often.
        scale: what one squared error is in units of the target; 1 for classes.
        clients: the samples; a regression's targets have mean 0 and variance 1.
        scores: (ways, clients, samples, outputs) mean scores of the models without the sample.
    """

    found: dict[str, Averaged]
    losses: Array
    curve: Array
    folds: int
    repeats: int
    scale: float
    clients: Clients
    scores: Array

    def mean(self, way: str, client: int | None = None) -> float:
        """Return a mean loss, of one client or of all samples."""
        rows = self.losses[WAYS.index(way)]
        mask = self.mask
        if client is not None:
            rows, mask = rows[client], mask[client]
        return float(rows[mask].mean())

    def difference(self, way: str, other: str, client: int | None = None) -> tuple[float, float]:
        """Return the mean of loss(way) − loss(other), and the standard error, paired by sample."""
        gap = self.losses[WAYS.index(way)] - self.losses[WAYS.index(other)]
        mask = self.mask
        if client is not None:
            gap, mask = gap[client], mask[client]
        gap = gap[mask]
        if len(gap) < 2:
            return float(gap.sum()), float("nan")
        return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))

    @property
    def mask(self) -> Array:
        """(clients, samples) which samples are real."""
        found: Array = np.isfinite(self.losses[0])
        return found


def all_samples(federation: Federation) -> Federation:
    """Return the federation with every sample among those for training."""
    parts = [federation.split(name) for name in SPLITS]
    rows = [torch.cat([part.of(i) for part in parts]) for i in range(federation.num_clients)]
    none = Ragged.empty(federation.num_clients)
    return replace(federation, train=Ragged.from_lists(rows), val=none, test=none)


@contextmanager
def suitable_threads(num_params: int) -> Iterator[None]:
    """Use one thread where matrices are so small that several would only wait for each other."""
    before = torch.get_num_threads()
    if num_params < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def judge(seen: View, *, each: Callable[[], None] | None = None) -> Sharing:
    """Solve for all ways of sharing, and cross-validate them.

    Args:
        seen: the samples, all of them for training.
        each: is called after every solve for all clients.
    """
    clients, scale = standardised(seen.clients())
    if not bool((clients.sizes > 1).any()):
        raise FederationError(
            "Every client has a single sample, so none can be left out to judge by; bring more."
        )
    with suitable_threads(clients.num_params):
        return _judge(seen, clients, scale, each)


def _judge(seen: View, clients: Clients, scale: float, each: Callable[[], None] | None) -> Sharing:
    intercept = seen.intercept
    found = {way: solved(clients, way, intercept, each=each) for way in WAYS}
    folds, repeats = divisions(clients)
    total = torch.zeros(len(WAYS), *clients.mask.shape, dtype=torch.float64)
    scores = torch.zeros(*total.shape, clients.outputs, dtype=torch.float64)
    curve = torch.zeros(len(FACTORS), dtype=torch.float64)
    unit = 2.0 if clients.family == "linear" else 1.0
    for repeat in range(repeats):
        place = ranks(seen.federation, clients.mask, repeat) % folds
        for fold in range(folds):
            held = clients.mask & (place == fold) & (clients.sizes[:, None] > 1)
            part = clients.where(~held)

            def loss(found: Tensor, held: Tensor = held) -> Tensor:
                return unit * losses_of(clients, found) * held

            for k, way in enumerate(WAYS):
                one = solved(part, way, intercept, start=found[way], each=each)
                left_out = predict(clients, one.own)
                total[k] += loss(left_out)
                scores[k] += left_out * held[..., None]
                if way == "learned":
                    others = [predict(clients, own) for own in _along(part, one)]
                    curve += torch.stack([loss(other).sum() for other in others])
    count = (clients.mask & (clients.sizes[:, None] > 1)).sum()
    single = clients.mask & (clients.sizes[:, None] == 1)
    # A client of one sample is never without it, so that it has no say.
    losses = torch.where(clients.mask & ~single, total / repeats, torch.nan)
    return Sharing(
        found,
        losses.numpy(),
        (curve / (repeats * count)).numpy(),
        folds,
        repeats,
        scale,
        clients,
        (scores / repeats).numpy(),
    )


def solved(
    clients: Clients,
    way: str,
    intercept: bool,
    *,
    start: Averaged | None = None,
    each: Callable[[], None] | None = None,
) -> Averaged:
    """Solve for one of the ``WAYS``; see ``averaged``."""
    return averaged(
        clients, alone=way == "alone", one=way == "one", intercept=intercept, start=start, each=each
    )


def _along(part: Clients, one: Averaged) -> list[Tensor]:
    """Solve with the likeliest prior's spread times every factor."""
    prior = one.priors[one.best]
    return [
        solve(part, Prior(prior.spread * factor, prior.width, prior.noise)).own
        for factor in FACTORS
    ]


def standardised(clients: Clients) -> tuple[Clients, float]:
    """Return a regression's clients with targets of mean 0 and variance 1, and that variance."""
    if clients.family != "linear":
        return clients, 1.0
    y = clients.y[clients.mask]
    spread = float(y.std(correction=0)) or 1.0
    return replace(clients, y=(clients.y - y.mean()) / spread * clients.mask), spread**2


def divisions(clients: Clients) -> tuple[int, int]:
    """Return folds and repeats: 10 and 3, fewer where a solve takes long."""
    work = _work(len(clients.sizes), clients.num_params, float(clients.sizes.mean()))
    if work < 3e7:
        return 10, 3 if work < 3e6 else 2
    return 10 if work < MOST_WORK else 5, 1


def most_features(federation: Federation) -> str:
    """Return how many features a quick answer can look at: "scaled" for all, or "pca:K"."""
    outputs = max(federation.num_classes - 1, 1)
    m, mean = federation.num_clients, float(federation.train.sizes.double().mean())
    if _work(m, 2 * outputs, mean) > MOST_WORK:
        raise FederationError(
            f"{federation.num_classes} classes and {m} clients are more than the evidence can look "
            "at. If the label is a number and no class, say so with task='regression'; else take "
            "basis='trial'."
        )
    width = math.prod(federation.input_shape)
    keep = width
    while keep > 1 and _work(m, (keep + 1) * outputs, mean) > MOST_WORK:
        keep = int(0.9 * keep)
    return "scaled" if keep == width else f"pca:{keep}"


def _work(clients: int, params: int, samples: float) -> float:
    """Return what a Newton step costs, up to a factor."""
    return clients * params**2 * (params + samples)


def ranks(samples: Samples, mask: Tensor, repeat: int) -> Tensor:
    """Return a random rank of every sample among those of its client, (clients, samples).

    Equal samples may change places. What counts is the order of a feature's values, so that other
    units, or another standardisation, leave the ranks as they are.
    """
    rows = samples.train.rows
    x = samples.x[rows].flatten(1).double()
    x = x[:, torch.linspace(0, x.shape[1] - 1, min(COLUMNS, x.shape[1])).long().unique()]
    y = samples.y[rows].double().reshape(len(rows), -1)
    number = np.zeros(len(rows), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in torch.cat([x, y], 1).T.numpy():
            place = np.unique(column, return_inverse=True)[1].astype(np.uint64)
            number = _mixed(number * np.uint64(0x9E3779B97F4A7C15) + place)
        found = torch.zeros(mask.shape, dtype=torch.int64)
        start = 0
        for i, size in enumerate(mask.sum(1).tolist()):
            words = rng.fold(rng.key(repeat), "advice", samples.names[i]).numpy().astype(np.uint64)
            own = _mixed(
                number[start : start + size] ^ _mixed(words[0] << np.uint64(32) | words[1])
            )
            found[i, :size] = torch.from_numpy(np.argsort(np.argsort(own, kind="stable")))
            start += size
    return found


def _mixed(number: Array) -> Array:
    """Mix the bits of 64-bit numbers (the last steps of SplitMix64)."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = number ^ (number >> np.uint64(31))
    return mixed
