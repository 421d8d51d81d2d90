"""The dichotomous strategy: one of FedAvg and LocalTrain, never a mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ServerContext, changed
from sartor.core.task import Task, given, never
from sartor.data.federation import Federation
from sartor.methods import build
from tests.toys import Net, federation, net_task, outcome, run, simulation, states

SGD = Local(epochs=2, batch=4, lr=0.2)


def fitted(
    options: dict[str, Any],
    fed: Federation,
    task: Task | None = None,
    local: Local = SGD,
    **settings: Any,
) -> Any:
    """Run the strategy."""
    task = task or net_task()
    return run(simulation(build("dichotomous", task, local, options), task, [fed], **settings))


def alone(name: str, fed: Federation, task: Task, local: Local = SGD, **settings: Any) -> Any:
    """Run one of the two candidates as a method of its own."""
    return run(simulation(build(name, task, local, {}), task, [fed], **settings))


def separated(seed: int = 0, spread: float = 0.0, clients: int = 4, samples: int = 40) -> Any:
    """Make clients whose labels follow their own linear rule, ``spread`` apart."""
    draw = np.random.default_rng(seed)
    base = draw.normal(size=4)
    x, y, who = [], [], []
    for i in range(clients):
        rule = base + spread * draw.normal(size=4)
        inputs = draw.normal(size=(samples, 4))
        x.append(inputs)
        y.append((inputs @ rule > 0).astype(np.int64))
        who += [f"c{i}"] * samples
    arrays = torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y))
    return Federation.from_arrays(*arrays, client=who, test=0.25, seed=seed)


@pytest.mark.parametrize("participation", ["all", 0.6])
@pytest.mark.parametrize(
    ("radius", "chosen"), [(0.0, "fedavg"), (0.3, "fedavg"), (0.7, "local"), (1e9, "local")]
)
def test_the_threshold_deploys_one_of_the_two_runs_to_the_bit(
    radius: float, chosen: str, participation: Any
) -> None:
    """R² ≤ (‖ℓ‖∞/μ)·m/N (here 5/27) is FedAvg, above it is LocalTrain; only that one costs."""
    task, fed = net_task(), federation()
    found = fitted(
        {"version": "threshold"},
        fed,
        task,
        hyper={"heterogeneity": radius},
        participation=participation,
    )
    wanted = alone(chosen, fed, task, participation=participation)
    # A cohort among everybody is added up in another order than a cohort alone.
    atol = 0.0 if participation == "all" or chosen == "local" else 1e-13
    np.testing.assert_allclose(
        found.scores()["pre", "test"].loss, wanted.scores()["pre", "test"].loss, atol=atol, rtol=0
    )
    log, theirs = found.ledger(), wanted.ledger()
    assert log.gradient_evaluations.tolist() == theirs.gradient_evaluations.tolist()
    if chosen == "local":
        assert log.bytes_up.sum() == log.bytes_down.sum() == 0
    else:
        assert log.bytes_up.tolist() == theirs.bytes_up.tolist()
        extra = log.bytes_down - theirs.bytes_down  # the choice itself travels with each message
        assert extra.tolist() == (8 * theirs.participants).tolist()


def test_messages_that_are_not_sent_do_not_matter() -> None:
    """Where everybody trains alone, no model is counted, and a broken one would change nothing."""
    task, fed = net_task(), federation()
    method = build("dichotomous", task, SGD, {"version": "threshold"})

    def broken(server: Any, ctx: Any) -> Any:
        return tree.map(lambda leaf: leaf * torch.nan, method.broadcast(server, ctx))

    hyper = {"heterogeneity": 1e9}
    wanted = run(simulation(method, task, [fed], hyper=hyper))
    found = run(simulation(changed(method, broadcast=broken), task, [fed], hyper=hyper))
    np.testing.assert_array_equal(
        found.scores()["pre", "test"].loss, wanted.scores()["pre", "test"].loss
    )
    assert wanted.ledger().bytes_down.sum() == 0


def test_the_threshold_moves_with_its_scale() -> None:
    """The switch is where R² = (‖ℓ‖∞/μ)·m/N, and there is only one."""
    task, fed = net_task(), federation()
    for scale in (0.5, 2.0):
        edge = (scale * 5 / 27) ** 0.5
        choices = []
        for radius in (0.0, 0.5 * edge, 0.999 * edge, 1.001 * edge, 2 * edge):
            hyper = {"heterogeneity": radius, "threshold_scale": scale}
            sim = fitted({"version": "threshold"}, fed, task, hyper=hyper, rounds=1)
            choices.append(int(sim.server["choice"][0, 0]))
        assert choices == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("spread", "chosen"), [(0.0, 0), (30.0, 1)])
@pytest.mark.parametrize("select_on", ["holdout", "test"])
def test_held_out_samples_choose_the_better_one(spread: float, chosen: int, select_on: str) -> None:
    """Clients that share a rule federate; clients with rules of their own do not."""
    fed = separated(spread=spread, samples=40)
    task = Task(Net(classes=2), head="fc")
    sim = fitted({"select_on": select_on, "score": "loss"}, fed, task, rounds=12)
    assert sim.server["choice"][0].tolist() == [chosen] * 4
    errors = sim.server["errors"][0]
    assert (errors.mean(0).argmin() == chosen).item()


def test_selection_on_all_samples_deploys_a_candidate_to_the_bit() -> None:
    """With validation data given nothing is held out of training: each run is the run alone."""
    task, fed = net_task(), federation(val=4)
    options = {"select_on": "validation", "scope": "client", "score": "loss"}
    found = fitted(options, fed, task, participation="all")
    candidates = [alone(name, fed, task, participation="all") for name in ("fedavg", "local")]
    choice = found.store.gather(found.context.everybody)["choice"][0]
    assert 0 < int(choice.sum()) < 5  # both occur
    for client in range(5):
        wanted = candidates[int(choice[client])].params(client)
        for name, leaf in found.params(client).items():
            assert torch.equal(leaf, wanted[name])
    losses = np.stack([c.scores()["pre", "val"].loss[0, -1] for c in candidates])
    np.testing.assert_array_equal(losses.argmin(0), choice.numpy())
    np.testing.assert_allclose(found.scores()["pre", "val"].loss[0, -1], losses.min(0), atol=1e-12)


def test_a_choice_per_client_is_never_worse_on_the_samples_that_chose() -> None:
    """The errors of `scope="client"` on validation data are at most those of `scope="system"`."""
    task = net_task()
    for seed in range(3):
        fed = federation(seed, val=4)
        both = [
            fitted({"select_on": "validation", "scope": scope, "score": "loss"}, fed, task)
            for scope in ("client", "system")
        ]
        loss = [sim.scores()["pre", "val"].loss[0, -1] for sim in both]
        assert (loss[0] <= loss[1] + 1e-12).all()


def test_the_system_weighs_clients_by_their_samples() -> None:
    """Σ p_i err_i with p_i = n_i/N decides, and the ledger has the scores once."""
    task, fed = net_task(), federation(val=4)
    sim = fitted({"select_on": "validation", "score": "loss"}, fed, task, participation="all")
    errors = sim.server["errors"][0].numpy()
    share = fed.train.sizes.numpy() / fed.train.sizes.numpy().sum()
    assert sim.server["choice"][0].tolist() == [int((share @ errors).argmin())] * 5
    model = sum(leaf.numel() for leaf in sim.params(0).values()) * 8
    messages = 5 * (model + 8)  # the last common model and the choice so far, to everybody
    assert sim.ledger().setup_bytes[0] == messages + 5 * 3 * 8
    assert sim.ledger().setup_forward[0] == 2 * 5 * 4


@pytest.mark.parametrize("large", [0, 1])
def test_a_large_client_outweighs_two_small_ones(large: int) -> None:
    """Of 70, 3 and 1 samples the first decides for all, whom the others would outvote evenly."""
    method = build("dichotomous", net_task(), SGD, {"select_on": "validation"})
    last = method.schedule.after
    assert last is not None
    sizes, zero = torch.tensor([70, 3, 1]), torch.zeros(3, dtype=torch.int64)
    ctx = ServerContext({}, torch.zeros(2), zero[0], sizes, torch.arange(3), zero == 0)
    errors = torch.tensor([[0.0, 10.0], [10.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    errors = errors if large == 0 else errors.flip(1)
    sums = torch.cat((errors, torch.full((3, 1), 10.0, dtype=torch.float64)), 1)
    server: Any = {"choice": zero, "group": zero, "errors": errors * 0.0}
    server |= {"global": {}, "local": {}}
    assert last.aggregate(server, {"sums": sums}, ctx)["choice"].tolist() == [large] * 3


def test_one_client_has_nothing_to_choose() -> None:
    """M = 1: FedAvg and LocalTrain coincide, and the tie goes to FedAvg."""
    fed = federation(sizes=(9,), val=4)
    sim = fitted({"select_on": "validation"}, fed, participation="all")
    assert sim.server["choice"].tolist() == [[0]]
    np.testing.assert_allclose(sim.server["errors"][0, 0, 0], sim.server["errors"][0, 0, 1])


def test_halves_of_a_sample_split_are_disjoint() -> None:
    """LocalTrain and FedAvg see different samples, and all of them between the two."""
    task = net_task()
    options = {"version": "sample_split", "select_on": "validation"}
    method = build("dichotomous", task, SGD, options)
    seen: dict[str, set[tuple[int, int]]] = {"fedavg": set(), "local": set()}

    def watch(phase: Any) -> Any:
        def step(work: Any, batch: Any, ctx: Any) -> Any:
            rows = batch.rows[batch.mask].tolist()
            seen[phase.name.split(":")[0]] |= {(int(ctx.index), row) for row in rows}
            return phase.step(work, batch, ctx)

        return replace(phase, step=step)

    watched = changed(method, phases=tuple(watch(p) for p in method.phases))
    fed = federation(val=4)
    run(simulation(watched, task, [fed], engine="sequential", participation="all"))
    assert not seen["fedavg"] & seen["local"]
    everything = {(i, r) for i, n in enumerate(fed.train.sizes.tolist()) for r in range(n)}
    assert seen["fedavg"] | seen["local"] == everything


def test_held_out_samples_take_no_part_in_training() -> None:
    """What decides was never trained on: poisoned labels there leave both models as they are."""
    task, local, fed = net_task(), Local(epochs=1, batch=None, lr=0.1), federation()
    method = build("dichotomous", task, local, {})
    assert method.schedule.after is not None
    (compare,) = method.schedule.after.phases
    held_out: set[int] = set()

    def look(work: Any, batch: Any, ctx: Any) -> Any:
        mine = fed.train.of(int(ctx.index))
        held_out.update(mine[batch.rows[batch.mask]].tolist())
        return compare.step(work, batch, ctx)

    last = changed(method.schedule.after, phases=(replace(compare, step=look),))
    watched = changed(method, after=last)
    clean = run(simulation(watched, task, [fed], engine="sequential", rounds=2))
    rows = torch.tensor(sorted(held_out))
    assert len(rows) >= 5
    y = fed.y.clone()
    y[rows] = (y[rows] + 1) % 3
    poisoned = Federation(fed.x, y, fed.train, fed.val, fed.test, fed.names, 3, {})
    other = fitted({}, poisoned, task, local, engine="sequential", rounds=2)
    found, wanted = states(other), states(clean)
    trained = [name for name in wanted if "params" in name]
    assert len(trained) == 8
    for name in trained:
        np.testing.assert_array_equal(found[name], wanted[name])
    assert not np.array_equal(found["server/errors"], wanted["server/errors"])


def mean_estimation(radius2: float, seed: int, groups: int = 1, gap: float = 0.0) -> Any:
    """Make the estimation of means: d = 5, m = 10, n = 50, noise 1, Σ p_i ‖w_i* − w̄*‖² = R²."""
    draw = np.random.default_rng(seed)
    m, n, d = 10, 50, 5
    centres = draw.normal(size=(m, d))
    centres -= centres.mean(0)
    centres *= (radius2 / (centres**2).sum(1).mean()) ** 0.5
    centres += gap * (np.arange(m) % groups)[:, None]
    z = centres[:, None, :] + draw.normal(size=(m, n + 5, d))
    flat = torch.from_numpy(z.reshape(-1, d))
    who = np.repeat([f"c{i:02d}" for i in range(m)], n + 5)
    label = torch.zeros(len(flat), dtype=torch.int64)
    return Federation.from_arrays(flat, label, client=who, test=5 / 55, seed=seed), centres


class Mean(nn.Module):
    """A point w whose loss is ½‖w − x‖²."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.w - x).square().sum(-1)


EXACT = Local(steps=1, batch=None, lr=1.0)  # one step finds the mean


@pytest.mark.parametrize(("radius2", "chosen"), [(0.0, 0), (0.02, 0), (0.3, 1), (1.0, 1)])
def test_the_estimated_radius_finds_the_crossover_of_mean_estimation(
    radius2: float, chosen: int
) -> None:
    """MSE_local = 0.1 and MSE_global = R² + 0.01 cross at R² = 0.09; far from it, few err."""
    task = Task(Mean(), None, given, never)
    votes, errors = [], []
    for seed in range(8):
        fed, truth = mean_estimation(radius2, seed)
        options = {"version": "threshold", "radius": "estimated", "fit_epochs": 1}
        sim = fitted(options, fed, task, EXACT, participation="all", rounds=1)
        votes.append(int(sim.server["choice"][0, 0]))
        fits = np.stack([sim.params(i)["w"].numpy() for i in range(10)])
        errors.append(((fits - truth) ** 2).sum(1).mean())
    assert np.mean(np.array(votes) == chosen) >= 0.75
    assert np.mean(errors) == pytest.approx(0.1 if chosen else radius2 + 0.01, rel=0.35)


@pytest.mark.parametrize("options", [{}, {"num_clusters": 2}, {"inside": "threshold"}])
def test_far_clusters_are_never_averaged_together(options: dict[str, Any]) -> None:
    """Two far groups: a decision per group, FedAvg inside each, nothing across."""
    fed, _ = mean_estimation(0.0, 3, groups=2, gap=10.0)
    task = Task(Mean(), None, given, never)
    chosen = {"version": "clustered", "fit_epochs": 1, "score": "loss", **options}
    sim = fitted(chosen, fed, task, EXACT, participation="all", rounds=2)
    assert sim.server["group"][0].tolist() == [0, 1] * 5
    fits = np.stack([sim.params(i)["w"].numpy() for i in range(10)])
    assert sim.server["choice"][0].tolist() == [0] * 10
    for k in (0, 1):
        members = fits[k::2]
        np.testing.assert_allclose(members, np.tile(members[0], (5, 1)), atol=1e-12)
        assert abs(members[0].mean() - 10.0 * k) < 0.3


def test_a_client_alone_in_its_cluster_trains_alone() -> None:
    """A group of one keeps its own model and sends nothing after the fits."""
    fed, _ = mean_estimation(0.0, 1)
    x = fed.x.clone()
    x[fed.train.of(9)] += 50.0
    fed = Federation(x, fed.y, fed.train, fed.val, fed.test, fed.names, fed.num_classes, {})
    task = Task(Mean(), None, given, never)
    chosen = {"version": "clustered", "fit_epochs": 1, "score": "loss"}
    sim = fitted(chosen, fed, task, EXACT, participation="all", rounds=2)
    assert sim.server["group"][0].tolist() == [0] * 9 + [9]
    assert sim.server["choice"][0].tolist() == [0] * 9 + [1]
    message = (5 + 1) * 8
    assert sim.ledger().bytes_up[0].tolist() == [9 * 5 * 8] * 2
    assert sim.ledger().bytes_down[0].tolist() == [9 * message] * 2


def test_evaluations_before_the_end_show_what_would_be_deployed() -> None:
    """The choice is made anew, on copies, at every evaluation; training does not notice."""
    task, fed = net_task(), federation(val=4)
    options = {"select_on": "validation", "scope": "client", "score": "loss"}
    sim = simulation(build("dichotomous", task, SGD, options), task, [fed], rounds=4)
    short = fitted(options, fed, task, rounds=2)
    sim.step()
    sim.step()
    assert (sim.store.gather(sim.context.everybody)["choice"] == 0).all()
    np.testing.assert_array_equal(
        sim.scores()["pre", "test"].loss[0, -1], short.scores()["pre", "test"].loss[0, -1]
    )
    for client in range(5):
        for name, leaf in sim.params(client).items():
            assert torch.equal(leaf, short.params(client)[name])


def test_shares_must_be_shares() -> None:
    """A share of 0 or more than 1 is refused by name."""
    with pytest.raises(ConfigError, match="val_share"):
        build("dichotomous", net_task(), SGD, {"val_share": 1.5})
    with pytest.raises(ConfigError, match="split_share"):
        build("dichotomous", net_task(), SGD, {"split_share": 0.0})


def test_validation_data_must_exist_to_choose_on_them() -> None:
    """A federation without validation data is refused before anything runs."""
    fed = federation(val=0)
    with pytest.raises(ConfigError, match="validation data"):
        fitted({"select_on": "validation"}, fed)


def test_engines_see_the_same_choice() -> None:
    """One by one or in lanes: the same decisions and states."""
    wanted = outcome(fitted({"version": "clustered", "fit_epochs": 2}, federation()))
    found = outcome(
        fitted({"version": "clustered", "fit_epochs": 2}, federation(), engine="sequential")
    )
    np.testing.assert_array_equal(found["server/choice"], wanted["server/choice"])
