"""Draw what every client gains over training alone: a row a client, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure as Canvas

from sartor.report.drawing import BAD, GOOD, INK, SERIES, SOFT, STYLE, Figure, clip
from sartor.report.gains import Gains, counted, gains_of, signed
from sartor.results.comparison import Comparison
from sartor.results.gains import ClientGain
from sartor.results.headline import HeadlineMetric

MOST_ROWS = 40
"""The most clients with a row of their own; more are drawn as a sorted curve."""

MOST_PANELS = 12
"""The most panels, one for each method; the tables have the others."""

COLOURS = {"gains": GOOD, "loses": BAD, "cannot tell": SERIES[0]}
"""Verdict -> colour."""


def gain_by_client(comparison: Comparison) -> Figure | None:
    """Draw the gain of every client over training alone, sorted, one panel per method."""
    every = list(gains_of(comparison).values())
    if not every:
        return None
    left_out, every = len(every) - MOST_PANELS, every[-MOST_PANELS:]
    several, clients = len(every) > 1, len(every[0].clients)
    few = clients <= MOST_ROWS
    columns = {1: 1, 2: 2, 4: 2}.get(len(every), 3)
    rows = math.ceil(len(every) / columns)
    height = 0.95 + 0.24 * clients if few else 2.7
    canvas = Canvas(figsize=(7.4, max(1.5, height) * rows), layout="constrained")
    with mpl.rc_context(STYLE):
        grid = canvas.subplots(rows, columns, sharey=few, sharex=few, squeeze=False)
        for panel in grid.flat[len(every) :]:
            panel.set_visible(False)
        order = _order(every)
        for panel, gains in zip(grid.flat, every, strict=False):
            if several:
                panel.set_title(clip(gains.name, 40))
            if few:
                _rows(panel, gains, order, words=not several)
            else:
                _curve(panel, gains)
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(_label(gains.metric) if few else _verdicts(gains))
        if not few:
            for row in grid:
                row[0].set_ylabel(_label(every[0].metric))
    metric = every[0].metric
    known = any(math.isfinite(c.low) for gains in every for c in gains.clients)
    each = "One row per client" if few else "Clients from left to right"
    return Figure(
        "gain-by-client",
        "Gain of each client over training alone",
        f"{each}, sorted by {'their mean over the methods' if several and few else 'gain'}; to the "
        f"{'right' if few else 'top'} is better than alone. Blue gains, orange loses, grey: these "
        f"data cannot tell. {_lines(metric, known=known)}"
        f"{f' The last {MOST_PANELS} methods are shown.' if left_out > 0 else ''}",
        _alt(every),
        canvas,
        wide=several,
    )


def _lines(metric: HeadlineMetric, *, known: bool) -> str:
    """Return what the lines and the lengths of the bars are."""
    lines = (
        "The thin line is the 95 % interval; a client gains or loses only where it leaves zero out."
        if known
        else "There is one division of the data, so the intervals are not known."
    )
    return lines + (f" A gain is what the {metric.name} falls by." if metric.sign < 0 else "")


def _alt(every: Sequence[Gains]) -> str:
    parts = [f"{gains.name}: {counted(gains.counts)}" for gains in every]
    metric = every[0].metric
    most = ""
    if len(every) == 1 and len(every[0].clients) <= MOST_ROWS:
        each = [f"{c.client} {signed(metric, c.gain)} ({c.verdict})" for c in every[0].clients]
        most = f" {', '.join(each)}."
    return f"Bars of the gain in {metric.name} of each client. {'; '.join(parts)}.{most}"


def _label(metric: HeadlineMetric) -> str:
    return "gain, points" if metric.is_share else f"gain, {metric.name}"


def _verdicts(gains: Gains) -> str:
    return f"clients: {counted(gains.counts)}"


def _order(every: Sequence[Gains]) -> list[int]:
    """Return the clients from the smallest mean gain to the largest; unknown gains come first."""
    means = np.zeros(len(every[0].clients))
    for gains in every:
        means += [c.gain if math.isfinite(c.gain) else -math.inf for c in gains.clients]
    return [int(place) for place in np.argsort(means, kind="stable")]


def _scaled(gains: Gains) -> list[tuple[ClientGain, float, float, float]]:
    """Return client, gain, low and high as they are drawn: shares in points."""
    factor = 100 if gains.metric.is_share else 1
    return [(c, factor * c.gain, factor * c.low, factor * c.high) for c in gains.clients]


def _rows(axes: Any, gains: Gains, order: Sequence[int], *, words: bool) -> None:
    """Draw a horizontal bar and an interval for each client, with its name on the left."""
    each = [_scaled(gains)[place] for place in order]
    bars = [
        [(0, y - 0.32), (0, y + 0.32), (gain, y + 0.32), (gain, y - 0.32)]
        for y, (_, gain, _, _) in enumerate(each)
        if math.isfinite(gain)
    ]
    colours = [COLOURS[c.verdict] for c, gain, _, _ in each if math.isfinite(gain)]
    axes.add_collection(PolyCollection(bars, facecolors=colours, alpha=0.8, linewidths=0))
    lines = [
        [(low, y), (high, y)] for y, (_, _, low, high) in enumerate(each) if math.isfinite(low)
    ]
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=1.1))
    axes.axvline(0, color=SOFT, linewidth=0.9)
    axes.autoscale_view()
    axes.set_ylim(-0.6, len(each) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_yticks(range(len(each)), [clip(c.client, 24 if words else 16) for c, *_ in each])
    axes.tick_params(axis="y", labelcolor=INK)
    if words:  # a second axis on the right, whose labels are the numbers
        right = axes.secondary_yaxis("right")
        shown = [f"{signed(gains.metric, c.gain)}  {c.verdict}" for c, *_ in each]
        right.set_yticks(range(len(each)), shown)
        right.tick_params(length=0, labelcolor=SOFT)
        right.spines["right"].set_visible(False)


def _curve(axes: Any, gains: Gains) -> None:
    """Draw sorted gains as points and their intervals as lines; no names."""
    each = [entry for entry in _scaled(gains) if math.isfinite(entry[1])]
    each.sort(key=lambda entry: -entry[1])
    for verdict, colour in COLOURS.items():
        found = [(x, entry) for x, entry in enumerate(each) if entry[0].verdict == verdict]
        lines = [[(x, low), (x, high)] for x, (_, _, low, high) in found if math.isfinite(low)]
        width = 1.2 if len(each) <= 150 else 0.6
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, alpha=0.5))
    # One artist for all points: there may be thousands.
    places = [(x, entry[1]) for x, entry in enumerate(each)]
    size = 12 if len(each) <= 150 else 4
    axes.scatter(
        *zip(*places, strict=True), s=size, c=[COLOURS[e[0].verdict] for e in each], linewidths=0
    )
    axes.axhline(0, color=SOFT, linewidth=0.9)
    axes.autoscale_view()
    axes.grid(visible=False, axis="x")
    axes.set_xticks([])
