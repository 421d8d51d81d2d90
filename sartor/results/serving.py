"""Using what was trained: predictions, export, and results that are read back from a folder.

A run folder holds the weights of every client (safetensors), the state of the server, and in its
settings (JSON) what is needed to use them without the training data: the network, the task, the
names of classes, and the constants that samples are standardised with. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from sartor.core.task import PADDING, Predictor, Task
from sartor.core.tree import Tree
from sartor.data.encoding import Array, prepare

if TYPE_CHECKING:
    from sartor.data.federation import Federation
    from sartor.results.readings import Readings
    from sartor.results.result import Result

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
    """

    labels: Array
    scores: Array


def facts_of(
    method: str | methods.Factory,
    task: Task,
    own_predict: bool,
    federations: Mapping[int, Federation],
) -> dict[str, Any]:
    """Return what a later process needs to use the models, as JSON-able values.

    Args:
        method: as ``fit`` got it.
        task: the network and its loss.
        own_predict: whether a model is more than one set of parameters of the network.
        federations: by seed; constants of standardisation differ with the division.
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
        if task.fixed  # which a name does not tell
        else models.describe_model(task.module, first.input_shape, first.num_classes),
        "input_shape": list(first.input_shape),
        "num_classes": first.num_classes,
        "tokens": not first.x.is_floating_point(),
        "class_names": list(first.info.get("class_names", [])),
        "preprocessing": recipes,
    }


def recipe_of(result: Readings, run: int) -> Mapping[str, Any] | None:
    """Return how samples become features in a run, or None if they are used as they are."""
    recipes = _facts(result).get("preprocessing", {})
    found: Mapping[str, Any] | None = recipes.get(str(result.runs[run].seed))
    return found


def predict(result: Result, client: str | int, x: Any, run: int, point: str | None) -> Prediction:
    """Answer for samples with the model of a client; see ``Result.predict``."""
    features = torch.as_tensor(prepare(_numpy(x), recipe_of(result, run)))
    return answer(result, client, features, run, point)


def answer(
    result: Result, client: str | int, features: Tensor, run: int, point: str | None
) -> Prediction:
    """Answer for samples that are prepared already."""
    kind = result.config.get("task", "classification")
    if kind is None:
        raise ConfigError(
            "This network gives its own loss, so it has no answers to predict; take the network "
            "itself, result.model(client)."
        )
    network, facts = result.model(client, run, point), _facts(result)
    shape = tuple(facts.get("input_shape", features.shape[1:]))
    if tuple(features.shape[1:]) != shape:
        alone = " (one sample? put it in a list)" if tuple(features.shape) == shape else ""
        raise ConfigError(
            f"x has samples of shape {tuple(features.shape[1:])}, but the models were trained on "
            f"{shape}{alone}; give x of shape (samples, ...) as the federation has it."
        )
    dtype = next(p.dtype for p in network.parameters())
    features = features.long() if facts.get("tokens") else features.to(dtype)
    with torch.no_grad():
        parts = [network(part) for part in features.split(BATCH)]
    scores = torch.cat(parts) if parts else torch.empty(0, max(facts.get("num_classes", 1), 1))
    if kind == "regression":
        mean, scale = target_of(result, run)
        scores = scores * scale + mean
    return _answers(scores, kind, facts.get("class_names", []), features)


def target_of(result: Readings, run: int) -> tuple[float, float]:
    """Return mean and scale of the target in the units of the data; (0, 1) if it was not scaled."""
    recipe = recipe_of(result, run) if "rebuild" in result.config else None
    step = (recipe or {}).get("target", {"mean": 0.0, "scale": 1.0})
    return float(step["mean"]), float(step["scale"])


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


# ---------------------------------------------------------------------- export


def export(
    result: Result, client: str | int, path: str | Path, run: int, point: str | None
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
    network = result.model(client, run, point).requires_grad_(False).eval()
    facts = _facts(result)
    try:
        _write(network, file, ending, facts)
        card = {
            "client": result.clients[result.client_index(client)],
            "method": result.method,
            "task": result.config.get("task"),
            "input_shape": facts.get("input_shape"),
            "class_names": facts.get("class_names"),
            "preprocessing": recipe_of(result, run),
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


# ---------------------------------------------------------------------- from a folder


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
    from sartor.runs import RunFolder

    folder = RunFolder.open(path)
    result = folder.read_result()
    attach(result, folder.read_models, folder.read_server, model)
    return result


def attach(
    result: Result,
    read_models: Callable[[int], Mapping[str, Tree]],
    read_server: Callable[[int], tuple[Tree, dict[str, Any]]],
    model: nn.Module | None = None,
) -> None:
    """Give a result that was read from a folder its models, and a way in for newcomers."""
    kept: dict[int, Mapping[str, Tree]] = {}

    def models_of(run: int) -> Mapping[str, Tree]:
        if run not in kept:
            kept[run] = read_models(run)
        return kept[run]

    def network(client: int, run: int, point: str) -> nn.Module:
        if point != result.headline:
            raise RunFolderError(
                f"The folder keeps the models at the headline point, {result.headline!r}, alone, "
                f"and not those at {point!r}; leave point= out, or train again and ask the result "
                "of fit."
            )
        task, params = task_of(result, model), models_of(run)[result.clients[client]]
        if not _facts(result)["own_predict"]:
            _check_leaves(task, params)
            return task.with_params(params)
        predicted = record_of(result, task, run).predict
        assert predicted is not None
        return Predictor(params, predicted, task.fixed)

    def newcomers(data: Any, run: int = 0, **settings: Any) -> Result:
        from sartor.training.onboarding import onboard, restored

        trained = restored(result, task_of(result, model), run, *read_server(run))
        return onboard(trained, data, **settings)

    result.give_models(network, newcomers, read_server)


def task_of(result: Result, model: nn.Module | None) -> Task:
    """Return the network and its loss, made again from the settings of a result."""
    from sartor.training.settings import LOSSES

    facts = _facts(result)
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
    models.check_module(network, said["head"])
    task = Task(network, said["head"], *LOSSES[kind], None, kind)
    if task.given_weights().get("fixed") != said.get("fixed"):
        raise ModelError(
            "The frozen parameters and buffers of this network are not those that it was trained "
            "with, and a run folder does not hold them; give the network with the same weights and "
            "the same parts frozen: sartor.load(path, model=sartor.models.pretrained(...))."
        )
    return task


def record_of(result: Result, task: Task, run: int) -> Any:
    """Return the method's record, made again from the settings of a result."""
    name = _facts(result)["method"]
    if name not in methods.METHODS:
        raise RunFolderError(
            f"The method {result.method!r} is not one of sartor.methods, so it cannot be made "
            f"again from a file{did_you_mean(str(name), methods.METHODS)}"
        )
    local = Local(**result.config["local"])
    return methods.build(name, task, local, dict(result.runs[run].options))


def tree_of(network: nn.Module) -> Tree:
    """Return the trained parameters of a model as a tree, as ``Simulation.params`` has them."""
    if not isinstance(network, Predictor):
        return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    return tree.map(torch.detach, network.tree())


def _facts(result: Readings) -> dict[str, Any]:
    facts = result.config.get("rebuild")
    if facts is None:
        raise RunFolderError(
            "This result was written by an earlier release and does not say how samples were "
            "prepared; train again, or load the weights of models/ into your own network."
        )
    return dict(facts)


def _check_leaves(task: Task, params: Tree) -> None:
    wanted = {k: tuple(task.module.get_parameter(k).shape) for k in task.leaf_names}
    found = {k: tuple(p.shape) for k, p in params.items()}
    if wanted != found:
        unlike = sorted(k for k in {*wanted, *found} if wanted.get(k) != found.get(k))
        raise ModelError(
            f"The stored parameters do not fit this network: see {', '.join(unlike[:5])}. Give "
            "the network that was trained: sartor.load(path, model=YourNetwork())."
        )


def _numpy(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x
