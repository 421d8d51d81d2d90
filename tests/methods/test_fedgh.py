"""FedGH: own extractors, and one head that the server trains on class means."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import ClientContext, ServerContext, changed
from sartor.core.task import Task
from sartor.data.split import Ragged
from sartor.methods import METHODS, build
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)


def _net(local: Local = SGD, options: dict | None = None, name: str = "fedgh", **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [settings.pop("fed", federation())], **settings))


class Small(nn.Module):
    """Two features, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.body(x))
        return found


TWO = Task(Small(), head="fc")


def _server_context(rate: float, slots: int = 1, seed: int = 0, **changes: Any) -> ServerContext:
    ctx = ServerContext(
        hyper={"server_lr": torch.tensor(rate, dtype=torch.float64)},
        key=rng.key(seed),
        round=torch.tensor(0),
        sizes=torch.ones(slots, dtype=torch.int64),
        cohort=torch.arange(slots),
        present=torch.ones(slots, dtype=torch.bool),
    )
    return ctx._replace(**changes)


def _zero(task: Task = TWO) -> dict[str, Any]:
    shapes = {k: p.shape for k, p in task.module.named_parameters() if task.is_head(k)}
    return {"head": {k: torch.zeros(shape).double() for k, shape in shapes.items()}}


def _pairs(slots: int, classes: int = 2, dim: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    means = torch.randn(slots, classes, dim, generator=draw).double()
    return {"means": means, "held": torch.ones(slots, classes).bool()}


def _by_hand(head: dict[str, Tensor], batches: list[list[tuple[Tensor, int]]], rate: float) -> Any:
    """Step along (p − e_c) rᵀ and p − e_c, averaged over each batch."""
    weight, bias = head["fc.weight"], head["fc.bias"]
    for batch in batches:
        miss = [torch.softmax(weight @ r + bias, 0) - torch.eye(len(bias))[c] for r, c in batch]
        by_weight = sum(torch.outer(m, r) for m, (r, _) in zip(miss, batch, strict=True))
        weight = weight - rate * by_weight / len(batch)
        bias = bias - rate * sum(miss) / len(batch)
    return weight, bias


def _is(found: dict[str, Any], wanted: tuple[Tensor, Tensor], atol: float = 1e-13) -> bool:
    pairs = ((found["head"]["fc.weight"], wanted[0]), (found["head"]["fc.bias"], wanted[1]))
    return all(torch.allclose(a, b.to(a.dtype), rtol=0.0, atol=atol) for a, b in pairs)


# ---- the server ----------------------------------------------------------------------------------


def test_one_pair_has_the_known_numbers() -> None:
    """Zero head, r = (1, 0), c = 0, η_s = 1: W = [[½, 0], [−½, 0]], b = (½, −½)."""
    method = build("fedgh", TWO, SGD, {})
    uploads = {
        "means": torch.tensor([[[1.0, 0.0], [9.0, 9.0]]]).double(),
        "held": torch.tensor([[True, False]]),
    }
    head = method.aggregate(_zero(), uploads, _server_context(1.0))["head"]
    assert head["fc.weight"].tolist() == [[0.5, 0.0], [-0.5, 0.0]]
    assert head["fc.bias"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(("size", "epochs"), [(1, 1), (2, 1), (None, 1), (1, 2)])
def test_the_pass_is_sgd_over_the_pairs_in_some_order(size: int | None, epochs: int) -> None:
    """Three pairs among holes are seen once a pass, in full batches of b_s, the last one shorter.

    The result is that of one of the orders, and different keys take different ones.
    """
    uploads = {**_pairs(3), "held": torch.tensor([[1, 0], [0, 1], [1, 1]]).bool()}
    there = torch.tensor([True, True, False])
    uploads["means"][2] = torch.nan  # the third client is absent
    uploads = {k: torch.cat([v, v[:1]]) for k, v in uploads.items()}  # and a fourth is like it
    uploads["means"][3] *= -2.0
    there = torch.cat([there, torch.tensor([True])])
    pairs = [(uploads["means"][s, c], c) for s, c in ((0, 0), (1, 1), (3, 0))]
    options = {"server_batch": size, "server_epochs": epochs}
    method = build("fedgh", TWO, replace(SGD, batch=None), options)
    width = size or 3
    orders = list(permutations(pairs))
    runs = [[a] if epochs == 1 else [a, b] for a in orders for b in orders[: epochs * 6 - 6 or 1]]
    wanted = []
    for passes in runs:
        batches = [list(p[k : k + width]) for p in passes for k in range(0, 3, width)]
        wanted.append(_by_hand(_zero()["head"], batches, 0.7))
    taken = set()
    for seed in range(12):
        found = method.aggregate(_zero(), uploads, _server_context(0.7, 4, seed, present=there))
        fits = [k for k, one in enumerate(wanted) if _is(found, one)]
        assert fits
        taken.add(fits[0])
    assert (len(taken) > 1) == (size is not None)
    if epochs == 2:  # the second pass has an order of its own
        assert any(k // 6 != k % 6 for k in taken)


def test_every_pair_has_weight_one() -> None:
    """To first order the head moves by −η_s Σ slopes: each pair once, whoever it comes from."""
    uploads = _pairs(6)
    ctx = _server_context(1e-7, 6, sizes=torch.tensor([1, 5, 100, 2, 7, 40]))
    found = build("fedgh", TWO, SGD, {"server_batch": 1}).aggregate(_zero(), uploads, ctx)
    pairs = [(uploads["means"][s, c], c) for s in range(6) for c in range(2)]
    weight, bias = _by_hand(_zero()["head"], [pairs], 12e-7)
    assert _is(found, (weight, bias), atol=1e-12)
    assert float(weight.abs().max()) > 1e-8


def test_the_order_belongs_to_clients_and_not_to_slots() -> None:
    """The same clients in other slots give the same head, to the bit; another round another."""
    method, uploads = build("fedgh", TWO, SGD, {"server_batch": 1}), _pairs(5)
    turn = torch.tensor([3, 0, 4, 2, 1])
    straight = method.aggregate(_zero(), uploads, _server_context(0.5, 5))
    turned = method.aggregate(
        _zero(), {k: v[turn] for k, v in uploads.items()}, _server_context(0.5, 5, cohort=turn)
    )
    later = method.aggregate(_zero(), uploads, _server_context(0.5, 5, key=rng.fold(rng.key(0), 1)))
    for name, leaf in tree.items(straight):
        assert torch.equal(dict(tree.items(turned))[name], leaf)
        assert not torch.equal(dict(tree.items(later))[name], leaf)


def test_small_steps_lower_the_loss_on_the_pairs() -> None:
    """The problem is convex: one pass with small η_s lowers the mean loss of its pairs."""
    task = net_task()
    method = build("fedgh", task, SGD, {"server_batch": 1})
    uploads = _pairs(4, 3, 5)
    server = {"head": {k: v.double() for k, v in task.init(0).items() if task.is_head(k)}}

    def loss(head: Any) -> float:
        scores = task.classify(head, uploads["means"].flatten(0, 1))
        return float(F.cross_entropy(scores, torch.arange(3).repeat(4)))

    losses = [loss(server["head"])]
    for t in range(5):
        server = method.aggregate(server, uploads, _server_context(0.02, 4, seed=t))
        losses.append(loss(server["head"]))
    assert np.all(np.diff(losses) < 0)


def test_an_empty_round_leaves_the_head() -> None:
    """Nobody there: nothing to learn from, even from NaN."""
    method = build("fedgh", TWO, SGD, {"server_batch": 1})
    server = {"head": {k: v + 0.3 for k, v in _zero()["head"].items()}}
    uploads = {k: torch.full_like(v, torch.nan) for k, v in _pairs(2).items()}
    ctx = _server_context(0.5, 2, present=torch.tensor([False, False]))
    found = method.aggregate(server, uploads, ctx)
    for name, leaf in server["head"].items():
        assert torch.equal(found["head"][name], leaf)


def test_the_batch_is_that_of_local_training_unless_given() -> None:
    """Local batches of 3 mean 3 pairs a step on the server."""
    uploads = _pairs(4)
    heads = [
        build("fedgh", TWO, local, options).aggregate(_zero(), uploads, _server_context(0.5, 4))[
            "head"
        ]
        for local, options in (
            (SGD, {}),
            (replace(SGD, batch=7), {"server_batch": 3}),
            (replace(SGD, batch=7), {}),
        )
    ]
    assert torch.equal(heads[0]["fc.weight"], heads[1]["fc.weight"])
    assert not torch.equal(heads[0]["fc.weight"], heads[2]["fc.weight"])


# ---- the clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_without_server_steps_only_the_head_reset_is_left(local: Local) -> None:
    """η_s = 0: the head is the initial one at every download, and the rest is LocalTrain."""
    task = net_task()
    alone = build("local", task, local, {"participation": "sampled"})
    first = {k: v.double() for k, v in task.init(0).items() if task.is_head(k)}

    def begin(client: Any, ctx: ClientContext) -> Any:
        return {**client, "params": {**client["params"], **first}}

    wanted = outcome(run(simulation(changed(alone, begin=begin), task, [federation()])))
    found = outcome(_net(local, hyper={"server_lr": 0.0}))
    for name in filter(task.is_body, task.leaf_names):
        np.testing.assert_array_equal(
            found[f"client/body/{name}"], wanted[f"client/params/{name}"], err_msg=name
        )
    for name, leaf in first.items():
        np.testing.assert_array_equal(found[f"server/head/{name}"][0], leaf)
    for point in ("pre", "post"):
        np.testing.assert_array_equal(found[f"{point}/test/loss"], wanted[f"{point}/test/loss"])


def test_the_head_moves_and_reaches_everybody() -> None:
    """Out of the box the server learns, and all clients are scored with its head."""
    assert METHODS["fedgh"].hyper["server_lr"].default > 0.0
    sim = _net(participation=2)
    first = net_task().init(0)["fc.weight"].double()
    assert float((sim.server["head"]["fc.weight"][0] - first).abs().min()) > 1e-4
    for i in range(5):
        assert torch.equal(sim.params(i)["fc.weight"], sim.server["head"]["fc.weight"][0])
        own = states(sim)["client/body/body.weight"][0, i]
        np.testing.assert_array_equal(sim.params(i)["body.weight"], own)


def test_local_training_does_not_touch_the_servers_head() -> None:
    """The head of the server is a tensor of its own: one client or another may train."""
    heads = [_net(hyper={"server_lr": 0.0}, rounds=t).server["head"]["fc.bias"] for t in (1, 3)]
    assert torch.equal(heads[0][0], net_task().init(0)["fc.bias"].double())
    assert torch.equal(heads[0], heads[1])


def test_uploads_are_exact_class_means_of_the_trained_extractor() -> None:
    """Means over samples, however the classes are spread over batches; no entry for the rest."""
    task, fed = net_task(), federation()
    method = build("fedgh", task, SGD, {})
    seen = []

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = method.finish(client, work, ctx)
        seen.append((int(ctx.index), work["params"], upload))
        return kept, upload

    watched = changed(method, finish=finish)
    run(
        simulation(
            watched,
            task,
            [fed],
            engine="sequential",
            rounds=1,
            participation="all",
            points=("pre",),
        )
    )
    missing = 0
    for i, params, upload in seen:
        rows = torch.as_tensor(fed.train.of(i))
        z, y = task.features(params, fed.x[rows]), fed.y[rows]
        assert sorted(upload) == ["held", "means"]
        for c in range(3):
            has = bool((y == c).any())
            missing += not has
            assert bool(upload["held"][c]) == has
            wanted = z[y == c].mean(0) if has else torch.zeros(5).double()
            torch.testing.assert_close(upload["means"][c], wanted, rtol=0, atol=1e-14)
    assert missing


def test_twice_the_samples_change_nothing_on_the_server() -> None:
    """Every sample of a client twice: the same model, the same pairs, the same head."""
    fed, local = federation(), Local(epochs=2, batch=None, lr=0.3)
    rows = [fed.train.of(i) for i in range(5)]
    rows[1] = torch.cat([rows[1], rows[1]])
    more = replace(fed, train=Ragged.from_lists(rows))
    heads = [
        _net(local, {"server_batch": 1}, fed=f, participation="all").server["head"]["fc.weight"]
        for f in (fed, more)
    ]
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=1e-12)


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [4, 9])
def test_traffic_does_not_depend_on_the_extractor(inputs: int) -> None:
    """Up C_i·D numbers and a byte of marks, down C(D + 1); a leaf of the model is stopped."""
    task = Task(Net(inputs=inputs), head="fc")
    method, fed = build("fedgh", task, SGD, {}), federation(shape=(inputs,))
    series = run(simulation(method, task, [fed], rounds=1, participation="all")).ledger()
    held = sum(len(fed.y[rows].unique()) for rows in map(fed.train.of, range(5)))
    assert held < 15
    assert series.bytes_up.tolist() == [[8 * 5 * held + 5]]
    assert series.bytes_down.tolist() == [[5 * 8 * 3 * 6]]
    assert series.forward_evaluations.tolist() == [[27]]
    for leaf in task.leaf_names:
        leaky = changed(method, finish=lambda c, w, s, leaf=leaf: (c, {leaf: w["params"][leaf]}))
        with pytest.raises(ContractError, match=leaf.replace(".", r"\.")):
            simulation(leaky, task, [fed]).step()


def test_clients_with_different_extractors_share_a_head() -> None:
    """Uploads of two networks of equal D have one form; the server never sees more."""
    uploads = []
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    for inputs in (4, 9):
        task = Task(Net(inputs=inputs), head="fc")
        method = build("fedgh", task, SGD, {})
        params = {k: v.double() for k, v in task.init(inputs).items()}
        sums, counts = torch.randn(3, 5).double(), torch.tensor([2.0, 0.0, 4.0]).double()
        work = {"params": params, "sums": sums, "counts": counts}
        uploads.append(method.finish({}, work, blank)[1])
    head = {"head": {k: v for k, v in params.items() if task.is_head(k)}}
    found = method.aggregate(head, tree.stack(uploads), _server_context(0.1, 2))
    assert float((found["head"]["fc.weight"] - head["head"]["fc.weight"]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"server_batch": 0}, "server_batch must be >= 1, got 0"),
        ({"server_epochs": 0}, "server_epochs must be >= 1, got 0"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """An option that cannot be right is refused, and so is a network without a linear head."""
    with pytest.raises(ConfigError, match=words):
        build("fedgh", net_task(), SGD, options)
    task = Task(Net())
    with pytest.raises(ConfigError, match="linear head"):
        simulation(build("fedgh", task, SGD, {}), task, [federation()])
