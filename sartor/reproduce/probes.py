"""What is looked at between the rounds, beyond accuracy and loss.

A probe is made for a simulation and its problems, and then called before the first round and after
every evaluated one; it returns one number per run for each of its names.

| name | gives | meaning |
|---|---|---|
| errors | local_error | mean_i ‖w_i − w_i*‖² of the models that the clients would use |
| | global_error | ‖w_g − mean_i w_i*‖², w_g the global model, else the mean of the clients' |
| coherence | coherence | 1 − det G of the clients' pseudo-gradients w_g − w_i |
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
        if simulation.method.centre is None:
            common = own.mean(1)
        else:
            server = simulation.deployed()[0]
            common = _flat(simulation.rounds.centre(server, simulation.round_index), 1)
        error = (common - centre).square().sum(-1)
        return {"local_error": local.cpu().numpy(), "global_error": error.cpu().numpy()}

    return look


def models_now(simulation: Simulation) -> Tree:
    """Return what all clients would use now, (runs, clients, ...)."""
    return simulation.models(simulation.rounds.everybody, simulation.method.headline)


def _flat(models: Tree, axes: int) -> Tensor:
    return torch.cat([leaf.flatten(axes) for _, leaf in tree.items(models)], -1)


PROBES: dict[str, Callable[[Simulation, Sequence[Problem]], Probe]] = {"errors": errors}
