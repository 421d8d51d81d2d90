"""What a command that trained prints at its end: tables, places and, if asked, a line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sartor.cli import show, work
from sartor.cli.config import Experiment
from sartor.cli.settings import kind_of
from sartor.engines.shard.processes import is_first
from sartor.results.tables import Table

if TYPE_CHECKING:
    from sartor.results.comparison import Comparison

MOST_CLIENTS = 40
"""Rows of a table of clients on the screen; the report has them all."""


def finish(experiment: Experiment, results: Comparison, out: Path, *, json: bool) -> None:
    """Print the table, where the files are, and, if asked, the last line of JSON."""
    places = work.write_page(out) if is_first() else [("Files", out)]
    show.table(results.table(), quiet=json)
    for table in _gains(experiment, results, quiet=json) or _endings(results):
        show.say(quiet=json)
        show.table(table, quiet=json)
    show.places(*places, quiet=json)
    if json:
        rows = [
            {**row, "out": str(work.folder_of(experiment, row["name"], out))}
            for row in results.summaries()
        ]
        show.json_line(rows[0] if experiment.is_single else rows)


def _gains(experiment: Experiment, results: Comparison, *, quiet: bool) -> list[Table]:
    """Return what each client of one's own table gains over training alone, if they are few."""
    if quiet or kind_of(experiment) != "a table":
        return []
    alone = None if results.reference is None else results[results.reference]
    return [
        result.gain(alone, run=0)
        for name, result in results.items()
        if name != results.reference and len(result.clients) <= MOST_CLIENTS
        if alone is not None or result.can_compare
    ]


def _endings(results: Comparison) -> list[Table]:
    """Return a table of the clients of every method that let them choose, if they are few."""
    found = []
    for result in results.values():
        if result.ended_with() is None or len(result.clients) > MOST_CLIENTS:
            continue
        alone = None if results.reference is None else results[results.reference]
        found.append(result.per_client(run=0) if alone is None else result.gain(alone, run=0))
    return found
