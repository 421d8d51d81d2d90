"""A model as one ONNX program: raw samples in, answers out, with the preparation inside.

::

    inputs ── prepare ── features ── network/... ── scores ── answer ── outputs

torch's exporter writes the network; the rest is a few nodes before and after it, made from the same
constants as ``prepare`` and ``predict`` use. The program is run on made-up samples before it is
handed out, and must answer as the model does.

| data | inputs | outputs |
|---|---|---|
| a table | one for every column, ``(samples,)``: numbers as double, NaN where one is missing; \
categories as string | |
| texts | ``tokens``, int64 ids ``(samples, length)`` | |
| others | ``x`` ``(samples, ...)`` | |
| classification, next-token | | ``labels``, ``probabilities`` |
| multi-label | | ``labels`` of 0 and 1, ``probabilities`` |
| regression | | ``target``, in the units of the data |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sartor._version import __version__
from sartor.core.errors import ConfigError, MissingExtraError, ModelError
from sartor.core.task import PADDING
from sartor.data.encoding import Array, prepare

STEP_KEYS = frozenset({"name", "kind", "mean", "scale", "indicator", "fill", "levels"})
"""What a column's recipe may say: anything else would be left out of the program in silence."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
"""By how much the program may differ from the model: a probability, or a share of a target."""

HINT = "export the parameters in its place: formats=['safetensors'] (--format safetensors)."
_NETWORK = "network/"


def load_onnx() -> tuple[Any, Any]:
    """Return the modules onnx and onnxruntime.

    Raises:
        MissingExtraError: they are not installed.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "ONNX needs onnx, onnxscript and onnxruntime; install them with: "
            f"pip install 'sartor[export]', or {HINT}"
        ) from error
    return onnx, onnxruntime


def inputs_of(facts: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the inputs of a program: name -> "number", "category", "tokens" or "array"."""
    kind = (recipe or {}).get("kind")
    if recipe is not None and kind == "table":
        return {step["name"]: step["kind"] for step in recipe["columns"]}
    return {"tokens": "tokens"} if facts.get("tokens") else {"x": "array"}


def outputs_of(task: str, inputs: Sequence[str]) -> list[str]:
    """Return the names of the outputs; one that a column has already gets a sign behind it."""
    wanted = ["target"] if task == "regression" else ["labels", "probabilities"]
    found = []
    for name in wanted:
        while name in inputs:
            name += "_"
        found.append(name)
    return found


def write_onnx(
    file: Path,
    program: torch.export.ExportedProgram,
    facts: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    task: str,
    dtype: torch.dtype,
    about: Mapping[str, str],
) -> None:
    """Write a network that torch.export followed, with everything around it, to a file.

    Args:
        file: ends in ``.onnx``.
        program: the network; features in, scores out.
        facts: of the result; see ``Readings.facts``.
        recipe: how samples become features.
        task: what there is to learn.
        dtype: of the parameters.
        about: strings that are kept in the file.
    """
    onnx, _ = load_onnx()
    _refuse_unknown(recipe)
    try:
        found = torch.onnx.export(
            program, input_names=["features"], output_names=["scores"], dynamo=True, verbose=False
        )
        assert found is not None
        core = found.model_proto
    except Exception as error:  # whatever a version of the converter raises
        raise ModelError(
            f"The model cannot be written as ONNX ({type(error).__name__}); {HINT}"
        ) from error
    core = onnx.compose.add_prefix(core, _NETWORK)
    graph = _Graph(onnx, dtype)
    inputs = inputs_of(facts, recipe)
    if "category" in inputs.values() or "number" in inputs.values():
        assert recipe is not None
        graph.table(recipe)
    else:
        graph.array(facts, recipe)
    graph.nodes.extend(core.graph.node)
    graph.constants.extend(core.graph.initializer)
    graph.answer(task, facts, recipe, outputs_of(task, list(inputs)))
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "sartor",
            graph.inputs,
            graph.outputs,
            graph.constants,
            value_info=core.graph.value_info,
        ),
        opset_imports=[
            *(one for one in core.opset_import if one.domain != "ai.onnx.ml"),
            onnx.helper.make_opsetid("ai.onnx.ml", 3),
        ],
        functions=list(core.functions),
        ir_version=core.ir_version,
        producer_name="sartor",
        producer_version=__version__,
    )
    onnx.helper.set_model_props(made, dict(about))
    onnx.checker.check_model(made)
    onnx.save(made, str(file))


def _refuse_unknown(recipe: Mapping[str, Any] | None) -> None:
    """Refuse a recipe that says more than is written here."""
    kind = (recipe or {}).get("kind", "given")
    steps = (recipe or {}).get("columns", []) if kind == "table" else []
    known = ("given", "table", "scale", "text")
    strange = sorted({key for step in steps for key in step} - STEP_KEYS)
    if kind not in known or strange:
        what = f"preparation of kind {kind!r}" if kind not in known else f"step {strange[0]!r}"
        raise ConfigError(f"The {what} cannot be written as ONNX; {HINT}")


class _Graph:
    """The nodes around the network, with their constants."""

    def __init__(self, onnx: Any, dtype: torch.dtype) -> None:
        self.onnx, self.helper = onnx, onnx.helper
        self.double, self.text = onnx.TensorProto.DOUBLE, onnx.TensorProto.STRING
        self.whole, self.real = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
        self.dtype = self.double if dtype == torch.float64 else self.real
        self.numbers = np.float64 if dtype == torch.float64 else np.float32
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: Any) -> str:
        name = f"sartor/constant{len(self.constants)}"
        array = np.asarray(value, dtype=dtype)
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def node(
        self, kind: str, *given: str, out: str = "", domain: str = "", **attributes: Any
    ) -> str:
        name = out or f"sartor/{kind}{len(self.nodes)}"
        self.nodes.append(
            self.helper.make_node(
                kind, list(given), [name], name=f"{name}/node", domain=domain, **attributes
            )
        )
        return name

    def input(self, name: str, dtype: int, shape: Sequence[int] = ()) -> str:
        whole = ["samples", *shape]
        self.inputs.append(self.helper.make_tensor_value_info(name, dtype, whole))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[Any] = ()) -> str:
        whole = ["samples", *shape]
        self.outputs.append(self.helper.make_tensor_value_info(name, dtype, whole))
        return name

    def features(self, name: str, dtype: int) -> None:
        """Hand features to the network, in the dtype of its parameters."""
        goal = f"{_NETWORK}features"
        if dtype == self.whole:
            self.node("Identity", name, out=goal)
        else:
            self.node("Cast", name, out=goal, to=self.dtype)

    def table(self, recipe: Mapping[str, Any]) -> None:
        """Standardise numbers, mark what is missing, and spread categories over their levels."""
        steps = recipe["columns"]
        numbers = [step for step in steps if step["kind"] == "number"]
        one = self.constant([1], np.int64)
        blocks: list[str] = []
        places: dict[tuple[str, str], list[int]] = {}  # of a column's features in the blocks
        width = 0
        for step in steps:  # in the order of the columns
            self.input(step["name"], self.double if step["kind"] == "number" else self.text)
        if numbers:
            columns = [self.node("Unsqueeze", step["name"], one) for step in numbers]
            raw = self.node("Concat", *columns, axis=1)
            mean = self.constant([step["mean"] for step in numbers], float)
            gone = self.node("IsNaN", raw)
            if recipe["missing"] != "error":  # else a gap stays one: the answer is NaN, no guess
                fill = [step.get("fill", step["mean"]) for step in numbers]
                raw = self.node("Where", gone, self.constant(fill, float), raw)
            scale = self.constant([step["scale"] for step in numbers], float)
            scaled = self.node("Div", self.node("Sub", raw, mean), scale)
            blocks.append(self.node("Cast", scaled, to=self.real))
            places |= {(s["name"], "value"): [i] for i, s in enumerate(numbers)}
            width = len(numbers)
            marked = [i for i, step in enumerate(numbers) if step.get("indicator")]
            if marked:
                chosen = self.node("Gather", gone, self.constant(marked, np.int64), axis=1)
                blocks.append(self.node("Cast", chosen, to=self.real))
                names = [numbers[i]["name"] for i in marked]
                places |= {(name, "gap"): [width + k] for k, name in enumerate(names)}
                width += len(marked)
        for step in steps:
            if step["kind"] == "category" and step["levels"]:
                spread = self.node(
                    "OneHotEncoder",
                    self.node("Unsqueeze", step["name"], one),
                    domain="ai.onnx.ml",
                    cats_strings=step["levels"],
                    zeros=1,  # a level that no client trained on
                )
                blocks.append(self.node("Squeeze", spread, one))
                places[step["name"], "value"] = [*range(width, width + len(step["levels"]))]
                width += len(step["levels"])
        order = [
            place
            for step in steps
            for part in ("value", "gap")
            for place in places.get((step["name"], part), [])
        ]
        joined = self.node("Concat", *blocks, axis=1)
        turn = self.constant(order, np.int64)
        self.features(self.node("Gather", joined, turn, axis=1), self.real)

    def array(self, facts: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> None:
        """Take samples as they are, or standardise every feature or channel."""
        shape = facts["input_shape"]
        if facts.get("tokens"):
            self.features(self.input("tokens", self.whole, shape), self.whole)
        elif recipe is None or recipe["kind"] == "given":
            self.features(self.input("x", self.dtype, shape), self.dtype)
        else:
            x = self.input("x", self.double, shape)
            form = (-1, *([1] * (len(shape) - 1)))
            mean, scale = (np.reshape(recipe[key], form) for key in ("mean", "scale"))
            shifted = self.node("Sub", x, self.constant(mean, float))
            scaled = self.node("Div", shifted, self.constant(scale, float))
            rounded = self.double if recipe.get("dtype") == "float64" else self.real
            self.features(self.node("Cast", scaled, to=rounded), rounded)

    def answer(
        self,
        task: str,
        facts: Mapping[str, Any],
        recipe: Mapping[str, Any] | None,
        names: Sequence[str],
    ) -> None:
        """Turn scores into answers, as ``sartor.results.serving`` does."""
        scores, classes = f"{_NETWORK}scores", facts["num_classes"]
        if task == "regression":
            step = (recipe or {}).get("target", {"mean": 0.0, "scale": 1.0})
            flat = self.node("Reshape", scores, self.constant([-1], np.int64))
            grown = self.node("Mul", flat, self.constant(step["scale"], self.numbers))
            self.node("Add", grown, self.constant(step["mean"], self.numbers), out=names[0])
            self.output(names[0], self.dtype)
            return
        steps = facts["input_shape"] if task == "next-token" else []
        if task == "multilabel":
            over = self.node("Greater", scores, self.constant(0.0, self.numbers))
            self.node("Cast", over, to=self.whole, out=names[0])
            self.node("Sigmoid", scores, out=names[1])
            self.output(names[0], self.whole, [classes])
        else:
            chosen = self.node("ArgMax", scores, axis=-1, keepdims=0)
            self.node("Softmax", scores, axis=-1, out=names[1])
            words = list(facts.get("class_names", []))
            if task == "next-token":
                padding = self.constant(PADDING, np.int64)
                empty = self.node("Equal", "tokens", padding)
                self.node("Where", empty, padding, chosen, out=names[0])
            elif words:
                self.node(
                    "LabelEncoder",
                    chosen,
                    out=names[0],
                    domain="ai.onnx.ml",
                    keys_int64s=list(range(len(words))),
                    values_strings=words,
                )
            else:
                self.node("Identity", chosen, out=names[0])
            self.output(names[0], self.text if words else self.whole, steps)
        self.output(names[1], self.dtype, [*steps, classes])


# ---------------------------------------------------------------------- the check


def made_up(
    facts: Mapping[str, Any], recipe: Mapping[str, Any] | None, count: int = 16
) -> dict[str, Array]:
    """Return samples that a program can be tried on: usual values, gaps, and unknown levels."""
    draw = np.random.default_rng(0)
    found: dict[str, Array] = {}
    steps = (recipe or {}).get("columns", [])
    for name, kind in inputs_of(facts, recipe).items():
        if kind == "number":
            step = next(step for step in steps if step["name"] == name)
            values = step["mean"] + step["scale"] * draw.normal(0.0, 2.0, count)
            if recipe is not None and recipe["missing"] != "error":
                values[draw.random(count) < 0.2] = np.nan
            found[name] = values
        elif kind == "category":
            step = next(step for step in steps if step["name"] == name)
            found[name] = draw.choice([*step["levels"], "a level that nobody has"], count)
        elif kind == "tokens":
            most = facts["num_classes"] if facts["num_classes"] > 2 else 2
            most = len((recipe or {}).get("words", [])) + 2 or most
            found[name] = draw.integers(0, most, (count, *facts["input_shape"]))
        else:
            shape = facts["input_shape"]
            form = (-1, *([1] * (len(shape) - 1)))
            mean = np.reshape((recipe or {}).get("mean", 0.0), form) if shape else 0.0
            scale = np.reshape((recipe or {}).get("scale", 1.0), form) if shape else 1.0
            found[name] = mean + scale * draw.normal(0.0, 1.0, (count, *shape))
    return found


def run_onnx(file: Path, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a program for samples."""
    _, runtime = load_onnx()
    kinds = {"double": np.float64, "float": np.float32, "int64": np.int64, "string": object}
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    fed = {
        one.name: np.asarray(given[one.name]).astype(kinds[one.type[7:-1]])
        for one in session.get_inputs()
    }
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, fed), strict=True))


def check_onnx(
    file: Path,
    network: nn.Module,
    facts: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    task: str,
    dtype: torch.dtype,
) -> float:
    """Return by how much a program differs from the model on made-up samples, at most.

    Raises:
        ModelError: it is more than rounding.
    """
    given = made_up(facts, recipe)
    table = (recipe or {}).get("kind") == "table"
    raw = given if table else next(iter(given.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the samples have cells that no training data had
        features = torch.as_tensor(raw if facts.get("tokens") else prepare(raw, recipe))
    features = features.long() if facts.get("tokens") else features.to(dtype)
    with torch.no_grad():
        scores = network(features)
    worst = 0.0
    for count in (1, len(features)):
        few = {name: values[:count] for name, values in given.items()}
        found = run_onnx(file, few)[outputs_of(task, list(given))[-1]].astype(np.float64)
        own = scores[:count]
        if task == "regression":
            step = (recipe or {}).get("target", {"mean": 0.0, "scale": 1.0})
            wanted = (own * step["scale"] + step["mean"]).reshape(-1)
            unit = abs(step["mean"]) + step["scale"]  # targets have as many digits as these
        else:
            wanted = torch.sigmoid(own) if task == "multilabel" else torch.softmax(own, -1)
            unit = 1.0
        gap = np.abs(found - wanted.double().numpy()).max() / unit
        worst = max(worst, float(gap) if np.isfinite(gap) else np.inf)
    if not worst <= TOLERANCE.get(dtype, 1e-5):
        file.unlink()
        raise ModelError(
            f"The ONNX program differs from the model by {worst:.2g} on made-up samples, so it was "
            f"not kept; please report this network, and {HINT}"
        )
    return worst
