"""From a federation to the samples of a convex model: scaled, perhaps reduced, with an intercept.

The scaling is federated: clients send the sums and sums of squares of their features, and for
principal components the products, d² numbers, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sartor.core.errors import ConfigError, FederationError
from sartor.data.federation import Federation
from sartor.data.synthetic import Logistic
from sartor.theory.linear_models import Clients, Family, flat_weights

LARGEST = 1200
"""Parameters of a convex model at most: its Hessians are dense."""


@dataclass(frozen=True)
class View:
    """A federation as a convex model sees it.

    Attributes:
        federation: the same clients and samples, with the features that the model takes.
        family: the family of models.
        kept: what was done to the features, in words.
        ridge: ν.
    """

    federation: Federation
    family: Family
    kept: str
    ridge: float

    @property
    def num_classes(self) -> int:
        """Classes of the model; 2 for regression, where it has no meaning."""
        return max(self.federation.num_classes, 2)

    @property
    def intercept(self) -> bool:
        """Whether the last feature is the constant one."""
        last = self.federation.x[..., -1]
        return self.federation.x.dim() == 2 and bool((last == 1.0).all())

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        outputs = self.num_classes - 1 if self.family == "softmax" else 1
        return self.federation.input_shape[0] * outputs

    def clients(self, split: str = "train") -> Clients:
        """Return a split of all clients, padded and stacked."""
        fed = self.federation
        rows = fed.split(split)
        longest = int(rows.sizes.max())
        index = torch.zeros(fed.num_clients, longest, dtype=torch.int64)
        mask = torch.arange(longest) < rows.sizes[:, None]
        index[mask] = rows.rows
        x = fed.x[index].double() * mask[..., None]
        y = fed.y[index] * mask
        target = y if self.family == "softmax" else y.double()
        return Clients(x, target, mask, self.family, self.num_classes, self.ridge)

    def network(self) -> nn.Module:
        """Return the model as a network that starts at zero."""
        d = self.federation.input_shape[0]
        if self.family == "logistic":
            return Logistic(d)
        return _Linear(d, self.num_classes if self.family == "softmax" else 1)

    def tree(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters of ``network`` for one flat model."""
        if self.family == "logistic":
            return {"w": w}
        one = Clients(torch.empty(0), w, w, self.family, self.num_classes)
        return {"weight": flat_weights(one, w).T}


class _Linear(nn.Module):
    """Scores x Wᵀ without intercept (it is a feature), starting at zero."""

    head: str | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``(batch, outputs)``."""
        return x @ self.weight.T


def view(federation: Federation, features: str = "scaled", ridge: float = 0.0) -> View:
    """Prepare a federation for a convex model.

    Args:
        federation: any federation with real features.
        features: "raw" (as they are, no intercept), "scaled" (mean 0, deviation 1, intercept added)
            or "pca:K" (the first K principal components of scaled features, intercept added).
        ridge: ν ≥ 0 of (ν/2)‖w‖².
    """
    if not ridge >= 0:
        raise ConfigError(f"ridge must be >= 0, got {ridge}; leave it out for none.")
    if federation.task in ("multilabel", "next-token"):
        raise FederationError(
            f"There is no advice for the task {federation.task!r}: it covers classes and real "
            "targets. Compare methods with sartor.compare instead."
        )
    if not federation.x.is_floating_point():
        raise FederationError(
            "The theory needs real features, but these are tokens; give a network with "
            "model=..., so that λ is chosen by training instead."
        )
    classes = federation.num_classes
    family: Family = "linear" if classes == 0 else "logistic" if classes == 2 else "softmax"
    if classes == 1:
        raise FederationError(
            "All samples have the same class, so there is nothing to learn; check the labels."
        )
    name, _, number = features.partition(":")
    x = federation.x.flatten(1).double()
    train = x[federation.train.rows]
    words = f"{x.shape[1]} features as they are"
    if name in ("scaled", "pca") and (name == "scaled") == (not number):
        spread = train.std(0)
        varies = spread > 1e-8 * max(float(spread.max()), 1e-300)
        if not bool(varies.any()):
            raise FederationError(
                "No feature varies over the training samples, so no model can learn from them; "
                "check how x was read."
            )
        x = (x[:, varies] - train[:, varies].mean(0)) / spread[varies]
        words = f"{int(varies.sum())} scaled features"
        if not bool(varies.all()):
            words += f" ({int((~varies).sum())} constant ones left out)"
        if name == "pca":
            x, words = _principal(x, federation, number, words)
        x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1)
        words += " and an intercept"
    elif features != "raw":
        raise ConfigError(f"features must be 'raw', 'scaled' or 'pca:K', got {features!r}.")
    size = x.shape[1] * (classes - 1 if family == "softmax" else 1)
    if size > LARGEST:
        fewer = max(LARGEST // (size // x.shape[1]) // 10 * 10, 1)
        raise ConfigError(
            f"A linear model of these features has {size} parameters; the theory is computed for "
            f"at most {LARGEST}. Reduce them with features='pca:{min(fewer, 50)}', or choose λ by "
            "training: a network as model=..., and basis='trial'."
        )
    shown = replace(federation, x=x, info={**federation.info, "features": words})
    return View(shown, family, words, ridge)


def _principal(x: Tensor, federation: Federation, number: str, words: str) -> tuple[Tensor, str]:
    if not number.isdigit() or not 1 <= int(number) <= x.shape[1]:
        raise ConfigError(
            f"features='pca:K' needs a whole K from 1 to {x.shape[1]}, got {number!r}."
        )
    keep = int(number)
    train = x[federation.train.rows]
    values, vectors = torch.linalg.eigh(train.T @ train / len(train))
    share = float(values[-keep:].sum() / values.sum())
    scale = values[-keep:].clamp(min=1e-12).sqrt()
    found = (x @ vectors[:, -keep:] / scale).flip(1)
    return found, f"{keep} principal components ({100 * share:.0f}% of the variance) of {words}"
