"""FedAMP and HeurFedAMP: who weighs how much, the pull, and the limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Batch, ClientContext, ServerContext, changed
from sartor.core.task import Task, never
from sartor.core.task import given as loss_given
from sartor.data.synthetic import Quadratic, quadratics
from sartor.methods import METHODS, build
from tests.toys import (
    federation,
    net_task,
    outcome,
    quadratic_task,
    run,
    simulation,
    states,
    two_allocations,
)

SGD = Local(epochs=2, batch=3, lr=0.2)
KEPT = Local(epochs=2, batch=3, lr=0.05, momentum=0.9, weight_decay=0.01, keep_optimiser=True)
BOTH = ("fedamp", "heur-fedamp")
ABSOLUTE = {"scale": "absolute"}
THREE = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])


def _t(value: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(value, dtype=float), dtype=torch.float64)


def _server(models: Any, known: Any = None, pool: Any = None) -> dict:
    everybody = torch.ones(len(models), dtype=torch.bool)
    known = everybody if known is None else torch.tensor(known)
    pool = known if pool is None else torch.tensor(pool)
    return {"models": {"w": _t(models)}, "known": known, "pool": pool}


def _server_context(hyper: dict, clients: int, round_index: int = 1) -> ServerContext:
    ids = torch.arange(clients)
    return ServerContext(
        hyper={k: _t(v) for k, v in hyper.items()},
        key=None,
        round=torch.tensor(round_index),
        sizes=torch.ones_like(ids),
        cohort=ids,
        present=torch.ones_like(ids, dtype=torch.bool),
    )


def _mix(
    name: str, models: Any, hyper: dict, options: dict | None = None, k: int = 1, **who: Any
) -> np.ndarray:
    """Return ξ, with the defaults for what ``hyper`` leaves out."""
    method = build(name, quadratic_task(np.shape(models)[1]), SGD, options or {})
    values = {**{n: spec.default for n, spec in method.hyper.items()}, **hyper}
    assert method.show.server is not None
    ctx = _server_context(values, len(models), k)
    found: np.ndarray = method.show.server(_server(models, **who), ctx)["mix"].numpy()
    for i in range(len(models)):
        message = method.address(_server(models, **who), torch.tensor(i), ctx)["w"]
        np.testing.assert_allclose(message, found[i] @ np.asarray(models), atol=1e-12)
    return found


# ---- the mixture ---------------------------------------------------------------------------------


def test_the_worked_example_of_fedamp() -> None:
    """Models (0,0), (1,0), (0,2) with σ = 1, α = 0.5 have the known rows and u_1."""
    found = _mix("fedamp", THREE, {"bandwidth": 1.0, "mix_lr": 0.5}, ABSOLUTE)
    wanted = [
        [0.806902, 0.183940, 0.009158],
        [0.183940, 0.812691, 0.003369],
        [0.009158, 0.003369, 0.987473],
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(found[0] @ THREE, [0.183940, 0.018316], atol=1e-6)


def test_the_worked_example_of_heur_fedamp() -> None:
    """Models (1,0), (1,1), (0,1) with σ = 5 and ξ_ii = 0.2 have the known rows."""
    models = [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    found = _mix("heur-fedamp", models, {"sharpness": 5.0, "self_weight": 0.2})
    np.testing.assert_allclose(found[0], [0.2, 0.777346, 0.022654], atol=1e-6)
    np.testing.assert_allclose(found[1], [0.4, 0.2, 0.4], atol=1e-12)


def test_the_relative_scale_is_fedamp_with_its_own_numbers() -> None:
    """σ = s·(mean squared distance) and α = a σ/(m − 1) give the same ξ, absolutely said."""
    far = np.square(THREE[:, None] - THREE).sum(-1)
    sigma = 0.7 * far.sum() / 6
    relative = _mix("fedamp", THREE, {"bandwidth": 0.7, "mix_weight": 0.6})
    absolute = _mix("fedamp", THREE, {"bandwidth": sigma, "mix_lr": 0.6 * sigma / 2}, ABSOLUTE)
    np.testing.assert_allclose(relative, absolute, atol=1e-13)
    scaled = _mix("fedamp", 1000.0 * THREE + 5.0, {"bandwidth": 0.7, "mix_weight": 0.6})
    np.testing.assert_allclose(scaled, relative, atol=1e-9)


CASES: list[tuple[str, dict]] = [("fedamp", {}), ("fedamp", ABSOLUTE), ("heur-fedamp", {})]


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 2), st.floats(0.01, 1.0))
def test_rows_are_on_the_simplex(seed: int, clients: int, case: int, share: float) -> None:
    """Rows sum to 1, and are convex up to α = σ/(m − 1), or for any share in [0, 1]."""
    models = np.random.default_rng(seed).normal(size=(clients, 3))
    name, options = CASES[case]
    step = {"mix_lr": share * 0.5 / max(clients - 1, 1)} if options else {"mix_weight": share}
    hyper = {"self_weight": share} if name == "heur-fedamp" else {"bandwidth": 0.5, **step}
    found = _mix(name, models, hyper, options)
    np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-13)
    assert found.min() > -1e-15


def test_too_long_a_step_makes_the_own_weight_negative() -> None:
    """Above σ/(m − 1) near models have ξ_ii < 0: the bound is sharp."""
    near = np.zeros((5, 2)) + 1e-9 * np.arange(10).reshape(5, 2)
    for step, sign in ((0.24, 1), (0.26, -1)):
        mix = _mix("fedamp", near, {"bandwidth": 1.0, "mix_lr": step}, ABSOLUTE)
        assert (sign * np.diag(mix) > 0).all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equal_models_are_their_own_cloud_models(name: str, options: dict) -> None:
    """Where all w_i agree, u_i = w_i whatever the step."""
    models = np.tile([[0.3, -1.7, 2.2]], (4, 1))
    hyper = {"mix_lr": 7.0} if options else {}
    np.testing.assert_allclose(_mix(name, models, hyper, options) @ models, models, atol=1e-13)


@pytest.mark.parametrize("options", [{}, ABSOLUTE])
def test_a_small_bandwidth_leaves_everybody_alone(options: dict) -> None:
    """σ → 0 with distinct models: ξ = I, exactly."""
    assert np.array_equal(_mix("fedamp", THREE, {"bandwidth": 1e-4}, options), np.eye(3))


def test_nearness_counts_in_small_differences_of_large_models() -> None:
    """Distances keep their digits where models are long and close, in single precision too."""
    base = np.random.default_rng(0).normal(size=400) * 30
    models = np.stack([base, base + 1e-3, base + 2e-3])
    method = build("fedamp", quadratic_task(400), SGD, ABSOLUTE)
    ctx = _server_context({"bandwidth": 1e-3, "mix_lr": 1e-4}, 3)
    ctx = ctx._replace(hyper={k: v.float() for k, v in ctx.hyper.items()})
    server = _server(models)
    server["models"] = {"w": server["models"]["w"].float()}
    assert method.show.server is not None
    single = server["models"]["w"].double().numpy()
    far = np.square(single[:, None] - single).sum(-1)
    wanted = 0.1 * np.exp(-far / 1e-3)
    found = method.show.server(server, ctx)["mix"].numpy()
    off = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(found[off], wanted[off], rtol=1e-2)


def test_sharp_angles_and_empty_models_stay_finite() -> None:
    """Large exponents and a model of zeros, which has no angle, give weights all the same."""
    for sharpness in (0.0, 1e4):
        mix = _mix("heur-fedamp", [[1.0, 0.0], [0.9, 0.1], [0.0, 0.0]], {"sharpness": sharpness})
        assert np.isfinite(mix).all()
        np.testing.assert_allclose(mix.sum(1), 1.0, atol=1e-13)
    assert mix[0, 1] == pytest.approx(0.5)


def test_the_step_decays() -> None:
    """α_k = α·decay^⌊k/every⌋: in ξ of FedAMP, not of HeurFedAMP."""
    every = {"decay_every": 3, **ABSOLUTE}
    hyper = {"mix_lr": 0.2, "mix_decay": 0.1}
    rows = [_mix("fedamp", THREE, hyper, every, k=k) for k in (0, 2, 3, 6)]
    off = [row[~np.eye(3, dtype=bool)] for row in rows]
    for found, factor in zip(off, (1.0, 1.0, 0.1, 0.01), strict=True):
        np.testing.assert_allclose(found, factor * off[0], rtol=1e-12)
    plain = _mix("fedamp", THREE, {"mix_lr": 0.2}, ABSOLUTE, k=9)
    np.testing.assert_allclose(plain, rows[0], atol=1e-14)
    heur = [_mix("heur-fedamp", THREE + 1, {}, {"decay_every": 3}, k=k) for k in (0, 9)]
    np.testing.assert_array_equal(*heur)


# ---- who is in the mixture -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES)
def test_only_the_pool_weighs(name: str, options: dict) -> None:
    """Columns outside the pool are zero but for the diagonal; an empty pool leaves one alone."""
    models = np.random.default_rng(1).normal(size=(4, 3))
    some = _mix(name, models, {}, options, pool=[True, False, True, False])
    assert (some[0, [1, 3]] == 0).all()
    assert some[0, 2] > 0
    assert some[1, 1] > 0
    np.testing.assert_allclose(some.sum(1), 1.0, atol=1e-13)
    small = _mix(name, models[[0, 2]], {}, options)
    np.testing.assert_allclose(some[np.ix_([0, 2], [0, 2])], small, atol=1e-12)
    none = _mix(name, models, {}, options, pool=[False] * 4)
    np.testing.assert_array_equal(none, np.eye(4))


@pytest.mark.parametrize("name", BOTH)
def test_who_never_reported_receives_the_mean_of_those_who_did(name: str) -> None:
    """And is in nobody's mixture; before anybody reported, it keeps the initial model."""
    models = np.random.default_rng(2).normal(size=(4, 3))
    mix = _mix(name, models, {}, known=[True, False, True, True])
    np.testing.assert_allclose(mix[1], [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-13)
    assert (mix[[0, 2, 3], 1] == 0).all()
    assert np.array_equal(_mix(name, models, {}, known=[False] * 4), np.eye(4))


@pytest.mark.parametrize("name", BOTH)
def test_who_never_reported_receives_the_mean_of_the_pool(name: str) -> None:
    """With ``pool="participants"`` of the last round alone; of all who did if nobody came then."""
    models = np.random.default_rng(2).normal(size=(4, 3))
    known, options = [True, False, True, True], {"pool": "participants"}
    some = _mix(name, models, {}, options, known=known, pool=[True, False, False, True])
    np.testing.assert_allclose(some[1], [0.5, 0, 0, 0.5], atol=1e-13)
    none = _mix(name, models, {}, options, known=known, pool=[False] * 4)
    np.testing.assert_allclose(none[1], [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_a_newcomer_receives_the_mean_of_the_known(name: str) -> None:
    """``Newcomer.message`` has the form of ``address``; unknown clients receive it."""
    method = build(name, quadratic_task(3), SGD, {})
    models = np.random.default_rng(2).normal(size=(4, 3))
    ctx = _server_context({k: spec.default for k, spec in method.hyper.items()}, 4)
    assert method.newcomer.message is not None
    for known in ([True, False, True, True], [False] * 4):
        message = method.newcomer.message(_server(models, known=known), ctx)
        wanted = models[known].mean(0) if any(known) else models.mean(0)
        np.testing.assert_allclose(message["w"], wanted, atol=1e-13)
        own = method.address(_server(models, known=known), torch.tensor(1), ctx)
        assert message.keys() == own.keys()
        if any(known):
            torch.testing.assert_close(message["w"], own["w"])


@pytest.mark.parametrize("pool", ["stored", "participants"])
def test_the_pool_is_everybodys_last_upload_or_the_last_rounds(pool: str) -> None:
    """The server's marks follow the reports of each round, and its table their models."""
    task = net_task()
    method = build("fedamp", task, SGD, {"pool": pool})
    server_contexts = []

    def aggregate(server: Any, uploads: Any, ctx: ServerContext) -> Any:
        server_contexts.append(
            (ctx.cohort.clone(), ctx.present.clone(), uploads["params"]["fc.bias"].clone())
        )
        return method.aggregate(server, uploads, ctx)

    watched = changed(method, aggregate=aggregate)
    sim = simulation(
        watched, task, [federation()], engine="sequential", rounds=4, participation="at_least:0.3"
    )
    known, table = np.zeros(5, dtype=bool), np.zeros((5, 3))
    for _ in range(4):
        sim.step()
        ids, came, biases = (v.numpy() for v in server_contexts[-1])
        here = np.zeros(5, dtype=bool)
        here[ids[came]] = True
        known |= here
        table[ids[came]] = biases[came]
        assert sim.server["known"][0].tolist() == known.tolist()
        wanted = known if pool == "stored" else here
        assert sim.server["pool"][0].tolist() == wanted.tolist()
        stored = sim.server["models"]["fc.bias"][0].numpy()
        np.testing.assert_array_equal(stored[known], table[known])
    assert len({h[1].sum().item() for h in server_contexts}) > 1


# ---- the pull ------------------------------------------------------------------------------------


def _prox(name: str, options: dict, hyper: dict, w: Any, round_index: int = 0) -> np.ndarray:
    """Take one step of rate 0.1 on ½‖w − (2, 2)‖² with u = (0, 1)."""
    method = build(name, quadratic_task(2), Local(steps=1, batch=None), options)
    values = {k: spec.default for k, spec in method.hyper.items()} | hyper | {"local_lr": 0.1}
    blank = ClientContext(**dict.fromkeys(ClientContext._fields))
    ctx = blank._replace(
        hyper={k: _t(v) for k, v in values.items()},
        own={"w": _t([0.0, 1.0])},
        round=torch.tensor(round_index),
    )
    sample = _t([[1.0, 1.0, 2.0, 2.0]])
    batch = Batch(sample, torch.zeros(1).long(), torch.ones(1).bool(), None, None)
    work = method.phases[0].step({"params": {"w": _t(w)}}, batch, ctx)
    found: np.ndarray = work["params"]["w"].numpy()
    return found


PULLS: list[tuple[str, dict, dict]] = [
    ("fedamp", {}, {"prox_strength": 2.0}),
    ("fedamp", ABSOLUTE, {"collaboration": 1.0, "mix_lr": 0.5}),
    ("heur-fedamp", {}, {"prox_strength": 2.0}),
]


@pytest.mark.parametrize(("name", "options", "hyper"), PULLS)
def test_the_pull_has_a_gradient(name: str, options: dict, hyper: dict) -> None:
    """A step is w − η[(w − c) + (λ/α)(w − u)]: the term is squared, its gradient not lost."""
    w = np.array([0.7, -0.4])
    wanted = w - 0.1 * ((w - 2.0) + 2.0 * (w - [0.0, 1.0]))
    np.testing.assert_allclose(_prox(name, options, hyper, w), wanted, atol=1e-14)


@pytest.mark.parametrize(("name", "options", "hyper"), PULLS)
def test_the_proximal_point_has_the_known_number(name: str, options: dict, hyper: dict) -> None:
    """C = (2, 2), u = (0, 1), λ/α = 2: (c + κu)/(1 + κ) = (2/3, 4/3)."""
    w = np.array([5.0, 5.0])
    for _ in range(80):
        w = _prox(name, options, hyper, w)
    np.testing.assert_allclose(w, [2 / 3, 4 / 3], atol=1e-9)


@pytest.mark.parametrize(("name", "options", "hyper"), PULLS)
def test_the_pull_grows_as_the_step_decays(name: str, options: dict, hyper: dict) -> None:
    """With α_k = α/4 from round 5 on, λ/α_k is four times as strong, and not before."""
    w = np.array([0.7, -0.4])
    for k, strength in ((4, 2.0), (5, 8.0)):
        found = _prox(name, {**options, "decay_every": 5}, {**hyper, "mix_decay": 0.25}, w, k)
        wanted = w - 0.1 * ((w - 2.0) + strength * (w - [0.0, 1.0]))
        np.testing.assert_allclose(found, wanted, atol=1e-14)


# ---- limits --------------------------------------------------------------------------------------


def _net(name: str, local: Local = SGD, hyper: dict | None = None, **options: Any) -> Any:
    task = net_task()
    method = build(name, task, local, options)
    feds = two_allocations()
    return run(simulation(method, task, feds, hyper=hyper or {}, participation="all"))


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_pull_is_local_training(local: Local, name: str, options: dict) -> None:
    """λ = 0: every w_i, its momentum and its scores are LocalTrain's, to the bit."""
    hyper = {"collaboration" if options else "prox_strength": 0.0}
    found, wanted = outcome(_net(name, local, hyper, **options)), outcome(_net("local", local))
    for key, value in wanted.items():
        if key.startswith(("client/", "pre/", "post/")):
            np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("name", BOTH)
def test_the_default_is_not_local_training(name: str) -> None:
    """Out of the box the pull acts: public code that equals LocalTrain lost its gradient."""
    found, wanted = states(_net(name)), states(_net("local"))
    key = "client/params/fc.weight"
    assert np.abs(found[key] - wanted[key]).max() > 1e-3


@pytest.mark.parametrize(("name", "options"), CASES)
def test_one_client_is_pulled_to_its_last_model(name: str, options: dict) -> None:
    """With m = 1, u = w: the pull starts at zero, and the first step is LocalTrain's."""
    task, feds = net_task(), [federation(sizes=(9,))]
    local = Local(steps=1, batch=None, lr=0.2)
    sims = [
        run(simulation(build(n, task, local, o), task, feds, rounds=3))
        for n, o in ((name, options), ("local", {}))
    ]
    found, wanted = (states(sim)["client/params/body.weight"] for sim in sims)
    np.testing.assert_allclose(found, wanted, atol=1e-15)


def test_a_round_starts_from_the_own_model_or_from_the_cloud() -> None:
    """Without local steps to speak of, the used model is w_i, or u_i."""
    idle = Local(steps=1, batch=None, lr=1e-300)
    for start in ("own", "cloud"):
        method = build("fedamp", quadratic_task(2), idle, {"start": start})
        ctx = ClientContext(**dict.fromkeys(ClientContext._fields))._replace(
            own={"w": _t([4.0, 4.0])}, index=torch.tensor(0)
        )
        client = method.init_client({"w": _t([1.0, 1.0])}, ctx)
        first = method.begin(client, ctx)["params"]["w"]
        assert first.tolist() == [4.0, 4.0]  # a client without a model of its own
        kept, upload = method.finish(client, {"params": {"w": _t([2.0, 3.0])}}, ctx)
        again = method.begin(kept, ctx)["params"]["w"]
        assert again.tolist() == ([2.0, 3.0] if start == "own" else [4.0, 4.0])
        assert upload["params"]["w"].tolist() == [2.0, 3.0]


# ---- whole runs ----------------------------------------------------------------------------------


def _loop(name: str, centres: np.ndarray, hyper: dict, rounds: int, lr: float) -> np.ndarray:
    """Run the method plainly: full participation, one client after the other, two steps a round."""
    w = np.zeros_like(centres) + 0.1
    m, kappa = len(w), hyper["prox_strength"]
    for k in range(rounds):
        u = np.empty_like(w)
        far = np.square(w[:, None] - w).sum(-1)
        for i in range(m):
            rest = [j for j in range(m) if j != i]
            if name == "fedamp":
                mean = far.sum() / (m * (m - 1))
                sigma = hyper["bandwidth"] * (mean if mean > 0 else 1.0)
                xi = hyper["mix_weight"] / (m - 1) * np.exp(-far[i, rest] / sigma)
            else:
                lengths = np.linalg.norm(w, axis=1)
                cos = w[rest] @ w[i] / lengths[rest] / lengths[i]
                xi = np.exp(hyper["sharpness"] * cos)
                xi *= (1 - hyper["self_weight"]) / xi.sum()
            u[i] = (1 - xi.sum()) * w[i] + xi @ w[rest]
        for _ in range(2):
            w = w - lr * ((w - centres) + kappa * (w - (u if k else 0.1)))
    return w


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedamp", {"bandwidth": 0.6, "mix_weight": 0.8, "prox_strength": 1.5}),
        ("heur-fedamp", {"sharpness": 3.0, "self_weight": 0.3, "prox_strength": 1.5}),
    ],
)
def test_a_run_is_a_plain_loop(name: str, hyper: dict) -> None:
    """Six rounds of quadratics equal a loop over clients in numpy."""
    centres = np.random.default_rng(4).normal(size=(4, 3))
    fed, _ = quadratics(np.ones_like(centres), centres)
    module = Quadratic(3).double()
    with torch.no_grad():
        module.w.fill_(0.1)
    task = Task(module, None, loss_given, never)
    method = build(name, task, Local(steps=2, batch=None, lr=0.2), {})
    sim = run(simulation(method, task, [fed], hyper=hyper, rounds=6, participation="all"))
    wanted = _loop(name, centres, hyper, 6, 0.2)
    np.testing.assert_allclose(sim.server["models"]["w"][0], wanted, atol=1e-6)
    used = np.stack([sim.params(i)["w"].numpy() for i in range(4)])
    np.testing.assert_allclose(used, wanted, atol=1e-6)  # after local training


@pytest.mark.parametrize("name", BOTH)
def test_similar_clients_find_each_other(name: str) -> None:
    """Two clusters of three: in the end a client weighs its own cluster far above the other."""
    draw = np.random.default_rng(0)
    centres = np.repeat(np.eye(8)[:2], 3, axis=0) * 3 + 0.1 * draw.normal(size=(6, 8))
    fed, _ = quadratics(np.ones_like(centres), centres)
    task = Task(Quadratic(8).double(), None, loss_given, never)
    method = build(name, task, Local(steps=3, batch=None, lr=0.2), {})
    hyper = {"bandwidth": 0.3} if name == "fedamp" else {}
    sim = run(simulation(method, task, [fed], hyper=hyper, rounds=10, participation="all"))
    mix = sim.log.snapshots[-1]["mix"][0]
    inside = np.kron(np.eye(2, dtype=bool), np.ones((3, 3), dtype=bool)) & ~np.eye(6, dtype=bool)
    outside = np.kron(~np.eye(2, dtype=bool), np.ones((3, 3), dtype=bool))
    assert mix[inside].min() > 20 * mix[outside].max()


@pytest.mark.parametrize("name", BOTH)
def test_one_model_travels_each_way(name: str) -> None:
    """Up w_i and down u_i, |θ| each."""
    ledger = _net(name).ledger()
    size = 8 * (4 * 5 + 5 + 5 * 3 + 3)
    assert (ledger.bytes_up == size * ledger.participants).all()
    assert (ledger.bytes_down == ledger.bytes_up).all()


def test_faults_and_facts() -> None:
    """A decay that never comes is refused; the model after training is the one that is used."""
    for name in BOTH:
        with pytest.raises(ConfigError, match="decay_every must be >= 1, got 0"):
            build(name, net_task(), SGD, {"decay_every": 0})
        assert build(name, net_task(), SGD, {}).use.headline == "post"
        assert METHODS[name].hyper["prox_strength"].default > 0
