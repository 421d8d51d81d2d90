"""The cells of CSV, TSV and Parquet files, and the samples in the file of one client."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.core.errors import MissingExtraError, did_you_mean

LABELS = ("y", "label", "target", "class")  # tried in this order when no label column is named


def csv_rows(file: Path) -> list[list[str]]:
    """Return the rows of a CSV or TSV file that are not empty, its header among them.

    Cells are parted by tabs in a file that ends in .tsv; in others by commas, or by semicolons
    where the first line has more of those.
    """
    with file.open(newline="", encoding="utf-8-sig") as lines:
        header = lines.readline()
        mark = ";" if header.count(";") > header.count(",") else ","
        lines.seek(0)
        reader = csv.reader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else mark)
        return [row for row in reader if row]


def parquet_columns(file: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a Parquet file.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ValueError: the file cannot be read.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingExtraError(
            'Parquet files need pyarrow; install it with: pip install "sartor[data]"'
        ) from error
    try:
        names = list(parquet.read_schema(file).names)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two columns have the same name: {', '.join(twice)}")
        table = parquet.read_table(file)
        return {
            name: np.asarray(table.column(name).to_numpy(zero_copy_only=False)) for name in names
        }
    except ArrowException as error:
        raise ValueError(str(error)) from error


class Table(NamedTuple):
    """The samples of one file.

    Attributes:
        x: (samples, ...) features: numbers, or cells as they are.
        y: (samples,) labels.
        columns: names of the features, if they have names.
        label: name of the label.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    columns: tuple[str, ...]
    label: str = "y"


def _read_npz(file: Path, label: str | None) -> Table:
    with np.load(file, allow_pickle=False) as arrays:
        known = list(arrays)
        wanted = label if label is not None else next((k for k in LABELS if k in known), "y")
        for name in ("x", wanted):
            if name not in known:
                raise ValueError(f"it has no array {name!r}{did_you_mean(name, known)}")
        return Table(arrays["x"], arrays[wanted], ())


def _read_csv(file: Path, label: str | None) -> Table:
    return _columns(*_csv_cells(file), label)


def _read_parquet(file: Path, label: str | None) -> Table:
    return _columns(*_parquet_cells(file), label)


def read_cells(file: Path, label: str | None) -> Table:
    """Return the cells of a table as they are, numbers and texts."""
    read = _parquet_cells if file.suffix.lower() == ".parquet" else _csv_cells
    values, names = read(file)
    target = _target(values, names, label)
    rest = tuple(name for name in names if name != target)
    cells = np.empty((len(values[target]), len(rest)), dtype=object)
    for i, name in enumerate(rest):
        cells[:, i] = values[name]
    return Table(cells, values[target].astype(object), rest, target)


def _csv_cells(file: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    rows = csv_rows(file)
    if not rows:
        raise ValueError("it is empty")
    header = None if all(_is_number(cell) for cell in rows[0][:-1]) else rows.pop(0)
    if header is None and len(rows[0]) == 1:
        raise ValueError("it has one column, but features and a label are needed")
    width = len(header or rows[0])
    for number, row in enumerate(rows, 1 + (header is not None)):
        if len(row) != width:
            raise ValueError(f"line {number} has {len(row)} cells instead of {width}")
    columns = [cell.strip() for cell in header] if header else [str(i) for i in range(width)]
    cells = np.array(rows, dtype=np.str_).reshape(len(rows), width)
    return {name: cells[:, i] for i, name in enumerate(columns)}, columns


def _parquet_cells(file: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    found = {
        name: values.astype(str) if values.dtype.kind == "O" else values
        for name, values in parquet_columns(file).items()
    }
    return found, list(found)


def _target(values: dict[str, npt.NDArray[Any]], names: list[str], label: str | None) -> str:
    """Return the label's column: the named one, a known one, or the last."""
    if len(values) != len(names):
        raise ValueError("two columns have the same name")
    if label is not None and label not in values:
        raise ValueError(f"it has no column {label!r}{did_you_mean(label, names)}")
    target = label or next((name for name in LABELS if name in values), names[-1])
    if len(names) == 1:
        raise ValueError(f"it has no column besides the label {target!r}")
    return target


def _columns(values: dict[str, npt.NDArray[Any]], names: list[str], label: str | None) -> Table:
    """Take the label's column out and join the others as features."""
    target = _target(values, names, label)
    rest = [name for name in names if name != target]
    features = []
    for name in rest:
        try:
            features.append(values[name].astype(np.float32))
        except ValueError:
            row = next(i for i, cell in enumerate(values[name].tolist()) if not _is_number(cell))
            raise ValueError(
                f"column {name!r} holds {values[name][row]!s:.40} in sample {row}, which is not a "
                "number; encode it as numbers first, or say standardise=True (--standardise), "
                "which takes texts for categories"
            ) from None
    return Table(np.stack(features, axis=1), values[target], tuple(rest), target)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


READERS: dict[str, Callable[[Path, str | None], Table]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Ending of a file -> what reads it: ``(file, label or None) -> table``."""
