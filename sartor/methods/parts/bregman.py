"""Exponential families as geometries: a log-partition g, its conjugate g*, and the distance of g*.

Shi et al., "PRIOR: Personalized Prior for Reactivating the Information Overlooked in Federated
Learning", NeurIPS 2023, section 3 and Table 7. A prior of mean μ is the penalty
D_{g*}(θ, μ) = g*(θ) − g*(μ) − ⟨∇g*(μ), θ − μ⟩; ∇g maps natural parameters to means, ∇g* back.

| family | g(s) | g*(x) | domain of g* | ∇g* | ∇²g* |
|---|---|---|---|---|---|
| gaussian | ½ sᵀΣs | ½ xᵀΣ⁻¹x | all reals | Σ⁻¹x | Σ⁻¹ |
| bernoulli | ln(1 + eˢ) | x ln x + (1−x) ln(1−x) | (0, 1) | ln(x/(1−x)) | 1/(x(1−x)) |
| poisson | eˢ | x ln x − x | (0, ∞) | ln x | 1/x |
| exponential | −ln(−s), s < 0 | −ln x − 1 | (0, ∞) | −1/x | 1/x² |

Differs from the printed table: the Gaussian g carries Σ and its gradients too (the print is right
for Σ = 1 only); every divergence has a mean as its second argument (the print mixes means and
natural parameters); and A.7's g = ⟨·, Σ⁻¹·⟩ gets its ½.

Weights of a network are any reals, so the last three families see a weight w through a stated map
of width c: x = ½ + w/(2c) (bernoulli), x = 1 + w/c (the other two). At w = 0 the curvature in w is
1/c² for all of them, and for c → ∞ with λ ∝ c² they tend to the Gaussian. The functions below are
those of the composed pair, in the coordinates of w: g*_w(w) = g*(x(w)), and so on. Values are
clipped to stay inside the domain by ``MARGIN`` (in x).

``Gaussian`` and ``Separable`` have the same functions of trees: ``potential`` g, ``conjugate`` g*,
``mean`` ∇g, ``natural`` ∇g*, ``curve`` ∇²g*(x)v, ``divergence`` D_{g*}, and ``project``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.tree import Tree

MARGIN = 1e-3
"""How far values stay inside an open domain, in the coordinates of the means."""


# ---- the Gaussian --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian prior N(μ, Σ): spherical, or with a variance per entry, or a full matrix.

    Attributes:
        variances: per leaf a number, or a tensor of the leaf's shape; 1 for all if None.
        covariance: (d, d) over the flattened leaves in sorted order; replaces ``variances``.
        precision: its inverse.
    """

    variances: Tree | None = None
    covariance: Tensor | None = None
    precision: Tensor | None = None
    _placed: dict[Any, Gaussian] = field(default_factory=dict, repr=False, compare=False)

    @property
    def spherical(self) -> bool:
        """Whether Σ is the identity, and the divergence half the squared distance."""
        return self.variances is None and self.covariance is None

    def like(self, leaf: Tensor) -> Gaussian:
        """Return the same prior with its constants on the device and in the precision of a leaf."""
        if self.spherical:
            return self
        place = (leaf.device, leaf.dtype)
        if place not in self._placed:  # kept, as nothing may be copied while a step is captured
            given = (self.variances, self.covariance, self.precision)
            moved = [None if v is None else tree.map(lambda t: t.to(*place), v) for v in given]
            self._placed[place] = Gaussian(moved[0], moved[1], moved[2])
        return self._placed[place]

    def potential(self, s: Tree) -> Tensor:
        """Return ½ sᵀΣs."""
        return 0.5 * tree.dot(s, self.mean(s))

    def conjugate(self, x: Tree) -> Tensor:
        """Return ½ xᵀΣ⁻¹x."""
        return 0.5 * tree.dot(x, self.natural(x))

    def mean(self, s: Tree) -> Tree:
        """Return Σs."""
        if self.covariance is not None:
            return _times(self.covariance, s)
        return s if self.variances is None else tree.map(torch.mul, s, self.variances)

    def natural(self, x: Tree) -> Tree:
        """Return Σ⁻¹x."""
        if self.precision is not None:
            return _times(self.precision, x)
        return x if self.variances is None else tree.map(torch.div, x, self.variances)

    def curve(self, x: Tree, v: Tree) -> Tree:
        """Return Σ⁻¹v."""
        return self.natural(v)

    def divergence(self, x: Tree, y: Tree) -> Tensor:
        """Return ½ ‖x − y‖² in the norm of Σ⁻¹."""
        return self.conjugate(tree.sub(x, y))

    def project(self, x: Tree) -> Tree:
        """Return x: all reals are means."""
        return x


def gaussian(covariance: Any, params: Tree) -> Gaussian:
    """Build a Gaussian prior for parameters of the given names and shapes.

    The covariance is None for the spherical one; a mapping from every leaf's name to a variance or
    a tensor of variances; or a (d, d) matrix over the flattened leaves in sorted order.
    """
    if covariance is None:
        return Gaussian()
    if isinstance(covariance, Mapping):
        if set(covariance) != set(params):
            raise ConfigError(
                f"covariance must name every parameter, {sorted(params)}, got "
                f"{sorted(covariance)}; give 1.0 where nothing is known."
            )
        diagonal = {
            k: _numbers(v, f"covariance[{k!r}] must be a number or numbers")
            for k, v in covariance.items()
        }
        for name, value in diagonal.items():
            if value.dim() and value.shape != params[name].shape:
                raise ConfigError(
                    f"covariance[{name!r}] must be one variance or have the shape "
                    f"{tuple(params[name].shape)}, got {tuple(value.shape)}; give one "
                    "number, or one per weight."
                )
            if not bool(((value > 0) & value.isfinite()).all()):
                raise ConfigError(
                    f"covariance[{name!r}] must be positive and finite: its entries are variances; "
                    "give 1.0 where nothing is known."
                )
        return Gaussian(variances=diagonal)
    wanted = "covariance must be a mapping from parameters to variances, or a matrix"
    matrix = _numbers(covariance, wanted)
    dim = sum(leaf.numel() for leaf in tree.leaves(params))
    if matrix.shape != (dim, dim):
        raise ConfigError(
            f"A covariance matrix must be {dim} x {dim}, one row per parameter, got the shape "
            f"{tuple(matrix.shape)}; give a mapping from names to variances for a diagonal one."
        )
    if not torch.allclose(matrix, matrix.mT) or int(torch.linalg.cholesky_ex(matrix).info):
        raise ConfigError(
            "A covariance matrix must be symmetric and positive definite; add a multiple of the "
            "identity."
        )
    return Gaussian(covariance=matrix, precision=torch.linalg.inv(matrix))


def _numbers(value: Any, wanted: str) -> Tensor:
    """Return a value as float64, or say what was wanted."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{wanted}, got {value!r}; 1.0 stands for the identity.") from None


def _times(matrix: Tensor, x: Tree) -> Tree:
    """Multiply the flattened tree by a matrix."""
    return tree.shaped(matrix @ tree.flat(x), x)


# ---- families with a bounded domain, coordinate by coordinate ------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A family of one real variable, and the point and unit of its map from weights."""

    g: Callable[[Tensor], Tensor]
    g_star: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    natural: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    distance: Callable[[Tensor, Tensor], Tensor]
    high: float
    origin: float
    unit: float
    negative: bool = False


KINDS = {
    "bernoulli": _Kind(
        g=lambda s: torch.logaddexp(s, torch.zeros_like(s)),
        g_star=lambda x: x * x.log() + (1 - x) * (1 - x).log(),
        mean=torch.sigmoid,
        natural=lambda x: x.log() - (1 - x).log(),
        curvature=lambda x: 1 / (x * (1 - x)),
        distance=lambda x, y: x * (x / y).log() + (1 - x) * ((1 - x) / (1 - y)).log(),
        high=1.0,
        origin=0.5,
        unit=2.0,
    ),
    "poisson": _Kind(
        g=torch.exp,
        g_star=lambda x: x * x.log() - x,
        mean=torch.exp,
        natural=torch.log,
        curvature=lambda x: 1 / x,
        distance=lambda x, y: x * (x / y).log() - x + y,
        high=math.inf,
        origin=1.0,
        unit=1.0,
    ),
    "exponential": _Kind(
        g=lambda s: -(-s).log(),
        g_star=lambda x: -x.log() - 1,
        mean=lambda s: -1 / s,
        natural=lambda x: -1 / x,
        curvature=lambda x: x.pow(-2),
        distance=lambda x, y: x / y - (x / y).log() - 1,
        high=math.inf,
        origin=1.0,
        unit=1.0,
        negative=True,
    ),
}
"""The families whose means do not fill the reals."""


@dataclass(frozen=True)
class Separable:
    """A family of ``KINDS`` on every weight, seen through x = origin + w/scale.

    Attributes:
        kind: its functions.
        width: c, 0-d; None if the weights are the means themselves (x = w).
    """

    kind: _Kind
    width: Tensor | None = None

    spherical = False

    @property
    def _origin(self) -> float:
        return 0.0 if self.width is None else self.kind.origin

    @property
    def _scale(self) -> Any:
        return 1.0 if self.width is None else self.kind.unit * self.width

    def _x(self, w: Tensor) -> Tensor:
        return self._origin + w / self._scale

    def potential(self, s: Tree) -> Tensor:
        """Return Σ g(scale · s) − scale · origin · s."""
        scale = self._scale
        return _total(lambda one: self.kind.g(scale * one) - scale * self._origin * one, s)

    def conjugate(self, x: Tree) -> Tensor:
        """Return Σ g*."""
        return _total(lambda w: self.kind.g_star(self._x(w)), x)

    def mean(self, s: Tree) -> Tree:
        """Return ∇g(s)."""
        scale = self._scale
        return tree.map(lambda one: scale * (self.kind.mean(scale * one) - self._origin), s)

    def natural(self, x: Tree) -> Tree:
        """Return ∇g*(x)."""
        return tree.map(lambda w: self.kind.natural(self._x(w)) / self._scale, x)

    def curve(self, x: Tree, v: Tree) -> Tree:
        """Return ∇²g*(x) v."""
        square = self._scale**2
        return tree.map(lambda w, u: self.kind.curvature(self._x(w)) / square * u, x, v)

    def divergence(self, x: Tree, y: Tree) -> Tensor:
        """Return Σ D_{g*}."""
        return _total(lambda a, b: self.kind.distance(self._x(a), self._x(b)), x, y)

    def project(self, x: Tree) -> Tree:
        """Clip into the domain, ``MARGIN`` away from its ends."""
        low = self._scale * (MARGIN - self._origin)
        high = self._scale * (self.kind.high - MARGIN - self._origin)
        return tree.map(lambda w: w.clamp(min=low).clamp(max=high), x)

    def mirror_step(
        self, x: Tree, centre: Tree, slope: Tree, rate: Tensor, strength: Tensor
    ) -> Tree:
        """Step down f + λ D_{g*}(·, μ) inside the domain.

        Solve ∇g*(x⁺) = [∇g*(x) + αλ∇g*(μ) − α∇f(x)]/(1 + αλ). In the exponential family the right
        side must be negative: there α is halved, entry by entry, until the numerator is at most
        half of ∇g*(x), so that a step also cannot run off to infinity. ``centre`` is μ, ``slope``
        ∇f(x), ``rate`` α and ``strength`` λ.
        """

        def one(now: Tensor, prior: Tensor, f: Tensor) -> Tensor:
            push, alpha = strength * prior - f, rate
            if self.kind.negative:
                over = (2.0 * rate * push / -now).clamp(min=1.0)
                alpha = rate * torch.exp2(-torch.ceil(torch.log2(over)))
            return (now + alpha * push) / (1.0 + alpha * strength)

        return self.project(self.mean(tree.map(one, self.natural(x), self.natural(centre), slope)))


def _total(fn: Callable[..., Tensor], *trees: Tree) -> Tensor:
    """Sum a function of the entries over all leaves."""
    return torch.stack([part.sum() for part in tree.leaves(tree.map(fn, *trees))]).sum()


def check_prior(family: str, covariance: Any, mapping: str, params: Tree) -> Gaussian:
    """Refuse options of a prior that contradict each other or the initial parameters.

    Return the Gaussian of the given covariance (the spherical one for the other families).
    """
    if family == "gaussian":
        if mapping == "affine":
            raise ConfigError(
                "mapping='affine' has no use with family='gaussian', whose means are any reals; "
                "leave mapping out."
            )
        return gaussian(covariance, params)
    if covariance is not None:
        raise ConfigError(
            f"covariance belongs to family='gaussian', got family={family!r}; leave it out."
        )
    if mapping == "none":
        inside = Separable(KINDS[family]).project(params)
        bad = [name for name, leaf in params.items() if not torch.equal(leaf, inside[name])]
        if bad:
            raise ConfigError(
                f"mapping='none' takes the weights as means of family={family!r}, which lie in "
                f"(0, {KINDS[family].high:g}), {MARGIN:g} away from the ends, but the initial "
                f"parameters {bad} do not; use mapping='affine', or a network that starts inside."
            )
    return Gaussian()
