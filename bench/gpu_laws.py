"""Hold every method on a GPU to the reference engine, in float64, and write a dated record.

    python -m bench.gpu_laws [--device cuda] [--only PATTERN] [--jobs N] [--page FILE]

Every configuration of the groups "reference" and "networks" of ``bench.same_numbers`` trains twice
in float64: one client after the other on the CPU, and on the device as a user would train it
(vectorised, in CUDA graphs). Scores, final models and snapshots must agree to a relative 1e-9, and
counted bytes and gradients exactly. Networks that compute in bfloat16 are left out: a GPU rounds
them elsewhere. It needs torch and numpy alone. The exit status is 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sartor
from bench.same_numbers import COUNTERS, Configuration, configurations, content_of
from sartor.errors import PFLError

TOLERANCE = 1e-9
"""The largest relative difference of a number; sums of float64 differ by their order alone."""


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration: the largest difference and where, or a refusal."""

    name: str
    difference: float
    where: str
    refused: str = ""

    @property
    def holds(self) -> bool:
        """Whether both engines agree, or refuse alike."""
        return self.difference <= TOLERANCE


def chosen(only: str) -> Iterator[Configuration]:
    """Yield the configurations of a pattern that can be trained with other settings."""
    for name, one in configurations().items():
        group = name.partition("/")[0]
        if (
            group in ("reference", "networks")
            and one.train
            and (name == only or fnmatch.fnmatch(name, only))
        ):
            yield one


def compared(name: str, device: str) -> Outcome:
    """Compare a configuration by its name, as other processes do."""
    torch.set_num_threads(1)
    try:
        return compare(next(chosen(name)), device)
    except RuntimeError as error:  # of PyTorch, or of CUDA: that is a law broken, too
        return Outcome(name, np.inf, str(error).splitlines()[0])


def outcomes_of(wanted: Sequence[str], device: str, jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes, in order; ``jobs`` processes share the device."""
    if jobs == 1:
        yield from (compared(name, device) for name in wanted)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        # Several at a time, so that a process meets the same kernels again.
        yield from pool.map(compared, wanted, [device] * len(wanted), chunksize=6)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compare(one: Configuration, device: str) -> Outcome:
    """Train a configuration on the reference engine and on a device."""
    assert one.train is not None
    wide = {"dtype": "float64"}
    found, refusals = [], []
    for settings in (
        {**wide, "engine": "sequential", "device": "cpu"},
        {**wide, "engine": "auto", "device": device, "chunk": None},
    ):
        try:
            found.append(dict(_flat("", content_of(one.train(**settings)))))
            refusals.append("")
        except PFLError as error:
            refusals.append(type(error).__name__)
    if len(found) < 2:
        same = refusals[0] == refusals[1]
        return Outcome(one.name, 0.0 if same else np.inf, "refused", "; ".join(refusals))
    reference, other = found
    if reference.keys() != other.keys():
        return Outcome(one.name, np.inf, "other entries")
    gaps = {key: _gap(key, reference[key], other[key]) for key in reference}
    where = max(gaps, key=lambda key: gaps[key])
    return Outcome(one.name, gaps[where], where)


def _flat(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every number of nested dicts and lists as an array with its name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _flat(f"{name}/{number}", inner)
    elif value is not None and not isinstance(value, str):
        tensor = isinstance(value, torch.Tensor)
        yield name, np.asarray(value.detach().cpu() if tensor else value, dtype=np.float64)


def _gap(name: str, one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest relative difference; counters must agree exactly."""
    if one.shape != other.shape or not (np.isnan(one) == np.isnan(other)).all():
        return float("inf")
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(one - other))
    if any(f"/{counter}" in name for counter in COUNTERS):
        return float("inf") if apart.any() else 0.0
    return float((apart / np.maximum(1.0, np.nan_to_num(np.abs(one)))).max(initial=0.0))


def page(outcomes: Sequence[Outcome], device: str, seconds: float) -> str:
    """Return the record as a page."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    failed = [o for o in outcomes if not o.holds]
    refused = sum(1 for o in outcomes if o.refused)
    lines = [
        "# Laws of all methods on a GPU",
        "",
        "`make gpu-laws` trains every configuration below twice in float64: one client after the",
        "other on the CPU, and on the GPU as a user would. It writes this page.",
        "",
        f"- **Date** {date.today().isoformat()}, Sartor {sartor.__version__}, torch "
        f"{torch.__version__}, {name}",
        f"- **Configurations** {len(outcomes)}: {len(outcomes) - len(failed)} agree "
        f"({refused} of them are refused alike), {len(failed)} differ; {seconds:.0f} s",
        f"- **Largest difference** {max((o.difference for o in outcomes), default=0.0):.1e} "
        f"relative; the tolerance is {TOLERANCE:.0e}",
        "",
        "| method | configurations | largest difference | where |",
        "|---|---|---|---|",
    ]
    methods: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        methods.setdefault(outcome.name.split("/")[1], []).append(outcome)
    for method, group in methods.items():
        worst = max(group, key=lambda o: o.difference)
        lines.append(f"| {method} | {len(group)} | {worst.difference:.1e} | {worst.name} |")
    lines += ["", *(f"- **differs**: {o.name}, {o.where}, {o.difference:.1e}" for o in failed)]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print progress, and write the page if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="*")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--minutes", type=float, help="stop after so many, and say what is left")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; run this on a machine with one, or --device cpu.")
        return 2
    began, outcomes = time.perf_counter(), []
    wanted = [one.name for one in chosen(given.only)]
    for number, outcome in enumerate(outcomes_of(wanted, given.device, given.jobs), 1):
        outcomes.append(outcome)
        passed = time.perf_counter() - began
        if not outcome.holds or number % 25 == 0 or number == len(wanted):
            verdict = "agrees" if outcome.holds else f"DIFFERS at {outcome.where}"
            print(
                f"{number} of {len(wanted)}, {passed:.0f} s: {outcome.name} {verdict}", flush=True
            )
        if given.minutes and passed > 60 * given.minutes and number < len(wanted):
            print(f"Stopped after {given.minutes} minutes; {len(wanted) - number} were not run.")
            break
    text = page(outcomes, given.device, time.perf_counter() - began)
    if given.page:
        given.page.write_text(text, encoding="utf-8")
        print(f"Wrote {given.page}.")
    failed = sum(1 for o in outcomes if not o.holds)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
