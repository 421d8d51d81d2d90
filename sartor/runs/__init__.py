"""Run folders: everything about a run, on disk, readable by people and by Sartor.

::

    folder.json          format and kind of the folder
    config.json          the resolved settings
    environment.json     versions, platform, processor, device
    metrics.csv          run, round, client, point, split, accuracy, loss, count
    ledger.csv           run, round, participants, bytes, gradient evaluations; seconds
    summary.json         one object per run
    result.safetensors   the whole result, exactly
    baseline.safetensors LocalTrain on the same allocations, if it was trained
    checkpoints/         the last two, and latest.json that points at them
    models/              the final weights of every client
    report.html          the page for people
    experiment.json      what a command was asked for; ``sartor resume`` starts from it
    status.json          how far the server of a federation over a network is

A comparison is a folder with one run folder per method and ``comparison.json``; the folder of an
advice holds ``advice.json`` and, once it was verified, ``verification.json``. Every file is
written atomically, so kill -9 at any moment leaves a readable folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor._version import __version__
from sartor.adviser.advice import Advice
from sartor.comparison import Comparison
from sartor.errors import ConfigError, RunFolderError
from sartor.result import Result
from sartor.runs import checkpoints
from sartor.runs.archive import (
    csv_text,
    ledger_rows,
    metric_rows,
    pack_result,
    to_numpy,
    unpack_result,
)
from sartor.runs.storage import (
    FORMAT,
    check_format,
    naming,
    read_json,
    read_state,
    write_json,
    write_state,
    write_text,
)
from sartor.table import jsonable

if TYPE_CHECKING:
    from sartor.adviser.verification import Verification

T = TypeVar("T")

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
    "report.html",
)
_FOLDERS = ("checkpoints", "models")
KINDS = ("run", "comparison", "advice")
"""What a folder may be of."""

Checkpoint = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]


class _Folder:
    """What the folders of a run, of a comparison and of an advice have in common."""

    kind = ""

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
        return cls(cls._prepare(path, config, overwrite), jsonable(config))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing folder of this kind.

        Raises:
            RunFolderError: there is none, it is damaged, or of a later release.
        """
        path = cls._check(path)
        return cls(path, read_json(path / "config.json"))

    @classmethod
    def _prepare(cls, path: str | Path, config: Mapping[str, Any], overwrite: bool) -> Path:
        path = Path(path)
        with naming(path, "create"):
            path.mkdir(parents=True, exist_ok=True)
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
        return path

    @classmethod
    def _check(cls, path: str | Path) -> Path:
        path = Path(path)
        found = folder_kind(path)
        if found != cls.kind:
            raise RunFolderError(
                f"{path} is a {found} folder, expected a {cls.kind} folder; open it with "
                "sartor.runs.open_folder(path)."
            )
        return path

    def check_config(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> None:
        """Refuse to go on with other settings than those the folder was started with.

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


class RunFolder(_Folder):
    """The folder of one run (or of one sweep).

    Make one with :meth:`create` or :meth:`open`.

    Attributes:
        path: where it is.
        config: the resolved settings it was started with.
    """

    kind = "run"

    # --- checkpoints ----------------------------------------------------------------------------

    def write_checkpoint(
        self,
        round_index: int,
        trees: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint atomically and drop all but the last two.

        Args:
            round_index: the number of rounds behind it.
            trees: nested dicts of tensors; any dtype, empty dicts included.
            arrays: nested dicts of numpy arrays.
            meta: JSON-able values.

        Raises:
            RunFolderError: it cannot be written; earlier checkpoints are untouched.
        """
        state = {"trees": trees, "arrays": arrays or {}}
        return checkpoints.write(self.path / "checkpoints", round_index, state, meta or {})

    def read_checkpoint(self) -> Checkpoint | None:
        """Return (round_index, trees, arrays, meta) of the newest whole checkpoint, or None.

        A damaged one is passed over with a warning.

        Raises:
            RunFolderError: there are checkpoints, but none of them is whole.
        """
        found = checkpoints.read(self.path / "checkpoints")
        if found is None:
            return None
        round_index, state, meta = found
        return round_index, state.get("trees", {}), to_numpy(state.get("arrays", {})), meta

    # --- models ---------------------------------------------------------------------------------

    def write_models(
        self, names: Sequence[str], trees: Sequence[Mapping[str, Any]], run: int = 0
    ) -> Path:
        """Write the final weights, one safetensors file per client, and return their folder.

        Args:
            names: names of the clients.
            trees: one (nested) dict of tensors per client.
            run: index of the run in a sweep.
        """
        if len(names) != len(trees):
            raise RunFolderError(
                f"{len(names)} client names for {len(trees)} models; give one model per client."
            )
        folder = self.path / "models" / f"run-{run}"
        with naming(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        width = len(str(max(len(names) - 1, 0)))
        index = {}
        for position, (name, tree) in enumerate(zip(names, trees, strict=True)):
            file = f"{position:0{width}d}-{slug(name)}.safetensors"
            write_state(folder / file, tree, {"client": name})
            index[name] = file
        write_json(folder / "index.json", {"format": FORMAT, "clients": index})
        return folder

    def write_server(
        self, server: Mapping[str, Any], facts: Mapping[str, Any], run: int = 0
    ) -> None:
        """Write the state that newcomers are greeted from, beside the models of a run.

        Args:
            server: a nested dict of tensors.
            facts: JSON-able values.
            run: index of the run in a sweep.
        """
        folder = self.path / "models" / f"run-{run}"
        with naming(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        write_state(folder / "server.safetensors", server, facts)

    def read_server(self, run: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what :meth:`write_server` wrote."""
        file = self.path / "models" / f"run-{run}" / "server.safetensors"
        if not file.exists():
            raise RunFolderError(
                f"{self.path} holds no server of run {run} that newcomers could join; train again "
                "with this release, or use sartor onboard with the training data at hand."
            )
        return read_state(file)

    def read_models(self, run: int = 0) -> dict[str, dict[str, Tensor]]:
        """Return the final weights: client name -> dict of tensors, for ``load_state_dict``."""
        folder = self.path / "models" / f"run-{run}"
        if not (folder / "index.json").exists():
            raise RunFolderError(
                f"{self.path} holds no models of run {run}; they are written when a run ends."
            )
        index = read_json(folder / "index.json")
        check_format(index.get("format"), folder / "index.json")
        return {name: read_state(folder / file)[0] for name, file in index["clients"].items()}

    # --- result ---------------------------------------------------------------------------------

    @property
    def has_result(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "result.safetensors").exists()

    def write_result(self, result: Result) -> None:
        """Write the result: tables for people, and one exact file for Sartor."""
        write_text(self.path / "metrics.csv", csv_text(metric_rows(result)))
        write_text(self.path / "ledger.csv", csv_text(ledger_rows(result)))
        write_json(self.path / "summary.json", result.summaries())
        baseline = result.known_baseline
        if baseline is not None:
            write_state(self.path / "baseline.safetensors", *pack_result(baseline))
        write_state(self.path / "result.safetensors", *pack_result(result))

    def read_result(self) -> Result:
        """Return the result, with its numbers to the last bit.

        Raises:
            RunFolderError: the run has not ended, or the file is damaged.
        """
        if not self.has_result:
            raise RunFolderError(
                f"{self.path} has no result yet: the run did not come to its end. Go on with "
                f"sartor resume {self.path}."
            )
        result = unpack_result(*read_state(self.path / "result.safetensors"))
        if (self.path / "baseline.safetensors").exists():
            baseline = unpack_result(*read_state(self.path / "baseline.safetensors"))
            result.attach_baseline(baseline)
        return result


class ComparisonFolder(_Folder):
    """A folder with one run folder per method, and ``comparison.json``."""

    kind = "comparison"

    def run_path(self, name: str) -> Path:
        """Return where the run folder of a method stands, or will."""
        return self.path / slug(name)

    def write_comparison(self, comparison: Comparison) -> None:
        """Write comparison.json, and the results of methods that have no run folder yet."""
        folders = {name: self.run_path(name).name for name in comparison}
        if len(set(folders.values())) != len(folders):
            raise RunFolderError(
                f"Two methods would share a folder: {folders}; give them names that differ in "
                "letters and digits."
            )
        for name, result in comparison.items():
            path = self.path / folders[name]
            known = (path / "folder.json").exists()
            run = RunFolder.open(path) if known else RunFolder.create(path, result.config)
            if not run.has_result:
                run.write_result(result)
        content = {"format": FORMAT, "folders": folders, **comparison.summary()}
        write_json(self.path / "comparison.json", content)

    def read_comparison(self) -> Comparison:
        """Return the comparison.

        Raises:
            RunFolderError: it has not ended, or a part is missing or damaged.
        """
        if not (self.path / "comparison.json").exists():
            raise RunFolderError(
                f"{self.path} has no comparison yet: it did not come to its end. Go on with "
                f"sartor resume {self.path}."
            )
        content = read_json(self.path / "comparison.json")
        check_format(content.get("format"), self.path / "comparison.json")
        results = {
            name: RunFolder.open(self.path / folder).read_result()
            for name, folder in content["folders"].items()
        }
        return Comparison(results, reference=content.get("reference"), config=self.config)


class AdviceFolder(_Folder):
    """A folder with an advice, and with its verification if there was one."""

    kind = "advice"

    def write_advice(self, advice: Advice) -> None:
        """Write advice.json."""
        write_json(self.path / "advice.json", {"format": FORMAT, **advice.to_dict()})

    def write_verification(self, verification: Verification) -> None:
        """Write verification.json."""
        content = {"format": FORMAT, **verification.to_dict()}
        write_json(self.path / "verification.json", content)

    def read_advice(self) -> tuple[Advice, Verification | None]:
        """Return the advice, to be read but not verified, and its verification if there is one.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        from sartor.adviser.verification import Verification

        found = self._read("advice.json", Advice.from_dict)
        if not (self.path / "verification.json").exists():
            return found, None
        return found, self._read("verification.json", Verification.from_dict)

    def _read(self, name: str, make: Callable[[dict[str, Any]], T]) -> T:
        content = read_json(self.path / name)
        check_format(content.pop("format", None), self.path / name)
        try:
            return make(content)
        except (KeyError, TypeError) as error:
            raise RunFolderError(
                f"{self.path / name} is not whole ({error}); make it anew with sartor advise."
            ) from error


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
    marker = read_json(path / "folder.json")
    check_format(marker.get("format"), path / "folder.json")
    if marker.get("kind") not in KINDS:
        raise RunFolderError(
            f"{path / 'folder.json'} says that this is the folder of a {marker.get('kind')!r}, "
            f"expected one of {', '.join(KINDS)}; it was edited. Restore it."
        )
    return str(marker["kind"])


def open_folder(path: str | Path) -> RunFolder | ComparisonFolder | AdviceFolder:
    """Open the folder of a run, a comparison or an advice, whichever it is."""
    kinds = {kind.kind: kind for kind in (ComparisonFolder, AdviceFolder)}
    return kinds.get(folder_kind(path), RunFolder).open(path)


def environment() -> dict[str, Any]:
    """Return versions, platform and hardware: what is needed to understand a number later."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "sartor": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
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
        inner = _differences(old.get(key), new.get(key), (), f"{prefix}{key}.")
        found.update(inner)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
