"""Training for a command: the run folder, the calls of the library, and Ctrl-C."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sartor.cli import show
from sartor.cli.config import Experiment, build
from sartor.cli.interruption import stoppable
from sartor.cli.settings import check_names, federation_of, model_of, settings_of, training_of
from sartor.core.errors import DivergedError, PFLError, RunFolderError
from sartor.engines.shard import processes

if TYPE_CHECKING:
    from sartor.data.federation import Federation
    from sartor.results.comparison import Comparison
    from sartor.results.result import Result
    from sartor.training.progress import Progress

EXPERIMENT_FILE = "experiment.json"
"""The experiment of a run folder, from which ``sartor resume`` starts."""


def fit_one(
    experiment: Experiment,
    method: str,
    federations: Callable[[int], Federation],
    out: Path,
    progress: Progress,
    *,
    resume: bool,
    reopen: bool = False,
) -> Result:
    """Train one method of the experiment in one call: all seeds and all values of the sweep."""
    import sartor
    from sartor.trackers import track

    return sartor.fit(
        method,
        federations,
        out=out,
        resume=resume,
        reopen=reopen,
        progress=progress,
        sweep=settings_of(experiment, method)["sweep"],
        callbacks=[track(words) for words in experiment.track] if processes.is_first() else (),
        **training_of(experiment, method, federations),
    )


def start(
    experiment: Experiment, name: str, progress: Progress, *, overwrite: bool = False
) -> tuple[Comparison, Path]:
    """Check everything that can be checked, make the run folder, and train.

    A fault that is found before the first round leaves no folder.

    Args:
        experiment: what to train.
        name: the last part of the folder's name, if the experiment names none.
        progress: is called after every round.
        overwrite: whether a run folder that is there already may be replaced.

    Returns:
        The results, and the run folder.
    """
    check_names(experiment)
    federations = federation_of(experiment)
    model_of(experiment, federations(experiment.seed))
    out = Path(processes.first(lambda: str(new_folder(experiment, name, overwrite=overwrite))))
    try:
        return train(experiment, out, progress, federations), out
    except PFLError:
        kept = [name for name in ("latest.json", "result.safetensors") if any(out.rglob(name))]
        if not kept and processes.is_first():
            shutil.rmtree(out, ignore_errors=True)
        raise


def resume(out: Path, progress: Progress) -> tuple[Experiment, Comparison]:
    """Resume the experiment of a run folder from its last checkpoint."""
    experiment = stored_experiment(out)
    check_names(experiment)
    federations = federation_of(experiment)
    return experiment, train(experiment, out, progress, federations, resume=True)


def train(
    experiment: Experiment,
    out: Path,
    progress: Progress,
    federations: Callable[[int], Federation],
    *,
    resume: bool = False,
) -> Comparison:
    """Train every method of the experiment; several methods get a folder each inside ``out``.

    Raises:
        Interrupted: on Ctrl-C; what was checkpointed stays.
    """
    from sartor.results.comparison import Comparison
    from sartor.runs import ComparisonFolder

    several = None
    if len(experiment.methods) > 1:
        stored = experiment.stored()

        def prepare() -> None:
            if not (resume and (out / "folder.json").is_file()):
                ComparisonFolder.create(out, stored)

        processes.first(prepare)
        several = ComparisonFolder.open(out)
    results: dict[str, Result] = {}
    lost: DivergedError | None = None
    with interruptible(out, experiment):
        for method in experiment.methods:
            inner = folder_of(experiment, method, out)
            try:
                results[method] = fit_one(
                    experiment, method, federations, inner, progress, resume=resume
                )
            except DivergedError as error:  # the other methods are still worth having
                lost = error
                show.note(f"Warning: {method} is left out: {error}")
    if lost is not None and not results:
        raise lost
    comparison = Comparison(results, config=experiment.stored())
    if several is not None and processes.is_first():
        try:
            several.write_comparison(comparison)
        except RunFolderError as error:  # the results are printed all the same
            show.note(f"Warning: {error}")
    return comparison


def folder_of(experiment: Experiment, method: str, out: Path) -> Path:
    """Return the folder of one method: ``out`` itself, or one inside if there are several."""
    from sartor.runs import slug

    return out if len(experiment.methods) == 1 else out / slug(method)


def interruptible(out: Path, experiment: Experiment) -> AbstractContextManager[None]:
    """Turn Ctrl-C into a message that says what is kept and how to resume."""
    return stoppable(
        f"Stopped. The last checkpoint (one every {experiment.checkpoint_every} rounds) is "
        f"kept in {out}; resume with: sartor resume {out}"
    )


def free_folder(experiment: Experiment, name: str, *, overwrite: bool) -> Path:
    """Return where a command that cannot be resumed may write; nothing is made yet.

    Raises:
        RunFolderError: it exists and is not empty.
    """
    out = _place(experiment, name)
    if _is_taken(out):
        _check_overwrite(out, overwrite, "use another --out, or --overwrite to replace it.")
    return out


def new_folder(experiment: Experiment, name: str, *, overwrite: bool = False) -> Path:
    """Make the run folder of a new experiment and write the experiment into it.

    Raises:
        RunFolderError: it exists and is not empty, or cannot be made.
    """
    from sartor.runs.storage import write_json

    out = _place(experiment, name)
    try:
        if _is_taken(out):
            _clear(out, overwrite)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"The run folder {out} cannot be made ({error.strerror or error}); choose another "
            "place with --out."
        ) from error
    write_json(out / EXPERIMENT_FILE, experiment.model_copy(update={"out": out}).stored())
    return out


def _place(experiment: Experiment, name: str) -> Path:
    """Return --out, or the first of runs/TIME-NAME, TIME-NAME-2, ... that does not exist yet."""
    if experiment.out is not None:
        return experiment.out
    path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found


def _is_taken(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def _check_overwrite(out: Path, overwrite: bool, fix: str) -> None:
    """Refuse to write over what is there, unless that was asked for and is a run folder."""
    if not overwrite:
        raise RunFolderError(f"{out} exists and is not empty; {fix}")
    if not any((out / name).is_file() for name in (EXPERIMENT_FILE, "folder.json")):
        raise RunFolderError(
            f"{out} is not empty and is no run folder, so --overwrite does not touch it; use "
            "another --out."
        )


def _clear(out: Path, overwrite: bool) -> None:
    fix = f"use another --out, --overwrite to replace it, or resume it with: sartor resume {out}"
    _check_overwrite(out, overwrite, fix)
    from sartor.runs import RunFolder

    # Making it anew removes what earlier runs left there, and nothing else.
    RunFolder.create(out, {}, overwrite=True)
    for name in ("folder.json", "config.json", "environment.json"):
        (out / name).unlink()


def write_page(out: Path) -> list[tuple[str, Path]]:
    """Write the page of a run folder; return the places to print: the folder, and the page.

    What goes wrong is a warning: the numbers are worth more than the page.
    """
    try:
        return [("Files", out), ("Report", _write_report(out))]
    except (PFLError, OSError, ImportError) as error:
        show.note(f"Warning: no report was written: {error}")
        return [("Files", out)]


def _write_report(out: Path) -> Path:
    from sartor.report import write_report

    return write_report(out)


def stored_experiment(out: Path) -> Experiment:
    """Read the experiment of a run folder.

    Raises:
        RunFolderError: there is no experiment, or it cannot be read.
    """
    from sartor.runs.storage import read_json

    path = out / EXPERIMENT_FILE
    if not path.is_file():
        what = "is not the folder of a command" if out.is_dir() else "does not exist"
        if (out / "advice.json").is_file():
            raise RunFolderError(
                f"{out} holds an advice, so there is nothing to resume; sartor report shows how "
                "to carry it out."
            )
        raise RunFolderError(
            f"{out} {what}: there is no {path}. Give the folder that sartor run, compare or demo "
            "printed; resume a run of fit(..., out=...) with fit(..., resume=True)."
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} holds no experiment; it must be a JSON object.")
    return build(values, source=str(path))
