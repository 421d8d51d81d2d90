"""Callbacks: what they receive, how they stop a run, and what their faults may not do."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import sartor
from sartor import STOP, fit
from sartor.core.errors import CallbackError, ConfigError
from sartor.core.local import Local
from sartor.training.callbacks import scalars
from tests.toys import Net, federation

FED = federation()
SETTINGS: dict[str, Any] = {
    "model": Net(),
    "device": "cpu",
    "engine": "vectorised",
    "chunk": 64,
    "local": Local(lr=0.2, batch=3),
}


class Recorder:
    """Record everything that it receives."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, Any]] = []

    def on_start(self, start: Any) -> None:
        self.reported.append(("start", start))

    def on_round(self, seen: Any) -> None:
        self.reported.append(("round", seen))

    def on_evaluation(self, seen: Any) -> None:
        self.reported.append(("evaluation", seen))

    def on_end(self, result: Any) -> None:
        self.reported.append(("end", result))

    def of(self, kind: str) -> list[Any]:
        return [what for name, what in self.reported if name == kind]


class StopAfter:
    """Asks to stop after some rounds."""

    name = "patience of a saint"

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, seen: Any) -> Any:
        return STOP if seen.number == self.number else None


class Faulty:
    """Fails in one of its methods."""

    def __init__(self, where: str) -> None:
        self.calls = 0

        def fail(what: Any) -> None:
            self.calls += 1
            raise ZeroDivisionError("no such metric")

        setattr(self, where, fail)


def same(found: sartor.Result, wanted: sartor.Result) -> None:
    """Check scores, costs and models of two results to the bit."""
    assert found.scores.keys() == wanted.scores.keys()
    for key, scores in wanted.scores.items():
        assert found.scores[key].rounds == scores.rounds
        np.testing.assert_array_equal(found.scores[key].loss, scores.loss, err_msg=str(key))
        np.testing.assert_array_equal(found.scores[key].correct, scores.correct)
    for name in ("participants", "bytes_up", "gradient_evaluations", "setup_bytes"):
        np.testing.assert_array_equal(getattr(found.ledger, name), getattr(wanted.ledger, name))
    np.testing.assert_array_equal(found.ledger.setup_gradients, wanted.ledger.setup_gradients)
    for run in range(len(wanted.runs)):
        for client in wanted.clients:
            ours, theirs = (r.model(client, run=run).state_dict() for r in (found, wanted))
            for name, leaf in theirs.items():
                np.testing.assert_array_equal(ours[name].numpy(), leaf.numpy(), err_msg=name)


def test_everything_is_reported_in_order_and_is_what_the_result_says() -> None:
    """A sweep of two seeds, scored every second round, with one number per run."""
    seen = Recorder()
    result = fit(
        "fedavg", FED, rounds=3, seeds=(0, 1), eval_every=2, callbacks=[seen, object()], **SETTINGS
    )
    kinds = [name for name, _ in seen.reported]
    assert kinds == ["start", "round", "evaluation", "round", "evaluation", "round", "end"]
    (start,) = seen.of("start")
    assert (start.method, start.rounds, start.done, len(start.runs)) == ("fedavg", 3, 0, 2)
    assert start.clients == FED.names
    assert start.config["rounds"] == 3
    assert seen.of("end") == [result]
    for k, event in enumerate(seen.of("round")):
        assert event.number == k + 1
        np.testing.assert_array_equal(event.cost["bytes_up"], result.ledger.bytes_up[:, k])
    for event, number in zip(seen.of("evaluation"), (2, 3), strict=True):
        assert event.number == number
        for key, scores in result.scores.items():
            at = scores.rounds.index(number - (key[0] == "post"))
            np.testing.assert_array_equal(event.correct[key], scores.correct[:, at])
            for run in range(2):
                assert event.accuracy[key][run] == scores.curve(run)[at]
    rows = scalars(seen.of("evaluation")[-1])
    assert [row["accuracy/pre/test"] for row in rows] == list(result.accuracy)
    assert scalars(seen.of("round")[0])[1]["cost/bytes_up"] == result.ledger.bytes_up[1, 0]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", {}),
        ("fedavg", {"eval_every": 5}),
        ("fedavg-ft", {"eval_every": 5}),
        ("ditto", {"points": ("post",)}),
        ("per-fedavg", {}),
        ("fedbabu", {"eval_every": 2}),
        ("fedavg", {"do_no_harm": True, "eval_every": 3}),
        ("dichotomous", {}),
    ],
)
def test_a_run_that_is_stopped_is_the_shorter_run(name: str, more: dict[str, Any]) -> None:
    """Scores, costs and models after STOP in round 3 are those of a plan of 3 rounds."""
    stopped = fit(name, FED, rounds=7, callbacks=[StopAfter(3)], **SETTINGS, **more)
    same(stopped, fit(name, FED, rounds=3, **SETTINGS, **more))
    assert stopped.stopped == [{"round": 3, "why": "patience of a saint asked to stop in on_round"}]
    assert stopped.summary()["rounds"] == 3
    assert "stopped early" in repr(stopped)


def test_a_fault_is_a_warning_with_the_name_and_changes_nothing(tmp_path) -> None:
    """The faulty callback is dropped after its first fault; the folder is as without it."""
    after, broken = Recorder(), Faulty("on_evaluation")
    with pytest.warns(UserWarning, match="Faulty failed in on_evaluation: ZeroDivisionError: no"):
        found = fit(
            "fedavg", FED, rounds=3, callbacks=[broken, after], out=tmp_path / "a", **SETTINGS
        )
    assert broken.calls == 1
    assert len(after.of("round")) == 3
    fit("fedavg", FED, rounds=3, out=tmp_path / "b", **SETTINGS)
    for file in ("metrics.csv", "config.json"):
        assert (tmp_path / "a" / file).read_text() == (tmp_path / "b" / file).read_text()
    with pytest.warns(UserWarning, match="Faulty failed in on_end"):
        again = fit("fedavg", FED, rounds=3, callbacks=[Faulty("on_end")], **SETTINGS)
    same(again, found)


def test_a_fault_before_the_first_round_ends_the_training(tmp_path) -> None:
    """It names the callback; others learn of the end, and the folder can be used again."""
    seen, out = Recorder(), tmp_path / "run"
    with pytest.raises(CallbackError, match="Faulty failed in on_start, before the first round"):
        fit("fedavg", FED, rounds=2, callbacks=[seen, Faulty("on_start")], out=out, **SETTINGS)
    assert [kind for kind, _ in seen.reported] == ["start", "end"]
    assert seen.of("end") == [None]
    assert fit("fedavg", FED, rounds=2, out=out, resume=True, **SETTINGS).ledger.num_rounds == 2


def test_an_error_of_our_own_passes_as_it_is() -> None:
    """A tracker's missing package is reported in its own words."""

    class Wrong:
        def on_start(self, start: Any) -> None:
            raise ConfigError("no such folder")

    with pytest.raises(ConfigError, match="no such folder"):
        fit("fedavg", FED, rounds=1, callbacks=[Wrong()], **SETTINGS)


def test_a_resumed_run_tells_what_is_left(tmp_path) -> None:
    """A run that broke off after round 2 tells of rounds 3 and 4, and ends as in one go."""

    class Break:
        def on_round(self, seen: Any) -> None:
            if seen.number == 3:
                raise KeyboardInterrupt

    common = {**SETTINGS, "rounds": 4, "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit("ditto", FED, out=tmp_path, callbacks=[Break()], **common)
    seen = Recorder()
    found = fit("ditto", FED, out=tmp_path, resume=True, callbacks=[seen], **common)
    assert seen.of("start")[0].done == 2
    assert [event.number for event in seen.of("round")] == [3, 4]
    same(found, fit("ditto", FED, **common))


def test_every_method_of_a_comparison_and_every_static_option_is_reported() -> None:
    """One start and one end each; parts that stop at different rounds are joined."""
    seen = Recorder()
    sartor.compare(["ditto"], FED, rounds=1, callbacks=[seen], **SETTINGS)
    names = [start.method for start in seen.of("start")]
    assert names == ["local", "fedavg", "fedavg-ft", "ditto"]
    assert [result.method for result in seen.of("end")] == names

    class Impatient:
        runs = 0

        def on_start(self, start: Any) -> None:
            self.runs += 1

        def on_round(self, seen: Any) -> Any:
            return STOP if self.runs == 1 and seen.number == 2 else None

    swept = fit(
        "scaffold",
        FED,
        rounds=4,
        sweep={"weights": ["uniform", "samples"]},
        callbacks=[Impatient()],
        **SETTINGS,
    )
    assert [s and s["round"] for s in swept.stopped] == [2, None]
    assert [s["rounds"] for s in swept.summaries()] == [2, 4]
    short = fit("scaffold", FED, rounds=2, **SETTINGS)
    assert swept.accuracy[0] == short.accuracy
    assert swept.bytes_up[0] == short.bytes_up


def test_nobody_is_reported_of_the_baseline() -> None:
    """LocalTrain for the gain is trained quietly."""
    seen = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("ditto", FED, rounds=1, callbacks=[seen], **SETTINGS).gain()
    assert len(seen.of("start")) == 1
