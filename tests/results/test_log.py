"""What a simulation writes down."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sartor.engines.parts import Receipt, Tally
from sartor.results.log import Log
from sartor.results.scores import COUNTERS, PHASES

NAMES = [("north", "south", "east"), ("a", "b", "c")]


def tally(loss: list[list[float]]) -> Tally:
    return Tally(np.arange(6.0).reshape(2, 3), np.array(loss))


def receipt(factor: int) -> Receipt:
    """Return costs that differ by counter and by run."""
    costs = {name: factor * k * np.array([1, 10]) for k, name in enumerate(COUNTERS, 1)}
    return Receipt(**costs)


def filled() -> Log:
    """Return a log of two rounds, in which run 1 broke at its second client."""
    log = Log(NAMES)
    start = tally([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    log.score("pre", 0, {"test": start})
    log.start_post({"test": start})
    log.snapshots.append({"round": 0, "mix": np.eye(3)[None].repeat(2, 0)})
    for t in range(2):
        log.spend_round(receipt(t + 1))
        log.time_round({"round": 2.0 + t, "train": 0.0, "server": 0.0, "evaluate": 0.25}, {})
        later = tally([[1.0, 2.0, 3.0], [4.0, np.nan if t else 5.0, 6.0]])
        log.score("post", t, {"test": later})
        log.score("pre", t + 1, {"test": later})
    log.spend_once(receipt(7))
    log.stopped[0] = {"round": 2, "why": "asked to"}
    return log


def test_a_run_diverges_once_and_is_named_by_its_round_and_client():
    """The first broken entry stands: "post" of round 1 was before "pre" after 2 rounds."""
    log = filled()
    assert log.diverged == [None, {"round": 1, "client": "b"}]
    log.score("pre", 3, {"test": tally([[np.inf, 0, 0], [np.nan, 0, 0]])})
    assert log.diverged == [None, {"round": 1, "client": "b"}]  # run 0 had stopped before


def test_a_loss_that_breaks_after_aggregation_counts_to_the_round_before():
    """Models after t rounds come out of round t − 1; those of the start out of none."""
    for t, at in ((0, 0), (4, 3)):
        log = Log(NAMES)
        log.score("pre", t, {"val": tally([[0, 0, np.inf], [0, 0, 0]])})
        assert log.diverged == [{"round": at, "client": "east"}, None]


def test_clients_that_did_not_train_keep_their_last_scores():
    """NaN marks that there is nothing new, run by run and client by client."""
    log = filled()
    new = np.array([[np.nan, 9.0, np.nan], [8.0, np.nan, np.nan]])
    log.update_post("test", Tally(new, -new))
    np.testing.assert_array_equal(log.post["test"].correct, [[0, 9, 2], [8, 4, 5]])
    np.testing.assert_array_equal(log.post["test"].loss, [[1, -9, 3], [-8, 5, 6]])


def test_rounds_between_two_looks_at_the_clock_share_their_time():
    """The walls are evened out over the unread rounds alone; phases of training are added."""
    log = Log(NAMES)
    quiet = dict.fromkeys(PHASES[1:], 0.0)
    log.time_round({"round": 5.0, **quiet, "evaluate": 1.0}, {"train": 3.0})
    log.take_clocks()
    log.time_round({"round": 1.0, **quiet}, {"train": 0.5})
    log.time_round({"round": 2.0, **quiet}, {"train": 1.5, "server": 0.25})
    log.take_clocks()
    log.take_clocks()  # nothing is left to take
    assert log.seconds == {
        "round": [5.0, 1.5, 1.5],
        "train": [3.0, 0.5, 1.5],
        "server": [0.0, 0.0, 0.25],
        "evaluate": [1.0, 0.0, 0.0],
    }
    log.time_once({"round": 1.0, "evaluate": 0.5})
    assert log.seconds["round"][-1] == 2.5
    assert log.seconds["evaluate"] == [1.0, 0.0, 0.5]


def test_the_ledger_has_every_counter_by_run_and_round():
    """Counters go to (runs, rounds); what is spent once adds both directions."""
    ledger = filled().ledger()
    for k, name in enumerate(COUNTERS, 1):
        np.testing.assert_array_equal(getattr(ledger, name), [[k, 2 * k], [10 * k, 20 * k]])
    np.testing.assert_array_equal(ledger.setup_bytes, [7 * (2 + 3), 70 * (2 + 3)])
    np.testing.assert_array_equal(ledger.setup_gradients, [28, 280])
    np.testing.assert_array_equal(ledger.setup_forward, [35, 350])
    assert Log(NAMES).ledger().bytes_up.shape == (2, 0)


def test_a_loss_is_multiplied_back_to_a_sum_over_answers():
    """A sample whose loss is a mean over four answers counts four times its loss."""
    scores = filled().scores(lambda split: (np.full((2, 3), 8), 4))
    assert set(scores) == {("pre", "test"), ("post", "test")}
    assert (scores["pre", "test"].rounds, scores["post", "test"].rounds) == ([0, 1, 2], [0, 1])
    np.testing.assert_array_equal(scores["pre", "test"].loss[0, 0], [4.0, 8.0, 12.0])
    np.testing.assert_array_equal(scores["pre", "test"].correct[1, 0], [3.0, 4.0, 5.0])


@pytest.mark.parametrize("point", ["pre", "post"])
def test_scored_means_after_the_last_round(point):
    """Both points of the second round are there, none of a third."""
    assert filled().scored(point, 2)
    assert not filled().scored(point, 3)
    assert not filled().scored("global", 2)


def test_means_follow_the_last_entry():
    """They are computed anew when there is an entry more, or when entries have changed."""
    log = filled()
    name = next(iter(log.history))

    def answers(split):
        return np.full_like(log.history[name]["loss"][-1], 4, dtype=np.int64), 2

    def plain():
        right, loss = (log.history[name][kind][-1].mean(1) / 4 for kind in ("correct", "loss"))
        return right, 2 * loss

    np.testing.assert_allclose(log.means(name, answers)[:2], plain())
    for kind in ("correct", "loss"):
        log.history[name][kind].append(log.history[name][kind][-1] + 1.0)
    np.testing.assert_allclose(log.means(name, answers)[:2], plain())
    log.history[name]["loss"][-1] += 1.0
    log.costs["bytes_up"][-1][:] = 0
    log.recount()
    np.testing.assert_allclose(log.means(name, answers)[:2], plain())
    ledger = log.ledger()
    np.testing.assert_array_equal(log.bytes, (ledger.bytes_up + ledger.bytes_down).sum(1))


def test_log_survive_a_checkpoint():
    """What was dumped comes back, and can be resumed."""
    log, again = filled(), Log(NAMES)
    arrays, meta = log.dump()
    again.load(arrays, json.loads(json.dumps(meta)))
    for one in (log, again):
        one.take_clocks()
        one.spend_round(receipt(3))
    assert again.diverged == log.diverged
    assert again.stopped == log.stopped
    assert again.when == log.when
    assert [s["round"] for s in again.snapshots] == [0]
    np.testing.assert_array_equal(again.snapshots[0]["mix"], log.snapshots[0]["mix"])
    for name in COUNTERS:
        np.testing.assert_array_equal(getattr(again.ledger(), name), getattr(log.ledger(), name))
    ledger = log.ledger()
    for one in (log, again):
        np.testing.assert_array_equal(one.bytes, (ledger.bytes_up + ledger.bytes_down).sum(1))
    np.testing.assert_array_equal(again.once["setup_bytes"], log.once["setup_bytes"])
    np.testing.assert_array_equal(again.post["test"].loss, log.post["test"].loss)
    for name, series in log.history.items():
        np.testing.assert_array_equal(again.history[name]["loss"], series["loss"])
