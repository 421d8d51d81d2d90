"""The commands that train: demo, run, compare and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sartor.cli import show, work
from sartor.cli.config import Experiment, build
from sartor.cli.flags import Folder, Json, Overwrite, argument, option, read_experiment, with_flags
from sartor.cli.settings import kind_of
from sartor.engines.shard.processes import is_first
from sartor.methods import expand
from sartor.results.comparison import Comparison
from sartor.results.tables import Table
from sartor.training.compare import BASELINES
from sartor.training.progress import reporter

MOST_CLIENTS = 40
"""Rows of a table of clients on the screen; the report has them all."""


DEMO: tuple[tuple[str, ...], dict[str, Any]] = (
    (
        "20 clients hold 400 images of digits, more of some of the ten classes than of others.",
        "Alone each has too few; one model for all (fedavg) does not fit everyone.",
    ),
    {
        "methods": "local,fedavg,fedavg-ft,ditto",
        "data": "digits",
        "clients": 20,
        "partition": "dirichlet:0.5",
        "samples": 400,
        "rounds": 30,
        "epochs": 5,
        "batch": 10,
        "lr": 0.1,
        "seeds": 3,
        "eval_every": 2,
    },
)
"""What the demo says, and what it trains: few samples, clients that differ somewhat."""

WHEN_NOT_TO: tuple[tuple[str, ...], dict[str, Any]] = (
    (
        "20 clients hold 1,797 images of digits, a few of the ten classes each.",
        "With so many images of so few classes nobody needs the others.",
    ),
    {
        "methods": "local,fedavg,fedprox,fedapa",
        "data": "digits",
        "clients": 20,
        "partition": "dirichlet:0.1",
        "rounds": 30,
        "epochs": 1,
        "batch": 32,
        "lr": 0.1,
    },
)
"""The same where federating gains nothing: many samples of few classes."""


def demo(
    out: Annotated[Path | None, option("Run folder.", "FOLDER")] = None,
    when_not_to: Annotated[bool, option("Where training alone is as good.", None)] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train four methods on real digits, and write a report."""
    words, keys = WHEN_NOT_TO if when_not_to else DEMO
    for line in (*words, "A client is hurt if it does worse than alone (local)."):
        show.say(line, quiet=json)
    _train(build({**keys, "out": out}), "demo", overwrite=overwrite, json=json)


@with_flags()
def run(
    target: Annotated[str, argument("A method, or a .toml or .yaml file.", "METHOD|FILE")],
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Train one method: one run, repeats, or a sweep in one pass."""
    experiment = read_experiment(target, flags, many=False)
    name = f"{experiment.method}-{Path(experiment.data).name}"
    _train(experiment, name, overwrite=overwrite, json=json)


@with_flags()
def compare(
    target: Annotated[
        str, argument("Methods with commas, all-regularised, or a file.", "METHODS|FILE")
    ],
    baselines: Annotated[
        bool, option("Put local, fedavg and fedavg-ft beside the methods.")
    ] = True,
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Train several methods on one federation, and compare them."""
    experiment = read_experiment(target, flags, many=True)
    named = expand((*(BASELINES if baselines else ()), *experiment.methods))
    experiment = experiment.model_copy(update={"methods": tuple(named)})
    _train(experiment, "compare", overwrite=overwrite, json=json)


def resume(folder: Folder, json: Json = False) -> None:
    """Resume a run that was stopped, from its last checkpoint."""
    experiment, results = work.resume(folder, reporter(plain=json))
    finish(experiment, results, folder, json=json)


def _train(experiment: Experiment, name: str, *, overwrite: bool, json: bool) -> None:
    results, out = work.start(experiment, name, reporter(plain=json), overwrite=overwrite)
    finish(experiment, results, out, json=json)


def finish(experiment: Experiment, results: Comparison, out: Path, *, json: bool) -> None:
    """Print the table, where the files are, and, if asked, the last line of JSON."""
    places = work.write_page(out) if is_first() else [("Files", out)]
    chosen = [one for r in results.values() if "selection" in r.config for one in r.selection()]
    few = [one for one in chosen if len(one) <= MOST_CLIENTS]
    show.tables(results.table(), *_of_clients(experiment, results, quiet=json), *few, quiet=json)
    show.places(*places, quiet=json)
    if json:
        rows = [
            {**row, "out": str(work.folder_of(experiment, row["name"], out))}
            for row in results.summaries()
        ]
        show.json_line(rows[0] if experiment.is_single else rows)


def _of_clients(experiment: Experiment, results: Comparison, *, quiet: bool) -> list[Table]:
    """Return what each client gains over training alone, if they are few.

    Of one's own table, by every method; else by every method that let its clients choose.
    """
    alone = None if results.reference is None else results[results.reference]
    few = {k: v for k, v in results.items() if len(v.clients) <= MOST_CLIENTS}
    gains = [
        result.gain(alone, run=0)
        for name, result in few.items()
        if not quiet and kind_of(experiment) == "a table" and name != results.reference
        if alone is not None or result.can_compare
    ]
    return gains or [
        result.per_client(run=0) if alone is None else result.gain(alone, run=0)
        for result in few.values()
        if result.ended_with() is not None
    ]
