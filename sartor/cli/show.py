"""What the user sees: tables and paths on stdout, progress and errors on stderr, JSON on demand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sartor.results.tables import Table, jsonable


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def say(text: str = "", *, quiet: bool = False) -> None:
    """Print a line for a person: on stdout, or on stderr if stdout belongs to JSON (``quiet``)."""
    console(stderr=quiet).print(Text(text))


def note(text: str) -> None:
    """Print a line on stderr."""
    console(stderr=True).print(Text(text, style="yellow"))


def error(text: str) -> None:
    """Print what went wrong, in red, on stderr."""
    console(stderr=True).print(Text.assemble(("Error: ", "bold red"), (text, "red")))


def warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of the library as one line, without the place in the code."""
    note(f"Warning: {message}")


def json_line(value: Any) -> None:
    """Print ``value`` as one line of strict JSON on stdout, the last line of the command."""
    print(json.dumps(jsonable(value), allow_nan=False, ensure_ascii=False), flush=True)


def table(data: Table, *, quiet: bool = False) -> None:
    """Print a table with its notes: drawn on a terminal, aligned text elsewhere."""
    screen = console(stderr=quiet)
    if not screen.is_terminal:
        print(data, file=sys.stderr if quiet else sys.stdout)
        return
    grid = RichTable(box=box.SIMPLE_HEAD, title=data.title or None, title_justify="left")
    grid.pad_edge = False
    for name in data.columns:
        header, right = data.header(name), data.numeric(name) and len(data) > 0
        word = max(map(len, header.split()), default=0)
        grid.add_column(header, justify="right" if right else "left", min_width=word)
    for cells in data.text_rows():
        grid.add_row(*map(Text, cells))
    Console(stderr=quiet, highlight=False).print(grid)
    for line in data.note_lines():
        say(line, quiet=quiet)


def tables(*several: Table, quiet: bool = False) -> None:
    """Print tables, with an empty line between."""
    for number, one in enumerate(several):
        if number:
            say(quiet=quiet)
        table(one, quiet=quiet)


def places(*paths: tuple[str, Path], quiet: bool = False) -> None:
    """Print where files were left: a label and a path a line."""
    width = max(len(label) for label, _ in paths)
    for label, path in paths:
        say(f"{label:<{width}}  {path}", quiet=quiet)
