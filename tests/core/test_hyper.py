"""Hyper-parameters: checked at the door, all faults at once, then tensors."""

from __future__ import annotations

import math

import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper, stack_hypers
from sartor.core.local import Local

SPECS = {
    "prox_strength": Hyper(0.1, 0.0, note="use 0 for pure local training"),
    "relax": Hyper(1.0, 0.0, 2.0, open_low=True),
}


def _stack(*runs):
    return stack_hypers(SPECS, runs, 3, torch.float64)


def test_values_stack_per_run_and_defaults_fill_in() -> None:
    """One number a run is (runs,)."""
    found = _stack({"prox_strength": 0.5}, {})
    assert found["prox_strength"].tolist() == [0.5, 0.1]
    assert found["relax"].tolist() == [1.0, 1.0]
    assert found["relax"].dtype == torch.float64


def test_one_value_per_client_makes_an_axis_of_clients() -> None:
    """Runs with one number join runs with one per client."""
    found = _stack({"prox_strength": [1, 2, 3]}, {"prox_strength": 0.5})
    assert found["prox_strength"].tolist() == [[1, 2, 3], [0.5] * 3]


def test_all_faults_are_reported_at_once_with_their_run() -> None:
    """The message names every value, its run, what is legal, and the nearest name."""
    with pytest.raises(ConfigError) as caught:
        _stack(
            {"prox_strength": -0.1}, {"prox_strenght": 1.0}, {"relax": 3.0, "prox_strength": [1.0]}
        )
    text = str(caught.value)
    assert (
        "prox_strength must be >= 0, got -0.1 in run 0 of the sweep; use 0 for pure local" in text
    )
    assert "'prox_strenght'; did you mean 'prox_strength'?" in text
    assert "relax must be > 0 and <= 2, got 3 in run 2" in text
    assert "prox_strength has 1 values in run 2 of the sweep, but there are 3 clients" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_hyper_parameter_is_nan_or_infinite(value: float) -> None:
    """Whatever the range is."""
    assert Hyper(0.0).fault("x", value) is not None
    assert SPECS["relax"].fault("relax", value) is not None


def test_bounds_are_inclusive_unless_open() -> None:
    """The low end counts, except where it is open."""
    assert SPECS["prox_strength"].fault("p", 0.0) is None
    assert SPECS["relax"].fault("r", 0.0) is not None
    assert SPECS["relax"].fault("r", 2.0) is None


def test_local_training_brings_only_the_numbers_it_uses() -> None:
    """Momentum and decay are hyper-parameters when they are on."""
    assert set(Local().hyper) == {"local_lr"}
    assert set(Local(momentum=0.9, weight_decay=0.1).hyper) == {
        "local_lr",
        "momentum",
        "weight_decay",
    }


def test_local_training_lists_all_its_faults() -> None:
    """Wrong counts and wrong numbers, in one message."""
    with pytest.raises(ConfigError) as caught:
        Local(epochs=0, batch=2.5, steps=-1, lr=-1.0, momentum=2.0)
    text = str(caught.value)
    for word in ("epochs", "batch", "steps", "lr", "momentum"):
        assert f"{word} must be" in text


def test_a_server_parameter_has_one_value_for_all_clients() -> None:
    """A value per client of what the server alone uses is refused, not spread along an axis."""
    specs = {"mix_lr": Hyper(0.1, server=True)}
    with pytest.raises(ConfigError, match="belongs to the server"):
        stack_hypers(specs, [{"mix_lr": [0.1, 0.2]}], 2, torch.float64)
