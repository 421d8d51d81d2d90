"""pFedHN: models generated from embeddings, and the pull-back that trains the hypernetwork."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ServerContext
from sartor.methods import METHODS, build
from tests.toys import (
    differ,
    federation,
    net_task,
    outcome,
    quadratic_task,
    run,
    simulation,
    states,
)

SGD = Local(epochs=2, batch=3, lr=0.2)
HEAVY = replace(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
PLAIN = {"server_lr": 0.1, "embed_lr_ratio": 1.0, "server_momentum": 0.0, "server_decay": 0.0}
TINY = {"hidden": 4, "hidden_layers": 1, "embedding": 2, "server_clip": None}


def _server_context(
    num: int = 3, cohort: Any = (0,), present: Any = None, **hyper: float
) -> ServerContext:
    return ServerContext(
        hyper={k: torch.tensor(v, dtype=torch.float64) for k, v in {**PLAIN, **hyper}.items()},
        key=torch.tensor([5, 7]),
        round=None,
        sizes=torch.ones(num, dtype=torch.int64),
        cohort=torch.tensor(cohort),
        present=torch.tensor([True] * len(cohort) if present is None else present),
    )


def _start(num: int = 3, dim: int = 2, **options: Any) -> tuple[Any, Any]:
    """Return pFedHN on a quadratic of some dimension, and the server's first state."""
    method = build("pfedhn", quadratic_task(dim), Local(), {**TINY, **options})
    params = {"w": torch.linspace(-1, 1, dim, dtype=torch.float64)}
    return method, method.init_server(params, _server_context(num))


def _sent(method: Any, server: Any, i: int) -> torch.Tensor:
    found: torch.Tensor = method.address(server, torch.tensor(i), None)["w"]
    return found


def _gap(method: Any, server: Any, i: int, new: torch.Tensor) -> float:
    return 0.5 * float((_sent(method, server, i) - new).square().sum())


def _changes(before: Any, after: Any) -> list[torch.Tensor]:
    return tree.leaves(tree.sub(after["weights"], before["weights"]))


# ---- the server's step ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "linear", "table"])
def test_the_step_is_the_jacobian_times_start_minus_end(kind: str) -> None:
    """(φ, v) moves by −α Jᵀ(θ − θ̃), with J = ∂θ/∂(φ, v) written out row by row."""
    method, server = _start(hypernetwork=kind)
    new = torch.tensor([0.3, -2.0], dtype=torch.float64)
    after = method.aggregate(server, {"w": new[None]}, _server_context(cohort=(1,)))
    rows = [
        torch.func.grad(lambda w, r=r: _sent(method, {"weights": w}, 1)[r])(server["weights"])
        for r in range(2)
    ]
    away = _sent(method, server, 1) - new
    for k, change in enumerate(_changes(server, after)):
        jacobian = torch.stack([tree.leaves(row)[k] for row in rows])
        wanted = -0.1 * torch.tensordot(away, jacobian, dims=1)
        torch.testing.assert_close(change, wanted, rtol=0, atol=1e-14)


def test_a_small_step_lowers_the_distance_to_the_trained_model() -> None:
    """½‖θ̃ − h(v_i; φ)‖² falls, and with the printed sign (a negative step) it would rise."""
    method, server = _start()
    new = torch.tensor([0.3, -2.0], dtype=torch.float64)
    before = _gap(method, server, 1, new)
    for rate, falls in ((1e-3, True), (-1e-3, False)):
        ctx = _server_context(cohort=(1,), server_lr=rate)
        after = _gap(method, method.aggregate(server, {"w": new[None]}, ctx), 1, new)
        assert (after < before) is falls


def test_a_linear_hypernetwork_has_a_closed_form() -> None:
    """θ = Φv: Φ ← Φ + αΔvᵀ and v ← v + αΦ_oldᵀΔ."""
    method, server = _start(hypernetwork="linear")
    phi, v = server["weights"]["net"]["to w"]["weight"], server["weights"]["embed"]
    torch.testing.assert_close(_sent(method, server, 2), phi @ v[2])
    new = torch.tensor([0.3, -2.0], dtype=torch.float64)
    delta = new - phi @ v[2]
    after = method.aggregate(server, {"w": new[None]}, _server_context(cohort=(2,)))["weights"]
    torch.testing.assert_close(after["net"]["to w"]["weight"], phi + 0.1 * torch.outer(delta, v[2]))
    torch.testing.assert_close(after["embed"][2], v[2] + 0.1 * phi.T @ delta)
    torch.testing.assert_close(after["embed"][:2], v[:2])


def test_a_model_that_did_not_move_changes_nothing() -> None:
    """θ̃ = θ_i without decay: the server stays as it is; with decay it does not."""
    method, server = _start()
    upload = {"w": _sent(method, server, 0)[None]}
    same = method.aggregate(server, upload, _server_context(server_momentum=0.9))
    assert not any(change.any() for change in _changes(server, same))
    decayed = method.aggregate(server, upload, _server_context(server_decay=0.5))
    for old, new in zip(
        tree.leaves(server["weights"]), tree.leaves(decayed["weights"]), strict=True
    ):
        torch.testing.assert_close(new, 0.95 * old)


def test_the_servers_optimiser_is_torchs() -> None:
    """Clip, decay and momentum are those of torch, over steps of different clients."""
    method, server = _start(server_clip=0.5)
    ctx = {"server_momentum": 0.9, "server_decay": 0.02, "server_lr": 0.05}
    free = tree.map(lambda w: w.clone().requires_grad_(), server["weights"])
    optimiser = torch.optim.SGD(tree.leaves(free), 0.05, momentum=0.9, weight_decay=0.02)
    for i, goal in ((0, 3.0), (2, -1.0), (0, 0.5), (1, 2.0)):
        new = torch.full((2,), goal, dtype=torch.float64)
        optimiser.zero_grad()
        (0.5 * (_sent(method, {"weights": free}, i) - new).square().sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(tree.leaves(free), 0.5)
        assert norm > 0.5
        optimiser.step()
        server = method.aggregate(server, {"w": new[None]}, _server_context(cohort=(i,), **ctx))
        for wanted, found in zip(tree.leaves(free), tree.leaves(server["weights"]), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-13)


def test_embeddings_have_a_rate_of_their_own() -> None:
    """The step on v is embed_lr_ratio times that on φ; 0 leaves the embeddings alone."""
    method, server = _start()
    new = {"w": torch.tensor([[0.3, -2.0]], dtype=torch.float64)}
    one, half, none = (
        method.aggregate(server, new, _server_context(embed_lr_ratio=ratio))["weights"]
        for ratio in (1.0, 0.5, 0.0)
    )
    old = server["weights"]["embed"]
    torch.testing.assert_close(half["embed"] - old, 0.5 * (one["embed"] - old))
    assert torch.equal(none["embed"], old)
    assert (one["embed"] != old).any()
    assert torch.equal(half["net"]["layer0"]["weight"], one["net"]["layer0"]["weight"])


def test_the_mean_update_averages_the_gradients_of_those_present() -> None:
    """One step along the mean of the participants' gradients; the absent do not count."""
    method, server = _start(hn_update="mean")
    new = torch.tensor([[0.3, -2.0], [torch.nan, 0.0], [4.0, 1.0]], dtype=torch.float64)
    ctx = _server_context(cohort=(0, 1, 2), present=(True, False, True))
    both = _changes(server, method.aggregate(server, {"w": new}, ctx))
    alone = [
        _changes(
            server, method.aggregate(server, {"w": new[i : i + 1]}, _server_context(cohort=(i,)))
        )
        for i in (0, 2)
    ]
    for k, change in enumerate(both):
        torch.testing.assert_close(change, 0.5 * (alone[0][k] + alone[1][k]))
    assert not method.schedule.in_turn


def test_without_reports_the_server_rests() -> None:
    """A round in which nobody reports moves nothing, not even by momentum or decay."""
    method, server = _start()
    server = {**server, "velocity": tree.map(torch.ones_like, server["velocity"])}
    ctx = _server_context(present=(False,), server_momentum=0.9, server_decay=0.1)
    after = method.aggregate(server, {"w": torch.full((1, 2), torch.nan)}, ctx)
    for old, new in zip(tree.leaves(server), tree.leaves(after), strict=True):
        assert torch.equal(old, new)


# ---- the hypernetwork ----------------------------------------------------------------------------


def test_the_sizes_of_the_authors_hypernetworks() -> None:
    """n·e + (100e + 100) + 3·10,100 + 101·|θ| with e = 1 + n//4; LeNet-5 needs six millions."""

    def size(num: int, generated: int) -> int:
        e = 1 + num // 4
        return num * e + 100 * e + 100 + 3 * 10_100 + 101 * generated

    for num in (3, 20):
        method = build("pfedhn", quadratic_task(7), Local(), {})
        server = method.init_server(
            {"w": torch.zeros(7, dtype=torch.float64)}, _server_context(num)
        )
        assert sum(leaf.numel() for leaf in tree.leaves(server["weights"])) == size(num, 7)
    assert [size(20, 61_156), size(50, 61_156)] == [6_207_876, 6_209_106]
    assert size(20, 62_006) == 6_293_726


def test_layers_start_as_torchs_do() -> None:
    """Weights and biases are uniform in ±1/√inputs; embeddings are standard normal."""
    method = build("pfedhn", quadratic_task(50), Local(), {"embedding": 25})
    params = {"w": torch.zeros(50, dtype=torch.float64)}
    weights = method.init_server(params, _server_context(400))["weights"]
    for name, inputs in (("layer0", 25), ("layer1", 100), ("layer3", 100), ("to w", 100)):
        for leaf in weights["net"][name].values():
            bound = inputs**-0.5
            assert 0.8 * bound < float(leaf.abs().max()) <= bound
            assert float(leaf.mean().abs()) < 0.35 * bound
    assert float(weights["embed"].std()) == pytest.approx(1.0, abs=0.05)
    assert weights["embed"].shape == (400, 25)
    first, second = (weights["net"][f"layer{j}"]["weight"] for j in (1, 2))
    assert not torch.equal(first, second)


def test_the_network_is_linear_then_relu_and_linear() -> None:
    """No activation after the last hidden layer: the generated model is affine in it."""
    method, server = _start(hidden_layers=2, hidden=9)
    net, v = server["weights"]["net"], server["weights"]["embed"][1]
    h = net["layer0"]["weight"] @ v + net["layer0"]["bias"]
    for j in (1, 2):
        h = net[f"layer{j}"]["weight"] @ h.clamp(min=0) + net[f"layer{j}"]["bias"]
    assert (h < 0).any()
    wanted = net["to w"]["weight"] @ h + net["to w"]["bias"]
    torch.testing.assert_close(_sent(method, server, 1), wanted)


def test_a_newcomer_receives_the_model_of_the_mean_embedding() -> None:
    """The letter has the form of the others."""
    method, server = _start()
    weights = server["weights"]
    middle = {**weights, "embed": weights["embed"].mean(0, keepdim=True)}
    wanted = _sent(method, {"weights": middle}, 0)
    torch.testing.assert_close(method.newcomer.message(server, None)["w"], wanted)


# ---- whole runs ----------------------------------------------------------------------------------


def _net(method: str = "pfedhn", hyper: Any = None, local: Local = SGD, **options: Any) -> Any:
    task = net_task()
    small = {"hidden": 8, "hidden_layers": 1} if method == "pfedhn" else {}
    record = build(method, task, local, {**small, **options})
    settings = {"rounds": 2, "points": ("post",)}
    return run(simulation(record, task, [federation()], hyper=hyper or {}, **settings))


@pytest.mark.parametrize("local", [SGD, HEAVY], ids=["plain", "heavy"])
def test_a_lookup_table_with_full_steps_is_local_training(local: Local) -> None:
    """Output = v_i, server rate 1, no momentum, decay or clip: LocalTrain."""
    hyper = {**PLAIN, "server_lr": 1.0}
    found = outcome(_net(hyper=hyper, local=local, hypernetwork="table", server_clip=None))
    wanted = outcome(_net("local", local=local, participation="sampled"))
    np.testing.assert_allclose(
        found["post/test/loss"], wanted["post/test/loss"], rtol=0, atol=1e-12
    )


def test_a_lookup_table_moves_by_the_servers_rate() -> None:
    """Rate β: θ_i ← θ_i + β(θ̃_i − θ_i), for the client that trained only."""
    method, server = _start(hypernetwork="table")
    new = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    after = method.aggregate(server, {"w": new}, _server_context(cohort=(1,), server_lr=0.25))
    old = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(_sent(method, after, 1), old + 0.25 * (new[0] - old))
    for i in (0, 2):
        torch.testing.assert_close(_sent(method, after, i), old)


def test_later_clients_of_a_round_see_the_new_hypernetwork() -> None:
    """One client after the other is not one step per round."""
    turn, mean = outcome(_net()), outcome(_net(hn_update="mean"))
    assert differ({"a": turn["post/test/loss"]}, {"a": mean["post/test/loss"]}, 1e-6)
    first = build("pfedhn", net_task(), SGD, {})
    assert first.schedule.in_turn


@pytest.mark.parametrize(("share", "size"), [("all", 43), ("body", 25)])
@pytest.mark.parametrize("hidden", [4, 50])
def test_only_generated_leaves_travel(share: str, size: int, hidden: int) -> None:
    """2|θ| per participant, whatever the size of the hypernetwork."""
    ledger = _net(share=share, hidden=hidden).ledger()
    assert (ledger.bytes_up == 8 * size * ledger.participants).all()
    assert (ledger.bytes_down == ledger.bytes_up).all()


def test_a_private_head_is_out_of_the_servers_reach() -> None:
    """No letter and no server state holds a head; an absent client's head stays as it was."""
    task = net_task()
    method = build("pfedhn", task, SGD, {"share": "body"})
    sim = run(simulation(method, task, [federation()], rounds=1, participation=2))
    assert not any("fc" in name for name, _ in tree.items(sim.server))
    heads = sim.store.gather(sim.context.everybody)["head"]["fc.weight"][0]
    start = task.init(0)["fc.weight"].double()
    assert sum(not torch.equal(head, start) for head in heads) == 2
    assert method.wire.private("fc.weight")
    assert not method.wire.private("body.weight")


def test_momentum_is_kept_for_the_private_head_alone() -> None:
    """What was generated starts without momentum, so without a head there is nothing to keep."""
    whole = [states(_net(local=local)) for local in (HEAVY, KEPT)]
    assert sorted(whole[0]) == sorted(whole[1])
    assert not differ(*whole, least=0.0)
    part = states(_net(local=KEPT, share="body"))
    kept = [name for name in part if "velocity" in name and name.startswith("client")]
    assert sorted(kept) == ["client/velocity/params/fc.bias", "client/velocity/params/fc.weight"]
    fresh = states(_net(local=HEAVY, share="body"))
    name = "client/head/fc.weight"
    assert differ({"a": part[name]}, {"a": fresh[name]}, 1e-4)


def test_generated_models_are_used_as_they_are_unless_told_otherwise() -> None:
    """The headline is "pre", or "post" with evaluate="after_local"."""
    assert build("pfedhn", net_task(), SGD, {}).use.headline == "pre"
    assert build("pfedhn", net_task(), SGD, {"evaluate": "after_local"}).use.headline == "post"


def test_the_defaults_are_the_authors() -> None:
    """Rate 0.01, momentum 0.9, decay 1e-3."""
    hyper = METHODS["pfedhn"].hyper
    found = [hyper[k].default for k in ("server_lr", "server_momentum", "server_decay")]
    assert found == [0.01, 0.9, 1e-3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embedding": 0}, "embedding must be >= 1, got 0"),
        ({"hidden": 0}, "hidden must be >= 1, got 0"),
        ({"hidden_layers": -1}, "hidden_layers must be >= 0, got -1"),
        ({"server_clip": 0.0}, "server_clip must be > 0, got 0; None"),
    ],
)
def test_faults_are_named(options: dict, words: str) -> None:
    """An option that cannot be right is refused with the way to mend it."""
    with pytest.raises(ConfigError, match=words):
        build("pfedhn", net_task(), SGD, options)


def test_a_network_without_a_body_is_refused() -> None:
    """There would be nothing to generate."""
    task = replace(net_task(), module=torch.nn.Sequential(torch.nn.Linear(2, 2)), head="0")
    with pytest.raises(ConfigError, match="share='all'"):
        build("pfedhn", task, SGD, {"share": "body"})
