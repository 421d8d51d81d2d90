"""Every measure equals scikit-learn's, on random predictions with ties, weights and one class."""

import numpy as np
import pytest
from sklearn import calibration
from sklearn import metrics as theirs

import sartor
from sartor.core.errors import ConfigError
from sartor.results import measures
from sartor.results.headline import CHOICES, chosen_metric

SEEDS = range(12)


def drawn(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, probabilities of few different values, and weights of which some are zero."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(30, 80))
    p = rng.integers(1, 6, (n, classes)).astype(float)
    weight = rng.integers(0, 4, n).astype(float)
    y = rng.integers(0, classes, n)
    y[:classes] = np.arange(classes)  # every class occurs, with a weight
    weight[:classes] = 1.0
    return y, p / p.sum(1, keepdims=True), weight


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_two_classes(seed, weighted):
    """Ranking, probabilities and decisions of two classes."""
    y, p, weight = drawn(seed, 2)
    w = weight if weighted else None
    one = p[:, 1]
    same = {
        measures.auroc: theirs.roc_auc_score(y, one, sample_weight=w),
        measures.average_precision: theirs.average_precision_score(y, one, sample_weight=w),
        measures.brier: theirs.brier_score_loss(y, one, sample_weight=w),
        measures.log_loss: theirs.log_loss(y, p, sample_weight=w),
        measures.accuracy: theirs.accuracy_score(y, p.argmax(1), sample_weight=w),
        measures.balanced_accuracy: theirs.balanced_accuracy_score(y, p.argmax(1), sample_weight=w),
        measures.f1: theirs.f1_score(y, p.argmax(1), sample_weight=w),
    }
    for mine, value in same.items():
        assert mine(y, p, w) == pytest.approx(value, abs=1e-9), mine.__name__
    recall = theirs.recall_score(y, one >= 0.4, sample_weight=w)
    other = theirs.recall_score(1 - y, one < 0.4, sample_weight=w)
    assert measures.rates(y, one, 0.4, w) == pytest.approx((recall, other), abs=1e-9)
    assert np.allclose(
        measures.confusion(y, p, w),
        theirs.confusion_matrix(y, p.argmax(1), sample_weight=w),
        atol=1e-9,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_more_classes(seed, weighted):
    """Means over classes, each against the rest."""
    y, p, weight = drawn(seed, 4)
    w = weight if weighted else None
    one = np.eye(4)[y]
    auroc = theirs.roc_auc_score(y, p, multi_class="ovr", sample_weight=w)
    precision = theirs.average_precision_score(one, p, sample_weight=w)
    assert measures.auroc(y, p, w) == pytest.approx(auroc, abs=1e-9)
    assert measures.average_precision(y, p, w) == pytest.approx(precision, abs=1e-9)
    assert measures.log_loss(y, p, w) == pytest.approx(
        theirs.log_loss(y, p, sample_weight=w), abs=1e-9
    )
    found = p.argmax(1)
    macro = theirs.f1_score(y, found, average="macro", sample_weight=w)
    assert measures.f1(y, p, w) == pytest.approx(macro, abs=1e-9)
    recall = theirs.balanced_accuracy_score(y, found, sample_weight=w)
    assert measures.balanced_accuracy(y, p, w) == pytest.approx(recall, abs=1e-9)
    squares = np.square(p - one).sum(1)
    assert measures.brier(y, p, w) == pytest.approx(np.average(squares, weights=w), abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_and_numbers(seed):
    """Several labels are several problems of two classes; errors of numbers."""
    rng = np.random.default_rng(seed)
    y, p, w = rng.integers(0, 2, (40, 3)), rng.integers(1, 9, (40, 3)) / 9, rng.random(40)
    y[:2] = [[0, 1, 0], [1, 0, 1]]
    same = {
        measures.auroc: theirs.roc_auc_score(y, p, sample_weight=w),
        measures.f1: theirs.f1_score(y, p > 0.5, average="macro", sample_weight=w),
        measures.micro_f1: theirs.f1_score(y, p > 0.5, average="micro", sample_weight=w),
        measures.accuracy: theirs.accuracy_score(y, p > 0.5, sample_weight=w),
        measures.labels_right: np.average(((p > 0.5) == y).mean(1), weights=w),
    }
    for mine, value in same.items():
        assert mine(y, p, w) == pytest.approx(value, abs=1e-9), mine.__name__
    true, found = rng.normal(size=(2, 40))
    assert measures.rmse(true, found, w) == pytest.approx(
        theirs.root_mean_squared_error(true, found, sample_weight=w), abs=1e-9
    )
    assert measures.mae(true, found, w) == pytest.approx(
        theirs.mean_absolute_error(true, found, sample_weight=w), abs=1e-9
    )
    assert measures.r_squared(true, found, w) == pytest.approx(
        theirs.r2_score(true, found, sample_weight=w), abs=1e-9
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_calibration(seed):
    """The curve is scikit-learn's, the error its weighted distance from the diagonal."""
    rng = np.random.default_rng(seed)
    p = np.concatenate([rng.random(50), np.linspace(0, 1, 11)])  # edges of bins too
    y = (rng.random(61) < p).astype(int)
    mean, share, mass = measures.calibration_curve(y, p)
    true, predicted = calibration.calibration_curve(y, p, n_bins=10)
    assert np.allclose(share, true, atol=1e-9)
    assert np.allclose(mean, predicted, atol=1e-9)
    both = np.stack([1 - p, p], 1)
    expected = float((mass / mass.sum() * np.abs(true - predicted)).sum())
    assert measures.calibration_error(y, both) == pytest.approx(expected, abs=1e-9)


def test_what_samples_do_not_define_is_nan():
    """One class has no AUROC; a constant has no R²; no positives have no precision."""
    y, p = np.zeros(5, int), np.full((5, 2), 0.5)
    undefined: measures.Function
    for undefined in (measures.auroc, measures.average_precision, measures.f1):
        assert np.isnan(undefined(y, p * [1.2, 0.8], None))
    assert np.isnan(measures.r_squared(np.ones(3), np.zeros(3)))
    assert measures.best_threshold(y, p[:, 1]) == 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_threshold_maximises_sensitivity_and_specificity(seed):
    """No threshold between two values of p is better."""
    y, p, _ = drawn(seed, 2)
    one = p[:, 1]
    best = sum(measures.rates(y, one, measures.best_threshold(y, one)))
    fpr, tpr, _ = theirs.roc_curve(y, one, drop_intermediate=False)
    assert best == pytest.approx(1 + (tpr - fpr).max(), abs=1e-12)


@pytest.fixture(scope="module")
def rare() -> sartor.Federation:
    """Few positives, as in a screening: accuracy says little there."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 4))
    y = (x[:, 0] + rng.normal(size=900) > 1.9).astype(int)
    return sartor.Federation.from_arrays(x, y, client=rng.integers(0, 5, 900), val=0.2)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_training_records_the_measure_of_every_client(rare, engine):
    """What evaluations record is scikit-learn's AUROC of the models that come out."""
    kept = {"measure": "auroc", "rounds": 2, "engine": engine, "dtype": "float64"}
    result = sartor.fit("ditto", rare, early_stopping=5, **kept)
    found = result.client_measure()
    for client in range(5):
        rows = rare.test.of(client)
        y, p = rare.y[rows].numpy(), result.predict(client, rare.x[rows].numpy()).scores[:, 1]
        assert found[client] == pytest.approx(theirs.roc_auc_score(y, p), abs=1e-12)
    assert result.measure == "AUROC"
    assert result.pooled_measure() == pytest.approx(found.mean())
    assert "AUROC pre" in result.per_client().columns
    assert result.gain().columns[2] == "alone"


def test_early_stopping_and_search_go_by_the_measure(rare):
    """A run stops when the AUROC on validation data stops rising; a search takes the highest."""
    rule = sartor.EarlyStopping(patience=1, min_delta=1.0)
    result = sartor.fit("fedavg", rare, rounds=9, measure="auroc", early_stopping=rule)
    stopped = result.stopped[0]
    assert stopped is not None
    assert stopped["why"] == "validation AUROC has not improved for 1 evaluation"
    with pytest.raises(ConfigError, match="training must record it"):
        sartor.fit("fedavg", rare, early_stopping=sartor.EarlyStopping(measure="auroc"))


class InTurn:
    """A study that proposes the choices in turn, in place of Optuna's."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> "InTurn":
        self.asked += 1
        return self

    def suggest_categorical(self, name, choices):
        return choices[self.asked % len(choices)]

    def tell(self, trial, value=None, state=None) -> None:
        pass


def test_a_search_goes_by_the_measure(rare):
    """Its value is the AUROC on validation data, and the highest wins."""
    found = sartor.search(
        "fedavg",
        rare,
        {"local_lr": [0.001, 0.3]},
        trials=2,
        lanes=1,
        measure="auroc",
        rounds=2,
        study=InTurn(),
    )
    values = [row[-1] for row in found.table.rows]
    assert found.value == max(values)
    curve = found.result.measure_curve(split="val")[1]
    assert found.value == pytest.approx(curve[-1])


def test_a_measure_that_does_not_fit_is_refused(rare):
    """The error names the measures of the task."""
    with pytest.raises(ConfigError, match=r"cannot be measured by 'rmse'; take one of accuracy"):
        sartor.fit("fedavg", rare, measure="rmse")
    for task, words in CHOICES.items():
        assert all(chosen_metric(task, word).name for word in words)


def test_scores_of_all_clients(rare):
    """The table has every measure, its threshold from validation data, and both means."""
    result = sartor.fit("fedavg", rare, rounds=2)
    table = result.score(rare)
    rows = rare.test.of(1)
    y, p = rare.y[rows].numpy(), result.predict(1, rare.x[rows].numpy()).scores[:, 1]
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert row["average precision"] == pytest.approx(theirs.average_precision_score(y, p))
    assert row["largest class"] == pytest.approx((y == 0).mean())
    assert row["sensitivity"] == pytest.approx(theirs.recall_score(y, p >= row["threshold"]))
    held = rare.val.of(1)
    cut = measures.best_threshold(
        rare.y[held].numpy(), result.predict(1, rare.x[held].numpy()).scores[:, 1]
    )
    assert row["threshold"] == cut
    assert [row[0] for row in table.rows[-2:]] == ["all samples", "mean over clients"]
    micro = dict(zip(table.columns, table.rows[-2], strict=True))
    assert micro["accuracy"] == pytest.approx(result.accuracy)


def test_confusion_and_calibration_of_a_client_and_of_all(rare):
    """Counts and curves are scikit-learn's, for one client and over all."""
    result = sartor.fit("fedavg", rare, rounds=2)
    rows = rare.test.of(2)
    y, p = rare.y[rows].numpy(), result.predict(2, rare.x[rows].numpy()).scores
    table = result.confusion(rare, 2)
    assert [row[1:] for row in table.rows] == theirs.confusion_matrix(
        y, p.argmax(1), labels=[0, 1]
    ).tolist()
    whole = result.confusion(rare)
    assert sum(sum(row[1:]) for row in whole.rows) == len(rare.test.rows)
    true, predicted = calibration.calibration_curve(y, p[:, 1], n_bins=10)
    curve = result.calibration(rare, 2)
    assert curve.column("mean probability") == pytest.approx(predicted.tolist())
    assert curve.column("share positive") == pytest.approx(true.tolist())
    assert sum(curve.column("samples")) == len(y)
