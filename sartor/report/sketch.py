"""Small drawings without matplotlib: a federation may have hundreds of clients, each with a page.

Only numbers and texts of our own are drawn; colours come from the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Sketch:
    """A small drawing and the words that go with it."""

    key: str  # identifier, unique on the page
    title: str
    caption: str
    alt: str  # description for screen readers
    svg: str


def _svg(key: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{key}-alt" '
        f'class="figure" style="max-width: {1.15 * width:.0f}px">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" fill="none" stroke="var(--{colour})" '
        f"{more}/>"
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="13" '
        f'fill="var(--soft)" {more}>{escape(words)}</text>'
    )


def interval_sketch(
    key: str,
    title: str,
    low: float,
    mean: float,
    high: float,
    *,
    texts: tuple[str, str, str],
    sides: tuple[str, str],
    colour: str,
    caption: str,
    alt: str,
) -> Sketch:
    """Draw a mean and its interval on a line around zero; texts are those of the three numbers.

    Args:
        key: identifier, unique on the page.
        title: heading.
        low: lower end of the interval.
        mean: the number.
        high: upper end of the interval.
        texts: the three numbers as they are shown.
        sides: what is on the left and on the right of zero.
        colour: of the mean: "good", "bad" or "series-1".
        caption: how to read it.
        alt: description for screen readers.
    """
    width, middle, y = 480.0, 240.0, 62.0
    reach = 1.15 * max(abs(low), abs(high)) or 1.0

    def at(value: float) -> float:
        return middle + 210 * value / reach

    thick = 'stroke-width="2" stroke-linecap="round"'
    parts = [
        _line(20, y, width - 20, y, "line"),
        _line(middle, 26, middle, 84, "soft", 'stroke-dasharray="3 3"'),
        _text(middle, 18, "no difference"),
        _text(20, 40, f"← {sides[0]}", "start"),
        _text(width - 20, 40, f"{sides[1]} →", "end"),
        _line(at(low), y, at(high), y, "ink", thick),
        _line(at(low), y - 7, at(low), y + 7, "ink", thick),
        _line(at(high), y - 7, at(high), y + 7, "ink", thick),
        f'<circle cx="{at(mean):.1f}" cy="{y}" r="6.5" fill="var(--{colour})"/>',
    ]
    # Labels of the ends that would lie on one another are left to the caption.
    if at(high) - at(low) > 110:
        parts += [_text(at(low), y + 30, texts[0]), _text(at(high), y + 30, texts[2])]
    else:
        parts += [_text(at(mean), y + 30, f"{texts[0]} to {texts[2]}")]
    return Sketch(key, title, caption, alt, _svg(key, width, 100, parts))


def calibration_sketch(
    key: str, title: str, points: Sequence[Sequence[float]], caption: str
) -> Sketch:
    """Draw predicted against observed shares; a point is (predicted, observed, samples)."""
    left, top, size = 62.0, 14.0, 260.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + size * x, top + size * (1 - y)

    parts = [_line(*at(0, 0), *at(1, 1), "soft", 'stroke-dasharray="4 3"')]
    for tick in (0.0, 0.5, 1.0):
        (x, y), label = at(tick, tick), f"{100 * tick:.0f} %"
        parts += [_line(left, y, left + size, y, "line")]
        parts += [_text(left - 8, y + 4, label, "end"), _text(x, top + size + 20, label)]
    most = max((number for *_, number in points), default=1.0) or 1.0
    ordered = sorted(points, key=lambda point: point[0])
    for predicted, observed, number in ordered:
        x, y = at(predicted, observed)
        radius = 2.5 + 5 * (number / most) ** 0.5
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="var(--good)"/>')
    parts.append(_text(left + size / 2, top + size + 42, "the model says"))
    turn = f'transform="rotate(-90 14 {top + size / 2:g})"'
    parts.append(_text(14, top + size / 2, "what was true", more=turn))
    said = [f"{100 * p:.0f} % against {100 * o:.0f} %" for p, o, _ in ordered]
    alt = f"Predicted against observed: {', '.join(said)}."
    return Sketch(key, title, caption, alt, _svg(key, 356, 330, parts))
