"""What ``bench.device`` measures, on tiny data: every workload trains and says what it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sartor
from bench import device


def tiny(clients: int = 3, samples: int = 9) -> sartor.Federation:
    """Make clients with images of 3 × 32 × 32 pixels."""
    rng = torch.Generator().manual_seed(0)
    number = clients * samples
    x, y = torch.randn(number, 3, 32, 32, generator=rng), torch.arange(number) % 10
    return sartor.Federation.from_arrays(x, y, client=np.arange(number) % clients)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    train = device.train

    def short(fed: Any, model: Any, rounds: int, **settings: Any) -> Any:
        if "sweep" in settings:
            few = {name: values[:2] for name, values in settings["sweep"].items()}
            settings |= {"sweep": few, "seeds": range(1)}
        return train(fed, model, min(rounds, 4), **settings)

    monkeypatch.setattr(device, "train", short)
    monkeypatch.setattr(device, "fashion", tiny)
    monkeypatch.setattr(device, "made_up", lambda clients, samples, tests: tiny())
    monkeypatch.setattr(device, "METHODS", ("fedapa",))
    monkeypatch.setattr(device, "SETTLED", 1)
    monkeypatch.setattr(device, "TEXTS", {"samples": 6, "batch": 3, "steps": 1})
    monkeypatch.setitem(device.LARGE, "runs", 2)
    monkeypatch.setitem(device.HEADLINE, "cohort", 2)
    monkeypatch.setitem(device.HEADLINE, "test_every", 2)


@pytest.mark.parametrize("name", list(device.WORK))
def test_every_workload_trains(name: str) -> None:
    rows = list(device.WORK[name](4))
    assert len(rows) == (2 if name in ("lanes", "large", "methods") else 1)
    for row in rows:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert numbers
        assert all(value > 0 for value in numbers), row
