"""The cells of CSV, TSV and Parquet files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.core.errors import MissingExtraError


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
