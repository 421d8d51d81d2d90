"""Solve for all clients under a Gaussian prior, learn the prior, leave every sample out once.

What the method ``evidence`` trains in rounds is solved here at one place, for the linear models of
`linear_models.py`; the adviser asks it what training alone, one model and a learned prior are
worth.

| symbol | here | meaning |
|---|---|---|
| w̄ ~ N(0, S) | centre, width | the mean of the prior; S = 0 holds it at zero |
| w_i ~ N(w̄, T) | own, spread | the clients' models; T = 0 makes them one |
| σ² | noise | of a linear regression; 1 for classes |
| L_i | | summed losses of client i, divided by σ² |
| A_i | ``curve`` | ∇²L_i |
| H_i⁻¹ | | (A_i + T⁻¹)⁻¹ = T^½ (I + T^½ A_i T^½)⁻¹ T^½, which holds for T = 0 too |
| C | | the covariance of w̄ given all data |

S = 0 is every client alone with a ridge, T = 0 one model with a ridge, anything else in between.
Spreads are diagonal: (d,), one for a feature, the same for all outputs of a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sartor.theory.linear_models import Clients, hessians, look, losses_of, predict

POOL = 2.0
"""Clients that a group's spread counts for in that of a single feature."""

LEVELS = (10**-0.5, 1.0, 10.0, 100.0)
"""What a learned spread is multiplied with; separable classes ask for the large ones."""

WIDTHS = (10**-0.5, 1.0, 10.0)
"""What a learned width is multiplied with, beside a spread."""

RIDGES = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0, 10**1.5, 100.0)
"""What the one number of clients alone, or of one model, is multiplied with."""

ROUNDS, FEW = 40, 10
"""Updates of a prior at most: from nothing, and from that of almost the same samples."""

MOST_STEPS = 60
"""Newton steps of a solve at most."""

DECADES = 0.7
"""Deviation of the prior of these multipliers, in powers of ten."""

LIGHT = 0.01
"""The weight up to which a multiple is not tried again on almost the same samples."""


class Prior(NamedTuple):
    """A prior: of the clients' models around their mean, and of the mean around zero."""

    spread: Tensor  # (d,) T
    width: Tensor  # (d,) S
    noise: Tensor  # 0-d σ²


class Solved(NamedTuple):
    """All models under one prior, and what they would say of a sample they had not seen."""

    own: Tensor  # (clients, p) w_i
    centre: Tensor  # (p,) w̄
    left_out: Tensor  # (clients, samples, outputs) scores without the sample, one Newton step
    evidence: float  # log p(data | prior), Laplace
    apart: Tensor  # (clients, p) variances of w_i − w̄
    sure: Tensor  # (p,) variances of w̄
    freedom: Tensor  # 0-d, the effective number of parameters
    steps: int  # Newton steps, in each of which the clients send sums


class Averaged(NamedTuple):
    """Models averaged over priors, with their scores for samples left out."""

    own: Tensor  # (clients, p)
    centre: Tensor  # (p,)
    left_out: Tensor  # (clients, samples, outputs)
    losses: Tensor  # (clients, samples) of samples left out; 0 for padding
    weights: Tensor  # (priors,)
    learned: Prior
    priors: list[Prior]  # multiples of it
    grid: list[tuple[float, float]]  # by how much they multiply spread and width
    best: int  # the prior of the largest weight
    evidence: float  # log p(data) of the prior that has the largest, Laplace
    steps: int  # Newton steps in all


def solve(clients: Clients, prior: Prior, start: Solved | None = None) -> Solved:
    """Find argmin Σ_i L_i(w_i)/σ² + ½ Σ_i ‖w_i − w̄‖²_{T⁻¹} + ½ ‖w̄‖²_{S⁻¹} by Newton steps.

    Args:
        clients: (clients, samples, d).
        prior: T, S and σ².
        start: a solution under a prior nearby.
    """
    frame = _frame(clients, prior)
    root, free = frame.root, frame.free
    centre = torch.zeros(clients.num_params, dtype=torch.float64)
    away = torch.zeros(len(clients.sizes), clients.num_params, dtype=torch.float64)  # v_i
    if start is not None:
        centre = torch.where(free, start.centre, 0.0)
        far = (start.own - centre) / torch.where(root > 0, root, 1.0)
        away = torch.where(root > 0, far.clamp(-5.0, 5.0), 0.0)

    def cost(centre: Tensor, away: Tensor) -> float:
        loss = losses_of(clients, predict(clients, centre + root * away)) * clients.mask
        found = loss.sum() / prior.noise + 0.5 * away.square().sum()
        return float(found + 0.5 * (centre.square() * frame.pull).sum())

    now, steps = cost(centre, away), 0
    for _ in range(1 if clients.family == "linear" and start is None else MOST_STEPS):
        steps += 1
        at = _at(clients, centre + root * away, frame)
        gv = root * at.slope + away
        inner = torch.cholesky_solve(gv[..., None], at.factor)[..., 0]
        pushed = (at.curve @ (root * inner)[..., None])[..., 0]
        slope = at.slope.sum(0) + centre * frame.pull
        step = torch.cholesky_solve((slope - pushed.sum(0))[:, None], at.whole)[:, 0]
        step = torch.where(free, step, 0.0)
        # v_i − B_i⁻¹ (T^½ g_i + v_i) + B_i⁻¹ T^½ A_i step: what is left to w_i once w̄ has moved.
        push = root * (at.curve @ step[:, None])[..., 0]
        turn = inner - torch.cholesky_solve(push[..., None], at.factor)[..., 0]
        gain = float((slope * step).sum() + (gv * turn).sum())
        length = 1.0
        while length > 1e-6:
            new = cost(centre - length * step, away - length * turn)
            if new <= now + 1e-12 * abs(now):
                break
            length /= 2.0
        centre, away = centre - length * step, away - length * turn
        now = new
        if gain <= 1e-9 * max(1.0, abs(new)) or clients.family == "linear":
            break
    return _solved(clients, centre, away, frame, now, steps)


class _Frame(NamedTuple):
    """What a prior is to a solve."""

    root: Tensor  # (p,) T^½
    width: Tensor  # (p,) S
    free: Tensor  # (p,) whether w̄ is: S > 0
    pull: Tensor  # (p,) S⁻¹, 0 where w̄ is held
    scale: Tensor  # (clients,) n_i/σ², by which mean losses become L_i
    noise: Tensor


def _frame(clients: Clients, prior: Prior) -> _Frame:
    root = prior.spread.repeat_interleave(clients.outputs).sqrt()
    width = prior.width.repeat_interleave(clients.outputs)
    free = width > 0
    pull = torch.where(free, 1.0 / torch.where(free, width, 1.0), 0.0)
    return _Frame(root, width, free, pull, clients.sizes / prior.noise, prior.noise)


class _Point(NamedTuple):
    """Derivatives at given models, with what a Newton step makes of them."""

    slope: Tensor  # (clients, p) ∇L_i/σ²
    curve: Tensor  # (clients, p, p) A_i
    factor: Tensor  # of B_i = I + T^½ A_i T^½
    whole: Tensor  # of ΣK_i + S⁻¹
    move: Tensor  # (clients, p, p) H_i⁻¹ A_i, by which w_i − w̄ follows w̄
    inverse: Tensor  # (clients, p, p) H_i⁻¹
    errors: Tensor  # (clients, samples, outputs) first derivatives by the scores
    bend: Tensor  # (clients, samples, outputs, outputs) second derivatives


def _at(clients: Clients, own: Tensor, frame: _Frame) -> _Point:
    point = look(clients, own)
    root, scale = frame.root, frame.scale
    curve = hessians(clients, point) * scale[:, None, None]
    eye = torch.eye(len(root), dtype=torch.float64)
    factor = torch.linalg.cholesky_ex(eye + root[:, None] * curve * root)[0]
    inverse = root[:, None] * torch.cholesky_inverse(factor) * root
    move = inverse @ curve
    whole = (curve - curve @ move).sum(0) + torch.diag(frame.pull)
    size = whole.diagonal().mean().clamp(min=1e-300)
    return _Point(
        point.slope * scale[:, None],
        curve,
        factor,
        torch.linalg.cholesky_ex(whole + 1e-12 * size * eye)[0],
        move,
        inverse,
        point.scores,
        point.curvature,
    )


def _solved(
    clients: Clients, centre: Tensor, away: Tensor, frame: _Frame, cost: float, steps: int
) -> Solved:
    own = centre + frame.root * away
    at = _at(clients, own, frame)
    free, width, noise = frame.free, frame.width, frame.noise
    eye = torch.eye(len(width), dtype=torch.float64)
    fixed = torch.where(free[:, None] & free, torch.cholesky_inverse(at.whole), 0.0)
    stay = eye - at.move
    cov_own = at.inverse + stay @ fixed @ stay.mT
    cov_apart = at.inverse + at.move @ fixed @ at.move.mT
    # log p(data): Laplace over all v_i and w̄ together.
    half = at.factor.diagonal(dim1=-2, dim2=-1).log().sum()
    if bool(free.any()):
        half = half + at.whole.diagonal()[free].log().sum() + 0.5 * width[free].log().sum()
    count = clients.sizes.sum()
    if clients.family == "linear":
        half = half + 0.5 * count * torch.log(2.0 * math.pi * noise)
    d, k = clients.x.shape[-1], clients.outputs
    shaped = cov_own.reshape(-1, d, k, d, k)
    reach = torch.einsum("mnd,mdaeb,mne->mnab", clients.x, shaped, clients.x)
    small = torch.eye(k, dtype=torch.float64)
    # f + G (I − ΛG)⁻¹ e: the scores after one Newton step away from the sample.
    inner = small - (1.0 - 1e-6) * (at.bend / noise) @ reach
    shift = torch.linalg.solve(inner, at.errors[..., None] / noise)
    return Solved(
        own,
        centre,
        predict(clients, own) + (reach @ shift)[..., 0],
        -cost - float(half),
        cov_apart.diagonal(dim1=-2, dim2=-1),
        fixed.diagonal(),
        (at.curve * cov_own).sum(),
        steps,
    )


def learn(
    clients: Clients,
    *,
    alone: bool = False,
    one: bool = False,
    intercept: bool = True,
    rounds: int = ROUNDS,
    start: Prior | None = None,
) -> tuple[Prior, Solved]:
    """Learn T, S and σ² by MacKay's fixed point of the evidence; ``steps`` counts all solves.

    Args:
        clients: (clients, samples, d).
        alone: hold w̄ at zero (S = 0) and learn one T for all features.
        one: hold the clients' models together (T = 0) and learn S.
        intercept: whether the last feature is the constant one, whose variances are apart.
        rounds: updates at most.
        start: a prior nearby, such as that of most of these samples.
    """

    def grouped(values: Tensor) -> Tensor:
        """Replace every number by the sum over its group."""
        sizes = [len(values) - 1, 1] if intercept else [len(values)]
        return torch.cat([part.sum().expand(part.shape) for part in values.split(sizes)])

    m, k, d = len(clients.sizes), clients.outputs, clients.x.shape[-1]
    ones = torch.ones(d, dtype=torch.float64)
    spread, width = (ones * 0.0 if one else 0.1 * ones), (ones * 0.0 if alone else ones)
    count = clients.sizes.sum()
    noise = torch.tensor(1.0, dtype=torch.float64)
    if clients.family == "linear":  # the variance of the targets within clients, to begin with
        mean = (clients.y * clients.mask).sum(-1) / clients.sizes
        gap = (clients.y - mean[:, None]) * clients.mask
        noise = (gap.square().sum() / count).clamp(min=1e-300)
    floor = noise * 1e-12
    unit = noise.clone()
    spread, width = spread * unit, width * unit
    if start is not None:
        spread, width, noise = start
    found = solve(clients, Prior(spread, width, noise))
    steps = found.steps
    for _ in range(rounds):
        if clients.family == "linear":
            fit = losses_of(clients, predict(clients, found.own)) * clients.mask
            rest = (count - found.freedom).clamp(min=0.05 * count)
            noise = torch.maximum(2.0 * fit.sum() / rest, floor)
        old = spread, width
        if not one:
            squares = _by_feature((found.own - found.centre).square().sum(0), k)
            safe = torch.where(spread > 0, spread, 1.0).repeat_interleave(k)
            sure = _by_feature((1.0 - found.apart / safe).clamp(0.0, 1.0).sum(0), k)
            group = grouped(squares) / grouped(sure).clamp(min=1e-6 * m * k)
            pool = POOL * k
            new = group if alone else (squares + pool * group) / (sure + pool)
            spread = _near(new, spread, 1e-10 * noise, 1e4 * noise)
        if not alone:
            squares = _by_feature(found.centre.square(), k)
            known = _by_feature((1.0 - found.sure / width.repeat_interleave(k)).clamp(0.0, 1.0), k)
            new = grouped(squares) / grouped(known).clamp(min=0.01)
            width = _near(new, width, 1e-3 * noise, 1e3 * noise)
        found = solve(clients, Prior(spread, width, noise), found)
        steps += found.steps
        moved = [
            float((a / torch.where(b > 0, b, 1.0)).clamp(min=1e-300).log().abs().max())
            for a, b in zip((spread, width), old, strict=True)
            if bool((b > 0).any())
        ]
        if max(moved) < 1e-3:
            break
    return Prior(spread, width, noise), found._replace(steps=steps)


def averaged(
    clients: Clients,
    *,
    alone: bool = False,
    one: bool = False,
    intercept: bool = True,
    start: Averaged | None = None,
    each: Callable[[], None] | None = None,
) -> Averaged:
    """Learn a prior, and average models over multiples of it by the losses of samples left out.

    A prior k weighs exp(−Σ losses of samples left out − log10² of its multipliers / (2·0.7²)): the
    learned one unless the samples say otherwise. Losses are convex in the weights of a linear
    model, so that the mean model is no worse than the models in the mean.

    Args:
        clients: see ``learn``.
        alone: every client for itself.
        one: one model for all.
        intercept: see ``learn``.
        start: the same of almost the same samples: where learning starts, and which of the
            multiples are tried: those that weighed something there.
        each: is called after every solve.
    """
    before = None if start is None else start.learned
    ends = {"alone": alone, "one": one, "intercept": intercept}
    learned, found = learn(clients, **ends, start=before, rounds=ROUNDS if start is None else FEW)
    steps = found.steps
    count = float(clients.sizes.sum())
    grid: list[tuple[float, float]] = [(a, b) for b in WIDTHS for a in LEVELS]
    if alone:
        grid = [(a, 1.0) for a in RIDGES]
    elif one:
        grid = [(1.0, b) for b in RIDGES]
    else:
        learned = learned._replace(spread=learned.spread.clamp(min=float(learned.noise) / count))
    if start is not None:
        grid = [one for one, w in zip(start.grid, start.weights.tolist(), strict=True) if w > LIGHT]
    priors = [Prior(learned.spread * a, learned.width * b, learned.noise) for a, b in grid]
    solved: list[Solved] = []
    for prior in priors:
        found = solve(clients, prior, found)
        steps += found.steps
        solved.append(found)
        if each is not None:
            each()
    lost = torch.stack([losses_of(clients, one.left_out) * clients.mask for one in solved])
    nats = lost.flatten(1).sum(-1)
    if clients.family == "linear":  # ½ squared error, in units of the smallest mean
        nats = nats * count / (2.0 * nats.min().clamp(min=1e-300))
    far = torch.tensor([math.log10(a) ** 2 + math.log10(b) ** 2 for a, b in grid])
    weights = torch.softmax(-nats - far / (2.0 * DECADES**2), 0)

    def mean(values: list[Tensor]) -> Tensor:
        return torch.einsum("k,k...->...", weights, torch.stack(values))

    scores = mean([one.left_out for one in solved])
    return Averaged(
        own=mean([one.own for one in solved]),
        centre=mean([one.centre for one in solved]),
        left_out=scores,
        losses=losses_of(clients, scores) * clients.mask,
        weights=weights,
        learned=learned,
        priors=priors,
        grid=grid,
        best=int(weights.argmax()),
        evidence=max(one.evidence for one in solved),
        steps=steps,
    )


def _by_feature(values: Tensor, outputs: int) -> Tensor:
    """Sum over the outputs of a feature: (p,) -> (d,)."""
    return values.reshape(-1, outputs).sum(-1)


def _near(new: Tensor, old: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Keep a variance within 30 times its last value, and within its bounds."""
    near = torch.minimum(torch.maximum(new, old / 30.0), old * 30.0)
    return torch.minimum(torch.maximum(near, least), most)
