"""Save figures for a paper as vector PDF or as PNG, at the width of a column.

A drawing is copied, its placeholder colours become the light colours of the page's style sheet,
and its text, lines and markers get the size that a printed column needs. Fonts are embedded as
TrueType, so that text can be searched and edited. Titles and captions are not drawn: they belong to
the text of the paper and are written to captions.txt.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from sartor.core.errors import ConfigError
from sartor.report.drawing import VARIABLES, Figure
from sartor.report.fitting import fit, paper_width
from sartor.runs.storage import naming, write_text

Format = Literal["pdf", "png"]
FORMATS: tuple[Format, ...] = ("pdf", "png")

DOTS = 300
"""Resolution of a PNG, in dots per inch."""


PAINTED: dict[type, tuple[str, ...]] = {
    Text: ("color",),
    Line2D: ("color", "markerfacecolor", "markeredgecolor"),
    Patch: ("facecolor", "edgecolor"),
    Collection: ("facecolor", "edgecolor"),
}
"""Kind of artist -> its colours."""


def page_colours() -> dict[str, str]:
    """Return placeholder -> light colour, read from the style sheet of the page."""
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", style[: style.index("}")]))
    return {placeholder: light[variable[4:-1]] for placeholder, variable in VARIABLES.items()}


def save(figure: Figure, path: str | Path, *, width: float | None = None) -> Path:
    """Write one figure in the format that the file name ends with, .pdf or .png; return the path.

    Args:
        figure: what to print; it is not changed.
        path: the file.
        width: in inches; by default a column, or the full text for several panels or a long
            legend.

    Raises:
        ConfigError: the path ends with something else.
        RunFolderError: the file cannot be written.
    """
    target = Path(path)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(
            f"A figure is saved as {' or '.join(FORMATS)}, got {target.name!r}; name the file "
            f"{target.with_suffix('.pdf').name}."
        )
    canvas = for_paper(figure, width or paper_width(figure))
    metadata: dict[str, Any] = {"Title": figure.title}
    if kind == "pdf":
        FigureCanvasPdf(canvas)
        metadata |= {"Subject": figure.caption, "CreationDate": None}
    else:
        FigureCanvasAgg(canvas)
        metadata |= {"Description": figure.alt}
    with naming(target, "write"), mpl.rc_context({"pdf.fonttype": 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        target.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(target, format=kind, dpi=DOTS, facecolor="white", metadata=metadata)
    return target


def save_all(figures: Sequence[Figure], folder: str | Path, kind: Format = "pdf") -> list[Path]:
    """Write figures as ``<key>.<format>``, their captions in captions.txt; return their paths."""
    place = Path(folder)
    paths = [save(figure, place / f"{figure.key}.{kind}") for figure in figures]
    words = [f"{f.key}\n{f.title}. {f.caption}\n" for f in figures]
    write_text(place / "captions.txt", "\n".join(words))
    return paths


def for_paper(figure: Figure, width: float) -> Canvas:
    """Return a copy of the drawing in the colours and sizes of paper, ``width`` inches wide."""
    canvas = fit(figure, width)
    colours = {to_hex(key): to_rgba(value) for key, value in page_colours().items()}
    for artist in canvas.findobj():
        _recolour(artist, colours)
    return canvas


def _recolour(artist: Any, colours: dict[str, Any]) -> None:
    def printed(colour: Any) -> Any:
        if isinstance(colour, str) and colour == "none":
            return colour
        rgba = to_rgba(colour)
        found = colours.get(to_hex(rgba))
        return rgba if found is None else (*found[:3], rgba[3])

    for kind, names in PAINTED.items():
        if isinstance(artist, kind):
            # All colours are read first: setting that of a line also sets those of its markers.
            now = {name: getattr(artist, f"get_{name}")() for name in names}
            for name, colour in now.items():
                paint = printed(colour) if kind is not Collection else list(map(printed, colour))
                getattr(artist, f"set_{name}")(paint)
