"""The reproductions of "The Effect of Personalization in FedProx", and what they look at."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor import reproduce
from sartor.core.errors import ConfigError
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.reproduce import runner
from sartor.reproduce.derived import derive
from sartor.reproduce.passes import passes_of, run_pass
from sartor.reproduce.plan import SETTINGS, Plan, load, read
from sartor.reproduce.problems import Problem, make_problem
from sartor.reproduce.records import measure
from sartor.reproduce.rules import View, judge

PLANS = [name for name in reproduce.names() if name.startswith("prox-")]
FIGURES = [f"Figure {n}" for n in ("1(a)", "1(b)", "1(c)", "1(d)", "1(e)", "1(f)", "2", "3")]
FIGURES += ["Figure 4(a)", "Figure 4(b)", "Figure 5", "Figure 6", "Table 3", "Table 4"]


def tiny(**parts: Any) -> dict[str, Any]:
    """Three clients of a synthetic problem, LocalTrain and FedAvg, two rounds of three steps."""
    settings = {"data": "logistic-theory", "spread": 0.5, "clients": 3, "samples": 12, "dim": 4}
    settings |= {"test_samples": 6, "steps": 3, "batch": 0, "rounds": 2, "dtype": "float64"}
    settings |= {"points": ["pre"], "lr": 0.5, **parts.pop("settings", {})}
    rows = [{"name": "LocalTrain", "method": "local"}, {"name": "GlobalTrain", "method": "fedavg"}]
    return {
        "title": "Tiny",
        "paper": "Nobody",
        "item": "Figure 0",
        "settings": settings,
        "rows": rows,
        "tables": [{"title": "Accuracy", "measure": "last"}],
        **parts,
    }


# ---------------------------------------------------------------------- the plans


def test_every_figure_and_table_of_the_paper_is_listed() -> None:
    items = "; ".join(load(name).item for name in PLANS)
    assert [item for item in FIGURES if item not in items] == []


@pytest.mark.parametrize("name", PLANS)
def test_plan_has_rules_differences_and_five_seeds(name: str) -> None:
    plan, short = load(name), load(name, quick=True)
    assert plan.rules
    assert plan.differs
    assert plan.settings["seeds"] >= 5
    assert 1 <= short.settings["seeds"] <= plan.settings["seeds"]
    assert {c.name for c in short.columns} <= {c.name for c in plan.columns}
    assert plan.figures or plan.item.startswith("Table")


@pytest.mark.parametrize("name", PLANS)
def test_rules_look_at_what_is_measured(name: str) -> None:
    """A rule on a probe needs the probe; one on the common test needs samples of all clients."""
    gives = {"local_error": "errors", "global_error": "errors"}
    gives |= dict.fromkeys(("optimum_gap", "guaranteed_rate", "envelope_condition"), "optimum")
    gives |= {"training_loss": "training_loss", "training_loss_global": "training_loss"}
    gives |= {"central_accuracy": "common_test", "average_accuracy": "common_test"}
    for plan in (load(name), load(name, quick=True)):
        chosen = {**SETTINGS, **plan.settings}
        words = [t["measure"] for t in plan.tables] + [r.get("measure", "") for r in plan.rules]
        for given in (text.split() for text in words if text):
            if given[0] in ("probe", "rounds_to", "rounds_below", "contraction"):
                assert gives[given[1]] in chosen["probes"], given
            if "everyone" in given or "common_test" in chosen["probes"]:
                assert chosen["everyone"] > 0
            if "at" in given:
                assert int(given[-1]) % chosen["eval_every"] == 0
                assert int(given[-1]) <= min(s["rounds"] for _, _, s in plan.cells())


def test_published_numbers_stand_in_their_cells() -> None:
    table = load("prox-table3").tables[0]["published"]
    assert table["FedProx, small λ"]["MNIST CNN2, s = 2"] == 35.67
    assert table["LocalTrain"]["EMNIST CNN5, s = 47"] == 61.11
    assert table["GlobalTrain"]["CIFAR10 CNN3, s = 10"] == 80.41
    assert table["pFedMe, large λ"]["MNIST CNN5, s = 6"] == 93.06
    table = load("prox-table4").tables[0]["published"]
    assert table["dichotomous, split"]["MNIST CNN2, s = 2"] == 25.67
    assert table["FedProx, large λ"]["EMNIST CNN5, s = 40"] == 61.23


def test_a_word_stands_for_the_number_of_its_column() -> None:
    """Small λ is 0.2 on MNIST and 0.1 on the other data."""
    found = {
        (lane.rows[0], lane.column): lane.hyper["prox_strength"]
        for one in passes_of(load("prox-table3"))
        for lane in one.lanes
        if one.method in ("fedprox", "pfedme")
    }
    assert found["FedProx, small λ", "MNIST CNN2, s = 6"] == 0.2
    assert found["FedProx, small λ", "EMNIST CNN5, s = 30"] == 0.1
    assert found["pFedMe, large λ", "MNIST CNN5, s = 2"] == 2.5
    assert found["FedProx, large λ", "CIFAR10 CNN3, s = 2"] == 1.0


def test_columns_of_one_shape_train_together() -> None:
    """All s and λ are lanes of one pass: three passes for figure 1(b)."""
    assert len(passes_of(load("prox-figure1b"))) == 3
    assert len(passes_of(load("prox-figure1d", quick=True))) == 3


# ---------------------------------------------------------------------- values from data


def two_clients() -> Problem:
    """L_1 = Λ_max(diag(2, 0))/4 = 0.5, L_2 = Λ_max(diag(0.5, 4.5))/4 = 1.125; R = 1."""
    x = torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    rows = Ragged.from_lists([[0, 1], [2, 3]])
    none = Ragged.empty(2)
    fed = Federation(x, torch.tensor([0, 1, 0, 1]), rows, none, none, ("a", "b"), 2)
    return Problem(fed, torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64))


def test_values_follow_from_the_data() -> None:
    words = {"p": "L", "q": "R", "r": "n * m + d", "s": "max(1, sqrt(9)) - 1 / 4", "t": 7.0}
    found = derive(words, two_clients())
    assert found == pytest.approx({"p": 1.125, "q": 1.0, "r": 6.0, "s": 2.75, "t": 7.0})


def test_values_follow_from_each_other() -> None:
    """λ = ρ²/(nR²) = 2 and η = 1/(L + λ)."""
    words = {"local_lr": "1 / (L + prox_strength)", "prox_strength": "4 / (n * R * R)"}
    found = derive(words, two_clients())
    assert found == pytest.approx({"local_lr": 1 / 3.125, "prox_strength": 2.0})


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ({"a": "K + 1"}, "'K'"),
        ({"a": "b", "b": "a"}, "follows from itself"),
        ({"a": "__import__('os')"}, "not arithmetic"),
        ({"a": "n ** 2"}, "not arithmetic"),
    ],
)
def test_what_is_not_arithmetic_is_refused(words: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        derive(words, two_clients())


def test_heterogeneity_needs_known_models() -> None:
    with pytest.raises(ConfigError, match="true models"):
        derive({"a": "R"}, Problem(two_clients().federation))


def test_fewer_test_samples_are_some_of_the_clients_own() -> None:
    words = {**SETTINGS, "data": "digits", "partition": "classes:2", "clients": 4, "samples": 80}
    whole = make_problem(words, 1).federation
    some = make_problem({**words, "test_samples": 5}, 1).federation
    assert some.test.sizes.tolist() == [5] * 4
    for k in range(4):
        mine, all_mine = (
            set(fed.test.rows[fed.test.offsets[k] : fed.test.offsets[k + 1]].tolist())
            for fed in (some, whole)
        )
        assert mine < all_mine
    assert torch.equal(some.train.rows, whole.train.rows)


# ---------------------------------------------------------------------- probes


def by_hand(fed: Federation, steps: int, lr: float, common: bool) -> np.ndarray:
    """Gradient descent on the logistic loss, (clients, dim); ``common`` starts from the mean."""
    w = np.zeros((fed.num_clients, fed.x.shape[1]))
    for _ in range(2):
        if common:
            w[:] = w.mean(0)
        for k in range(fed.num_clients):
            x, y = samples(fed, k, "train")
            for _ in range(steps):
                w[k] -= lr * x.T @ (1 / (1 + np.exp(-x @ w[k])) - y) / len(y)
    return w if not common else np.broadcast_to(w.mean(0), w.shape)


def samples(fed: Federation, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    lists = getattr(fed, split)
    rows = lists.rows[lists.offsets[client] : lists.offsets[client + 1]]
    return fed.x[rows].numpy(), fed.y[rows].numpy()


def loss(fed: Federation, models: np.ndarray) -> float:
    found = []
    for k, w in enumerate(models):
        x, y = samples(fed, k, "train")
        found.append(np.log1p(np.exp(-(2 * y - 1) * (x @ w))).mean())
    return float(np.mean(found))


@pytest.mark.parametrize(("row", "common"), [("LocalTrain", False), ("GlobalTrain", True)])
def test_training_loss_is_that_of_the_models_by_hand(row: str, common: bool) -> None:
    plan = read("tiny", tiny(settings={"probes": ["training_loss"]}))
    record = reproduce.run(plan, device="cpu").records[row, "all"][0]
    fed = make_problem(plan.settings_of(plan.rows[0], plan.columns[0]), 0).federation
    models = by_hand(fed, 3, 0.5, common)
    assert record["probes"]["training_loss"]["rounds"] == [0, 1, 2]
    assert measure(record, "probe training_loss at 0") == pytest.approx(math.log(2))
    assert measure(record, "probe training_loss") == pytest.approx(loss(fed, models))
    mean = np.broadcast_to(models.mean(0), models.shape)
    assert measure(record, "probe training_loss_global") == pytest.approx(loss(fed, mean))


def test_common_test_scores_the_mean_of_the_clients_models() -> None:
    plan = read("tiny", tiny(settings={"probes": ["common_test"], "everyone": 100}))
    outcome = reproduce.run(plan, device="cpu")
    fed = make_problem(plan.settings_of(plan.rows[0], plan.columns[0]), 0).federation
    parts = [samples(fed, k, "test") for k in range(3)]
    x, y = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    for row, common in (("LocalTrain", False), ("GlobalTrain", True)):
        record = outcome.records[row, "all"][0]
        right = ((x @ by_hand(fed, 3, 0.5, common).mean(0) > 0) == y).mean()
        assert measure(record, "probe average_accuracy") == pytest.approx(right)
        assert measure(record, "probe central_accuracy") == pytest.approx(right)


def test_the_clients_average_is_not_always_the_global_model() -> None:
    """FedProx with γ = 0: w_g stays where it was, whatever the clients learn."""
    rows: list[dict[str, Any]] = [
        {"name": "FedProx", "method": "fedprox", "set": {"preset": "free", "server_lr": 0.0}},
        {"name": "γ = 1/λ", "method": "fedprox", "set": {"prox_strength": 1.0}},
    ]
    settings = {"probes": ["common_test", "errors"], "everyone": 100}
    outcome = reproduce.run(read("tiny", tiny(rows=rows, settings=settings)), device="cpu")
    still, mean = (outcome.records[row["name"], "all"][0] for row in rows)
    start = measure(still, "probe central_accuracy at 0")
    assert measure(still, "probe central_accuracy") == start
    assert measure(still, "probe average_accuracy") > start
    assert measure(mean, "probe average_accuracy") == measure(mean, "probe central_accuracy")


def test_common_test_wants_samples_of_everybody() -> None:
    plan = read("tiny", tiny(settings={"probes": ["common_test"]}))
    with pytest.raises(ConfigError, match="everyone"):
        reproduce.run(plan, device="cpu")


# ---------------------------------------------------------------------- measures and checks


def test_rounds_of_a_run_that_diverged_are_unknown() -> None:
    seen: Any = {"rounds": [0, 1, 2], "values": [4.0, 1.05, None]}
    assert math.isnan(measure({"probes": {"x": seen}}, "rounds_to x 1.1"))
    seen["values"][2] = 1.0
    assert measure({"probes": {"x": seen}}, "rounds_to x 1.1") == 1


def test_rises_holds_for_all_rows_or_not_at_all() -> None:
    def values(*row: float) -> dict[str, np.ndarray]:
        return {name: np.array([v]) for name, v in zip("xyz", row, strict=True)}

    numbers = {"a": values(1, 2, 3), "b": values(1, 3, 2)}
    view = View(numbers, ("a", "b"), ("x", "y", "z"), {}, {}, lambda words: numbers)
    rule = {"claim": "", "check": "rises"}
    assert judge({**rule, "row": "a"}, view).holds
    assert judge({**rule, "rows": ["a"]}, view).holds
    verdict = judge({**rule, "rows": ["a", "b"]}, view)
    assert not verdict.holds
    assert "+1" in verdict.found
    assert "-1" in verdict.found
    assert not judge({**rule, "rows": ["a"], "total": 2.5}, view).holds


# ---------------------------------------------------------------------- end to end


def small_figure() -> Plan:
    """Figure 1(d) in two columns, two rounds, two seeds."""
    plan = load("prox-figure1d", quick=True, repeats=2)
    plan = plan.overridden({"rounds": 2, "steps": 2, "clients": 3, "samples": 20, "dim": 3})
    return Plan(**{**vars(plan), "columns": plan.columns[:2]})


def test_an_interrupted_reproduction_goes_on_and_then_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_figure()
    trained: list[str] = []
    real = run_pass

    def stops_at_the_second(*args: Any) -> Any:
        if trained:
            raise KeyboardInterrupt
        trained.append(args[0].key)
        return real(*args)

    monkeypatch.setattr(runner, "run_pass", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(plan, out=tmp_path / "run", device="cpu")

    def counts(*args: Any) -> Any:
        trained.append(args[0].key)
        return real(*args)

    monkeypatch.setattr(runner, "run_pass", counts)
    resumed = reproduce.run(plan, out=tmp_path / "run", device="cpu")
    assert sorted(trained) == sorted(one.key for one in passes_of(plan))
    before = len(trained)
    again = reproduce.run(plan, out=tmp_path / "run", device="cpu")
    assert len(trained) == before
    straight = reproduce.run(plan, device="cpu")
    for words in ("probe local_error", "rounds_to global_error 1.1"):
        for row, cells in straight.values(words).items():
            for column, numbers in cells.items():
                for other in (resumed, again):
                    assert np.array_equal(other.values(words)[row][column], numbers)
    assert [v.word for v in again.verdicts()] == [v.word for v in straight.verdicts()]


def test_a_figure_over_rounds_is_drawn_for_every_column() -> None:
    from sartor.report.reproduction_figures import figures_of

    titles = [figure.title for figure in figures_of(reproduce.run(small_figure(), device="cpu"))]
    assert titles == [
        "Error of the clients' models, R = 0.31",
        "Error of the clients' models, R = 1.25",
        "Error of the global model, R = 0.31",
        "Error of the global model, R = 1.25",
    ]
