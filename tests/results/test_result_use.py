"""Laws of using a result: predictions, folders that need no training data, export, newcomers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import sartor
from sartor.core.errors import (
    ConfigError,
    FederationError,
    ModelError,
    RunFolderError,
)
from sartor.data import Federation

NEW = {"age": [30.0, 70.0], "sex": ["f", "m"]}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    rows = 90
    sex, age = rng.choice(["f", "m"], rows), rng.normal(50, 10, rows)
    ill = age + 8 * (sex == "f") + rng.normal(0, 3, rows) > 55
    ctx = [f"s{i % 3}" for i in range(rows)]
    return {"site": ctx, "age": age, "sex": sex, "out": np.where(ill, "ill", "well")}


@pytest.fixture(scope="module")
def federations(table):
    """Two divisions, whose training rows have different means."""
    words = {"client": "site", "label": "out"}
    return [Federation.from_dataframe(table, seed=seed, **words) for seed in (0, 1)]


@pytest.fixture(scope="module")
def federation(federations):
    return federations[0]


@pytest.fixture(scope="module")
def result(federations):
    return sartor.fit("ditto", federations, rounds=2, seeds=[0, 1])


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("saved") / "ditto")


# ---------------------------------------------------------------------- predictions


def test_predictions_go_through_the_stored_standardisation(result, federations, table):
    """Raw rows give what the model gives to the features of that run's own division."""
    federation = federations[1]
    rows = federation.test.of(1)
    raw = {name: np.asarray(table[name])[rows] for name in ("age", "sex")}
    found = result.predict("s1", raw, run=1)
    with torch.no_grad():
        scores = torch.softmax(result.model("s1", run=1)(federation.x[rows]), -1).numpy()
    np.testing.assert_allclose(found.scores, scores, rtol=1e-6)
    assert found.labels.tolist() == [["ill", "well"][k] for k in scores.argmax(1)]


def test_a_table_may_come_in_any_form(result):
    """Columns, rows, frames, other orders and more columns are the same samples."""
    pandas = pytest.importorskip("pandas")
    wanted = result.predict(0, NEW).scores
    forms = [
        [{"sex": "f", "age": 30, "more": 1}, {"sex": "m", "age": 70, "more": 1}],
        pandas.DataFrame({"sex": ["f", "m"], "age": [30, 70]}),
        np.array([[30.0, "f"], [70.0, "m"]], dtype=object),
    ]
    for form in forms:
        assert np.array_equal(result.predict(0, form).scores, wanted)


def test_wrong_samples_are_reported(result):
    """Missing columns, empty cells and shapes have their own words."""
    with pytest.raises(FederationError, match="missing: 'age'; did you mean 'agee'"):
        result.predict(0, {"agee": [1.0], "sex": ["f"]})
    with pytest.raises(FederationError, match="'age' has 1 empty cells"):
        result.predict(0, {"age": [None], "sex": ["f"]})
    with pytest.raises(FederationError, match=r"array of shape \(2, 3\)"):
        result.predict(0, np.zeros((2, 3)))
    with pytest.raises(ConfigError, match="no client 's9'"):
        result.predict("s9", NEW)


def test_arrays_are_used_as_they_are():
    """Without standardisation x is what the network gets; a lone sample is reported."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)).astype(np.float32), np.arange(30) % 2
    fed = Federation.from_arrays(x, y, client=np.arange(30) % 2)
    result = sartor.fit("local", fed, rounds=1)
    labels = result.predict(0, x[:4]).labels
    assert labels.tolist() == result.model(0)(torch.from_numpy(x[:4])).argmax(1).tolist()
    with pytest.raises(ConfigError, match="put it in a list"):
        result.predict(0, x[0])


# ---------------------------------------------------------------------- folders


def test_a_later_process_predicts_without_the_data(result, folder):
    """The saved folder alone, in a fresh process, gives the same scores to the last bit."""
    code = (
        "import sys, json, sartor; r = sartor.load(sys.argv[1]); "
        "p = r.predict('s2', json.loads(sys.argv[2]), run=1); "
        "print(json.dumps([p.labels.tolist(), p.scores.tolist(), r.accuracy.tolist()]))"
    )
    words = [sys.executable, "-c", code, str(folder), json.dumps(NEW)]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    wanted = result.predict("s2", NEW, run=1)
    assert found == [wanted.labels.tolist(), wanted.scores.tolist(), result.accuracy.tolist()]


def test_nothing_in_the_folder_is_pickled_or_the_data(folder, federation):
    """Only safetensors, JSON and CSV are written, and no sample's features are among them."""
    endings = {file.suffix for file in folder.rglob("*") if file.is_file()}
    assert endings == {".safetensors", ".json", ".csv"}
    sample = federation.x[0].numpy().tobytes()
    assert not any(sample in file.read_bytes() for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("method", ["fedem", "pfedhn", "fedapa", "fedavg"])
def test_models_of_every_kind_survive(method, federation, tmp_path):
    """Mixtures, generated models and plain ones come back, and newcomers still get theirs."""
    made = sartor.fit(method, federation, rounds=1)
    back = sartor.load(made.save(tmp_path / method))
    assert np.array_equal(made.predict(1, NEW).scores, back.predict(1, NEW).scores)


def test_a_run_folder_is_a_saved_result(federation, tmp_path):
    """What fit(..., out=...) leaves can be loaded, and saved again elsewhere."""
    made = sartor.fit("fedavg", federation, rounds=1, out=tmp_path / "run")
    back = sartor.load(tmp_path / "run")
    again = sartor.load(back.save(tmp_path / "copy"))
    for one in (back, again):
        assert np.array_equal(one.predict(0, NEW).scores, made.predict(0, NEW).scores)
    with pytest.raises(RunFolderError, match="headline point"):
        back.model(0, point="post")


def test_a_network_of_ones_own_is_given_to_load(federation, tmp_path):
    """A class that is not in the library must be given, and must fit."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    made = sartor.fit("fedavg", federation, model=network, rounds=1)
    made.save(tmp_path / "own")
    with pytest.raises(ModelError, match=r"sartor\.load"):
        sartor.load(tmp_path / "own").predict(0, NEW)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    back = sartor.load(tmp_path / "own", model=fresh)
    assert np.array_equal(back.predict(0, NEW).scores, made.predict(0, NEW).scores)
    with pytest.raises(ModelError, match="do not fit"):
        sartor.load(tmp_path / "own", model=nn.Linear(3, 2)).predict(0, NEW)


# ---------------------------------------------------------------------- newcomers


def test_newcomers_join_a_loaded_result(result, folder, table):
    """They get the same models from the folder as from the training that wrote it."""
    raw = {name: np.asarray(table[name])[:30] for name in ("age", "sex")}
    pair = raw, table["out"][:30]
    found = [one.onboard(pair, rounds=2, run=1) for one in (result, sartor.load(folder))]
    scores = [one.predict("newcomer", NEW).scores for one in found]
    assert np.array_equal(*scores)
    assert found[0].accuracy == found[1].accuracy
    with pytest.raises(ConfigError, match="classes dead, but the models know ill, well"):
        result.onboard((raw, ["dead"] * 30))


def test_a_loaded_server_continues_counting_rounds(federation, table, tmp_path):
    """A rate that falls from round to round has fallen for newcomers of a folder, too."""
    local = sartor.Local(lr=1.0, lr_decay=0.5)
    made = sartor.fit("local", federation, rounds=3, local=local)
    raw = {name: np.asarray(table[name])[:30] for name in ("age", "sex")}
    found = [
        one.onboard((raw, table["out"][:30]), rounds=2).predict(0, NEW).scores
        for one in (made, sartor.load(made.save(tmp_path / "local")))
    ]
    assert np.array_equal(*found)


def test_newcomers_must_be_prepared_alike(result, table):
    """A federation with constants of its own is refused, with the way out."""
    other = {name: list(values)[:30] for name, values in table.items()}
    with pytest.raises(ConfigError, match="other constants"):
        result.onboard(Federation.from_dataframe(other, client="site", label="out"))


# ---------------------------------------------------------------------- export


def test_a_model_is_exported_as_plain_parameters(result, tmp_path):
    """A .pt and a .safetensors file hold the state_dict; the card says how to prepare samples."""
    from safetensors.torch import load_file

    wanted = result.model("s1").state_dict()
    file = result.export("s1", tmp_path / "s1.pt")
    states = (
        torch.load(file, weights_only=True),
        load_file(result.export("s1", tmp_path / "s1.safetensors")),
    )
    for state in states:
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[k], wanted[k]) for k in wanted)
    card = json.loads((tmp_path / "s1.pt.json").read_text())
    assert card["class_names"] == ["ill", "well"]
    assert card["preprocessing"]["columns"][0]["name"] == "age"
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        result.export("s1", tmp_path / "s1.bin")


def test_a_model_is_exported_as_a_program(result, federation, tmp_path):
    """A .pt2 file runs for any number of samples and gives the model's scores."""
    program = torch.export.load(result.export("s1", tmp_path / "s1.pt2")).module()
    for count in (1, 7):
        x = federation.x[:count]
        assert torch.equal(program(x), result.model("s1")(x))


# ---------------------------------------------------------------------- targets and tables later


def test_a_target_keeps_its_units(tmp_path):
    """A target in the thousands trains, and errors, predictions and newcomers are in its units."""
    rng = np.random.default_rng(0)
    age, ctx = rng.normal(50, 10, 150), np.array(["a", "b", "c"])[np.arange(150) % 3]
    given = {"site": ctx, "age": age, "cost": 9000 + 40 * age + rng.normal(0, 50, 150)}
    fed = Federation.from_dataframe(given, client="site", label="cost")
    target = fed.info["preprocessing"]["target"]
    train = fed.train.rows.numpy()
    assert target["mean"] == pytest.approx(given["cost"][train].mean())
    assert target["scale"] == pytest.approx(given["cost"][train].std())
    made = sartor.fit("fedavg", fed, rounds=5)
    rows = fed.test.of(1).numpy()
    found = made.predict("b", {"age": age[rows]}).labels
    error = np.sqrt(np.square(found - given["cost"][rows]).mean())
    assert made.client_measure()[1] == pytest.approx(error, rel=1e-4)
    assert made.score(fed).rows[1][2] == pytest.approx(error, rel=1e-4)
    assert error < 300
    joined = sartor.load(made.save(tmp_path / "costs")).onboard(
        ({"age": age[:30]}, given["cost"][:30]), rounds=1
    )
    assert joined.client_measure()[0] < 400


def test_a_table_of_newcomers_is_prepared_like_those_who_trained(result, federation, table):
    """``like`` takes over columns, constants and classes, also where one is missing."""
    well = np.flatnonzero(np.asarray(table["out"]) == "well")[:20]
    some = {name: np.asarray(values)[well] for name, values in table.items()}
    words = {"client": "site", "label": "out", "like": federation.info}
    other = Federation.from_dataframe({**some, "more": np.ones(20)}, **words)
    assert torch.equal(other.x, federation.x[well])
    assert other.y.unique().tolist() == [1]
    assert result.onboard(other, rounds=1).clients == other.names
    some["out"] = np.array(["dead"] * 20)
    with pytest.raises(FederationError, match="Classes dead are not known"):
        Federation.from_dataframe(some, **words)
