"""How much of the package one round of FedAPA passes through, evaluation included.

    python -m bench.round_size [METHOD] [--list] [--cores N]

Warm rounds of ``fit(METHOD, ...)`` on the default CPU path are watched, in all threads. The lines
of the functions of ``sartor`` that a round enters are counted once each: from ``def`` to the last
line, with and without docstrings, comments and blank lines. Steps are traced when that pays, at a
moment that depends on the machine; so of the watched rounds the one that enters fewest lines is
shown, in which no trace is made. On several cores blocks may be worked in forked processes, which
are not watched.
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

import torch

import sartor
from sartor.training.simulation import Simulation

PACKAGE = Path(sartor.__file__).parent
ROUNDS = range(20, 60)
"""The rounds that are watched."""


def entered(method: str) -> list[set[CodeType]]:
    """Return for each watched round the code of every function of the package that it enters."""
    found: list[set[CodeType]] = [set()]
    watching = False
    step = Simulation.step

    def seen(frame: FrameType, event: str, arg: object) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found[-1].add(frame.f_code)

    def watched(self: Simulation) -> None:
        nonlocal watching
        watching = self.round_index in ROUNDS
        try:
            step(self)
        finally:
            if watching:
                found.append(set())
            watching = False

    federation = sartor.Federation.from_dataset("digits", partition="dirichlet:0.1", clients=20)
    Simulation.step = watched  # type: ignore[method-assign]
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        local = sartor.Local(epochs=1, batch=32, lr=0.05)
        rounds = ROUNDS.stop + 1
        sartor.fit(method, federation, rounds=rounds, local=local, device="cpu", progress=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        Simulation.step = step  # type: ignore[method-assign]
    return found[:-1]


def lines_of(codes: set[CodeType]) -> dict[str, set[int]]:
    """Return the lines of functions, by file."""
    found: dict[str, set[int]] = defaultdict(set)
    for code in codes:
        found[code.co_filename].update(span(code))
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
    parser.add_argument("--cores", type=int, default=1, help="threads of PyTorch")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.cores)

    def size(codes: set[CodeType]) -> int:
        return sum(map(len, lines_of(codes).values()))

    codes = min(entered(wanted.method), key=size)
    names: dict[str, list[str]] = defaultdict(list)
    for code in codes:
        names[code.co_filename].append(f"{code.co_qualname} ({len(span(code))})")
    by_file = lines_of(codes)
    plain = {path: len(lines & code_lines(path)) for path, lines in by_file.items()}
    for path, lines in sorted(by_file.items(), key=lambda item: -len(item[1])):
        print(f"{len(lines):5d} {plain[path]:5d}  {Path(path).relative_to(PACKAGE)}")
        if wanted.list:
            print("".join(f"             {name}\n" for name in sorted(names[path])), end="")
    print(f"{size(codes):5d} {sum(plain.values()):5d}  lines in {len(by_file)} files (all, code)")


if __name__ == "__main__":
    main()
