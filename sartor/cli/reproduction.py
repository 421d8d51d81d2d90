"""``sartor reproduce``: list the reproductions, run one, print the verdicts and leave a page."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from sartor.cli import show
from sartor.cli.flags import Json, argument, option
from sartor.cli.interruption import stoppable
from sartor.core.errors import ConfigError, RunFolderError
from sartor.engines.shard import processes
from sartor.results.tables import Table
from sartor.training.progress import reporter


def list_plans(*, json: bool) -> None:
    """Print every reproduction with what it is of."""
    from sartor import reproduce

    plans = [reproduce.load(name) for name in reproduce.names()]
    if json:
        keys = ("name", "title", "paper", "item")
        show.json_line([{key: getattr(plan, key) for key in keys} for plan in plans])
        return
    rows = [[p.name, p.item, p.title, p.paper.split(",")[0] + " et al."] for p in plans]
    show.table(Table(["name", "item", "shows", "paper"], rows))


def reproduce(
    name: Annotated[str | None, argument("A table or figure; see --list.", "[NAME]")] = None,
    list_: Annotated[bool, option("What there is.", None, "--list")] = False,
    quick: Annotated[
        bool, option("The short form: minutes on two cores.", None, "--quick")
    ] = False,
    repeats: Annotated[int | None, option("Allocations or repeats of a cell.", "K", min=1)] = None,
    device: Annotated[str, option("auto, cpu, cuda.", "NAME")] = "auto",
    out: Annotated[Path | None, option("Folder; else runs/reproduce-NAME.", "FOLDER")] = None,
    resume: Annotated[
        bool, option("Resume; finished passes are not repeated.", None, "--resume")
    ] = False,
    jobs: Annotated[int, option("Processes that share the passes.", "N", min=1)] = 1,
    row: Annotated[list[str] | None, option("Run this row only; may be repeated.", "NAME")] = None,
    column: Annotated[
        list[str] | None, option("This column only; may be repeated.", "NAME")
    ] = None,
    json: Json = False,
) -> None:
    """Repeat a table or figure of a paper, next to its numbers."""
    from sartor import reproduce as library
    from sartor.report import write_report

    if list_ or name is None:
        list_plans(json=json)
        return
    given: dict[str, Any] = {"name": name, "quick": quick, "repeats": repeats, "device": device}
    some: dict[str, Any] = {"rows": row or None, "columns": column or None}
    folder = out or Path("runs") / f"reproduce-{name}{'-quick' * quick}"

    def check() -> None:
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} is there already; resume it with --resume, or choose another --out."
            )

    processes.first(check)
    if jobs > 1 and processes.current() is not None:
        raise ConfigError("torchrun shares every pass among its processes; leave --jobs out.")
    plan = library.load(name, quick=quick, repeats=repeats)
    library.chosen(plan, **some)  # wrong names are reported before any work
    with stoppable(
        f"Stopped. Finished passes are kept in {folder}; resume with the same command and --resume."
    ):
        if jobs > 1:
            _share(given, some, folder, jobs)
        progress = reporter(plain=json)
        outcome = library.run(**given, **some, out=folder, progress=progress, reported=show.note)
    if not processes.is_first():
        return
    outcome.write(folder / "outcome.json")
    tables = [outcome.table(number) for number in range(len(outcome.plan.tables))]
    for table in (*tables, *outcome.paired()):
        show.table(table, quiet=json)
        show.say(quiet=json)
    for verdict in outcome.verdicts():
        show.say(f"{verdict.word:8} {verdict.claim} ({verdict.found})", quiet=json)
    for line in outcome.plan.differs:
        show.say(f"Differs: {line}", quiet=json)
    show.places(("Files", folder), ("Report", write_report(folder)), quiet=json)
    if json:
        show.json_line({**outcome.as_dict(), "out": str(folder)})


def _share(given: dict[str, Any], some: dict[str, Any], folder: Path, jobs: int) -> None:
    """Run every pass in one of several processes; the caller then puts everything together."""
    from sartor import reproduce

    # Without rows: this makes the folder, and looks for the data, before they share.
    reproduce.run(**given, out=folder, rows=(), columns=some["columns"])
    reproduce.unclaim(folder)
    call = (
        "import sys, json; from sartor import reproduce; reproduce.run(**json.loads(sys.argv[1]))"
    )
    order = json_module.dumps({**given, **some, "shared": True, "out": str(folder)})
    words = [sys.executable, "-c", call, order]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    children = [subprocess.Popen(words, env={**os.environ, **threads}) for _ in range(jobs)]
    reported = reproduce.finished(folder)
    try:
        while any(child.poll() is None for child in children):
            time.sleep(0.5)
            done = reproduce.finished(folder)
            if done > reported:
                reported = done
                show.note(f"{done} pass{'es' * (done > 1)} finished.")
        codes = [child.wait() for child in children]
    except BaseException:
        for child in children:
            child.terminate()
        raise
    finally:
        reproduce.unclaim(folder)
    if any(codes):
        raise RunFolderError(
            f"{sum(map(bool, codes))} of {jobs} processes ended with an error (see above); "
            "finished passes are kept; resume with --resume."
        )
