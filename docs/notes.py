"""What other public code does differently, method by method: ``notes.toml``, read."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

NOTES = Path(__file__).with_name("notes.toml")


@lru_cache(maxsize=1)
def read_notes() -> dict[str, list[str]]:
    """Return method -> sentences."""
    found = tomllib.loads(NOTES.read_text(encoding="utf-8"))
    return {name: [" ".join(note.split()) for note in notes] for name, notes in found.items()}
