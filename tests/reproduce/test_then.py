"""Rows that differ in what clients do to their models before use are trained once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sartor import methods
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.methods import build
from sartor.reproduce.passes import passes_of, run_pass
from sartor.reproduce.plan import Plan, load, names, read
from tests.toys import federation, net_task, outcome, run, simulation

CPU = torch.device("cpu")

PLAN: dict[str, Any] = {
    "title": "t",
    "paper": "p",
    "item": "i",
    "settings": {
        "data": "digits",
        "partition": "dirichlet:0.5",
        "clients": 4,
        "samples": 300,
        "rounds": 4,
        "seeds": 2,
        "dtype": "float64",
        "chunk": 16,
        "eval_every": 2,
        "participation": 0.5,
        "points": ["pre", "post", "global"],
    },
    "rows": [
        {"name": "plain", "method": "fedavg", "set": {"relax": 1.0}},
        {"name": "far", "method": "fedavg", "set": {"relax": 2.0}},
        {
            "name": "tuned",
            "method": "fedavg",
            "set": {"relax": 1.0},
            "then": {"finetune_steps": 2, "ft_lr": 0.3},
        },
        {
            "name": "tuned longer",
            "method": "fedavg",
            "set": {"relax": 1.0},
            "then": {"finetune_epochs": 2},
        },
        {"name": "meta", "method": "per-fedavg", "set": {"personal_lr": 0.1}},
        {
            "name": "meta twice",
            "method": "per-fedavg",
            "set": {"personal_lr": 0.1},
            "then": {"personal_steps": 2},
        },
    ],
    "tables": [],
}


def found(plan: Plan) -> dict[tuple[str, int], dict[str, Any]]:
    entries = [entry for one in passes_of(plan) for entry in run_pass(one, CPU)]
    return {(row, e["seed"]): e["record"] for e in entries for row in e["rows"]}


def test_a_row_trained_by_another_is_the_row_trained_alone() -> None:
    """Scores at every point, gradients and bytes; two passes in place of five."""
    plan = read("toy", PLAN)
    alone = replace(
        plan, rows=tuple(replace(r, set={**r.set, **r.then}, then={}) for r in plan.rows)
    )
    assert [len(passes_of(p)) for p in (plan, alone)] == [2, 5]
    mine, wanted = found(plan), found(alone)
    assert mine.keys() == wanted.keys()
    for place, record in mine.items():
        other = wanted[place]
        assert record["points"].keys() == other["points"].keys()
        for name, curve in record["points"].items():
            for kind in ("rounds", "accuracy", "loss"):
                np.testing.assert_allclose(
                    curve[kind], other["points"][name][kind], atol=1e-10, err_msg=f"{place} {name}"
                )
        for cost in ("kib", "gradients", "setup_kib", "setup_gradients", "headline", "rounds"):
            assert record[cost] == other[cost], (place, cost)
        assert record["seconds"] > 0
    assert mine["tuned", 0]["points"]["pre/test"] != mine["plain", 0]["points"]["pre/test"]


def test_a_row_may_stand_without_the_one_that_trains_it() -> None:
    """Nothing is stored of a training that no row uses."""
    plan = read("toy", PLAN)
    alone = replace(plan, rows=tuple(r for r in plan.rows if r.name == "tuned"))
    both = found(plan)
    for place, record in found(alone).items():
        assert record["points"] == both[place]["points"]


def test_words_and_key_of_a_pass_name_all_its_rows() -> None:
    """A folder that was begun without such a row has other keys."""
    plan = read("toy", PLAN)
    one = passes_of(plan)[0]
    assert one.words == "fedavg (4 rows), all, 4 runs"
    fewer = replace(plan, rows=tuple(r for r in plan.rows if r.name != "tuned"))
    assert passes_of(fewer)[0].key != one.key


def test_a_method_that_trains_outside_of_rounds_is_refused() -> None:
    """Its epilogue would run twice on the same states; the message says where options belong."""
    row = {"name": "tuned", "method": "fedprox-two-stage", "then": {"finetune_steps": 1}}
    (one,) = passes_of(read("toy", {**PLAN, "rows": [row]}))
    with pytest.raises(ConfigError, match="in ``set``"):
        run_pass(one, CPU)


@pytest.mark.parametrize("name", names())
def test_training_does_not_see_what_plans_do_later(name: str) -> None:
    """States after training are the same to the bit with every ``then`` of our plans."""
    seen = {(r.method, str(r.then)): r for r in load(name).rows if r.then}
    task, local = net_task(), Local(epochs=1, batch=4, lr=0.1)
    for row in seen.values():
        static = methods.static_options(methods.find(row.method))
        options = [{}, {k: v for k, v in row.then.items() if k in static}]
        trained = [
            run(
                simulation(
                    build(row.method, task, local, given),
                    task,
                    [federation()],
                    rounds=2,
                    points=(),
                )
            )
            for given in options
        ]
        states = [
            {k: v for k, v in outcome(sim).items() if k.startswith(("server", "client"))}
            for sim in trained
        ]
        assert states[0].keys() == states[1].keys()
        assert all(np.array_equal(states[0][k], states[1][k]) for k in states[0])
