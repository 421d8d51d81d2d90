from __future__ import annotations

import builtins
import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from sartor.core.errors import ConfigError, ContractError, MissingExtraError, RunFolderError
from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.results.tables import Table, format_cell, jsonable
from tests.synthetic_results import make_comparison, make_result


def strict(value):
    """Serialise the way a strict JSON reader demands: NaN and infinity raise."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_the_headline_is_the_last_entry_of_the_methods_own_point_pooled():
    """FedAPA is scored after local training, FedAvg after aggregation."""
    for method, point in (("fedapa", "post"), ("fedavg", "pre")):
        result = make_result(method)
        scores = result.scores[point, "test"]
        expected = scores.correct[0, -1].sum() / scores.count[0].sum()
        assert result.accuracy == pytest.approx(expected)
        assert result.summary()["accuracy"] == pytest.approx(expected)


def test_one_run_gives_numbers_and_a_sweep_gives_arrays():
    """The same names, a float or one value per run."""
    one, many = make_result(), make_result(seeds=(0, 1, 2))
    names = ["accuracy", "accuracy_best", "accuracy_macro", "accuracy_last10", "worst_client"]
    names += ["bytes_up", "bytes_down", "gradient_evaluations", "seconds", "megabytes"]
    for name in names:
        assert isinstance(getattr(one, name), float), name
        assert getattr(many, name).shape == (3,), name
    assert len(many.summaries()) == 3


def test_a_row_of_a_sweep_equals_the_single_run():
    """Everything that is not time is the same, alone or in company."""
    sweep, single = make_result(seeds=(3, 4)), make_result(seeds=(4,))
    timing = ("seconds", "seconds_all_runs")
    row, alone = sweep.summary(1), single.summary()
    assert {k: v for k, v in row.items() if k not in timing} == {
        k: v for k, v in alone.items() if k not in timing
    }


def test_selected_runs_are_the_runs_themselves():
    """A slice of a sweep has its summaries, snapshots and models, and its share of the time."""
    sweep = make_result(seeds=(3, 4, 5), diverged={"round": 1, "client": "client-00"})
    models = [torch.nn.Identity() for _ in range(3)]
    sweep._models = lambda client, run, point: models[run]
    part = sweep.select([2, 0])
    timing = "seconds_all_runs"
    for found, expected in zip(part.summaries(), (sweep.summary(2), sweep.summary(0)), strict=True):
        assert found.pop(timing) == pytest.approx(expected.pop(timing) * 2 / 3)
        assert found.pop("seconds") == pytest.approx(expected.pop("seconds"))
        assert found == expected
    assert part.snapshots[0]["mix"].shape == (2, 20, 20)
    assert part.model(0, run=0) is models[2]


def test_the_best_is_never_below_the_last():
    """The maximum over evaluations contains the last one."""
    result = make_result(seeds=(0, 1, 2))
    assert (result.accuracy_best >= result.accuracy).all()


def test_best_on_validation_exists_only_with_validation_data():
    """Without it the value is missing, not invented."""
    assert make_result().summary()["accuracy_best_val"] is None
    with_val = make_result(val=True)
    assert 0 < with_val.accuracy_best_val <= with_val.accuracy_best


def test_a_summary_is_strict_json_with_the_promised_keys():
    """What the command line prints can be read by any JSON reader."""
    summary = strict(make_result().summary())
    promised = "method accuracy accuracy_best accuracy_macro worst_client bytes_up bytes_down"
    promised += " gradient_evaluations seconds seed hyper options rounds clients diverged"
    assert set(promised.split()) <= set(summary)


def test_a_diverged_run_has_no_accuracy_and_does_not_spoil_the_others():
    """Its accuracies are null, it says where it happened, and the other rows stand."""
    result = make_result(seeds=(0, 1, 2), diverged={"round": 4, "client": "client-03"})
    first, second = strict(result.summaries())[:2]
    assert first["diverged"] == {"round": 4, "client": "client-03"}
    assert first["accuracy"] is None
    assert first["accuracy_best"] is None
    assert first["worst_client"] is None
    assert second["accuracy"] == pytest.approx(make_result(seeds=(1,)).accuracy)
    assert "1 diverged" in repr(result)
    table = Comparison({"fedapa": result}).table()
    assert "round 4" in table.notes["fedapa diverged"]
    assert math.isfinite(table.column("accuracy")[0].mean)


def test_a_curve_is_blank_from_the_divergence_on():
    """Pre entry t precedes the training of round t; post entry t follows it."""
    result = make_result(diverged={"round": 4, "client": "client-03"})
    assert np.isfinite(result.curve("pre")[1]).sum() == 5
    assert np.isfinite(result.curve("post")[1]).sum() == 4


def test_the_only_diverged_run_is_still_displayed_and_compared():
    """Nothing raises when there is no number at all."""
    lost = make_result(diverged={"round": 0, "client": "client-00"})
    comparison = Comparison({"local": make_result("local"), "fedapa": lost})
    strict(comparison.summary())
    for text in (repr(lost), str(comparison.table()), str(comparison.paired())):
        assert "nan" not in text.lower()
    assert lost.gain(make_result("local")).notes["clients hurt"] == 0


def test_the_gain_table_adds_up():
    """Federated minus alone is the gain, and the notes summarise the column."""
    local, fedapa = make_result("local"), make_result("fedapa")
    table = fedapa.gain(local)
    gains = np.array(table.column("gain"))
    alone, federated = np.array(table.column("alone")), np.array(table.column("federated"))
    assert np.allclose(federated - alone, gains)
    assert table.notes["mean gain"] == pytest.approx(gains.mean())
    assert table.notes["minimum gain"] == pytest.approx(gains.min())
    assert table.notes["fraction hurt"] == pytest.approx((gains < 0).mean())
    assert len(table) == 20
    lines = str(table).splitlines()
    assert f"mean gain: {100 * gains.mean():+.1f} points" in lines
    assert f"fraction hurt: {100 * (gains < 0).mean():.1f} %" in lines
    assert f"clients hurt: {(gains < 0).sum()}" in lines


def test_a_note_of_words_has_no_unit():
    """A note may have the name of a column; its words stay as they are."""
    table = Table(["gain"], [[0.1]], notes={"gain": "in words"}, formats={"gain": "points"})
    assert table.note_lines() == ["gain: in words"]
    assert Table(["a"], [[1]], {"gain": math.nan}, {"gain": "points"}).note_lines() == ["gain: –"]


def test_the_baseline_is_trained_once_and_only_when_asked_for():
    """A callable makes it; known_baseline never does."""
    calls = []
    local = make_result("local")
    result = make_result()

    def trained():
        calls.append(1)
        return local

    result._baseline = trained
    assert result.known_baseline is None
    result.gain()
    result.gain()
    assert calls == [1]
    assert result.known_baseline is local


def test_gain_without_a_baseline_says_how_to_get_one():
    """The message holds the code to write."""
    with pytest.raises(ConfigError, match=r'sartor\.fit\("local"'):
        make_result().gain()


def test_runs_are_paired_by_seed_and_not_by_position():
    """A sweep of two strengths over three seeds against one local run per seed."""
    local = make_result("local", seeds=(2, 1, 0))
    sweep = make_result("fedprox", seeds=(0, 1, 2), hyper=[{"l": 0.1}, {"l": 0.5}])
    assert sweep.partners(local) == [2, 1, 0, 2, 1, 0]
    with pytest.raises(ConfigError, match="seed 2"):
        sweep.partners(make_result("local", seeds=(0, 1)))
    with pytest.raises(ConfigError, match="clients"):
        sweep.partners(make_result("local", clients=3, seeds=(0, 1, 2)))


def test_per_client_lists_every_client_of_every_run():
    """One row each; with several runs a column says which."""
    assert make_result().per_client().columns[0] == "client"
    table = make_result(seeds=(0, 1)).per_client()
    assert table.columns[0] == "run"
    assert len(table) == 40
    assert len(make_result(seeds=(0, 1)).per_client(run=1)) == 20


def test_the_worst_client_leaves_out_tiny_clients_and_says_how_many():
    """The floor of ten test samples, in the summary and below the table."""
    count = np.full(20, 40)
    count[:3] = 5
    result = make_result(count=count)
    summary = result.summary()
    assert summary["clients_below_floor"] == 3
    assert summary["worst_client_name"] not in result.clients[:3]
    assert "3 left out" in Comparison({"fedapa": result}).table().notes["worst client"]


def test_the_data_frame_holds_every_evaluation():
    """Rows are runs x evaluations x clients x points, and reproduce the headline."""
    pytest.importorskip("pandas")
    result = make_result(seeds=(0, 1), clients=5, rounds=3, val=True)
    frame = result.to_dataframe()
    assert list(frame.columns) == [
        "run", "round", "client", "point", "split", "accuracy", "loss", "count",
    ]  # fmt: skip
    assert len(frame) == 2 * 5 * (4 + 3) * 2
    last = frame.query("run == 1 and point == 'post' and split == 'test' and round == 2")
    pooled = (last["accuracy"] * last["count"]).sum() / last["count"].sum()
    assert pooled == pytest.approx(result.accuracy[1])


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    """A missing optional package is our error and not an ImportError from the depths."""
    real = builtins.__import__

    def blocked(name, *rest):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingExtraError, match=r"sartor\[data\]"):
        make_result().to_dataframe()


def test_a_model_is_found_by_name_or_index_at_the_headline_point():
    """The callable gets indices; a wrong name is met with the nearest."""
    asked = []

    def make(client, run, point):
        asked.append((client, run, point))
        return nn.Linear(1, 1)

    result = make_result()
    result._models = make
    result.model("client-03")
    result.model(3, point="pre")
    assert asked == [(3, 0, "post"), (3, 0, "pre")]
    with pytest.raises(ConfigError, match="client-03"):
        result.model("cleint-03")
    with pytest.raises(ConfigError, match="from 0 to 19"):
        result.model(20)
    with pytest.raises(RunFolderError, match="read_models"):
        make_result().model(0)


def test_a_result_of_wrong_shape_is_refused_with_all_its_faults():
    """An engine's mistake is found at the door, not in a plot."""
    good = make_result()
    bad = dataclasses.replace(good.scores["pre", "test"], count=np.ones((1, 3)))
    with pytest.raises(ContractError, match=r"'post'/test.*pre/test count has shape \(1, 3\)"):
        Result(
            method="x",
            headline="post",
            runs=good.runs,
            clients=good.clients,
            scores={("pre", "test"): bad},
            ledger=good.ledger,
        )


def test_megabytes_at_an_evaluation_end_at_the_total():
    """The last "pre" entry has seen everything; "post" lacks the last upload."""
    result = make_result()
    ledger, rounds = result.ledger, result.scores["pre", "test"].rounds
    travelled = ledger.megabytes(0, "pre", rounds)
    assert travelled[-1] == pytest.approx(result.megabytes)
    assert travelled[0] == pytest.approx(ledger.setup_bytes[0] / 1e6)
    post = ledger.megabytes(0, "post", rounds[:-1])
    assert post[-1] == pytest.approx(result.megabytes - ledger.bytes_up[0, -1] / 1e6)


# --- comparison ---------------------------------------------------------------------------------


def test_the_comparison_table_has_one_row_per_method_and_the_promised_columns():
    """The reference itself hurts nobody: its cell is empty."""
    table = make_comparison().table()
    assert table.columns == [
        "method", "accuracy", "worst client", "clients hurt", "MB",
        "gradient evaluations", "seconds",
    ]  # fmt: skip
    assert table.column("method") == ["local", "fedavg", "fedprox", "fedapa"]
    assert table.column("clients hurt")[0] is None
    assert all(value >= 0 for value in table.column("clients hurt")[1:])


def test_repeats_give_mean_and_sample_deviation_and_few_are_listed():
    """With three seeds the three accuracies stand in the notes; with five they do not."""
    table = make_comparison(seeds=(0, 1, 2)).table()
    result = make_result("fedapa", seeds=(0, 1, 2))
    cell = table.column("accuracy")[3]
    assert cell.mean == pytest.approx(result.accuracy.mean())
    assert cell.std == pytest.approx(result.accuracy.std(ddof=1))
    assert table.notes["fedapa, accuracy of each run"].count(",") == 2
    assert "±" in str(table)
    five = make_comparison(seeds=(0, 1, 2, 3, 4)).table()
    assert not any("each run" in name for name in five.notes)


def test_a_sweep_is_never_averaged_over_different_settings():
    """Each setting is a row of its own, labelled by what differs."""
    sweep = make_result("fedprox", seeds=(0, 1), hyper=[{"l": 0.1, "k": 1}, {"l": 0.5, "k": 1}])
    local = make_result("local", seeds=(0, 1))
    table = Comparison({"local": local, "fedprox": sweep}).table()
    assert table.column("method") == ["local", "fedprox l=0.1", "fedprox l=0.5"]


def test_paired_differences_are_over_allocations_when_there_are_several():
    """Mean difference of the pooled accuracies, with an interval around it."""
    comparison = make_comparison(seeds=(0, 1, 2))
    row = comparison.paired().records()[2]
    difference = comparison["fedapa"].accuracy - comparison["local"].accuracy
    assert row["difference"] == pytest.approx(difference.mean())
    assert row["low"] < row["difference"] < row["high"]
    assert (row["pairs"], row["unit"]) == (3, "allocations")


def test_paired_differences_of_one_run_are_over_clients_and_say_so():
    """The caution must stand below: one allocation says nothing about another."""
    table = make_comparison().paired()
    assert set(table.column("unit")) == {"clients"}
    assert "one allocation" in table.notes["caution"]


def test_any_method_can_be_the_reference_and_a_wrong_one_is_named():
    """The nearest name is offered."""
    comparison = make_comparison()
    assert comparison.paired(reference="fedavg").column("method") == ["local", "fedprox", "fedapa"]
    with pytest.raises(ConfigError, match="fedavg"):
        comparison.paired(reference="fedagv")
    with pytest.raises(KeyError, match="fedprox"):
        comparison["fedpox"]


def test_a_comparison_is_a_mapping_and_strict_json():
    """len, iteration, membership; and nothing in its summary that JSON cannot say."""
    comparison = make_comparison(seeds=(0, 1))
    assert list(comparison) == ["local", "fedavg", "fedprox", "fedapa"]
    assert "fedapa" in comparison
    assert len(strict(comparison.summary())["methods"]) == 8


# --- table --------------------------------------------------------------------------------------


def test_a_table_escapes_what_users_wrote():
    """A client may be called anything."""
    table = Table(["client"], [["<script>alert(1)</script>"]], notes={"<b>": "<i>"}, title="<u>")
    for bad in ("<script>", "<b>", "<i>", "<u>"):
        assert bad not in table._repr_html_()
    assert "<script>" not in make_result(clients=1, names=("<script>",))._repr_html_()


def test_csv_keeps_every_digit_and_splits_mean_and_deviation(tmp_path):
    """What is rounded for the eye is not rounded on disk."""
    comparison = make_comparison(seeds=(0, 1, 2))
    path = comparison.table().to_csv(tmp_path / "table.csv")
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert float(rows[3]["accuracy"]) == comparison["fedapa"].accuracy.mean()
    assert float(rows[3]["accuracy std"]) == comparison["fedapa"].accuracy.std(ddof=1)
    assert rows[0]["clients hurt"] == ""


def test_the_columns_of_the_text_are_aligned():
    """Every line of the body is as wide as the rule, numbers to the right."""
    lines = str(make_comparison().table()).splitlines()
    assert len({len(line) for line in lines[1:6]}) == 1
    assert lines[0].startswith("method")


def test_a_difference_that_rounds_to_zero_has_no_sign():
    """Neither +0.0 nor -0.0 claims a direction."""
    assert [format_cell(v, "points") for v in (0.0, -1e-5, 1e-5, -0.02)] == [*["0.0"] * 3, "-2.0"]


def test_jsonable_leaves_nothing_that_json_cannot_hold():
    """numpy, torch, tuples, NaN and infinity."""
    value = {1: np.float32(0.5), "a": (np.nan, np.inf), "b": np.arange(2), "c": nn.Linear}
    assert strict(jsonable(value))["a"] == [None, None]
    assert jsonable(np.float64(0.25)) == 0.25
