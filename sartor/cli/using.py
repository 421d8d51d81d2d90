"""``sartor predict`` and ``sartor export``: what a trained model is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from sartor.cli import completion, show
from sartor.cli.flags import Json, Overwrite, argument, option
from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.tables import read_table
from sartor.results.result import Result
from sartor.results.table_predictions import predict_rows
from sartor.results.tables import Table
from sartor.runs import RunFolder, slug, storage
from sartor.training.loading import load

MOST_ROWS = 20
"""Rows on the screen; the file has them all."""

Run = Annotated[Path, argument("A run folder.", "RUN", completion.run_folders)]
Method = Annotated[
    str | None, option("Which method, of several.", "NAME", autocompletion=completion.methods)
]
Which = Annotated[int, option("Which run of a sweep.", "R", min=0)]


def predict(
    folder: Run,
    data: Annotated[
        Path,
        option("CSV, TSV, Parquet or .npz: samples.", "FILE", autocompletion=completion.tables),
    ],
    client: Annotated[
        str | None, option("Whose model; else the file's column of clients says.", "NAME")
    ] = None,
    out: Annotated[Path | None, option("Write all rows there, as CSV.", "FILE")] = None,
    method: Method = None,
    run: Which = 0,
    uncertainty: Annotated[
        bool, option("Average over what the model could be, with deviations.", None)
    ] = False,
    json: Json = False,
) -> None:
    """Answer for new samples with the models of a run."""
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"There is no folder {out.parent} for {out.name}; make it first.")
    result = opened(folder, method)
    _check(result, client, run)
    columns = _read(data)
    answers = predict_rows(
        result,
        lambda name, x: result.predict(name, x, run=run, uncertainty=uncertainty),
        columns,
        client,
        run,
    )
    for line in answers.notes:
        show.note(line)
    table = answers.table
    if out is not None:
        try:
            table.to_csv(out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}; choose another --out.") from error
    else:
        show.table(_shortened(table), quiet=json)
    if answers.scores is not None:
        show.say(quiet=json)
        show.table(answers.scores, quiet=json)
    if out is not None:
        show.places(("Predictions", out), quiet=json)
    if json:
        found: dict[str, Any] = {"rows": len(table), "notes": answers.notes}
        found["out"] = None if out is None else str(out)
        if out is None:
            found["predictions"] = table.records()
        found["scores"] = None if answers.scores is None else answers.scores.records()
        show.json_line(found)


def export(
    folder: Run,
    to: Annotated[Path, option("The folder to write.", "DIR")],
    client: Annotated[
        str | None, option("Whose model; else each client's, in a folder of its own.", "NAME")
    ] = None,
    kind: Annotated[
        str, option("onnx, safetensors, or both.", "A,B", "--format")
    ] = "onnx,safetensors",
    method: Method = None,
    run: Which = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a client's model for others: ONNX, parameters, a card."""
    result = opened(folder, method)
    _check(result, client, run)
    formats = [word.strip() for word in kind.split(",") if word.strip()]
    if not formats:
        raise ConfigError("--format is empty; give onnx, safetensors, or both with a comma.")
    if to.suffix in (".onnx", ".safetensors", ".pt", ".pt2"):
        raise ConfigError(
            f"{to} looks like a file, but --to is the folder to write; in Python, "
            f"result.export(client, {to.name!r}) writes one file."
        )
    places = {client: to} if client is not None else {n: to / slug(n) for n in result.clients}
    if len(set(places.values())) < len(places):
        raise ConfigError(
            "Names of two clients make the same folder; export them one by one with --client."
        )
    for name, place in places.items():
        storage.make_folder(place)  # so that a name with a dot is a folder, too
        result.export(name, place, run=run, formats=formats, overwrite=overwrite)
        if len(places) > 1:
            show.say(f"{name}: {place}", quiet=json)
    files = sorted(file.name for file in place.iterdir())
    show.places(("Folder", to), ("Files", Path(", ".join(files))), quiet=json)
    show.say("Fill in the licence and the intended use in README.md.", quiet=json)
    if json:
        show.json_line({"folders": {name: str(place) for name, place in places.items()}})


def opened(folder: Path, method: str | None) -> Result:
    """Load the result of a run folder, or of one method of a comparison."""
    if not (folder / "comparison.json").is_file():
        result = load(folder)
        named = result.config.get("method", result.method)
        if method not in (None, named, result.method):
            raise ConfigError(f"{folder} holds {named}, not {method!r}; leave out --method.")
        return result
    found = storage.read_ours(folder / "comparison.json")
    inner = found["folders"]
    if method is None and len(inner) > 1:
        raise ConfigError(f"{folder} holds {', '.join(inner)}; choose one with --method.")
    chosen = next(iter(inner)) if method is None else method
    if chosen not in inner:
        raise ConfigError(f"{folder} does not hold {chosen!r}{did_you_mean(chosen, inner)}")
    result, alone = load(folder / inner[chosen]), found.get("reference")
    if result.known_baseline is None and alone in inner and alone != chosen:
        result.attach_baseline(RunFolder.open(folder / inner[alone]).read_result())
    return result


def _check(result: Result, client: str | None, run: int) -> None:
    """Refuse a client or a run that is not there, before anything is read or written."""
    if client is not None:
        result.client_index(client)
    result.select([run])


def _read(file: Path) -> dict[str, Any]:
    """Read samples: the columns of a table, or the arrays of a .npz file."""
    if file.suffix.lower() != ".npz" or not file.is_file():
        return read_table(file)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays}
    except (OSError, ValueError) as error:
        raise FederationError(f"{file} cannot be read: {error}.") from error
    lengths = {name: len(np.atleast_1d(values)) for name, values in found.items()}
    if "x" not in found or len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} of {count}" for name, count in lengths.items())
        raise FederationError(
            f"{file} must hold an array x, and perhaps y and client, of as many samples; it has "
            f"{said or 'nothing'}."
        )
    return found


def _shortened(table: Table) -> Table:
    more = len(table) - MOST_ROWS
    notes = {"rows not shown": f"{more}; --out FILE writes all"} if more > 0 else {}
    formats = {n: "index" for n in table.columns if n.startswith(("p(", "deviation("))}
    return Table(table.columns, table.rows[:MOST_ROWS], notes=notes, formats=formats)
