"""What the processes of the sharding tests run; as a program, what bears those processes.

``python -m tests.engines.shards`` reads lines, each a folder, a number of processes, WORLD_SIZE and
what else an environment needs, and jobs. It forks, because importing takes longer than running;
rank 0 of the processes leaves FOLDER/<job>.npz. A line with exit code and last words of each
process is the answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor.core.local import Local
from sartor.core.task import Task
from sartor.engines.shard import processes as group
from sartor.engines.shard.processes import Processes
from sartor.methods import METHODS, build
from sartor.runs import RunFolder
from sartor.training.simulation import Simulation
from tests.toys import Noisy, federation, net_task, outcome, run, simulation, two_allocations

LOCAL = Local(epochs=2, batch=3, lr=0.1)
Job = Callable[[Processes | None], Simulation]


def job(name: str, sweep: bool = False, **settings: Any) -> Job:
    """Return how a method is trained on five unequal clients, or on two allocations of them."""

    def make(processes: Processes | None) -> Simulation:
        task = Task(Noisy(), "fc") if settings.get("noisy") else net_task()
        options = settings.get("options", {})
        feds = two_allocations() if sweep else [federation()]
        rest = {k: v for k, v in settings.items() if k not in ("options", "noisy")}
        method = build(name, task, LOCAL, options)
        return simulation(method, task, feds, processes=processes, **rest)

    return make


FAST: dict[str, Job] = {
    "fedavg": job("fedavg", points=("pre", "post", "global")),
    "fedavg, two allocations": job("fedavg", sweep=True),
    "fedavg, a network of one's own": job("fedavg", sweep=True, noisy=True),
    "fedprox, one lane at a time": job(
        "fedprox", sweep=True, chunk=1, hyper=[{"prox_strength": 0.3}, {"prox_strength": 2.0}]
    ),
    "fedapa": job("fedapa", chunk=2),
    "fedala": job("fedala"),
    "pfedme": job("pfedme"),
    "scaffold": job("scaffold", engine="sequential"),
    "dichotomous": job("dichotomous", participation=1.0),
    "fedavg-ft, a cohort": job("fedavg-ft", participation=3, sweep=True),
    "fedavg, do no harm": job("fedavg", options={"do_no_harm": True}, points=("pre",)),
}
ALL: dict[str, Job] = {f"all/{name}": job(name, sweep=True) for name in METHODS}
RESUMED = job("fedprox", chunk=1, rounds=4)


def straight(processes: Processes | None, folder: Path) -> Simulation:
    """Run four rounds; rank 0 leaves a checkpoint after two."""
    sim = RESUMED(processes)
    sim.step()
    sim.step()
    if processes is not None and group.is_first():
        RunFolder.create(folder / "run", {}).write_checkpoint(2, *sim.state())
    return run(sim)


def resumed(processes: Processes | None, folder: Path) -> Simulation:
    """Continue from the checkpoint."""
    sim = RESUMED(processes)
    found = RunFolder.open(folder / "run").read_checkpoint()
    assert found is not None
    sim.load(*found[1:])
    assert sim.round_index == 2
    return run(sim)


def work(folder: Path, jobs: list[str]) -> None:
    """Run the jobs in this process, which is one of a group."""
    processes = group.current()
    for name in jobs:
        if name == "die" and not group.is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        if name in ("straight", "resumed"):
            sim = {"straight": straight, "resumed": resumed}[name](processes, folder)
        elif name == "other data":
            rank = 0 if processes is None else processes.rank
            task = net_task()
            sim = simulation(
                build("fedavg", task, LOCAL, {}), task, [federation(rank)], processes=processes
            )
        else:
            sim = run((FAST | ALL | {"die": FAST["fedavg"]})[name](processes))
        if group.is_first():
            found = outcome(sim)
            np.savez(folder / f"{name.replace('/', '-')}.npz", **_escaped(found))
    group.leave()


def _escaped(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.replace("/", "|"): v for k, v in found.items()}


def bear(rank: int, folder: Path, env: dict[str, str], jobs: list[str]) -> int:
    """Fork one process of a group, whose last words go to a file; return its number."""
    child = os.fork()
    if child:
        return child
    signal.alarm(300)  # the end of one that hangs
    os.environ.update(env, RANK=str(rank))
    words = (folder / f"words-{rank}").open("w")
    os.dup2(words.fileno(), sys.stderr.fileno())
    code = 2
    try:
        work(folder, jobs)
        code = 0
    except Exception as error:
        if group.should_report():
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main() -> None:
    """Bear a group of processes for every line that is read."""
    torch.set_num_threads(1)
    run(FAST["fedprox, one lane at a time"](None))  # what is imported late is imported once, too
    for line in sys.stdin:
        place, size, env, jobs = json.loads(line)
        folder = Path(place)
        children = [bear(rank, folder, env, jobs) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        words = [(folder / f"words-{rank}").read_text() for rank in range(size)]
        print(json.dumps(list(zip(codes, words, strict=True))), flush=True)


if __name__ == "__main__":
    main()
