"""fit and compare: sweeps as lanes, errors that help, and the odd federations."""

from __future__ import annotations

import gc
import inspect
import tempfile
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor import Federation, Local
from sartor.core.errors import ConfigError, DivergedError, FederationError
from sartor.data.synthetic import quadratics
from tests.toys import Q3, Net, Parabola, federation

QUICK: dict[str, Any] = {
    "rounds": 2,
    "local": Local(epochs=1, batch=4, lr=0.1),
    "device": "cpu",
    "dtype": "float64",
    "chunk": 1024,  # fixed, so that nothing depends on measured times
}


def _fit(method: str = "fedavg", fed: Any = None, **settings: Any) -> sartor.Result:
    fed = federation() if fed is None else fed
    return sartor.fit(method, fed, **{"model": Net(), **QUICK, **settings})


def _quadratic(method: str, **settings: Any) -> sartor.Result:
    fed, _ = quadratics(*Q3)
    local = Local(steps=3, batch=None, lr=0.1)
    return sartor.fit(method, fed, **{**QUICK, "model": Parabola(), "local": local, **settings})


# ---- sweeps --------------------------------------------------------------------------------------


def test_a_sweep_is_one_pass_of_rows_with_seeds_fastest(monkeypatch) -> None:
    """λ × seeds train as lanes of one simulation, and each row says what it is."""
    made = []
    names = inspect.unwrap(sartor.fit).__globals__
    plain = names["Simulation"]

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setitem(names, "Simulation", count)
    result = _fit("fedprox", sweep={"prox_strength": [0.1, 1.0, 5.0]}, seeds=(3, 8))
    assert len(made) == 1
    assert [(r.hyper["prox_strength"], r.seed) for r in result.runs] == [
        (0.1, 3),
        (0.1, 8),
        (1.0, 3),
        (1.0, 8),
        (5.0, 3),
        (5.0, 8),
    ]
    assert result.accuracy.shape == (6,)
    single = _fit("fedprox", hyper={"prox_strength": 1.0}, seeds=8)
    swept = result.scores["pre", "test"].loss
    np.testing.assert_allclose(swept[3], single.scores["pre", "test"].loss[0], atol=1e-11)
    assert np.abs(swept[3] - swept[2]).max() > 1e-6
    assert np.abs(swept[3] - swept[1]).max() > 1e-6


def test_two_swept_names_are_all_combinations() -> None:
    """The grid is a product, also with the numbers of local training."""
    result = _fit("fedavg", sweep={"local_lr": [0.1, 0.2], "momentum": [0.0, 0.9]})
    pairs = [(r.hyper["local_lr"], r.hyper["momentum"]) for r in result.runs]
    assert pairs == [(0.1, 0.0), (0.1, 0.9), (0.2, 0.0), (0.2, 0.9)]
    plain = _fit("fedavg", hyper={"local_lr": 0.2})
    np.testing.assert_allclose(
        result.scores["pre", "test"].loss[2], plain.scores["pre", "test"].loss[0], atol=1e-12
    )


def test_a_sweep_over_options_is_the_passes_one_after_the_other() -> None:
    """Static options make separate programs, merged into one result; models are found in theirs."""
    result = _fit("fedavg", sweep={"rule": ["normalized", "chen"], "local_lr": [0.1, 0.3]})
    assert [(r.options["rule"], r.hyper["local_lr"]) for r in result.runs] == [
        ("normalized", 0.1),
        ("normalized", 0.3),
        ("chen", 0.1),
        ("chen", 0.3),
    ]
    single = _fit("fedavg", options={"rule": "chen"}, hyper={"local_lr": 0.3})
    np.testing.assert_allclose(
        result.scores["post", "test"].loss[3], single.scores["post", "test"].loss[0], atol=1e-12
    )
    swept, alone = result.model("c2", run=3), single.model("c2")
    assert torch.allclose(swept.fc.weight, alone.fc.weight)
    assert result.ledger.bytes_up.shape == (4, 2)


def test_seeds_may_have_federations_of_their_own() -> None:
    """A list aligned with the seeds, or a function of the seed, and the run alone agrees."""
    feds = {3: federation(1), 5: federation(2)}
    listed = _fit(fed=[feds[3], feds[5]], seeds=(3, 5))
    made = _fit(fed=feds.__getitem__, seeds=(3, 5))
    alone = _fit(fed=feds[5], seeds=5)
    for result in (listed, made):
        np.testing.assert_allclose(
            result.scores["pre", "test"].loss[1], alone.scores["pre", "test"].loss[0], atol=1e-12
        )
    with pytest.raises(ConfigError, match="1 federations for 2 seeds"):
        _fit(fed=[feds[3]], seeds=(3, 5))


def test_values_per_client_reach_their_client() -> None:
    """One λ per client gives the known optimum; a wrong number of them is named."""
    fed, truth = quadratics(*Q3)
    lam = [0.5, 2.0, 5.0]
    settings: dict[str, Any] = {
        **QUICK,
        "model": Parabola(),
        "rounds": 40,
        "eval_every": 40,
        "options": {"preset": "corollary1", "smoothness": 4.0, "strong_convexity": 1.0},
        "local": Local(batch=None),
    }
    wanted = truth.fedprox(torch.tensor(lam))[1]
    hyper: Any = {"prox_strength": np.array(lam)}
    result = sartor.fit("fedprox", fed, **settings, hyper=hyper)
    assert result.runs[0].hyper["prox_strength"] == lam
    for i in range(3):
        (w,) = result.model(i).parameters()
        assert float(w.detach()) == pytest.approx(float(wanted[i]), abs=1e-4)
    with pytest.raises(ConfigError, match="2 values, but there are 3 clients"):
        sartor.fit("fedprox", fed, **settings, hyper={"prox_strength": [1.0, 2.0]})


def test_the_seed_decides_everything() -> None:
    """The same call twice gives the same numbers, to the bit; engines and stores agree."""
    first = _fit("fedapa", seeds=4, participation="at_least:0.6")
    again = _fit("fedapa", seeds=4, participation="at_least:0.6")
    np.testing.assert_array_equal(
        first.scores["post", "test"].loss, again.scores["post", "test"].loss
    )
    for settings in ({"engine": "sequential"}, {"chunk": None}, {"chunk": 2}, {"store": "mapped"}):
        other = _fit("fedapa", seeds=4, participation="at_least:0.6", **settings)
        np.testing.assert_allclose(
            other.scores["post", "test"].loss, first.scores["post", "test"].loss, atol=1e-11
        )
        assert torch.allclose(other.model(0).body.weight, first.model(0).body.weight)


# ---- results -------------------------------------------------------------------------------------


def test_the_model_of_a_client_is_the_one_that_was_scored() -> None:
    """An ordinary module, which gives the losses of the result."""
    fed = federation()
    for method in ("local", "fedavg", "fedavg-ft", "fedprox", "fedapa"):
        result = _fit(method, fed, participation=3, rounds=3)
        for i in range(5):
            rows = fed.test.of(i)
            with torch.no_grad():
                scores = result.model(i).double()(fed.x[rows])
            loss = torch.nn.functional.cross_entropy(scores, fed.y[rows], reduction="sum")
            wanted = result.scores[result.headline, "test"].loss[0, -1, i]
            assert float(loss) == pytest.approx(wanted, abs=1e-4), method


def test_the_baseline_trains_as_the_method_did() -> None:
    """LocalTrain for the gain has the same rate, given by Local or by hyper, and data."""
    wanted = _fit("local", local=Local(epochs=1, batch=4, lr=0.3))
    for settings in ({"hyper": {"local_lr": 0.3}}, {"local": Local(epochs=1, batch=4, lr=0.3)}):
        found = _fit("fedprox", **settings).baseline()
        assert found.method == "local"
        np.testing.assert_array_equal(
            found.scores["pre", "test"].loss, wanted.scores["pre", "test"].loss
        )


def test_evaluating_rarely_changes_no_number_that_is_left() -> None:
    """Every third round and the last; also if only one point is asked for."""
    often = _fit("fedapa", rounds=5)
    rare = _fit("fedapa", rounds=5, eval_every=3, points=("post",))
    assert rare.scores["post", "test"].rounds == [2, 4]
    assert ("pre", "test") not in rare.scores
    np.testing.assert_array_equal(
        rare.scores["post", "test"].loss, often.scores["post", "test"].loss[:, [2, 4]]
    )


def test_progress_hears_of_every_round_and_of_the_end() -> None:
    """Also when a round fails."""
    heard: list[Any] = []

    class Show:
        def start(self, total_rounds: int, description: str) -> None:
            heard.append((total_rounds, description))

        def update(self, round_index: int, info: dict[str, Any]) -> None:
            heard.append((round_index, set(info)))

        def stop(self) -> None:
            heard.append("stop")

    _fit("fedavg", progress=Show(), rounds=3)
    keys = {"accuracy", "measure", "value", "bytes", "seconds", "runs"}
    assert heard == [(3, "fedavg"), (0, keys), (1, keys), (2, keys), "stop"]
    heard.clear()
    with pytest.raises(DivergedError):
        _quadratic("fedavg", hyper={"local_lr": 1e200}, rounds=30, progress=Show())
    assert heard[-1] == "stop"


def test_compare_puts_the_baselines_beside() -> None:
    """LocalTrain, FedAvg and FedAvg-FT stand beside every method, on the same allocations."""
    both = sartor.compare(
        ["fedprox"], lambda seed: federation(seed), seeds=(0, 1), model=Net(), **QUICK
    )
    assert list(both) == ["local", "fedavg", "fedavg-ft", "fedprox"]
    counts = [result.label_counts for result in both.values()]
    assert counts[0] is not None
    assert all(c is not None and np.array_equal(c, counts[0]) for c in counts)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fedpox"}, "Unknown method 'fedpox'; did you mean 'fedprox'?"),
        ({"options": {"rul": "uniform"}}, "'rul' of method 'fedavg'; did you mean 'rule'?"),
        ({"options": {"rule": "unifrom"}}, "rule must be one of 'normalized', 'uniform', 'chen'"),
        ({"hyper": {"local_rl": 0.1}}, "'local_rl'; did you mean 'local_lr'?"),
        ({"sweep": {"relaxx": [1.0]}}, "'relaxx'; did you mean 'relax'?"),
        ({"hyper": {"rule": "chen"}}, "write options={'rule': 'chen'}"),
        ({"hyper": {"relax": "chen"}}, "relax must be a number"),
        ({"sweep": {"local_lr": 0.1}}, "sweep['local_lr'] must be a list"),
        ({"sweep": {"local_lr": []}}, "sweep['local_lr'] must be a list"),
        ({"engine": "sequentail"}, "did you mean 'sequential'?"),
        ({"dtype": "float46"}, "did you mean 'float64'?"),
        ({"compute": "bfloat61"}, "did you mean 'bfloat16'?"),
        ({"store": "maped"}, "did you mean 'mapped'?"),
        ({"points": ("pree",)}, "did you mean 'pre'?"),
        ({"rounds": 0}, "rounds must be a whole number >= 1, got 0"),
        ({"chunk": -1}, "chunk must be a whole number >= 1"),
        ({"eval_every": 1.5}, "eval_every must be a whole number"),
        ({"seeds": ()}, "seeds must be one or several different whole numbers"),
        ({"seeds": (1, 1)}, "seeds must be one or several different whole numbers"),
        ({"participation": 9}, "9 clients a round, but there are only 5"),
        ({"resume": True}, "resume=True needs out="),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_hint(settings: dict[str, Any], words: str) -> None:
    """The message names the word, and the nearest legal one."""
    with pytest.raises(ConfigError) as caught:
        _fit(**settings)
    assert words in str(caught.value)


def test_an_illegal_value_names_its_run() -> None:
    """A negative λ in a sweep is found before anything trains."""
    with pytest.raises(
        ConfigError, match=r"prox_strength must be >= 0, got -0.1 in run 1 of the sweep"
    ):
        _fit("fedprox", sweep={"prox_strength": [0.1, -0.1]})


def test_a_run_that_diverges_names_client_and_round() -> None:
    """A rate far too large: the first client whose loss is not finite is named, with its round."""
    with pytest.raises(DivergedError) as caught:
        _quadratic("local", hyper={"local_lr": 1e30}, rounds=30)
    error = caught.value
    assert error.client == "client1"  # the first has its optimum at the start, and stays there
    assert error.round == 1
    assert "local_lr=1e+30; try a smaller local_lr" in str(error)
    fed, _ = quadratics([1.0, 1e-3], [1.0, 3.0])
    steep = Local(steps=1, batch=None, lr=30.0)
    with pytest.raises(DivergedError) as caught:
        sartor.fit("local", fed, **{**QUICK, "model": Parabola(), "local": steep, "rounds": 120})
    assert caught.value.client == "client0"
    assert caught.value.round > 50


def test_a_row_that_diverges_is_recorded_and_the_others_continue() -> None:
    """In a sweep, NaN is the outcome of that row; the other rows are as if it were not there."""
    sweep = {"local_lr": [0.1, 1e30, 0.2]}
    result = _quadratic("fedavg", sweep=sweep, rounds=6)
    assert result.diverged[0] is None
    assert result.diverged[2] is None
    assert result.diverged[1] == {"round": 1, "client": "client0"}
    good = _quadratic("fedavg", sweep={"local_lr": [0.1, 0.2]}, rounds=6)
    np.testing.assert_array_equal(
        result.scores["pre", "test"].loss[[0, 2]], good.scores["pre", "test"].loss
    )
    assert np.isfinite(result.scores["pre", "test"].loss[[0, 2]]).all()


# ---- odd federations -----------------------------------------------------------------------------

METHODS = ("local", "fedavg", "fedavg-ft", "fedprox", "fedapa")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((9,), {}),
        ((9,), {"participation": "at_least:0.6"}),
        ((2, 7, 4), {"participation": 1}),
        ((1, 2, 1), {"local": Local(epochs=2, batch=64, lr=0.1, drop_last=True)}),
        ((1, 9, 1), {"local": Local(batch=None, lr=0.1, momentum=0.9, keep_optimiser=True)}),
    ],
)
def test_small_federations_and_cohorts_train(
    method: str, sizes: tuple[int, ...], settings: dict
) -> None:
    """One client, a cohort of one, batches larger than a client, full batches.

    Both engines have the same numbers, which change as models are trained.
    """
    fed = federation(sizes=sizes)
    result, one_by_one = (
        _fit(method, fed, rounds=3, engine=engine, **settings)
        for engine in ("vectorised", "sequential")
    )
    loss = result.scores[result.headline, "test"].loss
    wanted = one_by_one.scores[result.headline, "test"].loss
    np.testing.assert_allclose(loss, wanted, rtol=0, atol=1e-10)
    assert np.abs(loss[:, -1] - loss[:, 0]).max() > 1e-3
    assert result.gradient_evaluations == one_by_one.gradient_evaluations > 0


def test_one_class_only_is_learnt() -> None:
    """With a single class every answer is right, with any number of outputs."""
    fed = federation(classes=1)
    assert _fit("fedavg", fed, model=None).accuracy == 1.0
    one = Federation.from_arrays(fed.x, fed.y, client=np.arange(len(fed.x)) % 3, num_classes=3)
    assert _fit("fedapa", one, rounds=8).accuracy == 1.0


def test_clients_without_test_samples_do_not_disturb() -> None:
    """Nothing to score for some of them: training and the others are as they were."""
    fed = federation(val=0)
    some = type(fed.test).from_lists([fed.test.of(0), [], fed.test.of(2), [], fed.test.of(4)])
    part = Federation(fed.x, fed.y, fed.train, fed.val, some, fed.names, 3)
    whole, result = _fit("fedavg", fed), _fit("fedavg", part)
    kept = [0, 2, 4]
    np.testing.assert_allclose(
        result.scores["pre", "test"].loss[:, :, kept], whole.scores["pre", "test"].loss[:, :, kept]
    )
    assert 0 <= result.accuracy <= 1


def test_a_federation_without_test_samples_is_refused() -> None:
    """There would be nothing to score; said before anything trains."""
    fed = federation(val=0)
    none = Federation(fed.x, fed.y, fed.train, fed.val, type(fed.test).empty(5), fed.names, 3)
    with pytest.raises(FederationError, match="no test samples"):
        _fit("fedavg", none)


@pytest.mark.parametrize("out", [False, True])
def test_mapped_states_leave_nothing_behind(out: bool, tmp_path, monkeypatch) -> None:
    """The files live as long as the result, and go with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = _fit("fedapa", store="mapped", out=tmp_path / "run" if out else None)
    assert list(tmp_path.rglob("*.state"))
    assert result.model(0).fc.weight.shape == (3, 5)
    del result
    gc.collect()
    assert not list(tmp_path.rglob("*.state"))
