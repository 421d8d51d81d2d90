"""What is looked at between the rounds, beyond accuracy and loss.

A probe is made for a simulation and its problems, and then called before the first round and after
every evaluated one; it returns one number per run for each of its names.

| name | gives | meaning |
|---|---|---|
| errors | local_error | mean_i ‖w_i − w_i*‖² of the models that the clients would use |
| | global_error | ‖w_g − mean_i w_i*‖², w_g the global model, else the mean of the clients' |
| coherence | coherence | 1 − det G of the clients' pseudo-gradients w_g − w_i |
| training_loss | training_loss | mean loss on the clients' own training samples, their models |
| | training_loss_global | the same of the global model, else the mean of the clients' |
| common_test | central_accuracy | on the samples of everybody: the global model, else the mean |
| | average_accuracy | the mean of the models that the clients would use |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sartor import tree
from sartor.errors import ConfigError
from sartor.reproduce.problems import Problem
from sartor.simulation import Simulation
from sartor.tree import Tree

Probe = Callable[[], dict[str, np.ndarray]]


def errors(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure distances from the true models."""
    if any(problem.truth is None for problem in problems):
        raise ConfigError("The probe 'errors' needs a synthetic problem, whose truth is known.")
    truth = torch.stack([p.truth for p in problems if p.truth is not None])
    truth = truth.to(simulation.rounds.arena.device, simulation.dtype)
    centre = truth.mean(1)

    def look() -> dict[str, np.ndarray]:
        own = _flat(models_now(simulation), 2)
        local = (own - truth).square().sum(-1).mean(1)
        common = _flat(_central(simulation), 1)
        error = (common - centre).square().sum(-1)
        return {"local_error": local.cpu().numpy(), "global_error": error.cpu().numpy()}

    return look


def training_loss(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure mean_i L_i(w_i) and mean_i L_i(w_g) on the training samples."""
    rounds = simulation.rounds
    sizes = rounds.arena.splits["train"].size

    def look() -> dict[str, np.ndarray]:
        t, (server, store) = simulation.round_index, simulation.deployed()
        own = rounds.evaluate(server, store, t, ("train",))[0]["train"]
        common = rounds.evaluate_common(_central(simulation), t, ("train",))["train"]
        return {
            "training_loss": (own.loss / sizes).mean(1),
            "training_loss_global": (common.loss / sizes).mean(1),
        }

    return look


def common_test(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure what one model for all answers on the test samples of everybody."""
    rounds = simulation.rounds
    split = rounds.arena.splits["val"]
    if not split.size.any() or (split.start != split.start[:, :1]).any():
        raise ConfigError(
            "The probe 'common_test' needs samples of everybody; set everyone = 2000."
        )

    def accuracy(models: Tree) -> np.ndarray:
        tally = rounds.evaluate_common(models, simulation.round_index, ("val",), clients=1)["val"]
        found: np.ndarray = tally.correct[:, 0] / split.size[:, 0]
        return found

    def look() -> dict[str, np.ndarray]:
        average = _average(simulation)
        central = average if simulation.method.centre is None else _central(simulation)
        return {"central_accuracy": accuracy(central), "average_accuracy": accuracy(average)}

    return look


def _average(simulation: Simulation) -> Tree:
    """Return the mean of the clients' models, (runs, ...)."""
    found: Tree = tree.map(lambda leaf: leaf.mean(1), models_now(simulation))
    return found


def _central(simulation: Simulation) -> Tree:
    """Return the global model, or the mean of the clients' where there is none, (runs, ...)."""
    if simulation.method.centre is None:
        return _average(simulation)
    return simulation.rounds.centre(simulation.deployed()[0], simulation.round_index)


def models_now(simulation: Simulation) -> Tree:
    """Return what all clients would use now, (runs, clients, ...)."""
    return simulation.models(simulation.rounds.everybody, simulation.method.headline)


def _flat(models: Tree, axes: int) -> Tensor:
    return torch.cat([leaf.flatten(axes) for _, leaf in tree.items(models)], -1)


PROBES: dict[str, Callable[[Simulation, Sequence[Problem]], Probe]] = {
    "errors": errors,
    "training_loss": training_loss,
    "common_test": common_test,
}
