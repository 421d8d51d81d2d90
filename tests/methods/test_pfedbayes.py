"""pFedBayes: Gaussian weights, own distributions near a global one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.nn import functional as F

from sartor.core import rng, tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.methods import build
from sartor.methods.pfedbayes import kl, log_sigma, sampled
from tests.toys import assert_same, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=3, lr=0.05)
HEAVY = replace(SGD, lr=0.02, momentum=0.9, weight_decay=0.01)
KEPT = replace(HEAVY, keep_optimiser=True)
SILENT = {"noise_scale": 0.0}


def _sim(local: Local = SGD, options: dict | None = None, name: str = "pfedbayes", **settings):
    task = net_task()
    return simulation(build(name, task, local, options or {}), task, [federation()], **settings)


def _gauss(mean: float, sigma: float) -> dict:
    """Return N(mean, sigma²) as (μ, ρ)."""
    one = torch.ones(1, dtype=torch.float64)
    return {"mu": {"w": mean * one}, "rho": {"w": torch.log(torch.expm1(sigma * one))}}


# ---- the divergence ------------------------------------------------------------------------------


def test_the_divergence_has_the_known_numbers() -> None:
    """KL(N(0,1)‖N(1,4)) = 0.443147, the other way 1.306853; the sum over weights."""
    a, b = _gauss(0.0, 1.0), _gauss(1.0, 2.0)
    assert float(kl(a, b)) == pytest.approx(0.443147, abs=1e-6)
    assert float(kl(b, a)) == pytest.approx(1.306853, abs=1e-6)
    twice = {k: {"w": torch.cat([v["w"]] * 2), "z": v["w"].reshape(1, 1)} for k, v in a.items()}
    other = {k: {"w": torch.cat([v["w"]] * 2), "z": v["w"].reshape(1, 1)} for k, v in b.items()}
    assert float(kl(twice, other)) == pytest.approx(3 * 0.443147, abs=1e-5)


def test_equal_distributions_have_no_divergence_and_no_slope() -> None:
    """KL(q‖q) = 0 with zero gradient on both sides."""
    q = _gauss(0.7, 0.3)
    assert float(kl(q, q)) == 0.0
    for side in (0, 1):
        slope = torch.func.grad(kl, argnums=side)(q, q)
        for leaf in tree.leaves(slope):
            assert_allclose(leaf, 0.0, atol=1e-14)


def test_the_slope_in_the_global_distribution() -> None:
    """∂KL/∂μ_w = (μ_w − μ_q)/σ_w²; ∂KL/∂σ_w = 1/σ_w − (σ_q² + (μ_q − μ_w)²)/σ_w³."""
    mq, sq, mw, sw = 0.5, 0.8, -0.4, 1.7
    slope = torch.func.grad(kl, argnums=1)(_gauss(mq, sq), _gauss(mw, sw))
    assert float(slope["mu"]["w"]) == pytest.approx((mw - mq) / sw**2, abs=1e-12)
    by_sigma = 1 / sw - (sq**2 + (mq - mw) ** 2) / sw**3
    rho = math.log(math.expm1(sw))
    assert float(slope["rho"]["w"]) == pytest.approx(by_sigma / (1 + math.exp(-rho)), abs=1e-12)


def test_spreads_far_below_one_are_no_trouble() -> None:
    """Log σ is ρ itself for very negative ρ, continuous at the seam, and its slope is finite."""
    rho = torch.tensor([-2.5, -19.999999, -20.000001, -60.0, -200.0, 50.0], dtype=torch.float64)
    direct = torch.log(F.softplus(rho[:4]))
    assert_allclose(log_sigma(rho)[:4], direct, atol=1e-8)
    assert_allclose(log_sigma(rho)[3:5], rho[3:5], atol=1e-12)
    slope = torch.func.grad(lambda r: log_sigma(r).sum())(rho)
    assert bool(torch.isfinite(slope).all())
    assert_allclose(slope[2:5], 1.0, atol=1e-8)
    for dtype in (torch.float32, torch.float64):
        far = {
            "mu": {"w": torch.ones(1, dtype=dtype)},
            "rho": {"w": torch.tensor([-80.0]).to(dtype)},
        }
        near = tree.map(torch.clone, far)
        for leaf in tree.leaves(torch.func.grad(kl)(far, near)):
            assert_allclose(leaf, 0.0, atol=1e-6)


def test_with_equal_fixed_spreads_it_is_a_proximal_term() -> None:
    """(ζ/n) KL = (λ/2)‖μ_q − μ_w‖² with λ = ζ/(nσ²); ρ = −3: σ = 0.0485874, ζ/σ² = 4235.98."""
    sigma = math.log1p(math.exp(-3.0))
    assert sigma == pytest.approx(0.0485874, abs=1e-7)
    assert 10.0 / sigma**2 == pytest.approx(4235.98, abs=0.01)
    a, b = _gauss(0.3, sigma), _gauss(-0.2, sigma)
    assert 10.0 * float(kl(a, b)) == pytest.approx(0.5 * 4235.98 * 0.25, abs=1e-3)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [SGD, KEPT], ids=["plain", "kept"])
def test_without_noise_and_pull_it_is_local_training(local: Local) -> None:
    """ζ = 0 and ε = 0: the mean is LocalTrain's (to the bit without decay), ρ never moves."""
    hyper = {**SILENT, "kl_strength": 0.0}
    wanted = outcome(run(_sim(local, {"participation": "sampled"}, "local", rounds=4)))
    sim = run(_sim(local, hyper=hyper, rounds=4))
    found = outcome(sim)
    tight = {"rtol": 0.0, "atol": 0.0 if local is SGD else 1e-13}
    for name, leaf in wanted.items():
        if name.startswith("client/params/"):
            assert_allclose(found[name.replace("params", "own/mu")], leaf, **tight)
        if name.startswith(("pre/", "post/")):
            assert_allclose(found[name], leaf, rtol=0.0, atol=1e-11)
    for leaf in sim.store.gather(sim.context.everybody)["own"]["rho"].values():
        assert bool((leaf == -2.5).all())


def test_without_pull_the_server_is_constant() -> None:
    """ζ = 0: u_i = v for ever, though every client trains with noise."""
    sim = _sim(hyper={"kl_strength": 0.0}, rounds=4)
    before = states(sim)
    after = states(run(sim))
    for name in before:
        gap = np.abs(after[name] - before[name]).max()
        assert gap < 1e-14 if name.startswith("server") else gap > 1e-3, name


def test_the_servers_mixing() -> None:
    """β = 0 leaves v; β = 1 takes the mean of the u_i; in between it is linear, in μ and in ρ."""
    found = {}
    for beta in (0.0, 0.5, 1.0):
        sim = _sim(hyper={"relax": beta, "kl_strength": 1.0}, rounds=1)
        start = states(sim)
        found[beta] = states(run(sim))
    for name in start:
        if name.startswith("server"):
            assert_allclose(found[0.0][name], start[name], atol=1e-15)
            half = 0.5 * (start[name] + found[1.0][name])
            assert_allclose(found[0.5][name], half, atol=1e-15)
            assert np.abs(found[1.0][name] - start[name]).max() > 1e-7


def test_a_lone_client_gives_the_server_its_copy() -> None:
    """One client and β = 1: v = u_1; spreads are averaged as ρ, evenly or by samples."""
    seen = []
    for weights in ("uniform", "samples"):
        task = net_task()
        method = build("pfedbayes", task, SGD, {"weights": weights})

        def finish(client, work, ctx, method=method):
            seen.append((int(ctx.num_samples), method.finish(client, work, ctx)[1]["params"]))
            return method.finish(client, work, ctx)

        watched = changed(method, finish=finish)
        for fed in (federation(sizes=(9,)), federation()):
            seen.clear()
            sim = simulation(
                watched, task, [fed], engine="sequential", rounds=1, participation="all"
            )
            run(sim)
            share = [n if weights == "samples" else 1 for n, _ in seen]
            for part in ("mu", "rho"):
                for name, leaf in sim.server["params"][part].items():
                    mean = sum(p * u[part][name] for p, (_, u) in zip(share, seen, strict=True))
                    assert_allclose(leaf[0], mean / sum(share), atol=1e-14)


# ---- a step --------------------------------------------------------------------------------------


def _by_hand(task, local, own, near, batches, keys, n, hyper, draws, personal_steps):
    """Take the steps of one client one by one, with torch's own autograd."""
    own, near = (tree.map(torch.clone, d) for d in (own, near))
    num = sum(leaf.numel() for leaf in tree.leaves(own["mu"]))
    speed, pace = tree.zeros_like(own), tree.zeros_like(near)
    mu, decay = local.momentum, local.weight_decay

    def kl_by_hand(q, w):
        total = 0.0
        for name in q["mu"]:
            sq, sw = F.softplus(q["rho"][name]), F.softplus(w["rho"][name])
            gap = (q["mu"][name] - w["mu"][name]).square()
            total = (
                total + (torch.log(sw / sq) + (sq.square() + gap) / (2 * sw.square()) - 0.5).sum()
            )
        return total

    zeta = hyper["kl_strength"] / n
    for batch, key in zip(batches, keys, strict=True):
        noise = rng.normal(key, (personal_steps, draws, num), torch.float64)
        x, y = batch.x[batch.mask], batch.y[batch.mask]
        for j in range(personal_steps):

            def loss(q, j=j, x=x, y=y, noise=noise, near=near):
                fit = 0.0
                for k in range(draws):
                    at, net = 0, {}
                    for name in sorted(q["mu"]):
                        size = q["mu"][name].numel()
                        eps = noise[j, k, at : at + size].reshape(q["mu"][name].shape)
                        net[name] = q["mu"][name] + F.softplus(q["rho"][name]) * eps
                        at += size
                    fit = fit + F.cross_entropy(task.logits(net, x), y) / draws
                weights = sum(leaf.square().sum() for leaf in q["mu"].values())
                return fit + 0.5 * decay * weights + zeta * kl_by_hand(q, near)

            slope = torch.func.grad(loss)(own)
            speed = tree.map(lambda v, g: mu * v + g, speed, slope)
            own = tree.map(lambda p, v: p - hyper["local_lr"] * v, own, speed)
        slope = torch.func.grad(lambda w, own=own: zeta * kl_by_hand(own, w))(near)
        pace = tree.map(lambda v, g: mu * v + g, pace, slope)
        near = tree.map(lambda p, v: p - hyper["copy_lr"] * v, near, pace)
    return own, near


@pytest.mark.parametrize(
    ("local", "options"),
    [(SGD, {}), (HEAVY, {"draws": 2, "personal_steps": 3}), (KEPT, {"personal_steps": 2})],
    ids=["plain", "heavy", "kept"],
)
def test_a_round_is_that_of_a_plain_loop(local: Local, options: dict) -> None:
    """Own steps with new noise each, then one of the copy: both KLs have the own one first."""
    task = net_task()
    hyper = {"local_lr": local.lr, "copy_lr": 0.03, "kl_strength": 0.7, "rho_start": -2.0}
    method = build("pfedbayes", task, local, options)
    (train,) = method.phases
    seen: dict[int, list] = {}

    def step(work, batch, ctx):
        seen.setdefault(int(ctx.index), []).append((batch, ctx.key, float(ctx.num_samples)))
        return train.step(work, batch, ctx)

    ends = {}

    def finish(client, work, ctx):
        ends[int(ctx.index)] = (work["own"], work["copy"]["near"])
        return method.finish(client, work, ctx)

    watched = changed(method, phases=(replace(train, step=step),), finish=finish)
    sim = simulation(
        watched,
        task,
        [federation()],
        hyper=hyper,
        engine="sequential",
        rounds=1,
        participation="all",
    )
    start = {
        k: {n: leaf[0].clone() for n, leaf in v.items()} for k, v in sim.server["params"].items()
    }
    run(sim)
    for i, steps in seen.items():
        batches, keys, sizes = zip(*steps, strict=True)
        own, near = _by_hand(
            task,
            local,
            start,
            start,
            batches,
            keys,
            sizes[0],
            hyper,
            options.get("draws", 1),
            options.get("personal_steps", 1),
        )
        for wanted, found in ((own, ends[i][0]), (near, ends[i][1])):
            for (name, a), (_, b) in zip(tree.items(wanted), tree.items(found), strict=True):
                assert_allclose(b, a, atol=1e-11, err_msg=name)


def test_the_own_distribution_is_kept_and_the_copy_is_not() -> None:
    """V_i survives the download; u_i starts at v in every round, and its momentum anew."""
    task = net_task()
    method = build("pfedbayes", task, KEPT, {})
    (train,) = method.phases
    starts = []

    def enter(work, ctx):
        entered = train.enter(work, ctx)
        starts.append((int(ctx.round), int(ctx.index), entered, ctx.common["params"]))
        return entered

    sim = simulation(
        changed(method, phases=(replace(train, enter=enter),)),
        task,
        [federation()],
        engine="sequential",
        participation="all",
        rounds=2,
    )
    sim.step()
    kept = sim.store.gather(sim.context.everybody)
    sim.step()
    second = [(i, work, common) for t, i, work, common in starts if t == 1]
    assert len(second) == 5
    for i, work, common in second:
        for name, leaf in tree.items(work["own"]):
            assert torch.equal(leaf, dict(tree.items(kept["own"]))[name][0, i])
        for name, leaf in tree.items(work["velocity"]["own"]):
            assert torch.equal(leaf, dict(tree.items(kept["velocity"]["own"]))[name][0, i])
        for (_, a), (_, b) in zip(
            tree.items(work["copy"]["near"]), tree.items(common), strict=True
        ):
            assert torch.equal(a, b)
        assert all(not leaf.any() for leaf in tree.leaves(work["copy"]["velocity"]))
    assert any(leaf.any() for leaf in tree.leaves(kept["velocity"]))


def test_the_noise_has_the_spread_of_the_distribution() -> None:
    """θ = μ + σ ε with ε of variance one; new noise at every step, client and round."""
    task = net_task()
    method = build("pfedbayes", task, SGD, {})
    (train,) = method.phases
    keys = []

    def step(work, batch, ctx):
        keys.append(tuple(ctx.key.tolist()))
        return train.step(work, batch, ctx)

    run(
        simulation(
            changed(method, phases=(replace(train, step=step),)),
            task,
            [federation()],
            engine="sequential",
        )
    )
    assert len(set(keys)) == len(keys) > 20
    one = torch.ones(4000, dtype=torch.float64)
    own = {"mu": {"w": 3.0 * one}, "rho": {"w": -1.0 * one}}
    net = sampled(own, rng.normal(rng.key(1), (4000,), torch.float64))
    assert float(net["w"].mean()) == pytest.approx(3.0, abs=0.02)
    assert float(net["w"].std()) == pytest.approx(math.log1p(math.exp(-1.0)), rel=0.05)


def test_the_scale_of_the_noise_is_that_of_a_narrower_draw() -> None:
    """A scale of 0 makes draws and seeds of noise irrelevant; a scale of 1 does not."""
    quiet = [outcome(run(_sim(options={"draws": k}, hyper=SILENT))) for k in (1, 3)]
    for name, leaf in quiet[0].items():
        if not name.endswith("evaluations"):
            assert_allclose(quiet[1][name], leaf, atol=1e-12, err_msg=name)
    loud = [outcome(run(_sim(options={"draws": k}))) for k in (1, 3)]
    assert np.abs(loud[0]["pre/test/loss"] - loud[1]["pre/test/loss"]).max() > 1e-4


def test_without_noise_clients_are_interchangeable() -> None:
    """Equal clients with full batches stay equal: only their noise sets them apart."""
    one = federation(sizes=(9,))
    same = replace(
        one,
        **{
            s: type(one.train).from_lists([one.split(s).of(0)] * 3)
            for s in ("train", "val", "test")
        },
        names=tuple("abc"),
    )
    task = net_task()
    method = build("pfedbayes", task, replace(HEAVY, batch=None), {})
    for scale, apart in ((0.0, False), (1.0, True)):
        sim = simulation(method, task, [same], hyper={"noise_scale": scale}, participation="all")
        loss = run(sim).scores()["pre", "test"].loss[0, -1]
        assert (np.ptp(loss) > 1e-6) == apart


# ---- use -----------------------------------------------------------------------------------------


def test_the_mean_network_is_used_or_an_average_over_drawn_ones() -> None:
    """By default μ; with draws, the mean of the probabilities of networks from q_i."""
    task = net_task()
    sim = run(_sim(rounds=2))
    kept = sim.store.gather(sim.context.everybody)["own"]
    assert_array_equal(sim.params(1)["fc.weight"], kept["mu"]["fc.weight"][0, 1])
    assert_array_equal(
        sim.params(0, point="global")["fc.weight"], sim.server["params"]["mu"]["fc.weight"][0]
    )
    drawn = run(_sim(options={"predict_draws": 3}, rounds=2))
    assert_same(states(drawn), states(sim))
    nets = drawn.params(1)["networks"]
    x = federation().x[:6]
    wanted = torch.stack(
        [torch.softmax(task.logits({n: v[k] for n, v in nets.items()}, x), -1) for k in range(3)]
    ).mean(0)
    found = drawn.method.use.predict({"networks": nets}, x).exp()
    assert_allclose(found, wanted, atol=1e-13)
    assert all(bool((leaf[0] != leaf[1]).all()) for leaf in nets.values())
    spread = nets["fc.weight"] - kept["mu"]["fc.weight"][0, 1]
    assert 0.02 < float(spread.std()) < 0.2
    quiet = run(_sim(options={"predict_draws": 2}, rounds=2, hyper=SILENT))
    plain = run(_sim(rounds=2, hyper=SILENT))
    assert_allclose(
        quiet.scores()["pre", "test"].loss, plain.scores()["pre", "test"].loss, atol=1e-12
    )


def test_everybody_starts_at_one_distribution() -> None:
    """μ is the network's start and ρ = ρ_0, on the server and on every client."""
    sim = _sim(hyper={"rho_start": -3.0})
    start = net_task().init(0)
    kept = sim.store.gather(sim.context.everybody)["own"]
    for name, leaf in start.items():
        assert torch.equal(sim.server["params"]["mu"][name][0], leaf.double())
        assert torch.equal(kept["mu"][name][0, 4], leaf.double())
        assert bool((sim.server["params"]["rho"][name] == -3.0).all())
        assert bool((kept["rho"][name] == -3.0).all())


def test_an_absent_client_keeps_its_distribution() -> None:
    """With one client a round, the other four stay at the start."""
    sim = _sim(participation=1, rounds=1)
    before = states(sim)
    after = states(run(sim))
    for name in before:
        if name.startswith("client/own/mu"):
            moved = np.abs(after[name] - before[name])[0].reshape(5, -1).max(1) > 0
            assert moved.sum() == 1


def test_the_ledger() -> None:
    """Twice FedAvg's bytes; personal_steps · K gradients a sample, and none for the KL step."""
    task = net_task()
    plain = run(simulation(build("fedavg", task, SGD, {}), task, [federation()])).ledger()
    for options, times in (({}, 1), ({"draws": 2, "personal_steps": 3}, 6)):
        ours = run(_sim(options=options)).ledger()
        assert_array_equal(ours.gradient_evaluations, times * plain.gradient_evaluations)
        assert_array_equal(ours.bytes_up, 2 * plain.bytes_up)
        assert_array_equal(ours.bytes_down, 2 * plain.bytes_down)
        assert ours.forward_evaluations.sum() == 0


def test_what_is_private_and_what_is_refused() -> None:
    """q_i stays at home; counts must make sense, and all faults are named at once."""
    method = build("pfedbayes", net_task(), SGD, {})
    assert method.wire.private("own")
    assert method.use.headline == "pre"
    assert method.phases[0].random
    with pytest.raises(ConfigError, match=r"draws must be >= 1, got 0; .*\npersonal_steps"):
        build("pfedbayes", net_task(), SGD, {"draws": 0, "personal_steps": 0})
    with pytest.raises(ConfigError, match="predict_draws must be >= 0, got -1"):
        build("pfedbayes", net_task(), SGD, {"predict_draws": -1})
