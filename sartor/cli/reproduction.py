"""``sartor reproduce``: list the reproductions, run one, print the verdicts and leave a page."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sartor.cli import show
from sartor.cli.interruption import stoppable
from sartor.cli.progress import reporter
from sartor.core.errors import ConfigError, RunFolderError
from sartor.engines.shard import processes
from sartor.results.tables import Table


def list_plans(*, json: bool) -> None:
    """Print every reproduction with what it is of."""
    from sartor import reproduce

    plans = [reproduce.load(name) for name in reproduce.names()]
    if json:
        show.json_line(
            [{"name": p.name, "title": p.title, "paper": p.paper, "item": p.item} for p in plans]
        )
        return
    rows = [[p.name, p.item, p.title, p.paper.split(",")[0] + " et al."] for p in plans]
    show.table(Table(["name", "item", "shows", "paper"], rows))


def reproduce_one(
    name: str,
    *,
    quick: bool,
    repeats: int | None,
    device: str,
    out: Path | None,
    resume: bool,
    jobs: int,
    rows: list[str] | None,
    columns: list[str] | None,
    json: bool,
) -> None:
    """Run a reproduction, or go on with it.

    Args:
        name: of ``sartor reproduce --list``.
        quick: take the short form.
        repeats: seeds in place of the plan's.
        device: "auto", "cpu" or "cuda".
        out: the folder; else ``runs/reproduce-NAME``, with ``-quick``.
        resume: go on with what is in the folder.
        jobs: processes that share the passes.
        rows: the rows to run; all if None.
        columns: the columns to run; all if None.
        json: whether stdout ends with a line of JSON.
    """
    from sartor import reproduce
    from sartor.report import write_report

    folder = out or Path("runs") / f"reproduce-{name}{'-quick' * quick}"

    def check() -> None:
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} is there already; go on with --resume, or choose another --out."
            )

    processes.first(check)
    if jobs > 1 and processes.current() is not None:
        raise ConfigError("torchrun shares every pass among its processes; leave --jobs out.")
    plan = reproduce.load(name, quick=quick, repeats=repeats)
    reproduce.chosen(plan, rows, columns)  # wrong names are told before any work
    with stoppable(
        f"Stopped. Finished passes are kept in {folder}; go on with the same command and --resume."
    ):
        if jobs > 1:
            _share(name, quick, repeats, device, folder, jobs, rows, columns)
        outcome = reproduce.run(
            name,
            quick=quick,
            repeats=repeats,
            device=device,
            out=folder,
            rows=rows,
            columns=columns,
            progress=reporter(plain=json),
            told=show.note,
        )
    if not processes.is_first():
        return
    outcome.write(folder / "outcome.json")
    for number in range(len(outcome.plan.tables)):
        show.table(outcome.table(number), quiet=json)
        show.say(quiet=json)
    for table in outcome.paired():
        show.table(table, quiet=json)
        show.say(quiet=json)
    for verdict in outcome.verdicts():
        show.say(f"{verdict.word:8} {verdict.claim} ({verdict.found})", quiet=json)
    for line in outcome.plan.differs:
        show.say(f"Differs: {line}", quiet=json)
    show.places(("Files", folder), ("Report", write_report(folder)), quiet=json)
    if json:
        show.json_line({**outcome.as_dict(), "out": str(folder)})


def _share(
    name: str,
    quick: bool,
    repeats: int | None,
    device: str,
    folder: Path,
    jobs: int,
    rows: list[str] | None,
    columns: list[str] | None,
) -> None:
    """Run every pass in one of several processes; the caller then puts everything together."""
    from sartor import reproduce

    given: dict[str, Any] = {"name": name, "quick": quick, "repeats": repeats, "device": device}
    # Without rows: this makes the folder, and looks for the data, before they share.
    reproduce.run(**given, out=folder, rows=(), columns=columns)
    reproduce.unclaim(folder)
    call = (
        "import sys, json; from sartor import reproduce; reproduce.run(**json.loads(sys.argv[1]))"
    )
    some = {"rows": rows, "columns": columns, "shared": True}
    order = json_module.dumps({**given, **some, "out": str(folder)})
    threads = max(1, (os.cpu_count() or 1) // jobs)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", call, order],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        for _ in range(jobs)
    ]
    told = reproduce.finished(folder)
    try:
        while any(child.poll() is None for child in children):
            time.sleep(0.5)
            done = reproduce.finished(folder)
            if done > told:
                told = done
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
            "finished passes are kept, go on with --resume."
        )
