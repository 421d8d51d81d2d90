"""Check by simulation whether R̂² is unbiased and its 95 % intervals contain the true R².

``python -m bench.coverage [--repeats 500]``: ten clients, features N(0, I). Linear regression (60
to 120 samples a client, unit noise, 5 features) and logistic regression with n_i = 10 d and 20 d,
fitted and calibrated as in ``adviser.estimates.estimate``. The true R² is exactly 0, 0.09 or 1.
Linear clients also come with correlated features, AR(0.9), and with what the model does not say:

| design | features | noise and truth |
|---|---|---|
| uneven | N(0, I) | the variance of the noise is the mean of x² |
| bent | N(0, I) | x_1² + x_2 x_3 is added, whose best linear model is 0 |
| heavy | Student's t, 4 degrees, one scale a sample | as uneven |
Federations are lanes of one fit, in blocks; the rows of the table are computed in parallel.

There are two questions with two intervals. *These clients*: the true models are the same in every
repeat; the interval is ``Heterogeneity.interval``. *Drawn anew*: the true models are c + u_i with
new normal u_i in every repeat, and R² has the stated mean; the interval is ``interval_anew``, by
the jackknife over clients.

The bias is measured relative to a control: the same estimator on fits that are exactly linear in
the labels, ŵ_i = w_i* − H_i(w_i*)⁻¹∇L_i(w_i*), whose covariance is known. The control is unbiased
and its error is correlated with that of R̂², so the difference has less Monte Carlo error. The three
designs above have no control, and their rows state what they state: they fail nobody.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sartor.results.tables import Table
from sartor.theory.calibration import calibrated
from sartor.theory.exact_fits import fit_each
from sartor.theory.heterogeneity import Heterogeneity, from_fits
from sartor.theory.linear_models import Clients, Family, hessians, look
from sartor.theory.noise import noise_of

CLIENTS, DRAWS, BLOCK = 10, 20, 50
TRUTHS = (0.0, 0.09, 1.0)
COVERED = (0.90, 0.98)
Question = Literal["these clients", "drawn anew"]


class Case(NamedTuple):
    """One simulated kind of federation: family, features d, samples of a client (fewest, most)."""

    family: Family
    dim: int
    fewest: int
    most: int
    design: Literal["normal", "correlated", "uneven", "bent", "heavy"] = "normal"

    @property
    def is_true(self) -> bool:
        """Whether the samples follow the model."""
        return self.design in ("normal", "correlated")


CASES = (
    Case("linear", 5, 60, 120),
    Case("logistic", 5, 50, 50),
    Case("logistic", 5, 100, 100),
    Case("logistic", 10, 100, 100),
    Case("logistic", 10, 200, 200),
    Case("linear", 5, 60, 120, "correlated"),
    Case("linear", 5, 60, 120, "uneven"),
    Case("linear", 5, 60, 120, "bent"),
    Case("linear", 5, 60, 120, "heavy"),
)


class Found(NamedTuple):
    """Estimates, with one entry per repeat."""

    radius2: Tensor
    control: Tensor
    covered: Tensor
    low: Tensor


def true_models(case: Case, radius2: float, question: Question, draw: torch.Generator) -> Tensor:
    """Return (repeats or 1, clients, d) models around a centre of norm 1; p-weighted R² exact."""
    centre = torch.ones(case.dim, dtype=torch.float64) / math.sqrt(case.dim)
    number = BLOCK if question == "drawn anew" else 1
    away = torch.randn(number, CLIENTS, case.dim, dtype=torch.float64, generator=draw)
    p = weights_of(case)
    away = away - (p[:, None] * away).sum(-2, keepdim=True)
    if question == "drawn anew":
        mean = case.dim * float((p * (1.0 - p)).sum())
        return centre + away * math.sqrt(radius2 / mean)
    spread = (p * away.square().sum(-1)).sum(-1)
    return centre + away * (radius2 / spread).sqrt()[:, None, None]


def sizes_of(case: Case) -> Tensor:
    """Return n_i, evenly from the fewest to the most."""
    return torch.linspace(case.fewest, case.most, CLIENTS).round().to(torch.int64)


def weights_of(case: Case) -> Tensor:
    """Return p_i = n_i/N."""
    sizes = sizes_of(case).to(torch.float64)
    return sizes / sizes.sum()


def draw_clients(case: Case, models: Tensor, draw: torch.Generator) -> Clients:
    """Draw a block of federations with these true models."""
    shape = (BLOCK, CLIENTS, case.most)
    mask = (torch.arange(case.most) < sizes_of(case)[:, None]).expand(shape)
    x = torch.randn(*shape, case.dim, dtype=torch.float64, generator=draw) * mask[..., None]
    if case.design == "correlated":
        place = torch.arange(case.dim)
        x = x @ torch.linalg.cholesky(0.9 ** (place[:, None] - place).abs().double()).T
    elif case.design == "heavy":
        scale = torch.randn(*shape, 4, dtype=torch.float64, generator=draw).square().mean(-1)
        x = x * scale.rsqrt()[..., None]
    scores = (x @ models[..., None])[..., 0]
    if case.family == "linear":
        noise = torch.randn(shape, dtype=torch.float64, generator=draw)
        if case.design in ("uneven", "heavy"):
            noise = noise * x.square().mean(-1).sqrt()
        if case.design == "bent":
            noise = noise + x[..., 0].square() + x[..., 1] * x[..., 2]
        y = scores + noise
    else:
        chance = torch.rand(shape, dtype=torch.float64, generator=draw)
        y = (chance < torch.sigmoid(scores)).double()
    return Clients(x, y * mask, mask, case.family)


def control_of(clients: Clients, models: Tensor, weights: Tensor) -> Tensor:
    """Return R̂² of the linearised fits, with their exact covariance."""
    at = models.expand(*clients.mask.shape[:-1], -1)
    point = look(clients, at)
    inverse = torch.linalg.inv(hessians(clients, point))
    w = at - (inverse @ point.slope[..., None])[..., 0]
    return from_fits(w, weights, inverse / clients.sizes[..., None, None]).radius2


def estimate(clients: Clients, weights: Tensor, seed: int) -> Heterogeneity:
    """Estimate as the adviser does."""
    reduced = clients.family == "logistic"
    w = fit_each(clients, bias_reduced=reduced, tolerance=1e-7).w
    noise = noise_of(clients, w)
    noise = calibrated(
        clients, w, noise, weights=weights, bias_reduced=reduced, draws=DRAWS, seed=seed
    )
    return from_fits(w, weights, noise.covariance, noise.doubt, noise.stretch)


def simulate(case: Case, radius2: float, question: Question, repeats: int) -> Found:
    """Run one row of the table, in blocks of lanes."""
    draw = torch.Generator().manual_seed(CASES.index(case) * 10 + TRUTHS.index(radius2))
    weights = weights_of(case).expand(BLOCK, CLIENTS)
    fixed, found = true_models(case, radius2, "these clients", draw), []
    for block in range(math.ceil(repeats / BLOCK)):
        anew = question == "drawn anew"
        models = true_models(case, radius2, question, draw) if anew else fixed
        clients = draw_clients(case, models, draw)
        got = estimate(clients, weights, block)
        low, high = got.interval_anew() if anew else got.interval()
        inside = (low <= radius2) & (radius2 <= high)
        control = control_of(clients, models, weights) if case.is_true else got.radius2 * 0.0
        found.append(Found(got.radius2, control, inside.double(), (high < radius2).double()))
    return Found(*(torch.cat(parts)[:repeats] for parts in zip(*found, strict=True)))


def judge(found: Found, radius2: float) -> tuple[float, float, float, float]:
    """Return bias and coverage, each with its Monte Carlo standard error."""
    both = torch.cov(torch.stack((found.radius2, found.control)))
    slope = float(both[0, 1] / both[1, 1]) if float(both[1, 1]) > 0 else 0.0
    errors = found.radius2 - radius2 - slope * (found.control - radius2)
    repeats = len(errors)
    covered = float(found.covered.mean())
    return (
        float(errors.mean()),
        float(errors.std()) / math.sqrt(repeats),
        covered,
        math.sqrt(max(covered * (1.0 - covered), 1.0 / repeats) / repeats),
    )


def verdict(value: float, error: float, low: float, high: float) -> str:
    """Return PASS inside the limits, else FAIL; add ? within two Monte Carlo errors of a limit."""
    near = min(abs(value - low), abs(value - high)) < 2.0 * error
    return ("PASS" if low <= value <= high else "FAIL") + ("?" if near else "")


def row_of(job: tuple[Question, Case, float, int]) -> list[str]:
    """Return one row of the table as text."""
    question, case, radius2, repeats = job
    torch.set_num_threads(1)
    found = simulate(case, radius2, question, repeats)
    bias, bias_error, covered, covered_error = judge(found, radius2)
    limit = 0.02 * radius2 + 0.005
    row = [
        question,
        case.family if case.design == "normal" else f"{case.family}, {case.design}",
        f"{case.dim}",
        f"{case.fewest}" if case.fewest == case.most else f"{case.fewest}–{case.most}",
        f"{radius2:g}",
        f"{bias:+.4f} ± {bias_error:.4f}",
        verdict(bias, bias_error, -limit, limit) if case.is_true else "",
        f"{float(found.radius2.std()):.3f}",
        f"{covered:.3f} ± {covered_error:.3f}",
        f"{float(found.low.mean()):.3f}",
        verdict(covered, covered_error, *COVERED) if case.is_true else "",
    ]
    print(*row, sep="  ", file=sys.stderr, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 if a row clearly fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    jobs = [
        (question, case, radius2, options.repeats)
        for question in get_args(Question)
        for case in CASES
        for radius2 in TRUTHS
    ]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(row_of, jobs))
    head = ("truth for", "family", "d", "n_i", "R²", "bias", "", "s.d.", "coverage", "too low", "")
    print(Table(head, rows))
    failed = sum(row.count("FAIL") for row in rows)
    taken = time.perf_counter() - begun
    print(f"{options.repeats} repeats, {taken:.0f} s; {failed} clear failures")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
