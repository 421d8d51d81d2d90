"""The commands that look and do not train: report, methods, data and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.cli import show
from sartor.cli.config import build
from sartor.cli.flags import Folder, Json
from sartor.core.errors import ConfigError, did_you_mean
from sartor.results.tables import Table


def report(
    folder: Folder,
    kind: Annotated[
        str,
        typer.Option("--format", help="html: one page; pdf or png: figures.", metavar="KIND"),
    ] = "html",
    out: Annotated[
        Path | None, typer.Option(help="Where to write; else in FOLDER.", metavar="DIR")
    ] = None,
    json: Json = False,
) -> None:
    """Write the page of a run folder, or its figures for a paper."""
    from sartor.report import write_figures, write_report

    kinds = ("html", "pdf", "png")
    if kind not in kinds:
        raise ConfigError(f"there is no format {kind!r}{did_you_mean(kind, kinds)}")
    if kind == "html":
        path = write_report(folder, None if out is None else out / "report.html")
        show.places(("Report", path), quiet=json)
        answer: dict[str, Any] = {"report": str(path)}
    else:
        paths = write_figures(folder, out, "pdf" if kind == "pdf" else "png")
        show.places(*(("Figure", path) for path in paths), quiet=json)
        answer = {"figures": [str(path) for path in paths]}
    if json:
        show.json_line({"out": str(folder), **answer})


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One, in full.")] = None,
    json: Json = False,
) -> None:
    """What methods there are, what travels, and their options."""
    from sartor.cli.listing import describe_method, list_methods

    answer, tables = describe_method(name) if name else list_methods()
    _print(tables, answer, json=json)


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FOLDER]", help="One, in full.")
    ] = None,
    clients: Annotated[str | None, typer.Option(help="Number of clients.", metavar="N")] = None,
    partition: Annotated[
        str | None, typer.Option(help="dirichlet:0.1, classes:2, iid, ...", metavar="KIND")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="Training samples, in all.", metavar="N")
    ] = None,
    min_train: Annotated[
        str | None, typer.Option(help="Least samples of a client.", metavar="N")
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Seed of the division.", metavar="S")] = None,
    label: Annotated[
        str | None, typer.Option(help="Folders: the column of the label.", metavar="NAME")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="CSV: the column of the client.", metavar="NAME")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets lie (else SARTOR_DATA).", metavar="FOLDER")
    ] = None,
    json: Json = False,
) -> None:
    """What data sets there are; one in full, divided among clients."""
    from sartor.cli.listing import describe_data, list_data

    if name is None:
        answer, tables = list_data(data_dir)
        _print(tables, answer, json=json)
        return
    words: dict[str, Any] = {"data": name, "clients": clients, "partition": partition}
    words |= {"samples": samples, "min_train": min_train}
    words |= {"seed": seed, "label": label, "client": client, "data_dir": data_dir}
    flags = {key: value for key, value in words.items() if value is not None}
    answer, text = describe_data(build({"method": "local"}, flags=flags))
    if json:
        show.json_line(answer)
    else:
        show.say(text)


def doctor(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets lie (else SARTOR_DATA).", metavar="FOLDER")
    ] = None,
    json: Json = False,
) -> None:
    """What this machine has, what is missing, and how to get it."""
    from sartor.cli.doctor import answer, examine, tables

    findings = examine(data_dir)
    told = answer(findings)
    _print(tables(findings), told, json=json)
    if not told["healthy"]:
        raise typer.Exit(1)


def _print(tables: list[Table], answer: Any, *, json: bool) -> None:
    if json:
        show.json_line(answer)
        return
    for number, table in enumerate(tables):
        if number:
            show.say()
        show.table(table)
