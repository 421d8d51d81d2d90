"""The page and the tables use the metric of the task, with the right sign."""

from __future__ import annotations

import html
import math
import re
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import sartor
from sartor import Comparison, Federation
from sartor.core.errors import ConfigError
from sartor.report.figures import draw_all
from sartor.report.page import render, targets
from sartor.report.page_tables import client_table
from sartor.report.words import summarise
from sartor.results.costs import to_reach
from sartor.results.headline import (
    ACCURACY,
    HEADLINE_METRICS,
    LOSS,
    RMSE,
    headline_metric_of,
    unit_of,
)
from sartor.results.tables import Table, format_cell

CLIENTS = np.repeat(["a", "b", "c"], 60)


def words_of(page: str) -> str:
    """What a reader of a page sees, without the drawings."""
    page = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def compared(y: Any, task: str, x: Any = None) -> Comparison:
    """Local and ditto, trained for a few rounds."""
    x = np.random.default_rng(0).normal(size=(180, 3)).astype("f4") if x is None else x
    federation = Federation.from_arrays(x, y, client=CLIENTS, task=task)
    results = {name: sartor.fit(name, federation, rounds=4) for name in ("local", "ditto")}
    return Comparison(results, config=results["local"].config)


@pytest.fixture(scope="module")
def towns() -> Federation:
    """A target that is standardised: prices of houses, which differ between three towns."""
    rng = np.random.default_rng(0)
    area = rng.uniform(30, 200, 180)
    level = np.repeat([100.0, 300.0, 600.0], 60)
    rows = {"town": CLIENTS, "area": area, "price": level + 2 * area + rng.normal(0, 20, 180)}
    return Federation.from_dataframe(pandas.DataFrame(rows), client="town", label="price")


@pytest.fixture(scope="module")
def houses(towns: Federation) -> Comparison:
    """A regression."""
    local = sartor.Local(epochs=1, batch=32, lr=0.05)
    names = ("local", "fedavg", "ditto")
    results = {name: sartor.fit(name, towns, rounds=6, local=local) for name in names}
    return Comparison(results, config=results["local"].config)


@pytest.fixture(scope="module")
def page(houses: Comparison) -> str:
    """The words of its page."""
    return words_of(render(houses))


# ---------------------------------------------------------------------- what things are measured by


def test_every_task_has_its_headline_metric() -> None:
    """Shares rise, errors fall; a network that gives its own loss is measured by it."""
    names = {task: (y.name, y.sign, y.is_share) for task, y in HEADLINE_METRICS.items()}
    assert names == {
        "classification": ("accuracy", 1, True),
        "multilabel": ("exact match", 1, True),
        "next-token": ("tokens right", 1, True),
        "regression": ("RMSE", -1, False),
        None: ("loss", -1, False),
    }
    assert headline_metric_of({}) is ACCURACY
    assert headline_metric_of({"task": None}) is LOSS
    assert unit_of({"target": {"mean": 1.0, "scale": 3.0}}) == 3.0
    assert unit_of(None) == unit_of({"kind": "scale"}) == 1.0


def test_the_values_of_a_headline_metric() -> None:
    """RMSE is σ √(2 L / n); a gain is positive where the first is better."""
    right, loss = np.array([0.5, 1.0]), np.array([0.5, 8.0])
    assert RMSE.measure(right, loss, unit=10.0).tolist() == [10.0, 40.0]
    assert ACCURACY.measure(right, loss, unit=10.0).tolist() == [0.5, 1.0]
    assert LOSS.measure(right, loss, unit=10.0).tolist() == [0.5, 8.0]
    assert RMSE.gain(3.0, 5.0) == 2.0
    assert ACCURACY.gain(0.25, 0.5) == -0.25


def test_errors_and_gains_are_shown_with_common_decimals() -> None:
    """The largest of a column has four figures (gains three); the rest follow it."""
    rows = [["a", 141.04, -96.83], ["b", 26.4, 0.019], ["c", None, 7.03]]
    table = Table(["x", "RMSE", "gain"], rows, formats={"RMSE": "error", "gain": "gain"})
    assert table.text_rows() == [
        ["a", "141.0", "-96.8"],
        ["b", "26.4", "0.0"],
        ["c", "–", "+7.0"],
    ]
    assert format_cell(0.0123456, "gain") == "+0.0123"
    assert format_cell(1234567.0, "error", 0) == "1,234,567"


# ---------------------------------------------------------------------- a regression


def test_an_error_in_the_units_of_the_label(houses: Comparison, towns: Federation) -> None:
    """The pooled RMSE of the table is that of the predictions, in the label's own unit."""
    made, result = towns, houses["ditto"]
    mean, scale = (made.info["preprocessing"]["target"][key] for key in ("mean", "scale"))
    squares = []
    for client in range(3):
        rows = made.test.of(client)
        with torch.no_grad():
            found = result.model(client)(made.x[rows])[:, 0] * scale + mean
        squares += ((found - made.y[rows] * scale - mean) ** 2).tolist()
    error = math.sqrt(sum(squares) / len(squares))
    assert houses.table().column("RMSE")[2] == pytest.approx(error, rel=1e-4)
    assert result.measure_curve()[1][-1] == pytest.approx(error, rel=1e-4)
    assert 5 < error < 500
    summary = result.summary()
    assert (summary["measure"], summary["accuracy"]) == ("RMSE", None)
    assert summary["pooled_measure"] == pytest.approx(error, rel=1e-4)
    assert summary["worst_client"] == max(result.client_measure())
    assert summary["worst_client_name"] == result.clients[int(np.argmax(result.client_measure()))]


def test_differences_are_positive_where_the_error_is_smaller(houses: Comparison) -> None:
    """Paired differences are what the error falls by, as the gains of the clients are."""
    table = houses.paired()
    for name, mean in zip(table.column("method"), table.column("difference"), strict=True):
        gain = houses[name].gain(houses["local"])
        assert mean == pytest.approx(np.mean(gain.column("gain")))
        alone, federated = gain.column("alone"), gain.column("federated")
        assert gain.column("gain") == pytest.approx(np.subtract(alone, federated))
    assert "what the RMSE falls by" in table.notes["difference"]


def test_the_worst_of_errors_is_the_largest(houses: Comparison) -> None:
    """Fairness, the cheapest methods and targets know that less is better."""
    errors = houses["ditto"].client_measure()
    row = dict(zip(houses.fairness().columns, houses.fairness().rows[2], strict=True))
    assert (row["worst"], row["best"]) == (max(errors), min(errors))
    assert row["worst decile"] >= row["best decile"]
    pooled = {name: result.pooled_measure() for name, result in houses.items()}
    assert houses.pareto()[0] == "local"  # sends nothing
    assert ("fedavg" in houses.pareto()) == (pooled["fedavg"] < pooled["local"])
    goals = targets(houses)
    assert min(goals) >= min(pooled.values())
    assert any("above the least" in why for why in goals.values())


def test_an_error_is_reached_from_above(houses: Comparison) -> None:
    """A target of RMSE is met once the mean of the window is at most that."""
    rounds, curve = houses["local"].measure_curve()
    assert np.all(np.diff(curve[:5]) < 0)
    found = to_reach(houses["local"], float(curve[2:5].mean()) * (1 + 1e-9))
    assert found is not None
    assert found.rounds == rounds[4] + (houses["local"].headline == "post")
    assert to_reach(houses["local"], curve[-1] / 2) is None
    for word in ("F1", "accuracy"):  # no answer of a regression is right or wrong
        with pytest.raises(ConfigError, match=f"one of RMSE, loss, got '{word}'"):
            to_reach(houses["local"], 1.0, measure=word)


def test_nothing_of_a_regression_has_an_accuracy(houses: Comparison) -> None:
    """Curves, clients and the table of metrics say that there is none, and not that it is 0."""
    result = houses["ditto"]
    assert np.isnan(result.curve()[1]).all()
    assert np.isnan(result.client_accuracy()).all()
    columns = result.metric_columns()
    assert np.isnan(columns["accuracy"].astype(float)).all()
    assert np.isfinite(columns["loss"].astype(float)).all()


def test_the_words_of_a_regression(houses: Comparison, page: str) -> None:
    """Accuracy is not mentioned; the error, its unit and its direction are."""
    best = min(houses, key=lambda name: houses[name].pooled_measure())
    words = summarise(houses)
    assert f"root mean squared error of {houses[best].pooled_measure():.4g}" in words.headline
    assert best in words.headline
    assert "one division" in words.headline  # which does not say how certain an RMSE is
    assert words.tiles[0][0] == "RMSE"
    page = page[: page.rindex("Settings")]
    assert "ccura" not in page
    assert "% of" not in page
    assert "points" not in page
    for part in ("in the units of the label: less is better", "How evenly RMSE is spread"):
        assert part in page


def test_the_figures_of_a_regression(houses: Comparison) -> None:
    """Curves are errors and bars are what they fall by, not hundred times as much."""
    drawn = {figure.key: figure for figure in draw_all(houses)}
    assert list(drawn) == ["rmse-by-round", "gain-by-client", "bytes-against-rmse"]
    axes = drawn["rmse-by-round"].canvas.axes[0]
    assert axes.get_ylabel() == "test RMSE"
    assert np.asarray(axes.lines[-1].get_ydata())[-1] in [
        pytest.approx(curve[-1])
        for point in ("pre", "post")
        for curve in [houses["ditto"].measure_curve(point)[1]]
    ]
    drawing = drawn["gain-by-client"].canvas.axes[-1].collections[0]
    bars = sorted(float(np.asarray(path.vertices)[2, 0]) for path in drawing.get_paths())
    assert bars == pytest.approx(sorted(houses["ditto"].gain(houses["local"]).column("gain")))
    shown = client_table(houses)
    assert "classes" not in shown.columns
    assert shown.column("ditto pre") == pytest.approx(houses["ditto"].client_measure("pre"))


def test_a_federated_method_that_errs_less_is_reported_so() -> None:
    """Where training alone is worse, the finding says by how much the error falls."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(180, 20)).astype("f4")
    y = (x @ rng.normal(size=20) + rng.normal(0, 0.3, 180)).astype("f4")
    found = compared(y, "regression", x)
    assert found["ditto"].pooled_measure() < found["local"].pooled_measure()
    words = summarise(found)
    errors = [found[name].client_measure().mean() for name in ("local", "ditto")]
    fall = errors[0] - errors[1]
    (said,) = (line for line in words.findings if "what its RMSE falls by" in line)
    number = re.search(r"is ([+−][\d.]+\d)", said)
    assert number
    assert float(number[1].replace("−", "-")) == pytest.approx(fall, rel=1e-2)
    tile = ("Mean gain over training alone, lower RMSE", number[1])
    assert tile in [tile[:2] for tile in words.tiles]


def test_nobody_chooses_by_the_accuracy_of_a_regression(towns: Federation) -> None:
    """It would always be 0: a search and early stopping refuse it, and name the loss."""
    with pytest.raises(ConfigError, match="measure='loss'"):
        sartor.search("ditto", towns, {"prox_strength": (0.1, 1.0)}, measure="accuracy")
    federation = Federation.from_arrays(
        np.ones((180, 1)), np.arange(180.0), client=CLIENTS, task="regression", val=0.2
    )
    stopping = sartor.EarlyStopping(measure="accuracy")
    with pytest.raises(ConfigError, match="measure='loss'"):
        sartor.fit("local", federation, rounds=2, early_stopping=stopping)


# ---------------------------------------------------------------------- other tasks


@pytest.mark.parametrize(
    ("task", "name", "says"),
    [
        ("multilabel", "exact match", "all labels right for"),
        ("next-token", "tokens right", "of all test tokens right"),
    ],
)
def test_the_words_of_other_tasks(task: str, name: str, says: str) -> None:
    """Exact match and tokens right are called by their names, in per cent."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, 6, (180, 4))
    x, y = (tokens, np.roll(tokens, -1, 1)) if task == "next-token" else (None, tokens[:, :2] > 2)
    found = compared(y.astype("i8"), task, x)
    assert found["ditto"].measure == name
    assert found["ditto"].pooled_measure() == found["ditto"].accuracy
    page = words_of(render(found))
    page = page[: page.rindex("Settings")]
    assert "ccuracy" not in page
    assert says in page
    assert f"{name} %" in page
    if task == "multilabel":  # one sample may have several labels, so they do not count samples
        assert "train samples" not in client_table(found).columns
