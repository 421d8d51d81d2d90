"""Federated stability measured by training again: worked numbers, scaling laws, and exactness."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import sartor
from sartor.analysis.replacement import Replacements, draw, find_pool
from sartor.analysis.stability import stability
from sartor.core.errors import ConfigError, DivergedError, FederationError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.data.synthetic import logistic
from sartor.engines.arena import build_arena, with_replacements
from sartor.theory import stability as theory
from tests.toys import Net, Parabola, federation, net_task

F64 = torch.float64
EXACT = {"device": "cpu", "dtype": "float64", "chunk": 1 << 20}
SGD = Local(epochs=2, batch=3, lr=0.3)


# ---- mean estimation -----------------------------------------------------------------------------


def means(sizes: tuple[int, ...], dim: int = 3) -> tuple[Federation, Replacements]:
    """Clients that estimate means, and for three records of each a z′ at distance 1."""
    rng = np.random.default_rng(5)
    records = [rng.normal(size=(n, dim)) for n in sizes]
    picks = [rng.choice(n, 3, replace=False) for n in sizes]
    away = rng.normal(size=(3 * len(sizes), dim))
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    near = np.concatenate([r[p] for r, p in zip(records, picks, strict=True)]) + away
    z = np.concatenate([*records, near])
    total, each = sum(sizes), np.full(len(sizes), 3)
    fed = Federation(
        torch.from_numpy(np.concatenate([np.ones_like(z), z], 1)),
        torch.zeros(len(z), dtype=torch.int64),
        Ragged.from_sizes(np.arange(total), np.asarray(sizes)),
        Ragged.empty(len(sizes)),
        Ragged.from_sizes(np.arange(total, len(z)), each),
        tuple(f"c{i}" for i in range(len(sizes))),
        1,
    )
    who = np.repeat(np.arange(len(sizes)), 3)
    return fed, Replacements(who, np.concatenate(picks), np.arange(total, len(z)))


def measured(name: str, fed: Federation, swap: Replacements, **more: Any) -> np.ndarray:
    """Train to convergence with full gradients; FedProx with steps that are exact for H = I."""
    if name == "fedprox":
        more["options"] = {
            "preset": "paper_synthetic",
            "smoothness": 1.0,
            **more.get("options", {}),
        }
    local = Local(steps=1, batch=None, lr=1.0)
    found = stability(
        name, fed, model=Parabola(3), local=local, rounds=4, replacements=swap, **EXACT, **more
    )
    return found.per_client("distance")


@pytest.mark.parametrize(
    ("name", "hyper", "s"),
    [("local", {}, 0.1), ("fedavg", {}, 0.02), ("fedprox", {"prox_strength": 4.0}, 0.036)],
)
def test_mean_estimation_gives_the_worked_numbers(name: str, hyper: Any, s: float) -> None:
    """½‖w − z‖², n = 10, ‖z − z′‖ = 1, five clients, λ = 4: 0.1, 0.02 and 0.036 by training."""
    found = measured(name, *means((10,) * 5), hyper=hyper)
    np.testing.assert_allclose(found, s, rtol=1e-9)


def test_fedprox_converges_to_its_number_with_the_plain_mean_too() -> None:
    """The default preset, w_g the mean of the w_i, contracts by λ/(1+λ) a round to the same s."""
    fed, swap = means((10,) * 5)
    local = Local(steps=1, batch=None, lr=0.2)
    settings: Any = {"local": local, "hyper": {"prox_strength": 4.0}, "rounds": 90, **EXACT}
    found = stability("fedprox", fed, model=Parabola(3), replacements=swap, **settings)
    np.testing.assert_allclose(found.distance, 0.036, rtol=1e-7)


def test_the_distance_falls_as_one_over_the_samples() -> None:
    """Log-log slope −1 in n_i at equal weights, for all three methods."""
    sizes = (5, 10, 20, 40, 80)
    for name, more in (
        ("local", {}),
        ("fedavg", {"options": {"rule": "uniform"}}),
        ("fedprox", {"hyper": {"prox_strength": 1.5}}),
    ):
        found = measured(name, *means(sizes), **more)
        slope = np.polyfit(np.log(sizes), np.log(found), 1)[0]
        assert slope == pytest.approx(-1.0, abs=1e-8), name


def test_fedavg_is_linear_in_the_weight() -> None:
    """The distance is p_i/n."""
    p = (0.05, 0.1, 0.2, 0.25, 0.4)
    options = {"rule": "p_weighted", "client_weights": p}
    found = measured("fedavg", *means((10,) * 5), options=options)
    np.testing.assert_allclose(found, np.array(p) / 10, rtol=1e-9)


def test_fedprox_goes_down_from_local_to_fedavg() -> None:
    """The distance is (1/n)(1 + λp_i)/(1 + λ): 1/n at λ = 0, decreasing, p_i/n at λ = ∞."""
    pulls = (0.0, 0.25, 1.0, 4.0, 32.0, 1e4)
    clients = means((10,) * 5)
    found = [measured("fedprox", *clients, hyper={"prox_strength": v})[0] for v in pulls]
    expected = [0.1 * (1 + v / 5) / (1 + v) for v in pulls]
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert found[0] == pytest.approx(0.1)
    assert (np.diff(found) < 0).all()
    assert found[-1] == pytest.approx(0.02, rel=1e-3)


# ---- ridge logistic regression -------------------------------------------------------------------


class Ridge(nn.Module):
    """Logistic loss of a sample (x, y) plus (ν/2)‖w‖², as the output."""

    head: str | None = None
    criterion = "given"
    ridge = 0.1

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        score = (x[..., :-1] * self.w).sum(-1)
        return softplus(score) - x[..., -1] * score + self.ridge / 2 * self.w.square().sum()


@pytest.fixture(scope="module")
def ridge() -> Federation:
    """Four clients of 150, 200, 250 and 300 samples, labels among the features."""
    fed, _ = logistic("theory", clients=4, samples=300, test_samples=40, dim=4, spread=0.7)
    x = torch.cat([fed.x, fed.y[:, None].to(F64)], 1)
    train = Ragged.from_lists([fed.train.of(i)[: 150 + 50 * i] for i in range(4)])
    zeros = torch.zeros(len(x), dtype=torch.int64)
    return Federation(x, zeros, train, fed.val, fed.test, fed.names, 1)


def ridge_settings(name: str, lam: float) -> Any:
    """Converge, with full gradients; FedAvg must then take one step a round."""
    single = name == "fedavg"
    local = Local(steps=1 if single else 8, batch=None, lr=3.0 / (1.0 + lam))
    hyper = {"prox_strength": lam} if name == "fedprox" else {}
    rounds = {"local": 8, "fedavg": 60, "fedprox": 30}[name]
    return {"model": Ridge(4), "local": local, "hyper": hyper, "rounds": rounds, **EXACT}


def slopes(fed: Federation, w: Tensor, client: int) -> tuple[Tensor, Tensor]:
    """Return all per-sample gradients at w, (samples, d), and the Hessian of a client's loss."""
    x, y = fed.x[:, :-1], fed.x[:, -1]
    rate = torch.sigmoid(x @ w)
    own = fed.train.of(client)
    curve = (x[own].T * (rate * (1 - rate))[own]) @ x[own] / len(own)
    return (rate - y)[:, None] * x + Ridge.ridge * w, curve + Ridge.ridge * torch.eye(4, dtype=F64)


@pytest.mark.parametrize(("name", "lam"), [("local", 0.0), ("fedavg", 0.0), ("fedprox", 0.5)])
def test_the_shortcut_is_close_to_training_again(ridge: Federation, name: str, lam: float) -> None:
    """On ridge logistic regression, within 4 % for every replacement and 1 % on average."""
    settings = ridge_settings(name, lam)
    found = stability(name, ridge, replacements=7, **settings)
    fitted = sartor.fit(name, ridge, eval_every=settings["rounds"], **settings)
    models = [dict(fitted.model(i).named_parameters())["w"].detach() for i in range(4)]
    pairs = [slopes(ridge, w, k) for k, w in enumerate(models)]
    curves = torch.stack([pair[1] for pair in pairs])
    p = torch.full((4,), 0.25, dtype=F64)
    sizes = ridge.train.sizes
    if name == "fedavg":
        p = sizes.to(F64) / sizes.sum()
    shortcut = []
    for i, j, row in zip(*found.replacements, strict=True):
        n = int(sizes[i])
        old, new = pairs[i][0][ridge.train.of(i)[j]], pairs[i][0][row]
        shift = {
            "local": lambda i=i, a=old, b=new, n=n: theory.local_shift(curves[i], a, b, n),
            "fedavg": lambda i=i, a=old, b=new, n=n: theory.fedavg_shift(curves, p, i, a, b, n),
            "fedprox": lambda i=i, a=old, b=new, n=n: theory.fedprox_shift(
                curves, p, lam, i, a, b, n
            ),
        }[name]()
        shortcut.append(float(shift.norm()))
    ratio = np.array(shortcut) / found.distance
    assert np.abs(ratio - 1).max() < 0.04
    assert abs(ratio.mean() - 1) < 0.01


def test_the_measured_stability_is_below_the_bounds(ridge: Federation) -> None:
    """γ̂ <= γ_i <= the theorems' bounds; and Lemma 26 holds lane by lane."""
    nu = Ridge.ridge
    largest = float(ridge.x[:, :-1].norm(dim=1).max())
    radius = (2 * np.log(2) / nu) ** 0.5  # L_i(ŵ) <= L_i(0) = ln 2
    known = {
        "smoothness": largest**2 / 4 + nu,
        "loss_bound": float(np.log1p(np.exp(radius * largest))) + nu / 2 * radius**2,
    }
    convex = {"strong_convexity": nu, **known}
    lam = 0.02  # p_i λ <= μ/16
    sizes = ridge.train.sizes.numpy()
    for name, bounds in (
        ("local", [theory.local_bound(n, **convex) for n in sizes]),
        ("fedavg", [theory.fedavg_bound(n, n / sizes.sum(), **convex) for n in sizes]),
        ("fedprox", [theory.fedprox_bound(n, 0.25, lam, **convex) for n in sizes]),
    ):
        settings = {**ridge_settings(name, lam), "rounds": 12}
        found = stability(name, ridge, replacements=7, **settings)
        assert (found.gamma > 0).all()
        assert (found.gamma <= np.array(bounds)).all(), name
        limit = theory.loss_change(torch.from_numpy(found.distance), **known).numpy()
        assert (found.change <= limit).all(), name


# ---- exactness -----------------------------------------------------------------------------------


def swaps(fed: Federation) -> Replacements:
    """Replace two records of every client by its validation samples."""
    who = np.repeat(np.arange(fed.num_clients), 2)
    record = np.tile([0, 1], fed.num_clients)
    return Replacements(who, record, fed.val.rows.numpy())


def half_changed(name: str, **more: Any) -> tuple[Any, np.ndarray]:
    """Measure lanes of which every other one has z′ = z; say which are changed indeed."""
    fed = federation()
    real = swaps(fed)
    same = np.array([int(fed.train.of(i)[j]) for i, j in zip(*real[:2], strict=True)])
    moved = np.arange(len(same)) % 2 == 0
    mixed = Replacements(real.client, real.record, np.where(moved, real.row, same))
    settings: Any = {"model": Net(), "local": SGD, "rounds": 2, "participation": 0.8, **EXACT}
    return stability(name, fed, replacements=mixed, **settings, **more), moved


@pytest.mark.parametrize("name", ["local", "fedavg", "fedprox", "fedapa"])
def test_changing_nothing_changes_nothing_to_the_bit(name: str) -> None:
    """z′ = z gives s = Δ = 0: SGD sees the same batches, cohorts and draws in every lane."""
    found, moved = half_changed(name, engine="sequential")
    assert (found.distance[~moved] == 0).all()
    assert (found.change[~moved] == 0).all()
    assert (found.distance[moved] > 0).any()


QUICK = ("fedavg-ft", "fedem", "pfedbayes", "scaffold")
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(sartor.methods.METHODS)
    if name not in QUICK
]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_changing_nothing_changes_nothing_in_any_method(name: str) -> None:
    """Many lanes at once: equal up to the rounding of exp and log at the ends of long vectors."""
    found, moved = half_changed(name)
    assert found.distance[~moved].max() < 1e-13
    assert found.change[~moved].max() < 1e-13
    assert (found.distance[moved] > 1e-6).any()
    assert (found.change[moved] > 1e-6).any()


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedprox", "fedapa"])
def test_a_lane_is_the_single_run_of_its_federation(name: str) -> None:
    """Training the perturbed federation alone gives the same s and Δ, to 1e-10."""
    fed = federation()
    swap = swaps(fed)
    common: Any = {"model": Net(), "local": SGD, "rounds": 3, "participation": 0.8, **EXACT}
    found = stability(name, fed, replacements=swap, seed=4, **common)
    rows = fed.test.rows
    x, y = fed.x[rows], fed.y[rows]

    def alone(train: Ragged, client: int) -> tuple[Tensor, Tensor]:
        changed = Federation(
            fed.x, fed.y, train, Ragged.empty(5), fed.test, fed.names, fed.num_classes
        )
        model = sartor.fit(name, changed, seeds=4, points=(), **common).model(client)
        losses = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), losses

    for k in (3, 8):
        i, j, row = (int(part[k]) for part in swap)
        lists = [fed.train.of(c).clone() for c in range(5)]
        before = alone(Ragged.from_lists(lists), i)
        lists[i][j] = row
        after = alone(Ragged.from_lists(lists), i)
        assert found.distance[k] == pytest.approx(float((before[0] - after[0]).norm()), abs=1e-10)
        assert found.change[k] == pytest.approx(
            float((before[1] - after[1]).abs().max()), abs=1e-10
        )


def test_passes_do_not_change_the_numbers() -> None:
    """A small memory budget makes several passes, with the same s and Δ."""
    fed = federation()
    common: Any = {"model": Net(), "local": SGD, "rounds": 2, "replacements": 4, **EXACT}
    whole = stability("fedapa", fed, **common)
    parts = stability("fedapa", fed, memory=100_000, **common)
    assert whole.passes == 1
    assert parts.passes > 2
    np.testing.assert_allclose(parts.distance, whole.distance, atol=1e-12)
    np.testing.assert_allclose(parts.change, whole.change, atol=1e-12)
    reference = stability("fedapa", fed, **{**common, "engine": "sequential"})
    np.testing.assert_allclose(reference.distance, whole.distance, atol=1e-12)


def test_lanes_share_the_data() -> None:
    """Features are not copied, and a lane adds the list of its one client."""
    fed = federation()
    base = build_arena([fed], torch.device("cpu"), F64)
    client, record = np.array([-1, 1, 3, 1]), np.array([0, 2, 8, 2])
    many = with_replacements(base, client, record, np.array([0, 11, 12, 13]))
    assert many.x.data_ptr() == fed.x.data_ptr()
    train, sizes = many.splits["train"], fed.train.sizes.numpy()
    assert len(train.rows) == sizes.sum() + sizes[1] + sizes[3] + sizes[1]
    for run, new in enumerate((None, 11, 12, 13)):
        for i in range(5):
            first = train.start[run, i]
            expected = fed.train.of(i).clone()
            if new is not None and i == client[run]:
                expected[record[run]] = new
            assert train.rows[first : first + train.size[run, i]].tolist() == expected.tolist()


# ---- draws, pools and reports --------------------------------------------------------------------


def test_draws_follow_their_keys() -> None:
    """The same seed draws the same; more draws, or fewer clients, change no draw that is left."""
    fed = federation(sizes=(40, 40, 4, 9, 5))
    pool = find_pool(fed, "test", sartor.methods.build("fedavg", net_task(), SGD, {}))
    all_of = draw(fed, pool, range(5), 30, seed=3)
    again, fewer = draw(fed, pool, range(5), 30, seed=3), draw(fed, pool, [3, 0], 8, seed=3)
    for part, same, some in zip(all_of, again, fewer, strict=True):
        assert (part == same).all()
        assert (part.reshape(5, 30)[[3, 0], :8] == some.reshape(2, 8)).all()
    assert (all_of.record[:30] != all_of.record[30:60]).any()  # equal clients, draws of their own
    other = draw(fed, pool, range(5), 30, seed=4)
    assert (other.record != all_of.record).any()
    assert (other.row != all_of.row).any()
    assert len(set(all_of.record[:30].tolist())) > 15  # 30 draws of 40 hit about 21
    for i, j, row in zip(*all_of, strict=True):
        assert 0 <= j < fed.train.sizes[i]
        assert row in fed.test.of(i)


def test_the_report_reproduces_and_sums_up() -> None:
    """One seed, one report; γ̂ is the largest Δ, beside mean and 95 % quantile."""
    fed = federation()
    common: Any = {"model": Net(), "local": SGD, "rounds": 2, "seed": 1, **EXACT}
    one = stability("fedavg", fed, clients=["c3", 1], replacements=6, **common)
    two = stability("fedavg", fed, clients=["c3", 1], replacements=6, **common)
    assert (one.distance == two.distance).all()
    assert (one.change == two.change).all()
    assert one.pool == "validation data of the client"
    assert np.isnan(one.gamma[[0, 2, 4]]).all()
    own = one.change[one.replacements.client == 3]
    assert len(own) == 6
    assert one.gamma[3] == own.max()
    assert one.per_client()[3] == pytest.approx(own.mean())
    assert one.per_client(quantile=0.95)[3] == pytest.approx(np.quantile(own, 0.95))
    assert [row[0] for row in one.table().rows] == ["c1", "c3"]
    assert "lower bound" in str(one)


def test_the_pool_is_held_out_and_stated() -> None:
    """Validation data, unless there are none or the method trains on them; then test data."""
    plain = sartor.methods.build("fedavg", net_task(), SGD, {})
    fomo = sartor.methods.build("fedfomo", net_task(), SGD, {"select_on": "validation"})
    fed, bare = federation(), federation(val=0)
    assert find_pool(fed, None, plain).name.startswith("validation")
    assert find_pool(bare, None, plain).name.startswith("test")
    assert any(phase.data == "val" for phase in fomo.phases)
    assert find_pool(fed, None, fomo).name.startswith("test")


def test_a_pool_of_fresh_samples_joins_the_features() -> None:
    """Drawn samples are added; the result is as if they had been in the federation."""
    fed = federation()
    fresh = Federation(fed.x + 1, fed.y, fed.train, fed.val, fed.test, fed.names, fed.num_classes)
    common: Any = {"model": Net(), "local": SGD, "rounds": 2, **EXACT}
    found = stability("fedavg", fed, pool=fresh, replacements=3, **common)
    swap = found.replacements
    joint = Federation(
        torch.cat([fed.x, fresh.x]), fed.y.repeat(2), fed.train, fed.val, fed.test, fed.names, 3
    )
    inside = Replacements(swap.client, swap.record, swap.row + len(fed.x))
    again = stability("fedavg", joint, replacements=inside, **common)
    np.testing.assert_allclose(found.distance, again.distance, atol=1e-14)
    assert (found.distance > 0).all()


def test_the_evaluation_set_can_be_chosen() -> None:
    """Δ over all test samples is at least that over the client's own; a pair is taken as it is."""
    fed = federation()
    common: Any = {"model": Net(), "local": SGD, "rounds": 2, "replacements": 3, **EXACT}
    wide = stability("fedavg", fed, **common)
    own = stability("fedavg", fed, eval_set="own", **common)
    given = stability(
        "fedavg", fed, eval_set=(fed.x[fed.test.rows], fed.y[fed.test.rows]), **common
    )
    assert (wide.change >= own.change).all()
    assert (wide.change > own.change).any()
    np.testing.assert_allclose(given.change, wide.change, rtol=1e-12)


class Steps:
    """A progress bar that remembers."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def start(self, total_rounds: int, description: str) -> None:
        self.seen.append((total_rounds, description))

    def update(self, round_index: int, info: dict[str, Any]) -> None:
        self.seen.append(round_index)

    def stop(self) -> None:
        self.seen.append("stop")


def test_progress_counts_the_rounds_of_all_passes() -> None:
    """Two passes of three rounds are six steps."""
    steps = Steps()
    found = stability(
        "local", federation(), model=Net(), rounds=3, replacements=2, memory=30_000, progress=steps,
        **EXACT,
    )  # fmt: skip
    total = 3 * found.passes
    assert found.passes > 1
    assert steps.seen == [(total, f"local ({10 + found.passes} runs)"), *range(total), "stop"]


def test_what_cannot_be_measured_is_refused() -> None:
    """Each refusal says what to do instead."""
    fed = federation()
    bare = Federation(
        fed.x, fed.y, fed.train, Ragged.empty(5), Ragged.empty(5), fed.names, fed.num_classes
    )
    common: Any = {"model": Net(), "rounds": 1, **EXACT}
    with pytest.raises(FederationError, match="nothing to replace a record by"):
        stability("local", bare, **common)
    with pytest.raises(FederationError, match="needs test samples"):
        stability("local", bare, pool=fed, **common)
    with pytest.raises(ConfigError, match="Unknown pool"):
        stability("local", fed, pool="train", **common)
    with pytest.raises(ConfigError, match="Unknown eval_set"):
        stability("local", fed, eval_set="tests", **common)
    with pytest.raises(ConfigError, match="none of them twice"):
        stability("local", fed, clients=[1, "c1"], **common)
    with pytest.raises(ConfigError, match="which has 2; positions"):
        stability("local", fed, replacements=Replacements(*np.array([[0], [2], [0]])), **common)
    with pytest.raises(ConfigError, match="leave pool= and clients= out"):
        stability("local", fed, replacements=swaps(fed), pool="val", **common)
    with pytest.raises(FederationError, match="belong to the same client"):
        stability("local", fed, pool=federation(sizes=(3, 4)), **common)
    hot, swap = means((4, 4))
    wild: Any = {"model": Parabola(3), "rounds": 3, "local": Local(lr=1e200), **EXACT}
    with pytest.raises(DivergedError, match="smaller local_lr"):
        stability("fedavg", hot, replacements=swap, **wild)


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of docs/stability.md; FedAvg is steadier than LocalTrain there."""
    page = (Path(__file__).parents[2] / "docs" / "stability.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    shown = capsys.readouterr().out
    largest = [float(line) for line in shown.splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert largest[0] > largest[1] > 0
    assert re.findall(r"tensor\(([\d.]+)\)", shown) == ["0.1000", "0.0200", "0.0360"]


def test_the_models_compared_are_those_that_are_used() -> None:
    """FedAPA's are taken after local training: those of one round are LocalTrain's."""
    common: Any = {"model": Net(), "local": SGD, "rounds": 1, "replacements": 2, **EXACT}
    mixed, alone = (stability(name, federation(), **common) for name in ("fedapa", "local"))
    np.testing.assert_allclose(mixed.distance, alone.distance, rtol=1e-12)
    averaged = stability("fedavg", federation(), **common)  # after aggregation
    assert (averaged.distance < alone.distance).all()
