"""Laws of ``sartor predict`` and ``sartor export``, and of what the shell completes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sartor
from sartor.cli import completion, main

RUN = ["run", "fedavg", "--data", "all.csv", "--client", "site", "--label", "out"]
RUN += ["--missing", "indicator", "--rounds", "2", "--out", "run", "--drop", "patient"]


def rows_of(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows of three hospitals with ids, gaps as ``?``, and words for classes."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        age, sex = rng.normal(50, 10), str(rng.choice(["f", "m"]))
        ill = age + 8 * (sex == "f") + rng.normal(0, 3) > 55
        cell = "?" if rng.random() < 0.1 else f"{age:.1f}"
        row = {"site": ["bergen", "oslo", "voss"][i % 3], "patient": f"p{i}", "age": cell}
        found.append(row | {"sex": sex, "out": "ill" if ill else "well"})
    return found


def write(path: Path, rows: list[dict[str, str]], *left_out: str) -> None:
    kept = [{k: v for k, v in row.items() if k not in left_out} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(kept[0]))
        writer.writeheader()
        writer.writerows(kept)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data and a run."""
    place = tmp_path_factory.mktemp("using")
    write(place / "all.csv", rows_of(120, 0))
    before = Path.cwd()
    os.chdir(place)
    try:
        assert main(RUN) == 0
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def here(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    capsys.readouterr()
    return trained


def predictions(path: str | Path = "p.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_is_answered_by_the_model_of_its_client(here, capsys):
    """In the order of the file, with the columns that are no features; no label is needed."""
    rows = rows_of(25, 1)
    write(here / "new.csv", rows, "out")
    assert main(["predict", "run", "--data", "new.csv", "--out", "p.csv"]) == 0
    found = predictions()
    assert list(found[0]) == ["site", "patient", "predicted", "p(ill)", "p(well)"]
    assert [row["patient"] for row in found] == [row["patient"] for row in rows]
    result = sartor.load("run")
    for row, answer in zip(rows, found, strict=True):
        wanted = result.predict(row["site"], {"age": [row["age"]], "sex": [row["sex"]]})
        assert answer["predicted"] == wanted.labels[0]
        assert float(answer["p(ill)"]) == pytest.approx(wanted.scores[0, 0], abs=1e-6)
    assert "scores" not in capsys.readouterr().out


def test_labels_in_the_file_are_scored(here, capsys):
    """Accuracies by client and pooled; unknown classes and empty labels are left out, and said."""
    rows = rows_of(30, 2)
    rows[3]["out"], rows[4]["out"] = "dead", ""
    write(here / "new.csv", rows)
    assert main(["predict", "run", "--data", "new.csv", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    right: dict[str, list[bool]] = {}
    for row, found in zip(rows, answer["predictions"], strict=True):
        if row["out"] in ("ill", "well"):
            right.setdefault(row["site"], []).append(found["predicted"] == row["out"])
    for score in answer["scores"][:-1]:
        assert score["accuracy"] == pytest.approx(np.mean(right[score["client"]]))
    pooled = answer["scores"][-1]
    assert pooled["samples"] == 28
    assert pooled["accuracy"] == pytest.approx(np.mean(np.concatenate(list(right.values()))))
    notes = " ".join(answer["notes"])
    assert "dead is no class of the models, which know ill, well" in notes
    assert "2 rows without a known label" in notes


def test_what_the_models_have_not_met_is_said(here, capsys):
    """Unknown levels, other units, gaps, rows of other clients: one note each, with the rows."""
    rows = rows_of(6, 3)
    for row, age, sex in zip(rows, ("41", "?", "600", "44", "45", "46"), "fxmmmy", strict=True):
        row["age"], row["sex"] = age, sex
    write(here / "new.csv", rows, "out")
    assert main(["predict", "run", "--data", "new.csv", "--client", "oslo"]) == 0
    said = capsys.readouterr().err
    assert "Column 'sex': 2 of 6 cells have a level that no client trained on ('x', 'y'; " in said
    assert "Empty cells are filled as in training: age 1 of 6 rows." in said
    assert "Column 'age': 1 of 6 numbers are more than 10 deviations from the mean" in said
    assert "(rows 2: 600)" in said
    assert "4 of 6 rows name another client than 'oslo'." in said


def test_a_rare_mark_is_no_other_unit(tmp_path, monkeypatch, capsys):
    """In a column of 0 and 1 a rare 1 is no number far from the others."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    marks = (np.arange(600) == 7) | (np.arange(600) == 8) | (np.arange(600) == 9)
    table = {"site": np.arange(600) % 3, "rare": marks.astype(int), "dose": rng.normal(size=600)}
    table["out"] = (table["dose"] > 0).astype(int)
    fed = sartor.Federation.from_dataframe(table, client="site", label="out", test=0.1)
    sartor.fit("fedavg", fed, rounds=1, out="run")
    rows = [{"site": "0", "rare": "1", "dose": "0.5"}, {"site": "1", "rare": "7", "dose": "99"}]
    write(tmp_path / "new.csv", rows)
    assert main(["predict", "run", "--data", "new.csv"]) == 0
    said = capsys.readouterr().err
    assert "Column 'rare': 1 of 2 numbers are more than 10 deviations" in said
    assert "(rows 1: 99)" in said


FAULTS = {
    "lacks": ("new.csv --client oslo", "lacks 1 of the 2 columns that the models read: 'sex'"),
    "nobody": ("nobody.csv", "no column 'site' that names the client of a row"),
    "client": ("good.csv --client osla", "no client 'osla'; did you mean 'oslo'?"),
    "stranger": ("stranger.csv", "names clients that have no model: narvik (rows 1)"),
    "text": ("text.csv --client oslo", "Column 'age' held numbers in training, but is text here"),
    "run": ("good.csv --run 30", "run 30 does not exist"),
    "file": ("nothing.csv", "There is no file nothing.csv"),
    "spread": ("good.csv --uncertainty", "does not know how uncertain it is"),
    "folder": ("good.csv --out no/p.csv", "There is no folder no"),
    "method": ("good.csv --method ditto", "holds fedavg, not 'ditto'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_message(fault, here, capsys):
    """Nothing is answered, and the message says what was expected."""
    rows = rows_of(4, 4)
    write(here / "good.csv", rows)
    write(here / "new.csv", rows, "sex")
    write(here / "nobody.csv", rows, "site")
    write(here / "stranger.csv", [rows[0], rows[1] | {"site": "narvik"}])
    write(here / "text.csv", [row | {"age": "old"} for row in rows])
    line, part = FAULTS[fault]
    assert main(["predict", "run", "--data", *line.split()]) == 2
    assert part in " ".join(capsys.readouterr().err.split())


def test_a_client_is_exported_and_answers_like_predict(here, capsys):
    """From a run folder alone: the ONNX program gives the probabilities of ``sartor predict``."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = rows_of(20, 5)
    write(here / "new.csv", rows)
    assert main(["predict", "run", "--data", "new.csv", "--client", "voss", "--out", "p.csv"]) == 0
    assert main(["export", "run", "--client", "voss", "--to", "model.v1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer == {"folders": {"voss": "model.v1"}}
    ages = [np.nan if row["age"] == "?" else float(row["age"]) for row in rows]
    sexes = np.array([row["sex"] for row in rows], dtype=object)
    session = onnxruntime.InferenceSession("model.v1/model.onnx")
    labels, chance = session.run(None, {"age": np.array(ages), "sex": sexes})
    found = predictions()
    np.testing.assert_allclose(chance[:, 0], [float(row["p(ill)"]) for row in found], atol=1e-5)
    assert labels.tolist() == [row["predicted"] for row in found]
    # The gain that the run printed is on the card, though the card is made from the folder.
    assert "| trained alone |" in Path("model.v1/README.md").read_text()


def test_without_a_client_every_model_is_exported(here, capsys):
    """Each into a folder of its own; a second time needs --overwrite."""
    words = ["export", "run", "--to", "all", "--format", "safetensors"]
    assert main(words) == 0
    assert sorted(path.name for path in Path("all").iterdir()) == ["bergen", "oslo", "voss"]
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert main(["export", "run", "--to", "a.onnx"]) == 2
    assert "--to is the folder to write" in capsys.readouterr().err


def test_one_method_of_a_comparison_is_used(here, capsys):
    """Several need --method; what clients reach alone comes from the method ``local`` beside."""
    words = ["compare", "local,fedavg", *RUN[2:], "--no-baselines"]
    words[words.index("run")] = "both"
    assert main(words) == 0
    assert main(["predict", "both", "--data", "all.csv"]) == 2
    assert "choose one with --method" in capsys.readouterr().err
    assert main(["predict", "both", "--data", "all.csv", "--method", "fedavg"]) == 0
    words = ["export", "both", "--client", "oslo", "--to", "o", "--format", "safetensors"]
    assert main([*words, "--method", "fedavg"]) == 0
    assert "| trained alone |" in Path("o/README.md").read_text()


def test_arrays_come_from_npz_files(tmp_path, monkeypatch, capsys):
    """Images have no columns: x, and perhaps y and client, of a .npz file."""
    monkeypatch.chdir(tmp_path)
    fed = sartor.Federation.from_dataset("digits", clients=3)
    made = sartor.fit("fedavg", fed, rounds=1, out="run")
    own = fed["client1"]
    np.savez("new.npz", x=own.x[own.test].numpy(), y=own.y[own.test].numpy())
    assert main(["predict", "run", "--data", "new.npz", "--client", "client1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["scores"][0]["accuracy"] == pytest.approx(made.client_accuracy()[1])
    Path("rows.csv").write_text("a,b\n1,2\n")
    assert main(["predict", "run", "--data", "rows.csv", "--client", "client1"]) == 2
    assert "give a .npz file" in capsys.readouterr().err


def test_a_folder_of_files_is_predicted_for_by_columns(tmp_path, monkeypatch, capsys):
    """Also where features are used as they are, columns are found by name, and the label scored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinics").mkdir()
    rng = np.random.default_rng(0)
    for name in "ab":
        x = rng.normal(size=(40, 2))
        rows = [{"age": f"{a:.3f}", "dose": f"{b:.3f}", "ill": str(int(a > 0))} for a, b in x]
        write(tmp_path / "clinics" / f"{name}.csv", rows)
    words = ["--data", "./clinics", "--label", "ill", "--rounds", "2"]
    turned = [{k: row[k] for k in ("ill", "dose", "age")} for row in rows]
    write(tmp_path / "new.csv", turned)
    for flags in ([], ["--standardise"]):
        assert main(["run", "fedavg", *words, "--out", "run", "--overwrite", *flags]) == 0
        capsys.readouterr()
        assert main(["predict", "run", "--data", "new.csv", "--client", "b", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        right = [
            one["predicted"] == int(row["ill"])
            for one, row in zip(answer["predictions"], rows, strict=True)
        ]
        assert answer["scores"][0]["accuracy"] == pytest.approx(np.mean(right))
        assert np.mean(right) > 0.6


def test_deviations_come_with_the_method_that_has_them(tmp_path, monkeypatch, capsys):
    """`evidence` with its posterior: each probability, or target, has a standard deviation."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    dose = rng.normal(size=60)
    cost = 100 + 9 * dose + rng.normal(size=60)
    given = {"site": np.arange(60) % 3, "dose": dose, "cost": cost}
    rows = [
        dict(zip(given, map(str, row), strict=True)) for row in zip(*given.values(), strict=True)
    ]
    write(tmp_path / "all.csv", rows)
    fed = sartor.Federation.from_file("all.csv", client="site", label="cost")
    linear = sartor.models.mclr(fed)
    sartor.fit("evidence", fed, model=linear, options={"posterior": True}, rounds=2, out="run")
    assert main(["predict", "run", "--data", "all.csv", "--uncertainty", "--out", "p.csv"]) == 0
    found = predictions()
    assert all(0.1 < float(row["deviation"]) < 10 for row in found)
    gap = [float(row["predicted"]) - float(row["cost"]) for row in found]
    assert f"{np.sqrt(np.mean(np.square(gap))):.3f}"[:4] in capsys.readouterr().out


# ---------------------------------------------------------------------- completion


def complete(line: str) -> list[str]:
    """Ask the program what a shell would complete."""
    count = len(line.split()) - (not line.endswith(" "))
    asked = {"_SARTOR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    asked["PYTHONPATH"] = str(Path(sartor.__file__).parents[1])
    code = "from sartor.cli.app import app; app(prog_name='sartor')"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True
    )
    return found.stdout.split()


def test_the_shell_completes_methods_models_data_and_runs(here):
    """The words of arguments and flags, in the program that a shell asks."""
    names = "fedpac fedper fedphp fedproto fedprox fedprox-two-stage"
    assert complete("sartor run fedp") == names.split()
    assert complete("sartor predict r") == ["run"]


@pytest.mark.parametrize(
    ("function", "word", "wanted"),
    [
        (completion.models, "lene", ["lenet5"]),
        (completion.targets, "local,dit", ["local,ditto"]),
        (completion.targets, "local,loca", []),
        (completion.data, "digi", ["digits"]),
        (completion.data, "al", ["all.csv"]),
        (completion.run_folders, "", ["runs/a", "runs/b"]),
        (completion.run_folders, "dee", ["deep/er/c"]),
        (completion.run_folders, "runs/b", ["runs/b"]),
        (completion.tables, "x", ["x.npz"]),
    ],
)
def test_words_are_completed(function, word, wanted, tmp_path, monkeypatch):
    """After commas the last of them; a lone folder on the way to a run is gone through."""
    for place in ("runs/a", "runs/b", "deep/er/c"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "folder.json").write_text("{}")
    for name in ("all.csv", "x.npz", "x.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert function(word) == wanted
