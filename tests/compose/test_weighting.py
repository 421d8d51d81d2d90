"""Class weights, against plain PyTorch and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

import sartor
from sartor import Local
from sartor.core.errors import ConfigError
from sartor.methods import METHODS
from sartor.training.settings import balanced_weights
from tests.toys import Net, federation

FULL = Local(steps=1, batch=None, lr=0.3)


def uneven() -> sartor.Federation:
    """Return three clients: a rare class, another rare class, and one class alone."""
    draw = np.random.default_rng(3)
    shares = ([0.8, 0.15, 0.05], [0.1, 0.1, 0.8], [0.0, 1.0, 0.0])
    y = np.concatenate([draw.choice(3, 60, p=p) for p in shares])
    x = draw.normal(size=(180, 4)) + y[:, None]
    return sartor.Federation.from_arrays(x, y, client=np.repeat([0, 1, 2], 60), num_classes=3)


def by_hand(data, weights, steps):
    """Train every client with PyTorch, descending (1/n) Σ w_y ℓ."""
    from sartor.core.task import Task

    start = Task(Net(), head="fc").init(0)
    found = []
    for i in range(data.num_clients):
        net = Net().double()
        net.load_state_dict({k: v.double() for k, v in start.items()})
        x, y = data.x[data.train.of(i)].double(), data.y[data.train.of(i)]
        for _ in range(steps):
            net.zero_grad()
            losses = F.cross_entropy(net(x), y, reduction="none")
            (losses * torch.tensor(weights[i], dtype=torch.float64)[y]).mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.sub_(0.3 * p.grad)
        found.append(dict(net.named_parameters()))
    return found


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
@pytest.mark.parametrize("given", ["balanced", (1.0, 0.5, 3.0)], ids=["balanced", "given"])
def test_steps_are_those_of_plain_pytorch(given, engine):
    """Balanced weights are scikit-learn's, of each client's own training samples."""
    data = uneven()
    weights = [given] * 3
    if given == "balanced":
        weights = []
        for i in range(3):
            y, own = data.y[data.train.of(i)].numpy(), [1.0] * 3
            seen = np.unique(y)
            for c, w in zip(seen, compute_class_weight("balanced", classes=seen, y=y), strict=True):
                own[c] = float(w)
            weights.append(own)
        ours = np.array(list(balanced_weights(data).values())).T
        np.testing.assert_allclose(ours, weights, rtol=1e-12)
    found = sartor.fit(
        "local",
        data,
        model=Net(),
        rounds=4,
        local=FULL,
        class_weights=given,
        engine=engine,
        dtype="float64",
        device="cpu",
    )
    for i, wanted in enumerate(by_hand(data, weights, 4)):
        for name, p in found.model(i).named_parameters():
            np.testing.assert_allclose(
                p.detach().numpy(), wanted[name].detach().numpy(), rtol=0, atol=1e-12
            )


def test_what_is_measured_is_plain():
    """The reported loss is that of the models, without weights."""
    data = uneven()
    found = sartor.fit(
        "fedavg", data, model=Net(), rounds=2, class_weights=(0.0, 5.0, 9.0), device="cpu"
    )
    total = 0.0
    for i in range(3):
        rows = data.test.of(i)
        with torch.no_grad():
            scores = found.model(i)(data.x[rows].float())
            total += float(F.cross_entropy(scores, data.y[rows], reduction="sum"))
    assert found.loss_curve()[1][-1] == pytest.approx(total / len(data.test.rows), rel=1e-5)


def test_weights_of_one_change_nothing_and_others_something_for_every_method():
    """All methods that descend take them; evidence says why not."""
    data = federation()
    given = {
        "model": Net(),
        "rounds": 1,
        "dtype": "float64",
        "device": "cpu",
        "local": Local(epochs=1, batch=4, lr=0.1),
    }
    for name in METHODS:
        if name in ("evidence", "fedbn"):
            continue
        plain = sartor.fit(name, data, **given).loss_curve()[1]
        ones = sartor.fit(name, data, class_weights=(1, 1, 1), **given).loss_curve()[1]
        other = sartor.fit(name, data, class_weights=(1, 2, 5), **given).loss_curve()[1]
        np.testing.assert_allclose(ones, plain, rtol=1e-12, err_msg=name)
        assert abs(other - plain).max() > 1e-9, name


def test_repeats_with_balanced_weights_are_repeats():
    """Weights of clients differ between allocations, and the runs still belong together."""
    found = sartor.fit(
        "fedavg",
        lambda seed: federation(seed),
        model=Net(),
        rounds=1,
        seeds=(0, 1),
        class_weights="balanced",
    )
    assert len(found.groups()) == 1


def test_what_cannot_be_right_is_refused():
    """Errors name the classes, the task and what to write."""
    data = federation()
    given = {"model": Net(), "rounds": 1}
    with pytest.raises(ConfigError, match="'balanced' or 3 numbers >= 0"):
        sartor.fit("fedavg", data, class_weights=[1, 2], **given)
    with pytest.raises(ConfigError, match="'balanced' or numbers"):
        sartor.fit("fedavg", data, class_weights="even", **given)
    with pytest.raises(ConfigError, match="plain likelihood"):
        sartor.fit("evidence", data, class_weights="balanced", rounds=1)
    with pytest.raises(ConfigError, match="takes no class_weights"):
        sartor.fit("auto", data, class_weights="balanced", rounds=1)
    x = np.random.default_rng(0).normal(size=(40, 3))
    houses = sartor.Federation.from_arrays(x, x[:, 0], client=np.arange(40) % 2, num_classes=0)
    with pytest.raises(ConfigError, match="for classification, and this network learns regression"):
        sartor.fit("fedavg", houses, class_weights="balanced", rounds=1)
