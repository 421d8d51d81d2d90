"""Predictions for the rows of a file, each by the model of its client, and their scores.

What the models have not met is noted, once for the whole file: empty cells, levels that no client
trained on, numbers far from those of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from sartor.core.errors import ConfigError, FederationError
from sartor.data.cells import Array, is_missing, level_of, read_column
from sartor.data.checks import some
from sartor.data.encoding import columns_of, empty_cells
from sartor.data.table_files import LABELS
from sartor.results.readings import Readings
from sartor.results.score_table import formats_of, measure
from sartor.results.serving import Prediction
from sartor.results.tables import Table

FAR = 10.0
"""Deviations from the mean of training from which a number is called far."""

Predict = Callable[[str, Any], Prediction]
"""``(client, samples) -> answers``."""


class Rows(NamedTuple):
    """Answers for the rows of a file.

    Attributes:
        table: what the file has besides the columns that the models read, and the answers.
        notes: what the models have not met, a sentence each.
        scores: the measures of every client, if the file has the label.
    """

    table: Table
    notes: list[str]
    scores: Table | None


def predict_rows(
    result: Readings,
    predict: Predict,
    columns: Mapping[str, Array],
    client: str | None = None,
    run: int = 0,
) -> Rows:
    """Answer for every row of a table.

    Args:
        result: whose models answer.
        predict: the answers of one client's model.
        columns: of the file: name -> cells; or ``{"x": samples}`` with perhaps "y", of arrays.
        client: whose model answers for all rows; None takes the client that each row names.
        run: index of the run.

    Raises:
        FederationError: lists the columns that are missing or cannot be read.
    """
    facts, recipe = result.facts(), result.recipe(run)
    info = result.config.get("data", {}).get("info", {})
    given = info.get("label") or next((name for name in LABELS if name in columns), "y")
    labels = [given] if isinstance(given, str) else list(given)
    owner = str(info.get("client", "client"))
    notes: list[str] = []
    names = _names(result, columns, owner, client, notes)
    samples, read = _samples(columns, facts, recipe, info, {owner, *labels})
    notes += _surprises(samples, recipe) if isinstance(samples, Mapping) else []
    answers: dict[str, Prediction] = {}
    places: dict[str, Array] = {}
    for name in dict.fromkeys(names.tolist()):
        places[name] = np.flatnonzero(names == name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notes say it for the file as a whole
            answers[name] = predict(name, _taken(samples, places[name]))
    kept = {k: v for k, v in columns.items() if k not in read and np.ndim(v) == 1}
    task = str(result.config.get("task"))
    if owner not in kept:
        kept = {owner: names, **kept}
    table = _table(kept, answers, places, task, facts)
    scores = None
    if all(name in columns for name in labels):
        scores = _scores(columns, labels, answers, places, task, facts, notes)
    return Rows(table, notes, scores)


def _names(
    result: Readings,
    columns: Mapping[str, Array],
    owner: str,
    client: str | None,
    notes: list[str],
) -> Array:
    """Return for every row the name of the client whose model answers."""
    count = len(next(iter(columns.values())))
    known = some(result.clients, 10)
    if owner not in columns:
        if client is None:
            raise ConfigError(
                f"The file has no column {owner!r} that names the client of a row; name the client "
                f"whose model answers (--client NAME). The clients are {known}."
            )
        return np.full(count, client)
    named = [None if is_missing(cell) else level_of(cell) for cell in columns[owner].tolist()]
    if client is not None:
        if others := sum(name not in (None, client) for name in named):
            notes.append(f"{others} of {count} rows name another client than {client!r}.")
        return np.full(count, client)
    strange = sorted({str(name) for name in named if name not in result.clients})
    if strange:
        rows = [i for i, name in enumerate(named) if name not in result.clients]
        raise ConfigError(
            f"Column {owner!r} names clients that have no model: {some(strange)} (rows "
            f"{some(rows)}). The clients are {known}; take the model of one for all rows "
            "(--client NAME), or give newcomers models of their own with sartor onboard."
        )
    return np.array([str(name) for name in named], dtype=object)


def _samples(
    columns: Mapping[str, Array],
    facts: Mapping[str, Any],
    recipe: Mapping[str, Any] | None,
    info: Mapping[str, Any],
    others: set[str],
) -> tuple[Any, list[str]]:
    """Return what ``predict`` takes, and the columns that it is made of."""
    kind = (recipe or {"kind": "given"})["kind"]
    if recipe is not None and kind == "table":
        read = [step["name"] for step in recipe["columns"]]
        if lost := [name for name in read if name not in columns]:
            near = [get_close_matches(name, [*columns], 1) for name in lost]
            hints = [
                f"{found[0]!r} for {n!r}" for n, found in zip(lost, near, strict=True) if found
            ]
            raise FederationError(
                f"The file lacks {len(lost)} of the {len(read)} columns that the models read: "
                f"{some(list(map(repr, lost)), 10)}. It has {some(list(map(repr, columns)), 20)}"
                + (f"; did you mean {some(hints)}?" if hints else "; add them.")
            )
        return {name: columns[name] for name in read}, read
    if recipe is not None and kind == "text":
        read = [recipe["column"]]
        return columns_of(columns, read), read
    if "x" in columns and np.ndim(columns["x"]) > 1:
        return columns["x"], ["x"]
    shape = tuple(facts.get("input_shape", ()))
    if len(shape) != 1:
        raise ConfigError(
            f"The models take samples of shape {shape}, which no table holds; give a .npz file "
            "with an array x of shape (samples, ...)."
        )
    read = list(info.get("columns") or [name for name in columns if name not in others])
    if len(read) != shape[0]:
        raise FederationError(
            f"The models take {shape[0]} numbers a sample, but the file has {len(read)} columns "
            f"besides {some(sorted(others))}: {some(read, 8)}; give the columns of training, in "
            "their order."
        )
    faults: list[str] = []
    numbers = []
    for name, values in columns_of(columns, read).items():
        found = read_column(name, values, faults)
        if found is None:
            continue
        gone = empty_cells(*found)
        if found[0] != "number" or len(gone):
            what = "text" if found[0] != "number" else f"{len(gone)} empty cells"
            faults.append(f"Column {name!r} has {what}; the models take numbers alone.")
        numbers.append(found[1])
    if faults:
        raise FederationError("\n".join(faults))
    return np.stack(numbers, axis=1), read


def _taken(samples: Any, rows: Array) -> Any:
    if isinstance(samples, Mapping):
        return {name: values[rows] for name, values in samples.items()}
    return samples[rows]


def _surprises(columns: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> list[str]:
    """Say what the models have not met in training, and how they take it."""
    notes = []
    steps = (recipe or {}).get("columns", [])
    empty: dict[str, int] = {}
    unmarked: list[str] = []
    for step in steps:
        name, faults = step["name"], list[str]()
        found = read_column(name, columns[name], faults, category=step["kind"] == "category")
        if found is None or found[0] != step["kind"]:
            continue  # ``prepare`` refuses it, with all others
        values = found[1]
        if step["kind"] == "category":
            known = {*step["levels"], ""}
            rows = [i for i, level in enumerate(values.tolist()) if level not in known]
            if rows:
                levels = some(sorted({repr(str(values[i])) for i in rows}))
                notes.append(
                    f"Column {name!r}: {len(rows)} of {len(values)} cells have a level that no "
                    f"client trained on ({levels}; rows {some(rows)}); they count as none of the "
                    f"known: {some(step['levels'], 8)}."
                )
        if gone := len(empty_cells(*found)):
            empty[name] = gone
            if step["kind"] == "number" and not step.get("indicator"):
                unmarked.append(name)
        if step["kind"] == "number":
            away = np.abs(values - step["mean"]) / step["scale"]
            if _is_mark(step):
                away[np.isin(values, (0.0, 1.0))] = 0.0
            far = np.flatnonzero(np.nan_to_num(away, posinf=0.0) > FAR)
            if len(far):
                notes.append(
                    f"Column {name!r}: {len(far)} of {len(values)} numbers are more than {FAR:g} "
                    f"deviations from the mean of training, {step['mean']:.4g} (rows {some(far)}: "
                    f"{some([f'{v:g}' for v in values[far[:6]]])}); are the units the same?"
                )
    if empty and (recipe or {})["missing"] != "error":
        each = some([f"{name} {count}" for name, count in empty.items()], 20)
        notes.append(
            f"Empty cells are filled as in training: {each} of {len(values)} rows."
            + f" Where {some(unmarked)} was empty, no training sample was." * bool(unmarked)
        )
    return notes


def _is_mark(step: Mapping[str, Any]) -> bool:
    """Say whether a column of numbers was 0 or 1 in training: its variance is then p (1 − p)."""
    p = step["mean"]
    return 0.0 <= p <= 1.0 and abs(step["scale"] ** 2 - p * (1.0 - p)) < 1e-9


def _table(
    kept: Mapping[str, Array],
    answers: Mapping[str, Prediction],
    places: Mapping[str, Array],
    task: str,
    facts: Mapping[str, Any],
) -> Table:
    """Put answers beside what else the file says of a row."""
    first = next(iter(answers.values()))
    count = sum(map(len, places.values()))
    classes = list(facts.get("class_names") or range(facts["num_classes"]))
    new: dict[str, Array] = {}

    def fill(name: str, part: Callable[[Prediction], Array]) -> None:
        while name in kept:
            name += "_"
        new[name] = np.empty(count, dtype=object)
        for client, found in answers.items():
            values = part(found).tolist()
            # As a cell of its own: a list of lists would be spread over the rows.
            for row, value in zip(places[client].tolist(), values, strict=True):
                new[name][row] = value

    if task == "regression":
        fill("predicted", lambda found: found.labels)
        if first.deviation is not None:
            fill("deviation", lambda found: np.asarray(found.deviation))
    elif task == "next-token":
        fill("predicted", lambda found: found.labels[:, -1])
    else:
        if task == "classification":
            fill("predicted", lambda found: found.labels)
        for k, name in enumerate(classes):
            if task == "multilabel":
                fill(f"predicted {name}", lambda found, k=k: found.labels[:, k])  # type: ignore[misc]
            fill(f"p({name})", lambda found, k=k: found.scores[:, k])  # type: ignore[misc]
            if first.deviation is not None:
                fill(f"deviation({name})", lambda found, k=k: np.asarray(found.deviation)[:, k])  # type: ignore[misc]
    columns = {**kept, **new}
    rows = [list(row) for row in zip(*(v.tolist() for v in columns.values()), strict=True)]
    return Table(list(columns), rows)


def _scores(
    columns: Mapping[str, Array],
    labels: Sequence[str],
    answers: Mapping[str, Prediction],
    places: Mapping[str, Array],
    task: str,
    facts: Mapping[str, Any],
    notes: list[str],
) -> Table | None:
    """Return the measures of every client over the rows whose label is known to the models."""
    y, known = _truth({name: columns[name] for name in labels}, task, facts, notes)
    if not known.any():
        notes.append("No row has a label that can be scored.")
        return None
    rows: list[list[Any]] = []
    names: list[str] = []
    every: list[tuple[Array, Array]] = []
    for client, found in answers.items():
        fine = known[places[client]]
        if not fine.any():
            continue
        own = y[places[client]][fine], found.scores[fine]
        every.append(own)
        values = measure(task, *own)
        names = list(values)
        rows.append([client, int(fine.sum()), *values.values()])
    if len(rows) > 1:
        pooled = measure(task, *(np.concatenate(part) for part in zip(*every, strict=True)))
        rows.append(["all, pooled", int(known.sum()), *pooled.values()])
    said = {"mind": "rows that a model was trained on score too well"}
    return Table(["client", "samples", *names], rows, said, formats_of(names), title="scores")


def _truth(
    columns: Mapping[str, Array], task: str, facts: Mapping[str, Any], notes: list[str]
) -> tuple[Array, Array]:
    """Return labels as the models number them, and which of them can be scored."""
    classes = list(facts.get("class_names") or map(str, range(facts["num_classes"])))
    found, fine = [], []
    for name, cells in columns.items():
        if np.ndim(cells) > 1:
            cells = np.asarray(cells)
            return cells, np.ones(len(cells), dtype=np.bool_)
        if task == "classification":
            levels = [
                None if is_missing(cell) else _level(cell, classes) for cell in cells.tolist()
            ]
            strange = sorted({level for level in levels if level is not None} - {*classes})
            if strange:
                notes.append(
                    f"Label {name!r}: {some(strange)} is no class of the models, which know "
                    f"{some(classes, 10)}; those rows are not scored."
                )
            place = {level: k for k, level in enumerate(classes)}
            found.append(np.array([place.get(str(level), -1) for level in levels]))
            fine.append(found[-1] >= 0)
            continue
        faults: list[str] = []
        read = read_column(name, cells, faults)
        if read is None or read[0] != "number":
            raise FederationError(
                "\n".join(faults) or f"Label {name!r} holds text, but must be numbers."
            )
        found.append(np.nan_to_num(read[1]))
        fine.append(~np.isnan(read[1]))
    if gone := int((~np.all(fine, axis=0)).sum()):
        notes.append(f"{gone} rows without a known label are predicted and not scored.")
    y = np.stack(found, axis=1) if task == "multilabel" else found[0]
    return y, np.all(fine, axis=0)


def _level(cell: Any, classes: Sequence[str]) -> str:
    """Write a label as the names of classes are: 1, 1.0 and "1.0" are one class."""
    found = level_of(cell)
    try:
        return found if found in classes else level_of(float(cell))
    except (TypeError, ValueError):
        return found
