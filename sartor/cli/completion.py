"""What the shell completes besides commands and flags: methods, models, data sets, run folders.

``sartor --install-completion`` sets it up. A function gets the word so far and returns words; with
commas it completes the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sartor.cli.config import SUFFIXES
from sartor.data.layouts import DATASETS
from sartor.data.table_files import FILES
from sartor.methods import KNOWN
from sartor.models import MODELS
from sartor.training.schema import Setting

Complete = Callable[[str], list[str]]

MARKS = ("folder.json", "experiment.json")
"""A folder with one of these is the folder of a run."""


def _last_of(words: Callable[[], Iterable[str]]) -> Complete:
    """Complete the last of several words with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = set(before.split(","))
        return [
            f"{before}{comma}{word}"
            for word in words()
            if word.startswith(last) and word not in given
        ]

    return complete


methods = _last_of(lambda: sorted(KNOWN))
models = _last_of(lambda: sorted(MODELS))


def targets(incomplete: str) -> list[str]:
    """Complete a method, or an experiment file."""
    return [*methods(incomplete), *_paths(incomplete, SUFFIXES)]


def data(incomplete: str) -> list[str]:
    """Complete a data set, a table, or a folder."""
    names = [name for name in sorted(DATASETS) if name.startswith(incomplete)]
    return [*names, *_paths(incomplete, FILES)]


def tables(incomplete: str) -> list[str]:
    """Complete a file of samples."""
    return _paths(incomplete, (*FILES, ".npz"))


def run_folders(incomplete: str) -> list[str]:
    """Complete the folder of a run; of other folders, those that may be on the way to one."""
    found = _paths(incomplete, ())
    if incomplete == "" and "runs/" in found:
        return run_folders("runs/") or found
    return [path.rstrip("/") if _is_run(path) else path for path in found]


def of_setting(setting: Setting) -> Complete | None:
    """Return how the flag of a setting is completed, if words are known for it."""
    known = {"data": data, "model": models}
    if setting.choices is None:
        return known.get(setting.name)
    return _last_of(lambda: sorted(map(str, setting.choices or ())))


def _is_run(path: str) -> bool:
    return any((Path(path).expanduser() / mark).is_file() for mark in MARKS)


def _paths(incomplete: str, files: tuple[str, ...]) -> list[str]:
    """Return the folders, and the files of some endings, that a word may stand for.

    A shell puts a space behind a word that is the only one, so a single folder that is no run gives
    what is inside.
    """
    before, slash, last = incomplete.rpartition("/")
    place = Path(before + slash).expanduser() if slash else Path()
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return []
    found = [
        f"{before}{slash}{entry.name}{'/' * entry.is_dir()}"
        for entry in entries
        if entry.name.startswith(last)
        and (last.startswith(".") or not entry.name.startswith("."))
        and (entry.is_dir() or entry.suffix.lower() in files)
    ]
    if len(found) == 1 and found[0].endswith("/") and not _is_run(found[0]):
        return _paths(found[0], files) or found
    return found
