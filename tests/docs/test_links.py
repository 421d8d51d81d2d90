"""Every link of the documentation leads somewhere, and every page can be reached."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import sartor
from docs.generate import main
from sartor.methods import METHODS
from tests.docs.pages import ROOT, broken, links, pages


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the documentation with the pages that come from the code."""
    root = tmp_path_factory.mktemp("site")
    for path in pages():
        there = root / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    main(root / "docs")
    return root / "docs"


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links, images and anchors of every page exist."""
    assert broken(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A missing file, a missing heading and a missing image are faults; code is not read."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](gone.md) [b](#two) ![c](no.png) [d](#one-thing) [e](page.md#one-thing)\n"
        "[f](https://example.org) `[g](gone.md)`\n```\n[h](gone.md)\n```\n"
    )
    assert len(broken(page)) == 3


def test_every_method_has_its_page(ctx: Path) -> None:
    """Each page has the formula's messages, the costs, the ranges, the laws and the paper."""
    made = {path.stem for path in (ctx / "methods").glob("*.md")}
    assert made == {*METHODS, "index"}
    for name, entry in METHODS.items():
        text = (ctx / "methods" / f"{name}.md").read_text(encoding="utf-8")
        for part in (entry.citation, entry.travels, "| symbol |", "× the model, a round"):
            assert part in text, (name, part)
        for heading in ("## The method", "## Hyper-parameters", "## What is proven"):
            assert heading in text, (name, heading)
        assert text.split("## What is proven")[1].count("\n- ") >= 3, name


def test_links_of_generated_pages_lead_somewhere(ctx: Path) -> None:
    """The pages that come from the code link to pages that exist."""
    made = [*(ctx / "methods").glob("*.md"), ctx / "api.md"]
    assert [fault for path in made for fault in broken(path)] == []


def test_every_page_is_in_the_navigation(ctx: Path) -> None:
    """The index lists every page of the folder, once, and no other."""
    index = (ctx / "index.md").read_text(encoding="utf-8")
    listed = [
        line
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    there = {path.stem for path in ctx.glob("*.md")} - {"index"} | {"methods/index"}
    assert sorted(listed) == sorted(there)
    assert not there & {"search", "genindex"}  # the generator writes pages of these names itself


def test_every_page_has_a_link_on_the_index() -> None:
    """Who reads the folder without the site finds each page from its first one."""
    linked = {target.partition("#")[0] for target in links(ROOT / "docs" / "index.md")}
    kept = {path.name for path in pages() if path.parent.name == "docs"}
    assert kept - linked == {"index.md"}


def test_every_public_name_is_in_the_reference(ctx: Path) -> None:
    """What `import sartor` gives has a heading of its own, and is listed on top."""
    text = (ctx / "api.md").read_text(encoding="utf-8")
    first, modules = text.partition("## ")[0], {"methods", "models"}
    for name in set(sartor.__all__) - {"__version__"}:
        assert f"`{name}`" in first
        if name not in {*modules, "STOP"}:
            assert f"### {name}\n" in text, name


def test_notes_are_of_methods_that_exist() -> None:
    """docs/notes.toml speaks of listed methods alone."""
    from docs.notes import read_notes

    assert set(read_notes()) <= set(METHODS)
