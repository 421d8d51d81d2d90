"""How much of the package one round of FedAPA passes through, evaluation included.

    python -m bench.round_size [METHOD] [--list]

A warm round of ``fit(METHOD, ...)`` on the default CPU path is watched, in all threads. The lines
of the functions of ``sartor`` that it enters are counted once each: from the ``def`` to the last
line, with the lines of docstrings and comments, and without them.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
import tokenize
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sartor
from sartor.training.simulation import Simulation

PACKAGE = Path(sartor.__file__).parent
WARM = 15
"""Rounds before the one that is watched."""


def entered(method: str) -> set[CodeType]:
    """Return the code of every function of the package that one warm round enters."""
    found: set[CodeType] = set()
    watching = False
    step = Simulation.step

    def seen(frame: FrameType, event: str, arg: object) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.add(frame.f_code)

    def watched(simulation: Simulation) -> dict[str, Any]:
        nonlocal watching
        watching = simulation.round_index == WARM
        try:
            return step(simulation)
        finally:
            watching = False

    federation = sartor.Federation.from_dataset("digits", partition="dirichlet:0.1", clients=20)
    Simulation.step = watched  # type: ignore[method-assign]
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        sartor.fit(method, federation, rounds=WARM + 2, device="cpu", progress=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        Simulation.step = step  # type: ignore[method-assign]
    return found


def span(code: CodeType) -> range:
    """Return the lines of a function, those of the functions inside it included."""
    lines = [line for _, _, line in code.co_lines() if line]
    inner = [span(const)[-1] for const in code.co_consts if isinstance(const, CodeType)]
    return range(code.co_firstlineno, max([code.co_firstlineno, *lines, *inner]) + 1)


def code_lines(path: str) -> set[int]:
    """Return the lines of a file that hold code: no comments, docstrings or blank lines."""
    found: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    statement = True
    for token in tokenize.generate_tokens(io.StringIO(Path(path).read_text()).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            statement = True
        elif token.type not in skipped:
            if not (statement and token.type == tokenize.STRING):
                found.update(range(token.start[0], token.end[0] + 1))
            statement = False
    return found


def main() -> None:
    """Print the lines and files of one round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("method", nargs="?", default="fedapa")
    parser.add_argument("--list", action="store_true", help="name the functions of every file")
    wanted = parser.parse_args()
    by_file: dict[str, set[int]] = defaultdict(set)
    names: dict[str, set[str]] = defaultdict(set)
    for code in entered(wanted.method):
        by_file[code.co_filename].update(span(code))
        names[code.co_filename].add(f"{code.co_qualname} ({len(span(code))})")
    whole = sum(map(len, by_file.values()))
    plain = {path: len(lines & code_lines(path)) for path, lines in by_file.items()}
    for path, lines in sorted(by_file.items(), key=lambda item: -len(item[1])):
        print(f"{len(lines):5d} {plain[path]:5d}  {Path(path).relative_to(PACKAGE)}")
        if wanted.list:
            print("".join(f"             {name}\n" for name in sorted(names[path])), end="")
    print(f"{whole:5d} {sum(plain.values()):5d}  lines in {len(by_file)} files (all, code alone)")


if __name__ == "__main__":
    main()
