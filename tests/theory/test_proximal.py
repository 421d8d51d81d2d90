"""Theorem 2 and Corollary 1 of one-stage FedProx, and L2GD's counterpart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task, cross_entropy, never
from sartor.data.synthetic import Logistic, logistic
from sartor.methods import build
from sartor.theory import proximal
from sartor.theory.proximal import corollary1, envelope, local_steps, local_steps_bound
from tests.toys import run, simulation

# ---- numbers -------------------------------------------------------------------------------------


def test_the_numbers_of_corollary_1() -> None:
    """L = 4, μ = 1, λ = 2: η = 1/6, γ = 0.375, K = 13 (22 by the looser bound), r = 0.84375."""
    found = corollary1(2.0, 4.0, 1.0)
    assert found["local_lr"] == pytest.approx(1 / 6)
    assert found["server_lr"] == pytest.approx(0.375)
    assert found["num_local_steps"] == 13
    assert found["num_local_steps_bound"] == 22
    assert found["rate"] == pytest.approx(0.84375)
    assert corollary1(2.0, 3.0, 3.0)["num_local_steps"] == 1


def test_the_smallest_number_of_steps_is_the_smallest() -> None:
    """K satisfies (2 + 64 λ²/μ²)(1 − η(μ + λ))^K ≤ (1 − γL_g)⁴ = 1/16, and K − 1 does not."""
    for lam, big, small in itertools.product((0.1, 2.0, 50.0), (4.0, 30.0), (0.5, 1.0)):
        steps = int(local_steps(torch.tensor(lam), big, small))
        ratio = (big - small) / (lam + big)
        need = 1 / 16 / (2 + 64 * (lam / small) ** 2)
        assert ratio**steps <= need * (1 + 1e-9)
        assert ratio ** (steps - 1) > need


def test_more_numbers_of_corollary_1() -> None:
    """L = 1, μ = 0.1, λ = 0.5: K = 20, and 31 by (118)."""
    assert corollary1(0.5, 1.0, 0.1)["num_local_steps"] == 20
    assert local_steps_bound(0.5, 1.0, 0.1) == 31
    # 1056 = 16 · 66 of (116): 66κ² x^(K−2) <= 1/16 with x = (L−μ)/(λ+L).
    assert local_steps_bound(1.0, 1000.0, 1.0) == math.ceil(2 + 500.5 * math.log(16 * 66e6))
    assert int(local_steps(torch.tensor(1.0), 1.0, 0.999)) == 1


def test_the_weight_of_the_clients_errors() -> None:
    """L = 4, μ = 1, λ = 2: ε_g = 1/4, ζ = 1/2, q = 3/8192, c_1 = 2 · 8.25/(r − q)."""
    found = proximal.error_weight(13, 1 / 6, 0.375, envelope(2.0, 4.0, 1.0))
    assert found == pytest.approx(16.5 / (0.84375 - 3 / 8192), rel=1e-12)


def test_a_smaller_pull_costs_more_steps_and_fewer_rounds() -> None:
    """As λ falls the bound on K grows and the rate shrinks; K · rounds stays about the same."""
    found = [corollary1(lam, 40.0, 1.0) for lam in (0.1, 1.0, 10.0, 100.0)]
    steps = [f["num_local_steps_bound"] for f in found]
    rates = [f["rate"] for f in found]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 4
    assert rates == sorted(rates)
    work = [k / (1 - r) for k, r in zip(steps, rates, strict=True)]
    assert max(work) / min(work) < 2.5
    assert max(steps) / min(steps) > 10


def test_the_condition_number_falls_to_one_with_the_pull() -> None:
    """L = 1, μ = 0.1: κ_g = κ(λ+μ)/(λ+L) from 1 at λ = 0 to κ = 10 at λ → ∞."""
    found = [envelope(lam, 1.0, 0.1).condition for lam in (0.0, 0.02, 0.1, 0.5, 5.0, 1e9)]
    np.testing.assert_allclose(found, [1, 1.176, 1.818, 4, 8.5, 10], atol=6e-4)
    env = envelope(0.5, 1.0, 0.1)
    assert env.smoothness / env.strong_convexity == pytest.approx(env.condition)


def test_the_constants_of_the_envelope_are_sharp_on_quadratics() -> None:
    """min_w a/2 w² + λ/2 (w − g)² has curvature L_g for a = L and μ_g for a = μ; prox' = L_w."""
    lam, env = 0.7, envelope(0.7, 4.0, 1.0)
    g = torch.tensor(1.3, dtype=torch.float64)

    def prox(a: float, g: Tensor) -> Tensor:
        return lam * g / (a + lam)

    def value(a: float) -> Callable[[Tensor], Tensor]:
        return lambda g: a / 2 * prox(a, g) ** 2 + lam / 2 * (prox(a, g) - g) ** 2

    bend = {a: float(torch.func.grad(torch.func.grad(value(a)))(g)) for a in (4.0, 1.0)}
    assert bend[4.0] == pytest.approx(env.smoothness)
    assert bend[1.0] == pytest.approx(env.strong_convexity)
    assert float(prox(1.0, g + 1) - prox(1.0, g)) == pytest.approx(env.follow)
    assert (env.local_smoothness, env.local_strong_convexity) == (4.7, 1.7)
    assert env.pull == pytest.approx(env.follow * lam / env.strong_convexity)


def test_corollary_1_satisfies_theorem_2_and_one_step_less_does_not() -> None:
    """(12) and (109) hold at K and fail at K − 1; η and γ have their limits too."""
    for lam, big, small in itertools.product((0.1, 2.0, 50.0), (4.0, 30.0), (0.5, 1.0)):
        found, env = corollary1(lam, big, small), envelope(lam, big, small)
        steps = int(found["num_local_steps"])
        eta, gamma = found["local_lr"], found["server_lr"]
        assert proximal.satisfies(steps, eta, gamma, env)
        assert not proximal.satisfies(steps - 1, eta, gamma, env)
        assert proximal.satisfies(int(found["num_local_steps_bound"]), eta, gamma, env)
        assert not proximal.satisfies(10**6, 1.1 * eta, gamma, env)
        assert not proximal.satisfies(10**6, eta, 2.0 * gamma, env)  # γ = 1/L_g: no K is enough
    flat = envelope(1.0, 2.0, 2.0)  # κ_g = 1: (109) forbids γ = 0.7/L_g, though (12) allows it
    assert not proximal.satisfies(1, 1 / 3, 0.7 / flat.smoothness, flat)
    assert proximal.satisfies(1, 1 / 3, 0.4 / flat.smoothness, flat)


def test_rounds_to_an_accuracy() -> None:
    """⌈ln(Δ/ε)/(−ln r)⌉ rounds are enough, and one less is not."""
    for rate, accuracy in ((0.84375, 1e-6), (0.5, 1e-3)):
        rounds = proximal.num_rounds(accuracy, 7.0, rate)
        assert 7.0 * rate**rounds <= accuracy < 7.0 * rate ** (rounds - 1)
    assert proximal.num_rounds(1.0, 0.5, 0.9) == 0


def test_the_communication_of_l2gd_and_fedprox_cross_at_the_strong_convexity() -> None:
    """L = 1, μ = 0.1: 2λκ/(λ+L) against κ(λ+μ)/(λ+L) for four λ."""
    lams = (0.02, 0.1, 0.5, 5.0)
    ours = [proximal.l2gd_exchanges(lam, 1.0, 0.1) for lam in lams]
    np.testing.assert_allclose(ours, [0.392, 1.818, 6.667, 16.67], atol=4e-3)
    theirs = [envelope(lam, 1.0, 0.1).condition for lam in lams]
    np.testing.assert_allclose(theirs, [1.176, 1.818, 4.0, 8.5], atol=6e-4)
    assert ours[1] == pytest.approx(theirs[1])
    assert (np.sign(np.subtract(ours, theirs))[[0, 2, 3]] == [-1, 1, 1]).all()


def test_the_coin_of_l2gd() -> None:
    """The coin p* = λ/(λ+L) allows the largest step; L = 4, λ = 2, m = 3: α <= 0.25."""
    p = proximal.average_probability(2.0, 4.0)
    assert p == pytest.approx(1 / 3)
    assert 3 * proximal.l2gd_lr(2.0, 4.0) == pytest.approx(0.25)
    limits = [proximal.l2gd_limit(2.0, 4.0, q) for q in np.linspace(0.05, 0.95, 19)]
    assert max(limits) <= proximal.l2gd_limit(2.0, 4.0, p) == pytest.approx(1 / 12)
    assert 1 / p == pytest.approx(1 + 4.0 / 2.0)  # gradients an exchange


def test_a_strong_convexity_must_be_possible() -> None:
    """Missing, not positive, or above L: refused with a way out."""
    for small, big in ((None, None), (0.0, 1.0), (-1.0, None), (2.0, 1.0)):
        with pytest.raises(ConfigError, match="add a ridge term"):
            proximal.check_strong_convexity(small, big)
    proximal.check_strong_convexity(1.0, 1.0)
    proximal.check_strong_convexity(1.0, None)


# ---- the contraction law -------------------------------------------------------------------------

RIDGE, CLIENTS, SAMPLES, DIM = 0.05, 5, 30, 4
PULLS = (0.01, 0.1, 1.0, 10.0, 100.0)
FED, _ = logistic(
    "theory", spread=1.5, clients=CLIENTS, samples=SAMPLES, dim=DIM, test_samples=1, seed=1
)
X, Y = (
    torch.stack([part[torch.as_tensor(FED.train.of(i))] for i in range(CLIENTS)]).double()
    for part in (FED.x, FED.y)
)
SMOOTHNESS = RIDGE + max(float(torch.linalg.eigvalsh(x.T @ x / SAMPLES)[-1]) / 4 for x in X)


def client_loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return L_i(w): logistic loss and ridge, written apart from the library."""
    score = x @ w
    return (F.softplus(score) - y * score).mean() + RIDGE / 2 * w.square().sum()


def newton(fn: Callable[..., Tensor], start: Tensor, *given: Tensor) -> Tensor:
    """Minimise strongly convex functions to gradients of 1e-12 by Newton's method.

    Args:
        fn: of a model (dim,), and of the rows of what is given.
        start: (functions, dim).
        given: (functions, ...) each.
    """
    grad = torch.func.vmap(torch.func.grad(fn))
    curve = torch.func.vmap(torch.func.jacrev(torch.func.grad(fn)))
    at = start
    for _ in range(50):
        slope = grad(at, *given)
        if float(slope.norm(dim=-1).max()) <= 1e-14:
            break
        at = at - torch.linalg.solve(curve(at, *given), slope)
    assert float(grad(at, *given).norm(dim=-1).max()) <= 1e-12
    return at


def minimiser(lam: float) -> tuple[Tensor, Tensor]:
    """Return w̃_g (dim,) and w̃_i (clients, dim) of objective (1)."""

    def joint(flat: Tensor) -> Tensor:
        *own, shared = flat.reshape(CLIENTS + 1, DIM)
        pulls = [lam / 2 * (w - shared).square().sum() for w in own]
        losses = [client_loss(x, y, w) for x, y, w in zip(X, Y, own, strict=True)]
        return (torch.stack(losses) + torch.stack(pulls)).mean()

    found = newton(joint, torch.zeros(1, (CLIENTS + 1) * DIM, dtype=torch.float64))
    found = found.reshape(CLIENTS + 1, DIM)
    return found[-1], found[:-1]


def nearest(lam: float, shared: Tensor, start: Tensor) -> Tensor:
    """Return prox_i(w_g) of every round and client: (rounds, clients, dim)."""

    def near(w: Tensor, x: Tensor, y: Tensor, centre: Tensor) -> Tensor:
        return client_loss(x, y, w) + lam / 2 * (w - centre).square().sum()

    rounds = len(shared)
    given = (X.repeat(rounds, 1, 1), Y.repeat(rounds, 1), shared.repeat_interleave(CLIENTS, 0))
    return newton(near, start.flatten(0, 1), *given).reshape(start.shape)


def test_every_round_contracts_at_theorem_2s_rate() -> None:
    """Logistic regression with ridge, λ over four orders: the error to the exact minimiser of (1).

    ‖w_g − w̃_g‖² + c_1 mean‖w_i − prox_i(w_g)‖² shrinks by r or more in every round, which is what
    the theorem proves; so do ‖w_g − w̃_g‖² and Σ‖w_i − w̃_i‖², the latter from the first trained
    models on; all until they are rounding.
    """
    rounds, floor, num = 60, 1e-20, len(PULLS)
    options = {"preset": "corollary1", "smoothness": SMOOTHNESS, "strong_convexity": RIDGE}
    task = Task(Logistic(DIM))
    method = build("fedprox", task, Local(batch=None, weight_decay=RIDGE), options)
    sim = simulation(
        method,
        task,
        [FED] * num,
        hyper=[{"prox_strength": lam} for lam in PULLS],
        seeds=[0] * num,
        rounds=rounds,
        participation="all",
        eval_every=rounds,
        points=("pre",),
    )
    shared, own = [], []
    for _ in range(rounds):
        shared.append(sim.server["params"]["w"].clone())
        sim.step()
        own.append(sim.store.gather(sim.context.everybody)["params"]["w"].clone())
    for k, lam in enumerate(PULLS):
        numbers, env = corollary1(lam, SMOOTHNESS, RIDGE), envelope(lam, SMOOTHNESS, RIDGE)
        steps = (int(numbers["num_local_steps"]), numbers["local_lr"], numbers["server_lr"])
        weight = proximal.error_weight(*steps, env)
        best, best_own = minimiser(lam)
        outer = np.array([float((w[k] - best).square().sum()) for w in shared])
        local = np.array([float((w[k] - best_own).square().sum()) for w in own])
        trained = torch.stack([w[k] for w in own])
        near = nearest(lam, torch.stack([w[k] for w in shared]), trained)
        inner = (trained - near).square().sum(-1).mean(-1).numpy()
        for error in (outer + weight * inner, outer, local):
            last = int(np.argmax(error < floor)) if (error < floor).any() else rounds - 1
            assert last > 10, lam
            assert (error[1 : last + 1] <= numbers["rate"] * error[:last]).all(), lam
            assert error[last] < 1e-3 * error[0], lam


class Ridged(Logistic):
    """Logistic regression whose ridge term is one more output."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        ridge = (RIDGE / 2 * self.w.square().sum()).expand(len(scores), 1)
        return torch.cat([scores, ridge], 1)


def test_weight_decay_is_a_ridge_in_the_loss() -> None:
    """Training with weight decay ν is training on the loss plus ν/2 ‖w‖²."""

    def with_ridge(scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores[:, :2], y) + scores[:, 2]

    found = []
    modules: tuple[tuple[nn.Module, Local], ...] = (
        (Logistic(DIM), Local(steps=5, batch=None, lr=0.5, weight_decay=RIDGE)),
        (Ridged(DIM), Local(steps=5, batch=None, lr=0.5)),
    )
    for module, local in modules:
        ridged = isinstance(module, Ridged)
        task = Task(module, None, with_ridge if ridged else cross_entropy, never)
        method = build("fedprox", task, local, {})
        sim = run(simulation(method, task, [FED], hyper={"prox_strength": 0.5}, rounds=4))
        found.append((sim.server["params"]["w"], sim.store.gather(sim.context.everybody)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-14)
    assert math.isfinite(float(found[0][0].sum()))
    assert float(found[0][0].norm()) > 0.1
