"""Draw the figures of a run or a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from sartor.report.drawing import (
    BAD,
    DASH,
    GOOD,
    SERIES,
    SOFT,
    STYLE,
    Figure,
    clip,
    colour_and_mark,
    legend_above,
    make_axes,
    plot,
)
from sartor.report.heat import label_map, mixing_matrix
from sartor.report.layout import listed
from sartor.results.comparison import Comparison
from sartor.results.headline import HeadlineMetric
from sartor.results.metrics import Array
from sartor.results.result import Result

MOST_PANELS = 12
"""The most panels in the figure of gains; the table has the other methods."""


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


def gain_by_client(comparison: Comparison) -> Figure | None:
    """Draw the gain of every client over training alone, sorted, one panel per method."""
    pairs = _references(comparison)
    if not pairs:
        return None
    headline_metric = comparison.headline_metric
    scale = 100 if headline_metric.is_share else 1
    left_out = len(pairs) - MOST_PANELS
    pairs = pairs[-MOST_PANELS:]
    columns = {1: 1, 2: 2, 4: 2}.get(len(pairs), 3)
    rows = math.ceil(len(pairs) / columns)
    width = 7.4 if columns > 1 else 6.2
    canvas = Canvas(figsize=(width, 2.5 * rows + 0.3), layout="constrained")
    with mpl.rc_context(STYLE):
        grid = canvas.subplots(rows, columns, sharey=True, squeeze=False)
        for panel in grid.flat[len(pairs) :]:
            panel.set_visible(False)
        words = []
        for panel, (name, result, reference) in zip(grid.flat, pairs, strict=False):
            gains = np.asarray(result.gain(reference).column("gain"), dtype=float)
            gains = scale * np.sort(gains[np.isfinite(gains)])[::-1]
            _bars(panel, gains)
            panel.axhline(0, color=SOFT, linewidth=0.9)
            panel.grid(visible=False, axis="x")
            panel.set_xticks([])
            hurt = int((gains < 0).sum())
            panel.set_title(clip(name, 40))
            panel.set_xlabel(f"{hurt} of {len(gains)} worse than alone")
            words.append(f"{name}: {hurt} of {len(gains)} clients are worse off than alone")
        for row in grid:
            row[0].set_ylabel(
                "gain, points" if headline_metric.is_share else f"gain, {headline_metric.name}"
            )
    runs = max(len(result.runs) for _, result, _ in pairs)
    each = "client of a run" if runs > 1 else "client"
    few = (
        "With few test samples, a single prediction moves a bar by several points."
        if headline_metric.is_share
        else f"The gain is the reduction of the {headline_metric.name}."
    )
    return Figure(
        "gain-by-client",
        "Gain of each client over training alone",
        f"One bar per {each}, sorted. Blue is better than alone, orange worse; no bar means no "
        f"difference. {few}"
        f"{f' The last {MOST_PANELS} methods are shown.' if left_out > 0 else ''}",
        f"Bar charts of the gain in {headline_metric.name} of each client. {'; '.join(words)}.",
        canvas,
        wide=len(pairs) > 1,
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


def _references(comparison: Comparison) -> list[tuple[str, Result, Result]]:
    """Return (name, result, reference) of each method that can be compared with training alone."""
    shared = comparison[comparison.reference] if comparison.reference else None
    return [
        (name, result, reference)
        for name, result in comparison.items()
        if (reference := shared or result.known_baseline) is not None
        and name != comparison.reference
        and math.isfinite(result.mean_of("pooled_measure"))
    ]


def _bars(axes: Any, heights: Array) -> None:
    """Draw bars, blue upwards and orange downwards.

    All bars are one artist, because a federation may have thousands of clients and ``Axes.bar``
    makes an artist for each.
    """
    width = 0.82 if len(heights) <= 120 else 1.0
    corner = np.array([[0, 0], [0, 1], [1, 1], [1, 0]])
    places = np.arange(len(heights))[:, None] + width * (corner[:, 0] - 0.5)
    shapes = np.stack([places, heights[:, None] * corner[:, 1]], axis=-1)
    colours = [BAD if height < 0 else GOOD for height in heights]
    bars = PolyCollection(list(shapes), facecolors=colours, linewidths=0)
    bars.sticky_edges.y.append(0)
    axes.add_collection(bars)
    axes.autoscale_view()


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
