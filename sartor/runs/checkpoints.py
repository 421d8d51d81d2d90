"""Checkpoints: the newest and one to fall back on, each one file, with a pointer to both.

A checkpoint gets a new file name, is written and flushed, and only then does ``latest.json`` point
at it; the file before last goes last of all. So at every moment the pointer names whole files. It
also holds their lengths and checksums, which find what a disk or a hasty hand did afterwards.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sartor.core.errors import RunFolderError
from sartor.runs import storage
from sartor.runs.storage import LaterFormatError, naming

KEEP = 2
"""How many checkpoints stay on disk."""

State = tuple[int, dict[str, Any], dict[str, Any]]


def write(
    folder: Path, round_index: int, state: Mapping[str, Any], meta: Mapping[str, Any]
) -> Path:
    """Write a checkpoint, point at it, and remove what is no longer pointed at.

    Raises:
        RunFolderError: it cannot be written; earlier checkpoints are untouched.
    """
    with naming(folder, "create"):
        folder.mkdir(exist_ok=True)
        serial = 1 + max((_serial(name) for name in os.listdir(folder)), default=0)
    entries = _pointer(folder)
    target = folder / f"round-{round_index:06d}-{serial:06d}.safetensors"
    storage.write_state(target, state, {"round": int(round_index), "meta": dict(meta)})
    with naming(target, "read back"):
        size, crc = target.stat().st_size, storage.checksum(target)
    entry = {"file": target.name, "round": int(round_index), "bytes": size, "crc32": crc}
    kept = [entry, *entries][:KEEP]
    storage.write_json(folder / "latest.json", {"format": storage.FORMAT, "checkpoints": kept})
    names = {item["file"] for item in kept} | {"latest.json"}
    for name in set(os.listdir(folder)) - names:
        with suppress(OSError):  # a leftover costs space, not correctness
            (folder / name).unlink()
    return target


def read(folder: Path) -> State | None:
    """Return (round, state, meta) of the newest whole checkpoint, or None if there is none.

    Raises:
        LaterFormatError: a later release wrote it.
        RunFolderError: there are checkpoints, but none of them is whole.
    """
    if not folder.is_dir():
        return None
    faults: list[str] = []
    for entry in _pointer(folder):
        try:
            found = _read_entry(folder / str(entry["file"]), entry)
        except LaterFormatError:
            raise
        except RunFolderError as error:
            faults.append(str(error))
            continue
        if faults:
            warnings.warn(
                f"The newest checkpoint is damaged ({faults[0]}) Resuming from round {found[0]} "
                "instead.",
                stacklevel=3,
            )
        return found
    if faults:
        raise RunFolderError(
            f"No checkpoint in {folder} is whole: {' '.join(faults)} Start the run anew."
        )
    return None


def _pointer(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of latest.json, newest first; the files themselves if it is lost."""
    pointer = folder / "latest.json"
    if pointer.exists():
        try:
            return [dict(entry) for entry in storage.read_ours(pointer)["checkpoints"]]
        except LaterFormatError:
            raise
        except (RunFolderError, KeyError, TypeError, AttributeError, ValueError):
            warnings.warn(f"{pointer} is damaged; looking for checkpoints beside it.", stacklevel=4)
    paths = sorted(folder.glob("round-*.safetensors"), key=lambda path: -_serial(path.name))
    return [{"file": path.name} for path in paths]


def _read_entry(path: Path, entry: Mapping[str, Any]) -> State:
    if "crc32" in entry:
        with naming(path, "read"):
            found = path.stat().st_size, storage.checksum(path)
        if found != (entry["bytes"], entry["crc32"]):
            raise RunFolderError(f"{path} was cut short or changed after it was written.")
    state, header = storage.read_state(path)
    return int(header["round"]), state, header["meta"]


def _serial(name: str) -> int:
    match = re.fullmatch(r"round-\d+-(\d+)\.safetensors", name)
    return int(match[1]) if match else 0
