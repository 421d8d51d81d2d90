"""The help of a command fits a screen, and what it leaves out is one flag away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from sartor.cli import main
from sartor.cli.app import app
from sartor.cli.config import Experiment
from sartor.cli.flags import COLUMNS, LINES, rare_flags
from sartor.training.schema import flag, flag_tables

ROOT: Any = get_command(app)
COMMANDS = [[], *([name] for name in ROOT.commands)]
COMMANDS += [["keys", name] for name in ROOT.commands["keys"].commands]
SHORT = {
    name: command
    for name, command in ROOT.commands.items()
    if any("--help-all" in param.opts for param in command.params)
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a line at 100 columns and gives what it printed."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", COLUMNS)  # read once, by whoever came first

    def run(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    return run


def flags_of(command: Any) -> dict[str, str]:
    """The first spelling of every flag of a command, by its name."""
    return {p.name: p.opts[0] for p in command.params if p.opts[0].startswith("--")}


def flags_in(text: str) -> set[str]:
    """The flags that lines of a page of help begin with."""
    return set(re.findall(r"^│ (?:\*  |   )? *(--[a-z-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_fits_a_screen(page: Any, words: list[str]) -> None:
    """No page of help has more than 40 lines of 100 columns."""
    lines = page(*words, "--help").strip("\n").splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


def test_which_commands_have_two_pages() -> None:
    """Those with the flags of an experiment, and no others."""
    assert set(SHORT) == {"run", "compare", "search", "advise"}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_what_the_help_leaves_out_is_on_the_second_page(page: Any, name: str) -> None:
    """--help-all names every flag of the command; --help names all but the rare ones."""
    short, whole = flags_in(page(name, "--help")), flags_in(page(name, "--help-all"))
    every = flags_of(SHORT[name])
    assert whole == {*every.values(), "--help"}
    assert whole - short == {every[key] for key in rare_flags() if key in every}
    assert {"--data", "--label", "--rounds", "--out", "--help-all"} <= short
    assert f"{len(whole - short)} that are needed rarely" in " ".join(page(name, "--help").split())


def test_a_page_of_help_hides_nothing_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    """After --help the flags are as before: the shell completes them and they can be given."""
    command = SHORT["run"]
    with pytest.raises(SystemExit):
        command.main(["--help"], prog_name="run")
    assert "--no-do-no-harm" not in capsys.readouterr().out
    context = command.make_context("run", ["local"], resilient_parsing=True)
    offered = {item.value for item in command.shell_complete(context, "--")}
    assert {flag(key) for key in rare_flags()} <= offered
    with pytest.raises(SystemExit):
        command.main(["--help-all"], prog_name="run")
    assert "--no-do-no-harm" in capsys.readouterr().out


def test_defaults_are_shown_as_they_are_typed(page: Any) -> None:
    """A default of several values is written with commas; an empty one is not written."""
    text = page("run", "--help-all")
    assert "(pre,post)" in text
    assert "(())" not in text


DOCS = Path(__file__).parents[2] / "docs"


def test_every_flag_of_every_command_is_documented() -> None:
    """The page of commands, or that of federations over a network, speaks of it."""
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("cli.md", "deploy.md"))
    leaves = {name: c for name, c in ROOT.commands.items() if not hasattr(c, "commands")}
    leaves |= {f"keys {name}": c for name, c in ROOT.commands["keys"].commands.items()}
    missing = [
        f"{name} {word}"
        for name, command in leaves.items()
        for word in flags_of(command).values()
        if not re.search(rf"{word}(?![\w-])|--no-{word[2:]}(?![\w-])", text)
    ]
    assert missing == []


def test_the_table_of_flags_is_that_of_the_help() -> None:
    """One row for every key of an experiment, in the words and the order of --help-all."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert flag_tables() in text
    rows = dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.*) \|$", flag_tables(), re.MULTILINE))
    reported = {
        flag(p.name): p.help
        for p in ROOT.commands["run"].params
        if p.name in Experiment.model_fields
    }
    assert rows == reported
