"""The task: features and head apart, class statistics, Hessian products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sartor import models
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, changed
from sartor.core.task import Task, hessian_product, masked_mean, metered
from sartor.methods import build
from sartor.methods.parts.prototypes import class_means, class_sums
from tests.toys import Net, federation, net_task, quadratic_task, run, simulation

NETS = {
    "net": lambda: Net(),
    "dnn": lambda: models.dnn(input_shape=(4,), num_classes=3),
    "lenet5": lambda: models.lenet5(input_shape=(1, 28, 28), num_classes=3),
}


@pytest.mark.parametrize("name", list(NETS))
def test_the_head_on_the_features_is_the_network(name: str) -> None:
    """classify(features(x)) is logits(x), for lanes too, and only the body makes features."""
    module: Any = NETS[name]()
    task = Task(module, module.head)
    shape = (1, 28, 28) if name == "lenet5" else (4,)
    x, params = torch.randn(6, *shape, dtype=torch.float64), [task.init(s) for s in (0, 1)]
    lanes = tree.map(torch.Tensor.double, tree.stack(params))
    features = torch.func.vmap(lambda p: task.features(p, x))(lanes)
    assert features.shape == (2, 6, task.feature_dim)
    scores = torch.func.vmap(task.classify)(lanes, features)
    wanted = torch.func.vmap(lambda p: task.logits(p, x))(lanes)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-14)
    assert scores.shape[-1] == task.num_classes == 3
    body = {k: v[0] for k, v in lanes.items() if task.is_body(k)}
    torch.testing.assert_close(task.features(body, x), features[0], rtol=0, atol=1e-14)


def test_a_network_that_cannot_be_split_is_refused() -> None:
    """No head, a head that is not linear, a network that is all head: each says what to do."""
    with pytest.raises(ConfigError, match="not named"):
        _ = Task(nn.Linear(2, 2)).feature_dim
    odd = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="a Sequential"):
        _ = Task(odd, "1").num_classes
    mclr = models.mclr(input_shape=(4,), num_classes=3)
    with pytest.raises(ConfigError, match="use a network with a body"):
        _ = Task(mclr, mclr.head).feature_dim


def test_class_sums_are_those_of_a_loop() -> None:
    """Sums and counts of every class over all of a client's samples, padding left out."""
    task, fed = net_task(), federation()
    base = build("local", task, Local(), {})
    method = changed(
        base,
        phases=(replace(class_sums(task, "sums"), batch=4),),
        finish=lambda client, work, ctx: (
            client,
            {"sums": work["sums"], "counts": work["counts"]},
        ),
        private=lambda leaf: False,
        init_server=lambda params, ctx: {
            "sums": ctx.hyper["local_lr"].new_zeros((5, 3, 5)),
            "counts": ctx.hyper["local_lr"].new_zeros((5, 3)),
        },
        aggregate=lambda server, uploads, ctx: {
            k: torch.zeros_like(v).index_copy(0, ctx.cohort, v) for k, v in uploads.items()
        },
    )
    sim = run(simulation(method, task, [fed], rounds=1, participation="all"))
    params = tree.map(torch.Tensor.double, task.init(0))
    for client in range(5):
        rows = fed.train.of(client)
        z, y = task.features(params, fed.x[rows]), fed.y[rows]
        for c in range(3):
            torch.testing.assert_close(sim.server["sums"][0, client, c], z[y == c].sum(0))
            assert int(sim.server["counts"][0, client, c]) == int((y == c).sum())
    assert sim.ledger().forward_evaluations[0, 0] == fed.train.sizes.sum()


def test_means_of_classes_that_nobody_has() -> None:
    """An empty class takes the fallback, or zero."""
    sums, counts = torch.tensor([[2.0, 4.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0])
    assert class_means(sums, counts).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert class_means(sums, counts, torch.full((2, 2), 9.0)).tolist() == [[1.0, 2.0], [9.0, 9.0]]


def test_a_hessian_product_is_the_hessian_times_the_vector() -> None:
    """Against the full Hessian of a small network, and counted as one gradient."""
    task = net_task()
    params = tree.map(torch.Tensor.double, task.init(0))
    fed = federation()
    mask = torch.ones(len(fed.x), dtype=torch.bool)
    batch = Batch(fed.x, fed.y, mask, mask.long(), mask[0])
    direction = tree.map(torch.randn_like, params)
    with metered() as calls:
        found = hessian_product(lambda p: task.loss(p, batch), params, direction)
    assert calls() == (0, 1)
    slope = torch.func.grad(lambda p: task.loss(p, batch))
    full = torch.func.jacrev(slope)(params)
    for a in params:
        wanted = sum(
            torch.tensordot(full[a][b], direction[b], dims=direction[b].dim()) for b in params
        )
        torch.testing.assert_close(found[a], wanted)


def test_a_quadratic_has_no_head() -> None:
    """The toy of the limits is refused by methods that split the network."""
    with pytest.raises(ConfigError, match="linear head"):
        quadratic_task().features({}, torch.zeros(1, 1))


def test_a_mixture_is_a_module_too() -> None:
    """FedEM's model of a client is an ordinary module that gives the scores of the evaluator."""
    task, fed = net_task(), federation()
    method = build("fedem", task, Local(epochs=1, batch=4, lr=0.2), {})
    sim = run(simulation(method, task, [fed], participation="all"))
    module = sim.network(2)
    x, y = fed.x[fed.test.of(2)], fed.y[fed.test.of(2)]
    scores = module(x)
    assert int((scores.argmax(-1) == y).sum()) == sim.scores()["pre", "test"].correct[0, -1, 2]
    again = sim.network(2)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), scores)
    scores.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("mask", "mean", "slope"),
    [
        ([True, True, True, True], 4.0, [0.25, 0.25, 0.25, 0.25]),
        ([True, False, True, False], 2.0, [0.5, 0.0, 0.5, 0.0]),
        ([False, True, False, False], 5.0, [0.0, 1.0, 0.0, 0.0]),
        ([False, False, False, False], 0.0, [0.0, 0.0, 0.0, 0.0]),  # nobody: no loss, no slope
    ],
)
def test_a_mean_is_over_the_real_samples(mask: list, mean: float, slope: list) -> None:
    """1, 5, 3 and 7: the sum of what is real by its number, and padding has no gradient."""
    values = torch.tensor([1.0, 5.0, 3.0, 7.0], requires_grad=True)
    found = masked_mean(values, torch.tensor(mask))
    found.backward()
    assert found.item() == mean
    assert values.grad is not None
    assert values.grad.tolist() == slope
