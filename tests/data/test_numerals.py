"""Laws of numbers as people write them: one way for a column, never a guess that matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sartor.core.errors import ConfigError, FederationError
from sartor.data import Federation
from sartor.data.cells import read_column
from sartor.data.encoding import prepare
from sartor.data.numerals import by_mark, is_date, read_numbers


def german(value: float, decimals: int = 1) -> str:
    """Write a number as a German spreadsheet does."""
    return f"{value:,.{decimals}f}".translate(str.maketrans(",.", ".,"))


def table(write: Any, rows: int = 60) -> dict[str, Any]:
    """A table whose numbers are written by a function, and what they are."""
    rng = np.random.default_rng(0)
    size, income = rng.normal(1.7, 0.1, rows).round(2), rng.integers(1000, 90_000, rows)
    return {
        "clinic": ["a", "b"] * (rows // 2),
        "size": [write(v, 2) for v in size],
        "income": [write(v, 0) for v in income],
        "ill": list(rng.integers(0, 2, rows)),
    }


WORDS = {"client": "clinic", "label": "ill"}


def test_a_german_table_is_the_english_one():
    """A decimal comma, with points between thousands, gives the features of plain numbers."""
    plain = Federation.from_dataframe(table(lambda v, d: f"{v:.{d}f}"), **WORDS)
    with pytest.warns(UserWarning, match=r"decimal comma were read in size .*, income"):
        comma = Federation.from_dataframe(table(german), **WORDS)
    assert comma.info["features"] == ["size", "income"]  # and not 49 categories
    assert comma.fingerprint() == plain.fingerprint()
    with pytest.warns(UserWarning, match="separators of thousands"):
        english = Federation.from_dataframe(table(lambda v, d: f"{v:,.{d}f}"), **WORDS)
    assert english.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    ("cell", "point", "comma"),
    [
        ("1,5", None, 1.5),
        ("1.5", 1.5, None),
        ("1,234", 1234, 1.234),
        ("0,123", None, 0.123),
        ("1.234,5", None, 1234.5),
        ("1,234,567.8", 1234567.8, None),
        ("12 345,6", None, 12345.6),
        ("1'234.5", 1234.5, None),
        ("-,5e2", None, -50),
        ("1,23,456", None, None),
        ("1.2.3", None, None),
        ("x", None, None),
    ],
)
def test_a_cell_by_its_mark(cell: str, point: float | None, comma: float | None):
    """Groups have three digits and do not begin with 0; everything else is no number."""
    assert by_mark(cell, ".") == point
    assert by_mark(cell, ",") == comma


def test_what_can_be_read_in_two_ways_is_refused_and_the_flag_named():
    """``1,234`` alone is a fault; another column, or ``decimal``, decides."""
    given = {"c": list("aabb"), "v": ["1,234", "2,500", "3,100", "7"], "l": [0, 1, 0, 1]}
    words = {"client": "c", "label": "l", "test": 0, "standardise": False}
    with pytest.raises(FederationError, match=r"1234 or 1\.234; .*--decimal point"):
        Federation.from_dataframe(given, **words)
    for decimal, first in (("point", 1234), ("comma", 1.234)):
        with pytest.warns(UserWarning, match="were read"):
            made = Federation.from_dataframe(given, decimal=decimal, **words)
        assert made.x[0, 0].item() == pytest.approx(first)
    for other, first in (("0,5", 1.234), ("0.5", 1234)):
        with pytest.warns(UserWarning, match="were read"):
            made = Federation.from_dataframe({**given, "w": [other] * 3 + ["2"]}, **words)
        assert made.x[0, 0].item() == pytest.approx(first)
    with pytest.raises(ConfigError, match="decimal must be"):
        Federation.from_dataframe(given, decimal=",", **words)


def test_plain_numbers_stay_what_they_were():
    """Three decimals are no thousands, unless the table has decimal commas."""
    assert read_numbers(["1.234", "2.5"]).values == [1.234, 2.5]
    assert read_numbers(["1.234", "2.500"]).values == [1.234, 2.5]
    assert read_numbers(["1.234", "2.500"], "comma").values == [1234, 2500]
    assert read_numbers(["0.234", "2.500"], "comma").values == [0.234, 2.5]


def test_two_hospitals_two_ways():
    """A column with points here and commas there is read, with a note; thousands spoil it."""
    faults: list[str] = []
    notes: list[Any] = []
    found = read_column("v", ["1.5", "2,25", "3"], faults, notes=notes)
    assert found is not None
    assert found[1].tolist() == [1.5, 2.25, 3]
    assert [note.how for note in notes] == ["both"]
    assert read_column("v", ["1.5", "2,25", "3,125"], faults) is None
    assert "are text" in faults[0]


def test_new_samples_are_read_as_the_training_was():
    """A prediction reads ``1,234`` as the table did that the model has seen."""
    with pytest.warns(UserWarning, match="decimal comma"):
        fed = Federation.from_dataframe(table(german), **WORDS)
    recipe = fed.info["preprocessing"]
    new = prepare({"size": ["1,712"], "income": ["12.000"]}, recipe)
    same = prepare({"size": [1.712], "income": [12000]}, recipe)
    np.testing.assert_array_equal(new, same)


def test_dates_are_refused():
    """Text dates would be a category for every day."""
    given = {"c": ["a", "b"] * 20, "d": ["01.02.2023", "2023-02-01"] * 20, "l": [0, 1, 1, 0] * 10}
    with pytest.raises(FederationError, match=r"dates or times .*--drop d"):
        Federation.from_dataframe(given, client="c", label="l")
    made = Federation.from_dataframe(given, client="c", label="l", categories=["d"])
    assert made.info["features"] == ["d=01.02.2023", "d=2023-02-01"]
    good = ["2024-01-31T08:15:00Z", "1/2/24", "3 Mar 2020", "März 3, 2020", "12:30"]
    assert [is_date(one) for one in good] == [True, True, True, True, True]
    assert not any(map(is_date, ["1.5", "stage 2", "T1-2", "2024", "1-2"]))


# ---------------------------------------------------------------------- files


def lines(mark: str) -> list[str]:
    """The lines of a German file."""
    given = table(german)
    rows = zip(*given.values(), strict=True)
    return [mark.join(given), *(mark.join(map(str, row)) for row in rows)]


@pytest.mark.filterwarnings("ignore:Numbers with")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_every_spreadsheet_is_read(tmp_path: Path, encoding: str):
    """A mark of bytes, blank lines, ``sep=``, tabs and old encodings change nothing."""
    expected = Federation.from_dataframe(table(german), **WORDS).fingerprint()
    semicolons = [line.replace("clinic", "Klinik für") for line in lines(";")]
    padded = ["sep=;", *semicolons[:5], "", ";;;", *semicolons[5:], ""]
    (tmp_path / "a.csv").write_text("\r\n".join(padded), encoding=encoding)
    words = {"client": "Klinik für", "label": "ill"}
    if encoding == "latin-1":
        with pytest.warns(UserWarning, match="is not UTF-8 and was read as Windows-1252"):
            made = Federation.from_file(tmp_path / "a.csv", **words)
    else:
        made = Federation.from_file(tmp_path / "a.csv", **words)
    assert made.fingerprint() == expected
    (tmp_path / "b.tsv").write_text("\n".join(lines("\t")), encoding="utf-8")
    (tmp_path / "c.csv").write_text("\n".join(lines("\t")), encoding="utf-8")
    for name in ("b.tsv", "c.csv"):
        assert Federation.from_file(tmp_path / name, **WORDS).fingerprint() == expected


def test_a_fault_names_the_line_of_the_file(tmp_path: Path):
    """Blank lines count, as in an editor; a column without a name gets one."""
    (tmp_path / "a.csv").write_text(",clinic,v\n0,a,1\n\n\n1,b\n")
    with pytest.raises(FederationError, match="line 5 has 2"):
        Federation.from_file(tmp_path / "a.csv", client="clinic", label="v")
    (tmp_path / "b.csv").write_text(",clinic,v\n0,a,1\n1,b,0\n")
    made = Federation.from_file(tmp_path / "b.csv", client="clinic", label="v", test=0)
    assert made.info["features"] == ["column 1"]


@pytest.mark.filterwarnings("ignore:.*Numbers with")
def test_a_folder_of_german_files(tmp_path: Path):
    """Without and with standardising, targets too."""
    for name in ("bonn", "ulm"):
        rows = [f"{german(i / 7, 2)};{german(i * 1000.5)}" for i in range(1, 30)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["v;target", *rows]))
    for standardise in (False, True):
        made = Federation.from_folder(tmp_path, standardise=standardise, num_classes=0, test=0)
        assert made.task == "regression"
        assert len(made.y.unique()) == 29
        scale = made.info["preprocessing"]["columns"][0] if standardise else {"mean": 0, "scale": 1}
        expected = (round(29 / 7, 2) - scale["mean"]) / scale["scale"]
        assert made.x.max().item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.xlsx", r"Save As, CSV.*pandas\.read_excel\('a\.xlsx'\).*pip install pandas openpyxl"),
        ("a.sav", r"read_spss.*pip install pandas pyreadstat"),
        ("a.csv.gz", "unpack it first"),
        ("a.npz", "one .npz file per client into a folder"),
        ("a.txt", "rename it to .csv"),
    ],
)
def test_other_files_get_an_error_that_fits(tmp_path: Path, name: str, words: str):
    """It names the way: save as CSV, or read it with pandas."""
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(FederationError, match=words):
        Federation.from_file(tmp_path / name, client="c", label="l")


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("bonn.xlsx", r"it holds bonn\.xlsx.*read_excel"),
        ("cat.png", "1 images lie in the folder itself"),
        ("bonn/data.csv", r"1 such files lie in folders below, such as bonn/data\.csv"),
        ("notes.txt", "put one file per client there"),
    ],
)
def test_other_folders_get_an_error_that_fits(tmp_path: Path, inside: str, words: str):
    """It says what is in there, and where it should be."""
    (tmp_path / inside).parent.mkdir(exist_ok=True)
    (tmp_path / inside).write_bytes(b"x")
    with pytest.raises(FederationError, match=words):
        Federation.from_folder(tmp_path)
