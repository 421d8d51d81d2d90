"""Results that are read back from a run folder, with their models and a way in for newcomers.

A run folder holds the weights of every client (safetensors), the state of the server, and in its
settings (JSON) what is needed to use them without the training data. Nothing is pickled.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from torch import nn

from sartor import models
from sartor.core.errors import ModelError, RunFolderError
from sartor.core.task import Predictor, Task
from sartor.core.tree import Tree
from sartor.results.headline import chosen_metric
from sartor.results.result import Result
from sartor.results.serving import record_of
from sartor.runs import RunFolder, save_result
from sartor.training.onboarding import onboard, restored
from sartor.training.settings import LOSSES, measured_by


def load(path: str | Path, model: nn.Module | None = None) -> Result:
    """Read a result with its models from a run folder, or from what ``Result.save`` wrote.

    The training data are not needed: ``predict``, ``export`` and ``onboard`` work as before.

    Args:
        path: the folder of one method.
        model: the network, if it is not one of ``sartor.models`` or has frozen parts; the values of
            its other parameters do not matter.

    Raises:
        RunFolderError: there is no such folder, or it is damaged.
    """
    folder = RunFolder.open(path)
    result, models_of = folder.read_result(), functools.cache(folder.read_models)

    def network(client: int, run: int, point: str) -> nn.Module:
        if point != result.headline:
            raise RunFolderError(
                f"The folder keeps the models at the headline point, {result.headline!r}, alone, "
                f"and not those at {point!r}; leave point= out, or train again and ask the result "
                "of fit."
            )
        task, params = task_of(result, model), models_of(run)[result.clients[client]]
        if not result.facts()["own_predict"]:
            _check_leaves(task, params)
            return task.with_params(params)
        predicted = record_of(result, task, run).use.predict
        assert predicted is not None
        return Predictor(params, task.answer(predicted), task.fixed)

    def newcomers(data: Any, run: int = 0, **settings: Any) -> Result:
        trained = restored(result, task_of(result, model), run, *folder.read_server(run))
        return onboard(trained, data, origin=result.config, **settings)

    result.give_models(network, newcomers, folder.read_server, save_result)
    return result


def task_of(result: Result, model: nn.Module | None) -> Task:
    """Return the network and its loss, made again from the settings of a result."""
    facts = result.facts()
    if model is None and facts["model"] is None:
        name = result.config.get("model", {}).get("class")
        raise ModelError(
            f"The network {name} is not one of sartor.models, or has frozen parts, so it cannot be "
            "made again from a file; give it: sartor.load(path, model=YourNetwork())."
        )
    network = model if model is not None else models.rebuild_model(facts["model"])
    kind = result.config.get("task")
    if kind not in LOSSES:
        raise RunFolderError(
            f"The task of this result is {kind!r}, and a network can be made again for "
            f"{', '.join(LOSSES)} alone; train again and use the result of fit."
        )
    said = result.config["model"]
    live = said.get("statistics") or said.get("dropout")
    if live and not any(part.training for part in network.modules()):
        network = copy.deepcopy(network).train()  # a client's model, which is ready to use
    models.check_module(network, said["head"])
    measure = measured_by(chosen_metric(kind, result.config.get("measure")), kind)
    loss = LOSSES[kind]
    task = Task(network, said["head"], *loss, None, kind, measure, draws=said.get("dropout"))
    if task.given_weights().get("fixed") != said.get("fixed"):
        raise ModelError(
            "The frozen parameters and buffers of this network are not those that it was trained "
            "with, and a run folder does not hold them; give the network with the same weights and "
            "the same parts frozen: sartor.load(path, model=sartor.models.pretrained(...))."
        )
    return task


def _check_leaves(task: Task, params: Tree) -> None:
    wanted = {k: tuple(task.module.get_parameter(k).shape) for k in task.leaf_names}
    wanted |= task.statistics
    found = {k: tuple(p.shape) for k, p in params.items()}
    if wanted != found:
        unlike = sorted(k for k in {*wanted, *found} if wanted.get(k) != found.get(k))
        raise ModelError(
            f"The stored parameters do not fit this network: see {', '.join(unlike[:5])}. Give "
            "the network that was trained: sartor.load(path, model=YourNetwork())."
        )
