"""What the folders of a run, of a comparison and of an advice share: made, opened, not mixed up."""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from sartor._version import __version__
from sartor.core.errors import ConfigError, RunFolderError
from sartor.results.tables import jsonable
from sartor.runs.storage import FORMAT, HALF, make_folder, naming, read_json, read_ours, write_json

_FILES = (
    "config.json",
    "environment.json",
    "metrics.csv",
    "ledger.csv",
    "summary.json",
    "comparison.json",
    "result.safetensors",
    "baseline.safetensors",
    "advice.json",
    "verification.json",
    "clients.json",
    "report.html",
)
_FOLDERS = ("checkpoints", "models")
KINDS = ("run", "comparison", "advice")
"""What a folder may be of."""


class Folder:
    """What the folders of a run, of a comparison and of an advice have in common."""

    kind = ""
    known: ClassVar[dict[str, type[Folder]]] = {}

    def __init_subclass__(cls) -> None:
        """Note which class opens folders of a kind; outer rooms bring kinds of their own."""
        Folder.known[cls.kind] = cls

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def __repr__(self) -> str:
        """Return kind and path."""
        return f"<{type(self).__name__} {self.path}>"

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], overwrite: bool = False) -> Self:
        """Make a new folder and write its settings and environment.

        Args:
            path: the folder; parents are made.
            config: JSON-able resolved settings.
            overwrite: replace an earlier run there. Files that are not Sartor's stay.

        Raises:
            RunFolderError: the folder is taken, or cannot be written.
        """
        path = make_folder(Path(path))
        taken = [name for name in ("folder.json", *_FILES, *_FOLDERS) if (path / name).exists()]
        if _cut_short(path, taken, config):
            taken = []
        if taken and not overwrite:
            raise RunFolderError(
                f"{path} already holds a run ({', '.join(taken[:3])}); continue it with "
                "resume=True, choose another folder, or pass overwrite=True to replace it."
            )
        if taken and not (path / "folder.json").exists():
            raise RunFolderError(
                f"{path} has files of the same names ({', '.join(taken[:3])}) but is not a run "
                "folder of Sartor, so it is not overwritten; choose another folder."
            )
        if taken:
            with naming(path, "clear"):
                _clear(path, inner=folder_kind(path) == "comparison")
        write_json(path / "config.json", config)
        write_json(path / "environment.json", environment())
        # Last: a folder with folder.json is a whole one.
        marker = {"format": FORMAT, "kind": cls.kind, "written_by": f"sartor {__version__}"}
        write_json(path / "folder.json", marker)
        return cls(path, jsonable(config))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing folder of this kind.

        Raises:
            RunFolderError: there is none, it is damaged, or of a later release.
        """
        path = Path(path)
        found = folder_kind(path)
        if found != cls.kind:
            raise RunFolderError(
                f"{path} is a {found} folder, expected a {cls.kind} folder; open it with "
                "sartor.runs.open_folder(path)."
            )
        return cls(path, read_json(path / "config.json"))

    def tidy(self) -> None:
        """Remove the half-written files of a writer that was killed, before resuming."""
        first, last = HALF
        halves = [f"{first}{name}.*{last}" for name in (*_FILES, "folder.json", "experiment.json")]
        halves += [f"{name}/{first}*{last}" for name in _FOLDERS]
        for leftover in itertools.chain.from_iterable(map(self.path.glob, halves)):
            with suppress(OSError):  # it costs space, not correctness
                leftover.unlink()

    def check_config(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        """Refuse to resume with other settings than those the folder was started with.

        Args:
            config: the settings now.
            ignore: top-level keys that may differ.

        Raises:
            ConfigError: names every key that differs, with both values.
        """
        differing = _differences(self.config, jsonable(config), ignore)
        if differing:
            listed = "; ".join(
                f"{key}: {_short(old)} in the folder, {_short(new)} now"
                for key, (old, new) in differing.items()
            )
            raise ConfigError(
                f"{self.path} was started with other settings: {listed}. Resume with the "
                "settings of its config.json, or start a new folder."
            )


def folder_kind(path: str | Path) -> str:
    """Return "run", "comparison" or "advice".

    Raises:
        RunFolderError: there is no folder of Sartor's, or it is of a later release.
    """
    path = Path(path)
    if not path.is_dir():
        raise RunFolderError(f"There is no folder {path}; check the path.")
    if not (path / "folder.json").exists():
        raise RunFolderError(
            f"{path} is not a run folder of Sartor (it has no folder.json); a folder written by "
            "fit(..., out=path) or sartor run --out has one."
        )
    marker = read_ours(path / "folder.json")
    if marker.get("kind") not in KINDS:
        raise RunFolderError(
            f"{path / 'folder.json'} says that this is the folder of a {marker.get('kind')!r}, "
            f"expected one of {', '.join(KINDS)}; it was edited. Restore it."
        )
    return str(marker["kind"])


def open_folder(path: str | Path) -> Folder:
    """Open the folder of a run, a comparison or an advice, whichever it is."""
    return Folder.known[folder_kind(path)].open(path)


def environment() -> dict[str, Any]:
    """Return versions, platform and hardware: what is needed to understand a number later."""
    return {
        "sartor": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "byteorder": sys.byteorder,
    }


def slug(name: str) -> str:
    """Return a name that is safe as a file name on every system.

    >>> slug("../ward 3/<b>")
    'ward_3_b'
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._")[:60] or "client"


# --- small parts --------------------------------------------------------------------------------


def _clear(path: Path, inner: bool) -> None:
    """Remove what Sartor wrote into a folder, and with ``inner`` the runs in it; nothing else."""
    (path / "folder.json").unlink(missing_ok=True)
    for name in _FILES:
        (path / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
    for page in (path / "clients").glob("*.html"):  # of clients that may no longer be there
        page.unlink()
    if not inner:
        return
    for folder in path.iterdir():
        if folder.is_dir() and (folder / "folder.json").exists():
            _clear(folder, inner)
            with suppress(OSError):  # something of the user's is in it
                folder.rmdir()


def _cut_short(path: Path, taken: Collection[str], config: Mapping[str, Any]) -> bool:
    """Say whether a folder with these same settings was being made here when its maker was killed.

    Nothing but settings and environment is there then, and no folder.json.
    """
    if "config.json" not in taken or not {*taken} <= {"config.json", "environment.json"}:
        return False
    with suppress(RunFolderError):
        return bool(read_json(path / "config.json") == jsonable(config))
    return False


def _differences(
    old: Any, new: Any, ignore: Collection[str] = (), prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix.rstrip("."): (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new} - set(ignore)):
        found |= _differences(old.get(key), new.get(key), (), f"{prefix}{key}.")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
