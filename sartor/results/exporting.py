"""Models as files that need no Sartor: one file, or a folder with a card.

::

    FOLDER/
        model.onnx          raw samples in, answers out
        model.safetensors   the parameters
        recipe.json         inputs, classes, and how samples are prepared
        README.md           the card: data, method, measures, limits
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sartor._version import __version__
from sartor.core.errors import ConfigError, ModelError, RunFolderError, did_you_mean
from sartor.results import model_card, onnx_program
from sartor.results.readings import Readings

EXPORTS = {
    ".safetensors": "state_dict as safetensors",
    ".pt": "state_dict by torch.save, for torch.load(..., weights_only=True)",
    ".pt2": "a program by torch.export, for torch.export.load",
    ".onnx": "a program in ONNX, for any runtime, with the preparation inside",
}
"""What a model can be exported to, by the ending of the file."""

FORMATS = ("onnx", "safetensors")
"""The models in an exported folder."""


def export(
    result: Readings, client: str, network: Callable[[], nn.Module], path: str | Path, run: int
) -> Path:
    """Write the model of a client to a file of its own; see ``Result.export``."""
    file = Path(path)
    ending = file.suffix.lower()
    if ending not in EXPORTS:
        raise ConfigError(
            f"{file} must end in {', '.join(EXPORTS)}, got {ending}; "
            + "; ".join(f"{end}: {what}" for end, what in EXPORTS.items())
            + "; without an ending it is a folder, for all that a user of the model needs."
        )
    model = network().requires_grad_(False).eval()
    with _writing(file):
        _write(model, file, ending, result, client, run)
        _write_json(file.with_name(f"{file.name}.json"), recipe_of(result, client, run))
    return file


def export_folder(
    result: Readings,
    client: str,
    network: Callable[[], nn.Module],
    path: str | Path,
    run: int,
    alone: Readings | None = None,
    formats: Sequence[str] = FORMATS,
    overwrite: bool = False,
) -> Path:
    """Write a folder with the model of a client and its card; see ``Result.export``."""
    folder = Path(path)
    if strange := [one for one in formats if one not in FORMATS]:
        raise ConfigError(f"there is no format {strange[0]!r}{did_you_mean(strange[0], FORMATS)}")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise RunFolderError(
            f"{folder} is not empty, and its card may have been written on; choose another folder, "
            "or replace what is there: overwrite=True (--overwrite)."
        )
    if "onnx" in formats:
        onnx_program.load_onnx()  # a missing package is said before anything is written
    model = network().requires_grad_(False).eval()
    recipe = recipe_of(result, client, run)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        gaps = {}
        for name in sorted(formats):
            gaps[name] = _write(model, folder / f"model.{name}", f".{name}", result, client, run)
        _write_json(folder / "recipe.json", recipe)
        card = model_card.card(result, alone, client, run, recipe, model, gaps)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


def recipe_of(result: Readings, client: str, run: int) -> dict[str, Any]:
    """Return what a user of a file must know: inputs, classes, and how samples are prepared."""
    facts, recipe, task = result.facts(), result.recipe(run), result.config.get("task")
    inputs = onnx_program.inputs_of(facts, recipe)
    return {
        "sartor": __version__,
        "client": client,
        "method": result.method,
        "task": task,
        "network": facts.get("model"),
        "input_shape": facts.get("input_shape"),
        "num_classes": facts.get("num_classes"),
        "class_names": facts.get("class_names"),
        "inputs": inputs,
        "outputs": onnx_program.outputs_of(str(task), list(inputs)),
        "preprocessing": recipe,
    }


def _write(
    network: nn.Module, file: Path, ending: str, result: Readings, client: str, run: int
) -> float | None:
    """Write one file; return by how much an ONNX program differs from the model."""
    state = {k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, file)
        return None
    if ending == ".pt":
        torch.save(state, file)
        return None
    facts, task = result.facts(), result.config.get("task")
    if ending == ".onnx":
        if task is None:
            raise ConfigError(
                "This network gives its own loss, so there are no answers that an ONNX program "
                f"could give; {onnx_program.HINT}"
            )
        onnx_program.load_onnx()
    dtype = next(p.dtype for p in network.parameters())
    program = _program(network, facts, dtype)
    if ending == ".pt2":
        torch.export.save(program, file)
        return None
    recipe = result.recipe(run)
    about = {"client": client, "method": result.method, "task": str(task)}
    given = facts, recipe, str(task), dtype
    with _quiet("torch.onnx"):
        onnx_program.write_onnx(file, program, *given, about)
    return onnx_program.check_onnx(file, network, *given)


def _program(
    network: nn.Module, facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.export.ExportedProgram:
    """Follow a network with torch.export, for any number of samples."""
    if "input_shape" not in facts:
        raise ConfigError("This result does not know the shape of its samples; export a .pt file.")
    shape = (2, *facts["input_shape"])
    example = torch.ones(shape, dtype=torch.int64 if facts["tokens"] else dtype)
    batch = {0: torch.export.Dim("batch")}
    with torch.no_grad():
        network(example)  # what a network keeps from its first call must not be made while traced
    try:
        with _quiet("torch.export"):
            return torch.export.export(network, (example,), dynamic_shapes=(batch,))
    except Exception as error:  # torch raises many kinds, all of them about this network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"torch.export cannot follow this model ({reason}), so it cannot become a program; "
            f"{onnx_program.HINT}"
        ) from error


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say which place cannot be written to."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error}; choose another place.") from error


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
