"""Redraw a figure at another width: text shrinks less than the rest, legends are laid out anew."""

from __future__ import annotations

import copy
import math
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.text import Text

from sartor.report.drawing import STYLE, Figure, legend_above, to_svg

COLUMN, TEXT = 3.4, 7.0
"""Width in inches of one column of a two-column paper (and of a phone), and of its full text."""

SMALLEST = 6.0
"""The smallest font size, in points."""

MOST_ROWS, MOST_COLUMNS, MARGIN = 4, 6, 0.03
"""The most rows of a legend in a column, the most entries in a row, and its margin in inches."""

TEXTS, LINES, MARKERS = 0.76, 0.6, 0.85
"""What the sizes of the page are multiplied by for paper and phones."""


def fit(figure: Figure, width: float) -> Canvas:
    """Return a copy of the drawing, ``width`` inches wide, still in placeholder colours."""
    canvas: Canvas = copy.deepcopy(figure.canvas)
    old_width, old_height = canvas.get_size_inches()
    height = old_height * min(1.0, (width / old_width) ** 0.55)
    canvas.set_size_inches(width, height)
    for artist in canvas.findobj():
        if isinstance(artist, Text):
            artist.set_fontsize(max(SMALLEST, TEXTS * float(artist.get_fontsize())))
        elif isinstance(artist, Line2D):
            artist.set_linewidth(LINES * artist.get_linewidth())
            artist.set_markersize(MARKERS * artist.get_markersize())
            artist.set_markeredgewidth(LINES * artist.get_markeredgewidth())
    named = []
    for axes in canvas.axes:
        if (legend := axes.get_legend()) is not None:
            named.append(axes)
            legend.remove()
    # Every row of a legend beyond the second makes the figure taller.
    rows = [_lay_legend(axes) for axes in named]
    canvas.set_size_inches(width, height + 0.15 * max(0, max(rows, default=0) - 2))
    _thin_ticks(canvas)
    return canvas


def paper_width(figure: Figure) -> float:
    """Return the width of a figure on paper, in inches: a column, or the full text.

    A figure with several panels needs the full text, and so does one whose legend would need more
    than :data:`MOST_ROWS` rows in a column.
    """
    if figure.wide:
        return TEXT
    rows = [legend_rows(axes) for axes in fit(figure, COLUMN).axes]
    return TEXT if max(rows, default=0) > MOST_ROWS else COLUMN


def legend_rows(axes: Any) -> int:
    """Return the rows of a legend; 0 where there is none."""
    legend = axes.get_legend()
    return 0 if legend is None else math.ceil(len(legend.get_texts()) / legend._ncols)


def narrow_svg(figure: Figure) -> str | None:
    """Return the picture for a phone; None for several panels, which scroll instead."""
    if figure.wide:
        return None
    svg = to_svg(fit(figure, COLUMN), f"{figure.key}-narrow")
    return svg.replace(f'"{figure.key}-narrow-alt"', f'"{figure.key}-alt"', 1)


def _thin_ticks(canvas: Canvas) -> None:
    """Hide the labels of x axes that would overlap their neighbours; keep the first and last."""
    FigureCanvasAgg(canvas)
    canvas.draw_without_rendering()
    for axes in canvas.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        if len(labels) < 3 or labels[0].get_rotation() % 180:
            continue
        boxes = [label.get_window_extent() for label in labels]
        gap = 0.04 * canvas.dpi
        last = 0
        for place in range(1, len(labels) - 1):
            free = boxes[place].x0 - boxes[last].x1 > gap and boxes[-1].x0 - boxes[place].x1 > gap
            if free:
                last = place
            else:
                labels[place].set_visible(False)


def _lay_legend(axes: Any) -> int:
    """Lay the legend out again, in as many columns as fit; return the number of its rows.

    It may begin at the left edge of the picture.
    """
    canvas = axes.figure
    FigureCanvasAgg(canvas)
    canvas.draw_without_rendering()
    width, edge = canvas.bbox.width, MARGIN * canvas.dpi
    box = axes.get_window_extent()
    left = (edge - box.x0) / box.width
    size = max(SMALLEST, TEXTS * STYLE["font.size"])
    entries = len(axes.get_legend_handles_labels()[1])
    for columns in range(min(entries, MOST_COLUMNS), 0, -1):
        legend = legend_above(axes, entries, most=columns, left=left, size=size)
        if columns == 1 or legend.get_window_extent().width <= width - 2 * edge:
            break
    return legend_rows(axes)
