"""Laws of tables: federated standardisation, categories, labels, and faults reported at once."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import pytest

from sartor.core.errors import ConfigError, FederationError
from sartor.data import Federation
from sartor.data.cells import read_column
from sartor.data.encoding import client_statistics, combine_statistics, prepare


def table(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    ctx = np.array(["bonn", "oslo", "turin"])[np.arange(rows) % 3]
    return {
        "site": ctx,
        "age": rng.normal(50, 9, rows) + 10 * (ctx == "oslo"),
        "dose": rng.integers(0, 900, rows),
        "sex": rng.choice(["f", "m"], rows),
        "ill": rng.integers(0, 2, rows),
    }


def steps_of(fed):
    return {step["name"]: step for step in fed.info["preprocessing"]["columns"]}


# ---------------------------------------------------------------------- standardisation


def test_statistics_of_clients_add_up_to_those_of_the_pool():
    """Count, sum and sum of squares of every client give mean and deviation of all of them."""
    given = table()
    fed = Federation.from_dataframe(given, client="site", label="ill")
    train = fed.train.rows.numpy()
    for name in ("age", "dose"):
        step = steps_of(fed)[name]
        assert step["mean"] == pytest.approx(given[name][train].mean(), rel=1e-12)
        assert step["scale"] == pytest.approx(given[name][train].std(), rel=1e-9)
    assert fed.x[train][:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    assert fed.x[train][:, 0].std(correction=0).item() == pytest.approx(1, rel=1e-5)


def test_test_and_validation_rows_decide_nothing():
    """Constants, levels and the vocabulary come from training rows alone."""
    given = table()
    first = Federation.from_dataframe(given, client="site", label="ill", val=0.2)
    held = np.concatenate([first.test.rows.numpy(), first.val.rows.numpy()])
    changed = {**given, "age": given["age"].copy(), "sex": given["sex"].astype(object)}
    changed["age"][held] = 1e6
    changed["sex"][held] = "x"
    second = Federation.from_dataframe(changed, client="site", label="ill", val=0.2)
    assert second.info["preprocessing"] == first.info["preprocessing"]
    assert (second.x[held][:, 2:] == 0).all()  # a level that nobody trained on


def test_a_large_offset_does_not_drown_the_deviation():
    """Sums of squares in double precision keep a column of times, and a constant one becomes 0."""
    rng = np.random.default_rng(0)
    values = 1.7e9 + rng.normal(0, 1e4, 400)
    columns = {"time": ("number", values), "same": ("number", np.full(400, 0.1))}
    halves = np.arange(200), np.arange(200, 400)
    steps = combine_statistics([client_statistics(columns, half) for half in halves])
    assert steps[0]["scale"] == pytest.approx(values.std(), rel=1e-4)
    assert steps[1]["scale"] == 1.0


def test_levels_are_the_union_over_clients():
    """A level that one client alone has is a column for everybody, in sorted order."""
    given = {"c": list("aabb"), "k": ["y", "y", "x", "z"], "l": [0, 1, 0, 1]}
    fed = Federation.from_dataframe(given, client="c", label="l", test=0)
    assert fed.info["features"] == ["k=x", "k=y", "k=z"]
    assert fed.x.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_numbers_can_be_categories_and_stay_as_they_are():
    """``categories`` reads numbers as levels, ``standardise=False`` keeps the other numbers."""
    given = {"c": list("aabb"), "code": [3, 7, 3, 7], "v": [10.0, 20, 30, 40], "l": [0, 1, 0, 1]}
    fed = Federation.from_dataframe(
        given, client="c", label="l", test=0, categories=["code"], standardise=False
    )
    assert fed.info["features"] == ["code=3", "code=7", "v"]
    assert fed.x[:, 2].tolist() == [10, 20, 30, 40]


def test_missing_cells_can_be_filled():
    """The mean is put for a number, which is 0 after standardising, and no level for a category."""
    given = table()
    given["age"][4] = np.nan
    given["sex"] = given["sex"].astype(object)
    given["sex"][5] = None
    fed = Federation.from_dataframe(given, client="site", label="ill", missing="mean")
    assert fed.x[4, 0] == 0
    assert fed.x[5, 2:].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="'indicator' or 'median\\+indicator'"):
        Federation.from_dataframe(given, client="site", label="ill", missing="mode")


def test_arrays_are_standardised_by_channel():
    """``from_arrays(standardise=True)`` gives every channel of images mean 0 and deviation 1."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (40, 2, 4, 4)) * np.array([1, 10])[:, None, None]
    fed = Federation.from_arrays(x, np.arange(40) % 2, client=np.arange(40) % 3, standardise=True)
    train = fed.x[fed.train.rows]
    assert train.mean((0, 2, 3)).abs().max() < 1e-5
    assert (train.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    again = prepare(x, fed.info["preprocessing"])
    assert np.allclose(again, fed.x.numpy(), atol=1e-5)


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("values", "task", "names"),
    [
        (["no", "yes", "no", "yes"], "classification", ["no", "yes"]),
        ([1, 4, 2, 1], "classification", ["1", "2", "4"]),
        ([0, 1, 2, 1], "classification", None),
        ([0.5, 1.0, 2.0, 3.0], "regression", None),
        (["0.5", "1", "2", "3"], "regression", None),
        ([True, False, True, False], "classification", None),
    ],
)
def test_the_label_says_what_the_task_is(values, task, names):
    """Text and few whole numbers are classes, other numbers targets; names are kept."""
    given = {"c": list("aabb"), "v": [1.0, 2, 3, 4], "l": values}
    fed = Federation.from_dataframe(given, client="c", label="l", test=0)
    assert fed.task == task
    assert fed.info.get("class_names") == names


def test_many_whole_numbers_are_targets_unless_the_task_says_so():
    """A label with more than 100 whole values is a regression by default."""
    given = {"c": ["a"] * 202, "v": np.arange(202.0), "l": np.arange(202) % 101}
    assert Federation.from_dataframe(given, client="c", label="l").task == "regression"
    named = Federation.from_dataframe(given, client="c", label="l", task="classification")
    assert named.num_classes == 101


def test_several_label_columns_are_a_multi_label_task():
    """Columns of 0 and 1 become a matrix of labels, with their names."""
    given = {"c": list("aabb"), "v": [1.0, 2, 3, 4], "p": [0, 1, 0, 1], "q": [1, 1, 0, 0]}
    fed = Federation.from_dataframe(given, client="c", label=["p", "q"], test=0)
    assert (fed.task, fed.num_classes, fed.info["class_names"]) == ("multilabel", 2, ["p", "q"])
    assert fed.y.tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    assert fed.label_counts().tolist() == [[1, 2], [1, 0]]


def test_texts_become_token_ids_of_training_words():
    """``text_column`` learns from one column; ids of words that nobody trained on are unknown."""
    given = {"c": list("aab"), "t": ["good day", "bad day", "new words"], "l": [1, 0, 1]}
    given["held"] = [0, 0, 1]
    fed = Federation.from_dataframe(
        {**given, "c": list("aaa")}, client="c", label="l", test="held", text_column="t", length=3
    )
    assert fed.info["preprocessing"]["words"] == ["day", "bad", "good"]
    assert fed.x.tolist() == [[4, 2, 0], [3, 2, 0], [1, 1, 0]]
    assert prepare(["good words"], fed.info["preprocessing"]).tolist() == [[4, 1, 0]]


# ---------------------------------------------------------------------- faults


def test_one_message_lists_all_faults():
    """Every column that cannot be used is named, with what to do, in one error."""
    given = table()
    given["age"][3] = np.nan
    given["dose"] = given["dose"].astype(object)
    given["dose"][7] = "high"
    given["site"] = given["site"].astype(object)
    given["site"][2] = None
    given["ill"] = given["ill"].astype(object)
    given["ill"][9] = ""
    given["when"] = np.array(["2020-01-01"] * 60, dtype="datetime64[D]")
    given["empty"] = [None] * 60
    with pytest.raises(FederationError) as caught:
        Federation.from_dataframe(given, client="site", label="ill", test=1.5)
    text = str(caught.value)
    assert text.startswith("7 faults in the data:")
    for part in (
        "'site' names no client in 1 rows (2)",
        "'ill' is empty in 1 rows (rows 9; client bonn)",
        "'age' has 1 empty cells (rows 3; client bonn)",
        "'dose' holds numbers, but 1 cells are text: 'high' in row 7",
        "'when' holds dates",
        "'empty' is empty",
        "test must be a fraction in [0, 1), got 1.5",
    ):
        assert part in text
    assert len(caught.value.faults) == 7


def test_many_texts_are_no_category():
    """A column of more than 100 texts is refused with both ways out."""
    given: dict[str, Any] = {
        "c": ["a"] * 101,
        "id": [f"p{i}" for i in range(101)],
        "l": [0, 1] * 50 + [0],
    }
    with pytest.raises(FederationError, match=r"\['id'\] \(--drop id\), or learn") as caught:
        Federation.from_dataframe(given, client="c", label="l")
    assert len(caught.value.faults) == 1
    few = {name: list(values)[:20] for name, values in given.items()}
    with pytest.raises(FederationError, match="not one for every row"):
        Federation.from_dataframe(few, client="c", label="l")
    given["v"] = np.arange(101.0)
    fed = Federation.from_dataframe(given, client="c", label="l", drop=["id"])
    assert fed.info["features"] == ["v"]


def test_columns_that_are_not_there_are_named():
    """All unknown columns are reported at once, each with the nearest one."""
    with pytest.raises(FederationError) as caught:
        Federation.from_dataframe(table(), client="sight", label="il", drop=["sexx"])
    for part in ("did you mean 'site'", "did you mean 'ill'", "did you mean 'sex'", "3 faults"):
        assert part in str(caught.value)


def test_what_is_no_table_is_refused():
    """Arrays, empty tables and tables without features have a message of their own."""
    with pytest.raises(FederationError, match="from_arrays"):
        Federation.from_dataframe(np.zeros((3, 3)), client="a", label="b")
    with pytest.raises(FederationError, match="no rows"):
        Federation.from_dataframe({"a": [], "b": []}, client="a", label="b")
    with pytest.raises(FederationError, match="no column left"):
        Federation.from_dataframe({"a": ["x", "x"], "b": [0, 1]}, client="a", label="b")


def test_a_column_is_read_by_its_cells():
    """Text that reads as numbers is numbers, empty words are missing."""
    faults: list[str] = []
    found = read_column("v", ["1", " 2.5", "NA", "1e3"], faults)
    assert found is not None
    kind, values = found
    assert (kind, faults) == ("number", [])
    assert np.array_equal(values, [1, 2.5, np.nan, 1000], equal_nan=True)
    found = read_column("v", ["low", "high", "?"], faults)
    assert found is not None
    kind, values = found
    assert (kind, values.tolist()) == ("category", ["low", "high", ""])


# ---------------------------------------------------------------------- files


def write(path, given, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(given)
        writer.writerows(zip(*given.values(), strict=True))


def test_the_format_of_the_file_does_not_matter(tmp_path):
    """CSV with commas or semicolons, TSV and Parquet make the same federation as the columns."""
    given = table()
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(given)
    write(tmp_path / "a.csv", given)
    write(tmp_path / "b.csv", given, ";")
    write(tmp_path / "c.tsv", given, "\t")
    frame.to_parquet(tmp_path / "d.parquet")
    words = {"client": "site", "label": "ill", "seed": 3}
    made = [Federation.from_file(file, **words) for file in sorted(tmp_path.iterdir())]
    made += [Federation.from_dataframe(source, **words) for source in (given, frame)]
    assert len({fed.fingerprint() for fed in made}) == 1
    assert made[0].info["source"] == "a.csv"


def test_a_broken_file_is_reported(tmp_path):
    """Uneven lines and doubled names are reported together; a missing file by its path."""
    (tmp_path / "a.csv").write_text("site,v,v\na,1,2\na,1\nb,1,2,3\n")
    with pytest.raises(FederationError) as caught:
        Federation.from_file(tmp_path / "a.csv", client="site", label="v")
    assert "2 lines of a.csv do not have 3 cells (line 3 has 2, 4 has 4)" in str(caught.value)
    assert "same name: v" in str(caught.value)
    with pytest.raises(FederationError, match="no file"):
        Federation.from_file(tmp_path / "b.csv", client="site", label="v")
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(FederationError, match="must end in"):
        Federation.from_file(tmp_path / "c.txt", client="site", label="v")
    (tmp_path / "d.csv").write_text("site,v\n")
    with pytest.raises(FederationError, match="no rows"):
        Federation.from_file(tmp_path / "d.csv", client="site", label="v")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(FederationError, match=r"e\.parquet cannot be read"):
        Federation.from_file(tmp_path / "e.parquet", client="site", label="v")


def test_doubled_names_of_a_parquet_file_are_reported(tmp_path):
    """Neither a table nor the file of a client may have two columns of one name."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    doubled = arrow.table([["a", "b"], [1, 2], [3, 4]], names=["site", "v", "v"])
    parquet.write_table(doubled, tmp_path / "x.parquet")
    with pytest.raises(FederationError, match="two columns have the same name: v"):
        Federation.from_file(tmp_path / "x.parquet", client="site", label="v")
    with pytest.raises(FederationError, match="two columns have the same name: v"):
        Federation.from_folder(tmp_path, label="v")
