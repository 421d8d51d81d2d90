"""Draw the figures of the measurements in the style of the library's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from bench.results import NAMES, Record, label, ratio
from sartor.report.charts import Line, line_figure
from sartor.report.drawing import INK, SERIES, STYLE, Figure, clip, legend_above, make_axes, plot

COLOURS = {"sartor": SERIES[1], "reference": SERIES[6], "plain": SERIES[0], "fluke": SERIES[2]}
"""Contender -> its colour in every figure."""


def ratio_figure(record: Record) -> Figure | None:
    """Draw how many times as fast as the plain loop every contender is; None without ratios."""
    groups = [
        (label(found, record["device"]), name, found)
        for found in record["workloads"]
        for name in found["contenders"]
        if ratio(found, name) is not None
    ]
    if not groups:
        return None
    places, place, last = [], 0.0, groups[0][0]
    for workload, _, _ in groups:
        place += 0.75 * (workload != last)  # a gap between workloads
        places.append(place)
        place, last = place + 1, workload
    axes, canvas = make_axes(7.4, 0.8 + 0.3 * (places[-1] + 1))
    _across(axes)
    reported = []
    for at, (workload, name, found) in zip(places, groups, strict=True):
        base, row = found["contenders"]["plain"]["seconds"], found["contenders"][name]
        value, low, high = (base / row[key] for key in ("seconds", "slowest", "fastest"))
        axes.barh(at, value, height=0.8, color=COLOURS[name], alpha=0.85, linewidth=0)
        axes.plot([low, high], [at, at], color=INK, lw=1.2, solid_capstyle="butt")
        axes.annotate(
            f"{value:.1f}" if value < 100 else f"{value:.0f}",
            (max(value, high), at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
        reported.append(f"{workload}, {NAMES[name]}: {value:.2f}")
    axes.axvline(1.0, color=SERIES[0], lw=1.2, linestyle=(0, (1, 2)))
    seen = list(dict.fromkeys(name for _, name, _ in groups))
    for name in seen:
        axes.barh(np.nan, np.nan, color=COLOURS[name], alpha=0.85, label=NAMES[name])
    heads = dict.fromkeys(workload for workload, _, _ in groups)
    middles = [
        np.mean([p for p, (w, _, _) in zip(places, groups, strict=True) if w == head])
        for head in heads
    ]
    axes.set_yticks(middles, [clip(head, 28) for head in heads])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    axes.set_xlabel("times as fast as the plain loop")
    legend_above(axes, len(seen), most=4)
    return Figure(
        "ratio-bars",
        "Speed relative to the plain loop",
        "Seconds of the plain loop over seconds of the contender, medians of the same run; longer "
        "is faster, and the dotted line is the plain loop. Thin lines: the contender's slowest and "
        "fastest round, relative to the same median.",
        f"Bar chart of speed relative to the plain loop. {'; '.join(reported)}.",
        canvas,
        wide=True,
    )


def history_figure(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the ratio of every workload by commit; None with fewer than two commits.

    Each machine has its own curve.
    """
    rows = [row for row in rows if row["× plain loop"] is not None]
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    if len(commits) < 2:
        return None
    several = len({row["machine"] for row in rows}) > 1
    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        name = row["workload"] + f" ({row['machine']})" * several
        place = commits.index(row["commit"])
        curves.setdefault(name, {}).setdefault(place, []).append(row["× plain loop"])
    lines = [
        Line(name, sorted(mine), [float(np.median(mine[place])) for place in sorted(mine)])
        for name, mine in curves.items()
    ]
    figure = line_figure(
        "ratio-history",
        "Ratios by commit",
        lines,
        x_label="commit, oldest first",
        y_label="times as fast as the plain loop",
        caption="If a commit was measured more than once, the median of its runs.",
    )
    (axes,) = figure.canvas.axes
    step = -(-len(commits) // 10)
    axes.set_xticks(range(0, len(commits), step), commits[::step])
    axes.set_xlim(-0.3, len(commits) - 0.7)
    axes.set_ylim(bottom=0)
    return figure


def method_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the seconds and the gradients of a round of every method, relative to FedAvg."""
    rows = sorted(rows, key=lambda row: row["times FedAvg"])
    places = np.arange(len(rows))
    axes, canvas = make_axes(7.4, 1.0 + 0.2 * len(rows))
    _across(axes)
    times = [row["times FedAvg"] for row in rows]
    axes.barh(places, times, height=0.75, color=SERIES[1], alpha=0.85, lw=0, label="seconds")
    gradients = [row["gradients"] for row in rows]
    look = {"markersize": 5, "linestyle": "none", "label": "gradients"}
    plot(axes, gradients, places, SERIES[2], "D", **look)
    axes.axvline(1.0, color=SERIES[0], lw=1.2, linestyle=(0, (1, 2)))
    axes.set_yticks(places, [clip(row["method"], 24) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("times FedAvg")
    legend_above(axes, 2)
    return Figure(
        "methods-beside-fedavg",
        "What a round of every method costs",
        "Seconds of local work and server over those of FedAvg, and the same for gradients. A "
        "method should cost what its gradients explain.",
        f"Bar chart of seconds a round relative to FedAvg, from {times[0]:.2g} "
        f"({rows[0]['method']}) to {times[-1]:.2g} ({rows[-1]['method']}).",
        canvas,
        wide=True,
    )


def scaling_figures(rows: Sequence[Mapping[str, Any]], meaning: Mapping[str, str]) -> list[Figure]:
    """Draw milliseconds per round against size, one figure for each size that grows."""
    found = []
    for kind in dict.fromkeys(row["what"] for row in rows):
        mine = [row for row in rows if row["what"] == kind]
        sizes, times = [row["value"] for row in mine], [1e3 * row["seconds"] for row in mine]
        figure = line_figure(
            f"scaling-{kind}",
            f"More {meaning[kind]}",
            [Line("Sartor", sizes, times)],
            x_label=meaning[kind],
            y_label="milliseconds a round",
            x_scale="log",
            y_scale="log",
            x_ticks=sizes,
        )
        (axes,) = figure.canvas.axes
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        if (legend := axes.get_legend()) is not None:
            legend.remove()  # a single curve needs no legend
        found.append(figure)
    return found


def _across(axes: Any) -> None:
    """Draw vertical instead of horizontal grid lines, for horizontal bars."""
    with mpl.rc_context(STYLE):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
