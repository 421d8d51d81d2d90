"""The core needs torch and numpy, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sartor

SCRIPT = """
import importlib.metadata as metadata
import re
import sys
from importlib.machinery import PathFinder

ALLOWED = {"torch", "numpy", "sartor"}


def plain(name):
    return name.lower().replace("_", "-").replace(".", "-")


def closure(name, seen):
    # What torch and numpy themselves need may be imported; nothing else may.
    if name in seen:
        return seen
    seen.add(name)
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return seen
    for need in needs:
        if "extra ==" not in need:
            closure(plain(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]), seen)
    return seen


dists = set()
for package in ("torch", "numpy"):
    closure(package, dists)
owners = metadata.packages_distributions()
BLOCKED = {
    module
    for module, names in owners.items()
    if module not in ALLOWED and not {plain(n) for n in names} & dists
}
BLOCKED |= {"safetensors", "pydantic", "yaml", "typer", "rich", "matplotlib", "sklearn", "pandas"}


import sartor

strangers = {name.partition(".")[0] for name in sys.modules} & BLOCKED
assert not strangers, strangers


class Hidden:
    # As if they were not installed: neither found nor imported.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return PathFinder.find_spec(name, path, target)


sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
for name in ("safetensors", "pydantic", "matplotlib"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)

import numpy as np

rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 4)), rng.integers(0, 3, 24)
fed = sartor.Federation.from_arrays(x, y, client=np.arange(24) % 4)
small = {"model": sartor.models.dnn(fed, hidden=5), "device": "cpu", "chunk": 4}
for method in sartor.methods.METHODS:
    result = sartor.fit(method, fed, rounds=1, **small)
    assert 0 <= result.accuracy <= 1
    result.model("1"), result.summary(), str(result.per_client())
str(result.gain())
both = sartor.compare(["fedapa"], fed, rounds=1, **small)
str(both.table())
strangers = {name.partition(".")[0] for name in sys.modules} & BLOCKED
assert not strangers, strangers
print("done")
"""


def test_the_core_runs_with_torch_and_numpy_alone(tmp_path) -> None:
    """Import, fit of every method, comparison and gain work with every other package blocked."""
    script = tmp_path / "alone.py"
    script.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:sartor", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(sartor.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",  # tests beside this one have the other cores
        },
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.strip() == "done"
