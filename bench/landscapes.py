"""Verdicts of ``advise`` on drawn federations, judged by NumPy on samples that nobody trained on.

    python -m bench.landscapes [--draws 2] [--seed 1]

Few and many clients, small and large, three families of linear models, and clients from alike to
nothing in common; features independent or AR(0.9); for regression, noise that follows a feature or
not. For every federation the three ways are solved by ``bench.oracles`` over a grid, and the best
of each grid is taken by the mean loss on 1,000 fresh samples of every client. A verdict is right if
what it names is within 1 % of the best; "cannot tell" is counted apart. The regret is that of the
recommended way, solved by the library, against the best of the three oracles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

import sartor
from bench import oracles
from bench.oracles import Samples
from sartor.adviser.by_evidence import WAY_OF
from sartor.adviser.features import view
from sartor.adviser.sharing import all_samples, solved, standardised
from sartor.theory.linear_models import losses_of, predict

CLASSES = {"logistic": 2, "linear": 0, "softmax": 3}
SHAPES = ((4, 60), (20, 30), (8, 200))
"""Clients, and their samples in the middle; sizes go from a third of that to twice."""
SPREADS = (0.0, 0.3, 1.0, 4.0)
"""How far clients' models are apart, where their mean has norm 1."""
FRESH = 1000
RIDGES = np.logspace(2.5, -3, 12)
PULLS = np.logspace(3.5, -2, 12)

Part = list[tuple[Any, Any]]


class Found(NamedTuple):
    """One federation, judged."""

    about: str
    verdict: str
    best: str
    right: bool
    regret: float


def draw(family: str, clients: int, samples: int, spread: float, rng: Any) -> tuple[Part, Part]:
    """Return the samples of every client, and fresh ones."""
    dim = int(rng.integers(3, 10))
    centre = rng.normal(size=dim)
    w = centre / np.linalg.norm(centre) + spread * rng.normal(size=(clients, dim)) / np.sqrt(dim)
    shift = spread * rng.normal(size=clients)
    alike = float(rng.choice([0.0, 0.9]))
    gaps = np.abs(np.subtract.outer(range(dim), range(dim)))
    root = np.linalg.cholesky(alike**gaps)
    follows = bool(rng.random() < 0.5)
    sizes = rng.integers(max(3, samples // 3), 2 * samples, clients)

    def sample(i: int, count: int) -> tuple[Any, Any]:
        x = rng.normal(size=(count, dim)) @ root.T
        score = x @ w[i] + shift[i]
        if family == "linear":
            scale = np.abs(x[:, 0]) + 0.3 if follows else 1.0
            return x, score + rng.normal(size=count) * scale
        if family == "logistic":
            return x, (rng.random(count) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(int)
        scores = np.stack([score, x @ w[i][::-1], 0.0 * score], 1)
        return x, (scores + rng.gumbel(size=(count, 3))).argmax(1)

    return [sample(i, sizes[i]) for i in range(clients)], [sample(i, FRESH) for i in range(clients)]


def best_losses(train: list[Samples], test: list[Samples], classes: int) -> dict[str, float]:
    """Return the lowest mean test loss of every way, over its grid."""
    count = sum(len(one.y) for one in test)
    whole = Samples(np.concatenate([a.x for a in train]), np.concatenate([a.y for a in train]))
    free = oracles.intercepts(whole, classes)

    def loss(models: Any) -> float:
        return oracles.totals(models, test, classes)[0] / count

    found = {"alone": np.inf, "one model": np.inf, "personalise": np.inf}
    for ridge in RIDGES:
        for share in (1.0, 0.01):
            each = np.where(free, share * ridge, ridge)
            own = [oracles.single(one, classes, each) for one in train]
            found["alone"] = min(found["alone"], loss(own))
            one = oracles.single(whole, classes, each)
            found["one model"] = min(found["one model"], loss([one] * len(train)))
    start = None
    for pull in PULLS:
        start = oracles.together(train, classes, pull * np.ones(len(train)), 0.1, start)
        found["personalise"] = min(found["personalise"], loss(start.models))
    # Both ends are limits of a pull, which a grid reaches only nearly.
    found["personalise"] = min(found.values())
    return found


def judge(family: str, train: Part, fresh: Part, about: str) -> Found:
    """Ask the adviser, and compare."""
    classes = CLASSES[family]
    x, y = (np.concatenate(parts) for parts in zip(*train, strict=True))
    owner = np.repeat(np.arange(len(train)), [len(labels) for _, labels in train])
    federation = sartor.Federation.from_arrays(
        x, y, client=owner, num_classes=classes, test=0, dtype="float64"
    )
    advice = sartor.advise(federation, draws=0)
    mean, deviation = x.mean(0), x.std(0, ddof=1)
    middle, scale = (y.mean(), y.std()) if not classes else (0, 1)

    def samples(part: Part) -> list[Samples]:
        return [
            Samples(
                np.column_stack([(a - mean) / deviation, np.ones(len(a))]),
                b if classes else (b - middle) / scale,
            )
            for a, b in part
        ]

    test = samples(fresh)
    ways = best_losses(samples(train), test, classes)
    clients, _ = standardised(view(all_samples(federation)).clients())
    truth = torch.from_numpy(np.stack([one.y for one in test]))
    away = replace(
        clients,
        x=torch.from_numpy(np.stack([one.x for one in test])),
        y=truth if family == "softmax" else truth.double(),
        mask=torch.ones(len(test), FRESH, dtype=torch.bool),
    )
    own = solved(clients, WAY_OF[advice.strategy], intercept=True).own
    reached = float(losses_of(away, predict(away, own)).mean()) * (1.0 if classes else 2.0)
    low = min(ways.values())
    best = min(("one model", "alone", "personalise"), key=lambda way: ways[way])
    right = advice.verdict == "cannot tell" or ways[advice.verdict] <= 1.01 * low
    return Found(about, advice.verdict, best, right, reached / low - 1.0)


def landscapes(draws: int, seed: int) -> Iterator[Found]:
    """Draw and judge federations of every kind."""
    rng = np.random.default_rng(seed)
    for family in CLASSES:
        for clients, size in SHAPES:
            for spread in SPREADS:
                for _ in range(draws):
                    train, fresh = draw(family, clients, size, spread, rng)
                    about = f"{family}, {clients} clients of some {size}, spread {spread:g}"
                    yield judge(family, train, fresh, about)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2, help="federations of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = []
    for one in landscapes(args.draws, args.seed):
        found.append(one)
        word = "right" if one.right else "WRONG"
        print(
            f"{one.about}: {one.verdict} (best: {one.best}), {word}, regret {one.regret:+.1%}",
            flush=True,
        )
    regret = np.array([one.regret for one in found])
    unsure = sum(one.verdict == "cannot tell" for one in found)
    right = sum(one.right for one in found) - unsure
    print(
        f"{len(found)} federations: {right} right, {unsure} cannot tell, "
        f"{len(found) - right - unsure} wrong; regret {regret.mean():+.2%} in the mean, median "
        f"{np.median(regret):+.2%}, at most 1 % in {(regret <= 0.01).mean():.0%}"
    )


if __name__ == "__main__":
    main()
