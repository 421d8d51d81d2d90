"""What the documentation shows works: Python blocks run, command lines are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import sartor
from sartor.cli.app import app
from sartor.cli.flags import read_experiment
from tests.docs.pages import ROOT, Block, blocks, pages

DOCTESTS = {"advise.md", "theory.md"}
"""Pages whose examples show what they print; tests of their own compare it."""

ELSEWHERE = {"README.md": "tests/cli/test_readme.py", "CONTRIBUTING.md": "test_contributing.py"}
ELSEWHERE |= dict.fromkeys(("data.md", "using-the-result.md"), "tests/docs/test_blocks.py")
ELSEWHERE |= dict.fromkeys(("training.md", "tuning.md"), "tests/docs/test_training.py")
MOST_NOT_RUN = 3
"""Blocks that may say why they are not run."""

SMALL = {r"\brounds=\d+": "rounds=1", r"\breplacements=\d+": "replacements=2"}
SMALL |= {r"\bclients=20\b": "clients=6"}


def python_pages() -> list[Path]:
    return [p for p in pages() if p.name not in ELSEWHERE and any(map(_runs, blocks(p)))]


def _runs(block: Block) -> bool:
    return block.language == "python" and not block.text.startswith(">>>")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Make the folder and the names that pages take for granted."""
    folder = tmp_path_factory.mktemp("reader")
    data = sartor.Federation.from_dataset("digits", partition="iid", clients=4)
    comparison = sartor.compare(
        ["local", "fedapa"], data, rounds=1, baselines=False, out=folder / "runs" / "demo"
    )
    rng = np.random.default_rng(0)
    for place, label in (("clinics", "outcome"), ("hospitals", "ill")):
        (folder / place).mkdir()
        for name in ("north", "south", "east"):
            rows = "".join(f"{a:.3f},{b:.3f},{int(a > 0)}\n" for a, b in rng.normal(size=(40, 2)))
            (folder / place / f"{name}.csv").write_text(f"age,dose,{label}\n{rows}")
    x, y = data.x[:800], data.y[:800]
    names = {"sartor": sartor, "federation": data, "comparison": comparison}
    names |= {"result": comparison["fedapa"], "x": x, "y": y}
    return folder, names | {"hospital": np.array(["north", "south"])[np.arange(800) % 2]}


@pytest.mark.parametrize("path", python_pages(), ids=lambda path: path.name)
def test_python_runs(
    path: Path, setting: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page run one after the other, with small numbers of rounds and clients."""
    folder, names = setting
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    known = {"__name__": path.stem, **names}
    for block in filter(_runs, blocks(path)):
        if block.not_run is None:
            code = block.text
            for pattern, small in SMALL.items():
                code = re.sub(pattern, small, code)
            padded = "\n" * block.line + code
            exec(compile(padded, str(path), "exec"), known)


def test_few_blocks_are_not_run() -> None:
    """A block that cannot run here says why, and there are few of them."""
    found = [block for path in pages() for block in blocks(path) if block.not_run is not None]
    assert len(found) <= MOST_NOT_RUN
    assert all(len(block.not_run or "") > 10 for block in found)


def test_doctests_have_tests_of_their_own() -> None:
    """Examples with prompts are on the pages that compare what they print."""
    shown = {p.name for p in pages() for b in blocks(p) if b.text.startswith(">>>")}
    assert shown == DOCTESTS


def test_no_block_hides_its_language() -> None:
    """A block that looks like Python is marked as such, and so is run."""
    for path in pages():
        for block in blocks(path):
            if block.language == "":
                assert not re.search(r"^(import|from) \w+", block.text, re.M), (block.page, block)


# ---------------------------------------------------------------------- command lines

COMMAND = re.compile(r"(?:^ *|`| -m )(sartor [^`\n]+)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Return (page, command line) of every line of code that begins with sartor."""
    found = []
    for path in pages():
        for match in COMMAND.finditer(path.read_text(encoding="utf-8")):
            line = re.split(r"\s+#|\s{2,}|\)", match[1])[0].strip()
            if (path.name, line) not in found:
                found.append((path.name, line))
    return found


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Read words with the real command line, without running anything."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("sartor", list(words))
    names = []
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        names.append(str(name))
        context = command.make_context(name, list(rest), parent=context)
    return " ".join(names), dict(context.params)


def is_pattern(line: str) -> bool:
    """Say whether a line stands for many: capitals, dots, brackets or alternatives."""
    return bool(re.search(r"\b[A-Z]{4,}\b|\.\.\.|\[|\|", line))


def test_there_are_commands() -> None:
    """The search finds the lines of the README, the tutorial and the page of commands."""
    found = commands()
    assert len(found) > 50
    assert ("README.md", "sartor run experiment.toml") in found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_read(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line has a command that exists, flags that it takes, and values that can be read."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    shown = re.search(r"```toml\n(# experiment\.toml\n.*?)```", text, re.DOTALL)
    (tmp_path / "experiment.toml").write_text(shown[1] if shown else 'method = "fedavg"\n')
    words = shlex.split(line)[1:]
    if is_pattern(line) or len(words) == 1:  # or the name of a command, in a sentence
        known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        flags = {"--version", "--install-completion"}
        assert set(words[0].split("|")) <= {*known, *flags}
        return
    name, params = parse(words)
    if name in ("run", "compare") and params["target"] != "fedblend":
        own = {"target", "json", "overwrite", "baselines"}
        values = {key: value for key, value in params.items() if key not in own}
        read_experiment(params["target"], values, many=name == "compare")


@pytest.mark.parametrize(
    "line", ["sartor rum fedavg", "sartor run fedavg --round 3", "sartor data --clients"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    """An unknown command, an unknown flag and a flag without its value are faults."""
    with pytest.raises(Exception, match=r"(?i)no such|requires an argument"):
        parse(shlex.split(line)[1:])
