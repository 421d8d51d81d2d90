"""Using what was trained: predictions, and models as files of their own.

The settings of a result say what is needed to use its models without the training data: the
network, the task, the names of classes, and the constants that samples are standardised with.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sartor import methods, models
from sartor.core import tree
from sartor.core.errors import (
    ConfigError,
    MissingExtraError,
    ModelError,
    RunFolderError,
    did_you_mean,
)
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import PADDING, Predictor, Task
from sartor.core.tree import Tree
from sartor.data.encoding import Array, prepare
from sartor.data.federation import Federation
from sartor.results.readings import Readings
from sartor.results.uncertainty import averaged, scores_with_spread

BATCH = 4096
"""Samples that a network sees at once."""

EXPORTS = {
    ".safetensors": "state_dict as safetensors",
    ".pt": "state_dict by torch.save, for torch.load(..., weights_only=True)",
    ".pt2": "a program by torch.export, for torch.export.load",
    ".onnx": "a program in ONNX, for any runtime",
}
"""What a model can be exported to, by the ending of the file."""


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
        return Prediction((scores > 0).long().numpy(), torch.sigmoid(scores).numpy())
    chosen = scores.argmax(-1)
    if kind == "next-token":
        chosen = torch.where(x == PADDING, PADDING, chosen)
    labels = np.asarray(names)[chosen.numpy()] if names else chosen.numpy()
    return Prediction(labels, torch.softmax(scores, -1).numpy())


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


# ---------------------------------------------------------------------- export


def export(
    result: Readings, client: str, network: Callable[[], nn.Module], path: str | Path, run: int
) -> Path:
    """Write the model of a client to a file of its own; see ``Result.export``."""
    file = Path(path)
    ending = file.suffix.lower()
    if ending not in EXPORTS:
        raise ConfigError(
            f"{file} must end in {', '.join(EXPORTS)}, got {ending or 'nothing'}; "
            + "; ".join(f"{end}: {what}" for end, what in EXPORTS.items())
            + "."
        )
    model, facts = network().requires_grad_(False).eval(), result.facts()
    try:
        _write(model, file, ending, facts)
        card = {
            "client": client,
            "method": result.method,
            "task": result.config.get("task"),
            "input_shape": facts.get("input_shape"),
            "class_names": facts.get("class_names"),
            "preprocessing": result.recipe(run),
        }
        file.with_name(f"{file.name}.json").write_text(json.dumps(card, indent=1) + "\n")
    except OSError as error:
        raise RunFolderError(f"{file} cannot be written: {error}; choose another place.") from error
    return file


def _write(network: nn.Module, file: Path, ending: str, facts: Mapping[str, Any]) -> None:
    state = {k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, file)
        return
    if ending == ".pt":
        torch.save(state, file)
        return
    if "input_shape" not in facts:
        raise ConfigError("This result does not know the shape of its samples; export a .pt file.")
    shape = (2, *facts["input_shape"])
    dtype = next(p.dtype for p in network.parameters())
    example = torch.ones(shape, dtype=torch.int64 if facts["tokens"] else dtype)
    batch = {0: torch.export.Dim("batch")}
    try:
        with _quiet("torch.export"):
            program = torch.export.export(network, (example,), dynamic_shapes=(batch,))
    except Exception as error:  # torch raises many kinds, all of them about this network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"torch.export cannot follow this model ({reason}); export its parameters as .pt or "
            ".safetensors instead."
        ) from error
    if ending == ".pt2":
        torch.export.save(program, file)
        return
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "ONNX needs onnx and onnxscript; install them with: pip install 'sartor[onnx]'"
        ) from error
    try:
        with _quiet("torch.onnx"):
            found = torch.onnx.export(
                program, input_names=["x"], output_names=["scores"], dynamo=True, verbose=False
            )
    except Exception as error:  # whatever a version of the converter raises
        raise ModelError(
            f"The model cannot be written as ONNX ({type(error).__name__}); export it as .pt2, or "
            "its parameters as .pt or .safetensors instead."
        ) from error
    assert found is not None
    found.save(str(file))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep what a package says about itself off the screen."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


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
