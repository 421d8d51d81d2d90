"""Seconds a round: Sartor, its reference engine, a plain PyTorch loop, and the package fluke-fl.

All train federated averaging on the same partition with the same network, batch size, epochs, rate
and number of threads, and all are evaluated on the test samples of every client after every round;
that is part of the time. Each contender runs in a process of its own, and they change their order
from repeat to repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import load
from bench.workloads import WORKLOADS, Workload, quick

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"
NAMES = {
    "sartor": "Sartor",
    "reference": "Sartor, reference engine",
    "plain": "plain PyTorch loop",
    "fluke": "fluke-fl",
}
Found = dict[str, Any]


class Failed(Exception):
    """A contender or the preparation did not finish; the text says why."""


def call(python: str, module: str, *args: str, threads: int) -> Found:
    """Run a module of ours and return the JSON object on its last line."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env["PYTHONPATH"] = str(ROOT)
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
    """Return the interpreter of an environment with fluke-fl, made on first use."""
    python = CACHE / "venv" / "bin" / "python"
    if (CACHE / "venv" / "ready").exists():
        return str(python)
    if not install:
        raise Failed("not installed yet (run once without --quick)")
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    print("making an environment with fluke-fl (once; some minutes) ...", flush=True)
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
    """Run all contenders on a workload, ``--repeats`` times in changing order."""
    pythons = {}
    for name in args.contenders:
        try:
            pythons[name] = other_python(not args.quick) if name == "fluke" else sys.executable
        except Failed as error:
            print(f"{NAMES[name]}: left out, {error}")
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
                    print(f"{NAMES[name]}: left out, {error}")
                    pythons.pop(name)
                    reports.pop(name)
    found = {name: summary(runs, about["steps"]) for name, runs in reports.items() if runs}
    return {"workload": asdict(workload), **about, "contenders": found}


def summary(runs: list[Found], steps: float) -> Found:
    """Bring the repeats of a contender together; the first round of each is left out."""
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


def show(found: Found, workload: Workload, device: str) -> None:
    """Print the table of a workload."""
    gpu = device == "cuda"
    print(f"\n{workload.name}: {workload.describe()}")
    print(
        f"data: {found['source']}; {found['least']} to {found['most']} training samples a client; "
        f"{found['steps']:.0f} client-steps a round"
    )
    base = found["contenders"].get("plain", {}).get("seconds")
    head = f"{'contender':26} {'s a round':>10} {'(range)':>17} {'x plain':>8} {'steps/s':>9}"
    head += f" {'peak MB':>8}" + (f" {'GPU MB':>8}" if gpu else "")
    print(f"{head} {'accuracy':>9}")
    for name, row in found["contenders"].items():
        ratio = f"{base / row['seconds']:.2f}" if base else "-"
        spread = f"({row['fastest']:.3f}-{row['slowest']:.3f})"
        line = f"{NAMES[name]:26} {row['seconds']:10.4f} {spread:>17} {ratio:>8}"
        line += f" {row['steps_per_second']:9.0f} {row['memory_mb']:8.0f}"
        line += f" {row['gpu_memory_mb']:8.0f}" if gpu else ""
        print(line + f" {statistics.mean(row['accuracy']):9.4f}")
    for name, row in found["contenders"].items():
        if row["parts"]:
            times = ", ".join(f"{part} {value:.4f}" for part, value in row["parts"].items())
            print(f"  {NAMES[name]}, seconds a round by part: {times}")
    noisy = max((row["others"] for row in found["contenders"].values()), default=0.0)
    if noisy > load.QUIET:
        print(f"  note: other processes kept up to {noisy:.1f} processors busy; repeat when quiet")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--workload", nargs="+", choices=[*WORKLOADS, "all"], default=["all"])
    add("--rounds", type=int, help="timed rounds a repeat, after one that is not (default 3)")
    add("--repeats", type=int, help="how often each contender runs, in changing order (default 2)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every contender")
    add("--contenders", nargs="+", choices=list(NAMES), default=list(NAMES))
    add("--partition", help="instead of the workload's own, such as iid")
    add("--npz", type=Path, help="images: x_train, y_train, x_test, y_test")
    add(
        "--quick", action="store_true", help="a tenth of the data, two rounds, once: under a minute"
    )
    add("--json", type=Path, help="write all numbers here")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.repeats = args.repeats or (1 if args.quick else 2)
    if "all" in args.workload:
        args.workload = [name for name in WORKLOADS if not (args.quick and name == "many")]
    if args.npz is not None:
        args.npz = args.npz.resolve()
    return args


def main() -> int:
    """Measure what was asked for."""
    args = arguments()
    machine = platform.processor() or platform.machine()
    print(f"FedAvg on {args.device} ({machine}), {args.threads} threads of every contender")
    print(
        f"median of {args.rounds} x {args.repeats} rounds, first rounds left out; "
        "every round includes testing on all clients"
    )
    everything = []
    for name in args.workload:
        workload = quick(WORKLOADS[name]) if args.quick else WORKLOADS[name]
        workload = replace(workload, partition=args.partition or workload.partition)
        try:
            found = measure(workload, args)
        except Failed as error:
            print(f"{name}: {error}")
            return 1
        show(found, workload, args.device)
        everything.append(found)
    if args.json is not None:
        args.json.write_text(json.dumps({"device": args.device, "workloads": everything}, indent=1))
        print(f"\nnumbers: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
