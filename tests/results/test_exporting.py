"""Laws of exported models: onnxruntime gives from raw samples what ``Result.predict`` gives."""

from __future__ import annotations

import copy
import json
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import sartor
from sartor.core.errors import ConfigError, MissingExtraError, ModelError, RunFolderError
from sartor.data import Federation
from sartor.results import onnx_program

onnxruntime = pytest.importorskip("onnxruntime")

HOSPITALS = ("bergen", "oslo", "tromsø")


@pytest.fixture(scope="module")
def table():
    """Rows of three hospitals with gaps, a column of words and one of numbers far from zero."""
    rng = np.random.default_rng(0)
    rows = 120
    age, sex = rng.normal(50, 10, rows), rng.choice(["f", "m", ""], rows, p=[0.5, 0.4, 0.1])
    year = 2000.0 + rng.integers(0, 20, rows)
    ill = age + 8 * (sex == "f") + rng.normal(0, 3, rows) > 55
    age[rng.random(rows) < 0.15] = np.nan
    place = np.array(HOSPITALS)[np.arange(rows) % 3]
    return {
        "site": place,
        "age": age,
        "sex": sex,
        "labels": year,
        "out": np.where(ill, "ill", "well"),
    }


@pytest.fixture(scope="module")
def federation(table):
    return Federation.from_dataframe(table, client="site", label="out", missing="indicator")


def session_of(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def raw_of(table, rows, names=("age", "sex", "labels")):
    """Return raw columns as a user of onnxruntime has them."""
    kinds = {"sex": object}
    return {name: np.asarray(table[name])[rows].astype(kinds.get(name, float)) for name in names}


def test_raw_rows_give_the_probabilities_that_numpy_works_out(federation, table, tmp_path):
    """Gaps, unknown words and large numbers: the program is the formula, written down by hand."""
    result = sartor.fit("fedavg", federation, model=sartor.models.mclr(federation), rounds=3)
    folder = result.export("oslo", tmp_path / "oslo")
    raw = raw_of(table, slice(0, 40))
    raw["sex"][:3] = ["x", "", "m"]
    raw["age"][:2] = [np.nan, 1e4]
    session = session_of(folder / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["age", "sex", "labels"]
    assert [one.type for one in session.get_inputs()] == [
        "tensor(double)",
        "tensor(string)",
        "tensor(double)",
    ]
    words, found = session.run(None, raw)

    train = federation.train.rows.numpy()
    age, year = (np.asarray(table[name])[train] for name in ("age", "labels"))
    parts = [
        np.nan_to_num((raw["age"] - np.nanmean(age)) / np.nanstd(age)),
        np.isnan(raw["age"]),
        raw["sex"] == "f",
        raw["sex"] == "m",
        (raw["labels"] - year.mean()) / year.std(),
    ]
    x = np.stack([np.asarray(part, dtype=np.float64) for part in parts], axis=1)
    weights = load_file(folder / "model.safetensors")
    (matrix,) = (w for w in weights.values() if w.ndim == 2)
    (shift,) = (w for w in weights.values() if w.ndim == 1)
    scores = x @ matrix.T.astype(np.float64) + shift
    chance = np.exp(scores - scores.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    np.testing.assert_allclose(found, chance, atol=1e-5)
    assert words.tolist() == np.array(["ill", "well"])[chance.argmax(1)].tolist()


METHODS = {
    "ditto": {},
    "fedem": {},
    "fedem, choosing": {"do_no_harm": True},
    "pfedbayes": {"predict_draws": 2},
    "evidence": {"posterior": True},
    "pfedhn": {},
}


@pytest.mark.parametrize("name", METHODS)
def test_models_of_every_kind_become_programs(name, federation, table, tmp_path):
    """One network, a mixture, a choice, draws, one with a covariance, a generated one."""
    method = name.split(",")[0]
    model = {"model": sartor.models.mclr(federation)} if method == "evidence" else {}
    trained = sartor.fit(method, federation, rounds=1, options=METHODS[name], **model)
    result = sartor.load(trained.save(tmp_path / "run"))  # its networks were never called
    raw = raw_of(table, slice(None))
    session = session_of(result.export("oslo", tmp_path / "oslo.onnx"))
    for count in (1, 7, 120):
        few = {key: values[:count] for key, values in raw.items()}
        wanted = result.predict("oslo", few)
        labels, scores = session.run(None, few)
        np.testing.assert_allclose(scores, wanted.scores, atol=1e-5)
        assert labels.tolist() == wanted.labels.tolist()


@pytest.mark.slow
def test_a_stack_of_methods_becomes_a_program(federation, table, tmp_path):
    """What `auto` trains, several methods with weights, is one program."""
    result = sartor.fit("auto", federation)
    raw = raw_of(table, slice(None))
    folder = result.export(0, tmp_path / "a")
    _, found = session_of(folder / "model.onnx").run(None, raw)
    np.testing.assert_allclose(found, result.predict(0, raw).scores, atol=1e-5)
    assert "mix these methods: " in (folder / "README.md").read_text()


def test_every_run_has_its_own_preparation(table, tmp_path):
    """Of several seeds, a run's program has the constants and the measures of that run."""
    words = {"client": "site", "label": "out", "missing": "mean"}
    feds = [Federation.from_dataframe(table, seed=seed, **words) for seed in (0, 1)]
    result = sartor.fit("fedavg", feds, rounds=1, seeds=[0, 1])
    raw = raw_of(table, slice(None))
    found = []
    for run in (0, 1):
        folder = result.export(0, tmp_path / str(run), run=run)
        found.append(session_of(folder / "model.onnx").run(None, raw)[1])
        np.testing.assert_allclose(found[run], result.predict(0, raw, run=run).scores, atol=1e-5)
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert f"seed {run}" in text
        assert f"Run {run} of 2, by itself: one division" in text
        assert f"{100 * result.client_accuracy(run=run)[0]:.1f} %" in text
    assert not np.allclose(*found)


def test_a_target_comes_in_its_units(tmp_path):
    """A regression answers in the units of the table, in thousands here; no gap is filled there."""
    rng = np.random.default_rng(1)
    age = rng.normal(50, 10, 90)
    given = {"site": np.arange(90) % 3, "age": age, "cost": 9000 + 40 * age + rng.normal(0, 9, 90)}
    fed = Federation.from_dataframe(given, client="site", label="cost")
    result = sartor.fit("fedavg", fed, rounds=3)
    session = session_of(result.export("1", tmp_path / "cost") / "model.onnx")
    (found,) = session.run(["target"], {"age": age})
    np.testing.assert_allclose(found, result.predict("1", {"age": age}).labels, rtol=1e-6)
    assert 8000 < found.min() < found.max() < 14000
    (gap,) = session.run(None, {"age": np.array([np.nan])})
    assert np.isnan(gap).all()  # predict refuses an empty cell; a program can only say NaN


def test_several_labels_and_arrays_become_programs(tmp_path):
    """Multi-label tables; arrays that were standardised by column; digits through LeNet-5."""
    rng = np.random.default_rng(2)
    age, place = rng.normal(50, 10, 90), np.arange(90) % 3
    given = {"site": place, "age": age, "a": (age > 50).astype(int), "b": (age > 60).astype(int)}
    fed = Federation.from_dataframe(given, client="site", label=["a", "b"])
    result = sartor.fit("fedavg", fed, rounds=3)
    session = session_of(result.export(0, tmp_path / "two.onnx"))
    labels, chance = session.run(["labels", "probabilities"], {"age": age})
    wanted = result.predict(0, {"age": age})
    np.testing.assert_allclose(chance, wanted.scores, atol=1e-5)
    assert (labels == wanted.labels).all()

    x, y = rng.normal(1e4, 5.0, (90, 3)), np.arange(90) % 2
    fed = Federation.from_arrays(x, y, client=place, standardise=True)
    result = sartor.fit("fedavg", fed, rounds=1)
    _, found = session_of(result.export(0, tmp_path / "rows.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(found, result.predict(0, x).scores, atol=1e-5)

    fed = Federation.from_dataset("digits", clients=4)
    result = sartor.fit("fedavg", fed, model=sartor.models.lenet5(fed), rounds=1)
    images = fed["client0"].x.numpy()
    session = session_of(result.export(0, tmp_path / "digits.onnx"))
    labels, found = session.run(None, {"x": images})
    np.testing.assert_allclose(found, result.predict(0, images).scores, atol=1e-5)
    assert labels.tolist() == result.predict(0, images).labels.tolist()


def test_texts_are_given_as_ids(tmp_path):
    """A program takes the ids of words; the recipe has the words."""
    texts = ["good fine", "bad poor", "fine good good", "poor bad bad"] * 6
    given = {"site": np.arange(24) % 2, "text": texts, "out": ["up", "down"] * 12}
    fed = Federation.from_dataframe(given, client="site", label="out", text_column="text", length=4)
    result = sartor.fit("fedavg", fed, rounds=1)
    folder = result.export(0, tmp_path / "texts")
    words = json.loads((folder / "recipe.json").read_text())["preprocessing"]["words"]
    ids = [[words.index(word) + 2 for word in text.split()] for text in texts[:4]]
    tokens = np.array([row + [0] * (4 - len(row)) for row in ids])
    _, found = session_of(folder / "model.onnx").run(None, {"tokens": tokens})
    np.testing.assert_allclose(found, result.predict(0, {"text": texts[:4]}).scores, atol=1e-5)


# ---------------------------------------------------------------------- the folder and its card


@pytest.fixture(scope="module")
def result(federation):
    made = sartor.fit("ditto", federation, rounds=2)
    made.gain()
    return made


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    return result.export("tromsø", tmp_path_factory.mktemp("models") / "tromsø")


def test_a_folder_holds_the_model_twice_its_recipe_and_a_card(result, folder, federation):
    """The parameters are those of the model, and the recipe that of the federation."""
    names = ["README.md", "model.onnx", "model.safetensors", "recipe.json"]
    assert sorted(file.name for file in folder.iterdir()) == names
    wanted = result.model("tromsø").state_dict()
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[k], wanted[k].numpy()) for k in wanted)
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["preprocessing"] == federation.info["preprocessing"]
    assert recipe["inputs"] == {"age": "number", "sex": "category", "labels": "number"}
    assert recipe["outputs"] == ["labels_", "probabilities"]  # a column has the other name
    assert recipe["class_names"] == ["ill", "well"]


def test_the_numbers_of_the_card_are_those_of_the_result(result, folder, federation):
    """Measures, samples, classes and bytes; nothing is said that the result does not know."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    alone, mine = (one.client_accuracy()[2] for one in (result.baseline(), result))
    assert f"| trained alone | {100 * alone:.1f} % |" in text
    assert f"| this model | {100 * mine:.1f} % | {100 * result.accuracy:.1f} % |" in text
    points = round(100 * (mine - alone), 1)
    assert f"| gain | {f'{points:+.1f}' if points else '0.0'} points |" in text
    own = federation["tromsø"]
    ill, well = torch.bincount(own.y[own.train]).tolist()
    assert f"Trained on {ill + well} samples of tromsø (ill: {ill}, well: {well})" in text
    assert f"{len(own.test)} test samples" in text
    up, down = result.bytes_up / 1e6, result.bytes_down / 1e6
    assert f"sent {up:,.2f} MB and received {down:,.2f} MB" in text
    assert text.count("To be filled in") == 2  # the use that is meant, and the licence
    assert "| sex | category | one feature a level: f, m; any other level is none of them |" in text


def test_a_card_without_a_baseline_says_so(federation, tmp_path):
    """What was not measured is not on the card; few test samples are called few."""
    made = sartor.fit("fedavg", federation, rounds=1)
    text = (made.export(0, tmp_path / "a", formats=["safetensors"]) / "README.md").read_text()
    assert "What the client reaches alone was not measured in this run." in text
    assert "trained alone" not in text
    assert "10 test samples are few" in text
    assert "model.onnx" not in text
    assert "Trained by 3 clients together" in text
    made = sartor.fit("local", federation, rounds=1)
    text = (made.export(0, tmp_path / "b", formats=["safetensors"]) / "README.md").read_text()
    assert "Trained by one client alone, without others: bergen." in text


def test_the_code_on_the_card_runs(folder, monkeypatch):
    """Its block of Python gives an answer, in the folder."""
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["labels_"][0] in ("ill", "well")
    assert names["probabilities"].sum() == pytest.approx(1.0, abs=1e-6)


def test_a_card_that_was_written_on_is_kept(result, folder):
    """A folder that is not empty is replaced only where one says so."""
    with pytest.raises(RunFolderError, match="card may have been written on"):
        result.export("tromsø", folder)
    result.export("tromsø", folder, overwrite=True)


def test_a_folder_is_refused_what_it_cannot_hold(result, tmp_path):
    """Unknown formats, and measures of another point than the headline's."""
    with pytest.raises(ConfigError, match="no format 'onx'; did you mean 'onnx'"):
        result.export(0, tmp_path / "a", formats=["onx"])
    with pytest.raises(ConfigError, match="the headline point"):
        result.export(0, tmp_path / "a", point="global")
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------- what is refused


def test_a_recipe_that_says_more_is_refused(federation, tmp_path):
    """A step that the program does not know would be left out in silence."""
    made = sartor.fit("fedavg", federation, rounds=1)
    made.config = copy.deepcopy(made.config)
    recipe = made.config["rebuild"]["preprocessing"]["0"]
    recipe["columns"][0]["logarithm"] = True
    with pytest.raises(ConfigError, match="'logarithm' cannot be written as ONNX; export the"):
        made.export(0, tmp_path / "a.onnx")


def test_a_program_that_differs_from_its_model_is_not_kept(result, tmp_path, monkeypatch):
    """The check on made-up samples is one that can fail."""
    monkeypatch.setitem(onnx_program.TOLERANCE, torch.float32, -1.0)
    with pytest.raises(ModelError, match="differs from the model by"):
        result.export(0, tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


class Fixed(nn.Module):
    """Counts its samples by a number: torch.export cannot follow it for any number of them."""

    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(x)
        return scores if float(x.detach().sum()) < 1e9 else scores + 1.0


def test_a_network_that_cannot_be_followed_says_what_to_do(federation, tmp_path):
    """Its parameters can still be exported, with the card."""
    made = sartor.fit("fedavg", federation, model=Fixed(), rounds=1, engine="sequential", chunk=1)
    with pytest.raises(ModelError, match=r"cannot follow this model .*--format safetensors"):
        made.export(0, tmp_path / "a")
    made.export(0, tmp_path / "b", formats=["safetensors"])


def test_a_missing_package_is_named_before_anything_is_written(result, tmp_path, monkeypatch):
    """The error says what to install, and no folder is left."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"sartor\[export\]"):
        result.export(0, tmp_path / "a")
    assert not (tmp_path / "a").exists()
