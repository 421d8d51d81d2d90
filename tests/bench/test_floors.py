from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sartor
from bench import device, floors, rates
from bench.plain import make_model
from bench.rates import Rates
from bench.workloads import Share, Workload
from sartor.core.errors import ConfigError

LENET = {
    "conv1": 2 * (6 * 24 * 24) * (1 * 5 * 5),
    "conv2": 2 * (16 * 8 * 8) * (6 * 5 * 5),
    "fc1": 2 * 120 * 256,
    "fc2": 2 * 84 * 120,
    "fc": 2 * 10 * 84,
}
"""Operations of LeNet-5 on one image of 28 by 28, counted by hand: outputs times inputs of each."""


def test_a_dense_layer_is_counted_by_hand():
    """Forwards 2·3·2, backwards the same for the weights, and nothing for the data."""
    assert floors.count_sample(nn.Linear(3, 2), (3,)) == floors.Sample(12, 12, 8, 3)


def test_lenet_is_counted_by_hand():
    """All layers forwards and for their weights; all but the first for their input."""
    sample = floors.count_sample(make_model("lenet5"), (1, 28, 28))
    total = sum(LENET.values())
    assert sample.forward == total == 563_280
    assert sample.backward == 2 * total - LENET["conv1"]
    assert (sample.parameters, sample.numbers) == (44_426, 784)


def test_an_lstm_is_counted_by_hand():
    """Two layers of 25 steps with four gates of 50 each, whose inputs need gradients; the head."""
    steps = 25 * 2 * 2 * (4 * 50) * (50 + 50)
    head = 2 * (50 * 100 + 100 * 2)
    sample = floors.count_sample(make_model("lstm"), (25,))
    assert (sample.forward, sample.backward) == (steps + head, 2 * (steps + head))
    assert (sample.parameters, sample.numbers) == (50_000 + 2 * (2 * 10_000 + 400) + 5_302, 25)
    bare = floors.count_sample(Bare(), (25, 50))  # the data themselves need no gradient
    assert (bare.forward, bare.backward) == (steps, 2 * steps - 25 * 2 * (4 * 50) * 50)


class Bare(nn.Module):
    """Two LSTM layers on numbers."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(50, 50, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (make_model("lenet5"), (1, 28, 28)),
        (make_model("dnn"), (1, 28, 28)),
        (make_model("mclr"), (1, 28, 28)),
        (sartor.models.lenet5(input_shape=(3, 32, 32), num_classes=10), (3, 32, 32)),
        (device.TwoLayers(), (3, 32, 32)),
    ],
    ids=["lenet", "dnn", "mclr", "cifar lenet", "two layers"],
)
def test_the_count_is_that_of_the_operators_which_run(model, shape):
    """PyTorch's counter sees the operators of one forward and one backward pass."""
    sample = floors.count_sample(model, shape)
    x = torch.randn(2, *shape)
    with FlopCounterMode(display=False) as forward:
        out = model(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert 2 * sample.forward == forward.get_total_flops()
    assert 2 * sample.backward == backward.get_total_flops()


def test_counting_leaves_the_model_alone():
    """No hooks, no gradients, no other device stay behind."""
    model = make_model("dnn").requires_grad_(False)
    floors.count_sample(model, (1, 28, 28))
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_layer_without_a_rule_is_refused_by_name():
    """A silent miss would make the floor too low."""
    with pytest.raises(ConfigError, match=r"1 \(GroupNorm\) cannot be counted"):
        floors.count_sample(nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)), (3,))


def test_a_round_is_counted_by_hand():
    """Clients of 5 and 2 samples, batches of 2, three epochs, four test samples."""
    sample = floors.Sample(forward=12, backward=20, parameters=8, numbers=3)
    work = floors.count_round(sample, [5, 2], batch=2, epochs=3, tested=4)
    steps, trained = 3 * (3 + 1), 3 * 7
    assert work.steps == steps
    assert work.flops == trained * (12 + 20) + 4 * 12 + 2 * 8 * (steps + 2)
    parameters, images, mean = 2 * 4 * 8 * steps, (4 * 3 + 8) * (trained + 4), 4 * 8 * 3
    assert work.bytes == parameters + images + mean
    half = floors.count_round(sample, [5, 2], batch=2, epochs=3, cohort=1, tested=4)
    assert half.steps == steps / 2
    assert half.flops == trained / 2 * 32 + 48 + 16 * (steps / 2 + 1)


def test_a_workload_and_a_federation_of_the_same_sizes_need_the_same():
    """Both ways to say what a round is meet in one count."""
    train, test = [np.arange(5), np.arange(5, 7)], [np.arange(7, 9), np.arange(9, 10)]
    workload = Workload("tiny", "mclr", 2, "iid", 2, 3, 1, 0.1, 7)
    x, y = np.zeros((10, 1, 28, 28), dtype=np.float32), np.zeros(10, dtype=np.int64)
    share = Share(x, y, train, test, workload, "zeros")
    federation = sartor.Federation.from_arrays(
        x,
        y,
        client=[0] * 5 + [1] * 2 + [0] * 2 + [1],
        test=np.arange(10) >= 7,
        num_classes=10,
    )
    work = floors.work_of_share(share)
    model = sartor.models.mclr(federation)
    settings = {"batch": 2, "epochs": 3, "cohort": 1}
    assert work == floors.work_of_federation(federation, model, **settings, test_every=1)
    assert work.steps == share.steps() == 6
    never = floors.work_of_federation(federation, model, **settings)
    assert work.flops - never.flops == 3 * 2 * 7840


def test_the_floor_is_the_longer_of_both_and_the_share_its_part():
    """Arithmetic bounds one device, memory the other."""
    work = floors.Work(flops=100.0, bytes=50.0, steps=1)
    slow_memory, slow_arithmetic = Rates(100.0, 10.0), Rates(10.0, 50.0)
    assert work.floor(slow_memory) == {"arithmetic": 1.0, "memory": 5.0, "seconds": 5.0}
    assert work.floor(slow_arithmetic)["seconds"] == 10.0
    assert work.share(20.0, slow_arithmetic) == 0.5


def test_every_workload_has_a_count():
    """Also those of the device; that of `many` by hand: 100 of 1,000 clients of 60 samples."""
    known = floors.known_work()
    assert set(known) == {"lenet", "dnn", "mclr", "many", "lstm", "lanes", "headline"}
    total, first = sum(LENET.values()), LENET["conv1"]
    products = 2 * 100 * 60 * (3 * total - first) + 10_000 * total
    assert known["many"].steps == 2 * 100
    assert known["many"].flops == pytest.approx(products + 2 * 44_426 * (200 + 100), rel=1e-12)
    # A Dirichlet division of the authors' protocol leaves a few of the 60,000 samples out.
    whole = 2 * 60_000 * (3 * total - first) + 10_000 * total
    assert 0.995 * whole < known["lenet"].flops < 1.005 * whole
    assert known["headline"].steps == 50 * 5


def test_rates_are_those_of_the_fastest_repeat():
    """A clock of our own: repeats of 4, 2 and 3 seconds."""
    times = iter(np.cumsum([0, 4, 1, 2, 1, 3, 0, 4, 1, 2, 1, 3]).tolist())
    found = rates.measure_rates("cpu", seconds=0, side=8, megabytes=1, clock=lambda: next(times))
    assert (found.flops, found.bytes) == (2 * 8**3 / 2, 2 * 2**20 / 2)
    assert found.device
    assert 0 <= found.others < math.inf


def test_a_job_is_repeated_until_the_time_is_over():
    """Three repeats at least, and one before that is not timed."""
    ticks, calls = iter(range(100)), []
    assert rates.fastest(lambda: calls.append(1), 5.0, lambda: float(next(ticks))) == 1.0
    assert len(calls) == 1 + 5
    calls.clear()
    rates.fastest(lambda: calls.append(1), 0.0, lambda: float(next(ticks)))
    assert len(calls) == 1 + 3
