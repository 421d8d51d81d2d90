"""Early stopping on validation data: the verdict, the models, sweeps and resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sartor import EarlyStopping, Federation, fit
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.results.headline import ACCURACY, LOSS
from sartor.results.result import Result
from sartor.runs import RunFolder
from sartor.training.stopping import Watch
from tests.toys import Net, federation

FED = federation(val=4)
SETTINGS: dict[str, Any] = {
    "model": Net(),
    "device": "cpu",
    "engine": "vectorised",
    "chunk": 64,
    "dtype": "float64",
    "rounds": 14,
    "local": Local(lr=0.5, batch=3, epochs=1),
}
OTHER = federation(2, val=4)
RATES = [0.02, 0.1, 0.5]
TUNED = {"ft_lr": 0.01}
RULE = EarlyStopping(patience=2)
BEST = EarlyStopping(patience=2, restore=True)


def _state() -> dict[str, torch.Tensor]:
    raise AssertionError("nothing is put aside here")


def test_the_verdict_by_hand() -> None:
    """Patience counts evaluations without an improvement by more than min_delta."""
    watch = Watch(EarlyStopping(patience=2, min_delta=0.1), 1, LOSS)
    none = np.zeros(1, dtype=bool)
    for t, (value, over) in enumerate(
        [(1.0, False), (0.95, False), (0.85, False), (0.8, False), (np.nan, True)], start=1
    ):
        assert watch.look(t, np.array([value]), none, _state) is over
    assert watch.verdicts() == [
        {
            "round": 5,
            "best_round": 3,
            "why": "validation loss has not improved for 2 evaluations",
        }
    ]
    up = Watch(EarlyStopping(patience=1, measure="accuracy"), 1, ACCURACY)
    assert [up.look(t, np.array([v]), none, _state) for t, v in enumerate((0.5, 0.6, 0.6))] == [
        False,
        False,
        True,
    ]


def models(result: Result, run: int = 0) -> np.ndarray:
    """Return all weights of all clients of a run."""
    trees = [result.model(c, run=run).state_dict() for c in result.clients]
    return np.concatenate([leaf.numpy().ravel() for tree in trees for leaf in tree.values()])


def expected(result: Result, patience: int) -> tuple[int, int]:
    """Return the round of the stop and the best round, from a full run's validation losses."""
    rounds, losses = result.loss_curve(split="val")
    shift = result.headline == "post"
    best, at = np.inf, 0
    for t, loss in zip(rounds, losses, strict=True):
        done = t + shift
        if done == 0:
            continue
        if loss < best:
            best, at = loss, done
        elif done - at >= patience:
            return done, at
    raise AssertionError("the full run never stops; choose another rate")


@pytest.mark.parametrize(
    "name",
    [
        "ditto",
        "per-fedavg",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("local", "fedavg", "fedavg-ft")),
    ],
)
def test_it_stops_where_the_full_run_says_with_the_models_of_that_round(name: str) -> None:
    """And with ``restore`` it ends with the models and the scores of the best round."""
    s, best = expected(fit(name, FED, **SETTINGS), 2)
    assert best < s < 14
    stopped = fit(name, FED, early_stopping=2, **SETTINGS)
    assert stopped.stopped[0] is not None
    assert (stopped.stopped[0]["round"], stopped.stopped[0]["best_round"]) == (s, best)
    assert stopped.ledger.num_rounds == s
    shorter = {t: fit(name, FED, **{**SETTINGS, "rounds": t}) for t in (s, best)}
    np.testing.assert_array_equal(models(stopped), models(shorter[s]))
    restored = fit(name, FED, early_stopping=BEST, **SETTINGS)
    np.testing.assert_array_equal(models(restored), models(shorter[best]))
    assert restored.accuracy == shorter[best].accuracy
    assert restored.loss_curve(split="val")[1][-1] == shorter[best].loss_curve(split="val")[1][-1]
    assert restored.bytes_up == shorter[s].bytes_up
    assert np.abs(models(restored) - models(stopped)).max() > 1e-6


@pytest.fixture(scope="module")
def swept() -> dict[str, Result]:
    """Return a sweep over rates whose runs stop at different rounds."""
    rules = {"last": RULE, "best": BEST}
    return {
        key: fit(
            "fedavg-ft",
            OTHER,
            hyper=TUNED,
            sweep={"local_lr": RATES},
            early_stopping=rule,
            **SETTINGS,
        )
        for key, rule in rules.items()
    }


class _Lines:
    """Keeps the last line of progress."""

    def start(self, total_rounds: int, description: str) -> None:
        self.last: dict = {}

    def update(self, round_index: int, info: dict) -> None:
        self.last = info

    def stop(self) -> None: ...


def test_the_last_line_reports_the_bytes_of_the_ledger() -> None:
    """What runs would have sent after they stopped is in neither."""
    lines = _Lines()
    found = fit(
        "fedavg-ft",
        OTHER,
        hyper=TUNED,
        sweep={"local_lr": RATES},
        early_stopping=RULE,
        progress=lines,
        **SETTINGS,
    )
    assert lines.last["bytes"] == int((found.ledger.bytes_up + found.ledger.bytes_down).sum())
    assert len({end and end["round"] for end in found.stopped}) == 3


@pytest.mark.parametrize(("key", "rule"), [("last", RULE), ("best", BEST)])
def test_every_run_of_a_sweep_has_its_own_verdict(
    swept: dict[str, Result], key: str, rule: EarlyStopping
) -> None:
    """A row is the single run: verdict, accuracy, curve, costs and models."""
    ends = []
    for run, rate in enumerate(RATES):
        alone = fit(
            "fedavg-ft", OTHER, hyper={**TUNED, "local_lr": rate}, early_stopping=rule, **SETTINGS
        )
        row = swept[key].select([run])
        assert row.stopped == alone.stopped
        assert row.accuracy == alone.accuracy
        assert (row.bytes_up, row.gradient_evaluations) == (
            alone.bytes_up,
            alone.gradient_evaluations,
        )
        assert row.summary()["rounds"] == alone.summary()["rounds"]
        rounds, losses = alone.loss_curve(split="val")
        np.testing.assert_allclose(
            row.loss_curve(split="val")[1][: len(rounds)], losses, rtol=0, atol=1e-12
        )
        np.testing.assert_allclose(models(swept[key], run), models(alone), rtol=0, atol=1e-12)
        ends.append(alone.stopped[0] and alone.stopped[0]["round"])
    assert len(set(ends)) == 3  # the case is a case: no two end together


def test_it_continues_after_a_break_as_if_there_had_been_none(
    swept: dict[str, Result], tmp_path
) -> None:
    """The states that were put aside are in the checkpoint."""
    first = min(s["round"] for s in swept["best"].stopped if s is not None)

    class Break:
        def on_round(self, seen: Any) -> None:
            if seen.number == first + 2:
                raise KeyboardInterrupt

    common: dict[str, Any] = {
        **SETTINGS,
        "hyper": TUNED,
        "sweep": {"local_lr": RATES},
        "early_stopping": BEST,
        "checkpoint_every": 1,
        "out": tmp_path / "run",
    }
    with pytest.raises(KeyboardInterrupt):
        fit("fedavg-ft", OTHER, callbacks=[Break()], **common)
    found = fit("fedavg-ft", OTHER, resume=True, **common)
    assert found.stopped == swept["best"].stopped
    np.testing.assert_array_equal(found.accuracy, swept["best"].accuracy)
    for run in range(3):
        np.testing.assert_array_equal(models(found, run), models(swept["best"], run))
    read = RunFolder.open(tmp_path / "run").read_result()
    assert read.stopped == found.stopped
    assert read.summaries()[0]["stopped"] == found.stopped[0]
    with pytest.raises(ConfigError, match="early_stopping"):
        fit("fedavg-ft", OTHER, resume=True, **{**common, "early_stopping": None})


def test_a_run_that_never_stops_can_still_end_with_its_best_round() -> None:
    """``restore`` holds at the planned end too; without it nothing changes to the bit."""
    common = {**SETTINGS, "rounds": 5}
    plain = fit("fedavg", FED, **common)
    patient = fit("fedavg", FED, early_stopping=50, **common)
    np.testing.assert_array_equal(models(plain), models(patient))
    assert patient.stopped == [None]
    best = fit("fedavg", FED, early_stopping=EarlyStopping(50, restore=True), **common)
    rounds, losses = plain.loss_curve(split="val")
    at = rounds[1 + int(np.argmin(losses[1:]))]
    assert at < 5
    np.testing.assert_array_equal(
        models(best), models(fit("fedavg", FED, **{**common, "rounds": at}))
    )


def test_a_run_that_diverges_has_no_verdict_and_does_not_keep_the_others_waiting() -> None:
    """The other run stops as alone."""
    common = SETTINGS
    found = fit("fedavg", FED, sweep={"local_lr": [0.5, 1e308]}, early_stopping=2, **common)
    assert found.diverged[1] is not None
    assert found.stopped[1] is None
    alone = fit("fedavg", FED, hyper={"local_lr": 0.5}, early_stopping=2, **common)
    assert found.stopped[0] == alone.stopped[0]
    assert found.ledger.num_rounds == alone.ledger.num_rounds


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"patience": 0}, "patience must be a whole number >= 1, got 0"),
        ({"min_delta": -1.0}, "min_delta must be >= 0, got -1"),
        ({"measure": "auc"}, "measure must be one of accuracy, .*, got 'auc'"),
    ],
)
def test_faults_are_named(values: dict, words: str) -> None:
    """What cannot be right is refused."""
    with pytest.raises(ConfigError, match=words):
        EarlyStopping(**values)


def test_without_validation_data_it_is_refused() -> None:
    """It never uses test data."""
    with pytest.raises(ConfigError, match="needs validation data, but no client has any"):
        fit("fedavg", federation(val=0), early_stopping=3, **SETTINGS)


def test_tokens_of_texts_are_counted_as_answers() -> None:
    """min_delta is a share of tokens, though two of the five tokens of every text become right."""
    texts = np.tile(np.arange(1, 7), (24, 1))  # all alike, so that they can be learned
    client = np.repeat(["a", "b"], 12)
    fed = Federation.from_arrays(texts, None, client=client, task="next-token", val=0.25)
    rule = EarlyStopping(patience=1, min_delta=0.5, measure="accuracy")
    settings: dict[str, Any] = {"rounds": 6, "eval_every": 2, "device": "cpu"}
    found = fit(
        "fedavg", fed, local=Local(lr=0.1, epochs=1, batch=32), early_stopping=rule, **settings
    )
    rounds, curve = found.curve(split="val")
    assert 0.2 < curve[rounds.index(4)] - curve[rounds.index(2)] < 0.5
    assert found.stopped[0] is not None
    assert (found.stopped[0]["round"], found.stopped[0]["best_round"]) == (4, 2)
