"""Measure how good the adviser's λ is, on synthetic logistic regression with a known truth.

``python -m bench.advice`` runs the whole study: 10 clients of 200 samples in 10 dimensions, nine
heterogeneities R, 50 repeats, 25 fixed λ. The adviser never sees R. For every R it prints the mean
squared error of the clients' models when all train alone, with one model for all, with the best
fixed λ, and with the adviser's λ.

| ``--design`` | features |
| --- | --- |
| normal | independent |
| rotated | those of "normal", and their models, turned at random: the numbers must be the same |
| correlated | AR(0.9) |
| heavy | Student's t, 4 degrees of freedom |
"""

from __future__ import annotations

import argparse
import math
import time

import torch

from sartor.adviser.estimates import estimate
from sartor.data.synthetic import logistic
from sartor.results.tables import Table
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.linear_models import Clients

RADII = (0.0, 0.15, 0.3, 0.6, 1.0, 1.5, 2.5, 3.5, 5.0)
PULLS = torch.logspace(-3.5, 2.0, 25, dtype=torch.float64)
CLIENTS, SAMPLES, DIM = 10, 200, 10


DESIGNS = ("normal", "rotated", "correlated", "heavy")


def draw(radius: float, repeats: int, design: str = "normal") -> tuple[Clients, torch.Tensor]:
    """Draw federations whose R is about ``radius``, stacked, with the true models."""
    spread = radius / math.sqrt(DIM * (1.0 - 1.0 / CLIENTS))
    made = [
        logistic("theory", spread=spread, clients=CLIENTS, samples=SAMPLES, dim=DIM, seed=seed)
        for seed in range(repeats)
    ]
    shape = (repeats, CLIENTS, SAMPLES)
    x = torch.cat([fed.x[fed.train.rows] for fed, _ in made]).double().reshape(*shape, DIM)
    y = torch.cat([fed.y[fed.train.rows] for fed, _ in made]).double().reshape(shape)
    mask = torch.ones(y.shape, dtype=torch.bool)
    truth = torch.stack([one.w for _, one in made]).double()
    source = torch.Generator().manual_seed(0)
    if design == "rotated":
        turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=source, dtype=torch.float64)).Q
        x, truth = x @ turn, truth @ turn
    elif design != "normal":
        x = torch.randn(x.shape, generator=source, dtype=torch.float64)
        if design == "correlated":
            gaps = (torch.arange(DIM)[:, None] - torch.arange(DIM)).abs()
            x = x @ torch.linalg.cholesky(0.9 ** gaps.double()).T
        else:  # a ratio with √(χ²₄ / 4), of variance 2
            four = torch.randn(*x.shape, 4, generator=source, dtype=torch.float64)
            x = x / four.square().mean(-1).sqrt() / math.sqrt(2.0)
        chance = torch.sigmoid((x @ truth[..., None])[..., 0])
        y = torch.bernoulli(chance, generator=source)
    return Clients(x, y, mask, "logistic"), truth


def study(radius: float, repeats: int, design: str = "normal") -> dict[str, float]:
    """Return mean squared errors of the clients' models at one R."""
    clients, truth = draw(radius, repeats, design)
    weights = torch.full((repeats, CLIENTS), 1.0 / CLIENTS, dtype=torch.float64)

    def error(models: torch.Tensor) -> torch.Tensor:
        return (models - truth).square().sum(-1).mean(-1)

    alone = fit_each(clients, tolerance=1e-7).w
    pooled = fit_pooled(clients, weights).w
    fixed, own = [], alone
    for pull in PULLS.tolist():
        own = fit_coupled(clients, weights, torch.tensor(pull), start=own, tolerance=1e-7).own
        fixed.append(error(own))
    by_pull = torch.stack(fixed).mean(1)
    advice = estimate(clients, weights)
    finite = advice.pull.clamp(min=1e-9, max=1e6)
    advised = error(fit_coupled(clients, weights, finite[:, None], start=alone, tolerance=1e-7).own)
    ends = {"alone": error(alone).mean(), "global": error(pooled[:, None]).mean()}
    best = by_pull.min()
    found: dict[str, float | torch.Tensor] = {
        "R": radius,
        "measured R²": (truth - truth.mean(1, keepdim=True)).square().sum(-1).mean(),
        "estimated R²": advice.heterogeneity.radius2.mean(),
        **ends,
        "best λ": PULLS[by_pull.argmin()],
        "best": best,
        "advised λ": advice.pull.median(),
        "advised": advised.mean(),
        "to best": advised.mean() / best,
        "to ends": advised.mean() / min(ends.values()),
    }
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--design", choices=DESIGNS, default="normal")
    options = parser.parse_args()
    start = time.perf_counter()
    rows = [study(radius, options.repeats, options.design) for radius in RADII]
    took = time.perf_counter() - start
    print(Table([*rows[0]], [[*row.values()] for row in rows]))
    print(f"{took:.0f} s")
    worst = max(row["to best"] for row in rows), max(row["to ends"] for row in rows)
    for name, value, limit in zip(("best fixed λ", "ends"), worst, (1.10, 1.05), strict=True):
        verdict = "PASS" if value <= limit else "FAIL"
        print(f"{verdict}  adviser / {name}: at most {value:.3f} (limit {limit})")


if __name__ == "__main__":
    main()
