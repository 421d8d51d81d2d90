"""The commands. Each reads its words, calls the library, and prints the answer and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sartor._version import __version__
from sartor.cli import network, show, work
from sartor.cli.advice import FLAGS, take_advice
from sartor.cli.flags import read_experiment, with_experiment_flags, with_flags
from sartor.cli.help_pages import ShortHelp
from sartor.cli.progress import reporter
from sartor.config import Experiment, build
from sartor.errors import ConfigError, did_you_mean
from sartor.processes import is_first
from sartor.table import Table

if TYPE_CHECKING:
    from sartor.comparison import Comparison


class _Commands(TyperGroup):
    """The group of all commands; its help leaves out the two flags of completion."""

    def get_params(self, ctx: Any) -> Any:
        """Return the flags, with ``--install-completion`` and ``--show-completion`` hidden."""
        found = super().get_params(ctx)
        for flag in found:
            if str(flag.name).endswith("_completion"):
                flag.hidden = True  # type: ignore[attr-defined]
        return found


app = typer.Typer(
    name="sartor",
    cls=_Commands,
    help="A model of its own for every client of a federation. Start with: sartor demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MOST_CLIENTS = 40
"""Rows of a table of clients on the screen; the report has them all."""

Json = Annotated[bool, typer.Option("--json", help="Machine-readable last line on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder.")]


def _print_version(value: bool) -> None:
    if value:
        print(f"sartor {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """A model of its own for every client of a federation. Start with sartor demo."""


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder.", metavar="FOLDER")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Four methods side by side on real digits, with a report."""
    experiment = build(
        {
            "methods": "local,fedavg,fedprox,fedapa",
            "data": "digits",
            "clients": 20,
            "partition": "dirichlet:0.1",
            "rounds": 30,
            "lr": 0.1,
            "out": out,
        }
    )
    show.say("20 clients hold 1,797 images of digits, a few of the ten classes each.", quiet=json)
    show.say("A client is hurt if it does worse than alone (local).", quiet=json)
    _compare(experiment, "demo", overwrite=overwrite, json=json)


@app.command(cls=ShortHelp)
@with_experiment_flags
def run(
    target: Annotated[
        str, typer.Argument(metavar="METHOD|FILE", help="A method, or a .toml or .yaml file.")
    ],
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Train one method: one run, repeats, or a sweep in one pass."""
    experiment = read_experiment(target, flags, many=False)
    name = f"{experiment.method}-{Path(experiment.data).name}"
    results, out = work.start(experiment, name, reporter(plain=json), overwrite=overwrite)
    _finish(experiment, results, out, json=json)


@app.command(cls=ShortHelp)
@with_experiment_flags
def compare(
    target: Annotated[
        str,
        typer.Argument(
            metavar="METHODS|FILE", help="Methods with commas, all-regularised, or a file."
        ),
    ],
    baselines: Annotated[
        bool, typer.Option(help="Put local, fedavg and fedavg-ft beside the methods.")
    ] = True,
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Train several methods on one federation, side by side."""
    experiment = read_experiment(target, flags, many=True)
    from sartor.fit import BASELINES
    from sartor.methods import expand

    named = expand((*(BASELINES if baselines else ()), *experiment.methods))
    experiment = experiment.model_copy(update={"methods": tuple(named)})
    _compare(experiment, "compare", overwrite=overwrite, json=json)


@app.command(cls=ShortHelp)
@with_experiment_flags
def search(
    target: Annotated[
        str, typer.Argument(metavar="METHOD|FILE", help="A method, or a .toml or .yaml file.")
    ],
    space: Annotated[
        list[str],
        typer.Option(help="NAME=LOW:HIGH[:log], NAME=A,B; repeatable.", metavar="WHAT"),
    ],
    trials: Annotated[int, typer.Option(help="How many values to try.", metavar="N", min=1)] = 40,
    lanes: Annotated[int, typer.Option(help="Trials in one pass.", metavar="N", min=1)] = 10,
    measure: Annotated[
        str, typer.Option(help="loss or accuracy, on validation data.", metavar="NAME")
    ] = "loss",
    json: Json = False,
    **flags: Any,
) -> None:
    """Look for good hyper-parameters on validation data, many trials at once."""
    from sartor.cli.search import parse_space, search_one

    experiment = read_experiment(target, flags, many=False)
    bar = reporter(plain=json)
    chosen = parse_space(space)
    search_one(experiment, chosen, bar, trials=trials, lanes=lanes, measure=measure, json=json)


@app.command(cls=ShortHelp)
@with_flags(*FLAGS)
def advise(
    features: Annotated[
        str | None,
        typer.Option(help="raw, scaled, pca:K; of the convex model. (scaled)", metavar="KIND"),
    ] = None,
    ridge: Annotated[
        float, typer.Option(help="ν of (ν/2)|w|² in every client's loss.", metavar="X")
    ] = 0.0,
    basis: Annotated[
        str, typer.Option(help="theory, trial, or auto: theory where it holds.", metavar="HOW")
    ] = "auto",
    budget_mb: Annotated[
        float | None, typer.Option(help="Megabytes that may be sent, both ways.", metavar="MB")
    ] = None,
    budget_rounds: Annotated[
        int | None, typer.Option(help="Communication rounds at most.", metavar="T")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train it and both ends, and compare.")
    ] = False,
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Should we federate, with which pull λ, and at what cost?"""
    take_advice(
        {key: value for key, value in flags.items() if value is not None},
        features=features,
        ridge=ridge,
        basis=basis,
        budget_mb=budget_mb,
        budget_rounds=budget_rounds,
        verified=verify,
        json=json,
        overwrite=overwrite,
    )


@app.command()
def resume(folder: Folder, json: Json = False) -> None:
    """Go on with a run that was stopped, from its last checkpoint."""
    experiment, results = work.go_on(folder, reporter(plain=json))
    _finish(experiment, results, folder, json=json)


@app.command()
def onboard(
    folder: Folder,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Newcomers: a folder with a file for each.")
    ],
    method: Annotated[
        str | None, typer.Option(help="Which method, of several.", metavar="NAME")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of the method's local work.", metavar="T", min=0)
    ] = 5,
    finetune_epochs: Annotated[
        int, typer.Option(help="Passes of plain fine-tuning after that.", metavar="E", min=0)
    ] = 0,
    run: Annotated[int, typer.Option(help="Which run of a sweep.", metavar="R", min=0)] = 0,
    label: Annotated[
        str | None, typer.Option(help="The column that holds the label.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; else FOLDER/newcomers.", metavar="FOLDER")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Give clients that join after training their models."""
    found, place = work.take_in(
        folder,
        data,
        reporter(plain=json),
        method=method,
        run=run,
        rounds=rounds,
        finetune_epochs=finetune_epochs,
        label=label,
        out=out,
        overwrite=overwrite,
    )
    show.table(found.per_client(run=0), quiet=json)
    show.places(("Models", place), quiet=json)
    if json:
        show.json_line({**found.summary(), "out": str(place)})


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or figure; see --list.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="What there is.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The short form: minutes on two cores.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(help="Allocations or repeats of a cell.", metavar="K", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.", metavar="NAME")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder; else runs/reproduce-NAME.", metavar="FOLDER")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; finished passes are not repeated.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(help="Processes that share the passes.", metavar="N", min=1)
    ] = 1,
    json: Json = False,
) -> None:
    """Run a table or figure of a paper again, beside its numbers."""
    from sartor.cli.reproduction import list_plans, reproduce_one

    if list_ or name is None:
        list_plans(json=json)
        return
    reproduce_one(
        name,
        quick=quick,
        repeats=repeats,
        device=device,
        out=out,
        resume=resume,
        jobs=jobs,
        json=json,
    )


@app.command()
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


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One, in full.")] = None,
    json: Json = False,
) -> None:
    """What methods there are, what travels, and their options."""
    from sartor.cli.listing import describe_method, list_methods

    answer, tables = describe_method(name) if name else list_methods()
    _print(tables, answer, json=json)


@app.command()
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


@app.command()
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


def _compare(experiment: Experiment, name: str, *, overwrite: bool, json: bool) -> None:
    results, out = work.start(experiment, name, reporter(plain=json), overwrite=overwrite)
    _finish(experiment, results, out, json=json)


def _finish(experiment: Experiment, results: Comparison, out: Path, *, json: bool) -> None:
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
    from sartor.cli.settings import kind_of

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


app.command()(network.serve)
app.command()(network.join)
app.command()(network.status)
app.add_typer(network.keys_app, name="keys")
