"""Clients that join after training."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import has_own_messages
from sartor.methods import METHODS, build
from sartor.training.onboarding import onboard
from tests.toys import assert_same, federation, net_task, run, simulation, states

SGD = Local(epochs=2, batch=4, lr=0.2)


def trained(name: str, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Train a method on the first four clients."""
    task = net_task()
    method = build(name, task, SGD, options or {})
    return run(simulation(method, task, [federation().without(4)], **settings))


@cache
def trained_once(name: str) -> Any:
    """Train a method for all tests that only look at it."""
    return trained(name)


def newcomer() -> Any:
    """Return a federation of the fifth client alone."""
    return federation().without(0, 1, 2, 3)


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_takes_in_a_newcomer_and_leaves_the_others_alone(
    name: str, rounds: int
) -> None:
    """It gets a model with finite scores, uploads nothing, and no state changes."""
    sim = trained_once(name)
    before = states(sim)
    result = onboard(sim, newcomer(), rounds=rounds)
    assert_same(states(sim), before)
    assert result.clients == ("c4",)
    assert np.isfinite(result.accuracy)
    assert result.ledger.bytes_up.sum() == 0
    with torch.no_grad():
        assert torch.isfinite(result.model("c4")(torch.zeros(1, 4, dtype=torch.float64))).all()


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_with_own_messages_has_one_for_strangers(name: str) -> None:
    """``Newcomer.message`` writes the message that ``address`` cannot, with the same leaves."""
    method = build(name, net_task(), SGD, {})
    assert not has_own_messages(method) or method.newcomer.message is not None


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_states_its_rule_for_newcomers(name: str) -> None:
    """The file of a method says in words how a client that joins later gets its model."""
    text = inspect.getmodule(METHODS[name].factory).__doc__
    assert re.search(r"\bA\s+newcomer", text or "")


def test_a_newcomer_of_fedavg_gets_the_global_model() -> None:
    """FedAvg's rule: everybody uses the global model; fine-tuning makes it one's own."""
    sim = trained("fedavg")
    given = onboard(sim, newcomer(), rounds=3).model(0).state_dict()
    tuned = onboard(sim, newcomer(), rounds=1, finetune_epochs=2).model(0).state_dict()
    for leaf, value in sim.params(0, point="global").items():
        assert torch.equal(given[leaf], value)
        assert not torch.equal(tuned[leaf], value)


def test_a_newcomer_of_ditto_begins_at_the_global_model() -> None:
    """V = w_t, then the pull of λ while it trains."""
    sim = trained("ditto")
    start = onboard(sim, newcomer(), rounds=0).model(0).state_dict()
    for leaf, value in sim.params(0, point="global").items():
        assert torch.equal(start[leaf], value)
    later = onboard(sim, newcomer(), rounds=2).model(0).state_dict()
    assert any(not torch.equal(start[leaf], later[leaf]) for leaf in start)


def test_a_newcomer_of_local_trains_alone_from_the_common_start() -> None:
    """Without a server there is only one's own data: LocalTrain of the newcomer itself."""
    sim = trained("local")
    found = onboard(sim, newcomer(), rounds=3).model(0).state_dict()
    task = net_task()
    alone = run(simulation(build("local", task, SGD, {}), task, [newcomer()], rounds=3))
    for leaf, value in alone.params(0).items():
        torch.testing.assert_close(found[leaf], value, rtol=0, atol=1e-12)


def test_a_newcomer_of_the_dichotomy_uses_what_most_use() -> None:
    """The system's choice holds for newcomers too."""
    for radius, model in ((0.0, "global"), (1e9, None)):
        sim = trained("dichotomous", {"version": "threshold"}, hyper={"heterogeneity": radius})
        found = onboard(sim, newcomer(), rounds=0).model(0).state_dict()
        if model:
            for leaf, value in sim.params(0, point="global").items():
                assert torch.equal(found[leaf], value)
    clustered = trained("dichotomous", {"version": "clustered", "fit_epochs": 1})
    with pytest.raises(ConfigError, match="no rule for a client that joins"):
        onboard(clustered, newcomer())


def test_newcomers_are_taken_in_from_arrays_and_from_sweeps() -> None:
    """`result.onboard((x, y))` serves one client; in a sweep the run is chosen."""
    fed = sartor.Federation.from_dataset("digits", partition="dirichlet:0.3", clients=5)
    rest, last = fed.without(4), fed.without(0, 1, 2, 3)
    result = sartor.fit("fedprox", rest, rounds=2, sweep={"prox_strength": [0.0, 5.0]})
    rows = last.train.of(0)
    found = [
        result.onboard((last.x[rows], last.y[rows]), rounds=2, run=run).model("newcomer")
        for run in (0, 1)
    ]
    a, b = (next(iter(model.parameters())) for model in found)
    assert not torch.equal(a, b)


def test_data_that_the_models_cannot_read_are_refused() -> None:
    """Another shape and unknown classes are named, both at once."""
    sim = trained("fedavg")
    wide = sartor.Federation.from_arrays(
        torch.zeros(8, 5), torch.arange(8) % 4, client=["new"] * 8, test=0.25
    )
    with pytest.raises(ConfigError, match="shape") as error:
        onboard(sim, wide)
    assert "4 classes" in str(error.value)


def test_outcomes_of_engines_agree_for_newcomers() -> None:
    """One by one or in lanes: the same newcomers' models."""
    found = [
        outcome_of(trained("fedapa", engine=engine)) for engine in ("sequential", "vectorised")
    ]
    for leaf in found[0]:
        torch.testing.assert_close(found[0][leaf], found[1][leaf], rtol=0, atol=1e-11)


def outcome_of(sim: Any) -> Any:
    """Return the model of a newcomer after two rounds."""
    return onboard(sim, newcomer(), rounds=2).model(0).state_dict()


def test_a_newcomer_sees_what_it_reaches_alone() -> None:
    """The gain compares with LocalTrain on its own samples, for the rounds of the others."""
    fed = federation()
    local = Local(epochs=2, batch=4, lr=0.2)
    result = sartor.fit("ditto", fed.without(4), rounds=6, local=local, hyper={"local_lr": 0.1})
    joined = result.onboard(newcomer(), rounds=2)
    alone = sartor.fit("local", newcomer(), rounds=6, local=local, hyper={"local_lr": 0.1})
    table = joined.gain()
    assert table.column("alone") == alone.client_measure().tolist()
    assert table.column("federated") == joined.client_measure().tolist()
    found = joined.baseline().model(0).state_dict()
    assert_same(dict(found), dict(alone.model(0).state_dict()))
    assert not result.can_compare or result.known_baseline is None  # nobody else was trained


def test_the_error_of_a_newcomer_alone_has_the_units_of_its_target() -> None:
    """In a regression both errors of the gain are in the units of the table."""
    rng = np.random.default_rng(0)
    age = rng.normal(50, 10, 120)
    given = {"site": np.arange(120) % 4, "age": age, "cost": 9000 + 40 * age}
    table = {name: values[given["site"] < 3] for name, values in given.items()}
    fed = sartor.Federation.from_dataframe(table, client="site", label="cost")
    result = sartor.fit("fedavg", fed, rounds=4)
    late = {name: values[given["site"] == 3] for name, values in given.items()}
    new = sartor.Federation.from_dataframe(late, client="site", label="cost", like=fed.info)
    joined = result.onboard(new, rounds=1)
    rows = new.test[0].numpy()
    gain = joined.gain()
    for model, column in ((joined.baseline(), "alone"), (joined, "federated")):
        (error,) = gain.column(column)
        gap = model.predict(0, {"age": late["age"][rows]}).labels - late["cost"][rows]
        assert error == pytest.approx(np.sqrt(np.square(gap).mean()), rel=1e-4)


def test_the_models_of_newcomers_are_used_from_their_folder(tmp_path: Any) -> None:
    """What onboarding returns can be saved, loaded, asked for predictions, and exported."""
    fed = federation()
    result = sartor.fit("fedavg", fed.without(4), model=sartor.models.mclr(fed), rounds=1)
    joined = sartor.load(result.save(tmp_path / "run")).onboard(newcomer(), rounds=2)
    back = sartor.load(joined.save(tmp_path / "late"))
    name = joined.clients[0]
    x = fed.x[:5].numpy()
    assert np.array_equal(back.predict(name, x).scores, joined.predict(name, x).scores)
    folder = back.export(name, tmp_path / "model", formats=["safetensors"])
    text = (folder / "README.md").read_text()
    assert f"this is the model of a client that joined them: {name}." in text
    assert "From this client nothing: it only received" in text


def test_newcomers_are_measured_as_the_others(tmp_path) -> None:
    """What clients were compared by goes for newcomers too, also of a run that was read."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3))
    y = (x[:, 0] + rng.normal(size=500) > 0.8).astype(int)
    client = np.arange(500) % 5
    old, new = client < 4, client == 4
    fed = sartor.Federation.from_arrays(x[old], y[old], client=client[old])
    sartor.fit("fedavg", fed, rounds=2, measure="auroc", out=tmp_path / "run")
    joined = sartor.load(tmp_path / "run").onboard((x[new], y[new]), rounds=1)
    assert joined.measure == "AUROC"
    assert 0.5 < joined.pooled_measure() <= 1.0
    assert joined.gain().column("gain")[0] == pytest.approx(
        joined.pooled_measure() - joined.baseline().pooled_measure()
    )
