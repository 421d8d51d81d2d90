"""Hyper-parameter search: trials as lanes, judged on validation data alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import sartor
from sartor.core.errors import ConfigError, MissingExtraError
from sartor.core.local import Local
from tests.toys import Net, federation

FED = federation(val=4)
SETTINGS: dict[str, Any] = {
    "model": Net(),
    "device": "cpu",
    "engine": "vectorised",
    "chunk": 64,
    "dtype": "float64",
    "rounds": 2,
    "local": Local(lr=0.1, batch=3, epochs=1),
}
SPACE: dict[str, Any] = {
    "prox_strength": (0.01, 10.0, "log"),
    "local_lr": (0.05, 0.5),
    "weights": ["uniform", "samples"],
}


class Dice:
    """A study that draws at random and records what it receives."""

    def __init__(self, seed: int = 0) -> None:
        self.draw, self.reported = random.Random(seed), []  # type: ignore[var-annotated]
        self.asked = 0
        self.waiting: list[int] = []

    def ask(self) -> Dice:
        self.asked += 1
        self.waiting.append(self.asked - len(self.reported))
        return self

    def tell(self, trial: Any, value: float | None = None, state: Any = None) -> None:
        self.reported.append((value, state))

    def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> float:
        if log:
            return float(np.exp(self.draw.uniform(np.log(low), np.log(high))))
        return self.draw.uniform(low, high)

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        return self.draw.choice(choices)

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return self.draw.randint(low, high)


@pytest.fixture(scope="module")
def found() -> sartor.Search:
    """Return a search of seven trials in batches of four, each with two seeds."""
    return sartor.search(
        "fedprox", FED, SPACE, trials=7, lanes=4, seeds=(0, 1), study=Dice(), **SETTINGS
    )


def test_a_row_of_the_search_is_the_single_run(found: sartor.Search) -> None:
    """Its value is the mean over seeds of the validation loss of ``fit`` with its values."""
    assert len({tuple(row[1:4]) for row in found.table.rows}) == 7
    assert {row[3] for row in found.table.rows} == {"uniform", "samples"}
    for _, prox, rate, weights, value in (found.table.rows[k] for k in (0, 3, 6)):
        alone = sartor.fit(
            "fedprox",
            FED,
            hyper={"prox_strength": prox, "local_lr": rate},
            options={"weights": weights},
            seeds=(0, 1),
            **SETTINGS,
        )
        losses = [alone.loss_curve(split="val", run=run)[1][-1] for run in (0, 1)]
        assert value == pytest.approx(np.mean(losses), rel=1e-12)


def test_the_best_trial_is_the_best_row_and_comes_with_its_result(found: sartor.Search) -> None:
    """Values, result and what the study received agree."""
    values = found.table.column("validation loss")
    assert found.value == min(values)
    row = found.table.rows[values.index(found.value)]
    assert list(found.best.values()) == row[1:4]
    assert [run.seed for run in found.result.runs] == [0, 1]
    assert found.result.runs[0].hyper["local_lr"] == found.best["local_lr"]
    assert found.result.runs[0].options["weights"] == found.best["weights"]
    assert [value for value, _ in found.study.reported] == values
    # Four are asked before the first is reported, then three.
    assert found.study.waiting == [1, 2, 3, 4, 1, 2, 3]
    assert "7 trials" in repr(found)
    assert found._repr_html_().count("<tr>") == 8


def test_test_data_take_no_part_in_the_choice() -> None:
    """With other test labels every value and the choice stay the same, and accuracy does not."""
    searched = []
    for shift in (0, 1):
        y = FED.y.clone()
        y[FED.test.rows] = (y[FED.test.rows] + shift) % 3
        fed = sartor.Federation(FED.x, y, FED.train, FED.val, FED.test, FED.names, 3, {})
        searched.append(
            sartor.search(
                "fedavg",
                fed,
                {"local_lr": (0.01, 1.0, "log")},
                trials=3,
                lanes=3,
                study=Dice(),
                measure="accuracy",
                **SETTINGS,
            )
        )
    first, second = searched
    assert first.table.rows == second.table.rows
    assert first.best == second.best
    assert first.value == max(first.table.column("validation accuracy"))
    assert first.result.accuracy != second.result.accuracy


def test_a_trial_that_diverges_is_reported_as_failed() -> None:
    """It has no value and is never the best; if all do, that is said."""
    space = {"local_lr": [0.1, 1e308]}
    found = sartor.search("fedavg", FED, space, trials=6, lanes=3, study=Dice(1), **SETTINGS)
    values = dict(zip(found.table.column("local_lr"), found.table.rows, strict=True))
    assert values.keys() == {0.1, 1e308}
    assert values[1e308][-1] is None
    assert any(value is None and state is not None for value, state in found.study.reported)
    assert found.best == {"local_lr": 0.1}
    with pytest.raises(ConfigError, match="Every trial diverged"):
        sartor.search("fedavg", FED, {"local_lr": [1e308]}, trials=1, study=Dice(), **SETTINGS)


def test_rows_of_a_sweep_are_trained_as_they_stand() -> None:
    """``fit`` takes a list of rows, which switch options of local training on."""
    rows = [{"local_lr": 0.1, "clip_norm": c, "momentum": m} for c, m in ((0, 0.5), (0.01, 0.0))]
    swept = sartor.fit("fedavg", FED, sweep=rows, **SETTINGS)
    assert len(swept.runs) == 2
    for run, row in enumerate(rows):
        given = {name: value for name, value in row.items() if value}
        alone = sartor.fit("fedavg", FED, hyper=given, **SETTINGS)
        np.testing.assert_allclose(
            swept.scores["pre", "test"].loss[run], alone.scores["pre", "test"].loss[0], atol=1e-12
        )
    with pytest.raises(ConfigError, match="rule is a static option"):
        sartor.fit("fedavg", FED, sweep=[{"rule": "uniform"}], **SETTINGS)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="must name the same hyper-parameters"):
        sartor.fit("fedavg", FED, sweep=[{"local_lr": 0.1}, {"clip_norm": 1.0}], **SETTINGS)
    with pytest.raises(ConfigError, match="a list of dicts"):
        sartor.fit("fedavg", FED, sweep=[0.1, 0.2], **SETTINGS)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "space is empty"),
        ({"local_lr": (1.0, 0.1)}, "low < high"),
        ({"local_lr": (0.0, 0.1, "log")}, "low must be > 0, got 0.0"),
        ({"local_lr": (0.1, 1.0, "ln")}, "must be \\(low, high\\)"),
        ({"local_lr": []}, "empty list of choices"),
    ],
)
def test_faults_are_named(space: dict[str, Any], words: str) -> None:
    """What cannot be right is refused before anything trains."""
    with pytest.raises(ConfigError, match=words):
        sartor.search("fedavg", FED, space, study=Dice(), **SETTINGS)


def test_it_needs_validation_data_and_optuna(monkeypatch) -> None:
    """Neither test data nor another sampler takes their place silently."""
    with pytest.raises(ConfigError, match="judged on validation data, but no client has any"):
        sartor.search("fedavg", federation(val=0), {"local_lr": (0.1, 1.0)}, **SETTINGS)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingExtraError, match="sartor\\[search\\]"):
        sartor.search("fedavg", FED, {"local_lr": (0.1, 1.0)}, **SETTINGS)


def test_with_optuna_itself() -> None:
    """The same seed gives the same trials, and the study knows the best of them."""
    pytest.importorskip("optuna")
    space = {"local_lr": (0.01, 1.0, "log"), "momentum": (0.0, 0.9)}
    one, two = (
        sartor.search("fedavg", FED, space, trials=6, lanes=3, sampler_seed=3, **SETTINGS)
        for _ in range(2)
    )
    assert one.table.rows == two.table.rows
    assert one.study.best_params == one.best
    assert one.study.best_value == one.value
