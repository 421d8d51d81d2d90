"""Bound how far one sample can move a client's model and its losses, and approximate it.

Chen, Zheng, Long, Su, JMLR 24(262), 2023 (arXiv 2103.01901): Definition 5 (federated stability),
Theorems 4 and 6, Proposition 21, Lemmas 24 to 28. An algorithm has stability γ_i if replacing any
one sample of client i by any other changes its loss at any z by γ_i at most.

| symbol | here | meaning |
|---|---|---|
| γ_i | (result) | the stability of client i |
| s | distance | ‖ŵ_i(S) − ŵ_i(S′)‖, S′ with the sample z_ij replaced by z′ |
| β, μ | smoothness, strong_convexity | of the loss of a sample, and of a client's mean loss |
| ‖ℓ‖∞ | loss_bound | the largest loss; losses are >= 0 |
| n_i, p_i | num_samples, weight | samples and weight of client i |
| λ | prox_strength | the pull of FedProx |
| ε_g, ε_i | global_error, local_error | ‖ŵ_g − w̃_g‖ and ‖ŵ_i − prox_i(ŵ_g)‖, of inexact solving |
| H_k | hessians[k] | ∇²L_k at ŵ_k, ridge included, (d, d) |
| ∇ℓ(z_ij), ∇ℓ(z′) | old, new | (..., d) gradients at ŵ_i; (j, 1, d) and (1, k, d) give all pairs |

Differs from the paper: the bound of LocalTrain is Theorem 6 with m = 1. Err_i of Proposition 21 is
printed with (β+λ)/(μ+λ) before ε_g and with the factor 8β²; Lemma 25 (ζ_i = (β+λ)ε_i, where the
printed δ also lack their squares) puts it before ε_i, and β E² of (58) has one β. Err_i here is
√(2β‖ℓ‖∞) E + β E² itself, without the last estimates of the proof. Lemma 24 prints 1 + β/(n_i(μ+λ))
for 1 + 16β/(n_i(μ+λ)); its 160 is right. The approximations are ours: first order in 1/n_i, exact
for losses whose Hessian is the same at every sample. The arguments of the bounds broadcast, so that
one call serves all clients or a sweep. Proposition 10, on the risks, is in ``excess_risk``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.core.errors import ConfigError
from sartor.theory.quantities import Number, tensors

# ---- bounds on γ_i -------------------------------------------------------------------------------


def local_bound(
    num_samples: Number, *, smoothness: Number, strong_convexity: Number, loss_bound: Number
) -> Tensor:
    """Return 32 β‖ℓ‖∞/(μ n_i), the stability of LocalTrain; needs n_i >= 4β/μ.

    >>> local_bound(10, smoothness=1.0, strong_convexity=1.0, loss_bound=2.0).item()
    6.4
    """
    known = {"smoothness": smoothness, "strong_convexity": strong_convexity}
    return fedavg_bound(num_samples, 1.0, **known, loss_bound=loss_bound)


def fedavg_bound(
    num_samples: Number,
    weight: Number,
    *,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
) -> Tensor:
    """Return 32 β‖ℓ‖∞ p_i/(μ n_i), for the minimiser of Σ p_k L_k; needs n_i >= 4β p_i/μ.

    >>> fedavg_bound(10, 0.2, smoothness=1.0, strong_convexity=1.0, loss_bound=2.0).item()
    1.28
    """
    n, p, beta, mu, top = tensors(num_samples, weight, smoothness, strong_convexity, loss_bound)
    _check(beta, mu, top, p)
    _enough(n, 4.0 * beta * p / mu, "4βp_i/μ")
    return 32.0 * beta * top * p / (mu * n)


def fedprox_bound(
    num_samples: Number,
    weight: Number,
    prox_strength: Number,
    *,
    smoothness: Number,
    strong_convexity: Number,
    loss_bound: Number,
    global_error: Number = 0.0,
    local_error: Number = 0.0,
) -> Tensor:
    """Return 160 β‖ℓ‖∞/(n_i(μ+λ)) + Err_i; needs n_i >= 4β/μ and p_i λ <= μ/16, Eq. (48).

    Err_i = √(2β‖ℓ‖∞) E + β E², see ``fedprox_error``; the conditions must hold for every client,
    not only for this one.

    >>> known = {"smoothness": 1.0, "strong_convexity": 1.0, "loss_bound": 2.0}
    >>> fedprox_bound(10, 0.2, 0.25, **known).item()
    25.6
    """
    n, p, beta, mu, top = tensors(num_samples, weight, smoothness, strong_convexity, loss_bound)
    (lam,) = tensors(prox_strength)
    _check(beta, mu, top, p)
    _enough(n, 4.0 * beta / mu, "4β/μ")
    wrong = ~((lam >= 0.0) & (p * lam <= mu / 16.0 * (1.0 + 1e-12)))
    if bool(wrong.any()):
        bad_p, bad_lam, most = _first(wrong, p, lam, mu / 16.0)
        raise ConfigError(
            f"This bound needs 0 <= p_i λ <= μ/16 = {most:g}, got {bad_p:g} · {bad_lam:g} = "
            f"{bad_p * bad_lam:g}; lower prox_strength, or use `fedprox_shift`, which has no "
            "such condition."
        )
    errors = {"global_error": global_error, "local_error": local_error}
    far = fedprox_error(p, lam, smoothness=beta, strong_convexity=mu, **errors)
    exact = 160.0 * beta * top / (n * (mu + lam))
    return exact + (2.0 * beta * top).sqrt() * far + beta * far.square()


def fedprox_error(
    weight: Number,
    prox_strength: Number,
    *,
    smoothness: Number,
    strong_convexity: Number,
    global_error: Number,
    local_error: Number,
) -> Tensor:
    """Return E of Eq. (59), the most that inexact solving adds to s.

    E = ε_i (8q + 2√q + 32 p_i λ/μ) + 8 ε_g λ (2/μ + 1/√(μ(μ+λ))), q = (β+λ)/(μ+λ).

    >>> known = {"smoothness": 1.0, "strong_convexity": 1.0}
    >>> fedprox_error(0.5, 0.0, **known, global_error=1.0, local_error=0.1).item()
    1.0
    """
    p, lam, beta, mu = tensors(weight, prox_strength, smoothness, strong_convexity)
    centre, own = tensors(global_error, local_error)
    q = (beta + lam) / (mu + lam)
    own = own * (8.0 * q + 2.0 * q.sqrt() + 32.0 * p * lam / mu)
    return own + centre * 8.0 * lam * (2.0 / mu + 1.0 / (mu * (mu + lam)).sqrt())


def loss_change(distance: Number, *, smoothness: Number, loss_bound: Number) -> Tensor:
    """Return √(2β‖ℓ‖∞) s + (β/2) s², the most a loss changes if a model moves by s (Lemma 26).

    >>> round(loss_change(0.1, smoothness=1.0, loss_bound=2.0).item(), 6)
    0.205
    """
    s, beta, top = tensors(distance, smoothness, loss_bound)
    return (2.0 * beta * top).sqrt() * s + 0.5 * beta * s.square()


def _check(beta: Tensor, mu: Tensor, top: Tensor, weight: Tensor) -> None:
    faults = []
    wrong = ~((mu > 0.0) & (mu <= beta))
    if bool(wrong.any()):
        low, high = _first(wrong, mu, beta)
        faults.append(
            f"0 < strong_convexity <= smoothness is needed, got {low:g} and {high:g}; "
            "add a ridge term (weight_decay) to make a convex loss strongly convex"
        )
    if bool((~(top > 0.0)).any()):
        faults.append(f"loss_bound must be > 0, got {top.min():g}; it is the largest loss")
    wrong = ~((weight > 0.0) & (weight <= 1.0))
    if bool(wrong.any()):
        faults.append(
            f"weight must be > 0 and <= 1, got {_first(wrong, weight)[0]:g}; it is p_i, with sum 1"
        )
    if faults:
        raise ConfigError("; ".join(faults) + ".")


def _enough(num_samples: Tensor, least: Tensor, words: str) -> None:
    wrong = num_samples < least * (1.0 - 1e-12)
    if bool(wrong.any()):
        got, wanted = _first(wrong, num_samples, least)
        raise ConfigError(
            f"This bound needs n_i >= {words} = {wanted:g} samples, got {got:g}; "
            "take more samples, or raise strong_convexity by a ridge term."
        )


def _first(wrong: Tensor, *values: Tensor) -> list[float]:
    """Return the values at the first place that is wrong."""
    return [float(value.expand_as(wrong)[wrong][0]) for value in values]


# ---- approximations for convex losses ------------------------------------------------------------


def local_shift(
    hessian: Tensor, old: Tensor, new: Tensor, num_samples: int, prox_strength: float = 0.0
) -> Tensor:
    """Return ŵ_i(S′) − ŵ_i(S) ≈ (H_i + λI)^{-1} (∇ℓ(z_ij) − ∇ℓ(z′))/n_i.

    At λ = 0 it is the shift of LocalTrain, at λ > 0 that of FedProx with w_g fixed; in
    ``fedprox_shift`` w_g moves, too. Its norm over the last axis is s.
    """
    pulled = hessian + prox_strength * _eye(hessian)
    return _solve(pulled, (old - new) / num_samples)


def fedavg_shift(
    hessians: Tensor, weights: Tensor, client: int, old: Tensor, new: Tensor, num_samples: int
) -> Tensor:
    """Return the shift p_i H̄^{-1} (∇ℓ(z_ij) − ∇ℓ(z′))/n_i of the minimiser of Σ p_k L_k.

    H̄ = Σ p_k H_k; Hessians and gradients are those at the common model, and ``client`` is i.
    """
    mean = torch.einsum("k,kab->ab", weights, hessians)
    return _solve(mean, weights[client] * (old - new) / num_samples)


def fedprox_shift(
    hessians: Tensor,
    weights: Tensor,
    prox_strength: float | Tensor,
    client: int,
    old: Tensor,
    new: Tensor,
    num_samples: int,
) -> Tensor:
    """Return the shift of w_i in min Σ p_k [L_k(w_k) + (λ_k/2)‖w_k − w_g‖²], where w_g moves too.

    With M_k = (H_k + λ_k I)^{-1}, G = Σ p_k λ_k M_k H_k and δ = (∇ℓ(z_ij) − ∇ℓ(z′))/n_i, the
    stationarity of all w_k and of w_g gives (ours)

        w_g moves by p_i λ_i G^{-1} M_i δ,  and w_i by M_i (δ + λ_i · that).

    For H_k = I it is δ (1 + λ p_i)/(1 + λ): LocalTrain's δ at λ = 0, FedAvg's p_i δ at λ = ∞.
    λ >= 0 is one number or (clients,), and ``client`` is i.
    """
    lam = torch.as_tensor(prox_strength, dtype=hessians.dtype).expand(len(hessians))
    if bool((lam < 0).any()):
        raise ConfigError(f"prox_strength must be >= 0, got {lam.tolist()}; 0 is LocalTrain.")
    if not bool((lam > 0).any()):
        return local_shift(hessians[client], old, new, num_samples)
    pulled = hessians + lam[:, None, None] * _eye(hessians)
    # G up to a factor that cancels, which avoids overflow for large λ.
    share = weights * lam / lam.max()
    centre = torch.einsum("k,kab->ab", share, torch.linalg.solve(pulled, hessians))
    alone = _solve(pulled[client], (old - new) / num_samples)
    moved = share[client] * _solve(centre, alone)
    return alone + lam[client] * _solve(pulled[client], moved)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve for vectors on the last axis of ``right``, over any leading axes."""
    flat = torch.linalg.solve(matrix, right.reshape(-1, right.shape[-1]).T)
    return flat.T.reshape(right.shape)
