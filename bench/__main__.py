"""Time a round of Sartor, its reference engine, a plain PyTorch loop, and the package fluke-fl.

All contenders train federated averaging on the same partition with the same network, batch size,
epochs, learning rate and number of threads. After every round they are evaluated on the test
samples of every client, which is part of the time. Each contender runs in its own process, and the
order changes from repeat to repeat. The table also shows the floor: the shortest time that the
operations and bytes of a round take at the rates of this machine (bench/floors.py).

    python -m bench --json FOLDER --html PAGE       measure, save the numbers, write a page
    python -m bench --history FOLDER [--html PAGE]  do not measure; show the ratios by commit
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import load, results
from bench.floors import Work
from bench.rates import Rates
from bench.results import CACHE, NAMES, ROOT, make_folder
from bench.workloads import WORKLOADS, Workload, quick
from sartor.core.errors import PFLError

Found = dict[str, Any]


class Failed(Exception):
    """Raised when a contender or the preparation does not finish; the text says why."""


def call(python: str, module: str, *args: str, threads: int) -> Found:
    """Run a module of this package and return the JSON object on its last line."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env["PYTHONPATH"] = str(ROOT)
    env.setdefault("SARTOR_ACCELERATE", "all")
    done = subprocess.run(
        [python, "-m", module, *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Failed(lines[-1][:200]) from None
    return found


def other_python(install: bool) -> str:
    """Return the interpreter of an environment with fluke-fl; create it on first use."""
    python = CACHE / "venv" / "bin" / "python"
    if (CACHE / "venv" / "ready").exists():
        return str(python)
    if not install:
        raise Failed("not installed yet (run once without --quick)")
    make_folder(CACHE)
    print("creating an environment with fluke-fl (once; a few minutes) ...", flush=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(CACHE / "venv")],
        [str(python), *pip, "-c", str(ROOT / "constraints.txt"), "fluke-fl"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise Failed(f"cannot be installed: {errors[-1][:200]}")
    (CACHE / "venv" / "ready").touch()
    return str(python)


def measure(workload: Workload, args: argparse.Namespace) -> Found:
    """Run all contenders on a workload, ``--repeats`` times, in changing order."""
    pythons: dict[str, str] = {}
    left_out: dict[str, str] = {}

    def leave_out(name: str, error: Failed) -> None:
        print(f"{NAMES[name]}: left out, {error}")
        left_out[name] = str(error)

    for name in args.contenders:
        try:
            pythons[name] = other_python(not args.quick) if name == "fluke" else sys.executable
        except Failed as error:
            leave_out(name, error)
    reports: dict[str, list[Found]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--npz", str(args.npz)] if args.npz else []
        text = json.dumps(asdict(workload))
        about = call(sys.executable, "bench.prepare", text, folder, *extra, threads=args.threads)
        for repeat in range(args.repeats):
            turn = list(pythons)[repeat % len(pythons) :] + list(pythons)[: repeat % len(pythons)]
            for name in turn:
                command = [name, folder, "--rounds", str(args.rounds + 1), "--device", args.device]
                command += ["--threads", str(args.threads), "--seed", str(repeat)]
                try:
                    reports[name].append(
                        call(pythons[name], "bench.worker", *command, threads=args.threads)
                    )
                except Failed as error:
                    leave_out(name, error)
                    pythons.pop(name)
                    reports.pop(name)
    found = {name: summary(runs, about["steps"]) for name, runs in reports.items() if runs}
    return {"workload": asdict(workload), **about, "contenders": found, "left_out": left_out}


def summary(runs: list[Found], steps: float) -> Found:
    """Summarise the repeats of a contender, without the first round of each."""
    rounds = [s for run in runs for s in run["seconds"][1:]]
    seconds = statistics.median(rounds)
    parts = {
        part: statistics.median(s for run in runs for s in run["parts"][part][1:])
        for part in runs[0]["parts"]
    }
    return {
        "seconds": seconds,
        "fastest": min(rounds),
        "slowest": max(rounds),
        "rounds": len(rounds),
        "steps_per_second": steps / seconds,
        "memory_mb": max(run["memory_mb"] for run in runs),
        "memory_before_mb": max(run["memory_before_mb"] for run in runs),
        "gpu_memory_mb": max((run.get("gpu_memory_mb", 0.0) for run in runs), default=0.0),
        "accuracy": [run["accuracy"][-1] for run in runs],
        "first_round": statistics.median(run["seconds"][0] for run in runs),
        "parts": parts,
        "others": max(run["others"] for run in runs),
        "torch": runs[0]["torch"],
    }


def show(found: Found, record: Found) -> None:
    """Print the table of a workload."""
    gpu, workload = record["device"] == "cuda", Workload(**found["workload"])
    print(f"\n{workload.name}: {workload.describe()}")
    print(
        f"data: {found['source']}; {found['least']} to {found['most']} training samples a client; "
        f"{found['steps']:.0f} client-steps a round"
    )
    head = f"{'contender':26} {'s a round':>10} {'(range)':>17} {'x plain':>8} {'steps/s':>9}"
    head += f" {'floor %':>8} {'peak MB':>8}" + (f" {'GPU MB':>8}" if gpu else "")
    print(f"{head} {'accuracy':>9}")
    for name, row in found["contenders"].items():
        ratio, share = results.ratio(found, name), results.share(found, row["seconds"], record)
        spread = f"({row['fastest']:.3f}-{row['slowest']:.3f})"
        line = f"{NAMES[name]:26} {row['seconds']:10.4f} {spread:>17}"
        line += f" {f'{ratio:.2f}' if ratio else '-':>8} {row['steps_per_second']:9.0f}"
        line += f" {f'{100 * share:.1f}' if share else '-':>8} {row['memory_mb']:8.0f}"
        line += f" {row['gpu_memory_mb']:8.0f}" if gpu else ""
        print(line + f" {statistics.mean(row['accuracy']):9.4f}")
    for name, row in found["contenders"].items():
        if row["parts"]:
            times = ", ".join(f"{part} {value:.4f}" for part, value in row["parts"].items())
            print(f"  {NAMES[name]}, seconds a round by part: {times}")
    least = Work(**found["work"]).floor(Rates(**record["rates"]))
    print(f"  floor: {least['arithmetic']:.4f} by arithmetic, {least['memory']:.4f} by memory")
    if results.busy(found) > load.QUIET:
        noisy = results.busy(found)
        print(f"  note: other processes kept up to {noisy:.1f} processors busy; repeat when idle")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workload", nargs="+", choices=[*WORKLOADS, "all"], default=["all"])
    add("--rounds", type=int, help="timed rounds per repeat, after one warm-up round (default 3)")
    add("--repeats", type=int, help="how often each contender runs, in changing order (default 2)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads of each contender",
    )
    add("--contenders", nargs="+", choices=list(NAMES), default=list(NAMES))
    add("--partition", help="replaces that of the workload, such as iid")
    add("--npz", type=Path, help="images to use: x_train, y_train, x_test, y_test")
    add(
        "--quick",
        action="store_true",
        help="a tenth of the data, two rounds, one repeat: under a minute",
    )
    add("--history", nargs="+", type=Path, help="show these files or folders without measuring")
    results.add_outputs(parser)
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.repeats = args.repeats or (1 if args.quick else 2)
    if "all" in args.workload:
        args.workload = [name for name in WORKLOADS if not (args.quick and name == "many")]
    if args.npz is not None:
        args.npz = args.npz.resolve()
    return args


def look_back(args: argparse.Namespace) -> int:
    """Show earlier measurements."""
    try:
        records = results.read(args.history)
        if rows := results.history(records):
            print(results.history_table(rows))
        if args.html is not None:
            from bench.page import write_page

            print(f"page: {write_page(records, args.html)}")
    except PFLError as error:
        print(error)
        return 1
    return 0


def main() -> int:
    """Run the command line."""
    args = arguments()
    if args.history:
        return look_back(args)
    python, rates_of = sys.executable, ["--device", args.device]
    try:
        rates = call(python, "bench.rates", *rates_of, threads=args.threads)
    except Failed as error:
        print(f"the rates of the machine: {error}")
        return 1
    print(f"FedAvg on {args.device}, {args.threads} threads of every contender")
    print(f"{Rates(**rates)} in a large product and a large copy")
    print(
        f"median of {args.rounds} x {args.repeats} rounds, first rounds left out; "
        "every round includes testing on all clients"
    )
    settings = ("rounds", "repeats", "threads", "quick")
    content: Found = {"device": args.device, "rates": rates, "workloads": []}
    content["settings"] = {name: getattr(args, name) for name in settings}
    for name in args.workload:
        workload = quick(WORKLOADS[name]) if args.quick else WORKLOADS[name]
        workload = replace(workload, partition=args.partition or workload.partition)
        try:
            found = measure(workload, args)
        except Failed as error:
            print(f"{name}: {error}")
            return 1
        show(found, content)
        content["workloads"].append(found)
    print()
    results.write_outputs(args, "rounds", **content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
