"""Draw the figures of a run or a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from sartor.report.drawing import (
    DASH,
    SERIES,
    Figure,
    clip,
    colour_and_mark,
    legend_above,
    make_axes,
    plot,
)
from sartor.report.gain_figure import gain_by_client
from sartor.report.heat import label_map, mixing_matrix
from sartor.report.layout import listed
from sartor.results.comparison import Comparison
from sartor.results.headline import HeadlineMetric
from sartor.results.metrics import Array
from sartor.results.result import Result


def looks(comparison: Comparison) -> dict[str, tuple[int, str]]:
    """Return the number of each method's colour and its marker; 1 is the reference's colour."""
    others = [name for name in comparison if name != comparison.reference]
    found = {name: colour_and_mark(place) for place, name in enumerate(others)}
    reference = colour_and_mark(0, reference=True)
    return {name: found.get(name, reference) for name in comparison}


def _each(comparison: Comparison) -> Iterator[tuple[str, Result, str, str]]:
    """Yield name, result, colour and marker of every method."""
    for name, (number, mark) in looks(comparison).items():
        yield name, comparison[name], SERIES[number - 1], mark


def draw_all(comparison: Comparison) -> list[Figure]:
    """Draw every figure for which there are numbers."""
    made = [
        measure_by_round(comparison),
        gain_by_client(comparison),
        bytes_against_measure(comparison),
        mixing_matrix(comparison),
        label_map(comparison),
    ]
    return [figure for figure in made if figure is not None]


def measure_by_round(comparison: Comparison) -> Figure:
    """Draw pooled test accuracy (or error) by round; the headline point is solid."""
    headline_metric = comparison.headline_metric
    axes, canvas = make_axes(7.4, 3.7)
    several = False
    for name, result, colour, mark in _each(comparison):
        for point in ("global", "post", "pre"):
            if (point, "test") not in result.scores:
                continue
            main = point == result.headline
            x, mean, std, number = _mean_curve(result, point)
            several |= number > 1
            stroke = "solid" if main else "dotted" if point == "global" else DASH
            style: dict[str, Any] = {"linestyle": stroke, "linewidth": 1.2, "alpha": 0.75}
            if main:
                style |= {"linewidth": 2.1, "alpha": 1, "label": clip(name, 40)}
            every = max(1, len(x) // 8)
            plot(axes, x, mean, colour, mark if main else None, markevery=every, **style)
            if main and number > 1:
                axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(_axis(headline_metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    legend_above(axes, len(comparison))
    finals = "; ".join(
        f"{name} ends at {headline_metric.text(final)}"
        if math.isfinite(final := result.mean_of("pooled_measure"))
        else f"{name} diverged"
        for name, result in comparison.items()
    )
    points = ", ".join(f"{name} {result.headline}" for name, result in comparison.items())
    has_centre = any(("global", "test") in result.scores for result in comparison.values())
    centre = "; dots: the global model" if has_centre else ""
    band = " The band is ± one standard deviation over runs." if several else ""
    return Figure(
        f"{_key(headline_metric)}-by-round",
        f"{headline_metric.title} by round",
        "Solid: the point of the round at which each method is meant to be used "
        f"({points}); thin dashes: the other point{centre}. Pre is after aggregation, post after "
        "local training; compare pre with pre and post with post. Values of all "
        f"clients are {headline_metric.pooled}.{_better(headline_metric)}{band}",
        f"Line chart of pooled test {headline_metric.name} by round. {finals}.",
        canvas,
    )


def bytes_against_measure(comparison: Comparison) -> Figure | None:
    """Draw accuracy (or error) against the megabytes sent and received so far."""
    headline_metric = comparison.headline_metric
    axes, canvas = make_axes(7.4, 3.4)
    drawn, silent = [], []
    for name, result, colour, mark in _each(comparison):
        x, mean, _, _ = _mean_curve(result, result.headline)
        travelled = np.mean(
            [result.ledger.megabytes(run, result.headline, x) for run in range(len(result.runs))],
            axis=0,
        )
        if travelled[-1] <= 0:
            known = mean[np.isfinite(mean)]
            if known.size:
                label = f"{clip(name, 40)} (0 MB)"
                axes.axhline(known[-1], color=colour, linestyle=(0, (1, 2)), label=label)
                silent.append(name)
            continue
        every = max(1, len(x) // 8)
        plot(axes, travelled, mean, colour, mark, markevery=every, label=clip(name, 40))
        drawn.append(f"{name} sends {travelled[-1]:,.1f} MB")
    if not drawn:
        return None
    axes.set_xlabel("MB sent and received, all clients")
    axes.set_ylabel(_axis(headline_metric))
    axes.set_xlim(left=0)
    legend_above(axes, len(comparison))
    nothing = f" Dotted: {', '.join(silent)}, which sends nothing." if silent else ""
    return Figure(
        f"bytes-against-{_key(headline_metric)}",
        f"{headline_metric.title} against traffic",
        "Counted from the tensors that are sent, up and down, without protocol headers; 1 MB is "
        f"10⁶ bytes.{_better(headline_metric)}{nothing}{_front(comparison)}",
        f"Line chart of {headline_metric.name} against megabytes. {'; '.join(drawn)}.",
        canvas,
    )


def _mean_curve(result: Result, point: str) -> tuple[list[int], Array, Array, int]:
    """Return rounds, mean and standard deviation over finite runs, and the number of runs.

    Shares are in per cent.
    """
    curves = [result.measure_curve(point, run=run) for run in range(len(result.runs))]
    factor = 100 if result.headline_metric.is_share else 1
    values = factor * np.stack([curve for _, curve in curves])
    known = np.isfinite(values).sum(axis=0)
    total = np.nansum(values, axis=0)
    mean = np.where(known > 0, total / np.maximum(known, 1), np.nan)
    squares = np.nansum((values - mean) ** 2, axis=0)
    std = np.where(known > 1, np.sqrt(squares / np.maximum(known - 1, 1)), 0.0)
    return curves[0][0], mean, std, len(curves)


def _front(comparison: Comparison) -> str:
    """Return a sentence on the methods that no other beats in both traffic and accuracy."""
    names = comparison.pareto()
    if len(comparison) < 3 or not names:
        return ""
    return f" No method is both cheaper and better than {listed(names)}, at the end of the runs."


def _axis(headline_metric: HeadlineMetric) -> str:
    return f"test {headline_metric.name}{', %' * headline_metric.is_share}"


def _better(headline_metric: HeadlineMetric) -> str:
    return "" if headline_metric.sign > 0 else f" Less {headline_metric.name} is better."


def _key(headline_metric: HeadlineMetric) -> str:
    """Return the name of the metric for use in a file name."""
    return headline_metric.name.lower().replace(" ", "-")
