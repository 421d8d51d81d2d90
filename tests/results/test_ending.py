"""Whether a curve still falls at the end of a training, against SciPy's regression."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import sartor
from sartor import Local
from sartor.results import ending
from sartor.results.ending import longer, still_falling
from sartor.results.readings import Readings


class _Run(Readings):
    """The part of a result that is looked at."""

    headline, scores = "pre", {("pre", "test"): None}  # type: ignore[dict-item]
    ledger = type("Ledger", (), {"num_rounds": 20})  # type: ignore[assignment]

    def __init__(self, losses, stopped=None):
        self.losses, self.stopped, self.diverged = np.asarray(losses), [stopped], [None]

    def loss_curve(self, point=None, split="test", run=0):
        return list(range(len(self.losses))), self.losses


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slope", [-0.03, 0.0, 0.02])
def test_the_verdict_is_that_of_a_regression(seed, slope):
    """A fall counts where SciPy's one-sided interval is below zero, and the fall above 1 %."""
    draw = np.random.default_rng(seed)
    losses = 1.0 + slope * np.arange(40) / 4 + 0.01 * draw.normal(size=40)
    last = losses[-10:]
    fit = stats.linregress(np.arange(10), last)
    high = fit.slope + stats.t.ppf(0.95, 8) * fit.stderr
    falls = high < 0 and -9 * fit.slope > ending.LEAST * fit.intercept
    found = still_falling(_Run(losses), 0)
    assert (found is not None) == falls
    if found:
        assert found["share"] == pytest.approx(-9 * fit.slope / fit.intercept, rel=1e-9)


def test_what_stopped_by_itself_or_is_too_short_is_not_asked():
    """A verdict needs more than four evaluations of a run that did not end by itself."""
    falling = np.linspace(2, 1, 20)
    assert still_falling(_Run(falling), 0)
    assert still_falling(_Run(falling, {"round": 20, "best_round": 9}), 0) is None
    assert still_falling(_Run(falling[:4]), 0) is None
    assert still_falling(_Run(np.append(falling, np.nan)), 0) is None
    assert still_falling(_Run(np.ones(20)), 0) is None


def test_terminal_json_and_report_say_it_and_what_to_do(tmp_path):
    """A run that is too short is named as such in all three places; one that is not, nowhere."""
    from sartor.report import write_report

    data = sartor.Federation.from_dataset("digits", clients=5)
    short = {"rounds": 6, "local": Local(epochs=1, batch=32, lr=0.05)}
    found = sartor.compare("fedavg", data, baselines=False, **short)
    words = "train longer with rounds=12 (--rounds 12)"
    assert words in str(found.table())
    assert words in write_report(found, tmp_path / "report.html").read_text()
    said = found.summaries()[0]["still_falling"]
    assert said["loss"] == "test"
    assert said["share"] > 0.05
    assert longer([("a", _Run(np.ones(20)), [0])]) is None
    falls = ("b", _Run(np.linspace(2, 1, 20)), [0])
    named = longer([("a", _Run(np.ones(20)), [0]), falls])
    assert (
        named
        == "b (test loss −17% over the last 4 rounds); train longer with rounds=40 (--rounds 40)"
    )
