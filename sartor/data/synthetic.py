"""Problems with known answers: quadratics, and logistic regression with given heterogeneity.

Features are float64, so that answers can be compared to many digits. Client k's data depend on
the seed and on k alone: more clients add to a federation and change nothing in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.federation import Federation
from sartor.data.split import Ragged, generator, numbered

Floats = npt.NDArray[np.float64]
MODES = ("literal", "theory")


# ---------------------------------------------------------------------- quadratics


@dataclass(frozen=True)
class Quadratics:
    """The answers of f_i(w) = Σ_j a_ij/2 (w_j − c_ij)², with client weights p_i.

    Attributes:
        curvatures: a, ``(clients, dim)`` float64.
        centres: c, ``(clients, dim)`` float64; the minimiser of each client.
        weights: p, ``(clients,)``, the clients' shares of the training samples.
    """

    curvatures: Tensor
    centres: Tensor
    weights: Tensor

    def global_minimiser(self, weights: Tensor | None = None) -> Tensor:
        """Return the minimiser of Σ p_i f_i, ``(dim,)``."""
        pull = self._weights(weights)[:, None] * self.curvatures
        return (pull * self.centres).sum(0) / pull.sum(0)

    def fedprox(
        self, prox_strength: float | Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the minimisers w_g ``(dim,)`` and w_i ``(clients, dim)`` of FedProx.

        The objective is Σ p_i [f_i(w_i) + λ_i/2 ‖w_i − w_g‖²]. At λ = 0 it leaves w_g free; the
        limit from above is returned, the weighted mean of the centres.

        Args:
            prox_strength: λ, one number, or one for each client.
            weights: p; by default the shares of the training samples.
        """
        lam = torch.as_tensor(prox_strength, dtype=torch.float64).reshape(-1, 1)
        if bool((lam < 0).any()):
            raise ConfigError(f"prox_strength must be >= 0, got {lam.flatten().tolist()}.")
        largest = float(lam.max())
        relative = lam / largest if largest > 0 else torch.ones_like(lam)
        share = self._weights(weights)[:, None] * relative * self.curvatures
        share = share / (self.curvatures + lam)
        centre = (share * self.centres).sum(0) / share.sum(0)
        own = (self.curvatures * self.centres + lam * centre) / (self.curvatures + lam)
        return centre, own

    def _weights(self, weights: Tensor | None) -> Tensor:
        return self.weights if weights is None else torch.as_tensor(weights, dtype=torch.float64)


class Quadratic(nn.Module):
    """A model whose output for a sample (a, c) is its loss, Σ_j a_j/2 (w_j − c_j)².

    Train it with the loss that takes the output as it is. The parameter ``w`` starts at zero.
    """

    head: str | None = None

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return losses ``(batch,)`` of samples ``(batch, 2 dim)``."""
        curvature, centre = x.chunk(2, dim=-1)
        return 0.5 * (curvature * (self.w - centre).square()).sum(-1)


def quadratics(
    curvatures: Any, centres: Any, *, samples: int | Sequence[int] = 1
) -> tuple[Federation, Quadratics]:
    """Make clients with f_i(w) = Σ_j a_ij/2 (w_j − c_ij)², to be trained with ``Quadratic``.

    Args:
        curvatures: a > 0, ``(clients,)`` or ``(clients, dim)``.
        centres: c, of the same shape.
        samples: training samples of each client, all equal; they set the clients' weights.
            Every client also has one test sample.

    Returns:
        The federation, whose features are (a, c) side by side, and the known answers.

    Example:
        >>> _, truth = quadratics([1, 2, 4], [0, 3, 6])
        >>> round(truth.global_minimiser().item(), 6)
        4.285714
    """
    a, c = (np.asarray(part, dtype=np.float64) for part in (curvatures, centres))
    if a.shape != c.shape or a.ndim not in (1, 2) or a.size == 0:
        raise FederationError(
            f"curvatures and centres must both be (clients,) or (clients, dim), got {a.shape} "
            f"and {c.shape}."
        )
    if not (a > 0).all():
        raise FederationError("curvatures must be positive, or there is no minimiser.")
    a, c = a.reshape(len(a), -1), c.reshape(len(c), -1)
    sizes = np.broadcast_to(np.asarray(samples, dtype=np.int64), len(a))
    if (sizes < 1).any():
        raise FederationError(f"samples must be >= 1 for every client, got {sizes.tolist()}.")
    rows = np.concatenate([a, c], axis=1)
    x = torch.from_numpy(np.concatenate([np.repeat(rows, sizes, axis=0), rows]))
    train = Ragged.from_sizes(np.arange(sizes.sum(), dtype=np.int64), sizes)
    test = Ragged.from_sizes(np.arange(sizes.sum(), len(x), dtype=np.int64), np.ones_like(sizes))
    federation = Federation(
        x,
        torch.zeros(len(x), dtype=torch.int64),
        train,
        Ragged.empty(len(a)),
        test,
        numbered(len(a)),
        1,
        {"source": "quadratics", "dim": a.shape[1]},
    )
    weights = torch.from_numpy(sizes / sizes.sum())
    return federation, Quadratics(torch.from_numpy(a), torch.from_numpy(c), weights)


# ---------------------------------------------------------------------- logistic regression


@dataclass(frozen=True)
class Truth:
    """The true models of a synthetic problem.

    Attributes:
        w: ``(clients, dim)`` float64, the model that drew each client's labels.
    """

    w: Tensor

    @property
    def centre(self) -> Tensor:
        """The mean of the true models, ``(dim,)``."""
        return self.w.mean(0)

    @property
    def heterogeneity(self) -> float:
        """The root mean square distance of the true models from their mean."""
        return float((self.w - self.centre).square().sum(1).mean().sqrt())


class Logistic(nn.Module):
    """Binary logistic regression with one weight vector ``w`` and no bias, starting at zero.

    The scores are (0, wᵀx): their cross-entropy is the logistic loss log(1 + exp(wᵀx)) − y wᵀx.
    """

    head: str | None = None

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``(batch, 2)``."""
        score = (x * self.w).sum(-1)
        return torch.stack([torch.zeros_like(score), score], dim=-1)


def logistic_loss(scores: Tensor, y: Tensor) -> Tensor:
    """Return −log σ(±(s_1 − s_0)) of each sample, + where y = 1.

    The cross-entropy of two classes with half the operations, for many small lanes: ``Task(...,
    criterion=logistic_loss)``.
    """
    margin = scores[..., 1] - scores[..., 0]
    return -nn.functional.logsigmoid((2 * y - 1) * margin)


def logistic(
    mode: str = "theory",
    *,
    spread: float = 0.2,
    clients: int = 10,
    samples: int = 200,
    dim: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
) -> tuple[Federation, Truth]:
    """Make the synthetic logistic regression of the analysis of FedProx (Yu et al.).

    Features have variances Σ_jj = j^-1.2.

    - ``theory``: x ~ N(0, Σ), w_k = w_0 + spread · N(0, I) with w_0 ~ N(0, 0.25 I), and
      P(y = 1 | x) = σ(w_kᵀx); dim 10 by default. The truth is identifiable.
    - ``literal``, as printed: x ~ N(v_k, Σ) with v_k ~ N(0, I), w_k ~ N(0, spread · I), so
      ``spread`` is the paper's R, a variance, and y = 1 where wᵀx > 0; dim 60 by default. Labels
      have no noise, so every client's data are separable and have no minimiser without
      regularisation or early stopping.

    Args:
        mode: ``theory`` or ``literal``.
        spread: s of mode theory (a standard deviation), R of mode literal (a variance).
        clients: the number of clients.
        samples: training samples of each client.
        dim: the number of features.
        test_samples: test samples of each client; by default as many as for training.
        seed: seed of the draw.

    Returns:
        The federation and the true models; train it with ``Logistic(dim)``.
    """
    if mode not in MODES:
        raise ConfigError(f"Unknown mode {mode!r}{did_you_mean(mode, MODES)}")
    size = dim if dim is not None else {"theory": 10, "literal": 60}[mode]
    held = samples if test_samples is None else test_samples
    _check_sizes(clients=clients, samples=samples, test_samples=held, dim=size, spread=spread)
    scale = np.arange(1, size + 1) ** -0.6  # standard deviations: Σ_jj = j^-1.2
    start = 0.5 * _draws(seed, "centre").standard_normal(size)
    models, features, labels = [], [], []
    for client in range(clients):
        rng = _draws(seed, mode, client)
        noise = rng.standard_normal(size)
        w = start + spread * noise if mode == "theory" else np.sqrt(spread) * noise
        shift = np.zeros(size) if mode == "theory" else rng.standard_normal(size)
        x = shift + scale * rng.standard_normal((samples + held, size))
        models.append(w)
        features.append(x)
        # A standard logistic variable lies below a score with probability σ(score).
        labels.append((rng.logistic(size=len(x)) if mode == "theory" else 0.0) < x @ w)
    info = {"source": "logistic", "mode": mode, "spread": spread, "seed": seed, "dim": size}
    flat = torch.from_numpy(np.concatenate(features))
    return _binary(flat, labels, models, samples, info)


def logistic_radius(radius: float = 2.0, **draw: int) -> tuple[Federation, Truth]:
    """Make ``logistic_radii`` for one radius R; the other arguments are the same."""
    (made,) = logistic_radii([radius], **draw)
    return made


def logistic_radii(
    radii: Sequence[float],
    *,
    clients: int = 5,
    samples: int = 100,
    dim: int = 100,
    test_samples: int = 1000,
    seed: int = 0,
) -> list[tuple[Federation, Truth]]:
    """Make the synthetic logistic regression of the analysis of FedAvg-FT (Appendix D there).

    w* ~ N(0, I) and w_i = w* + R · v_i, v_i a random unit vector with ⟨v_i, w*⟩ ≤ 0 (drawn on the
    sphere, its sign turned where needed); x ~ N(0, I), P(y = 1 | x) = σ(w_iᵀx). The draws do not
    depend on R, so the federations hold the same features, once, and differ in their labels.

    Returns, for each of the ``radii`` R, the federation and the true models; train it with
    ``Logistic(dim)``. The other arguments are those of ``logistic``.
    """
    for radius in radii:
        sizes = {"clients": clients, "samples": samples, "test_samples": test_samples, "dim": dim}
        _check_sizes(**sizes, radius=radius)
    common = _draws(seed, "centre").standard_normal(dim)
    directions, features, noise = [], [], []
    for client in range(clients):
        rng = _draws(seed, "radius", client)
        away = rng.standard_normal(dim)
        away /= np.linalg.norm(away)
        directions.append(away if away @ common <= 0 else -away)
        features.append(rng.standard_normal((samples + test_samples, dim)))
        noise.append(rng.logistic(size=samples + test_samples))
    flat = torch.from_numpy(np.concatenate(features))
    made = []
    for radius in radii:
        models = [common + radius * away for away in directions]
        labels = [e < x @ w for e, x, w in zip(noise, features, models, strict=True)]
        info = {"source": "logistic_radius", "radius": radius, "seed": seed, "dim": dim}
        made.append(_binary(flat, labels, models, samples, info))
    return made


_PURPOSES = ("centre", "literal", "theory", "radius")


def _draws(seed: int, purpose: str, client: int = 0) -> np.random.Generator:
    return generator(seed, _PURPOSES.index(purpose), client)


def _check_sizes(**given: float) -> None:
    least = {"clients": 1, "samples": 1, "dim": 1}
    faults = [
        f"{name} must be >= {least.get(name, 0)}, got {value}"
        for name, value in given.items()
        if value < least.get(name, 0)
    ]
    if faults:
        raise ConfigError("; ".join(faults) + ".")


def _binary(
    features: Tensor,
    labels: list[npt.NDArray[np.bool_]],
    models: list[Floats],
    samples: int,
    info: dict[str, Any],
) -> tuple[Federation, Truth]:
    clients, each = len(labels), len(labels[0])
    rows = np.arange(clients * each, dtype=np.int64).reshape(clients, each)
    federation = Federation(
        features,
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        Ragged.from_sizes(rows[:, :samples].reshape(-1), np.full(clients, samples)),
        Ragged.empty(clients),
        Ragged.from_sizes(rows[:, samples:].reshape(-1), np.full(clients, each - samples)),
        numbered(clients),
        2,
        info,
    )
    return federation, Truth(torch.from_numpy(np.stack(models)))
