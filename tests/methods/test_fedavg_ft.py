"""FedAvg with fine-tuning: on a copy, before use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.task import Task
from sartor.data.synthetic import Logistic, logistic_radius
from sartor.methods import build
from tests.toys import centre, federation, net_task, outcome, q3, run, simulation, states, used

GD = Local(steps=1, batch=None, lr=0.1)
SGD = Local(epochs=2, batch=3, lr=0.2, momentum=0.5)


def _net(name: str, options: dict | None = None, hyper: dict | None = None):
    task = net_task()
    method = build(name, task, SGD, options or {})
    return run(simulation(method, task, [federation()], hyper=hyper or {}))


@pytest.mark.parametrize(
    "options", [{"ft_epochs": 0}, {"ft_steps": 0}, {"ft_steps": 0, "ft_epochs": 3}]
)
def test_no_fine_tuning_is_fedavg(options: dict) -> None:
    """With E_ft = 0 every number is FedAvg's."""
    wanted, found = outcome(_net("fedavg")), outcome(_net("fedavg-ft", options))
    assert sorted(found) == sorted(wanted)
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_a_rate_of_zero_is_fedavg() -> None:
    """Fine-tuning that does not move scores the global model."""
    np.testing.assert_array_equal(
        outcome(_net("fedavg-ft", hyper={"ft_lr": 0.0}))["pre/test/loss"],
        outcome(_net("fedavg"))["pre/test/loss"],
    )


def test_fine_tuning_leaves_the_training_of_fedavg_alone() -> None:
    """Server and clients are FedAvg's to the bit, though the scores are not."""
    plain, tuned = _net("fedavg"), _net("fedavg-ft", {"ft_epochs": 3})
    for name, leaf in states(plain).items():
        np.testing.assert_array_equal(states(tuned)[name], leaf)
    np.testing.assert_array_equal(
        outcome(plain)["post/test/loss"], outcome(tuned)["post/test/loss"]
    )
    assert np.abs(outcome(plain)["pre/test/loss"] - outcome(tuned)["pre/test/loss"]).min() > 0
    assert plain.ledger().bytes_up.tolist() == tuned.ledger().bytes_up.tolist()


def test_one_step_from_the_minimiser_has_the_sheets_number() -> None:
    """Q3 at w_T = 30/7: client (2, 3) with η_ft = 0.1, K = 1 uses 4.028571."""
    sim = q3("fedavg-ft", GD, options={"ft_steps": 1}, rounds=120)
    assert centre(sim) == pytest.approx(30 / 7, abs=1e-6)
    assert used(sim)[1] == pytest.approx(4.028571, abs=1e-6)


def test_fine_tuning_a_quadratic_has_a_closed_form() -> None:
    """V = c + (1 − η_ft a)^K (w_T − c)."""
    sim = q3("fedavg-ft", GD, options={"ft_steps": 4}, hyper={"ft_lr": 0.05}, rounds=3)
    for a, c, v in zip((1, 2, 4), (0, 3, 6), used(sim), strict=True):
        assert v == pytest.approx(c + (1 - 0.05 * a) ** 4 * (centre(sim) - c), abs=1e-12)


def test_long_fine_tuning_is_local_training() -> None:
    """On a strongly convex loss the minimiser is the client's own, wherever it starts."""
    for start in (-50.0, 50.0):
        sim = q3("fedavg-ft", GD, options={"ft_steps": 300}, start=start)
        np.testing.assert_allclose(used(sim), [0, 3, 6], atol=1e-8)


def test_a_pull_has_the_fixed_point_of_the_prox() -> None:
    """With λ_ft, fine-tuning ends at (a c + λ w_T)/(a + λ), and a huge λ keeps w_T."""
    options = {"ft_steps": 200, "ft_pull": True}
    sim = q3("fedavg-ft", GD, options=options, hyper={"ft_prox_strength": 2.0}, rounds=5)
    w = centre(sim)
    wanted = [(a * c + 2 * w) / (a + 2) for a, c in ((1, 0), (2, 3), (4, 6))]
    np.testing.assert_allclose(used(sim), wanted, atol=1e-8)
    huge = {"ft_prox_strength": 1e7, "ft_lr": 1e-7}
    strong = q3("fedavg-ft", GD, options=options, hyper=huge, rounds=5)
    np.testing.assert_allclose(used(strong), centre(strong), atol=1e-5)


def test_epochs_and_steps_are_those_of_local_training_by_default() -> None:
    """Without a length of its own, fine-tuning is one more local training; epochs replace steps."""
    local = Local(steps=3, batch=None, lr=0.1)
    same = used(q3("fedavg-ft", local))
    np.testing.assert_allclose(used(q3("fedavg-ft", local, options={"ft_steps": 3})), same)
    epochs = used(q3("fedavg-ft", local, options={"ft_epochs": 1}))
    np.testing.assert_allclose(epochs, used(q3("fedavg-ft", local, options={"ft_steps": 1})))


def test_a_negative_length_is_refused() -> None:
    """It says what zero means."""
    with pytest.raises(ConfigError, match="0 leaves it out"):
        build("fedavg-ft", net_task(), SGD, {"ft_steps": -1})


def test_fine_tuning_is_near_the_better_of_its_two_ends() -> None:
    """Appendix D of Chen et al., fewer repeats: FT is never far below the better end."""
    radii, repeats = (0.0, 4.0, 10.0, 20.0), 2
    feds = [logistic_radius(r, seed=s, test_samples=400)[0] for r in radii for s in range(repeats)]
    task = Task(Logistic(100))
    local = Local(epochs=5, batch=16, lr=0.2)
    chen = {"rule": "chen"}
    found = {}
    for name, options, hyper in (
        ("fedavg", chen, {"server_lr": 0.8}),
        ("local", {}, {}),
        ("fedavg-ft", {**chen, "ft_epochs": 15}, {"server_lr": 0.8}),
    ):
        sim = simulation(
            build(name, task, local, options),
            task,
            feds,
            hyper=hyper,
            rounds=20,
            participation="all",
            eval_every=20,
            points=("pre",),
            dtype=torch.float32,
        )
        correct = run(sim).scores()["pre", "test"].correct[:, -1].sum(1) / 2000
        found[name] = 100 * correct.reshape(len(radii), repeats).mean(1)
    sheet = {
        "fedavg": (88.0, 82.9, 71.9, 64.5),
        "local": (73.4, 73.3, 73.8, 74.4),
        "fedavg-ft": (86.4, 83.3, 76.7, 73.8),
    }
    for name, wanted in sheet.items():
        np.testing.assert_allclose(found[name], wanted, atol=4.0, err_msg=name)
    best = np.maximum(found["fedavg"], found["local"])
    assert (found["fedavg-ft"] > best - 3.0).all()
