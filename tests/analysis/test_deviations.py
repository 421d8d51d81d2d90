from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sartor import Federation, Local, fit
from sartor.analysis import class_means, deviate, loss_deviations
from sartor.core.errors import ConfigError


def test_the_example_of_the_sheet():
    """Owners with m = (10, 30) and L = (0.2, 0.6), a third without the class: mean 0.5."""
    local, pooled = deviate([[0.2], [0.6], [7.0]], [[1.0], [2.0], [6.0]], [[10], [30], [0]])
    np.testing.assert_allclose(local[:, 0], [-0.3, 0.1, -0.5], atol=1e-15)
    np.testing.assert_allclose(pooled[:, 0], [-2, -1, 3], atol=1e-15)


def test_deviations_cancel():
    """Σ_i ΔG = 0 and Σ_i m ΔL = 0 for every class; one client alone deviates from nothing."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, (6, 4))
    losses = rng.exponential(size=(2, 6, 4))
    local, pooled = deviate(losses[0], losses[1], counts)
    np.testing.assert_allclose(pooled.sum(0), 0, atol=1e-12)
    np.testing.assert_allclose((counts * local).sum(0), 0, atol=1e-12)
    missing = counts == 0
    assert missing.any()
    assert (local[missing] <= 0).all()
    alone, everybody = deviate(losses[0][:1], losses[1][:1], np.ones((1, 4)))
    assert not alone.any()
    assert not everybody.any()


class Constant(nn.Module):
    """Gives the same scores to every sample."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(len(x), -1)


def test_models_and_a_federation_by_hand():
    """Constant scores: the loss of class c is log-sum-exp minus its score, whatever the sample."""
    x = torch.zeros(14, 2)
    y = torch.tensor([0, 1, 0, 1, 0, 0, 1] + [0] * 7)
    owner = ["a"] * 7 + ["b"] * 7
    fed = Federation.from_arrays(x, y, client=owner, test=0.5, seed=0)
    scores = [(2.0, 0.0), (0.0, 1.0)]
    found = loss_deviations([Constant(*s) for s in scores], fed)
    expected = np.array([np.logaddexp(*s) - np.asarray(s) for s in scores])
    np.testing.assert_allclose(found.pooled_loss, expected, rtol=1e-6)
    np.testing.assert_allclose(found.pooled, expected - expected.mean(0), atol=1e-6)
    np.testing.assert_array_equal(found.counts, fed.label_counts("test").numpy())
    has = found.counts > 0
    assert not has[1, 1]
    np.testing.assert_allclose(found.local_loss[has], expected[has], rtol=1e-6)
    assert not found.local_loss[~has].any()


def test_a_result_gives_the_losses_that_were_recorded():
    """Σ_c m_ic L_ic is the sum of losses that the evaluator wrote down for the client."""
    fed = Federation.from_dataset("digits", clients=4)
    result = fit("fedavg-ft", fed, rounds=1, local=Local(steps=2))
    found = loss_deviations(result, fed)
    recorded = result.scores[result.headline, "test"].loss[0, -1]
    np.testing.assert_allclose((found.counts * found.local_loss).sum(1), recorded, rtol=1e-4)
    np.testing.assert_allclose(found.pooled.sum(0), 0, atol=1e-9)
    with pytest.raises(ConfigError, match="1 models for 4 clients"):
        loss_deviations([result.model(0)], fed)


def test_a_class_without_samples_has_no_mean():
    """NaN, and a count of 0."""
    means, counts = class_means([], [], 2)
    assert np.isnan(means).all()
    assert counts.tolist() == [0, 0]
