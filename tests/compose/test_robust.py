"""Robust means against numbers computed by hand, and what a bad client can do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.compose import robust
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ClientContext, Method, changed
from sartor.core.task import Task
from sartor.methods import METHODS, build
from sartor.methods.fedavg import fedavg
from tests.laws import Case
from tests.toys import assert_same, federation, net_task, outcome, run, simulation, two_allocations

YES = torch.ones(5, dtype=torch.bool)
ROWS = {
    "w": torch.tensor([[1.0, 5.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [1000.0, -4.0]]).double()
}


def first(found: Any) -> list[float]:
    """All slots hold the same: return it."""
    leaf = found["w"]
    assert torch.equal(leaf, leaf[:1].expand_as(leaf))
    return leaf[0].tolist()


def test_median_by_hand() -> None:
    assert first(robust.coordinate_median(ROWS, YES)) == [3.0, 2.0]
    four = torch.tensor([True, True, False, True, True])
    assert first(robust.coordinate_median(ROWS, four)) == [3.0, 2.0]  # (2+4)/2, (1+3)/2
    two = torch.tensor([False, True, False, False, True])
    assert first(robust.coordinate_median(ROWS, two)) == [501.0, -1.5]


def test_trimmed_mean_by_hand() -> None:
    assert first(robust.trimmed_mean(ROWS, YES, 0.2)) == [3.0, 2.0]  # one off each end
    assert first(robust.trimmed_mean(ROWS, YES, 0.0)) == [202.0, pytest.approx(1.4)]
    four = torch.tensor([True, True, True, True, False])
    assert first(robust.trimmed_mean(ROWS, four, 0.25)) == [2.5, 2.5]


def test_the_number_of_bad_uploads_is_exact() -> None:
    """⌊share · n⌋ in whole numbers: 0.42 · 150 is 63, not a little less."""
    for percent in range(50):
        for n in range(1, 301):
            assert int(robust._bad(torch.tensor(n), percent / 100)) == percent * n // 100


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_ties_go_to_the_smallest_number(rule: str) -> None:
    """As in Krum's paper, whatever the order of the slots, which is by size.

    Of two uploads both are equally near; of three in equal steps (f = 1) all are, and two are kept.
    """
    method = robust.robust(fedavg(net_task(), Local()), rule, share=0.34, mix=False)
    two = rule == "krum"
    rows = [[30.0], [10.0]] if two else [[2.0], [-2.0], [0.0]]
    numbers = [1, 0] if two else [2, 0, 1]
    ctx = SimpleNamespace(
        cohort=torch.tensor(numbers),
        present=torch.ones(len(rows), dtype=torch.bool),
        sizes=torch.tensor([1, 2, 3][: len(rows)]),
        hyper={"relax": torch.tensor(1.0, dtype=torch.float64)},
    )
    server = {"params": {"w": torch.zeros(1, dtype=torch.float64)}}
    uploads = {"params": {"w": torch.tensor(rows, dtype=torch.float64)}}
    found = float(method.aggregate(server, uploads, ctx)["params"]["w"])
    assert found == (10.0 if two else -1.0)


LINE = {"w": torch.tensor([[0.0], [1.0], [1.5], [4.0], [100.0]]).double()}


def test_krum_by_hand() -> None:
    """N = 5, f = 1: the two nearest.

    0: 1 + 2.25. 1: 0.25 + 1. 1.5: 0.25 + 2.25. 4: 6.25 + 9. The smallest is that of 1.
    """
    assert first(robust.krum(LINE, YES, 0.2)) == [1.0]
    gone = torch.tensor([True, False, True, True, True])  # n = 4, f = 0: two nearest
    assert first(robust.krum(LINE, gone, 0.0)) == [1.5]  # 2.25 + 6.25 against 2.25 + 16, 6.25 + 16
    assert first(robust.krum(LINE, torch.tensor([False, False, False, True, False]), 0.2)) == [4.0]


def test_multi_krum_by_hand() -> None:
    assert first(robust.multi_krum(LINE, YES, 0.2)) == [pytest.approx(6.5 / 4)]
    assert first(robust.multi_krum(LINE, YES, 0.4)) == [pytest.approx(2.5 / 3)]


def test_clipping_by_hand() -> None:
    """Around the median 1.5 the distances are 1.5, 0.5, 0, 2.5, 98.5; their median is 1.5."""
    found = robust.clipped(LINE, YES)["w"].flatten().tolist()
    assert found == pytest.approx([0.0, 1.0, 1.5, 3.0, 3.0])


def test_mixing_by_hand() -> None:
    """N = 5, f = 1: of 0, 1, 1.5, 4 the four nearest are themselves; of 100 they are 1, ..., 100.

    With f = 2 the three nearest of 4 are 4, 1.5, 1.
    """
    found, there = robust.mixed(LINE, YES, 0.2)
    assert found["w"].flatten().tolist() == pytest.approx([1.625] * 4 + [26.625])
    assert there.tolist() == [True] * 5
    found, _ = robust.mixed(LINE, YES, 0.4)
    assert found["w"].flatten().tolist() == pytest.approx(
        [2.5 / 3, 2.5 / 3, 2.5 / 3, 6.5 / 3, 105.5 / 3]
    )


def test_mixing_leaves_out_the_absent_and_what_is_not_a_number() -> None:
    rows = {"w": LINE["w"].clone(), "v": torch.zeros(5, 2, 3).double()}
    rows["v"][1, 0, 2] = torch.nan
    gone = torch.tensor([True, True, True, True, False])
    found, there = robust.mixed(rows, gone, 0.34)  # three are left, f = 1
    assert there.tolist() == [True, False, True, True, False]
    assert found["w"].flatten()[there].tolist() == pytest.approx([0.75, 0.75, 2.75])
    assert found["v"].shape == (5, 2, 3)
    assert torch.equal(found["v"][there], torch.zeros(3, 2, 3).double())


def test_krum_of_mixtures_is_a_mean_of_the_good_ones() -> None:
    """Where Krum alone returns one upload, 1.0, mixed it returns the mean of four."""
    method = build("fedavg", net_task(), Local(), {"robust": "krum"})  # mixes by itself
    plain = build("fedavg", net_task(), Local(), {"robust": "krum", "robust_mix": False})
    rows = {"params": {"w": LINE["w"]}}
    server = {"params": {"w": torch.zeros(1).double()}}
    ctx: Any = SimpleNamespace(
        present=YES,
        cohort=torch.arange(5),
        sizes=torch.ones(5),
        hyper={k: torch.tensor(v.default).double() for k, v in method.hyper.items()},
    )
    assert plain.aggregate(server, rows, ctx)["params"]["w"].item() == pytest.approx(1.0)
    assert method.aggregate(server, rows, ctx)["params"]["w"].item() == pytest.approx(1.625)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "clip"])
def test_what_is_not_a_number_is_an_outlier(rule: str) -> None:
    rows = {"w": ROWS["w"].clone()}
    rows["w"][4] = torch.nan
    found = robust._RULES[rule](rows, YES, 0.2)["w"]
    assert torch.isfinite(found).all()
    assert found.max() <= 5.0


@pytest.mark.parametrize("name", [n for n in METHODS if Case(n).build(net_task()).wire.averaged])
def test_what_is_called_averaged_is_averaged(name: str) -> None:
    """With equal clients, the mean of the uploads in every slot leaves the server as it is."""
    task = net_task()
    method = Case(name).build(task)
    seen = []

    def checked(record: Method) -> Method:
        def aggregate(server: Any, uploads: Any, ctx: Any) -> Any:
            mean = {
                k: tree.map(lambda leaf: leaf.mean(0).expand(leaf.shape), v)
                if k in record.wire.averaged
                else v
                for k, v in uploads.items()
            }
            plain = record.aggregate(server, uploads, ctx)
            other = record.aggregate(server, mean, ctx)
            for (leaf, a), (_, b) in zip(tree.items(plain), tree.items(other), strict=True):
                assert torch.allclose(a, b, atol=1e-12), leaf
            seen.append(record.wire.averaged)
            return plain

        return changed(record, aggregate=aggregate)

    record = changed(
        checked(method), before=method.schedule.before and checked(method.schedule.before)
    )
    fed = federation(sizes=(6, 6, 6, 6))
    sim = simulation(record, task, [fed], participation="all", engine="sequential")
    run(sim)
    assert seen


def test_methods_that_keep_every_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not average"):
        build("fedapa", net_task(), Local(), {"robust": "median"})
    with pytest.raises(ConfigError, match="bad majority"):
        build("fedavg", net_task(), Local(), {"robust": "median", "robust_share": 0.5})
    with pytest.raises(ConfigError, match="no effect"):
        build("fedavg", net_task(), Local(), {"robust_share": 0.1})
    with pytest.raises(ConfigError, match="robust_mix has no effect"):
        build("fedavg", net_task(), Local(), {"robust_mix": True})


@pytest.mark.parametrize(
    ("rule", "mix"),
    [
        ("median", False),
        ("trimmed_mean", False),
        ("krum", False),
        ("krum", True),
        ("multi_krum", False),
        ("clip", True),
    ],
)
def test_engines_and_sweeps_agree(rule: str, mix: bool) -> None:
    case = Case("ditto", {"robust": rule, "robust_share": 0.25, "robust_mix": mix})
    task = net_task()

    def outcome_of(engine: str) -> Any:
        method = case.build(task)
        return outcome(run(simulation(method, task, two_allocations(), engine=engine)))

    assert_same(outcome_of("vectorised"), outcome_of("sequential"), atol=1e-11)


def test_equal_uploads_are_averaged_plainly() -> None:
    """Where all clients are alike, every rule is the plain mean."""
    one = federation(sizes=(9,))
    lists = {
        s: type(one.train).from_lists([one.split(s).of(0)] * 5) for s in ("train", "val", "test")
    }
    same = replace(one, **lists, names=tuple("abcde"))
    local = Local(epochs=1, batch=None, lr=0.2)
    task = net_task()
    losses = []
    for rule in ("none", "median", "trimmed_mean", "krum", "multi_krum", "clip"):
        method = build("fedavg", task, local, {"robust": rule})
        sim = run(simulation(method, task, [same], participation="all"))
        losses.append(sim.scores()["pre", "test"].loss)
    for loss in losses[1:]:
        np.testing.assert_allclose(loss, losses[0], atol=1e-12)


def poisoned(task: Task, local: Local) -> Method:
    """FedAvg whose first client uploads the negative of its model, ten times as large."""
    base = fedavg(task, local)

    def finish(client: Any, work: Any, ctx: ClientContext) -> Any:
        kept, upload = base.finish(client, work, ctx)
        bad = tree.map(lambda leaf: torch.where(ctx.index == 0, -10.0 * leaf, leaf), upload)
        return kept, bad

    return changed(base, name="poisoned", finish=finish)


def honest(method: Any, partition: str = "dirichlet:100", **options: Any) -> np.ndarray:
    """Train on two allocations of the digits; return the accuracy of the nine honest clients."""
    seeds = (0, 1)
    feds = [
        sartor.Federation.from_dataset("digits", clients=10, partition=partition, seed=seed)
        for seed in seeds
    ]
    result = sartor.fit(
        method,
        feds,
        seeds=seeds,
        options=options,
        rounds=15,
        local=Local(epochs=2, batch=16, lr=0.1),
        points=("pre",),
        eval_every=15,
        device="cpu",
    )
    scores = result.scores["pre", "test"]
    return np.asarray(scores.correct[:, -1, 1:].sum(1) / scores.count[:, 1:].sum(1))


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Return what plain averaging reaches without a bad client."""
    return honest("fedavg")


@pytest.mark.parametrize(
    ("rule", "mix"),
    [
        pytest.param("median", False, marks=pytest.mark.slow),
        ("trimmed_mean", False),
        ("multi_krum", False),
        pytest.param("clip", False, marks=pytest.mark.slow),
        ("krum", True),
    ],
)
def test_one_bad_client_out_of_ten_does_little_harm(
    rule: str, mix: bool, plain: np.ndarray
) -> None:
    """On the digits less than two points, in every allocation.

    Against the same rule without the bad client, and against plain averaging without it.
    """
    options = {"robust": rule} if rule == "krum" else {"robust": rule, "robust_mix": mix}
    bad = honest(poisoned, **options)
    assert np.abs(bad - honest("fedavg", **options)).max() < 0.02
    assert (plain - bad).max() < 0.02


@pytest.mark.slow
def test_a_bad_client_among_unlike_ones_does_little_harm_to_mixtures() -> None:
    """Dirichlet 0.5, one in ten expected: Krum of mixtures stays with plain averaging."""
    options = {"robust": "krum", "robust_share": 0.1, "robust_mix": True}
    bad = honest(poisoned, "dirichlet:0.5", **options)
    assert (honest("fedavg", "dirichlet:0.5") - bad).max() < 0.02


def test_without_a_rule_one_bad_client_ruins_everything(plain: np.ndarray) -> None:
    """That is what the rules are for; Krum takes one client's model, and costs accuracy itself."""
    assert honest(poisoned).max() < 0.5
    alone = honest(poisoned, robust="krum", robust_mix=False)
    assert alone.min() > 0.75
    assert (plain - alone).mean() > 0.04
