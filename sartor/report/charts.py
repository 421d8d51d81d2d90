"""Draw curves with error bars from plain numbers, with published points where there are any.

Every function takes names and numbers, so that any page can use it; the figures of a run or a
comparison are in ``figures``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from sartor.core.errors import ConfigError
from sartor.report.drawing import (
    DASH,
    SERIES,
    STYLE,
    Figure,
    clip,
    colour_and_mark,
    legend_above,
    make_axes,
    plot,
    stroke,
)
from sartor.results.metrics import Array

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: its entry in the legend.
        x: the places of the points.
        y: the mean at every point; NaN leaves a gap.
        error: standard error at every point, drawn as a bar of ± one; None for no bars.
        published: the published value at every point, drawn hollow; NaN where there is none.
        reference: whether the others are compared with it; it gets the neutral colour.
        dashed: draw it dashed, for a theory or a bound.
        band: draw the error as a band instead of bars.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    published: Sequence[float] | None = None
    reference: bool = False
    dashed: bool = False
    band: bool = False


def line_figure(
    key: str,
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    caption: str = "",
    alt: str = "",
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
    x_ticks: Sequence[float] | None = None,
    levels: Sequence[tuple[str, float]] = (),
    hollow_name: str = "published",
) -> Figure:
    """Draw curves over x: mean ± one standard error, published values as hollow markers.

    Args:
        key: identifier, unique on the page: a-z, digits and hyphens.
        title: heading.
        lines: the curves; their order decides colours and markers.
        x_label: label of the x axis.
        y_label: label of the y axis.
        caption: how to read it; the meaning of bars and hollow markers is added.
        alt: description for screen readers; made from the numbers if empty.
        x_scale: "linear" or "log".
        y_scale: "linear" or "log".
        x_ticks: places of the ticks on the x axis, where only a few values were tried.
        levels: (name, height) of dotted horizontal lines.
        hollow_name: what the hollow markers show.

    Raises:
        ConfigError: the lists of a curve differ in length, or a logarithmic axis has a value <= 0.
    """
    _check(lines, x_scale, y_scale)
    axes, canvas = make_axes(7.4, 3.7)
    axes.set_xscale(x_scale)
    axes.set_yscale(y_scale)
    position = 0
    for line in lines:
        number, mark = colour_and_mark(position, reference=line.reference)
        style = DASH if line.dashed else stroke(0 if line.reference else position)
        _draw(axes, line, SERIES[number - 1], mark, style)
        position += not line.reference
    for index, (name, height) in enumerate(levels):
        style = (0, (1, 2 + index))
        axes.axhline(height, color=SERIES[0], linestyle=style, lw=1.3, label=clip(name, 40))
    if x_ticks is not None:
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(list(x_ticks), [f"{tick:g}" for tick in x_ticks])
    elif x_scale == "linear" and all(float(x).is_integer() for line in lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if y_scale == "linear":
        _calm(axes)
    hollow = any(line.published is not None for line in lines)
    if hollow:
        with mpl.rc_context(STYLE):
            axes.plot(
                [], [], marker="o", mfc="none", mec=SERIES[0], mew=1.4, ls="none", label=hollow_name
            )
    legend_above(axes, len(lines) + len(levels) + hollow)
    reported = [caption] if caption else []
    if any(line.error is not None for line in lines):
        reported.append("Bars and bands are ± one standard error.")
    if hollow:
        reported.append(f"Hollow markers are the {hollow_name} values.")
    return Figure(key, title, " ".join(reported), alt or _words(lines, x_label, y_label), canvas)


def _calm(axes: Any) -> None:
    """Widen the y axis around curves that differ in their last digits only, so they look level."""
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    if high - low < 1e-3 * abs(middle):
        axes.set_ylim(middle - 0.05 * abs(middle), middle + 0.05 * abs(middle))


def _draw(axes: Any, line: Line, colour: str, mark: str, stroke: Any) -> None:
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    error = None if line.error is None else np.asarray(line.error, dtype=float)
    bars = error is not None and not line.band
    every = 1 if bars else max(1, len(x) // 12)
    look = {"markersize": 5.0, "markevery": every, "linestyle": stroke}
    plot(axes, x, y, colour, mark, label=clip(line.name, 40), **look)
    if bars:
        axes.errorbar(
            x, y, yerr=error, fmt="none", ecolor=colour, capsize=2.5, elinewidth=1.1, capthick=1.1
        )
    if error is not None and line.band:
        axes.fill_between(x, y - error, y + error, color=colour, alpha=0.16, linewidth=0)
    if line.published is not None:
        hollow = {"markersize": 8, "mfc": "none", "mec": colour, "mew": 1.4, "zorder": 4}
        published = np.asarray(line.published, dtype=float)
        axes.plot(x, published, marker=mark, linestyle="none", **hollow)


def _check(lines: Sequence[Line], x_scale: Scale, y_scale: Scale) -> None:
    faults = [] if lines else ["there is no curve"]
    for line in lines:
        for name in ("y", "error", "published"):
            values = getattr(line, name)
            if values is not None and len(values) != len(line.x):
                faults.append(
                    f"{line.name}: {name} has {len(values)} values for {len(line.x)} values of x"
                )
        for name, scale in (("x", x_scale), ("y", y_scale)):
            values = np.asarray(getattr(line, name), dtype=float)
            if scale == "log" and (values[np.isfinite(values)] <= 0).any():
                faults.append(f"{line.name}: {name} is on a logarithmic axis but not positive")
    if faults:
        raise ConfigError(
            f"This figure cannot be drawn: {'; '.join(faults)}. Give every curve lists of the same "
            "length (NaN for a missing value), and use a linear axis for values that reach 0."
        )


def _words(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    parts = []
    for line in lines:
        known = _known(line)
        if not len(known):
            parts.append(f"{line.name} has no value")
            continue
        (x0, y0), (x1, y1) = known[0], known[-1]
        parts.append(f"{line.name} goes from {y0:.4g} at {x0:g} to {y1:.4g} at {x1:g}")
    return f"Line chart of {y_label} against {x_label}. {'; '.join(parts)}."


def _known(line: Line) -> Array:
    pairs = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    return np.asarray(pairs)
