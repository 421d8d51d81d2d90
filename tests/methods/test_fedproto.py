"""FedProto: own models, and the mean feature of every class as all that is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.local import Local
from sartor.core.method import Batch, Hub, Site
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.methods import METHODS, build
from sartor.methods.fedproto import nearest
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
GD = Local(epochs=1, batch=None, lr=0.3)
SOME = torch.tensor([True, False, True])


def _net(local: Local = SGD, options: dict | None = None, name: str = "fedproto", **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    return run(simulation(method, task, [settings.pop("fed", federation())], **settings))


def _uploads(local: Local, options: dict | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Return what the clients of round 0 send, with their ids and trained models."""
    task = net_task()
    method = build("fedproto", task, local, options or {})
    seen = []

    def finish(client: Any, work: Any, site: Site) -> Any:
        kept, upload = method.finish(client, work, site)
        seen.append({"id": int(site.index), "params": work["params"], **upload})
        return kept, upload

    sim = simulation(
        replace(method, finish=finish),
        task,
        [federation()],
        engine="sequential",
        rounds=1,
        participation="all",
        **settings,
    )
    run(sim)
    return seen


def _class_means(params: Any, i: int, fed: Federation | None = None) -> tuple[Tensor, Tensor]:
    """Return the exact class means (zeros for missing classes) and counts of client i."""
    fed = fed or federation()
    rows = torch.as_tensor(fed.train.of(i))
    z, y = net_task().features(params, fed.x[rows]), fed.y[rows]
    counts = torch.bincount(y, minlength=3)
    means = [z[y == c].mean(0) if counts[c] else torch.zeros(5).double() for c in range(3)]
    return torch.stack(means), counts


def _hub(present: list[bool]) -> Hub:
    blank = Hub(**dict.fromkeys(Hub._fields))
    return blank._replace(present=torch.tensor(present), cohort=torch.arange(len(present)))


def _merged(values: list[float], counts: list[float], average: str, **options: Any) -> float:
    """Merge prototypes of one class and one feature."""
    method = build("fedproto", net_task(), SGD, {"average": average, **options})
    uploads = {
        "prototypes": torch.tensor(values).double().reshape(-1, 1, 1),
        "counts": torch.tensor(counts).double().reshape(-1, 1),
    }
    old = {"prototypes": torch.full((1, 1), 7.0).double(), "seen": torch.tensor([True])}
    return float(method.aggregate(old, uploads, _hub([True] * len(values)))["prototypes"])


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "options"),
    [(SGD, {}), (HEAVY, {"prototypes": "running"}), (KEPT, {"answer": "head"})],
    ids=["plain", "heavy", "kept"],
)
def test_no_pull_is_local_training_to_the_bit(local: Local, options: dict) -> None:
    """λ = 0: models are LocalTrain's in the rounds of the client; only the answers differ."""
    wanted = outcome(_net(local, {"participation": "sampled"}, "local"))
    found = outcome(_net(local, options, hyper={"proto_strength": 0.0}))
    trained = [k for k in wanted if k.startswith("client/")]
    assert trained
    for name in trained:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    for name in ("pre/test/loss", "post/test/loss"):
        same = np.array_equal(found[name], wanted[name])
        assert same == (options.get("answer") == "head")


def test_the_pull_moves_the_models() -> None:
    """Out of the box λ = 1, which is not LocalTrain; round 0 has no prototypes and is."""
    assert METHODS["fedproto"].hyper["proto_strength"].default == 1.0
    first, second = (states(_net(rounds=t))["client/params/body.weight"] for t in (1, 2))
    for found, rounds, same in ((first, 1, True), (second, 2, False)):
        alone = states(_net(SGD, {"participation": "sampled"}, "local", rounds=rounds))
        assert np.array_equal(found, alone["client/params/body.weight"]) == same


def test_before_any_prototype_the_head_answers() -> None:
    """The scores of the initial models are those of the initial network."""
    wanted = outcome(_net(name="local"))["pre/test/loss"][:, 0]
    np.testing.assert_array_equal(outcome(_net())["pre/test/loss"][:, 0], wanted)


# ---- the objective -------------------------------------------------------------------------------


def _step(work: Any, batch: Batch, lam: float, protos: Tensor, seen: Tensor, **options: Any) -> Any:
    values = {"proto_strength": lam, "local_lr": 0.1}
    hyper = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()}
    blank = Site(**dict.fromkeys(Site._fields))
    site = blank._replace(hyper=hyper, common={"prototypes": protos, "seen": seen})
    return build("fedproto", net_task(), SGD, options).phases[0].step(work, batch, site)


def _setting() -> tuple[dict[str, Tensor], Batch, Tensor]:
    draw = torch.Generator().manual_seed(2)
    params = {k: v.double() for k, v in net_task().init(1).items()}
    mask = torch.tensor([True, True, True, True, False])
    x = torch.randn(5, 4, generator=draw).double()
    batch = Batch(x, torch.tensor([0, 1, 2, 2, 0]), mask, None, None)
    return params, batch, torch.randn(3, 5, generator=draw).double()


def test_a_step_is_the_plain_one() -> None:
    """Loss + λ/(bD) Σ ‖f(x_l) − P̄_{y_l}‖², all of it derived by plain autograd.

    A sample without prototype is not pulled anywhere, yet counts in b; padding counts nowhere.
    """
    params, batch, protos = _setting()
    lam = 3.0
    work = _step({"params": params}, batch, lam, protos, SOME)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    z = torch.tanh(batch.x[:4] @ leaves["body.weight"].T + leaves["body.bias"])
    scores = z @ leaves["fc.weight"].T + leaves["fc.bias"]
    gap = sum((z[k] - protos[int(batch.y[k])]).square().sum() for k in (0, 2, 3))
    loss = nn.functional.cross_entropy(scores, batch.y[:4]) + lam * gap / (4 * 5)
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    for (name, leaf), slope in zip(params.items(), slopes, strict=True):
        torch.testing.assert_close(work["params"][name], leaf - 0.1 * slope, rtol=0, atol=1e-14)


def test_features_on_their_prototypes_are_not_pulled() -> None:
    """If f(x_l) = P̄_{y_l} for all samples, the step is LocalTrain's."""
    params, batch, protos = _setting()
    batch = batch._replace(x=batch.x[[0, 1, 2, 2, 0]])
    z = net_task().features(params, batch.x)
    found = _step({"params": params}, batch, 5.0, z[:3], SOME | True)
    wanted = _step({"params": params}, batch, 0.0, protos, SOME)
    for name in params:
        torch.testing.assert_close(
            found["params"][name], wanted["params"][name], rtol=0, atol=1e-15
        )


# ---- prototypes ----------------------------------------------------------------------------------


def test_prototypes_are_class_means_of_the_trained_model() -> None:
    """P_{i,c} and n_{i,c} are exact, after training, over all samples, without an extra ReLU."""
    for sent in _uploads(SGD):
        means, counts = _class_means(sent["params"], sent["id"])
        torch.testing.assert_close(sent["prototypes"], means, rtol=0, atol=1e-14)
        assert sent["counts"].tolist() == counts.tolist()
        assert float(sent["prototypes"].min()) < 0.0


def test_running_prototypes_are_those_of_the_last_epoch() -> None:
    """They come from the features of the last pass, before its steps; earlier passes are gone."""
    still = {"hyper": {"local_lr": 0.0}}
    for local in (SGD, replace(SGD, epochs=3, batch=2)):
        for sent in _uploads(local, {"prototypes": "running"}, **still):
            means, counts = _class_means(sent["params"], sent["id"])
            torch.testing.assert_close(sent["prototypes"], means, rtol=0, atol=1e-14)
            assert sent["counts"].tolist() == counts.tolist()
    once = _uploads(GD)
    twice = _uploads(replace(GD, epochs=2), {"prototypes": "running"})
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a["prototypes"], b["prototypes"], rtol=0, atol=1e-14)
        assert not torch.equal(a["params"]["body.weight"], b["params"]["body.weight"])


def test_one_client_has_the_global_prototypes() -> None:
    """P̄ = P_1, and ``seen`` marks its classes."""
    fed = federation(sizes=(6,), classes=2)  # the third class has no samples
    sim = _net(fed=fed, rounds=1)
    params = {k: torch.from_numpy(states(sim)[f"client/params/{k}"][0, 0]) for k in sim.params(0)}
    means, counts = _class_means(params, 0, fed)
    assert counts.tolist()[2] == 0
    torch.testing.assert_close(sim.server["prototypes"][0], means, rtol=0, atol=1e-14)
    assert sim.server["seen"][0].tolist() == (counts > 0).tolist()


@pytest.mark.parametrize(
    ("counts", "uniform", "count", "printed"), [([5, 5], 2.0, 2.0, 1.0), ([9, 1], 2.0, 1.2, 0.6)]
)
def test_averages_have_the_known_numbers(
    counts: list[float], uniform: float, count: float, printed: float
) -> None:
    """Prototypes 1 and 3: plain mean, mean by counts, and the printed form, which shrinks."""
    assert _merged([1.0, 3.0], counts, "uniform") == pytest.approx(uniform, abs=1e-14)
    assert _merged([1.0, 3.0], counts, "count") == pytest.approx(count, abs=1e-14)
    shares = np.array(counts) / np.sum(counts)
    assert float(shares @ [1.0, 3.0]) / 2 == pytest.approx(printed, abs=1e-14)


@pytest.mark.parametrize("average", ["uniform", "count"])
def test_a_client_without_the_class_does_not_matter(average: str) -> None:
    """Nor does one that is absent, whatever it holds."""
    alone = _merged([1.0, 3.0], [9, 1], average)
    assert _merged([1.0, 3.0, 0.0], [9, 1, 0], average) == alone
    method = build("fedproto", net_task(), SGD, {"average": average})
    uploads = {
        "prototypes": torch.tensor([1.0, 3.0, torch.nan]).double().reshape(-1, 1, 1),
        "counts": torch.tensor([9.0, 1.0, torch.nan]).double().reshape(-1, 1),
    }
    old = {"prototypes": torch.zeros(1, 1).double(), "seen": torch.tensor([False])}
    new = method.aggregate(old, uploads, _hub([True, True, False]))
    assert (float(new["prototypes"]), bool(new["seen"])) == (alone, True)


def test_a_class_that_nobody_brings() -> None:
    """Its prototype is kept, or dropped as in the authors' code; an empty round changes nothing."""
    uploads = {
        "prototypes": torch.tensor([[[5.0], [0.0]]]).double(),
        "counts": torch.tensor([[2.0, 0.0]]).double(),
    }
    old = {"prototypes": torch.tensor([[1.0], [3.0]]).double(), "seen": torch.tensor([False, True])}
    for absent, last, seen in (("keep", 3.0, [True, True]), ("drop", 0.0, [True, False])):
        method = build("fedproto", net_task(), SGD, {"absent": absent})
        new = method.aggregate(old, uploads, _hub([True]))
        assert new["prototypes"].flatten().tolist() == [5.0, last]
        assert new["seen"].tolist() == seen
        same = method.aggregate(old, uploads, _hub([False]))
        assert all(torch.equal(same[k], old[k]) for k in old)


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("usable", [[True] * 4, [True, False, True, False], [False] * 3 + [True]])
def test_the_head_answers_with_the_nearest_prototype(scale: float, usable: list[bool]) -> None:
    """Scores are −‖z − P̄_c‖² up to a number per sample, and classes without P̄ never win."""
    draw = torch.Generator().manual_seed(0)
    protos = scale * torch.randn(4, 6, generator=draw).double()
    z = scale * torch.randn(500, 6, generator=draw).double()
    mask = torch.tensor(usable)
    head = nearest(protos, mask)
    scores = z @ head["weight"].T + head["bias"]
    far = torch.stack([(z - p).square().sum(-1) for p in protos], -1)
    wanted = torch.where(mask, far, torch.inf).argmin(-1)
    assert torch.equal(scores.argmax(-1), wanted)
    gaps = scores + far - z.square().sum(-1, keepdim=True)
    torch.testing.assert_close(gaps[:, mask], 0 * gaps[:, mask], rtol=0, atol=1e-10 * scale**2)
    assert bool((scores[:, ~mask] <= scores.amax(-1, keepdim=True) - 9.999).all())


def test_models_answer_with_the_prototypes_of_their_time() -> None:
    """Before training with the newest P̄; after it with those that the round began with."""
    task = net_task()
    sims = [_net(rounds=t, participation="all") for t in (1, 2)]
    for i in range(5):
        own = {
            k: torch.from_numpy(states(sims[1])[f"client/params/{k}"][0, i])
            for k in Net().state_dict()
        }
        for sim, point in ((sims[1], "pre"), (sims[0], "post")):
            fed, head = federation(), nearest(sim.server["prototypes"][0], sim.server["seen"][0])
            rows = torch.as_tensor(fed.test.of(i))
            scores = task.features(own, fed.x[rows]) @ head["weight"].T + head["bias"]
            right = int((scores.argmax(-1) == fed.y[rows]).sum())
            assert sims[1].scores()[point, "test"].correct[0, -1, i] == right
            loss = float(nn.functional.cross_entropy(scores, fed.y[rows], reduction="sum"))
            assert sims[1].scores()[point, "test"].loss[0, -1, i] == pytest.approx(loss, abs=1e-10)


def test_nearest_own_answers_with_the_classes_of_the_client() -> None:
    """It never names a class that the client did not train on; before training it names any."""
    task, fed = net_task(), federation()
    # Client 1 holds no sample of class 0, client 2 none of class 1.
    rows = [fed.train.of(i) for i in range(5)]
    for i, missing in ((1, 0), (2, 1)):
        rows[i] = rows[i][(fed.y[torch.as_tensor(rows[i])] != missing).numpy()]
    poor = replace(fed, train=Ragged.from_lists(rows))
    method = build("fedproto", task, SGD, {"answer": "nearest_own"})
    sim = run(simulation(method, task, [poor], participation="all"))
    assert sim.server["seen"].all()
    free = _net(fed=poor, participation="all")
    named = []
    for i, missing in ((1, 0), (2, 1)):
        for point in ("pre", "post"):
            scores = task.logits(sim.params(i, point=point), fed.x)
            assert not (scores.argmax(-1) == missing).any()
            named.append(task.logits(free.params(i, point=point), fed.x).argmax(-1) == missing)
    assert torch.stack(named).any()
    blank = simulation(method, task, [poor])
    assert states(blank)["client/held"].all()


# ---- what travels, where it starts ---------------------------------------------------------------


@pytest.mark.parametrize("hidden", [5, 9])
def test_only_prototypes_and_counts_travel(hidden: int) -> None:
    """Up C_i(D + 1) numbers, down those that exist, and a byte of marks; a leaf is stopped."""
    task = Task(Net(hidden=hidden), head="fc")
    method = build("fedproto", task, SGD, {})
    fed = federation()
    sim = run(simulation(method, task, [fed], rounds=2, participation="all"))
    held = sum(len(fed.y[rows].unique()) for rows in map(fed.train.of, range(5)))
    assert held < 15
    assert sim.ledger().bytes_up.tolist() == [[8 * held * (hidden + 1) + 5] * 2]
    assert sim.ledger().bytes_down.tolist() == [[5, 5 * (8 * 3 * hidden + 1)]]  # none, then all
    assert sorted(sim.server) == ["prototypes", "seen"]
    for leaf in task.leaf_names:
        leaky = replace(method, finish=lambda c, w, s, leaf=leaf: (c, {leaf: w["params"][leaf]}))
        with pytest.raises(ContractError, match=leaf.replace(".", r"\.")):
            simulation(leaky, task, [federation()]).step()


def test_the_pass_for_prototypes_is_booked() -> None:
    """One forward pass over the samples after training; none in running mode."""
    for options, passes in (({}, 1), ({"prototypes": "running"}, 0)):
        book = _net(SGD, options, participation="all", rounds=1).ledger()
        assert book.forward_evaluations.tolist() == [[passes * 27]]
        assert book.gradient_evaluations.tolist() == [[2 * 27]]


def test_own_starts_are_shuffled_copies() -> None:
    """Every client has the values of the common leaves in an order of its own; seeds decide it."""
    task = net_task()

    def start(options: dict, seed: int = 0) -> dict[str, np.ndarray]:
        method = build("fedproto", task, SGD, options)
        return states(simulation(method, task, [federation()], seeds=[seed]))

    common, own = start({}), start({"start": "own"})
    for k in task.leaf_names:
        a, b = common[f"client/params/{k}"][0], own[f"client/params/{k}"][0]
        np.testing.assert_array_equal(np.sort(a.reshape(5, -1)), np.sort(b.reshape(5, -1)))
    weight = own["client/params/body.weight"][0]
    assert len({w.tobytes() for w in weight}) == 5
    again = start({"start": "own"})["client/params/body.weight"][0]
    np.testing.assert_array_equal(again, weight)
    fast = _net(SGD, {"start": "own"}, rounds=1)
    slow = _net(SGD, {"start": "own"}, rounds=1, engine="sequential")
    for name, leaf in tree.items(slow.server):
        torch.testing.assert_close(dict(tree.items(fast.server))[name], leaf, rtol=0, atol=1e-12)


def test_faults_are_named() -> None:
    """A head without bias cannot hold prototypes; a network without a linear head has none."""
    bare = Net()
    bare.fc = nn.Linear(5, 3, bias=False)
    with pytest.raises(ConfigError, match="bias=True"):
        build("fedproto", Task(bare, head="fc"), SGD, {})
    task = Task(Net())
    with pytest.raises(ConfigError, match="linear head"):
        simulation(build("fedproto", task, SGD, {}), task, [federation()])
