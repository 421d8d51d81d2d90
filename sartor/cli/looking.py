"""The commands that do not train: report, methods, data and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.cli import completion, show
from sartor.cli.config import build
from sartor.cli.flags import Folder, Json, argument, option, with_flags
from sartor.core.errors import ConfigError, did_you_mean
from sartor.results.tables import Table


def report(
    folder: Folder,
    kind: Annotated[
        str, option("html: one page; pdf or png: figures.", "KIND", "--format")
    ] = "html",
    client: Annotated[str | None, option("The page of one client alone.", "NAME")] = None,
    out: Annotated[Path | None, option("Where to write; else in FOLDER.", "DIR")] = None,
    json: Json = False,
) -> None:
    """Write the page of a run, of a client, or figures for a paper."""
    from sartor.report import write_client, write_figures, write_report

    answer: dict[str, Any] = {"out": folder}
    if client is not None and kind == "html":
        answer["client"] = write_client(folder, client, out)
        show.places(("Page", answer["client"]), quiet=json)
    elif kind == "html":
        answer["report"] = write_report(folder, None if out is None else out / "report.html")
        show.places(("Report", answer["report"]), quiet=json)
    elif kind in ("pdf", "png"):
        answer["figures"] = write_figures(folder, out, "pdf" if kind == "pdf" else "png")
        show.places(*(("Figure", path) for path in answer["figures"]), quiet=json)
    else:
        hint = did_you_mean(kind, ("html", "pdf", "png"))
        raise ConfigError(f"there is no format {kind!r}{hint}")
    if json:
        show.json_line(answer)


def methods(
    name: Annotated[str | None, argument("One, in full.", "[METHOD]", completion.methods)] = None,
    json: Json = False,
) -> None:
    """List the methods, or show one in full with its options."""
    from sartor.cli.listing import describe_method, list_methods

    answer, tables = describe_method(name) if name else list_methods()
    _print(tables, answer, json=json)


@with_flags("look", pages=False)
def data(
    name: Annotated[str | None, argument("One, in full.", "[NAME|FOLDER]", completion.data)] = None,
    page: Annotated[
        Path | None, option("Of a table: also write a page with maps.", "FILE.html")
    ] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """List data sets, show one divided, or examine your own table."""
    from sartor.cli.listing import describe_data, examine_data, list_data

    if name is None:
        answer, tables = list_data(None if flags["data_dir"] is None else Path(flags["data_dir"]))
        _print(tables, answer, json=json)
        return
    given = {key: value for key, value in flags.items() if value is not None}
    experiment = build({"method": "local"}, flags={"data": name, **given})
    if (examined := examine_data(experiment, page)) is not None:
        answer, tables, lines = examined
        _print(tables, answer, json=json)
        for line in [] if json else lines:
            show.say(f"\n{line}")
        if not answer["healthy"]:
            raise typer.Exit(2)
        return
    if page is not None:
        raise ConfigError(
            f"--page shows an examined table; {name} is none, or lacks --client and --label."
        )
    answer, text = describe_data(experiment)
    if json:
        show.json_line(answer)
    else:
        show.say(text)


def doctor(
    data_dir: Annotated[
        Path | None, option("Folder of data sets (else SARTOR_DATA).", "FOLDER")
    ] = None,
    json: Json = False,
) -> None:
    """Check what this machine has, what is missing, and how to get it."""
    from sartor.cli.doctor import answer, examine, tables

    findings = examine(data_dir)
    _print(tables(findings), answer(findings), json=json)
    if not answer(findings)["healthy"]:
        raise typer.Exit(1)


def _print(tables: list[Table], answer: Any, *, json: bool) -> None:
    if json:
        show.json_line(answer)
    else:
        show.tables(*tables)
