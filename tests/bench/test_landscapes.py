"""The bench of drawn federations judges what it draws."""

from __future__ import annotations

import numpy as np
import pytest

from bench.landscapes import FRESH, best_losses, draw, judge
from bench.oracles import Samples


@pytest.mark.parametrize("family", ["linear"])
def test_alike_clients_share_a_model(family: str) -> None:
    train, fresh = draw(family, 6, 40, 0.0, np.random.default_rng(3))
    assert all(len(y) == FRESH for _, y in fresh)
    found = judge(family, train, fresh, "six")
    assert found.about == "six"
    assert found.right
    assert abs(found.regret) < 0.1


def test_the_middle_is_never_worse_than_its_ends() -> None:
    train, fresh = draw("linear", 4, 30, 0.5, np.random.default_rng(4))
    parts = [[Samples(np.c_[x, np.ones(len(x))], y) for x, y in one] for one in (train, fresh)]
    ways = best_losses(parts[0], parts[1], 0)
    assert ways["personalise"] == min(ways.values())
    apart = best_losses(parts[0], [one._replace(y=-one.y) for one in parts[1]], 0)
    assert min(apart.values()) > min(ways.values())
