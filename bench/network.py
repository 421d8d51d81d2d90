"""Compare a federation of four processes on this machine with the same run in one process.

``python -m bench.network [ROUNDS]`` prints the seconds until the end of the first round, those of
the median round, and both accuracies. Needs nvflare.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import sartor
from sartor.network.keys import init_project

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(sartor.__file__).parents[1])}
METHOD = "fedapa"


def main(rounds: int = 50) -> None:
    """Train both ways and print the times and accuracies."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = _prepare(folder, rounds)
        run = [sys.executable, "-m", "sartor"]
        began = time.time()
        words = ["serve", "experiment.toml", "--out", "run", "--host", "127.0.0.1", "--json"]
        server = subprocess.Popen([*run, *words], cwd=folder, env=ENV, stdout=subprocess.PIPE)
        clients = [
            subprocess.Popen(
                [*run, "join", f"keys/clients/{name}", "--data", name, "--device", "cpu"],
                cwd=folder,
                env=ENV,
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for name in names
        ]
        first = 0.0
        while server.poll() is None:
            status = folder / "run" / "status.json"
            if not first and status.exists() and json.loads(status.read_text())["round"] >= 1:
                first = time.time() - began
            time.sleep(0.02)
        for client in clients:
            client.wait(timeout=60)
        lines = (folder / "run" / "ledger.csv").read_text().splitlines()
        column = lines[0].split(",").index("seconds_round")
        seconds = [float(line.split(",")[column]) for line in lines[1:]]
        with (folder / "alone.log").open("w") as log:
            alone = subprocess.run(
                [*run, "run", "experiment.toml", "--data", "./all", "--out", "alone", "--json"],
                cwd=folder,
                env=ENV,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=True,
            )
        inside = (folder / "alone" / "ledger.csv").read_text().splitlines()
        at = inside[0].split(",").index("seconds_round")
        plain = [float(line.split(",")[at]) for line in inside[1:]]
        networked = json.loads((folder / "run" / "summary.json").read_text())
        single = json.loads((folder / "alone" / "summary.json").read_text())
        losses = [_losses(folder / name / "metrics.csv") for name in ("run", "alone")]
        worst = max(abs(losses[0][key] - losses[1][key]) for key in losses[0])
    assert alone.returncode == 0
    print(f"start to the end of round 1: {first:.1f} s (interpreters and torch included)")
    network, one = np.median(seconds[1:]), np.median(plain[1:])
    print(f"a round: median {network:.3f} s, in one process {one:.3f} s")
    print(f"accuracy: {_accuracy(networked)} over the network, {_accuracy(single)} in one process")
    print(f"largest difference of a client's mean loss, all rounds: {worst:.2g}")


def _prepare(folder: Path, rounds: int) -> list[str]:
    names = [f"client-{i + 1}" for i in range(4)]
    fed = sartor.Federation.from_dataset("digits", clients=4, partition="dirichlet:0.5")
    (folder / "all").mkdir()
    for i, name in enumerate(names):
        (folder / name).mkdir()
        rows = np.concatenate([np.asarray(fed.split(s).of(i)) for s in ("train", "test")])
        for place in (name, "all"):
            x, y = fed.x[rows].numpy(), fed.y[rows].numpy()
            np.savez(folder / place / f"{name}.npz", x=x, y=y)
    init_project(folder / "keys", address=f"127.0.0.1:{18000 + os.getpid() % 2000}", clients=names)
    (folder / "experiment.toml").write_text(
        f'method = "{METHOD}"\nrounds = {rounds}\nlr = 0.1\nmodel = "dnn"\n'
        'points = ["pre"]\ncheckpoint_every = 1\n'
    )
    return names


def _losses(path: Path) -> dict[tuple[str, ...], float]:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    where = {name: k for k, name in enumerate(lines[0])}
    keys = ("round", "client", "point", "split")
    return {tuple(row[where[k]] for k in keys): float(row[where["loss"]]) for row in lines[1:]}


def _accuracy(summary: object) -> str:
    found = re.search(r'"accuracy": ([0-9.]+)', json.dumps(summary))
    return "?" if found is None else f"{100 * float(found[1]):.2f}%"


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:2]))
