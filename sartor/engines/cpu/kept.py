"""What outlives the process: a folder of the user's, and in it what trials on this machine chose.

``choices.json`` holds numbers of lanes by the hash of what they depend on. It is only ever an
answer that a trial would give again: one that cannot be read or written is passed over. Delete it
to have everything measured again; with ``SARTOR_CHOICES=0`` it is neither read nor written.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from sartor._version import __version__

_MOST = 1000  # choices: the oldest go


def cache_folder() -> Path:
    """Return the folder for what can be made again; it need not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sartor"


def recalled(signature: Hashable, most: int) -> int | None:
    """Return the number of lanes that was chosen on this machine before, from 1 to ``most``."""
    chosen = _choices().get(_key(signature))
    return chosen if type(chosen) is int and 1 <= chosen <= most else None


def remember(signature: Hashable, lanes: int) -> None:
    """Keep a choice for later processes, if that can be done."""
    if _is_off():
        return
    key = _key(signature)
    others = [(other, value) for other, value in _choices().items() if other != key]
    with suppress(OSError, RuntimeError):
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Others may read or write at the same time: they see the old file or the new one.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place, "choices.json")
            made.write_text(json.dumps(dict([*others[1 - _MOST :], (key, lanes)]), indent=0))
            made.replace(folder / made.name)


def _is_off() -> bool:
    return os.environ.get("SARTOR_CHOICES", "1") == "0"


def _choices() -> dict[str, object]:
    if _is_off():
        return {}
    try:
        found = json.loads((cache_folder() / "choices.json").read_text())
    except (OSError, RuntimeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(signature: Hashable) -> str:
    what = repr((signature, torch.get_num_threads(), _machine()))
    return hashlib.sha256(what.encode()).hexdigest()[:32]


@cache
def _machine() -> tuple[object, ...]:
    """Return what a choice depends on beside the work."""
    name = platform.machine()  # platform.processor() would start a process
    with suppress(OSError, UnicodeDecodeError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line for line in lines if line.startswith("model name")), name)
    return platform.machine(), name, os.cpu_count(), torch.__version__, __version__
