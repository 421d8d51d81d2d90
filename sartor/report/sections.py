"""Build a page from sections of text, tables, figures, claims and settings, in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from sartor import runs
from sartor.report.evidence import Check, tally
from sartor.report.layout import fill, pictures, settings_lines, shown
from sartor.report.sketch import Sketch
from sartor.report.words import Words
from sartor.results.tables import Table

if TYPE_CHECKING:  # it needs matplotlib, without which a page has no figures
    from sartor.report.drawing import Figure


@dataclass(frozen=True)
class Exhibit:
    """A table together with how it is shown."""

    table: Table
    caption: str = ""  # its name for screen readers; the title of the table or section if empty
    heading: str = ""  # the title of the table if empty
    key: str = ""  # identifier of the heading
    # Name in the first column -> number of its colour and its marker.
    looks: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # Left end and width of each bar beside "gain", in per cent, and "good" or "bad".
    bars: Sequence[tuple[float, float, str]] = ()
    # Name in the first column -> the page that it leads to.
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """Questions and their answers, a paragraph each."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Links:
    """A line of links to other pages: text and address, relative to this page."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Fold:
    """Parts behind a line that opens and closes them; print shows them open."""

    summary: str
    parts: Sequence[Part]
    open: bool = False


@dataclass(frozen=True)
class Code:
    """Text to copy, such as a command."""

    text: str


Part: TypeAlias = (
    "str | Code | Answers | Links | Table | Exhibit | Figure | Sketch | Fold | Mapping[str, Any] | "
    "Sequence[Figure | Sketch | Check]"
)
"""A paragraph, a table, a figure, settings (a mapping), several figures, or a list of claims."""


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Attributes:
        title: heading.
        parts: what it contains, from top to bottom.
        lead: a sentence below the heading.
        key: identifier; derived from the title if empty.
        link: its name in the navigation; the title if empty.
    """

    title: str
    parts: Sequence[Part]
    lead: str = ""
    key: str = ""
    link: str = ""


def render_sections(
    title: str,
    sections: Sequence[Section],
    *,
    words: Words | None = None,
    facts: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
    brand: str = "Sartor report",
    plain: bool = False,
) -> str:
    """Return a page as text: one file that loads nothing and runs no script.

    Args:
        title: heading of the page.
        sections: its content; a section with the environment is added at the end.
        words: headline, tiles, findings and caveats at the top.
        facts: a few words below the heading.
        environment: versions and hardware of the machine that trained; of this one if None.
        brand: the line above the heading.
        plain: for readers that are no specialists: without that section, and with small tables.
    """
    if not plain:
        versions = Fold("Versions and hardware", [environment or runs.environment()])
        sections = [*sections, Section("Environment", [versions])]
    keys: list[str] = []
    for section in sections:
        key = section.key or re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "part"
        keys.append(key if key not in keys else f"{key}-{len(keys)}")
    return fill(
        title=title,
        brand=brand,
        plain=plain,
        facts=list(facts),
        words=words,
        sections=[
            (key, section, [_part(part, section.title) for part in section.parts])
            for key, section in zip(keys, sections, strict=True)
        ],
    )


def _part(part: Part, title: str) -> tuple[str, Any]:
    """Return (kind, content) for the template."""
    match part:
        case str():
            return "words", part
        case Code():
            return "code", part.text
        case Answers():
            return "answers", list(part.items)
        case Links():
            return "links", list(part.items)
        case Table():
            return _part(Exhibit(part), title)
        case Exhibit():
            heading = part.heading or part.table.title
            texts = {"caption": part.caption or heading or title}
            texts["heading"] = heading if heading != title else ""
            texts["key"] = part.key
            return "table", {
                **shown(part.table, part.looks, part.links),
                **texts,
                "bars": part.bars,
            }
        case Fold():
            inner = [_part(inner, part.summary) for inner in part.parts]
            return "fold", {"summary": part.summary, "open": part.open, "parts": inner}
        case Mapping():
            return "lines", settings_lines(part)
    items = part if isinstance(part, Sequence) else [part]
    figures = [item for item in items if not isinstance(item, str | Check)]
    if figures:
        return "figures", pictures(figures)
    checks = [item for item in items if isinstance(item, Check)]
    return "checks", {"checks": checks, "tally": tally(checks)}
