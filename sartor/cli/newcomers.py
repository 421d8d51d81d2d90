"""``sartor onboard``: give clients that join after training their models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from sartor.cli import completion, show, work
from sartor.cli.config import Experiment
from sartor.cli.flags import Folder, Json, Overwrite, argument, option
from sartor.cli.settings import federation_of, label_of
from sartor.core.errors import ConfigError, RunFolderError, did_you_mean
from sartor.data import from_file
from sartor.data.federation import Federation
from sartor.data.tables import is_table
from sartor.results.result import Result
from sartor.results.serving import tree_of
from sartor.runs import RunFolder
from sartor.training.progress import reporter


def onboard(
    folder: Folder,
    data: Annotated[
        Path,
        argument("Newcomers: a table, or a folder with a file for each.", "DATA", completion.data),
    ],
    method: Annotated[str | None, option("Which method, of several.", "NAME")] = None,
    rounds: Annotated[int, option("Rounds of the method's local work.", "T", min=0)] = 5,
    finetune_epochs: Annotated[
        int, option("Passes of plain fine-tuning after that.", "E", min=0)
    ] = 0,
    run: Annotated[int, option("Which run of a sweep.", "R", min=0)] = 0,
    label: Annotated[str | None, option("The column that holds the label.", "NAME")] = None,
    out: Annotated[Path | None, option("Where to write; else FOLDER/newcomers.", "FOLDER")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Give clients that join after training their models."""
    experiment = work.stored_experiment(folder)
    names = experiment.methods
    if method is None and len(names) > 1:
        raise ConfigError(f"{folder} holds {', '.join(names)}; choose one with --method.")
    if method is not None and method not in names:
        raise ConfigError(f"{folder} does not hold {method!r}{did_you_mean(method, names)}")
    chosen = method or experiment.method
    inner = work.folder_of(experiment, chosen, folder)
    place = out or inner / "newcomers"
    if (place / "folder.json").exists() and not overwrite:
        raise RunFolderError(f"{place} exists; use another --out, or --overwrite to replace it.")
    federations = federation_of(experiment)
    bar = reporter(plain=json)
    trained = work.fit_one(experiment, chosen, federations, inner, bar, resume=True, reopen=True)
    newcomers = _read(experiment, data, label or experiment.label, trained, run)
    found = trained.onboard(newcomers, rounds=rounds, finetune_epochs=finetune_epochs, run=run)
    saved = RunFolder.create(place, found.config, overwrite=overwrite)
    trees = [tree_of(found.model(name)) for name in found.clients]
    saved.write_models(found.clients, trees, 0)
    # What they reach alone is trained for the gain, and kept beside the result.
    table = found.gain(run=0) if found.can_compare else found.per_client(run=0)
    if found.can_compare:
        table.title = f"{chosen}: what newcomers gain over training alone"
        table.notes["alone"] = f"{_rounds(trained, run)} rounds on their own samples, as the others"
    saved.write_result(found)
    show.table(table, quiet=json)
    show.places(("Models", place), quiet=json)
    if json:
        gain = {"gain": table.records()} if found.can_compare else {}
        show.json_line({**found.summary(), **gain, "out": str(place)})


def _rounds(trained: Result, run: int) -> int:
    """Return how many rounds a run trained."""
    return int((trained.stopped[run] or {"round": trained.ledger.num_rounds})["round"])


def _read(
    experiment: Experiment, data: Path, label: str | None, trained: Result, run: int
) -> Federation:
    """Read newcomers from one table or a folder, prepared like the clients that trained."""
    recipe = trained.recipe(run) if "rebuild" in trained.config else None
    like: dict[str, Any] | None = None
    if recipe is not None:
        classes = trained.config["rebuild"].get("class_names", [])
        like = {"preprocessing": recipe, "class_names": classes}
    # A method that decides by validation data needs some of every newcomer.
    val = experiment.val if experiment.do_no_harm else 0.0
    if not is_table(data):
        size = experiment.image_size
        return Federation.from_folder(data, label=label, val=val, image_size=size, like=like)
    if experiment.client is None or like is None:
        raise ConfigError(
            f"{data} is a table, but the run was trained on a folder or a data set; give a folder "
            "with a file for each newcomer."
        )
    task, columns = str(trained.config["task"]), label_of(str(label))
    return from_file(data, client=experiment.client, label=columns, task=task, val=val, like=like)
