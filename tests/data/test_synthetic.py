"""Laws of the synthetic problems: their stated answers are answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.errors import ConfigError, FederationError
from sartor.core.task import cross_entropy
from sartor.data.synthetic import (
    Logistic,
    Quadratic,
    logistic,
    logistic_loss,
    logistic_radii,
    logistic_radius,
    quadratics,
)
from sartor.models import check_module

positive = st.floats(0.1, 10)
problems = st.integers(1, 4).flatmap(
    lambda dim: st.lists(
        st.tuples(
            st.lists(positive, min_size=dim, max_size=dim),
            st.lists(st.floats(-5, 5), min_size=dim, max_size=dim),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=5,
    )
)


def make(problem):
    a, c, n = zip(*problem, strict=True)
    return quadratics(a, c, samples=n)


def objective(fed, w):
    """Return the mean loss of each client at its own w, through the model."""
    model = Quadratic(w.shape[1]).double()
    losses = []
    for i in range(fed.num_clients):
        out = torch.func.functional_call(model, {"w": w[i]}, (fed.x[fed.train.of(i)],))
        losses.append(out.mean())
    return torch.stack(losses)


@given(problem=problems)
def test_the_gradient_vanishes_at_the_stated_global_minimiser(problem):
    """Σ p_i ∇f_i = 0 there, with p_i the clients' shares of the samples."""
    fed, truth = make(problem)
    w = truth.global_minimiser().requires_grad_()
    value = (truth.weights * objective(fed, w.expand(fed.num_clients, -1))).sum()
    value.backward()
    assert w.grad is not None
    assert float(w.grad.abs().max()) < 1e-9
    assert float(objective(fed, truth.centres).max()) == 0


@given(problem=problems, lam=st.floats(0.01, 100), per_client=st.booleans())
def test_the_stated_fedprox_solution_is_stationary(problem, lam, per_client):
    """The gradient of Σ p_i [f_i(w_i) + λ_i/2 ‖w_i − w_g‖²] is zero in w_g and every w_i."""
    fed, truth = make(problem)
    steps = torch.arange(1, fed.num_clients + 1, dtype=torch.float64)
    strength = (
        lam * steps if per_client else torch.full((fed.num_clients,), lam, dtype=torch.float64)
    )
    centre, own = truth.fedprox(strength if per_client else lam)
    centre, own = centre.requires_grad_(), own.requires_grad_()
    pull = 0.5 * strength * (own - centre).square().sum(1)
    (truth.weights * (objective(fed, own) + pull)).sum().backward()
    scale = 1 + float(strength.max())
    assert float(centre.grad.abs().max()) < 1e-9 * scale
    assert float(own.grad.abs().max()) < 1e-9 * scale


def test_the_worked_numbers_of_three_quadratics():
    """A = (1, 2, 4), c = (0, 3, 6): 30/7; at λ = 2 w_g = 11/3, w = (22/9, 10/3, 47/9); limits."""
    _, truth = quadratics([1, 2, 4], [0, 3, 6])
    assert truth.global_minimiser().item() == pytest.approx(30 / 7, abs=1e-12)
    centre, own = truth.fedprox(2.0)
    assert centre.item() == pytest.approx(11 / 3, abs=1e-12)
    assert own.flatten().tolist() == pytest.approx([22 / 9, 10 / 3, 47 / 9], abs=1e-12)
    assert truth.fedprox(0.0)[0].item() == 3
    assert truth.fedprox(0.0)[1].flatten().tolist() == [0, 3, 6]
    assert truth.fedprox(1e12)[0].item() == pytest.approx(30 / 7, abs=1e-9)


def test_impossible_quadratics_are_refused():
    """Unequal shapes, flat curvature, empty clients and negative λ are errors."""
    with pytest.raises(FederationError, match="must both be"):
        quadratics([1, 2], [0])
    with pytest.raises(FederationError, match="positive"):
        quadratics([1, 0], [0, 1])
    with pytest.raises(FederationError, match="samples must be >= 1"):
        quadratics([1, 1], [0, 1], samples=[1, 0])
    with pytest.raises(ConfigError, match="prox_strength must be >= 0"):
        quadratics([1], [0])[1].fedprox(-1.0)


def test_the_logistic_model_has_the_logistic_loss():
    """Cross-entropy of its scores is log(1 + exp(wᵀx)) − y wᵀx."""
    torch.manual_seed(0)
    model = Logistic(3).double()
    model.w.data = torch.randn(3).double()
    x, y = torch.randn(9, 3).double(), torch.arange(9) % 2
    score = x @ model.w
    want = torch.nn.functional.softplus(score) - y * score
    got = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    assert torch.allclose(got, want, atol=1e-12)
    check_module(model)
    check_module(Quadratic(2))


@pytest.mark.parametrize("mode", ["theory", "literal"])
def test_features_have_the_stated_variances(mode):
    """Σ_jj = j^-1.2, around 0 in mode theory and around each client's own v_k as printed."""
    fed, truth = logistic(mode, clients=3, samples=20_000, dim=6, test_samples=1)
    want = torch.arange(1, 7).double() ** -1.2
    for i in range(3):
        x = fed.x[fed.train.of(i)]
        assert torch.allclose(x.var(0), want, rtol=0.05)
        centred = float(x.mean(0).abs().max()) < 0.05
        assert centred == (mode == "theory")
    assert truth.w.shape == (3, 6)


def test_theory_labels_follow_the_true_model():
    """Among samples with wᵀx near z, the share of ones is σ(z); literal labels have no noise."""
    fed, truth = logistic("theory", spread=0.5, clients=2, samples=50_000, test_samples=0)
    for i in range(2):
        rows = fed.train.of(i)
        score = fed.x[rows] @ truth.w[i]
        near = (score - 0.5).abs() < 0.2
        share = fed.y[rows][near].double().mean().item()
        error = 4 * math.sqrt(0.25 / int(near.sum())) + 0.01
        assert share == pytest.approx(1 / (1 + math.exp(-0.5)), abs=error)
    fed, truth = logistic("literal", spread=1.0, clients=2, samples=300)
    for i in range(2):
        rows = fed.train.of(i)
        assert torch.equal(fed.y[rows] == 1, fed.x[rows] @ truth.w[i] > 0)


def test_the_spread_sets_the_heterogeneity():
    """R_a² is near s² d (1 − 1/m) in mode theory and R d (1 − 1/m) as printed; 0 at 0."""
    assert logistic(spread=0.0)[1].heterogeneity == pytest.approx(0, abs=1e-12)
    for mode, spread, dim, want in (
        ("theory", 0.5, 10, 0.25 * 10),
        ("literal", 2.0, 60, 2.0 * 60),
    ):
        _, truth = logistic(mode, spread=spread, clients=400, samples=1, dim=dim)
        assert truth.heterogeneity**2 == pytest.approx(want, rel=0.1)


@given(radius=st.floats(0, 20), seed=st.integers(0, 100))
def test_true_models_lie_at_the_radius_and_lean_against_the_common_one(radius, seed):
    """‖w_i − w*‖ = R and ⟨w_i − w*, w*⟩ ≤ 0, with w* the true model at R = 0."""
    _, truth = logistic_radius(radius, dim=20, samples=2, test_samples=1, seed=seed)
    _, flat = logistic_radius(0.0, dim=20, samples=2, test_samples=1, seed=seed)
    away = truth.w - flat.w
    assert torch.allclose(away.norm(dim=1), torch.full((5,), radius).double(), atol=1e-9)
    assert float((away * flat.w).sum(1).max()) <= 1e-9
    assert flat.heterogeneity == pytest.approx(0, abs=1e-12)


@given(st.lists(st.tuples(st.floats(-60, 60), st.floats(-60, 60), st.booleans()), min_size=1))
def test_the_logistic_loss_is_the_cross_entropy_of_two_classes(rows):
    """Values and gradients agree, also where one class is all but certain."""
    scores = torch.tensor([row[:2] for row in rows], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([int(row[2]) for row in rows])
    found, wanted = logistic_loss(scores, y), cross_entropy(scores, y)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-13)
    slope, expected = (torch.autograd.grad(loss.sum(), scores)[0] for loss in (found, wanted))
    assert torch.allclose(slope, expected, rtol=1e-12, atol=1e-13)


def test_several_radii_are_those_of_each_alone_and_hold_the_features_once():
    """Only the labels depend on the radius."""
    radii = (0.0, 3.0, 20.0)
    made = logistic_radii(radii, samples=20, test_samples=30, dim=7, seed=2)
    for radius, (fed, truth) in zip(radii, made, strict=True):
        alone, alone_truth = logistic_radius(radius, samples=20, test_samples=30, dim=7, seed=2)
        assert torch.equal(fed.x, alone.x)
        assert torch.equal(fed.y, alone.y)
        assert torch.equal(truth.w, alone_truth.w)
        assert fed.info == alone.info
        assert fed.x is made[0][0].x
    assert not torch.equal(made[0][0].y, made[2][0].y)


@pytest.mark.parametrize(
    "make_one", [logistic, lambda **k: logistic("literal", **k), logistic_radius]
)
def test_more_clients_leave_the_first_ones_as_they_were(make_one):
    """Client k depends on the seed and on k alone."""
    few, few_truth = make_one(clients=2, samples=5, test_samples=2, seed=4)
    many, many_truth = make_one(clients=6, samples=5, test_samples=2, seed=4)
    assert torch.equal(few_truth.w, many_truth.w[:2])
    for i in range(2):
        assert torch.equal(few.x[few.train.of(i)], many.x[many.train.of(i)])
        assert torch.equal(few.y[few.test.of(i)], many.y[many.test.of(i)])
    other, _ = make_one(clients=2, samples=5, test_samples=2, seed=5)
    assert not torch.equal(few.x, other.x)


def test_wrong_sizes_are_refused_together():
    """All wrong sizes are named in one error, and an unknown mode with the nearest."""
    with pytest.raises(ConfigError, match=r"clients must be >= 1, got 0; .*spread must be >= 0"):
        logistic(clients=0, spread=-1.0)
    with pytest.raises(ConfigError, match="did you mean 'literal'"):
        logistic("literl")
    with pytest.raises(ConfigError, match="radius must be >= 0"):
        logistic_radius(-1.0)
    with pytest.raises(ConfigError, match="seed must be >= 0"):
        logistic(seed=-1)
