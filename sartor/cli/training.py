"""The commands that train: demo, run, compare and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sartor.cli import completion, show, work
from sartor.cli.config import Experiment, build
from sartor.cli.flags import Folder, Json, Overwrite, argument, option, read_experiment, with_flags
from sartor.cli.settings import kind_of
from sartor.engines.shard.processes import is_first
from sartor.methods import expand
from sartor.results.comparison import Comparison, as_comparison
from sartor.results.tables import Table
from sartor.training.compare import BASELINES
from sartor.training.progress import reporter

REPEATS, REPEATS_OF_AUTO = 10, 5
"""Divisions of one's own data, if none are asked for; auto chooses anew in each."""

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
    target: Annotated[
        str, argument("A method, or a .toml or .yaml file.", "METHOD|FILE", completion.targets)
    ],
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
        str,
        argument(
            "Methods with commas, all-regularised, or a file.", "METHODS|FILE", completion.targets
        ),
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
    if experiment.seeds is None and kind_of(experiment) == "a table":
        # Gains of one division say little; several train as lanes of one pass.
        repeats = REPEATS_OF_AUTO if "auto" in experiment.methods else REPEATS
        experiment = experiment.model_copy(update={"seeds": repeats})
    results, out = work.start(experiment, name, reporter(plain=json), overwrite=overwrite)
    finish(experiment, results, out, json=json)


def finish(experiment: Experiment, results: Comparison, out: Path, *, json: bool) -> None:
    """Print the table, where the files are, and, if asked, the last line of JSON."""
    places = work.write_page(out) if is_first() else [("Files", out)]
    chosen = [one for r in results.values() if "selection" in r.config for one in r.selection()]
    few = [one for one in chosen if len(one) <= MOST_CLIENTS]
    shown = as_comparison(*results.values()) if len(results) == 1 else results
    gains = _gains(shown)
    show.tables(shown.table(), *_of_clients(experiment, results, gains), *few, quiet=json)
    show.places(*places, quiet=json)
    if json:
        hurt = {row["name"]: row["clients_hurt"] for row in shown.summaries()}
        rows = [
            {
                **row,
                "clients_hurt": hurt[row["name"]],
                "gains": None if (gain := gains.get(row["name"])) is None else gain.records(),
                "out": str(work.folder_of(experiment, row["name"], out)),
            }
            for row in results.summaries()
        ]
        show.json_line(rows[0] if experiment.is_single else rows)


def _gains(shown: Comparison) -> dict[str, Table]:
    """Return what every client gains over training alone, by every method."""
    if shown.reference is None:
        return {}
    alone = shown[shown.reference]
    return {k: result.gain(alone) for k, result in shown.items() if k != shown.reference}


def _of_clients(
    experiment: Experiment, results: Comparison, gains: dict[str, Table]
) -> list[Table]:
    """Return the tables of clients, if they are few.

    Of one's own table the gains by every method; else of those that let their clients choose.
    """
    few = {k: v for k, v in results.items() if len(v.clients) <= MOST_CLIENTS}
    if kind_of(experiment) == "a table":
        return [gains[name] for name in few if name in gains]
    return [
        gains[name] if name in gains else result.per_client(run=0)
        for name, result in few.items()
        if result.ended_with() is not None
    ]
