"""FedPHP: the inherited model, how it grows, and how it teaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.errors import ContractError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, changed
from sartor.methods import METHODS, build
from sartor.methods.fedphp import discrepancy, distillation
from tests.toys import federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
ALL: dict[str, Any] = {"participation": "all"}
WAYS = ("mmd", "mmd_fixed", "kd")


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings: Any) -> Any:
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [federation()], **settings))


def _t(value: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(value, dtype=float), dtype=torch.float64)


def _client_context(**fields: Any) -> ClientContext:
    hyper = {"inherit_weight": 0.9, "horizon": 10.0, "transfer_strength": 0.3, "local_lr": 0.2}
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    return blank._replace(hyper={k: _t(v) for k, v in hyper.items()}, **fields)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, HEAVY, KEPT], ids=["plain", "heavy", "kept"])
@pytest.mark.parametrize("way", WAYS)
def test_no_transfer_is_fedavg(local: Local, way: str) -> None:
    """λ = 0: the global model and the clients' optimisers are FedAvg's, to the bit."""
    wanted = states(_net("fedavg", local))
    found = states(_net("fedphp", local, {"transfer": way}, hyper={"transfer_strength": 0.0}))
    assert len(wanted) >= 4
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_transfer_changes_the_global_model() -> None:
    """Out of the box λ = 0.1 and μ = 0.9: the teacher is heard."""
    wanted, found = states(_net("fedavg")), states(_net("fedphp"))
    assert np.abs(found["server/params/fc.weight"] - wanted["server/params/fc.weight"]).max() > 1e-3
    hyper = METHODS["fedphp"].hyper
    assert (hyper["transfer_strength"].default, hyper["inherit_weight"].default) == (0.1, 0.9)


def test_one_client_without_transfer_is_plain_sgd() -> None:
    """The global model is LocalTrain's, to the bit, whatever is inherited."""
    task, feds = net_task(), [federation(sizes=(11,))]
    hyper = {"transfer_strength": 0.0}
    php = run(simulation(build("fedphp", task, SGD, {}), task, feds, hyper=hyper, rounds=4))
    alone = run(simulation(build("local", task, SGD, {}), task, feds, rounds=4))
    for name, leaf in php.server["params"].items():
        mine = alone.store.gather(alone.context.everybody)["params"][name][:, 0]
        assert torch.equal(leaf, mine), name


def test_without_a_past_the_model_just_trained_is_used() -> None:
    """μ = 0: the HPM is the model that the client trained and sent last."""
    task = net_task()
    method = build("fedphp", task, SGD, {})
    last: dict[int, Any] = {}

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        last[int(ctx.index)] = upload["params"]
        return kept, upload

    watched = changed(method, finish=finish)
    hyper = {"inherit_weight": 0.0}
    sim = run(simulation(watched, task, [federation()], engine="sequential", hyper=hyper, **ALL))
    assert len(last) == 5
    for i, params in last.items():
        for name, leaf in params.items():
            torch.testing.assert_close(sim.params(i)[name], leaf, rtol=0, atol=1e-15)


# ---- what is inherited ---------------------------------------------------------------------------


def _leave(inherited: Any, trained: Any, times: int, **options: Any) -> dict:
    method = build("fedphp", net_task(), SGD, options)
    work = {
        "params": {"w": _t(trained)},
        "inherited": {"w": _t(inherited)},
        "times": torch.tensor(times),
    }
    return method.phases[0].leave(work, _client_context(round=torch.tensor(7)))


def test_the_weight_of_the_past_grows_to_its_cap() -> None:
    """Z = 10: z = 0, 1, 5, 10, 12 gives μ_i = 0, 0.09, 0.45, 0.9, 0.9."""
    for z, mu in ((0, 0.0), (1, 0.09), (5, 0.45), (10, 0.9), (12, 0.9)):
        found = _leave([1.0, 0.0], [0.0, 1.0], z)
        np.testing.assert_allclose(found["inherited"]["w"], [mu, 1 - mu], atol=1e-14)
        assert int(found["times"]) == z + 1
        assert found["params"]["w"].tolist() == [0.0, 1.0]


def test_the_weight_may_follow_the_rounds() -> None:
    """`progress="rounds"`: in round 7 of 10 it is 0.63, however often the client took part."""
    for z in (0, 3):
        found = _leave([1.0], [0.0], z, progress="rounds")
        assert float(found["inherited"]["w"]) == pytest.approx(0.63, abs=1e-14)


def test_three_participations_have_the_known_weights() -> None:
    """The HPM is 0.0162, 0.1638, 0.82 of the local models 1, 2, 3: none of the start is left."""
    inherited: Any = [5.0, 5.0, 5.0]
    for z in range(3):
        inherited = _leave(inherited, np.eye(3)[z], z)["inherited"]["w"]
    np.testing.assert_allclose(inherited, [0.0162, 0.1638, 0.82], atol=1e-14)


def test_absent_clients_keep_what_they_inherited() -> None:
    """A client outside the cohort keeps HPM and counter; a participant has both changed."""
    task = net_task()
    sim = simulation(
        build("fedphp", task, SGD, {}), task, [federation()], rounds=5, participation=2
    )
    changed = set()
    for _ in range(5):
        before = sim.store.gather(sim.context.everybody)
        sim.step()
        after = sim.store.gather(sim.context.everybody)
        came = after["times"][0] - before["times"][0]
        assert sorted(came.tolist()) == [0, 0, 0, 1, 1]
        old, new = (s["inherited"]["fc.weight"][0] for s in (before, after))
        assert ((old != new).flatten(1).any(1) == (came == 1)).all()
        changed |= set(np.flatnonzero(came.numpy()))
    assert len(changed) > 2


def test_the_inherited_model_is_used_and_never_leaves() -> None:
    """It is what both points score and what a user gets; an upload of it would be stopped."""
    task = net_task()
    method = build("fedphp", task, SGD, {})
    sim = run(simulation(method, task, [federation()], participation="all"))
    kept = sim.store.gather(sim.context.everybody)["inherited"]
    for i in range(5):
        for name, leaf in sim.params(i).items():
            assert torch.equal(leaf, kept[name][0, i])
    scores = sim.scores()
    np.testing.assert_array_equal(scores["pre", "test"].loss[0][1:], scores["post", "test"].loss[0])
    centre = sim.params(0, point="global")
    assert not torch.equal(centre["fc.weight"], kept["fc.weight"][0, 0])
    leaky = changed(method, finish=lambda c, w, s: (c, {"inherited": w["inherited"]}))
    with pytest.raises(ContractError, match="inherited"):
        simulation(leaky, task, [federation()]).step()


@pytest.mark.parametrize("first", ["received", "initial"])
def test_the_first_teacher(first: str) -> None:
    """On its first turn a client is taught by what it received, or by the initial model."""
    method = build("fedphp", net_task(), SGD, {"first_teacher": first})
    ctx = _client_context(common={"params": {"w": _t([1.0])}}, index=torch.tensor(0))
    client = method.init_client({"w": _t([-3.0])}, ctx)
    work = method.begin(client, ctx)
    assert float(work["inherited"]["w"]) == (1.0 if first == "received" else -3.0)
    assert float(work["params"]["w"]) == 1.0  # training starts from the global model
    later = {**client, "inherited": {"w": _t([8.0])}, "times": torch.tensor(1)}
    work = method.begin(later, ctx)
    assert float(work["inherited"]["w"]) == 8.0
    assert float(work["params"]["w"]) == 1.0


def test_a_newcomer_uses_the_global_model_until_it_has_trained() -> None:
    """A client in its first state is scored with Θ of the day."""
    task = net_task()
    method = build("fedphp", task, SGD, {})
    sim = run(simulation(method, task, [federation()], rounds=2, participation=2))
    centre = sim.params(0, point="global")
    fresh = (sim.store.gather(sim.context.everybody)["times"][0] == 0).tolist()
    assert any(fresh)
    for i, new in enumerate(fresh):
        assert all(torch.equal(sim.params(i)[k], centre[k]) for k in centre) == new


# ---- how it teaches ------------------------------------------------------------------------------


def _plain_mmd(x: np.ndarray, y: np.ndarray, adaptive: bool = True) -> float:
    """Compute the discrepancy pair by pair."""
    joint = np.concatenate([x, y])
    far = np.array([[((p - q) ** 2).sum() for q in joint] for p in joint])
    b = far.sum() / (len(joint) * (len(joint) - 1)) + 1e-8
    widths = [b / 4, b / 2, b, 2 * b, 4 * b] if adaptive else [20.0, 30.0, 40.0, 100.0]
    kernel = sum(np.exp(-far / w) for w in widths)
    n = len(x)
    return float(np.mean(kernel[:n, :n] + kernel[n:, n:] - kernel[:n, n:] - kernel[n:, :n]))


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_discrepancy_is_its_definition(adaptive: bool) -> None:
    """Sums over pairs, by hand; padded rows do not count; far from the origin as well."""
    draw = np.random.default_rng(0)
    for n, shift in ((2, 0.0), (5, 0.0), (5, 1e4)):
        x, y = draw.normal(size=(n, 3)) + shift, 2 * draw.normal(size=(n, 3)) + 1 + shift
        wanted = _plain_mmd(x, y, adaptive)
        assert wanted > 0.01
        mask = torch.ones(n, dtype=torch.bool)
        found = discrepancy(_t(x), _t(y), mask, adaptive)
        assert float(found) == pytest.approx(wanted, rel=1e-9)
        pad = draw.normal(size=(2, 3)) * 50
        mask = torch.tensor([True] * n + [False] * 2)
        padded = discrepancy(
            _t(np.concatenate([x, pad])), _t(np.concatenate([y, -pad])), mask, adaptive
        )
        assert float(padded) == pytest.approx(wanted, rel=1e-9)


def test_kernel_widths_carry_no_gradient() -> None:
    """The slope is that of fixed widths, at the widths of the batch."""
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(4, 2)), draw.normal(size=(4, 2))
    mask = torch.ones(4, dtype=torch.bool)
    slope = torch.func.grad(lambda h: discrepancy(h, _t(y), mask, True))(_t(x)).numpy()
    joint = np.concatenate([x, y])
    b = np.square(joint[:, None] - joint).sum() / 56 + 1e-8
    for i, k in ((0, 0), (2, 1)):
        ends = []
        for e in (1e-5, -1e-5):
            moved = x.copy()
            moved[i, k] += e
            both = np.concatenate([moved, y])
            far = np.square(both[:, None] - both).sum(-1)
            kernel = sum(np.exp(-far / (b * 2.0**p)) for p in range(-2, 3))
            ends.append((kernel[:4, :4] + kernel[4:, 4:] - 2 * kernel[:4, 4:]).mean())
        assert slope[i, k] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("adaptive", [True, False])
def test_equal_features_have_no_discrepancy_and_no_slope(adaptive: bool) -> None:
    """MMD(h, h) = 0, and so is its gradient."""
    h = _t(np.random.default_rng(2).normal(size=(6, 4)))
    mask = torch.ones(6, dtype=torch.bool)
    assert abs(float(discrepancy(h, h, mask, adaptive))) < 1e-14
    slope = torch.func.grad(lambda x: discrepancy(x, h, mask, adaptive))(h)
    assert float(slope.abs().max()) < 1e-14


def test_a_batch_of_one_sample_has_no_adaptive_discrepancy() -> None:
    """Its widths would follow the one distance, and the slope would grow as 1/distance."""
    mask = torch.tensor([True, False])
    x, y = _t([[1e-3, 0.0], [7.0, 1.0]]), _t([[0.0, 0.0], [2.0, 1.0]])
    slope = torch.func.grad(lambda h: discrepancy(h, y, mask, True))(x)
    assert float(discrepancy(x, y, mask, True)) == 0.0
    assert float(slope.abs().max()) == 0.0
    assert float(discrepancy(x, y, mask, False)) > 0.0


def test_distillation_cools_the_teacher_only() -> None:
    """−Σ softmax(q'/4) log softmax(q) >= the entropy of the teacher; at q = q' it is not 0."""
    draw = np.random.default_rng(3)
    q, teacher = _t(draw.normal(size=(5, 4)) * 3), _t(draw.normal(size=(5, 4)) * 3)
    p = torch.softmax(teacher / 4, -1)
    entropy = -(p * p.log()).sum(-1)
    found = distillation(q, teacher)
    torch.testing.assert_close(found, -(p * torch.log_softmax(q, -1)).sum(-1))
    assert (found > entropy).all()
    assert (distillation(teacher, teacher) > entropy).all()
    torch.testing.assert_close(distillation(teacher / 4, teacher), entropy)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_descends_both_terms_and_leaves_the_teacher(way: str) -> None:
    """One step is −η∇[(1 − λ)CE + λR] by the student alone; padding and the teacher stay out."""
    task, draw = net_task(), np.random.default_rng(4)
    method = build("fedphp", task, SGD, {"transfer": way})
    student, teacher = (tree.map(lambda leaf: leaf.double(), task.init(k)) for k in (0, 1))
    x, y = _t(draw.normal(size=(5, 4))), torch.tensor([0, 1, 2, 1, 0])
    batch = Batch(x, y, torch.tensor([True] * 4 + [False]), None, None)
    work = {"params": student, "inherited": teacher, "times": torch.tensor(1)}
    found = method.phases[0].step(work, batch, _client_context())
    assert found.keys() == work.keys()
    for name, leaf in teacher.items():
        assert torch.equal(found["inherited"][name], leaf)

    def objective(params: dict) -> torch.Tensor:
        hidden, taught = (
            torch.tanh(F.linear(x[:4], p["body.weight"], p["body.bias"])) for p in (params, teacher)
        )
        scores, reported = (
            F.linear(h, p["fc.weight"], p["fc.bias"])
            for h, p in ((hidden, params), (taught, teacher))
        )
        if way == "kd":
            wanted = torch.softmax(reported / 4, -1)
            gap = -(wanted * torch.log_softmax(scores, -1)).sum(-1).mean()
        else:
            gap = discrepancy(hidden, taught, torch.ones(4).bool(), way == "mmd")
        return 0.7 * F.cross_entropy(scores, y[:4]) + 0.3 * gap

    slope = torch.func.grad(objective)(student)
    for name, leaf in student.items():
        torch.testing.assert_close(found["params"][name], leaf - 0.2 * slope[name])


def test_the_teacher_costs_one_forward_pass() -> None:
    """As many samples without a gradient as with one, and the bytes of FedAvg."""
    php, avg = _net("fedphp").ledger(), _net("fedavg").ledger()
    np.testing.assert_array_equal(php.forward_evaluations, php.gradient_evaluations)
    for name in ("gradient_evaluations", "bytes_up", "bytes_down"):
        np.testing.assert_array_equal(getattr(php, name), getattr(avg, name))


@pytest.mark.parametrize("way", WAYS)
def test_the_teacher_matters_from_the_second_turn_on(way: str) -> None:
    """Full participation: round 0 starts at the teacher; later the pull to it moves the scores."""
    runs = [
        outcome(_net("fedphp", SGD, {"transfer": way}, hyper={"transfer_strength": lam}))
        for lam in (0.1, 0.4)
    ]
    gaps = np.abs(runs[0]["post/test/loss"] - runs[1]["post/test/loss"]).max((0, 2))
    assert gaps[-1] > 1e-4
