"""The rooms of the package stand in layers: an inner one never imports an outer one.

All imports count: those at the top of a module, those inside of functions, and those that only a
type checker sees. ``python tests/test_layers.py`` prints the drawing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "sartor"

ROOMS = {
    "core": "a method as a record, its task, local training, randomness, what travels",
    "theory": "what the papers prove, as formulas",
    "data": "federations, how they are divided, where their samples come from",
    "models": "networks",
    "compose": "methods made of methods",
    "methods": "one file per method, and the catalogue",
    "engines": "one round, on a CPU, on CUDA, on many processes",
    "results": "scores, costs, tables, predictions",
    "runs": "results and checkpoints as folders",
    "training": "fit, compare, search: rounds until the end",
    "adviser": "whether to federate, before training",
    "analysis": "what happened, after training",
    "reproduce": "the experiments of papers",
    "report": "pages and figures",
    "trackers": "other programs that follow a run",
    "network": "a federation of real machines",
    "sartor": "the public names",
    "cli": "the command line",
}
"""Every room and what it holds, from the inside to the outside."""

TOP = {"__init__": "sartor", "errors": "sartor", "__main__": "cli", "_version": "core"}
"""The modules that may stand beside the rooms, and the room whose rank each has."""

Edges = set[tuple[str, str]]


# ---------------------------------------------------------------------- reading


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package with its file; a package is its ``__init__``."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(module: str) -> Iterator[str]:
    """Return what a module imports anywhere: modules of the package in full, others by name."""
    file = modules()[module]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # from . and from .. count from the package that the module lies in
                above = node.level - (file.name == "__init__.py")
                parts = module.split(".")[: len(module.split(".")) - above]
                base = ".".join([*parts, *([base] if base else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names} & modules().keys()
            yield from inner or {base}
            if inner and len(inner) < len(node.names):
                yield base


@cache
def edges() -> Edges:
    """Return the pairs (module, module that it imports) inside of the package."""
    pairs = {(one, other) for one in modules() for other in imported(one)}
    return {(one, other) for one, other in pairs if other in modules() and one != other}


def room(module: str) -> str:
    """Return the room of a module."""
    parts = module.split(".")
    if len(parts) == 1:
        return TOP["__init__"]
    return TOP.get(parts[1], parts[1])


def rank(module: str) -> int:
    """Return how far outside a module stands."""
    return list(ROOMS).index(room(module))


def cycles(pairs: Edges) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or by way of others."""
    after: dict[str, set[str]] = {module: set() for pair in pairs for module in pair}
    for one, other in pairs:
        after[one].add(other)
    reach = {module: _reachable(module, after) for module in after}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in after
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(start: str, after: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(after[start])
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += after[module]
    return seen


def drawing() -> str:
    """Return the rooms from the outside to the inside, each with the rooms that it imports."""
    width = max(map(len, ROOMS))
    lines = []
    for name in reversed(ROOMS):
        uses = {room(other) for one, other in edges() if room(one) == name} - {name}
        shown = ", ".join(other for other in ROOMS if other in uses) or "torch and numpy alone"
        lines.append(f"{name:<{width}}  {ROOMS[name]}\n{'':<{width}}    imports {shown}")
    return "\n".join(lines)


def _listed(pairs: Edges) -> str:
    return "".join(f"\n  {one} -> {other}" for one, other in sorted(pairs))


# ---------------------------------------------------------------------- the rules


def test_no_room_imports_an_outer_one() -> None:
    outward = {(one, other) for one, other in edges() if rank(other) > rank(one)}
    assert not outward, f"These imports go outwards:{_listed(outward)}"


def test_no_modules_import_one_another() -> None:
    found = cycles(edges())
    inside = {(a, b) for group in found for a, b in edges() if {a, b} <= set(group)}
    assert not found, f"{len(found)} cycles of imports, made of:{_listed(inside)}"


def test_every_module_stands_in_a_room() -> None:
    strangers = [m for m in modules() if m.count(".") and room(m) not in ROOMS]
    assert not strangers, f"These modules stand in no room: {', '.join(strangers)}"
    loose = {file.stem for file in PACKAGE.glob("*.py")} - TOP.keys()
    assert not loose, f"These modules of sartor/ belong into a room: {', '.join(sorted(loose))}"


def test_the_core_imports_torch_and_numpy_alone() -> None:
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    strangers = {
        (one, other)
        for one in modules()
        if one.split(".")[1:2] == ["core"]
        for other in imported(one)
        if other.partition(".")[0] not in allowed and not other.startswith("sartor.core")
    }
    assert not strangers, f"The core imports more than torch and numpy:{_listed(strangers)}"


def test_the_rules_can_fail() -> None:
    pairs = {("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}
    assert cycles(pairs) == [["a", "b", "c"]]
    assert cycles(pairs - {("c", "a")}) == []
    assert rank("sartor.core.tree") < rank("sartor.data") < rank("sartor") < rank("sartor.cli.app")
    assert ("sartor.results.result", "sartor.results.readings") in edges()


def test_the_drawing_shows_every_room() -> None:
    drawn = drawing().splitlines()
    assert [line.split()[0] for line in drawn[::2]] == list(reversed(ROOMS))
    assert drawn[-1].endswith("imports torch and numpy alone")


if __name__ == "__main__":
    print(drawing())
