"""DBE: FedAvg, a private shift of the features, and a pull of their mean to a common one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, Method, changed
from sartor.core.task import Task
from sartor.methods import METHODS, build
from tests.toys import federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
SIZES = np.array([2, 7, 4, 9, 5])


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings: Any) -> Any:
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


class Plain(nn.Module):
    """Features are the inputs times the body; a linear head."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.fc = nn.Linear(2, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.body(x))
        return found


TASK = Task(Plain(), head="fc")


def _leaves() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        k: torch.randn(TASK.module.get_parameter(k).shape, generator=draw).double()
        for k in TASK.leaf_names
    }


def _client_context(mean: Tensor, **hyper: float) -> ClientContext:
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in hyper.items()}
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    return blank._replace(hyper=values, common={"params": _leaves(), "mean": mean})


def _batches(num: int) -> list[Batch]:
    """Draw batches of four samples, the last of them padding."""
    draw = torch.Generator().manual_seed(5)
    mask = torch.tensor([True, True, True, False])
    return [
        Batch(
            torch.randn(4, 2, generator=draw).double(),
            torch.tensor([0, 1, 1, 0]),
            mask,
            None,
            None,
        )
        for _ in range(num)
    ]


def _objective(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Catch the objective that the record descends."""
    caught = {}
    module = import_module("sartor.methods.dbe")
    plain = module.descend

    def watch(task: Task, local: Local, objective: Any, **settings: Any) -> Any:
        caught[settings.get("name", "train")] = objective
        return plain(task, local, objective, **settings)

    monkeypatch.setattr(module, "descend", watch)
    build("dbe", TASK, SGD, {})
    return caught["train"]


# ---- the objective -------------------------------------------------------------------------------


def test_the_pull_has_the_known_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features (1, 3), g = (0, 1), κ = 50, μ = 1: the pull adds 50 · ½ · (½·1 + ½·4) = 62.5."""
    objective = _objective(monkeypatch)
    point = torch.tensor([[1.0, 3.0]]).double().expand(4, 2)
    leaves = {
        **_leaves(),
        "body.weight": torch.eye(2).double(),
        "body.bias": torch.zeros(2).double(),
    }
    work = {
        "params": leaves,
        "mean": torch.ones(2).double(),
        "memory": {"shift": torch.zeros(2).double()},
    }
    batch = _batches(1)[0]._replace(x=point)
    g = torch.tensor([0.0, 1.0]).double()
    values = {
        kappa: objective(work, batch, _client_context(g, mean_strength=kappa, mean_rate=1.0))
        for kappa in (0.0, 50.0)
    }
    assert float(values[50.0][0] - values[0.0][0]) == pytest.approx(62.5, abs=1e-11)
    torch.testing.assert_close(values[50.0][1]["mean"], point[0], rtol=0, atol=1e-14)
    same = objective(work, batch, _client_context(point[0], mean_strength=50.0, mean_rate=1.0))
    assert float(same[0]) == pytest.approx(float(values[0.0][0]), abs=1e-13)


def test_the_pull_on_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slope at feature k of each real sample is κ μ (m̄_k − g_k)/(D b); padding has none."""
    objective = _objective(monkeypatch)
    leaves = {
        **_leaves(),
        "body.weight": torch.eye(2).double(),
        "body.bias": torch.zeros(2).double(),
    }
    before, g = torch.tensor([0.3, -0.2]).double(), torch.tensor([1.0, 2.0]).double()
    work = {"params": leaves, "mean": before, "memory": {"shift": torch.ones(2).double()}}
    batch = _batches(1)[0]
    slopes = []
    for kappa in (0.0, 7.0):
        x = batch.x.clone().requires_grad_()
        ctx = _client_context(g, mean_strength=kappa, mean_rate=0.4)
        loss, changed = objective(work, batch._replace(x=x), ctx)
        slopes.append(torch.autograd.grad(loss, x)[0])
    mean = 0.6 * before + 0.4 * batch.x[:3].mean(0)
    torch.testing.assert_close(changed["mean"].detach(), mean, rtol=0, atol=1e-14)
    wanted = 7.0 * 0.4 * (mean - g) / (2 * 3) * batch.mask[:, None]
    torch.testing.assert_close(slopes[1] - slopes[0], wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("rate", "share"), [(0.1, 0.651322), (1.0, 1.0)])
def test_the_running_mean_of_equal_batches(rate: float, share: float) -> None:
    """After q batches of mean v it is (1 − (1 − μ)^q) v: 0.651322 v for μ = 0.1 and q = 10."""
    method = build("dbe", TASK, SGD, {})
    ctx = _client_context(torch.zeros(2).double(), mean_strength=0.0, mean_rate=rate, local_lr=0.0)
    work = method.begin(method.init_client(_leaves(), ctx), ctx)
    batch = _batches(1)[0]
    for _ in range(10):
        work = method.phases[0].step(work, batch, ctx)
    v = TASK.features(_leaves(), batch.x)[:3].mean(0)
    torch.testing.assert_close(work["mean"], share * v, rtol=1e-6, atol=0)
    torch.testing.assert_close(work["mean"], (1 - (1 - rate) ** 10) * v, rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_training_is_the_plain_loop(momentum: float) -> None:
    """Model and shift move at once by the slopes before the step.

    Momentum belongs to the model alone, and the running mean has no gradient through the past.
    """
    local = replace(SGD, momentum=momentum)
    method = build("dbe", TASK, local, {})
    g = torch.tensor([0.5, -1.0]).double()
    hyper = {"mean_strength": 3.0, "mean_rate": 0.3, "local_lr": 0.1}
    ctx = _client_context(g, **hyper, **({"momentum": momentum} if momentum else {}))
    work = method.begin(method.init_client(_leaves(), ctx), ctx)
    work = method.phases[0].enter(work, ctx)
    params = {k: v.clone().requires_grad_() for k, v in _leaves().items()}
    shift = torch.zeros(2).double().requires_grad_()
    optimisers = (
        torch.optim.SGD(params.values(), 0.1, momentum=momentum),
        torch.optim.SGD([shift], 0.1),
    )
    mean = torch.zeros(2).double()
    for batch in _batches(4):
        work = method.phases[0].step(work, batch, ctx)
        z = batch.x[:3] @ params["body.weight"].T + params["body.bias"]
        mean = 0.7 * mean.detach() + 0.3 * z.mean(0)
        scores = (z + shift) @ params["fc.weight"].T + params["fc.bias"]
        loss = F.cross_entropy(scores, batch.y[:3]) + 3.0 * 0.5 * F.mse_loss(mean, g)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
    for name, leaf in params.items():
        torch.testing.assert_close(work["params"][name], leaf.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(work["memory"]["shift"], shift.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(work["mean"], mean.detach(), rtol=0, atol=1e-13)
    assert float(shift.abs().max().detach()) > 1e-3


def test_the_first_step_of_the_shift() -> None:
    """∂loss/∂r = Wᵀ · mean(softmax − onehot), from r = 0."""
    method = build("dbe", TASK, SGD, {})
    ctx = _client_context(torch.ones(2).double(), mean_strength=50.0, mean_rate=1.0, local_lr=0.1)
    (batch,) = _batches(1)
    work = method.phases[0].step(method.begin(method.init_client(_leaves(), ctx), ctx), batch, ctx)
    odds = torch.softmax(TASK.logits(_leaves(), batch.x[:3]), -1)
    miss = (odds - F.one_hot(batch.y[:3], 2)).mean(0)
    wanted = -0.1 * _leaves()["fc.weight"].T @ miss
    torch.testing.assert_close(work["memory"]["shift"], wanted, rtol=0, atol=1e-14)


def test_the_model_is_the_network_with_shifted_features() -> None:
    """h(f(x) + r) is the network whose head has the bias b + W r, and nothing else changes."""
    method = build("dbe", TASK, SGD, {})
    shift = torch.tensor([0.7, -0.4]).double()
    work = {"params": _leaves(), "memory": {"shift": shift}}
    model = method.use.model(work, None)
    x = _batches(1)[0].x
    wanted = TASK.classify(_leaves(), TASK.features(_leaves(), x) + shift)
    torch.testing.assert_close(TASK.logits(model, x), wanted, rtol=0, atol=1e-14)
    moved = [k for k in model if not torch.equal(model[k], _leaves()[k])]
    assert moved == ["fc.bias"]


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "init_mean"), [(SGD, "full"), (HEAVY, "running"), (KEPT, "running")]
)
def test_without_shift_and_pull_it_is_fedavg_to_the_bit(local: Local, init_mean: str) -> None:
    """κ = 0 and r = 0: the first training leaves neither a trace nor another batch behind."""
    wanted = outcome(_net("fedavg", local))
    options = {"memory": False, "init_mean": init_mean}
    found = outcome(_net("dbe", local, options, hyper={"mean_strength": 0.0}))
    compared = [k for k in wanted if k.startswith(("server", "client", "pre", "post", "grad"))]
    assert len(compared) > 8
    for name in compared:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_with_the_shift_it_is_not_fedavg() -> None:
    """The shift alone, and the pull alone, make another model."""
    plain = states(_net("fedavg"))["server/params/fc.weight"]
    for options, hyper in (({}, {"mean_strength": 0.0}), ({"memory": False}, {})):
        found = states(_net("dbe", SGD, options, hyper=hyper))["server/params/fc.weight"]
        assert np.abs(found - plain).max() > 1e-3


# ---- the first training --------------------------------------------------------------------------


def _after_steps(task: Task, steps: int, rate: float) -> list[Tensor]:
    """Return every client's mean feature after full-batch steps from the initial model."""
    fed, found = federation(), []
    for i in range(5):
        rows = torch.as_tensor(fed.train.of(i))
        params = {k: v.double() for k, v in task.init(0).items()}
        for _ in range(steps):
            leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
            loss = F.cross_entropy(task.logits(leaves, fed.x[rows]), fed.y[rows])
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            params = {k: v - rate * g for (k, v), g in zip(params.items(), slopes, strict=True)}
        found.append(task.features(params, fed.x[rows]).mean(0))
    return found


@pytest.mark.parametrize(
    ("init_mean", "steps"), [("running", 1), ("full", 2)], ids=["running", "full"]
)
def test_the_common_mean_is_that_of_all_clients(init_mean: str, steps: int) -> None:
    """The mean g = Σ (n_i/N) m̄_i over all clients, whoever takes part in rounds.

    With μ = 1 the running mean is that of the last batch, before its step; "full" is after it.
    """
    local = Local(epochs=2, batch=None, lr=0.3)
    sim = _net("dbe", local, {"init_mean": init_mean}, participation=1, rounds=1)
    means = np.stack([m.numpy() for m in _after_steps(net_task(), steps, 0.3)])
    wanted = (SIZES[:, None] * means).sum(0) / SIZES.sum()
    np.testing.assert_allclose(sim.server["mean"][0].numpy(), wanted, atol=1e-13)


def test_the_first_training_is_forgotten() -> None:
    """Round 0 starts from θ⁰ with r = 0 and resting optimisers, and g stays as it is for good."""
    task = net_task()
    sim = simulation(build("dbe", task, KEPT, {}), task, [federation()])
    before = {k: v for k, v in states(sim).items() if k != "server/mean"}
    sim._one_off(
        "prologue", sim.method.schedule.before, {"train": 0.0, "server": 0.0, "evaluate": 0.0}
    )
    after = states(sim)
    for name, leaf in before.items():
        np.testing.assert_array_equal(after[name], leaf, err_msg=name)
    assert np.abs(after["server/mean"]).min() > 0.0
    whole = run(simulation(build("dbe", task, KEPT, {}), task, [federation()]))
    np.testing.assert_array_equal(states(whole)["server/mean"], after["server/mean"])


# ---- what stays and what travels -----------------------------------------------------------------


def test_a_client_that_never_took_part_has_no_shift() -> None:
    """R_i of a client never drawn is exactly 0; that of the others is not."""
    sim = _net("dbe", participation=2, rounds=2)
    drawn: set[int] = set()
    for t in range(2):
        ids, present = Participation.parse(2).draw(0, t, 5)
        drawn |= set(ids[present].tolist())
    shifts = states(sim)["client/memory/shift"][0]
    assert 0 < len(drawn) < 5
    assert {i for i in range(5) if shifts[i].any()} == drawn


def test_the_shift_never_leaves() -> None:
    """Uploads hold the model and, once, the mean; an upload with the shift is stopped."""
    task = net_task()
    method = build("dbe", task, KEPT, {})
    sent = []

    def watch(record: Method) -> Method:
        def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
            kept, upload = record.finish(client, work, ctx)
            sent.append(sorted(upload))
            return kept, upload

        return changed(record, finish=finish)

    watched = changed(watch(method), before=watch(method.schedule.before))
    sim = simulation(watched, task, [federation()], engine="sequential", rounds=1)
    run(sim)
    assert sent[:5] == [["mean"]] * 5
    assert {tuple(s) for s in sent[5:]} == {("params",)}
    assert sorted(sim.server) == ["mean", "params"]
    assert sorted(sim.server["params"]) == sorted(task.leaf_names)
    leaky = changed(method, finish=lambda c, w, s: (c, {"params": w["params"], **w["memory"]}))
    with pytest.raises(ContractError, match="shift"):
        simulation(leaky, task, [federation()]).step()


def test_the_shift_has_no_momentum_to_keep() -> None:
    """A kept optimiser remembers the model's velocity and none of the shift."""
    found = states(_net("dbe", KEPT))
    assert not found["client/velocity/memory/shift"].any()
    assert found["client/memory/shift"].any()
    assert found["client/velocity/params/fc.weight"].any()


def test_what_it_costs() -> None:
    """A round is FedAvg's and D numbers down; once, the model and D down, D up, one training."""
    plain, series = _net("fedavg").ledger(), _net("dbe").ledger()
    np.testing.assert_array_equal(series.bytes_up, plain.bytes_up)
    np.testing.assert_array_equal(series.bytes_down - plain.bytes_down, 5 * 8 * plain.participants)
    np.testing.assert_array_equal(series.gradient_evaluations, plain.gradient_evaluations)
    assert series.forward_evaluations.sum() == 0
    assert series.setup_gradients.tolist() == [2 * SIZES.sum()]
    assert series.setup_bytes.tolist() == [5 * 8 * ((4 * 5 + 5 + 5 * 3 + 3) + 5 + 5)]


def test_the_global_model_has_no_shift() -> None:
    """The point "global" is θ with r = 0; a client's model differs from it in the bias alone."""
    sim = _net("dbe", participation="all", points=("pre", "post", "global"))
    centre, own = sim.params(0, point="global"), sim.params(0)
    for name, leaf in centre.items():
        np.testing.assert_array_equal(leaf, sim.server["params"][name][0])
        assert torch.equal(leaf, own[name]) == (name != "fc.bias")


def test_faults_are_named() -> None:
    """A head without a bias has no room for the shift; a network without a head none at all."""
    with pytest.raises(ConfigError, match="bias=True"):
        build("dbe", Task(Plain(bias=False), head="fc"), SGD, {})
    task = Task(Plain())
    with pytest.raises(ConfigError, match="linear head"):
        simulation(build("dbe", task, SGD, {}), task, [federation(shape=(2,))])
    assert METHODS["dbe"].hyper["mean_rate"].fault("mean_rate", 0.0) is not None
