"""A network that gives its own loss: there is no right or wrong, and nothing says otherwise."""

from __future__ import annotations

import pytest

import sartor
from sartor.core.errors import ConfigError
from sartor.data.synthetic import quadratics
from tests.toys import Parabola


@pytest.fixture(scope="module")
def trained() -> sartor.Result:
    """Two quadratics, trained alone for a round of ten steps."""
    federation, _ = quadratics([1.0, 2.0], [0.0, 3.0])
    network = Parabola(1)
    settings = {"rounds": 2, "local": sartor.Local(steps=10, lr=0.2), "device": "cpu"}
    return sartor.fit("fedavg", federation, model=network, **settings)


def test_newcomers_are_measured_as_everybody(trained: sartor.Result) -> None:
    """By their loss; an accuracy of 0 would say that all is wrong."""
    federation, _ = quadratics([4.0], [6.0])
    joined = trained.onboard(federation, rounds=1)
    assert (trained.measure, joined.measure) == ("loss", "loss")
    assert joined.pooled_measure() == pytest.approx(joined.loss_curve()[1][-1])
    assert joined.pooled_measure() > 0


def test_there_is_nothing_to_predict(trained: sartor.Result) -> None:
    """The network itself is there."""
    with pytest.raises(ConfigError, match=r"gives its own loss.*result\.model"):
        trained.predict(0, [[1.0, 0.0]])
    assert trained.model(0).w.shape == (1,)


def test_a_search_by_accuracy_is_refused() -> None:
    """Before anything trains: every trial would reach 0."""
    network = Parabola(1)
    federation, _ = quadratics([1.0, 2.0], [0.0, 3.0])
    with pytest.raises(ConfigError, match="no right or wrong"):
        sartor.search(
            "fedavg", federation, {"local_lr": (0.1, 0.2)}, measure="accuracy", model=network
        )
