"""From the clients' samples to heterogeneity, noise and the error that each λ would leave.

What leaves a client is stated with every quantity; samples never do. All functions take any number
of federations at once (leading axes), so that a study of thousands runs as lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sartor.theory import random_effects
from sartor.theory.calibration import calibrated
from sartor.theory.exact_fits import Fits, fit_each
from sartor.theory.heterogeneity import Heterogeneity, from_fits
from sartor.theory.linear_models import Clients
from sartor.theory.noise import Noise, noise_of
from sartor.theory.random_effects import Effects, Frame, Risks, best_pull, default_pulls, risks

Target = Literal["loss", "parameters"]

CALIBRATED = 64
"""Parameters up to which the noise of fits is calibrated: it takes some twenty fits more."""

ENOUGH = 5.0
"""Samples that a client needs for every parameter that its fit uses."""

FLAT = 1e-6
"""Share of the largest curvature below which the smallest leaves a model undetermined."""


@dataclass(frozen=True)
class Estimates:
    """What the adviser knows of a federation before training, the federated way.

    A client sends H_i, p(p + 1)/2 numbers, and receives the eigenvectors of their mean, p². It
    sends ŵ_i, its variance and curvature along these (three messages of the model's size), and the
    numbers n_i, ρ̂_i², μ_i, L_i and tr(H_i⁻¹G_i), once; for the standard error of R̂² the whole of
    V̂_i, p(p + 1)/2 numbers.

    Attributes:
        sizes: (..., clients) n_i.
        weights: (..., clients) p_i.
        fits: every client alone.
        noise: chance error of the fits.
        heterogeneity: R̂² (R1) with its errors, and distances.
        effects: τ², by restricted likelihood.
        pulls: (pulls,) values of λ, from 0 (alone) to ∞ (one model for all).
        frame: fits, variances and curvatures h_ij along common eigenvectors.
        risks: expected errors at these, per client and coordinate of the frame.
        pull: (...) the λ of smallest expected mean error.
        own_pull: (..., clients) the common λ that serves client i best, by its own τ_i².
        calibrated: whether the noise was, by drawn labels; it costs a client two messages more.
    """

    sizes: Tensor
    weights: Tensor
    fits: Fits
    noise: Noise
    heterogeneity: Heterogeneity
    effects: Effects
    pulls: Tensor
    frame: Frame
    risks: Risks
    pull: Tensor
    own_pull: Tensor
    calibrated: bool

    def errors(self, target: Target) -> Tensor:
        """Return the expected error of every client at every λ, (..., pulls, clients)."""
        return _expected(self.risks, self.frame, self.effects.tau2, target)

    def own_errors(self) -> Tensor:
        """Return the expected losses by the clients' own τ_i², (..., pulls, clients)."""
        return _expected(self.risks, self.frame, self.effects.own, "loss")

    @property
    def curvature(self) -> Tensor:
        """(..., clients, p) h_ij."""
        return self.frame.curvature


def _expected(risks: Risks, at: Frame, tau2: Tensor, target: Target) -> Tensor:
    if target == "parameters":
        return risks.total(tau2)
    return risks.total(tau2, at.curvature / 2.0, at.share)


def estimate(
    clients: Clients,
    weights: Tensor,
    *,
    target: Target = "loss",
    draws: int = 20,
    seed: int = 0,
    pulls: Tensor | None = None,
) -> Estimates:
    """Fit every client alone and say what λ will do.

    Args:
        clients: the samples.
        weights: (..., clients) p_i, of sum 1.
        target: what λ shall make small: the clients' mean excess loss, or the mean squared error of
            their parameters.
        draws: drawings that calibrate the noise of logistic and softmax fits of up to 64
            parameters; 0 leaves it out.
        seed: of the drawings.
        pulls: values of λ to try; a fine grid if None.
    """
    bias_reduced = clients.family == "logistic" and not clients.ridge
    fits = fit_each(clients, bias_reduced=bias_reduced)
    noise = noise_of(clients, fits.w)
    calibrate = draws > 1 and clients.num_params <= CALIBRATED and clients.family != "linear"
    if calibrate:
        noise = calibrated(
            clients,
            fits.w,
            noise,
            weights=weights,
            bias_reduced=bias_reduced,
            draws=draws,
            seed=seed,
        )
    at = random_effects.frame(fits.w, noise.covariance, noise.hessian, weights)
    found = random_effects.effects(at.w, at.variance)
    tried = default_pulls(at.curvature) if pulls is None else pulls
    expected = risks(tried, at.variance, at.curvature, weights)
    mean = (weights[..., None, :] * _expected(expected, at, found.tau2, target)).sum(-1)
    own = _expected(expected, at, found.own, target).transpose(-1, -2)
    return Estimates(
        sizes=clients.sizes,
        weights=weights,
        fits=fits,
        noise=noise,
        heterogeneity=from_fits(fits.w, weights, noise.covariance, noise.doubt, noise.stretch),
        effects=found,
        pulls=tried,
        frame=at,
        risks=expected,
        pull=best_pull(tried, mean),
        own_pull=best_pull(tried, own),
        calibrated=calibrate,
    )


def well_posed(clients: Clients) -> bool:
    """Say at little cost whether every client has samples and features enough for a fit."""
    if float(clients.sizes.min()) < ENOUGH * clients.num_params:
        return False
    x = clients.x * clients.mask[..., None]
    values = torch.linalg.eigvalsh(x.mT @ x)
    if bool((values[:, 0] <= FLAT * values[:, -1]).any()):
        return False
    return bool(fit_each(clients, tolerance=1e-4, max_steps=15).converged.all())


def doubts(clients: Clients, fits: Fits, noise: Noise) -> list[list[str]]:
    """List for one federation, per client, why its estimates cannot be trusted; empty if they can.

    Args:
        clients: (clients, samples, d).
        fits: of these.
        noise: of these fits.
    """
    found: list[list[str]] = []
    sizes = clients.sizes.tolist()
    for i, n in enumerate(sizes):
        reasons = []
        if clients.family != "linear" and len(torch.unique(clients.y[i][clients.mask[i]])) < 2:
            reasons.append("has samples of one class only")
        if bool(fits.separable[i]):
            reasons.append("has classes that a linear model separates without an error")
        elif not bool(fits.converged[i]):
            reasons.append(
                f"has a fit that did not converge (gradient {float(fits.gradient[i]):.1e})"
            )
        elif float(noise.smallest[i]) < FLAT * float(noise.curvature[i].max()):
            reasons.append(
                f"has a loss that is flat in some direction (curvature "
                f"{float(noise.smallest[i]):.1e}), as where one class is separated from the rest"
            )
        if n < ENOUGH * float(noise.used[i]):
            reasons.append(
                f"has {n:.0f} samples for {float(noise.used[i]):.0f} parameters (at least "
                f"{ENOUGH * float(noise.used[i]):.0f} are needed)"
            )
        if not float(noise.smallest[i]) > FLAT * float(noise.largest[i]):
            reasons.append("has features that leave its model undetermined")
        found.append(reasons)
    return found
