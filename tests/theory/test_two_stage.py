"""How long two-stage FedProx must run: Theorems 11 and 12, Eq. (26), (38)."""

from __future__ import annotations

import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.theory.two_stage import (
    envelope_gradient2,
    explicit_local_steps,
    inner_error2,
    local_rate,
    objective_error,
    outer_error2,
    server_rate,
    sufficient_local_steps,
    sufficient_schedule,
)


def test_the_first_server_step_overshoots() -> None:
    """λη_0 = 2(μ+λ)/μ ≥ 2 for every λ, and η_t falls like 1/(t+1)."""
    for lam in (0.01, 1.0, 50.0):
        assert lam * server_rate(0, lam, 0.5) == pytest.approx(2 * (0.5 + lam) / 0.5)
        assert lam * server_rate(0, lam, 0.5) >= 2
        assert server_rate(9, lam, 0.5) == pytest.approx(server_rate(0, lam, 0.5) / 10)
        assert local_rate(9, lam, 0.5) == pytest.approx(0.1 / (0.5 + lam))


def test_local_steps_are_the_fewest_that_are_enough() -> None:
    """K_t + 1 ≥ C_1 max(λ², 1) t holds for K_t and not for K_t − 1."""
    for lam, t, c in ((0.2, 7, 1.0), (3.0, 7, 1.0), (1.5, 4, 0.3), (2.0, 1000, 2.5)):
        k, bound = sufficient_local_steps(t, lam, c), c * max(lam**2, 1.0) * t
        assert k + 1 >= bound - 1e-6
        assert k < bound - 1e-6
    assert sufficient_local_steps(0, 5.0) == 1


@pytest.mark.parametrize(
    ("lam", "beta", "mu", "diameter", "loss", "wanted"),
    [
        (1.0, 1.0, 1.0, 1.0, 1.0, 28 - 1),  # all three equal 1, 2, 1: the least is 1
        (2.0, 1.0, 1.0, 1.0, 9.0, 28 * 4 - 1),  # β²D² = 1 is the least
        (0.5, 2.0, 1.0, 2.0, 9.0, 28 * 4 - 1),  # λ²D² = 1 is the least: λ²β²D² = 4
        (2.0, 3.0, 2.0, 1.0, 0.25, 28 * 9 - 1),  # 2λB = 1 is the least: 36/4 = 9
    ],
)
def test_explicit_local_steps(
    lam: float, beta: float, mu: float, diameter: float, loss: float, wanted: int
) -> None:
    """(38) at t = 2, where 4t + 20 = 28, with each of its three minima."""
    found = explicit_local_steps(
        2, lam, smoothness=beta, strong_convexity=mu, diameter=diameter, loss_bound=loss
    )
    assert found == wanted


def test_the_schedule_of_theorem_11() -> None:
    """Worked by hand: equal clients, unequal ones with weights, both branches of each max."""
    # λ = 0.1: a = 0.1, m‖p‖² = 1, h = 100; T = 0.1 max(100, 0.1·100²), K = 1.1² max(100, 0.01·20²).
    assert sufficient_schedule(0.1, [100] * 5) == (100, 121)
    # λ = 0.001: T = 0.001 max(100, 10) → 1 by its floor, K = 1.001²·100 = 100.2 → 101.
    assert sufficient_schedule(0.001, [100] * 5) == (1, 101)
    # λ = 2: a = 4, p = (¼, ¾), n = (2, 4): m‖p‖² = 1.25, h = 3.2; T = 5 max(3.2, 64) = 320,
    # K = 9 max(3.2, 4·9) = 324.
    assert sufficient_schedule(2.0, [2, 4], [0.25, 0.75]) == (320, 324)


def test_the_schedule_of_theorem_12() -> None:
    """Worked by hand: T = a max n_i max(1/p_i, a n_i), K = (λ+1)² max n_i max(1/p_i, λ²p_i²n_i)."""
    # λ = 2, p = (¼, ¾), n = (2, 4): T = 4 max(2·8, 4·16) = 256, K = 9 max(2·4, 4·9) = 324.
    assert sufficient_schedule(2.0, [2, 4], [0.25, 0.75], error="individual") == (256, 324)
    # λ = 0.1, five clients of 100: T = 0.1·100·max(5, 10) = 100, K = 1.21·100·5 = 605.
    assert sufficient_schedule(0.1, [100] * 5, error="individual") == (100, 605)


def test_constants_scale_the_schedule() -> None:
    """C_2 scales T and C_3 scales K_T, each alone; λ = 0 needs no round that counts."""
    assert sufficient_schedule(0.1, [100] * 5, rounds_constant=3.0) == (300, 121)
    assert sufficient_schedule(0.1, [100] * 5, final_constant=2.0) == (100, 242)
    assert sufficient_schedule(0.0, [100] * 5) == (1, 100)


@pytest.mark.parametrize(
    ("sizes", "weights"), [([3, 3], [0.5]), ([3, 3], [0.5, 0.6]), ([3, 3], [0.0, 1.0]), ([0], None)]
)
def test_impossible_weights_are_refused(sizes: list, weights: list | None) -> None:
    """Weights are positive and sum to one; clients have samples."""
    with pytest.raises(ConfigError, match="sum 1"):
        sufficient_schedule(1.0, sizes, weights)


# ---- how far from the minimisers -----------------------------------------------------------------

BALL = {"smoothness": 2.0, "strong_convexity": 0.5, "diameter": 2.0, "loss_bound": 4.0}


@pytest.mark.parametrize(
    ("lam", "wanted"),
    [(0.1, 0.04), (1.0, 4.0), (2.0 - 1e-9, 16.0), (9.0, 16.0)],
)
def test_the_bound_on_the_envelopes_gradient(lam: float, wanted: float) -> None:
    """Lemma 18 with β = 2, D = 2, B = 4: λ²D² = 0.04 and 4, then β²D² = 16; 2λB if B is small."""
    assert envelope_gradient2(lam, 2.0, 2.0, 4.0) == pytest.approx(wanted)
    assert envelope_gradient2(9.0, 2.0, 2.0, 0.5) == pytest.approx(9.0)


def test_lemma_18_holds_and_is_nearly_reached() -> None:
    """For β/2 (w − c)² the gradient of the envelope is λβ/(λ+β) (w − c), with |w − c| <= D."""
    beta, wide = 2.0, 2.0
    for lam in (1e-3, 0.1, 1.0, 10.0, 1e4):
        exact = (lam * beta / (lam + beta) * wide) ** 2
        bound = envelope_gradient2(lam, beta, wide, beta / 2 * wide**2)
        assert exact <= bound
        if lam in (1e-3, 1e4):
            assert exact > 0.99 * bound


def test_the_lemmas_in_numbers() -> None:
    """Lemma 14: 8 · 16/(k+1) · 4; Lemma 15 and Proposition 16 with m‖p‖² = 2 (1/16 + 9/16)."""
    assert inner_error2(15, 2.0, 0.5, 2.0) == pytest.approx(8 * 16 * 4 / 16)
    p = [0.25, 0.75]
    outer = outer_error2(9, 1.0, p, **BALL)
    assert outer == pytest.approx(12 * 2.25 * 1.25 * 4.0 / 0.25 / 10)
    found = objective_error(9, 15, 1.0, p, **BALL)
    assert found == pytest.approx(3 / 2 * 32 + outer / 2)
    # As printed: 4(β+λ)β²D²/(μ²(K+1)) + 6(λ+μ)²m‖p‖²·4/(λμ²(T+1)).
    assert found == pytest.approx(4 * 3 * 16 / 0.25 / 16 + 6 * 2.25 * 1.25 * 4 / 0.25 / 10)


def test_lemmas_14_and_15_hold_for_a_run() -> None:
    """Three clients with losses a/2 (w − z)², a in [½, 2], in the unit disc; 400 runs at once.

    Every local step takes one record; the server steps and K_t are those of the lemmas.
    """
    draw = torch.Generator().manual_seed(2)
    lam, runs, records = 1.0, 400, 12
    a = 0.5 + 1.5 * torch.rand(3, records, 1, dtype=torch.float64, generator=draw)
    z = torch.randn(3, records, 2, dtype=torch.float64, generator=draw)
    z = 0.7 * z / z.norm(dim=2, keepdim=True).clamp(min=1.0)
    mean, centre = a.mean(1), (a * z).mean(1) / a.mean(1)  # L_i = mean/2 ‖w − centre‖² + const
    kind = {"smoothness": 2.0, "strong_convexity": 0.5, "diameter": 2.0, "loss_bound": 4.0}

    def prox(shared: torch.Tensor) -> torch.Tensor:
        return (mean * centre + lam * shared[:, None]) / (mean + lam)

    bend = (lam * mean / (lam + mean)).mean(0)
    best = (lam * mean / (lam + mean) * centre).mean(0) / bend
    shared = torch.ones(runs, 2, dtype=torch.float64) / 2**0.5
    own = shared[:, None].expand(runs, 3, 2).clone()
    who = torch.arange(3)
    for t in range(4):
        steps = explicit_local_steps(t, lam, **kind)
        for k in range(steps):
            pick = torch.randint(records, (runs, 3), generator=draw)
            slope = a[who, pick] * (own - z[who, pick]) + lam * (own - shared[:, None])
            own = own - local_rate(k, lam, 0.5) * slope
            own = own / own.norm(dim=2, keepdim=True).clamp(min=1.0)
            if k + 1 in (1, 4, 32, steps):
                error = (own - prox(shared)).square().sum(2).mean(0).max()
                assert float(error) <= inner_error2(k + 1, 2.0, 0.5, 2.0)
        error = (shared - best).square().sum(1).mean()
        assert float(error) <= outer_error2(t, lam, [1 / 3] * 3, **kind)
        move = (shared[:, None] - own).mean(1)
        shared = shared - lam * server_rate(t, lam, 0.5) * move
