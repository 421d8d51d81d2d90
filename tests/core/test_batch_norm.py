"""BatchNorm with statistics of one's own: the numbers of torch, and what never leaves a client."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor.core import layers, tree
from sartor.core.errors import ContractError, ModelError
from sartor.core.local import Local
from sartor.core.method import Batch
from sartor.core.task import Task
from sartor.methods import build
from tests.toys import (
    Noisy,
    assert_same,
    federation,
    outcome,
    run,
    simulation,
    states,
    two_allocations,
)

LOCAL = Local(epochs=1, batch=4, lr=0.2)


def padded(x: Tensor, real: int) -> Batch:
    """Return a batch whose rows from ``real`` on are padding."""
    mask = torch.arange(len(x)) < real
    return Batch(x, torch.zeros(len(x), dtype=torch.long), mask, torch.arange(len(x)), mask[0])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (9, 3)),
        (nn.BatchNorm1d(3, eps=0.1), (9, 3, 5)),
        (nn.BatchNorm2d(3), (9, 3, 4, 2)),
        (nn.BatchNorm3d(3, affine=False), (9, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("real", [9, 6, 2])
def test_padding_is_not_in_the_batch(layer: Any, shape: Any, real: int) -> None:
    """Outputs, gradients and statistics are those of torch on the real samples alone."""
    torch.manual_seed(0)
    layer = layer.double()
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape, dtype=torch.float64)
    ours: Any = layers.normed(nn.Sequential(copy.deepcopy(layer)))
    inputs: Any = x.clone().requires_grad_()
    batch = padded(inputs, real)
    with layers.collecting(batch) as sums, layers.passing(inputs, slope=True, draws=False):
        found = ours(inputs)
    theirs: Any = x[:real].clone().requires_grad_()
    layer.momentum = 1.0
    wanted = layer(theirs)
    torch.testing.assert_close(found[:real], wanted, atol=1e-12, rtol=0)
    weight = torch.randn_like(wanted)
    (found[:real] * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(inputs.grad[:real], theirs.grad, atol=1e-12, rtol=0)
    assert not inputs.grad[real:].any()
    kept = layers.statistics(sums)["0"]
    for name in layers.STATISTICS:
        torch.testing.assert_close(kept[f"0.{name}"], layer.get_buffer(name), atol=1e-12, rtol=0)


def test_a_client_trains_as_torch_does() -> None:
    """Epochs on one client: weights as by hand, statistics those of its training samples."""
    task, fed = Task(Noisy(drop=0.0), "fc"), federation(sizes=(7,))
    method = build("local", task, Local(steps=3, batch=None, lr=0.2), {})
    sim = run(simulation(method, task, [fed], seeds=[4], rounds=1, participation=1.0))
    own: Any = task.with_params({k: v.double() for k, v in task.init(4).items()}).train()
    rows = fed.train.of(0)
    x, y = fed.x[rows], fed.y[rows]
    sgd = torch.optim.SGD(own.parameters(), 0.2)
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(own(x), y).backward()
        sgd.step()
    found: Any = sim.network(0)
    assert not found.training
    for name, value in own.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, atol=1e-12, rtol=0)
    inside = own.body(x).detach().numpy()
    np.testing.assert_allclose(found.norm.running_mean, inside.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.norm.running_var, inside.var(0, ddof=1), atol=1e-12)
    # What the evaluator scored is what the network answers.
    held = fed.test.of(0)
    with torch.no_grad():
        scores = found(fed.x[held])
    loss = F.cross_entropy(scores, fed.y[held], reduction="sum")
    np.testing.assert_allclose(sim.scores()["post", "test"].loss[0, -1, 0], loss)


def test_statistics_are_of_the_model_that_is_used() -> None:
    """After averaging they are those of the averaged weights, of each client's own samples."""
    task, fed = Task(Noisy(), "fc"), federation()
    sim = run(simulation(build("fedavg", task, LOCAL, {}), task, [fed], participation=1.0))
    common = {k: v[0] for k, v in sim.server["params"].items()}
    seen = []
    for client in range(fed.num_clients):
        for point in ("pre", "global"):
            params = sim.params(client, point=point)
            inside = F.linear(fed.x[fed.train.of(client)], *(common[f"body.{k}"] for k in _BOTH))
            torch.testing.assert_close(params["norm.running_mean"], inside.mean(0))
            torch.testing.assert_close(params["norm.running_var"], inside.var(0))
            assert torch.equal(params["norm.weight"], common["norm.weight"])
        seen.append(params["norm.running_mean"])
    assert len({tuple(mean.tolist()) for mean in seen}) == fed.num_clients


_BOTH = ("weight", "bias")


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "ditto", "fedavg-ft", "scaffold"])
def test_statistics_never_travel_and_are_no_state(method: str) -> None:
    """Bytes are those of parameters; nobody keeps statistics from round to round."""
    task = Task(Noisy(), "fc")
    sim = run(simulation(build(method, task, LOCAL, {}), task, two_allocations()))
    assert not [name for name in states(sim) if "running" in name]
    plain = Task(Noisy(norm=False), "fc")
    other = run(simulation(build(method, plain, LOCAL, {}), plain, two_allocations()))
    affine = 2 * 6 * 8  # a scale and a shift of six features in float64
    sent = sim.ledger().bytes_up.sum(1) - other.ledger().bytes_up.sum(1)
    uploads = sim.ledger().participants.sum(1)
    times = {"fedbn": 0, "scaffold": 2}.get(method, 1)
    assert (sent == uploads * affine * times).all()


def test_fedbn_keeps_scales_and_shifts_at_home() -> None:
    """They are private leaves, found by the type of the layer."""
    task = Task(Noisy(), "fc")
    sim = run(simulation(build("fedbn", task, LOCAL, {}), task, [federation()]))
    kept = {name for name in states(sim) if name.startswith("client/")}
    assert kept == {"client/private/norm.weight", "client/private/norm.bias"}


def test_mixtures_have_statistics_for_every_network() -> None:
    """FedEM's components see different activations; the file of a model has all of them."""
    task, fed = Task(Noisy(drop=0.0), "fc"), federation()
    sim = run(simulation(build("fedem", task, LOCAL, {}), task, [fed]))
    params = sim.params(1)
    means = [params["passes"][k]["norm.running_mean"] for k in ("0", "1", "2")]
    x = fed.x[fed.train.of(1)]
    for k, mean in enumerate(means):
        body = {n: v[k] for n, v in params["model"]["params"].items()}
        inside = F.linear(x, body["body.weight"], body["body.bias"])
        torch.testing.assert_close(mean, inside.mean(0))
    held = fed.test.of(1)
    with torch.no_grad():
        scores = sim.network(1)(fed.x[held])
    loss = F.cross_entropy(scores, fed.y[held], reduction="sum")
    np.testing.assert_allclose(sim.scores()["pre", "test"].loss[0, -1, 1], loss, rtol=1e-9)


def test_deep_statistics_follow_from_those_before() -> None:
    """With all samples in one batch, use is training: the second layer sees the same inputs."""
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))
    net = nn.Sequential(*net, nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, 3))
    task, fed = Task(net), federation()
    sim = run(simulation(build("fedavg", task, LOCAL, {}), task, [fed], rounds=1))
    found: Any = sim.network(3)
    x = fed.x[fed.train.of(3)]
    again: Any = copy.deepcopy(found).train()
    for layer in again:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 1.0
    again(x)
    for name in ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var"):
        torch.testing.assert_close(found.get_buffer(name), again.get_buffer(name))


def test_layers_in_evaluation_mode_keep_their_statistics() -> None:
    """A frozen layer is constant, and a live one beside it has statistics of its own."""
    net: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5))
    net.append(nn.Linear(5, 3))
    net[0].running_mean.fill_(0.7)
    net[0].eval()
    task = Task(net)
    assert task.norms == ("2",)
    assert set(task.fixed) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    sim = run(simulation(build("fedavg", task, LOCAL, {}), task, [federation()], rounds=1))
    found: Any = sim.network(0)
    torch.testing.assert_close(found[0].running_mean, net[0].running_mean.double())
    assert found[2].running_mean.abs().max() > 0.01


def test_resumed_runs_have_the_same_bits(tmp_path: Any) -> None:
    """Dropout and BatchNorm add nothing to a checkpoint: what they need follows from it."""
    task = Task(Noisy(), "fc")
    method = build("ditto", task, LOCAL, {})
    straight = run(simulation(method, task, two_allocations(), rounds=4))
    first = simulation(method, task, two_allocations(), rounds=4)
    first.step()
    first.step()
    trees, arrays, meta = first.state()
    again = simulation(method, task, two_allocations(), rounds=4)
    again.load(tree.map(torch.clone, trees), arrays, meta)
    assert_same(outcome(run(again)), outcome(straight))


def test_wherever_it_cannot_be_right_it_is_refused() -> None:
    """No statistics, no batch, rows that are no samples."""
    task, x = Task(Noisy(), "fc"), torch.randn(5, 4)
    params = task.init(0)
    with pytest.raises(ContractError, match=r"norm.*without the statistics of a client.*\.eval"):
        task.logits(params, x)
    with (
        layers.working(torch.zeros(2, dtype=torch.long), padded(x, 4)),
        pytest.raises(ModelError, match="'norm' needs the samples of a batch"),
    ):
        task.logits(params, x[:2])
    folded = Task(nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.BatchNorm1d(2)))
    with (
        layers.working(torch.zeros(2, dtype=torch.long), padded(x, 4)),
        pytest.raises(ModelError, match="got 10 rows of a batch of 5 samples"),
    ):
        folded.logits(folded.init(0), x)


def test_a_result_is_the_same_when_it_is_loaded(tmp_path: Any) -> None:
    """Predictions, files and newcomers, with the statistics of each client."""
    fed = federation()
    with pytest.warns(UserWarning, match=r"BatchNorm \(norm\).*never sent and never averaged"):
        result = sartor.fit(
            "fedavg", fed, model=Noisy(), rounds=2, local=LOCAL, out=tmp_path / "run"
        )
    assert result.config["model"]["statistics"].startswith("of each client")
    again = sartor.load(tmp_path / "run", model=result.model("c0"))
    for name in fed.names:
        a, b = (one.predict(name, fed.x[:7]).scores for one in (result, again))
        np.testing.assert_array_equal(a, b)
    different = [result.predict(name, fed.x[:7]).scores for name in fed.names]
    assert np.abs(different[0] - different[1]).max() > 1e-3
    result.export("c1", tmp_path / "c1.pt")
    kept = torch.load(tmp_path / "c1.pt", weights_only=True)
    mine: Any = result.model("c1")
    assert torch.equal(kept["norm.running_mean"], mine.norm.running_mean)
    joined = again.onboard((fed.x[:20].numpy(), fed.y[:20].numpy()), rounds=1)
    theirs: Any = joined.model("newcomer")
    assert theirs.norm.running_mean.abs().max() > 0
