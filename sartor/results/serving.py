"""Using what was trained: predictions, and models made again from what a folder holds.

The settings of a result say what is needed to use its models without the training data: the
network, the task, the names of classes, and the constants that samples are standardised with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sartor import methods, models
from sartor.core import tree
from sartor.core.errors import (
    ConfigError,
    RunFolderError,
    did_you_mean,
)
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import PADDING, Predictor, Task
from sartor.core.tree import Tree
from sartor.data.encoding import Array, prepare
from sartor.data.federation import Federation
from sartor.results import measures
from sartor.results.readings import Readings
from sartor.results.uncertainty import averaged, scores_with_spread

BATCH = 4096
"""Samples that a network sees at once."""


class Prediction(NamedTuple):
    """Answers for samples.

    Attributes:
        labels: ``(samples,)`` names of classes (their numbers, if they have no names), or targets;
            ``(samples, labels)`` of 0 and 1; ``(samples, steps)`` token ids.
        scores: probabilities of every class, ``(samples, classes)``; of every label; of every token
            after each step; the targets themselves for a regression.
        deviation: with ``uncertainty``: the standard deviation of each target, its noise included,
            or of each probability; else None.
    """

    labels: Array
    scores: Array
    deviation: Array | None = None


def facts_of(
    method: str | methods.Factory,
    task: Task,
    own_predict: bool,
    federations: Mapping[int, Federation],
) -> dict[str, Any]:
    """Return what a later process needs to use the models, as JSON-able values.

    ``own_predict`` says whether a model is more than one set of parameters of the network. There is
    a federation for every seed: constants of standardisation differ with the division.
    """
    first = next(iter(federations.values()))
    recipes = {
        str(seed): federation.info["preprocessing"]
        for seed, federation in federations.items()
        if "preprocessing" in federation.info
    }
    return {
        "method": method if isinstance(method, str) else None,
        "own_predict": own_predict,
        "model": None
        if task.fixed  # a name does not say what is frozen
        else models.describe_model(task.module, first.input_shape, first.num_classes),
        "input_shape": list(first.input_shape),
        "num_classes": first.num_classes,
        "tokens": not first.x.is_floating_point(),
        "class_names": list(first.info.get("class_names", [])),
        "preprocessing": recipes,
    }


def predict(
    result: Readings, network: nn.Module, x: Any, run: int, uncertainty: bool = False
) -> Prediction:
    """Answer for samples with a model; see ``Result.predict``."""
    given = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
    features = torch.as_tensor(prepare(given, result.recipe(run)))
    return answer(result, network, features, run, uncertainty)


def answer(
    result: Readings, network: nn.Module, features: Tensor, run: int, uncertainty: bool = False
) -> Prediction:
    """Answer for samples that are prepared already."""
    kind = result.config.get("task", "classification")
    if kind is None:
        raise ConfigError(
            "This network gives its own loss, so it has no answers to predict; take the network "
            "itself, result.model(client)."
        )
    facts = result.facts()
    shape = tuple(facts.get("input_shape", features.shape[1:]))
    if tuple(features.shape[1:]) != shape:
        alone = " (one sample? put it in a list)" if tuple(features.shape) == shape else ""
        raise ConfigError(
            f"x has samples of shape {tuple(features.shape[1:])}, but the models were trained on "
            f"{shape}{alone}; give x of shape (samples, ...) as the federation has it."
        )
    dtype = next(p.dtype for p in network.parameters())
    features = features.long() if facts.get("tokens") else features.to(dtype)
    if uncertainty:
        return uncertain(network, features, kind, facts.get("class_names", []), result.target(run))
    with torch.no_grad():
        parts = [network(part) for part in features.split(BATCH)]
    scores = torch.cat(parts) if parts else torch.empty(0, max(facts.get("num_classes", 1), 1))
    if kind == "regression":
        mean, scale = result.target(run)
        scores = scores * scale + mean
    return _answers(scores, kind, facts.get("class_names", []), features)


def _answers(scores: Tensor, kind: str, names: Sequence[str], x: Tensor) -> Prediction:
    if kind == "regression":
        values = scores.reshape(len(scores), -1).numpy()
        flat = values[:, 0] if values.shape[1] == 1 else values
        return Prediction(flat, flat)
    if kind == "multilabel":
        return Prediction((scores > 0).long().numpy(), measures.probabilities(kind, scores))
    chosen = scores.argmax(-1)
    if kind == "next-token":
        chosen = torch.where(x == PADDING, PADDING, chosen)
    labels = np.asarray(names)[chosen.numpy()] if names else chosen.numpy()
    return Prediction(labels, measures.probabilities(kind, scores))


def uncertain(
    network: nn.Module, x: Tensor, kind: str, names: Sequence[str], target: tuple[float, float]
) -> Prediction:
    """Answer with the average over what the model could be; see `uncertainty.py`."""
    parts = [scores_with_spread(network, part) for part in x.split(BATCH)]
    scores, spread = torch.cat([one[0] for one in parts]), torch.cat([one[1] for one in parts])
    if kind == "regression":
        mean, scale = target
        variance = torch.diagonal(spread, dim1=-2, dim2=-1) + parts[0][2]
        plain = _answers(scores * scale + mean, kind, names, x)
        deviation = (scale * variance.sqrt()).numpy().reshape(plain.scores.shape)
        return plain._replace(deviation=deviation)
    chances, deviations = averaged(kind, scores, spread)
    if kind == "multilabel":
        return Prediction((chances > 0.5).long().numpy(), chances.numpy(), deviations.numpy())
    return _answers(chances.log(), kind, names, x)._replace(deviation=deviations.numpy())


# ---------------------------------------------------------------------- parameters and records


def tree_of(network: nn.Module) -> Tree:
    """Return the trained parameters of a model as a tree, as ``Simulation.params`` has them."""
    if not isinstance(network, Predictor):
        own = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        statistics = getattr(network, "sartor_statistics", ())  # of BatchNorm
        return own | {name: network.get_buffer(name) for name in statistics}
    return tree.map(torch.detach, network.tree())


def record_of(result: Readings, task: Task, run: int) -> Method:
    """Return the method's record, made again from the settings of a result."""
    name = result.facts()["method"]
    if name not in methods.KNOWN:
        raise RunFolderError(
            f"The method {result.method!r} is not one of sartor.methods, so it cannot be made "
            f"again from a file{did_you_mean(str(name), methods.METHODS)}"
        )
    local = Local(**result.config["local"])
    return methods.build(name, task, local, dict(result.runs[run].options))
