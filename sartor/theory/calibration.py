"""Estimate the noise of logistic and softmax fits to the next order in 1/n_i, by simulated labels.

tr H_i⁻¹G_iH_i⁻¹/n_i at a fit is wrong for two reasons: the variance T_i of a fit is larger than the
formula at the true model, and the formula is larger at a fit than at the true model, because fits
have larger norms. Labels drawn from known models w̃_i and fitted again measure both errors:
t̂_i = F_i(ŵ_i) T_i/F̄_i.

| symbol | here | meaning |
|---|---|---|
| ŵ_i, w̄ | w, (inside) | fits (..., clients, p), and Σ p_i ŵ_i |
| p_i | weights | (..., clients), of sum 1 |
| w̃_i | ``drawn_in`` | w̄ + k(ŵ_i − w̄), the models that labels are drawn from |
| T_i | ``Drawings.spread`` | variance of the fits to labels drawn from w̃_i |
| F_i | noise.total | ``noise_of`` at the fit |
| F̄_i | ``Drawings.said`` | the mean of ``noise_of`` at the fits to simulated labels |
| b_i | ``Drawings.drift`` | mean of those fits − w̃_i: the bias that Firth's penalty leaves |

The fits themselves are spread by R² + noise and would give too large a T_i. They are therefore
shrunk towards w̄ until their spread is R² alone (T. Louis' constrained empirical Bayes),
k² = max(R̂², 0)/Σ p_i‖ŵ_i − w̄‖² with the uncalibrated R̂². If the clients are alike, all labels are
drawn from one model. A client receives w̄ and k, draws its own labels, and sends b_i.

T_i and b_i are measured relative to fits that are linear in the labels, w̃_i − H_i⁻¹∇L_i(w̃_i), whose
mean and covariance are known, so that only a small difference is random. The method is ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sartor.core import rng
from sartor.theory.exact_fits import factor, fit_each
from sartor.theory.firth import refit
from sartor.theory.linear_models import Clients, basis, hessians, look, predict
from sartor.theory.noise import Middle, Noise, noise_of

ENOUGH = 1e-5
"""The gradient norm at which a fit to simulated labels stops; its noise is far larger."""


class Drawings(NamedTuple):
    """What fits to simulated labels show, (..., clients); for ``drift`` (..., clients, p)."""

    spread: Tensor
    said: Tensor
    drift: Tensor
    doubt: Tensor  # Var(T_i)/T_i² due to the random labels


def calibrated(
    clients: Clients,
    w: Tensor,
    noise: Noise,
    *,
    weights: Tensor | None = None,
    middle: Middle | None = None,
    bias_reduced: bool,
    draws: int = 20,
    seed: int = 0,
) -> Noise:
    """Multiply V̂_i by T_i/F̄_i, and add what the bias of the fits adds to their distances.

    This assumes that the labels follow the model; linear models need no calibration. The fits to
    ``draws`` sets of simulated labels are made like w, with ``bias_reduced`` and ``middle`` as for
    ``fit_each`` and ``noise_of``. p_i are equal if None.
    """
    if clients.family == "linear" or draws < 2:
        return noise
    p = torch.full_like(noise.total, 1.0 / w.shape[-2]) if weights is None else weights
    centre = (p[..., None] * w).sum(-2, keepdim=True)
    at = drawn_in(w, noise.total, p)
    found = drawings(clients, at, middle, bias_reduced=bias_reduced, draws=draws, seed=seed)
    away = found.drift - (p[..., None] * found.drift).sum(-2, keepdim=True)
    return noise.scaled(found.spread / found.said)._replace(
        doubt=noise.doubt + found.doubt, stretch=2.0 * ((at - centre) * away).sum(-1)
    )


def drawn_in(w: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
    """Return w̄ + k(ŵ_i − w̄) with the spread R̂² = Σ p_i‖ŵ_i − w̄‖² − Σ p_i(1 − p_i)t̂_i, or 0."""
    centre = (weights[..., None] * w).sum(-2, keepdim=True)
    spread = (weights * (w - centre).square().sum(-1)).sum(-1)
    radius2 = (spread - (weights * (1.0 - weights) * noise).sum(-1)).clamp(min=0.0)
    share = torch.where(spread > 0.0, radius2 / spread, 0.0).sqrt()
    return centre + share[..., None, None] * (w - centre)


def drawings(
    clients: Clients,
    at: Tensor,
    middle: Middle | None = None,
    *,
    bias_reduced: bool,
    draws: int,
    seed: int = 0,
) -> Drawings:
    """Draw labels from known models w̃_i (..., clients, p), ``draws`` times, and fit them again."""
    inverse = torch.cholesky_inverse(factor(hessians(clients, look(clients, at))))
    known = noise_of(clients, at, "model").total
    prints, key = fingerprints(clients), rng.key(seed)
    labels = torch.stack(
        [draw_labels(clients, at, rng.fold(key, "labels", k), prints) for k in range(draws)]
    )
    first = -(inverse @ _slopes(clients, at, labels)).movedim(-1, 0)
    if bias_reduced and (middle or "model") == "model":
        fits, said = _quick(clients, at + first, labels)
    else:
        fits, said = _one_by_one(clients, at, labels, middle, bias_reduced)
    apart = (fits - fits.mean(0)).square().sum(-1) - (first - first.mean(0)).square().sum(-1)
    spread = (known + apart.sum(0) / (draws - 1)).clamp(min=0.1 * known)
    return Drawings(
        spread=spread,
        said=said.mean(0),
        drift=(fits - first).mean(0) - at,
        doubt=apart.var(0) * draws / ((draws - 1) * spread).square(),
    )


def _slopes(clients: Clients, at: Tensor, labels: Tensor) -> Tensor:
    """Return ∇L_i(w̃_i) without ridge for every set of labels: (..., clients, p, draws)."""
    if clients.family != "logistic":
        plain = replace(clients, ridge=0.0)
        return torch.stack([look(replace(plain, y=y), at).slope for y in labels], -1)
    residual = torch.sigmoid(predict(clients, at)) - labels.movedim(0, -1)
    return clients.x.mT @ (residual * clients.mask[..., None]) / clients.sizes[..., None, None]


def draw_labels(clients: Clients, w: Tensor, key: Tensor, prints: Tensor | None = None) -> Tensor:
    """Draw a label for every sample from a logistic or softmax model.

    The random number of a sample depends on the key, the client's fingerprint and the sample's
    index only: padding, the order of clients and other federations in the batch do not matter.
    """
    scores = predict(clients, w)
    num_samples = clients.y.shape[-1]
    keys = rng.fold(key, fingerprints(clients) if prints is None else prints)
    words = rng.words_at(keys[..., None, :], torch.arange((num_samples + 3) // 4))
    chance = (words.flatten(-2)[..., :num_samples].to(torch.float64) + 0.5) * 2.0**-32
    if clients.family == "logistic":
        return (chance < torch.sigmoid(scores[..., 0])).to(clients.y.dtype)
    shares = torch.softmax(scores @ basis(clients.num_classes).T, -1).cumsum(-1)
    drawn = (shares < chance[..., None]).sum(-1).clamp(max=clients.num_classes - 1)
    return drawn.to(clients.y.dtype)


def fingerprints(clients: Clients) -> Tensor:
    """Return a number for every client's samples that does not depend on their order.

    (..., clients), int64: a sum of hashes of the samples' bits, so that a client keeps its random
    numbers wherever it is listed.
    """
    features = clients.x.double().view(torch.int64)
    odd = 2 * torch.arange(features.shape[-1]) + 1
    labels = clients.y.double().view(torch.int64)
    mixed = (features * odd * 0x9E3779B1).sum(-1) + labels * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 29)) * 0xC2B2AE3D
    return torch.where(clients.mask, mixed ^ (mixed >> 32), 0).sum(-1) & 0x7FFFFFFFFFFFFFFF


# ---- fits to simulated labels --------------------------------------------------------------------


def _one_by_one(
    clients: Clients, at: Tensor, labels: Tensor, middle: Middle | None, bias_reduced: bool
) -> tuple[Tensor, Tensor]:
    """Return the fits and their ``noise_of``, each with the sets of labels as first axis."""
    fits, said = [], []
    for y in labels:
        other = replace(clients, y=y)
        fit = fit_each(other, bias_reduced=bias_reduced, start=at, tolerance=ENOUGH, max_steps=30)
        fits.append(fit.w)
        said.append(noise_of(other, fit.w, middle).total)
    return torch.stack(fits), torch.stack(said)


def _quick(clients: Clients, start: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same for Firth's fits at once; fit the few that do not converge one by one."""
    lanes, draws, p = clients.mask.shape[:-1], len(labels), start.shape[-1]
    x = (clients.x * clients.mask[..., None]).expand(*clients.mask.shape, p)
    y = labels.movedim(0, -1).reshape(-1, clients.mask.shape[-1], draws)
    found = refit(x.reshape(-1, *x.shape[-2:]), y, start.movedim(0, -2).reshape(-1, draws, p))
    w = found.w.reshape(*lanes, draws, p).movedim(-2, 0)
    said = found.total.reshape(*lanes, draws).movedim(-1, 0)
    late = ~found.arrived.reshape(*lanes, draws).movedim(-1, 0)
    if bool(late.any()):
        which = late.nonzero(as_tuple=True)
        features, mask = (part[which[1:]][:, None] for part in (x, clients.mask))
        other = Clients(features, labels[which][:, None], mask, clients.family)
        fit = fit_each(other, bias_reduced=True, tolerance=ENOUGH, max_steps=60).w
        w, said = w.clone(), said.clone()
        w[which] = fit[:, 0]
        said[which] = noise_of(other, fit, "model").total[:, 0]
    return w, said
