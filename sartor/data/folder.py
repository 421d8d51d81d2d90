"""A folder with one file per client: npz, CSV or Parquet.

The name of a client is its file's name without the ending. Files called ``NAME.train.npz`` and
``NAME.test.npz`` (any format, all clients alike) bring their own division into train and test.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.data.checks import raise_faults
from sartor.data.federation import Federation
from sartor.errors import FederationError, MissingExtraError, did_you_mean

LABELS = ("y", "label", "target", "class")  # tried in this order when no label column is named


class _Table(NamedTuple):
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    columns: tuple[str, ...]


def from_folder(
    path: str | Path,
    *,
    label: str | None = None,
    test: float = 0.25,
    val: float = 0.0,
    seed: int = 0,
    stratify: bool = False,
    num_classes: int | None = None,
    min_samples: int = 0,
) -> Federation:
    """Read a folder with one file per client.

    Args:
        path: the folder. Files that are not npz, CSV or Parquet are passed over.
        label: the label's column, or array in npz files. By default ``y``, ``label``, ``target``
            or ``class``, whichever is there, otherwise the last column. All other columns are
            features and must be numbers; in npz files the features are the array ``x``.
        test: the fraction of every client's samples held out for testing.
        val: the fraction held out for validation.
        seed: seed of the division.
        stratify: keep the class shares of every client in each part.
        num_classes: the number of classes; 0 for regression.
        min_samples: leave out clients with fewer training samples than this.

    Raises:
        FederationError: lists every file that cannot be used, with the reason.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FederationError(f"{folder} is not a folder; give one that holds a file per client.")
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in _READERS and not file.name.startswith(".")
    )
    if not files:
        raise FederationError(
            f"{folder} holds no file that ends in {', '.join(_READERS)}; put one per client there."
        )
    tables, faults = _read_all(files, label)
    faults += _unlike(tables) + _twice(files)
    raise_faults(faults)
    given = all(file.stem.endswith((".train", ".test")) for file in files)
    stems = [file.stem.rsplit(".", 1)[0] if given else file.stem for file in files]
    names = list(dict.fromkeys(stems))
    sizes = [len(table.y) for table in tables.values()]
    owner = np.repeat([names.index(stem) for stem in stems], sizes)
    held = np.repeat([file.stem.endswith(".test") for file in files], sizes)
    columns = next(iter(tables.values())).columns
    return Federation.from_arrays(
        np.concatenate([table.x for table in tables.values()]),
        _labels([table.y for table in tables.values()]),
        client=owner,
        test=held if given else test,
        val=val,
        seed=seed,
        stratify=stratify,
        num_classes=num_classes,
        names=names,
        min_samples=min_samples,
        info={"source": "folder", "files": len(files), "columns": list(columns)},
    )


def _read_all(files: Sequence[Path], label: str | None) -> tuple[dict[Path, _Table], list[str]]:
    tables: dict[Path, _Table] = {}
    faults = []
    for file in files:
        try:
            table = _READERS[file.suffix.lower()](file, label)
            if table.x.dtype.kind not in "biuf":
                raise ValueError(f"features have dtype {table.x.dtype}; they must be numbers")
            if table.y.ndim != 1 or table.x.ndim == 0 or len(table.x) != len(table.y):
                raise ValueError(
                    f"features of shape {table.x.shape} do not fit labels of shape {table.y.shape}"
                )
            if len(table.y) == 0:
                raise ValueError("it has no samples; give it some, or take the file away")
            tables[file] = table
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, csv.Error) as error:
            reason = str(error).strip('"').rstrip(".") or type(error).__name__
            faults.append(f"File {file.name} cannot be used: {reason}.")
    return tables, faults


def _unlike(tables: dict[Path, _Table]) -> list[str]:
    """List files whose features differ in shape or name from those of the first file."""
    faults = []
    first: Path | None = None
    for file, table in tables.items():
        if first is None:
            first = file
            continue
        other = tables[first]
        if table.x.shape[1:] != other.x.shape[1:]:
            faults.append(
                f"File {file.name} has samples of shape {table.x.shape[1:]}, but {first.name} of "
                f"{other.x.shape[1:]}; all clients need the same features."
            )
        elif table.columns and other.columns and table.columns != other.columns:
            mine = [name for name in table.columns if name not in other.columns]
            what = f"unknown there: {', '.join(mine)}" if mine else "in another order"
            faults.append(
                f"File {file.name} has other columns than {first.name} ({what}); all clients need "
                "the same features in the same order."
            )
    return faults


def _twice(files: Sequence[Path]) -> list[str]:
    stems = [file.stem for file in files]
    return [
        f"Client {stem} has several files; keep one."
        for stem in dict.fromkeys(stems)
        if stems.count(stem) > 1
    ]


def _labels(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join labels; text that reads as numbers everywhere becomes numbers."""
    if all(part.dtype.kind in "biuf" for part in parts):
        return np.concatenate(parts)
    joined = np.concatenate([part.astype(str) for part in parts])
    try:
        return joined.astype(np.float64)
    except ValueError:
        return joined


# ---------------------------------------------------------------------- formats


def _read_npz(file: Path, label: str | None) -> _Table:
    with np.load(file, allow_pickle=False) as arrays:
        known = list(arrays)
        wanted = label if label is not None else next((k for k in LABELS if k in known), "y")
        for name in ("x", wanted):
            if name not in known:
                raise ValueError(f"it has no array {name!r}{did_you_mean(name, known)}")
        return _Table(arrays["x"], arrays[wanted], ())


def _read_csv(file: Path, label: str | None) -> _Table:
    with file.open(newline="", encoding="utf-8-sig") as text:
        rows = [row for row in csv.reader(text) if row]
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
    return _columns({name: cells[:, i] for i, name in enumerate(columns)}, columns, label)


def _read_parquet(file: Path, label: str | None) -> _Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingExtraError(
            'Parquet files need pyarrow; install it with: pip install "sartor[data]"'
        ) from error
    try:
        table = parquet.read_table(file)
        found = {
            name: np.asarray(table.column(name).to_numpy(zero_copy_only=False))
            for name in table.column_names
        }
    except ArrowException as error:
        raise ValueError(str(error)) from error
    texts = {
        name: values.astype(str) if values.dtype.kind == "O" else values
        for name, values in found.items()
    }
    return _columns(texts, list(table.column_names), label)


def _columns(values: dict[str, npt.NDArray[Any]], names: list[str], label: str | None) -> _Table:
    """Take the label's column out and join the others as features."""
    if len(values) != len(names):
        raise ValueError("two columns have the same name")
    if label is not None and label not in values:
        raise ValueError(f"it has no column {label!r}{did_you_mean(label, names)}")
    target = label or next((name for name in LABELS if name in values), names[-1])
    rest = [name for name in names if name != target]
    if not rest:
        raise ValueError(f"it has no column besides the label {target!r}")
    features = []
    for name in rest:
        try:
            features.append(values[name].astype(np.float32))
        except ValueError:
            row = next(i for i, cell in enumerate(values[name].tolist()) if not _is_number(cell))
            raise ValueError(
                f"column {name!r} holds {values[name][row]!s:.40} in sample {row}, which is not a "
                "number; encode it as numbers first"
            ) from None
    return _Table(np.stack(features, axis=1), values[target], tuple(rest))


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_READERS: dict[str, Callable[[Path, str | None], _Table]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
