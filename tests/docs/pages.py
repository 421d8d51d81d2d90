"""The pages of the repository, and what is in them: links, headings, blocks of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("docs/methods/", "docs/api.md")


def pages() -> list[Path]:
    """Return every page that is kept in the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {path: path.relative_to(ROOT).as_posix() for path in found}
    return sorted(path for path, name in names.items() if not name.startswith(GENERATED))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the reason why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    pattern = r"^(?:<!-- not run: (.*?) -->\n+)?```(\w*)\n(.*?)^```$"
    return [
        Block(path.name, text[: m.start(3)].count("\n"), m[2], m[3], m[1])
        for m in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def prose(path: Path) -> str:
    """Return a page without its code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"^( {4}.*\n)+", "", text, flags=re.M)
    return re.sub(r"`[^`\n]+`", "", text)


def links(path: Path) -> list[str]:
    """Return the targets of the links and images of a page, code left out."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#{1,6} +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken(path: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    faults = []
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            faults.append(f"{path.name}: {target} does not exist")
        elif anchor and anchor not in anchors(there):
            faults.append(f"{path.name}: {target} has no such heading")
    return faults
