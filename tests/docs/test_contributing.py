"""The five steps of CONTRIBUTING.md, walked as they are written."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sartor
from sartor.methods import METHODS, MethodEntry
from tests.docs.pages import ROOT, blocks

STEPS = [b.text for b in blocks(ROOT / "CONTRIBUTING.md") if b.language == "python"]


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Steps 1 and 2: the file, written and listed; taken back afterwards."""
    path = tmp_path_factory.mktemp("methods") / "fedblend.py"
    path.write_text(STEPS[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("fedblend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fedblend"] = module
    spec.loader.exec_module(module)
    names = {"METHODS": METHODS, "MethodEntry": MethodEntry, "fedblend": module.fedblend}
    exec(STEPS[1], names)
    yield module
    del METHODS["fedblend"], sys.modules["fedblend"]


def test_there_are_five_steps() -> None:
    """Each step has one block of code."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [text.count(f"**{n}. ") for n in range(1, 7)] == [1, 1, 1, 1, 1, 0]
    assert len(STEPS) == 5


def test_step_3_it_runs(listed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep of the text trains, and its three rows differ."""
    names = {"sartor": sartor}
    exec(STEPS[2], names)
    result = names["result"]
    assert isinstance(result, sartor.Result)
    assert len(set(result.scores["pre", "test"].loss[:, -1].sum(-1).tolist())) == 3
    assert "fedblend" in capsys.readouterr().out


def test_step_4_it_honours_the_laws(listed: ModuleType, tmp_path: Path) -> None:
    """All laws hold, by the line of the text."""
    exec(STEPS[3], {"folder": tmp_path})


def test_step_5_its_own_law_holds(listed: ModuleType) -> None:
    """The test of the text passes."""
    names: dict[str, object] = {}
    exec(STEPS[4], names)
    tests = [v for k, v in names.items() if k.startswith("test_") and callable(v)]
    assert len(tests) == 1
    tests[0]()
