"""The cells of CSV, TSV and Parquet files, and the samples in the file of one client."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.core.errors import MissingExtraError, did_you_mean
from sartor.data.encoding import number_of

ENDINGS = (".npz", ".csv", ".parquet")  # of the files that ``read_samples`` reads
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
    """The samples of one file: features ``(samples, ...)``, labels, and their names if any."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    columns: tuple[str, ...] = ()
    label: str = "y"


def read_samples(file: Path, label: str | None, *, as_cells: bool = False) -> Table:
    """Read the file of one client; features are numbers, or cells as they are.

    Without a name, the label is the first of ``LABELS`` that is there, otherwise the last column.

    Raises:
        ValueError: says what is wrong with the file.
    """
    ending = file.suffix.lower()
    if ending == ".npz":
        return _read_npz(file, label)
    values = _parquet_cells(file) if ending == ".parquet" else _csv_cells(file)
    if label is not None and label not in values:
        raise ValueError(f"it has no column {label!r}{did_you_mean(label, values)}")
    target = label or next((name for name in LABELS if name in values), list(values)[-1])
    rest = tuple(name for name in values if name != target)
    if not rest:
        raise ValueError(f"it has no column besides the label {target!r}")
    if as_cells:
        cells = np.stack([values[name].astype(object) for name in rest], axis=1)
        return Table(cells, values[target].astype(object), rest, target)
    numbers = np.stack([_numbers(name, values[name]) for name in rest], axis=1)
    return Table(numbers, values[target], rest, target)


def _read_npz(file: Path, label: str | None) -> Table:
    with np.load(file, allow_pickle=False) as arrays:
        known = list(arrays)
        wanted = label if label is not None else next((k for k in LABELS if k in known), "y")
        for name in ("x", wanted):
            if name not in known:
                raise ValueError(f"it has no array {name!r}{did_you_mean(name, known)}")
        return Table(arrays["x"], arrays[wanted])


def _csv_cells(file: Path) -> dict[str, npt.NDArray[Any]]:
    rows = csv_rows(file)
    if not rows:
        raise ValueError("it is empty")
    header = None if None not in map(number_of, rows[0][:-1]) else rows.pop(0)
    if header is None and len(rows[0]) == 1:
        raise ValueError("it has one column, but features and a label are needed")
    width = len(header or rows[0])
    for number, row in enumerate(rows, 1 + (header is not None)):
        if len(row) != width:
            raise ValueError(f"line {number} has {len(row)} cells instead of {width}")
    columns = [cell.strip() for cell in header] if header else [str(i) for i in range(width)]
    if len(set(columns)) != width:
        raise ValueError("two columns have the same name")
    cells = np.array(rows, dtype=np.str_).reshape(len(rows), width)
    return {name: cells[:, i] for i, name in enumerate(columns)}


def _parquet_cells(file: Path) -> dict[str, npt.NDArray[Any]]:
    return {
        name: values.astype(str) if values.dtype.kind == "O" else values
        for name, values in parquet_columns(file).items()
    }


def _numbers(name: str, column: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    try:
        return column.astype(np.float64)
    except ValueError:
        row = next(i for i, cell in enumerate(column.tolist()) if number_of(cell) is None)
        raise ValueError(
            f"column {name!r} holds {column[row]!s:.40} in sample {row}, which is not a number; "
            "encode it as numbers first, or say standardise=True (--standardise), which takes "
            "texts for categories"
        ) from None
