"""Methods that share a part of the network: FedPer, LG-FedAvg, FedBN, FedRep, FedBABU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, changed
from sartor.core.task import Task
from sartor.methods import build
from sartor.methods.parts.partial import layers
from sartor.models import lenet5
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.2)
KEPT = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
GD = Local(steps=1, batch=None, lr=0.3)
NAMES = ("fedper", "fedrep", "fedbabu", "lg-fedavg", "fedbn")
BOTH = ("body", "fc")


def _net(name: str, local: Local = SGD, options: dict | None = None, **settings: Any):
    task = net_task()
    method = build(name, task, local, options or {})
    fed = settings.pop("fed", None) or federation()
    return run(simulation(method, task, [fed], **settings))


def full_batch(fed: Any, client: int) -> Batch:
    """Return all training samples of a client."""
    rows = fed.train.of(client)
    return Batch(fed.x[rows], fed.y[rows], torch.ones(len(rows)).bool(), None, None)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("fedper", {"private": ()}), ("lg-fedavg", {"shared": BOTH}), ("fedbn", {})],
)
def test_sharing_everything_is_fedavg(name: str, options: dict, local: Local) -> None:
    """Without private leaves: FedAvg's states, scores and bytes, to the bit."""
    wanted, found = outcome(_net("fedavg", local)), outcome(_net(name, local, options))
    assert sorted(found) == sorted(wanted)
    for key, leaf in wanted.items():
        np.testing.assert_array_equal(found[key], leaf, err_msg=key)


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("fedper", {"private": BOTH}), ("lg-fedavg", {"shared": ()}), ("fedbn", {"private": BOTH})],
)
def test_sharing_nothing_is_local_training(name: str, options: dict, local: Local) -> None:
    """Without shared leaves: LocalTrain in the client's own rounds, to the bit, and no bytes."""
    wanted = outcome(_net("local", local, {"participation": "sampled"}))
    found = outcome(_net(name, local, options))
    for key, leaf in wanted.items():
        mine = key.replace("client/params", "client/private")
        np.testing.assert_array_equal(found[mine], leaf, err_msg=key)
    assert found["bytes_up"].sum() == found["bytes_down"].sum() == 0


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_one_client_is_plain_sgd(name: str) -> None:
    """A federation of one trains as if there were no server."""
    fed = federation(sizes=(9,))
    wanted = outcome(_net("local", KEPT, fed=fed, participation="all"))
    found = outcome(_net(name, KEPT, fed=fed, participation="all"))
    for key in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_array_equal(found[key], wanted[key])


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg"])
def test_a_client_not_drawn_keeps_its_private_part(name: str) -> None:
    """Its private leaves stay at the common start, bit by bit; those of the drawn move."""
    sim = _net(name, participation=2, rounds=1)
    start = net_task().init(0)
    drawn = sim.store.gather(sim.context.everybody)["private"]
    assert drawn
    for leaf, values in drawn.items():
        still = [torch.equal(row, start[leaf].double()) for row in values[0]]
        assert sorted(still) == [False, False, True, True, True], leaf


@pytest.mark.parametrize("name", NAMES)
def test_the_private_part_never_travels(name: str) -> None:
    """Letters and uploads hold the shared leaves alone; the two parts make up the network."""
    task = net_task()
    method = build(name, task, SGD, {"private": ("body",)} if name == "fedbn" else {})
    shared = {"fc"} if name in ("lg-fedavg", "fedbn") else {"body"}
    sent = []

    def finish(client: Any, work: Any, ctx: Any) -> Any:
        kept, upload = method.finish(client, work, ctx)
        sent.append((upload, ctx.common))
        return kept, upload

    run(
        simulation(
            changed(method, finish=finish), task, [federation()], engine="sequential", rounds=1
        )
    )
    for trees in sent:
        for message in trees:
            assert list(message) == ["params"]
            assert {leaf.split(".")[0] for leaf in message["params"]} == shared
    assert {leaf for leaf in task.leaf_names if not method.wire.private(leaf)} == {
        leaf for leaf in task.leaf_names if leaf.split(".")[0] in shared
    }


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg"])
def test_clients_agree_on_the_shared_part_alone(name: str) -> None:
    """After download everybody has the same shared leaves, and private ones of its own."""
    sim = _net(name, participation="all")
    models = [sim.params(i, point="pre") for i in range(5)]
    for leaf in models[0]:
        same = all(torch.equal(m[leaf], models[0][leaf]) for m in models)
        assert same == (not sim.method.wire.private(leaf)), leaf


@pytest.mark.parametrize("rule", ["normalized", "uniform"])
@pytest.mark.parametrize("name", ["fedper", "lg-fedavg"])
def test_one_full_step_is_gradient_descent_on_the_objective(name: str, rule: str) -> None:
    """The shared part moves by −η Σ p_i ∇L_i, a private part by −η ∇L_i."""
    task, fed = net_task(), federation()
    sim = _net(name, GD, {"rule": rule}, rounds=1, participation="all")
    start = {k: v.double() for k, v in task.init(0).items()}
    slopes = [torch.func.grad(task.loss)(start, full_batch(fed, i)) for i in range(len(fed.names))]
    p = fed.train.sizes.double() / fed.train.sizes.sum() if rule == "normalized" else [0.2] * 5
    for i, own in enumerate(slopes):
        for leaf, value in sim.params(i, point="pre").items():
            mean = sum(float(w) * s[leaf] for w, s in zip(p, slopes, strict=True))
            slope = own[leaf] if sim.method.wire.private(leaf) else mean
            torch.testing.assert_close(value, start[leaf] - 0.3 * slope, rtol=0, atol=1e-12)


def test_the_uplinks_of_fedper_and_its_mirror_add_up_to_fedavgs() -> None:
    """LG-FedAvg shares exactly what FedPer keeps: by default the head, not the first layers."""
    log = {name: _net(name).ledger() for name in ("fedper", "lg-fedavg", "fedavg")}
    for way in ("bytes_up", "bytes_down"):
        one, other, whole = (getattr(log[k], way) for k in ("fedper", "lg-fedavg", "fedavg"))
        np.testing.assert_array_equal(one + other, whole)
        assert one.min() > other.max() > 0
    assert build("lg-fedavg", net_task(), SGD, {}).wire.private("body.weight")


@pytest.mark.parametrize("name", NAMES)
def test_without_momentum_kept_no_optimiser_is_stored(name: str) -> None:
    """A new optimiser in every round leaves the private part as the only state."""
    found = states(_net(name, replace(KEPT, keep_optimiser=False)))
    assert {k.split("/")[1] for k in found if k.startswith("client/")} <= {"private"}


def test_layers_are_found_by_their_whole_name() -> None:
    """'fc' is neither 'fc1' nor 'fc2'; a submodule brings its leaves, and a leaf is one."""
    task = Task(lenet5(input_shape=(1, 8, 8), num_classes=3), head="fc")
    pick = lambda *names: set(filter(layers(task, names), task.leaf_names))  # noqa: E731
    assert pick("fc") == {"fc.weight", "fc.bias"}
    assert pick("fc2.bias", "conv1") == {"fc2.bias", "conv1.weight", "conv1.bias"}
    assert pick() == set()
    assert build("fedper", task, SGD, {"private": ("fc2", "fc")}).wire.private("fc2.weight")
    with pytest.raises(ConfigError, match=r"no layer 'fc3'; did you mean 'fc") as caught:
        build("fedper", task, SGD, {"private": ("fc3", "zz")})
    assert "no layer 'zz'; known: " in str(caught.value)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "lg-fedavg"])
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(Net()), "no head is named; set module.head"),
        (Task(nn.Sequential(nn.Linear(4, 3)), head="0"), "belong to the head '0'; use a network"),
    ],
)
def test_a_network_without_body_or_head_is_refused(name: str, task: Task, words: str) -> None:
    """The error says which part is missing and how to mend it, before any training."""
    with pytest.raises(ConfigError, match=f"^{name} treats.*{words}"):
        simulation(build(name, task, SGD, {}), task, [federation()])


# ---- the warm-up of LG-FedAvg --------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(
    "options", [{"warmup_rounds": 9}, {"warmup_rounds": 2, "shared": BOTH}], ids=["long", "all"]
)
def test_a_warm_up_is_fedavg(local: Local, options: dict) -> None:
    """Rounds of the warm-up, and a top that is everything: FedAvg's models, scores and bytes."""
    wanted, found = outcome(_net("fedavg", local)), outcome(_net("lg-fedavg", local, options))
    for key, leaf in wanted.items():
        mine = key
        if key.startswith("server/params/") and key not in found:
            mine = key.replace("/params/", "/below/")
        np.testing.assert_array_equal(found[mine], leaf, err_msg=key)


def test_no_warm_up_is_the_method_itself() -> None:
    """Zero rounds: the same states and bytes, to the bit."""
    wanted, found = (outcome(_net("lg-fedavg", KEPT, o)) for o in ({}, {"warmup_rounds": 0}))
    assert sorted(found) == sorted(wanted)
    for key, leaf in wanted.items():
        np.testing.assert_array_equal(found[key], leaf, err_msg=key)


def test_after_the_warm_up_everybody_goes_on_from_fedavgs_model() -> None:
    """All clients, also those not drawn, have FedAvg's lower layers; then they part, and its stay.

    The top layers go on being averaged, and FedAvg's lower ones are left as they were.
    """
    settings: dict[str, Any] = {"participation": 2}
    common = _net("fedavg", KEPT, rounds=2, **settings).server["params"]
    for rounds in (2, 3):
        sim = _net("lg-fedavg", KEPT, {"warmup_rounds": 2}, rounds=rounds, **settings)
        private = sim.store.gather(sim.context.everybody)["private"]
        for leaf, rows in private.items():
            same = [torch.equal(row, common[leaf][0]) for row in rows[0]]
            assert sum(same) == (5 if rounds == 2 else 3), leaf
            assert torch.equal(sim.server["below"][leaf], common[leaf])
        moved = not torch.equal(sim.server["params"]["fc.weight"], common["fc.weight"])
        assert moved == (rounds == 3)
        if rounds == 2:
            for i in range(5):
                for leaf, value in sim.params(i).items():
                    assert torch.equal(value, common[leaf][0]), leaf


def test_bytes_of_the_warm_up_are_counted_round_by_round() -> None:
    """Whole models first, lower layers to everybody after them, then the top alone."""
    ledger = _net("lg-fedavg", SGD, {"warmup_rounds": 2}, participation=3, rounds=4).ledger()
    top, below = (5 * 3 + 3) * 8, (4 * 5 + 5) * 8
    whole = top + below
    assert ledger.bytes_up[0].tolist() == [3 * whole] * 2 + [3 * top] * 2
    assert ledger.bytes_down[0].tolist() == [3 * whole, 3 * whole + 5 * below, 3 * top, 3 * top]
    assert ledger.participants[0].tolist() == [3] * 4
    assert ledger.setup_bytes.tolist() == [0]


def test_a_warm_up_is_fine_tuned_as_the_rest() -> None:
    """``finetune_steps`` reaches the scores of the warm-up: FedAvg, fine-tuned."""
    options = {"finetune_steps": 2}
    wanted = outcome(_net("fedavg", SGD, options))
    found = outcome(_net("lg-fedavg", SGD, {**options, "warmup_rounds": 9}))
    np.testing.assert_array_equal(found["pre/test/loss"], wanted["pre/test/loss"])


def test_a_negative_warm_up_is_refused() -> None:
    """There is nothing before the beginning."""
    with pytest.raises(ConfigError, match="warmup_rounds must be >= 0, got -1"):
        build("lg-fedavg", net_task(), SGD, {"warmup_rounds": -1})
