"""FedEM: shared components, own mixtures, expectation and maximisation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, changed
from sartor.core.task import Task, squared_error
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.methods import build
from sartor.methods.parts.mixture import mixed_scores
from tests.toys import federation, net_task, outcome, quadratic_task, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
ONE = torch.ones((), dtype=torch.float64)


def _sim(
    local: Local = SGD, options: dict | None = None, fed: Federation | None = None, **settings
):
    task = net_task()
    method = build("fedem", task, local, options or {})
    return simulation(method, task, [fed or federation()], **settings)


def _mixtures(sim) -> torch.Tensor:
    found: torch.Tensor = sim.store.gather(sim.context.everybody)["mixture"][0]
    return found


def _losses(task: Task, table: dict, fed: Federation, i: int) -> torch.Tensor:
    """Return ℓ_m of all training samples of a client: (samples, components)."""
    rows = fed.train.of(i)
    num = len(next(iter(table.values())))
    scores = [task.logits({k: v[m] for k, v in table.items()}, fed.x[rows]) for m in range(num)]
    return torch.stack([task.criterion(s, fed.y[rows]) for s in scores], -1)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_one_component_is_fedavg_to_the_bit(local: Local) -> None:
    """M = 1: q = π = 1, and models, scores and bytes are FedAvg's."""
    task = net_task()
    plain = build("fedavg", task, local, {})
    wanted = run(simulation(plain, task, [federation()]))
    found = run(_sim(local, {"components": 1}))
    assert bool((_mixtures(found) == 1.0).all())
    for name, leaf in wanted.server["params"].items():
        assert torch.equal(found.server["params"][name][:, 0], leaf)
    assert_array_equal(found.ledger().bytes_up, wanted.ledger().bytes_up)
    for point in ("pre", "post"):
        ours, theirs = (s.scores()[point, "test"] for s in (found, wanted))
        assert_array_equal(ours.correct, theirs.correct)
        assert_allclose(ours.loss, theirs.loss, atol=1e-12)


@pytest.mark.parametrize(
    ("mixture", "losses", "wanted"),
    [
        ((0.5, 0.5), (0.1, 1.1), (0.731059, 0.268941)),
        ((0.2, 0.3, 0.5), (1.0, 0.5, 2.0), (0.227646, 0.562988, 0.209366)),
        ((0.0, 0.4, 0.6), (0.0, 1.0, 1.0), (0.0, 0.4, 0.6)),
        ((0.0, 1.0), (0.0, 2000.0), (0.0, 1.0)),
    ],
)
def test_the_e_step_has_the_known_numbers(mixture, losses, wanted) -> None:
    """Q = softmax(log π − ℓ); a weight of exactly 0 stays 0, and huge losses are no trouble."""
    task = quadratic_task()
    method = build("fedem", task, SGD, {"components": len(mixture)})
    expect = method.phases[0]
    mask = torch.tensor([True, True, False])
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        mask=mask, num_samples=torch.tensor(2)
    )
    # With curvature 2 and centre 0 the loss of w is w².
    table = {"w": torch.tensor(losses, dtype=torch.float64).sqrt()[:, None]}
    work: Any = {"params": table, "mixture": torch.tensor(mixture, dtype=torch.float64)}
    work = expect.enter(work, ctx)
    x = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 5.0]], dtype=torch.float64)
    for rows, kept in (([1, 3, 3], [True, False, False]), ([0, 3, 3], [True, False, False])):
        batch = Batch(x, torch.zeros(3).long(), torch.tensor(kept), torch.tensor(rows), ONE > 0)
        work = expect.step(work, batch, ctx)
    assert_allclose(work["posterior"][:2], [wanted, wanted], atol=1e-6)
    assert_allclose(expect.leave(work, ctx)["mixture"], wanted, atol=1e-6)


def test_a_round_is_that_of_a_plain_loop() -> None:
    """E-step, weights, M-step with each sample's own q in any order, divisor b, and the average."""
    task, fed = net_task(), federation()
    method = build("fedem", task, HEAVY, {"components": 2})
    train = method.phases[1]
    batches: dict[int, list] = {}

    def step(work, batch, ctx):
        batches.setdefault(int(ctx.index), []).append(batch)
        return train.step(work, batch, ctx)

    watched = changed(method, phases=(method.phases[0], replace(train, step=step)))
    sim = simulation(watched, task, [fed], engine="sequential", rounds=1, participation="all")
    table = {k: v[0].clone() for k, v in sim.server["params"].items()}
    run(sim)
    ends, sizes = [], fed.train.sizes.double()
    for i in range(5):
        q = torch.softmax(math.log(0.5) - _losses(task, table, fed, i), -1)
        assert_allclose(_mixtures(sim)[i], q.mean(0), atol=1e-14)
        nets = []
        for m in range(2):
            net = {k: v[m] for k, v in table.items()}
            speed = tree.zeros_like(net)
            for batch in batches[i]:
                rows = batch.rows[batch.mask]

                def loss(p, rows=rows, q=q, m=m, i=i):
                    mine = fed.train.of(i)[rows]
                    each = task.criterion(task.logits(p, fed.x[mine]), fed.y[mine])
                    return (q[rows, m] * each).sum() / len(rows)

                slope = torch.func.grad(loss)(net)
                speed = {k: 0.9 * speed[k] + slope[k] + 0.01 * net[k] for k in net}
                net = {k: net[k] - 0.05 * speed[k] for k in net}
            nets.append(net)
        ends.append(tree.stack(nets))
    for name, leaf in sim.server["params"].items():
        mean = sum(n * e[name] for n, e in zip(sizes, ends, strict=True)) / sizes.sum()
        assert_allclose(leaf[0], mean, atol=1e-13)


def test_components_start_apart_and_equal_ones_stay_equal() -> None:
    """Starts: the network's own, and its numbers in other orders. Equal components never part."""
    sim = _sim(options={"components": 3})
    start = net_task().init(0)
    for name, leaf in sim.server["params"].items():
        assert torch.equal(leaf[0, 0], start[name].double())
        for m in (1, 2):
            assert not torch.equal(leaf[0, m], leaf[0, 0])
            assert torch.equal(leaf[0, m].flatten().sort()[0], leaf[0, 0].flatten().sort()[0])
        assert not torch.equal(leaf[0, 1], leaf[0, 2])
    sim.server = tree.map(lambda leaf: leaf[:, :1].expand_as(leaf).clone(), sim.server)
    run(sim)
    assert_allclose(_mixtures(sim), 1 / 3, atol=1e-15)
    for name, leaf in sim.server["params"].items():
        assert torch.equal(leaf[0, 1], leaf[0, 0])
        assert not torch.equal(leaf[0, 0], start[name].double())


def test_equal_components_leave_the_weights_and_move_in_proportion_to_them() -> None:
    """Q = π_i, and component m takes SGD steps whose loss is multiplied by π_im."""
    options = {"components": 2}
    sim = _sim(Local(steps=1, batch=None, lr=0.2), options, participation="all", rounds=1)
    sim.server = tree.map(lambda leaf: leaf[:, :1].expand_as(leaf).clone(), sim.server)
    before = {k: v[0].clone() for k, v in sim.server["params"].items()}
    state = sim.store.gather(sim.context.everybody)
    uneven = torch.tensor([0.2, 0.8], dtype=torch.float64).expand(1, 5, 2)
    there = np.ones((1, 5), dtype=bool)
    sim.store.scatter(sim.context.everybody, {**state, "mixture": uneven.clone()}, there, 0)
    run(sim)
    assert_allclose(_mixtures(sim), uneven[0], atol=1e-15)
    for name, leaf in sim.server["params"].items():
        assert_allclose(
            4.0 * (leaf[0, 0] - before[name][0]), leaf[0, 1] - before[name][1], atol=1e-12
        )


def test_weights_stay_on_the_simplex_and_with_the_absent() -> None:
    """π_i ≥ 0 sums to 1; it is kept between rounds, and by a client that sat out."""
    sim = _sim(rounds=4)
    before = _mixtures(sim).clone()
    moved, rested = 0, 0
    for _ in range(4):
        sim.step()
        now = _mixtures(sim)
        assert_allclose(now.sum(-1), 1.0, atol=1e-14)
        assert bool((now >= 0).all())
        same = (now == before).all(-1)
        moved, rested, before = moved + int((~same).sum()), rested + int(same.sum()), now.clone()
    assert moved > 8
    assert rested > 1


def test_the_weights_of_one_sample_are_its_own() -> None:
    """n_i = 1: π_i is q of that sample, and not what the client had before."""
    task, fed = net_task(), federation(sizes=(1, 70, 2))
    method = build("fedem", task, SGD, {"components": 3})
    sim = simulation(method, task, [fed], participation="all", rounds=1)
    table = {k: v[0].clone() for k, v in sim.server["params"].items()}
    run(sim)
    for i in range(3):
        q = torch.softmax(math.log(1 / 3) - _losses(task, table, fed, i), -1)
        assert_allclose(_mixtures(sim)[i], q.mean(0), atol=1e-13)
        assert float((_mixtures(sim)[i] - 1 / 3).abs().max()) > 1e-4


def test_the_kept_weights_enter_the_next_e_step() -> None:
    """The second round's q starts from the first round's π_i, not from 1/M."""
    task, fed = net_task(), federation()
    sim = _sim(participation="all", rounds=2)
    sim.step()
    first = _mixtures(sim).clone()
    table = {k: v[0].clone() for k, v in sim.server["params"].items()}
    sim.step()
    for i in range(5):
        losses = _losses(task, table, fed, i)
        assert_allclose(
            _mixtures(sim)[i], torch.softmax(first[i].log() - losses, -1).mean(0), atol=1e-13
        )


def test_repeated_e_steps_never_lower_the_likelihood() -> None:
    """With θ fixed (a rate of 0), Σ_l log Σ_m π_m exp(−ℓ_m) never falls."""
    task, fed = net_task(), federation()
    sim = _sim(participation="all", rounds=6, hyper={"local_lr": 0.0})
    table = {k: v[0].clone() for k, v in sim.server["params"].items()}
    values = []
    for _ in range(6):
        sim.step()
        values.append(
            [
                float(
                    torch.logsumexp(
                        _mixtures(sim)[i].log() - _losses(task, table, fed, i), -1
                    ).sum()
                )
                for i in range(5)
            ]
        )
    assert bool((np.diff(values, axis=0) > -1e-12).all())
    assert bool((np.diff(values, axis=0) > 1e-6).any())


def test_permuting_the_components_permutes_the_weights() -> None:
    """Another order of the components changes no prediction."""
    turn = [2, 0, 1]
    straight, turned = _sim(KEPT), _sim(KEPT)
    turned.server = tree.map(lambda leaf: leaf[:, turn], turned.server)
    run(straight), run(turned)
    assert_allclose(_mixtures(turned), _mixtures(straight)[:, turn], atol=1e-12)
    for point in ("pre", "post"):
        assert_allclose(
            turned.scores()[point, "test"].loss, straight.scores()[point, "test"].loss, atol=1e-11
        )


def test_probabilities_are_mixed_and_not_logits() -> None:
    """P = Σ_m π_m softmax(logits_m); outputs are mixed for other losses."""
    task = net_task()
    table = tree.stack([task.init(s) for s in (0, 1)])
    table = tree.map(lambda leaf: 3.0 * leaf.double(), table)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    nets = [{k: v[m] for k, v in table.items()} for m in (0, 1)]
    wanted = sum(
        w * torch.softmax(task.logits(n, x), -1) for w, n in zip(weights, nets, strict=True)
    )
    found = mixed_scores(task, table, weights.log(), x)
    assert_allclose(found.exp(), wanted, atol=1e-14)
    alone = mixed_scores(task, table, torch.tensor([0.0, 1.0]).double().log(), x)
    assert_allclose(alone.exp(), torch.softmax(task.logits(nets[1], x), -1), atol=1e-14)
    other = Task(task.module, "fc", squared_error)
    outputs = sum(w * task.logits(n, x) for w, n in zip(weights, nets, strict=True))
    assert_allclose(mixed_scores(other, table, weights.log(), x), outputs, atol=1e-14)


def _two_rules(seed: int = 0) -> Federation:
    """Make four clients whose labels follow a linear rule, and four whose follow its negation."""
    draw = np.random.default_rng(seed)
    x = torch.from_numpy(draw.normal(size=(8 * 60, 3)))
    y = (x @ torch.tensor([1.0, -2.0, 0.5]).double() > 0).long()
    y[4 * 60 :] = 1 - y[4 * 60 :]
    rows = np.arange(8 * 60).reshape(8, 60)
    train, val, test = (
        Ragged.from_lists(list(rows[:, a:b])) for a, b in ((0, 30), (30, 30), (30, 60))
    )
    return Federation(x, y, train, val, test, tuple("abcdefgh"), 2, {})


def test_two_groups_of_clients_find_their_components() -> None:
    """A rule and its negation, M = 2: every π_i tends to a vertex, and accuracy beats FedAvg."""
    fed = _two_rules()
    task = Task(nn.Linear(3, 2), None)
    local = Local(epochs=2, batch=10, lr=0.5)
    found = {}
    for name, options in (("fedavg", {}), ("fedem", {"components": 2})):
        method = build(name, task, local, options)
        sim = simulation(method, task, [fed], rounds=12, participation="all", eval_every=12)
        scores = run(sim).scores()["pre", "test"]
        found[name] = float(scores.correct[0, -1].sum() / scores.count[0].sum())
    first = _mixtures(sim)[:, 0].round()
    assert_allclose(_mixtures(sim).max(-1).values, 1.0, atol=0.05)
    assert first[:4].unique().tolist() != first[4:].unique().tolist()
    assert found["fedem"] > 0.9
    assert found["fedem"] > found["fedavg"] + 0.2


def test_refreshed_weights_are_those_of_the_received_components() -> None:
    """With `refresh_weights` a client (a new one too) is scored with π of one more E-step."""
    task, fed = net_task(), federation()
    sim = run(_sim(options={"refresh_weights": True}, rounds=2))
    plain = run(_sim(rounds=2))
    for name, leaf in states(plain).items():
        assert_array_equal(states(sim)[name], leaf)
    table = {k: v[0] for k, v in sim.server["params"].items()}
    for i in range(5):
        q = torch.softmax(_mixtures(sim)[i].log() - _losses(task, table, fed, i), -1)
        assert_allclose(sim.params(i)["weights"].exp(), q.mean(0), atol=1e-13)
        assert_allclose(plain.params(i)["weights"].exp(), _mixtures(sim)[i], atol=1e-14)
    assert sim.ledger().setup_forward.tolist() == [3 * int(fed.train.sizes.sum())]


def test_fine_tuning_keeps_the_weights_on_the_simplex() -> None:
    """A mixture that trains on is still a mixture."""
    found = run(_sim(options={"finetune_steps": 4}, rounds=2, hyper={"ft_lr": 0.5}))
    plain = run(_sim(rounds=2))
    assert np.isfinite(found.scores()["pre", "test"].loss).all()
    task = net_task()
    for i in range(5):
        model = found.params(i)
        assert not torch.equal(model["weights"], plain.params(i)["weights"])
        sums = (
            mixed_scores(task, model["params"], model["weights"], federation().x[:5]).exp().sum(-1)
        )
        assert_allclose(sums, 1.0, atol=1e-12)


def test_the_ledger() -> None:
    """M times FedAvg's bytes and gradients, and M forward passes for the E-step."""
    task = net_task()
    plain = run(simulation(build("fedavg", task, SGD, {}), task, [federation()])).ledger()
    for num in (1, 3):
        ours = run(_sim(options={"components": num})).ledger()
        for name in ("bytes_up", "bytes_down", "gradient_evaluations"):
            assert_array_equal(getattr(ours, name), num * getattr(plain, name), err_msg=name)
        # Two epochs of gradients, one pass forward.
        assert_array_equal(2 * ours.forward_evaluations, ours.gradient_evaluations)


def test_samples_or_clients_are_counted() -> None:
    """`weights` says how components are averaged; every component has the same weights."""
    by_samples, evenly = (
        outcome(run(_sim(options={"weights": w}))) for w in ("samples", "uniform")
    )
    name = "server/params/fc.weight"
    assert np.abs(by_samples[name] - evenly[name]).max() > 1e-4


def test_what_is_private_and_what_is_refused() -> None:
    """π and q stay at home; there is no global model; M must be at least 1."""
    method = build("fedem", net_task(), SGD, {})
    assert method.wire.private("mixture")
    assert method.wire.private("posterior")
    assert method.use.centre is None
    assert method.use.headline == "pre"
    with pytest.raises(ConfigError, match="components must be >= 1, got 0"):
        build("fedem", net_task(), SGD, {"components": 0})
