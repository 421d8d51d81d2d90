"""Trees and settings on disk: safetensors and JSON, written atomically, never pickled.

A file is written under a temporary name in the same folder, flushed to the disk, and then renamed
over the old one; a reader sees the old file or the new one, never half of either.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core.errors import RunFolderError
from sartor.results.tables import jsonable

FORMAT = 1
"""Version of the layout; a folder with a higher one was written by a later release."""
HALF = (".", ".tmp")
"""How the name of a file begins and ends that is not yet whole."""


class LaterFormatError(RunFolderError):
    """A file of a later release: falling back to an older file would lose work silently."""


_HEADER = "sartor"  # the one metadata entry of our safetensors files: a JSON object


# --- names of leaves ----------------------------------------------------------------------------


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescape(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], list[str]]:
    """Return the leaves of a nested dict by joined name, and the names of its empty dicts.

    A ``/`` inside a key is written ``~1`` and a ``~`` is written ``~0``, so that no two trees
    share a name.

    >>> leaves, empty = flatten({"a": {"w": torch.zeros(1)}, "b": {}})
    >>> list(leaves), empty
    (['a/w'], ['b'])
    """
    leaves: dict[str, Tensor] = {}
    empty: list[str] = []
    for key, value in tree.items():
        if not isinstance(key, str):
            raise RunFolderError(
                f"A tree to be stored has the key {key!r} of type {type(key).__name__} at "
                f"{prefix or 'its top'!r}; keys must be strings."
            )
        name = f"{prefix}{_escape(key)}"
        if isinstance(value, Mapping):
            if not value:
                empty.append(name)
            inner, hollow = flatten(value, f"{name}/")
            leaves.update(inner)
            empty += hollow
        else:
            leaves[name] = _as_tensor(name, value)
    return leaves, empty


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu")
        # Leaves may share memory (views, expanded or tied weights), which the format refuses.
        shared = tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()
        layout = torch.contiguous_format
        return tensor.clone(memory_format=layout) if shared else tensor.contiguous()
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise RunFolderError(
            f"Leaf {name!r} is a {type(value).__name__}, which cannot be stored as a tensor; "
            "put texts and settings into the JSON part (meta)."
        ) from error


def unflatten(leaves: Mapping[str, Any], empty: list[str]) -> dict[str, Any]:
    """Return the nested dict that :func:`flatten` took apart.

    >>> unflatten({"a/w": 1}, ["b"])
    {'a': {'w': 1}, 'b': {}}
    """
    tree: dict[str, Any] = {}
    for name, value in [*leaves.items(), *((name, {}) for name in empty)]:
        *path, last = map(_unescape, name.split("/"))
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = value
    return tree


# --- files --------------------------------------------------------------------------------------


@contextmanager
def naming(path: Path, action: str) -> Iterator[None]:
    """Turn an operating-system error into "Cannot ACTION PATH", with its reason and the way out."""
    from safetensors import SafetensorError  # here, because training alone does without it

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        text, reads = str(error), action == "read"
        if number == errno.ENOSPC or "No space left" in text:
            fix = "the disk is full; free some space or choose another folder"
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS) or "Permission denied" in text:
            able, other = ("readable", "") if reads else ("writable", "choose another folder, or ")
            fix = f"it is not {able}; {other}change its rights"
        elif number in (errno.ENOTDIR, errno.EEXIST):
            fix = "a file stands where a folder is needed; choose another folder"
        elif number == errno.ENOENT:
            fix = "check the path"
        elif reads:
            fix = "check the path and the disk, and whether the file was cut short"
        else:
            fix = "check the path and the disk, or choose another folder"
        raise RunFolderError(f"Cannot {action} {path}: {error}; {fix}.") from error


def make_folder(path: Path) -> Path:
    """Make a folder and its parents, if they are not there yet, and return its path."""
    with naming(path, "create"):
        path.mkdir(parents=True, exist_ok=True)
    return path


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file, flush it to the disk, and rename it to ``path``."""
    with naming(path, "write"):
        first, last = HALF
        prefix = f"{first}{path.name}."
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=last, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o644)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk, where folders can be flushed at all."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""

    def fill(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8", newline="")

    replace_file(path, fill)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity become null."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        RunFolderError: the file is missing, unreadable or not JSON.
    """
    with naming(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunFolderError(
            f"{path} is not JSON ({error}); it was damaged or edited. Restore it, or start a new "
            "run folder."
        ) from error


def check_format(found: Any, path: Path) -> None:
    """Refuse a layout of a later release, or none at all.

    Raises:
        LaterFormatError: a later release wrote it.
        RunFolderError: there is no version.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise RunFolderError(
            f"{path} does not say which format it has (found {found!r}, expected {FORMAT}); it "
            "was not written by Sartor, or was edited."
        )
    if found > FORMAT:
        raise LaterFormatError(
            f"{path} has format {found}, and this release of Sartor reads up to {FORMAT}; install "
            "a newer release to open it."
        )


def read_ours(path: Path) -> dict[str, Any]:
    """Return what a JSON file with a format holds; see :func:`read_json`, :func:`check_format`."""
    content = read_json(path)
    check_format(content.get("format"), path)
    return content


def apart(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors that share memory memory of their own, as the file format wants it."""
    seen: set[int] = set()
    found = {}
    for name, leaf in leaves.items():
        home = leaf.untyped_storage().data_ptr()
        found[name] = leaf.clone() if home in seen else leaf
        seen.add(home)
    return found


def write_state(path: Path, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a nested dict of tensors or arrays and a JSON-able dict into one file, atomically."""
    from safetensors.torch import save_file

    leaves, empty = flatten(trees)
    leaves = apart(leaves)
    header = json.dumps({"format": FORMAT, "empty": empty, "meta": meta}, default=jsonable)
    replace_file(path, lambda temporary: save_file(leaves, temporary, metadata={_HEADER: header}))


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree and the dict that :func:`write_state` wrote.

    Raises:
        RunFolderError: the file is missing, cut short, not ours, or of a later release.
    """
    from safetensors import safe_open

    with naming(path, "read"), safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        # Cloned, so that nothing depends on the file once it is replaced by a newer one.
        leaves = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    try:
        header = json.loads(metadata[_HEADER])
    except (KeyError, ValueError) as error:
        raise RunFolderError(
            f"{path} is a safetensors file, but not one of Sartor's; give a file of a run folder "
            "(safetensors itself reads files of other programs)."
        ) from error
    check_format(header.get("format"), path)
    return unflatten(leaves, header["empty"]), header["meta"]


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file: it finds accidents, not attacks."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
