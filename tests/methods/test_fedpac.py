"""FedPAC: class statistics, alignment with centroids, and heads combined by a small programme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, ServerContext
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.methods import METHODS, build
from sartor.methods.fedpac import collaboration
from tests.toys import federation, net_task, outcome, run, simulation, two_allocations

SGD = Local(epochs=2, batch=3, lr=0.2)
FULL = Local(epochs=2, batch=None, lr=0.1)
KEPT = replace(FULL, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
TASK = net_task()


def _mix(h: Any, v: Any, present: Any = None, cutoff: float = 1e-3) -> np.ndarray:
    h, v = np.asarray(h, dtype=float), np.asarray(v, dtype=float)
    there = torch.ones(len(v), dtype=torch.bool) if present is None else torch.tensor(present)
    rows = torch.from_numpy(h.reshape(len(v), -1, 1))
    return collaboration(rows, torch.from_numpy(v), there, cutoff).numpy()


def _sim(hyper: dict | None = None, local: Local = FULL, rounds: int = 3, **kind: Any) -> Any:
    method = build("fedpac", TASK, local, kind.pop("options", {}))
    feds = kind.pop("feds", [federation()])
    return run(simulation(method, TASK, feds, hyper=hyper or {}, rounds=rounds, **kind))


# ---- who helps whom ------------------------------------------------------------------------------


def test_two_clients_have_a_closed_form() -> None:
    """α_11 = (Δ + v_2)/(Δ + v_1 + v_2) with Δ = ‖h_1 − h_2‖², and the same from the other side."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        h, v = draw.normal(size=(2, 5)), draw.exponential(size=2)
        apart = np.square(h[0] - h[1]).sum()
        first = (apart + v[1]) / (apart + v.sum())
        second = (apart + v[0]) / (apart + v.sum())
        wanted = [[first, 1 - first], [1 - second, second]]
        np.testing.assert_allclose(_mix(h, v, cutoff=0.0), wanted, atol=1e-12)


def test_the_worked_example_of_two_clients_from_their_samples() -> None:
    """Five (1,0) of class 0 and five (0,1) of class 1 against ten (1,0): v = (0.05, 0), Δ = 0.5."""
    first = _statistics([[1, 0]] * 5 + [[0, 1]] * 5, [0] * 5 + [1] * 5)
    second = _statistics([[1, 0]] * 10, [0] * 10)
    np.testing.assert_allclose(first["h"], [[0.5, 0], [0, 0.5], [0, 0]])
    assert float(first["variance"]) == pytest.approx(0.05)
    assert float(second["variance"]) == 0.0
    h, v = (torch.stack([first[k], second[k]]) for k in ("h", "variance"))
    assert float((h[0] - h[1]).square().sum()) == pytest.approx(0.5)
    found = collaboration(h, v, torch.tensor([True, True]), 1e-3)
    np.testing.assert_allclose(found, [[0.90909, 0.09091], [0, 1]], atol=5e-6)


def test_equal_statistics_are_weighted_by_precision() -> None:
    """Equal h: α_j ∝ 1/v_j; v = (0.1, 0.2, 0.4) gives (4/7, 2/7, 1/7) to everybody."""
    found = _mix(np.ones((3, 4)), [0.1, 0.2, 0.4])
    np.testing.assert_allclose(found, [[4 / 7, 2 / 7, 1 / 7]] * 3, atol=1e-12)


def test_others_may_jointly_replace_the_own_head() -> None:
    """H = (0, 1, −1), v = (1, 0.1, 0.1): client 1 gets (1/21, 10/21, 10/21)."""
    found = _mix([0, 1, -1], [1, 0.1, 0.1])
    np.testing.assert_allclose(found[0], [1 / 21, 10 / 21, 10 / 21], atol=1e-12)


def test_no_variance_and_nobody_else_keep_the_own_head() -> None:
    """V_i = 0 makes e_i the best; so does being alone; both exactly."""
    found = _mix([0, 1, 1, -2], [0, 0.1, 0.0, 0.3])
    np.testing.assert_array_equal(found[[0, 2]], np.eye(4)[[0, 2]])
    np.testing.assert_array_equal(_mix([3], [0.7]), [[1.0]])


def test_small_weights_are_dropped_and_the_rest_sum_to_one() -> None:
    """A weight below ε is zero, the others grow by what it had; rows stay on the simplex."""
    h, v = [0, 0, 30], [0.1, 0.1, 1.0]
    raw, cut = _mix(h, v, cutoff=0.0), _mix(h, v, cutoff=1e-3)
    assert 0 < raw[0, 2] < 1e-3
    assert cut[0, 2] == 0
    np.testing.assert_allclose(cut.sum(1), 1.0, atol=1e-15)
    np.testing.assert_allclose(cut[0, :2], raw[0, :2] / raw[0, :2].sum(), atol=1e-12)
    draw = np.random.default_rng(1)
    rows = _mix(draw.normal(size=(30, 6)), draw.exponential(size=30))
    assert rows.min() >= 0
    assert ((rows == 0) | (rows >= 1e-3)).all()
    np.testing.assert_allclose(rows.sum(1), 1.0, atol=1e-14)


def test_a_tiny_variance_still_counts() -> None:
    """Variances far below 0.01 decide: no eigenvalue is dropped."""
    found = _mix(np.ones((3, 4)), [1e-6, 2e-6, 4e-6])
    np.testing.assert_allclose(found, [[4 / 7, 2 / 7, 1 / 7]] * 3, atol=1e-9)


def test_absent_clients_have_no_weight() -> None:
    """The weights of those present are those of the cohort without the absent."""
    draw = np.random.default_rng(2)
    h, v, there = (
        draw.normal(size=(5, 3)),
        draw.exponential(size=5),
        [True, False, True, True, False],
    )
    found = _mix(h, v, present=there)
    np.testing.assert_allclose(found[np.ix_(there, there)], _mix(h[there], v[there]), atol=1e-12)
    assert not found[np.ix_(there, ~np.array(there))].any()


# ---- statistics ----------------------------------------------------------------------------------


def _statistics(features: Any, labels: Any, batch: int = 4) -> dict:
    """Run the first phase on samples whose features are given, in padded batches."""
    x, y = torch.tensor(features, dtype=torch.float64), torch.tensor(labels)
    net = _Flat(x.shape[1])
    method = build("fedpac", net, FULL, {})
    phase, ctx = method.phases[0], ClientContext(**dict.fromkeys(ClientContext._fields))
    params = {k: v.double() for k, v in net.init(0).items()}
    params["body.weight"] = torch.eye(x.shape[1], dtype=torch.float64)
    params["body.bias"] = torch.zeros(x.shape[1], dtype=torch.float64)
    work = phase.enter({"params": params}, ctx)
    for first in range(0, len(x), batch):
        rows = torch.arange(first, first + batch)
        mask = rows < len(x)
        rows = torch.where(mask, rows, 0)
        work = phase.step(work, Batch(x[rows], y[rows], mask, rows, None), ctx)
    found: dict = phase.leave(work, ctx)
    return found


def _Flat(dim: int) -> Any:
    """Return a task whose features are its inputs."""
    from sartor.core.task import Task

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.body(x))

    return Task(Linear(), head="fc")


def test_the_statistics_are_those_of_the_outer_products() -> None:
    """H is the mean of onehot(y) ⊗ f, and v the trace of its covariance over n; padding is out."""
    draw = np.random.default_rng(3)
    for num in (1, 2, 7, 10):
        f, y = draw.normal(size=(num, 4)), draw.integers(0, 3, num)
        found = _statistics(f, y)
        outer = np.eye(3)[y][:, :, None] * f[:, None, :]
        np.testing.assert_allclose(found["h"], outer.mean(0), atol=1e-14)
        spread = np.square(outer - outer.mean(0)).sum() / num
        assert float(found["variance"]) == pytest.approx(spread / num, abs=1e-14)
        assert float(found["variance"]) >= 0
        for c in range(3):
            mean = f[y == c].mean(0) if (y == c).any() else np.zeros(4)
            np.testing.assert_allclose(found["means"][c], mean, atol=1e-14)


# ---- a round by hand -----------------------------------------------------------------------------


def _by_hand(fed: Federation, rounds: int, lam: float, alone: bool, local: Local) -> dict:
    """Run FedPAC with plain autograd, full batches and everybody present."""
    params = {k: v.double() for k, v in TASK.init(0).items()}
    num, names = fed.num_clients, sorted(params)
    body = {k: params[k] for k in names if TASK.is_body(k)}
    heads = [{k: params[k] for k in names if TASK.is_head(k)} for _ in range(num)]
    kept = [{k: torch.zeros_like(v) for k, v in body.items()} for _ in range(num)]
    centroids, seen = torch.zeros(3, 5).double(), torch.zeros(3, dtype=torch.bool)
    lists = [torch.as_tensor(fed.train.of(i)) for i in range(num)]
    data = [(fed.x[rows], fed.y[rows]) for rows in lists]

    def train(free: dict, fixed: dict, loss: Any, rate: float, epochs: int, velocity: dict) -> dict:
        for _ in range(epochs):
            free = {k: v.detach().requires_grad_() for k, v in free.items()}
            slope = torch.autograd.grad(loss({**free, **fixed}), list(free.values()))
            for (k, w), g in zip(list(free.items()), slope, strict=True):
                velocity[k] = local.momentum * velocity[k] + g + local.weight_decay * w.detach()
                free[k] = w.detach() - rate * velocity[k]
        return free

    for _ in range(rounds):
        h, v, bodies, sums, counts = [], [], [], torch.zeros(3, 5).double(), torch.zeros(3).double()
        for i, (x, y) in enumerate(data):
            f, hot = TASK.features(body, x), F.one_hot(y, 3).double()
            outer = hot[:, :, None] * f[:, None, :]
            h.append(outer.mean(0))
            v.append((outer - outer.mean(0)).square().sum() / len(y) ** 2)
            means = (hot.mT @ f) / hot.sum(0).clamp(min=1)[:, None]
            target = torch.where(seen[:, None], centroids, means)[y]

            def plain(p: dict, x: Any = x, y: Any = y) -> torch.Tensor:
                return F.cross_entropy(TASK.logits(p, x), y)

            pull = lam if seen.any() else 0.0

            def aligned(
                p: dict, x: Any = x, y: Any = y, target: Any = target, pull: float = pull
            ) -> torch.Tensor:
                return plain(p, x, y) + pull * F.mse_loss(TASK.features(p, x), target)

            rest = {k: torch.zeros_like(w) for k, w in heads[i].items()}
            heads[i] = train(heads[i], body, plain, 0.3, 2, rest)
            if not local.keeps:
                kept[i] = {k: torch.zeros_like(w) for k, w in body.items()}
            bodies.append(train(body, heads[i], aligned, local.lr, local.epochs, kept[i]))
            sums, counts = sums + hot.mT @ TASK.features(bodies[-1], x), counts + hot.sum(0)
        p = torch.tensor([len(y) for _, y in data]).double()
        p = p / p.sum()
        body = {k: sum(p[i] * b[k] for i, b in enumerate(bodies)) for k in body}
        centroids = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centroids)
        seen = seen | (counts > 0)
        mix = _mix(torch.stack(h).numpy(), torch.stack(v).numpy())
        mix = np.eye(num) if alone else mix
        heads = [
            {k: sum(float(mix[i, j]) * heads[j][k] for j in range(num)) for k in heads[0]}
            for i in range(num)
        ]
    return {"body": body, "heads": tree.stack(heads), "centroids": centroids}


@pytest.mark.parametrize("local", [FULL, KEPT], ids=["plain", "kept"])
def test_three_rounds_are_those_of_a_plain_loop(local: Local) -> None:
    """Statistics, head, extractor, centroids and heads agree with autograd, client by client."""
    fed = federation(4, sizes=(3, 9, 4, 6, 2))
    hyper = {"align_strength": 0.7, "head_lr": 0.3}
    sim = _sim(hyper, local, feds=[fed], participation="all", options={"head_epochs": 2})
    wanted = _by_hand(fed, 3, 0.7, alone=False, local=local)
    for name, leaf in tree.items(wanted):
        found = dict(tree.items(sim.server))[name][0]
        np.testing.assert_allclose(found, leaf.detach(), rtol=0, atol=1e-11, err_msg=name)
    alone = _by_hand(fed, 3, 0.7, alone=True, local=local)
    apart = alone["heads"]["fc.weight"] - wanted["heads"]["fc.weight"]
    assert float(apart.abs().max()) > 1e-3


def test_without_alignment_or_help_it_is_fedrep() -> None:
    """Λ = 0 and forced α = e_i: FedRep with one head epoch and E body epochs, weighted by n_i."""
    fed = federation(4, sizes=(3, 9, 4, 6, 2))
    fed = replace(fed, train=Ragged.from_lists([fed.train.of(i)[:1] for i in range(5)]))
    hyper = {"align_strength": 0.0, "head_lr": 0.1}
    found = outcome(_sim(hyper, feds=[fed], participation="all"))  # one sample each: v_i = 0
    rep = build("fedrep", TASK, FULL, {"head_epochs": 1, "rule": "normalized"})
    wanted = outcome(run(simulation(rep, TASK, [fed], hyper={"head_lr": 0.1}, participation="all")))
    for point in ("pre", "post"):
        name = f"{point}/test/loss"
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-12)


def test_the_first_round_is_not_aligned() -> None:
    """At t = 0 there are no centroids, and λ changes nothing; one round later it does."""
    first = [outcome(_sim({"align_strength": lam}, rounds=1)) for lam in (0.0, 5.0)]
    second = [outcome(_sim({"align_strength": lam}, rounds=2)) for lam in (0.0, 5.0)]
    name = "server/body/body.weight"
    np.testing.assert_array_equal(first[0][name], first[1][name])
    assert np.abs(second[0][name] - second[1][name]).max() > 1e-3


def test_a_class_without_a_centroid_is_aligned_with_the_own_mean() -> None:
    """The target is c_y where the class was seen, and the client's own mean where it was not."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    common, own = (torch.randn(3, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    params = {k: v.double() for k, v in TASK.init(0).items()}
    phase = build("fedpac", TASK, FULL, {}).phases[2]
    hyper = {"local_lr": 0.1, "align_strength": 2.0}
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
        hyper={k: torch.tensor(v, dtype=torch.float64) for k, v in hyper.items()},
        common={"centroids": common, "seen": torch.tensor([True, False, True])},
    )
    batch = Batch(x, y, torch.ones(6, dtype=torch.bool), None, None)
    found = phase.step({"params": params, "means": own}, batch, ctx)["params"]
    free = {k: v.clone().requires_grad_() for k, v in params.items()}
    target = torch.stack([common[0], own[1], common[2]])[y]
    loss = F.cross_entropy(TASK.logits(free, x), y)
    (loss + 2.0 * F.mse_loss(TASK.features(free, x), target)).backward()
    for name, leaf in free.items():
        moved = params[name] - 0.1 * leaf.grad if TASK.is_body(name) else params[name]
        torch.testing.assert_close(found[name], moved, rtol=0, atol=1e-13)


def _aggregate(server: dict, uploads: dict, present: list) -> dict:
    num = len(present)
    ctx = ServerContext(
        hyper={"local_lr": torch.tensor(0.1, dtype=torch.float64)},
        key=None,
        round=None,
        sizes=torch.arange(1, num + 1),
        cohort=torch.arange(num),
        present=torch.tensor(present),
    )
    found: dict = build("fedpac", TASK, FULL, {}).aggregate(server, uploads, ctx)
    return found


def test_centroids_are_weighted_by_counts_and_remembered() -> None:
    """C_c = Σ n_ic ĉ_ic / Σ n_ic over those who have c; a class nobody brought keeps its own."""
    draw = torch.Generator().manual_seed(0)
    params = {k: v.double() for k, v in TASK.init(0).items()}
    body = tree.select(params, TASK.is_body)
    table = tree.map(lambda leaf: leaf.expand(3, *leaf.shape).clone(), params)
    means = torch.randn(3, 3, 5, generator=draw, dtype=torch.float64)
    counts = torch.tensor([[4.0, 0, 0], [1, 3, 0], [9, 9, 9]], dtype=torch.float64)
    server = {
        "body": body,
        "heads": tree.select(table, TASK.is_head),
        "centroids": torch.full((3, 5), 7.0, dtype=torch.float64),
        "seen": torch.tensor([False, True, False]),
    }
    uploads = {
        "body": tree.select(table, TASK.is_body),
        "head": tree.select(table, TASK.is_head),
        "sums": means * counts[:, :, None],
        "counts": counts,
        "h": torch.randn(3, 3, 5, generator=draw, dtype=torch.float64),
        "variance": torch.ones(3, dtype=torch.float64),
    }
    after = _aggregate(server, uploads, [True, True, False])
    np.testing.assert_allclose(after["centroids"][0], 0.8 * means[0, 0] + 0.2 * means[1, 0])
    np.testing.assert_allclose(after["centroids"][1], means[1, 1])
    assert (after["centroids"][2] == 7.0).all()
    assert after["seen"].tolist() == [True, True, False]
    nobody = _aggregate(server, uploads, [False] * 3)
    for name, leaf in tree.items(server):
        assert torch.equal(dict(tree.items(nobody))[name], leaf), name


def test_broken_statistics_leave_everybody_the_own_head() -> None:
    """A diverged client's NaN is no exception: the heads of the round stay with their owners."""
    h, v = torch.randn(4, 3, 5, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    h[1, 0, 0] = torch.nan
    found = collaboration(h, v, torch.ones(4, dtype=torch.bool), 1e-3)
    assert torch.equal(found, torch.eye(4, dtype=torch.float64))


def test_weights_and_heads_belong_to_the_same_client() -> None:
    """A cohort in another order gives the same head to the same client."""
    order = [3, 1, 4, 0, 2]
    draw = np.random.default_rng(8)
    h, v = draw.normal(size=(5, 6)), draw.exponential(size=5)
    np.testing.assert_allclose(
        _mix(h[order], v[order]), _mix(h, v)[np.ix_(order, order)], atol=1e-12
    )


def test_an_absent_client_keeps_its_head() -> None:
    """Only the heads of the round's participants change."""
    sim = _sim(rounds=1, participation=2)
    heads = sim.server["heads"]["fc.weight"][0]
    start = TASK.init(0)["fc.weight"].double()
    assert sum(not torch.equal(head, start) for head in heads) == 2


def test_the_bytes_of_a_round() -> None:
    """Down |θ| + CD; up |θ| + 2C_i·D + C_i + 1; a byte of marks: C = 3, D = 5, |θ| = 43."""
    feds = two_allocations()
    ledger = _sim(feds=feds, participation="all").ledger()
    assert (ledger.bytes_down[:, 0] == 5 * (8 * 43 + 1)).all()  # there are no centroids yet
    assert (ledger.bytes_down[:, 1:] == 5 * (8 * (43 + 15) + 1)).all()
    for found, fed in zip(ledger.bytes_up, feds, strict=True):
        held = sum(len(fed.y[rows].unique()) for rows in map(fed.train.of, range(5)))
        assert held < 15
        assert (found == 5 * (8 * (43 + 1) + 1) + 8 * 11 * held).all()


def test_the_extra_passes_are_counted() -> None:
    """Two passes without a gradient, one head epoch and E body epochs over all samples."""
    ledger = _sim(local=replace(SGD, drop_last=True), participation="all").ledger()
    samples = int(federation().train.sizes.sum())
    assert ledger.forward_evaluations.tolist() == [[2 * samples] * 3]
    whole = _sim(local=SGD, participation="all").ledger()
    assert whole.gradient_evaluations.tolist() == [[3 * samples] * 3]


def test_a_newcomer_receives_the_mean_head() -> None:
    """The message has the form of the others, and the plain mean of all heads in it."""
    sim = _sim()
    method = build("fedpac", TASK, FULL, {})
    server = tree.map(lambda leaf: leaf[0], sim.server)
    assert method.newcomer.message is not None
    message = method.newcomer.message(server, None)
    known = method.address(server, torch.tensor(2), None)
    assert all(tree.leaves(tree.map(lambda a, b: a.shape == b.shape, message, known)))
    np.testing.assert_allclose(message["head"]["fc.bias"], server["heads"]["fc.bias"].mean(0))


def test_the_default_aligns() -> None:
    """Out of the box λ = 1, as in the paper."""
    assert METHODS["fedpac"].hyper["align_strength"].default == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_epochs": 0}, "head_epochs must be >= 1, got 0"),
        ({"cutoff": 1.0}, "cutoff must be >= 0 and < 1, got 1"),
        ({"cutoff": -0.1}, "0 keeps every weight"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """An option that cannot be right is refused with the way to fix it."""
    with pytest.raises(ConfigError, match=words):
        build("fedpac", TASK, FULL, options)
