"""``sartor doctor``: what this machine has, what is missing, and how to get it.

Each finding is ``ok``, ``missing`` (something optional, with the way to get it) or ``wrong``
(something that will fail, with the way to fix it). Only the last makes the exit code 1.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sartor._version import __version__
from sartor.data.datasets import ENVIRONMENT, available, data_folder
from sartor.engines.cpu import compiler as cpp
from sartor.results.tables import Table

State = Literal["ok", "missing", "wrong"]
LOWEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    area: str  # "Sartor", "device", "folders", "data" or "extras"
    what: str  # what was looked at
    state: State
    found: str  # what is there
    fix: str = ""  # how to get or fix it; empty where nothing is to be done


def examine(data_dir: Path | None = None) -> list[Finding]:
    """Examine the packages, the device, the folders, the data sets and the extras."""
    needs = requirements()
    return [
        *_packages(needs.get("", {})),
        *_device(),
        *_folders(data_dir),
        *_data(data_dir),
        *_extras({name: wanted for name, wanted in needs.items() if name}),
    ]


def answer(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings for a program; ``healthy`` is false where something is wrong."""
    return {
        "version": __version__,
        "healthy": not any(one.state == "wrong" for one in findings),
        "findings": [asdict(one) for one in findings],
    }


def tables(findings: list[Finding]) -> list[Table]:
    """Return the findings for a person: what there is, then what to do."""
    looked = Table(
        ["", "what", "state", "found"],
        [[one.area, one.what, one.state, one.found] for one in findings],
    )
    todo = [[one.what, one.fix] for one in findings if one.fix]
    return [looked, Table(["to get or to fix", "how"], todo)] if todo else [looked]


# ---------------------------------------------------------------------- packages


def requirements() -> dict[str, dict[str, str]]:
    """Return extra -> package -> oldest version, from the metadata; "" is the base install."""
    try:
        lines = metadata.requires("sartor") or []
    except metadata.PackageNotFoundError:
        lines = []
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        oldest = re.search(r"[>=]=\s*([\d.]+)", line.partition(";")[0])
        if name:
            wanted = found.setdefault(extra[1] if extra else "", {})
            wanted[name[0]] = oldest[1] if oldest else "0"
    return found


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_older(version: str, oldest: str) -> bool:
    """Say whether a version is older than the oldest that is meant to work.

    >>> is_older("2.9.1", "2.11"), is_older("2.13.0+cpu", "2.11")
    (True, False)
    """

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", text)[0])]

    return numbers(version) < numbers(oldest)


def _packages(needs: dict[str, str]) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= LOWEST_PYTHON
    fix = "" if good else "install Python 3.11 or newer"
    yield Finding("Sartor", "sartor", "ok", f"{__version__}, {Path(__file__).parents[1]}")
    where = f"{python}, {platform.platform(terse=True)}"
    yield Finding("Sartor", "Python", "ok" if good else "wrong", where, fix)
    if not needs:
        fix = "python -m pip install ."
        yield Finding("Sartor", "metadata", "missing", "Sartor is not installed", fix)
    for package, oldest in needs.items():
        version = version_of(package)
        fix = f"python -m pip install '{package}>={oldest}'"
        if version is not None and not is_older(version, oldest):
            yield Finding("Sartor", package, "ok", version)
        else:
            found = "not installed" if version is None else f"{version}, older than {oldest}"
            yield Finding("Sartor", package, "wrong", found, fix)


def _extras(extras: dict[str, dict[str, str]]) -> Iterator[Finding]:
    for extra, wanted in extras.items():
        versions = {package: version_of(package) for package in wanted}
        absent = [p for p, v in versions.items() if v is None or is_older(v, wanted[p])]
        if absent:
            fix = f"python -m pip install 'sartor[{extra}]'"
            yield Finding("extras", extra, "missing", f"without {', '.join(absent)}", fix)
        else:
            listed = ", ".join(f"{package} {version}" for package, version in versions.items())
            yield Finding("extras", extra, "ok", listed)


# ---------------------------------------------------------------------- device and folders


def _device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
            yield Finding("device", f"cuda:{index}", "ok", found)
    else:
        built = "this torch is built without CUDA" if torch.version.cuda is None else "none seen"
        yield Finding("device", "CUDA", "missing", f"{built}; --device cpu is used")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = os.environ.get("OMP_NUM_THREADS")
    words = f"{torch.get_num_threads()} threads on {cores} cores"
    found = words + (f", OMP_NUM_THREADS={limit}" if limit else "")
    yield Finding("device", "threads", "ok", found)
    state: State = "missing" if cpp.library() is None else "ok"
    fix = "" if state == "ok" else "install a C++ compiler, for example with: apt install g++"
    yield Finding("device", "CPU layers", state, cpp.status(), fix)


def _folders(data_dir: Path | None) -> Iterator[Finding]:
    runs = Path("runs")
    where = runs if runs.is_dir() else Path()
    yield _writable("run folders", where, f"{runs.resolve()}", "--out FOLDER, where you may write")
    temporary = Path(tempfile.gettempdir())
    yield _writable("temporary files", temporary, str(temporary), "set TMPDIR to such a folder")
    chosen = data_folder(data_dir)
    if chosen is None:
        fix = f"export {ENVIRONMENT}=FOLDER, or --data-dir FOLDER"
        yield Finding("folders", "data folder", "missing", "none is set", fix)
    elif not chosen.is_dir():
        fix = f"mkdir -p {chosen}, or choose another with {ENVIRONMENT} or --data-dir"
        yield Finding("folders", "data folder", "wrong", f"{chosen} does not exist", fix)
    else:
        yield Finding("folders", "data folder", "ok", str(chosen))


def _writable(what: str, folder: Path, shown: str, fix: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sartor-"):
            return Finding("folders", what, "ok", shown)
    except OSError as error:
        words = f"{shown} cannot be written: {error.strerror}"
        return Finding("folders", what, "wrong", words, fix)


def _data(data_dir: Path | None) -> Iterator[Finding]:
    for entry in available(data_dir):
        if entry.found is not None:
            yield Finding("data", entry.name, "ok", entry.found)
        else:
            yield Finding("data", entry.name, "missing", "not here", f"sartor data {entry.name}")
