"""Laws of the package: what it needs, what it ships, what its files promise."""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sartor

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", line)[0].lower() for line in requirements}


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md has a line for each dependency and extra of the package."""
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = names(PROJECT["project"]["dependencies"]).union(*map(names, extras))
    assert {name for name in wanted if name not in text} == set()


def test_every_import_is_declared() -> None:
    """What the package imports, at the top or inside a function, is a dependency or an extra."""
    called = {"yaml": "pyyaml", "sklearn": "scikit-learn", "pil": "pillow"}
    called["markupsafe"] = "jinja2"  # a part of it
    called["triton"] = "torch"  # comes with its CUDA builds, and is imported there alone
    imported = set()
    for path in (ROOT / "sartor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0].lower() for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0].lower())
    foreign = imported - {name.lower() for name in sys.stdlib_module_names} - {"sartor"}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = names(PROJECT["project"]["dependencies"])
    parts = ("data", "figures", "hf", "network", "export")
    declared = needed.union(*(names(extras[part]) for part in parts))
    assert {called.get(name, name) for name in foreign} <= declared


def test_every_dependency_is_constrained() -> None:
    """constraints.txt pins each dependency, torch to the release without GPU packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = names(PROJECT["project"]["dependencies"]).union(*map(names, extras))
    assert "torch==2.13.0" in pins
    assert wanted <= names(pins)


def test_no_file_names_a_package_index() -> None:
    """Where packages come from is the machine's business."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"index-url|find-links|https?://", text), name


def test_the_version_stands_once() -> None:
    """The version of the package is the one of sartor/_version.py, and the types are shipped."""
    text = (ROOT / "sartor" / "_version.py").read_text(encoding="utf-8")
    assert f'"{sartor.__version__}"' in text
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert sartor.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "sartor" / "py.typed").exists()


def test_the_base_install_is_small() -> None:
    """At most 15 packages beside torch and what torch needs, by the metadata of this machine."""

    def closure(package: str, seen: set[str]) -> set[str]:
        name = re.sub(r"[-_.]+", "-", package).lower()
        if name in seen:
            return seen
        seen.add(name)
        for line in metadata.requires(name) or []:
            need, _, marker = line.partition(";")
            if "extra" not in marker and "platform_system" not in marker:
                closure(re.split(r"[\s<>=!~(\[]", need.strip())[0], seen)
        return seen

    torch_own = closure("torch", set())
    ours: set[str] = set()
    for package in names(PROJECT["project"]["dependencies"]):
        closure(package, ours)
    assert len(ours - torch_own) <= 15, sorted(ours - torch_own)
    assert len(ours - torch_own) >= len(names(PROJECT["project"]["dependencies"])) - 2


def test_what_the_package_reads_is_shipped() -> None:
    """Files beside the code are kept by git, which decides what goes into the wheel."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    done = subprocess.run(
        ["git", "ls-files", "sartor"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    kept = set(done.stdout.split())
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "sartor").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert there <= kept
    assert {"sartor/data/digits.npz", "sartor/methods/measured.json"} <= there


def test_the_citation_has_the_version() -> None:
    """CITATION.cff names the version and the licence of the package."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == sartor.__version__
    assert cited["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
