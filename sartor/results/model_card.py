"""The card of an exported model: what a stranger must know before using it, in Markdown.

Every number comes from the result; what the result does not know is said to be unknown. What only
the owner of the model can say (the licence, what it is meant for) is left open, and marked.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sartor import methods
from sartor._version import __version__
from sartor.data.checks import some
from sartor.results.onnx_program import outputs_of
from sartor.results.readings import POINT_WORDS, Readings
from sartor.results.selection import selection_of
from sartor.results.tables import format_cell

OPEN = "**To be filled in by the owner of the model.**"
JOINED = "newcomers of"
"""Is in the settings of a result whose clients joined after training."""

FEW = 30
"""Test samples below which a measure is called uncertain on the card."""
WORDS = {
    "classification": "one class of a sample",
    "multilabel": "several labels of a sample, each 0 or 1",
    "regression": "a number",
    "next-token": "the next token after every step of a text",
}


def card(
    result: Readings,
    alone: Readings | None,
    client: str,
    run: int,
    recipe: Mapping[str, Any],
    network: nn.Module,
    written: Mapping[str, float | None],
) -> str:
    """Return the card of one client's model.

    Args:
        result: where every number comes from.
        alone: LocalTrain on the same allocations, if it was trained.
        client: the name of the client.
        run: index of the run.
        recipe: what ``recipe.json`` holds.
        network: the model.
        written: the formats in the folder; of ONNX, by how much it differs from the model.
    """
    info = result.config.get("data", {}).get("info", {})
    parts = {
        f"Model of {client}": _about(result, client, run, recipe, network),
        "Data": _data(result, client, run),
        "Measures": _measures(result, alone, client, run),
        "Preparation of samples": _preparation(recipe, info),
        "Use": _use(recipe, written),
        "Intended use and limits": _limits(result, client, run, recipe),
        "What left the client": _left(result, run, recipe),
        "Versions": _versions(result, written),
        "Licence": [OPEN, "", "The licence of Sartor does not cover this model or its data."],
    }
    lines = []
    for level, (title, body) in enumerate(parts.items()):
        lines += [f"{'##' if level else '#'} {title}", "", *body, ""]
    return "\n".join(lines)


def _about(
    result: Readings, client: str, run: int, recipe: Mapping[str, Any], network: nn.Module
) -> list[str]:
    entry = methods.KNOWN.get(str(result.facts().get("method")))
    model, task = recipe["network"], str(recipe["task"])
    count = sum(p.numel() for p in network.parameters())
    name = result.config.get("model", {}).get("class") or (model or {}).get("name") or "a network"
    rounds = (result.stopped[run] or {"round": result.ledger.num_rounds})["round"]
    classes = recipe["class_names"]
    made = f"Trained by {len(result.clients)} clients together; this is the model of one of them"
    if result.method == "local":
        made = "Trained by one client alone, without others"
    elif JOINED in result.config:
        made = "Others had trained together before; this is the model of a client that joined them"
    made += f": {client}."
    lines = [
        f"Predicts {WORDS.get(task, task)}. {made}",
        "",
        f"- Method: {result.method}" + (f", {entry.summary} ({entry.citation})" if entry else ""),
        f"- Network: {name}, {count:,} parameters",
        f"- Training: {rounds} rounds, seed {result.runs[run].seed}"
        + (f", {_settings(result.runs[run].hyper)}" if result.runs[run].hyper else ""),
        f"- The model {POINT_WORDS[result.headline]}",
    ]
    if classes:
        lines.append(f"- {'Labels' if task == 'multilabel' else 'Classes'}: {some(classes, 20)}")
    if "selection" in result.config:
        tried = selection_of(result, run)["candidates"].items()
        weights = {name: one["weights"][_at(result, client)] for name, one in tried}
        used = [f"{name} {100 * weight:.1f} %" for name, weight in weights.items() if weight]
        lines.append(f"- The client's predictions mix these methods: {', '.join(used)}")
    if (ended := result.ended_with(run)) is not None:
        lines.append(f"- The client chose between models, and uses: {ended[_at(result, client)]}")
    return lines


def _data(result: Readings, client: str, run: int) -> list[str]:
    place, known = _at(result, client), result.config.get("data", {})
    info = known.get("info", {})
    source = info.get("dataset") or info.get("source")
    tested = int(result._scores().count[run][place])
    answers = "tokens" if result.config.get("task") == "next-token" else "samples"
    lines = [f"- Source: {source}" if source else "- Source: not recorded"]
    if info.get("dataset"):
        lines[0] += f", divided among the clients: {info.get('partition', 'not recorded')}"
    if info.get("label") is not None:
        label = info["label"]
        lines.append(f"- Label: {label if isinstance(label, str) else ', '.join(label)}")
    counts = None if result.label_counts is None else result.label_counts[run][place]
    if counts is not None and counts.sum() and result.held(run) is not None:
        names = result.facts().get("class_names") or [str(k) for k in range(len(counts))]
        each = [f"{name}: {int(n):,}" for name, n in zip(names, counts, strict=False)]
        lines.append(f"- Trained on {int(counts.sum()):,} samples of {client} ({some(each, 20)})")
        most = int(counts.argmax())
        share = format_cell(counts[most] / counts.sum(), "percent")
        lines.append(f"- {share} % of them are of class {names[most]}")
    if "samples" in known and JOINED not in result.config:
        lines.append(
            f"- All {len(result.clients)} clients trained on {known['samples']['train']:,} samples"
        )
    return [*lines, f"- Tested on {tested:,} {answers} of {client} that nobody trained on"]


def _measures(result: Readings, alone: Readings | None, client: str, run: int) -> list[str]:
    place, metric = _at(result, client), result.headline_metric
    mine = float(result.client_measure(run=run)[place])
    tested = int(result._scores().count[run][place])
    found = {"this model": (mine, result.pooled_measure(run))}
    if alone is not None:
        partner = [one.seed for one in alone.runs].index(result.runs[run].seed)
        theirs = float(alone.client_measure(run=partner)[place]), alone.pooled_measure(partner)
        found = {"trained alone": theirs, **found}
    rows = [(name, *map(metric.text, values)) for name, values in found.items()]
    if alone is not None:
        unit = " points" if metric.is_share else ""
        gains = [metric.gain(*pair) for pair in zip(found["this model"], theirs, strict=True)]
        rows.append(("gain", *(format_cell(one, metric.gain_kind) + unit for one in gains)))
    lines = [
        f"| {metric.name} | {client}, {tested:,} test samples | all clients, pooled |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    if metric.sign < 0:
        gained = "; the gain is what it falls by" if alone is not None else ""
        lines += [f"Of {metric.name} less is better{gained}.", ""]
    if alone is None and result.method != "local":
        lines += ["What the client reaches alone was not measured in this run.", ""]
    if tested < FEW:
        lines += [f"{tested} test samples are few: these numbers are rough.", ""]
    which = f"Run {run} of {len(result.runs)}, by itself: one" if len(result.runs) > 1 else "One"
    return [*lines, f"{which} division into training and test samples, without an interval."]


def _preparation(recipe: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    found, name = recipe["preprocessing"], info.get("dataset")
    inside = (
        "It is inside the ONNX program. For the parameters alone, `recipe.json` has every constant."
    )
    if found is None or found["kind"] == "given":
        scale = f", scale={info['scale']!r}" if "scale" in info else ""
        made = f"`sartor.Federation.from_dataset({name!r}{scale})` gives them"
        lines = [f"None: samples are used as {made if name else 'the federation had them'}."]
    elif found["kind"] == "scale":
        lines = ["Every feature (of images every channel) is standardised.", "", inside]
    elif found["kind"] == "text":
        lines = [
            f"Texts become {found['length']} ids of {len(found['words']):,} known words. The ONNX "
            "program takes ids; `recipe.json` has the words, of which the first has the id 2 "
            "(1 is any other word, 0 fills up)."
        ]
    else:
        lines = ["| column | kind | prepared |", "|---|---|---|"]
        for step in found["columns"]:
            cells = step["name"], step["kind"], _step(step, found["missing"])
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        lines += ["", f"{inside} The constants are those of all clients' training samples."]
    if (target := (found or {}).get("target")) is not None:
        lines += ["", f"The target is {target['scale']:.6g} · score + {target['mean']:.6g}."]
    return lines


def _step(step: Mapping[str, Any], missing: str) -> str:
    if step["kind"] == "category":
        return f"one feature a level: {some(step['levels'], 10)}; any other level is none of them"
    text = f"(value − {step['mean']:.6g}) / {step['scale']:.6g}"
    if missing == "error":
        return f"{text}; must not be missing"
    filled = step.get("fill", step["mean"])
    return f"{text}; missing is {filled:.6g}" + ", and marked" * bool(step.get("indicator"))


def _use(recipe: Mapping[str, Any], written: Mapping[str, float | None]) -> list[str]:
    lines: list[str] = []
    if "onnx" in written:
        inputs, task = recipe["inputs"], str(recipe["task"])
        numbers = "number" in inputs.values()
        gaps = numbers and recipe["preprocessing"]["missing"] != "error"
        outputs = outputs_of(task, list(inputs))
        feeds = [f"    {name!r}: {_example(name, kind, recipe)}," for name, kind in inputs.items()]
        lines += [
            "```python",
            "import numpy as np",
            "import onnxruntime",
            "",
            'session = onnxruntime.InferenceSession("model.onnx")',
            f"samples = {{{'  # np.nan is a missing number' * gaps}",
            *feeds,
            "}",
            f"{', '.join(outputs)} = session.run({outputs!r}, samples)"
            if len(outputs) > 1
            else f"({outputs[0]},) = session.run({outputs!r}, samples)",
            "```",
            "",
            *(
                ["Numbers are float64, categories texts; one entry a sample.", ""]
                if numbers
                else []
            ),
            "On made-up samples the program and the model differ by at most "
            f"{written['onnx']:.1g}{' of a target' * (task == 'regression')}.",
            "",
        ]
    if "safetensors" in written:
        lines.append(
            "`model.safetensors` has the parameters, for `safetensors.torch.load_file`; "
            "`recipe.json` names the network and how its inputs are made."
        )
    return lines


def _example(name: str, kind: str, recipe: Mapping[str, Any]) -> str:
    """Write what one input of the program takes, for one sample."""
    found = recipe["preprocessing"]
    if kind in ("number", "category"):
        step = next(step for step in found["columns"] if step["name"] == name)
        if kind == "number":
            return f"np.array([{float(format(step['mean'], '.4g'))}])"
        level = step["levels"][0] if step["levels"] else ""
        return f"np.array([{level!r}], dtype=object)"
    shape = (1, *recipe["input_shape"])
    if kind == "tokens":
        return f"np.zeros({shape}, dtype=np.int64)"
    exact = found is not None and found["kind"] == "scale"
    return f"np.zeros({shape}, dtype=np.{'float64' if exact else 'float32'})"


def _limits(result: Readings, client: str, run: int, recipe: Mapping[str, Any]) -> list[str]:
    found = recipe["preprocessing"] or {}
    lines = [
        f"What this model is meant for, and who may rely on it: {OPEN}",
        "",
        f"- It fits samples like those of {client}. Nobody has measured it elsewhere.",
        "- It was not checked for fairness between groups of people, for a shift of the data over "
        "time, or against attacks.",
    ]
    if recipe["task"] in ("classification", "multilabel"):
        lines.append("- Its probabilities were not calibrated.")
    counts = None if result.label_counts is None else result.label_counts[run][_at(result, client)]
    if counts is not None and result.held(run) is not None and (counts == 0).any():
        names = recipe["class_names"] or [str(k) for k in range(len(counts))]
        never = [name for name, n in zip(names, counts, strict=False) if n == 0]
        lines.append(f"- {client} had no training samples of these classes: {some(never, 20)}.")
    if found.get("kind") == "table":
        lines.append(
            "- Numbers must have the units of the training data: nothing notices another unit."
        )
        if any(step["kind"] == "category" for step in found["columns"]):
            lines.append(
                "- A level that no client trained on, and an empty one, count as none of the known."
            )
    return lines


def _left(result: Readings, run: int, recipe: Mapping[str, Any]) -> list[str]:
    entry = methods.KNOWN.get(str(result.facts().get("method")))
    travels = "not recorded" if entry is None else entry.travels
    up, down = (float(result.ledger.total(f"bytes_{way}")[run]) for way in ("up", "down"))
    setup = float(result.ledger.setup_bytes[run])
    lines = [
        "The samples themselves did not enter any message. By the method's record:",
        "",
        "- From this client nothing: it only received"
        if JOINED in result.config
        else f"- In a round, for each participant: {travels}",
        *([] if JOINED in result.config else ["- Once: its numbers of samples"]),
        f"- All clients together sent {up / 1e6:,.2f} MB and received {down / 1e6:,.2f} MB"
        + (f"; {setup / 1e6:,.2f} MB besides the rounds" if setup else ""),
    ]
    prepared = recipe["preprocessing"] or {}
    found, kinds = prepared.get("kind"), {step["kind"] for step in prepared.get("columns", [])}
    if JOINED in result.config:
        found = None  # the constants were there before it came
    if found in ("table", "scale"):
        what = "count, sum and sum of squares of every number"
        what += " and of the target" if "target" in prepared else ""
        what += ", and the levels of every category" if "category" in kinds else ""
        if str(prepared.get("missing")).startswith("median"):
            what += ", counts for the median of every number with empty cells"
        lines.append(f"- Once, for the preparation: {what}, over a client's training samples")
    elif found == "text":
        lines.append("- Once, for the preparation: words and how often they occur")
    if "network" not in result.config:
        lines += [
            "",
            "This run was a simulation: all data were in one place, and the above is what a "
            "network would have carried.",
        ]
    return [
        *lines,
        "",
        "A model can reveal something of the samples it was trained on; so can this file.",
    ]


def _versions(result: Readings, written: Mapping[str, float | None]) -> list[str]:
    lines = [
        f"- Exported with Sartor {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    ]
    if "onnx" in written:
        import onnx

        lines[0] += f", onnx {onnx.__version__}"
    prints = result.config.get("fingerprints", {})
    lines += [f"- Fingerprint of the data, seed {seed}: `{word}`" for seed, word in prints.items()]
    return lines


def _at(result: Readings, client: str) -> int:
    return result.clients.index(client)


def _settings(hyper: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in hyper.items() if isinstance(v, int | float))


def _cell(text: str) -> str:
    """Keep a name of the data from ending a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
