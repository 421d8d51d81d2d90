"""The oracles against scikit-learn and against their own limits; divisions; the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

import sartor
from bench import divided, federations, oracles
from bench.oracles import Samples

SIZES = (9, 25, 40)


def draw(classes: int, seed: int = 0) -> list[Samples]:
    """Draw clients of unequal sizes with a column of ones."""
    rng = np.random.default_rng(seed)
    found = []
    for n in SIZES:
        x = np.column_stack([rng.normal(size=(n, 3)), np.ones(n)])
        f = x @ rng.normal(size=(4, max(classes, 1))) + rng.gumbel(size=(n, max(classes, 1)))
        found.append(Samples(x, f.argmax(1) if classes else f[:, 0]))
    return found


def reference(x: np.ndarray, y: np.ndarray, classes: int) -> np.ndarray:
    """Return scikit-learn's scores of a penalty ½ |w|² on all coordinates."""
    if not classes:
        return Ridge(alpha=1.0, fit_intercept=False, tol=1e-12).fit(x, y).predict(x)[:, None]
    # Of two classes scikit-learn has one row, w_1 − w_0, so half the penalty.
    model = LogisticRegression(
        C=2.0 if classes == 2 else 1.0, fit_intercept=False, tol=1e-10, max_iter=10_000
    ).fit(x, y)
    return model.predict_log_proba(x)


def answers(f: np.ndarray, classes: int) -> np.ndarray:
    """Return log probabilities, or the scores of a regression."""
    return f - np.log(np.exp(f).sum(1, keepdims=True)) if classes else f


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_one_model_is_scikit_learns(classes):
    """The same penalty gives the same predictions."""
    one, ridge = draw(classes)[2], np.array([0.5, 2.0, 1.0, 0.1] * max(classes, 1))
    w = oracles.single(one, classes, ridge)
    scaled = one.x / np.sqrt(ridge[:4])  # a penalty of one on w √ridge
    found = answers(oracles.scores(w, one.x), classes)
    np.testing.assert_allclose(found, reference(scaled, one.y, classes), atol=2e-4)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_the_optimum_of_fedprox_is_one_large_fit_of_scikit_learn(classes):
    """A model is the mean plus its own part: columns for all, and columns for each client."""
    clients, pulls, ridge = draw(classes), np.array([0.3, 1.0, 5.0]), 0.4
    found = oracles.together(clients, classes, pulls, ridge)
    blocks = [
        np.concatenate(
            [one.x / np.sqrt(ridge)]
            + [one.x * (k == own) / np.sqrt(pulls[k]) for k in range(len(clients))],
            axis=1,
        )
        for own, one in enumerate(clients)
    ]
    theirs = reference(np.concatenate(blocks), np.concatenate([one.y for one in clients]), classes)
    ours = [oracles.scores(w, one.x) for w, one in zip(found.models, clients, strict=True)]
    np.testing.assert_allclose(answers(np.concatenate(ours), classes), theirs, atol=2e-4)


@pytest.mark.parametrize("classes", [0, 3])
def test_fedprox_ends_in_one_model_and_in_every_client_alone(classes):
    """λ → ∞ is one ridge regression of all samples; λ → 0 least losses of each."""
    clients, p = draw(classes), 4 * max(classes, 1)
    whole = Samples(*(np.concatenate(part) for part in zip(*clients, strict=True)))
    near = oracles.together(clients, classes, np.full(3, 1e9), 0.5)
    pooled = oracles.single(whole, classes, np.full(p, 0.5))
    for w in near.models:
        np.testing.assert_allclose(w, pooled, atol=1e-4)
    far = oracles.together(clients[1:], classes, np.full(2, 1e-7), 1e-3)
    for w, one in zip(far.models, clients[1:], strict=True):
        alone = oracles.single(one, classes, np.full(p, 1e-7))
        found, best = (float(oracles.losses(v, one, classes).mean()) for v in (w, alone))
        assert found == pytest.approx(best, abs=1e-4)


def test_a_division_uses_every_sample_once_and_sees_no_test_features():
    """70/30 within clients; the training part has mean 0 and deviation 1."""
    data = divided.wine(None)
    one = federations.split(data, 3)
    rows = np.concatenate([*one.train, *one.test])
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(data.y)))
    for client, (train, test) in enumerate(zip(one.train, one.test, strict=True)):
        assert set(data.owner[train]) == set(data.owner[test]) == {client}
        assert len(train) == round(0.7 * (len(train) + len(test)))
    seen = one.x[np.concatenate(one.train)]
    np.testing.assert_allclose(seen.mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(seen.std(0), 1.0)


@pytest.mark.parametrize("name", ["wine", "diabetes-sex-bmi"])
def test_the_library_and_the_oracles_agree_where_they_solve_the_same(name):
    """Evidence with a given prior is FedProx with λ = 1/τ² and a ridge of 1/S."""
    data = divided.FEDERATIONS[name](None)
    splits = [federations.split(data, seed) for seed in (0, 1)]
    ours = federations.library(
        data,
        splits,
        "evidence",
        rounds=8,
        eval_every=8,
        options={"groups": "scalar", "learn": False, "newton_steps": 3},
        hyper={"spread": 0.5, "width": 2.0},
    )
    for run, one in enumerate(splits):
        train, test = one.samples(data, "train"), one.samples(data, "test")
        found = oracles.together(train, data.classes, np.full(data.clients, 2.0), 0.5)
        loss, correct = oracles.totals(found.models, test, data.classes)
        count = sum(len(part.y) for part in test)
        assert ours.loss[run] == pytest.approx(loss / count, rel=1e-5)
        if data.classes:
            assert ours.score[run] == pytest.approx(correct / count)


def test_an_oracle_is_the_best_of_its_grid():
    """It knows the test losses: no value of the grid has a lower mean of them."""
    data = divided.wine(None)
    splits = [federations.split(data, seed) for seed in range(2)]
    best = federations.oracle(data, splits, "one").loss.mean()
    for ridge in (0.01, 0.1, 1.0):
        losses = []
        for one in splits:
            train, test = one.samples(data, "train"), one.samples(data, "test")
            whole = Samples(*(np.concatenate(part) for part in zip(*train, strict=True)))
            w = oracles.single(whole, 3, np.full(14 * 3, ridge))
            losses.append(oracles.totals([w] * 3, test, 3)[0] / sum(len(p.y) for p in test))
        assert best <= np.mean(losses) + 1e-6


@pytest.mark.parametrize(
    ("name", "samples", "clients", "classes"),
    [
        ("cancer", 569, 5, 2),
        ("wine", 178, 3, 3),
        ("diabetes-age", 442, 6, 0),
        ("diabetes-sex-bmi", 442, 6, 0),
        ("penguins", 333, 5, 2),
        ("titanic", 1043, 3, 2),
        ("digits", 1797, 13, 10),
    ],
)
def test_what_ships_with_scikit_learn_is_read_whole(name, samples, clients, classes):
    """Numbers of samples are those that their sources state, less incomplete ones."""
    data = divided.FEDERATIONS[name](None)
    assert (len(data.y), data.clients, data.classes) == (samples, clients, classes)
    assert np.isfinite(data.x).all()
    assert min(np.bincount(data.owner)) > 20


def test_the_command_skips_what_is_absent_and_writes_the_rest(tmp_path, monkeypatch, capsys):
    """The table has a row for everything, and the numbers of every split."""
    few = {key: federations.ROWS[key] for key in ("one", "diag")}
    monkeypatch.setattr(federations, "ROWS", few)
    command = f"federations --data {tmp_path} --splits 2 --rounds 2 --only heart wine"
    command += f" --json {tmp_path / 'numbers.json'} --markdown {tmp_path / 'table.md'}"
    monkeypatch.setattr("sys.argv", command.split())
    assert federations.main() == 0
    assert "heart: skipped" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "numbers.json").read_text())["federations"]
    assert found["name"] == "wine"
    assert all(len(row["losses"]) == 2 for row in found["rows"].values())
    row = found["rows"]["one"]
    apart = np.subtract(found["rows"]["diag"]["losses"], row["losses"])
    assert row["difference"] == pytest.approx(apart.mean())
    assert "| wine |" in (tmp_path / "table.md").read_text()


def test_a_sign_says_on_which_side_of_zero_the_interval_is(tmp_path, monkeypatch, capsys):
    """▲ where evidence is better, ▼ where it is worse, nothing where one cannot say."""
    ours = np.array([0.30, 0.32, 0.31])
    losses = {
        "alone": ours + 0.1,
        "one": ours - [0.1, 0.11, 0.1],
        "scalar": ours[::-1],
        "diag": ours,
    }
    found = {key: federations.Row(loss, loss, "", 0.0) for key, loss in losses.items()}
    numbers = federations.summary("wine", divided.wine(None), found)
    (tmp_path / "numbers.json").write_text(json.dumps({"federations": [numbers]}))
    monkeypatch.setattr("sys.argv", ["federations", "--show", str(tmp_path / "numbers.json")])
    assert federations.main() == 0
    assert "| wine | 3 | 0.4100 ▲ | 0.2067 ▼ | 0.3100 | 0.3100 |" in capsys.readouterr().out


def hospitals(folder):
    """Write a table of two hospitals, in which one measured nothing of ``ca`` and ``thal``."""
    rng = np.random.default_rng(0)
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal"
    lines = [f"hospital,{names},disease"]
    for number in range(40):
        values = [f"{value:.2f}" for value in rng.normal(size=13)]
        values[2], values[6] = str(1 + number % 4), str(number % 3)
        if number % 2:
            values[-2:] = "?", "?"
        lines.append(",".join([f"h{number % 2}", *values, str(number // 2 % 2)]))
    (folder / "heart.csv").write_text("\n".join(lines))


def test_gaps_become_the_mean_of_training_and_a_column_says_where(tmp_path):
    """As ``Federation.from_file(..., missing="indicator")``, which a table of one part shows."""
    hospitals(tmp_path)
    data = divided.heart_all(tmp_path)
    assert data.x.shape == (40, 15)
    np.testing.assert_array_equal(np.isnan(data.x[:, -3]), data.x[:, -1] == 1)
    one = federations.split(data, 0)
    seen = one.x[np.concatenate(one.train)]
    np.testing.assert_allclose(seen.mean(0), 0.0, atol=1e-12)
    assert (one.x[data.x[:, -1] == 1, -3] == 0).all()
    fed = sartor.Federation.from_file(
        tmp_path / "heart.csv", client="hospital", label="disease", missing="indicator"
    )
    assert fed.x.shape == data.x.shape
    assert np.isfinite(federations.whole(data).x.numpy()).all()


def test_flambys_features_and_divisions(tmp_path):
    """Indicators of every level but the first; 66/34, with equal shares of the classes."""
    hospitals(tmp_path)
    data = divided.heart_flamby(tmp_path)
    assert data.x.shape == (40, 8 + 3 + 2)
    one = federations.stratified(data, 1)
    for train, test in zip(one.train, one.test, strict=True):
        assert (len(train), len(test)) == (13, 7)
        assert abs(data.y[test].mean() - 0.5) < 0.1


def numbers(**losses):
    """Return rows as in a file, by their losses."""
    keys = {key.replace("_", "-"): value for key, value in losses.items()}
    return {key: {"losses": list(at), "loss": float(np.mean(at))} for key, at in keys.items()}


def test_a_verdict_is_right_if_it_names_the_winner_or_a_tie():
    """Or an answer within 1 % of the winner's loss; and regret is that of what is recommended."""
    base = np.array([1.0, 1.02, 0.98])
    clear = numbers(alone=base + 0.3, one=base + 0.005, prox_sum=base, prox_mean=base + 0.1)
    so = federations.judged(clear, "personalise", "personalise")
    assert (so.winner, so.ties, so.right, so.regret) == ("personalise", [], True, 0.0)
    assert federations.judged(clear, "one model", "one model").right
    wrong = federations.judged(clear, "alone", "alone")
    assert not wrong.right
    assert wrong.regret == pytest.approx(30.0)
    assert not federations.judged(clear, "cannot tell", "one model").right
    tied = numbers(
        alone=base + 0.3, one=base[[2, 0, 1]] + 0.001, prox_sum=base, prox_mean=base + 0.1
    )
    so = federations.judged(tied, "cannot tell", "one model")
    assert so.ties == ["one model"]
    assert so.right


def test_rows_of_choice_keep_the_others_of_the_same_splits(tmp_path, monkeypatch, capsys):
    """A second run replaces what it makes, and the differences are of both."""
    file = tmp_path / "numbers.json"
    command = f"federations --data {tmp_path} --rounds 2 --only wine --json {file} --splits "

    def run(more):
        monkeypatch.setattr("sys.argv", (command + more).split())
        assert federations.main() == 0
        (found,) = json.loads(file.read_text())["federations"]
        return found["rows"]

    first = run("2 --rows one")
    assert first["one"]["difference"] is None
    both = run("2 --rows diag")
    assert list(both) == ["one", "diag"]
    assert both["one"]["losses"] == first["one"]["losses"]
    assert both["one"]["difference"] == pytest.approx(both["diag"]["loss"] - both["one"]["loss"])
    assert list(run("3 --rows diag")) == ["diag"]


def test_the_adviser_sees_all_samples(tmp_path, monkeypatch, capsys):
    """Its verdict is beside the oracles' in the second table."""
    data = divided.wine(None)
    fed = federations.whole(data)
    assert sorted(fed.train.rows.tolist()) == list(range(len(data.y)))
    said = {"verdict": "one model", "strategy": "one model", "seconds": 0.0}
    monkeypatch.setattr(federations, "advised", lambda data: said)
    command = f"federations --data {tmp_path} --only wine --splits 2 --verdicts --markdown "
    command += f"{tmp_path / 'table.md'} --rows alone one prox-sum prox-mean"
    monkeypatch.setattr("sys.argv", command.split())
    assert federations.main() == 0
    assert "| wine | one model | one model |" in (tmp_path / "table.md").read_text()
