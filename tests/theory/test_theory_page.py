"""The page about the theory names what exists, leaves nothing new out, and runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
NAMED = sorted(set(re.findall(r"`([a-z_]+)\.([A-Za-z_0-9]+)`", PAGE.read_text("utf-8"))))
COVERED = ("excess_risk", "lemmas", "stability", "statistical", "tables", "two_stage_risk")


@pytest.mark.parametrize(("module", "name"), [pair for pair in NAMED if pair[0] != "sartor"])
def test_what_the_page_names_exists(module: str, name: str) -> None:
    """Every `module.function` of the page is one of sartor.theory, with a docstring."""
    found = getattr(importlib.import_module(f"sartor.theory.{module}"), name)
    assert callable(found)
    assert found.__doc__


@pytest.mark.parametrize("module", COVERED)
def test_the_page_names_every_statement(module: str) -> None:
    """No public function of these modules is missing from the table."""
    home = importlib.import_module(f"sartor.theory.{module}")
    own = {
        name
        for name, thing in inspect.getmembers(home, inspect.isfunction)
        if thing.__module__ == home.__name__ and not name.startswith("_")
    }
    assert len(own) >= 3
    assert own <= {name for where, name in NAMED if where == module}


def test_the_example_of_the_page_runs() -> None:
    """The fenced examples give what they show."""
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=flags, encoding="utf-8")
    assert found.attempted > 10
    assert found.failed == 0
