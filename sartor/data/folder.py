"""A folder with one file per client, npz, CSV or Parquet; or with one folder of images per client.

The name of a client is its file's name without the ending. Files called ``NAME.train.npz`` and
``NAME.test.npz`` (any format, all clients alike) bring their own division into train and test.
Images lie in ``CLIENT/CLASS/`` (``sartor.data.image_folder``).
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sartor.core.errors import ConfigError, FederationError
from sartor.data import image_folder
from sartor.data.arrays import from_arrays
from sartor.data.checks import check, raise_faults, some
from sartor.data.encoding import prepare
from sartor.data.numerals import Decimal
from sartor.data.samples import Samples
from sartor.data.table_files import ENDINGS, READERS, Table, other_file, read_samples
from sartor.data.tables import from_dataframe


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
    standardise: bool = False,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    missing: str = "error",
    decimal: Decimal = "auto",
    image_size: image_folder.Size | None = None,
    like: Mapping[str, Any] | None = None,
) -> Samples:
    """Read a folder with one file, or one folder of images, per client.

    Args:
        path: the folder. Files that are not npz, CSV or Parquet are passed over; where there are
            none of these, the images in ``CLIENT/CLASS/`` are read.
        label: the label's column, or array in npz files. By default ``y``, ``label``, ``target``
            or ``class``, whichever is there, otherwise the last column. All other columns are
            features and must be numbers; in npz files the features are the array ``x``.
        test: the fraction of every client's samples held out for testing.
        val: the fraction held out for validation.
        seed: seed of the division.
        stratify: keep the class shares of every client in each part.
        num_classes: the number of classes; 0 for regression.
        min_samples: leave out clients with fewer training samples than this.
        standardise: give features mean 0 and deviation 1 by federated statistics of the training
            samples. CSV and Parquet files then become one table: columns of text are categories,
            and the target of a regression is standardised too (``sartor.data.tables``). Of npz
            files it is every feature (of images every channel), see ``Federation.from_arrays``.
        drop: with ``standardise``, columns of CSV and Parquet files to leave out.
        categories: with ``standardise``, columns of numbers in them that are categories.
        missing: with ``standardise``, what is put for empty cells of CSV and Parquet files, see
            ``Federation.from_dataframe``.
        decimal: with ``standardise``, how numbers in them are written, see there.
        image_size: bring images to this height and width, or (height, width).
        like: ``info`` of a federation that was trained, for newcomers: their samples are then
            prepared with the constants of that one.

    Raises:
        FederationError: lists every file that cannot be used, with the reason.
        MissingExtraError: a package for Parquet or for images is missing; says how to install it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        or_table = ", or read one table with Federation.from_file" if folder.is_file() else ""
        raise FederationError(
            f"{folder} is not a folder; give one that holds a file per client{or_table}."
        )
    files = _files(folder)
    recipe = (like or {}).get("preprocessing")
    rest: dict[str, Any] = {"val": val, "seed": seed, "stratify": stratify}
    rest["min_samples"] = min_samples
    whole = {"num_classes": num_classes, "standardise": standardise and recipe is None, **rest}
    if not files and image_folder.has_images(folder):
        images = image_folder.read_images(folder, image_size)
        made = from_arrays(
            images.x,
            images.y,
            client=images.client,
            test=test,
            info={"source": "folder", "files": len(images.y)},
            **whole,
        )
        return _prepared(made, recipe)
    if not files:
        raise FederationError(
            f"{folder} holds no file that ends in {', '.join(ENDINGS)}, and no images in "
            f"CLIENT/CLASS/; {_instead(folder)}"
        )
    given = all(file.stem.endswith((".train", ".test")) for file in files)
    is_test = [file.stem.endswith(".test") for file in files]
    stems = [file.stem.rsplit(".", 1)[0] if given else file.stem for file in files]
    wanted = standardise if recipe is None else recipe["kind"] == "table"
    if wanted and not any(file.suffix.lower() == ".npz" for file in files):
        rest |= {"test": test, "like": like if recipe else None}
        rest |= {"missing": missing, "decimal": decimal, "drop": drop, "categories": categories}
        return _as_table(files, stems, is_test if given else None, label, num_classes, rest)
    wishes = {"missing": missing != "error", "drop": drop, "categories": categories}
    if lost := [name for name, wish in wishes.items() if wish]:
        raise ConfigError(
            f"{' and '.join(lost)} belong to CSV and Parquet files that are prepared as one table; "
            "add standardise=True (--standardise), or leave that out."
        )
    tables = list(_read(files, label, as_cells=False).values())
    names = list(dict.fromkeys(stems))
    sizes = [len(table.y) for table in tables]
    made = from_arrays(
        np.concatenate([table.x for table in tables]),
        _labels([table.y for table in tables]),
        client=np.repeat([names.index(stem) for stem in stems], sizes),
        test=np.repeat(is_test, sizes) if given else test,
        names=names,
        info={
            "source": "folder",
            "files": len(files),
            "columns": list(tables[0].columns),
            "label": tables[0].label,
        },
        **whole,
    )
    return _prepared(made, recipe)


def _instead(folder: Path) -> str:
    """Say what to do with a folder that holds other things than files of clients."""
    inside = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    other = [file for file in inside if file.suffix.lower() in READERS]
    if other:
        return f"it holds {some([file.name for file in other], 3)}. {other_file(other[0])}"
    if pictures := [file for file in inside if file.suffix.lower() in image_folder.ENDINGS]:
        return (
            f"its {len(pictures)} images lie in the folder itself: put them into folders, the "
            "outer named by the client, the inner by the class."
        )
    below = [file for p in inside if p.is_dir() for file in sorted(p.glob("*"))]
    if deep := [file for file in below if file.suffix.lower() in ENDINGS]:
        return (
            f"{len(deep)} such files lie in folders below, such as {deep[0].relative_to(folder)}: "
            f"name one of these folders, or put one file per client into {folder.name} itself."
        )
    return "put one file per client there."


def _prepared(made: Samples, recipe: Mapping[str, Any] | None) -> Samples:
    """Prepare features with the constants of the clients that trained, if there are any."""
    if recipe is None:
        return made
    check(made)
    x = torch.from_numpy(prepare(made.x.numpy(), recipe))
    return replace(made, x=x, info=made.info | {"preprocessing": recipe})


def _as_table(
    files: Sequence[Path],
    stems: Sequence[str],
    held: Sequence[bool] | None,
    label: str | None,
    num_classes: int | None,
    rest: dict[str, Any],
) -> Samples:
    """Join CSV and Parquet files to one table, prepared by federated statistics."""
    table, client, target, sizes = _joined(files, stems, label)
    if held is not None:
        rest = {**rest, "test": np.repeat(held, sizes)}
    task = {None: None, 0: "regression"}.get(num_classes, "classification")
    made = from_dataframe(table, client=client, label=target, task=task, source="folder", **rest)
    columns = [name for name in table if name not in (client, target)]
    about = {"files": len(files), "columns": columns}
    classes = max(made.num_classes, num_classes or 0)
    return replace(made, num_classes=classes, info=made.info | about)


def _joined(
    files: Sequence[Path], stems: Sequence[str], label: str | None
) -> tuple[dict[str, Any], str, str, list[int]]:
    """Return the columns of all files, the names of client and label among them, and sizes."""
    found = list(_read(files, label, as_cells=True).values())
    _, _, columns, target = found[0]
    sizes = [len(cells.y) for cells in found]
    client = "client"
    while client in (*columns, target):
        client += "_"
    cells = np.concatenate([one.x for one in found])
    table = {name: cells[:, i] for i, name in enumerate(columns)}
    table |= {target: np.concatenate([one.y for one in found])}
    table |= {client: np.repeat(np.array(stems, dtype=object), sizes)}
    return table, client, target, sizes


def table_of(path: str | Path, label: str | None) -> tuple[dict[str, Any], str, str]:
    """Return the CSV and Parquet files of a folder as one table, and its client and label columns.

    Raises:
        FederationError: there are none, or files that cannot be used.
    """
    folder = Path(path).expanduser()
    if not holds_tables(folder):
        raise FederationError(f"{folder} holds no CSV or Parquet files of clients, but other data.")
    files = _files(folder)
    given = all(file.stem.endswith((".train", ".test")) for file in files)
    stems = [file.stem.rsplit(".", 1)[0] if given else file.stem for file in files]
    return _joined(files, stems, label)[:3]


def holds_tables(folder: Path) -> bool:
    """Say whether a folder holds CSV or Parquet files of clients, and nothing but those."""
    files = _files(folder)
    return bool(files) and not any(file.suffix.lower() == ".npz" for file in files)


def _files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    )


def _read(files: Sequence[Path], label: str | None, *, as_cells: bool) -> dict[Path, Table]:
    """Read every file, or list what cannot be used, and what does not fit together."""
    tables: dict[Path, Table] = {}
    faults = []
    for file in files:
        try:
            table = read_samples(file, label, as_cells=as_cells)
            if not as_cells and table.x.dtype.kind not in "biuf":
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
    stems = [file.stem for file in files]
    twice = [stem for stem in dict.fromkeys(stems) if stems.count(stem) > 1]
    faults += _unlike(tables) + [f"Client {stem} has several files; keep one." for stem in twice]
    raise_faults(faults)
    return tables


def _unlike(tables: dict[Path, Table]) -> list[str]:
    """List files whose features differ in shape or name from those of the first file."""
    faults = []
    for file, table in tables.items():
        first, other = next(iter(tables.items()))
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


def _labels(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join labels; text that reads as numbers everywhere becomes numbers."""
    if all(part.dtype.kind in "biuf" for part in parts):
        return np.concatenate(parts)
    joined = np.concatenate([part.astype(str) for part in parts])
    try:
        return joined.astype(np.float64)
    except ValueError:
        return joined
