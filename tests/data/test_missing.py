"""Laws of empty cells, against scikit-learn's imputers; and of categories nobody trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sartor.cli import main
from sartor.core.errors import ConfigError
from sartor.data import Federation
from sartor.data.encoding import federated_median, prepare, unseen

impute = pytest.importorskip("sklearn.impute")
WORDS: dict[str, Any] = {"client": "clinic", "label": "ill"}


def table(rows: int = 90, seed: int = 0) -> dict[str, Any]:
    """A skewed column with gaps, one without, and a category with gaps."""
    rng = np.random.default_rng(seed)
    dose, age = rng.lognormal(2, 1, rows), rng.normal(50, 9, rows)
    dose[rng.random(rows) < 0.3] = np.nan
    sex = rng.choice(["f", "m"], rows).astype(object)
    sex[rng.random(rows) < 0.1] = None
    ill = rng.integers(0, 2, rows)
    return {
        "clinic": np.array(["a", "b", "c"])[np.arange(rows) % 3],
        "dose": dose,
        "age": age,
        "sex": sex,
        "ill": ill,
    }


@pytest.mark.parametrize("how", ["mean", "median", "indicator", "median+indicator"])
@pytest.mark.parametrize("standardise", [True, False])
def test_cells_are_filled_as_scikit_learn_fills_them(how: str, standardise: bool):
    """The constants are those of all training rows, also where nothing is standardised."""
    given = table()
    fed = Federation.from_dataframe(given, missing=how, standardise=standardise, **WORDS)
    x = np.stack([given["dose"], given["age"]], axis=1)
    train = fed.train.rows.numpy()
    strategy = "median" if how.startswith("median") else "mean"
    filler = impute.SimpleImputer(strategy=strategy).fit(x[train])
    expected = filler.transform(x)
    if standardise:
        expected = (expected - np.nanmean(x[train], 0)) / np.nanstd(x[train], 0)
    names = fed.info["features"]
    np.testing.assert_allclose(fed.x[:, names.index("dose")], expected[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fed.x[:, names.index("age")], expected[:, 1], rtol=1e-5, atol=1e-6)
    assert ("dose missing" in names) == how.endswith("indicator")
    if how.endswith("indicator"):
        marks = fed.x[:, names.index("dose missing")].numpy()
        np.testing.assert_array_equal(marks, np.isnan(given["dose"]))
        assert "age missing" not in names
    # A model sees new rows in the same way, from the recipe alone.
    again = prepare({k: given[k] for k in ("dose", "age", "sex")}, fed.info["preprocessing"])
    np.testing.assert_array_equal(again, fed.x.numpy())


def test_test_rows_do_not_move_the_median():
    """It comes from training rows alone."""
    given = table()
    first = Federation.from_dataframe(given, missing="median", **WORDS)
    given["dose"][first.test.rows.numpy()] = 1e9
    second = Federation.from_dataframe(given, missing="median", **WORDS)
    assert first.info["preprocessing"] == second.info["preprocessing"]


@pytest.mark.parametrize("seed", range(20))
def test_the_federated_median_is_the_median(seed: int):
    """To the last bit, for any division of any numbers, from counts alone."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    for values in (
        rng.normal(size=size),
        rng.integers(-3, 3, size).astype(float),
        -rng.lognormal(0, 50, size),
        rng.normal(size=size) * 1e-310,
    ):
        parts = np.array_split(values, int(rng.integers(1, 6)))
        gaps = [np.append(part, np.nan) for part in parts]
        assert federated_median(gaps) == np.median(values)
    assert federated_median([np.array([np.nan])]) == 0


def test_files_of_clients_are_filled_too(tmp_path: Path):
    """A folder takes ``missing`` where it is prepared as one table, and refuses it otherwise."""
    for name in ("a", "b"):
        lines = [f"{i if i % 5 else ''},{i % 2}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["v,y", *lines]))
    made = Federation.from_folder(tmp_path, standardise=True, missing="median+indicator")
    assert made.info["features"] == ["v", "v missing"]
    with pytest.raises(ConfigError, match=r"standardise=True \(--standardise\)"):
        Federation.from_folder(tmp_path, missing="median")


def test_categories_that_nobody_trained_on_are_reported():
    """How many cells, in which columns, which; a known level and an empty cell say nothing."""
    given = table()
    fed = Federation.from_dataframe(given, missing="median", **WORDS)
    recipe = fed.info["preprocessing"]
    new = {"dose": [1.0] * 4, "age": [50.0] * 4, "sex": ["x", "f", "x", None]}
    with pytest.warns(UserWarning, match=r"2 cells hold a category .* in 'sex' \('x' in 2\)"):
        features = prepare(new, recipe)
    assert features[0, -2:].tolist() == [0, 0]
    columns = {"sex": ("category", np.array(["x", "f", "x", ""]))}
    steps = [step for step in recipe["columns"] if step["name"] == "sex"]
    assert unseen(columns, steps) == {"sex": {"x": 2}}
    rows = {**new, "clinic": ["d"] * 4, "ill": [0, 1, 0, 1]}
    with pytest.warns(UserWarning, match="no client trained on"):
        Federation.from_dataframe(rows, like=fed.info, test=0, **WORDS)


def test_the_command_line_fills_with_the_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """``--missing median+indicator`` trains where an empty cell is an error otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")
    given = table(30)
    lines = [
        f"{c},{'' if np.isnan(d) else d},{i}"
        for c, d, i in zip(given["clinic"], given["dose"], given["ill"], strict=True)
    ]
    Path("my.csv").write_text("\n".join(["clinic,dose,ill", *lines]))
    words = ["run", "local", "--data", "my.csv", "--client", "clinic", "--label", "ill"]
    words += ["--rounds", "1", "--out", "run"]
    assert main(words) == 2
    assert "--missing median+indicator" in capsys.readouterr().err
    assert main([*words, "--missing", "median+indicator"]) == 0
    assert main([*words, "--missing", "mode", "--overwrite"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'error', 'mean', 'median', 'indicator' or 'median+indicator', got 'mode'" in error
