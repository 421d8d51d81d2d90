"""Training for a command: the run folder, the calls of the library, and Ctrl-C."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sartor
from sartor.cli import show
from sartor.cli.config import Experiment, build
from sartor.cli.interruption import stoppable
from sartor.cli.settings import (
    check_names,
    federation_of,
    kind_of,
    model_of,
    settings_of,
    training_of,
)
from sartor.core.errors import ConfigError, DivergedError, PFLError, RunFolderError
from sartor.data.federation import Federation
from sartor.engines.shard import processes
from sartor.results.comparison import Comparison, as_comparison
from sartor.results.result import Result
from sartor.runs import ComparisonFolder, RunFolder, slug
from sartor.runs.storage import read_json, write_json
from sartor.training import equal
from sartor.training.fit import begin_folder, save_or_warn
from sartor.training.progress import Progress

EXPERIMENT_FILE = "experiment.json"
"""The experiment of a run folder, from which ``sartor resume`` starts."""


def fit_one(
    experiment: Experiment,
    method: str,
    federations: Callable[[int], Federation],
    out: Path | None,
    progress: Progress | None,
    *,
    resume: bool,
    reopen: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Result:
    """Train one method of the experiment in one call: all seeds and all values of the sweep.

    ``more`` are keywords of ``fit`` on top of those of the experiment.
    """
    from sartor.trackers import track

    own = dict(more or {})
    tracked = [track(words) for words in experiment.track] if processes.is_first() else []
    return sartor.fit(
        method,
        federations,
        resume=resume,
        reopen=reopen,
        sweep=settings_of(experiment, method)["sweep"],
        **{
            **training_of(experiment, method, federations),
            "out": out,
            "progress": progress,
            **own,
            "callbacks": [*tracked, *own.get("callbacks", ())],
        },
    )


def _equal(
    experiment: Experiment, federations: Callable[[int], Federation]
) -> dict[str, dict[str, Any]]:
    """Return what gives every method the same work, if the experiment asks for it."""
    if experiment.equal is None:
        return {}
    equal.check(experiment.equal, experiment.rounds, experiment.patience is not None)
    if len(experiment.methods) == 1:
        raise ConfigError("--equal makes methods alike; name several, with sartor compare.")
    plain = experiment.model_copy(update={"track": ()})

    def train(method: str, more: dict[str, Any]) -> Result:
        kept = {k: v for k, v in more.items() if k not in ("out", "resume", "progress")}
        return fit_one(plain, method, federations, None, None, resume=False, more=kept)

    return equal.lengths(experiment.methods, experiment.rounds, train)


def start(
    experiment: Experiment, name: str, progress: Progress, *, overwrite: bool = False
) -> tuple[Comparison, Path]:
    """Check everything that can be checked, make the run folder, and train.

    A fault that is found before the first round leaves no folder. Returns the results, and the
    folder; the last part of its name is ``name``, if the experiment names none.
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
    return experiment, train(experiment, out, progress, federation_of(experiment), resume=True)


def train(
    experiment: Experiment,
    out: Path,
    progress: Progress,
    federations: Callable[[int], Federation],
    *,
    resume: bool = False,
) -> Comparison:
    """Train every method of the experiment; several methods get a folder each inside ``out``."""
    several = None
    if len(experiment.methods) > 1:
        several, _ = begin_folder(ComparisonFolder, out, experiment.stored(), resume)
    results: dict[str, Result] = {}
    lost: DivergedError | None = None
    with stoppable(
        f"Stopped. The last checkpoint (one every {experiment.checkpoint_every} rounds) is "
        f"kept in {out}; resume with: sartor resume {out}"
    ):
        long = _equal(experiment, federations)
        for method in experiment.methods:
            inner = folder_of(experiment, method, out)
            try:
                results[method] = fit_one(
                    experiment,
                    method,
                    federations,
                    inner,
                    progress,
                    resume=resume,
                    more=long.get(method),
                )
            except DivergedError as error:  # the other methods are still worth having
                lost = error
                show.note(f"Warning: {method} is left out: {error}")
        if several is None and kind_of(experiment) == "a table":
            _train_alone(results, out)
    if lost is not None and not results:
        raise lost
    comparison = Comparison(results, config=experiment.stored())
    if several is not None and processes.is_first():
        try:
            several.write_comparison(comparison)
        except RunFolderError as error:  # the results are printed all the same
            show.note(f"Warning: {error}")
    if kind_of(experiment) != "a data set" and processes.current() is None:
        _write_facts(comparison, federations, out)
    return comparison


def _write_facts(
    comparison: Comparison, federations: Callable[[int], Federation], out: Path
) -> None:
    """Write what the pages of the clients show, while the data are at hand."""
    from sartor.report.client_facts import write_facts

    one = len(comparison) == 1
    try:
        write_facts(out, as_comparison(*comparison.values()) if one else comparison, federations)
    except (PFLError, OSError) as error:
        show.note(f"Warning: the pages of the clients will have no measures: {error}")


def _train_alone(results: dict[str, Result], out: Path) -> None:
    """Train every client alone too, so that terminal, page and JSON show the same gains."""
    for result in results.values():
        if result.known_baseline is None and result.can_compare:
            result.baseline()
            if processes.is_first():
                save_or_warn(functools.partial(RunFolder.open(out).write_result, result), out)


def folder_of(experiment: Experiment, method: str, out: Path) -> Path:
    """Return the folder of one method: ``out`` itself, or one inside if there are several."""
    return out if len(experiment.methods) == 1 else out / slug(method)


def free_folder(
    experiment: Experiment, name: str, *, overwrite: bool, resumable: bool = False
) -> Path:
    """Return --out, or the first of runs/TIME-NAME, TIME-NAME-2, ... that does not exist yet.

    Nothing is made yet. A folder that is not empty, and may not be replaced, is refused.
    """
    path = experiment.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    out, number = path, 2
    while experiment.out is None and out.exists():
        out, number = path.with_name(f"{path.name}-{number}"), number + 1
    if not _is_taken(out):
        return out
    if not overwrite:
        ways = ["use another --out", "--overwrite to replace it"]
        ways += [f"resume it with: sartor resume {out}"] * resumable
        fix = f"{', '.join(ways[:-1])}, or {ways[-1]}"
        raise RunFolderError(f"{out} exists and is not empty; {fix}")
    if not any((out / name).is_file() for name in (EXPERIMENT_FILE, "folder.json")):
        raise RunFolderError(
            f"{out} is not empty and is no run folder, so --overwrite does not touch it; use "
            "another --out."
        )
    return out


def _is_taken(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def new_folder(experiment: Experiment, name: str, *, overwrite: bool = False) -> Path:
    """Make the run folder of a new experiment and write the experiment into it."""
    out = free_folder(experiment, name, overwrite=overwrite, resumable=True)
    try:
        if _is_taken(out):  # creating it again removes what earlier runs left there, no more
            RunFolder.create(out, {}, overwrite=True)
            for file in ("folder.json", "config.json", "environment.json"):
                (out / file).unlink()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"The run folder {out} cannot be made ({error.strerror or error}); choose another "
            "place with --out."
        ) from error
    write_json(out / EXPERIMENT_FILE, experiment.model_copy(update={"out": out}).stored())
    return out


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
    """Read the experiment of a run folder; a RunFolderError says that there is none."""
    path = out / EXPERIMENT_FILE
    if (out / "advice.json").is_file() and not path.is_file():
        raise RunFolderError(
            f"{out} holds an advice, so there is nothing to resume; sartor report shows how to "
            "carry it out."
        )
    if not path.is_file():
        what = "is not the folder of a command" if out.is_dir() else "does not exist"
        raise RunFolderError(
            f"{out} {what}: there is no {path}. Give the folder that sartor run, compare or demo "
            "printed; resume a run of fit(..., out=...) with fit(..., resume=True)."
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} holds no experiment; it must be a JSON object.")
    return build(values, source=str(path))
