"""A page from parts: sections of words, tables, figures, claims and settings, in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sartor.report.drawing import Figure
from sartor.report.evidence import Check, tally
from sartor.report.layout import fill, pictures, settings_lines, shown
from sartor.report.words import Words
from sartor.results.tables import Table

Part = str | Table | Figure | Mapping[str, Any] | Sequence[Check]
"""A paragraph, a table, a figure, settings (a mapping), or a list of claims."""


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Attributes:
        title: heading, and the word in the navigation.
        parts: what stands in it, from top to bottom.
        lead: a sentence below the heading.
        folded: it is closed until the reader opens it; paper shows it open.
    """

    title: str
    parts: Sequence[Part]
    lead: str = ""
    folded: bool = False
    key: str = field(default="")


def render_sections(
    title: str,
    sections: Sequence[Section],
    *,
    words: Words | None = None,
    facts: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
) -> str:
    """Return a page as text: one file, no network, no scripts.

    Args:
        title: heading of the page.
        sections: what it holds.
        words: headline, tiles, findings and caveats on top.
        facts: a few words below the heading.
        environment: versions and hardware of the machine that trained; of this one if None.
    """
    keys: list[str] = []
    for section in sections:
        key = section.key or re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "part"
        keys.append(key if key not in keys else f"{key}-{len(keys)}")
    return fill(
        "sections.html",
        environment,
        title=title,
        facts=list(facts),
        words=words,
        sections=[
            (key, section, [_part(part, section.title) for part in section.parts])
            for key, section in zip(keys, sections, strict=True)
        ],
    )


def _part(part: Part, heading: str) -> tuple[str, Any]:
    """Return (kind, content) as the template takes it."""
    if isinstance(part, str):
        return "words", part
    if isinstance(part, Table):
        return "table", (part.title, part.title or heading, shown(part, {}))
    if isinstance(part, Figure):
        return "figure", pictures([part])[0]
    if isinstance(part, Mapping):
        return "lines", settings_lines(part)
    checks = list(part)
    return "checks", (tally(checks), checks)
