"""Auto: chosen by held-out samples alone, trained on all, and no client worse than alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import nn

import sartor
from sartor.core.errors import ConfigError, RunFolderError
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.methods.auto import candidates
from sartor.theory.stacking import FOLDS
from sartor.training import auto

LINEAR = ["local", "fedavg", "fedavg-ft", "evidence", "evidence-one", "evidence-alone"]


@pytest.fixture(autouse=True, scope="module")
def _few() -> Iterator[None]:
    """Try two candidates, at two rates: more would be too slow for most of what is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "candidates", lambda task: ["local", "fedavg"])
        patch.setattr(auto, "RATES", (0.3, 0.1))
        yield


def federation(
    clients: int = 4, samples: int = 24, same: bool = True, kind: str = "classification"
) -> Federation:
    """Return clients that follow one rule, or every two opposite ones."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(clients * samples, 3))
    who = np.repeat(np.arange(clients), samples)
    sign = np.ones(len(x)) if same else np.where(who % 2 == 0, 1.0, -1.0)
    score = sign * 3.0 * x[:, 0] + draw.normal(size=len(x))
    named = [f"c{i}" for i in who]
    if kind == "regression":
        return Federation.from_arrays(x, score, client=named, task=kind, test=0.25)
    if kind == "multilabel":
        y = np.stack([score > 0, score > 1], 1).astype(int)
        return Federation.from_arrays(x, y, client=named, task=kind, test=0.25)
    return Federation.from_arrays(x, (score > 0).astype(int), client=named, test=0.25)


def fit(fed: Any, **given: Any) -> sartor.Result:
    first = fed if isinstance(fed, Federation) else fed(0)
    return sartor.fit("auto", fed, **{"rounds": 4, "model": sartor.models.mclr(first), **given})


def weights_of(result: sartor.Result, seed: int = 0) -> dict[str, np.ndarray]:
    found = result.config["selection"]["seeds"][str(seed)]["candidates"]
    return {name: np.array(one["weights"]) for name, one in found.items()}


@pytest.fixture(scope="module")
def alike() -> sartor.Result:
    return fit(federation())


@pytest.fixture(scope="module")
def opposite() -> sartor.Result:
    return fit(federation(same=False), rounds=8)


def test_everything_is_chosen_and_shown(alike: sartor.Result) -> None:
    tried, used = alike.selection()
    assert tried.column("candidate") == ["local", "fedavg"]
    assert used.column("client") == [f"c{i}" for i in range(4)]
    total = np.sum([*weights_of(alike).values()], 0)
    np.testing.assert_allclose(total, 1.0)
    json.dumps(alike.summary(), allow_nan=False)
    assert alike.summary()["selection"]["rule"] in alike.summary()["selection"]["rules"]


def test_one_model_where_one_is_right(alike: sartor.Result) -> None:
    weights = weights_of(alike)
    assert weights["fedavg"].mean() > weights["local"].mean()
    local = sartor.Local(epochs=1, batch=32, lr=0.05)
    model = sartor.models.mclr(federation())
    one = sartor.fit("fedavg", federation(), model=model, rounds=4, local=local)
    assert alike.accuracy >= one.accuracy


def test_alone_where_that_is_right(opposite: sartor.Result) -> None:
    weights = weights_of(opposite)
    assert weights["fedavg"].mean() < 0.1
    fed = federation(same=False)
    own = sartor.fit("fedavg", fed, model=sartor.models.mclr(fed), rounds=8)
    assert opposite.loss_curve()[1][-1] < own.loss_curve()[1][-1] - 0.05


def test_all_samples_are_used_in_the_end(alike: sartor.Result) -> None:
    """A round of every part counts the gradients of all training samples."""
    fed, found = federation(), alike.config["selection"]
    assert sorted(np.unique(alike.label_counts.sum())) == [len(fed.train.rows)]
    first = alike.ledger.gradient_evaluations[0, 0]
    assert first == len(fed.train.rows) * found["local"]["epochs"] * len(found["parts"])


def test_every_sample_is_held_out_once() -> None:
    fed = federation(clients=3, samples=9)
    folds, order = auto.divided(fed)
    assert len(folds) == FOLDS
    assert sorted(order) == [0, 1, 2]
    held = torch.cat([fold.val.rows for fold in folds])
    assert sorted(held.tolist()) == sorted(fed.train.rows.tolist())
    for fold in folds:
        assert not set(fold.val.rows.tolist()) & set(fold.train.rows.tolist())
        assert not len(fold.test.rows)


def test_own_validation_samples_are_used() -> None:
    fed = federation()
    half = Ragged.from_lists([fed.test.of(i) for i in range(4)])
    folds, _ = auto.divided(replace(fed, val=half, test=Ragged.empty(4)))
    assert len(folds) == 1
    assert sorted(folds[0].val.rows.tolist()) == sorted(half.rows.tolist())


def test_the_order_of_rows_and_clients_does_not_matter() -> None:
    fed = federation(clients=3)
    turn = [2, 0, 1]
    other = replace(
        fed,
        train=Ragged.from_lists([fed.train.of(i).flip(0) for i in turn]),
        test=Ragged.from_lists([fed.test.of(i) for i in turn]),
        val=Ragged.empty(3),
        names=tuple(fed.names[i] for i in turn),
    )
    one, two = (fit(f, rounds=2).config["selection"]["seeds"]["0"] for f in (fed, other))
    assert one["rules"] == two["rules"]
    assert one["clients"] == {name: two["clients"][name] for name in one["clients"]}
    for name, row in one["candidates"].items():
        assert [row["weights"][i] for i in turn] == two["candidates"][name]["weights"]


def test_no_client_is_harmed_on_what_was_held_out(opposite: sartor.Result) -> None:
    found = opposite.config["selection"]["seeds"]["0"]["clients"].values()
    for one in found:
        assert one["stays alone"] or one["chosen"] <= one["alone"] + one["error"]


def test_scores_are_made_as_sure_as_they_are_right() -> None:
    """The sharpness is the one that SciPy finds, with the same prior on its logarithm."""
    draw = np.random.default_rng(1)
    sure = draw.normal(size=(300, 4))
    y = np.array([draw.choice(4, p=special.softmax(row)) for row in sure])
    for factor in (5.0, 0.4):  # too sure, and not sure enough
        scores = factor * sure
        log_p = [scores[i : i + 100] for i in (0, 100, 200)]
        given = [[torch.from_numpy(part)] for part in log_p]
        truth = [torch.from_numpy(y[i : i + 100]) for i in (0, 100, 200)]
        value, sharpness = auto.sharpened("classification", given, truth)

        def loss(u: float, scores: np.ndarray = scores) -> float:
            return float(-special.log_softmax(np.exp(u) * scores, 1)[np.arange(300), y].sum())

        best = optimize.minimize_scalar(lambda u: loss(u) + 0.5 * u * u, (-2.0, 1.0)).x
        assert np.log(sharpness) == pytest.approx(best, abs=0.011)
        assert sharpness == pytest.approx(1.0 / factor, rel=0.3)
        assert value == pytest.approx(loss(np.log(sharpness)) / 300)
    flat = [[torch.tensor([[1.0], [3.0]])]]
    assert auto.sharpened("regression", flat, [torch.tensor([0.0, 1.0])]) == (1.25, 1.0)


def test_a_long_training_is_not_held_against_a_candidate_that_is_right() -> None:
    """Of two candidates the one that is right more often has the lower loss, though it is surer."""
    y = torch.arange(400) % 2
    signs = torch.where(y == 1, 1.0, -1.0).double()
    right, well = signs.clone(), signs.clone()
    right[::10], well[::4] = -right[::10], -well[::4]  # 90 and 75 % are right
    sure, unsure = (torch.stack([-s, s], 1) for s in (10.0 * right, 0.55 * well))
    plain = [torch.nn.functional.cross_entropy(s, y) for s in (sure, unsure)]
    assert plain[0] > plain[1]
    losses = [auto.sharpened("classification", [[s]], [y])[0] for s in (sure, unsure)]
    assert losses[0] < losses[1]


def test_the_sharpness_reaches_the_prediction() -> None:
    fed = federation(clients=2)
    network = sartor.models.mclr(fed)
    task = Task(network, network.head)
    method = sartor.methods.build("auto", task, sartor.Local(), {"parts": ("local",)})
    params = {k: v.detach() for k, v in network.named_parameters()}
    x, one = fed.x[:5], torch.ones(1)
    model = {"models": {"local": params}, "weights": one, "sharpness": 0.5 * one}
    wanted = (0.5 * network(x)).log_softmax(-1)
    assert method.use.predict is not None
    torch.testing.assert_close(method.use.predict(model, x), wanted)
    found = fit(fed, rounds=2)
    used = found.config["selection"]["seeds"]["0"]["candidates"]
    for name, row in used.items():
        assert found.runs[0].hyper.get(f"{name}_sharpness", row["sharpness"]) == row["sharpness"]


def test_a_rate_that_is_too_high_does_not_end_in_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients as long as these ones would be NaN after a round at this rate."""
    monkeypatch.setattr(auto, "RATES", (0.3,))
    fed = federation(kind="regression")
    far = replace(fed, y=100.0 * fed.y)
    network = sartor.models.dnn(far)
    local = replace(auto.local_for([far], 4), clip_norm=0.0, lr=0.3)
    with pytest.raises(sartor.errors.DivergedError):
        sartor.fit("local", far, model=network, local=local, rounds=4)
    assert np.isfinite(fit(far, model=network).loss_curve()[1]).all()


def test_a_client_that_is_harmed_stays_alone() -> None:
    """One client with the opposite rule among many; a shared answer would be wrong for it."""
    fed = federation(clients=5, samples=40)
    y = fed.y.clone()
    y[fed.train.of(4)] = 1 - y[fed.train.of(4)]
    y[fed.test.of(4)] = 1 - y[fed.test.of(4)]
    result = fit(replace(fed, y=y), rounds=6)
    gain = result.gain()
    assert gain.column("client")[4] == "c4"
    assert weights_of(result)["fedavg"][4] < 0.1
    assert gain.column("gain")[4] > -0.15


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_other_tasks(kind: str) -> None:
    fed = federation(kind=kind)
    result = fit(fed)
    assert np.isfinite(result.pooled_measure(0))
    assert result.predict(0, fed.x[:3].numpy()).scores.shape[0] == 3


def test_tiny_clients_and_single_classes() -> None:
    draw = np.random.default_rng(0)
    sizes = [1, 2, 3, 12, 12]
    x = draw.normal(size=(sum(sizes), 3)).astype(np.float32)
    y = torch.from_numpy((x[:, 0] > 0).astype(np.int64))
    y[-12:] = 1  # the last client has one class
    at = np.cumsum([0, *sizes])
    rows = Ragged.from_lists([range(at[i], at[i + 1]) for i in range(5)])
    away = Ragged(rows.rows + len(x), rows.offsets)
    names = tuple(f"c{i}" for i in range(5))
    twice = torch.from_numpy(np.concatenate([x, x + 0.01]))
    fed = Federation(twice, y.repeat(2), rows, Ragged.empty(5), away, names, 2)
    result = fit(fed, rounds=2)
    clients = result.config["selection"]["seeds"]["0"]["clients"]
    assert [clients[name]["samples"] for name in names] == [0, 2, 3, 12, 12]
    assert np.isfinite(result.loss_curve()[1]).all()
    assert result.model("c0")(fed.x[:2]).isfinite().all()


def test_a_network_of_ones_own_and_two_allocations(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    made = functools.cache(lambda seed: federation(samples=20 + seed))
    given = {"model": network, "seeds": [2, 3], "rounds": 2, "out": tmp_path / "run"}
    result = fit(made, **given)
    assert len(result.accuracy) == 2
    assert set(result.config["selection"]["seeds"]) == {"2", "3"}
    assert len(result.groups()) == 1
    again = fit(made, **given, resume=True)
    np.testing.assert_array_equal(again.accuracy, result.accuracy)
    read = sartor.load(tmp_path / "run")
    assert read.selection(1)[0].rows == result.selection(1)[0].rows
    with pytest.raises(RunFolderError, match="already holds a run"):
        fit(made, **given)


def test_a_killed_run_resumes_with_the_choice_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kill:
        def on_round(self, event: Any) -> None:
            if event.number > 1:
                raise KeyboardInterrupt

    fed = federation(clients=2)
    given = {"rounds": 3, "out": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit(fed, **given, callbacks=[Kill()])
    whole = fit(fed, rounds=3)
    monkeypatch.setattr(auto, "choose", None)  # the trials are not run again
    result = fit(fed, **given, resume=True)
    assert result.selection()[0].rows == whole.selection()[0].rows
    assert result.loss_curve()[1][-1] == whole.loss_curve()[1][-1]


def test_what_the_trials_cost_is_counted(alike: sartor.Result) -> None:
    cost = alike.config["selection"]["seeds"]["0"]["cost"]
    assert alike.gradient_evaluations > cost["gradients"] > 0
    assert alike.summary()["bytes_setup"] >= cost["bytes"] > 0


@pytest.mark.parametrize(
    "given",
    [
        {"local": sartor.Local(lr=0.2)},
        {"hyper": {"local_lr": 0.1}},
        {"sweep": {"local_lr": [0.1]}},
        {"do_no_harm": True},
        {"early_stopping": 3},
    ],
    ids=str,
)
def test_what_it_chooses_itself_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"takes no .*Leave that out"):
        fit(federation(), **given)


def test_deep_and_linear_networks_have_candidates_of_their_own() -> None:
    fed = federation()
    linear, deep = sartor.models.mclr(fed), sartor.models.dnn(fed)
    assert candidates(Task(linear, linear.head)) == LINEAR
    assert candidates(Task(deep, deep.head))[-2:] == ["dbe", "fedphp"]


def test_a_network_without_a_head_is_trained_by_what_can_train_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed, linear = federation(clients=2), nn.Linear(3, 2)
    assert candidates(Task(linear, head=None)) == LINEAR
    deep = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    monkeypatch.setattr(auto, "candidates", candidates)
    result = fit(fed, rounds=1, model=deep)
    assert result.selection()[0].column("candidate")[:3] == ["local", "fedavg", "fedavg-ft"]


def test_all_candidates_of_a_deep_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(clients=2)
    model = sartor.models.dnn(fed)
    names = candidates(Task(model, model.head))
    monkeypatch.setattr(auto, "candidates", lambda task: names)
    result = fit(fed, rounds=1, model=model)
    assert result.selection()[0].column("candidate") == names


def test_evidence_is_a_part_that_needs_no_rate() -> None:
    fed = federation(clients=2)
    method = sartor.methods.build(
        "auto",
        Task(sartor.models.mclr(fed), "fc"),
        sartor.Local(lr_decay=0.9),
        {"parts": ("local", "evidence")},
    )
    assert "evidence_lr" not in method.hyper
    assert "local_lr" in method.hyper


def test_it_stands_in_a_comparison() -> None:
    fed = federation(clients=2)
    model = sartor.models.mclr(fed)
    local = sartor.Local(lr=0.2)
    found = sartor.compare("auto", fed, baselines=False, local=local, rounds=2, model=model)
    assert list(found) == ["auto"]


def test_training_alone_does_not_pay_for_the_trials() -> None:
    """The baseline of a gain has no traffic; the trials are counted once, for ``auto``."""
    result = fit(federation())
    alone = result.baseline()
    assert alone.megabytes == 0.0
    assert alone.gradient_evaluations < result.gradient_evaluations


def test_evidence_stays_unless_something_is_surely_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On few samples a lower held-out loss is noise: the exact solution is kept, for all alike."""
    monkeypatch.setattr("sartor.training.auto.candidates", candidates)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    y = (x[:, 0] * (1 + 0.5 * (np.arange(80) % 2)) + rng.normal(size=80) > 0).astype(int)
    fed = sartor.Federation.from_arrays(x, y, client=np.arange(80) % 4)
    result = sartor.fit("auto", fed, model=sartor.models.mclr(fed), rounds=3)
    chosen = result.summary()["selection"]
    assert min(chosen["rules"].values()) < chosen["rules"]["evidence"]
    assert chosen["rule"] == "evidence"
    assert weights_of(result)["evidence"].tolist() == [1.0] * 4
    assert "evidence, than which nothing is surely better" in str(result.selection()[0])
