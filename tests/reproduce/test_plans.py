"""Every plan is well formed: its methods, names, rules and figures exist."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from sartor import methods, reproduce
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.models import MODELS, dnn
from sartor.report.reproduction_figures import DRAW
from sartor.reproduce.passes import passes_of
from sartor.reproduce.plan import LOCAL, Plan, load, read
from sartor.reproduce.probes import PROBES
from sartor.reproduce.records import KINDS
from sartor.reproduce.rules import CHECKS

FORMS = [(name, quick) for name in reproduce.names() for quick in (False, True)]


@pytest.fixture(scope="module")
def task() -> Task:
    federation = Federation.from_arrays([[0.0, 1.0]] * 4, [0, 1, 0, 1], client=[0, 0, 1, 1])
    return Task(dnn(federation), "fc")


@pytest.mark.parametrize(("name", "quick"), FORMS)
def test_rows_are_methods_with_settings_that_exist(name: str, quick: bool, task: Task) -> None:
    plan = load(name, quick=quick)
    assert plan.rows
    assert plan.columns
    assert plan.tables
    for row, _, settings in plan.cells():
        assert settings["model"] is None or settings["model"] in MODELS
        assert set(settings["probes"]) <= set(PROBES)
        if settings["solve"] != "train":
            continue
        static = methods.static_options(methods.find(row.method))
        options = {k: v for k, v in row.set.items() if k in static and not _word(v, static[k])}
        values = {key: settings[key] for key in LOCAL}
        local = Local(**{**values, "batch": values["batch"] or None})
        record = methods.build(row.method, task, local, options)
        unknown = [k for k in row.set if k not in static and k not in record.hyper]
        assert [k for k in unknown if k not in LOCAL] == []
    assert passes_of(plan)


def _word(value: Any, option: Any) -> bool:
    """Whether an option's value stands for one that is derived from the data."""
    return isinstance(value, str) and option[1] in (float, float | None)


@pytest.mark.parametrize(("name", "quick"), FORMS)
def test_names_in_tables_figures_and_rules_exist(name: str, quick: bool) -> None:
    plan, whole = load(name, quick=quick), load(name)
    rows, columns = ({one.name for one in group} for group in (whole.rows, whole.columns))
    for spec in plan.tables:
        assert spec["measure"].split()[0] in KINDS
        assert set(spec["published"]) <= rows
        assert set(spec.get("rows", ())) <= rows
    for spec in plan.figures:
        assert spec["kind"] in DRAW
        assert set(spec.get("rows", ())) <= rows
        named = spec.get("columns", [])
        assert set([] if named == "all" else named) <= columns
        assert spec.get("column", plan.columns[0].name) in columns
    for rule in plan.rules:
        assert rule["check"] in CHECKS
        assert set(_rows_of(rule)) <= rows | {"others"}, rule["claim"]
        assert set(rule.get("columns", ())) <= columns
        assert rule.get("measure", "last").split()[0] in KINDS
    assert set(plan.references) <= rows


def _rows_of(rule: dict[str, Any]) -> list[str]:
    found = []
    for key in ("row", "rows", "than", "of", "ends", "except"):
        value = rule.get(key, [])
        found += [value] if isinstance(value, str) else list(value)
    if rule["check"] == "expression":
        for node in ast.walk(ast.parse(rule["value"])):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("v", "mean"):
                assert isinstance(node.args[0], ast.Constant)
                found.append(str(node.args[0].value))
    return found


def test_a_short_form_asks_for_less_than_the_full_one() -> None:
    def work(plan: Plan) -> float:
        return sum(
            settings["seeds"] * (settings["rounds"] if settings["solve"] == "train" else 1)
            for _, _, settings in plan.cells()
        )

    slower = [n for n in reproduce.names() if work(load(n, quick=True)) > work(load(n))]
    assert slower == []


def test_an_unknown_name_is_reported_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="fedapa-table4"):
        load("fedapa-tabel4")


def test_all_faults_of_a_plan_are_reported_at_once() -> None:
    content = {
        "title": "x",
        "paper": "x",
        "item": "x",
        "tables": [],
        "settings": {"round": 3},
        "rows": [{"name": "a", "method": "local"}, {"name": "a", "method": "fedavg"}],
        "colums": [],
    }
    with pytest.raises(ConfigError) as caught:
        read("mine", content)
    text = str(caught.value)
    assert "unknown settings key 'round'" in text
    assert "'colums'" in text
    assert "'a' is there twice" in text


def test_settings_of_a_cell_come_from_plan_column_row_and_short_form() -> None:
    content = {
        "title": "x",
        "paper": "x",
        "item": "x",
        "tables": [{"title": "t", "measure": "last"}],
        "settings": {"rounds": 9, "lr": 0.1, "batch": 8, "seeds": 5},
        "quick": {"rounds": 2, "columns": ["c"]},
        "rows": [
            {
                "name": "λ {p:g}",
                "method": "fedprox",
                "set": {"q": 1},
                "sweep": {"p": [1, 2]},
                "batch": 4,
                "quick": {"lr": 0.3, "set": {"q": 2}},
            }
        ],
        "columns": [{"name": "c", "lr": 0.2, "quick": {"seeds": 1}}, {"name": "d"}],
    }
    plan, short = read("mine", content), read("mine", content, quick=True)
    assert [row.name for row in plan.rows] == ["λ 1", "λ 2"]
    settings = plan.settings_of(plan.rows[0], plan.columns[0])
    assert (settings["rounds"], settings["lr"], settings["batch"], settings["seeds"]) == (
        9,
        0.2,
        4,
        5,
    )
    settings = short.settings_of(short.rows[0], short.columns[0])
    assert (settings["rounds"], settings["seeds"], settings["lr"]) == (2, 1, 0.3)
    assert plan.rows[1].set == {"q": 1, "p": 2}
    assert short.rows[1].set == {"q": 2, "p": 2}
    assert [column.name for column in short.columns] == ["c"]
