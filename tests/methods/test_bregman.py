"""The geometries of exponential families: each claim against autograd or the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.methods.parts.bregman import KINDS, MARGIN, Gaussian, Separable, gaussian

SHAPES = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}


def _t(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _matrix() -> torch.Tensor:
    root = torch.randn(7, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return root @ root.mT + 0.5 * torch.eye(7, dtype=torch.float64)


FAMILIES: dict[str, Any] = {
    "spherical": Gaussian(),
    "per tensor": gaussian({"a": 0.5, "b": 3.0}, SHAPES),
    "diagonal": gaussian(
        {"a": [0.5, 1.0, 2.0], "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, SHAPES
    ),
    "full": gaussian(_matrix(), SHAPES),
    **{name: Separable(kind) for name, kind in KINDS.items()},
    **{f"{name} of width 2": Separable(kind, _t(2.0)) for name, kind in KINDS.items()},
}


def _points(name: str, seed: int) -> tree.Tree:
    """Draw a point well inside the domain."""
    family = FAMILIES[name]
    draw = torch.Generator().manual_seed(seed)
    x = tree.map(lambda leaf: torch.rand(leaf.shape, generator=draw).double() * 0.9 + 0.05, SHAPES)
    if isinstance(family, Separable) and family.width is not None:
        low = -1.0 if family.kind.high > 1 else -2.0
        return tree.map(lambda leaf: low + (1.5 - low) * leaf, x)
    return x


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_are_those_of_autograd(name: str) -> None:
    """∇g, ∇g* and ∇²g* v are the derivatives of g and g*."""
    family, x, v = FAMILIES[name], _points(name, 0), _points(name, 1)
    natural = torch.func.grad(family.conjugate)
    s = family.natural(x)
    for key in x:
        torch.testing.assert_close(s[key], natural(x)[key], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            family.mean(s)[key], torch.func.grad(family.potential)(s)[key], rtol=1e-11, atol=1e-11
        )
    step = 1e-6
    ahead = natural(tree.map(lambda a, b: a + step * b, x, v))
    behind = natural(tree.map(lambda a, b: a - step * b, x, v))
    for key in x:
        slope = (ahead[key] - behind[key]) / (2 * step)
        torch.testing.assert_close(family.curve(x, v)[key], slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_means_and_natural_parameters_are_inverse_maps(name: str) -> None:
    """∇g(∇g*(x)) = x."""
    family, x = FAMILIES[name], _points(name, 2)
    for key, leaf in family.mean(family.natural(x)).items():
        torch.testing.assert_close(leaf, x[key], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_divergence_is_that_of_its_definition_and_of_fenchel(name: str) -> None:
    """D(x, y) = g*(x) − g*(y) − ⟨∇g*(y), x − y⟩ = g*(x) + g(s) − ⟨x, s⟩ at y = ∇g(s)."""
    family, x, y = FAMILIES[name], _points(name, 3), _points(name, 4)
    found, s = family.divergence(x, y), family.natural(y)
    gap = family.conjugate(x) - family.conjugate(y) - tree.dot(s, tree.sub(x, y))
    torch.testing.assert_close(found, gap, rtol=1e-11, atol=1e-11)
    fenchel = family.conjugate(x) + family.potential(s) - tree.dot(x, s)
    torch.testing.assert_close(found, fenchel, rtol=1e-10, atol=1e-10)
    assert float(found) > 1e-3
    assert float(family.divergence(x, x)) == pytest.approx(0.0, abs=1e-14)


def test_values_known_by_heart() -> None:
    """One number for every entry of the table."""
    x, y = {"w": _t(0.25)}, {"w": _t(0.5)}

    def values(family: Any) -> list[float]:
        s = family.natural(x)
        return [
            float(v)
            for v in (
                family.potential(s),
                family.conjugate(x),
                s["w"],
                family.curve(x, {"w": _t(2.0)})["w"],
                family.divergence(x, y),
            )
        ]

    assert values(gaussian({"w": 4.0}, x)) == pytest.approx(
        [1 / 128, 1 / 128, 1 / 16, 0.5, 1 / 128]
    )
    assert values(Separable(KINDS["bernoulli"])) == pytest.approx(
        [math.log(4 / 3), -0.5623351446, -math.log(3), 32 / 3, 0.1308120359]
    )
    assert values(Separable(KINDS["poisson"])) == pytest.approx(
        [0.25, -0.25 * math.log(4) - 0.25, -math.log(4), 8.0, 0.25 - 0.25 * math.log(2)]
    )
    assert values(Separable(KINDS["exponential"])) == pytest.approx(
        [-math.log(4), math.log(4) - 1, -4.0, 32.0, math.log(2) - 0.5]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_width_sets_the_curvature_at_zero(kind: str) -> None:
    """At w = 0 the curvature in w is 1/c² for every family, and wide ones tend to the Gaussian."""
    zero, one = {"w": _t(0.0)}, {"w": _t(1.0)}
    for c in (0.5, 3.0):
        found = Separable(KINDS[kind], _t(c)).curve(zero, one)["w"]
        assert float(found) == pytest.approx(1 / c**2)
    x, y, c = {"w": _t(0.7)}, {"w": _t(-0.4)}, 1e3
    found = c**2 * Separable(KINDS[kind], _t(c)).divergence(x, y)
    assert float(found) == pytest.approx(0.5 * 1.1**2, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [None, 0.5])
def test_clipping_ends_inside_by_the_margin_and_spares_the_rest(
    kind: str, width: float | None
) -> None:
    """Values outside end ``MARGIN`` inside the domain; values inside keep their bits."""
    family = Separable(KINDS[kind], None if width is None else _t(width))
    origin, scale = (0.0, 1.0) if width is None else (KINDS[kind].origin, KINDS[kind].unit * width)
    inside = scale * (torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64) - origin)
    outside = torch.tensor([-1e9, 1e9], dtype=torch.float64)
    found = family.project({"in": inside, "out": outside})
    assert torch.equal(found["in"], inside)
    ends = origin + found["out"] / scale
    assert float(ends[0]) == pytest.approx(MARGIN)
    if KINDS[kind].high == 1.0:
        assert float(ends[1]) == pytest.approx(1 - MARGIN)
    else:
        assert float(found["out"][1]) == 1e9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [None, 1.0])
def test_a_mirror_step_obeys_its_equation_and_stays_inside(kind: str, width: float | None) -> None:
    """(1 + αλ)∇g*(x⁺) = ∇g*(x) + αλ∇g*(μ) − α∇f, and no slope leads out of the domain."""
    family = Separable(KINDS[kind], None if width is None else _t(width))
    x, mu, alpha, lam = {"w": _t(0.4)}, {"w": _t(0.6)}, _t(0.01), _t(3.0)
    new = family.mirror_step(x, mu, {"w": _t(1.5)}, alpha, lam)
    wanted = (family.natural(x)["w"] + alpha * lam * family.natural(mu)["w"] - alpha * 1.5) / (
        1 + alpha * lam
    )
    assert float(family.natural(new)["w"]) == pytest.approx(float(wanted), rel=1e-12)
    for slope in (-1e6, -30.0, 30.0, 1e6):
        new = family.mirror_step(x, mu, {"w": _t(slope)}, _t(1e-4), lam)
        assert torch.equal(family.project(new)["w"], new["w"])
        assert torch.isfinite(new["w"])
        assert (float(new["w"]) - 0.4) * slope < 0


def test_the_exponential_family_halves_its_rate_until_the_step_is_legal() -> None:
    """The rate is the first of α, α/2, α/4, … whose numerator is at most half of ∇g*(x)."""
    family, mu, lam = Separable(KINDS["exponential"]), {"w": _t(1.0)}, _t(2.0)
    halvings = []
    for slope in (-0.5, -3.0, -11.0, -1000.0):
        x, alpha = {"w": _t(2.0)}, 0.5
        count = 0
        while -0.5 + alpha * (-2.0 - slope) > -0.25:
            alpha, count = alpha / 2, count + 1
        halvings.append(count)
        wanted = (-0.5 + alpha * (-2.0 - slope)) / (1 + alpha * 2.0)
        new = family.mirror_step(x, mu, {"w": _t(slope)}, _t(0.5), lam)
        assert float(new["w"]) == pytest.approx(-1 / wanted, rel=1e-12)
    assert halvings == [0, 1, 5, 11]


@pytest.mark.parametrize("kind", KINDS)
def test_mirror_steps_end_at_the_proximal_point(kind: str) -> None:
    """There ∇f(x) + λ(∇g*(x) − ∇g*(μ)) = 0, wherever they start."""
    family = Separable(KINDS[kind])
    for start in (0.05, 0.5, 0.95):
        x = {"w": _t(start)}
        for _ in range(400):
            slope = {"w": x["w"] - 0.8}
            x = family.mirror_step(x, {"w": _t(0.5)}, slope, _t(0.3), _t(1.0))
        rest = x["w"] - 0.8 + family.natural(x)["w"] - family.natural({"w": _t(0.5)})["w"]
        assert float(rest) == pytest.approx(0.0, abs=1e-9)


def test_the_matrix_follows_the_sorted_leaves() -> None:
    """Row k belongs to entry k of the leaves in sorted order, whatever the order of the dict."""
    x = {"b": torch.tensor([[3.0, 4.0], [5.0, 6.0]]).double(), "a": torch.arange(3.0).double()}
    found = gaussian(torch.diag(torch.arange(1.0, 8.0)), SHAPES).mean(x)
    assert found["a"].tolist() == [0.0, 2.0, 6.0]
    assert found["b"].tolist() == [[12.0, 20.0], [30.0, 42.0]]


def test_constants_take_the_precision_of_the_parameters() -> None:
    """A float32 leaf meets float32 constants, made once."""
    for name in ("per tensor", "diagonal", "full"):
        leaf = torch.zeros(3)
        placed = FAMILIES[name].like(leaf)
        x = tree.map(lambda one: torch.ones_like(one), SHAPES)
        assert {v.dtype for v in placed.natural(x).values()} == {torch.float32}
        assert FAMILIES[name].like(leaf) is placed


@pytest.mark.parametrize(
    ("covariance", "words"),
    [
        ({"a": 1.0}, "must name every parameter"),
        ({"a": 1.0, "b": [1.0, 2.0]}, r"have the shape \(2, 2\), got \(2,\)"),
        ({"a": 1.0, "b": -1.0}, r"covariance\['b'\] must be positive"),
        ({"a": 1.0, "b": "wide"}, r"covariance\['b'\] must be a number or numbers, got 'wide'"),
        ("wide", "covariance must be a mapping .* or a matrix, got 'wide'"),
        (torch.eye(6), "must be 7 x 7"),
        (-torch.eye(7), "positive definite"),
        (torch.eye(7) + torch.diag(torch.ones(6), 1), "symmetric"),
    ],
)
def test_impossible_covariances_are_refused(covariance: Any, words: str) -> None:
    """A covariance that does not fit says why."""
    with pytest.raises(ConfigError, match=words):
        gaussian(covariance, SHAPES)
