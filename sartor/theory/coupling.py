"""Choose the pull λ between personal models and the global one, from heterogeneity and noise.

Yu, He, Sun, Xue, Li, "The Effect of Personalization in FedProx" (arXiv 2410.08934), Theorem 1, in
its first version (``v1``) and in a later one (``v2``).

| symbol | here | meaning |
|---|---|---|
| λ | (result) | the pull; ∞ is one model for all, 0 is every client alone |
| R | heterogeneity | the largest distance of a client's best model from their mean |
| ρ | noise | root of the mean squared gradient of one sample at its client's best model |
| n, N, m | num_samples, total_samples, num_clients | samples a client, in all, clients |
| L, μ, κ | smoothness, strong_convexity, L/μ | of the clients' losses |

Every rule is a pure function of numbers or tensors that broadcast, so a value per client (R_i, ρ_i,
n_i) gives λ_i (our extension: the paper leaves λ_i open). ``v2`` only bounds λ, from below if the
clients are alike and from above if they are not, and the bound itself is returned. If they are
alike it is at least 64κ²L, which in practice is one model for all. ``shrinkage`` is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core.errors import ConfigError, did_you_mean
from sartor.theory.quantities import Number, tensors

RULES = ("v1", "v2", "shrinkage")


def v1(heterogeneity: Number, num_samples: Number, noise: Number = 2.0) -> Tensor:
    """Return λ = ρ/(√n R) if R <= 1/√n, else ρ²/(n R²).

    The paper's figures use it with ρ = 2.

    >>> round(float(v1(0.5, 200)), 6)
    0.08
    """
    r, n, rho = tensors(heterogeneity, num_samples, noise)
    return torch.where(r <= 1.0 / n.sqrt(), rho / (n.sqrt() * r), rho.square() / (n * r.square()))


def v2(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number = 2.0,
) -> Tensor:
    """Return λ of (82), max{64κ²L, max{2κ, 5}μQ} − μ, if R <= 1/√n, else ρ²/(n μ R²).

    Q = (2L²R² + ρ²/n)/(L²R² + ρ²/N).

    >>> round(float(v2(0.05, 200, 2000, smoothness=1.0, strong_convexity=0.1)), 6)
    6399.9
    """
    r, n, rho = tensors(heterogeneity, num_samples, noise)
    terms = v2_terms(heterogeneity, num_samples, total_samples, smoothness, strong_convexity, noise)
    alike = torch.maximum(*terms) - strong_convexity
    apart = rho.square() / (n * strong_convexity * r.square())
    return torch.where(r <= 1.0 / n.sqrt(), alike, apart)


def v2_terms(
    heterogeneity: Number,
    num_samples: Number,
    total_samples: Number,
    smoothness: Number,
    strong_convexity: Number,
    noise: Number = 2.0,
) -> tuple[Tensor, Tensor]:
    """Return the terms of the maximum in (82), 64κ²L and max{2κ, 5}μQ; λ + μ is at least these.

    >>> [round(float(x), 4) for x in v2_terms(0.05, 200, 2000, 1.0, 0.1)]
    [6400.0, 11.1111]
    """
    r, n, total, rho = tensors(heterogeneity, num_samples, total_samples, noise)
    big, small = tensors(smoothness, strong_convexity)
    kappa, spread, var = big / small, (big * r).square(), rho.square()
    q = (2.0 * spread + var / n) / (spread + var / total)
    return 64.0 * kappa.square() * big, (2.0 * kappa).clamp(min=5.0) * small * q


def shrinkage(
    heterogeneity: Number,
    num_samples: Number,
    num_clients: int,
    strong_convexity: float,
    noise: Number = 2.0,
) -> Tensor:
    """Return λ = (1 − 1/m) ρ²/(n μ R²), for any R.

    For losses with Hessian μI it minimises the mean squared error of the personal models exactly:
    a client then moves by V(1−1/m)/(R² + V(1−1/m)) towards the mean, with V = ρ²/(μ²n) and R² the
    mean squared distance.

    >>> round(float(shrinkage(0.3, 50, 10, 1.0, noise=5**0.5)), 6)
    1.0
    """
    r, n, rho = tensors(heterogeneity, num_samples, noise)
    return (1.0 - 1.0 / num_clients) * rho.square() / (n * strong_convexity * r.square())


def by_rule(
    rule: str,
    heterogeneity: Tensor,
    noise: Tensor,
    sizes: Tensor,
    smoothness: float,
    strong_convexity: float,
) -> Tensor:
    """Return λ by one of ``RULES`` for every client of a federation, (clients,).

    R and ρ are 0-d or (clients,), and ``sizes`` (clients,) are the n_i. λ is that of n = N/m, the
    same for all clients; λ_i with n_i if R or ρ differs between them.

    Raises:
        ConfigError: there is no such rule.
    """
    if rule not in RULES:
        raise ConfigError(f"There is no rule {rule!r} for the pull{did_you_mean(rule, RULES)}")
    # A constant vector counts as one number, because in a sweep one row with a value per client
    # turns all rows into vectors.
    unlike = (heterogeneity != heterogeneity.max()).any() | (noise != noise.max()).any()
    n = torch.where(unlike, sizes.double(), sizes.double().mean())
    if rule == "v1":
        return v1(heterogeneity, n, noise)
    if rule == "v2":
        return v2(heterogeneity, n, sizes.sum(), smoothness, strong_convexity, noise)
    return shrinkage(heterogeneity, n, sizes.shape[0], strong_convexity, noise)
