"""Laws of ``sartor doctor``, of ``--version``, completion, and of pages that fit a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sartor import __version__
from sartor.cli import doctor, main
from sartor.cli.doctor import examine, requirements
from sartor.data.datasets import ENVIRONMENT
from sartor.data.layouts import DATASETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder without a data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def test_all_areas_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Every package, data set and extra has its line, and a healthy machine gives 0."""
    assert main(["doctor", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["version"] == __version__
    assert reported["healthy"] is True
    looked = {(one["area"], one["what"]) for one in reported["findings"]}
    needs = requirements()
    assert {("data", name) for name in DATASETS} <= looked
    assert {("Sartor", name) for name in needs[""]} <= looked
    assert {("extras", name) for name in needs if name} <= looked
    assert {"run folders", "temporary files", "data folder", "threads"} <= {w for _, w in looked}


def test_what_is_missing_comes_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing extra is no fault, and the command that installs it is printed."""
    monkeypatch.setattr(doctor, "requirements", lambda: {"": {}, "magic": {"abracadabra": "7"}})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "without abracadabra" in out
    assert "python -m pip install 'sartor[magic]'" in out
    assert "sartor data cifar10" in out


@pytest.mark.parametrize("needs", [{"abracadabra": "1"}, {"numpy": "999.1"}])
def test_a_missing_or_old_package_is_wrong(
    needs: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the fix is named."""
    monkeypatch.setattr(doctor, "requirements", lambda: {"": needs})
    assert main(["doctor"]) == 1
    (name, oldest), *_ = needs.items()
    assert f"python -m pip install '{name}>={oldest}'" in capsys.readouterr().out


def test_a_data_folder_that_is_not_there_is_wrong(tmp_path: Path) -> None:
    """A folder that was named has to exist; none at all is only missing."""
    found = {one.what: one for one in examine(tmp_path / "gone")}
    assert found["data folder"].state == "wrong"
    assert {one.what: one for one in examine()}["data folder"].state == "missing"
    (tmp_path / "there").mkdir()
    assert {one.what: one for one in examine(tmp_path / "there")}["data folder"].state == "ok"


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    """Writing is tried, not guessed."""
    assert doctor._writable("x", tmp_path, "here", "fix").state == "ok"
    assert list(tmp_path.iterdir()) == []
    wrong = doctor._writable("x", tmp_path / "gone", "there", "fix")
    assert (wrong.state, wrong.fix) == ("wrong", "fix")


def test_the_shell_completes_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``sartor re`` TAB gives the commands that begin so, by the protocol of bash."""
    words = {"_SARTOR_COMPLETE": "complete_bash", "COMP_WORDS": "sartor re", "COMP_CWORD": "1"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    main([])
    assert sorted(capsys.readouterr().out.split()) == ["report", "reproduce", "resume"]


def test_help_fits_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first page has at most 30 lines of 80 columns: every command in a line of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.strip("\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 30
