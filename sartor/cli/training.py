"""The commands that train: demo, run, compare, search, advise, resume, onboard and reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.cli import show, work
from sartor.cli.advice import FLAGS, take_advice
from sartor.cli.config import Experiment, build
from sartor.cli.flags import (
    Folder,
    Json,
    Overwrite,
    read_experiment,
    with_experiment_flags,
    with_flags,
)
from sartor.cli.outcome import finish
from sartor.cli.progress import reporter


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
    finish(experiment, results, out, json=json)


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
    from sartor.methods import expand
    from sartor.training.fit import BASELINES

    named = expand((*(BASELINES if baselines else ()), *experiment.methods))
    experiment = experiment.model_copy(update={"methods": tuple(named)})
    _compare(experiment, "compare", overwrite=overwrite, json=json)


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


def resume(folder: Folder, json: Json = False) -> None:
    """Go on with a run that was stopped, from its last checkpoint."""
    experiment, results = work.go_on(folder, reporter(plain=json))
    finish(experiment, results, folder, json=json)


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
    row: Annotated[
        list[str] | None, typer.Option(help="Run this row only; may be repeated.", metavar="NAME")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="This column only; may be repeated.", metavar="NAME")
    ] = None,
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
        rows=row or None,
        columns=column or None,
        json=json,
    )


def _compare(experiment: Experiment, name: str, *, overwrite: bool, json: bool) -> None:
    results, out = work.start(experiment, name, reporter(plain=json), overwrite=overwrite)
    finish(experiment, results, out, json=json)
