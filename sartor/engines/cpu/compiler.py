"""The C++ of this package, compiled once for the machine and kept in the user's cache folder.

Without a compiler, or unless it is asked for (``sartor.accelerate``), there is nothing, and the
plain operations of PyTorch do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sartor.engines.cpu.acceleration import is_on, log_once

NAMES = {torch.float32: "float", torch.float64: "double"}
"""Types of numbers that functions are compiled for, and what they are called there."""
_NAMES_OF_FILES = ("native.cpp", "layers.cpp", "recurrence.cpp")
_SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES_OF_FILES)
_HEADER = Path(__file__).with_name("vectors.h")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")


def cache_folder() -> Path:
    """Return the user's folder for what can be made again; it need not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sartor"


def library() -> ctypes.CDLL | None:
    """Return the compiled operations, or None where there are none; see :func:`status`."""
    return _found()[0] if is_on("compile") else None


def status() -> str:
    """Say in words what was found: for people who ask why steps are slow."""
    return _found()[1] if is_on("compile") else "off; sartor.accelerate() asks for them"


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None, "no C++ compiler found; install one (g++ or clang++) for faster steps"
    said = ""
    for threads in (("-fopenmp",), ()):  # without OpenMP there is one thread
        try:
            path = _compiled(compiler, threads)
            log_once("compile", f"Compiled layers in use: {path}")
            return ctypes.CDLL(str(path)), f"compiled, {path}"
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            last = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            said = "".join(last)
    return None, f"{compiler} failed ({said}); plain operations are used"


def _compiled(compiler: str, threads: Sequence[str]) -> Path:
    """Return the library of this source, compiler and processor, compiling it if it is new.

    Raises:
        RuntimeError: it could not be compiled before.
    """
    words = [*shlex.split(compiler), *_FLAGS, *threads]
    version = subprocess.run(
        [*shlex.split(compiler), "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    texts = [source.read_text() for source in (*_SOURCES, _HEADER)]
    what = "\n".join([*texts, *words, version, platform.machine(), _processor()])
    folder = cache_folder()
    path = folder / f"native-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    failed = path.with_suffix(".failed")
    if failed.exists():
        raise RuntimeError(failed.read_text())
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process may compile at the same time; the last one to finish is as good.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place, path.name)
            whole = [*words, "-o", str(made), *map(str, _SOURCES)]
            try:
                subprocess.run(whole, capture_output=True, text=True, check=True, timeout=300)
            except subprocess.CalledProcessError as error:
                if threads:  # there is another way, which is quicker to take at once next time
                    failed.write_text(error.stderr)
                raise
            made.replace(path)
    return path


def _processor() -> str:
    """Return what this processor can do: a library for another one must not be loaded."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def function(name: str, dtype: torch.dtype) -> Any:
    """Return the compiled function of a name, for numbers of a type."""
    return getattr(library(), f"{name}_{NAMES[dtype]}")


def numbers(*values: int) -> Any:
    """Return sizes as a compiled function takes them."""
    return (ctypes.c_int64 * len(values))(*values)


def address(tensor: Tensor | None, lane: int = 0) -> ctypes.c_void_p | None:
    """Return where the numbers of a lane begin; None if there is no tensor."""
    if tensor is None:
        return None
    return ctypes.c_void_p(tensor.data_ptr() + lane * tensor.stride(0) * tensor.element_size())
