"""Draw a figure once, to show it on a page or to print it on paper.

A figure is drawn with placeholder colours. On the page they become CSS variables, light or dark,
and texts stay texts (:func:`to_svg`); on paper they become printed colours (``printing.save``).
Nothing here opens a window.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

# Placeholder -> CSS variable. The values never reach a reader; they only have to be distinct.
INK, SOFT, LINE, GOOD, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
HEAT = "#060606"
SERIES = ["#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006", "#0a0007"]
MARKS = "osD^vPX"
"""Markers. Seven markers and six colours share no factor, so a pair repeats only after 42."""
VARIABLES = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    HEAT: "var(--heat)",
    GOOD: "var(--good)",
    BAD: "var(--bad)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, 1)},
}
DASH = (0, (4, 2.2))
STROKES: tuple[Any, ...] = ("solid", (0, (3.2, 1.3)), (0, (1.1, 1.1)), (0, (4.5, 1.2, 1.1, 1.2)))
"""Strokes of curves: the first six are solid, the next six, whose colours repeat, dashed, ..."""

STYLE: Any = {  # the keys of matplotlib differ between releases, so they are not typed
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Figure:
    """One figure: a drawing and the words that go with it."""

    key: str  # identifier, unique on the page; the name of the file on paper
    title: str
    caption: str  # how to read it, in a sentence or two
    alt: str  # description for screen readers
    canvas: Canvas  # the drawing, in placeholder colours
    wide: bool = False  # several panels in a row; on paper they take the width of the text

    @property
    def broad(self) -> bool:
        """Whether it takes the whole width of the page; a heat map takes half."""
        return float(self.canvas.get_figwidth()) > 6.0

    @property
    def svg(self) -> str:
        """The drawing as an SVG element for a page."""
        return to_svg(self.canvas, self.key)


def colour_and_mark(position: int, *, reference: bool = False) -> tuple[int, str]:
    """Return the number of a curve's colour (from 1) and its marker; 42 pairs are distinct.

    Colour 1, the neutral one, is kept for the reference, which ``position`` does not count. Where
    colours repeat, markers differ.

    >>> colour_and_mark(0), colour_and_mark(6)
    ((2, 's'), (2, 'o'))
    """
    if reference:
        return 1, MARKS[0]
    colours = len(SERIES) - 1
    return position % colours + 2, MARKS[(1 + position) % len(MARKS)]


def stroke(position: int) -> Any:
    """Return the stroke of a curve; like the marker it tells curves of one colour apart.

    >>> stroke(5), stroke(6) == stroke(11), stroke(12) == stroke(6)
    ('solid', True, False)
    """
    return STROKES[position // (len(SERIES) - 1) % len(STROKES)]


def make_axes(width: float, height: float) -> tuple[Any, Canvas]:
    """Return axes of a size in inches, with horizontal grid lines, and their canvas."""
    canvas = Canvas(figsize=(width, height), layout="constrained")
    with mpl.rc_context(STYLE):
        axes = canvas.subplots()
        axes.grid(visible=False, axis="x")
    return axes, canvas


def plot(axes: Any, x: Any, y: Any, colour: str, mark: str | None = None, **more: Any) -> None:
    """Draw a curve in the style of the page; ``more`` goes to ``Axes.plot``."""
    look = {"color": colour, "marker": mark, "markersize": 4.5, "markeredgewidth": 0}
    axes.plot(x, y, **{**look, **more})


def legend_above(
    axes: Any, entries: int, most: int = 5, *, left: float = -0.01, size: float | None = None
) -> Any:
    """Put the legend above the axes, in rows of at most ``most`` entries, and return it.

    It begins at ``left``, a share of the width of the axes; ``size`` is that of its font in points,
    and that of the page if None.
    """
    with mpl.rc_context(STYLE):
        return axes.legend(
            loc="lower left",
            bbox_to_anchor=(left, 1.0),
            ncols=math.ceil(entries / math.ceil(entries / most)) if entries else 1,
            borderaxespad=0.2,
            columnspacing=1.6 if size is None else 1.1,
            handlelength=1.8 if size is None else 2.2,
            handletextpad=0.8 if size is None else 0.5,
            fontsize=size,
            labelcolor=INK,
        )


def clip(name: str, most: int = 16) -> str:
    """Shorten a name, and escape dollar signs, which matplotlib would read as mathematics."""
    name = name if len(name) <= most else name[: most - 1] + "…"
    return name.replace("$", r"\$")


def to_svg(canvas: Canvas, key: str) -> str:
    """Return the drawing as an SVG element that takes its colours and font from the page."""
    out = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": key}), warnings.catch_warnings():
        # The font of the page has the glyphs that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(canvas)
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Fonts: keep the size, leave the family to the page.
    text = re.sub(r"font: (?:\w+ )?([\d.]+px)[^;\"]*", r"font-size: \1", text)
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, variable)
    # Identifiers are unique within a file only, and a page contains several files.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    view = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg {view[0] if view else ""} role="img" aria-labelledby="{key}-alt" class="figure">'
    return re.sub(r"<svg[^>]*>", head, text, count=1)
