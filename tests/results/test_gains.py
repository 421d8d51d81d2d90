"""Gains with intervals and verdicts: by hand, against SciPy, and on rare positives."""

import json

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

import sartor
from sartor.cli import main
from sartor.results.gains import client_gains, overlap, verdict


def rare(seed: int) -> sartor.Federation:
    """Twelve clients of 4 % positives that share a rule, in new divisions of the same samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6000, 8))
    y = (1.2 * x @ np.ones(8) / 8**0.5 + rng.normal(size=6000) > 2.75).astype(int)
    client = rng.integers(0, 12, 6000)
    return sartor.Federation.from_arrays(x, y, client=client, seed=seed)


@pytest.fixture(scope="module")
def repeated() -> sartor.Result:
    """Ten divisions, by AUROC."""
    local = sartor.Local(epochs=2, batch=10, lr=0.1)
    return sartor.fit("fedavg", rare, seeds=range(10), rounds=5, measure="auroc", local=local)


def test_a_gain_that_accuracy_does_not_show(repeated):
    """With 4 % positives accuracy gains next to nothing; the AUROC gains, and its interval says so.

    Found: every gain was "0.0 points of accuracy" while the AUROC rose from .811 to .847.
    """
    table = repeated.gain()
    assert len(table) == 12
    assert repeated.pooled_measure(0) > 0.75
    assert table.notes["mean gain"] > 0.02
    assert "(gains)" in table.notes["interval of the mean gain"]
    accuracies = [r.client_accuracy(run=k) for r in (repeated, repeated.baseline()) for k in (0, 1)]
    assert abs(np.mean(accuracies[:2]) - np.mean(accuracies[2:])) < 0.01


def test_the_interval_is_that_of_nadeau_and_bengio(repeated):
    """Mean ± t √((1/K + n_test/n_train) s²), from values that scikit-learn computes."""
    alone = repeated.baseline()
    gains = []
    for run in range(10):
        fed = rare(run)
        rows = fed.test.of(3)
        y, x = fed.y[rows].numpy(), fed.x[rows].numpy()
        values = [
            roc_auc_score(y, r.predict(3, x, run=run).scores[:, 1]) for r in (repeated, alone)
        ]
        gains.append(values[0] - values[1])
    fed = rare(0)
    share = len(fed.test.rows) / len(fed.train.rows)
    assert overlap(repeated.config) == pytest.approx(share)
    half = stats.t.ppf(0.975, 9) * np.sqrt((1 / 10 + share) * np.var(gains, ddof=1))
    row = dict(zip(repeated.gain().columns, repeated.gain().rows[3], strict=True))
    assert row["gain"] == pytest.approx(np.mean(gains))
    assert (row["low"], row["high"]) == pytest.approx(
        (np.mean(gains) - half, np.mean(gains) + half)
    )
    assert row["verdict"] == verdict(row["low"], row["high"])


def test_all_seeds_are_in_the_table(repeated):
    """Found: ``--seeds 3`` showed the first seed alone without a word."""
    first, every = repeated.gain(run=0), repeated.gain()
    assert first.column("gain") != every.column("gain")
    single = [repeated.gain(run=k).column("gain")[0] for k in range(10)]
    assert every.column("gain")[0] == pytest.approx(np.nanmean(single))
    assert first.notes["low, high"].startswith("not known from one division")
    assert set(first.column("verdict")) == {"cannot tell"}


def test_one_division_of_answers_has_the_interval_of_two_shares():
    """1.96 √(a(1 − a)/n + f(1 − f)/n), and the gain in samples."""
    result = sartor.fit("fedavg", rare(0), rounds=2)
    (one, *_), _ = client_gains(result, result.baseline(), [0], [0])
    a, f, n = one.alone, one.federated, one.samples
    half = 1.96 * np.sqrt((a * (1 - a) + f * (1 - f)) / n)
    assert (one.low, one.high) == pytest.approx((f - a - half, f - a + half))
    assert one.in_samples() == f"{(f - a) * n:+.1f} of {n:.0f}"
    counts = rare(0).label_counts("train")[0].numpy()
    assert one.largest_class == pytest.approx(counts.max() / counts.sum())
    assert "largest class" in result.gain().columns


def test_seeds_of_one_division_are_not_taken_for_new_samples():
    """Three starts on one division say nothing of other samples: the interval stays that of one."""
    result = sartor.fit("fedavg", rare(0), seeds=[0, 1, 2], rounds=1)
    assert result.gain().notes["low, high"].startswith("95 % interval of one division")


def test_coverage_of_no_effect():
    """Where federating does nothing at all, few clients get a verdict other than "cannot tell"."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(40):
        gains = rng.normal(size=(1, 10)) * 0.03 + rng.normal() * 0.03 * (1 / 3) ** 0.5
        mean, spread = gains.mean(), gains.var(ddof=1)
        half = stats.t.ppf(0.975, 9) * np.sqrt((0.1 + 1 / 3) * spread)
        wrong += verdict(mean - half, mean + half) != "cannot tell"
    assert wrong <= 6


def test_the_terminal_the_page_and_json_show_the_same_gains(tmp_path, capsys, monkeypatch):
    """Found: the page said that training alone is missing, and the JSON had null."""
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")
    fed = rare(0)
    lines = ["site,a,b,y"]
    for client in range(3):
        rows = fed.train.of(client)
        lines += [
            f"s{client},{x[0]:.3f},{x[1]:.3f},{int(y)}"
            for x, y in zip(fed.x[rows].tolist(), fed.y[rows].tolist(), strict=True)
        ]
    path = tmp_path / "my.csv"
    path.write_text("\n".join(lines))
    words = ["run", "fedavg", "--data", str(path), "--client", "site", "--label", "y"]
    words += ["--rounds", "1", "--measure", "brier", "--out", str(tmp_path / "run"), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found) == 10
    table = sartor.load(tmp_path / "run").gain()
    assert found[0]["gains"] == json.loads(json.dumps(table.records()))
    assert found[0]["measure"] == "Brier score"
    assert main(["resume", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert str(table).splitlines()[1].split()[-2:] == ["high", "verdict"]
    assert all(line in shown for line in str(table).splitlines()[3:6])
