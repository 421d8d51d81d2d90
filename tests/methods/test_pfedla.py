"""pFedLA: mixtures of models, layer by layer, with weights from one hypernetwork per client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ClientContext, ServerContext
from sartor.core.mixing import inner
from sartor.methods import build
from tests.toys import federation, net_task, outcome, quadratic_task, run, simulation

SGD = Local(epochs=2, batch=3, lr=0.2, momentum=0.5)
TINY = {"hidden": 6, "embedding": 3}
TASK = net_task()


def _server_context(
    num: int, cohort: Any, present: Any = None, mix_lr: float = 0.05
) -> ServerContext:
    return ServerContext(
        hyper={"mix_lr": torch.tensor(mix_lr, dtype=torch.float64)},
        key=torch.tensor([5, 7]),
        round=None,
        sizes=torch.ones(num, dtype=torch.int64),
        cohort=torch.tensor(cohort),
        present=torch.tensor([True] * len(cohort) if present is None else present),
    )


def _start(num: int = 4, task: Any = TASK, **options: Any) -> tuple[Any, Any]:
    """Return pFedLA, and a server whose stored models differ."""
    method = build("pfedla", task, Local(), {**TINY, "start": "drawn", **options})
    server = method.init_server(
        {k: v.double() for k, v in task.init(0).items()}, _server_context(num, [0])
    )
    draw = torch.Generator().manual_seed(1)
    models = tree.map(
        lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=torch.float64), server["models"]
    )
    return method, {**server, "models": models}


def _upload(server: Any, seed: int = 2, slots: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda leaf: torch.randn((slots, *leaf.shape[1:]), generator=draw, dtype=torch.float64),
        server["models"],
    )


def _message(method: Any, server: Any, i: int) -> Any:
    return method.address(server, torch.tensor(i), None)


def _proxy(method: Any, server: Any, models: Any, i: int, upload: Any) -> float:
    """Return ½‖θ_new − θ̄_i‖² with the stored models of old and the hypernetworks of now."""
    sent = _message(method, {**server, "models": models}, i)
    apart = tree.sub(tree.map(lambda leaf: leaf[0], upload), sent)
    return 0.5 * float(tree.dot(apart, apart))


def _alpha(net: Any, index: int) -> torch.Tensor:
    """Return α_i by a plain network of one client: (layers, clients)."""
    h = net["embed"]
    for j in range(3):
        h = (net[f"layer{j}"]["weight"] @ h + net[f"layer{j}"]["bias"]).clamp(min=0)
    rows = torch.einsum("lmh,h->lm", net["out"]["weight"], h) + net["out"]["bias"]
    rows = rows.clamp(min=0)
    return rows / rows.sum(-1, keepdim=True)


# ---- the weights ---------------------------------------------------------------------------------


def test_a_message_is_mixed_layer_by_layer() -> None:
    """θ̄_i^l = Σ_j α_ij^l θ_j^l, with one row for the weight and bias of a layer."""
    method, server = _start()
    for i in (0, 3):
        mix = _alpha(tree.map(lambda leaf, i=i: leaf[i], server["nets"]), i)
        assert mix.shape == (2, 4)
        for name, leaf in _message(method, server, i).items():
            row = mix[0 if name.startswith("body") else 1]
            wanted = torch.tensordot(row, server["models"][name], dims=1)
            torch.testing.assert_close(leaf, wanted)
    assert float((mix[0] - mix[1]).abs().max()) > 0.01


def test_rows_stay_on_the_simplex() -> None:
    """Rows are ≥ 0 with sum 1 in every round, and they move."""
    method = build("pfedla", TASK, SGD, TINY)
    sim = run(simulation(method, TASK, [federation()], rounds=4, hyper={"mix_lr": 1.0}))
    for snap in sim.log.snapshots:
        assert snap["mix"].shape == (1, 5, 2, 5)
        assert snap["mix"].min() >= 0
        np.testing.assert_allclose(snap["mix"].sum(-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(sim.log.snapshots[0]["mix"], 0.2, atol=1e-7)
    assert np.abs(sim.log.snapshots[-1]["mix"] - 0.2).max() > 0.01


def test_an_empty_row_is_the_clients_own_model() -> None:
    """Where all outputs are zero, the row is the one-hot row of the client, and it has no slope."""
    method, server = _start()
    dead = {k: -torch.ones_like(v) for k, v in server["nets"]["out"].items()}
    server = {**server, "nets": {**server["nets"], "out": dead}}
    for i in range(4):
        wanted = tree.map(lambda leaf, i=i: leaf[i], server["models"])
        for name, leaf in _message(method, server, i).items():
            assert torch.equal(leaf, wanted[name])
    after = method.aggregate(server, _upload(server), _server_context(4, [2]))
    for old, new in zip(tree.leaves(server["nets"]), tree.leaves(after["nets"]), strict=True):
        assert torch.equal(old, new)


def test_the_scale_of_a_row_does_not_matter() -> None:
    """Outputs times c > 0 leave θ̄_i as it is, and the step is orthogonal to that direction."""
    method, server = _start()
    scaled = {k: 3.0 * v for k, v in server["nets"]["out"].items()}
    other = {**server, "nets": {**server["nets"], "out": scaled}}
    for name, leaf in _message(method, server, 1).items():
        torch.testing.assert_close(_message(method, other, 1)[name], leaf)
    after = method.aggregate(server, _upload(server), _server_context(4, [1], mix_lr=1.0))
    out = {k: v[1] for k, v in server["nets"]["out"].items()}
    change = {k: after["nets"]["out"][k][1] - out[k] for k in out}
    along = [(change[k] * out[k]).flatten(1).sum(1) for k in out]
    np.testing.assert_allclose(along[0] + along[1], 0.0, atol=1e-12)
    assert float(change["weight"].abs().max()) > 1e-4


def test_the_first_outputs_are_positive() -> None:
    """Output weights are U(0, 1) with bias 0: for each client, or one draw for all ("even")."""
    for start in ("drawn", "even"):
        out = _start(start=start, hidden=50)[1]["nets"]["out"]
        assert 0 < float(out["weight"].min()) < 0.05
        assert 0.95 < float(out["weight"].max()) < 1
        assert not out["bias"].any()
        spread = (out["weight"] - out["weight"][:, :, :1]).abs().max()
        assert (float(spread) == 0) is (start == "even")


def test_the_sizes_of_the_hypernetworks() -> None:
    """Per client: embedding 100, three layers of 10,100, and 101·L·M outputs."""

    def size(num: int, layers: int) -> int:
        return 100 + 3 * 10_100 + 101 * layers * num

    for layers, count in (("blocks", 2), ("tensors", 4)):
        method = build("pfedla", TASK, Local(), {"layers": layers})
        server = method.init_server(
            {k: v.double() for k, v in TASK.init(0).items()}, _server_context(3, [0])
        )
        found = sum(leaf[0].numel() for leaf in tree.leaves(server["nets"]))
        assert found == size(3, count)
    sizes = [size(20, 5), size(20, 10), size(50, 5), size(50, 10)]
    assert sizes == [40_500, 50_600, 55_650, 80_900]


# ---- the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["descent", "as_printed"])
def test_descent_lowers_the_proxy_and_the_printed_sign_raises_it(sign: str) -> None:
    """½‖θ_new − θ̄_i‖² after a small step on the hypernetwork, with the models as they were."""
    for i in range(4):
        method, server = _start(weight_step=sign)
        upload = _upload(server, seed=i)
        before = _proxy(method, server, server["models"], i, upload)
        after = method.aggregate(server, upload, _server_context(4, [i], mix_lr=1e-3))
        found = _proxy(method, after, server["models"], i, upload)
        assert (found < before) is (sign == "descent")
        assert abs(found - before) > 1e-8


@pytest.mark.parametrize(("sign", "factor"), [("descent", -1.0), ("as_printed", 1.0)])
def test_the_step_is_that_of_autograd_through_the_normalisation(sign: str, factor: float) -> None:
    """Every leaf of HN_i and v_i moves by ∓η_h times the gradient of ½‖θ_new − θ̄_i‖²."""
    method, server = _start(weight_step=sign)
    upload = _upload(server)
    free = tree.map(lambda leaf: leaf[2].clone().requires_grad_(), server["nets"])
    mix = _alpha(free, 2)
    value = torch.zeros(())
    for name, table in server["models"].items():
        mixed = torch.tensordot(mix[0 if name.startswith("body") else 1], table, dims=1)
        value = value + 0.5 * (upload[name][0] - mixed).square().sum()
    slope = torch.autograd.grad(value, tree.leaves(free))
    after = method.aggregate(server, upload, _server_context(4, [2], mix_lr=0.3))
    new = tree.leaves(tree.map(lambda leaf: leaf[2], after["nets"]))
    for found, old, g in zip(new, tree.leaves(free), slope, strict=True):
        torch.testing.assert_close(found, old.detach() + factor * 0.3 * g, rtol=0, atol=1e-12)


def test_one_layer_without_a_network_steps_as_fedapa() -> None:
    """The slope at an output is FedAPA's ⟨θ_j, Δ⟩, less its mean under α, over the row's sum."""
    method, server = _start(task=quadratic_task(3))
    upload = _upload(server)
    net = tree.map(lambda leaf: leaf[1], server["nets"])
    mix = _alpha(net, 1)[0]
    delta = upload["w"] - torch.tensordot(mix, server["models"]["w"], dims=1)
    plain = inner(server["models"], {"w": delta})[0]
    h = net["embed"]
    for j in range(3):
        h = (net[f"layer{j}"]["weight"] @ h + net[f"layer{j}"]["bias"]).clamp(min=0)
    total = (net["out"]["weight"][0] @ h).sum()
    after = method.aggregate(server, upload, _server_context(4, [1], mix_lr=0.1))
    wanted = 0.1 * (plain - mix @ plain) / total
    torch.testing.assert_close(after["nets"]["out"]["bias"][1, 0], wanted)


def test_the_stored_model_is_the_trained_one() -> None:
    """θ_i ← θ̄_i + Δθ_i, not the old upload plus Δθ_i; the others, absent or not, stay."""
    method, server = _start()
    upload = _upload(server, slots=2)
    after = method.aggregate(server, upload, _server_context(4, [3, 1], present=[True, False]))
    for name, table in after["models"].items():
        assert torch.equal(table[3], upload[name][0])
        assert torch.equal(table[:3], server["models"][name][:3])
    for old, new in zip(tree.leaves(server["nets"]), tree.leaves(after["nets"]), strict=True):
        assert torch.equal(old[:3], new[:3])
    assert (after["nets"]["embed"][3] != server["nets"]["embed"][3]).any()


# ---- whole runs ----------------------------------------------------------------------------------


def _net(name: str = "pfedla", hyper: Any = None, rounds: int = 3, **options: Any) -> Any:
    settings = {"participation": options.pop("join", "at_least:0.6"), "rounds": rounds}
    record = build(name, TASK, SGD, {**(TINY if name == "pfedla" else {}), **options})
    return run(simulation(record, TASK, [federation()], hyper=hyper or {}, **settings))


@pytest.mark.parametrize(("layers", "count"), [("blocks", 2), ("tensors", 4)])
def test_retaining_all_layers_is_local_training(layers: str, count: int) -> None:
    """K = L forces one-hot rows: LocalTrain of the clients drawn, to the bit."""
    found = outcome(_net(layers=layers, retained=count, start="drawn"))
    wanted = outcome(_net("local", participation="sampled"))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_even_weights_that_do_not_move_are_plain_averaging() -> None:
    """η_h = 0 from even weights: everybody receives the plain mean, as with FedAvg."""
    sim = _net(hyper={"mix_lr": 0.0}, join="all")
    wanted = outcome(_net("fedavg", join="all", rule="uniform"))
    for name in ("pre/test/loss", "post/test/loss"):
        np.testing.assert_allclose(outcome(sim)[name], wanted[name], rtol=0, atol=1e-12)
    for snap in sim.log.snapshots:
        np.testing.assert_array_equal(snap["mix"], sim.log.snapshots[0]["mix"])


def test_the_layers_of_largest_self_weight_are_retained_without_a_step() -> None:
    """K = 1: that layer is the client's own, and its row of outputs stays; the other moves."""
    method, server = _start(retained=1)
    for i in range(4):
        mix = _alpha(tree.map(lambda leaf, i=i: leaf[i], server["nets"]), i)
        kept = int(mix[:, i].argmax())
        message = _message(method, server, i)
        assert [bool(message["sent"][b]) for b in ("body", "fc")] == [kept != 0, kept != 1]
        for name, leaf in message["params"].items():
            row = 0 if name.startswith("body") else 1
            if row != kept:
                mixed = torch.tensordot(mix[row], server["models"][name], dims=1)
                torch.testing.assert_close(leaf, mixed)
        sent = {b: mark[None] for b, mark in message["sent"].items()}
        upload = _upload(server)
        after = method.aggregate(server, {"params": upload, "sent": sent}, _server_context(4, [i]))
        moved = (after["nets"]["out"]["bias"] != server["nets"]["out"]["bias"])[i].any(-1)
        assert moved.tolist() == [kept != 0, kept != 1]
        for name, table in after["models"].items():
            stays = (0 if name.startswith("body") else 1) == kept
            wanted = server["models"][name][i] if stays else upload[name][0]
            assert torch.equal(table[i], wanted)


def test_a_client_retains_what_it_trained_last() -> None:
    """A layer that is not sent is the client's own; the others are those of the message."""
    method, server = _start(retained=1)
    draw = torch.Generator().manual_seed(3)
    mine = {k: torch.randn(v.shape[1:], generator=draw) for k, v in server["models"].items()}
    message = _message(method, server, 2)
    ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(own=message)
    for name, leaf in method.begin({"params": mine}, ctx)["params"].items():
        sent = bool(message["sent"][name.split(".")[0]])
        assert torch.equal(leaf, message["params"][name] if sent else mine[name].double())


def test_retaining_none_is_pfedla() -> None:
    """K = 0 leaves the rows as the hypernetwork gives them."""
    method, server = _start(retained=0)
    found = method.show.server(server, _server_context(4, [0]))["mix"]
    for i in range(4):
        wanted = _alpha(tree.map(lambda leaf, i=i: leaf[i], server["nets"]), i)
        torch.testing.assert_close(found[i], wanted)


def test_later_clients_see_earlier_uploads_in_a_sequential_schedule() -> None:
    """Serving one after the other is aggregating one after the other."""
    method, server = _start(schedule="sequential")
    assert method.schedule.in_turn
    assert not build("pfedla", TASK, SGD, {}).schedule.in_turn
    after = method.aggregate(server, _upload(server), _server_context(4, [0]))
    before, now = _message(method, server, 1), _message(method, after, 1)
    assert float((before["fc.bias"] - now["fc.bias"]).abs().max()) > 1e-3


def test_whole_models_travel() -> None:
    """|θ| down and |θ| up per participant; no weight of a hypernetwork leaves the server."""
    ledger = _net().ledger()
    assert (ledger.bytes_up == 8 * 43 * ledger.participants).all()
    assert (ledger.bytes_down == ledger.bytes_up).all()


@pytest.mark.parametrize("layers", ["blocks", "tensors"])
@pytest.mark.parametrize("retained", [1, 2])
def test_retained_layers_do_not_travel(layers: str, retained: int) -> None:
    """HeurpFedLA: K layers less in either direction, and a byte of marks a layer."""
    sizes = {"blocks": [25, 18], "tensors": [20, 5, 15, 3]}[layers]
    ledger = _net(layers=layers, retained=retained, start="drawn").ledger()
    most = 8 * (43 - sum(sorted(sizes)[:retained])) + len(sizes)
    least = 8 * (43 - sum(sorted(sizes)[-retained:])) + len(sizes)
    assert (ledger.bytes_up == ledger.bytes_down).all()
    assert (ledger.bytes_up <= most * ledger.participants).all()
    assert (ledger.bytes_up >= least * ledger.participants).all()
    everything = _net(layers=layers, retained=len(sizes)).ledger()
    assert (everything.bytes_up == len(sizes) * everything.participants).all()


@pytest.mark.parametrize("retained", [0, 1])
def test_a_newcomer_has_a_message_of_that_form(retained: int) -> None:
    """Whatever stays at home elsewhere, a newcomer has no layer of its own yet."""
    method, server = _start(retained=retained)
    message, other = (
        dict(tree.items(m))
        for m in (method.newcomer.message(server, None), _message(method, server, 0))
    )
    assert {k: v.shape for k, v in message.items()} == {k: v.shape for k, v in other.items()}
    assert all(v.all() for k, v in message.items() if k.startswith("sent"))


def test_a_newcomer_receives_the_plain_mean() -> None:
    """The message has the form of the others."""
    method, server = _start()
    message = method.newcomer.message(server, None)
    assert message.keys() == _message(method, server, 0).keys()
    torch.testing.assert_close(message["fc.weight"], server["models"]["fc.weight"].mean(0))


def test_mixed_models_are_used_as_they_are_by_default() -> None:
    """The headline is "pre", or "post" with evaluate="after_local"."""
    assert build("pfedla", TASK, SGD, {}).use.headline == "pre"
    assert build("pfedla", TASK, SGD, {"evaluate": "after_local"}).use.headline == "post"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retained": 3}, "retained must be from 0 to 2"),
        ({"retained": -1}, "got -1"),
        ({"embedding": 0}, "embedding must be >= 1, got 0"),
        ({"hidden": 0}, "hidden must be >= 1, got 0"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """An option that cannot be right is refused with the way to fix it."""
    with pytest.raises(ConfigError, match=words):
        build("pfedla", TASK, SGD, options)
