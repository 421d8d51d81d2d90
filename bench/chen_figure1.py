"""Figure 1 of Chen et al. 2023: FedAvg, LocalTrain, fine-tuning and FedProx against heterogeneity.

    python -m bench.chen_figure1 [--repeats 100] [--json FILE] [--png FILE]

Accuracy on fresh samples of every client, when the clients' true models lie at distance R from a
common one. All radii and repetitions (and values of λ) train as lanes of one pass a method. The
settings, the reference numbers and the shapes to be checked are in ``chen_figure1.toml``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import load
from sartor import methods
from sartor.cohort import Participation
from sartor.data.federation import Federation
from sartor.data.synthetic import Logistic, logistic_loss, logistic_radii
from sartor.engines import make_engine
from sartor.local import Local
from sartor.scores import Run
from sartor.simulation import Simulation
from sartor.table import Table
from sartor.task import Task

SETTINGS = Path(__file__).with_suffix(".toml")
Curves = dict[str, np.ndarray]
"""Accuracies in %, (repeats, radii), by name."""


# ---------------------------------------------------------------------- running


def federations(data: dict[str, Any]) -> list[list[Federation]]:
    """Make the data: one federation for every repetition and radius; radii share the features."""
    sizes = {name: data[name] for name in ("clients", "samples", "dim", "test_samples")}
    return [
        [federation for federation, _ in logistic_radii(data["radii"], seed=seed, **sizes)]
        for seed in range(data["repeats"])
    ]


def train(one: dict[str, Any], made: list[list[Federation]], dim: int, chunk: int) -> Curves:
    """Train a pass and return its curves.

    Runs that differ in λ or R alone are neighbours with one seed: they see the same batches, which
    are then drawn once.
    """
    task = Task(Logistic(dim), criterion=logistic_loss)
    record = methods.build(one["method"], task, Local(**one["local"]), one.get("options", {}))
    sweep: dict[str, list[float]] = one.get("sweep", {})
    grid = [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]
    lanes = [
        (federation, Run(seed, {**one.get("hyper", {}), **values}))
        for seed, row in enumerate(made)
        for federation in row
        for values in grid
    ]
    simulation = Simulation(
        record,
        task,
        [federation for federation, _ in lanes],
        [run for _, run in lanes],
        lambda arena: make_engine("auto", arena, chunk, task),
        rounds=one["rounds"],
        participation=Participation(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        eval_every=one["rounds"],
        points=tuple(one["curves"].values()),
        eval_start=False,
    )
    while not simulation.finished:
        simulation.step()
    curves = {}
    for name, point in one["curves"].items():
        scores = simulation.scores()[point, "test"]
        accuracy = 100 * (scores.correct[:, -1] / scores.count).mean(1)
        cube = accuracy.reshape(len(made), len(made[0]), len(grid))
        curves |= {name.format(**values): cube[:, :, k] for k, values in enumerate(grid)}
    return curves


# ---------------------------------------------------------------------- judging


def crossings(radii: Sequence[float], upper: np.ndarray, lower: np.ndarray) -> list[float]:
    """Return where two curves cross, between the radii by straight lines."""
    gap = upper - lower
    return [
        float(radii[k] + (radii[k + 1] - radii[k]) * gap[k] / (gap[k] - gap[k + 1]))
        for k in range(len(gap) - 1)
        if (gap[k] > 0) != (gap[k + 1] > 0)
    ]


def judge(rule: dict[str, Any], curves: Curves, settings: dict[str, Any]) -> tuple[bool, str]:
    """Say whether a rule holds of the means over repetitions, and the number that decides it."""
    radii, kind = settings["data"]["radii"], rule["kind"]
    if kind == "near_reference":
        far = farthest(curves, settings)
        return far <= rule["tolerance"], f"at most {far:.2f} standard errors away"
    mean = {name: curve.mean(0) for name, curve in curves.items()}
    curve = mean[rule["curve"]]
    if kind == "best_at_start":
        lead = float(curve[0] - max(mean[name][0] for name in rule["among"]))
        return lead > 0, f"by {lead:.2f} points"
    if kind == "falls":
        step = float(np.diff(curve).max())
        return step < 0, f"smallest fall {-step:.2f} points"
    if kind == "flat":
        spread, rise = float(np.ptp(curve)), float(curve[-1] - curve[0])
        return spread <= rule["tolerance"], f"range {spread:.2f}, rise {rise:+.2f} points"
    if kind == "envelope":
        below = float((np.max([mean[name] for name in rule["among"]], 0) - curve).max())
        return below <= rule["tolerance"], f"at most {below:.2f} points below"
    other = mean[rule["other"]]
    if kind == "resembles":
        apart = float(np.abs(curve - other).max())
        return apart <= rule["tolerance"], f"at most {apart:.2f} points apart"
    found = crossings(radii, curve, other)
    places = ", ".join(f"{radius:.2f}" for radius in found) or "nowhere"
    if kind == "crosses_once":
        return len(found) == 1 and bool(curve[0] > other[0]), f"R = {places}"
    if kind == "crosses_near":
        close = [abs(radius - rule["at"]) <= rule["tolerance"] for radius in found]
        return any(close), f"R = {places}"
    raise ValueError(f"unknown kind of rule {kind!r} in {SETTINGS.name}")


def farthest(curves: Curves, settings: dict[str, Any]) -> float:
    """Return the largest distance from the reference, in standard errors of the difference.

    The reference is a mean over repetitions too, which spread as ours do.
    """
    share = 1 + len(next(iter(curves.values()))) / settings["reference"]["repeats"]
    radii, far = settings["data"]["radii"], []
    for (name, radius), value in reference(settings).items():
        k = radii.index(radius)
        error = standard_error(curves[name])[k] * np.sqrt(share)
        far.append(abs(curves[name][:, k].mean() - value) / error)
    return float(np.max(far))


def reference(settings: dict[str, Any]) -> dict[tuple[str, float], float]:
    """Return the reference numbers, by curve and radius."""
    return {
        (name, radius): value
        for panel in settings["panels"]
        for name, values in settings["reference"][panel].items()
        if name != "radii"
        for radius, value in zip(settings["reference"][panel]["radii"], values, strict=True)
    }


# ---------------------------------------------------------------------- showing


def table(panel: str, curves: Curves, settings: dict[str, Any]) -> Table:
    """Put mean ± standard error over repetitions beside the reference."""
    names, known = settings["panels"][panel], reference(settings)

    def cell(name: str, k: int, radius: float) -> str:
        mean, error = curves[name][:, k].mean(), standard_error(curves[name])[k]
        beside = f" ({known[name, radius]:.1f})" if (name, radius) in known else ""
        return f"{mean:.1f} ± {error:.2f}{beside}"

    radii = settings["data"]["radii"]
    rows = [[f"{r:g}", *(cell(name, k, r) for name in names)] for k, r in enumerate(radii)]
    return Table(["R", *names], rows, title=f"{panel}: accuracy in % ± s.e. (reference)")


def standard_error(curve: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over repetitions, (radii,); NaN for one repetition."""
    repeats = len(curve)
    if repeats < 2:
        return np.full(curve.shape[1], np.nan)
    return np.asarray(curve.std(0, ddof=1) / np.sqrt(repeats))


def draw(path: Path, curves: Curves, settings: dict[str, Any]) -> None:
    """Draw both panels, with standard errors; the reference numbers are crosses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    known = reference(settings)
    for place, (panel, names) in enumerate(settings["panels"].items(), 1):
        axes = figure.add_subplot(1, len(settings["panels"]), place)
        for number, name in enumerate(names):
            mean, error = curves[name].mean(0), standard_error(curves[name])
            colour = f"C{number}"
            axes.errorbar(
                settings["data"]["radii"], mean, error, color=colour, label=name, capsize=2
            )
            points = [(radius, value) for (owner, radius), value in known.items() if owner == name]
            if points:
                axes.plot(*zip(*points, strict=True), "x", color=colour)
        axes.set(title=f"Figure 1, {panel}", xlabel="R", ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def main() -> int:
    """Train, print, judge and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.chen_figure1", description=__doc__)
    parser.add_argument("--repeats", type=int, help="repetitions (default 100)")
    parser.add_argument("--json", type=Path, help="write all accuracies here")
    parser.add_argument("--png", type=Path, help="draw the figure here")
    args = parser.parse_args()
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    data = settings["data"]
    data["repeats"] = args.repeats or data["repeats"]
    meter, clock = load.Meter(), Clock()
    made = federations(data)
    clock.stop(f"data of {sum(map(len, made))} runs")
    curves: Curves = {}
    for one in settings["passes"]:
        curves |= train(one, made, data["dim"], settings["chunk"])
        clock.stop(one["method"])
    for panel in settings["panels"]:
        print(table(panel, curves, settings), end="\n\n")
    verdicts = [(rule["claim"], *judge(rule, curves, settings)) for rule in settings["rules"]]
    for claim, holds, why in verdicts:
        print(f"{'PASS' if holds else 'FAIL'}  {claim} ({why})")
    print(f"\n{clock}; other processes kept {meter.others():.1f} processors busy")
    if args.json is not None:
        found = {
            "radii": data["radii"],
            "accuracy": {name: curve.tolist() for name, curve in curves.items()},
            "rules": [{"claim": c, "holds": h, "found": w} for c, h, w in verdicts],
            "seconds": clock.parts,
        }
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
    if args.png is not None:
        draw(args.png, curves, settings)
    return 0 if all(holds for _, holds, _ in verdicts) else 1


class Clock:
    """Wall and processor seconds of the parts of a run."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}
        self.last = (time.perf_counter(), time.process_time())

    def stop(self, name: str) -> None:
        """Book the time since the last call."""
        now = (time.perf_counter(), time.process_time())
        self.parts[name] = (now[0] - self.last[0], now[1] - self.last[1])
        self.last = now

    def __str__(self) -> str:
        """Return the parts and their sum."""
        wall, busy = (sum(column) for column in zip(*self.parts.values(), strict=True))
        parts = ", ".join(f"{name} {part[0]:.1f}" for name, part in self.parts.items())
        return f"{wall:.1f} s ({parts}); {busy:.1f} processor seconds"


if __name__ == "__main__":
    sys.exit(main())
