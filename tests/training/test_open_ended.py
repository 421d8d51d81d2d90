"""Training without a number of rounds: it stops by itself, and says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sartor
from sartor import EarlyStopping, Local
from sartor.core.errors import ConfigError, DivergedError
from sartor.results.headline import LOSS
from sartor.training import open_ended
from sartor.training.settings import Settings
from tests.toys import Net
from tests.toys import federation as toys


def small(val: float = 0.0, seed: int = 0) -> sartor.Federation:
    """Return four clients that a network learns by heart if it is left alone."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(160, 4)).astype("float32")
    y = (x @ draw.normal(size=(4, 3)) + draw.normal(size=(160, 3))).argmax(1)
    return sartor.Federation.from_arrays(x, y, client=np.arange(160) % 4, val=val)


def test_without_rounds_training_ends_at_its_best_validation_loss() -> None:
    """It stops before the cap, and the models are those of the best evaluation."""
    data = small(val=0.2)
    torch.manual_seed(0)
    found = sartor.fit("local", data, model=Net(), local=Local(lr=0.5))
    verdict = found.stopped[0]
    assert verdict is not None
    assert verdict["round"] == verdict["best_round"] + open_ended.PATIENCE < open_ended.CAP
    plain = sartor.fit(
        "local", data, model=Net(), local=Local(lr=0.5), rounds=verdict["best_round"]
    )
    np.testing.assert_array_equal(
        found.model(0).state_dict()["fc.weight"], plain.model(0).state_dict()["fc.weight"]
    )
    losses = plain.loss_curve(split="val")[1]
    assert losses[-1] <= losses.min() * 1.02


def test_a_number_of_rounds_is_exactly_that() -> None:
    """With a number nothing is held out and nothing stops early, however bad it becomes."""
    data = small()
    found = sartor.fit("local", data, model=Net(), rounds=30, local=Local(lr=0.5))
    assert found.ledger.num_rounds == 30
    assert found.stopped == [None]
    assert found.config["data"]["samples"]["val"] == 0
    assert "open_ended" not in found.config


def test_what_is_held_out_to_judge_by_is_said_and_the_same_for_all_methods() -> None:
    """Without validation data a fifth of every client's training samples decides the end."""
    data = small()
    results = sartor.compare("ditto", data, baselines=False, model=Net(), seeds=(0, 1))
    again = sartor.compare("fedavg", data, baselines=False, model=Net())
    mine, theirs = results["ditto"].config, again["fedavg"].config
    assert mine["fingerprints"]["0"] == theirs["fingerprints"]["0"] == mine["fingerprints"]["1"]
    sizes = mine["data"]["samples"]
    whole = int(data.train.sizes.sum())
    assert sizes["train"] + sizes["val"] == whole
    assert abs(sizes["val"] - 0.2 * whole) <= data.num_clients
    words = str(results.table())
    assert "until the validation loss stops falling, at most 100" in words
    assert "20% of every client's training samples" in words


def test_validation_data_that_are_there_are_used() -> None:
    """Nothing more is held out where some client has validation samples."""
    data = small(val=0.25)
    assert open_ended.with_validation(data) is data
    kept = open_ended.with_validation(small())
    taken = set(kept.val.rows.tolist())
    assert taken
    assert not taken & set(kept.train.rows.tolist())
    assert not taken & set(kept.test.rows.tolist())


def test_a_client_with_one_sample_keeps_it() -> None:
    """The one sample of a client is for training."""
    data = toys(sizes=(1, 8), val=0)
    kept = open_ended.with_validation(data)
    assert kept.train.sizes.tolist()[0] == 1
    assert kept.val.sizes.tolist() == [0, 2]


def test_an_own_rule_is_kept_and_mapped_states_are_not_copied() -> None:
    """A rule that is given decides; states in files are not copied into memory."""
    given = sartor.fit("local", small(), model=Net(), early_stopping=EarlyStopping(patience=2))
    assert given.config["early_stopping"]["patience"] == 2
    assert not open_ended.rule("mapped").restore
    assert open_ended.rule("memory").restore


def test_auto_chooses_its_own_rounds() -> None:
    """Auto takes no early stopping, and none is laid on it."""
    found = sartor.fit("auto", small())
    assert found.config["early_stopping"] is None
    assert found.ledger.num_rounds <= open_ended.FIXED


def test_an_improvement_may_have_to_be_a_share() -> None:
    """A loss that creeps down by less than the share counts as standing still."""
    from sartor.training.stopping import Watch

    watch = Watch(EarlyStopping(patience=2, min_share=0.1), 1, LOSS)
    values = [1.0, 0.95, 0.89, 0.85, 0.84]
    over = [watch.look(t, np.array([v]), np.array([False]), dict) for t, v in enumerate(values)]
    assert over == [False, False, False, False, True]
    assert watch.best_round[0] == 2
    verdict = watch.verdicts()[0]
    assert verdict is not None
    assert "by 10% for 2 evaluations" in verdict["why"]
    with pytest.raises(ConfigError, match="min_share must be >= 0 and < 1"):
        EarlyStopping(min_share=1.0)


def test_a_schedule_that_was_left_open_spans_the_most_rounds() -> None:
    """A cosine without a length takes the cap."""
    import inspect

    given = {k: p.default for k, p in inspect.signature(sartor.fit).parameters.items()}
    given |= {"local": Local(lr_schedule="cosine")}
    assert Settings.read(given).local.lr_schedule == f"cosine:{open_ended.CAP}"


def test_a_regression_in_raw_units_that_diverges_says_to_standardise() -> None:
    """A rate for standardised targets diverges on wide ones, and the error says why."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 8))
    y = 200 * x @ draw.normal(size=8)
    data = sartor.Federation.from_arrays(x, y, client=np.arange(200) % 4, num_classes=0)
    with pytest.raises(DivergedError, match="standardise the targets: their deviation is"):
        sartor.fit("fedavg", data, rounds=3)
    scaled = sartor.Federation.from_arrays(x, y / y.std(), client=np.arange(200) % 4, num_classes=0)
    for name in ("local", "fedavg", "ditto"):
        curve = sartor.fit(name, scaled, rounds=5).loss_curve()[1]
        assert curve[-1] < 0.2 * curve[0]


def test_the_defaults_train_digits() -> None:
    """Eight rounds of the defaults beat eight of one epoch at 0.05 by far."""
    data = sartor.Federation.from_dataset("digits", clients=20, partition="dirichlet:0.5")
    found = sartor.fit("fedavg", data, rounds=8)
    before = sartor.fit("fedavg", data, rounds=8, local=Local(epochs=1, batch=32, lr=0.05))
    assert found.accuracy > 0.85
    assert found.accuracy > before.accuracy + 0.05
