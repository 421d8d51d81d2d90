"""The cells of CSV, TSV and Parquet files, and the samples in the file of one client."""

from __future__ import annotations

import csv
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sartor.core.errors import FederationError, MissingExtraError, did_you_mean
from sartor.data.cells import Array, Note, is_missing, read_column, sample_of, words_of
from sartor.data.checks import raise_faults, some
from sartor.data.numerals import Decimal, by_mark, decimal_of

T = TypeVar("T")

ENDINGS = (".npz", ".csv", ".parquet")  # of the files that ``read_samples`` reads
FILES = (".csv", ".tsv", ".parquet")
"""Endings of files that hold a whole table."""

READERS = {
    ".xlsx": ("read_excel", "pandas openpyxl"),
    ".xlsm": ("read_excel", "pandas openpyxl"),
    ".xls": ("read_excel", "pandas xlrd"),
    ".ods": ("read_excel", "pandas odfpy"),
    ".sav": ("read_spss", "pandas pyreadstat"),
    ".sas7bdat": ("read_sas", "pandas"),
    ".dta": ("read_stata", "pandas"),
    ".feather": ("read_feather", "pandas pyarrow"),
    ".json": ("read_json", "pandas"),
}
"""What pandas reads other files with, and what that needs."""

LABELS = ("y", "label", "target", "class")  # tried in this order when no label column is named


def csv_rows(file: Path) -> list[list[str]]:
    """Return the rows of a CSV or TSV file that are not empty, its header among them.

    Cells are parted by what the first line has most of: commas, semicolons, tabs or bars; or by
    what a first line such as ``sep=;`` says. Text is UTF-8, UTF-16 with its mark, or, with a
    warning, what Windows wrote before.
    """
    return _read(file, lambda reader, _: [row for row in reader if any(row)])


def line_numbers(file: Path) -> list[int]:
    """Return the number of the line of every row of ``csv_rows``, to say where a fault is."""
    return _read(
        file, lambda reader, skipped: [reader.line_num + skipped for row in reader if any(row)]
    )


def _read(file: Path, read: Callable[[Any, int], list[T]]) -> list[T]:
    """Read a file; ``read`` is given a reader, and how many lines it does not count."""
    with file.open("rb") as raw:
        marked = raw.read(2) in (b"\xff\xfe", b"\xfe\xff")
    try:
        return _read_as(file, read, "utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError:
        found = _read_as(file, read, "cp1252", errors="replace")
        warnings.warn(
            f"{file.name} is not UTF-8 and was read as Windows-1252 (Latin-1); if umlauts or "
            "accents look wrong, save it as UTF-8.",
            stacklevel=2,
        )
        return found


def _read_as(
    file: Path, read: Callable[[Any, int], list[T]], encoding: str, errors: str = "strict"
) -> list[T]:
    with file.open(newline="", encoding=encoding, errors=errors) as lines:
        header, skipped = lines.readline(), 0
        if said := re.fullmatch(r"sep=(.)\s*", header, re.IGNORECASE):
            mark, skipped = said[1], 1
        else:
            lines.seek(0)
            marks = "\t,;|" if file.suffix.lower() == ".tsv" else ",;\t|"
            mark = max(marks, key=header.count)
        with _no_collection():
            return read(csv.reader(lines, delimiter=mark), skipped)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put off the search for circular garbage: a million rows, all kept, make it search often."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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


def read_table(file: Path) -> dict[str, Array]:
    """Read the columns of a CSV, TSV or Parquet file, cells of CSV as text.

    Raises:
        FederationError: says what is wrong with the file, every uneven line included.
    """
    if not file.is_file():
        raise FederationError(f"There is no file {file}; check the path.")
    ending = file.suffix.lower()
    if ending not in FILES:
        raise FederationError(other_file(file))
    if ending == ".parquet":
        try:
            return parquet_columns(file)
        except ValueError as error:
            raise FederationError(f"{file} cannot be read: {error}.") from error
    try:
        rows = csv_rows(file)
    except (OSError, UnicodeError, csv.Error) as error:
        raise FederationError(
            f"{file} cannot be read as text: {error}; save it as UTF-8."
        ) from error
    if len(rows) < 2:
        raise FederationError(f"{file} has no rows below its header; it needs one per sample.")
    header = [name.strip() or f"column {i}" for i, name in enumerate(rows.pop(0), 1)]
    faults = []
    if set(map(len, rows)) != {len(header)}:
        pairs = zip(line_numbers(file)[1:], rows, strict=True)
        uneven = [f"{i} has {len(row)}" for i, row in pairs if len(row) != len(header)]
        faults.append(
            f"{len(uneven)} lines of {file.name} do not have {len(header)} cells (line "
            f"{some(uneven, 3)}); every line needs as many as the header."
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        faults.append(
            f"Two columns of {file.name} have the same name: {', '.join(twice)}; rename one of "
            "each."
        )
    raise_faults(faults)
    columns = zip(*rows, strict=True)
    return {
        name: np.array(cells, dtype=object) for name, cells in zip(header, columns, strict=True)
    }


def other_file(file: Path) -> str:
    """Say what to do with a file that is no CSV, TSV or Parquet file."""
    ending = file.suffix.lower()
    if ending in READERS:
        reader, packages = READERS[ending]
        return (
            f"{file} is not a CSV file. Save it as one (in a spreadsheet program: Save As, CSV "
            f"UTF-8), or read it in Python: sartor.Federation.from_dataframe(pandas.{reader}("
            f"{file.name!r}), client=..., label=...), which needs: pip install {packages}."
        )
    fix = "unpack it first" if ending in (".gz", ".zip", ".bz2", ".xz") else "save it as one"
    if ending in (".txt", ".dat", ".data"):
        fix = "if it has a header and one row per sample, rename it to .csv, or .tsv for tabs"
    if ending == ".npz":
        fix = "put one .npz file per client into a folder, and name the folder"
    got = ending or "nothing"
    return f"{file} must end in {', '.join(FILES)}, got {got}; {fix}."


def is_table(path: str | Path) -> bool:
    """Say whether a path names one file rather than a folder with a file per client."""
    file = Path(path).expanduser()
    return not file.is_dir() and (file.is_file() or file.suffix.lower() in (*FILES, *READERS))


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
    decimal = decimal_of(sample_of(column) for column in values.values())
    notes: list[Note] = []
    numbers = [_numbers(name, values[name], decimal, notes) for name in rest]
    # A label that is written with a comma would become classes.
    found = read_column(target, values[target], [], decimal=decimal, notes=notes)
    wrote = any(note.column == target for note in notes)
    y = found[1] if found is not None and wrote else values[target]
    for sentence in words_of(notes):
        warnings.warn(f"{file.name}: {sentence}", stacklevel=2)
    return Table(np.stack(numbers, axis=1), y, rest, target)


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
    header = None if all(map(_is_number, rows[0][:-1])) else rows.pop(0)
    if header is None and len(rows[0]) == 1:
        raise ValueError("it has one column, but features and a label are needed")
    width = len(header or rows[0])
    if set(map(len, rows)) - {width}:
        place = next(i for i, row in enumerate(rows) if len(row) != width)
        number = line_numbers(file)[place + (header is not None)]
        raise ValueError(f"line {number} has {len(rows[place])} cells instead of {width}")
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


def _numbers(
    name: str, column: npt.NDArray[Any], decimal: Decimal, notes: list[Note]
) -> npt.NDArray[np.float64]:
    faults: list[str] = []
    found = read_column(name, column, faults, decimal=decimal, notes=notes)
    if found is not None and found[0] == "number":
        return found[1]
    if any("decimal=" in fault for fault in faults):
        raise ValueError(f"{faults[0][0].lower()}{faults[0][1:]}")
    cells = column.tolist()
    row = next(i for i, cell in enumerate(cells) if not is_missing(cell) and not _is_number(cell))
    raise ValueError(
        f"column {name!r} holds {column[row]!s:.40} in sample {row}, which is not a number; "
        "encode it as numbers first, or say standardise=True (--standardise), which takes "
        "texts for categories"
    )


def _is_number(cell: Any) -> bool:
    return by_mark(cell, ".") is not None or by_mark(cell, ",") is not None
