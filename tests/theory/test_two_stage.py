"""How long two-stage FedProx must run: Theorems 11 and 12, Eq. (26), (38)."""

from __future__ import annotations

import pytest

from sartor.errors import ConfigError
from sartor.theory.two_stage import (
    explicit_local_steps,
    local_rate,
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
