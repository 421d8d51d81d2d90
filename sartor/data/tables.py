"""One table with a column that names the client: a data frame, a CSV or Parquet file.

The rows of every client are divided first; means, deviations and levels are then those of training
rows alone (``sartor.data.encoding``), and the label becomes classes, several labels or a target.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data import encoding, text
from sartor.data.arrays import from_arrays
from sartor.data.cells import (
    Array,
    Note,
    distinct,
    is_missing,
    level_of,
    read_column,
    sample_of,
    words_of,
)
from sartor.data.checks import check, raise_faults, some
from sartor.data.numerals import DECIMALS, Decimal, decimal_of
from sartor.data.samples import Samples
from sartor.data.table_files import is_table as is_table
from sartor.data.table_files import read_table as read_table

MOST_CLASSES = 100
"""A label of whole numbers with more values than this is a target, unless the task says so."""

FILLS = ("error", "mean", "median", "indicator", "median+indicator")
"""What may be done with empty cells."""


def from_dataframe(
    frame: Any,
    *,
    client: str,
    label: str | Sequence[str],
    task: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    text_column: str | None = None,
    standardise: bool = True,
    missing: str = "error",
    decimal: Decimal = "auto",
    test: Any = 0.25,
    val: float = 0.0,
    seed: int = 0,
    stratify: bool = False,
    min_samples: int = 0,
    length: int = text.LENGTH,
    vocabulary: int = text.VOCABULARY,
    like: Mapping[str, Any] | None = None,
    source: str = "dataframe",
) -> Samples:
    """Make a federation from a table with one row per sample.

    Args:
        frame: a pandas data frame, or a dict of columns.
        client: the column that names the client of a row.
        label: the column of the label; several columns of 0 and 1 make a multi-label task.
        task: "classification", "multilabel" or "regression". By default several label columns are
            multi-label; text, and whole numbers with at most 100 values, are classes; other numbers
            are targets of a regression.
        drop: columns to leave out.
        categories: columns of numbers that are categories.
        text_column: learn from this column of texts alone, as token ids.
        standardise: give numbers, and the target of a regression, mean 0 and deviation 1 over all
            training rows; predictions and errors are in the units of the table.
        missing: "error" refuses empty cells; "mean" or "median" puts that of all training rows for
            a number, no level for a category; "indicator" puts the mean and adds a feature that is
            1 where a number was missing, for every column of numbers with empty cells;
            "median+indicator" does the same with the median.
        decimal: how numbers in texts are written: "point" (1,234.5), "comma" (1.234,5), or "auto":
            as their columns show, with an error where they do not. What is not written as in Python
            is read with a warning.
        test: the fraction of every client's rows held out for testing; or a column of 0 and 1, or
            booleans, that mark the test rows.
        val: the fraction held out for validation.
        seed: seed of the division.
        stratify: keep the class shares of every client in each part.
        min_samples: leave out clients with fewer training rows than this.
        length: tokens of a text.
        vocabulary: token ids in all.
        like: ``info`` of a federation that was trained, for newcomers: columns, constants and
            classes are then those.
        source: what ``info`` says about the origin.

    Raises:
        FederationError: one message with every fault of the table.

    Example:
        >>> table = {"site": ["a", "a", "b", "b"], "age": [20, 40, 60, 80],
        ...     "sex": ["f", "m", "f", "f"], "ill": [0, 1, 1, 0]}
        >>> from sartor.data import Federation
        >>> fed = Federation.from_dataframe(table, client="site", label="ill", test=0)
        >>> fed.names, fed.info["features"], fed.x[:, 0].abs().sum().item() > 1
        (('a', 'b'), ['age', 'sex=f', 'sex=m'], True)
    """
    for name, word, known_words in (("missing", missing, FILLS), ("decimal", decimal, DECIMALS)):
        if word not in known_words:
            *most, last = map(repr, known_words)
            raise ConfigError(f"{name} must be {', '.join(most)} or {last}, got {word!r}.")
    faults: list[str] = []
    notes: list[Note] = []
    known = dict(like or {})
    labels = [label] if isinstance(label, str) else list(label)
    columns = read_frame(frame, faults)
    marks = test if isinstance(test, str) else None
    wanted: dict[str, Sequence[str | None]]
    wanted = {"client": [client], "label": labels, "drop": drop, "categories": categories}
    wanted |= {"text_column": [text_column], "test": [marks]}
    # Without these columns the others cannot be told apart.
    raise_faults([*faults, *role_faults(columns, wanted)])
    ids = read_clients(columns[client], client, faults)
    special = {client, marks, *labels, *drop}
    rest = [name for name in columns if name not in special]
    if decimal == "auto":
        looked = [name for name in (*rest, *labels) if name not in categories]
        decimal = decimal_of(sample_of(columns[name]) for name in looked)
    read_as: dict[str, Any] = {"decimal": decimal, "notes": notes}
    y, names, kind = read_labels({n: columns[n] for n in labels}, task, ids, faults, read_as)
    if known.get("class_names") and kind == "classification" and y is not None:
        y, names = _renumbered(y, names, list(known["class_names"]), faults)
    read = {}
    for name in rest if text_column is None and like is None else ():
        category = name in categories
        found = read_column(name, columns[name], faults, category=category, **read_as)
        if found is not None:
            faults += encoding.column_faults(name, *found, ids, missing)
            read[name] = found
    if not rest:
        faults.append(
            "There is no column left to learn from besides client and label; add some, or drop "
            "fewer."
        )
    count = len(ids)
    try:
        made = from_arrays(
            np.zeros((count, 1), dtype=np.float32),
            np.zeros(count, dtype=np.int64) if y is None else y,
            client=ids,
            test=test if marks is None else _marks(columns[marks], marks, faults),
            val=val,
            seed=seed,
            stratify=stratify and kind == "classification",
            num_classes=0 if kind == "regression" else None,
            task=None if y is None else kind,
            min_samples=min_samples,
        )
        check(made)
    except FederationError as error:
        raise_faults([*faults, *(getattr(error, "faults", None) or [str(error)])])
        raise
    raise_faults(faults)
    for sentence in words_of(notes):
        warnings.warn(sentence, stacklevel=2)
    rows = [made.train.of(i).numpy() for i in range(made.num_clients)]
    more: dict[str, Any] = {}
    if like is not None:
        recipe = dict(known["preprocessing"])
        features = encoding.prepare(columns, recipe)
    elif text_column is not None:
        features, recipe, more = _text(columns[text_column], text_column, rows, length, vocabulary)
    else:
        steps = _steps(read, rows, standardise, median=missing.startswith("median"))
        if missing.endswith("indicator"):
            steps = encoding.with_indicators(steps, read, rows)
        features = encoding.encode(read, steps)
        recipe = {"kind": "table", "columns": steps, "missing": missing}
        recipe |= {"decimal": decimal} if decimal == "comma" or notes else {}
        more = {"features": encoding.feature_names(steps)}
    if kind == "regression" and y is not None:
        if like is None:
            (step,) = _steps({"y": ("number", y)}, rows, standardise)
            recipe["target"] = {key: step[key] for key in ("mean", "scale")}
        step = recipe["target"]
        scaled = torch.from_numpy(((y - step["mean"]) / step["scale"]).astype(np.float32))
        made = replace(made, y=scaled)
    info = made.info | {"source": source, "client": client, "label": label}
    info |= {"preprocessing": recipe} | more | ({"class_names": names} if names else {})
    return replace(made, x=torch.from_numpy(features), info=info)


def from_file(path: str | Path, *, client: str, label: str | Sequence[str], **rest: Any) -> Samples:
    """Read a CSV, TSV or Parquet file with one row per sample; see ``from_dataframe``.

    A CSV file needs a header. Only Parquet needs an extra package, pyarrow.
    """
    file = Path(path).expanduser()
    return from_dataframe(read_table(file), client=client, label=label, source=file.name, **rest)


# ---------------------------------------------------------------------- parts


def read_frame(frame: Any, faults: list[str]) -> dict[str, Array]:
    """Return the columns of a data frame or a dict."""
    if isinstance(frame, Mapping):
        found = {str(name): np.asarray(values) for name, values in frame.items()}
    elif hasattr(frame, "columns") and hasattr(frame, "__getitem__"):
        names = [str(name) for name in frame.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FederationError(
                f"Two columns have the same name: {', '.join(twice)}; rename one of each."
            )
        found = {str(name): np.asarray(frame[name].to_numpy()) for name in frame.columns}
    else:
        raise FederationError(
            f"The table must be a pandas data frame or a dict of columns, got "
            f"{type(frame).__name__}; for arrays use Federation.from_arrays."
        )
    lengths = {len(values) for values in found.values()}
    if len(lengths) > 1:
        sizes = ", ".join(f"{name} has {len(values)}" for name, values in found.items())
        faults.append(f"The columns have different lengths ({sizes}); each needs one cell per row.")
    if lengths in (set(), {0}):
        faults.append("The table has no rows; a federation needs at least one.")
    return found


def role_faults(
    columns: Mapping[str, Array], wanted: Mapping[str, Sequence[str | None]]
) -> list[str]:
    """List the columns that are named for a role and are not there, or have two roles."""
    faults = [
        f"The table has no column {name!r} ({role}){did_you_mean(str(name), columns)}"
        for role, names in wanted.items()
        for name in names
        if name is not None and name not in columns
    ]
    (client,) = wanted["client"]
    if client in wanted["label"]:
        faults.append(f"Column {client!r} cannot be both client and label.")
    return faults


def read_clients(values: Array, name: str, faults: list[str]) -> Array:
    """Return the name of every row's client."""
    different, places = distinct(values)
    gone = np.flatnonzero(np.array([is_missing(cell) for cell in different])[places]).tolist()
    if gone:
        faults.append(
            f"Column {name!r} names no client in {len(gone)} rows ({some(gone)}); fill them in, or "
            "leave out those rows."
        )
    return np.array([level_of(cell) for cell in different], dtype=np.str_)[places]


def _marks(values: Array, name: str, faults: list[str]) -> Array:
    found = read_column(name, values, faults)
    if found is None or found[0] != "number" or not np.isin(found[1], (0, 1)).all():
        faults.append(f"Column {name!r} must mark test rows with 1 and the others with 0.")
        return np.zeros(len(values), dtype=np.bool_)
    return found[1].astype(np.bool_)


def read_labels(
    columns: Mapping[str, Array],
    task: str | None,
    ids: Array,
    faults: list[str],
    read_as: Mapping[str, Any],
) -> tuple[Array | None, list[str], str]:
    """Return labels (None if something is wrong with them), the names of classes, the task."""
    before, kind = len(faults), task
    parts: list[Array] = []
    names: list[str] = []
    for name, values in columns.items():
        found = read_column(name, values, faults, **read_as)
        if found is None:
            continue
        how, cells = found
        gone = encoding.empty_cells(how, cells)
        if len(gone):
            faults.append(
                f"Label {name!r} is empty in {len(gone)} rows{encoding.where(gone, ids)}; leave "
                "out those rows."
            )
            continue
        if len(columns) > 1 or task == "multilabel":
            kind = "multilabel"
            if how != "number" or not np.isin(cells, (0, 1)).all():
                faults.append(f"Label {name!r} of a multi-label task must be 0 or 1 in every row.")
            parts.append(cells)
            names.append(name)
            continue
        whole = how == "category" or bool((cells == np.floor(cells)).all())
        few = how == "category" or len(np.unique(cells)) <= MOST_CLASSES
        kind = task or ("classification" if whole and few else "regression")
        if kind == "regression" and how == "category":
            faults.append(
                f"Label {name!r} of a regression must be numbers, but it holds text; give numbers, "
                "or task='classification'."
            )
        elif kind == "regression":
            parts.append(cells)
        elif not whole:
            faults.append(
                f"Label {name!r} has values that are not whole; for those use task='regression'."
            )
        else:
            values_, y = np.unique(cells, return_inverse=True)
            shown = [level_of(value) for value in values_.tolist()]
            names = [] if shown == [str(i) for i in range(len(shown))] else shown
            parts.append(y.astype(np.int64))
    if len(faults) > before or not parts:
        return None, [], kind or "classification"
    y = np.stack(parts, axis=1) if kind == "multilabel" else parts[0]
    return y, names, str(kind)


def _steps(
    columns: Mapping[str, tuple[str, Array]],
    rows: Sequence[Array],
    standardise: bool,
    *,
    median: bool = False,
) -> list[dict[str, Any]]:
    """Return the constants of columns by federated statistics of the clients' training rows."""
    steps = encoding.combine_statistics([encoding.client_statistics(columns, r) for r in rows])
    for step in steps:
        if step["kind"] == "number":
            values = columns[step["name"]][1]
            if median:
                step["fill"] = encoding.federated_median([values[r] for r in rows])
            elif not standardise:
                step["fill"] = step["mean"]
            step |= {} if standardise else {"mean": 0.0, "scale": 1.0}
    return steps


def _renumbered(
    y: Array, names: list[str], known: list[str], faults: list[str]
) -> tuple[Array, list[str]]:
    """Give classes the numbers that they had in training."""
    own = names or [str(i) for i in range(int(y.max()) + 1)]
    strange = [name for name in own if name not in known]
    if strange:
        faults.append(
            f"Classes {', '.join(strange[:5])} are not known to the models, which tell apart "
            f"{', '.join(known[:10])}; leave out those rows."
        )
        return y, known
    return np.array([known.index(name) for name in own], dtype=np.int64)[y], known


def _text(
    values: Array, name: str, rows: Sequence[Array], length: int, size: int
) -> tuple[Array, dict[str, Any], dict[str, Any]]:
    words = [text.tokenise("" if is_missing(cell) else str(cell)) for cell in values]
    own = (words[i] for client in rows for i in client.tolist())
    vocabulary = text.make_vocabulary(own, size)
    recipe = {"kind": "text", "column": name, "words": list(vocabulary), "length": length}
    return text.encode(words, vocabulary, length), recipe, {"vocabulary": len(vocabulary) + 2}
