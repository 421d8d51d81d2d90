"""The reproductions of pFedBreD: published numbers, probes and figures that they brought."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sartor import reproduce
from sartor.analysis import loss_deviations
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.data.synthetic import quadratics
from sartor.methods import build
from sartor.report.reproduction_figures import figures_of, smoothed
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.plan import Plan, load, read
from sartor.reproduce.probes import PROBES
from sartor.reproduce.problems import Problem
from sartor.reproduce.records import measure, series
from sartor.reproduce.rules import CHECKS
from sartor.reproduce.solutions import SOLVERS
from tests.toys import federation, net_task, quadratic_task, run, simulation

STEP = Local(steps=1, batch=None, lr=0.1)


# ---- what is printed -----------------------------------------------------------------------------


def published(name: str, row: str, table: int = 0) -> list[float]:
    values = load(name).tables[table]["published"][row].values()
    return [v for v in values if v is not None]


@pytest.mark.parametrize(
    ("row", "average", "hard"),
    [
        ("FedAvg", 72.06, 61.80),
        ("FedAvg+AM", 72.80, 62.46),
        ("FedEM", 71.88, 56.62),
        ("FedAMP", 81.80, 71.34),
        ("pFedMe", 77.61, 65.05),
        ("pFedMe+FT", 79.13, 66.31),
        ("pFedMe+AM", 79.48, 68.12),
        ("Per-FedAvg", 79.47, 70.54),
        ("Per-FedAvg+FT", 79.95, 71.07),
        ("Per-FedAvg+AM", 80.02, 71.81),
        ("mh", 81.47, 72.14),
        ("mh+FT", 82.37, 72.85),
        ("mh+AM", 83.09, 74.87),
    ],
)
def test_printed_averages_of_table_1_follow_from_its_cells(
    row: str, average: float, hard: float
) -> None:
    cells = published("bred-table1", row)
    assert len(cells) == 8
    assert np.mean(cells) == pytest.approx(average, abs=0.0099)
    assert np.mean([cells[1], *cells[6:]]) == pytest.approx(hard, abs=0.0099)


def test_printed_averages_of_tables_2_4_and_8_follow_from_their_cells() -> None:
    second = {"none": (77.6, 65.1), "lg": (75.3, 58.5), "meg": (77.9, 65.7), "mh": (81.5, 72.1)}
    for row, (average, hard) in second.items():
        cells = published("bred-table2", row)
        assert np.mean(cells) == pytest.approx(average, abs=0.1)
        assert np.mean([cells[1], *cells[6:]]) == pytest.approx(hard, abs=0.1)
    fourth = {"FedAvg-G": 13.7, "pFedMe-P": 34.4, "pFedMe-G": 13.2, "mh-P": 34.8, "mh-G": 13.8}
    for row, average in fourth.items():
        assert np.mean(published("bred-table4", row)) == pytest.approx(average, abs=0.051)
    eighth = {"FedPAC": 1.47, "pFedHN": 1.07, "FedFomo": 1.07, "Ditto": 0.57, "mh": 0.37}
    for row, drop in eighth.items():
        pairs = np.array(published("bred-table8", row)).reshape(-1, 2)
        assert np.mean(pairs[:, 0] - pairs[:, 1]) == pytest.approx(drop, abs=0.0099)


def test_published_numbers_stand_beside_the_right_columns() -> None:
    first = load("bred-table1").tables[0]["published"]
    assert first["mh+AM"]["FEMNIST DNN"] == 70.34
    assert first["FedAMP"]["CIFAR10 CNN"] == 77.40
    assert first["mh"]["MNIST DNN, true labels"] is None
    third = load("bred-table3").tables[0]["published"]
    spread = {"FEMNIST DNN": 0.5, "FEMNIST MCLR": 0.5, "FMNIST DNN": 2.2, "FMNIST MCLR": 1.3}
    for column, printed in spread.items():
        cells = [third[f"S = {s}"][column] for s in (10, 20, 50, 100)]
        assert np.std(cells, ddof=1) == pytest.approx(printed, abs=0.06)


def test_mh_is_run_as_printed_and_as_in_the_program() -> None:
    for name in ("bred-table1", "bred-table2", "bred-figure2", "bred-table4", "bred-table8"):
        modes = {r.set.get("mode", "paper") for r in load(name).rows if r.method == "pfedbred"}
        assert modes == {"paper", "code"}, name


def test_counted_gradients_are_those_of_table_6() -> None:
    outcome = reproduce.run("bred-table6", quick=True, device="cpu")
    counts = {
        row: float(cells["gradients"][0]) for row, cells in outcome.values("gradients").items()
    }
    assert counts == {
        "FedEM": 60.0,
        "FedAvg": 20.0,
        "pFedMe": 100.0,
        "Per-FedAvg": 40.0,
        "FedAMP": 20.0,
        "lg": 120.0,
        "meg": 100.0,
        "mh": 120.0,
        "mh (code)": 140.0,
    }
    assert [v.word for v in outcome.verdicts()] == ["PASS"] * 8


# ---- coherence -----------------------------------------------------------------------------------


def proximal(name: str, centres: Any, **options: Any) -> tuple[Any, Any]:
    fed, _ = quadratics(np.ones_like(centres), centres)
    task = quadratic_task(centres.shape[1])
    method = build(name, task, STEP, {"prox_steps": 1, **options})
    sim = simulation(method, task, [fed], participation=1, rounds=2, points=("pre",))
    return sim, PROBES["coherence"](sim, [Problem(fed)])


def test_coherence_of_two_clients_is_the_squared_cosine_of_their_gradients() -> None:
    # One step from w = 0: both w_i − θ_i and w − w_i point from the client's centre to w.
    sim, look = proximal("pfedme", np.array([[1.0, 0.0], [1.0, 1.0]]))
    assert look() == {}  # nobody has trained yet
    start = sim.params(0)
    assert all(not leaf.any() for _, leaf in tree.items(start))
    sim.step()
    seen = look()
    for name in ("coherence", "update_coherence"):
        np.testing.assert_allclose(seen[name], [0.5], atol=1e-12)
        np.testing.assert_allclose(seen[f"{name}_log"], [np.log(0.5) / 2], atol=1e-12)


def test_coherence_takes_all_clients_though_one_is_averaged() -> None:
    centres = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 1.0, 0.0]])
    sim, look = proximal("pfedme", centres)
    sim.step()
    np.testing.assert_allclose(look()["coherence"], [1.0])  # three vectors of a plane
    assert look()["coherence_log"][0] == -np.inf


def test_coherence_of_mh_is_that_of_its_memory_and_personal_model() -> None:
    sim, look = proximal("pfedbred", np.array([[1.0, 0.2], [-0.5, 1.0]]), strategy="mh")
    sim.step()
    start = torch.cat([leaf for _, leaf in tree.items(sim.params(0, point="global"))])
    sim.step()
    state = sim.store.gather(sim.context.everybody)
    memory, personal = (
        torch.cat([leaf[0] for _, leaf in tree.items(state[key])], -1)
        for key in ("memory", "params")
    )
    seen = look()
    for name, (a, b) in (("coherence", memory - personal), ("update_coherence", start - memory)):
        cosine = float(a @ b / (a.norm() * b.norm()))
        np.testing.assert_allclose(seen[name], [cosine**2], rtol=1e-9)
    assert start.norm() > 0.01


def test_coherence_needs_uploaded_models() -> None:
    fed, task = federation(), net_task()
    method = build("fedproto", task, STEP, {})
    sim = simulation(method, task, [fed])
    PROBES["coherence"](sim, [Problem(fed)])
    with pytest.raises(ConfigError, match="sends none"):
        sim.step()


# ---- deviations ----------------------------------------------------------------------------------


def test_deviations_of_the_first_client_are_those_of_its_trained_model() -> None:
    feds, task = [federation(0), federation(1)], net_task()
    sim = simulation(build("local", task, STEP, {}), task, feds, rounds=3)
    look = PROBES["deviations"](sim, [Problem(fed) for fed in feds])
    sim.step()
    assert look() == {}  # only the end counts
    run(sim)
    seen = look()
    for index, fed in enumerate(feds):
        networks = [sim.network(client, index).double() for client in range(fed.num_clients)]
        wanted = loss_deviations(networks, fed)
        for c in range(3):
            assert seen[f"global_deviation_{c}"][index] == pytest.approx(wanted.pooled[0, c])
            assert seen[f"local_deviation_{c}"][index] == pytest.approx(wanted.local[0, c])


def test_one_model_for_all_deviates_nowhere_on_the_common_test() -> None:
    fed, task = federation(), net_task()
    sim = simulation(build("fedavg", task, STEP, {}), task, [fed], rounds=1)
    look = PROBES["deviations"](sim, [Problem(fed)])
    run(sim)
    seen = look()
    assert [seen[f"global_deviation_{c}"][0] for c in range(3)] == pytest.approx([0.0] * 3)
    has = fed.label_counts("test")[0].numpy() > 0
    own = [seen[f"local_deviation_{c}"][0] for c in range(3)]
    assert seen["local_own"][0] == pytest.approx(np.mean(np.array(own)[has]))


# ---- labels --------------------------------------------------------------------------------------


def labelled() -> Federation:
    y = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    x = torch.arange(8.0)[:, None]
    train, test = (Ragged.from_lists(part) for part in ([[0, 2], [4, 5, 6]], [[1, 3], [7]]))
    return Federation(x, y, train, Ragged.empty(2), test, ("a", "b"), 3)


def label_plan() -> Plan:
    content = {
        "title": "labels",
        "paper": "nobody",
        "item": "Figure 0",
        "settings": {"solve": "labels"},
        "rows": [{"name": "clients", "method": "local"}],
        "columns": [{"name": "here"}, {"name": "there"}],
        "tables": [
            {"title": "classes", "measure": "value classes", "scale": "number"},
            {"title": "here", "labels": "here"},
            {"title": "there", "labels": "there"},
        ],
        "figures": [{"kind": "labels", "title": "Classes", "columns": "all"}],
    }
    return read("labels", content)


def test_labels_are_counted_over_training_and_test() -> None:
    (record,) = SOLVERS["labels"]([], [Problem(labelled())])
    assert record["labels"] == [[2, 2, 0], [0, 0, 4]]
    assert record["values"] == {
        "samples": 8.0,
        "fewest_samples": 4.0,
        "most_samples": 4.0,
        "classes": 1.5,
        "fewest_classes": 1.0,
        "most_classes": 2.0,
        "effective_classes": pytest.approx(1.5),  # exp(ln 2) and exp(0)
    }


def test_count_matrices_are_tables_and_heat_maps() -> None:
    outcome = Outcome(label_plan())
    (record,) = SOLVERS["labels"]([], [Problem(labelled())])
    outcome.add("clients", "here", 0, record)
    table = outcome.table(1)
    assert list(table.columns) == ["client", "0", "1", "2", "all"]
    assert table.rows == [["a", "2", "2", "0", "4"], ["b", "0", "0", "4", "4"]]
    assert "not run" in str(outcome.table(2).title)
    assert outcome.as_dict()["tables"][1]["labels"] == [[2, 2, 0], [0, 0, 4]]
    (figure,) = figures_of(outcome)
    assert figure.title == "Classes, here"
    assert "between 1 and 2" in figure.alt


# ---- measures, curves and checks -----------------------------------------------------------------


def test_a_tail_is_the_mean_of_the_last_values() -> None:
    values = [9.0, 7.0, 5.0, 1.0, 2.0]
    record = {"probes": {"p": {"rounds": [0, 1, 2, 3, 4], "values": values}}, "points": {}}
    assert measure(record, "probe p tail 0.4") == 1.5
    assert measure(record, "probe p tail 0.01") == 2.0
    assert measure(record, "probe p tail 1.0") == 4.8
    assert measure(record, "probe p") == 2.0
    assert series(record, "probe p") == ([0, 1, 2, 3, 4], values)


def test_smoothing_keeps_cubics_and_short_curves() -> None:
    t = np.arange(12.0)
    cubic = np.stack([t**3 - 4 * t, 1 - t**2])
    np.testing.assert_allclose(smoothed(cubic, 8), cubic, atol=1e-8)
    jagged = np.where(t % 2 == 0, 1.0, -1.0)[None]
    assert np.abs(smoothed(jagged, 11)).mean() < 0.6
    assert (smoothed(jagged, 0) == jagged).all()
    assert (smoothed(jagged[:, :3], 11) == jagged[:, :3]).all()


def grid() -> Outcome:
    content = {
        "title": "grid",
        "paper": "nobody",
        "item": "Figure 0",
        "rows": [{"name": "S = 1", "method": "fedavg"}, {"name": "S = 2", "method": "fedavg"}],
        "columns": [{"name": "here"}, {"name": "there"}],
        "tables": [
            {
                "title": "p",
                "measure": "probe p_0",
                "scale": "percent",
                "published": {"S = 1": [1.0, float("nan")]},
            }
        ],
        "figures": [
            {
                "kind": "rows",
                "title": "by S",
                "measure": "probe p_0",
                "rows": ["S = 1", "S = 2"],
                "x": [1, 2],
            },
            {
                "kind": "measures",
                "title": "by class",
                "measure": "probe p_{x}",
                "x": [0, 1, 2],
                "columns": ["there"],
            },
        ],
    }
    outcome = Outcome(read("grid", content))
    for k, row in enumerate(("S = 1", "S = 2")):
        for j, column in enumerate(("here", "there")):
            for seed in (0, 1):
                probes = {
                    f"p_{c}": {"rounds": [1], "values": [0.1 * k + 0.01 * j + 0.001 * seed + c]}
                    for c in (0, 1)
                }
                record = {"probes": probes, "points": {}, "headline": "pre"}
                outcome.add(row, column, seed, record)
    return outcome


def test_figures_by_rows_and_by_measures_draw_the_means() -> None:
    by_row, by_class = figures_of(grid())
    drawn = by_row.canvas.axes[0].lines
    here, there = (line for line in drawn if line.get_label() in ("here", "there"))
    np.testing.assert_allclose(here.get_ydata(), [0.05, 10.05])  # percent, mean of two seeds
    np.testing.assert_allclose(there.get_ydata(), [1.05, 11.05])
    np.testing.assert_allclose(here.get_xdata(), [1, 2])
    assert "Hollow markers" in by_row.caption
    assert by_class.title == "by class, there"
    lines = {line.get_label(): line for line in by_class.canvas.axes[0].lines}
    np.testing.assert_allclose(lines["S = 2"].get_ydata(), [0.1105, 1.1105, np.nan])


def test_expressions_may_ask_for_equal_numbers() -> None:
    view = grid()._view({"columns": ["here"]})
    holds, found = CHECKS["expression"]({"value": 'mean("S = 1") * 2 == mean("S = 1") * 2'}, view)
    assert holds
    assert "against" in found
    assert not CHECKS["expression"]({"value": 'mean("S = 1") == mean("S = 2")'}, view)[0]
